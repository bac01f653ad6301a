// Adds up what the batch entries contribute to the gradient of a bias that they share, in their order, in float32.
//
// Unit of the family backward_sum; reads element. The parts are gradients of scores, rounded to the element type by the
// kernel that made them (Config::stores_ds).
#pragma once

#include "base/numeric.cuh"
#include "sm90/backward_params.cuh"
#include "sm90/backward_shape.cuh"

namespace jattn::sm90 {

template <Config C>
__device__ __forceinline__ void backward_sum(const SumParams& params) {
  using Traits = ElementTraits<C.element>;
  const int64_t first = (int64_t(blockIdx.x) * sum_threads(C) + threadIdx.x) * kSumElements;
  if (first >= params.elements) return;
  const auto* part = static_cast<const uint16_t*>(params.parts) + first;
  float sum[kSumElements] = {};
#pragma unroll 4
  for (int entry = 0; entry < params.batch; ++entry) {
    const uint4 x = __ldcs(reinterpret_cast<const uint4*>(part + entry * params.stride));
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] += Traits::low(words[i]);
      sum[2 * i + 1] += Traits::high(words[i]);
    }
  }
  uint4 result;
  result.x = Traits::pack(sum[0], sum[1]);
  result.y = Traits::pack(sum[2], sum[3]);
  result.z = Traits::pack(sum[4], sum[5]);
  result.w = Traits::pack(sum[6], sum[7]);
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(params.result) + first) = result;
}

}  // namespace jattn::sm90
