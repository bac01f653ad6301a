// Adds up the parts of the gradient of a bias that batch entries share, in their order, in float32.
//
// Unit of the family backward_sum; reads element. Each part is the sum of the gradients of scores of some batch
// entries, rounded to the element type by the kernel that made it (Config::stores_ds).
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
  for (int i = 0; i < params.count; ++i) {
    const uint4 x = __ldcs(reinterpret_cast<const uint4*>(part + i * params.stride));
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      sum[2 * word] += Traits::low(words[word]);
      sum[2 * word + 1] += Traits::high(words[word]);
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
