#include "cuda/mask_tiles.h"

#include <algorithm>

#include "core/broadcast.h"
#include "core/require.h"
#include "cuda/attention_params.h"
#include "cuda/launch.h"
#include "kernels/passes/shape.cuh"

namespace jattn::cuda {
namespace {

// The extents of the mask itself, along the rows and columns of fragments: a broadcast axis has one row, or one tile of
// columns.
struct MaskShape {
  int64_t batch, heads, rows, columns;
  int64_t row_stride, column_stride;
  int64_t tile_rows, row_tiles, column_tiles;

  MaskShape(const Problem& problem, const MaskTiling& tiling) {
    const BroadcastTensor& mask = problem.mask;
    const BroadcastShape shape = shape_of(mask, problem);
    const bool keys = tiling.orientation == MaskOrientation::kKeysAsRows;
    row_stride = keys ? mask.stride_key : mask.stride_query;
    column_stride = keys ? mask.stride_query : mask.stride_key;
    batch = shape.batch;
    heads = shape.heads;
    rows = keys ? shape.keys : shape.queries;
    columns = column_stride == 0 ? tiling.columns : keys ? shape.queries : shape.keys;
    tile_rows = row_stride == 0 ? 1 : tiling.rows;
    row_tiles = ceil_div(rows, tile_rows);
    column_tiles = ceil_div(columns, tiling.columns);
  }

  int64_t rows_padded() const { return row_tiles * tile_rows; }
  int64_t word_bytes() const { return round_up(batch * heads * column_tiles * rows_padded() * 16, kScratchAlignment); }
  int64_t tiles() const { return batch * heads * row_tiles * column_tiles; }
};

}  // namespace

MaskTiling mask_tiling(const Config& config, bool owns_keys) {
  if (owns_keys) return {MaskOrientation::kKeysAsRows, config.tile_kv, config.tile_q};
  return {MaskOrientation::kQueriesAsRows, config.tile_q, config.tile_kv};
}

int64_t mask_tiles_bytes(const Problem& problem, const MaskTiling& tiling) {
  const MaskShape shape(problem, tiling);
  return shape.word_bytes() + round_up(shape.tiles(), kScratchAlignment);
}

PackedMask launch_mask_tiles(const Problem& problem, const Plan& plan, const MaskTiling& tiling, void* scratch,
                             CUstream stream) {
  JATTN_REQUIRE(tiling.rows > 0 && tiling.rows <= 256 && tiling.columns <= 128 && tiling.columns % 16 == 0,
                "tiles of a mask are at most 256 x 128 with columns in multiples of 16, not ", tiling.rows, " x ",
                tiling.columns);
  const Kernel& kernel = require_family(plan, "mask_tiles");
  const BroadcastTensor& mask = problem.mask;
  const MaskShape shape(problem, tiling);
  const bool strides_wide = mask.stride_batch % 16 == 0 && mask.stride_head % 16 == 0 && mask.stride_query % 16 == 0;

  MaskTilesParams params{};
  params.mask = static_cast<const uint8_t*>(mask.data);
  params.stride_batch = mask.stride_batch;
  params.stride_head = mask.stride_head;
  params.stride_row = shape.row_stride;
  params.stride_column = shape.column_stride;
  params.words = static_cast<uint32_t*>(scratch);
  params.states = static_cast<uint8_t*>(scratch) + shape.word_bytes();
  params.rows_padded = shape.rows_padded();
  params.heads = static_cast<int32_t>(shape.heads);
  params.rows = static_cast<int32_t>(shape.rows);
  params.columns = static_cast<int32_t>(shape.columns);
  params.tile_rows = static_cast<int32_t>(shape.tile_rows);
  params.tile_columns = static_cast<int32_t>(tiling.columns);
  params.row_tiles = static_cast<int32_t>(shape.row_tiles);
  params.column_tiles = static_cast<int32_t>(shape.column_tiles);
  params.keys_are_rows = tiling.orientation == MaskOrientation::kKeysAsRows;
  params.wide = mask.stride_key == 1 && strides_wide && reinterpret_cast<uintptr_t>(mask.data) % 16 == 0;
  launch(kernel, {.grid = {.x = shape.tiles()}, .num_threads = mask_tiles_threads(kernel.config())}, &params, stream);

  PackedMask packed{};
  packed.words = params.words;
  packed.states = params.states;
  const int64_t words_of_head = shape.column_tiles * shape.rows_padded() * 4;
  packed.words_head = shape.heads == 1 ? 0 : words_of_head;
  packed.words_batch = shape.batch == 1 ? 0 : shape.heads * words_of_head;
  packed.words_column_tile = shape.column_stride == 0 ? 0 : shape.rows_padded() * 4;
  packed.words_row = shape.row_stride == 0 ? 0 : 4;
  const int64_t tiles_of_head = shape.row_tiles * shape.column_tiles;
  packed.states_head = shape.heads == 1 ? 0 : tiles_of_head;
  packed.states_batch = shape.batch == 1 ? 0 : shape.heads * tiles_of_head;
  packed.states_row_tile = shape.row_stride == 0 ? 0 : static_cast<int32_t>(shape.column_tiles);
  packed.states_column_tile = shape.column_stride == 0 ? 0 : 1;
  return packed;
}

}  // namespace jattn::cuda
