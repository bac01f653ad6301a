// The five products of the backward pass on vectors: s = Q K^T, dp = dout V^T, dv += P^T dout, dk += dS^T Q,
// dq += dS K.
//
// Keys lie in the vector lanes: K and V are transposed once per task, tiles of Q and dout are read as they are.
#pragma once

#include "cpu/band_cells.h"
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

  // Takes the tile of keys and values of a task; dk and dv begin anew. Returns a bit for each key that is not finite.
  template <typename KeyRow, typename ValueRow>
  uint64_t set_keys_and_values(int64_t count, const KeyRow& key_row, const ValueRow& value_row) {
    const uint64_t not_finite = widen_rows<Element>(count, key_row, head_dim_, keys_, row_len_);
    clear(keys_ + count * row_len_, (most_keys_ - count) * row_len_);
    transpose(keys_, row_len_, most_keys_, row_len_, k_lanes_, kTile);
    widen_to_lanes<Element>(count, value_row, head_dim_v_, Acc{1}, v_lanes_, kTile);
    starts_dk_ = starts_dv_ = true;
    return not_finite;
  }

  static constexpr bool kLeavesOutCells = true;
  static constexpr bool kInterleaves = false;
  static constexpr bool kWholeTiles = false;    // are read and written, whatever the number of queries and keys
  static constexpr bool kSplitsValues = false;  // into planes

  // Takes a packed tile.
  void set_queries(const Acc* queries, const Acc* douts, uint64_t) {
    queries_ = queries;
    douts_ = douts;
  }

  // s[query * kTile + key] = q . k and dp[query * kTile + key] = dout . v. With `cells` those without a visible pair
  // are left out: they stay what they are here, and below p and ds are 0 there.
  void multiply_queries(int64_t queries, int64_t keys, const BandCells* cells, Acc* s) const {
    multiply_rows(queries, keys, cells, {queries_, row_len_, 1}, head_dim_, k_lanes_, s);
  }
  void multiply_douts(int64_t queries, int64_t keys, const BandCells* cells, Acc* dp) const {
    multiply_rows(queries, keys, cells, {douts_, row_len_v_, 1}, head_dim_v_, v_lanes_, dp);
  }

  // The queries, or keys, in `excluded` are left out of the sum.
  void add_dv(int64_t queries, int64_t keys, const BandCells* cells, const Acc* p, uint64_t excluded) {
    add_rows(queries, keys, cells, p, excluded, {douts_, row_len_v_}, head_dim_v_, starts_dv_, dv_);
  }
  void add_dk(int64_t queries, int64_t keys, const BandCells* cells, const Acc* ds, uint64_t excluded) {
    add_rows(queries, keys, cells, ds, excluded, {queries_, row_len_}, head_dim_, starts_dk_, dk_);
  }
  void add_dq(int64_t queries, int64_t keys, const BandCells* cells, const Acc* ds, uint64_t excluded, Acc* dq) const {
    const auto add = [&](IndexRange of_queries, IndexRange of_keys) {
      multiply<true, Acc>(of_queries.count(), lanes(head_dim_), of_keys.count(),
                          {ds + of_queries.first * kTile + of_keys.first, kTile, 1},
                          {keys_ + of_keys.first * row_len_, row_len_}, {dq + of_queries.first * row_len_, row_len_});
    };
    if (cells == nullptr) {
      for_runs(keys, excluded, [&](int64_t first, int64_t count) { add({0, queries}, {first, first + count}); });
      return;
    }
    for (int64_t first = 0; first < queries; first += kCell) {
      add({first, min_of(first + kCell, queries)}, cells->keys[first / kCell]);
    }
  }

  // dk and dv are complete after this; 0 from key `keys` on, as far as there are keys.
  void finish(int64_t keys) {
    const auto clear_rest = [&](bool starts, int64_t row_len, Acc* sums) {
      const int64_t first = starts ? 0 : keys;
      clear(sums + first * row_len, (most_keys_ - first) * row_len);
    };
    clear_rest(starts_dk_, row_len_, dk_);
    clear_rest(starts_dv_, row_len_v_, dv_);
  }
  Acc* dk() { return dk_; }  // [kTile][row_len]
  Acc* dv() { return dv_; }  // [kTile][row_len_v]

 private:
  static int64_t lanes(int64_t count) { return round_up(count, kWidth<Acc>); }

  // Rows of queries or dout times K^T or V^T.
  void multiply_rows(int64_t queries, int64_t keys, const BandCells* cells, LeftTile<Acc> rows, int64_t inner,
                     const Acc* key_lanes, Acc* to) const {
    const auto multiply_part = [&](IndexRange of_queries, IndexRange of_lanes) {
      const Acc* left = rows.data + of_queries.first * rows.row_stride;
      multiply<false, Acc>(of_queries.count(), of_lanes.count(), inner, {left, rows.row_stride, rows.inner_stride},
                           {key_lanes + of_lanes.first, kTile},
                           {to + of_queries.first * kTile + of_lanes.first, kTile});
    };
    if (cells == nullptr) return multiply_part({0, queries}, {0, lanes(keys)});
    for (int64_t first = 0; first < queries; first += kCell) {
      const IndexRange& seen = cells->keys[first / kCell];
      multiply_part({first, min_of(first + kCell, queries)}, {seen.first / kCell * kCell, lanes(seen.end)});
    }
  }

  // sums[key] += sum over queries of weights[query][key] * rows[query]. `starts`: nothing has been added to the sums
  // yet.
  void add_rows(int64_t queries, int64_t keys, const BandCells* cells, const Acc* weights, uint64_t excluded,
                RightTile<Acc> rows, int64_t row_size, bool& starts, Acc* sums) const {
    if (starts && excluded != 0) {
      clear(sums, most_keys_ * rows.stride);
      starts = false;
    }
    const auto add = [&](IndexRange of_queries, IndexRange of_keys) {
      const LeftTile<Acc> left{weights + of_queries.first * kTile + of_keys.first, 1, kTile};
      const RightTile<Acc> right{rows.data + of_queries.first * rows.stride, rows.stride};
      const ResultTile<Acc> result{sums + of_keys.first * rows.stride, rows.stride};
      if (starts) {
        multiply<false, Acc>(of_keys.count(), lanes(row_size), of_queries.count(), left, right, result);
      } else {
        multiply<true, Acc>(of_keys.count(), lanes(row_size), of_queries.count(), left, right, result);
      }
    };
    if (cells == nullptr) {
      for_runs(queries, excluded, [&](int64_t first, int64_t count) { add({first, first + count}, {0, keys}); });
    } else {
      for (int64_t key = 0; key < keys; key += kCell) {
        const IndexRange of_keys{key, min_of(key + kCell, keys)}, seeing = cells->queries_of(of_keys);
        add({seeing.first, min_of(seeing.end, queries)}, of_keys);
      }
    }
    starts = false;
  }

  int64_t head_dim_, head_dim_v_, row_len_, row_len_v_;
  int64_t most_keys_;                                // of a tile, padded: all of it but where sequences are short
  Acc *keys_, *k_lanes_, *v_lanes_;                  // [kTile][row_len], [row_len][kTile], [row_len_v][kTile]
  const Acc *queries_ = nullptr, *douts_ = nullptr;  // [kTile][row_len], [kTile][row_len_v]
  Acc *dk_, *dv_;
  bool starts_dk_ = true, starts_dv_ = true;  // nothing has been added to them
};

}  // namespace
}  // namespace jattn::cpu
