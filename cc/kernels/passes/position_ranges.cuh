// Least and greatest position of every tile of queries and of keys, so that attention kernels skip tiles that no band
// reaches and do not mask those that lie within it.
//
// Unit of the family position_ranges: entry position_ranges<kConfig>, parameters PositionRangesParams. One warp per
// tile. Padding rows (beyond the lengths, or of negative segments) are left out: they are hidden by other means, and
// their positions may be anything.
#pragma once

#include "base/numeric.cuh"
#include "config.cuh"
#include "params.cuh"
#include "passes/shape.cuh"

namespace jattn {

template <Config kConfig>
__device__ __forceinline__ void position_ranges(const PositionRangesParams& params) {
  const int lane = threadIdx.x & 31;
  constexpr int kWarps = position_ranges_threads(kConfig) / 32;
  int64_t index = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t q_tiles = int64_t(params.batch) * params.tiles[0];
  const int side = index < q_tiles ? 0 : 1;
  if (side == 1) index -= q_tiles;
  if (index >= int64_t(params.batch) * params.tiles[side]) return;
  const int tiles = params.tiles[side], extent = params.extent[side], tile = params.tile[side];
  const int64_t entry = index / tiles;
  const int first = int(index - entry * tiles) * tile;
  const int32_t* positions = params.positions[side] + entry * extent;
  const int32_t* segments = params.segments[side] ? params.segments[side] + entry * extent : nullptr;
  const int length = params.lengths[side] ? min(params.lengths[side][entry], extent) : extent;
  int low = 0x7fffffff, high = -0x7fffffff;
  for (int i = first + lane; i < min(first + tile, length); i += 32) {
    if (segments && segments[i] < 0) continue;
    low = min(low, positions[i]);
    high = max(high, positions[i]);
  }
  low = __reduce_min_sync(0xffffffffu, low);
  high = __reduce_max_sync(0xffffffffu, high);
  if (lane == 0) params.ranges[side][index] = low <= high ? PositionRange{low, high} : PositionRange{1, 0};
}

}  // namespace jattn
