// The user's score function: scores pass through it after all that the problem itself does to them, and before masks.
// Fragments and their coordinates: score.cuh.
#pragma once

#include "attn/positions.cuh"
#include "attn/score.cuh"
#include "base/numeric.cuh"
#include "base/ptx.cuh"
#include "config.cuh"
#include "params.cuh"

namespace jattn {

// The unit of a kernel with Config::program defines its own before this file (core/kernel_unit.cc), with the arguments
// (score, batch, head, query, key, captures); other kernels call none.
#ifndef JATTN_SCORE_PROGRAM
struct ScoreProgram {
  static constexpr bool kUnitSlope = true;    // the slope is 1 wherever the score becomes more than -inf
  static constexpr bool kPrefetches = false;  // prefetch() asks for something

  // Scores in natural units; -inf hides a pair. query and key are positions, or indices in a problem without; those of
  // pairs outside the arrays are any, and must not lead out of the captures.
  JATTN_PROGRAM_FUNCTION float score(float score, int, int, int, int, const void* const (&)[16]) { return score; }
  // slope: of the new score by the old one. Of a hidden pair it is any, NaN and infinity among them.
  JATTN_PROGRAM_FUNCTION float score_and_slope(float score, int, int, int, int, const void* const (&)[16],
                                               float& slope) {
    slope = 1.0f;
    return score;
  }
  // Asks for what a pair is going to read of arrays that exceed a cache, and pairs of the keys that follow.
  JATTN_PROGRAM_FUNCTION void prefetch(int, int, int, int, const void* const (&)[16]) {}
};
#endif

// Gradients of scores have to be multiplied by slopes.
template <Config kConfig>
JATTN_HOST_DEVICE constexpr bool has_program_slopes() {
  return kConfig.program && !ScoreProgram::kUnitSlope;
}

// The weight of a pair by its score and the lse (base 2) of its query, which is +inf if it sees no key. The program has
// met other scores there than those that it hid, since such queries are cleared, and may have made NaN of them.
template <Config kConfig>
__device__ __forceinline__ float weight_of(float score, float factor, float lse_log2) {
  const float weight = exp2_fast(fmaf(score, factor, -lse_log2));
  return kConfig.program && lse_log2 == infinity() ? 0.0f : weight;
}

// Calls use(m, n, e, query, key) for all elements of a fragment; query and key as the program gets them.
template <Config kConfig, bool kTransposed, int kM, int kN, typename Use>
__device__ __forceinline__ void each_program_pair(const ProblemParams& problem, int batch, int row0, int column0,
                                                  const Use& use) {
  const int lane = ptx::thread_index_anew() & 31;
  int rows[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) rows[m][h] = row0 + 16 * m + 8 * h + (lane >> 2);
  }
  if constexpr (kConfig.positions) FragmentPositions<kTransposed>(problem, batch).rows(rows, row0);
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int column = column0 + 8 * n + 2 * (lane & 3) + e;
      if constexpr (kConfig.positions) {
        column = FragmentPositions<kTransposed>(problem, batch).column(n, e, column0);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = rows[m][h];
          use(m, n, 2 * h + e, kTransposed ? column : row, kTransposed ? row : column);
        }
      }
    }
  }
}

// From natural units to base 2. Rounded towards 0: a finite number stays finite, as the least float32 must, for a row
// that is filled with it has a softmax.
__device__ __forceinline__ float natural_to_log2(float s) { return __fmul_rz(s, kLog2E); }

template <int kM, int kN>
__device__ __forceinline__ void natural_to_log2(float (&s)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][n][e] = natural_to_log2(s[m][n][e]);
    }
  }
}

// Lets the scores pass through the program, if there is one. They are in natural units, or in those of base 2.
template <Config kConfig, bool kTransposed, bool kNatural, int kM, int kN>
__device__ __forceinline__ void apply_program(float (&s)[kM][kN][4], const ProblemParams& problem, int batch, int head,
                                              int row0, int column0) {
  if constexpr (kConfig.program) {
    const int batch_id = __ldg(problem.batch_ids + batch), head_id = __ldg(problem.head_ids + head);
    each_program_pair<kConfig, kTransposed, kM, kN>(
        problem, batch, row0, column0, [&](int m, int n, int e, int query, int key) {
          const float x = kNatural ? s[m][n][e] : s[m][n][e] * kLn2;
          const float y = ScoreProgram::score(x, batch_id, head_id, query, key, problem.captures);
          s[m][n][e] = kNatural ? y : natural_to_log2(y);
        });
  }
}

// The slopes of the program at the scores of a fragment. An array of no use and no cost where they are all 1.
template <Config kConfig, int kM, int kN>
struct ProgramSlope {
  static constexpr bool kAny = has_program_slopes<kConfig>();
  float value[kAny ? kM : 1][kAny ? kN : 1][4];

  // As apply_program(), and keeps the slopes.
  template <bool kTransposed, bool kNatural>
  __device__ __forceinline__ void apply_program(float (&s)[kM][kN][4], const ProblemParams& problem, int batch,
                                                int head, int row0, int column0) {
    if constexpr (kAny) {
      const int batch_id = __ldg(problem.batch_ids + batch), head_id = __ldg(problem.head_ids + head);
      each_program_pair<kConfig, kTransposed, kM, kN>(
          problem, batch, row0, column0, [&](int m, int n, int e, int query, int key) {
            const float x = kNatural ? s[m][n][e] : s[m][n][e] * kLn2;
            const float y =
                ScoreProgram::score_and_slope(x, batch_id, head_id, query, key, problem.captures, value[m][n][e]);
            s[m][n][e] = kNatural ? y : natural_to_log2(y);
          });
    } else {
      jattn::apply_program<kConfig, kTransposed, kNatural>(s, problem, batch, head, row0, column0);
    }
  }

  // From the gradients of the new scores to those of the old ones. That of a hidden pair is 0 and stays 0.
  __device__ __forceinline__ void apply(float (&ds)[kM][kN][4]) const {
    if constexpr (kAny) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) ds[m][n][e] = ds[m][n][e] == 0.0f ? 0.0f : ds[m][n][e] * value[m][n][e];
        }
      }
    }
  }
};

}  // namespace jattn
