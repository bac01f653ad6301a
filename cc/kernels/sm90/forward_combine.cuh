// Adds up what blocks computed from parts of the keys (Config::partial_results): out, lse, sinks.
//
// Unit of the family forward_combine: parameters CombineParams; of Config it reads element, sinks and key_splits. One
// thread per eight columns of a row; the parts are added in their order, so equal inputs give equal bits.
#pragma once

#include "base/numeric.cuh"
#include "sm90/forward_params.cuh"
#include "sm90/shape.cuh"

namespace jattn::sm90 {

template <Config C>
__device__ __forceinline__ void forward_combine(const CombineParams& params) {
  const int chunks = params.head_dim_v / kCombineColumns;
  const int64_t index = int64_t(blockIdx.x) * combine_threads(C) + threadIdx.x;
  if (index >= params.rows * chunks) return;
  const int64_t row = index / chunks;
  const int column = int(index - row * chunks) * kCombineColumns;
  const int64_t flat_head = row / params.q_len;
  const int64_t t = row - flat_head * params.q_len;
  const int64_t batch = flat_head / params.num_heads;
  const int64_t head = flat_head - batch * params.num_heads;

  // The greatest maximum of the parts that saw keys; NaN if one is, as in a kernel that sees all keys.
  float row_max = -infinity(), unit_log2 = 0.0f, unit = 0.0f;
#pragma unroll 8  // loads of several parts under way at once
  for (int part = 0; part < C.key_splits; ++part) {
    const RowPart statistics = params.row_parts[part * params.rows + row];
    unit_log2 = statistics.unit_log2;
    unit = statistics.unit;
    const bool greater = !(statistics.row_max <= row_max);
    if (statistics.row_sum != 0.0f && greater && row_max == row_max) row_max = statistics.row_max;
  }

  float sum = 0.0f;
  float out[kCombineColumns] = {};
#pragma unroll 8
  for (int part = 0; part < C.key_splits; ++part) {
    const RowPart statistics = params.row_parts[part * params.rows + row];
    if (statistics.row_sum == 0.0f) continue;
    const float ratio = statistics.row_max == row_max ? 1.0f : exp2_fast((statistics.row_max - row_max) * unit_log2);
    const float weight = statistics.row_sum * ratio;
    sum += weight;
    const float* from = params.partial_out + (part * params.rows + row) * params.head_dim_v + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 four = *reinterpret_cast<const float4*>(from + 4 * half);
      out[4 * half] = fmaf(weight, four.x, out[4 * half]);
      out[4 * half + 1] = fmaf(weight, four.y, out[4 * half + 1]);
      out[4 * half + 2] = fmaf(weight, four.z, out[4 * half + 2]);
      out[4 * half + 3] = fmaf(weight, four.w, out[4 * half + 3]);
    }
  }

  const bool sees_keys = sum != 0.0f;
  float greatest = row_max * unit, keys_part = 1.0f, total = sum;
  if constexpr (C.sinks) {
    const float sink = *element_of_head(params.sinks, batch, head);
    const float keys = greatest;
    greatest = fmaxf(keys, sink);
    keys_part = keys == greatest ? 1.0f : exp2_fast((keys - greatest) * kLog2E);
    total = fmaf(sum, keys_part, sink == greatest ? 1.0f : exp2_fast((sink - greatest) * kLog2E));
  }
  if (column == 0) {
    float lse = greatest + logf(total);
    if (fabsf(lse) < infinity())
      lse = fminf(fmaxf(lse, -kLargestNatural), kLargestNatural);  // as OnlineSoftmax::bounded_lse
    params.lse[row] = sees_keys ? lse : -infinity();
  }
  const float factor = sees_keys ? keys_part / total : 0.0f;
  using Traits = ElementTraits<C.element>;
  uint4 words;
  unsigned* word = &words.x;
#pragma unroll
  for (int i = 0; i < kCombineColumns / 2; ++i) word[i] = Traits::pack(out[2 * i] * factor, out[2 * i + 1] * factor);
  const int64_t out_row = (batch * params.q_len + t) * params.num_heads + head;
  auto* to = static_cast<typename Traits::Storage*>(params.out) + out_row * params.head_dim_v + column;
  *reinterpret_cast<uint4*>(to) = words;
}

}  // namespace jattn::sm90
