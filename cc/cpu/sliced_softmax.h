// continue_softmax (online_softmax.h) in parts that can be done beside something else.
#pragma once

#include "cpu/online_softmax.h"

namespace jattn::cpu {
namespace {

// The softmax of a full tile that most likely needs no new maximum.
template <bool kShortExp2, int64_t kLanes>
class SlicedSoftmax {
 public:
  // Each of two keys and 32 lanes.
  static constexpr int64_t kLanesOfSlice = 2 * kWidth<float>;
  static constexpr int64_t kSlicesOfLanes = kTile / 2, kSlices = kLanes / kLanesOfSlice * kSlicesOfLanes;

  SlicedSoftmax(float log2_unit, const float* scores, SoftmaxState<float, kLanes>& state)
      : log2_unit_(log2_unit), scores_(scores), state_(state) {}

  // Whether all lanes have a maximum that the slices can work with.
  bool can_start() const {
    for (int64_t lane = 0; lane < kLanes; lane += kStep) {
      const Vec<float> product = load(state_.row_max + lane) * log2_unit_;
      if (!all_of(at_most(product, -product) > -kFusedLimit)) return false;
    }
    return true;
  }

  // Slices come in order. Calls take(key, lane, p of key, p of key + 1) twice.
  template <typename Take>
  inline __attribute__((always_inline)) void slice(int64_t index, const Take& take) {
    const int64_t lane = index / kSlicesOfLanes * kLanesOfSlice, key = index % kSlicesOfLanes * 2;
    if (key == 0) {
      for (int v = 0; v < 2; ++v) {
        shift_[v] = rounded(load(state_.row_max + lane + v * kStep) * log2_unit_);
        sum_[v] = Vec<float>{};
      }
    }
    for (int v = 0; v < 2; ++v) {
      const float* at = scores_ + key * kLanes + lane + v * kStep;
      const auto exponentiate = [&](const float* score) {
        const Vec<float> exponent = load(score) * log2_unit_ - shift_[v];
        return kShortExp2 ? short_exp2(exponent) : exp2<float>(exponent);
      };
      const Vec<float> even = exponentiate(at), odd = exponentiate(at + kLanes);
      sum_[v] += even;
      sum_[v] += odd;
      take(key, lane + v * kStep, even, odd);
    }
    if (key == kTile - 2) {
      for (int v = 0; v < 2; ++v) store(tile_sum_ + lane + v * kStep, sum_[v]);
    }
  }

  // After all slices. Returns false, with the state as it was, where the tile needs a new maximum after all.
  bool finish() {
    // As in continue_softmax.
    constexpr float kMostSum = kTile << kSlackLog2;
    for (int64_t lane = 0; lane < kLanes; lane += kStep) {
      if (!all_of(load(tile_sum_ + lane) <= kMostSum)) return false;
    }
    for (int64_t lane = 0; lane < kLanes; lane += kStep) {
      store(state_.row_sum + lane, load(state_.row_sum + lane) + load(tile_sum_ + lane));
    }
    return true;
  }

 private:
  static constexpr int64_t kStep = kWidth<float>;
  float log2_unit_;
  const float* scores_;
  SoftmaxState<float, kLanes>& state_;
  Vec<float> shift_[2], sum_[2];
  float tile_sum_[kLanes];
};

}  // namespace
}  // namespace jattn::cpu
