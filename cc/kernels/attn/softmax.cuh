// Online softmax in base 2 over accumulator fragments: row maximum, lazy rescale, exponentials, row sums, lse.
//
// A lane holds, for each 16-row block, rows g and g + 8 (slot 0 and 1). row_max is the same in the four lanes of a
// quad; row_sum is each lane's own part until finish_row().
#pragma once

#include "base/numeric.cuh"

namespace jattn {

// The maximum is only moved when it grew by more than this (log2): until then probabilities exceed 1 by at most 2^8,
// which float16 holds, and the accumulator need not be multiplied. Removes nearly all rescales.
inline constexpr float kRescaleThresholdLog2 = 8.0f;

// Above this (log2) the product row_max * factor has no bits left for the difference to the scores.
inline constexpr float kFarLog2 = 16777216.0f;

template <int kM>
struct RowStatistics {
  float row_max[kM][2];  // of the scores as given, before the multiplication by `factor`
  float row_sum[kM][2];

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        row_max[m][h] = -infinity();
        row_sum[m][h] = 0.0f;
      }
    }
  }
};

// Turns scores into probabilities 2^(factor * (s - row_max)) in place and rescales the accumulator where needed. factor
// > 0; invisible scores are -inf. A row that has seen no key keeps row_max = -inf and probabilities 0; a NaN score
// gives a NaN probability, whatever the maximum.
template <int kM, int kN, int kNOut>
__device__ __forceinline__ void softmax_step(float (&s)[kM][kN][4], float (&out)[kM][kNOut][4], RowStatistics<kM>& rows,
                                             float factor) {
  float tile_max[kM][2];
  bool grown = false;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]);
#pragma unroll
      for (int n = 1; n < kN; ++n) x = fmaxf(x, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
      tile_max[m][h] = quad_max(x);
      grown |= (tile_max[m][h] - rows.row_max[m][h]) * factor > kRescaleThresholdLog2;
    }
  }
  if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float next = fmaxf(rows.row_max[m][h], tile_max[m][h]);
        const float finite = next == -infinity() ? 0.0f : next;
        const float alpha = exp2_fast((rows.row_max[m][h] - finite) * factor);
        rows.row_max[m][h] = next;
        rows.row_sum[m][h] *= alpha;
#pragma unroll
        for (int n = 0; n < kNOut; ++n) {
          out[m][n][2 * h] *= alpha;
          out[m][n][2 * h + 1] *= alpha;
        }
      }
    }
  }
  // One multiply-add per score, except where it would see the rounding error of row_max * factor: the row_max is then
  // subtracted first.
  float farthest = 0.0f;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float row_max = rows.row_max[m][h];
      farthest = fmaxf(farthest, row_max == -infinity() ? 0.0f : fabsf(row_max));
    }
  }
  const bool far = __any_sync(0xffffffffu, farthest * factor > kFarLog2);
  if (far) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float row_max = rows.row_max[m][h] == -infinity() ? 0.0f : rows.row_max[m][h];
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          s[m][n][2 * h] -= row_max;
          s[m][n][2 * h + 1] -= row_max;
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float row_max = rows.row_max[m][h];
      const float shift = far || row_max == -infinity() ? 0.0f : row_max * factor;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float p = exp2_fast(fmaf(s[m][n][2 * h + e], factor, -shift));
          s[m][n][2 * h + e] = p;
          sum += p;
        }
      }
      rows.row_sum[m][h] += sum;
    }
  }
}

// The row maximum in natural units. It stays where its logarithm in base 2 is finite, which the backward needs: a row
// may be filled with the least finite bias.
template <bool kNatural>
__device__ __forceinline__ float natural_maximum(float row_max, float factor) {
  return kNatural ? fminf(fmaxf(row_max, -kLargestNatural), kLargestNatural) : row_max * factor * kLn2;
}

// The lse of a row that sees keys, in base 2, as the backward kernels subtract it from scores. Far from 0 (a large
// bias) an lse is too coarse to give probabilities back: moved up by more than its error it gives numbers from 0 to 1
// and not infinity. One that was held at the largest may lie below the scores: its row gets zeros.
__device__ __forceinline__ float shifted_lse_log2(float lse) {
  if (lse >= kLargestNatural) return infinity();
  const float lse_log2 = lse * kLog2E;
  return fabsf(lse_log2) > kFarLog2 ? fmaf(fabsf(lse_log2), 0x1p-22f, lse_log2) : lse_log2;
}

// Gives 1 / row_sum (0 for an empty row) and the natural logarithm of the sum of exponentials of one row.
struct RowResult {
  float inverse_sum, lse;
};

template <bool kNatural>
__device__ __forceinline__ RowResult finish_row(float row_max, float lane_sum, float factor) {
  const float sum = quad_sum(lane_sum);
  if (sum == 0.0f) return {0.0f, -infinity()};
  return {reciprocal_fast(sum), natural_maximum<kNatural>(row_max, factor) + logf(sum)};
}

// The same with a sink: a key of this score (natural units) that has no value. It may be infinite. A row that sees no
// key stays empty.
template <bool kNatural>
__device__ __forceinline__ RowResult finish_row_with_sink(float row_max, float lane_sum, float factor, float sink) {
  const float sum = quad_sum(lane_sum);
  if (sum == 0.0f) return {0.0f, -infinity()};
  const float keys = natural_maximum<kNatural>(row_max, factor);
  const float greatest = fmaxf(keys, sink);
  const float keys_part = keys == greatest ? 1.0f : exp2_fast((keys - greatest) * kLog2E);
  const float sink_part = sink == greatest ? 1.0f : exp2_fast((sink - greatest) * kLog2E);
  const float total = fmaf(sum, keys_part, sink_part);
  return {keys_part * reciprocal_fast(total), greatest + logf(total)};
}

}  // namespace jattn
