"""Tiles, stages and warps of the kernels for every CUDA device: the one place that picks them, and their keys.

Shared memory is counted as the kernels count it (``cc/kernels/sm80/*_shape.cuh``); a test compares the two.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from jattn import device_gradients
from jattn.backends.kernel_plan import (
    ELEMENTS,
    SCRATCH_ALIGNMENT,
    Plan,
    bias_element,
    compose_key,
    dbias_partials_bytes,
    distinct_keys,
    feature_flags,
    has_program_slopes,
    hot_problem,
    program_text,
    round_up,
    tile_facts_bytes,
    tile_pass_keys,
)
from jattn.spec import Spec


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


def _element_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _blocks(shared_bytes: int, limit: int) -> int:
    """How many blocks share a multiprocessor, as far as it matters: 0, 1 or 2.

    It has 1 KiB more than one block may use, and keeps 1 KiB for each block.
    """
    return min(2, (limit + 1024) // (shared_bytes + 1024))


def _can_stage_bias(spec: Spec, tile_kv: int) -> bool:
    """Whether tiles of the bias can be copied to shared memory: both axes, rows on 16-byte boundaries."""
    if spec.bias is None:
        return False
    both = spec.bias[2] == spec.q_len > 1 and spec.bias[3] == spec.kv_len > 1
    element_bytes = _element_bytes(spec.bias_dtype)
    return both and spec.kv_len * element_bytes % 16 == 0 and tile_kv * element_bytes % 64 == 0


def staged_bytes(tile: Tile, spec: Spec) -> int:
    """Shared memory of one stage for the tile of a bias."""
    elements = tile.tile_q * tile.tile_kv if tile.staged_bias else 0
    return elements * _element_bytes(spec.bias_dtype)


def _stage_bias(
    tile: Tile, spec: Spec, arch: tuple[int, int], bytes_of: Callable[[Tile], int]
) -> Tile:
    """Lets a tile read the bias through shared memory where that leaves as many blocks on a multiprocessor.

    The tile itself is chosen without it: the bits of a result do not depend on the form of a bias.
    """
    limit = shared_limit_bytes(arch)
    staged = dataclasses.replace(tile, staged_bias=_can_stage_bias(spec, tile.tile_kv))
    unchanged = _blocks(bytes_of(staged), limit) == _blocks(bytes_of(tile), limit)
    return staged if unchanged else tile


def forward_shared_bytes(tile: Tile, spec: Spec) -> int:
    """Shared memory of the sm80 forward kernel."""
    loop = tile.tile_q * tile.head_dim + tile.stages * tile.tile_kv * (
        tile.head_dim + tile.head_dim_v
    )
    elements = max(loop, tile.tile_q * tile.head_dim_v)
    return elements * _element_bytes(spec.dtype) + staged_bytes(tile, spec) + 48


# (tile_q, tile_kv, num_warps, stages), best first; the first that fits into shared memory is taken.
_Candidates = Sequence[tuple[int, int, int, int]]


def _too_wide(spec: Spec, limit: int) -> ValueError:
    return ValueError(
        f"head_dim {spec.head_dim} and {spec.head_dim_v} in {spec.dtype} do not fit into the "
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


def _candidates_of_program(dtype: str, head_dim_v: int) -> _Candidates:
    """Tiles of the forward kernel where scores pass through a program, whose values need registers beside theirs.

    With the tiles of other problems a cheap program spilled up to 100 bytes of 16 bits and 800 of float32.
    """
    candidates = _forward_candidates(dtype, head_dim_v)
    if dtype == "float32":
        if head_dim_v > 64:
            return tuple(candidate for candidate in candidates if candidate[0] <= 64)
        most_keys = 32
    else:
        most_keys = 32 if 64 < head_dim_v <= 128 else 64
    return tuple((q, min(kv, most_keys), warps, stages) for q, kv, warps, stages in candidates)


MOST_FEW_ROWS = 64  # queries for which a tile has no more rows than they need


def _few_rows_candidates(rows: int, dtype: str, head_dim_v: int) -> _Candidates:
    """Tiles for so few queries that reading keys takes longer than products with them.

    Small ones, of a warp for 16 rows, since blocks beside each other are what keeps copies under way.
    """
    if rows > MOST_FEW_ROWS:
        return ()
    tile_q = 16 if rows <= 16 else 32 if rows <= 32 else 64
    long = head_dim_v <= (128 if tile_q == 64 else 64)
    tile_kv = 64 if dtype != "float32" and long else 32
    return tuple((tile_q, tile_kv, tile_q // 16, stages) for stages in (2, 1))


def forward_tile(spec: Spec, arch: tuple[int, int]) -> Tile:
    """Picks the tile of the sm80 forward kernel."""
    head_dim = round_up(spec.head_dim, 32)
    slices = -(-spec.head_dim_v // 256)
    head_dim_v = round_up(-(-spec.head_dim_v // slices), 32)
    limit = shared_limit_bytes(arch)
    of_many = _forward_candidates if spec.score_mod is None else _candidates_of_program
    candidates = (
        *_few_rows_candidates(spec.q_len, spec.dtype, head_dim_v),
        *of_many(spec.dtype, head_dim_v),
    )
    for i, (tile_q, tile_kv, num_warps, stages) in enumerate(candidates):
        tile = Tile(head_dim, head_dim_v, tile_q, tile_kv, num_warps, stages)
        blocks = _blocks(forward_shared_bytes(tile, spec), limit)
        if blocks == 1 and (tile_q, tile_kv, num_warps, 1) in candidates[i + 1 :]:
            # A second block hides more than a second stage.
            single = dataclasses.replace(tile, stages=1)
            if num_warps <= 4 and _blocks(forward_shared_bytes(single, spec), limit) > 1:
                continue
        if blocks > 0:
            return _stage_bias(tile, spec, arch, lambda t: forward_shared_bytes(t, spec))
    raise _too_wide(spec, limit)


def tile_of_queries(spec: Spec, arch: tuple[int, int], queries: int) -> tuple[int, int]:
    """Returns rows and columns of the forward tile that a problem with so many queries would have."""
    tile = forward_tile(dataclasses.replace(spec, q_len=queries), arch)
    return tile.tile_q, tile.tile_kv


def _arch_name(arch: tuple[int, int]) -> str:
    return f"sm_{arch[0]}{arch[1]}"


def tf32_chain() -> int:
    """How many steps of a float32 product the tensor unit adds up before a rounded addition.

    Its own additions truncate; a rounded one per step takes as long as the product. On an H200, head dim 128, causal,
    TFLOP/s of the forward and of forward and backward: 47.7 and 40.4 with chains of 1, 52.1 and 43.4 of 2, 56.2 and
    48.0 of 4. The largest error over eight problems, as a part of the bound: 0.50, 0.53 and 0.78; with 4 in the
    forward and 2 in the kernels that own keys it was 1.03. So all kernels of a call take the same: dp - delta cancels,
    and so do equal truncations in both.
    """
    return 4


def _has_narrow_rows(spec: Spec) -> bool:
    """Whether rows of some operand are no multiple of the 16 bytes that one copy takes."""
    wide = 16 // _element_bytes(spec.dtype)
    return spec.head_dim % wide != 0 or spec.head_dim_v % wide != 0


def _attention_key(
    family: str,
    spec: Spec,
    arch: tuple[int, int],
    tile: Tile,
    captures: tuple[bool, ...] = (),
) -> str:
    chain = tf32_chain() if spec.dtype == "float32" else 1
    return compose_key(
        family,
        _arch_name(arch),
        element=ELEMENTS[spec.dtype],
        head_dim=tile.head_dim,
        head_dim_v=tile.head_dim_v,
        tile_q=tile.tile_q,
        tile_kv=tile.tile_kv,
        num_warps=tile.num_warps,
        stages=tile.stages,
        bias_element=bias_element(spec),
        **feature_flags(spec, captures),
        narrow_rows=_has_narrow_rows(spec),
        staged_bias=tile.staged_bias,
        shared_scores=tile.shared_scores,
        grad_slices=tile.grad_slices if tile.grad_slices > 1 else None,
        tf32_chain=chain if chain > 1 else None,
    )


def plan_forward(spec: Spec, arch: tuple[int, int]) -> Plan:
    """Plans the forward pass of ``mem_efficient``. The batch only scales the scratch and may be symbolic."""
    tile = forward_tile(spec, arch)
    keys = [_attention_key("sm80_forward", spec, arch, tile)]
    keys += tile_pass_keys(spec, _arch_name(arch))
    scratch = tile_facts_bytes(spec, tile.tile_q, tile.tile_kv)
    return Plan(";".join(keys), scratch, program_text(spec))


def keys_shared_bytes(tile: Tile, spec: Spec, *, fused: bool) -> int:
    """Shared memory of the sm80 backward kernels that own keys."""
    rows = tile.tile_kv + tile.stages * tile.tile_q
    score_tiles = 2 if tile.shared_scores else 1 if fused else 0
    elements = rows * (tile.head_dim + tile.head_dim_v) + score_tiles * tile.tile_kv * tile.tile_q
    per_stage = 2 * tile.tile_q * 4 + staged_bytes(tile, spec)
    return elements * _element_bytes(spec.dtype) + tile.stages * per_stage + 64


def queries_shared_bytes(tile: Tile, spec: Spec) -> int:
    """Shared memory of the sm80 backward kernel that owns queries."""
    rows = tile.tile_q + tile.stages * tile.tile_kv
    elements = rows * (tile.head_dim + tile.head_dim_v)
    return elements * _element_bytes(spec.dtype) + staged_bytes(tile, spec)


def dbias_shared_bytes(tile: Tile, spec: Spec) -> int:
    """Shared memory of the sm80 dbias kernel."""
    elements = (tile.tile_q + tile.tile_kv) * (tile.head_dim + tile.head_dim_v)
    loop = elements * _element_bytes(spec.dtype) + staged_bytes(tile, spec)
    return max(loop, tile.num_warps * tile.tile_kv * 4)


def _backward_width(head_dim: int, slices: int) -> int:
    """Width of a tile whose gradient columns are cut into ``slices`` parts, each stored as a tile of its own."""
    return round_up(head_dim, 32 * slices)


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


def keys_tile(spec: Spec, arch: tuple[int, int], *, fused: bool) -> Tile:
    """Picks the tile of the backward kernel that owns keys (dk, dv, and dq if fused).

    A warp of 16 keys holds dk and dv of up to 128 columns each in registers; wider heads are cut into slices, each of
    which computes the scores again.
    """
    dtype = spec.dtype
    widest = max(spec.head_dim, spec.head_dim_v)
    slices = -(-widest // 128)
    head_dim = _backward_width(spec.head_dim, slices)
    head_dim_v = _backward_width(spec.head_dim_v, slices)
    limit = shared_limit_bytes(arch)
    # The derivative of the softcap takes as many registers as the scores, and so do the slopes of a program.
    arrays = (spec.softcap > 0) + has_program_slopes(spec)
    most_queries = 128 if arrays == 0 else 64 if arrays == 1 and widest <= 64 else 32
    # Beside shared scores of 64 queries a program spilled 40 bytes of registers; of 32, where there are slopes, none.
    can_share = spec.score_mod is None or arrays > 0
    for tile_q, tile_kv, num_warps, stages in _keys_candidates(dtype, widest, slices):
        queries = min(tile_q, most_queries)
        own = Tile(head_dim, head_dim_v, queries, tile_kv, num_warps, stages, slices)
        shared = dataclasses.replace(own, shared_scores=True)
        shares = can_share and shares_scores(dtype, widest, fused=fused)
        for tile in (shared, own) if shares else (own,):
            fits = keys_shared_bytes(tile, spec, fused=fused) <= limit
            if fits and _all_warps_fit(tile, fused=fused):
                return _stage_bias(
                    tile, spec, arch, lambda t: keys_shared_bytes(t, spec, fused=fused)
                )
    raise _too_wide(spec, limit)


def _first_that_fits(
    tiles: Iterable[Tile],
    spec: Spec,
    arch: tuple[int, int],
    bytes_of: Callable[[Tile, Spec], int],
) -> Tile:
    """Returns the first tile that fits into shared memory, which ``bytes_of`` counts."""
    limit = shared_limit_bytes(arch)
    for tile in tiles:
        if bytes_of(tile, spec) <= limit:
            return _stage_bias(tile, spec, arch, lambda t: bytes_of(t, spec))
    raise _too_wide(spec, limit)


def queries_tile(spec: Spec, arch: tuple[int, int]) -> Tile:
    """Picks the tile of the backward kernel that owns queries (dq of the deterministic form)."""
    slices = -(-spec.head_dim // 256)
    head_dim = _backward_width(spec.head_dim, slices)
    head_dim_v = round_up(spec.head_dim_v, 32)
    candidates: _Candidates = ((64, 32, 4, 1), (32, 32, 2, 1), (16, 16, 1, 1))
    if spec.dtype == "float32":
        if head_dim <= 64:
            candidates = ((128, 32, 4, 1), *candidates)
    elif head_dim <= 64:
        tile_kv = 64 if spec.score_mod is None else 32  # a program needs registers, too
        candidates = ((128, tile_kv, 4, 2), (128, tile_kv, 4, 1), *candidates)
    elif head_dim <= 128:
        if spec.score_mod is None:
            candidates = ((128, 32, 4, 2), (128, 32, 4, 1), *candidates)
        else:
            candidates = ((64, 64, 4, 2), *candidates)
    else:
        candidates = ((64, 32, 4, 2), *candidates)
    tiles = (Tile(head_dim, head_dim_v, *candidate, slices) for candidate in candidates)
    return _first_that_fits(tiles, spec, arch, queries_shared_bytes)


def dbias_tile(spec: Spec, arch: tuple[int, int]) -> Tile:
    """Picks the tile of the dbias kernel."""
    head_dim, head_dim_v = round_up(spec.head_dim, 32), round_up(spec.head_dim_v, 32)
    candidates: _Candidates = ((64, 32, 4, 1), (32, 32, 2, 1), (16, 16, 1, 1))
    if spec.dtype != "float32":
        candidates = ((64, 64, 4, 1), *candidates)
    tiles = (Tile(head_dim, head_dim_v, *candidate) for candidate in candidates)
    return _first_that_fits(tiles, spec, arch, dbias_shared_bytes)


def slopes_tile(spec: Spec, arch: tuple[int, int]) -> Tile:
    """Picks the tile of the kernels for the gradients of ALiBi slopes and of what a score function reads.

    It is that of dq, without columns of a gradient.
    """
    head_dim, head_dim_v = round_up(spec.head_dim, 32), round_up(spec.head_dim_v, 32)
    widest = max(head_dim, head_dim_v)
    tile_kv = 64 if spec.score_mod is None else 32  # a program needs registers, too
    candidates: _Candidates = ((64, 32, 4, 1), (32, 32, 2, 1), (16, 16, 1, 1))
    if spec.dtype == "float32":
        if widest <= 64:
            candidates = ((128, 32, 4, 1), *candidates)
    elif widest <= 64:
        candidates = ((128, tile_kv, 4, 2), (128, tile_kv, 4, 1), *candidates)
    elif widest <= 128:
        candidates = ((128, tile_kv, 4, 1), *candidates)
    else:
        candidates = ((64, 32, 4, 2), *candidates)
    tiles = (Tile(head_dim, head_dim_v, *candidate) for candidate in candidates)
    return _first_that_fits(tiles, spec, arch, queries_shared_bytes)


# Copies of gradients of captures, which blocks share (``cc/cuda/backward.cc``).
_COPIED_ELEMENTS = 2**20
_MOST_COPIES = 64


# Blocks that the dbias kernel is given at least, if there is enough work (``cc/cuda/backward.cc``).
_WANTED_DBIAS_BLOCKS = 512


def _statistics_rows(spec: Spec) -> int:
    """Rows of lse and delta in scratch, padded to whole tiles."""
    return spec.batch * spec.num_heads * round_up(spec.q_len, 128)


def _row_delta_key(spec: Spec, arch: tuple[int, int]) -> str:
    return compose_key(
        "row_delta",
        _arch_name(arch),
        element=ELEMENTS[spec.dtype],
        head_dim_v=round_up(spec.head_dim_v, 32),
        narrow_rows=_has_narrow_rows(spec),
    )


def plan_slopes_gradient(spec: Spec, arch: tuple[int, int]) -> tuple[Plan, int]:
    """Plans the gradient of ALiBi slopes.

    Args:
      spec: the problem, without sinks. The batch only scales the scratch and may be symbolic.
      arch: compute capability.

    Returns:
      The plan, and the parts in which the gradient of a head comes, one for each tile of queries.
    """
    tile = slopes_tile(spec, arch)
    keys = [
        _row_delta_key(spec, arch),
        _attention_key("sm80_backward_dslopes", spec, arch, tile),
        *tile_pass_keys(spec, _arch_name(arch)),
    ]
    scratch = 2 * (_statistics_rows(spec) * 4 + SCRATCH_ALIGNMENT)
    scratch += tile_facts_bytes(spec, tile.tile_q, tile.tile_kv)
    plan = Plan(";".join(keys), scratch, program_text(spec))
    return plan, -(-spec.q_len // tile.tile_q)


def plan_capture_gradients(
    spec: Spec, arch: tuple[int, int], wanted: tuple[bool, ...], *, deterministic: bool
) -> Plan:
    """Plans the gradients of what the score function reads.

    Args:
      spec: the problem, without sinks. The batch only scales the scratch and may be symbolic.
      arch: compute capability.
      wanted: of which of its captures; ``device_gradients.can_sum`` says of which it can.
      deterministic: the same bits every time, by sums of whole numbers, after a run that finds their unit.
    """
    assert spec.score_mod is not None
    tile = slopes_tile(spec, arch)
    families = ["sm80_backward_dcaptures"]
    if deterministic:
        families = ["sm80_backward_dcaptures_sizes", "sm80_backward_dcaptures_exact"]
    program = program_text(spec, wanted)
    keys = [_row_delta_key(spec, arch)]
    keys += [_attention_key(family, spec, arch, tile, wanted) for family in families]
    scratch = 2 * (_statistics_rows(spec) * 4 + SCRATCH_ALIGNMENT)
    scratch += tile_facts_bytes(spec, tile.tile_q, tile.tile_kv)
    elements = device_gradients.num_elements(spec.score_mod, wanted)
    copies = max(1, min(_COPIED_ELEMENTS // elements, _MOST_COPIES))
    if deterministic or copies > 1:
        digest = hashlib.sha256(program.encode()).hexdigest()
        keys.append(compose_key("capture_sums", _arch_name(arch), program=True, digest=digest))
        scratch += copies * elements * (8 if deterministic else 4) + 2 * SCRATCH_ALIGNMENT
    return Plan(";".join([*keys, *tile_pass_keys(spec, _arch_name(arch))]), scratch, program)


def plan_backward(
    spec: Spec,
    arch: tuple[int, int],
    *,
    wants: tuple[bool, bool, bool, bool],
    deterministic: bool,
) -> Plan:
    """Plans the backward pass of ``mem_efficient``.

    Args:
      spec: the problem. The batch only scales the scratch and may be symbolic.
      arch: compute capability.
      wants: which of dq, dk, dv and dbias are wanted.
      deterministic: the same bits every time: dq by a kernel of its own instead of by reductions in memory.

    Returns:
      The plan; its kernels are those that the wanted gradients need.
    """
    want_q, want_k, want_v, want_bias = wants
    want_keys = want_k or want_v
    fused = not deterministic and want_q and want_keys
    narrow_rows = _has_narrow_rows(spec)
    element, arch_name = ELEMENTS[spec.dtype], _arch_name(arch)

    rows = _statistics_rows(spec)
    scratch = 2 * (rows * 4 + SCRATCH_ALIGNMENT)
    keys = [_row_delta_key(spec, arch)]
    if want_keys:
        family = "sm80_backward" if fused else "sm80_backward_dkv"
        tile = keys_tile(spec, arch, fused=fused)
        keys.append(_attention_key(family, spec, arch, tile))
        scratch += tile_facts_bytes(spec, tile.tile_q, tile.tile_kv, owns_keys=True)
        if fused:
            cast = compose_key(
                "cast_grad",
                arch_name,
                element=element,
                head_dim=tile.head_dim,
                tile_q=tile.tile_q,
                num_warps=tile.num_warps,
                grad_slices=tile.grad_slices,
                narrow_rows=narrow_rows,
            )
            keys.append(cast)
            scratch += rows * tile.head_dim * 4 + SCRATCH_ALIGNMENT
    if want_q and not fused:
        tile = queries_tile(spec, arch)
        keys.append(_attention_key("sm80_backward_dq", spec, arch, tile))
        scratch += tile_facts_bytes(spec, tile.tile_q, tile.tile_kv)
    if want_bias and spec.bias is not None:
        tile = dbias_tile(spec, arch)
        keys.append(_attention_key("sm80_backward_dbias", spec, arch, tile))
        keys.append(compose_key("sum_partials", arch_name, bias_element=bias_element(spec)))
        scratch += tile_facts_bytes(spec, tile.tile_q, tile.tile_kv) + SCRATCH_ALIGNMENT
        scratch += dbias_partials_bytes(spec, tile.tile_q, tile.tile_kv, _WANTED_DBIAS_BLOCKS)
    keys += tile_pass_keys(spec, arch_name)
    return Plan(";".join(keys), scratch, program_text(spec))


def _hot_plans() -> Iterator[Plan]:
    arch = (9, 0)
    wants = (True, True, True, False)
    for dtype in ("bfloat16", "float16"):
        for head_dim in (64, 128):
            for causal in (False, True):
                spec = hot_problem(dtype, head_dim, head_dim, causal=causal)
                yield plan_forward(spec, arch)
                for deterministic in (False, True):
                    yield plan_backward(spec, arch, wants=wants, deterministic=deterministic)


def hot_keys() -> tuple[str, ...]:
    """Returns the kernel keys of the common problems, in the order and spelling of ``cc/core/hot_set.txt``.

    Self-attention in 16 bits at head dims 64 and 128, full and causal, forward and both forms of the backward, sm_90.
    """
    return distinct_keys(_hot_plans())
