// Tiles of a dense bias in shared memory: one element per (query, key) pair, queries along rows.
//
// Reading a bias from global memory in fragment order waits for every element in the middle of a step and touches each
// sector several times. Where keys are contiguous and rows start on 16-byte boundaries (Config::staged_bias) the tile
// is copied ahead of its use like K and V.
#pragma once

#include "attn/score.cuh"
#include "base/ptx.cuh"
#include "base/swizzle.cuh"
#include "params.cuh"
#include "sm80/forward_shape.cuh"

namespace jattn::sm80 {

// kBytes per element, kColumns keys.
template <int kBytes, int kColumns>
struct PairTile {
  static constexpr int kRowBytes = kBytes * kColumns;
  using Layout = SwizzledRows<kRowBytes>;
  uint32_t address;

  // Starts the copy of queries [query0, query0 + kRows) into tile rows from first_row on, by kThreads threads. Pairs
  // outside the array become 0.
  template <int kRows, int kThreads>
  __device__ __forceinline__ void load(const BroadcastArray& array, const ProblemParams& problem, int batch, int head,
                                       int query0, int key0, int first_row) const {
    constexpr int kChunks = kRowBytes / 16, kChunkElements = 16 / kBytes;
    const int thread = ptx::thread_index_anew() % kThreads;
    const int64_t origin = batch * array.stride_batch + head * array.stride_head + key0;
    const unsigned char* data = static_cast<const unsigned char*>(array.data) + origin * kBytes;
    const int64_t row_bytes = array.stride_query * kBytes;
#pragma unroll 4
    for (int i = thread; i < kRows * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const bool valid = query0 + row < problem.q_len && key0 + chunk * kChunkElements < problem.kv_len;
      ptx::copy_async<16>(address + Layout::offset(first_row + row, chunk),
                          data + (query0 + row) * row_bytes + chunk * 16, valid);
    }
  }
};

// The staged tile of one stage, if there is any.
template <Config kConfig>
struct PairTiles {
  uint32_t address;

  __device__ __forceinline__ PairTile<element_bytes(kConfig.bias_element), kConfig.tile_kv> bias() const {
    return {address};
  }

  template <int kRows, int kThreads>
  __device__ __forceinline__ void load(const ProblemParams& problem, int batch, int head, int query0, int key0,
                                       int first_row) const {
    if constexpr (kConfig.bias && kConfig.staged_bias) {
      bias().template load<kRows, kThreads>(problem.bias, problem, batch, head, query0, key0, first_row);
    }
  }
};

// s += log2(e) * bias, or s = s * scale + bias if kNatural, for a fragment whose rows are queries: tile row row0 is the
// first of the warp.
template <Element kBias, bool kNatural, int kColumns, int kM, int kN>
__device__ __forceinline__ void add_bias_rows(float (&s)[kM][kN][4], PairTile<element_bytes(kBias), kColumns> tile,
                                              int row0, float scale) {
  using Layout = typename PairTile<element_bytes(kBias), kColumns>::Layout;
  constexpr int kRowBytes = PairTile<element_bytes(kBias), kColumns>::kRowBytes;
  const int lane = ptx::thread_index_anew() & 31;
  const int g = lane >> 2, t = lane & 3;
  if constexpr (kBias == Element::kF32) {
    const uint32_t base = tile.address + row0 * kRowBytes + Layout::offset(g, t >> 1) + (t & 1) * 8;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 x = ptx::load_shared_f32x2(Layout::advance(base, 2 * n) + (16 * m + 8 * h) * kRowBytes);
          s[m][n][2 * h] = add_bias<kBias, kNatural>(s[m][n][2 * h], x.x, scale);
          s[m][n][2 * h + 1] = add_bias<kBias, kNatural>(s[m][n][2 * h + 1], x.y, scale);
        }
      }
    }
  } else {
    using Traits = ElementTraits<kBias>;
    const uint32_t base = tile.address + row0 * kRowBytes + Layout::offset(g, 0) + t * 4;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t x = ptx::load_shared_u32(Layout::advance(base, n) + (16 * m + 8 * h) * kRowBytes);
          s[m][n][2 * h] = add_bias<kBias, kNatural>(s[m][n][2 * h], Traits::low(x), scale);
          s[m][n][2 * h + 1] = add_bias<kBias, kNatural>(s[m][n][2 * h + 1], Traits::high(x), scale);
        }
      }
    }
  }
}

// The same for a fragment whose rows are keys: key0 and query0 are the warp's first in the tile, multiples of 16.
template <Element kBias, bool kNatural, int kColumns, int kM, int kN>
__device__ __forceinline__ void add_bias_columns(float (&s)[kM][kN][4], PairTile<element_bytes(kBias), kColumns> tile,
                                                 int key0, int query0, float scale) {
  using Layout = typename PairTile<element_bytes(kBias), kColumns>::Layout;
  constexpr int kRowBytes = PairTile<element_bytes(kBias), kColumns>::kRowBytes;
  const int lane = ptx::thread_index_anew() & 31;
  if constexpr (kBias == Element::kF32) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int chunk = (key0 + 16 * m + 8 * h + g) / 4;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t base = tile.address + query0 * kRowBytes + Layout::offset(2 * t + e, chunk) + (g & 3) * 4;
#pragma unroll
          for (int n = 0; n < kN; ++n) {
            s[m][n][2 * h + e] =
                add_bias<kBias, kNatural>(s[m][n][2 * h + e], ptx::load_shared_f32(base + n * (8 * kRowBytes)), scale);
          }
        }
      }
    }
  } else {
    using Traits = ElementTraits<kBias>;
    static_assert(kN % 2 == 0);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      // Transposed 8x8 matrices are fragments of keys by queries.
      const uint32_t base = tile.address + query0 * kRowBytes +
                            Layout::offset((lane & 7) + (lane >> 4) * 8, (key0 + 16 * m) / 8 + ((lane >> 3) & 1));
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t x[4];
        ptx::load_matrix_x4_transposed(x, base + n * (8 * kRowBytes));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[m][n + i / 2][2 * (i % 2)] =
              add_bias<kBias, kNatural>(s[m][n + i / 2][2 * (i % 2)], Traits::low(x[i]), scale);
          s[m][n + i / 2][2 * (i % 2) + 1] =
              add_bias<kBias, kNatural>(s[m][n + i / 2][2 * (i % 2) + 1], Traits::high(x[i]), scale);
        }
      }
    }
  }
}

}  // namespace jattn::sm80
