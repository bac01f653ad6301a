// Dropout: which pairs of a tile are kept. problem.h defines it; Philox runs on vectors, one call in each lane.
#pragma once

#include "cpu/visibility.h"

namespace jattn::cpu {
namespace {

// Products, in full, of the lower halves of 64-bit lanes.
inline Vec<uint64_t> multiply_lower_halves(Vec<uint64_t> a, uint32_t factor) {
  const Vec<uint64_t> b = Vec<uint64_t>{} + factor;
#if defined(__AVX512F__)
  return reinterpret_cast<Vec<uint64_t>>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Vec<uint64_t>>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__x86_64__)
  return reinterpret_cast<Vec<uint64_t>>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  return (a & 0xffffffffu) * b;
#endif
}

// One Philox call in each 64-bit lane, in its lower half: a product then holds both of the words that a round wants of it.
// What the upper halves hold is never read.
struct PhiloxCalls {
  Vec<uint64_t> word[4];
};

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) of the counters
// (row group, column group, 0, 0).
inline __attribute__((always_inline)) PhiloxCalls philox(Vec<uint64_t> row_groups, Vec<uint64_t> column_groups,
                                                         Vec<uint64_t> keys_low, Vec<uint64_t> keys_high) {
  constexpr int kHalfBits = 32, kRounds = 10;
  PhiloxCalls c{{row_groups, column_groups, Vec<uint64_t>{}, Vec<uint64_t>{}}};
#pragma GCC unroll 10
  for (int round = 0; round < kRounds; ++round) {
    const Vec<uint64_t> first = multiply_lower_halves(c.word[0], 0xD2511F53u);
    const Vec<uint64_t> third = multiply_lower_halves(c.word[2], 0xCD9E8D57u);
    c = {{(third >> kHalfBits) ^ c.word[1] ^ keys_low, third, (first >> kHalfBits) ^ c.word[3] ^ keys_high, first}};
    keys_low += 0x9E3779B9u;
    keys_high += 0xBB67AE85u;
  }
  return c;
}

// The lower halves of the 64-bit lanes of `even` in the even lanes, those of `odd` in the odd ones.
inline Vec<uint32_t> merge_halves(Vec<uint64_t> even, Vec<uint64_t> odd) {
  return reinterpret_cast<Vec<uint32_t>>((even & 0xffffffffu) | (odd << 32));
}

struct PhiloxKeys {
  Vec<uint32_t> low, high;
};
struct PhiloxWords {
  Vec<uint32_t> word[4];
};

// One call in each 32-bit lane.
inline __attribute__((always_inline)) PhiloxWords philox(Vec<uint32_t> row_groups, Vec<uint32_t> column_groups,
                                                         PhiloxKeys keys) {
  const auto even = [](Vec<uint32_t> words) { return reinterpret_cast<Vec<uint64_t>>(words); };
  const auto odd = [](Vec<uint32_t> words) { return reinterpret_cast<Vec<uint64_t>>(words) >> 32; };
  const PhiloxCalls of_even = philox(even(row_groups), even(column_groups), even(keys.low), even(keys.high));
  const PhiloxCalls of_odd = philox(odd(row_groups), odd(column_groups), odd(keys.low), odd(keys.high));
  PhiloxWords words;
  for (int i = 0; i < 4; ++i) words.word[i] = merge_halves(of_even.word[i], of_odd.word[i]);
  return words;
}

// The bits of the pairs of two queries t, t + 8 and two keys j, j + 1: those of j in the lower half, of j + 1 in the upper.
struct BitsOfWord {
  Vec<uint32_t> query[2];
};

// Of the word W(r, w) of these pairs and of W(r, 0) ^ W(r, 1).
inline BitsOfWord bits_of_word(Vec<uint32_t> word, Vec<uint32_t> both) {
  constexpr uint32_t kOwnBits = 0x7f007f00, kSharedBits = 0x00ff00ff;
  const Vec<uint32_t> shared = both << 16 | both >> 16;
  // Of one key each, the two queries in the two halves.
  const Vec<uint32_t> even = (word << 8 & kOwnBits) | (shared & kSharedBits);
  const Vec<uint32_t> odd = (word & kOwnBits) | (shared >> 8 & kSharedBits);
  return {{(even & 0xffffu) | odd << 16, even >> 16 | (odd & 0xffff0000u)}};
}

// The counter is a 32-bit word: it wraps around.
template <typename T>
inline Vec<T> count_from(uint32_t first) {
  Vec<T> lanes;
  for (int i = 0; i < kWidth<T>; ++i) lanes[i] = first + static_cast<uint32_t>(i);
  return lanes;
}

// Which call a row or a column belongs to: {i, i + 1, i + 8, i + 9} of 16 form a group.
template <typename T>
constexpr T philox_group(T index) {
  return (index >> 4) * 4 + ((index & 7) >> 1);
}
constexpr int64_t kGroupsOfBlock = 4, kBlock = 16;

// The first row or column of a group, counted from the first of a block of 16.
constexpr int64_t first_of_group(int64_t group) { return group / kGroupsOfBlock * kBlock + group % kGroupsOfBlock * 2; }

// 15 bits decide about a pair; rates above 255/256 count as that.
constexpr int kLevels = 1 << 15, kMostThreshold = kLevels - kLevels / 256;

// Dropout of one batch entry.
struct Dropout {
  const Problem& problem;
  const Sequence& sequence;
  int32_t threshold = 0;  // a pair is dropped if its bits are below; 0: there is no dropout

  Dropout(const Problem& problem_of_sequence, const Sequence& sequence_of_entry)
      : problem(problem_of_sequence), sequence(sequence_of_entry) {
    if (problem.dropout_keys.data == nullptr) return;
    const float rate = problem.dropout_rate.data[sequence.batch * problem.dropout_rate.stride_batch];
    threshold = static_cast<int32_t>(min_of(max_of(__builtin_lrintf(rate * kLevels), 0), kMostThreshold));
  }

  bool is_active() const { return threshold > 0; }

  // The share of pairs that are kept: exact.
  template <typename Acc>
  Acc kept_share() const {
    return static_cast<Acc>(kLevels - threshold) / kLevels;
  }

  struct Key {
    uint32_t low, high;
  };
  Key key(int64_t query, int64_t head) const {
    int64_t row = sequence.batch;
    if (problem.dropout_rows) {
      row = min_of(max_of(sequence.q_segments[query], 0), problem.num_dropout_rows - 1);
    }
    const uint32_t* words =
        problem.dropout_keys.data + row * problem.dropout_keys.stride_batch + head * problem.dropout_keys.stride_head;
    return {words[0], words[1]};
  }
  uint32_t row(int64_t query) const {
    return static_cast<uint32_t>(problem.dropout_rows ? sequence.q_positions[query] : query);
  }
  uint32_t column(int64_t key) const {
    return static_cast<uint32_t>(problem.dropout_rows ? sequence.kv_positions[key] : key);
  }

  // For queries in the lanes: bits[key / 2 * kPanel + lane] holds the bits of an even key in its lower half and those
  // of the next in its upper half.
  template <int64_t kPanel>
  void draw_for_lanes(const QueryRows& rows, KeyRange keys, uint32_t* bits) const {
    // Queries of several heads follow each other without a gap: their groups begin anywhere.
    if (problem.dropout_rows || rows.head[0] != rows.head[rows.count - 1]) {
      draw_each_for_lanes<kPanel>(rows, keys, bits);
      return;
    }
    using Wide = Vec<uint64_t>;
    const Key shared = key(rows.query[0], rows.head[0]);
    const Wide key_low = Wide{} + shared.low, key_high = Wide{} + shared.high;
    const uint32_t first_row_group = philox_group(row(rows.query[0])),
                   first_column_group = philox_group(column(keys.first));
    // Two calls in each lane: one alone is a chain of products that wait for each other.
    constexpr int kCalls = 2;
    for (int64_t c = 0; first_of_group(c) < keys.count; c += kCalls) {
      for (int64_t r = 0; first_of_group(r) < rows.count; r += kWidth<uint64_t>) {
        const auto row_groups = count_from<uint64_t>(first_row_group + static_cast<uint32_t>(r));
        PhiloxCalls drawn[kCalls];
        for (int call = 0; call < kCalls; ++call) {
          const Wide column_groups = Wide{} + (first_column_group + static_cast<uint32_t>(c + call));
          drawn[call] = philox(row_groups, column_groups, key_low, key_high);
        }
        for (int call = 0; call < kCalls; ++call) {
          uint32_t* to = bits + first_of_group(c + call) / 2 * kPanel + first_of_group(r);
          store_bits_of_calls(drawn[call], to, to + 4 * kPanel);
        }
      }
    }
  }

  // For keys in the lanes: bits[query row * kTile + key]. Writes whole blocks of 16 rows.
  void draw_for_rows(const QueryRows& rows, KeyRange keys, uint16_t* bits) const {
    if (problem.dropout_rows || rows.head[0] != rows.head[rows.count - 1]) {
      draw_each_for_rows(rows, keys, bits);
      return;
    }
    const Key shared = key(rows.query[0], rows.head[0]);
    const PhiloxKeys philox_keys{Vec<uint32_t>{} + shared.low, Vec<uint32_t>{} + shared.high};
    const uint32_t first_row_group = philox_group(row(rows.query[0])),
                   first_column_group = philox_group(column(keys.first));
    for (int64_t c = 0; first_of_group(c) < keys.count; c += kWidth<uint32_t>) {
      const auto column_groups = count_from<uint32_t>(first_column_group + static_cast<uint32_t>(c));
      for (int64_t r = 0; first_of_group(r) < rows.count; ++r) {
        const auto group = first_row_group + static_cast<uint32_t>(r);
        const PhiloxWords drawn = philox(Vec<uint32_t>{} + group, column_groups, philox_keys);
        for (int parity = 0; parity < 2; ++parity) {
          const Vec<uint32_t>* words = drawn.word + 2 * parity;
          const Vec<uint32_t> both = words[0] ^ words[1];
          constexpr int kRun = 4;  // groups of consecutive columns
          for (int w = 0; w < 2; ++w) {
            const BitsOfWord found = bits_of_word(words[w], both);
            for (int run = 0; run < kWidth<uint32_t>; run += kRun) {
              uint16_t* to = bits + (first_of_group(r) + parity) * kTile + first_of_group(c + run) + 8 * w;
              copy_words<kRun>(found.query[0], run, to);
              copy_words<kRun>(found.query[1], run, to + 8 * kTile);
            }
          }
        }
      }
    }
  }

 private:
  template <int kCount>
  static void copy_words(Vec<uint32_t> words, int first, void* to) {
    memcpy(to, reinterpret_cast<const char*>(&words) + first * sizeof(uint32_t), kCount * sizeof(uint32_t));
  }

  // Of calls with consecutive row groups, `to` being where the bits of their first query with the first two keys go, and
  // `to_right` likewise with the keys 8 further on.
  static void store_bits_of_calls(const PhiloxCalls& drawn, uint32_t* to, uint32_t* to_right) {
    // The two queries t, t + 1 of a call side by side.
    const Vec<uint32_t> left = merge_halves(drawn.word[0], drawn.word[2]),
                        right = merge_halves(drawn.word[1], drawn.word[3]);
    const BitsOfWord found = bits_of_word(left, left ^ right), found_right = bits_of_word(right, left ^ right);
    constexpr int kRun = kWidth<uint32_t> < 8 ? kWidth<uint32_t> : 8;  // consecutive queries
    for (int run = 0; run < kWidth<uint32_t>; run += kRun) {
      for (int h = 0; h < 2; ++h) {
        copy_words<kRun>(found.query[h], run, to + 2 * run + 8 * h);
        copy_words<kRun>(found_right.query[h], run, to_right + 2 * run + 8 * h);
      }
    }
  }

  // The bits of one pair in each lane, out of the call that serves it.
  static Vec<uint32_t> bits_of_pairs(Vec<uint32_t> rows, Vec<uint32_t> columns, const PhiloxWords& drawn) {
    const auto is_set = [](Vec<uint32_t> indices, uint32_t bit) { return (indices & bit) != 0; };
    const Vec<uint32_t> left = is_set(rows, 1) ? drawn.word[2] : drawn.word[0];
    const Vec<uint32_t> right = is_set(rows, 1) ? drawn.word[3] : drawn.word[1];
    const Vec<uint32_t> word = is_set(columns, 8) ? right : left, both = left ^ right;
    const Vec<uint32_t> own = is_set(rows, 8) ? word >> 16 : word, shared = is_set(rows, 8) ? both : both >> 16;
    return is_set(columns, 1) ? (own & 0x7f00u) | (shared >> 8 & 0xffu) : (own << 8 & 0x7f00u) | (shared & 0xffu);
  }

  // One call for each pair, but for those of two neighbouring keys.
  template <int64_t kPanel>
  void draw_each_for_lanes(const QueryRows& rows, KeyRange keys, uint32_t* bits) const {
    uint32_t row_of[kPanel] = {}, low[kPanel] = {}, high[kPanel] = {};
    for (int64_t lane = 0; lane < rows.count; ++lane) {
      const Key lane_key = key(rows.query[lane], rows.head[lane]);
      row_of[lane] = row(rows.query[lane]);
      low[lane] = lane_key.low;
      high[lane] = lane_key.high;
    }
    for (int64_t lane = 0; lane < rows.count; lane += kWidth<uint32_t>) {
      const Vec<uint32_t> rows_of_lanes = load(row_of + lane);
      const PhiloxKeys philox_keys{load(low + lane), load(high + lane)};
      PhiloxWords drawn;
      for (int64_t i = 0; i < keys.count; ++i) {
        const uint32_t of_key = column(keys.first + i);
        if (i == 0 || philox_group(of_key) != philox_group(column(keys.first + i - 1))) {
          drawn = philox(philox_group(rows_of_lanes), Vec<uint32_t>{} + philox_group(of_key), philox_keys);
        }
        const Vec<uint32_t> found = bits_of_pairs(rows_of_lanes, Vec<uint32_t>{} + of_key, drawn);
        uint32_t* to = bits + i / 2 * kPanel + lane;
        store(to, i % 2 == 0 ? found : load(to) | found << 16);
      }
    }
  }

  // Likewise, but for those of two neighbouring queries.
  void draw_each_for_rows(const QueryRows& rows, KeyRange keys, uint16_t* bits) const {
    uint32_t columns[kTile] = {};
    for (int64_t i = 0; i < keys.count; ++i) columns[i] = column(keys.first + i);
    for (int64_t i = 0; i < keys.count; i += kWidth<uint32_t>) {
      const Vec<uint32_t> columns_of_lanes = load(columns + i);
      PhiloxWords drawn;
      Key last_key{};
      uint32_t last_group = 0;
      for (int64_t r = 0; r < rows.count; ++r) {
        const Key row_key = key(rows.query[r], rows.head[r]);
        const uint32_t row_of = row(rows.query[r]), group = philox_group(row_of);
        if (r == 0 || group != last_group || row_key.low != last_key.low || row_key.high != last_key.high) {
          const PhiloxKeys philox_keys{Vec<uint32_t>{} + row_key.low, Vec<uint32_t>{} + row_key.high};
          drawn = philox(Vec<uint32_t>{} + group, philox_group(columns_of_lanes), philox_keys);
          last_key = row_key;
          last_group = group;
        }
        store_16bit(bits + r * kTile + i, bits_of_pairs(Vec<uint32_t>{} + row_of, columns_of_lanes, drawn));
      }
    }
  }
};

// Lane by lane `value` where the bits do not drop it, else 0.
template <typename Acc>
inline Vec<Acc> where_kept(Vec<Bits<Acc>> bits, int32_t threshold, Vec<Acc> value) {
  return bits >= threshold ? value : Vec<Acc>{};
}

// As many unsigned integers as a vector has elements of Acc, each widened to the size of one.
template <typename Acc, typename Unsigned>
inline Vec<Bits<Acc>> widen_bits(const Unsigned* from) {
  using Narrow = VectorOf<Unsigned, kWidth<Acc>* static_cast<int>(sizeof(Unsigned))>;
  return __builtin_convertvector(*reinterpret_cast<const typename Narrow::Unaligned*>(from), Vec<Bits<Acc>>);
}

}  // namespace
}  // namespace jattn::cpu
