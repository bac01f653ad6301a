"""``fuse_attention`` finds attention as families of models write it, and leaves alone what is nearly that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusion_patterns import Array, close, found, missed, normal
from model_programs import (
    BIAS,
    KEYS,
    MASK,
    PROGRAMS,
    SINKS,
    B,
    D,
    N,
    Program,
    Q,
    S,
    T,
    V,
    check_program,
    columns,
    one_in_the_sum,
    rope_in_front,
    scores_in_float32,
    scores_of,
    sink_in_the_sum,
    weighted,
)

import jattn

pytestmark = pytest.mark.usefixtures("clean_fusion_log")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_attention_of_models(program: Program) -> None:
    check_program(program)


def test_scores_in_float32_are_computed_in_the_type_of_the_values() -> None:
    """The kernel multiplies 16-bit numbers exactly, and adds them up in float32: nothing is cast up before it."""
    _, x = PROGRAMS[scores_in_float32]
    text = str(jax.make_jaxpr(jattn.fuse_attention(scores_in_float32))(*x))
    assert f"q bfloat16 ({B}, {T}, {N}, {D})" in text


def test_products_that_are_added_are_one_product() -> None:
    _, x = PROGRAMS[rope_in_front]
    text = str(jax.make_jaxpr(jattn.fuse_attention(rope_in_front))(*x))
    assert f"q float32 ({B}, {T}, {N}, {D + 4})" in text


def test_a_row_without_keys_and_a_sink() -> None:
    """All weight is that of the sink."""
    hidden = MASK.at[:, :, 0].set(False)

    def attend(q: Array, k: Array, v: Array, sinks: Array) -> Array:
        s = jnp.where(hidden, scores_of(q, k), -jnp.inf)
        p = jax.nn.softmax(jnp.concatenate([s, columns(sinks)], axis=-1), axis=-1)
        return weighted(p[..., :-1], v)

    x = (Q, KEYS, V, SINKS)
    got = jattn.fuse_attention(attend)(*x)
    assert found() == ["mask+sinks"]
    assert not got[:, 0].any()
    close(got, attend(*x), "float32")


def test_sinks_of_float64_are_not_rounded() -> None:
    with jax.enable_x64(True):
        x = [a.astype(jnp.float64) for a in (Q, KEYS, V, SINKS)]
        got, want = (f(*x) for f in (jattn.fuse_attention(sink_in_the_sum), sink_in_the_sum))
        np.testing.assert_array_equal(got, want)
        assert missed() == ["sinks of float64, which are float32 in a kernel"]
        jattn.clear_fusion_log()
        got, want = (f(*x) for f in (jattn.fuse_attention(one_in_the_sum), one_in_the_sum))
        assert found() == ["sinks"]
        np.testing.assert_allclose(got, want, rtol=1e-12)


# ---- What is nearly that


def of_weights(change: Callable[[Array], Array]) -> Program:
    return lambda q, k, v, x: weighted(change(scores_of(q, k)), v)


def softmax_over_both(scores: Array, column: Array) -> Array:
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)


def divided(scores: Array, shift: Array, term: Array) -> Array:
    e = jnp.exp(scores - shift)
    return e / (e.sum(-1, keepdims=True) + term)


def divided_by_its_sum(p: Array) -> Array:
    return p / p.sum(-1, keepdims=True)


def last_maximum(scores: Array) -> Array:
    return scores.max(-1, keepdims=True)


NEARLY: dict[str, tuple[Program, str]] = {
    "heads are summed up": (
        lambda q, k, v, _: jnp.einsum("bhqk,bkhd->bqd", jax.nn.softmax(scores_of(q, k)), v),
        "the product with the values sums over more than keys",
    ),
    "divided twice": (
        lambda q, k, v, _: weighted(divided_by_its_sum(jax.nn.softmax(scores_of(q, k))), v),
        "probabilities are divided by their sum once more",
    ),
    "one query for all": (
        lambda q, k, v, _: jnp.einsum(
            "bk,bkd->bd", jax.nn.softmax(k[:, :, 0] @ q[0, 0, 0]), v[:, :, 0]
        ),
        "queries lack an axis that keys and values share",
    ),
    "sinks of single queries": (
        of_weights(lambda s: softmax_over_both(s, normal(B, N, T, 1))[..., :-1]),
        "sinks of single queries",
    ),
    "a column that is no sink": (
        lambda q, k, v, _: weighted(jax.nn.softmax(scores_of(q, k))[..., :-1], v[:, 1:]),
        "more scores than products",
    ),
    "the other column is cut off": (
        of_weights(lambda s: softmax_over_both(s, columns(SINKS))[..., 1:]),
        "several columns of sinks",
    ),
    "two columns": (
        of_weights(
            lambda s: softmax_over_both(s, jnp.broadcast_to(columns(SINKS), (B, N, T, 2)))[..., :-2]
        ),
        "slice between the softmax and the product with the values",
    ),
    "a scale for both": (
        of_weights(
            lambda s: jax.nn.softmax(2 * jnp.concatenate([s, columns(SINKS)], axis=-1))[..., :-1]
        ),
        "masked, or scaled, together",
    ),
    "a number in the sum of what is shifted": (
        of_weights(lambda s: divided(s, last_maximum(s), jnp.float32(0.25))),
        "a number is added to the sum of weights less a maximum",
    ),
    "another shift of the sink": (
        of_weights(lambda s: divided(s, last_maximum(s), jnp.exp(-s.min(-1, keepdims=True)))),
        "differs",
    ),
    "a number beside a sink": (
        of_weights(
            lambda s: softmax_over_both(s + 2.0, columns(SINKS))[..., :-1],
        ),
        "a number is added to the scores and not to the sinks",
    ),
    "queries of one batch entry": (
        lambda q, k, v, _: jax.vmap(
            lambda k, v: jnp.einsum(
                "hqk,khd->qhd", jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q[0], k)), v
            )
        )(k, v),
        "queries lack an axis that keys and values share",
    ),
    "no exponential": (
        of_weights(lambda s: divided(s, 0.0, jnp.abs(SINKS[:, None, None]))),
        "no exponential",
    ),
    "a negative number": (
        of_weights(lambda s: divided(s, 0.0, jnp.float32(-0.5))),
        "-0.5 is added",
    ),
    "a mask in front of scores that are taken off": (
        of_weights(lambda s: jax.nn.softmax(1.0 * BIAS - jnp.where(MASK, s, -jnp.inf))),
        "a mask in front of the scale",
    ),
    "a bias in a softcap": (
        of_weights(lambda s: jax.nn.softmax(2 * jnp.tanh((s - BIAS) / 2))),
        "a bias in front of tanh",
    ),
    "two products without a query": (
        lambda q, k, v, _: weighted(
            jax.nn.softmax(
                jnp.einsum("bqhd,qkd->bhqk", q, normal(T, S, D))
                + jnp.einsum("bkhd,qkd->bhqk", k, normal(T, S, D, seed=1))
            ),
            v,
        ),
        "none is of query and key",
    ),
    "scores in float32 of what is float32": (
        lambda q, k, v, _: weighted(
            jax.nn.softmax(scores_of(q, k)).astype(jnp.bfloat16), v.astype(jnp.bfloat16)
        ),
        "query, key and value of bfloat16, float32",
    ),
}


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_that_is_left_as_it_is(name: str) -> None:
    program, reason = NEARLY[name]
    x: Any = (Q, KEYS, V, SINKS)
    np.testing.assert_array_equal(jattn.fuse_attention(program)(*x), program(*x))
    assert found() == []
    assert any(reason in miss for miss in missed())
