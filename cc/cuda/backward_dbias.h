// What the backward passes of all architectures share on the host: how tiles of the bias are handed out to the kernel
// for dbias, and gradients of a problem without queries or keys.
#pragma once

#include <cstdint>

#include "core/broadcast.h"
#include "core/problem.h"
#include "cuda/launch.h"
#include "cuda/plan.h"

namespace jattn::cuda {

// The shape of the bias, and how its tiles are shared out.
struct DbiasShape : BroadcastShape {
  int64_t tiles_query, tiles_key, splits;

  int64_t tiles() const { return batch * heads * tiles_query * tiles_key; }
};

// wanted_blocks: that the device should be given at least, if there is work for them.
DbiasShape dbias_shape(const Problem& problem, const Config& config, int64_t wanted_blocks);

// Without queries or keys nothing depends on anything: all gradients are 0.
void clear_gradients(const Problem& problem, const BackwardBuffers& buffers, CUstream stream);

// Adds up partial sums [elements / group, splits, group] into dbias.
void sum_dbias(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, int64_t elements,
               int64_t group, int64_t splits, const float* partials, CUstream stream);

// Launches the kernel for dbias, and the sum over its splits. Params: DbiasParams of the architecture, whose `backward`
// is filled in; block: threads and shared memory.
template <typename Params>
void launch_dbias_tiles(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernel& kernel,
                        const DbiasShape& shape, float* partials, Params params, Launch block, CUstream stream) {
  params.bias.result = buffers.dbias;
  params.bias.partials = partials;
  params.bias.bias_elements = shape.elements();
  params.bias.extent_batch = static_cast<int32_t>(shape.batch);
  params.bias.extent_head = static_cast<int32_t>(shape.heads);
  params.bias.extent_query = static_cast<int32_t>(shape.queries);
  params.bias.extent_key = static_cast<int32_t>(shape.keys);
  params.bias.tiles_query = static_cast<int32_t>(shape.tiles_query);
  params.bias.tiles_key = static_cast<int32_t>(shape.tiles_key);
  params.bias.splits = static_cast<int32_t>(shape.splits);
  block.grid = {.x = shape.tiles() * shape.splits};
  launch(kernel, block, &params, stream);
  const int64_t elements = shape.elements();
  if (shape.splits > 1) sum_dbias(problem, buffers, plan, elements, elements, shape.splits, partials, stream);
}

}  // namespace jattn::cuda
