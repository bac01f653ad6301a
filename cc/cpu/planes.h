// Products of float16 and float32 on the matrix unit: values as sums of bfloat16 planes.
//
// A float16 is the sum of two bfloat16, exactly: the upper 8 bits of its significand and the other 3. A float32 is the
// sum of three. A product is the sum over pairs of planes, still much faster than float32 vectors. Infinity cannot be
// split so (next to a zero plane it gives NaN), and a partial sum may overflow where the whole does not: tiles with
// such values are left to the vectors.
//
// The unit takes subnormal numbers for 0. Parts of a float32 below 2^-126 are lost: an absolute error, which only sums
// of values that are all below about 2^-100 see.
//
// Operands lie in blocks, in the order in which a product reads them: [extent / 32][inner / 32][planes] blocks of
// 32 x 32 elements, which are two tile registers. `extent` counts the rows of the left operand and the columns of the
// right one. Streaming keys from the third-level cache, a product takes as long as from the first; with tiles that are
// 16 pieces of larger rows it took twice as long.
#pragma once

#include "cpu/amx_tiles.h"
#include "cpu/tile_product.h"

namespace jattn::cpu {
namespace {

constexpr int64_t kBlockLen = kAmxBlock * kAmxInner;  // elements of a block of one plane
constexpr int64_t kBlockHalf = kBlockLen / 2;         // of the tile of one register

template <typename Element>
constexpr int64_t kPlanesOf = 2;
template <>
constexpr int64_t kPlanesOf<float> = 3;

// The pairs of planes (of the left, of the right operand) that make a product, each sharing a plane with the one before
// it. The largest comes last: the passes exchange left and right, and what they add up before it differs by nothing
// that the rounding of the sum lets through, so the probability of a key far above all others is 1 in both. Of float16
// all pairs. Of float32 those that reach into the 24 bits of a product: the three others are below 2^-24 of it and
// changed no measured error.
struct PlanePair {
  int64_t left, right;
};
template <int64_t kPlanes>
constexpr PlanePair kPlanePairs[] = {{1, 0}, {1, 1}, {0, 1}, {0, 0}};
template <>
constexpr PlanePair kPlanePairs<3>[] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 2}, {0, 0}};

// Elements of an operand.
template <int64_t kPlanes>
constexpr int64_t operand_len(int64_t extent, int64_t inner) {
  return kPlanes * extent * inner;
}

// The first plane of a block. The others follow.
template <int64_t kPlanes, typename T>
inline T* block_of(T* operand, int64_t inner_len, int64_t extent, int64_t inner) {
  return operand + (extent / kAmxBlock * (inner_len / kAmxInner) + inner / kAmxInner) * kPlanes * kBlockLen;
}

// An operand that was packed for an inner extent of `inner_len`.
struct PlaneOperand {
  const BFloat16* data;
  int64_t inner_len;
};

// Work for the vectors in `kUnits` parts, done while the matrix unit multiplies: the core runs both at once if their
// instructions lie close together.
template <int64_t kUnits, typename Work>
class BesideProduct {
 public:
  // Of multiply_planes with these extents.
  BesideProduct(int64_t rows, int64_t columns, int64_t inner, const Work& work)
      : work_(work), num_slots_(kSlotsPerStep * blocks(rows) * blocks(columns) * blocks(inner)) {}

  static constexpr size_t kSlotsPerStep = 4;  // there is one after each of the first pairs of planes
  inline __attribute__((always_inline)) void operator()() {
    for (credit_ += kUnits; credit_ >= num_slots_; credit_ -= num_slots_) work_(unit_++);
  }

 private:
  static int64_t blocks(int64_t extent) { return (extent + kAmxBlock - 1) / kAmxBlock; }
  const Work& work_;
  int64_t num_slots_, credit_ = 0, unit_ = 0;
};

struct NothingBeside {
  static constexpr size_t kSlotsPerStep = 0;
  void operator()() {}
};

// result = left * right, or result += left * right. All extents are rounded up to 32; operands hold zeros there.
template <int64_t kPlanes, bool kAccumulate, typename Beside = NothingBeside>
inline void multiply_planes(int64_t rows, int64_t columns, int64_t inner, PlaneOperand left, PlaneOperand right,
                            AmxResult result, Beside beside = {}) {
  // GCC's tile loads do not say that they read memory: everything stored so far must be there before them.
  asm volatile("" ::: "memory");
  const int64_t result_stride_bytes = result.stride * static_cast<int64_t>(sizeof(float));
  touch_rows(result.data, rows, result_stride_bytes, columns * 4);
  for (int64_t row = 0; row < rows; row += kAmxBlock) {
    for (int64_t column = 0; column < columns; column += kAmxBlock) {
      const int64_t m = row / kAmxRows, n = column / kAmxRows;
      if constexpr (kAccumulate) {
        _tile_loadd(0, result.tile(m, n), result_stride_bytes);
        _tile_loadd(1, result.tile(m, n + 1), result_stride_bytes);
        _tile_loadd(2, result.tile(m + 1, n), result_stride_bytes);
        _tile_loadd(3, result.tile(m + 1, n + 1), result_stride_bytes);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      const BFloat16* left_block = block_of<kPlanes>(left.data, left.inner_len, row, 0);
      const BFloat16* right_block = block_of<kPlanes>(right.data, right.inner_len, column, 0);
      for (int64_t k = 0; k < inner; k += kAmxInner) {
        constexpr auto& kPairs = kPlanePairs<kPlanes>;
#pragma GCC unroll 6
        for (size_t pair = 0; pair < sizeof(kPairs) / sizeof(PlanePair); ++pair) {
          const BFloat16* left_tile = left_block + kPairs[pair].left * kBlockLen;
          const BFloat16* right_tile = right_block + kPairs[pair].right * kBlockLen;
          touch(left_tile, kBlockLen * 2);
          touch(right_tile, kBlockLen * 2);
          // What the pair before it left in the registers stays there.
          const bool loads_left = pair == 0 || kPairs[pair - 1].left != kPairs[pair].left;
          const bool loads_right = pair == 0 || kPairs[pair - 1].right != kPairs[pair].right;
          if (loads_left) _tile_loadd(4, left_tile, kAmxRowBytes);
          if (loads_right) _tile_loadd(6, right_tile, kAmxRowBytes);
          _tile_dpbf16ps(0, 4, 6);
          if (loads_right) _tile_loadd(7, right_tile + kBlockHalf, kAmxRowBytes);
          _tile_dpbf16ps(1, 4, 7);
          if (loads_left) _tile_loadd(5, left_tile + kBlockHalf, kAmxRowBytes);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
          if (pair < Beside::kSlotsPerStep) beside();
        }
        left_block += kPlanes * kBlockLen;
        right_block += kPlanes * kBlockLen;
      }
      _tile_stored(0, result.tile(m, n), result_stride_bytes);
      _tile_stored(1, result.tile(m, n + 1), result_stride_bytes);
      _tile_stored(2, result.tile(m + 1, n), result_stride_bytes);
      _tile_stored(3, result.tile(m + 1, n + 1), result_stride_bytes);
    }
  }
}

// The upper halves of the words of `first`, then of `second`.
inline Vec<uint32_t> upper_halves(Vec<uint32_t> first, Vec<uint32_t> second) {
  alignas(64) static constexpr uint16_t kPlaces[] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                     33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return reinterpret_cast<Vec<uint32_t>>(_mm512_permutex2var_epi16(
      reinterpret_cast<__m512i>(first), _mm512_load_si512(kPlaces), reinterpret_cast<__m512i>(second)));
}

// The upper halves of the words of `even` and `odd`, side by side.
inline Vec<uint32_t> upper_pairs(Vec<uint32_t> even, Vec<uint32_t> odd) {
  alignas(64) static constexpr uint16_t kPlaces[] = {1,  33, 3,  35, 5,  37, 7,  39, 9,  41, 11, 43, 13, 45, 15, 47,
                                                     17, 49, 19, 51, 21, 53, 23, 55, 25, 57, 27, 59, 29, 61, 31, 63};
  return reinterpret_cast<Vec<uint32_t>>(_mm512_permutex2var_epi16(
      reinterpret_cast<__m512i>(even), _mm512_load_si512(kPlaces), reinterpret_cast<__m512i>(odd)));
}

inline Vec<float> as_floats(Vec<uint32_t> words) { return reinterpret_cast<Vec<float>>(words); }

inline void store_words(BFloat16* to, Vec<uint32_t> words) { store(reinterpret_cast<uint32_t*>(to), words); }

// Words whose upper halves are bfloat16 that add up to a value.
template <int64_t kPlanes>
struct Planes {
  Vec<uint32_t> plane[kPlanes];
};

constexpr uint32_t kMagnitudeBits = 0x7fffffff, kInfinityBits = 0x7f800000;
// Products of values below this cannot overflow.
constexpr uint32_t kHugeBits = 0x5d800000;  // 2^60

// Operands that are packed once. Infinity and NaN lie in the first plane alone. The planes of a float32 are rounded, so
// that what kPlanePairs leaves out has no sign of its own; except those of huge values, where the first could overflow.
template <typename Element>
inline __attribute__((always_inline)) Planes<kPlanesOf<Element>> planes_of(Vec<float> value) {
  Planes<kPlanesOf<Element>> planes;
  constexpr uint32_t kUpperHalf = 0xffff0000;
  if constexpr (kPlanesOf<Element> == 3) {
    const Vec<uint32_t> magnitude = as_words(value) & kMagnitudeBits;
    const Vec<uint32_t> half = reinterpret_cast<Vec<uint32_t>>(magnitude < kHugeBits) & 0x8000u;
    const Vec<uint32_t> quiet = reinterpret_cast<Vec<uint32_t>>(magnitude > kInfinityBits) & 0x400000u;
    planes.plane[0] = ((as_words(value) + half) | quiet) & kUpperHalf;
    Vec<float> rest = value - as_floats(planes.plane[0]);
    rest = rest == rest ? rest : Vec<float>{};
    planes.plane[1] = (as_words(rest) + 0x8000u) & kUpperHalf;
    planes.plane[2] = as_words(rest - as_floats(planes.plane[1]));
  } else {
    planes.plane[0] = as_words(value);
    const Vec<float> rest = value - as_floats(as_words(value) & kUpperHalf);
    planes.plane[1] = as_words(rest == rest ? rest : Vec<float>{});
  }
  return planes;
}

// P and dS, in the type of the accumulator: the last of two planes is rounded, three hold them exactly. They are cut
// off otherwise, which is faster: what is left out has no sign as long as the other operand is rounded.
template <int64_t kPlanes>
inline __attribute__((always_inline)) Planes<kPlanes> cut_planes(Vec<float> value) {
  Planes<kPlanes> planes;
#pragma GCC unroll 3
  for (int64_t i = 0; i < kPlanes; ++i) {
    planes.plane[i] = as_words(value);
    value -= as_floats(as_words(value) & 0xffff0000u);
  }
  if constexpr (kPlanes == 2) planes.plane[1] += 0x8000u;
  return planes;
}

// The lanes present are the first of a row.
inline Vec<float> load_present(const float* from, __mmask16 present) {
  touch(from, 4 * __builtin_popcount(present));
  return reinterpret_cast<Vec<float>>(_mm512_maskz_loadu_ps(present, from));
}
inline Vec<float> load_present(const Float16* from, __mmask16 present) {
  touch(from, 2 * __builtin_popcount(present));
  return reinterpret_cast<Vec<float>>(_mm512_maskz_cvtph_ps(kEveryLane, _mm256_maskz_loadu_epi16(present, from)));
}

// Lanes that lie before the end of a row of which `rest` elements are left.
inline __mmask16 lanes_before(int64_t rest) {
  return static_cast<__mmask16>(rest >= 16 ? 0xffff : rest <= 0 ? 0 : (1 << rest) - 1);
}

// Takes what vectors have computed into a tile of results, rows of `stride`, where a bit of the row or of the column
// says so. The others keep their bits: they must not depend on what another row holds, which they may not even see.
inline void take_exact(int64_t rows, int64_t columns, uint64_t exact_rows, uint64_t exact_columns, const float* exact,
                       float* result, int64_t stride) {
  for (int64_t row = 0; row < rows; ++row) {
    const uint64_t taken = exact_rows >> row & 1 ? ~uint64_t{0} : exact_columns;
    for (int64_t column = 0; taken != 0 && column < columns; column += kWidth<float>) {
      const int64_t at = row * stride + column;
      touch(result + at, kAmxRowBytes);
      _mm512_mask_storeu_ps(result + at, static_cast<__mmask16>(taken >> column),
                            reinterpret_cast<__m512>(load(exact + at)));
    }
  }
}

// The functions below pack row(i) for i < count of kTile rows of `row_size` elements, padded to `row_len`; everything
// else becomes 0. They return a bit for each row that is not finite, or holds huge float32.

// Two vectors of each of 16 rows, from row `first` and element `d` on.
struct Pieces {
  Vec<float> low[kAmxRows], high[kAmxRows];
};
template <typename Element, typename Row>
inline __attribute__((always_inline)) uint64_t load_pieces(int64_t count, const Row& row, int64_t row_size,
                                                           int64_t first, int64_t d, Pieces& pieces) {
  constexpr uint32_t kLeast = kPlanesOf<Element> == 3 ? kHugeBits : kInfinityBits;
  const __mmask16 low_lanes = lanes_before(row_size - d), high_lanes = lanes_before(row_size - d - kAmxRows);
  uint64_t exact_rows = 0;
#pragma GCC unroll 16
  for (int64_t i = 0; i < kAmxRows; ++i) {
    const bool is_row = first + i < count;
    const Element* from = row(is_row ? first + i : 0) + d;
    pieces.low[i] = load_present(from, is_row ? low_lanes : 0);
    pieces.high[i] = load_present(from + kAmxRows, is_row ? high_lanes : 0);
    const auto is_exact = [](Vec<float> value) {
      return _mm512_cmpge_epu32_mask(reinterpret_cast<__m512i>(as_words(value) & kMagnitudeBits),
                                     _mm512_set1_epi32(kLeast));
    };
    exact_rows |= static_cast<uint64_t>((is_exact(pieces.low[i]) | is_exact(pieces.high[i])) != 0) << i;
  }
  return exact_rows << first;
}

// The left operand of a product over the elements of a row.
template <typename Element, typename Row>
inline uint64_t pack_left_rows(int64_t count, const Row& row, int64_t row_size, int64_t row_len, BFloat16* to) {
  constexpr int64_t kPlanes = kPlanesOf<Element>;
  uint64_t exact_rows = 0;
  Pieces pieces;
  for (int64_t first = 0; first < kTile; first += kAmxRows) {
    for (int64_t d = 0; d < row_len; d += kAmxInner) {
      exact_rows |= load_pieces<Element>(count, row, row_size, first, d, pieces);
      BFloat16* tile = block_of<kPlanes>(to, row_len, first, d) + first % kAmxBlock * kAmxInner;
      for (int64_t i = 0; i < kAmxRows; ++i) {
        const auto low = planes_of<Element>(pieces.low[i]), high = planes_of<Element>(pieces.high[i]);
        for (int64_t plane = 0; plane < kPlanes; ++plane) {
          store_words(tile + plane * kBlockLen + i * kAmxInner, upper_halves(low.plane[plane], high.plane[plane]));
        }
      }
    }
  }
  return exact_rows;
}

// The right operand of a product over the elements of a row; `rows` of them.
template <typename Element, typename Row>
inline uint64_t pack_right_rows(int64_t rows, int64_t count, const Row& row, int64_t row_size, int64_t row_len,
                                BFloat16* to) {
  constexpr int64_t kPlanes = kPlanesOf<Element>;
  uint64_t exact_rows = 0;
  Pieces pieces;
  for (int64_t first = 0; first < rows; first += kAmxRows) {
    for (int64_t d = 0; d < row_len; d += kAmxInner) {
      exact_rows |= load_pieces<Element>(count, row, row_size, first, d, pieces);
      Vec<float> words[kPlanes][kAmxRows];
      for (int64_t i = 0; i < kAmxRows; ++i) {
        const auto low = planes_of<Element>(pieces.low[i]), high = planes_of<Element>(pieces.high[i]);
        for (int64_t plane = 0; plane < kPlanes; ++plane) {
          words[plane][i] = as_floats(upper_halves(low.plane[plane], high.plane[plane]));
        }
      }
      BFloat16* tile = block_of<kPlanes>(to, row_len, first, d) + first % kAmxBlock * kAmxInner;
      for (int64_t plane = 0; plane < kPlanes; ++plane) {
        transpose_square<float>(words[plane]);
        for (int64_t i = 0; i < kAmxRows; ++i) {
          store_words(tile + plane * kBlockLen + i * kAmxInner, as_words(words[plane][i]));
        }
      }
    }
  }
  return exact_rows;
}

// The left operand of a product over the rows.
template <typename Element, typename Row>
inline uint64_t pack_left_columns(int64_t count, const Row& row, int64_t row_size, int64_t row_len, BFloat16* to) {
  constexpr int64_t kPlanes = kPlanesOf<Element>;
  uint64_t exact_rows = 0;
  Pieces even, odd;
  for (int64_t first = 0; first < kTile; first += kAmxBlock) {
    for (int64_t d = 0; d < row_len; d += kAmxInner) {
      exact_rows |= load_pieces<Element>(count, row, row_size, first, d, even);
      exact_rows |= load_pieces<Element>(count, row, row_size, first + kAmxRows, d, odd);
      BFloat16* block = block_of<kPlanes>(to, kTile, d, first);
      const auto pack = [&](Vec<float>(&low)[kAmxRows], Vec<float>(&high)[kAmxRows], BFloat16* tile) {
        transpose_square<float>(low);
        transpose_square<float>(high);
        for (int64_t i = 0; i < kAmxRows; ++i) {
          const auto low_planes = planes_of<Element>(low[i]), high_planes = planes_of<Element>(high[i]);
          for (int64_t plane = 0; plane < kPlanes; ++plane) {
            store_words(tile + plane * kBlockLen + i * kAmxInner,
                        upper_halves(low_planes.plane[plane], high_planes.plane[plane]));
          }
        }
      };
      pack(even.low, odd.low, block);
      pack(even.high, odd.high, block + kBlockHalf);
    }
  }
  return exact_rows;
}

// The right operand of a product over the rows.
template <typename Element, typename Row>
inline uint64_t pack_right_columns(int64_t count, const Row& row, int64_t row_size, int64_t row_len, BFloat16* to) {
  constexpr int64_t kPlanes = kPlanesOf<Element>;
  uint64_t exact_rows = 0;
  Pieces pieces;
  for (int64_t first = 0; first < kTile; first += kAmxRows) {
    for (int64_t d = 0; d < row_len; d += kAmxInner) {
      exact_rows |= load_pieces<Element>(count, row, row_size, first, d, pieces);
      BFloat16* block = block_of<kPlanes>(to, kTile, d, first) + first % kAmxInner / 2 * kAmxInner;
      const auto pack = [&](const Vec<float>(&rows)[kAmxRows], BFloat16* tile) {
        for (int64_t i = 0; i < kAmxRows; i += 2) {
          const auto low = planes_of<Element>(rows[i]), high = planes_of<Element>(rows[i + 1]);
          for (int64_t plane = 0; plane < kPlanes; ++plane) {
            store_words(tile + plane * kBlockLen + i / 2 * kAmxInner, upper_pairs(low.plane[plane], high.plane[plane]));
          }
        }
      };
      pack(pieces.low, block);
      pack(pieces.high, block + kBlockHalf);
    }
  }
  return exact_rows;
}

// A pair of rows, `row` (even) and the next, of the right operand of a product over them: 16 elements from column
// `column` on.
template <int64_t kPlanes>
inline __attribute__((always_inline)) void store_right_pair(const Planes<kPlanes>& even, const Planes<kPlanes>& odd,
                                                            int64_t row, int64_t column, BFloat16* to) {
  BFloat16* place = block_of<kPlanes>(to, kTile, column, row) + column % kAmxBlock / kAmxRows * kBlockHalf +
                    row % kAmxInner / 2 * kAmxInner;
#pragma GCC unroll 3
  for (int64_t plane = 0; plane < kPlanes; ++plane) {
    store_words(place + plane * kBlockLen, upper_pairs(even.plane[plane], odd.plane[plane]));
  }
}

// 32 columns from `column` on of a row of the left operand of a product over kTile columns.
template <int64_t kPlanes>
inline __attribute__((always_inline)) void store_left_row(const Planes<kPlanes>& low, const Planes<kPlanes>& high,
                                                          int64_t row, int64_t column, BFloat16* to) {
  BFloat16* place = block_of<kPlanes>(to, kTile, row, column) + row % kAmxBlock * kAmxInner;
#pragma GCC unroll 3
  for (int64_t plane = 0; plane < kPlanes; ++plane) {
    store_words(place + plane * kBlockLen, upper_halves(low.plane[plane], high.plane[plane]));
  }
}

// Copies the left operand of a product over kTile rows, with the rows in `excluded` set to 0.
template <int64_t kPlanes>
inline void copy_left_columns_without(const BFloat16* from, int64_t row_len, uint64_t excluded, BFloat16* to) {
  for (int64_t at = 0; at < operand_len<kPlanes>(row_len, kTile); at += kAmxInner) {
    const int64_t first_row = at / (kPlanes * kBlockLen) % (kTile / kAmxInner) * kAmxInner;
    const auto kept = static_cast<__mmask32>(~excluded >> first_row);
    touch(from + at, kAmxRowBytes);
    _mm512_storeu_si512(to + at, _mm512_maskz_loadu_epi16(kept, from + at));
  }
}

// The same of the right operand.
template <int64_t kPlanes>
inline void copy_right_columns_without(const BFloat16* from, int64_t row_len, uint64_t excluded, BFloat16* to) {
  for (int64_t at = 0; at < operand_len<kPlanes>(row_len, kTile); at += kAmxInner) {
    const int64_t first_row = at / (kPlanes * kBlockLen) % (kTile / kAmxInner) * kAmxInner;
    const int64_t row = first_row + at % kBlockHalf / kAmxInner * 2;
    const uint32_t kept = ((excluded >> row & 1) != 0 ? 0 : 0xffffu) | ((excluded >> row & 2) != 0 ? 0 : 0xffff0000u);
    store_words(to + at, load(reinterpret_cast<const uint32_t*>(from + at)) & kept);
  }
}

// What the planes of pack_left_rows add up to: to[row][d].
template <int64_t kPlanes>
inline void join_left_rows(const BFloat16* operand, int64_t row_len, float* to) {
  for (int64_t row = 0; row < kTile; ++row) {
    for (int64_t d = 0; d < row_len; d += kWidth<float>) {
      const BFloat16* from = block_of<kPlanes>(operand, row_len, row, d) + row % kAmxBlock * kAmxInner + d % kAmxInner;
      Vec<float> sum{};
      for (int64_t plane = kPlanes; plane-- > 0;) sum += widen(from + plane * kBlockLen);
      store(to + row * row_len + d, sum);
    }
  }
}

// What the planes of pack_right_rows add up to: to[d][row].
template <int64_t kPlanes>
inline void join_right_rows(const BFloat16* operand, int64_t rows, int64_t row_len, float* to) {
  for (int64_t d = 0; d < row_len; d += 2) {
    for (int64_t row = 0; row < rows; row += kAmxRows) {
      const BFloat16* from = block_of<kPlanes>(operand, row_len, row, d) + row % kAmxBlock / kAmxRows * kBlockHalf +
                             d % kAmxInner / 2 * kAmxInner;
      Vec<float> even{}, odd{};
      for (int64_t plane = kPlanes; plane-- > 0;) {
        const Vec<uint32_t> words = load(reinterpret_cast<const uint32_t*>(from + plane * kBlockLen));
        even += as_floats(words << 16);
        odd += as_floats(words & 0xffff0000u);
      }
      store(to + d * rows + row, even);
      store(to + (d + 1) * rows + row, odd);
    }
  }
}

}  // namespace
}  // namespace jattn::cpu
