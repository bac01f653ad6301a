"""Tiles, stages and warps of the CUDA kernels: the one place that picks them and composes kernel keys.

Shared memory is counted as the kernels count it (``cc/kernels/sm80/*_shape.cuh``); a test compares the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

_ELEMENTS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


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
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def softcap(self) -> float: ...
    @property
    def band(self) -> _Band: ...
    @property
    def bias(self) -> tuple[int, ...] | None: ...
    @property
    def bias_dtype(self) -> str: ...
    @property
    def mask(self) -> tuple[int, ...] | None: ...
    @property
    def q_lengths(self) -> bool: ...
    @property
    def kv_lengths(self) -> bool: ...
    @property
    def segments(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Tile:
    """The compile-time shape of one kernel; head dims are those of its tiles in shared memory."""

    head_dim: int
    head_dim_v: int
    tile_q: int
    tile_kv: int
    num_warps: int
    stages: int
    result_dim: int = 0


def shared_limit_bytes(arch: tuple[int, int]) -> int:
    """Dynamic shared memory that a block may have (CUDA C++ Programming Guide, compute capabilities)."""
    major, minor = arch
    if (major, minor) in ((8, 0), (8, 7)):
        return 163 * 1024
    if major in (8, 12):
        return 99 * 1024
    return 227 * 1024


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _element_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def forward_shared_bytes(tile: Tile, dtype: str) -> int:
    """Shared memory of the sm80 forward kernel."""
    loop = tile.tile_q * tile.head_dim + tile.stages * tile.tile_kv * (
        tile.head_dim + tile.head_dim_v
    )
    return max(loop, tile.tile_q * tile.head_dim_v) * _element_bytes(dtype)


def _forward_candidates(dtype: str, head_dim_v: int) -> Sequence[tuple[int, int, int, int]]:
    """(tile_q, tile_kv, num_warps, stages), best first; the first that fits into shared memory is taken.

    A warp of 32 rows reads each key and value fragment for twice the products of one of 16 rows, but its accumulators of
    32 x head_dim_v leave registers only up to 128 columns. Two blocks of four warps share a multiprocessor.
    """
    if dtype == "float32":
        if head_dim_v <= 64:
            return (
                (128, 64, 4, 2),
                (128, 32, 4, 1),
                (64, 32, 4, 1),
                (32, 32, 2, 1),
                (16, 16, 1, 1),
            )
        if head_dim_v <= 128:
            return ((128, 32, 4, 1), (64, 32, 4, 1), (32, 32, 2, 1), (16, 16, 1, 1))
        return ((64, 32, 4, 1), (32, 32, 2, 1), (32, 16, 2, 1), (16, 16, 1, 1))
    if head_dim_v <= 64:
        return ((128, 128, 4, 2), (128, 128, 4, 1), (128, 64, 4, 1), (64, 32, 4, 1), (32, 16, 2, 1))
    if head_dim_v <= 128:
        return ((128, 64, 4, 2), (128, 64, 4, 1), (64, 32, 4, 1), (32, 16, 2, 1))
    return ((128, 64, 8, 2), (128, 64, 8, 1), (64, 64, 4, 1), (64, 32, 4, 1), (32, 16, 2, 1))


def forward_tile(problem: Problem, arch: tuple[int, int]) -> Tile:
    """Picks the tile of the sm80 forward kernel."""
    head_dim = _round_up(problem.head_dim, 32)
    slices = -(-problem.head_dim_v // 256)
    head_dim_v = _round_up(-(-problem.head_dim_v // slices), 32)
    limit = shared_limit_bytes(arch)
    for tile_q, tile_kv, num_warps, stages in _forward_candidates(problem.dtype, head_dim_v):
        tile = Tile(head_dim, head_dim_v, tile_q, tile_kv, num_warps, stages)
        if forward_shared_bytes(tile, problem.dtype) <= limit:
            return tile
    raise ValueError(
        f"head_dim {problem.head_dim} and {problem.head_dim_v} do not fit into {limit} bytes of shared memory"
    )


def _key(family: str, arch: tuple[int, int], members: dict[str, str | int]) -> str:
    words = {"family": family, "arch": f"sm_{arch[0]}{arch[1]}", **members}
    return " ".join(f"{name}={value}" for name, value in words.items())


def kernel_key(family: str, problem: Problem, arch: tuple[int, int], tile: Tile) -> str:
    """Composes the key of an attention kernel, in the order of ``Config``; members that stay at their default are left out."""
    wide = 16 // _element_bytes(problem.dtype)
    members: dict[str, str | int] = {
        "element": _ELEMENTS[problem.dtype],
        "head_dim": tile.head_dim,
        "head_dim_v": tile.head_dim_v,
        "tile_q": tile.tile_q,
        "tile_kv": tile.tile_kv,
        "num_warps": tile.num_warps,
        "stages": tile.stages,
    }
    if problem.bias is not None:
        members["bias_element"] = _ELEMENTS[problem.bias_dtype]
    flags = {
        "band": not problem.band.unbounded,
        "lengths": problem.q_lengths or problem.kv_lengths,
        "segments": problem.segments,
        "mask": problem.mask is not None,
        "bias": problem.bias is not None,
        "softcap": problem.softcap > 0,
        "narrow_rows": problem.head_dim % wide != 0 or problem.head_dim_v % wide != 0,
    }
    members |= {name: 1 for name, used in flags.items() if used}
    if tile.result_dim:
        members["result_dim"] = tile.result_dim
    return _key(family, arch, members)


def _pass_key(family: str, arch: tuple[int, int], **members: str | int) -> str:
    return _key(family, arch, members)


def _segment_ranges_bytes(problem: Problem, batch: int, tile: Tile) -> int:
    if not problem.segments:
        return 0
    tiles = -(-problem.q_len // tile.tile_q) + -(-problem.kv_len // tile.tile_kv)
    return batch * tiles * 8 + 256


@dataclasses.dataclass(frozen=True)
class Plan:
    """The kernels of one call, and the scratch it needs.

    Attributes:
      kernels: kernel keys joined by ';'.
      scratch_bytes: of the call; linear in the batch.
    """

    kernels: str
    scratch_bytes: int


def plan_forward(problem: Problem, batch: int, arch: tuple[int, int]) -> Plan:
    """Plans the forward pass of ``mem_efficient``. ``batch`` only scales the scratch and may be symbolic."""
    tile = forward_tile(problem, arch)
    keys = [kernel_key("sm80_forward", problem, arch, tile)]
    if problem.segments:
        keys.append(_pass_key("segment_ranges", arch))
    return Plan(";".join(keys), _segment_ranges_bytes(problem, batch, tile))
