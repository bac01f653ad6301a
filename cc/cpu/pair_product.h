// Products of bfloat16 pairs with float32 sums on vectors (vdpbf16ps).
#pragma once

#include "cpu/pair_layouts.h"
#include "cpu/tile_product.h"

namespace jattn::cpu {
namespace {

// For PairBackwardProducts.
struct VectorUnit {
  struct Session {};
  using Result = ResultTile<float>;

  // The left operand lies row by row, the right one in pairs of rows; strides in elements. An odd last element of
  // either has a zero beside it.
  struct Operand {
    const BFloat16* data;
    int64_t stride;
  };
  struct Term {
    int64_t inner;
    Operand left, right;
  };

  // result = sum of left * right over the terms, or result += that. `columns` is rounded up to kWidth.
  template <bool kAccumulate>
  static void multiply(int64_t rows, int64_t columns, const Term* terms, int64_t num_terms, Result result) {
    const auto add = [&](auto accumulates, const Term& term) {
      jattn::cpu::multiply<accumulates(), BFloat16>(rows, round_up(columns, kWidth<float>), term.inner,
                                                    {term.left.data, term.left.stride, 2},
                                                    {term.right.data, term.right.stride}, result);
    };
    add(std::bool_constant<kAccumulate>(), terms[0]);
    for (int64_t i = 1; i < num_terms; ++i) add(std::true_type(), terms[i]);
  }
};

}  // namespace
}  // namespace jattn::cpu
