// The decisions for one call, as the CUDA handlers receive them: its kernels, loaded on the device of the call.
#pragma once

#include <vector>

#include "cuda/kernel_store.h"

namespace jattn::cuda {

struct Plan {
  std::vector<const Kernel*> kernels;  // in the order of the plan's attribute `kernels`; loaded
  int device_ordinal = 0;
};

}  // namespace jattn::cuda
