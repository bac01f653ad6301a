// Gradients of captures from their copies, which are sums of floats or of whole numbers (sm80/backward_dcaptures.cuh).
//
// Unit of the family capture_sums: entry capture_sums<kConfig>, parameters CaptureSumsParams; the members of
// ScoreProgram that say which capture an element is of.
#pragma once

#include "attn/capture_units.cuh"
#include "attn/score_program.cuh"
#include "config.cuh"
#include "params.cuh"
#include "passes/shape.cuh"

namespace jattn {

template <Config kConfig>
__device__ __forceinline__ void capture_sums(const CaptureSumsParams& params) {
  const int64_t index = int64_t(blockIdx.x) * capture_sums_threads(kConfig) + threadIdx.x;
  if (index >= params.elements) return;
  if (params.whole_sums == nullptr) {
    float sum = 0.0f;
    for (int copy = 0; copy < params.copies; ++copy) sum += params.sums[copy * params.elements + index];
    params.gradients[index] = sum;
    return;
  }
  unsigned long long sum = 0;
  for (int copy = 0; copy < params.copies; ++copy) sum += params.whole_sums[copy * params.elements + index];
  int capture = 0;
  while (index >= ScoreProgram::capture_end(capture)) ++capture;
  const double units = capture_units(params.largest[capture], params.pairs_log2, ScoreProgram::kReads);
  params.gradients[index] = float(double(static_cast<long long>(sum)) / units);
}

}  // namespace jattn
