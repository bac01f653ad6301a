"""Blocks that cast dq among those that work on items: their order, run on the host.

Every item has one block, casting blocks are numbered from 0 on and fewer than multiprocessors, and those that pass take
only tickets of heads whose items went out some time before.
"""

import subprocess
from pathlib import Path

from toolchain import build_host_program

MAIN = """
#include <algorithm>
#include <iostream>
#include <vector>

#include "sm90/cast_order.cuh"

using namespace jattn::sm90;

struct Shape { int kv_heads, group, key_tiles, query_tiles, section_heads, warpgroups, sm_count; bool in_order; };

const char* fault_of(const Shape& shape, bool& passes) {
  const int items = shape.kv_heads * shape.key_tiles;
  const int heads = shape.kv_heads * shape.group;
  const CastOrder order = cast_order({items, shape.section_heads * shape.key_tiles, shape.in_order, heads,
                                      shape.query_tiles, shape.warpgroups, shape.sm_count});
  const int casts = order.passing + last_casts(order, shape.sm_count);
  passes = order.passing > 0;
  if (casts < 1 || casts >= std::max(shape.sm_count, 2)) return "number of casting blocks";
  if (passes && casts == order.passing) return "nobody takes the last tickets";
  if (passes && !shape.in_order) return "casts among items that come in another order";
  std::vector<int> seen(items), casting(casts);
  int items_before = 0;
  for (int block = 0; block < items + casts; ++block) {
    const BlockRole role = role_of_block(order, block);
    if ((role.item < 0) == (role.cast < 0)) return "roles";
    if (role.item >= 0) {
      if (role.item != items_before || role.item >= items) return "order of items";
      ++items_before;
      continue;
    }
    if (role.cast >= casts || casting[role.cast]++) return "number of a casting block";
    if (role.cast >= order.passing) {
      if (items_before != items) return "a waiting block among the items";
      continue;
    }
    // Of all tickets that passing blocks have taken by then, the last.
    const int ticket = (role.cast + 1) * shape.warpgroups * order.tickets_of_passing - 1;
    if (ticket >= order.tickets) return "tickets";
    const int last_tile = std::min((ticket + 1) * kTicketTiles, heads * shape.query_tiles) - 1;
    const int section = last_tile / shape.query_tiles / shape.group / shape.section_heads;
    const int end = std::min((section + 1) * shape.section_heads * shape.key_tiles, items);
    if (items_before < end + shape.sm_count) return "a head that is hardly done";
  }
  return items_before == items ? nullptr : "items left out";
}

int main() {
  int number = 0, with_passing = 0;
  for (int kv_heads : {1, 3, 8, 32, 250, 1024})
    for (int group : {1, 3, 8})
      for (int key_tiles : {1, 5, 64, 301})
        for (int query_tiles : {1, 7, 128, 600})
          for (int section_heads : {1, 4, 33})
            for (int sm_count : {1, 2, 16, 132})
              for (bool in_order : {false, true}) {
                const Shape shape{kv_heads, group, key_tiles, query_tiles, std::min(section_heads, kv_heads),
                                  3 + number % 2, sm_count, in_order};
                bool passes = false;
                if (const char* fault = fault_of(shape, passes)) {
                  std::cout << fault << ": " << kv_heads << ' ' << group << ' ' << key_tiles << ' ' << query_tiles
                            << ' ' << section_heads << ' ' << sm_count << ' ' << in_order << std::endl;
                  return 1;
                }
                ++number;
                with_passing += passes;
              }
  std::cout << number << ' ' << with_passing << std::endl;
}
"""


def test_every_item_and_every_ticket_has_its_block(tmp_path: Path) -> None:
    program = build_host_program(MAIN, tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    shapes, with_passing = map(int, done.stdout.split())
    assert shapes == 6 * 3 * 4 * 4 * 3 * 4 * 2
    assert with_passing > 500
