// Launch shapes of the small kernels before and after attention, for host and device.
#pragma once

#include "base/types.cuh"
#include "config.cuh"

namespace jattn {

// One warp per tile.
JATTN_HOST_DEVICE constexpr int segment_ranges_threads(const Config&) { return 128; }
JATTN_HOST_DEVICE constexpr int segment_ranges_min_blocks(const Config&) { return 1; }
JATTN_HOST_DEVICE constexpr int position_ranges_threads(const Config&) { return 128; }
JATTN_HOST_DEVICE constexpr int position_ranges_min_blocks(const Config&) { return 1; }

// One block per tile.
JATTN_HOST_DEVICE constexpr int mask_tiles_threads(const Config&) { return 256; }
JATTN_HOST_DEVICE constexpr int mask_tiles_min_blocks(const Config&) { return 4; }

// One block per kRowPadding rows of a head.
JATTN_HOST_DEVICE constexpr int row_delta_threads(const Config&) { return 256; }
JATTN_HOST_DEVICE constexpr int row_delta_min_blocks(const Config&) { return 1; }

// One block per query tile of a head and slice, with the warps of the fused backward: they share out its fragments
// alike.
JATTN_HOST_DEVICE constexpr int cast_grad_threads(const Config& config) { return config.num_warps * 32; }
JATTN_HOST_DEVICE constexpr int cast_grad_min_blocks(const Config&) { return 1; }
JATTN_HOST_DEVICE constexpr int cast_grad_shared_bytes(const Config& config) {
  return config.tile_q * (config.head_dim / config.grad_slices) * element_bytes(config.element);
}

// One thread per element.
JATTN_HOST_DEVICE constexpr int capture_sums_threads(const Config&) { return 256; }
JATTN_HOST_DEVICE constexpr int capture_sums_min_blocks(const Config&) { return 1; }
JATTN_HOST_DEVICE constexpr int sum_partials_threads(const Config&) { return 256; }
JATTN_HOST_DEVICE constexpr int sum_partials_min_blocks(const Config&) { return 1; }

}  // namespace jattn
