// Decisions of dropout as bits that one warp makes for another (Config::drops_beside): 1 for a pair that is kept. A
// fragment of 16 rows of queries, columns [16 p, 16 p + 16) for p in [0, kPairs), has eight pairs of a call of Philox
// (attn/dropout.cuh).
//
// Layout. One word for the rows h = 0, one for h = 1; value e of block w has byte 2 e + w of it, and p has its bit
// kPairs - 1 - p of the byte. So the maker appends the eight bits of a call in a few operations on halves of words, and
// the reader brings the bits of p to the signs of the bytes by one shift and makes the mask of a register of two packed
// values by one byte permutation that repeats the signs. Up to 64 columns both words share one: half the bytes in
// shared memory.
#pragma once

#include "attn/dropout.cuh"

namespace jattn {

// One instruction each.

// The larger numbers of two halves.
JATTN_HOST_DEVICE inline uint32_t max_of_halves(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __vmaxu2(a, b);
#else
  const uint32_t low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
  return (a >> 16 > b >> 16 ? a >> 16 : b >> 16) << 16 | low;
#endif
}

// min(a + b, most) of two halves, sums without carry from one into the other.
JATTN_HOST_DEVICE inline uint32_t add_halves_up_to(uint32_t a, uint32_t b, uint32_t most) {
#ifdef __CUDA_ARCH__
  return __viaddmin_u16x2(a, b, most);
#else
  const uint32_t low = (a + b) & 0xffffu, high = ((a >> 16) + (b >> 16)) & 0xffffu;
  return (high < most >> 16 ? high : most >> 16) << 16 | (low < (most & 0xffffu) ? low : most & 0xffffu);
#endif
}

// Bytes of a by four selectors of a nibble: the number of a byte, and 8 for its sign in all bits.
JATTN_HOST_DEVICE inline uint32_t permute_bytes(uint32_t a, uint32_t selectors) {
#ifdef __CUDA_ARCH__
  uint32_t x;  // __byte_perm() has no signs
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(x) : "r"(a), "r"(selectors));
  return x;
#else
  uint32_t x = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> 4 * i & 0xf, byte = a >> 8 * (selector & 3) & 0xff;
    x |= ((selector & 8) == 0 ? byte : byte >> 7 != 0 ? 0xffu : 0u) << 8 * i;
  }
  return x;
#endif
}

// A threshold t for both halves of a word: t - 1, and the same to be subtracted. With t = 0 every number passes.
struct HalvesThreshold {
  uint32_t floor, back;
};
JATTN_HOST_DEVICE constexpr HalvesThreshold halves_threshold(uint32_t threshold_high) {
  const uint32_t t = threshold_high >> 16;
  const uint32_t floor = t == 0 ? 1 : t - 1, back = t == 0 ? 0 : (1 - t) & 0xffffu;
  return {floor << 16 | floor, back << 16 | back};
}

// Bits 0 and 16: whether the halves of the word are at least the threshold.
JATTN_HOST_DEVICE inline uint32_t halves_kept(uint32_t word, const HalvesThreshold& threshold) {
  return add_halves_up_to(max_of_halves(word, threshold.floor), threshold.back, 0x00010001u);
}

template <int kPairs>
struct KeptBits {
  static_assert(kPairs >= 1 && kPairs <= 8);
  static constexpr int kWords = kPairs > 4 ? 2 : 1;

  // As the maker holds them.
  uint32_t of_rows[2] = {0, 0};

  // The next 16 columns.
  JATTN_HOST_DEVICE inline void append(const PhiloxWords& made, const HalvesThreshold& threshold) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t first = halves_kept(made.word[2 * h], threshold);
      const uint32_t second = halves_kept(made.word[2 * h + 1], threshold);
      of_rows[h] = (of_rows[h] << 1) + (first + (second << 8));
    }
  }

  // As they lie in memory.
  JATTN_HOST_DEVICE constexpr uint32_t word(int i) const {
    return kWords == 2 ? of_rows[i] : of_rows[0] << kPairs | of_rows[1];
  }

  // 0xffff in the halves whose values are kept, of the register of block 2 p + w and rows h.
  JATTN_HOST_DEVICE static inline uint32_t mask(const uint32_t (&words)[kWords], int p, int w, int h) {
    const int bit = kPairs - 1 - p + (kWords == 1 && h == 0 ? kPairs : 0);
    return permute_bytes(words[kWords == 2 ? h : 0] << (7 - bit), w == 0 ? 0xaa88u : 0xbb99u);
  }
};

}  // namespace jattn
