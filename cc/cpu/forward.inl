// The forward pass: FlashAttention's loop over tiles of keys with an online softmax (arXiv:2205.14135).
//
// out [batch, q_len, num_heads, head_dim_v] and lse [batch, num_heads, q_len] of q [batch, q_len, num_heads, head_dim],
// k and v [batch, kv_len, num_kv_heads, head_dim or head_dim_v]. This file has the stages of a pass (packing,
// attention, the merge of parts of keys), which queries and keys are those of a task, and the list of all other parts.
#pragma once

#include "cpu/forward_key_tiles.inl"
#include "cpu/forward_packing.inl"
#include "cpu/forward_pass.h"
#include "cpu/forward_results.inl"
#include "cpu/forward_rows.inl"
#include "cpu/forward_splits.inl"
#include "cpu/forward_step.inl"

namespace jattn::cpu {
namespace {

template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::run(const TaskRunner& runner) {
  const int64_t own_heads = own_heads_for(max_of(1, runner.num_threads));
  const int64_t num_packs = plan_.packs_first ? (num_groups() - own_heads) * plan_.kv_tiles : 0;
  const int64_t tasks_of_head = plan_.num_tasks / num_groups();
  const int64_t num_tasks = (num_groups() - own_heads) * tasks_of_head;
  const int64_t num_merges = plan_.num_splits > 1 ? (num_rows() + kTile - 1) / kTile : 0;
  const int64_t products = num_rows() * problem_.kv_len * (problem_.head_dim + problem_.head_dim_v);
  run_tasks(runner, own_heads + num_packs + num_tasks + num_merges, products, task_bytes(), [&](int64_t i) {
    if (i < own_heads) {
      attend_to_head(i);
    } else if (i -= own_heads; i < num_packs) {
      const int64_t head = own_heads + i / plan_.kv_tiles;
      const int64_t tile = i % plan_.kv_tiles;
      pack_tile(head, tile, places_.of_shared_head(head, tile == 0));
    } else if (i -= num_packs; i < num_tasks) {
      const int64_t head = own_heads + i / tasks_of_head;
      const int64_t place = plan_.packs_first ? places_.of_shared_head(head, false) : 0;
      attend(head * tasks_of_head + i % tasks_of_head, place);
    } else {
      merge_splits(i - num_tasks);
    }
  });
}

// The keys and values of the first heads are packed and attended to by one thread each.
template <typename Element, typename Products>
inline int64_t ForwardPass<Element, Products>::own_heads_for(int64_t num_threads) const {
  if (!plan_.packs_first || plan_.num_splits > 1) return 0;
  return heads_of_one_thread(num_groups(), num_threads, plan_.query_blocks * plan_.head_blocks * plan_.kv_tiles,
                             has_lengths(problem_));
}

template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::attend_to_head(int64_t group) {
  const int64_t num_tasks = plan_.num_tasks / num_groups(), place = places_.take();
  for (int64_t i = 0; i < plan_.kv_tiles; ++i) pack_tile(group, i, place);
  for (int64_t i = 0; i < num_tasks; ++i) attend(group * num_tasks + i, place);
  places_.give_back(place);
}

template <typename Element, typename Products>
inline auto ForwardPass<Element, Products>::decode(int64_t index) const -> Task {
  const auto next = [&](int64_t extent) {
    const int64_t digit = index % extent;
    index /= extent;
    return digit;
  };
  Task task{};
  // Neighbours share the packed keys and values of a head, or, where each task reads the rows, the pages that these lie
  // in.
  if (plan_.packs_first) task.split = next(plan_.num_splits);
  const int64_t head_block = next(plan_.head_blocks);
  const int64_t place = next(plan_.query_blocks);
  const int64_t query_block = plan_.last_queries_first ? plan_.query_blocks - 1 - place : place;
  task.kv_head = next(problem_.num_kv_heads);
  if (!plan_.packs_first) task.split = next(plan_.num_splits);
  task.batch = index;
  task.first_head = task.kv_head * group_ + head_block * plan_.heads;
  task.num_heads = min_of(plan_.heads, (task.kv_head + 1) * group_ - task.first_head);
  task.first_query = query_block * plan_.queries;
  task.num_queries = min_of(plan_.queries, problem_.q_len - task.first_query);
  return task;
}

// The rows of a task; `out` has room for `num_rows` of them.
template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::start_panel(const Task& task, const Sequence& sequence, Acc* out,
                                                        int64_t num_rows, Panel& panel) const {
  panel.out = out;
  panel.softmax.reset();
  for (int64_t row = 0; row < task.num_queries * task.num_heads; ++row) {
    panel.rows.add(sequence, task.first_query + row % task.num_queries, task.first_head + row / task.num_queries);
  }
  panel.lanes = round_up(panel.rows.count, kWidth<Acc>);
  // On vectors the first tile stores its sums.
  if (plan_.by_rows || !Products::kOnVectors) clear(panel.out, num_rows * plan_.row_len_v);
  if (problem_.alibi_slopes.data != nullptr) set_slopes(sequence, panel);
}

template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::set_slopes(const Sequence& sequence, Panel& panel) const {
  for (int64_t lane = 0; lane < panel.rows.count; ++lane) {
    panel.coordinate[lane] = static_cast<Bits<Acc>>(sequence.query_coordinate(panel.rows.query[lane]));
    panel.slope[lane] = alibi_slope(problem_, sequence.batch, panel.rows.head[lane]);
  }
}

template <typename Element, typename Products>
template <typename Taker>
inline void ForwardPass<Element, Products>::set_queries(const Sequence& sequence, const Panel& panel,
                                                        const Element* zeros, Taker& products) const {
  const auto q_row = [&, asks = !plan_.packs_first](int64_t i) {
    const int64_t row = query_row(sequence.batch, panel.rows.query[i], panel.rows.head[i]);
    const Element* const q = static_cast<const Element*>(problem_.q) + row * problem_.head_dim;
    if (asks) prefetch_row(q + kRowsAhead * problem_.num_heads * problem_.head_dim, problem_.head_dim);
    return q;
  };
  const auto is_padding = [&](int64_t i) { return sequence.is_query_padding(panel.rows.query[i]); };
  products.set_queries(panel.rows.count, problem_.scale < 0 ? -1 : 1, without_padding(q_row, is_padding, zeros));
}

// What the rows of a task see of its split, from the beginning of a tile on.
template <typename Element, typename Products>
inline auto ForwardPass<Element, Products>::bounds_of(const Task& task, const Panel& panel) const -> KeyBounds {
  return {max_of(panel.rows.least_first, task.split * plan_.split_len) / kTile * kTile,
          min_of(panel.rows.most_end, (task.split + 1) * plan_.split_len)};
}

template <typename Element, typename Products = ForwardProducts<Element>>
void run_forward(const Problem& problem, const ForwardPlan& plan, const ForwardResults& results, void* scratch,
                 const TaskRunner& runner) {
  ForwardPass<Element, Products>(problem, plan, results, scratch).run(runner);
}

}  // namespace
}  // namespace jattn::cpu
