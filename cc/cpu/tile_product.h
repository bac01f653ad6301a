// The matrix product of small tiles that every product of the vector kernels goes through.
#pragma once

#include "cpu/convert.h"

namespace jattn::cpu {
namespace {

// Elements of one operand that meet the other's in one step along the inner dimension. bfloat16 goes in pairs
// (vdpbf16ps): two elements that follow each other along that dimension lie side by side, and an odd last one beside a
// zero.
template <typename T>
constexpr int64_t kElementsPerStep = 1;
template <>
constexpr int64_t kElementsPerStep<BFloat16> = 2;

// Step i of row r of the left operand is at data[r * row_stride + i * inner_stride]: a plain tile or, with the strides
// exchanged, its transpose. It is read one scalar, or pair, at a time, so the order costs nothing.
template <typename T>
struct LeftTile {
  const T* data;
  int64_t row_stride, inner_stride;
};

// Row-major, a row for each step; the columns of the right operand and of the result lie in the vector lanes.
template <typename T>
struct RightTile {
  const T* data;
  int64_t stride;
};
template <typename T>
struct ResultTile {
  T* data;
  int64_t stride;
};

// Register blocks: kBlockRows x kBlockVectors accumulators, one row of right vectors and one broadcast scalar fit the
// register file: 6 x 4 + 4 + 1 of 32 (AVX-512, NEON), 6 x 2 + 2 + 1 of 16.
constexpr int kBlockRows = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kBlockVectors = 4;
#else
constexpr int kBlockVectors = 2;
#endif
// Two vdpbf16ps begin in a cycle and take six (Zen 5): 6 x 2 sums would just fill them.
template <typename T, int kVectors>
constexpr int kRowsOfBlock = kElementsPerStep<T> == 2 && kVectors == 2 ? 2 * kBlockRows : kBlockRows;

template <typename T>
inline Vec<T> broadcast_step(const T* at) {
  return broadcast<T>(*at);
}
template <typename T>
inline Vec<T> load_step(const T* at) {
  return load(at);
}
template <typename V>
inline V add_product(V sum, V left, V right) {
  return sum + left * right;
}
#if defined(__AVX512BF16__)
inline __m512bh broadcast_step(const BFloat16* at) {
  int32_t pair;
  memcpy(&pair, at, sizeof(pair));
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}
inline __m512bh load_step(const BFloat16* at) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(at)); }
// Subnormal numbers count as 0, and sums are rounded to nearest, whatever the thread's mode.
inline Vec<float> add_product(Vec<float> sum, __m512bh left, __m512bh right) {
  return reinterpret_cast<Vec<float>>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), left, right));
}
#endif

// The product is summed up by itself before it is added: a chain through all tiles of a long row would lose more to
// rounding.
template <bool kAccumulate, int kRows, int kVectors, typename T>
inline __attribute__((always_inline)) void multiply_block(int64_t inner, LeftTile<T> left, RightTile<T> right,
                                                          ResultTile<Accumulator<T>> result) {
  using Acc = Accumulator<T>;
  Vec<Acc> sum[kRows][kVectors] = {};
  const T* left_column = left.data;
  const T* right_row = right.data;
  for (int64_t i = 0; i < inner; i += kElementsPerStep<T>) {
    decltype(load_step(right_row)) vectors[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) vectors[c] = load_step(right_row + c * kWidth<Acc> * kElementsPerStep<T>);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const auto scalar = broadcast_step(left_column + r * left.row_stride);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) sum[r][c] = add_product(sum[r][c], scalar, vectors[c]);
    }
    left_column += left.inner_stride;
    right_row += right.stride;
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      Acc* const to = result.data + r * result.stride + c * kWidth<Acc>;
      store(to, kAccumulate ? load(to) + sum[r][c] : sum[r][c]);
    }
  }
}

template <bool kAccumulate, int kVectors, typename T>
inline void multiply_columns(int64_t rows, int64_t inner, LeftTile<T> left, RightTile<T> right,
                             ResultTile<Accumulator<T>> result) {
  const auto advance = [&](int64_t done) {
    left.data += done * left.row_stride;
    result.data += done * result.stride;
    rows -= done;
  };
  constexpr int kRows = kRowsOfBlock<T, kVectors>;
  while (rows >= kRows) {
    multiply_block<kAccumulate, kRows, kVectors>(inner, left, right, result);
    advance(kRows);
  }
  if (kRows > kBlockRows && rows >= kBlockRows) {
    multiply_block<kAccumulate, kBlockRows, kVectors>(inner, left, right, result);
    advance(kBlockRows);
  }
  if (rows >= 4) {
    multiply_block<kAccumulate, 4, kVectors>(inner, left, right, result);
    advance(4);
  }
  if (rows >= 2) {
    multiply_block<kAccumulate, 2, kVectors>(inner, left, right, result);
    advance(2);
  }
  if (rows >= 1) multiply_block<kAccumulate, 1, kVectors>(inner, left, right, result);
}

// result = left * right, or result += left * right. `columns` is a multiple of kWidth; `inner` counts elements.
template <bool kAccumulate, typename T>
inline void multiply(int64_t rows, int64_t columns, int64_t inner, LeftTile<T> left, RightTile<T> right,
                     ResultTile<Accumulator<T>> result) {
  constexpr int64_t kLanes = kWidth<Accumulator<T>>;
  int64_t column = 0;
  const auto block = [&](auto vectors) {
    multiply_columns<kAccumulate, vectors()>(rows, inner, left,
                                             {right.data + column * kElementsPerStep<T>, right.stride},
                                             {result.data + column, result.stride});
    column += vectors() * kLanes;
  };
  while (column + kBlockVectors * kLanes <= columns) block(std::integral_constant<int, kBlockVectors>());
  if constexpr (kBlockVectors == 4) {
    if (column + 3 * kLanes <= columns) block(std::integral_constant<int, 3>());
    if (column + 2 * kLanes <= columns) block(std::integral_constant<int, 2>());
  }
  if (column < columns) block(std::integral_constant<int, 1>());
}

// A left operand in micropanels (BLIS): of every 16 rows the first 6, the next 6 and the last 4, step by step, so that
// the elements of a step lie side by side and a product reads them from the first to the last, as a cache far away
// delivers them. A micropanel begins where its first row would in plain rows of `row_len` elements.
template <typename T>
struct LeftMicropanels {
  const T* data;
  int64_t row_len;
};
constexpr int64_t kMicropanelGroup = 16;
constexpr bool kHasMicropanels = kBlockVectors == 4;  // elsewhere not measured to gain

// Calls use(its rows, those of them that are in `rows`) for every micropanel; the first of `rows` begins a group of 16.
template <typename Use>
inline __attribute__((always_inline)) void for_micropanels(IndexRange rows, const Use& use) {
  const auto block = [&](int64_t first, auto size) __attribute__((always_inline)) {
    use(size, IndexRange{first, min_of(first + size(), rows.end)});
  };
  for (int64_t first = rows.first; first < rows.end; first += kMicropanelGroup) {
    block(first, std::integral_constant<int, 6>());
    if (first + 6 < rows.end) block(first + 6, std::integral_constant<int, 6>());
    if (first + 12 < rows.end) block(first + 12, std::integral_constant<int, 4>());
  }
}

template <bool kAccumulate, typename T>
inline void multiply_micropanels(IndexRange rows, int64_t columns, IndexRange inner, LeftMicropanels<T> left,
                                 RightTile<T> right, ResultTile<Accumulator<T>> result) {
  for_micropanels(rows, [&](auto size, IndexRange wanted) __attribute__((always_inline)) {
    const LeftTile<T> block{left.data + wanted.first * left.row_len + inner.first * size(), 1, size()};
    const ResultTile<Accumulator<T>> to{result.data + (wanted.first - rows.first) * result.stride, result.stride};
    if (wanted.count() == size() && columns == kBlockVectors * kWidth<Accumulator<T>>) {
      multiply_block<kAccumulate, size(), kBlockVectors>(inner.count(), block, right, to);
    } else {
      multiply<kAccumulate, T>(wanted.count(), columns, inner.count(), block, right, to);
    }
  });
}

// Row row(i) for i < count of a left operand into micropanels of rows of `row_len` elements.
template <typename Element, typename Row>
inline void pack_micropanels(int64_t count, const Row& row, int64_t row_size, Accumulator<Element>* to,
                             int64_t row_len) {
  using Acc = Accumulator<Element>;
  constexpr int64_t kStep = kWidth<Acc>;
  for (int64_t first = 0; first < count; first += kMicropanelGroup) {
    const IndexRange rows{first, min_of(first + kMicropanelGroup, count)};
    for (int64_t column = 0; column < row_size; column += kStep) {
      Acc lanes[kStep][kMicropanelGroup];
      const int64_t steps = min_of(kStep, row_size - column);
      widen_to_lanes<Element>(
          rows.count(), [&](int64_t i) { return row(first + i) + column; }, steps, Acc{1}, lanes[0], kMicropanelGroup);
      for (int64_t i = 0; i < steps; ++i) {
        for_micropanels(rows, [&](auto size, IndexRange block) {
          memcpy(to + block.first * row_len + (column + i) * size(), lanes[i] + block.first - first,
                 size() * sizeof(Acc));
        });
      }
    }
  }
}

// The transpose of row(i) for i < count, so that the elements of a row belong to one step. Returns a bit for each row
// that is not finite.
template <typename Element, typename Row>
inline uint64_t pack_transposed_micropanels(int64_t count, const Row& row, int64_t row_size, Accumulator<Element>* to,
                                            int64_t row_len) {
  using Acc = Accumulator<Element>;
  uint64_t not_finite = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Element* const from = row(i);
    for (int64_t first = 0; first < row_size; first += kMicropanelGroup) {
      Acc values[kMicropanelGroup];
      const bool is_finite =
          widen_row<Element>(from + first, min_of(kMicropanelGroup, row_size - first), values, kMicropanelGroup);
      not_finite |= static_cast<uint64_t>(!is_finite) << i;
      for_micropanels({first, first + kMicropanelGroup}, [&](auto size, IndexRange block) {
        memcpy(to + block.first * row_len + i * size(), values + block.first - first, size() * sizeof(Acc));
      });
    }
  }
  return not_finite;
}

// Calls use(first, length) for every run of indices below `count` that are not in `excluded`.
template <typename Use>
inline void for_runs(int64_t count, uint64_t excluded, const Use& use) {
  for (int64_t first = 0; first < count; ++first) {
    if (excluded >> first & 1) continue;
    int64_t end = first + 1;
    while (end < count && !(excluded >> end & 1)) ++end;
    use(first, end - first);
    first = end;
  }
}

}  // namespace
}  // namespace jattn::cpu
