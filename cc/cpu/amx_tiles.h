// The matrix unit (AMX): products of bfloat16 tiles with float32 sums, and the layouts that they read.
//
// One instruction computes C[16][16] += A[16][32] B[32][16]. A is read row by row. B is read in pairs: element
// (2i, n) and (2i + 1, n) lie side by side, so that 16 rows of 16 pairs make a tile. (Intel SDM volume 1, chapter 18.)
#pragma once

#include "cpu/convert.h"
#include "cpu/plan.h"
#include "cpu/touch.h"

namespace jattn::cpu {
namespace {

constexpr int64_t kAmxRows = 16;  // of a tile register; also its columns of 4 bytes
constexpr int64_t kAmxRowBytes = 64;
constexpr int64_t kAmxBlock = 2 * kAmxRows;  // rows and columns of the result that one register block covers
constexpr int64_t kAmxInner = 32;            // bfloat16 elements in a row of A

// All eight tile registers full size. They belong to the thread, which other code uses as well: every task loads its
// own configuration and gives the unit back at its end.
class AmxSession {
 public:
  AmxSession() {
    struct alignas(64) Configuration {
      uint8_t palette = 1, start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } configuration;
    for (int i = 0; i < 8; ++i) {
      configuration.row_bytes[i] = kAmxRowBytes;
      configuration.rows[i] = kAmxRows;
    }
    // Not _tile_loadconfig: in GCC 12 it does not name the whole struct as an input, and the stores above may go.
    asm volatile("ldtilecfg %0" ::"m"(configuration) : "memory");
  }
  ~AmxSession() { _tile_release(); }
  AmxSession(const AmxSession&) = delete;
  AmxSession& operator=(const AmxSession&) = delete;
};

struct AmxOperand {
  const BFloat16* data;
  int64_t stride;  // elements, between tile rows

  const BFloat16* tile(int64_t row_tile, int64_t column_tile) const {
    return data + row_tile * kAmxRows * stride + column_tile * (kAmxRowBytes / 2);
  }
};

struct AmxResult {
  float* data;
  int64_t stride;  // in elements

  float* tile(int64_t row_tile, int64_t column_tile) const {
    return data + (row_tile * stride + column_tile) * kAmxRows;
  }
};

// A stripe: 16 rows and 32 columns of a result, in a pair of tile registers. Two pairs take turns, so that a pair is
// stored while the other is summed: a store that waits for a product holds up all tile instructions after it.
constexpr int64_t kStripeRows = kAmxRows;

// GCC's tile loads do not say that they read memory: everything stored so far must be there before them.
inline void stored_for_tiles() { asm volatile("" ::: "memory"); }

// One step over the inner dimension of a stripe: a pair of sums += one left tile * two right tiles.
template <bool kSecondPair>
inline __attribute__((always_inline)) void multiply_stripe(const BFloat16* left, int64_t left_stride_bytes,
                                                           const BFloat16* right, int64_t right_stride_bytes) {
  touch_rows(left, kAmxRows, left_stride_bytes, kAmxRowBytes);
  touch_rows(right, kAmxRows, right_stride_bytes, 2 * kAmxRowBytes);
  _tile_loadd(4, left, left_stride_bytes);
  _tile_loadd(5, right, right_stride_bytes);
  if constexpr (kSecondPair) {
    _tile_dpbf16ps(2, 4, 5);
  } else {
    _tile_dpbf16ps(0, 4, 5);
  }
  _tile_loadd(6, right + kAmxInner, right_stride_bytes);
  if constexpr (kSecondPair) {
    _tile_dpbf16ps(3, 4, 6);
  } else {
    _tile_dpbf16ps(1, 4, 6);
  }
}

template <bool kSecondPair>
inline __attribute__((always_inline)) void clear_stripe() {
  if constexpr (kSecondPair) {
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
}

template <bool kSecondPair>
inline __attribute__((always_inline)) void load_stripe(const float* from, int64_t stride_bytes) {
  touch_rows(from, kAmxRows, stride_bytes, 2 * kAmxRowBytes);
  if constexpr (kSecondPair) {
    _tile_loadd(2, from, stride_bytes);
    _tile_loadd(3, from + kAmxRows, stride_bytes);
  } else {
    _tile_loadd(0, from, stride_bytes);
    _tile_loadd(1, from + kAmxRows, stride_bytes);
  }
}

template <bool kSecondPair>
inline __attribute__((always_inline)) void store_stripe(float* to, int64_t stride_bytes) {
  touch_rows(to, kAmxRows, stride_bytes, 2 * kAmxRowBytes);
  if constexpr (kSecondPair) {
    _tile_stored(2, to, stride_bytes);
    _tile_stored(3, to + kAmxRows, stride_bytes);
  } else {
    _tile_stored(0, to, stride_bytes);
    _tile_stored(1, to + kAmxRows, stride_bytes);
  }
}

// One term of a sum of products. Operands hold zeros from `inner` on to the next multiple of kAmxInner.
struct AmxTerm {
  int64_t inner;
  AmxOperand left, right;
};

// result = sum of left * right over the terms, or result += that, in stripes. rows and columns are rounded up to
// kAmxBlock.
template <bool kAccumulate>
inline void amx_multiply(int64_t rows, int64_t columns, const AmxTerm* terms, int64_t num_terms, AmxResult result) {
  stored_for_tiles();
  const int64_t result_stride_bytes = result.stride * static_cast<int64_t>(sizeof(float));
  float* before = nullptr;
  const auto add = [&](int64_t m, int64_t n, auto second_pair) {
    float* const to = result.tile(m, n);
    if constexpr (kAccumulate) {
      load_stripe<second_pair()>(to, result_stride_bytes);
    } else {
      clear_stripe<second_pair()>();
    }
    for (int64_t term = 0; term < num_terms; ++term) {
      const auto& [inner, left, right] = terms[term];
      const BFloat16 *left_tile = left.tile(m, 0), *right_tile = right.tile(0, n);
      for (int64_t k = 0; k < inner; k += kAmxInner) {
        multiply_stripe<second_pair()>(left_tile, left.stride * 2, right_tile, right.stride * 2);
        left_tile += kAmxInner;
        right_tile += kAmxRows * right.stride;
        if (term == 0 && k == (inner > kAmxInner ? kAmxInner : 0) && before != nullptr) {
          store_stripe<!second_pair()>(before, result_stride_bytes);
        }
      }
    }
    before = to;
  };
  for (int64_t n = 0; n * kAmxRows < columns; n += kAmxBlock / kAmxRows) {
    for (int64_t m = 0; m * kAmxRows < rows; m += kAmxBlock / kAmxRows) {
      add(m, n, std::false_type());
      add(m + 1, n, std::true_type());
    }
  }
  store_stripe<true>(before, result_stride_bytes);
}

template <bool kAccumulate>
inline void amx_multiply(int64_t rows, int64_t columns, int64_t inner, AmxOperand left, AmxOperand right,
                         AmxResult result) {
  const AmxTerm term{inner, left, right};
  amx_multiply<kAccumulate>(rows, columns, &term, 1, result);
}

inline Vec<uint32_t> as_words(Vec<float> floats) { return reinterpret_cast<Vec<uint32_t>>(floats); }

// Copies row(i) for i < count into a tile of kTile rows of `row_len` elements; everything else in it becomes 0. Returns a
// bit for each row that is not finite.
template <typename Row>
inline uint64_t copy_rows(int64_t count, const Row& row, int64_t row_size, BFloat16* to, int64_t row_len) {
  constexpr int64_t kStep = 32;
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  uint64_t not_finite = 0;
  for (int64_t i = 0; i < count; ++i) {
    __mmask32 bad = 0;
    for (int64_t d = 0; d < row_len; d += kStep) {
      const int64_t rest = row_size - d;
      const __mmask32 present = rest >= kStep ? ~__mmask32{0} : rest <= 0 ? 0 : (__mmask32{1} << rest) - 1;
      const BFloat16* const from = row(i) + d;
      touch(from, 2 * (rest < kStep ? rest : kStep));
      const __m512i value = _mm512_maskz_loadu_epi16(present, from);
      bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(value, exponent), exponent);
      _mm512_storeu_si512(to + i * row_len + d, value);
    }
    not_finite |= static_cast<uint64_t>(bad != 0) << i;
  }
  clear(to + count * row_len, (kTile - count) * row_len);
  return not_finite;
}

// Moves 32-bit words; the bits are only carried, never interpreted.
inline void transpose_words(const void* from, int64_t from_stride_bytes, int64_t rows, int64_t columns, void* to,
                            int64_t to_stride_bytes) {
  constexpr int64_t kWordBytes = 4;
  transpose(static_cast<const float*>(from), from_stride_bytes / kWordBytes, rows, columns, static_cast<float*>(to),
            to_stride_bytes / kWordBytes);
}

// The functions below work on tiles of kTile rows of `row_len`.

// The transpose of the first `count` rows as pairs: to[d / 2][row][d % 2]. The right operand of a product over d.
inline void transpose_to_pairs(const BFloat16* rows, int64_t count, int64_t row_len, BFloat16* to) {
  transpose_words(rows, row_len * 2, count, row_len / 2, to, count * 4);
}

// Pairs of consecutive rows: to[row / 2][d][row % 2]. The right operand of a product over rows.
inline void interleave_rows(const BFloat16* rows, int64_t row_len, BFloat16* to) {
  for (int64_t row = 0; row < kTile; row += 2) {
    for (int64_t d = 0; d < row_len; d += kWidth<float>) {
      const Vec<uint32_t> even = load_16bit(rows + row * row_len + d);
      const Vec<uint32_t> odd = load_16bit(rows + (row + 1) * row_len + d);
      store(reinterpret_cast<uint32_t*>(to + row * row_len + 2 * d), even | odd << 16);
    }
  }
}

// to[d][row]. The left operand of a product over rows. `pairs` is room for as many elements as `rows`.
inline void transpose_rows(const BFloat16* rows, int64_t row_len, BFloat16* pairs, BFloat16* to) {
  interleave_rows(rows, row_len, pairs);
  transpose_words(pairs, row_len * 4, kTile / 2, row_len, to, kTile * 2);
}

// Copies rows of kTile elements with the columns in `excluded` set to 0.
inline void copy_without_columns(const BFloat16* from, int64_t rows, uint64_t excluded, BFloat16* to) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t at = row * kTile + half * 32;
      const auto kept = static_cast<__mmask32>(~excluded >> (half * 32));
      touch(from + at, kAmxRowBytes);
      _mm512_storeu_si512(to + at, _mm512_maskz_loadu_epi16(kept, from + at));
    }
  }
}

// Two float vectors rounded (half up) to bfloat16, lane by lane side by side.
inline Vec<uint32_t> round_to_pairs(Vec<float> even, Vec<float> odd) {
  constexpr uint32_t kHalf = 0x8000;
  return (as_words(even) + kHalf) >> 16 | ((as_words(odd) + kHalf) & 0xffff0000u);
}

// A float tile [kTile][kTile] as pairs of consecutive rows; rows from `rows` on become 0.
inline void round_tile_to_pairs(const float* tile, int64_t rows, BFloat16* to) {
  for (int64_t row = 0; row < kTile; row += 2) {
    for (int64_t column = 0; column < kTile; column += kWidth<float>) {
      const Vec<float> even = row < rows ? load(tile + row * kTile + column) : Vec<float>{};
      const Vec<float> odd = row + 1 < rows ? load(tile + (row + 1) * kTile + column) : Vec<float>{};
      store(reinterpret_cast<uint32_t*>(to + row * kTile + 2 * column), round_to_pairs(even, odd));
    }
  }
}

// In the order of halves the columns (or rows) i and i + 16 of every 32 lie side by side: that is how two vectors of
// floats, rounded, make one of 16-bit elements. A product over them takes any order that its two operands share.

// A float tile [kTile][kTile] with columns in the order of halves; rows from `rows` and columns from `columns` on become
// 0.
inline void round_tile_to_halves(const float* tile, int64_t rows, int64_t columns, BFloat16* to) {
  for (int64_t row = 0; row < kTile; ++row) {
    for (int64_t column = 0; column < kTile; column += kAmxInner) {
      const auto half = [&](int64_t first) {
        const int64_t present = row < rows ? columns - first : 0;
        const __mmask16 mask = present >= 16 ? 0xffff : present <= 0 ? 0 : (1 << present) - 1;
        touch(tile + row * kTile + first, 4 * (present < 16 ? present : 16));
        return reinterpret_cast<Vec<float>>(_mm512_maskz_loadu_ps(mask, tile + row * kTile + first));
      };
      store(reinterpret_cast<uint32_t*>(to + row * kTile + column), round_to_pairs(half(column), half(column + 16)));
    }
  }
}

// The right operand of a product over rows in the order of halves: to[row / 2][d][row % 2].
inline void interleave_halves(const BFloat16* rows, int64_t row_len, BFloat16* to) {
  for (int64_t first = 0; first < kTile; first += kAmxInner) {
    for (int64_t i = 0; i < kAmxInner / 2; ++i) {
      for (int64_t d = 0; d < row_len; d += kWidth<float>) {
        const Vec<uint32_t> even = load_16bit(rows + (first + i) * row_len + d);
        const Vec<uint32_t> odd = load_16bit(rows + (first + i + kAmxInner / 2) * row_len + d);
        store(reinterpret_cast<uint32_t*>(to + (first + 2 * i) * row_len + 2 * d), even | odd << 16);
      }
    }
  }
}

}  // namespace
}  // namespace jattn::cpu
