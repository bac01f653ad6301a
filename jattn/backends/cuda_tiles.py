"""Tiles, stages and warps of the CUDA kernels: the one place that picks them and composes kernel keys.

Shared memory is counted as the kernels count it (``cc/kernels/sm80/*_shape.cuh``); a test compares the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

_ELEMENTS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}


class _Band(Protocol):
    @property
    def unbounded(self) -> bool: ...


class _Dropout(Protocol):
    @property
    def rows(self) -> bool: ...


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
    @property
    def positions(self) -> bool: ...
    @property
    def sinks(self) -> tuple[int, int] | None: ...
    @property
    def alibi_slopes(self) -> tuple[int, int] | None: ...
    @property
    def dropout(self) -> _Dropout | None: ...


@dataclasses.dataclass(frozen=True)
class Tile:
    """The compile-time shape of one kernel; head dims are those of its tiles in shared memory."""

    head_dim: int
    head_dim_v: int
    tile_q: int
    tile_kv: int
    num_warps: int
    stages: int
    grad_slices: int = 1
    shared_scores: bool = False
    staged_bias: bool = False


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


def _is_number(extent: object) -> bool:
    return isinstance(extent, int)


def _element_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _blocks(shared_bytes: int, limit: int) -> int:
    """How many blocks share a multiprocessor, as far as it matters: 0, 1 or 2.

    It has 1 KiB more than one block may use, and keeps 1 KiB for each block.
    """
    return min(2, (limit + 1024) // (shared_bytes + 1024))


def _can_stage(
    shape: tuple[int, ...] | None, element_bytes: int, problem: Problem, tile_kv: int
) -> bool:
    """Whether tiles of a bias can be copied to shared memory: both axes, rows on 16-byte boundaries."""
    if shape is None:
        return False
    both = shape[2] == problem.q_len > 1 and shape[3] == problem.kv_len > 1
    return both and problem.kv_len * element_bytes % 16 == 0 and tile_kv * element_bytes % 64 == 0


def staged_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory of one stage for the tile of a bias."""
    return (
        tile.tile_q * tile.tile_kv * _element_bytes(problem.bias_dtype) if tile.staged_bias else 0
    )


def _stage(
    tile: Tile, problem: Problem, arch: tuple[int, int], bytes_of: Callable[[Tile], int]
) -> Tile:
    """Lets a tile read the bias through shared memory where that leaves as many blocks on a multiprocessor.

    The tile itself is chosen without it: the bits of a result do not depend on the form of a bias.
    """
    limit = shared_limit_bytes(arch)
    staged = dataclasses.replace(
        tile,
        staged_bias=_can_stage(
            problem.bias, _element_bytes(problem.bias_dtype), problem, tile.tile_kv
        ),
    )

    unchanged = _blocks(bytes_of(staged), limit) == _blocks(bytes_of(tile), limit)
    return staged if unchanged else tile


def forward_shared_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory of the sm80 forward kernel."""
    loop = tile.tile_q * tile.head_dim + tile.stages * tile.tile_kv * (
        tile.head_dim + tile.head_dim_v
    )
    elements = max(loop, tile.tile_q * tile.head_dim_v)
    return elements * _element_bytes(problem.dtype) + staged_bytes(tile, problem) + 48


# (tile_q, tile_kv, num_warps, stages), best first; the first that fits into shared memory is taken.
_Candidates = Sequence[tuple[int, int, int, int]]


def _too_wide(problem: Problem, limit: int) -> ValueError:
    return ValueError(
        f"head_dim {problem.head_dim} and {problem.head_dim_v} in {problem.dtype} do not fit into the "
        f"{limit} bytes of shared memory of the device"
    )


def _forward_candidates(dtype: str, head_dim_v: int) -> _Candidates:
    """Tiles of the forward kernel.

    A warp of 32 rows reads each key and value fragment for twice the products of one of 16 rows, but its
    accumulators of 32 x head_dim_v leave registers only up to 128 columns. Two blocks of four warps share a
    multiprocessor.
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
    candidates = _forward_candidates(problem.dtype, head_dim_v)
    for i, (tile_q, tile_kv, num_warps, stages) in enumerate(candidates):
        tile = Tile(head_dim, head_dim_v, tile_q, tile_kv, num_warps, stages)
        blocks = _blocks(forward_shared_bytes(tile, problem), limit)
        if blocks == 1 and (tile_q, tile_kv, num_warps, 1) in candidates[i + 1 :]:
            # A second block hides more than a second stage.
            single = dataclasses.replace(tile, stages=1)
            if num_warps <= 4 and _blocks(forward_shared_bytes(single, problem), limit) > 1:
                continue
        if blocks > 0:
            return _stage(tile, problem, arch, lambda t: forward_shared_bytes(t, problem))
    raise _too_wide(problem, limit)


def _key(family: str, arch: tuple[int, int], members: dict[str, str | int]) -> str:
    words = {"family": family, "arch": f"sm_{arch[0]}{arch[1]}", **members}
    return " ".join(f"{name}={value}" for name, value in words.items())


def tf32_chain() -> int:
    """How many steps of a float32 product the tensor unit adds up before a rounded addition.

    Its own additions truncate; a rounded one per step takes as long as the product. On an H200, head dim 128, causal,
    TFLOP/s of the forward and of forward and backward: 47.7 and 40.4 with chains of 1, 52.1 and 43.4 of 2, 56.2 and
    48.0 of 4. The largest error over eight problems, as a part of the bound: 0.50, 0.53 and 0.78; with 4 in the
    forward and 2 in the kernels that own keys it was 1.03. So all kernels of a call take the same: dp - delta cancels,
    and so do equal truncations in both.
    """
    return 4


def kernel_key(family: str, problem: Problem, arch: tuple[int, int], tile: Tile) -> str:
    """Composes the key of an attention kernel; members of ``Config`` that stay at their default are left out."""
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
        "positions": problem.positions,
        "sinks": problem.sinks is not None,
        "alibi": problem.alibi_slopes is not None,
        "dropout": problem.dropout is not None,
        "dropout_rows": problem.dropout is not None and problem.dropout.rows,
        "narrow_rows": problem.head_dim % wide != 0 or problem.head_dim_v % wide != 0,
    }
    flags["staged_bias"] = tile.staged_bias
    members |= {name: 1 for name, used in flags.items() if used}
    if tile.shared_scores:
        members["shared_scores"] = 1
    if tile.grad_slices > 1:
        members["grad_slices"] = tile.grad_slices
    if problem.dtype == "float32" and (chain := tf32_chain()) > 1:
        members["tf32_chain"] = chain
    return _key(family, arch, members)


def _pass_key(family: str, arch: tuple[int, int], **members: str | int) -> str:
    return _key(family, arch, members)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The kernels of one call, and the scratch it needs.

    Attributes:
      kernels: kernel keys joined by ';'.
      scratch_bytes: of the call.
    """

    kernels: str
    scratch_bytes: int


_SCRATCH_ALIGNMENT = 256


def _has_position_band(problem: Problem) -> bool:
    return problem.positions and not problem.band.unbounded


_SEGMENT_RANGE_BYTES = 16  # of one tile: SegmentRange and PositionRange in cc/kernels/params.cuh
_POSITION_RANGE_BYTES = 8


def tile_pass_keys(problem: Problem, arch: tuple[int, int]) -> list[str]:
    """Keys of the passes that find out about tiles: ranges of segments and positions, and what a mask hides."""
    needed = {
        "segment_ranges": problem.segments,
        "position_ranges": _has_position_band(problem),
        "mask_tiles": problem.mask is not None,
    }
    return [_pass_key(family, arch) for family, is_needed in needed.items() if is_needed]


def range_bytes(problem: Problem, batch: int, tile_q: int, tile_kv: int) -> int:
    """Scratch for the ranges of segments and positions of one kernel's tiles (``cc/cuda/attention_params.cc``)."""
    tiles = -(-problem.q_len // tile_q) + -(-problem.kv_len // tile_kv)
    segments = batch * tiles * _SEGMENT_RANGE_BYTES + _SCRATCH_ALIGNMENT if problem.segments else 0
    positions = batch * tiles * _POSITION_RANGE_BYTES + _SCRATCH_ALIGNMENT
    return segments + (positions if _has_position_band(problem) else 0)


def _aligned(size: int) -> int:
    """The bytes of a piece of scratch; a symbolic size counts as one that fills its last block hardly at all."""
    return _round_up(size, _SCRATCH_ALIGNMENT) if _is_number(size) else size + _SCRATCH_ALIGNMENT


def mask_tiles_bytes(shape: tuple[int, ...], tile_rows: int, tile_columns: int) -> int:
    """Returns the scratch of one packed mask (``cc/cuda/mask_tiles.cc``).

    Args:
      shape: of the mask, with the axis of the fragments' rows before that of their columns.
      tile_rows, tile_columns: of the kernel that reads it, along these axes.
    """
    batch, heads, rows, columns = shape
    row_tiles = 1 if rows == 1 else -(-rows // tile_rows)
    rows_padded = 1 if rows == 1 else row_tiles * tile_rows
    column_tiles = 1 if columns == 1 else -(-columns // tile_columns)
    tiles = batch * heads * column_tiles
    return _aligned(tiles * rows_padded * 16) + _aligned(tiles * row_tiles)


def _tile_facts_bytes(problem: Problem, batch: int, tile: Tile, *, owns_keys: bool) -> int:
    """Scratch for what the passes say about one kernel's tiles: ranges, and the packed mask."""
    found = range_bytes(problem, batch, tile.tile_q, tile.tile_kv)
    if problem.mask is None:
        return found
    entries, heads, queries, keys = problem.mask
    if owns_keys:
        return found + mask_tiles_bytes((entries, heads, keys, queries), tile.tile_kv, tile.tile_q)
    return found + mask_tiles_bytes((entries, heads, queries, keys), tile.tile_q, tile.tile_kv)


def plan_forward(problem: Problem, batch: int, arch: tuple[int, int]) -> Plan:
    """Plans the forward pass of ``mem_efficient``. ``batch`` only scales the scratch and may be symbolic."""
    tile = forward_tile(problem, arch)
    keys = [kernel_key("sm80_forward", problem, arch, tile)]
    keys += tile_pass_keys(problem, arch)
    return Plan(";".join(keys), _tile_facts_bytes(problem, batch, tile, owns_keys=False))


def keys_shared_bytes(tile: Tile, problem: Problem, *, fused: bool) -> int:
    """Shared memory of the sm80 backward kernels that own keys."""
    rows = tile.tile_kv + tile.stages * tile.tile_q
    score_tiles = 2 if tile.shared_scores else 1 if fused else 0
    elements = rows * (tile.head_dim + tile.head_dim_v) + score_tiles * tile.tile_kv * tile.tile_q
    per_stage = 2 * tile.tile_q * 4 + staged_bytes(tile, problem)
    return elements * _element_bytes(problem.dtype) + tile.stages * per_stage + 64


def queries_shared_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory of the sm80 backward kernel that owns queries."""
    rows = tile.tile_q + tile.stages * tile.tile_kv
    elements = rows * (tile.head_dim + tile.head_dim_v)
    return elements * _element_bytes(problem.dtype) + staged_bytes(tile, problem)


def dbias_shared_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory of the sm80 dbias kernel."""
    elements = (tile.tile_q + tile.tile_kv) * (tile.head_dim + tile.head_dim_v)
    loop = elements * _element_bytes(problem.dtype) + staged_bytes(tile, problem)
    return max(loop, tile.num_warps * tile.tile_kv * 4)


def _backward_width(head_dim: int, slices: int) -> int:
    """Width of a tile whose gradient columns are cut into ``slices`` parts, each stored as a tile of its own."""
    return _round_up(head_dim, 32 * slices)


def _warps_fit(tile: Tile, rows: int, columns: int) -> bool:
    """Whether the warps can share a product in whole fragments (``warp_grid`` in ``sm80/backward_shape.cuh``)."""
    return any(
        tile.num_warps % r == 0
        and rows % (16 * r) == 0
        and columns % (16 * (tile.num_warps // r)) == 0
        for r in range(1, tile.num_warps + 1)
    )


def _all_warps_fit(tile: Tile, *, fused: bool) -> bool:
    """Whether that is so for every product of the backward kernel that owns keys."""
    width, width_v = tile.head_dim // tile.grad_slices, tile.head_dim_v // tile.grad_slices
    fits = not fused or _warps_fit(tile, tile.tile_q, width)
    if tile.shared_scores:
        fits &= _warps_fit(tile, tile.tile_kv, tile.tile_q)
        fits &= _warps_fit(tile, tile.tile_kv, width) and _warps_fit(tile, tile.tile_kv, width_v)
    return fits


def shares_scores(dtype: str, widest: int, *, fused: bool) -> bool:
    """Whether p and ds pass through shared memory in the backward kernel that owns keys.

    On an H200, forward and backward: 2 to 3 % faster at head dim 128, 1 % slower at 64. Without dq the kernel has no
    other reason to put ds there.
    """
    return fused and dtype != "float32" and 64 < widest <= 128


def _keys_candidates(dtype: str, widest: int, slices: int) -> _Candidates:
    if slices > 1:
        last = ((32, 16, 1, 1), (16, 16, 1, 1)) if dtype == "float32" else ((32, 16, 1, 1),)
        return ((64, 64, 4, 2), (64, 64, 4, 1), (32, 64, 4, 1), (32, 32, 2, 1), *last)
    if dtype == "float32":
        return (
            (32, 128, 8, 2),
            (64, 128, 8, 1),
            (64, 64, 4, 1),
            (32, 64, 4, 1),
            (32, 32, 2, 1),
            (16, 16, 1, 1),
        )
    rest = ((64, 128, 8, 2), (64, 128, 8, 1), (64, 64, 4, 1), (32, 32, 2, 1))
    return ((128, 128, 8, 2), *rest) if widest <= 64 else rest


def keys_tile(problem: Problem, arch: tuple[int, int], *, fused: bool) -> Tile:
    """Picks the tile of the backward kernel that owns keys (dk, dv, and dq if fused).

    A warp of 16 keys holds dk and dv of up to 128 columns each in registers; wider heads are cut into slices, each of
    which computes the scores again.
    """
    dtype = problem.dtype
    widest = max(problem.head_dim, problem.head_dim_v)
    slices = -(-widest // 128)
    head_dim = _backward_width(problem.head_dim, slices)
    head_dim_v = _backward_width(problem.head_dim_v, slices)
    limit = shared_limit_bytes(arch)
    # The derivative of the softcap takes as many registers as the scores.
    most_queries = 128 if problem.softcap <= 0 else 64 if widest <= 64 else 32
    for tile_q, tile_kv, num_warps, stages in _keys_candidates(dtype, widest, slices):
        queries = min(tile_q, most_queries)
        own = Tile(head_dim, head_dim_v, queries, tile_kv, num_warps, stages, slices)
        shared = dataclasses.replace(own, shared_scores=True)
        for tile in (shared, own) if shares_scores(dtype, widest, fused=fused) else (own,):
            fits = keys_shared_bytes(tile, problem, fused=fused) <= limit
            if fits and _all_warps_fit(tile, fused=fused):
                return _stage(
                    tile, problem, arch, lambda t: keys_shared_bytes(t, problem, fused=fused)
                )
    raise _too_wide(problem, limit)


def queries_tile(problem: Problem, arch: tuple[int, int]) -> Tile:
    """Picks the tile of the backward kernel that owns queries (dq of the deterministic form)."""
    slices = -(-problem.head_dim // 256)
    head_dim = _backward_width(problem.head_dim, slices)
    head_dim_v = _round_up(problem.head_dim_v, 32)
    candidates: _Candidates = ((64, 32, 4, 1), (32, 32, 2, 1), (16, 16, 1, 1))
    if problem.dtype == "float32":
        if head_dim <= 64:
            candidates = ((128, 32, 4, 1), *candidates)
    elif head_dim <= 64:
        candidates = ((128, 64, 4, 2), (128, 64, 4, 1), *candidates)
    elif head_dim <= 128:
        candidates = ((128, 32, 4, 2), (128, 32, 4, 1), *candidates)
    else:
        candidates = ((64, 32, 4, 2), *candidates)
    limit = shared_limit_bytes(arch)
    for tile_q, tile_kv, num_warps, stages in candidates:
        tile = Tile(head_dim, head_dim_v, tile_q, tile_kv, num_warps, stages, slices)
        if queries_shared_bytes(tile, problem) <= limit:
            return _stage(tile, problem, arch, lambda t: queries_shared_bytes(t, problem))
    raise _too_wide(problem, limit)


def dbias_tile(problem: Problem, arch: tuple[int, int]) -> Tile:
    """Picks the tile of the dbias kernel."""
    head_dim, head_dim_v = _round_up(problem.head_dim, 32), _round_up(problem.head_dim_v, 32)
    candidates: _Candidates = ((64, 32, 4, 1), (32, 32, 2, 1), (16, 16, 1, 1))
    if problem.dtype != "float32":
        candidates = ((64, 64, 4, 1), *candidates)
    limit = shared_limit_bytes(arch)
    for tile_q, tile_kv, num_warps, stages in candidates:
        tile = Tile(head_dim, head_dim_v, tile_q, tile_kv, num_warps, stages)
        if dbias_shared_bytes(tile, problem) <= limit:
            return _stage(tile, problem, arch, lambda t: dbias_shared_bytes(t, problem))
    raise _too_wide(problem, limit)


# Blocks that the dbias kernel is given at least, if there is enough work (``cc/cuda/backward.cc``).
_WANTED_DBIAS_BLOCKS = 512


def _dbias_partials_bytes(problem: Problem, batch: int, tile: Tile) -> int:
    """Scratch for partial sums of dbias: none where the bias alone has tiles enough."""
    assert problem.bias is not None
    bias_batch, bias_heads, queries, keys = problem.bias
    q_tiles, kv_tiles = -(-problem.q_len // tile.tile_q), -(-problem.kv_len // tile.tile_kv)
    tiles_query, tiles_key = (1 if queries == 1 else q_tiles), (1 if keys == 1 else kv_tiles)
    tiles = bias_batch * bias_heads * tiles_query * tiles_key
    if not (_is_number(tiles) and _is_number(batch)):  # the most that any batch can need
        return 2 * _WANTED_DBIAS_BLOCKS * tile.tile_q * tile.tile_kv * 4
    if tiles == 0:
        return 0
    steps = (
        (batch // bias_batch)
        * (problem.num_heads // bias_heads)
        * (q_tiles // tiles_query)
        * (kv_tiles // tiles_key)
    )
    splits = max(1, min(-(-_WANTED_DBIAS_BLOCKS // tiles), steps))
    return splits * bias_batch * bias_heads * queries * keys * 4 if splits > 1 else 0


def plan_backward(
    problem: Problem,
    batch: int,
    arch: tuple[int, int],
    *,
    wants: tuple[bool, bool, bool, bool],
    deterministic: bool,
) -> Plan:
    """Plans the backward pass of ``mem_efficient``.

    Args:
      problem: the problem.
      batch: scales the scratch only; may be symbolic.
      arch: compute capability.
      wants: which of dq, dk, dv and dbias are wanted.
      deterministic: the same bits every time: dq by a kernel of its own instead of by reductions in memory.

    Returns:
      The plan; its kernels are those that the wanted gradients need.
    """
    want_q, want_k, want_v, want_bias = wants
    want_keys = want_k or want_v
    fused = not deterministic and want_q and want_keys
    narrow = problem.head_dim % (16 // _element_bytes(problem.dtype)) or problem.head_dim_v % (
        16 // _element_bytes(problem.dtype)
    )
    element = _ELEMENTS[problem.dtype]

    heads_rows = batch * problem.num_heads * _round_up(problem.q_len, 128)
    scratch = 2 * (heads_rows * 4 + _SCRATCH_ALIGNMENT)
    row_delta: dict[str, str | int] = {
        "element": element,
        "head_dim_v": _round_up(problem.head_dim_v, 32),
    }
    if narrow:
        row_delta["narrow_rows"] = 1
    keys = [_pass_key("row_delta", arch, **row_delta)]
    if want_keys:
        tile = keys_tile(problem, arch, fused=fused)
        keys.append(
            kernel_key("sm80_backward" if fused else "sm80_backward_dkv", problem, arch, tile)
        )
        scratch += _tile_facts_bytes(problem, batch, tile, owns_keys=True)
        if fused:
            cast: dict[str, str | int] = {
                "element": element,
                "head_dim": tile.head_dim,
                "tile_q": tile.tile_q,
                "num_warps": tile.num_warps,
                "grad_slices": tile.grad_slices,
            }
            if narrow:
                cast["narrow_rows"] = 1
            keys.append(_pass_key("cast_grad", arch, **cast))
            scratch += heads_rows * tile.head_dim * 4 + _SCRATCH_ALIGNMENT
    if want_q and not fused:
        tile = queries_tile(problem, arch)
        keys.append(kernel_key("sm80_backward_dq", problem, arch, tile))
        scratch += _tile_facts_bytes(problem, batch, tile, owns_keys=False)
    if want_bias and problem.bias is not None:
        tile = dbias_tile(problem, arch)
        keys.append(kernel_key("sm80_backward_dbias", problem, arch, tile))
        keys.append(_pass_key("sum_partials", arch, bias_element=_ELEMENTS[problem.bias_dtype]))
        scratch += _tile_facts_bytes(problem, batch, tile, owns_keys=False)
        scratch += _dbias_partials_bytes(problem, batch, tile) + _SCRATCH_ALIGNMENT
    keys += tile_pass_keys(problem, arch)
    return Plan(";".join(keys), scratch)


@dataclasses.dataclass(frozen=True)
class _HotBand:
    unbounded: bool


@dataclasses.dataclass(frozen=True)
class _HotProblem:
    """A problem whose kernels are compiled ahead of time; extents that do not matter for the choice are left at 1."""

    dtype: str
    head_dim: int
    band: _HotBand
    q_len: int = 1
    kv_len: int = 1
    num_heads: int = 1
    num_kv_heads: int = 1
    softcap: float = 0.0
    bias: tuple[int, int, int, int] | None = None
    bias_dtype: str = ""
    mask: tuple[int, int, int, int] | None = None
    q_lengths: bool = False
    kv_lengths: bool = False
    segments: bool = False
    positions: bool = False
    sinks: tuple[int, int] | None = None
    alibi_slopes: tuple[int, int] | None = None
    dropout: _Dropout | None = None

    @property
    def head_dim_v(self) -> int:
        return self.head_dim


def hot_keys() -> tuple[str, ...]:
    """Returns the kernel keys of the common problems, in the order and spelling of ``cc/core/hot_set.txt``.

    Self-attention in 16 bits at head dims 64 and 128, full and causal, forward and both forms of the backward, sm_90.
    """
    arch = (9, 0)
    wants = (True, True, True, False)
    keys: dict[str, None] = {}
    for dtype in ("bfloat16", "float16"):
        for head_dim in (64, 128):
            for unbounded in (True, False):
                problem = _HotProblem(dtype, head_dim, _HotBand(unbounded))
                plans = [plan_forward(problem, 1, arch)]
                plans += [
                    plan_backward(problem, 1, arch, wants=wants, deterministic=d)
                    for d in (False, True)
                ]
                for plan in plans:
                    keys |= dict.fromkeys(plan.kernels.split(";"))
    return tuple(keys)
