// Which pairs dropout removes (core/problem.h has the definition): Philox4x32-10, one call for 16 pairs, which two lanes hold
// in two neighbouring 16x8 accumulator blocks.
//
// Use: dropout_of<Config>() once per batch entry and head. A fragment is blocks of 8 columns; lane 4 g + t holds of block n the
// rows row0 + g + 8 h and the columns column0 + 8 n + 2 t + e as value 2 h + e. row0 and column0 are multiples of 16.
//   rows are queries (s = q k^T):    QueryRowDrops drops(dropout, row0);  per pair of blocks  drops.bits(column0 + 16 p)
//   rows are keys    (s^T = k q^T):  RowDrops<true> drops(dropout, row0); likewise
// bits.dropped(w, h, e) answers for value 2 h + e of block 2 p + w. Kept pairs are multiplied by dropout.factor.
// drops.two(column0 + 32 p) gives the bits of two pairs of blocks by one call and an exchange with lane ^ 4, by whole warps.
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

// Numbers of 15 bits decide about pairs; rates above 255/256 count as that.
inline constexpr int kDropoutLevels = 1 << 15, kMostDropoutThreshold = kDropoutLevels - kDropoutLevels / 256;

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

// The group of a query or key: an index, or the bit pattern of a position of either sign.
JATTN_HOST_DEVICE constexpr uint32_t dropout_group(int index) {
  return (uint32_t(index) >> 4) * 4 + ((uint32_t(index) & 7) >> 1);
}

// The bytes of two words that a selector names: hexadecimal digit i gives byte i of the result, 0 to 3 from a, 4 to 7 from b.
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

// What decides about the eight pairs of a lane in two neighbouring blocks, as the definition has it: the queries lie h octets
// from the first, the keys w. With queries as rows byte 2 h + e of word w is for key parity e, the parity of the lane's queries
// being given; with keys as rows byte 2 h + r is for query parity r.
struct PairWords {
  uint32_t word[2];

  // Numbers of the pairs of both parities as 16-bit halves, the even one lower.
  JATTN_HOST_DEVICE uint32_t numbers(int w, int h) const {
    return select_bytes(word[w] & 0x7f7f7f7fu, word[0] ^ word[1], h == 0 ? 0x1706u : 0x3524u);
  }
};

// A number is below the threshold exactly if, as the upper half of a word, it is below threshold << 16, whatever the lower half.
JATTN_HOST_DEVICE constexpr bool half_below(uint32_t numbers, int parity, uint32_t threshold_high) {
  return (parity == 0 ? numbers << 16 : numbers) < threshold_high;
}

JATTN_HOST_DEVICE inline PairWords words_of_query(const PhiloxWords& made, bool odd) {
  return {{odd ? made.word[2] : made.word[0], odd ? made.word[3] : made.word[1]}};
}
JATTN_HOST_DEVICE inline PairWords words_of_key(const PhiloxWords& made, bool odd) {
  const uint32_t selector = odd ? 0x7351u : 0x6240u;
  return {{select_bytes(made.word[0], made.word[2], selector), select_bytes(made.word[1], made.word[3], selector)}};
}

// One pair by its own call: where rows of a fragment do not belong together (dropout_rows).
JATTN_HOST_DEVICE inline bool pair_dropped(PhiloxKey key, PhiloxRowPart row, int query, int column,
                                           uint32_t threshold_high) {
  const PhiloxWords made = philox(key, row, philox_column_part(key, dropout_group(column)));
  const PairWords words = words_of_query(made, (query & 1) != 0);
  const uint32_t of_even = words.numbers(0, 0), of_odd = words.numbers(1, 0);
  const uint32_t far_even = words.numbers(0, 1), far_odd = words.numbers(1, 1);
  const bool right = (column & 8) != 0, below = (query & 8) != 0;
  const uint32_t numbers = below ? (right ? far_odd : far_even) : (right ? of_odd : of_even);
  return half_below(numbers, column & 1, threshold_high);
}

// Dropout of one batch entry and head. The key is not read where Config::dropout_rows gives each row its own.
struct Dropout {
  PhiloxKey key;
  uint32_t threshold_high;  // threshold << 16
  float factor;             // 1 / (1 - r)
};

// Eight pairs: of rows h octets from row0, columns w octets from column0.
template <bool kKeysAreRows>
struct LaneBits {
  PairWords words;
  uint32_t threshold_high;

  // Of both columns e.
  JATTN_HOST_DEVICE uint32_t numbers(int w, int h) const {
    return kKeysAreRows ? words.numbers(h, w) : words.numbers(w, h);
  }
  JATTN_HOST_DEVICE bool dropped(int w, int h, int e) const { return half_below(numbers(w, h), e, threshold_high); }
};
using QueryRowBits = LaneBits<false>;
using KeyRowBits = LaneBits<true>;

// The calls for a lane's rows in [row0, row0 + 16) and columns in [column0, column0 + 16). Lanes g and g ^ 1 share them.
JATTN_HOST_DEVICE constexpr uint32_t lane_row_group(int lane, int row0) {
  return uint32_t(row0) / 4 + uint32_t(lane >> 3);
}
JATTN_HOST_DEVICE constexpr uint32_t lane_column_group(int lane, int column0) {
  return uint32_t(column0) / 4 + uint32_t(lane & 3);
}
JATTN_HOST_DEVICE constexpr bool has_odd_rows(int lane) { return (lane & 4) != 0; }

#ifdef __CUDACC__

__device__ __forceinline__ int dropout_threshold(const ProblemParams& problem, int batch) {
  const float rate = __ldg(problem.dropout_rate + int64_t(batch) * problem.dropout_rate_stride);
  return min(max(__float2int_rn(rate * float(kDropoutLevels)), 0), kMostDropoutThreshold);
}

// What a kept pair is multiplied by.
__device__ __forceinline__ float kept_factor(int threshold) {
  return __fdiv_rn(float(kDropoutLevels), float(kDropoutLevels - threshold));
}
__device__ __forceinline__ float kept_factor(const ProblemParams& problem, int batch) {
  return kept_factor(dropout_threshold(problem, batch));
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
  return {key, __shfl_sync(0xffffffffu, uint32_t(threshold) << 16, 0), kept_factor(threshold)};
}

// Key of a row of the table of keys: Config::dropout_rows.
__device__ __forceinline__ PhiloxKey dropout_row_key(const ProblemParams& problem, int segment, int head) {
  const int row = min(max(segment, 0), problem.num_dropout_rows - 1);
  const uint32_t* words = problem.dropout_keys.data + int64_t(row) * problem.dropout_keys.stride_batch +
                          int64_t(head) * problem.dropout_keys.stride_head;
  return {__ldg(words), __ldg(words + 1)};
}

template <bool kKeysAreRows>
struct RowPartOf {
  using Type = PhiloxRowPart;
};
template <>
struct RowPartOf<true> {
  using Type = PhiloxColumnPart;
};

// Sixteen rows of queries or keys.
template <bool kKeysAreRows>
struct RowDrops {
  using Part = typename RowPartOf<kKeysAreRows>::Type;
  using Bits = LaneBits<kKeysAreRows>;
  struct TwoBits {
    Bits bits[2];
  };

  const Dropout& dropout;
  Part part;  // of the rows

  __device__ __forceinline__ static int lane() { return ptx::thread_index_anew() & 31; }

  __device__ __forceinline__ RowDrops(const Dropout& dropout, int row0) : dropout(dropout) {
    const uint32_t group = lane_row_group(lane(), row0);
    if constexpr (kKeysAreRows) {
      part = philox_column_part(dropout.key, group);
    } else {
      part = philox_row_part(dropout.key, group);
    }
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

  // Of columns [column0, column0 + 16).
  __device__ __forceinline__ Bits bits(int column0) const {
    const PhiloxWords made = call(lane_column_group(lane(), column0));
    return {words_of_row(made, has_odd_rows(lane())), dropout.threshold_high};
  }

  // Of columns [column0, column0 + 32): each of two lanes makes the call of one half and hands over what belongs to the
  // other's rows. Every lane of the warp takes part.
  __device__ __forceinline__ TwoBits two(int column0) const {
    const bool odd = has_odd_rows(lane());
    const PhiloxWords made = call(lane_column_group(lane(), column0) + (odd ? 4 : 0));
    const PairWords own = words_of_row(made, odd), sent = words_of_row(made, !odd);
    TwoBits two{{{{}, dropout.threshold_high}, {{}, dropout.threshold_high}}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t got = __shfl_xor_sync(0xffffffffu, sent.word[i], 4);
      two.bits[0].words.word[i] = odd ? got : own.word[i];
      two.bits[1].words.word[i] = odd ? own.word[i] : got;
    }
    return two;
  }
};
using QueryRowDrops = RowDrops<false>;

// Two numbers against the threshold at once, as bit patterns of bfloat16: those of positive ones order like integers, and what is
// not a number, above kMostDropoutThreshold, is not below anything. Hopper and later.
__device__ __forceinline__ uint32_t both_halves(uint32_t threshold_high) {
  return threshold_high | threshold_high >> 16;
}

// All ones in the halves that are below.
__device__ __forceinline__ uint32_t halves_below(uint32_t numbers, uint32_t thresholds) {
  uint32_t mask;
  asm("set.lt.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(numbers), "r"(thresholds));
  return mask;
}

// Makes `even` 0 if the lower number is below, `odd` if the upper one is.
__device__ __forceinline__ void clear_if_below(float& even, float& odd, uint32_t numbers, uint32_t thresholds) {
  asm("{\n.reg .pred lower, upper;\n"
      "setp.lt.bf16x2 lower|upper, %2, %3;\n"
      "selp.f32 %0, 0f00000000, %0, lower;\n"
      "selp.f32 %1, 0f00000000, %1, upper;\n}"
      : "+f"(even), "+f"(odd)
      : "r"(numbers), "r"(thresholds));
}

#endif  // __CUDACC__

}  // namespace jattn
