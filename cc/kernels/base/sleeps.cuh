// Whether kernels sleep at random where their warps wait for each other. Builds that look for missing waits put a file
// of this name with `true` before it on the include path (docs/debugging.md).
#pragma once

namespace jattn {

inline constexpr bool kSleepsAtRandom = false;

}  // namespace jattn
