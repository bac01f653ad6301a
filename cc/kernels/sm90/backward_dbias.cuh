// dbias on Hopper: the gradient of the scores, summed over the axes that the bias is broadcast along.
//
// Unit of the family sm90_backward_dbias, parameters sm90::DbiasParams, backward_threads and backward_min_blocks.
// Element float16 or bfloat16; tile_q 128; head dims multiples of 64 up to 256.
//
// A block owns one tile of the bias (the whole axis where it is broadcast over queries or keys) and visits the score
// tiles that add to it in a fixed order, with the sum in registers: two products a step, no reductions in memory, the
// same bits every time. Where the bias has too few tiles to fill a device, `splits` blocks share one and write partial
// sums, which passes/sum_partials.cuh adds in order.
//
// A step takes two places of a ring, one with q and k, one with dout and v, so that the next q and k arrive while dp
// and ds are worked on. Nothing is multiplied by ds here: padding rows need not be cleared, their pairs are selected
// away.
#pragma once

#include "attn/dbias_work.cuh"
#include "base/integers.cuh"
#include "sm90/backward_consumer.cuh"
#include "sm90/backward_products.cuh"

namespace jattn::sm90 {

// One score tile. Travels beside q and k.
struct alignas(16) DbiasStep {
  int first_query, first_key, batch, head;
  int flags;  // BackwardFlags; kLastStep: there is no tile any more
  int kv_length, upper_offset, lower_offset;
};

template <Config C>
struct alignas(16) DbiasControl {
  uint32_t mask_words[C.mask ? C.stages : 1][C.mask ? C.tile_q * 4 : 4];
  DbiasStep steps[C.stages];
  StepTerms terms[C.stages];
  int q_ids[C.segments ? C.stages : 1][C.segments ? C.tile_q : 4];
  int kv_ids[C.segments ? C.stages : 1][C.segments ? C.tile_kv : 4];
  int q_positions[C.positions ? C.stages : 1][C.positions ? C.tile_q : 4];
  int kv_positions[C.positions ? C.stages : 1][C.positions ? C.tile_kv : 4];
  Barrier full[C.stages], empty[C.stages];
  Barrier bias_full;
};

template <Config C>
struct DbiasProducer {
  static constexpr DbiasLayout kLayout = dbias_layout(C);

  const DbiasParams& dbias;
  DbiasControl<C>& control;
  unsigned tiles;  // shared address of the first place
  RingPosition<C.stages> ring{0, 1};

  __device__ __forceinline__ static bool leads() { return threadIdx.x % 32 == 0; }

  // The flags of a score tile, or -1 if no pair of it is visible.
  __device__ __forceinline__ int flags_of(const BackwardItem& item, int q_tile, int kv_tile) const {
    const BackwardParams& params = dbias.backward;
    const ProblemParams& problem = params.problem;
    const int end = min(item.first + C.tile_q, item.q_length);
    if (end <= item.first) return -1;
    const TileRange range = visible_tiles<has_index_band(C)>(item.first, end, band_of(item), item.kv_length, C.tile_kv);
    if (kv_tile < range.begin || kv_tile >= range.end) return -1;
    int flags = kv_tile >= range.full_end ? kLimitsAbove : 0;
    if constexpr (has_index_band(C)) flags |= kv_tile < range.full_begin ? kLimitsBelow : 0;
    RoundWalk<C> tile{0, 0, 0};
    tile.filter.template load<false>(problem, item.batch, q_tile, {problem.band_left, problem.band_right, 0});
    if constexpr (C.mask) tile.look_at_mask(params.mask, item.batch, item.head, q_tile);
    if (!tile.meets(kv_tile)) return -1;
    if constexpr (C.segments) flags |= tile.filter.same_segment(kv_tile) ? 0 : kComparesSegments;
    if constexpr (has_position_band(C)) flags |= tile.filter.inside_band(kv_tile) ? 0 : kComparesPositions;
    if constexpr (C.mask) flags |= tile.state(kv_tile) == kMaskTileMixed ? kComparesMask : 0;
    const int64_t row = (int64_t(item.batch) * problem.num_heads + item.head) * params.rows_padded + item.first;
    if constexpr (C.program) flags |= item.first + C.tile_q > problem.q_len ? kHasEmptyRows : 0;
    return flags | (params.row_flags[row / kStatisticsRows] != 0 ? kHasEmptyRows : 0);
  }

  __device__ __forceinline__ void load_step(const BackwardItem& item, int first_key, int kv_tile, int flags) {
    const BackwardParams& params = dbias.backward;
    const ProblemParams& problem = params.problem;
    const int place = ring.index, lane = threadIdx.x % 32;
    const int kv_head = item.head / problem.group_size;
    wait_as_warp(&control.empty[place], ring.parity);
    if constexpr (C.segments) {
      if ((flags & kComparesSegments) || C.dropout_rows) {
        for (int i = lane; i < C.tile_q; i += 32) {
          control.q_ids[place][i] =
              segment_id<-1>(problem.q_segments, int64_t(item.batch) * problem.q_len, item.first + i, problem.q_len);
        }
        for (int i = lane; i < C.tile_kv; i += 32) {
          control.kv_ids[place][i] =
              segment_id<-2>(problem.kv_segments, int64_t(item.batch) * problem.kv_len, first_key + i, item.kv_length);
        }
      }
    }
    if constexpr (C.positions) {
      load_positions<C.tile_q>(control.q_positions[place], problem.q_positions, item.batch, item.first, problem.q_len);
      load_positions<C.tile_kv>(control.kv_positions[place], problem.kv_positions, item.batch, first_key,
                                problem.kv_len);
    }
    __syncwarp();
    if (leads()) {
      control.steps[place] = {item.first, first_key,      item.batch,        item.head,
                              flags,      item.kv_length, item.upper_offset, item.lower_offset};
      control.terms[place] = step_terms<C>(problem, item.batch, item.head);
      int bytes = tile_bytes(C.tile_q, C.head_dim) + tile_bytes(C.tile_kv, C.head_dim);
      if constexpr (C.mask) bytes += flags & kComparesMask ? mask_words_bytes<C, true>(params.mask) : 0;
      arrive_and_expect_bytes(&control.full[place], bytes);
      if constexpr (C.mask) {
        if (flags & kComparesMask) {
          load_mask_words<C, true>(control.mask_words[place], params.mask, &control.full[place], item.batch, item.head,
                                   item.first, kv_tile);
        }
      }
      const unsigned q = tiles + place * kLayout.place_bytes, k = q + tile_bytes(C.tile_q, C.head_dim);
      load_tile<C.tile_q, C.head_dim>(q, &params.q, &control.full[place], item.first, item.head, item.batch);
      load_tile<C.tile_kv, C.head_dim>(k, &params.k, &control.full[place], first_key, kv_head, item.batch);
    }
    ring.advance();
    const int second = ring.index;
    wait_as_warp(&control.empty[second], ring.parity);
    if (leads()) {
      arrive_and_expect_bytes(&control.full[second],
                              tile_bytes(C.tile_q, C.head_dim_v) + tile_bytes(C.tile_kv, C.head_dim_v));
      const unsigned dout = tiles + second * kLayout.place_bytes, v = dout + tile_bytes(C.tile_q, C.head_dim_v);
      load_tile<C.tile_q, C.head_dim_v>(dout, &params.dout, &control.full[second], item.first, item.head, item.batch);
      load_tile<C.tile_kv, C.head_dim_v>(v, &params.v, &control.full[second], first_key, kv_head, item.batch);
    }
    ring.advance();
  }

  __device__ __forceinline__ void run() {
    const DbiasWork work(dbias.bias, dbias.backward.problem, C.tile_q, C.tile_kv);
    if constexpr (bias_tile_bytes(C) > 0) {  // only a bias with both axes is staged: its tile serves all steps
      if (leads()) {
        load_bias_tile<C>(tiles + kLayout.bias, dbias.backward, &control.bias_full, work.batch, work.head,
                          work.q_tile * C.tile_q, work.kv_tile * C.tile_kv);
      }
    }
    for (int64_t index = work.split; index < work.steps; index += dbias.bias.splits) {
      const auto [kv_tile, q_tile, head, batch] = work.step(index);
      const BackwardItem item = backward_item<C>(dbias.backward, {batch, head, q_tile, 0}, q_tile * C.tile_q);
      const int flags = flags_of(item, q_tile, kv_tile);
      if (flags >= 0) load_step(item, kv_tile * C.tile_kv, kv_tile, flags);
    }
    wait_as_warp(&control.empty[ring.index], ring.parity);
    if (leads()) {
      control.steps[ring.index].flags = kLastStep;
      arrive(&control.full[ring.index]);
    }
  }
};

template <Config C>
struct DbiasConsumer {
  static constexpr DbiasLayout kLayout = dbias_layout(C);
  static constexpr int kCount = C.tile_kv / 2;
  using Scores = float[kCount];
  using Stage = BackwardScoreStage<C>;

  const DbiasParams& dbias;
  DbiasControl<C>& control;
  unsigned tiles;  // shared address of the first place
  int warpgroup;   // among the consumers
  RingPosition<C.stages> ring;

  __device__ __forceinline__ int first_row() const { return warpgroup * kWarpgroupRows; }
  __device__ __forceinline__ int row_in_tile() const { return first_row() + warp_row() + lane() / 4; }

  // Scores become probabilities; dropped pairs are marked by the sign.
  __device__ __forceinline__ void finish_scores(Scores& s, int place, const float (&lse_log2)[2],
                                                const Drops<C, kCount, false>& drops) const {
    const ProblemParams& problem = dbias.backward.problem;
    const DbiasStep& step = control.steps[place];
    const int flags = step.flags;
    BackwardItem item{};
    item.batch = step.batch;
    item.kv_length = step.kv_length;
    item.upper_offset = step.upper_offset;
    item.lower_offset = step.lower_offset;
    const FragmentOrigin origin = origin_of(step);
    KeptSlopes<C, kCount>
        slopes;  // the bias is added behind the softcap, whose slope is not asked for, before the program
    FetchedBias<C, kCount> fetched;  // of no use here: rows are queries
    const unsigned bias = C.staged_bias || keeps_bias(C) ? tiles + kLayout.bias : 0u;
    make_exponents<C, false>(s, slopes, control.terms[place], item, origin, bias,
                             control.q_positions[C.positions ? place : 0],
                             control.kv_positions[C.positions ? place : 0], fetched, problem,
                             [&](int) { return make_float2(lse_log2[0], lse_log2[1]); });
    if (flags & kMaskFlags<C>) {
      mask_scores<C, false>(s, flags, item, origin, control.q_ids[C.segments ? place : 0],
                            control.kv_ids[C.segments ? place : 0]);
      mask_positions<C, false>(s, flags, origin, control.q_positions[C.positions ? place : 0],
                               control.kv_positions[C.positions ? place : 0], problem);
      if constexpr (C.mask) {
        mask_by_words<C>(s, flags, row_in_tile(), control.mask_words[place], dbias.backward.mask.words_row);
      }
    }
    if (flags & kHasEmptyRows) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (lse_log2[i / 2 % 2] == infinity()) s[i] = -infinity();
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float p = exp2_fast(s[i]);
      s[i] = marked<C>(has_program_slopes<C>() ? slopes.weight(p, i) : p, drops[i]);
    }
  }

  __device__ __forceinline__ FragmentOrigin origin_of(const DbiasStep& step) const {
    const int row = row_in_tile(), column = lane() % 4 * 2;
    return {step.first_query + row, step.first_key + column, row, column};
  }

  // The bias of a block is the same in all its steps: what is not staged is read once and kept, each thread's own.
  __device__ __forceinline__ void keep_bias() const {
    const DbiasWork work(dbias.bias, dbias.backward.problem, C.tile_q, C.tile_kv);
    const BroadcastArray& array = dbias.backward.problem.bias;
    DbiasStep first{};
    first.first_query = work.q_tile * C.tile_q;
    first.first_key = work.kv_tile * C.tile_kv;
    const BiasSource<C, false> source{dbias.backward.problem,
                                      work.batch * array.stride_batch + work.head * array.stride_head, origin_of(first),
                                      tiles + kLayout.bias};
    float bias[8];
#pragma unroll
    for (int step = 0; step < kCount / 8; ++step) {
      source.load_direct(bias, step);
      source.keep(bias, step);
    }
  }

  __device__ __forceinline__ void visit(Scores& sum) {
    if constexpr (C.staged_bias) {
      wait(&control.bias_full, 0);
    } else if constexpr (keeps_bias(C)) {
      keep_bias();
    }
    while (true) {
      const int place = ring.index;
      wait(&control.full[place], ring.parity);
      const int flags = control.steps[place].flags;
      if (flags & kLastStep) return;
      Scores s, dp;
      const unsigned q = tiles + place * kLayout.place_bytes, k = q + tile_bytes(C.tile_q, C.head_dim);
      start_row_product<C.element, C.tile_q, C.tile_kv, C.head_dim>(s, q + first_row() * kChunkRowBytes, k);
      ring.advance();
      const int second = ring.index;
      wait(&control.full[second], ring.parity);
      const unsigned dout = tiles + second * kLayout.place_bytes, v = dout + tile_bytes(C.tile_q, C.head_dim_v);
      start_row_product<C.element, C.tile_q, C.tile_kv, C.head_dim_v>(dp, dout + first_row() * kChunkRowBytes, v);
      ring.advance();
      const BackwardParams& params = dbias.backward;
      const DbiasStep& step = control.steps[place];
      const int64_t row = (int64_t(step.batch) * params.problem.num_heads + step.head) * params.rows_padded +
                          step.first_query + row_in_tile();
      float lse_log2[2], delta[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        lse_log2[r] = __ldg(params.lse_log2 + row + 8 * r);
        delta[r] = __ldg(params.delta + row + 8 * r);
      }
      Drops<C, kCount, false> drops;
      if constexpr (C.dropout) {
        drops.decide(control.terms[place], origin_of(step), control.q_ids[C.segments ? place : 0],
                     control.q_positions[C.positions ? place : 0], control.kv_positions[C.positions ? place : 0],
                     params.problem);
      }
      wait_products<1>();
      pin_registers(s);
      finish_scores(s, place, lse_log2, drops);
      const float factor = C.dropout ? control.terms[place].factor : 1.0f;
      release_by_warp(&control.empty[place]);  // its records have been read too
      wait_products<0>();
      pin_registers(dp);
      release_by_warp(&control.empty[second]);
      // Products of padding rows may be NaN; an invisible pair has p = 0.
      const bool selects = C.program || (flags & (kMaskFlags<C> | kHasEmptyRows));
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float ds = score_gradient<C>(s[i], dp[i], delta[i / 2 % 2], factor);
        sum[i] += selects && s[i] == 0.0f ? 0.0f : ds;
      }
    }
  }

  __device__ __forceinline__ void write(const DbiasWork& work, int64_t index, float x) const {
    using Traits = ElementTraits<C.bias_element>;
    if (dbias.bias.splits == 1) {
      static_cast<typename Traits::Storage*>(dbias.bias.result)[index] = Traits::from_float(x);
    } else {
      dbias.bias.partials[work.split * dbias.bias.bias_elements + index] = x;
    }
  }

  __device__ __forceinline__ void run() {
    Scores sum;
#pragma unroll
    for (float& x : sum) x = 0.0f;
    visit(sum);

    const ProblemParams& problem = dbias.backward.problem;
    const BroadcastArray& bias = problem.bias;
    const DbiasWork work(dbias.bias, dbias.backward.problem, C.tile_q, C.tile_kv);
    const int64_t base = work.batch * bias.stride_batch + work.head * bias.stride_head;
    const int row0 = work.q_tile * C.tile_q + row_in_tile(), column0 = work.kv_tile * C.tile_kv + lane() % 4 * 2;
    if (!work.all_queries && !work.all_keys) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int row = row0 + i / 2 % 2 * 8, column = column0 + i / 4 * 8 + i % 2;
        if (row < problem.q_len && column < problem.kv_len) {
          write(work, base + row * bias.stride_query + column * bias.stride_key, sum[i]);
        }
      }
      return;
    }
    if (!work.all_queries) {  // a sum per row
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x = 0.0f;
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i) x += sum[4 * i + 2 * r] + sum[4 * i + 2 * r + 1];
        x = quad_sum(x);
        const int row = row0 + 8 * r;
        if (lane() % 4 == 0 && row < problem.q_len) write(work, base + row * bias.stride_query, x);
      }
      return;
    }
    // A sum per column, or of everything: first over a warp's rows, then over warps, in memory that no tile needs any
    // more.
    sync_consumers();
    constexpr int kWarps = kBackwardConsumers * kWarpgroupThreads / 32;
    const int warp = threadIdx.x / 32 - kWarpgroupThreads / 32;
    extern __shared__ __align__(1024) unsigned char shared[];
    float* column_sums = reinterpret_cast<float*>(shared);  // [kWarps][C.tile_kv]
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float x = sum[4 * i + c] + sum[4 * i + 2 + c];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
        if (lane() < 4) column_sums[warp * C.tile_kv + 8 * i + 2 * lane() + c] = x;
      }
    }
    sync_consumers();
    const int thread = threadIdx.x - kWarpgroupThreads;
    if (work.all_keys) {
      if (thread != 0) return;
      float x = 0.0f;
      for (int i = 0; i < kWarps * C.tile_kv; ++i) x += column_sums[i];
      write(work, base, x);
      return;
    }
    const int column = work.kv_tile * C.tile_kv + thread;
    if (thread >= C.tile_kv || column >= problem.kv_len) return;
    float x = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) x += column_sums[w * C.tile_kv + thread];
    write(work, base + column * bias.stride_key, x);
  }
};

template <Config C>
__device__ __forceinline__ void backward_dbias(const DbiasParams& dbias) {
  constexpr DbiasLayout kLayout = dbias_layout(C);
  static_assert(C.element == Element::kF16 || C.element == Element::kBF16);
  static_assert(C.head_dim % 64 == 0 && C.head_dim_v % 64 == 0 && C.head_dim <= 256 && C.head_dim_v <= 256);
  static_assert(C.tile_q == kBackwardConsumers * kWarpgroupRows && C.tile_kv % kChunkColumns == 0 && C.stages >= 2);
  static_assert(!(C.softcap && has_program_slopes<C>()));  // its slopes have that of the softcap in them
  static_assert(C.bias && !C.narrow_rows && (!C.dropout_rows || (C.dropout && C.segments && C.positions)));
  static_assert(!C.staged_bias || C.bias_element != Element::kF32);
  static_assert(C.num_warps == backward_threads(C) / 32);
  static_assert(kLayout.bytes <= kMaxSharedBytes);
  static_assert(sizeof(DbiasControl<C>) <= dbias_control_bytes(C));

  extern __shared__ __align__(1024) unsigned char shared[];
  auto& control = *reinterpret_cast<DbiasControl<C>*>(shared + kLayout.control);
  const unsigned tiles = shared_address(shared);
  if (threadIdx.x == 0) {
    if (tiles % 1024 != 0) __trap();  // the swizzle counts rows from here
    for (int place = 0; place < C.stages; ++place) {
      init_barrier(&control.full[place], 1);
      init_barrier(&control.empty[place], kBackwardConsumers * kWarpgroupThreads / 32);
    }
    init_barrier(&control.bias_full, 1);
    fence_barrier_init();
    prefetch_tensor_map(&dbias.backward.q);
    prefetch_tensor_map(&dbias.backward.k);
    prefetch_tensor_map(&dbias.backward.v);
    prefetch_tensor_map(&dbias.backward.dout);
    if constexpr (bias_tile_bytes(C) > 0) prefetch_tensor_map(&dbias.backward.bias);
  }
  __syncthreads();

  // Through a shuffle, so that the compiler knows the branch to be the same for the whole warp.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroupThreads, 0);
  if (warpgroup == 0) {
    release_registers<backward_producer_registers(C)>();
    if (threadIdx.x < 32) DbiasProducer<C>{dbias, control, tiles}.run();
  } else {
    acquire_registers<backward_consumer_registers(C)>();
    DbiasConsumer<C>{dbias, control, tiles, warpgroup - 1}.run();
  }
}

}  // namespace jattn::sm90
