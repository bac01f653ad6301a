// A task of the backward pass: up to kMostKeyTiles tiles of kTile keys against one chunk of the queries that see them.
//
// It decides what is visited, and when a task has its turn to add to what others add to; what a pair of tiles gives is
// found in backward_step.inl.
#pragma once

#include "cpu/backward_pass.h"

namespace jattn::cpu {
namespace {

// One task: dk and dv of its tiles of keys, and what these add to the other gradients. `place`: of the packed tiles of
// its head, which other threads prepare where it is shared. Returns the tiles of keys done.
template <typename Element, typename Products>
inline int64_t BackwardPass<Element, Products>::differentiate(int64_t index, int64_t place, bool is_shared) {
  const Task task = decode(index);
  const Sequence sequence(problem_, task.batch);
  const Dropout dropout(problem_, sequence);
  Workspace workspace(differentiate_bytes());
  const auto take_tile = [&] { return workspace.take<Acc>(kTile * kTile); };
  const Tiles tiles{take_tile(),
                    take_tile(),
                    take_tile(),
                    take_tile(),
                    take_tile(),
                    workspace.take<Acc>(group_ * kTile),
                    workspace.take<int8_t>(kTile * kTile),
                    TileProgram(problem_, workspace),
                    has_program_slopes() ? take_tile() : nullptr,
                    dcaptures_.is_wanted() ? take_tile() : nullptr};
  if (dbias_.sums_over_queries()) clear(tiles.column_sums, group_ * kTile);
  const Element* zeros = take_zeros(workspace);

  const TileRange chunk{task.chunk * plan_.chunk_tiles,
                        min_of(plan_.query_tiles, (task.chunk + 1) * plan_.chunk_tiles)};
  const int64_t num_key_tiles = min_of(key_tiles_, plan_.kv_tiles - task.kv_tile);
  FewRows<Element> few_rows(problem_, plan_, workspace);
  Products products[] = {{problem_, plan_, workspace},
                         {problem_, plan_, workspace},
                         {problem_, plan_, workspace},
                         {problem_, plan_, workspace}};
  static_assert(sizeof(products) == kMostKeyTiles * sizeof(Products));
  KeyTile key_tiles[kMostKeyTiles];
  TileRange range{chunk.end, chunk.first};
  for (int64_t i = 0; i < num_key_tiles; ++i) {
    Task of_tile = task;
    of_tile.kv_tile += i;
    set_key_tile(sequence, of_tile, chunk, zeros, products[i], key_tiles[i]);
    const TileRange& seen = key_tiles[i].query_tiles;
    if (seen.first < seen.end) range = {min_of(range.first, seen.first), max_of(range.end, seen.end)};
  }
  const int64_t group = task.batch * problem_.num_kv_heads + task.kv_head;
  if (is_shared) milestones_.wait(prepared(group), group_ * plan_.query_tiles);
  milestones_.wait(dbias_cleared(), dbias_.num_pieces());

  // Last queries first: with a causal band the tasks then start at the same tile, one after the other. A step is one
  // tile of one head, counted from the end of the chunk.
  for (int64_t tile = range.end; tile-- > range.first;) {
    for (int64_t group_head = 0; group_head < group_; ++group_head) {
      Step step;
      set_step(sequence, query_tile(group, group_head * plan_.query_tiles + tile, place), step);
      const int64_t steps_before = (chunk.end - 1 - tile) * group_ + group_head;
      // All heads of another task may add to the same tile of dbias.
      const int64_t turn = dbias_.needs_order() ? (chunk.end - tile) * group_ : steps_before + 1;
      const auto take_turn = [&] { convoy_.wait(index, turn); };
      WaitingDq waiting;
      for (int64_t i = 0; i < num_key_tiles; ++i) {
        const KeyTile& key_tile = key_tiles[i];
        if (!key_tile.query_tiles.contains(tile)) continue;
        step.covered = coverage(problem_, sequence, step.rows, key_tile.keys);
        if (step.covered == Coverage::kNone) continue;
        convoy_.announce(index, steps_before);
        add_step(sequence, key_tile, step, dropout, tiles, few_rows, products[i], waiting, take_turn);
      }
      add_waiting(step, waiting, take_turn);
    }
  }
  if (dbias_.sums_over_queries()) {
    convoy_.wait(index, Convoy::kAllSteps);
    const KeyRange keys = key_tiles[0].keys;
    for (int64_t g = 0; g < group_ && keys.count > 0; ++g) {
      dbias_.add_column_sums(sequence, task.kv_head * group_ + g, keys, tiles.column_sums + g * kTile);
    }
  }
  // Even if it added nothing: the next one of a part waits for this one alone.
  for (int64_t i = 0; i < num_key_tiles && dcaptures_.is_wanted(); ++i) wait_for_tile_before(key_tiles[i].task);
  convoy_.finish(index);
  for (int64_t i = 0; i < num_key_tiles; ++i) {
    products[i].finish(key_tiles[i].keys.count);
    write_dk_dv(key_tiles[i].task, products[i]);
  }
  if (plan_.num_chunks > 1 || dbias_.is_wanted() || dslopes_.is_wanted() || dcaptures_.is_wanted()) {
    milestones_.count(all_differentiated(), num_key_tiles);
  }
  return num_key_tiles;
}

// Takes the keys and values of one tile.
template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::set_key_tile(const Sequence& sequence, const Task& task, TileRange chunk,
                                                          const Element* zeros, Products& products,
                                                          KeyTile& key_tile) const {
  const int64_t first_key = task.kv_tile * kTile;
  const KeyRange keys{first_key, max_of(0, min_of(kTile, sequence.kv_length - first_key))};
  const auto key_rows = [&](const void* array, int64_t row_size) {
    return without_padding(
        kv_rows(array, task, row_size), [&](int64_t i) { return sequence.is_key_padding(first_key + i); }, zeros);
  };
  key_tile.task = task;
  key_tile.keys = keys;
  key_tile.not_finite = products.set_keys_and_values(keys.count, key_rows(problem_.k, problem_.head_dim),
                                                     key_rows(problem_.v, problem_.head_dim_v));
  key_tile.query_tiles = visible_query_tiles(sequence, keys, chunk);
  if (problem_.alibi_slopes.data != nullptr) {
    for (int64_t i = 0; i < kTile; ++i) {
      const int64_t coordinate = i < keys.count ? sequence.key_coordinate(keys.first + i) : 0;
      key_tile.coordinate[i] = static_cast<Bits<Acc>>(coordinate);
    }
  }
  if (dslopes_.is_wanted()) {
    const int64_t first_head = task.batch * problem_.num_heads + task.kv_head * group_;
    for (int64_t g = 0; g < group_; ++g) dslopes_.part(first_head + g, task.chunk, task.kv_tile) = 0;
  }
  if (dcaptures_.is_wanted() && dcaptures_.tile_before(tile_index(task)) < 0) dcaptures_.clear_part(tile_index(task));
}

// The tiles of queries in a chunk whose band may reach some keys.
template <typename Element, typename Products>
inline auto BackwardPass<Element, Products>::visible_query_tiles(const Sequence& sequence, KeyRange keys,
                                                                 TileRange chunk) const -> TileRange {
  const int64_t first_query = max_of(0, keys.first - sequence.end_key_offset + 1);
  const int64_t end_query = min_of(sequence.q_length, keys.first + keys.count - sequence.first_key_offset);
  if (keys.count <= 0 || end_query <= first_query) return {chunk.end, chunk.end};
  return {max_of(chunk.first, first_query / kTile), min_of(chunk.end, (end_query + kTile - 1) / kTile)};
}

template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::set_step(const Sequence& sequence, const QueryTile& tile,
                                                      Step& step) const {
  step.tile = tile;
  for (int64_t i = 0; i < tile.count; ++i) step.rows.add(sequence, tile.first + i, tile.head);
  if (problem_.alibi_slopes.data == nullptr) return;
  for (int64_t i = 0; i < tile.count; ++i) {
    step.coordinate[i] = static_cast<Bits<Acc>>(sequence.query_coordinate(tile.first + i));
  }
  const Acc slope = alibi_slope(problem_, sequence.batch, tile.head);
  for (Acc& of_key : step.slope) of_key = slope;
}

// Until the one before it has been added to the part of the gradients of captures that this one is added to.
template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::wait_for_tile_before(const Task& task) const {
  const int64_t before = dcaptures_.tile_before(tile_index(task));
  if (before >= 0) convoy_.wait_for_end(before / num_units() / key_tiles_ * num_units() + before % num_units());
}

}  // namespace
}  // namespace jattn::cpu
