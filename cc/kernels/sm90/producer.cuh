// The producer warp of the forward: decides which tiles a block visits, copies them in, and tells the consumers what
// each needs.
#pragma once

#include "attn/score.cuh"
#include "base/integers.cuh"
#include "sm90/clear_rows.cuh"
#include "sm90/item_tiles.cuh"
#include "sm90/tma.cuh"
#include "sm90/work.cuh"

namespace jattn::sm90 {

// Hands out item numbers to a block, all lanes of the producer warp together.
template <Config C>
struct ItemQueue {
  const ForwardParams& params;
  int item;
  int items;
  int fetched = 0;

  __device__ __forceinline__ ItemQueue(const ForwardParams& params, int items)
      : params(params), item(blockIdx.x), items(items) {}

  __device__ __forceinline__ bool valid() const { return item < items; }

  // Asks for the next item ahead of advance(), so that the latency of the counter passes unnoticed. Not earlier than
  // the last tile: an item that is claimed a whole item ahead runs late, when the other blocks have left its keys
  // behind (causal, head_dim 256, 8192 keys on H200: 610 instead of 700 TFLOP/s).
  __device__ __forceinline__ void prefetch() {
    const bool counted = C.documents || params.next_item != nullptr;
    if (threadIdx.x % 32 == 0) fetched = counted ? atomicAdd(params.next_item, 1) : items;
  }

  __device__ __forceinline__ void advance() { item = gridDim.x + __shfl_sync(~0u, fetched, 0); }
};

template <Config C>
struct Producer {
  const ForwardParams& params;
  ForwardControl<C>& control;
  unsigned tiles;  // shared address of the first tile
  RingPosition<C.stages> k_ring{0, 1}, v_ring{0, 1};
  unsigned landed_parity = 0;
  unsigned items = 0;            // published so far
  int part = 0;                  // of the present item's keys
  bool by_documents = false;     // items are those of the list of documents
  bool keys_are_padded = false;  // of the present item, then
  int kv_begin = 0;              // row of its first key
  RowRing<C> row_ring;
  DropRing<C> drop_ring;

  using S = Shape<C>;

  __device__ __forceinline__ static bool leads() { return threadIdx.x % 32 == 0; }

  // Publishes the item and copies its q, when the item before is done with q's place.
  __device__ __forceinline__ void load_q(const ItemRecord& record, int number) {
    const int slot = items % kItemSlots;
    HeadNumbers numbers{};
    if constexpr (has_head_numbers(C)) {
      if (record.status != kItemsEnd) numbers = head_numbers(record);  // before the wait, which hides their way here
    }
    wait_as_warp(&control.q_empty, items % 2 ^ 1);
    ++items;
    if constexpr (C.segments) {
      if (record.status == kItemRuns && !(C.documents && by_documents)) {
        for (int row = threadIdx.x % 32; row < C.tile_q; row += 32) {
          const int t = query_of_row<C>(params, record.q_begin + row);
          const int64_t first = int64_t(record.batch) * params.problem.q_len;
          const int id = t < params.problem.q_len ? params.problem.q_segments[first + t] : -1;
          control.q_ids[slot][row] = max(id, -1);
        }
      }
      __syncwarp();
    }
    if constexpr (has_control_extras(C)) {
      if (record.status != kItemsEnd) publish_extras(record, numbers, slot);
      __syncwarp();
    }
    if (leads()) {
      Barrier* full = &control.q_full;
      control.items[slot] = record;
      control.item_numbers[slot] = number;
      if constexpr (C.partial_results) control.parts[slot] = part;
      if (record.status == kItemRuns) {
        arrive_and_expect_bytes(full, S::kQBytes);
        if constexpr (C.packed_heads) {
          const int query = record.batch * params.problem.q_len + query_of_row<C>(params, record.q_begin);
          load_tile<C.tile_q, C.head_dim>(tiles, &params.q, full, 0, record.head / params.problem.group_size, query);
        } else {
          load_tile<C.tile_q, C.head_dim>(tiles, &params.q, full, record.q_begin, record.head, record.batch);
        }
      } else {
        arrive(full);
      }
    }
  }

  __device__ __forceinline__ ItemRecord begin_item(int item) {
    if constexpr (C.documents) {
      if (by_documents) {
        const DocumentItem found = document_item<C>(params, item);
        kv_begin = found.kv_begin;
        keys_are_padded = found.keys_are_padded;
        return found.record;
      }
    }
    return item_record<C>(params, item);
  }

  // The tiles that an item visits.
  __device__ __forceinline__ ItemTiles<C> tiles_of(const ItemRecord& record, int item) {
    ItemTiles<C> visit(params, record, by_documents, keys_are_padded);
    if constexpr (C.partial_results) {
      part = item % params.key_splits;
      visit.take_part(part, params.key_splits);
    }
    return visit;
  }

  // What the consumers need of an item beside its record.
  __device__ __forceinline__ void publish_extras(const ItemRecord& record, const HeadNumbers& numbers, int slot) {
    const ProblemParams& problem = params.problem;
    if constexpr (C.positions) {
      for (int row = threadIdx.x % 32; row < C.tile_q; row += 32) {
        const int t = query_of_row<C>(params, record.q_begin + row);
        control.q_positions[slot][row] =
            t < problem.q_len ? problem.q_positions[int64_t(record.batch) * problem.q_len + t] : 0;
      }
    }
    if constexpr (has_head_numbers(C)) {
      if (leads()) control.numbers[slot] = numbers;
    }
  }

  __device__ __forceinline__ HeadNumbers head_numbers(const ItemRecord& record) const {
    const ProblemParams& problem = params.problem;
    HeadNumbers numbers{};
    if constexpr (C.alibi) numbers.slope = *element_of_head(problem.alibi_slopes, record.batch, record.head);
    if constexpr (C.sinks) numbers.sink = *element_of_head(problem.sinks, record.batch, record.head);
    if constexpr (C.dropout) numbers.dropout = dropout_of<C>(problem, record.batch, record.head);
    return numbers;
  }

  // What the lanes of this warp carry of a tile of keys, from global to shared memory.
  struct Columns {
    static constexpr int kCount = ceil_div(C.tile_kv, 32);
    // With three consumer warpgroups the producer has no registers for them: 12 bytes spill.
    static constexpr bool kIdsAhead = C.segments && S::kConsumers == 2;
    int ids[kIdsAhead ? kCount : 1];
    int positions[C.positions ? kCount : 1];
    float bias[C.row_bias ? kCount : 1];  // of the row, as it lies in memory
  };

  // Before the stage is waited for: the way from memory takes longer than the wait.
  __device__ __forceinline__ void fetch_columns(Columns& columns, const ItemRecord& record, int kv_tile,
                                                int flags) const {
    const ProblemParams& problem = params.problem;
    if constexpr (Columns::kIdsAhead) {
      if (flags & kMaskSegments) {
#pragma unroll
        for (int i = 0; i < Columns::kCount; ++i) {
          columns.ids[i] = kv_id(record, kv_tile * C.tile_kv + 32 * i + int(threadIdx.x % 32));
        }
      }
    }
    const int first = kv_tile * C.tile_kv + int(threadIdx.x % 32);
    if constexpr (C.positions) {
#pragma unroll
      for (int i = 0; i < Columns::kCount; ++i) {
        const int j = first + 32 * i;
        columns.positions[i] =
            j < problem.kv_len ? problem.kv_positions[int64_t(record.batch) * problem.kv_len + j] : 0;
      }
    }
    if constexpr (C.row_bias) {
      // One address that moves on: four at a time take registers that the producer does not have.
      using Traits = ElementTraits<C.bias_element>;
      const BroadcastArray& bias = problem.bias;
      const auto* at = static_cast<const typename Traits::Storage*>(bias.data) + record.batch * bias.stride_batch +
                       record.head * bias.stride_head + first * bias.stride_key;
#pragma unroll
      for (int i = 0; i < Columns::kCount; ++i, at += 32 * bias.stride_key) {
        columns.bias[i] = first + 32 * i < problem.kv_len ? Traits::to_float(__ldg(at)) : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void store_columns(const Columns& columns, const ItemRecord& record, int kv_tile,
                                                int flags) const {
    if constexpr (C.segments && !Columns::kIdsAhead) {
      if (flags & kMaskSegments) {
        for (int row = threadIdx.x % 32; row < C.tile_kv; row += 32) {
          control.kv_ids[k_ring.index][row] = kv_id(record, kv_tile * C.tile_kv + row);
        }
      }
      __syncwarp();
    }
    if constexpr (Columns::kIdsAhead) {
      if (flags & kMaskSegments) {
#pragma unroll
        for (int i = 0; i < Columns::kCount; ++i) {
          const int column = 32 * i + int(threadIdx.x % 32);
          if (C.tile_kv % 32 == 0 || column < C.tile_kv) control.kv_ids[k_ring.index][column] = columns.ids[i];
        }
      }
      __syncwarp();
    }
    if constexpr (C.positions || C.row_bias) {
#pragma unroll
      for (int i = 0; i < Columns::kCount; ++i) {
        const int column = 32 * i + int(threadIdx.x % 32);
        if constexpr (C.positions) control.kv_positions[k_ring.index][column] = columns.positions[i];
        if constexpr (C.row_bias) {
          float* const place = &control.row_bias[row_ring.index][place_in_row(column)];
          place[0] = columns.bias[i];
          place[C.tile_kv] = columns.bias[i] * kLog2E;
        }
      }
      __syncwarp();
    }
  }

  // Copies what travels beside a tile of k and announces its bytes.
  __device__ __forceinline__ void load_beside_k(const ItemRecord& record, int kv_tile, int flags, Barrier* full) {
    const int stage = k_ring.index;
    if constexpr (S::kBiasBytes > 0) {
      if (leads()) {
        expect_bytes(full, S::kBiasBytes);
        const int head = params.bias_heads == 1 ? 0 : record.head, batch = params.bias_batch == 1 ? 0 : record.batch;
#pragma unroll
        for (int chunk = 0; chunk < num_chunks(C.tile_kv); ++chunk) {
          load_box(tiles + S::kBiasOffset + stage * S::kBiasBytes + chunk * C.tile_q * kChunkRowBytes, &params.bias,
                   full, kv_tile * C.tile_kv + chunk * kChunkColumns, record.q_begin, head, batch);
        }
        // A bias comes from memory, k and v mostly from L2, and a tile is asked for little more than one tile ahead.
        constexpr int kAhead = 2;
        if (kv_tile >= kAhead) {
#pragma unroll
          for (int chunk = 0; chunk < num_chunks(C.tile_kv); ++chunk) {
            prefetch_box(&params.bias, (kv_tile - kAhead) * C.tile_kv + chunk * kChunkColumns, record.q_begin, head,
                         batch);
          }
        }
      }
    }
    if constexpr (C.mask) {
      if ((flags & kMaskDense) && leads()) {
        const PackedMask& mask = params.mask;
        const bool all_rows = mask.words_row != 0;
        const int bytes = all_rows ? 16 * queries_of_tile<C>(params) : 16;
        const int first_row = all_rows ? query_of_row<C>(params, record.q_begin) : 0;
        expect_bytes(full, bytes);
        load_bytes(shared_address(control.mask_words[stage]),
                   mask.words + record.batch * mask.words_batch + record.head * mask.words_head +
                       kv_tile * mask.words_column_tile + int64_t(first_row) * 4,
                   bytes, full);
      }
    }
  }

  // What each warpgroup needs of a tile: its queries see keys from that of the first one's lower limit to that of the
  // last one's upper limit.
  __device__ __forceinline__ int flags_of_warpgroups(const ItemRecord& record, int kv_tile) const {
    int flags = 0;
    const int first_key = kv_tile * C.tile_kv;
#pragma unroll
    for (int warpgroup = 0; warpgroup < S::kConsumers; ++warpgroup) {
      const int first = record.q_begin + warpgroup * kWarpgroupRows;
      int end = first < record.q_length ? record.kv_length : 0;
      if constexpr (has_index_band(C)) {
        end = min(end, query_of_row<C>(params, first + kWarpgroupRows - 1) + record.upper_offset);
        if (first_key <= query_of_row<C>(params, first) + record.lower_offset) flags |= kLastOfWarpgroup << warpgroup;
      }
      if constexpr (has_index_band(C) || C.in_series) flags |= first_key < end ? 0 : kBeyondWarpgroup << warpgroup;
      if constexpr (halves_first_tile(C)) {
        const bool is_open = C.head_dim == 64 || record.lower_offset <= kOpenBelow;
        if (is_open && first_key + C.tile_kv / 2 >= end) flags |= kHalfOfWarpgroup << warpgroup;
      }
    }
    return flags;
  }

  // From here down lower offsets are those of items without a lower limit. Measured on H100: with a window of 1024 keys
  // halves gain 3 % at head_dim 64 and lose 2 % at 128.
  static constexpr int kOpenBelow = -(1 << 29);

  __device__ __forceinline__ void load_k(const ItemRecord& record, int kv_tile, int flags) {
    Barrier* full = &control.k_full[k_ring.index];
    if constexpr (C.drops_beside) tell_drop_warps({kv_tile, record.q_begin, record.head, record.batch});
    Columns columns;
    fetch_columns(columns, record, kv_tile, flags);
    wait_as_warp({control.k_empty, k_ring.index}, k_ring.parity);
    if (leads()) {
      control.headers[k_ring.index] = {kv_tile, flags | flags_of_warpgroups(record, kv_tile)};
      if constexpr (C.row_bias) control.headers[k_ring.index].flags |= row_ring.index << kRowPlaceShift;
      expect_bytes(full, S::kKBytes);
      load_tile<C.tile_kv, C.head_dim>(tiles + S::kKOffset + k_ring.index * S::kKBytes, &params.k, full,
                                       first_key(kv_tile, kv_begin), record.head / params.problem.group_size,
                                       record.batch);
    }
    if constexpr (S::kBiasBytes > 0 || C.mask) load_beside_k(record, kv_tile, flags, full);
    store_columns(columns, record, kv_tile, flags);
    if (leads()) arrive(full);
    k_ring.advance();
    if constexpr (C.row_bias) row_ring.advance();
  }

  // Before the place of the tile's k is waited for (drops.cuh).
  __device__ __forceinline__ void tell_drop_warps(const DropRecord& record) {
    if constexpr (drops_are_bits(C)) make_drop_parts(record);
    if (leads()) {
      control.drop_records[drop_ring.index] = record;
      arrive({control.records_full, drop_ring.index});
    }
    drop_ring.advance();
  }

  // A lane for each group of rows or columns; the key comes from L1.
  __device__ __forceinline__ void make_drop_parts(const DropRecord& record) {
    using Parts = DropParts<C>;
    const int lane = threadIdx.x % 32;
    const bool of_row = lane < Parts::kRows;
    const uint32_t group = of_row ? uint32_t(record.q_begin) / 8 + lane
                                  : uint32_t(record.kv_tile) * Parts::kColumns + (lane - Parts::kRows);
    const PhiloxKey key = dropout_key(params.problem, record.batch, record.head);
    control.drop_parts[drop_ring.index][lane] = {philox_part_of(key, group, of_row)};
    __syncwarp();
  }

  // Row of the tile's first key.
  __device__ __forceinline__ static int first_key(int kv_tile, int kv_begin) {
    return kv_tile * C.tile_kv + (C.documents ? kv_begin : 0);
  }

  // -2 marks padding: it differs from every id and from the -1 of query padding.
  __device__ __forceinline__ int kv_id(const ItemRecord& record, int j) const {
    if (j >= record.kv_length) return -2;
    const int id = params.problem.kv_segments[int64_t(record.batch) * params.problem.kv_len + j];
    return id < 0 ? -2 : id;
  }

  // A tile of v to be copied, maybe when the producer is at another item.
  struct VTile {
    int tile;      // -1: none
    int kv_begin;  // of its item
    bool has_padding;
  };

  __device__ __forceinline__ void load_v(const ItemRecord& record, const VTile& v) {
    Barrier* full = &control.v_full[v_ring.index];
    Barrier* target = v.has_padding ? &control.v_landed : full;
    const unsigned v_tile = tiles + S::kVOffset + v_ring.index * S::kVBytes;
    // A pointer: with the form of 32 bits NVRTC's consumers spill beside ALiBi slopes and a band (head_dim 128).
    wait_as_warp(&control.v_empty[v_ring.index], v_ring.parity);
    if (leads()) {
      arrive_and_expect_bytes(target, S::kVBytes);
      load_tile<C.tile_kv, C.head_dim_v>(v_tile, &params.v, target, first_key(v.tile, v.kv_begin),
                                         record.head / params.problem.group_size, record.batch);
    }
    if (v.has_padding) {
      wait_as_warp(&control.v_landed, landed_parity);
      landed_parity ^= 1;
      clear_padding(record, v.tile, v_tile);
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
      if constexpr (C.segments) {
        if (!(C.documents && by_documents)) padding = padding || kv_id(record, j) < 0;
      }
      if (padding) clear_row<C.tile_kv, C.head_dim_v>(v_tile, row);
    }
  }

  // Whether behind items of few keys the next one is looked up, and its first k copied, before the place of the last v
  // of this one is free. Measured on H200, causal, 1024 and 8192 keys: head_dim 128 +1.3 and 0 %, 256 +1.2 and +0.3 %,
  // 64 -1.4 and 0 %; full: 128 0 and 0 %, 192 -2.8 and -0.5 %; on H100, with early exponentials, 128 +1 and -2 %.
  // Beside terms not measured; with dropout and a row of a bias 24 bytes more spill.
  static constexpr bool kLooksAhead = C.band && C.head_dim_v > 64 && !has_control_extras(C);
  static constexpr int kFewTiles = 1024 / C.tile_kv;

  // Order of the copies: k runs one tile ahead of v, because the product with v(i) is started after the product with
  // k(i + 1). q of the next item waits for the last product of this one, so k comes before it, and the last v.
  __device__ __forceinline__ void run() {
    int all_items = params.items;
    if constexpr (C.documents) {
      by_documents = params.next_item[kDocumentsRefused] == 0;
      if (by_documents) all_items = params.next_item[kDocumentTiles] * params.problem.num_heads;
    }
    ItemQueue<C> queue(params, all_items);
    VTile late{-1, 0, false};
    for (;;) {
      // A round without an item tells the consumers that the items published so far are all for now.
      const bool repeating = repeats();
      const bool ends = !repeating && (!queue.valid() || loses_items());
      const int number = ends ? 0 : repeating ? control.lost_items[control.repeats - 1] : queue.item;
      ItemRecord record = begin_item(number);
      ItemTiles<C> visit = tiles_of(record, number);
      int tile = ends ? -1 : visit.last();
      if (tile < 0) record.status = ends ? kItemsEnd : kItemEmpty;
      int next = tile < 0 ? -1 : visit.before(tile);
      if (next < 0 && !ends) prefetch(queue);
      if (tile >= 0) load_k(record, tile, visit.flags(tile) | (next < 0 ? kLastTile : 0));
      if (kLooksAhead && late.tile >= 0) load_v(control.items[(items - 1) % kItemSlots], late);
      load_q(record, repeating ? kComputedAgain : queue.item);
      const bool looks_ahead = kLooksAhead && visit.range.end - visit.range.begin <= kFewTiles;
      while (tile >= 0 && (!looks_ahead || next >= 0)) {
        int after = -1;
        if (next >= 0) {
          after = visit.before(next);
          if (after < 0) prefetch(queue);
          load_k(record, next, visit.flags(next) | (after < 0 ? kLastTile : 0));
        }
        load_v(record, {tile, kv_begin, visit.has_padding(tile)});
        tile = next;
        next = after;
      }
      if constexpr (kLooksAhead) late = {tile, kv_begin, tile >= 0 && visit.has_padding(tile)};
      if (record.status == kItemsEnd) {
        list_repeats();
        if (!repeats()) {
          if constexpr (C.drops_beside) tell_drop_warps({-1, 0, 0, 0});
          return;
        }
      } else if (repeats()) {
        if (leads()) --control.repeats;
        __syncwarp();
      } else {
        queue.advance();
      }
    }
  }

  __device__ __forceinline__ void prefetch(ItemQueue<C>& queue) const {
    if (!repeats()) queue.prefetch();
  }

  // In shared memory, because this warp has no registers left for it.
  __device__ __forceinline__ bool repeats() const {
    return __any_sync(~0u, *const_cast<volatile int*>(&control.repeats) != 0);
  }
  __device__ __forceinline__ bool loses_items() const {
    return __any_sync(~0u, *const_cast<volatile int*>(&control.lost) != 0);
  }

  // When the consumers are done with all items: those that are lost are to be computed again, each once.
  __device__ __forceinline__ void list_repeats() {
    wait_as_warp(&control.q_empty, items % 2 ^ 1);
    if (leads()) {
      int count = 0;
#pragma unroll 1
      for (int i = 0; i < control.lost; ++i) {
        const int item = control.lost_items[i];
        bool known = false;
#pragma unroll 1
        for (int j = 0; j < count; ++j) known = known || control.lost_items[j] == item;
        if (!known) control.lost_items[count++] = item;
      }
      control.lost = 0;
      control.repeats = count;
    }
    __syncwarp();
  }
};

}  // namespace jattn::sm90
