"""``fuse_attention`` finds attention however it is written, replaces it alone, and says what it left and why."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusion_patterns import (
    DV,
    KEEP,
    PATTERNS,
    Array,
    B,
    D,
    N,
    Pattern,
    S,
    T,
    close,
    dropped,
    found,
    masks,
    missed,
    normal,
    operands,
    softmax,
    transposed,
)

import jattn

pytestmark = pytest.mark.usefixtures("clean_fusion_log")


@pytest.mark.parametrize("batch", [B, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", PATTERNS)
def test_P100_P103_patterns(name: str, dtype: str, batch: int) -> None:
    layout, pattern, function = PATTERNS[name]
    q, k, v = operands(layout, dtype, batch)
    m, c = masks(jnp.dtype(dtype), batch)

    def attend(q: Array, k: Array, v: Array, m: Array) -> Array:
        return function(q, k, v, m, c, None)

    close(jattn.fuse_attention(attend)(q, k, v, m), attend(q, k, v, m), dtype)
    assert found() == [pattern]
    assert missed() == []

    def loss(function: Pattern) -> Callable[..., Array]:
        return lambda *x: (function(*x).astype(jnp.float32) ** 2).sum()

    if dtype == "float32":
        every = tuple(range(4 if "bias" in pattern else 3))
        gradients = jax.grad(loss(jattn.fuse_attention(attend)), every)(q, k, v, m)
        close(gradients, jax.grad(loss(attend), every)(q, k, v, m), dtype)


@pytest.mark.parametrize("name", PATTERNS)
def test_P102_dropout(name: str) -> None:
    """Other weights are dropped, as often: the mean over keys is the result without. The same ones where asked for."""
    layout, pattern, function = PATTERNS[name]
    q, k, v = operands(layout)
    m, c = masks()

    def attend(key: Array) -> Array:
        return function(q, k, v, m, c, key)

    fused = jattn.fuse_attention(attend)
    one = fused(jax.random.key(1))
    assert found() == ["dropout" if pattern == "plain" else f"{pattern}+dropout"]
    np.testing.assert_array_equal(one, fused(jax.random.key(1)))
    assert (one != fused(jax.random.key(2))).any()
    many = jax.vmap(fused)(jax.random.split(jax.random.key(3), 200))
    want = np.asarray(function(q, k, v, m, c, None))
    deviation = np.asarray(many).std(0) / math.sqrt(200)
    assert (np.abs(np.asarray(many).mean(0) - want) < 6 * deviation + 1e-6).all()

    jattn.clear_fusion_log()
    key = jax.random.key(4)
    exact = jattn.fuse_attention(attend, exact_dropout=True)(key)
    np.testing.assert_array_equal(exact, attend(key))
    assert found() == []


def test_one_dropout_mask_for_all_heads() -> None:
    def attend(q: Array, k: Array, v: Array, key: Array) -> Array:
        p = jax.nn.softmax(q @ transposed(k) / 4.0)
        keep = jax.random.bernoulli(key, KEEP, (T, S))
        return (p * (keep.astype(p.dtype) / KEEP)) @ v

    q, k, v = operands("heads first")
    q, k, v = (jnp.broadcast_to(x[:1, :1], x.shape) for x in (q, k, v))
    out = jattn.fuse_attention(attend)(q, k, v, jax.random.key(0))
    assert found() == ["dropout"]
    np.testing.assert_allclose(out, jnp.broadcast_to(out[:1, :1], out.shape), rtol=1e-5, atol=1e-6)

    def for_each_entry(q: Array, k: Array, v: Array, key: Array) -> Array:
        p = jax.nn.softmax(q @ transposed(k) / 4.0)
        return jnp.where(jax.random.bernoulli(key, KEEP, (B, 1, T, S)), p / KEEP, 0) @ v

    jattn.fuse_attention(for_each_entry)(q, k, v, jax.random.key(0))
    assert missed() == ["one dropout mask for some of the axes"]


def _uniform(key: Array, shift: int) -> Array:
    bits = jax.random.bits(key, (B, N, T, S)) >> shift
    return jax.lax.bitcast_convert_type(bits | 0x3F800000, jnp.float32) - 1


# Probabilities and a key -> probabilities, not dropped as dropout is, and why.
NO_DROPOUT: dict[str, tuple[Callable[[Array, Array], Array], str]] = {
    "half of the range": (lambda p, key: p * (_uniform(key, 10) < 0.5) * 2, "not jax.random.bernoulli"),
    "as integers": (lambda p, key: p * (_uniform(key, 9).astype(jnp.int32) < 0.5) * 2, "not jax.random.bernoulli"),
    "bits as floats": (
        lambda p, key: p * ((jax.random.bits(key, p.shape) | 3).astype(p.dtype) < 0.5) * 2, "not jax.random.bernoulli"),
    "squares": (lambda p, key: p * (_uniform(key, 9) ** 2 < 0.5) * 2, "not jax.random.bernoulli"),
    "not divided": (lambda p, key: p * (_uniform(key, 9) < 0.5), "are not divided"),
    "not divided by almost 1": (
        lambda p, key: jnp.where(jax.random.bernoulli(key, 0.995, p.shape), p, 0), "are not divided"),
    "divided by almost the same": (
        lambda p, key: jnp.where(jax.random.bernoulli(key, 0.5, p.shape), p / 0.502, 0), "are not divided"),
    "hardly any": (
        lambda p, key: jnp.where(jax.random.bernoulli(key, 0.003, p.shape), p / 0.003, 0), "a dropout rate above"),
    "two masks": (lambda p, key: dropped(dropped(p, key), jax.random.fold_in(key, 1)), "there are two masks"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_DROPOUT)
def test_what_is_no_dropout(name: str) -> None:
    q, k, v = operands("heads first")
    function, reason = NO_DROPOUT[name]

    def attend(q: Array, k: Array, v: Array) -> Array:
        return function(jax.nn.softmax(q @ transposed(k) / 4.0), jax.random.key(0)) @ v

    np.testing.assert_array_equal(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v))
    assert found() == []
    assert [reason in text for text in missed()] == [True]


def test_dropout_of_16_bits_rounds_the_divisor() -> None:
    q, k, v = operands("heads first", jnp.bfloat16)
    key = jax.random.key(0)

    def attend(q: Array, k: Array, v: Array) -> Array:
        p = jax.nn.softmax(q @ transposed(k) / 4.0)
        return jnp.where(jax.random.bernoulli(key, 0.9, p.shape), p / 0.9, 0) @ v

    jattn.fuse_attention(attend)(q, k, v)
    assert found() == ["dropout"]


@pytest.mark.parametrize("use", ["returned", "multiplied", "in another attention"])
def test_a_dropout_mask_with_another_use(use: str) -> None:
    """The program relies on which weights are dropped."""
    q, k, v = operands("heads first")

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        keep = jax.random.bernoulli(jax.random.key(0), KEEP, (B, N, T, S))

        def out(q: Array) -> Array:
            return jnp.where(keep, jax.nn.softmax(q @ transposed(k) / 4.0) / KEEP, 0) @ v

        other = {"returned": lambda: keep, "multiplied": lambda: keep @ v}
        return out(q), other.get(use, lambda: out(q[..., ::-1]))()

    for ours, theirs in zip(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert found() == []
    assert set(missed()) == {"the random numbers of dropout are used elsewhere too"}


def test_P104_a_float32_bias_of_16_bit_operands() -> None:
    q, k, v = operands("heads first", jnp.bfloat16)
    m, _ = masks()

    def attend(q: Array, k: Array, v: Array, m: Array) -> Array:
        scores = (q @ transposed(k) / 4.0).astype(jnp.float32) + m
        return jax.nn.softmax(scores).astype(v.dtype) @ v

    close(jattn.fuse_attention(attend)(q, k, v, m), attend(q, k, v, m), "bfloat16")
    assert found() == ["bias"]


@pytest.mark.parametrize(
    "scale", [2, 0.25, np.float32(0.25), jnp.float32(-0.5), "sqrt of the width"], ids=str
)
def test_P105_scales_that_are_known(scale: Any) -> None:
    q, k, v = operands("heads first")

    def attend(q: Array, k: Array, v: Array) -> Array:
        factor = 1 / jnp.sqrt(q.shape[-1]) if isinstance(scale, str) else scale
        return jax.nn.softmax(jnp.einsum("bnqd,bnkd->bnqk", q, k) * factor, axis=-1) @ v

    close(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v), "float32")
    assert found() == ["plain"]


def test_P105_a_scale_that_is_an_argument() -> None:
    q, k, v = operands("heads first")

    def attend(q: Array, k: Array, v: Array, scale: Array) -> Array:
        return jax.nn.softmax(q @ transposed(k) * scale) @ v

    x = (q, k, v, jnp.float32(0.3))
    np.testing.assert_array_equal(jattn.fuse_attention(attend)(*x), attend(*x))
    assert missed() == ["a scale that is an array"]
    of_python = jattn.fuse_attention(attend)(q, k, v, 0.3)
    close(of_python, attend(q, k, v, 0.3), "float32")
    assert found() == ["plain"]


def test_complex_numbers_are_left_as_they_are() -> None:
    def rotated(x: Array) -> Array:
        turned = jax.lax.complex(x, x) * jnp.exp(1j * jnp.arange(x.shape[-1]))
        return turned.real + (turned * np.complex64(1j)).imag

    def attend(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.softmax(rotated(q) @ transposed(rotated(k)) / 4.0) @ v

    q, k, v = operands("heads first")
    close(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v), "float32")
    assert found() == ["plain"]
    np.testing.assert_array_equal(jattn.fuse_attention(rotated)(q), rotated(q))

    def spectrum(x: Array) -> Array:  # JAX makes a complex number of what it divides by
        return (jnp.fft.fft(x) / jnp.sqrt(jnp.float32(x.shape[-1]))).real

    np.testing.assert_array_equal(jattn.fuse_attention(spectrum)(q), spectrum(q))


@pytest.mark.parametrize("symbolic", ["batch", "lengths"])
def test_exported_with_symbolic_extents(symbolic: str) -> None:
    """A mask and a bias of the batch, a causal mask, and dropout."""

    def masked(q: Array, k: Array, v: Array, m: Array) -> Array:
        s = jnp.where(m, q @ transposed(k) / 4.0, -jnp.inf)
        return jax.nn.softmax(s + 0.1 * m) @ v

    def causal(q: Array, k: Array, v: Array, m: Array) -> Array:
        visible = jnp.tril(jnp.ones((q.shape[-2], k.shape[-2]), bool))
        return jax.nn.softmax(jnp.where(visible, q @ transposed(k) / 4.0, -jnp.inf)) @ v

    def dropping(q: Array, k: Array, v: Array, m: Array) -> Array:
        return dropped(jax.nn.softmax(q @ transposed(k) / 4.0), jax.random.key(3)) @ v

    arrays = (*operands("heads first"), jnp.ones((B, 1, 1, S), bool).at[0, 0, 0, 3].set(False))
    sizes = "b, {}, {}" if symbolic == "batch" else "b, t, s"
    b, t, s = jax.export.symbolic_shape(sizes.format(T, S))
    names = {"batch": {B: b}, "lengths": {B: b, T: t, S: s}}[symbolic]
    assert len({B, N, T, S, D, DV}) == 6
    shapes = [
        jax.ShapeDtypeStruct(tuple(names.get(n, n) for n in x.shape), x.dtype) for x in arrays
    ]
    disabled = jattn.export_disabled_checks()
    for function, pattern in ((masked, "mask+bias"), (causal, "causal"), (dropping, "dropout")):
        jattn.clear_fusion_log()
        backend = None if symbolic == "batch" else "reference"
        fused = jax.jit(jattn.fuse_attention(function, implementation=backend))
        exported = jax.export.export(fused, disabled_checks=disabled)(*shapes)
        assert (found(), missed()) == ([pattern], [])
        want = fused if pattern == "dropout" else function  # which draws other bits
        close(exported.call(*arrays), want(*arrays), "float32")


def test_a_number_known_at_run_time_is_a_bias() -> None:
    def loss(q: Array, k: Array, v: Array, b: Array) -> Array:
        return (jax.nn.softmax(q @ transposed(k) / 4.0 + b) @ v).var()

    arrays = (*operands("heads first"), jnp.float32(1.5))
    places = (0, 1, 2, 3)
    got = jax.value_and_grad(jattn.fuse_attention(loss), places)(*arrays)
    assert found() == ["bias"]
    for ours, theirs in zip(
        jax.tree.leaves(got),
        jax.tree.leaves(jax.value_and_grad(loss, places)(*arrays)),
        strict=True,
    ):
        close(ours, theirs, "float32")


def test_P106_probabilities_with_another_use() -> None:
    q, k, v = operands("heads first")

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        p = jax.nn.softmax(q @ transposed(k) / 4.0)
        return p @ v, p.max(-1)

    close(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v), "float32")
    assert found() == []
    assert "used elsewhere" in missed()[0]


def not_attention(name: str) -> tuple[Callable[..., Array], str]:
    def of_scores(change: Callable[[Array], Array]) -> Callable[..., Array]:
        return lambda q, k, v: jax.nn.softmax(change(q @ transposed(k) / 4.0)) @ v

    mask = jnp.asarray(np.random.default_rng(0).random((T, S)) < 0.5)
    bias = jnp.asarray(np.arange(T * S).reshape(T, S) % 3)
    return {
        "integers": (of_scores(lambda s: s + bias), "a bias of int32"),
        "number": (of_scores(lambda s: s + 1e6), "a number is added to the scores that rounds"),
        "small fill": (of_scores(lambda s: jnp.where(mask, s, -5.0)), "which scores may reach"),
        "sine": (of_scores(jnp.sin), "sin between"),
        "other types": (
            lambda q, k, v: jax.nn.softmax(
                (q.astype(jnp.bfloat16) @ transposed(k).astype(jnp.bfloat16)).astype(jnp.float32)
            )
            @ v,
            "query, key and value of bfloat16, float32",
        ),
        "factor": (
            lambda q, k, v: (jax.nn.softmax(q @ transposed(k)) * 2.0) @ v,
            "probabilities are multiplied by a number",
        ),
        "over queries": (lambda q, k, v: jax.nn.softmax(q @ transposed(k), axis=-2) @ v, ""),
        "no softmax": (lambda q, k, v: jnp.exp(q @ transposed(k) / 9.0) @ v, ""),
    }[name]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "integers",
        "number",
        "small fill",
        "sine",
        "other types",
        "factor",
        "over queries",
        "no softmax",
    ],
)
def test_P107_P108_P109_what_is_left_as_it_is(name: str) -> None:
    function, reason = not_attention(name)
    x = operands("heads first")
    np.testing.assert_array_equal(jattn.fuse_attention(function)(*x), function(*x))
    assert found() == []
    assert [reason in text for text in missed()] == ([True] if reason else [])
    ours, theirs = (str(jax.make_jaxpr(f)(*x)) for f in (jattn.fuse_attention(function), function))
    assert ours == theirs  # P116


def quotient(e: Array, top: Any, bottom: Any) -> Array:
    """Exponentials that masks leave some out of, over the sum of such."""
    return jnp.where(top, e, 0) / jnp.where(bottom, e, 0).sum(-1, keepdims=True)


def softmax_less(s: Array, largest: Array) -> Array:
    """Not a softmax where ``largest`` has a gradient."""
    e = jnp.exp(s - largest)
    return e / e.sum(-1, keepdims=True)


# Nearly attention, with as many queries as keys, so that shapes do not tell.
NEARLY: dict[str, Callable[[Array, Array, Array], Array]] = {
    "sums of other rows": lambda s, v, b: (jnp.exp(s) / jnp.exp(s).sum(-1)[..., None, :]) @ v,
    "sums of other exponentials": lambda s, v, b: (
        (jnp.exp(s) / jnp.exp(s + b).sum(-1, keepdims=True)) @ v
    ),
    "maxima of other rows": lambda s, v, b: (
        (
            jnp.exp(s - s.max(-1)[..., None, :])
            / jnp.exp(s - s.max(-1)[..., None, :]).sum(-1, keepdims=True)
        )
        @ v
    ),
    "over queries": lambda s, v, b: jax.nn.softmax(s, axis=-2) @ v,
    "a mask, and a negative scale": lambda s, v, b: (
        jax.nn.softmax(jnp.where(b > 0, s, -jnp.inf) * -1.0) @ v
    ),
    "finite fill, scaled": lambda s, v, b: jax.nn.softmax(jnp.where(b > 0, s, -1e9) * 1e-9) @ v,
    "one row for all": lambda s, v, b: jax.nn.softmax(s[:, :, :1] + b) @ v,
    "rounded to integers": lambda s, v, b: jax.nn.softmax(s.astype(jnp.int32).astype(s.dtype)) @ v,
    "weights of integers": lambda s, v, b: (
        jax.nn.softmax(s * 9).astype(jnp.int32).astype(s.dtype) @ v
    ),
    "NaN where hidden": lambda s, v, b: jnp.nan_to_num(
        jax.nn.softmax(jnp.where(b > 0, s, jnp.nan)) @ v
    ),
    "two products": lambda s, v, b: jax.nn.softmax(s + s.swapaxes(-1, -2)) @ v,
    "another mask on the weights": lambda s, v, b: (
        jnp.where(b > 0.5, jax.nn.softmax(jnp.where(b > 0, s, -jnp.inf)), 0) @ v
    ),
    "weights of the hidden": lambda s, v, b: (
        jnp.where(b > 0, 0, jax.nn.softmax(jnp.where(b > 0, s, -1e9))) @ v
    ),
    "a mask on the sum alone": lambda s, v, b: quotient(jnp.exp(s), True, b > 0) @ v,
    "a mask on the weights alone": lambda s, v, b: quotient(jnp.exp(s), b > 0, True) @ v,
    "other masks on the sum and on the weights": lambda s, v, b: (
        quotient(jnp.exp(jnp.where(b > 0, s, -jnp.inf)), b > 0.5, b > 0) @ v
    ),
    "the maximum of other scores": lambda s, v, b: (
        softmax_less(
            jnp.where(b > 0, s, -jnp.inf),
            jnp.where(b > 0.5, s, -jnp.inf).max(-1, keepdims=True),
        )
        @ v
    ),
}


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_attention(name: str) -> None:
    q, k, v = normal(B, N, S, D), normal(B, N, S, D, seed=1), normal(B, N, S, DV, seed=2)
    b = normal(B, N, S, S, seed=3).at[..., 0].set(1.0)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return NEARLY[name](q @ transposed(k) / 4.0, v, b)

    np.testing.assert_array_equal(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v))
    assert found() == []


def masked_exponentials(s: Array, m: Array) -> Array:
    e = jnp.where(m, jnp.exp(s - s.max(-1, keepdims=True)), 0)
    return e / e.sum(-1, keepdims=True)


# What is hidden gets no weight, also in a row that sees no key: the scores, the mask -> the probabilities.
ZEROED: dict[str, Callable[[Array, Array], Array]] = {
    "softmax of jax.nn": lambda s, m: jax.nn.softmax(s, where=m),
    "after -inf": lambda s, m: jnp.where(m, jax.nn.softmax(jnp.where(m, s, -jnp.inf)), 0),
    "after a finite fill": lambda s, m: jnp.where(m, softmax(jnp.where(m, s, -1e9)), 0),
    "the contrary": lambda s, m: jnp.where(~m, 0, softmax(jnp.where(m, s, -1e9))),
    "both contrary": lambda s, m: jnp.where(~m, 0, softmax(jnp.where(~m, -1e9, s))),
    "multiplied": lambda s, m: softmax(jnp.where(m, s, -1e9)) * m.astype(s.dtype),
    "exponentials": masked_exponentials,
}


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("name", ZEROED)
def test_masks_on_scores_and_probabilities(name: str, drops: bool) -> None:
    arrays = operands("heads first")
    shown = np.random.default_rng(5).random((B, 1, T, S)) < 0.6
    shown[..., 3] = True
    key = jax.random.key(4) if drops else None

    def attend(m: Array) -> Callable[..., Array]:
        return lambda q, k, v: dropped(ZEROED[name](q @ transposed(k) / 4.0, m), key) @ v

    def gradients(function: Callable[..., Array]) -> Any:
        return jax.grad(lambda *x: (function(*x) ** 2).sum(), (0, 1, 2))(*arrays)

    function = attend(jnp.asarray(shown))
    fused = jattn.fuse_attention(function)
    assert "dot_general" not in str(jax.make_jaxpr(fused)(*arrays))
    assert found() == ["mask+dropout" if drops else "mask"]
    if not drops:  # other pairs are dropped
        close(fused(*arrays), function(*arrays), "float32")
        close(gradients(fused), gradients(function), "float32")
    if name != "exponentials":  # NaN
        shown[0, 0, 5] = False
        out = jattn.fuse_attention(attend(jnp.asarray(shown)))(*arrays)
        assert (out[0, :, 5] == 0).all()
        if not drops:
            close(out, attend(jnp.asarray(shown))(*arrays), "float32")


@pytest.mark.parametrize("lengths", [(1, S), (T, 1), (1, 1)], ids=str)
def test_lengths_of_one(lengths: tuple[int, int]) -> None:
    q, k = normal(B, N, lengths[0], D), normal(B, N, lengths[1], D, seed=1)
    v = normal(B, N, lengths[1], DV, seed=2)
    bias = normal(1, N, *lengths, seed=5)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return softmax(q @ transposed(k) / 4.0 + bias) @ v

    close(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v), "float32")
    assert found() == ["bias"]


def test_softmax_without_a_maximum() -> None:
    q, k, v = operands("heads first")

    def attend(q: Array, k: Array, v: Array) -> Array:
        e = jnp.exp(q @ transposed(k) / 9.0)
        return (e / e.sum(-1, keepdims=True)) @ v

    close(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v), "float32")
    assert found() == ["plain"]


def test_kernels_are_not_looked_into() -> None:
    """The program of a Pallas kernel is not one of the user's, though it has a softmax between two products."""
    from jax.experimental import pallas as pl

    q, k, v = normal(16, 16), normal(16, 16, seed=1), normal(16, 16, seed=2)

    def kernel(q: Any, k: Any, v: Any, out: Any) -> None:
        out[...] = jax.nn.softmax(q[...] @ k[...].T) @ v[...]

    def attend(q: Array, k: Array, v: Array) -> Array:
        shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(q, k, v)

    np.testing.assert_array_equal(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v))
    assert jattn.fusion_log() == ()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fill", [-jnp.inf, float(np.finfo(np.float32).min), -1e9])
def test_P109_what_a_mask_may_write(fill: float, dtype: str) -> None:
    """In bfloat16 -1e9 is a little more than that."""
    q, k, v = operands("heads first", dtype)
    _, c = masks()

    def attend(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.softmax(jnp.where(c > 0, q @ transposed(k) / 4.0, fill)) @ v

    close(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v), dtype)
    assert found() == ["mask"]
    jattn.clear_fusion_log()
    jattn.fuse_attention(attend, finite_fill=False)(q, k, v)
    assert len(found()) == (jnp.asarray(fill, dtype) == -jnp.inf)


def test_P110_patterns_can_be_disabled() -> None:
    q, k, v = operands("heads first")
    m, c = masks()
    layout, _, function = PATTERNS["19"]
    assert layout == "heads first"
    for disable, count in ((("mask+bias",), 0), ("bias", 0), (("plain", "dropout"), 1)):
        jattn.clear_fusion_log()
        jattn.fuse_attention(lambda *x: function(*x, None), disable=disable)(q, k, v, m, c)
        assert len(found()) == count
        assert missed() == ["disabled"] * (1 - count)
    with pytest.raises(ValueError, match="'rope'"):
        jattn.fuse_attention(function, disable="rope")
    with pytest.raises(TypeError, match="must be callable"):
        jattn.fuse_attention(3)
    for disable in (3, None):
        with pytest.raises(ValueError, match=f"disable is {disable}, must be a pattern or a coll"):
            jattn.fuse_attention(function, disable=disable)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="disable has 3, must be made of"):
        jattn.fuse_attention(function, disable=("mask", 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["finite_fill", "exact_dropout"])
def test_flags_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"fuse_attention: {name} is 'no', must be True or False"):
        jattn.fuse_attention(lambda x: x, **{name: "no"})


# Where gradients stop -> how probabilities are made of scores; in the first three of them that changes no gradient.
STOPS: dict[str, Callable[[Array], Array]] = {
    "maximum": lambda s: _quotient(jnp.exp(s - jax.lax.stop_gradient(s.max(-1, keepdims=True)))),
    "what the maximum is of": lambda s: _quotient(jnp.exp(s - jax.lax.stop_gradient(s).max(-1, keepdims=True))),
    "nothing": lambda s: _quotient(jnp.exp(s - s.max(-1, keepdims=True))),
    "sum": lambda s: _quotient(jnp.exp(s), of_sum=jax.lax.stop_gradient),
    "what is summed": lambda s: _quotient(jnp.exp(s), of_summed=jax.lax.stop_gradient),
    "exponentials": lambda s: _quotient(jnp.exp(s), of_top=jax.lax.stop_gradient),
    "probabilities": lambda s: jax.lax.stop_gradient(jax.nn.softmax(s)),
    "probabilities that are dropped": lambda s: dropped(jax.lax.stop_gradient(jax.nn.softmax(s)), jax.random.key(0)),
    "scores": lambda s: jax.nn.softmax(jax.lax.stop_gradient(s)),
    "scores in the sum": lambda s: jnp.exp(s) / jnp.exp(jax.lax.stop_gradient(s)).sum(-1, keepdims=True),
}  # fmt: skip


def _same(x: Array) -> Array:
    return x


def _quotient(
    e: Array,
    of_top: Callable[[Array], Array] = _same,
    of_sum: Callable[[Array], Array] = _same,
    of_summed: Callable[[Array], Array] = _same,
) -> Array:
    return of_top(e) / of_sum(of_summed(e).sum(-1, keepdims=True))


@pytest.mark.parametrize("name", STOPS)
def test_where_gradients_stop(name: str) -> None:
    """On the maximum that changes no gradient; elsewhere it does, and the program stays as it is."""
    x = (*operands("heads first"), normal(1, N, T, S, seed=5))

    def attend(q: Array, k: Array, v: Array, bias: Array) -> Array:
        return STOPS[name](q @ transposed(k) / 4.0 + bias) @ v

    gradients = [
        jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2, 3))(*x)
        for f in (attend, jattn.fuse_attention(attend))
    ]
    close(*gradients, "float32")
    is_softmax = name in ("maximum", "what the maximum is of", "nothing")
    assert found() == ["bias"] * is_softmax
    # That the exponentials differ is all that is known where scores are stopped in one of them.
    reasons = missed() if name != "scores in the sum" else ["stop_gradient"]
    assert ["stop_gradient" in text for text in reasons] == [True] * (not is_softmax)


def test_stopped_operands() -> None:
    """Gradients of what the pattern reads stop there, fused or not."""
    q, k, v = operands("heads first")
    bias = normal(1, N, T, S, seed=5)
    stop = jax.lax.stop_gradient

    def attend(q: Array, k: Array, v: Array, bias: Array) -> Array:
        scale = stop(jnp.float32(0.3))
        return jax.nn.softmax(stop(q) @ transposed(k) * scale + stop(bias)) @ stop(v)

    x = (q, k, v, bias)
    gradients = [
        jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2, 3))(*x)
        for f in (attend, jattn.fuse_attention(attend))
    ]
    close(*gradients, "float32")
    assert found() == ["bias"]
