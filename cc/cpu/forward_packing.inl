// Keys and values of the forward pass in the layout of the products: kTile rows of k, and of v, a tile.
//
// A part of its own, since it is done at one of two times: once for every head, before the tasks that read it
// (plan.packs_first), or by each task for itself, right before it multiplies (forward_key_tiles.inl).
#pragma once

#include "cpu/forward_pass.h"

namespace jattn::cpu {
namespace {

// `place`: of the packed tiles of a head.
template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::pack_tile(int64_t head, int64_t tile, int64_t place) {
  const int64_t batch = head / problem_.num_kv_heads, kv_head = head % problem_.num_kv_heads;
  const Sequence sequence(problem_, batch);
  if (tile * kTile < sequence.kv_length) {
    Workspace workspace(pack_bytes());
    const int64_t index = place * plan_.kv_tiles + tile;
    const KeyRange keys{tile * kTile, min_of(kTile, sequence.kv_length - tile * kTile)};
    not_finite_[index] = pack_rows(sequence, kv_head, keys, packed_tile(index), workspace).not_finite;
  }
  milestones_.count(head);
}

template <typename Element, typename Products>
inline auto ForwardPass<Element, Products>::pack_rows(const Sequence& sequence, int64_t kv_head, KeyRange keys,
                                                      KvTile to, Workspace workspace) const -> KvTile {
  const int64_t first = keys.first;
  const Element* zeros = take_zeros(workspace);
  const auto rows = [&](const void* array, int64_t row_size) {
    const auto row = kv_rows(array, sequence.batch, kv_head, first, row_size);
    const auto with_next = [row, row_size, asks = !plan_.packs_first](int64_t i) {
      if (asks) prefetch_row(row(i + kRowsAhead), row_size);
      return row(i);
    };
    return without_padding(
        with_next, [&sequence, first](int64_t i) { return sequence.is_key_padding(first + i); }, zeros);
  };
  Products::pack_keys(plan_, problem_, keys.count, rows(problem_.k, problem_.head_dim), to.keys);
  to.not_finite =
      Products::pack_values(plan_, problem_, keys.count, rows(problem_.v, problem_.head_dim_v), to.values, workspace);
  return to;
}

}  // namespace
}  // namespace jattn::cpu
