// The gradient of ALiBi slopes, -sum of ds |distance| over the pairs of a head, in parts: one for each tile of queries,
// which the caller adds up.
//
// Unit of the family sm80_backward_dslopes: header "sm80/backward_dslopes.cuh", parameters SlopesParams, entry
// backward_dslopes<kConfig>, backward_dq_threads, backward_dq_min_blocks. Blocks walk the keys as those of dq do: the
// same bits every time. Two products a tile, nothing is multiplied by ds, so wide heads need no slices.
#pragma once

#include "sm80/query_walk.cuh"

namespace jattn::sm80 {

template <Config kConfig>
__device__ __forceinline__ void backward_dslopes(const SlopesParams& params) {
  constexpr int kWarpRows = kConfig.tile_q / kConfig.num_warps;
  static_assert(kConfig.alibi && kConfig.grad_slices == 1);

  const BackwardParams& backward = params.backward;
  const ProblemParams& problem = backward.problem;
  const WorkItem item = query_item(backward, blockIdx.x);
  const int row0 = item.tile * kConfig.tile_q + (threadIdx.x / 32) * kWarpRows;
  const int offset = sequence_of<kConfig>(problem, item.batch).band.offset;

  // A tile is summed up by itself: a chain through all keys would lose more to rounding.
  float sum = 0.0f;
  QuerySlopes<kConfig> slopes;
  each_score_gradient<kConfig, false>(backward, item, slopes, [&](auto& ds, const auto&, int tile) {
    float of_tile = 0.0f;
    each_distance<kConfig, false>(ds, problem, item.batch, offset, row0, tile * kConfig.tile_kv,
                                  [&](float x, float distance) { of_tile = fmaf(x, distance, of_tile); });
    sum += of_tile;
  });

#pragma unroll
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  ptx::copy_wait<0>();
  __syncthreads();  // tiles are no longer read
  extern __shared__ __align__(1024) unsigned char shared[];
  float* const sums = reinterpret_cast<float*>(shared);  // of warps
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    float of_block = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kConfig.num_warps; ++warp) of_block += sums[warp];
    const int64_t head = int64_t(item.batch) * problem.num_heads + item.head;
    params.dslopes[head * backward.tiles + item.tile] = -of_block;
  }
}

}  // namespace jattn::sm80
