// Gradients with mma.sync and cp.async, for every device from sm_80 on: dk and dv, and in the fused form dq as well.
//
// Units of two families, with the header "sm80/backward.cuh", parameters BackwardParams, backward_threads and
// backward_min_blocks:
//   sm80_backward      backward<kConfig>      dk, dv, and dq into a float32 accumulator by reductions in memory
//   sm80_backward_dkv  backward_dkv<kConfig>  dk and dv only: the deterministic form, together with
//                                             sm80_backward_dq, or where no dq is wanted
//
// A block owns tile_kv keys of one key/value head (and one slice of the gradients' columns). It walks the queries of
// every head of the group, so that dk and dv are summed in registers. Scores are held transposed, keys along rows.
//
// Two ways to share the work among warps. With a warp that keeps its tile_kv / num_warps keys throughout, p and ds are
// operands of dv = p^T dout and dk = ds^T q as they stand, and only dq needs ds in shared memory. With shared_scores
// both pass through shared memory and every product is cut into the squarest parts, which need fewer reads of shared
// memory.
#pragma once

#include "attn/drop_pairs.cuh"
#include "attn/kv_range.cuh"
#include "attn/mask.cuh"
#include "attn/schedule.cuh"
#include "attn/score.cuh"
#include "attn/score_program.cuh"
#include "attn/sequence.cuh"
#include "params.cuh"
#include "sm80/backward_shape.cuh"
#include "sm80/fragments.cuh"
#include "sm80/mask_words.cuh"
#include "sm80/pair_tile.cuh"
#include "sm80/tile_copy.cuh"

namespace jattn::sm80 {

template <Config kConfig, bool kFused>
__device__ __forceinline__ void backward_keys(const BackwardParams& params) {
  constexpr Element kElement = kConfig.element;
  constexpr int kThreads = backward_threads(kConfig);
  constexpr int kTileQ = kConfig.tile_q, kTileKv = kConfig.tile_kv, kStages = kConfig.stages;
  constexpr int kD = kConfig.head_dim, kDv = kConfig.head_dim_v;
  constexpr int kSliceD = kD / kConfig.grad_slices, kSliceDv = kDv / kConfig.grad_slices;
  constexpr WarpGrid kScoreGrid = score_warps(kConfig);
  constexpr WarpGrid kDkGrid = key_gradient_warps(kConfig, kD), kDvGrid = key_gradient_warps(kConfig, kDv);
  static_assert(kScoreGrid.rows > 0 && kDkGrid.rows > 0 && kDvGrid.rows > 0);
  constexpr int kScoreRows = kTileKv / kScoreGrid.rows, kScoreColumns = kTileQ / kScoreGrid.columns;
  constexpr int kDkRows = kTileKv / kDkGrid.rows, kDkColumns = kSliceD / kDkGrid.columns;
  constexpr int kDvRows = kTileKv / kDvGrid.rows, kDvColumns = kSliceDv / kDvGrid.columns;
  constexpr int kM = kScoreRows / 16, kN = kScoreColumns / 8;
  constexpr bool kShared = kConfig.shared_scores;
  // Slices that start whole spans of the swizzle (128 bytes) have cheaper addresses.
  constexpr bool kWholeSpans =
      kSliceD * element_bytes(kElement) % 128 == 0 && kSliceDv * element_bytes(kElement) % 128 == 0;
  constexpr bool kAnyColumn = kShared || (kConfig.grad_slices > 1 && !kWholeSpans);
  constexpr bool kNarrow = kConfig.narrow_rows;
  // Without these features every row sees a key.
  constexpr bool kEmptyRows =
      kConfig.band || kConfig.lengths || kConfig.segments || kConfig.mask || kConfig.bias || kConfig.program;
  static_assert(kScoreRows % 16 == 0 && kTileQ % 16 == 0 && kRowPadding % kTileQ == 0);
  static_assert(kSliceD % 16 == 0 && kSliceDv % 16 == 0 && kStages <= 2);
  using KeyTile = Tile<kElement, kD>;        // of k and q
  using ValueTile = Tile<kElement, kDv>;     // of v and dout
  using ScoreTile = Tile<kElement, kTileQ>;  // ds and p, one row per key

  const uint32_t base = ptx::shared_base();
  const KeyTile k_tile{base};
  const ValueTile v_tile{k_tile.address + KeyTile::bytes(kTileKv)};
  const uint32_t q_base = v_tile.address + ValueTile::bytes(kTileKv);
  const uint32_t dout_base = q_base + kStages * KeyTile::bytes(kTileQ);
  const ScoreTile ds_tile{dout_base + kStages * ValueTile::bytes(kTileQ)};
  const ScoreTile p_tile{ds_tile.address + ScoreTile::bytes(kTileKv)};
  const uint32_t statistics_base = ds_tile.address + backward_score_tiles(kConfig, kFused) * ScoreTile::bytes(kTileKv);
  constexpr bool kStagedBias = kConfig.bias && kConfig.staged_bias;
  constexpr int kStagedBytes = staged_bias_bytes(kConfig);
  const uint32_t staged_base = statistics_base + kStages * backward_statistics_bytes(kConfig);
  const uint32_t saved = staged_base + kStages * kStagedBytes;

  const ProblemParams& problem = params.problem;
  const auto item_of = [&](int block) {
    return work_item<Heaviest::kFirst>(block, problem.num_kv_heads, problem.batch, params.tiles, kConfig.grad_slices,
                                       params.section_heads);
  };
  const WorkItem item = item_of(blockIdx.x);
  const int row_begin = item.tile * kTileKv;
  const Sequence sequence = sequence_of<kConfig>(problem, item.batch);
  const Band band = transposed(sequence.band);
  const int first_head = item.head * problem.group_size;

  TileRange range{0, 0, 0, 0};
  const int row_end = min(row_begin + kTileKv, sequence.kv_length);
  if (row_begin < row_end)
    range = visible_tiles<has_index_band(kConfig)>(row_begin, row_end, band, sequence.q_length, kTileQ);
  if (row_end < row_begin + kTileKv) range.full_end = range.full_begin;  // keys beyond the length must be masked

  TileWalk<kConfig, MaskFilter<kConfig>> walk{range.begin};
  walk.filter.template load<true>(problem, item.batch, item.tile, sequence.band);
  walk.filter.look_at(params.mask, item.batch, first_head, item.tile);
  const int32_t* q_segments = nullptr;
  const int32_t* kv_segments = nullptr;
  if constexpr (kConfig.segments) {
    q_segments = problem.q_segments + int64_t(item.batch) * problem.q_len;
    kv_segments = problem.kv_segments + int64_t(item.batch) * problem.kv_len;
  }

  if (threadIdx.x == 0) {
    save_rows(saved, head_rows<kElement>(problem.q, problem.q_len, problem.num_heads, problem.head_dim, item.batch,
                                         first_head, 0, problem.copy_bytes));
    save_rows(saved + kSavedBytes,
              head_rows<kElement>(params.dout, problem.q_len, problem.num_heads, problem.head_dim_v, item.batch,
                                  first_head, 0, problem.copy_bytes_v));
    ptx::store_shared_u32x4(saved + 2 * kSavedBytes,
                            make_uint4(range.full_begin, range.full_end, range.begin, range.end));
    ptx::store_shared_u32x2(saved + 3 * kSavedBytes, row_begin, item.batch * problem.num_heads + first_head);
  }
  __syncthreads();

  // The (head of the group, query tile) pairs in the order of the loop.
  struct Step {
    int member, tile;
  };
  // Each head has a mask of its own: some may have no tile.
  const auto next_head_with_tiles = [&](Step& step, int end) {
    while (step.tile < 0 && step.member + 1 < problem.group_size) {
      ++step.member;
      walk.filter.look_at(params.mask, item.batch, first_head + step.member, item.tile);
      walk.hits = 0;
      step.tile = walk.at_or_below(end - 1);
    }
  };
  const auto following = [&](Step step) {
    const uint2 limits = ptx::load_shared_u32x2(saved + 2 * kSavedBytes + 8);
    walk.begin = limits.x;
    step.tile = walk.at_or_below(step.tile - 1);
    if constexpr (kConfig.mask) {
      next_head_with_tiles(step, int(limits.y));
    } else if (step.tile < 0 && step.member + 1 < problem.group_size) {  // all heads have the same tiles
      ++step.member;
      step.tile = walk.at_or_below(int(limits.y) - 1);
    }
    return step;
  };
  const auto statistics_row = [&](Step step) {
    const int first_flat_head = ptx::load_shared_u32(saved + 3 * kSavedBytes + 4);
    return int64_t(first_flat_head + step.member) * params.rows_padded;
  };
  const auto head_of = [&](Step step) { return first_head + step.member; };
  const auto copy_queries = [&](Step step, int stage) {
    const int row0 = step.tile * kTileQ;
    GlobalRows q_rows = saved_rows(saved, problem.copy_bytes);
    q_rows.data += int64_t(step.member) * (problem.head_dim * element_bytes(kElement));
    load_tile<kElement, kD, kTileQ, kThreads, kNarrow, false>(KeyTile{q_base + stage * KeyTile::bytes(kTileQ)}, q_rows,
                                                              row0, sequence.q_length, false, EveryRow{});
    GlobalRows dout_rows = saved_rows(saved + kSavedBytes, problem.copy_bytes_v);
    dout_rows.data += int64_t(step.member) * (problem.head_dim_v * element_bytes(kElement));
    load_tile<kElement, kDv, kTileQ, kThreads, kNarrow, false>(ValueTile{dout_base + stage * ValueTile::bytes(kTileQ)},
                                                               dout_rows, row0, sequence.q_length, false, EveryRow{});
    PairTiles<kConfig>{staged_base + stage * kStagedBytes}.template load<kTileQ, kThreads>(
        problem, item.batch, head_of(step), row0, row_begin, 0);
    constexpr int kChunks = kTileQ / 4;  // 16 bytes each, of lse and of delta
#pragma unroll
    for (int first = 0; first < 2 * kChunks; first += kThreads) {
      const int chunk = first + threadIdx.x;
      if (2 * kChunks % kThreads == 0 || chunk < 2 * kChunks) {
        const float* source = (chunk < kChunks ? params.lse_log2 : params.delta) + statistics_row(step) + row0;
        ptx::copy_async<16>(statistics_base + stage * backward_statistics_bytes(kConfig) + chunk * 16,
                            source + chunk % kChunks * 4, true);
      }
    }
  };

  const int lane = threadIdx.x & 31;
  // The first row (column) of this warp's part of a product.
  const auto part_row = [](WarpGrid grid, int rows) { return ptx::thread_index_anew() / 32 / grid.columns * rows; };
  const auto part_column = [](WarpGrid grid, int columns) {
    return ptx::thread_index_anew() / 32 % grid.columns * columns;
  };
  const float factor = score_factor<kConfig>(problem);

  float dk[kDkRows / 16][kDkColumns / 8][4], dv[kDvRows / 16][kDvColumns / 8][4];
  clear(dk);
  clear(dv);

  Step step{0, walk.at_or_below(range.end - 1)};
  if constexpr (kConfig.mask) next_head_with_tiles(step, range.end);
  if (step.tile >= 0) {
    const bool padded = walk.filter.own_padding();
    const auto sees_queries = [&](int row) { return kv_segments[row] >= 0; };
    load_tile<kElement, kD, kTileKv, kThreads, kNarrow, kConfig.segments>(
        k_tile,
        head_rows<kElement>(problem.k, problem.kv_len, problem.num_kv_heads, problem.head_dim, item.batch, item.head, 0,
                            problem.copy_bytes),
        row_begin, sequence.kv_length, padded, sees_queries);
    load_tile<kElement, kDv, kTileKv, kThreads, kNarrow, kConfig.segments>(
        v_tile,
        head_rows<kElement>(problem.v, problem.kv_len, problem.num_kv_heads, problem.head_dim_v, item.batch, item.head,
                            0, problem.copy_bytes_v),
        row_begin, sequence.kv_length, padded, sees_queries);
    if constexpr (kStages > 1) copy_queries(step, 0);
    ptx::copy_commit();
  }
  int stage = 0;
  while (step.tile >= 0) {
    const Step next = following(step);
    if constexpr (kStages > 1) {
      ptx::copy_wait<0>();
      __syncthreads();  // this tile has landed; everyone is done with the stage that is filled next
      if (next.tile >= 0) copy_queries(next, stage ^ 1);
      ptx::copy_commit();
    } else {
      __syncthreads();
      copy_queries(step, 0);
      ptx::copy_commit();
      ptx::copy_wait<0>();
      __syncthreads();
    }
    const KeyTile q_tile{q_base + stage * KeyTile::bytes(kTileQ)};
    const ValueTile dout_tile{dout_base + stage * ValueTile::bytes(kTileQ)};
    const uint32_t statistics = statistics_base + stage * backward_statistics_bytes(kConfig);
    const int warp_row = part_row(kScoreGrid, kScoreRows), warp_column = part_column(kScoreGrid, kScoreColumns);

    if constexpr (kEmptyRows) {
      // Rows that see no key (lse is +inf) and may hold anything: every warp finds the same answer.
      bool any_empty = false;
#pragma unroll
      for (int first = 0; first < kTileQ; first += 64) {
        if (kTileQ % 64 == 0 || first + 2 * lane < kTileQ) {
          const float2 lse = ptx::load_shared_f32x2(statistics + (first + 2 * lane) * 4);
          any_empty |= lse.x == infinity() || lse.y == infinity();
        }
      }
      if (__any_sync(0xffffffffu, any_empty)) {
        const auto empty = [&](int row) { return ptx::load_shared_f32(statistics + row * 4) == infinity(); };
        clear_rows<kElement, kD, kTileQ, kThreads>(q_tile, 0, empty);
        clear_rows<kElement, kDv, kTileQ, kThreads>(dout_tile, 0, empty);
        __syncthreads();
      }
    }

    MaskWords<kConfig.mask, kM> mask_words;
    mask_words.load(params.mask, item.batch, head_of(step), row_begin + warp_row, step.tile, warp_column);
    float s[kM][kN][4];  // rows: keys, columns: queries
    clear(s);
    multiply_rows<kConfig.tf32_chain>(s, RowOperand<kElement, kD>::a(k_tile, warp_row),
                                      RowOperand<kElement, kD>::b(q_tile, warp_column));
    const int row0 = row_begin + warp_row, column0 = step.tile * kTileQ + warp_column;
    constexpr bool kNatural = kConfig.program;
    scale_scores<kConfig, kNatural>(s, problem);
    SoftcapDerivative<kConfig, kM, kN> derivative;
    derivative.template keep<kNatural>(s, problem);
    const PairTiles<kConfig> pairs{staged_base + stage * kStagedBytes};
    if constexpr (kStagedBias) {
      add_bias_columns<kConfig.bias_element, kNatural>(s, pairs.bias(), warp_row, warp_column,
                                                       bias_scale<kConfig>(problem));
    } else if constexpr (kConfig.bias) {
      add_bias<kConfig, true, kNatural>(s, problem, item.batch, head_of(step), row0, column0);
    }
    if constexpr (kConfig.alibi) {
      add_slopes<kConfig, true, kNatural>(s, problem, item.batch, head_of(step), band.offset, row0, column0);
    }
    ProgramSlope<kConfig, kM, kN> slope;
    slope.template apply_program<true, kNatural>(s, problem, item.batch, head_of(step), row0, column0);
    if constexpr (kNatural) natural_to_log2(s);
    const uint2 full = ptx::load_shared_u32x2(saved + 2 * kSavedBytes);
    bool hides = step.tile < int(full.x) || step.tile >= int(full.y);  // some pairs
    if (hides) {
      const int mask_row = ptx::load_shared_u32(saved + 3 * kSavedBytes) + warp_row;
      mask_limits<kConfig, true>(s, band, sequence.kv_length, sequence.q_length, mask_row, column0);
    }
    if constexpr (kConfig.segments) {
      if (!walk.filter.same_segment(step.tile)) {
        hides = true;
        mask_segments(s, kv_segments, q_segments, problem.kv_len, problem.q_len, row0, column0);
      }
    }
    if constexpr (has_position_band(kConfig)) {
      if (!walk.filter.inside_band(step.tile)) {
        hides = true;
        mask_positions<true>(s, problem, item.batch, band, row0, column0);
      }
    }
    hides |= mask_words.apply(s);
    if constexpr (kConfig.program) hides = true;  // the program may hide any pair

    // lse is +inf in rows that see no key: their probabilities are 0.
    const uint32_t lse_address = statistics + (warp_column + (lane & 3) * 2) * 4;
    const uint32_t delta_address = lse_address + kTileQ * 4;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float2 lse = ptx::load_shared_f32x2(lse_address + n * 32);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          s[m][n][2 * h] = weight_of<kConfig>(s[m][n][2 * h], factor, lse.x);
          s[m][n][2 * h + 1] = weight_of<kConfig>(s[m][n][2 * h + 1], factor, lse.y);
        }
      }
    }
    // A dropped pair is marked by the sign of its probability: dv takes it for 0, ds needs the probability.
    float drop_factor = 1.0f;
    if constexpr (kConfig.dropout) {
      const Dropout dropout = dropout_of<kConfig>(problem, item.batch, head_of(step));
      drop_factor = dropout.factor;
      each_drop<kConfig, true, kM, kN>(problem, dropout, item.batch, head_of(step), row0, column0,
                                       [&](int m, int n, int h, int e, bool dropped) {
                                         float& p = s[m][n][2 * h + e];
                                         if (dropped) p = __uint_as_float(__float_as_uint(p) | 0x80000000u);
                                       });
    }
    float ones[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) ones[m][0] = ones[m][1] = 1.0f;
    if constexpr (kShared) {
      stage_accumulator<kConfig.dropout>(p_tile, s, ones, warp_row, warp_column);
    } else {
      multiply_accumulator<kConfig.tf32_chain, kConfig.dropout>(
          dv, s, ColumnOperand<kElement, kDv, kAnyColumn>(dout_tile, 0, item.slice * kSliceDv, false));
    }

    // dp in parts of at most 64 queries: all of it beside s would not fit into registers at 128.
    constexpr int kPartN = kN < 8 ? kN : 8;
    static_assert(kN % kPartN == 0);
#pragma unroll
    for (int first = 0; first < kN; first += kPartN) {
      float dp[kM][kPartN][4];
      clear(dp);
      multiply_rows<kConfig.tf32_chain>(dp, RowOperand<kElement, kDv>::a(v_tile, warp_row),
                                        RowOperand<kElement, kDv>::b(dout_tile, warp_column + first * 8));
      const auto make_gradients = [&]<bool kHides>() {
#pragma unroll
        for (int n = 0; n < kPartN; ++n) {
          const float2 delta = ptx::load_shared_f32x2(delta_address + (first + n) * 32);
#pragma unroll
          for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              float& left = s[m][first + n][2 * h];
              float& right = s[m][first + n][2 * h + 1];
              if constexpr (kConfig.dropout) {
                left = marked_gradient<kHides>(left, dp[m][n][2 * h], drop_factor, delta.x);
                right = marked_gradient<kHides>(right, dp[m][n][2 * h + 1], drop_factor, delta.y);
              } else {
                left = pair_gradient<kHides>(left, dp[m][n][2 * h], delta.x);
                right = pair_gradient<kHides>(right, dp[m][n][2 * h + 1], delta.y);
              }
            }
          }
        }
      };
      if (hides) {
        make_gradients.template operator()<true>();
      } else {
        make_gradients.template operator()<false>();
      }
    }
    slope.apply(s);
    derivative.apply(s);
    if constexpr (kFused || kShared) stage_accumulator(ds_tile, s, ones, warp_row, warp_column);

    if constexpr (kShared) {
      __syncthreads();  // all of p and ds is there
      multiply_row_column<kConfig.tf32_chain, kElement, kTileQ>(
          dv, RowOperand<kElement, kTileQ>::paired(p_tile, part_row(kDvGrid, kDvRows)),
          ColumnOperand<kElement, kDv, true>(dout_tile, 0, item.slice * kSliceDv + part_column(kDvGrid, kDvColumns),
                                             false));
      multiply_row_column<kConfig.tf32_chain, kElement, kTileQ>(
          dk, RowOperand<kElement, kTileQ>::paired(ds_tile, part_row(kDkGrid, kDkRows)),
          ColumnOperand<kElement, kD, true>(q_tile, 0, item.slice * kSliceD + part_column(kDkGrid, kDkColumns), false));
    } else {
      multiply_accumulator<kConfig.tf32_chain>(
          dk, s, ColumnOperand<kElement, kD, kAnyColumn>(q_tile, 0, item.slice * kSliceD, false));
      if constexpr (kFused) __syncthreads();  // all of ds is there
    }

    if constexpr (kFused) {
      constexpr WarpGrid kGrid = dq_warps(kConfig);
      static_assert(kGrid.rows > 0);
      constexpr int kPartRows = kTileQ / kGrid.rows, kPartColumns = kSliceD / kGrid.columns;
      constexpr int kMq = kPartRows / 16, kNq = kPartColumns / 8;
      float dq[kMq][kNq][4];
      clear(dq);
      multiply_columns<kConfig.tf32_chain, kElement, kTileKv>(
          dq, ColumnOperand<kElement, kTileQ, true>(ds_tile, 0, part_row(kGrid, kPartRows), true),
          ColumnOperand<kElement, kD, true>(k_tile, 0, item.slice * kSliceD + part_column(kGrid, kPartColumns), false));
      // Fragment order: a warp's instruction covers 512 contiguous bytes. cast_grad puts it straight.
      const int thread = ptx::thread_index_anew();
      float* target = params.dq_accumulator + statistics_row(step) * kD + int64_t(step.tile) * (kTileQ * kD) +
                      item.slice * (kTileQ * kSliceD) + thread / 32 * (kPartRows * kPartColumns) + thread % 32 * 4;
#pragma unroll
      for (int m = 0; m < kMq; ++m) {
#pragma unroll
        for (int n = 0; n < kNq; ++n) ptx::reduce_add(target + (m * kNq + n) * 128, dq[m][n]);
      }
    }
    if constexpr (kStages > 1) stage ^= 1;
    step = next;
  }

  ptx::copy_wait<0>();
  __syncthreads();  // the staging tiles lie where other warps may still read
  const WorkItem end_item = item_of(ptx::block_index_anew());
  const int end_row = end_item.tile * kTileKv;
  const int kv_length = sequence_of<kConfig>(problem, end_item.batch).kv_length;
  const Tile<kElement, kSliceD> dk_staging{k_tile.address};
  const Tile<kElement, kSliceDv> dv_staging{v_tile.address};
  float dk_factor[kDkRows / 16][2], dv_factor[kDvRows / 16][2];
  row_factors(dk_factor, end_row + part_row(kDkGrid, kDkRows), kv_length, problem.scale);
  float dv_scale = 1.0f;
  if constexpr (kConfig.dropout)
    dv_scale = dropout_of<kConfig>(problem, end_item.batch, 0).factor;  // alike for all heads
  row_factors(dv_factor, end_row + part_row(kDvGrid, kDvRows), kv_length, dv_scale);
  stage_accumulator(dk_staging, dk, dk_factor, part_row(kDkGrid, kDkRows), part_column(kDkGrid, kDkColumns));
  stage_accumulator(dv_staging, dv, dv_factor, part_row(kDvGrid, kDvRows), part_column(kDvGrid, kDvColumns));
  __syncthreads();
  if (params.dk != nullptr) {
    const GlobalRows rows =
        head_rows<kElement>(params.dk, problem.kv_len, problem.num_kv_heads, problem.head_dim, end_item.batch,
                            end_item.head, end_item.slice * kSliceD, problem.copy_bytes);
    store_tile<kElement, kSliceD, kTileKv, kThreads, kNarrow>(dk_staging, rows, 0, end_row, problem.kv_len);
  }
  if (params.dv != nullptr) {
    const GlobalRows rows =
        head_rows<kElement>(params.dv, problem.kv_len, problem.num_kv_heads, problem.head_dim_v, end_item.batch,
                            end_item.head, end_item.slice * kSliceDv, problem.copy_bytes_v);
    store_tile<kElement, kSliceDv, kTileKv, kThreads, kNarrow>(dv_staging, rows, 0, end_row, problem.kv_len);
  }
}

template <Config kConfig>
__device__ __forceinline__ void backward(const BackwardParams& params) {
  backward_keys<kConfig, true>(params);
}

template <Config kConfig>
__device__ __forceinline__ void backward_dkv(const BackwardParams& params) {
  backward_keys<kConfig, false>(params);
}

}  // namespace jattn::sm80
