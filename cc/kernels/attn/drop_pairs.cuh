// Which pairs of an accumulator fragment dropout removes (coordinates as in score.cuh), for whole warps.
#pragma once

#include "attn/dropout.cuh"
#include "attn/positions.cuh"
#include "base/ptx.cuh"
#include "config.cuh"
#include "params.cuh"

namespace jattn {

// Keys of rows, by segment: rows of a fragment do not belong together, and every pair is a call of its own.
template <bool kTransposed, int kM, int kN, class Body>
__device__ __forceinline__ void each_drop_by_rows(const ProblemParams& problem, const Dropout& dropout, int batch,
                                                  int head, int row0, int column0, Body body) {
  static_assert(kN <= 16);
  const FragmentPositions<kTransposed> positions(problem, batch);
  const int32_t* segments = problem.q_segments + int64_t(batch) * problem.q_len;
  const int lane = ptx::thread_index_anew() & 31;
  // The keys and row parts of queries that are columns change with every pair: nothing is gained by keeping them.
  const auto dropped = [&](int query, int query_position, int key_position) {
    const PhiloxKey key = dropout_row_key(problem, query < problem.q_len ? __ldg(segments + query) : 0, head);
    return pair_dropped(key, philox_row_part(key, dropout_group(query_position)), query_position, key_position,
                        dropout.threshold);
  };
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + 16 * m + 8 * h + (lane >> 2);
      const int row_position = positions.row_at(row);
      uint32_t drops = 0;
#pragma unroll 1
      for (int i = 0; i < 2 * kN; ++i) {
        const int column = column0 + 8 * (i >> 1) + 2 * (lane & 3) + (i & 1);
        const int column_position = positions.column_at(column);
        const bool drop =
            kTransposed ? dropped(column, column_position, row_position) : dropped(row, row_position, column_position);
        drops |= uint32_t(drop) << i;
      }
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) body(m, n, h, e, (drops >> (2 * n + e) & 1) != 0);
      }
    }
  }
}

// Calls body(m, n, h, e, dropped) for every pair of the fragment.
template <Config kConfig, bool kTransposed, int kM, int kN, class Body>
__device__ __forceinline__ void each_drop(const ProblemParams& problem, const Dropout& dropout, int batch, int head,
                                          int row0, int column0, Body body) {
  if constexpr (kConfig.dropout_rows) {
    static_assert(kConfig.segments && kConfig.positions);
    each_drop_by_rows<kTransposed, kM, kN>(problem, dropout, batch, head, row0, column0, body);
  } else {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const RowDrops<kTransposed> drops(dropout, row0 + 16 * m);
      // Of the blocks [first, first + kCount), of which bits knows those from its block from_block on.
      const auto tell = [&]<int kCount>(const LaneBits<kTransposed>& bits, int first, int from_block) {
#pragma unroll
        for (int i = 0; i < 4 * kCount; ++i) {
          const int n = i / 4, h = i / 2 % 2, e = i % 2;
          body(m, first + n, h, e, bits.dropped(from_block + n, h, e));
        }
      };
      if constexpr (kN % 8 == 0) {
#pragma unroll
        for (int n = 0; n < kN; n += 8) {
          const auto two = drops.two(column0 + 8 * n);
#pragma unroll
          for (int i = 0; i < 2; ++i) tell.template operator()<4>(drops.bits_of(two.words[i]), n + 4 * i, 0);
        }
      } else if constexpr (kN % 4 == 0) {
#pragma unroll
        for (int n = 0; n < kN; n += 4) tell.template operator()<4>(drops.bits(column0 + 8 * n), n, 0);
      } else {
        // Columns of a warp are 16, of which a call may have two.
        static_assert(kN == 2);
        const LaneBits<kTransposed> bits = drops.bits(column0);
        if ((column0 & 16) == 0) {
          tell.template operator()<2>(bits, 0, 0);
        } else {
          tell.template operator()<2>(bits, 0, 2);
        }
      }
    }
  }
}

}  // namespace jattn
