// What the backward kernels need per query row: delta = rowsum(dout * out) - dlse and lse in base 2, padded; and zeros
// in the accumulator of dq.
//
// Unit of the family row_delta: entry row_delta<kConfig>, parameters RowDeltaParams. Reads element, head_dim_v (to size
// the part of a warp that shares a row) and narrow_rows.
#pragma once

#include "attn/sequence.cuh"
#include "attn/softmax.cuh"
#include "base/numeric.cuh"
#include "config.cuh"
#include "params.cuh"
#include "passes/shape.cuh"

namespace jattn {

template <Config kConfig>
__device__ __forceinline__ void row_delta(const RowDeltaParams& params) {
  using Traits = ElementTraits<kConfig.element>;
  constexpr int kThreads = row_delta_threads(kConfig);
  constexpr int kChunkElements = 16 / Traits::kBytes;
  // Lanes that share a row: enough for one chunk each, a power of two.
  constexpr int kLanes = kConfig.head_dim_v >= 32 * kChunkElements   ? 32
                         : kConfig.head_dim_v >= 16 * kChunkElements ? 16
                         : kConfig.head_dim_v >= 8 * kChunkElements  ? 8
                                                                     : 4;
  const int blocks = params.rows_padded / kRowPadding;
  const int64_t flat_head = blockIdx.x / blocks;
  const int block = int(blockIdx.x - flat_head * blocks);
  const int entry = int(flat_head / params.num_heads);
  const int head = int(flat_head - int64_t(entry) * params.num_heads);
  const int length = params.q_lengths ? clamped_length(params.q_lengths, entry, params.q_len) : params.q_len;
  const int first = block * kRowPadding;
  const int lane = threadIdx.x % kLanes;

  for (int i = threadIdx.x / kLanes; i < kRowPadding; i += kThreads / kLanes) {
    const int row = first + i;
    float lse = -infinity();
    if (row < length) lse = params.lse[flat_head * params.q_len + row];
    float sum = 0.0f;
    const bool sees_keys = lse != -infinity();
    if (sees_keys) {
      const int64_t offset = ((int64_t(entry) * params.q_len + row) * params.num_heads + head) * params.head_dim_v;
      const auto* out = static_cast<const typename Traits::Storage*>(params.out) + offset;
      const auto* dout = static_cast<const typename Traits::Storage*>(params.dout) + offset;
      if constexpr (kConfig.narrow_rows) {
        for (int d = lane; d < params.head_dim_v; d += kLanes)
          sum = fmaf(Traits::to_float(out[d]), Traits::to_float(dout[d]), sum);
      } else {
        for (int d = lane * kChunkElements; d < params.head_dim_v; d += kLanes * kChunkElements) {
          sum += dot_chunk<kConfig.element>(__ldg(reinterpret_cast<const uint4*>(out + d)),
                                            __ldg(reinterpret_cast<const uint4*>(dout + d)));
        }
      }
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (sees_keys && params.dlse) sum -= params.dlse[flat_head * params.q_len + row];
    if (lane == 0) {
      params.lse_log2[flat_head * params.rows_padded + row] = sees_keys ? shifted_lse_log2(lse) : infinity();
      params.delta[flat_head * params.rows_padded + row] = sum;
    }
  }
  if (params.dq_accumulator) {
    const int64_t width = params.accumulator_width;
    float4* target =
        reinterpret_cast<float4*>(params.dq_accumulator + (flat_head * params.rows_padded + first) * width);
    for (int i = threadIdx.x; i < kRowPadding * width / 4; i += kThreads)
      target[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

}  // namespace jattn
