// Online softmax over the score fragments of one warpgroup, in base 2, with a lazy row maximum.
//
// Fragment of m64nN, per thread: rows lane / 4 and lane / 4 + 8 of its warp's 16 rows (index 0 and 1 below); value
// 4 i + 2 r + c is row r, column 8 i + 2 (lane % 4) + c. A row lives in the four lanes of a quad.
#pragma once

#include "kernels/config.cuh"

namespace jattn::sm90 {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approximate(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

template <Element kElement>
__device__ __forceinline__ unsigned pack(float low, float high) {
  unsigned packed;
  if constexpr (kElement == Element::kF16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// A score fragment is, value for value, the register operand A of the next product.
template <Element kElement, int kCount>
__device__ __forceinline__ void pack_fragment(unsigned (&p)[kCount / 2], const float (&s)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) p[i] = pack<kElement>(s[2 * i], s[2 * i + 1]);
}

// Raises `largest` to the largest value of each of the two rows, over this thread's columns.
template <bool kInteger, int kCount>
__device__ __forceinline__ void thread_row_max(float (&largest)[2], const float (&s)[kCount]) {
  // Two chains a row: one chain of kCount / 2 dependent instructions is slower than the pipe.
  float second[2] = {s[1], s[3]};
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = fmaxf(largest[r], s[4 * i + 2 * r]);
      second[r] = fmaxf(second[r], s[4 * i + 2 * r + 1]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) largest[r] = fmaxf(largest[r], second[r]);
}

// kScaled: scores arrive in log2 units; else they are multiplied by a positive scale_log2 inside the exponent.
//
// row_max is the maximum that probabilities refer to, not always the true one: it follows only when a row of the warp
// has outgrown it by kLazyLog2, so p stays below 2^8 and the output is rarely rescaled (source: FlashAttention-4;
// measured on H200: +10 % at head_dim 128). The results out / row_sum and lse do not depend on it but for rounding.
template <bool kScaled, bool kIntegerMax>
struct OnlineSoftmax {
  static constexpr float kLazyLog2 = 8.0f;

  float scale_log2;
  float row_max[2];  // -inf: no visible key yet
  float row_sum[2];  // over this thread's columns
  float alpha[2];    // factor of the output so far; 1 unless rescale
  bool rescale;

  // A row that must take no part (beyond q_length) starts at +inf: all its p are 0 and it never asks for rescaling.
  __device__ __forceinline__ void reset(bool first_takes_part, bool second_takes_part) {
    row_max[0] = first_takes_part ? -infinity() : infinity();
    row_max[1] = second_takes_part ? -infinity() : infinity();
    row_sum[0] = row_sum[1] = 0.0f;
    rescale = false;
  }

  // Turns scores into probabilities relative to row_max; sets rescale and alpha for the output accumulated before.
  template <int kCount>
  __device__ __forceinline__ void update(float (&s)[kCount]) {
    const float unit = kScaled ? 1.0f : scale_log2;
    float largest[2] = {row_max[0], row_max[1]};
    thread_row_max<kIntegerMax>(largest, s);
#pragma unroll
    for (int r = 0; r < 2; ++r) largest[r] = quad_max(largest[r]);
    const bool outgrown =
        (largest[0] - row_max[0]) * unit > kLazyLog2 || (largest[1] - row_max[1]) * unit > kLazyLog2;
    rescale = __any_sync(~0u, outgrown);
    if (rescale) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        alpha[r] = largest[r] == row_max[r] ? 1.0f : exp2_approximate((row_max[r] - largest[r]) * unit);
        row_max[r] = largest[r];
        row_sum[r] *= alpha[r];
      }
    }
    float shift[2];  // 0 for a row of -inf, whose p must be exp2(-inf) and not exp2(-inf + inf)
#pragma unroll
    for (int r = 0; r < 2; ++r) shift[r] = row_max[r] == -infinity() ? 0.0f : row_max[r] * unit;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[4 * i + 2 * r + c];
          x = exp2_approximate(kScaled ? x - shift[r] : fmaf(x, unit, -shift[r]));
          row_sum[r] += x;
        }
      }
    }
  }

  template <int kCount>
  __device__ __forceinline__ void rescale_output(float (&out)[kCount]) const {
    if (!rescale) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] *= alpha[i / 2 % 2];
  }

  // Completes the row sums over the quad. After it a sum of 0 means: no visible key.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) row_sum[r] = quad_sum(row_sum[r]);
  }

  __device__ __forceinline__ float lse(int r) const {
    const float unit = kScaled ? 1.0f : scale_log2;
    return row_sum[r] == 0.0f ? -infinity() : (row_max[r] * unit + log2_approximate(row_sum[r])) * kLn2;
  }
};

}  // namespace jattn::sm90
