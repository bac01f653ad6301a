// Least and greatest segment id, and the set of ids, of every tile of queries and of keys, so that attention kernels skip tiles that share
// none.
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
  uint32_t members[2] = {0, 0};
  for (int i = first + lane; i < min(first + tile, length); i += 32) {
    const int id = ids[i];
    if (id < 0) {
      padding = true;
    } else {
      low = min(low, id);
      high = max(high, id);
      members[id / 32 % 2] |= 1u << id % 32;
    }
  }
  low = __reduce_min_sync(0xffffffffu, low);
  high = __reduce_max_sync(0xffffffffu, high);
  padding = __any_sync(0xffffffffu, padding);
  for (uint32_t& word : members) word = __reduce_or_sync(0xffffffffu, word);
  if (lane == 0) {
    params.ranges[side][index] = {padding ? -1 - low : low, high, members[0] | uint64_t(members[1]) << 32};
  }
}

}  // namespace jattn
