// The warp that writes dq of heads whose items are all done, while its block works on others (casts_beside()): sums
// times the scale, rounded, as backward_cast does, which writes the tiles of queries that are left.
//
// Tiles are taken by a counter, in the order in which heads are handed out, and belong to no block. Senders count the
// items whose parts they have added (BackwardCounter). Who has taken a tile waits until those of its key/value head are
// all counted, writes it and marks it in its counter of turns (DqTurnState). Nobody waits for this warp. It ends, also
// within a tile, when its block has no items left: the multiprocessor is better used by backward_cast then.
#pragma once

#include "base/ptx.cuh"
#include "sm90/backward_sender.cuh"

namespace jattn::sm90 {

// A step of a caster writes 16 rows and 32 columns of a tile, those of its next 512 sums, whose order is in
// backward_cast.cuh. Returns how far from there the next step writes.
inline constexpr int kCastStepFloats = 16 * 32;
struct CastMove {
  int rows, columns;
};
template <Config C>
__device__ __forceinline__ CastMove move_after_step(int step) {
  constexpr int kColumns = dq_part_columns(C), kPartSteps = kColumns / 32, kHalfSteps = 4 * kPartSteps;
  CastMove move{0, 32};
  if (step % kPartSteps == kPartSteps - 1) move = {16, 32 - kColumns};
  if (C.tile_q == 64 && step == kHalfSteps - 1) move = {16 - 64, 32};
  return move;
}

// Of the four lanes that share two rows of a step, eight apart, each has four columns of either half of the 32, in two
// neighbouring groups of four sums. Returns the first of these, in such groups; those of the second half are kCastHalf
// further.
inline constexpr int kCastHalf = kCastStepFloats / 2 / 4;
__device__ __forceinline__ unsigned cast_sums(unsigned lane) { return lane % 4 / 2 * 32 + lane / 4 * 4 + lane % 2 * 2; }

template <Config C>
struct DqCaster {
  using Traits = ElementTraits<C.element>;
  static constexpr int kTileFloats = C.tile_q * C.head_dim, kSteps = kTileFloats / kCastStepFloats;
  static constexpr int kLineFloats = 32, kTileLines = kTileFloats / kLineFloats;  // of L2

  const BackwardParams& params;
  BackwardControl<C, false>& control;

  // Computed anew wherever it is read: the warp has few registers.
  __device__ __forceinline__ static unsigned lane() { return unsigned(ptx::thread_index_anew()) % 32; }

  // Whether the block has no items left. Lanes agree, here and below: the next tile is the whole warp's.
  __device__ __forceinline__ bool ends() const { return __any_sync(~0u, has_ended(&control.items_ended, 0)); }

  // Whether all items of a key/value head are done; false if those of the block end before.
  __device__ __forceinline__ bool awaits(const int32_t* items_done) const {
    while (!__all_sync(~0u, load_turn(items_done) == params.tiles * num_senders(C))) {
      if (ends()) return false;
      __nanosleep(500);
    }
    sleep_at_random();
    return true;
  }

  __device__ __forceinline__ unsigned pack(float low, float high) const {
    return Traits::pack(low * params.problem.scale, high * params.problem.scale);
  }

  // A lane's share of a step. source: its first sums, in groups of four; target: of its first row, in groups of four
  // columns.
  __device__ __forceinline__ void run_step(unsigned source, unsigned target) const {
    const float4* const sums = reinterpret_cast<const float4*>(params.dq_accumulator) + source;
    uint2* const out = static_cast<uint2*>(params.rows_dq) + target;
    const int64_t eight_rows = int64_t(8 * (C.head_dim / 4)) * params.problem.num_heads;
    float4 x[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) x[half][i] = sums[half * kCastHalf + i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 a = x[half][0], b = x[half][1];
      out[half * 4] = make_uint2(pack(a.x, a.y), pack(b.x, b.y));
      out[half * 4 + eight_rows] = make_uint2(pack(a.z, a.w), pack(b.z, b.w));
    }
  }

  // Sums that have been read need not go to memory.
  __device__ __forceinline__ void discard_tile(unsigned tile) const {
    const float* const sums = params.dq_accumulator + int64_t(tile) * kTileFloats;
#pragma unroll 1
    for (unsigned line = lane(); line < kTileLines; line += 32) {
      asm volatile("discard.global.L2 [%0], 128;" ::"l"(sums + line * kLineFloats) : "memory");
    }
  }

  // Whether the whole tile was written. tile: of the accumulator; target: of its first row, as in run_step().
  __device__ __forceinline__ bool casts(unsigned tile, unsigned target) const {
    const unsigned row_words = unsigned(params.problem.num_heads) * (C.head_dim / 4);
    unsigned source = tile * (kTileFloats / 4) + cast_sums(lane());
    target += lane() / 4 * row_words + lane() % 4;
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      if (ends()) return false;
      run_step(source, target);
      const CastMove move = move_after_step<C>(step);
      source += kCastStepFloats / 4;
      target += move.rows * row_words + move.columns / 4;
      asm("" : "+r"(source), "+r"(target));  // or addresses of 64 bits would be kept in their place
    }
    __syncwarp();
    tile = source / (kTileFloats / 4) - 1;  // not kept over the loop either
    discard_tile(tile);
    if (lane() == 0) params.dq_turns[tile * (C.tile_q / kDqTurnRows * kBackwardConsumers)] = kDqCast;
    return true;
  }

  // By the whole warp.
  __device__ __forceinline__ void run() const {
    const ProblemParams& problem = params.problem;
    const int tiles = problem.q_len / C.tile_q;  // whole ones
    const int64_t groups = int64_t(problem.batch) * problem.num_heads * params.rows_padded * (C.head_dim / 4);
    if (tiles == 0 || problem.head_dim != C.head_dim || groups > 0xffffffff) return;
    while (true) {
      int number = 0;
      if (lane() == 0) number = atomicAdd(params.next_item + kNextCast, 1);
      number = uniform(number);
      const int flat_head = number / tiles, first = (number - flat_head * tiles) * C.tile_q;
      const int entry = flat_head / problem.num_heads, head = flat_head - entry * problem.num_heads;
      if (entry >= problem.batch || !awaits(params.next_item + kItemsDone + flat_head / problem.group_size)) return;
      const unsigned tile = unsigned((int64_t(flat_head) * params.rows_padded + first) / C.tile_q);
      const int turn = params.dq_turns[tile * (C.tile_q / kDqTurnRows * kBackwardConsumers)];
      if (turn == kDqNothing || first + C.tile_q > sequence_of<C>(problem, entry).q_length) continue;
      const int64_t row = (int64_t(entry) * problem.q_len + first) * problem.num_heads + head;
      if (!casts(tile, unsigned(row * (C.head_dim / 4)))) return;
    }
  }
};

}  // namespace jattn::sm90
