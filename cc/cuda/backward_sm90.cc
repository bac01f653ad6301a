#include "cuda/backward_sm90.h"

#include <algorithm>
#include <limits>

#include "core/broadcast.h"
#include "core/require.h"
#include "cuda/attention_params.h"
#include "cuda/backward_dbias.h"
#include "cuda/document_tiles.h"
#include "cuda/ds_parts.h"
#include "cuda/launch.h"
#include "cuda/mask_tiles.h"
#include "cuda/scratch.h"
#include "cuda/sections.h"
#include "cuda/tile_map.h"
#include "kernels/passes/shape.cuh"
#include "kernels/sm90/backward_params.cuh"
#include "kernels/sm90/backward_shape.cuh"

namespace jattn::cuda {
namespace {

// The kernels of a plan by role; null where the plan has none.
struct Kernels {
  const Kernel* fused;
  const Kernel* dkv;
  const Kernel* dq;
  const Kernel* dbias;

  // The one that owns keys.
  const Kernel* keys() const { return fused != nullptr ? fused : dkv; }
};

Kernels find_kernels(const Plan& plan) {
  return {find_family(plan, "sm90_backward"), find_family(plan, "sm90_backward_dkv"),
          find_family(plan, "sm90_backward_dq"), find_family(plan, "sm90_backward_dbias")};
}

// Blocks of the kernel that adds dq up stay and take items by a counter.
bool takes_items(const Kernels& kernels) {
  return kernels.fused != nullptr && sm90::takes_items(kernels.fused->config());
}

bool has_senders(const Kernels& kernels) {
  return kernels.fused != nullptr && sm90::has_senders(kernels.fused->config());
}

bool takes_documents(const Kernels& kernels) { return kernels.fused != nullptr && kernels.fused->config().documents; }

// Tiles of queries of a head of dq_accumulator.
int64_t accumulator_tiles(const Problem& problem, const Kernels& kernels) {
  const int tile = kernels.fused->config().tile_q;
  return takes_documents(kernels) ? sm90::other_tiles_room(problem.q_len, tile) : ceil_div(problem.q_len, tile);
}

bool stores_ds(const Kernels& kernels) { return kernels.keys() != nullptr && kernels.keys()->config().stores_ds; }

bool sums_bias(const Kernels& kernels) { return kernels.keys() != nullptr && kernels.keys()->config().sums_bias; }

// Blocks that the kernel for dbias is given at least, if there is work for them: two for each multiprocessor of an
// H200.
constexpr int64_t kWantedDbiasBlocks = 264;

DsParts ds_parts(const Problem& problem) {
  return {problem.bias.stride_batch == 0, problem.batch, problem.num_kv_heads, problem.group_size(),
          problem.q_len * problem.kv_len * size_bytes(problem.dtype)};
}

// Of the places for stored gradients of scores.
int64_t ds_bytes(const Problem& problem, const DsParts& ds) {
  return ds.parts * ds.kv_heads * problem.group_size() * problem.q_len * problem.kv_len * size_bytes(problem.dtype);
}

// The parts of the scratch buffer. Without a buffer the addresses mean nothing, but `bytes` does.
struct Scratch {
  int64_t rows_padded = 0;
  float* lse_log2 = nullptr;
  float* delta = nullptr;
  uint8_t* row_flags = nullptr;
  float* dq_accumulator = nullptr;
  int32_t* next_item = nullptr;  // sm90::DocumentCounter, sm90::BackwardCounter
  int32_t* dq_turns = nullptr;   // sm90::BackwardParams
  void* documents = nullptr;
  sm90::TileRows* row_tiles = nullptr;  // sm90::OtherTiles
  void* key_ranges = nullptr;           // for the kernel that owns keys
  void* query_ranges = nullptr;         // for the one that owns queries
  void* dbias_ranges = nullptr;
  void* key_mask = nullptr;  // packed masks, likewise
  void* query_mask = nullptr;
  void* dbias_mask = nullptr;
  float* partials = nullptr;  // of dbias; sums of keys if the kernel that owns them makes these
  void* ds = nullptr;         // DsParts
  int64_t bytes = 0;
};

// Of a kernel whose blocks take items: DocumentCounter, BackwardCounter.
int64_t item_counters(const Problem& problem) { return sm90::kItemsDone + problem.batch * problem.num_kv_heads; }

Scratch carve(const Problem& problem, const BackwardBuffers& buffers, const Kernels& kernels, void* base) {
  Carver carver(base);
  Scratch scratch;
  scratch.rows_padded = round_up(problem.q_len, sm90::kStatisticsRows);
  if (takes_documents(kernels)) {
    const int64_t tiles = accumulator_tiles(problem, kernels);
    scratch.rows_padded = round_up(tiles * kernels.fused->config().tile_q, sm90::kStatisticsRows);
    scratch.row_tiles = carver.take<sm90::TileRows>(problem.batch * tiles);
  }
  const int64_t rows = problem.batch * problem.num_heads * scratch.rows_padded;
  scratch.lse_log2 = carver.take<float>(rows);
  scratch.delta = carver.take<float>(rows);
  scratch.row_flags = carver.take<uint8_t>(rows / sm90::kStatisticsRows);
  if (kernels.fused != nullptr) {
    scratch.dq_accumulator = carver.take<float>(rows * kernels.fused->config().head_dim);
  }
  if (takes_items(kernels)) {
    scratch.next_item = carver.take<int32_t>(item_counters(problem));
    scratch.documents = carver.take_bytes(document_tiles_bytes(problem, kernels.fused->config(), true));
  }
  if (has_senders(kernels)) {
    scratch.dq_turns = carver.take<int32_t>(rows / sm90::kDqTurnRows * sm90::kBackwardConsumers);
  }
  const auto take_tiles = [&](const Kernel* kernel, bool owns_keys, void*& ranges, void*& mask) {
    if (kernel == nullptr) return;
    const Config& config = kernel->config();
    ranges = carver.take_bytes(tile_ranges_bytes(problem, config));
    if (config.mask) mask = carver.take_bytes(mask_tiles_bytes(problem, mask_tiling(config, owns_keys)));
  };
  take_tiles(kernels.keys(), true, scratch.key_ranges, scratch.key_mask);
  take_tiles(kernels.dq, false, scratch.query_ranges, scratch.query_mask);
  if (stores_ds(kernels) && buffers.dbias != nullptr) {
    const DsParts ds = ds_parts(problem);
    scratch.ds = carver.take_bytes(ds.in_place ? 0 : ds_bytes(problem, ds));
  }
  if (sums_bias(kernels) && buffers.dbias != nullptr) {
    const int64_t sums = problem.batch * problem.num_kv_heads * problem.kv_len;
    scratch.partials = carver.take<float>(sums);
  }
  if (kernels.dbias != nullptr && buffers.dbias != nullptr) {
    take_tiles(kernels.dbias, false, scratch.dbias_ranges, scratch.dbias_mask);
    const DbiasShape shape = dbias_shape(problem, kernels.dbias->config(), kWantedDbiasBlocks);
    if (shape.splits > 1) scratch.partials = carver.take<float>(shape.splits * shape.elements());
  }
  scratch.bytes = carver.used();
  return scratch;
}

// Whether all heads of a group visit a tile of queries before the next, so that blocks at work together do so at the
// same tiles (docs/kernels/log-backward.md, "Groups that walk together"). That is for bands without a left end, since
// the queries of all key tiles end at the last one then, and where there is an item for every multiprocessor. Blocks
// that wait for each other gain by it only where items are long.
bool walks_groups(const Problem& problem, const Config& config, int64_t tiles, int sm_count) {
  constexpr int64_t kLongItem = 512;  // key tiles times heads of a group
  const bool ends_together = config.band && problem.band_left >= std::max(problem.q_len, problem.kv_len);
  const bool is_long = !sm90::orders_dq(config) || problem.group_size() * tiles >= kLongItem;
  return sm90::walks_groups(config) && problem.group_size() > 1 && ends_together && is_long &&
         problem.batch * problem.num_kv_heads * tiles >= sm_count;
}

// Key/value heads of one section; tiles: items of one. Where tiles differ in work and blocks take items, at head dims
// to 64 as many as make a wave of items, and three waves in the last section, but not where groups walk together:
// docs/kernels/log-backward.md, "Sections". Else as many as keep what their blocks read within a quarter of the L2
// cache, but at least one item for every multiprocessor, better two, the first of them long, the second short: a
// section ends no sooner than its heaviest item, which in a causal problem is twice the mean. Blocks of a head that
// wait for each other are of unequal length there: then as many heads as have only eight at work together. Elsewhere
// one.
Sections sections_of(const Problem& problem, const Config& config, int64_t tiles, int sm_count) {
  const bool uneven = config.band || config.lengths || config.segments || config.mask;
  if (!uneven && !sm90::orders_dq(config)) return {1};
  const int64_t heads = problem.batch * problem.num_kv_heads;
  const bool in_groups = walks_groups(problem, config, tiles, sm_count);
  if (config.head_dim <= 64 && sm90::takes_items(config) && !sm90::orders_dq(config) && !in_groups) {
    return sections_with_last(heads_of_items(sm_count, tiles), heads_of_items(int64_t{3} * sm_count, tiles), heads);
  }
  constexpr int64_t kSectionBytes = int64_t{16} << 20;
  const int64_t rows = problem.q_len * problem.group_size() + problem.kv_len;
  const int64_t bytes = rows * (problem.head_dim + problem.head_dim_v) * size_bytes(problem.dtype);
  const int64_t by_bytes = kSectionBytes / std::max<int64_t>(1, bytes);
  constexpr int64_t kWaitingBlocks = 8;
  const bool is_ordered = sm90::orders_dq(config) && !in_groups, waits = is_ordered && config.band;
  const int64_t at_work =
      waits ? std::max<int64_t>(1, sm_count / std::min(tiles, kWaitingBlocks)) : ceil_div(sm_count, tiles);
  const int64_t wanted = std::max(by_bytes, at_work);
  const int64_t ideal = is_ordered ? wanted : heads_of_items(int64_t{2} * sm_count, tiles);
  return {static_cast<int32_t>(full_sections(wanted, ideal, heads))};
}

// Whether the statistics of rows have the factor of dropout in them (has_scaled_statistics()), which no other kernel
// expects.
bool scales_statistics(const Kernels& kernels) {
  const bool scales = kernels.fused != nullptr && sm90::has_scaled_statistics(kernels.fused->config());
  JATTN_REQUIRE(!scales || (kernels.dq == nullptr && kernels.dbias == nullptr), "kernel ", kernels.fused->text,
                " goes with none that makes dq or dbias");
  return scales;
}

void launch_prepare(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernels& kernels,
                    const Scratch& scratch, CUstream stream) {
  const Kernel& kernel = require_family(plan, "backward_prepare");
  require_element(kernel, problem.dtype);
  const Config& config = kernel.config();
  JATTN_REQUIRE(problem.head_dim_v <= config.head_dim_v, "head_dim_v ", problem.head_dim_v, " exceeds that of kernel ",
                kernel.text);
  const sm90::PrepareParams params{
      .out = buffers.out,
      .dout = buffers.dout,
      .lse = static_cast<const float*>(buffers.lse),
      .dlse = static_cast<const float*>(buffers.dlse),
      .q_lengths = problem.q_lengths,
      .dropout_rate = scales_statistics(kernels) ? problem.dropout_rate.data : nullptr,
      .dropout_rate_stride = static_cast<int32_t>(problem.dropout_rate.stride_batch),
      .lse_log2 = scratch.lse_log2,
      .delta = scratch.delta,
      .row_flags = scratch.row_flags,
      .dq_accumulator = has_senders(kernels) ? nullptr : scratch.dq_accumulator,
      .next_item = scratch.next_item,
      .dq_turns = scratch.dq_turns,
      .rows_padded = scratch.rows_padded,
      .accumulator_width = kernels.fused != nullptr ? kernels.fused->config().head_dim : 0,
      .q_len = static_cast<int32_t>(problem.q_len),
      .num_heads = static_cast<int32_t>(problem.num_heads),
      .head_dim_v = static_cast<int32_t>(problem.head_dim_v),
      .counters = static_cast<int32_t>(item_counters(problem)),
  };
  launch(kernel,
         {.grid = {.x = problem.batch * problem.num_heads * (scratch.rows_padded / sm90::kStatisticsRows)},
          .num_threads = sm90::prepare_threads(config)},
         &params, stream);
}

// Ranges of tiles, packed mask, bias. Where sections matter, section_heads is set.
void add_tiles(const Problem& problem, const Plan& plan, const Config& config, bool owns_keys, void* ranges, void* mask,
               sm90::BackwardParams& params, CUstream stream) {
  launch_tile_ranges(problem, plan, config, ranges, params.problem, stream);
  if (config.mask) params.mask = launch_mask_tiles(problem, plan, mask_tiling(config, owns_keys), mask, stream);
  if (sm90::bias_tile_bytes(config) > 0) params.bias = bias_map(problem, config.tile_q);
  // Blocks at work at the same time then read the same tiles of a bias.
  params.batch_fastest = config.bias && problem.bias.stride_batch == 0 && problem.batch > 1;
  if (params.batch_fastest) {
    const int64_t heads = owns_keys ? problem.num_kv_heads : problem.num_heads;
    params.section_heads = heads_over_batch(params.section_heads, problem.batch, heads);
  }
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
  params.dq_turns = scratch.dq_turns;
  params.rows_padded = scratch.rows_padded;
  return params;
}

// Launches a kernel that stores gradients of scores, and makes dbias of them.
void launch_keys_and_dbias(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan,
                           const Kernel& kernel, const Launch& shape, const Scratch& scratch,
                           sm90::BackwardParams params, CUstream stream) {
  const Config& config = kernel.config();
  JATTN_REQUIRE(buffers.dbias != nullptr && problem.bias.stride_query != 0 && problem.bias.stride_key == 1, "kernel ",
                kernel.text, " makes dbias of a bias of queries and keys, which is not asked for");
  JATTN_REQUIRE(problem.bias.stride_head != 0 || problem.num_heads == 1, "kernel ", kernel.text,
                " makes dbias of a bias of heads, but heads share this one");
  const DsParts ds = ds_parts(problem);
  const int64_t area = problem.q_len * problem.kv_len, heads = ds.kv_heads * problem.group_size();
  void* const stored = ds.in_place ? buffers.dbias : scratch.ds;
  params.ds = score_map(stored, problem, ds.parts, heads, config.tile_q);
  if (params.batch_fastest) {  // of the batch entries of a launch
    params.section_heads = static_cast<int32_t>(params.section_heads / problem.batch * ds.parts);
  }
  // Tiles in which no pair is visible are not visited.
  const bool skips = config.band || config.lengths || config.segments || config.mask;
  for (int64_t first = 0; first < problem.num_kv_heads; first += ds.kv_heads) {
    if (skips) fill_zero(stored, ds_bytes(problem, ds), stream);
    const int64_t kv_heads = std::min(ds.kv_heads, problem.num_kv_heads - first);
    const int64_t first_head = first * problem.group_size();
    params.first_kv_head = static_cast<int32_t>(first);
    params.launched_kv_heads = static_cast<int32_t>(kv_heads);
    params.first_ds_head = static_cast<int32_t>(first_head);
    for (int64_t entry = 0; entry < problem.batch; entry += ds.parts) {
      const int64_t entries = std::min(ds.parts, problem.batch - entry);
      params.first_entry = static_cast<int32_t>(entry);
      params.launched_entries = static_cast<int32_t>(entries);
      params.adds_ds = entry > 0;
      const int64_t items = entries * kv_heads * params.tiles;
      Launch part = shape;
      part.grid.x = items;
      if (sm90::takes_items(config)) {
        params.items = static_cast<int32_t>(items);
        part.grid.x = std::min(items, shape.grid.x);
        if (first > 0 || entry > 0) fill_zero(params.next_item, sizeof(int32_t), stream);
      }
      launch(kernel, part, &params, stream);
    }
    if (ds.in_place) continue;

    const Kernel& sum = require_family(plan, "backward_sum");
    require_element(sum, problem.dtype);
    const sm90::SumParams sums{
        .parts = scratch.ds,
        .result = static_cast<char*>(buffers.dbias) + first_head * area * size_bytes(problem.dtype),
        .elements = kv_heads * problem.group_size() * area,
        .stride = heads * area,
        .count = static_cast<int32_t>(ds.parts)};
    const int threads = sm90::sum_threads(sum.config());
    launch(sum, {.grid = {.x = ceil_div(sums.elements, threads * sm90::kSumElements)}, .num_threads = threads}, &sums,
           stream);
  }
}

// Makes dbias of the sums of keys [B, K, S]: adds up the batch entries and heads that share the bias.
void launch_bias_sums(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernel& kernel,
                      const Scratch& scratch, CUstream stream) {
  const BroadcastTensor& bias = problem.bias;
  JATTN_REQUIRE(bias.stride_query == 0 && bias.stride_key != 0, "kernel ", kernel.text,
                " makes dbias of a bias of keys, but that of the problem has other axes");
  JATTN_REQUIRE(bias.stride_head == 0 || problem.group_size() == 1, "kernel ", kernel.text,
                " adds up dbias over the query heads of a key/value head, but each has a bias of its own");
  const int64_t entries = shape_of(bias, problem).batch;
  const int64_t heads = bias.stride_head != 0 ? problem.num_kv_heads : 1;
  const int64_t splits = problem.batch * problem.num_kv_heads / (entries * heads);
  sum_dbias(problem, buffers, plan, entries * heads * problem.kv_len, heads * problem.kv_len, splits, scratch.partials,
            stream);
}

// How many tiles of queries further on than the one before it a key tile begins. Blocks of a head begin at the queries
// of their own keys: at one tile, all would wait for the first part of its dq. Few that begin at a diagonal each are
// apart as they are.
int32_t rotation_of(const Config& config, int64_t tiles) {
  constexpr int64_t kFewTiles = 8;
  if (!sm90::has_senders(config) || sm90::orders_dq(config)) return 0;
  if (sm90::may_begin_late(config) && tiles <= kFewTiles) return 0;
  return config.tile_kv / config.tile_q;
}

// dk and dv; in the fused form dq's accumulator too.
void launch_keys(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernels& kernels,
                 const Scratch& scratch, CUstream stream) {
  const Kernel& kernel = *kernels.keys();
  const Config& config = kernel.config();
  sm90::BackwardParams params = backward_params(problem, buffers, kernel, scratch);
  JATTN_REQUIRE(!config.sums_bias || buffers.dbias != nullptr, "kernel ", kernel.text,
                " makes dbias, which is not asked for");
  params.key_sums = scratch.partials;
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
  const int sm_count = device_facts(plan.device_ordinal).sm_count;
  const Sections sections = sections_of(problem, config, params.tiles, sm_count);
  params.section_heads = sections.heads;
  params.last_section = sections.last;
  if (walks_groups(problem, config, params.tiles, sm_count)) {
    params.descending_tiles = static_cast<int32_t>(ceil_div(sm_count, sections.heads));
  } else {
    params.rotation = rotation_of(config, params.tiles);
  }
  add_tiles(problem, plan, config, true, scratch.key_ranges, scratch.key_mask, params, stream);
  Launch shape{.grid = {.x = problem.batch * problem.num_kv_heads * params.tiles},
               .num_threads = sm90::backward_threads(config),
               .shared_bytes = sm90::backward_shared_bytes(config, kernels.fused != nullptr)};
  if (sm90::takes_items(config)) {
    params.items = static_cast<int32_t>(shape.grid.x);
    params.next_item = scratch.next_item;
    params.rows_dq = buffers.dq;
    shape.grid.x = std::min<int64_t>(params.items, sm_count);
  }
  if (config.documents) {
    const sm90::OtherTiles queries{.tiles = scratch.row_tiles,
                                   .tile = config.tile_q,
                                   .room = static_cast<int32_t>(accumulator_tiles(problem, kernels))};
    params.documents = launch_document_tiles(problem, plan, config, true, scratch.key_ranges, scratch.documents,
                                             scratch.next_item, queries, stream);
    params.rows_dk = buffers.dk;
    params.rows_dv = buffers.dv;
    shape.grid.x = sm_count;  // how many items there are is known to the device only, and may be more
  }
  if (config.stores_ds) {
    launch_keys_and_dbias(problem, buffers, plan, kernel, shape, scratch, params, stream);
  } else {
    launch(kernel, shape, &params, stream);
  }
  if (config.sums_bias) launch_bias_sums(problem, buffers, plan, kernel, scratch, stream);
}

void launch_cast(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernels& kernels,
                 const Scratch& scratch, CUstream stream) {
  const Kernel& kernel = require_family(plan, "backward_cast");
  const Config& config = kernel.config();
  const Kernel& fused = *kernels.fused;
  const Config& made_by = fused.config();
  JATTN_REQUIRE(
      config.element == made_by.element && config.head_dim == made_by.head_dim && config.tile_q == made_by.tile_q,
      "kernels ", kernel.text, " and ", fused.text, " do not agree on the order of dq");
  sm90::CastParams params{};
  params.dq = tile_map(buffers.dq, problem.dtype, problem.batch, problem.q_len, problem.num_heads, problem.head_dim,
                       config.tile_q);
  params.dq_accumulator = scratch.dq_accumulator;
  params.dq_turns = scratch.dq_turns;
  params.q_lengths = problem.q_lengths;
  params.rows_padded = scratch.rows_padded;
  params.tiles = static_cast<int32_t>(accumulator_tiles(problem, kernels));
  params.q_len = static_cast<int32_t>(problem.q_len);
  params.num_heads = static_cast<int32_t>(problem.num_heads);
  params.scale = static_cast<float>(problem.scale);
  params.row_tiles = scratch.row_tiles;
  params.counters = scratch.next_item;
  params.rows_dq = buffers.dq;
  params.head_dim = static_cast<int32_t>(problem.head_dim);
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
  params.dq = tile_map(buffers.dq, problem.dtype, problem.batch, problem.q_len, problem.num_heads, problem.head_dim,
                       sm90::kWarpgroupRows);
  params.tiles = static_cast<int32_t>(ceil_div(problem.q_len, config.tile_q));
  const int64_t group = problem.group_size();
  const int sm_count = device_facts(plan.device_ordinal).sm_count;
  const Sections sections = sections_of(problem, config, params.tiles * group, sm_count);
  params.section_heads = static_cast<int32_t>(sections.heads * group);
  params.last_section = sections.last;
  add_tiles(problem, plan, config, false, scratch.query_ranges, scratch.query_mask, params, stream);
  launch(kernel,
         {.grid = {.x = problem.batch * problem.num_heads * params.tiles},
          .num_threads = sm90::backward_threads(config),
          .shared_bytes = sm90::backward_dq_shared_bytes(config)},
         &params, stream);
}

void launch_dbias(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, const Kernel& kernel,
                  const Scratch& scratch, CUstream stream) {
  const Config& config = kernel.config();
  sm90::DbiasParams params{};
  params.backward = backward_params(problem, buffers, kernel, scratch);
  add_tiles(problem, plan, config, false, scratch.dbias_ranges, scratch.dbias_mask, params.backward, stream);
  const Launch block{.grid = {},
                     .num_threads = sm90::backward_threads(config),
                     .shared_bytes = sm90::backward_dbias_shared_bytes(config)};
  launch_dbias_tiles(problem, buffers, plan, kernel, dbias_shape(problem, config, kWantedDbiasBlocks), scratch.partials,
                     params, block, stream);
}

}  // namespace

bool uses_backward_sm90(const Plan& plan) { return find_family(plan, "backward_prepare") != nullptr; }

int64_t backward_sm90_scratch_bytes(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan) {
  return carve(problem, buffers, find_kernels(plan), nullptr).bytes;
}

void backward_sm90(const Problem& problem, const BackwardBuffers& buffers, const Plan& plan, void* scratch_base,
                   CUstream stream) {
  if (problem.batch == 0 || problem.num_heads == 0 || problem.q_len == 0 || problem.kv_len == 0) {
    clear_gradients(problem, buffers, stream);
    return;
  }
  require_extents(problem);
  const Kernels kernels = find_kernels(plan);
  const bool wants_keys = buffers.dk != nullptr || buffers.dv != nullptr;
  JATTN_REQUIRE(buffers.dq == nullptr || kernels.fused != nullptr || kernels.dq != nullptr,
                "dq is wanted, but the plan has no kernel for it");
  JATTN_REQUIRE(!wants_keys || kernels.keys() != nullptr, "dk or dv is wanted, but the plan has no kernel for it");
  JATTN_REQUIRE(buffers.dbias == nullptr || kernels.dbias != nullptr || stores_ds(kernels) || sums_bias(kernels),
                "dbias is wanted, but the plan has no kernel for it");
  JATTN_REQUIRE(buffers.dslopes == nullptr && buffers.dcaptures == nullptr,
                "dslopes or dcaptures is wanted beside kernels for sm_90a, must be made by a call of their own");
  constexpr int64_t kMaxItems = std::numeric_limits<int32_t>::max();
  const int64_t rows = std::max(problem.num_heads * problem.q_len, problem.num_kv_heads * problem.kv_len);
  JATTN_REQUIRE(problem.batch * rows / sm90::kWarpgroupRows < kMaxItems, "batch * num_heads * length is ",
                problem.batch * rows, ", must be below 2^37");

  const Scratch scratch = carve(problem, buffers, kernels, scratch_base);
  launch_prepare(problem, buffers, plan, kernels, scratch, stream);
  if (kernels.fused != nullptr) {
    launch_keys(problem, buffers, plan, kernels, scratch, stream);
    if (buffers.dq != nullptr) launch_cast(problem, buffers, plan, kernels, scratch, stream);
  } else {
    if (wants_keys) launch_keys(problem, buffers, plan, kernels, scratch, stream);
    if (buffers.dq != nullptr) launch_dq(problem, buffers, plan, *kernels.dq, scratch, stream);
  }
  if (buffers.dbias != nullptr && kernels.dbias != nullptr)
    launch_dbias(problem, buffers, plan, *kernels.dbias, scratch, stream);
}

}  // namespace jattn::cuda
