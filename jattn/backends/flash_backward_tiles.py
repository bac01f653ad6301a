"""Tiles, stages and kernel keys of the Hopper backward pass: the one place that picks them.

Shared memory is counted as the kernels count it (``cc/kernels/sm90/backward_shape.cuh``); a test compares the two.
What was measured for each choice stands in ``docs/kernels/log-backward.md``.
"""

from __future__ import annotations

import dataclasses

from jattn.backends.flash_tiles import LARGEST_HEAD_DIM, MAX_SHARED_BYTES, Plan, Problem

_ELEMENTS = {"float16": "f16", "bfloat16": "bf16"}
_ARCH = "sm_90a"
_NUM_WARPS = 12
_SCRATCH_ALIGNMENT = 256
_STATISTICS_ROWS = 128
# Above this head dim one warpgroup cannot hold both dk and dv of its keys.
_LARGEST_FUSED_HEAD_DIM = 128


@dataclasses.dataclass(frozen=True)
class Tile:
    """The compile-time shape of one kernel.

    Attributes:
      head_dim, head_dim_v: of the tiles in shared memory; at least those of the problem.
      ds_in_registers, bulk_reduce: see ``Config``.
    """

    head_dim: int
    head_dim_v: int
    tile_q: int
    tile_kv: int
    stages: int = 2
    ds_in_registers: bool = False
    bulk_reduce: bool = False


def _tile_bytes(rows: int, columns: int) -> int:
    return -(-columns // 64) * rows * 128


def _control_bytes(tile: Tile, segments: bool, *, owns_queries: bool) -> int:
    statistics = 32 if owns_queries else 2 * tile.stages * 4 * tile.tile_q
    owned, visited = tile.tile_kv, tile.tile_q
    if owns_queries:
        owned, visited = visited, owned
    ids = 4 * (owned + tile.stages * visited) if segments else 8
    barriers = 8 * (2 + 4 * tile.stages + 4)
    return -(-(statistics + ids + 16 * tile.stages + 32 + barriers) // 16) * 16


def keys_shared_bytes(tile: Tile, segments: bool, *, fused: bool) -> int:
    """Shared memory of the kernels that own keys."""
    keys = _tile_bytes(tile.tile_kv, tile.head_dim) + _tile_bytes(tile.tile_kv, tile.head_dim_v)
    queries = _tile_bytes(tile.tile_q, tile.head_dim) + _tile_bytes(tile.tile_q, tile.head_dim_v)
    exchanged = 2 * tile.tile_kv * tile.tile_q * 2 if fused or _splits(tile) else 0
    staging = tile.tile_q * tile.head_dim * 4 if fused and tile.bulk_reduce else 0
    control = _control_bytes(tile, segments, owns_queries=False)
    return keys + tile.stages * queries + exchanged + staging + control


def queries_shared_bytes(tile: Tile, segments: bool) -> int:
    """Shared memory of the kernel that owns queries."""
    queries = _tile_bytes(tile.tile_q, tile.head_dim) + _tile_bytes(tile.tile_q, tile.head_dim_v)
    k, v = _tile_bytes(tile.tile_kv, tile.head_dim), _tile_bytes(tile.tile_kv, tile.head_dim_v)
    rest = queries + tile.stages * k + _control_bytes(tile, segments, owns_queries=True)
    both = rest + tile.stages * v
    return both if both <= MAX_SHARED_BYTES else rest + v


def _splits(tile: Tile) -> bool:
    return max(tile.head_dim, tile.head_dim_v) > _LARGEST_FUSED_HEAD_DIM


def _head_dim_tile(head_dim: int) -> int:
    return -(-head_dim // 64) * 64


def _check_head_dims(problem: Problem) -> None:
    if max(problem.head_dim, problem.head_dim_v) > LARGEST_HEAD_DIM:
        raise ValueError(
            f"head dims {problem.head_dim} and {problem.head_dim_v}: at most {LARGEST_HEAD_DIM}"
        )


def keys_tile(problem: Problem, *, fused: bool) -> Tile:
    """Picks the tile of the kernels that own keys: with dq, as far as the head dims allow, or without it.

    Raises:
      ValueError: a head dim is larger than LARGEST_HEAD_DIM.
    """
    _check_head_dims(problem)
    head_dim, head_dim_v = _head_dim_tile(problem.head_dim), _head_dim_tile(problem.head_dim_v)
    if max(head_dim, head_dim_v) > _LARGEST_FUSED_HEAD_DIM:
        return Tile(head_dim, head_dim_v, tile_q=64, tile_kv=64)
    tile = Tile(head_dim, head_dim_v, tile_q=64, tile_kv=128)
    if problem.softcap > 0 or head_dim != head_dim_v:
        return tile
    if head_dim == 64:
        return dataclasses.replace(tile, tile_q=128, bulk_reduce=fused)
    if problem.band.unbounded:
        return dataclasses.replace(tile, ds_in_registers=fused)
    return dataclasses.replace(tile, bulk_reduce=fused)


def queries_tile(problem: Problem) -> Tile:
    """Picks the tile of the kernel that owns queries.

    Raises:
      ValueError: a head dim is larger than LARGEST_HEAD_DIM.
    """
    _check_head_dims(problem)
    head_dim, head_dim_v = _head_dim_tile(problem.head_dim), _head_dim_tile(problem.head_dim_v)
    # A consumer thread holds head_dim / 2 values of dq, tile_kv scores and their gradients, tile_kv / 4 packed words.
    if problem.softcap > 0 or max(head_dim, head_dim_v) > 128:
        tile_kv = 64
    else:
        tile_kv = 128 if max(head_dim, head_dim_v) == 64 else 96
    return Tile(head_dim, head_dim_v, tile_q=128, tile_kv=tile_kv)


def _key(family: str, **members: str | int) -> str:
    words = {"family": family, "arch": _ARCH, **members}
    return " ".join(f"{name}={value}" for name, value in words.items())


def _attention_key(family: str, problem: Problem, tile: Tile) -> str:
    """Composes a key in the order of ``Config``; members at their default are left out."""
    softcap = problem.softcap > 0
    flags = {
        "band": not problem.band.unbounded,
        "lengths": problem.q_lengths or problem.kv_lengths,
        "segments": problem.segments,
        "softcap": softcap,
    }
    members: dict[str, str | int] = {
        "element": _ELEMENTS[problem.dtype],
        "head_dim": tile.head_dim,
        "head_dim_v": tile.head_dim_v,
        "tile_q": tile.tile_q,
        "tile_kv": tile.tile_kv,
        "num_warps": _NUM_WARPS,
        "stages": tile.stages,
    }
    members |= {name: 1 for name, used in flags.items() if used}
    if not problem.scale > 0 and not softcap:
        members["scale_first"] = 1
    if tile.ds_in_registers:
        members["ds_in_registers"] = 1
    if tile.bulk_reduce:
        members["bulk_reduce"] = 1
    return _key(family, **members)


def _ranges_bytes(problem: Problem, batch: int, tile: Tile) -> int:
    if not problem.segments:
        return 0
    tiles = -(-problem.q_len // tile.tile_q) + -(-problem.kv_len // tile.tile_kv)
    return batch * tiles * 8 + _SCRATCH_ALIGNMENT


def plan_backward(
    problem: Problem,
    batch: int,
    num_heads: int,
    *,
    wants: tuple[bool, bool, bool],
    deterministic: bool,
) -> Plan:
    """Plans the backward pass of ``flash`` on sm_90.

    Args:
      problem: the problem; head dims are multiples of ``flash_tiles.HEAD_DIM_MULTIPLE``.
      batch: scales the scratch only; may be symbolic.
      num_heads: of the queries; scales the scratch only.
      wants: which of dq, dk and dv are wanted.
      deterministic: the same bits every time: dq by a kernel of its own instead of by reductions in memory.
        Head dims above 128 always run so.

    Returns:
      The plan; its kernels are those that the wanted gradients need.
    """
    want_q, want_k, want_v = wants
    want_keys = want_k or want_v
    element = _ELEMENTS[problem.dtype]
    keys = keys_tile(problem, fused=want_q and not deterministic)
    fused = want_q and want_keys and not deterministic and not _splits(keys)

    rows = batch * num_heads * (-(-problem.q_len // _STATISTICS_ROWS) * _STATISTICS_ROWS)
    scratch = 2 * (rows * 4 + _SCRATCH_ALIGNMENT) + rows // _STATISTICS_ROWS + _SCRATCH_ALIGNMENT
    kernels = [
        _key(
            "backward_prepare",
            element=element,
            head_dim_v=_head_dim_tile(problem.head_dim_v),
        )
    ]
    if want_keys:
        family = "sm90_backward" if fused else "sm90_backward_dkv"
        kernels.append(_attention_key(family, problem, keys))
        scratch += _ranges_bytes(problem, batch, keys)
    if fused:
        kernels.append(
            _key("backward_cast", element=element, head_dim=keys.head_dim, tile_q=keys.tile_q)
        )
        counters = (
            batch * num_heads * 4
        )  # one for each key/value head, of which there are at most as many
        scratch += rows * keys.head_dim * 4 + counters + 2 * _SCRATCH_ALIGNMENT
    elif want_q:
        tile = queries_tile(problem)
        kernels.append(_attention_key("sm90_backward_dq", problem, tile))
        scratch += _ranges_bytes(problem, batch, tile)
    if problem.segments:
        kernels.append(_key("segment_ranges"))
    return Plan(";".join(kernels), scratch)


@dataclasses.dataclass(frozen=True)
class _HotBand:
    unbounded: bool


@dataclasses.dataclass(frozen=True)
class _HotProblem:
    """Self-attention without further features."""

    dtype: str
    head_dim: int
    band: _HotBand
    q_len: int = 4096
    kv_len: int = 4096
    scale: float = 1.0
    softcap: float = 0.0
    q_lengths: bool = False
    kv_lengths: bool = False
    segments: bool = False

    @property
    def head_dim_v(self) -> int:
        return self.head_dim


_HOT_HEAD_DIMS = {"bfloat16": (64, 128, 256), "float16": (64, 128)}


def hot_keys() -> tuple[str, ...]:
    """Returns the kernel keys of the common problems, in the order and spelling of ``cc/core/hot_set.txt``."""
    keys: dict[str, None] = {}
    for dtype, head_dims in _HOT_HEAD_DIMS.items():
        for head_dim in head_dims:
            for unbounded in (True, False):
                problem = _HotProblem(dtype, head_dim, _HotBand(unbounded))
                plan = plan_backward(problem, 1, 1, wants=(True, True, True), deterministic=False)
                keys |= dict.fromkeys(plan.kernels.split(";"))
    return tuple(keys)
