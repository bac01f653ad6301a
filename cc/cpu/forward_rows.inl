// The forward pass for up to kFewRows query rows, as in decoding: scores [row][key], output [row][row_len_v].
//
// A part of its own, since all of it has keys in the lanes, where the tiles have queries: with so few rows most lanes
// of those would be empty. Keys and values are read where they lie (few_rows.h), and nothing is packed.
#pragma once

#include "cpu/forward_pass.h"

namespace jattn::cpu {
namespace {

// attend() for a handful of rows, which needs no tiles of its own. What hides keys and acts on scores has keys in the
// lanes from the start.
template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::attend_by_rows(const Task& task, const Sequence& sequence) {
  Workspace workspace(attend_by_rows_bytes());
  RowProducts products(problem_, plan_, workspace);
  Panel panel{};
  start_panel(task, sequence, workspace.take<Acc>(kFewRows * plan_.row_len_v), kFewRows, panel);
  const Dropout dropout(problem_, sequence);
  set_queries(sequence, panel, take_zeros(workspace), products);
  Acc* const scores = workspace.take<Acc>(kFewRows * kTile);
  Acc* const visible = workspace.take<Acc>(kTile * kTile);
  Acc* const bias = workspace.take<Acc>(kTile * kTile);
  int8_t* const kept = workspace.take<int8_t>(kTile * kTile);
  const TileProgram program(problem_, workspace);
  const auto rows_of = [&](const void* array, int64_t first, int64_t row_size) {
    const auto row = kv_rows(array, task.batch, task.kv_head, first, row_size);
    return typename RowProducts::Rows{row(0), row(1) - row(0)};
  };

  const KeyBounds bounds = bounds_of(task, panel);
  for (KeyRange keys{bounds.first, 0}; keys.first < bounds.end; keys.first += kTile) {
    keys.count = min_of(kTile, sequence.kv_length - keys.first);
    const Coverage covered = coverage(problem_, sequence, panel.rows, keys);
    if (covered == Coverage::kNone) continue;
    products.multiply_keys(keys.count, rows_of(problem_.k, keys.first, problem_.head_dim), scores);
    if (has_score_rule_) add_score_rule_by_rows(sequence, keys, panel, bias, scores);
    if (problem_.program != nullptr) {
      program.apply<Acc>(sequence, panel.rows, keys, true, kTile, scores, nullptr);
    }
    if (covered == Coverage::kPartial) find_visible(problem_, sequence, panel.rows, keys, visible);
    if (dropout.is_active()) dropout.draw_for_rows(panel.rows, keys, kept);
    for (int64_t row = 0; row < panel.rows.count; ++row) {
      Acc* const scores_of_row = scores + row * kTile;
      hide_of_row(keys.count, covered == Coverage::kPartial ? visible + row * kTile : nullptr, scores_of_row);
      const auto drop = [&](int64_t key, Vec<Acc>& p) {
        if (dropout.is_active()) p = where_kept<Acc>(kept + row * kTile + key, p);
      };
      const Acc rescale = update_softmax_of_row(kTile, log2_unit(), scores_of_row, row, panel.softmax, drop);
      if (rescale == 1) continue;
      Acc* const out = panel.out + row * plan_.row_len_v;
      for (int64_t d = 0; d < plan_.row_len_v; d += kWidth<Acc>) store(out + d, load(out + d) * rescale);
    }
    const auto values = rows_of(problem_.v, keys.first, problem_.head_dim_v);
    const uint64_t apart =
        covered == Coverage::kPartial ? hidden_not_finite(keys.count, panel.rows.count, visible, values) : 0;
    for_runs(keys.count, apart, [&](int64_t first, int64_t count) {
      products.add_values(count, {values.first + first * values.stride, values.stride}, scores + first, panel.out);
    });
    if (apart != 0) add_by_rows_where_visible(apart, values, visible, scores, panel);
  }
  finish_or_save(task, dropout, panel, nullptr);
}

// Sets the scores of keys that are invisible (visible: 0), and of those from `count` on, to -inf.
template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::hide_of_row(int64_t count, const Acc* visible, Acc* scores) {
  constexpr Acc kMinusInfinity = -static_cast<Acc>(__builtin_inf());
  for (int64_t key = 0; visible != nullptr && key < kTile; key += kWidth<Acc>) {
    store(scores + key, load(visible + key) != 0 ? load(scores + key) : broadcast(kMinusInfinity));
  }
  for (int64_t key = count; key < kTile; ++key) scores[key] = kMinusInfinity;
}

template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::add_score_rule_by_rows(const Sequence& sequence, KeyRange keys,
                                                                   const Panel& panel, Acc* bias, Acc* scores) const {
  const bool has_bias = problem_.bias.data != nullptr;
  if (has_bias) load_bias(problem_, sequence, panel.rows, keys, bias);
  Bits<Acc> key_coordinate[kTile] = {};
  Acc slope[kTile];
  for (int64_t i = 0; i < keys.count; ++i) {
    key_coordinate[i] = static_cast<Bits<Acc>>(sequence.key_coordinate(keys.first + i));
  }
  for (int64_t row = 0; row < panel.rows.count; ++row) {
    ScoreRule<Acc> rule{scale_, static_cast<Acc>(problem_.softcap), has_bias ? bias + row * kTile : nullptr, nullptr};
    const TileDistances<Acc> distances{panel.coordinate + row, key_coordinate, slope};
    if (problem_.alibi_slopes.data != nullptr) {
      for (Acc& each : slope) each = panel.slope[row];
      rule.distances = &distances;
    }
    apply_score_rule<kTile, Acc>(rule, 1, round_up(keys.count, kWidth<Acc>), scores + row * kTile, nullptr);
  }
}

// The keys that not every row sees and whose values are not finite, as bits: 0 * NaN would be NaN.
template <typename Element, typename Products>
inline uint64_t ForwardPass<Element, Products>::hidden_not_finite(int64_t count, int64_t num_rows, const Acc* visible,
                                                                  const typename RowProducts::Rows& values) const {
  uint64_t found = 0;
  for (int64_t key = 0; key < count; ++key) {
    bool is_hidden = false;
    for (int64_t row = 0; row < num_rows; ++row) is_hidden |= visible[row * kTile + key] == 0;
    if (!is_hidden) continue;
    const Element* value = values.first + key * values.stride;
    found |= static_cast<uint64_t>(!is_finite_row(value, problem_.head_dim_v)) << key;
  }
  return found;
}

template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::add_by_rows_where_visible(uint64_t keys,
                                                                      const typename RowProducts::Rows& values,
                                                                      const Acc* visible, const Acc* p,
                                                                      Panel& panel) const {
  for (; keys != 0; keys &= keys - 1) {
    const int64_t key = __builtin_ctzll(keys);
    for (int64_t row = 0; row < panel.rows.count; ++row) {
      if (visible[row * kTile + key] == 0) continue;
      for (int64_t d = 0; d < problem_.head_dim_v; ++d) {
        Acc value[kWidth<Acc>];
        widen_row<Element>(values.first + key * values.stride + d, 1, value, kWidth<Acc>);
        panel.out[row * plan_.row_len_v + d] += p[row * kTile + key] * value[0];
      }
    }
  }
}

}  // namespace
}  // namespace jattn::cpu
