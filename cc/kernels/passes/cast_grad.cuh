// dq from the float32 accumulator of the fused backward: multiplied by the scale, rounded, in rows.
//
// Unit of the family cast_grad: entry cast_grad<kConfig>, parameters CastGradParams. Reads the members of Config that
// decide the fragment order (element, head_dim, tile_q, num_warps, grad_slices) and narrow_rows. One block per query
// tile and slice.
#pragma once

#include "attn/sequence.cuh"
#include "base/integers.cuh"
#include "base/numeric.cuh"
#include "config.cuh"
#include "params.cuh"
#include "passes/shape.cuh"
#include "sm80/backward_shape.cuh"
#include "sm80/tile_copy.cuh"

namespace jattn {

template <Config kConfig>
__device__ __forceinline__ void cast_grad(const CastGradParams& params) {
  constexpr Element kElement = kConfig.element;
  constexpr int kTileQ = kConfig.tile_q, kD = kConfig.head_dim, kSliceD = kD / kConfig.grad_slices;
  constexpr sm80::WarpGrid kGrid = sm80::dq_warps(kConfig);
  static_assert(kGrid.rows > 0);
  constexpr int kPartRows = kTileQ / kGrid.rows, kPartColumns = kSliceD / kGrid.columns;
  constexpr int kMq = kPartRows / 16, kNq = kPartColumns / 8;
  using GradTile = sm80::Tile<kElement, kSliceD>;

  extern __shared__ __align__(1024) unsigned char shared[];
  const GradTile staging{ptx::shared_address(shared)};
  const int tiles = ceil_div(params.q_len, kTileQ);
  const int slice = blockIdx.x % kConfig.grad_slices;
  const int64_t flat_tile = blockIdx.x / kConfig.grad_slices;
  const int64_t flat_head = flat_tile / tiles;
  const int row_begin = int(flat_tile - flat_head * tiles) * kTileQ;
  const int entry = int(flat_head / params.num_heads);
  const int head = int(flat_head - int64_t(entry) * params.num_heads);
  const int length = params.q_lengths ? clamped_length(params.q_lengths, entry, params.q_len) : params.q_len;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int part_row = warp / kGrid.columns * kPartRows, part_column = warp % kGrid.columns * kPartColumns;

  const float* source = params.dq_accumulator + (flat_head * params.rows_padded + row_begin) * kD +
                        slice * (kTileQ * kSliceD) + warp * (kPartRows * kPartColumns) + lane * 4;
  float dq[kMq][kNq][4], factor[kMq][2];
#pragma unroll
  for (int m = 0; m < kMq; ++m) {
#pragma unroll
    for (int n = 0; n < kNq; ++n) {
      const float4 x = __ldg(reinterpret_cast<const float4*>(source + (m * kNq + n) * 128));
      dq[m][n][0] = x.x, dq[m][n][1] = x.y, dq[m][n][2] = x.z, dq[m][n][3] = x.w;
    }
  }
  sm80::row_factors(factor, row_begin + part_row, length, params.scale);
  sm80::stage_accumulator(staging, dq, factor, part_row, part_column);
  __syncthreads();
  const sm80::GlobalRows rows = sm80::head_rows<kElement>(params.dq, params.q_len, params.num_heads, params.head_dim,
                                                          entry, head, slice * kSliceD, 0);
  sm80::store_tile<kElement, kSliceD, kTileQ, cast_grad_threads(kConfig), kConfig.narrow_rows>(staging, rows, 0,
                                                                                               row_begin, params.q_len);
}

}  // namespace jattn
