"""Tiles, stages and loop order of the Hopper kernels: the one place that picks them and composes kernel keys.

Shared memory is counted as the kernels count it (``cc/kernels/sm90/shape.cuh``); a test compares the two. What was
measured for each choice stands in ``docs/kernels/log.md``.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from jattn.backends.cuda_tiles import mask_tiles_bytes, range_bytes
from jattn.backends.key_splits import choose_splits
from jattn.spec import Dropout

_ELEMENTS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}

# Rows of q, k, v and out are copied by the tensor memory accelerator, whose strides are multiples of 16 bytes.
HEAD_DIM_MULTIPLE = 8
LARGEST_HEAD_DIM = 256
MAX_SHARED_BYTES = 227 * 1024

_HEAD_DIM_TILES = (64, 96, 128, 192, 256)
_SCHEDULE_BY_COUNTER = 2
_SOFTMAX_LAST, _IN_SERIES = 1, 2
_SCRATCH_ALIGNMENT = 256
_MAX_DOCUMENTS = 1024  # cc/kernels/sm90/shape.cuh
_DOCUMENT_TILE_BYTES = 32

# Of the pre-pass that packs a dense mask.
MASK_KEY = "family=mask_tiles arch=sm_90a"


class _Band(Protocol):
    @property
    def left(self) -> int: ...
    @property
    def right(self) -> int: ...
    @property
    def lower_right(self) -> bool: ...
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
    @property
    def positions(self) -> bool: ...
    @property
    def bias(self) -> tuple[int, ...] | None: ...
    @property
    def bias_dtype(self) -> str: ...
    @property
    def mask(self) -> tuple[int, ...] | None: ...
    @property
    def sinks(self) -> tuple[int, int] | None: ...
    @property
    def alibi_slopes(self) -> tuple[int, int] | None: ...
    @property
    def dropout(self) -> Dropout | None: ...


@dataclasses.dataclass(frozen=True)
class Tile:
    """The compile-time shape of one kernel.

    Attributes:
      head_dim, head_dim_v: of the tiles in shared memory; at least those of the problem.
      loop_order, chain_items, q_in_registers, integer_max, staged_bias, row_bias, take_turns,
        cap_series, documents: see ``Config``.
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
    staged_bias: bool = False
    row_bias: bool = False
    take_turns: bool = False
    cap_series: bool = False
    documents: bool = False

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


def forward_shared_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory of the forward kernel."""
    q_buffers = 2 if tile.chain_items else 1
    q = q_buffers * _tile_bytes(tile.tile_q, tile.head_dim)
    out = _tile_bytes(tile.tile_q, tile.head_dim_v)
    stage = _tile_bytes(tile.tile_kv, tile.head_dim) + _tile_bytes(tile.tile_kv, tile.head_dim_v)
    if tile.staged_bias:
        stage += _tile_bytes(tile.tile_q, tile.tile_kv)
    slots = 2 * q_buffers
    columns = tile.stages * tile.tile_kv
    barriers = 8 * (1 + 2 * q_buffers + 4 * tile.stages)
    control = barriers + 8 + 8 * tile.stages + slots * 32
    control += 4 * (slots * tile.tile_q + columns) * (problem.segments + problem.positions)
    control += 4 * columns if tile.row_bias else 0
    control += 16 * tile.stages * tile.tile_q if problem.mask is not None else 0
    head_numbers = _has_head_numbers(problem)
    control += 24 * slots if head_numbers else 0
    if problem.mask is not None or tile.row_bias or problem.positions or head_numbers:
        control += 96
    rest = tile.stages * stage + control
    own_out = q + out + rest
    return own_out if own_out <= MAX_SHARED_BYTES else max(q, out) + rest


def _has_head_numbers(problem: Problem) -> bool:
    found = (problem.sinks, problem.alibi_slopes, problem.dropout)
    return any(feature is not None for feature in found)


def _can_list_documents(problem: Problem) -> bool:
    """Whether tiles may begin with runs of segment ids (``Config::documents``)."""
    return problem.segments and _is_plain(problem) and not (problem.q_lengths or problem.kv_lengths)


def _document_tiles_bytes(problem: Problem, tile: Tile) -> int:
    """Scratch of the list of document tiles of a batch entry (``max_document_tiles``)."""
    return (-(-problem.q_len // tile.tile_q) + _MAX_DOCUMENTS) * _DOCUMENT_TILE_BYTES


def _can_stage(problem: Problem) -> bool:
    """Whether the tensor memory accelerator can copy tiles of the bias: the type of q, rows on 16-byte boundaries."""
    if problem.bias is None or problem.bias_dtype != problem.dtype:
        return False
    both = problem.bias[2] == problem.q_len > 1 and problem.bias[3] == problem.kv_len > 1
    return both and problem.kv_len % 8 == 0


def _count_terms(problem: Problem) -> int:
    """How many terms and tests every pair has."""
    terms = (problem.bias, problem.mask, problem.alibi_slopes, problem.dropout)
    found = sum(term is not None for term in terms)
    return found + problem.positions + problem.segments + (problem.softcap > 0)


def _is_plain(problem: Problem) -> bool:
    """Whether nothing needs registers beside the products and the softmax."""
    return _count_terms(problem) == problem.segments + (problem.softcap > 0)


def _reads_bias_directly(problem: Problem) -> bool:
    """Whether the bias is read where it lies, by addresses that take registers."""
    return problem.bias is not None and problem.bias[2] != 1 and not _can_stage(problem)


def _tile_with_terms(problem: Problem, head_dim: int, head_dim_v: int) -> Tile:
    """Picks the tile of a problem with terms or tests for every pair: two consumer warpgroups, q in shared memory.

    A bias is staged where a tile of it fits beside the stages, if need be with fewer keys.
    """
    row_bias = problem.bias is not None and problem.bias[2] == 1
    light = _count_terms(problem) == 1 and problem.dropout is None
    light = light and not _reads_bias_directly(problem)
    if light and max(head_dim, head_dim_v) <= 64 and not problem.positions:
        has_tiles = problem.bias is not None and not row_bias
        return Tile(
            head_dim,
            head_dim_v,
            192,
            128,
            stages=2 if has_tiles else 4,
            loop_order=_SOFTMAX_LAST,
            chain_items=not has_tiles,
            integer_max=True,
            staged_bias=has_tiles,
            row_bias=row_bias,
        )
    stages = 3 if max(head_dim, head_dim_v) <= 64 else 2
    found: Tile | None = None
    # Registers: with 256 columns of output two products stay in flight only beside a single term.
    terms = _count_terms(problem)
    in_series = head_dim_v > 192 and (terms > 1 or _reads_bias_directly(problem))
    for tile_kv in (128, 96, 64) if terms < 4 else (96, 64, 32):
        tile = Tile(
            head_dim,
            head_dim_v,
            128,
            tile_kv,
            stages=stages,
            loop_order=_IN_SERIES if in_series else 0,
            q_in_registers=light and max(head_dim, head_dim_v) <= 128,
            integer_max=head_dim_v <= 128,
            row_bias=row_bias,
        )
        if head_dim_v // 2 + 3 * tile_kv // 4 > 192:
            continue
        if _can_stage(problem):
            staged = dataclasses.replace(tile, staged_bias=True)
            if forward_shared_bytes(staged, problem) <= MAX_SHARED_BYTES:
                return staged
        if found is None and forward_shared_bytes(tile, problem) <= MAX_SHARED_BYTES:
            found = tile
    if found is None:
        raise AssertionError("every head dim up to LARGEST_HEAD_DIM has a tile of 32 keys")
    return found


def _head_dim_tile(head_dim: int) -> int:
    return next(tile for tile in _HEAD_DIM_TILES if tile >= head_dim)


_CHANGES: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar(
    "changes of forward tiles", default=None
)


@contextlib.contextmanager
def forward_tile_changes(**changes: Any) -> Iterator[None]:
    """Changes members of the tiles that are picked, for calls traced in the context by this thread.

    For measurements of tiles that are not picked. Where a problem or the rest of its tile cannot go
    with ``take_turns``, ``cap_series`` or ``documents``, these stay away.
    """
    token = _CHANGES.set(changes)
    try:
        yield
    finally:
        _CHANGES.reset(token)


def forward_tile(problem: Problem) -> Tile:
    """Picks the tile of the forward kernel.

    Raises:
      ValueError: a head dim is larger than LARGEST_HEAD_DIM.
    """
    tile = _picked_forward_tile(problem)
    changes = _CHANGES.get()
    if changes is None:
        return tile
    tile = dataclasses.replace(tile, **changes)
    adds_terms = problem.bias is not None or problem.alibi_slopes is not None
    capped = problem.softcap > 0 and not adds_terms
    tile = dataclasses.replace(
        tile,
        take_turns=tile.take_turns and tile.loop_order != _IN_SERIES,
        cap_series=tile.cap_series and capped and tile.integer_max,
        documents=tile.documents and _can_list_documents(problem),
    )
    chains = tile.chain_items and not (tile.take_turns or tile.documents)
    return dataclasses.replace(tile, chain_items=chains)


def _picked_forward_tile(problem: Problem) -> Tile:
    if max(problem.head_dim, problem.head_dim_v) > LARGEST_HEAD_DIM:
        raise ValueError(
            f"head dims {problem.head_dim} and {problem.head_dim_v}: at most {LARGEST_HEAD_DIM}"
        )
    head_dim, head_dim_v = _head_dim_tile(problem.head_dim), _head_dim_tile(problem.head_dim_v)
    largest = max(head_dim, head_dim_v)
    if not _is_plain(problem):
        return _tile_with_terms(problem, head_dim, head_dim_v)
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
    # Measured with 32/8 heads at 8192 keys: 692 TFLOP/s against 668; with one head per group equal, causal worse.
    shared_keys = problem.num_heads >= 4 * problem.num_kv_heads and problem.q_len >= 2048
    full = problem.band.unbounded and not problem.segments and not problem.softcap > 0
    if head_dim == head_dim_v == 128 and shared_keys and full:
        return Tile(128, 128, 192, 128, loop_order=_IN_SERIES, integer_max=True)
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
        if registers <= 192 and forward_shared_bytes(tile, problem) <= MAX_SHARED_BYTES:
            return tile
    raise AssertionError("every head dim up to LARGEST_HEAD_DIM has a tile of 64 keys")


def forward_key(problem: Problem, tile: Tile, *, partial: bool = False) -> str:
    """Composes the key of the forward kernel, in the order of ``Config``; members at their default are left out.

    ``partial``: of the kernel that sees a part of the keys and leaves sinks to ``forward_combine``.
    """
    members: dict[str, str | int] = {
        "family": "sm90_forward",
        "arch": "sm_90a",
        "element": _ELEMENTS[problem.dtype],
        **({"bias_element": _ELEMENTS[problem.bias_dtype]} if problem.bias is not None else {}),
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
        "mask": problem.mask is not None,
        "bias": problem.bias is not None,
        "softcap": softcap,
        "positions": problem.positions,
        "sinks": problem.sinks is not None and not partial,
        "alibi": problem.alibi_slopes is not None,
        "dropout": problem.dropout is not None,
        "dropout_rows": problem.dropout is not None and problem.dropout.rows,
        "staged_bias": tile.staged_bias,
        "row_bias": tile.row_bias,
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
    if partial:
        members["partial_results"] = 1
    if tile.take_turns:
        members["take_turns"] = 1
    if tile.cap_series:
        members["cap_series"] = 1
    if tile.documents:
        members["documents"] = 1
    return " ".join(f"{name}={value}" for name, value in members.items())


def combine_key(problem: Problem, splits: int) -> str:
    """Composes the key of the kernel that adds up the parts of the keys."""
    key = f"family=forward_combine arch=sm_90a element={_ELEMENTS[problem.dtype]}"
    if problem.sinks is not None:
        key += " sinks=1"
    return f"{key} key_splits={splits}"


def plan_forward(problem: Problem, batch: int, heads: int | None = None) -> Plan:
    """Plans the forward pass of ``flash`` on sm_90.

    ``batch`` scales the scratch and may be symbolic; keys are split only if it is a number and ``heads``, those with
    tiles of their own, are given.
    """
    tile = forward_tile(problem)
    splits = 1
    if heads is not None and isinstance(batch, int):
        splits = choose_splits(problem, batch * heads, tile.tile_q, tile.tile_kv)
    if splits > 1:
        tile = dataclasses.replace(tile, documents=False)
    keys = [forward_key(problem, tile, partial=splits > 1)]
    scratch_bytes = _SCRATCH_ALIGNMENT  # the counter of work items
    if splits > 1:
        keys.append(combine_key(problem, splits))
        rows = splits * batch * problem.num_heads * problem.q_len
        scratch_bytes += rows * (16 + 4 * problem.head_dim_v)  # RowPart, float32 rows of the output
    if problem.segments:
        keys.append("family=segment_ranges arch=sm_90a")
    if tile.documents:
        keys.append("family=document_tiles arch=sm_90a")
        scratch_bytes += batch * _document_tiles_bytes(problem, tile)
    if problem.positions and not problem.band.unbounded:
        keys.append("family=position_ranges arch=sm_90a")
    scratch_bytes += range_bytes(problem, batch, tile.tile_q, tile.tile_kv)
    if problem.mask is not None:
        keys.append(MASK_KEY)
        scratch_bytes += mask_tiles_bytes(problem.mask, tile.tile_q, tile.tile_kv)
    return Plan(";".join(keys), scratch_bytes)


@dataclasses.dataclass(frozen=True)
class HotBand:
    unbounded: bool
    left: int = 0
    right: int = 0
    lower_right: bool = False


@dataclasses.dataclass(frozen=True)
class HotProblem:
    """Self-attention without further features."""

    dtype: str
    head_dim: int
    head_dim_v: int
    band: HotBand
    q_len: int = 4096
    kv_len: int = 4096
    num_heads: int = 16
    num_kv_heads: int = 16
    scale: float = 1.0
    softcap: float = 0.0
    q_lengths: bool = False
    kv_lengths: bool = False
    segments: bool = False
    positions: bool = False
    bias: tuple[int, ...] | None = None
    bias_dtype: str = ""
    mask: tuple[int, ...] | None = None
    sinks: tuple[int, int] | None = None
    alibi_slopes: tuple[int, int] | None = None
    dropout: Dropout | None = None


_HOT_HEAD_DIMS = {
    "bfloat16": ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)),
    "float16": ((64, 64), (128, 128)),
}


# What is added to scores most often, by the head dims and the bands (full, causal) that it goes with; bfloat16.
_HOT_TERMS: tuple[tuple[dict[str, Any], tuple[int, ...], tuple[bool, ...]], ...] = (
    ({"bias": (1, 16, 4096, 4096), "bias_dtype": "bfloat16"}, (64, 128), (True,)),
    ({"mask": (1, 1, 4096, 4096)}, (64, 128), (True,)),
    ({"dropout": Dropout((4, 16))}, (64, 128), (True, False)),
    ({"sinks": (1, 16)}, (64, 128), (False,)),
    ({"softcap": 50.0}, (128, 256), (False,)),
)


def _hot_problems() -> Iterator[HotProblem]:
    """Yields the common problems."""
    for dtype, all_head_dims in _HOT_HEAD_DIMS.items():
        for head_dims in all_head_dims:
            for unbounded in (True, False):
                yield HotProblem(dtype, *head_dims, HotBand(unbounded))
    yield HotProblem("bfloat16", 128, 128, HotBand(True), num_heads=32, num_kv_heads=8)
    for term, widths, bands in _HOT_TERMS:
        for width in widths:
            for unbounded in bands:
                yield HotProblem("bfloat16", width, width, HotBand(unbounded), **term)


def hot_keys() -> tuple[str, ...]:
    """Returns the kernel keys of the common problems, in the order and spelling of ``cc/core/hot_set.txt``."""
    keys: dict[str, None] = {}
    for problem in _hot_problems():
        keys |= dict.fromkeys(plan_forward(problem, 1).kernels.split(";"))
    return tuple(keys)
