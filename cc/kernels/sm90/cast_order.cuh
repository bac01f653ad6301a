// What the numbers mean that blocks take where some cast dq (Config::casts): which item, or which cast. Plain
// C++20.
//
// Items come in their own order. Behind the first `leading_items` a cast follows every `items_between` items, and the last
// ones follow all items. The tiles of dq belong to tickets, in the order of heads. A cast among the items has tickets of
// heads whose items all have smaller numbers; the casts behind share the rest.
#pragma once

#include "base/types.cuh"

namespace jattn::sm90 {

struct CastOrder {
  int32_t items;
  int32_t leading_items;
  int32_t items_between;       // at least 1
  int32_t passing;             // casts among the items: each of their warpgroups has as many tickets as
  int32_t tickets_of_passing;  // this; those behind the items take tickets until there are no more
  int32_t tiles;               // query tiles of one head
  int32_t tickets;             // of kTicketTiles each, over all heads
};

inline constexpr int kTicketTiles = 4;

// What the host knows of a launch.
struct CastProblem {
  int32_t items;
  int32_t section_items;  // of a section of heads (attn/schedule.cuh)
  bool in_order;          // items of heads follow each other as the heads do in dq
  int32_t heads, tiles;   // query heads of all batch entries; query tiles of one
  int32_t warpgroups;     // of a block, that cast
  int32_t sm_count;
};

// Among the items the cast runs beside products; behind them all multiprocessors would cast at once, bound by memory. A
// section and two items for each multiprocessor later the heads of a section are done, so that casts seldom wait.
JATTN_HOST_DEVICE constexpr CastOrder cast_order(const CastProblem& problem) {
  const int64_t most = problem.sm_count > 2 ? problem.sm_count - 1 : 1;
  const int64_t leading = problem.section_items + int64_t{2} * problem.sm_count;
  const int64_t tickets = (int64_t{problem.heads} * problem.tiles + kTicketTiles - 1) / kTicketTiles;
  CastOrder order{problem.items, problem.items, 1, 0, 0, problem.tiles, int32_t(tickets)};
  const int64_t others = problem.items - leading;
  if (!problem.in_order || others <= 0 || most < 8) return order;
  const int64_t wanted = most - most * 3 / 8;
  const int64_t between = (others + wanted - 1) / wanted;
  const int64_t passing = others / between;
  // No more than came by the items between: else some of these heads' items had larger numbers.
  const int64_t share = tickets * between / problem.items / problem.warpgroups;
  if (share == 0) return order;
  order.leading_items = int32_t(leading);
  order.items_between = int32_t(between);
  order.passing = int32_t(passing);
  order.tickets_of_passing = int32_t(share);
  return order;
}

// Casts behind all items.
JATTN_HOST_DEVICE constexpr int32_t last_casts(const CastOrder& order, int sm_count) {
  const int32_t most = (sm_count > 2 ? sm_count - 1 : 1) - order.passing;
  return most < order.tickets ? most : order.tickets;
}

// What a number stands for: an item, or -1 and a cast.
struct Duty {
  int item, cast;
};

JATTN_HOST_DEVICE constexpr Duty duty_of(const CastOrder& order, int number) {
  if (number < order.leading_items) return {number, -1};
  const int period = (number - order.leading_items) / (order.items_between + 1);
  const int place = number - order.leading_items - period * (order.items_between + 1);
  const int item = order.leading_items + period * order.items_between + place;
  if (place < order.items_between && item < order.items) return {item, -1};
  const int before = order.leading_items + (period + 1) * order.items_between;
  return {-1, number - (before < order.items ? before : order.items)};
}

}  // namespace jattn::sm90
