// The two products of the forward pass on the matrix unit. P is rounded to 8 bits for bfloat16 and to 16 for float16.
//
// As in ForwardProducts the queries are the columns of every result, so that the softmax is the same.
#pragma once

#include "cpu/amx_tiles.h"
#include "cpu/tasks.h"
#include "cpu/tile_product.h"

namespace jattn::cpu {
namespace {

template <typename Element>
class AmxForwardProducts {
 public:
  static constexpr int64_t kPanel = kPanelRows[static_cast<int>(kDType<Element>)];
  static constexpr int64_t kPlanes = kAmxPlanes<Element>;

  // Layout of packed tiles: keys as rows [planes][kTile][row_len] and, with several planes, a word with a bit for each
  // that is not finite; values transposed [planes][row_len_v][kTile].
  template <typename Row>
  static void pack_keys(const ForwardPlan& plan, const Problem& problem, int64_t count, const Row& row, float* keys) {
    BFloat16* rows = reinterpret_cast<BFloat16*>(keys);
    const uint64_t not_finite = copy_rows<Element>(count, row, problem.head_dim, rows, plan.row_len);
    if constexpr (kPlanes > 1) memcpy(rows + kPlanes * kTile * plan.row_len, &not_finite, sizeof(not_finite));
  }
  // Returns a bit for each row that is not finite.
  template <typename Row>
  static uint64_t pack_values(const ForwardPlan& plan, const Problem& problem, int64_t count, const Row& row,
                              float* values, Workspace workspace) {
    BFloat16* rows = workspace.take<BFloat16>(kPlanes * kTile * plan.row_len_v);
    BFloat16* pairs = workspace.take<BFloat16>(kPlanes * kTile * plan.row_len_v);
    const uint64_t not_finite = copy_rows<Element>(count, row, problem.head_dim_v, rows, plan.row_len_v);
    transpose_rows<kPlanes>(rows, plan.row_len_v, pairs, reinterpret_cast<BFloat16*>(values));
    return not_finite;
  }
  static int64_t pack_bytes(const ForwardPlan& plan) {
    return 2 * Workspace::bytes<BFloat16>(kPlanes * kTile * plan.row_len_v);
  }

  static int64_t workspace_bytes(const ForwardPlan& plan) {
    return 2 * Workspace::bytes<BFloat16>(kPlanes * kTile * plan.row_len) +
           Workspace::bytes<BFloat16>(kPlanes * kTile * plan.row_len_v) +
           Workspace::bytes<BFloat16>(kPlanes * kTile * kTile) +
           (kPlanes > 1 ? 2 * Workspace::bytes<float>(kTile * plan.row_len) : 0);
  }

  AmxForwardProducts(const Problem& problem, const ForwardPlan& plan, Workspace& workspace)
      : head_dim_(problem.head_dim),
        row_len_(plan.row_len),
        row_len_v_(plan.row_len_v),
        q_rows_(workspace.take<BFloat16>(kPlanes * kTile * plan.row_len)),
        q_pairs_(workspace.take<BFloat16>(kPlanes * kTile * plan.row_len)),
        finite_values_(workspace.take<BFloat16>(kPlanes * kTile * plan.row_len_v)),
        p_pairs_(workspace.take<BFloat16>(kPlanes * kTile * kTile)) {
    if constexpr (kPlanes > 1) {
      q_lanes_ = workspace.take<float>(kTile * row_len_);
      key_rows_ = workspace.take<float>(kTile * row_len_);
    }
  }

  // Takes row(i) for i < count as the queries, times `sign`.
  template <typename Row>
  void set_queries(int64_t count, float sign, const Row& row) {
    has_finite_queries_ = copy_rows<Element>(count, row, head_dim_, q_rows_, row_len_) == 0;
    if (sign < 0) {
      for (int64_t i = 0; i < kPlanes * kTile * row_len_; ++i) q_rows_[i].bits ^= 0x8000;
    }
    transpose_to_pairs<kPlanes>(q_rows_, kPanel, row_len_, q_pairs_);
  }

  // scores[key * kPanel + lane] = k . q
  void multiply_keys(int64_t count, const float* keys, int64_t lanes, float* scores) const {
    if constexpr (kPlanes > 1) {
      uint64_t not_finite;
      memcpy(&not_finite, reinterpret_cast<const BFloat16*>(keys) + kPlanes * kTile * row_len_, sizeof(not_finite));
      if (not_finite != 0 || !has_finite_queries_) {
        join_rows<kPlanes>(reinterpret_cast<const BFloat16*>(keys), row_len_, key_rows_);
        join_pairs<kPlanes>(q_pairs_, kPanel, row_len_, q_lanes_);
        return multiply<false, float>(count, lanes, head_dim_, {key_rows_, row_len_, 1}, {q_lanes_, kPanel},
                                      {scores, kPanel});
      }
    }
    amx_multiply<kPlanes, false>(count, lanes, row_len_,
                                 {reinterpret_cast<const BFloat16*>(keys), row_len_, kTile * row_len_},
                                 {q_pairs_, 2 * kPanel, kPanel * row_len_}, {scores, kPanel});
  }

  static constexpr bool kFused = true;
  static constexpr bool kShortExp2 = kPlanes < 3;  // rounds probabilities to 16 bits
  static constexpr bool kReadsScores = false;
  void start_probabilities(int64_t count) {
    if (count < kTile) clear(p_pairs_, kPlanes * kTile * kPanel);
  }
  void take_probabilities(int64_t key, int64_t lane, Vec<float> even, Vec<float> odd) {
    store_pairs<kPlanes>(even, odd, p_pairs_ + key * kPanel + 2 * lane, kTile * kPanel);
  }

  // out[d * kPanel + lane] += sum over keys of v * p, leaving out the keys in `excluded`.
  void add_values(int64_t count, const float* values, int64_t lanes, const float*, uint64_t excluded,
                  float* out) const {
    const BFloat16* v_columns = reinterpret_cast<const BFloat16*>(values);
    if (excluded != 0) {
      copy_without_columns(v_columns, kPlanes * row_len_v_, excluded, finite_values_);
      v_columns = finite_values_;
    }
    amx_multiply<kPlanes, true>(row_len_v_, lanes, count, {v_columns, kTile, kTile * row_len_v_},
                                {p_pairs_, 2 * kPanel, kTile * kPanel}, {out, kPanel});
  }

 private:
  AmxSession session_;
  bool has_finite_queries_ = true;
  int64_t head_dim_, row_len_, row_len_v_;
  BFloat16 *q_rows_, *q_pairs_;  // per plane [kTile][row_len], [row_len / 2][kPanel][2]
  BFloat16* finite_values_;      // per plane [row_len_v][kTile]
  BFloat16* p_pairs_;            // per plane [kTile / 2][kPanel][2]
  // With several planes, for tiles that the vectors multiply: [row_len][kPanel], [kTile][row_len].
  float *q_lanes_ = nullptr, *key_rows_ = nullptr;
};

}  // namespace
}  // namespace jattn::cpu
