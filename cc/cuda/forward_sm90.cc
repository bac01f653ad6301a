#include "cuda/forward_sm90.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "core/broadcast.h"
#include "core/require.h"
#include "cuda/attention_params.h"
#include "cuda/document_tiles.h"
#include "cuda/launch.h"
#include "cuda/mask_tiles.h"
#include "cuda/sections.h"
#include "cuda/tile_map.h"
#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shape.cuh"

namespace jattn::cuda {
namespace {

constexpr const char* kFamily = "sm90_forward";
constexpr const char* kCombineFamily = "forward_combine";

// One bias for several batch entries. They then run side by side, and its tiles come from L2.
bool shares_bias_over_batch(const Problem& problem, const Config& config) {
  return config.bias && !config.row_bias && problem.batch > 1 && problem.bias.stride_batch == 0;
}

// s * (factor[0] + factor[1] s^2 + factor[2] s^4), the last factor being positive.
sm90::SquaredCapSeries as_square(const sm90::CapSeries<3>& series) {
  if (!(series.limit > 0.0f)) return {};
  const double root = std::sqrt(static_cast<double>(series.factor[2]));
  const double shift = series.factor[1] / (2.0 * root);
  return {series.limit, static_cast<float>(root), static_cast<float>(shift),
          static_cast<float>(series.factor[0] - shift * shift)};
}

// Quarters of a wave of items whose heads are handed out together, but for the last ones. As measured: few heads take
// less of L2, but at long sequences and head dims above 64 more of them are faster (docs/kernels/log.md, "Sections").
int64_t quarter_waves_of_section(const Problem& problem, const Config& config) {
  if (config.head_dim_v <= 64) return 2;
  if (config.head_dim_v <= 128) return problem.kv_len <= 2048 ? 1 : 16;
  return problem.kv_len <= 1024 ? 2 : 4;
}

// Query heads whose tiles are handed out together (attn/schedule.cuh). Where tiles differ in work, the last section is
// the larger one: there are short items then for blocks that are done early. It has at least the heads whose keys and
// values fill half of L2, or make four waves of items. Else the tiles of one key/value head follow each other.
Sections sections_of(const Problem& problem, const Config& config, int64_t tiles, int64_t num_sms) {
  const int64_t group = problem.group_size(), heads = problem.batch * problem.num_heads;
  if (shares_bias_over_batch(problem, config)) {
    // Batch entries that read the same tiles of the bias at the same time: as many as make one wave.
    return {static_cast<int32_t>(std::clamp<int64_t>(num_sms / tiles, 1, problem.batch))};
  }
  if (!config.band && !config.lengths && !config.segments && !config.mask) return {static_cast<int32_t>(group)};
  constexpr int64_t kLastSectionBytes = int64_t{24} << 20;
  constexpr int64_t kLastSectionWaves = 4;
  const int64_t items = tiles * group;  // of one key/value head
  const int64_t bytes = problem.kv_len * (problem.head_dim + problem.head_dim_v) * size_bytes(problem.dtype);
  const int64_t section = heads_of_items(quarter_waves_of_section(problem, config) * num_sms / 4, items);
  const int64_t last =
      std::min(kLastSectionBytes / std::max<int64_t>(1, bytes), heads_of_items(kLastSectionWaves * num_sms, items));
  return sections_with_last(section * group, last * group, heads);
}

// Parts of the keys of each item, 1 if a block sees them all.
int64_t key_splits(const Plan& plan) {
  const Kernel* combine = find_family(plan, kCombineFamily);
  const bool partial = require_family(plan, kFamily).config().partial_results;
  JATTN_REQUIRE(partial == (combine != nullptr), "kernels that see parts of the keys and ", kCombineFamily,
                " go together");
  if (combine == nullptr) return 1;
  const int64_t splits = combine->config().key_splits;
  JATTN_REQUIRE(splits > 1, "kernel ", combine->text, " adds up ", splits, " parts, must be more than 1");
  return splits;
}

// How the queries of a problem are cut into tiles (sm90/rows.cuh).
struct QueryTiles {
  int64_t heads;           // of a batch entry, that have tiles of their own
  int64_t rows_per_query;  // a power of two; 1 but for packed heads
  int64_t queries;         // of a tile
  int64_t count;           // tiles of a head
};

QueryTiles query_tiles(const Problem& problem, const Kernel& kernel) {
  const Config& config = kernel.config();
  QueryTiles tiles{.heads = problem.num_heads, .rows_per_query = 1, .queries = config.tile_q, .count = 0};
  if (config.packed_heads) {
    require_extents(problem);
    const auto rows = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(problem.group_size())));
    JATTN_REQUIRE(config.tile_q % rows == 0, "groups of ", problem.group_size(),
                  " heads do not divide the tile of kernel ", kernel.text);
    JATTN_REQUIRE(problem.mask.data == nullptr || problem.mask.stride_head == 0, "kernel ", kernel.text,
                  " needs a mask that all heads share");
    JATTN_REQUIRE(!config.row_bias || problem.bias.stride_head == 0, "kernel ", kernel.text,
                  " needs a bias that all heads share");
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    JATTN_REQUIRE((problem.q_len + config.tile_q) * rows <= kMost && problem.batch * problem.q_len <= kMost, "batch ",
                  problem.batch, " with q_len ", problem.q_len, " is too much for kernel ", kernel.text);
    tiles = {.heads = problem.num_kv_heads, .rows_per_query = rows, .queries = config.tile_q / rows, .count = 0};
  }
  tiles.count = ceil_div(problem.q_len, tiles.queries);
  return tiles;
}

// The kernel's choices as the passes over its tiles are to see them.
Config config_of_passes(const Config& config, const QueryTiles& tiles) {
  Config changed = config;
  changed.tile_q = static_cast<int>(tiles.queries);
  return changed;
}

// Results of all parts: statistics of the rows, then rows of the output.
int64_t parts_bytes(const Problem& problem, const Plan& plan) {
  const int64_t splits = key_splits(plan);
  if (splits == 1) return 0;
  const int64_t rows = splits * problem.batch * problem.num_heads * problem.q_len;
  return rows * int64_t{sizeof(sm90::RowPart)} + rows * problem.head_dim_v * int64_t{sizeof(float)};
}

void launch_combine(const Problem& problem, const ForwardResults& results, const Plan& plan,
                    const sm90::ForwardParams& params, CUstream stream) {
  const Kernel& kernel = require_family(plan, kCombineFamily);
  require_element(kernel, problem.dtype);
  const bool has_sinks = problem.sinks.data != nullptr;
  JATTN_REQUIRE(kernel.config().sinks == has_sinks, "the problem ", has_sinks ? "has" : "has no",
                " sinks, other than kernel ", kernel.text);
  JATTN_REQUIRE(problem.head_dim_v % sm90::kCombineColumns == 0, "head_dim_v ", problem.head_dim_v,
                " is no multiple of ", sm90::kCombineColumns);
  const sm90::CombineParams combine{
      .partial_out = params.partial_out,
      .row_parts = params.row_parts,
      .out = results.out,
      .lse = static_cast<float*>(results.lse),
      .sinks = {problem.sinks.data, static_cast<int32_t>(problem.sinks.stride_batch),
                static_cast<int32_t>(problem.sinks.stride_head)},
      .rows = problem.batch * problem.num_heads * problem.q_len,
      .q_len = static_cast<int32_t>(problem.q_len),
      .num_heads = static_cast<int32_t>(problem.num_heads),
      .head_dim_v = static_cast<int32_t>(problem.head_dim_v),
  };
  const int64_t threads = combine.rows * (problem.head_dim_v / sm90::kCombineColumns);
  const int block = sm90::combine_threads(kernel.config());
  launch(kernel, {.grid = {.x = ceil_div(threads, block)}, .num_threads = block}, &combine, stream);
}

}  // namespace

bool uses_forward_sm90(const Plan& plan) { return find_family(plan, kFamily) != nullptr; }

int64_t forward_sm90_scratch_bytes(const Problem& problem, const Plan& plan) {
  const Kernel& kernel = require_family(plan, kFamily);
  const Config config = config_of_passes(kernel.config(), query_tiles(problem, kernel));
  const int64_t mask_bytes = config.mask ? mask_tiles_bytes(problem, mask_tiling(config, false)) : 0;
  return kScratchAlignment + tile_ranges_bytes(problem, config) + document_tiles_bytes(problem, config, false) +
         mask_bytes + parts_bytes(problem, plan);
}

void forward_sm90(const Problem& whole, const ForwardResults& results, const Plan& plan, void* scratch,
                  CUstream stream) {
  const Kernel& kernel = require_family(plan, kFamily);
  const Config& config = kernel.config();
  const int64_t splits = key_splits(plan);
  Problem problem = whole;
  if (splits > 1) problem.sinks.data = nullptr;  // a sink counts once, in the sum over the parts
  const QueryTiles tiles = query_tiles(problem, kernel);
  const Config passes = config_of_passes(config, tiles);
  if (problem.batch == 0 || problem.q_len == 0 || problem.num_heads == 0) return;

  sm90::ForwardParams params{};
  params.problem = problem_params(problem, kernel);
  JATTN_REQUIRE(problem.head_dim_v <= config.head_dim_v, "head_dim_v ", problem.head_dim_v, " exceeds that of kernel ",
                kernel.text);
  JATTN_REQUIRE(!params.problem.scale_first || config.scale_first || config.softcap, "scale is ", problem.scale,
                ", but kernel ", kernel.text, " was made for positive scales");
  const int64_t items = problem.batch * tiles.heads * tiles.count * splits;
  JATTN_REQUIRE(items <= std::numeric_limits<int32_t>::max(), "batch * heads * tiles of ", tiles.queries,
                " queries * parts of the keys is ", items, ", must be below 2^31");

  const int64_t num_sms = device_facts(plan.device_ordinal).sm_count;
  // How many tiles documents make is known to the device only, and may be more.
  const int64_t blocks = config.documents ? num_sms : std::min(items, num_sms);

  auto* bytes = static_cast<char*>(scratch);
  // Blocks that run the item they start with and no other count nothing. To clear a counter for them would make two
  // operations on the stream of a small call's one.
  if (config.documents || items > blocks) {
    params.next_item = reinterpret_cast<int32_t*>(bytes);
    fill_zero(params.next_item, (config.documents ? sm90::kDocumentCounters : 1) * sizeof(int32_t), stream);
  }
  bytes += kScratchAlignment;
  void* ranges = bytes;
  launch_tile_ranges(problem, plan, passes, ranges, params.problem, stream);
  bytes += tile_ranges_bytes(problem, passes);
  if (config.documents) {
    params.documents = launch_document_tiles(problem, plan, config, false, ranges, bytes, params.next_item, {}, stream);
    bytes += document_tiles_bytes(problem, config, false);
  }
  if (config.mask && problem.kv_len > 0) {
    params.mask = launch_mask_tiles(problem, plan, mask_tiling(passes, false), bytes, stream);
  }

  if (splits > 1) {
    bytes = static_cast<char*>(scratch) + forward_sm90_scratch_bytes(problem, plan) - parts_bytes(problem, plan);
    params.row_parts = reinterpret_cast<sm90::RowPart*>(bytes);
    params.partial_out =
        reinterpret_cast<float*>(params.row_parts + splits * problem.batch * problem.num_heads * problem.q_len);
    params.key_splits = static_cast<int32_t>(splits);
  }

  // Without keys every item is empty and no key is read, but a descriptor needs an extent: it describes q.
  const bool has_keys = problem.kv_len > 0;
  const int64_t kv_rows = std::max<int64_t>(1, problem.kv_len);
  const auto map = [&](const void* address, int64_t rows, int64_t heads, int64_t columns, int64_t box_rows) {
    return tile_map(address, problem.dtype, problem.batch, rows, heads, columns, box_rows);
  };
  params.q = config.packed_heads ? packed_heads_map(problem, tiles.rows_per_query, tiles.queries)
                                 : map(problem.q, problem.q_len, problem.num_heads, problem.head_dim, config.tile_q);
  // A box has 128 bytes of a row. What L2 fetches beside them comes too early where keys are read once; at head dim 64
  // it is another head's. Measured on H200 with one query: head dim 64 7 %, 128 4 % (with a mask 8 %).
  const auto keys_map = [&](const void* address, int64_t columns) {
    return tile_map(has_keys ? address : problem.q, problem.dtype, problem.batch, kv_rows, problem.num_kv_heads,
                    columns, config.tile_kv, tiles.count == 1 ? L2Promotion::k128Bytes : L2Promotion::k256Bytes);
  };
  params.k = keys_map(problem.k, problem.head_dim);
  params.v = keys_map(problem.v, problem.head_dim_v);
  params.out = map(results.out, problem.q_len, problem.num_heads, problem.head_dim_v, sm90::kWarpgroupRows);
  params.rows_out = results.out;
  params.group_shift = std::countr_zero(static_cast<uint64_t>(tiles.rows_per_query));
  if (config.bias && config.staged_bias && has_keys) {
    params.bias = bias_map(problem, config.tile_q);
    const BroadcastShape bias = shape_of(problem.bias, problem);
    params.bias_heads = static_cast<int32_t>(bias.heads);
    params.bias_batch = static_cast<int32_t>(bias.batch);
  }
  if (config.row_bias) {
    JATTN_REQUIRE(problem.bias.stride_query == 0, "kernel ", kernel.text, " needs a bias without a query axis");
  }
  if (config.cap_series) {
    params.cap_series = sm90::cap_series(sm90::kCapSeriesLimit, sm90::kCapSeries, problem.scale, problem.softcap);
    params.short_cap_series =
        as_square(sm90::cap_series(sm90::kShortCapSeriesLimit, sm90::kShortCapSeries, problem.scale, problem.softcap));
    const double trusted_log2 = sm90::trusted_sum_log2(params.problem.softcap_log2);
    if (params.short_cap_series.limit > 0.0f && trusted_log2 > 0.0)
      params.trusted_sum = std::exp2(static_cast<float>(trusted_log2));
  }
  params.batch_fastest = shares_bias_over_batch(problem, config);
  params.lse = static_cast<float*>(results.lse);
  params.tiles = static_cast<int32_t>(tiles.count);
  params.items = static_cast<int32_t>(items);
  params.first_rows = static_cast<int32_t>(sm90::rows_of_first_tile(config, problem.q_len));
  Problem scheduled = problem;
  scheduled.num_heads = tiles.heads;
  const Sections sections = sections_of(scheduled, config, params.tiles, num_sms);
  params.section_heads = sections.heads;
  params.last_section = sections.last;
  launch(kernel,
         {.grid = {.x = blocks},
          .num_threads = sm90::forward_threads(config),
          .shared_bytes = sm90::forward_shared_bytes(config)},
         &params, stream);
  if (splits > 1) launch_combine(whole, results, plan, params, stream);
}

}  // namespace jattn::cuda
