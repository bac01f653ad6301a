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

// fused: with the tile of score gradients that the product for dq reads
JATTN_HOST_DEVICE constexpr int backward_shared_bytes(const Config& config, bool fused) {
  const int bytes = config.element == Element::kF32 ? 4 : 2;
  const int keys = config.tile_kv * (config.head_dim + config.head_dim_v);
  const int queries = config.tile_q * (config.head_dim + config.head_dim_v);
  const int gradients = fused ? config.tile_kv * config.tile_q : 0;
  const int staged = staged_bias_bytes(config) + staged_mask_bytes(config);
  return (keys + config.stages * queries + gradients) * bytes +
         config.stages * (backward_statistics_bytes(config) + staged) + backward_saved_bytes();
}

// How the warps of the fused kernel share the product dq = ds k, of tile_q x head_dim / grad_slices: rows x columns.
struct WarpGrid {
  int rows, columns;
};

// The grid with the squarest parts: they need the fewest reads of shared memory.
JATTN_HOST_DEVICE constexpr WarpGrid dq_warps(const Config& config) {
  const int width = config.head_dim / config.grad_slices;
  WarpGrid best{0, 0};
  int best_size = 0;
  for (int rows = 1; rows <= config.num_warps; ++rows) {
    if (config.num_warps % rows != 0) continue;
    const int columns = config.num_warps / rows;
    if (config.tile_q % (16 * rows) != 0 || width % (16 * columns) != 0) continue;
    const int size = config.tile_q / rows + width / columns;
    if (best_size == 0 || size < best_size) {
      best = {rows, columns};
      best_size = size;
    }
  }
  return best;
}

JATTN_HOST_DEVICE constexpr int backward_dq_threads(const Config& config) { return config.num_warps * 32; }
JATTN_HOST_DEVICE constexpr int backward_dq_min_blocks(const Config&) { return 1; }

JATTN_HOST_DEVICE constexpr int backward_dq_shared_bytes(const Config& config) {
  const int bytes = config.element == Element::kF32 ? 4 : 2;
  return (config.tile_q + config.stages * config.tile_kv) * (config.head_dim + config.head_dim_v) * bytes +
         staged_bias_bytes(config) + staged_mask_bytes(config);
}

JATTN_HOST_DEVICE constexpr int backward_dbias_threads(const Config& config) { return config.num_warps * 32; }
JATTN_HOST_DEVICE constexpr int backward_dbias_min_blocks(const Config&) { return 1; }

// One float per column, row and warp at the end, when the tiles are no longer needed.
JATTN_HOST_DEVICE constexpr int backward_dbias_shared_bytes(const Config& config) {
  const int bytes = config.element == Element::kF32 ? 4 : 2;
  const int loop = (config.tile_q + config.tile_kv) * (config.head_dim + config.head_dim_v) * bytes +
                   staged_bias_bytes(config) + staged_mask_bytes(config);
  const int sums = config.num_warps * config.tile_kv * 4;
  return loop > sums ? loop : sums;
}

}  // namespace jattn::sm80
