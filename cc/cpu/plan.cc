#include "cpu/plan.h"

#include <algorithm>

#include "core/broadcast.h"

namespace jattn::cpu {
namespace {

// Enough tasks that 64 cores are busy, and that the last of them does not leave many idle.
constexpr int64_t kWantedTasks = 128;

// A split pays for a second pass over its results; with fewer keys than this it is not worth it.
constexpr int64_t kLeastSplitLen = 512;

// A page of memory holds rows of several heads. Where these follow each other on so many keys, pages are still mapped.
constexpr int64_t kMostKeysByRows = 1024;

// Packing writes and reads keys and values once more than each task doing it for itself.
constexpr int64_t kLeastReadersOfPacked = 3;

// A chunk of the backward pass reads K and V and writes dk and dv once.
constexpr int64_t kLeastChunkTiles = 4;

// What the parts of the gradients of captures may take. Each element of a part is cleared once and read once, which
// shall stay little beside the pairs.
constexpr int64_t kMostCaptureBytes = int64_t{128} << 20;
constexpr int64_t kLeastPairsOfElement = 2;

constexpr int64_t kAlignment = 64;

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }
int64_t round_up(int64_t value, int64_t unit) { return ceil_div(value, unit) * unit; }

int64_t accumulator_bytes(const Problem& problem) { return problem.dtype == DType::kF64 ? 8 : 4; }

// In how many parts tasks add up the gradients of captures. If there can be, some for the tiles of keys of each head
// and chunk, which then wait for one another alone; at least so many as keep the cores busy.
int64_t capture_parts(const BackwardPlan& plan, int64_t groups, int64_t pairs) {
  constexpr int64_t kLeastParts = 2;
  const int64_t by_bytes = kMostCaptureBytes / static_cast<int64_t>(sizeof(double)) / plan.capture_elements;
  const int64_t by_pairs = ceil_div(pairs, kLeastPairsOfElement * plan.capture_elements);
  const int64_t most = std::max<int64_t>(1, std::min(by_bytes, by_pairs));
  const int64_t units = groups * plan.num_chunks;
  if (most < units || units == 0) return most;
  const int64_t wanted = std::max(kLeastParts, ceil_div(kWantedTasks / 2, units));
  return units * std::min({most / units, wanted, plan.kv_tiles});
}

// Hands out consecutive aligned ranges.
struct Arena {
  int64_t size_bytes = 0;
  int64_t take(int64_t bytes) {
    const int64_t offset = size_bytes;
    size_bytes += round_up(bytes, kAlignment);
    return offset;
  }
};

ForwardPlan plan_panels(const Problem& problem, int64_t panel_rows, bool in_planes) {
  ForwardPlan plan{};
  const int64_t group = problem.num_kv_heads > 0 ? problem.group_size() : 0;
  const int64_t groups = problem.batch * problem.num_kv_heads;

  plan.queries = std::min(problem.q_len, panel_rows);
  plan.heads = plan.queries > 0 ? std::clamp<int64_t>(panel_rows / plan.queries, 1, std::max<int64_t>(1, group)) : 1;
  plan.query_blocks = plan.queries > 0 ? ceil_div(problem.q_len, plan.queries) : 0;
  plan.head_blocks = ceil_div(group, plan.heads);
  plan.last_queries_first = problem.band_right != kUnbounded;

  // The task that packs the first tile of a head takes its place; without keys there is none.
  plan.packs_first = problem.kv_len > 0 && plan.query_blocks * plan.head_blocks >= kLeastReadersOfPacked;
  plan.by_rows = !plan.packs_first && plan.queries * plan.heads <= kFewRows;

  const int64_t tasks = groups * plan.query_blocks * plan.head_blocks;
  plan.num_splits = 1;
  if (tasks > 0 && tasks < kWantedTasks / 2) {
    plan.num_splits =
        std::clamp<int64_t>(ceil_div(kWantedTasks, tasks), 1, std::max<int64_t>(1, problem.kv_len / kLeastSplitLen));
  }
  if (plan.by_rows) plan.num_splits = std::max(plan.num_splits, ceil_div(problem.kv_len, kMostKeysByRows));
  plan.split_len = std::max(kTile, round_up(ceil_div(problem.kv_len, plan.num_splits), kTile));
  plan.num_splits = std::max<int64_t>(1, ceil_div(problem.kv_len, plan.split_len));
  plan.num_tasks = tasks * plan.num_splits;

  plan.row_len = round_up(problem.head_dim, kRowUnit);
  plan.row_len_v = round_up(problem.head_dim_v, kRowUnit);
  plan.kv_tiles = ceil_div(problem.kv_len, kTile);
  Arena arena;
  const int64_t unit_bytes = accumulator_bytes(problem);
  // One more line holds a bit for each row of keys.
  const int64_t half_units = in_planes && problem.dtype == DType::kF32 ? 3 : 2;
  plan.key_tile_len = kTile * plan.row_len * half_units / 2 + kAlignment / unit_bytes;
  plan.value_tile_len = kTile * plan.row_len_v * half_units / 2;
  // A head of up to 1 MiB stays in a second-level cache, and packing it so costs more than it spares. Measured on a
  // Xeon with AVX-512, float32: at 2048 and 4096 keys 4 to 9 % less time (head dim 64 and 128), at 512 and 1024
  // 3 to 12 % more.
  constexpr int64_t kSmallHeadBytes = 1 << 20;
  plan.packs_micropanels =
      plan.packs_first && plan.kv_tiles * kTile * (plan.row_len + plan.row_len_v) * unit_bytes > kSmallHeadBytes;
  if (plan.packs_first) {
    plan.packed_keys_offset = arena.take(groups * plan.kv_tiles * plan.key_tile_len * unit_bytes);
    plan.packed_values_offset = arena.take(groups * plan.kv_tiles * plan.value_tile_len * unit_bytes);
    plan.not_finite_offset = arena.take(groups * plan.kv_tiles * static_cast<int64_t>(sizeof(uint64_t)));
  }
  plan.milestones_offset = arena.take((groups + 1) * static_cast<int64_t>(sizeof(int64_t)));
  plan.places_offset = arena.take(2 * groups * static_cast<int64_t>(sizeof(int64_t)));
  if (plan.num_splits > 1) {
    const int64_t rows = plan.num_splits * problem.batch * problem.num_heads * problem.q_len;
    plan.partial_out_offset = arena.take(rows * plan.row_len_v * unit_bytes);
    plan.partial_max_offset = arena.take(rows * unit_bytes);
    plan.partial_sum_offset = arena.take(rows * unit_bytes);
  }
  plan.scratch_bytes = arena.size_bytes;
  return plan;
}

}  // namespace

ForwardPlan plan_forward(const Problem& problem, bool in_planes) {
  const ForwardPlan wide = plan_panels(problem, kPanelRows[static_cast<int>(problem.dtype)], in_planes);
  if (problem.dtype != DType::kBF16) return wide;
  constexpr int64_t kNarrowRows = 32;
  const ForwardPlan narrow = plan_panels(problem, kNarrowRows, in_planes);
  const bool goes_in_runs = problem.softcap == 0 && problem.bias.data == nullptr && problem.mask.data == nullptr &&
                            problem.alibi_slopes.data == nullptr && problem.dropout_keys.data == nullptr &&
                            problem.program == nullptr && problem.scale != 0;
  ForwardPlan plan = goes_in_runs ? wide : narrow;
  plan.goes_in_runs = goes_in_runs && !plan.by_rows;
  // Asked for before any of these options is known.
  plan.scratch_bytes = std::max(wide.scratch_bytes, narrow.scratch_bytes);
  return plan;
}

BackwardPlan plan_backward(const Problem& problem, bool wants_dbias, bool in_planes, int64_t capture_elements) {
  BackwardPlan plan{};
  const int64_t groups = problem.batch * problem.num_kv_heads;
  const int64_t query_rows = problem.batch * problem.num_heads * problem.q_len;
  plan.query_tiles = ceil_div(problem.q_len, kTile);
  plan.kv_tiles = ceil_div(problem.kv_len, kTile);
  plan.row_len = round_up(problem.head_dim, kRowUnit);
  plan.row_len_v = round_up(problem.head_dim_v, kRowUnit);

  const int64_t tasks = groups * plan.kv_tiles;
  plan.num_chunks = 1;
  if (tasks > 0 && tasks < kWantedTasks / 2) {
    plan.num_chunks = std::clamp<int64_t>(ceil_div(kWantedTasks / 2, tasks), 1,
                                          std::max<int64_t>(1, plan.query_tiles / kLeastChunkTiles));
  }
  plan.chunk_tiles = std::max<int64_t>(1, ceil_div(plan.query_tiles, plan.num_chunks));
  plan.num_chunks = std::max<int64_t>(1, ceil_div(plan.query_tiles, plan.chunk_tiles));
  plan.num_tasks = tasks * plan.num_chunks;

  plan.chain_distance = groups * plan.num_chunks;
  if (wants_dbias) {
    plan.dbias_count = shape_of(problem.bias, problem).elements();
    plan.writes_dbias_once = plan.dbias_count == query_rows * problem.kv_len;
    const DType accumulator = problem.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    plan.sums_dbias_in_place = !plan.writes_dbias_once && problem.bias.dtype == accumulator;
    if (!plan.writes_dbias_once) plan.chain_distance = 1;
  }

  plan.capture_elements = capture_elements;
  if (capture_elements > 0) plan.capture_parts = capture_parts(plan, groups, query_rows * problem.kv_len);

  Arena arena;
  const int64_t unit_bytes = accumulator_bytes(problem);
  const int64_t query_tiles = problem.batch * problem.num_heads * plan.query_tiles;
  // Planes are kept as they are and transposed.
  const int64_t planes = problem.dtype == DType::kF16 ? 2 : problem.dtype == DType::kF32 ? 3 : 1;
  const int64_t forms = in_planes ? planes : 1;
  plan.query_tile_len = forms * kTile * plan.row_len;
  plan.dout_tile_len = forms * kTile * plan.row_len_v;
  plan.packed_queries_offset = arena.take(query_tiles * plan.query_tile_len * unit_bytes);
  plan.packed_douts_offset = arena.take(query_tiles * plan.dout_tile_len * unit_bytes);
  plan.not_finite_offset = arena.take(query_tiles * static_cast<int64_t>(sizeof(uint64_t)));
  plan.milestones_offset = arena.take((2 * groups + 2) * static_cast<int64_t>(sizeof(int64_t)));
  plan.places_offset = arena.take(2 * groups * static_cast<int64_t>(sizeof(int64_t)));
  plan.progress_offset = arena.take(plan.num_tasks * static_cast<int64_t>(sizeof(int64_t)));
  plan.delta_offset = arena.take(query_rows * unit_bytes);
  plan.dq_offset = arena.take(query_tiles * kTile * plan.row_len * unit_bytes);
  if (plan.num_chunks > 1) {
    const int64_t kv_rows = plan.num_chunks * groups * problem.kv_len;
    plan.dk_offset = arena.take(kv_rows * plan.row_len * unit_bytes);
    plan.dv_offset = arena.take(kv_rows * plan.row_len_v * unit_bytes);
  }
  if (wants_dbias && !plan.writes_dbias_once && !plan.sums_dbias_in_place) {
    plan.dbias_offset = arena.take(plan.dbias_count * unit_bytes);
  }
  // Little, and taken always: the size is asked for before it is known whether there are slopes.
  plan.slope_parts_offset = arena.take(problem.batch * problem.num_heads * plan.num_chunks * plan.kv_tiles *
                                       static_cast<int64_t>(sizeof(double)));
  plan.capture_parts_offset = arena.take(plan.capture_parts * capture_elements * static_cast<int64_t>(sizeof(double)));
  plan.scratch_bytes = arena.size_bytes;
  return plan;
}

}  // namespace jattn::cpu
