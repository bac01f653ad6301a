"""Tiles, stages and loop order of the Hopper kernels: the one place that picks them and composes kernel keys.

Shared memory is counted as the kernels count it (``cc/kernels/sm90/shape.cuh``); a test compares the two. What was
measured for each choice stands in ``docs/kernels/log.md``.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

_ELEMENTS = {"float16": "f16", "bfloat16": "bf16"}

# Rows of q, k, v and out are copied by the tensor memory accelerator, whose strides are multiples of 16 bytes.
HEAD_DIM_MULTIPLE = 8
LARGEST_HEAD_DIM = 256
MAX_SHARED_BYTES = 227 * 1024

_HEAD_DIM_TILES = (64, 96, 128, 192, 256)
_SCHEDULE_BY_COUNTER = 2
_SOFTMAX_LAST, _IN_SERIES = 1, 2
_SCRATCH_ALIGNMENT = 256


class _Band(Protocol):
    @property
    def unbounded(self) -> bool: ...


class Problem(Protocol):
    """What the choice reads of a problem; ``jattn.spec.Spec`` has it all. The batch is not among it."""

    @property
    def q_len(self) -> int: ...
    @property
    def kv_len(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def scale(self) -> float: ...
    @property
    def softcap(self) -> float: ...
    @property
    def band(self) -> _Band: ...
    @property
    def q_lengths(self) -> bool: ...
    @property
    def kv_lengths(self) -> bool: ...
    @property
    def segments(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Tile:
    """The compile-time shape of one kernel.

    Attributes:
      head_dim, head_dim_v: of the tiles in shared memory; at least those of the problem.
      loop_order, chain_items, q_in_registers, integer_max: see ``Config``.
    """

    head_dim: int
    head_dim_v: int
    tile_q: int
    tile_kv: int
    stages: int = 2
    loop_order: int = 0
    chain_items: bool = False
    q_in_registers: bool = False
    integer_max: bool = False

    @property
    def num_warps(self) -> int:
        """One producer warpgroup, one consumer warpgroup per 64 queries."""
        return 4 * (1 + self.tile_q // 64)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The kernels of one call, and the scratch it needs.

    Attributes:
      kernels: kernel keys joined by ';'.
      scratch_bytes: of the call; linear in the batch.
    """

    kernels: str
    scratch_bytes: int


def _tile_bytes(rows: int, columns: int) -> int:
    """Bytes of a tile in shared memory: whole chunks of 64 columns of a 16-bit type."""
    return -(-columns // 64) * rows * 128


def forward_shared_bytes(tile: Tile, segments: bool) -> int:
    """Shared memory of the forward kernel."""
    q_buffers = 2 if tile.chain_items else 1
    q = q_buffers * _tile_bytes(tile.tile_q, tile.head_dim)
    out = _tile_bytes(tile.tile_q, tile.head_dim_v)
    stage = _tile_bytes(tile.tile_kv, tile.head_dim) + _tile_bytes(tile.tile_kv, tile.head_dim_v)
    slots = 2 * q_buffers
    ids = 4 * (slots * tile.tile_q + tile.stages * tile.tile_kv) if segments else 0
    barriers = 8 * (1 + 2 * q_buffers + 4 * tile.stages)
    control = barriers + 8 + 8 * tile.stages + slots * 32 + ids
    rest = tile.stages * stage + control
    own_out = q + out + rest
    return own_out if own_out <= MAX_SHARED_BYTES else max(q, out) + rest


def _head_dim_tile(head_dim: int) -> int:
    return next(tile for tile in _HEAD_DIM_TILES if tile >= head_dim)


def forward_tile(problem: Problem) -> Tile:
    """Picks the tile of the forward kernel.

    Raises:
      ValueError: a head dim is larger than LARGEST_HEAD_DIM.
    """
    if max(problem.head_dim, problem.head_dim_v) > LARGEST_HEAD_DIM:
        raise ValueError(
            f"head dims {problem.head_dim} and {problem.head_dim_v}: at most {LARGEST_HEAD_DIM}"
        )
    head_dim, head_dim_v = _head_dim_tile(problem.head_dim), _head_dim_tile(problem.head_dim_v)
    largest = max(head_dim, head_dim_v)
    small = largest <= 96 and not problem.softcap > 0  # with softcap 24 bytes of registers spill
    if small and largest <= 64:
        return Tile(
            head_dim,
            head_dim_v,
            192,
            128,
            stages=4,
            loop_order=_SOFTMAX_LAST,
            chain_items=not problem.segments,  # with both 4 bytes of registers spill
            integer_max=True,
        )
    if small:
        return Tile(head_dim, head_dim_v, 192, 128, loop_order=_IN_SERIES, integer_max=True)
    # A consumer thread holds head_dim_v / 2 values of the output, tile_kv / 2 scores, half as many packed
    # probabilities and, if q is in registers, head_dim / 4 of its words.
    for tile_kv in (128, 96, 64):
        q_in_registers = largest <= 128
        tile = Tile(
            head_dim,
            head_dim_v,
            128,
            tile_kv,
            q_in_registers=q_in_registers,
            integer_max=head_dim_v <= 128,
        )
        registers = head_dim_v // 2 + 3 * tile_kv // 4 + (head_dim // 4 if q_in_registers else 0)
        if registers <= 192 and forward_shared_bytes(tile, problem.segments) <= MAX_SHARED_BYTES:
            return tile
    raise AssertionError("every head dim up to LARGEST_HEAD_DIM has a tile of 64 keys")


def forward_key(problem: Problem, tile: Tile) -> str:
    """Composes the key of the forward kernel, in the order of ``Config``; members at their default are left out."""
    members: dict[str, str | int] = {
        "family": "sm90_forward",
        "arch": "sm_90a",
        "element": _ELEMENTS[problem.dtype],
        "head_dim": tile.head_dim,
        "head_dim_v": tile.head_dim_v,
        "tile_q": tile.tile_q,
        "tile_kv": tile.tile_kv,
        "num_warps": tile.num_warps,
        "stages": tile.stages,
    }
    softcap = problem.softcap > 0
    flags = {
        "band": not problem.band.unbounded,
        "lengths": problem.q_lengths or problem.kv_lengths,
        "segments": problem.segments,
        "softcap": softcap,
    }
    members |= {name: 1 for name, used in flags.items() if used}
    members["schedule"] = _SCHEDULE_BY_COUNTER
    if tile.loop_order:
        members["loop_order"] = tile.loop_order
    if tile.chain_items:
        members["chain_items"] = 1
    if tile.q_in_registers:
        members["q_in_registers"] = 1
    if tile.integer_max:
        members["integer_max"] = 1
    if not problem.scale > 0 and not softcap:
        members["scale_first"] = 1
    return " ".join(f"{name}={value}" for name, value in members.items())


def plan_forward(problem: Problem, batch: int) -> Plan:
    """Plans the forward pass of ``flash`` on sm_90. ``batch`` only scales the scratch and may be symbolic."""
    tile = forward_tile(problem)
    keys = [forward_key(problem, tile)]
    scratch_bytes = _SCRATCH_ALIGNMENT  # the counter of work items
    if problem.segments:
        keys.append("family=segment_ranges arch=sm_90a")
        tiles = -(-problem.q_len // tile.tile_q) + -(-problem.kv_len // tile.tile_kv)
        scratch_bytes += batch * tiles * 8 + _SCRATCH_ALIGNMENT
    return Plan(";".join(keys), scratch_bytes)


@dataclasses.dataclass(frozen=True)
class _HotBand:
    unbounded: bool


@dataclasses.dataclass(frozen=True)
class _HotProblem:
    """Self-attention without further features."""

    dtype: str
    head_dim: int
    head_dim_v: int
    band: _HotBand
    q_len: int = 4096
    kv_len: int = 4096
    scale: float = 1.0
    softcap: float = 0.0
    q_lengths: bool = False
    kv_lengths: bool = False
    segments: bool = False


_HOT_HEAD_DIMS = {
    "bfloat16": ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)),
    "float16": ((64, 64), (128, 128)),
}


def hot_keys() -> tuple[str, ...]:
    """Returns the kernel keys of the common problems, in the order and spelling of ``cc/core/hot_set.txt``."""
    keys: dict[str, None] = {}
    for dtype, head_dims in _HOT_HEAD_DIMS.items():
        for head_dim, head_dim_v in head_dims:
            for unbounded in (True, False):
                problem = _HotProblem(dtype, head_dim, head_dim_v, _HotBand(unbounded))
                keys[plan_forward(problem, 1).kernels] = None
    return tuple(keys)
