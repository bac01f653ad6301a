#include "cuda/forward.h"

#include "core/require.h"
#include "cuda/attention_params.h"
#include "cuda/launch.h"
#include "cuda/mask_tiles.h"
#include "kernels/sm80/forward_shape.cuh"

namespace jattn::cuda {

int64_t forward_scratch_bytes(const Problem& problem, const Plan& plan) {
  const Config& config = require_family(plan, "sm80_forward").config();
  const int64_t mask_bytes = config.mask ? mask_tiles_bytes(problem, mask_tiling(config, false)) : 0;
  return tile_ranges_bytes(problem, config) + mask_bytes;
}

void forward(const Problem& problem, const ForwardResults& results, const Plan& plan, void* scratch, CUstream stream) {
  const Kernel& kernel = require_family(plan, "sm80_forward");
  const Config& config = kernel.config();
  if (problem.batch == 0 || problem.q_len == 0 || problem.num_heads == 0) return;

  ForwardParams params{};
  params.problem = problem_params(problem, kernel);
  launch_tile_ranges(problem, plan, config, scratch, params.problem, stream);
  if (config.mask) {
    void* packed = static_cast<unsigned char*>(scratch) + tile_ranges_bytes(problem, config);
    params.mask = launch_mask_tiles(problem, plan, mask_tiling(config, false), packed, stream);
  }
  params.out = results.out;
  params.lse = static_cast<float*>(results.lse);
  params.tiles = static_cast<int32_t>(ceil_div(problem.q_len, config.tile_q));
  params.slices = static_cast<int32_t>(ceil_div(problem.head_dim_v, config.head_dim_v));
  params.section_heads = section_heads(problem, config);
  launch(kernel,
         {.grid = {.x = problem.batch * problem.num_heads * params.tiles * params.slices},
          .num_threads = sm80::forward_threads(config),
          .shared_bytes = sm80::forward_shared_bytes(config)},
         &params, stream);
}

}  // namespace jattn::cuda
