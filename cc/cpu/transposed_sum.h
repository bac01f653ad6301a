// dk or dv of one tile of keys on the matrix unit, whose products give it transposed.
#pragma once

#include "cpu/tasks.h"
#include "cpu/vec.h"

namespace jattn::cpu {
namespace {

// Neither array is cleared before it is needed: a task would write two to four times what it reads of the keys.
class TransposedSum {
 public:
  TransposedSum(int64_t row_len, Workspace& workspace)
      : row_len_(row_len),
        columns_(workspace.take<float>(kTile * row_len)),
        rows_(workspace.take<float>(kTile * row_len)) {}
  static int64_t bytes(int64_t row_len) { return 2 * Workspace::bytes<float>(kTile * row_len); }

  void reset() { has_columns_ = has_rows_ = false; }

  // Calls add(columns, accumulates) for a product that is to be added to columns[d * kTile + key], or, where it is the
  // first, to take its place.
  template <typename Add>
  void add_product(const Add& add) {
    if (has_columns_) {
      add(columns_, std::true_type());
    } else {
      add(columns_, std::false_type());
    }
    has_columns_ = true;
  }

  // [kTile][row_len]: for what is added row by row and, after `finish`, the whole sum.
  float* rows() {
    if (!has_rows_) clear(rows_, kTile * row_len_);
    has_rows_ = true;
    return rows_;
  }

  // The sum is complete after this; 0 from key `keys` on.
  void finish(int64_t keys) {
    if (!has_columns_) {
      rows();
    } else if (has_rows_) {
      transpose_columns<true>(keys);
    } else {
      transpose_columns<false>(keys);
      clear(rows_ + keys * row_len_, (kTile - keys) * row_len_);
      has_rows_ = true;
    }
  }

 private:
  template <bool kAccumulate>
  void transpose_columns(int64_t keys) {
    constexpr int64_t kStep = kWidth<float>;
    for (int64_t d = 0; d < row_len_; d += kStep) {
      for (int64_t key = 0; key < keys; key += kStep) {
        Vec<float> square[kStep];
        for (int64_t i = 0; i < kStep; ++i) square[i] = load(columns_ + (d + i) * kTile + key);
        transpose_square<float>(square);
        for (int64_t i = 0; i < min_of(kStep, keys - key); ++i) {
          float* to = rows_ + (key + i) * row_len_ + d;
          store(to, kAccumulate ? load(to) + square[i] : square[i]);
        }
      }
    }
  }

  int64_t row_len_;
  float *columns_, *rows_;
  bool has_columns_ = false, has_rows_ = false;
};

}  // namespace
}  // namespace jattn::cpu
