// Sets the scores of invisible pairs to -inf in an accumulator fragment (coordinates as in score.cuh).
#pragma once

#include "attn/positions.cuh"
#include "attn/score.cuh"
#include "attn/sequence.cuh"
#include "base/ptx.cuh"

namespace jattn {

// Lengths and the band of indices. `band`, `row_length` and `column_length` belong to the axes of the fragment: for a
// transposed fragment the caller passes transposed(band), the key length as row_length and the query length as
// column_length. Rows beyond row_length are masked only if kMaskRows.
template <Config kConfig, bool kMaskRows, int kM, int kN>
__device__ __forceinline__ void mask_limits(float (&s)[kM][kN][4], Band band, int row_length, int column_length,
                                            int row0, int column0) {
  const int lane = ptx::thread_index_anew() & 31;  // off the path of full tiles: nothing to keep in registers
  const int lane_column = column0 + 2 * (lane & 3);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + 16 * m + 8 * h + (lane >> 2);
      int low = 0, high = column_length;
      if constexpr (has_index_band(kConfig)) {
        low = row + band.offset - band.left;
        high = min(high, row + band.offset + band.right + 1);
      }
      if (kMaskRows && row >= row_length) high = 0;
      low -= lane_column;
      high -= lane_column;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * n + e;
          const bool visible = column < high && (!has_index_band(kConfig) || column >= low);
          s[m][n][2 * h + e] = visible ? s[m][n][2 * h + e] : -infinity();
        }
      }
    }
  }
}

// row_segments, column_segments: ids of this batch entry along the axes of the fragment.
template <int kM, int kN>
__device__ __forceinline__ void mask_segments(float (&s)[kM][kN][4], const int32_t* row_segments,
                                              const int32_t* column_segments, int rows, int columns, int row0,
                                              int column0) {
  const int lane = threadIdx.x & 31;
  int row_id[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + 16 * m + 8 * h + (lane >> 2);
      row_id[m][h] = row < rows ? __ldg(row_segments + row) : -1;
    }
  }
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = column0 + 8 * n + 2 * (lane & 3) + e;
      const int id = column < columns ? __ldg(column_segments + column) : -1;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (id < 0 || id != row_id[m][h]) s[m][n][2 * h + e] = -infinity();
        }
      }
    }
  }
}

// The band of positions: `band` limits column position - row position.
template <bool kTransposed, int kM, int kN>
__device__ __forceinline__ void mask_positions(float (&s)[kM][kN][4], const ProblemParams& problem, int batch,
                                               Band band, int row0, int column0) {
  const FragmentPositions<kTransposed> positions(problem, batch);
  int row_position[kM][2];
  positions.rows(row_position, row0);
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int position = positions.column(n, e, column0);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int distance = position - row_position[m][h];
          if (distance < -band.left || distance > band.right) s[m][n][2 * h + e] = -infinity();
        }
      }
    }
  }
}

}  // namespace jattn
