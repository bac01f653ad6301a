// What the text of a ScoreProgram is made of (jattn/device_code.py): functions of numbers with the semantics of XLA,
// without branches, loops or calls. nvcc, NVRTC and, for tests, a host compiler read it.
//
// Errors in units of the last place of float32, found on an H200 against float64; tests/cpu/test_device_code.py finds
// them, or smaller ones, on the host. Results below 2^-126 may be 0.
//   correctly rounded, but for rare cases: divide, sqrt, cbrt
//   1.5: expm1, log, log1p, rsqrt, erf, atan; sin and cos for |x| < 2^20 (beyond that some number within [-1, 1])
//   2.5: exp2, tanh, asin, acos, asinh, acosh, atanh; tan for |x| < 2^20 (beyond that some number within [-2, 2])
//   4: exp, logistic, sinh, cosh
//   6: pow, erfc
//   remainder of floats: exact for |x / y| < 2^23
#pragma once

#include "base/types.cuh"

#ifdef __CUDACC__
#include "base/numeric.cuh"
#endif

#ifndef JATTN_PROGRAM_FUNCTION
#define JATTN_PROGRAM_FUNCTION static inline
#endif

namespace jattn::program {

JATTN_PROGRAM_FUNCTION constexpr float float_of_bits(uint32_t x) { return __builtin_bit_cast(float, x); }

inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);
inline constexpr float kLog2OfE = 1.4426950408889634f;
inline constexpr float kLog2OfELow = 1.925963033500011e-8f;  // log2(e) = kLog2OfE + kLog2OfELow
inline constexpr float kNaturalLog2 = 0.6931471805599453f;
inline constexpr float kNaturalLog2Low = -1.904654299957768e-9f;
inline constexpr float kHalfPi = 1.5707963267948966f;

// ---- What a device has instructions for -----------------------------------------------------------------------------

#ifdef __CUDACC__

JATTN_PROGRAM_FUNCTION float fused(float a, float b, float c) { return fmaf(a, b, c); }
JATTN_PROGRAM_FUNCTION double fused(double a, double b, double c) { return ::fma(a, b, c); }
// Rounded, also where a sum follows, with which the compiler would fuse a product: for those whose rounding errors are
// used.
JATTN_PROGRAM_FUNCTION float rounded_product(float a, float b) { return __fmul_rn(a, b); }
JATTN_PROGRAM_FUNCTION uint32_t bits_of(float x) { return __float_as_uint(x); }
// The compiler makes a branch of a selection if that spares it much; of this one it does not know what it is.
JATTN_PROGRAM_FUNCTION float select(bool which, float x, float y) {
  float z;
  asm("{\n\t.reg .pred which;\n\tsetp.ne.u32 which, %3, 0;\n\tselp.f32 %0, %1, %2, which;\n\t}"
      : "=f"(z)
      : "f"(x), "f"(y), "r"(uint32_t(which)));
  return z;
}
JATTN_PROGRAM_FUNCTION float approximate_exp2(float x) { return exp2_fast(x); }
JATTN_PROGRAM_FUNCTION float approximate_inverse(float x) { return reciprocal_fast(x); }
JATTN_PROGRAM_FUNCTION float approximate_quotient(float x, float y) {
  float z;
  asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
JATTN_PROGRAM_FUNCTION float approximate_sqrt(float x) {
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
JATTN_PROGRAM_FUNCTION float rsqrt(float x) {
  float y;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
JATTN_PROGRAM_FUNCTION double approximate_inverse(double x) {
  double y;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
  return y;
}
JATTN_PROGRAM_FUNCTION double approximate_rsqrt(double x) {
  double y;
  asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
  return y;
}
JATTN_PROGRAM_FUNCTION float max(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
JATTN_PROGRAM_FUNCTION float min(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
JATTN_PROGRAM_FUNCTION float abs(float x) { return fabsf(x); }
JATTN_PROGRAM_FUNCTION double abs(double x) { return ::fabs(x); }
JATTN_PROGRAM_FUNCTION float floor(float x) { return floorf(x); }
JATTN_PROGRAM_FUNCTION double floor(double x) { return ::floor(x); }
JATTN_PROGRAM_FUNCTION float ceil(float x) { return ceilf(x); }
JATTN_PROGRAM_FUNCTION double ceil(double x) { return ::ceil(x); }
JATTN_PROGRAM_FUNCTION float trunc(float x) { return truncf(x); }
JATTN_PROGRAM_FUNCTION double trunc(double x) { return ::trunc(x); }
JATTN_PROGRAM_FUNCTION float round_to_even(float x) { return rintf(x); }
JATTN_PROGRAM_FUNCTION double round_to_even(double x) { return ::rint(x); }
JATTN_PROGRAM_FUNCTION float with_sign_of(float x, float sign) { return copysignf(x, sign); }
JATTN_PROGRAM_FUNCTION double with_sign_of(double x, double sign) { return ::copysign(x, sign); }
JATTN_PROGRAM_FUNCTION int count_ones(uint32_t x) { return __popc(x); }
JATTN_PROGRAM_FUNCTION int count_ones(uint64_t x) { return __popcll(x); }
JATTN_PROGRAM_FUNCTION int count_leading_zeros(uint32_t x) { return __clz(int(x)); }
JATTN_PROGRAM_FUNCTION int count_leading_zeros(uint64_t x) { return __clzll(int64_t(x)); }
JATTN_PROGRAM_FUNCTION float of_float16(uint16_t x) { return ElementTraits<Element::kF16>::to_float(x); }
JATTN_PROGRAM_FUNCTION float round_float16(float x) { return of_float16(ElementTraits<Element::kF16>::from_float(x)); }

template <class T>
JATTN_PROGRAM_FUNCTION T load(const void* data, int64_t index) {
  return __ldg(static_cast<const T*>(data) + index);
}
// Into the second-level cache.
template <class T>
JATTN_PROGRAM_FUNCTION void prefetch(const void* data, int64_t index) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const T*>(data) + index));
}

#else

JATTN_PROGRAM_FUNCTION float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
JATTN_PROGRAM_FUNCTION double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
JATTN_PROGRAM_FUNCTION float rounded_product(float a, float b) { return a * b; }
JATTN_PROGRAM_FUNCTION uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
JATTN_PROGRAM_FUNCTION float select(bool which, float x, float y) { return which ? x : y; }
// By a polynomial, so that compilers make vectors of loops over it. Within 1 unit; beyond what float32 has 0 or
// infinity.
JATTN_PROGRAM_FUNCTION float approximate_exp2(float x) {
  const float held = x < -151.0f ? -151.0f : x > 129.0f ? 129.0f : x;
  const float to_integer = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded integer
  const float shifted = held + to_integer;
  const float f = held - (shifted - to_integer);
  float p = 0.000154531629451f * f + 0.00133908633647f;
  p = p * f + 0.00961808255728f;
  p = p * f + 0.0555035711422f;
  p = p * f + 0.240226507606f;
  p = fused(p, f, 0.693147188026f);
  p = fused(p, f, 1.0f);
  // Two powers of 2, each of which is a number.
  const int exponent = int(__builtin_bit_cast(uint32_t, shifted) - __builtin_bit_cast(uint32_t, to_integer));
  const int half = exponent >> 1;
  return p * float_of_bits(uint32_t(half + 127) << 23) * float_of_bits(uint32_t(exponent - half + 127) << 23);
}
JATTN_PROGRAM_FUNCTION float approximate_inverse(float x) { return 1.0f / x; }
JATTN_PROGRAM_FUNCTION float approximate_quotient(float x, float y) { return x / y; }
JATTN_PROGRAM_FUNCTION float approximate_sqrt(float x) { return __builtin_sqrtf(x); }
JATTN_PROGRAM_FUNCTION float rsqrt(float x) { return float(1.0 / __builtin_sqrt(double(x))); }
JATTN_PROGRAM_FUNCTION double approximate_inverse(double x) { return 1.0 / x; }
JATTN_PROGRAM_FUNCTION double approximate_rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
JATTN_PROGRAM_FUNCTION float max(float x, float y) { return x != x || x > y ? x : y; }
JATTN_PROGRAM_FUNCTION float min(float x, float y) { return x != x || x < y ? x : y; }
JATTN_PROGRAM_FUNCTION float abs(float x) { return __builtin_fabsf(x); }
JATTN_PROGRAM_FUNCTION double abs(double x) { return __builtin_fabs(x); }
JATTN_PROGRAM_FUNCTION float floor(float x) { return __builtin_floorf(x); }
JATTN_PROGRAM_FUNCTION double floor(double x) { return __builtin_floor(x); }
JATTN_PROGRAM_FUNCTION float ceil(float x) { return __builtin_ceilf(x); }
JATTN_PROGRAM_FUNCTION double ceil(double x) { return __builtin_ceil(x); }
JATTN_PROGRAM_FUNCTION float trunc(float x) { return __builtin_truncf(x); }
JATTN_PROGRAM_FUNCTION double trunc(double x) { return __builtin_trunc(x); }
JATTN_PROGRAM_FUNCTION float round_to_even(float x) { return __builtin_rintf(x); }
JATTN_PROGRAM_FUNCTION double round_to_even(double x) { return __builtin_rint(x); }
JATTN_PROGRAM_FUNCTION float with_sign_of(float x, float sign) { return __builtin_copysignf(x, sign); }
JATTN_PROGRAM_FUNCTION double with_sign_of(double x, double sign) { return __builtin_copysign(x, sign); }
JATTN_PROGRAM_FUNCTION int count_ones(uint32_t x) { return __builtin_popcount(x); }
JATTN_PROGRAM_FUNCTION int count_ones(uint64_t x) { return __builtin_popcountll(x); }
JATTN_PROGRAM_FUNCTION int count_leading_zeros(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
JATTN_PROGRAM_FUNCTION int count_leading_zeros(uint64_t x) { return x == 0 ? 64 : __builtin_clzll(x); }
JATTN_PROGRAM_FUNCTION float of_float16(uint16_t x) { return float(__builtin_bit_cast(_Float16, x)); }
JATTN_PROGRAM_FUNCTION float round_float16(float x) { return float(_Float16(x)); }

template <class T>
JATTN_PROGRAM_FUNCTION T load(const void* data, int64_t index) {
  return static_cast<const T*>(data)[index];
}
template <class T>
JATTN_PROGRAM_FUNCTION void prefetch(const void* data, int64_t index) {
  __builtin_prefetch(static_cast<const T*>(data) + index);
}

#endif

// ---- Elements of captures -------------------------------------------------------------------------------------------

template <class T>
JATTN_PROGRAM_FUNCTION T read(const void* data, int64_t index) {
  return load<T>(data, index);
}
JATTN_PROGRAM_FUNCTION bool read_bool(const void* data, int64_t index) { return load<uint8_t>(data, index) != 0; }
JATTN_PROGRAM_FUNCTION float read_float16(const void* data, int64_t index) {
  return of_float16(load<uint16_t>(data, index));
}
JATTN_PROGRAM_FUNCTION float read_bfloat16(const void* data, int64_t index) {
  return float_of_bits(uint32_t(load<uint16_t>(data, index)) << 16);
}

// ---- Integers -------------------------------------------------------------------------------------------------------

template <class T>
struct IntTraits;
template <class SignedType, class UnsignedType, bool kSigned>
struct IntTraitsOf {
  using Signed = SignedType;
  using Unsigned = UnsignedType;
  static constexpr bool kIsSigned = kSigned;
};
template <>
struct IntTraits<int8_t> : IntTraitsOf<int8_t, uint8_t, true> {};
template <>
struct IntTraits<int16_t> : IntTraitsOf<int16_t, uint16_t, true> {};
template <>
struct IntTraits<int32_t> : IntTraitsOf<int32_t, uint32_t, true> {};
template <>
struct IntTraits<int64_t> : IntTraitsOf<int64_t, uint64_t, true> {};
template <>
struct IntTraits<uint8_t> : IntTraitsOf<int8_t, uint8_t, false> {};
template <>
struct IntTraits<uint16_t> : IntTraitsOf<int16_t, uint16_t, false> {};
template <>
struct IntTraits<uint32_t> : IntTraitsOf<int32_t, uint32_t, false> {};
template <>
struct IntTraits<uint64_t> : IntTraitsOf<int64_t, uint64_t, false> {};

template <class T>
inline constexpr int kBits = int(8 * sizeof(T));
template <class T>
using Signed = typename IntTraits<T>::Signed;
template <class T>
using Unsigned = typename IntTraits<T>::Unsigned;
// At least 32 bits wide: the language multiplies narrower types as ints, which may overflow.
template <class T>
using Wide = decltype(Unsigned<T>(0) + 0u);
template <class T>
inline constexpr T kGreatest = IntTraits<T>::kIsSigned ? T(Unsigned<T>(-1) >> 1) : T(-1);
template <class T>
inline constexpr T kLeast = IntTraits<T>::kIsSigned ? T(-kGreatest<T> - 1) : T(0);

// Modulo 2^bits.
template <class T>
JATTN_PROGRAM_FUNCTION T add(T x, T y) {
  return T(Wide<T>(x) + Wide<T>(y));
}
template <class T>
JATTN_PROGRAM_FUNCTION T subtract(T x, T y) {
  return T(Wide<T>(x) - Wide<T>(y));
}
template <class T>
JATTN_PROGRAM_FUNCTION T multiply(T x, T y) {
  return T(Wide<T>(x) * Wide<T>(y));
}
template <class T>
JATTN_PROGRAM_FUNCTION T negate(T x) {
  return T(Wide<T>(0) - Wide<T>(x));
}
template <class T>
JATTN_PROGRAM_FUNCTION T max(T x, T y) {
  return x > y ? x : y;
}
template <class T>
JATTN_PROGRAM_FUNCTION T min(T x, T y) {
  return x < y ? x : y;
}
template <class T>
JATTN_PROGRAM_FUNCTION T abs(T x) {
  return x < T(0) ? negate(x) : x;
}
template <class T>
JATTN_PROGRAM_FUNCTION T sign(T x) {
  return T(x > T(0)) - T(x < T(0));
}

// x / y for y > 0. Devices divide integers of 64 bits in a call: here by two digits, each of which is right or, by a
// factor of 1 - 2^-34 at most, too small.
JATTN_PROGRAM_FUNCTION uint32_t unsigned_quotient(uint32_t x, uint32_t y) { return x / y; }
JATTN_PROGRAM_FUNCTION uint64_t unsigned_quotient(uint64_t x, uint64_t y) {
  const double divisor = double(y);
  const double first = approximate_inverse(divisor);
  const double inverse = fused(first, fused(-divisor, first, 1.0), first) * (1.0 - 0x1p-35);
  const uint64_t high = uint64_t(double(x) * inverse);
  const uint64_t rest = x - high * y;
  const uint64_t low = uint64_t(double(rest) * inverse);
  return high + low + uint64_t(rest - low * y >= y);
}

// Toward zero. By 0: -1, and the number itself remains; the least number by -1: itself, and 0 remains. Signs go by
// bits: the compiler makes branches of selections around a division.
template <class T>
JATTN_PROGRAM_FUNCTION T quotient(T x, T y) {
  using Bits = Wide<T>;
  const Bits x_sign = Bits(0) - Bits(x < T(0)), y_sign = Bits(0) - Bits(y < T(0)), by_zero = Bits(y == T(0));
  const Bits size = unsigned_quotient((Bits(x) ^ x_sign) - x_sign, ((Bits(y) ^ y_sign) - y_sign) | by_zero);
  const Bits sign = x_sign ^ y_sign;
  return T(((size ^ sign) - sign) | (Bits(0) - by_zero));
}
template <class T>
JATTN_PROGRAM_FUNCTION T remainder(T x, T y) {
  return T(Wide<T>(x) - Wide<T>(quotient(x, y)) * Wide<T>(y));
}

// By the bits of the type or more: 0, or the sign.
template <class T>
JATTN_PROGRAM_FUNCTION T shift_left(T x, T by) {
  const bool fits = Unsigned<T>(by) < Unsigned<T>(kBits<T>);
  return fits ? T(Wide<T>(x) << (Unsigned<T>(by) & (kBits<T> - 1))) : T(0);
}
template <class T>
JATTN_PROGRAM_FUNCTION T shift_right_logical(T x, T by) {
  const bool fits = Unsigned<T>(by) < Unsigned<T>(kBits<T>);
  return fits ? T(Wide<T>(Unsigned<T>(x)) >> (Unsigned<T>(by) & (kBits<T> - 1))) : T(0);
}
// Of unsigned numbers, too, the first bit is the sign.
template <class T>
JATTN_PROGRAM_FUNCTION T shift_right_arithmetic(T x, T by) {
  const bool fits = Unsigned<T>(by) < Unsigned<T>(kBits<T>);
  return T(Signed<T>(x) >> (fits ? int(by) : kBits<T> - 1));
}

template <class T>
JATTN_PROGRAM_FUNCTION T population_count(T x) {
  return T(count_ones(Wide<T>(Unsigned<T>(x))));
}
template <class T>
JATTN_PROGRAM_FUNCTION T clz(T x) {
  return T(count_leading_zeros(Wide<T>(Unsigned<T>(x))) - (kBits<Wide<T>> - kBits<T>));
}

// An integer of at most 2^22 in size, without a conversion: those take turns with exponentials, which kernels are short
// of.
JATTN_PROGRAM_FUNCTION float small_to_float(int x) { return float_of_bits(0x4b400000u + uint32_t(x)) - 12582912.0f; }

// Toward zero, saturating; NaN becomes 0.
template <class T, class Float>
JATTN_PROGRAM_FUNCTION T to_integer(Float x) {
  constexpr Float kAbove = Float(2) * Float(Unsigned<T>(1) << (kBits<T> - 1)) / Float(IntTraits<T>::kIsSigned ? 2 : 1);
  const bool is_high = x >= kAbove, is_low = x <= Float(kLeast<T>);
  const T inside = T(is_high || is_low || x != x ? Float(0) : x);
  return is_high ? kGreatest<T> : is_low ? kLeast<T> : inside;
}

template <class To, class From>
JATTN_PROGRAM_FUNCTION To bit_cast(From x) {
  return __builtin_bit_cast(To, x);
}

// ---- Exact functions of floats --------------------------------------------------------------------------------------

JATTN_PROGRAM_FUNCTION double select(bool which, double x, double y) { return which ? x : y; }
JATTN_PROGRAM_FUNCTION double max(double x, double y) { return x != x || x > y ? x : y; }
JATTN_PROGRAM_FUNCTION double min(double x, double y) { return x != x || x < y ? x : y; }
JATTN_PROGRAM_FUNCTION float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }
JATTN_PROGRAM_FUNCTION double sign(double x) { return x > 0.0 ? 1.0 : x < 0.0 ? -1.0 : x; }
template <class Float>
JATTN_PROGRAM_FUNCTION bool is_finite(Float x) {
  return abs(x) < Float(kInfinity);
}
template <class Float>
JATTN_PROGRAM_FUNCTION Float round_away(Float x) {
  const Float whole = trunc(x);
  return abs(x - whole) >= Float(0.5) ? whole + with_sign_of(Float(1), x) : whole;
}
JATTN_PROGRAM_FUNCTION float round_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
  return x == x ? float_of_bits(rounded) : x;
}
// To a float of fewer bits, whose numbers below the least normal one are 0.
JATTN_PROGRAM_FUNCTION float reduce_precision(float x, int exponent_bits, int mantissa_bits) {
  const int dropped = 23 - mantissa_bits;
  const uint32_t half = dropped == 0 ? 0u : (1u << (dropped == 0 ? 0 : dropped - 1)) - 1u;
  const uint32_t odd = dropped == 0 ? 0u : 1u;
  const uint32_t bias = (1u << (exponent_bits - 1)) - 1u;
  const uint32_t bits = bits_of(x), sign = bits & 0x80000000u;
  uint32_t rounded = bits & 0x7fffffffu;
  rounded = (rounded + half + (rounded >> dropped & odd)) >> dropped << dropped;
  const uint32_t held = rounded >= (128u + bias) << 23 ? 0x7f800000u : rounded < (128u - bias) << 23 ? 0u : rounded;
  rounded = exponent_bits < 8 ? held : rounded;
  return x == x ? float_of_bits(rounded | sign) : x;
}
template <int kExponentBits, int kMantissaBits>
JATTN_PROGRAM_FUNCTION float reduce_precision(float x) {
  return reduce_precision(x, kExponentBits, kMantissaBits);
}

// ---- Quotients and roots --------------------------------------------------------------------------------------------

// inverse: 1 / y, rounded. One step of Newton's method makes the quotient right where it can be represented; where that
// step leaves the finite numbers, the first result stands.
JATTN_PROGRAM_FUNCTION float refine_quotient(float first, float x, float y, float inverse) {
  const float refined = fused(fused(-first, y, x), inverse, first);
  return select(abs(refined) < kInfinity, refined, first);
}
JATTN_PROGRAM_FUNCTION float divide(float x, float y, float inverse) {
  return refine_quotient(x * inverse, x, y, inverse);
}
JATTN_PROGRAM_FUNCTION float divide(float x, float y) {
  return refine_quotient(approximate_quotient(x, y), x, y, approximate_inverse(y));
}
JATTN_PROGRAM_FUNCTION double divide(double x, double y) {
  const double first = approximate_inverse(y);
  double inverse = fused(first, fused(-y, first, 1.0), first);
  inverse = fused(inverse, fused(-y, inverse, 1.0), inverse);
  const double quotient = x * inverse;
  const double refined = fused(fused(-quotient, y, x), inverse, quotient);
  return is_finite(refined) ? refined : x * first;
}

JATTN_PROGRAM_FUNCTION float sqrt(float x) {
  const float first = approximate_sqrt(x);
  const float refined = fused(fused(-first, first, x), 0.5f * approximate_inverse(first), first);
  return select(abs(refined) < kInfinity, refined, first);
}
JATTN_PROGRAM_FUNCTION double sqrt(double x) {
  double inverse = approximate_rsqrt(x);
  inverse = fused(inverse * 0.5, fused(-x * inverse, inverse, 1.0), inverse);
  inverse = fused(inverse * 0.5, fused(-x * inverse, inverse, 1.0), inverse);
  const double root = x * inverse;
  const double refined = fused(fused(-root, root, x), 0.5 * inverse, root);
  return x == 0.0 || x == double(kInfinity) ? x : refined;
}

// x - y * trunc(x / y), with the sign of x.
template <class Float>
JATTN_PROGRAM_FUNCTION Float remainder_of_floats(Float x, Float y) {
  const Float divisor = abs(y), dividend = abs(x);
  Float rest = fused(-trunc(divide(dividend, divisor)), divisor, dividend);
  rest = rest < Float(0) ? rest + divisor : rest;
  rest = rest >= divisor ? rest - divisor : rest;
  rest = rest >= divisor || rest < Float(0) ? Float(0) : rest;  // the quotient has too many digits
  rest = dividend < divisor ? dividend : rest;                  // also by infinity
  return with_sign_of(rest, x);
}
JATTN_PROGRAM_FUNCTION float rem(float x, float y) { return remainder_of_floats(x, y); }
JATTN_PROGRAM_FUNCTION double rem(double x, double y) { return remainder_of_floats(x, y); }

// ---- Exponentials and logarithms ------------------------------------------------------------------------------------

JATTN_PROGRAM_FUNCTION float exp2(float x) { return approximate_exp2(x); }

// exp(x) 2^shift: 2^y for y = x log2(e), with what the rounding of y lost as a factor.
JATTN_PROGRAM_FUNCTION float shifted_exp(float x, float shift) {
  const float held =
      min(max(x, -104.0f), 90.0f);  // 0 and infinity come out beyond; the steps between know no infinities
  const float y = rounded_product(held, kLog2OfE);
  const float lost = fused(held, kLog2OfELow, fused(held, kLog2OfE, -y));
  return approximate_exp2(y + shift) * fused(lost, kNaturalLog2, 1.0f);
}
JATTN_PROGRAM_FUNCTION float exp(float x) { return shifted_exp(x, 0.0f); }

// (1 + p) 2^n - 1, p = expm1 of what is left of x without n ln(2).
JATTN_PROGRAM_FUNCTION float expm1(float x) {
  const float held = min(max(x, -104.0f), 88.9f);  // overflows from 88.8 on
  const float n = round_to_even(held * kLog2OfE);
  const float r = fused(n, -kNaturalLog2Low, fused(n, -kNaturalLog2, held));
  float p = fused(r, 0.00019845956f, 0.0013941642f);
  p = fused(p, r, 0.0083333915f);
  p = fused(p, r, 0.041666348f);
  p = fused(p, r, 0.16666666f);
  p = fused(p, r, 0.5f);
  p = fused(p, r * r, r);
  const float half_power = float_of_bits(uint32_t(int(n) + 126) << 23);  // 2^(n - 1): 2^128 is no number
  const float result = 2.0f * fused(p, half_power, half_power - 0.5f);
  return select(x < -87.0f, -1.0f, select(x == 0.0f, x, result));
}

// x = 2^exponent * mantissa, the mantissa from 2/3 to 4/3; of x > 0, not infinity.
struct Parts {
  float exponent, mantissa;
};
JATTN_PROGRAM_FUNCTION Parts parts_of(float x) {
  const bool is_small = x < 0x1p-126f;
  const uint32_t bits = bits_of(is_small ? x * 0x1p24f : x);
  const uint32_t two_thirds = 0x3f2aaaabu;
  const int exponent = int(bits - two_thirds) >> 23;
  return {float(exponent - (is_small ? 24 : 0)), float_of_bits(bits - (uint32_t(exponent) << 23))};
}

// What log has of numbers that have no parts: 0, infinity, negative ones and NaN.
JATTN_PROGRAM_FUNCTION float log_or(float x, float result) {
  const float edge = x == 0.0f ? -kInfinity : x > 0.0f ? x : float_of_bits(0x7fc00000u);
  return select(x > 0.0f && x < kInfinity, result, edge);
}
JATTN_PROGRAM_FUNCTION float log(float x) {
  const Parts parts = parts_of(x);
  const float f = parts.mantissa - 1.0f;
  float p = fused(f, -0.12948833f, 0.14004762f);
  p = fused(p, f, -0.121671855f);
  p = fused(p, f, 0.1400116f);
  p = fused(p, f, -0.16682303f);
  p = fused(p, f, 0.20010747f);
  p = fused(p, f, -0.24999717f);
  p = fused(p, f, 0.3333321f);
  p = fused(p, f, -0.5f);
  p = fused(p, f * f, fused(parts.exponent, kNaturalLog2Low, f));
  return log_or(x, fused(parts.exponent, kNaturalLog2, p));
}
JATTN_PROGRAM_FUNCTION float log1p(float x) {
  const float sum = 1.0f + x;
  const float lost = x - (sum - 1.0f);
  const float result = fused(lost, approximate_inverse(sum), log(sum));
  return select(abs(result) < kInfinity, select(sum == 1.0f, x, result), log(sum));
}

// log2(x) as a sum of two floats, of x > 0, not infinity. log(m) = 2 atanh(s), s = (m - 1) / (m + 1) as a sum of two.
struct Sum {
  float high, low;
};
JATTN_PROGRAM_FUNCTION Sum log2_as_sum(float x) {
  const Parts parts = parts_of(x);
  const float f = parts.mantissa - 1.0f;
  const float divisor = parts.mantissa + 1.0f, divisor_lost = parts.mantissa - (divisor - 1.0f);
  const float inverse = approximate_inverse(divisor);
  const float s = f * inverse;
  const float s_low = fused(-s, divisor_lost, fused(-s, divisor, f)) * inverse;
  const float square = s * s;
  float p = fused(square, 0.1498086f, 0.19986793f);
  p = fused(p, square, 0.3333341f);
  const float rest = 2.0f * fused(p * square, s, s_low);
  const float high = 2.0f * s;  // log(m) = high + rest
  const float y = rounded_product(high, kLog2OfE);
  const float y_low = fused(rest, kLog2OfE, fused(high, kLog2OfELow, fused(high, kLog2OfE, -y)));
  const float sum = parts.exponent + y, sum_low = (y - (sum - parts.exponent)) + y_low;
  const float result = sum + sum_low;
  return {result, sum_low - (result - sum)};
}
JATTN_PROGRAM_FUNCTION float pow(float x, float y) {
  const float base = abs(x);
  const Sum log2_base = log2_as_sum(base);
  const float product = rounded_product(log2_base.high, y);
  const float product_low = fused(log2_base.low, y, fused(log2_base.high, y, -product));
  const float held = min(max(product, -200.0f), 200.0f);
  const float size = approximate_exp2(held) * fused(held == product ? product_low : 0.0f, kNaturalLog2, 1.0f);
  const bool grows = (base > 1.0f) == (y > 0.0f);
  const bool is_plain = base > 0.0f && base < kInfinity && abs(y) < kInfinity;
  const float edge = base == 1.0f ? 1.0f : grows ? kInfinity : 0.0f;
  const bool is_whole = round_to_even(y) == y, is_odd = is_whole && round_to_even(0.5f * y) != 0.5f * y;
  float result = select(is_plain, size, edge);
  result = is_odd ? with_sign_of(result, x) : result;
  result = x < 0.0f && !is_whole && is_plain ? float_of_bits(0x7fc00000u) : result;
  result = x != x || y != y ? x + y : result;
  return x == 1.0f || y == 0.0f ? 1.0f : result;
}

JATTN_PROGRAM_FUNCTION float cbrt(float x) {
  const float size = abs(x);
  const Sum log2_size = log2_as_sum(size);
  const float root = approximate_exp2(log2_size.high * (1.0f / 3.0f));
  const float square = root * root;
  const float error = fused(square, root, -size) + fused(root, root, -square) * root;
  const float refined = fused(error, -(1.0f / 3.0f) * approximate_inverse(square), root);
  return select(size > 0.0f && size < kInfinity, with_sign_of(refined, x), x);
}

// ---- Sigmoids and error functions -----------------------------------------------------------------------------------

JATTN_PROGRAM_FUNCTION float logistic(float x) { return approximate_inverse(1.0f + exp(-x)); }

JATTN_PROGRAM_FUNCTION float tanh(float x) {
  const float square = x * x;
  float p = fused(square, -0.0058951615f, 0.020795975f);
  p = fused(p, square, -0.05378383f);
  p = fused(p, square, 0.13331924f);
  p = fused(p, square, -0.333333f);
  const float small = fused(x * square, p, x);
  const float large = 1.0f - 2.0f * approximate_inverse(approximate_exp2(abs(x) * (2.0f * kLog2OfE)) + 1.0f);
  return select(abs(x) < 0.6f, small, with_sign_of(large, x));
}

// exp(-x^2) times a polynomial of (x - 3) / (x + 3), of x >= 0.
JATTN_PROGRAM_FUNCTION float erfc_above_zero(float x) {
  const float held = min(x, 11.0f);  // 0 from there on
  const float t = (held - 3.0f) * approximate_inverse(held + 3.0f);
  float p = fused(t, -0.00025104277f, -0.0007353184f);
  p = fused(p, t, 0.002023808f);
  p = fused(p, t, 0.0025484578f);
  p = fused(p, t, -0.023814874f);
  p = fused(p, t, 0.06829734f);
  p = fused(p, t, -0.11926744f);
  p = fused(p, t, 0.12964655f);
  p = fused(p, t, -0.047562625f);
  p = fused(p, t, -0.13562115f);
  p = fused(p, t, 1.253008f);
  const float square = held * held;
  const float lost = fused(held, held, -square);
  return exp(-square) * fused(lost, -p, p) * approximate_inverse(fused(2.0f, held, 1.0f));
}
JATTN_PROGRAM_FUNCTION float erfc(float x) {
  const float result = erfc_above_zero(abs(x));
  return select(x < 0.0f, 2.0f - result, result);
}
JATTN_PROGRAM_FUNCTION float erf(float x) {
  const float square = x * x;
  float p = fused(square, 0.000078540106f, -0.00080102426f);
  p = fused(p, square, 0.005188334f);
  p = fused(p, square, -0.026853817f);
  p = fused(p, square, 0.112835854f);
  p = fused(p, square, -0.37612626f);
  p = fused(p, square, 0.1283791665f);
  const float small = fused(x, p, x);
  return select(abs(x) < 1.0f, small, with_sign_of(1.0f - erfc_above_zero(abs(x)), x));
}

// ---- Angles ---------------------------------------------------------------------------------------------------------

// x = quarter * pi / 2 + rest, |rest| not much above pi / 4. By three parts of pi / 2: right for |x| < 2^20.
struct Turn {
  float rest;
  int quarter;
};
JATTN_PROGRAM_FUNCTION Turn turn_of(float x) {
  const float quarters = round_to_even(x * (1.0f / kHalfPi));
  float rest = fused(quarters, -kHalfPi, x);
  rest = fused(quarters, 4.371139e-8f, rest);
  rest = fused(quarters, 1.7151245e-15f, rest);
  // Beyond, the rest is of no use, but its sine should be one, and its tangent finite.
  const float held = abs(rest) > 1.0f ? 0.5f : rest;
  return {held, to_integer<int>(quarters)};
}
JATTN_PROGRAM_FUNCTION float sine_of_turn(Turn turn, int quarters) {
  const int quarter = int(uint32_t(turn.quarter) + uint32_t(quarters));
  const float x = turn.rest, square = x * x;
  float p = fused(square, 0.000002700739f, -0.00019837073f);
  p = fused(p, square, 0.008333321f);
  p = fused(p, square, -0.16666667f);
  const float sine = fused(x * square, p, x);
  float c = fused(square, 0.000024259958f, -0.0013885475f);
  c = fused(c, square, 0.0416666f);
  c = fused(c, square, -0.5f);
  const float cosine = fused(c, square, 1.0f);
  const float size = select((quarter & 1) != 0, cosine, sine);
  return (quarter & 2) != 0 ? -size : size;
}
JATTN_PROGRAM_FUNCTION float sin(float x) { return sine_of_turn(turn_of(x), 0); }
JATTN_PROGRAM_FUNCTION float cos(float x) { return sine_of_turn(turn_of(x), 1); }
JATTN_PROGRAM_FUNCTION float tan(float x) {
  const Turn turn = turn_of(x);
  return divide(sine_of_turn(turn, 0), sine_of_turn(turn, 1));
}

JATTN_PROGRAM_FUNCTION float atan2(float y, float x) {
  const float height = abs(y), width = abs(x);
  const float small = min(height, width), large = max(height, width);
  const float ratio = divide(small, large);
  const float t = select(small == large, large == 0.0f ? 0.0f : 1.0f, ratio);
  const float square = t * t;
  float p = fused(square, -0.001793616f, 0.010914581f);
  p = fused(p, square, -0.031177804f);
  p = fused(p, square, 0.057957556f);
  p = fused(p, square, -0.08403448f);
  p = fused(p, square, 0.10952185f);
  p = fused(p, square, -0.14264241f);
  p = fused(p, square, 0.19998549f);
  p = fused(p, square, -0.333333f);
  float angle = fused(t * square, p, t);
  angle = height > width ? kHalfPi - angle : angle;
  angle = bits_of(x) >> 31 != 0 ? 2.0f * kHalfPi - angle : angle;
  return x != x || y != y ? x + y : with_sign_of(angle, y);
}
JATTN_PROGRAM_FUNCTION float atan(float x) { return atan2(x, 1.0f); }
JATTN_PROGRAM_FUNCTION float asin(float x) { return atan2(x, sqrt((1.0f - x) * (1.0f + x))); }
JATTN_PROGRAM_FUNCTION float acos(float x) { return atan2(sqrt((1.0f - x) * (1.0f + x)), x); }

// ---- Hyperbolic functions -------------------------------------------------------------------------------------------

JATTN_PROGRAM_FUNCTION float sinh(float x) {
  const float m = expm1(abs(x));
  const float small = 0.5f * (m + divide(m, m + 1.0f));
  const float large = shifted_exp(abs(x), -1.0f);
  return with_sign_of(select(abs(x) < 10.0f, small, large), x);
}
JATTN_PROGRAM_FUNCTION float cosh(float x) {
  const float half = shifted_exp(abs(x), -1.0f);
  return fused(0.25f, approximate_inverse(half), half);
}
JATTN_PROGRAM_FUNCTION float asinh(float x) {
  const float size = abs(x), square = size * size;
  const float small = log1p(size + divide(square, 1.0f + sqrt(square + 1.0f)));
  const float large = log(size) + kNaturalLog2;
  return with_sign_of(select(size < 1e9f, small, large), x);
}
JATTN_PROGRAM_FUNCTION float acosh(float x) {
  const float above = x - 1.0f;
  const float small = log1p(above + sqrt(fused(above, above, 2.0f * above)));
  const float size = select(x < 1e9f, small, log(x) + kNaturalLog2);
  return select(x < 1.0f, float_of_bits(0x7fc00000u), size);
}
JATTN_PROGRAM_FUNCTION float atanh(float x) {
  const float size = abs(x);
  return with_sign_of(0.5f * log1p(divide(2.0f * size, 1.0f - size)), x);
}

// ---- Gradients of captures ------------------------------------------------------------------------------------------

// What decides, beside the batch entry, about the place of an element that a pair reads: the head alone, the query or
// the key too, or both.
enum class Reach { kHead, kQuery, kKey, kPair };

}  // namespace jattn::program
