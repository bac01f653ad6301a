// The producer warp: decides which tiles a block visits, copies them in, and tells the consumers what each needs.
#pragma once

#include "sm90/tma.cuh"
#include "sm90/work.cuh"

namespace jattn::sm90 {

// Hands out item numbers to a block, all lanes of the producer warp together.
template <Config C>
struct ItemQueue {
  const ForwardParams& params;
  int item;
  int fetched = 0;

  __device__ __forceinline__ explicit ItemQueue(const ForwardParams& params) : params(params), item(blockIdx.x) {}

  __device__ __forceinline__ bool valid() const { return item < params.items; }

  // Asks for the next item ahead of advance(), so that the latency of the counter passes unnoticed. Not earlier than
  // the last tile: an item that is claimed a whole item ahead runs late, when the other blocks have left its keys
  // behind (causal, head_dim 256, 8192 keys on H200: 610 instead of 700 TFLOP/s).
  __device__ __forceinline__ void prefetch() {
    if constexpr (C.schedule == 2) {
      if (threadIdx.x % 32 == 0) fetched = atomicAdd(params.next_item, 1);
    }
  }

  __device__ __forceinline__ void advance() {
    if constexpr (C.schedule == 0) {
      item = params.items;
    } else if constexpr (C.schedule == 1) {
      item += gridDim.x;
    } else {
      item = gridDim.x + __shfl_sync(~0u, fetched, 0);
    }
  }
};

// The key tiles of one item: which to visit, from the last to the first, and what each needs.
template <Config C>
struct ItemTiles {
  TileRange range;
  TileWalk<C.segments> walk;
  bool v_ends_early;  // rows of v behind the keys of this batch entry exist
  int kv_length;

  __device__ __forceinline__ ItemTiles(const ForwardParams& params, const ItemRecord& record)
      : range(item_tiles<C>(record)), kv_length(record.kv_length) {
    const ProblemParams& problem = params.problem;
    v_ends_early = C.lengths && kv_length < problem.kv_len;
    walk.begin = range.begin;
    if constexpr (C.segments) {
      const int64_t kv_tiles = ceil_div(problem.kv_len, C.tile_kv);
      walk.others = problem.kv_ranges + record.batch * kv_tiles;
      walk.own = problem.q_ranges[int64_t(record.batch) * params.tiles + record.q_begin / C.tile_q];
    }
  }

  __device__ __forceinline__ int last() { return walk.at_or_below(range.end - 1); }
  __device__ __forceinline__ int before(int tile) { return walk.at_or_below(tile - 1); }

  __device__ __forceinline__ int flags(int tile) const {
    int flags = tile >= range.full_end ? kMaskUpper : 0;
    if constexpr (C.band) flags |= tile < range.full_begin ? kMaskLower : 0;
    if constexpr (C.segments) flags |= segments_equal(walk.own, walk.others[tile]) ? 0 : kMaskSegments;
    return flags;
  }

  // Rows of v behind the keys of the batch entry, or of padding among them, may hold anything, and 0 * NaN is NaN: such
  // tiles pass through clear_padding. Rows beyond the array arrive as zeros.
  __device__ __forceinline__ bool has_padding(int tile) const {
    bool padding = v_ends_early && (tile + 1) * C.tile_kv > kv_length;
    if constexpr (C.segments) padding = padding || holds_padding(walk.others[tile]);
    return padding;
  }
};

template <Config C>
struct Producer {
  const ForwardParams& params;
  ForwardControl<C>& control;
  unsigned tiles;  // shared address of the first tile
  RingPosition<C.stages> k_ring{0, 1}, v_ring{0, 1};
  unsigned landed_parity = 0;
  unsigned items = 0;  // published so far

  using S = Shape<C>;

  __device__ __forceinline__ static bool leads() { return threadIdx.x % 32 == 0; }

  // Publishes the item and copies its q, when the buffer's last user is done with it.
  __device__ __forceinline__ void load_q(const ItemRecord& record) {
    const int buffer = items % S::kQBuffers;
    const int slot = items % S::kItemSlots;
    wait(&control.q_empty[buffer], items / S::kQBuffers % 2 ^ 1);
    ++items;
    if constexpr (C.segments) {
      if (record.status == kItemRuns) {
        for (int row = threadIdx.x % 32; row < C.tile_q; row += 32) {
          const int t = record.q_begin + row;
          const int64_t first = int64_t(record.batch) * params.problem.q_len;
          const int id = t < params.problem.q_len ? params.problem.q_segments[first + t] : -1;
          control.q_ids[slot][row] = max(id, -1);
        }
      }
      __syncwarp();
    }
    if (leads()) {
      Barrier* full = &control.q_full[buffer];
      control.items[slot] = record;
      if (record.status == kItemRuns) {
        arrive_and_expect_bytes(full, S::kQBytes);
        load_tile<C.tile_q, C.head_dim>(tiles + buffer * S::kQBytes, &params.q, full, record.q_begin, record.head,
                                        record.batch);
      } else {
        arrive(full);
      }
    }
  }

  __device__ __forceinline__ void load_k(const ItemRecord& record, int kv_tile, int flags) {
    Barrier* full = &control.k_full[k_ring.index];
    wait(&control.k_empty[k_ring.index], k_ring.parity);
    if (leads()) {
      control.headers[k_ring.index] = {kv_tile, flags};
      expect_bytes(full, S::kKBytes);
      load_tile<C.tile_kv, C.head_dim>(tiles + S::kKOffset + k_ring.index * S::kKBytes, &params.k, full,
                                       kv_tile * C.tile_kv, record.head / params.problem.group_size, record.batch);
    }
    if constexpr (C.segments) {
      if (flags & kMaskSegments) {
        for (int row = threadIdx.x % 32; row < C.tile_kv; row += 32) {
          control.kv_ids[k_ring.index][row] = kv_id(record, kv_tile * C.tile_kv + row);
        }
      }
      __syncwarp();
    }
    if (leads()) arrive(full);
    k_ring.advance();
  }

  // -2 marks padding: it differs from every id and from the -1 of query padding.
  __device__ __forceinline__ int kv_id(const ItemRecord& record, int j) const {
    if (j >= record.kv_length) return -2;
    const int id = params.problem.kv_segments[int64_t(record.batch) * params.problem.kv_len + j];
    return id < 0 ? -2 : id;
  }

  __device__ __forceinline__ void load_v(const ItemRecord& record, int kv_tile, bool has_padding) {
    Barrier* full = &control.v_full[v_ring.index];
    Barrier* target = has_padding ? &control.v_landed : full;
    const unsigned v_tile = tiles + S::kVOffset + v_ring.index * S::kVBytes;
    wait(&control.v_empty[v_ring.index], v_ring.parity);
    if (leads()) {
      arrive_and_expect_bytes(target, S::kVBytes);
      load_tile<C.tile_kv, C.head_dim_v>(v_tile, &params.v, target, kv_tile * C.tile_kv,
                                         record.head / params.problem.group_size, record.batch);
    }
    if (has_padding) {
      wait(&control.v_landed, landed_parity);
      landed_parity ^= 1;
      clear_padding(record, kv_tile, v_tile);
      fence_async_proxy();
      __syncwarp();
      if (leads()) arrive(full);
    }
    v_ring.advance();
  }

  __device__ __forceinline__ void clear_padding(const ItemRecord& record, int kv_tile, unsigned v_tile) {
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < C.tile_kv; row += 32) {
      const int j = kv_tile * C.tile_kv + row;
      bool padding = j >= record.kv_length;
      if constexpr (C.segments) padding = padding || kv_id(record, j) < 0;
      if (!padding) continue;
#pragma unroll 1
      for (int chunk = 0; chunk < num_chunks(C.head_dim_v); ++chunk) {
        const unsigned address = v_tile + (chunk * C.tile_kv + row) * kChunkRowBytes;
#pragma unroll
        for (int byte = 0; byte < kChunkRowBytes; byte += 16) {
          asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address + byte), "r"(0) : "memory");
        }
      }
    }
  }

  // Order of the copies: k runs one tile ahead of v, because the product with v(i) is started after the product with
  // k(i + 1). q of the next item waits for the last product of this one, so k comes before it.
  __device__ __forceinline__ void run() {
    for (ItemQueue<C> queue(params); queue.valid(); queue.advance()) {
      ItemRecord record = item_record<C>(params, queue.item);
      ItemTiles<C> visit(params, record);
      int tile = visit.last();
      if (tile < 0) record.status = kItemEmpty;
      int next = tile < 0 ? -1 : visit.before(tile);
      if (next < 0) queue.prefetch();
      if (tile >= 0) load_k(record, tile, visit.flags(tile) | (next < 0 ? kLastTile : 0));
      load_q(record);
      while (tile >= 0) {
        int after = -1;
        if (next >= 0) {
          after = visit.before(next);
          if (after < 0) queue.prefetch();
          load_k(record, next, visit.flags(next) | (after < 0 ? kLastTile : 0));
        }
        load_v(record, tile, visit.has_padding(tile));
        tile = next;
        next = after;
      }
    }
    if constexpr (C.schedule != 0) publish_end();
  }

  // With chained items k runs ahead across items: k and q of the next item come before the last v of this one.
  __device__ __forceinline__ void run_chained() {
    ItemRecord held_record;  // of the v tile that is still to be copied
    int held_tile = -1;
    bool held_padding = false;
    for (ItemQueue<C> queue(params); queue.valid(); queue.advance()) {
      ItemRecord record = item_record<C>(params, queue.item);
      ItemTiles<C> visit(params, record);
      int tile = visit.last();
      if (tile < 0) {
        record.status = kItemEmpty;
        queue.prefetch();
        // Nothing is chained to an empty item: the consumers end the item before it first, and need its v for that.
        if (held_tile >= 0) load_v(held_record, held_tile, held_padding);
        held_tile = -1;
        load_q(record);
      }
      for (bool first = true; tile >= 0; first = false) {
        const int next = visit.before(tile);
        if (next < 0) queue.prefetch();
        load_k(record, tile, visit.flags(tile) | (next < 0 ? kLastTile : 0));
        if (first) load_q(record);
        if (held_tile >= 0) load_v(held_record, held_tile, held_padding);
        held_record = record;
        held_tile = tile;
        held_padding = visit.has_padding(tile);
        tile = next;
      }
    }
    publish_end();
    if (held_tile >= 0) load_v(held_record, held_tile, held_padding);
  }

  __device__ __forceinline__ void publish_end() {
    ItemRecord end{};
    end.status = kItemsEnd;
    load_q(end);
  }
};

}  // namespace jattn::sm90
