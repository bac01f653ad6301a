// A consumer warpgroup of the forward: 64 query rows from scores to output, tile of keys by tile of keys.
//
// The loop keeps two products in flight: scores of the next tile and output of the present one. What may touch their
// registers, and when, is dictated by ptxas, which otherwise serialises every product of the kernel: an accumulator is
// left alone from its start to the wait that covers it, p is packed only after the product that read the old p has
// been waited for, and no product stands under a condition of its own. tools/sm90_listing.py checks the result.
#pragma once

#include "sm90/output_writer.cuh"
#include "sm90/score.cuh"
#include "sm90/score_program.cuh"
#include "sm90/softmax.cuh"
#include "sm90/tma.cuh"
#include "sm90/turns.cuh"
#include "sm90/warpgroup.cuh"
#include "sm90/wgmma.cuh"
#include "sm90/work.cuh"

namespace jattn::sm90 {

template <Config C>
struct Consumer : OutputWriter<C> {
  using Writer = OutputWriter<C>;
  using Writer::control, Writer::params, Writer::tiles, Writer::warpgroup;
  using Writer::finish_rows, Writer::first_row, Writer::place, Writer::write;
  using S = Shape<C>;
  // A float16 probability has less room: 2^8 above, as beside a maximum that follows.
  static constexpr int kNearZeroLog2 = !ScoreStage<C>::kMergesRowBias ? 0 : C.element == Element::kBF16 ? 48 : 8;
  using Softmax = OnlineSoftmax<ScoreStage<C>::kUnits, C.integer_max, sums_tiles(C), kNearZeroLog2>;
  using Scores = float[C.tile_kv / 2];
  using Probabilities = unsigned[C.tile_kv / 4];
  using typename Writer::Output;
  using Queries = unsigned[QueryWords<C>::kCount];
  using Ring = RingPosition<C.stages>;

  static constexpr int kMasks = kMaskUpper | (has_index_band(C) ? kMaskLower : 0) | (C.segments ? kMaskSegments : 0) |
                                (has_position_band(C) ? kMaskPositions : 0) | (C.mask ? kMaskDense : 0);
  // Whether v of a tile is waited for beside the tile's exponentials, so that both products of the next start without a
  // test between them. Measured on H200: head_dim 64 full 528 -> 570 TFLOP/s at 8192 keys, causal equal; 128 687 ->
  // 648.
  static constexpr bool kAwaitsVEarly = C.head_dim_v <= 64;
  // Whether a softcap bounds the scores. A float16 probability has no room for scores that refer to 0.
  static constexpr bool kBoundsScores = C.softcap && !C.bias && !C.alibi && !C.program && C.element == Element::kBF16;
  static constexpr bool kReleasesQAtLastTile = !S::kOutAliasesQ && !C.q_in_registers;
  static constexpr int kEarly = early_exponentials(C);
  static constexpr int kVLeading = C.tile_kv * kChunkRowBytes;  // from 64 columns of v to the next

  // Of q, and of the first stage of k and v. Made once: every instruction between a wait and a product counts.
  Descriptor q_tile = descriptor(q_address(), kUnusedLeading);
  Descriptor first_k_tile = descriptor(k_address(0), kUnusedLeading);
  Descriptor first_v_tile = descriptor(v_address(0), kVLeading);
  Ring ring;                  // of the tile whose scores are computed next
  unsigned items = 0;         // begun before the present one
  bool leaves_tiles = false;  // tiles of the item are still to come, and not needed here
  // Whether this warp tests scores before it takes them for the softcap's series, or looks at the sums behind it: if
  // the first tile without masks passes the test, until a sum tells otherwise.
  enum SeriesProof : int { kNoTileYet, kBySums, kByTest };
  SeriesProof proof = kNoTileYet;
  DropRing<C> drop_ring;  // as ring

  // Of the records of the present item.
  __device__ __forceinline__ unsigned slot() const { return items % kItemSlots; }

  // By warpgroup for barriers that whole products precede; by warp where ordinary reads do (releases_per_warpgroup).
  __device__ __forceinline__ static void release(SharedBarrier empty) {
    if constexpr (S::kReleases == 4) {
      __syncwarp();
      if (lane() == 0) arrive(empty);
    } else {
      if (warpgroup_thread() == 0) arrive(empty);
    }
  }

  __device__ __forceinline__ unsigned q_address() const { return tiles + first_row() * kChunkRowBytes; }
  __device__ __forceinline__ unsigned k_address(int stage) const { return tiles + S::kKOffset + stage * S::kKBytes; }
  __device__ __forceinline__ unsigned v_address(int stage) const { return tiles + S::kVOffset + stage * S::kVBytes; }

  __device__ __forceinline__ Descriptor k_tile(int stage) const { return first_k_tile + stage * (S::kKBytes / 16); }
  __device__ __forceinline__ Descriptor v_tile(int stage) const { return first_v_tile + stage * (S::kVBytes / 16); }

  // Of this warpgroup's rows of the tile.
  __device__ __forceinline__ unsigned bias_address(int stage) const {
    return tiles + S::kBiasOffset + stage * S::kBiasBytes + first_row() * kChunkRowBytes;
  }

  __device__ __forceinline__ TileHeader wait_k() const {
    wait({control.k_full, ring.index}, ring.parity);
    return control.headers[ring.index];
  }

  // Reads the fragments of q, if the first product takes them from registers; shared memory is then free.
  __device__ __forceinline__ void load_queries(Queries& q) const {
    if constexpr (C.q_in_registers) {
#pragma unroll
      for (int step = 0; step < C.head_dim / kStepDepth; ++step) {
        ptx::load_matrix_x4(q + 4 * step, fragment_address<C.tile_q>(q_address(), step));
      }
      if constexpr (!S::kOutAliasesQ) {
        sync_consumer_warpgroup(warpgroup);
        release_q();
      }
    }
  }

  // Of all keys of the tile, or of the first half.
  template <int kCount>
  __device__ __forceinline__ void start_scores_of_stage(float (&s)[kCount], Queries& q) const {
    if constexpr (C.q_in_registers) {
      start_scores<C>(s, q, k_tile(ring.index));
    } else {
      start_scores<C>(s, q_tile, k_tile(ring.index));
    }
  }

  __device__ __forceinline__ Turns<C.take_turns, num_consumers(C), kTurnBarriers<C>> turns() const {
    return {warpgroup};
  }

  // Starts the products of a turn: the scores of the tile at hand and, from the p of the tile before, the output.
  __device__ __forceinline__ void start_both(Scores& s, Queries& q, Output& out, Probabilities& p,
                                             const Ring& before) const {
    constexpr bool kAwaitsVBetween = !C.take_turns && !kAwaitsVEarly;
    if constexpr (C.take_turns && !kAwaitsVEarly) {
      wait({control.v_full, before.index}, before.parity);  // not while others wait for us
    }
    turns().begin();
    start_scores_of_stage(s, q);
    if constexpr (kAwaitsVBetween) wait({control.v_full, before.index}, before.parity);
    start_output<C>(out, p, v_tile(before.index));
    turns().end();
  }

  // The scores of the first tile, or of its first half, with nothing to do beside them.
  template <int kCount>
  __device__ __forceinline__ void start_first_scores(float (&s)[kCount], Queries& q) const {
    turns().begin();
    start_scores_of_stage(s, q);
    turns().end();
  }

  // The scores of this warp once more, from shared memory.
  __device__ __forceinline__ void compute_scores_again(Scores& s) const {
#pragma unroll
    for (int i = 0; i < C.tile_kv / 2; ++i) s[i] = 0.0f;
    const int key = lane() / 16 * 8 + lane() % 8;
#pragma unroll 1
    for (int step = 0; step < C.head_dim / kStepDepth; ++step) {
      uint32_t q[4];
      ptx::load_matrix_x4(q, fragment_address<C.tile_q>(q_address(), step));
      const unsigned k = k_address(ring.index) + step / 4 * C.tile_kv * kChunkRowBytes + key * kChunkRowBytes +
                         ((step % 4 * 2 + lane() / 8 % 2) ^ key % 8) * 16;
#pragma unroll
      for (int i = 0; i < C.tile_kv / 16; ++i) {
        uint32_t keys[4];
        ptx::load_matrix_x4(keys, k + i * 16 * kChunkRowBytes);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          auto& block = *reinterpret_cast<float (*)[4]>(&s[8 * i + 4 * half]);
          ptx::mma_m16n8k16<C.element>(block, q, keys[2 * half], keys[2 * half + 1]);
        }
      }
    }
  }

  // From raw products of a softcap's problem to probabilities by a series, if it holds for all scores of the warp;
  // returns whether.
  __device__ __forceinline__ bool finish_by_series(Scores& s, const TileHeader& header, Softmax& softmax) {
    if ((header.flags & kMasks) || !softmax.settled()) return false;
    if constexpr (proves_by_sums(C)) {
      if (proof == kBySums) {
        if (softmax.update_unproven(s, params.short_cap_series, params.trusted_sum)) {
          release({control.k_empty, ring.index});
          return true;
        }
        proof = kByTest;
        compute_scores_again(s);
        return false;
      }
    }
    const bool first_absent = softmax.is_absent(0), second_absent = softmax.is_absent(1);
    const bool small = __all_sync(~0u, squares_below(s, params.short_cap_series.limit, first_absent, second_absent));
    if constexpr (proves_by_sums(C)) {
      if (proof == kNoTileYet) proof = small && params.trusted_sum > 0.0f ? kBySums : kByTest;
    }
    if (!small && !__all_sync(~0u, all_below(s, params.cap_series.limit, first_absent, second_absent))) return false;
    if constexpr (holds_k(C) && !C.dropout_rows) release({control.k_empty, ring.index});
    if (small) {
      softmax.update_capped(s, params.short_cap_series);
    } else {
      softmax.update_capped(s, params.cap_series);
    }
    if constexpr (C.dropout_rows) drop_pairs_by_rows<C>(s, context(header));
    if constexpr (C.dropout_rows) release({control.k_empty, ring.index});
    return true;
  }

  // The same where the row of the bias can be the addend of the exponent.
  __device__ __forceinline__ bool finish_by_merging(Scores& s, const TileHeader& header, Softmax& softmax) const {
    if ((header.flags & kMasks) || !softmax.at_zero()) return false;
    softmax.rescale = false;
    if constexpr (frees_k_before_row(C)) release({control.k_empty, ring.index});
    merge_row_bias<C>(s, context(header), softmax);
    if constexpr (C.dropout_rows) drop_pairs_by_rows<C>(s, context(header));
    if constexpr (!frees_k_before_row(C)) release({control.k_empty, ring.index});
    return true;
  }

  // Whether rows may settle by this tile: a float16 probability has no room for all that may follow a row's only key in
  // the tile of its diagonal.
  __device__ __forceinline__ static bool has_room(const TileHeader& header) {
    return C.element == Element::kBF16 || !(header.flags & kMasks);
  }

  // From raw products to probabilities; frees the k tile on the way. kEarly, pause: see OnlineSoftmax::update().
  template <int kEarly, class Pause>
  __device__ __forceinline__ void finish_scores(Scores& s, const TileHeader& header, Softmax& softmax,
                                                const Pause& pause) {
    if constexpr (!holds_k(C)) release({control.k_empty, ring.index});
    if constexpr (C.cap_series) {
      if (finish_by_series(s, header, softmax)) return;
    }
    if constexpr (ScoreStage<C>::kMergesRowBias) {
      if (finish_by_merging(s, header, softmax)) return;
    }
    ScoreStage<C>::apply(s, params, !(header.flags & kMasks));
    if constexpr (ScoreStage<C>::kAddsTerms) {
      add_terms<C>(s, context(header),
                   [&](int step) { return fragment_address<C.tile_q>(bias_address(ring.index), step); });
    }
    if constexpr (C.program) apply_program<C>(s, context(header));
    if (header.flags & kMasks) {
      apply_masks<C>(s, header, ring.index, slot(), control, params, place());
    }
    if constexpr (holds_k(C) && !C.dropout_rows) release({control.k_empty, ring.index});
    softmax.template update<kEarly>(s, has_room(header), pause);
    if constexpr (C.dropout_rows) drop_pairs_by_rows<C>(s, context(header));
    if constexpr (C.dropout_rows) release({control.k_empty, ring.index});
  }

  __device__ __forceinline__ void make_drops(TileDrops<C>& drops, const TileHeader& header) {
    if constexpr (C.drops_beside) {
      await_drop_words();
      drops.read(control.drop_words[drop_ring.index]);
      drop_ring.advance();
    } else {
      drops.make(context(header));
    }
  }

  __device__ __forceinline__ void await_drop_words() const {
    wait({control.words_full, drop_ring.index}, drop_ring.parity);
  }

  __device__ __forceinline__ TileContext<C> context(const TileHeader& header) const {
    const ItemRecord& item = control.items[slot()];
    return {params, control, item, header, ring.index, int(slot()), place(), item.q_begin + first_row() + warp_row()};
  }

  // The scores of the first tile, to probabilities.
  __device__ __forceinline__ void visit_first_tile(const TileHeader& header, Queries& q, Probabilities& p,
                                                   Softmax& softmax) {
    Scores s;
    start_first_scores(s, q);
    if constexpr (C.program) prefetch_program<C>(context(header));
    TileDrops<C> drops;
    make_drops(drops, header);
    wait_products<0>();
    pin_registers(s);
    finish_scores<kLeftToCompiler>(s, header, softmax, [](auto&, auto&) {});
    pack_fragment<C.element>(p, s);
    drops.apply(p, context(header));
  }

  // The same for the first half of its keys.
  __device__ __forceinline__ void visit_half_tile(const TileHeader& header, Queries& q, Probabilities& p,
                                                  Softmax& softmax) {
    float s[C.tile_kv / 4];
    start_first_scores(s, q);
    wait_products<0>();
    pin_registers(s);
    if constexpr (!holds_k(C)) release({control.k_empty, ring.index});
    if (header.flags & kMasks) {
      apply_masks<C>(s, header, ring.index, slot(), control, params, place());
    }
    if constexpr (holds_k(C)) release({control.k_empty, ring.index});
    softmax.template update<kLeftToCompiler>(s, has_room(header), [](auto&, auto&) {});
#pragma unroll
    for (int i = 0; i < C.tile_kv / 4; ++i) {
      p[i] = i < C.tile_kv / 8 ? ElementTraits<C.element>::pack(s[2 * i], s[2 * i + 1]) : 0;
    }
  }

  // Waits for the output product with the tile at a place of the ring, and frees its v.
  __device__ __forceinline__ void await_output(Output& out, const Ring& place) {
    wait_products<0>();
    pin_registers(out);
    release({control.v_empty, place.index});
  }

  // The softmax of a tile runs behind the start of the output product of the tile before.
  __device__ __forceinline__ void visit_tiles(Queries& q, Output& out, Softmax& softmax) {
    Probabilities p;
    TileHeader header = wait_k();
    // A branch holds a product, its wait and all that follows from it: ptxas serialises every product otherwise.
    bool has_half = false;
    if constexpr (halves_first_tile(C)) {
      has_half = header.flags & kHalfOfWarpgroup << warpgroup;
      if (has_half) visit_half_tile(header, q, p, softmax);
    }
    if (!has_half) visit_first_tile(header, q, p, softmax);
    if constexpr (kAwaitsVEarly) wait({control.v_full, ring.index}, ring.parity);
    while (!is_last(header)) {
      const Ring before = ring;
      ring.advance();
      header = wait_k();
      Scores s;
      start_both(s, q, out, p, before);
      if constexpr (C.program) prefetch_program<C>(context(header));
      TileDrops<C> drops;
      make_drops(drops, header);
      wait_products<1>();
      pin_registers(s);
      // One call with an empty pause would do for both, but spills 8 bytes beside dropout at head_dim 256.
      if constexpr (kEarly == kLeftToCompiler) {
        finish_scores<kLeftToCompiler>(s, header, softmax, [](auto&, auto&) {});
        if constexpr (kAwaitsVEarly) {
          pin_registers(s);
          wait({control.v_full, ring.index}, ring.parity);
        }
        await_output(out, before);
      } else {
        if constexpr (kAwaitsVEarly) wait({control.v_full, ring.index}, ring.parity);
        finish_scores<kEarly>(s, header, softmax, [&](const float (&sums)[2], float (&shift)[2]) {
          finish_here(sums);
          await_output(out, before);
          begin_here(shift);
        });
      }
      pack_fragment<C.element>(p, s);
      drops.apply(p, context(header));
      softmax.rescale_output(out);
    }
    leaves_tiles = leaves_tiles_behind(header);
    finish_last_tile(p, out, softmax);
  }

  // The output product of the last tile, and the end of its item.
  __device__ __forceinline__ void finish_last_tile(Probabilities& p, Output& out, const Softmax& softmax) {
    if constexpr (proves_by_sums(C) && kReleasesQAtLastTile)
      sync_consumer_warpgroup(warpgroup);  // no warp reads q any more
    if constexpr (kReleasesQAtLastTile) release_q();
    wait({control.v_full, ring.index}, ring.parity);
    start_output<C>(out, p, v_tile(ring.index));
    const bool at_risk = is_at_risk(softmax);
    const RowFactors factors = finish_rows(softmax, slot());
    wait_products<0>();
    pin_registers(out);
    release({control.v_empty, ring.index});
    ring.advance();
    if (at_risk) list_if_lost(softmax, out);
    write(out, factors, slot());
  }

  // One product after the other: fewest registers, so that three warpgroups can hold 128 columns of output. Only the
  // other warpgroups fill the matrix unit during a softmax.
  __device__ __forceinline__ void visit_tiles_serially(Queries& q, Output& out, Softmax& softmax) {
    for (bool last = false; !last; ring.advance()) {
      const TileHeader header = wait_k();
      last = is_last(header);
      leaves_tiles = leaves_tiles_behind(header);
      Scores s;
      start_scores_of_stage(s, q);
      if constexpr (C.program) prefetch_program<C>(context(header));
      TileDrops<C> drops;
      make_drops(drops, header);
      wait_products<0>();
      pin_registers(s);
      if (kReleasesQAtLastTile && last) release_q();
      finish_scores<kLeftToCompiler>(s, header, softmax, [](auto&, auto&) {});
      softmax.rescale_output(out);
      Probabilities p;
      pack_fragment<C.element>(p, s);
      drops.apply(p, context(header));
      wait({control.v_full, ring.index}, ring.parity);
      start_output<C>(out, p, v_tile(ring.index));
      wait_products<0>();
      pin_registers(out);
      release({control.v_empty, ring.index});
    }
    if (is_at_risk(softmax)) list_if_lost(softmax, out);
    write(out, finish_rows(softmax, slot()), slot());
  }

  // The last tile of the item, or the last that this warpgroup needs.
  __device__ __forceinline__ bool is_last(const TileHeader& header) const {
    return header.flags & (has_index_band(C) ? kLastTile | kLastOfWarpgroup << warpgroup : kLastTile);
  }

  __device__ __forceinline__ static bool leaves_tiles_behind(const TileHeader& last) {
    return has_index_band(C) && !(last.flags & kLastTile);
  }

  // Frees the rest of the item's tiles: below a window the last warpgroups need fewer than the first. At a window of
  // 128 and tiles of 192 x 128 every fourth product.
  __device__ __forceinline__ void pass_over_tiles() {
    for (bool last = false; !last; ring.advance()) {
      last = wait_k().flags & kLastTile;
      free_unread_tile();
    }
  }

  // A stage is freed only after it was filled: an early arrival would count for the round before.
  __device__ __forceinline__ void free_unread_tile() {
    turns().begin();
    turns().end();
    wait({control.v_full, ring.index}, ring.parity);
    if constexpr (C.drops_beside) {
      await_drop_words();
      drop_ring.advance();
    }
    sync_consumer_warpgroup(warpgroup);  // every warp has read the header
    release({control.k_empty, ring.index});
    release({control.v_empty, ring.index});
  }

  __device__ __forceinline__ void release_q() const {
    if (warpgroup_thread() == 0) arrive(&control.q_empty);
  }

  // Frees the tiles that no query of this warpgroup sees, up to the first that some query sees; returns whether there
  // is one. Tiles come last keys first, so with a diagonal the first warpgroups skip: of 1024 causal keys with tiles of
  // 192 x 128 every fourth product.
  __device__ __forceinline__ bool skip_tiles(const ItemRecord& item) {
    // Without a band the length of the queries tells as well. Which of the two is read moves the instructions that
    // ptxas makes of the loop. Measured on H100, flags over the length: head_dim (192, 128) 0.94 to 0.97, 96 (in
    // series) 1.00 to 1.08.
    const int end = item.q_begin + first_row() < item.q_length ? item.kv_length : 0;
    for (;;) {
      const TileHeader header = wait_k();
      const bool needs = has_index_band(C) || C.in_series ? !(header.flags & kBeyondWarpgroup << warpgroup)
                                                          : header.kv_tile * C.tile_kv < end;
      if (needs) return true;
      free_unread_tile();
      ring.advance();
      if (header.flags & kLastTile) break;
    }
    if constexpr (!S::kOutAliasesQ) release_q();
    return false;
  }

  // Starts the statistics of the present item.
  __device__ __forceinline__ void reset(Softmax& softmax) {
    const ItemRecord& item = control.items[slot()];
    const int row = item.q_begin + place().row;
    const bool first_takes_part = row < item.q_length && is_row_of_head<C>(params, row);
    const bool second_takes_part = row + 8 < item.q_length && is_row_of_head<C>(params, row + 8);
    const bool may_settle = control.item_numbers[slot()] != kComputedAgain;
    softmax.reset(first_takes_part, second_takes_part, may_settle);
    if constexpr (kBoundsScores) {
      if (may_settle && params.problem.softcap_log2 <= kLargestBoundLog2) softmax.settle_at_zero();
    }
    if constexpr (proves_by_sums(C)) proof = kNoTileYet;
  }

  __device__ __forceinline__ static void clear(Output& out) {
#pragma unroll
    for (int i = 0; i < C.head_dim_v / 2; ++i) out[i] = 0.0f;
  }

  // Sums of probabilities. Up to kSafeSum they are as harmless as those of rows that do not settle; up to kLargestSum
  // the output is right if it is finite. A float16 probability must stay below 65504.
  static constexpr float kSafeSum = C.element == Element::kF16 ? 0x1p15f : 0x1p20f;
  static constexpr float kLargestSum = C.element == Element::kF16 ? kSafeSum : 0x1p100f;

  // Whether a row of this warp, settled by its first keys, has met scores that are much larger.
  __device__ __forceinline__ static bool is_at_risk(const Softmax& softmax) {
    return __any_sync(~0u, softmax.sum_beyond(kSafeSum));
  }

  // Lists the item for another computation if the sum or the output of such a row has left the range of its type.
  __device__ __forceinline__ void list_if_lost(const Softmax& softmax, const Output& out) const {
    bool lost = softmax.sum_beyond(kLargestSum);
#pragma unroll
    for (int i = 0; i < C.head_dim_v / 2; ++i) {
      lost = lost || (!softmax.is_absent(i / 2 % 2) && !(fabsf(out[i]) < infinity()));
    }
    if (__any_sync(~0u, lost) && lane() == 0) {
      control.lost_items[atomicAdd(&control.lost, 1)] = control.item_numbers[slot()];
    }
  }

  // At the end of the items: whether some are computed again.
  __device__ __forceinline__ bool items_follow() const {
    sync_named(kAllConsumersBarrier<C>, S::kConsumers * kWarpgroupThreads);  // what these items have lost is listed
    const bool follow = *const_cast<volatile int*>(&control.lost) != 0;
    if (follow && warpgroup_thread() == 0) wait_stores();  // not to be overtaken by those of the second computation
    sync_consumer_warpgroup(warpgroup);
    release_q();  // lets the producer see the list, and clear it
    return follow;
  }

  __device__ __forceinline__ void run_item(Softmax& softmax) {
    const ItemRecord& item = control.items[slot()];
    reset(softmax);
    Output out;
    clear(out);
    if (item.status == kItemEmpty) {
      write(out, finish_rows(softmax, slot()), slot());
      // Only now: write() has brought the warps together, so none still waits for the round of q_full that this ends.
      if constexpr (!S::kOutAliasesQ) release_q();
    } else if (skip_tiles(item)) {
      Queries q;
      load_queries(q);
      if constexpr (C.in_series) {
        visit_tiles_serially(q, out, softmax);
      } else {
        visit_tiles(q, out, softmax);
      }
      if (leaves_tiles) pass_over_tiles();
      leaves_tiles = false;
    } else {
      write(out, finish_rows(softmax, slot()), slot());
    }
  }

  __device__ __forceinline__ void run() {
    Softmax softmax;
    softmax.scale_log2 = params.problem.scale_log2;
    turns().start();
    for (bool more = true; more; ++items) {
      wait(&control.q_full, items % 2);
      if (control.items[slot()].status == kItemsEnd) {
        more = items_follow();
      } else {
        run_item(softmax);
      }
    }
    turns().finish();
    if (warpgroup_thread() == 0) wait_stores_read();  // shared memory must outlive the copies that read it
  }
};

}  // namespace jattn::sm90
