// What tiles of queries and of keys hold, so that attention kernels skip tiles in which no pair is visible and do not
// mask those in which all are. One warp per tile.
//
// Units of two families:
//   segment_ranges   segment_ranges<C>   SegmentRangesParams   least and greatest segment id, and the set of ids
//   position_ranges  position_ranges<C>  PositionRangesParams  least and greatest position; padding rows (beyond the
//                                        lengths, or of negative segments) are left out: they are hidden by other
//                                        means, and their positions may be anything
#pragma once

#include "attn/sequence.cuh"
#include "base/numeric.cuh"
#include "config.cuh"
#include "params.cuh"
#include "passes/shape.cuh"

namespace jattn {

// The tile of a warp: rows from `first` on, of one side of a batch entry. find() is false if there is none.
struct RowTile {
  int side;       // 0: queries, 1: keys
  int64_t index;  // among the tiles of the side
  int64_t entry;
  int first;

  // block: among those that look for tiles.
  template <int kThreads>
  __device__ __forceinline__ bool find(const TilesOfSides& sides, int block) {
    index = int64_t(block) * (kThreads / 32) + threadIdx.x / 32;
    const int64_t q_tiles = int64_t(sides.batch) * sides.tiles[0];
    side = index < q_tiles ? 0 : 1;
    if (side == 1) index -= q_tiles;
    if (index >= int64_t(sides.batch) * sides.tiles[side]) return false;
    entry = index / sides.tiles[side];
    first = int(index - entry * sides.tiles[side]) * sides.tile[side];
    return true;
  }
};

template <int kThreads>
__device__ __forceinline__ void find_segment_ranges(const SegmentRangesParams& params, int block) {
  RowTile tile{};
  if (!tile.find<kThreads>(params.sides, block)) return;
  const auto [side, index, entry, first] = tile;
  const int lane = threadIdx.x & 31, extent = params.sides.extent[side], rows = params.sides.tile[side];
  const int32_t* ids = params.segments[side] + entry * extent;
  int low = 0x7fffffff, high = -1;
  bool padding = false;
  uint32_t low_members = 0, high_members = 0;  // not an array: an index known only at run time would put it into memory
  for (int i = first + lane; i < min(first + rows, extent); i += 32) {
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

template <Config kConfig>
__device__ __forceinline__ void segment_ranges(const SegmentRangesParams& params) {
  find_segment_ranges<segment_ranges_threads(kConfig)>(params, blockIdx.x);
}

template <Config kConfig>
__device__ __forceinline__ void position_ranges(const PositionRangesParams& params) {
  RowTile tile{};
  if (!tile.find<position_ranges_threads(kConfig)>(params.sides, blockIdx.x)) return;
  const auto [side, index, entry, first] = tile;
  const int lane = threadIdx.x & 31, extent = params.sides.extent[side], rows = params.sides.tile[side];
  const int32_t* positions = params.positions[side] + entry * extent;
  const int32_t* segments = params.segments[side] ? params.segments[side] + entry * extent : nullptr;
  const int length = params.lengths[side] ? clamped_length(params.lengths[side], entry, extent) : extent;
  int low = 0x7fffffff, high = -0x7fffffff;
  for (int i = first + lane; i < min(first + rows, length); i += 32) {
    if (segments && segments[i] < 0) continue;
    low = min(low, positions[i]);
    high = max(high, positions[i]);
  }
  low = __reduce_min_sync(0xffffffffu, low);
  high = __reduce_max_sync(0xffffffffu, high);
  if (lane == 0) params.ranges[side][index] = low <= high ? PositionRange{low, high} : PositionRange{1, 0};
}

}  // namespace jattn
