// How a pass is cut into tasks and where its scratch memory lies. Depends on extents and flags only, so that results
// have the same bits whatever the number of threads; what lies in scratch depends on the instruction set, too.
//
// These are plain data on purpose: an inline member function would be compiled once per instruction set, and the
// linker would keep any one of the copies.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace jattn::cpu {

// Keys that are processed together; in the backward pass queries too.
inline constexpr int64_t kTile = 64;

// Most queries of one forward task, by DType: as many as leave all that a tile of keys needs in the first-level cache.
// On the matrix unit 32 instead of 64 took a fifth less time, except in runs: plan_forward takes 32 elsewhere.
inline constexpr int64_t kPanelRows[] = {32, 64, 64, 64};

// Up to so many query rows of a task are multiplied with the elements of their rows in the vector lanes (few_rows.h).
inline constexpr int64_t kFewRows = 12;

// Rows of head_dim elements in tiles are padded to this: a multiple of every vector length and of an AMX tile row.
inline constexpr int64_t kRowUnit = 32;

// One forward task: up to kPanelRows query rows that share a key/value head, against one range of keys. The rows are
// the same `queries` positions of `heads` query heads; short queries are thus packed over the heads of a group.
struct ForwardPlan {
  int64_t queries, heads;             // of one task; queries * heads <= kPanelRows
  int64_t query_blocks, head_blocks;  // tasks along T, and along the heads of a group
  int64_t num_splits, split_len;      // ranges of keys; each split_len is a multiple of kTile
  int64_t num_tasks;
  bool last_queries_first;  // they see the most keys
  bool goes_in_runs;        // of tiles, where the products can (amx_forward_run.h)
  bool by_rows;             // all tasks have at most kFewRows rows (few_rows.h)

  int64_t row_len, row_len_v;  // head_dim and head_dim_v padded to kRowUnit

  // Tiles of keys and values are brought into the layout of the products once, before the tasks that read them, unless
  // so few tasks do that each may do it for itself. Per tile: kTile rows as the products want them, and a bit per row
  // of values that is not finite: [B, K, kv_tiles].
  bool packs_first;
  bool packs_micropanels;  // instead of rows, on vectors (tile_product.h): where a head exceeds a second-level cache
  int64_t kv_tiles;
  int64_t key_tile_len, value_tile_len;  // in the accumulator type
  int64_t packed_keys_offset, packed_values_offset, not_finite_offset;

  int64_t milestones_offset;  // int64_t [B * K + 1]
  int64_t places_offset;      // int64_t [2 * B * K]

  // Only with num_splits > 1, per split: out before normalisation [B, N, T, row_len_v], row_max and row_sum [B, N, T].
  int64_t partial_out_offset, partial_max_offset, partial_sum_offset;
  int64_t scratch_bytes;
};

// One backward task: one tile of keys of one key/value head, or several in sequence, against one chunk of the query
// tiles.
struct BackwardPlan {
  int64_t query_tiles, kv_tiles;
  int64_t num_chunks, chunk_tiles;  // ranges of query tiles
  int64_t num_tasks;                // of one tile of keys each
  int64_t row_len, row_len_v;       // head_dim and head_dim_v padded to kRowUnit

  bool writes_dbias_once;    // every element of dbias belongs to one score: no sum, no order
  bool sums_dbias_in_place;  // dbias itself has the accumulator type
  int64_t dbias_count;       // elements of dbias
  // Tasks whose indices differ by a multiple of this add to the same dq (or dbias), in the order of their indices.
  int64_t chain_distance;

  // Queries and output gradients in the layout of the products: [B, N, query_tiles] tiles of kTile rows (or several
  // forms of them), and a bit per row that is not finite.
  int64_t query_tile_len, dout_tile_len;  // in the accumulator type
  int64_t packed_queries_offset, packed_douts_offset, not_finite_offset;
  int64_t milestones_offset;     // int64_t [2 * B * K + 2]
  int64_t places_offset;         // int64_t [2 * B * K]
  int64_t progress_offset;       // int64_t [num_tasks]
  int64_t delta_offset;          // [B, N, T]
  int64_t dq_offset;             // [B, N, query_tiles, kTile, row_len]
  int64_t dk_offset, dv_offset;  // only with num_chunks > 1: [num_chunks, B, K, S, row_len or row_len_v]
  int64_t dbias_offset;          // unless written once or summed in place: the shape of dbias
  int64_t slope_parts_offset;    // double [B, N, num_chunks, kv_tiles]

  // Gradients of captures: how many elements, and in how many parts they are added up (capture_gradients.h).
  int64_t capture_elements, capture_parts;
  int64_t capture_parts_offset;  // double [capture_parts, capture_elements]
  int64_t scratch_bytes;
};

// in_planes: float16 and float32 are split into two and three planes of 16 bits, as the matrix unit takes them.
// capture_elements: of the captures whose gradients are wanted.
ForwardPlan plan_forward(const Problem& problem, bool in_planes);
BackwardPlan plan_backward(const Problem& problem, bool wants_dbias, bool in_planes, int64_t capture_elements = 0);

}  // namespace jattn::cpu
