// The gradient of ALiBi slopes: -sum of ds |distance| over the pairs of a head. Each tile of keys, against one chunk of
// the queries, has a part of it, and the parts are added up in the order of the keys when all are there.
#pragma once

#include "cpu/scores.h"

namespace jattn::cpu {
namespace {

template <typename Acc>
class SlopesGradient {
 public:
  SlopesGradient(const Problem& problem, const BackwardPlan& plan, void* dslopes, double* parts)
      : dslopes_(static_cast<Acc*>(dslopes)),
        num_heads_(problem.batch * problem.num_heads),
        kv_tiles_(plan.kv_tiles),
        parts_of_head_(plan.num_chunks * plan.kv_tiles),
        parts_(parts) {}

  bool is_wanted() const { return dslopes_ != nullptr; }

  // Of one head, counted over the batch. Only the task that owns the tile of keys reads and writes it.
  double& part(int64_t head, int64_t chunk, int64_t kv_tile) const {
    return parts_[head * parts_of_head_ + chunk * kv_tiles_ + kv_tile];
  }

  // Sum of ds |distance| over a tile, where keys.count may end inside a vector.
  static double of_tile(int64_t rows, int64_t keys, const Acc* ds, const TileDistances<Acc>& distances) {
    Bits<Acc> is_key[kTile];
    for (int64_t i = 0; i < kTile; ++i) is_key[i] = i < keys ? -1 : 0;
    Vec<Acc> sum{};
    for (int64_t row = 0; row < rows; ++row) {
      Vec<Acc> of_row{};
      for (int64_t column = 0; column < keys; column += kWidth<Acc>) {
        const Vec<Acc> product = load(ds + row * kTile + column) * distances.at(row, column);
        of_row += from_bits<Acc>(as_bits<Acc>(product) & load(is_key + column));
      }
      sum += of_row;
    }
    return sum_of<Acc>(sum);
  }

  // When all parts are there.
  void finish() const {
    for (int64_t head = 0; head < num_heads_; ++head) {
      double sum = 0;
      for (int64_t i = 0; i < parts_of_head_; ++i) sum += parts_[head * parts_of_head_ + i];
      dslopes_[head] = static_cast<Acc>(-sum);
    }
  }

 private:
  Acc* dslopes_;  // [B, N]
  int64_t num_heads_, kv_tiles_, parts_of_head_;
  double* parts_;  // [B, N, num_chunks, kv_tiles]
};

}  // namespace
}  // namespace jattn::cpu
