// Zeros over rows of a tile in shared memory that may hold anything: padding, and rows that see no key.
#pragma once

#include "base/shared_memory.cuh"
#include "sm90/shape.cuh"

namespace jattn::sm90 {

// One row of a tile of kRows x kColumns, by one thread.
template <int kRows, int kColumns>
__device__ __forceinline__ void clear_row(unsigned tile, int row) {
#pragma unroll 1
  for (int chunk = 0; chunk < num_chunks(kColumns); ++chunk) {
    const unsigned address = tile + (chunk * kRows + row) * kChunkRowBytes;
#pragma unroll
    for (int byte = 0; byte < kChunkRowBytes; byte += 16) {
      ptx::store_shared_u32x4(address + byte, make_uint4(0, 0, 0, 0));
    }
  }
}

// The rows for which is_padding(row) holds, by one warp.
template <int kRows, int kColumns, class IsPadding>
__device__ __forceinline__ void clear_rows(unsigned tile, IsPadding is_padding) {
#pragma unroll 1
  for (int row = threadIdx.x % 32; row < kRows; row += 32) {
    if (is_padding(row)) clear_row<kRows, kColumns>(tile, row);
  }
}

}  // namespace jattn::sm90
