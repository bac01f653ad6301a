// A consumer warpgroup of the forward: 64 query rows from scores to output, tile of keys by tile of keys.
//
// The loop keeps two products in flight: scores of the next tile and output of the present one. What may touch their
// registers, and when, is dictated by ptxas, which otherwise serialises every product of the kernel: an accumulator is
// left alone from its start to the wait that covers it, p is packed only after the product that read the old p has
// been waited for, and no product stands under a condition of its own. tools/sm90_listing.py checks the result.
#pragma once

#include "sm90/score.cuh"
#include "sm90/score_program.cuh"
#include "sm90/softmax.cuh"
#include "sm90/tma.cuh"
#include "sm90/turns.cuh"
#include "sm90/wgmma.cuh"
#include "sm90/work.cuh"

namespace jattn::sm90 {

template <Config C>
struct Consumer {
  using S = Shape<C>;
  // A float16 probability has less room: 2^8 above, as beside a maximum that follows.
  static constexpr int kNearZeroLog2 = !ScoreStage<C>::kMergesRowBias ? 0 : C.element == Element::kBF16 ? 48 : 8;
  using Softmax = OnlineSoftmax<ScoreStage<C>::kUnits, C.integer_max, kNearZeroLog2>;
  using Scores = float[C.tile_kv / 2];
  using Probabilities = unsigned[C.tile_kv / 4];
  using Output = float[C.head_dim_v / 2];
  using Queries = unsigned[QueryWords<C>::kCount];
  using Ring = RingPosition<C.stages>;

  static constexpr int kMasks = kMaskUpper | (has_index_band(C) ? kMaskLower : 0) | (C.segments ? kMaskSegments : 0) |
                                (has_position_band(C) ? kMaskPositions : 0) | (C.mask ? kMaskDense : 0);
  // Whether v of a tile is waited for beside the tile's exponentials, so that both products of the next start without a test
  // between them. Measured on H200: head_dim 64 full 528 -> 570 TFLOP/s at 8192 keys, causal equal; 128 687 -> 648.
  static constexpr bool kAwaitsVEarly = C.head_dim_v <= 64;
  // Whether a softcap bounds the scores. A float16 probability has no room for scores that refer to 0.
  static constexpr bool kBoundsScores = C.softcap && !C.bias && !C.alibi && !C.program && C.element == Element::kBF16;
  static constexpr bool kReleasesQAtLastTile = !S::kOutAliasesQ && !C.q_in_registers;
  static constexpr int kEarly = early_exponentials(C);
  static constexpr int kVLeading = C.tile_kv * kChunkRowBytes;  // from 64 columns of v to the next

  const ForwardParams& params;
  ForwardControl<C>& control;
  unsigned tiles;  // shared address of the first tile
  int warpgroup;   // among the consumers
  // Of q, and of the first stage of k and v. Made once: every instruction between a wait and a product counts.
  Descriptor q_tile = descriptor(q_address(), kUnusedLeading);
  Descriptor first_k_tile = descriptor(k_address(0), kUnusedLeading);
  Descriptor first_v_tile = descriptor(v_address(0), kVLeading);
  Ring ring;                  // of the tile whose scores are computed next
  unsigned items = 0;         // begun before the present one
  bool leaves_tiles = false;  // tiles of the item are still to come, and not needed here
  // Whether this warp tests scores before it takes them for the softcap's series, or looks at the sums behind it: if the first tile
  // without masks passes the test, until a sum tells otherwise.
  enum SeriesProof : int { kNoTileYet, kBySums, kByTest };
  SeriesProof proof = kNoTileYet;
  DropRing<C> drop_ring;  // as ring

  __device__ __forceinline__ static int thread() { return threadIdx.x % kWarpgroupThreads; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int warp_row() { return thread() / 32 * 16; }
  __device__ __forceinline__ int first_row() const { return warpgroup * kWarpgroupRows; }

  __device__ __forceinline__ FragmentPlace place() const {
    return {first_row() + warp_row() + lane() / 4, lane() % 4 * 2};
  }

  // By warpgroup for barriers that whole products precede; by warp where ordinary reads do (releases_per_warpgroup).
  __device__ __forceinline__ static void release(SharedBarrier empty) {
    if constexpr (S::kReleases == 4) {
      __syncwarp();
      if (lane() == 0) arrive(empty);
    } else {
      if (thread() == 0) arrive(empty);
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
        ptx::load_matrix_x4(q + 4 * step, fragment_address(q_address(), step));
      }
      if constexpr (!S::kOutAliasesQ) {
        sync_warpgroup();
        release_q();
      }
    }
  }

  // Where this lane's eight values of the 16 x 16 block `step` of a tile lie, for ldmatrix and stmatrix: lanes 0 to 15
  // give the rows of the left eight columns, the others those of the right.
  __device__ __forceinline__ static unsigned fragment_address(unsigned tile, int step) {
    const int row = warp_row() + lane() % 16;
    const int column16 = step % 4 * 2 + lane() / 16;  // in units of 16 bytes, before the swizzle
    return tile + step / 4 * C.tile_q * kChunkRowBytes + row * kChunkRowBytes + (column16 ^ row % 8) * 16;
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

  // Named barriers: those of sync_warpgroup(), from 1 on, those of the turns, and one of all consumers.
  static constexpr int kFirstTurn = 1 + num_consumers(C), kAllConsumers = kFirstTurn + num_consumers(C);

  __device__ __forceinline__ Turns<C.take_turns, num_consumers(C), kFirstTurn> turns() const { return {warpgroup}; }

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
      ptx::load_matrix_x4(q, fragment_address(q_address(), step));
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

  // From raw products of a softcap's problem to probabilities by a series, if it holds for all scores of the warp; returns whether.
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
    const bool small = __all_sync(~0u, squares_below(s, params.short_cap_series.limit));
    if constexpr (proves_by_sums(C)) {
      if (proof == kNoTileYet) proof = small && params.trusted_sum > 0.0f ? kBySums : kByTest;
    }
    if (!small && !__all_sync(~0u, all_below(s, params.cap_series.limit))) return false;
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

  // Whether rows may settle by this tile: a float16 probability has no room for all that may follow a row's only key in the tile of
  // its diagonal.
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
      add_terms<C>(s, context(header), [&](int step) { return fragment_address(bias_address(ring.index), step); });
    }
    if constexpr (C.program) apply_program<C>(s, context(header));
    if (header.flags & kMasks) {
      apply_masks<C>(s, header, ring.index, items % kItemSlots, control, params, place());
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
    const int slot = items % kItemSlots;
    const ItemRecord& item = control.items[slot];
    return {params, control, item, header, ring.index, slot, place(), item.q_begin + first_row() + warp_row()};
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
      apply_masks<C>(s, header, ring.index, items % kItemSlots, control, params, place());
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
    if constexpr (proves_by_sums(C) && kReleasesQAtLastTile) sync_warpgroup();  // no warp reads q any more
    if constexpr (kReleasesQAtLastTile) release_q();
    wait({control.v_full, ring.index}, ring.parity);
    start_output<C>(out, p, v_tile(ring.index));
    const bool at_risk = is_at_risk(softmax);
    const RowFactors factors = finish_rows(softmax);
    wait_products<0>();
    pin_registers(out);
    release({control.v_empty, ring.index});
    ring.advance();
    if (at_risk) list_if_lost(softmax, out);
    write(out, factors);
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
    write(out, finish_rows(softmax));
  }

  // The last tile of the item, or the last that this warpgroup needs.
  __device__ __forceinline__ bool is_last(const TileHeader& header) const {
    return header.flags & (has_index_band(C) ? kLastTile | kLastOfWarpgroup << warpgroup : kLastTile);
  }

  __device__ __forceinline__ static bool leaves_tiles_behind(const TileHeader& last) {
    return has_index_band(C) && !(last.flags & kLastTile);
  }

  // Frees the rest of the item's tiles: below a window the last warpgroups need fewer than the first. At a window of 128
  // and tiles of 192 x 128 every fourth product.
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
    sync_warpgroup();  // every warp has read the header
    release({control.k_empty, ring.index});
    release({control.v_empty, ring.index});
  }

  __device__ __forceinline__ void release_q() const {
    if (thread() == 0) arrive(&control.q_empty);
  }

  __device__ __forceinline__ void sync_warpgroup() const { sync_named(1 + warpgroup, kWarpgroupThreads); }

  // Frees the tiles that no query of this warpgroup sees, up to the first that some query sees; returns whether there
  // is one. Tiles come last keys first, so with a diagonal the first warpgroups skip: of 1024 causal keys with tiles of
  // 192 x 128 every fourth product.
  __device__ __forceinline__ bool skip_tiles(const ItemRecord& item) {
    // Without a band the length of the queries tells as well. Which of the two is read moves the instructions that ptxas makes of the
    // loop. Measured on H100, flags over the length: head_dim (192, 128) 0.94 to 0.97, 96 (in series) 1.00 to 1.08.
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
    const ItemRecord& item = control.items[items % kItemSlots];
    const int row = item.q_begin + place().row;
    const bool first_takes_part = row < item.q_length && is_row_of_head<C>(params, row);
    const bool second_takes_part = row + 8 < item.q_length && is_row_of_head<C>(params, row + 8);
    bool may_settle = control.item_numbers[items % kItemSlots] != kComputedAgain;
    // A warp goes by a series if all of its rows bear it: rows beyond the length, which may hold anything, must have no say.
    if constexpr (C.cap_series) may_settle = may_settle && __all_sync(~0u, first_takes_part && second_takes_part);
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

  // Sums of probabilities. Up to kSafeSum they are as harmless as those of rows that do not settle; up to kLargestSum the
  // output is right if it is finite. A float16 probability must stay below 65504.
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
      lost = lost || (softmax.row_max[i / 2 % 2] != infinity() && !(fabsf(out[i]) < infinity()));
    }
    if (__any_sync(~0u, lost) && lane() == 0) {
      control.lost_items[atomicAdd(&control.lost, 1)] = control.item_numbers[items % kItemSlots];
    }
  }

  // At the end of the items: whether some are computed again.
  __device__ __forceinline__ bool items_follow() const {
    sync_named(kAllConsumers, S::kConsumers * kWarpgroupThreads);  // what these items have lost is listed
    const bool follow = *const_cast<volatile int*>(&control.lost) != 0;
    if (follow && thread() == 0) wait_stores();  // not to be overtaken by those of the second computation
    sync_warpgroup();
    release_q();  // lets the producer see the list, and clear it
    return follow;
  }

  // What the two rows of a thread are multiplied by at the end; 0 for rows without keys and beyond q_length.
  struct RowFactors {
    float row[2];
  };

  // Writes lse: -inf for rows without keys and beyond q_length.
  __device__ __forceinline__ RowFactors finish_rows(Softmax softmax) const {
    const ItemRecord& item = control.items[items % kItemSlots];
    softmax.finish();
    RowFactors factors;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = item.q_begin + place().row + 8 * r;
      const bool sees_keys = row < item.q_length && softmax.row_sum[r] != 0.0f;
      float lse_with_sink = 0.0f;
      if constexpr (C.sinks) {
        const auto result = softmax.with_sink(r, sink_of_row(item, row));
        factors.row[r] = sees_keys ? result.factor : 0.0f;
        lse_with_sink = result.lse;
      } else {
        factors.row[r] = sees_keys ? 1.0f / softmax.row_sum[r] : 0.0f;
      }
      if constexpr (C.dropout) factors.row[r] *= control.numbers[items % kItemSlots].dropout.factor;
      if (lane() % 4 == 0 && row < end_of_rows(item) && is_row_of_head<C>(params, row)) {
        if constexpr (C.partial_results) {
          params.row_parts[row_of_part(item, row)] = {softmax.row_max[r], sees_keys ? softmax.row_sum[r] : 0.0f,
                                                      softmax.unit(), softmax.natural_unit()};
          continue;
        }
        const int64_t head = int64_t(item.batch) * params.problem.num_heads + item.head + head_of_row<C>(params, row);
        params.lse[head * params.problem.q_len + query_of_row<C>(params, row)] = !sees_keys ? -infinity()
                                                                                 : C.sinks  ? lse_with_sink
                                                                                            : softmax.lse(r);
      }
    }
    return factors;
  }

  __device__ __forceinline__ float sink_of_row(const ItemRecord& item, int row) const {
    if constexpr (C.packed_heads) {
      if (!is_row_of_head<C>(params, row)) return 0.0f;
      return *element_of_head(params.problem.sinks, item.batch, item.head + head_of_row<C>(params, row));
    } else {
      return control.numbers[items % kItemSlots].sink;
    }
  }

  // Index of a row among those of all parts.
  __device__ __forceinline__ int64_t row_of_part(const ItemRecord& item, int row) const {
    const ProblemParams& problem = params.problem;
    const int64_t entry = int64_t(control.parts[items % kItemSlots]) * problem.batch + item.batch;
    const int head = item.head + head_of_row<C>(params, row);
    return (entry * problem.num_heads + head) * problem.q_len + query_of_row<C>(params, row);
  }

  // Writes the rows as floats, straight from the fragments.
  __device__ __forceinline__ void write_part(const Output& out, RowFactors factors) const {
    const ItemRecord& item = control.items[items % kItemSlots];
    const int width = params.problem.head_dim_v;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = item.q_begin + place().row + 8 * r;
      if (row >= end_of_rows(item) || !is_row_of_head<C>(params, row)) continue;
      float* const to = params.partial_out + row_of_part(item, row) * width;
      const float f = factors.row[r];
#pragma unroll
      for (int i = 0; i < C.head_dim_v / 8; ++i) {
        const int column = 8 * i + place().column;
        if (column >= width) continue;
        const float2 pair = f == 0.0f ? float2{0.0f, 0.0f}  // selected: out may hold NaN there
                                      : float2{out[4 * i + 2 * r] * f, out[4 * i + 2 * r + 1] * f};
        *reinterpret_cast<float2*>(to + column) = pair;
      }
    }
    sync_warpgroup();  // every warp is done with q
    if (S::kOutAliasesQ && thread() == 0) arrive(&control.q_empty);
  }

  // One past the last row that an item answers for: rows of documents and of a first tile may end before the tile does.
  __device__ __forceinline__ int end_of_rows(const ItemRecord& item) const {
    if constexpr (C.packed_heads) return rows_of_queries<C>(params, params.problem.q_len);
    return C.documents || cuts_first_tile(C) ? item.q_length : params.problem.q_len;
  }

  // Whether rows of another item follow in the 64 of this warpgroup; a box would overwrite them.
  __device__ __forceinline__ bool is_cut(const ItemRecord& item) const {
    const int end = end_of_rows(item);
    return end < params.problem.q_len && item.q_begin + first_row() + kWarpgroupRows > end;
  }

  // Copies the rows of kChunks chunks of the output tile that belong to the item, 16 bytes a thread.
  template <int kChunks>
  __device__ __forceinline__ void copy_rows(const ItemRecord& item, unsigned out_chunk, int first_chunk) const {
    const ProblemParams& problem = params.problem;
    constexpr int kPiecesOfChunk = kChunkRowBytes / 16;
    const int first = item.q_begin + first_row(), rows = end_of_rows(item) - first;  // may be negative
    const int pieces = problem.head_dim_v * 2 / 16 - first_chunk * kPiecesOfChunk;   // of a row
    const int64_t stride = int64_t(problem.num_heads) * problem.head_dim_v * 2;
    const int first_query = query_of_row<C>(params, first);
    char* const target =
        static_cast<char*>(params.rows_out) +
        ((int64_t(item.batch) * problem.q_len + first_query) * problem.num_heads + item.head) * problem.head_dim_v * 2 +
        first_chunk * kChunkRowBytes;
#pragma unroll 1
    for (int i = thread(); i < kWarpgroupRows * kChunks * kPiecesOfChunk; i += kWarpgroupThreads) {
      const int row = i / (kChunks * kPiecesOfChunk), piece = i % (kChunks * kPiecesOfChunk);
      if (row >= rows || piece >= pieces || !is_row_of_head<C>(params, first + row)) continue;
      const int query = query_of_row<C>(params, first + row) - first_query, head = head_of_row<C>(params, first + row);
      const unsigned source = out_chunk + piece / kPiecesOfChunk * C.tile_q * kChunkRowBytes + row * kChunkRowBytes +
                              (piece % kPiecesOfChunk ^ row % 8) * 16;
      *reinterpret_cast<uint4*>(target + query * stride + head * problem.head_dim_v * 2 + piece * 16) =
          ptx::load_shared_u32x4(source);
    }
  }

  // Writes the output rows of this warpgroup: the whole tile at once where it has a place, else chunk by chunk through the
  // places that there are.
  __device__ __forceinline__ void write(Output& out, RowFactors factors) const {
    if constexpr (C.partial_results) return write_part(out, factors);
    constexpr int kChunks = num_chunks(C.head_dim_v);
    constexpr bool kAtOnce = S::kOutChunks == kChunks;
    const ItemRecord& item = control.items[items % kItemSlots];
    const bool by_rows = C.packed_heads || (C.documents && is_cut(item));
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += kAtOnce ? kChunks : 1) {
      if (thread() == 0) {
        if (chunk == 0) {
          wait_stores_read();
        } else {
          wait_stores_read<S::kOutChunks - 1>();
        }
      }
      sync_warpgroup();  // what had the place before has left
      write_chunks<kAtOnce ? kChunks : 1>(out, factors, item, chunk, chunk % S::kOutChunks, by_rows);
    }
    if constexpr (S::kOutAliasesQ) {
      if (by_rows) sync_warpgroup();
      if (thread() == 0) {
        wait_stores_read();
        arrive(&control.q_empty);
      }
    }
  }

  // Writes kCount chunks of the output by way of the shared memory of chunk `place`.
  template <int kCount>
  __device__ __forceinline__ void write_chunks(Output& out, RowFactors factors, const ItemRecord& item, int chunk,
                                               int place, bool by_rows) const {
    constexpr int kChunkBytes = C.tile_q * kChunkRowBytes, kStepsOfChunk = kChunkColumns / kStepDepth;
    const unsigned tile = tiles + S::kOutOffset + place * kChunkBytes + first_row() * kChunkRowBytes;
#pragma unroll
    for (int step = 0; step < kCount * kStepsOfChunk; ++step) {
      const int column = chunk * kStepsOfChunk + step;
      if (column >= C.head_dim_v / kStepDepth) break;
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float f = factors.row[i % 2];
        const float low = f == 0.0f ? 0.0f : out[8 * column + 2 * i] * f;  // selected: out may hold NaN there
        const float high = f == 0.0f ? 0.0f : out[8 * column + 2 * i + 1] * f;
        words[i] = ElementTraits<C.element>::pack(low, high);
      }
      ptx::store_matrix_x4(fragment_address(tile, step), words);
    }
    fence_async_proxy();
    sync_warpgroup();
    if (by_rows) {
      copy_rows<kCount>(item, tile, chunk);
      return;
    }
    const int first = item.q_begin + first_row();
    if (thread() == 0 && first < end_of_rows(item)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        store_box(&params.out, tile + i * kChunkBytes, (chunk + i) * kChunkColumns, first, item.head, item.batch);
      }
      commit_stores();
    }
  }

  __device__ __forceinline__ void run_item(Softmax& softmax) {
    const ItemRecord& item = control.items[items % kItemSlots];
    reset(softmax);
    Output out;
    clear(out);
    if (item.status == kItemEmpty) {
      write(out, finish_rows(softmax));
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
      write(out, finish_rows(softmax));
    }
  }

  __device__ __forceinline__ void run() {
    Softmax softmax;
    softmax.scale_log2 = params.problem.scale_log2;
    turns().start();
    for (bool more = true; more; ++items) {
      wait(&control.q_full, items % 2);
      if (control.items[items % kItemSlots].status == kItemsEnd) {
        more = items_follow();
      } else {
        run_item(softmax);
      }
    }
    turns().finish();
    if (thread() == 0) wait_stores_read();  // shared memory must outlive the copies that read it
  }
};

}  // namespace jattn::sm90
