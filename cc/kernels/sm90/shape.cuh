// Sizes of the forward kernel and of its small companions that follow from a Config: threads, registers, shared memory.
// Plain C++20: the host launches by them.
#pragma once

#include "base/integers.cuh"
#include "config.cuh"
#include "sm90/forward_choices.cuh"
#include "sm90/tile_shape.cuh"

namespace jattn::sm90 {

JATTN_HOST_DEVICE constexpr int forward_threads(const Config& config) {
  return (1 + num_consumers(config)) * kWarpgroupThreads;
}

// One block per multiprocessor. Launch bounds must say so: without it ptxas ignores the hand-over of registers (C7508).
JATTN_HOST_DEVICE constexpr int forward_min_blocks(const Config&) { return 1; }

// The warps beside the producer that call Philox (Config::drops_beside, drops.cuh), and the tiles whose pairs they have
// found that there is room for.
inline constexpr int kDropWarps = 3;
JATTN_HOST_DEVICE constexpr int drop_places(const Config& config) { return config.stages + 2; }

// Bits: words of a consumer thread, of 64 columns each.
JATTN_HOST_DEVICE constexpr int drop_bit_words(const Config& config) { return ceil_div(config.tile_kv, 64); }
// Words of the calls of a row of groups, by columns: rows lie 64 bytes apart from a multiple of 128, so that neither
// what stores nor what loads meets in a bank.
JATTN_HOST_DEVICE constexpr int drop_row_words(const Config& config) {
  const int words = config.tile_kv / 8 * 4;
  return words % 32 == 16 ? words : words + 16;
}
// Of a tile.
JATTN_HOST_DEVICE constexpr int drop_place_words(const Config& config) {
  return drops_are_bits(config) ? drop_bit_words(config) * num_consumers(config) * kWarpgroupThreads
                                : config.tile_q / 8 * drop_row_words(config);
}

// Bits: parts of Philox for the groups of rows and of columns of a tile, a lane of the producer for each.
inline constexpr int kDropParts = 32;
JATTN_HOST_DEVICE constexpr int drop_parts_bytes(const Config& config) {
  return drops_are_bits(config) ? 16 * kDropParts : 0;
}

// Registers per thread after the hand-over. The pool is what the launch took: 168 * 384 or 128 * 512 registers.
JATTN_HOST_DEVICE constexpr int producer_registers(const Config& config) {
  if (num_consumers(config) == 2) return has_busy_producer(config) ? 40 : 24;
  return config.drops_beside && config.head_dim_v <= 96 ? 56 : 32;
}
JATTN_HOST_DEVICE constexpr int consumer_registers(const Config& config) {
  const int pool = num_consumers(config) == 2 ? 3 * 168 : 4 * 128;
  return (pool - producer_registers(config)) / num_consumers(config);
}

// Records of items: one is written when q's place is free again, while the item before may still be in its last tile.
inline constexpr int kItemSlots = 2;

// Room for the items that are lost (Consumer::list_if_lost) before the producer, which looks at the begin of each item,
// sees the first of them: as many as have a record and the one that it begins then. Each of their warps may list it.
JATTN_HOST_DEVICE constexpr int lost_items_room(const Config& config) {
  return (kItemSlots + 1) * num_consumers(config) * (kWarpgroupThreads / 32);
}

// Bytes of a tile of the bias in shared memory, chunks of 64 keys with queries along rows; 0 if it is read elsewhere.
JATTN_HOST_DEVICE constexpr int staged_bias_bytes(const Config& config) {
  return config.bias && config.staged_bias ? tile_bytes(config.tile_q, config.tile_kv) : 0;
}

// Queries of the first tile of a head if cuts_first_tile(): whole boxes of kWarpgroupRows.
JATTN_HOST_DEVICE constexpr int64_t rows_of_first_tile(const Config& config, int64_t q_len) {
  const int64_t left_over = q_len % config.tile_q;
  return left_over % kWarpgroupRows == 0 && left_over > 0 ? left_over : config.tile_q;
}

// Numbers of an item's head that the consumers need: slope, sink, dropout. With packed heads a sink is one of the row.
JATTN_HOST_DEVICE constexpr bool has_head_numbers(const Config& config) {
  return config.alibi || (config.sinks && !config.packed_heads) || config.dropout;
}

JATTN_HOST_DEVICE constexpr bool has_control_extras(const Config& config) {
  return config.mask || config.row_bias || config.positions || config.partial_results || has_head_numbers(config);
}

// A warp frees a tile of k when it has done with those before, so that one more place for rows is enough.
JATTN_HOST_DEVICE constexpr int row_bias_places(const Config& config) {
  return config.stages + (frees_k_before_row(config) ? 1 : 0);
}

// Barriers, tile headers, item records: everything but the tiles.
JATTN_HOST_DEVICE constexpr int control_bytes(const Config& config) {
  const int rows = kItemSlots * config.tile_q, columns = config.stages * config.tile_kv;
  const int barriers = 8 * (3 + 4 * config.stages);
  const int headers = 8 * config.stages;
  const int records = kItemSlots * (32 + 4) + 8 + 4 * lost_items_room(config);
  const int ids = config.segments ? 4 * (rows + columns) : 0;
  const int positions = config.positions ? 4 * (rows + columns) : 0;
  const int row_bias = config.row_bias ? 2 * 4 * row_bias_places(config) * config.tile_kv : 0;
  const int mask = config.mask ? 16 * config.stages * config.tile_q : 0;
  const int numbers = has_head_numbers(config) ? 24 * kItemSlots : 0;
  const int parts = config.partial_results ? 4 * kItemSlots : 0;
  const int placeholders = has_control_extras(config) ? 96 : 0;  // of the extras that are not there; alignment
  const int drop_place = 2 * 8 + 16 + 4 * drop_place_words(config) + drop_parts_bytes(config);
  const int drops = config.drops_beside ? drop_places(config) * drop_place + 16 : 0;
  return barriers + 8 + headers + records + ids + positions + row_bias + mask + numbers + parts + placeholders + drops;
}

JATTN_HOST_DEVICE constexpr int stage_bytes(const Config& config) {
  return tile_bytes(config.tile_kv, config.head_dim) + tile_bytes(config.tile_kv, config.head_dim_v) +
         staged_bias_bytes(config);
}

JATTN_HOST_DEVICE constexpr int q_bytes(const Config& config) { return tile_bytes(config.tile_q, config.head_dim); }

JATTN_HOST_DEVICE constexpr int bytes_without_q(const Config& config) {
  return config.stages * stage_bytes(config) + control_bytes(config);
}

// Chunks of the output tile that have a place of their own. 0: the tile takes q's place, and the next q waits for its
// store. Where not all fit, the others pass through those that do; measured with 256 columns, two places for four
// chunks: +9 % at 1024 keys, +1 to +7 % at 8192. With 192 columns (two places) or 128 beside a q of 192 (one) q's place
// is better: causal 7 and 3 % faster, full equal.
JATTN_HOST_DEVICE constexpr int out_chunks(const Config& config) {
  const int chunk_bytes = tile_bytes(config.tile_q, kChunkColumns), chunks = num_chunks(config.head_dim_v);
  const int places = (kMaxSharedBytes - q_bytes(config) - bytes_without_q(config)) / chunk_bytes;
  if (places >= chunks) return chunks;
  return chunks == 4 && places > 0 ? places : 0;
}

JATTN_HOST_DEVICE constexpr bool out_aliases_q(const Config& config) { return out_chunks(config) == 0; }

JATTN_HOST_DEVICE constexpr int out_offset(const Config& config) { return out_aliases_q(config) ? 0 : q_bytes(config); }

JATTN_HOST_DEVICE constexpr int k_offset(const Config& config) {
  if (!out_aliases_q(config)) return q_bytes(config) + out_chunks(config) * tile_bytes(config.tile_q, kChunkColumns);
  const int out_bytes = tile_bytes(config.tile_q, config.head_dim_v);
  return q_bytes(config) > out_bytes ? q_bytes(config) : out_bytes;
}

JATTN_HOST_DEVICE constexpr int v_offset(const Config& config) {
  return k_offset(config) + config.stages * tile_bytes(config.tile_kv, config.head_dim);
}

JATTN_HOST_DEVICE constexpr int bias_offset(const Config& config) {
  return v_offset(config) + config.stages * tile_bytes(config.tile_kv, config.head_dim_v);
}

JATTN_HOST_DEVICE constexpr int control_offset(const Config& config) {
  return k_offset(config) + config.stages * stage_bytes(config);
}

JATTN_HOST_DEVICE constexpr int forward_shared_bytes(const Config& config) {
  return control_offset(config) + control_bytes(config);
}

// Warps read what travels beside k after the product with k.
JATTN_HOST_DEVICE constexpr bool reads_beside_k(const Config& config) {
  return config.segments || config.positions || config.mask || config.row_bias || config.staged_bias;
}

// Warps still read the k tile, or what travels beside it, after the product with it.
JATTN_HOST_DEVICE constexpr bool holds_k(const Config& config) {
  return reads_beside_k(config) || proves_by_sums(config);
}

// Arrivals that free a buffer, per consumer warpgroup. After a product of the whole warpgroup one thread speaks for
// all; where warps read the stage themselves, each must speak for itself.
JATTN_HOST_DEVICE constexpr int releases_per_warpgroup(const Config& config) { return holds_k(config) ? 4 : 1; }

// forward_combine: one thread per eight columns of a row.
inline constexpr int kCombineColumns = 8;
JATTN_HOST_DEVICE constexpr int combine_threads(const Config&) { return 256; }
JATTN_HOST_DEVICE constexpr int combine_min_blocks(const Config&) { return 1; }

// document_tiles: one block per batch entry, and further ones with a warp per tile of the grid.
JATTN_HOST_DEVICE constexpr int document_tiles_threads(const Config&) { return 1024; }
JATTN_HOST_DEVICE constexpr int document_tiles_min_blocks(const Config&) { return 1; }

// Most runs of segment ids on one side of a batch entry; with more the tiles lie as without documents.
inline constexpr int kMaxDocuments = 1024;

// The same as constants, for device code.
template <Config C>
struct Shape {
  static constexpr int kConsumers = num_consumers(C);
  static constexpr int kReleases = releases_per_warpgroup(C);
  static constexpr int kQBytes = tile_bytes(C.tile_q, C.head_dim);
  static constexpr int kKBytes = tile_bytes(C.tile_kv, C.head_dim);
  static constexpr int kVBytes = tile_bytes(C.tile_kv, C.head_dim_v);
  static constexpr int kBiasBytes = staged_bias_bytes(C);
  static constexpr bool kOutAliasesQ = out_aliases_q(C);
  static constexpr int kOutChunks = kOutAliasesQ ? num_chunks(C.head_dim_v) : out_chunks(C);
  static constexpr int kOutOffset = out_offset(C);
  static constexpr int kKOffset = k_offset(C);
  static constexpr int kVOffset = v_offset(C);
  static constexpr int kBiasOffset = bias_offset(C);
};

}  // namespace jattn::sm90
