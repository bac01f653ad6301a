// The decisions for one call, as the CUDA handlers receive them: which backend, and its kernels in launch order.
#pragma once

#include <string_view>
#include <vector>

#include "cuda/kernel_store.h"

namespace jattn::cuda {

struct Plan {
  std::string_view backend;            // "flash" or "mem_efficient"; for messages only
  std::vector<const Kernel*> kernels;  // in the order of the plan's attribute `kernels`; loaded
  int device_ordinal = 0;
};

}  // namespace jattn::cuda
