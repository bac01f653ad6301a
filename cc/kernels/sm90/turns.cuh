// Turns of the consumer warpgroups: each starts the products of a tile only when the one before it has started its own,
// so that one's score stage runs while the matrix unit works for the others.
//
// Protocol. Warpgroup w owns the named barrier kFirstTurn + w, on which its own threads wait and those of its
// predecessor (w - 1, or the last for w = 0) arrive. A turn is begin(), start of the products, end(); end() lets the
// successor begin. No turn is held over a wait that depends on another warpgroup's turn.
// Every warpgroup takes one turn for every tile that the producer publishes, products or not: they all walk the same
// headers, so the numbers of turns are equal whatever masks, segments, parts of the keys and lengths leave out, and an
// item without tiles has no turns. start() gives warpgroup 0 its first turn; finish() takes back the last one, so that
// every arrival has met its wait when the block ends. tests/compile/test_turns.py proves it on a model.
#pragma once

#include "sm90/barrier.cuh"
#include "sm90/shape.cuh"

namespace jattn::sm90 {

template <bool kTakesTurns, int kWarpgroups, int kFirstTurn>
struct Turns {
  static constexpr int kThreads = 2 * kWarpgroupThreads;

  int warpgroup;

  __device__ __forceinline__ void start() const {
    if constexpr (kTakesTurns) {
      if (warpgroup == kWarpgroups - 1) arrive_named(kFirstTurn, kThreads);
    }
  }
  __device__ __forceinline__ void begin() const {
    if constexpr (kTakesTurns) sync_named(kFirstTurn + warpgroup, kThreads);
  }
  __device__ __forceinline__ void end() const {
    if constexpr (kTakesTurns) {
      arrive_named(kFirstTurn + (warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1), kThreads);
    }
  }
  __device__ __forceinline__ void finish() const {
    if constexpr (kTakesTurns) {
      if (warpgroup == 0) begin();
    }
  }
};

}  // namespace jattn::sm90
