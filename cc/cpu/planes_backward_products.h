// The five products of the backward pass on the matrix unit, for float16 and float32. P and dS are rounded to 16 bits
// for float16.
//
// dk and dv are summed transposed: their left operands, Q and dout transposed, are packed once for all tasks, and P and
// dS need only be interleaved.
#pragma once

#include "cpu/band_cells.h"
#include "cpu/planes.h"
#include "cpu/transposed_sum.h"

namespace jattn::cpu {
namespace {

template <typename Element>
class PlanesBackwardProducts {
 public:
  static constexpr int64_t kPlanes = kPlanesOf<Element>;
  static constexpr bool kFusesSoftmax = false;

  // Layout of packed tiles: left operands of products over the elements of a row, then over rows. Returns a bit for
  // each row where either is not finite, or huge.
  template <typename QueryRow, typename DoutRow>
  static uint64_t pack_queries(const BackwardPlan& plan, const Problem& problem, int64_t count,
                               const QueryRow& query_row, const DoutRow& dout_row, float* queries, float* douts,
                               Workspace) {
    const auto pack = [&](const auto& row, int64_t row_size, int64_t row_len, float* to) {
      BFloat16* rows = reinterpret_cast<BFloat16*>(to);
      pack_left_columns<Element>(count, row, row_size, row_len, rows + operand_len<kPlanes>(kTile, row_len));
      return pack_left_rows<Element>(count, row, row_size, row_len, rows);
    };
    return pack(query_row, problem.head_dim, plan.row_len, queries) |
           pack(dout_row, problem.head_dim_v, plan.row_len_v, douts);
  }
  static int64_t pack_bytes(const BackwardPlan&) { return 0; }

  static int64_t workspace_bytes(const BackwardPlan& plan) {
    const int64_t longest = max_of(plan.row_len, plan.row_len_v);
    return 2 * Workspace::bytes<BFloat16>(operand_len<kPlanes>(kTile, plan.row_len)) +
           Workspace::bytes<BFloat16>(operand_len<kPlanes>(kTile, plan.row_len_v)) +
           TransposedSum::bytes(plan.row_len) + TransposedSum::bytes(plan.row_len_v) +
           Workspace::bytes<BFloat16>(operand_len<kPlanes>(kTile, longest)) +
           3 * Workspace::bytes<BFloat16>(operand_len<kPlanes>(kTile, kTile)) +
           2 * Workspace::bytes<float>(kTile * longest) + Workspace::bytes<float>(kTile * kTile);
  }

  PlanesBackwardProducts(const Problem& problem, const BackwardPlan& plan, Workspace& workspace)
      : head_dim_(problem.head_dim),
        head_dim_v_(problem.head_dim_v),
        row_len_(plan.row_len),
        row_len_v_(plan.row_len_v),
        k_rows_(workspace.take<BFloat16>(operand_len<kPlanes>(kTile, row_len_))),
        k_columns_(workspace.take<BFloat16>(operand_len<kPlanes>(kTile, row_len_))),
        v_rows_(workspace.take<BFloat16>(operand_len<kPlanes>(kTile, row_len_v_))),
        dk_(row_len_, workspace),
        dv_(row_len_v_, workspace),
        finite_(workspace.take<BFloat16>(operand_len<kPlanes>(kTile, max_of(row_len_, row_len_v_)))),
        right_(workspace.take<BFloat16>(operand_len<kPlanes>(kTile, kTile))),
        ds_right_(workspace.take<BFloat16>(operand_len<kPlanes>(kTile, kTile))),
        ds_left_(workspace.take<BFloat16>(operand_len<kPlanes>(kTile, kTile))),
        exact_rows_(workspace.take<float>(kTile * max_of(row_len_, row_len_v_))),
        exact_lanes_(workspace.take<float>(kTile * max_of(row_len_, row_len_v_))),
        exact_products_(workspace.take<float>(kTile * kTile)) {}

  // Takes the tile of keys and values of a task; dk and dv become 0. Returns a bit for each key where either is not
  // finite, or huge.
  template <typename KeyRow, typename ValueRow>
  uint64_t set_keys_and_values(int64_t count, const KeyRow& key_row, const ValueRow& value_row) {
    pack_right_columns<Element>(count, key_row, head_dim_, row_len_, k_columns_);
    const uint64_t exact_keys = pack_right_rows<Element>(kTile, count, key_row, head_dim_, row_len_, k_rows_) |
                                pack_right_rows<Element>(kTile, count, value_row, head_dim_v_, row_len_v_, v_rows_);
    dk_.reset();
    dv_.reset();
    exact_keys_ = exact_keys;
    return exact_keys;
  }

  // Takes a packed tile and the bits that pack_queries returned.
  void set_queries(const float* queries, const float* douts, uint64_t exact_queries) {
    exact_queries_ = exact_queries;
    q_rows_ = reinterpret_cast<const BFloat16*>(queries);
    dout_rows_ = reinterpret_cast<const BFloat16*>(douts);
  }

  // s[query * kTile + key] = q . k and dp[query * kTile + key] = dout . v
  void multiply_queries(int64_t queries, int64_t keys, const BandCells*, float* s) const {
    multiply_rows(queries, keys, q_rows_, k_rows_, row_len_, s);
  }
  void multiply_douts(int64_t queries, int64_t keys, const BandCells*, float* dp) const {
    multiply_rows(queries, keys, dout_rows_, v_rows_, row_len_v_, dp);
  }

  // The queries, or keys, in `excluded` are left out of the sum: both operands become 0 there.
  void add_dv(int64_t queries, int64_t keys, const BandCells*, const float* p, uint64_t excluded) {
    add_columns(queries, keys, p, excluded, dout_rows_, row_len_v_, dv_);
  }
  void add_dk(int64_t queries, int64_t keys, const BandCells*, const float* ds, uint64_t excluded) {
    add_columns(queries, keys, ds, excluded, q_rows_, row_len_, dk_);
  }
  void add_dq(int64_t queries, int64_t keys, const BandCells*, const float* ds, uint64_t excluded, float* dq) const {
    for (int64_t row = 0; row < kTile; ++row) {
      for (int64_t key = 0; key < kTile; key += kAmxInner) {
        const auto piece = [&](int64_t first) {
          const int64_t rest = row < queries ? keys - first : 0;
          const auto kept = static_cast<__mmask16>(lanes_before(rest) & ~(excluded >> first));
          return cut_planes<kPlanes>(load_present(ds + row * kTile + first, kept));
        };
        const Planes<kPlanes> low = piece(key), high = piece(key + kAmxRows);
        store_left_row<kPlanes>(low, high, row, key, ds_left_);
      }
    }
    const BFloat16* right = k_columns_;
    if (excluded != 0) {
      copy_right_columns_without<kPlanes>(right, row_len_, excluded, finite_);
      right = finite_;
    }
    multiply_planes<kPlanes, true>(queries, row_len_, keys, {ds_left_, kTile}, {right, kTile}, {dq, row_len_});
  }

  // All five products of a full tile without masks, score rule or excluded rows: s and dp are room for a tile each. P
  // and dS are formed and cut while the matrix unit multiplies. Returns false where nothing was done.
  static constexpr bool kLeavesOutCells = false;
  static constexpr bool kInterleaves = true;
  static constexpr bool kWholeTiles = true;
  static constexpr bool kSplitsValues = true;  // into planes
  template <typename TakeTurn>
  bool add_plain_step(const float* lse, const float* delta, float scale, float* s, float* dp, float* dq,
                      const TakeTurn& take_turn) {
    if ((exact_queries_ | exact_keys_) != 0) return false;
    // Of two queries and 32 keys each.
    constexpr int64_t kUnits = kTile / 2 * (kTile / kAmxBlock);
    const auto place_of = [](int64_t unit) { return std::pair(unit / 2 * 2, unit % 2 * kAmxBlock); };
    multiply_queries(kTile, kTile, nullptr, s);

    const auto form_p = [&](int64_t unit) __attribute__((always_inline)) {
      const auto [row, key] = place_of(unit);
      for (int64_t column = key; column < key + kAmxBlock; column += kAmxRows) {
        const auto p_of = [&](int64_t query) __attribute__((always_inline)) {
          float* at = s + query * kTile + column;
          const Vec<float> p = exp2<float>((rounded(load(at) * scale) - lse[query]) * static_cast<float>(kLog2E));
          store(at, p);
          return cut_planes<kPlanes>(p);
        };
        const Planes<kPlanes> even = p_of(row), odd = p_of(row + 1);
        store_right_pair<kPlanes>(even, odd, row, column, right_);
      }
    };
    multiply_planes<kPlanes, false>(kTile, kTile, row_len_v_, {dout_rows_, row_len_v_}, {v_rows_, row_len_v_},
                                    {dp, kTile},
                                    BesideProduct<kUnits, decltype(form_p)>(kTile, kTile, row_len_v_, form_p));

    const auto form_ds = [&](int64_t unit) __attribute__((always_inline)) {
      const auto [row, key] = place_of(unit);
      const auto ds_of = [&](int64_t query, int64_t column) __attribute__((always_inline)) {
        const int64_t at = query * kTile + column;
        return cut_planes<kPlanes>(load(s + at) * (load(dp + at) - delta[query]) * scale);
      };
      const Planes<kPlanes> low[] = {ds_of(row, key), ds_of(row + 1, key)};
      const Planes<kPlanes> high[] = {ds_of(row, key + kAmxRows), ds_of(row + 1, key + kAmxRows)};
      store_right_pair<kPlanes>(low[0], low[1], row, key, ds_right_);
      store_right_pair<kPlanes>(high[0], high[1], row, key + kAmxRows, ds_right_);
      for (int64_t i = 0; i < 2; ++i) store_left_row<kPlanes>(low[i], high[i], row + i, key, ds_left_);
    };
    dv_.add_product([&](float* columns, auto accumulates) {
      multiply_planes<kPlanes, accumulates()>(
          row_len_v_, kTile, kTile, {transposed(dout_rows_, row_len_v_), kTile}, {right_, kTile}, {columns, kTile},
          BesideProduct<kUnits, decltype(form_ds)>(row_len_v_, kTile, kTile, form_ds));
    });
    dk_.add_product([&](float* columns, auto accumulates) {
      multiply_planes<kPlanes, accumulates()>(row_len_, kTile, kTile, {transposed(q_rows_, row_len_), kTile},
                                              {ds_right_, kTile}, {columns, kTile});
    });
    take_turn();
    multiply_planes<kPlanes, true>(kTile, row_len_, kTile, {ds_left_, kTile}, {k_columns_, kTile}, {dq, row_len_});
    return true;
  }

  // dk and dv are complete after this; 0 from key `keys` on.
  void finish(int64_t keys) {
    dk_.finish(keys);
    dv_.finish(keys);
  }

  // What is added row by row and, after `finish`, the sums: [kTile][row_len], [kTile][row_len_v].
  float* dk() { return dk_.rows(); }
  float* dv() { return dv_.rows(); }

 private:
  // result[query * kTile + key] = left . right over the elements of a row
  void multiply_rows(int64_t queries, int64_t keys, const BFloat16* left, const BFloat16* right, int64_t row_len,
                     float* result) const {
    multiply_planes<kPlanes, false>(queries, keys, row_len, {left, row_len}, {right, row_len}, {result, kTile});
    if ((exact_queries_ | exact_keys_) != 0) {
      const int64_t columns = round_up(keys, kWidth<float>);
      join_left_rows<kPlanes>(left, row_len, exact_rows_);
      join_right_rows<kPlanes>(right, kTile, row_len, exact_lanes_);
      multiply<false, float>(queries, columns, row_len, {exact_rows_, row_len, 1}, {exact_lanes_, kTile},
                             {exact_products_, kTile});
      take_exact(queries, columns, exact_queries_, exact_keys_, exact_products_, result, kTile);
    }
  }

  static const BFloat16* transposed(const BFloat16* rows, int64_t row_len) {
    return rows + operand_len<kPlanes>(kTile, row_len);
  }

  // sum[key][d] += sum over queries of rows[query][d] * tile[query][key].
  void add_columns(int64_t queries, int64_t keys, const float* tile, uint64_t excluded, const BFloat16* rows,
                   int64_t row_len, TransposedSum& sum) const {
    for (int64_t row = 0; row < round_up(queries, kAmxInner); row += 2) {
      for (int64_t key = 0; key < kTile; key += kWidth<float>) {
        const auto piece = [&](int64_t query) {
          const bool is_kept = query < queries && (excluded >> query & 1) == 0;
          return cut_planes<kPlanes>(is_kept ? load(tile + query * kTile + key) : Vec<float>{});
        };
        store_right_pair<kPlanes>(piece(row), piece(row + 1), row, key, right_);
      }
    }
    const BFloat16* left = transposed(rows, row_len);
    if (excluded != 0) {
      copy_left_columns_without<kPlanes>(left, row_len, excluded, finite_);
      left = finite_;
    }
    sum.add_product([&](float* columns, auto accumulates) {
      multiply_planes<kPlanes, accumulates()>(row_len, keys, queries, {left, kTile}, {right_, kTile}, {columns, kTile});
    });
  }

  AmxSession session_;
  uint64_t exact_keys_ = 0, exact_queries_ = 0;  // a bit for each whose scores the vectors compute
  int64_t head_dim_, head_dim_v_, row_len_, row_len_v_;
  BFloat16 *k_rows_, *k_columns_, *v_rows_;  // right operands of products over elements of a row, over rows
  const BFloat16 *q_rows_ = nullptr, *dout_rows_ = nullptr;
  TransposedSum dk_, dv_;
  BFloat16* finite_;
  BFloat16 *right_, *ds_right_, *ds_left_;  // P or dS; dS
  // For what the vectors multiply: [kTile][row_len], [row_len][kTile], [kTile][kTile].
  float *exact_rows_, *exact_lanes_, *exact_products_;
};

}  // namespace
}  // namespace jattn::cpu
