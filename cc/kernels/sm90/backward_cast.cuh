// dq from the float32 accumulator of sm90_backward: multiplied by the scale, rounded, in rows.
//
// Unit of the family backward_cast; reads element, head_dim and tile_q. One block per query tile of a head, the last
// heads first: their sums are the latest, which L2 may still hold. A block ends at once if a caster has written its
// tile (backward_caster.cuh). Tiles lie on the grid or, of packed documents, as CastParams::row_tiles says.
//
// Order of the accumulator: tile after tile of tile_q x head_dim, in it eight parts of 16 rows and dq_part_columns()
// columns. Part 4 w + i, of warp i of consumer warpgroup w, has 16 rows from 16 i on: of the 64 rows from 64 w on if
// tile_q is 128, else of the columns from dq_part_columns() w on. In a part, blocks of eight columns follow each other,
// each as lane after lane holds it.
#pragma once

#include "attn/sequence.cuh"
#include "sm90/backward_consumer.cuh"

namespace jattn::sm90 {

// Which queries a tile of the accumulator holds: [begin, end), in rows from `first` on. is_box: the whole tile may be
// written, since none of it is another's.
struct CastRows {
  int first, begin, end;
  bool is_box;
};
__device__ __forceinline__ CastRows cast_rows(const CastParams& params, int entry, int tile, int tile_q) {
  const int length = params.q_lengths ? clamped_length(params.q_lengths, entry, params.q_len) : params.q_len;
  if (params.row_tiles == nullptr || params.counters[kDocumentsRefused] != 0) {
    return {tile * tile_q, tile * tile_q, length, true};
  }
  const TileRows rows = params.row_tiles[int64_t(entry) * params.tiles + tile];
  return {aligned_row(rows.begin), rows.begin, rows.end, rows.end - rows.begin == tile_q};
}

template <Config C>
__device__ __forceinline__ void backward_cast(const CastParams& params) {
  constexpr int kColumns = dq_part_columns(C), kPartFloats = 16 * kColumns;
  extern __shared__ __align__(1024) unsigned char shared[];
  const unsigned tile = shared_address(shared);
  const int number = int(gridDim.x - 1 - blockIdx.x);
  const int flat_head = number / params.tiles;
  const int tile_number = number - flat_head * params.tiles;
  const int entry = flat_head / params.num_heads, head = flat_head - entry * params.num_heads;
  const auto [first, begin, end, is_box] = cast_rows(params, entry, tile_number, C.tile_q);
  if (is_box ? first >= params.q_len : begin >= end) return;
  const int64_t accumulator_row = int64_t(flat_head) * params.rows_padded + tile_number * C.tile_q;
  const float* source = params.dq_accumulator + accumulator_row * C.head_dim;
  const int turn =
      params.dq_turns ? params.dq_turns[accumulator_row / kDqTurnRows * kBackwardConsumers] : int(kDqStored);
  if (turn == kDqCast) return;
  const bool is_there = turn != kDqNothing;  // where no block has been, the accumulator may hold anything

  const int part = threadIdx.x / 32, half = part / 4;
  float4 x[kColumns / 8];
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (is_there) x[i] = __ldcs(reinterpret_cast<const float4*>(source + part * kPartFloats + i * 128 + lane() * 4));
  }
  const int row = part % 4 * 16 + (C.tile_q == 128 ? 64 * half : 0);
  const int first_column = C.tile_q == 128 ? 0 : kColumns * half;
  bool inside[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) inside[r] = row + lane() / 4 + 8 * r < end - first;
#pragma unroll
  for (int step = 0; step < kColumns / 16; ++step) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 value = x[2 * step + i / 2];
      const float low = i % 2 == 0 ? value.x : value.z, high = i % 2 == 0 ? value.y : value.w;
      words[i] = inside[i % 2] ? ElementTraits<C.element>::pack(low * params.scale, high * params.scale) : 0;
    }
    ptx::store_matrix_x4(block_address<C.tile_q>(tile, row, first_column / 16 + step), words);
  }
  fence_async_proxy();
  __syncthreads();
  if (is_box) {
    if (threadIdx.x == 0) {
      copy_gradient<C.tile_q, C.head_dim>(&params.dq, tile, 0, first, head, entry);
      commit_stores();
      wait_stores_read();
    }
  } else {
    const int half_rows = (end - begin + 1) / 2, first_of_half = begin + half * half_rows;
    const int64_t row = (int64_t(entry) * params.q_len + first_of_half) * params.num_heads + head;
    const int64_t row_bytes = params.head_dim * 2;
    copy_gradient_rows<C.tile_q, C.head_dim>(static_cast<char*>(params.rows_dq) + row * row_bytes,
                                             params.num_heads * row_bytes, params.head_dim, tile, first_of_half - first,
                                             min(half_rows, end - first_of_half));
  }
}

}  // namespace jattn::sm90
