// Dropout: which pairs of a tile are kept. problem.h defines it; Philox runs on vectors, one call in each lane. A pair
// has its upper bits in one byte of a vector, and so has the decision about it.
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

// One Philox call in each 64-bit lane, in its lower half: a product then holds both of the words that a round wants of
// it. What the upper halves hold is never read.
struct PhiloxCalls {
  Vec<uint64_t> word[4];
};
struct PhiloxKeys {
  Vec<uint64_t> low, high;
};
constexpr int kHalfBits = 32;

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) of the counters
// (0, row group, 0, column group). The first round multiplies zeros: only the keys are left of it. What the next two
// make of a row or of a column alone could serve several calls: that saved a tenth of a draw at most.
inline __attribute__((always_inline)) PhiloxCalls philox(Vec<uint64_t> row_groups, Vec<uint64_t> column_groups,
                                                         PhiloxKeys keys) {
  constexpr int kRounds = 10;
  PhiloxCalls c{{row_groups ^ keys.low, Vec<uint64_t>{}, column_groups ^ keys.high, Vec<uint64_t>{}}};
#pragma GCC unroll 10
  for (uint64_t round = 1; round < kRounds; ++round) {
    const Vec<uint64_t> low = keys.low + round * 0x9E3779B9u, high = keys.high + round * 0xBB67AE85u;
    const Vec<uint64_t> first = multiply_lower_halves(c.word[0], 0xD2511F53u);
    const Vec<uint64_t> third = multiply_lower_halves(c.word[2], 0xCD9E8D57u);
    c = {{(third >> kHalfBits) ^ c.word[1] ^ low, third, (first >> kHalfBits) ^ c.word[3] ^ high, first}};
  }
  return c;
}

// One call in each 32-bit lane.
struct PhiloxWords {
  Vec<uint32_t> word[4];
};

// Of the calls of the even lanes and of those of the odd ones.
inline PhiloxWords merge_calls(const PhiloxCalls& even, const PhiloxCalls& odd) {
  PhiloxWords words;
  for (int i = 0; i < 4; ++i) {
    words.word[i] = reinterpret_cast<Vec<uint32_t>>((even.word[i] & 0xffffffffu) | (odd.word[i] << kHalfBits));
  }
  return words;
}

inline __attribute__((always_inline)) PhiloxWords philox(Vec<uint32_t> row_groups, Vec<uint32_t> column_groups,
                                                         Vec<uint32_t> keys_low, Vec<uint32_t> keys_high) {
  PhiloxCalls calls[2];
  for (int odd = 0; odd < 2; ++odd) {
    const auto lanes = [odd](Vec<uint32_t> words) {
      return reinterpret_cast<Vec<uint64_t>>(words) >> (odd * kHalfBits) & 0xffffffffu;
    };
    calls[odd] = philox(lanes(row_groups), lanes(column_groups), PhiloxKeys{lanes(keys_low), lanes(keys_high)});
  }
  return merge_calls(calls[0], calls[1]);
}

// The product of each byte, two elements of GF(4) in its nibbles, with a generator of that field.
inline Vec<uint32_t> multiply_by_generator(Vec<uint32_t> bytes) {
  return (bytes >> 4 & 0x0f0f0f0fu) | ((bytes ^ bytes << 4) & 0xf0f0f0f0u);
}

// Which call a row or a column belongs to: {i, i + 1, i + 8, i + 9, i + 16, i + 17, i + 24, i + 25} of a block of 32
// form a group.
template <typename T>
constexpr T philox_group(T index) {
  return (index >> 5) * 4 + ((index & 7) >> 1);
}
constexpr int64_t kGroupsOfBlock = 4, kBlock = 32;

// Operations within each 16 bytes of a vector, which is a strip.
constexpr int kStripBytes = 16, kStrips = kVectorBytes / kStripBytes;

// The 16-bit words with even indices of each strip, then those with odd ones.
template <size_t... kIndex>
inline Vec<uint32_t> even_then_odd(Vec<uint32_t> words, std::index_sequence<kIndex...>) {
  const auto halves = reinterpret_cast<Vec<uint16_t>>(words);
  return reinterpret_cast<Vec<uint32_t>>(
      __builtin_shufflevector(halves, halves, static_cast<int>(kIndex / 8 * 8 + kIndex % 4 * 2 + kIndex / 4 % 2)...));
}
inline Vec<uint32_t> even_then_odd(Vec<uint32_t> words) {
  return even_then_odd(words, std::make_index_sequence<kWidth<uint16_t>>());
}

// Half number kA of each strip of `a`, then half number kB of that of `b`.
template <int kA, int kB, size_t... kIndex>
inline Vec<uint32_t> join_halves(Vec<uint32_t> a, Vec<uint32_t> b, std::index_sequence<kIndex...>) {
  return reinterpret_cast<Vec<uint32_t>>(__builtin_shufflevector(
      reinterpret_cast<Vec<uint64_t>>(a), reinterpret_cast<Vec<uint64_t>>(b),
      static_cast<int>(kIndex % 2 == 0 ? kIndex + kA : kWidth<uint64_t> + kIndex / 2 * 2 + kB)...));
}
template <int kA, int kB>
inline Vec<uint32_t> join_halves(Vec<uint32_t> a, Vec<uint32_t> b) {
  return join_halves<kA, kB>(a, b, std::make_index_sequence<kWidth<uint64_t>>());
}

// Stores the strips of a vector `kDistance` bytes apart.
template <int64_t kDistance>
inline void store_strips(Vec<int8_t> bytes, int8_t* to) {
  for (int strip = 0; strip < kStrips; ++strip) {
    memcpy(to + strip * kDistance, reinterpret_cast<const char*>(&bytes) + strip * kStripBytes, kStripBytes);
  }
}

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
    const float levels = rate * kLevels;  // NaN and infinity have no integer
    if (levels > 0)
      threshold = levels < kMostThreshold ? static_cast<int32_t>(__builtin_lrintf(levels)) : kMostThreshold;
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

  // For queries in the lanes: kept[key * kPanel + lane] becomes all ones where the pair is kept, else 0. Writes whole
  // blocks of 32 keys and 32 lanes.
  template <int64_t kPanel>
  void draw_for_lanes(const QueryRows& rows, KeyRange keys, int8_t* kept) const {
    if (are_in_order(rows)) {
      draw_blocks<true, kPanel>(rows, keys, kept);
    } else {
      draw_each_for_lanes<kPanel>(rows, keys, kept);
    }
  }

  // Likewise for keys in the lanes: kept[query row * kTile + key].
  void draw_for_rows(const QueryRows& rows, KeyRange keys, int8_t* kept) const {
    if (are_in_order(rows)) {
      draw_blocks<false, kTile>(rows, keys, kept);
    } else {
      draw_each_for_rows(rows, keys, kept);
    }
  }

 private:
  // Tiles and panels of one head begin at multiples of 32. Queries of several heads follow each other without a gap:
  // their groups begin anywhere.
  bool are_in_order(const QueryRows& rows) const {
    return !problem.dropout_rows && rows.head[0] == rows.head[rows.count - 1];
  }

  // kept[outer * kInner + inner]: the inner indices are those of the queries where these lie in the lanes, else those
  // of the keys; the outer ones are those of the others.
  template <bool kQueriesInside, int64_t kInner>
  void draw_blocks(const QueryRows& rows, KeyRange keys, int8_t* kept) const {
    static_assert(kInner % kBlock == 0 && kTile % kBlock == 0);
    using Wide = Vec<uint64_t>;
    const Key shared = key(rows.query[0], rows.head[0]);
    const PhiloxKeys philox_keys{Wide{} + shared.low, Wide{} + shared.high};
    const uint32_t row_group = philox_group(row(rows.query[0])), column_group = philox_group(column(keys.first));
    const uint32_t first_outer = kQueriesInside ? column_group : row_group,
                   first_inner = kQueriesInside ? row_group : column_group;
    const int64_t outer_count = kQueriesInside ? keys.count : rows.count,
                  inner_count = kQueriesInside ? rows.count : keys.count;
    // A strip of 32-bit lanes holds the calls of the four inner groups of a block with one outer group.
    Wide outer_offset, inner_offset[2];
    for (int i = 0; i < kWidth<uint64_t>; ++i) {
      outer_offset[i] = static_cast<uint64_t>(i / 2);
      for (int odd = 0; odd < 2; ++odd) inner_offset[odd][i] = static_cast<uint64_t>(i % 2 * 2 + odd);
    }
    for (int64_t outer = 0; outer < outer_count; outer += kBlock) {
      for (int64_t group = 0; group < kGroupsOfBlock; group += kStrips) {
        const uint32_t outer_group = first_outer + static_cast<uint32_t>(outer / kBlock * kGroupsOfBlock + group);
        for (int64_t inner = 0; inner < inner_count; inner += kBlock) {
          const uint32_t inner_group = first_inner + static_cast<uint32_t>(inner / kBlock * kGroupsOfBlock);
          PhiloxCalls calls[2];
          for (int odd = 0; odd < 2; ++odd) {
            const Wide of_outer = outer_offset + outer_group, of_inner = inner_offset[odd] + inner_group;
            calls[odd] =
                kQueriesInside ? philox(of_inner, of_outer, philox_keys) : philox(of_outer, of_inner, philox_keys);
          }
          decide<kQueriesInside, kInner>(merge_calls(calls[0], calls[1]), kept + (outer + 2 * group) * kInner + inner);
        }
      }
    }
  }

  // Writes the decisions about the pairs of calls: in each strip those of the four inner groups of a block with one
  // outer group, which is the next one in the next strip. `kept` is where the first pair belongs.
  template <bool kQueriesInside, int64_t kInner>
  void decide(const PhiloxWords& drawn, int8_t* kept) const {
    constexpr uint32_t kEvenBytes = 0x00ff00ff, kOwnBits = 0x7f7f7f7f;
    for (int parity = 0; parity < 2; ++parity) {
      // The bytes x(h, w) of the outer index of this parity, the inner ones in order. Of queries as inner ones the two
      // halves of a strip are those of h, and x[w] has both; of keys they are those of w, and x[h] has both.
      Vec<uint32_t> x[2];
      if constexpr (kQueriesInside) {
        for (int w = 0; w < 2; ++w) {
          const Vec<uint32_t> even = drawn.word[w], odd = drawn.word[2 + w];
          x[w] = even_then_odd(parity == 0 ? (even & kEvenBytes) | (odd << 8 & ~kEvenBytes)
                                           : (even >> 8 & kEvenBytes) | (odd & ~kEvenBytes));
        }
      } else {
        const Vec<uint32_t> left = even_then_odd(drawn.word[2 * parity]),
                            right = even_then_odd(drawn.word[2 * parity + 1]);
        x[0] = join_halves<0, 0>(left, right);
        x[1] = join_halves<1, 1>(left, right);
      }
      const Vec<uint32_t> both = x[0] ^ x[1];
      const Vec<uint32_t> sum = both ^ join_halves<1, 0>(both, both), multiple = multiply_by_generator(sum);
      // x(0, 1) ^ x(1, 1) and x(1, 0) ^ x(1, 1), or the other way round.
      const Vec<uint32_t> second = x[1] ^ join_halves<1, 0>(x[1], x[1]), second_halves = join_halves<1, 1>(both, both);
      const Vec<uint32_t> lower = kQueriesInside ? second ^ multiply_by_generator(second_halves)
                                                 : second_halves ^ multiply_by_generator(second);
      const Vec<int8_t> most_dropped = most_dropped_upper_bits(reinterpret_cast<Vec<uint8_t>>(lower));
      const Vec<uint32_t> of_outer = (kQueriesInside ? sum : multiple) & kOwnBits,
                          of_inner = (kQueriesInside ? multiple : sum) & kOwnBits;
      const auto store_decisions = [&](Vec<uint32_t> own, int8_t* to) {
        const auto is_kept = reinterpret_cast<Vec<int8_t>>(own) > most_dropped;
        store_strips<2 * kInner>(reinterpret_cast<Vec<int8_t>>(is_kept), to);
      };
      for (int eights = 0; eights < 2; ++eights) {
        for (int sixteens = 0; sixteens < 2; ++sixteens) {
          const Vec<uint32_t> own = (x[eights] & kOwnBits) ^ (sixteens == 0 ? Vec<uint32_t>{} : of_outer);
          int8_t* const to = kept + (16 * sixteens + 8 * eights + parity) * kInner;
          store_decisions(own, to);
          store_decisions(own ^ of_inner, to + 16);
        }
      }
    }
  }

  // The largest upper 7 bits with which a pair with these lower bits is dropped; -1: none.
  Vec<int8_t> most_dropped_upper_bits(Vec<uint8_t> lower) const {
    const auto is_below =
        reinterpret_cast<Vec<int8_t>>(lower < (Vec<uint8_t>{} + static_cast<uint8_t>(threshold & 0xff)));
    return static_cast<int8_t>((threshold >> 8) - 1) - is_below;
  }

  // What decides about the pairs of one query with the keys of a call, one such call in each lane. A byte of a word is
  // that of an h and an e, as in `left` and `right`, which hold the x(h, w) of w = 0 and 1.
  struct CallOfQuery {
    Vec<uint32_t> left, right;
    Vec<uint32_t> sum, of_query;  // what enters the own bytes for the key's sake, and for the query's
    Vec<uint32_t> lower;          // in the lower half
    Vec<uint32_t> row;
  };
  static Vec<int32_t> is_set(Vec<uint32_t> indices, uint32_t bit) {
    return reinterpret_cast<Vec<int32_t>>((indices & bit) != 0);
  }
  static CallOfQuery call_of_query(const PhiloxWords& drawn, Vec<uint32_t> row) {
    const auto exchange_halves = [](Vec<uint32_t> words) { return words << 16 | words >> 16; };
    const Vec<int32_t> is_odd = is_set(row, 1);
    const Vec<uint32_t> left = is_odd ? drawn.word[2] : drawn.word[0], right = is_odd ? drawn.word[3] : drawn.word[1];
    const Vec<uint32_t> both = left ^ right, multiple = multiply_by_generator(both);
    const Vec<uint32_t> of_query = is_set(row, 16) ? multiple ^ exchange_halves(multiple) : Vec<uint32_t>{};
    const Vec<uint32_t> lower = (right ^ exchange_halves(right) ^ multiple) >> 16;
    return {left, right, both ^ exchange_halves(both), of_query, lower, row};
  }

  // Writes the decisions about one pair in each lane.
  void decide_each(const CallOfQuery& call, Vec<uint32_t> column, int8_t* kept) const {
    Vec<uint32_t> own = (is_set(column, 8) ? call.right : call.left) ^ call.of_query;
    own ^= is_set(column, 16) ? call.sum : Vec<uint32_t>{};
    own = is_set(call.row, 8) ? own >> 16 : own;
    const Vec<uint32_t> bits =
        is_set(column, 1) ? (own & 0x7f00u) | (call.lower >> 8 & 0xffu) : (own << 8 & 0x7f00u) | (call.lower & 0xffu);
    const auto is_kept = reinterpret_cast<Vec<int32_t>>(reinterpret_cast<Vec<int32_t>>(bits) >= threshold);
    // Through 16 bits: at once the compiler goes through every lane.
    using HalfAsWide = VectorOf<int16_t, kVectorBytes / 2>::Type;
    using Narrow = VectorOf<int8_t, kVectorBytes / 4>;
    *reinterpret_cast<Narrow::Unaligned*>(kept) =
        __builtin_convertvector(__builtin_convertvector(is_kept, HalfAsWide), Narrow::Type);
  }

  // Sorts the indices below `count` into sets of those that are alike. Calls use(first, members) for each set: its
  // least index, and all of them as bits.
  template <typename Alike, typename Use>
  static void for_sets(int64_t count, const Alike& alike, const Use& use) {
    static_assert(kTile <= 64);
    for (uint64_t left = count == 0 ? 0 : ~uint64_t{0} >> (64 - count); left != 0;) {
      const int64_t first = __builtin_ctzll(left);
      uint64_t members = 0;
      for (uint64_t rest = left; rest != 0; rest &= rest - 1) {
        const int64_t i = __builtin_ctzll(rest);
        members |= static_cast<uint64_t>(alike(first, i)) << i;
      }
      left &= ~members;
      use(first, members);
    }
  }

  // One call in each lane for all keys of a group.
  template <int64_t kPanel>
  void draw_each_for_lanes(const QueryRows& rows, KeyRange keys, int8_t* kept) const {
    uint32_t row_of[kPanel] = {}, low[kPanel] = {}, high[kPanel] = {}, column_of[kTile];
    for (int64_t lane = 0; lane < rows.count; ++lane) {
      const Key lane_key = key(rows.query[lane], rows.head[lane]);
      row_of[lane] = row(rows.query[lane]);
      low[lane] = lane_key.low;
      high[lane] = lane_key.high;
    }
    for (int64_t i = 0; i < keys.count; ++i) column_of[i] = column(keys.first + i);
    clear(kept, kTile * kPanel);
    const auto alike = [&](int64_t i, int64_t j) { return philox_group(column_of[i]) == philox_group(column_of[j]); };
    for_sets(keys.count, alike, [&](int64_t first, uint64_t members) {
      const Vec<uint32_t> group = Vec<uint32_t>{} + philox_group(column_of[first]);
      for (int64_t lane = 0; lane < rows.count; lane += kWidth<uint32_t>) {
        const Vec<uint32_t> row_of_lanes = load(row_of + lane);
        const PhiloxWords drawn = philox(philox_group(row_of_lanes), group, load(low + lane), load(high + lane));
        const CallOfQuery call = call_of_query(drawn, row_of_lanes);
        for (uint64_t rest = members; rest != 0; rest &= rest - 1) {
          const int64_t i = __builtin_ctzll(rest);
          decide_each(call, Vec<uint32_t>{} + column_of[i], kept + i * kPanel + lane);
        }
      }
    });
  }

  // Likewise for all queries of a group.
  void draw_each_for_rows(const QueryRows& rows, KeyRange keys, int8_t* kept) const {
    uint32_t column_of[kTile] = {}, row_of[kTile];
    Key key_of[kTile];
    for (int64_t i = 0; i < keys.count; ++i) column_of[i] = column(keys.first + i);
    for (int64_t r = 0; r < rows.count; ++r) {
      row_of[r] = row(rows.query[r]);
      key_of[r] = key(rows.query[r], rows.head[r]);
    }
    const auto alike = [&](int64_t i, int64_t j) {
      return philox_group(row_of[i]) == philox_group(row_of[j]) && key_of[i].low == key_of[j].low &&
             key_of[i].high == key_of[j].high;
    };
    for_sets(rows.count, alike, [&](int64_t first, uint64_t members) {
      const Vec<uint32_t> group = Vec<uint32_t>{} + philox_group(row_of[first]);
      const Vec<uint32_t> low = Vec<uint32_t>{} + key_of[first].low, high = Vec<uint32_t>{} + key_of[first].high;
      for (int64_t i = 0; i < keys.count; i += kWidth<uint32_t>) {
        const Vec<uint32_t> column_of_lanes = load(column_of + i);
        const PhiloxWords drawn = philox(group, philox_group(column_of_lanes), low, high);
        for (uint64_t rest = members; rest != 0; rest &= rest - 1) {
          const int64_t r = __builtin_ctzll(rest);
          const CallOfQuery call = call_of_query(drawn, Vec<uint32_t>{} + row_of[r]);
          decide_each(call, column_of_lanes, kept + r * kTile + i);
        }
      }
    });
  }
};

// Decisions as wide as the elements of Acc. The compiler's own conversion goes through single bytes.
template <typename Acc>
inline Vec<Bits<Acc>> widen_decisions(const int8_t* kept) {
  constexpr bool kIsWide = sizeof(Acc) == 8;
#if defined(__AVX2__)
  __m128i bytes{};
  memcpy(&bytes, kept, kWidth<Acc>);
#endif
#if defined(__AVX512F__)
  if constexpr (kIsWide) {
    return reinterpret_cast<Vec<Bits<Acc>>>(_mm512_maskz_cvtepi8_epi64(static_cast<__mmask8>(kEveryLane), bytes));
  } else {
    return reinterpret_cast<Vec<Bits<Acc>>>(_mm512_maskz_cvtepi8_epi32(kEveryLane, bytes));
  }
#elif defined(__AVX2__)
  if constexpr (kIsWide) {
    return reinterpret_cast<Vec<Bits<Acc>>>(_mm256_cvtepi8_epi64(bytes));
  } else {
    return reinterpret_cast<Vec<Bits<Acc>>>(_mm256_cvtepi8_epi32(bytes));
  }
#else
  std::conditional_t<kIsWide, uint16_t, uint32_t> word;
  static_assert(sizeof(word) == kWidth<Acc>);
  memcpy(&word, kept, sizeof(word));
  const auto twice = [](auto lanes) {
    using Lane = std::remove_reference_t<decltype(lanes[0])>;
    return interleave_low<Lane>(lanes, lanes, std::make_index_sequence<kWidth<Lane>>());
  };
  const auto bytes = reinterpret_cast<Vec<uint8_t>>(Vec<uint32_t>{word});
  const auto words = twice(reinterpret_cast<Vec<uint32_t>>(twice(reinterpret_cast<Vec<uint16_t>>(twice(bytes)))));
  if constexpr (kIsWide) return reinterpret_cast<Vec<Bits<Acc>>>(words);
  return reinterpret_cast<Vec<Bits<Acc>>>(twice(reinterpret_cast<Vec<uint16_t>>(twice(bytes))));
#endif
}

// Lane by lane `value` where the bytes from `kept` on say that the pair is kept, else 0.
template <typename Acc>
inline Vec<Acc> where_kept(const int8_t* kept, Vec<Acc> value) {
  return from_bits<Acc>(as_bits<Acc>(value) & widen_decisions<Acc>(kept));
}

}  // namespace
}  // namespace jattn::cpu
