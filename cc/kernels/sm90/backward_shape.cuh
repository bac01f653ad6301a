// Sizes of the backward kernels that follow from a Config. Plain C++20: the host launches by them.
#pragma once

#include "sm90/backward_choices.cuh"
#include "sm90/tile_shape.cuh"

namespace jattn::sm90 {

JATTN_HOST_DEVICE constexpr int backward_threads(const Config& config) {
  return (1 + kBackwardConsumers + (has_dq_warpgroup(config) ? 1 : 0)) * kWarpgroupThreads;
}

// One block per multiprocessor; without a bound ptxas ignores the hand-over of registers (C7508).
JATTN_HOST_DEVICE constexpr int backward_min_blocks(const Config&) { return 1; }

// Registers per thread after the hand-over; together as many as at launch (168 * 384).
JATTN_HOST_DEVICE constexpr int backward_consumer_registers(const Config& config) {
  return has_wide_producer(config) ? 232 : 240;
}

JATTN_HOST_DEVICE constexpr int backward_producer_registers(const Config& config) {
  return has_wide_producer(config) ? 40 : 24;
}

// With a warpgroup for dq the launch takes 128 * 512 registers; the producer leaves this to those of dv and dk, that of
// dq keeps its 128. ptxas (13.0) refuses instructions with more than 128 registers then (C7602): head dims to 192.
inline constexpr int kDvRegisters = 176, kDkRegisters = 184;

// Bytes of lse or delta of the queries of one stage.
JATTN_HOST_DEVICE constexpr int statistics_bytes(const Config& config) { return 4 * config.tile_q; }

// Bytes of one tile of a bias in shared memory, chunks of 64 keys, queries along rows; 0 if it is read where it lies.
JATTN_HOST_DEVICE constexpr int bias_tile_bytes(const Config& config) {
  return config.bias && config.staged_bias ? tile_bytes(config.tile_q, config.tile_kv) : 0;
}

// Warps of the producer's warpgroup that find the pairs which dropout removes (Config::drops_beside,
// backward_drops.cuh), one for the keys of each consumer warpgroup: for each of its threads a word, with a bit for each
// of 32 pairs.
inline constexpr int kBackwardDropWarps = kBackwardConsumers;
inline constexpr int kDropSteps = 3;      // records of steps for them; more than stages
inline constexpr int kDropStepParts = 8;  // groups of the queries of a step
JATTN_HOST_DEVICE constexpr int step_drops_bytes(const Config& config) {
  constexpr int kBarriers = (kDropSteps + 2 * kBackwardConsumers + 1) / 2 * 2;  // in whole 16 bytes
  constexpr int kBits = 4 * kBackwardConsumers * kWarpgroupThreads;
  return config.drops_beside ? kBits + 16 * kDropSteps * (1 + kDropStepParts) + 32 * kBackwardDropWarps + 8 * kBarriers
                             : 0;
}

inline constexpr int kStepTermsBytes = 32;  // of the terms of a step: StepTerms
// Numbers of warps of the producer's warpgroup, behind those that send dq: the one that casts it (casts_beside()).
inline constexpr int kCasterWarp = 1 + kBackwardConsumers;
// Of the warp that stores gradients of scores (Config::stores_ds): its number, behind those that send dq, and the warps
// it waits for.
inline constexpr int kStorerWarp = 1 + kBackwardConsumers;
inline constexpr int kDsWriters = kBackwardConsumers * kWarpgroupThreads / 32;
inline constexpr int kDsPlaceBytes = 24;  // record and barrier of a tile of gradients of scores that is stored
inline constexpr int kDqStepsBytes = 64;  // records and barriers between the warpgroups of dk and of dq
inline constexpr int kDqTurns = 4;        // records of steps for the warps that add dq up
inline constexpr int kSendersBytes = 32 * kDqTurns + 64 + 16;
inline constexpr int kMaskRowBytes = 16;  // of a tile: 128 bits
// What the control block holds for features: positions, packed mask, terms of steps, barriers of bias tiles, places of
// stored gradients, sums of keys, dropout. owned, visited: rows of a tile of either axis.
JATTN_HOST_DEVICE constexpr int backward_feature_bytes(const Config& config, int owned, int visited) {
  const int positions = config.positions ? 4 * (owned + config.stages * visited) : 0;
  const int mask = config.mask ? config.stages * owned * kMaskRowBytes : 0;
  const int terms = has_step_terms(config) ? config.stages * kStepTermsBytes : 0;
  const int barriers = bias_tile_bytes(config) > 0 ? 16 * config.stages : 0;
  const int stored = config.stores_ds ? config.stages * kDsPlaceBytes : 0;
  const int key_sums = config.sums_bias ? 4 * config.tile_kv : 0;
  return positions + mask + terms + barriers + stored + key_sums + step_drops_bytes(config);
}

// Barriers, headers, statistics, ids: everything but the tiles.
JATTN_HOST_DEVICE constexpr int backward_control_bytes(const Config& config, bool owns_queries) {
  const int statistics = owns_queries ? 32 : 2 * config.stages * statistics_bytes(config);
  const int owned = owns_queries ? config.tile_q : config.tile_kv;
  const int visited = owns_queries ? config.tile_kv : config.tile_q;
  const int ids = config.segments ? 4 * (owned + config.stages * visited) : 8;
  const int barriers = 8 * (4 + 4 * config.stages + 4) + (has_dq_warpgroup(config) ? kDqStepsBytes : 0) +
                       (has_senders(config) ? kSendersBytes : 0);
  const int features = backward_feature_bytes(config, owned, visited);
  constexpr int kItem = 32, kAlignment = 16;
  return (statistics + ids + 16 * config.stages + kItem + barriers + features + kAlignment - 1) / kAlignment *
         kAlignment;
}

// Places in the shared memory of a kernel that owns keys: k, v, rings of q and dout, and what the kernel needs besides.
struct KeyLayout {
  int k, v, q, dout, exchange, ds, staging, bias, control, bytes;
  int bias_slots;     // a bias tile is needed for the shortest part of a step, so one slot where memory is short
  int staging_slots;  // of parts of dq: sums take longer to reach memory than a step, so two where there is room
  int staging_bytes;  // of one
};

// fused: dq too. ds holds two tiles of score gradients [tile_kv][tile_q], exchange as many of weights, thread by
// thread.
JATTN_HOST_DEVICE constexpr KeyLayout key_layout(const Config& config, bool fused) {
  KeyLayout layout{};
  layout.v = tile_bytes(config.tile_kv, config.head_dim);
  layout.q = layout.v + tile_bytes(config.tile_kv, config.head_dim_v);
  layout.dout = layout.q + config.stages * tile_bytes(config.tile_q, config.head_dim);
  const int two_tiles = 2 * config.tile_kv * config.tile_q * 2;
  layout.exchange = layout.dout + config.stages * tile_bytes(config.tile_q, config.head_dim_v);
  layout.ds = layout.exchange + (splits_gradients(config) ? two_tiles : 0);
  layout.staging = layout.ds + (fused ? two_tiles : 0);
  const int control_bytes = backward_control_bytes(config, false), bias_bytes = bias_tile_bytes(config);
  layout.staging_bytes = fused && config.bulk_reduce ? config.tile_q * config.head_dim * 4 : 0;
  const bool has_room = layout.staging + 2 * layout.staging_bytes + bias_bytes + control_bytes <= kMaxSharedBytes;
  layout.staging_slots = has_room && takes_items(config) ? 2 : 1;
  layout.bias = layout.staging + layout.staging_slots * layout.staging_bytes;
  layout.bias_slots = layout.bias + config.stages * bias_bytes + control_bytes <= kMaxSharedBytes ? config.stages : 1;
  layout.control = layout.bias + layout.bias_slots * bias_bytes;
  layout.bytes = layout.control + control_bytes;
  return layout;
}

JATTN_HOST_DEVICE constexpr int backward_shared_bytes(const Config& config, bool fused) {
  return key_layout(config, fused).bytes;
}

// Places in the shared memory of the kernel that owns queries: q (later dq), dout, rings of k and v.
struct QueryLayout {
  int q, dout, k, v, bias, control, bytes;
  int bias_slots;  // 1 where memory is short
  int v_stages;    // v is needed for the shortest part of a step, so one stage less than k where memory is short
};

JATTN_HOST_DEVICE constexpr QueryLayout query_layout(const Config& config) {
  QueryLayout layout{};
  layout.dout = tile_bytes(config.tile_q, config.head_dim);
  layout.k = layout.dout + tile_bytes(config.tile_q, config.head_dim_v);
  layout.v = layout.k + config.stages * tile_bytes(config.tile_kv, config.head_dim);
  const int v_bytes = tile_bytes(config.tile_kv, config.head_dim_v);
  const int control_bytes = backward_control_bytes(config, true);
  const int bias_bytes = bias_tile_bytes(config);
  layout.v_stages =
      layout.v + config.stages * v_bytes + bias_bytes + control_bytes <= kMaxSharedBytes ? config.stages : 1;
  layout.bias = layout.v + layout.v_stages * v_bytes;
  layout.bias_slots = layout.bias + config.stages * bias_bytes + control_bytes <= kMaxSharedBytes ? config.stages : 1;
  layout.control = layout.bias + layout.bias_slots * bias_bytes;
  layout.bytes = layout.control + control_bytes;
  return layout;
}

JATTN_HOST_DEVICE constexpr int backward_dq_shared_bytes(const Config& config) { return query_layout(config).bytes; }

// Places in the shared memory of the kernel for dbias: a ring of C.stages places, each for q and k or dout and v; the
// bias.
struct DbiasLayout {
  int place_bytes, bias, control, bytes;
};

JATTN_HOST_DEVICE constexpr int dbias_control_bytes(const Config& config) {
  const int row_bytes = (config.segments ? 4 : 0) + (config.positions ? 4 : 0);
  const int rows = row_bytes * (config.tile_q + config.tile_kv) + (config.mask ? config.tile_q * kMaskRowBytes : 0);
  constexpr int kStepBytes = 32, kBarriers = 16, kSmallest = 128;
  return config.stages * (rows + kStepBytes + kStepTermsBytes + kBarriers) + kSmallest;
}

JATTN_HOST_DEVICE constexpr int dbias_place_bytes(const Config& config) {
  const int width = config.head_dim > config.head_dim_v ? config.head_dim : config.head_dim_v;
  return tile_bytes(config.tile_q, width) + tile_bytes(config.tile_kv, width);
}

// A bias that is not staged is kept in float32, as threads hold it, where that fits; else it is read in every step.
JATTN_HOST_DEVICE constexpr bool keeps_bias(const Config& config) {
  const int rest = config.stages * dbias_place_bytes(config) + dbias_control_bytes(config);
  return !config.staged_bias && rest + config.tile_q * config.tile_kv * 4 <= kMaxSharedBytes;
}

JATTN_HOST_DEVICE constexpr DbiasLayout dbias_layout(const Config& config) {
  DbiasLayout layout{};
  layout.place_bytes = dbias_place_bytes(config);
  layout.bias = config.stages * layout.place_bytes;
  const int kept_bytes = keeps_bias(config) ? config.tile_q * config.tile_kv * 4 : 0;
  layout.control = layout.bias + (config.staged_bias ? bias_tile_bytes(config) : kept_bytes);
  layout.bytes = layout.control + dbias_control_bytes(config);
  return layout;
}

JATTN_HOST_DEVICE constexpr int backward_dbias_shared_bytes(const Config& config) { return dbias_layout(config).bytes; }

// How the two consumer warpgroups share the product dq = ds k: by rows if the tile has 128 queries, else by columns. A
// warp holds 16 rows and dq_part_columns() columns.
JATTN_HOST_DEVICE constexpr int dq_part_columns(const Config& config) {
  return config.tile_q == 128 ? config.head_dim : config.head_dim / 2;
}

// One block per kStatisticsRows rows of a head; lanes that share a row: one for each 16 bytes, a power of two.
JATTN_HOST_DEVICE constexpr int prepare_threads(const Config&) { return 256; }
JATTN_HOST_DEVICE constexpr int prepare_min_blocks(const Config&) { return 4; }
JATTN_HOST_DEVICE constexpr int prepare_row_lanes(const Config& config) {
  return config.head_dim_v <= 64 ? 8 : config.head_dim_v <= 128 ? 16 : 32;
}

// A thread adds up 16 bytes of every part.
inline constexpr int kSumElements = 8;
JATTN_HOST_DEVICE constexpr int sum_threads(const Config&) { return 256; }
JATTN_HOST_DEVICE constexpr int sum_min_blocks(const Config&) { return 4; }

// One block per query tile of a head, with as many warps as two consumer warpgroups: each takes one of the parts.
JATTN_HOST_DEVICE constexpr int cast_threads(const Config&) { return kBackwardConsumers * kWarpgroupThreads; }
JATTN_HOST_DEVICE constexpr int cast_min_blocks(const Config&) { return 1; }
JATTN_HOST_DEVICE constexpr int cast_shared_bytes(const Config& config) {
  return tile_bytes(config.tile_q, config.head_dim);
}

}  // namespace jattn::sm90
