"""Tiles, stages and kernel keys of the Hopper backward pass: the one place that picks them.

Shared memory is counted as the kernels count it (``cc/kernels/sm90/backward_shape.cuh``); a test compares the two.
What was measured for each choice stands in ``docs/kernels/log-backward.md``.
"""

from __future__ import annotations

import dataclasses

from jattn.backends.cuda_tiles import mask_tiles_bytes, range_bytes
from jattn.backends.flash_tiles import (
    LARGEST_HEAD_DIM,
    MASK_KEY,
    MAX_SHARED_BYTES,
    HotBand,
    HotProblem,
    Plan,
    Problem,
)

_ELEMENTS = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
_ARCH = "sm_90a"
_NUM_WARPS = 12
_NUM_WARPS_WITH_DQ = 16
# Widest head dims, rounded up, for which a warpgroup of its own computes dq: 64, 128, 192 can be. None until that is
# measured: docs/kernels/log-backward.md.
_DQ_WARPGROUP_HEAD_DIMS: frozenset[int] = frozenset()
_SCRATCH_ALIGNMENT = 256
_STATISTICS_ROWS = 128
# Above this head dim one warpgroup cannot hold both dk and dv of its keys.
_LARGEST_FUSED_HEAD_DIM = 128
# Blocks that the kernel for dbias is given at least, if there is work for them (``cc/cuda/backward_sm90.cc``).
_WANTED_DBIAS_BLOCKS = 264


@dataclasses.dataclass(frozen=True)
class Tile:
    """The compile-time shape of one kernel.

    Attributes:
      head_dim, head_dim_v: of the tiles in shared memory; at least those of the problem.
      stages: tiles of the visited axis in flight; of the kernel for dbias, places for two tiles each.
      ds_in_registers, bulk_reduce, staged_bias, stores_ds: see ``Config``.
      dq_warpgroup: a third consumer warpgroup computes dq and nothing else.
    """

    head_dim: int
    head_dim_v: int
    tile_q: int
    tile_kv: int
    stages: int = 2
    ds_in_registers: bool = False
    bulk_reduce: bool = False
    staged_bias: bool = False
    stores_ds: bool = False
    dq_warpgroup: bool = False


def _tile_bytes(rows: int, columns: int) -> int:
    return -(-columns // 64) * rows * 128


def _has_step_terms(problem: Problem) -> bool:
    return any(x is not None for x in (problem.bias, problem.alibi_slopes, problem.dropout))


def _bias_bytes(tile: Tile) -> int:
    return _tile_bytes(tile.tile_q, tile.tile_kv) if tile.staged_bias else 0


def _control_bytes(tile: Tile, problem: Problem, *, owns_queries: bool) -> int:
    statistics = 32 if owns_queries else 2 * tile.stages * 4 * tile.tile_q
    owned, visited = tile.tile_kv, tile.tile_q
    if owns_queries:
        owned, visited = visited, owned
    per_row = 4 * (owned + tile.stages * visited)
    ids = per_row if problem.segments else 8
    barriers = 8 * (2 + 4 * tile.stages + 4) + (64 if tile.dq_warpgroup else 0)
    features = per_row if problem.positions else 0
    features += 16 * tile.stages * owned if problem.mask is not None else 0
    features += 32 * tile.stages if _has_step_terms(problem) else 0
    features += 16 * tile.stages if tile.staged_bias else 0
    return -(-(statistics + ids + 16 * tile.stages + 32 + barriers + features) // 16) * 16


def _with_bias(tile: Tile, rest: int) -> int:
    """Adds tiles of the bias: one for each stage where that fits, else one."""
    bias = _bias_bytes(tile)
    all_stages = rest + tile.stages * bias
    return all_stages if all_stages <= MAX_SHARED_BYTES else rest + bias


def keys_shared_bytes(tile: Tile, problem: Problem, *, fused: bool) -> int:
    """Shared memory of the kernels that own keys."""
    keys = _tile_bytes(tile.tile_kv, tile.head_dim) + _tile_bytes(tile.tile_kv, tile.head_dim_v)
    queries = _tile_bytes(tile.tile_q, tile.head_dim) + _tile_bytes(tile.tile_q, tile.head_dim_v)
    exchanged = 2 * tile.tile_kv * tile.tile_q * 2 * (fused + _splits(tile))
    staging = tile.tile_q * tile.head_dim * 4 if fused and tile.bulk_reduce else 0
    control = _control_bytes(tile, problem, owns_queries=False)
    return _with_bias(tile, keys + tile.stages * queries + exchanged + staging + control)


def queries_shared_bytes(tile: Tile, problem: Problem) -> int:
    """Shared memory of the kernel that owns queries."""
    queries = _tile_bytes(tile.tile_q, tile.head_dim) + _tile_bytes(tile.tile_q, tile.head_dim_v)
    k, v = _tile_bytes(tile.tile_kv, tile.head_dim), _tile_bytes(tile.tile_kv, tile.head_dim_v)
    rest = queries + tile.stages * k + _control_bytes(tile, problem, owns_queries=True)
    both = rest + tile.stages * v
    return _with_bias(tile, both if both + _bias_bytes(tile) <= MAX_SHARED_BYTES else rest + v)


def dbias_shared_bytes(tile: Tile, problem: Problem, *, keeps_bias: bool = False) -> int:
    """Shared memory of the kernel for dbias; a bias that is not staged is kept if that fits, or if ``keeps_bias``."""
    rows = tile.tile_q + tile.tile_kv
    place = _tile_bytes(rows, max(tile.head_dim, tile.head_dim_v))
    records = 4 * rows * (problem.segments + problem.positions) + 32 + 32 + 16
    records += 16 * tile.tile_q if problem.mask is not None else 0
    rest = tile.stages * (place + records) + _bias_bytes(tile) + 128
    with_kept = rest + (0 if tile.staged_bias else 4 * tile.tile_q * tile.tile_kv)
    return with_kept if keeps_bias or with_kept <= MAX_SHARED_BYTES else rest


def _splits(tile: Tile) -> bool:
    return max(tile.head_dim, tile.head_dim_v) > _LARGEST_FUSED_HEAD_DIM


def _head_dim_tile(head_dim: int) -> int:
    return -(-head_dim // 64) * 64


def _check_head_dims(problem: Problem) -> None:
    if max(problem.head_dim, problem.head_dim_v) > LARGEST_HEAD_DIM:
        raise ValueError(
            f"head dims {problem.head_dim} and {problem.head_dim_v}: at most {LARGEST_HEAD_DIM}"
        )


def _can_stage(problem: Problem) -> bool:
    """Whether tiles of the bias can be copied: the type of q, both axes, rows on 16-byte boundaries."""
    if problem.bias is None or problem.bias_dtype != problem.dtype:
        return False
    both = problem.bias[2] == problem.q_len > 1 and problem.bias[3] == problem.kv_len > 1
    return both and problem.kv_len % 8 == 0


def _has_costly_terms(problem: Problem, *, staged_bias: bool) -> bool:
    """Whether what acts on scores, but for the softcap, takes many registers.

    Found by compiling: a bias that is read where it lies, and most combinations of three.
    """
    terms = (problem.bias, problem.mask, problem.alibi_slopes, problem.dropout)
    used = sum(term is not None for term in terms) + problem.positions
    rows = problem.dropout is not None and problem.dropout.rows
    direct = problem.bias is not None and not staged_bias and problem.bias[2] > 1
    slopes_by_positions = problem.alibi_slopes is not None and problem.positions
    return direct or rows or slopes_by_positions or used > 2


def _is_crowded(problem: Problem, *, staged_bias: bool) -> bool:
    """Whether there are no registers for 128 queries beside the gradients of 64 keys."""
    return problem.softcap > 0 or _has_costly_terms(problem, staged_bias=staged_bias)


def can_store_ds(problem: Problem, batch: int, num_heads: int) -> bool:
    """Whether the kernel that owns keys can store the gradients of the scores, of which dbias is made.

    They are rounded to the type of the bias, and contain the slope of a softcap. Heads that share a bias would take
    scratch for all of them.
    """
    if not _can_stage(problem) or problem.softcap > 0 or not _is_number(batch):
        return False
    assert problem.bias is not None
    widest = max(_head_dim_tile(problem.head_dim), _head_dim_tile(problem.head_dim_v))
    # At head dim 64 batch entries that share a bias are added up sooner by computing their scores again.
    pays = widest > 64 or problem.bias[0] == batch
    return pays and widest <= _LARGEST_FUSED_HEAD_DIM and problem.bias[1] == num_heads


def _has_dq_warpgroup(problem: Problem, *, staged_bias: bool) -> bool:
    """Whether a warpgroup of its own computes dq; the others then have fewer registers (found by compiling)."""
    head_dim, head_dim_v = _head_dim_tile(problem.head_dim), _head_dim_tile(problem.head_dim_v)
    widest = max(head_dim, head_dim_v)
    if widest not in _DQ_WARPGROUP_HEAD_DIMS:
        return False
    if widest > _LARGEST_FUSED_HEAD_DIM:
        plain = not _has_step_terms(problem) and problem.mask is None and not problem.positions
        return plain and problem.softcap == 0
    fits = problem.softcap == 0 or widest == 64
    costly = _has_costly_terms(problem, staged_bias=staged_bias)
    return head_dim == head_dim_v and fits and not costly


def _tile_with_dq_warpgroup(problem: Problem, *, staged_bias: bool) -> Tile:
    head_dim, head_dim_v = _head_dim_tile(problem.head_dim), _head_dim_tile(problem.head_dim_v)
    widest = max(head_dim, head_dim_v)
    tile_kv = 64 if widest > _LARGEST_FUSED_HEAD_DIM else 128
    stages = {64: 4, 128: 3}.get(widest, 2)
    tile = Tile(head_dim, head_dim_v, 64, tile_kv, stages, staged_bias=staged_bias)
    return dataclasses.replace(tile, dq_warpgroup=True)


def keys_tile(problem: Problem, *, fused: bool, stores_ds: bool = False) -> Tile:
    """Picks the tile of the kernels that own keys: with dq, as far as the head dims allow, or without it.

    ``stores_ds``: see ``can_store_ds``.

    Raises:
      ValueError: a head dim is larger than LARGEST_HEAD_DIM.
    """
    _check_head_dims(problem)
    head_dim, head_dim_v = _head_dim_tile(problem.head_dim), _head_dim_tile(problem.head_dim_v)
    staged = _can_stage(problem)
    if fused and not stores_ds and _has_dq_warpgroup(problem, staged_bias=staged):
        return _tile_with_dq_warpgroup(problem, staged_bias=staged)
    if max(head_dim, head_dim_v) > _LARGEST_FUSED_HEAD_DIM:
        tile = Tile(head_dim, head_dim_v, tile_q=64, tile_kv=64)
        staged_tile = dataclasses.replace(tile, staged_bias=staged)
        fits = keys_shared_bytes(staged_tile, problem, fused=False) <= MAX_SHARED_BYTES
        return staged_tile if fits else tile
    tile = Tile(
        head_dim, head_dim_v, tile_q=64, tile_kv=128, staged_bias=staged, stores_ds=stores_ds
    )
    if problem.softcap > 0 or head_dim != head_dim_v:
        return tile
    if head_dim == 64:
        if _is_crowded(problem, staged_bias=staged):
            return dataclasses.replace(tile, bulk_reduce=fused and not stores_ds)
        # Two tiles of a bias are worth more than the room for bulk reductions; other summands without a band take their
        # registers.
        adds = problem.alibi_slopes is not None or problem.bias is not None
        with_bulk = fused and not staged and not (adds and problem.band.unbounded)
        return dataclasses.replace(tile, tile_q=128, bulk_reduce=with_bulk)
    if problem.band.unbounded and not _has_step_terms(problem) and problem.mask is None:
        return dataclasses.replace(tile, ds_in_registers=fused)
    direct_bias = problem.bias is not None and problem.bias[2] > 1 and not staged
    if direct_bias or (problem.alibi_slopes is not None and problem.positions):
        return tile  # registers
    bulk = dataclasses.replace(tile, bulk_reduce=fused)
    return bulk if keys_shared_bytes(bulk, problem, fused=fused) <= MAX_SHARED_BYTES else tile


def queries_tile(problem: Problem) -> Tile:
    """Picks the tile of the kernel that owns queries.

    Raises:
      ValueError: a head dim is larger than LARGEST_HEAD_DIM.
    """
    _check_head_dims(problem)
    head_dim, head_dim_v = _head_dim_tile(problem.head_dim), _head_dim_tile(problem.head_dim_v)
    plain = not _has_step_terms(problem) and problem.mask is None
    # A consumer thread holds head_dim / 2 values of dq, tile_kv scores and their gradients, tile_kv / 4 packed words.
    if problem.softcap > 0 or max(head_dim, head_dim_v) > 128:
        tile_kv = 64
    elif max(head_dim, head_dim_v) == 64:
        tile_kv = 128
    else:
        tile_kv = 96 if plain else 64
    tile = Tile(head_dim, head_dim_v, tile_q=128, tile_kv=tile_kv)
    candidates = [tile, dataclasses.replace(tile, tile_kv=32)]
    if _can_stage(problem):
        candidates = [dataclasses.replace(t, staged_bias=True) for t in candidates] + candidates
    for candidate in candidates:
        if queries_shared_bytes(candidate, problem) <= MAX_SHARED_BYTES:
            return candidate
    raise AssertionError("every head dim up to LARGEST_HEAD_DIM has a tile of 32 keys")


def dbias_tile(problem: Problem) -> Tile:
    """Picks the tile of the kernel for dbias.

    Raises:
      ValueError: a head dim is larger than LARGEST_HEAD_DIM.
    """
    _check_head_dims(problem)
    head_dim, head_dim_v = _head_dim_tile(problem.head_dim), _head_dim_tile(problem.head_dim_v)
    crowded = _is_crowded(problem, staged_bias=True) or problem.positions
    tile_kv = 128 if max(head_dim, head_dim_v) <= 128 and not crowded else 64
    tiles = [
        Tile(head_dim, head_dim_v, 128, tile_kv, stages=stages, staged_bias=_can_stage(problem))
        for stages in (4, 3, 2)
    ]
    for keeps_bias in (True, False):
        for tile in tiles:
            if dbias_shared_bytes(tile, problem, keeps_bias=keeps_bias) <= MAX_SHARED_BYTES:
                return tile
    raise AssertionError("every head dim up to LARGEST_HEAD_DIM has a tile of 64 keys")


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
        "mask": problem.mask is not None,
        "bias": problem.bias is not None,
        "softcap": softcap,
        "positions": problem.positions,
        "alibi": problem.alibi_slopes is not None,
        "dropout": problem.dropout is not None,
        "dropout_rows": problem.dropout is not None and problem.dropout.rows,
        "staged_bias": tile.staged_bias,
        "row_bias": problem.bias is not None and problem.bias[2] == 1,
    }
    members: dict[str, str | int] = {
        "element": _ELEMENTS[problem.dtype],
        **({"bias_element": _ELEMENTS[problem.bias_dtype]} if problem.bias is not None else {}),
        "head_dim": tile.head_dim,
        "head_dim_v": tile.head_dim_v,
        "tile_q": tile.tile_q,
        "tile_kv": tile.tile_kv,
        "num_warps": _NUM_WARPS_WITH_DQ if tile.dq_warpgroup else _NUM_WARPS,
        "stages": tile.stages,
    }
    members |= {name: 1 for name, used in flags.items() if used}
    if not problem.scale > 0 and not softcap:
        members["scale_first"] = 1
    if tile.ds_in_registers:
        members["ds_in_registers"] = 1
    if tile.bulk_reduce:
        members["bulk_reduce"] = 1
    if tile.stores_ds:
        members["stores_ds"] = 1
    return _key(family, **members)


def _tiles_bytes(problem: Problem, batch: int, tile: Tile, *, owns_queries: bool) -> int:
    """Scratch for what is known of a kernel's tiles: ranges of segments and positions, the packed mask."""
    found = range_bytes(problem, batch, tile.tile_q, tile.tile_kv)
    if problem.mask is None:
        return found
    entries, heads, queries, keys = problem.mask
    if owns_queries:
        return found + mask_tiles_bytes((entries, heads, queries, keys), tile.tile_q, tile.tile_kv)
    return found + mask_tiles_bytes((entries, heads, keys, queries), tile.tile_kv, tile.tile_q)


def _ds_bytes(problem: Problem, batch: int, num_heads: int) -> int:
    """Scratch for gradients of scores (``DsParts`` in ``cc/cuda/backward_sm90.cc``)."""
    assert problem.bias is not None
    if problem.bias[0] == batch or batch == 0:
        return 0
    kv_heads = problem.num_kv_heads
    group = num_heads // kv_heads
    heads = max(1, kv_heads // batch) * group
    return batch * heads * problem.q_len * problem.kv_len * 2 + _SCRATCH_ALIGNMENT


def _is_number(extent: object) -> bool:
    return isinstance(extent, int)


def _partials_bytes(problem: Problem, batch: int, num_heads: int, tile: Tile) -> int:
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
    heads = num_heads // bias_heads
    steps = (batch // bias_batch) * heads * (q_tiles // tiles_query) * (kv_tiles // tiles_key)
    splits = max(1, min(-(-_WANTED_DBIAS_BLOCKS // tiles), steps))
    return splits * bias_batch * bias_heads * queries * keys * 4 if splits > 1 else 0


def plan_backward(
    problem: Problem,
    batch: int,
    num_heads: int,
    *,
    wants: tuple[bool, bool, bool, bool],
    deterministic: bool,
) -> Plan:
    """Plans the backward pass of ``flash`` on sm_90.

    Args:
      problem: the problem; head dims are multiples of ``flash_tiles.HEAD_DIM_MULTIPLE``.
      batch: scales the scratch only; may be symbolic.
      num_heads: of the queries; scales the scratch only.
      wants: which of dq, dk, dv and dbias are wanted.
      deterministic: the same bits every time: dq by a kernel of its own instead of by reductions in memory.
        Head dims above 128 always run so.

    Returns:
      The plan; its kernels are those that the wanted gradients need.
    """
    want_q, want_k, want_v, want_bias = wants
    want_keys = want_k or want_v
    element = _ELEMENTS[problem.dtype]
    stores_ds = want_bias and want_keys and can_store_ds(problem, batch, num_heads)
    keys = keys_tile(problem, fused=want_q and not deterministic, stores_ds=stores_ds)
    fuses = not _splits(keys) or keys.dq_warpgroup
    fused = want_q and want_keys and not deterministic and fuses

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
        scratch += _tiles_bytes(problem, batch, keys, owns_queries=False)
    if fused:
        kernels.append(
            _key("backward_cast", element=element, head_dim=keys.head_dim, tile_q=keys.tile_q)
        )
        scratch += rows * keys.head_dim * 4 + _SCRATCH_ALIGNMENT
    elif want_q:
        tile = queries_tile(problem)
        kernels.append(_attention_key("sm90_backward_dq", problem, tile))
        scratch += _tiles_bytes(problem, batch, tile, owns_queries=True)
    if stores_ds:
        kernels.append(_key("backward_sum", element=element))
        scratch += _ds_bytes(problem, batch, num_heads)
    elif want_bias and problem.bias is not None:
        tile = dbias_tile(problem)
        kernels.append(_attention_key("sm90_backward_dbias", problem, tile))
        kernels.append(_key("sum_partials", bias_element=_ELEMENTS[problem.bias_dtype]))
        scratch += _tiles_bytes(problem, batch, tile, owns_queries=True)
        scratch += _partials_bytes(problem, batch, num_heads, tile) + _SCRATCH_ALIGNMENT
    if problem.segments:
        kernels.append(_key("segment_ranges"))
    if problem.positions and not problem.band.unbounded:
        kernels.append(_key("position_ranges"))
    if problem.mask is not None:
        kernels.append(MASK_KEY)
    return Plan(";".join(kernels), scratch)


_HOT_HEAD_DIMS = {"bfloat16": (64, 128, 256), "float16": (64, 128)}


def hot_keys() -> tuple[str, ...]:
    """Returns the kernel keys of the common problems, in the order and spelling of ``cc/core/hot_set.txt``."""
    keys: dict[str, None] = {}
    for dtype, head_dims in _HOT_HEAD_DIMS.items():
        for head_dim in head_dims:
            for unbounded in (True, False):
                problem = HotProblem(dtype, head_dim, head_dim, HotBand(unbounded))
                plan = plan_backward(
                    problem, 1, 1, wants=(True, True, True, False), deterministic=False
                )
                keys |= dict.fromkeys(plan.kernels.split(";"))
    return tuple(keys)
