// The pre-pass over a dense mask (kernels/passes/mask_tiles.cuh): bits in fragment order, and the state of every tile.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/plan.h"
#include "kernels/config.cuh"
#include "kernels/params.cuh"

namespace jattn::cuda {

enum class MaskOrientation { kQueriesAsRows, kKeysAsRows };

// The sizes of the tiles that an attention kernel visits, along the rows and columns of its score fragments.
struct MaskTiling {
  MaskOrientation orientation;
  int64_t rows, columns;  // at most 256 and 128, columns multiples of 16
};

// Of a kernel that owns keys, or queries: they are the rows.
MaskTiling mask_tiling(const Config& config, bool owns_keys);

// Scratch of one packed mask, a multiple of kScratchAlignment.
int64_t mask_tiles_bytes(const Problem& problem, const MaskTiling& tiling);

// Packs the mask of the problem into scratch and says where it lies. The plan has a kernel of family mask_tiles.
PackedMask launch_mask_tiles(const Problem& problem, const Plan& plan, const MaskTiling& tiling, void* scratch,
                             CUstream stream);

}  // namespace jattn::cuda
