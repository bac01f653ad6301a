// The forward pass: FlashAttention's loop over tiles of keys with an online softmax.
#pragma once

#include "cpu/dropout.h"
#include "cpu/few_rows.h"
#include "cpu/forward_products.h"
#include "cpu/online_softmax.h"
#include "cpu/score_program.h"
#include "cpu/scores.h"

namespace jattn::cpu {
namespace {

template <typename Element, typename Products>
class ForwardPass {
 public:
  using Acc = Accumulator<Element>;
  using RowProducts = FewRows<Element>;
  static constexpr int64_t kPanel = Products::kPanel;
  static constexpr bool kPacksByParts = Products::kPackedTogether < kTile;

  ForwardPass(const Problem& problem, const ForwardPlan& plan, const ForwardResults& results, void* scratch)
      : problem_(problem),
        plan_(plan),
        out_(static_cast<Element*>(results.out)),
        lse_(static_cast<Acc*>(results.lse)),
        packed_keys_(at<Acc>(scratch, plan.packed_keys_offset)),
        packed_values_(at<Acc>(scratch, plan.packed_values_offset)),
        not_finite_(at<uint64_t>(scratch, plan.not_finite_offset)),
        milestones_(at<int64_t>(scratch, plan.milestones_offset), num_groups() + 1),
        places_(at<int64_t>(scratch, plan.places_offset), num_groups()),
        partial_out_(at<Acc>(scratch, plan.partial_out_offset)),
        partial_max_(at<Acc>(scratch, plan.partial_max_offset)),
        partial_sum_(at<Acc>(scratch, plan.partial_sum_offset)),
        group_(problem.num_heads / problem.num_kv_heads),
        has_score_rule_(has_score_rule(problem) || problem.scale == 0),
        scale_(static_cast<Acc>(problem.scale < 0 ? -problem.scale : problem.scale)),
        score_unit_(has_score_rule_ ? Acc{1} : scale_) {}

  void run(const TaskRunner& runner) {
    const int64_t own_heads = own_heads_for(max_of(1, runner.num_threads));
    const int64_t num_packs = plan_.packs_first ? (num_groups() - own_heads) * plan_.kv_tiles : 0;
    const int64_t tasks_of_head = plan_.num_tasks / num_groups();
    const int64_t num_tasks = (num_groups() - own_heads) * tasks_of_head;
    const int64_t num_merges = plan_.num_splits > 1 ? (num_rows() + kTile - 1) / kTile : 0;
    const int64_t products = num_rows() * problem_.kv_len * (problem_.head_dim + problem_.head_dim_v);
    run_tasks(runner, own_heads + num_packs + num_tasks + num_merges, products, task_bytes(), [&](int64_t i) {
      if (i < own_heads) {
        attend_to_head(i);
      } else if (i -= own_heads; i < num_packs) {
        const int64_t head = own_heads + i / plan_.kv_tiles;
        const int64_t tile = i % plan_.kv_tiles;
        pack_tile(head, tile, places_.of_shared_head(head, tile == 0));
      } else if (i -= num_packs; i < num_tasks) {
        const int64_t head = own_heads + i / tasks_of_head;
        const int64_t place = plan_.packs_first ? places_.of_shared_head(head, false) : 0;
        attend(head * tasks_of_head + i % tasks_of_head, place);
      } else {
        merge_splits(i - num_tasks);
      }
    });
  }

 private:
  struct Task {
    int64_t batch, kv_head, first_head, num_heads, first_query, num_queries, split;
    int64_t place;  // of the packed tiles of its head
  };

  // A tile of keys and values as the products want it.
  struct KvTile {
    Acc* keys;
    Acc* values;
    uint64_t not_finite;  // rows of values
  };

  // One tile of keys that the queries of a task see.
  struct Step {
    KeyRange keys;  // none left: count = 0
    Coverage covered;
    KvTile kv_tile;
    bool leaves_out = false;  // cells without a visible pair
    BandCells cells{};
  };

  // The query rows of a task and what has been accumulated for them.
  struct Panel {
    QueryRows rows;
    SoftmaxState<Acc, kPanel> softmax;
    int64_t lanes;
    bool is_empty = true;  // nothing has been added to `out`
    Acc* out;              // [head_dim_v][kPanel], by rows [kFewRows][row_len_v]: not yet normalised
    // Of the rows, where there are slopes.
    Bits<Acc> coordinate[kPanel];
    Acc slope[kPanel];
  };

  // [key][query lane] each, except by_query, which is [query][key]. Where values are not finite, bias holds probabilities later.
  struct Tiles {
    Acc *scores, *visible, *bias, *by_query;
    int8_t* kept;  // by dropout: all ones or 0
    TileProgram program;
  };

  template <typename T>
  static T* at(void* scratch, int64_t offset_bytes) {
    return reinterpret_cast<T*>(static_cast<char*>(scratch) + offset_bytes);
  }

  // Milestones: tiles packed of each (batch, kv_head), then tasks done.
  int64_t num_groups() const { return problem_.batch * problem_.num_kv_heads; }

  // The keys and values of the first heads are packed and attended to by one thread each.
  int64_t own_heads_for(int64_t num_threads) const {
    if (!plan_.packs_first || plan_.num_splits > 1) return 0;
    return heads_of_one_thread(num_groups(), num_threads, plan_.query_blocks * plan_.head_blocks * plan_.kv_tiles,
                               has_lengths(problem_));
  }

  void attend_to_head(int64_t group) {
    const int64_t num_tasks = plan_.num_tasks / num_groups(), place = places_.take();
    for (int64_t i = 0; i < plan_.kv_tiles; ++i) pack_tile(group, i, place);
    for (int64_t i = 0; i < num_tasks; ++i) attend(group * num_tasks + i, place);
    places_.give_back(place);
  }

  int64_t num_rows() const { return problem_.batch * problem_.num_heads * problem_.q_len; }
  int64_t query_row(int64_t batch, int64_t query, int64_t head) const {
    return (batch * problem_.q_len + query) * problem_.num_heads + head;
  }
  Element* out_row(const Task& task, const QueryRows& rows, int64_t row) const {
    return out_ + query_row(task.batch, rows.query[row], rows.head[row]) * problem_.head_dim_v;
  }
  int64_t lse_index(int64_t batch, int64_t query, int64_t head) const {
    return (batch * problem_.num_heads + head) * problem_.q_len + query;
  }

  // Row i of a tile of keys or values.
  auto kv_rows(const void* array, int64_t batch, int64_t kv_head, int64_t first_key, int64_t row_size) const {
    const int64_t stride = problem_.num_kv_heads * row_size;
    const Element* first =
        static_cast<const Element*>(array) + (batch * problem_.kv_len + first_key) * stride + kv_head * row_size;
    return [first, stride](int64_t i) { return first + i * stride; };
  }

  // `place`: of the packed tiles of a head.
  void pack_tile(int64_t head, int64_t tile, int64_t place) {
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

  KvTile packed_tile(int64_t index) const {
    return {packed_keys_ + index * plan_.key_tile_len, packed_values_ + index * plan_.value_tile_len, 0};
  }

  KvTile pack_rows(const Sequence& sequence, int64_t kv_head, KeyRange keys, KvTile to, Workspace workspace) const {
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

  // The dot products of a step. Where the task packs for itself, the rows of the step are packed here, a few at a time: the next
  // ones then come from memory while these are multiplied.
  void multiply_keys(const Task& task, const Sequence& sequence, const Products& products, int64_t lanes,
                     const Workspace& workspace, Step& step, Acc* scores) const {
    if constexpr (kPacksByParts) {
      if (!plan_.packs_first) {
        for (int64_t at = 0; at < step.keys.count; at += Products::kPackedTogether) {
          const KeyRange keys{step.keys.first + at, min_of(Products::kPackedTogether, step.keys.count - at)};
          const KvTile to{Products::packed_row(step.kv_tile.keys, at, plan_.row_len),
                          Products::packed_row(step.kv_tile.values, at, plan_.row_len_v), 0};
          step.kv_tile.not_finite |= pack_rows(sequence, task.kv_head, keys, to, workspace).not_finite << at;
          products.multiply_keys(keys.count, to.keys, lanes, scores + at * kPanel);
        }
        return;
      }
    }
    if constexpr (Products::kOnVectors) {
      if (step.leaves_out) {
        products.multiply_keys(step.keys.count, step.cells, step.kv_tile.keys, lanes, scores);
        return;
      }
    }
    if (step.keys.count > 0) products.multiply_keys(step.keys.count, step.kv_tile.keys, lanes, scores);
  }

  // A row in the place of padding.
  int64_t zeros_bytes() const { return Workspace::bytes<Element>(max_of(plan_.row_len, plan_.row_len_v)); }
  const Element* take_zeros(Workspace& workspace) const {
    const int64_t count = max_of(plan_.row_len, plan_.row_len_v);
    Element* zeros = workspace.take<Element>(count);
    clear(zeros, count);
    return zeros;
  }

  // What tasks take of their thread's memory.
  int64_t pack_bytes() const { return Products::pack_bytes(plan_) + zeros_bytes(); }
  int64_t attend_bytes() const {
    return Products::workspace_bytes(plan_) + Products::pack_bytes(plan_) + 5 * Workspace::bytes<Acc>(kTile * kTile) +
           Workspace::bytes<int8_t>(kTile * kPanel) + 2 * Workspace::bytes<Acc>(plan_.key_tile_len) +
           2 * Workspace::bytes<Acc>(plan_.value_tile_len) + Workspace::bytes<Acc>(kPanel * plan_.row_len_v) +
           2 * zeros_bytes() + TileProgram::workspace_bytes(problem_);
  }
  int64_t attend_by_rows_bytes() const {
    return RowProducts::workspace_bytes(plan_) + zeros_bytes() + Workspace::bytes<Acc>(kFewRows * plan_.row_len_v) +
           Workspace::bytes<Acc>(kFewRows * kTile) + 2 * Workspace::bytes<Acc>(kTile * kTile) +
           Workspace::bytes<int8_t>(kTile * kTile) + TileProgram::workspace_bytes(problem_);
  }
  int64_t merge_bytes() const { return Workspace::bytes<Acc>(plan_.row_len_v); }
  int64_t task_bytes() const {
    return max_of(max_of(pack_bytes(), merge_bytes()), plan_.by_rows ? attend_by_rows_bytes() : attend_bytes());
  }

  Task decode(int64_t index) const {
    const auto next = [&](int64_t extent) {
      const int64_t digit = index % extent;
      index /= extent;
      return digit;
    };
    Task task{};
    // Neighbours share the packed keys and values of a head, or, where each task reads the rows, the pages that these lie in.
    if (plan_.packs_first) task.split = next(plan_.num_splits);
    const int64_t head_block = next(plan_.head_blocks);
    const int64_t place = next(plan_.query_blocks);
    const int64_t query_block = plan_.last_queries_first ? plan_.query_blocks - 1 - place : place;
    task.kv_head = next(problem_.num_kv_heads);
    if (!plan_.packs_first) task.split = next(plan_.num_splits);
    task.batch = index;
    task.first_head = task.kv_head * group_ + head_block * plan_.heads;
    task.num_heads = min_of(plan_.heads, (task.kv_head + 1) * group_ - task.first_head);
    task.first_query = query_block * plan_.queries;
    task.num_queries = min_of(plan_.queries, problem_.q_len - task.first_query);
    return task;
  }

  // Attention of one block of queries to one range of keys.
  void attend(int64_t index, int64_t place) {
    Task task = decode(index);
    task.place = place;
    const Sequence sequence(problem_, task.batch);
    if (plan_.by_rows) {
      attend_by_rows(task, sequence);
      return;
    }
    Workspace workspace(attend_bytes());
    Products products(problem_, plan_, workspace);
    const auto take_tile = [&] { return workspace.take<Acc>(kTile * kTile); };
    Acc* const scores[] = {take_tile(), take_tile()};
    Tiles tiles{scores[0],
                take_tile(),
                take_tile(),
                take_tile(),
                workspace.take<int8_t>(kTile * kPanel),
                TileProgram(problem_, workspace)};
    const auto take_kv_tile = [&] {
      Acc* keys = workspace.take<Acc>(plan_.key_tile_len);
      return KvTile{keys, workspace.take<Acc>(plan_.value_tile_len), 0};
    };
    const KvTile own_tiles[] = {take_kv_tile(), take_kv_tile()};

    Panel panel{};
    start_panel(task, sequence, workspace.take<Acc>(kPanel * plan_.row_len_v), kPanel, panel);
    const Dropout dropout(problem_, sequence);
    set_queries(sequence, panel, take_zeros(workspace), products);

    if (plan_.packs_first) {
      milestones_.wait(task.batch * problem_.num_kv_heads + task.kv_head, plan_.kv_tiles);
    } else {
      for (int64_t row = 0; row < panel.rows.count; ++row) {
        prefetch_row<true>(out_row(task, panel.rows, row), problem_.head_dim_v);
      }
    }

    const KeyBounds bounds = bounds_of(task, panel);
    if constexpr (Products::kOnVectors) {
      attend_by_tiles(task, sequence, bounds, own_tiles[0], workspace, dropout, tiles, products, panel);
    } else if (Products::kMostRunTiles > 0 && plan_.goes_in_runs) {
      attend_in_runs(task, sequence, bounds, own_tiles, workspace, dropout, tiles, products, panel);
    } else {
      attend_ahead(task, sequence, bounds, own_tiles, workspace, dropout, scores, tiles, products, panel);
    }
    finish_or_save(task, dropout, panel, tiles.by_query);
  }

  // The rows of a task; `out` has room for `num_rows` of them.
  void start_panel(const Task& task, const Sequence& sequence, Acc* out, int64_t num_rows, Panel& panel) const {
    panel.out = out;
    panel.softmax.reset();
    for (int64_t row = 0; row < task.num_queries * task.num_heads; ++row) {
      panel.rows.add(sequence, task.first_query + row % task.num_queries, task.first_head + row / task.num_queries);
    }
    panel.lanes = round_up(panel.rows.count, kWidth<Acc>);
    // On vectors the first tile stores its sums.
    if (plan_.by_rows || !Products::kOnVectors) clear(panel.out, num_rows * plan_.row_len_v);
    if (problem_.alibi_slopes.data != nullptr) set_slopes(sequence, panel);
  }

  template <typename Taker>
  void set_queries(const Sequence& sequence, const Panel& panel, const Element* zeros, Taker& products) const {
    const auto q_row = [&, asks = !plan_.packs_first](int64_t i) {
      const int64_t row = query_row(sequence.batch, panel.rows.query[i], panel.rows.head[i]);
      const Element* const q = static_cast<const Element*>(problem_.q) + row * problem_.head_dim;
      if (asks) prefetch_row(q + kRowsAhead * problem_.num_heads * problem_.head_dim, problem_.head_dim);
      return q;
    };
    const auto is_padding = [&](int64_t i) { return sequence.is_query_padding(panel.rows.query[i]); };
    products.set_queries(panel.rows.count, problem_.scale < 0 ? -1 : 1, without_padding(q_row, is_padding, zeros));
  }

  // attend() for a handful of rows, which needs no tiles of its own. What hides keys and acts on scores has keys in the lanes
  // from the start.
  void attend_by_rows(const Task& task, const Sequence& sequence) {
    Workspace workspace(attend_by_rows_bytes());
    RowProducts products(problem_, plan_, workspace);
    Panel panel{};
    start_panel(task, sequence, workspace.take<Acc>(kFewRows * plan_.row_len_v), kFewRows, panel);
    const Dropout dropout(problem_, sequence);
    set_queries(sequence, panel, take_zeros(workspace), products);
    Acc* const scores = workspace.take<Acc>(kFewRows * kTile);
    Acc* const visible = workspace.take<Acc>(kTile * kTile);
    Acc* const bias = workspace.take<Acc>(kTile * kTile);
    int8_t* const kept = workspace.take<int8_t>(kTile * kTile);
    const TileProgram program(problem_, workspace);
    const auto rows_of = [&](const void* array, int64_t first, int64_t row_size) {
      const auto row = kv_rows(array, task.batch, task.kv_head, first, row_size);
      return typename RowProducts::Rows{row(0), row(1) - row(0)};
    };

    const KeyBounds bounds = bounds_of(task, panel);
    for (KeyRange keys{bounds.first, 0}; keys.first < bounds.end; keys.first += kTile) {
      keys.count = min_of(kTile, sequence.kv_length - keys.first);
      const Coverage covered = coverage(problem_, sequence, panel.rows, keys);
      if (covered == Coverage::kNone) continue;
      products.multiply_keys(keys.count, rows_of(problem_.k, keys.first, problem_.head_dim), scores);
      if (has_score_rule_) add_score_rule_by_rows(sequence, keys, panel, bias, scores);
      if (problem_.program != nullptr) {
        program.apply<Acc>(sequence, panel.rows, keys, true, kTile, scores, nullptr);
      }
      if (covered == Coverage::kPartial) find_visible(problem_, sequence, panel.rows, keys, visible);
      if (dropout.is_active()) dropout.draw_for_rows(panel.rows, keys, kept);
      for (int64_t row = 0; row < panel.rows.count; ++row) {
        Acc* const scores_of_row = scores + row * kTile;
        hide_of_row(keys.count, covered == Coverage::kPartial ? visible + row * kTile : nullptr, scores_of_row);
        const auto drop = [&](int64_t key, Vec<Acc>& p) {
          if (dropout.is_active()) p = where_kept<Acc>(kept + row * kTile + key, p);
        };
        const Acc rescale = update_softmax_of_row(kTile, log2_unit(), scores_of_row, row, panel.softmax, drop);
        if (rescale == 1) continue;
        Acc* const out = panel.out + row * plan_.row_len_v;
        for (int64_t d = 0; d < plan_.row_len_v; d += kWidth<Acc>) store(out + d, load(out + d) * rescale);
      }
      const auto values = rows_of(problem_.v, keys.first, problem_.head_dim_v);
      const uint64_t apart =
          covered == Coverage::kPartial ? hidden_not_finite(keys.count, panel.rows.count, visible, values) : 0;
      for_runs(keys.count, apart, [&](int64_t first, int64_t count) {
        products.add_values(count, {values.first + first * values.stride, values.stride}, scores + first, panel.out);
      });
      if (apart != 0) add_by_rows_where_visible(apart, values, visible, scores, panel);
    }
    finish_or_save(task, dropout, panel, nullptr);
  }

  // Sets the scores of keys that are invisible (visible: 0), and of those from `count` on, to -inf.
  static void hide_of_row(int64_t count, const Acc* visible, Acc* scores) {
    constexpr Acc kMinusInfinity = -static_cast<Acc>(__builtin_inf());
    for (int64_t key = 0; visible != nullptr && key < kTile; key += kWidth<Acc>) {
      store(scores + key, load(visible + key) != 0 ? load(scores + key) : broadcast(kMinusInfinity));
    }
    for (int64_t key = count; key < kTile; ++key) scores[key] = kMinusInfinity;
  }

  void add_score_rule_by_rows(const Sequence& sequence, KeyRange keys, const Panel& panel, Acc* bias,
                              Acc* scores) const {
    const bool has_bias = problem_.bias.data != nullptr;
    if (has_bias) load_bias(problem_, sequence, panel.rows, keys, bias);
    Bits<Acc> key_coordinate[kTile] = {};
    Acc slope[kTile];
    for (int64_t i = 0; i < keys.count; ++i) {
      key_coordinate[i] = static_cast<Bits<Acc>>(sequence.key_coordinate(keys.first + i));
    }
    for (int64_t row = 0; row < panel.rows.count; ++row) {
      ScoreRule<Acc> rule{scale_, static_cast<Acc>(problem_.softcap), has_bias ? bias + row * kTile : nullptr, nullptr};
      const TileDistances<Acc> distances{panel.coordinate + row, key_coordinate, slope};
      if (problem_.alibi_slopes.data != nullptr) {
        for (Acc& each : slope) each = panel.slope[row];
        rule.distances = &distances;
      }
      apply_score_rule<kTile, Acc>(rule, 1, round_up(keys.count, kWidth<Acc>), scores + row * kTile, nullptr);
    }
  }

  // The keys that not every row sees and whose values are not finite, as bits: 0 * NaN would be NaN.
  uint64_t hidden_not_finite(int64_t count, int64_t num_rows, const Acc* visible,
                             const typename RowProducts::Rows& values) const {
    uint64_t found = 0;
    for (int64_t key = 0; key < count; ++key) {
      bool is_hidden = false;
      for (int64_t row = 0; row < num_rows; ++row) is_hidden |= visible[row * kTile + key] == 0;
      if (!is_hidden) continue;
      const Element* value = values.first + key * values.stride;
      found |= static_cast<uint64_t>(!is_finite_row(value, problem_.head_dim_v)) << key;
    }
    return found;
  }

  void add_by_rows_where_visible(uint64_t keys, const typename RowProducts::Rows& values, const Acc* visible,
                                 const Acc* p, Panel& panel) const {
    for (; keys != 0; keys &= keys - 1) {
      const int64_t key = __builtin_ctzll(keys);
      for (int64_t row = 0; row < panel.rows.count; ++row) {
        if (visible[row * kTile + key] == 0) continue;
        for (int64_t d = 0; d < problem_.head_dim_v; ++d) {
          Acc value[kWidth<Acc>];
          widen_row<Element>(values.first + key * values.stride + d, 1, value, kWidth<Acc>);
          panel.out[row * plan_.row_len_v + d] += p[row * kTile + key] * value[0];
        }
      }
    }
  }

  void finish_or_save(const Task& task, const Dropout& dropout, const Panel& panel, Acc* rows) {
    if (plan_.num_splits == 1) {
      finish(task, dropout, panel, rows);
    } else {
      save_partial(task, panel, rows);
      milestones_.count(num_groups());
    }
  }

  struct KeyBounds {
    int64_t first, end;
  };
  // What the rows of a task see of its split, from the beginning of a tile on.
  KeyBounds bounds_of(const Task& task, const Panel& panel) const {
    return {max_of(panel.rows.least_first, task.split * plan_.split_len) / kTile * kTile,
            min_of(panel.rows.most_end, (task.split + 1) * plan_.split_len)};
  }

  // The first tile in `bounds` that is not wholly invisible.
  Step next_step(const Task& task, const Sequence& sequence, const Panel& panel, KeyBounds bounds, KvTile own_tile,
                 const Workspace& workspace) const {
    for (int64_t key = bounds.first; key < bounds.end; key += kTile) {
      const KeyRange keys{key, min_of(kTile, sequence.kv_length - key)};
      const Coverage covered = coverage(problem_, sequence, panel.rows, keys);
      if (covered == Coverage::kNone) continue;
      if (!plan_.packs_first) {
        return {keys, covered, kPacksByParts ? own_tile : pack_rows(sequence, task.kv_head, keys, own_tile, workspace)};
      }
      const int64_t index = task.place * plan_.kv_tiles + key / kTile;
      KvTile packed = packed_tile(index);
      packed.not_finite = not_finite_[index];
      return {keys, covered, packed};
    }
    return {{0, 0}, Coverage::kNone, own_tile};
  }

  // Where products can leave cells out, of a tile that is packed already.
  void find_cells(const Sequence& sequence, const Panel& panel, Step& step) const {
    if (!Products::kOnVectors || !plan_.packs_first || step.covered != Coverage::kPartial) return;
    if (!only_band_hides(problem_, sequence) || step.kv_tile.not_finite != 0) return;
    step.leaves_out = find_band_cells(panel.rows, step.keys, step.cells);
  }

  // Scores of a tile, then all that follows from them.
  void attend_by_tiles(const Task& task, const Sequence& sequence, KeyBounds bounds, const KvTile& own_tile,
                       const Workspace& workspace, const Dropout& dropout, const Tiles& tiles, Products& products,
                       Panel& panel) const {
    for (;;) {
      Step step = next_step(task, sequence, panel, bounds, own_tile, workspace);
      if (step.keys.count == 0) return;
      find_cells(sequence, panel, step);
      multiply_keys(task, sequence, products, panel.lanes, workspace, step, tiles.scores);
      add_step(task, sequence, step, dropout, tiles, products, panel);
      bounds.first = step.keys.first + kTile;
    }
  }

  // Scores are made one tile ahead: the matrix unit's have left the store buffer by the time that the softmax reads them. Vectors
  // read them from there; two tiles of scores take a third of a first-level cache.
  void attend_ahead(const Task& task, const Sequence& sequence, KeyBounds bounds, const KvTile* own_tiles,
                    const Workspace& workspace, const Dropout& dropout, Acc* const* scores, Tiles& tiles,
                    Products& products, Panel& panel) const {
    Step step = next_step(task, sequence, panel, bounds, own_tiles[0], workspace);
    multiply_keys(task, sequence, products, panel.lanes, workspace, step, scores[0]);
    for (int i = 1; step.keys.count > 0; i ^= 1) {
      Step next = next_step(task, sequence, panel, {step.keys.first + kTile, bounds.end}, own_tiles[i], workspace);
      tiles.scores = scores[i ^ 1];
      if constexpr (Products::kInterleaves) {
        const bool is_plain = step.covered == Coverage::kFull && step.kv_tile.not_finite == 0 && !has_score_rule_ &&
                              !dropout.is_active() && step.keys.count == kTile && panel.lanes == kPanel;
        if (is_plain && next.keys.count > 0) {
          typename Products::Softmax softmax(log2_unit(), tiles.scores, panel.softmax);
          if (products.multiply_keys_beside(softmax, next.keys.count, next.kv_tile.keys, scores[i])) {
            if (softmax.finish()) {
              products.add_values(kTile, step.kv_tile.values, panel.lanes, tiles.scores, 0, panel.out);
            } else {
              add_step(task, sequence, step, dropout, tiles, products, panel);
            }
            step = next;
            continue;
          }
        }
      }
      multiply_keys(task, sequence, products, panel.lanes, workspace, next, scores[i]);
      add_step(task, sequence, step, dropout, tiles, products, panel);
      step = next;
    }
  }

  // Several tiles at a time, where the products have a way to do so and it serves the tiles.
  void attend_in_runs(const Task& task, const Sequence& sequence, KeyBounds bounds, const KvTile* own_tiles,
                      const Workspace& workspace, const Dropout& dropout, const Tiles& tiles, Products& products,
                      Panel& panel) const {
    if constexpr (Products::kMostRunTiles > 0) {
      constexpr int64_t kOwnTiles = 2;
      const int64_t most_tiles = plan_.packs_first ? Products::kMostRunTiles : kOwnTiles;
      const bool only_band = !sequence.has_position_band && sequence.q_segments == nullptr;
      Step steps[Products::kMostRunTiles];
      while (bounds.first < bounds.end) {
        int64_t count = 0, in_run = 0;
        while (count < most_tiles && count == in_run) {
          const Step& step = steps[count] =
              next_step(task, sequence, panel, bounds, own_tiles[plan_.packs_first ? 0 : count], workspace);
          if (step.keys.count == 0) break;
          // A run has no gaps.
          if (count > 0 && step.keys.first != steps[count - 1].keys.first + kTile) break;
          bounds.first = step.keys.first + kTile;
          ++count;
          if ((only_band || step.covered == Coverage::kFull) && step.kv_tile.not_finite == 0) ++in_run;
        }
        if (count == 0) break;
        if (in_run > 0) {
          const KeyRange& last = steps[in_run - 1].keys;
          const KeyRange keys{steps[0].keys.first, last.first + last.count - steps[0].keys.first};
          if (!products.attend_run(
                  panel.rows, keys, in_run, [&](int64_t i) { return steps[i].kv_tile; }, log2_unit(), panel.softmax,
                  panel.out)) {
            in_run = 0;
          }
        }
        for (int64_t i = in_run; i < count; ++i) {
          products.multiply_keys(steps[i].keys.count, steps[i].kv_tile.keys, panel.lanes, tiles.scores);
          add_step(task, sequence, steps[i], dropout, tiles, products, panel);
        }
      }
    }
  }

  // From the dot products of a tile to what it adds to the output.
  void add_step(const Task& task, const Sequence& sequence, const Step& step, const Dropout& dropout,
                const Tiles& tiles, Products& products, Panel& panel) const {
    const KeyRange keys = step.keys;
    const uint64_t not_finite = step.kv_tile.not_finite;
    const bool is_masked = step.covered == Coverage::kPartial || not_finite != 0;
    if (has_score_rule_) add_score_rule(sequence, keys, panel, tiles);
    if (is_masked && only_band_hides(problem_, sequence) && not_finite == 0) {
      hide_outside_band(panel.rows, keys, panel.lanes, tiles.scores);
    } else if (is_masked) {
      find_visible(problem_, sequence, panel.rows, keys, tiles.by_query);
      transpose(tiles.by_query, kTile, kPanel, kTile, tiles.visible, kPanel);
      hide(tiles.visible, keys.count, panel.lanes, tiles.scores);
    }
    products.start_probabilities(keys.count);
    const auto update = [&](auto stores, const auto& drop) {
      return update_softmax<Products::kFused, Products::kShortExp2, stores(), Acc, kPanel>(
          keys.count, panel.lanes, log2_unit(), tiles.scores, panel.softmax,
          [&](int64_t key, int64_t lane, Vec<Acc>& even, Vec<Acc>& odd) {
            drop(key, lane, even, odd);
            products.take_probabilities(key, lane, even, odd);
          });
    };
    const auto drop_nothing = [](int64_t, int64_t, const Vec<Acc>&, const Vec<Acc>&) {};
    constexpr std::true_type kStores;
    constexpr std::bool_constant<Products::kReadsScores> kReadsScores;
    const Acc* p = tiles.scores;
    bool rescales;
    if (dropout.is_active()) {
      dropout.draw_for_lanes<kPanel>(panel.rows, keys, tiles.kept);
      rescales = update(kStores, [&](int64_t key, int64_t lane, Vec<Acc>& even, Vec<Acc>& odd) {
        const int8_t* const kept = tiles.kept + key * kPanel + lane;
        even = where_kept<Acc>(kept, even);
        odd = where_kept<Acc>(kept + kPanel, odd);
      });
    } else if (not_finite != 0) {
      // Beside the scores: the same softmax as without such values, whose bits others must not change.
      p = tiles.bias;
      rescales = update(kReadsScores, [&](int64_t key, int64_t lane, const Vec<Acc>& even, const Vec<Acc>& odd) {
        store(tiles.bias + key * kPanel + lane, even);
        store(tiles.bias + (key + 1) * kPanel + lane, odd);
      });
    } else {
      rescales = update(kReadsScores, drop_nothing);
    }
    if constexpr (Products::kOnVectors) {
      const bool starts = panel.is_empty;
      panel.is_empty = false;
      if (rescales && !starts) rescale(panel);
      if (step.leaves_out) {
        products.add_values(step.cells, step.kv_tile.values, panel.lanes, tiles.scores, starts, panel.out);
      } else {
        products.add_values(keys.count, step.kv_tile.values, panel.lanes, tiles.scores, not_finite, starts, panel.out);
      }
    } else {
      if (rescales) rescale(panel);
      products.add_values(keys.count, step.kv_tile.values, panel.lanes, tiles.scores, not_finite, panel.out);
    }
    if (not_finite != 0) {
      add_where_visible(not_finite, kv_rows(problem_.v, task.batch, task.kv_head, keys.first, problem_.head_dim_v),
                        tiles.visible, p, panel);
    }
  }

  void add_score_rule(const Sequence& sequence, KeyRange keys, const Panel& panel, const Tiles& tiles) const {
    const bool has_bias = problem_.bias.data != nullptr;
    if (has_bias) {
      load_bias(problem_, sequence, panel.rows, keys, tiles.by_query);
      // Lanes without a query take part in the choice of how a tile's softmax is computed.
      clear(tiles.by_query + panel.rows.count * kTile, (panel.lanes - panel.rows.count) * kTile);
      transpose(tiles.by_query, kTile, kPanel, kTile, tiles.bias, kPanel);
    }
    ScoreRule<Acc> rule{scale_, static_cast<Acc>(problem_.softcap), has_bias ? tiles.bias : nullptr, nullptr};
    Bits<Acc> key_coordinate[kTile];
    const TileDistances<Acc> distances{key_coordinate, panel.coordinate, panel.slope};
    if (problem_.alibi_slopes.data != nullptr) {
      for (int64_t i = 0; i < keys.count; ++i) {
        key_coordinate[i] = static_cast<Bits<Acc>>(sequence.key_coordinate(keys.first + i));
      }
      rule.distances = &distances;
    }
    apply_score_rule<kPanel, Acc>(rule, keys.count, panel.lanes, tiles.scores, nullptr);
    if (problem_.program != nullptr) {
      tiles.program.template apply<Acc>(sequence, panel.rows, keys, false, kPanel, tiles.scores, nullptr);
    }
  }

  void set_slopes(const Sequence& sequence, Panel& panel) const {
    for (int64_t lane = 0; lane < panel.rows.count; ++lane) {
      panel.coordinate[lane] = static_cast<Bits<Acc>>(sequence.query_coordinate(panel.rows.query[lane]));
      panel.slope[lane] = alibi_slope(problem_, sequence.batch, panel.rows.head[lane]);
    }
  }

  static void hide(const Acc* visible, int64_t keys, int64_t lanes, Acc* scores) {
    constexpr Acc kMinusInfinity = -static_cast<Acc>(__builtin_inf());
    for (int64_t key = 0; key < keys; ++key) {
      for (int64_t at = key * kPanel; at < key * kPanel + lanes; at += kWidth<Acc>) {
        store(scores + at, load(visible + at) != 0 ? load(scores + at) : broadcast(kMinusInfinity));
      }
    }
  }

  // The same where lengths and band alone decide, without a tile of what is visible.
  static void hide_outside_band(const QueryRows& rows, KeyRange keys, int64_t lanes, Acc* scores) {
    Bits<Acc> first[kPanel] = {}, end[kPanel] = {};
    const auto within_tile = [&](int64_t key) {
      return static_cast<Bits<Acc>>(min_of(max_of(key - keys.first, 0), kTile));
    };
    for (int64_t row = 0; row < rows.count; ++row) {
      first[row] = within_tile(rows.first_key[row]);
      end[row] = within_tile(rows.end_key[row]);
    }
    for (int64_t lane = 0; lane < lanes; lane += kWidth<Acc>) {
      const Vec<Bits<Acc>> from = load(first + lane), to = load(end + lane);
      Vec<Bits<Acc>> at{};
      for (int64_t key = 0; key < keys.count; ++key, at += 1) {
        Acc* const score = scores + key * kPanel + lane;
        const Vec<Acc> seen = from <= at ? load(score) : broadcast(-static_cast<Acc>(__builtin_inf()));
        store(score, at < to ? seen : broadcast(-static_cast<Acc>(__builtin_inf())));
      }
    }
  }

  void rescale(Panel& panel) const {
    for (int64_t d = 0; d < problem_.head_dim_v; ++d) {
      for (int64_t lane = 0; lane < panel.lanes; lane += kWidth<Acc>) {
        Acc* at = panel.out + d * kPanel + lane;
        store(at, load(at) * load(panel.softmax.rescale + lane));
      }
    }
  }

  // Adds the rows of `keys` (bits) to the queries that see them and to no other: 0 * NaN would be NaN.
  template <typename Row>
  void add_where_visible(uint64_t keys, const Row& value_row, const Acc* visible, const Acc* p, Panel& panel) const {
    for (; keys != 0; keys &= keys - 1) {
      const int64_t key = __builtin_ctzll(keys);
      for (int64_t d = 0; d < problem_.head_dim_v; ++d) {
        Acc value[kWidth<Acc>];
        widen_row<Element>(value_row(key) + d, 1, value, kWidth<Acc>);
        for (int64_t lane = 0; lane < panel.lanes; ++lane) {
          const int64_t at = key * kPanel + lane;
          if (visible[at] != 0) panel.out[d * kPanel + lane] += p[at] * value[0];
        }
      }
    }
  }

  void finish(const Task& task, const Dropout& dropout, const Panel& panel, Acc* rows) const {
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

  // Calls use(row, d, count, from) for elements [d, d + count) of every output row. `rows`: a tile, for rows that lie in lanes.
  template <typename Use>
  void for_output_pieces(const Panel& panel, Acc* rows, const Use& use) const {
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

  struct RowTotal {
    Acc lse;
    Acc divisor;  // of the output
  };

  Acc log2_unit() const { return score_unit_ * static_cast<Acc>(kLog2E); }
  Vec<Acc> residual_of(Vec<Acc> row_max) const {
    return plan_.by_rows ? Vec<Acc>{} : softmax_residual<Products::kFused>(row_max, log2_unit());
  }

  // Of a row with this maximum of scores and sum of exp(score - maximum). Without a visible key the sum is 0 and the
  // divisor is not read.
  RowTotal total_of_row(int64_t batch, int64_t head, Acc row_max, Acc sum, const Dropout& dropout) const {
    if (sum == 0) return {-static_cast<Acc>(__builtin_inf()), 1};
    // Rounded as the backward pass rounds its scores.
    const Acc unit_max = rounded(row_max * score_unit_);
    RowTotal total{unit_max + log_of(sum), sum};
    if (problem_.sinks.data != nullptr) {
      const Acc sink = problem_.sinks.data[batch * problem_.sinks.stride_batch + head * problem_.sinks.stride_head];
      // exp overflows for a sink far above all scores: the output then is 0, as it should be.
      total.divisor += exp_of(sink - unit_max);
      total.lse =
          sink <= unit_max ? unit_max + log_of(total.divisor) : sink + log_of(1 + sum * exp_of(unit_max - sink));
    }
    total.divisor *= dropout.kept_share<Acc>();
    return total;
  }

  static Acc log_of(Acc value) {
    return sizeof(Acc) == 4 ? static_cast<Acc>(__builtin_logf(static_cast<float>(value)))
                            : static_cast<Acc>(__builtin_log(static_cast<double>(value)));
  }
  static Acc exp_of(Acc value) {
    return sizeof(Acc) == 4 ? static_cast<Acc>(__builtin_expf(static_cast<float>(value)))
                            : static_cast<Acc>(__builtin_exp(static_cast<double>(value)));
  }

  void save_partial(const Task& task, const Panel& panel, Acc* rows) const {
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
  void merge_splits(int64_t block) const {
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

  const Problem& problem_;
  const ForwardPlan& plan_;
  Element* out_;
  Acc* lse_;
  Acc *packed_keys_, *packed_values_;
  uint64_t* not_finite_;
  Milestones milestones_;
  Places places_;
  Acc *partial_out_, *partial_max_, *partial_sum_;
  int64_t group_;
  bool has_score_rule_;
  Acc scale_;       // its magnitude: the sign goes into the queries, so that the largest product is the largest score
  Acc score_unit_;  // natural-logarithm units of one unit of what the softmax sees
};

template <typename Element, typename Products = ForwardProducts<Element>>
void run_forward(const Problem& problem, const ForwardPlan& plan, const ForwardResults& results, void* scratch,
                 const TaskRunner& runner) {
  ForwardPass<Element, Products>(problem, plan, results, scratch).run(runner);
}

}  // namespace
}  // namespace jattn::cpu
