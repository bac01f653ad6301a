// The gradients of what the user's score function reads: ds * d score' / d element, summed over the pairs that read an
// element. Any pair may read any element, so a task adds to an array of all of them. There are several such parts (plan.h):
// every num_parts-th task adds to the same one, after the one before it has ended, and the parts are added up in their order
// when all are there.
#pragma once

#include "cpu/convert.h"
#include "cpu/plan.h"

namespace jattn::cpu {
namespace {

template <typename Acc>
class CaptureGradients {
 public:
  CaptureGradients(const BackwardPlan& plan, void* dcaptures, double* parts)
      : dcaptures_(static_cast<Acc*>(dcaptures)),
        num_elements_(plan.capture_elements),
        num_parts_(plan.capture_parts),
        parts_(parts) {}

  bool is_wanted() const { return dcaptures_ != nullptr; }
  int64_t num_elements() const { return num_elements_; }

  // Of one task.
  double* part(int64_t task) const { return parts_ + task % num_parts_ * num_elements_; }
  // The task that added to the part before; negative: none, and this one clears it.
  int64_t task_before(int64_t task) const { return task - num_parts_; }
  void clear_part(int64_t task) const { clear(part(task), num_elements_); }

  static constexpr int64_t kPieceLen = 1 << 12;
  int64_t num_pieces() const { return is_wanted() ? (num_elements_ + kPieceLen - 1) / kPieceLen : 0; }

  // When all parts are there.
  void finish_piece(int64_t piece) const {
    for (int64_t i = piece * kPieceLen; i < min_of(num_elements_, (piece + 1) * kPieceLen); ++i) {
      double sum = 0;
      for (int64_t part = 0; part < num_parts_; ++part) sum += parts_[part * num_elements_ + i];
      dcaptures_[i] = static_cast<Acc>(sum);
    }
  }

 private:
  Acc* dcaptures_;
  int64_t num_elements_, num_parts_;
  double* parts_;  // [num_parts, num_elements]
};

}  // namespace
}  // namespace jattn::cpu
