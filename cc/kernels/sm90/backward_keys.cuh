// Consumer warpgroups for head dims up to 128: each owns 64 of the block's 128 keys and their dk and dv.
//
// Scores are transposed (keys along rows): p and ds are then, as they stand, register operands of dv += p dout and dk
// += ds q. Only dq = ds k needs ds in shared memory, of both warpgroups. dq is computed a step late: by then the other
// warpgroup has written its part, and neither waits for the other while half a step apart, one with its products and
// one with its scores. Two buffers of ds are enough for that. The rules of consumer.cuh for accumulators apply.
#pragma once

#include "sm90/backward_consumer.cuh"
#include "sm90/backward_products.cuh"
#include "sm90/turns.cuh"

namespace jattn::sm90 {

template <Config C, bool kFused>
struct KeyConsumer {
  static constexpr KeyLayout kLayout = key_layout(C, kFused);
  static constexpr int kQBytes = tile_bytes(C.tile_q, C.head_dim);
  static constexpr int kDoutBytes = tile_bytes(C.tile_q, C.head_dim_v);
  static constexpr int kDsBytes = C.tile_kv * C.tile_q * 2;
  static constexpr int kPartColumns = dq_part_columns(C);
  static constexpr int kPartFloats = 16 * kPartColumns;
  static constexpr unsigned kSlots = kLayout.staging_slots;
  static constexpr int kScores = C.tile_q / 2;  // of a thread
  using Scores = float[kScores];
  using Fragments = unsigned[kScores / 2];
  using Keys = unsigned[fragment_words(C.key_register_steps)];  // the first columns of k, as fragments
  using Dk = float[C.head_dim / 2];
  using Dv = float[C.head_dim_v / 2];
  using Dq = float[kFused ? kPartColumns / 2 : 1];

  const BackwardParams& params;
  BackwardControl<C, false>& control;
  unsigned tiles;  // shared address of the first tile
  int warpgroup;   // among the consumers
  RingPosition<C.stages> ring;
  RingPosition<kLayout.bias_slots> bias_ring;
  unsigned step = 0;  // tiles visited; its lowest bit is the buffer of ds, the next one the parity of its barriers
  // Where a warp's part of dq goes; where other warps send it, whether there is one.
  using Target = Conditional<has_senders(C), bool, float*>;
  static constexpr Target kNoTarget = {};
  Target staged = kNoTarget;  // of the part in staging memory
  unsigned staging_slot = 0;
  BackwardItem finished;  // the item, once its tiles and record are let go

  // A turn begins with the products of ds and p and ends when the next scores and dp are started. Their barriers come
  // behind those of sync_warpgroup().
  __device__ __forceinline__ Turns<C.take_turns, kBackwardConsumers, kFirstWarpgroupBarrier + kBackwardConsumers>
  turns() const {
    return {warpgroup};
  }

  __device__ __forceinline__ int first_row() const { return warpgroup * kWarpgroupRows; }
  __device__ __forceinline__ unsigned q_address(int stage) const { return tiles + kLayout.q + stage * kQBytes; }
  __device__ __forceinline__ unsigned dout_address(int stage) const {
    return tiles + kLayout.dout + stage * kDoutBytes;
  }
  // Of the buffer of ds of a step, which every warp fills and reads.
  __device__ __forceinline__ Barrier* ds_full(unsigned of_step) const { return &control.exchange_full[of_step & 1]; }
  __device__ __forceinline__ Barrier* ds_empty(unsigned of_step) const { return &control.exchange_empty[of_step & 1]; }
  __device__ __forceinline__ unsigned ds_address(unsigned of_step) const {
    return tiles + kLayout.ds + (of_step & 1) * kDsBytes;
  }

  __device__ __forceinline__ void load_keys(Keys& keys) const {
#pragma unroll
    for (int step = 0; step < C.key_register_steps; ++step) {
      ptx::load_matrix_x4(keys + 4 * step, block_address<C.tile_kv>(tiles + kLayout.k, first_row() + warp_row(), step));
    }
  }
  __device__ __forceinline__ void start_scores(Scores& s, Keys& keys) const {
    start_row_product<C.element, C.tile_kv, C.tile_q, C.head_dim, C.key_register_steps>(
        s, keys, tiles + kLayout.k + first_row() * kChunkRowBytes, q_address(ring.index));
  }
  __device__ __forceinline__ void start_dp(Scores& dp) const {
    start_row_product<C.element, C.tile_kv, C.tile_q, C.head_dim_v>(
        dp, tiles + kLayout.v + first_row() * kChunkRowBytes, dout_address(ring.index));
  }
  __device__ __forceinline__ void start_dv(Dv& dv, Fragments& p) const {
    start_fragment_product<C.element, C.tile_q, C.head_dim_v>(dv, p, dout_address(ring.index));
  }
  __device__ __forceinline__ void start_dk(Dk& dk, Fragments& ds) const {
    start_fragment_product<C.element, C.tile_q, C.head_dim>(dk, ds, q_address(ring.index));
  }

  // This warpgroup's half of dq: 64 of 128 queries, or half of the columns.
  __device__ __forceinline__ void start_dq(Dq& dq, unsigned of_step) const {
    constexpr int kKeyChunk = C.tile_kv * kChunkRowBytes;
    constexpr int kColumnOffset = C.tile_q == 128 ? 0 : kPartColumns < kChunkColumns ? kPartColumns * 2 : kKeyChunk;
    const unsigned k = tiles + kLayout.k + warpgroup * kColumnOffset;
    start_column_product<C.element, C.tile_kv, kPartColumns>(
        dq, ds_address(of_step) + (C.tile_q == 128 ? warpgroup * kKeyChunk : 0), k);
  }

  // Of this thread's first score in the sequences and in their tiles.
  __device__ __forceinline__ FragmentOrigin origin() const {
    const int row = first_row() + warp_row() + lane() / 4, column = lane() % 4 * 2;
    return {control.item.first + row, control.headers[ring.index].first + column, row, column};
  }

  // Which pairs of a step dropout removes. Found while the last products of the step before run: scores are not waited
  // for then, so that nothing else is done.
  __device__ __forceinline__ void decide_drops(Drops<C, kScores, true>& drops, RingPosition<C.stages> step) const {
    if constexpr (C.dropout && !C.drops_beside) {
      wait(&control.first_full[step.index], step.parity);
      const int row = first_row() + warp_row() + lane() / 4, column = lane() % 4 * 2;
      const FragmentOrigin origin{control.item.first + row, control.headers[step.index].first + column, row, column};
      if constexpr (C.dropout_rows) {
        drops.decide(control.terms[step.index], origin, control.ids[step.index], control.own_positions,
                     control.positions[step.index], params.problem);
      } else {
        drops.decide(control.terms[step.index], origin, nullptr, nullptr, nullptr, params.problem);
      }
    }
  }
  // The same where drop warps have found them, of the step at hand.
  __device__ __forceinline__ void read_drops(Drops<C, kScores, true>& drops) const {
    if constexpr (C.drops_beside) {
      wait(&control.drops_full[warpgroup], step & 1);
      drops.words[0] = control.drop_bits[ptx::thread_index_anew() - kWarpgroupThreads];
      pin_registers(drops.words);
      release_by_warp(&control.drops_empty[warpgroup]);
    }
  }
  __device__ __forceinline__ float dropout_factor() const {
    if constexpr (C.dropout && !has_scaled_statistics(C)) return control.terms[ring.index].factor;
    return 1.0f;
  }
  __device__ __forceinline__ float dropout_factor(int batch) const {
    if constexpr (C.dropout && !has_scaled_statistics(C)) return kept_factor(params.problem, batch);
    return 1.0f;
  }

  __device__ __forceinline__ void finish_scores(Scores& s, Fragments& p, int flags,
                                                const Drops<C, kScores, true>& drops,
                                                FetchedBias<C, kScores>& fetched) {
    finish_transposed_scores<C, kScores, kLayout.bias_slots>(s, p, flags, drops, fetched, params, control, ring.index,
                                                             tiles + kLayout.bias, bias_ring,
                                                             first_row() + warp_row() + lane() / 4, lane() % 4 * 2);
  }

  // Writes ds, transposed, to a tile [queries][64 keys of this warpgroup].
  __device__ __forceinline__ void store_transposed(unsigned tile, const Fragments& ds) const {
    const int thread = ptx::thread_index_anew();  // kept across the step, the address would cost registers
    const int query = thread / 16 % 2 * 8 + thread % 8;
    const int column16 = thread / 32 % 4 * 2 + thread / 8 % 2;
    const unsigned address = tile + query * kChunkRowBytes + (column16 ^ query % 8) * 16;
#pragma unroll
    for (int i = 0; i < kScores / 8; ++i) {
      ptx::store_matrix_x4_transposed(address + i * kStepDepth * kChunkRowBytes, ds + 4 * i);
    }
  }

  // Writes ds of this warpgroup's keys to a tile [keys][queries], for dq.
  __device__ __forceinline__ void store_ds(const Fragments& ds) const {
#pragma unroll
    for (int i = 0; i < kScores / 8; ++i) {
      ptx::store_matrix_x4(block_address<C.tile_kv>(ds_address(step), first_row() + warp_row(), i), ds + 4 * i);
    }
  }

  // ds of this warpgroup's keys: packed, and for dq written to shared memory.
  __device__ __forceinline__ void finish_gradients(Fragments& ds, const Scores& weights, Scores& dp, const Fragments& p,
                                                   bool hides) {
    // p has zeros where pairs are dropped, and sums are made before anything is packed.
    constexpr bool kClearsProducts = C.dropout || C.sums_bias;
    if constexpr (kClearsProducts) clear_hidden(dp, weights, hides);
    const unsigned delta = shared_address(control.delta[ring.index]) + lane() % 4 * 8;
    KeySums<C> sums;
    sums.clear();
    transposed_gradients<C, kScores>(ds, sums, weights, dp, delta, dropout_factor());
    if constexpr (!kClearsProducts) clear_hidden<C>(ds, p, hides);
    add_key_sums(control, sums);
    if constexpr (kFused) {
      wait(ds_empty(step), ~step >> 1 & 1);
      store_ds(ds);
    }
    if constexpr (C.stores_ds) store_transposed(stored_ds_address(), ds);
    if constexpr (kFused || C.stores_ds) {
      fence_async_proxy();  // for ds and for the staged dq
      start_reduction(step - 2);
    }
  }

  // Behind finish_gradients().
  __device__ __forceinline__ void give_gradients() {
    if constexpr (kFused) release_by_warp(ds_full(step));
    if constexpr (C.stores_ds) {
      release_by_warp(&control.ds_written[bias_ring.index]);
      bias_ring.advance();
    }
  }

  // Starts dq of the step before. In the first step, which has none before it, the product of what lies there, which
  // nobody uses: as a branch, ptxas would serialise all products (C7518).
  __device__ __forceinline__ void start_late_dq(Dq& dq) const {
    if constexpr (kFused) {
      wait(ds_full(step - 1), (step - 1) >> 1 & 1);
      start_dq(dq, step - 1);
    }
  }

  // Gradients of the scores of this warpgroup's keys, [queries][64 keys], take the place of the bias that they come
  // from.
  __device__ __forceinline__ unsigned stored_ds_address() const {
    return tiles + kLayout.bias + bias_ring.index * bias_tile_bytes(C) + warpgroup * C.tile_q * kChunkRowBytes;
  }

  // Where this warp's 16 x kPartColumns part of dq begins, in the order of backward_cast.cuh: every access is
  // contiguous.
  __device__ __forceinline__ Target dq_target(int stage) const {
    if constexpr (!kFused) {
      return kNoTarget;
    } else if constexpr (has_senders(C)) {
      return true;
    } else {
      const int part = warpgroup_thread() / 32 + warpgroup * (kWarpgroupThreads / 32);
      return params.dq_accumulator + control.headers[stage].accumulator_row * C.head_dim + part * kPartFloats;
    }
  }

  // With senders, dq of all steps of the block go through the slots in turn.
  __device__ __forceinline__ void wait_slot(unsigned number) const {
    wait(&control.staged_empty[number % kSlots][warpgroup], ~(number / kSlots) & 1);
  }
  __device__ __forceinline__ unsigned staging_address() const {
    const int part = warpgroup_thread() / 32 + warpgroup * (kWarpgroupThreads / 32);
    return tiles + kLayout.staging + staging_slot * kLayout.staging_bytes + part * kPartFloats * 4;
  }

  // With bulk reductions, the part is only staged: start_reduction() sends it off, behind a fence that others need as
  // well.
  __device__ __forceinline__ void add_dq(const Dq& dq, Target target) {
    if constexpr (kFused && C.bulk_reduce) {
      if constexpr (has_senders(C)) {
        const unsigned number = step - 1;  // a step late
        staging_slot = number % kSlots;
        wait_slot(number);
      } else {
        if constexpr (kSlots > 1) staging_slot ^= 1;
        if (lane() == 0) wait_stores_read<kSlots - 1>();
        __syncwarp();
      }
      const unsigned staging = staging_address();
#pragma unroll
      for (int i = 0; i < kPartColumns / 8; ++i) {
        ptx::store_shared_f32x4(staging + i * 512 + lane() * 16, dq + 4 * i);
      }
      staged = target;
    } else if constexpr (kFused) {
      float* const first = target + lane() * 4;
#pragma unroll
      for (int i = 0; i < kPartColumns / 8; ++i) {
        ptx::reduce_add(first + i * 128, dq + 4 * i);
      }
    }
  }

  // Sends off what add_dq() staged, of the step `number`. A fence_async_proxy() by every lane precedes.
  __device__ __forceinline__ void start_reduction(unsigned number) {
    if constexpr (has_senders(C)) {
      __syncwarp();
      if (lane() == 0 && staged) arrive(&control.staged_full[number % kSlots][warpgroup]);
      staged = false;
    } else if constexpr (kFused && C.bulk_reduce) {
      __syncwarp();
      if (lane() == 0 && staged != kNoTarget) {
        add_floats(staged, staging_address(), kPartFloats * 4);
        commit_stores();
      }
      staged = kNoTarget;
    }
  }

  __device__ __forceinline__ void finish_reductions(unsigned number) {
    if constexpr (kFused && C.bulk_reduce) {
      fence_async_proxy();
      start_reduction(number);
    }
  }

  // Frees v: no dp of the item is left.
  __device__ __forceinline__ void release_values() const {
    if constexpr (takes_items(C)) release_by_warp(&control.values_empty);
  }

  // Frees k and the record of the item.
  __device__ __forceinline__ void release_item() {
    if constexpr (takes_items(C)) {
      finished = control.item;
      release_by_warp(&control.own_empty);
    }
  }

  // Returns the flags of the step.
  __device__ __forceinline__ int wait_queries() const {
    wait(&control.first_full[ring.index], ring.parity);
    return control.headers[ring.index].flags;
  }
  __device__ __forceinline__ void wait_dout() const { wait(&control.second_full[ring.index], ring.parity); }

  // Leaves out the step at hand, whose pairs with this warpgroup's keys are all hidden: its part of ds is 0. The
  // product of dq is due in the next step, and so is the end of the turn. Returns false where there is no next step, or
  // something to see.
  __device__ __forceinline__ bool leaves_out_step() {
    const int flags = wait_queries();
    const int last_query = control.headers[ring.index].first + C.tile_q - 1;
    if ((flags & kLastStep) || control.item.first + first_row() < last_query + control.item.upper_offset) return false;
    turns().begin();
    const Fragments zeros{};
    wait(ds_empty(step), ~step >> 1 & 1);
    store_ds(zeros);
    fence_async_proxy();
    release_by_warp(ds_full(step));
    Drops<C, kScores, true> unused;
    read_drops(unused);
    sync_warpgroup(warpgroup);  // all warps have read the header
    release_by_warpgroup(&control.second_empty[ring.index]);
    release_by_warpgroup(&control.first_empty[ring.index]);
    ring.advance();
    ++step;
    return true;
  }

  __device__ __forceinline__ void visit(Dk& dk, Dv& dv) {
    Target late_target = kNoTarget;  // of the step before
    // In front of everything else: behind the keys ptxas (13.0) gives the loop another order, which is 1 % slower.
    if constexpr (may_begin_late(C)) {
      if (warpgroup == 1 && leaves_out_step()) late_target = true;
    }
    Keys keys;
    load_keys(keys);
    Drops<C, kScores, true> drops;
    decide_drops(drops, ring);
    for (bool last = false; !last; ring.advance()) {
      const int flags = wait_queries();
      last = flags & kLastStep;
      const bool hides = hides_pairs<C>(flags);
      Scores s, dp;
      Fragments p, ds;
      Dq dq;
      start_scores(s, keys);
      wait_dout();
      start_dp(dp);
      if (late_target != kNoTarget) turns().end();
      FetchedBias<C, kScores> fetched;
      if constexpr (FetchedBias<C, kScores>::kUsed) fetched.fetch(params.problem, control.terms[ring.index], origin());
      read_drops(drops);
      wait_products<1>();
      pin_registers(s);
      finish_scores(s, p, flags, drops, fetched);
      wait_products<0>();
      pin_registers(dp);
      finish_gradients(ds, s, dp, p, hides);
      turns().begin();
      start_dv(dv, p);
      give_gradients();
      start_late_dq(dq);
      if constexpr (kFused) {
        wait_products<1>();
        pin_registers(dv);
        release_by_warpgroup(&control.second_empty[ring.index]);
      }
      // Read before dk starts: one thread frees the header when dk is done, and another warp may be late by then (with
      // dropout by all the calls below: on an H200 dq went to wrong rows).
      const Target target = late_target;
      late_target = dq_target(ring.index);
      start_dk(dk, ds);
      if constexpr (C.dropout && !C.drops_beside) {
        if (!last) {
          RingPosition<C.stages> next = ring;
          next.advance();
          decide_drops(drops, next);
        }
      }
      wait_products<1>();
      if constexpr (kFused) {
        pin_registers(dq);
        if (target != kNoTarget) {
          release_by_warp(ds_empty(step - 1));
          add_dq(dq, target);
        }
      } else {
        pin_registers(dv);
        release_by_warpgroup(&control.second_empty[ring.index]);
      }
      wait_products<0>();
      pin_registers(dk);
      release_by_warpgroup(&control.first_empty[ring.index]);
      ++step;
    }
    turns().end();
    release_values();
    if constexpr (kFused) {
      Dq dq;
      start_late_dq(dq);
      finish_reductions(step - 2);
      wait_products<0>();
      pin_registers(dq);
      if constexpr (takes_items(C)) release_by_warp(ds_empty(step - 1));
      release_item();
      add_dq(dq, late_target);
    }
  }

  // Where dv and dk leave shared memory: by the tiles of keys, or, where the next item's keys are on their way, by ds,
  // and dk by the staging of dq if ds has no room for both.
  static constexpr int kBlockBytes = C.tile_kv * kChunkRowBytes;
  static constexpr int kDkOffset = num_chunks(C.head_dim_v) * kBlockBytes;
  static constexpr bool kDkBySlot = takes_items(C) && kDkOffset + num_chunks(C.head_dim) * kBlockBytes > 2 * kDsBytes;
  static_assert(!takes_items(C) || (kDkOffset <= 2 * kDsBytes && (!kDkBySlot || C.bulk_reduce)));
  static constexpr int kDkRows = kDkBySlot ? kWarpgroupRows : C.tile_kv;

  // A warpgroup's part of the slot that the last dq does not need.
  __device__ __forceinline__ unsigned dk_slot() const {
    const unsigned slot = has_senders(C) ? step % kSlots : kSlots > 1 ? staging_slot ^ 1 : 0;
    constexpr int kPartBytes = kLayout.staging_bytes / kBackwardConsumers;
    static_assert(!kDkBySlot || kPartBytes >= tile_bytes(kWarpgroupRows, C.head_dim));
    return tiles + kLayout.staging + slot * kLayout.staging_bytes + warpgroup * kPartBytes;
  }

  // Writes the rows of this warpgroup that belong to the item, of an array [B, S, K, width].
  template <int kRows, int kColumns>
  __device__ __forceinline__ void write_rows(void* array, int width, const BackwardItem& item, unsigned tile,
                                             int row_in_tile) const {
    const ProblemParams& problem = params.problem;
    const int first = item.first + first_row();
    const int64_t row = (int64_t(item.batch) * problem.kv_len + first) * problem.num_kv_heads + item.head;
    copy_gradient_rows<kRows, kColumns>(static_cast<char*>(array) + row * width * 2,
                                        int64_t(problem.num_kv_heads) * width * 2, width, tile, row_in_tile,
                                        item.kv_length - first);
  }

  // Sends off the last dq and the results. Keys beyond their length get 0.
  __device__ __forceinline__ void write(const Dk& dk, const Dv& dv) {
    const BackwardItem item = takes_items(C) ? finished : control.item;  // not kept: registers are short in the loop
    const int first = item.first + first_row();
    write_key_sums(params, control, item);
    float dk_factor[2], dv_factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool inside = first + warp_row() + lane() / 4 + 8 * r < item.kv_length;
      dk_factor[r] = inside ? params.problem.scale : 0.0f;
      dv_factor[r] = inside ? dropout_factor(item.batch) : 0.0f;
    }
    if constexpr (kDkBySlot && kSlots == 1) finish_reductions(step - 1);
    sync_consumers();  // both have read the places for the last time
    const unsigned dv_tile = tiles + (takes_items(C) ? kLayout.ds : kLayout.v);
    const unsigned dk_tile = kDkBySlot ? dk_slot() : tiles + (takes_items(C) ? kLayout.ds + kDkOffset : kLayout.k);
    const int dk_row = kDkBySlot ? 0 : first_row();
    stage_gradient<C.element, C.tile_kv, C.head_dim_v>(dv, dv_factor, dv_tile, first_row());
    if constexpr (kDkBySlot) {
      // The reductions of this warpgroup that read the slot; with two slots they left before the last dq.
      if constexpr (has_senders(C)) {
        wait_slot(step);
      } else {
        if (lane() == 0) wait_stores_read();
        sync_warpgroup(warpgroup);
      }
    }
    stage_gradient<C.element, kDkRows, C.head_dim>(dk, dk_factor, dk_tile, dk_row);
    fence_async_proxy();
    start_reduction(step - 1);
    sync_warpgroup(warpgroup);
    if constexpr (C.documents) {
      const int rows = item.kv_length - first;
      if (rows < kWarpgroupRows) {  // keys of another item follow; a box would overwrite them
        if (params.wants_dv)
          write_rows<C.tile_kv, C.head_dim_v>(params.rows_dv, params.problem.head_dim_v, item, dv_tile, first_row());
        if (params.wants_dk)
          write_rows<kDkRows, C.head_dim>(params.rows_dk, params.problem.head_dim, item, dk_tile, dk_row);
        return;
      }
    }
    if (warpgroup_thread() == 0 && first < params.problem.kv_len) {
      if (params.wants_dv) {
        copy_gradient<C.tile_kv, C.head_dim_v>(&params.dv, dv_tile, first_row(), first, item.head, item.batch);
      }
      if (params.wants_dk) {
        copy_gradient<kDkRows, C.head_dim>(&params.dk, dk_tile, dk_row, first, item.head, item.batch);
      }
      commit_stores();
    }
  }

  // What leaves shared memory must have been read before that is written again, or the block ends.
  __device__ __forceinline__ void wait_results_read() const {
    if (lane() == 0) wait_stores_read();
    if constexpr (takes_items(C)) sync_warpgroup(warpgroup);
  }

  __device__ __forceinline__ void run() {
    turns().start();
    for (unsigned number = 0;; ++number) {
      wait(&control.own_full, number & 1);
      if constexpr (takes_items(C)) {
        wait_results_read();
        if (control.item.first == kNoItem) break;
      }
      Dk dk;
      Dv dv;
#pragma unroll
      for (int i = 0; i < C.head_dim / 2; ++i) dk[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < C.head_dim_v / 2; ++i) dv[i] = 0.0f;
      clear_key_sums(control);
      if (control.item.runs) {
        visit(dk, dv);
      } else {
        release_values();
        release_item();
      }
      write(dk, dv);
      if constexpr (!takes_items(C)) {
        wait_results_read();
        break;
      }
    }
    turns().finish();
  }
};

}  // namespace jattn::sm90
