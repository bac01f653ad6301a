// The drop warps of the backward: two warps of the producer's warpgroup find the pairs that dropout removes from a
// step, as bits, while the consumers compute, each for the keys of a consumer warpgroup. As in the forward (drops.cuh)
// a call of Philox then serves two consumer warps, where one of these can use but half of its pairs, and wide
// multiplications stand in no consumer's row of instructions. A consumer thread is left with a word for 32 of its
// scores. What a call has of its queries alone is made by idle lanes of the producer, what it has of its keys once for
// an item.
//
// Protocol. The producer writes a record of each step, and these parts, before it waits for room for the tiles
// (drop_step_full). It has found room for those of the step before, so consumers are done with all but `stages` steps
// before that, and drop warps have read their records: one place more than stages is enough. There is one place for the
// bits of a warpgroup's step: a drop warp holds those of the next one in registers until the warps of the warpgroup
// have read those at hand (drops_empty), writes them and says so (drops_full). A record without a batch entry ends its
// work. tests/compile/test_backward_item_steps.py has a model of it.
#pragma once

#include "sm90/backward_dropped_pairs.cuh"

namespace jattn::sm90 {

template <Config C>
struct BackwardDropWarp {
  static_assert(C.tile_q == 64 && C.tile_kv == 128);

  const BackwardParams& params;
  BackwardControl<C, false>& control;
  int warp;  // among the drop warps, as its consumer warpgroup among the consumers

  // Words of the four consumer threads that the two calls of this lane serve, by the parity of their keys and the half
  // of 32 keys that their warp has.
  struct Found {
    unsigned words[2][2];
  };

  // The group of keys of this lane, counted from the step's first, and of queries.
  __device__ __forceinline__ unsigned key_group() const { return warp * 8 + lane() / 4; }
  __device__ __forceinline__ static unsigned query_group() { return lane() % 4; }
  __device__ __forceinline__ static unsigned lane() { return unsigned(ptx::thread_index_anew()) % 32; }

  // The halves of a word are those of 32 queries. One call after the other: the warp has few registers.
  __device__ __forceinline__ Found find(const DropPart* queries, const PhiloxPart& keys) const {
    const DropSource& source = control.drop_sources[warp];
    // By a shuffle the whole warp has the same key, whose schedule then lies in uniform registers.
    const PhiloxKey key{__shfl_sync(~0u, source.key.low, 0), __shfl_sync(~0u, source.key.high, 0)};
    unsigned before[2] = {0, 0};  // of the call before, for both halves of the keys
    Found found;
#pragma unroll 1
    for (int call = 0; call < 2; ++call) {
      const PhiloxWords made = philox(key, queries[query_group() + 4 * call], keys);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const PairWords pairs = words_of_key(made, odd != 0);
        const unsigned near = kept_pairs(KeyRowBits(pairs, false, source.limits));
        const unsigned far = kept_pairs(KeyRowBits(pairs, true, source.limits));
        found.words[odd][0] = __byte_perm(before[odd], near, 0x5410u);
        found.words[odd][1] = __byte_perm(before[odd], far, 0x5432u);
        before[odd] = __byte_perm(near, far, 0x5410u);
      }
    }
    return found;
  }

  __device__ __forceinline__ void store(const Found& found) const {
    const unsigned group = key_group();
    const unsigned thread = group / 4 * 64 + group % 4 * 8 + query_group();
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
      for (int far = 0; far < 2; ++far) control.drop_bits[thread + 32 * far + 4 * odd] = found.words[odd][far];
    }
  }

  // Looks up the key and the rate of another head; returns whether it is one.
  __device__ __forceinline__ bool find_source(const DropStep& step) const {
    DropSource& source = control.drop_sources[warp];
    if (__all_sync(~0u, source.batch == step.batch && source.head == step.head)) return false;
    const Dropout dropout = dropout_of<C>(params.problem, step.batch, step.head);
    if (lane() == 0) source = {dropout.key, drop_limits(dropout.threshold), step.batch, step.head};
    __syncwarp();
    return true;
  }

  __device__ __forceinline__ void run() const {
    if (lane() == 0) control.drop_sources[warp].batch = -1;
    __syncwarp();
    PhiloxPart keys{};
    int first_key = -1;
    for (unsigned number = 0;; ++number) {
      const unsigned place = number % kDropSteps;
      wait_as_warp(&control.drop_step_full[place], number / kDropSteps & 1);
      const DropStep step = control.drop_steps[place];
      if (__any_sync(~0u, step.batch < 0)) return;
      if (find_source(step) || __any_sync(~0u, step.key != first_key)) {
        first_key = step.key;
        keys = philox_column_part(control.drop_sources[warp].key, unsigned(step.key) / 8 + key_group());
      }
      const Found found = find(control.drop_parts[place], keys);
      wait_as_warp(&control.drops_empty[warp], ~number & 1);
      store(found);
      __syncwarp();
      if (lane() == 0) arrive(&control.drops_full[warp]);
    }
  }
};

}  // namespace jattn::sm90
