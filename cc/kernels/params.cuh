// What the host passes to a kernel: one plain struct per family, by value. Host and device compilers read this file.
//
// Letters as in core/problem.h: B batch, T queries, S keys, N query heads, K key/value heads, D and Dv head dims.
// Strides and lengths count elements. Public arrays are dense; scratch arrays are described where they are declared.
#pragma once

#include "base/types.cuh"

namespace jattn {

// A number of the last section (attn/schedule.cuh) that none reaches: every section has as many heads as it should, if
// so many are left.
inline constexpr int32_t kNoLastSection = 0x7fffffff;

// An array that broadcasts against (B, N, T, S): the stride of a broadcast axis is 0.
struct BroadcastArray {
  const void* data;
  int64_t stride_batch, stride_head, stride_query, stride_key;
  bool pairs;  // two neighbouring keys may be read by one aligned access of twice the element size
};

// A number (or pair of words) per batch entry and query head: element batch * stride_batch + head * stride_head.
struct PerHeadFloat {
  const float* data;
  int32_t stride_batch, stride_head;
};
struct PerHeadWords {
  const uint32_t* data;
  int32_t stride_batch, stride_head;
};
template <class PerHead>
JATTN_HOST_DEVICE constexpr auto element_of_head(const PerHead& array, int64_t batch, int64_t head) {
  return array.data + batch * array.stride_batch + head * array.stride_head;
}

// Which positions a tile of rows holds, padding rows left out; a tile without rows has low > high.
struct PositionRange {
  int32_t low, high;
};

// Which segment ids a tile of rows holds. Padding rows have negative ids and see nobody.
struct SegmentRange {
  int32_t low;       // least id >= 0 (INT32_MAX if there is none); stored as -1 - low if the tile holds padding rows
  int32_t high;      // greatest id; -1 if there is none
  uint64_t members;  // bit id % 64 for every id >= 0: tells tiles apart where ids do not ascend
};

// The problem as forward and backward kernels read it.
struct ProblemParams {
  const void* q;                            // [B, T, N, D]
  const void* k;                            // [B, S, K, D]
  const void* v;                            // [B, S, K, Dv]
  BroadcastArray bias;                      // (B, N, T, S) broadcast; Config::bias_element
  const int32_t* q_lengths;                 // [B] or null
  const int32_t* kv_lengths;                // [B] or null
  const int32_t* q_segments;                // [B, T] or null
  const int32_t* kv_segments;               // [B, S] or null
  const SegmentRange* q_ranges;             // [B, ceil(T / tile_q)], scratch filled by passes/tile_ranges.cuh
  const SegmentRange* kv_ranges;            // [B, ceil(S / tile_kv)], likewise
  const int32_t* q_positions;               // [B, T] or null; within [-2^29, 2^29]
  const int32_t* kv_positions;              // [B, S] or null
  const PositionRange* q_position_ranges;   // [B, ceil(T / tile_q)], likewise; only with a band
  const PositionRange* kv_position_ranges;  // [B, ceil(S / tile_kv)], likewise
  PerHeadFloat sinks;                       // read only if Config::sinks; natural units
  PerHeadFloat alibi_slopes;                // likewise Config::alibi
  PerHeadWords dropout_keys;                // likewise Config::dropout; stride_batch of a table row if dropout_rows
  const float* dropout_rate;                // [B] or [1]
  int32_t dropout_rate_stride;              // 1 or 0
  int32_t num_dropout_rows;                 // rows of the table if dropout_rows; ids are clamped to it
  int32_t batch, q_len, kv_len, num_heads, num_kv_heads, group_size, head_dim, head_dim_v;
  int32_t band_left, band_right;  // at most 2^30 in size: an unbounded side is 2^30
  bool lower_right;
  bool scale_first;  // scores are multiplied before the row maximum: scale <= 0 breaks max(s) * scale = max(s * scale)
  float scale;       // of q.k
  float scale_log2;  // scale * log2(e)
  float softcap_in;  // scale / softcap; read only if Config::softcap
  float softcap_log2;    // softcap * log2(e)
  int32_t copy_bytes;    // widest aligned access (16, 8, 4 or 2) along rows of q, k, dq, dk
  int32_t copy_bytes_v;  // likewise of v, out, dout, dv
  // Read only if Config::program.
  const int32_t* batch_ids;  // [B]
  const int32_t* head_ids;   // [N]
  const void* captures[16];  // what the score program reads
};

// A dense mask as bits in the order of accumulator fragments, made by passes/mask_tiles.cuh. Rows are queries and
// columns keys, or the other way round; strides of broadcast axes are 0.
//
// Bit 2 i + c of word q of a row and a tile of columns is column 8 i + 2 q + c of that tile: what lanes with lane % 4
// == q hold of the row. The words of neighbouring rows are neighbours, 16 bytes a row, padded to whole tiles.
struct PackedMask {
  const uint32_t* words;
  const uint8_t* states;  // a MaskTile for each tile of rows and tile of columns
  int64_t words_batch, words_head, words_column_tile;
  int64_t states_batch, states_head;
  int32_t words_row;  // 4 or 0
  int32_t states_row_tile, states_column_tile;
};

struct ForwardParams {
  ProblemParams problem;
  void* out;              // [B, T, N, Dv]
  float* lse;             // [B, N, T]
  int32_t tiles;          // query tiles of one head
  int32_t slices;         // parts of Dv, each by its own block
  int32_t section_heads;  // heads whose tiles are scheduled together, heaviest first (attn/schedule.cuh)
  PackedMask mask;        // rows are queries; read only if Config::mask
};

inline constexpr int kRowPadding = 128;

// Row statistics are padded to rows_padded rows per head, a multiple of kRowPadding, so that a tile never reads past
// the end.
struct BackwardParams {
  ProblemParams problem;
  const void* dout;       // [B, T, N, Dv]
  const float* lse_log2;  // [B, N, rows_padded]: lse * log2(e); +inf for rows that see no key and beyond T
  const float* delta;     // [B, N, rows_padded]: rowsum(dout * out) - dlse; 0 for such rows
  void* dq;               // [B, T, N, D]; read by backward_dq
  void* dk;               // [B, S, K, D]
  void* dv;               // [B, S, K, Dv]
  float* dq_accumulator;  // [B, N, rows_padded, head_dim of the tile] in fragment order, zeroed; fused form only
  int32_t rows_padded;
  int32_t tiles;   // tiles of one head along the axis that a block owns
  int32_t slices;  // parts of the head dim of the results, each by its own block
  int32_t section_heads;
  PackedMask mask;  // rows are the axis that a block owns; read only if Config::mask
};

// passes/tile_ranges.cuh: the tiles of both sides, queries and keys.
struct TilesOfSides {
  int32_t extent[2];  // T, S
  int32_t tile[2];    // rows of a tile
  int32_t tiles[2];   // of a batch entry
  int32_t batch;
};

struct SegmentRangesParams {
  const int32_t* segments[2];  // q_segments [B, T], kv_segments [B, S]
  SegmentRange* ranges[2];     // [B, sides.tiles[i]]
  TilesOfSides sides;
};

struct PositionRangesParams {
  const int32_t* positions[2];  // q_positions [B, T], kv_positions [B, S]
  const int32_t* segments[2];   // likewise, or null
  const int32_t* lengths[2];    // [B], or null
  PositionRange* ranges[2];     // [B, sides.tiles[i]]
  TilesOfSides sides;
};

// What the pairs of a tile have in common, as far as they exist.
enum MaskTile : uint8_t { kMaskTileEmpty, kMaskTileFull, kMaskTileMixed };

// passes/mask_tiles.cuh
struct MaskTilesParams {
  const uint8_t* mask;
  int64_t stride_batch, stride_head, stride_row, stride_column;  // elements of the mask
  uint32_t* words;                                               // [batch, heads, column_tiles, rows_padded, 4]
  uint8_t* states;                                               // [batch, heads, row_tiles, column_tiles]
  int64_t rows_padded;
  int32_t heads;                    // of the mask: 1 where it is broadcast
  int32_t rows, columns;            // of the mask; a broadcast axis of columns is one tile wide
  int32_t tile_rows, tile_columns;  // at most 256 and 128; tile_columns a multiple of 16
  int32_t row_tiles, column_tiles;  // of the mask
  bool keys_are_rows;               // the axis that is contiguous in memory
  bool wide;                        // rows of memory start on 16-byte boundaries
};

// passes/row_delta.cuh
struct RowDeltaParams {
  const void* out;           // [B, T, N, Dv]
  const void* dout;          // [B, T, N, Dv]
  const float* lse;          // [B, N, T]
  const float* dlse;         // [B, N, T] or null
  const int32_t* q_lengths;  // [B] or null
  float* lse_log2;           // [B, N, rows_padded]
  float* delta;              // [B, N, rows_padded]
  float* dq_accumulator;     // [B, N, rows_padded, accumulator_width], zeroed here; or null
  int32_t rows_padded;
  int32_t accumulator_width;
  int32_t q_len, num_heads, head_dim_v;
};

// passes/cast_grad.cuh
struct CastGradParams {
  const float* dq_accumulator;  // [B, N, rows_padded, accumulator_width] in fragment order
  const int32_t* q_lengths;     // [B] or null
  void* dq;                     // [B, T, N, D]
  int32_t rows_padded;
  int32_t q_len, num_heads, head_dim;
  float scale;
};

// What the kernels for dbias make, and how its tiles are handed out to blocks.
struct DbiasTiles {
  void* result;     // shape and strides of the bias; written if splits == 1
  float* partials;  // [splits, elements of the bias]; written otherwise
  int64_t bias_elements;
  int32_t extent_batch, extent_head, extent_query, extent_key;  // of the bias: 1 or B, N, T, S
  int32_t tiles_query, tiles_key;                               // tiles of the bias: 1 for a broadcast axis
  int32_t splits;                                               // blocks that share one tile of the bias
};

// sm80/backward_dbias.cuh
struct DbiasParams {
  BackwardParams backward;
  DbiasTiles bias;
};

// sm80/backward_dslopes.cuh
struct SlopesParams {
  BackwardParams backward;
  float* dslopes;  // [B, N, backward.tiles]
};

// sm80/backward_dcaptures.cuh
struct CapturesParams {
  BackwardParams backward;
  float* sums;                     // [copies, elements]: gradients of captures, one after the other, zeroed
  unsigned long long* whole_sums;  // [copies, elements]: the same in units, of 64 bits with a sign, zeroed
  unsigned* largest;               // [captures]: size of the largest summand, bits of a float, zeroed
  int64_t elements;
  int32_t copies;
  int32_t pairs_log2;  // there are at most 2^pairs_log2 pairs
};

// passes/capture_sums.cuh
struct CaptureSumsParams {
  const float* sums;                     // as in CapturesParams
  const unsigned long long* whole_sums;  // or null: there are sums
  const unsigned* largest;
  float* gradients;  // [elements]
  int64_t elements;
  int32_t copies;
  int32_t pairs_log2;
};

// passes/sum_partials.cuh
struct SumPartialsParams {
  const float* partials;  // [elements / group, splits, group]
  void* result;           // [elements]
  int64_t elements;
  int64_t group;  // elements of the result that lie beside each other in every split
  int32_t splits;
};

}  // namespace jattn
