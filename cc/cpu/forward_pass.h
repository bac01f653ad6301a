// What all parts of the forward pass share: where operands, results and scratch memory lie, what a task and a step are,
// and the list of the parts. One task is the attention of a panel of up to kPanel query rows that share a key/value
// head to a range of keys, kTile keys a step.
//
// The members are defined in the files that the declarations name; forward.inl brings them together. They are `inline`
// there, since GCC's limits for what it inlines are higher for such functions, as for those that stand in a class.
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

  // forward.inl: the stages of the pass, and what a task is made of.
  void run(const TaskRunner& runner);

 private:
  struct Task {
    int64_t batch, kv_head, first_head, num_heads, first_query, num_queries, split;
    int64_t place;  // of the packed tiles of its head
  };

  // The keys of a task, from the beginning of a tile on.
  struct KeyBounds {
    int64_t first, end;
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

  struct RowTotal {
    Acc lse;
    Acc divisor;  // of the output
  };

  // [key][query lane] each, except by_query, which is [query][key]. Where values are not finite, bias holds
  // probabilities later.
  struct Tiles {
    Acc *scores, *visible, *bias, *by_query;
    int8_t* kept;  // by dropout: all ones or 0
    TileProgram program;
  };

  // forward.inl, too.
  int64_t own_heads_for(int64_t num_threads) const;
  void attend_to_head(int64_t group);
  Task decode(int64_t index) const;
  void start_panel(const Task& task, const Sequence& sequence, Acc* out, int64_t num_rows, Panel& panel) const;
  void set_slopes(const Sequence& sequence, Panel& panel) const;
  template <typename Taker>
  void set_queries(const Sequence& sequence, const Panel& panel, const Element* zeros, Taker& products) const;
  KeyBounds bounds_of(const Task& task, const Panel& panel) const;

  // forward_packing.inl: keys and values in the layout of the products.
  void pack_tile(int64_t head, int64_t tile, int64_t place);
  KvTile pack_rows(const Sequence& sequence, int64_t kv_head, KeyRange keys, KvTile to, Workspace workspace) const;

  // forward_key_tiles.inl: the order in which a panel meets its tiles of keys.
  void attend(int64_t index, int64_t place);
  Step next_step(const Task& task, const Sequence& sequence, const Panel& panel, KeyBounds bounds, KvTile own_tile,
                 const Workspace& workspace) const;
  void find_cells(const Sequence& sequence, const Panel& panel, Step& step) const;
  void multiply_keys(const Task& task, const Sequence& sequence, const Products& products, int64_t lanes,
                     const Workspace& workspace, Step& step, Acc* scores) const;
  void attend_by_tiles(const Task& task, const Sequence& sequence, KeyBounds bounds, const KvTile& own_tile,
                       const Workspace& workspace, const Dropout& dropout, const Tiles& tiles, Products& products,
                       Panel& panel) const;
  void attend_ahead(const Task& task, const Sequence& sequence, KeyBounds bounds, const KvTile* own_tiles,
                    const Workspace& workspace, const Dropout& dropout, Acc* const* scores, Tiles& tiles,
                    Products& products, Panel& panel) const;
  void attend_in_runs(const Task& task, const Sequence& sequence, KeyBounds bounds, const KvTile* own_tiles,
                      const Workspace& workspace, const Dropout& dropout, const Tiles& tiles, Products& products,
                      Panel& panel) const;

  // forward_step.inl: from the dot products of one tile to what it adds to the output.
  void add_step(const Task& task, const Sequence& sequence, const Step& step, const Dropout& dropout,
                const Tiles& tiles, Products& products, Panel& panel) const;
  void add_score_rule(const Sequence& sequence, KeyRange keys, const Panel& panel, const Tiles& tiles) const;
  static void hide(const Acc* visible, int64_t keys, int64_t lanes, Acc* scores);
  static void hide_outside_band(const QueryRows& rows, KeyRange keys, int64_t lanes, Acc* scores);
  void rescale(Panel& panel) const;
  template <typename Row>
  void add_where_visible(uint64_t keys, const Row& value_row, const Acc* visible, const Acc* p, Panel& panel) const;

  // forward_rows.inl: the same for a handful of rows, without tiles.
  void attend_by_rows(const Task& task, const Sequence& sequence);
  static void hide_of_row(int64_t count, const Acc* visible, Acc* scores);
  void add_score_rule_by_rows(const Sequence& sequence, KeyRange keys, const Panel& panel, Acc* bias,
                              Acc* scores) const;
  uint64_t hidden_not_finite(int64_t count, int64_t num_rows, const Acc* visible,
                             const typename RowProducts::Rows& values) const;
  void add_by_rows_where_visible(uint64_t keys, const typename RowProducts::Rows& values, const Acc* visible,
                                 const Acc* p, Panel& panel) const;

  // forward_results.inl: output and lse of a row, from what has been accumulated for it.
  void finish_or_save(const Task& task, const Dropout& dropout, const Panel& panel, Acc* rows);
  void finish(const Task& task, const Dropout& dropout, const Panel& panel, Acc* rows) const;
  template <typename Use>
  void for_output_pieces(const Panel& panel, Acc* rows, const Use& use) const;
  RowTotal total_of_row(int64_t batch, int64_t head, Acc row_max, Acc sum, const Dropout& dropout) const;
  static Acc log_of(Acc value);
  static Acc exp_of(Acc value);

  // forward_splits.inl: the merge of parts of the keys.
  void save_partial(const Task& task, const Panel& panel, Acc* rows) const;
  void merge_splits(int64_t block) const;

  template <typename T>
  static T* at(void* scratch, int64_t offset_bytes) {
    return reinterpret_cast<T*>(static_cast<char*>(scratch) + offset_bytes);
  }

  // Milestones: tiles packed of each (batch, kv_head), then tasks done.
  int64_t num_groups() const { return problem_.batch * problem_.num_kv_heads; }

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

  KvTile packed_tile(int64_t index) const {
    return {packed_keys_ + index * plan_.key_tile_len, packed_values_ + index * plan_.value_tile_len, 0};
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

  Acc log2_unit() const { return score_unit_ * static_cast<Acc>(kLog2E); }
  Vec<Acc> residual_of(Vec<Acc> row_max) const {
    return plan_.by_rows ? Vec<Acc>{} : softmax_residual<Products::kFused>(row_max, log2_unit());
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

}  // namespace
}  // namespace jattn::cpu
