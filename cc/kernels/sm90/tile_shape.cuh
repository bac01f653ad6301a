// Sizes that the sm90 kernels share: warpgroups, and tiles in shared memory. Plain C++20.
#pragma once

#include "base/integers.cuh"
#include "config.cuh"

namespace jattn::sm90 {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupRows = 64;  // rows of one wgmma
inline constexpr int kChunkColumns = 64;   // 128 bytes of a 16-bit type: the span of the swizzle
inline constexpr int kChunkRowBytes = 128;
inline constexpr int kMaxSharedBytes = 232448;  // 227 KiB: opt-in limit of one block on sm_90

// A tile in shared memory is an array of chunks [ceil(columns / 64)][rows][64], each row swizzled over 128 bytes.
JATTN_HOST_DEVICE constexpr int num_chunks(int columns) { return ceil_div(columns, kChunkColumns); }
JATTN_HOST_DEVICE constexpr int tile_bytes(int rows, int columns) {
  return num_chunks(columns) * rows * kChunkRowBytes;
}

// Consumer warpgroups of the forward, each with 64 queries of the tile.
inline constexpr int kMostConsumers = 3;
JATTN_HOST_DEVICE constexpr int num_consumers(const Config& config) { return config.tile_q / kWarpgroupRows; }

}  // namespace jattn::sm90
