"""Few queries of many keys as another problem of the same kernels: one that reads keys once and keeps a GPU busy.

The kernels of ``mem_efficient`` give every tile of queries of every head a block, which walks over all keys. While
decoding that is one block a head, and each head of a group reads the group's keys for itself. Two programs of XLA
operations around the kernels mend that; they touch keys and values by reshapes only, which cost nothing:

- ``pack_heads``: the queries of a group's heads become queries of one head.
- ``split_keys``: parts of the keys become batch entries, and their results are added up by their log-sum-exp.

A band counts indices, which both change; it becomes one of positions. Sinks count once, and join in the end.
``flash`` does both inside its kernels (``key_splits``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jattn.backends.kernel_plan import is_number
from jattn.backends.key_splits import (
    MULTIPROCESSORS,
    choose_splits,
    is_worth_packing,
    tiles_to_cut,
    without_idle_band,
)
from jattn.spec import Operands, Spec, clamped_lengths

Run = Callable[[Spec, Operands[jax.Array]], tuple[jax.Array, jax.Array]]  # -> out, lse
TileOf = Callable[[int], tuple[int, int]]  # number of queries -> rows and columns of a tile

# Estimates, not measured: with fewer keys the operations around the kernels would cost more than they save.
LEAST_KEYS = 1024
_COMBINE_US = 20.0  # of the operations that add parts up
_PART_MULTIPLE = 128  # keys: whole tiles
_MANY = 1 << 20  # queries

# Blocks of small tiles wait for copies, not for products. H100, head dim 128, 16 bits: a tile takes a block this long
# where it is alone on its multiprocessor, and so many there take as much from memory as it has.
_SMALL_TILE_US = 1.0
_SMALL_BLOCKS = {"bfloat16": 2, "float16": 2, "float32": 3}


def forward(
    spec: Spec, operands: Operands[jax.Array], run: Run, tile_of: TileOf
) -> tuple[jax.Array, jax.Array]:
    """Runs a problem, with heads packed and keys split where that is faster.

    Args:
      spec, operands: the problem.
      run: the forward pass of the kernels.
      tile_of: rows and columns of the kernel's tiles for so many queries.
    """
    packs, parts = choose(spec, tile_of)
    return rewritten(spec, operands, run, packs=packs, parts=parts)


def choose(spec: Spec, tile_of: TileOf) -> tuple[bool, int]:
    """Says whether to pack the heads of groups, and into how many parts to split the keys."""
    # A score function is given heads and, without positions, indices of keys.
    known = is_number(spec.batch) and spec.dropout is None and spec.score_mod is None
    most_rows, _ = tile_of(_MANY)
    if not known or spec.kv_len < LEAST_KEYS or spec.q_len > most_rows:
        return False, 1
    packs = spec.alibi_slopes is None and is_worth_packing(spec, spec.group_size, most_rows)
    items = dataclasses.replace(
        spec,
        q_len=spec.q_len * spec.group_size if packs else spec.q_len,
        num_heads=spec.num_kv_heads if packs else spec.num_heads,
        positions=True,  # parts are cut from all keys, whatever the band hides
    )
    tile_q, tile_kv = tile_of(items.q_len)
    small = tile_q < most_rows
    return packs, choose_splits(
        items,
        tile_q,
        tile_kv,
        candidates=part_counts(spec.kv_len),
        combine_us=_COMBINE_US,
        in_band=None if spec.positions else tiles_to_cut(spec, 0, spec.q_len, tile_kv),
        blocks=MULTIPROCESSORS * (_SMALL_BLOCKS[spec.dtype] if small else 1),
        tile_us=_SMALL_TILE_US if small else None,
    )


def rewritten(
    spec: Spec, operands: Operands[jax.Array], run: Run, *, packs: bool, parts: int
) -> tuple[jax.Array, jax.Array]:
    """Runs a problem as ``choose`` says."""
    if not packs and parts == 1:
        return run(spec, operands)
    bare = operands._replace(sinks=None)
    bare_spec, bare = by_positions(without_idle_band(spec.without_sinks()), bare)

    def attend(spec: Spec, operands: Operands[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return split_keys(spec, operands, run, parts) if parts > 1 else run(spec, operands)

    out, lse = pack_heads(bare_spec, bare, attend) if packs else attend(bare_spec, bare)
    return (out, lse) if operands.sinks is None else join_sinks_by_lse(out, lse, operands.sinks)


def part_counts(kv_len: int) -> tuple[int, ...]:
    """Returns into how many equal parts of whole tiles so many keys can be split, 1 among them."""
    tiles, rest = divmod(kv_len, _PART_MULTIPLE)
    return (1,) if rest else tuple(n for n in range(1, tiles + 1) if tiles % n == 0)


def by_positions(spec: Spec, operands: Operands[jax.Array]) -> tuple[Spec, Operands[jax.Array]]:
    """Returns the same problem with a band, and slopes, that measure distances between positions."""
    if spec.positions or (spec.band.unbounded and spec.alibi_slopes is None):
        return spec, operands
    shape_q, shape_kv = (spec.batch, spec.q_len), (spec.batch, spec.kv_len)
    q_lengths, kv_lengths = (lengths[:, :, 0, 0] for lengths in clamped_lengths(spec, operands))
    first = kv_lengths - q_lengths if spec.band.lower_right else 0
    queries = jnp.arange(spec.q_len, dtype=jnp.int32)[None] + first
    keys = jnp.arange(spec.kv_len, dtype=jnp.int32)[None]
    operands = operands._replace(
        q_positions=jnp.broadcast_to(queries, shape_q),
        kv_positions=jnp.broadcast_to(keys, shape_kv),
    )
    band = dataclasses.replace(spec.band, lower_right=False)
    return dataclasses.replace(spec, band=band).for_operands(operands), operands


def pack_heads(spec: Spec, operands: Operands[jax.Array], run: Run) -> tuple[jax.Array, jax.Array]:
    """Runs a problem with the queries of a group's heads as those of one head.

    Query t of the group's head g becomes query t * G + g. Not for slopes, dropout, sinks and bands of indices.
    """
    batch, q_len, heads, group = spec.batch, spec.q_len, spec.num_kv_heads, spec.group_size
    q_lengths, _ = clamped_lengths(spec, operands)

    def pack(x: jax.Array | None) -> jax.Array | None:
        """A bias or mask, (B, N, T, S) with any axis 1."""
        if x is None:
            return None
        entries, own_heads, queries, keys = x.shape
        if own_heads == 1:
            return x if queries == 1 else jnp.repeat(x, group, axis=2)
        of_groups = jnp.swapaxes(x.reshape(entries, heads, group, queries, keys), 2, 3)
        of_groups = jnp.broadcast_to(of_groups, (entries, heads, q_len, group, keys))
        return of_groups.reshape(entries, heads, q_len * group, keys)

    def repeat(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.repeat(x, group, axis=1)

    q = operands.q.reshape(batch, q_len, heads, group, spec.head_dim)
    packed = operands._replace(
        q=jnp.swapaxes(q, 2, 3).reshape(batch, q_len * group, heads, spec.head_dim),
        bias=pack(operands.bias),
        mask=pack(operands.mask),
        q_lengths=None if operands.q_lengths is None else q_lengths[:, 0, 0, 0] * group,
        q_segments=repeat(operands.q_segments),
        q_positions=repeat(operands.q_positions),
    )
    out, lse = run(spec.for_operands(packed), packed)
    out = jnp.swapaxes(out.reshape(batch, q_len, group, heads, spec.head_dim_v), 2, 3)
    lse = jnp.swapaxes(lse.reshape(batch, heads, q_len, group), 2, 3)
    return (
        out.reshape(batch, q_len, spec.num_heads, spec.head_dim_v),
        lse.reshape(batch, spec.num_heads, q_len),
    )


def split_keys(
    spec: Spec, operands: Operands[jax.Array], run: Run, parts: int
) -> tuple[jax.Array, jax.Array]:
    """Runs a problem with parts of its keys as batch entries.

    Results of parts are rounded to the dtype of the problem before they are added up in float32. Not for dropout, sinks
    and bands of indices.
    """
    batch, length = spec.batch, spec.kv_len // parts

    def cut(x: jax.Array) -> jax.Array:
        """(B, S, ...) -> (B * parts, S / parts, ...)."""
        return x.reshape(batch * parts, length, *x.shape[2:])

    def cut_if(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else cut(x)

    def repeat(x: jax.Array | None) -> jax.Array | None:
        """(B, ...) -> (B * parts, ...); an axis of 1 that stands for all entries stays."""
        if x is None or x.shape[0] != batch:
            return x
        return jnp.repeat(x, parts, axis=0)

    def cut_last(x: jax.Array | None) -> jax.Array | None:
        """A bias or mask, (B, N, T, S) with any axis 1."""
        if x is None or x.shape[3] == 1:
            return repeat(x)
        x = jnp.broadcast_to(x, (batch, *x.shape[1:]))
        x = jnp.moveaxis(x.reshape(*x.shape[:3], parts, length), 3, 1)
        return x.reshape(batch * parts, *x.shape[2:])

    kv_lengths = None
    if operands.kv_lengths is not None:
        _, whole = clamped_lengths(spec, operands)
        left = whole[:, :, 0, 0] - jnp.arange(parts, dtype=jnp.int32)[None] * length
        kv_lengths = jnp.clip(left, 0, length).reshape(batch * parts)
    split = operands._replace(
        q=jnp.repeat(operands.q, parts, axis=0),
        k=cut(operands.k),
        v=cut(operands.v),
        bias=cut_last(operands.bias),
        mask=cut_last(operands.mask),
        q_lengths=repeat(operands.q_lengths),
        kv_lengths=kv_lengths,
        q_segments=repeat(operands.q_segments),
        kv_segments=cut_if(operands.kv_segments),
        q_positions=repeat(operands.q_positions),
        kv_positions=cut_if(operands.kv_positions),
        alibi_slopes=repeat(operands.alibi_slopes),
    )
    out, lse = run(spec.for_operands(split), split)
    return _add_up(
        out.reshape(batch, parts, *out.shape[1:]), lse.reshape(batch, parts, *lse.shape[1:])
    )


def _add_up(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """out (B, parts, T, N, Dv) and lse (B, parts, N, T) of parts of the keys -> those of all keys."""
    greatest = lse.max(axis=1, keepdims=True)
    finite = jnp.where(greatest == -jnp.inf, 0.0, greatest)
    weights = jnp.exp(lse - finite)  # 0 for a part without keys
    total = weights.sum(axis=1, keepdims=True)
    weights = jnp.swapaxes(weights / jnp.where(total == 0.0, 1.0, total), 2, 3)[..., None]
    whole = (weights * out.astype(lse.dtype)).sum(axis=1)
    return whole.astype(out.dtype), (finite + jnp.log(total))[:, 0]


def join_sinks_by_lse(
    out: jax.Array, lse: jax.Array, sinks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Lets sinks (1 or B, 1 or N, 1) take part in softmaxes that are known by out and lse; rows without keys stay."""
    joined = jnp.where(lse == -jnp.inf, -jnp.inf, jnp.logaddexp(lse, sinks))
    share = jnp.exp(lse - jnp.where(lse == -jnp.inf, 0.0, joined))
    wide = out.astype(lse.dtype) * jnp.swapaxes(share, 1, 2)[..., None]
    return wide.astype(out.dtype), joined
