// The producer warp of the kernels that own keys: copies k and v once, then q, dout, lse and delta of every query tile that
// a query head of the group needs.
#pragma once

#include "sm90/backward_work.cuh"
#include "sm90/tma.cuh"

namespace jattn::sm90 {

inline constexpr int kZeroBarrier = 4;  // named barrier of the warps that zero

// The other warps of the producer warpgroup: zero this block's share of the accumulator that later blocks will add to.
// Beside the products that costs nothing, before them a pass through memory.
template <Config C>
__device__ __forceinline__ void zero_ahead(const BackwardParams& params) {
  constexpr int kThreads = kWarpgroupThreads - 32;
  const ProblemParams& problem = params.problem;
  const WorkItem place = work_item<Heaviest::kFirst>(blockIdx.x, problem.num_kv_heads, problem.batch, params.tiles, 1,
                                                     params.section_heads);
  const int head = place.batch * problem.num_kv_heads + place.head + params.zero_ahead;
  if (head >= problem.batch * problem.num_kv_heads) return;
  const int thread = threadIdx.x - 32;
  const int64_t head_floats = problem.group_size * params.rows_padded * C.head_dim;
  const int64_t begin = int64_t(place.tile) * params.zero_floats;
  const int count = int(min(head_floats - begin, int64_t(params.zero_floats)));
  float* target = params.dq_accumulator + head * head_floats + begin;
  for (int i = thread * 4; i < count; i += kThreads * 4) {
    *reinterpret_cast<float4*>(target + i) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  __threadfence();
  sync_named(kZeroBarrier, kThreads);
  if (thread == 0) atomicAdd(params.heads_zeroed + head, 1);
}

template <Config C, bool kFused>
struct KeyProducer {
  static constexpr KeyLayout kLayout = key_layout(C, kFused);
  static constexpr int kQBytes = tile_bytes(C.tile_q, C.head_dim);
  static constexpr int kDoutBytes = tile_bytes(C.tile_q, C.head_dim_v);
  // Rows that see no key may hold anything in q and dout; without these features there are none.
  static constexpr bool kEmptyRows = C.band || C.lengths || C.segments;

  const BackwardParams& params;
  BackwardControl<C, false>& control;
  unsigned tiles;  // shared address of the first tile
  RingPosition<C.stages> ring{0, 1};
  unsigned landed_parity = 0;

  __device__ __forceinline__ static bool leads() { return threadIdx.x % 32 == 0; }

  // Waits for tiles that were sent to `landed`.
  __device__ __forceinline__ void wait_landed() {
    wait(&control.landed, landed_parity);
    landed_parity ^= 1;
  }

  __device__ __forceinline__ void load_keys(const BackwardItem& item, bool has_padding) {
    Barrier* target = has_padding ? &control.landed : &control.own_full;
    constexpr int kBytes = tile_bytes(C.tile_kv, C.head_dim) + tile_bytes(C.tile_kv, C.head_dim_v);
    if (leads()) {
      arrive_and_expect_bytes(target, kBytes);
      load_tile<C.tile_kv, C.head_dim>(tiles + kLayout.k, &params.k, target, item.first, item.head, item.batch);
      load_tile<C.tile_kv, C.head_dim_v>(tiles + kLayout.v, &params.v, target, item.first, item.head, item.batch);
    }
    const auto kv_id = [&](int row) {
      return segment_id<-2>(params.problem.kv_segments, int64_t(item.batch) * params.problem.kv_len, item.first + row,
                            item.kv_length);
    };
    if constexpr (C.segments) {
      for (int row = threadIdx.x % 32; row < C.tile_kv; row += 32) control.own_ids[row] = kv_id(row);
    }
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

  struct Step {
    int head, tile;
  };

  // empty_rows: the tile holds rows that see no key, which must be cleared.
  __device__ __forceinline__ void load_queries(const BackwardItem& item, Step step, int flags, bool empty_rows) {
    const int stage = ring.index;
    const int first = step.tile * C.tile_q;
    const int64_t row = (int64_t(item.batch) * params.problem.num_heads + step.head) * params.rows_padded + first;
    Barrier* q_full = empty_rows ? &control.landed : &control.first_full[stage];
    Barrier* dout_full = empty_rows ? &control.landed : &control.second_full[stage];
    const unsigned q_tile = tiles + kLayout.q + stage * kQBytes, dout_tile = tiles + kLayout.dout + stage * kDoutBytes;
    wait(&control.first_empty[stage], ring.parity);
    if constexpr (C.segments) {
      if (flags & kComparesSegments) {
        for (int i = threadIdx.x % 32; i < C.tile_q; i += 32) {
          control.ids[stage][i] = segment_id<-1>(params.problem.q_segments, int64_t(item.batch) * params.problem.q_len,
                                                 first + i, params.problem.q_len);
        }
      }
      __syncwarp();
    }
    if (leads()) {
      control.headers[stage] = {first, flags, row};
      // One arrival completes a barrier: with both tiles on `landed` it comes below.
      if (empty_rows) {
        expect_bytes(q_full, kQBytes + statistics_bytes(C));
      } else {
        arrive_and_expect_bytes(q_full, kQBytes + statistics_bytes(C));
      }
      load_bytes(shared_address(control.lse_log2[stage]), params.lse_log2 + row, statistics_bytes(C), q_full);
      load_tile<C.tile_q, C.head_dim>(q_tile, &params.q, q_full, first, step.head, item.batch);
    }
    wait(&control.second_empty[stage], ring.parity);
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
    ring.advance();
  }

  __device__ __forceinline__ void run() {
    const ProblemParams& problem = params.problem;
    const WorkItem place = work_item<Heaviest::kFirst>(blockIdx.x, problem.num_kv_heads, problem.batch, params.tiles, 1,
                                                       params.section_heads);
    BackwardItem item = backward_item<C>(params, place, place.tile * C.tile_kv);
    const int end = min(item.first + C.tile_kv, item.kv_length);
    TileRange range{0, 0, 0, 0};
    if (end > item.first) {
      range = visible_tiles<C.band>(item.first, end, transposed(band_of(item)), item.q_length, C.tile_q);
    }
    RoundWalk<C.segments> walk{range.begin, range.end - range.begin, 0};
    if (walk.count > 0) walk.start = uniform(int(int64_t(place.tile) * params.rotation % walk.count));
    const bool ends_early = end < item.first + C.tile_kv;
    bool has_padding = C.lengths && ends_early;
    if constexpr (C.segments) {
      walk.others = problem.q_ranges + int64_t(item.batch) * ceil_div(problem.q_len, C.tile_q);
      walk.own = problem.kv_ranges[int64_t(item.batch) * params.tiles + place.tile];
      has_padding = has_padding || holds_padding(walk.own);
    }
    const int first_head = item.head * problem.group_size, heads_end = first_head + problem.group_size;
    const auto following = [&](Step step) {
      step.tile = walk.next();
      if (step.tile < 0 && step.head + 1 < heads_end) {
        walk.restart();
        step = {step.head + 1, walk.next()};
      }
      return step;
    };
    const auto flags_of = [&](Step step) {
      int flags = ends_early ? kLimitsAbove : 0;
      if constexpr (C.band) {
        flags |= step.tile < range.full_begin ? kLimitsAbove : 0;
        flags |= step.tile >= range.full_end ? kLimitsBelow : 0;
      }
      if constexpr (C.segments) flags |= segments_equal(walk.own, walk.others[step.tile]) ? 0 : kComparesSegments;
      return flags;
    };
    const auto has_empty_rows = [&](Step step) {
      if constexpr (!kEmptyRows) return false;
      if (step.tile < 0) return false;
      const int64_t head = int64_t(item.batch) * problem.num_heads + step.head;
      return params.row_flags[(head * params.rows_padded + step.tile * C.tile_q) / kStatisticsRows] != 0;
    };

    Step step{first_head, walk.next()};
    item.runs = step.tile >= 0;
    if (leads()) control.item = item;
    if (!item.runs) {
      if (leads()) arrive(&control.own_full);
      return;
    }
    load_keys(item, has_padding);
    bool empty_rows = has_empty_rows(step);
    while (step.tile >= 0) {
      const Step next = following(step);
      const bool next_empty_rows = has_empty_rows(next);  // read one step before it is needed
      load_queries(item, step, flags_of(step) | (next.tile < 0 ? kLastStep : 0), empty_rows);
      step = next;
      empty_rows = next_empty_rows;
    }
  }
};

}  // namespace jattn::sm90
