"""Branches of score functions, and what is computed once for all pairs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import normal
from jax import lax
from score_mods import dense, gradients

import jattn
from jattn import cpu_program, device_gradients
from jattn.score_program import trace

pytestmark = pytest.mark.thinned  # most of their time goes into compiling

Array = Any
LENGTH, HEADS = 24, 2


def attend(q: Array, k: Array, v: Array, score_mod: Any, captures: Any, **keywords: Any) -> Any:
    return jattn.dot_product_attention(q, k, v, score_mod=score_mod, captures=captures, **keywords)


def problem() -> tuple[Array, ...]:
    """q, k, v, and the captures x (N, T) and y (T,)."""
    qkv = (normal(seed, 2, LENGTH, HEADS, 8) for seed in range(3))
    return (*qkv, normal(7, HEADS, LENGTH), normal(8, LENGTH))


def check(score_mod: Callable[..., Array], backend: str) -> None:
    """Compares results and all gradients with plain attention."""
    arrays = problem()
    dout = normal(9, *arrays[0].shape)
    got = gradients(
        lambda q, k, v, *x: attend(q, k, v, score_mod, x, implementation=backend), arrays, dout
    )
    want = gradients(lambda q, k, v, *x: dense(q, k, v, score_mod, x)[0], arrays, dout)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.abs(b).max())))


@jax.custom_jvp
def _slow(x: Array) -> Array:
    return jnp.sin(x)


_slow.defjvp(lambda x, t: (jnp.sin(x[0]), jnp.cos(x[0]) * t[0]))

BRANCHES: dict[str, Callable[..., Array]] = {
    "closed over": lambda s, b, h, q, k, x, y: lax.cond(
        q > k, lambda: s + x[h, k], lambda: s * y[q]
    ),
    "operands": lambda s, b, h, q, k, x, y: (
        s + lax.cond(q > k, lambda x, y: jax.nn.softmax(y)[k], lambda x, y: y[q] * x[h, k], x, y)
    ),
    "switch": lambda s, b, h, q, k, x, y: (
        s
        + lax.switch((q + k) % 3, [lambda i: x[h, i], lambda i: y[i], lambda i: x[0, i] * y[k]], k)
    ),
    "beyond the last": lambda s, b, h, q, k, x, y: lax.switch(
        q - 3, [lambda: s, lambda: s + y[k], lambda: s * x[h, k]]
    ),
    "rows": lambda s, b, h, q, k, x, y: s + lax.cond(h == 0, lambda: x[0], lambda: x[1] * 2)[k],
    "of arrays alone": lambda s, b, h, q, k, x, y: (
        s + lax.cond(y[0] > 0, lambda: x, lambda: x * 2)[h, k]
    ),
    "nested": lambda s, b, h, q, k, x, y: (
        s
        + lax.cond(
            q > k,
            lambda: lax.cond(h > 0, lambda: y[k], lambda: jax.nn.relu(x[h, k])),
            lambda: 0.0,
        )
    ),
    "with a rule": lambda s, b, h, q, k, x, y: lax.cond(
        q > k, lambda: _slow(s + x[h, k]), lambda: s - _slow(y[q])
    ),
    "hidden": lambda s, b, h, q, k, x, y: lax.cond(
        q >= k, lambda: s + jax.nn.softmax(y)[k], lambda: -jnp.inf
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("backend", ["cpu", "xla"])
def test_branches(backend: str, name: str) -> None:
    check(BRANCHES[name], backend)


@pytest.mark.parametrize("name", BRANCHES)
def test_kernels_run_branches_and_add_up_what_they_read(name: str) -> None:
    program, arrays = trace(BRANCHES[name], problem()[3:], 2)
    assert cpu_program.refusals(program) == []
    assert device_gradients.can_sum(program, (True,) * len(arrays))


def test_slopes_of_branches_that_are_one() -> None:
    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array, y: Array) -> Array:
        return lax.cond(q >= k, lambda: s + y[k], lambda: -jnp.inf)

    assert trace(score_mod, (problem()[4],), 2)[0].has_unit_slope


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_captures_that_branches_read_are_summed_in_float32(dtype: str) -> None:
    """Ones: the sum of a gradient's terms over many tiles is exact in float32, and far off in 16 bits."""
    q, k, v = (normal(seed, 1, 1024, 2, 8) for seed in range(3))
    scale = jnp.ones((2,), dtype)

    def loss(scale: Array) -> Array:
        def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
            return s + lax.cond(k % 2 == 0, lambda: scale[h], lambda: 1 * scale[h])

        return attend(q, k, v, score_mod, (), return_lse=True, implementation="xla")[1].sum()

    np.testing.assert_array_equal(jax.grad(loss)(scale), jnp.full(2, 1024, dtype))


def test_a_branch_that_is_not_taken_moves_nothing() -> None:
    """Be its derivative infinite."""
    q, k, v, _, y = problem()
    y = y.at[3].set(0)

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array, y: Array) -> Array:
        return lax.cond(k == 3, lambda: s, lambda: s + jnp.sqrt(jnp.abs(y[k])))

    for backend in ("cpu", "xla"):
        grad = jax.grad(
            lambda y, backend=backend: attend(q, k, v, score_mod, (y,), implementation=backend)[
                ..., 0
            ].sum()
        )(y)
        assert jnp.isfinite(grad).all()
        assert grad[3] == 0


# ---- Keys and complex numbers ----------------------------------------------------------------------------------------

KEYS: dict[str, Callable[..., Array]] = {
    "once": lambda s, b, h, q, k, key: s + jax.random.normal(key[0], (HEADS,))[h],
    "of a pair": lambda s, b, h, q, k, key: s + jax.random.normal(jax.random.fold_in(key[h], k)),
    "made inside": lambda s, b, h, q, k, key: (
        s * jax.random.uniform(jax.random.fold_in(jax.random.PRNGKey(0), k))
    ),
}


@pytest.mark.parametrize("how", ["capture", "closed over", "mapped"])
@pytest.mark.parametrize("name", KEYS)
def test_keys(name: str, how: str) -> None:
    """Of random numbers, which are the same wherever the function is evaluated."""
    q, k, v, *_ = problem()
    keys = jax.random.split(jax.random.key(1), HEADS)

    def closed(keys: Array) -> Callable[..., Array]:
        return lambda *pair: KEYS[name](*pair, keys)

    def run(keys: Array) -> Array:
        return attend(q, k, v, closed(keys), (), implementation="xla")

    want = dense(q, k, v, closed(keys))[0]
    if how == "capture":
        out = attend(q, k, v, KEYS[name], (keys,), implementation="xla")
    elif how == "closed over":
        out = jax.jit(run)(keys)
    else:
        out = jax.vmap(run)(jnp.stack([keys[::-1], keys]))[1]
    np.testing.assert_allclose(out, want, atol=2e-6)


COMPLEX: dict[str, Callable[..., Array]] = {
    "parts": lambda s, b, h, q, k, z: s * z[h, k].real + z[h, q].imag,
    "products": lambda s, b, h, q, k, z: s + (z[h, q] * z[h, k].conj()).real,
    "once": lambda s, b, h, q, k, z: s + jnp.abs(jnp.fft.fft(z))[h, k],
    "scalar": lambda s, b, h, q, k, z: s * jnp.abs(z.sum()),
    "of the score": lambda s, b, h, q, k, z: jnp.abs(s + z[h, k]),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_captures_and_their_gradients(name: str) -> None:
    q, k, v, x, y = problem()
    z = jax.lax.complex(x, x + y)
    dout = normal(9, *q.shape)

    def grads(function: Callable[..., Array]) -> Any:
        return jax.value_and_grad(lambda q, z: (function(q, z) * dout).sum(), (0, 1))(q, z)

    got = grads(lambda q, z: attend(q, k, v, COMPLEX[name], (z,), implementation="xla"))
    want = grads(lambda q, z: dense(q, k, v, COMPLEX[name], (z,))[0])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, float(jnp.abs(b).max())))


# ---- Once for all pairs ----------------------------------------------------------------------------------------------

# What the program reads: the extents of arrays.
ONCE: dict[str, tuple[Callable[..., Array], list[tuple[int, ...]]]] = {
    "difference": (lambda s, b, h, q, k, x, z: s + (x - z)[h, k], [(2, 24)]),
    "chosen": (lambda s, b, h, q, k, x, z: s + jnp.where(x > z, x, z)[h, k], [(2, 24)]),
    "running sum": (
        lambda s, b, h, q, k, x, z: s + jnp.cumsum(x, 1)[h, k] * z[h, q],
        [(2, 24)] * 2,
    ),
    "sorted": (lambda s, b, h, q, k, x, z: s * jnp.sort(x, 1)[h, k] + z[h, k], [(2, 24)] * 2),
    "no kernel's": (lambda s, b, h, q, k, x, z: s + jax.lax.lgamma(x * x + 1)[h, k], [(2, 24)]),
    "branches of arrays": (
        lambda s, b, h, q, k, x, z: (
            s + lax.cond(x[0, 0] > 0, lambda: x, lambda: jnp.flip(z, 1))[h, k]
        ),
        [(2, 24)],
    ),
    # Infinite where no pair that is visible reads, perhaps: its gradient is that of pairs.
    "product": (lambda s, b, h, q, k, x, z: s + (x * z)[h, k], [(2, 24)] * 2),
    # Larger than what it is made of.
    "outer": (lambda s, b, h, q, k, x, z: s + (x[0][:, None] - z[1][None])[q, k], [(2, 24)] * 2),
    "one array": (lambda s, b, h, q, k, x, z: s + jnp.tanh(x)[h, k], [(2, 24)]),
}


@pytest.mark.parametrize("name", ONCE)
def test_what_is_computed_once(name: str) -> None:
    score_mod, shapes = ONCE[name]
    q, k, v, x, y = problem()
    captures = (x, x[::-1] + y)
    program, _ = trace(score_mod, captures, 2)
    assert [c.shape for c in program.captures] == shapes
    assert cpu_program.refusals(program) == []
    dout = normal(9, *q.shape)
    got = gradients(
        lambda q, k, v, *x: attend(q, k, v, score_mod, x, implementation="cpu"),
        (q, k, v, *captures),
        dout,
    )
    want = gradients(
        lambda q, k, v, *x: dense(q, k, v, score_mod, x)[0], (q, k, v, *captures), dout
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.abs(b).max())))
