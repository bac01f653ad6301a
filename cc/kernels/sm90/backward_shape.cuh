// Sizes of the backward kernels that follow from a Config. Plain C++20: the host launches by them.
#pragma once

#include "sm90/shape.cuh"

namespace jattn::sm90 {

// One producer and two consumer warpgroups, whatever the tile.
inline constexpr int kBackwardConsumers = 2;
inline constexpr int kBackwardConsumerRegisters = 240;
inline constexpr int kBackwardProducerRegisters = 24;

JATTN_HOST_DEVICE constexpr int backward_threads(const Config&) { return (1 + kBackwardConsumers) * kWarpgroupThreads; }

// One block per multiprocessor; without a bound ptxas ignores the hand-over of registers (C7508).
JATTN_HOST_DEVICE constexpr int backward_min_blocks(const Config&) { return 1; }

// Head dims above 128 do not leave registers for both gradients of 64 keys in one warpgroup: one takes dv, the other dk.
JATTN_HOST_DEVICE constexpr bool splits_gradients(const Config& config) {
  return config.head_dim > 128 || config.head_dim_v > 128;
}

// Bytes of lse or delta of the queries of one stage.
JATTN_HOST_DEVICE constexpr int statistics_bytes(const Config& config) { return 4 * config.tile_q; }

// Barriers, headers, statistics, ids: everything but the tiles.
JATTN_HOST_DEVICE constexpr int backward_control_bytes(const Config& config, bool owns_queries) {
  const int statistics = owns_queries ? 32 : 2 * config.stages * statistics_bytes(config);
  const int owned = owns_queries ? config.tile_q : config.tile_kv;
  const int visited = owns_queries ? config.tile_kv : config.tile_q;
  const int ids = config.segments ? 4 * (owned + config.stages * visited) : 8;
  const int barriers = 8 * (2 + 4 * config.stages + 4);
  constexpr int kItem = 32, kAlignment = 16;
  return (statistics + ids + 16 * config.stages + kItem + barriers + kAlignment - 1) / kAlignment * kAlignment;
}

// Places in the shared memory of a kernel that owns keys: k, v, rings of q and dout, and what the kernel needs besides.
struct KeyLayout {
  int k, v, q, dout, ds, staging, control, bytes;
};

// fused: dq too. ds holds two tiles of score gradients [tile_kv][tile_q]; split kernels pass probabilities through it.
JATTN_HOST_DEVICE constexpr KeyLayout key_layout(const Config& config, bool fused) {
  KeyLayout layout{};
  layout.v = tile_bytes(config.tile_kv, config.head_dim);
  layout.q = layout.v + tile_bytes(config.tile_kv, config.head_dim_v);
  layout.dout = layout.q + config.stages * tile_bytes(config.tile_q, config.head_dim);
  layout.ds = layout.dout + config.stages * tile_bytes(config.tile_q, config.head_dim_v);
  layout.staging = layout.ds + (fused || splits_gradients(config) ? 2 * config.tile_kv * config.tile_q * 2 : 0);
  layout.control = layout.staging + (fused && config.bulk_reduce ? config.tile_q * config.head_dim * 4 : 0);
  layout.bytes = layout.control + backward_control_bytes(config, false);
  return layout;
}

JATTN_HOST_DEVICE constexpr int backward_shared_bytes(const Config& config, bool fused) {
  return key_layout(config, fused).bytes;
}

// Places in the shared memory of the kernel that owns queries: q (later dq), dout, rings of k and v.
struct QueryLayout {
  int q, dout, k, v, control, bytes;
  int v_stages;  // v is needed for the shortest part of a step, so one stage less than k where memory is short
};

JATTN_HOST_DEVICE constexpr QueryLayout query_layout(const Config& config) {
  QueryLayout layout{};
  layout.dout = tile_bytes(config.tile_q, config.head_dim);
  layout.k = layout.dout + tile_bytes(config.tile_q, config.head_dim_v);
  layout.v = layout.k + config.stages * tile_bytes(config.tile_kv, config.head_dim);
  const int v_bytes = tile_bytes(config.tile_kv, config.head_dim_v);
  const int control_bytes = backward_control_bytes(config, true);
  layout.v_stages = layout.v + config.stages * v_bytes + control_bytes <= kMaxSharedBytes ? config.stages : 1;
  layout.control = layout.v + layout.v_stages * v_bytes;
  layout.bytes = layout.control + control_bytes;
  return layout;
}

JATTN_HOST_DEVICE constexpr int backward_dq_shared_bytes(const Config& config) { return query_layout(config).bytes; }

// How the two consumer warpgroups share the product dq = ds k: by rows if the tile has 128 queries, else by columns. A warp
// holds 16 rows and dq_part_columns() columns.
JATTN_HOST_DEVICE constexpr int dq_part_columns(const Config& config) {
  return config.tile_q == 128 ? config.head_dim : config.head_dim / 2;
}

// One block per kStatisticsRows rows of a head; lanes that share a row: one for each 16 bytes, a power of two.
JATTN_HOST_DEVICE constexpr int prepare_threads(const Config&) { return 256; }
JATTN_HOST_DEVICE constexpr int prepare_min_blocks(const Config&) { return 4; }
JATTN_HOST_DEVICE constexpr int prepare_row_lanes(const Config& config) {
  return config.head_dim_v <= 64 ? 8 : config.head_dim_v <= 128 ? 16 : 32;
}

// One block per query tile of a head, with the warps of sm90_backward: each takes one of their parts.
JATTN_HOST_DEVICE constexpr int cast_threads(const Config&) { return kBackwardConsumers * kWarpgroupThreads; }
JATTN_HOST_DEVICE constexpr int cast_min_blocks(const Config&) { return 1; }
JATTN_HOST_DEVICE constexpr int cast_shared_bytes(const Config& config) {
  return tile_bytes(config.tile_q, config.head_dim);
}

}  // namespace jattn::sm90
