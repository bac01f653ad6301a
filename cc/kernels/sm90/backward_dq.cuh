// dq on Hopper by blocks that own 128 queries: no reductions in memory, so the same bits every time.
//
// Unit of the family sm90_backward_dq, parameters sm90::BackwardParams, backward_threads and backward_min_blocks. One
// producer warp, two consumer warpgroups of 64 queries each. Element float16 or bfloat16; tile_q 128; head dims
// multiples of 64 up to 256. Definition of the result: core/problem.h.
#pragma once

#include "sm90/backward_queries.cuh"

namespace jattn::sm90 {

template <Config C>
__device__ __forceinline__ void backward_dq(const BackwardParams& params) {
  constexpr QueryLayout kLayout = query_layout(C);
  static_assert(C.element == Element::kF16 || C.element == Element::kBF16);
  static_assert(C.head_dim % 64 == 0 && C.head_dim_v % 64 == 0 && C.head_dim <= 256 && C.head_dim_v <= 256);
  static_assert(C.tile_q == kBackwardConsumers * kWarpgroupRows && C.tile_kv % kStepDepth == 0);
  static_assert(!C.narrow_rows && (!C.dropout_rows || (C.dropout && C.segments && C.positions)));
  static_assert(!C.staged_bias || C.bias_element != Element::kF32);
  static_assert(C.num_warps == backward_threads(C) / 32);
  static_assert(kLayout.bytes <= kMaxSharedBytes);
  static_assert(sizeof(BackwardControl<C, true>) <= backward_control_bytes(C, true));

  extern __shared__ __align__(1024) unsigned char shared[];
  auto& control = *reinterpret_cast<BackwardControl<C, true>*>(shared + kLayout.control);
  const unsigned tiles = shared_address(shared);
  if (threadIdx.x == 0) {
    if (tiles % 1024 != 0) __trap();  // the swizzle counts rows from here
    init_control(control, kBackwardConsumers, 1, kBackwardConsumers * kWarpgroupThreads / 32);
    prefetch_tensor_map(&params.q);
    prefetch_tensor_map(&params.k);
    prefetch_tensor_map(&params.v);
    prefetch_tensor_map(&params.dout);
    if constexpr (bias_tile_bytes(C) > 0) prefetch_tensor_map(&params.bias);
  }
  __syncthreads();

  // Through a shuffle, so that the compiler knows the branch to be the same for the whole warp.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
  if (warpgroup == 0) {
    release_registers<backward_producer_registers(C)>();
    if (threadIdx.x < 32) QueryProducer<C>{params, control, tiles}.run();
  } else {
    acquire_registers<backward_consumer_registers(C)>();
    QueryConsumer<C>{params, control, tiles, warpgroup - 1}.run();
  }
}

}  // namespace jattn::sm90
