// What the sm90 forward kernel and its small companions are given. Plain C++20: the host compiler reads it too.
#pragma once

#include "base/integers.cuh"
#include "params.cuh"
#include "sm90/cap_series.cuh"

namespace jattn::sm90 {

// A CUtensorMap: the driver writes it, the tensor memory accelerator reads it from the kernel's parameters.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// What one part of the keys says of a row: p = exp2((score - row_max) * unit_log2), row_sum is their sum, and
// row_max * unit is in natural units. A sum of 0 means: no visible key.
struct alignas(16) RowPart {
  float row_max, row_sum, unit_log2, unit;
};

// A tile of one run of equal segment ids, and the run of the same id on the other axis, empty where there is none. The
// forward kernel owns queries, the backward keys.
struct alignas(32) DocumentTile {
  int32_t batch;
  int32_t begin, end;  // rows from this tile's first to the run's last
  int32_t other_begin, other_end;
  bool own_padded, others_padded;  // rows of padding are among those of the batch entry
  // If the other axis has tiles of its own (OtherTiles): the first row of the one that other_begin is in, and its
  // number among those of the batch entry.
  int32_t other_first, other_number;
};
static_assert(sizeof(DocumentTile) == 32);

// Rows [begin, end) of a tile of the other axis, none if there is no such tile. It begins at the multiple of
// kRowAlignment that they begin at or behind.
struct TileRows {
  int32_t begin, end;
};
inline constexpr int kRowAlignment = 4;  // of float32 statistics of rows, for bulk copies of 16 bytes
JATTN_HOST_DEVICE constexpr int32_t aligned_row(int32_t row) { return row / kRowAlignment * kRowAlignment; }

// Tiles of the axis that a kernel does not own: they begin with its runs, too, or, where more than `room` would be
// needed, lie on the grid.
struct OtherTiles {
  TileRows* tiles;  // [B, room]; or null: nobody needs them
  int32_t tile;     // rows of one
  int32_t room;     // other_tiles_room()
};

// Tiles of the list of a batch entry, for each tile of the grid. By the log's model of packed documents (an item begins
// and ends in the time of one tile of keys) documents of half a tile take as long by the list as on the grid; with
// more tiles, of shorter documents, the entry is refused.
inline constexpr int kMostDocumentTiles = 2;
JATTN_HOST_DEVICE constexpr int64_t document_tiles_room(int64_t length, int tile) {
  return kMostDocumentTiles * ceil_div(length, tile);
}

// Tiles of the other axis: a quarter more than on the grid, since each of them has a place in an accumulator. Enough
// for documents of two tiles.
JATTN_HOST_DEVICE constexpr int64_t other_tiles_room(int64_t length, int tile) {
  const int64_t tiles = ceil_div(length, tile);
  return tiles + ceil_div(tiles, 4);
}

// Words of the counters of a kernel that takes documents, zero before document_tiles.
enum DocumentCounter { kNextItem, kDocumentTiles, kDocumentsRefused, kDocumentCounters };

// sm90/document_tiles.cuh
struct DocumentTilesParams {
  const int32_t* segments[2];  // of the owned axis and of the other, [B, length]
  int32_t length[2];
  int32_t tile;         // rows of a tile
  bool last_first;      // of the tiles of a run
  int32_t* counters;    // DocumentCounter
  DocumentTile* tiles;  // room for document_tiles_room() a batch entry
  OtherTiles others;
  SegmentRangesParams ranges;
};

struct ForwardParams {
  // Axes (D, T, N, B), box (64, tile_q, 1, 1), 128-byte swizzle. Config::packed_heads, with G heads in a group: axes
  // (D, G, K, B * T), box (64, 2^group_shift, 1, queries of a tile).
  TensorMap q;
  TensorMap k;    // axes (D, S, K, B), box (64, tile_kv, 1, 1), likewise
  TensorMap v;    // axes (Dv, S, K, B), box (64, tile_kv, 1, 1), likewise
  TensorMap out;  // axes (Dv, T, N, B), box (64, 64, 1, 1), likewise
  ProblemParams problem;
  float* lse;             // [B, N, T]
  int32_t* next_item;     // zero at launch, or null if there is a block for every item
  int32_t tiles;          // query tiles of one head, or of one group
  int32_t items;          // B * N * tiles, or B * K * tiles; times key_splits if Config::partial_results
  int32_t first_rows;     // queries of the first tile, at most tile_q; read if cuts_first_tile()
  int32_t section_heads;  // heads whose tiles are scheduled together, heaviest first (attn/schedule.cuh)
  int32_t last_section;   // the section that has all heads that are left
  TensorMap bias;         // axes (S, T, N or 1, B or 1), box (64, tile_q, 1, 1), likewise; read if Config::staged_bias
  int32_t bias_heads, bias_batch;  // extents of those axes
  PackedMask mask;                 // of queries as rows; read if Config::mask
  bool batch_fastest;              // neighbouring items differ in the batch entry, not the head: they share a bias
  // Config::partial_results
  float* partial_out;  // [key_splits, B, N, T, Dv], each part normalised; written instead of out
  RowPart* row_parts;  // [key_splits, B, N, T]; instead of lse
  int32_t key_splits;  // items are parts of tiles: the part is the fastest index
  // Config::cap_series
  CapSeries<4> cap_series;
  SquaredCapSeries short_cap_series;
  float trusted_sum;  // sums of probabilities below it prove that short_cap_series held (cap_series.cuh); 0: none do
  // Config::documents
  const DocumentTile* documents;
  void* rows_out;  // [B, T, N, Dv], where `out` may not write a whole box; packed_heads: always
  // Config::packed_heads
  int32_t group_shift;  // rows of a query: 2^group_shift, at least the heads of a group (rows.cuh)
};

// sm90/forward_combine.cuh
struct CombineParams {
  const float* partial_out;  // as in ForwardParams
  const RowPart* row_parts;
  void* out;           // [B, T, N, Dv]
  float* lse;          // [B, N, T]
  PerHeadFloat sinks;  // read only if Config::sinks
  int64_t rows;        // B * N * T
  int32_t q_len, num_heads, head_dim_v;
};

}  // namespace jattn::sm90
