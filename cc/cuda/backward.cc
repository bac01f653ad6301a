#include "cuda/backward.h"

#include <algorithm>
#include <bit>

#include "core/require.h"
#include "cuda/attention_params.h"
#include "cuda/backward_dbias.h"
#include "cuda/launch.h"
#include "cuda/mask_tiles.h"
#include "cuda/scratch.h"
#include "kernels/passes/shape.cuh"
#include "kernels/sm80/backward_shape.cuh"

namespace jattn::cuda {
namespace {

// Blocks that a device should be given at least; see dbias_shape().
constexpr int64_t kWantedBlocks = 512;

struct Kernels {
  const Kernel* fused;
  const Kernel* dkv;
  const Kernel* dq;
  const Kernel* dbias;
  const Kernel* dslopes;
  const Kernel* dcaptures;
  const Kernel* dcaptures_sizes;
  const Kernel* dcaptures_exact;
};

Kernels find_kernels(const Plan& plan) {
  const Kernels found{find_family(plan, "sm80_backward"),
                      find_family(plan, "sm80_backward_dkv"),
                      find_family(plan, "sm80_backward_dq"),
                      find_family(plan, "sm80_backward_dbias"),
                      find_family(plan, "sm80_backward_dslopes"),
                      find_family(plan, "sm80_backward_dcaptures"),
                      find_family(plan, "sm80_backward_dcaptures_sizes"),
                      find_family(plan, "sm80_backward_dcaptures_exact")};
  JATTN_REQUIRE((found.dcaptures_sizes == nullptr) == (found.dcaptures_exact == nullptr),
                "the plan has one kernel of sm80_backward_dcaptures_sizes and sm80_backward_dcaptures_exact, must have"
                " both or none: the second adds in units that the first finds");
  return found;
}

// Everything in scratch, in the order of its parts.
struct Scratch {
  int64_t rows_padded = 0;
  float* lse_log2 = nullptr;
  float* delta = nullptr;
  float* dq_accumulator = nullptr;
  void* key_ranges = nullptr;    // for the kernel that owns keys
  void* query_ranges = nullptr;  // for the one that owns queries
  void* dbias_ranges = nullptr;
  void* dslopes_ranges = nullptr;
  void* dcaptures_ranges = nullptr;
  void* key_mask = nullptr;  // packed, likewise
  void* query_mask = nullptr;
  void* dbias_mask = nullptr;
  void* dslopes_mask = nullptr;
  void* dcaptures_mask = nullptr;
  float* partials = nullptr;
  float* capture_copies = nullptr;  // of gradients of captures, if there are several
  unsigned long long* whole_sums = nullptr;
  unsigned* largest = nullptr;  // of each capture
  int64_t bytes = 0;
};

// How many copies of the gradients of captures blocks share: with one, all of them may add to few elements.
int64_t capture_copies(int64_t elements) {
  constexpr int64_t kWantedElements = int64_t{1} << 20, kMost = 64;
  return std::clamp<int64_t>(kWantedElements / std::max<int64_t>(elements, 1), 1, kMost);
}

Scratch carve(const Problem& problem, const BackwardBuffers& buffers, const Kernels& kernels, void* base) {
  Carver carver(base);
  Scratch scratch;
  const int64_t heads = problem.batch * problem.num_heads;
  scratch.rows_padded = round_up(problem.q_len, kRowPadding);
  scratch.lse_log2 = carver.take<float>(heads * scratch.rows_padded);
  scratch.delta = carver.take<float>(heads * scratch.rows_padded);
  if (kernels.fused != nullptr) {
    scratch.dq_accumulator = carver.take<float>(heads * scratch.rows_padded * kernels.fused->config().head_dim);
  }
  const auto take_ranges = [&](const Kernel* kernel) -> void* {
    if (kernel == nullptr) return nullptr;
    return carver.take_bytes(tile_ranges_bytes(problem, kernel->config()));
  };
  const auto take_mask = [&](const Kernel* kernel, bool owns_keys) -> void* {
    if (kernel == nullptr || !kernel->config().mask) return nullptr;
    return carver.take_bytes(mask_tiles_bytes(problem, mask_tiling(kernel->config(), owns_keys)));
  };
  const Kernel* keys = kernels.fused != nullptr ? kernels.fused : kernels.dkv;
  scratch.key_ranges = take_ranges(keys);
  scratch.key_mask = take_mask(keys, true);
  scratch.query_ranges = take_ranges(kernels.dq);
  scratch.query_mask = take_mask(kernels.dq, false);
  if (kernels.dbias != nullptr && buffers.dbias != nullptr) {
    scratch.dbias_ranges = take_ranges(kernels.dbias);
    scratch.dbias_mask = take_mask(kernels.dbias, false);
    const DbiasShape shape = dbias_shape(problem, kernels.dbias->config(), kWantedBlocks);
    if (shape.splits > 1) scratch.partials = carver.take<float>(shape.splits * shape.elements());
  }
  if (buffers.dslopes != nullptr) {
    scratch.dslopes_ranges = take_ranges(kernels.dslopes);
    scratch.dslopes_mask = take_mask(kernels.dslopes, false);
  }
  if (buffers.dcaptures != nullptr) {
    const bool is_exact = kernels.dcaptures_exact != nullptr;
    const Kernel* kernel = is_exact ? kernels.dcaptures_exact : kernels.dcaptures;
    scratch.dcaptures_ranges = take_ranges(kernel);
    scratch.dcaptures_mask = take_mask(kernel, false);
    const int64_t copied = capture_copies(buffers.dcaptures_elements) * buffers.dcaptures_elements;
    if (is_exact) {
      scratch.largest = carver.take<unsigned>(kMaxCaptures);
      scratch.whole_sums = carver.take<unsigned long long>(copied);
    } else if (copied > buffers.dcaptures_elements) {
      scratch.capture_copies = carver.take<float>(copied);
    }
  }
  scratch.bytes = carver.used();
  return scratch;
}

BackwardParams backward_params(const Problem& problem, const BackwardBuffers& buffers, const Kernel& kernel,
                               const Scratch& scratch) {
  BackwardParams params{};
  params.problem = problem_params(problem, kernel);
  JATTN_REQUIRE(problem.head_dim_v <= kernel.config().head_dim_v, "head_dim_v ", problem.head_dim_v,
                " exceeds that of kernel ", kernel.text);
  params.dout = buffers.dout;
  params.lse_log2 = scratch.lse_log2;
  params.delta = scratch.delta;
  params.dq = buffers.dq;
  params.dk = buffers.dk;
  params.dv = buffers.dv;
  params.dq_accumulator = scratch.dq_accumulator;
  params.rows_padded = static_cast<int32_t>(scratch.rows_padded);
  params.slices = kernel.config().grad_slices;
  return params;
}

void launch_row_delta(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernels& kernels,
                      const Scratch& scratch, CUstream stream) {
  const Kernel& kernel = require_family(plan, "row_delta");
  require_element(kernel, problem.dtype);
  RowDeltaParams params{};
  params.out = buffers.out;
  params.dout = buffers.dout;
  params.lse = static_cast<const float*>(buffers.lse);
  params.dlse = static_cast<const float*>(buffers.dlse);
  params.q_lengths = problem.q_lengths;
  params.lse_log2 = scratch.lse_log2;
  params.delta = scratch.delta;
  params.dq_accumulator = scratch.dq_accumulator;
  params.rows_padded = static_cast<int32_t>(scratch.rows_padded);
  params.accumulator_width = kernels.fused != nullptr ? kernels.fused->config().head_dim : 0;
  params.q_len = static_cast<int32_t>(problem.q_len);
  params.num_heads = static_cast<int32_t>(problem.num_heads);
  params.head_dim_v = static_cast<int32_t>(problem.head_dim_v);
  launch(kernel,
         {.grid = {.x = problem.batch * problem.num_heads * (scratch.rows_padded / kRowPadding)},
          .num_threads = row_delta_threads(kernel.config())},
         &params, stream);
}

// dk and dv; in the fused form dq's accumulator too.
void launch_keys(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernel& kernel,
                 bool fused, const Scratch& scratch, CUstream stream) {
  const Config& config = kernel.config();
  BackwardParams params = backward_params(problem, buffers, kernel, scratch);
  launch_tile_ranges(problem, plan, config, scratch.key_ranges, params.problem, stream);
  if (config.mask) {
    params.mask = launch_mask_tiles(problem, plan, mask_tiling(config, true), scratch.key_mask, stream);
  }
  params.tiles = static_cast<int32_t>(ceil_div(problem.kv_len, config.tile_kv));
  params.section_heads = 1;
  launch(kernel,
         {.grid = {.x = problem.batch * problem.num_kv_heads * params.tiles * params.slices},
          .num_threads = sm80::backward_threads(config),
          .shared_bytes = sm80::backward_shared_bytes(config, fused)},
         &params, stream);
}

void launch_cast_grad(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernel& fused,
                      const Scratch& scratch, CUstream stream) {
  const Kernel& kernel = require_family(plan, "cast_grad");
  const Config& config = kernel.config();
  const Config& made_by = fused.config();
  JATTN_REQUIRE(config.element == made_by.element && config.head_dim == made_by.head_dim &&
                    config.tile_q == made_by.tile_q && config.num_warps == made_by.num_warps &&
                    config.grad_slices == made_by.grad_slices,
                "kernels ", kernel.text, " and ", fused.text, " do not agree on the order of dq");
  CastGradParams params{};
  params.dq_accumulator = scratch.dq_accumulator;
  params.q_lengths = problem.q_lengths;
  params.dq = buffers.dq;
  params.rows_padded = static_cast<int32_t>(scratch.rows_padded);
  params.q_len = static_cast<int32_t>(problem.q_len);
  params.num_heads = static_cast<int32_t>(problem.num_heads);
  params.head_dim = static_cast<int32_t>(problem.head_dim);
  params.scale = static_cast<float>(problem.scale);
  launch(
      kernel,
      {.grid = {.x = problem.batch * problem.num_heads * ceil_div(problem.q_len, config.tile_q) * config.grad_slices},
       .num_threads = cast_grad_threads(config),
       .shared_bytes = cast_grad_shared_bytes(config)},
      &params, stream);
}

void launch_dq(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernel& kernel,
               const Scratch& scratch, CUstream stream) {
  const Config& config = kernel.config();
  BackwardParams params = backward_params(problem, buffers, kernel, scratch);
  launch_tile_ranges(problem, plan, config, scratch.query_ranges, params.problem, stream);
  if (config.mask) {
    params.mask = launch_mask_tiles(problem, plan, mask_tiling(config, false), scratch.query_mask, stream);
  }
  params.tiles = static_cast<int32_t>(ceil_div(problem.q_len, config.tile_q));
  params.section_heads = section_heads(problem, config);
  launch(kernel,
         {.grid = {.x = problem.batch * problem.num_heads * params.tiles * params.slices},
          .num_threads = sm80::backward_dq_threads(config),
          .shared_bytes = sm80::backward_dq_shared_bytes(config)},
         &params, stream);
}

void launch_dbias(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernel& kernel,
                  const Scratch& scratch, CUstream stream) {
  const Config& config = kernel.config();
  DbiasParams params{};
  params.backward = backward_params(problem, buffers, kernel, scratch);
  launch_tile_ranges(problem, plan, config, scratch.dbias_ranges, params.backward.problem, stream);
  if (config.mask) {
    params.backward.mask = launch_mask_tiles(problem, plan, mask_tiling(config, false), scratch.dbias_mask, stream);
  }
  const Launch block{.grid = {},
                     .num_threads = sm80::backward_dbias_threads(config),
                     .shared_bytes = sm80::backward_dbias_shared_bytes(config)};
  launch_dbias_tiles(problem, buffers, plan, kernel, dbias_shape(problem, config, kWantedBlocks), scratch.partials,
                     params, block, stream);
}

void launch_dslopes(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernel& kernel,
                    const Scratch& scratch, CUstream stream) {
  const Config& config = kernel.config();
  SlopesParams params{};
  params.backward = backward_params(problem, buffers, kernel, scratch);
  launch_tile_ranges(problem, plan, config, scratch.dslopes_ranges, params.backward.problem, stream);
  if (config.mask) {
    params.backward.mask = launch_mask_tiles(problem, plan, mask_tiling(config, false), scratch.dslopes_mask, stream);
  }
  params.backward.tiles = static_cast<int32_t>(ceil_div(problem.q_len, config.tile_q));
  JATTN_REQUIRE(buffers.dslopes_parts == params.backward.tiles, "dslopes has ", buffers.dslopes_parts,
                " parts, kernel ", kernel.text, " makes ", params.backward.tiles);
  params.backward.section_heads = section_heads(problem, config);
  params.dslopes = static_cast<float*>(buffers.dslopes);
  launch(kernel,
         {.grid = {.x = problem.batch * problem.num_heads * params.backward.tiles},
          .num_threads = sm80::backward_dq_threads(config),
          .shared_bytes = sm80::backward_dq_shared_bytes(config)},
         &params, stream);
}

// Gradients of captures: floats added up in memory, or, in the exact form, whole numbers after a run that finds their
// unit; in copies, then together.
void launch_dcaptures(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernels& kernels,
                      const Scratch& scratch, CUstream stream) {
  const bool is_exact = kernels.dcaptures_exact != nullptr;
  const Kernel& kernel = is_exact ? *kernels.dcaptures_exact : *kernels.dcaptures;
  const Config& config = kernel.config();
  CapturesParams params{};
  params.backward = backward_params(problem, buffers, kernel, scratch);
  launch_tile_ranges(problem, plan, config, scratch.dcaptures_ranges, params.backward.problem, stream);
  if (config.mask) {
    params.backward.mask = launch_mask_tiles(problem, plan, mask_tiling(config, false), scratch.dcaptures_mask, stream);
  }
  params.backward.tiles = static_cast<int32_t>(ceil_div(problem.q_len, config.tile_q));
  params.backward.section_heads = section_heads(problem, config);
  const int64_t elements = buffers.dcaptures_elements;
  params.copies = static_cast<int32_t>(capture_copies(elements));
  params.elements = elements;
  auto* const gradients = static_cast<float*>(buffers.dcaptures);
  params.sums = scratch.capture_copies != nullptr ? scratch.capture_copies : gradients;
  params.whole_sums = scratch.whole_sums;
  params.largest = scratch.largest;
  const auto pairs = static_cast<uint64_t>(problem.batch * problem.num_heads * problem.q_len);
  params.pairs_log2 =
      static_cast<int32_t>(std::bit_width(pairs) + std::bit_width(static_cast<uint64_t>(problem.kv_len)));
  const Launch shape{.grid = {.x = problem.batch * problem.num_heads * params.backward.tiles},
                     .num_threads = sm80::backward_dq_threads(config),
                     .shared_bytes = sm80::backward_dq_shared_bytes(config)};
  if (is_exact) {
    fill_zero(scratch.largest, kMaxCaptures * 4, stream);
    fill_zero(scratch.whole_sums, params.copies * elements * 8, stream);
    JATTN_REQUIRE(kernels.dcaptures_sizes->config().tile_q == config.tile_q &&
                      kernels.dcaptures_sizes->config().num_warps == config.num_warps,
                  "kernels ", kernels.dcaptures_sizes->text, " and ", kernel.text, " do not agree on their blocks");
    launch(*kernels.dcaptures_sizes, shape, &params, stream);
  } else {
    fill_zero(params.sums, params.copies * elements * 4, stream);
  }
  launch(kernel, shape, &params, stream);
  if (params.sums == gradients && !is_exact) return;
  const Kernel& sums = require_family(plan, "capture_sums");
  const CaptureSumsParams last{.sums = params.sums,
                               .whole_sums = params.whole_sums,
                               .largest = params.largest,
                               .gradients = gradients,
                               .elements = elements,
                               .copies = params.copies,
                               .pairs_log2 = params.pairs_log2};
  const int threads = capture_sums_threads(sums.config());
  launch(sums, {.grid = {.x = ceil_div(elements, threads)}, .num_threads = threads}, &last, stream);
}

}  // namespace

int64_t backward_scratch_bytes(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan) {
  return carve(problem, buffers, find_kernels(plan), nullptr).bytes;
}

void backward(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, void* scratch_base,
              CUstream stream) {
  if (problem.batch == 0 || problem.num_heads == 0 || problem.q_len == 0 || problem.kv_len == 0) {
    clear_gradients(problem, buffers, stream);
    return;
  }
  require_extents(problem);
  const Kernels kernels = find_kernels(plan);
  const Scratch scratch = carve(problem, buffers, kernels, scratch_base);
  const bool wants_keys = buffers.dk != nullptr || buffers.dv != nullptr;
  JATTN_REQUIRE(buffers.dq == nullptr || kernels.fused != nullptr || kernels.dq != nullptr,
                "dq is wanted, but the plan has no kernel for it");
  JATTN_REQUIRE(!wants_keys || kernels.fused != nullptr || kernels.dkv != nullptr,
                "dk or dv is wanted, but the plan has no kernel for it");
  JATTN_REQUIRE(buffers.dbias == nullptr || kernels.dbias != nullptr,
                "dbias is wanted, but the plan has no kernel for it");
  JATTN_REQUIRE(buffers.dslopes == nullptr || kernels.dslopes != nullptr,
                "dslopes is wanted, but the plan has no kernel for it");
  JATTN_REQUIRE(buffers.dcaptures == nullptr || kernels.dcaptures != nullptr || kernels.dcaptures_exact != nullptr,
                "dcaptures is wanted, but the plan has no kernel for it");

  launch_row_delta(problem, buffers, plan, kernels, scratch, stream);
  if (kernels.fused != nullptr) {
    launch_keys(problem, buffers, plan, *kernels.fused, true, scratch, stream);
    if (buffers.dq != nullptr) launch_cast_grad(problem, buffers, plan, *kernels.fused, scratch, stream);
  } else {
    if (wants_keys) launch_keys(problem, buffers, plan, *kernels.dkv, false, scratch, stream);
    if (buffers.dq != nullptr) launch_dq(problem, buffers, plan, *kernels.dq, scratch, stream);
  }
  if (buffers.dbias != nullptr) launch_dbias(problem, buffers, plan, *kernels.dbias, scratch, stream);
  if (buffers.dslopes != nullptr) launch_dslopes(problem, buffers, plan, *kernels.dslopes, scratch, stream);
  if (buffers.dcaptures != nullptr) launch_dcaptures(problem, buffers, plan, kernels, scratch, stream);
}

}  // namespace jattn::cuda
