// Positions of the rows and columns of an accumulator fragment (coordinates as in score.cuh).
#pragma once

#include "base/types.cuh"
#include "params.cuh"

namespace jattn {

// Rows are queries and columns keys, or the other way round (kTransposed). Outside the arrays positions are 0.
template <bool kTransposed>
struct FragmentPositions {
  const int32_t* row_positions;
  const int32_t* column_positions;
  int num_rows, num_columns;

  __device__ __forceinline__ FragmentPositions(const ProblemParams& problem, int batch) {
    const int32_t* queries = problem.q_positions + int64_t(batch) * problem.q_len;
    const int32_t* keys = problem.kv_positions + int64_t(batch) * problem.kv_len;
    row_positions = kTransposed ? keys : queries;
    column_positions = kTransposed ? queries : keys;
    num_rows = kTransposed ? problem.kv_len : problem.q_len;
    num_columns = kTransposed ? problem.q_len : problem.kv_len;
  }

  __device__ __forceinline__ int row_at(int row) const { return row < num_rows ? __ldg(row_positions + row) : 0; }
  __device__ __forceinline__ int column_at(int column) const {
    return column < num_columns ? __ldg(column_positions + column) : 0;
  }

  template <int kM>
  __device__ __forceinline__ void rows(int (&position)[kM][2], int row0) const {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) position[m][h] = row_at(row0 + 16 * m + 8 * h + int((threadIdx.x & 31) >> 2));
    }
  }
  __device__ __forceinline__ int column(int n, int e, int column0) const {
    return column_at(column0 + 8 * n + 2 * int(threadIdx.x & 3) + e);
  }
};

}  // namespace jattn
