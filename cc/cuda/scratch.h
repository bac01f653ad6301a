// How one scratch buffer is divided.
#pragma once

#include <cstdint>

#include "cuda/attention_params.h"

namespace jattn::cuda {

// Hands out consecutive aligned parts of a scratch buffer. Without a buffer it only counts: what bytes a pass needs is
// found by the same code that divides them.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<unsigned char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(count * int64_t{sizeof(T)}));
  }
  void* take_bytes(int64_t bytes) {
    void* part = base_ == nullptr ? nullptr : base_ + used_;
    used_ += round_up(bytes, kScratchAlignment);
    return part;
  }
  int64_t used() const { return used_; }

 private:
  unsigned char* base_;
  int64_t used_ = 0;
};

}  // namespace jattn::cuda
