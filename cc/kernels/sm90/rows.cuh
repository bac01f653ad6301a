// What a row of a tile of queries is in the forward.
//
// A row is a query of one head. With Config::packed_heads it is a query of one head of a group, and the heads of a
// query follow each other: row r of the sequence of T * 2^group_shift rows is query r >> group_shift of the group's
// head r % 2^group_shift. Groups that are no power of two have rows of heads that do not exist, which arrive as zeros
// and are not written.
#pragma once

#include "sm90/forward_params.cuh"

namespace jattn::sm90 {

template <Config C>
__device__ __forceinline__ int query_of_row(const ForwardParams& params, int row) {
  if constexpr (C.packed_heads) return row >> params.group_shift;
  return row;
}

// Counted from the group's first head, which is that of an item's record.
template <Config C>
__device__ __forceinline__ int head_of_row(const ForwardParams& params, int row) {
  if constexpr (C.packed_heads) return row & ((1 << params.group_shift) - 1);
  return 0;
}

template <Config C>
__device__ __forceinline__ bool is_row_of_head(const ForwardParams& params, int row) {
  if constexpr (C.packed_heads) return head_of_row<C>(params, row) < params.problem.group_size;
  return true;
}

// Rows that queries take.
template <Config C>
__device__ __forceinline__ int rows_of_queries(const ForwardParams& params, int queries) {
  if constexpr (C.packed_heads) return queries << params.group_shift;
  return queries;
}

// Queries of a whole tile.
template <Config C>
__device__ __forceinline__ int queries_of_tile(const ForwardParams& params) {
  return query_of_row<C>(params, C.tile_q);
}

// Heads that have tiles of their own.
template <Config C>
__device__ __forceinline__ int heads_of_items(const ProblemParams& problem) {
  return C.packed_heads ? problem.num_kv_heads : problem.num_heads;
}

}  // namespace jattn::sm90
