"""Tiles, stages and kernel keys of the Hopper backward pass: the one place that picks them.

Shared memory is counted as the kernels count it (``cc/kernels/sm90/backward_shape.cuh``); a test compares the two.
What was measured for each choice stands in ``docs/kernels/log-backward.md``.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from jattn.backends.flash_tiles import (
    KEY_ARCH,
    MAX_SHARED_BYTES,
    can_stage_bias,
    check_head_dims,
    document_tiles_bytes,
    has_row_bias,
    other_tiles_room,
    tile_bytes,
)
from jattn.backends.kernel_plan import (
    ELEMENTS,
    SCRATCH_ALIGNMENT,
    Plan,
    bias_element,
    compose_key,
    dbias_partials_bytes,
    distinct_keys,
    feature_flags,
    hot_problem,
    is_number,
    program_text,
    round_up,
    tile_facts_bytes,
    tile_pass_keys,
)
from jattn.spec import Spec

_NUM_WARPS = 12
_NUM_WARPS_WITH_DQ = 16
_STATISTICS_ROWS = 128
# Above this head dim one warpgroup cannot hold dk and dv of its keys: each has one of them, and a third makes dq.
LARGEST_UNSPLIT_HEAD_DIM = 128
# Above this one there are no registers for a third.
_LARGEST_FUSED_HEAD_DIM = 192
# Whether blocks stay, take item after item, and their warpgroups take turns at the products; None: by the problem.
_TAKES_ITEMS: contextvars.ContextVar[bool | None] = contextvars.ContextVar("items", default=None)
# How dq is added up (``Config::dq_order``), where a kernel can; None: by the problem.
_DQ_ORDER: contextvars.ContextVar[int | None] = contextvars.ContextVar("dq_order", default=None)
# Blocks that the kernel for dbias is given at least, if there is work for them (``cc/cuda/backward_sm90.cc``).
_WANTED_DBIAS_BLOCKS = 264
# Of stored gradients of scores (``cc/cuda/ds_parts.h``): batch entries added up in their type, scratch for fewer.
_MOST_DS_TURNS = 4
_FEW_DS_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Tile:
    """The compile-time shape of one kernel.

    Attributes:
      head_dim, head_dim_v: of the tiles in shared memory; at least those of the problem.
      stages: tiles of the visited axis in flight; of the kernel for dbias, places for two tiles each.
      bulk_reduce, staged_bias, stores_ds, sums_bias: see ``Config``.
      takes_items: blocks stay and take items by a counter, and warpgroups take turns (``Config::schedule`` 2,
        ``Config::take_turns``).
      dq_order: how dq is added up (``Config::dq_order``); 2: the same bits every time.
      key_register_steps: see ``Config``.
      dq_warpgroup: a third consumer warpgroup computes dq and nothing else; head dims above 128.
      documents: tiles of keys begin with runs of segment ids (``Config::documents``).
      drops_beside: see ``Config``.
    """

    head_dim: int
    head_dim_v: int
    tile_q: int
    tile_kv: int
    stages: int = 2
    bulk_reduce: bool = False
    staged_bias: bool = False
    stores_ds: bool = False
    sums_bias: bool = False
    takes_items: bool = False
    dq_order: int = 0
    key_register_steps: int = 0
    dq_warpgroup: bool = False
    documents: bool = False
    drops_beside: bool = False


@contextlib.contextmanager
def resident_blocks(there: bool) -> Iterator[None]:
    """Has blocks stay and take item after item, or one block for each item, in calls traced by this thread.

    For measurements. Kernels of head dims above 128, those that make dk and dv alone and, but for head dim 64, those
    that store gradients of scores have a block for each item in any case; at head dim 64 the latter have none.
    """
    token = _TAKES_ITEMS.set(there)
    try:
        yield
    finally:
        _TAKES_ITEMS.reset(token)


@contextlib.contextmanager
def dq_order(order: int | None) -> Iterator[None]:
    """Has dq added up as ``Config::dq_order`` says, where a kernel can, in calls traced by this thread.

    For measurements. Deterministic calls get dq from a kernel of its own unless ``order`` is 2, which is their choice.
    None: by the problem.
    """
    token = _DQ_ORDER.set(order)
    try:
        yield
    finally:
        _DQ_ORDER.reset(token)


def _has_step_terms(spec: Spec) -> bool:
    terms = (spec.bias, spec.alibi_slopes, spec.score_mod, spec.dropout)
    return any(x is not None for x in terms)


def _has_scores_terms(spec: Spec) -> bool:
    terms = (spec.bias, spec.alibi_slopes, spec.score_mod, spec.mask)
    return any(x is not None for x in terms)


def _bias_bytes(tile: Tile) -> int:
    return tile_bytes(tile.tile_q, tile.tile_kv) if tile.staged_bias else 0


def _control_bytes(tile: Tile, spec: Spec, *, owns_queries: bool) -> int:
    statistics = 32 if owns_queries else 2 * tile.stages * 4 * tile.tile_q
    owned, visited = tile.tile_kv, tile.tile_q
    if owns_queries:
        owned, visited = visited, owned
    per_row = 4 * (owned + tile.stages * visited)
    ids = per_row if spec.segments else 8
    barriers = 8 * (4 + 4 * tile.stages + 4) + (64 if tile.dq_warpgroup else 0)
    barriers += 208 if tile.dq_order else 0
    features = per_row if spec.positions else 0
    features += 16 * tile.stages * owned if spec.mask is not None else 0
    features += 32 * tile.stages if _has_step_terms(spec) and not tile.drops_beside else 0
    features += 16 * tile.stages if tile.staged_bias else 0
    features += 24 * tile.stages if tile.stores_ds else 0
    features += 4 * tile.tile_kv if tile.sums_bias else 0
    # Bits of 256 threads, records of steps with eight parts of Philox, records of heads, barriers.
    features += 4 * 256 + 16 * 3 * 9 + 32 * 2 + 8 * 8 if tile.drops_beside else 0
    return -(-(statistics + ids + 16 * tile.stages + 32 + barriers + features) // 16) * 16


def _with_bias(tile: Tile, rest: int) -> int:
    """Adds tiles of the bias: one for each stage where that fits, else one."""
    bias = _bias_bytes(tile)
    all_stages = rest + tile.stages * bias
    return all_stages if all_stages <= MAX_SHARED_BYTES else rest + bias


def keys_shared_bytes(tile: Tile, spec: Spec, *, fused: bool) -> int:
    """Shared memory of the kernels that own keys; those that take items stage dq in two places where there is room."""
    keys = tile_bytes(tile.tile_kv, tile.head_dim) + tile_bytes(tile.tile_kv, tile.head_dim_v)
    queries = tile_bytes(tile.tile_q, tile.head_dim) + tile_bytes(tile.tile_q, tile.head_dim_v)
    exchanged = 2 * tile.tile_kv * tile.tile_q * 2 * (fused + _splits(tile))
    rest = keys + tile.stages * queries + exchanged + _control_bytes(tile, spec, owns_queries=False)
    staging = tile.tile_q * tile.head_dim * 4 if fused and tile.bulk_reduce else 0
    if tile.takes_items and rest + 2 * staging + _bias_bytes(tile) <= MAX_SHARED_BYTES:
        staging *= 2
    return _with_bias(tile, rest + staging)


def queries_shared_bytes(tile: Tile, spec: Spec) -> int:
    """Shared memory of the kernel that owns queries."""
    queries = tile_bytes(tile.tile_q, tile.head_dim) + tile_bytes(tile.tile_q, tile.head_dim_v)
    k, v = tile_bytes(tile.tile_kv, tile.head_dim), tile_bytes(tile.tile_kv, tile.head_dim_v)
    rest = queries + tile.stages * k + _control_bytes(tile, spec, owns_queries=True)
    both = rest + tile.stages * v
    return _with_bias(tile, both if both + _bias_bytes(tile) <= MAX_SHARED_BYTES else rest + v)


def dbias_shared_bytes(tile: Tile, spec: Spec, *, keeps_bias: bool = False) -> int:
    """Shared memory of the kernel for dbias; a bias that is not staged is kept if that fits, or if ``keeps_bias``."""
    rows = tile.tile_q + tile.tile_kv
    place = tile_bytes(rows, max(tile.head_dim, tile.head_dim_v))
    records = 4 * rows * (spec.segments + spec.positions) + 32 + 32 + 16
    records += 16 * tile.tile_q if spec.mask is not None else 0
    rest = tile.stages * (place + records) + _bias_bytes(tile) + 128
    with_kept = rest + (0 if tile.staged_bias else 4 * tile.tile_q * tile.tile_kv)
    return with_kept if keeps_bias or with_kept <= MAX_SHARED_BYTES else rest


def _splits(tile: Tile) -> bool:
    return max(tile.head_dim, tile.head_dim_v) > LARGEST_UNSPLIT_HEAD_DIM


def _head_dim_tile(head_dim: int) -> int:
    return round_up(head_dim, 64)


def _has_costly_terms(spec: Spec, *, staged_bias: bool) -> bool:
    """Whether what acts on scores, but for the softcap, takes many registers.

    Found by compiling: a bias that is read where it lies, and most combinations of three.
    """
    terms = (spec.bias, spec.mask, spec.alibi_slopes, spec.dropout, spec.score_mod)
    used = sum(term is not None for term in terms) + spec.positions
    rows = spec.dropout is not None and spec.dropout.rows
    direct = spec.bias is not None and not staged_bias and spec.bias[2] > 1
    slopes_by_positions = spec.alibi_slopes is not None and spec.positions
    return direct or rows or slopes_by_positions or used > 2


def _is_crowded(spec: Spec, *, staged_bias: bool) -> bool:
    """Whether there are no registers for 128 queries beside the gradients of 64 keys."""
    own = spec.softcap > 0 or spec.score_mod is not None
    return own or _has_costly_terms(spec, staged_bias=staged_bias)


def can_store_ds(spec: Spec) -> bool:
    """Whether the kernel that owns keys can store the gradients of the scores, of which dbias is made.

    They are rounded to the type of the bias, and contain the slope of a softcap. Heads that share a bias would take
    scratch for all of them.
    """
    if not can_stage_bias(spec) or spec.softcap > 0 or not is_number(spec.batch):
        return False
    assert spec.bias is not None
    widest = max(_head_dim_tile(spec.head_dim), _head_dim_tile(spec.head_dim_v))
    return widest <= LARGEST_UNSPLIT_HEAD_DIM and spec.bias[1] == spec.num_heads


def can_sum_bias(spec: Spec) -> bool:
    """Whether the kernel that owns keys can sum up the gradients of the scores of a key, of which dbias is made.

    The bias is one of the keys, and the query heads of a key/value head share it; the gradients contain the slope of a
    softcap. Beside segments or positions there are no registers for it at head dim 128.
    """
    if not has_row_bias(spec) or spec.softcap > 0 or not is_number(spec.batch):
        return False
    if spec.segments or spec.positions:
        return False
    assert spec.bias is not None
    widest = max(_head_dim_tile(spec.head_dim), _head_dim_tile(spec.head_dim_v))
    of_keys = spec.bias[3] == spec.kv_len > 1
    of_kv_heads = spec.bias[1] == 1 or spec.num_heads == spec.num_kv_heads
    return widest <= LARGEST_UNSPLIT_HEAD_DIM and of_keys and of_kv_heads


def _split_tile(spec: Spec, *, fused: bool) -> Tile:
    """The tile of head dims for which dk and dv are of one warpgroup each."""
    head_dim, head_dim_v = _head_dim_tile(spec.head_dim), _head_dim_tile(spec.head_dim_v)
    gathers = fused and max(head_dim, head_dim_v) <= _LARGEST_FUSED_HEAD_DIM
    direct = Tile(head_dim, head_dim_v, tile_q=64, tile_kv=64, dq_warpgroup=gathers)
    staged = dataclasses.replace(direct, staged_bias=can_stage_bias(spec))
    for tile in (dataclasses.replace(staged, bulk_reduce=gathers), staged):
        if keys_shared_bytes(tile, spec, fused=gathers) <= MAX_SHARED_BYTES:
            return tile
    return direct


def _wants_items(spec: Spec, *, drop_warps: bool) -> bool:
    """Whether blocks had better take item after item, as measured: with a dense mask at small head dims no faster.

    ``drop_warps``: whether these find what dropout removes, if the problem has it.
    """
    forced = _TAKES_ITEMS.get()
    if forced is not None:
        return forced
    small = spec.head_dim <= 64
    if spec.mask is not None and small:
        return False
    if spec.dropout is not None and _is_crowded_by_dropout(spec, drop_warps=drop_warps):
        return False
    return not ((has_row_bias(spec) and small) or (spec.mask is not None and spec.segments))


def _is_crowded_by_dropout(spec: Spec, *, drop_warps: bool) -> bool:
    """Whether dropout leaves no registers for what an item needs: found by compiling."""
    lengths = spec.q_lengths or spec.kv_lengths
    if not drop_warps:
        others = _has_scores_terms(spec) or spec.segments or spec.positions
        return others or (lengths and spec.head_dim <= 64)
    biases = spec.bias is not None
    terms = biases + (spec.alibi_slopes is not None) + (spec.mask is not None)
    terms += spec.positions + spec.segments + (spec.segments and lengths)
    return terms > 1 or (biases and not has_row_bias(spec))


def _lists_documents(spec: Spec, tile: Tile) -> bool:
    """Whether tiles of keys begin with runs of segment ids: with one tile there is nothing to gain."""
    others = spec.positions or spec.q_lengths or spec.kv_lengths or spec.mask is not None
    plain = not (others or _has_step_terms(spec))
    return tile.takes_items and spec.segments and plain and spec.kv_len > tile.tile_kv


def _rows_padded(spec: Spec, keys: Tile) -> int:
    """Rows of a head in the statistics and in the accumulator of dq (``BackwardParams::rows_padded``)."""
    rows = other_tiles_room(spec.q_len, keys.tile_q) * keys.tile_q if keys.documents else spec.q_len
    return round_up(rows, _STATISTICS_ROWS)


def _has_room_for_results(tile: Tile) -> bool:
    """Whether dk and dv can leave by the places of ds and of the staging of dq, while the next keys come in.

    As ``KeyConsumer::write`` lays them out (``cc/kernels/sm90/backward_keys.cuh``).
    """
    if _splits(tile):
        return False
    places = 2 * tile.tile_kv * tile.tile_q * 2
    dv, dk = tile_bytes(tile.tile_kv, tile.head_dim_v), tile_bytes(tile.tile_kv, tile.head_dim)
    return dv <= places and (dv + dk <= places or tile.bulk_reduce)


def _takes_items(spec: Spec, tile: Tile, *, drop_warps: bool) -> bool:
    """Whether blocks take item after item, with this tile. ``drop_warps``: as for ``_wants_items``.

    Where ds is stored, that spares registers at head dim 64, but not beside segments; at 128 it is no faster.
    """
    if tile.stores_ds and (tile.head_dim != 64 or spec.segments or spec.dropout is not None):
        return False
    wants = tile.stores_ds or _wants_items(spec, drop_warps=drop_warps)
    return wants and _has_room_for_results(tile)


def keys_tile(spec: Spec, *, fused: bool, stores_ds: bool = False, sums_bias: bool = False) -> Tile:
    """Picks the tile of the kernels that own keys: with dq, as far as the head dims allow, or without it.

    ``stores_ds``, ``sums_bias``: see ``can_store_ds``, ``can_sum_bias``.

    Raises:
      ValueError: a head dim is larger than LARGEST_HEAD_DIM.
    """
    check_head_dims(spec)
    head_dim, head_dim_v = _head_dim_tile(spec.head_dim), _head_dim_tile(spec.head_dim_v)
    staged = can_stage_bias(spec)
    if max(head_dim, head_dim_v) > LARGEST_UNSPLIT_HEAD_DIM:
        return _split_tile(spec, fused=fused)
    tile = Tile(
        head_dim,
        head_dim_v,
        tile_q=64,
        tile_kv=128,
        staged_bias=staged,
        stores_ds=stores_ds,
        sums_bias=sums_bias,
    )
    capped = spec.softcap > 0 and (_has_step_terms(spec) or spec.mask is not None)  # registers
    if capped or head_dim != head_dim_v:
        return tile
    if head_dim == 64:
        others = spec.alibi_slopes is not None or spec.dropout is not None
        crowded_by_sums = sums_bias and (others or not spec.band.unbounded)
        if _is_crowded(spec, staged_bias=staged) or crowded_by_sums:
            return dataclasses.replace(tile, bulk_reduce=fused and not stores_ds)
        # Two tiles of a bias are worth more than the room for bulk reductions, which pay off where warps of their own
        # send them, else with a band.
        with_bulk = (
            fused
            and not staged
            and (_wants_items(spec, drop_warps=False) or not spec.band.unbounded)
        )
        return dataclasses.replace(tile, tile_q=128, bulk_reduce=with_bulk)
    direct_bias = spec.bias is not None and spec.bias[2] > 1 and not staged
    if direct_bias or (spec.alibi_slopes is not None and spec.positions):
        return tile  # registers
    bulk = dataclasses.replace(tile, bulk_reduce=fused)
    return bulk if keys_shared_bytes(bulk, spec, fused=fused) <= MAX_SHARED_BYTES else tile


def _register_steps(spec: Spec, tile: Tile) -> int:
    """Steps of the scores' product whose k stays in registers, beside warps that add dq up: what does not spill.

    Beside drop warps three and four do not spill either, but are 1 to 3 % slower than two.
    """
    if tile.drops_beside:
        return 2
    terms = _has_step_terms(spec) or spec.positions or spec.mask is not None
    if tile.head_dim == 64 or terms or (spec.softcap > 0 and spec.segments):
        return 0
    return 2 if spec.softcap > 0 else 3


def _with_senders(tile: Tile, spec: Spec, order: int) -> Tile:
    """The tile with warps that add dq up (``Config::dq_order``), where its kernel can have them.

    They send what bulk reductions stage. In an order, which tile comes before another must follow from their numbers:
    nothing may filter tiles.
    """
    terms = _has_step_terms(spec)
    # The warp that looks up segments or positions has few registers beside consumers that need theirs.
    spills = (spec.segments and (terms or spec.positions)) or (spec.positions and terms)
    filters = spec.segments or spec.mask is not None or spec.positions
    can_send = tile.takes_items and tile.bulk_reduce and not (tile.head_dim == 128 and spills)
    if order == 0 or not can_send or (order == 2 and filters):
        return tile
    steps = _register_steps(spec, tile)
    found = dataclasses.replace(tile, dq_order=order, key_register_steps=steps)
    return found if keys_shared_bytes(found, spec, fused=True) <= MAX_SHARED_BYTES else tile


def _any_order(spec: Spec, *, drop_warps: bool) -> int:
    """The order of sums of dq where any will do, as measured.

    Drop warps leave one warp to add them up: that spares zeros, and loses where there are many queries.
    """
    if spec.dropout is None:
        return 1
    most = 4096 if spec.band.unbounded else 2048
    return int(drop_warps and _drops_alone(spec) and spec.q_len <= most)


def _drops_alone(spec: Spec) -> bool:
    """Whether no term but dropout takes registers: drop warps may then have a warp beside them that adds dq up."""
    others = _has_scores_terms(spec) or spec.segments or spec.positions or spec.softcap > 0
    return spec.dropout is not None and not others


def _can_have_drop_warps(spec: Spec, tile: Tile, *, dbias_apart: bool) -> bool:
    """Whether warps may find the pairs which dropout removes (``Config::drops_beside``): where they are idle.

    At head dims up to 64 the bits of a step take the place of a part of dq, which costs more than they gain. Statistics
    of rows are scaled for that kernel: no other may read them, as one for dbias would (``dbias_apart``). Beside sums
    for dbias 8 bytes of registers spill.
    """
    drops = spec.dropout is not None and not (spec.dropout.rows or dbias_apart or tile.sums_bias)
    is_wide = max(tile.head_dim, tile.head_dim_v) > 64
    with_warps = dataclasses.replace(tile, drops_beside=True)
    has_room = keys_shared_bytes(with_warps, spec, fused=True) <= MAX_SHARED_BYTES
    return drops and is_wide and has_room


def _pick_keys(
    spec: Spec,
    *,
    fused: bool,
    stores_ds: bool,
    sums_bias: bool,
    dbias_apart: bool,
    deterministic: bool,
) -> tuple[Tile, bool]:
    """The tile of the kernel that owns keys, and whether it makes dq, too.

    ``fused``: whether it is asked for all three. ``dbias_apart``: a kernel of its own computes dbias.
    """
    keys = keys_tile(spec, fused=fused, stores_ds=stores_ds, sums_bias=sums_bias)
    if fused and (not _splits(keys) or keys.dq_warpgroup):
        drop_warps = _can_have_drop_warps(spec, keys, dbias_apart=dbias_apart)
        forced = _DQ_ORDER.get()
        any_order = _any_order(spec, drop_warps=drop_warps)
        order = (2 if deterministic else any_order) if forced is None else forced
        drop_warps = drop_warps and (order == 0 or (order == 1 and _drops_alone(spec)))
        takes_items = _takes_items(spec, keys, drop_warps=drop_warps)
        keys = dataclasses.replace(
            keys, takes_items=takes_items, drops_beside=takes_items and drop_warps
        )
        keys = dataclasses.replace(keys, documents=_lists_documents(spec, keys))
        keys = _with_senders(keys, spec, order)
        if keys.dq_order == 2 or not deterministic:
            return keys, True
    fused = fused and not deterministic
    return keys_tile(spec, fused=fused, stores_ds=stores_ds, sums_bias=sums_bias), False


def queries_tile(spec: Spec) -> Tile:
    """Picks the tile of the kernel that owns queries.

    Raises:
      ValueError: a head dim is larger than LARGEST_HEAD_DIM.
    """
    check_head_dims(spec)
    head_dim, head_dim_v = _head_dim_tile(spec.head_dim), _head_dim_tile(spec.head_dim_v)
    plain = not _has_step_terms(spec) and spec.mask is None
    # A consumer thread holds head_dim / 2 values of dq, tile_kv scores and their gradients, tile_kv / 4 packed words.
    if spec.softcap > 0 or max(head_dim, head_dim_v) > 128:
        tile_kv = 64
    elif max(head_dim, head_dim_v) == 64:
        tile_kv = 128
    else:
        tile_kv = 96 if plain else 64
    tile = Tile(head_dim, head_dim_v, tile_q=128, tile_kv=tile_kv)
    candidates = [tile, dataclasses.replace(tile, tile_kv=32)]
    if can_stage_bias(spec):
        candidates = [dataclasses.replace(t, staged_bias=True) for t in candidates] + candidates
    for candidate in candidates:
        if queries_shared_bytes(candidate, spec) <= MAX_SHARED_BYTES:
            return candidate
    raise AssertionError("every head dim up to LARGEST_HEAD_DIM has a tile of 32 keys")


def dbias_tile(spec: Spec) -> Tile:
    """Picks the tile of the kernel for dbias.

    Raises:
      ValueError: a head dim is larger than LARGEST_HEAD_DIM.
    """
    check_head_dims(spec)
    head_dim, head_dim_v = _head_dim_tile(spec.head_dim), _head_dim_tile(spec.head_dim_v)
    crowded = _is_crowded(spec, staged_bias=True) or spec.positions
    tile_kv = 128 if max(head_dim, head_dim_v) <= 128 and not crowded else 64
    tiles = [
        Tile(head_dim, head_dim_v, 128, tile_kv, stages=stages, staged_bias=can_stage_bias(spec))
        for stages in (4, 3, 2)
    ]
    for keeps_bias in (True, False):
        for tile in tiles:
            if dbias_shared_bytes(tile, spec, keeps_bias=keeps_bias) <= MAX_SHARED_BYTES:
                return tile
    raise AssertionError("every head dim up to LARGEST_HEAD_DIM has a tile of 64 keys")


def _attention_key(family: str, spec: Spec, tile: Tile) -> str:
    return compose_key(
        family,
        KEY_ARCH,
        element=ELEMENTS[spec.dtype],
        bias_element=bias_element(spec),
        head_dim=tile.head_dim,
        head_dim_v=tile.head_dim_v,
        tile_q=tile.tile_q,
        tile_kv=tile.tile_kv,
        num_warps=_NUM_WARPS_WITH_DQ if tile.dq_warpgroup else _NUM_WARPS,
        stages=tile.stages,
        **feature_flags(spec.without_sinks()),
        staged_bias=tile.staged_bias,
        row_bias=has_row_bias(spec),
        scale_first=not spec.scale > 0 and not spec.softcap > 0,
        bulk_reduce=tile.bulk_reduce,
        stores_ds=tile.stores_ds,
        sums_bias=tile.sums_bias,
        schedule=2 if tile.takes_items else None,
        take_turns=tile.takes_items and (spec.dropout is None or tile.drops_beside),
        dq_order=tile.dq_order or None,
        key_register_steps=tile.key_register_steps or None,
        documents=tile.documents,
        drops_beside=tile.drops_beside,
    )


def _ds_bytes(spec: Spec) -> int:
    """Scratch for gradients of scores (``cc/cuda/ds_parts.h``)."""
    assert spec.bias is not None
    if spec.bias[0] == spec.batch or spec.batch == 0:
        return 0
    head_bytes = spec.q_len * spec.kv_len * 2
    all_bytes = max(1, spec.num_heads * head_bytes)
    parts = max(_FEW_DS_BYTES // all_bytes, -(-spec.batch // _MOST_DS_TURNS))
    turns = -(-spec.batch // min(parts, spec.batch))
    parts = -(-spec.batch // turns)
    if parts == 1:
        return 0
    fits = parts * all_bytes <= _FEW_DS_BYTES
    kv_heads = spec.num_kv_heads if fits else max(1, spec.num_kv_heads // parts)
    return parts * kv_heads * spec.group_size * head_bytes + SCRATCH_ALIGNMENT


def plan_backward(spec: Spec, *, wants: tuple[bool, bool, bool, bool], deterministic: bool) -> Plan:
    """Plans the backward pass of ``flash`` on sm_90.

    Args:
      spec: the problem; head dims are multiples of ``flash_tiles.HEAD_DIM_MULTIPLE``. The batch may be symbolic.
      wants: which of dq, dk, dv and dbias are wanted.
      deterministic: the same bits every time: dq by a kernel of its own instead of by reductions in memory in any
        order. Head dims above 192 always run so.

    Returns:
      The plan; its kernels are those that the wanted gradients need.
    """
    want_q, want_k, want_v, want_bias = wants
    want_keys = want_k or want_v
    element = ELEMENTS[spec.dtype]
    stores_ds = want_bias and want_keys and can_store_ds(spec)
    sums_bias = want_bias and want_keys and can_sum_bias(spec)
    keys, fused = _pick_keys(
        spec,
        fused=want_q and want_keys,
        stores_ds=stores_ds,
        sums_bias=sums_bias,
        dbias_apart=want_bias and not (stores_ds or sums_bias),
        deterministic=deterministic,
    )

    rows = spec.batch * spec.num_heads * _rows_padded(spec, keys)
    scratch = 2 * (rows * 4 + SCRATCH_ALIGNMENT) + rows // _STATISTICS_ROWS + SCRATCH_ALIGNMENT
    head_dim_v = _head_dim_tile(spec.head_dim_v)
    kernels = [compose_key("backward_prepare", KEY_ARCH, element=element, head_dim_v=head_dim_v)]
    if want_keys:
        family = "sm90_backward" if fused else "sm90_backward_dkv"
        kernels.append(_attention_key(family, spec, keys))
        scratch += tile_facts_bytes(spec, keys.tile_q, keys.tile_kv, owns_keys=True)
    if fused:
        cast = {"head_dim": keys.head_dim, "tile_q": keys.tile_q}
        kernels.append(compose_key("backward_cast", KEY_ARCH, element=element, **cast))
        scratch += rows * keys.head_dim * 4 + SCRATCH_ALIGNMENT
        if keys.takes_items:
            scratch += (4 + spec.batch * spec.num_kv_heads) * 4 + SCRATCH_ALIGNMENT
        scratch += rows // 32 * 4 + SCRATCH_ALIGNMENT if keys.dq_order else 0
    elif want_q:
        tile = queries_tile(spec)
        kernels.append(_attention_key("sm90_backward_dq", spec, tile))
        scratch += tile_facts_bytes(spec, tile.tile_q, tile.tile_kv)
    if stores_ds:
        kernels.append(compose_key("backward_sum", KEY_ARCH, element=element))
        scratch += _ds_bytes(spec)
    elif sums_bias:
        kernels.append(compose_key("sum_partials", KEY_ARCH, bias_element=bias_element(spec)))
        scratch += spec.batch * spec.num_kv_heads * spec.kv_len * 4 + SCRATCH_ALIGNMENT
    elif want_bias and spec.bias is not None:
        tile = dbias_tile(spec)
        kernels.append(_attention_key("sm90_backward_dbias", spec, tile))
        kernels.append(compose_key("sum_partials", KEY_ARCH, bias_element=bias_element(spec)))
        scratch += tile_facts_bytes(spec, tile.tile_q, tile.tile_kv) + SCRATCH_ALIGNMENT
        scratch += dbias_partials_bytes(spec, tile.tile_q, tile.tile_kv, _WANTED_DBIAS_BLOCKS)
    if keys.documents:
        listed = document_tiles_bytes(spec.kv_len, keys.tile_kv)
        scratch += spec.batch * listed + SCRATCH_ALIGNMENT
        scratch += spec.batch * other_tiles_room(spec.q_len, keys.tile_q) * 8 + SCRATCH_ALIGNMENT
    kernels += tile_pass_keys(spec, KEY_ARCH, documents=keys.documents)
    return Plan(";".join(kernels), scratch, program_text(spec))


_HOT_HEAD_DIMS = {"bfloat16": (64, 128, 256), "float16": (64, 128)}


def hot_keys() -> tuple[str, ...]:
    """Returns the kernel keys of the common problems, in the order and spelling of ``cc/core/hot_set.txt``."""
    problems = [
        hot_problem(dtype, head_dim, head_dim, causal=causal)
        for dtype, head_dims in _HOT_HEAD_DIMS.items()
        for head_dim in head_dims
        for causal in (False, True)
    ]
    wants = (True, True, True, False)
    return distinct_keys(plan_backward(x, wants=wants, deterministic=False) for x in problems)
