// The user's score function: tiles of scores pass through it after all that the problem itself does to them, and before
// masks.
#pragma once

#include "cpu/program.h"
#include "cpu/tasks.h"
#include "cpu/visibility.h"

namespace jattn::cpu {
namespace {

#if defined(__AVX512F__)
constexpr ProgramKernel kRunProgram = run_program_avx512;
#elif defined(__AVX2__)
constexpr ProgramKernel kRunProgram = run_program_avx2;
#else
constexpr ProgramKernel kRunProgram = run_program_baseline;
#endif

// The function of one task.
class TileProgram {
 public:
  // What a task takes of its thread's memory.
  static int64_t workspace_bytes(const Problem& problem) {
    return problem.program == nullptr ? 0 : Workspace::bytes<char>(registers_bytes(problem));
  }

  TileProgram(const Problem& problem, Workspace& workspace)
      : problem_(problem),
        registers_(problem.program == nullptr ? nullptr : workspace.take<char>(registers_bytes(problem))) {}

  // Takes rows of scores[row * stride + lane] through the function, queries in the rows or in the lanes. `slopes`,
  // unless null, receives its derivatives, if they are not all 1.
  template <typename Acc>
  void apply(const Sequence& sequence, const QueryRows& queries, KeyRange keys, bool keys_in_lanes, int64_t stride,
             Acc* scores, Acc* slopes) const {
    const Ids ids(problem_, sequence, queries, keys);
    kRunProgram(problem_, {.program = problem_.program,
                           .scores = scores,
                           .slopes = slopes,
                           .rows = keys_in_lanes ? queries.count : keys.count,
                           .stride = stride,
                           .keys_in_lanes = keys_in_lanes,
                           .batch = problem_.batch_ids[sequence.batch],
                           .heads = ids.heads,
                           .queries = ids.queries,
                           .keys = ids.keys,
                           .registers = registers_});
    // What has no query, or no key, is as if there were no function: it takes part in products, and in the choice of
    // how the softmax of a tile is computed.
    const int64_t lanes = keys_in_lanes ? keys.count : queries.count;
    for (int64_t row = 0; row < (keys_in_lanes ? queries.count : keys.count) && lanes < stride; ++row) {
      clear(scores + row * stride + lanes, stride - lanes);
      if (slopes != nullptr) clear(slopes + row * stride + lanes, stride - lanes);
    }
  }

  // Adds what pairs with weight give to the gradients of the elements that they read to `sums`:
  // scores[row * kTile + key] before the function, and ds behind it.
  template <typename Acc>
  void add_gradients(const Sequence& sequence, const QueryRows& queries, KeyRange keys, Acc* scores, const Acc* ds,
                     double* sums, int64_t num_sums) const {
    const Ids ids(problem_, sequence, queries, keys);
    kRunProgram(problem_, {.program = problem_.gradients,
                           .scores = scores,
                           .slopes = nullptr,
                           .rows = queries.count,
                           .stride = kTile,
                           .keys_in_lanes = true,
                           .batch = problem_.batch_ids[sequence.batch],
                           .heads = ids.heads,
                           .queries = ids.queries,
                           .keys = ids.keys,
                           .registers = registers_,
                           .ds = ds,
                           .lanes = keys.count,
                           .sums = sums,
                           .num_sums = num_sums});
  }

 private:
  // The indices of a tile, as the function gets them.
  struct Ids {
    int32_t heads[kTile] = {}, queries[kTile] = {}, keys[kTile] = {};

    Ids(const Problem& problem, const Sequence& sequence, const QueryRows& rows, KeyRange range) {
      for (int64_t i = 0; i < rows.count; ++i) {
        heads[i] = problem.head_ids[rows.head[i]];
        queries[i] = id_of(sequence.q_positions, rows.query[i]);
      }
      for (int64_t i = 0; i < range.count; ++i) keys[i] = id_of(sequence.kv_positions, range.first + i);
    }
    static int32_t id_of(const int32_t* positions, int64_t index) {
      return positions != nullptr ? positions[index] : static_cast<int32_t>(index);
    }
  };

  static int64_t registers_bytes(const Problem& problem) {
    const int64_t of_gradients = problem.gradients == nullptr ? 0 : problem.gradients->registers_bytes;
    return max_of(problem.program->registers_bytes, of_gradients);
  }

  const Problem& problem_;
  char* registers_;
};

}  // namespace
}  // namespace jattn::cpu
