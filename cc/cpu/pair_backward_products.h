// The five products of the backward pass on pairs of bfloat16, by the matrix unit or vdpbf16ps (`Unit`). P and dS are
// rounded to 8 bits.
//
// dk and dv are summed transposed: their left operands, Q and dout transposed, are packed once for all tasks, and P and
// dS need only be interleaved.
#pragma once

#include "cpu/band_cells.h"
#include "cpu/pair_layouts.h"
#include "cpu/scores.h"
#include "cpu/table_exp2.h"
#include "cpu/transposed_sum.h"

namespace jattn::cpu {
namespace {

template <typename Unit>
class PairBackwardProducts {
 public:
  // Layout of packed tiles: rows [kTile][row_len], then transposed [row_len][kTile]. Returns a bit for each row where
  // either is not finite.
  template <typename QueryRow, typename DoutRow>
  static uint64_t pack_queries(const BackwardPlan& plan, const Problem& problem, int64_t count,
                               const QueryRow& query_row, const DoutRow& dout_row, float* queries, float* douts,
                               Workspace workspace) {
    BFloat16* pairs = workspace.take<BFloat16>(kTile * max_of(plan.row_len, plan.row_len_v));
    const auto pack = [&](const auto& row, int64_t row_size, int64_t row_len, float* to) {
      BFloat16* rows = reinterpret_cast<BFloat16*>(to);
      const uint64_t not_finite = copy_tile(count, row, row_size, rows, row_len);
      transpose_rows(rows, row_len, pairs, rows + kTile * row_len);
      return not_finite;
    };
    return pack(query_row, problem.head_dim, plan.row_len, queries) |
           pack(dout_row, problem.head_dim_v, plan.row_len_v, douts);
  }
  static int64_t pack_bytes(const BackwardPlan& plan) {
    return Workspace::bytes<BFloat16>(kTile * max_of(plan.row_len, plan.row_len_v));
  }

  static int64_t workspace_bytes(const BackwardPlan& plan) {
    return 3 * Workspace::bytes<BFloat16>(kTile * plan.row_len) + Workspace::bytes<BFloat16>(kTile * plan.row_len_v) +
           TransposedSum::bytes(plan.row_len) + TransposedSum::bytes(plan.row_len_v) +
           2 * Workspace::bytes<BFloat16>(kTile * max_of(plan.row_len, plan.row_len_v)) +
           (2 * kMostWaiting + 1) * Workspace::bytes<BFloat16>(kTile * kTile);
  }

  PairBackwardProducts(const Problem& problem, const BackwardPlan& plan, Workspace& workspace)
      : head_dim_(problem.head_dim),
        head_dim_v_(problem.head_dim_v),
        row_len_(plan.row_len),
        row_len_v_(plan.row_len_v),
        k_rows_(workspace.take<BFloat16>(kTile * row_len_)),
        k_row_pairs_(workspace.take<BFloat16>(kTile * row_len_)),
        k_pairs_(workspace.take<BFloat16>(kTile * row_len_)),
        v_pairs_(workspace.take<BFloat16>(kTile * row_len_v_)),
        dk_(row_len_, workspace),
        dv_(row_len_v_, workspace),
        finite_(workspace.take<BFloat16>(kTile * max_of(row_len_, row_len_v_))),
        finite_pairs_(workspace.take<BFloat16>(kTile * max_of(row_len_, row_len_v_))),
        ds_rows_(workspace.take<BFloat16>(kTile * kTile)) {
    for (Waiting& tile : waiting_) {
      tile.pairs = workspace.take<BFloat16>(kTile * kTile);
      tile.ds_pairs = workspace.take<BFloat16>(kTile * kTile);
    }
  }

  // Takes the tile of keys and values of a task; dk and dv become 0. Returns a bit for each key that is not finite.
  template <typename KeyRow, typename ValueRow>
  uint64_t set_keys_and_values(int64_t count, const KeyRow& key_row, const ValueRow& value_row) {
    const uint64_t not_finite = copy_tile(count, key_row, head_dim_, k_rows_, row_len_);
    interleave_halves(k_rows_, row_len_, k_row_pairs_);
    transpose_to_pairs(k_rows_, kTile, row_len_, k_pairs_);
    copy_tile(count, value_row, head_dim_v_, finite_, row_len_v_);
    transpose_to_pairs(finite_, kTile, row_len_v_, v_pairs_);
    dk_.reset();
    dv_.reset();
    keys_ = count;
    num_waiting_ = 0;
    return not_finite;
  }

  static constexpr bool kLeavesOutCells = false;
  static constexpr bool kInterleaves = false;
  static constexpr bool kWholeTiles = true;
  static constexpr bool kSplitsValues = false;  // into planes

  // Takes a packed tile.
  void set_queries(const float* queries, const float* douts, uint64_t) {
    q_rows_ = reinterpret_cast<const BFloat16*>(queries);
    dout_rows_ = reinterpret_cast<const BFloat16*>(douts);
  }

  // s[query * kTile + key] = q . k and dp[query * kTile + key] = dout . v
  void multiply_queries(int64_t queries, int64_t keys, const BandCells*, float* s) const {
    multiply<false>(queries, keys, {head_dim_, {q_rows_, row_len_}, {k_pairs_, 2 * kTile}}, {s, kTile});
  }
  void multiply_douts(int64_t queries, int64_t keys, const BandCells*, float* dp) const {
    multiply<false>(queries, keys, {head_dim_v_, {dout_rows_, row_len_v_}, {v_pairs_, 2 * kTile}}, {dp, kTile});
  }

  // The queries, or keys, in `excluded` are left out of the sum.
  void add_dv(int64_t queries, int64_t keys, const BandCells*, const float* p, uint64_t excluded) {
    add_waiting();
    add_columns(queries, keys, p, excluded, dout_rows_ + kTile * row_len_v_, row_len_v_, dv_);
  }
  void add_dk(int64_t queries, int64_t keys, const BandCells*, const float* ds, uint64_t excluded) {
    add_waiting();
    add_columns(queries, keys, ds, excluded, q_rows_ + kTile * row_len_, row_len_, dk_);
  }
  void add_dq(int64_t queries, int64_t keys, const BandCells*, const float* ds, uint64_t excluded, float* dq) const {
    round_tile_to_halves(ds, queries, keys, ds_rows_);
    const BFloat16* k_row_pairs = k_row_pairs_;
    if (excluded != 0) {
      memcpy(finite_, k_rows_, static_cast<size_t>(kTile * row_len_) * sizeof(BFloat16));
      for (int64_t row = 0; row < kTile; ++row) {
        if (excluded >> row & 1) clear(finite_ + row * row_len_, row_len_);
      }
      interleave_halves(finite_, row_len_, finite_pairs_);
      k_row_pairs = finite_pairs_;
    }
    multiply<true>(queries, head_dim_, {round_up(keys, kHalvesLen), {ds_rows_, kTile}, {k_row_pairs, 2 * row_len_}},
                   {dq, row_len_});
  }

  // Whether find_p_and_ds and the two functions after it serve tiles of which only a band and lengths hide pairs.
  static constexpr bool kFusesSoftmax = true;

  // P = exp(scale * s - lse) and dS = scale * P * (dp - delta) where visible[query] has the bit of the key, else
  // exactly 0, straight into the operands of the products. Where every pair is visible `visible` may be null.
  void find_p_and_ds(int64_t queries, const float* s, const float* dp, const float* lse, const float* delta,
                     float scale, const uint64_t* visible) {
    if (visible == nullptr) {
      find_p_and_ds<false>(queries, s, dp, lse, delta, scale, visible);
    } else {
      find_p_and_ds<true>(queries, s, dp, lse, delta, scale, visible);
    }
  }
  // Adds them to dv and dk, together with those of tiles of queries after this one: the sums, 16 to 32 KiB each, are
  // loaded and stored once for all of them. The order of the sums is that of the tiles.
  void add_dv_and_dk(int64_t queries, bool wants_dv, bool wants_dk) {
    Waiting& tile = waiting_[num_waiting_++];
    tile.queries = queries;
    tile.q_columns = wants_dk ? q_rows_ + kTile * row_len_ : nullptr;
    tile.dout_columns = wants_dv ? dout_rows_ + kTile * row_len_v_ : nullptr;
    if (num_waiting_ == kMostWaiting) add_waiting();
  }
  // For several tiles of keys at once, products[i] with keys[i] of them: dq is loaded and stored once.
  template <int64_t kMost>
  static void add_dq(int64_t queries, const PairBackwardProducts* const (&products)[kMost],
                     const int64_t (&keys)[kMost], int64_t count, float* dq) {
    Term terms[kMost];
    for (int64_t i = 0; i < count; ++i) {
      const PairBackwardProducts& of_tile = *products[i];
      terms[i] = {
          round_up(keys[i], kHalvesLen), {of_tile.ds_rows_, kTile}, {of_tile.k_row_pairs_, 2 * of_tile.row_len_}};
    }
    const PairBackwardProducts& first = *products[0];
    Unit::template multiply<true>(queries, first.head_dim_, terms, count, {dq, first.row_len_});
  }

  // dk and dv are complete after this; 0 from key `keys` on.
  void finish(int64_t keys) {
    add_waiting();
    dk_.finish(keys);
    dv_.finish(keys);
  }

  // What is added row by row and, after `finish`, the sums: [kTile][row_len], [kTile][row_len_v].
  float* dk() { return dk_.rows(); }
  float* dv() { return dv_.rows(); }

 private:
  using Term = typename Unit::Term;

  // result = left * right, or result += left * right.
  template <bool kAccumulate>
  static void multiply(int64_t rows, int64_t columns, const Term& term, typename Unit::Result result) {
    Unit::template multiply<kAccumulate>(rows, columns, &term, 1, result);
  }

  template <bool kMasked>
  void find_p_and_ds(int64_t queries, const float* s, const float* dp, const float* lse, const float* delta,
                     float scale, const uint64_t* visible) {
    BFloat16 *const pairs = waiting_[num_waiting_].pairs, *const ds_pairs = waiting_[num_waiting_].ds_pairs;
    const TableExp2 exp2;
    const float log2_unit = scale * static_cast<float>(kLog2E);
    for (int64_t row = 0; row < kTile; row += 2) {
      // An odd last row has a partner that sees nothing; rows after it are 0.
      if (kMasked && row >= queries) {
        clear(pairs + row * kTile, 2 * kTile);
        clear(ds_pairs + row * kTile, 2 * kTile);
        clear(ds_rows_ + row * kTile, 2 * kTile);
        continue;
      }
      struct Row {
        uint64_t visible;
        float shift, scaled_delta;
      };
      const auto row_of = [&](int64_t i) {
        if (kMasked && (i >= queries || visible[i] == 0)) return Row{0, 0, 0};
        return Row{kMasked ? visible[i] : 0, rounded(lse[i] * static_cast<float>(kLog2E)), rounded(delta[i] * scale)};
      };
      const Row of_even = row_of(row), of_odd = row_of(row + 1);
      // Returns dS of both rows, rounded.
      const auto differentiate = [&](int64_t column) {
        struct Pair {
          Vec<float> p, ds;
        };
        const auto of_row = [&](int64_t i, const Row& of) {
          constexpr float kLeast = -200;  // far below the smallest number; the table wants it finite
          const int64_t at = i * kTile + column;
          const Vec<float> p = exp2(at_least(load(s + at) * log2_unit - of.shift, broadcast(kLeast)));
          const Vec<float> ds = p * (load(dp + at) * scale - of.scaled_delta);
          if constexpr (!kMasked) return Pair{p, ds};
          const auto seen = static_cast<__mmask16>(of.visible >> column);
          return Pair{_mm512_maskz_mov_ps(seen, reinterpret_cast<__m512>(p)),
                      _mm512_maskz_mov_ps(seen, reinterpret_cast<__m512>(ds))};
        };
        const Pair even = of_row(row, of_even), odd = of_row(row + 1, of_odd);
        const Vec<uint32_t> rounded_ds = round_to_pairs(even.ds, odd.ds);
        store(reinterpret_cast<uint32_t*>(pairs + row * kTile + 2 * column), round_to_pairs(even.p, odd.p));
        store(reinterpret_cast<uint32_t*>(ds_pairs + row * kTile + 2 * column), rounded_ds);
        return rounded_ds;
      };
      for (int64_t column = 0; column < kTile; column += 2 * kWidth<float>) {
        const Vec<uint32_t> first = differentiate(column), second = differentiate(column + kWidth<float>);
        BFloat16* const to = ds_rows_ + row * kTile + column;
        store(reinterpret_cast<uint32_t*>(to), (first & 0xffffu) | second << 16);
        store(reinterpret_cast<uint32_t*>(to + kTile), first >> 16 | (second & 0xffff0000u));
      }
    }
  }

  // P and dS of a tile of queries that dv and dk still lack.
  static constexpr int64_t kMostWaiting = 2;
  struct Waiting {
    BFloat16 *pairs, *ds_pairs;
    const BFloat16 *q_columns, *dout_columns;  // null: dk or dv is not wanted
    int64_t queries;
  };

  void add_waiting() {
    if (num_waiting_ == 0) return;
    Term terms[kMostWaiting];
    if (waiting_[0].dout_columns != nullptr) {
      for (int64_t i = 0; i < num_waiting_; ++i) {
        terms[i] = {waiting_[i].queries, {waiting_[i].dout_columns, kTile}, {waiting_[i].pairs, 2 * kTile}};
      }
      add_terms(terms, keys_, row_len_v_, dv_);
    }
    if (waiting_[0].q_columns != nullptr) {
      for (int64_t i = 0; i < num_waiting_; ++i) {
        terms[i] = {waiting_[i].queries, {waiting_[i].q_columns, kTile}, {waiting_[i].ds_pairs, 2 * kTile}};
      }
      add_terms(terms, keys_, row_len_, dk_);
    }
    num_waiting_ = 0;
  }

  void add_terms(const Term* terms, int64_t keys, int64_t row_len, TransposedSum& sum) const {
    sum.add_product([&](float* columns, auto accumulates) {
      Unit::template multiply<accumulates()>(row_len, keys, terms, num_waiting_, {columns, kTile});
    });
  }

  // sum[key][d] += sum over queries of left[d][query] * tile[query][key]
  void add_columns(int64_t queries, int64_t keys, const float* tile, uint64_t excluded, const BFloat16* left,
                   int64_t row_len, TransposedSum& sum) const {
    BFloat16* const pairs = waiting_[0].pairs;
    round_tile_to_pairs(tile, queries, pairs);
    if (excluded != 0) {
      copy_without_columns(left, row_len, excluded, finite_);
      left = finite_;
    }
    sum.add_product([&](float* columns, auto accumulates) {
      multiply<accumulates()>(row_len, keys, {queries, {left, kTile}, {pairs, 2 * kTile}}, {columns, kTile});
    });
  }

  typename Unit::Session session_;
  int64_t head_dim_, head_dim_v_, row_len_, row_len_v_;
  BFloat16 *k_rows_, *k_row_pairs_, *k_pairs_, *v_pairs_;  // rows, halves of rows, and pairs of the transpose
  const BFloat16 *q_rows_ = nullptr, *dout_rows_ = nullptr;
  TransposedSum dk_, dv_;
  BFloat16 *finite_, *finite_pairs_;
  BFloat16* ds_rows_;
  Waiting waiting_[kMostWaiting];
  int64_t num_waiting_ = 0, keys_ = 0;
};

}  // namespace
}  // namespace jattn::cpu
