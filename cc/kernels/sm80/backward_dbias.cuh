// dbias: the gradient of the scores, summed over the axes that the bias is broadcast along.
//
// Unit of the family sm80_backward_dbias: header "sm80/backward_dbias.cuh", parameters DbiasParams, entry
// backward_dbias<kConfig>, backward_dbias_threads, backward_dbias_min_blocks.
//
// A block owns one tile of the bias (the whole axis where it is broadcast over queries or keys) and walks the score
// tiles that add to it in a fixed order, with the sum in registers: two products per step, no reductions in memory, the
// same bits every time. Where the bias has too few tiles to fill a device, `splits` blocks share one and write partial
// sums, which passes/sum_partials.cuh adds in order.
#pragma once

#include "attn/dbias_work.cuh"
#include "attn/kv_range.cuh"
#include "attn/sequence.cuh"
#include "base/integers.cuh"
#include "params.cuh"
#include "sm80/backward_shape.cuh"
#include "sm80/fragments.cuh"
#include "sm80/mask_words.cuh"
#include "sm80/score_gradient.cuh"
#include "sm80/tile_copy.cuh"

namespace jattn::sm80 {

template <Config kConfig>
__device__ __forceinline__ void backward_dbias(const DbiasParams& dbias) {
  constexpr Element kElement = kConfig.element;
  using BiasTraits = ElementTraits<kConfig.bias_element>;
  constexpr int kThreads = backward_dbias_threads(kConfig), kWarps = kConfig.num_warps;
  constexpr int kTileQ = kConfig.tile_q, kTileKv = kConfig.tile_kv;
  constexpr int kD = kConfig.head_dim, kDv = kConfig.head_dim_v;
  constexpr int kWarpRows = kTileQ / kWarps;
  constexpr int kM = kWarpRows / 16, kN = kTileKv / 8;
  static_assert(kConfig.bias && kWarpRows % 16 == 0 && kTileKv % 16 == 0);
  using KeyTile = Tile<kElement, kD>;
  using ValueTile = Tile<kElement, kDv>;

  extern __shared__ __align__(1024) unsigned char shared[];
  const KeyTile q_tile{ptx::shared_address(shared)};
  const ValueTile dout_tile{q_tile.address + KeyTile::bytes(kTileQ)};
  const KeyTile k_tile{dout_tile.address + ValueTile::bytes(kTileQ)};
  const ValueTile v_tile{k_tile.address + KeyTile::bytes(kTileKv)};

  const PairTiles<kConfig> pairs{v_tile.address + ValueTile::bytes(kTileKv)};

  const BackwardParams& params = dbias.backward;
  const ProblemParams& problem = params.problem;
  const DbiasWork work(dbias.bias, problem, kTileQ, kTileKv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  const int warp_row = warp * kWarpRows;
  const auto q_operand = RowOperand<kElement, kD>::a(q_tile, warp_row);
  const auto dout_operand = RowOperand<kElement, kDv>::a(dout_tile, warp_row);
  const auto k_operand = RowOperand<kElement, kD>::b(k_tile, 0);
  const auto v_operand = RowOperand<kElement, kDv>::b(v_tile, 0);

  float sum[kM][kN][4];
  clear(sum);
  int loaded_batch = -1, loaded_head = -1, loaded_q_tile = -1, loaded_kv_tile = -1;
  for (int64_t index = work.split; index < work.steps; index += dbias.bias.splits) {
    const auto [kv_tile, q_tile_index, head, batch] = work.step(index);
    const Sequence sequence = sequence_of<kConfig>(problem, batch);
    const int row_begin = q_tile_index * kTileQ;
    const int row_end = min(row_begin + kTileQ, sequence.q_length);
    if (row_begin >= row_end) continue;
    const TileRange range =
        visible_tiles<has_index_band(kConfig)>(row_begin, row_end, sequence.band, sequence.kv_length, kTileKv);
    if (kv_tile < range.begin || kv_tile >= range.end) continue;
    MaskFilter<kConfig> filter;
    filter.template load<false>(problem, batch, q_tile_index, sequence.band);
    filter.look_at(params.mask, batch, head, q_tile_index);
    if (!filter.meets(kv_tile)) continue;

    const bool same_queries = batch == loaded_batch && head == loaded_head && q_tile_index == loaded_q_tile;
    const int kv_head = head / problem.group_size;
    const bool same_keys = batch == loaded_batch && loaded_head >= 0 && kv_head == loaded_head / problem.group_size &&
                           kv_tile == loaded_kv_tile;
    __syncthreads();  // everyone is done with the tiles of the step before
    if (!same_queries) {
      load_query_tiles<kConfig, kThreads>(params, q_tile, dout_tile, batch, head, row_begin, sequence.q_length);
    }
    if (!same_keys) {
      const int32_t* kv_segments = problem.kv_segments + int64_t(batch) * problem.kv_len;
      const auto sees_queries = [&](int row) { return kv_segments[row] >= 0; };
      load_tile<kElement, kD, kTileKv, kThreads, kConfig.narrow_rows, kConfig.segments>(
          k_tile,
          head_rows<kElement>(problem.k, problem.kv_len, problem.num_kv_heads, problem.head_dim, batch, kv_head, 0,
                              problem.copy_bytes),
          kv_tile * kTileKv, sequence.kv_length, filter.padding(kv_tile), sees_queries);
      load_tile<kElement, kDv, kTileKv, kThreads, kConfig.narrow_rows, kConfig.segments>(
          v_tile,
          head_rows<kElement>(problem.v, problem.kv_len, problem.num_kv_heads, problem.head_dim_v, batch, kv_head, 0,
                              problem.copy_bytes_v),
          kv_tile * kTileKv, sequence.kv_length, filter.padding(kv_tile), sees_queries);
    }
    pairs.template load<kTileQ, kThreads>(problem, batch, head, row_begin, kv_tile * kTileKv, 0);
    loaded_batch = batch, loaded_head = head, loaded_q_tile = q_tile_index, loaded_kv_tile = kv_tile;
    ptx::copy_commit();
    RowGradientStatistics<kM> rows;
    rows.load(params, batch, head, row_begin + warp_row);
    ptx::copy_wait<0>();
    __syncthreads();
    if (!same_queries) {
      clear_empty_queries<kConfig>(params, rows, q_tile, dout_tile, batch, head, row_begin, warp_row);
    }

    // The bias of rows beyond the length may hold anything, and dbias has these rows.
    const bool full = range.full(kv_tile) && row_end == row_begin + kTileQ;
    float ds[kM][kN][4];
    ProgramSlope<kConfig, kM, kN> slopes;
    score_gradient<kConfig>(ds, slopes, params, rows, sequence, batch, head, row_begin + warp_row, kv_tile * kTileKv,
                            full, filter.same_segment(kv_tile), filter.inside_band(kv_tile), q_operand, dout_operand,
                            k_operand, v_operand, pairs, warp_row, false);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[m][n][e] += ds[m][n][e];
      }
    }
  }

  const int64_t base = work.batch * problem.bias.stride_batch + work.head * problem.bias.stride_head;
  const auto write = [&](int64_t index, float x) {
    if (dbias.bias.splits == 1) {
      static_cast<typename BiasTraits::Storage*>(dbias.bias.result)[index] = BiasTraits::from_float(x);
    } else {
      dbias.bias.partials[work.split * dbias.bias.bias_elements + index] = x;
    }
  };
  const int row0 = work.q_tile * kTileQ + warp_row + (lane >> 2), column0 = work.kv_tile * kTileKv + 2 * (lane & 3);
  if (!work.all_queries && !work.all_keys) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = row0 + 16 * m + 8 * (e / 2), column = column0 + 8 * n + e % 2;
          if (row < problem.q_len && column < problem.kv_len) {
            write(base + row * problem.bias.stride_query + column * problem.bias.stride_key, sum[m][n][e]);
          }
        }
      }
    }
    return;
  }
  if (!work.all_queries) {  // a sum per row
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float x = 0.0f;
#pragma unroll
        for (int n = 0; n < kN; ++n) x += sum[m][n][2 * h] + sum[m][n][2 * h + 1];
        x = quad_sum(x);
        const int row = row0 + 16 * m + 8 * h;
        if ((lane & 3) == 0 && row < problem.q_len) write(base + row * problem.bias.stride_query, x);
      }
    }
    return;
  }
  // A sum per column, or of everything: first over a warp's rows, then over warps.
  __syncthreads();
  float* column_sums = reinterpret_cast<float*>(shared);  // [kWarps][kTileKv]
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float x = 0.0f;
#pragma unroll
      for (int m = 0; m < kM; ++m) x += sum[m][n][e] + sum[m][n][e + 2];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
      if (lane < 4) column_sums[warp * kTileKv + 8 * n + 2 * lane + e] = x;
    }
  }
  __syncthreads();
  if (work.all_keys) {
    if (threadIdx.x == 0) {
      float x = 0.0f;
      for (int i = 0; i < kWarps * kTileKv; ++i) x += column_sums[i];
      write(base, x);
    }
    return;
  }
  for (int i = threadIdx.x; i < kTileKv; i += kThreads) {
    const int column = work.kv_tile * kTileKv + i;
    if (column >= problem.kv_len) break;
    float x = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) x += column_sums[w * kTileKv + i];
    write(base + column * problem.bias.stride_key, x);
  }
}

}  // namespace jattn::sm80
