// The backward pass: one task owns some tiles of keys, recomputes P and dS for every tile of queries that sees them,
// keeps dk and dv to itself and adds to dq in an order that does not depend on the threads (Convoy).
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

  void run(const TaskRunner& runner) {
    const int64_t num_threads = max_of(1, runner.num_threads);
    const int64_t own_heads = own_heads_for(num_threads), shared_heads = num_groups() - own_heads;
    key_tiles_ = key_tiles_per_task(num_threads, shared_heads > 0);
    const int64_t head_tiles = group_ * plan_.query_tiles;
    const int64_t kv_blocks = plan_.num_chunks == 1 ? 0 : (num_kv_rows() + kTile - 1) / kTile;
    const int64_t stages[] = {dbias_.num_pieces(),       own_heads,
                              shared_heads * head_tiles, shared_heads * plan_.num_chunks * num_key_blocks(),
                              shared_heads * head_tiles, kv_blocks,
                              dbias_.num_pieces(),       dslopes_.is_wanted() ? 1 : 0,
                              dcaptures_.num_pieces()};
    int64_t num_tasks = 0;
    for (const int64_t stage : stages) num_tasks += stage;
    const int64_t pairs = problem_.batch * problem_.num_heads * problem_.q_len * problem_.kv_len;
    const int64_t products = pairs * (3 * problem_.head_dim + 2 * problem_.head_dim_v);
    run_tasks(runner, num_tasks, products, max_of(prepare_bytes(), differentiate_bytes()), [&](int64_t i) {
      int stage = 0;
      for (const int64_t size : stages) {
        if (i < size) break;
        i -= size;
        ++stage;
      }
      const auto tile_of_shared = [&](bool takes_place) {
        const int64_t head = own_heads + i / head_tiles, tile = i % head_tiles;
        return query_tile(head, tile, places_.of_shared_head(head, takes_place && tile == 0));
      };
      switch (stage) {
        case 0: clear_dbias(i); break;
        case 1: differentiate_head(i); break;
        case 2: {
          const QueryTile tile = tile_of_shared(true);
          prepare_queries(tile);
          milestones_.count(prepared(group_of(tile)));
          break;
        }
        case 3: {
          const int64_t head = own_heads + i % shared_heads;
          const int64_t done =
              differentiate(i / shared_heads * num_groups() + head, places_.of_shared_head(head, false), true);
          milestones_.count(differentiated(head), done);
          break;
        }
        case 4: {
          const QueryTile tile = tile_of_shared(false);
          milestones_.wait(differentiated(group_of(tile)), plan_.kv_tiles * plan_.num_chunks);
          finish_dq(tile);
          break;
        }
        case 5: join_chunks(i); break;
        case 6: finish_dbias(i); break;
        case 7: finish_dslopes(); break;
        default: finish_dcaptures(i); break;
      }
    });
  }

 private:
  struct Task {
    int64_t batch, kv_head, chunk, kv_tile;
  };

  template <typename T>
  static T* at(void* scratch, int64_t offset_bytes) {
    return reinterpret_cast<T*>(static_cast<char*>(scratch) + offset_bytes);
  }

  int64_t num_groups() const { return problem_.batch * problem_.num_kv_heads; }
  int64_t num_units() const { return num_groups() * plan_.num_chunks; }

  static constexpr int64_t kMostKeyTiles = 4;

  // Tiles of keys that a task owns: queries, dout and dq are fetched once for all of them, which is what a long pass
  // waits for. The sums of dq are the same for any number; those of a dbias that heads share are not.
  int64_t key_tiles_per_task(int64_t num_threads, bool shares_heads) const {
    constexpr int64_t kTasksPerThread = 8;   // so that the last of them leave few idle
    constexpr int64_t kMostBytes = 9 << 17;  // of what is kept of the keys, beside a tile of queries in a cache
    if (needs_order_over_heads()) return 1;
    const int64_t by_tasks = plan_.num_tasks / (kTasksPerThread * num_threads);
    const int64_t by_bytes = kMostBytes / Products::workspace_bytes(plan_);
    // A head that a thread has packed for itself stays in its cache, if it is small and what is kept of the keys leaves
    // room for it.
    constexpr int64_t kSmallHeadBytes = 1 << 20, kKeyTilesOfSmallHead = 2;
    const int64_t head_bytes = group_ * plan_.query_tiles * static_cast<int64_t>(sizeof(Acc)) *
                               (plan_.query_tile_len + plan_.dout_tile_len + kTile * plan_.row_len);
    int64_t most = !shares_heads && head_bytes <= kSmallHeadBytes ? kKeyTilesOfSmallHead : kMostKeyTiles;
    if (dcaptures_.is_wanted()) most = min_of(most, dcaptures_.separate_tiles());
    return max_of(1, min_of(most, min_of(by_tasks, by_bytes)));
  }
  // Whether different heads add to the same place.
  bool needs_order_over_heads() const {
    return dbias_.needs_order() || (dcaptures_.is_wanted() && dcaptures_.separate_tiles() == 0);
  }
  // The first heads are differentiated by one thread each, unless there is an order over all heads.
  int64_t own_heads_for(int64_t num_threads) const {
    if (plan_.num_chunks > 1 || needs_order_over_heads()) return 0;
    return heads_of_one_thread(num_groups(), num_threads, group_ * plan_.query_tiles * plan_.kv_tiles,
                               has_lengths(problem_));
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

  // One tile of queries of one head.
  struct QueryTile {
    int64_t batch, head, first, count;
    int64_t index;      // among packed tiles
    int64_t first_lse;  // lse_index of its first query
  };
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

  void differentiate_head(int64_t group) {
    const int64_t place = places_.take(), head_tiles = group_ * plan_.query_tiles;
    if (plan_.kv_tiles == 1) prefetch_keys_and_values(decode(group));
    for (int64_t i = 0; i < head_tiles; ++i) prepare_queries(query_tile(group, i, place));
    for (int64_t i = 0; i < num_key_blocks(); ++i) differentiate(i * num_groups() + group, place, false);
    for (int64_t i = 0; i < head_tiles; ++i) finish_dq(query_tile(group, i, place));
    places_.give_back(place);
  }

  // They come while the queries are prepared.
  void prefetch_keys_and_values(const Task& task) const {
    const auto key_row = kv_rows(problem_.k, task, problem_.head_dim);
    const auto value_row = kv_rows(problem_.v, task, problem_.head_dim_v);
    for (int64_t i = 0; i < problem_.kv_len; ++i) {
      prefetch_row(key_row(i), problem_.head_dim);
      prefetch_row(value_row(i), problem_.head_dim_v);
    }
  }

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

  // delta = rowsum(dout * out) - dlse, dq = 0, and the packed form of queries and output gradients.
  void prepare_queries(const QueryTile& tile) {
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

  void clear_dbias(int64_t piece) {
    dbias_.clear_piece(piece);
    milestones_.count(dbias_cleared());
  }

  // The first tile of keys of a task.
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
    task.kv_tile = index * key_tiles_;
    return task;
  }

  // Of its first tile of keys, as parts of the gradients of captures count them.
  int64_t tile_index(const Task& task) const {
    const int64_t unit = (task.chunk * problem_.batch + task.batch) * problem_.num_kv_heads + task.kv_head;
    return task.kv_tile * num_units() + unit;
  }
  // Until the one before it has been added to the part of the gradients of captures that this one is added to.
  void wait_for_tile_before(const Task& task) const {
    const int64_t before = dcaptures_.tile_before(tile_index(task));
    if (before >= 0) convoy_.wait_for_end(before / num_units() / key_tiles_ * num_units() + before % num_units());
  }

  struct Tiles {
    Acc *s, *dp;  // become P, and dS including the scale
    Acc *bias, *slope, *visible;
    Acc* column_sums;  // [group][kTile], where a task owns one tile of keys
    int8_t* kept;      // by dropout: all ones or 0
    TileProgram program;
    Acc* program_slope;  // null where all are 1
    Acc* score;          // before the user's function; null where no gradient of captures is wanted
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

  // The tiles of queries in a chunk whose band may reach some keys.
  TileRange visible_query_tiles(const Sequence& sequence, KeyRange keys, TileRange chunk) const {
    const int64_t first_query = max_of(0, keys.first - sequence.end_key_offset + 1);
    const int64_t end_query = min_of(sequence.q_length, keys.first + keys.count - sequence.first_key_offset);
    if (keys.count <= 0 || end_query <= first_query) return {chunk.end, chunk.end};
    return {max_of(chunk.first, first_query / kTile), min_of(chunk.end, (end_query + kTile - 1) / kTile)};
  }

  void set_step(const Sequence& sequence, const QueryTile& tile, Step& step) const {
    step.tile = tile;
    for (int64_t i = 0; i < tile.count; ++i) step.rows.add(sequence, tile.first + i, tile.head);
    if (problem_.alibi_slopes.data == nullptr) return;
    for (int64_t i = 0; i < tile.count; ++i) {
      step.coordinate[i] = static_cast<Bits<Acc>>(sequence.query_coordinate(tile.first + i));
    }
    const Acc slope = alibi_slope(problem_, sequence.batch, tile.head);
    for (Acc& of_key : step.slope) of_key = slope;
  }

  // Takes the keys and values of one tile.
  void set_key_tile(const Sequence& sequence, const Task& task, TileRange chunk, const Element* zeros,
                    Products& products, KeyTile& key_tile) const {
    const int64_t first_key = task.kv_tile * kTile;
    const KeyRange keys{first_key, max_of(0, min_of(kTile, sequence.kv_length - first_key))};
    const auto key_rows = [&](const void* array, int64_t row_size) {
      return without_padding(
          kv_rows(array, task, row_size), [&](int64_t i) { return sequence.is_key_padding(first_key + i); }, zeros);
    };
    key_tile.task = task;
    key_tile.keys = keys;
    key_tile.not_finite = products.set_keys_and_values(keys.count, key_rows(problem_.k, problem_.head_dim),
                                                       key_rows(problem_.v, problem_.head_dim_v));
    key_tile.query_tiles = visible_query_tiles(sequence, keys, chunk);
    if (problem_.alibi_slopes.data != nullptr) {
      for (int64_t i = 0; i < kTile; ++i) {
        const int64_t coordinate = i < keys.count ? sequence.key_coordinate(keys.first + i) : 0;
        key_tile.coordinate[i] = static_cast<Bits<Acc>>(coordinate);
      }
    }
    if (dslopes_.is_wanted()) {
      const int64_t first_head = task.batch * problem_.num_heads + task.kv_head * group_;
      for (int64_t g = 0; g < group_; ++g) dslopes_.part(first_head + g, task.chunk, task.kv_tile) = 0;
    }
    if (dcaptures_.is_wanted() && dcaptures_.tile_before(tile_index(task)) < 0) dcaptures_.clear_part(tile_index(task));
  }

  // `place`: of the packed tiles of its head, which other threads prepare where it is shared. Returns the tiles of keys done.
  int64_t differentiate(int64_t index, int64_t place, bool is_shared) {
    const Task task = decode(index);
    const Sequence sequence(problem_, task.batch);
    const Dropout dropout(problem_, sequence);
    Workspace workspace(differentiate_bytes());
    const auto take_tile = [&] { return workspace.take<Acc>(kTile * kTile); };
    const Tiles tiles{take_tile(),
                      take_tile(),
                      take_tile(),
                      take_tile(),
                      take_tile(),
                      workspace.take<Acc>(group_ * kTile),
                      workspace.take<int8_t>(kTile * kTile),
                      TileProgram(problem_, workspace),
                      has_program_slopes() ? take_tile() : nullptr,
                      dcaptures_.is_wanted() ? take_tile() : nullptr};
    if (dbias_.sums_over_queries()) clear(tiles.column_sums, group_ * kTile);
    const Element* zeros = take_zeros(workspace);

    const TileRange chunk{task.chunk * plan_.chunk_tiles,
                          min_of(plan_.query_tiles, (task.chunk + 1) * plan_.chunk_tiles)};
    const int64_t num_key_tiles = min_of(key_tiles_, plan_.kv_tiles - task.kv_tile);
    FewRows<Element> few_rows(problem_, plan_, workspace);
    Products products[] = {{problem_, plan_, workspace},
                           {problem_, plan_, workspace},
                           {problem_, plan_, workspace},
                           {problem_, plan_, workspace}};
    static_assert(sizeof(products) == kMostKeyTiles * sizeof(Products));
    KeyTile key_tiles[kMostKeyTiles];
    TileRange range{chunk.end, chunk.first};
    for (int64_t i = 0; i < num_key_tiles; ++i) {
      Task of_tile = task;
      of_tile.kv_tile += i;
      set_key_tile(sequence, of_tile, chunk, zeros, products[i], key_tiles[i]);
      const TileRange& seen = key_tiles[i].query_tiles;
      if (seen.first < seen.end) range = {min_of(range.first, seen.first), max_of(range.end, seen.end)};
    }
    const int64_t group = task.batch * problem_.num_kv_heads + task.kv_head;
    if (is_shared) milestones_.wait(prepared(group), group_ * plan_.query_tiles);
    milestones_.wait(dbias_cleared(), dbias_.num_pieces());

    // Last queries first: with a causal band the tasks then start at the same tile, one after the other. A step is one
    // tile of one head, counted from the end of the chunk.
    for (int64_t tile = range.end; tile-- > range.first;) {
      for (int64_t group_head = 0; group_head < group_; ++group_head) {
        Step step;
        set_step(sequence, query_tile(group, group_head * plan_.query_tiles + tile, place), step);
        const int64_t steps_before = (chunk.end - 1 - tile) * group_ + group_head;
        // All heads of another task may add to the same tile of dbias.
        const int64_t turn = dbias_.needs_order() ? (chunk.end - tile) * group_ : steps_before + 1;
        const auto take_turn = [&] { convoy_.wait(index, turn); };
        WaitingDq waiting;
        for (int64_t i = 0; i < num_key_tiles; ++i) {
          const KeyTile& key_tile = key_tiles[i];
          if (!key_tile.query_tiles.contains(tile)) continue;
          step.covered = coverage(problem_, sequence, step.rows, key_tile.keys);
          if (step.covered == Coverage::kNone) continue;
          convoy_.announce(index, steps_before);
          add_step(sequence, key_tile, step, dropout, tiles, few_rows, products[i], waiting, take_turn);
        }
        add_waiting(step, waiting, take_turn);
      }
    }
    if (dbias_.sums_over_queries()) {
      convoy_.wait(index, Convoy::kAllSteps);
      const KeyRange keys = key_tiles[0].keys;
      for (int64_t g = 0; g < group_ && keys.count > 0; ++g) {
        dbias_.add_column_sums(sequence, task.kv_head * group_ + g, keys, tiles.column_sums + g * kTile);
      }
    }
    // Even if it added nothing: the next one of a part waits for this one alone.
    for (int64_t i = 0; i < num_key_tiles && dcaptures_.is_wanted(); ++i) wait_for_tile_before(key_tiles[i].task);
    convoy_.finish(index);
    for (int64_t i = 0; i < num_key_tiles; ++i) {
      products[i].finish(key_tiles[i].keys.count);
      write_dk_dv(key_tiles[i].task, products[i]);
    }
    if (plan_.num_chunks > 1 || dbias_.is_wanted() || dslopes_.is_wanted() || dcaptures_.is_wanted()) {
      milestones_.count(all_differentiated(), num_key_tiles);
    }
    return num_key_tiles;
  }

  // Dot products as the forward pass formed them: rounded otherwise, the probability of a key far above all others would not be 1.
  void multiply_by_rows(const Sequence& sequence, const KeyTile& key_tile, const Step& step, FewRows<Element>& few_rows,
                        Acc* s) const {
    const auto q_row = [&](int64_t i) {
      const int64_t row = (sequence.batch * problem_.q_len + step.rows.query[i]) * problem_.num_heads + step.tile.head;
      return static_cast<const Element*>(problem_.q) + row * problem_.head_dim;
    };
    few_rows.set_queries(step.rows.count, 1, q_row);
    const auto key_row = kv_rows(problem_.k, key_tile.task, problem_.head_dim);
    few_rows.multiply_keys(key_tile.keys.count, {key_row(0), key_row(1) - key_row(0)}, s);
    // What padding holds decides nothing, nor what follows the last key.
    for (int64_t row = 0; row < step.rows.count; ++row) {
      const bool is_padding = sequence.is_query_padding(step.rows.query[row]);
      for (int64_t i = 0; i < columns_of(key_tile.keys); ++i) {
        if (is_padding || sequence.is_key_padding(key_tile.keys.first + i)) s[row * kTile + i] = 0;
      }
    }
  }

  // Tiles of keys whose dS is still to be added to the dq of a step, in this order.
  struct WaitingDq {
    const Products* products[kMostKeyTiles];
    int64_t keys[kMostKeyTiles];
    int64_t count = 0;
  };

  template <typename TakeTurn>
  void add_waiting(const Step& step, WaitingDq& waiting, const TakeTurn& take_turn) const {
    if constexpr (Products::kFusesSoftmax) {
      if (waiting.count == 0) return;
      take_turn();
      Products::add_dq(step.rows.count, waiting.products, waiting.keys, waiting.count,
                       dq_sums_ + step.tile.index * kTile * plan_.row_len);
      waiting.count = 0;
    }
  }

  // One tile of scores: P and dS, and what they add to dv, dk, dq, dbias, dslopes and dcaptures, dq perhaps later (`waiting`).
  // Calls `take_turn` before adding to anything that other tasks add to.
  template <typename TakeTurn>
  void add_step(const Sequence& sequence, const KeyTile& key_tile, const Step& step, const Dropout& dropout,
                const Tiles& tiles, FewRows<Element>& few_rows, Products& products, WaitingDq& waiting,
                const TakeTurn& take_turn) {
    const Task& task = key_tile.task;
    const KeyRange& keys = key_tile.keys;
    const uint64_t bad_keys = key_tile.not_finite;
    const QueryTile& tile = step.tile;
    const QueryRows& rows = step.rows;
    const Coverage covered = step.covered;
    const Acc* lse = lse_ + tile.first_lse;
    const uint64_t bad_queries = not_finite_[tile.index];
    products.set_queries(packed_queries_ + tile.index * plan_.query_tile_len,
                         packed_douts_ + tile.index * plan_.dout_tile_len, bad_queries);
    if constexpr (Products::kInterleaves) {
      bool is_plain = covered == Coverage::kFull && !has_score_rule(problem_) && !dropout.is_active() &&
                      rows.count == kTile && keys.count == kTile && buffers_.dq != nullptr && buffers_.dk != nullptr &&
                      buffers_.dv != nullptr;
      for (int64_t row = 0; row < rows.count; ++row) is_plain &= lse[row] != -static_cast<Acc>(__builtin_inf());
      Acc* dq = dq_sums_ + tile.index * kTile * plan_.row_len;
      if (is_plain && products.add_plain_step(lse, delta_ + tile.first_lse, scale_, tiles.s, tiles.dp, dq, take_turn)) {
        return;
      }
    }
    BandCells of_band;
    const bool may_leave_out = Products::kLeavesOutCells && covered == Coverage::kPartial &&
                               only_band_hides(problem_, sequence) && (bad_keys | bad_queries) == 0 && !scores_by_rows_;
    const BandCells* cells = may_leave_out && find_band_cells(rows, keys, of_band) ? &of_band : nullptr;
    if (scores_by_rows_) {
      multiply_by_rows(sequence, key_tile, step, few_rows, tiles.s);
    } else {
      products.multiply_queries(rows.count, keys.count, cells, tiles.s);
    }
    products.multiply_douts(rows.count, keys.count, cells, tiles.dp);

    if constexpr (Products::kFusesSoftmax) {
      if (!has_score_rule(problem_) && !dropout.is_active() && (bad_keys | bad_queries) == 0 &&
          (covered == Coverage::kFull || only_band_hides(problem_, sequence))) {
        uint64_t visible[kTile];
        const bool sees_all = visible_keys(rows, keys, lse, visible);
        products.find_p_and_ds(rows.count, tiles.s, tiles.dp, lse, delta_ + tile.first_lse, scale_,
                               sees_all ? nullptr : visible);
        products.add_dv_and_dk(rows.count, buffers_.dv != nullptr, buffers_.dk != nullptr);
        if (buffers_.dq != nullptr) {
          waiting.products[waiting.count] = &products;
          waiting.keys[waiting.count++] = keys.count;
        }
        return;
      }
    }
    add_waiting(step, waiting, take_turn);

    if (has_score_rule(problem_)) add_score_rule(sequence, key_tile, step, tiles);
    if (dropout.is_active()) dropout.draw_for_rows(rows, keys, tiles.kept);

    constexpr Acc kMinusInfinity = -static_cast<Acc>(__builtin_inf());
    bool has_empty_row = false;
    for (int64_t row = 0; row < rows.count; ++row) has_empty_row |= lse[row] == kMinusInfinity;
    const bool is_masked = covered == Coverage::kPartial || has_empty_row || (bad_keys | bad_queries) != 0;
    if (is_masked) {
      find_visible(problem_, sequence, rows, keys, tiles.visible);
      for (int64_t row = 0; row < rows.count; ++row) {
        if (lse[row] == kMinusInfinity) clear(tiles.visible + row * kTile, kTile);
      }
    }
    const RowValues row_values{lse, delta_ + tile.first_lse};
    const int64_t columns = columns_of(keys);
    const auto differentiate = [&](auto... flags) {
      const Acc* visible = is_masked ? tiles.visible : nullptr;
      differentiate_softmax<flags()...>(rows.count, columns, row_values, visible, dropout, tiles);
    };
    constexpr std::true_type kYes;
    constexpr std::false_type kNo;
    if (has_score_rule(problem_)) {
      dropout.is_active() ? differentiate(kYes, kYes) : differentiate(kYes, kNo);
    } else {
      dropout.is_active() ? differentiate(kNo, kYes) : differentiate(kNo, kNo);
    }

    if (dcaptures_.is_wanted()) {
      wait_for_tile_before(task);
      tiles.program.add_gradients(sequence, rows, keys, tiles.score, tiles.dp, dcaptures_.part(tile_index(task)),
                                  dcaptures_.num_elements());
    }
    if (tiles.program_slope != nullptr) multiply_ds(rows.count, tiles.program_slope, tiles.dp);
    Acc* dq = dq_sums_ + tile.index * kTile * plan_.row_len;
    if (buffers_.dv != nullptr) products.add_dv(rows.count, keys.count, cells, tiles.s, bad_queries);
    if (dbias_.is_wanted()) {
      if (dbias_.sums_over_queries()) {
        const int64_t head_of_group = tile.head - task.kv_head * group_;
        dbias_.add_columns(rows.count, keys.count, tiles.dp, tiles.column_sums + head_of_group * kTile);
      } else {
        if (dbias_.needs_order()) take_turn();
        dbias_.add_tile(sequence, rows, keys, tiles.dp);
      }
    }
    if (dslopes_.is_wanted()) {
      const int64_t head_of_all = tile.batch * problem_.num_heads + tile.head;
      dslopes_.part(head_of_all, task.chunk, task.kv_tile) +=
          dslopes_.of_tile(rows.count, keys.count, tiles.dp, step.distances(key_tile));
    }
    if (has_score_rule(problem_)) scale_ds(rows.count, tiles);
    if (buffers_.dk != nullptr) products.add_dk(rows.count, keys.count, cells, tiles.dp, bad_queries);
    take_turn();
    if (buffers_.dq != nullptr) products.add_dq(rows.count, keys.count, cells, tiles.dp, bad_keys, dq);

    // Rows with NaN or infinity, left out above, go only to those that see them.
    const auto q_row = query_rows(problem_.q, tile, problem_.head_dim);
    const auto dout_row = query_rows(buffers_.dout, tile, problem_.head_dim_v);
    for_bits(bad_queries, [&](int64_t query) {
      for (int64_t key = 0; key < keys.count; ++key) {
        if (tiles.visible[query * kTile + key] == 0) continue;
        add_row(dout_row(query), problem_.head_dim_v, tiles.s[query * kTile + key],
                products.dv() + key * plan_.row_len_v);
        add_row(q_row(query), problem_.head_dim, tiles.dp[query * kTile + key], products.dk() + key * plan_.row_len);
      }
    });
    const auto k_row = kv_rows(problem_.k, task, problem_.head_dim);
    for_bits(bad_keys, [&, num_rows = rows.count](int64_t key) {
      for (int64_t query = 0; query < num_rows; ++query) {
        if (tiles.visible[query * kTile + key] == 0) continue;
        add_row(k_row(key), problem_.head_dim, tiles.dp[query * kTile + key], dq + query * plan_.row_len);
      }
    });
  }

  // A bit for each key that lengths and band leave to a row. Returns whether all pairs of a whole tile are visible.
  static bool visible_keys(const QueryRows& rows, KeyRange keys, const Acc* lse, uint64_t* visible) {
    uint64_t seen_by_all = rows.count == kTile ? ~uint64_t{0} : 0;
    for (int64_t row = 0; row < rows.count; ++row) {
      const int64_t first = max_of(0, rows.first_key[row] - keys.first);
      const int64_t end = min_of(keys.count, rows.end_key[row] - keys.first);
      const bool is_empty = end <= first || lse[row] == -static_cast<Acc>(__builtin_inf());
      visible[row] = is_empty ? 0 : (~uint64_t{0} >> (kTile - (end - first))) << first;
      seen_by_all &= visible[row];
    }
    return seen_by_all == ~uint64_t{0};
  }

  struct RowValues {
    const Acc *lse, *delta;
  };

  // Of a tile of scores, as far as anything is done with them.
  static int64_t columns_of(KeyRange keys) { return Products::kWholeTiles ? kTile : round_up(keys.count, kWidth<Acc>); }

  void add_score_rule(const Sequence& sequence, const KeyTile& key_tile, const Step& step, const Tiles& tiles) const {
    const QueryRows& rows = step.rows;
    const bool has_bias = problem_.bias.data != nullptr;
    if (has_bias) load_bias(problem_, sequence, rows, key_tile.keys, tiles.bias);
    ScoreRule<Acc> rule{scale_, static_cast<Acc>(problem_.softcap), has_bias ? tiles.bias : nullptr, nullptr};
    const TileDistances<Acc> distances = step.distances(key_tile);
    if (problem_.alibi_slopes.data != nullptr) rule.distances = &distances;
    apply_score_rule<kTile, Acc>(rule, rows.count, columns_of(key_tile.keys), tiles.s, tiles.slope);
    if (tiles.score != nullptr) memcpy(tiles.score, tiles.s, static_cast<size_t>(rows.count * kTile) * sizeof(Acc));
    if (problem_.program != nullptr) {
      tiles.program.template apply<Acc>(sequence, rows, key_tile.keys, true, kTile, tiles.s, tiles.program_slope);
    }
  }

  // Whether gradients of scores have to be multiplied by slopes.
  bool has_program_slopes() const { return problem_.program != nullptr && problem_.program->slope >= 0; }

  // From the gradients of new scores to those of old ones. The slope of a pair without weight may be NaN.
  static void multiply_ds(int64_t queries, const Acc* slope, Acc* ds) {
    for (int64_t i = 0; i < queries * kTile; i += kWidth<Acc>) {
      const Vec<Acc> of_new = load(ds + i);
      store(ds + i, of_new == 0 ? of_new : of_new * load(slope + i));
    }
  }

  // s becomes P = exp(s - lse), as dv takes it, and dp becomes dS = P * (dp - delta); both exactly 0 where nothing is
  // visible. With dropout the first P, and dp, are 0 where a pair is dropped and divided by the share that is kept
  // elsewhere. Without a score rule s still lacks the scale, and dS gets it here; with one, scale_ds follows.
  template <bool kHasScoreRule, bool kDrops>
  void differentiate_softmax(int64_t queries, int64_t columns, RowValues row_values, const Acc* visible,
                             const Dropout& dropout, const Tiles& tiles) const {
    const Acc factor = 1 / dropout.kept_share<Acc>();
    for (int64_t row = 0; row < queries; ++row) {
      const Acc lse = row_values.lse[row], delta = row_values.delta[row];
      for (int64_t i = row * kTile; i < row * kTile + columns; i += kWidth<Acc>) {
        Vec<Acc> s = load(tiles.s + i), dp = load(tiles.dp + i);
        if (!kHasScoreRule) s = rounded(s * scale_);
        Vec<Acc> p = exp2<Acc>((s - lse) * static_cast<Acc>(kLog2E)), kept_p = p;
        if constexpr (kDrops) {
          const int8_t* const kept = tiles.kept + i;
          kept_p = where_kept<Acc>(kept, p * factor);
          dp = where_kept<Acc>(kept, dp * factor);
        }
        Vec<Acc> ds = p * (dp - delta);
        if (!kHasScoreRule) ds *= scale_;
        if (visible != nullptr) {
          const Vec<Acc> is_visible = load(visible + i);
          kept_p = is_visible != 0 ? kept_p : Vec<Acc>{};
          ds = is_visible != 0 ? ds : Vec<Acc>{};
        }
        store(tiles.s + i, kept_p);
        store(tiles.dp + i, ds);
      }
    }
  }

  // From the gradient of the scores to that of the dot products.
  void scale_ds(int64_t queries, const Tiles& tiles) const {
    for (int64_t i = 0; i < queries * kTile; i += kWidth<Acc>) {
      Vec<Acc> ds = load(tiles.dp + i) * scale_;
      // The slope of a score that is not visible may be NaN.
      if (problem_.softcap > 0) ds = ds == 0 ? ds : ds * load(tiles.slope + i);
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

  void finish_dq(const QueryTile& tile) const {
    for (int64_t i = 0; i < tile.count; ++i) {
      const int64_t row = (tile.batch * problem_.q_len + tile.first + i) * problem_.num_heads + tile.head;
      write_row(dq_sums_ + (tile.index * kTile + i) * plan_.row_len, problem_.head_dim, buffers_.dq, row);
    }
  }

  void finish_dbias(int64_t piece) const {
    milestones_.wait(all_differentiated(), plan_.num_tasks);
    dbias_.finish_piece(piece);
  }

  void finish_dslopes() const {
    milestones_.wait(all_differentiated(), plan_.num_tasks);
    dslopes_.finish();
  }

  void finish_dcaptures(int64_t piece) const {
    milestones_.wait(all_differentiated(), plan_.num_tasks);
    dcaptures_.finish_piece(piece);
  }

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

template <typename Element, typename Products = BackwardProducts<Element>>
void run_backward(const Problem& problem, const BackwardPlan& plan, const BackwardBuffers& buffers, void* scratch,
                  const TaskRunner& runner) {
  BackwardPass<Element, Products>(problem, plan, buffers, scratch).run(runner);
}

}  // namespace
}  // namespace jattn::cpu
