#include "cuda/forward_sm90.h"

#include <algorithm>
#include <limits>

#include "core/require.h"
#include "cuda/attention_params.h"
#include "cuda/launch.h"
#include "cuda/tile_map.h"
#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shape.cuh"

namespace jattn::cuda {
namespace {

constexpr const char* kFamily = "sm90_forward";

// The values of Config::schedule.
constexpr int kOneBlockPerItem = 0;
constexpr int kByCounter = 2;

// Query heads whose tiles are handed out together. Where tiles differ in work, as many as make one wave of items: then the
// long items of all run at once and share keys and values in L2. Measured on H200, causal, head_dim 128, 8192 keys: half a
// wave 615, one 665, two 640, five 615 TFLOP/s. Else the tiles of one key/value head follow each other.
int32_t heads_of_section(const Problem& problem, const Config& config, int64_t tiles, int64_t num_sms) {
  const int64_t group = problem.group_size();
  if (!config.band && !config.lengths && !config.segments) return static_cast<int32_t>(group);
  const int64_t items = tiles * group;  // of one key/value head
  const int64_t kv_heads = std::max<int64_t>(1, (num_sms + items / 2) / items);
  return static_cast<int32_t>(std::min(problem.batch * problem.num_heads, kv_heads * group));
}

}  // namespace

int64_t forward_sm90_scratch_bytes(const Problem& problem, const Plan& plan) {
  const Config& config = require_family(plan, kFamily).config();
  const int64_t counter_bytes = config.schedule == kByCounter ? kScratchAlignment : 0;
  return counter_bytes + segment_ranges_bytes(problem, config);
}

void forward_sm90(const Problem& problem, const ForwardResults& results, const Plan& plan, void* scratch,
                  CUstream stream) {
  const Kernel& kernel = require_family(plan, kFamily);
  const Config& config = kernel.config();
  if (problem.batch == 0 || problem.q_len == 0 || problem.num_heads == 0) return;

  sm90::ForwardParams params{};
  params.problem = problem_params(problem, kernel);
  JATTN_REQUIRE(problem.head_dim_v <= config.head_dim_v, "head_dim_v ", problem.head_dim_v, " exceeds that of kernel ",
                kernel.text);
  JATTN_REQUIRE(!params.problem.scale_first || config.scale_first || config.softcap, "scale is ", problem.scale,
                ", but kernel ", kernel.text, " was made for positive scales");
  const int64_t items = problem.batch * problem.num_heads * ceil_div(problem.q_len, config.tile_q);
  JATTN_REQUIRE(items <= std::numeric_limits<int32_t>::max(), "batch * num_heads * tiles of ", config.tile_q,
                " queries is ", items, ", must be below 2^31");

  auto* bytes = static_cast<char*>(scratch);
  if (config.schedule == kByCounter) {
    params.next_item = reinterpret_cast<int32_t*>(bytes);
    fill_zero(params.next_item, sizeof(int32_t), stream);
    bytes += kScratchAlignment;
  }
  launch_segment_ranges(problem, plan, config, bytes, params.problem, stream);

  // Without keys every item is empty and no key is read, but a descriptor needs an extent: it describes q.
  const bool has_keys = problem.kv_len > 0;
  const int64_t kv_rows = std::max<int64_t>(1, problem.kv_len);
  const auto map = [&](const void* address, int64_t rows, int64_t heads, int64_t columns, int64_t box_rows) {
    return tile_map(address, problem.dtype, problem.batch, rows, heads, columns, box_rows);
  };
  params.q = map(problem.q, problem.q_len, problem.num_heads, problem.head_dim, config.tile_q);
  params.k = map(has_keys ? problem.k : problem.q, kv_rows, problem.num_kv_heads, problem.head_dim, config.tile_kv);
  params.v = map(has_keys ? problem.v : problem.q, kv_rows, problem.num_kv_heads, problem.head_dim_v, config.tile_kv);
  params.out = map(results.out, problem.q_len, problem.num_heads, problem.head_dim_v, sm90::kWarpgroupRows);
  params.lse = static_cast<float*>(results.lse);
  params.tiles = static_cast<int32_t>(ceil_div(problem.q_len, config.tile_q));
  params.items = static_cast<int32_t>(items);
  const int64_t num_sms = device_facts(plan.device_ordinal).sm_count;
  params.section_heads = heads_of_section(problem, config, params.tiles, num_sms);

  const int64_t blocks = config.schedule == kOneBlockPerItem ? items : std::min(items, num_sms);
  launch(kernel,
         {.grid = {.x = blocks},
          .num_threads = sm90::forward_threads(config),
          .shared_bytes = sm90::forward_shared_bytes(config)},
         &params, stream);
}

}  // namespace jattn::cuda
