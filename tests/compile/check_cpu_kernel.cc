// Checks the CPU kernel where there is no Python, such as under an emulator: forward and backward passes of a few
// problems and of random ones, in every element type and on every instruction set of the machine, against plain loops
// over doubles.
//
// Inputs are numbers of eight bits, so they are the same in every type. What may hold anything holds NaN: rows that are
// padding, scratch memory, results before they are written. Every pass runs on one thread and on three, with the same
// bits, with the largest numbers in keys and values that no query sees, and whatever its memory held before.
//
// Prints a line for each instruction set, and one for each tensor that is wrong; the exit status is 1 if there is any.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "cpu/attention.h"
#include "cpu/kernel_table.h"
#include "cpu/plan.h"
#include "cpu/touch.h"
#include "plain_attention.h"

namespace jattn::check {
namespace {

struct Type {
  const char* name;
  DType dtype;
  int mantissa_bits, exponent_bits;

  // Half of the distance from 1 to the next number.
  double unit() const { return std::ldexp(0.5, -mantissa_bits); }
  double largest() const { return std::ldexp(2 - 2 * unit(), (1 << (exponent_bits - 1)) - 1); }
  int64_t bytes() const { return size_bytes(dtype); }
};

constexpr Type kTypes[] = {
    {"float32", DType::kF32, 23, 8},
    {"float16", DType::kF16, 10, 5},
    {"bfloat16", DType::kBF16, 7, 8},
    {"float64", DType::kF64, 52, 11},
};

// Of a number that the type holds exactly, or NaN.
uint16_t half_bits(const Type& type, double value) {
  const int bias = (1 << (type.exponent_bits - 1)) - 1, least = 1 - bias;  // the exponent of subnormals
  const uint32_t sign = std::signbit(value) ? 0x8000u : 0;
  if (std::isnan(value)) return 0x7fff;
  if (value == 0) return static_cast<uint16_t>(sign);
  const int exponent = std::max(std::ilogb(value), least);
  const auto digits = static_cast<uint32_t>(std::ldexp(std::abs(value), type.mantissa_bits - exponent));
  // The leading digit of a normal number adds one to the exponent field.
  return static_cast<uint16_t>(sign | ((static_cast<uint32_t>(exponent - least) << type.mantissa_bits) + digits));
}

double half_value(const Type& type, uint16_t bits) {
  const int fields = (1 << type.exponent_bits) - 1, field = bits >> type.mantissa_bits & fields;
  const int fraction = bits & ((1 << type.mantissa_bits) - 1), hidden = field != 0 ? 1 << type.mantissa_bits : 0;
  if (field == fields) return fraction != 0 ? std::nan("") : bits & 0x8000 ? -HUGE_VAL : HUGE_VAL;
  const double magnitude = std::ldexp(fraction + hidden, std::max(field, 1) - fields / 2 - type.mantissa_bits);
  return bits & 0x8000 ? -magnitude : magnitude;
}

// What memory is full of before it is used, byte for byte: NaN; 3e9, in float64 1e74; 0.
enum Stale : int { kNaN = 0xff, kLarge = 0x4f, kZero = 0 };

// 64-byte aligned.

class Memory {
 public:
  explicit Memory(int64_t bytes = 0, Stale stale = kNaN) : bytes_(bytes) {
    constexpr int64_t kAlignment = 64;
    const int64_t whole_lines = (bytes + kAlignment) / kAlignment * kAlignment;
    data_.reset(static_cast<char*>(std::aligned_alloc(kAlignment, static_cast<size_t>(whole_lines))));
    std::memset(data_.get(), stale, static_cast<size_t>(whole_lines));
  }
  void* data() const { return data_.get(); }
  cpu::Scratch scratch() const { return {data(), bytes_}; }
  bool operator==(const Memory& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data(), other.data(), static_cast<size_t>(bytes_)) == 0;
  }

 private:
  struct Free {
    void operator()(char* data) const { std::free(data); }
  };
  std::unique_ptr<char, Free> data_;
  int64_t bytes_;
};

Memory stored(const Type& type, const std::vector<double>& values) {
  Memory memory(static_cast<int64_t>(values.size()) * type.bytes());
  for (size_t i = 0; i < values.size(); ++i) {
    if (type.dtype == DType::kF64) {
      static_cast<double*>(memory.data())[i] = values[i];
    } else if (type.dtype == DType::kF32) {
      static_cast<float*>(memory.data())[i] = static_cast<float>(values[i]);
    } else {
      static_cast<uint16_t*>(memory.data())[i] = half_bits(type, values[i]);
    }
  }
  return memory;
}

double value_at(const Type& type, const Memory& memory, size_t i) {
  if (type.dtype == DType::kF64) return static_cast<const double*>(memory.data())[i];
  if (type.dtype == DType::kF32) return static_cast<const float*>(memory.data())[i];
  return half_value(type, static_cast<const uint16_t*>(memory.data())[i]);
}

class Random {
 public:
  uint32_t below(uint32_t limit) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 33) % limit;
  }
  // Of eight bits, below 2; a few are subnormal in float16.
  double number() {
    const double value = (static_cast<int>(below(511)) - 255) / 128.0;
    return below(64) == 0 ? std::ldexp(value, -17) : value;
  }

 private:
  uint64_t state_ = 1;
};

// A problem, before it has arrays.
struct Extents {
  int64_t batch, q_len, kv_len, num_heads, num_kv_heads, head_dim, head_dim_v;
};
struct Case {
  std::string name;
  Extents extents;
  int64_t band_left = kUnbounded, band_right = kUnbounded;
  bool lower_right = false, lengths = false, segments = false, positions = false;
  bool bias = false, mask = false, sinks = false, slopes = false;
  double softcap = 0;
  float dropout_rate = 0;
};

const std::vector<Case> kCases = {
    {.name = "full", .extents = {1, 150, 200, 2, 2, 72, 72}},
    {.name = "causal", .extents = {2, 67, 131, 4, 2, 37, 21}, .band_right = 0, .lower_right = true},
    {.name = "unseen keys", .extents = {2, 70, 200, 2, 1, 40, 40}, .band_right = 0},
    {.name = "window", .extents = {1, 130, 130, 2, 2, 64, 64}, .band_left = 20, .band_right = 5},
    {.name = "segments", .extents = {2, 90, 90, 2, 1, 33, 40}, .band_right = 0, .segments = true},
    {.name = "lengths", .extents = {3, 70, 100, 2, 2, 17, 64}, .band_right = 0, .lower_right = true, .lengths = true},
    {.name = "bias", .extents = {2, 50, 90, 2, 2, 24, 24}, .bias = true, .softcap = 1.5},
    {.name = "positions",
     .extents = {1, 66, 80, 3, 3, 40, 24},
     .band_left = 50,
     .positions = true,
     .mask = true,
     .sinks = true,
     .slopes = true},
    {.name = "dropout", .extents = {2, 70, 140, 2, 2, 32, 32}, .dropout_rate = 0.3f},
    {.name = "few queries", .extents = {2, 3, 1100, 4, 1, 56, 50}, .lengths = true},
    {.name = "many keys", .extents = {1, 20, 1100, 1, 1, 31, 31}},
    {.name = "causal tiles", .extents = {1, 140, 300, 2, 1, 64, 64}, .band_right = 0, .lower_right = true},
    {.name = "causal lengths", .extents = {3, 140, 140, 2, 2, 32, 50}, .band_right = 0, .lengths = true},
    {.name = "window of tiles", .extents = {1, 200, 230, 2, 1, 48, 32}, .band_left = 37, .band_right = 25},
    {.name = "window before", .extents = {1, 200, 230, 2, 1, 40, 64}, .band_left = 150, .band_right = -30},
    {.name = "long rows", .extents = {1, 200, 2150, 1, 1, 64, 70}, .band_right = 0, .lower_right = true},
    {.name = "heads in a tile", .extents = {1, 20, 170, 4, 1, 40, 40}, .band_right = 0, .lower_right = true},
};

// Features drawn at random, each in a third of the cases or so.
std::vector<Case> drawn_cases(int count) {
  Random random;
  const auto up_to = [&](uint32_t most) { return int64_t{1} + random.below(most); };
  const auto happens = [&] { return random.below(3) == 0; };
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) {
    Case& c = cases.emplace_back();
    c.name = "drawn " + std::to_string(i);
    const int64_t kv_heads = up_to(2);
    c.extents = {up_to(2), up_to(150), up_to(220), kv_heads * up_to(3), kv_heads, up_to(72), up_to(72)};
    if (happens()) c.band_left = up_to(120) - 20;
    if (happens()) c.band_right = up_to(100) - 40;
    c.lower_right = happens(), c.lengths = happens(), c.segments = happens(), c.positions = happens();
    c.bias = happens(), c.mask = happens(), c.sinks = happens(), c.slopes = happens();
    if (happens()) c.softcap = 1.5;
    if (happens()) c.dropout_rate = 0.3f;
  }
  return cases;
}

// The arrays of a case, with doubles where the problem has elements of its type.
class Operands {
 public:
  explicit Operands(const Case& c) {
    const Extents& e = c.extents;
    p.batch = e.batch, p.q_len = e.q_len, p.kv_len = e.kv_len, p.num_heads = e.num_heads;
    p.num_kv_heads = e.num_kv_heads, p.head_dim = e.head_dim, p.head_dim_v = e.head_dim_v;
    p.dtype = DType::kF64, p.scale = 1 / std::sqrt(static_cast<double>(e.head_dim)), p.softcap = c.softcap;
    p.band_left = c.band_left, p.band_right = c.band_right, p.lower_right = c.lower_right;
    if (c.lengths) {
      p.q_lengths = indices(q_lengths_, e.batch, [&](int64_t i) { return i == 0 ? e.q_len : e.q_len * i / 3; });
      p.kv_lengths = indices(kv_lengths_, e.batch, [&](int64_t i) { return e.kv_len * (5 - i) / 6; });
    }
    if (c.segments) {
      const auto id = [](int64_t i) { return i % 90 < 80 ? i / 13 : -1; };
      p.q_segments = indices(q_segments_, e.batch * e.q_len, id);
      p.kv_segments = indices(kv_segments_, e.batch * e.kv_len, id);
    }
    if (c.positions) {
      p.q_positions = indices(q_positions_, e.batch * e.q_len, [](int64_t i) { return i * 2; });
      p.kv_positions = indices(kv_positions_, e.batch * e.kv_len, [&](int64_t) { return random_.below(200); });
    }
    q_ = rows(e.q_len, e.num_heads, e.head_dim, p.q_lengths, p.q_segments);
    k_ = rows(e.kv_len, e.num_kv_heads, e.head_dim, p.kv_lengths, p.kv_segments);
    v_ = rows(e.kv_len, e.num_kv_heads, e.head_dim_v, p.kv_lengths, p.kv_segments);
    dout = rows(e.q_len, e.num_heads, e.head_dim_v, p.q_lengths, p.q_segments);
    dlse = numbers(e.batch * e.num_heads * e.q_len);
    p.q = q_.data(), p.k = k_.data(), p.v = v_.data();
    const int64_t pairs = e.q_len * e.kv_len;
    if (c.bias) {
      bias = numbers(e.num_heads * pairs);  // one for all batch entries
      p.bias = {bias.data(), DType::kF64, 0, pairs, e.kv_len, 1};
    }
    if (c.mask) {
      mask_.resize(static_cast<size_t>(e.batch * pairs));
      for (uint8_t& byte : mask_) byte = random_.below(4) != 0;
      p.mask = {mask_.data(), DType::kF32, pairs, 0, e.kv_len, 1};
    }
    if (c.sinks) p.sinks = {floats(sinks_, e.num_heads, 1.0f), 0, 1};
    if (c.slopes) p.alibi_slopes = {floats(slopes_, e.num_heads, 0.0625f), 0, 1};
    if (c.dropout_rate > 0) {
      for (int64_t i = 0; i < 2 * e.batch * e.num_heads; ++i) dropout_keys_.push_back(random_.below(1u << 31) * 2 + 1);
      dropout_rate_ = c.dropout_rate;
      p.dropout_keys = {dropout_keys_.data(), 2 * e.num_heads, 2};
      p.dropout_rate = {&dropout_rate_, 0, 0};
    }
  }
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;

  Solution solve() const { return check::solve(p, dout.data(), dlse.data(), static_cast<int64_t>(bias.size())); }

  Problem p;
  std::vector<double> dout, dlse, bias;

 private:
  std::vector<double> numbers(int64_t count) {
    std::vector<double> made(static_cast<size_t>(count));
    for (double& number : made) number = random_.number();
    return made;
  }

  std::vector<double> rows(int64_t length, int64_t heads, int64_t dim, const int32_t* lengths,
                           const int32_t* segments) {
    std::vector<double> made = numbers(p.batch * length * heads * dim);
    for (int64_t row = 0; row < p.batch * length; ++row) {
      const bool is_padding =
          row % length >= bounded_length(lengths, row / length, length) || (segments != nullptr && segments[row] < 0);
      if (is_padding) std::fill_n(made.begin() + row * heads * dim, heads * dim, std::nan(""));
    }
    return made;
  }

  template <typename Make>
  const int32_t* indices(std::vector<int32_t>& to, int64_t count, const Make& make) {
    for (int64_t i = 0; i < count; ++i) to.push_back(static_cast<int32_t>(make(i)));
    return to.data();
  }

  const float* floats(std::vector<float>& to, int64_t count, float largest) {
    for (int64_t i = 0; i < count; ++i) to.push_back(largest / static_cast<float>(i + 1));
    return to.data();
  }

  Random random_;
  std::vector<double> q_, k_, v_;
  std::vector<int32_t> q_lengths_, kv_lengths_, q_segments_, kv_segments_, q_positions_, kv_positions_;
  std::vector<uint8_t> mask_;
  std::vector<float> sinks_, slopes_;
  std::vector<uint32_t> dropout_keys_;
  float dropout_rate_ = 0;
};

cpu::Threads threads_of(int64_t count, Stale stale) {
  return {count, [=](int64_t size, int64_t thread_bytes, const std::function<void(int64_t)>& body) {
            std::atomic<int64_t> next{0};
            const auto work = [&] {
              if (!cpu::reserve_thread_memory(thread_bytes)) throw std::bad_alloc();
              void* const memory = cpu::thread_memory(thread_bytes);
              cpu::open_bytes(memory, thread_bytes);
              std::memset(memory, stale, static_cast<size_t>(thread_bytes));
              for (int64_t i; (i = next++) < size;) body(i);
            };
            std::vector<std::thread> others;
            for (int64_t i = 1; i < count; ++i) others.emplace_back(work);
            work();
            for (std::thread& other : others) other.join();
          }};
}

struct Results {
  Memory out, lse, dq, dk, dv, dbias, dslopes;

  bool operator==(const Results&) const = default;
};

// What keys and values hold that no query sees.
enum class Unseen { kAsGiven, kLargest };

// Scratch as this machine wants it, or as a program brings it that was compiled where there is no matrix unit.
enum class Room { kWanted, kForVectors };

Results run(const Operands& operands, const Solution& solution, const Type& type, int64_t num_threads,
            Unseen unseen = Unseen::kAsGiven, Stale stale = kNaN, Room room = Room::kWanted) {
  Problem p = operands.p;
  const size_t queries = operands.p.batch * p.q_len * p.num_heads, keys = p.batch * p.kv_len * p.num_kv_heads;
  const auto typed = [&](const void* doubles, size_t count) {
    const auto* begin = static_cast<const double*>(doubles);
    return stored(type, {begin, begin + count});
  };
  const Type& lse_type = type.dtype == DType::kF64 ? type : kTypes[0];
  const auto typed_keys = [&](const void* doubles, size_t dim) {
    const auto* begin = static_cast<const double*>(doubles);
    std::vector<double> values(begin, begin + keys * dim);
    for (size_t i = 0; unseen == Unseen::kLargest && i < values.size(); ++i) {
      if (!solution.is_seen[i / dim]) values[i] = std::copysign(type.largest(), values[i]);
    }
    return stored(type, values);
  };
  const Memory q = typed(p.q, queries * p.head_dim), bias = stored(type, operands.bias);
  const Memory k = typed_keys(p.k, p.head_dim), v = typed_keys(p.v, p.head_dim_v);
  const Memory dout = stored(type, operands.dout), dlse = stored(lse_type, operands.dlse);
  p.dtype = type.dtype, p.q = q.data(), p.k = k.data(), p.v = v.data();
  if (p.bias.data != nullptr) p.bias.data = bias.data(), p.bias.dtype = type.dtype;

  const auto empty = [&](const std::vector<double>& like, const Type& of) {
    return Memory(static_cast<int64_t>(like.size()) * of.bytes());
  };
  Results r{empty(solution.out, type),        empty(solution.lse, lse_type), empty(solution.dq, type),
            empty(solution.dk, type),         empty(solution.dv, type),      empty(solution.dbias, type),
            empty(solution.dslopes, lse_type)};
  const cpu::Threads threads = threads_of(num_threads, stale);
  const bool all = room == Room::kWanted;
  const Memory forward_scratch(all ? cpu::forward_scratch_bytes(p) : cpu::plan_forward(p, false).scratch_bytes, stale);
  bool had_room = cpu::forward(p, {r.out.data(), r.lse.data()}, forward_scratch.scratch(), threads);
  BackwardBuffers buffers{r.out.data(), r.lse.data(), dout.data(), dlse.data(), r.dq.data(), r.dk.data(), r.dv.data()};
  if (p.bias.data != nullptr) buffers.dbias = r.dbias.data();
  if (p.alibi_slopes.data != nullptr) buffers.dslopes = r.dslopes.data(), buffers.dslopes_parts = 1;
  const bool wants_dbias = buffers.dbias != nullptr;
  const Memory backward_scratch(
      all ? cpu::backward_scratch_bytes(p, wants_dbias) : cpu::plan_backward(p, wants_dbias, false).scratch_bytes,
      stale);
  had_room = cpu::backward(p, buffers, backward_scratch.scratch(), threads) && had_room;
  if (!had_room) std::printf("the scratch memory is too small\n"), std::exit(1);
  return r;
}

// How far results may be off, as a share of the largest of these sizes: eight units of the type for the steps of a
// pass, and the random walk of a sum of `terms` in the type of sums; in float64 twice that, for the loops round as
// well.
double error_limit(const Type& type, const std::vector<double>& sizes, int64_t terms) {
  double largest = 0;
  for (const double size : sizes) largest = std::isfinite(size) ? std::max(largest, std::abs(size)) : largest;
  const bool is_double = type.dtype == DType::kF64;
  const double walk = std::sqrt(static_cast<double>(terms)) * std::min(type.unit(), kTypes[0].unit());
  return (is_double ? 2 : 1) * (8 * type.unit() + walk) * largest;
}

// The largest error over its limit; infinite where an element must be exactly 0 or infinite and is not. `reached` tells
// of `row_size` elements at a time whether any pair contributes to them.
double error_ratio(const Type& type, const Memory& got, const std::vector<double>& want, double limit,
                   const std::vector<bool>* reached, size_t row_size) {
  double worst = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double value = value_at(type, got, i);
    if (std::isinf(want[i]) || (reached != nullptr && !(*reached)[i / row_size])) {
      if (value != want[i]) return HUGE_VAL;
      continue;
    }
    if (value == want[i]) continue;  // all of them are 0 where no query sees a key
    const double ratio = std::abs(value - want[i]) / limit;
    if (!(ratio <= worst)) worst = std::isnan(ratio) ? HUGE_VAL : ratio;
  }
  return worst;
}

// Whether the matrix unit leaves a problem of float32, which it takes in planes, to vectors for want of scratch.
bool leaves_to_vectors(const Operands& operands, const Solution& solution) {
  const Type& type = kTypes[0];
  const Results wanted = run(operands, solution, type, 1);
  const Results little = run(operands, solution, type, 1, Unseen::kAsGiven, kNaN, Room::kForVectors);
  cpu::force_instruction_set("avx512");
  const Results by_vectors = run(operands, solution, type, 1);
  cpu::force_instruction_set("amx");
  return little == by_vectors && !(little == wanted);
}

// The worst ratio of the tensors; complains about those that are wrong.
double check_case(const Case& c, const Operands& operands, const Solution& want, const Type& type) {
  const Problem& p = operands.p;
  const Results got = run(operands, want, type, 1);
  const auto complain = [&](const char* what, double ratio) {
    std::printf("%s, %s, %s: %s, error over limit %.3g\n", cpu::active_instruction_set().c_str(), c.name.c_str(),
                type.name, what, ratio);
    return HUGE_VAL;
  };
  const Type& lse_type = type.dtype == DType::kF64 ? type : kTypes[0];
  const size_t dim = p.head_dim, dim_v = p.head_dim_v;
  const struct {
    const char* name;
    const Type& type;
    const Memory& got;
    const std::vector<double>&want, &sizes;
    const std::vector<bool>* reached;
    size_t row_size;
  } tensors[] = {
      {"out", type, got.out, want.out, want.out, &want.sees, dim_v},
      {"lse", lse_type, got.lse, want.lse, want.lse, nullptr, 1},
      {"dq", type, got.dq, want.dq, want.dq, &want.sees, dim},
      {"dk", type, got.dk, want.dk, want.dk, &want.is_seen, dim},
      {"dv", type, got.dv, want.dv, want.dv, &want.is_seen, dim_v},
      {"dbias", type, got.dbias, want.dbias, want.dbias, nullptr, 1},
      {"dslopes", lse_type, got.dslopes, want.dslopes, want.dslopes_sizes, nullptr, 1},
  };
  const int64_t terms = std::max({p.q_len * p.group_size(), p.kv_len, p.head_dim, p.head_dim_v});
  double worst = 0;
  for (const auto& tensor : tensors) {
    // Terms of dslopes are made of what has the problem's type, whatever it is stored in, and mostly cancel.
    const bool is_of_slopes = &tensor.want == &want.dslopes;
    const double limit = error_limit(is_of_slopes ? type : tensor.type, tensor.sizes, terms);
    const double ratio = error_ratio(tensor.type, tensor.got, tensor.want, limit, tensor.reached, tensor.row_size);
    worst = std::max(worst, ratio <= 1 ? ratio : complain(tensor.name, ratio));
  }
  if (!(run(operands, want, type, 3) == got)) worst = complain("other bits on three threads", worst);
  if (!(run(operands, want, type, 1, Unseen::kLargest) == got)) worst = complain("other bits by unseen keys", worst);
  for (const Stale stale : {kLarge, kZero}) {
    const bool same = run(operands, want, type, 1, Unseen::kAsGiven, stale) == got;
    if (!same) worst = complain("other bits by what its memory held before", worst);
  }
  return worst;
}

}  // namespace
}  // namespace jattn::check

int main() {
  using namespace jattn;
  std::vector<check::Case> cases = check::kCases;
  for (const check::Case& c : check::drawn_cases(24)) cases.push_back(c);
  bool passed = true;
  for (const std::string& set : cpu::instruction_sets()) {
    cpu::force_instruction_set(set);
    double worst = 0;
    int count = 0;
    for (const check::Case& c : cases) {
      const check::Operands operands(c);
      const check::Solution want = operands.solve();
      for (const check::Type& type : check::kTypes) {
        worst = std::max(worst, check::check_case(c, operands, want, type));
        ++count;
      }
    }
    if (set == "amx") {
      const check::Operands operands(cases.front());
      if (!check::leaves_to_vectors(operands, operands.solve())) worst = HUGE_VAL;
    }
    std::printf("%s: %d problems, worst error over limit %.3g\n", set.c_str(), count, worst);
    passed = passed && worst <= 1;
  }
  return passed ? 0 : 1;
}
