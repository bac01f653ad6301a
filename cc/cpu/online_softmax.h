// The running softmax of a panel of queries, one query per vector lane.
#pragma once

#include "cpu/plan.h"
#include "cpu/vec.h"

namespace jattn::cpu {
namespace {

// The maximum follows the scores only when they exceed it by this factor in exp2: probabilities then stay below 256,
// which costs no accuracy, and the output is almost never rescaled.
constexpr int kSlackLog2 = 8;

template <typename Acc>
struct SoftmaxState {
  Acc row_max[kTile];  // within the slack; of the scores as they come, before `log2_unit`
  Acc row_sum[kTile];
  Acc rescale[kTile];  // what everything accumulated so far is to be multiplied by after the last update

  void reset() {
    for (int64_t lane = 0; lane < kTile; ++lane) {
      row_max[lane] = -static_cast<Acc>(__builtin_inf());
      row_sum[lane] = 0;
    }
  }
};

// Turns scores[key * kTile + lane] into probabilities exp2((score - row_max) * log2_unit) and updates the state.
// The difference is taken before the product, so that equal scores give exactly 1 however large they are. A NaN score
// never becomes the maximum but is a NaN probability, and so reaches row_sum and the output.
// Returns whether any lane must be rescaled.
template <typename Acc>
inline bool update_softmax(int64_t keys, int64_t lanes, Acc log2_unit, Acc* scores, SoftmaxState<Acc>& state) {
  constexpr Acc kMinusInfinity = -static_cast<Acc>(__builtin_inf());
  // Finite, so that it never meets an infinite maximum as a NaN.
  const Acc slack = kSlackLog2 / (log2_unit > static_cast<Acc>(1e-30) ? log2_unit : static_cast<Acc>(1e-30));
  constexpr int kGroup = 2;  // vectors handled together: independent work for the pipelines
  Vec<Bits<Acc>> changed{};
  const auto update = [&](int64_t lane, auto group) {
    constexpr int kVectors = group();
    Vec<Acc> old_max[kVectors], row_max[kVectors], shift[kVectors], sum[kVectors];
    for (int v = 0; v < kVectors; ++v) row_max[v] = old_max[v] = load(state.row_max + lane + v * kWidth<Acc>);
    for (int64_t key = 0; key < keys; ++key) {
      for (int v = 0; v < kVectors; ++v) {
        const Vec<Acc> score = load(scores + key * kTile + lane + v * kWidth<Acc>);
        row_max[v] = score > row_max[v] ? score : row_max[v];
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      row_max[v] = row_max[v] > old_max[v] + slack ? row_max[v] : old_max[v];
      shift[v] = row_max[v] == kMinusInfinity ? Vec<Acc>{} : row_max[v];
      sum[v] = Vec<Acc>{};
    }
    for (int64_t key = 0; key < keys; ++key) {
      for (int v = 0; v < kVectors; ++v) {
        Acc* place = scores + key * kTile + lane + v * kWidth<Acc>;
        const Vec<Acc> p = exp2<Acc>((load(place) - shift[v]) * log2_unit);
        store(place, p);
        sum[v] += p;
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = lane + v * kWidth<Acc>;
      const Vec<Acc> rescale = exp2<Acc>((old_max[v] - shift[v]) * log2_unit);
      changed |= reinterpret_cast<Vec<Bits<Acc>>>(rescale != 1);
      store(state.rescale + at, rescale);
      store(state.row_max + at, row_max[v]);
      store(state.row_sum + at, load(state.row_sum + at) * rescale + sum[v]);
    }
  };
  int64_t lane = 0;
  for (; lane + kGroup * kWidth<Acc> <= lanes; lane += kGroup * kWidth<Acc>) {
    update(lane, std::integral_constant<int, kGroup>());
  }
  if (lane < lanes) update(lane, std::integral_constant<int, 1>());
  Bits<Acc> any = 0;
  for (int i = 0; i < kWidth<Acc>; ++i) any |= changed[i];
  return any != 0;
}

}  // namespace
}  // namespace jattn::cpu
