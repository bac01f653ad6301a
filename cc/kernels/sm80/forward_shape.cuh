// Launch shape of the sm80 forward kernel, for host and device.
#pragma once

#include "base/types.cuh"
#include "config.cuh"

namespace jattn::sm80 {

JATTN_HOST_DEVICE constexpr int forward_threads(const Config& config) { return config.num_warps * 32; }

// Two blocks per SM where 128 threads leave each the full 255 registers.
JATTN_HOST_DEVICE constexpr int forward_min_blocks(const Config& config) { return config.num_warps <= 4 ? 2 : 1; }

// Rows of k and v, and the tiles that need no mask.
JATTN_HOST_DEVICE constexpr int forward_saved_bytes() { return 3 * 16; }

// A tile of the bias, where it is staged.
JATTN_HOST_DEVICE constexpr int staged_bias_bytes(const Config& config) {
  return config.bias && config.staged_bias ? config.tile_q * config.tile_kv * element_bytes(config.bias_element) : 0;
}

JATTN_HOST_DEVICE constexpr int forward_shared_bytes(const Config& config) {
  const int bytes = element_bytes(config.element);
  const int loop =
      config.tile_q * config.head_dim + config.stages * config.tile_kv * (config.head_dim + config.head_dim_v);
  const int result = config.tile_q * config.head_dim_v;
  return (loop > result ? loop : result) * bytes + staged_bias_bytes(config) + forward_saved_bytes();
}

}  // namespace jattn::sm80
