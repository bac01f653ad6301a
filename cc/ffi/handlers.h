// The handlers of each platform, as module.cc hands them to JAX.
#pragma once

#include <cstdint>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jattn::ffi_handlers {

struct Handler {
  const char* target;  // "jattn_forward_v1"; the version changes whenever operands or attributes do
  const char* stage;   // "instantiate", "initialize" or "execute"
  XLA_FFI_Handler* handler;
};

std::vector<Handler> cpu();   // cpu_handlers.cc
std::vector<Handler> cuda();  // cuda_handlers.cc

// How often execute ran for the CUDA platform in this process. A captured call runs once, its replays do not count.
int64_t cuda_executions();  // cuda_handlers.cc

}  // namespace jattn::ffi_handlers
