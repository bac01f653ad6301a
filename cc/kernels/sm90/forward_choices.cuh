// Which of its ways the forward kernel takes for a Config, each with the reason. Measurements: docs/kernels/log.md.
// Plain C++20.
#pragma once

#include "config.cuh"
#include "sm90/tile_shape.cuh"

namespace jattn::sm90 {

// Whether drop warps (drops.cuh) leave a consumer thread the bits of its pairs, or the words of its calls: bits are 1
// to 6 % faster for 128 rows, but with 192 these warps have more to do than the consumers then (8 to 14 % slower).
JATTN_HOST_DEVICE constexpr bool drops_are_bits(const Config& config) { return num_consumers(config) == 2; }

// Whether a producer with 24 registers would spill: it looks up segments, fetches slopes or the numbers of dropout
// beside a softcap, or makes parts of Philox for drop warps.
JATTN_HOST_DEVICE constexpr bool has_busy_producer(const Config& config) {
  const bool fetches_numbers = config.alibi || (config.dropout && config.softcap);
  return num_consumers(config) == 2 && (config.segments || fetches_numbers || config.drops_beside);
}

// Whether the first tile of a head takes the rows that are left over, not the last: with a diagonal it visits fewest
// keys. Of 1024 causal queries in tiles of 192 x 128 the tiles then visit 27 tiles of keys instead of 32.
JATTN_HOST_DEVICE constexpr bool cuts_first_tile(const Config& config) {
  const bool by_index = config.band && !config.positions && !config.lengths && !config.segments && !config.mask;
  return by_index && config.tile_q == 192 && !config.partial_results && !config.packed_heads;
}

// Whether a warpgroup computes the first half of the scores of its first tile alone where it sees no key of the other
// half: on the diagonal the first of two warpgroups. Up to 2 % faster.
JATTN_HOST_DEVICE constexpr bool halves_first_tile(const Config& config) {
  const bool plain = !config.bias && !config.alibi && !config.program && !config.softcap && !config.mask &&
                     !config.positions && !config.dropout && !config.scale_first;
  return plain && config.band && !config.in_series && config.tile_kv == 128 &&
         (config.head_dim == 64 || config.head_dim == 128) && config.head_dim_v == config.head_dim;
}

// Whether probabilities of a tile are summed up before they are added to those of other tiles (softmax.cuh). Kernels
// that have half tiles beside whole ones are at best 0.5 % (head dim 64) and 2 % (128) slower with it, others 1 %
// slower to 2 % faster.
JATTN_HOST_DEVICE constexpr bool sums_tiles(const Config& config) { return !halves_first_tile(config); }

// Exponentials of a tile that a thread computes before it waits for the output product of the tile before. ptxas's own
// choice is 0 to 55 of 64, by luck: any change of the source moves it. Over that choice, full problems are 3 to 6 %
// faster with 20 at head dim 128 and up to 2 % with 24 at (192, 128); at 64 none is best beside halves. Elsewhere no
// number is faster, and beside a bias, a mask or dropout 20 is 1 to 2 % slower.
inline constexpr int kLeftToCompiler = -1;
JATTN_HOST_DEVICE constexpr int early_exponentials(const Config& config) {
  const bool adds_terms =
      config.bias || config.alibi || config.program || config.softcap || config.mask || config.dropout;
  if (config.in_series || adds_terms || config.tile_kv != 128) return kLeftToCompiler;
  if (config.head_dim == 64 && halves_first_tile(config)) return 0;
  if (config.take_turns || config.head_dim_v != 128) return kLeftToCompiler;
  return config.head_dim == 128 ? 20 : config.head_dim == 192 ? 24 : kLeftToCompiler;
}

// Whether a k tile is freed before the row of the bias that travelled beside it is added to the exponents, which takes
// most of a tile's time: 1.5 % faster in the mean up to head dim 128, up to 3 % slower at 256.
JATTN_HOST_DEVICE constexpr bool frees_k_before_row(const Config& config) {
  return config.row_bias && !config.softcap && !config.alibi && !config.program && !config.dropout_rows &&
         config.head_dim <= 128;
}

// Whether what a softcap's series made of scores is judged by its sums (cap_series.cuh), not the scores before: 6 %
// less time at head dim 128, 0 to 3 % more at 192 and 256. A float16 has no room for probabilities that refer to zero,
// and three warpgroups have no registers for it.
JATTN_HOST_DEVICE constexpr bool proves_by_sums(const Config& config) {
  return config.cap_series && config.element == Element::kBF16 && num_consumers(config) == 2 && !config.in_series &&
         !config.q_in_registers && !config.dropout_rows && config.head_dim == 128 && config.head_dim_v == 128;
}

}  // namespace jattn::sm90
