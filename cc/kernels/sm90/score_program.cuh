// The user's score function in the forward: scores of a tile, finished but for it, pass through it before the masks.
#pragma once

#include "attn/score_program.cuh"
#include "sm90/score.cuh"

namespace jattn::sm90 {

// What the program knows of this thread's two rows. query: their positions, where the problem has positions.
struct ProgramRows {
  int batch, head;
  int query[2];
};

template <Config C>
__device__ __forceinline__ ProgramRows program_rows(const TileContext<C>& context) {
  const ProblemParams& problem = context.params.problem;
  ProgramRows rows = {__ldg(problem.batch_ids + context.item.batch),
                      __ldg(problem.head_ids + context.item.head),
                      {context.query(0), context.query(1)}};
  if constexpr (C.positions) {
    const int* positions = context.control.q_positions[context.slot] + context.place.row;
    rows.query[0] = positions[0], rows.query[1] = positions[8];
  }
  return rows;
}

template <Config C>
__device__ __forceinline__ void apply_program(float (&s)[C.tile_kv / 2], const TileContext<C>& context) {
  const auto& captures = context.params.problem.captures;
  const ProgramRows rows = program_rows(context);
  const int first_key = context.first_key();
#pragma unroll
  for (int i = 0; i < C.tile_kv / 8; ++i) {
    int2 keys = make_int2(first_key + 8 * i, first_key + 8 * i + 1);
    if constexpr (C.positions) {
      keys = *reinterpret_cast<const int2*>(context.control.kv_positions[context.stage] + context.place.column + 8 * i);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float& low = s[4 * i + 2 * r];
      float& high = s[4 * i + 2 * r + 1];
      low = ScoreProgram::score(low, rows.batch, rows.head, rows.query[r], keys.x, captures);
      high = ScoreProgram::score(high, rows.batch, rows.head, rows.query[r], keys.y, captures);
    }
  }
}

// Asks for what the program is going to read of large captures. Eight keys in a row most often read a sector or two of
// memory, so a thread asks for those of the first of every eight columns, and the four of a row share these.
template <Config C>
__device__ __forceinline__ void prefetch_program(const TileContext<C>& context) {
  if constexpr (ScoreProgram::kPrefetches) {
    const ProgramRows rows = program_rows(context);
    const int column = 4 * context.place.column;  // 8 times the number of the thread among the four
#pragma unroll
    for (int i = 0; i < C.tile_kv; i += 32) {
      int key = context.header.kv_tile * C.tile_kv + column + i;
      if constexpr (C.positions) key = context.control.kv_positions[context.stage][column + i];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        ScoreProgram::prefetch(rows.batch, rows.head, rows.query[r], key, context.params.problem.captures);
      }
    }
  }
}

}  // namespace jattn::sm90
