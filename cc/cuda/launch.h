// Launches of kernels, and memory set to zero on a stream.
#pragma once

#include <cstdint>

#include "cuda/kernel_store.h"

namespace jattn::cuda {

struct Grid {
  int64_t x = 1;  // up to 2^31 - 1: all blocks, since the other axes have room for 65535
};

struct Launch {
  Grid grid;  // an empty grid launches nothing
  int num_threads = 0;
  int64_t shared_bytes = 0;  // dynamic
};

// Launches `kernel` with one parameter, a plain struct that the driver copies before the call returns.
// Throws Error that names the kernel key, the launch and the driver's result.
void launch(const Kernel& kernel, const Launch& shape, const void* params, CUstream stream);

// Sets bytes on the stream.
void fill_zero(void* address, int64_t num_bytes, CUstream stream);

}  // namespace jattn::cuda
