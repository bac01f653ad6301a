// Tiles that begin with the runs of segment ids: the work list of the forward and backward kernels for packed documents.
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
  __shared__ DocumentRuns own, others;
  __shared__ int tiles, first;  // of this entry; its place among all
  const int entry = blockIdx.x;
  if (threadIdx.x == 0) own.count = others.count = tiles = 0;
  __syncthreads();
  own.find(params.segments[0] + int64_t(entry) * params.length[0], params.length[0]);
  others.find(params.segments[1] + int64_t(entry) * params.length[1], params.length[1]);
  __syncthreads();
  const bool many = own.count > kMaxDocuments || others.count > kMaxDocuments;
  if (__syncthreads_or(many || others.repeats_id())) {
    if (threadIdx.x == 0) atomicExch(params.counters + kDocumentsRefused, 1);
    return;
  }
  own.find_ends(params.length[0]);
  others.find_ends(params.length[1]);
  for (int run = threadIdx.x; run < own.count; run += blockDim.x) {
    atomicAdd(&tiles, ceil_div(own.end[run] - own.begin[run], params.tile));
  }
  __syncthreads();
  if (tiles > document_tiles_room(params.length[0], params.tile)) {
    if (threadIdx.x == 0) atomicExch(params.counters + kDocumentsRefused, 1);
    return;
  }
  if (threadIdx.x == 0) first = atomicAdd(params.counters + kDocumentTiles, tiles);
  __syncthreads();
  const bool own_padded = own.run_of(-1) >= 0, others_padded = others.run_of(-1) >= 0;
  for (int run = threadIdx.x; run < own.count; run += blockDim.x) {
    const int begin = own.begin[run], end = own.end[run];
    int place = first;  // behind the tiles of longer runs
    for (int other = 0; other < own.count; ++other) {
      const int longer = own.end[other] - own.begin[other] - (end - begin);
      if (longer > 0 || (longer == 0 && own.begin[other] < begin)) {
        place += ceil_div(own.end[other] - own.begin[other], params.tile);
      }
    }
    const int seen = own.id[run] < 0 ? -1 : others.run_of(own.id[run]);
    const int other_begin = seen < 0 ? 0 : others.begin[seen], other_end = seen < 0 ? 0 : others.end[seen];
    const int count = ceil_div(end - begin, params.tile);
    for (int i = 0; i < count; ++i, ++place) {
      const int tile = params.last_first ? count - 1 - i : i;
      params.tiles[place] = {entry, begin + tile * params.tile, end, other_begin, other_end, own_padded, others_padded};
    }
  }
}

}  // namespace jattn::sm90
