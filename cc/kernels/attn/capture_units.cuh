// The units in which gradients of captures are added up exactly.
#pragma once

#include "base/types.cuh"

namespace jattn {

// How many units make 1: a power of two, with which what 2^pairs_log2 pairs add to an element, each up to `reads`
// times, none of it larger than `largest` (the bits of a float), comes to less than 2^62. NaN if that is no finite
// number, and so is every sum.
__device__ __forceinline__ double capture_units(unsigned largest, int pairs_log2, int reads) {
  constexpr unsigned kInfinityBits = 0x7f800000u;
  if (largest >= kInfinityBits) return __longlong_as_double(0x7ff8000000000000ll);
  const int exponent = int(largest >> 23) - 126;                 // largest < 2^exponent
  const int summands_log2 = pairs_log2 + 32 - __clz(reads - 1);  // rounded up
  return __longlong_as_double(int64_t(1023 + 62 - summands_log2 - exponent) << 52);
}

}  // namespace jattn
