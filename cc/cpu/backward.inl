// The backward pass: one task owns some tiles of keys, recomputes P and dS for every tile of queries that sees them,
// keeps dk and dv to itself and adds to dq in an order that does not depend on the threads (Convoy).
//
// dq, dk and dv have the shapes of q [batch, q_len, num_heads, head_dim], k and v [batch, kv_len, num_kv_heads,
// head_dim or head_dim_v]; dbias, dslopes and dcaptures those of what they are gradients of. This file has the stages
// of a pass, how much each task owns, and the list of all other parts.
#pragma once

#include "cpu/backward_key_tiles.inl"
#include "cpu/backward_pass.h"
#include "cpu/backward_queries.inl"
#include "cpu/backward_results.inl"
#include "cpu/backward_softmax.inl"
#include "cpu/backward_step.inl"

namespace jattn::cpu {
namespace {

template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::run(const TaskRunner& runner) {
  const int64_t num_threads = max_of(1, runner.num_threads);
  const int64_t own_heads = own_heads_for(num_threads), shared_heads = num_groups() - own_heads;
  key_tiles_ = key_tiles_per_task(num_threads, shared_heads > 0);
  const int64_t head_tiles = group_ * plan_.query_tiles;
  const int64_t kv_blocks = plan_.num_chunks == 1 ? 0 : (num_kv_rows() + kTile - 1) / kTile;
  const int64_t stages[] = {dbias_.num_pieces(),       own_heads,
                            shared_heads * head_tiles, shared_heads * plan_.num_chunks * num_key_blocks(),
                            shared_heads * head_tiles, kv_blocks,
                            dbias_.num_pieces(),       dslopes_.is_wanted() ? 1 : 0,
                            dcaptures_.num_pieces()};
  int64_t num_tasks = 0;
  for (const int64_t stage : stages) num_tasks += stage;
  const int64_t pairs = problem_.batch * problem_.num_heads * problem_.q_len * problem_.kv_len;
  const int64_t products = pairs * (3 * problem_.head_dim + 2 * problem_.head_dim_v);
  run_tasks(runner, num_tasks, products, max_of(prepare_bytes(), differentiate_bytes()), [&](int64_t i) {
    int stage = 0;
    for (const int64_t size : stages) {
      if (i < size) break;
      i -= size;
      ++stage;
    }
    const auto tile_of_shared = [&](bool takes_place) {
      const int64_t head = own_heads + i / head_tiles, tile = i % head_tiles;
      return query_tile(head, tile, places_.of_shared_head(head, takes_place && tile == 0));
    };
    switch (stage) {
      case 0: clear_dbias(i); break;
      case 1: differentiate_head(i); break;
      case 2: {
        const QueryTile tile = tile_of_shared(true);
        prepare_queries(tile);
        milestones_.count(prepared(group_of(tile)));
        break;
      }
      case 3: {
        const int64_t head = own_heads + i % shared_heads;
        const int64_t done =
            differentiate(i / shared_heads * num_groups() + head, places_.of_shared_head(head, false), true);
        milestones_.count(differentiated(head), done);
        break;
      }
      case 4: {
        const QueryTile tile = tile_of_shared(false);
        milestones_.wait(differentiated(group_of(tile)), plan_.kv_tiles * plan_.num_chunks);
        finish_dq(tile);
        break;
      }
      case 5: join_chunks(i); break;
      case 6: finish_dbias(i); break;
      case 7: finish_dslopes(); break;
      default: finish_dcaptures(i); break;
    }
  });
}

// Tiles of keys that a task owns: queries, dout and dq are fetched once for all of them, which is what a long pass
// waits for. The sums of dq are the same for any number; those of a dbias that heads share are not.
template <typename Element, typename Products>
inline int64_t BackwardPass<Element, Products>::key_tiles_per_task(int64_t num_threads, bool shares_heads) const {
  constexpr int64_t kTasksPerThread = 8;   // so that the last of them leave few idle
  constexpr int64_t kMostBytes = 9 << 17;  // of what is kept of the keys, beside a tile of queries in a cache
  if (needs_order_over_heads()) return 1;
  const int64_t by_tasks = plan_.num_tasks / (kTasksPerThread * num_threads);
  const int64_t by_bytes = kMostBytes / Products::workspace_bytes(plan_);
  // A head that a thread has packed for itself stays in its cache, if it is small and what is kept of the keys leaves
  // room for it.
  constexpr int64_t kSmallHeadBytes = 1 << 20, kKeyTilesOfSmallHead = 2;
  const int64_t head_bytes = group_ * plan_.query_tiles * static_cast<int64_t>(sizeof(Acc)) *
                             (plan_.query_tile_len + plan_.dout_tile_len + kTile * plan_.row_len);
  int64_t most = !shares_heads && head_bytes <= kSmallHeadBytes ? kKeyTilesOfSmallHead : kMostKeyTiles;
  if (dcaptures_.is_wanted()) most = min_of(most, dcaptures_.separate_tiles());
  return max_of(1, min_of(most, min_of(by_tasks, by_bytes)));
}

// The first heads are differentiated by one thread each, unless there is an order over all heads.
template <typename Element, typename Products>
inline int64_t BackwardPass<Element, Products>::own_heads_for(int64_t num_threads) const {
  if (plan_.num_chunks > 1 || needs_order_over_heads()) return 0;
  return heads_of_one_thread(num_groups(), num_threads, group_ * plan_.query_tiles * plan_.kv_tiles,
                             has_lengths(problem_));
}

template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::differentiate_head(int64_t group) {
  const int64_t place = places_.take(), head_tiles = group_ * plan_.query_tiles;
  if (plan_.kv_tiles == 1) prefetch_keys_and_values(decode(group));
  for (int64_t i = 0; i < head_tiles; ++i) prepare_queries(query_tile(group, i, place));
  for (int64_t i = 0; i < num_key_blocks(); ++i) differentiate(i * num_groups() + group, place, false);
  for (int64_t i = 0; i < head_tiles; ++i) finish_dq(query_tile(group, i, place));
  places_.give_back(place);
}

// They come while the queries are prepared.
template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::prefetch_keys_and_values(const Task& task) const {
  const auto key_row = kv_rows(problem_.k, task, problem_.head_dim);
  const auto value_row = kv_rows(problem_.v, task, problem_.head_dim_v);
  for (int64_t i = 0; i < problem_.kv_len; ++i) {
    prefetch_row(key_row(i), problem_.head_dim);
    prefetch_row(value_row(i), problem_.head_dim_v);
  }
}

// The first tile of keys of a task.
template <typename Element, typename Products>
inline auto BackwardPass<Element, Products>::decode(int64_t index) const -> Task {
  const auto next = [&](int64_t extent) {
    const int64_t digit = index % extent;
    index /= extent;
    return digit;
  };
  Task task{};
  task.kv_head = next(problem_.num_kv_heads);
  task.batch = next(problem_.batch);
  task.chunk = next(plan_.num_chunks);
  task.kv_tile = index * key_tiles_;
  return task;
}

template <typename Element, typename Products = BackwardProducts<Element>>
void run_backward(const Problem& problem, const BackwardPlan& plan, const BackwardBuffers& buffers, void* scratch,
                  const TaskRunner& runner) {
  BackwardPass<Element, Products>(problem, plan, buffers, scratch).run(runner);
}

}  // namespace
}  // namespace jattn::cpu
