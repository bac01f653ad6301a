// From dot products to scores: scale, softcap, bias, slopes over distances.
#pragma once

#include "core/problem.h"
#include "cpu/visibility.h"

namespace jattn::cpu {
namespace {

constexpr double kLog2E = 1.4426950408889634074;

inline int64_t bias_offset(const BroadcastTensor& bias, int64_t batch, int64_t head, int64_t query, int64_t key) {
  return batch * bias.stride_batch + head * bias.stride_head + query * bias.stride_query + key * bias.stride_key;
}

template <typename Element, typename Acc>
inline void widen_bias_row(const BroadcastTensor& bias, int64_t offset, int64_t count, Acc* to) {
  const Element* from = static_cast<const Element*>(bias.data) + offset;
  if (bias.stride_key == 0) {
    Element repeated[kWidth<Acc>];
    for (Element& element : repeated) element = *from;
    for (int64_t i = 0; i < kTile; i += kWidth<Acc>) widen_row(repeated, kWidth<Acc>, to + i, kWidth<Acc>);
  } else {
    widen_row(from, count, to, kTile);
  }
}

// to[row * kTile + key] = bias of that pair.
inline void load_bias(const Problem& problem, const Sequence& sequence, const QueryRows& rows, KeyRange keys,
                      float* to) {
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t offset = bias_offset(problem.bias, sequence.batch, rows.head[row], rows.query[row], keys.first);
    float* to_row = to + row * kTile;
    switch (problem.bias.dtype) {
      case DType::kF16: widen_bias_row<Float16>(problem.bias, offset, keys.count, to_row); break;
      case DType::kBF16: widen_bias_row<BFloat16>(problem.bias, offset, keys.count, to_row); break;
      default: widen_bias_row<float>(problem.bias, offset, keys.count, to_row); break;
    }
  }
}

inline void load_bias(const Problem& problem, const Sequence& sequence, const QueryRows& rows, KeyRange keys,
                      double* to) {
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t offset = bias_offset(problem.bias, sequence.batch, rows.head[row], rows.query[row], keys.first);
    double* to_row = to + row * kTile;
    if (problem.bias.dtype == DType::kF64) {
      widen_bias_row<double>(problem.bias, offset, keys.count, to_row);
      continue;
    }
    const float* from = static_cast<const float*>(problem.bias.data) + offset;
    for (int64_t i = 0; i < keys.count; ++i) to_row[i] = from[i * problem.bias.stride_key];
  }
}

inline bool has_score_rule(const Problem& problem) {
  return problem.softcap > 0 || problem.bias.data != nullptr || problem.alibi_slopes.data != nullptr ||
         problem.program != nullptr;
}

inline bool has_lengths(const Problem& problem) {
  return problem.q_lengths != nullptr || problem.kv_lengths != nullptr;
}

inline float alibi_slope(const Problem& problem, int64_t batch, int64_t head) {
  return problem.alibi_slopes.data[batch * problem.alibi_slopes.stride_batch + head * problem.alibi_slopes.stride_head];
}

// Where the rows and columns of a tile of scores stand, and the slope of each column.
template <typename Acc>
struct TileDistances {
  const Bits<Acc>*row, *column;
  const Acc* slope;

  // |distance| of a row from as many columns as a vector has.
  Vec<Acc> at(int64_t of_row, int64_t first_column) const {
    const Vec<Bits<Acc>> difference = row[of_row] - load(column + first_column);
    return __builtin_convertvector(difference < 0 ? -difference : difference, Vec<Acc>);
  }
};

// What turns dot products into scores beside the scale. Null, or 0: absent.
template <typename Acc>
struct ScoreRule {
  Acc scale, softcap;
  const Acc* bias;
  const TileDistances<Acc>* distances;
};

// scores = softcap(dot * scale) + bias - slope * |distance| over a tile of `rows` x `columns`. With `softcap_slope` not
// null it receives the derivative of the softcap.
template <int64_t kStride, typename Acc>
inline void apply_score_rule(const ScoreRule<Acc>& rule, int64_t rows, int64_t columns, Acc* scores,
                             Acc* softcap_slope) {
  const Acc scale = rule.scale, softcap = rule.softcap, inverse_softcap = softcap > 0 ? 1 / softcap : 0;
  const Acc* const bias = rule.bias;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; column += kWidth<Acc>) {
      const int64_t at = row * kStride + column;
      Vec<Acc> score = rounded(load(scores + at) * scale);
      if (softcap > 0) {
        const Vec<Acc> ratio = tanh<Acc>(score * inverse_softcap);
        score = rounded(ratio * softcap);
        if (softcap_slope != nullptr) store(softcap_slope + at, 1 - ratio * ratio);
      }
      if (bias != nullptr) score += load(bias + at);
      if (rule.distances != nullptr) {
        const TileDistances<Acc>& distances = *rule.distances;
        score -= rounded(load(distances.slope + column) * distances.at(row, column));
      }
      store(scores + at, score);
    }
  }
}

}  // namespace
}  // namespace jattn::cpu
