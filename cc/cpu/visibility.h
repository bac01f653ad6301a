// Which keys a query sees: lengths, band, segments and the dense mask, for one tile of queries against one of keys; and
// where queries and keys stand, for bands and slopes.
#pragma once

#include "core/problem.h"
#include "cpu/convert.h"
#include "cpu/plan.h"

namespace jattn::cpu {
namespace {

enum class Coverage { kNone, kPartial, kFull };

// One batch entry: its lengths, its band, its segment ids and positions.
struct Sequence {
  int64_t batch;
  int64_t q_length, kv_length;
  int64_t diagonal;  // key t + diagonal is at distance 0 from query t, where there are no positions
  // Query t sees keys [t + first_key_offset, t + end_key_offset). A band over positions bounds distances instead.
  int64_t first_key_offset, end_key_offset;
  int64_t least_distance, most_distance;
  bool has_position_band;
  const int32_t* q_segments;
  const int32_t* kv_segments;
  const int32_t* q_positions;
  const int32_t* kv_positions;

  Sequence(const Problem& problem, int64_t batch_index) : batch(batch_index) {
    const auto length = [&](const int32_t* lengths, int64_t limit) {
      return lengths == nullptr ? limit : min_of(max_of(lengths[batch], 0), limit);
    };
    q_length = length(problem.q_lengths, problem.q_len);
    kv_length = length(problem.kv_lengths, problem.kv_len);
    // Beyond any extent, yet far from overflow.
    constexpr int64_t kFar = int64_t{1} << 48;
    const auto bounded = [](int64_t distance) { return min_of(max_of(distance, -kFar), kFar); };
    diagonal = problem.lower_right ? kv_length - q_length : 0;
    least_distance = -bounded(problem.band_left);
    most_distance = bounded(problem.band_right);
    const auto of_batch = [&](const int32_t* rows, int64_t extent) {
      return rows == nullptr ? nullptr : rows + batch * extent;
    };
    q_segments = of_batch(problem.q_segments, problem.q_len);
    kv_segments = of_batch(problem.kv_segments, problem.kv_len);
    q_positions = of_batch(problem.q_positions, problem.q_len);
    kv_positions = of_batch(problem.kv_positions, problem.kv_len);
    const bool has_band = problem.band_left != kUnbounded || problem.band_right != kUnbounded;
    has_position_band = q_positions != nullptr && has_band;
    first_key_offset = has_position_band ? -kFar : diagonal + least_distance;
    end_key_offset = has_position_band ? kFar : diagonal + most_distance + 1;
  }

  // Rows that take part in nothing, whatever they hold.
  bool is_query_padding(int64_t query) const {
    return query >= q_length || (q_segments != nullptr && q_segments[query] < 0);
  }
  bool is_key_padding(int64_t key) const {
    return key >= kv_length || (kv_segments != nullptr && kv_segments[key] < 0);
  }

  // Distances are differences of these.
  int64_t query_coordinate(int64_t query) const {
    return q_positions != nullptr ? q_positions[query] : query + diagonal;
  }
  int64_t key_coordinate(int64_t key) const { return kv_positions != nullptr ? kv_positions[key] : key; }
};

// row(i), but `zeros` where is_padding(i): what padding holds then decides nothing, not even how a tile is computed.
template <typename Row, typename IsPadding, typename Element>
inline auto without_padding(const Row& row, const IsPadding& is_padding, const Element* zeros) {
  return [=](int64_t i) { return is_padding(i) ? zeros : row(i); };
}

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

// The positions of a tile, padding left out.
struct PositionRange {
  int32_t least = INT32_MAX, most = INT32_MIN;

  void add(int32_t position) {
    least = position < least ? position : least;
    most = position > most ? position : most;
  }
  bool is_empty() const { return most < least; }
};

// Whether lengths and a band of indices alone say what a query sees.
inline bool only_band_hides(const Problem& problem, const Sequence& sequence) {
  return problem.mask.data == nullptr && !sequence.has_position_band && sequence.q_segments == nullptr;
}

// Up to kTile query rows (positions of one or several heads) and the keys that lengths and band leave them.
struct QueryRows {
  int64_t count = 0;
  int64_t query[kTile], head[kTile];
  int64_t first_key[kTile], end_key[kTile];  // empty range: end_key = 0
  int32_t segment[kTile];
  PositionRange positions;
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
    const bool is_padding = end_key[row] == 0 || (sequence.q_segments != nullptr && segment[row] < 0);
    if (sequence.has_position_band && !is_padding) positions.add(sequence.q_positions[query_position]);
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

// What a band over positions leaves of a tile whose positions lie in these ranges.
inline Coverage band_coverage(const Sequence& sequence, const PositionRange& queries, const PositionRange& keys) {
  if (queries.is_empty() || keys.is_empty()) return Coverage::kNone;
  const int64_t least = int64_t{keys.least} - queries.most, most = int64_t{keys.most} - queries.least;
  if (most < sequence.least_distance || least > sequence.most_distance) return Coverage::kNone;
  const bool is_full = least >= sequence.least_distance && most <= sequence.most_distance;
  return is_full ? Coverage::kFull : Coverage::kPartial;
}

inline Coverage coverage(const Problem& problem, const Sequence& sequence, const QueryRows& rows, KeyRange keys) {
  const int64_t end = keys.first + keys.count;
  if (end <= rows.least_first || keys.first >= rows.most_end) return Coverage::kNone;
  bool is_full = rows.most_first <= keys.first && end <= rows.least_end;
  if (sequence.has_position_band) {
    PositionRange key_positions;
    for (int64_t i = 0; i < keys.count; ++i) {
      const bool is_padding = sequence.kv_segments != nullptr && sequence.kv_segments[keys.first + i] < 0;
      if (!is_padding) key_positions.add(sequence.kv_positions[keys.first + i]);
    }
    const Coverage in_band = band_coverage(sequence, rows.positions, key_positions);
    if (in_band == Coverage::kNone) return Coverage::kNone;
    is_full = is_full && in_band == Coverage::kFull;
  }
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
    if (sequence.has_position_band) {
      // Positions fit into 30 bits, so limits cut to 31 bits decide the same.
      const auto cut = [](int64_t limit) {
        return static_cast<int32_t>(min_of(max_of(limit, -(int64_t{1} << 30)), int64_t{1} << 30));
      };
      const int64_t position = sequence.q_positions[rows.query[row]];
      const int32_t least = cut(position + sequence.least_distance), most = cut(position + sequence.most_distance);
      const int32_t* positions = sequence.kv_positions + keys.first;
      for (int64_t i = 0; i < keys.count; ++i) {
        row_visible[i] = positions[i] >= least && positions[i] <= most ? row_visible[i] : 0;
      }
    }
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
