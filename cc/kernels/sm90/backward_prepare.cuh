// What the backward kernels need per query row: delta = rowsum(dout * out) - dlse and lse in base 2, padded; a flag for
// each kStatisticsRows rows, of whether some see no key; and zeros in the accumulator of dq, or in the counters of its
// turns, and in the counter of items.
//
// Unit of the family backward_prepare. Reads element and head_dim_v of Config. One block per kStatisticsRows rows of a
// head, blocks of a head in a row, the last heads first: the main kernel begins with the first, of which L2 may still
// hold what was read last.
#pragma once

#include "attn/dropout.cuh"
#include "attn/sequence.cuh"
#include "attn/softmax.cuh"
#include "base/numeric.cuh"
#include "sm90/backward_params.cuh"
#include "sm90/backward_shape.cuh"

namespace jattn::sm90 {

template <Config C>
__device__ __forceinline__ void backward_prepare(const PrepareParams& params) {
  constexpr int kThreads = prepare_threads(C), kLanes = prepare_row_lanes(C);
  constexpr int kRowsAtOnce = kThreads / kLanes, kPasses = kStatisticsRows / kRowsAtOnce;
  constexpr int kUnroll = 4;
  static_assert(kPasses % kUnroll == 0);
  const int blocks = int(params.rows_padded / kStatisticsRows);
  const int number = int(gridDim.x - 1 - blockIdx.x);
  const int flat_head = number / blocks;
  const int block = number - flat_head * blocks;
  const int entry = flat_head / params.num_heads;
  const int head = flat_head - entry * params.num_heads;
  const int length = params.q_lengths ? clamped_length(params.q_lengths, entry, params.q_len) : params.q_len;
  const int column = threadIdx.x % kLanes * 8;
  const int first = block * kStatisticsRows + threadIdx.x / kLanes;
  const int64_t row_stride = int64_t(params.num_heads) * params.head_dim_v;
  const int64_t offset = (int64_t(entry) * params.q_len * params.num_heads + head) * params.head_dim_v + column;
  const auto* out = static_cast<const uint16_t*>(params.out) + offset;
  const auto* dout = static_cast<const uint16_t*>(params.dout) + offset;
  const float* lse = params.lse + int64_t(flat_head) * params.q_len;
  const int64_t padded = int64_t(flat_head) * params.rows_padded;

  if (params.dq_accumulator) {
    const int floats = kStatisticsRows * params.accumulator_width;
    float4* target = reinterpret_cast<float4*>(params.dq_accumulator) +
                     (padded + block * kStatisticsRows) * (params.accumulator_width / 4);
    for (int i = threadIdx.x; i < floats / 4; i += kThreads) target[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  // Rows of blocks follow each other, as those of the accumulator do.
  constexpr int kTurns = kStatisticsRows / kDqTurnRows * kBackwardConsumers;
  if (params.dq_turns && threadIdx.x < kTurns) params.dq_turns[int64_t(number) * kTurns + threadIdx.x] = 0;

  if (params.next_item && blockIdx.x == 0) {
    for (int i = threadIdx.x; i < params.counters; i += kThreads) params.next_item[i] = 0;
  }

  // exp2(score - lse_log2) times the factor of kept pairs, and delta over it.
  float log2_factor = 0.0f, inverse_factor = 1.0f;
  if (params.dropout_rate) {
    const float factor = kept_factor(dropout_threshold(params.dropout_rate[entry * params.dropout_rate_stride]));
    log2_factor = log2f(factor);
    inverse_factor = 1.0f / factor;
  }

  bool empty_rows = false;
#pragma unroll 1
  for (int pass = 0; pass < kPasses; pass += kUnroll) {
    uint4 x[kUnroll], y[kUnroll];
    float row_lse[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int row = first + (pass + i) * kRowsAtOnce;
      x[i] = y[i] = make_uint4(0, 0, 0, 0);
      row_lse[i] = -infinity();
      if (row < length) {
        row_lse[i] = lse[row];
        if (column < params.head_dim_v) {
          x[i] = __ldcs(reinterpret_cast<const uint4*>(out + row * row_stride));
          y[i] = __ldg(reinterpret_cast<const uint4*>(dout + row * row_stride));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int row = first + (pass + i) * kRowsAtOnce;
      float sum = dot_chunk<C.element>(x[i], y[i]);
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      // Selected: out and dout of a row that sees no key may hold anything.
      const bool sees_keys = row_lse[i] != -infinity();
      if (threadIdx.x % kLanes == 0) {
        if (sees_keys && params.dlse) sum -= params.dlse[int64_t(flat_head) * params.q_len + row];
        params.lse_log2[padded + row] = sees_keys ? shifted_lse_log2(row_lse[i]) - log2_factor : infinity();
        params.delta[padded + row] = sees_keys ? sum * inverse_factor : 0.0f;
      }
      empty_rows |= !sees_keys && row < params.q_len;
    }
  }
  const bool any = __syncthreads_or(empty_rows);
  if (threadIdx.x == 0) params.row_flags[int64_t(flat_head) * blocks + block] = any;
}

}  // namespace jattn::sm90
