// Attention forward on Hopper: tensor memory accelerator, warpgroup products, one producer warp and two or three
// consumer warpgroups. Work items come from work.cuh; producer.cuh copies, consumer.cuh computes. Beside dropout three
// more warps may find the pairs that it removes (drops.cuh).
//
// Unit of the family sm90_forward, parameters sm90::ForwardParams, forward_threads and forward_min_blocks.
// Element float16 or bfloat16; tile_q 128 or 192 (one warpgroup per 64 rows); head dims multiples of 16 up to 256,
// smaller ones are filled up with zeros by the copies. Definition of the result: core/problem.h.
#pragma once

#include "sm90/consumer.cuh"
#include "sm90/drops.cuh"
#include "sm90/producer.cuh"

namespace jattn::sm90 {

template <Config C>
__device__ __forceinline__ void forward(const ForwardParams& params) {
  using S = Shape<C>;
  static_assert(C.element == Element::kF16 || C.element == Element::kBF16);
  static_assert(C.tile_q == 128 || C.tile_q == 192);
  static_assert(C.head_dim % kStepDepth == 0 && C.head_dim_v % kStepDepth == 0 && C.tile_kv % kStepDepth == 0);
  static_assert(C.head_dim <= 256 && C.head_dim_v <= 256 && C.tile_kv <= 256);
  static_assert(!C.mask || C.tile_kv <= 128);                          // a word holds the bits of 32 pairs
  static_assert(C.tile_kv % 32 == 0 || !(C.positions || C.row_bias));  // lanes of the producer carry whole columns
  static_assert(!C.bias || !C.staged_bias || C.bias_element == C.element);
  static_assert(C.bias || !(C.row_bias || C.staged_bias));
  static_assert(!C.dropout_rows || (C.dropout && C.segments && C.positions));
  static_assert(!C.drops_beside || (C.dropout && !C.dropout_rows));
  static_assert(C.stages >= 2);  // with one, a warpgroup that skips a tile waits for a v that waits for it
  static_assert(!C.take_turns || !C.in_series);
  static_assert(C.schedule == 2);
  static_assert(!C.cap_series || (C.softcap && C.integer_max && !C.bias && !C.alibi && !C.program));
  static_assert(!C.documents || (C.segments && !C.lengths && !C.positions && !C.mask && !C.bias && !C.alibi &&
                                 !C.program && !C.dropout && !C.partial_results));
  static_assert(!C.packed_heads || !(C.documents || C.alibi || C.program || C.dropout || (C.bias && !C.row_bias)));
  static_assert(C.num_warps == forward_threads(C) / 32);
  static_assert(forward_shared_bytes(C) <= kMaxSharedBytes);
  static_assert(sizeof(ForwardControl<C>) <= control_bytes(C));

  extern __shared__ __align__(1024) unsigned char shared[];
  auto& control = *reinterpret_cast<ForwardControl<C>*>(shared + control_offset(C));
  const unsigned tiles = shared_address(shared);
  if (threadIdx.x == 0) {
    if (tiles % 1024 != 0) __trap();  // the swizzle counts rows from here
    constexpr int kReleases = S::kConsumers * S::kReleases;
    control.lost = control.repeats = 0;
    init_barrier(&control.q_full, 1);
    init_barrier(&control.q_empty, S::kConsumers);
    init_barrier(&control.v_landed, 1);
    for (int stage = 0; stage < C.stages; ++stage) {
      init_barrier(&control.k_full[stage], 1);
      init_barrier(&control.v_full[stage], 1);
      init_barrier(&control.k_empty[stage], kReleases);
      init_barrier(&control.v_empty[stage], kReleases);
    }
    if constexpr (C.drops_beside) {
      for (int place = 0; place < drop_places(C); ++place) {
        init_barrier(&control.records_full[place], 1);
        init_barrier(&control.words_full[place], kDropWarps);
      }
    }
    fence_barrier_init();
    prefetch_tensor_map(&params.q);
    prefetch_tensor_map(&params.k);
    prefetch_tensor_map(&params.v);
    prefetch_tensor_map(&params.out);
    if constexpr (S::kBiasBytes > 0) prefetch_tensor_map(&params.bias);
  }
  __syncthreads();

  // Through a shuffle, so that the compiler knows the branch to be the same for the whole warp.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
  if (warpgroup == 0) {
    release_registers<producer_registers(C)>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0) {
      Producer<C> producer{params, control, tiles};
      producer.run();
    } else if constexpr (C.drops_beside) {
      DropWarp<C>{params, control, warp - 1}.run();
    }
  } else {
    acquire_registers<consumer_registers(C)>();
    Consumer<C>{{params, control, tiles, warpgroup - 1}}.run();
  }
}

}  // namespace jattn::sm90
