// The pre-pass that lists tiles of packed documents (kernels/sm90/document_tiles.cuh).
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/plan.h"
#include "kernels/sm90/forward_params.cuh"

namespace jattn::cuda {

// The list for a kernel that owns keys, or queries; 0 if it takes none.
int64_t document_tiles_bytes(const Problem& problem, const Config& config, bool owns_keys);

// Fills the list, the counters of its tiles and of refusals, the tiles of the other axis if it is given any, and the
// ranges that launch_tile_ranges() was given.
const sm90::DocumentTile* launch_document_tiles(const Problem& problem, const Plan& plan, const Config& config,
                                                bool owns_keys, void* ranges, void* list, int32_t* counters,
                                                const sm90::OtherTiles& others, CUstream stream);

}  // namespace jattn::cuda
