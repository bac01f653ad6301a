// The end of a task of the forward pass: out [batch, q_len, num_heads, head_dim_v] and lse [batch, num_heads, q_len] of
// its rows, from their running maxima, sums and outputs.
//
// What a row comes to (its sink, the share that dropout keeps, a row without keys) is also asked for by the merge of
// parts of keys.
#pragma once

#include "cpu/forward_pass.h"

namespace jattn::cpu {
namespace {

template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::finish_or_save(const Task& task, const Dropout& dropout, const Panel& panel,
                                                           Acc* rows) {
  if (plan_.num_splits == 1) {
    finish(task, dropout, panel, rows);
  } else {
    save_partial(task, panel, rows);
    milestones_.count(num_groups());
  }
}

template <typename Element, typename Products>
inline void ForwardPass<Element, Products>::finish(const Task& task, const Dropout& dropout, const Panel& panel,
                                                   Acc* rows) const {
  Acc sum_scale[kPanel], divisor[kPanel];
  for (int64_t row = 0; row < panel.lanes; row += kWidth<Acc>) {
    store(sum_scale + row, exp2<Acc>(residual_of(load(panel.softmax.row_max + row))));
  }
  for (int64_t row = 0; row < panel.rows.count; ++row) {
    const int64_t query = panel.rows.query[row], head = panel.rows.head[row];
    const RowTotal total = total_of_row(task.batch, head, panel.softmax.row_max[row],
                                        panel.softmax.row_sum[row] / sum_scale[row], dropout);
    lse_[lse_index(task.batch, query, head)] = total.lse;
    divisor[row] = total.divisor * sum_scale[row];
  }
  for_output_pieces(panel, rows, [&](int64_t row, int64_t d, int64_t count, const Acc* from) {
    Element* to = out_row(task, panel.rows, row) + d;
    if (panel.softmax.row_sum[row] == 0) {
      clear(to, count);
    } else {
      divide_row(from, count, divisor[row], to);
    }
  });
}

// Calls use(row, d, count, from) for elements [d, d + count) of every output row. `rows`: a tile, for rows that lie in
// lanes.
template <typename Element, typename Products>
template <typename Use>
inline void ForwardPass<Element, Products>::for_output_pieces(const Panel& panel, Acc* rows, const Use& use) const {
  if (plan_.by_rows) {
    for (int64_t row = 0; row < panel.rows.count; ++row) {
      use(row, 0, problem_.head_dim_v, panel.out + row * plan_.row_len_v);
    }
    return;
  }
  for (int64_t d = 0; d < problem_.head_dim_v; d += kTile) {
    const int64_t count = min_of(kTile, problem_.head_dim_v - d);
    transpose(panel.out + d * kPanel, kPanel, round_up(count, kWidth<Acc>), panel.lanes, rows, kTile);
    for (int64_t row = 0; row < panel.rows.count; ++row) use(row, d, count, rows + row * kTile);
  }
}

// Of a row with this maximum of scores and sum of exp(score - maximum). Without a visible key the sum is 0 and the
// divisor is not read.
template <typename Element, typename Products>
inline auto ForwardPass<Element, Products>::total_of_row(int64_t batch, int64_t head, Acc row_max, Acc sum,
                                                         const Dropout& dropout) const -> RowTotal {
  if (sum == 0) return {-static_cast<Acc>(__builtin_inf()), 1};
  // Rounded as the backward pass rounds its scores.
  const Acc unit_max = rounded(row_max * score_unit_);
  RowTotal total{unit_max + log_of(sum), sum};
  if (problem_.sinks.data != nullptr) {
    const Acc sink = problem_.sinks.data[batch * problem_.sinks.stride_batch + head * problem_.sinks.stride_head];
    // exp overflows for a sink far above all scores: the output then is 0, as it should be.
    total.divisor += exp_of(sink - unit_max);
    total.lse = sink <= unit_max ? unit_max + log_of(total.divisor) : sink + log_of(1 + sum * exp_of(unit_max - sink));
  }
  total.divisor *= dropout.kept_share<Acc>();
  return total;
}

template <typename Element, typename Products>
inline auto ForwardPass<Element, Products>::log_of(Acc value) -> Acc {
  return sizeof(Acc) == 4 ? static_cast<Acc>(__builtin_logf(static_cast<float>(value)))
                          : static_cast<Acc>(__builtin_log(static_cast<double>(value)));
}

template <typename Element, typename Products>
inline auto ForwardPass<Element, Products>::exp_of(Acc value) -> Acc {
  return sizeof(Acc) == 4 ? static_cast<Acc>(__builtin_expf(static_cast<float>(value)))
                          : static_cast<Acc>(__builtin_exp(static_cast<double>(value)));
}

}  // namespace
}  // namespace jattn::cpu
