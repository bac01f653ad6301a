// Which keys a query sees: lengths, band, segments and the dense mask, for one tile of queries against one of keys.
#pragma once

#include "core/problem.h"
#include "cpu/convert.h"
#include "cpu/plan.h"

namespace jattn::cpu {
namespace {

enum class Coverage { kNone, kPartial, kFull };

// One batch entry: its lengths, its band as offsets from the query position, its segment ids.
struct Sequence {
  int64_t batch;
  int64_t q_length, kv_length;
  int64_t first_key_offset, end_key_offset;  // query t sees keys [t + first_key_offset, t + end_key_offset)
  const int32_t* q_segments;
  const int32_t* kv_segments;

  Sequence(const Problem& problem, int64_t batch_index) : batch(batch_index) {
    const auto length = [&](const int32_t* lengths, int64_t limit) {
      return lengths == nullptr ? limit : min_of(max_of(lengths[batch], 0), limit);
    };
    q_length = length(problem.q_lengths, problem.q_len);
    kv_length = length(problem.kv_lengths, problem.kv_len);
    // Beyond any extent, yet far from overflow.
    constexpr int64_t kFar = int64_t{1} << 48;
    const auto bounded = [](int64_t distance) { return min_of(max_of(distance, -kFar), kFar); };
    const int64_t diagonal = problem.lower_right ? kv_length - q_length : 0;
    first_key_offset = diagonal - bounded(problem.band_left);
    end_key_offset = diagonal + bounded(problem.band_right) + 1;
    q_segments = problem.q_segments == nullptr ? nullptr : problem.q_segments + batch * problem.q_len;
    kv_segments = problem.kv_segments == nullptr ? nullptr : problem.kv_segments + batch * problem.kv_len;
  }
};

// The ids of a tile, negative ones (padding) left out.
struct SegmentRange {
  int32_t least = INT32_MAX, most = INT32_MIN;
  bool has_padding = false;

  void add(int32_t id) {
    if (id < 0) {
      has_padding = true;
      return;
    }
    least = id < least ? id : least;
    most = id > most ? id : most;
  }
  bool is_disjoint_from(const SegmentRange& other) const { return most < other.least || other.most < least; }
  bool is_one_segment_with(const SegmentRange& other) const {
    return !has_padding && !other.has_padding && least == most && other.least == least && other.most == least;
  }
};

// Up to kTile query rows (positions of one or several heads) and the keys that lengths and band leave them.
struct QueryRows {
  int64_t count = 0;
  int64_t query[kTile], head[kTile];
  int64_t first_key[kTile], end_key[kTile];  // empty range: end_key = 0
  int32_t segment[kTile];
  int64_t least_first = kUnbounded, most_first = 0;
  int64_t least_end = kUnbounded, most_end = 0;
  SegmentRange segments;

  void add(const Sequence& sequence, int64_t query_position, int64_t head_index) {
    const int64_t row = count++;
    query[row] = query_position;
    head[row] = head_index;
    first_key[row] = max_of(0, query_position + sequence.first_key_offset);
    end_key[row] = min_of(sequence.kv_length, query_position + sequence.end_key_offset);
    if (query_position >= sequence.q_length || end_key[row] <= first_key[row]) first_key[row] = end_key[row] = 0;
    if (end_key[row] > 0) least_first = min_of(least_first, first_key[row]);
    most_first = max_of(most_first, first_key[row]);
    least_end = min_of(least_end, end_key[row]);
    most_end = max_of(most_end, end_key[row]);
    if (sequence.q_segments != nullptr) {
      segment[row] = sequence.q_segments[query_position];
      segments.add(segment[row]);
    }
  }
};

// Consecutive keys.
struct KeyRange {
  int64_t first, count;
};

inline const uint8_t* mask_row(const Problem& problem, int64_t batch, int64_t head, int64_t query, int64_t key) {
  const BroadcastTensor& mask = problem.mask;
  return static_cast<const uint8_t*>(mask.data) + batch * mask.stride_batch + head * mask.stride_head +
         query * mask.stride_query + key * mask.stride_key;
}

inline Coverage mask_coverage(const Problem& problem, const Sequence& sequence, const QueryRows& rows, KeyRange keys) {
  uint8_t any = 0, all = 1;
  const uint8_t* previous = nullptr;
  for (int64_t row = 0; row < rows.count; ++row) {
    const uint8_t* mask = mask_row(problem, sequence.batch, rows.head[row], rows.query[row], keys.first);
    if (mask == previous) continue;
    previous = mask;
    if (problem.mask.stride_key == 1) {
      for (int64_t i = 0; i < keys.count; ++i) any |= mask[i], all &= mask[i];
    } else {
      for (int64_t i = 0; i < keys.count; ++i) {
        any |= mask[i * problem.mask.stride_key];
        all &= mask[i * problem.mask.stride_key];
      }
    }
  }
  return any == 0 ? Coverage::kNone : all != 0 ? Coverage::kFull : Coverage::kPartial;
}

inline Coverage coverage(const Problem& problem, const Sequence& sequence, const QueryRows& rows, KeyRange keys) {
  const int64_t end = keys.first + keys.count;
  if (end <= rows.least_first || keys.first >= rows.most_end) return Coverage::kNone;
  bool is_full = rows.most_first <= keys.first && end <= rows.least_end;
  if (sequence.q_segments != nullptr) {
    SegmentRange key_segments;
    for (int64_t i = 0; i < keys.count; ++i) key_segments.add(sequence.kv_segments[keys.first + i]);
    if (rows.segments.is_disjoint_from(key_segments)) return Coverage::kNone;
    is_full = is_full && rows.segments.is_one_segment_with(key_segments);
  }
  if (problem.mask.data != nullptr) {
    const Coverage masked = mask_coverage(problem, sequence, rows, keys);
    if (masked == Coverage::kNone) return Coverage::kNone;
    is_full = is_full && masked == Coverage::kFull;
  }
  return is_full ? Coverage::kFull : Coverage::kPartial;
}

// Writes 1 where a query sees a key and 0 elsewhere: visible[query row * kTile + key], all kTile x kTile of it.
template <typename Acc>
inline void find_visible(const Problem& problem, const Sequence& sequence, const QueryRows& rows, KeyRange keys,
                         Acc* visible) {
  clear(visible, kTile * kTile);
  for (int64_t row = 0; row < rows.count; ++row) {
    Acc* row_visible = visible + row * kTile;
    const int64_t first = max_of(0, rows.first_key[row] - keys.first);
    const int64_t end = min_of(keys.count, rows.end_key[row] - keys.first);
    for (int64_t i = first; i < end; ++i) row_visible[i] = 1;
    if (sequence.q_segments != nullptr) {
      const int32_t id = rows.segment[row];
      const int32_t* ids = sequence.kv_segments + keys.first;
      if (id < 0) {
        clear(row_visible, kTile);
      } else {
        for (int64_t i = 0; i < keys.count; ++i) row_visible[i] = ids[i] == id ? row_visible[i] : 0;
      }
    }
    if (problem.mask.data != nullptr) {
      const uint8_t* mask = mask_row(problem, sequence.batch, rows.head[row], rows.query[row], keys.first);
      const int64_t stride = problem.mask.stride_key;
      if (stride == 1) {
        for (int64_t i = 0; i < keys.count; ++i) row_visible[i] = mask[i] != 0 ? row_visible[i] : 0;
      } else {
        for (int64_t i = 0; i < keys.count; ++i) row_visible[i] = mask[i * stride] != 0 ? row_visible[i] : 0;
      }
    }
  }
}

}  // namespace
}  // namespace jattn::cpu
