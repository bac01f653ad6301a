// The producer warp of the kernels that own keys: copies k and v once, then q, dout, lse and delta of every query tile
// that a query head of the group needs.
#pragma once

#include "sm90/backward_work.cuh"
#include "sm90/clear_rows.cuh"
#include "sm90/tma.cuh"

namespace jattn::sm90 {

template <Config C, bool kFused>
struct KeyProducer {
  static constexpr KeyLayout kLayout = key_layout(C, kFused);
  static constexpr int kQBytes = tile_bytes(C.tile_q, C.head_dim);
  static constexpr int kDoutBytes = tile_bytes(C.tile_q, C.head_dim_v);
  // Rows that see no key may hold anything in q and dout; without these features there are none.
  static constexpr bool kEmptyRows = C.band || C.lengths || C.segments || C.mask || C.bias || C.program;
  // Segment ids of queries that a lane has on their way, of keys twice as many: what does not spill.
  static constexpr int kIdsAtOnce = C.drops_beside ? 1 : C.tile_q / 32;

  const BackwardParams& params;
  BackwardControl<C, false>& control;
  unsigned tiles;  // shared address of the first tile
  RingPosition<C.stages> ring{0, 1};
  RingPosition<kLayout.bias_slots> bias_ring{0, 1};
  RingPosition<kDqTurns> turn_ring{0, 1};
  int drop_place = 0;  // of the next record for the drop warps
  unsigned landed_parity = 0;
  unsigned own_parity = 1;
  int terms_head = -1;        // query head of the records in control.terms
  int terms_unwritten = 0;    // stages whose record is still another
  bool by_documents = false;  // items are those of the list of documents
  // Of the document at hand: the query from which tiles are counted, and how far the rows of dq_accumulator are from
  // those of statistics. 0 on the grid.
  int q_first = 0, accumulator_shift = 0;

  __device__ __forceinline__ static bool leads() { return threadIdx.x % 32 == 0; }

  // Waits for tiles that were sent to `landed`.
  __device__ __forceinline__ void wait_landed() {
    wait_as_warp(&control.landed, landed_parity);
    landed_parity ^= 1;
  }

  __device__ __forceinline__ void load_values(const BackwardItem& item, Barrier* target) {
    if (leads()) {
      expect_bytes(target, tile_bytes(C.tile_kv, C.head_dim_v));
      load_tile<C.tile_kv, C.head_dim_v>(tiles + kLayout.v, &params.v, target, item.first, item.head, item.batch);
    }
  }

  __device__ __forceinline__ void load_keys(const BackwardItem& item, bool has_padding) {
    Barrier* target = has_padding ? &control.landed : &control.own_full;
    if (leads()) {
      expect_bytes(target, tile_bytes(C.tile_kv, C.head_dim));
      load_tile<C.tile_kv, C.head_dim>(tiles + kLayout.k, &params.k, target, item.first, item.head, item.batch);
    }
    if (!takes_items(C) || has_padding) load_values(item, target);
    const auto kv_id = [&](int row) {
      return segment_id<-2>(params.problem.kv_segments, int64_t(item.batch) * params.problem.kv_len, item.first + row,
                            item.kv_length);
    };
    if constexpr (C.segments) {
#pragma unroll 2 * kIdsAtOnce
      for (int row = threadIdx.x % 32; row < C.tile_kv; row += 32) control.own_ids[row] = kv_id(row);
    }
    if constexpr (C.positions) {
      load_positions<C.tile_kv>(control.own_positions, params.problem.kv_positions, item.batch, item.first,
                                params.problem.kv_len);
    }
    __syncwarp();
    if (leads()) arrive(target);
    if (has_padding) {
      wait_landed();
      const auto is_padding = [&](int row) {
        if constexpr (C.segments) return kv_id(row) < 0;
        return item.first + row >= item.kv_length;
      };
      clear_rows<C.tile_kv, C.head_dim>(tiles + kLayout.k, is_padding);
      clear_rows<C.tile_kv, C.head_dim_v>(tiles + kLayout.v, is_padding);
      fence_async_proxy();
      __syncwarp();
      if (leads()) arrive(&control.own_full);
    }
    __syncwarp();
  }

  // Gives the consumers an item when they have let go of the one before. They need v for its last dp, k for dq, a
  // product later.
  __device__ __forceinline__ void start_item(const BackwardItem& item, bool has_padding) {
    if constexpr (takes_items(C)) {
      wait_as_warp(&control.values_empty, own_parity);
      if (item.runs && !has_padding) load_values(item, &control.own_full);
      wait_as_warp(&control.own_empty, own_parity);
      own_parity ^= 1;
    }
    if (leads()) control.item = item;
    if (item.runs) {
      load_keys(item, has_padding);
    } else if (leads()) {
      arrive(&control.own_full);
    }
  }

  struct Step {
    int head, tile;
    int mask_flags;
  };

  __device__ __forceinline__ int first_query(Step step) const {
    return step.tile * C.tile_q + (C.documents ? q_first : 0);
  }

  // Tells the warps that add dq up where the next one goes.
  __device__ __forceinline__ void announce_dq(const DqTurn& turn) {
    if constexpr (has_senders(C)) {
      wait_as_warp(&control.turn_empty[turn_ring.index], turn_ring.parity);
      if (leads()) {
        control.dq_turns[turn_ring.index] = turn;
        arrive(&control.turn_full[turn_ring.index]);
      }
      turn_ring.advance();
    }
  }

  // Eight lanes have a group each; the key comes from L1.
  __device__ __forceinline__ void make_drop_parts(const DropStep& step) {
    if (step.batch < 0) return;
    const PhiloxKey key = dropout_key(params.problem, step.batch, step.head);
    const int group = ptx::thread_index_anew() % kDropStepParts;  // kept, it would spill beside segments
    control.drop_parts[drop_place][group] = {philox_row_part(key, unsigned(step.query) / 8 + group)};
    __syncwarp();
  }

  // Tells the drop warps of the next step.
  __device__ __forceinline__ void announce_drops(const DropStep& step) {
    if constexpr (C.drops_beside) {
      static_assert(C.stages < kDropSteps);
      make_drop_parts(step);
      if (leads()) {
        control.drop_steps[drop_place] = step;
        arrive(&control.drop_step_full[drop_place]);
      }
      drop_place = (drop_place + 1) % kDropSteps;
    }
  }

  // Tells the warp that stores ds that no tile follows.
  __device__ __forceinline__ void end_ds() {
    if constexpr (C.stores_ds) {
      const int slot = bias_ring.index;
      wait_as_warp(&control.bias_empty[slot], bias_ring.parity);
      if (leads()) {
        control.ds_places[slot].query = -1;
        arrive(&control.ds_written[slot], kDsWriters);
      }
    }
  }

  // What the consumers need of a step beside tiles.
  __device__ __forceinline__ void write_terms(const BackwardItem& item, Step step, int flags) {
    const int stage = ring.index, first = first_query(step);
    if constexpr (C.positions) {
      if (C.alibi || C.program || C.dropout_rows || (flags & kComparesPositions)) {
        load_positions<C.tile_q>(control.positions[stage], params.problem.q_positions, item.batch, first,
                                 params.problem.q_len);
        __syncwarp();
      }
    }
    if constexpr (has_step_terms(C)) {
      if (step.head != terms_head) {
        terms_head = step.head;
        terms_unwritten = C.stages;
      }
      if (terms_unwritten > 0) {
        --terms_unwritten;
        if (leads()) control.terms[stage] = step_terms<C>(params.problem, item.batch, step.head);
      }
    }
  }

  // empty_rows: the tile holds rows that see no key, which must be cleared. after: as in DqTurn.
  __device__ __forceinline__ void load_queries(const BackwardItem& item, Step step, int flags, bool empty_rows,
                                               int after) {
    const int stage = ring.index;
    const int first = first_query(step);
    const int64_t row = (int64_t(item.batch) * params.problem.num_heads + step.head) * params.rows_padded + first;
    const int64_t accumulator_row = row + (C.documents ? accumulator_shift : 0);
    Barrier* q_full = empty_rows ? &control.landed : &control.first_full[stage];
    Barrier* dout_full = empty_rows ? &control.landed : &control.second_full[stage];
    const unsigned q_tile = tiles + kLayout.q + stage * kQBytes, dout_tile = tiles + kLayout.dout + stage * kDoutBytes;
    announce_drops({item.first, first, item.batch, step.head});
    wait_as_warp(&control.first_empty[stage], ring.parity);
    if constexpr (C.segments) {
      if ((flags & kComparesSegments) || C.dropout_rows) {
#pragma unroll kIdsAtOnce
        for (int i = threadIdx.x % 32; i < C.tile_q; i += 32) {
          control.ids[stage][i] = segment_id<-1>(params.problem.q_segments, int64_t(item.batch) * params.problem.q_len,
                                                 first + i, params.problem.q_len);
        }
      }
      __syncwarp();
    }
    write_terms(item, step, flags);
    const unsigned ends_item = casts_beside(C) && (flags & kLastStep) ? DqTurn::kEndsItem : 0;
    announce_dq({accumulator_row, unsigned(item.first / C.tile_kv + 1) | ends_item, after});
    if (leads()) {
      control.headers[stage] = {first, flags, accumulator_row};
      int bytes = kQBytes + statistics_bytes(C);
      if constexpr (C.mask) bytes += flags & kComparesMask ? mask_words_bytes<C, false>(params.mask) : 0;
      // One arrival completes a barrier: with both tiles on `landed` it comes below.
      if (empty_rows) {
        expect_bytes(q_full, bytes);
      } else {
        arrive_and_expect_bytes(q_full, bytes);
      }
      if constexpr (C.mask) {
        if (flags & kComparesMask) {
          load_mask_words<C, false>(control.mask_words[stage], params.mask, q_full, item.batch, step.head, item.first,
                                    step.tile);
        }
      }
      load_bytes(shared_address(control.lse_log2[stage]), params.lse_log2 + row, statistics_bytes(C), q_full);
      load_tile<C.tile_q, C.head_dim>(q_tile, &params.q, q_full, first, step.head, item.batch);
    }
    wait_as_warp(&control.second_empty[stage], ring.parity);
    if (leads()) {
      arrive_and_expect_bytes(dout_full, kDoutBytes + statistics_bytes(C));
      load_bytes(shared_address(control.delta[stage]), params.delta + row, statistics_bytes(C), dout_full);
      load_tile<C.tile_q, C.head_dim_v>(dout_tile, &params.dout, dout_full, first, step.head, item.batch);
    }
    if constexpr (kEmptyRows) {
      if (empty_rows) {
        wait_landed();
        const auto is_empty = [&](int i) { return control.lse_log2[stage][i] == infinity(); };
        clear_rows<C.tile_q, C.head_dim>(q_tile, is_empty);
        clear_rows<C.tile_q, C.head_dim_v>(dout_tile, is_empty);
        fence_async_proxy();
        __syncwarp();
        if (leads()) {
          arrive(&control.first_full[stage]);
          arrive(&control.second_full[stage]);
        }
      }
    }
    // Behind the arrivals above: consumers may begin with the queries while the place of a bias is waited for.
    if constexpr (bias_tile_bytes(C) > 0) {
      const int slot = bias_ring.index;
      wait_as_warp(&control.bias_empty[slot], bias_ring.parity);
      if (leads()) {
        if constexpr (C.stores_ds) {
          const DsPlace to{item.first, first, step.head - params.first_ds_head, item.batch - params.first_entry};
          control.ds_places[slot] = to;
          if (params.adds_ds) {  // what is there was written by an earlier launch and has left L2
            prefetch_box(&params.ds, to.key, to.query, to.head, to.entry);
            prefetch_box(&params.ds, to.key + kWarpgroupRows, to.query, to.head, to.entry);
          }
        }
        load_bias_tile<C>(tiles + kLayout.bias + slot * bias_tile_bytes(C), params, &control.bias_full[slot],
                          item.batch, step.head, first, item.first);
      }
      bias_ring.advance();
    }
    ring.advance();
  }

  // is_first: of the block.
  __device__ __forceinline__ void run_item(int number, bool is_first) {
    const ProblemParams& problem = params.problem;
    const bool of_document = C.documents && by_documents;
    DocumentKeys document{};
    WorkItem place{};
    BackwardItem item;
    if (of_document) {
      document = document_keys<C>(params, number);
      item = document.item;
      q_first = document.q_first;
      accumulator_shift = document.q_number * C.tile_q - q_first;
    } else {
      place = place_of_item<C, Heaviest::kFirst>(params, problem.num_kv_heads, number);
      item = backward_item<C>(params, place, place.tile * C.tile_kv);
    }
    terms_head = -1;
    const int end = min(item.first + C.tile_kv, item.kv_length);
    TileRange range{0, 0, 0, 0};
    if (of_document) {
      range = document_queries<C>(document, end);
    } else if (end > item.first) {
      range = queries_of_keys<C>(item, item.first, end);
    }
    const Predecessor<C> predecessor(item);
    RoundWalk<C> walk{range.begin, range.end - range.begin, 0, of_document};  // the start is set by the shift
    walk.shift_start(int64_t(place.tile) * params.rotation);
    const bool walks_group = walks_groups(C) && params.descending_tiles > 0;
    if (walks_group) walk.descends = place.tile < params.descending_tiles;
    const bool ends_early = end < item.first + C.tile_kv;
    bool has_padding = C.lengths && ends_early;
    walk.filter.template load<true>(problem, item.batch, place.tile, {problem.band_left, problem.band_right, 0});
    if constexpr (C.segments) {
      has_padding = has_padding || (of_document ? ends_early && document.is_padded : walk.filter.own_padding());
    }
    const HeadCycle heads = head_cycle<C>(item, problem.group_size);
    // The next step from the tile that the walk gives; a dense mask can leave a head without tiles.
    const auto step_from = [&](Step step) {
      if constexpr (C.mask) {
        while (step.tile < 0 && step.head + 1 < heads.end) {
          ++step.head;
          walk.restart();
          walk.look_at_mask(params.mask, item.batch, step.head, place.tile);
          step.tile = walk.next();
        }
        if (step.tile >= 0) step.mask_flags = walk.state(step.tile) == kMaskTileMixed ? kComparesMask : 0;
      } else if (step.tile < 0 && step.head + 1 < heads.end) {
        walk.restart();
        step = {step.head + 1, walk.next(), 0};
      }
      return step;
    };
    const auto following = [&](Step step) {
      if (!walks_group) {
        step.tile = walk.next();
        return step_from(step);
      }
      step.head = heads.next(step.head);
      if (step.head == heads.start) step.tile = walk.next();
      return step;
    };
    const auto flags_of = [&](Step step) {
      int flags = (ends_early ? kLimitsAbove : 0) | step.mask_flags;
      if constexpr (has_index_band(C)) {
        flags |= step.tile < range.full_begin ? kLimitsAbove : 0;
        flags |= step.tile >= range.full_end ? kLimitsBelow : 0;
      }
      if constexpr (C.segments) {
        const int first = first_query(step);
        const bool same = of_document ? first >= document.q_begin && first + C.tile_q <= document.q_end
                                      : walk.filter.same_segment(step.tile);
        flags |= same ? 0 : kComparesSegments;
      }
      if constexpr (has_position_band(C)) flags |= walk.filter.inside_band(step.tile) ? 0 : kComparesPositions;
      return flags;
    };
    const auto has_empty_rows = [&](Step step) {
      if constexpr (!kEmptyRows) return false;
      if (step.tile < 0) return false;
      const int64_t head = int64_t(item.batch) * problem.num_heads + step.head;
      const int64_t row = head * params.rows_padded + first_query(step);
      bool has_empty = params.row_flags[row / kStatisticsRows] != 0;
      if constexpr (C.documents) {  // a tile may lie in two blocks of statistics
        has_empty = has_empty || params.row_flags[(row + C.tile_q - 1) / kStatisticsRows] != 0;
      }
      return has_empty;
    };

    if constexpr (C.mask) walk.look_at_mask(params.mask, item.batch, heads.first, place.tile);
    Step step{walks_group ? heads.start : heads.first, walk.next(), 0};
    if constexpr (C.mask) step = step_from(step);
    item.runs = step.tile >= 0;
    // Tiles of queries go where the item before has left room, before its consumers let go of its keys. So do tiles of
    // a bias, whose places are needed again when this item's consumers have read them, not before.
    constexpr int kAhead = bias_tile_bytes(C) > 0 && kLayout.bias_slots < C.stages ? kLayout.bias_slots : C.stages;
    int ahead = takes_items(C) && !is_first ? kAhead : 0;
    if (!takes_items(C)) start_item(item, has_padding);
    bool empty_rows = has_empty_rows(step);
    while (step.tile >= 0) {
      if (takes_items(C) && ahead-- == 0) start_item(item, has_padding);
      const Step next = following(step);
      int flags = flags_of(step) | (next.tile < 0 ? kLastStep : 0);
      if constexpr (C.bias || C.program) flags |= empty_rows ? kHasEmptyRows : 0;
      if constexpr (C.program) flags |= first_query(step) + C.tile_q > problem.q_len ? kHasEmptyRows : 0;
      load_queries(item, step, flags, empty_rows, predecessor.tiles_before(step.tile));
      step = next;
      empty_rows = has_empty_rows(next);  // comes while the next stage is waited for
    }
    if (takes_items(C) && ahead >= 0) start_item(item, has_padding);
    if constexpr (casts_beside(C)) {  // senders do not hear of an item without steps
      const int head = item.batch * problem.num_kv_heads + item.head;
      if (!item.runs && leads()) atomicAdd(params.next_item + kItemsDone + head, num_senders(C));
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (!takes_items(C)) {
      run_item(blockIdx.x, true);
      end_ds();
    } else {
      // Where blocks wait for each other (backward_sender.cuh), no item is a block's for its place in the grid: it may
      // not have begun.
      const int given = orders_dq(C) ? 0 : gridDim.x;
      bool is_first = true;
      const auto take = [&] {
        int taken = 0;
        if (leads()) taken = atomicAdd(params.next_item, 1);
        return given + __shfl_sync(~0u, taken, 0);
      };
      int number = orders_dq(C) ? take() : blockIdx.x, items = params.items;
      if constexpr (C.documents) {
        by_documents = params.next_item[kDocumentsRefused] == 0;
        if (by_documents) items = params.next_item[kDocumentTiles] * params.problem.num_kv_heads;
      }
      while (number < items) {
        // Always so. With the comparison ptxas (13.0) gives the consumers' loop at head dim 128 with a band the order
        // that was measured (docs/kernels/log-backward.md); without, another, of 624 instructions instead of 618.
        if (number >= 0) run_item(number, orders_dq(C) ? is_first : number == blockIdx.x);
        is_first = false;
        number = take();
      }
      end_ds();
      if constexpr (casts_beside(C)) {
        if (leads()) arrive(&control.items_ended);
      }
      announce_dq({0, 0, 0});
      announce_drops({0, 0, -1, 0});
      BackwardItem none{};
      none.first = kNoItem;
      start_item(none, false);
    }
  }
};

}  // namespace jattn::sm90
