// Where a thread of a consumer warpgroup stands, and its warp's rows in a tile.
#pragma once

#include "sm90/shape.cuh"

namespace jattn::sm90 {

__device__ __forceinline__ int warpgroup_thread() { return threadIdx.x % kWarpgroupThreads; }
__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
// The first of this warp's 16 rows among the 64 of its warpgroup.
__device__ __forceinline__ int warp_row() { return warpgroup_thread() / 32 * 16; }

// Where this lane's eight values of the 16 x 16 block `step` of its warp's rows lie, for ldmatrix and stmatrix: lanes 0
// to 15 give the rows of the left eight columns, the others those of the right. kRows: of the whole tile; tile: of the
// warpgroup's.
template <int kRows>
__device__ __forceinline__ unsigned fragment_address(unsigned tile, int step) {
  const int row = warp_row() + lane() % 16;
  const int column16 = step % 4 * 2 + lane() / 16;  // in units of 16 bytes, before the swizzle
  return tile + step / 4 * kRows * kChunkRowBytes + row * kChunkRowBytes + (column16 ^ row % 8) * 16;
}

}  // namespace jattn::sm90
