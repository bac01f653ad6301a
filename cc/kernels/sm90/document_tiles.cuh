// Tiles that begin with the runs of segment ids: the work list of the forward kernel for packed documents.
//
// Unit of the family document_tiles: entry document_tiles<kConfig>, parameters DocumentTilesParams; one block per batch
// entry. Tiles that lie on a fixed grid hold ends and beginnings of documents: 884 tiles of 128 x 128 for 22 documents of
// 16384 tokens against 833, and two or three tiles a row whose pairs must be tested against one.
// A list is possible where the keys of each id are one run of neighbours, as in packed sequences; else, with more than
// kMaxDocuments runs, and where documents are so short that the list would be longer than document_tiles_room(), the
// entry is refused and the kernel takes all its tiles from the grid. Runs of padding become tiles without keys, so that
// every row of the result has one owner.
//
// Order: longest document first, and of each the last tile first. The tiles of a document stay together because they
// share its keys in L2.
#pragma once

#include "base/numeric.cuh"
#include "config.cuh"
#include "sm90/forward_params.cuh"
#include "sm90/shape.cuh"

namespace jattn::sm90 {

// The runs of equal ids of one side, in no order; all negative ids are one id.
struct DocumentRuns {
  int count;
  int begin[kMaxDocuments], end[kMaxDocuments], id[kMaxDocuments];

  __device__ __forceinline__ void find(const int32_t* ids, int length) {
    for (int i = threadIdx.x; i < length; i += blockDim.x) {
      const int own = max(ids[i], -1);
      if (i > 0 && own == max(ids[i - 1], -1)) continue;
      const int slot = atomicAdd(&count, 1);
      if (slot < kMaxDocuments) {
        begin[slot] = i;
        id[slot] = own;
      }
    }
  }

  __device__ __forceinline__ void find_ends(int length) {
    for (int run = threadIdx.x; run < count; run += blockDim.x) {
      int next = length;
      for (int other = 0; other < count; ++other) {
        if (begin[other] > begin[run]) next = min(next, begin[other]);
      }
      end[run] = next;
    }
  }

  // The run of an id, or -1.
  __device__ __forceinline__ int run_of(int wanted) const {
    int found = -1;
    for (int run = 0; run < count; ++run) found = id[run] == wanted ? run : found;
    return found;
  }

  // Whether the keys of some id are in two places, as far as this thread looks.
  __device__ __forceinline__ bool repeats_id() const {
    bool repeats = false;
    for (int run = threadIdx.x; run < count; run += blockDim.x) {
      repeats = repeats || (id[run] >= 0 && run_of(id[run]) != run);
    }
    return repeats;
  }
};

template <Config C>
__device__ __forceinline__ void document_tiles(const DocumentTilesParams& params) {
  __shared__ DocumentRuns queries, keys;
  __shared__ int tiles, first;  // of this entry; its place among all
  const int entry = blockIdx.x;
  if (threadIdx.x == 0) queries.count = keys.count = tiles = 0;
  __syncthreads();
  queries.find(params.segments[0] + int64_t(entry) * params.length[0], params.length[0]);
  keys.find(params.segments[1] + int64_t(entry) * params.length[1], params.length[1]);
  __syncthreads();
  const bool many = queries.count > kMaxDocuments || keys.count > kMaxDocuments;
  if (__syncthreads_or(many || keys.repeats_id())) {
    if (threadIdx.x == 0) atomicExch(params.counters + kDocumentsRefused, 1);
    return;
  }
  queries.find_ends(params.length[0]);
  keys.find_ends(params.length[1]);
  for (int run = threadIdx.x; run < queries.count; run += blockDim.x) {
    atomicAdd(&tiles, ceil_div(queries.end[run] - queries.begin[run], params.tile_q));
  }
  __syncthreads();
  if (tiles > document_tiles_room(params.length[0], params.tile_q)) {
    if (threadIdx.x == 0) atomicExch(params.counters + kDocumentsRefused, 1);
    return;
  }
  if (threadIdx.x == 0) first = atomicAdd(params.counters + kDocumentTiles, tiles);
  __syncthreads();
  const bool padded = keys.run_of(-1) >= 0;
  for (int run = threadIdx.x; run < queries.count; run += blockDim.x) {
    const int begin = queries.begin[run], end = queries.end[run];
    int place = first;  // behind the tiles of longer runs
    for (int other = 0; other < queries.count; ++other) {
      const int longer = queries.end[other] - queries.begin[other] - (end - begin);
      if (longer > 0 || (longer == 0 && queries.begin[other] < begin)) {
        place += ceil_div(queries.end[other] - queries.begin[other], params.tile_q);
      }
    }
    const int seen = queries.id[run] < 0 ? -1 : keys.run_of(queries.id[run]);
    const int kv_begin = seen < 0 ? 0 : keys.begin[seen], kv_end = seen < 0 ? 0 : keys.end[seen];
    for (int tile = ceil_div(end - begin, params.tile_q) - 1; tile >= 0; --tile, ++place) {
      params.tiles[place] = {entry, begin + tile * params.tile_q, end, kv_begin, kv_end, padded};
    }
  }
}

}  // namespace jattn::sm90
