// Which of their ways the backward kernels take for a Config, each with the reason. Measurements:
// docs/kernels/log-backward.md. Plain C++20.
#pragma once

#include "config.cuh"
#include "sm90/tile_shape.cuh"

namespace jattn::sm90 {

// One producer warpgroup and two that work on scores, whatever the tile.
inline constexpr int kBackwardConsumers = 2;
inline constexpr int kScoreWarps = (1 + kBackwardConsumers) * kWarpgroupThreads / 32;

// A third consumer warpgroup that computes dq and nothing else: head dims above 128, to 192. Told by the number of
// warps.
JATTN_HOST_DEVICE constexpr bool has_dq_warpgroup(const Config& config) {
  return config.num_warps == kScoreWarps + kWarpgroupThreads / 32;
}

// Head dims above 128 do not leave registers for both gradients of 64 keys in one warpgroup: one takes dv, the other
// dk.
JATTN_HOST_DEVICE constexpr bool splits_gradients(const Config& config) {
  return config.head_dim > 128 || config.head_dim_v > 128;
}

// Whether blocks stay and take item after item, by a counter: the tiles of the next item are copied while the results
// of the last one leave. Told by Config::schedule, 2 as in the forward pass.
JATTN_HOST_DEVICE constexpr bool takes_items(const Config& config) { return config.schedule == 2; }

// Whether warps of the producer's warpgroup add dq up, each what a consumer warpgroup staged, or, beside drop warps,
// one for both; nothing need be zeroed before. In the order of the key tiles if orders_dq(): the same bits every time
// (backward_sender.cuh).
JATTN_HOST_DEVICE constexpr bool has_senders(const Config& config) { return config.dq_order != 0; }
JATTN_HOST_DEVICE constexpr int num_senders(const Config& config) {
  return config.drops_beside ? 1 : kBackwardConsumers;
}
JATTN_HOST_DEVICE constexpr bool orders_dq(const Config& config) { return config.dq_order == 2; }

// Whether a warp beside the senders writes dq of heads whose items are all done (backward_caster.cuh). Not where sums
// are in order, which gains nothing at head dim 128, and not beside sums for the gradient of a bias, where registers
// would spill.
JATTN_HOST_DEVICE constexpr bool casts_beside(const Config& config) {
  return config.dq_order == 1 && !config.drops_beside && !config.documents && !config.stores_ds && !config.sums_bias;
}

// Whether the producer has 40 registers. With 24 it would spill where it looks at segments, and at positions or from
// item to item. Consumers spare them where they have them.
JATTN_HOST_DEVICE constexpr bool has_wide_producer(const Config& config) {
  const bool spares =
      config.tile_q == 64 && (splits_gradients(config) || config.head_dim == 64) && !has_dq_warpgroup(config);
  const bool is_narrow = config.head_dim == 64 && config.head_dim_v == 64;
  const bool sends = has_senders(config) && (config.segments || (is_narrow && config.band && config.lengths));
  return (config.segments && ((config.positions && spares) || (takes_items(config) && is_narrow))) || sends;
}

// Whether scores have summands beside the product, or pass through a program: exponents are then made in one pass over
// the fragment.
JATTN_HOST_DEVICE constexpr bool has_score_terms(const Config& config) {
  return config.bias || config.alibi || config.program;
}
JATTN_HOST_DEVICE constexpr bool has_step_terms(const Config& config) {
  return has_score_terms(config) || (config.dropout && !config.drops_beside);
}

// Whether all heads of a group may visit a tile of queries before the next (BackwardParams::descending_tiles). A dense
// mask may leave heads different tiles, and terms of a step would be looked up in every step.
JATTN_HOST_DEVICE constexpr bool walks_groups(const Config& config) {
  return config.band && !config.mask && !has_step_terms(config);
}

// Whether lse and delta of the queries are such that weights have the factor of kept pairs already, which spares an
// operation a score. No other kernel reads these statistics then.
JATTN_HOST_DEVICE constexpr bool has_scaled_statistics(const Config& config) { return config.drops_beside; }

// Whether the second warpgroup leaves out the first step of an item if the band hides all of its keys there, as that on
// the diagonal: the first warpgroup then has the matrix unit for itself. Walks begin with that step. Not beside tiles
// of a bias, which may have to take gradients of scores.
JATTN_HOST_DEVICE constexpr bool may_begin_late(const Config& config) {
  return has_index_band(config) && config.tile_q == kWarpgroupRows && config.dq_order == 1 &&
         !(config.bias && config.staged_bias);
}

}  // namespace jattn::sm90
