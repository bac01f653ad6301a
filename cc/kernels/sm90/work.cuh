// What a block of the forward works on: items (one tile of queries of one head), the key tiles each visits, and the
// shared-memory records by which the producer warp tells the consumer warpgroups.
#pragma once

#include "attn/dropout.cuh"
#include "attn/kv_range.cuh"
#include "attn/schedule.cuh"
#include "attn/sequence.cuh"
#include "sm90/barrier.cuh"
#include "sm90/forward_params.cuh"
#include "sm90/rows.cuh"
#include "sm90/shape.cuh"

namespace jattn::sm90 {

enum TileFlags : int {
  kLastTile = 1,        // no further key tile for this item
  kMaskUpper = 2,       // some pair lies beyond the upper limit of its row
  kMaskLower = 4,       // some pair lies below the lower limit of its row
  kMaskSegments = 8,    // segment ids must be compared
  kMaskPositions = 16,  // the band of positions must be compared
  kMaskDense = 32,      // bits of the dense mask must be looked up
  // Of a consumer warpgroup, shifted by its number.
  kLastOfWarpgroup = 64,    // none of its queries sees a key of a further tile
  kBeyondWarpgroup = 512,   // none sees a key of this tile, nor of those before
  kHalfOfWarpgroup = 4096,  // none sees a key of the second half of this tile
};
inline constexpr int kRowPlaceShift = 15;  // of TileHeader::flags, to the place of the row of the bias
static_assert(kLastOfWarpgroup << kMostConsumers == kBeyondWarpgroup &&
              kBeyondWarpgroup << kMostConsumers == kHalfOfWarpgroup &&
              kHalfOfWarpgroup << kMostConsumers <= 1 << kRowPlaceShift);

// Travels beside each k tile, valid once the k tile is full.
struct TileHeader {
  int kv_tile;
  int flags;
};

enum ItemStatus : int { kItemRuns, kItemEmpty, kItemsEnd };

// Travels beside q, valid once q is full. Query t sees keys lower_offset + t <= j < min(upper_offset + t, kv_length);
// the offsets are read only if there is a band of indices.
struct ItemRecord {
  int status;
  int q_begin;  // first row of the tile: its query, but for packed heads (rows.cuh)
  int head;     // of the group the first
  int batch;
  int q_length;  // rows from here on are not the item's
  int kv_length;
  int upper_offset;
  int lower_offset;
};

inline constexpr int kComputedAgain = -1;  // as the number of an item

// Numbers of the item's head, beside its record.
struct HeadNumbers {
  float slope, sink;
  Dropout dropout;
};

// Where the number of a column of the tile stands in a row of numbers of all columns: those of a thread in two
// neighbouring blocks of eight columns, which a fragment has in pairs, beside each other.
__device__ __forceinline__ int place_in_row(int column) {
  return column / 16 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
}

// What travels beside the tiles in some variants. Empty in the others, whose control block then does not move.
template <Config C, bool kThere = has_control_extras(C)>
struct ControlExtras {};
template <Config C>
struct ControlExtras<C, true> {
  alignas(16) unsigned mask_words[C.mask ? C.stages : 1][C.mask ? C.tile_q : 1][4];
  // The row of the bias in the order of place_in_row(), in natural units and behind it times log2(e).
  alignas(C.row_bias ? 16 : 4) float row_bias[C.row_bias ? row_bias_places(C) : 1][C.row_bias ? 2 * C.tile_kv : 2];
  int kv_positions[C.positions ? C.stages : 1][C.positions ? C.tile_kv : 2];
  int q_positions[C.positions ? kItemSlots : 1][C.positions ? C.tile_q : 2];
  HeadNumbers numbers[has_head_numbers(C) ? kItemSlots : 1];
  int parts[C.partial_results ? kItemSlots : 1];
};

// The producer's place among the rows of the bias; nothing where there are none, so that such kernels stay as they are.
template <Config C, bool kThere = C.row_bias>
struct RowRing {};
template <Config C>
struct RowRing<C, true> : RingPosition<row_bias_places(C)> {};

// What the drop warps need of a tile of keys; kv_tile is negative when no tile follows.
struct alignas(16) DropRecord {
  int kv_tile;
  int q_begin;
  int head;
  int batch;
};

// Of a tile: its rows' groups, then those of its columns.
template <Config C, bool kThere = C.drops_beside && drops_are_bits(C)>
struct DropParts {};
template <Config C>
struct DropParts<C, true> {
  static constexpr int kRows = C.tile_q / 8, kColumns = C.tile_kv / 8;
  static_assert(kRows + kColumns <= kDropParts);

  DropPart drop_parts[drop_places(C)][kDropParts];
};

// What passes between the producer, the drop warps and the consumers.
template <Config C, bool kThere = C.drops_beside>
struct DropControl {};
template <Config C>
struct DropControl<C, true> : DropParts<C> {
  DropRecord drop_records[drop_places(C)];
  alignas(16) uint32_t drop_words[drop_places(C)][drop_place_words(C)];
  Barrier records_full[drop_places(C)], words_full[drop_places(C)];
};

// A place in the ring of records and words; nothing where there is none, so that such kernels stay as they are.
template <Config C, bool kThere = C.drops_beside>
struct DropRing {};
template <Config C>
struct DropRing<C, true> : RingPosition<drop_places(C)> {};

template <Config C>
struct ForwardControl : ControlExtras<C>, DropControl<C> {
  static_assert(num_consumers(C) <= kMostConsumers);

  Barrier q_full, q_empty;
  Barrier v_landed;  // a v tile whose padding rows must be cleared before the consumers may see it
  Barrier k_full[C.stages], k_empty[C.stages], v_full[C.stages], v_empty[C.stages];
  TileHeader headers[C.stages];
  ItemRecord items[kItemSlots];
  int item_numbers[kItemSlots];        // as the producer counts items; kComputedAgain: its rows may not settle
  int repeats;                         // items of the list still to be computed again, with the present one
  int lost;                            // entries of that list
  int lost_items[lost_items_room(C)];  // maybe several times
  int q_ids[C.segments ? kItemSlots : 1][C.segments ? C.tile_q : 1];
  int kv_ids[C.segments ? C.stages : 1][C.segments ? C.tile_kv : 1];
};

// Named barriers: one of each consumer warpgroup, one of each one's turn, one of all consumers.
inline constexpr int kWarpgroupBarriers = 1;
template <Config C>
inline constexpr int kTurnBarriers = kWarpgroupBarriers + num_consumers(C);
template <Config C>
inline constexpr int kAllConsumersBarrier = kTurnBarriers<C> + num_consumers(C);

__device__ __forceinline__ void sync_consumer_warpgroup(int warpgroup) {
  sync_named(kWarpgroupBarriers + warpgroup, kWarpgroupThreads);
}

template <Config C>
__device__ __forceinline__ ItemRecord item_record(const ForwardParams& params, int item) {
  const ProblemParams& problem = params.problem;
  if constexpr (C.partial_results) item /= params.key_splits;
  const int last_section = C.band || C.lengths || C.segments || C.mask ? params.last_section : kNoLastSection;
  WorkItem place;
  if (C.bias && params.batch_fastest) {
    place = work_item<Heaviest::kLast>(item, problem.batch, heads_of_items<C>(problem), params.tiles, 1,
                                       params.section_heads, last_section);
    const int head = place.batch;
    place.batch = place.head;
    place.head = head;
  } else {
    place = work_item<Heaviest::kLast>(item, heads_of_items<C>(problem), problem.batch, params.tiles, 1,
                                       params.section_heads, last_section);
  }
  ItemRecord record;
  record.status = kItemRuns;
  record.q_begin = place.tile * C.tile_q;
  record.head = C.packed_heads ? place.head * problem.group_size : place.head;
  record.batch = place.batch;
  const Sequence sequence = sequence_of<C>(problem, place.batch);
  record.kv_length = sequence.kv_length;
  record.upper_offset = sequence.band.offset + problem.band_right + 1;
  record.lower_offset = sequence.band.offset - problem.band_left;
  record.q_length = rows_of_queries<C>(params, sequence.q_length);
  if constexpr (cuts_first_tile(C)) {
    if (place.tile == 0) {
      record.q_length = min(params.first_rows, problem.q_len);
    } else {
      record.q_begin -= C.tile_q - params.first_rows;
    }
  }
  return record;
}

// An item of the list of documents. Keys are then counted from the document's first, kv_begin.
struct DocumentItem {
  ItemRecord record;
  int kv_begin;
  bool keys_are_padded;
};

template <Config C>
__device__ __forceinline__ DocumentItem document_item(const ForwardParams& params, int item) {
  const ProblemParams& problem = params.problem;
  const int place = item / problem.num_heads;
  const DocumentTile tile = params.documents[place];
  const int offset = problem.lower_right ? problem.kv_len - problem.q_len : 0;
  DocumentItem found;
  found.kv_begin = tile.other_begin;
  found.keys_are_padded = tile.others_padded;
  ItemRecord& record = found.record;
  record.status = kItemRuns;
  record.q_begin = tile.begin;
  record.head = item - place * problem.num_heads;
  record.batch = tile.batch;
  record.q_length = tile.end;
  record.kv_length = tile.other_end - tile.other_begin;
  record.upper_offset = offset + problem.band_right + 1 - tile.other_begin;
  record.lower_offset = max(offset - problem.band_left - tile.other_begin, -(1 << 30));  // as good as any lower one
  return found;
}

// The key tiles that some query of the item may see. Tiles below full_begin need the lower test, from full_end on the
// upper.
template <Config C>
__device__ __forceinline__ TileRange item_tiles(const ForwardParams& params, const ItemRecord& record) {
  const int last = min(record.q_begin + C.tile_q, record.q_length);
  if (last <= record.q_begin) return {0, 0, 0, 0};
  const Band band{-record.lower_offset, record.upper_offset - 1, 0};
  return visible_tiles<has_index_band(C)>(query_of_row<C>(params, record.q_begin), query_of_row<C>(params, last), band,
                                          record.kv_length, C.tile_kv);
}

}  // namespace jattn::sm90
