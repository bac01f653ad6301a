"""Scores of any size: results, gradients and tangents follow from their rounded values, whatever computes them again.

Products of small integers are exact, so that a score in float32 is one number however it is summed up; many are equal.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

import jattn

BACKENDS = ["cpu", "xla", "reference"]
Array = npt.NDArray[np.float64]


class Problem(NamedTuple):
    """q (2, 70, 4, 8), k and v (2, 70, 2, 8), their tangents and the cotangent of out."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    dout: jax.Array


def drawn() -> Problem:
    rng = np.random.default_rng(0)

    def array(heads: int, *, small: bool = False) -> jax.Array:
        shape = (2, 70, heads, 8)
        drawn = rng.integers(-2, 3, shape) if small else rng.normal(size=shape)
        return jnp.asarray(drawn, jnp.float32)

    return Problem(
        array(4, small=True), array(2, small=True), array(2), array(4), array(2), array(2), array(4)
    )


class Expected(NamedTuple):
    """In float64, of the scores as float32 has them."""

    out: Array
    gradients: tuple[Array, Array, Array]
    tangent: Array


def expected(problem: Problem, scale: float) -> Expected:
    q, dq, dout = (
        np.asarray(x, np.float64).reshape(2, 70, 2, 2, 8)
        for x in (problem.q, problem.dq, problem.dout)
    )
    k, v, dk, dv = (
        np.asarray(x, np.float64) for x in (problem.k, problem.v, problem.dk, problem.dv)
    )
    product = functools.partial(np.einsum, "btkgd,bskd->bkgts")
    s = np.float32(scale) * product(q, k).astype(np.float32)
    s = np.where(np.tril(np.ones((70, 70), bool)), s.astype(np.float64), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = np.einsum("bkgts,bskd->btkgd", p, v)
    dp = product(dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    gradients = (
        scale * np.einsum("bkgts,bskd->btkgd", ds, k).reshape(2, 70, 4, 8),
        scale * np.einsum("bkgts,btkgd->bskd", ds, q),
        np.einsum("bkgts,btkgd->bskd", p, dout),
    )
    moved = scale * (product(dq, k) + product(q, dk))
    dweights = p * (moved - (p * moved).sum(-1, keepdims=True))
    tangent = np.einsum("bkgts,bskd->btkgd", dweights, v) + np.einsum("bkgts,bskd->btkgd", p, dv)
    return Expected(out.reshape(2, 70, 4, 8), gradients, tangent.reshape(2, 70, 4, 8))


def close(got: jax.Array, want: Array) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("scale", [0.3, 3e3, 3e5, 3e7, 3e9, 3e20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_those_of_the_rounded_scores(backend: str, scale: float) -> None:
    problem = drawn()
    attend = functools.partial(
        jattn.dot_product_attention, scale=scale, is_causal=True, implementation=backend
    )
    operands, tangents = problem[:3], problem[3:6]
    want = expected(problem, scale)
    out, pull = jax.vjp(attend, *operands)
    close(out, want.out)
    if backend != "cpu" or scale < 1:  # its kernel has an lse in float32 alone
        for got, gradient in zip(pull(problem.dout), want.gradients, strict=True):
            close(got, gradient)
    close(jax.jvp(attend, operands, tangents)[1], want.tangent)

    # Of second derivatives: along v the first one is linear, so the second along v is it again.
    def first(v: jax.Array) -> jax.Array:
        pull: jax.Array = jax.vjp(attend, problem.q, problem.k, v)[1](problem.dout)[0]
        return pull

    again = jax.jvp(first, (problem.v,), (problem.v,))[1]
    close(again, want.gradients[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("term", ["bias", "sinks", "alibi", "softcap", "score_mod"])
def test_weights_sum_up_to_one_beside_terms(term: str, backend: str) -> None:
    """So the derivative along constant values is that constant, short of what a sink takes."""
    problem = drawn()
    keywords = {
        "bias": {"bias": jnp.linspace(-1e8, 1e8, 70)},
        "sinks": {"sinks": jnp.full(4, 1e8)},
        "alibi": {"alibi_slopes": jnp.full(4, 1e5)},
        "softcap": {"logits_soft_cap": 1e8},
        "score_mod": {"score_mod": lambda score, *_: score * 7},
    }[term]
    attend = functools.partial(
        jattn.dot_product_attention, problem.q, problem.k, scale=3e6, implementation=backend
    )
    ones = jnp.ones_like(problem.v)
    tangent = jax.jvp(lambda v: attend(v, **keywords), (problem.v,), (ones,))[1]
    share = attend(ones, **keywords)
    np.testing.assert_allclose(tangent, share, rtol=1e-5)
    if term != "sinks":
        np.testing.assert_allclose(share, 1, rtol=1e-5)
    if backend != "cpu":  # its kernel has an lse in float32 alone
        gradient = jax.grad(lambda v: attend(v, **keywords).sum())(problem.v)
        np.testing.assert_allclose(gradient.sum(), share.sum(), rtol=1e-5)
