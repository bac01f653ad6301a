// Launch shapes of the sm80 backward kernels, for host and device.
#pragma once

#include "base/types.cuh"
#include "config.cuh"
#include "sm80/forward_shape.cuh"

namespace jattn::sm80 {

JATTN_HOST_DEVICE constexpr int backward_threads(const Config& config) { return config.num_warps * 32; }
JATTN_HOST_DEVICE constexpr int backward_min_blocks(const Config&) { return 1; }

// lse and delta of the queries of one stage
JATTN_HOST_DEVICE constexpr int backward_statistics_bytes(const Config& config) { return 2 * config.tile_q * 4; }

// Rows of q and dout of the first head, limits of the tiles, first key and first head.
JATTN_HOST_DEVICE constexpr int backward_saved_bytes() { return 4 * 16; }

// Tiles of keys by queries: ds if another warp reads it, and p likewise.
JATTN_HOST_DEVICE constexpr int backward_score_tiles(const Config& config, bool fused) {
  return config.shared_scores ? 2 : fused ? 1 : 0;
}

JATTN_HOST_DEVICE constexpr int backward_shared_bytes(const Config& config, bool fused) {
  const int bytes = element_bytes(config.element);
  const int keys = config.tile_kv * (config.head_dim + config.head_dim_v);
  const int queries = config.tile_q * (config.head_dim + config.head_dim_v);
  const int scores = backward_score_tiles(config, fused) * config.tile_kv * config.tile_q;
  const int staged = staged_bias_bytes(config);
  return (keys + config.stages * queries + scores) * bytes +
         config.stages * (backward_statistics_bytes(config) + staged) + backward_saved_bytes();
}

// How the warps of a block share a product: rows x columns of equal parts.
struct WarpGrid {
  int rows, columns;
};

// The grid with the squarest parts, whole fragments of 16 x 16: they need the fewest reads of shared memory.
JATTN_HOST_DEVICE constexpr WarpGrid warp_grid(int warps, int rows, int columns) {
  WarpGrid best{0, 0};
  int best_size = 0;
  for (int r = 1; r <= warps; ++r) {
    if (warps % r != 0) continue;
    const int c = warps / r;
    if (rows % (16 * r) != 0 || columns % (16 * c) != 0) continue;
    const int size = rows / r + columns / c;
    if (best_size == 0 || size < best_size) {
      best = {r, c};
      best_size = size;
    }
  }
  return best;
}

// dq = ds k of the fused kernel
JATTN_HOST_DEVICE constexpr WarpGrid dq_warps(const Config& config) {
  return warp_grid(config.num_warps, config.tile_q, config.head_dim / config.grad_slices);
}

// p and ds; dk = ds^T q and dv = p^T dout. Without shared scores a warp keeps its keys throughout.
JATTN_HOST_DEVICE constexpr WarpGrid score_warps(const Config& config) {
  return config.shared_scores ? warp_grid(config.num_warps, config.tile_kv, config.tile_q)
                              : WarpGrid{config.num_warps, 1};
}
JATTN_HOST_DEVICE constexpr WarpGrid key_gradient_warps(const Config& config, int head_dim) {
  return config.shared_scores ? warp_grid(config.num_warps, config.tile_kv, head_dim / config.grad_slices)
                              : WarpGrid{config.num_warps, 1};
}

JATTN_HOST_DEVICE constexpr int backward_dq_threads(const Config& config) { return config.num_warps * 32; }
JATTN_HOST_DEVICE constexpr int backward_dq_min_blocks(const Config&) { return 1; }

JATTN_HOST_DEVICE constexpr int backward_dq_shared_bytes(const Config& config) {
  const int bytes = element_bytes(config.element);
  return (config.tile_q + config.stages * config.tile_kv) * (config.head_dim + config.head_dim_v) * bytes +
         staged_bias_bytes(config);
}

JATTN_HOST_DEVICE constexpr int backward_dbias_threads(const Config& config) { return config.num_warps * 32; }
JATTN_HOST_DEVICE constexpr int backward_dbias_min_blocks(const Config&) { return 1; }

// One float per column and warp at the end, when the tiles are no longer needed.
JATTN_HOST_DEVICE constexpr int backward_dbias_shared_bytes(const Config& config) {
  const int bytes = element_bytes(config.element);
  const int loop =
      (config.tile_q + config.tile_kv) * (config.head_dim + config.head_dim_v) * bytes + staged_bias_bytes(config);
  const int sums = config.num_warps * config.tile_kv * 4;
  return loop > sums ? loop : sums;
}

}  // namespace jattn::sm80
