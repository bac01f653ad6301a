// Row-major tiles in shared memory whose 16-byte chunks are permuted inside each row, so that eight rows of one chunk
// column (an 8x8 matrix of ldmatrix, or a column of a fragment) lie in eight different bank groups.
//
// A row of 128 bytes or a multiple: chunk c of row r lies at c ^ (r & 7). A row of 64 bytes, or an odd multiple: at
// c ^ ((r >> 1) & 3), because two neighbouring rows already differ by 64 bytes modulo 128. The permutation never leaves
// its span of 8 (4) chunks, so with the tile aligned to the span an address is lane part ^ constant + constant.
#pragma once

#include "base/types.cuh"

namespace jattn {

template <int kRowBytes>
struct SwizzledRows {
  static_assert(kRowBytes % 64 == 0);
  static constexpr int kSpan = kRowBytes % 128 == 0 ? 8 : 4;  // chunks

  static constexpr JATTN_HOST_DEVICE int swizzle(int row) { return kSpan == 8 ? row & 7 : (row >> 1) & 3; }

  // Byte offset of a chunk. The row may be any; pass row % 8 == lane part and add multiples of 8 rows as constants.
  static constexpr JATTN_HOST_DEVICE int offset(int row, int chunk) {
    return row * kRowBytes + (chunk / kSpan) * (kSpan * 16) + (((chunk % kSpan) ^ swizzle(row)) * 16);
  }

  // Offset of the chunk that lies `step` chunks further in the same row, given the address of one with an index below
  // the lowest set bit of step: base is aligned to the span.
  static constexpr JATTN_HOST_DEVICE uint32_t advance(uint32_t address, int step) {
    return (address ^ uint32_t((step % kSpan) * 16)) + uint32_t((step / kSpan) * (kSpan * 16));
  }
};

}  // namespace jattn
