// Numbers on the device: constants, element conversions, approximate functions, sums of products, reductions over the
// lanes that share a row.
#pragma once

#include "base/types.cuh"
#include "config.cuh"

namespace jattn {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
// Finite biases and lse are held within it: times log2(e) they are then finite too.
inline constexpr float kLargestNatural = 2.3e38f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Two floats as one number of 64 bits. By instructions that the compiler does not see through: it would keep two
// registers.
__device__ __forceinline__ uint64_t as_pair(const float (&values)[2]) {
  uint64_t pair;
  asm("mov.b64 %0, {%1, %2};" : "=l"(pair) : "f"(values[0]), "f"(values[1]));
  return pair;
}
__device__ __forceinline__ void read_pair(float (&values)[2], uint64_t pair) {
  asm("mov.b64 {%0, %1}, %2;" : "=f"(values[0]), "=f"(values[1]) : "l"(pair));
}

// ex2.approx.ftz is one instruction; exp2f is four because it keeps denormals. Both are within 2 ulp.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh.approx.f32 is only good to 2^-11, which a score of 30 turns into a wrong probability; this form has an absolute
// error of about 2^-23. kSmallExact keeps the relative error small near 0 too (float32 inputs, large softcaps).
template <bool kSmallExact>
__device__ __forceinline__ float tanh_accurate(float x) {
  const float large = 1.0f - 2.0f * reciprocal_fast(exp2_fast(x * (2.0f * kLog2E)) + 1.0f);
  if constexpr (!kSmallExact) return large;
  const float x2 = x * x;  // odd Taylor polynomial: below 0.3 its error is under 1e-7 relative
  float p = fmaf(x2, -1382.0f / 155925.0f, 62.0f / 2835.0f);
  p = fmaf(p, x2, -17.0f / 315.0f);
  p = fmaf(p, x2, 2.0f / 15.0f);
  p = fmaf(p, x2, -1.0f / 3.0f);
  const float small = fmaf(x * x2, p, x);
  return fabsf(x) < 0.3f ? small : large;
}

// The same for |x| <= 1 without special operations: the odd polynomial of degree 13 with the least absolute error,
// 2.6e-8, and 8.2e-8 with the rounding of every step.
__device__ __forceinline__ float tanh_below_one(float x) {
  const float x2 = x * x;
  float p = fmaf(x2, 0.00100583757f, -0.00609529626f);
  p = fmaf(p, x2, 0.0201656422f);
  p = fmaf(p, x2, -0.0533918225f);
  p = fmaf(p, x2, 0.133237352f);
  p = fmaf(p, x2, -0.333327531f);
  return fmaf(x * x2, p, x);
}

// max(x, 0), but NaN for NaN.
__device__ __forceinline__ float clamp_negative(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(0.0f));
  return y;
}

// pack() rounds two numbers into one word; pack_clamped() turns negative ones (not NaN) into 0.
// unequal_zero(): all bits of a number that is not 0 (NaN is not). For bfloat16 alone, from sm_90 on.
template <Element kElement>
struct ElementTraits;

template <>
struct ElementTraits<Element::kBF16> {
  using Storage = uint16_t;
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ float to_float(uint16_t x) { return __uint_as_float(uint32_t(x) << 16); }
  static __device__ __forceinline__ uint16_t from_float(float x) {
    uint16_t y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
  }
  static __device__ __forceinline__ uint32_t pack_clamped(float low, float high) {
    uint32_t y;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
  }
  static __device__ __forceinline__ uint32_t unequal_zero(uint32_t x) {
    uint32_t y;
    asm("set.neu.u32.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(0));
    return y;
  }
  static __device__ __forceinline__ float low(uint32_t x) { return __uint_as_float(x << 16); }
  static __device__ __forceinline__ float high(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
};

template <>
struct ElementTraits<Element::kF16> {
  using Storage = uint16_t;
  static constexpr int kBytes = 2;
  static __device__ __forceinline__ float to_float(uint16_t x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
  }
  static __device__ __forceinline__ uint16_t from_float(float x) {
    uint16_t y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
  }
  static __device__ __forceinline__ uint32_t pack_clamped(float low, float high) {
    uint32_t y;
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
  }
  static __device__ __forceinline__ float low(uint32_t x) { return to_float(uint16_t(x)); }
  static __device__ __forceinline__ float high(uint32_t x) { return to_float(uint16_t(x >> 16)); }
};

template <>
struct ElementTraits<Element::kF32> {
  using Storage = float;
  static constexpr int kBytes = 4;
  static __device__ __forceinline__ float to_float(float x) { return x; }
  static __device__ __forceinline__ float from_float(float x) { return x; }
};

// Sum of products of 16 bytes of two rows.
template <Element kElement>
__device__ __forceinline__ float dot_chunk(uint4 x, uint4 y) {
  const uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kElement == Element::kF32) {
      sum = fmaf(__uint_as_float(a[i]), __uint_as_float(b[i]), sum);
    } else {
      using Traits = ElementTraits<kElement>;
      sum = fmaf(Traits::low(a[i]), Traits::low(b[i]), sum);
      sum = fmaf(Traits::high(a[i]), Traits::high(b[i]), sum);
    }
  }
  return sum;
}

// Reductions over the four lanes of a quad: they hold one row of an accumulator fragment.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Tells the compiler that a value is the same in the whole warp: results of integer division are not seen to be.
// Addresses made from it then live in uniform registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

}  // namespace jattn
