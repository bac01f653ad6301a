// One step of the forward pass: from the dot products of a panel with up to kTile keys, [key][query lane], to what they
// add to its output, [head_dim_v][query lane].
//
// Score rule, masks, the online softmax with dropout, and the product with the values. Lanes hold queries, so that the
// softmax needs no sums over lanes. The order in which the tiles come is decided elsewhere (forward_key_tiles.inl).
#pragma once

#include "cpu/forward_pass.h"

namespace jattn::cpu {
namespace {

// From the dot products of a tile to what it adds to the output.
template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::add_step(const Task& task, const Sequence& sequence, const Step& step,
                                                     const Dropout& dropout, const Tiles& tiles, Products& products,
                                                     Panel& panel) const {
  const KeyRange keys = step.keys;
  const uint64_t not_finite = step.kv_tile.not_finite;
  const bool is_masked = step.covered == Coverage::kPartial || not_finite != 0;
  if (has_score_rule_) add_score_rule(sequence, keys, panel, tiles);
  if (is_masked && only_band_hides(problem_, sequence) && not_finite == 0) {
    hide_outside_band(panel.rows, keys, panel.lanes, tiles.scores);
  } else if (is_masked) {
    find_visible(problem_, sequence, panel.rows, keys, tiles.by_query);
    transpose(tiles.by_query, kTile, kPanel, kTile, tiles.visible, kPanel);
    hide(tiles.visible, keys.count, panel.lanes, tiles.scores);
  }
  products.start_probabilities(keys.count);
  const auto update = [&](auto stores, const auto& drop) {
    return update_softmax<Products::kFused, Products::kShortExp2, stores(), Acc, kPanel>(
        keys.count, panel.lanes, log2_unit(), tiles.scores, panel.softmax,
        [&](int64_t key, int64_t lane, Vec<Acc>& even, Vec<Acc>& odd) {
          drop(key, lane, even, odd);
          products.take_probabilities(key, lane, even, odd);
        });
  };
  const auto drop_nothing = [](int64_t, int64_t, const Vec<Acc>&, const Vec<Acc>&) {};
  constexpr std::true_type kStores;
  constexpr std::bool_constant<Products::kReadsScores> kReadsScores;
  const Acc* p = tiles.scores;
  bool rescales;
  if (dropout.is_active()) {
    dropout.draw_for_lanes<kPanel>(panel.rows, keys, tiles.kept);
    rescales = update(kStores, [&](int64_t key, int64_t lane, Vec<Acc>& even, Vec<Acc>& odd) {
      const int8_t* const kept = tiles.kept + key * kPanel + lane;
      even = where_kept<Acc>(kept, even);
      odd = where_kept<Acc>(kept + kPanel, odd);
    });
  } else if (not_finite != 0) {
    // Beside the scores: the same softmax as without such values, whose bits others must not change.
    p = tiles.bias;
    rescales = update(kReadsScores, [&](int64_t key, int64_t lane, const Vec<Acc>& even, const Vec<Acc>& odd) {
      store(tiles.bias + key * kPanel + lane, even);
      store(tiles.bias + (key + 1) * kPanel + lane, odd);
    });
  } else {
    rescales = update(kReadsScores, drop_nothing);
  }
  if constexpr (Products::kOnVectors) {
    const bool starts = panel.is_empty;
    panel.is_empty = false;
    if (rescales && !starts) rescale(panel);
    if (step.leaves_out) {
      products.add_values(step.cells, step.kv_tile.values, panel.lanes, tiles.scores, starts, panel.out);
    } else {
      products.add_values(keys.count, step.kv_tile.values, panel.lanes, tiles.scores, not_finite, starts, panel.out);
    }
  } else {
    if (rescales) rescale(panel);
    products.add_values(keys.count, step.kv_tile.values, panel.lanes, tiles.scores, not_finite, panel.out);
  }
  if (not_finite != 0) {
    add_where_visible(not_finite, kv_rows(problem_.v, task.batch, task.kv_head, keys.first, problem_.head_dim_v),
                      tiles.visible, p, panel);
  }
}

template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::add_score_rule(const Sequence& sequence, KeyRange keys, const Panel& panel,
                                                           const Tiles& tiles) const {
  const bool has_bias = problem_.bias.data != nullptr;
  if (has_bias) {
    load_bias(problem_, sequence, panel.rows, keys, tiles.by_query);
    // Lanes without a query take part in the choice of how a tile's softmax is computed.
    clear(tiles.by_query + panel.rows.count * kTile, (panel.lanes - panel.rows.count) * kTile);
    transpose(tiles.by_query, kTile, kPanel, kTile, tiles.bias, kPanel);
  }
  ScoreRule<Acc> rule{scale_, static_cast<Acc>(problem_.softcap), has_bias ? tiles.bias : nullptr, nullptr};
  Bits<Acc> key_coordinate[kTile];
  const TileDistances<Acc> distances{key_coordinate, panel.coordinate, panel.slope};
  if (problem_.alibi_slopes.data != nullptr) {
    for (int64_t i = 0; i < keys.count; ++i) {
      key_coordinate[i] = static_cast<Bits<Acc>>(sequence.key_coordinate(keys.first + i));
    }
    rule.distances = &distances;
  }
  apply_score_rule<kPanel, Acc>(rule, keys.count, panel.lanes, tiles.scores, nullptr);
  if (problem_.program != nullptr) {
    tiles.program.template apply<Acc>(sequence, panel.rows, keys, false, kPanel, tiles.scores, nullptr);
  }
}

template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::hide(const Acc* visible, int64_t keys, int64_t lanes, Acc* scores) {
  constexpr Acc kMinusInfinity = -static_cast<Acc>(__builtin_inf());
  for (int64_t key = 0; key < keys; ++key) {
    for (int64_t at = key * kPanel; at < key * kPanel + lanes; at += kWidth<Acc>) {
      store(scores + at, load(visible + at) != 0 ? load(scores + at) : broadcast(kMinusInfinity));
    }
  }
}

// The same where lengths and band alone decide, without a tile of what is visible.
template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::hide_outside_band(const QueryRows& rows, KeyRange keys, int64_t lanes,
                                                              Acc* scores) {
  Bits<Acc> first[kPanel] = {}, end[kPanel] = {};
  const auto within_tile = [&](int64_t key) {
    return static_cast<Bits<Acc>>(min_of(max_of(key - keys.first, 0), kTile));
  };
  for (int64_t row = 0; row < rows.count; ++row) {
    first[row] = within_tile(rows.first_key[row]);
    end[row] = within_tile(rows.end_key[row]);
  }
  for (int64_t lane = 0; lane < lanes; lane += kWidth<Acc>) {
    const Vec<Bits<Acc>> from = load(first + lane), to = load(end + lane);
    Vec<Bits<Acc>> at{};
    for (int64_t key = 0; key < keys.count; ++key, at += 1) {
      Acc* const score = scores + key * kPanel + lane;
      const Vec<Acc> seen = from <= at ? load(score) : broadcast(-static_cast<Acc>(__builtin_inf()));
      store(score, at < to ? seen : broadcast(-static_cast<Acc>(__builtin_inf())));
    }
  }
}

template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::rescale(Panel& panel) const {
  for (int64_t d = 0; d < problem_.head_dim_v; ++d) {
    for (int64_t lane = 0; lane < panel.lanes; lane += kWidth<Acc>) {
      Acc* at = panel.out + d * kPanel + lane;
      store(at, load(at) * load(panel.softmax.rescale + lane));
    }
  }
}

// Adds the rows of `keys` (bits) to the queries that see them and to no other: 0 * NaN would be NaN.
template <typename Element, typename Products>
template <typename Row>
inline void ForwardPass<Element, Products>::add_where_visible(uint64_t keys, const Row& value_row, const Acc* visible,
                                                              const Acc* p, Panel& panel) const {
  for (; keys != 0; keys &= keys - 1) {
    const int64_t key = __builtin_ctzll(keys);
    for (int64_t d = 0; d < problem_.head_dim_v; ++d) {
      Acc value[kWidth<Acc>];
      widen_row<Element>(value_row(key) + d, 1, value, kWidth<Acc>);
      for (int64_t lane = 0; lane < panel.lanes; ++lane) {
        const int64_t at = key * kPanel + lane;
        if (visible[at] != 0) panel.out[d * kPanel + lane] += p[at] * value[0];
      }
    }
  }
}

}  // namespace
}  // namespace jattn::cpu
