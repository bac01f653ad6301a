// dq with mma.sync and cp.async, by blocks that walk the keys for a tile of queries: no reductions in memory, so the
// same bits every time.
//
// Unit of the family sm80_backward_dq: header "sm80/backward_dq.cuh", parameters BackwardParams, entry
// backward_dq<kConfig>, backward_dq_threads, backward_dq_min_blocks.
#pragma once

#include "sm80/query_walk.cuh"

namespace jattn::sm80 {

template <Config kConfig>
__device__ __forceinline__ void backward_dq(const BackwardParams& params) {
  constexpr Element kElement = kConfig.element;
  constexpr int kD = kConfig.head_dim, kSliceD = kD / kConfig.grad_slices;
  constexpr int kWarpRows = kConfig.tile_q / kConfig.num_warps;
  constexpr int kM = kWarpRows / 16;
  static_assert(kSliceD % 16 == 0);

  const ProblemParams& problem = params.problem;
  const WorkItem item = query_item(params, blockIdx.x);
  float dq[kM][kSliceD / 8][4];
  clear(dq);
  QuerySlopes<kConfig> slopes;
  each_score_gradient<kConfig, true>(params, item, slopes, [&](const auto& ds, Tile<kElement, kD> k_tile, int) {
    multiply_accumulator<kConfig.tf32_chain>(
        dq, ds, ColumnOperand<kElement, kD, (kConfig.grad_slices > 1)>(k_tile, 0, item.slice * kSliceD, false));
  });

  ptx::copy_wait<0>();
  __syncthreads();  // the staging tile lies where other warps may still read
  const WorkItem end_item = query_item(params, ptx::block_index_anew());
  const int warp_row = (threadIdx.x / 32) * kWarpRows;
  const int end_row = end_item.tile * kConfig.tile_q + warp_row;
  const int q_length = sequence_of<kConfig>(problem, end_item.batch).q_length;
  float factor[kM][2];
  row_factors(factor, end_row, q_length, problem.scale);
  const Tile<kElement, kSliceD> staging{ptx::shared_base()};
  stage_accumulator(staging, dq, factor, warp_row, 0);
  __syncwarp();
  const GlobalRows dq_rows =
      head_rows<kElement>(params.dq, problem.q_len, problem.num_heads, problem.head_dim, end_item.batch, end_item.head,
                          end_item.slice * kSliceD, problem.copy_bytes);
  store_tile<kElement, kSliceD, kWarpRows, 32, kConfig.narrow_rows>(staging, dq_rows, warp_row, end_row, problem.q_len);
}

}  // namespace jattn::sm80
