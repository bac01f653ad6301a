// The five products of the backward pass on vectors: s = Q K^T, dp = dout V^T, dv += P^T dout, dk += dS^T Q,
// dq += dS K.
//
// Keys lie in the vector lanes: K and V are transposed once per task, tiles of Q and dout are read as they are.
#pragma once

#include "cpu/convert.h"
#include "cpu/tasks.h"
#include "cpu/tile_product.h"

namespace jattn::cpu {
namespace {

template <typename Element>
class BackwardProducts {
 public:
  using Acc = Accumulator<Element>;
  static constexpr bool kFusesSoftmax = false;

  // Layout of packed tiles: rows of the accumulator type. Returns a bit for each row where either is not finite.
  template <typename QueryRow, typename DoutRow>
  static uint64_t pack_queries(const BackwardPlan& plan, const Problem& problem, int64_t count,
                               const QueryRow& query_row, const DoutRow& dout_row, Acc* queries, Acc* douts,
                               Workspace) {
    return widen_rows<Element>(count, query_row, problem.head_dim, queries, plan.row_len) |
           widen_rows<Element>(count, dout_row, problem.head_dim_v, douts, plan.row_len_v);
  }

  static int64_t pack_bytes(const BackwardPlan&) { return 0; }

  static int64_t workspace_bytes(const BackwardPlan& plan) {
    return 3 * Workspace::bytes<Acc>(kTile * plan.row_len) + 2 * Workspace::bytes<Acc>(kTile * plan.row_len_v);
  }

  BackwardProducts(const Problem& problem, const BackwardPlan& plan, Workspace& workspace)
      : head_dim_(problem.head_dim),
        head_dim_v_(problem.head_dim_v),
        row_len_(plan.row_len),
        row_len_v_(plan.row_len_v),
        most_keys_(min_of(kTile, lanes(problem.kv_len))),
        keys_(workspace.take<Acc>(kTile * row_len_)),
        k_lanes_(workspace.take<Acc>(kTile * row_len_)),
        v_lanes_(workspace.take<Acc>(kTile * row_len_v_)),
        dk_(workspace.take<Acc>(kTile * row_len_)),
        dv_(workspace.take<Acc>(kTile * row_len_v_)) {}

  // Takes the tile of keys and values of a task; dk and dv become 0. Returns a bit for each key that is not finite.
  template <typename KeyRow, typename ValueRow>
  uint64_t set_keys_and_values(int64_t count, const KeyRow& key_row, const ValueRow& value_row) {
    clear(keys_, most_keys_ * row_len_);
    const uint64_t not_finite = widen_rows<Element>(count, key_row, head_dim_, keys_, row_len_);
    Acc* values = dv_;  // not in use yet
    clear(values, most_keys_ * row_len_v_);
    widen_rows<Element>(count, value_row, head_dim_v_, values, row_len_v_);
    transpose(keys_, row_len_, most_keys_, row_len_, k_lanes_, kTile);
    transpose(values, row_len_v_, most_keys_, row_len_v_, v_lanes_, kTile);
    clear(dk_, most_keys_ * row_len_);
    clear(dv_, most_keys_ * row_len_v_);
    return not_finite;
  }

  static constexpr bool kInterleaves = false;
  static constexpr bool kWholeTiles = false;    // are read and written, whatever the number of queries and keys
  static constexpr bool kSplitsValues = false;  // into planes

  // Takes a packed tile.
  void set_queries(const Acc* queries, const Acc* douts, uint64_t) {
    queries_ = queries;
    douts_ = douts;
  }

  // s[query * kTile + key] = q . k and dp[query * kTile + key] = dout . v
  void multiply_queries(int64_t queries, int64_t keys, Acc* s) const {
    multiply<false, Acc>(queries, lanes(keys), head_dim_, {queries_, row_len_, 1}, {k_lanes_, kTile}, {s, kTile});
  }
  void multiply_douts(int64_t queries, int64_t keys, Acc* dp) const {
    multiply<false, Acc>(queries, lanes(keys), head_dim_v_, {douts_, row_len_v_, 1}, {v_lanes_, kTile}, {dp, kTile});
  }

  // The queries, or keys, in `excluded` are left out of the sum.
  void add_dv(int64_t queries, int64_t keys, const Acc* p, uint64_t excluded) {
    for_runs(queries, excluded, [&](int64_t first, int64_t count) {
      multiply<true, Acc>(keys, lanes(head_dim_v_), count, {p + first * kTile, 1, kTile},
                          {douts_ + first * row_len_v_, row_len_v_}, {dv_, row_len_v_});
    });
  }
  void add_dk(int64_t queries, int64_t keys, const Acc* ds, uint64_t excluded) {
    for_runs(queries, excluded, [&](int64_t first, int64_t count) {
      multiply<true, Acc>(keys, lanes(head_dim_), count, {ds + first * kTile, 1, kTile},
                          {queries_ + first * row_len_, row_len_}, {dk_, row_len_});
    });
  }
  void add_dq(int64_t queries, int64_t keys, const Acc* ds, uint64_t excluded, Acc* dq) const {
    for_runs(keys, excluded, [&](int64_t first, int64_t count) {
      multiply<true, Acc>(queries, lanes(head_dim_), count, {ds + first, kTile, 1},
                          {keys_ + first * row_len_, row_len_}, {dq, row_len_});
    });
  }

  // dk and dv are complete after this; 0 from key `keys` on, as far as there are keys.
  void finish(int64_t) {}
  Acc* dk() { return dk_; }  // [kTile][row_len]
  Acc* dv() { return dv_; }  // [kTile][row_len_v]

 private:
  static int64_t lanes(int64_t count) { return round_up(count, kWidth<Acc>); }

  int64_t head_dim_, head_dim_v_, row_len_, row_len_v_;
  int64_t most_keys_;                                // of a tile, padded: all of it but where sequences are short
  Acc *keys_, *k_lanes_, *v_lanes_;                  // [kTile][row_len], [row_len][kTile], [row_len_v][kTile]
  const Acc *queries_ = nullptr, *douts_ = nullptr;  // [kTile][row_len], [kTile][row_len_v]
  Acc *dk_, *dv_;
};

}  // namespace
}  // namespace jattn::cpu
