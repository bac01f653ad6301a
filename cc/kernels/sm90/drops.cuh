// The drop warps: the three warps of the producer's warpgroup that copy nothing call Philox for the dropout of a tile, while the
// consumers compute. What a consumer warp does stands in a row with its products, and beside products wide multiplications
// are slow; here a call also serves two consumer warps, where one of these can use but half of its pairs.
//
// Protocol. Beside every tile of k travels what it needs (DropRecord), and its words belong to the stage of k like the tile: made
// behind k_full, announced by words_full, read by every consumer warp before it arrives at k_empty. So the wait of the
// producer for the stage covers the record and the words, and the drop warps wait for nothing but k_full. They see no
// items: a record after the last tile ends their work. tests/compile/test_drop_steps.py has a model of it.
#pragma once

#include "attn/dropout.cuh"
#include "sm90/work.cuh"

namespace jattn::sm90 {

template <Config C>
struct DropWarp {
  const ForwardParams& params;
  ForwardControl<C>& control;
  int warp;  // among the drop warps
  RingPosition<C.stages> ring{0, 0};

  // A warp makes the calls of 8 x 4 groups at a time: 64 rows, 32 columns.
  static constexpr int kRowSteps = C.tile_q / 64, kColumnSteps = C.tile_kv / 32;

  // Rounds written out, unless the keys of all of them, which are then kept over the steps, do not fit into registers.
  static constexpr int kRoundsAtOnce = producer_registers(C) < 40 ? 1 : kPhiloxRounds - kPhiloxSplitRounds;

  __device__ __forceinline__ void make(PhiloxKey key, const DropRecord& record, int step) const {
    const int lane = threadIdx.x % 32;
    const int row = step / kColumnSteps * 8 + lane / 4, column = step % kColumnSteps * 4 + lane % 4;
    const uint32_t row_group = uint32_t(record.q_begin) / 8 + uint32_t(row);
    const uint32_t column_group = uint32_t(record.kv_tile) * (C.tile_kv / 8) + uint32_t(column);
    PhiloxWords c = philox_begin(key, philox_row_part(key, row_group), philox_column_part(key, column_group));
#pragma unroll kRoundsAtOnce
    for (uint32_t round = kPhiloxSplitRounds; round < kPhiloxRounds; ++round) philox_round(c, philox_key(key, round));
    *reinterpret_cast<uint4*>(control.drop_words[ring.index][row] + 4 * column) = {c.word[0], c.word[1], c.word[2],
                                                                                   c.word[3]};
  }

  __device__ __forceinline__ void run() {
    int batch = -1, head = -1;
    PhiloxKey key{};
    // The first of the steps that this warp takes changes from tile to tile, so that all take equally many.
    for (int first = warp;; first = first == 0 ? kDropWarps - 1 : first - 1, ring.advance()) {
      wait_as_warp({control.k_full, ring.index}, ring.parity);
      const DropRecord record = control.drop_records[ring.index];
      if (__any_sync(~0u, record.kv_tile < 0)) return;
      if (__any_sync(~0u, record.batch != batch || record.head != head)) {
        batch = record.batch;
        head = record.head;
        key = dropout_of<C>(params.problem, batch, head).key;
      }
      // Said anew by a shuffle that the whole warp has the same key: its schedule then lies in uniform registers.
      const PhiloxKey of_warp{__shfl_sync(~0u, key.low, 0), __shfl_sync(~0u, key.high, 0)};
#pragma unroll 1
      for (int step = first; step < kRowSteps * kColumnSteps; step += kDropWarps) make(of_warp, record, step);
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive({control.words_full, ring.index});
    }
  }
};

}  // namespace jattn::sm90
