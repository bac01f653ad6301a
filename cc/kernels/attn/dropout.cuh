// Which pairs dropout removes (core/problem.h has the definition): Philox4x32-10, one call for the eight pairs that a
// lane holds in two neighbouring 16x8 accumulator blocks.
//
// Use: dropout_of<Config>() once per batch entry and head. A fragment is blocks of 8 columns; lane 4 g + t holds of block n the
// rows row0 + g + 8 h and the columns column0 + 8 n + 2 t + e as value 2 h + e. row0 and column0 are multiples of 16.
//   rows are queries (s = q k^T):    QueryRowDrops drops(dropout, row0);  per pair of blocks  drops.bits(column0 + 16 p)
//   rows are keys    (s^T = k q^T):  KeyRowDrops drops(dropout, row0);    likewise, by whole warps
// bits.dropped(w, h, e) answers for value 2 h + e of block 2 p + w. Kept pairs are multiplied by dropout.factor.
//
// A call's first two rounds split into a part of the query and a part of the key (the upper half of the counter is 0):
// loops over tiles keep the part of their own rows, three registers per 16 rows.
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

struct PhiloxKey {
  uint32_t low, high;
};

struct PhiloxWords {
  uint32_t word[4];
};

// What rounds 1 and 2 make of the counter (row group, column group, 0, 0).
struct PhiloxRowPart {
  uint32_t word0, word1, mask2;
};
struct PhiloxColumnPart {
  uint32_t high, low;
};

JATTN_HOST_DEVICE constexpr PhiloxRowPart philox_row_part(PhiloxKey key, uint32_t row_group) {
  const uint64_t first = uint64_t(kPhiloxMultiplier0) * row_group;
  const uint64_t second = uint64_t(kPhiloxMultiplier1) * (uint32_t(first >> 32) ^ key.high);
  return {uint32_t(second >> 32) ^ (key.low + kPhiloxStep0), uint32_t(second),
          uint32_t(first) ^ (key.high + kPhiloxStep1)};
}

JATTN_HOST_DEVICE constexpr PhiloxColumnPart philox_column_part(PhiloxKey key, uint32_t column_group) {
  const uint64_t product = uint64_t(kPhiloxMultiplier0) * (column_group ^ key.low);
  return {uint32_t(product >> 32), uint32_t(product)};
}

JATTN_HOST_DEVICE constexpr void philox_round(PhiloxWords& c, PhiloxKey key, uint32_t round) {
  const uint64_t product0 = uint64_t(kPhiloxMultiplier0) * c.word[0];
  const uint64_t product1 = uint64_t(kPhiloxMultiplier1) * c.word[2];
  c.word[0] = uint32_t(product1 >> 32) ^ c.word[1] ^ (key.low + round * kPhiloxStep0);
  c.word[1] = uint32_t(product1);
  c.word[2] = uint32_t(product0 >> 32) ^ c.word[3] ^ (key.high + round * kPhiloxStep1);
  c.word[3] = uint32_t(product0);
}

// Rounds 3 to 10.
JATTN_HOST_DEVICE constexpr PhiloxWords philox(PhiloxKey key, PhiloxRowPart row, PhiloxColumnPart column) {
  PhiloxWords c{{row.word0, row.word1, column.high ^ row.mask2, column.low}};
#pragma unroll
  for (uint32_t round = 2; round < 10; ++round) philox_round(c, key, round);
  return c;
}

// The groups of a coordinate: an index, or the bit pattern of a position of either sign.
JATTN_HOST_DEVICE constexpr uint32_t dropout_row_group(int query) {
  return (uint32_t(query) >> 4) * 8 + (uint32_t(query) & 7);
}
JATTN_HOST_DEVICE constexpr uint32_t dropout_column_group(int key) {
  return (uint32_t(key) >> 4) * 4 + ((uint32_t(key) & 7) >> 1);
}

// A 16-bit number is below the threshold exactly if, as the upper half of a word, it is below threshold << 16, whatever
// the lower half.
JATTN_HOST_DEVICE constexpr bool lower_half_below(uint32_t word, uint32_t threshold_high) {
  return (word << 16) < threshold_high;
}
JATTN_HOST_DEVICE constexpr bool upper_half_below(uint32_t word, uint32_t threshold_high) {
  return word < threshold_high;
}

// One pair by its own call: where rows of a fragment do not belong together (dropout_rows).
JATTN_HOST_DEVICE constexpr bool pair_dropped(PhiloxKey key, PhiloxRowPart row, int query, int column,
                                              uint32_t threshold_high) {
  const PhiloxWords words = philox(key, row, philox_column_part(key, dropout_column_group(column)));
  const int index = (query >> 3 & 1) * 2 + (column >> 3 & 1);
  const uint32_t word = index == 0   ? words.word[0]
                        : index == 1 ? words.word[1]
                        : index == 2 ? words.word[2]
                                     : words.word[3];
  return (column & 1) != 0 ? upper_half_below(word, threshold_high) : lower_half_below(word, threshold_high);
}

// Dropout of one batch entry and head. The key is not read where Config::dropout_rows gives each row its own.
struct Dropout {
  PhiloxKey key;
  uint32_t threshold_high;  // threshold << 16
  float factor;             // 1 / (1 - r)
};

// Eight pairs, queries as rows.
struct QueryRowBits {
  PhiloxWords words;
  uint32_t threshold_high;

  JATTN_HOST_DEVICE constexpr bool dropped(int w, int h, int e) const {
    const uint32_t word = words.word[2 * h + w];
    return e == 0 ? lower_half_below(word, threshold_high) : upper_half_below(word, threshold_high);
  }
};

// Eight pairs, keys as rows: halves h of word [e][w].
struct KeyRowBits {
  uint32_t words[2][2];
  uint32_t threshold_high;

  JATTN_HOST_DEVICE constexpr bool dropped(int w, int h, int e) const {
    const uint32_t word = words[e][w];
    return h == 0 ? lower_half_below(word, threshold_high) : upper_half_below(word, threshold_high);
  }
};

// The calls that a lane makes for rows [row0, row0 + 16) and columns [column0, column0 + 16).
JATTN_HOST_DEVICE constexpr uint32_t query_row_group(int lane, int row0) {
  return uint32_t(row0) / 2 + uint32_t(lane >> 2);
}
JATTN_HOST_DEVICE constexpr uint32_t key_column_group(int lane, int column0) {
  return uint32_t(column0) / 4 + uint32_t(lane & 3);
}

// Keys as rows: lanes g and g ^ 1 of a column hold pairs of the same two calls. Each makes one, for the query of its own
// parity, and hands over the halves that belong to the other's key.
JATTN_HOST_DEVICE constexpr bool is_odd_row(int lane) { return (lane & 4) != 0; }
JATTN_HOST_DEVICE constexpr uint32_t key_row_group(int lane, int row0) {
  return uint32_t(row0) / 4 + uint32_t(lane >> 3);
}
JATTN_HOST_DEVICE constexpr uint32_t query_column_group(int lane, int column0) {
  return uint32_t(column0) / 2 + 2 * uint32_t(lane & 3) + (is_odd_row(lane) ? 1 : 0);
}

// The lower or upper halves of two words as one.
JATTN_HOST_DEVICE inline uint32_t halves(uint32_t a, uint32_t b, bool upper) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, upper ? 0x7632u : 0x5410u);
#else
  return upper ? a >> 16 | (b & 0xffff0000u) : (a & 0xffffu) | b << 16;
#endif
}

// Lower halves are of even keys; words 2 w and 2 w + 1 are of rows h = 0 and h = 1.
struct KeyRowHalves {
  uint32_t word[2];  // by w
};
JATTN_HOST_DEVICE inline KeyRowHalves halves_of_key(const PhiloxWords& made, bool odd_key) {
  return {{halves(made.word[0], made.word[1], odd_key), halves(made.word[2], made.word[3], odd_key)}};
}
JATTN_HOST_DEVICE inline KeyRowBits key_row_bits(KeyRowHalves own, KeyRowHalves got, bool odd,
                                                 uint32_t threshold_high) {
  return {{{odd ? got.word[0] : own.word[0], odd ? got.word[1] : own.word[1]},
           {odd ? own.word[0] : got.word[0], odd ? own.word[1] : got.word[1]}},
          threshold_high};
}

#ifdef __CUDACC__

// min(rint(65536 * rate), 65535)
__device__ __forceinline__ int dropout_threshold(const ProblemParams& problem, int batch) {
  const float rate = __ldg(problem.dropout_rate + int64_t(batch) * problem.dropout_rate_stride);
  return min(max(__float2int_rn(rate * 65536.0f), 0), 65535);
}

// Of one batch entry and head.
template <Config kConfig>
__device__ __forceinline__ Dropout dropout_of(const ProblemParams& problem, int batch, int head) {
  const int threshold = dropout_threshold(problem, batch);
  PhiloxKey key{0, 0};
  if constexpr (!kConfig.dropout_rows) {
    const uint32_t* words = problem.dropout_keys.data + int64_t(batch) * problem.dropout_keys.stride_batch +
                            int64_t(head) * problem.dropout_keys.stride_head;
    // The same in the whole warp: said by a shuffle, so that the key schedule may use uniform registers.
    key = {__shfl_sync(0xffffffffu, __ldg(words), 0), __shfl_sync(0xffffffffu, __ldg(words + 1), 0)};
  }
  return {key, __shfl_sync(0xffffffffu, uint32_t(threshold) << 16, 0), __fdiv_rn(65536.0f, float(65536 - threshold))};
}

// Key of a row of the table of keys: Config::dropout_rows.
__device__ __forceinline__ PhiloxKey dropout_row_key(const ProblemParams& problem, int segment, int head) {
  const int row = min(max(segment, 0), problem.num_dropout_rows - 1);
  const uint32_t* words = problem.dropout_keys.data + int64_t(row) * problem.dropout_keys.stride_batch +
                          int64_t(head) * problem.dropout_keys.stride_head;
  return {__ldg(words), __ldg(words + 1)};
}

// Sixteen rows of queries.
struct QueryRowDrops {
  const Dropout& dropout;
  PhiloxRowPart row;

  __device__ __forceinline__ QueryRowDrops(const Dropout& dropout, int row0)
      : dropout(dropout), row(philox_row_part(dropout.key, query_row_group(ptx::thread_index_anew() & 31, row0))) {}

  // Of columns [column0, column0 + 16).
  __device__ __forceinline__ QueryRowBits bits(int column0) const {
    const uint32_t group = key_column_group(ptx::thread_index_anew() & 31, column0);
    return {philox(dropout.key, row, philox_column_part(dropout.key, group)), dropout.threshold_high};
  }
};

// Sixteen rows of keys.
struct KeyRowDrops {
  const Dropout& dropout;
  PhiloxColumnPart column;

  __device__ __forceinline__ KeyRowDrops(const Dropout& dropout, int row0)
      : dropout(dropout), column(philox_column_part(dropout.key, key_row_group(ptx::thread_index_anew() & 31, row0))) {}

  // Of queries [column0, column0 + 16). Every lane of the warp takes part.
  __device__ __forceinline__ KeyRowBits bits(int column0) const {
    const int lane = ptx::thread_index_anew() & 31;
    const bool odd = is_odd_row(lane);
    const PhiloxRowPart row = philox_row_part(dropout.key, query_column_group(lane, column0));
    const PhiloxWords made = philox(dropout.key, row, column);
    const KeyRowHalves sent = halves_of_key(made, !odd);
    const KeyRowHalves got{
        {__shfl_xor_sync(0xffffffffu, sent.word[0], 4), __shfl_xor_sync(0xffffffffu, sent.word[1], 4)}};
    return key_row_bits(halves_of_key(made, odd), got, odd, dropout.threshold_high);
  }
};

#endif  // __CUDACC__

}  // namespace jattn
