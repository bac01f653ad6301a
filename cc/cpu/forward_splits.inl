// Rows whose keys are split among several tasks: partial_max and partial_sum [split][batch, num_heads, q_len],
// partial_out [split][batch, num_heads, q_len][row_len_v], and their merge by the rescaling identity of online softmax
// (arXiv:1805.02867, section 3).
//
// A stage of its own: it waits for all tasks, and always adds in the order of the splits, so that the bits of the
// result do not depend on the threads.
#pragma once

#include "cpu/forward_pass.h"

namespace jattn::cpu {
namespace {

template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::save_partial(const Task& task, const Panel& panel, Acc* rows) const {
  const auto index = [&](int64_t row) {
    return task.split * num_rows() + lse_index(task.batch, panel.rows.query[row], panel.rows.head[row]);
  };
  for (int64_t row = 0; row < panel.rows.count; ++row) {
    partial_max_[index(row)] = panel.softmax.row_max[row];
    partial_sum_[index(row)] = panel.softmax.row_sum[row];
  }
  for_output_pieces(panel, rows, [&](int64_t row, int64_t d, int64_t count, const Acc* from) {
    memcpy(partial_out_ + index(row) * plan_.row_len_v + d, from, static_cast<size_t>(count) * sizeof(Acc));
  });
}

// Joins the splits of kTile output rows, in the order of the splits.
template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::merge_splits(int64_t block) const {
  milestones_.wait(num_groups(), plan_.num_tasks);
  Workspace workspace(merge_bytes());
  Acc* merged = workspace.take<Acc>(plan_.row_len_v);
  for (int64_t row = block * kTile; row < min_of(num_rows(), (block + 1) * kTile); ++row) {
    Acc row_max = -static_cast<Acc>(__builtin_inf()), sum = 0;
    for (int64_t split = 0; split < plan_.num_splits; ++split) {
      const Acc split_max = partial_max_[split * num_rows() + row];
      row_max = split_max > row_max ? split_max : row_max;
    }
    const Acc shift = row_max == -static_cast<Acc>(__builtin_inf()) ? 0 : row_max;
    clear(merged, plan_.row_len_v);
    for (int64_t split = 0; split < plan_.num_splits; ++split) {
      const int64_t index = split * num_rows() + row;
      if (partial_sum_[index] == 0) continue;
      const Vec<Acc> weight = exp2<Acc>((broadcast(partial_max_[index]) - shift) * log2_unit() -
                                        residual_of(broadcast(partial_max_[index])));
      sum += partial_sum_[index] * weight[0];
      const Acc* from = partial_out_ + index * plan_.row_len_v;
      for (int64_t d = 0; d < problem_.head_dim_v; ++d) merged[d] += from[d] * weight[0];
    }
    const int64_t query = row % problem_.q_len, head = row / problem_.q_len % problem_.num_heads;
    const int64_t batch = row / problem_.q_len / problem_.num_heads;
    const Sequence sequence(problem_, batch);
    const RowTotal total = total_of_row(batch, head, row_max, sum, Dropout(problem_, sequence));
    lse_[row] = total.lse;
    Element* out = out_ + query_row(batch, query, head) * problem_.head_dim_v;
    if (sum == 0) {
      clear(out, problem_.head_dim_v);
    } else {
      divide_row(merged, problem_.head_dim_v, total.divisor, out);
    }
  }
}

}  // namespace
}  // namespace jattn::cpu
