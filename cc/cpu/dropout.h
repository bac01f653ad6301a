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

struct PhiloxKeys {
  Vec<uint32_t> low, high;
};
struct PhiloxWords {
  Vec<uint32_t> word[4];
};

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) of the counters
// (row group, column group, 0, 0), one in each lane.
//
// Even and odd lanes are worked on apart, each in the lower half of a 64-bit lane: a product then holds both of the
// words that a round wants of it, and what is left in the upper half of a counter is never read.
inline __attribute__((always_inline)) PhiloxWords philox(Vec<uint32_t> row_groups, Vec<uint32_t> column_groups,
                                                         PhiloxKeys keys) {
  using Wide = Vec<uint64_t>;
  constexpr int kHalfBits = 32, kRounds = 10;
  struct Counter {
    Wide word[4];
  };
  const auto run = [](Wide row_group, Wide column_group, Wide key_low, Wide key_high) {
    Counter c{{row_group, column_group, Wide{}, Wide{}}};
#pragma GCC unroll 10
    for (int round = 0; round < kRounds; ++round) {
      const Wide first = multiply_lower_halves(c.word[0], 0xD2511F53u);
      const Wide third = multiply_lower_halves(c.word[2], 0xCD9E8D57u);
      c = {{(third >> kHalfBits) ^ c.word[1] ^ key_low, third, (first >> kHalfBits) ^ c.word[3] ^ key_high, first}};
      key_low += 0x9E3779B9u;
      key_high += 0xBB67AE85u;
    }
    return c;
  };
  const auto wide = [](Vec<uint32_t> words) { return reinterpret_cast<Wide>(words); };
  const Counter even = run(wide(row_groups), wide(column_groups), wide(keys.low), wide(keys.high));
  const Counter odd = run(wide(row_groups) >> kHalfBits, wide(column_groups) >> kHalfBits, wide(keys.low) >> kHalfBits,
                          wide(keys.high) >> kHalfBits);
  PhiloxWords words;
  for (int i = 0; i < 4; ++i) {
    words.word[i] = reinterpret_cast<Vec<uint32_t>>((even.word[i] & 0xffffffffu) | (odd.word[i] << kHalfBits));
  }
  return words;
}

inline Vec<uint32_t> count_from(int64_t first) {
  Vec<uint32_t> lanes;
  for (int i = 0; i < kWidth<uint32_t>; ++i) lanes[i] = static_cast<uint32_t>(first) + static_cast<uint32_t>(i);
  return lanes;
}

// Where in the groups of Philox calls a row or a column lies.
constexpr uint32_t row_group(uint32_t row) { return (row >> 4) * 8 + (row & 7); }
constexpr uint32_t column_group(uint32_t column) { return (column >> 4) * 4 + (column & 7) / 2; }

// Dropout of one batch entry.
struct Dropout {
  const Problem& problem;
  const Sequence& sequence;
  int32_t threshold = 0;  // a pair is dropped if its bits are below; 0: there is no dropout

  Dropout(const Problem& problem_of_sequence, const Sequence& sequence_of_entry)
      : problem(problem_of_sequence), sequence(sequence_of_entry) {
    if (problem.dropout_keys.data == nullptr) return;
    const float rate = problem.dropout_rate.data[sequence.batch * problem.dropout_rate.stride_batch];
    threshold = static_cast<int32_t>(min_of(max_of(__builtin_lrintf(rate * 65536.0f), 0), 65535));
  }

  bool is_active() const { return threshold > 0; }

  // The share of pairs that are kept: exact.
  template <typename Acc>
  Acc kept_share() const {
    return static_cast<Acc>(65536 - threshold) / 65536;
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
    const Key shared = key(rows.query[0], rows.head[0]);
    const PhiloxKeys philox_keys{Vec<uint32_t>{} + shared.low, Vec<uint32_t>{} + shared.high};
    const uint32_t first_row_group = row_group(row(rows.query[0])),
                   first_column_group = column_group(column(keys.first));
    for (int64_t c = 0; c / 4 * 16 < keys.count; ++c) {
      const Vec<uint32_t> column_groups = Vec<uint32_t>{} + (first_column_group + static_cast<uint32_t>(c));
      for (int64_t r = 0; r / 8 * 16 < rows.count; r += kWidth<uint32_t>) {
        const PhiloxWords drawn = philox(count_from(first_row_group + r), column_groups, philox_keys);
        constexpr int kRun = kWidth<uint32_t> < 8 ? kWidth<uint32_t> : 8;  // groups of consecutive rows
        for (int run = 0; run < kWidth<uint32_t>; run += kRun) {
          uint32_t* to = bits + (c / 4 * 8 + c % 4) * kPanel + (r + run) / 8 * 16 + (r + run) % 8;
          copy_words<kRun>(drawn.word[0], run, to);
          copy_words<kRun>(drawn.word[1], run, to + 4 * kPanel);
          copy_words<kRun>(drawn.word[2], run, to + 8);
          copy_words<kRun>(drawn.word[3], run, to + 8 + 4 * kPanel);
        }
      }
    }
  }

  // For keys in the lanes: bits[query row * kTile + key]. All rows are of one head.
  void draw_for_rows(const QueryRows& rows, KeyRange keys, uint16_t* bits) const {
    if (problem.dropout_rows) {
      draw_each_for_rows(rows, keys, bits);
      return;
    }
    const Key shared = key(rows.query[0], rows.head[0]);
    const PhiloxKeys philox_keys{Vec<uint32_t>{} + shared.low, Vec<uint32_t>{} + shared.high};
    const uint32_t first_row_group = row_group(row(rows.query[0])),
                   first_column_group = column_group(column(keys.first));
    for (int64_t c = 0; c / 4 * 16 < keys.count; c += kWidth<uint32_t>) {
      const Vec<uint32_t> column_groups = count_from(first_column_group + c);
      for (int64_t r = 0; r / 8 * 16 < rows.count; ++r) {
        const auto group = first_row_group + static_cast<uint32_t>(r);
        const PhiloxWords drawn = philox(Vec<uint32_t>{} + group, column_groups, philox_keys);
        constexpr int kRun = 4;  // groups of consecutive columns
        for (int run = 0; run < kWidth<uint32_t>; run += kRun) {
          uint16_t* to = bits + (r / 8 * 16 + r % 8) * kTile + (c + run) / 4 * 16;
          copy_words<kRun>(drawn.word[0], run, to);
          copy_words<kRun>(drawn.word[1], run, to + 8);
          copy_words<kRun>(drawn.word[2], run, to + 8 * kTile);
          copy_words<kRun>(drawn.word[3], run, to + 8 * kTile + 8);
        }
      }
    }
  }

 private:
  template <int kCount>
  static void copy_words(Vec<uint32_t> words, int first, void* to) {
    memcpy(to, reinterpret_cast<const char*>(&words) + first * sizeof(uint32_t), kCount * sizeof(uint32_t));
  }

  // The bits of one pair in each lane, which its call has in one of four words.
  static Vec<uint32_t> bits_of_pairs(Vec<uint32_t> rows, Vec<uint32_t> columns, PhiloxKeys keys) {
    const PhiloxWords drawn = philox((rows >> 4) * 8 + (rows & 7), (columns >> 4) * 4 + ((columns & 7) >> 1), keys);
    const auto is_set = [](Vec<uint32_t> words, uint32_t bit) { return (words & bit) != 0; };
    const Vec<uint32_t> upper = is_set(columns, 8) ? drawn.word[3] : drawn.word[2];
    const Vec<uint32_t> lower = is_set(columns, 8) ? drawn.word[1] : drawn.word[0];
    const Vec<uint32_t> word = is_set(rows, 8) ? upper : lower;
    return is_set(columns, 1) ? word >> 16 : word & 0xffffu;
  }

  // One call for each pair.
  template <int64_t kPanel>
  void draw_each_for_lanes(const QueryRows& rows, KeyRange keys, uint32_t* bits) const {
    uint32_t row_of[kPanel] = {}, low[kPanel] = {}, high[kPanel] = {};
    for (int64_t lane = 0; lane < rows.count; ++lane) {
      const Key lane_key = key(rows.query[lane], rows.head[lane]);
      row_of[lane] = row(rows.query[lane]);
      low[lane] = lane_key.low;
      high[lane] = lane_key.high;
    }
    for (int64_t i = 0; i < keys.count; ++i) {
      const Vec<uint32_t> columns = Vec<uint32_t>{} + column(keys.first + i);
      for (int64_t lane = 0; lane < rows.count; lane += kWidth<uint32_t>) {
        const Vec<uint32_t> drawn = bits_of_pairs(load(row_of + lane), columns, {load(low + lane), load(high + lane)});
        uint32_t* to = bits + i / 2 * kPanel + lane;
        store(to, i % 2 == 0 ? drawn : load(to) | drawn << 16);
      }
    }
  }

  void draw_each_for_rows(const QueryRows& rows, KeyRange keys, uint16_t* bits) const {
    uint32_t columns[kTile] = {};
    for (int64_t i = 0; i < keys.count; ++i) columns[i] = column(keys.first + i);
    for (int64_t r = 0; r < rows.count; ++r) {
      const Key row_key = key(rows.query[r], rows.head[r]);
      const PhiloxKeys philox_keys{Vec<uint32_t>{} + row_key.low, Vec<uint32_t>{} + row_key.high};
      const Vec<uint32_t> row_of = Vec<uint32_t>{} + row(rows.query[r]);
      for (int64_t i = 0; i < keys.count; i += kWidth<uint32_t>) {
        store_16bit(bits + r * kTile + i, bits_of_pairs(row_of, load(columns + i), philox_keys));
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
