#include "core/kernel_key.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <type_traits>
#include <variant>

#include "core/kernel_unit.h"
#include "core/program_store.h"
#include "core/require.h"

namespace jattn {
namespace {

struct ElementName {
  Element element;
  const char* key;   // in the text of a key
  const char* code;  // in device code
};
constexpr ElementName kElementNames[] = {
    {Element::kF16, "f16", "Element::kF16"},
    {Element::kBF16, "bf16", "Element::kBF16"},
    {Element::kF32, "f32", "Element::kF32"},
};

struct Range {
  int first, last, step;
};

struct Member {
  const char* name;
  std::variant<int Config::*, bool Config::*, Element Config::*> place;
  Range range{0, 1, 1};  // of an int member
};

// The one table of Config's members, in the order of the struct. The ranges keep nonsense away from the compiler; which
// combinations a kernel family can really run is its own static_assert.
constexpr Member kMembers[] = {
    {"element", &Config::element},
    {"bias_element", &Config::bias_element},
    {"head_dim", &Config::head_dim, {8, 512, 8}},
    {"head_dim_v", &Config::head_dim_v, {8, 512, 8}},
    {"tile_q", &Config::tile_q, {8, 512, 8}},
    {"tile_kv", &Config::tile_kv, {8, 512, 8}},
    {"num_warps", &Config::num_warps, {1, 32, 1}},
    {"stages", &Config::stages, {1, 8, 1}},
    {"band", &Config::band},
    {"lengths", &Config::lengths},
    {"segments", &Config::segments},
    {"mask", &Config::mask},
    {"bias", &Config::bias},
    {"softcap", &Config::softcap},
    {"large_cap", &Config::large_cap},
    {"positions", &Config::positions},
    {"sinks", &Config::sinks},
    {"alibi", &Config::alibi},
    {"dropout", &Config::dropout},
    {"dropout_rows", &Config::dropout_rows},
    {"program", &Config::program},
    {"narrow_rows", &Config::narrow_rows},
    {"staged_bias", &Config::staged_bias},
    {"row_bias", &Config::row_bias},
    {"shared_scores", &Config::shared_scores},
    {"grad_slices", &Config::grad_slices, {1, 8, 1}},
    {"tf32_chain", &Config::tf32_chain, {1, 4, 1}},
    {"schedule", &Config::schedule, {0, 2, 2}},
    {"in_series", &Config::in_series},
    {"scale_first", &Config::scale_first},
    {"q_in_registers", &Config::q_in_registers},
    {"integer_max", &Config::integer_max},
    {"key_register_steps", &Config::key_register_steps, {0, 8, 1}},
    {"bulk_reduce", &Config::bulk_reduce},
    {"partial_results", &Config::partial_results},
    {"key_splits", &Config::key_splits, {1, 256, 1}},
    {"stores_ds", &Config::stores_ds},
    {"sums_bias", &Config::sums_bias},
    {"take_turns", &Config::take_turns},
    {"dq_order", &Config::dq_order, {0, 2, 1}},
    {"cap_series", &Config::cap_series},
    {"documents", &Config::documents},
    {"drops_beside", &Config::drops_beside},
    {"packed_heads", &Config::packed_heads},
};

struct AnyValue {
  template <typename T>
  constexpr operator T() const;
};

// How many members the struct has: as many as it takes initializers.
template <typename Struct, typename... Values>
constexpr size_t count_members() {
  if constexpr (requires { Struct{Values{}..., AnyValue{}}; }) {
    return count_members<Struct, Values..., AnyValue>();
  } else {
    return sizeof...(Values);
  }
}
static_assert(std::size(kMembers) == count_members<Config>(), "a member of Config has no row in kMembers");

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

std::string legal_values(const Member& member) {
  if (std::holds_alternative<bool Config::*>(member.place)) return "0 or 1";
  if (std::holds_alternative<Element Config::*>(member.place)) {
    std::vector<std::string> names;
    for (const ElementName& name : kElementNames) names.push_back(name.key);
    return "one of " + join(names);
  }
  const Range& range = member.range;
  const std::string limits = concat("an integer from ", range.first, " to ", range.last);
  return range.step == 1 ? limits : concat(limits, ", a multiple of ", range.step);
}

// Text in an error message: printable, and not longer than a line.
std::string quoted(std::string_view text) {
  constexpr size_t kMaxShown = 80;
  std::string shown = "\"";
  for (char c : text.substr(0, kMaxShown)) shown += (c >= ' ' && c <= '~') ? c : '?';
  return shown + (text.size() > kMaxShown ? "...\"" : "\"");
}

std::optional<int> parse_int(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (std::to_string(value) != text) return std::nullopt;  // one spelling per number: no "+8", no "008"
  return value;
}

// False if the text is no legal value of the member.
bool assign(const Member& member, std::string_view text, Config& config) {
  if (const auto* place = std::get_if<Element Config::*>(&member.place)) {
    const auto* name =
        std::ranges::find(kElementNames, text, [](const ElementName& n) { return std::string_view(n.key); });
    if (name == std::end(kElementNames)) return false;
    config.*(*place) = name->element;
    return true;
  }
  const std::optional<int> value = parse_int(text);
  const Range& range = member.range;
  if (!value || *value < range.first || *value > range.last || *value % range.step != 0) return false;
  if (const auto* place = std::get_if<bool Config::*>(&member.place)) {
    config.*(*place) = *value == 1;
  } else {
    config.*std::get<int Config::*>(member.place) = *value;
  }
  return true;
}

const ElementName& element_name(Element element) {
  const auto* name = std::ranges::find(kElementNames, element, &ElementName::element);
  if (name == std::end(kElementNames)) fail(Fault::kJattn, "kernel key: element without a name");
  return *name;
}

bool is_architecture(std::string_view text) {
  if (!text.starts_with("sm_")) return false;
  text.remove_prefix(3);
  if (text.ends_with('a')) text.remove_suffix(1);  // with instructions of this architecture alone
  const std::optional<int> number = parse_int(text);
  return number && *number >= 80 && *number <= 999;
}

std::string family_names() {
  std::vector<std::string> names;
  for (const KernelFamily& family : kernel_families()) names.push_back(family.name);
  return "one of " + join(names);
}

}  // namespace

KernelKey parse_kernel_key(std::string_view text) {
  constexpr size_t kMaxLength = 1024;
  JATTN_REQUIRE(text.size() <= kMaxLength, "kernel key: ", text.size(), " characters, at most ", kMaxLength);
  JATTN_REQUIRE(!text.ends_with(' '), "kernel key: it ends with a space");
  KernelKey key;
  std::set<std::string_view> seen;
  std::string_view rest = text;
  while (!rest.empty()) {
    const size_t space = rest.find(' ');
    const std::string_view word = rest.substr(0, space);
    rest = space == rest.npos ? std::string_view() : rest.substr(space + 1);
    const size_t equals = word.find('=');
    JATTN_REQUIRE(equals != word.npos, "kernel key: ", quoted(word),
                  " is not name=value; words are separated by one space");
    const std::string_view name = word.substr(0, equals);
    const std::string_view value = word.substr(equals + 1);
    JATTN_REQUIRE(seen.insert(name).second, "kernel key: ", quoted(name), " is given twice");
    if (name == "family") {
      JATTN_REQUIRE(find_kernel_family(value) != nullptr, "kernel key: family is ", quoted(value), ", must be ",
                    family_names());
      key.family = value;
    } else if (name == "arch") {
      JATTN_REQUIRE(is_architecture(value), "kernel key: arch is ", quoted(value),
                    ", must be sm_ and a number from 80 to 999, then perhaps a");
      key.arch = value;
    } else if (name == "digest") {
      JATTN_REQUIRE(is_program_digest(value), "kernel key: digest is ", quoted(value),
                    ", must be a SHA-256: 64 hexadecimal digits in lower case");
      key.digest = value;
    } else {
      const auto* member = std::ranges::find(kMembers, name, [](const Member& m) { return std::string_view(m.name); });
      if (member == std::end(kMembers)) {
        std::vector<std::string> names{"family", "arch"};
        for (const Member& m : kMembers) names.push_back(m.name);
        names.push_back("digest");
        fail(Fault::kCaller, concat("kernel key: no member is called ", quoted(name), "; there are ", join(names)));
      }
      JATTN_REQUIRE(assign(*member, value, key.config), "kernel key: ", member->name, " is ", quoted(value),
                    ", must be ", legal_values(*member));
    }
  }
  JATTN_REQUIRE(!key.family.empty(), "kernel key: family is missing, must be ", family_names());
  JATTN_REQUIRE(!key.arch.empty(), "kernel key: arch is missing, must be sm_ and a number");
  JATTN_REQUIRE(key.config.program != key.digest.empty(), "kernel key: program is ", int{key.config.program}, " and ",
                key.digest.empty() ? "there is no digest" : "there is a digest",
                ": the digest of a score program goes with program=1, and with nothing else");
  return key;
}

std::string to_text(const KernelKey& key) {
  std::string text = concat("family=", key.family, " arch=", key.arch);
  if (!key.digest.empty()) text += concat(" digest=", key.digest);
  for (const Member& member : kMembers) {
    text += concat(' ', member.name, '=');
    std::visit(
        [&]<typename T>(T Config::* place) {
          if constexpr (std::is_same_v<T, Element>) {
            text += element_name(key.config.*place).key;
          } else {
            text += std::to_string(static_cast<int>(key.config.*place));
          }
        },
        member.place);
  }
  return text;
}

std::string config_initializer(const Config& config) {
  std::string text;
  for (const Member& member : kMembers) {
    text += concat(text.empty() ? "" : ", ", '.', member.name, " = ");
    std::visit(
        [&]<typename T>(T Config::* place) {
          if constexpr (std::is_same_v<T, Element>) {
            text += element_name(config.*place).code;
          } else if constexpr (std::is_same_v<T, bool>) {
            text += config.*place ? "true" : "false";
          } else {
            text += std::to_string(config.*place);
          }
        },
        member.place);
  }
  return text;
}

std::vector<std::string_view> split_kernel_keys(std::string_view text) {
  std::vector<std::string_view> keys;
  while (!text.empty()) {
    const size_t end = text.find(';');
    JATTN_REQUIRE(end != 0, "kernel keys: an empty key in ", quoted(text));
    keys.push_back(text.substr(0, end));
    text = end == text.npos ? std::string_view() : text.substr(end + 1);
  }
  return keys;
}

std::vector<MemberRule> config_member_rules() {
  std::vector<MemberRule> rules;
  for (const Member& member : kMembers) rules.push_back({member.name, legal_values(member)});
  return rules;
}

}  // namespace jattn
