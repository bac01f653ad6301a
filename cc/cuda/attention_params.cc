#include "cuda/attention_params.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <numbers>

#include "core/require.h"
#include "cuda/launch.h"
#include "kernels/passes/shape.cuh"

namespace jattn::cuda {
namespace {

constexpr int64_t kMaxLength = int64_t{1} << 28;      // band arithmetic in kernels is 32-bit
constexpr int64_t kUnboundedBand = int64_t{1} << 30;  // beyond any difference of positions
constexpr int64_t kMaxHeads = int64_t{1} << 30;
constexpr int64_t kMaxRowBytes = int64_t{1} << 24;  // row * bytes of a tile stays in 32 bits

Element element_of(DType dtype) {
  switch (dtype) {
    case DType::kF16: return Element::kF16;
    case DType::kBF16: return Element::kBF16;
    case DType::kF32: return Element::kF32;
    case DType::kF64: break;
  }
  fail(Fault::kCaller, "CUDA kernels run float16, bfloat16 and float32, not float64");
}

bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Widest of 16, 8, 4, 2 bytes on whose multiples all rows start.
int32_t copy_bytes(int64_t row_elements, int64_t element_bytes, std::initializer_list<const void*> pointers) {
  for (int64_t bytes : {16, 8, 4}) {
    const bool fits = (row_elements * element_bytes) % bytes == 0 &&
                      std::all_of(pointers.begin(), pointers.end(), [&](const void* p) { return aligned(p, bytes); });
    if (fits) return static_cast<int32_t>(bytes);
  }
  return 2;
}

BroadcastArray broadcast_array(const BroadcastTensor& tensor, int64_t element_bytes, int64_t kv_len) {
  const bool even = tensor.stride_batch % 2 == 0 && tensor.stride_head % 2 == 0 && tensor.stride_query % 2 == 0;
  return {.data = tensor.data,
          .stride_batch = tensor.stride_batch,
          .stride_head = tensor.stride_head,
          .stride_query = tensor.stride_query,
          .stride_key = tensor.stride_key,
          .pairs = tensor.stride_key == 1 && even && kv_len % 2 == 0 && aligned(tensor.data, 2 * element_bytes)};
}

template <class Params, class T>
Params per_head(const PerHead<T>& array) {
  return {array.data, static_cast<int32_t>(array.stride_batch), static_cast<int32_t>(array.stride_head)};
}

// What staged copies of a bias rely on.
void check_staged(const Kernel& kernel, const char* name, const BroadcastTensor& tensor, int64_t element_bytes,
                  int64_t kv_len) {
  const bool rows_aligned = (tensor.stride_batch * element_bytes) % 16 == 0 &&
                            (tensor.stride_head * element_bytes) % 16 == 0 &&
                            (tensor.stride_query * element_bytes) % 16 == 0 && (kv_len * element_bytes) % 16 == 0;
  JATTN_REQUIRE(tensor.stride_key == 1 && rows_aligned && aligned(tensor.data, 16), "kernel ", kernel.text, " needs a ",
                name, " whose rows start on 16-byte boundaries");
}

int32_t clamp_band(int64_t limit) { return static_cast<int32_t>(std::clamp(limit, -kUnboundedBand, kUnboundedBand)); }

// Band and lengths do no harm in a kernel whose problem has none; the others read what is not there.
void check_feature(const Kernel& kernel, const char* name, bool wanted, bool compiled, bool optional) {
  JATTN_REQUIRE(wanted == compiled || (optional && compiled), "the problem ", wanted ? "has" : "has no", " ", name,
                ", but kernel ", kernel.text, compiled ? " was" : " was not", " made for it");
}

TilesOfSides sides_of(const Problem& problem, const Config& config) {
  return {
      .extent = {static_cast<int32_t>(problem.q_len), static_cast<int32_t>(problem.kv_len)},
      .tile = {config.tile_q, config.tile_kv},
      .tiles = {static_cast<int32_t>(ceil_div(problem.q_len, config.tile_q)),
                static_cast<int32_t>(ceil_div(problem.kv_len, config.tile_kv))},
      .batch = static_cast<int32_t>(problem.batch),
  };
}

// Scratch for one kind of ranges, for all tiles of either axis.
template <class Range>
int64_t ranges_bytes(const Problem& problem, const Config& config) {
  const TilesOfSides sides = sides_of(problem, config);
  return round_up(problem.batch * (int64_t{sides.tiles[0]} + sides.tiles[1]) * int64_t{sizeof(Range)},
                  kScratchAlignment);
}

}  // namespace

int64_t blocks_by_tiles(const TilesOfSides& sides, int num_threads) {
  return ceil_div(sides.batch * (int64_t{sides.tiles[0]} + sides.tiles[1]), num_threads / 32);
}

SegmentRangesParams segment_ranges(const Problem& problem, const Config& config, void* scratch) {
  const TilesOfSides sides = sides_of(problem, config);
  auto* ranges = static_cast<SegmentRange*>(scratch);
  return {
      .segments = {problem.q_segments, problem.kv_segments},
      .ranges = {ranges, ranges + int64_t{sides.batch} * sides.tiles[0]},
      .sides = sides,
  };
}

const Kernel* find_family(const Plan& plan, std::string_view family) {
  for (const Kernel* kernel : plan.kernels) {
    if (kernel->key.family == family) return kernel;
  }
  return nullptr;
}

const Kernel& require_family(const Plan& plan, std::string_view family) {
  const Kernel* kernel = find_family(plan, family);
  JATTN_REQUIRE(kernel != nullptr, "the plan's kernels have none of family ", family);
  return *kernel;
}

void require_extents(const Problem& problem) {
  JATTN_REQUIRE(problem.q_len <= kMaxLength && problem.kv_len <= kMaxLength, "lengths ", problem.q_len, " and ",
                problem.kv_len, " are too long: at most ", kMaxLength);
  JATTN_REQUIRE(problem.num_kv_heads > 0 && problem.num_heads % problem.num_kv_heads == 0, "num_heads ",
                problem.num_heads, " must be a multiple of num_kv_heads ", problem.num_kv_heads);
  JATTN_REQUIRE(problem.batch * problem.num_heads <= kMaxHeads, "batch * num_heads is ",
                problem.batch * problem.num_heads, ", at most ", kMaxHeads);
  JATTN_REQUIRE(problem.head_dim > 0 && problem.head_dim_v > 0, "head dims must be positive");
  JATTN_REQUIRE(problem.num_dropout_rows <= kMaxLength, "the table of dropout keys has ", problem.num_dropout_rows,
                " rows, at most ", kMaxLength);
}

void require_element(const Kernel& kernel, DType dtype) {
  JATTN_REQUIRE(element_of(dtype) == kernel.config().element, "kernel ", kernel.text, " has another element type");
}

void require_bias_element(const Kernel& kernel, DType dtype) {
  JATTN_REQUIRE(element_of(dtype) == kernel.config().bias_element, "kernel ", kernel.text, " has another bias type");
}

ProblemParams problem_params(const Problem& problem, const Kernel& kernel) {
  const Config& config = kernel.config();
  require_extents(problem);
  require_element(kernel, problem.dtype);
  JATTN_REQUIRE(problem.head_dim <= config.head_dim, "head_dim ", problem.head_dim, " exceeds that of kernel ",
                kernel.text);
  const int64_t bytes = size_bytes(problem.dtype);
  JATTN_REQUIRE(problem.num_heads * std::max(problem.head_dim, problem.head_dim_v) * bytes <= kMaxRowBytes,
                "num_heads * head_dim is too large: a row may have ", kMaxRowBytes, " bytes");

  const bool banded = problem.band_left != kUnbounded || problem.band_right != kUnbounded;
  check_feature(kernel, "band", banded, config.band, true);
  check_feature(kernel, "lengths", problem.q_lengths != nullptr || problem.kv_lengths != nullptr, config.lengths, true);
  check_feature(kernel, "segments", problem.q_segments != nullptr, config.segments, false);
  check_feature(kernel, "mask", problem.mask.data != nullptr, config.mask, false);
  check_feature(kernel, "bias", problem.bias.data != nullptr, config.bias, false);
  check_feature(kernel, "softcap", problem.softcap > 0, config.softcap, false);
  check_feature(kernel, "positions", problem.q_positions != nullptr, config.positions, false);
  // A backward kernel needs no sinks: they are in lse, and its problem has none.
  check_feature(kernel, "sinks", problem.sinks.data != nullptr, config.sinks, false);
  check_feature(kernel, "ALiBi slopes", problem.alibi_slopes.data != nullptr, config.alibi, false);
  check_feature(kernel, "dropout", problem.dropout_keys.data != nullptr, config.dropout, false);
  check_feature(kernel, "dropout by rows", problem.dropout_rows, config.dropout_rows, false);
  check_feature(kernel, "a score function", problem.score_mod, config.program, false);
  JATTN_REQUIRE(!problem.dropout_rows || problem.num_dropout_rows > 0, "the table of dropout keys has no rows");
  if (config.bias) require_bias_element(kernel, problem.bias.dtype);

  ProblemParams params{};
  params.q = problem.q;
  params.k = problem.k;
  params.v = problem.v;
  if (config.bias && config.staged_bias) {
    check_staged(kernel, "bias", problem.bias, size_bytes(problem.bias.dtype), problem.kv_len);
  }
  if (config.bias) params.bias = broadcast_array(problem.bias, size_bytes(problem.bias.dtype), problem.kv_len);
  params.q_lengths = problem.q_lengths;
  params.kv_lengths = problem.kv_lengths;
  params.q_segments = problem.q_segments;
  params.kv_segments = problem.kv_segments;
  params.q_positions = problem.q_positions;
  params.kv_positions = problem.kv_positions;
  params.sinks = per_head<PerHeadFloat>(problem.sinks);
  params.alibi_slopes = per_head<PerHeadFloat>(problem.alibi_slopes);
  params.dropout_keys = per_head<PerHeadWords>(problem.dropout_keys);
  params.dropout_rate = problem.dropout_rate.data;
  params.dropout_rate_stride = static_cast<int32_t>(problem.dropout_rate.stride_batch);
  params.num_dropout_rows = static_cast<int32_t>(problem.num_dropout_rows);
  params.batch = static_cast<int32_t>(problem.batch);
  params.q_len = static_cast<int32_t>(problem.q_len);
  params.kv_len = static_cast<int32_t>(problem.kv_len);
  params.num_heads = static_cast<int32_t>(problem.num_heads);
  params.num_kv_heads = static_cast<int32_t>(problem.num_kv_heads);
  params.group_size = static_cast<int32_t>(problem.group_size());
  params.head_dim = static_cast<int32_t>(problem.head_dim);
  params.head_dim_v = static_cast<int32_t>(problem.head_dim_v);
  params.band_left = clamp_band(problem.band_left);
  params.band_right = clamp_band(problem.band_right);
  params.lower_right = problem.lower_right;
  params.scale_first = !(problem.scale > 0);
  params.scale = static_cast<float>(problem.scale);
  params.scale_log2 = static_cast<float>(problem.scale * std::numbers::log2e);
  if (config.softcap) {
    params.softcap_in = static_cast<float>(problem.scale / problem.softcap);
    params.softcap_log2 = static_cast<float>(problem.softcap * std::numbers::log2e);
  }
  params.copy_bytes = copy_bytes(problem.head_dim, bytes, {problem.q, problem.k});
  params.copy_bytes_v = copy_bytes(problem.head_dim_v, bytes, {problem.v});
  params.batch_ids = problem.batch_ids;
  params.head_ids = problem.head_ids;
  static_assert(std::size(params.captures) == kMaxCaptures);
  std::ranges::copy(problem.captures, params.captures);
  JATTN_REQUIRE(config.narrow_rows || (params.copy_bytes == 16 && params.copy_bytes_v == 16), "head dims ",
                problem.head_dim, " and ", problem.head_dim_v, " give rows off 16-byte boundaries, but kernel ",
                kernel.text, " was not made for narrow rows");
  return params;
}

int64_t tile_ranges_bytes(const Problem& problem, const Config& config) {
  return (config.segments ? ranges_bytes<SegmentRange>(problem, config) : 0) +
         (has_position_band(config) ? ranges_bytes<PositionRange>(problem, config) : 0);
}

void launch_tile_ranges(const Problem& problem, const Plan& plan, const Config& config, void* scratch,
                        ProblemParams& params, CUstream stream) {
  const TilesOfSides sides = sides_of(problem, config);
  unsigned char* free = static_cast<unsigned char*>(scratch);
  if (config.segments) {
    const SegmentRangesParams pass = segment_ranges(problem, config, free);
    params.q_ranges = pass.ranges[0];
    params.kv_ranges = pass.ranges[1];
    if (!config.documents) {
      const Kernel& kernel = require_family(plan, "segment_ranges");
      const int threads = segment_ranges_threads(kernel.config());
      launch(kernel, {.grid = {.x = blocks_by_tiles(sides, threads)}, .num_threads = threads}, &pass, stream);
    }
    free += ranges_bytes<SegmentRange>(problem, config);
  }
  if (has_position_band(config)) {
    const Kernel& kernel = require_family(plan, "position_ranges");
    auto* ranges = reinterpret_cast<PositionRange*>(free);
    params.q_position_ranges = ranges;
    params.kv_position_ranges = ranges + int64_t{sides.batch} * sides.tiles[0];
    const PositionRangesParams pass{
        .positions = {problem.q_positions, problem.kv_positions},
        .segments = {problem.q_segments, problem.kv_segments},
        .lengths = {problem.q_lengths, problem.kv_lengths},
        .ranges = {ranges, ranges + int64_t{sides.batch} * sides.tiles[0]},
        .sides = sides,
    };
    const int threads = position_ranges_threads(kernel.config());
    launch(kernel, {.grid = {.x = blocks_by_tiles(sides, threads)}, .num_threads = threads}, &pass, stream);
  }
}

int32_t section_heads(const Problem& problem, const Config& config) {
  const int64_t group = problem.group_size();
  const bool uneven = config.band || config.lengths || config.segments;
  return static_cast<int32_t>(uneven ? group * ceil_div(4, group) : group);
}

}  // namespace jattn::cuda
