// The loop of the forward pass: a panel of queries meets the tiles of keys that it sees, in one of three orders.
//
// Each step makes scores [key][query lane] of up to kTile keys. Vectors take one tile after the other; the matrix unit
// makes the scores of the next tile while the softmax of the last one runs, or takes several tiles in one run. What
// then happens to the scores is the same in all orders, and stands in forward_step.inl.
#pragma once

#include "cpu/forward_pass.h"

namespace jattn::cpu {
namespace {

// Attention of one block of queries to one range of keys.
template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::attend(int64_t index, int64_t place) {
  Task task = decode(index);
  task.place = place;
  const Sequence sequence(problem_, task.batch);
  if (plan_.by_rows) {
    attend_by_rows(task, sequence);
    return;
  }
  Workspace workspace(attend_bytes());
  Products products(problem_, plan_, workspace);
  const auto take_tile = [&] { return workspace.take<Acc>(kTile * kTile); };
  Acc* const scores[] = {take_tile(), take_tile()};
  Tiles tiles{scores[0],
              take_tile(),
              take_tile(),
              take_tile(),
              workspace.take<int8_t>(kTile * kPanel),
              TileProgram(problem_, workspace)};
  const auto take_kv_tile = [&] {
    Acc* keys = workspace.take<Acc>(plan_.key_tile_len);
    return KvTile{keys, workspace.take<Acc>(plan_.value_tile_len), 0};
  };
  const KvTile own_tiles[] = {take_kv_tile(), take_kv_tile()};

  Panel panel{};
  start_panel(task, sequence, workspace.take<Acc>(kPanel * plan_.row_len_v), kPanel, panel);
  const Dropout dropout(problem_, sequence);
  set_queries(sequence, panel, take_zeros(workspace), products);

  if (plan_.packs_first) {
    milestones_.wait(task.batch * problem_.num_kv_heads + task.kv_head, plan_.kv_tiles);
  } else {
    for (int64_t row = 0; row < panel.rows.count; ++row) {
      prefetch_row<true>(out_row(task, panel.rows, row), problem_.head_dim_v);
    }
  }

  const KeyBounds bounds = bounds_of(task, panel);
  if constexpr (Products::kOnVectors) {
    attend_by_tiles(task, sequence, bounds, own_tiles[0], workspace, dropout, tiles, products, panel);
  } else if (Products::kMostRunTiles > 0 && plan_.goes_in_runs) {
    attend_in_runs(task, sequence, bounds, own_tiles, workspace, dropout, tiles, products, panel);
  } else {
    attend_ahead(task, sequence, bounds, own_tiles, workspace, dropout, scores, tiles, products, panel);
  }
  finish_or_save(task, dropout, panel, tiles.by_query);
}

// The first tile in `bounds` that is not wholly invisible.
template <typename Element, typename Products>
inline auto ForwardPass<Element, Products>::next_step(const Task& task, const Sequence& sequence, const Panel& panel,
                                                      KeyBounds bounds, KvTile own_tile,
                                                      const Workspace& workspace) const -> Step {
  for (int64_t key = bounds.first; key < bounds.end; key += kTile) {
    const KeyRange keys{key, min_of(kTile, sequence.kv_length - key)};
    const Coverage covered = coverage(problem_, sequence, panel.rows, keys);
    if (covered == Coverage::kNone) continue;
    if (!plan_.packs_first) {
      return {keys, covered, kPacksByParts ? own_tile : pack_rows(sequence, task.kv_head, keys, own_tile, workspace)};
    }
    const int64_t index = task.place * plan_.kv_tiles + key / kTile;
    KvTile packed = packed_tile(index);
    packed.not_finite = not_finite_[index];
    return {keys, covered, packed};
  }
  return {{0, 0}, Coverage::kNone, own_tile};
}

// Where products can leave cells out, of a tile that is packed already.
template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::find_cells(const Sequence& sequence, const Panel& panel, Step& step) const {
  if (!Products::kOnVectors || !plan_.packs_first || step.covered != Coverage::kPartial) return;
  if (!only_band_hides(problem_, sequence) || step.kv_tile.not_finite != 0) return;
  step.leaves_out = find_band_cells(panel.rows, step.keys, step.cells);
}

// The dot products of a step. Where the task packs for itself, the rows of the step are packed here, a few at a time:
// the next ones then come from memory while these are multiplied.
template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::multiply_keys(const Task& task, const Sequence& sequence,
                                                          const Products& products, int64_t lanes,
                                                          const Workspace& workspace, Step& step, Acc* scores) const {
  if constexpr (kPacksByParts) {
    if (!plan_.packs_first) {
      for (int64_t at = 0; at < step.keys.count; at += Products::kPackedTogether) {
        const KeyRange keys{step.keys.first + at, min_of(Products::kPackedTogether, step.keys.count - at)};
        const KvTile to{Products::packed_row(step.kv_tile.keys, at, plan_.row_len),
                        Products::packed_row(step.kv_tile.values, at, plan_.row_len_v), 0};
        step.kv_tile.not_finite |= pack_rows(sequence, task.kv_head, keys, to, workspace).not_finite << at;
        products.multiply_keys(keys.count, to.keys, lanes, scores + at * kPanel);
      }
      return;
    }
  }
  if constexpr (Products::kOnVectors) {
    if (step.leaves_out) {
      products.multiply_keys(step.keys.count, step.cells, step.kv_tile.keys, lanes, scores);
      return;
    }
  }
  if (step.keys.count > 0) products.multiply_keys(step.keys.count, step.kv_tile.keys, lanes, scores);
}

// Scores of a tile, then all that follows from them.
template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::attend_by_tiles(const Task& task, const Sequence& sequence,
                                                            KeyBounds bounds, const KvTile& own_tile,
                                                            const Workspace& workspace, const Dropout& dropout,
                                                            const Tiles& tiles, Products& products,
                                                            Panel& panel) const {
  for (;;) {
    Step step = next_step(task, sequence, panel, bounds, own_tile, workspace);
    if (step.keys.count == 0) return;
    find_cells(sequence, panel, step);
    multiply_keys(task, sequence, products, panel.lanes, workspace, step, tiles.scores);
    add_step(task, sequence, step, dropout, tiles, products, panel);
    bounds.first = step.keys.first + kTile;
  }
}

// Scores are made one tile ahead: the matrix unit's have left the store buffer by the time that the softmax reads them.
// Vectors read them from there; two tiles of scores take a third of a first-level cache.
template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::attend_ahead(const Task& task, const Sequence& sequence, KeyBounds bounds,
                                                         const KvTile* own_tiles, const Workspace& workspace,
                                                         const Dropout& dropout, Acc* const* scores, Tiles& tiles,
                                                         Products& products, Panel& panel) const {
  Step step = next_step(task, sequence, panel, bounds, own_tiles[0], workspace);
  multiply_keys(task, sequence, products, panel.lanes, workspace, step, scores[0]);
  for (int i = 1; step.keys.count > 0; i ^= 1) {
    Step next = next_step(task, sequence, panel, {step.keys.first + kTile, bounds.end}, own_tiles[i], workspace);
    tiles.scores = scores[i ^ 1];
    if constexpr (Products::kInterleaves) {
      const bool is_plain = step.covered == Coverage::kFull && step.kv_tile.not_finite == 0 && !has_score_rule_ &&
                            !dropout.is_active() && step.keys.count == kTile && panel.lanes == kPanel;
      if (is_plain && next.keys.count > 0) {
        typename Products::Softmax softmax(log2_unit(), tiles.scores, panel.softmax);
        if (products.multiply_keys_beside(softmax, next.keys.count, next.kv_tile.keys, scores[i])) {
          if (softmax.finish()) {
            products.add_values(kTile, step.kv_tile.values, panel.lanes, tiles.scores, 0, panel.out);
          } else {
            add_step(task, sequence, step, dropout, tiles, products, panel);
          }
          step = next;
          continue;
        }
      }
    }
    multiply_keys(task, sequence, products, panel.lanes, workspace, next, scores[i]);
    add_step(task, sequence, step, dropout, tiles, products, panel);
    step = next;
  }
}

// Several tiles at a time, where the products have a way to do so and it serves the tiles.
template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::attend_in_runs(const Task& task, const Sequence& sequence, KeyBounds bounds,
                                                           const KvTile* own_tiles, const Workspace& workspace,
                                                           const Dropout& dropout, const Tiles& tiles,
                                                           Products& products, Panel& panel) const {
  if constexpr (Products::kMostRunTiles > 0) {
    constexpr int64_t kOwnTiles = 2;
    const int64_t most_tiles = plan_.packs_first ? Products::kMostRunTiles : kOwnTiles;
    const bool only_band = !sequence.has_position_band && sequence.q_segments == nullptr;
    Step steps[Products::kMostRunTiles];
    while (bounds.first < bounds.end) {
      int64_t count = 0, in_run = 0;
      while (count < most_tiles && count == in_run) {
        const Step& step = steps[count] =
            next_step(task, sequence, panel, bounds, own_tiles[plan_.packs_first ? 0 : count], workspace);
        if (step.keys.count == 0) break;
        // A run has no gaps.
        if (count > 0 && step.keys.first != steps[count - 1].keys.first + kTile) break;
        bounds.first = step.keys.first + kTile;
        ++count;
        if ((only_band || step.covered == Coverage::kFull) && step.kv_tile.not_finite == 0) ++in_run;
      }
      if (count == 0) break;
      if (in_run > 0) {
        const KeyRange& last = steps[in_run - 1].keys;
        const KeyRange keys{steps[0].keys.first, last.first + last.count - steps[0].keys.first};
        if (!products.attend_run(
                panel.rows, keys, in_run, [&](int64_t i) { return steps[i].kv_tile; }, log2_unit(), panel.softmax,
                panel.out)) {
          in_run = 0;
        }
      }
      for (int64_t i = in_run; i < count; ++i) {
        products.multiply_keys(steps[i].keys.count, steps[i].kv_tile.keys, panel.lanes, tiles.scores);
        add_step(task, sequence, steps[i], dropout, tiles, products, panel);
      }
    }
  }
}

}  // namespace
}  // namespace jattn::cpu
