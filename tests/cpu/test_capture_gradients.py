"""Gradients of what score functions read, where XLA computes them: what hidden pairs hold, types, ways to read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import normal
from score_mods import dense, gradients

import jattn

pytestmark = pytest.mark.thinned  # most of their time goes into compiling

Array = Any
BATCH, LENGTH, HEADS = 2, 24, 2
BACKENDS = ("xla", "reference")


def qkv(dtype: Any = "float32") -> tuple[Array, Array, Array]:
    q, k, v = (normal(seed, BATCH, LENGTH, HEADS, 8, dtype=dtype) for seed in range(3))
    return q, k, v


def attend(q: Array, k: Array, v: Array, score_mod: Any, captures: Any, **keywords: Any) -> Any:
    return jattn.dot_product_attention(q, k, v, score_mod=score_mod, captures=captures, **keywords)


# What each function does to a pair is not finite where `far` is 0: there, 20 keys behind the query, it is hidden.
def _far() -> Array:
    return np.where(np.arange(2 * LENGTH) < LENGTH + 20, 1.0, 0.0).astype(np.float32) + normal(
        5, 2 * LENGTH
    ) * np.where(np.arange(2 * LENGTH) < LENGTH + 20, 0.1, 0.0)


NOT_FINITE: dict[str, Callable[..., Array]] = {
    "derivative": lambda s, b, h, q, k, x, y: s + jnp.sqrt(x[k - q + LENGTH]) * y[h],
    "value": lambda s, b, h, q, k, x, y: s - y[h] * jnp.log(x[k - q + LENGTH]),
    "slope": lambda s, b, h, q, k, x, y: s * y[h] / x[k - q + LENGTH],
    "of the array": lambda s, b, h, q, k, x, y: s + (y[h] * jnp.sqrt(x))[k - q + LENGTH],
    "rows": lambda s, b, h, q, k, x, y: (
        s + jnp.vdot(jnp.stack([y[h], y[0]]), 1 / jnp.stack([x[k - q + LENGTH], y[1]]))
    ),
}


@pytest.mark.parametrize(
    ("backend", "name", "how"),
    [
        *(("xla", name, how) for name in NOT_FINITE for how in ("mask", "function")),
        *(("xla", "derivative", how) for how in ("band", "segments")),
        *(("reference", name, "mask") for name in ("slope", "of the array", "rows")),
    ],
)
def test_hidden_pairs_move_nothing(backend: str, name: str, how: str) -> None:
    """Whatever their derivatives are: gradients are those of attention to the keys that are visible alone."""
    q, k, v = qkv()
    captures = (_far(), np.array([0.5, -2.0], np.float32))
    places = np.arange(LENGTH)
    ids = (places >= 8).astype(np.int32)[None].repeat(BATCH, 0)
    visible = {
        "segments": ids[0][:, None] == ids[0][None],
        "band": abs(places[:, None] - places[None]) <= 7,
    }.get(how, places[None] - places[:, None] < 20)
    keywords = {
        "mask": {"mask": jnp.asarray(visible)},
        "band": {"local_window_size": 7},
        "segments": {"segment_ids": jnp.asarray(ids)},
        "function": {},
    }[how]
    changed = NOT_FINITE[name]

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array, *read: Array) -> Array:
        new = changed(s, b, h, q, k, *read)
        return jnp.where(k - q < 20, new, -jnp.inf) if how == "function" else new

    # The same with finite numbers behind what is hidden.
    finite = (np.where(captures[0] == 0, 1, captures[0]), captures[1])
    dout = normal(3, *q.shape)
    got = gradients(
        lambda q, k, v, *x: attend(q, k, v, score_mod, x, implementation=backend, **keywords),
        (q, k, v, *captures),
        dout,
    )
    want = gradients(
        lambda q, k, v, *x: dense(q, k, v, score_mod, x, visible=jnp.asarray(visible))[0],
        (q, k, v, *finite),
        dout,
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4 * max(1.0, float(jnp.abs(b).max())))
    np.testing.assert_array_equal(np.asarray(got[1][3])[captures[0] == 0], 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_visible_derivative_that_is_not_finite_is_seen(backend: str) -> None:
    q, k, v = qkv()
    table = np.ones(HEADS, np.float32)
    table[1] = 0

    def run(table: Array) -> Array:
        return attend(
            q,
            k,
            v,
            lambda s, b, h, q, k, x: s + k * jnp.sqrt(x[h]),
            (table,),
            implementation=backend,
        )

    (grad,) = jax.vjp(run, table)[1](normal(3, *q.shape))
    assert np.isfinite(grad[0])
    assert not np.isfinite(grad[1])


READS: dict[str, Callable[..., Array]] = {
    "bias": lambda s, b, h, q, k, x, y: s * x[h, q % 4] + y[k % 4, h],
    "rows": lambda s, b, h, q, k, x, y: s + jnp.vdot(x[h], y[:, k % 2]),
    "arrays": lambda s, b, h, q, k, x, y: s + (jnp.tanh(x) * y.T)[h, (q + k) % 4],
    "masked row": lambda s, b, h, q, k, x, y: (
        s + jnp.where(jnp.arange(4) < q, x[h] * y[k % 4, b], 0).sum()
    ),
    "of the score": lambda s, b, h, q, k, x, y: (
        s + x[h, jnp.clip(s + 2, 0, 3).astype(jnp.int32)] * y[0, 0]
    ),
    "loop": lambda s, b, h, q, k, x, y: jax.lax.fori_loop(
        0, 3, lambda i, c: c + jnp.sin(c) * x[h, i] * y[k % 4, h], s
    ),
    "alone": lambda s, b, h, q, k, x, y: (x * 2)[h, k % 4] + k / 16 * y.mean(),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in READS),
        *((name, "float64") for name in ("rows", "loop")),
        *((name, "bfloat16") for name in READS),
        *((name, "float16") for name in ("bias", "rows")),
    ],
)
def test_gradients_against_float64(name: str, dtype: str) -> None:
    """Of captures in the type named, of q in float32 or float64; the difference is that of rounded derivatives."""
    wide = "float64" if dtype == "float64" else "float32"
    q, k, v = (np.asarray(x, wide) for x in qkv())
    captures = [
        np.asarray(normal(i + 5, *shape)).astype(jnp.dtype(dtype))
        for i, shape in enumerate(((2, 4), (4, 2)))
    ]
    dout = normal(3, *q.shape)
    with jax.enable_x64(True):
        exact = [np.asarray(x, np.float64) for x in (q, k, v, *captures)]
        want = gradients(lambda q, k, v, *x: dense(q, k, v, READS[name], x)[0], tuple(exact), dout)
        want = jax.device_get(want[1][3:])
    with jax.enable_x64(dtype == "float64"):
        got = gradients(
            lambda q, k, v, *x: attend(q, k, v, READS[name], x, implementation="xla"),
            (q, k, v, *captures),
            dout,
        )[1][3:]
    unit = {"float64": 1e-12, "float32": 2e-6, "float16": 2**-10, "bfloat16": 2**-7}[dtype]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        scale = np.abs(b).max()
        assert scale > 0
        np.testing.assert_allclose(np.asarray(a, np.float64), b, atol=4 * unit * scale)


def test_second_derivatives_where_a_factor_is_0() -> None:
    """Tables start as zeros: the derivative of one factor is 0, and that of both is not."""
    q, k, v = qkv()
    gain, table = np.zeros(HEADS, np.float32), normal(4, 4)

    def loss(function: Callable[..., Any], gain: Array, table: Array) -> Array:
        def score_mod(
            s: Array, b: Array, h: Array, q: Array, k: Array, x: Array, y: Array
        ) -> Array:
            return s + x[h] * jnp.tanh(y)[k % 4] * y[q % 4]

        return (function(q, k, v, score_mod, (gain, table)) * normal(3, *q.shape)).sum()

    def ours(*x: Any) -> Any:
        return attend(*x, implementation="reference")

    def moved(function: Callable[..., Any]) -> Any:
        """How the gradient changes along a direction."""
        gradient = jax.grad(lambda *x: loss(function, *x), (0, 1))
        return jax.jvp(gradient, (gain, table), (normal(6, HEADS), normal(7, 4)))[1]

    got, want = moved(ours), moved(lambda *x: dense(*x)[0])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1.0, float(jnp.abs(b).max())))
    assert np.abs(got[1]).max() > 0


@jax.custom_vjp
def _tripled(x: Array) -> Array:
    return jnp.sin(x)


_tripled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (3 * g * jnp.cos(x),))


@pytest.mark.parametrize("backend", ["cpu", "xla"])
def test_custom_vjp_rules_of_what_is_done_to_captures(backend: str) -> None:
    """To elements and to whole arrays; of scores there must be a derivative in forward mode."""
    q, k, v = qkv()
    table = normal(4, HEADS, LENGTH)
    dout = normal(3, *q.shape)

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array, x: Array) -> Array:
        return s * _tripled(x)[h, q] + jax.jit(_tripled)(x[h, k])

    got = gradients(
        lambda q, k, v, x: attend(q, k, v, score_mod, (x,), implementation=backend),
        (q, k, v, table),
        dout,
    )
    want = gradients(lambda q, k, v, x: dense(q, k, v, score_mod, (x,))[0], (q, k, v, table), dout)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.abs(b).max())))
