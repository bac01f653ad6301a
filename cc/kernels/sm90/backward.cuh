// Gradients on Hopper by blocks that own keys: tensor memory accelerator, warpgroup products, one producer warp and two
// consumer warpgroups (docs/design/0010-hopper-backward.md).
//
// Units of two families with parameters sm90::BackwardParams, backward_threads and backward_min_blocks:
//   sm90_backward      backward<C>      dk, dv, and dq into a float32 accumulator by reductions in memory; head dims to
//                                       192, above 128 with a warpgroup of its own for dq (num_warps 16)
//   sm90_backward_dkv  backward_dkv<C>  dk and dv only: beside sm90_backward_dq above head dim 192 and, for the same
//                                       bits every time, where one kernel cannot order dq; alone where no dq is wanted
// Element float16 or bfloat16; tile_kv 128 (64 for head dims above 128), tile_q 64 or 128. Definition: core/problem.h.
//
// backward_producer.cuh copies; backward_keys.cuh computes, above head dim 128 backward_split.cuh and
// backward_gather.cuh. Warps beside the producer add dq up (backward_sender.cuh) and cast it (backward_caster.cuh),
// store gradients of scores (backward_storer.cuh) and find the pairs that dropout removes (backward_drops.cuh).
#pragma once

#include "sm90/backward_caster.cuh"
#include "sm90/backward_drops.cuh"
#include "sm90/backward_keys.cuh"
#include "sm90/backward_producer.cuh"
#include "sm90/backward_sender.cuh"
#include "sm90/backward_split.cuh"
#include "sm90/backward_storer.cuh"

namespace jattn::sm90 {

template <Config C, bool kFused>
__device__ __forceinline__ void backward_keys(const BackwardParams& params) {
  constexpr KeyLayout kLayout = key_layout(C, kFused);
  constexpr bool kSplit = splits_gradients(C);
  static_assert(C.element == Element::kF16 || C.element == Element::kBF16);
  static_assert(C.head_dim % 64 == 0 && C.head_dim_v % 64 == 0 && C.head_dim <= 256 && C.head_dim_v <= 256);
  static_assert(C.tile_kv == (kSplit ? 64 : 128) && (C.tile_q == 64 || C.tile_q == 128));
  static_assert(has_dq_warpgroup(C) == (kSplit && kFused) && (!kSplit || C.tile_q == kWarpgroupRows));
  static_assert(!C.in_series && !C.narrow_rows && (!C.dropout_rows || (C.dropout && C.segments && C.positions)));
  static_assert(!C.staged_bias || C.bias_element != Element::kF32);
  // The slope of a softcap is part of ds, but not of the gradient of a bias.
  static_assert(!C.stores_ds || (C.bias && C.staged_bias && C.bias_element == C.element && !C.softcap && !kSplit));
  static_assert(C.num_warps == backward_threads(C) / 32);
  static_assert(kLayout.bytes <= kMaxSharedBytes);
  static_assert(sizeof(BackwardControl<C, false>) <= backward_control_bytes(C, false));

  static_assert(!takes_items(C) || (kFused && !kSplit));
  static_assert(!C.documents || (takes_items(C) && C.segments && !C.lengths && !C.positions && !C.mask && !C.bias &&
                                 !C.alibi && !C.dropout));
  static_assert(!C.take_turns || (kFused && !kSplit));
  static_assert(C.key_register_steps == 0 || (!kSplit && C.key_register_steps <= C.head_dim / kStepDepth));
  static_assert(!has_senders(C) || (takes_items(C) && C.bulk_reduce));
  static_assert(!C.drops_beside || (takes_items(C) && !C.stores_ds && C.dropout && !C.dropout_rows));
  static_assert(!orders_dq(C) || (!C.segments && !C.mask && !has_position_band(C)));

  extern __shared__ __align__(1024) unsigned char shared[];
  auto& control = *reinterpret_cast<BackwardControl<C, false>*>(shared + kLayout.control);
  const unsigned tiles = shared_address(shared);
  if (threadIdx.x == 0) {
    if (tiles % 1024 != 0) __trap();  // the swizzle counts rows from here
    constexpr int kWarps = kBackwardConsumers * kWarpgroupThreads / 32;
    init_control(control, kSplit ? kWarps : kBackwardConsumers, kSplit ? kWarps / 2 : kWarps,
                 C.stores_ds ? 1
                 : kSplit    ? kWarps / 2
                             : kWarps);
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
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (warp == 0) {
      KeyProducer<C, kFused>{params, control, tiles}.run();
    } else if (C.stores_ds && warp == kStorerWarp) {
      if constexpr (C.stores_ds) {
        if (lane() == 0) DsStorer<C, kFused>{params, control, tiles}.run();
      }
    } else if constexpr (C.drops_beside) {
      if (warp <= kBackwardDropWarps) {
        BackwardDropWarp<C>{params, control, warp - 1}.run();
      } else if constexpr (has_senders(C)) {
        if (lane() == 0) DqSender<C>{params, control, tiles, 0}.run();
      }
    } else if constexpr (has_senders(C)) {
      if (casts_beside(C) && warp == kCasterWarp) {
        if constexpr (casts_beside(C)) DqCaster<C>{params, control}.run();
      } else if (warp <= num_senders(C) && lane() == 0) {
        DqSender<C>{params, control, tiles, warp - 1}.run();
      }
    }
  } else if constexpr (has_dq_warpgroup(C)) {
    if (warpgroup == 1) {
      acquire_registers<kDvRegisters>();
      SplitConsumer<C, true>{params, control, tiles}.run_for_dv();
    } else if (warpgroup == 2) {
      acquire_registers<kDkRegisters>();
      SplitConsumer<C, true>{params, control, tiles}.run_for_dk();
    } else {
      GatherConsumer<C>{params, control, tiles}.run();
    }
  } else {
    acquire_registers<backward_consumer_registers(C)>();
    if constexpr (kSplit) {
      SplitConsumer<C, false> consumer{params, control, tiles};
      if (warpgroup == 1) {
        consumer.run_for_dv();
      } else {
        consumer.run_for_dk();
      }
    } else {
      KeyConsumer<C, kFused>{params, control, tiles, warpgroup - 1}.run();
    }
  }
}

template <Config C>
__device__ __forceinline__ void backward(const BackwardParams& params) {
  backward_keys<C, true>(params);
}

template <Config C>
__device__ __forceinline__ void backward_dkv(const BackwardParams& params) {
  backward_keys<C, false>(params);
}

}  // namespace jattn::sm90
