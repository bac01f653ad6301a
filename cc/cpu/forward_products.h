// The two products of the forward pass on vectors: scores = K Q^T and out^T += V^T P^T.
//
// Queries lie in the vector lanes: Q is transposed once per task, rows of K and V are read as they are, one scalar at
// a time, and maximum, sum and rescaling of a query row are plain vector operations without any reduction.
#pragma once

#include "cpu/band_cells.h"
#include "cpu/convert.h"
#include "cpu/tasks.h"
#include "cpu/tile_product.h"

namespace jattn::cpu {
namespace {

template <typename Element>
class ForwardProducts {
 public:
  using Acc = Accumulator<Element>;
  static constexpr int64_t kPanel = kPanelRows[static_cast<int>(kDType<Element>)];

  // Layout of packed tiles: rows of the accumulator type, or micropanels of the rows of K and V^T.
  static bool is_in_micropanels(const ForwardPlan& plan) { return kHasMicropanels && plan.packs_micropanels; }
  template <typename Row>
  static void pack_keys(const ForwardPlan& plan, const Problem& problem, int64_t count, const Row& row, Acc* keys) {
    if (is_in_micropanels(plan)) {
      pack_micropanels<Element>(count, row, problem.head_dim, keys, plan.row_len);
    } else {
      widen_rows<Element>(count, row, problem.head_dim, keys, plan.row_len);
    }
  }
  // Returns a bit for each row that is not finite.
  template <typename Row>
  static uint64_t pack_values(const ForwardPlan& plan, const Problem& problem, int64_t count, const Row& row,
                              Acc* values, Workspace) {
    return is_in_micropanels(plan) ? pack_transposed_micropanels<Element>(count, row, problem.head_dim_v, values, kTile)
                                   : widen_rows<Element>(count, row, problem.head_dim_v, values, plan.row_len_v);
  }

  static int64_t pack_bytes(const ForwardPlan&) { return 0; }

  static int64_t workspace_bytes(const ForwardPlan& plan) { return Workspace::bytes<Acc>(kTile * plan.row_len); }

  ForwardProducts(const Problem& problem, const ForwardPlan& plan, Workspace& workspace)
      : head_dim_(problem.head_dim),
        head_dim_v_(problem.head_dim_v),
        row_len_(plan.row_len),
        row_len_v_(plan.row_len_v),
        in_micropanels_(is_in_micropanels(plan)),
        q_lanes_(workspace.take<Acc>(kTile * plan.row_len)) {}

  // Takes row(i) for i < count as the queries, times `sign`.
  template <typename Row>
  void set_queries(int64_t count, Acc sign, const Row& row) {
    widen_to_lanes<Element>(count, row, head_dim_, sign, q_lanes_, kPanel);
  }

  // scores[key * kPanel + lane] = k . q
  void multiply_keys(int64_t count, const Acc* keys, int64_t lanes, Acc* scores) const {
    multiply_some_keys({0, count}, keys, {0, lanes}, scores);
  }

  // The same but for cells without a visible pair, whose scores stay what they are.
  void multiply_keys(int64_t count, const BandCells& cells, const Acc* keys, int64_t lanes, Acc* scores) const {
    for (int64_t key = 0; key < count; key += kCell) {
      const IndexRange rows{key, min_of(key + kCell, count)}, queries = cells.queries_of(rows);
      multiply_some_keys(rows, keys, {queries.first, min_of(queries.end, lanes)}, scores);
    }
  }

  // Probabilities are read where the softmax leaves them.
  static constexpr bool kOnVectors = true;
  static constexpr bool kInterleaves = false;
  static constexpr bool kFused = false;
  static constexpr bool kShortExp2 = false;  // rounds probabilities to 16 bits
  static constexpr bool kReadsScores = true;
  static constexpr int64_t kMostRunTiles = 0;
  // Rows that can be packed and multiplied before the next are, and where row `row` begins.
  static constexpr int64_t kPackedTogether = 2 * kBlockRows;
  static Acc* packed_row(Acc* tile, int64_t row, int64_t row_len) { return tile + row * row_len; }
  void start_probabilities(int64_t) {}
  void take_probabilities(int64_t, int64_t, Vec<Acc>, Vec<Acc>) {}

  // out[d * kPanel + lane] += sum over keys of v * p, leaving out the keys in `excluded`; `starts`: the sum is stored.
  void add_values(int64_t count, const Acc* values, int64_t lanes, const Acc* p, uint64_t excluded, bool starts,
                  Acc* out) const {
    if (starts && excluded != 0) {
      clear(out, head_dim_v_ * kPanel);
      starts = false;
    }
    for_runs(count, excluded, [&](int64_t first, int64_t length) {
      add_values_of({first, first + length}, values, {0, lanes}, p, starts, out);
    });
  }
  // The same where p is 0 in cells without a visible pair.
  void add_values(const BandCells& cells, const Acc* values, int64_t lanes, const Acc* p, bool starts, Acc* out) const {
    // Sums of fewer lanes would leave multiply-adds waiting for each other.
    constexpr int64_t kLanes = max_of(kCell, 2 * kWidth<Acc>);
    for (int64_t lane = 0; lane < lanes; lane += kLanes) {
      const IndexRange queries{lane, min_of(lane + kLanes, lanes)};
      const IndexRange keys{cells.keys[lane / kCell].first, cells.keys[(queries.end - 1) / kCell].end};
      add_values_of(keys, values, queries, p, starts, out);
    }
  }

 private:
  static_assert(kCell % kMicropanelGroup == 0);

  void multiply_some_keys(IndexRange rows, const Acc* keys, IndexRange queries, Acc* scores) const {
    const RightTile<Acc> right{q_lanes_ + queries.first, kPanel};
    const ResultTile<Acc> result{scores + rows.first * kPanel + queries.first, kPanel};
    if (in_micropanels_) {
      multiply_micropanels<false, Acc>(rows, queries.count(), {0, head_dim_}, {keys, row_len_}, right, result);
    } else {
      multiply<false, Acc>(rows.count(), queries.count(), head_dim_, {keys + rows.first * row_len_, row_len_, 1}, right,
                           result);
    }
  }

  void add_values_of(IndexRange keys, const Acc* values, IndexRange queries, const Acc* p, bool starts,
                     Acc* out) const {
    const LeftTile<Acc> left{values + keys.first * row_len_v_, 1, row_len_v_};
    const RightTile<Acc> right{p + keys.first * kPanel + queries.first, kPanel};
    const ResultTile<Acc> result{out + queries.first, kPanel};
    const auto add = [&](auto adds) {
      if (in_micropanels_) {
        multiply_micropanels<adds(), Acc>({0, head_dim_v_}, queries.count(), keys, {values, kTile}, right, result);
      } else {
        multiply<adds(), Acc>(head_dim_v_, queries.count(), keys.count(), left, right, result);
      }
    };
    starts ? add(std::false_type()) : add(std::true_type());
  }

  int64_t head_dim_, head_dim_v_, row_len_, row_len_v_;
  bool in_micropanels_;
  Acc* q_lanes_;  // [row_len][kPanel]
};

}  // namespace
}  // namespace jattn::cpu
