// What a band and lengths leave of a tile of scores, in cells of 16 queries x 16 keys: on a causal diagonal ten of
// sixteen.
#pragma once

#include "cpu/visibility.h"

namespace jattn::cpu {
namespace {

constexpr int64_t kCell = 16;
constexpr int64_t kMostCells = kTile / kCell;  // along a side

// The visible keys of the queries of each row of cells, from the tile's first on; where there are none, an empty range.
// Both ends rise, or stay, from one row of cells to the next, so the queries that see a column of cells follow each
// other.
struct BandCells {
  int64_t rows;  // of cells
  IndexRange keys[kMostCells];

  // The rows of cells whose queries see some of these keys, from their first query on.
  IndexRange queries_of(IndexRange of_keys) const {
    int64_t first = 0, end = rows;
    while (first < end && keys[first].end <= of_keys.first) ++first;
    while (end > first && keys[end - 1].first >= of_keys.end) --end;
    return {first * kCell, end * kCell};
  }
};

// Returns whether there are cells without a visible pair, and queries in an order that shows them.
inline bool find_band_cells(const QueryRows& rows, KeyRange keys, BandCells& cells) {
  cells.rows = (rows.count + kCell - 1) / kCell;
  bool leaves_out = false;
  IndexRange before{0, 0};
  for (int64_t cell = 0; cell < cells.rows; ++cell) {
    IndexRange& seen = cells.keys[cell];
    seen = {keys.count, 0};
    for (int64_t row = cell * kCell; row < min_of((cell + 1) * kCell, rows.count); ++row) {
      const int64_t first = max_of(0, rows.first_key[row] - keys.first);
      const int64_t end = min_of(keys.count, rows.end_key[row] - keys.first);
      if (first < end) seen = {min_of(seen.first, first), max_of(seen.end, end)};
    }
    if (seen.count() <= 0) seen = {before.end, before.end};
    if (seen.first < before.first || seen.end < before.end) return false;
    leaves_out |= seen.first >= kCell || seen.end + kCell <= keys.count;
    before = seen;
  }
  return leaves_out;
}

}  // namespace
}  // namespace jattn::cpu
