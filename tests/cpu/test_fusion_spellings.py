"""``fuse_attention`` finds a softmax that is spelt without one: by logarithms, by inverses, behind the product with the
values; and scores that tanh caps. What looks alike and is none of these stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusion_patterns import (
    DV,
    Array,
    B,
    D,
    N,
    S,
    T,
    close,
    dropped,
    found,
    missed,
    normal,
    operands,
    transposed,
)
from jax.ad_checkpoint import checkpoint_name

import jattn

stop = jax.lax.stop_gradient
CAP = 1.5


pytestmark = pytest.mark.usefixtures("clean_fusion_log")


def largest(s: Array) -> Array:
    return s.max(-1, keepdims=True)


def summed(e: Array) -> Array:
    return e.sum(-1, keepdims=True)


def by_parts(s: Array, shift: Array) -> Array:
    """softmax, whatever the shift."""
    return jnp.exp(s - (shift + jnp.log(summed(jnp.exp(s - shift)))))


def guarded(s: Array) -> Array:
    shift = jnp.where(jnp.isfinite(largest(s)), largest(s), 0)
    e = jnp.exp(s - shift)
    return e / summed(e)


# Scores -> probabilities.
SOFTMAX: dict[str, Callable[[Array], Array]] = {
    "logsumexp": lambda s: jnp.exp(s - jax.nn.logsumexp(s, axis=-1, keepdims=True)),
    "logsumexp of fewer axes": lambda s: jnp.exp(s - jax.nn.logsumexp(s, axis=-1)[..., None]),
    "logsumexp in float32": lambda s: jnp.exp(
        s.astype(jnp.float32) - jax.nn.logsumexp(s.astype(jnp.float32), axis=-1, keepdims=True)
    ).astype(s.dtype),
    "log_softmax": lambda s: jnp.exp(jax.nn.log_softmax(s)),
    "log of a sum": lambda s: jnp.exp(s - jnp.log(summed(jnp.exp(s)))),
    "log of a sum, and a maximum": lambda s: by_parts(s, largest(s)),
    "and one that has no gradient": lambda s: by_parts(s, stop(largest(s))),
    "a maximum that is finite": guarded,
    "an inverse": lambda s: jnp.exp(s) * (1 / summed(jnp.exp(s))),
    "a power": lambda s: jnp.exp(s - largest(s)) * summed(jnp.exp(s - largest(s))) ** -1,
    "written twice": lambda s: jnp.exp(s - largest(s)) / summed(jnp.exp(s - largest(s))),
}


def exponentials(s: Array) -> Array:
    return jnp.exp(s - largest(s))


def behind(e: Array, v: Array) -> Array:
    return (e @ v) / summed(e)


# Exponentials and values (heads first) -> the result.
BEHIND: dict[str, Callable[[Array, Array], Array]] = {
    "quotient": behind,
    "inverse": lambda e, v: (e @ v) * (1 / e.sum(-1))[..., None],
    "inverse first": lambda e, v: jnp.reciprocal(summed(e)) * (e @ v),
    "in float32": lambda e, v: ((e @ v).astype(jnp.float32) / summed(e.astype(jnp.float32))).astype(
        v.dtype
    ),
    "heads behind": lambda e, v: (
        (e @ v).swapaxes(1, 2) / e.sum(-1).swapaxes(1, 2)[..., None]
    ).swapaxes(1, 2),
    "einsum": lambda e, v: (
        jnp.einsum("bnts,bnsd->btnd", e, v) / jnp.einsum("bnts->btn", e)[..., None]
    ).swapaxes(1, 2),
}


def check(attend: Callable[..., Array], pattern: str, dtype: str = "float32") -> None:
    """It is replaced, nothing is left of it, and it computes the same, with its gradients.

    What it must be close to is computed in float32: programs round to 16 bits more often than kernels do.
    """
    x = operands("heads first", dtype)
    fused = jattn.fuse_attention(attend)
    assert "dot_general" not in str(jax.make_jaxpr(fused)(*x))
    assert found() == [pattern]
    assert missed() == []

    def gradients(function: Callable[..., Array], x: Sequence[Array]) -> Any:
        return jax.grad(lambda *x: (function(*x).astype(jnp.float32) ** 2).sum(), (0, 1, 2))(*x)

    exact = [operand.astype(jnp.float32) for operand in x]
    want = attend(*exact), *gradients(attend, exact)
    close((fused(*x), *gradients(fused, x)), [w.astype(dtype) for w in want], dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax(name: str, dtype: str) -> None:
    check(lambda q, k, v: SOFTMAX[name](q @ transposed(k) / 4.0) @ v, "plain", dtype)


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_of_masked_scores(name: str) -> None:
    def attend(q: Array, k: Array, v: Array) -> Array:
        s = q @ transposed(k) / 4.0
        return SOFTMAX[name](jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)) @ v

    check(attend, "causal")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BEHIND)
def test_divided_behind_the_values(name: str, dtype: str) -> None:
    check(lambda q, k, v: BEHIND[name](exponentials(q @ transposed(k) / 4.0), v), "plain", dtype)


@pytest.mark.parametrize("name", BEHIND)
def test_masks_on_exponentials_that_are_divided_later(name: str) -> None:
    shown = np.random.default_rng(5).random((S + 4, S)) < 0.6
    shown[:, 3] = True
    mask = jnp.asarray(shown)
    check(
        lambda q, k, v: BEHIND[name](
            jnp.where(mask, jnp.exp(q @ transposed(k) / 4.0), 0),
            v,
        ),
        "mask",
    )


def test_dropout_of_exponentials_that_are_divided_later() -> None:
    """Those that are summed are all of them, so that it is the dropout of probabilities."""
    x = operands("heads first")

    def attend(q: Array, k: Array, v: Array, key: Array) -> Array:
        e = exponentials(q @ transposed(k) / 4.0)
        return (dropped(e, key) @ v) / summed(e)

    fused = jax.jit(jattn.fuse_attention(attend))
    mean = sum(fused(*x, jax.random.key(i)) for i in range(200)) / 200
    assert found() == ["dropout"]
    plain = behind(exponentials(x[0] @ transposed(x[1]) / 4.0), x[2])
    np.testing.assert_allclose(mean, plain, atol=0.2)


# Scores -> capped ones.
CAPPED: dict[str, Callable[[Array], Array]] = {
    "quotient": lambda s: CAP * jnp.tanh(s / CAP),
    "factor": lambda s: jnp.tanh(s * (1 / CAP)) * CAP,
    "negative": lambda s: -CAP * jnp.tanh(s / -CAP),
    "another slope": lambda s: CAP * jnp.tanh(3 * s),
    "no factor": jnp.tanh,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CAPPED)
def test_softcap(name: str, dtype: str) -> None:
    check(
        lambda q, k, v: jax.nn.softmax(CAPPED[name](q @ transposed(k) / 4.0)) @ v, "softcap", dtype
    )


@pytest.mark.parametrize("fill", [-jnp.inf, -2.3819763e38])
def test_softcap_under_masks_and_a_bias(fill: float) -> None:
    """As models with it are written, with a mask of a large negative number."""
    bias = normal(1, N, S + 4, S, seed=5)

    def attend(q: Array, k: Array, v: Array) -> Array:
        s = CAP * jnp.tanh(q @ transposed(k) / 4.0 / CAP) + bias
        return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, fill)) @ v

    check(attend, "causal+softcap+bias")
    disabled = jattn.fuse_attention(attend, disable="softcap")
    x = operands("heads first")
    np.testing.assert_array_equal(disabled(*x), attend(*x))
    assert missed() == ["disabled"]


def triangle() -> Array:
    return jnp.arange(T)[:, None] >= jnp.arange(S)


def chosen(shown: float, hidden: float) -> Array:
    return jnp.where(triangle(), shown, hidden)


def start_of_a_larger_one() -> Array:
    return jax.lax.dynamic_slice(jnp.tril(jnp.ones((64, 64), bool)), (5, 5), (T, S))


# Scores -> scores under a causal mask.
CAUSAL: dict[str, Callable[[Array], Array]] = {
    "axes of size 1": lambda s: jnp.where(
        jnp.tril(jnp.ones((T, S))).reshape(1, 1, T, S) == 0, -jnp.inf, s
    ),
    "added, with axes of size 1": lambda s: s + chosen(0.0, -jnp.inf).reshape(1, 1, T, S),
    "added, in another type": lambda s: (
        s + chosen(0.0, -jnp.inf).astype(jnp.bfloat16).reshape(1, 1, T, S).astype(s.dtype)
    ),
    "one of one": lambda s: s + jnp.squeeze(chosen(0.0, -jnp.inf)[None], 0),
    "one of one, chosen": lambda s: jnp.where(jnp.squeeze(triangle()[None], 0), s, -jnp.inf),
    "column numbers in a row": lambda s: jnp.where(
        jnp.arange(T).reshape(1, 1, T, 1) >= jnp.arange(S).reshape(1, S), s, -jnp.inf
    ),
    "a lower bound of two numbers": lambda s: jnp.where(chosen(0, -2e38) >= -1e38, s, -2e38),
    "an upper bound of two numbers": lambda s: jnp.where(chosen(0, -2e38) < -1e38, -2e38, s),
    "one of two numbers": lambda s: jnp.where(chosen(3.0, 5.0) == 3, s, -jnp.inf),
    "another than one of them": lambda s: jnp.where(chosen(3.0, 5.0) != 5, s, -jnp.inf),
    "1": lambda s: jnp.where(triangle().astype(jnp.int32) == 1, s, -jnp.inf),
    "a half": lambda s: jnp.where(triangle().astype(jnp.float32) < 0.5, -jnp.inf, s),
    "a part that begins at numbers": lambda s: jnp.where(start_of_a_larger_one(), s, -jnp.inf),
    "in front of the scale": lambda s: jnp.where(triangle(), s * 4, jnp.finfo(jnp.float32).min) / 4,
    "in front of a scale that makes it infinite": lambda s: (
        jnp.where(triangle(), s / 4, jnp.finfo(jnp.float32).min) * 4
    ),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_masks(name: str) -> None:
    check(lambda q, k, v: jax.nn.softmax(CAUSAL[name](q @ transposed(k) / 4.0)) @ v, "causal")


def test_a_mask_that_hides_nothing() -> None:
    def attend(q: Array, k: Array, v: Array) -> Array:
        shown = chosen(1.0, 2.0) > 0
        return jax.nn.softmax(jnp.where(shown, q @ transposed(k) / 4.0, -jnp.inf)) @ v

    check(attend, "plain")


# Scores -> scores with a number added, which changes no weights.
SHIFTED: dict[str, tuple[Callable[[Array], Array], str]] = {
    "0": (lambda s: s + 0.0, "plain"),
    "an array of zeros": (lambda s: s + jnp.zeros((1, 1, T, S)), "plain"),
    "a number": (lambda s: (s + 3.0) * 0.5, "plain"),
    "taken off": (lambda s: s - 3.0, "plain"),
    "that they are taken off": (lambda s: 3.0 - s, "plain"),
    "under a mask": (lambda s: jnp.where(triangle(), s + 3.0, -jnp.inf), "causal"),
    "0 in front of tanh": (lambda s: CAP * jnp.tanh((s + 0.0) / CAP), "softcap"),
    "behind tanh": (lambda s: CAP * jnp.tanh(s / CAP) + 3.0, "softcap"),
}


@pytest.mark.parametrize("name", SHIFTED)
def test_numbers_that_are_added(name: str) -> None:
    shift, pattern = SHIFTED[name]
    check(lambda q, k, v: jax.nn.softmax(shift(q @ transposed(k) / 4.0)) @ v, pattern)


def constrained(x: Array) -> Array:
    mesh = jax.make_mesh(
        (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]
    )
    spec = jax.sharding.PartitionSpec("x")
    return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, spec))


@pytest.mark.parametrize(
    "mark", [constrained, lambda x: checkpoint_name(x, "kept")], ids=["constraint", "name"]
)
def test_marks_on_what_is_not_made(mark: Callable[[Array], Array]) -> None:
    def attend(q: Array, k: Array, v: Array) -> Array:
        s = mark(mark(q @ transposed(k)) / 4.0)
        e = mark(jnp.exp(s - mark(largest(s))))
        return mark(e / mark(summed(e))) @ v

    def divided_later(q: Array, k: Array, v: Array) -> Array:
        e = mark(exponentials(mark(q @ transposed(k) / 4.0)))
        return mark(e @ v) / mark(summed(e))

    check(attend, "plain")
    jattn.clear_fusion_log()
    check(divided_later, "plain")


@pytest.mark.parametrize("change", [jnp.nan_to_num, lambda p: jnp.where(jnp.isnan(p), 0.0, p)])
def test_0_for_queries_that_see_no_key(change: Callable[[Array], Array]) -> None:
    shown = np.random.default_rng(5).random((T, S)) < 0.6
    shown[:, 3] = True

    def attend(q: Array, k: Array, v: Array) -> Array:
        s = jnp.where(jnp.asarray(shown), q @ transposed(k) / 4.0, -jnp.inf)
        return change(jax.nn.softmax(s)) @ v

    check(attend, "mask")
    shown[5] = False
    x = operands("heads first")
    close(jattn.fuse_attention(attend)(*x), attend(*x), "float32")
    assert set(found()) == {"mask"}
    assert missed() == []


HEADS = np.arange(1.0, N + 1, dtype=np.float32)

# Scores (as many queries as keys), values and an array as large as the scores -> what is between, in the log.
BETWEEN: dict[str, tuple[Callable[[Array, Array, Array], Array], str]] = {
    "a factor for each head": (
        lambda s, v, b: jnp.einsum("bhqk,h->bhqk", jax.nn.softmax(s), HEADS) @ v,
        "dot_general",
    ),
    "heads that are mixed": (
        lambda s, v, b: jnp.einsum("bhqk,hg->bgqk", jax.nn.softmax(s), np.outer(HEADS, HEADS)) @ v,
        "dot_general",
    ),
    "a difference of two": (
        lambda s, v, b: (jax.nn.softmax(s) - 0.3 * jax.nn.softmax(transposed(s))) @ v,
        "sub",
    ),
    "more keys": (
        lambda s, v, b: jax.nn.softmax(jnp.concatenate([s, b[..., :3]], axis=-1))[..., :S] @ v,
        "slice",
    ),
    "an array": (lambda s, v, b: (jax.nn.softmax(s) * b) @ v, "mul"),
    "tanh": (lambda s, v, b: jnp.tanh(jax.nn.softmax(s)) @ v, "tanh"),
    "a square in another layout": (
        lambda s, v, b: jnp.einsum("bqhk,bhkd->bhqd", jax.nn.softmax(s).swapaxes(1, 2) ** 2, v),
        "integer_pow",
    ),
    "an array is added": (lambda s, v, b: (jax.nn.softmax(s) + b) @ v, ""),
    "another use": (
        lambda s, v, b: (jax.nn.softmax(s) * b) @ v + jax.nn.softmax(s)[..., :DV],
        "",
    ),
    "over queries": (lambda s, v, b: (jax.nn.softmax(s, axis=-2) * b) @ v, ""),
    "of no product": (lambda s, v, b: (jax.nn.softmax(b) * b) @ v + s[..., :DV], ""),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_is_between_softmax_and_values(name: str) -> None:
    function, between = BETWEEN[name]
    q, k, v = normal(B, N, S, D), normal(B, N, S, D, seed=1), normal(B, N, S, DV, seed=2)
    b = normal(B, N, S, S, seed=3)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return function(q @ transposed(k) / 4.0, v, b)

    np.testing.assert_array_equal(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v))
    assert found() == []
    reason = f"{between} between the softmax and the product with the values"
    assert missed() == ([reason] if between else [])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, y: (jax.nn.softmax(x @ w) - jax.nn.one_hot(jnp.arange(6), 5)) @ w.T,
        lambda x, w, y: jnp.einsum("te,ted->td", jax.nn.softmax(x @ w) * jnp.arange(5.0), y),
    ],
    ids=["cross entropy", "experts"],
)
def test_what_is_no_attention_is_no_miss(function: Callable[[Array, Array, Array], Array]) -> None:
    """The gradient of a cross entropy, and experts with their weights."""
    x = normal(6, D), normal(D, 5), normal(6, 5, D)
    np.testing.assert_array_equal(jattn.fuse_attention(function)(*x), function(*x))
    assert jattn.fusion_log() == ()


def test_projections_behind_attention_are_no_misses() -> None:
    """Of what attention makes, other products are made."""
    w = normal(DV, D, seed=8)

    def attend(q: Array, k: Array, v: Array) -> Array:
        out = jax.nn.softmax(q @ transposed(k) / 4.0) @ v
        return jax.nn.softmax(jnp.tanh(out @ w) * 2.0)

    x = operands("heads first")
    close(jattn.fuse_attention(attend)(*x), attend(*x), "float32")
    assert (found(), missed()) == (["plain"], [])


# Scores (as many queries as keys), values and an array as large as the scores -> not attention, or not one to replace.
NEARLY: dict[str, Callable[[Array, Array, Array], Array]] = {
    "logsumexp of other scores": lambda s, v, b: (
        jnp.exp(s - jax.nn.logsumexp(s + b, axis=-1, keepdims=True)) @ v
    ),
    "logsumexp of other rows": lambda s, v, b: (
        jnp.exp(s - jax.nn.logsumexp(s, axis=-1)[..., None, :]) @ v
    ),
    "logsumexp over queries": lambda s, v, b: (
        jnp.exp(s - jax.nn.logsumexp(s, axis=-2, keepdims=True)) @ v
    ),
    "logsumexp without a gradient": lambda s, v, b: (
        jnp.exp(s - stop(jax.nn.logsumexp(s, axis=-1, keepdims=True))) @ v
    ),
    "two shifts": lambda s, v, b: (
        jnp.exp(s - (largest(s) + jnp.log(summed(jnp.exp(s - largest(s + b)))))) @ v
    ),
    "a shift that has a gradient once": lambda s, v, b: (
        jnp.exp(s - (largest(s) + jnp.log(summed(jnp.exp(s - stop(largest(s))))))) @ v
    ),
    "twice the logarithm": lambda s, v, b: jnp.exp(s - 2 * jnp.log(summed(jnp.exp(s)))) @ v,
    "no logarithm": lambda s, v, b: jnp.exp(s - summed(jnp.exp(s))) @ v,
    "logarithms alone": lambda s, v, b: jax.nn.log_softmax(s) @ v,
    "a product with the sum": lambda s, v, b: (jnp.exp(s) * summed(jnp.exp(s))) @ v,
    "a quotient by the inverse": lambda s, v, b: (jnp.exp(s) / (1 / summed(jnp.exp(s)))) @ v,
    "the inverse of the inverse": lambda s, v, b: (
        (jnp.exp(s) * jnp.reciprocal(jnp.reciprocal(summed(jnp.exp(s))))) @ v
    ),
    "the inverse maximum": lambda s, v, b: guarded(s - 1 / largest(s)) @ v,
    "sums of other rows, later": lambda s, v, b: (
        (jnp.exp(s) @ v[..., :S]) / jnp.exp(s).sum(-1)[..., None, :]
    ),
    "sums of other heads, later": lambda s, v, b: (
        (jnp.exp(s) @ v) / summed(jnp.exp(s)).reshape(N, B, S, 1).swapaxes(0, 1)
    ),
    "sums of other exponentials, later": lambda s, v, b: (jnp.exp(s) @ v) / summed(jnp.exp(s + b)),
    "a product with the sum, later": lambda s, v, b: (jnp.exp(s) @ v) * summed(jnp.exp(s)),
    "sums over queries, later": lambda s, v, b: (jnp.exp(s) @ v) / jnp.exp(s).sum(-2)[..., None],
    "the sum without a gradient, later": lambda s, v, b: (
        (jnp.exp(s) @ v) / stop(summed(jnp.exp(s)))
    ),
    "a product of integers, later": lambda s, v, b: (
        (jnp.exp(s) @ v).astype(jnp.int32).astype(s.dtype) / summed(jnp.exp(s))
    ),
    "a sum of integers": lambda s, v, b: (
        (jnp.exp(s) / summed(jnp.exp(s)).astype(jnp.int32).astype(s.dtype)) @ v
    ),
    "the sum of everything": lambda s, v, b: (jnp.exp(s) / jnp.exp(s).sum()) @ v,
    "the sum of everything, later": lambda s, v, b: (jnp.exp(s) @ v) / jnp.exp(s).sum(),
    "logsumexp of everything": lambda s, v, b: jnp.exp(s - jax.nn.logsumexp(s)) @ v,
    "the maximum of everything": lambda s, v, b: (
        (jnp.exp(s - s.max()) / summed(jnp.exp(s - s.max()))) @ v
    ),
    "a shift that is one number": lambda s, v, b: by_parts(s, b.max()) @ v,
    "a number, later": lambda s, v, b: (jnp.exp(s) @ v) * (1 / b.max()),
    "the product has another use": lambda s, v, b: behind(jnp.exp(s), v) + jnp.exp(s) @ v,
    "a mask on the sum alone, later": lambda s, v, b: (
        (jnp.exp(s) @ v) / summed(jnp.where(b > 0, jnp.exp(s), 0))
    ),
    "a mask on the weights alone, later": lambda s, v, b: (
        (jnp.where(b > 0, jnp.exp(s), 0) @ v) / summed(jnp.exp(s))
    ),
    "a mask in front of tanh": lambda s, v, b: (
        jax.nn.softmax(jnp.tanh(jnp.where(b > 0, s, -jnp.inf))) @ v
    ),
    "a bias in front of tanh": lambda s, v, b: jax.nn.softmax(jnp.tanh(s + b)) @ v,
    "tanh of tanh": lambda s, v, b: jax.nn.softmax(jnp.tanh(jnp.tanh(s))) @ v,
    "tanh of an array": lambda s, v, b: jax.nn.softmax(b * jnp.tanh(s / b)) @ v,
    "tanh behind the softmax": lambda s, v, b: jnp.tanh(jax.nn.softmax(s)) @ v,
}


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_attention(name: str) -> None:
    q, k, v = normal(B, N, S, D), normal(B, N, S, D, seed=1), normal(B, N, S, DV, seed=2)
    if name == "sums of other rows, later":
        v = normal(B, N, S, S, seed=2)
    b = normal(B, N, S, S, seed=3).at[..., 0].set(1.0)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return NEARLY[name](q @ transposed(k) / 4.0, v, b)

    np.testing.assert_array_equal(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v))
    assert found() == []


def test_what_nobody_needs_is_no_use() -> None:
    """Probabilities that are computed and forgotten, which XLA removes too."""

    def attend(q: Array, k: Array, v: Array) -> Array:
        p = jax.nn.softmax(q @ transposed(k) / 4.0)
        jnp.sign(p).sum()
        return p @ v

    check(attend, "plain")


def test_zeros_of_both_signs_are_not_merged() -> None:
    """Equal numbers, but not the same."""

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        hidden = v > 100
        return (
            jax.nn.softmax(q @ transposed(k)) @ v,
            jnp.where(hidden, v, 0.0),
            jnp.where(hidden, v, -0.0),
        )

    x = operands("heads first")
    _, plus, minus = jattn.fuse_attention(attend)(*x)
    assert found() == ["plain"]
    assert not np.signbit(plus).any()
    assert np.signbit(minus).all()


def test_results_that_are_made_alike_are_arrays_of_their_own() -> None:
    """So each can be donated; and those that are known while tracing are arrays as all others."""

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, ...]:
        p = jax.nn.softmax(q @ transposed(k))
        key = jax.random.key(0)
        return (
            p @ v,
            q * 2,
            q * 2,
            jnp.zeros(3),
            jnp.zeros(3),
            jnp.asarray(1.0),
            key[None],
            key[None],
        )

    _, *others = jattn.fuse_attention(attend)(*operands("heads first"))
    assert found() == ["plain"]
    assert all(isinstance(x, jax.Array) for x in others)
    for one, other in (others[:2], others[2:4]):
        one.delete()
        assert not other.is_deleted()


def test_a_bias_that_is_tanh_of_a_product() -> None:
    """It is not taken for scores with a softcap."""
    x = operands("heads first")
    a, b = normal(S + 4, 3, seed=6), normal(3, S, seed=7)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.softmax(q @ transposed(k) / 4.0 + 5.0 * jnp.tanh(a @ b)) @ v

    close(jattn.fuse_attention(attend)(*x), attend(*x), "float32")
    assert found() == ["bias"]


@pytest.mark.parametrize(
    ("capped", "reason"),
    [
        (lambda s: 1e-40 * jnp.tanh(s / 1e-40), "logits_soft_cap is"),
        (lambda s: 3e38 * jnp.tanh(s / 3e38), "logits_soft_cap is"),
        (lambda s: 1e20 * jnp.tanh(1e20 * s), "scale is"),
        (lambda s: 3e38 * s, "scale is"),
        (lambda s: s + jnp.inf, "a number is added to the scores"),
        (lambda s: s - 1e5, "a number is added to the scores"),
        (lambda s: jnp.tanh(s + 1.0), "a bias in front of tanh"),
        (
            lambda s: jnp.where(triangle(), s, -1e9) / 8.0,
            "a mask in front of the scale that writes -1.25e+08",
        ),
    ],
)
def test_numbers_that_attention_does_not_take(
    capped: Callable[[Array], Array], reason: str
) -> None:
    def attend(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.softmax(capped(q @ transposed(k))) @ v

    x = operands("heads first")
    np.testing.assert_array_equal(jattn.fuse_attention(attend)(*x), attend(*x))
    assert found() == []
    assert [reason in text for text in missed()] == [True]


@pytest.mark.parametrize("widths", [(0, DV), (D, 0)], ids=str)
def test_head_dims_of_0(widths: tuple[int, int]) -> None:
    q, k, v = normal(B, 3, widths[0]), normal(B, 4, widths[0]), normal(B, 4, widths[1])

    def attend(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.softmax(q @ transposed(k)) @ v

    np.testing.assert_array_equal(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v))
    assert missed() == ["a head dim of 0"]
