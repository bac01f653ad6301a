// The gradients of what the user's score function reads: ds * d score' / d element, summed over the pairs that read an
// element. Any pair may read any element, so each tile of keys, against one chunk of the queries, adds to an array of
// all of them. There are several such parts: every num_parts-th tile adds to the same one, after the tile before has
// been added, and the parts are added up in their order when all are there.
#pragma once

#include "cpu/convert.h"
#include "cpu/plan.h"

namespace jattn::cpu {
namespace {

template <typename Acc>
class CaptureGradients {
 public:
  // `units`: heads of keys, times chunks. Tiles are counted over these first, then along the keys.
  CaptureGradients(const BackwardPlan& plan, int64_t units, void* dcaptures, double* parts)
      : dcaptures_(static_cast<Acc*>(dcaptures)),
        num_elements_(plan.capture_elements),
        num_parts_(plan.capture_parts),
        units_(units),
        parts_(parts) {}

  bool is_wanted() const { return dcaptures_ != nullptr; }
  int64_t num_elements() const { return num_elements_; }

  // How many tiles of keys in a row have parts of their own; 0: tiles of different heads add to the same part.
  int64_t separate_tiles() const { return num_parts_ / units_; }

  double* part(int64_t tile) const { return parts_ + tile % num_parts_ * num_elements_; }
  // The tile that is added to the part before; negative: none, and the part is to be cleared.
  int64_t tile_before(int64_t tile) const { return tile - num_parts_; }
  void clear_part(int64_t tile) const { clear(part(tile), num_elements_); }

  static constexpr int64_t kPieceLen = 1 << 9;
  int64_t num_pieces() const { return is_wanted() ? (num_elements_ + kPieceLen - 1) / kPieceLen : 0; }

  // When all parts are there.
  void finish_piece(int64_t piece) const {
    const int64_t first = piece * kPieceLen, count = min_of(kPieceLen, num_elements_ - first);
    double sums[kPieceLen] = {};
    for (int64_t part = 0; part < num_parts_; ++part) {
      for (int64_t i = 0; i < count; ++i) sums[i] += parts_[part * num_elements_ + first + i];
    }
    for (int64_t i = 0; i < count; ++i) dcaptures_[first + i] = static_cast<Acc>(sums[i]);
  }

 private:
  Acc* dcaptures_;
  int64_t num_elements_, num_parts_, units_;
  double* parts_;  // [num_parts, num_elements]
};

}  // namespace
}  // namespace jattn::cpu
