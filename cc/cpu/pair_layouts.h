// Layouts of bfloat16 tiles for products that take elements in pairs: those of the matrix unit (AMX) and vdpbf16ps.
//
// Two elements that follow each other along the inner dimension lie side by side. That is so in the rows of a left
// operand; the rows of a right operand are interleaved, two and two: element (2i, n) beside (2i + 1, n).
#pragma once

#include "cpu/convert.h"
#include "cpu/plan.h"
#include "cpu/touch.h"

namespace jattn::cpu {
namespace {

inline Vec<uint32_t> as_words(Vec<float> floats) { return reinterpret_cast<Vec<uint32_t>>(floats); }

// Those of 32 elements of 16 bits that are among the first `count`.
inline __mmask32 first_elements(int64_t count) {
  return count >= 32 ? ~__mmask32{0} : count <= 0 ? 0 : (__mmask32{1} << count) - 1;
}

// The next 32 elements of a row that has `rest` left; 0 beyond them. Marks in `bad` those that are not finite.
inline __m512i load_elements(const BFloat16* from, int64_t rest, __mmask32& bad) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  touch(from, 2 * (rest < 32 ? rest : 32));
  const __m512i value = _mm512_maskz_loadu_epi16(first_elements(rest), from);
  bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(value, exponent), exponent);
  return value;
}

// Copies row(i) for i < count into rows of `row_len` elements, with zeros at their end. Returns a bit for each row that
// is not finite.
template <typename Row>
inline uint64_t copy_rows(int64_t count, const Row& row, int64_t row_size, BFloat16* to, int64_t row_len) {
  uint64_t not_finite = 0;
  for (int64_t i = 0; i < count; ++i) {
    const BFloat16* const from = row(i);
    __mmask32 bad = 0;
    for (int64_t d = 0; d < row_len; d += 32) {
      _mm512_storeu_si512(to + i * row_len + d, load_elements(from + d, row_size - d, bad));
    }
    not_finite |= static_cast<uint64_t>(bad != 0) << i;
  }
  return not_finite;
}

// The same into a tile of kTile rows; everything else in it becomes 0.
template <typename Row>
inline uint64_t copy_tile(int64_t count, const Row& row, int64_t row_size, BFloat16* to, int64_t row_len) {
  clear(to + count * row_len, (kTile - count) * row_len);
  return copy_rows(count, row, row_size, to, row_len);
}

// Elements of two vectors side by side: (even 0, odd 0, even 1, ...), of their lower and their upper halves.
class RowInterleaver {
 public:
  RowInterleaver() {
    uint16_t low[32], high[32];
    for (uint16_t i = 0; i < 32; ++i) {
      low[i] = static_cast<uint16_t>(i % 2 * 32 + i / 2);
      high[i] = static_cast<uint16_t>(low[i] + 16);
    }
    low_ = _mm512_loadu_si512(low);
    high_ = _mm512_loadu_si512(high);
  }
  __m512i low(__m512i even, __m512i odd) const { return _mm512_permutex2var_epi16(even, low_, odd); }
  __m512i high(__m512i even, __m512i odd) const { return _mm512_permutex2var_epi16(even, high_, odd); }

 private:
  __m512i low_, high_;
};

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

// row(i) for i < count, times `sign`, as the right operand of scores: the transpose of `panel` rows as pairs. `rows` is
// room for a tile.
template <typename Row>
inline void transpose_queries(int64_t count, float sign, const Row& row, int64_t row_size, BFloat16* rows,
                              int64_t row_len, int64_t panel, BFloat16* to) {
  copy_tile(count, row, row_size, rows, row_len);
  if (sign < 0) {
    for (int64_t i = 0; i < kTile * row_len; ++i) rows[i].bits ^= 0x8000;
  }
  transpose_to_pairs(rows, panel, row_len, to);
}

// Pairs of rows as interleave_rows makes them, straight from row(i) for i < count; the partner of an odd last one is 0.
// Returns a bit for each row that is not finite.
template <typename Row>
inline uint64_t copy_row_pairs(int64_t count, const Row& row, int64_t row_size, BFloat16* to, int64_t row_len) {
  const RowInterleaver interleave;
  uint64_t not_finite = 0;
  for (int64_t i = 0; i < count; i += 2) {
    const bool has_odd = i + 1 < count;
    const BFloat16 *const even_row = row(i), *const odd_row = has_odd ? row(i + 1) : nullptr;
    __mmask32 bad_even = 0, bad_odd = 0;
    for (int64_t d = 0; d < row_len; d += 32) {
      const __m512i even = load_elements(even_row + d, row_size - d, bad_even);
      const __m512i odd = has_odd ? load_elements(odd_row + d, row_size - d, bad_odd) : __m512i{};
      BFloat16* const pairs = to + i * row_len + 2 * d;
      _mm512_storeu_si512(pairs, interleave.low(even, odd));
      _mm512_storeu_si512(pairs + 32, interleave.high(even, odd));
    }
    not_finite |= static_cast<uint64_t>(bad_even != 0) << i;
    if (bad_odd != 0) not_finite |= uint64_t{2} << i;
  }
  return not_finite;
}

// Copies pairs of rows with the rows in `excluded` set to 0.
inline void copy_pairs_without_rows(const BFloat16* from, int64_t count, int64_t row_len, uint64_t excluded,
                                    BFloat16* to) {
  for (int64_t row = 0; row < count; row += 2) {
    const uint32_t even_kept = excluded >> row & 1 ? 0 : 0xffffu, odd_kept = excluded >> row & 2 ? 0 : 0xffff0000u;
    const Vec<uint32_t> kept = Vec<uint32_t>{} + (even_kept | odd_kept);
    for (int64_t d = 0; d < 2 * row_len; d += 32) {
      const auto* pairs = reinterpret_cast<const uint32_t*>(from + row * row_len + d);
      store(reinterpret_cast<uint32_t*>(to + row * row_len + d), load(pairs) & kept);
    }
  }
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
      touch(from + at, 64);
      _mm512_storeu_si512(to + at, _mm512_maskz_loadu_epi16(kept, from + at));
    }
  }
}

// Two float vectors rounded to bfloat16, lane by lane side by side.
inline Vec<uint32_t> round_to_pairs(Vec<float> even, Vec<float> odd) {
#if defined(__AVX512BF16__)
  const auto halves =
      reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(odd), reinterpret_cast<__m512>(even)));
  const __m512i side_by_side = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return reinterpret_cast<Vec<uint32_t>>(_mm512_maskz_permutexvar_epi16(~__mmask32{0}, side_by_side, halves));
#else
  constexpr uint32_t kHalf = 0x8000;  // halves are rounded up
  return (as_words(even) + kHalf) >> 16 | ((as_words(odd) + kHalf) & 0xffff0000u);
#endif
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
constexpr int64_t kHalvesLen = 32;

// A float tile [kTile][kTile] with columns in the order of halves; rows from `rows` and columns from `columns` on
// become 0.
inline void round_tile_to_halves(const float* tile, int64_t rows, int64_t columns, BFloat16* to) {
  for (int64_t row = 0; row < kTile; ++row) {
    for (int64_t column = 0; column < kTile; column += kHalvesLen) {
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
  for (int64_t first = 0; first < kTile; first += kHalvesLen) {
    for (int64_t i = 0; i < kHalvesLen / 2; ++i) {
      for (int64_t d = 0; d < row_len; d += kWidth<float>) {
        const Vec<uint32_t> even = load_16bit(rows + (first + i) * row_len + d);
        const Vec<uint32_t> odd = load_16bit(rows + (first + i + kHalvesLen / 2) * row_len + d);
        store(reinterpret_cast<uint32_t*>(to + (first + 2 * i) * row_len + 2 * d), even | odd << 16);
      }
    }
  }
}

}  // namespace
}  // namespace jattn::cpu
