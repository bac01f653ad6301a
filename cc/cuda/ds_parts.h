// How the gradients of scores that a kernel stores (Config::stores_ds) become the gradient of a bias of queries and
// keys.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/base/integers.cuh"

namespace jattn::cuda {

// Launches, one after another, in which batch entries that share a bias add theirs to each other where they are stored:
// the same bits every time. Each addition rounds to the element type: after four, errors are 1.3 times those of a sum
// in float32.
inline constexpr int64_t kMostDsTurns = 4;
// Scratch that is taken for fewer turns and more heads a launch, however small the bias.
inline constexpr int64_t kFewDsBytes = int64_t{64} << 20;

// In place where every pair has a bias of its own, or all entries that share it can take turns; else in parts, each the
// sum of those that take turns, for some heads at a time, which are added up in float32.
struct DsParts {
  int64_t parts;  // batch entries of one launch, each with a place of its own
  bool in_place = true;
  int64_t kv_heads;  // of one launch

  // head_bytes: of the pairs of a query head.
  DsParts(bool is_shared, int64_t batch, int64_t num_kv_heads, int64_t group_size, int64_t head_bytes)
      : parts(batch), kv_heads(num_kv_heads) {
    if (!is_shared || batch <= 1) return;
    const int64_t bytes = std::max<int64_t>(1, num_kv_heads * group_size * head_bytes);
    const int64_t fewest = ceil_div(batch, kMostDsTurns);
    const int64_t turns = ceil_div(batch, std::clamp<int64_t>(kFewDsBytes / bytes, fewest, batch));
    parts = ceil_div(batch, turns);
    in_place = parts == 1;
    // Else no more scratch than the bias itself takes, if a key/value head does with that.
    if (!in_place && parts * bytes > kFewDsBytes) kv_heads = std::clamp<int64_t>(num_kv_heads / parts, 1, num_kv_heads);
  }
};

}  // namespace jattn::cuda
