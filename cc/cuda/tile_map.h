// Tensor maps of the arrays that the Hopper kernels copy in tiles.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "cuda/tensor_map.h"
#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shape.cuh"

namespace jattn::cuda {

// A dense array [batch, rows, heads, columns], cut into boxes of 64 columns and box_rows rows of one head.
inline sm90::TensorMap tile_map(const void* address, DType dtype, int64_t batch, int64_t rows, int64_t heads,
                                int64_t columns, int64_t box_rows) {
  const std::array<TensorMapAxis, 4> axes{{
      {.extent = columns, .stride = 1, .box = sm90::kChunkColumns},
      {.extent = rows, .stride = heads * columns, .box = box_rows},
      {.extent = heads, .stride = columns, .box = 1},
      {.extent = batch, .stride = rows * heads * columns, .box = 1},
  }};
  return std::bit_cast<sm90::TensorMap>(make_tensor_map(address, dtype, axes, Swizzle::k128Bytes));
}

}  // namespace jattn::cuda
