// The two products of the forward pass on vectors: scores = K Q^T and out^T += V^T P^T.
//
// Queries lie in the vector lanes: Q is transposed once per task, rows of K and V are read as they are, one scalar at
// a time, and maximum, sum and rescaling of a query row are plain vector operations without any reduction.
#pragma once

#include "cpu/convert.h"
#include "cpu/tasks.h"
#include "cpu/tile_product.h"

namespace jattn::cpu {
namespace {

template <typename Element>
class ForwardProducts {
 public:
  using Acc = Accumulator<Element>;

  static int64_t workspace_bytes(const Problem& problem, int64_t panels) {
    const int64_t row_len = round_up(problem.head_dim, kRowUnit), row_len_v = round_up(problem.head_dim_v, kRowUnit);
    return (panels + 1) * Workspace::bytes<Acc>(kTile * row_len) + Workspace::bytes<Acc>(kTile * row_len_v);
  }

  ForwardProducts(const Problem& problem, int64_t panels, Workspace& workspace)
      : head_dim_(problem.head_dim),
        head_dim_v_(problem.head_dim_v),
        row_len_(round_up(problem.head_dim, kRowUnit)),
        row_len_v_(round_up(problem.head_dim_v, kRowUnit)),
        q_lanes_(workspace.take<Acc>(panels * kTile * row_len_)),
        keys_(workspace.take<Acc>(kTile * row_len_)),
        values_(workspace.take<Acc>(kTile * row_len_v_)) {}

  // Takes row(i) for i < count as the queries of a panel, times `sign`.
  template <typename Row>
  void set_queries(int64_t panel, int64_t count, Acc sign, const Row& row) {
    Acc* rows = keys_;  // not in use yet
    for (int64_t i = 0; i < kTile; ++i) {
      Acc* to = rows + i * row_len_;
      if (i >= count) {
        clear(to, row_len_);
        continue;
      }
      widen_row<Element>(row(i), head_dim_, to, row_len_);
      for (int64_t d = 0; d < row_len_; ++d) to[d] *= sign;
    }
    transpose(rows, row_len_, kTile, row_len_, q_lanes_ + panel * kTile * row_len_, kTile);
  }

  template <typename Row>
  void set_keys(int64_t count, const Row& row) {
    for (int64_t i = 0; i < count; ++i) widen_row<Element>(row(i), head_dim_, keys_ + i * row_len_, row_len_);
  }

  // Returns a bit for each row that is not finite.
  template <typename Row>
  uint64_t set_values(int64_t count, const Row& row) {
    uint64_t not_finite = 0;
    for (int64_t i = 0; i < count; ++i) {
      const bool is_finite = widen_row<Element>(row(i), head_dim_v_, values_ + i * row_len_v_, row_len_v_);
      not_finite |= static_cast<uint64_t>(!is_finite) << i;
    }
    return not_finite;
  }

  // scores[key * kTile + lane] = k . q
  void multiply_keys(int64_t panel, int64_t keys, int64_t lanes, Acc* scores) const {
    multiply<false, Acc>(keys, lanes, head_dim_, {keys_, row_len_, 1}, {q_lanes_ + panel * kTile * row_len_, kTile},
                         {scores, kTile});
  }

  // out[d * kTile + lane] += sum over keys of v * p, leaving out the keys in `excluded`.
  void add_values(int64_t keys, int64_t lanes, const Acc* p, uint64_t excluded, Acc* out) const {
    for (int64_t first = 0; first < keys; ++first) {
      if (excluded >> first & 1) continue;
      int64_t end = first + 1;
      while (end < keys && !(excluded >> end & 1)) ++end;
      multiply<true, Acc>(head_dim_v_, lanes, end - first, {values_ + first * row_len_v_, 1, row_len_v_},
                          {p + first * kTile, kTile}, {out, kTile});
      first = end;
    }
  }

 private:
  int64_t head_dim_, head_dim_v_, row_len_, row_len_v_;
  Acc* q_lanes_;  // [panels][head_dim][kTile]
  Acc* keys_;     // [kTile][row_len]
  Acc* values_;   // [kTile][row_len_v]
};

}  // namespace
}  // namespace jattn::cpu
