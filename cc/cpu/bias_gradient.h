// dbias: the gradients of the scores, summed over the axes along which the bias was broadcast.
#pragma once

#include "cpu/scores.h"
#include "cpu/tasks.h"

namespace jattn::cpu {
namespace {

inline void narrow_bias_row(const float* from, int64_t count, DType dtype, void* to, int64_t offset) {
  switch (dtype) {
    case DType::kF16: narrow_row(from, count, 1.0f, static_cast<Float16*>(to) + offset); break;
    case DType::kBF16: narrow_row(from, count, 1.0f, static_cast<BFloat16*>(to) + offset); break;
    default: narrow_row(from, count, 1.0f, static_cast<float*>(to) + offset); break;
  }
}

inline void narrow_bias_row(const double* from, int64_t count, DType dtype, void* to, int64_t offset) {
  if (dtype == DType::kF64) {
    memcpy(static_cast<double*>(to) + offset, from, static_cast<size_t>(count) * sizeof(double));
  } else {
    for (int64_t i = 0; i < count; ++i) static_cast<float*>(to)[offset + i] = static_cast<float>(from[i]);
  }
}

// If every element of dbias belongs to one score it is written at once. Otherwise it is summed in the accumulator type,
// in an array of its own shape. Sums over queries are first formed per task, in `column_sums`: tasks at the same step
// are ordered, tasks at different steps are not, and they would all add to the same row.
template <typename Acc>
class BiasGradient {
 public:
  BiasGradient(const Problem& problem, const BackwardPlan& plan, void* dbias, char* scratch)
      : bias_(problem.bias),
        dbias_(dbias),
        count_(plan.dbias_count),
        is_written_once_(plan.writes_dbias_once),
        is_summed_in_place_(plan.sums_dbias_in_place),
        sums_(plan.sums_dbias_in_place ? static_cast<Acc*>(dbias)
                                       : reinterpret_cast<Acc*>(scratch + plan.dbias_offset)) {}

  bool is_wanted() const { return dbias_ != nullptr; }
  bool needs_order() const { return is_wanted() && !is_written_once_; }
  bool sums_over_queries() const { return needs_order() && bias_.stride_query == 0; }

  static constexpr int64_t kPieceLen = 1 << 16;
  int64_t num_pieces() const { return is_wanted() ? (count_ + kPieceLen - 1) / kPieceLen : 0; }

  void clear_piece(int64_t piece) const {
    const int64_t first = piece * kPieceLen, count = min_of(kPieceLen, count_ - first);
    if (is_written_once_) {
      const int64_t element_bytes = bias_.dtype == DType::kF64 ? 8 : bias_.dtype == DType::kF32 ? 4 : 2;
      memset(static_cast<char*>(dbias_) + first * element_bytes, 0, static_cast<size_t>(count * element_bytes));
    } else {
      clear(sums_ + first, count);
    }
  }

  void finish_piece(int64_t piece) const {
    if (is_written_once_ || is_summed_in_place_) return;
    const int64_t first = piece * kPieceLen;
    narrow_bias_row(sums_ + first, min_of(kPieceLen, count_ - first), bias_.dtype, dbias_, first);
  }

  // ds[query row * kTile + key] of one tile.
  void add_tile(const Sequence& sequence, const QueryRows& rows, KeyRange keys, const Acc* ds) const {
    for (int64_t row = 0; row < rows.count; ++row) {
      const int64_t offset = bias_offset(bias_, sequence.batch, rows.head[row], rows.query[row], keys.first);
      if (is_written_once_) {
        narrow_bias_row(ds + row * kTile, keys.count, bias_.dtype, dbias_, offset);
      } else {
        add_row(ds + row * kTile, keys.count, offset);
      }
    }
  }

  // column_sums[key] += sum over queries of ds. By eight queries, then by tiles: in one chain, sums of 180 queries had
  // errors a quarter larger.
  static void add_columns(int64_t queries, int64_t keys, const Acc* ds, Acc* column_sums) {
    constexpr int64_t kChain = 8;
    Acc of_tile[kTile] = {};
    for (int64_t first = 0; first < queries; first += kChain) {
      Acc of_chain[kTile] = {};
      const int64_t end = min_of(first + kChain, queries);
      for (int64_t row = first; row < end; ++row) {
        for (int64_t i = 0; i < keys; ++i) of_chain[i] += ds[row * kTile + i];
      }
      for (int64_t i = 0; i < keys; ++i) of_tile[i] += of_chain[i];
    }
    for (int64_t i = 0; i < keys; ++i) column_sums[i] += of_tile[i];
  }
  void add_column_sums(const Sequence& sequence, int64_t head, KeyRange keys, const Acc* column_sums) const {
    add_row(column_sums, keys.count, bias_offset(bias_, sequence.batch, head, 0, keys.first));
  }

 private:
  void add_row(const Acc* row, int64_t count, int64_t offset) const {
    if (bias_.stride_key == 0) {
      Acc sum = 0;
      for (int64_t i = 0; i < count; ++i) sum += row[i];
      sums_[offset] += sum;
    } else {
      for (int64_t i = 0; i < count; ++i) sums_[offset + i] += row[i];
    }
  }

  const BroadcastTensor& bias_;
  void* dbias_;
  int64_t count_;
  bool is_written_once_, is_summed_in_place_;
  Acc* sums_;
};

}  // namespace
}  // namespace jattn::cpu
