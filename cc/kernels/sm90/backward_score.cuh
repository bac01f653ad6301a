// From raw products to probabilities and to gradients of scores: the score stage with its derivative, and the masks.
//
// Fragments as in sm90/softmax.cuh: value 4 i + 2 r + c of a thread is row lane / 4 + 8 r of its warp's 16 rows and column
// 8 i + 2 (lane % 4) + c. Kernels that own keys hold scores transposed: rows are keys, columns queries.
#pragma once

#include "base/numeric.cuh"
#include "sm90/backward_work.cuh"

namespace jattn::sm90 {

// The place where anything acts on scores, and its derivative. kActive false leaves scores raw: the exponent multiplies
// them by a positive scale. kActive true turns raw products into finished scores in log2 units.
template <Config C>
struct BackwardScoreStage {
  static constexpr bool kActive = C.softcap || C.scale_first;

  __device__ __forceinline__ static float score(float product, const ProblemParams& problem) {
    if constexpr (C.softcap) return problem.softcap_log2 * tanh_accurate<false>(product * problem.softcap_in);
    if constexpr (C.scale_first) return product * problem.scale_log2;
    return product;
  }

  // p, and p times the derivative of the score by the scaled product. A masked score is -inf and gives 0 for both.
  struct Weights {
    float p, with_slope;
  };
  __device__ __forceinline__ static Weights weights(float score, float lse_log2, const ProblemParams& problem,
                                                    float softcap_inverse) {
    const float p = exp2_fast(kActive ? score - lse_log2 : fmaf(score, problem.scale_log2, -lse_log2));
    if constexpr (!C.softcap) return {p, p};
    const float t = score * softcap_inverse;
    return {p, p == 0.0f ? 0.0f : p * fmaf(-t, t, 1.0f)};
  }

  __device__ __forceinline__ static float softcap_inverse(const ProblemParams& problem) {
    if constexpr (C.softcap) return reciprocal_fast(problem.softcap_log2);
    return 0.0f;
  }
};

// Sets scores of pairs that are invisible to -inf. kTransposed: rows are keys. row and column are those of this thread's
// first value in the sequence; ids belong to the whole tile, row_in_tile and column_in_tile address them.
struct FragmentOrigin {
  int row, column;                  // of the first value of this thread, in the sequences
  int row_in_tile, column_in_tile;  // the same in the tiles
};

template <Config C, bool kTransposed, int kCount>
__device__ __forceinline__ void mask_scores(float (&s)[kCount], int flags, const BackwardItem& item,
                                            FragmentOrigin origin, const int* row_ids, const int* column_ids) {
  constexpr int kAll = 1 << 30;
  if (flags & kLimitsAbove) {
    // Transposed: columns before `limit` are invisible; else columns from it on. Counted from this thread's first.
    int limit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = origin.row + 8 * r;
      if constexpr (kTransposed) {
        limit[r] = C.band ? row - item.upper_offset + 1 - origin.column : -kAll;
        if (row >= item.kv_length) limit[r] = kAll;
      } else {
        limit[r] = (C.band ? min(item.kv_length, row + item.upper_offset) : item.kv_length) - origin.column;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int column = i / 4 * 8 + i % 2;
      if (kTransposed ? column < limit[i / 2 % 2] : column >= limit[i / 2 % 2]) s[i] = -infinity();
    }
  }
  if constexpr (C.band) {
    if (flags & kLimitsBelow) {
      int limit[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = origin.row + 8 * r;
        limit[r] = (kTransposed ? row - item.lower_offset + 1 : row + item.lower_offset) - origin.column;
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int column = i / 4 * 8 + i % 2;
        if (kTransposed ? column >= limit[i / 2 % 2] : column < limit[i / 2 % 2]) s[i] = -infinity();
      }
    }
  }
  if constexpr (C.segments) {
    if (flags & kComparesSegments) {
      const int row_id[2] = {row_ids[origin.row_in_tile], row_ids[origin.row_in_tile + 8]};
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        const int2 ids = *reinterpret_cast<const int2*>(column_ids + origin.column_in_tile + 8 * i);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (ids.x != row_id[r]) s[4 * i + 2 * r] = -infinity();
          if (ids.y != row_id[r]) s[4 * i + 2 * r + 1] = -infinity();
        }
      }
    }
  }
}

__device__ __forceinline__ float2 load_pair(unsigned address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

// Transposed scores become probabilities, packed as the operand of dv = p dout, and weights: probabilities times slope.
// lse_address: that of this thread's first column.
template <Config C, int kCount>
__device__ __forceinline__ void transposed_weights(float (&s)[kCount], unsigned (&p)[kCount / 2], unsigned lse_address,
                                                   const ProblemParams& problem) {
  using Stage = BackwardScoreStage<C>;
  const float inverse = Stage::softcap_inverse(problem);
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float2 lse = load_pair(lse_address + 32 * i);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float& low = s[4 * i + 2 * r];
      float& high = s[4 * i + 2 * r + 1];
      const auto first = Stage::weights(low, lse.x, problem, inverse);
      const auto second = Stage::weights(high, lse.y, problem, inverse);
      p[2 * i + r] = ElementTraits<C.element>::pack(first.p, second.p);
      low = first.with_slope;
      high = second.with_slope;
    }
  }
}

// ds = weights (dp - delta), packed as the operand of dk = ds q.
template <Config C, int kCount>
__device__ __forceinline__ void transposed_gradients(unsigned (&ds)[kCount / 2], const float (&weights)[kCount],
                                                     const float (&dp)[kCount], unsigned delta_address) {
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float2 delta = load_pair(delta_address + 32 * i);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int low = 4 * i + 2 * r;
      ds[2 * i + r] = ElementTraits<C.element>::pack(weights[low] * (dp[low] - delta.x),
                                                     weights[low + 1] * (dp[low + 1] - delta.y));
    }
  }
}

// The same from weights rounded to the element type.
template <Config C, int kCount>
__device__ __forceinline__ void transposed_gradients(unsigned (&ds)[kCount / 2], const unsigned (&weights)[kCount / 2],
                                                     const float (&dp)[kCount], unsigned delta_address) {
  using Traits = ElementTraits<C.element>;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float2 delta = load_pair(delta_address + 32 * i);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned both = weights[2 * i + r];
      const int low = 4 * i + 2 * r;
      ds[2 * i + r] =
          Traits::pack(Traits::low(both) * (dp[low] - delta.x), Traits::high(both) * (dp[low + 1] - delta.y));
    }
  }
}

}  // namespace jattn::sm90
