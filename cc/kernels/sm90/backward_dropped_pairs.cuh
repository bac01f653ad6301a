// Which pairs of a score fragment dropout removes, as bits: found by the consumer's own calls of Philox
// (Drops::decide()), or by drop warps (Config::drops_beside, backward_drops.cuh), who write the words that a consumer
// thread reads.
//
// Coordinates as in backward_score.cuh; kTransposed: rows are keys, columns queries.
#pragma once

#include "attn/dropout.cuh"
#include "base/numeric.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/wgmma.cuh"

namespace jattn::sm90 {

// Where the first value of this thread lies, in the sequences and in their tiles.
struct FragmentOrigin {
  int row, column;
  int row_in_tile, column_in_tile;
};

// Which of the sixteen pairs of a call are kept, keys being rows, in the lower half of a word; where the pair of value
// 2 h + e of block n has its bit.
__device__ __forceinline__ unsigned kept_pairs(const KeyRowBits& bits) {
  unsigned of_blocks[2];  // 2 n and 2 n + 1, in the upper byte
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    // The upper two bits of each byte, by h. A product adds them up where they belong, none of them to another.
    const unsigned by_bytes = (bits.kept[n][0] & 0x80808080u) | (bits.kept[n][1] >> 1 & 0x40404040u);
    of_blocks[n] = by_bytes * (1u << 18 | 1u << 12 | 1u << 6 | 1u);
  }
  return __byte_perm(of_blocks[0], of_blocks[1], 0x4473u);
}
__device__ __forceinline__ constexpr int kept_bit(int n, int h, int e) {
  return n / 2 * 8 + 2 * KeyRowBits::byte(n, h, e) + (1 - h);
}

// The pairs of a fragment that dropout removes, one bit each.
template <Config C, int kCount, bool kTransposed>
struct Drops {
  using Bits = LaneBits<kTransposed>;

  unsigned words[C.dropout ? (kCount + 31) / 32 : 1];

  // Of value 2 h + e of block n, as index = 4 n + 2 h + e: in its byte of LaneBits, one bit for each of their words.
  // The drop warps put those of neighbours into one byte: seven bits of a byte become predicates by one instruction.
  __device__ __forceinline__ static constexpr int bit_of(int index) {
    if (C.drops_beside) return kept_bit(index / 4 % 8, index / 2 % 2, index % 2);
    const int n = index / 4 % 8, h = index / 2 % 2;
    return 8 * Bits::byte(n, h, index % 2) + (kTransposed ? n / 2 * 2 + h : n);
  }

  __device__ __forceinline__ bool operator[](int index) const {
    if constexpr (!C.dropout) return false;
    const bool bit = (words[index / 32] >> bit_of(index) & 1) != 0;
    return C.drops_beside ? !bit : bit;  // what drop warps write is which pairs are kept
  }

  // origin: of this fragment. q_ids, positions: of the tiles; read only if rows have keys of their own. Whole warps.
  __device__ __forceinline__ void decide(const StepTerms& terms, const FragmentOrigin& origin, const int* q_ids,
                                         const int* row_positions, const int* column_positions,
                                         const ProblemParams& problem) {
    if constexpr (C.dropout) {
#pragma unroll
      for (unsigned& word : words) word = 0;
      const unsigned threshold = __shfl_sync(~0u, terms.threshold, 0);
      if constexpr (C.dropout_rows) {
#pragma unroll
        for (int w = 0; w < (kCount + 31) / 32; ++w) {
#pragma unroll 1
          for (int bit = 0; bit < min(32, kCount); ++bit) {
            const int index = 32 * w + bit;
            const int row = origin.row_in_tile + index / 2 % 2 * 8;
            const int column = origin.column_in_tile + index / 4 * 8 + index % 2;
            const int query = kTransposed ? column_positions[column] : row_positions[row];
            const int key = kTransposed ? row_positions[row] : column_positions[column];
            const PhiloxKey words_of_row = dropout_row_key(problem, q_ids[kTransposed ? column : row], terms.head);
            const PhiloxPart part = philox_row_part(words_of_row, dropout_group(query));
            words[w] |= unsigned(pair_dropped(words_of_row, part, query, key, threshold)) << bit_of(bit);
          }
        }
      } else {
        const int lane = threadIdx.x % 32;
        const Dropout dropout{
            {__shfl_sync(~0u, terms.key.low, 0), __shfl_sync(~0u, terms.key.high, 0)}, threshold, 0.0f};
        const int row0 = origin.row - lane / 4, column0 = origin.column - lane % 4 * 2;
        const RowDrops<kTransposed> drops(dropout, row0);
        // Bits of the first or the second half of a word.
        const auto bits_of_call = [&](const PairWords& pairs, int call) {
          const Bits bits = drops.bits_of(pairs);
          unsigned found = 0;
#pragma unroll
          for (int word = 0; word < 4; ++word) {
            const int bit = 4 * call + word;
            found |= ~bits.kept[word / 2][word % 2] >> (7 - bit) & 0x01010101u << bit;
          }
          return found;
        };
        if constexpr (kCount == 16) {
          words[0] = bits_of_call(drops.words(column0), 0);
        } else {
          // A loop, one word at a time: two at once take registers that the running products do not leave. Words move
          // down as others come.
          constexpr int kWords = sizeof(words) / sizeof(unsigned);
          static_assert(kCount % 32 == 0);
#pragma unroll 1
          for (int made = 0; made < kWords; ++made) {
            const auto two = drops.two(column0 + 64 * made);
#pragma unroll
            for (int w = 0; w + 1 < kWords; ++w) words[w] = words[w + 1];
            words[kWords - 1] = bits_of_call(two.words[0], 0) | bits_of_call(two.words[1], 1);
          }
        }
      }
      pin_registers(words);
    }
  }
};

}  // namespace jattn::sm90
