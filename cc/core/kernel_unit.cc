#include "core/kernel_unit.h"

#include <algorithm>
#include <iterator>

#include "core/program_store.h"
#include "core/require.h"

namespace jattn {
namespace {

constexpr KernelFamily kFamilies[] = {
    {"sm80_forward", "sm80/forward.cuh", "ForwardParams", "sm80::forward", "sm80::forward_threads",
     "sm80::forward_min_blocks"},
    {"sm80_backward", "sm80/backward.cuh", "BackwardParams", "sm80::backward", "sm80::backward_threads",
     "sm80::backward_min_blocks"},
    {"sm80_backward_dkv", "sm80/backward.cuh", "BackwardParams", "sm80::backward_dkv", "sm80::backward_threads",
     "sm80::backward_min_blocks"},
    {"sm80_backward_dq", "sm80/backward_dq.cuh", "BackwardParams", "sm80::backward_dq", "sm80::backward_dq_threads",
     "sm80::backward_dq_min_blocks"},
    {"sm80_backward_dbias", "sm80/backward_dbias.cuh", "DbiasParams", "sm80::backward_dbias",
     "sm80::backward_dbias_threads", "sm80::backward_dbias_min_blocks"},
    {"sm80_backward_dslopes", "sm80/backward_dslopes.cuh", "SlopesParams", "sm80::backward_dslopes",
     "sm80::backward_dq_threads", "sm80::backward_dq_min_blocks"},
    {"sm80_backward_dcaptures", "sm80/backward_dcaptures.cuh", "CapturesParams", "sm80::backward_dcaptures",
     "sm80::backward_dq_threads", "sm80::backward_dq_min_blocks"},
    {"sm80_backward_dcaptures_sizes", "sm80/backward_dcaptures.cuh", "CapturesParams", "sm80::backward_dcaptures_sizes",
     "sm80::backward_dq_threads", "sm80::backward_dq_min_blocks"},
    {"sm80_backward_dcaptures_exact", "sm80/backward_dcaptures.cuh", "CapturesParams", "sm80::backward_dcaptures_exact",
     "sm80::backward_dq_threads", "sm80::backward_dq_min_blocks"},
    {"sm90_forward", "sm90/forward.cuh", "sm90::ForwardParams", "sm90::forward", "sm90::forward_threads",
     "sm90::forward_min_blocks"},
    {"document_tiles", "sm90/document_tiles.cuh", "sm90::DocumentTilesParams", "sm90::document_tiles",
     "sm90::document_tiles_threads", "sm90::document_tiles_min_blocks"},
    {"forward_combine", "sm90/forward_combine.cuh", "sm90::CombineParams", "sm90::forward_combine",
     "sm90::combine_threads", "sm90::combine_min_blocks"},
    {"sm90_backward", "sm90/backward.cuh", "sm90::BackwardParams", "sm90::backward", "sm90::backward_threads",
     "sm90::backward_min_blocks"},
    {"sm90_backward_dkv", "sm90/backward.cuh", "sm90::BackwardParams", "sm90::backward_dkv", "sm90::backward_threads",
     "sm90::backward_min_blocks"},
    {"sm90_backward_dq", "sm90/backward_dq.cuh", "sm90::BackwardParams", "sm90::backward_dq", "sm90::backward_threads",
     "sm90::backward_min_blocks"},
    {"sm90_backward_dbias", "sm90/backward_dbias.cuh", "sm90::DbiasParams", "sm90::backward_dbias",
     "sm90::backward_threads", "sm90::backward_min_blocks"},
    {"backward_prepare", "sm90/backward_prepare.cuh", "sm90::PrepareParams", "sm90::backward_prepare",
     "sm90::prepare_threads", "sm90::prepare_min_blocks"},
    {"backward_sum", "sm90/backward_sum.cuh", "sm90::SumParams", "sm90::backward_sum", "sm90::sum_threads",
     "sm90::sum_min_blocks"},
    {"backward_cast", "sm90/backward_cast.cuh", "sm90::CastParams", "sm90::backward_cast", "sm90::cast_threads",
     "sm90::cast_min_blocks"},
    {"row_delta", "passes/row_delta.cuh", "RowDeltaParams", "row_delta", "row_delta_threads", "row_delta_min_blocks"},
    {"cast_grad", "passes/cast_grad.cuh", "CastGradParams", "cast_grad", "cast_grad_threads", "cast_grad_min_blocks"},
    {"segment_ranges", "passes/tile_ranges.cuh", "SegmentRangesParams", "segment_ranges", "segment_ranges_threads",
     "segment_ranges_min_blocks"},
    {"position_ranges", "passes/tile_ranges.cuh", "PositionRangesParams", "position_ranges", "position_ranges_threads",
     "position_ranges_min_blocks"},
    {"mask_tiles", "passes/mask_tiles.cuh", "MaskTilesParams", "mask_tiles", "mask_tiles_threads",
     "mask_tiles_min_blocks"},
    {"capture_sums", "passes/capture_sums.cuh", "CaptureSumsParams", "capture_sums", "capture_sums_threads",
     "capture_sums_min_blocks"},
    {"sum_partials", "passes/sum_partials.cuh", "SumPartialsParams", "sum_partials", "sum_partials_threads",
     "sum_partials_min_blocks"},
};

}  // namespace

std::span<const KernelFamily> kernel_families() { return kFamilies; }

const KernelFamily* find_kernel_family(std::string_view name) {
  const auto* family =
      std::ranges::find(kFamilies, name, [](const KernelFamily& f) { return std::string_view(f.name); });
  return family == std::end(kFamilies) ? nullptr : family;
}

std::string kernel_unit_text(const KernelKey& key) {
  const KernelFamily* family = find_kernel_family(key.family);
  JATTN_REQUIRE(family != nullptr, "kernel unit: there is no family ", key.family);
  std::string program;  // defined before the header, which has one of its own otherwise
  if (key.config.program) {
    program = concat("#define JATTN_SCORE_PROGRAM\n#include \"attn/program_math.cuh\"\n\nnamespace jattn {\n",
                     find_program(key.digest), "\n}\n\n");
  }
  return concat("// ", to_text(key), "\n", program, "#include \"", family->header, "\"\n\n",                  //
                "namespace jattn {\nconstexpr Config kConfig{", config_initializer(key.config), "};\n}\n\n",  //
                "extern \"C\" __global__ void __launch_bounds__(jattn::", family->num_threads,
                "(jattn::kConfig), jattn::", family->min_blocks, "(jattn::kConfig))\n", kKernelEntry,
                "(const __grid_constant__ jattn::", family->params, " params) {\n", "  jattn::", family->entry,
                "<jattn::kConfig>(params);\n}\n");
}

}  // namespace jattn
