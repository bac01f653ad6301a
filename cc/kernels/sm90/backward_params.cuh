// What the sm90 backward kernels are given. Plain C++20: the host compiler reads it too.
#pragma once

#include "sm90/forward_params.cuh"

namespace jattn::sm90 {

inline constexpr int kStatisticsRows = 128;  // statistics of a head are padded to a multiple of this
inline constexpr int kDqTurnRows = 64;  // rows of dq_accumulator for which there are counters: at most those of a tile

// Words of the counters of a kernel whose blocks take items: those of documents, then these.
enum BackwardCounter {
  kNextCast = kDocumentCounters,  // tiles of dq that casters have taken (backward_caster.cuh)
  kItemsDone  // of each key/value head, [B, K]: items whose parts of dq have been added, by each sender
};

// What BackwardParams::dq_turns says of dq of a tile of queries, where sums are in any order. In the order of the key
// tiles it says how many of these there are up to the last that was added; 0 and kDqCast are as here.
enum DqTurnState {
  kDqNothing,
  kDqStoring,        // the first part is on its way
  kDqStored,         // and is there: others may be added
  kDqCast = 1 << 30  // a caster has written the tile of dq; the sums are gone
};

// One struct for the kernels that own keys (sm90_backward, sm90_backward_dkv) and for the one that owns queries
// (sm90_backward_dq). Boxes of inputs are (64, tile_q, 1, 1) and (64, tile_kv, 1, 1), those of results (64, 64, 1, 1),
// all with 128-byte swizzle.
struct BackwardParams {
  TensorMap q;     // axes (D, T, N, B)
  TensorMap k;     // axes (D, S, K, B)
  TensorMap v;     // axes (Dv, S, K, B)
  TensorMap dout;  // axes (Dv, T, N, B)
  TensorMap dq;    // axes (D, T, N, B); read by sm90_backward_dq
  TensorMap dk;    // axes (D, S, K, B); read if wants_dk
  TensorMap dv;    // axes (Dv, S, K, B); read if wants_dv
  ProblemParams problem;
  // [B, N, rows_padded]: lse * log2(e), and rowsum(dout * out) - dlse; +inf and 0 for rows that see no key and beyond
  // T. If has_scaled_statistics(), less the logarithm of the factor of kept pairs, and over it.
  const float* lse_log2;
  const float* delta;
  const uint8_t* row_flags;  // [B, N, rows_padded / kStatisticsRows]: 1 if one of the rows inside T sees no key
  // [B, N, rows_padded, head_dim of the tile] in the order of backward_cast.cuh; sm90_backward only
  float* dq_accumulator;
  int64_t rows_padded;    // a multiple of kStatisticsRows; Config::documents: for other_tiles_room()
  int32_t tiles;          // tiles of one head along the axis that a block owns
  int32_t section_heads;  // heads whose tiles are scheduled together, heaviest first (attn/schedule.cuh)
  int32_t last_section;   // the section that has all heads that are left
  int32_t rotation;       // key tile n visits its query tiles from the (n * rotation)-th on, round the end
  // Not 0: all heads of a group visit a tile of queries before the next. Key tiles below this one then begin at their
  // last tile of queries, others at the first (walks_groups()).
  int32_t descending_tiles;
  bool wants_dk, wants_dv;
  TensorMap bias;      // axes (S, T, N or 1, B or 1), box (64, tile_q, 1, 1); read if Config::staged_bias
  PackedMask mask;     // for the axis that the kernel owns; read if Config::mask
  bool batch_fastest;  // neighbouring blocks work on batch entries, not heads: they share tiles of a bias
  // Config::stores_ds: a launch works on the key/value heads [first_kv_head, first_kv_head + launched_kv_heads) of the
  // batch entries [first_entry, first_entry + launched_entries).
  TensorMap ds;  // axes (S, T, query heads of the launch or all, entries of a launch), box (64, tile_q, 1, 1)
  int32_t first_kv_head, launched_kv_heads, first_entry, launched_entries;
  int32_t first_ds_head;  // query head that stands first in ds
  bool adds_ds;           // to what an earlier launch left there for other batch entries
  // Config::schedule 2
  int32_t items;
  // DocumentCounter, BackwardCounter. Items taken beside the first of each block; if orders_dq() all. Zeroed by
  // backward_prepare.
  int32_t* next_item;
  // Config::documents
  const DocumentTile* documents;  // of keys
  void *rows_dk, *rows_dv;        // [B, S, K, D] and [B, S, K, Dv], where dk and dv may not write a whole box
  // [B, N, rows_padded / kDqTurnRows, 2]: what has been added to dq of a tile of queries, where its rows of the
  // accumulator begin, by each of num_senders() (backward_sender.cuh); zeroed by backward_prepare; read and written if
  // Config::dq_order
  int32_t* dq_turns;
  void* rows_dq;  // dq, [B, T, N, D]; written if casts_beside()
  // [B, K, S]: of the gradients of scores, over the queries and heads of a key; written if Config::sums_bias
  float* key_sums;
};

// backward_dbias.cuh
struct DbiasParams {
  BackwardParams backward;  // tiles, section_heads and what follows them are not read, but for bias and mask
  DbiasTiles bias;
};

// backward_sum.cuh
struct SumParams {
  const void* parts;         // what is added up: rows of `elements` numbers of the element type, `stride` apart
  void* result;              // [elements], likewise
  int64_t elements, stride;  // multiples of kSumElements
  int32_t count;
};

// backward_prepare.cuh
struct PrepareParams {
  const void* out;            // [B, T, N, Dv]
  const void* dout;           // [B, T, N, Dv]
  const float* lse;           // [B, N, T]
  const float* dlse;          // [B, N, T] or null
  const int32_t* q_lengths;   // [B] or null
  const float* dropout_rate;  // of batch entries, dropout_rate_stride apart: for has_scaled_statistics(); or null
  int32_t dropout_rate_stride;
  float* lse_log2;  // as in BackwardParams
  float* delta;
  uint8_t* row_flags;
  float* dq_accumulator;  // zeroed here; or null
  int32_t* next_item;     // [counters], likewise; or null
  int32_t* dq_turns;      // likewise
  int64_t rows_padded;
  int32_t accumulator_width;  // columns of dq_accumulator
  int32_t q_len, num_heads, head_dim_v;
  int32_t counters;  // DocumentCounter, BackwardCounter
};

// backward_cast.cuh
struct CastParams {
  TensorMap dq;  // axes (D, T, N, B), box (64, tile_q, 1, 1), 128-byte swizzle
  const float* dq_accumulator;
  const int32_t* dq_turns;   // as in BackwardParams; or null: the accumulator holds zeros where nothing was added
  const int32_t* q_lengths;  // [B] or null
  int64_t rows_padded;
  int32_t tiles;  // query tiles of one head
  int32_t q_len, num_heads;
  float scale;
  // Of a kernel with Config::documents, unless its list was refused: the rows of each tile, [B, tiles]; or null.
  const TileRows* row_tiles;
  const int32_t* counters;  // DocumentCounter
  void* rows_dq;            // [B, T, N, D], where dq may not write a whole box
  int32_t head_dim;         // D
};

}  // namespace jattn::sm90
