// Forward attention with mma.sync and cp.async, for every device from sm_80 on.
//
// Unit of the family sm80_forward, parameters ForwardParams, forward_threads and forward_min_blocks. Any element type.
// Definition of the result: core/problem.h.
//
// A block owns tile_q queries of one head and head_dim_v columns of the result, maybe not all; a warp owns tile_q /
// num_warps of the rows, whole, so that statistics never leave a quad. Key tiles are walked from the last to the first:
// masked ones come first. Q stays in shared memory: a warp of 32 rows has no registers left for it.
#pragma once

#include "attn/drop_pairs.cuh"
#include "attn/kv_range.cuh"
#include "attn/mask.cuh"
#include "attn/schedule.cuh"
#include "attn/score.cuh"
#include "attn/score_program.cuh"
#include "attn/sequence.cuh"
#include "attn/softmax.cuh"
#include "params.cuh"
#include "sm80/forward_shape.cuh"
#include "sm80/fragments.cuh"
#include "sm80/mask_words.cuh"
#include "sm80/pair_tile.cuh"
#include "sm80/tile_copy.cuh"

namespace jattn::sm80 {

template <Config kConfig>
__device__ __forceinline__ void forward(const ForwardParams& params) {
  constexpr Element kElement = kConfig.element;
  constexpr int kThreads = forward_threads(kConfig);
  constexpr int kTileQ = kConfig.tile_q, kTileKv = kConfig.tile_kv;
  constexpr int kD = kConfig.head_dim, kDv = kConfig.head_dim_v;
  constexpr int kWarpRows = kTileQ / kConfig.num_warps;
  constexpr int kM = kWarpRows / 16, kN = kTileKv / 8, kNOut = kDv / 8;
  static_assert(kWarpRows % 16 == 0 && kTileKv % 16 == 0);
  using KeyTile = Tile<kElement, kD>;
  using ValueTile = Tile<kElement, kDv>;

  const uint32_t base = ptx::shared_base();
  const KeyTile q_tile{base};
  constexpr int kKeyBytes = KeyTile::bytes(kTileKv), kValueBytes = ValueTile::bytes(kTileKv);
  const uint32_t k_base = base + KeyTile::bytes(kTileQ);
  const uint32_t v_base = k_base + kConfig.stages * kKeyBytes;

  const ProblemParams& problem = params.problem;
  const auto item_of = [&](int block) {
    return work_item<Heaviest::kLast>(block, problem.num_heads, problem.batch, params.tiles, params.slices,
                                      params.section_heads);
  };
  const WorkItem item = item_of(blockIdx.x);
  const int kv_head = uniform(item.head / problem.group_size);
  const int row_begin = item.tile * kTileQ;
  const Sequence sequence = sequence_of<kConfig>(problem, item.batch);

  const GlobalRows q_rows = head_rows<kElement>(problem.q, problem.q_len, problem.num_heads, problem.head_dim,
                                                item.batch, item.head, 0, problem.copy_bytes);
  const GlobalRows k_rows = head_rows<kElement>(problem.k, problem.kv_len, problem.num_kv_heads, problem.head_dim,
                                                item.batch, kv_head, 0, problem.copy_bytes);
  const GlobalRows v_rows = head_rows<kElement>(problem.v, problem.kv_len, problem.num_kv_heads, problem.head_dim_v,
                                                item.batch, kv_head, item.slice * kDv, problem.copy_bytes_v);

  const int row_end = min(row_begin + kTileQ, sequence.q_length);
  TileRange range{0, 0, 0, 0};
  if (row_begin < row_end) {
    range = visible_tiles<has_index_band(kConfig)>(row_begin, row_end, sequence.band, sequence.kv_length, kTileKv);
  }
  TileWalk<kConfig, MaskFilter<kConfig>> walk{range.begin};
  walk.filter.template load<false>(problem, item.batch, item.tile, sequence.band);
  walk.filter.look_at(params.mask, item.batch, item.head, item.tile);
  const int32_t* kv_segments = nullptr;
  if constexpr (kConfig.segments) kv_segments = problem.kv_segments + int64_t(item.batch) * problem.kv_len;

  constexpr bool kStagedBias = kConfig.bias && kConfig.staged_bias;
  const uint32_t staged = base + forward_shared_bytes(kConfig) - forward_saved_bytes() - staged_bias_bytes(kConfig);
  const PairTiles<kConfig> pairs{staged};
  // A warp copies and reads its own rows only, so one tile is enough: it is filled again right after it was read.
  const auto copy_pairs = [&](int tile) {
    const int first = ptx::thread_index_anew() / 32 * kWarpRows;
    pairs.template load<kWarpRows, 32>(problem, item.batch, item.head, row_begin + first, tile * kTileKv, first);
  };

  const uint32_t saved = base + forward_shared_bytes(kConfig) - forward_saved_bytes();
  if (threadIdx.x == 0) {
    save_rows(saved, k_rows);
    save_rows(saved + kSavedBytes, v_rows);
    ptx::store_shared_u32x4(saved + 2 * kSavedBytes,
                            make_uint4(range.full_begin, range.full_end, row_begin, range.begin));
  }
  __syncthreads();

  const auto copy_keys = [&](int tile, int stage, bool padded) {
    load_tile<kElement, kD, kTileKv, kThreads, kConfig.narrow_rows, kConfig.segments>(
        KeyTile{k_base + stage * kKeyBytes}, saved_rows(saved, problem.copy_bytes), tile * kTileKv, sequence.kv_length,
        padded, [&](int row) { return kv_segments[row] >= 0; });
  };
  const auto copy_values = [&](int tile, int stage, bool padded) {
    load_tile<kElement, kDv, kTileKv, kThreads, kConfig.narrow_rows, kConfig.segments>(
        ValueTile{v_base + stage * kValueBytes}, saved_rows(saved + kSavedBytes, problem.copy_bytes_v), tile * kTileKv,
        sequence.kv_length, padded, [&](int row) { return kv_segments[row] >= 0; });
  };
  const auto padded = [&](int tile) { return walk.filter.padding(tile); };

  const int warp_row = (threadIdx.x / 32) * kWarpRows;

  float out[kM][kNOut][4];
  clear(out);
  RowStatistics<kM> rows;
  rows.reset();
  constexpr bool kNatural = has_natural_scores(kConfig);
  const float factor = score_factor<kConfig, kNatural>(problem);

  int tile = walk.at_or_below(range.end - 1);
  if (tile >= 0) {
    load_tile<kElement, kD, kTileQ, kThreads, kConfig.narrow_rows, false>(q_tile, q_rows, row_begin, sequence.q_length,
                                                                          false, EveryRow{});
    const bool ask = padded(tile);
    copy_keys(tile, 0, ask);
    if constexpr (kConfig.stages > 1) copy_values(tile, 0, ask);
    copy_pairs(tile);
    ptx::copy_commit();
  }
  int stage = 0;
  while (tile >= 0) {
    walk.begin = ptx::load_shared_u32(saved + 2 * kSavedBytes + 12);
    const int next = walk.at_or_below(tile - 1);
    ptx::copy_wait<0>();
    __syncthreads();  // this tile has landed; everyone is done with the stage that is filled next
    if constexpr (kConfig.stages > 1) {
      if (next >= 0) {
        const bool ask = padded(next);
        copy_keys(next, stage ^ 1, ask);
        copy_values(next, stage ^ 1, ask);
      }
    } else {
      copy_values(tile, 0, padded(tile));
    }
    ptx::copy_commit();

    MaskWords<kConfig.mask, kM> mask_words;
    mask_words.load(params.mask, item.batch, item.head, row_begin + warp_row, tile, 0);
    float s[kM][kN][4];
    clear(s);
    multiply_rows<kConfig.tf32_chain>(s, RowOperand<kElement, kD>::a(q_tile, warp_row),
                                      RowOperand<kElement, kD>::b(KeyTile{k_base + stage * kKeyBytes}, 0));

    if constexpr (kConfig.stages == 1) {
      ptx::copy_wait<0>();
      __syncthreads();  // the values have landed; everyone is done with the keys
      if (next >= 0) copy_keys(next, 0, padded(next));
      ptx::copy_commit();
    }

    const int column0 = tile * kTileKv;
    const int row0 = row_begin + warp_row;
    scale_scores<kConfig, kNatural>(s, problem);
    if constexpr (kStagedBias) {
      add_bias_rows<kConfig.bias_element, kNatural>(s, pairs.bias(), warp_row, bias_scale<kConfig>(problem));
    } else if constexpr (kConfig.bias) {
      add_bias<kConfig, false, kNatural>(s, problem, item.batch, item.head, row0, column0);
    }
    if constexpr (kConfig.alibi) {
      add_slopes<kConfig, false, kNatural>(s, problem, item.batch, item.head, sequence.band.offset, row0, column0);
    }
    apply_program<kConfig, false, kNatural>(s, problem, item.batch, item.head, row0, column0);
    const uint2 full = ptx::load_shared_u32x2(saved + 2 * kSavedBytes);
    if (tile < int(full.x) || tile >= int(full.y)) {
      mask_limits<kConfig, false>(
          s, sequence.band, sequence.q_length, sequence.kv_length,
          int(ptx::load_shared_u32(saved + 2 * kSavedBytes + 8)) + ptx::thread_index_anew() / 32 * kWarpRows, column0);
    }
    if constexpr (kConfig.segments) {
      if (!walk.filter.same_segment(tile)) {
        mask_segments(s, problem.q_segments + int64_t(item.batch) * problem.q_len, kv_segments, problem.q_len,
                      problem.kv_len, row0, column0);
      }
    }
    if constexpr (has_position_band(kConfig)) {
      if (!walk.filter.inside_band(tile)) {
        mask_positions<false>(s, problem, item.batch, sequence.band, row0, column0);
      }
    }
    mask_words.apply(s);
    if constexpr (kStagedBias) {
      __syncwarp();  // all lanes have read
      if (next >= 0) copy_pairs(next);
      ptx::copy_commit();
    }

    softmax_step(s, out, rows, factor);
    if constexpr (kConfig.dropout) {
      const Dropout dropout = dropout_of<kConfig>(problem, item.batch, item.head);
      each_drop<kConfig, false, kM, kN>(problem, dropout, item.batch, item.head, row0, column0,
                                        [&](int m, int n, int h, int e, bool dropped) {
                                          if (dropped) s[m][n][2 * h + e] = 0.0f;
                                        });
    }
    multiply_accumulator<kConfig.tf32_chain>(
        out, s, ColumnOperand<kElement, kDv>(ValueTile{v_base + stage * kValueBytes}, 0, 0, false));

    if constexpr (kConfig.stages > 1) stage ^= 1;
    if constexpr (MaskFilter<kConfig>::kActive || !kConfig.band) {
      tile = next;
    } else {  // found anew: the masks need the register (one spill less at head dim 128)
      walk.begin = ptx::load_shared_u32(saved + 2 * kSavedBytes + 12);
      tile = walk.at_or_below(tile - 1);
    }
  }

  // Everything below is computed anew: kept across the loop it would cost registers that the loop has not got.
  const WorkItem end_item = item_of(ptx::block_index_anew());
  const int end_row = end_item.tile * kTileQ + warp_row;
  const int q_length = sequence_of<kConfig>(problem, end_item.batch).q_length;
  const int lane = threadIdx.x & 31;
  float drop_factor = 1.0f;
  if constexpr (kConfig.dropout) drop_factor = dropout_of<kConfig>(problem, end_item.batch, end_item.head).factor;
  float sink = 0.0f;
  if constexpr (kConfig.sinks) {
    sink = __ldg(element_of_head(problem.sinks, end_item.batch, end_item.head));
  }
  float inverse[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = end_row + 16 * m + 8 * h + (lane >> 2);
      RowResult result = kConfig.sinks
                             ? finish_row_with_sink<kNatural>(rows.row_max[m][h], rows.row_sum[m][h], factor, sink)
                             : finish_row<kNatural>(rows.row_max[m][h], rows.row_sum[m][h], factor);
      if (row >= q_length) result = {0.0f, -infinity()};
      inverse[m][h] = result.inverse_sum * drop_factor;
      if (end_item.slice == 0 && (lane & 3) == 0 && row < problem.q_len) {
        params.lse[(int64_t(end_item.batch) * problem.num_heads + end_item.head) * problem.q_len + row] = result.lse;
      }
    }
  }
  ptx::copy_wait<0>();
  __syncthreads();  // the staging tile lies where other warps may still read K
  const ValueTile staging{base};
  stage_accumulator(staging, out, inverse, warp_row, 0);
  __syncwarp();
  const GlobalRows out_rows =
      head_rows<kElement>(params.out, problem.q_len, problem.num_heads, problem.head_dim_v, end_item.batch,
                          end_item.head, end_item.slice * kDv, problem.copy_bytes_v);
  store_tile<kElement, kDv, kWarpRows, 32, kConfig.narrow_rows>(staging, out_rows, warp_row, end_row, problem.q_len);
}

}  // namespace jattn::sm80
