"""Predicts how much the main kernel of the Hopper backward pass moves between L2 and memory. No GPU needed.

    python3 tools/model_backward_traffic.py --length 8192 --heads 64 --kv-heads 8 --section 4 --order heads groups

Multiprocessors take items in the order of `cc/kernels/attn/schedule.cuh`, an item being the keys of a tile. A step of
an item reads a tile of q and dout and adds to one of dq in float32; it takes one unit of time, give or take, and an
item three more. Tiles are in L2 unless others, used since, fill it. What is left out: keys and values, statistics,
that L2 is two halves, and that no step waits for memory. So traffic comes out higher than measured, by a half where
it is large.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import random
from collections import OrderedDict
from collections.abc import Iterator

MULTIPROCESSORS = 132
KEYS_OF_TILE = 128
ITEM_STEPS = 3.0  # what begin and end of an item take, in steps
SPREAD = 0.03  # standard deviation of the time of a step

ORDERS = {
    "heads": "heads of a group one after the other, upwards from twice as far as the diagonal, round the end",
    "diagonals": "heads of a group one after the other, upwards from the diagonal",
    "groups": "all heads of a group at a tile before the next; first items downwards, others upwards",
    "groups-down": "the same, all items downwards",
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Self-attention.

    window: keys that a query sees to its left, and none to its right; 0: causal without a limit; -1: all keys
    """

    length: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int

    @property
    def group(self) -> int:
        """Returns the query heads of a key/value head."""
        return self.heads // self.kv_heads

    @property
    def queries_of_tile(self) -> int:
        """Returns the queries of a step, as the kernels have them."""
        return 128 if self.head_dim <= 64 else 64

    def query_tiles(self, key_tile: int) -> range:
        """Returns the tiles of queries that see keys of a tile."""
        queries, end = self.queries_of_tile, -(-self.length // self.queries_of_tile)
        if self.window < 0:
            return range(end)
        first = key_tile * KEYS_OF_TILE
        if self.window > 0:
            end = min(end, -(-(first + KEYS_OF_TILE + self.window) // queries))
        return range(first // queries, end)


@dataclasses.dataclass(frozen=True)
class Item:
    """A tile of keys of a key/value head; wave: how many such items its section has before it, over multiprocessors."""

    kv_head: int
    key_tile: int
    wave: float


def items_of(problem: Problem, section: int) -> list[Item]:
    """Returns all items in the order in which they are handed out."""
    tiles, heads = -(-problem.length // KEYS_OF_TILE), problem.batch * problem.kv_heads
    return [
        Item(head, tile, tile * min(section, heads - first) / MULTIPROCESSORS)
        for first in range(0, heads, section)
        for tile in range(tiles)
        for head in range(first, min(first + section, heads))
    ]


def steps_of(problem: Problem, item: Item, order: str) -> Iterator[tuple[int, int]]:
    """Yields the query head and the tile of queries of each step."""
    tiles, group = problem.query_tiles(item.key_tile), problem.group
    first_head = item.kv_head * group
    if order in ("heads", "diagonals"):
        shift = item.key_tile * KEYS_OF_TILE // problem.queries_of_tile if order == "heads" else 0
        start = shift % max(len(tiles), 1)
        for head in range(first_head, first_head + group):
            for tile in [*tiles[start:], *tiles[:start]]:
                yield head, tile
        return
    descends = order == "groups-down" or item.wave < 1
    for tile in reversed(tiles) if descends else tiles:
        for turn in range(group):
            yield first_head + (item.key_tile + turn) % group, tile


class Cache:
    """The least recently used tile leaves first; bytes that move between it and memory are counted."""

    def __init__(self, capacity: float) -> None:
        self.capacity, self.used = capacity, 0
        self.tiles: OrderedDict[object, tuple[int, bool]] = (
            OrderedDict()
        )  # size, and whether written
        self.read = self.written = 0

    def use(self, tile: object, size: int, *, writes: bool, exists: bool) -> None:
        """Uses a tile; one that does not exist yet is not read from memory."""
        if tile in self.tiles:
            _, was_written = self.tiles.pop(tile)
            self.tiles[tile] = (size, was_written or writes)
            return
        self.read += size if exists else 0
        self.tiles[tile] = (size, writes)
        self.used += size
        while self.used > self.capacity:
            _, (left_size, was_written) = self.tiles.popitem(last=False)
            self.used -= left_size
            self.written += left_size if was_written else 0


def traffic(
    problem: Problem, section: int, order: str, capacity: float, seed: int = 1
) -> tuple[float, float, float]:
    """Returns bytes read and written, and the share of all multiprocessors that is at work."""
    draw = random.Random(seed)
    cache = Cache(capacity)
    half = problem.queries_of_tile * problem.head_dim * 4  # q and dout in 16 bits, or dq in 32
    waiting = iter(items_of(problem, section))
    begun: set[tuple[int, int]] = set()  # tiles of dq
    at: list[Iterator[tuple[int, int]]] = [iter(()) for _ in range(MULTIPROCESSORS)]
    queue = [(0.0, number) for number in range(MULTIPROCESSORS)]
    steps = 0
    end = 0.0
    while queue:
        time, number = heapq.heappop(queue)
        step = next(at[number], None)
        if step is None:
            item = next(waiting, None)
            end = max(end, time)
            if item is not None:
                at[number] = steps_of(problem, item, order)
                heapq.heappush(queue, (time + ITEM_STEPS, number))
            continue
        steps += 1
        cache.use((step, "q, dout"), half, writes=False, exists=True)
        cache.use((step, "dq"), half, writes=True, exists=step in begun)
        begun.add(step)
        heapq.heappush(queue, (time + max(0.3, draw.gauss(1.0, SPREAD)), number))
    return cache.read, cache.written, steps / end / MULTIPROCESSORS


def main() -> None:
    """Prints a line for each order."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name}: {text}" for name, text in ORDERS.items()),
    )
    parser.add_argument("--length", type=int, default=8192, help="queries and keys (%(default)s)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=128)
    parser.add_argument(
        "--window", type=int, default=0, help="keys to the left; 0: causal, -1: all keys"
    )
    parser.add_argument(
        "--section", type=int, default=4, help="key/value heads handed out together"
    )
    parser.add_argument("--order", nargs="+", choices=tuple(ORDERS), default=tuple(ORDERS))
    parser.add_argument("--l2", type=float, default=48.0, help="MB (%(default)s)")
    options = parser.parse_args()
    problem = Problem(
        options.length,
        options.batch,
        options.heads,
        options.kv_heads,
        options.head_dim,
        options.window,
    )
    for order in options.order:
        read, written, share = traffic(problem, options.section, order, options.l2 * 1e6)
        print(
            f"{order:12s} {read / 1e9:6.2f} GB read {written / 1e9:6.2f} GB written, at work {share:.3f}"
        )


if __name__ == "__main__":
    main()
