// The stages of the backward pass that go by tiles of kTile queries of one head: before the tasks delta [batch,
// num_heads, q_len] and the packed form of q and dout, after them dq.
//
// Stages of their own, since every task of a head reads what the first makes and adds to what the last one writes.
#pragma once

#include "cpu/backward_pass.h"

namespace jattn::cpu {
namespace {

// delta = rowsum(dout * out) - dlse, dq = 0, and the packed form of queries and output gradients.
template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::prepare_queries(const QueryTile& tile) {
  const int64_t index = tile.index;
  const int64_t head_dim_v = problem_.head_dim_v;
  const Sequence sequence(problem_, tile.batch);
  const auto is_padding = [&](int64_t i) { return sequence.is_query_padding(tile.first + i); };
  Workspace workspace(prepare_bytes());
  const Element* zeros = take_zeros(workspace);
  const auto rows = [&](const void* array, int64_t row_size) {
    const auto row = query_rows(array, tile, row_size);
    const auto with_next = [row, row_size, asks = plan_.query_tiles == 1](int64_t i) {
      if (asks) prefetch_row(row(i + kRowsAhead), row_size);
      return row(i);
    };
    return without_padding(with_next, is_padding, zeros);
  };
  const auto out_row = rows(buffers_.out, head_dim_v), dout_row = rows(buffers_.dout, head_dim_v);
  const Acc* dlse = static_cast<const Acc*>(buffers_.dlse);
  for (int64_t i = 0; i < tile.count; ++i) {
    const Acc sum = dot_product<Element>(out_row(i), dout_row(i), head_dim_v);
    delta_[tile.first_lse + i] = dlse == nullptr || is_padding(i) ? sum : sum - dlse[tile.first_lse + i];
  }
  not_finite_[index] = Products::pack_queries(plan_, problem_, tile.count, rows(problem_.q, problem_.head_dim),
                                              dout_row, packed_queries_ + index * plan_.query_tile_len,
                                              packed_douts_ + index * plan_.dout_tile_len, workspace);
  if constexpr (Products::kSplitsValues) {
    // Their dS is infinite, which has no planes: they are added exactly.
    for (int64_t i = 0; i < tile.count; ++i) {
      const Acc delta = delta_[tile.first_lse + i];
      not_finite_[index] |= static_cast<uint64_t>(delta - delta != 0) << i;
    }
  }
  clear(dq_sums_ + index * kTile * plan_.row_len, (Products::kWholeTiles ? kTile : tile.count) * plan_.row_len);
}

template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::finish_dq(const QueryTile& tile) const {
  for (int64_t i = 0; i < tile.count; ++i) {
    const int64_t row = (tile.batch * problem_.q_len + tile.first + i) * problem_.num_heads + tile.head;
    write_row(dq_sums_ + (tile.index * kTile + i) * plan_.row_len, problem_.head_dim, buffers_.dq, row);
  }
}

}  // namespace
}  // namespace jattn::cpu
