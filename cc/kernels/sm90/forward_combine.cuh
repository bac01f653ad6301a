// Adds up what blocks computed from parts of the keys (Config::partial_results): out, lse, sinks.
//
// Unit of the family forward_combine: parameters CombineParams; of Config it reads element, sinks and key_splits. One
// thread per eight columns of a row; the parts are added in their order, so equal inputs give equal bits.
#pragma once

#include "base/numeric.cuh"
#include "sm90/forward_params.cuh"
#include "sm90/shape.cuh"

namespace jattn::sm90 {

// The exponent of a sum of probabilities, and its power of two; held where both that and its inverse are floats.
__device__ __forceinline__ int exponent_of(float sum) {
  return min(max((__float_as_int(sum) >> 23 & 255) - 127, -126), 126);
}
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// The logarithm of 2^exponent, in units of a part's maximum, over the same of another.
__device__ __forceinline__ float log2_ratio(const RowPart& a, int a_exponent, const RowPart& b, int b_exponent) {
  const float maxima = a.row_max == b.row_max ? 0.0f : (a.row_max - b.row_max) * a.unit_log2;
  return maxima + float(a_exponent - b_exponent);
}

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

  // Sums are told in units of the part that has the largest one; rows of others that have settled (softmax.cuh) may
  // have the greater maximum. NaN if one is, as in a kernel that sees all keys.
  RowPart largest{-infinity(), 0.0f, 0.0f, 0.0f};
  int largest_exponent = 0;
#pragma unroll 8  // loads of several parts under way at once
  for (int part = 0; part < C.key_splits; ++part) {
    const RowPart statistics = params.row_parts[part * params.rows + row];
    const int exponent = exponent_of(statistics.row_sum);
    const bool larger = !(log2_ratio(statistics, exponent, largest, largest_exponent) <= 0.0f);
    if (statistics.row_sum != 0.0f && larger && largest.row_max == largest.row_max) {
      largest = statistics;
      largest_exponent = exponent;
    }
  }

  float sum = 0.0f;
  float out[kCombineColumns] = {};
#pragma unroll 8
  for (int part = 0; part < C.key_splits; ++part) {
    const RowPart statistics = params.row_parts[part * params.rows + row];
    if (statistics.row_sum == 0.0f) continue;
    const int exponent = exponent_of(statistics.row_sum);
    const float ratio = exp2_fast(log2_ratio(statistics, exponent, largest, largest_exponent));
    const float weight = statistics.row_sum * power_of_two(-exponent) * ratio;
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
  float greatest = fmaf(float(largest_exponent), kLn2, largest.row_max * largest.unit), keys_part = 1.0f, total = sum;
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
