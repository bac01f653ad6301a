// Sums of the gradients of scores over the queries of a key, of which the gradient of a bias of the keys is made: by
// threads for a step, in the control block for an item, in BackwardParams::key_sums for the launch. Nothing without
// Config::sums_bias.
#pragma once

#include "base/numeric.cuh"
#include "base/ptx.cuh"
#include "sm90/backward_work.cuh"

namespace jattn::sm90 {

// Those of a step over a thread's queries, for its two keys.
template <Config C>
struct KeySums {
  float key[C.sums_bias ? 2 : 1];

  __device__ __forceinline__ void clear() {
    if constexpr (C.sums_bias) key[0] = key[1] = 0.0f;
  }
  __device__ __forceinline__ void add(int r, float low, float high) {
    if constexpr (C.sums_bias) key[r] += low + high;
  }
};

// Of the two keys of a quad of lanes, whose first lane alone touches their sums in the control block.
__device__ __forceinline__ int key_of_quad(int r) {
  const int thread = ptx::thread_index_anew() - kWarpgroupThreads;
  return thread / 32 * 16 + thread % 32 / 4 + 8 * r;
}
__device__ __forceinline__ bool leads_quad() { return ptx::thread_index_anew() % 4 == 0; }

template <Config C>
__device__ __forceinline__ void clear_key_sums(BackwardControl<C, false>& control) {
  if constexpr (C.sums_bias) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (leads_quad()) control.key_sums[key_of_quad(r)] = 0.0f;
    }
  }
}

// In shared memory, where registers are short in the loop.
template <Config C>
__device__ __forceinline__ void add_key_sums(BackwardControl<C, false>& control, const KeySums<C>& sums) {
  if constexpr (C.sums_bias) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(sums.key[r]);
      if (leads_quad()) control.key_sums[key_of_quad(r)] += sum;
    }
  }
}

// Writes the sums of this warpgroup's keys; those of keys beyond their length are 0.
template <Config C>
__device__ __forceinline__ void write_key_sums(const BackwardParams& params, const BackwardControl<C, false>& control,
                                               const BackwardItem& item) {
  if constexpr (C.sums_bias) {
    const ProblemParams& problem = params.problem;
    const int64_t head = int64_t(item.batch) * problem.num_kv_heads + item.head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = item.first + key_of_quad(r);
      if (leads_quad() && key < problem.kv_len) {
        const bool inside = key < item.kv_length;  // beyond it the sum may be NaN
        params.key_sums[head * problem.kv_len + key] = inside ? control.key_sums[key_of_quad(r)] : 0.0f;
      }
    }
  }
}

}  // namespace jattn::sm90
