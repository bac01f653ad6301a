#include "cuda/backward_sm90.h"

#include <algorithm>
#include <limits>

#include "core/require.h"
#include "cuda/attention_params.h"
#include "cuda/launch.h"
#include "cuda/tile_map.h"
#include "kernels/sm90/backward_params.cuh"
#include "kernels/sm90/backward_shape.cuh"

namespace jattn::cuda {
namespace {

// The kernels of a plan by role; null where the plan has none.
struct Kernels {
  const Kernel* fused;
  const Kernel* dkv;
  const Kernel* dq;

  // The one that owns keys.
  const Kernel* keys() const { return fused != nullptr ? fused : dkv; }
};

Kernels find_kernels(const Plan& plan) {
  return {find_family(plan, "sm90_backward"), find_family(plan, "sm90_backward_dkv"),
          find_family(plan, "sm90_backward_dq")};
}

// The parts of the scratch buffer. Without a buffer the addresses mean nothing, but `bytes` does.
struct Scratch {
  int64_t rows_padded = 0;
  float* lse_log2 = nullptr;
  float* delta = nullptr;
  uint8_t* row_flags = nullptr;
  float* dq_accumulator = nullptr;
  int32_t* heads_zeroed = nullptr;
  void* key_ranges = nullptr;    // for the kernel that owns keys
  void* query_ranges = nullptr;  // for the one that owns queries
  int64_t bytes = 0;
};

Scratch carve(const Problem& problem, const Kernels& kernels, void* base) {
  Scratch scratch;
  const auto take = [&](int64_t bytes) -> void* {
    void* part = base == nullptr ? nullptr : static_cast<unsigned char*>(base) + scratch.bytes;
    scratch.bytes += round_up(bytes, kScratchAlignment);
    return part;
  };
  scratch.rows_padded = round_up(problem.q_len, sm90::kStatisticsRows);
  const int64_t rows = problem.batch * problem.num_heads * scratch.rows_padded;
  scratch.lse_log2 = static_cast<float*>(take(rows * int64_t{sizeof(float)}));
  scratch.delta = static_cast<float*>(take(rows * int64_t{sizeof(float)}));
  scratch.row_flags = static_cast<uint8_t*>(take(rows / sm90::kStatisticsRows));
  if (kernels.fused != nullptr) {
    scratch.dq_accumulator =
        static_cast<float*>(take(rows * kernels.fused->config().head_dim * int64_t{sizeof(float)}));
    scratch.heads_zeroed = static_cast<int32_t*>(take(problem.batch * problem.num_kv_heads * int64_t{sizeof(int32_t)}));
  }
  if (kernels.keys() != nullptr) scratch.key_ranges = take(segment_ranges_bytes(problem, kernels.keys()->config()));
  if (kernels.dq != nullptr) scratch.query_ranges = take(segment_ranges_bytes(problem, kernels.dq->config()));
  return scratch;
}

// Key/value heads whose tiles are handed out together. Where tiles differ in work, as many as keep what their blocks read
// within a quarter of the L2 cache; else one.
int64_t kv_heads_of_section(const Problem& problem, const Config& config) {
  if (!config.band && !config.lengths && !config.segments) return 1;
  constexpr int64_t kSectionBytes = int64_t{16} << 20;
  const int64_t rows = problem.q_len * problem.group_size() + problem.kv_len;
  const int64_t bytes = rows * (problem.head_dim + problem.head_dim_v) * size_bytes(problem.dtype);
  return std::clamp<int64_t>(kSectionBytes / std::max<int64_t>(1, bytes), 1, problem.batch * problem.num_kv_heads);
}

// Whether the fused kernel zeroes the accumulator of later heads beside its products; else all of it is zeroed before.
constexpr bool kZeroesBesideProducts = false;

// Key/value heads whose accumulator is zeroed before the fused kernel starts. If it zeroes the others itself: so many that
// its blocks hardly ever wait for earlier ones.
int64_t heads_zeroed_before(const Problem& problem, const Config& config, int64_t sm_count) {
  const int64_t heads = problem.batch * problem.num_kv_heads;
  if (!kZeroesBesideProducts) return heads;
  const int64_t tiles = ceil_div(problem.kv_len, config.tile_kv);
  return std::min(heads, std::max(kv_heads_of_section(problem, config), ceil_div(2 * sm_count, tiles)));
}

void launch_prepare(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernels& kernels,
                    const Scratch& scratch, CUstream stream) {
  const Kernel& kernel = require_family(plan, "backward_prepare");
  const Config& config = kernel.config();
  JATTN_REQUIRE(problem.head_dim_v <= config.head_dim_v, "head_dim_v ", problem.head_dim_v, " exceeds that of kernel ",
                kernel.text);
  const int64_t zeroed_heads =
      kernels.fused == nullptr
          ? 0
          : heads_zeroed_before(problem, kernels.fused->config(), device_facts(plan.device_ordinal).sm_count);
  const sm90::PrepareParams params{
      .out = buffers.out,
      .dout = buffers.dout,
      .lse = static_cast<const float*>(buffers.lse),
      .dlse = static_cast<const float*>(buffers.dlse),
      .q_lengths = problem.q_lengths,
      .lse_log2 = scratch.lse_log2,
      .delta = scratch.delta,
      .row_flags = scratch.row_flags,
      .dq_accumulator = scratch.dq_accumulator,
      .heads_zeroed = scratch.heads_zeroed,
      .zeroed_rows = zeroed_heads * problem.group_size() * scratch.rows_padded,
      .rows_padded = scratch.rows_padded,
      .accumulator_width = kernels.fused != nullptr ? kernels.fused->config().head_dim : 0,
      .q_len = static_cast<int32_t>(problem.q_len),
      .num_heads = static_cast<int32_t>(problem.num_heads),
      .head_dim_v = static_cast<int32_t>(problem.head_dim_v),
      .kv_heads = static_cast<int32_t>(problem.batch * problem.num_kv_heads),
  };
  launch(kernel,
         {.grid = {.x = problem.batch * problem.num_heads * (scratch.rows_padded / sm90::kStatisticsRows)},
          .num_threads = sm90::prepare_threads(config)},
         &params, stream);
}

sm90::BackwardParams backward_params(const Problem& problem, const BackwardBuffers& buffers, const Kernel& kernel,
                                     const Scratch& scratch) {
  const Config& config = kernel.config();
  sm90::BackwardParams params{};
  params.problem = problem_params(problem, kernel);
  JATTN_REQUIRE(problem.head_dim_v <= config.head_dim_v, "head_dim_v ", problem.head_dim_v, " exceeds that of kernel ",
                kernel.text);
  JATTN_REQUIRE(!params.problem.scale_first || config.scale_first || config.softcap, "scale is ", problem.scale,
                ", but kernel ", kernel.text, " was made for positive scales");
  const auto map = [&](const void* address, int64_t rows, int64_t heads, int64_t columns, int64_t box_rows) {
    return tile_map(address, problem.dtype, problem.batch, rows, heads, columns, box_rows);
  };
  params.q = map(problem.q, problem.q_len, problem.num_heads, problem.head_dim, config.tile_q);
  params.k = map(problem.k, problem.kv_len, problem.num_kv_heads, problem.head_dim, config.tile_kv);
  params.v = map(problem.v, problem.kv_len, problem.num_kv_heads, problem.head_dim_v, config.tile_kv);
  params.dout = map(buffers.dout, problem.q_len, problem.num_heads, problem.head_dim_v, config.tile_q);
  params.lse_log2 = scratch.lse_log2;
  params.delta = scratch.delta;
  params.row_flags = scratch.row_flags;
  params.dq_accumulator = scratch.dq_accumulator;
  params.rows_padded = scratch.rows_padded;
  return params;
}

// dk and dv; in the fused form dq's accumulator too.
void launch_keys(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernel& kernel,
                 bool fused, const Scratch& scratch, CUstream stream) {
  const Config& config = kernel.config();
  sm90::BackwardParams params = backward_params(problem, buffers, kernel, scratch);
  launch_segment_ranges(problem, plan, config, scratch.key_ranges, params.problem, stream);
  params.wants_dk = buffers.dk != nullptr;
  params.wants_dv = buffers.dv != nullptr;
  if (params.wants_dk) {
    params.dk = tile_map(buffers.dk, problem.dtype, problem.batch, problem.kv_len, problem.num_kv_heads,
                         problem.head_dim, sm90::kWarpgroupRows);
  }
  if (params.wants_dv) {
    params.dv = tile_map(buffers.dv, problem.dtype, problem.batch, problem.kv_len, problem.num_kv_heads,
                         problem.head_dim_v, sm90::kWarpgroupRows);
  }
  params.tiles = static_cast<int32_t>(ceil_div(problem.kv_len, config.tile_kv));
  params.section_heads = static_cast<int32_t>(kv_heads_of_section(problem, config));
  if (fused && kZeroesBesideProducts) {
    constexpr int64_t kQuad = 4;
    const int64_t head_floats = problem.group_size() * scratch.rows_padded * config.head_dim;
    const int64_t share = round_up(ceil_div(head_floats, params.tiles), kQuad);
    JATTN_REQUIRE(share <= std::numeric_limits<int32_t>::max(),
                  "q_len * num_heads / num_kv_heads is too large for kv_len ", problem.kv_len);
    params.heads_zeroed = scratch.heads_zeroed;
    params.zero_ahead =
        static_cast<int32_t>(heads_zeroed_before(problem, config, device_facts(plan.device_ordinal).sm_count));
    params.zero_floats = static_cast<int32_t>(share);
  }
  launch(kernel,
         {.grid = {.x = problem.batch * problem.num_kv_heads * params.tiles},
          .num_threads = sm90::backward_threads(config),
          .shared_bytes = sm90::backward_shared_bytes(config, fused)},
         &params, stream);
}

void launch_cast(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernel& fused,
                 const Scratch& scratch, CUstream stream) {
  const Kernel& kernel = require_family(plan, "backward_cast");
  const Config& config = kernel.config();
  const Config& made_by = fused.config();
  JATTN_REQUIRE(
      config.element == made_by.element && config.head_dim == made_by.head_dim && config.tile_q == made_by.tile_q,
      "kernels ", kernel.text, " and ", fused.text, " do not agree on the order of dq");
  sm90::CastParams params{};
  params.dq = tile_map(buffers.dq, problem.dtype, problem.batch, problem.q_len, problem.num_heads, problem.head_dim,
                       config.tile_q);
  params.dq_accumulator = scratch.dq_accumulator;
  params.q_lengths = problem.q_lengths;
  params.rows_padded = scratch.rows_padded;
  params.tiles = static_cast<int32_t>(ceil_div(problem.q_len, config.tile_q));
  params.q_len = static_cast<int32_t>(problem.q_len);
  params.num_heads = static_cast<int32_t>(problem.num_heads);
  params.scale = static_cast<float>(problem.scale);
  launch(kernel,
         {.grid = {.x = problem.batch * problem.num_heads * params.tiles},
          .num_threads = sm90::cast_threads(config),
          .shared_bytes = sm90::cast_shared_bytes(config)},
         &params, stream);
}

void launch_dq(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernel& kernel,
               const Scratch& scratch, CUstream stream) {
  const Config& config = kernel.config();
  sm90::BackwardParams params = backward_params(problem, buffers, kernel, scratch);
  launch_segment_ranges(problem, plan, config, scratch.query_ranges, params.problem, stream);
  params.dq = tile_map(buffers.dq, problem.dtype, problem.batch, problem.q_len, problem.num_heads, problem.head_dim,
                       sm90::kWarpgroupRows);
  params.tiles = static_cast<int32_t>(ceil_div(problem.q_len, config.tile_q));
  params.section_heads = static_cast<int32_t>(kv_heads_of_section(problem, config) * problem.group_size());
  launch(kernel,
         {.grid = {.x = problem.batch * problem.num_heads * params.tiles},
          .num_threads = sm90::backward_threads(config),
          .shared_bytes = sm90::backward_dq_shared_bytes(config)},
         &params, stream);
}

// Without queries or keys nothing depends on anything: all gradients are 0.
void clear_gradients(const Problem& problem, const BackwardBuffers& buffers, CUstream stream) {
  const int64_t bytes = size_bytes(problem.dtype);
  const int64_t q_rows = problem.batch * problem.q_len * problem.num_heads;
  const int64_t kv_rows = problem.batch * problem.kv_len * problem.num_kv_heads;
  if (buffers.dq != nullptr) fill_zero(buffers.dq, q_rows * problem.head_dim * bytes, stream);
  if (buffers.dk != nullptr) fill_zero(buffers.dk, kv_rows * problem.head_dim * bytes, stream);
  if (buffers.dv != nullptr) fill_zero(buffers.dv, kv_rows * problem.head_dim_v * bytes, stream);
}

}  // namespace

bool plans_backward_sm90(const Plan& plan) { return find_family(plan, "backward_prepare") != nullptr; }

int64_t backward_sm90_scratch_bytes(const Problem& problem, const BackwardBuffers&, const Plan& plan) {
  return carve(problem, find_kernels(plan), nullptr).bytes;
}

void backward_sm90(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, void* scratch_base,
                   CUstream stream) {
  JATTN_REQUIRE(buffers.dbias == nullptr, "dbias is wanted, but backend ", plan.backend, " has no kernel for it");
  if (problem.batch == 0 || problem.num_heads == 0 || problem.q_len == 0 || problem.kv_len == 0) {
    clear_gradients(problem, buffers, stream);
    return;
  }
  const Kernels kernels = find_kernels(plan);
  const bool wants_keys = buffers.dk != nullptr || buffers.dv != nullptr;
  JATTN_REQUIRE(buffers.dq == nullptr || kernels.fused != nullptr || kernels.dq != nullptr,
                "dq is wanted, but the plan has no kernel for it");
  JATTN_REQUIRE(!wants_keys || kernels.keys() != nullptr, "dk or dv is wanted, but the plan has no kernel for it");
  constexpr int64_t kMaxItems = std::numeric_limits<int32_t>::max();
  const int64_t rows = std::max(problem.num_heads * problem.q_len, problem.num_kv_heads * problem.kv_len);
  JATTN_REQUIRE(problem.batch * rows / sm90::kWarpgroupRows < kMaxItems, "batch * num_heads * length is ",
                problem.batch * rows, ", must be below 2^37");

  const Scratch scratch = carve(problem, kernels, scratch_base);
  launch_prepare(problem, buffers, plan, kernels, scratch, stream);
  if (kernels.fused != nullptr) {
    launch_keys(problem, buffers, plan, *kernels.fused, true, scratch, stream);
    if (buffers.dq != nullptr) launch_cast(problem, buffers, plan, *kernels.fused, scratch, stream);
    return;
  }
  if (wants_keys) launch_keys(problem, buffers, plan, *kernels.dkv, false, scratch, stream);
  if (buffers.dq != nullptr) launch_dq(problem, buffers, plan, *kernels.dq, scratch, stream);
}

}  // namespace jattn::cuda
