// Casts of dq among the items of sm90_backward (Config::casts), and the signals that they wait for.
//
// The cast is bound by memory and the products are not, so beside them it costs less time than behind them. Of the numbers that
// blocks take, some are casts (cast_order.cuh): those among the items are of a few tiles, those behind them as many as there are
// left, on multiprocessors that the last items leave idle. Each consumer warpgroup by itself casts kTicketTiles query tiles
// after another, in the order of heads, as soon as all items of their key/value head are done.
//
// No cast waits for ever: it waits for items of smaller numbers only, and blocks do what they take in the order of numbers.
#pragma once

#include "sm90/backward_cast.cuh"
#include "sm90/backward_work.cuh"

namespace jattn::sm90 {

// Adds 1 to the signals of a key/value head when this warp's sums for an item are in memory. later_stores: groups that lane 0
// committed behind its last reduction.
template <Config C, int kLaterStores>
__device__ __forceinline__ void signal_sums(const BackwardParams& params, const BackwardItem& item,
                                            bool has_later_stores) {
  if constexpr (C.casts) {
    if constexpr (C.bulk_reduce) {
      if (lane() == 0) {
        if (has_later_stores) {
          wait_stores_done<kLaterStores>();
        } else {
          wait_stores_done<0>();
        }
      }
    }
    __syncwarp();
    if (lane() == 0) {
      int32_t* const signal = params.signals + item.batch * params.problem.num_kv_heads + item.head;
      asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(signal) : "memory");
    }
  }
}

// What a consumer warpgroup does of a cast.
template <Config C>
struct CastDuty {
  static constexpr KeyLayout kLayout = key_layout(C, true);
  static constexpr int kTileBytes = tile_bytes(C.tile_q, C.head_dim);
  static constexpr int kRoom = kLayout.bias - kLayout.ds;  // ds and the staging of dq: free between items
  static constexpr int kStagings = 2 * kBackwardConsumers * kTileBytes <= kRoom ? 2 : 1;
  static constexpr int kSignals = kBackwardConsumers * kWarpgroupThreads / 32;  // of an item
  static_assert(kTicketTiles % kStagings == 0);  // from one ticket to the next too, tiles alternate
  static_assert(kStagings * kBackwardConsumers * kTileBytes <= kRoom);

  const BackwardParams& params;
  BackwardControl<C, false>& control;
  unsigned tiles;  // shared address of the first tile
  int warpgroup;   // among the consumers

  // The same for all threads of the warpgroup.
  __device__ __forceinline__ int take_ticket() const {
    if (warpgroup_thread() == 0) {
      control.cast_tickets[warpgroup] =
          atomicAdd(params.signals + params.problem.batch * params.problem.num_kv_heads, 1);
    }
    sync_warpgroup(warpgroup);
    const int ticket = control.cast_tickets[warpgroup];
    sync_warpgroup(warpgroup);
    return ticket;
  }

  __device__ __forceinline__ void wait_items(int kv_head) const {
    if (warpgroup_thread() == 0) {
      int done;
      while (true) {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(params.signals + kv_head) : "memory");
        if (done == params.tiles * kSignals) break;
        __nanosleep(100);
      }
    }
    sync_warpgroup(warpgroup);
  }

  // Tiles of dq are counted over all heads.
  __device__ __forceinline__ int head_of(int tile) const { return tile / params.cast_order.tiles; }

  __device__ __forceinline__ void wait_done(int tile, int& done_head) const {
    const int kv_head = head_of(tile) / params.problem.group_size;
    if (kv_head != done_head) wait_items(kv_head);
    done_head = kv_head;
  }

  __device__ __forceinline__ const float* source(int tile) const {
    const int head = head_of(tile);
    const int64_t row = int64_t(head) * params.rows_padded + (tile - head * params.cast_order.tiles) * C.tile_q;
    return params.dq_accumulator + row * C.head_dim;
  }

  // A warp casts two parts of a tile. The loads of a part for the next tile start as soon as its registers are free.
  __device__ __forceinline__ void cast_tiles(int begin, int end, int& done_head) const {
    const ProblemParams& problem = params.problem;
    const int part = warpgroup_thread() / 32;
    CastPart<C> parts[2];
    wait_done(begin, done_head);
#pragma unroll
    for (int p = 0; p < 2; ++p) parts[p].load(source(begin), part + 4 * p);
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      const bool goes_on = tile + 1 < end;
      if (goes_on) wait_done(tile + 1, done_head);
      const unsigned staging = tiles + kLayout.ds + (warpgroup * kStagings + tile % kStagings) * kTileBytes;
      const int flat_head = head_of(tile), entry = flat_head / problem.num_heads;
      const int first = (tile - flat_head * params.cast_order.tiles) * C.tile_q;
      int length = problem.q_len;
      if constexpr (C.lengths) {
        if (problem.q_lengths) length = min(max(problem.q_lengths[entry], 0), length);
      }
      if (warpgroup_thread() == 0) wait_stores_read<kStagings - 1>();
      sync_warpgroup(warpgroup);
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        parts[p].cast(staging, part + 4 * p, length - first, problem.scale);
        if (goes_on) parts[p].load(source(tile + 1), part + 4 * p);
      }
      fence_async_proxy();
      sync_warpgroup(warpgroup);
      if (warpgroup_thread() == 0) {
        store_cast<C>(staging, &params.dq, first, flat_head - entry * problem.num_heads, entry);
      }
    }
  }

  __device__ __forceinline__ void cast_tickets(int begin, int count, int& done_head) const {
    const int tiles_in_all = params.problem.batch * params.problem.num_heads * params.cast_order.tiles;
    cast_tiles(begin * kTicketTiles, min((begin + count) * kTicketTiles, tiles_in_all), done_head);
  }

  // number: among the casts.
  __device__ __forceinline__ void run(int number) const {
    const CastOrder& order = params.cast_order;
    int done_head = -1;
    sync_consumers();  // results of the last item have left the other warpgroup's places too
    if (number < order.passing) {
      cast_tickets((number * kBackwardConsumers + warpgroup) * order.tickets_of_passing, order.tickets_of_passing,
                   done_head);
    } else {
      const int others = order.passing * kBackwardConsumers * order.tickets_of_passing;
      for (int ticket = others + take_ticket(); ticket < order.tickets; ticket = others + take_ticket()) {
        cast_tickets(ticket, 1, done_head);
      }
    }
    if (warpgroup_thread() == 0) wait_stores_read();
    sync_consumers();  // the next item's ds goes where either warpgroup had its tiles
  }
};

}  // namespace jattn::sm90
