// One step of the backward pass: scores of a tile of queries and a tile of keys, [query][key], at most kTile each, and
// what they add to dv, dk, dq, dbias, dslopes and dcaptures.
//
// The order in which tasks add to the same sums is no matter of a step: it asks for its turn, by `take_turn` and, for
// dcaptures, by wait_for_tile_before(), and backward_key_tiles.inl knows the order.
#pragma once

#include "cpu/backward_pass.h"

namespace jattn::cpu {
namespace {

// One tile of scores: P and dS, and what they add to dv, dk, dq, dbias, dslopes and dcaptures, dq perhaps later
// (`waiting`). Calls `take_turn` before adding to anything that other tasks add to.
template <typename Element, typename Products>
template <typename TakeTurn>
inline void BackwardPass<Element, Products>::add_step(const Sequence& sequence, const KeyTile& key_tile,
                                                      const Step& step, const Dropout& dropout, const Tiles& tiles,
                                                      FewRows<Element>& few_rows, Products& products,
                                                      WaitingDq& waiting, const TakeTurn& take_turn) {
  const Task& task = key_tile.task;
  const KeyRange& keys = key_tile.keys;
  const uint64_t bad_keys = key_tile.not_finite;
  const QueryTile& tile = step.tile;
  const QueryRows& rows = step.rows;
  const Coverage covered = step.covered;
  const Acc* lse = lse_ + tile.first_lse;
  const uint64_t bad_queries = not_finite_[tile.index];
  products.set_queries(packed_queries_ + tile.index * plan_.query_tile_len,
                       packed_douts_ + tile.index * plan_.dout_tile_len, bad_queries);
  if constexpr (Products::kInterleaves) {
    bool is_plain = covered == Coverage::kFull && !has_score_rule(problem_) && !dropout.is_active() &&
                    rows.count == kTile && keys.count == kTile && buffers_.dq != nullptr && buffers_.dk != nullptr &&
                    buffers_.dv != nullptr;
    for (int64_t row = 0; row < rows.count; ++row) is_plain &= lse[row] != -static_cast<Acc>(__builtin_inf());
    Acc* dq = dq_sums_ + tile.index * kTile * plan_.row_len;
    if (is_plain && products.add_plain_step(lse, delta_ + tile.first_lse, scale_, tiles.s, tiles.dp, dq, take_turn)) {
      return;
    }
  }
  BandCells of_band;
  const bool may_leave_out = Products::kLeavesOutCells && covered == Coverage::kPartial &&
                             only_band_hides(problem_, sequence) && (bad_keys | bad_queries) == 0 && !scores_by_rows_;
  const BandCells* cells = may_leave_out && find_band_cells(rows, keys, of_band) ? &of_band : nullptr;
  if (scores_by_rows_) {
    multiply_by_rows(sequence, key_tile, step, few_rows, tiles.s);
  } else {
    products.multiply_queries(rows.count, keys.count, cells, tiles.s);
  }
  products.multiply_douts(rows.count, keys.count, cells, tiles.dp);

  if constexpr (Products::kFusesSoftmax) {
    if (!has_score_rule(problem_) && !dropout.is_active() && (bad_keys | bad_queries) == 0 &&
        (covered == Coverage::kFull || only_band_hides(problem_, sequence))) {
      uint64_t visible[kTile];
      const bool sees_all = visible_keys(rows, keys, lse, visible);
      products.find_p_and_ds(rows.count, tiles.s, tiles.dp, lse, delta_ + tile.first_lse, scale_,
                             sees_all ? nullptr : visible);
      products.add_dv_and_dk(rows.count, buffers_.dv != nullptr, buffers_.dk != nullptr);
      if (buffers_.dq != nullptr) {
        waiting.products[waiting.count] = &products;
        waiting.keys[waiting.count++] = keys.count;
      }
      return;
    }
  }
  add_waiting(step, waiting, take_turn);

  if (has_score_rule(problem_)) add_score_rule(sequence, key_tile, step, tiles);
  if (dropout.is_active()) dropout.draw_for_rows(rows, keys, tiles.kept);

  constexpr Acc kMinusInfinity = -static_cast<Acc>(__builtin_inf());
  bool has_empty_row = false;
  for (int64_t row = 0; row < rows.count; ++row) has_empty_row |= lse[row] == kMinusInfinity;
  const bool is_masked = covered == Coverage::kPartial || has_empty_row || (bad_keys | bad_queries) != 0;
  if (is_masked) {
    find_visible(problem_, sequence, rows, keys, tiles.visible);
    for (int64_t row = 0; row < rows.count; ++row) {
      if (lse[row] == kMinusInfinity) clear(tiles.visible + row * kTile, kTile);
    }
  }
  const RowValues row_values{lse, delta_ + tile.first_lse};
  const int64_t columns = columns_of(keys);
  const auto differentiate = [&](auto... flags) {
    const Acc* visible = is_masked ? tiles.visible : nullptr;
    differentiate_softmax<flags()...>(rows.count, columns, row_values, visible, dropout, tiles);
  };
  constexpr std::true_type kYes;
  constexpr std::false_type kNo;
  if (has_score_rule(problem_)) {
    dropout.is_active() ? differentiate(kYes, kYes) : differentiate(kYes, kNo);
  } else {
    dropout.is_active() ? differentiate(kNo, kYes) : differentiate(kNo, kNo);
  }

  if (dcaptures_.is_wanted()) {
    wait_for_tile_before(task);
    tiles.program.add_gradients(sequence, rows, keys, tiles.score, tiles.dp, dcaptures_.part(tile_index(task)),
                                dcaptures_.num_elements());
  }
  if (tiles.program_slope != nullptr) multiply_ds(rows.count, tiles.program_slope, tiles.dp);
  Acc* dq = dq_sums_ + tile.index * kTile * plan_.row_len;
  if (buffers_.dv != nullptr) products.add_dv(rows.count, keys.count, cells, tiles.s, bad_queries);
  if (dbias_.is_wanted()) {
    if (dbias_.sums_over_queries()) {
      const int64_t head_of_group = tile.head - task.kv_head * group_;
      dbias_.add_columns(rows.count, keys.count, tiles.dp, tiles.column_sums + head_of_group * kTile);
    } else {
      if (dbias_.needs_order()) take_turn();
      dbias_.add_tile(sequence, rows, keys, tiles.dp);
    }
  }
  if (dslopes_.is_wanted()) {
    const int64_t head_of_all = tile.batch * problem_.num_heads + tile.head;
    dslopes_.part(head_of_all, task.chunk, task.kv_tile) +=
        dslopes_.of_tile(rows.count, keys.count, tiles.dp, step.distances(key_tile));
  }
  if (has_score_rule(problem_)) scale_ds(rows.count, tiles);
  if (buffers_.dk != nullptr) products.add_dk(rows.count, keys.count, cells, tiles.dp, bad_queries);
  take_turn();
  if (buffers_.dq != nullptr) products.add_dq(rows.count, keys.count, cells, tiles.dp, bad_keys, dq);

  // Rows with NaN or infinity, left out above, go only to those that see them.
  const auto q_row = query_rows(problem_.q, tile, problem_.head_dim);
  const auto dout_row = query_rows(buffers_.dout, tile, problem_.head_dim_v);
  for_bits(bad_queries, [&](int64_t query) {
    for (int64_t key = 0; key < keys.count; ++key) {
      if (tiles.visible[query * kTile + key] == 0) continue;
      add_row(dout_row(query), problem_.head_dim_v, tiles.s[query * kTile + key],
              products.dv() + key * plan_.row_len_v);
      add_row(q_row(query), problem_.head_dim, tiles.dp[query * kTile + key], products.dk() + key * plan_.row_len);
    }
  });
  const auto k_row = kv_rows(problem_.k, task, problem_.head_dim);
  for_bits(bad_keys, [&, num_rows = rows.count](int64_t key) {
    for (int64_t query = 0; query < num_rows; ++query) {
      if (tiles.visible[query * kTile + key] == 0) continue;
      add_row(k_row(key), problem_.head_dim, tiles.dp[query * kTile + key], dq + query * plan_.row_len);
    }
  });
}

template <typename Element, typename Products>
template <typename TakeTurn>
inline void BackwardPass<Element, Products>::add_waiting(const Step& step, WaitingDq& waiting,
                                                         const TakeTurn& take_turn) const {
  if constexpr (Products::kFusesSoftmax) {
    if (waiting.count == 0) return;
    take_turn();
    Products::add_dq(step.rows.count, waiting.products, waiting.keys, waiting.count,
                     dq_sums_ + step.tile.index * kTile * plan_.row_len);
    waiting.count = 0;
  }
}

// Dot products as the forward pass formed them: rounded otherwise, the probability of a key far above all others would
// not be 1.
template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::multiply_by_rows(const Sequence& sequence, const KeyTile& key_tile,
                                                              const Step& step, FewRows<Element>& few_rows,
                                                              Acc* s) const {
  const auto q_row = [&](int64_t i) {
    const int64_t row = (sequence.batch * problem_.q_len + step.rows.query[i]) * problem_.num_heads + step.tile.head;
    return static_cast<const Element*>(problem_.q) + row * problem_.head_dim;
  };
  few_rows.set_queries(step.rows.count, 1, q_row);
  const auto key_row = kv_rows(problem_.k, key_tile.task, problem_.head_dim);
  few_rows.multiply_keys(key_tile.keys.count, {key_row(0), key_row(1) - key_row(0)}, s);
  // What padding holds decides nothing, nor what follows the last key.
  for (int64_t row = 0; row < step.rows.count; ++row) {
    const bool is_padding = sequence.is_query_padding(step.rows.query[row]);
    for (int64_t i = 0; i < columns_of(key_tile.keys); ++i) {
      if (is_padding || sequence.is_key_padding(key_tile.keys.first + i)) s[row * kTile + i] = 0;
    }
  }
}

template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::add_score_rule(const Sequence& sequence, const KeyTile& key_tile,
                                                            const Step& step, const Tiles& tiles) const {
  const QueryRows& rows = step.rows;
  const bool has_bias = problem_.bias.data != nullptr;
  if (has_bias) load_bias(problem_, sequence, rows, key_tile.keys, tiles.bias);
  ScoreRule<Acc> rule{scale_, static_cast<Acc>(problem_.softcap), has_bias ? tiles.bias : nullptr, nullptr};
  const TileDistances<Acc> distances = step.distances(key_tile);
  if (problem_.alibi_slopes.data != nullptr) rule.distances = &distances;
  apply_score_rule<kTile, Acc>(rule, rows.count, columns_of(key_tile.keys), tiles.s, tiles.slope);
  if (tiles.score != nullptr) memcpy(tiles.score, tiles.s, static_cast<size_t>(rows.count * kTile) * sizeof(Acc));
  if (problem_.program != nullptr) {
    tiles.program.template apply<Acc>(sequence, rows, key_tile.keys, true, kTile, tiles.s, tiles.program_slope);
  }
}

template <typename Element, typename Products>
template <typename Use>
inline void BackwardPass<Element, Products>::for_bits(uint64_t bits, const Use& use) {
  for (; bits != 0; bits &= bits - 1) use(static_cast<int64_t>(__builtin_ctzll(bits)));
}

template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::add_row(const Element* row, int64_t count, Acc factor, Acc* to) {
  for (int64_t i = 0; i < count; ++i) {
    Acc value[kWidth<Acc>];
    widen_row<Element>(row + i, 1, value, kWidth<Acc>);
    to[i] += factor * value[0];
  }
}

}  // namespace
}  // namespace jattn::cpu
