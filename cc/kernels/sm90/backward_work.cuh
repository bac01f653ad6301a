// What a block of the backward works on: its item, the tiles of the other axis that it visits, and the shared-memory
// records by which the producer warp tells the consumer warpgroups.
#pragma once

#include "attn/kv_range.cuh"
#include "attn/schedule.cuh"
#include "attn/sequence.cuh"
#include "sm90/backward_params.cuh"
#include "sm90/backward_shape.cuh"
#include "sm90/barrier.cuh"

namespace jattn::sm90 {

enum BackwardFlags : int {
  kLastStep = 1,         // no further tile for this item
  kLimitsAbove = 2,      // some key lies beyond the upper limit of its query, or beyond the keys of the batch entry
  kLimitsBelow = 4,      // some key lies below the lower limit of its query
  kComparesSegments = 8  // segment ids must be compared
};

// Travels beside each tile of the visited axis, valid once the tile is full.
struct StepHeader {
  int first;  // query or key of the tile
  int flags;
  int64_t accumulator_row;  // of the first query in dq_accumulator; kernels that own keys
};

// Where a block stands. Query t sees keys t + lower_offset <= j < min(t + upper_offset, kv_length); the offsets are read
// only if there is a band.
struct BackwardItem {
  int first;  // key or query that the block owns first
  int head;   // key/value head or query head
  int batch;
  int q_length, kv_length;
  int upper_offset, lower_offset;
  bool runs;  // there is a tile to visit
};

template <Config C, bool kOwnsQueries>
struct alignas(16) BackwardControl {
  // Of the queries of a stage, targets of bulk copies; kernels that own queries keep theirs in registers.
  float lse_log2[kOwnsQueries ? 1 : C.stages][kOwnsQueries ? 4 : C.tile_q];
  float delta[kOwnsQueries ? 1 : C.stages][kOwnsQueries ? 4 : C.tile_q];
  // Of the axis that the block owns, and of a stage of the other.
  int own_ids[C.segments ? (kOwnsQueries ? C.tile_q : C.tile_kv) : 1];
  int ids[C.segments ? C.stages : 1][C.segments ? (kOwnsQueries ? C.tile_kv : C.tile_q) : 1];
  StepHeader headers[C.stages];
  BackwardItem item;
  Barrier own_full;  // the tiles that the block owns
  Barrier landed;    // tiles whose padding rows must be cleared before the consumers may see them
  Barrier first_full[C.stages], first_empty[C.stages];    // q of kernels that own keys, else k
  Barrier second_full[C.stages], second_empty[C.stages];  // dout, else v
  Barrier exchange_full[2], exchange_empty[2];  // what warpgroups give each other; empty only where probabilities
};

template <Config C>
__device__ __forceinline__ BackwardItem backward_item(const BackwardParams& params, const WorkItem& place, int first) {
  const Sequence sequence = sequence_of<C>(params.problem, place.batch);
  BackwardItem item;
  item.first = first;
  item.head = place.head;
  item.batch = place.batch;
  item.q_length = sequence.q_length;
  item.kv_length = sequence.kv_length;
  item.upper_offset = sequence.band.offset + sequence.band.right + 1;
  item.lower_offset = sequence.band.offset - sequence.band.left;
  item.runs = false;
  return item;
}

__device__ __forceinline__ Band band_of(const BackwardItem& item) {
  return {-item.lower_offset, item.upper_offset - 1, 0};
}

// Walks tiles upwards from position `start` of a range, round its end, leaving out those whose segments cannot meet. A warp
// looks at 32 tiles with one load; all its lanes get the same answer.
template <bool kSegments>
struct RoundWalk {
  int begin, count, start;
  const SegmentRange* others = nullptr;  // ranges of the other axis, of this batch entry
  SegmentRange own{0, 0};
  int position = 0;  // tiles looked at
  uint32_t hits = 0;
  int window = 0;  // position of bit 0 of `hits`

  __device__ __forceinline__ int tile_at(int index) const {
    const int from_begin = start + index;
    return begin + (from_begin < count ? from_begin : from_begin - count);
  }
  __device__ __forceinline__ void restart() {
    position = 0;
    hits = 0;
  }
  // The next tile, or -1.
  __device__ __forceinline__ int next() {
    if constexpr (!kSegments) {
      return position < count ? tile_at(position++) : -1;
    } else {
      while (hits == 0) {
        if (position >= count) return -1;
        const int candidate = position + int(threadIdx.x & 31);
        const bool hit = candidate < count && segments_meet(own, others[tile_at(candidate)]);
        hits = __ballot_sync(0xffffffffu, hit);
        window = position;
        position += 32;
      }
      const int index = window + __ffs(hits) - 1;
      hits &= hits - 1;
      return tile_at(index);
    }
  }
};

// -1 and -2 mark padding of the two axes: different from every id and from each other.
template <int kPadding>
__device__ __forceinline__ int segment_id(const int32_t* ids, int64_t first, int row, int length) {
  if (row >= length) return kPadding;
  const int id = ids[first + row];
  return id < 0 ? kPadding : id;
}

// Writes zeros over the rows of a tile for which is_padding(row) holds, by one warp.
template <int kRows, int kColumns, class IsPadding>
__device__ __forceinline__ void clear_rows(unsigned tile, IsPadding is_padding) {
#pragma unroll 1
  for (int row = threadIdx.x % 32; row < kRows; row += 32) {
    if (!is_padding(row)) continue;
#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks(kColumns); ++chunk) {
      const unsigned address = tile + (chunk * kRows + row) * kChunkRowBytes;
#pragma unroll
      for (int byte = 0; byte < kChunkRowBytes; byte += 16) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address + byte), "r"(0) : "memory");
      }
    }
  }
}

// releases: arrivals that free a stage; givers: warps that fill an exchange buffer, and as many read it.
template <Config C, bool kOwnsQueries>
__device__ __forceinline__ void init_control(BackwardControl<C, kOwnsQueries>& control, int releases, int givers) {
  init_barrier(&control.own_full, 1);
  init_barrier(&control.landed, 1);
  for (int stage = 0; stage < C.stages; ++stage) {
    init_barrier(&control.first_full[stage], 1);
    init_barrier(&control.second_full[stage], 1);
    init_barrier(&control.first_empty[stage], releases);
    init_barrier(&control.second_empty[stage], releases);
  }
  for (int buffer = 0; buffer < 2; ++buffer) {
    init_barrier(&control.exchange_full[buffer], givers);
    init_barrier(&control.exchange_empty[buffer], givers);
  }
  fence_barrier_init();
}

}  // namespace jattn::sm90
