// Blocks of sm90_backward that cast dq (Config::casts) instead of working on an item, and the signals that they wait for.
//
// The cast is bound by memory and the products are not, so beside them it costs less time than behind them. Casting blocks
// stand among the items and behind them (cast_order.cuh): those behind also use multiprocessors that the last items leave
// idle. Each warpgroup by itself takes tickets, each kTicketTiles query tiles, in the order of heads, waits until all items of
// the key/value head are done, and casts.
//
// Blocks start in the order of their index, so that all items that a casting block waits for run or are done. CUDA does not
// promise it. Whatever the order, kernels end: casting blocks are fewer than multiprocessors (cast_order()), and
// items wait for nobody, so that there is always one multiprocessor on which items run.
#pragma once

#include "sm90/backward_cast.cuh"
#include "sm90/backward_work.cuh"

namespace jattn::sm90 {

inline constexpr int kDoneBarrier = 8;  // named barrier: the item's sums are in memory

// Threads that add to dq.
template <Config C>
inline constexpr int kAddingThreads = (has_dq_warpgroup(C) ? 1 : kBackwardConsumers) * kWarpgroupThreads;

// By every thread that added to dq. later_stores: groups that it committed behind its last reduction.
template <Config C, int kLaterStores>
__device__ __forceinline__ void tell_sums(bool has_later_stores) {
  if constexpr (C.casts) {
    if constexpr (C.bulk_reduce) {
      if (lane() == 0) {
        if (has_later_stores) {
          wait_stores_done<kLaterStores>();
        } else {
          wait_stores_done<0>();
        }
      }
      __syncwarp();
    }
    arrive_named(kDoneBarrier, kAddingThreads<C> + 32);
  }
}

// By one warp that has nothing else to do: what orders the sums before the signal would hold up whoever has results to store.
template <Config C>
__device__ __forceinline__ void signal_item(const BackwardParams& params, const BackwardControl<C, false>& control) {
  sync_named(kDoneBarrier, kAddingThreads<C> + 32);
  if (lane() == 0) {
    int32_t* const signal = params.signals + control.item.batch * params.problem.num_kv_heads + control.item.head;
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(signal) : "memory");
  }
}

template <Config C>
struct CastBlock {
  static constexpr int kWarpgroups = backward_threads(C) / kWarpgroupThreads;
  static constexpr int kTileBytes = tile_bytes(C.tile_q, C.head_dim);
  // The loads of a part for the next tile start as soon as its registers are free. Threads of four warpgroups have none for that.
  static constexpr bool kLoadsAhead = !has_dq_warpgroup(C);
  static constexpr int kStagings = kLoadsAhead ? 2 : 1;
  static_assert(kTicketTiles % kStagings == 0);  // from one ticket to the next too, tiles alternate
  static_assert(kStagings * kWarpgroups * kTileBytes + kWarpgroups * 4 <= key_layout(C, true).bytes);

  const BackwardParams& params;
  unsigned char* shared;
  int number;  // among the casting blocks

  __device__ __forceinline__ static int warpgroup() { return threadIdx.x / kWarpgroupThreads; }

  // The same for all threads of the warpgroup.
  __device__ __forceinline__ int take_ticket() const {
    int* const place = reinterpret_cast<int*>(shared + kStagings * kWarpgroups * kTileBytes) + warpgroup();
    if (warpgroup_thread() == 0) {
      *place = atomicAdd(params.signals + params.problem.batch * params.problem.num_kv_heads, 1);
    }
    sync_warpgroup(warpgroup());
    const int ticket = *place;
    sync_warpgroup(warpgroup());
    return ticket;
  }

  __device__ __forceinline__ void wait_items(int kv_head) const {
    if (warpgroup_thread() == 0) {
      int done;
      while (true) {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(params.signals + kv_head) : "memory");
        if (done == params.tiles) break;
        __nanosleep(100);
      }
    }
    sync_warpgroup(warpgroup());
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

  // A warp casts two parts of a tile.
  __device__ __forceinline__ void cast_tiles(int begin, int end, int& done_head) const {
    const ProblemParams& problem = params.problem;
    const int part = warpgroup_thread() / 32;
    CastPart<C> parts[2];
    const auto load = [&](int tile) {
      wait_done(tile, done_head);
#pragma unroll
      for (int p = 0; p < 2; ++p) parts[p].load(source(tile), part + 4 * p);
    };
    if constexpr (kLoadsAhead) load(begin);
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      if constexpr (!kLoadsAhead) load(tile);
      const bool goes_on = kLoadsAhead && tile + 1 < end;
      if (goes_on) wait_done(tile + 1, done_head);
      const unsigned staging = shared_address(shared) + (warpgroup() * kStagings + tile % kStagings) * kTileBytes;
      const int flat_head = head_of(tile), entry = flat_head / problem.num_heads;
      const int first = (tile - flat_head * params.cast_order.tiles) * C.tile_q;
      int length = problem.q_len;
      if constexpr (C.lengths) {
        if (problem.q_lengths) length = min(max(problem.q_lengths[entry], 0), length);
      }
      if (warpgroup_thread() == 0) wait_stores_read<kStagings - 1>();
      sync_warpgroup(warpgroup());
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        parts[p].cast(staging, part + 4 * p, length - first, problem.scale);
        if (goes_on) parts[p].load(source(tile + 1), part + 4 * p);
      }
      fence_async_proxy();
      sync_warpgroup(warpgroup());
      if (warpgroup_thread() == 0) {
        store_cast<C>(staging, &params.dq, first, flat_head - entry * problem.num_heads, entry);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    const CastOrder& order = params.cast_order;
    const int tiles = params.problem.batch * params.problem.num_heads * order.tiles;
    const int most = number < order.passing ? order.tickets_of_passing : order.tickets;
    int done_head = -1;
    for (int count = 0; count < most; ++count) {
      const int ticket = take_ticket();
      if (ticket >= order.tickets) break;
      cast_tiles(ticket * kTicketTiles, min((ticket + 1) * kTicketTiles, tiles), done_head);
    }
    if (warpgroup_thread() == 0) wait_stores_read();
  }
};

}  // namespace jattn::sm90
