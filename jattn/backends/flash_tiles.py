"""Tiles, stages and loop order of the Hopper kernels: the one place that picks them and composes kernel keys.

Shared memory is counted as the kernels count it (``cc/kernels/sm90/shape.cuh``); a test compares the two. What was
measured for each choice stands in ``docs/kernels/log.md``.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jattn.backends.kernel_plan import (
    ELEMENTS,
    SCRATCH_ALIGNMENT,
    Plan,
    bias_element,
    compose_key,
    distinct_keys,
    feature_flags,
    hot_problem,
    is_number,
    program_text,
    tile_facts_bytes,
    tile_pass_keys,
)
from jattn.backends.key_splits import choose_splits, packs_heads, rows_of_query
from jattn.spec import Dropout, Spec

KEY_ARCH = "sm_90a"

# Rows of q, k, v and out are copied by the tensor memory accelerator, whose strides are multiples of 16 bytes.
HEAD_DIM_MULTIPLE = 8
LARGEST_HEAD_DIM = 256
MAX_SHARED_BYTES = 227 * 1024

_HEAD_DIM_TILES = (64, 96, 128, 192, 256)
_SCHEDULE_BY_COUNTER = 2
_DOCUMENT_TILE_BYTES = 32
_MANY_KEYS = 1024  # tiles are then so many that it matters little how full the last one is
_MOST_DOCUMENT_TILES = 2  # for each tile of a grid, as cc/kernels/sm90/forward_params.cuh says


@dataclasses.dataclass(frozen=True)
class Tile:
    """The compile-time shape of one kernel.

    Attributes:
      head_dim, head_dim_v: of the tiles in shared memory; at least those of the problem.
      in_series, q_in_registers, integer_max, staged_bias, row_bias, take_turns,
        cap_series, documents, drops_beside, packed_heads: see ``Config``.
    """

    head_dim: int
    head_dim_v: int
    tile_q: int
    tile_kv: int
    stages: int = 2
    in_series: bool = False
    q_in_registers: bool = False
    integer_max: bool = False
    staged_bias: bool = False
    row_bias: bool = False
    take_turns: bool = False
    cap_series: bool = False
    documents: bool = False
    drops_beside: bool = False
    packed_heads: bool = False

    @property
    def num_warps(self) -> int:
        """One producer warpgroup, one consumer warpgroup per 64 queries."""
        return 4 * (1 + self.tile_q // 64)


def tile_bytes(rows: int, columns: int) -> int:
    """Bytes of a tile in shared memory: whole chunks of 64 columns of a 16-bit type."""
    return -(-columns // 64) * rows * 128


def _q_bytes(tile: Tile) -> int:
    return tile_bytes(tile.tile_q, tile.head_dim)


def _row_bias_places(tile: Tile, spec: Spec) -> int:
    """Rows of the bias in shared memory: one more than tiles where these are freed before theirs is read."""
    by_rows = spec.dropout is not None and spec.dropout.rows
    merges = spec.softcap == 0 and spec.alibi_slopes is None and not by_rows
    merges = merges and spec.score_mod is None
    return tile.stages + (merges and tile.head_dim <= 128)


def _bytes_without_q(tile: Tile, spec: Spec) -> int:
    """Shared memory of the forward kernel for all but q and the output."""
    stage = tile_bytes(tile.tile_kv, tile.head_dim) + tile_bytes(tile.tile_kv, tile.head_dim_v)
    if tile.staged_bias:
        stage += tile_bytes(tile.tile_q, tile.tile_kv)
    slots = 2
    columns = tile.stages * tile.tile_kv
    barriers = 8 * (3 + 4 * tile.stages)
    lost_items = 3 * 4 * (tile.tile_q // 64)
    control = barriers + 8 + 8 * tile.stages + slots * (32 + 4) + 8 + 4 * lost_items
    control += 4 * (slots * tile.tile_q + columns) * (spec.segments + spec.positions)
    control += 2 * 4 * _row_bias_places(tile, spec) * tile.tile_kv if tile.row_bias else 0
    control += 16 * tile.stages * tile.tile_q if spec.mask is not None else 0
    head_numbers = _has_head_numbers(spec, tile)
    control += 24 * slots if head_numbers else 0
    if spec.mask is not None or tile.row_bias or spec.positions or head_numbers:
        control += 96
    if tile.drops_beside:
        bits = -(-tile.tile_kv // 64) * tile.tile_q * 8 + 16 * 32  # and parts of Philox
        calls = tile.tile_q // 8 * (-(-(tile.tile_kv * 2 - 64) // 128) * 128 + 64)
        control += (tile.stages + 2) * (32 + (bits if tile.tile_q == 128 else calls)) + 16
    return tile.stages * stage + control


def forward_shared_bytes(tile: Tile, spec: Spec) -> int:
    """Shared memory of the forward kernel."""
    q, rest = _q_bytes(tile), _bytes_without_q(tile, spec)
    out = tile_bytes(tile.tile_q, tile.head_dim_v)
    chunk, chunks = tile.tile_q * 128, -(-tile.head_dim_v // 64)
    places = max(0, MAX_SHARED_BYTES - q - rest) // chunk  # of the output that are its own
    if places >= chunks:
        return q + out + rest
    return q + places * chunk + rest if chunks == 4 and places else max(q, out) + rest


def _fits(tile: Tile, spec: Spec) -> bool:
    return forward_shared_bytes(tile, spec) <= MAX_SHARED_BYTES


def _with_drop_warps(tile: Tile, spec: Spec) -> Tile:
    """Returns the tile with warps beside the producer that find what dropout removes, where these have room."""
    drops = dataclasses.replace(tile, drops_beside=True)
    return drops if _fits(drops, spec) else tile


def _has_head_numbers(spec: Spec, tile: Tile) -> bool:
    sinks = None if tile.packed_heads else spec.sinks
    return any(feature is not None for feature in (sinks, spec.alibi_slopes, spec.dropout))


def _lists_documents(spec: Spec, tile: Tile) -> bool:
    """Whether tiles begin with runs of segment ids (``Config::documents``): with one tile there is nothing to gain."""
    lengths = spec.q_lengths or spec.kv_lengths
    return spec.segments and _is_plain(spec) and not lengths and spec.q_len > tile.tile_q


def document_tiles_bytes(length: int, tile: int) -> int:
    """Scratch of the list of document tiles of a batch entry (``document_tiles_room``)."""
    return _MOST_DOCUMENT_TILES * -(-length // tile) * _DOCUMENT_TILE_BYTES


def other_tiles_room(length: int, tile: int) -> int:
    """Tiles of the axis that a kernel does not own, where they may begin with documents (of the same name in C++)."""
    tiles = -(-length // tile)
    return tiles + -(-tiles // 4)


def _caps_by_series(spec: Spec) -> bool:
    """Whether the softcap may be a polynomial (``Config::cap_series``): no terms on it, and it ascends.

    Beside dropout 16 bytes of registers spill at head dims 192 and 128, 8 beside dropout and a mask.
    """
    terms = (spec.bias, spec.alibi_slopes, spec.score_mod)
    adds_terms = any(term is not None for term in terms)
    narrow = max(spec.head_dim, spec.head_dim_v) <= 128
    has_room = spec.dropout is None or (narrow and _count_terms(spec) == 2)
    return spec.softcap > 0 and spec.scale > 0 and not adds_terms and has_room


def can_stage_bias(spec: Spec) -> bool:
    """Whether the tensor memory accelerator can copy tiles of the bias.

    For that it has the type of q, both axes, and rows on 16-byte boundaries.
    """
    if spec.bias is None or spec.bias_dtype != spec.dtype:
        return False
    both = spec.bias[2] == spec.q_len > 1 and spec.bias[3] == spec.kv_len > 1
    return both and spec.kv_len % 8 == 0


def _count_terms(spec: Spec) -> int:
    """How many terms and tests every pair has."""
    terms = (spec.bias, spec.mask, spec.alibi_slopes, spec.dropout, spec.score_mod)
    found = sum(term is not None for term in terms)
    return found + spec.positions + spec.segments + (spec.softcap > 0)


def _is_plain(spec: Spec) -> bool:
    """Whether nothing needs registers beside the products and the softmax."""
    return _count_terms(spec) == spec.segments + (spec.softcap > 0)


def _reads_bias_directly(spec: Spec) -> bool:
    """Whether the bias is read where it lies, by addresses that take registers."""
    return spec.bias is not None and spec.bias[2] != 1 and not can_stage_bias(spec)


def has_row_bias(spec: Spec) -> bool:
    """Whether there is a bias that all queries share."""
    return spec.bias is not None and spec.bias[2] == 1


def _drops_by_index(spec: Spec) -> bool:
    """Whether dropout is of the indices of a pair, which warps beside the producer can find."""
    return spec.dropout is not None and not spec.dropout.rows


def _tile_with_terms(spec: Spec, head_dim: int, head_dim_v: int) -> Tile:
    """Picks the tile of a problem with terms or tests for every pair."""
    large = _tile_of_three_warpgroups(spec, head_dim, head_dim_v)
    return large or _tile_of_two_warpgroups(spec, head_dim, head_dim_v)


def _tile_of_three_warpgroups(spec: Spec, head_dim: int, head_dim_v: int) -> Tile | None:
    """The tile of a problem with one term by three consumer warpgroups; None where two are as fast, or more terms or
    columns leave three too few registers.
    """
    if _count_terms(spec) != 1:
        return None
    largest = max(head_dim, head_dim_v)
    stages = 3 if largest <= 64 else 2
    large = Tile(head_dim, head_dim_v, 192, 128, stages=stages, in_series=True, integer_max=True)
    if spec.dropout is not None:
        # Measured over two warpgroups: head dim 64 1.03 to 1.09, 96 0.92 (1024 keys) to 1.07, 128 0.88 to 1.02 (16384
        # keys).
        is_faster = _drops_by_index(spec) and largest <= 96
        return dataclasses.replace(large, drops_beside=True) if is_faster else None
    if spec.alibi_slopes is not None and 96 < largest <= 128:
        return large  # measured at head dim 128: 1003 -> 895 us, causal 479 -> 467 us
    if largest > 64 or spec.positions or _reads_bias_directly(spec):
        return None
    staged = spec.bias is not None and not has_row_bias(spec)
    return dataclasses.replace(
        large,
        in_series=False,
        take_turns=True,
        stages=2 if staged else 4,
        staged_bias=staged,
        row_bias=has_row_bias(spec),
    )


def _tile_of_two_warpgroups(spec: Spec, head_dim: int, head_dim_v: int) -> Tile:
    """The tile by two consumer warpgroups, with as many keys as registers and shared memory have room for.

    A bias is staged where a tile of it fits beside the stages, if need be with fewer keys.
    """
    largest, terms = max(head_dim, head_dim_v), _count_terms(spec)
    reads_directly, drops = _reads_bias_directly(spec), _drops_by_index(spec)
    light = terms == 1 and spec.dropout is None and spec.mask is None and not reads_directly
    tiles = [
        Tile(
            head_dim,
            head_dim_v,
            128,
            tile_kv,
            stages=3 if largest <= 64 else 2,
            # Registers: with 256 columns of output two products stay in flight only beside a single term.
            in_series=head_dim_v > 192 and (terms > 1 or reads_directly),
            q_in_registers=light and largest <= 128,
            integer_max=head_dim_v <= 128,
            row_bias=has_row_bias(spec),
            take_turns=drops and terms == 1 and largest <= 192,
        )
        for tile_kv in ((128, 96, 64) if terms < 4 else (96, 64, 32))
        if head_dim_v // 2 + 3 * tile_kv // 4 <= 192  # registers, as in _plain_tile
    ]
    if can_stage_bias(spec):
        tiles = [dataclasses.replace(tile, staged_bias=True) for tile in tiles] + tiles
    for tile in tiles:
        if _fits(tile, spec):
            return _with_drop_warps(tile, spec) if drops else tile
    raise AssertionError("every head dim up to LARGEST_HEAD_DIM has a tile of 32 keys")


def _tile_with_row_bias(spec: Spec, head_dim: int, head_dim_v: int) -> Tile:
    """Picks the tile of a problem with a bias that all queries share.

    Beside a mask, or dropout, it is that which the problem has without the bias.
    """
    rest = dataclasses.replace(spec, bias=None, bias_dtype="")
    if _count_terms(rest) == 1 and (_drops_by_index(rest) or rest.mask is not None):
        tile = dataclasses.replace(_tile_with_terms(rest, head_dim, head_dim_v), row_bias=True)
        if _fits(tile, spec):
            return tile
    return _tile_with_terms(spec, head_dim, head_dim_v)


def _head_dim_tile(head_dim: int) -> int:
    return next(tile for tile in _HEAD_DIM_TILES if tile >= head_dim)


_CHANGES: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar(
    "changes of forward tiles", default=None
)


@contextlib.contextmanager
def forward_tile_changes(**changes: Any) -> Iterator[None]:
    """Changes members of the tiles that are picked, for calls traced in the context by this thread.

    For measurements of tiles that are not picked. Turns stay away from tiles in series.
    """
    token = _CHANGES.set(changes)
    try:
        yield
    finally:
        _CHANGES.reset(token)


def forward_tile(spec: Spec, *, partial: bool = False) -> Tile:
    """Picks the tile of the forward kernel.

    ``partial``: of the kernel that sees a part of the keys, which has fewer forms.

    Raises:
      ValueError: a head dim is larger than LARGEST_HEAD_DIM.
    """
    check_head_dims(spec)
    head_dim, head_dim_v = _head_dim_tile(spec.head_dim), _head_dim_tile(spec.head_dim_v)
    changes = _CHANGES.get() or {}
    with_terms = _tile_with_row_bias if has_row_bias(spec) else _tile_with_terms
    pick = _plain_tile if _is_plain(spec) else with_terms
    tile = pick(spec, head_dim, head_dim_v)
    tile = dataclasses.replace(
        tile,
        cap_series=tile.integer_max and _caps_by_series(spec),
        documents=_lists_documents(spec, tile) and not partial,
    )
    if not changes:
        return tile
    tile = dataclasses.replace(tile, **changes)
    return dataclasses.replace(tile, take_turns=tile.take_turns and not tile.in_series)


def check_head_dims(spec: Spec) -> None:
    """Checks that the kernels have tiles for the head dims.

    Raises:
      ValueError: one is larger than LARGEST_HEAD_DIM.
    """
    if max(spec.head_dim, spec.head_dim_v) > LARGEST_HEAD_DIM:
        raise ValueError(
            f"head dims {spec.head_dim} and {spec.head_dim_v}: at most {LARGEST_HEAD_DIM}"
        )


def _plain_tile(spec: Spec, head_dim: int, head_dim_v: int) -> Tile:
    """Picks the tile of a problem without terms: at most segments and a softcap."""
    largest = max(head_dim, head_dim_v)
    # With a softcap registers spill, but not by the series.
    small = largest <= 96 and (not spec.softcap > 0 or _caps_by_series(spec))
    if small:
        stages = 4 if largest <= 64 else 2
        # With turns 4 bytes of registers spill beside segments and a softcap.
        series = largest > 64 or (spec.softcap > 0 and spec.segments)
        return Tile(
            head_dim,
            head_dim_v,
            192,
            128,
            stages=stages,
            in_series=series,
            integer_max=True,
            take_turns=not series,
        )
    # Measured with 32/8 heads at 8192 keys: 692 TFLOP/s against 668; with one head per group equal, causal worse.
    shared_keys = spec.num_heads >= 4 * spec.num_kv_heads and spec.q_len >= 2048
    full = spec.band.unbounded and not spec.segments and not spec.softcap > 0
    if head_dim == head_dim_v == 128 and shared_keys and full:
        return Tile(128, 128, 192, 128, in_series=True, integer_max=True)
    # A consumer thread holds head_dim_v / 2 values of the output, tile_kv / 2 scores, half as many packed
    # probabilities and, if q is in registers, head_dim / 4 of its words.
    for tile_kv in (128, 96, 64):
        # With the series of a softcap q in shared memory is faster: 1114 -> 1035 us.
        q_in_registers = largest <= 128 and not spec.softcap > 0
        tile = Tile(
            head_dim,
            head_dim_v,
            128,
            tile_kv,
            q_in_registers=q_in_registers,
            integer_max=head_dim_v <= 128 or _caps_by_series(spec),
        )
        registers = head_dim_v // 2 + 3 * tile_kv // 4 + (head_dim // 4 if q_in_registers else 0)
        if registers <= 192 and _fits(tile, spec):
            return tile
    raise AssertionError("every head dim up to LARGEST_HEAD_DIM has a tile of 64 keys")


def _with_early_copies(tile: Tile, spec: Spec) -> Tile:
    """Returns three stages of fewer keys where keys are read once.

    Such a problem is as fast as memory if enough copies are under way. Measured on H200 with one query on 8192 keys,
    two stages -> three: 32/8 heads, batch 64, head dim 128 plain 512 -> 486 us, segments 521 -> 498, softcap 546 ->
    490, mask 586 -> 540, bias of keys 595 -> 528; batch 32, head dim 96 250 -> 212, 16/4 heads, head dim 192 194 ->
    188. Stages have 64 keys where one warpgroup has rows (128 rows of queries take 143 us for 134), but 96 beside a
    mask or bias (64 take 584 beside a bias of keys). Positions keep two (538 for 516), and so does a softcap without
    the series (not timed).
    """
    reads_beside = spec.mask is not None or tile.row_bias
    few_of_many = spec.q_len <= tile.tile_q and spec.kv_len >= _MANY_KEYS
    rows = spec.q_len * (rows_of_query(spec) if tile.packed_heads else 1)
    if not few_of_many or tile.stages != 2:
        return tile
    if reads_beside and tile.tile_kv == 128:
        tile_kv = 96
    elif _count_terms(spec) == spec.segments + tile.cap_series and rows <= 64 < tile.tile_kv:
        tile_kv = 64
    else:
        return tile
    three = dataclasses.replace(tile, tile_kv=tile_kv, stages=3)
    return three if _fits(three, spec) else tile


def forward_key(spec: Spec, tile: Tile, *, partial: bool = False) -> str:
    """Composes the key of the forward kernel.

    ``partial``: of the kernel that sees a part of the keys and leaves sinks to ``forward_combine``.
    """
    return compose_key(
        "sm90_forward",
        KEY_ARCH,
        element=ELEMENTS[spec.dtype],
        bias_element=bias_element(spec),
        head_dim=tile.head_dim,
        head_dim_v=tile.head_dim_v,
        tile_q=tile.tile_q,
        tile_kv=tile.tile_kv,
        num_warps=tile.num_warps,
        stages=tile.stages,
        **feature_flags(spec.without_sinks() if partial else spec),
        staged_bias=tile.staged_bias,
        row_bias=tile.row_bias,
        schedule=_SCHEDULE_BY_COUNTER,
        in_series=tile.in_series,
        q_in_registers=tile.q_in_registers,
        integer_max=tile.integer_max,
        scale_first=not spec.scale > 0 and not spec.softcap > 0,
        partial_results=partial,
        take_turns=tile.take_turns,
        cap_series=tile.cap_series,
        documents=tile.documents,
        drops_beside=tile.drops_beside,
        packed_heads=tile.packed_heads,
    )


def combine_key(spec: Spec, splits: int) -> str:
    """Composes the key of the kernel that adds up the parts of the keys."""
    return compose_key(
        "forward_combine",
        KEY_ARCH,
        element=ELEMENTS[spec.dtype],
        sinks=spec.sinks is not None,
        key_splits=splits,
    )


def plan_forward(spec: Spec, *, for_few_queries: bool = False) -> Plan:
    """Plans the forward pass of ``flash`` on sm_90.

    Args:
      spec: the problem; head dims are multiples of ``HEAD_DIM_MULTIPLE``. The batch may be symbolic.
      for_few_queries: heads of a group share tiles and keys are split (not with a symbolic batch) where that is
        faster.
    """
    tile = forward_tile(spec)
    packed = for_few_queries and packs_heads(spec, tile.tile_q)
    splits = 1
    if for_few_queries and is_number(spec.batch):
        splits = choose_splits(spec, tile.tile_q, tile.tile_kv, packed_heads=packed)
    if splits > 1:
        tile = forward_tile(spec, partial=True)
    tile = dataclasses.replace(tile, packed_heads=packed)
    if for_few_queries:
        tile = _with_early_copies(tile, spec)
    keys = [forward_key(spec, tile, partial=splits > 1)]
    scratch_bytes = SCRATCH_ALIGNMENT  # the counter of work items
    if splits > 1:
        keys.append(combine_key(spec, splits))
        rows = splits * spec.batch * spec.num_heads * spec.q_len
        scratch_bytes += rows * (16 + 4 * spec.head_dim_v)  # RowPart, float32 rows of the output
    keys += tile_pass_keys(spec, KEY_ARCH, documents=tile.documents)
    queries = tile.tile_q // rows_of_query(spec) if packed else tile.tile_q
    scratch_bytes += tile_facts_bytes(spec, queries, tile.tile_kv)
    if tile.documents:
        scratch_bytes += spec.batch * document_tiles_bytes(spec.q_len, tile.tile_q)
    return Plan(";".join(keys), scratch_bytes, program_text(spec))


_HOT_HEAD_DIMS = {
    "bfloat16": ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)),
    "float16": ((64, 64), (128, 128)),
}


# What most often goes with scores, by the head dims and the bands (causal or not) that it goes with; bfloat16.
_HOT_TERMS: tuple[tuple[dict[str, Any], tuple[int, ...], tuple[bool, ...]], ...] = (
    ({"segments": True}, (64, 128), (False, True)),
    ({"bias": (1, 16, 4096, 4096), "bias_dtype": "bfloat16"}, (64, 128), (False,)),
    ({"mask": (1, 1, 4096, 4096)}, (64, 128), (False,)),
    ({"dropout": Dropout((4, 16))}, (64, 128), (False, True)),
    ({"sinks": (1, 16)}, (64, 128), (True,)),
    ({"softcap": 50.0}, (128,), (False,)),
    ({"softcap": 50.0}, (128, 256), (True,)),
)


def _hot_problems() -> Iterator[Spec]:
    for dtype, all_head_dims in _HOT_HEAD_DIMS.items():
        for head_dims in all_head_dims:
            for causal in (False, True):
                yield hot_problem(dtype, *head_dims, causal=causal)
    plain = hot_problem("bfloat16", 128, 128, causal=False)
    yield dataclasses.replace(plain, num_heads=32, num_kv_heads=8)
    narrow = hot_problem("bfloat16", 64, 64, causal=True)
    yield dataclasses.replace(narrow, q_len=1024, kv_len=1024)
    for term, widths, bands in _HOT_TERMS:
        for width in widths:
            for causal in bands:
                yield dataclasses.replace(
                    hot_problem("bfloat16", width, width, causal=causal), **term
                )


def hot_keys() -> tuple[str, ...]:
    """Returns the kernel keys of the common problems, in the order and spelling of ``cc/core/hot_set.txt``."""
    return distinct_keys(plan_forward(spec) for spec in _hot_problems())
