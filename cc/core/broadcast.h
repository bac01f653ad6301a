// Arrays that broadcast against (B, N, T, S), as a bias and a dense mask do.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace jattn {

// Extents: those of the problem, or 1 along a broadcast axis.
struct BroadcastShape {
  int64_t batch, heads, queries, keys;

  int64_t elements() const { return batch * heads * queries * keys; }
};

inline BroadcastShape shape_of(const BroadcastTensor& tensor, const Problem& problem) {
  return {.batch = tensor.stride_batch == 0 ? 1 : problem.batch,
          .heads = tensor.stride_head == 0 ? 1 : problem.num_heads,
          .queries = tensor.stride_query == 0 ? 1 : problem.q_len,
          .keys = tensor.stride_key == 0 ? 1 : problem.kv_len};
}

// A dense, row-major array: an axis of size 1 has stride 0.
inline BroadcastTensor broadcast_tensor(const void* data, DType dtype, const BroadcastShape& shape) {
  const auto stride = [](int64_t extent, int64_t elements) { return extent == 1 ? int64_t{0} : elements; };
  return {.data = data,
          .dtype = dtype,
          .stride_batch = stride(shape.batch, shape.heads * shape.queries * shape.keys),
          .stride_head = stride(shape.heads, shape.queries * shape.keys),
          .stride_query = stride(shape.queries, shape.keys),
          .stride_key = stride(shape.keys, 1)};
}

}  // namespace jattn
