// The derivative of the softmax on one tile of scores, [query][key] of at most kTile each: P from the scores and lse,
// dS from P, dp and delta.
//
// A part of its own, since products may do this themselves while they write P and dS into their layouts
// (find_p_and_ds); they then get the visible keys as bits.
#pragma once

#include "cpu/backward_pass.h"

namespace jattn::cpu {
namespace {

// A bit for each key that lengths and band leave to a row. Returns whether all pairs of a whole tile are visible.
template <typename Element, typename Products>
inline bool BackwardPass<Element, Products>::visible_keys(const QueryRows& rows, KeyRange keys, const Acc* lse,
                                                          uint64_t* visible) {
  uint64_t seen_by_all = rows.count == kTile ? ~uint64_t{0} : 0;
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t first = max_of(0, rows.first_key[row] - keys.first);
    const int64_t end = min_of(keys.count, rows.end_key[row] - keys.first);
    const bool is_empty = end <= first || lse[row] == -static_cast<Acc>(__builtin_inf());
    visible[row] = is_empty ? 0 : (~uint64_t{0} >> (kTile - (end - first))) << first;
    seen_by_all &= visible[row];
  }
  return seen_by_all == ~uint64_t{0};
}

// s becomes P = exp(s - lse), as dv takes it, and dp becomes dS = P * (dp - delta); both exactly 0 where nothing is
// visible. With dropout the first P, and dp, are 0 where a pair is dropped and divided by the share that is kept
// elsewhere. Without a score rule s still lacks the scale, and dS gets it here; with one, scale_ds follows.
template <typename Element, typename Products>
template <bool kHasScoreRule, bool kDrops>
inline void BackwardPass<Element, Products>::differentiate_softmax(int64_t queries, int64_t columns,
                                                                   RowValues row_values, const Acc* visible,
                                                                   const Dropout& dropout, const Tiles& tiles) const {
  const Acc factor = 1 / dropout.kept_share<Acc>();
  for (int64_t row = 0; row < queries; ++row) {
    const Acc lse = row_values.lse[row], delta = row_values.delta[row];
    for (int64_t i = row * kTile; i < row * kTile + columns; i += kWidth<Acc>) {
      Vec<Acc> s = load(tiles.s + i), dp = load(tiles.dp + i);
      if (!kHasScoreRule) s = rounded(s * scale_);
      Vec<Acc> p = exp2<Acc>((s - lse) * static_cast<Acc>(kLog2E)), kept_p = p;
      if constexpr (kDrops) {
        const int8_t* const kept = tiles.kept + i;
        kept_p = where_kept<Acc>(kept, p * factor);
        dp = where_kept<Acc>(kept, dp * factor);
      }
      Vec<Acc> ds = p * (dp - delta);
      if (!kHasScoreRule) ds *= scale_;
      if (visible != nullptr) {
        const Vec<Acc> is_visible = load(visible + i);
        kept_p = is_visible != 0 ? kept_p : Vec<Acc>{};
        ds = is_visible != 0 ? ds : Vec<Acc>{};
      }
      store(tiles.s + i, kept_p);
      store(tiles.dp + i, ds);
    }
  }
}

// From the gradients of new scores to those of old ones. The slope of a pair without weight may be NaN.
template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::multiply_ds(int64_t queries, const Acc* slope, Acc* ds) {
  for (int64_t i = 0; i < queries * kTile; i += kWidth<Acc>) {
    const Vec<Acc> of_new = load(ds + i);
    store(ds + i, of_new == 0 ? of_new : of_new * load(slope + i));
  }
}

// From the gradient of the scores to that of the dot products.
template <typename Element, typename Products>
inline void BackwardPass<Element, Products>::scale_ds(int64_t queries, const Tiles& tiles) const {
  for (int64_t i = 0; i < queries * kTile; i += kWidth<Acc>) {
    Vec<Acc> ds = load(tiles.dp + i) * scale_;
    // The slope of a score that is not visible may be NaN.
    if (problem_.softcap > 0) ds = ds == 0 ? ds : ds * load(tiles.slope + i);
    store(tiles.dp + i, ds);
  }
}

}  // namespace
}  // namespace jattn::cpu
