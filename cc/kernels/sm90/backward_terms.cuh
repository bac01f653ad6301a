// What enters a score fragment beside the product q.k, in three places:
//
// Added to the exponent of p, in log2 units: the bias (BiasSource, FetchedBias), -slope |distance| of ALiBi, and -lse.
// They meet in one pass over the fragment, make_exponents(): exponent = scale q.k + bias - slope |distance| - lse.
// Applied to the score before its lse is taken off: a softcap, to the product alone, and the user's program, to the
// product with the terms.
// Multiplied with p, for the gradient of the product: the slopes of the softcap and of the program (KeptSlopes). Which
// p dropout takes away is in backward_dropped_pairs.cuh.
//
// Coordinates as in backward_score.cuh; kTransposed: rows are keys, columns queries.
#pragma once

#include "attn/score_program.cuh"
#include "base/shared_memory.cuh"
#include "sm90/backward_dropped_pairs.cuh"
#include "sm90/backward_work.cuh"
#include "sm90/wgmma.cuh"

namespace jattn::sm90 {

// An element of global memory, or 0 unless it is inside the array. Volatile: the compiler must not read it where it is
// used.
template <Element kElement>
__device__ __forceinline__ typename ElementTraits<kElement>::Storage load_inside(const void* address, bool inside) {
  typename ElementTraits<kElement>::Storage x;
  if constexpr (kElement == Element::kF32) {
    asm volatile("{.reg .pred inside; setp.ne.b32 inside, %2, 0; mov.b32 %0, 0; @inside ld.global.nc.f32 %0, [%1];}"
                 : "=f"(x)
                 : "l"(address), "r"(int(inside)));
  } else {
    asm volatile("{.reg .pred inside; setp.ne.b32 inside, %2, 0; mov.b16 %0, 0; @inside ld.global.nc.u16 %0, [%1];}"
                 : "=h"(x)
                 : "l"(address), "r"(int(inside)));
  }
  return x;
}

// Eight values of a bias at a time, those of columns [16 step, 16 step + 16): value 4 i + 2 r + c.
template <Config C, bool kTransposed>
struct BiasSource {
  const ProblemParams& problem;
  int64_t base;  // element of query 0 and key 0
  FragmentOrigin origin;
  unsigned tile;  // shared address of a staged tile, or of values kept by thread; 0: read where it lies

  // Queries lie along the rows of the tile; transposed fragments are read transposed.
  __device__ __forceinline__ void load_staged(float (&bias)[8], int step) const {
    using Traits = ElementTraits<C.bias_element>;
    const int lane = threadIdx.x % 32;
    const int warp_row = origin.row_in_tile - lane / 4;
    unsigned words[4];
    if constexpr (kTransposed) {
      const int query = 16 * step + lane / 16 * 8 + lane % 8;
      const int column16 = warp_row % kChunkColumns / 8 + lane / 8 % 2;
      const unsigned address =
          tile + (warp_row / kChunkColumns * C.tile_q + query) * kChunkRowBytes + (column16 ^ query % 8) * 16;
      ptx::load_matrix_x4_transposed(words, address);
    } else {
      const int query = warp_row + lane % 16;
      const int column16 = step % 4 * 2 + lane / 16;
      const unsigned address = tile + (step / 4 * C.tile_q + query) * kChunkRowBytes + (column16 ^ query % 8) * 16;
      ptx::load_matrix_x4(words, address);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bias[2 * i] = Traits::low(words[i]);
      bias[2 * i + 1] = Traits::high(words[i]);
    }
  }

  // Outside the array 0. Values shared by all keys are read in the first step and kept. In order, or the compiler reads
  // the whole tile ahead, for which there are no registers.
  __device__ __forceinline__ void load_direct(float (&bias)[8], int step) const {
    static_assert(!kTransposed);  // transposed fragments use FetchedBias
    const BroadcastArray& array = problem.bias;
    // Copies: with the members in their places nvcc (13.0) makes longer code of the loop.
    const int rows = problem.q_len, columns = problem.kv_len;
    const int64_t row_stride = array.stride_query, column_stride = array.stride_key;
    if (column_stride == 0 && step > 0) return;
    constexpr int kBytes = element_bytes(C.bias_element);
    const auto* data = static_cast<const unsigned char*>(array.data);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int row = origin.row + 8 * (k / 2 % 2);
      const int column = origin.column + 16 * step + 8 * (k / 4) + k % 2;
      const bool inside = row < rows && (column < columns || column_stride == 0);
      const unsigned char* address = data + (base + row * row_stride + column * column_stride) * kBytes;
      bias[k] = ElementTraits<C.bias_element>::to_float(load_inside<C.bias_element>(address, inside));
    }
  }

  // Values that this thread has kept in shared memory, as it needs them.
  __device__ __forceinline__ unsigned kept_address(int step) const {
    static_assert(!kTransposed);
    return tile + (2 * step * kBackwardConsumers * kWarpgroupThreads + threadIdx.x - kWarpgroupThreads) * 16;
  }
  static constexpr int kKeptHalf = kBackwardConsumers * kWarpgroupThreads * 16;
  __device__ __forceinline__ void keep(const float (&bias)[8], int step) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::store_shared_f32x4(kept_address(step) + half * kKeptHalf, bias + 4 * half);
    }
  }
  __device__ __forceinline__ void load_kept(float (&bias)[8], int step) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::load_shared_f32x4(bias + 4 * half, kept_address(step) + half * kKeptHalf);
    }
  }

  __device__ __forceinline__ void load(float (&bias)[8], int step) const {
    if constexpr (C.staged_bias) {
      load_staged(bias, step);
    } else if (tile != 0) {
      load_kept(bias, step);
    } else {
      load_direct(bias, step);
    }
  }
};

// A bias that transposed fragments read where it lies, fetched before the scores are waited for: the two keys of this
// thread where all queries share it (Config::row_bias), else every pair. Outside the array 0.
template <Config C, int kCount>
struct FetchedBias {
  static constexpr bool kUsed = C.bias && !C.staged_bias;
  // Wide gradients leave no registers for all pairs at once: the second half is fetched when the first is used up.
  static constexpr int kParts = C.row_bias || C.head_dim + C.head_dim_v <= 128 ? 1 : 2;
  static constexpr int kValues = !kUsed ? 1 : C.row_bias ? 2 : kCount / kParts;
  using Storage = typename ElementTraits<C.bias_element>::Storage;
  Storage values[kValues];

  __device__ __forceinline__ void fetch(const ProblemParams& problem, const StepTerms& terms,
                                        const FragmentOrigin& origin, int part = 0) {
    if constexpr (kUsed) {
      const BroadcastArray& array = problem.bias;
      const auto* data = static_cast<const Storage*>(array.data) + terms.bias;
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        const int key = origin.row + 8 * (C.row_bias ? i : i / 2 % 2);
        const int query = C.row_bias ? 0 : origin.column + (part * kValues + i) / 4 * 8 + i % 2;
        const bool inside = key < problem.kv_len && query < problem.q_len;
        values[i] = load_inside<C.bias_element>(data + key * array.stride_key + query * array.stride_query, inside);
      }
    }
  }
  __device__ __forceinline__ float operator[](int index) const {
    return ElementTraits<C.bias_element>::to_float(values[!kUsed ? 0 : C.row_bias ? index / 2 % 2 : index % kValues]);
  }
};

// Slopes of the softcap and of the user's program, kept in 16 bits while scores become exponents. Those of a softcap
// are numbers of 0 to 1: half precision, an absolute error of 2^-12 at most. Those of a program are any numbers,
// rounded as the gradients of the scores will be.
template <Config C, int kCount>
struct KeptSlopes {
  static constexpr bool kUsed = has_score_terms(C) && (C.softcap || has_program_slopes<C>());
  using Traits = ElementTraits<has_program_slopes<C>() ? C.element : Element::kF16>;
  unsigned words[kUsed ? kCount / 2 : 1];

  __device__ __forceinline__ void keep(int pair, float low, float high) {
    if constexpr (kUsed) words[pair] = Traits::pack(low, high);
  }
  __device__ __forceinline__ float operator[](int index) const {
    if constexpr (!kUsed) return 1.0f;
    return index % 2 == 0 ? Traits::low(words[index / 2]) : Traits::high(words[index / 2]);
  }
  // p times the slope; of a hidden pair that may be anything. p has a sign that marks what dropout removes, a softcap's
  // slope none to spoil it.
  __device__ __forceinline__ float weight(float p, int index) const {
    if constexpr (!kUsed) return p;
    if constexpr (!has_program_slopes<C>()) return p * fabsf((*this)[index]);
    static_assert(!has_program_slopes<C>() || !C.dropout);
    return p == 0.0f ? 0.0f : p * (*this)[index];
  }
};

// The pairs of a fragment as the user's program knows them.
template <Config C, bool kTransposed>
struct ProgramPairs {
  const ProblemParams& problem;
  int batch = 0, head = 0;
  int row[2] = {0, 0};
  int first_column = 0;
  const int* columns = nullptr;  // positions, of this thread's columns

  __device__ __forceinline__ ProgramPairs(const ProblemParams& problem, int batch_entry, int query_head,
                                          const FragmentOrigin& origin, const int* row_positions,
                                          const int* column_positions)
      : problem(problem) {
    if constexpr (C.program) {
      batch = __ldg(problem.batch_ids + batch_entry);
      head = __ldg(problem.head_ids + query_head);
      first_column = origin.column;
#pragma unroll
      for (int r = 0; r < 2; ++r) row[r] = C.positions ? row_positions[origin.row_in_tile + 8 * r] : origin.row + 8 * r;
      if constexpr (C.positions) columns = column_positions + origin.column_in_tile;
    }
  }

  // The new score of the pair of value 4 i + 2 r + c; natural units. Its slope is multiplied into `slope`.
  __device__ __forceinline__ float score(float score, int i, int r, int c, float& slope) const {
    const int column = C.positions ? columns[8 * i + c] : first_column + 8 * i + c;
    const int query = kTransposed ? column : row[r], key = kTransposed ? row[r] : column;
    if constexpr (!has_program_slopes<C>()) {
      return ScoreProgram::score(score, batch, head, query, key, problem.captures);
    } else {
      float own;
      const float changed = ScoreProgram::score_and_slope(score, batch, head, query, key, problem.captures, own);
      slope *= own;
      return changed;
    }
  }
};

// Turns raw products into exponents. lse(i): of the columns 8 i and 8 i + 1 of this thread if kTransposed; else both
// its rows. row_positions, column_positions: of the tiles, read if there are slopes and positions.
template <Config C, bool kTransposed, int kCount, class Lse>
__device__ __forceinline__ void make_exponents(float (&s)[kCount], KeptSlopes<C, kCount>& slopes,
                                               const StepTerms& terms, const BackwardItem& item,
                                               const FragmentOrigin& origin, unsigned bias_tile,
                                               const int* row_positions, const int* column_positions,
                                               FetchedBias<C, kCount>& fetched, const ProblemParams& problem, Lse lse) {
  // A program gets natural units.
  constexpr float kUnit = C.program ? 1.0f : kLog2E;
  const float slope = !C.alibi ? 0.0f : C.program ? terms.slope * kLn2 : terms.slope;
  const float scale = C.program ? problem.scale : problem.scale_log2;
  const float cap = C.program ? problem.softcap_log2 * kLn2 : problem.softcap_log2;
  float first[2] = {0.0f, 0.0f};  // distance of the first column, up to its sign
  int row_position[2] = {0, 0};
  if constexpr (C.alibi && C.positions) {
#pragma unroll
    for (int r = 0; r < 2; ++r) row_position[r] = row_positions[origin.row_in_tile + 8 * r];
  } else if constexpr (C.alibi) {
    const int offset = item.upper_offset - 1 - problem.band_right;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      first[r] = float(origin.column - origin.row - 8 * r + (kTransposed ? offset : -offset));
    }
  }
  const BiasSource<C, kTransposed> source{problem, terms.bias, origin, bias_tile};
  ProgramPairs<C, kTransposed> program(problem, item.batch, terms.head, origin, row_positions, column_positions);
  float bias[8];
#pragma unroll
  for (int step = 0; step < kCount / 8; ++step) {
    if constexpr (C.bias && (C.staged_bias || !kTransposed)) {
      source.load(bias, step);
    } else if constexpr (FetchedBias<C, kCount>::kUsed && FetchedBias<C, kCount>::kParts == 2) {
      if (step == kCount / 16) fetched.fetch(problem, terms, origin, 1);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 2 * step + half;
      const float2 shift = lse(i);
      int2 positions = make_int2(0, 0);
      if constexpr (C.alibi && C.positions) {
        positions = *reinterpret_cast<const int2*>(column_positions + origin.column_in_tile + 8 * i);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float kept[2] = {1.0f, 1.0f};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = s[4 * i + 2 * r + c];
          const float shift_of_pair = kTransposed ? (c == 0 ? shift.x : shift.y) : (r == 0 ? shift.x : shift.y);
          float rest = C.program ? 0.0f : -shift_of_pair;
          if constexpr (C.alibi) {
            const float distance = C.positions ? float((c == 0 ? positions.x : positions.y) - row_position[r])
                                               : first[r] + float(8 * i + c);
            rest = fmaf(slope, fabsf(distance), rest);
          }
          if constexpr (C.bias) {
            const bool ahead = kTransposed && !C.staged_bias;
            rest = fmaf(ahead ? fetched[4 * i + 2 * r + c] : bias[4 * half + 2 * r + c], kUnit, rest);
          }
          if constexpr (C.softcap) {
            const float t = tanh_accurate<C.large_cap>(x * problem.softcap_in);
            kept[c] = __saturatef(fmaf(-t, t, 1.0f));  // of a hidden pair t may be NaN
            x = fmaf(t, cap, rest);
          } else {
            x = fmaf(x, scale, rest);
          }
          if constexpr (C.program) x = fmaf(program.score(x, i, r, c, kept[c]), kLog2E, -shift_of_pair);
        }
        slopes.keep(2 * i + r, kept[0], kept[1]);
      }
    }
  }
}

}  // namespace jattn::sm90
