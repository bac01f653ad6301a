"""What attention means here, in plain jnp: scores, probabilities, gradients and tangents of one tile.

The reference backend calls these functions once, with the whole problem as one tile; ``blocked.py`` calls them on
tiles. Every other backend is tested against them and against an independent float64 oracle
(``jattn.testing.oracle``).

Shapes: a tile has t queries and s keys: q (B, t, N, D), k (B, s, K, D), v (B, s, K, Dv), scores (B, N, t, s).
Scores and statistics are float32, or float64 for a float64 problem. Masking is structural: an invisible pair has
weight exactly 0, and a value that no query sees never reaches a result, be it NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jattn import dropout
from jattn.capture_gradients import capture_gradients, times
from jattn.score_program import ScoreProgram
from jattn.score_tile import ScoreTile
from jattn.spec import Operands, Spec, distances, visibility

CaptureArrays = tuple[jax.Array | None, ...]  # one for each capture, None for integers


class Gradients(NamedTuple):
    """Gradients of a problem; ``bias`` is None when the problem has no bias. Types are those of the accumulation.

    ``Backend.backward`` computes those of q, k, v and bias, and may compute that of ``alibi_slopes``, (B, N, 1), and
    those of ``captures``, one for each that is a float; ``autodiff.py`` adds what is missing.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    sinks: jax.Array | None = None
    alibi_slopes: jax.Array | None = None
    captures: CaptureArrays | None = None


class Tangents(NamedTuple):
    """Directions of change of the differentiable operands; None where an operand does not change."""

    q: jax.Array | None = None
    k: jax.Array | None = None
    v: jax.Array | None = None
    bias: jax.Array | None = None
    sinks: jax.Array | None = None
    alibi_slopes: jax.Array | None = None
    captures: CaptureArrays = ()


class Pairs(NamedTuple):
    """What the pairs of a tile are to each other.

    Attributes:
      visible: bool, broadcastable to (B, N, t, s).
      distance: int32, broadcastable to (B, 1, t, s), |key's place - query's place|; None where no slope reads it.
      kept: bool, broadcastable to (B, N, t, s), True where dropout keeps the pair; None without dropout.
      kept_factor: (B or 1, 1, 1, 1), what kept weights are multiplied by; None without dropout.
      queries, keys: (B or 1, t) and (B or 1, s) int32, what a score function knows them by; None without one.
    """

    visible: jax.Array
    distance: jax.Array | None = None
    kept: jax.Array | None = None
    kept_factor: jax.Array | None = None
    queries: jax.Array | None = None
    keys: jax.Array | None = None

    def drop(self, x: jax.Array) -> jax.Array:
        """Multiplies by 0 where dropped and by the factor where kept, by selection."""
        if self.kept is None or self.kept_factor is None:
            return x
        return jnp.where(self.kept, x * self.kept_factor, 0)


def pairs(
    spec: Spec,
    tile: Operands[jax.Array],
    first_row: jax.Array | int,
    first_column: jax.Array | int,
    num_rows: int,
    num_columns: int,
) -> Pairs:
    """Describes the pairs of a tile.

    Args:
      spec: the whole problem.
      tile: its operands; masks, segment ids and positions cut to the tile.
      first_row, first_column: where the tile lies in the scores; multiples of 32.
      num_rows, num_columns: its size.
    """
    rows = first_row + jnp.arange(num_rows, dtype=jnp.int32)
    columns = first_column + jnp.arange(num_columns, dtype=jnp.int32)
    found = Pairs(visibility(spec, tile, rows, columns))
    if spec.alibi_slopes is not None:
        found = found._replace(distance=jnp.abs(distances(spec, tile, rows, columns)))
    if spec.score_mod is not None:
        found = found._replace(
            queries=_within(rows, spec.q_len) if tile.q_positions is None else tile.q_positions,
            keys=_within(columns, spec.kv_len) if tile.kv_positions is None else tile.kv_positions,
        )
    if spec.dropout is None or tile.dropout_keys is None or tile.dropout_rate is None:
        return found
    if spec.dropout.rows:
        assert tile.q_positions is not None
        assert tile.kv_positions is not None
        assert tile.q_segments is not None
        table = tile.dropout_keys
        keys = table[jnp.clip(tile.q_segments, 0, table.shape[0] - 1)]  # (B, t, N or 1, 2)
        bits = dropout.bits_at(
            keys.swapaxes(1, 2)[:, :, :, None],
            tile.q_positions[:, None, :, None],
            tile.kv_positions[:, None, None, :],
        )
    else:
        bits = dropout.bits_of_block(
            tile.dropout_keys, first_row, first_column, num_rows, num_columns
        )
    rate = tile.dropout_rate[..., None]
    return found._replace(
        kept=bits >= dropout.threshold(rate),
        kept_factor=dropout.kept_factor(rate, _accumulator(spec)),
    )


def _within(indices: jax.Array, length: int) -> jax.Array:
    """Indices (t,) of a tile as (1, t), those of its padding at the last row: a score function sees no others."""
    return jnp.minimum(indices, jnp.maximum(length - 1, 0))[None]


def _accumulator(spec: Spec) -> jnp.dtype:
    return jnp.dtype(spec.lse_dtype)


def _split_heads(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """(B, t, N, D) -> (B, t, K, G, D): query heads beside the key/value head that serves them."""
    batch, length, num_heads, head_dim = x.shape
    return x.reshape(batch, length, num_kv_heads, num_heads // max(num_kv_heads, 1), head_dim)


def _pair_products(spec: Spec, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Dot products of every query row with every key row of its head: (B, t, N, D), (B, s, K, D) -> (B, N, t, s)."""
    batch, q_len, num_heads, _ = rows.shape
    kv_len, num_kv_heads = columns.shape[1:3]
    products = jnp.einsum(
        "btkgd,bskd->bkgts",
        _split_heads(rows, num_kv_heads),
        columns,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=_accumulator(spec),
    )
    return products.reshape(batch, num_heads, q_len, kv_len)


def _sum_over_keys(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Weighted sums of key rows: (B, N, t, s), (B, s, K, D) -> (B, t, N, D)."""
    batch, num_heads, q_len, kv_len = weights.shape
    num_kv_heads = values.shape[2]
    sums = jnp.einsum(
        "bkgts,bskd->btkgd",
        weights.reshape(batch, num_kv_heads, num_heads // max(num_kv_heads, 1), q_len, kv_len),
        values.astype(weights.dtype),
        precision=lax.Precision.HIGHEST,
    )
    return sums.reshape(batch, q_len, num_heads, values.shape[3])


def _sum_over_queries(spec: Spec, weights: jax.Array, values: jax.Array) -> jax.Array:
    """Weighted sums of query rows, over the heads of a group too: (B, N, t, s), (B, t, N, D) -> (B, s, K, D)."""
    batch, num_heads, q_len, kv_len = weights.shape
    groups = num_heads // max(spec.num_kv_heads, 1)
    return jnp.einsum(
        "bkgts,btkgd->bskd",
        weights.reshape(batch, spec.num_kv_heads, groups, q_len, kv_len),
        _split_heads(values.astype(weights.dtype), spec.num_kv_heads),
        precision=lax.Precision.HIGHEST,
    )


def sum_over_keys(
    spec: Spec, weights: jax.Array, visible: jax.Array, values: jax.Array
) -> jax.Array:
    """``_sum_over_keys`` in which a value that is not finite reaches only the queries that see it.

    ``weights`` is 0 where not visible, but 0 * NaN is NaN: where some value is not finite, the sum is also formed
    over the finite values alone, and each row takes the one that is right for it. Finite data pay only for the test.
    """

    def careful() -> jax.Array:
        finite = jnp.isfinite(values)
        seen = jnp.broadcast_to(visible, weights.shape).astype(weights.dtype)
        touched = _sum_over_keys(seen, (~finite.all(-1, keepdims=True)).astype(weights.dtype)) > 0
        clean = _sum_over_keys(weights, jnp.where(finite, values, 0))
        return jnp.where(touched, _sum_over_keys(weights, values), clean)

    return lax.cond(jnp.isfinite(values).all(), lambda: _sum_over_keys(weights, values), careful)


def sum_over_queries(
    spec: Spec, weights: jax.Array, visible: jax.Array, values: jax.Array
) -> jax.Array:
    """``_sum_over_queries`` in which a value that is not finite reaches only the keys that its query sees."""

    def careful() -> jax.Array:
        finite = jnp.isfinite(values)
        seen = jnp.broadcast_to(visible, weights.shape).astype(weights.dtype)
        touched = (
            _sum_over_queries(spec, seen, (~finite.all(-1, keepdims=True)).astype(weights.dtype))
            > 0
        )
        clean = _sum_over_queries(spec, weights, jnp.where(finite, values, 0))
        return jnp.where(touched, _sum_over_queries(spec, weights, values), clean)

    return lax.cond(
        jnp.isfinite(values).all(), lambda: _sum_over_queries(spec, weights, values), careful
    )


class Scores(NamedTuple):
    """The scores of a tile before masking, and how they follow from the scaled products.

    Attributes:
      s: (B, N, t, s).
      cap_slope: d(capped product) / d(product); None for 1.
      slope: evaluates d(``s``) / d(what the score function changed); None for 1.
      pull: from the gradient of ``s`` to those of the captures of the score function (None for integers); None without
        one.
      push: from tangents of what the function changed and of its captures to that of ``s``.
    """

    s: jax.Array
    cap_slope: jax.Array | None
    slope: Callable[[], jax.Array] | None = None
    pull: Callable[[jax.Array], CaptureArrays] | None = None
    push: Callable[[jax.Array, CaptureArrays], jax.Array] | None = None

    def gradient_before(self, ds: jax.Array) -> jax.Array:
        """The gradient of the scores before the score function."""
        return ds if self.slope is None else times(ds, self.slope())


@jax.custom_jvp
def _rounded(s: jax.Array) -> jax.Array:
    """The same numbers, but no product that made them is fused into a difference that is made of them.

    exp(s - shift) would have other scores than those of which the maximum and the sum were made: at ten million they
    are half a unit apart. Barriers and casts do not help, they are gone before LLVM fuses.
    """
    return jnp.copysign(jnp.abs(s), s)


@_rounded.defjvp
def _rounded_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _rounded(*primals), tangents[0]


def scores(spec: Spec, tile: Operands[jax.Array], pair: Pairs) -> Scores:
    """Returns the scores of a tile before masking."""
    found = _scores(spec, tile, pair)
    return found._replace(s=_rounded(found.s))


def _scores(spec: Spec, tile: Operands[jax.Array], pair: Pairs) -> Scores:
    s = spec.scale * _pair_products(spec, tile.q, tile.k)
    cap_slope = None
    if spec.softcap:
        t = jnp.tanh(s / spec.softcap)
        s, cap_slope = spec.softcap * t, 1 - t * t
    if tile.bias is not None:
        s = s + tile.bias.astype(s.dtype)
    if tile.alibi_slopes is not None and pair.distance is not None:
        s = s - tile.alibi_slopes[..., None].astype(s.dtype) * pair.distance.astype(s.dtype)
    if spec.score_mod is None:
        return Scores(s, cap_slope)
    return _with_score_mod(spec.score_mod, tile, pair, s, cap_slope)


def _with_score_mod(
    program: ScoreProgram,
    tile: Operands[jax.Array],
    pair: Pairs,
    s: jax.Array,
    cap_slope: jax.Array | None,
) -> Scores:
    """Passes the scores of a tile through a score function; what is invisible goes in as 0."""
    batches, heads, queries, keys = tile.batch_ids, tile.head_ids, pair.queries, pair.keys
    assert batches is not None
    assert heads is not None
    assert queries is not None
    assert keys is not None
    given = ScoreTile(jnp.where(pair.visible, s, 0), batches, heads, queries, keys)
    is_float = [c.is_float for c in program.captures]
    floats = [x for x, flag in zip(tile.captures, is_float, strict=True) if flag]

    def change(s: jax.Array, *floats: jax.Array) -> jax.Array:
        rest = iter(floats)
        captures = [
            next(rest) if flag else x for x, flag in zip(tile.captures, is_float, strict=True)
        ]
        changed: jax.Array = given._replace(scores=s).map(lambda *pair: program(*pair, *captures))
        return changed.astype(s.dtype)

    def pull(ds: jax.Array) -> CaptureArrays:
        return capture_gradients(program, given, tile.captures, ds)

    def push(ds: jax.Array, captures: CaptureArrays) -> jax.Array:
        moving = [
            jnp.zeros_like(x) if t is None else t.astype(x.dtype)
            for x, t, flag in zip(tile.captures, captures, is_float, strict=True)
            if flag
        ]
        return jax.jvp(change, (given.scores, *floats), (ds, *moving))[1]

    def slope() -> jax.Array:
        found: jax.Array = given.map(lambda *pair: program.slope(*pair, *tile.captures))
        return found

    s = change(given.scores, *floats)
    return Scores(s, cap_slope, None if program.has_unit_slope else slope, pull, push)


class Normalizer(NamedTuple):
    """How the weights of rows follow from their scores: exp(s - shift) * factor; shapes (B, N, t).

    Shift and factor are either the lse and 1, or the row maximum and one over the sum. For scores beyond a thousand or
    so the lse will not do: float32 rounds it too coarsely, and the scores may be rounded otherwise than in the program
    that it comes from. Then maximum and sum are taken again, of the scores that are to be weighed.

    Attributes:
      shift: -inf in rows that see no key.
    """

    shift: jax.Array
    factor: jax.Array


def exp_of_differences(x: jax.Array) -> jax.Array:
    """exp(x) of what is at most 0 but for rounding: where it rounds to more, 1. The derivative is that of exp(x).

    A score that is computed again, in another order, may exceed its row's maximum by what rounding is at its size.
    """
    return jnp.exp(x - lax.stop_gradient(jnp.maximum(x, 0)))


def join_sinks(
    sinks: jax.Array | None, row_max: jax.Array, row_sum: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Adds a sink to rows that see a key: to maxima, -inf where none is seen, and sums of exp(s - maximum)."""
    if sinks is None:
        return row_max, row_sum
    sees_a_key = row_sum != 0
    sinks = sinks.astype(row_max.dtype)
    shift = jnp.maximum(row_max, lax.stop_gradient(sinks))
    of_keys = jnp.exp(jnp.where(sees_a_key, row_max - shift, 0))
    # A sink of infinity takes all weight; its difference from itself would be NaN.
    above = jnp.where(sees_a_key & ~jnp.isposinf(sinks), sinks - shift, 0)
    joint = row_sum * of_keys + jnp.exp(above)
    return jnp.where(sees_a_key, shift, -jnp.inf), jnp.where(sees_a_key, joint, 0)


def finish_rows(
    sinks: jax.Array | None, row_max: jax.Array, row_sum: jax.Array, acc: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns out and lse of rows of which ``acc`` (B, t, N, Dv) is the sum of exp(s - maximum) times values."""
    shift, total = join_sinks(sinks, row_max, row_sum)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    if sinks is not None:
        acc = acc * jnp.exp(jnp.where(empty, 0, row_max - shift)).swapaxes(1, 2)[..., None]
    out = acc / total.swapaxes(1, 2)[..., None]
    return out, jnp.where(empty, -jnp.inf, shift + jnp.log(total))


def normalizer(sinks: jax.Array | None, row_max: jax.Array, row_sum: jax.Array) -> Normalizer:
    """Of rows whose visible scores have this maximum, -inf if there are none, and this sum of exp(s - maximum)."""
    shift, total = join_sinks(sinks, row_max, row_sum)
    # XLA's maximum of many numbers may miss a NaN; a row of these sees keys.
    shift = jnp.where(jnp.isnan(total), total, shift)
    return Normalizer(shift, 1 / jnp.where(total == 0, 1, total))


def probabilities(s: jax.Array, visible: jax.Array, rows: Normalizer) -> jax.Array:
    """The weights where visible, exactly 0 elsewhere and in rows that see no key."""
    visible &= s != -jnp.inf  # which a score function may say
    sees_a_key = rows.shift != -jnp.inf
    shifted = s - jnp.where(sees_a_key, rows.shift, 0)[..., None]
    # The inner select keeps an invisible NaN or overflow out of the derivative of exp as well.
    p = exp_of_differences(jnp.where(visible, shifted, 0))
    return jnp.where(visible & sees_a_key[..., None], p * rows.factor[..., None], 0)


def tile_backward(
    spec: Spec,
    tile: Operands[jax.Array],
    pair: Pairs,
    rows: Normalizer,
    dout: jax.Array,
    delta: jax.Array,
) -> Gradients:
    """Returns what one tile adds to the gradients; ``bias`` has the shape of the scores.

    Shapes: delta (B, N, t), dout (B, t, N, Dv); delta = rowsum(dout * out) - dlse.
    """
    visible = pair.visible
    of_tile, p, ds = _score_gradients(spec, tile, pair, rows, dout, delta)
    ds = of_tile.gradient_before(ds)
    slope = of_tile.cap_slope
    # What hides a pair may have met a product that is infinite or NaN.
    dqk = ds if slope is None else times(ds, slope)
    return Gradients(
        q=spec.scale * sum_over_keys(spec, dqk, visible, tile.k),
        k=spec.scale * sum_over_queries(spec, dqk, visible, tile.q),
        v=sum_over_queries(spec, pair.drop(p), visible, dout),
        bias=ds if tile.bias is not None else None,
    )


def _score_gradients(
    spec: Spec,
    tile: Operands[jax.Array],
    pair: Pairs,
    rows: Normalizer,
    dout: jax.Array,
    delta: jax.Array,
) -> tuple[Scores, jax.Array, jax.Array]:
    """The scores of a tile, the probabilities, and the gradient of the scores; arguments as ``tile_backward``."""
    of_tile = scores(spec, tile, pair)
    p = probabilities(of_tile.s, pair.visible, rows)
    dp = pair.drop(_pair_products(spec, dout, tile.v))
    visible = pair.visible & (of_tile.s != -jnp.inf)
    return of_tile, p, jnp.where(visible, p * (dp - delta[..., None]), 0)


def tile_tangent(
    spec: Spec,
    tile: Operands[jax.Array],
    pair: Pairs,
    rows: Normalizer,
    tangents: Tangents,
) -> tuple[jax.Array, jax.Array]:
    """Returns what one tile adds to the tangents of (out, lse), short of the sinks' part and of ``-dlse * out``.

    Shapes: (B, t, N, Dv) and (B, N, t).
    """
    visible = pair.visible
    of_tile = scores(spec, tile, pair)
    s, slope = of_tile.s, of_tile.cap_slope
    p = probabilities(s, visible, rows)
    ds = jnp.zeros_like(s)
    if tangents.q is not None:
        ds += spec.scale * _pair_products(spec, tangents.q, tile.k)
    if tangents.k is not None:
        ds += spec.scale * _pair_products(spec, tile.q, tangents.k)
    if slope is not None:
        ds *= slope
    if tangents.bias is not None:
        ds += tangents.bias.astype(s.dtype)
    if tangents.alibi_slopes is not None and pair.distance is not None:
        ds -= tangents.alibi_slopes[..., None].astype(s.dtype) * pair.distance.astype(s.dtype)
    if of_tile.push is not None:
        ds = of_tile.push(ds, tangents.captures)
    weights = jnp.where(visible & (p != 0), p * ds, 0)
    dout = sum_over_keys(spec, pair.drop(weights), visible, tile.v)
    if tangents.v is not None:
        dout += sum_over_keys(spec, pair.drop(p), visible, tangents.v)
    return dout, weights.sum(-1)


def sink_probabilities(sinks: jax.Array, lse: jax.Array) -> jax.Array:
    """exp(sink - lse), the weight of the sink in each row, 0 in rows that see no key: (B, N, t)."""
    sees_a_key = lse != -jnp.inf
    sinks = sinks.astype(lse.dtype)
    moves = sees_a_key & ~jnp.isposinf(sinks)
    return jnp.where(sees_a_key, jnp.exp(jnp.where(moves, sinks - lse, 0)), 0)


def sinks_gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """Returns the gradient of the sinks in their shape: minus the sum of weight * delta over the rows."""
    sees_a_key = lse != -jnp.inf
    terms = jnp.where(sees_a_key, sink_probabilities(sinks, lse) * delta, 0)
    return -reduce_to_shape(terms, sinks.shape)


def tile_slope_gradient(
    spec: Spec,
    tile: Operands[jax.Array],
    pair: Pairs,
    rows: Normalizer,
    dout: jax.Array,
    delta: jax.Array,
) -> jax.Array:
    """Returns what one tile adds to the gradient of the ALiBi slopes, (B, N, 1); arguments as ``tile_backward``."""
    assert pair.distance is not None
    of_tile, _, ds = _score_gradients(spec, tile, pair, rows, dout, delta)
    ds = of_tile.gradient_before(ds)
    return -(ds * pair.distance.astype(ds.dtype)).sum((-2, -1))[..., None]


def tile_capture_gradients(
    spec: Spec,
    tile: Operands[jax.Array],
    pair: Pairs,
    rows: Normalizer,
    dout: jax.Array,
    delta: jax.Array,
) -> CaptureArrays:
    """Returns what one tile adds to the gradients of the captures, in their shapes; arguments as ``tile_backward``."""
    of_tile, _, ds = _score_gradients(spec, tile, pair, rows, dout, delta)
    return () if of_tile.pull is None else of_tile.pull(ds)


def row_delta(
    out: jax.Array, dout: jax.Array, dlse: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """rowsum(dout * out) - dlse: (B, t, N, Dv) twice, (B, N, t) -> (B, N, t)."""
    delta = jnp.einsum(
        "btnd,btnd->bnt", dout.astype(dtype), out.astype(dtype), precision=lax.Precision.HIGHEST
    )
    return delta if dlse is None else delta - dlse


def reduce_to_shape(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums the axes along which an array of ``shape`` was broadcast to the shape of ``x``."""
    axes = tuple(
        i for i, (size, full) in enumerate(zip(shape, x.shape, strict=True)) if size != full
    )
    return x.sum(axes, keepdims=True) if axes else x


def _whole(spec: Spec, operands: Operands[jax.Array]) -> Pairs:
    return pairs(spec, operands, 0, 0, spec.q_len, spec.kv_len)


def _row_statistics(
    spec: Spec, operands: Operands[jax.Array], pair: Pairs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The maxima of the rows, -inf where no key is visible, exp(s - maximum), and its sums."""
    s = jnp.where(pair.visible, scores(spec, operands, pair).s, -jnp.inf)
    row_max = lax.stop_gradient(s.max(-1, initial=-jnp.inf))
    shift = jnp.where(row_max == -jnp.inf, 0, row_max)
    p = exp_of_differences(s - shift[..., None])
    return row_max, p, p.sum(-1)


def _normalizer_of(spec: Spec, operands: Operands[jax.Array], pair: Pairs) -> Normalizer:
    row_max, _, row_sum = _row_statistics(spec, operands, pair)
    return normalizer(operands.sinks, row_max, row_sum)


def forward(spec: Spec, operands: Operands[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Computes attention with the whole score matrix in memory.

    Returns:
      out (B, T, N, Dv) in the dtype of the problem; lse (B, N, T), natural logarithm, -inf where no key is visible.
    """
    pair = _whole(spec, operands)
    row_max, p, row_sum = _row_statistics(spec, operands, pair)
    acc = sum_over_keys(spec, pair.drop(p), pair.visible, operands.v)
    out, lse = finish_rows(operands.sinks, row_max, row_sum, acc)
    return out.astype(spec.dtype), lse


def backward(
    spec: Spec,
    operands: Operands[jax.Array],
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
) -> Gradients:
    """Computes the gradients of ``forward`` from its results and their cotangents, each in the shape of its
    operand; those of sinks and slopes are not among them.
    """
    delta = row_delta(out, dout, dlse, _accumulator(spec))
    pair = _whole(spec, operands)
    rows = _normalizer_of(spec, operands, pair)
    grads = tile_backward(spec, operands, pair, rows, dout, delta)
    if spec.score_mod is not None:
        captures = tile_capture_gradients(spec, operands, pair, rows, dout, delta)
        grads = grads._replace(captures=captures)
    if spec.bias is None or grads.bias is None:
        return grads
    return grads._replace(bias=reduce_to_shape(grads.bias, spec.bias))


def tangent(
    spec: Spec,
    operands: Operands[jax.Array],
    out: jax.Array,
    lse: jax.Array,
    tangents: Tangents,
) -> tuple[jax.Array, jax.Array]:
    """Computes the directional derivative of ``forward`` along ``tangents``, given its results."""
    pair = _whole(spec, operands)
    dout, dlse = tile_tangent(spec, operands, pair, _normalizer_of(spec, operands, pair), tangents)
    if operands.sinks is not None and tangents.sinks is not None:
        dlse += sink_probabilities(operands.sinks, lse) * tangents.sinks
    dout -= dlse.swapaxes(1, 2)[..., None] * out.astype(dout.dtype)
    return dout.astype(spec.dtype), dlse
