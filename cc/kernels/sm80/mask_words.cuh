// A dense mask in the sm80 kernels: which tiles it lets through, and its bits for the fragments of the others.
#pragma once

#include "attn/kv_range.cuh"
#include "base/numeric.cuh"
#include "base/ptx.cuh"
#include "params.cuh"

namespace jattn::sm80 {

// The filter of a walk that leaves out tiles that the mask hides whole.
template <Config kConfig, bool kMask = kConfig.mask>
struct MaskFilter : TileFilter<kConfig> {
  __device__ __forceinline__ void look_at(const PackedMask&, int, int, int) {}
};

template <Config kConfig>
struct MaskFilter<kConfig, true> : TileFilter<kConfig> {
  static constexpr bool kActive = true;

  MaskStates states;  // of the own row of tiles of a head

  __device__ __forceinline__ void look_at(const PackedMask& mask, int batch, int head, int own_tile) {
    states.look_at(mask, batch, head, own_tile);
  }
  __device__ __forceinline__ bool meets(int tile) const {
    return TileFilter<kConfig>::meets(tile) && states.of(tile) != kMaskTileEmpty;
  }
};

// The bits of a warp's part of a tile. Loaded before the product that they are applied to: a warp's load covers eight
// rows of 16 bytes, which are neighbours.
template <bool kMask, int kM>
struct MaskWords {
  uint32_t word[kMask ? kM : 1][2];

  // row0: the warp's first row of the problem; first: its first column within the tile.
  __device__ __forceinline__ void load(const PackedMask& mask, int batch, int head, int row0, int column_tile,
                                       int first) {
    if constexpr (kMask) {
      const int lane = ptx::thread_index_anew() & 31;
      const uint32_t* words = mask.words + batch * mask.words_batch + head * mask.words_head +
                              column_tile * mask.words_column_tile + (lane & 3);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = row0 + 16 * m + 8 * h + (lane >> 2);
          word[m][h] = __ldg(words + int64_t(row) * mask.words_row) >> (first / 4);
        }
      }
    }
  }

  // s = -inf where the mask is 0. Returns whether there is such a pair in the warp's part.
  template <int kN>
  __device__ __forceinline__ bool apply(float (&s)[kM][kN][4]) const {
    static_assert(kN <= 16);
    if constexpr (!kMask) {
      return false;
    } else {
      constexpr uint32_t kAll = kN == 16 ? 0xffffffffu : (1u << (2 * kN % 32)) - 1;
      bool hides = false;
#pragma unroll
      for (int m = 0; m < kM; ++m) hides |= (word[m][0] & word[m][1] & kAll) != kAll;
      if (!__any_sync(0xffffffffu, hides)) return false;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if ((word[m][e / 2] >> (2 * n + e % 2) & 1) == 0) s[m][n][e] = -infinity();
          }
        }
      }
      return true;
    }
  }
};

}  // namespace jattn::sm80
