#include "cpu/program.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include "core/require.h"
#include "core/text_map.h"

namespace jattn::cpu {
namespace {

constexpr size_t kMaxTextBytes = size_t{1} << 20;
constexpr int32_t kMaxRegisters = 1024;
constexpr int32_t kNumArguments = kKeyRegister + 1;

struct Operation {
  InstructionKernel run[kNumProgramSets];
  int num_operands, num_numbers, lane_bytes;
};

std::string name_of(const ProgramOperation& operation) {
  std::string name = operation.name;
  for (const char* word : {operation.type, operation.second_type}) {
    if (*word != 0) name += std::string(".") + word;
  }
  return name;
}

const OperationGroup* groups_of(int set) {
#if defined(__x86_64__)
  if (set == kProgramAvx2) return kAvx2Operations;
  if (set == kProgramAvx512) return kAvx512Operations;
#endif
  static_cast<void>(set);
  return kBaselineOperations;
}

const TextMap<Operation>& operations() {
  static const TextMap<Operation>* const map = [] {
    auto* made = new TextMap<Operation>;
    for (int set = 0; set < kNumProgramSets; ++set) {
      for (const OperationGroup* group = groups_of(set); group->count > 0; ++group) {
        for (int64_t i = 0; i < group->count; ++i) {
          const ProgramOperation& from = group->operations[i];
          Operation& to = (*made)[name_of(from)];
          to.run[set] = from.run;
          to.num_operands = from.num_operands;
          to.num_numbers = from.num_numbers;
          to.lane_bytes = from.lane_bytes;
        }
      }
    }
    return made;
  }();
  return *map;
}

// The words of a text, one after another.
class Words {
 public:
  explicit Words(std::string_view text) : rest_(text) {}

  bool at_end() const { return rest_.empty(); }
  // Whether a statement ends here, which is then passed over.
  bool ends_statement() {
    if (!rest_.starts_with(';')) return false;
    rest_.remove_prefix(1);
    return true;
  }
  std::string_view word() {
    if (rest_.starts_with(' ')) rest_.remove_prefix(1);
    const size_t end = std::min(rest_.find_first_of(" ;"), rest_.size());
    const std::string_view found = rest_.substr(0, end);
    JATTN_REQUIRE(!found.empty(), "score program: a word is missing before '", rest_.substr(0, 20), "'");
    rest_.remove_prefix(end);
    return found;
  }
  int64_t number(int64_t least, int64_t most) {
    const std::string_view text = word();
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    JATTN_REQUIRE(error == std::errc() && end == text.data() + text.size() && least <= value && value <= most,
                  "score program: '", text, "' stands where a number from ", least, " to ", most, " must be");
    return value;
  }
  void end_statement() {
    JATTN_REQUIRE(ends_statement(), "score program: a statement does not end before '", rest_.substr(0, 20), "'");
  }

 private:
  std::string_view rest_;
};

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

// A program and what it points to.
struct OwnedProgram {
  Program program{};
  std::vector<Instruction> sections[4];
  std::vector<Spread> query_spreads, key_spreads;
  std::vector<std::vector<int64_t>> numbers;
  std::vector<List<int64_t>> tables;
  std::vector<CaptureRead> reads;
};

template <typename T>
List<T> list_of(const std::vector<T>& items) {
  return {items.data(), static_cast<int64_t>(items.size())};
}

class Reader {
 public:
  explicit Reader(std::string_view text) : words_(text) {}

  std::unique_ptr<const OwnedProgram> read() {
    JATTN_REQUIRE(words_.word() == "score", "score program: it must begin with 'score'");
    const std::string_view type = words_.word();
    JATTN_REQUIRE(type == "float32" || type == "float64", "score program: its score is ", type,
                  ", must be float32 or float64");
    program_.is_double = type == "float64";
    lane_bytes_ = program_.is_double ? 8 : 4;
    program_.num_registers = static_cast<int32_t>(words_.number(kNumArguments, kMaxRegisters));
    program_.result = read_register();
    program_.slope = static_cast<int32_t>(words_.number(-1, program_.num_registers - 1));
    words_.end_statement();
    while (!words_.at_end()) read_statement();
    program_.slot_bytes = kProgramLanes * lane_bytes_;
    program_.registers_bytes = program_.num_registers * program_.slot_bytes;
    for (int section = 0; section < 4; ++section) program_.sections[section] = list_of(owned_->sections[section]);
    program_.query_spreads = list_of(owned_->query_spreads);
    program_.key_spreads = list_of(owned_->key_spreads);
    for (const std::vector<int64_t>& table : owned_->numbers) owned_->tables.push_back(list_of(table));
    program_.tables = list_of(owned_->tables);
    program_.reads = list_of(owned_->reads);
    return std::move(owned_);
  }

 private:
  int32_t read_register() { return static_cast<int32_t>(words_.number(0, program_.num_registers - 1)); }

  static int32_t read_section(std::string_view word) {
    const size_t section = std::string_view("UQKP").find(word);
    JATTN_REQUIRE(word.size() == 1 && section != std::string_view::npos, "score program: '", word,
                  "' is no kind of statement");
    return static_cast<int32_t>(section);
  }

  int32_t read_lane_bytes() {
    const int64_t bytes = words_.number(1, 8);
    JATTN_REQUIRE((bytes & (bytes - 1)) == 0, "score program: lanes of ", bytes, " bytes");
    lane_bytes_ = std::max(lane_bytes_, bytes);
    return static_cast<int32_t>(bytes);
  }

  void read_statement() {
    const std::string_view word = words_.word();
    if (word == "table") {
      read_lane_bytes();
      std::vector<int64_t>& table = owned_->numbers.emplace_back();
      do {
        table.push_back(words_.number(-kAny - 1, kAny));
      } while (!words_.ends_statement());
      return;
    }
    if (word == "gradient") {
      const int32_t section = read_section(words_.word());
      const int32_t place = read_register(), derivative = read_register();
      owned_->reads.push_back({section, place, derivative});
    } else if (word == "q" || word == "k") {
      const int32_t bytes = read_lane_bytes();
      const int32_t to = read_register(), from = read_register();
      JATTN_REQUIRE(to != from, "score program: '", word, "' spreads a register to itself");
      (word == "q" ? owned_->query_spreads : owned_->key_spreads).push_back({to, from, bytes});
    } else {
      const int32_t section = read_section(word);
      owned_->sections[section].push_back(read_instruction());
    }
    words_.end_statement();
  }

  Instruction read_instruction() {
    const std::string_view name = words_.word();
    const auto found = operations().find(name);
    JATTN_REQUIRE(found != operations().end(), "score program: there is no operation ", name,
                  "; was it written by another version of jattn?");
    const Operation& operation = found->second;
    lane_bytes_ = std::max<int64_t>(lane_bytes_, operation.lane_bytes);
    Instruction instruction{};
    for (int set = 0; set < kNumProgramSets; ++set) instruction.run[set] = operation.run[set];
    instruction.to = read_register();
    for (int i = 0; i < operation.num_operands; ++i) {
      instruction.from[i] = read_register();
      // Loops are compiled for vectors that do not overlap.
      JATTN_REQUIRE(instruction.from[i] != instruction.to, "score program: ", name, " writes to its operand");
    }
    if (name.starts_with("read.")) {
      instruction.numbers[0] = words_.number(0, kMaxCaptures - 1);
      program_.num_captures = std::max(program_.num_captures, static_cast<int32_t>(instruction.numbers[0]) + 1);
    } else if (name.starts_with("lookup.")) {
      instruction.numbers[0] = words_.number(0, static_cast<int64_t>(owned_->numbers.size()) - 1);
    } else if (name == "reduce_precision.float32") {
      instruction.numbers[0] = words_.number(1, 8);
      instruction.numbers[1] = words_.number(0, 23);
    } else if (operation.num_numbers > 0) {
      instruction.numbers[0] = words_.number(-kAny - 1, kAny);
    }
    return instruction;
  }

  Words words_;
  std::unique_ptr<OwnedProgram> owned_ = std::make_unique<OwnedProgram>();
  Program& program_ = owned_->program;
  int64_t lane_bytes_ = 4;
};

struct Store {
  std::shared_mutex mutex;
  TextMap<std::unique_ptr<const OwnedProgram>> programs;
};

Store& store() {
  static Store* instance = new Store;  // never destroyed: threads of the runtime may outlive static objects
  return *instance;
}

}  // namespace

std::vector<std::string> program_operations() {
  std::vector<std::string> names;
  for (const auto& [name, operation] : operations()) names.push_back(name);
  return names;
}

const Program& find_program(std::string_view text) {
  Store& s = store();
  {
    const std::shared_lock lock(s.mutex);
    if (const auto found = s.programs.find(text); found != s.programs.end()) return found->second->program;
  }
  JATTN_REQUIRE(text.size() <= kMaxTextBytes, "score program: ", text.size(), " bytes, must be at most ",
                kMaxTextBytes);
  auto program = Reader(text).read();
  const std::unique_lock lock(s.mutex);
  return s.programs.emplace(text, std::move(program)).first->second->program;
}

void check_captures(const Problem& problem, const Program& program) {
  for (int32_t i = 0; i < program.num_captures; ++i) {
    JATTN_REQUIRE(problem.captures[i] != nullptr, "score program: capture ", i, " is missing");
  }
  JATTN_REQUIRE(program.is_double == (problem.dtype == DType::kF64),
                "score program: its score is not of the type of the problem's");
}

}  // namespace jattn::cpu
