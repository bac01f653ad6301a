// Tiles that begin with the runs of segment ids: the work list of the forward and backward kernels for packed
// documents.
//
// Unit of the family document_tiles: entry document_tiles<kConfig>, parameters DocumentTilesParams; one block per batch
// entry for its list, and further ones for the ranges of segments of the tiles of the grid (passes/tile_ranges.cuh),
// which the kernel needs where a list is refused.
//
// Tiles that lie on a fixed grid hold ends and beginnings of documents: 884 tiles of 128 x 128 for 22 documents of
// 16384 tokens against 833, and two or three tiles a row whose pairs must be tested against one. A list is possible
// where the keys of each id are one run of neighbours, as in packed sequences; else, with more than kMaxDocuments runs,
// and where documents are so short that the list would be longer than document_tiles_room(), the entry is refused and
// the kernel takes all its tiles from the grid. Runs of padding become tiles without keys, so that every row of the
// result has one owner.
//
// Order: longest document first, and of each the tile first that a diagonal leaves most to see: the last of queries,
// the first of keys. The tiles of a document stay together because they share the other side in L2.
#pragma once

#include "base/integers.cuh"
#include "base/numeric.cuh"
#include "config.cuh"
#include "passes/tile_ranges.cuh"
#include "sm90/forward_params.cuh"
#include "sm90/shape.cuh"

namespace jattn::sm90 {

// The lanes of a warp, and the warps of the block. (The host test has blocks of one thread.)
struct RunLanes {
  int count = min(int(blockDim.x), 32);
  int lane = int(threadIdx.x) % count, warp = int(threadIdx.x) / count;
  int warps = int(blockDim.x) / count;
};

// The runs of equal ids of one side, in no order; all negative ids are one id.
struct DocumentRuns {
  static constexpr int kNoId = -2;
  int count;
  int begin[kMaxDocuments], end[kMaxDocuments], id[kMaxDocuments];

  // Nothing else hides how long a load takes, and every kernel waits for this one: a thread asks for many ids at once.
  __device__ __forceinline__ void find(const int32_t* ids, int length) {
    constexpr int kAtOnce = 16;
    for (int first = threadIdx.x; first < length; first += kAtOnce * blockDim.x) {
      int own[kAtOnce], before[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = min(first + i * int(blockDim.x), length - 1);
        own[i] = max(ids[row], -1);
        before[i] = row > 0 ? max(ids[row - 1], -1) : kNoId;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i * int(blockDim.x);
        if (row < length && own[i] != before[i]) add(row, own[i]);
      }
    }
  }

  __device__ __forceinline__ void add(int row, int own) {
    const int slot = atomicAdd(&count, 1);
    if (slot < kMaxDocuments) {
      begin[slot] = row;
      id[slot] = own;
    }
  }

  // From here on a warp has a run, and its lanes the runs that it is compared with; all get the same answer.
  __device__ __forceinline__ void find_ends(int length) {
    const RunLanes lanes;
    for (int run = lanes.warp; run < count; run += lanes.warps) {
      int next = length;
      for (int other = lanes.lane; other < count; other += lanes.count) {
        if (begin[other] > begin[run]) next = min(next, begin[other]);
      }
      end[run] = __reduce_min_sync(~0u, next);
    }
  }

  // The run of an id, or -1.
  __device__ __forceinline__ int run_of(int wanted) const {
    const RunLanes lanes;
    int found = -1;
    for (int run = lanes.lane; run < count; run += lanes.count) found = id[run] == wanted ? run : found;
    return __reduce_max_sync(~0u, found);
  }

  // Whether the keys of some id are in two places, as far as this warp looks.
  __device__ __forceinline__ bool repeats_id() const {
    const RunLanes lanes;
    bool repeats = false;
    for (int run = lanes.warp; run < count; run += lanes.warps) {
      repeats = repeats || (id[run] >= 0 && run_of(id[run]) != run);
    }
    return repeats;
  }

  __device__ __forceinline__ int tiles_of(int run, int tile) const { return ceil_div(end[run] - begin[run], tile); }

  // Of tiles that begin where rows are aligned: how many a run has, and all runs before it.
  __device__ __forceinline__ int aligned_tiles_of(int run, int tile) const {
    return ceil_div(end[run] - aligned_row(begin[run]), tile);
  }
  __device__ __forceinline__ int aligned_tiles_before(int run, int tile) const {
    const RunLanes lanes;
    int tiles = 0;
    for (int other = lanes.lane; other < count; other += lanes.count) {
      if (begin[other] < begin[run]) tiles += aligned_tiles_of(other, tile);
    }
    return __reduce_add_sync(~0u, tiles);
  }

  __device__ __forceinline__ int tiles_of_longer(int run, int tile) const {
    const RunLanes lanes;
    int tiles = 0;
    for (int other = lanes.lane; other < count; other += lanes.count) {
      const int longer = end[other] - begin[other] - (end[run] - begin[run]);
      if (longer > 0 || (longer == 0 && begin[other] < begin[run])) tiles += tiles_of(other, tile);
    }
    return __reduce_add_sync(~0u, tiles);
  }
};

// Lists the tiles of the other axis of a batch entry: `count` of its runs, or, if these are too many, those of the
// grid.
__device__ __forceinline__ void list_other_tiles(const OtherTiles& others, const DocumentRuns& runs, int count,
                                                 int length, int entry) {
  TileRows* const tiles = others.tiles + int64_t(entry) * others.room;
  const bool by_runs = count <= others.room;
  for (int i = (by_runs ? count : 0) + threadIdx.x; i < others.room; i += blockDim.x) {
    tiles[i] = {by_runs ? 0 : min(i * others.tile, length), by_runs ? 0 : min((i + 1) * others.tile, length)};
  }
  if (!by_runs) return;
  const RunLanes lanes;
  for (int run = lanes.warp; run < runs.count; run += lanes.warps) {
    const int number = runs.aligned_tiles_before(run, others.tile), first = aligned_row(runs.begin[run]);
    const int tiles_of_run = runs.aligned_tiles_of(run, others.tile);
    for (int i = lanes.lane; i < tiles_of_run; i += lanes.count) {
      tiles[number + i] = {max(first + i * others.tile, runs.begin[run]),
                           min(first + (i + 1) * others.tile, runs.end[run])};
    }
  }
}

__device__ __forceinline__ void list_documents(const DocumentTilesParams& params) {
  __shared__ DocumentRuns own, apart;
  __shared__ int tiles, first;  // of this entry; its place among all
  __shared__ int other_tiles;   // of runs of the other axis
  const RunLanes lanes;
  const int entry = blockIdx.x;
  const bool same = params.segments[0] == params.segments[1] && params.length[0] == params.length[1];
  DocumentRuns& others = same ? own : apart;
  if (threadIdx.x == 0) own.count = apart.count = tiles = other_tiles = 0;
  __syncthreads();
  own.find(params.segments[0] + int64_t(entry) * params.length[0], params.length[0]);
  if (!same) apart.find(params.segments[1] + int64_t(entry) * params.length[1], params.length[1]);
  __syncthreads();
  const bool many = own.count > kMaxDocuments || others.count > kMaxDocuments;
  if (__syncthreads_or(many || others.repeats_id())) {
    if (threadIdx.x == 0) atomicExch(params.counters + kDocumentsRefused, 1);
    return;
  }
  if (!same) apart.find_ends(params.length[1]);
  own.find_ends(params.length[0]);
  __syncthreads();
  const bool lists_others = params.others.tiles != nullptr;
  const int other_tile = params.others.tile;
  for (int run = threadIdx.x; run < own.count; run += blockDim.x) atomicAdd(&tiles, own.tiles_of(run, params.tile));
  for (int run = threadIdx.x; lists_others && run < others.count; run += blockDim.x) {
    atomicAdd(&other_tiles, others.aligned_tiles_of(run, other_tile));
  }
  __syncthreads();
  if (tiles > document_tiles_room(params.length[0], params.tile)) {
    if (threadIdx.x == 0) atomicExch(params.counters + kDocumentsRefused, 1);
    return;
  }
  if (threadIdx.x == 0) first = atomicAdd(params.counters + kDocumentTiles, tiles);
  __syncthreads();
  if (lists_others) list_other_tiles(params.others, others, other_tiles, params.length[1], entry);
  const bool by_runs = other_tiles <= params.others.room;
  const bool own_padded = own.run_of(-1) >= 0, others_padded = others.run_of(-1) >= 0;
  for (int run = lanes.warp; run < own.count; run += lanes.warps) {
    const int begin = own.begin[run], end = own.end[run];
    const int seen = own.id[run] < 0 ? -1 : others.run_of(own.id[run]);
    const int other_begin = seen < 0 ? 0 : others.begin[seen], other_end = seen < 0 ? 0 : others.end[seen];
    int other_first = 0, other_number = 0;
    if (lists_others && seen >= 0) {
      other_number = by_runs ? others.aligned_tiles_before(seen, other_tile) : other_begin / other_tile;
      other_first = by_runs ? aligned_row(other_begin) : other_number * other_tile;
    }
    const int place = first + own.tiles_of_longer(run, params.tile);
    const int count = own.tiles_of(run, params.tile);
    for (int i = lanes.lane; i < count; i += lanes.count) {
      const int tile = params.last_first ? count - 1 - i : i;
      params.tiles[place + i] = {
          entry,       begin + tile * params.tile, end, other_begin, other_end, own_padded, others_padded, other_first,
          other_number};
    }
  }
}

template <Config C>
__device__ __forceinline__ void document_tiles(const DocumentTilesParams& params) {
  const int ranges_block = int(blockIdx.x) - params.ranges.sides.batch;
  if (ranges_block < 0) {
    list_documents(params);
  } else {
    find_segment_ranges<document_tiles_threads(C)>(params.ranges, ranges_block);
  }
}

}  // namespace jattn::sm90
