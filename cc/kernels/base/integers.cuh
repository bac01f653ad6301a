// Integer division rounded up. Plain C++20: the host compiler, nvcc and NVRTC read it.
#pragma once

#include "base/types.cuh"

namespace jattn {

// In the wider of the two types; a is not negative.
template <class A, class B>
JATTN_HOST_DEVICE constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}

}  // namespace jattn
