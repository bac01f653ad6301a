// What happens to a score between the first product and the softmax: the score stage, then the masks.
#pragma once

#include "sm90/softmax.cuh"
#include "sm90/work.cuh"

namespace jattn::sm90 {

// Where the fragment of a thread lies: the pair of value 4 i + 2 r + c is (row + 8 r, column + 8 i + c).
struct FragmentPlace {
  int row;     // of the tile of queries
  int column;  // of the tile of keys
};

// The place where anything acts on scores. kActive false leaves them raw, and the softmax multiplies by the scale in
// its exponent. kActive true turns raw products into finished scores in log2 units.
template <Config C>
struct ScoreStage {
  static constexpr bool kActive = C.softcap || C.scale_first;

  template <int kCount>
  __device__ __forceinline__ static void apply(float (&s)[kCount], const ForwardParams& params) {
    if constexpr (C.softcap) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        s[i] = params.problem.softcap_log2 * tanh_accurate<false>(s[i] * params.problem.softcap_in);
      }
    } else if constexpr (C.scale_first) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] *= params.problem.scale_log2;
    }
  }
};

// Sets scores to -inf where the header says that pairs of this tile may be invisible.
template <Config C>
__device__ __forceinline__ void apply_masks(float (&s)[C.tile_kv / 2], const TileHeader& header, int stage, int slot,
                                            const ForwardControl<C>& control, FragmentPlace place) {
  const ItemRecord& item = control.items[slot];
  const int row = item.q_begin + place.row;
  const int first_column = header.kv_tile * C.tile_kv + place.column;
  if (header.flags & kMaskUpper) {
    int upper[2];  // columns from here on, counted from this thread's first, are invisible
#pragma unroll
    for (int r = 0; r < 2; ++r) upper[r] = min(item.kv_length, row + 8 * r + item.upper_offset) - first_column;
#pragma unroll
    for (int i = 0; i < C.tile_kv / 2; ++i) {
      if (i / 4 * 8 + i % 2 >= upper[i / 2 % 2]) s[i] = -infinity();
    }
  }
  if constexpr (C.band) {
    if (header.flags & kMaskLower) {
      int lower[2];  // columns before this are invisible
#pragma unroll
      for (int r = 0; r < 2; ++r) lower[r] = row + 8 * r + item.lower_offset - first_column;
#pragma unroll
      for (int i = 0; i < C.tile_kv / 2; ++i) {
        if (i / 4 * 8 + i % 2 < lower[i / 2 % 2]) s[i] = -infinity();
      }
    }
  }
  if constexpr (C.segments) {
    if (header.flags & kMaskSegments) {
      const int q_id[2] = {control.q_ids[slot][place.row], control.q_ids[slot][place.row + 8]};
      const int* kv_ids = control.kv_ids[stage] + place.column;
#pragma unroll
      for (int i = 0; i < C.tile_kv / 8; ++i) {
        const int2 ids = *reinterpret_cast<const int2*>(kv_ids + 8 * i);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (ids.x != q_id[r]) s[4 * i + 2 * r] = -infinity();
          if (ids.y != q_id[r]) s[4 * i + 2 * r + 1] = -infinity();
        }
      }
    }
  }
}

}  // namespace jattn::sm90
