// From a product of q and k to a score in base 2: scale, softcap, bias, slopes; and the derivative of that step. What a
// score program then does to it: score_program.cuh.
//
// Coordinates: a fragment holds rows row0 + 16 m + g + 8 h and columns column0 + 8 n + 2 t + e (lane 4g + t). Rows are
// queries and columns keys, or the other way round (kTransposed).
#pragma once

#include "attn/positions.cuh"
#include "base/numeric.cuh"
#include "config.cuh"
#include "params.cuh"

namespace jattn {

// Something is added to the scores, or a program reads them, so that they are multiplied by the scale first.
JATTN_HOST_DEVICE constexpr bool adds_to_scores(const Config& config) {
  return config.bias || config.alibi || config.program;
}

// A forward kernel keeps scores with a bias in natural units: product * scale + bias is one instruction, and no bias
// overflows. (A backward kernel subtracts lse in base 2.) A program reads natural units, in both passes the same bits.
JATTN_HOST_DEVICE constexpr bool has_natural_scores(const Config& config) {
  return config.program || (config.bias && !config.softcap);
}

// What a bias in natural units multiplies: scores that a softcap has scaled already, or raw products.
template <Config kConfig>
__device__ __forceinline__ float bias_scale(const ProblemParams& problem) {
  return kConfig.softcap ? 1.0f : problem.scale;
}

template <bool kNatural>
__device__ __forceinline__ float softcap_of(const ProblemParams& problem) {
  return kNatural ? problem.softcap_log2 * kLn2 : problem.softcap_log2;
}

// Scores are multiplied by this on the way into exp2: log2(e) * scale if they are still raw products.
template <Config kConfig, bool kNatural = false>
__device__ __forceinline__ float score_factor(const ProblemParams& problem) {
  if constexpr (kNatural) return kLog2E;
  if constexpr (adds_to_scores(kConfig) || kConfig.softcap) return 1.0f;
  return problem.scale_first ? 1.0f : problem.scale_log2;
}

template <Element kElement>
__device__ __forceinline__ float load_element(const void* data, int64_t index) {
  using Traits = ElementTraits<kElement>;
  return Traits::to_float(__ldg(static_cast<const typename Traits::Storage*>(data) + index));
}

// s + bias * log2(e), the bias kept finite where it is finite: the least bfloat16 or float32 would become -inf, and a
// row filled with it has a softmax. Fused by name, so that every way of reading a bias gives the same bits.
// kNatural: s * scale + bias, s a raw product.
template <Element kElement, bool kNatural>
__device__ __forceinline__ float add_bias(float s, float bias, float scale) {
  if constexpr (kNatural) return fmaf(s, scale, bias);
  if constexpr (kElement == Element::kF16) return fmaf(bias, kLog2E, s);
  const float clamped = fminf(fmaxf(bias, -kLargestNatural), kLargestNatural);
  return fmaf(fabsf(bias) < infinity() ? clamped : bias, kLog2E, s);
}

// Where the elements of a fragment lie in a broadcast array.
template <bool kTransposed>
struct BroadcastReader {
  const BroadcastArray& array;
  int64_t base;  // of this batch entry and head
  int q_len, kv_len;

  __device__ __forceinline__ BroadcastReader(const BroadcastArray& array, const ProblemParams& problem, int batch,
                                             int head)
      : array(array),
        base(batch * array.stride_batch + head * array.stride_head),
        q_len(problem.q_len),
        kv_len(problem.kv_len) {}

  // Calls body(m, n, h, e, index or -1 if outside the array) for single elements.
  template <int kM, int kN, class Body>
  __device__ __forceinline__ void each(int row0, int column0, Body body) const {
    const int lane = threadIdx.x & 31;
    const int rows = kTransposed ? kv_len : q_len;
    const int columns = kTransposed ? q_len : kv_len;
    const int64_t row_stride = kTransposed ? array.stride_key : array.stride_query;
    const int64_t column_stride = kTransposed ? array.stride_query : array.stride_key;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = row0 + 16 * m + 8 * h + (lane >> 2);
        const int64_t row_index = base + row * row_stride;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = column0 + 8 * n + 2 * (lane & 3) + e;
            body(m, n, h, e, row < rows && column < columns ? row_index + column * column_stride : int64_t(-1));
          }
        }
      }
    }
  }
};

// s = scale * s [softcap] in log2 units (natural ones if kNatural), where the configuration or a scale <= 0 asks for it
// before the maximum; a fragment that keeps raw products is left alone.
template <Config kConfig, bool kNatural = false, int kM, int kN>
__device__ __forceinline__ void scale_scores(float (&s)[kM][kN][4], const ProblemParams& problem) {
  if constexpr (kNatural && kConfig.bias && !kConfig.softcap) return;  // the bias does it
  if constexpr (kConfig.softcap) {
    const float softcap = softcap_of<kNatural>(problem);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          constexpr bool kSmallExact = kConfig.element == Element::kF32 || kConfig.large_cap;
          s[m][n][e] = softcap * tanh_accurate<kSmallExact>(s[m][n][e] * problem.softcap_in);
        }
      }
    }
  } else if (adds_to_scores(kConfig) || problem.scale_first) {
    const float scale = kNatural ? problem.scale : problem.scale_log2;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] *= scale;
      }
    }
  }
}

// The derivative of the softcap, 1 - tanh^2, from scores that scale_scores() has just made. An array of no use and no
// cost without softcap.
template <Config kConfig, int kM, int kN>
struct SoftcapDerivative {
  float value[kConfig.softcap ? kM : 1][kConfig.softcap ? kN : 1][4];

  template <bool kNatural = false>
  __device__ __forceinline__ void keep(const float (&s)[kM][kN][4], const ProblemParams& problem) {
    if constexpr (kConfig.softcap) {
      const float inverse = reciprocal_fast(softcap_of<kNatural>(problem));
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float t = s[m][n][e] * inverse;
            value[m][n][e] = __saturatef(fmaf(-t, t, 1.0f));  // of a hidden pair t may be NaN
          }
        }
      }
    }
  }

  __device__ __forceinline__ void apply(float (&ds)[kM][kN][4]) const {
    if constexpr (kConfig.softcap) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) ds[m][n][e] *= value[m][n][e];
        }
      }
    }
  }
};

// The gradient of a score, p (dp - delta). kHides: 0 where p is 0, since a pair may be hidden. What stands behind a
// mask may be any finite numbers, of which dp may overflow, and 0 * infinity is NaN.
template <bool kHides>
__device__ __forceinline__ float pair_gradient(float p, float dp, float delta) {
  return kHides && p == 0.0f ? 0.0f : p * (dp - delta);
}

// The same where the sign marks a dropped pair, whose dp is 0; that of others is multiplied by `factor`.
template <bool kHides>
__device__ __forceinline__ float marked_gradient(float marked, float dp, float factor, float delta) {
  const bool dropped = int32_t(__float_as_uint(marked)) < 0;
  if (kHides && marked == 0.0f) return 0.0f;
  return fabsf(marked) * (dropped ? -delta : fmaf(dp, factor, -delta));
}

// s += log2(e) * bias, or s = s * bias_scale() + bias if kNatural
template <Config kConfig, bool kTransposed, bool kNatural = false, int kM, int kN>
__device__ __forceinline__ void add_bias(float (&s)[kM][kN][4], const ProblemParams& problem, int batch, int head,
                                         int row0, int column0) {
  const BroadcastReader<kTransposed> reader(problem.bias, problem, batch, head);
  const float scale = bias_scale<kConfig>(problem);
  if constexpr (!kTransposed) {
    if (problem.bias.pairs) {
      const int lane = threadIdx.x & 31;
      const int column = column0 + 2 * (lane & 3);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = row0 + 16 * m + 8 * h + (lane >> 2);
          const int64_t index = reader.base + row * problem.bias.stride_query + column;
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            if (row < problem.q_len && column + 8 * n < problem.kv_len) {
              float low, high;
              if constexpr (kConfig.bias_element == Element::kF32) {
                const float2 x = __ldg(
                    reinterpret_cast<const float2*>(static_cast<const float*>(problem.bias.data) + index + 8 * n));
                low = x.x, high = x.y;
              } else {
                using Traits = ElementTraits<kConfig.bias_element>;
                const uint32_t x = __ldg(
                    reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(problem.bias.data) + index + 8 * n));
                low = Traits::low(x), high = Traits::high(x);
              }
              float& left = s[m][n][2 * h];
              float& right = s[m][n][2 * h + 1];
              left = add_bias<kConfig.bias_element, kNatural>(left, low, scale);
              right = add_bias<kConfig.bias_element, kNatural>(right, high, scale);
            }
          }
        }
      }
      return;
    }
  }
  reader.template each<kM, kN>(row0, column0, [&](int m, int n, int h, int e, int64_t index) {
    if (index >= 0) {
      float& x = s[m][n][2 * h + e];
      const float bias = load_element<kConfig.bias_element>(problem.bias.data, index);
      x = add_bias<kConfig.bias_element, kNatural>(x, bias, scale);
    }
  });
}

// Calls use(s[m][n][i], |distance| of that pair) for all of a fragment. offset: distances are column - row - offset, in
// the axes of the fragment.
template <Config kConfig, bool kTransposed, int kM, int kN, typename Use>
__device__ __forceinline__ void each_distance(float (&s)[kM][kN][4], const ProblemParams& problem, int batch,
                                              int offset, int row0, int column0, const Use& use) {
  if constexpr (kConfig.positions) {
    const FragmentPositions<kTransposed> positions(problem, batch);
    int row_position[kM][2];
    positions.rows(row_position, row0);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int position = positions.column(n, e, column0);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) use(s[m][n][2 * h + e], fabsf(float(position - row_position[m][h])));
        }
      }
    }
  } else {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float first = float(column0 + 2 * (lane & 3) - (row0 + 16 * m + 8 * h + (lane >> 2)) - offset);
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) use(s[m][n][2 * h + e], fabsf(first + float(8 * n + e)));
        }
      }
    }
  }
}

// s -= log2(e) * slope * |distance|, without log2(e) if kNatural.
template <Config kConfig, bool kTransposed, bool kNatural = false, int kM, int kN>
__device__ __forceinline__ void add_slopes(float (&s)[kM][kN][4], const ProblemParams& problem, int batch, int head,
                                           int offset, int row0, int column0) {
  const float slope = -(kNatural ? 1.0f : kLog2E) * __ldg(element_of_head(problem.alibi_slopes, batch, head));
  each_distance<kConfig, kTransposed>(s, problem, batch, offset, row0, column0,
                                      [&](float& x, float distance) { x = fmaf(slope, distance, x); });
}

}  // namespace jattn
