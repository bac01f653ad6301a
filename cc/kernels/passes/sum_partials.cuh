// Adds partial sums in their order and rounds the result: the last step of a dbias that several blocks shared.
//
// Unit of the family sum_partials: entry sum_partials<kConfig>, parameters SumPartialsParams. Reads bias_element only.
#pragma once

#include "base/numeric.cuh"
#include "config.cuh"
#include "params.cuh"
#include "passes/shape.cuh"

namespace jattn {

template <Config kConfig>
__device__ __forceinline__ void sum_partials(const SumPartialsParams& params) {
  using Traits = ElementTraits<kConfig.bias_element>;
  const int64_t index = int64_t(blockIdx.x) * sum_partials_threads(kConfig) + threadIdx.x;
  if (index >= params.elements) return;
  const int64_t group = index / params.group;
  const float* part = params.partials + group * params.splits * params.group + (index - group * params.group);
  float sum = 0.0f;
  for (int split = 0; split < params.splits; ++split, part += params.group) sum += *part;
  static_cast<typename Traits::Storage*>(params.result)[index] = Traits::from_float(sum);
}

}  // namespace jattn
