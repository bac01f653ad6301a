// Which tiles of the other axis a tile visits, and which of those need no masking: the only place that decides it.
//
// The same rule serves both directions. A row i of one axis sees the positions j of the other with
//   i + offset - left <= j <= i + offset + right,  0 <= j < other_length.
// For a key tile that looks for its queries the band is turned round: transposed(band).
#pragma once

#include "base/integers.cuh"
#include "config.cuh"
#include "params.cuh"

namespace jattn {

// What a packed mask says of the tiles in one row of them (MaskTile).
struct MaskStates {
  const uint8_t* states = nullptr;  // of tile 0
  int stride = 0;

  __device__ __forceinline__ void look_at(const PackedMask& mask, int batch, int head, int row_tile) {
    states =
        mask.states + batch * mask.states_batch + head * mask.states_head + int64_t(row_tile) * mask.states_row_tile;
    stride = mask.states_column_tile;
  }
  __device__ __forceinline__ int of(int tile) const { return states[int64_t(tile) * stride]; }
};

struct Band {
  int left, right, offset;
};

__device__ __forceinline__ Band transposed(Band band) { return {band.right, band.left, -band.offset}; }

// Tiles [begin, end) hold a visible position, tiles [full_begin, full_end) only visible ones.
struct TileRange {
  int begin, end, full_begin, full_end;

  __device__ __forceinline__ bool full(int tile) const { return tile >= full_begin && tile < full_end; }
};

// For rows [first, last) of this axis, last > first, with all rows inside their own length. Limits are at most 2^30 in
// size (params.cuh), so that the sums fit.
template <bool kBand>
__device__ __forceinline__ TileRange visible_tiles(int first, int last, Band band, int other_length, int tile) {
  int low = 0, high = other_length, full_low = 0, full_high = other_length;
  if constexpr (kBand) {
    low = max(0, first + band.offset - band.left);
    high = min(other_length, last + band.offset + band.right);
    full_low = max(0, last - 1 + band.offset - band.left);
    full_high = min(other_length, first + band.offset + band.right + 1);
  }
  if (low >= high) return {0, 0, 0, 0};
  return {low / tile, (high + tile - 1) / tile, (full_low + tile - 1) / tile, max(full_high, 0) / tile};
}

__device__ __forceinline__ bool holds_padding(SegmentRange range) { return range.low < 0; }

__device__ __forceinline__ int least_segment(SegmentRange range) { return range.low < 0 ? -1 - range.low : range.low; }

// Some pair may be visible. Exact for ascending ids and for fewer than 65 different ones, safe for all.
__device__ __forceinline__ bool segments_meet(SegmentRange a, SegmentRange b) {
  return least_segment(a) <= b.high && least_segment(b) <= a.high && (a.members & b.members) != 0;
}

// Every pair is visible: one id and no padding on both sides.
__device__ __forceinline__ bool segments_equal(SegmentRange a, SegmentRange b) {
  return a.low >= 0 && a.low == a.high && a.low == b.low && a.low == b.high;
}

// Some pair may be within the band; `other - own` is what the band limits (for keys that look for queries:
// transposed(band)). Positions are at most 2^29 in size, so that differences fit.
__device__ __forceinline__ bool positions_meet(PositionRange own, PositionRange other, Band band) {
  return own.low <= own.high && other.low <= other.high && other.high - own.low >= -band.left &&
         other.low - own.high <= band.right;
}

// Every pair is.
__device__ __forceinline__ bool positions_inside(PositionRange own, PositionRange other, Band band) {
  return other.low - own.high >= -band.left && other.high - own.low <= band.right;
}

// What is known of the tiles of the other axis before their rows are read: the ranges of their segments and positions.
template <Config kConfig>
struct TileFilter {
  static constexpr bool kPositions = has_position_band(kConfig);
  static constexpr bool kActive = kConfig.segments || kPositions;

  const SegmentRange* segments = nullptr;  // of the other axis, of this batch entry
  SegmentRange own_segments{0, 0, 0};
  const PositionRange* positions = nullptr;
  PositionRange own_positions{0, 0};
  Band band{0, 0, 0};  // limits of other - own

  // For a tile of queries (of keys if kOwnsKeys) of a batch entry; tile_q: queries of a tile.
  template <bool kOwnsKeys>
  __device__ __forceinline__ void load(const ProblemParams& problem, int batch, int own_tile, Band queries_band,
                                       int tile_q = kConfig.tile_q) {
    const int q_tiles = ceil_div(problem.q_len, tile_q), kv_tiles = ceil_div(problem.kv_len, kConfig.tile_kv);
    const int own_tiles = kOwnsKeys ? kv_tiles : q_tiles, other_tiles = kOwnsKeys ? q_tiles : kv_tiles;
    if constexpr (kConfig.segments) {
      segments = (kOwnsKeys ? problem.q_ranges : problem.kv_ranges) + int64_t(batch) * other_tiles;
      own_segments = (kOwnsKeys ? problem.kv_ranges : problem.q_ranges)[int64_t(batch) * own_tiles + own_tile];
    }
    if constexpr (kPositions) {
      positions = (kOwnsKeys ? problem.q_position_ranges : problem.kv_position_ranges) + int64_t(batch) * other_tiles;
      own_positions =
          (kOwnsKeys ? problem.kv_position_ranges : problem.q_position_ranges)[int64_t(batch) * own_tiles + own_tile];
      band = kOwnsKeys ? transposed(queries_band) : queries_band;
    }
  }

  // Some pair of this tile may be visible.
  __device__ __forceinline__ bool meets(int tile) const {
    bool meets = true;
    if constexpr (kConfig.segments) meets = segments_meet(own_segments, segments[tile]);
    if constexpr (kPositions) meets = meets && positions_meet(own_positions, positions[tile], band);
    return meets;
  }
  // Segments (the band) hide no pair of it.
  __device__ __forceinline__ bool same_segment(int tile) const {
    if constexpr (kConfig.segments) return segments_equal(own_segments, segments[tile]);
    return true;
  }
  __device__ __forceinline__ bool inside_band(int tile) const {
    if constexpr (kPositions) return positions_inside(own_positions, positions[tile], band);
    return true;
  }
  __device__ __forceinline__ bool own_padding() const { return kConfig.segments && holds_padding(own_segments); }
  __device__ __forceinline__ bool padding(int tile) const {
    if constexpr (kConfig.segments) return holds_padding(segments[tile]);
    return false;
  }
};

// Walks the tiles of a range from the last to the first and leaves out those that the filter refuses. A warp looks at
// 32 tiles with one load; all its lanes get the same answer.
template <Config kConfig, class Filter = TileFilter<kConfig>>
struct TileWalk {
  int begin;
  Filter filter;
  int window = 0;     // highest tile that `hits` describes
  uint32_t hits = 0;  // bit i: tile window - i

  // The next tile to visit that is not above `tile`, or -1.
  __device__ __forceinline__ int at_or_below(int tile) {
    if constexpr (!Filter::kActive) {
      return tile >= begin ? tile : -1;
    } else {
      while (tile >= begin) {
        if (hits != 0 && tile <= window && tile > window - 32) {
          const uint32_t left = hits & (0xffffffffu << (window - tile));
          if (left != 0) return window - (__ffs(left) - 1);
          tile = window - 32;
          hits = 0;
          continue;
        }
        const int candidate = tile - int(threadIdx.x & 31);
        const bool hit = candidate >= begin && filter.meets(candidate);
        window = tile;
        hits = __ballot_sync(0xffffffffu, hit);
        if (hits == 0) tile -= 32;
      }
      return -1;
    }
  }
};

}  // namespace jattn
