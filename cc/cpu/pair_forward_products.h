// The two products of the forward pass on pairs of bfloat16 in vectors (vdpbf16ps). P is rounded to 8 bits.
//
// As in ForwardProducts the queries are the columns of every result, so that the softmax is the same. The pairs of
// scores follow each other along the elements of a row, so K is read as it lies; those of the values along the keys.
#pragma once

#include "cpu/band_cells.h"
#include "cpu/pair_product.h"
#include "cpu/tasks.h"

namespace jattn::cpu {
namespace {

class PairForwardProducts {
 public:
  static constexpr int64_t kPanel = kPanelRows[static_cast<int>(kDType<BFloat16>)];

  // Layout of packed tiles: keys as rows [kTile][row_len], values as pairs of rows [kTile / 2][row_len_v][2].
  template <typename Row>
  static void pack_keys(const ForwardPlan& plan, const Problem& problem, int64_t count, const Row& row, float* keys) {
    copy_rows(count, row, problem.head_dim, reinterpret_cast<BFloat16*>(keys), plan.row_len);
  }
  // Returns a bit for each row that is not finite.
  template <typename Row>
  static uint64_t pack_values(const ForwardPlan& plan, const Problem& problem, int64_t count, const Row& row,
                              float* values, Workspace) {
    return copy_row_pairs(count, row, problem.head_dim_v, reinterpret_cast<BFloat16*>(values), plan.row_len_v);
  }
  static int64_t pack_bytes(const ForwardPlan&) { return 0; }

  // Rows that can be packed and multiplied before the next are, and where row `row`, an even one, begins.
  static constexpr int64_t kPackedTogether = 2 * kBlockRows;
  static float* packed_row(float* tile, int64_t row, int64_t row_len) { return tile + row / 2 * row_len; }

  static int64_t workspace_bytes(const ForwardPlan& plan) {
    return 2 * Workspace::bytes<BFloat16>(kTile * plan.row_len) + Workspace::bytes<BFloat16>(kTile * plan.row_len_v) +
           Workspace::bytes<BFloat16>(kTile * kPanel);
  }

  PairForwardProducts(const Problem& problem, const ForwardPlan& plan, Workspace& workspace)
      : head_dim_(problem.head_dim),
        head_dim_v_(problem.head_dim_v),
        row_len_(plan.row_len),
        row_len_v_(plan.row_len_v),
        q_rows_(workspace.take<BFloat16>(kTile * plan.row_len)),
        q_pairs_(workspace.take<BFloat16>(kTile * plan.row_len)),
        finite_values_(workspace.take<BFloat16>(kTile * plan.row_len_v)),
        p_pairs_(workspace.take<BFloat16>(kTile * kPanel)) {}

  // Takes row(i) for i < count as the queries, times `sign`.
  template <typename Row>
  void set_queries(int64_t count, float sign, const Row& row) {
    transpose_queries(count, sign, row, head_dim_, q_rows_, row_len_, kPanel, q_pairs_);
  }

  // scores[key * kPanel + lane] = k . q
  void multiply_keys(int64_t count, const float* keys, int64_t lanes, float* scores) const {
    multiply<false, BFloat16>(count, lanes, head_dim_, {reinterpret_cast<const BFloat16*>(keys), row_len_, 2},
                              {q_pairs_, 2 * kPanel}, {scores, kPanel});
  }

  // The same but for cells without a visible pair, whose scores stay what they are.
  void multiply_keys(int64_t count, const BandCells& cells, const float* keys, int64_t lanes, float* scores) const {
    for (int64_t key = 0; key < count; key += kCell) {
      const int64_t rows = min_of(kCell, count - key);
      const IndexRange queries = cells.queries_of({key, key + rows});
      multiply<false, BFloat16>(rows, min_of(queries.end, lanes) - queries.first, head_dim_,
                                {reinterpret_cast<const BFloat16*>(keys) + key * row_len_, row_len_, 2},
                                {q_pairs_ + 2 * queries.first, 2 * kPanel},
                                {scores + key * kPanel + queries.first, kPanel});
    }
  }

  static constexpr bool kOnVectors = true;
  static constexpr bool kInterleaves = false;
  static constexpr bool kFused = true;
  static constexpr bool kShortExp2 = true;  // rounds probabilities to 16 bits
  static constexpr bool kReadsScores = false;
  static constexpr int64_t kMostRunTiles = 0;
  void start_probabilities(int64_t) {}
  void take_probabilities(int64_t key, int64_t lane, Vec<float> even, Vec<float> odd) {
    store(reinterpret_cast<uint32_t*>(p_pairs_ + key * kPanel + 2 * lane), round_to_pairs(even, odd));
  }

  // out[d * kPanel + lane] += sum over keys of v * p, leaving out the keys in `excluded`; `starts`: the sum is stored.
  void add_values(int64_t count, const float* values, int64_t lanes, const float*, uint64_t excluded, bool starts,
                  float* out) const {
    const BFloat16* v_pairs = reinterpret_cast<const BFloat16*>(values);
    if (excluded != 0) {
      copy_pairs_without_rows(v_pairs, count, row_len_v_, excluded, finite_values_);
      v_pairs = finite_values_;
    }
    add_values_of({0, count}, v_pairs, {0, lanes}, starts, out);
  }
  // The same where p is 0 in cells without a visible pair.
  void add_values(const BandCells& cells, const float* values, int64_t lanes, const float*, bool starts,
                  float* out) const {
    constexpr int64_t kLanes = 2 * kWidth<float>;  // as in ForwardProducts
    for (int64_t lane = 0; lane < lanes; lane += kLanes) {
      const IndexRange queries{lane, min_of(lane + kLanes, lanes)};
      const int64_t first = cells.keys[lane / kCell].first / 2 * 2;  // of a pair
      add_values_of({first, cells.keys[(queries.end - 1) / kCell].end}, reinterpret_cast<const BFloat16*>(values),
                    queries, starts, out);
    }
  }

 private:
  void add_values_of(IndexRange keys, const BFloat16* v_pairs, IndexRange queries, bool starts, float* out) const {
    const LeftTile<BFloat16> left{v_pairs + keys.first * row_len_v_, 2, 2 * row_len_v_};
    const RightTile<BFloat16> right{p_pairs_ + keys.first * kPanel + 2 * queries.first, 2 * kPanel};
    const ResultTile<float> result{out + queries.first, kPanel};
    if (starts) {
      multiply<false, BFloat16>(head_dim_v_, queries.count(), keys.count(), left, right, result);
    } else {
      multiply<true, BFloat16>(head_dim_v_, queries.count(), keys.count(), left, right, result);
    }
  }

  int64_t head_dim_, head_dim_v_, row_len_, row_len_v_;
  BFloat16 *q_rows_, *q_pairs_;  // [kTile][row_len], [row_len / 2][kPanel][2]
  BFloat16* finite_values_;      // [kTile / 2][row_len_v][2]
  BFloat16* p_pairs_;            // [kTile / 2][kPanel][2]
};

}  // namespace
}  // namespace jattn::cpu
