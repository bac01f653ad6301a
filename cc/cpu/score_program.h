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
    return problem.program == nullptr ? 0 : Workspace::bytes<char>(problem.program->registers_bytes);
  }

  TileProgram(const Problem& problem, Workspace& workspace)
      : problem_(problem),
        registers_(problem.program == nullptr ? nullptr : workspace.take<char>(problem.program->registers_bytes)) {}

  // Takes rows of scores[row * stride + lane] through the function, queries in the rows or in the lanes. `slopes`,
  // unless null, receives its derivatives, if they are not all 1.
  template <typename Acc>
  void apply(const Sequence& sequence, const QueryRows& queries, KeyRange keys, bool keys_in_lanes, int64_t stride,
             Acc* scores, Acc* slopes) const {
    int32_t head_ids[kTile] = {}, query_ids[kTile] = {}, key_ids[kTile] = {};
    for (int64_t i = 0; i < queries.count; ++i) {
      head_ids[i] = problem_.head_ids[queries.head[i]];
      query_ids[i] = id_of(sequence.q_positions, queries.query[i]);
    }
    for (int64_t i = 0; i < keys.count; ++i) key_ids[i] = id_of(sequence.kv_positions, keys.first + i);
    kRunProgram(problem_, {.scores = scores,
                           .slopes = slopes,
                           .rows = keys_in_lanes ? queries.count : keys.count,
                           .stride = stride,
                           .keys_in_lanes = keys_in_lanes,
                           .batch = problem_.batch_ids[sequence.batch],
                           .heads = head_ids,
                           .queries = query_ids,
                           .keys = key_ids,
                           .registers = registers_});
    // What has no query, or no key, is as if there were no function: it takes part in products, and in the choice of
    // how the softmax of a tile is computed.
    const int64_t lanes = keys_in_lanes ? keys.count : queries.count;
    for (int64_t row = 0; row < (keys_in_lanes ? queries.count : keys.count) && lanes < stride; ++row) {
      clear(scores + row * stride + lanes, stride - lanes);
      if (slopes != nullptr) clear(slopes + row * stride + lanes, stride - lanes);
    }
  }

 private:
  static int32_t id_of(const int32_t* positions, int64_t index) {
    return positions != nullptr ? positions[index] : static_cast<int32_t>(index);
  }

  const Problem& problem_;
  char* registers_;
};

}  // namespace
}  // namespace jattn::cpu
