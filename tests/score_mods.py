"""Score functions as users write them, and attention with them in plain JAX: four nested maps over the whole matrix.

The tiers share them. Ids F... are rows of the acceptance list for score functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from drawn import normal

Array = Any
ScoreMod = Callable[..., Any]

B, N, K, T, S = 2, 4, 2, 70, 90


def _integers(low: int, high: int, shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


def _table(*shape: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# F100: name -> function, captures.
SCORE_MODS: dict[str, tuple[ScoreMod, tuple[Array, ...]]] = {
    "identity": (lambda s, b, h, q, k: s, ()),
    "times 2": (lambda s, b, h, q, k: 2 * s, ()),
    "square": (lambda s, b, h, q, k: s * s, ()),
    "causal": (lambda s, b, h, q, k: jnp.where(q >= k, s, -jnp.inf), ()),
    "relative": (lambda s, b, h, q, k: s + (q - k) / 16, ()),
    "relative causal": (lambda s, b, h, q, k: jnp.where(q >= k, s + (q - k) / 16, -jnp.inf), ()),
    "alibi": (lambda s, b, h, q, k: s + 2.0 ** (-8 * (h + 1) / N) * (k - q), ()),
    "of head": (lambda s, b, h, q, k, x: s + x[h] * (k % 3), (_table(N),)),
    "of batch": (lambda s, b, h, q, k, x: s + x[b] * (k % 3), (_table(B),)),
    "cap": (lambda s, b, h, q, k: 20 * jnp.tanh(s / 20), ()),
    "sin": (lambda s, b, h, q, k: jnp.sin(s), ()),
    "cos": (lambda s, b, h, q, k: 2 * jnp.cos(s), ()),
    "window": (lambda s, b, h, q, k: jnp.where(abs(q - k) <= 9, s, -jnp.inf), ()),
    "prefix": (
        lambda s, b, h, q, k, x: jnp.where((k < x[b]) | (k <= q), s, -jnp.inf),
        (_integers(0, 40, (B,)),),
    ),
    "documents": (
        lambda s, b, h, q, k, x: jnp.where(x[q % 70] == x[k % 70], s, -jnp.inf),
        (np.sort(_integers(0, 4, (70,))),),
    ),
    "documents of batch": (
        lambda s, b, h, q, k, x, y: jnp.where(x[b, q] == y[b][k], s, -jnp.inf),
        (np.sort(_integers(0, 4, (B, T)), 1), np.sort(_integers(0, 4, (B, S), 1), 1)),
    ),
    "bias": (lambda s, b, h, q, k, x: s + x[q, k], (_table(T, S),)),
    "bias of head": (lambda s, b, h, q, k, x: s + x[h, q, k], (_table(N, T, S),)),
    "bias of all": (lambda s, b, h, q, k, x: s + x[b][h][q][k], (_table(B, N, T, S),)),
    "relative table": (lambda s, b, h, q, k, x: s + x[h, q - k + S - 1], (_table(N, T + S),)),
    "gain": (lambda s, b, h, q, k, x: s * x, (np.float32(0.7),)),
    "gain and bias": (
        lambda s, b, h, q, k, x, y: jnp.where(y[b, k] > 0, s * x[h] + x[h] * y[b, k], s),
        (_table(N), _table(B, S)),
    ),
    "softplus": (lambda s, b, h, q, k: jax.nn.softplus(s), ()),
    "relu": (lambda s, b, h, q, k: jax.nn.relu(s) - jax.nn.relu(-s) / 4, ()),
    "mask and infinite bias": (
        lambda s, b, h, q, k, x: jnp.where(k < 50, s, -jnp.inf) + x[k],
        (np.where(np.arange(S) % 7 == 0, -np.inf, 0.5).astype(np.float32),),
    ),
}


def operands(dtype: str, kv_heads: int = K, head_dim: int = 16) -> list[np.ndarray[Any, Any]]:
    """q, k, v and dout, rounded to the dtype."""
    shapes = (B, T, N, head_dim), (B, S, kv_heads, head_dim), (B, S, kv_heads, head_dim)
    drawn = [normal(seed, *shape) for seed, shape in enumerate((*shapes, (B, T, N, head_dim)))]
    return [np.asarray(jnp.asarray(x, dtype)) for x in drawn]


def dense(
    q: Array,
    k: Array,
    v: Array,
    score_mod: ScoreMod,
    captures: tuple[Array, ...] = (),
    scale: float | None = None,
    visible: Array = True,
) -> tuple[Array, Array]:
    """Attention as it is defined: out (B, T, N, D) and lse (B, T, N)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    s = jnp.einsum("btnd,bsnd->bnts", q, k, precision="highest") * scale
    function = score_mod
    for axis in (3, 2, 1, 0):
        indices = tuple(0 if i == axis else None for i in range(4))
        function = jax.vmap(function, (0, *indices, *[None] * len(captures)))
    counted = [jnp.arange(n, dtype=jnp.int32) for n in s.shape]
    s = jnp.where(visible, function(s, *counted, *captures).astype(s.dtype), -jnp.inf)
    empty = (s == -jnp.inf).all(-1, keepdims=True)
    lse = jax.nn.logsumexp(jnp.where(empty, 0, s), axis=-1, keepdims=True)
    p = jnp.where(empty | (s == -jnp.inf), 0, jnp.exp(jnp.where(empty, 0, s) - lse))
    out = jnp.einsum("bnts,bsnd->btnd", p, v, precision="highest")
    lse = jnp.where(empty, -jnp.inf, lse)
    return out, lse[..., 0].swapaxes(1, 2)


def floats_of(arrays: tuple[Array, ...]) -> list[int]:
    """Which arrays may have a gradient."""
    return [i for i, x in enumerate(arrays) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]


def gradients(
    function: Callable[..., Array], arrays: tuple[Array, ...], dout: Array
) -> tuple[Array, list[Array]]:
    """The result of a function, and the gradients of its arguments that are floats."""
    moving = floats_of(arrays)

    def of_moving(*some: Array) -> Array:
        full = list(arrays)
        for i, x in zip(moving, some, strict=True):
            full[i] = x
        return function(*full)

    out, pull = jax.vjp(of_moving, *(jnp.asarray(arrays[i]) for i in moving))
    return out, list(pull(jnp.asarray(dout, out.dtype)))


def check_close(got: list[Array], low: list[Array], exact: list[Array], count: int) -> None:
    """Mean errors against float64, as multiples of those of the same formula in the type of the operands.

    Args:
      got: out, dq, dk, dv and gradients of captures.
      low: the same of the plain formula, in the type.
      exact: the same in float64.
      count: how many of them there are.
    """
    assert len(got) == len(low) == len(exact) == count
    factors = (1.5, 4.0, 8.0, 8.0, *[4.0] * (count - 4))
    for i, (a, b, c, factor) in enumerate(zip(got, low, exact, factors, strict=True)):
        x, y, z = (np.asarray(value, np.float64) for value in (a, b, c))
        assert not np.isnan(x).any(), i
        # Of a few numbers the mean error is that of one draw, and may happen to be near 0: twice as much.
        allowed = factor * np.abs(y - z).mean() * (1 if x.size >= 32 else 2)
        allowed += 1e-6 * max(1.0, np.abs(z).mean())
        assert np.abs(x - z).mean() <= allowed, (i, np.abs(x - z).mean(), allowed)
