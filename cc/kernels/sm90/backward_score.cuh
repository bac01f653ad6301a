// From raw products to probabilities and to gradients of scores: the score stage with its derivative, and the masks.
//
// Fragments as in sm90/softmax.cuh: value 4 i + 2 r + c of a thread is row lane / 4 + 8 r of its warp's 16 rows and
// column 8 i + 2 (lane % 4) + c. Kernels that own keys hold scores transposed: rows are keys, columns queries.
#pragma once

#include "base/numeric.cuh"
#include "sm90/backward_key_sums.cuh"
#include "sm90/backward_terms.cuh"
#include "sm90/cap_series.cuh"

namespace jattn::sm90 {

// The flags that call for a mask: mask_scores(), mask_positions(), mask_by_words().
template <Config C>
inline constexpr int kMaskFlags = kLimitsAbove | kLimitsBelow | kComparesSegments |
                                  (has_position_band(C) ? kComparesPositions : 0) | (C.mask ? kComparesMask : 0);

// The place where anything acts on scores, and its derivative.
template <Config C>
struct BackwardScoreStage {
  static constexpr bool kMakesExponents = has_score_terms(C);  // by make_exponents(), and this is not used

  // Raw products become what the exponent of weights() multiplies: with a softcap the tanh. By whole warps. Below the
  // cap, where nearly all scores are, tanh takes no special operations, of which the exponentials need all there are:
  // two more for each score kept the softcap at 0.79 of plain (head dim 128).
  template <int kCount>
  __device__ __forceinline__ static void finish_products(float (&s)[kCount], const ProblemParams& problem) {
    if constexpr (C.softcap) {
      if (caps_by_series(s, problem)) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) s[i] = tanh_by_short_series(s[i] * problem.softcap_in);
        return;
      }
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        s[i] *= problem.softcap_in;
        largest = fmaxf(largest, fabsf(s[i]));
      }
      if (__any_sync(~0u, largest > 1.0f)) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) s[i] = tanh_accurate<C.large_cap>(s[i]);
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) s[i] = tanh_below_one(s[i]);
      }
    } else if constexpr (C.scale_first) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] *= problem.scale_log2;
    }
  }

  // p, and the derivative of the score by the scaled product, which is not negative. A masked score is -inf and gives 0
  // for p and, with a softcap, for both: saturation comes with the instruction.
  struct Weights {
    float p, slope;
  };
  __device__ __forceinline__ static Weights weights(float score, float lse_log2, const ProblemParams& problem) {
    if constexpr (C.softcap) {
      const float p = exp2_fast(fmaf(score, problem.softcap_log2, -lse_log2));
      return {p, __saturatef(fmaf(-score, score, 1.0f))};
    } else {
      const float p = exp2_fast(C.scale_first ? score - lse_log2 : fmaf(score, problem.scale_log2, -lse_log2));
      return {p, 1.0f};
    }
  }

 private:
  // Whether the short series of the softcap holds for all of the warp. Not with a warpgroup for dq: it spills 12 bytes
  // there.
  template <int kCount>
  __device__ __forceinline__ static bool caps_by_series(const float (&s)[kCount], const ProblemParams& problem) {
    if constexpr (has_dq_warpgroup(C)) return false;
    const float limit = float(kShortCapSeriesLimit) * reciprocal_fast(problem.softcap_in);
    return __all_sync(~0u, squares_below(s, limit));
  }
};

// Sets scores of pairs that are invisible to -inf. kTransposed: rows are keys. ids belong to the whole tile.
template <Config C, bool kTransposed, int kCount>
__device__ __forceinline__ void mask_scores(float (&s)[kCount], int flags, const BackwardItem& item,
                                            FragmentOrigin origin, const int* row_ids, const int* column_ids) {
  constexpr int kAll = 1 << 30;
  if (flags & kLimitsAbove) {
    // Transposed: columns before `limit` are invisible; else columns from it on. Counted from this thread's first.
    int limit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = origin.row + 8 * r;
      if constexpr (kTransposed) {
        limit[r] = has_index_band(C) ? row - item.upper_offset + 1 - origin.column : -kAll;
        if (row >= item.kv_length) limit[r] = kAll;
      } else {
        limit[r] = (has_index_band(C) ? min(item.kv_length, row + item.upper_offset) : item.kv_length) - origin.column;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int column = i / 4 * 8 + i % 2;
      if (kTransposed ? column < limit[i / 2 % 2] : column >= limit[i / 2 % 2]) s[i] = -infinity();
    }
  }
  if constexpr (has_index_band(C)) {
    if (flags & kLimitsBelow) {
      int limit[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = origin.row + 8 * r;
        limit[r] = (kTransposed ? row - item.lower_offset + 1 : row + item.lower_offset) - origin.column;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int column = i / 4 * 8 + i % 2;
        if (kTransposed ? column >= limit[i / 2 % 2] : column < limit[i / 2 % 2]) s[i] = -infinity();
      }
    }
  }
  if constexpr (C.segments) {
    if (flags & kComparesSegments) {
      const int row_id[2] = {row_ids[origin.row_in_tile], row_ids[origin.row_in_tile + 8]};
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        const int2 ids = *reinterpret_cast<const int2*>(column_ids + origin.column_in_tile + 8 * i);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (ids.x != row_id[r]) s[4 * i + 2 * r] = -infinity();
          if (ids.y != row_id[r]) s[4 * i + 2 * r + 1] = -infinity();
        }
      }
    }
  }
}

// The same for a band of positions.
template <Config C, bool kTransposed, int kCount>
__device__ __forceinline__ void mask_positions(float (&s)[kCount], int flags, FragmentOrigin origin,
                                               const int* row_positions, const int* column_positions,
                                               const ProblemParams& problem) {
  if constexpr (has_position_band(C)) {
    if (!(flags & kComparesPositions)) return;
    const int row_position[2] = {row_positions[origin.row_in_tile], row_positions[origin.row_in_tile + 8]};
    // Limits of column - row; positions and limits are at most 2^29 and 2^30 in size.
    const int low = kTransposed ? -problem.band_right : -problem.band_left;
    const int high = kTransposed ? problem.band_left : problem.band_right;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const int2 positions = *reinterpret_cast<const int2*>(column_positions + origin.column_in_tile + 8 * i);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int first = positions.x - row_position[r], second = positions.y - row_position[r];
        if (first < low || first > high) s[4 * i + 2 * r] = -infinity();
        if (second < low || second > high) s[4 * i + 2 * r + 1] = -infinity();
      }
    }
  }
}

// The same for a dense mask. words: those of the tile, words_row apart from row to row.
template <Config C, int kCount>
__device__ __forceinline__ void mask_by_words(float (&s)[kCount], int flags, int row_in_tile, const uint32_t* words,
                                              int words_row) {
  if constexpr (C.mask) {
    if (!(flags & kComparesMask)) return;
    const uint32_t* own = words + row_in_tile * words_row + threadIdx.x % 4;
    const uint32_t bits[2] = {own[0], own[8 * words_row]};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if ((bits[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1) == 0) s[i] = -infinity();
    }
  }
}

// Exponents of queries that see no key, whose lse is +inf, become -inf whatever the bias or the program made.
template <int kCount>
__device__ __forceinline__ void mask_empty_columns(float (&exponents)[kCount], unsigned lse_address) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float2 lse = ptx::load_shared_f32x2(lse_address + 32 * i);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (lse.x == infinity()) exponents[4 * i + 2 * r] = -infinity();
      if (lse.y == infinity()) exponents[4 * i + 2 * r + 1] = -infinity();
    }
  }
}

// A weight is >= 0, so a set sign bit marks a dropped pair: its p for dv is 0 and its ds is -|weight| delta.
template <Config C>
__device__ __forceinline__ float marked(float weight, bool dropped) {
  if constexpr (!C.dropout) return weight;
  return dropped ? -fabsf(weight) : fabsf(weight);
}
template <Config C>
__device__ __forceinline__ unsigned pack_kept(float low, float high) {
  using Traits = ElementTraits<C.element>;
  return C.dropout ? Traits::pack_clamped(low, high) : Traits::pack(low, high);
}

// Transposed scores become probabilities, packed as the operand of dv = p dout, and weights: probabilities times slope.
// lse_address: that of this thread's first column.
template <Config C, int kCount>
__device__ __forceinline__ void transposed_weights(float (&s)[kCount], unsigned (&p)[kCount / 2], unsigned lse_address,
                                                   const Drops<C, kCount, true>& drops, const ProblemParams& problem) {
  using Stage = BackwardScoreStage<C>;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float2 lse = ptx::load_shared_f32x2(lse_address + 32 * i);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int index = 4 * i + 2 * r;
      float& low = s[index];
      float& high = s[index + 1];
      const auto first = Stage::weights(low, lse.x, problem);
      const auto second = Stage::weights(high, lse.y, problem);
      low = marked<C>(first.p, drops[index]);
      high = marked<C>(second.p, drops[index + 1]);
      p[2 * i + r] = pack_kept<C>(low, high);
      low *= first.slope;
      high *= second.slope;
    }
  }
}

// The same from exponents.
template <Config C, int kCount>
__device__ __forceinline__ void weights_of_exponents(float (&s)[kCount], unsigned (&p)[kCount / 2],
                                                     const KeptSlopes<C, kCount>& slopes,
                                                     const Drops<C, kCount, true>& drops) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    float& low = s[2 * i];
    float& high = s[2 * i + 1];
    low = marked<C>(exp2_fast(low), drops[2 * i]);
    high = marked<C>(exp2_fast(high), drops[2 * i + 1]);
    p[i] = pack_kept<C>(low, high);
    low = slopes.weight(low, 2 * i);
    high = slopes.weight(high, 2 * i + 1);
  }
}

// weight (dp - delta), where dp is 0 for a dropped pair and multiplied by factor for others. Without dropout plain. If
// has_scaled_statistics(), the factor is part of the weight, and delta is divided by it.
template <Config C>
__device__ __forceinline__ float score_gradient(float weight, float dp, float delta, float factor) {
  if constexpr (!C.dropout) return weight * (dp - delta);
  if constexpr (has_scaled_statistics(C)) return fmaf(fmaxf(weight, 0.0f), dp, -(fabsf(weight) * delta));
  const bool dropped = __float_as_int(weight) < 0;
  return fabsf(weight) * (dropped ? -delta : fmaf(dp, factor, -delta));
}

// The flags of tiles with hidden pairs whose dout . v may be infinite: lengths hide rows of zeros (behind the keys of a
// document are those of the next), and products of float16, at most 2^32 each, add up to finite numbers.
template <Config C>
inline constexpr int kHidingFlags =
    C.element == Element::kF16 ? 0
                               : (has_index_band(C) ? kLimitsAbove | kLimitsBelow : 0) |
                                     (C.documents ? kLimitsAbove : 0) | (C.segments ? kComparesSegments : 0) |
                                     (has_position_band(C) ? kComparesPositions : 0) | (C.mask ? kComparesMask : 0);

// A program may hide any pair.
template <Config C>
__device__ __forceinline__ bool hides_pairs(int flags) {
  return (C.program && C.element != Element::kF16) || (flags & kHidingFlags<C>) != 0;
}

// What stands behind a mask may be any finite numbers, of which a dp may overflow, and 0 * infinity is NaN: where the
// weight is 0, dp becomes 0, before a gradient is made of it.
template <int kCount>
__device__ __forceinline__ void clear_hidden(float (&dp)[kCount], const float (&weights)[kCount], bool hides) {
  if (!hides) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (weights[i] == 0.0f) dp[i] = 0.0f;
  }
}

// The same of the gradients themselves, packed as their weights are: half the instructions. A weight that is not 0 is
// not rounded to 0 by bfloat16, which has the exponents of float32; by float16 it may be.
template <Config C, int kWords>
__device__ __forceinline__ void clear_hidden(unsigned (&ds)[kWords], const unsigned (&weights)[kWords], bool hides) {
  if constexpr (C.element == Element::kBF16) {
    if (!hides) return;
#pragma unroll
    for (int i = 0; i < kWords; ++i) ds[i] &= ElementTraits<C.element>::unequal_zero(weights[i]);
  }
}

// What weights are multiplied by where they pass from thread to thread in 16 bits: float16 has few bits for
// probabilities below 2^-14 and none below 2^-25, whose ds may be all that a key gets. A weight, without slopes of a
// program, is 1 at most, and 2.83 where the lse of scores near 10^7 is rounded.
template <Config C>
inline constexpr float kWeightUnit = C.element == Element::kF16 ? 16384.0f : 1.0f;

// Weights in units of 1 / kWeightUnit, rounded to the element type, with their marks.
template <Config C, int kCount>
__device__ __forceinline__ void pack_weights(unsigned (&packed)[kCount / 2], const float (&weights)[kCount]) {
  static_assert(kWeightUnit<C> == 1.0f || !has_program_slopes<C>());
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    packed[i] = ElementTraits<C.element>::pack(kWeightUnit<C> * weights[2 * i], kWeightUnit<C> * weights[2 * i + 1]);
  }
}

// ds = weights (dp - delta), packed as the operand of dk = ds q.
template <Config C, int kCount>
__device__ __forceinline__ void transposed_gradients(unsigned (&ds)[kCount / 2], KeySums<C>& sums,
                                                     const float (&weights)[kCount], const float (&dp)[kCount],
                                                     unsigned delta_address, float factor) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float2 delta = ptx::load_shared_f32x2(delta_address + 32 * i);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int index = 4 * i + 2 * r;
      const float low = score_gradient<C>(weights[index], dp[index], delta.x, factor);
      const float high = score_gradient<C>(weights[index + 1], dp[index + 1], delta.y, factor);
      sums.add(r, low, high);
      ds[2 * i + r] = ElementTraits<C.element>::pack(low, high);
    }
  }
}

// The same from what pack_weights() made. The unit goes to dp and delta: to both by one multiply-add.
template <Config C, int kCount>
__device__ __forceinline__ void transposed_gradients(unsigned (&ds)[kCount / 2], const unsigned (&weights)[kCount / 2],
                                                     const float (&dp)[kCount], unsigned delta_address, float factor) {
  using Traits = ElementTraits<C.element>;
  constexpr float kUnit = 1.0f / kWeightUnit<C>;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float2 delta = ptx::load_shared_f32x2(delta_address + 32 * i);
    const float first = kUnit * delta.x, second = kUnit * delta.y;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned both = weights[2 * i + r];
      const int low = 4 * i + 2 * r;
      ds[2 * i + r] = Traits::pack(score_gradient<C>(Traits::low(both), kUnit * dp[low], first, factor),
                                   score_gradient<C>(Traits::high(both), kUnit * dp[low + 1], second, factor));
    }
  }
}

}  // namespace jattn::sm90
