#include "cuda/document_tiles.h"

#include <limits>

#include "core/require.h"
#include "cuda/attention_params.h"
#include "cuda/launch.h"
#include "kernels/sm90/shape.cuh"

namespace jattn::cuda {
namespace {

// The axis that a kernel owns.
struct OwnedAxis {
  int64_t length, heads;
  int tile;

  OwnedAxis(const Problem& problem, const Config& config, bool keys)
      : length(keys ? problem.kv_len : problem.q_len),
        heads(keys ? problem.num_kv_heads : problem.num_heads),
        tile(keys ? config.tile_kv : config.tile_q) {}

  int64_t room() const { return sm90::document_tiles_room(length, tile); }
};

}  // namespace

int64_t document_tiles_bytes(const Problem& problem, const Config& config, bool owns_keys) {
  if (!config.documents) return 0;
  return problem.batch * OwnedAxis(problem, config, owns_keys).room() * int64_t{sizeof(sm90::DocumentTile)};
}

const sm90::DocumentTile* launch_document_tiles(const Problem& problem, const Plan& plan, const Config& config,
                                                bool owns_keys, void* ranges, void* list, int32_t* counters,
                                                const sm90::OtherTiles& others, CUstream stream) {
  const Kernel& kernel = require_family(plan, "document_tiles");
  const OwnedAxis axis(problem, config, owns_keys);
  const int64_t items = axis.heads * problem.batch * axis.room();
  JATTN_REQUIRE(items <= std::numeric_limits<int32_t>::max(), "batch * heads * tiles of documents may be ", items,
                ", must be below 2^31");
  auto* tiles = static_cast<sm90::DocumentTile*>(list);
  const int32_t* ids[] = {problem.q_segments, problem.kv_segments};
  const int64_t lengths[] = {problem.q_len, problem.kv_len};
  const sm90::DocumentTilesParams params{
      .segments = {ids[owns_keys], ids[!owns_keys]},
      .length = {static_cast<int32_t>(lengths[owns_keys]), static_cast<int32_t>(lengths[!owns_keys])},
      .tile = axis.tile,
      .last_first = !owns_keys,
      .counters = counters,
      .tiles = tiles,
      .others = others,
      .ranges = segment_ranges(problem, config, ranges),
  };
  const int threads = sm90::document_tiles_threads(kernel.config());
  const int64_t blocks = problem.batch + blocks_by_tiles(params.ranges.sides, threads);
  launch(kernel, {.grid = {.x = blocks}, .num_threads = threads}, &params, stream);
  return tiles;
}

}  // namespace jattn::cuda
