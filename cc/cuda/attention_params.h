// From a Problem and a Config to what every attention kernel reads, and the scratch that its tile walk needs.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/problem.h"
#include "cuda/plan.h"
#include "kernels/base/integers.cuh"
#include "kernels/config.cuh"
#include "kernels/params.cuh"

namespace jattn::cuda {

// The kernel of a family in a plan, or null.
const Kernel* find_family(const Plan& plan, std::string_view family);
// The same, an error if the plan has none.
const Kernel& require_family(const Plan& plan, std::string_view family);

// Checks what becomes an int32_t on the device. Before the first launch of a pass.
void require_extents(const Problem& problem);

// Checks that a kernel was made for this type: of q, k and v, or of the bias where the kernel writes its gradient.
void require_element(const Kernel& kernel, DType dtype);
void require_bias_element(const Kernel& kernel, DType dtype);

// Checks that the variant can run the problem (extents, features, alignment) and fills everything but the ranges
// of tiles.
ProblemParams problem_params(const Problem& problem, const Kernel& kernel);

// Ranges of segments and, for a band, of positions for one kernel's tiles, carved from scratch. No bytes without them.
// Beside a list of documents the kernel that makes the list finds those of segments, which stand first.
int64_t tile_ranges_bytes(const Problem& problem, const Config& config);
void launch_tile_ranges(const Problem& problem, const Plan& plan, const Config& config, void* scratch,
                        ProblemParams& params, CUstream stream);
SegmentRangesParams segment_ranges(const Problem& problem, const Config& config, void* scratch);
// Blocks of a pass with a warp for each tile.
int64_t blocks_by_tiles(const TilesOfSides& sides, int num_threads);

// Heads whose tiles are scheduled together (kernels/attn/schedule.cuh): those of a key/value head, at least four where
// the tiles of a head differ in work.
int32_t section_heads(const Problem& problem, const Config& config);

inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Every block of scratch starts on such a boundary.
inline constexpr int64_t kScratchAlignment = 256;

}  // namespace jattn::cuda
