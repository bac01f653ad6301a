// The two products of the forward pass for a handful of queries, as in decoding.
//
// Elements of a row lie in the vector lanes, and rows of K and V are read where they are, once for up to four queries.
// With queries in the lanes (forward_products.h) most lanes would be empty, and bringing K and V into a layout of their
// own would take longer than the products.
#pragma once

#include "cpu/convert.h"
#include "cpu/tasks.h"

namespace jattn::cpu {
namespace {

// The sum of the lanes of sums[i] goes to lane i. Each round adds the halves of what is left of two vectors, in the
// order of transpose_square().
template <typename T>
inline Vec<T> sums_of_lanes(Vec<T> (&sums)[kWidth<T>]) {
  constexpr auto kIndices = std::make_index_sequence<kWidth<T>>();
#pragma GCC unroll 8
  for (int half = kWidth<T> / 2; half > 0; half /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < half; ++i) {
      sums[i] =
          interleave_low<T>(sums[i], sums[i + half], kIndices) + interleave_high<T>(sums[i], sums[i + half], kIndices);
    }
  }
  return sums[0];
}

template <typename Element>
class FewRows {
 public:
  using Acc = Accumulator<Element>;
  static constexpr int64_t kStep = kWidth<Acc>;

  // Rows of a tile of keys or values.
  struct Rows {
    const Element* first;
    int64_t stride;
  };

  template <typename Plan>
  static int64_t workspace_bytes(const Plan& plan) {
    return Workspace::bytes<Acc>(kFewRows * plan.row_len) +
           Workspace::bytes<Acc>(kChunk * max_of(plan.row_len, plan.row_len_v));
  }

  template <typename Plan>
  FewRows(const Problem& problem, const Plan& plan, Workspace& workspace)
      : head_dim_(problem.head_dim),
        head_dim_v_(problem.head_dim_v),
        row_len_(plan.row_len),
        row_len_v_(plan.row_len_v),
        queries_(workspace.take<Acc>(kFewRows * plan.row_len)),
        padded_(workspace.take<Acc>(kChunk * max_of(plan.row_len, plan.row_len_v))) {}

  // Takes row(i) for i < count as the queries, times `sign`.
  template <typename Row>
  void set_queries(int64_t count, Acc sign, const Row& row) {
    num_queries_ = count;
    widen_rows<Element>(count, row, head_dim_, queries_, row_len_);
    for (int64_t i = 0; i < count * row_len_; ++i) queries_[i] *= sign;
  }

  // scores[query * kTile + key] = k . q for key < count; what follows in a row has no meaning.
  void multiply_keys(int64_t count, Rows keys, Acc* scores) const {
    for_chunks(count, keys, head_dim_, row_len_, [&](int64_t first, int64_t keys_of_chunk, auto rows, int64_t length) {
      for_queries([&](int64_t query, auto num_queries) {
        multiply_keys_of<num_queries()>(keys_of_chunk, rows, length, queries_ + query * row_len_,
                                        scores + query * kTile + first);
      });
    });
  }

  // out[query * row_len_v + d] += sum over keys < count of p[query * kTile + key] * v.
  void add_values(int64_t count, Rows values, const Acc* p, Acc* out) const {
    for_chunks(count, values, head_dim_v_, row_len_v_,
               [&](int64_t first, int64_t keys_of_chunk, auto rows, int64_t length) {
                 for_queries([&](int64_t query, auto num_queries) {
                   add_values_of<num_queries()>(keys_of_chunk, rows, length, p + query * kTile + first,
                                                out + query * row_len_v_);
                 });
               });
  }

 private:
  static constexpr int kMostTogether = 4;  // queries that share a row of keys or values in registers
  static constexpr int kSums = 8;          // as many as hide the latency of a multiply-add
  // Keys of which all queries take what they need before the next follow: where rows are a multiple of 4 KiB apart, as
  // those of many heads are, the first-level cache holds no more. Those two chunks further on are asked for.
  static constexpr int64_t kChunk = 8 > kStep ? 8 : kStep;
  static constexpr int64_t kAhead = 2 * kChunk;

  template <typename Source>
  struct SourceRows {
    const Source* first;
    int64_t stride;
    const Source* operator[](int64_t i) const { return first + i * stride; }
  };

  // Calls use(first, count, rows, length) for every chunk, `length` elements a row: a multiple of a vector.
  template <typename Use>
  void for_chunks(int64_t count, Rows rows, int64_t size, int64_t padded_size, const Use& use) const {
    for (int64_t first = 0; first < count; first += kChunk) {
      const int64_t in_chunk = min_of(kChunk, count - first);
      for (int64_t i = first + kAhead; i < min_of(first + kAhead + kChunk, count); ++i) {
        prefetch_row(rows.first + i * rows.stride, size);
      }
      const SourceRows<Element> own{rows.first + first * rows.stride, rows.stride};
      if (size % kStep == 0) {
        use(first, in_chunk, own, size);
      } else {
        widen_rows<Element>(in_chunk, [&](int64_t i) { return own[i]; }, size, padded_, padded_size);
        use(first, in_chunk, SourceRows<Acc>{padded_, padded_size}, padded_size);
      }
    }
  }

  // Calls use(first query, how many of them) with at most kMostTogether.
  template <typename Use>
  void for_queries(const Use& use) const {
    int64_t query = 0;
    for (; query + kMostTogether <= num_queries_; query += kMostTogether) {
      use(query, std::integral_constant<int, kMostTogether>());
    }
    switch (num_queries_ - query) {
      case 3: use(query, std::integral_constant<int, 3>()); break;
      case 2: use(query, std::integral_constant<int, 2>()); break;
      case 1: use(query, std::integral_constant<int, 1>()); break;
      default: break;
    }
  }

  template <int kQueries, typename Source>
  void multiply_keys_of(int64_t count, SourceRows<Source> keys, int64_t length, const Acc* queries, Acc* scores) const {
    constexpr int kKeys = static_cast<int>(min_of(kStep, kSums / (kQueries == 3 ? 2 : kQueries)));
    for (int64_t first = 0; first < count; first += kStep) {
      Vec<Acc> sums[kQueries][kStep];
      for (int64_t part = 0; part < kStep; part += kKeys) {
        const Source* rows[kKeys];
        for (int k = 0; k < kKeys; ++k) rows[k] = keys[min_of(first + part + k, count - 1)];
        Vec<Acc> sum[kQueries][kKeys] = {};
        for (int64_t d = 0; d < length; d += kStep) {
#pragma GCC unroll 8
          for (int k = 0; k < kKeys; ++k) {
            const Vec<Acc> key = widen(rows[k] + d);
#pragma GCC unroll 4
            for (int q = 0; q < kQueries; ++q) sum[q][k] += load(queries + q * row_len_ + d) * key;
          }
        }
        for (int q = 0; q < kQueries; ++q) {
          for (int k = 0; k < kKeys; ++k) sums[q][part + k] = sum[q][k];
        }
      }
      for (int q = 0; q < kQueries; ++q) store(scores + q * kTile + first, sums_of_lanes<Acc>(sums[q]));
    }
  }

  template <int kQueries, typename Source>
  void add_values_of(int64_t count, SourceRows<Source> values, int64_t length, const Acc* p, Acc* out) const {
    int64_t d = 0;
    const auto block = [&](auto vectors) {
      constexpr int kVectors = vectors();
      for (; d + kVectors * kStep <= length; d += kVectors * kStep) {
        Vec<Acc> sum[kQueries][kVectors];
        for (int q = 0; q < kQueries; ++q) {
          for (int v = 0; v < kVectors; ++v) sum[q][v] = load(out + q * row_len_v_ + d + v * kStep);
        }
        for (int64_t key = 0; key < count; ++key) {
          const Source* row = values[key] + d;
          Vec<Acc> weight[kQueries];
          for (int q = 0; q < kQueries; ++q) weight[q] = broadcast<Acc>(p[q * kTile + key]);
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            const Vec<Acc> value = widen(row + v * kStep);
#pragma GCC unroll 4
            for (int q = 0; q < kQueries; ++q) sum[q][v] += weight[q] * value;
          }
        }
        for (int q = 0; q < kQueries; ++q) {
          for (int v = 0; v < kVectors; ++v) store(out + q * row_len_v_ + d + v * kStep, sum[q][v]);
        }
      }
    };
    constexpr int kMostVectors = kSums / (kQueries == 3 ? 2 : kQueries);
    if constexpr (kMostVectors >= 8) block(std::integral_constant<int, 8>());
    if constexpr (kMostVectors >= 4) block(std::integral_constant<int, 4>());
    block(std::integral_constant<int, 2>());
    block(std::integral_constant<int, 1>());
  }

  int64_t head_dim_, head_dim_v_, row_len_, row_len_v_, num_queries_ = 0;
  Acc* queries_;  // [kFewRows][row_len]
  Acc* padded_;   // rows of keys or values whose length is no multiple of a vector
};

}  // namespace
}  // namespace jattn::cpu
