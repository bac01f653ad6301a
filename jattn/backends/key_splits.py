"""Few queries: into how many parts the Hopper forward pass splits the keys, and when heads share a tile.

Few queries of many keys give fewer work items than the device has multiprocessors. Then each item is cut into parts of
its keys that blocks compute beside each other, and a second kernel adds them up
(``cc/kernels/sm90/forward_combine.cuh``).
"""

from __future__ import annotations

import dataclasses

from jattn.masks import UNBOUNDED, UNBOUNDED_BAND
from jattn.spec import Spec

# Of the H100 and H200 modules. Others of the architecture have up to twenty fewer, for which the choice is as good.
MULTIPROCESSORS = 132
MOST_SPLITS = 64
MOST_WAVES = 8  # of parts: more only add partial results

# A model of time, in microseconds; it only has to rank numbers of parts.
_FLOPS_PER_US = 4.5e6  # of one multiprocessor
_ITEM_US = 5.0  # start and end of an item: loads before the first product, stores after the last
_COMBINE_US = 5.0  # the second launch
_PART_US = 0.1  # of the second kernel, which reads a row's parts one after the other
_BYTES_PER_US = 3.0e6  # partial results, written and read
_LEAST_GAIN = 0.9  # splitting must take less than this part of the time

# What a problem may have for the heads of a group to share a tile (``packs_heads`` in cc/cuda/forward_sm90.cc); sinks
# are left to the kernel that adds up parts.
_PACKABLE = frozenset(
    {"grouped_heads", "lengths", "softcap", "negative_scale", "value_head_dim", "sinks"}
)


def without_idle_band(spec: Spec) -> Spec:
    """Returns the problem of a single query without a causal band that hides nothing: that of the last position."""
    band = spec.band
    idle = band.lower_right and band.left == UNBOUNDED and band.right >= 0
    if spec.q_len == 1 and idle and not spec.q_lengths and spec.alibi_slopes is None:
        return dataclasses.replace(spec, band=UNBOUNDED_BAND)
    return spec


def heads_of_items(spec: Spec) -> int:
    """Returns how many heads of a batch entry have tiles of their own: single queries of a group share one."""
    if spec.q_len == 1 and not spec.q_lengths and spec.features() <= _PACKABLE:
        return spec.num_kv_heads
    return spec.num_heads


def choose_splits(spec: Spec, heads: int, tile_q: int, tile_kv: int) -> int:
    """Returns the number of parts, 1 if the keys are better left together.

    Args:
      spec: lengths, head dims, band, whether the band is of positions.
      heads: those that have tiles of their own (``heads_of_items``), of all batch entries together.
      tile_q, tile_kv: tile of the kernel.
    """
    q_tiles = -(-spec.q_len // tile_q)
    items = heads * q_tiles
    if not 0 < items < MULTIPROCESSORS:
        return 1
    cut = [_tiles_to_cut(spec, tile * tile_q, tile_q, tile_kv) for tile in range(q_tiles)]
    most = min(MOST_SPLITS, MOST_WAVES * MULTIPROCESSORS // items, max(cut))
    times = {
        splits: _time_us(spec, heads, cut, splits, tile_q, tile_kv) for splits in range(1, most + 1)
    }
    best = min(times, key=lambda splits: times[splits], default=1)
    return best if best > 1 and times[best] < _LEAST_GAIN * times[1] else 1


def _tiles_to_cut(spec: Spec, first: int, tile_q: int, tile_kv: int) -> int:
    """Counts the key tiles among which queries first, first + 1, ... of one tile look for keys.

    By index those are the tiles they may see. Positions are known on the device alone: with them, of all keys.
    """
    band = UNBOUNDED_BAND if spec.positions else spec.band
    offset = spec.kv_len - spec.q_len if band.lower_right else 0
    last = min(first + tile_q, spec.q_len) - 1
    low = max(0, first + offset - band.left)
    high = min(spec.kv_len, last + offset + band.right + 1)
    return -(-high // tile_kv) - low // tile_kv if low < high else 0


def _tiles_in_band(spec: Spec, tile_q: int, tile_kv: int) -> int:
    """Estimates how many key tiles the band leaves to a tile of queries, wherever it lies.

    With positions: those of neighbours mostly are neighbours too, so that a window meets one piece of the keys.
    """
    return -(-(tile_q + spec.band.left + spec.band.right) // tile_kv) + 1


def _time_us(
    spec: Spec, heads: int, cut: list[int], splits: int, tile_q: int, tile_kv: int
) -> float:
    tile_us = 2.0 * tile_q * tile_kv * (spec.head_dim + spec.head_dim_v) / _FLOPS_PER_US
    in_band = _tiles_in_band(spec, tile_q, tile_kv)
    pieces = [min(-(-tiles // splits), in_band) * tile_us + _ITEM_US for tiles in cut]
    mean = sum(pieces) / len(pieces)
    waves = -(-heads * len(cut) * splits // MULTIPROCESSORS)
    time_us = waves * mean + max(pieces) - mean
    if splits > 1:
        row_bytes = 8 * spec.head_dim_v
        time_us += (
            _COMBINE_US
            + splits * _PART_US
            + splits * heads * spec.q_len * row_bytes / _BYTES_PER_US
        )
    return time_us
