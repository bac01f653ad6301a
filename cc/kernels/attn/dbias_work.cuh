// How the tiles of a bias are dealt to blocks, and which score tiles add to each: of the kernels for dbias of both
// architectures.
#pragma once

#include "base/integers.cuh"
#include "params.cuh"

namespace jattn {

// Which part of the bias a block owns.
struct DbiasWork {
  int split, kv_tile, q_tile, head, batch;  // of the bias; 0 along broadcast axes
  bool all_queries, all_keys;
  int step_keys, step_queries, step_heads, step_batch;
  int64_t steps;

  __device__ __forceinline__ DbiasWork(const DbiasTiles& bias, const ProblemParams& problem, int tile_q, int tile_kv) {
    int rest = blockIdx.x;
    split = rest % bias.splits;
    rest /= bias.splits;
    kv_tile = rest % bias.tiles_key;
    rest /= bias.tiles_key;
    q_tile = rest % bias.tiles_query;
    rest /= bias.tiles_query;
    head = rest % bias.extent_head;
    batch = rest / bias.extent_head;
    all_queries = bias.extent_query == 1 && problem.q_len != 1;
    all_keys = bias.extent_key == 1 && problem.kv_len != 1;
    step_keys = all_keys ? ceil_div(problem.kv_len, tile_kv) : 1;
    step_queries = all_queries ? ceil_div(problem.q_len, tile_q) : 1;
    step_heads = bias.extent_head == 1 ? problem.num_heads : 1;
    step_batch = bias.extent_batch == 1 ? problem.batch : 1;
    steps = int64_t(step_batch) * step_heads * step_queries * step_keys;
  }

  // A score tile that adds to this tile of the bias; they are numbered with the keys running fastest.
  struct Step {
    int kv_tile, q_tile, head, batch;
  };
  __device__ __forceinline__ Step step(int64_t index) const {
    int64_t rest = index;
    Step found;
    found.kv_tile = all_keys ? int(rest % step_keys) : kv_tile;
    rest /= step_keys;
    found.q_tile = all_queries ? int(rest % step_queries) : q_tile;
    rest /= step_queries;
    found.head = step_heads == 1 ? head : int(rest % step_heads);
    found.batch = step_batch == 1 ? batch : int(rest / step_heads);
    return found;
  }
};

}  // namespace jattn
