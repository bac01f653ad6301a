// The warps that add dq up in memory (Config::dq_order), one for each consumer warpgroup, whose parts they send from
// staging memory, or, beside drop warps, one for both, whose parts of a tile lie beside each other and are sent as one.
// Blocks that own keys of one head add to the same tiles of dq; who is first there stores its part instead, so that the
// accumulator need not be zeroed. Each half of a tile of the accumulator, or each tile, has a counter in memory that
// says so (DqTurnState).
//
// In any order: who has a part and finds nothing there says that it stores, and whoever comes until it has done so
// waits.
//
// In the order of the key tiles (orders_dq()): the counter is the number of key tiles up to the last that was added,
// and a warp waits until its predecessor's number stands there. So the sums have the same bits every time. Which tile
// precedes another is known without looking (Predecessor). No block waits in vain: items are taken by a counter alone,
// in the order in which they wait for each other, so the oldest of the unfinished waits for nobody. Of one head that is
// the order of its key tiles; all walk down the same queries, so that a block which began later hardly ever waits.
#pragma once

#include "sm90/backward_work.cuh"
#include "sm90/tma.cuh"

namespace jattn::sm90 {

// What other multiprocessors wrote before they wrote the value, by copies too, is there for what this thread does next.
__device__ __forceinline__ int load_turn(const int32_t* counter) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}
__device__ __forceinline__ void store_turn(int32_t* counter, int value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
__device__ __forceinline__ void count_turn(int32_t* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

template <Config C>
struct DqSender {
  static constexpr KeyLayout kLayout = key_layout(C, true);
  static constexpr int kWarpgroups = kBackwardConsumers / num_senders(C);  // that this warp serves
  static constexpr int kBytes = kLayout.staging_bytes / num_senders(C);    // of a sum
  static_assert(C.tile_q >= kDqTurnRows);

  const BackwardParams& params;
  BackwardControl<C, false>& control;
  unsigned tiles;  // shared address of the first tile
  int number;      // among the senders

  // In any order for at least the value: where tools launch this kernel again by itself, tiles may be kDqCast already.
  __device__ __forceinline__ static void wait_until(const int32_t* counter, int value) {
    while (orders_dq(C) ? load_turn(counter) != value : load_turn(counter) < value) {}
  }

  // Whether somebody has been there, as far as can be told before the part is staged; in order, waits for the
  // predecessor.
  __device__ __forceinline__ static bool finds_sums(const int32_t* counter, const DqTurn& turn) {
    if constexpr (!orders_dq(C)) return load_turn(counter) >= kDqStored;
    if (turn.after == 0) return false;
    wait_until(counter, turn.after);
    return true;
  }

  // Whether nobody has been there, and others will wait until this part is stored; else waits for whom was.
  __device__ __forceinline__ static bool comes_first(int32_t* counter) {
    if constexpr (orders_dq(C)) return true;
    if (atomicCAS(counter, kDqNothing, kDqStoring) == kDqNothing) return true;
    wait_until(counter, kDqStored);
    return false;
  }

  // Of all batch entries. In units of the rows of a counter numbers have 32 bits, whose division takes few registers.
  __device__ __forceinline__ unsigned kv_head(const DqTurn& turn) const {
    return unsigned(turn.row / kDqTurnRows) / unsigned(params.rows_padded / kDqTurnRows) /
           unsigned(params.problem.group_size);
  }

  // By one thread.
  __device__ __forceinline__ void run() const {
    RingPosition<kDqTurns> ring;
    RingPosition<kLayout.staging_slots> slot;
    while (true) {
      wait(&control.turn_full[ring.index], ring.parity);
      const DqTurn turn = control.dq_turns[ring.index];
      arrive(&control.turn_empty[ring.index]);
      ring.advance();
      if (turn.own == 0) break;
      int32_t* const counter = params.dq_turns + turn.row / kDqTurnRows * kBackwardConsumers + number;
      sleep_at_random();
      const bool found = finds_sums(counter, turn);
#pragma unroll
      for (int i = 0; i < kWarpgroups; ++i) {
        wait(&control.staged_full[slot.index][number * kWarpgroups + i], slot.parity);
      }
      const bool stores = !found && comes_first(counter);
      float* const destination = params.dq_accumulator + turn.row * C.head_dim + number * (kBytes / 4);
      const unsigned source = tiles + kLayout.staging + slot.index * kLayout.staging_bytes + number * kBytes;
      if (stores) {
        store_floats(destination, source, kBytes);
      } else {
        fence_async_proxy_global();
        add_floats(destination, source, kBytes);
      }
      commit_stores();
      wait_stores();
#pragma unroll
      for (int i = 0; i < kWarpgroups; ++i) arrive(&control.staged_empty[slot.index][number * kWarpgroups + i]);
      sleep_at_random();
      if (orders_dq(C) || stores) store_turn(counter, orders_dq(C) ? int(turn.own) : kDqStored);
      if (casts_beside(C) && turn.own >= DqTurn::kEndsItem) count_turn(params.next_item + kItemsDone + kv_head(turn));
      slot.advance();
    }
  }
};

}  // namespace jattn::sm90
