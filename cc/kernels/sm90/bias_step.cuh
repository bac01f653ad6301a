// A bias that depends on the key alone as one more step of the first product: s = [q | 1 1 1] [k | b b' b'']^T, where
// b + b' + b'' = bias / scale (Config::bias_in_product). The scores stay raw, so that nothing else touches them, where
// adding a row of floats takes every warp 80 instructions a tile.
//
// Beside each tile of k lies a tile of 16 columns of bfloat16, whatever the element of k is: its exponents are those of a
// float. Three parts of 8 bits hold a float. No swizzle: the left eight columns of all keys, 16 bytes a key, then the
// right ones, which stay zero. The step comes last, so that the sum of q.k is rounded at the size of the bias only once.
//
// Error of a score beside bias + scale * q.k: the quotient 2^-24 |bias|; the sum, which the matrix unit cuts off at 24
// bits, 2^-22 of the larger of |bias| and scale * |q.k|.
#pragma once

#include "base/numeric.cuh"
#include "sm90/shape.cuh"
#include "sm90/softmax.cuh"
#include "sm90/wgmma_shapes.cuh"

namespace jattn::sm90 {

inline constexpr int kBiasPartsBytes = 16;  // of a key: three parts and five zeros

// The first two of the four words beside a key; the others are zero.
struct BiasParts {
  uint32_t first, second;
};

__device__ __forceinline__ float held_quotient(float x) { return fminf(fmaxf(x, -kLargestQuotient), kLargestQuotient); }

// inverse_scale: 1 / scale, rounded. The second step of the quotient makes up for that rounding. Parts are cut off, not
// rounded: each leaves the next 8 bits less.
__device__ __forceinline__ BiasParts split_bias(float bias, float scale, float inverse_scale) {
  constexpr uint32_t kUpper = 0xFFFF0000u;
  const bool finite = fabsf(bias) < infinity();
  const float product = bias * inverse_scale;  // keeps infinities, and makes a NaN that is one by its upper half
  const float rough = held_quotient(product);
  const float quotient = held_quotient(fmaf(fmaf(-rough, scale, bias), inverse_scale, rough));
  const float x = finite ? quotient : product;
  const float rest = finite ? x - __uint_as_float(__float_as_uint(x) & kUpper) : 0.0f;
  const float last = rest - __uint_as_float(__float_as_uint(rest) & kUpper);
  return {__float_as_uint(x) >> 16 | (__float_as_uint(rest) & kUpper), __float_as_uint(last) >> 16};
}

// The operand of ones, as every thread holds it: all 16 columns, because those of the tile without parts are zero.
inline constexpr int kOnesWords = 4;
__device__ __forceinline__ void make_ones(unsigned* words) {
#pragma unroll
  for (int i = 0; i < kOnesWords; ++i) words[i] = 0x3F803F80;
}

// Descriptor of the tile at `address`: rows of 8 keys lie 128 bytes apart, the right columns behind the left ones.
template <Config C>
__device__ __forceinline__ unsigned long long bias_step_descriptor(unsigned address) {
  constexpr unsigned long long kStride = static_cast<unsigned long long>(8 * kBiasPartsBytes / 16) << 32;
  constexpr unsigned long long kLeading = static_cast<unsigned long long>(C.tile_kv * kBiasPartsBytes / 16) << 16;
  return kStride | kLeading | ((address & 0x3FFFF) >> 4);
}

// The step, within the group of the first product.
template <Config C>
__device__ __forceinline__ void add_bias_step(float (&s)[C.tile_kv / 2], const unsigned* ones, unsigned address) {
  Wgmma<C.tile_kv>::template registers<Element::kBF16, true, 0>(s, ones, bias_step_descriptor<C>(address));
}

}  // namespace jattn::sm90
