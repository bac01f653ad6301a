// Descriptors for the tensor memory accelerator of Hopper and later.
#pragma once

#include <cstdint>
#include <span>

#include "core/problem.h"
#include "cuda/driver.h"

namespace jattn::cuda {

enum class Swizzle : int { kNone = 0, k32Bytes = 1, k64Bytes = 2, k128Bytes = 3 };  // CUtensorMapSwizzle

// How much L2 fetches of memory when a copy misses it, at least (CUtensorMapL2promotion).
enum class L2Promotion : int { k128Bytes = 2, k256Bytes = 3 };

// One axis of a tensor, innermost first.
struct TensorMapAxis {
  int64_t extent = 0;
  int64_t stride = 0;  // elements; of the innermost axis it must be 1
  int64_t box = 0;     // elements that one copy moves, 1 to 256
};

// Describes a tensor in global memory. Elements outside the extents read as 0 and are not written.
// Throws Error (Fault::kCaller) that names the axis and the rule of the hardware that it breaks: address and outer
// strides multiples of 16 bytes, extents from 1 to 2^32, boxes from 1 to 256, innermost box no wider than the swizzle.
// Source: CUDA driver API, cuTensorMapEncodeTiled.
CUtensorMap make_tensor_map(const void* address, DType dtype, std::span<const TensorMapAxis> axes, Swizzle swizzle,
                            L2Promotion promotion = L2Promotion::k256Bytes);

}  // namespace jattn::cuda
