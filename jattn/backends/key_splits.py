"""Few queries: when heads of the Hopper forward pass share a tile, and into how many parts it splits the keys.

Few queries of many keys give fewer work items than the device has multiprocessors. Then each item is cut into parts of
its keys that blocks compute beside each other, and a second kernel adds them up
(``cc/kernels/sm90/forward_combine.cuh``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jattn.masks import UNBOUNDED, UNBOUNDED_BAND
from jattn.spec import Spec

# Of the H100 and H200 modules. Others of the architecture have up to twenty fewer, for which the choice is as good.
MULTIPROCESSORS = 132
MOST_SPLITS = 64
MOST_WAVES = 8  # of parts: more only add partial results

# A model of time, in microseconds; it only has to rank numbers of parts.
_FLOPS_PER_US = 4.5e6  # of one multiprocessor
_ITEM_US = 5.0  # start and end of an item: loads before the first product, stores after the last
COMBINE_US = 5.0  # the second launch
_PART_US = 0.1  # of the second kernel, which reads a row's parts one after the other
_BYTES_PER_US = 3.0e6  # partial results, written and read
_LEAST_GAIN = 0.9  # splitting must take less than this part of the time

_MOST_PACKED_TILES = 0.5  # of those that heads have each for itself


def without_idle_band(spec: Spec) -> Spec:
    """Drops the causal band of a single query that hides nothing from it: that of the last position."""
    band = spec.band
    idle = band.lower_right and band.left == UNBOUNDED and band.right >= 0
    if spec.q_len == 1 and idle and not spec.q_lengths and spec.alibi_slopes is None:
        return dataclasses.replace(spec, band=UNBOUNDED_BAND)
    return spec


def rows_of_query(spec: Spec) -> int:
    """Returns the rows of a query where the heads of a group share tiles: a power of two (cc/kernels/sm90/rows.cuh)."""
    return 1 << (spec.group_size - 1).bit_length()


def packs_heads(spec: Spec, tile_q: int) -> bool:
    """Whether the rows of a tile of tile_q rows are the queries of all heads of a group.

    The keys are then read once for the group. That pays where queries are few beside the rows of a tile. Slopes,
    dropout, score functions, masks and biases of single heads, and biases of single queries, keep heads apart.
    """
    rows = rows_of_query(spec)
    of_heads = spec.alibi_slopes is not None or spec.dropout is not None
    of_heads = of_heads or spec.score_mod is not None
    of_heads = of_heads or (spec.mask is not None and spec.mask[1] != 1)
    of_heads = of_heads or (spec.bias is not None and spec.bias[1:3] != (1, 1))
    if of_heads or tile_q % rows != 0:
        return False
    return is_worth_packing(spec, rows, tile_q)


def is_worth_packing(spec: Spec, rows: int, tile_q: int) -> bool:
    """Whether the heads of a group take few tiles of tile_q rows together, with so many rows for a query."""
    if spec.num_heads == spec.num_kv_heads or not 0 < spec.q_len <= tile_q:
        return False
    return -(-spec.q_len * rows // tile_q) <= _MOST_PACKED_TILES * spec.group_size


def choose_splits(
    spec: Spec,
    tile_q: int,
    tile_kv: int,
    *,
    packed_heads: bool = False,
    candidates: Sequence[int] = range(1, MOST_SPLITS + 1),
    combine_us: float = COMBINE_US,
    in_band: int | None = None,
    blocks: int = MULTIPROCESSORS,
    tile_us: float | None = None,
) -> int:
    """Returns the number of parts, 1 if the keys are better left together.

    Args:
      spec: extents, band, whether the band is of positions.
      tile_q, tile_kv: rows and columns of the kernel's tiles.
      packed_heads: whether the rows are queries of all heads of a group (``packs_heads``).
      candidates: numbers that parts may have, 1 among them.
      combine_us: what it costs to add parts up, besides reading and writing them.
      in_band: tiles of keys that the band leaves to a tile of queries, where that is known.
      blocks: how many run beside each other.
      tile_us: what a tile takes a block, where that is known; else as long as its products.
    """
    queries = tile_q // rows_of_query(spec) if packed_heads else tile_q
    heads = spec.batch * (spec.num_kv_heads if packed_heads else spec.num_heads)
    q_tiles = -(-spec.q_len // queries)
    items = heads * q_tiles
    if not 0 < items < blocks:
        return 1
    cut = [tiles_to_cut(spec, tile * queries, queries, tile_kv) for tile in range(q_tiles)]
    most = min(MOST_SPLITS, MOST_WAVES * blocks // items, max(cut))
    if in_band is None:
        in_band = _tiles_in_band(spec, queries, tile_kv)
    if tile_us is None:
        tile_us = 2.0 * tile_q * tile_kv * (spec.head_dim + spec.head_dim_v) / _FLOPS_PER_US
    times = {
        splits: _time_us(spec, heads, cut, splits, in_band, tile_us, combine_us, blocks)
        for splits in candidates
        if splits <= most
    }
    best = min(times, key=lambda splits: times[splits], default=1)
    return best if best > 1 and times[best] < _LEAST_GAIN * times[1] else 1


def tiles_to_cut(spec: Spec, first: int, queries: int, tile_kv: int) -> int:
    """Counts the key tiles among which queries first, first + 1, ... of one tile look for keys.

    By index those are the tiles they may see. Positions are known on the device alone: with them, of all keys.
    """
    band = UNBOUNDED_BAND if spec.positions else spec.band
    offset = spec.kv_len - spec.q_len if band.lower_right else 0
    last = min(first + queries, spec.q_len) - 1
    low = max(0, first + offset - band.left)
    high = min(spec.kv_len, last + offset + band.right + 1)
    return -(-high // tile_kv) - low // tile_kv if low < high else 0


def _tiles_in_band(spec: Spec, queries: int, tile_kv: int) -> int:
    """Estimates how many key tiles the band leaves to a tile of queries, wherever it lies.

    With positions: those of neighbours mostly are neighbours too, so that a window meets one piece of the keys.
    """
    return -(-(queries + spec.band.left + spec.band.right) // tile_kv) + 1


def _time_us(
    spec: Spec,
    heads: int,
    cut: list[int],
    splits: int,
    in_band: int,
    tile_us: float,
    combine_us: float,
    blocks: int,
) -> float:
    pieces = [min(-(-tiles // splits), in_band) * tile_us + _ITEM_US for tiles in cut]
    mean = sum(pieces) / len(pieces)
    waves = -(-heads * len(cut) * splits // blocks)
    time_us = waves * mean + max(pieces) - mean
    if splits > 1:
        row_bytes = 8 * spec.head_dim_v
        time_us += (
            combine_us
            + splits * _PART_US
            + splits * spec.batch * spec.num_heads * spec.q_len * row_bytes / _BYTES_PER_US
        )
    return time_us
