// Rows of stored elements to and from rows of the accumulator type (float; double for double).
#pragma once

#include "core/problem.h"
#include "cpu/vec.h"

namespace jattn::cpu {
namespace {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename Element>
constexpr DType kDType = DType::kF32;
template <>
constexpr DType kDType<Float16> = DType::kF16;
template <>
constexpr DType kDType<BFloat16> = DType::kBF16;
template <>
constexpr DType kDType<double> = DType::kF64;

template <typename Element>
struct AccumulatorOf {
  using Type = float;
};
template <>
struct AccumulatorOf<double> {
  using Type = double;
};
template <typename Element>
using Accumulator = typename AccumulatorOf<Element>::Type;

using HalfBits = VectorOf<uint16_t, kVectorBytes / 2>;  // as many 16-bit elements as a vector has floats

inline Vec<float> widen(const float* from) { return load(from); }
inline Vec<double> widen(const double* from) { return load(from); }

inline Vec<uint32_t> load_16bit(const void* from) {
#if defined(__AVX512F__)
  // GCC 12 makes four instructions of the conversion, a half of the vector at a time.
  return reinterpret_cast<Vec<uint32_t>>(
      _mm512_maskz_cvtepu16_epi32(kEveryLane, _mm256_loadu_si256(static_cast<const __m256i*>(from))));
#else
  return __builtin_convertvector(*static_cast<const HalfBits::Unaligned*>(from), Vec<uint32_t>);
#endif
}

inline void store_16bit(void* to, Vec<uint32_t> bits) {
  *static_cast<HalfBits::Unaligned*>(to) = __builtin_convertvector(bits, HalfBits::Type);
}

inline Vec<float> widen(const BFloat16* from) { return reinterpret_cast<Vec<float>>(load_16bit(from) << 16); }

inline Vec<float> widen(const Float16* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec<float>>(
      _mm512_maskz_cvtph_ps(kEveryLane, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  return reinterpret_cast<Vec<float>>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  const Vec<uint32_t> half = load_16bit(from);
  const Vec<uint32_t> sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  const Vec<uint32_t> rebased = (magnitude << 13) + ((127u - 15u) << 23);
  // A subnormal is an integer multiple of 2^-24. Not scaled from subnormal floats: threads may flush those to zero.
  const Vec<float> subnormal =
      __builtin_convertvector(reinterpret_cast<Vec<int32_t>>(magnitude), Vec<float>) * 0x1p-24f;
  Vec<uint32_t> bits = magnitude < 0x400u ? reinterpret_cast<Vec<uint32_t>>(subnormal) : rebased;
  bits = magnitude >= 0x7c00u ? rebased + ((127u - 15u) << 23) : bits;
  return reinterpret_cast<Vec<float>>(bits | sign);
#endif
}

inline void narrow(float* to, Vec<float> value) { store(to, value); }
inline void narrow(double* to, Vec<double> value) { store(to, value); }

inline void narrow(BFloat16* to, Vec<float> value) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(value))));
#else
  const Vec<uint32_t> bits = reinterpret_cast<Vec<uint32_t>>(value);
  const Vec<uint32_t> nearest_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  store_16bit(to, (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : nearest_even);
#endif
}

inline void narrow(Float16* to, Vec<float> value) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_maskz_cvtps_ph(kEveryLane, reinterpret_cast<__m512>(value), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(reinterpret_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
#else
  const Vec<uint32_t> bits = reinterpret_cast<Vec<uint32_t>>(value);
  const Vec<uint32_t> sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const Vec<uint32_t> normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 1/2 moves the last mantissa bit to 2^-24, the unit of half-precision subnormals.
  const Vec<float> shifted = reinterpret_cast<Vec<float>>(magnitude) + 0.5f;
  const Vec<uint32_t> subnormal = reinterpret_cast<Vec<uint32_t>>(shifted) - 0x3f000000u;
  Vec<uint32_t> half = magnitude < (113u << 23) ? subnormal : normal;
  half = half > 0x7c00u ? Vec<uint32_t>{} + 0x7c00u : half;
  half = magnitude > 0x7f800000u ? Vec<uint32_t>{} + 0x7e00u : half;
  store_16bit(to, half | sign);
#endif
}

// Copies `count` elements into to[0, padded), the rest of which becomes 0. Returns whether all of them are finite.
template <typename Element>
inline bool widen_row(const Element* from, int64_t count, Accumulator<Element>* to, int64_t padded) {
  using Acc = Accumulator<Element>;
  constexpr int64_t kStep = kWidth<Acc>;
  Vec<Bits<Acc>> not_finite{};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    const Vec<Acc> value = widen(from + i);
    not_finite |= as_bits<Acc>(value - value);  // 0 for a finite value, NaN otherwise
    store(to + i, value);
  }
  if (i < count) {
    Element tail[kStep] = {};
    memcpy(tail, from + i, static_cast<size_t>(count - i) * sizeof(Element));
    const Vec<Acc> value = widen(tail);
    not_finite |= as_bits<Acc>(value - value);
    store(to + i, value);
    i += kStep;
  }
  for (; i < padded; i += kStep) store(to + i, Vec<Acc>{});
  Bits<Acc> any = 0;
  for (int lane = 0; lane < kStep; ++lane) any |= not_finite[lane];
  return any == 0;
}

template <typename Element>
inline bool is_finite_row(const Element* from, int64_t count) {
  using Acc = Accumulator<Element>;
  constexpr int64_t kStep = kWidth<Acc>;
  for (int64_t i = 0; i < count; i += kStep) {
    Acc values[kStep];
    if (!widen_row<Element>(from + i, min_of(kStep, count - i), values, kStep)) return false;
  }
  return true;
}

// The sum of left[i] * right[i].
template <typename Element>
inline Accumulator<Element> dot_product(const Element* left, const Element* right, int64_t count) {
  using Acc = Accumulator<Element>;
  constexpr int64_t kStep = kWidth<Acc>;
  Vec<Acc> sums{};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) sums += widen(left + i) * widen(right + i);
  if (i < count) {
    Element tails[2][kStep] = {};
    memcpy(tails[0], left + i, static_cast<size_t>(count - i) * sizeof(Element));
    memcpy(tails[1], right + i, static_cast<size_t>(count - i) * sizeof(Element));
    sums += widen(tails[0]) * widen(tails[1]);
  }
  return sum_of<Acc>(sums);
}

// A task that packs for itself asks for rows so far ahead: those of many heads lie a page or more apart, and nothing
// else does. Where sequences are shorter, they are rows of the sequence that follows.
inline constexpr int64_t kRowsAhead = 24;

// Asks for a row that is read soon, or written. It may lie outside its array.
template <bool kWrites = false, typename Element>
inline void prefetch_row(const Element* row, int64_t count) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(Element));
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(row + i, kWrites);
}

// Widens row(i) for i < count into rows of `padded` elements. Returns a bit for each row that is not finite.
template <typename Element, typename Row>
inline uint64_t widen_rows(int64_t count, const Row& row, int64_t row_size, Accumulator<Element>* to, int64_t padded) {
  uint64_t not_finite = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool is_finite = widen_row<Element>(row(i), row_size, to + i * padded, padded);
    not_finite |= static_cast<uint64_t>(!is_finite) << i;
  }
  return not_finite;
}

// to[d * to_stride + i] = factor * row(i)[d] for i < count, and 0 from there to the next multiple of kWidth.
template <typename Element, typename Row>
inline void widen_to_lanes(int64_t count, const Row& row, int64_t row_size, Accumulator<Element> factor,
                           Accumulator<Element>* to, int64_t to_stride) {
  using Acc = Accumulator<Element>;
  constexpr int64_t kStep = kWidth<Acc>;
  for (int64_t first = 0; first < count; first += kStep) {
    const int64_t present = min_of(kStep, count - first);
    const Element* rows[kStep];
    for (int64_t i = 0; i < present; ++i) rows[i] = row(first + i);
    for (int64_t column = 0; column < row_size; column += kStep) {
      Vec<Acc> square[kStep];
      if (present == kStep && column + kStep <= row_size) {
#pragma GCC unroll 16
        for (int i = 0; i < kStep; ++i) square[i] = widen(rows[i] + column) * factor;
      } else {
        Acc values[kStep][kStep] = {};
        for (int64_t i = 0; i < present; ++i) {
          widen_row<Element>(rows[i] + column, min_of(kStep, row_size - column), values[i], kStep);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kStep; ++i) square[i] = load(values[i]) * factor;
      }
      transpose_square<Acc>(square);
#pragma GCC unroll 16
      for (int i = 0; i < kStep; ++i) store(to + (column + i) * to_stride + first, square[i]);
    }
  }
}

// to[i] = from[i] * factor. `from` may be read up to the next multiple of kWidth.
template <typename Element>
inline void narrow_row(const Accumulator<Element>* from, int64_t count, Accumulator<Element> factor, Element* to) {
  constexpr int64_t kStep = kWidth<Accumulator<Element>>;
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) narrow(to + i, load(from + i) * factor);
  if (i == count) return;
  Element tail[kStep];
  narrow(tail, load(from + i) * factor);
  memcpy(to + i, tail, static_cast<size_t>(count - i) * sizeof(Element));
}

// to[i] = from[i] / divisor. 16-bit outputs multiply by 1 / divisor: the extra float32 rounding is negligible beside
// the final one.
template <typename Element>
inline void divide_row(const Accumulator<Element>* from, int64_t count, Accumulator<Element> divisor, Element* to) {
  using Acc = Accumulator<Element>;
  if constexpr (sizeof(Element) < sizeof(Acc)) {
    narrow_row(from, count, 1 / divisor, to);
  } else {
    int64_t i = 0;
#if defined(__FMA__) || defined(__aarch64__)
    // Ten products take as long as one division. That with 1 / divisor, corrected once by what a fused multiply-add
    // finds missing, is the rounded quotient but for one in millions, unless something on the way is not finite or
    // underflows.
    if (divisor > Acc{0x1p-60f} && divisor < Acc{0x1p60f}) {
      const Acc reciprocal = 1 / divisor;
      Vec<Bits<Acc>> not_finite{};
      for (; i + kWidth<Acc> <= count; i += kWidth<Acc>) {
        const Vec<Acc> value = load(from + i), quotient = value * reciprocal;
        const Vec<Acc> corrected = quotient + (value - quotient * divisor) * reciprocal;
        not_finite |= as_bits<Acc>(corrected - corrected);
        store(to + i, corrected);
      }
      Bits<Acc> any = 0;
      for (int lane = 0; lane < kWidth<Acc>; ++lane) any |= not_finite[lane];
      if (any != 0) i = 0;
    }
#endif
    for (; i < count; ++i) to[i] = from[i] / divisor;
  }
}

template <typename Acc>
inline void clear(Acc* to, int64_t count) {
  memset(to, 0, static_cast<size_t>(count) * sizeof(Acc));
}

}  // namespace
}  // namespace jattn::cpu
