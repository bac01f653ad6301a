// The matrix unit (AMX): products of bfloat16 tiles with float32 sums, and the layouts that they read.
//
// One instruction computes C[16][16] += A[16][32] B[32][16]. A is read row by row. B is read in pairs: element
// (2i, n) and (2i + 1, n) lie side by side, so that 16 rows of 16 pairs make a tile. (Intel SDM volume 1, chapter 18.)
#pragma once

#include "cpu/pair_layouts.h"

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
#if !defined(JATTN_EMULATED_TILES)
    // Not _tile_loadconfig: in GCC 12 it does not name the whole struct as an input, and the stores above may go.
    asm volatile("ldtilecfg %0" ::"m"(configuration) : "memory");
#else
    static_cast<void>(configuration);
#endif
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

// For PairBackwardProducts.
struct AmxUnit {
  using Session = AmxSession;
  using Term = AmxTerm;
  using Result = AmxResult;

  template <bool kAccumulate>
  static void multiply(int64_t rows, int64_t columns, const Term* terms, int64_t num_terms, Result result) {
    amx_multiply<kAccumulate>(rows, columns, terms, num_terms, result);
  }
};

}  // namespace
}  // namespace jattn::cpu
