// Writes the translation unit that specialises a kernel family. Both compilers, nvcc at build time and NVRTC at run
// time, get their text from here and from nowhere else.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "core/kernel_key.h"

namespace jattn {

// Every unit has exactly one entry point, and it is called this.
inline constexpr const char* kKernelEntry = "jattn_kernel";

// A family is a header that defines, in namespace jattn:
//   `params`                         the plain struct that the kernel takes by value
//   `entry`<Config>(params)          the device function that is the kernel
//   `num_threads`(Config)            constexpr: the block size it is launched with
//   `min_blocks`(Config)             constexpr: blocks per multiprocessor that registers are budgeted for
struct KernelFamily {
  const char* name;
  const char* header;  // as it is included
  const char* params;
  const char* entry;
  const char* num_threads;
  const char* min_blocks;
};

std::span<const KernelFamily> kernel_families();
const KernelFamily* find_kernel_family(std::string_view name);  // null: no such family

std::string kernel_unit_text(const KernelKey& key);

}  // namespace jattn
