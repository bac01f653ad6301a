// Which tiles of keys an item of the forward visits, and what each of them needs: the masks and the clearing of
// padding.
#pragma once

#include "attn/kv_range.cuh"
#include "base/integers.cuh"
#include "sm90/work.cuh"

namespace jattn::sm90 {

// The filter of the walk, with the states of the tiles of a dense mask.
template <Config C, bool kMask = C.mask>
struct ItemFilter : TileFilter<C> {};
template <Config C>
struct ItemFilter<C, true> : TileFilter<C> {
  static constexpr bool kActive = true;

  MaskStates states;  // of the item's row of tiles

  __device__ __forceinline__ void load_mask(const PackedMask& mask, const ItemRecord& record) {
    states.look_at(mask, record.batch, record.head, record.q_begin / C.tile_q);
  }
  __device__ __forceinline__ int state(int tile) const { return states.of(tile); }
  __device__ __forceinline__ bool meets(int tile) const {
    return TileFilter<C>::meets(tile) && state(tile) != kMaskTileEmpty;
  }
};

// The same for items of the list of documents, of whose range every tile may be visible, and for others.
template <Config C>
struct DocumentFilter : ItemFilter<C> {
  bool by_documents;

  __device__ __forceinline__ bool meets(int tile) const { return by_documents || ItemFilter<C>::meets(tile); }
  __device__ __forceinline__ bool same_segment(int tile) const {
    return by_documents || ItemFilter<C>::same_segment(tile);
  }
  __device__ __forceinline__ bool padding(int tile) const { return !by_documents && ItemFilter<C>::padding(tile); }
};
template <Config C, bool kDocuments = C.documents>
struct WalkFilter {
  using Type = ItemFilter<C>;
};
template <Config C>
struct WalkFilter<C, true> {
  using Type = DocumentFilter<C>;
};

// The key tiles of one item: which to visit, from the last to the first, and what each needs.
template <Config C>
struct ItemTiles {
  TileRange range;
  TileWalk<C, typename WalkFilter<C>::Type> walk;
  bool v_ends_early;  // rows of v behind the keys of this batch entry exist
  int kv_length;

  // by_documents: the item is one of the list of documents, among padded keys or not.
  __device__ __forceinline__ ItemTiles(const ForwardParams& params, const ItemRecord& record, bool by_documents,
                                       bool keys_are_padded)
      : range(item_tiles<C>(params, record)), kv_length(record.kv_length) {
    const ProblemParams& problem = params.problem;
    v_ends_early = C.lengths && kv_length < problem.kv_len;
    walk.begin = range.begin;
    if constexpr (C.documents) {
      walk.filter.by_documents = by_documents;
      if (by_documents) {
        v_ends_early = keys_are_padded;
        return;
      }
    }
    walk.filter.template load<false>(problem, record.batch, record.q_begin / C.tile_q,
                                     {problem.band_left, problem.band_right, 0}, queries_of_tile<C>(params));
    if constexpr (C.mask) walk.filter.load_mask(params.mask, record);
  }

  // Leaves one part of the range, a contiguous piece that may be empty.
  __device__ __forceinline__ void take_part(int part, int parts) {
    const int tiles = ceil_div(max(range.end - range.begin, 0), parts);
    range.end = min(range.end, range.begin + (part + 1) * tiles);
    range.begin += part * tiles;
    walk.begin = range.begin;
  }

  __device__ __forceinline__ int last() { return walk.at_or_below(range.end - 1); }
  __device__ __forceinline__ int before(int tile) { return walk.at_or_below(tile - 1); }

  __device__ __forceinline__ int flags(int tile) const {
    int flags = tile >= range.full_end ? kMaskUpper : 0;
    if constexpr (has_index_band(C)) flags |= tile < range.full_begin ? kMaskLower : 0;
    if constexpr (C.segments) flags |= walk.filter.same_segment(tile) ? 0 : kMaskSegments;
    if constexpr (has_position_band(C)) flags |= walk.filter.inside_band(tile) ? 0 : kMaskPositions;
    if constexpr (C.mask) flags |= walk.filter.state(tile) == kMaskTileFull ? 0 : kMaskDense;
    return flags;
  }

  // Rows of v behind the keys of the batch entry, or of padding among them, may hold anything, and 0 * NaN is NaN: such
  // tiles pass through clear_padding. Rows beyond the array arrive as zeros.
  __device__ __forceinline__ bool has_padding(int tile) const {
    bool padding = (C.lengths || C.documents) && v_ends_early && (tile + 1) * C.tile_kv > kv_length;
    padding = padding || walk.filter.padding(tile);
    return padding;
  }
};

}  // namespace jattn::sm90
