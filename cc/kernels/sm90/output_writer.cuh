// How the results of an item leave the forward: from the accumulators of a consumer warpgroup to out and lse, or, of a
// part of the keys, to floats that forward_combine.cuh joins.
#pragma once

#include "sm90/score.cuh"
#include "sm90/tma.cuh"
#include "sm90/warpgroup.cuh"
#include "sm90/wgmma.cuh"
#include "sm90/work.cuh"

namespace jattn::sm90 {

// What the two rows of a thread are multiplied by at the end; 0 for rows without keys and beyond q_length.
struct RowFactors {
  float row[2];
};

// A consumer warpgroup, as far as its results are concerned. slot: of the records of the item at hand.
template <Config C>
struct OutputWriter {
  using S = Shape<C>;
  using Output = float[C.head_dim_v / 2];

  const ForwardParams& params;
  ForwardControl<C>& control;
  unsigned tiles;  // shared address of the first tile
  int warpgroup;   // among the consumers

  __device__ __forceinline__ int first_row() const { return warpgroup * kWarpgroupRows; }
  __device__ __forceinline__ FragmentPlace place() const {
    return {first_row() + warp_row() + lane() / 4, lane() % 4 * 2};
  }

  // Completes the statistics of an item and writes lse: -inf for rows without keys and beyond q_length.
  template <class Softmax>
  __device__ __forceinline__ RowFactors finish_rows(Softmax softmax, unsigned slot) const {
    const ItemRecord& item = control.items[slot];
    softmax.finish();
    RowFactors factors;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = item.q_begin + place().row + 8 * r;
      const bool sees_keys = row < item.q_length && softmax.row_sum[r] != 0.0f;
      float lse_with_sink = 0.0f;
      if constexpr (C.sinks) {
        const auto result = softmax.with_sink(r, sink_of_row(item, slot, row));
        factors.row[r] = sees_keys ? result.factor : 0.0f;
        lse_with_sink = result.lse;
      } else {
        factors.row[r] = sees_keys ? 1.0f / softmax.row_sum[r] : 0.0f;
      }
      if constexpr (C.dropout) factors.row[r] *= control.numbers[slot].dropout.factor;
      if (lane() % 4 == 0 && row < end_of_rows(item) && is_row_of_head<C>(params, row)) {
        if constexpr (C.partial_results) {
          params.row_parts[row_of_part(item, slot, row)] = {softmax.row_max[r], sees_keys ? softmax.row_sum[r] : 0.0f,
                                                            softmax.unit(), softmax.natural_unit()};
          continue;
        }
        const int64_t head = int64_t(item.batch) * params.problem.num_heads + item.head + head_of_row<C>(params, row);
        params.lse[head * params.problem.q_len + query_of_row<C>(params, row)] = !sees_keys ? -infinity()
                                                                                 : C.sinks  ? lse_with_sink
                                                                                            : softmax.lse(r);
      }
    }
    return factors;
  }

  __device__ __forceinline__ float sink_of_row(const ItemRecord& item, unsigned slot, int row) const {
    if constexpr (C.packed_heads) {
      if (!is_row_of_head<C>(params, row)) return 0.0f;
      return *element_of_head(params.problem.sinks, item.batch, item.head + head_of_row<C>(params, row));
    } else {
      return control.numbers[slot].sink;
    }
  }

  // Index of a row among those of all parts.
  __device__ __forceinline__ int64_t row_of_part(const ItemRecord& item, unsigned slot, int row) const {
    const ProblemParams& problem = params.problem;
    const int64_t entry = int64_t(control.parts[slot]) * problem.batch + item.batch;
    const int head = item.head + head_of_row<C>(params, row);
    return (entry * problem.num_heads + head) * problem.q_len + query_of_row<C>(params, row);
  }

  // Writes the rows as floats, straight from the fragments.
  __device__ __forceinline__ void write_part(const Output& out, RowFactors factors, unsigned slot) const {
    const ItemRecord& item = control.items[slot];
    const int width = params.problem.head_dim_v;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = item.q_begin + place().row + 8 * r;
      if (row >= end_of_rows(item) || !is_row_of_head<C>(params, row)) continue;
      float* const to = params.partial_out + row_of_part(item, slot, row) * width;
      const float f = factors.row[r];
#pragma unroll
      for (int i = 0; i < C.head_dim_v / 8; ++i) {
        const int column = 8 * i + place().column;
        if (column >= width) continue;
        const float2 pair = f == 0.0f ? float2{0.0f, 0.0f}  // selected: out may hold NaN there
                                      : float2{out[4 * i + 2 * r] * f, out[4 * i + 2 * r + 1] * f};
        *reinterpret_cast<float2*>(to + column) = pair;
      }
    }
    sync_consumer_warpgroup(warpgroup);  // every warp is done with q
    if (S::kOutAliasesQ && warpgroup_thread() == 0) arrive(&control.q_empty);
  }

  // One past the last row that an item answers for: rows of documents and of a first tile may end before the tile does.
  __device__ __forceinline__ int end_of_rows(const ItemRecord& item) const {
    if constexpr (C.packed_heads) return rows_of_queries<C>(params, params.problem.q_len);
    return C.documents || cuts_first_tile(C) ? item.q_length : params.problem.q_len;
  }

  // Whether rows of another item follow in the 64 of this warpgroup; a box would overwrite them.
  __device__ __forceinline__ bool is_cut(const ItemRecord& item) const {
    const int end = end_of_rows(item);
    return end < params.problem.q_len && item.q_begin + first_row() + kWarpgroupRows > end;
  }

  // Copies the rows of kChunks chunks of the output tile that belong to the item, 16 bytes a thread.
  template <int kChunks>
  __device__ __forceinline__ void copy_rows(const ItemRecord& item, unsigned out_chunk, int first_chunk) const {
    const ProblemParams& problem = params.problem;
    constexpr int kPiecesOfChunk = kChunkRowBytes / 16;
    const int first = item.q_begin + first_row(), rows = end_of_rows(item) - first;  // may be negative
    const int pieces = problem.head_dim_v * 2 / 16 - first_chunk * kPiecesOfChunk;   // of a row
    const int64_t stride = int64_t(problem.num_heads) * problem.head_dim_v * 2;
    const int first_query = query_of_row<C>(params, first);
    char* const target =
        static_cast<char*>(params.rows_out) +
        ((int64_t(item.batch) * problem.q_len + first_query) * problem.num_heads + item.head) * problem.head_dim_v * 2 +
        first_chunk * kChunkRowBytes;
#pragma unroll 1
    for (int i = warpgroup_thread(); i < kWarpgroupRows * kChunks * kPiecesOfChunk; i += kWarpgroupThreads) {
      const int row = i / (kChunks * kPiecesOfChunk), piece = i % (kChunks * kPiecesOfChunk);
      if (row >= rows || piece >= pieces || !is_row_of_head<C>(params, first + row)) continue;
      const int query = query_of_row<C>(params, first + row) - first_query, head = head_of_row<C>(params, first + row);
      const unsigned source = out_chunk + piece / kPiecesOfChunk * C.tile_q * kChunkRowBytes + row * kChunkRowBytes +
                              (piece % kPiecesOfChunk ^ row % 8) * 16;
      *reinterpret_cast<uint4*>(target + query * stride + head * problem.head_dim_v * 2 + piece * 16) =
          ptx::load_shared_u32x4(source);
    }
  }

  // Writes the output rows of this warpgroup: the whole tile at once where it has a place, else chunk by chunk through
  // the places that there are.
  __device__ __forceinline__ void write(Output& out, RowFactors factors, unsigned slot) const {
    if constexpr (C.partial_results) return write_part(out, factors, slot);
    constexpr int kChunks = num_chunks(C.head_dim_v);
    constexpr bool kAtOnce = S::kOutChunks == kChunks;
    const ItemRecord& item = control.items[slot];
    const bool by_rows = C.packed_heads || (C.documents && is_cut(item));
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk += kAtOnce ? kChunks : 1) {
      if (warpgroup_thread() == 0) {
        if (chunk == 0) {
          wait_stores_read();
        } else {
          wait_stores_read<S::kOutChunks - 1>();
        }
      }
      sync_consumer_warpgroup(warpgroup);  // what had the place before has left
      write_chunks<kAtOnce ? kChunks : 1>(out, factors, item, chunk, chunk % S::kOutChunks, by_rows);
    }
    if constexpr (S::kOutAliasesQ) {
      if (by_rows) sync_consumer_warpgroup(warpgroup);
      if (warpgroup_thread() == 0) {
        wait_stores_read();
        arrive(&control.q_empty);
      }
    }
  }

  // Writes kCount chunks of the output by way of the shared memory of chunk `place`.
  template <int kCount>
  __device__ __forceinline__ void write_chunks(Output& out, RowFactors factors, const ItemRecord& item, int chunk,
                                               int place, bool by_rows) const {
    constexpr int kChunkBytes = C.tile_q * kChunkRowBytes, kStepsOfChunk = kChunkColumns / kStepDepth;
    const unsigned tile = tiles + S::kOutOffset + place * kChunkBytes + first_row() * kChunkRowBytes;
#pragma unroll
    for (int step = 0; step < kCount * kStepsOfChunk; ++step) {
      const int column = chunk * kStepsOfChunk + step;
      if (column >= C.head_dim_v / kStepDepth) break;
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float f = factors.row[i % 2];
        const float low = f == 0.0f ? 0.0f : out[8 * column + 2 * i] * f;  // selected: out may hold NaN there
        const float high = f == 0.0f ? 0.0f : out[8 * column + 2 * i + 1] * f;
        words[i] = ElementTraits<C.element>::pack(low, high);
      }
      ptx::store_matrix_x4(fragment_address<C.tile_q>(tile, step), words);
    }
    fence_async_proxy();
    sync_consumer_warpgroup(warpgroup);
    if (by_rows) {
      copy_rows<kCount>(item, tile, chunk);
      return;
    }
    const int first = item.q_begin + first_row();
    if (warpgroup_thread() == 0 && first < end_of_rows(item)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        store_box(&params.out, tile + i * kChunkBytes, (chunk + i) * kChunkColumns, first, item.head, item.batch);
      }
      commit_stores();
    }
  }
};

}  // namespace jattn::sm90
