// The drop warps: the three warps of the producer's warpgroup that copy nothing call Philox for the dropout of a tile,
// while the consumers compute. What a consumer warp does stands in a row with its products, and beside products wide
// multiplications are slow; here a call also serves two consumer warps, where one of these can use but half of its
// pairs. For two consumer warpgroups they also find what is dropped, one bit a pair, and what a call has of its queries
// or keys alone is made by otherwise idle lanes of the producer, once for a tile.
//
// Protocol. The producer writes a record of each tile, and these parts, before it waits for the place of its k
// (records_full), drop warps make its words (words_full), consumers read these beside the product with k. The ring has
// stages + 2 slots and no "empty" barrier. Writing record n is safe because the producer first waited for k slot n - 1:
// every consumer has then finished q k of tile n - 1 - stages, which it starts only after reading the words of tile n -
// 2 - stages, whose slot record n reuses. tests/compile/test_drop_steps.py has a model of it. A record without a tile
// ends their work.
#pragma once

#include "attn/dropout.cuh"
#include "base/ptx.cuh"
#include "sm90/work.cuh"

namespace jattn::sm90 {

template <Config C>
struct DropWarp {
  const ForwardParams& params;
  ForwardControl<C>& control;
  int warp;  // among the drop warps
  DropRing<C> ring{};

  // A warp makes the calls of 8 x 4 groups at a time, 64 rows and 32 columns; for bits those of the next 32 columns,
  // too.
  static constexpr bool kBits = drops_are_bits(C);
  static constexpr int kRowSteps = C.tile_q / 64, kColumnSteps = kBits ? drop_bit_words(C) : C.tile_kv / 32;

  // Rounds written out, unless the keys of all of them, which are then kept over the steps, do not fit into registers.
  static constexpr int kRoundsAtOnce = producer_registers(C) < 40 ? 1 : kPhiloxRounds - kPhiloxSplitRounds;

  struct Source {
    PhiloxKey key;
    DropLimits limits;
  };

  __device__ __forceinline__ static int lane() { return ptx::thread_index_anew() & 31; }

  __device__ __forceinline__ static PhiloxWords call(PhiloxKey key, PhiloxPart row, PhiloxPart column) {
    PhiloxWords c = philox_begin(key, row, column);
#pragma unroll kRoundsAtOnce
    for (uint32_t round = kPhiloxSplitRounds; round < kPhiloxRounds; ++round) philox_round(c, philox_key(key, round));
    return c;
  }

  __device__ __forceinline__ void make_words(PhiloxKey key, const DropRecord& record, int step) const {
    const int row = step / kColumnSteps * 8 + lane() / 4, column = step % kColumnSteps * 4 + lane() % 4;
    const uint32_t row_group = uint32_t(record.q_begin) / 8 + uint32_t(row);
    const uint32_t column_group = uint32_t(record.kv_tile) * (C.tile_kv / 8) + uint32_t(column);
    const PhiloxWords c = call(key, philox_row_part(key, row_group), philox_column_part(key, column_group));
    *reinterpret_cast<uint4*>(control.drop_words[ring.index] + row * drop_row_words(C) + 4 * column) = {
        c.word[0], c.word[1], c.word[2], c.word[3]};
  }

  __device__ __forceinline__ void make_bits(const Source& source, int step) const {
    const int row = step / kColumnSteps * 8 + lane() / 4, word = step % kColumnSteps;
    const DropPart* const parts = control.drop_parts[ring.index];
    const DropPart* column = parts + DropParts<C>::kRows + word * 8 + lane() % 4;
    // Of the four consumer threads that a call serves: of even and odd rows, of the first and the second 16 of 32.
    uint32_t* const words = control.drop_words[ring.index] + word * num_consumers(C) * kWarpgroupThreads +
                            row / 4 * 64 + row % 4 * 8 + lane() % 4;
    const bool alone = C.tile_kv % 64 != 0 && word == kColumnSteps - 1;  // the other half lies beyond the tile
    uint32_t kept[2][2][2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half, column += 4) {
      if (half == 1 && alone) break;
      const PhiloxWords made = call(source.key, parts[row], *column);
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const PairWords pairs = words_of_query(made, odd != 0);
#pragma unroll
        for (int far = 0; far < 2; ++far) {
          kept[half][odd][far] = kept_bits(QueryRowBits(pairs, far != 0, source.limits));
        }
      }
    }
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
      for (int far = 0; far < 2; ++far) {
        words[32 * far + 4 * odd] = join_kept_bits(kept[0][odd][far], kept[1][odd][far]);
      }
    }
  }

  __device__ __forceinline__ void run() {
    int batch = -1, head = -1;
    Source source{};
    // The first of the steps that this warp takes changes from tile to tile, so that all take equally many.
    for (int first = warp;; first = first == 0 ? kDropWarps - 1 : first - 1, ring.advance()) {
      wait_as_warp({control.records_full, ring.index}, ring.parity);
      const DropRecord record = control.drop_records[ring.index];
      if (__any_sync(~0u, record.kv_tile < 0)) return;
      if (__any_sync(~0u, record.batch != batch || record.head != head)) {
        batch = record.batch;
        head = record.head;
        const Dropout dropout = dropout_of<C>(params.problem, batch, head);
        source = {dropout.key, drop_limits(dropout.threshold)};
      }
      // Said anew by a shuffle that the whole warp has the same key: its schedule then lies in uniform registers.
      source.key = {__shfl_sync(~0u, source.key.low, 0), __shfl_sync(~0u, source.key.high, 0)};
#pragma unroll 1
      for (int step = first; step < kRowSteps * kColumnSteps; step += kDropWarps) {
        if constexpr (kBits) {
          make_bits(source, step);
        } else {
          make_words(source.key, record, step);
        }
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive({control.words_full, ring.index});
    }
  }
};

}  // namespace jattn::sm90
