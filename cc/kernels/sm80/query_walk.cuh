// Gradients of scores, a tile of queries by one tile of keys after another: the loop of the kernels that own queries
// (backward_dq.cuh, backward_dslopes.cuh, backward_dcaptures.cuh). Built like the forward kernel: a warp owns whole
// rows of queries.
#pragma once

#include "attn/kv_range.cuh"
#include "attn/mask.cuh"
#include "attn/schedule.cuh"
#include "attn/score.cuh"
#include "attn/sequence.cuh"
#include "params.cuh"
#include "sm80/backward_shape.cuh"
#include "sm80/fragments.cuh"
#include "sm80/mask_words.cuh"
#include "sm80/score_gradient.cuh"
#include "sm80/tile_copy.cuh"

namespace jattn::sm80 {

// Slopes of the user's program for a warp's part of a tile.
template <Config kConfig>
using QuerySlopes = ProgramSlope<kConfig, kConfig.tile_q / kConfig.num_warps / 16, kConfig.tile_kv / 8>;

// The tile of queries that a block owns.
__device__ __forceinline__ WorkItem query_item(const BackwardParams& params, int block) {
  const ProblemParams& problem = params.problem;
  return work_item<Heaviest::kLast>(block, problem.num_heads, problem.batch, params.tiles, params.slices,
                                    params.section_heads);
}

// Calls use(ds, the tile of keys in shared memory, its number) for every tile of keys that the item's queries see, ds
// as score_gradient() makes it for the warp's rows, with `program`. Shared memory: backward_dq_shared_bytes().
template <Config kConfig, bool kToProducts, class Program, typename Use>
__device__ __forceinline__ void each_score_gradient(const BackwardParams& params, const WorkItem& item,
                                                    Program& program, const Use& use) {
  constexpr Element kElement = kConfig.element;
  constexpr int kThreads = backward_dq_threads(kConfig);
  constexpr int kTileQ = kConfig.tile_q, kTileKv = kConfig.tile_kv, kStages = kConfig.stages;
  constexpr int kD = kConfig.head_dim, kDv = kConfig.head_dim_v;
  constexpr int kWarpRows = kTileQ / kConfig.num_warps;
  constexpr int kM = kWarpRows / 16, kN = kTileKv / 8;
  constexpr bool kNarrow = kConfig.narrow_rows;
  static_assert(kWarpRows % 16 == 0 && kTileKv % 16 == 0 && kStages <= 2);
  using KeyTile = Tile<kElement, kD>;
  using ValueTile = Tile<kElement, kDv>;

  const uint32_t base = ptx::shared_base();
  const KeyTile q_tile{base};
  const ValueTile dout_tile{q_tile.address + KeyTile::bytes(kTileQ)};
  const uint32_t k_base = dout_tile.address + ValueTile::bytes(kTileQ);
  const uint32_t v_base = k_base + kStages * KeyTile::bytes(kTileKv);

  const ProblemParams& problem = params.problem;
  const int kv_head = uniform(item.head / problem.group_size);
  const int row_begin = item.tile * kTileQ;
  const Sequence sequence = sequence_of<kConfig>(problem, item.batch);

  TileRange range{0, 0, 0, 0};
  const int row_end = min(row_begin + kTileQ, sequence.q_length);
  if (row_begin < row_end) {
    range = visible_tiles<has_index_band(kConfig)>(row_begin, row_end, sequence.band, sequence.kv_length, kTileKv);
  }
  // Bias and program may make anything of queries beyond the length, and not everybody keeps rows apart.
  if (row_end < row_begin + kTileQ) range.full_end = range.full_begin;
  TileWalk<kConfig, MaskFilter<kConfig>> walk{range.begin};
  walk.filter.template load<false>(problem, item.batch, item.tile, sequence.band);
  walk.filter.look_at(params.mask, item.batch, item.head, item.tile);
  const int32_t* kv_segments = nullptr;
  if constexpr (kConfig.segments) kv_segments = problem.kv_segments + int64_t(item.batch) * problem.kv_len;
  const auto copy_keys = [&](int tile, int stage) {
    const bool padded = walk.filter.padding(tile);
    const auto sees_queries = [&](int row) { return kv_segments[row] >= 0; };
    load_tile<kElement, kD, kTileKv, kThreads, kNarrow, kConfig.segments>(
        KeyTile{k_base + stage * KeyTile::bytes(kTileKv)},
        head_rows<kElement>(problem.k, problem.kv_len, problem.num_kv_heads, problem.head_dim, item.batch, kv_head, 0,
                            problem.copy_bytes),
        tile * kTileKv, sequence.kv_length, padded, sees_queries);
    load_tile<kElement, kDv, kTileKv, kThreads, kNarrow, kConfig.segments>(
        ValueTile{v_base + stage * ValueTile::bytes(kTileKv)},
        head_rows<kElement>(problem.v, problem.kv_len, problem.num_kv_heads, problem.head_dim_v, item.batch, kv_head, 0,
                            problem.copy_bytes_v),
        tile * kTileKv, sequence.kv_length, padded, sees_queries);
  };

  const int warp_row = (threadIdx.x / 32) * kWarpRows;
  constexpr bool kStaged = kConfig.bias && kConfig.staged_bias;
  // A warp copies and reads its own rows only, so one tile is enough: it is filled again right after it was read.
  const PairTiles<kConfig> pairs{v_base + kStages * ValueTile::bytes(kTileKv)};
  const auto copy_pairs = [&](int tile) {
    pairs.template load<kWarpRows, 32>(problem, item.batch, item.head, row_begin + warp_row, tile * kTileKv, warp_row);
  };
  const auto q_operand = RowOperand<kElement, kD>::a(q_tile, warp_row);
  const auto dout_operand = RowOperand<kElement, kDv>::a(dout_tile, warp_row);
  RowGradientStatistics<kM> rows;
  rows.load(params, item.batch, item.head, row_begin + warp_row);

  int tile = walk.at_or_below(range.end - 1);
  if (tile >= 0) {
    load_query_tiles<kConfig, kThreads>(params, q_tile, dout_tile, item.batch, item.head, row_begin, sequence.q_length);
    if constexpr (kStages > 1) copy_keys(tile, 0);
    copy_pairs(tile);
    ptx::copy_commit();
  }
  int stage = 0;
  bool first = true;
  while (tile >= 0) {
    const int next = walk.at_or_below(tile - 1);
    if constexpr (kStages > 1) {
      ptx::copy_wait<0>();
      __syncthreads();  // this tile has landed; everyone is done with the stage that is filled next
      if (next >= 0) copy_keys(next, stage ^ 1);
      ptx::copy_commit();
    } else {
      __syncthreads();
      copy_keys(tile, 0);
      ptx::copy_commit();
      ptx::copy_wait<0>();
      __syncthreads();
    }
    if (first) {
      clear_empty_queries<kConfig>(params, rows, q_tile, dout_tile, item.batch, item.head, row_begin, warp_row);
      first = false;
    }
    const KeyTile k_tile{k_base + stage * KeyTile::bytes(kTileKv)};
    const ValueTile v_tile{v_base + stage * ValueTile::bytes(kTileKv)};
    float ds[kM][kN][4];
    score_gradient<kConfig>(
        ds, program, params, rows, sequence, item.batch, item.head, row_begin + warp_row, tile * kTileKv,
        range.full(tile), walk.filter.same_segment(tile), walk.filter.inside_band(tile), q_operand, dout_operand,
        RowOperand<kElement, kD>::b(k_tile, 0), RowOperand<kElement, kDv>::b(v_tile, 0), pairs, warp_row, kToProducts);
    if constexpr (kStaged) {
      __syncwarp();  // all lanes have read
      if (next >= 0) copy_pairs(next);
      ptx::copy_commit();
    }
    use(ds, k_tile, tile);
    if constexpr (kStages > 1) stage ^= 1;
    tile = next;
  }
}

}  // namespace jattn::sm80
