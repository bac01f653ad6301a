// The backward pass: one task owns a tile of keys, recomputes P and dS for every tile of queries that sees it, keeps
// dk and dv to itself and adds to dq in an order that does not depend on the threads (Convoy).
#pragma once

#include "cpu/backward_products.h"
#include "cpu/bias_gradient.h"

namespace jattn::cpu {
namespace {

template <typename Element, typename Products>
class BackwardPass {
 public:
  using Acc = Accumulator<Element>;

  BackwardPass(const Problem& problem, const BackwardPlan& plan, const BackwardBuffers& buffers, void* scratch)
      : problem_(problem),
        plan_(plan),
        buffers_(buffers),
        lse_(static_cast<const Acc*>(buffers.lse)),
        delta_(at<Acc>(scratch, plan.delta_offset)),
        dq_sums_(at<Acc>(scratch, plan.dq_offset)),
        dk_parts_(at<Acc>(scratch, plan.dk_offset)),
        dv_parts_(at<Acc>(scratch, plan.dv_offset)),
        dbias_(problem, plan, buffers.dbias, static_cast<char*>(scratch)),
        convoy_(at<int64_t>(scratch, plan.progress_offset), plan.num_tasks, plan.chain_distance),
        group_(problem.num_heads / problem.num_kv_heads),
        scale_(static_cast<Acc>(problem.scale)) {}

  void run(const TaskRunner& runner) {
    const int64_t query_blocks = (problem_.batch * problem_.num_heads * problem_.q_len + kTile - 1) / kTile;
    const auto prepare = [&](int64_t i) {
      if (i < query_blocks) {
        prepare_queries(i);
      } else {
        dbias_.clear_piece(i - query_blocks);
      }
    };
    run_tasks(runner, query_blocks + dbias_.num_pieces(), prepare);

    const auto task = [&](int64_t) { differentiate(convoy_.take()); };
    run_tasks(runner, plan_.num_tasks, task);

    const int64_t kv_blocks = plan_.num_chunks == 1 ? 0 : (num_kv_rows() + kTile - 1) / kTile;
    const auto finish = [&](int64_t i) {
      if (i < query_blocks) {
        finish_dq(i);
      } else if (i < query_blocks + kv_blocks) {
        join_chunks(i - query_blocks);
      } else {
        dbias_.finish_piece(i - query_blocks - kv_blocks);
      }
    };
    run_tasks(runner, query_blocks + kv_blocks + dbias_.num_pieces(), finish);
  }

 private:
  struct Task {
    int64_t batch, kv_head, chunk, kv_tile;
  };

  template <typename T>
  static T* at(void* scratch, int64_t offset_bytes) {
    return reinterpret_cast<T*>(static_cast<char*>(scratch) + offset_bytes);
  }

  int64_t num_kv_rows() const { return problem_.batch * problem_.num_kv_heads * problem_.kv_len; }
  int64_t query_row(int64_t batch, int64_t query, int64_t head) const {
    return (batch * problem_.q_len + query) * problem_.num_heads + head;
  }
  int64_t lse_index(int64_t batch, int64_t query, int64_t head) const {
    return (batch * problem_.num_heads + head) * problem_.q_len + query;
  }
  // query_row of an lse_index.
  int64_t query_row(int64_t index) const {
    const int64_t head = index / problem_.q_len;
    return query_row(head / problem_.num_heads, index % problem_.q_len, head % problem_.num_heads);
  }

  // Row i of a tile of keys or values.
  auto kv_rows(const void* array, const Task& task, int64_t head_size) const {
    const int64_t stride = problem_.num_kv_heads * head_size;
    const Element* first = static_cast<const Element*>(array) +
                           (task.batch * problem_.kv_len + task.kv_tile * kTile) * stride + task.kv_head * head_size;
    return [first, stride](int64_t i) { return first + i * stride; };
  }
  // Row i of a tile of queries or output gradients.
  auto query_rows(const void* array, const Task& task, const QueryRows& rows, int64_t head_size) const {
    const int64_t stride = problem_.num_heads * head_size;
    const Element* first =
        static_cast<const Element*>(array) + query_row(task.batch, rows.query[0], rows.head[0]) * head_size;
    return [first, stride](int64_t i) { return first + i * stride; };
  }

  // delta = rowsum(dout * out) - dlse, and dq = 0, of kTile query rows.
  void prepare_queries(int64_t block) const {
    const int64_t head_dim_v = problem_.head_dim_v;
    const Acc* dlse = static_cast<const Acc*>(buffers_.dlse);
    Workspace workspace(2 * Workspace::bytes<Acc>(plan_.row_len_v));
    Acc* out = workspace.take<Acc>(plan_.row_len_v);
    Acc* dout = workspace.take<Acc>(plan_.row_len_v);
    const int64_t end = min_of(problem_.batch * problem_.num_heads * problem_.q_len, (block + 1) * kTile);
    for (int64_t index = block * kTile; index < end; ++index) {
      const int64_t offset = query_row(index) * head_dim_v;
      widen_row<Element>(static_cast<const Element*>(buffers_.out) + offset, head_dim_v, out, plan_.row_len_v);
      widen_row<Element>(static_cast<const Element*>(buffers_.dout) + offset, head_dim_v, dout, plan_.row_len_v);
      Vec<Acc> sums{};
      for (int64_t d = 0; d < head_dim_v; d += kWidth<Acc>) sums += load(out + d) * load(dout + d);
      Acc sum = 0;
      for (int lane = 0; lane < kWidth<Acc>; ++lane) sum += sums[lane];
      delta_[index] = dlse == nullptr ? sum : sum - dlse[index];
    }
    clear(dq_sums_ + block * kTile * plan_.row_len, (end - block * kTile) * plan_.row_len);
  }

  Task decode(int64_t index) const {
    const auto next = [&](int64_t extent) {
      const int64_t digit = index % extent;
      index /= extent;
      return digit;
    };
    Task task{};
    task.kv_head = next(problem_.num_kv_heads);
    task.batch = next(problem_.batch);
    task.chunk = next(plan_.num_chunks);
    task.kv_tile = index;
    return task;
  }

  struct Tiles {
    Acc *s, *dp;       // become P, and dS including the scale
    Acc *bias, *slope, *visible;
    Acc* column_sums;  // [group][kTile]
  };

  void differentiate(int64_t index) {
    const Task task = decode(index);
    const Sequence sequence(problem_, task.batch);
    const KeyRange keys{task.kv_tile * kTile, min_of(kTile, sequence.kv_length - task.kv_tile * kTile)};

    Workspace workspace(Products::workspace_bytes(plan_) + 5 * Workspace::bytes<Acc>(kTile * kTile) +
                        Workspace::bytes<Acc>(group_ * kTile));
    Products products(problem_, plan_, workspace);
    const auto take_tile = [&] { return workspace.take<Acc>(kTile * kTile); };
    const Tiles tiles{take_tile(), take_tile(),
                      take_tile(), take_tile(), take_tile(), workspace.take<Acc>(group_ * kTile)};
    if (dbias_.sums_over_queries()) clear(tiles.column_sums, group_ * kTile);

    const uint64_t bad_keys = products.set_keys_and_values(max_of(keys.count, 0),
                                                           kv_rows(problem_.k, task, problem_.head_dim),
                                                           kv_rows(problem_.v, task, problem_.head_dim_v));
    // Last queries first: with a causal band the tasks then start at the same tile, one after the other.
    const int64_t first_tile = task.chunk * plan_.chunk_tiles;
    const int64_t end_tile = min_of(plan_.query_tiles, first_tile + plan_.chunk_tiles);
    const int64_t num_tiles = keys.count > 0 ? end_tile - first_tile : 0;
    for (int64_t step = 0; step < num_tiles * group_; ++step) {
      const int64_t tile = end_tile - 1 - step / group_, group_head = step % group_;
      QueryRows rows;
      for (int64_t query = tile * kTile; query < min_of(problem_.q_len, (tile + 1) * kTile); ++query) {
        rows.add(sequence, query, task.kv_head * group_ + group_head);
      }
      const Coverage covered = coverage(problem_, sequence, rows, keys);
      if (covered == Coverage::kNone) continue;
      convoy_.announce(index, step);
      // All heads of another task may add to the same tile of dbias.
      const int64_t turn = dbias_.needs_order() ? (step / group_ + 1) * group_ : step + 1;
      add_tile(task, sequence, rows, keys, covered, bad_keys, tiles, products, [&] { convoy_.wait(index, turn); });
    }
    if (dbias_.sums_over_queries()) {
      convoy_.wait(index, Convoy::kAllSteps);
      for (int64_t g = 0; g < group_ && keys.count > 0; ++g) {
        dbias_.add_column_sums(sequence, task.kv_head * group_ + g, keys, tiles.column_sums + g * kTile);
      }
    }
    convoy_.finish(index);
    write_dk_dv(task, products);
  }

  // One tile of scores: P and dS, and what they add to dv, dk, dq and dbias. Calls `take_turn` before adding to
  // anything that other tasks add to.
  template <typename TakeTurn>
  void add_tile(const Task& task, const Sequence& sequence, const QueryRows& rows, KeyRange keys, Coverage covered,
                uint64_t bad_keys, const Tiles& tiles, Products& products, const TakeTurn& take_turn) {
    const auto q_row = query_rows(problem_.q, task, rows, problem_.head_dim);
    const auto dout_row = query_rows(buffers_.dout, task, rows, problem_.head_dim_v);
    const int64_t lse_first = lse_index(task.batch, rows.query[0], rows.head[0]);
    uint64_t bad_queries = products.set_queries_and_douts(rows.count, q_row, dout_row);
    products.multiply_queries(rows.count, keys.count, tiles.s);
    products.multiply_douts(rows.count, keys.count, tiles.dp);

    if (problem_.bias.data != nullptr) load_bias(problem_, sequence, rows, keys, tiles.bias);
    apply_score_rule<Acc>(scale_, static_cast<Acc>(problem_.softcap),
                          problem_.bias.data != nullptr ? tiles.bias : nullptr, rows.count, kTile, tiles.s,
                          tiles.slope);

    constexpr Acc kMinusInfinity = -static_cast<Acc>(__builtin_inf());
    bool has_empty_row = false;
    for (int64_t row = 0; row < rows.count; ++row) has_empty_row |= lse_[lse_first + row] == kMinusInfinity;
    const bool is_masked = covered == Coverage::kPartial || has_empty_row;
    if (is_masked) {
      find_visible(problem_, sequence, rows, keys, tiles.visible);
      for (int64_t row = 0; row < rows.count; ++row) {
        if (lse_[lse_first + row] == kMinusInfinity) clear(tiles.visible + row * kTile, kTile);
      }
    } else {
      bad_keys = bad_queries = 0;  // every query sees every key: a NaN reaches them all by itself
    }
    differentiate_softmax(rows.count, lse_ + lse_first, delta_ + lse_first, is_masked ? tiles.visible : nullptr, tiles);

    Acc* dq = dq_sums_ + lse_first * plan_.row_len;
    if (buffers_.dv != nullptr) products.add_dv(rows.count, keys.count, tiles.s, bad_queries);
    if (dbias_.is_wanted()) {
      if (dbias_.sums_over_queries()) {
        const int64_t head_of_group = rows.head[0] - task.kv_head * group_;
        dbias_.add_columns(rows.count, keys.count, tiles.dp, tiles.column_sums + head_of_group * kTile);
      } else {
        if (dbias_.needs_order()) take_turn();
        dbias_.add_tile(sequence, rows, keys, tiles.dp);
      }
    }
    scale_ds(rows.count, tiles);
    if (buffers_.dk != nullptr) products.add_dk(rows.count, keys.count, tiles.dp, bad_queries);
    take_turn();
    if (buffers_.dq != nullptr) products.add_dq(rows.count, keys.count, tiles.dp, bad_keys, dq);

    // Rows with NaN or infinity, left out above, go only to those that see them.
    for_bits(bad_queries, [&](int64_t query) {
      for (int64_t key = 0; key < keys.count; ++key) {
        if (tiles.visible[query * kTile + key] == 0) continue;
        add_row(dout_row(query), problem_.head_dim_v, tiles.s[query * kTile + key],
                products.dv() + key * plan_.row_len_v);
        add_row(q_row(query), problem_.head_dim, tiles.dp[query * kTile + key], products.dk() + key * plan_.row_len);
      }
    });
    const auto k_row = kv_rows(problem_.k, task, problem_.head_dim);
    for_bits(bad_keys, [&](int64_t key) {
      for (int64_t query = 0; query < rows.count; ++query) {
        if (tiles.visible[query * kTile + key] == 0) continue;
        add_row(k_row(key), problem_.head_dim, tiles.dp[query * kTile + key], dq + query * plan_.row_len);
      }
    });
  }

  // s becomes P = exp(s - lse) and dp becomes dS = P * (dp - delta); both exactly 0 where nothing is visible.
  void differentiate_softmax(int64_t queries, const Acc* lse, const Acc* delta, const Acc* visible,
                             const Tiles& tiles) const {
    for (int64_t row = 0; row < queries; ++row) {
      for (int64_t i = row * kTile; i < (row + 1) * kTile; i += kWidth<Acc>) {
        Vec<Acc> p = exp2<Acc>((load(tiles.s + i) - lse[row]) * static_cast<Acc>(kLog2E));
        Vec<Acc> ds = p * (load(tiles.dp + i) - delta[row]);
        if (visible != nullptr) {
          const Vec<Acc> is_visible = load(visible + i);
          p = is_visible != 0 ? p : Vec<Acc>{};
          ds = is_visible != 0 ? ds : Vec<Acc>{};
        }
        store(tiles.s + i, p);
        store(tiles.dp + i, ds);
      }
    }
  }

  // From the gradient of the scores to that of the dot products.
  void scale_ds(int64_t queries, const Tiles& tiles) const {
    for (int64_t i = 0; i < queries * kTile; i += kWidth<Acc>) {
      Vec<Acc> ds = load(tiles.dp + i) * scale_;
      if (problem_.softcap > 0) ds *= load(tiles.slope + i);
      store(tiles.dp + i, ds);
    }
  }

  template <typename Use>
  static void for_bits(uint64_t bits, const Use& use) {
    for (; bits != 0; bits &= bits - 1) use(static_cast<int64_t>(__builtin_ctzll(bits)));
  }

  static void add_row(const Element* row, int64_t count, Acc factor, Acc* to) {
    for (int64_t i = 0; i < count; ++i) {
      Acc value[kWidth<Acc>];
      widen_row<Element>(row + i, 1, value, kWidth<Acc>);
      to[i] += factor * value[0];
    }
  }

  void write_dk_dv(const Task& task, Products& products) const {
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

  static void write_row(const Acc* from, int64_t head_size, void* array, int64_t row) {
    if (array != nullptr) narrow_row(from, head_size, Acc{1}, static_cast<Element*>(array) + row * head_size);
  }

  // Sums the chunks' dk and dv of kTile key rows, in the order of the chunks.
  void join_chunks(int64_t block) const {
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
      const int64_t row = (head / problem_.num_kv_heads * problem_.kv_len + index % problem_.kv_len) *
                              problem_.num_kv_heads + head % problem_.num_kv_heads;
      write_row(join(dk_parts_, index, plan_.row_len), problem_.head_dim, buffers_.dk, row);
      write_row(join(dv_parts_, index, plan_.row_len_v), problem_.head_dim_v, buffers_.dv, row);
    }
  }

  void finish_dq(int64_t block) const {
    const int64_t end = min_of(problem_.batch * problem_.num_heads * problem_.q_len, (block + 1) * kTile);
    for (int64_t index = block * kTile; index < end; ++index) {
      write_row(dq_sums_ + index * plan_.row_len, problem_.head_dim, buffers_.dq, query_row(index));
    }
  }

  const Problem& problem_;
  const BackwardPlan& plan_;
  const BackwardBuffers& buffers_;
  const Acc* lse_;
  Acc *delta_, *dq_sums_, *dk_parts_, *dv_parts_;
  BiasGradient<Acc> dbias_;
  Convoy convoy_;
  int64_t group_;
  Acc scale_;
};

template <typename Element, typename Products = BackwardProducts<Element>>
void run_backward(const Problem& problem, const BackwardPlan& plan, const BackwardBuffers& buffers, void* scratch,
                  const TaskRunner& runner) {
  BackwardPass<Element, Products>(problem, plan, buffers, scratch).run(runner);
}

}  // namespace
}  // namespace jattn::cpu
