// Vectors as wide as the instruction set of the translation unit, and the few operations that attention needs.
//
// Everything in this folder that is included by several instruction-set files lives in an anonymous namespace: the
// same function exists once per set, and the linker must never merge them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jattn::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T, int kBytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kBytes)));
  typedef T Unaligned __attribute__((vector_size(kBytes), aligned(alignof(T)), may_alias));
};

template <typename T>
using Vec = typename VectorOf<T, kVectorBytes>::Type;

template <typename T>
constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(T));

template <typename T>
struct BitsOf;
template <>
struct BitsOf<float> {
  using Type = int32_t;
};
template <>
struct BitsOf<double> {
  using Type = int64_t;
};
template <typename T>
using Bits = typename BitsOf<T>::Type;

template <typename T>
inline Vec<T> load(const T* address) {
  return *reinterpret_cast<const typename VectorOf<T, kVectorBytes>::Unaligned*>(address);
}

template <typename T>
inline void store(T* address, Vec<T> value) {
  *reinterpret_cast<typename VectorOf<T, kVectorBytes>::Unaligned*>(address) = value;
}

template <typename T>
inline Vec<T> broadcast(T value) {
  return value - Vec<T>{};
}

template <typename T>
inline Vec<Bits<T>> as_bits(Vec<T> value) {
  return reinterpret_cast<Vec<Bits<T>>>(value);
}

template <typename T>
inline Vec<T> from_bits(Vec<Bits<T>> bits) {
  return reinterpret_cast<Vec<T>>(bits);
}

// Both keep a NaN in `value`, and a NaN in `bound` is never taken. On x86 the instructions do exactly that: they return
// the second operand if either is a NaN.
template <typename V>
inline V at_least(V value, V bound) {
  return value < bound ? bound : value;
}
template <typename V>
inline V at_most(V value, V bound) {
  return value > bound ? bound : value;
}
#if defined(__AVX512F__)
// GCC's headers start the unmasked forms of some operations from an undefined register, which its own
// -Wmaybe-uninitialized rejects. With a constant full mask the instruction is the same.
constexpr __mmask16 kEveryLane = 0xffff;
inline Vec<float> at_least(Vec<float> value, Vec<float> bound) { return _mm512_maskz_max_ps(kEveryLane, bound, value); }
inline Vec<float> at_most(Vec<float> value, Vec<float> bound) { return _mm512_maskz_min_ps(kEveryLane, bound, value); }
inline Vec<double> at_least(Vec<double> value, Vec<double> bound) {
  return _mm512_maskz_max_pd(static_cast<__mmask8>(kEveryLane), bound, value);
}
inline Vec<double> at_most(Vec<double> value, Vec<double> bound) {
  return _mm512_maskz_min_pd(static_cast<__mmask8>(kEveryLane), bound, value);
}
#elif defined(__AVX2__)
inline Vec<float> at_least(Vec<float> value, Vec<float> bound) { return _mm256_max_ps(bound, value); }
inline Vec<float> at_most(Vec<float> value, Vec<float> bound) { return _mm256_min_ps(bound, value); }
inline Vec<double> at_least(Vec<double> value, Vec<double> bound) { return _mm256_max_pd(bound, value); }
inline Vec<double> at_most(Vec<double> value, Vec<double> bound) { return _mm256_min_pd(bound, value); }
#endif

// Whether a comparison holds in every lane.
template <typename V>
inline bool all_of(V comparison) {
  auto every = comparison[0];
  for (size_t lane = 1; lane < sizeof(V) / sizeof(every); ++lane) every &= comparison[lane];
  return every != 0;
}

constexpr int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

struct IndexRange {
  int64_t first, end;
  int64_t count() const { return end - first; }
};

// Forces the product in `value` to be rounded: a fused multiply-subtract would leave the rounding error of scores near
// 1e10, which is hundreds, where equal scores must give exactly 0.
template <typename T>
inline T rounded(T value) {
#if defined(__x86_64__)
  asm("" : "+x"(value));
#elif defined(__aarch64__)
  asm("" : "+w"(value));
#else
#error "name the register class that holds floating point values"
#endif
  return value;
}

// (2^f - 1) / f on [-1/2, 1/2]: Chebyshev fits computed in 40 digits; errors 7.8e-9 and 1.3e-17.
template <typename T>
struct Exp2Fit;
template <>
struct Exp2Fit<float> {
  static constexpr float kCoefficients[] = {0.693147188026f,   0.240226507606f,   0.0555035711422f,
                                            0.00961808255728f, 0.00133908633647f, 0.000154531629451f};
  static constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded integer
  static constexpr int kMantissaBits = 23, kExponentBias = 127;
};
template <>
struct Exp2Fit<double> {
  static constexpr double kCoefficients[] = {
      0.69314718055994530942,   0.2402265069591009822,     0.055504108664821594339,    0.0096181291076068885273,
      0.001333355814641693531,  0.00015403530441736050155, 0.000015252733829836118394, 1.3215442587921689653e-6,
      1.0178062445845773521e-7, 7.0725859492692236999e-9,  4.4549605981865183938e-10};
  static constexpr double kRoundToInteger = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr int kMantissaBits = 52, kExponentBias = 1023;
};

// 2^x = power * (1 + excess), |excess| <= 0.42; x is at most one above the bias. Below the smallest normal number power
// is 0.
template <typename T>
struct Exp2Parts {
  Vec<T> power, excess;
};

template <typename T>
inline Exp2Parts<T> exp2_parts(Vec<T> x) {
  using Fit = Exp2Fit<T>;
  constexpr int kTerms = sizeof(Fit::kCoefficients) / sizeof(T);
  // The low bits of `shifted` are the rounded integer plus the exponent bias, which gives 0 at -bias; shifted into
  // the exponent field they are the power, and the bits above them drop out.
  constexpr T kRoundToInteger = Fit::kRoundToInteger + Fit::kExponentBias;
  x = at_least(x, broadcast<T>(-Fit::kExponentBias));
  const Vec<T> shifted = x + kRoundToInteger;
  const Vec<T> fraction = x - (shifted - kRoundToInteger);
  Vec<T> excess = broadcast<T>(Fit::kCoefficients[kTerms - 1]);
#pragma GCC unroll 16
  for (int term = kTerms - 2; term >= 0; --term) excess = excess * fraction + Fit::kCoefficients[term];
  return {from_bits<T>(as_bits<T>(shifted) << Fit::kMantissaBits), excess * fraction};
}

#if defined(__AVX512F__)
// 2^x = 2^(x - floor x), scaled by 2^floor x: the set has an instruction for either part, and needs no limits. A fifth
// fewer cycles than with integers in the exponent field.
template <int kTerms>
inline Vec<float> scaled_exp2(Vec<float> x, const float (&kCoefficients)[kTerms]) {
  constexpr int kFloor = 1;
  const auto fraction = reinterpret_cast<Vec<float>>(_mm512_maskz_reduce_ps(kEveryLane, x, kFloor));
  Vec<float> mantissa = broadcast(kCoefficients[kTerms - 1]);
#pragma GCC unroll 8
  for (int term = kTerms - 2; term >= 0; --term) mantissa = mantissa * fraction + kCoefficients[term];
  return _mm512_maskz_scalef_ps(kEveryLane, mantissa * fraction + 1.0f, x);
}

// (2^f - 1) / f on [0, 1]: minimax fits, errors of 2^f 2.0e-9 and 8.2e-8.
constexpr float kScaledExp2[] = {0.69314704444f, 0.240229305603f,   0.0554852803474f,
                                 0.00967545219f, 0.00124678400169f, 0.000216129393785f};
constexpr float kScaledExp2Short[] = {0.693151311803f, 0.240164450223f, 0.0557999127844f, 0.00901703081107f,
                                      0.00186712983454f};
#endif

// 2^x within about 1 ulp; results below the smallest normal number are 0 where subnormals are flushed; NaN stays NaN.
template <typename T>
inline Vec<T> exp2(Vec<T> x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == sizeof(float)) return scaled_exp2(x, kScaledExp2);
#endif
  const Exp2Parts<T> parts = exp2_parts<T>(at_most(x, broadcast<T>(Exp2Fit<T>::kExponentBias + 1)));
  return parts.power * parts.excess + parts.power;
}

// The same where x <= kBound is known.
template <int kBound, typename V>
inline V exp2_of_at_most(V x) {
  using T = std::remove_cvref_t<decltype(x[0])>;
  static_assert(kBound <= Exp2Fit<T>::kExponentBias);
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == sizeof(float)) return scaled_exp2(x, kScaledExp2);
#endif
  const Exp2Parts<T> parts = exp2_parts<T>(x);
  return parts.power * parts.excess + parts.power;
}

// 2^x within 2 ulp, with fewer instructions where the set allows it: for values that are rounded to 16 bits.
inline Vec<float> short_exp2(Vec<float> x) {
#if defined(__AVX512F__)
  return scaled_exp2(x, kScaledExp2Short);
#else
  return exp2<float>(x);
#endif
}

// tanh x = e / (e + 2) with e = exp(2x) - 1, which keeps relative accuracy near 0.
template <typename T>
inline Vec<T> tanh(Vec<T> x) {
  constexpr T kTwoLog2E = static_cast<T>(2.8853900817779268147);
  constexpr T kSaturated = sizeof(T) == 4 ? 10 : 20;  // 1 - tanh is below half an ulp
  x = at_most(at_least(x, broadcast<T>(-kSaturated)), broadcast<T>(kSaturated));
  const Exp2Parts<T> parts = exp2_parts<T>(x * kTwoLog2E);
  const Vec<T> e = parts.power * parts.excess + (parts.power - 1);
  return e / (e + 2);
}

template <typename T, size_t... kIndex>
inline Vec<T> interleave_low(Vec<T> a, Vec<T> b, std::index_sequence<kIndex...>) {
  return __builtin_shufflevector(a, b, static_cast<int>(kIndex % 2 ? kWidth<T> + kIndex / 2 : kIndex / 2)...);
}

template <typename T, size_t... kIndex>
inline Vec<T> interleave_high(Vec<T> a, Vec<T> b, std::index_sequence<kIndex...>) {
  return __builtin_shufflevector(
      a, b, static_cast<int>(kWidth<T> / 2 + (kIndex % 2 ? kWidth<T> + kIndex / 2 : kIndex / 2))...);
}

// Transposes a square of kWidth rows in registers. Each round interleaves the first with the second half of the rows;
// after log2(kWidth) rounds every element has its two indices exchanged.
template <typename T>
inline void transpose_square(Vec<T> (&rows)[kWidth<T>]) {
  constexpr int kHalf = kWidth<T> / 2;
  constexpr auto kIndices = std::make_index_sequence<kWidth<T>>();
#pragma GCC unroll 8
  for (int round = 1; round < kWidth<T>; round *= 2) {
    Vec<T> next[kWidth<T>];
#pragma GCC unroll 16
    for (int i = 0; i < kHalf; ++i) {
      next[2 * i] = interleave_low<T>(rows[i], rows[i + kHalf], kIndices);
      next[2 * i + 1] = interleave_high<T>(rows[i], rows[i + kHalf], kIndices);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kWidth<T>; ++i) rows[i] = next[i];
  }
}

// Of all lanes, in pairs: a chain of additions would take as many latencies as there are lanes.
template <typename T>
inline T sum_of(Vec<T> lanes) {
  T parts[kWidth<T>];
  store(parts, lanes);
  for (int half = kWidth<T> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  }
  return parts[0];
}

// to[c * to_stride + r] = from[r * from_stride + c]. Both extents are multiples of kWidth.
template <typename T>
inline void transpose(const T* from, int64_t from_stride, int64_t rows, int64_t columns, T* to, int64_t to_stride) {
  for (int64_t row = 0; row < rows; row += kWidth<T>) {
    for (int64_t column = 0; column < columns; column += kWidth<T>) {
      Vec<T> square[kWidth<T>];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth<T>; ++i) square[i] = load(from + (row + i) * from_stride + column);
      transpose_square<T>(square);
#pragma GCC unroll 16
      for (int i = 0; i < kWidth<T>; ++i) store(to + (column + i) * to_stride + row, square[i]);
    }
  }
}

}  // namespace
}  // namespace jattn::cpu
