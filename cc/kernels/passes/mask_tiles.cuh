// Turns a dense mask into bits in the order of accumulator fragments (PackedMask) and says which tiles are empty or
// full, so that attention kernels skip the ones and do not mask the others. Reads every byte of the mask once.
//
// Unit of the family mask_tiles: entry mask_tiles<kConfig>, parameters MaskTilesParams. One block per tile.
#pragma once

#include "base/integers.cuh"
#include "base/numeric.cuh"
#include "config.cuh"
#include "params.cuh"
#include "passes/shape.cuh"

namespace jattn {

// Bit 8 n + 7 of the result: byte n is not 0.
__device__ __forceinline__ uint32_t nonzero_bytes(uint32_t x) {
  return (((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) & 0x80808080u;
}

// Those bits as bits 0 to 3. The partial products meet nowhere, so nothing is carried.
__device__ __forceinline__ uint32_t gather_bytes(uint32_t nonzero) { return ((nonzero >> 7) * 0x10204080u) >> 28; }

// The mask as rows of contiguous memory: `outer` is the axis of queries, `inner` that of keys.
struct MaskReader {
  const uint8_t* base;
  int64_t stride_outer, stride_inner;
  int outer_extent, inner_extent;
  bool wide;

  // One bit 8 n + 7 for each of 4 * kWords elements from (outer, inner) on; those outside the array read as 0.
  template <int kWords>
  __device__ __forceinline__ void load(uint32_t (&nonzero)[kWords], int outer, int inner) const {
    constexpr int kCount = 4 * kWords;
    if (wide && outer < outer_extent && inner + kCount <= inner_extent) {
      const uint8_t* source = base + outer * stride_outer + inner;
      if constexpr (kWords == 4) {
        const uint4 x = __ldg(reinterpret_cast<const uint4*>(source));
        nonzero[0] = nonzero_bytes(x.x);
        nonzero[1] = nonzero_bytes(x.y);
        nonzero[2] = nonzero_bytes(x.z);
        nonzero[3] = nonzero_bytes(x.w);
      } else {
        static_assert(kWords == 1);
        nonzero[0] = nonzero_bytes(__ldg(reinterpret_cast<const uint32_t*>(source)));
      }
      return;
    }
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      nonzero[word] = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int at = inner + 4 * word + n;
        const bool inside = outer < outer_extent && at < inner_extent;
        if (inside && __ldg(base + outer * stride_outer + at * stride_inner) != 0) nonzero[word] |= 0x80u << 8 * n;
      }
    }
  }
};

// Rows are queries. Eight lanes share a row of up to 128 keys, 16 keys each: two blocks of eight, hence four bits of
// each word. Returns the bits that were set, for the state.
__device__ __forceinline__ void pack_query_rows(const MaskTilesParams& params, const MaskReader& reader,
                                                uint32_t* words, int first_row, int first_column, bool& any,
                                                bool& all) {
  constexpr int kLanes = 8;
  const int part = threadIdx.x % kLanes;
  const bool takes_part = 16 * part < params.tile_columns;
  // All threads take part in the shuffles, so all go round equally often.
  const int rounds = ceil_div(params.tile_rows, int(blockDim.x) / kLanes);
#pragma unroll 2
  for (int round = 0; round < rounds; ++round) {
    const int row = round * (blockDim.x / kLanes) + threadIdx.x / kLanes;
    const int inner = first_column + 16 * part;
    const bool inside = row < params.tile_rows && takes_part;
    uint32_t nonzero[4] = {0, 0, 0, 0};
    if (inside) reader.load<4>(nonzero, first_row + row, inner);
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = gather_bytes(nonzero[i]);
    if (inside && first_row + row < reader.outer_extent) {
      const uint32_t found = bits[0] | bits[1] << 4 | bits[2] << 8 | bits[3] << 12;
      const int there = min(max(reader.inner_extent - inner, 0), 16);
      any = any || found != 0;
      all = all && found == (1u << there) - 1;
    }
    uint32_t word[4] = {(bits[0] & 3) | (bits[2] & 3) << 2, bits[0] >> 2 | (bits[2] & 12),
                        (bits[1] & 3) | (bits[3] & 3) << 2, bits[1] >> 2 | (bits[3] & 12)};
#pragma unroll
    for (int q = 0; q < 4; ++q) word[q] <<= 4 * part;
    // Each step halves the words that a lane answers for and doubles the keys that they cover.
    const bool upper_half = part & 4;
    const uint32_t kept0 = upper_half ? word[2] : word[0], kept1 = upper_half ? word[3] : word[1];
    const uint32_t sent0 = upper_half ? word[0] : word[2], sent1 = upper_half ? word[1] : word[3];
    const uint32_t pair0 = kept0 | __shfl_xor_sync(0xffffffffu, sent0, 4);
    const uint32_t pair1 = kept1 | __shfl_xor_sync(0xffffffffu, sent1, 4);
    const bool odd = part & 2;
    uint32_t whole = odd ? pair1 : pair0;
    whole |= __shfl_xor_sync(0xffffffffu, odd ? pair0 : pair1, 2);
    whole |= __shfl_xor_sync(0xffffffffu, whole, 1);
    const int q = part / 4 * 2 + part / 2 % 2;
    if (part % 2 == 0 && row < params.tile_rows && first_row + row < params.rows_padded) words[row * 4 + q] = whole;
  }
}

// Rows are keys. A thread owns four neighbouring keys and one word of each: their bits at up to 32 queries.
__device__ __forceinline__ void pack_key_rows(const MaskTilesParams& params, const MaskReader& reader, uint32_t* words,
                                              int first_row, int first_column, bool& any, bool& all) {
  const int groups = ceil_div(params.tile_rows, 4);
  for (int task = threadIdx.x; task < 4 * groups; task += blockDim.x) {
    const int row = task % groups * 4;
    const int q = task / groups;
    const int there = min(max(reader.inner_extent - first_row - row, 0), 4);
    uint32_t bytes[4] = {0, 0, 0, 0};  // byte k of number n: bits 8 n to 8 n + 7 of the word of key row + k
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int bit = 0; bit < 8; ++bit) {
        const int column = (4 * n + bit / 2) * 8 + 2 * q + bit % 2;
        if (column >= params.tile_columns) continue;
        uint32_t nonzero[1];
        reader.load<1>(nonzero, first_column + column, first_row + row);
        bytes[n] |= nonzero[0] >> (7 - bit);
        if (first_column + column < reader.outer_extent) {
          any = any || nonzero[0] != 0;
          all = all && gather_bytes(nonzero[0]) == (1u << there) - 1;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t word = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) word |= (bytes[n] >> 8 * k & 0xff) << 8 * n;
      if (row + k < params.tile_rows && first_row + row + k < params.rows_padded) words[(row + k) * 4 + q] = word;
    }
  }
}

template <Config kConfig>
__device__ __forceinline__ void mask_tiles(const MaskTilesParams& params) {
  int64_t block = blockIdx.x;
  const int column_tile = int(block % params.column_tiles);
  block /= params.column_tiles;
  const int row_tile = int(block % params.row_tiles);
  const int64_t flat_head = block / params.row_tiles;
  const int64_t entry = flat_head / params.heads;
  const int64_t head = flat_head - entry * params.heads;
  const int first_row = row_tile * params.tile_rows, first_column = column_tile * params.tile_columns;
  uint32_t* words =
      params.words + ((flat_head * params.column_tiles + column_tile) * params.rows_padded + first_row) * 4;
  MaskReader reader;
  reader.base = params.mask + entry * params.stride_batch + head * params.stride_head;
  reader.wide = params.wide;
  bool any = false, all = true;
  if (params.keys_are_rows) {
    reader.stride_outer = params.stride_column;
    reader.stride_inner = params.stride_row;
    reader.outer_extent = params.columns;
    reader.inner_extent = params.rows;
    pack_key_rows(params, reader, words, first_row, first_column, any, all);
  } else {
    reader.stride_outer = params.stride_row;
    reader.stride_inner = params.stride_column;
    reader.outer_extent = params.rows;
    reader.inner_extent = params.columns;
    pack_query_rows(params, reader, words, first_row, first_column, any, all);
  }
  const bool some = __syncthreads_or(any);
  const bool every = __syncthreads_and(all);
  if (threadIdx.x == 0) {
    const int64_t tile = (flat_head * params.row_tiles + row_tile) * params.column_tiles + column_tile;
    params.states[tile] = !some ? kMaskTileEmpty : every ? kMaskTileFull : kMaskTileMixed;
  }
}

}  // namespace jattn
