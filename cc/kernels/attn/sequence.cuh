// Lengths and band of one batch entry.
#pragma once

#include "attn/kv_range.cuh"
#include "config.cuh"
#include "params.cuh"

namespace jattn {

struct Sequence {
  int q_length, kv_length;  // rows beyond them are padding
  Band band;
};

// The length that an array of lengths gives a batch entry: any number there, brought between 0 and the extent of the
// axis.
__device__ __forceinline__ int clamped_length(const int32_t* lengths, int entry, int extent) {
  return min(max(lengths[entry], 0), extent);
}

template <Config kConfig>
__device__ __forceinline__ Sequence sequence_of(const ProblemParams& problem, int batch) {
  Sequence sequence{problem.q_len, problem.kv_len, {problem.band_left, problem.band_right, 0}};
  if constexpr (kConfig.lengths) {
    if (problem.q_lengths) sequence.q_length = clamped_length(problem.q_lengths, batch, problem.q_len);
    if (problem.kv_lengths) sequence.kv_length = clamped_length(problem.kv_lengths, batch, problem.kv_len);
  }
  if ((kConfig.band || kConfig.alibi) && problem.lower_right)
    sequence.band.offset = sequence.kv_length - sequence.q_length;
  return sequence;
}

}  // namespace jattn
