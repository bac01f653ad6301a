// Gradients of what the score program reads: a pair adds ds * d score' / d element to each element that it read.
//
// Unit of the families sm80_backward_dcaptures, .._sizes and .._exact: header "sm80/backward_dcaptures.cuh", parameters
// CapturesParams, entries backward_dcaptures<kConfig>, backward_dcaptures_sizes<kConfig>,
// backward_dcaptures_exact<kConfig>, backward_dq_threads, backward_dq_min_blocks. Blocks walk the keys as those of dq
// do. The unit's ScoreProgram has the members that jattn/device_gradients.py writes: which elements, with which
// derivatives.
//
// Any pair may read any element, so blocks add to memory, in any order. For who wants the same bits every time a first
// run finds the size of the largest summand, and a second one adds whole numbers in units so small that 64 bits hold
// the sum of all pairs: integers add up to the same in any order. So that blocks wait less for each other, small
// gradients come in several copies. passes/capture_sums.cuh adds these up.
#pragma once

#include "attn/capture_units.cuh"
#include "attn/score_program.cuh"
#include "sm80/query_walk.cuh"

namespace jattn::sm80 {

// The scores that the program gets, kept beside those that it makes (ProgramSlope): gradients of these stay as they
// are.
template <Config kConfig, int kM, int kN>
struct ProgramInputs {
  float value[kM][kN][4];  // natural units

  template <bool kTransposed, bool kNatural>
  __device__ __forceinline__ void apply_program(float (&s)[kM][kN][4], const ProblemParams& problem, int batch,
                                                int head, int row0, int column0) {
    static_assert(kNatural);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) value[m][n][e] = s[m][n][e];
      }
    }
    jattn::apply_program<kConfig, kTransposed, kNatural>(s, problem, batch, head, row0, column0);
  }
  __device__ __forceinline__ void apply(float (&)[kM][kN][4]) const {}
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// What the pairs of a warp add to gradients, pairs of the same element added up first where that is cheap. Elements
// that many pairs read would be waited for otherwise.
template <Config kConfig, int kM, int kN>
class WarpSums {
 public:
  static constexpr int kReads = ScoreProgram::kReads, kRows = 2 * kM;

  __device__ __forceinline__ explicit WarpSums(const ProblemParams& problem, const WorkItem& item)
      : batch_id_(__ldg(problem.batch_ids + item.batch)), head_id_(__ldg(problem.head_ids + item.head)) {
#pragma unroll
    for (int read = 0; read < kReads; ++read) {
      held_place_[read] = -1, held_sum_[read] = 0.0f;
#pragma unroll
      for (int row = 0; row < kRows; ++row) row_sums_[row][read] = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * (kRows - 1); ++i) late_place_[i][read] = -1, late_sum_[i][read] = 0.0f;
    }
  }

  // Takes in a tile. Calls add(read, place, summand) for what is not kept; lanes call it on their own.
  template <typename Add>
  __device__ __forceinline__ void take(const float (&ds)[kM][kN][4], const float (&scores)[kM][kN][4],
                                       const ProblemParams& problem, int batch, int row0, int column0, const Add& add) {
    int places[kRows][kReads];  // of the pairs of one column
    float summands[kRows][kReads];
    float of_tile[kRows][kReads];  // a chain through all keys would lose more to rounding
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int read = 0; read < kReads; ++read) of_tile[row][read] = 0.0f;
    }
    each_program_pair<kConfig, false, kM, kN>(
        problem, batch, row0, column0, [&](int m, int n, int e, int query, int key) {
          const int row = 2 * m + e / 2;
          const float gradient = ds[m][n][e];
          ScoreProgram::reads(scores[m][n][e], batch_id_, head_id_, query, key, problem.captures, places[row],
                              summands[row]);
#pragma unroll
          for (int read = 0; read < kReads; ++read) {
            float& x = summands[row][read];
            x = gradient == 0.0f ? 0.0f : gradient * x;  // of a hidden pair the derivative may be anything
            if (is_of_row(read)) {
              of_tile[row][read] += x;
              row_places_[row][read] = places[row][read];
            } else if (row == kRows - 1) {
              finish_column(read, e % 2, places, summands, add);
            }
          }
        });
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int read = 0; read < kReads; ++read) row_sums_[row][read] += of_tile[row][read];
    }
  }

  // Calls it for what is left, behind the last tile.
  template <typename Add>
  __device__ __forceinline__ void finish(const Add& add) {
#pragma unroll
    for (int read = 0; read < kReads; ++read) {
      if (ScoreProgram::read_reach(read) == Reach::kQuery) {
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          const float sum = quad_sum(row_sums_[row][read]);
          if (lane() % 4 == 0) add(read, row_places_[row][read], sum);
        }
      } else if (ScoreProgram::read_reach(read) == Reach::kHead) {
        held_place_[read] = row_places_[0][read];
#pragma unroll
        for (int row = 0; row < kRows; ++row) held_sum_[read] += row_sums_[row][read];
      }
      give(read, add);
#pragma unroll
      for (int i = 0; i < 2 * (kRows - 1); ++i) {
        if (is_late(read)) add(read, late_place_[i][read], late_sum_[i][read]);
      }
    }
  }

 private:
  using Reach = program::Reach;
  static constexpr unsigned kAll = 0xffffffffu;

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  // Whether all keys of a query read the same element, or all of a head.
  __device__ __forceinline__ static constexpr bool is_of_row(int read) {
    return ScoreProgram::read_reach(read) == Reach::kQuery || ScoreProgram::read_reach(read) == Reach::kHead;
  }

  // Whether pairs of a read are added up along diagonals. Of more reads it would take too many registers.
  __device__ __forceinline__ static constexpr bool is_late(int read) {
    int reads = 0;
    for (int other = 0; other < kReads; ++other) reads += ScoreProgram::read_reach(other) == Reach::kPair;
    return reads <= 2 && ScoreProgram::read_reach(read) == Reach::kPair;
  }

  // parity: of the column, two of which a lane has of every eight.
  template <typename Add>
  __device__ __forceinline__ void finish_column(int read, int parity, const int (&places)[kRows][kReads],
                                                const float (&summands)[kRows][kReads], const Add& add) {
    const int first = places[0][read];
    float sum = 0.0f;
    bool same = true;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      sum += summands[row][read];
      same &= places[row][read] == first;
    }
    if (ScoreProgram::read_reach(read) == Reach::kKey) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(kAll, sum, step);
      if (lane() < 4) add(read, first, sum);
      return;
    }
    const int place = __shfl_sync(kAll, first, 0);
    if (__all_sync(kAll, same && first == place)) {  // as of buckets of distances
      if (place != held_place_[read]) {
        give(read, add);
        held_place_[read] = place, held_sum_[read] = 0.0f;
      }
      held_sum_[read] += sum;
      return;
    }
    if (!is_late(read)) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) add(read, places[row][read], summands[row][read]);
      return;
    }
    // Eight rows down and eight columns on is the same distance: a pair waits for the next one on its diagonal, and
    // goes along with it if they read the same element.
#pragma unroll
    for (int row = kRows - 1; row >= 0; --row) {
      float x = summands[row][read];
      if (row > 0) {
        const int before = parity * (kRows - 1) + row - 1;
        if (late_place_[before][read] == places[row][read]) {
          x += late_sum_[before][read];
        } else {
          add(read, late_place_[before][read], late_sum_[before][read]);
        }
      }
      if (row == kRows - 1) {
        add(read, places[row][read], x);
      } else {
        const int own = parity * (kRows - 1) + row;
        late_place_[own][read] = places[row][read], late_sum_[own][read] = x;
      }
    }
  }

  template <typename Add>
  __device__ __forceinline__ void give(int read, const Add& add) const {
    if (held_place_[read] < 0) return;
    const float sum = warp_sum(held_sum_[read]);
    if (lane() == 0) add(read, held_place_[read], sum);
  }

  int batch_id_, head_id_;
  float row_sums_[kRows][kReads];  // of reads of a query or of a head, and where they belong
  int row_places_[kRows][kReads];
  float held_sum_[kReads];  // of pairs that follow each other and read one element, the same in all lanes
  int held_place_[kReads];
  float late_sum_[2 * (kRows - 1)][kReads];  // of diagonals, by the parity of the column and the row
  int late_place_[2 * (kRows - 1)][kReads];
};

// The same for all tiles of a block.
template <Config kConfig, typename Add>
__device__ __forceinline__ void each_summand(const CapturesParams& params, const Add& add) {
  constexpr int kWarpRows = kConfig.tile_q / kConfig.num_warps, kM = kWarpRows / 16, kN = kConfig.tile_kv / 8;
  static_assert(kConfig.program && kConfig.grad_slices == 1);
  const BackwardParams& backward = params.backward;
  const WorkItem item = query_item(backward, blockIdx.x);
  const int row0 = item.tile * kConfig.tile_q + (threadIdx.x / 32) * kWarpRows;
  ProgramInputs<kConfig, kM, kN> inputs;
  WarpSums<kConfig, kM, kN> sums(backward.problem, item);
  bool any = false;
  each_score_gradient<kConfig, false>(backward, item, inputs, [&](auto& ds, const auto&, int tile) {
    sums.take(ds, inputs.value, backward.problem, item.batch, row0, tile * kConfig.tile_kv, add);
    any = true;
  });
  if (any) sums.finish(add);
}

// Blocks share out the copies of the gradients.
__device__ __forceinline__ int64_t first_of_copy(const CapturesParams& params) {
  return blockIdx.x % params.copies * params.elements;
}

template <Config kConfig>
__device__ __forceinline__ void backward_dcaptures(const CapturesParams& params) {
  float* const sums = params.sums + first_of_copy(params);
  each_summand<kConfig>(params, [&](int, int place, float summand) {
    if (summand != 0.0f) atomicAdd(sums + place, summand);
  });
}

// The size of the largest summand of each capture, as the bits of a float, among which NaN is the largest.
template <Config kConfig>
__device__ __forceinline__ void backward_dcaptures_sizes(const CapturesParams& params) {
  unsigned largest[ScoreProgram::kReads] = {};
  each_summand<kConfig>(params, [&](int read, int, float summand) {
    largest[read] = max(largest[read], __float_as_uint(fabsf(summand)));
  });
#pragma unroll
  for (int read = 0; read < ScoreProgram::kReads; ++read) {
    const unsigned of_warp = __reduce_max_sync(0xffffffffu, largest[read]);
    if (threadIdx.x % 32 == 0 && of_warp != 0) {
      atomicMax(params.largest + ScoreProgram::read_capture(read), of_warp);
    }
  }
}

template <Config kConfig>
__device__ __forceinline__ void backward_dcaptures_exact(const CapturesParams& params) {
  double units[ScoreProgram::kReads];  // how many make 1
#pragma unroll
  for (int read = 0; read < ScoreProgram::kReads; ++read) {
    units[read] =
        capture_units(params.largest[ScoreProgram::read_capture(read)], params.pairs_log2, ScoreProgram::kReads);
  }
  unsigned long long* const sums = params.whole_sums + first_of_copy(params);
  each_summand<kConfig>(params, [&](int read, int place, float summand) {
    if (summand == 0.0f) return;
    const long long whole = __double2ll_rn(double(summand) * units[read]);
    atomicAdd(sums + place, static_cast<unsigned long long>(whole));
  });
}

}  // namespace jattn::sm80
