// Producer and consumers of the kernel that owns queries. Scores lie as in the forward pass, queries along rows: ds is
// then a register operand of dq += ds k as it stands.
#pragma once

#include "sm90/backward_consumer.cuh"
#include "sm90/backward_products.cuh"
#include "sm90/clear_rows.cuh"

namespace jattn::sm90 {

template <Config C>
struct QueryProducer {
  static constexpr QueryLayout kLayout = query_layout(C);
  static constexpr int kKBytes = tile_bytes(C.tile_kv, C.head_dim);
  static constexpr int kVBytes = tile_bytes(C.tile_kv, C.head_dim_v);

  const BackwardParams& params;
  BackwardControl<C, true>& control;
  unsigned tiles;  // shared address of the first tile
  RingPosition<C.stages> k_ring{0, 1};
  RingPosition<kLayout.v_stages> v_ring{0, 1};
  RingPosition<kLayout.bias_slots> bias_ring{0, 1};
  unsigned landed_parity = 0;

  __device__ __forceinline__ static bool leads() { return threadIdx.x % 32 == 0; }

  __device__ __forceinline__ int kv_id(const BackwardItem& item, int j) const {
    return segment_id<-2>(params.problem.kv_segments, int64_t(item.batch) * params.problem.kv_len, j, item.kv_length);
  }

  __device__ __forceinline__ void load_queries(const BackwardItem& item) {
    constexpr int kBytes = tile_bytes(C.tile_q, C.head_dim) + tile_bytes(C.tile_q, C.head_dim_v);
    if constexpr (C.segments) {
      for (int row = threadIdx.x % 32; row < C.tile_q; row += 32) {
        control.own_ids[row] = segment_id<-1>(params.problem.q_segments, int64_t(item.batch) * params.problem.q_len,
                                              item.first + row, params.problem.q_len);
      }
      __syncwarp();
    }
    if constexpr (C.positions) {
      load_positions<C.tile_q>(control.own_positions, params.problem.q_positions, item.batch, item.first,
                               params.problem.q_len);
    }
    if constexpr (has_step_terms(C)) {
      if (leads()) control.terms[0] = step_terms<C>(params.problem, item.batch, item.head);  // of all steps
    }
    __syncwarp();
    if (leads()) {
      arrive_and_expect_bytes(&control.own_full, kBytes);
      load_tile<C.tile_q, C.head_dim>(tiles + kLayout.q, &params.q, &control.own_full, item.first, item.head,
                                      item.batch);
      load_tile<C.tile_q, C.head_dim_v>(tiles + kLayout.dout, &params.dout, &control.own_full, item.first, item.head,
                                        item.batch);
    }
  }

  // Sends one tile of k or v; rows of padding may hold anything, and 0 * NaN is NaN, so such tiles are cleared first.
  template <int kColumns>
  __device__ __forceinline__ void load(const TensorMap* map, unsigned tile, Barrier* full, const BackwardItem& item,
                                       int first, bool has_padding, int bytes_beside = 0) {
    Barrier* target = has_padding ? &control.landed : full;
    if (leads()) {
      arrive_and_expect_bytes(target, tile_bytes(C.tile_kv, kColumns) + bytes_beside);
      load_tile<C.tile_kv, kColumns>(tile, map, target, first, item.head / params.problem.group_size, item.batch);
    }
    if (!has_padding) return;
    wait_as_warp(&control.landed, landed_parity);
    landed_parity ^= 1;
    clear_rows<C.tile_kv, kColumns>(tile, [&](int row) {
      if constexpr (C.segments) return kv_id(item, first + row) < 0;
      return first + row >= item.kv_length;
    });
    fence_async_proxy();
    __syncwarp();
    if (leads()) arrive(full);
  }

  __device__ __forceinline__ void load_keys(const BackwardItem& item, int tile, int flags, bool has_padding) {
    const int first = tile * C.tile_kv, stage = k_ring.index;
    wait_as_warp(&control.first_empty[stage], k_ring.parity);
    if constexpr (C.segments) {
      if (flags & kComparesSegments) {
        for (int row = threadIdx.x % 32; row < C.tile_kv; row += 32) control.ids[stage][row] = kv_id(item, first + row);
      }
      __syncwarp();
    }
    if constexpr (C.positions) {
      if (C.alibi || C.program || C.dropout_rows || (flags & kComparesPositions)) {
        load_positions<C.tile_kv>(control.positions[stage], params.problem.kv_positions, item.batch, first,
                                  params.problem.kv_len);
        __syncwarp();
      }
    }
    if (leads()) control.headers[stage] = {first, flags, 0};
    int bytes_beside = 0;
    if constexpr (C.mask) {
      if (flags & kComparesMask) {
        bytes_beside = mask_words_bytes<C, true>(params.mask);
        Barrier* target = has_padding ? &control.landed : &control.first_full[stage];
        if (leads()) {
          load_mask_words<C, true>(control.mask_words[stage], params.mask, target, item.batch, item.head, item.first,
                                   tile);
        }
      }
    }
    load<C.head_dim>(&params.k, tiles + kLayout.k + stage * kKBytes, &control.first_full[stage], item, first,
                     has_padding, bytes_beside);
    k_ring.advance();
    if constexpr (bias_tile_bytes(C) > 0) {
      const int slot = bias_ring.index;
      wait_as_warp(&control.bias_empty[slot], bias_ring.parity);
      if (leads()) {
        load_bias_tile<C>(tiles + kLayout.bias + slot * bias_tile_bytes(C), params, &control.bias_full[slot],
                          item.batch, item.head, item.first, first);
      }
      bias_ring.advance();
    }
    wait_as_warp(&control.second_empty[v_ring.index], v_ring.parity);
    load<C.head_dim_v>(&params.v, tiles + kLayout.v + v_ring.index * kVBytes, &control.second_full[v_ring.index], item,
                       first, has_padding);
    v_ring.advance();
  }

  __device__ __forceinline__ void run() {
    const ProblemParams& problem = params.problem;
    const WorkItem place = place_of_item<C, Heaviest::kLast>(params, problem.num_heads, blockIdx.x);
    BackwardItem item = backward_item<C>(params, place, place.tile * C.tile_q);
    const int end = min(item.first + C.tile_q, item.q_length);
    TileRange range{0, 0, 0, 0};
    if (end > item.first) {
      range = visible_tiles<has_index_band(C)>(item.first, end, band_of(item), item.kv_length, C.tile_kv);
    }
    RoundWalk<C> walk{range.begin, range.end - range.begin, RoundWalk<C>::kFirstTiles};
    walk.filter.template load<false>(problem, item.batch, place.tile, {problem.band_left, problem.band_right, 0});
    if constexpr (C.mask) walk.look_at_mask(params.mask, item.batch, item.head, place.tile);
    int tile = walk.next();
    item.runs = tile >= 0;
    if (leads()) control.item = item;
    if (!item.runs) {
      if (leads()) arrive(&control.own_full);
      return;
    }
    load_queries(item);
    while (tile >= 0) {
      const int next = walk.next();
      int flags = next < 0 ? kLastStep : 0;
      flags |= tile >= range.full_end ? kLimitsAbove : 0;
      if constexpr (has_index_band(C)) flags |= tile < range.full_begin ? kLimitsBelow : 0;
      if constexpr (has_position_band(C)) flags |= walk.filter.inside_band(tile) ? 0 : kComparesPositions;
      if constexpr (C.mask) flags |= walk.state(tile) == kMaskTileMixed ? kComparesMask : 0;
      bool has_padding = C.lengths && item.kv_length < problem.kv_len && (tile + 1) * C.tile_kv > item.kv_length;
      if constexpr (C.segments) {
        flags |= walk.filter.same_segment(tile) ? 0 : kComparesSegments;
        has_padding = has_padding || walk.filter.padding(tile);
      }
      load_keys(item, tile, flags, has_padding);
      tile = next;
    }
  }
};

template <Config C>
struct QueryConsumer {
  static constexpr QueryLayout kLayout = query_layout(C);
  static constexpr int kKBytes = tile_bytes(C.tile_kv, C.head_dim);
  static constexpr int kVBytes = tile_bytes(C.tile_kv, C.head_dim_v);
  using Scores = float[C.tile_kv / 2];
  using Fragments = unsigned[C.tile_kv / 4];
  using Dq = float[C.head_dim / 2];
  using Stage = BackwardScoreStage<C>;

  const BackwardParams& params;
  BackwardControl<C, true>& control;
  unsigned tiles;  // shared address of the first tile
  int warpgroup;   // among the consumers
  RingPosition<C.stages> k_ring;
  RingPosition<kLayout.v_stages> v_ring;
  RingPosition<kLayout.bias_slots> bias_ring;
  float lse_log2[2], delta[2];

  __device__ __forceinline__ int first_row() const { return warpgroup * kWarpgroupRows; }
  __device__ __forceinline__ int row_in_tile() const { return first_row() + warp_row() + lane() / 4; }

  __device__ __forceinline__ void load_statistics() {
    const BackwardItem& item = control.item;
    const int64_t row =
        (int64_t(item.batch) * params.problem.num_heads + item.head) * params.rows_padded + item.first + row_in_tile();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      lse_log2[r] = __ldg(params.lse_log2 + row + 8 * r);
      delta[r] = __ldg(params.delta + row + 8 * r);
    }
  }

  __device__ __forceinline__ FragmentOrigin origin(int first_key) const {
    const int row = row_in_tile(), column = lane() % 4 * 2;
    return {control.item.first + row, first_key + column, row, column};
  }

  __device__ __forceinline__ void decide_drops(Drops<C, C.tile_kv / 2, false>& drops, int first_key) const {
    if constexpr (C.dropout_rows) {
      drops.decide(control.terms[0], origin(first_key), control.own_ids, control.own_positions,
                   control.positions[k_ring.index], params.problem);
    } else if constexpr (C.dropout) {
      drops.decide(control.terms[0], origin(first_key), nullptr, nullptr, nullptr, params.problem);
    }
  }

  // Scores become weights: probabilities times the slope of the score stage.
  __device__ __forceinline__ void finish_scores(Scores& s, const StepHeader& header,
                                                const Drops<C, C.tile_kv / 2, false>& drops) {
    const int* own_positions = nullptr;
    const int* positions = nullptr;
    if constexpr (C.positions) {
      own_positions = control.own_positions;
      positions = control.positions[k_ring.index];
    }
    KeptSlopes<C, C.tile_kv / 2> slopes;
    FetchedBias<C, C.tile_kv / 2> fetched;  // of no use here: rows are queries
    if constexpr (Stage::kMakesExponents) {
      if constexpr (bias_tile_bytes(C) > 0) wait(&control.bias_full[bias_ring.index], bias_ring.parity);
      make_exponents<C, false>(s, slopes, control.terms[0], control.item, origin(header.first),
                               C.staged_bias ? tiles + kLayout.bias + bias_ring.index * bias_tile_bytes(C) : 0u,
                               own_positions, positions, fetched, params.problem,
                               [&](int) { return make_float2(lse_log2[0], lse_log2[1]); });
      if constexpr (bias_tile_bytes(C) > 0) {
        release_by_warp(&control.bias_empty[bias_ring.index]);
        bias_ring.advance();
      }
    } else {
      Stage::finish_products(s, params.problem);
    }
    if (header.flags & kMaskFlags<C>) {
      mask_scores<C, false>(s, header.flags, control.item, origin(header.first), control.own_ids,
                            control.ids[C.segments ? k_ring.index : 0]);
      mask_positions<C, false>(s, header.flags, origin(header.first), own_positions, positions, params.problem);
      if constexpr (C.mask) {
        mask_by_words<C>(s, header.flags, row_in_tile(), control.mask_words[k_ring.index], params.mask.words_row);
      }
    }
#pragma unroll
    for (int i = 0; i < C.tile_kv / 2; ++i) {
      if constexpr (Stage::kMakesExponents) {
        s[i] = marked<C>(slopes.weight(exp2_fast(s[i]), i), drops[i]);
      } else {
        const auto weights = Stage::weights(s[i], lse_log2[i / 2 % 2], params.problem);
        s[i] = marked<C>(weights.p * weights.slope, drops[i]);
      }
    }
  }

  __device__ __forceinline__ void visit(Dq& dq) {
    pin_registers(dq);
    int k_read = -1;  // stage of the k that the running dq product reads
    for (bool last = false; !last; k_ring.advance(), v_ring.advance()) {
      Scores s, dp;
      wait(&control.first_full[k_ring.index], k_ring.parity);
      const StepHeader header = control.headers[k_ring.index];
      last = header.flags & kLastStep;
      start_row_product<C.element, C.tile_q, C.tile_kv, C.head_dim>(s, tiles + kLayout.q + first_row() * kChunkRowBytes,
                                                                    tiles + kLayout.k + k_ring.index * kKBytes);
      wait(&control.second_full[v_ring.index], v_ring.parity);
      start_row_product<C.element, C.tile_q, C.tile_kv, C.head_dim_v>(
          dp, tiles + kLayout.dout + first_row() * kChunkRowBytes, tiles + kLayout.v + v_ring.index * kVBytes);
      Drops<C, C.tile_kv / 2, false> drops;
      decide_drops(drops, header.first);
      wait_products<1>();
      pin_registers(s);
      pin_registers(dq);
      if (k_read >= 0) release_by_warpgroup(&control.first_empty[k_read]);
      k_read = k_ring.index;
      finish_scores(s, header, drops);
      wait_products<0>();
      pin_registers(dp);
      clear_hidden(dp, s, hides_pairs<C>(header.flags));
      release_by_warpgroup(&control.second_empty[v_ring.index]);
      float factor = 1.0f;
      if constexpr (C.dropout) factor = control.terms[0].factor;
      Fragments ds;
#pragma unroll
      for (int i = 0; i < C.tile_kv / 4; ++i) {
        ds[i] = ElementTraits<C.element>::pack(score_gradient<C>(s[2 * i], dp[2 * i], delta[i % 2], factor),
                                               score_gradient<C>(s[2 * i + 1], dp[2 * i + 1], delta[i % 2], factor));
      }
      start_fragment_product<C.element, C.tile_kv, C.head_dim>(dq, ds, tiles + kLayout.k + k_ring.index * kKBytes);
    }
    wait_products<0>();
    pin_registers(dq);
  }

  __device__ __forceinline__ void run() {
    wait(&control.own_full, 0);
    Dq dq;
#pragma unroll
    for (int i = 0; i < C.head_dim / 2; ++i) dq[i] = 0.0f;
    load_statistics();
    if (control.item.runs) visit(dq);
    const BackwardItem item = control.item;  // read again: registers are short in the loop
    const int first = item.first + first_row();
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = lse_log2[r] == infinity() ? 0.0f : params.problem.scale;
    // The rows of q that this warpgroup owns are read by its own products only.
    store_gradient<C.element, C.tile_q, C.head_dim>(dq, factor, tiles + kLayout.q, first_row(), warpgroup, &params.dq,
                                                    first < params.problem.q_len, first, item.head, item.batch);
    if (lane() == 0) wait_stores_read();  // shared memory must outlive the copies that read it
  }
};

}  // namespace jattn::sm90
