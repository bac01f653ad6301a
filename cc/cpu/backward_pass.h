// What all parts of the backward pass share: where operands, gradients and scratch memory lie, what a task and a step
// are, and the list of the parts. A task owns up to kMostKeyTiles tiles of kTile keys of one key/value head, against
// one chunk of the queries of the heads that read it; a step is a tile of kTile queries of one of these heads.
//
// The members are defined in the files that the declarations name; backward.inl brings them together. They are `inline`
// there, since GCC's limits for what it inlines are higher for such functions, as for those that stand in a class.
#pragma once

#include "cpu/backward_products.h"
#include "cpu/bias_gradient.h"
#include "cpu/capture_gradients.h"
#include "cpu/dropout.h"
#include "cpu/few_rows.h"
#include "cpu/score_program.h"
#include "cpu/slopes_gradient.h"

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
        packed_queries_(at<Acc>(scratch, plan.packed_queries_offset)),
        packed_douts_(at<Acc>(scratch, plan.packed_douts_offset)),
        not_finite_(at<uint64_t>(scratch, plan.not_finite_offset)),
        delta_(at<Acc>(scratch, plan.delta_offset)),
        dq_sums_(at<Acc>(scratch, plan.dq_offset)),
        dk_parts_(at<Acc>(scratch, plan.dk_offset)),
        dv_parts_(at<Acc>(scratch, plan.dv_offset)),
        dbias_(problem, plan, buffers.dbias, static_cast<char*>(scratch)),
        dslopes_(problem, plan, buffers.dslopes, at<double>(scratch, plan.slope_parts_offset)),
        dcaptures_(plan, num_units(), buffers.dcaptures, at<double>(scratch, plan.capture_parts_offset)),
        milestones_(at<int64_t>(scratch, plan.milestones_offset), 2 * num_groups() + 2),
        places_(at<int64_t>(scratch, plan.places_offset), num_groups()),
        convoy_(at<int64_t>(scratch, plan.progress_offset), plan.num_tasks, plan.chain_distance),
        group_(problem.num_heads / problem.num_kv_heads),
        scale_(static_cast<Acc>(problem.scale)),
        scores_by_rows_(!Products::kFusesSoftmax && plan_forward(problem, false).by_rows) {}

  // backward.inl: the stages of the pass, and what each task owns.
  void run(const TaskRunner& runner);

 private:
  static constexpr int64_t kMostKeyTiles = 4;  // of a task

  struct Task {
    int64_t batch, kv_head, chunk, kv_tile;
  };

  // One tile of queries of one head.
  struct QueryTile {
    int64_t batch, head, first, count;
    int64_t index;      // among packed tiles
    int64_t first_lse;  // lse_index of its first query
  };

  struct TileRange {
    int64_t first, end;
    bool contains(int64_t tile) const { return first <= tile && tile < end; }
  };

  // A tile of keys that a task owns.
  struct KeyTile {
    Task task;
    KeyRange keys;
    uint64_t not_finite;
    TileRange query_tiles;        // whose band may reach the keys
    Bits<Acc> coordinate[kTile];  // of the keys, where there are slopes
  };

  // One tile of queries that sees some of the keys.
  struct Step {
    QueryTile tile;
    QueryRows rows;
    Coverage covered;
    Bits<Acc> coordinate[kTile];  // of the queries, where there are slopes
    Acc slope[kTile];             // the same for all
    TileDistances<Acc> distances(const KeyTile& key_tile) const { return {coordinate, key_tile.coordinate, slope}; }
  };

  // Tiles of keys whose dS is still to be added to the dq of a step, in this order.
  struct WaitingDq {
    const Products* products[kMostKeyTiles];
    int64_t keys[kMostKeyTiles];
    int64_t count = 0;
  };

  struct RowValues {
    const Acc *lse, *delta;
  };

  // Of the scores of a step with a tile of keys: [query][key] each.
  struct Tiles {
    Acc *s, *dp;  // become P, and dS including the scale
    Acc *bias, *slope, *visible;
    Acc* column_sums;  // [group][kTile], where a task owns one tile of keys
    int8_t* kept;      // by dropout: all ones or 0
    TileProgram program;
    Acc* program_slope;  // null where all are 1
    Acc* score;          // before the user's function; null where no gradient of captures is wanted
  };

  // backward.inl, too.
  int64_t key_tiles_per_task(int64_t num_threads, bool shares_heads) const;
  int64_t own_heads_for(int64_t num_threads) const;
  void differentiate_head(int64_t group);
  void prefetch_keys_and_values(const Task& task) const;
  Task decode(int64_t index) const;

  // backward_queries.inl: what is done once for each tile of queries, before its tasks and after them.
  void prepare_queries(const QueryTile& tile);
  void finish_dq(const QueryTile& tile) const;

  // backward_key_tiles.inl: a task, tiles of keys against all queries that see them.
  int64_t differentiate(int64_t index, int64_t place, bool is_shared);
  void set_key_tile(const Sequence& sequence, const Task& task, TileRange chunk, const Element* zeros,
                    Products& products, KeyTile& key_tile) const;
  TileRange visible_query_tiles(const Sequence& sequence, KeyRange keys, TileRange chunk) const;
  void set_step(const Sequence& sequence, const QueryTile& tile, Step& step) const;
  void wait_for_tile_before(const Task& task) const;

  // backward_step.inl: one tile of scores, and what it adds to every gradient.
  template <typename TakeTurn>
  void add_step(const Sequence& sequence, const KeyTile& key_tile, const Step& step, const Dropout& dropout,
                const Tiles& tiles, FewRows<Element>& few_rows, Products& products, WaitingDq& waiting,
                const TakeTurn& take_turn);
  template <typename TakeTurn>
  void add_waiting(const Step& step, WaitingDq& waiting, const TakeTurn& take_turn) const;
  void multiply_by_rows(const Sequence& sequence, const KeyTile& key_tile, const Step& step, FewRows<Element>& few_rows,
                        Acc* s) const;
  void add_score_rule(const Sequence& sequence, const KeyTile& key_tile, const Step& step, const Tiles& tiles) const;
  template <typename Use>
  static void for_bits(uint64_t bits, const Use& use);
  static void add_row(const Element* row, int64_t count, Acc factor, Acc* to);

  // backward_softmax.inl: the derivative of the softmax.
  static bool visible_keys(const QueryRows& rows, KeyRange keys, const Acc* lse, uint64_t* visible);
  template <bool kHasScoreRule, bool kDrops>
  void differentiate_softmax(int64_t queries, int64_t columns, RowValues row_values, const Acc* visible,
                             const Dropout& dropout, const Tiles& tiles) const;
  static void multiply_ds(int64_t queries, const Acc* slope, Acc* ds);
  void scale_ds(int64_t queries, const Tiles& tiles) const;

  // backward_results.inl: gradients in the types and places of the results.
  void write_dk_dv(const Task& task, Products& products) const;
  static void write_row(const Acc* from, int64_t head_size, void* array, int64_t row);
  void join_chunks(int64_t block) const;
  void clear_dbias(int64_t piece);
  void finish_dbias(int64_t piece) const;
  void finish_dslopes() const;
  void finish_dcaptures(int64_t piece) const;

  template <typename T>
  static T* at(void* scratch, int64_t offset_bytes) {
    return reinterpret_cast<T*>(static_cast<char*>(scratch) + offset_bytes);
  }

  int64_t num_groups() const { return problem_.batch * problem_.num_kv_heads; }
  int64_t num_units() const { return num_groups() * plan_.num_chunks; }

  // Whether different heads add to the same place.
  bool needs_order_over_heads() const {
    return dbias_.needs_order() || (dcaptures_.is_wanted() && dcaptures_.separate_tiles() == 0);
  }
  int64_t num_key_blocks() const { return (plan_.kv_tiles + key_tiles_ - 1) / key_tiles_; }

  // Milestones: for each (batch, kv_head) its query tiles prepared and its tiles of keys done, a chunk each; pieces of
  // dbias cleared; all tiles of keys done.
  int64_t prepared(int64_t group) const { return group; }
  int64_t differentiated(int64_t group) const { return num_groups() + group; }
  int64_t dbias_cleared() const { return 2 * num_groups(); }
  int64_t all_differentiated() const { return 2 * num_groups() + 1; }

  int64_t num_kv_rows() const { return problem_.batch * problem_.num_kv_heads * problem_.kv_len; }

  // Row i of a tile of keys or values.
  auto kv_rows(const void* array, const Task& task, int64_t head_size) const {
    const int64_t stride = problem_.num_kv_heads * head_size;
    const Element* first = static_cast<const Element*>(array) +
                           (task.batch * problem_.kv_len + task.kv_tile * kTile) * stride + task.kv_head * head_size;
    return [first, stride](int64_t i) { return first + i * stride; };
  }

  // Of the `index`-th tile of the query heads of one (batch, kv_head), whose packed tiles lie at `place`.
  QueryTile query_tile(int64_t group, int64_t index, int64_t place) const {
    const int64_t head_of_all = group * group_ + index / plan_.query_tiles;  // batch * num_heads + head
    const int64_t first = index % plan_.query_tiles * kTile;
    return {head_of_all / problem_.num_heads,
            head_of_all % problem_.num_heads,
            first,
            min_of(kTile, problem_.q_len - first),
            place * group_ * plan_.query_tiles + index,
            head_of_all * problem_.q_len + first};
  }

  int64_t group_of(const QueryTile& tile) const { return tile.batch * problem_.num_kv_heads + tile.head / group_; }

  // Row i of a tile of [B, T, N, row_size].
  auto query_rows(const void* array, const QueryTile& tile, int64_t row_size) const {
    const int64_t stride = problem_.num_heads * row_size;
    const Element* first =
        static_cast<const Element*>(array) + (tile.batch * problem_.q_len + tile.first) * stride + tile.head * row_size;
    return [first, stride](int64_t i) { return first + i * stride; };
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
  int64_t prepare_bytes() const { return Products::pack_bytes(plan_) + zeros_bytes(); }
  int64_t differentiate_bytes() const {
    return kMostKeyTiles * Products::workspace_bytes(plan_) + 5 * Workspace::bytes<Acc>(kTile * kTile) +
           Workspace::bytes<Acc>(group_ * kTile) + Workspace::bytes<int8_t>(kTile * kTile) + zeros_bytes() +
           FewRows<Element>::workspace_bytes(plan_) + TileProgram::workspace_bytes(problem_) +
           (has_program_slopes() ? Workspace::bytes<Acc>(kTile * kTile) : 0) +
           (dcaptures_.is_wanted() ? Workspace::bytes<Acc>(kTile * kTile) : 0);
  }

  // Of its first tile of keys, as parts of the gradients of captures count them.
  int64_t tile_index(const Task& task) const {
    const int64_t unit = (task.chunk * problem_.batch + task.batch) * problem_.num_kv_heads + task.kv_head;
    return task.kv_tile * num_units() + unit;
  }

  // Of a tile of scores, as far as anything is done with them.
  static int64_t columns_of(KeyRange keys) { return Products::kWholeTiles ? kTile : round_up(keys.count, kWidth<Acc>); }

  // Whether gradients of scores have to be multiplied by slopes.
  bool has_program_slopes() const { return problem_.program != nullptr && problem_.program->slope >= 0; }

  const Problem& problem_;
  const BackwardPlan& plan_;
  const BackwardBuffers& buffers_;
  const Acc* lse_;
  Acc *packed_queries_, *packed_douts_;
  uint64_t* not_finite_;  // rows of packed tiles
  Acc *delta_, *dq_sums_, *dk_parts_, *dv_parts_;
  BiasGradient<Acc> dbias_;
  SlopesGradient<Acc> dslopes_;
  CaptureGradients<Acc> dcaptures_;
  Milestones milestones_;
  Places places_;
  Convoy convoy_;
  int64_t key_tiles_ = 1;  // of a task
  int64_t group_;
  Acc scale_;
  bool scores_by_rows_;
};

}  // namespace
}  // namespace jattn::cpu
