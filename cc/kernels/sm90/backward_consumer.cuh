// What consumer warpgroups of all backward kernels share: their barriers, how transposed scores are finished, and how
// 64 rows of a result leave.
#pragma once

#include "base/numeric.cuh"
#include "sm90/backward_score.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "sm90/wgmma.cuh"

namespace jattn::sm90 {

inline constexpr int kConsumersBarrier = 1;       // named barrier of both consumer warpgroups
inline constexpr int kFirstWarpgroupBarrier = 2;  // one more for each warpgroup

template <int kWarpgroups = kBackwardConsumers>
__device__ __forceinline__ void sync_consumers() {
  sync_named(kConsumersBarrier, kWarpgroups * kWarpgroupThreads);
}
__device__ __forceinline__ void sync_warpgroup(int warpgroup) {
  sync_named(kFirstWarpgroupBarrier + warpgroup, kWarpgroupThreads);
}

// One thread speaks for the warpgroup: a product of all its warps that used what they read before has been waited for.
__device__ __forceinline__ void release_by_warpgroup(Barrier* empty) {
  if (warpgroup_thread() == 0) arrive(empty);
}
__device__ __forceinline__ void release_by_warp(Barrier* empty) {
  __syncwarp();
  if (lane() == 0) arrive(empty);
}

// fragment_address() for any rows and lane; row: the warp's first in the tile. One sum for both would be another order
// of instructions in one of them.
template <int kRows>
__device__ __forceinline__ unsigned block_address(unsigned tile, int row, int step, int lane) {
  const int own_row = row + lane % 16;
  const int column16 = step % 4 * 2 + lane / 16;  // in units of 16 bytes, before the swizzle
  return tile + (step / 4 * kRows + own_row) * kChunkRowBytes + (column16 ^ own_row % 8) * 16;
}
template <int kRows>
__device__ __forceinline__ unsigned block_address(unsigned tile, int row, int step) {
  return block_address<kRows>(tile, row, step, lane());
}

// Raw transposed products of one step become p and weights (backward_score.cuh). row, column: of this thread's first
// value in the tiles. bias_tile: address of the first slot.
template <Config C, int kCount, int kBiasSlots>
__device__ __forceinline__ void finish_transposed_scores(float (&s)[kCount], unsigned (&p)[kCount / 2], int flags,
                                                         const Drops<C, kCount, true>& drops,
                                                         FetchedBias<C, kCount>& fetched, const BackwardParams& params,
                                                         BackwardControl<C, false>& control, int stage,
                                                         unsigned bias_tile, RingPosition<kBiasSlots>& bias_ring,
                                                         int row, int column) {
  using Stage = BackwardScoreStage<C>;
  const unsigned lse_address = shared_address(control.lse_log2[stage]) + column * 4;
  const auto origin = [&] {
    return FragmentOrigin{control.item.first + row, control.headers[stage].first + column, row, column};
  };
  const int* own_positions = nullptr;
  const int* positions = nullptr;
  if constexpr (C.positions) {
    own_positions = control.own_positions;
    positions = control.positions[stage];
  }
  KeptSlopes<C, kCount> slopes;
  if constexpr (Stage::kMakesExponents) {
    if constexpr (bias_tile_bytes(C) > 0) wait(&control.bias_full[bias_ring.index], bias_ring.parity);
    make_exponents<C, true, kCount>(s, slopes, control.terms[stage], control.item, origin(),
                                    bias_tile + bias_ring.index * bias_tile_bytes(C), own_positions, positions, fetched,
                                    params.problem,
                                    [&](int i) { return ptx::load_shared_f32x2(lse_address + 32 * i); });
    if constexpr (bias_tile_bytes(C) > 0 && !C.stores_ds) {  // else the tile's place takes ds, and is freed behind it
      release_by_warp(&control.bias_empty[bias_ring.index]);
      bias_ring.advance();
    }
  } else {
    Stage::finish_products(s, params.problem);
  }
  if (flags & kMaskFlags<C>) {
    mask_scores<C, true>(s, flags, control.item, origin(), control.own_ids, control.ids[C.segments ? stage : 0]);
    mask_positions<C, true>(s, flags, origin(), own_positions, positions, params.problem);
    if constexpr (C.mask) mask_by_words<C>(s, flags, row, control.mask_words[stage], params.mask.words_row);
  }
  if constexpr (Stage::kMakesExponents) {
    if constexpr (C.bias || C.program) {
      if (flags & kHasEmptyRows) mask_empty_columns(s, lse_address);
    }
    weights_of_exponents<C>(s, p, slopes, drops);
  } else {
    transposed_weights<C>(s, p, lse_address, drops, params.problem);
  }
}

// Rounds factor * gradient of the 64 rows of this warpgroup into rows [first_row, first_row + 64) of a tile of kRows
// rows. A row whose factor is 0 becomes 0 whatever was summed.
template <Element kElement, int kRows, int kColumns>
__device__ __forceinline__ void stage_gradient(const float (&gradient)[kColumns / 2], const float (&factor)[2],
                                               unsigned tile, int first_row) {
#pragma unroll
  for (int step = 0; step < kColumns / kStepDepth; ++step) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float f = factor[i % 2];
      const float low = f == 0.0f ? 0.0f : gradient[8 * step + 2 * i] * f;
      const float high = f == 0.0f ? 0.0f : gradient[8 * step + 2 * i + 1] * f;
      words[i] = ElementTraits<kElement>::pack(low, high);
    }
    ptx::store_matrix_x4(block_address<kRows>(tile, first_row + warp_row(), step), words);
  }
}

// Copies staged rows to those from `target_row` of the array on. By one thread, behind a fence and a barrier.
template <int kRows, int kColumns>
__device__ __forceinline__ void copy_gradient(const TensorMap* map, unsigned tile, int first_row, int target_row,
                                              int head, int batch) {
#pragma unroll
  for (int chunk = 0; chunk < num_chunks(kColumns); ++chunk) {
    store_box(map, tile + (chunk * kRows + first_row) * kChunkRowBytes, chunk * kChunkColumns, target_row, head, batch);
  }
}

// The same of the first `rows` rows alone, by all threads of the warpgroup. width: columns of the array; target: its
// row `target_row` of the head, `stride` bytes before the next.
template <int kRows, int kColumns>
__device__ __forceinline__ void copy_gradient_rows(char* target, int64_t stride, int width, unsigned tile,
                                                   int first_row, int rows) {
  constexpr int kPiecesOfChunk = kChunkRowBytes / 16, kPieces = num_chunks(kColumns) * kPiecesOfChunk;
#pragma unroll 1
  for (int i = warpgroup_thread(); i < rows * kPieces; i += kWarpgroupThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    if (piece >= width * 2 / 16) continue;
    const unsigned source = tile + (piece / kPiecesOfChunk * kRows + first_row + row) * kChunkRowBytes +
                            (piece % kPiecesOfChunk ^ (first_row + row) % 8) * 16;
    *reinterpret_cast<uint4*>(target + row * stride + piece * 16) = ptx::load_shared_u32x4(source);
  }
}

// Stages a gradient and copies it.
template <Element kElement, int kRows, int kColumns>
__device__ __forceinline__ void store_gradient(const float (&gradient)[kColumns / 2], const float (&factor)[2],
                                               unsigned tile, int first_row, int warpgroup, const TensorMap* map,
                                               bool wanted, int target_row, int head, int batch) {
  stage_gradient<kElement, kRows, kColumns>(gradient, factor, tile, first_row);
  fence_async_proxy();
  sync_warpgroup(warpgroup);
  if (warpgroup_thread() == 0) {
    if (wanted) copy_gradient<kRows, kColumns>(map, tile, first_row, target_row, head, batch);
    commit_stores();
  }
}

}  // namespace jattn::sm90
