// Least and greatest segment id, and the set of ids, of every tile of queries and of keys, so that attention kernels skip
// tiles that share none.
//
// Unit of the family segment_ranges: entry segment_ranges<kConfig>, parameters SegmentRangesParams. One warp per tile.
#pragma once

#include "base/numeric.cuh"
#include "config.cuh"
#include "params.cuh"
#include "passes/shape.cuh"

namespace jattn {

template <Config kConfig>
__device__ __forceinline__ void segment_ranges(const SegmentRangesParams& params) {
  const int lane = threadIdx.x & 31;
  constexpr int kWarps = segment_ranges_threads(kConfig) / 32;
  int64_t index = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t q_tiles = int64_t(params.batch) * params.tiles[0];
  const int side = index < q_tiles ? 0 : 1;
  if (side == 1) index -= q_tiles;
  if (index >= int64_t(params.batch) * params.tiles[side]) return;
  const int tiles = params.tiles[side], length = params.length[side], tile = params.tile[side];
  const int64_t entry = index / tiles;
  const int first = int(index - entry * tiles) * tile;
  const int32_t* ids = params.segments[side] + entry * length;
  int low = 0x7fffffff, high = -1;
  bool padding = false;
  uint32_t low_members = 0, high_members = 0;  // not an array: an index known only at run time would put it into memory
  for (int i = first + lane; i < min(first + tile, length); i += 32) {
    const int id = ids[i];
    if (id < 0) {
      padding = true;
    } else {
      low = min(low, id);
      high = max(high, id);
      const uint32_t bit = 1u << (id & 31);
      low_members |= (id & 32) == 0 ? bit : 0;
      high_members |= (id & 32) != 0 ? bit : 0;
    }
  }
  low = __reduce_min_sync(0xffffffffu, low);
  high = __reduce_max_sync(0xffffffffu, high);
  padding = __any_sync(0xffffffffu, padding);
  low_members = __reduce_or_sync(0xffffffffu, low_members);
  high_members = __reduce_or_sync(0xffffffffu, high_members);
  if (lane == 0) {
    params.ranges[side][index] = {padding ? -1 - low : low, high, low_members | uint64_t(high_members) << 32};
  }
}

}  // namespace jattn
