// Tensor maps of the arrays that the Hopper kernels copy in tiles.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "core/broadcast.h"
#include "cuda/tensor_map.h"
#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shape.cuh"

namespace jattn::cuda {

// A dense array [batch, rows, heads, columns], cut into boxes of 64 columns and box_rows rows of one head.
inline sm90::TensorMap tile_map(const void* address, DType dtype, int64_t batch, int64_t rows, int64_t heads,
                                int64_t columns, int64_t box_rows, L2Promotion promotion = L2Promotion::k256Bytes) {
  const std::array<TensorMapAxis, 4> axes{{
      {.extent = columns, .stride = 1, .box = sm90::kChunkColumns},
      {.extent = rows, .stride = heads * columns, .box = box_rows},
      {.extent = heads, .stride = columns, .box = 1},
      {.extent = batch, .stride = rows * heads * columns, .box = 1},
  }};
  return std::bit_cast<sm90::TensorMap>(make_tensor_map(address, dtype, axes, Swizzle::k128Bytes, promotion));
}

// Queries of all heads of a group as rows (sm90/rows.cuh), in boxes of 64 columns and box_queries queries with
// box_heads rows each. The queries of all batch entries are one axis: behind those of an entry a box may hold some of
// the next.
inline sm90::TensorMap packed_heads_map(const Problem& problem, int64_t box_heads, int64_t box_queries) {
  const int64_t columns = problem.head_dim, group = problem.group_size();
  const std::array<TensorMapAxis, 4> axes{{
      {.extent = columns, .stride = 1, .box = sm90::kChunkColumns},
      {.extent = group, .stride = columns, .box = box_heads},
      {.extent = problem.num_kv_heads, .stride = group * columns, .box = 1},
      {.extent = problem.batch * problem.q_len, .stride = problem.num_heads * columns, .box = box_queries},
  }};
  return std::bit_cast<sm90::TensorMap>(make_tensor_map(problem.q, problem.dtype, axes, Swizzle::k128Bytes));
}

// A bias with an axis of queries and one of keys, in boxes of 64 keys and box_rows queries. A broadcast axis has extent
// 1.
inline sm90::TensorMap bias_map(const Problem& problem, int64_t box_rows) {
  const BroadcastTensor& bias = problem.bias;
  const BroadcastShape shape = shape_of(bias, problem);
  const int64_t area = problem.q_len * problem.kv_len;  // stands for the stride of an axis of extent 1
  const std::array<TensorMapAxis, 4> axes{{
      {.extent = problem.kv_len, .stride = 1, .box = sm90::kChunkColumns},
      {.extent = problem.q_len, .stride = bias.stride_query, .box = box_rows},
      {.extent = shape.heads, .stride = bias.stride_head == 0 ? area : bias.stride_head, .box = 1},
      {.extent = shape.batch, .stride = bias.stride_batch == 0 ? area : bias.stride_batch, .box = 1},
  }};
  return std::bit_cast<sm90::TensorMap>(make_tensor_map(bias.data, bias.dtype, axes, Swizzle::k128Bytes));
}

// Pairs [batch, heads, queries, keys] of the problem's element type, in the same boxes.
inline sm90::TensorMap score_map(const void* address, const Problem& problem, int64_t entries, int64_t heads,
                                 int64_t box_rows) {
  const int64_t area = problem.q_len * problem.kv_len;
  const std::array<TensorMapAxis, 4> axes{{
      {.extent = problem.kv_len, .stride = 1, .box = sm90::kChunkColumns},
      {.extent = problem.q_len, .stride = problem.kv_len, .box = box_rows},
      {.extent = heads, .stride = area, .box = 1},
      {.extent = entries, .stride = heads * area, .box = 1},
  }};
  return std::bit_cast<sm90::TensorMap>(make_tensor_map(address, problem.dtype, axes, Swizzle::k128Bytes));
}

}  // namespace jattn::cuda
