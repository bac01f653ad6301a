// The warp that stores the gradients of scores (Config::stores_ds). The consumers leave them where the tile of the bias
// lay that they come from, in the order of queries; the producer left a record beside that tile, of where they go.
#pragma once

#include "sm90/backward_work.cuh"
#include "sm90/tma.cuh"

namespace jattn::sm90 {

template <Config C, bool kFused>
struct DsStorer {
  static constexpr KeyLayout kLayout = key_layout(C, kFused);
  static constexpr int kHalfBytes = C.tile_q * kChunkRowBytes;  // of the keys of a consumer warpgroup

  const BackwardParams& params;
  BackwardControl<C, false>& control;
  unsigned tiles;  // shared address of the first tile

  // By one thread.
  __device__ __forceinline__ void run() const {
    RingPosition<kLayout.bias_slots> place;
    while (true) {
      wait(&control.ds_written[place.index], place.parity);
      const DsPlace to = control.ds_places[place.index];
      if (to.query < 0) break;
      const unsigned tile = tiles + kLayout.bias + place.index * bias_tile_bytes(C);
#pragma unroll
      for (int half = 0; half < kBackwardConsumers; ++half) {
        put_box(params.adds_ds, &params.ds, tile + half * kHalfBytes, to.key + half * kWarpgroupRows, to.query, to.head,
                to.entry);
      }
      commit_stores();
      wait_stores_read();
      arrive(&control.bias_empty[place.index]);
      place.advance();
    }
  }
};

}  // namespace jattn::sm90
