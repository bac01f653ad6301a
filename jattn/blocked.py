"""Attention in plain jnp with memory linear in the lengths: tiles of queries and keys, visited by scans.

Runs on every platform that XLA knows. It also serves what no kernel offers: forward-mode and second derivatives,
for which the bodies of the scans are checkpointed, so that those too stay linear in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jattn.arrays import wider
from jattn.jax_interface import vary_like
from jattn.reference import (
    CaptureArrays,
    Gradients,
    Normalizer,
    Pairs,
    Tangents,
    exp_of_differences,
    finish_rows,
    normalizer,
    pairs,
    reduce_to_shape,
    row_delta,
    scores,
    sink_probabilities,
    sum_over_keys,
    tile_backward,
    tile_capture_gradients,
    tile_slope_gradient,
    tile_tangent,
)
from jattn.spec import Operands, Spec

# Elements of one tile of scores over all heads of the batch: 4 MiB in float32.
_TILE_ELEMENTS = 1 << 20
_SMALLEST_TILE, _LARGEST_TILE = 64, 512

Total = TypeVar("Total")  # an array, or several


class _Grid(NamedTuple):
    """How the lengths are cut: tile sizes and the number of tiles, the last one padded."""

    tile_q: int
    tile_kv: int
    num_q_tiles: int
    num_kv_tiles: int


def _grid(spec: Spec) -> _Grid:
    # A symbolic batch or number of heads has no say; of a symbolic length there is one tile.
    heads = math.prod(x for x in (spec.batch, spec.num_heads) if isinstance(x, int))
    tile = _LARGEST_TILE
    while tile > _SMALLEST_TILE and heads * tile * tile > _TILE_ELEMENTS:
        tile //= 2

    def cut(length: int) -> tuple[int, int]:
        size = min(tile, max(length, 1)) if isinstance(length, int) else length
        return size, -(-length // size)

    (tile_q, num_q_tiles), (tile_kv, num_kv_tiles) = cut(spec.q_len), cut(spec.kv_len)
    return _Grid(tile_q, tile_kv, num_q_tiles, num_kv_tiles)


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    missing = size - x.shape[axis]
    if missing == 0:
        return x
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def _pad_tokens(x: jax.Array | None, size: int) -> jax.Array | None:
    return None if x is None else _pad(x, 1, size)


class _Tiles:
    """The padded operands of a problem, and the cutting of tiles out of them.

    Padded keys and queries are invisible because ``visibility`` compares positions with the true lengths.
    """

    def __init__(self, spec: Spec, operands: Operands[jax.Array]) -> None:
        self.spec, self.grid = spec, _grid(spec)
        rows, columns = (
            self.grid.num_q_tiles * self.grid.tile_q,
            self.grid.num_kv_tiles * self.grid.tile_kv,
        )
        self.rows, self.columns = rows, columns
        self.operands = operands._replace(
            q=_pad(operands.q, 1, rows),
            k=_pad(operands.k, 1, columns),
            v=_pad(operands.v, 1, columns),
            bias=self.pad_scores(operands.bias),
            mask=self.pad_scores(operands.mask),
            q_segments=_pad_tokens(operands.q_segments, rows),
            kv_segments=_pad_tokens(operands.kv_segments, columns),
            q_positions=_pad_tokens(operands.q_positions, rows),
            kv_positions=_pad_tokens(operands.kv_positions, columns),
        )

    def pad_scores(self, x: jax.Array | None) -> jax.Array | None:
        """Pads an array that broadcasts against (B, N, T, S); axes of size 1 stay."""
        if x is None:
            return None
        x = x if x.shape[2] != self.spec.q_len or x.shape[2] == 1 else _pad(x, 2, self.rows)
        return x if x.shape[3] != self.spec.kv_len or x.shape[3] == 1 else _pad(x, 3, self.columns)

    def rows_of(self, x: jax.Array, q_tile: jax.Array, axis: int) -> jax.Array:
        """Cuts a tile of queries out of a padded array; an axis of size 1 stays."""
        if x.shape[axis] == 1:
            return x
        return lax.dynamic_slice_in_dim(x, q_tile * self.grid.tile_q, self.grid.tile_q, axis)

    def columns_of(self, x: jax.Array, kv_tile: jax.Array, axis: int) -> jax.Array:
        """Cuts a tile of keys, likewise."""
        if x.shape[axis] == 1:
            return x
        return lax.dynamic_slice_in_dim(x, kv_tile * self.grid.tile_kv, self.grid.tile_kv, axis)

    def cut(self, q_tile: jax.Array, kv_tile: jax.Array) -> tuple[Operands[jax.Array], Pairs]:
        """Returns the operands of one tile and what its pairs are to each other."""
        full, grid = self.operands, self.grid

        def scores_tile(x: jax.Array | None) -> jax.Array | None:
            return None if x is None else self.columns_of(self.rows_of(x, q_tile, 2), kv_tile, 3)

        def keys_tile(x: jax.Array) -> jax.Array:
            return self.columns_of(x, kv_tile, 1)

        def queries_tile(x: jax.Array) -> jax.Array:
            return self.rows_of(x, q_tile, 1)

        tile = full._replace(
            q=queries_tile(full.q),
            k=keys_tile(full.k),
            v=keys_tile(full.v),
            bias=scores_tile(full.bias),
            mask=scores_tile(full.mask),
            q_segments=None if full.q_segments is None else queries_tile(full.q_segments),
            kv_segments=None if full.kv_segments is None else keys_tile(full.kv_segments),
            q_positions=None if full.q_positions is None else queries_tile(full.q_positions),
            kv_positions=None if full.kv_positions is None else keys_tile(full.kv_positions),
        )
        # Where there are several tiles their sizes are powers of two from _SMALLEST_TILE on: multiples of 32.
        first_row, first_column = q_tile * grid.tile_q, kv_tile * grid.tile_kv
        return tile, pairs(self.spec, tile, first_row, first_column, grid.tile_q, grid.tile_kv)


def _is_empty(spec: Spec) -> bool:
    sizes = (spec.batch, spec.q_len, spec.kv_len, spec.num_heads)
    return any(isinstance(size, int) and size == 0 for size in sizes)


class _Online(NamedTuple):
    """The softmax of rows over the tiles of keys so far; shapes (B, N, t).

    Source: the rescaling identity of online softmax, arXiv:1805.02867, section 3.
    """

    row_max: jax.Array
    row_sum: jax.Array

    def update(self, s: jax.Array) -> tuple[_Online, jax.Array, jax.Array]:
        """Takes further scores, -inf where invisible, (B, N, t, s).

        Returns:
          The statistics, the weights exp(s - maximum), and the factor of what was summed up with earlier weights.
        """
        row_max = jnp.maximum(self.row_max, lax.stop_gradient(s.max(-1)))
        shift = jnp.where(row_max == -jnp.inf, 0, row_max)
        p = exp_of_differences(s - shift[..., None])
        rescale = jnp.exp(self.row_max - shift)
        return _Online(row_max, self.row_sum * rescale + p.sum(-1)), p, rescale


def _online_start(spec: Spec, grid: _Grid) -> _Online:
    shape = (spec.batch, spec.num_heads, grid.tile_q)
    return _Online(jnp.full(shape, -jnp.inf, spec.lse_dtype), jnp.zeros(shape, spec.lse_dtype))


def _normalizer(tiles: _Tiles, lse: jax.Array) -> Normalizer:
    """How weights follow from scores, for all rows; lse: (B, N, padded rows).

    By the lse, unless some are so large that one in float32 is too coarse, or differs from what the program at hand
    makes of the scores (``Normalizer``): then by maxima and sums that it computes itself.
    """
    spec, grid = tiles.spec, tiles.grid
    largest = 2**-13 / float(jnp.finfo(lse.dtype).eps)  # an error of 2^-14 in the exponent

    def rows(q_tile: jax.Array) -> Normalizer:
        def visit(carry: _Online, kv_tile: jax.Array) -> tuple[_Online, None]:
            tile, pair = tiles.cut(q_tile, kv_tile)

            def update() -> _Online:
                s = jnp.where(pair.visible, scores(spec, tile, pair).s, -jnp.inf)
                return carry.update(s)[0]

            return lax.cond(pair.visible.any(), update, lambda: carry), None

        start = vary_like(_online_start(spec, grid), tiles.operands.flat())
        kv_tiles = jnp.arange(grid.num_kv_tiles, dtype=jnp.int32)
        row_max, row_sum = lax.scan(jax.checkpoint(visit), start, kv_tiles)[0]
        return normalizer(tiles.operands.sinks, row_max, row_sum)

    def computed() -> Normalizer:
        found = lax.map(rows, jnp.arange(grid.num_q_tiles, dtype=jnp.int32))
        return jax.tree.map(lambda x: _join_rows(x, 2), found)

    def given() -> Normalizer:
        return vary_like(Normalizer(lse, jnp.ones_like(lse)), (*tiles.operands.flat(), lse))

    is_large = (jnp.abs(lse) > largest) & jnp.isfinite(lse)
    return lax.cond(is_large.any(), computed, given)


def _rows_of(tiles: _Tiles, rows: Normalizer, q_tile: jax.Array) -> Normalizer:
    found: Normalizer = jax.tree.map(lambda x: tiles.rows_of(x, q_tile, 2), rows)
    return found


def forward(spec: Spec, operands: Operands[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Computes attention by online softmax over tiles; results as ``reference.forward``."""
    dtype = jnp.dtype(spec.lse_dtype)
    if _is_empty(spec):
        shapes = spec.shapes()
        return jnp.zeros(shapes["out"], spec.dtype), jnp.full(shapes["lse"], -jnp.inf, dtype)
    tiles = _Tiles(spec, operands)
    grid = tiles.grid

    def rows(q_tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        def visit(
            carry: tuple[_Online, jax.Array], kv_tile: jax.Array
        ) -> tuple[tuple[_Online, jax.Array], None]:
            tile, pair = tiles.cut(q_tile, kv_tile)

            def update() -> tuple[_Online, jax.Array]:
                online, acc = carry
                s = jnp.where(pair.visible, scores(spec, tile, pair).s, -jnp.inf)
                online, p, rescale = online.update(s)
                acc = acc * rescale.swapaxes(1, 2)[..., None] + sum_over_keys(
                    spec, pair.drop(p), pair.visible, tile.v
                )
                return online, acc

            return lax.cond(pair.visible.any(), update, lambda: carry), None

        start = (
            _online_start(spec, grid),
            jnp.zeros((spec.batch, grid.tile_q, spec.num_heads, spec.head_dim_v), dtype),
        )
        kv_tiles = jnp.arange(grid.num_kv_tiles, dtype=jnp.int32)
        ((row_max, row_sum), acc), _ = lax.scan(visit, vary_like(start, operands.flat()), kv_tiles)
        out, lse = finish_rows(operands.sinks, row_max, row_sum, acc)
        return out.astype(spec.dtype), lse

    out, lse = lax.map(rows, jnp.arange(grid.num_q_tiles, dtype=jnp.int32))
    return _join_rows(out, 1)[:, : spec.q_len], _join_rows(lse, 2)[:, :, : spec.q_len]


def backward(
    spec: Spec,
    operands: Operands[jax.Array],
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
) -> Gradients:
    """Computes the gradients as ``reference.backward``, tile by tile."""
    dtype = jnp.dtype(spec.lse_dtype)
    shapes = spec.shapes()
    if _is_empty(spec):
        bias = None if spec.bias is None else jnp.zeros(spec.bias, dtype)
        dq, dk, dv = (jnp.zeros(shapes[name], dtype) for name in ("q", "k", "v"))
        return Gradients(dq, dk, dv, bias)
    tiles = _Tiles(spec, operands)
    grid = tiles.grid
    delta = _pad(row_delta(out, dout, dlse, dtype), 2, tiles.rows)
    normal, dout = _normalizer(tiles, _pad(lse, 2, tiles.rows)), _pad(dout, 1, tiles.rows)
    bias = tiles.operands.bias

    Carry = tuple[jax.Array, jax.Array, jax.Array | None]

    def rows(carry: Carry, q_tile: jax.Array) -> tuple[Carry, jax.Array]:
        of_rows, delta_tile = _rows_of(tiles, normal, q_tile), tiles.rows_of(delta, q_tile, 2)
        dout_tile = tiles.rows_of(dout, q_tile, 1)

        def visit(
            inner: tuple[Carry, jax.Array], kv_tile: jax.Array
        ) -> tuple[tuple[Carry, jax.Array], None]:
            tile, pair = tiles.cut(q_tile, kv_tile)

            def update() -> tuple[Carry, jax.Array]:
                (dk, dv, dbias), dq = inner
                grads = tile_backward(spec, tile, pair, of_rows, dout_tile, delta_tile)
                dk = _add_at(dk, grads.k, (0, kv_tile * grid.tile_kv, 0, 0))
                dv = _add_at(dv, grads.v, (0, kv_tile * grid.tile_kv, 0, 0))
                if dbias is not None and grads.bias is not None and tile.bias is not None:
                    corner = (
                        0,
                        0,
                        0 if dbias.shape[2] == 1 else q_tile * grid.tile_q,
                        0 if dbias.shape[3] == 1 else kv_tile * grid.tile_kv,
                    )
                    dbias = _add_at(dbias, reduce_to_shape(grads.bias, tile.bias.shape), corner)
                return (dk, dv, dbias), dq + grads.q

            return lax.cond(pair.visible.any(), update, lambda: inner), None

        dq = jnp.zeros((spec.batch, grid.tile_q, spec.num_heads, spec.head_dim), dtype)
        kv_tiles = jnp.arange(grid.num_kv_tiles, dtype=jnp.int32)
        (carry, dq), _ = lax.scan(
            jax.checkpoint(visit), (carry, vary_like(dq, operands.flat())), kv_tiles
        )
        return carry, dq

    start: Carry = (
        jnp.zeros((spec.batch, tiles.columns, *shapes["k"][2:]), dtype),
        jnp.zeros((spec.batch, tiles.columns, *shapes["v"][2:]), dtype),
        None if bias is None else jnp.zeros(bias.shape, dtype),
    )
    q_tiles = jnp.arange(grid.num_q_tiles, dtype=jnp.int32)
    (dk, dv, dbias), dq = lax.scan(rows, vary_like(start, operands.flat()), q_tiles)
    if dbias is not None and spec.bias is not None:
        dbias = dbias[:, :, : spec.bias[2], : spec.bias[3]]
    return Gradients(
        _join_rows(dq, 1)[:, : spec.q_len], dk[:, : spec.kv_len], dv[:, : spec.kv_len], dbias
    )


def slopes_gradient(
    spec: Spec,
    operands: Operands[jax.Array],
    lse: jax.Array,
    dout: jax.Array,
    delta: jax.Array,
) -> jax.Array:
    """Computes the gradient of the ALiBi slopes in their shape, tile by tile; shapes as in ``tile_backward``."""
    assert operands.alibi_slopes is not None
    start = jnp.zeros((spec.batch, spec.num_heads, 1), spec.lse_dtype)
    total = _sum_over_tiles(spec, operands, lse, dout, delta, start, tile_slope_gradient)
    return reduce_to_shape(total, operands.alibi_slopes.shape)


def capture_gradients(
    spec: Spec,
    operands: Operands[jax.Array],
    lse: jax.Array,
    dout: jax.Array,
    delta: jax.Array,
) -> CaptureArrays:
    """Computes the gradients of what the score function reads, tile by tile; shapes as in ``tile_backward``."""
    assert spec.score_mod is not None
    start = tuple(
        jnp.zeros(c.shape, wider(c.dtype, spec.lse_dtype)) if c.is_float else None
        for c in spec.score_mod.captures
    )
    return _sum_over_tiles(spec, operands, lse, dout, delta, start, tile_capture_gradients)


def _sum_over_tiles(
    spec: Spec,
    operands: Operands[jax.Array],
    lse: jax.Array,
    dout: jax.Array,
    delta: jax.Array,
    start: Total,
    of_tile: Callable[..., Total],
) -> Total:
    """Adds what each tile that shows a pair gives to ``start``, an array or several.

    ``of_tile`` has the arguments of ``tile_backward``.
    """
    if _is_empty(spec):
        return start
    tiles = _Tiles(spec, operands)
    grid = tiles.grid
    delta, normal = _pad(delta, 2, tiles.rows), _normalizer(tiles, _pad(lse, 2, tiles.rows))
    dout = _pad(dout, 1, tiles.rows)

    def rows(total: Total, q_tile: jax.Array) -> tuple[Total, None]:
        of_rows, delta_tile = _rows_of(tiles, normal, q_tile), tiles.rows_of(delta, q_tile, 2)
        dout_tile = tiles.rows_of(dout, q_tile, 1)

        def visit(inner: Total, kv_tile: jax.Array) -> tuple[Total, None]:
            tile, pair = tiles.cut(q_tile, kv_tile)

            def update() -> Total:
                more = of_tile(spec, tile, pair, of_rows, dout_tile, delta_tile)
                return jax.tree.map(lambda x, y: x + y.astype(x.dtype), inner, more)

            return lax.cond(pair.visible.any(), update, lambda: inner), None

        kv_tiles = jnp.arange(grid.num_kv_tiles, dtype=jnp.int32)
        return lax.scan(jax.checkpoint(visit), total, kv_tiles)[0], None

    q_tiles = jnp.arange(grid.num_q_tiles, dtype=jnp.int32)
    return lax.scan(rows, vary_like(start, operands.flat()), q_tiles)[0]


def tangent(
    spec: Spec,
    operands: Operands[jax.Array],
    out: jax.Array,
    lse: jax.Array,
    tangents: Tangents,
) -> tuple[jax.Array, jax.Array]:
    """Computes the directional derivative as ``reference.tangent``, tile by tile."""
    dtype = jnp.dtype(spec.lse_dtype)
    shapes = spec.shapes()
    if _is_empty(spec):
        return jnp.zeros(shapes["out"], spec.dtype), jnp.zeros(shapes["lse"], dtype)
    tiles = _Tiles(spec, operands)
    grid = tiles.grid
    padded = Tangents(
        q=None if tangents.q is None else _pad(tangents.q, 1, tiles.rows),
        k=None if tangents.k is None else _pad(tangents.k, 1, tiles.columns),
        v=None if tangents.v is None else _pad(tangents.v, 1, tiles.columns),
        bias=tiles.pad_scores(tangents.bias),
        alibi_slopes=tangents.alibi_slopes,
        captures=tangents.captures,
    )
    normal = _normalizer(tiles, _pad(lse, 2, tiles.rows))

    def rows(q_tile: jax.Array) -> tuple[jax.Array, jax.Array]:
        of_rows = _rows_of(tiles, normal, q_tile)

        def along(x: jax.Array | None, cut: Callable[[jax.Array], jax.Array]) -> jax.Array | None:
            return None if x is None else cut(x)

        def visit(
            carry: tuple[jax.Array, jax.Array], kv_tile: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            tile, pair = tiles.cut(q_tile, kv_tile)

            def update() -> tuple[jax.Array, jax.Array]:
                tile_tangents = Tangents(
                    q=along(padded.q, lambda x: tiles.rows_of(x, q_tile, 1)),
                    k=along(padded.k, lambda x: tiles.columns_of(x, kv_tile, 1)),
                    v=along(padded.v, lambda x: tiles.columns_of(x, kv_tile, 1)),
                    bias=along(
                        padded.bias,
                        lambda x: tiles.columns_of(tiles.rows_of(x, q_tile, 2), kv_tile, 3),
                    ),
                    alibi_slopes=padded.alibi_slopes,
                    captures=padded.captures,
                )
                dout, dlse = tile_tangent(spec, tile, pair, of_rows, tile_tangents)
                return carry[0] + dout, carry[1] + dlse

            return lax.cond(pair.visible.any(), update, lambda: carry), None

        start = (
            jnp.zeros((spec.batch, grid.tile_q, spec.num_heads, spec.head_dim_v), dtype),
            jnp.zeros((spec.batch, spec.num_heads, grid.tile_q), dtype),
        )
        kv_tiles = jnp.arange(grid.num_kv_tiles, dtype=jnp.int32)
        return lax.scan(jax.checkpoint(visit), vary_like(start, operands.flat()), kv_tiles)[0]

    dout, dlse = lax.map(rows, jnp.arange(grid.num_q_tiles, dtype=jnp.int32))
    dout, dlse = _join_rows(dout, 1)[:, : spec.q_len], _join_rows(dlse, 2)[:, :, : spec.q_len]
    if operands.sinks is not None and tangents.sinks is not None:
        dlse += sink_probabilities(operands.sinks, lse) * tangents.sinks
    dout -= dlse.swapaxes(1, 2)[..., None] * out.astype(dtype)
    return dout.astype(spec.dtype), dlse


def _join_rows(tiles: jax.Array, axis: int) -> jax.Array:
    """(tiles, ..., tile_q, ...) -> (..., rows, ...): stacked tiles of queries back into one axis."""
    moved = jnp.moveaxis(tiles, 0, axis)
    shape = moved.shape
    return moved.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _add_at(x: jax.Array, update: jax.Array, corner: tuple[jax.Array | int, ...]) -> jax.Array:
    starts = [jnp.asarray(start, jnp.int32) for start in corner]
    old = lax.dynamic_slice(x, starts, update.shape)
    return lax.dynamic_update_slice(x, old + update, starts)
