// A softcap as a polynomial of the raw product, for products far below the cap, where nearly all are: no special
// operations, of which the exponentials need all there are. Plain C++20 but for the tests: the host compiler reads it
// too.
#pragma once

#include "base/types.cuh"

namespace jattn::sm90 {

// softcap * tanh(scale * s / softcap) * log2(e) for products s of magnitude below `limit`:
// s * (factor[0] + factor[1] s^2 + factor[2] s^4 + ...).
template <int kTerms>
struct CapSeries {
  float limit;  // 0: never
  float factor[kTerms];
};

// The same of three terms as s * ((root s^2 + shift)^2 + rest): as many instructions, but every coefficient is an
// operand of one with two registers at most, and so need not be in a third. Beside products an instruction costs its
// reads of registers.
struct SquaredCapSeries {
  float limit;  // 0: never
  float root, shift, rest;
};

// tanh(x) / x in powers of x^2 for |x| below a limit, least greatest relative error (5.4e-7 and 7.7e-07). The error of
// a score is then that of the exponential and reciprocal of float32 (tests/cpu/test_cap_series.py).
inline constexpr double kCapSeriesLimit = 0.5;
inline constexpr double kCapSeries[] = {0.9999994557691761, -0.33326317923363724, 0.13190296469626261,
                                        -0.044402222574614146};
inline constexpr double kShortCapSeriesLimit = 0.28;
inline constexpr double kShortCapSeries[] = {0.9999992268341992, -0.3331552301749458, 0.12720917021211722};

// Not for a scale <= 0: the capped maximum of a row must be that of its greatest product.
template <int kTerms>
CapSeries<kTerms> cap_series(double limit, const double (&coefficients)[kTerms], double scale, double softcap) {
  if (!(scale > 0.0) || !(softcap > 0.0)) return {};
  const double to_argument = scale / softcap;
  CapSeries<kTerms> series{float(limit / to_argument), {}};
  double power = to_argument * softcap * 1.4426950408889634;
  for (int i = 0; i < kTerms; ++i, power *= to_argument * to_argument) {
    series.factor[i] = float(coefficients[i] * power);
    // Outside of this range a factor or a power of s would not be a normal float.
    if (!(power > 1e-35 && power < 1e35)) return {};
  }
  return to_argument > 1e-15 && to_argument < 1e15 ? series : CapSeries<kTerms>{};
}

// Where scores are not tested, the sums over a thread's columns of a tile, of probabilities that refer to zero, tell
// afterwards. Below the probability of a score at kShortCapSeriesLimit all scores are below that limit: the series
// ascends everywhere, and one beyond would exceed the sum by itself. That must be 2^10 at least, so that the sums of
// ordinary scores are far below. From kLeastTrustedSum on, scores below the negative limit have no part in the sum that
// counts: their probabilities are less than 2^-10, and wrong by 2e-6 of the sum together
// (tests/cpu/test_cap_series.py).
inline constexpr double kLeastTrustedLog2 = 10.0;
inline constexpr float kLeastTrustedSum = 1.0f;

// The largest softcap, in units of log2, whose rows settle at zero before their first tile: sums of 2^20 keys are then
// at most 2^100 (Consumer::kLargestSum).
inline constexpr float kLargestBoundLog2 = 80.0f;

// The logarithm of the bound of sums, or 0: where it would be too near to them, and where probabilities refer to a
// maximum.
constexpr double trusted_sum_log2(double softcap_log2) {
  constexpr double kSquare = kShortCapSeriesLimit * kShortCapSeriesLimit;
  constexpr double kSlope = kShortCapSeries[0] + kSquare * (kShortCapSeries[1] + kSquare * kShortCapSeries[2]);
  const double at_limit = softcap_log2 * kShortCapSeriesLimit * kSlope;
  return at_limit >= kLeastTrustedLog2 && softcap_log2 <= kLargestBoundLog2 ? at_limit : 0.0;
}

#ifdef __CUDACC__

// The polynomial without its last factor s.
__device__ __forceinline__ float capped_over_product(const SquaredCapSeries& series, float s) {
  const float inner = fmaf(s * series.root, s, series.shift);
  return fmaf(inner, inner, series.rest);
}
template <int kTerms>
__device__ __forceinline__ float capped_over_product(const CapSeries<kTerms>& series, float s) {
  const float square = s * s;
  float slope = series.factor[kTerms - 1];
#pragma unroll
  for (int term = kTerms - 2; term >= 0; --term) slope = fmaf(slope, square, series.factor[term]);
  return slope;
}

// tanh(x) for |x| below kShortCapSeriesLimit. In the backward the argument is scaled first, so that factors are
// immediates: as parameters they take registers, and 50 bytes of them spill at head dim 128.
__device__ __forceinline__ float tanh_by_short_series(float x) {
  constexpr float kFirst = kShortCapSeries[0], kSecond = kShortCapSeries[1], kThird = kShortCapSeries[2];
  const float square = x * x;
  return x * fmaf(fmaf(kThird, square, kSecond), square, kFirst);
}

// Whether all values of a score fragment (softmax.cuh) are of less than this magnitude; NaN is not. Those of an absent
// row may be anything. As integers positive floats ascend and negative ones descend.
template <int kCount>
__device__ __forceinline__ bool all_below(const float (&s)[kCount], float limit, bool first_absent,
                                          bool second_absent) {
  int most[2] = {__float_as_int(s[0]), __float_as_int(s[2])};
  unsigned least[2] = {__float_as_uint(s[0]), __float_as_uint(s[2])};
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const int r = i / 2 % 2;
    most[r] = __vimax3_s32(most[r], __float_as_int(s[i]), __float_as_int(s[i + 1]));
    least[r] = __vimax3_u32(least[r], __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
  }
  const int bound = __float_as_int(limit);
  const unsigned negative_bound = __float_as_uint(-limit);
  return (first_absent || (most[0] < bound && least[0] < negative_bound)) &&
         (second_absent || (most[1] < bound && least[1] < negative_bound));
}

// The same for sure, at half the cost, by sums of sixteen or so squares: most often so where values are half as large.
// NaN is not below.
template <int kCount>
__device__ __forceinline__ bool squares_below(const float (&s)[kCount], float limit, bool first_absent = false,
                                              bool second_absent = false) {
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i % 4] = fmaf(s[i], s[i], sums[i % 4]);
  const float bound = limit * limit;
  return (first_absent || (sums[0] < bound && sums[1] < bound)) &&
         (second_absent || (sums[2] < bound && sums[3] < bound));
}

#endif  // __CUDACC__

}  // namespace jattn::sm90
