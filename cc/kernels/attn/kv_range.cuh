// Which tiles of the other axis a tile visits, and which of those need no masking: the only place that decides it.
//
// The same rule serves both directions. A row i of one axis sees the positions j of the other with
//   i + offset - left <= j <= i + offset + right,  0 <= j < other_length.
// For a key tile that looks for its queries the band is turned round: transposed(band).
#pragma once

#include "base/types.cuh"
#include "params.cuh"

namespace jattn {

struct Band {
  int left, right, offset;
};

__device__ __forceinline__ Band transposed(Band band) { return {band.right, band.left, -band.offset}; }

// Tiles [begin, end) hold a visible position, tiles [full_begin, full_end) only visible ones.
struct TileRange {
  int begin, end, full_begin, full_end;

  __device__ __forceinline__ bool full(int tile) const { return tile >= full_begin && tile < full_end; }
};

// For rows [first, last) of this axis, last > first, with all rows inside their own length. Limits are at most 2^29 in
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

// Some pair may be visible. Exact for sorted ids, safe for all.
__device__ __forceinline__ bool segments_meet(SegmentRange a, SegmentRange b) {
  return least_segment(a) <= b.high && least_segment(b) <= a.high;
}

// Every pair is visible: one id and no padding on both sides.
__device__ __forceinline__ bool segments_equal(SegmentRange a, SegmentRange b) {
  return a.low >= 0 && a.low == a.high && a.low == b.low && a.low == b.high;
}

// Walks the tiles of a range from the last to the first and leaves out those whose segments cannot meet. A warp looks
// at 32 tiles with one load; all its lanes get the same answer.
template <bool kSegments>
struct TileWalk {
  int begin;
  const SegmentRange* others;  // ranges of the other axis, of this batch entry
  SegmentRange own;
  int window = 0;     // highest tile that `hits` describes
  uint32_t hits = 0;  // bit i: tile window - i

  // The next tile to visit that is not above `tile`, or -1.
  __device__ __forceinline__ int at_or_below(int tile) {
    if constexpr (!kSegments) {
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
        const bool hit = candidate >= begin && segments_meet(own, others[candidate]);
        window = tile;
        hits = __ballot_sync(0xffffffffu, hit);
        if (hits == 0) tile -= 32;
      }
      return -1;
    }
  }
};

}  // namespace jattn
