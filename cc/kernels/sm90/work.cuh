// What a block works on: items (one tile of queries of one head), the key tiles each visits, and the shared-memory
// records by which the producer warp tells the consumer warpgroups.
#pragma once

#include "kernels/sm90/barrier.cuh"
#include "kernels/sm90/params.cuh"
#include "kernels/sm90/shape.cuh"

namespace jattn::sm90 {

enum TileFlags : int {
  kLastTile = 1,      // no further key tile for this item
  kMaskUpper = 2,     // some pair lies beyond the upper limit of its row
  kMaskLower = 4,     // some pair lies below the lower limit of its row
  kMaskSegments = 8,  // segment ids must be compared
};

// Travels beside each k tile, valid once the k tile is full.
struct TileHeader {
  int kv_tile;
  int flags;
};

enum ItemStatus : int { kItemRuns, kItemEmpty, kItemsEnd };

// Travels beside q, valid once q is full. Query t sees keys lower_offset + t <= j < min(upper_offset + t, kv_length).
struct ItemRecord {
  int status;
  int q_begin;  // first query of the tile
  int head;
  int batch;
  int q_length;
  int kv_length;
  int upper_offset;
  int lower_offset;
};

template <Config C>
struct ForwardControl {
  Barrier q_full, q_empty;
  Barrier v_landed;  // a v tile whose padding rows must be cleared before the consumers may see it
  Barrier k_full[C.stages], k_empty[C.stages], v_full[C.stages], v_empty[C.stages];
  TileHeader headers[C.stages];
  ItemRecord items[2];
  int q_ids[C.segments ? 2 : 1][C.segments ? C.tile_q : 1];
  int kv_ids[C.segments ? C.stages : 1][C.segments ? C.tile_kv : 1];
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ int clamped_length(const int* lengths, int batch, int extent) {
  return lengths == nullptr ? extent : min(max(lengths[batch], 0), extent);
}

// Numbers the items so that blocks that run at the same time share keys and values in L2, and long items come first
// where lengths differ: sections of heads, in each the last query tiles of all its heads, then the tiles before them.
// Measured on H200 (causal, head_dim 128, 8192 keys): +10 % over one head after the other, whereas longest first over
// all heads at once loses L2 and is slower than no order.
template <Config C>
__device__ __forceinline__ ItemRecord item_record(const ForwardParams& params, int item) {
  const int section_items = params.section_heads * params.num_q_tiles;
  const int section = item / section_items;
  const int first_head = section * params.section_heads;
  const int section_heads = min(params.section_heads, params.batch * params.num_heads - first_head);
  const int in_section = item - section * section_items;
  const int from_last = in_section / section_heads;
  const int flat_head = first_head + in_section - from_last * section_heads;

  ItemRecord record;
  record.status = kItemRuns;
  record.q_begin = (params.num_q_tiles - 1 - from_last) * C.tile_q;
  record.batch = flat_head / params.num_heads;
  record.head = flat_head - record.batch * params.num_heads;
  record.q_length = clamped_length(params.q_lengths, record.batch, params.q_len);
  record.kv_length = clamped_length(params.kv_lengths, record.batch, params.kv_len);
  record.upper_offset = params.kv_len;
  record.lower_offset = -params.q_len;
  if constexpr (C.band) {
    const int offset = params.lower_right ? record.kv_length - record.q_length : 0;
    record.upper_offset = offset + params.band_right + 1;
    record.lower_offset = offset - params.band_left;
  }
  return record;
}

// The key tiles [begin, end) that some query of the item may see, and what their pairs need.
struct KeyRange {
  int begin, end;
  int smallest_upper;  // over the queries of the tile: keys below it need no upper test
  int largest_lower;   // keys from it on need no lower test
};

template <Config C>
__device__ __forceinline__ KeyRange key_range(const ItemRecord& record) {
  const int q_last = min(record.q_begin + C.tile_q, record.q_length) - 1;
  KeyRange range;
  range.smallest_upper = record.kv_length;
  range.largest_lower = 0;
  int upper = record.kv_length, lower = 0;
  if constexpr (C.band) {
    upper = min(upper, q_last + record.upper_offset);
    lower = max(lower, record.q_begin + record.lower_offset);
    range.smallest_upper = min(range.smallest_upper, record.q_begin + record.upper_offset);
    range.largest_lower = q_last + record.lower_offset;
  }
  const bool empty = q_last < record.q_begin || upper <= lower;
  range.begin = empty ? 0 : lower / C.tile_kv;
  range.end = empty ? 0 : ceil_div(upper, C.tile_kv);
  return range;
}

template <Config C>
__device__ __forceinline__ int range_flags(const KeyRange& range, int kv_tile) {
  int flags = 0;
  if ((kv_tile + 1) * C.tile_kv > range.smallest_upper) flags |= kMaskUpper;
  if constexpr (C.band) {
    if (kv_tile * C.tile_kv < range.largest_lower) flags |= kMaskLower;
  }
  return flags;
}

}  // namespace jattn::sm90
