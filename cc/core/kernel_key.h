// The name of one kernel variant: a family, a device architecture and one value for every member of Config.
//
// Text form, one line of words separated by one space:
//   family=sm80_forward arch=sm_90 element=bf16 head_dim=128 tile_q=128 tile_kv=64 num_warps=4 stages=2 band=1
// `family` and `arch` are required. A Config member may be left out, and then has the default that Config gives it.
// Words may come in any order; to_text writes them all, in the order of the struct. Flags are 0 or 1. With program=1
// there is one more word, digest=(64 hexadecimal digits): which score program (core/program_store.h).
//
// The text arrives as an attribute of a program, which may come from somebody else, and ends in a compiler's input.
// So nothing of it is ever copied into source: it is parsed into numbers and names from fixed lists, and those are
// written out again.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/config.cuh"

namespace jattn {

struct KernelKey {
  std::string family;  // a name of kernel_families() in kernel_unit.h
  std::string arch;    // "sm_80", "sm_90a", ...
  Config config;
  std::string digest;  // of the score program's text; empty without one
};

// Throws Error (Fault::kCaller) that names the word, its value and the legal values.
KernelKey parse_kernel_key(std::string_view text);

// The canonical text: equal variants have equal texts.
std::string to_text(const KernelKey& key);

// One `.name = value` per member, in the order of the struct: the inside of a Config{...} in device code.
std::string config_initializer(const Config& config);

// Splits the `kernels` attribute of a plan: keys joined by ';'. No text gives no keys; an empty key is an error.
std::vector<std::string_view> split_kernel_keys(std::string_view text);

// What may be written for a member, in words: for messages and for the tests that walk the axes.
struct MemberRule {
  std::string name;
  std::string legal;
};
std::vector<MemberRule> config_member_rules();

}  // namespace jattn
