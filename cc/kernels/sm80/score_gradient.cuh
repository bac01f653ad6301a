// ds = p (dp - delta) for a warp's rows of queries and one tile of keys: what kernels that walk queries make dq, dbias
// and the gradients of slopes and of captures of.
#pragma once

#include "attn/drop_pairs.cuh"
#include "attn/mask.cuh"
#include "attn/score.cuh"
#include "attn/score_program.cuh"
#include "attn/sequence.cuh"
#include "params.cuh"
#include "sm80/fragments.cuh"
#include "sm80/mask_words.cuh"
#include "sm80/pair_tile.cuh"
#include "sm80/tile_copy.cuh"

namespace jattn::sm80 {

// lse (base 2; +inf in rows that see no key) and delta of a lane's rows.
template <int kM>
struct RowGradientStatistics {
  float lse_log2[kM][2], delta[kM][2];

  __device__ __forceinline__ void load(const BackwardParams& params, int batch, int head, int row0) {
    const int lane = threadIdx.x & 31;
    const int64_t base = int64_t(batch * params.problem.num_heads + head) * params.rows_padded + row0 + (lane >> 2);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        lse_log2[m][h] = __ldg(params.lse_log2 + base + 16 * m + 8 * h);
        delta[m][h] = __ldg(params.delta + base + 16 * m + 8 * h);
      }
    }
  }
};

// Starts the copies of a tile of q and dout.
template <Config kConfig, int kThreads>
__device__ __forceinline__ void load_query_tiles(const BackwardParams& params,
                                                 Tile<kConfig.element, kConfig.head_dim> q_tile,
                                                 Tile<kConfig.element, kConfig.head_dim_v> dout_tile, int batch,
                                                 int head, int row0, int q_length) {
  constexpr Element kElement = kConfig.element;
  const ProblemParams& problem = params.problem;
  load_tile<kElement, kConfig.head_dim, kConfig.tile_q, kThreads, kConfig.narrow_rows, false>(
      q_tile,
      head_rows<kElement>(problem.q, problem.q_len, problem.num_heads, problem.head_dim, batch, head, 0,
                          problem.copy_bytes),
      row0, q_length, false, EveryRow{});
  load_tile<kElement, kConfig.head_dim_v, kConfig.tile_q, kThreads, kConfig.narrow_rows, false>(
      dout_tile,
      head_rows<kElement>(params.dout, problem.q_len, problem.num_heads, problem.head_dim_v, batch, head, 0,
                          problem.copy_bytes_v),
      row0, q_length, false, EveryRow{});
}

// Clears a warp's own rows of q and dout that see no key: they may hold anything. For copies that have landed.
template <Config kConfig, int kM>
__device__ __forceinline__ void clear_empty_queries(const BackwardParams& params, const RowGradientStatistics<kM>& rows,
                                                    Tile<kConfig.element, kConfig.head_dim> q_tile,
                                                    Tile<kConfig.element, kConfig.head_dim_v> dout_tile, int batch,
                                                    int head, int row_begin, int warp_row) {
  bool any_empty = false;
#pragma unroll
  for (int m = 0; m < kM; ++m) any_empty |= rows.lse_log2[m][0] == infinity() || rows.lse_log2[m][1] == infinity();
  if (!__any_sync(0xffffffffu, any_empty)) return;
  const float* lse =
      params.lse_log2 + int64_t(batch * params.problem.num_heads + head) * params.rows_padded + row_begin;
  const auto empty = [&](int row) { return lse[row] == infinity(); };
  clear_rows<kConfig.element, kConfig.head_dim, 16 * kM, 32>(q_tile, warp_row, empty);
  clear_rows<kConfig.element, kConfig.head_dim_v, 16 * kM, 32>(dout_tile, warp_row, empty);
  __syncwarp();
}

// Turns s into ds. program: the slopes of the user's program, or what else takes its place. pairs: the staged tiles of
// a bias, in which the warp's rows start at warp_row. to_products: whether ds is the gradient of q.k * scale, through
// the softcap, or that of the score behind the softcap, to which the bias was added.
template <Config kConfig, int kM, int kN, class Program>
__device__ __forceinline__ void score_gradient(float (&s)[kM][kN][4], Program& program, const BackwardParams& params,
                                               const RowGradientStatistics<kM>& rows, const Sequence& sequence,
                                               int batch, int head, int row0, int column0, bool full, bool same_segment,
                                               bool inside_band,
                                               RowOperand<kConfig.element, kConfig.head_dim> q_operand,
                                               RowOperand<kConfig.element, kConfig.head_dim_v> dout_operand,
                                               RowOperand<kConfig.element, kConfig.head_dim> k_operand,
                                               RowOperand<kConfig.element, kConfig.head_dim_v> v_operand,
                                               PairTiles<kConfig> pairs, int warp_row, bool to_products) {
  const ProblemParams& problem = params.problem;
  MaskWords<kConfig.mask, kM> mask_words;
  mask_words.load(params.mask, batch, head, row0, column0 / kConfig.tile_kv, 0);
  clear(s);
  multiply_rows<kConfig.tf32_chain>(s, q_operand, k_operand);
  constexpr bool kNatural = kConfig.program;
  scale_scores<kConfig, kNatural>(s, problem);
  SoftcapDerivative<kConfig, kM, kN> derivative;
  derivative.template keep<kNatural>(s, problem);
  if constexpr (kConfig.bias && kConfig.staged_bias) {
    add_bias_rows<kConfig.bias_element, kNatural>(s, pairs.bias(), warp_row, bias_scale<kConfig>(problem));
  } else if constexpr (kConfig.bias) {
    add_bias<kConfig, false, kNatural>(s, problem, batch, head, row0, column0);
  }
  if constexpr (kConfig.alibi) {
    add_slopes<kConfig, false, kNatural>(s, problem, batch, head, sequence.band.offset, row0, column0);
  }
  program.template apply_program<false, kNatural>(s, problem, batch, head, row0, column0);
  if constexpr (kNatural) natural_to_log2(s);
  bool hides = !full;  // some pairs
  if (!full) mask_limits<kConfig, true>(s, sequence.band, sequence.q_length, sequence.kv_length, row0, column0);
  if constexpr (kConfig.segments) {
    hides |= !same_segment;
    if (!same_segment) {
      mask_segments(s, problem.q_segments + int64_t(batch) * problem.q_len,
                    problem.kv_segments + int64_t(batch) * problem.kv_len, problem.q_len, problem.kv_len, row0,
                    column0);
    }
  }
  if constexpr (has_position_band(kConfig)) {
    hides |= !inside_band;
    if (!inside_band) mask_positions<false>(s, problem, batch, sequence.band, row0, column0);
  }
  hides |= mask_words.apply(s);
  if constexpr (kConfig.program) hides = true;  // the program may hide any pair
  const float factor = score_factor<kConfig>(problem);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[m][n][e] = weight_of<kConfig>(s[m][n][e], factor, rows.lse_log2[m][e / 2]);
      }
    }
  }
  float dp[kM][kN][4];
  clear(dp);
  multiply_rows<kConfig.tf32_chain>(dp, dout_operand, v_operand);
  if (hides) {  // as in pair_gradient(), but in one loop: of two, nvcc and NVRTC make kernels of unlike size
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (s[m][n][e] == 0.0f) dp[m][n][e] = 0.0f;
        }
      }
    }
  }
  if constexpr (kConfig.dropout) {
    const Dropout dropout = dropout_of<kConfig>(problem, batch, head);
    each_drop<kConfig, false, kM, kN>(problem, dropout, batch, head, row0, column0,
                                      [&](int m, int n, int h, int e, bool dropped) {
                                        float& x = dp[m][n][2 * h + e];
                                        x = dropped ? 0.0f : x * dropout.factor;
                                      });
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][n][e] *= dp[m][n][e] - rows.delta[m][e / 2];
    }
  }
  program.apply(s);
  if (to_products) derivative.apply(s);
}

}  // namespace jattn::sm80
