// How sums become gradients in the type of the results.
//
// A task writes its rows of dk and dv [batch, kv_len, num_kv_heads, head_dim or head_dim_v] itself, unless the queries
// are cut into chunks: then its sums are parts [chunk][batch, num_kv_heads, kv_len] that are joined when all are there.
// dbias, dslopes and dcaptures, to which many tasks add, are finished by stages of their own, which wait for all tasks;
// another one clears dbias before them.
#pragma once

#include "cpu/backward_pass.h"

namespace jattn::cpu {
namespace {

template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::write_dk_dv(const Task& task, Products& products) const {
  const int64_t first = task.kv_tile * kTile, count = min_of(kTile, problem_.kv_len - first);
  if (plan_.num_chunks > 1) {
    const int64_t row =
        ((task.chunk * problem_.batch + task.batch) * problem_.num_kv_heads + task.kv_head) * problem_.kv_len + first;
    const auto bytes = [&](int64_t row_len) { return static_cast<size_t>(count * row_len) * sizeof(Acc); };
    memcpy(dk_parts_ + row * plan_.row_len, products.dk(), bytes(plan_.row_len));
    memcpy(dv_parts_ + row * plan_.row_len_v, products.dv(), bytes(plan_.row_len_v));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = (task.batch * problem_.kv_len + first + i) * problem_.num_kv_heads + task.kv_head;
    write_row(products.dk() + i * plan_.row_len, problem_.head_dim, buffers_.dk, row);
    write_row(products.dv() + i * plan_.row_len_v, problem_.head_dim_v, buffers_.dv, row);
  }
}

template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::write_row(const Acc* from, int64_t head_size, void* array, int64_t row) {
  if (array != nullptr) narrow_row(from, head_size, Acc{1}, static_cast<Element*>(array) + row * head_size);
}

// Sums the chunks' dk and dv of kTile key rows, in the order of the chunks.
template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::join_chunks(int64_t block) const {
  milestones_.wait(all_differentiated(), plan_.num_tasks);
  const auto join = [&](Acc* parts, int64_t index, int64_t row_len) {
    Acc* sum = parts + index * row_len;
    for (int64_t chunk = 1; chunk < plan_.num_chunks; ++chunk) {
      const Acc* part = parts + (chunk * num_kv_rows() + index) * row_len;
      for (int64_t d = 0; d < row_len; ++d) sum[d] += part[d];
    }
    return sum;
  };
  for (int64_t index = block * kTile; index < min_of(num_kv_rows(), (block + 1) * kTile); ++index) {
    const int64_t head = index / problem_.kv_len;
    const int64_t row =
        (head / problem_.num_kv_heads * problem_.kv_len + index % problem_.kv_len) * problem_.num_kv_heads +
        head % problem_.num_kv_heads;
    write_row(join(dk_parts_, index, plan_.row_len), problem_.head_dim, buffers_.dk, row);
    write_row(join(dv_parts_, index, plan_.row_len_v), problem_.head_dim_v, buffers_.dv, row);
  }
}

template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::clear_dbias(int64_t piece) {
  dbias_.clear_piece(piece);
  milestones_.count(dbias_cleared());
}

template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::finish_dbias(int64_t piece) const {
  milestones_.wait(all_differentiated(), plan_.num_tasks);
  dbias_.finish_piece(piece);
}

template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::finish_dslopes() const {
  milestones_.wait(all_differentiated(), plan_.num_tasks);
  dslopes_.finish();
}

template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::finish_dcaptures(int64_t piece) const {
  milestones_.wait(all_differentiated(), plan_.num_tasks);
  dcaptures_.finish_piece(piece);
}

}  // namespace
}  // namespace jattn::cpu
