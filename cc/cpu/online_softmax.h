// The running softmax of a panel of queries, one query per vector lane.
#pragma once

#include "cpu/plan.h"
#include "cpu/vec.h"

namespace jattn::cpu {
namespace {

// The maximum follows the scores only when they exceed it by this factor in exp2: probabilities then stay below 256,
// which costs no accuracy, and the output is almost never rescaled.
constexpr int kSlackLog2 = 8;

template <typename Acc, int64_t kLanes>
struct SoftmaxState {
  Acc row_max[kLanes];  // within the slack; of the scores as they come, before `log2_unit`
  Acc row_sum[kLanes];
  Acc rescale[kLanes];  // what everything accumulated so far is to be multiplied by after the last update

  void reset() {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      row_max[lane] = -static_cast<Acc>(__builtin_inf());
      row_sum[lane] = 0;
    }
  }
};

// Turns scores[key * kLanes + lane] into probabilities exp2((score - row_max) * log2_unit) and updates the state.
// The difference is taken before the product, so that equal scores give exactly 1 however large they are. A NaN score
// never becomes the maximum but is a NaN probability, and so reaches row_sum and the output.
// Calls take(key, lane, p of key, p of key + 1) for every second key; beyond the last key p is 0. It may change p
// after it has entered row_sum and before it is stored, if kStores: products that take p otherwise leave the scores as
// they are.
// Returns whether any lane must be rescaled.
template <bool kStores, typename Acc, int64_t kLanes, typename Take>
inline bool update_softmax(int64_t keys, int64_t lanes, Acc log2_unit, Acc* scores, SoftmaxState<Acc, kLanes>& state,
                           const Take& take) {
  constexpr Acc kMinusInfinity = -static_cast<Acc>(__builtin_inf());
  // Finite, so that it never meets an infinite maximum as a NaN.
  const Acc slack = kSlackLog2 / (log2_unit > static_cast<Acc>(1e-30) ? log2_unit : static_cast<Acc>(1e-30));
  Acc tile_max[kLanes];
  for (int64_t lane = 0; lane < lanes; lane += kWidth<Acc>) {
    Vec<Acc> maxima[4];  // the instruction takes four cycles: four independent chains
    for (Vec<Acc>& maximum : maxima) maximum = load(state.row_max + lane);
    int64_t key = 0;
    for (; key + 4 <= keys; key += 4) {
      for (int i = 0; i < 4; ++i) maxima[i] = at_least(maxima[i], load(scores + (key + i) * kLanes + lane));
    }
    for (; key < keys; ++key) maxima[0] = at_least(maxima[0], load(scores + key * kLanes + lane));
    store(tile_max + lane, at_least(at_least(maxima[0], maxima[1]), at_least(maxima[2], maxima[3])));
  }
  constexpr int kGroup = 2;  // vectors handled together: independent work for the pipelines
  Vec<Bits<Acc>> changed{};
  const auto update = [&](int64_t lane, auto group) {
    constexpr int kVectors = group();
    Vec<Acc> old_max[kVectors], row_max[kVectors], shift[kVectors], sum[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      old_max[v] = load(state.row_max + lane + v * kWidth<Acc>);
      row_max[v] = load(tile_max + lane + v * kWidth<Acc>);
    }
    for (int v = 0; v < kVectors; ++v) {
      row_max[v] = row_max[v] > old_max[v] + slack ? row_max[v] : old_max[v];
      shift[v] = row_max[v] == kMinusInfinity ? Vec<Acc>{} : row_max[v];
      sum[v] = Vec<Acc>{};
    }
    const auto place = [&](int64_t key, int v) { return scores + key * kLanes + lane + v * kWidth<Acc>; };
    const auto exponentiate = [&](int64_t key, int v) {
      const Vec<Acc> p = exp2_of_at_most<kSlackLog2>((load(place(key, v)) - shift[v]) * log2_unit);
      sum[v] += p;
      return p;
    };
    int64_t key = 0;
    for (; key + 2 <= keys; key += 2) {
      for (int v = 0; v < kVectors; ++v) {
        Vec<Acc> even = exponentiate(key, v), odd = exponentiate(key + 1, v);
        take(key, lane + v * kWidth<Acc>, even, odd);
        if (!kStores) continue;
        store(place(key, v), even);
        store(place(key + 1, v), odd);
      }
    }
    if (key < keys) {
      for (int v = 0; v < kVectors; ++v) {
        Vec<Acc> even = exponentiate(key, v), odd{};
        take(key, lane + v * kWidth<Acc>, even, odd);
        if (kStores) store(place(key, v), even);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = lane + v * kWidth<Acc>;
      const Vec<Acc> rescale = exp2_of_at_most<kSlackLog2>((old_max[v] - shift[v]) * log2_unit);
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
