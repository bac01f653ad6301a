#include "cuda/backward_dbias.h"

#include <algorithm>

#include "cuda/attention_params.h"
#include "kernels/passes/shape.cuh"

namespace jattn::cuda {

DbiasShape dbias_shape(const Problem& problem, const Config& config, int64_t wanted_blocks) {
  DbiasShape shape{shape_of(problem.bias, problem), 0, 0, 0};
  const int64_t q_tiles = ceil_div(problem.q_len, config.tile_q), kv_tiles = ceil_div(problem.kv_len, config.tile_kv);
  shape.tiles_query = shape.queries == 1 ? 1 : q_tiles;
  shape.tiles_key = shape.keys == 1 ? 1 : kv_tiles;
  const int64_t steps = (problem.batch / shape.batch) * (problem.num_heads / shape.heads) *
                        (q_tiles / shape.tiles_query) * (kv_tiles / shape.tiles_key);
  shape.splits = std::clamp<int64_t>(ceil_div(wanted_blocks, shape.tiles()), 1, std::max<int64_t>(steps, 1));
  return shape;
}

void sum_dbias(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, int64_t elements,
               int64_t group, int64_t splits, const float* partials, CUstream stream) {
  const Kernel& kernel = require_family(plan, "sum_partials");
  require_bias_element(kernel, problem.bias.dtype);
  const SumPartialsParams params{.partials = partials,
                                 .result = buffers.dbias,
                                 .elements = elements,
                                 .group = group,
                                 .splits = static_cast<int32_t>(splits)};
  const int threads = sum_partials_threads(kernel.config());
  launch(kernel, {.grid = {.x = ceil_div(elements, threads)}, .num_threads = threads}, &params, stream);
}

void clear_gradients(const Problem& problem, const BackwardBuffers& buffers, CUstream stream) {
  const int64_t bytes = size_bytes(problem.dtype);
  const int64_t q_rows = problem.batch * problem.q_len * problem.num_heads;
  const int64_t kv_rows = problem.batch * problem.kv_len * problem.num_kv_heads;
  if (buffers.dq != nullptr) fill_zero(buffers.dq, q_rows * problem.head_dim * bytes, stream);
  if (buffers.dk != nullptr) fill_zero(buffers.dk, kv_rows * problem.head_dim * bytes, stream);
  if (buffers.dv != nullptr) fill_zero(buffers.dv, kv_rows * problem.head_dim_v * bytes, stream);
  if (buffers.dslopes != nullptr) {
    fill_zero(buffers.dslopes, problem.batch * problem.num_heads * buffers.dslopes_parts * 4, stream);
  }
  if (buffers.dcaptures != nullptr) fill_zero(buffers.dcaptures, buffers.dcaptures_elements * 4, stream);
  if (buffers.dbias == nullptr) return;
  const BroadcastTensor& bias = problem.bias;
  fill_zero(buffers.dbias, shape_of(bias, problem).elements() * size_bytes(bias.dtype), stream);
}

}  // namespace jattn::cuda
