"""Acceptance rows T080 to T087: causal bias objects, and backends that a user registers."""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.reference import Gradients

# (batch, heads, T, S, D): few batch entries and heads, for the lengths and head dims are what matters.
SHAPES = ((2, 3, 128, 128, 16), (2, 3, 128, 256, 32), (2, 3, 256, 128, 32), (1, 1, 23, 56, 15))
CAUSAL_BIAS = {"upper_left": jattn.causal_upper_left, "lower_right": jattn.causal_lower_right}

Arrays = tuple[jax.Array, ...]


def drawn(shape: tuple[int, ...], dtype: str = "float16") -> Arrays:
    """q, k, v and dout."""
    batch, heads, q_len, kv_len, head_dim = shape
    rng = np.random.default_rng(0)
    return tuple(
        jnp.asarray(rng.random((batch, length, heads, head_dim)), dtype)
        for length in (q_len, kv_len, kv_len, q_len)
    )


def with_gradients(arrays: Arrays, **keywords: Any) -> Arrays:
    """out, dq, dk, dv of one call, jitted."""

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Arrays:
        out, pullback = jax.vjp(functools.partial(jattn.dot_product_attention, **keywords), q, k, v)
        return out, *pullback(dout)

    return run(*arrays)


@functools.cache
def with_mask(bias: jattn.CausalBias, shape: tuple[int, ...]) -> Arrays:
    """The materialised mask on the reference."""
    return with_gradients(drawn(shape), mask=bias.materialize(), implementation="reference")


def compare_with_mask(bias: jattn.CausalBias, shape: tuple[int, ...], backend: str) -> None:
    """T080, the common procedure: the materialised mask on the reference against the object on the backend."""
    got = with_gradients(drawn(shape), mask=bias, implementation=backend)
    for name, g, w, tolerance in zip(
        ("out", "dq", "dk", "dv"),
        got,
        with_mask(bias, shape),
        (1e-3, 5e-3, 5e-3, 5e-3),
        strict=True,
    ):
        assert g.dtype == w.dtype
        np.testing.assert_allclose(
            np.asarray(g, np.float32),
            np.asarray(w, np.float32),
            rtol=tolerance,
            atol=tolerance,
            err_msg=name,
        )


def made(alignment: str, shape: tuple[int, ...]) -> jattn.CausalBias:
    """The bias object of a shape; lower right with T > S warns, because rows see no key."""
    q_len, kv_len = shape[2:4]
    if alignment == "lower_right" and q_len > kv_len:
        with pytest.warns(UserWarning, match="queries see no key"):
            return CAUSAL_BIAS[alignment](q_len, kv_len)
    return CAUSAL_BIAS[alignment](q_len, kv_len)


@pytest.mark.parametrize("alignment", list(CAUSAL_BIAS))
def test_T080_materialize(alignment: str) -> None:
    """For T = 3, S = 4: upper left keeps 1, 2, 3 keys, lower right 2, 3, 4; equal when T = S."""
    kept = np.asarray(CAUSAL_BIAS[alignment](3, 4).materialize())
    assert kept.sum(axis=1).tolist() == ([1, 2, 3] if alignment == "upper_left" else [2, 3, 4])
    square = [np.asarray(make(5, 5).materialize()) for make in CAUSAL_BIAS.values()]
    np.testing.assert_array_equal(*square)


@pytest.mark.backends("xla", "cpu")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("alignment", list(CAUSAL_BIAS))
def test_T081_causal_variants(alignment: str, shape: tuple[int, ...], backend: str) -> None:
    arrays = drawn(shape)
    bias = made(alignment, shape)
    compare_with_mask(bias, shape, backend)
    if alignment == "lower_right" and shape[2] > shape[3]:
        # Rows that see no key are zeros, never NaN (docs/conventions.md).
        out, dq, _, _ = with_gradients(arrays, mask=bias, implementation=backend)
        without_keys = shape[2] - shape[3]
        assert (np.asarray(out)[:, :without_keys] == 0).all()
        assert (np.asarray(dq)[:, :without_keys] == 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("alignment", list(CAUSAL_BIAS))
def test_T082_one_trace(alignment: str, shape: tuple[int, ...]) -> None:
    """Hashable and a pytree without leaves: as an argument of jit it neither retraces nor becomes an array."""
    traces = 0

    @jax.jit
    def attend(arrays: Arrays, bias: jattn.CausalBias) -> jax.Array:
        nonlocal traces
        traces += 1
        return jattn.dot_product_attention(*arrays[:3], mask=bias)

    bias = made(alignment, shape)
    assert jax.tree.leaves(bias) == []
    assert hash(bias) == hash(made(alignment, shape))
    first = attend(drawn(shape), bias)
    second = attend(drawn(shape), made(alignment, shape))
    assert traces == 1
    np.testing.assert_array_equal(first, second)
    want = jattn.dot_product_attention(
        *drawn(shape)[:3], mask=bias.materialize(), implementation="reference"
    )
    np.testing.assert_allclose(
        np.asarray(first, np.float32), np.asarray(want, np.float32), rtol=1e-3, atol=1e-3
    )


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_T083_is_causal_equals_upper_left(shape: tuple[int, ...], backend: str) -> None:
    """Bitwise: both are the same band of the same problem."""
    arrays = drawn(shape)
    flag = with_gradients(arrays, is_causal=True, implementation=backend)
    bias = with_gradients(arrays, mask=jattn.causal_upper_left(*shape[2:4]), implementation=backend)
    for a, b in zip(flag, bias, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", [None, "reference", "cpu", "flash", "mem_efficient"])
def test_T084_bias_object_and_is_causal(implementation: str | None) -> None:
    q, k, v, _ = drawn((1, 2, 128, 128, 16))
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        jattn.dot_product_attention(
            q,
            k,
            v,
            mask=jattn.causal_upper_left(128, 128),
            is_causal=True,
            implementation=implementation,
        )


class ToyBackend:
    """Returns constants, so that its answers cannot be mistaken for anybody else's."""

    understands = frozenset({"bias"})

    def __init__(self, name: str) -> None:
        self.name = name
        self.forward_calls = 0
        self.wanted: list[tuple[bool, ...]] = []

    def for_backward(self) -> "ToyBackend":
        return self

    def unsupported(
        self, spec: Any, device: jattn.Device, *, needs_grad: bool, determinism: str
    ) -> tuple[Any, ...]:
        return ()

    def forward(
        self, spec: Any, operands: Any, device: jattn.Device
    ) -> tuple[jax.Array, jax.Array]:
        self.forward_calls += 1
        shapes = spec.shapes()
        return jnp.full(shapes["out"], 7.0, spec.dtype), jnp.full(
            shapes["lse"], 2.0, spec.lse_dtype
        )

    def backward(
        self,
        spec: Any,
        operands: Any,
        residuals: Any,
        wants: jattn.Wants,
        device: jattn.Device,
        determinism: str,
    ) -> Any:
        self.wanted.append(wants.flags())
        assert float(operands.q.size) > 0
        return Gradients(
            *(
                None if x is None else jnp.full(x.shape, value, x.dtype)
                for x, value in zip(
                    (operands.q, operands.k, operands.v, operands.bias),
                    (1.0, 2.0, 3.0, 4.0),
                    strict=True,
                )
            )
        )


@contextlib.contextmanager
def registered(platform: str) -> Iterator[ToyBackend]:
    toy = ToyBackend(f"toy_{platform}")
    jattn.register_backend(platform, toy)  # type: ignore[arg-type]
    try:
        yield toy
    finally:
        jattn.unregister_backend(platform, toy.name)


def test_T085_choice_on_a_platform_with_a_registered_backend() -> None:
    x = jax.ShapeDtypeStruct((4, 256, 2, 128), "float16")
    foo = jattn.Device("foo")
    assert jattn.select_backend(x, x, x, device=foo) == "xla"
    with registered("foo") as toy:
        assert jattn.select_backend(x, x, x, device=foo) == toy.name
        assert jattn.select_backend(x, x, x, device=jattn.Device("cpu")) == "cpu"
        # A feature it does not list as understood is not its problem.
        assert jattn.select_backend(x, x, x, device=foo, is_causal=True) == "xla"
    assert jattn.select_backend(x, x, x, device=foo) == "xla"


def test_T086_public_call_reaches_a_registered_backend() -> None:
    q, k, v, _ = drawn((4, 2, 64, 64, 16))
    before = jattn.dot_product_attention(q, k, v)  # what ran before has no say
    with registered("cpu") as toy:
        jattn.reset_call_counters()
        out, lse = jattn.dot_product_attention(q, k, v, return_lse=True)
        assert (np.asarray(out) == 7).all()
        assert (np.asarray(lse) == 2).all()
        assert toy.forward_calls == 1
        assert jattn.call_counters() == {toy.name: {"forward": 1}}
        with pytest.raises(ValueError, match="taken"):
            jattn.register_backend("cpu", toy)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"members of jattn\.Backend"):
        jattn.register_backend("cpu", object())  # type: ignore[arg-type]
    np.testing.assert_array_equal(jattn.dot_product_attention(q, k, v), before)


@pytest.mark.parametrize("wanted", [(0, 1, 2, 3), (0,), (3,), (1, 2)], ids=str)
def test_T087_gradients_come_from_a_registered_backend(wanted: tuple[int, ...]) -> None:
    """Its backward runs, is told which gradients are wanted, and gives those four."""
    q, k, v, _ = drawn((4, 2, 64, 64, 16))
    bias = jnp.zeros((4, 2, 64, 64))
    with registered("cpu") as toy:

        def loss(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
            return jattn.dot_product_attention(q, k, v, bias).astype("float32").sum()

        grads = jax.jit(jax.grad(loss, argnums=wanted))(q, k, v, bias)
        assert toy.wanted == [tuple(i in wanted for i in range(4))]
    for i, grad in zip(wanted, grads, strict=True):
        assert grad.dtype == (q, k, v, bias)[i].dtype
        assert (np.asarray(grad) == i + 1).all()


def test_T081_no_warning_where_every_row_sees_a_key() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jattn.causal_lower_right(3, 4)
        jattn.causal_lower_right(4, 4)
        jattn.causal_upper_left(4, 3)
