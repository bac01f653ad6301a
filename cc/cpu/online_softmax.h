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

// On the matrix unit (kFused) score * log2_unit - row_max * log2_unit is one instruction, with the second product
// rounded beforehand. What that rounding adds to every exponent of a row is known: it is part of what the row has
// accumulated, and total_of_row takes it out. Beyond this limit it could overflow: there the difference is taken first,
// as without kFused.
constexpr float kFusedLimit = 0x1p29f;

template <bool kFused, typename V, typename Acc>
inline V softmax_residual(V row_max, Acc log2_unit) {
  if constexpr (!kFused) return V{};
  const V product = rounded(row_max * log2_unit);
  return at_most(product, -product) > -kFusedLimit ? row_max * log2_unit - product : V{};
}

// update_softmax for tiles that need no new maximum, which nearly all but the first of a panel are: no pass over the
// scores to find it, and nothing to rescale. Returns false, with the state as it was, where this is not so.
template <bool kShortExp2, int64_t kLanes, typename Take>
inline bool continue_softmax(int64_t keys, int64_t lanes, float log2_unit, const float* scores,
                             SoftmaxState<float, kLanes>& state, const Take& take) {
  constexpr int64_t kStep = kWidth<float>;
  for (int64_t lane = 0; lane < lanes; lane += kStep) {
    const Vec<float> product = load(state.row_max + lane) * log2_unit;
    if (!all_of(at_most(product, -product) > -kFusedLimit)) return false;
  }
  // Probabilities may be as large as the slack lets them be anyway; infinity and NaN are not below the limit.
  constexpr float kMostSum = kTile << kSlackLog2;
  float tile_sum[kLanes];
  const auto update = [&](int64_t lane, auto group) {
    constexpr int kVectors = group();
    Vec<float> shift[kVectors], sum[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      shift[v] = rounded(load(state.row_max + lane + v * kStep) * log2_unit);
      sum[v] = Vec<float>{};
    }
    const auto exponentiate = [&](int64_t key, int v) {
      const Vec<float> exponent = load(scores + key * kLanes + lane + v * kStep) * log2_unit - shift[v];
      const Vec<float> p = kShortExp2 ? short_exp2(exponent) : exp2<float>(exponent);
      sum[v] += p;
      return p;
    };
    for (int64_t key = 0; key + 2 <= keys; key += 2) {
      for (int v = 0; v < kVectors; ++v) {
        Vec<float> even = exponentiate(key, v), odd = exponentiate(key + 1, v);
        take(key, lane + v * kStep, even, odd);
      }
    }
    if (keys % 2 != 0) {
      for (int v = 0; v < kVectors; ++v) {
        Vec<float> even = exponentiate(keys - 1, v), odd{};
        take(keys - 1, lane + v * kStep, even, odd);
      }
    }
    for (int v = 0; v < kVectors; ++v) store(tile_sum + lane + v * kStep, sum[v]);
  };
  constexpr int kGroup = 2;  // as in update_softmax
  int64_t lane = 0;
  for (; lane + kGroup * kStep <= lanes; lane += kGroup * kStep) update(lane, std::integral_constant<int, kGroup>());
  if (lane < lanes) update(lane, std::integral_constant<int, 1>());
  for (lane = 0; lane < lanes; lane += kStep) {
    if (!all_of(load(tile_sum + lane) <= kMostSum)) return false;
  }
  for (lane = 0; lane < lanes; lane += kStep) {
    store(state.row_sum + lane, load(state.row_sum + lane) + load(tile_sum + lane));
  }
  return true;
}

// Turns scores[key * kLanes + lane] into probabilities exp2((score - row_max) * log2_unit) and updates the state.
// Without kFused the difference is taken before the product, so that equal scores give exactly 1 however large they
// are. A NaN score never becomes the maximum but is a NaN probability, and so reaches row_sum and the output.
// Calls take(key, lane, p of key, p of key + 1) for every second key; beyond the last key p is 0. It may change p
// after it has entered row_sum and before it is stored, if kStores: products that take p otherwise leave the scores as
// they are.
// Returns whether any lane must be rescaled.
template <bool kFused, bool kShortExp2, bool kStores, typename Acc, int64_t kLanes, typename Take>
inline bool update_softmax(int64_t keys, int64_t lanes, Acc log2_unit, Acc* scores, SoftmaxState<Acc, kLanes>& state,
                           const Take& take) {
  if constexpr (kFused && !kStores) {
    if (continue_softmax<kShortExp2>(keys, lanes, log2_unit, scores, state, take)) return false;
  }
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
  constexpr int kMostExponent = kFused ? kSlackLog2 + 32 : kSlackLog2;
  constexpr int kGroup = 2;  // vectors handled together: independent work for the pipelines
  Vec<Bits<Acc>> changed{};
  const auto update = [&](int64_t lane, auto group) {
    constexpr int kVectors = group();
    Vec<Acc> old_max[kVectors], row_max[kVectors], shift[kVectors], sum[kVectors], residual[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      old_max[v] = load(state.row_max + lane + v * kWidth<Acc>);
      row_max[v] = load(tile_max + lane + v * kWidth<Acc>);
    }
    for (int v = 0; v < kVectors; ++v) {
      row_max[v] = row_max[v] > old_max[v] + slack ? row_max[v] : old_max[v];
      shift[v] = row_max[v] == kMinusInfinity ? Vec<Acc>{} : row_max[v];
      sum[v] = Vec<Acc>{};
      residual[v] = softmax_residual<kFused>(shift[v], log2_unit);
    }
    const auto exponent = [&](Vec<Acc> score, int v) {
      const Vec<Acc> difference = (score - shift[v]) * log2_unit;
      return kFused ? difference + residual[v] : difference;
    };
    const auto place = [&](int64_t key, int v) { return scores + key * kLanes + lane + v * kWidth<Acc>; };
    const auto exponentiate = [&](int64_t key, int v) {
      const Vec<Acc> p = exp2_of_at_most<kMostExponent>(exponent(load(place(key, v)), v));
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
      const Vec<Acc> rescale =
          exp2_of_at_most<kMostExponent>(exponent(old_max[v], v) - softmax_residual<kFused>(old_max[v], log2_unit));
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

// update_softmax for one row with its keys in the lanes: scores[key] for `keys` keys, a multiple of the lanes. Calls
// drop(key, p) for every vector of probabilities, after it has entered the sum. Returns what everything accumulated so
// far is to be multiplied by.
template <typename Acc, int64_t kLanes, typename Drop>
inline Acc update_softmax_of_row(int64_t keys, Acc log2_unit, Acc* scores, int64_t row,
                                 SoftmaxState<Acc, kLanes>& state, const Drop& drop) {
  constexpr Acc kMinusInfinity = -static_cast<Acc>(__builtin_inf());
  constexpr int64_t kStep = kWidth<Acc>;
  const Acc slack = kSlackLog2 / (log2_unit > static_cast<Acc>(1e-30) ? log2_unit : static_cast<Acc>(1e-30));
  const Acc old_max = state.row_max[row];
  Vec<Acc> maxima = broadcast(old_max);
  for (int64_t key = 0; key < keys; key += kStep) maxima = at_least(maxima, load(scores + key));
  Acc tile_max = maxima[0];
  for (int lane = 1; lane < kStep; ++lane) tile_max = tile_max < maxima[lane] ? maxima[lane] : tile_max;
  const Acc row_max = tile_max > old_max + slack ? tile_max : old_max;
  const Acc shift = row_max == kMinusInfinity ? 0 : row_max;
  Vec<Acc> sum{};
  for (int64_t key = 0; key < keys; key += kStep) {
    Vec<Acc> p = exp2_of_at_most<kSlackLog2>((load(scores + key) - shift) * log2_unit);
    sum += p;
    drop(key, p);
    store(scores + key, p);
  }
  const Acc rescale = exp2_of_at_most<kSlackLog2>((broadcast(old_max) - shift) * log2_unit)[0];
  state.row_max[row] = row_max;
  state.row_sum[row] = state.row_sum[row] * rescale + sum_of<Acc>(sum);
  return rescale;
}

}  // namespace
}  // namespace jattn::cpu
