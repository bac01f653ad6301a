// What happens to a score of the forward between the first product and the softmax: the score stage (softcap, bias,
// slopes; then the user's program, score_program.cuh), then the masks. And which probabilities dropout removes behind
// it.
#pragma once

#include "attn/dropout.cuh"
#include "sm90/softmax.cuh"
#include "sm90/wgmma.cuh"
#include "sm90/work.cuh"

namespace jattn::sm90 {

// Where the fragment of a thread lies: the pair of value 4 i + 2 r + c is (row + 8 r, column + 8 i + c).
struct FragmentPlace {
  int row;     // of the tile of queries
  int column;  // of the tile of keys
};

// What the stages below need to know of the tile at hand.
template <Config C>
struct TileContext {
  const ForwardParams& params;
  const ForwardControl<C>& control;
  const ItemRecord& item;
  TileHeader header;
  int stage, slot;      // of the ring, and of the item
  FragmentPlace place;  // of this thread
  int first_row;        // of the warp, in the sequence

  __device__ __forceinline__ int query(int r) const {
    static_assert(!C.packed_heads);  // rows are no queries
    return item.q_begin + place.row + 8 * r;
  }
  __device__ __forceinline__ int first_key() const { return header.kv_tile * C.tile_kv + place.column; }

  // Of this thread's first columns, in natural units; C.tile_kv further times log2(e).
  __device__ __forceinline__ const float* row_bias() const {
    return control.row_bias[header.flags >> kRowPlaceShift] + 2 * place.column;
  }
};

// The place where anything acts on scores. Raw scores stay as they are, and the softmax multiplies by the scale in its
// exponent. Else raw products become finished scores, in natural units if terms are added to them, or if they pass
// through a program: a score may then be as large as any float, and the multiplication by log2(e) is part of the
// exponent.
template <Config C>
struct ScoreStage {
  static constexpr bool kAddsTerms = C.bias || C.alibi || C.program;
  static constexpr ScoreUnits kUnits = kAddsTerms                   ? ScoreUnits::kNatural
                                       : C.softcap || C.scale_first ? ScoreUnits::kLog2
                                                                    : ScoreUnits::kRaw;

  // Whether the term of a tile without masks can be the addend of the exponent, once rows are settled at zero: it
  // depends on the key alone. (Slopes as well, but they lose by it: docs/kernels/log.md, "The row of the bias as an
  // addend".)
  static constexpr bool kMergesRowBias = C.row_bias && !C.softcap && !C.alibi && !C.program;

  // all_visible: no test hides a pair of the tile, so that a NaN may spread over its row.
  template <int kCount>
  __device__ __forceinline__ static void apply(float (&s)[kCount], const ForwardParams& params, bool all_visible) {
    if constexpr (C.softcap) {
      const float cap = kAddsTerms ? params.problem.softcap_log2 * kLn2 : params.problem.softcap_log2;
      if (all_visible && !C.large_cap && !C.program) {  // which may hide any pair
        cap_by_fours(s, params.problem.softcap_in, cap);
        return;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] = cap * tanh_accurate<C.large_cap>(s[i] * params.problem.softcap_in);
    } else if constexpr (C.scale_first && !kAddsTerms) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] *= params.problem.scale_log2;
    }
  }

  // cap * tanh(s * factor) = cap - 2 cap / (1 + exp(2 s factor)), with one reciprocal for four scores of a row: three
  // operations of the special unit a score would take half as long again as the products (head_dim 128). Exponents are
  // cut off where tanh is 1 in float32, so that the product of four terms stays finite.
  template <int kCount>
  __device__ __forceinline__ static void cap_by_fours(float (&s)[kCount], float factor, float cap) {
    const float to_exponent = factor * (2.0f * kLog2E);
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* const four[] = {&s[8 * i + 2 * r], &s[8 * i + 2 * r + 1], &s[8 * i + 2 * r + 4], &s[8 * i + 2 * r + 5]};
        float x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float exponent = *four[n] * to_exponent;
          x[n] = exp2_fast(exponent > 30.0f ? 30.0f : exponent) + 1.0f;  // a comparison keeps NaN, a minimum would not
        }
        const float low = x[0] * x[1], high = x[2] * x[3];
        const float inverse = reciprocal_fast(low * high) * (-2.0f * cap);
        const float inverse_low = inverse * high, inverse_high = inverse * low;
        *four[0] = fmaf(inverse_low, x[1], cap);
        *four[1] = fmaf(inverse_low, x[0], cap);
        *four[2] = fmaf(inverse_high, x[3], cap);
        *four[3] = fmaf(inverse_high, x[2], cap);
      }
    }
  }

  // Adds a term to a score; the first one scales the product, unless the softcap has.
  template <bool kFirst>
  __device__ __forceinline__ static void add(float& s, float term, float scale) {
    s = kFirst && !C.softcap ? fmaf(s, scale, term) : s + term;
  }
};

// Any bias, read where it lies.
template <Config C>
__device__ __forceinline__ void add_bias_directly(float (&s)[C.tile_kv / 2], const TileContext<C>& context) {
  using Stage = ScoreStage<C>;
  using Traits = ElementTraits<C.bias_element>;
  using Storage = typename Traits::Storage;
  const ProblemParams& problem = context.params.problem;
  const BroadcastArray& bias = problem.bias;
  const int first_key = context.first_key();
  const int columns = problem.kv_len - first_key;  // that exist, from this thread's first on
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int t = context.query(r);
    const Storage* row = static_cast<const Storage*>(bias.data) + context.item.batch * bias.stride_batch +
                         context.item.head * bias.stride_head + t * bias.stride_query + first_key * bias.stride_key;
    const int here = t < problem.q_len ? columns : 0;
    if (bias.pairs) {
#pragma unroll
      for (int i = 0; i < C.tile_kv / 8; ++i) {
        float low = 0.0f, high = 0.0f;
        if (8 * i < here) {
          if constexpr (C.bias_element == Element::kF32) {
            const float2 pair = __ldg(reinterpret_cast<const float2*>(row + 8 * i));
            low = pair.x;
            high = pair.y;
          } else {
            const unsigned pair = __ldg(reinterpret_cast<const unsigned*>(row + 8 * i));
            low = Traits::low(pair);
            high = Traits::high(pair);
          }
        }
        Stage::template add<true>(s[4 * i + 2 * r], low, problem.scale);
        Stage::template add<true>(s[4 * i + 2 * r + 1], high, problem.scale);
      }
    } else {
#pragma unroll
      for (int i = 0; i < C.tile_kv / 8; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float value = 8 * i + c < here ? Traits::to_float(__ldg(row + (8 * i + c) * bias.stride_key)) : 0.0f;
          Stage::template add<true>(s[4 * i + 2 * r + c], value, problem.scale);
        }
      }
    }
  }
}

// Adds what depends on the distance of key and query alone; term(n) is that of the upper row, n columns from this
// thread's first. The rows of a fragment are eight apart, and so are its pairs of columns: the lower row has the terms
// of the pair before, so that two scores share one.
template <Config C, class Term>
__device__ __forceinline__ void add_by_distance(float (&s)[C.tile_kv / 2], float scale, Term term) {
  using Stage = ScoreStage<C>;
  float before[2] = {term(-8), term(-7)};
#pragma unroll
  for (int i = 0; i < C.tile_kv / 8; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float here = term(8 * i + c);
      Stage::template add<!C.bias>(s[4 * i + c], here, scale);
      Stage::template add<!C.bias>(s[4 * i + 2 + c], before[c], scale);
      before[c] = here;
    }
  }
}

// s - slope * |distance|.
template <Config C>
__device__ __forceinline__ void add_slopes(float (&s)[C.tile_kv / 2], const TileContext<C>& context) {
  using Stage = ScoreStage<C>;
  const ProblemParams& problem = context.params.problem;
  const float fall = -context.control.numbers[context.slot].slope;
  if constexpr (C.positions) {
    const int* q_positions = context.control.q_positions[context.slot] + context.place.row;
    const int position[2] = {q_positions[0], q_positions[8]};
    const int* kv_positions = context.control.kv_positions[context.stage] + context.place.column;
#pragma unroll
    for (int i = 0; i < C.tile_kv / 8; ++i) {
      const int2 keys = *reinterpret_cast<const int2*>(kv_positions + 8 * i);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        Stage::template add<!C.bias>(s[4 * i + 2 * r], fabsf(float(keys.x - position[r])) * fall, problem.scale);
        Stage::template add<!C.bias>(s[4 * i + 2 * r + 1], fabsf(float(keys.y - position[r])) * fall, problem.scale);
      }
    }
  } else {
    const int offset = context.item.upper_offset - 1 - problem.band_right;
    // Distances beyond 2^24 are rounded, as they would be on the way to a float.
    const float distance = float(context.first_key() - context.query(0) - offset);
    const int first_key = context.header.kv_tile * C.tile_kv, first_query = context.first_row + offset;
    const bool below = first_key + C.tile_kv <= first_query + 1;  // no distance of the warp is positive
    if (below || first_key >= first_query + 15) {
      const float rise = below ? -fall : fall;
      const float base = distance * rise;
      add_by_distance<C>(s, problem.scale, [&](int columns) { return fmaf(float(columns), rise, base); });
    } else {
      add_by_distance<C>(s, problem.scale, [&](int columns) { return fabsf(distance + float(columns)) * fall; });
    }
  }
}

// A number of each column to add(score, number, row). numbers: of this thread's first columns, in the order of
// place_in_row().
template <int kCount, class Add>
__device__ __forceinline__ void for_columns(float (&s)[kCount], const float* numbers, Add add) {
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) {
    const float4 four = *reinterpret_cast<const float4*>(numbers + 16 * i);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      add(s[8 * i + 2 * r], four.x, r);
      add(s[8 * i + 2 * r + 1], four.y, r);
      add(s[8 * i + 4 + 2 * r], four.z, r);
      add(s[8 * i + 4 + 2 * r + 1], four.w, r);
    }
  }
}

// The row of the bias as addends of the exponents of rows settled at zero: from raw products to probabilities.
template <Config C, class Softmax>
__device__ __forceinline__ void merge_row_bias(float (&s)[C.tile_kv / 2], const TileContext<C>& context,
                                               Softmax& softmax) {
  softmax.sum_tile([&](float (&sum)[2]) {
    for_columns(s, context.row_bias() + C.tile_kv,
                [&](float& score, float term, int r) { softmax.merge(score, term, sum[r]); });
  });
}

// Bias and slopes. fragment_address(step): where this lane's part of the 16 x 16 block `step` of a staged bias lies, of
// the warp's rows (fragment_address() of warpgroup.cuh).
template <Config C, class FragmentAddress>
__device__ __forceinline__ void add_terms(float (&s)[C.tile_kv / 2], const TileContext<C>& context,
                                          FragmentAddress fragment_address) {
  using Stage = ScoreStage<C>;
  const ProblemParams& problem = context.params.problem;
  if constexpr (C.bias && C.staged_bias) {
    using Traits = ElementTraits<C.bias_element>;
#pragma unroll
    for (int step = 0; step < C.tile_kv / 16; ++step) {
      unsigned words[4];  // rows 8 (i % 2), columns 8 (i / 2) of the block
      ptx::load_matrix_x4(words, fragment_address(step));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Stage::template add<true>(s[8 * step + 2 * i], Traits::low(words[i]), problem.scale);
        Stage::template add<true>(s[8 * step + 2 * i + 1], Traits::high(words[i]), problem.scale);
      }
    }
  } else if constexpr (C.bias && C.row_bias) {
    for_columns(s, context.row_bias(),
                [&](float& score, float term, int) { Stage::template add<true>(score, term, problem.scale); });
  } else if constexpr (C.bias) {
    add_bias_directly<C>(s, context);
  }
  if constexpr (C.alibi) add_slopes<C>(s, context);
  if constexpr (!C.bias && !C.alibi && !C.softcap) {  // a program alone
#pragma unroll
    for (int i = 0; i < C.tile_kv / 2; ++i) s[i] *= problem.scale;
  }
}

// Dropout by a key for each row: rows of a fragment do not belong together, and every pair is a call of its own.
template <Config C>
__device__ __forceinline__ void drop_pairs_by_rows(float (&p)[C.tile_kv / 2], const TileContext<C>& context) {
  static_assert(C.segments && C.positions);
  const unsigned threshold = context.control.numbers[context.slot].dropout.threshold;
  const int* kv_positions = context.control.kv_positions[context.stage] + context.place.column;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = context.place.row + 8 * r;
    const int position = context.control.q_positions[context.slot][row];
    const PhiloxKey key =
        dropout_row_key(context.params.problem, context.control.q_ids[context.slot][row], context.item.head);
    const PhiloxPart row_part = philox_row_part(key, dropout_group(position));
    unsigned dropped = 0;  // bit 2 i + c
#pragma unroll 1
    for (int bit = 0; bit < C.tile_kv / 4; ++bit) {
      const int kv_position = kv_positions[bit / 2 * 8 + bit % 2];
      dropped |= unsigned(pair_dropped(key, row_part, position, kv_position, threshold)) << bit;
    }
#pragma unroll
    for (int bit = 0; bit < C.tile_kv / 4; ++bit) {
      if (dropped & 1u << bit) p[bit / 2 * 4 + 2 * r + bit % 2] = 0.0f;
    }
  }
}

// Which pairs of a tile dropout removes: the words of the calls of this lane, made or read (drops.cuh) before the
// scores are waited for, or the bits of its pairs.
template <Config C>
struct TileDrops {
  static constexpr bool kAhead = C.dropout && !C.dropout_rows;
  static constexpr bool kBits = C.drops_beside && drops_are_bits(C);
  static constexpr int kCalls = C.tile_kv / 32;

  unsigned words[!kAhead ? 1 : kBits ? drop_bit_words(C) : 2 * kCalls];

  // What the drop warps have made.
  __device__ __forceinline__ void read(const uint32_t* made) {
    const int thread = threadIdx.x - kWarpgroupThreads, lane = thread % 32;
    if constexpr (kBits) {
#pragma unroll
      for (int word = 0; word < drop_bit_words(C); ++word) {
        words[word] = made[word * num_consumers(C) * kWarpgroupThreads + thread];
      }
    } else {
      const uint32_t* of_lane =
          made + (thread / 64 * 4 + lane / 8) * drop_row_words(C) + lane % 4 * 4 + (has_odd_rows(lane) ? 2 : 0);
#pragma unroll
      for (int call = 0; call < kCalls; ++call) {
        const uint2 both = *reinterpret_cast<const uint2*>(of_lane + 16 * call);
        words[2 * call] = both.x;
        words[2 * call + 1] = both.y;
      }
    }
    pin_registers(words);
  }

  __device__ __forceinline__ void make(const TileContext<C>& context) {
    if constexpr (kAhead) {
      static_assert(C.tile_kv % 32 == 0);
      Dropout dropout = context.control.numbers[context.slot].dropout;
      dropout.key = {__shfl_sync(~0u, dropout.key.low, 0), __shfl_sync(~0u, dropout.key.high, 0)};
      const QueryRowDrops drops(dropout, context.first_row);
      const int column0 = context.header.kv_tile * C.tile_kv;
#pragma unroll
      for (int call = 0; call + 1 < kCalls; call += 2) {
        const auto two = drops.two(column0 + 32 * call);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[2 * call + i] = two.words[i / 2].word[i % 2];
      }
      if constexpr (kCalls % 2 == 1) {
        const PairWords last = drops.words(column0 + 32 * (kCalls - 1));
        words[2 * kCalls - 2] = last.word[0];
        words[2 * kCalls - 1] = last.word[1];
      }
      finish_here(words);
    }
  }

  // Probabilities of dropped pairs become 0. Their row sum is known before; the factor of the kept ones comes at the
  // end of the row.
  __device__ __forceinline__ void apply(unsigned (&p)[C.tile_kv / 4], const TileContext<C>& context) const {
    if constexpr (kBits) {
#pragma unroll
      for (int i = 0; i < C.tile_kv / 4; ++i) p[i] &= kept_halves(words[i / 16], i / 8 % 2, i / 2 % 4, i % 2);
    } else if constexpr (kAhead) {
      const unsigned threshold = __shfl_sync(~0u, context.control.numbers[context.slot].dropout.threshold, 0);
#pragma unroll
      for (int call = 0; call < kCalls; ++call) {
        const QueryRowBits bits({{words[2 * call], words[2 * call + 1]}}, has_far_rows(context.first_row),
                                drop_limits(threshold));
#pragma unroll
        for (int i = 0; i < 8; ++i) p[8 * call + i] &= bits.kept_halves(i / 2, i % 2);
      }
    }
  }
};

// Sets scores of the tile, or of its first 2 kCount keys, to -inf where the header says that pairs may be invisible.
template <Config C, int kCount>
__device__ __forceinline__ void apply_masks(float (&s)[kCount], const TileHeader& header, int stage, int slot,
                                            const ForwardControl<C>& control, const ForwardParams& params,
                                            FragmentPlace place) {
  const ItemRecord& item = control.items[slot];
  const int row = item.q_begin + place.row;
  const int first_column = header.kv_tile * C.tile_kv + place.column;
  if (header.flags & kMaskUpper) {
    int upper[2];  // columns from here on, counted from this thread's first, are invisible
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int t = query_of_row<C>(params, row + 8 * r);
      const int end = C.positions ? item.kv_length : min(item.kv_length, t + item.upper_offset);
      upper[r] = end - first_column;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i / 4 * 8 + i % 2 >= upper[i / 2 % 2]) s[i] = -infinity();
    }
  }
  if constexpr (has_index_band(C)) {
    if (header.flags & kMaskLower) {
      int lower[2];  // columns before this are invisible
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        lower[r] = query_of_row<C>(params, row + 8 * r) + item.lower_offset - first_column;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i / 4 * 8 + i % 2 < lower[i / 2 % 2]) s[i] = -infinity();
      }
    }
  }
  if constexpr (C.positions && C.band) {
    if (header.flags & kMaskPositions) {
      const ProblemParams& problem = params.problem;
      int lowest[2];  // position that is visible
#pragma unroll
      for (int r = 0; r < 2; ++r) lowest[r] = control.q_positions[slot][place.row + 8 * r] - problem.band_left;
      const int64_t width = int64_t(problem.band_left) + problem.band_right;
      const bool shows = width >= 0;
      const int* kv_positions = control.kv_positions[stage] + place.column;
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        const int2 keys = *reinterpret_cast<const int2*>(kv_positions + 8 * i);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (!shows || unsigned(keys.x) - unsigned(lowest[r]) > unsigned(width)) s[4 * i + 2 * r] = -infinity();
          if (!shows || unsigned(keys.y) - unsigned(lowest[r]) > unsigned(width)) s[4 * i + 2 * r + 1] = -infinity();
        }
      }
    }
  }
  if constexpr (C.mask) {
    if (header.flags & kMaskDense) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = params.mask.words_row == 0 ? 0 : query_of_row<C>(params, place.row + 8 * r);
        const unsigned visible = control.mask_words[stage][row][place.column / 2];
#pragma unroll
        for (int bit = 0; bit < kCount / 2; ++bit) {
          if (!(visible & 1u << bit)) s[bit / 2 * 4 + 2 * r + bit % 2] = -infinity();
        }
      }
    }
  }
  if constexpr (C.segments) {
    if (header.flags & kMaskSegments) {
      const int q_id[2] = {control.q_ids[slot][place.row], control.q_ids[slot][place.row + 8]};
      const int* kv_ids = control.kv_ids[stage] + place.column;
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        const int2 ids = *reinterpret_cast<const int2*>(kv_ids + 8 * i);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (ids.x != q_id[r]) s[4 * i + 2 * r] = -infinity();
          if (ids.y != q_id[r]) s[4 * i + 2 * r + 1] = -infinity();
        }
      }
    }
  }
}

}  // namespace jattn::sm90
