// Producer and consumers of the kernel that owns queries. Scores lie as in the forward pass, queries along rows: ds is then
// a register operand of dq += ds k as it stands.
#pragma once

#include "sm90/backward_consumer.cuh"
#include "sm90/backward_products.cuh"

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
                                       int first, bool has_padding) {
    Barrier* target = has_padding ? &control.landed : full;
    if (leads()) {
      arrive_and_expect_bytes(target, tile_bytes(C.tile_kv, kColumns));
      load_tile<C.tile_kv, kColumns>(tile, map, target, first, item.head / params.problem.group_size, item.batch);
    }
    if (!has_padding) return;
    wait(&control.landed, landed_parity);
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
    wait(&control.first_empty[stage], k_ring.parity);
    if constexpr (C.segments) {
      if (flags & kComparesSegments) {
        for (int row = threadIdx.x % 32; row < C.tile_kv; row += 32) control.ids[stage][row] = kv_id(item, first + row);
      }
      __syncwarp();
    }
    if (leads()) control.headers[stage] = {first, flags, 0};
    load<C.head_dim>(&params.k, tiles + kLayout.k + stage * kKBytes, &control.first_full[stage], item, first,
                     has_padding);
    k_ring.advance();
    wait(&control.second_empty[v_ring.index], v_ring.parity);
    load<C.head_dim_v>(&params.v, tiles + kLayout.v + v_ring.index * kVBytes, &control.second_full[v_ring.index], item,
                       first, has_padding);
    v_ring.advance();
  }

  __device__ __forceinline__ void run() {
    const ProblemParams& problem = params.problem;
    const WorkItem place =
        work_item<Heaviest::kLast>(blockIdx.x, problem.num_heads, problem.batch, params.tiles, 1, params.section_heads);
    BackwardItem item = backward_item<C>(params, place, place.tile * C.tile_q);
    const int end = min(item.first + C.tile_q, item.q_length);
    TileRange range{0, 0, 0, 0};
    if (end > item.first) range = visible_tiles<C.band>(item.first, end, band_of(item), item.kv_length, C.tile_kv);
    RoundWalk<C.segments> walk{range.begin, range.end - range.begin, 0};
    if constexpr (C.segments) {
      walk.others = problem.kv_ranges + int64_t(item.batch) * ceil_div(problem.kv_len, C.tile_kv);
      walk.own = problem.q_ranges[int64_t(item.batch) * params.tiles + place.tile];
    }
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
      if constexpr (C.band) flags |= tile < range.full_begin ? kLimitsBelow : 0;
      bool has_padding = C.lengths && item.kv_length < problem.kv_len && (tile + 1) * C.tile_kv > item.kv_length;
      if constexpr (C.segments) {
        flags |= segments_equal(walk.own, walk.others[tile]) ? 0 : kComparesSegments;
        has_padding = has_padding || holds_padding(walk.others[tile]);
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

  // Scores become weights: probabilities times the slope of the score stage.
  __device__ __forceinline__ void finish_scores(Scores& s, const StepHeader& header) const {
    if constexpr (Stage::kActive) {
#pragma unroll
      for (int i = 0; i < C.tile_kv / 2; ++i) s[i] = Stage::score(s[i], params.problem);
    }
    if (header.flags & (kLimitsAbove | kLimitsBelow | kComparesSegments)) {
      const int row = row_in_tile(), column = lane() % 4 * 2;
      mask_scores<C, false>(s, header.flags, control.item,
                            {control.item.first + row, header.first + column, row, column}, control.own_ids,
                            control.ids[C.segments ? k_ring.index : 0]);
    }
    const float inverse = Stage::softcap_inverse(params.problem);
#pragma unroll
    for (int i = 0; i < C.tile_kv / 2; ++i) {
      s[i] = Stage::weights(s[i], lse_log2[i / 2 % 2], params.problem, inverse).with_slope;
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
      wait_products<1>();
      pin_registers(s);
      pin_registers(dq);
      if (k_read >= 0) release_by_warpgroup(&control.first_empty[k_read]);
      k_read = k_ring.index;
      finish_scores(s, header);
      wait_products<0>();
      pin_registers(dp);
      release_by_warpgroup(&control.second_empty[v_ring.index]);
      Fragments ds;
#pragma unroll
      for (int i = 0; i < C.tile_kv / 4; ++i) {
        ds[i] = ElementTraits<C.element>::pack(s[2 * i] * (dp[2 * i] - delta[i % 2]),
                                               s[2 * i + 1] * (dp[2 * i + 1] - delta[i % 2]));
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
