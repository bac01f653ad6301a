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

template <Config kConfig>
__device__ __forceinline__ Sequence sequence_of(const ProblemParams& problem, int batch) {
  Sequence sequence{problem.q_len, problem.kv_len, {problem.band_left, problem.band_right, 0}};
  if constexpr (kConfig.lengths) {
    if (problem.q_lengths) sequence.q_length = min(max(problem.q_lengths[batch], 0), problem.q_len);
    if (problem.kv_lengths) sequence.kv_length = min(max(problem.kv_lengths[batch], 0), problem.kv_len);
  }
  if ((kConfig.band || kConfig.alibi) && problem.lower_right)
    sequence.band.offset = sequence.kv_length - sequence.q_length;
  return sequence;
}

}  // namespace jattn
