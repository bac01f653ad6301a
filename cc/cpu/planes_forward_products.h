// The two products of the forward pass on the matrix unit, for float16 and float32. P is rounded to 16 bits for
// float16.
//
// As in ForwardProducts the queries are the columns of every result, so that the softmax is the same.
#pragma once

#include "cpu/planes.h"
#include "cpu/sliced_softmax.h"
#include "cpu/tasks.h"

namespace jattn::cpu {
namespace {

template <typename Element>
class PlanesForwardProducts {
 public:
  static constexpr int64_t kPanel = kPanelRows[static_cast<int>(kDType<Element>)];
  static constexpr int64_t kPlanes = kPlanesOf<Element>;

  // Layout of packed tiles: keys, the left operand of the first product, and a word with a bit for each that is not
  // finite, or huge; values, the left operand of the second.
  template <typename Row>
  static void pack_keys(const ForwardPlan& plan, const Problem& problem, int64_t count, const Row& row, float* keys) {
    BFloat16* to = reinterpret_cast<BFloat16*>(keys);
    const uint64_t exact_rows = pack_left_rows<Element>(count, row, problem.head_dim, plan.row_len, to);
    memcpy(to + operand_len<kPlanes>(kTile, plan.row_len), &exact_rows, sizeof(exact_rows));
  }
  // Returns a bit for each row that is not finite, or huge.
  template <typename Row>
  static uint64_t pack_values(const ForwardPlan& plan, const Problem& problem, int64_t count, const Row& row,
                              float* values, Workspace) {
    return pack_left_columns<Element>(count, row, problem.head_dim_v, plan.row_len_v,
                                      reinterpret_cast<BFloat16*>(values));
  }
  static int64_t pack_bytes(const ForwardPlan&) { return 0; }

  static int64_t workspace_bytes(const ForwardPlan& plan) {
    return Workspace::bytes<BFloat16>(operand_len<kPlanes>(kPanel, plan.row_len)) +
           Workspace::bytes<BFloat16>(operand_len<kPlanes>(plan.row_len_v, kTile)) +
           Workspace::bytes<BFloat16>(operand_len<kPlanes>(kPanel, kTile)) +
           Workspace::bytes<float>(kPanel * plan.row_len) + Workspace::bytes<float>(kTile * plan.row_len) +
           Workspace::bytes<float>(kTile * kPanel);
  }

  PlanesForwardProducts(const Problem& problem, const ForwardPlan& plan, Workspace& workspace)
      : head_dim_(problem.head_dim),
        row_len_(plan.row_len),
        row_len_v_(plan.row_len_v),
        queries_(workspace.take<BFloat16>(operand_len<kPlanes>(kPanel, row_len_))),
        finite_values_(workspace.take<BFloat16>(operand_len<kPlanes>(row_len_v_, kTile))),
        p_(workspace.take<BFloat16>(operand_len<kPlanes>(kPanel, kTile))),
        q_lanes_(workspace.take<float>(kPanel * row_len_)),
        key_rows_(workspace.take<float>(kTile * row_len_)),
        exact_scores_(workspace.take<float>(kTile * kPanel)) {}

  // Takes row(i) for i < count as the queries, times `sign`.
  template <typename Row>
  void set_queries(int64_t count, float sign, const Row& row) {
    exact_queries_ = pack_right_rows<Element>(kPanel, count, row, head_dim_, row_len_, queries_);
    if (sign < 0) {
      for (int64_t i = 0; i < operand_len<kPlanes>(kPanel, row_len_); ++i) queries_[i].bits ^= 0x8000;
    }
  }

  // scores[key * kPanel + lane] = k . q
  void multiply_keys(int64_t count, const float* keys, int64_t lanes, float* scores) const {
    const BFloat16* operand = reinterpret_cast<const BFloat16*>(keys);
    multiply_planes<kPlanes, false>(count, lanes, row_len_, {operand, row_len_}, {queries_, row_len_},
                                    {scores, kPanel});
    if ((exact_keys(operand) | exact_queries_) != 0) {
      join_left_rows<kPlanes>(operand, row_len_, key_rows_);
      join_right_rows<kPlanes>(queries_, kPanel, row_len_, q_lanes_);
      multiply<false, float>(count, lanes, head_dim_, {key_rows_, row_len_, 1}, {q_lanes_, kPanel},
                             {exact_scores_, kPanel});
      take_exact(count, lanes, exact_keys(operand), exact_queries_, exact_scores_, scores, kPanel);
    }
  }

  // The same, and at the same time the probabilities of the tile before, which is full and has no masks: those of
  // `softmax` as take_probabilities takes them. Returns whether both are done; otherwise neither need be.
  static constexpr bool kOnVectors = false;
  static constexpr bool kInterleaves = true;
  static constexpr int64_t kMostRunTiles = 0;
  static constexpr int64_t kPackedTogether = kTile;
  using Softmax = SlicedSoftmax<(kPlanes < 3), kPanel>;
  bool multiply_keys_beside(Softmax& softmax, int64_t count, const float* keys, float* scores) {
    const BFloat16* operand = reinterpret_cast<const BFloat16*>(keys);
    if ((exact_keys(operand) | exact_queries_) != 0 || !softmax.can_start()) return false;
    const auto work = [&](int64_t slice) __attribute__((always_inline)) {
      softmax.slice(slice, [&](int64_t key, int64_t lane, Vec<float> even, Vec<float> odd)
                               __attribute__((always_inline)) { take_probabilities(key, lane, even, odd); });
    };
    multiply_planes<kPlanes, false>(count, kPanel, row_len_, {operand, row_len_}, {queries_, row_len_},
                                    {scores, kPanel},
                                    BesideProduct<Softmax::kSlices, decltype(work)>(count, kPanel, row_len_, work));
    return true;
  }

  static constexpr bool kFused = true;
  static constexpr bool kShortExp2 = kPlanes < 3;  // rounds probabilities to 16 bits
  static constexpr bool kReadsScores = false;
  void start_probabilities(int64_t count) {
    if (count < kTile) clear(p_, operand_len<kPlanes>(kPanel, kTile));
  }
  __attribute__((always_inline)) void take_probabilities(int64_t key, int64_t lane, Vec<float> even, Vec<float> odd) {
    store_right_pair<kPlanes>(cut_planes<kPlanes>(even), cut_planes<kPlanes>(odd), key, lane, p_);
  }

  // out[d * kPanel + lane] += sum over keys of v * p, leaving out the keys in `excluded`.
  void add_values(int64_t count, const float* values, int64_t lanes, const float*, uint64_t excluded,
                  float* out) const {
    const BFloat16* operand = reinterpret_cast<const BFloat16*>(values);
    if (excluded != 0) {
      copy_left_columns_without<kPlanes>(operand, row_len_v_, excluded, finite_values_);
      operand = finite_values_;
    }
    multiply_planes<kPlanes, true>(row_len_v_, lanes, count, {operand, kTile}, {p_, kTile}, {out, kPanel});
  }

 private:
  // Of a packed tile.
  uint64_t exact_keys(const BFloat16* keys) const {
    uint64_t exact_rows;
    memcpy(&exact_rows, keys + operand_len<kPlanes>(kTile, row_len_), sizeof(exact_rows));
    return exact_rows;
  }

  AmxSession session_;
  uint64_t exact_queries_ = 0;  // a bit for each whose scores the vectors compute
  int64_t head_dim_, row_len_, row_len_v_;
  BFloat16* queries_;  // the right operand of the first product
  BFloat16* finite_values_;
  BFloat16* p_;  // the right operand of the second
  // For what the vectors multiply: [row_len][kPanel], [kTile][row_len], [kTile][kPanel].
  float *q_lanes_, *key_rows_, *exact_scores_;
};

}  // namespace
}  // namespace jattn::cpu
