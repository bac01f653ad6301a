"""``fuse_attention`` in whole programs: loops, transformations, closures, bands, modules of Flax, blocks of models."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from fusion_patterns import (
    DV,
    KEEP,
    PATTERNS,
    Array,
    B,
    D,
    N,
    S,
    T,
    attend,
    close,
    found,
    masks,
    missed,
    normal,
    operands,
    transposed,
)

import jattn

pytestmark = pytest.mark.usefixtures("clean_fusion_log")


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


CALLS: dict[str, Callable[[Callable[[Array], Array]], Callable[[Array], Array]]] = {
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x: jax.lax.cond(x[0, 0, 0, 0] < 99, f, lambda x: x, x),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "checkpoint in a scan": lambda f: CALLS["scan"](jax.checkpoint(f)),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_known_outside_of_a_program(name: str) -> None:
    """A scale, what a mask writes, and a mask that is an array."""
    visible = jnp.asarray(np.tri(T, dtype=bool))

    def function(x: Array) -> Array:
        scale, fill = 1 / jnp.sqrt(jnp.float32(D)), -jnp.float32(1e30)

        def inner(x: Array) -> Array:
            s = jnp.where(visible, x @ transposed(x) * scale, fill)
            return jax.nn.softmax(s) @ x

        return CALLS[name](inner)(x)

    x = normal(B, N, T, D)
    fused = jattn.fuse_attention(function)
    close(fused(x), function(x), "float32")
    assert (found(), missed()) == (["causal"], [])
    gradients = [jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (fused, function)]
    close(*gradients, "float32")


def test_what_changes_from_step_to_step_is_not_known() -> None:
    x = normal(B, N, T, D)

    def function(x: Array) -> Array:
        def step(state: tuple[Array, Array], _: Any) -> tuple[tuple[Array, Array], None]:
            x, scale = state
            return (jax.nn.softmax(x @ transposed(x) * scale) @ x, scale * 2), None

        return jax.lax.scan(step, (x, jnp.float32(0.25)), None, length=2)[0][0]

    np.testing.assert_array_equal(jattn.fuse_attention(function)(x), function(x))
    assert missed() == ["a scale that is an array"]


@pytest.mark.parametrize("name", ["checkpoint", "cond", "scan"])
def test_programs_inside_of_a_shard_map_are_left(name: str) -> None:
    inner, _ = INSIDE[name]
    mesh = jax.make_mesh(
        (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1]
    )
    spec = jax.sharding.PartitionSpec("x")

    def function(x: Array) -> Array:
        return jax.shard_map(inner, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    x = normal(B, N, T, D)
    np.testing.assert_array_equal(jattn.fuse_attention(function)(x), function(x))
    assert found() == []
    assert ["inside of a shard_map" in text for text in missed()] == [True]


def test_layers_with_masks_biases_and_dropout_in_a_scan() -> None:
    """The body of a loop takes no constants: nothing of what takes attention's place may need one."""
    q, k, v = operands("heads first")
    v = k + 1
    bias = normal(3, N, T, S, seed=7)
    shown = np.tri(T, S, dtype=bool) ^ (np.arange(S) == 3)

    def layers(x: Array, key: Array) -> Array:
        def layer(x: Array, step: Any) -> tuple[Array, None]:
            own, key = step
            s = jnp.where(shown, x @ transposed(k) / 4.0 + own, -1e30)
            p = jax.nn.softmax(s)
            keep = jax.random.bernoulli(key, KEEP, p.shape)
            return jnp.where(keep, p / KEEP, 0) @ v, None

        return jax.lax.scan(layer, x, (bias, jax.random.split(key, 3)))[0]

    fused = jattn.fuse_attention(layers)
    out = fused(q, jax.random.key(0))
    assert (found(), missed()) == (["mask+bias+dropout"], [])
    assert np.isfinite(np.asarray(out)).all()
    gradient = jax.grad(lambda x: (fused(x, jax.random.key(0)) ** 2).sum())(q)
    assert np.isfinite(np.asarray(gradient)).all()


def test_long_programs() -> None:
    """Thousands of operations in a row, and numbers that are made of themselves again and again."""
    q, k, v = operands("heads first")

    def long(q: Array, k: Array, v: Array) -> Array:
        scale = jnp.float32(1.0)
        for _ in range(100):
            scale = (scale + scale) / 2.0
        for _ in range(2000):
            q = q + 0.001 * k[:, :, :1]
        return attend(q * scale, k, v)

    close(jattn.fuse_attention(long)(q, k, v), long(q, k, v), "float32")
    assert found() == ["plain"]


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
BUFFER = np.tri(64, 64, dtype=bool)
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
    "upper": (lambda: jnp.triu(jnp.ones((T, S), bool), -9), "window", "(9, unbounded)"),
    "not upper": (lambda: ~jnp.triu(jnp.ones((T, S), bool), 1), "causal", "(unbounded, 0)"),
    "upper is 0": (lambda: jnp.triu(jnp.ones((T, S)), 1) == 0, "causal", "(unbounded, 0)"),
    "a part of one": (lambda: jnp.tril(jnp.ones((64, 64), bool))[:T, :S], "causal", "(unbounded, 0)"),
    "a part from the middle": (
        lambda: jnp.tril(jnp.ones((64, 64), bool))[5 : T + 5, 2 : S + 2],
        "causal",
        "(unbounded, 3)",
    ),
    "a known part": (lambda: jax.jit(lambda x: x[:T, :S])(BUFFER), "causal", "(unbounded, 0)"),
    "every other row": (lambda: jnp.tril(jnp.ones((64, 64), bool))[: 2 * T : 2, :S], "mask", ""),
    "two that hide": (
        lambda: ~((jnp.arange(S)[None] > jnp.arange(T)[:, None]) & (jnp.arange(S)[None] > 1)),
        "mask",
        "",
    ),
    "known": (lambda: TRIANGLE, "causal", "(unbounded, 0)"),
    "known window": (lambda: TRIANGLE & ~np.tri(T, S, -4, dtype=bool), "window", "(3, 0)"),
    "one row for all": (
        lambda: jnp.broadcast_to(jnp.arange(1)[:, None] >= jnp.arange(S)[None, :], (T, S)),
        "mask",
        "",
    ),
    "one number of rows for all": (
        lambda: jnp.broadcast_to(jnp.arange(1)[:, None], (T, S)) >= jnp.arange(S)[None, :],
        "mask",
        "",
    ),
    "one row of several for all": (
        lambda: jnp.broadcast_to(jnp.arange(T)[3:4, None], (T, S)) >= jnp.arange(S)[None, :],
        "mask",
        "",
    ),
    "one row of a larger one for all": (
        lambda: jnp.where(jnp.broadcast_to(jnp.tril(jnp.ones((T, S), bool))[3:4], (T, S)), TRIANGLE, False),
        "mask",
        "",
    ),
    "counted from a row": (
        lambda: jnp.arange(T)[:, None] + jax.lax.slice(jnp.arange(T), (3,), (4,)) >= jnp.arange(S)[None, :],
        "causal",
        "(unbounded, 3)",
    ),
    "one known row for all": (lambda: TRIANGLE[:1], "mask", ""),
    "one known column for all": (lambda: TRIANGLE[:, 3:4], "mask", ""),
    "row 0 and others": (
        lambda: jnp.arange(T)[:, None].astype(bool).astype(jnp.int32) >= jnp.arange(S)[None, :],
        "mask",
        "",
    ),
    "known, rounded": (lambda: jnp.asarray(TRIANGLE * 1.0 + 0.5).astype(jnp.int32) != 0, "causal", "(unbounded, 0)"),
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

    rows = np.broadcast_to(make(), (T, S)).any(-1)  # queries that see a key
    fused = jattn.fuse_attention(attend)
    close(fused(q, k, v)[:, :, rows], attend(q, k, v)[:, :, rows], "float32")
    assert found() == [pattern]
    if band:
        assert f"band {band}" in str(jax.make_jaxpr(fused)(q, k, v))


def _rows(dtype: Any, axis: int = 0) -> Array:
    return jax.lax.broadcasted_iota(dtype, (300, 300), axis)


def _is_causal(dtype: Any, plus: Any = 0) -> Array:
    plus = jnp.asarray(plus, dtype)
    return _rows(dtype) + plus >= _rows(dtype, 1) + plus


# Comparisons of row and column numbers that are no bands, for their types do not hold those, or differences of them.
NO_BANDS: dict[str, Callable[[], Array]] = {
    "int8": lambda: _is_causal(jnp.int8),
    "uint8": lambda: _is_causal(jnp.uint8),
    "bfloat16": lambda: _is_causal(jnp.bfloat16),
    "integers that wrap": lambda: _is_causal(jnp.int32, 2**31 - 10),
    "floats that are rounded": lambda: _is_causal(jnp.float32, 2.0**30),
    "floats of large integers": lambda: (
        (_rows(jnp.int32) + 2**29).astype(jnp.float32) >= (_rows(jnp.int32, 1) + 2**29).astype(jnp.float32)
    ),
    "unsigned difference": lambda: _rows(jnp.uint32) - _rows(jnp.uint32, 1) < 5,
    "difference as unsigned": lambda: (_rows(jnp.int32) - _rows(jnp.int32, 1)).astype(jnp.uint32) < 5,
    "infinity": lambda: (_rows(jnp.float32) < jnp.inf) & _is_causal(jnp.int8),
    "NaN": lambda: ~((_rows(jnp.float32) < jnp.nan) & _is_causal(jnp.float32)),
    "another bit": lambda: ((_is_causal(jnp.int32) * 1) & 2) == 0,
    "one bit of another": lambda: (_is_causal(jnp.int32).astype(jnp.int32) & 2) != 0,
    "infinity as an integer": lambda: jnp.where(_is_causal(jnp.int32), jnp.inf, 0.0).astype(jnp.int32) > 0,
    "a half as an integer": lambda: jnp.where(_is_causal(jnp.int32), 0.5, 0.0).astype(jnp.int32) != 0,
}  # fmt: skip


@pytest.mark.parametrize("name", NO_BANDS)
def test_comparisons_that_are_no_bands(name: str) -> None:
    """They are masks, whatever the comparison would be of numbers without end."""
    q, k, v = normal(300, 8), normal(300, 8, seed=1), normal(300, 8, seed=2)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.softmax(jnp.where(NO_BANDS[name](), q @ k.T / 4.0, -1e30)) @ v

    rows = np.asarray(NO_BANDS[name]()).any(-1)[
        :, None
    ]  # others are 0 in one, and a mean in the other
    close(jattn.fuse_attention(attend)(q, k, v) * rows, attend(q, k, v) * rows, "float32")
    assert found() == ["mask"]


def test_a_window_without_end() -> None:
    q, k, v = normal(300, 8), normal(300, 8, seed=1), normal(300, 8, seed=2)

    def attend(q: Array, k: Array, v: Array, window: int = 2**31 - 1) -> Array:
        i, j = _rows(jnp.int32), _rows(jnp.int32, 1)
        return jax.nn.softmax(jnp.where((i >= j) & (i - j < window), q @ k.T / 4.0, -1e30)) @ v

    close(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v), "float32")
    assert found() == ["window"]


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
    assert "fusion_patterns.py" in record.where
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


@pytest.mark.parametrize("pattern", ["causal", "plain"])
def test_P113_flax_nnx(pattern: str) -> None:
    layer = nnx.MultiHeadAttention(num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0))
    x = normal(B, T, 32)

    def model(x: Array) -> Array:
        mask = nnx.make_causal_mask(jnp.ones((B, T))) if pattern == "causal" else None
        return layer(x, mask=mask)

    close(jattn.fuse_attention(model)(x), model(x), "float32")
    assert found() == [pattern]


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

    for model, pattern in ((bert, "mask"), (distil, "mask"), (gpt2, "causal")):
        jattn.clear_fusion_log()
        close(jattn.fuse_attention(model)(x), model(x), "float32")
        assert found() == [pattern]


@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids="kv_heads{}".format)
@pytest.mark.parametrize("pattern", ["causal", "plain"])
def test_the_xla_attention_of_jax_nn(pattern: str, kv_heads: int) -> None:
    """It takes the maximum of the scores in one layout, and takes it off in another."""
    q, k, _ = operands("heads last")
    k = k[:, :, :kv_heads]
    v = k + 1

    def attend(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=pattern == "causal", implementation="xla"
        )

    rows = min(T, S)
    out = jattn.fuse_attention(attend)(q, k, v)
    close(out[:, :rows], attend(q, k, v)[:, :rows], "float32")
    assert found() == [pattern]


def causal_beside_padding(how: str) -> Callable[[Array, Array], Array]:
    """What is added to scores, or they as they are with -inf: of rows (T, T), and padding (B, T) that is not 0 or 1."""
    ones = jnp.ones((1, 1, 64, 64), bool)

    def both(padding: Array) -> Array:
        causal = jnp.broadcast_to(jnp.tril(ones)[:, :, :T, :T], (B, 1, T, T))
        return (padding[:, None, None] != 0) & causal

    def added(s: Array, padding: Array) -> Array:
        mask = both(padding).astype(jnp.float32)
        lowest = jnp.full(mask.shape, jnp.finfo(s.dtype).min)
        return s + jax.lax.select(mask > 0, jnp.zeros_like(lowest), lowest)

    def taken_off(s: Array, padding: Array) -> Array:
        return (s - jnp.where(both(padding), 0, 1e10)) * 0.5 * 2

    def hidden(s: Array, padding: Array) -> Array:
        upper = jnp.triu(jnp.ones((T, T), bool), 1)
        return jnp.where(upper | (padding[:, None, None] == 0), -jnp.inf, s)

    def with_a_bias(s: Array, padding: Array) -> Array:
        return s + (normal(1, T, T, seed=9) + jnp.where(both(padding), 0, -jnp.inf))

    choices = added, taken_off, hidden, with_a_bias
    return next(f for f in choices if f.__name__ == how)


@pytest.mark.parametrize("how", ["added", "taken_off", "hidden", "with_a_bias"])
def test_a_band_beside_another_mask(how: str) -> None:
    """What is left of the mask is one row of keys for each batch entry."""
    q, k, v = (normal(B, 3, T, 8, seed=i) for i in range(3))
    padding = jnp.asarray(np.arange(T)[None] < np.array([[T], [5]]), jnp.int32)
    change = causal_beside_padding(how)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.softmax(change(q @ transposed(k) / 3.0, padding)) @ v

    close(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v), "float32")
    assert found() == ["causal+mask" + ("+bias" if how == "with_a_bias" else "")]
    text = str(jax.make_jaxpr(jattn.fuse_attention(attend))(q, k, v))
    assert f"mask ({B}, 1, 1, {T})" in text


@pytest.mark.parametrize(
    "number", [-5.0, 1e30, "shown"], ids=["small", "positive", "shown is not 0"]
)
def test_two_numbers_that_are_added_are_a_bias(number: Any) -> None:
    q, k, v = operands("heads first")
    shown, hidden = (1.0, -1e30) if number == "shown" else (0.0, number)

    def attend(q: Array, k: Array, v: Array) -> Array:
        mask = jnp.tril(jnp.ones((T, S), bool))
        return jax.nn.softmax(q @ transposed(k) / 4.0 + jnp.where(mask, shown, hidden)) @ v

    close(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v), "float32")
    assert found() == ["bias"]


def lower(kind: type = jnp.float32) -> Array:
    return jnp.tril(jnp.ones((T, S), kind))


KNOWN_LOWER = np.tri(T, S, dtype=np.float32)
KNOWN_BUFFER = np.tri(64, 64, dtype=np.float32)
WRITTEN_BY_SUMS: dict[str, tuple[Callable[[Array], Array], str]] = {
    "ones less": (lambda s: s + (1 - lower()) * -1e9, "causal"),
    "ones less, of integers": (lambda s: s + -1e9 * (1 - lower(jnp.int32)), "causal"),
    "ones less, of bools": (lambda s: s - 1e9 * (1 - lower(bool)), "causal"),
    "less than ones": (lambda s: (lower() - 1) * 1e9 + s, "causal"),
    "up and down": (lambda s: s + (lower() * 1e9 - 1e9), "causal"),
    "over a small number": (lambda s: s - (1 - lower()) / 1e-9, "causal"),
    "logarithm": (lambda s: s + jnp.log(lower()), "causal"),
    "upper": (lambda s: s + jnp.triu(jnp.full((T, S), -1e9), 1), "causal"),
    "upper of numpy": (lambda s: s + np.triu(np.full((T, S), -1e9, np.float32), 1), "causal"),
    "of numpy": (lambda s: s + (1 - KNOWN_LOWER) * np.float32(-1e9), "causal"),
    "of numpy, in JAX": (lambda s: s + (1 - jnp.asarray(KNOWN_LOWER)) * -1e9, "causal"),
    "rows of keys": (lambda s: s + (1 - lower()[3:4]) * -1e9, "bias"),
    "beside a bias": (lambda s: s + (normal(T, S, seed=9) + (1 - lower()) * -1e9), "causal+bias"),
    "in a row and back": (lambda s: s + ((1 - lower().reshape(-1)) * -1e9).reshape(T, S), "bias"),
    "small": (lambda s: s + (1 - lower()) * -5, "bias"),
    "up": (lambda s: s + lower() * 1e9, "bias"),
    "three numbers": (lambda s: s + (KNOWN_LOWER - np.tri(T, S, -3, np.float32) * 2) * 1e9, "bias"),
    "chosen": (lambda s: s * lower() - 1e10 * (1 - lower()), "causal"),
    "chosen, turned round": (lambda s: (lower() - 1) * 1e10 + lower() * s, "causal"),
    "chosen by numpy": (lambda s: s * KNOWN_LOWER - np.float32(1e10) * (1 - KNOWN_LOWER), "causal"),
    "chosen by a part": (
        lambda s: (
            s * jax.lax.slice(KNOWN_BUFFER, (2, 2), (T + 2, S + 2))
            - 1e10 * (1 - jax.lax.slice(KNOWN_BUFFER, (2, 2), (T + 2, S + 2)))
        ),
        "causal",
    ),
    "chosen by what is hidden": (
        lambda s: (1 - jnp.triu(jnp.ones((T, S)), 1)) * s - 1e10 * jnp.triu(jnp.ones((T, S)), 1),
        "causal",
    ),
}


@pytest.mark.parametrize("how", WRITTEN_BY_SUMS)
def test_masks_by_sums(how: str) -> None:
    """A mask that arithmetic on 0 and 1 writes into the scores."""
    q, k, v = operands("heads first")
    change, pattern = WRITTEN_BY_SUMS[how]

    def attend(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.softmax(change(q @ transposed(k) / 4.0)) @ v

    close(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v), "float32")
    assert found() == [pattern]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s * lower() - 1e10 * lower(),
        lambda s: s * lower() - 5 * (1 - lower()),
        lambda s: s * lower() * 2 - 1e10 * (1 - KNOWN_LOWER.T[:T, :S] if T <= S else 1),
        lambda s: s * (lower() + 1) - 1e10 * (1 - lower()),
        lambda s: 1e10 * (1 - lower()) - s * lower(),
    ],
    ids=["hidden where it is kept", "small", "another mask", "twice", "taken off"],
)
def test_products_with_masks_that_stay(change: Callable[[Array], Array]) -> None:
    q, k, v = operands("heads first")

    def attend(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.softmax(change(q @ transposed(k) / 4.0)) @ v

    np.testing.assert_array_equal(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v))
    assert [bool(r.miss) for r in jattn.fusion_log()] == [True]


def test_an_added_mask_of_large_numbers_is_left_a_bias_on_demand() -> None:
    q, k, v = operands("heads first")

    def attend(q: Array, k: Array, v: Array) -> Array:
        mask = jnp.tril(jnp.ones((T, S), bool))
        return jax.nn.softmax(q @ transposed(k) / 4.0 + jnp.where(mask, 0, -1e30)) @ v

    close(jattn.fuse_attention(attend, finite_fill=False)(q, k, v), attend(q, k, v), "float32")
    assert found() == ["bias"]


def test_the_backend_can_be_named() -> None:
    x = operands("heads first")
    jattn.reset_call_counters()
    jax.jit(jattn.fuse_attention(attend, implementation="xla"))(*x)
    assert jattn.call_counters() == {"xla": {"forward": 1}}


def test_the_kernels_of_a_gpu_compute_it() -> None:
    """Lowered for a Hopper GPU: `flash`, forward and backward, and nothing that reads all pairs."""
    x = jax.ShapeDtypeStruct((2, 4, 512, 64), jnp.bfloat16)

    def loss(q: Array, k: Array, v: Array) -> Array:
        s = (q @ transposed(k)).astype(jnp.float32) / 8.0
        p = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((512, 512), bool)), s, -jnp.inf))
        return (p.astype(v.dtype) @ v).astype(jnp.float32).sum()

    jattn.reset_call_counters()
    with jattn.target_device(jattn.Device("cuda", arch=(9, 0))):
        gradient = jax.jit(jax.grad(jattn.fuse_attention(loss), (0, 1, 2)))
        text = gradient.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert found() == ["causal"]
    assert jattn.call_counters() == {"flash": {"forward": 1, "backward": 1}}
    assert "512x512" not in text


class _Wrapped(nnx.Module):
    def __init__(self, wrap: Callable[..., Any], **keywords: Any):
        self.wrap = wrap
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0), **keywords
        )

    def __call__(self, x: Array, **keywords: Any) -> Array:
        return self.wrap(lambda module, x: module(x, **keywords))(self.attention, x)


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def in_a_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """One round of a ``while``."""

    def run(module: Any, x: Array) -> Array:
        def round_(state: tuple[Any, Array, Array]) -> tuple[Any, Array, Array]:
            module, x, i = state
            return module, function(module, x), i + 1

        return nnx.while_loop(lambda state: state[2] < 1, round_, (module, x, jnp.asarray(0)))[1]

    return run


def in_rounds(function: Callable[..., Any]) -> Callable[..., Any]:
    """Two steps of a ``scan`` along which the module travels."""

    def run(module: Any, x: Array) -> Array:
        def step(_: int, state: tuple[Any, Array]) -> tuple[Any, Array]:
            return state[0], function(state[0], state[1])

        return nnx.fori_loop(0, 2, step, (module, x))[1]

    return run


def in_a_branch(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(module: Any, x: Array) -> Array:
        return nnx.cond(x[0, 0, 0] < 9, function, lambda module, x: x, module, x)

    return run


WRAPPERS = pytest.mark.parametrize(
    "wrap", [as_it_is, nnx.jit, nnx.remat, in_a_loop, in_rounds, in_a_branch]
)


@WRAPPERS
def test_modules_of_nnx_that_stay_as_they_are(wrap: Callable[..., Any]) -> None:
    """Some of their transformations write back the parameters that they were given."""
    module = _Wrapped(wrap)
    x = normal(B, T, 32)
    got = jattn.fuse_attention(lambda module, x: module(x))(module, x)
    close(got, module(x), "float32")
    assert found() == ["plain"]


@WRAPPERS
@pytest.mark.parametrize("change", ["cache", "dropout", "attribute"])
def test_state_that_would_be_lost_is_refused(wrap: Callable[..., Any], change: str) -> None:
    module = _Wrapped(wrap, dropout_rate=0.5 if change == "dropout" else 0.0)
    module.attention.init_cache((B, T, 32))
    place = {"cache": "attention.cache_index", "dropout": "attention.rngs.count"}.get(change, "an")

    def step(module: _Wrapped, x: Array) -> Array:
        if change == "attribute":
            module.attention.another = nnx.Intermediate(x)
        return module(x, decode=change == "cache", deterministic=False)

    with pytest.raises(ValueError, match=f"function changes .*{place}.*nnx.split before"):
        jattn.fuse_attention(step)(module, normal(B, 1, 32))


def test_the_state_of_a_merged_module_may_change() -> None:
    """`nnx.merge` makes a module of the very variables of a state."""
    module, another = (
        nnx.MultiHeadAttention(num_heads=4, in_features=32, decode=False, rngs=nnx.Rngs(0))
        for _ in range(2)
    )
    for each in (module, another):
        each.init_cache((B, T, 32))
    x = normal(B, T, 32)
    graph, state = nnx.split(another)

    @jax.jit
    @jattn.fuse_attention
    def step(state: Any, x: Array) -> tuple[Array, Any]:
        merged = nnx.merge(graph, state)
        return merged(x, decode=True), nnx.state(merged)

    for i in range(3):
        want = module(x[:, i : i + 1], decode=True)
        got, state = step(state, x[:, i : i + 1])
        close(got, want, "float32")
    assert int(state["cache_index"][...]) == 3


def test_changed_containers_are_refused() -> None:
    def step(cache: dict[str, Any], x: Array) -> Array:
        cache["length"] = cache["length"] + 1
        return self_attend(x)

    x = normal(B, N, T, D)
    for length, place in ((3, "an argument"), (jnp.asarray(3), r"\[0\]\[0\]\['length'\]")):
        with pytest.raises(ValueError, match=f"function changes {place}"):
            jattn.fuse_attention(step)({"length": length}, x)
