// Which pairs dropout removes (core/problem.h has the definition): Philox4x32-10, one call for 64 pairs in 32 rows and
// 32 columns of scores. A warp has 16 of these rows: two of its lanes hold half of the pairs, 16 each.
//
// Use: dropout_of<Config>() once per batch entry and head. A fragment is blocks of 8 columns; lane 4 g + t holds of
// block n the rows row0 + g + 8 h and the columns column0 + 8 n + 2 t + e as value 2 h + e. row0 is a multiple of 16,
// column0 of 32.
//   rows are queries (s = q k^T):    QueryRowDrops drops(dropout, row0);  per four blocks  drops.bits(column0 + 32 p)
//   rows are keys    (s^T = k q^T):  RowDrops<true> drops(dropout, row0); likewise
// bits.dropped(n, h, e) answers for value 2 h + e of block 4 p + n. Kept pairs are multiplied by dropout.factor.
// drops.two(column0 + 64 p) gives the bits of eight blocks by one call and an exchange with lane ^ 4, by whole warps.
//
// A call's first three rounds split into a part of the query and a part of the key (words 0 and 2 of the counter are
// 0): loops over tiles keep the part of their own rows, three registers per 32 rows.
#pragma once

#include "base/types.cuh"
#include "config.cuh"
#include "params.cuh"
#ifdef __CUDACC__
#include "base/ptx.cuh"
#endif

namespace jattn {

inline constexpr uint32_t kPhiloxMultiplier0 = 0xd2511f53u, kPhiloxMultiplier1 = 0xcd9e8d57u;
inline constexpr uint32_t kPhiloxStep0 = 0x9e3779b9u, kPhiloxStep1 = 0xbb67ae85u;

// Numbers of 15 bits decide about pairs; rates above 255/256 count as that.
inline constexpr int kDropoutLevels = 1 << 15, kMostDropoutThreshold = kDropoutLevels - kDropoutLevels / 256;

struct PhiloxKey {
  uint32_t low, high;
};

struct PhiloxWords {
  uint32_t word[4];
};

// What rounds 1 to 3 make of a query's or a key's side of the counter (0, row group, 0, column group): two of the words
// behind them, and what the other side's upper word is combined with.
struct PhiloxPart {
  uint32_t upper, lower, crossed;
};

// The same in shared memory, read by one access.
struct alignas(16) DropPart : PhiloxPart {};

JATTN_HOST_DEVICE constexpr PhiloxPart philox_part(uint32_t word, uint32_t multiplier, uint32_t next_multiplier,
                                                   uint32_t next_key) {
  const uint64_t first = uint64_t(multiplier) * word;
  const uint64_t second = uint64_t(next_multiplier) * (uint32_t(first >> 32) ^ next_key);
  return {uint32_t(second >> 32), uint32_t(second), uint32_t(first)};
}
// Of a row's or a column's group, by the same instructions.
JATTN_HOST_DEVICE constexpr PhiloxPart philox_part_of(PhiloxKey key, uint32_t group, bool of_row) {
  return philox_part(group ^ (of_row ? key.low : key.high), of_row ? kPhiloxMultiplier0 : kPhiloxMultiplier1,
                     of_row ? kPhiloxMultiplier1 : kPhiloxMultiplier0,
                     of_row ? key.high + kPhiloxStep1 : key.low + kPhiloxStep0);
}
JATTN_HOST_DEVICE constexpr PhiloxPart philox_row_part(PhiloxKey key, uint32_t row_group) {
  return philox_part_of(key, row_group, true);
}
JATTN_HOST_DEVICE constexpr PhiloxPart philox_column_part(PhiloxKey key, uint32_t column_group) {
  return philox_part_of(key, column_group, false);
}

JATTN_HOST_DEVICE constexpr PhiloxKey philox_key(PhiloxKey key, uint32_t round) {
  return {key.low + round * kPhiloxStep0, key.high + round * kPhiloxStep1};
}

// key: of the round.
JATTN_HOST_DEVICE constexpr void philox_round(PhiloxWords& c, PhiloxKey key) {
  const uint64_t product0 = uint64_t(kPhiloxMultiplier0) * c.word[0];
  const uint64_t product1 = uint64_t(kPhiloxMultiplier1) * c.word[2];
  c.word[0] = uint32_t(product1 >> 32) ^ c.word[1] ^ key.low;
  c.word[1] = uint32_t(product1);
  c.word[2] = uint32_t(product0 >> 32) ^ c.word[3] ^ key.high;
  c.word[3] = uint32_t(product0);
}

inline constexpr int kPhiloxRounds = 10, kPhiloxSplitRounds = 3;

// What rounds 1 to 3 leave, from their parts.
JATTN_HOST_DEVICE constexpr PhiloxWords philox_begin(PhiloxKey key, PhiloxPart row, PhiloxPart column) {
  const PhiloxKey third = philox_key(key, 2);
  return {{row.upper ^ column.crossed ^ third.low, row.lower, column.upper ^ row.crossed ^ third.high, column.lower}};
}

JATTN_HOST_DEVICE constexpr PhiloxWords philox(PhiloxKey key, PhiloxPart row, PhiloxPart column) {
  PhiloxWords c = philox_begin(key, row, column);
#pragma unroll
  for (uint32_t round = kPhiloxSplitRounds; round < kPhiloxRounds; ++round) philox_round(c, philox_key(key, round));
  return c;
}

// The group of a query or key: an index, or the bit pattern of a position of either sign.
JATTN_HOST_DEVICE constexpr uint32_t dropout_group(int index) {
  return (uint32_t(index) >> 5) * 4 + ((uint32_t(index) & 7) >> 1);
}

// The bytes of two words that a selector names: hexadecimal digit i gives byte i of the result, 0 to 3 from a, 4 to 7
// from b.
JATTN_HOST_DEVICE inline uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, selector);
#else
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t selected = 0;
  for (int i = 0; i < 4; ++i) selected |= uint32_t(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return selected;
#endif
}

// Of the bytes of a word that a selector names, of 8 more than the number of each: bit 7 in all bits.
JATTN_HOST_DEVICE inline uint32_t repeat_signs(uint32_t word, uint32_t selector) {
#ifdef __CUDA_ARCH__
  uint32_t selected;  // __byte_perm() has no signs
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(selected) : "r"(word), "r"(selector));
  return selected;
#else
  uint32_t selected = 0;
  for (int i = 0; i < 4; ++i) selected |= (word >> 8 * (selector >> 4 * i & 3) & 128 ? 255u : 0u) << 8 * i;
  return selected;
#endif
}

// Products of each byte in GF(4), its halves being coordinates, by an element other than 0 and 1: (high, low) becomes
// (high ^ low, high).
JATTN_HOST_DEVICE constexpr uint32_t times_generator(uint32_t bytes) {
  return (bytes >> 4 & 0x0f0f0f0fu) | ((bytes ^ bytes << 4) & 0xf0f0f0f0u);
}

JATTN_HOST_DEVICE inline uint32_t exchange_halves(uint32_t word) { return select_bytes(word, word, 0x1032u); }

// The words of a call that decide about the pairs of a lane, x of the definition: word w is of the keys w octets from
// the first. With queries as rows its byte 2 h + e is for the queries h octets from the first and key parity e, the
// parity of the lane's queries being given; with keys as rows byte 2 h + r is for query parity r.
struct PairWords {
  uint32_t word[2];
};

JATTN_HOST_DEVICE inline PairWords words_of_query(const PhiloxWords& made, bool odd) {
  return {{odd ? made.word[2] : made.word[0], odd ? made.word[3] : made.word[1]}};
}
JATTN_HOST_DEVICE inline PairWords words_of_key(const PhiloxWords& made, bool odd) {
  const uint32_t selector = odd ? 0x7351u : 0x6240u;
  return {{select_bytes(made.word[0], made.word[2], selector), select_bytes(made.word[1], made.word[3], selector)}};
}

// What all pairs of PairWords share: S and M(S) of the definition in both halves, the lower bits in the upper half.
struct SharedWords {
  uint32_t sum, moved_sum, lower;

  JATTN_HOST_DEVICE explicit SharedWords(const PairWords& pairs) {
    const uint32_t both = pairs.word[0] ^ pairs.word[1], moved = times_generator(both);
    sum = both ^ exchange_halves(both);
    moved_sum = moved ^ exchange_halves(moved);
    lower = pairs.word[1] ^ exchange_halves(pairs.word[1]) ^ moved;
  }
};

// What the bytes of a call are compared with, of a threshold of 15 bits: 128 less its upper bits in every byte, and its
// lower 8 bits in both halves, which upper bits that equal the threshold's leave to the pairs' lower ones.
struct DropLimits {
  uint32_t upper, lower;
};

JATTN_HOST_DEVICE constexpr DropLimits drop_limits(uint32_t threshold) {
  return {0x80808080u - (threshold >> 8) * 0x01010101u, 0x7fff7fffu + (threshold & 255) * 0x00010001u};
}

// drop_limits().upper, one less where lower bits are below the threshold's. A byte plus it has bit 7 if its pair is
// kept.
JATTN_HOST_DEVICE inline uint32_t limits_of_bytes(const SharedWords& shared, const DropLimits& limits) {
  const uint32_t apart = limits.lower - select_bytes(shared.lower, 0, 0x4342u);  // bit 15 of a half: below
  return limits.upper - (repeat_signs(apart, 0xb9b9u) & 0x01010101u);
}

// Bit 7 of each byte: the pair is kept.
JATTN_HOST_DEVICE constexpr uint32_t kept_bytes(uint32_t own, uint32_t limits) { return (own & 0x7f7f7f7fu) + limits; }

// One pair by its own call: where rows of a fragment do not belong together (dropout_rows).
JATTN_HOST_DEVICE inline bool pair_dropped(PhiloxKey key, PhiloxPart row, int query, int column, uint32_t threshold) {
  const PhiloxWords made = philox(key, row, philox_column_part(key, dropout_group(column)));
  const PairWords words = words_of_query(made, (query & 1) != 0);
  const SharedWords shared(words);
  uint32_t own = (column & 8) != 0 ? words.word[1] : words.word[0];
  if ((column & 16) != 0) own ^= shared.sum;
  if ((query & 16) != 0) own ^= shared.moved_sum;
  const uint32_t kept = kept_bytes(own, limits_of_bytes(shared, drop_limits(threshold)));
  return (kept >> (2 * (query & 8) + 8 * (column & 1)) & 0x80u) == 0;
}

// Dropout of one batch entry and head. The key is not read where Config::dropout_rows gives each row its own.
struct Dropout {
  PhiloxKey key;
  uint32_t threshold;  // 15 bits
  float factor;        // 1 / (1 - r)
};

// Sixteen pairs: of rows h octets from row0, columns n octets from column0.
template <bool kKeysAreRows>
struct LaneBits {
  uint32_t kept[2][2];  // kept_bytes() of columns of the first and of the second 16; by w

  // far_rows: row0 is the second 16 of its 32.
  JATTN_HOST_DEVICE LaneBits(const PairWords& pairs, bool far_rows, const DropLimits& drop_limits) {
    const SharedWords shared(pairs);
    const uint32_t of_rows = far_rows ? (kKeysAreRows ? shared.sum : shared.moved_sum) : 0;
    const uint32_t of_columns = kKeysAreRows ? shared.moved_sum : shared.sum;
    const uint32_t limits = limits_of_bytes(shared, drop_limits);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int w = 0; w < 2; ++w) {
      kept[0][w] = kept_bytes(pairs.word[w] ^ of_rows, limits);
      kept[1][w] = kept_bytes(pairs.word[w] ^ of_rows ^ of_columns, limits);
    }
  }

  // Where the pair of value 2 h + e of block n has its bit: bit 7 of a byte.
  JATTN_HOST_DEVICE uint32_t word(int n, int h) const { return kept[n / 2][kKeysAreRows ? h : n % 2]; }
  JATTN_HOST_DEVICE static constexpr int byte(int n, int h, int e) { return 2 * (kKeysAreRows ? n % 2 : h) + e; }

  JATTN_HOST_DEVICE bool dropped(int n, int h, int e) const { return (word(n, h) >> 8 * byte(n, h, e) & 0x80u) == 0; }

  // All ones in the halves of the pairs, of both columns e, that are kept.
  JATTN_HOST_DEVICE uint32_t kept_halves(int n, int h) const {
    return repeat_signs(word(n, h), byte(n, h, 0) == 0 ? 0x9988u : 0xbbaau);
  }
};
using QueryRowBits = LaneBits<false>;
using KeyRowBits = LaneBits<true>;

// One bit a pair, of two calls of 32 columns each: bit 7 - n - 4 call of byte 2 h + e of a word is that of value 2 h +
// e of block n of a call. kept_bits(): of one call, in the place of the first; the other bits are anything.
JATTN_HOST_DEVICE constexpr uint32_t kept_bits(const QueryRowBits& bits) {
  uint32_t kept = (bits.kept[1][0] >> 2 & 0x20202020u) | (bits.kept[1][1] >> 3 & 0x10101010u);
  kept |= bits.kept[0][1] >> 1 & 0x40404040u;
  return (bits.kept[0][0] & 0x80808080u) | (kept & 0x7f7f7f7fu);
}
JATTN_HOST_DEVICE constexpr uint32_t join_kept_bits(uint32_t first, uint32_t second) {
  return (first & 0xf0f0f0f0u) | (second >> 4 & 0x0f0f0f0fu);
}
// As LaneBits::kept_halves().
JATTN_HOST_DEVICE inline uint32_t kept_halves(uint32_t bits, int call, int n, int h) {
  return repeat_signs(bits << (4 * call + n), h == 0 ? 0x9988u : 0xbbaau);
}

// The calls for a lane's rows in [row0, row0 + 16) and columns in [column0, column0 + 32). Lanes g and g ^ 1 share
// them.
JATTN_HOST_DEVICE constexpr uint32_t lane_row_group(int lane, int row0) {
  return (uint32_t(row0) >> 5) * 4 + uint32_t(lane >> 3);
}
JATTN_HOST_DEVICE constexpr uint32_t lane_column_group(int lane, int column0) {
  return (uint32_t(column0) >> 5) * 4 + uint32_t(lane & 3);
}
JATTN_HOST_DEVICE constexpr bool has_odd_rows(int lane) { return (lane & 4) != 0; }
JATTN_HOST_DEVICE constexpr bool has_far_rows(int row0) { return (row0 & 16) != 0; }

#ifdef __CUDACC__

__device__ __forceinline__ int dropout_threshold(float rate) {
  return min(max(__float2int_rn(rate * float(kDropoutLevels)), 0), kMostDropoutThreshold);
}
__device__ __forceinline__ int dropout_threshold(const ProblemParams& problem, int batch) {
  return dropout_threshold(__ldg(problem.dropout_rate + int64_t(batch) * problem.dropout_rate_stride));
}

// What a kept pair is multiplied by.
__device__ __forceinline__ float kept_factor(int threshold) {
  return __fdiv_rn(float(kDropoutLevels), float(kDropoutLevels - threshold));
}
__device__ __forceinline__ float kept_factor(const ProblemParams& problem, int batch) {
  return kept_factor(dropout_threshold(problem, batch));
}

__device__ __forceinline__ PhiloxKey dropout_key(const ProblemParams& problem, int batch, int head) {
  const uint32_t* words = element_of_head(problem.dropout_keys, batch, head);
  return {__ldg(words), __ldg(words + 1)};
}

// Of one batch entry and head.
template <Config kConfig>
__device__ __forceinline__ Dropout dropout_of(const ProblemParams& problem, int batch, int head) {
  const int threshold = dropout_threshold(problem, batch);
  PhiloxKey key{0, 0};
  if constexpr (!kConfig.dropout_rows) {
    key = dropout_key(problem, batch, head);
    // The same in the whole warp: said by a shuffle, so that the key schedule may use uniform registers.
    key = {__shfl_sync(0xffffffffu, key.low, 0), __shfl_sync(0xffffffffu, key.high, 0)};
  }
  return {key, __shfl_sync(0xffffffffu, uint32_t(threshold), 0), kept_factor(threshold)};
}

// Key of a row of the table of keys: Config::dropout_rows.
__device__ __forceinline__ PhiloxKey dropout_row_key(const ProblemParams& problem, int segment, int head) {
  return dropout_key(problem, min(max(segment, 0), problem.num_dropout_rows - 1), head);
}

// Sixteen rows of queries or keys.
template <bool kKeysAreRows>
struct RowDrops {
  using Bits = LaneBits<kKeysAreRows>;
  struct TwoWords {
    PairWords words[2];
  };

  const Dropout& dropout;
  PhiloxPart part;  // of the rows
  bool far_rows;
  DropLimits limits;

  __device__ __forceinline__ static int lane() { return ptx::thread_index_anew() & 31; }

  __device__ __forceinline__ RowDrops(const Dropout& dropout, int row0)
      : dropout(dropout), far_rows(has_far_rows(row0)), limits(drop_limits(dropout.threshold)) {
    const uint32_t group = lane_row_group(lane(), row0);
    part = kKeysAreRows ? philox_column_part(dropout.key, group) : philox_row_part(dropout.key, group);
  }

  __device__ __forceinline__ PhiloxWords call(uint32_t column_group) const {
    if constexpr (kKeysAreRows) {
      return philox(dropout.key, philox_row_part(dropout.key, column_group), part);
    } else {
      return philox(dropout.key, part, philox_column_part(dropout.key, column_group));
    }
  }

  __device__ __forceinline__ static PairWords words_of_row(const PhiloxWords& made, bool odd) {
    return kKeysAreRows ? words_of_key(made, odd) : words_of_query(made, odd);
  }

  __device__ __forceinline__ Bits bits_of(const PairWords& words) const { return Bits(words, far_rows, limits); }

  // Of columns [column0, column0 + 32).
  __device__ __forceinline__ PairWords words(int column0) const {
    return words_of_row(call(lane_column_group(lane(), column0)), has_odd_rows(lane()));
  }
  __device__ __forceinline__ Bits bits(int column0) const { return bits_of(words(column0)); }

  // Of columns [column0, column0 + 64): each of two lanes makes the call of one half and hands over what belongs to the
  // other's rows. Every lane of the warp takes part.
  __device__ __forceinline__ TwoWords two(int column0) const {
    const bool odd = has_odd_rows(lane());
    const PhiloxWords made = call(lane_column_group(lane(), column0) + (odd ? 4 : 0));
    const PairWords own = words_of_row(made, odd), sent = words_of_row(made, !odd);
    TwoWords two;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t got = __shfl_xor_sync(0xffffffffu, sent.word[i], 4);
      two.words[0].word[i] = odd ? got : own.word[i];
      two.words[1].word[i] = odd ? own.word[i] : got;
    }
    return two;
  }
};
using QueryRowDrops = RowDrops<false>;

#endif  // __CUDACC__

}  // namespace jattn
