// The drop warps: the warps of the producer warpgroup that copy nothing decide which pairs dropout removes, while the
// consumers compute (Config::drops_beside). What a consumer warp does stands in a row with its products; the calls of
// Philox are more instructions than its softmax, and beside it they cost it two words a thread and tile of keys.
//
// Protocol. Beside every tile of k travels what it needs (DropRecord), and its bits belong to the stage of k like the
// tile: made behind k_full, announced by bits_full, read by every consumer warp before it arrives at k_empty. So the
// wait of the producer for the stage covers the record and the bits, and the drop warps wait for nothing but k_full.
// They see no items: a record after the last tile ends their work. tests/compile/test_drop_steps.py has a model of it.
#pragma once

#include "attn/drop_bits.cuh"
#include "sm90/work.cuh"

namespace jattn::sm90 {

template <Config C>
struct DropWarp {
  const ForwardParams& params;
  ForwardControl<C>& control;
  int warp;  // among the drop warps
  RingPosition<C.stages> ring;

  // Calls in flight at a time. One alone waits for its own products; for four there are no registers. Unrolled further,
  // ptxas runs one after the other.
  static constexpr int kCalls = 2;
  static_assert(C.tile_kv % (16 * kCalls) == 0 && C.tile_kv <= 128);

  // Bits of the 16 rows of one consumer warp.
  __device__ __forceinline__ static void make(const Dropout& dropout, int first_row, int first_key,
                                              const HalvesThreshold& threshold, unsigned* words) {
    const int lane = threadIdx.x % 32;
    const PhiloxRowPart row = philox_row_part(dropout.key, query_row_group(lane, first_row));
    KeptBits<C.tile_kv / 16> bits;
#pragma unroll 1
    for (int p = 0; p < C.tile_kv / 16; p += kCalls) {
      PhiloxWords c[kCalls];
#pragma unroll
      for (int i = 0; i < kCalls; ++i) {
        const uint32_t group = key_column_group(lane, first_key + 16 * (p + i));
        c[i] = philox_begin(row, philox_column_part(dropout.key, group));
      }
#pragma unroll
      for (uint32_t round = 2; round < 10; ++round) {
#pragma unroll
        for (int i = 0; i < kCalls; ++i) philox_round(c[i], dropout.key, round);
      }
#pragma unroll
      for (int i = 0; i < kCalls; ++i) bits.append(c[i], threshold);
    }
    if constexpr (bits.kWords == 2) {
      *reinterpret_cast<uint2*>(words) = {bits.word(0), bits.word(1)};
    } else {
      words[0] = bits.word(0);
    }
  }

  // Bits of a tile for every third consumer warp.
  __device__ __forceinline__ void decide(const Dropout& dropout, const DropRecord& record, int stage, int first) const {
    const HalvesThreshold threshold = halves_threshold(dropout.threshold_high);
#pragma unroll 1
    for (int consumer = first; consumer < 4 * num_consumers(C); consumer += kDropWarps) {
      make(dropout, record.q_begin + 16 * consumer, record.kv_tile * C.tile_kv, threshold,
           control.drop_bits[stage][32 * consumer + threadIdx.x % 32]);
    }
  }

  __device__ __forceinline__ void run() {
    int batch = -1, head = -1;
    Dropout dropout{};
    // The first consumer warp whose bits this warp makes changes from tile to tile, so that all make equally many.
    for (int first = warp;; first = first == 0 ? kDropWarps - 1 : first - 1, ring.advance()) {
      wait(&control.k_full[ring.index], ring.parity);
      const DropRecord record = control.drop_records[ring.index];
      if (record.kv_tile < 0) break;
      if (record.batch != batch || record.head != head) {
        batch = record.batch;
        head = record.head;
        dropout = dropout_of<C>(params.problem, batch, head);
      }
      // Said anew by a shuffle that the whole warp has the same key: its schedule then lies in uniform registers.
      dropout.key = {__shfl_sync(~0u, dropout.key.low, 0), __shfl_sync(~0u, dropout.key.high, 0)};
      decide(dropout, record, ring.index, first);
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(&control.bits_full[ring.index]);
    }
  }
};

}  // namespace jattn::sm90
