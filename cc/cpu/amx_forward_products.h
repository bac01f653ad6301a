// The two products of the forward pass on the matrix unit, for bfloat16. P is rounded to 8 bits.
//
// As in ForwardProducts the queries are the columns of every result, so that the softmax is the same.
#pragma once

#include "cpu/amx_forward_run.h"
#include "cpu/tasks.h"

namespace jattn::cpu {
namespace {

class AmxForwardProducts {
 public:
  static constexpr int64_t kPanel = kPanelRows[static_cast<int>(kDType<BFloat16>)];

  // Layout of packed tiles: keys as rows [kTile][row_len], values transposed [row_len_v][kTile].
  template <typename Row>
  static void pack_keys(const ForwardPlan& plan, const Problem& problem, int64_t count, const Row& row, float* keys) {
    copy_tile(count, row, problem.head_dim, reinterpret_cast<BFloat16*>(keys), plan.row_len);
  }
  // Returns a bit for each row that is not finite.
  template <typename Row>
  static uint64_t pack_values(const ForwardPlan& plan, const Problem& problem, int64_t count, const Row& row,
                              float* values, Workspace workspace) {
    BFloat16* rows = workspace.take<BFloat16>(kTile * plan.row_len_v);
    BFloat16* pairs = workspace.take<BFloat16>(kTile * plan.row_len_v);
    const uint64_t not_finite = copy_tile(count, row, problem.head_dim_v, rows, plan.row_len_v);
    transpose_rows(rows, plan.row_len_v, pairs, reinterpret_cast<BFloat16*>(values));
    return not_finite;
  }
  static int64_t pack_bytes(const ForwardPlan& plan) { return 2 * Workspace::bytes<BFloat16>(kTile * plan.row_len_v); }

  static int64_t workspace_bytes(const ForwardPlan& plan) {
    return 2 * Workspace::bytes<BFloat16>(kTile * plan.row_len) + Workspace::bytes<BFloat16>(kTile * plan.row_len_v) +
           Workspace::bytes<BFloat16>(kPairsLen) + Workspace::bytes<float>(kRingStripes * kStripeFloats);
  }

  AmxForwardProducts(const Problem& problem, const ForwardPlan& plan, Workspace& workspace)
      : head_dim_(problem.head_dim),
        row_len_(plan.row_len),
        row_len_v_(plan.row_len_v),
        q_rows_(workspace.take<BFloat16>(kTile * plan.row_len)),
        q_pairs_(workspace.take<BFloat16>(kTile * plan.row_len)),
        finite_values_(workspace.take<BFloat16>(kTile * plan.row_len_v)),
        p_pairs_(workspace.take<BFloat16>(kPairsLen)),
        ring_(workspace.take<float>(kRingStripes * kStripeFloats)) {}

  // Takes row(i) for i < count as the queries, times `sign`.
  template <typename Row>
  void set_queries(int64_t count, float sign, const Row& row) {
    transpose_queries(count, sign, row, head_dim_, q_rows_, row_len_, kPanel, q_pairs_);
  }

  // scores[key * kPanel + lane] = k . q
  void multiply_keys(int64_t count, const float* keys, int64_t lanes, float* scores) const {
    amx_multiply<false>(count, lanes, row_len_, {reinterpret_cast<const BFloat16*>(keys), row_len_},
                        {q_pairs_, 2 * kPanel}, {scores, kPanel});
  }

  static constexpr bool kOnVectors = false;
  static constexpr bool kInterleaves = false;
  static constexpr bool kFused = true;
  static constexpr bool kShortExp2 = true;  // rounds probabilities to 16 bits
  static constexpr bool kReadsScores = false;
  void start_probabilities(int64_t count) {
    if (count < kTile) clear(p_pairs_, kTile * kPanel);
  }
  void take_probabilities(int64_t key, int64_t lane, Vec<float> even, Vec<float> odd) {
    store(reinterpret_cast<uint32_t*>(p_pairs_ + key * kPanel + 2 * lane), round_to_pairs(even, odd));
  }

  // Tiles of keys that attend_run takes; 0: there is no such thing.
  static constexpr int64_t kMostRunTiles = kRunTiles;
  static constexpr int64_t kPackedTogether = kTile;

  // The whole forward pass over some tiles, of which only a band and lengths hide keys (amx_forward_run.h). `tile(i)`
  // has the packed tile i.
  template <typename Tile>
  bool attend_run(const QueryRows& rows, KeyRange keys, int64_t tiles, const Tile& tile, float log2_unit,
                  SoftmaxState<float, kPanel>& state, float* out) const {
    RunOperands<kPanel> operands{q_pairs_, row_len_, row_len_v_, (rows.count + kHalfLanes - 1) / kHalfLanes,
                                 {},       {},       tiles,      ring_,
                                 p_pairs_, out};
    for (int64_t i = 0; i < tiles; ++i) {
      operands.keys[i] = reinterpret_cast<const BFloat16*>(tile(i).keys);
      operands.values[i] = reinterpret_cast<const BFloat16*>(tile(i).values);
    }
    const RunBand<kPanel> band(rows, keys.first, keys.first + keys.count);
    return ForwardRun<kPanel>(operands, band, log2_unit, state).attend();
  }

  // out[d * kPanel + lane] += sum over keys of v * p, leaving out the keys in `excluded`.
  void add_values(int64_t count, const float* values, int64_t lanes, const float*, uint64_t excluded,
                  float* out) const {
    const BFloat16* v_columns = reinterpret_cast<const BFloat16*>(values);
    if (excluded != 0) {
      copy_without_columns(v_columns, row_len_v_, excluded, finite_values_);
      v_columns = finite_values_;
    }
    amx_multiply<true>(row_len_v_, lanes, count, {v_columns, kTile}, {p_pairs_, 2 * kPanel}, {out, kPanel});
  }

 private:
  static constexpr int64_t kPairsLen = kRunKeys * kPanel;

  AmxSession session_;
  int64_t head_dim_, row_len_, row_len_v_;
  BFloat16 *q_rows_, *q_pairs_;  // [kTile][row_len], [row_len / 2][kPanel][2]
  BFloat16* finite_values_;      // [row_len_v][kTile]
  BFloat16* p_pairs_;            // [kTile / 2][kPanel][2]
  float* ring_;
};

}  // namespace
}  // namespace jattn::cpu
