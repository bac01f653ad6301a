"""``fuse_attention`` finds attention however it is written, replaces it alone, and says what it left and why.

The patterns P001 to P019 are those that other compilers look for; the rest is how JAX programs spell them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn

B, N, T, S, D, DV = 2, 4, 24, 20, 16, 12
KEEP = 0.75
Array = Any


@pytest.fixture(autouse=True)
def clean_log() -> Iterator[None]:
    jattn.clear_fusion_log()
    yield
    jattn.clear_fusion_log()


def found() -> list[str]:
    """The patterns that were replaced."""
    return [record.pattern for record in jattn.fusion_log() if not record.miss]


def missed() -> list[str]:
    """Why others were not."""
    return [record.miss for record in jattn.fusion_log() if record.miss]


def normal(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def operands(layout: str, dtype: Any = jnp.float32, batch: int = B) -> tuple[Array, Array, Array]:
    """q, k, v with heads before the length ("heads first"), behind it, or folded into the batch ("folded")."""
    arrays = [
        normal(batch, N, length, width, dtype=dtype, seed=seed)
        for seed, (length, width) in enumerate(((T, D), (S, D), (S, DV)))
    ]
    if layout == "heads last":
        arrays = [x.swapaxes(1, 2) for x in arrays]
    if layout == "folded":
        arrays = [x.reshape(batch * N, *x.shape[2:]) for x in arrays]
    return tuple(arrays)  # type: ignore[return-value]


def softmax(x: Array) -> Array:
    """As it is written by hand."""
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def dropped(p: Array, key: Array | None) -> Array:
    if key is None:
        return p
    return jnp.where(jax.random.bernoulli(key, KEEP, p.shape), p / KEEP, 0)


def multiplied(p: Array, key: Array | None) -> Array:
    return (
        p if key is None else p * (jax.random.bernoulli(key, KEEP, p.shape).astype(p.dtype) / KEEP)
    )


def transposed(x: Array) -> Array:
    return x.swapaxes(-1, -2)


Pattern = Callable[..., Array]
# Name -> layout, operations on the scores as `fusion_log` has them, function of q, k, v, two masks and a key.
PATTERNS: dict[str, tuple[str, str, Pattern]] = {
    "1 and 3": (
        "heads first",
        "plain",
        lambda q, k, v, m, c, key: dropped(jax.nn.softmax(q @ transposed(k) / 3.0), key) @ v,
    ),
    "2 and 4": (
        "heads first",
        "plain",
        lambda q, k, v, m, c, key: dropped(jax.nn.softmax(q @ transposed(k) * 0.3), key) @ v,
    ),
    "5 and 6": (
        "heads first",
        "bias",
        lambda q, k, v, m, c, key: (
            dropped(jax.nn.softmax(q @ transposed(k) / math.sqrt(D) + m), key) @ v
        ),
    ),
    "7 and 8": (
        "heads last",
        "plain",
        lambda q, k, v, m, c, key: jnp.einsum(
            "bnts,bsnd->btnd",
            dropped(
                jax.nn.softmax(
                    (jnp.einsum("btnd,bsnd->bnts", q, k) / math.sqrt(D)).astype(jnp.float32)
                ),
                key,
            ).astype(v.dtype),
            v,
        ),
    ),
    "9 and 10": (
        "heads last",
        "plain",
        lambda q, k, v, m, c, key: (
            multiplied(softmax((q / math.sqrt(D)).swapaxes(1, 2) @ k.transpose(0, 2, 3, 1)), key)
            @ v.swapaxes(1, 2)
        ),
    ),
    "11 and 12": (
        "heads last",
        "plain",
        lambda q, k, v, m, c, key: (
            dropped(softmax(q.swapaxes(1, 2) @ k.transpose(0, 2, 3, 1) / 5), key) @ v.swapaxes(1, 2)
        ),
    ),
    "13": (
        "folded",
        "plain",
        lambda q, k, v, m, c, key: jnp.einsum(
            "gts,gsd->gtd", dropped(jax.nn.softmax(jnp.einsum("gtd,gsd->gts", q, k)), key), v
        ),
    ),
    "14 and 16": (
        "heads last",
        "bias",
        lambda q, k, v, m, c, key: (
            dropped(
                jax.nn.softmax(q.swapaxes(1, 2) @ k.transpose(0, 2, 3, 1) / 4.0 + m), key
            ).astype(q.dtype)
            @ v.swapaxes(1, 2)
        ),
    ),
    "15 and 17": (
        "heads last",
        "mask",
        lambda q, k, v, m, c, key: (
            dropped(
                jax.nn.softmax(
                    jnp.where(c == 0, -jnp.inf, q.swapaxes(1, 2) @ k.transpose(0, 2, 3, 1) / 4.0)
                ),
                key,
            )
            @ v.swapaxes(1, 2)
        ),
    ),
    "18": (
        "heads last",
        "mask",
        lambda q, k, v, m, c, key: (
            dropped(
                jax.nn.softmax(
                    jnp.where(
                        c != 0,
                        q.swapaxes(1, 2)
                        @ k.transpose(0, 2, 3, 1)
                        / jnp.sqrt(float(D)).astype(q.dtype),
                        jnp.finfo(q.dtype).min,
                    )
                ),
                key,
            )
            @ v.swapaxes(1, 2)
        ),
    ),
    "19": (
        "heads first",
        "mask+bias",
        lambda q, k, v, m, c, key: (
            dropped(
                jax.nn.softmax(
                    jnp.where(c != 0, q @ transposed(k) / 4.0, jnp.finfo(q.dtype).min) + m
                ),
                key,
            )
            @ v
        ),
    ),
}


def masks(dtype: Any = jnp.float32, batch: int = B) -> tuple[Array, Array]:
    """A bias (1, N, T, S) and a mask (B, 1, 1, S) of numbers, 0 where a key is hidden."""
    shown = np.random.default_rng(3).integers(0, 3, (batch, 1, 1, S))
    shown[..., 0] = 2
    return normal(1, N, T, S, dtype=dtype, seed=9), jnp.asarray(shown, jnp.int32)


def close(a: Any, b: Any, dtype: Any) -> None:
    tolerance = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}[jnp.dtype(dtype).name]
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        u, w = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(u, w, atol=tolerance * max(1.0, np.abs(w).max()))


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
        "number": (of_scores(lambda s: s + 2.0), "a number is added to the scores"),
        "small fill": (of_scores(lambda s: jnp.where(mask, s, -5.0)), "which scores may reach"),
        "scaled bias": (of_scores(lambda s: (s + bias * 1.5) * 2.0), "a bias in front of the scale"),
        "tanh": (of_scores(jnp.tanh), "tanh between"),
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
        "scaled bias",
        "tanh",
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
}


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_attention(name: str) -> None:
    q, k, v = normal(B, N, S, D), normal(B, N, S, D, seed=1), normal(B, N, S, DV, seed=2)
    b = normal(B, N, S, S, seed=3).at[..., 0].set(1.0)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return NEARLY[name](q @ transposed(k) / 4.0, v, b)

    np.testing.assert_array_equal(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v))
    assert found() == []


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


@pytest.mark.parametrize("fill", [-jnp.inf, float(np.finfo(np.float32).min), -1e9])
def test_P109_what_a_mask_may_write(fill: float) -> None:
    q, k, v = operands("heads first")
    _, c = masks()

    def attend(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.softmax(jnp.where(c > 0, q @ transposed(k) / 4.0, fill)) @ v

    close(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v), "float32")
    assert found() == ["mask"]
    jattn.clear_fusion_log()
    jattn.fuse_attention(attend, finite_fill=False)(q, k, v)
    assert len(found()) == (fill == -jnp.inf)


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


def attend(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.softmax(q @ transposed(k) / 4.0) @ v


def self_attend(x: Array) -> Array:
    return attend(x, x, x)


def in_custom_vjp(x: Array) -> Array:
    @jax.custom_vjp
    def inner(x: Array) -> Array:
        return self_attend(x)

    inner.defvjp(lambda x: (inner(x), x), lambda x, g: (g,))
    return inner(x)


def in_shard_map(x: Array) -> Array:
    mesh = jax.make_mesh(
        (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]
    )
    spec = jax.sharding.PartitionSpec("x")
    return jax.shard_map(self_attend, mesh=mesh, in_specs=spec, out_specs=spec)(x)


INSIDE: dict[str, tuple[Callable[[Array], Array], int]] = {
    "jit": (jax.jit(self_attend), 1),
    "jit in jit": (jax.jit(lambda x: jax.jit(self_attend)(x) + 1), 1),
    "scan": (lambda x: jax.lax.scan(lambda c, _: (self_attend(c), None), x, None, length=3)[0], 1),
    "while": (
        lambda x: jax.lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, self_attend(c[1])), (0, x)
        )[1],
        1,
    ),
    "cond": (lambda x: jax.lax.cond(x[0, 0, 0, 0] > 9, lambda x: x, self_attend, x), 1),
    "checkpoint": (jax.checkpoint(self_attend), 1),
    "custom_vjp": (in_custom_vjp, 1),
    "shard_map": (in_shard_map, 1),
    "twice": (lambda x: self_attend(self_attend(x)), 2),
    "vmap": (jax.vmap(self_attend), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_P111_inside_of_other_programs(name: str) -> None:
    function, count = INSIDE[name]
    x = normal(B, N, T, D)
    fused = jattn.fuse_attention(function)
    close(fused(x), function(x), "float32")
    assert found() == ["plain"] * count
    close(jax.jit(fused)(x), function(x), "float32")
    if name not in ("while",):
        gradients = [jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (fused, function)]
        close(*gradients, "float32")


def test_transformations_of_a_fused_function() -> None:
    q, k, v = operands("heads first")
    fused = jattn.fuse_attention(attend)
    close(jax.jit(fused)(q, k, v), attend(q, k, v), "float32")
    close(jax.vmap(fused)(q, k, v), attend(q, k, v), "float32")
    close(jax.checkpoint(fused)(q, k, v), attend(q, k, v), "float32")
    tangents = (q * 0.1, k * 0.2, v)
    close(jax.jvp(fused, (q, k, v), tangents), jax.jvp(attend, (q, k, v), tangents), "float32")


def test_names_and_constants_of_the_program_stay() -> None:
    """Scopes are in the lowered program; an array that a jitted helper holds is there."""
    table = jnp.arange(float(D))
    helper = jax.jit(lambda x: x + table)

    def named(q: Array, k: Array, v: Array) -> Array:
        with jax.named_scope("around"):
            return jnp.tanh(attend(helper(q), k, v))

    q, k, v = operands("heads first")
    fused = jattn.fuse_attention(named)
    close(fused(q, k, v), named(q, k, v), "float32")
    assert "around/tanh" in jax.jit(fused).lower(q, k, v).as_text(debug_info=True)

    @jax.jit
    def outer(x: Array, q: Array) -> Array:
        inner = jax.jit(lambda q: q * x.sum())  # holds a value of the trace around it
        return jattn.fuse_attention(lambda q: attend(inner(q), k, v))(q)

    close(outer(q, q), attend(q * q.sum(), k, v), "float32")


def test_closures_and_other_arguments() -> None:
    """Arrays and tracers that are closed over; structures, names and numbers of Python as arguments."""
    q, k, v = operands("heads first")

    @jattn.fuse_attention
    def by_name(
        x: dict[str, Array], how: str, *, scale: float = 1.0, bias: Array | None = None
    ) -> Any:
        assert how == "plain"
        s = x["q"] @ transposed(k) * scale
        return {"out": jax.nn.softmax(s if bias is None else s + bias) @ v, "scale": scale}

    out = by_name({"q": q}, "plain", scale=0.25)
    close(out["out"], attend(q, k, v), "float32")
    assert out["scale"] == 0.25

    @jax.jit
    def outer(q: Array, k: Array, v: Array) -> Array:
        return jattn.fuse_attention(lambda q: attend(q, k, v))(q)

    close(outer(q, k, v), attend(q, k, v), "float32")
    assert found() == ["plain", "plain"]


@pytest.mark.parametrize("how", ["merged", "apart"])
def test_groups_of_heads(how: str) -> None:
    """Query heads that share a key/value head have an axis of their own; keys are not repeated."""
    q = normal(B, T, 2, 3, D)
    k, v = normal(B, S, 2, D, seed=1), normal(B, S, 2, DV, seed=2)

    def attend(q: Array, k: Array, v: Array) -> Array:
        scores = jnp.einsum("btkgd,bskd->bkgts" if how == "merged" else "btkgd,bskd->btkgs", q, k)
        p = jax.nn.softmax(scores / 4.0)
        return jnp.einsum("bkgts,bskd->btkgd" if how == "merged" else "btkgs,bskd->btkgd", p, v)

    fused = jattn.fuse_attention(attend)
    close(fused(q, k, v), attend(q, k, v), "float32")
    assert found() == ["plain"]
    text = str(jax.make_jaxpr(fused)(q, k, v))
    assert f"q float32 ({B}, {T}, 6, {D})   k ({B}, {S}, 2, {D})" in text


def test_one_head_and_further_axes() -> None:
    q, k, v = normal(T, D), normal(S, D, seed=1), normal(S, DV, seed=2)
    close(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v), "float32")
    many = [
        jnp.broadcast_to(x, (2, 3, N, *x.shape)) * np.arange(1, 3).reshape(2, 1, 1, 1, 1)
        for x in (q, k, v)
    ]
    close(jattn.fuse_attention(attend)(*many), attend(*many), "float32")
    assert found() == ["plain", "plain"]


TRIANGLE = np.tri(T, S, dtype=bool)
BANDS: dict[str, tuple[Callable[[], Array], str, str]] = {
    "tril": (lambda: jnp.tril(jnp.ones((T, S), bool)), "causal", "(unbounded, 0)"),
    "iota": (lambda: jnp.arange(T)[:, None] >= jnp.arange(S)[None, :], "causal", "(unbounded, 0)"),
    "iota of lax": (
        lambda: jax.lax.broadcasted_iota(jnp.int32, (T, S), 1) <= jax.lax.broadcasted_iota(jnp.int32, (T, S), 0),
        "causal",
        "(unbounded, 0)",
    ),
    "lower right": (lambda: jnp.tril(jnp.ones((T, S), bool), S - T), "causal", "(unbounded, 0, lower right)"),
    "window": (
        lambda: (jnp.arange(S)[None] <= jnp.arange(T)[:, None]) & (jnp.arange(S)[None] > jnp.arange(T)[:, None] - 5),
        "window",
        "(4, 0)",
    ),
    "both sides": (lambda: jnp.tril(jnp.ones((T, S), bool), 3), "causal", "(unbounded, 3)"),
    "of floats": (lambda: jnp.tril(jnp.ones((T, S))) != 0, "causal", "(unbounded, 0)"),
    "upper": (lambda: jnp.triu(jnp.ones((T, S), bool), -9), "mask", ""),
    "known": (lambda: TRIANGLE, "causal", "(unbounded, 0)"),
    "known window": (lambda: TRIANGLE & ~np.tri(T, S, -4, dtype=bool), "window", "(3, 0)"),
    "row 0 and others": (
        lambda: jnp.arange(T)[:, None].astype(bool).astype(jnp.int32) >= jnp.arange(S)[None, :],
        "mask",
        "",
    ),
    "known, rounded": (lambda: jnp.asarray(TRIANGLE * 1.0 + 0.5).astype(jnp.int32) != 0, "mask", ""),
    "known, none": (lambda: TRIANGLE ^ (np.arange(S) == 3), "mask", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", BANDS)
def test_P114_masks_that_are_bands(name: str) -> None:
    """They become arguments without arrays; a mask that is an array of the program stays one."""
    make, pattern, band = BANDS[name]
    q, k, v = operands("heads first")

    def attend(q: Array, k: Array, v: Array) -> Array:
        scores = jnp.where(make(), q @ transposed(k) / 4.0, -1e30)
        return jax.nn.softmax(scores) @ v

    rows = np.asarray(make()).any(-1)  # queries that see a key
    fused = jattn.fuse_attention(attend)
    close(fused(q, k, v)[:, :, rows], attend(q, k, v)[:, :, rows], "float32")
    assert found() == [pattern]
    if band:
        assert f"band {band}" in str(jax.make_jaxpr(fused)(q, k, v))


def test_P115_a_differentiated_program_is_left_as_it_is() -> None:
    q, k, v = operands("heads first")
    gradient = jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2))
    close(jattn.fuse_attention(gradient)(q, k, v), gradient(q, k, v), "float32")
    assert found() == []
    assert any("by a gradient" in text for text in missed())


def test_P117_no_array_of_all_pairs_is_left() -> None:
    x = jax.ShapeDtypeStruct((1, 2, 4096, 64), jnp.float32)

    def causal(q: Array, k: Array, v: Array) -> Array:
        s = q @ transposed(k) / 8.0
        return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((4096, 4096), bool)), s, -jnp.inf)) @ v

    def peak(function: Callable[..., Array]) -> int:
        memory = jax.jit(function).lower(x, x, x).compile().memory_analysis()
        return int(memory.temp_size_in_bytes)

    fused = jattn.fuse_attention(causal)
    assert "4096,4096" not in str(jax.make_jaxpr(fused)(x, x, x))
    assert peak(fused) < peak(causal) / 4


def test_P118_the_log() -> None:
    q, k, v = operands("heads last")
    layout, pattern, function = PATTERNS["15 and 17"]
    assert layout == "heads last"
    _, c = masks()
    jattn.fuse_attention(lambda q, k, v: function(q, k, v, None, c, None))(q, k, v)
    [record] = jattn.fusion_log()
    assert (record.pattern, record.miss) == (pattern, "")
    assert [sorted(shape) for shape in record.shapes] == [sorted(x.shape) for x in (q, k, v)]
    assert "test_fusion.py" in record.where
    jattn.clear_fusion_log()
    assert jattn.fusion_log() == ()


# ---- Modules of Flax, and blocks as models have them ----------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_P113_flax_linen(dropout: float) -> None:
    layers = [
        nn.MultiHeadDotProductAttention(
            num_heads=4, dropout_rate=dropout, deterministic=dropout == 0
        )
        for _ in range(2)
    ]
    x = normal(B, T, 32)
    mask = nn.make_causal_mask(jnp.ones((B, T)))
    variables = [layer.init(jax.random.key(i), x, x) for i, layer in enumerate(layers)]

    def model(variables: Any, x: Array) -> Array:
        for layer, own in zip(layers, variables, strict=True):
            x = x + layer.apply(own, x, x, mask=mask, rngs={"dropout": jax.random.key(5)})
        return x

    out = jattn.fuse_attention(model)(variables, x)
    assert found() == ["causal" if dropout == 0 else "causal+dropout"] * 2
    if dropout == 0:
        close(out, model(variables, x), "float32")


def test_P113_flax_nnx() -> None:
    layer = nnx.MultiHeadAttention(num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0))
    x = normal(B, T, 32)

    def model(x: Array) -> Array:
        return layer(x, mask=nnx.make_causal_mask(jnp.ones((B, T))))

    close(jattn.fuse_attention(model)(x), model(x), "float32")
    assert found() == ["causal"]


def test_P113_blocks_of_models() -> None:
    """BERT adds a mask of large numbers; DistilBERT fills by a mask of numbers; GPT-2 fills and returns k and v too."""
    x = normal(B, T, 32)
    weights = normal(3, 32, 32, seed=4) / 6
    shown = jnp.asarray(np.arange(T)[None] < np.array([[T], [9]]), jnp.int32)

    def heads(x: Array, w: Array) -> Array:
        return (x @ w).reshape(B, T, 4, 8).transpose(0, 2, 1, 3)

    def merged(x: Array) -> Array:
        return x.transpose(0, 2, 1, 3).reshape(B, T, 32)

    def bert(x: Array) -> Array:
        q, k, v = (heads(x, w) for w in weights)
        bias = (1.0 - shown[:, None, None, :]) * jnp.finfo(jnp.float32).min
        return merged(jax.nn.softmax(q @ transposed(k) / np.sqrt(8) + bias) @ v)

    def distil(x: Array) -> Array:
        q, k, v = (heads(x, w) for w in weights)
        hidden = (shown == 0).reshape(B, 1, 1, T)
        scores = (q / math.sqrt(8)) @ transposed(k)
        hidden = jnp.broadcast_to(hidden, scores.shape)
        return merged(jax.nn.softmax(jnp.where(hidden, -jnp.inf, scores)) @ v)

    def gpt2(x: Array) -> tuple[Array, Array, Array]:
        q, k, v = (heads(x, w) for w in weights)
        scores = q @ transposed(k) / jnp.full((), math.sqrt(8), q.dtype)
        causal = jnp.tril(jnp.ones((64, 64), bool))[None, None, :T, :T]
        scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
        return merged(jax.nn.softmax(scores).astype(v.dtype) @ v), k, v

    for model, pattern in ((bert, "bias"), (distil, "mask"), (gpt2, "mask")):
        jattn.clear_fusion_log()
        close(jattn.fuse_attention(model)(x), model(x), "float32")
        assert found() == [pattern]


def test_the_xla_attention_of_jax_nn() -> None:
    q, k, _ = operands("heads last")
    v = k + 1

    def attend(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")

    rows = min(T, S)
    out = jattn.fuse_attention(attend)(q, k, v)
    close(out[:, :rows], attend(q, k, v)[:, :rows], "float32")
    assert found() == ["causal"]


def test_the_backend_can_be_named() -> None:
    x = operands("heads first")
    jattn.reset_call_counters()
    jax.jit(jattn.fuse_attention(attend, implementation="xla"))(*x)
    assert jattn.call_counters() == {"xla": {"forward": 1}}
