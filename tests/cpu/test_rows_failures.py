"""Acceptance rows T029 to T051: refusals, wrong calls, and what other libraries refuse and every backend runs here.

A refusal is tested three ways: `jattn.explain` names its code, the forced call raises NoBackendError with that code
while tracing, and a UserWarning carries its phrase. Devices that nobody has here are injected.
"""

import functools
import os
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import normal

import jattn
from jattn.testing.cases import Case
from jattn.testing.run import verify

FUSED = ("flash", "mem_efficient", "cpu")


def cuda(major: int, minor: int) -> jattn.Device:
    return jattn.Device("cuda", arch=(major, minor))


SM90 = cuda(9, 0)


def shaped(*shape: int, dtype: str = "float16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def alike(*shape: int, dtype: str = "float16") -> tuple[jax.ShapeDtypeStruct, ...]:
    return (shaped(*shape, dtype=dtype),) * 3


def refusal(
    code: str, phrase: str, arrays: Any, backend: str, device: jattn.Device = SM90, **keywords: Any
) -> jattn.Reason:
    """Asserts that the forced backend refuses with this code and phrase, all three ways; returns the reason."""
    static = {name: x for name, x in keywords.items() if not hasattr(x, "shape")}
    shapes = {name: x for name, x in keywords.items() if hasattr(x, "shape")}
    explanation = jattn.explain(*arrays, implementation=backend, device=device, **keywords)
    assert explanation.chosen is None
    reason = next(r for r in explanation.reasons[backend] if r.code == code)
    assert phrase in str(reason)
    assert str(reason.actual) in str(explanation)

    def call(q: Any, k: Any, v: Any, named: Any) -> jax.Array:
        return jattn.dot_product_attention(q, k, v, implementation=backend, **static, **named)

    with (
        jattn.target_device(device),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        with pytest.raises(jattn.NoBackendError, match="No available kernel") as error:
            jax.eval_shape(call, *arrays, shapes)
    assert any(phrase in str(w.message) and w.category is UserWarning for w in caught)
    assert code in [r.code for r in error.value.reasons if r.backend == backend]
    return reason


def accepted(arrays: Any, backend: str, device: jattn.Device = SM90, **keywords: Any) -> None:
    explanation = jattn.explain(*arrays, implementation=backend, device=device, **keywords)
    assert explanation.chosen == backend, str(explanation)


@pytest.mark.parametrize("head_dim", [193, 204, 256])
@pytest.mark.parametrize("arch", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0)], ids=str)
def test_T029_head_dims_that_sm86_could_not_train(arch: tuple[int, int], head_dim: int) -> None:
    """sm_86 and sm_89 have less shared memory for the backward pass: tiles are chosen by device."""
    arrays = alike(2, 4, 2, head_dim)
    for needs_grad in (False, True):
        accepted(arrays, "mem_efficient", cuda(*arch), needs_grad=needs_grad)
        chosen = jattn.select_backend(*arrays, device=cuda(*arch), needs_grad=needs_grad)
        assert chosen == ("flash" if arch == (9, 0) else "mem_efficient")


def test_T030_no_backend_enabled() -> None:
    x = normal(1, 2, 3, 1, 4, dtype="float16")
    phrase = "No viable backend for scaled_dot_product_attention was found"
    with jattn.sdpa_kernel([]):
        with pytest.raises(jattn.NoBackendError, match=phrase):
            jattn.select_backend(x, x, x)
        with pytest.raises(jattn.NoBackendError, match=phrase):
            jattn.dot_product_attention(x, x, x)


def test_T031_rank_3_is_a_single_batch_entry(backend: str) -> None:
    """Rank 3 is (T, N, D), and gets its batch axis before any backend sees it."""
    x = normal(1, 3, 2, 8, dtype="float16")
    attend = functools.partial(jattn.dot_product_attention, implementation=backend)
    np.testing.assert_array_equal(attend(x, x, x), attend(x[None], x[None], x[None])[0])


@pytest.mark.parametrize("implementation", [None, "reference", *FUSED])
def test_T032_batch_and_heads_must_fit(implementation: str | None) -> None:
    """As jax.nn: a batch of one is not broadcast, and the key heads must divide the query heads."""
    for (q_shape, kv_shape), words in (
        (((1, 3, 4, 8), (2, 3, 4, 8)), "batch"),
        (((2, 3, 4, 8), (2, 3, 3, 8)), "heads"),
    ):
        q, kv = jnp.zeros(q_shape, "float16"), jnp.zeros(kv_shape, "float16")
        with pytest.raises(ValueError, match=words):
            jattn.dot_product_attention(q, kv, kv, implementation=implementation)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 0), (0, 4), (4, 0)])
def test_T033_zero_lengths_work(q_len: int, kv_len: int, backend: str) -> None:
    """Defined in every backend: "Zero sizes" in docs/conventions.md."""
    q = normal(1, 2, q_len, 2, 8, dtype="float16")
    k, v = (normal(i, 2, kv_len, 2, size, dtype="float16") for i, size in ((2, 8), (3, 6)))
    attend = functools.partial(jattn.dot_product_attention, implementation=backend, return_lse=True)
    (out, lse), pullback = jax.vjp(attend, q, k, v)
    assert out.shape == (2, q_len, 2, 6)
    assert (np.asarray(out) == 0).all()
    assert np.isneginf(np.asarray(lse)).all()
    for grad, primal in zip(
        pullback((jnp.ones_like(out), jnp.ones_like(lse))), (q, k, v), strict=True
    ):
        assert grad.shape == primal.shape
        assert (np.asarray(grad) == 0).all()
    for fused in ("flash", "mem_efficient"):
        accepted((q, k, v), fused, needs_grad=True)


def test_T034_transposed_inputs(backend: str) -> None:
    """JAX has no strides; what arrives through transposes, slices and broadcasts equals materialised arrays."""
    q, k, v = (normal(i, 2, 7, 3, 8) for i in range(3))
    attend = functools.partial(jattn.dot_product_attention, implementation=backend)
    want = attend(q, k, v)
    turned = [jnp.asarray(np.ascontiguousarray(np.swapaxes(x, -1, -2))) for x in (q, k, v)]
    got = jax.jit(lambda *xs: attend(*(jnp.swapaxes(x, -1, -2) for x in xs)))(*turned)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    packed = jnp.concatenate([q, k, v], axis=-1)
    got = jax.jit(lambda x: attend(*jnp.split(x, 3, axis=-1)))(packed)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    shared = jax.jit(lambda q, x: attend(q, *(jnp.broadcast_to(x, q.shape),) * 2))(q, k[:, :, :1])
    whole = attend(q, *(jnp.asarray(np.broadcast_to(k[:, :, :1], q.shape)),) * 2)
    np.testing.assert_allclose(shared, whole, rtol=1e-6, atol=1e-6)


def test_T035_head_dims_beyond_the_limit() -> None:
    """A head dim that no vector divides is fine; one beyond the limit is refused, with the limit."""
    accepted(alike(2, 3, 2, 9), "mem_efficient")
    accepted(alike(2, 3, 2, 9), "flash")
    phrase = "requires q,k,v to have"
    reason = refusal("HEAD_DIM", phrase, alike(2, 3, 2, 257), "flash")
    assert (reason.argument, reason.actual) == ("head_dim", 257)
    assert "256" in str(reason)
    assert "implementation='mem_efficient'" in reason.remedy
    assert (
        "implementation='xla'" in refusal("HEAD_DIM", phrase, alike(2, 3, 2, 513), "flash").remedy
    )
    accepted(alike(2, 3, 2, 257), "mem_efficient")
    refusal("HEAD_DIM", phrase, alike(2, 3, 2, 513), "mem_efficient")
    wide_v = (shaped(2, 3, 2, 64), shaped(2, 3, 2, 64), shaped(2, 3, 2, 513))
    assert refusal("HEAD_DIM", phrase, wide_v, "mem_efficient").argument == "head_dim_v"


def test_T036_float64() -> None:
    with jax.enable_x64(True):
        arrays = alike(2, 3, 2, 16, dtype="float64")
        refusal("DTYPE", "to all be of dtype: {Half, BFloat16}", arrays, "flash")
        refusal("DTYPE", "to all be of dtype: {Half, BFloat16, Float}", arrays, "mem_efficient")
        accepted(arrays, "cpu", jattn.Device("cpu"))


@pytest.mark.parametrize("kind", ["bias", "mask"])
def test_T037_dense_masks_are_taken(kind: str) -> None:
    """Every fused backend takes them, forward and backward."""
    arrays = alike(2, 3, 2, 16)
    dense = {kind: shaped(2, 2, 3, 3, dtype="bool" if kind == "mask" else "float16")}
    for backend in ("flash", "mem_efficient"):
        accepted(arrays, backend, needs_grad=True, **dense)
    accepted(arrays, "cpu", jattn.Device("cpu"), needs_grad=True, **dense)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float16", 5), ("float32", 2), ("float32", 3), ("bfloat16", 1)]
)
def test_T038_unaligned_head_dims(dtype: str, head_dim: int) -> None:
    """No head dim is refused for alignment. Devices older than the kernels are refused as such."""
    arrays = alike(2, 8, 2, head_dim, dtype=dtype)
    accepted(arrays, "mem_efficient", cuda(8, 0), needs_grad=True)
    accepted(arrays, "mem_efficient", SM90, needs_grad=True)
    for arch in ((7, 5), (6, 1)):
        refusal(
            "ARCH",
            "only supports gpu architectures in the range",
            arrays,
            "mem_efficient",
            cuda(*arch),
        )


def test_T039_flash_refuses_float32() -> None:
    arrays = alike(16, 32, 16, 32, dtype="float32")
    refusal(
        "DTYPE",
        "Expected query, key and value to all be of dtype: {Half, BFloat16}",
        arrays,
        "flash",
    )


@pytest.mark.parametrize("row", ["T040", "T041"])
def test_T040_T041_compute_dtype(row: str, backend: str) -> None:
    """Autocast is an argument here: inputs are cast before the choice, gradients come back in the input's type."""
    dtype, tolerance = {"T040": ("float16", 1e-2), "T041": ("bfloat16", 2e-2)}[row]
    accepted(alike(16, 32, 16, 32, dtype="float32"), "flash", compute_dtype=dtype, needs_grad=True)
    q, k, v = (normal(i, 2, 32, 4, 32) for i in range(3))
    attend = functools.partial(jattn.dot_product_attention, implementation=backend)
    out = attend(q, k, v, compute_dtype=dtype)
    assert out.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(out, np.float32), np.asarray(attend(q, k, v)), rtol=tolerance, atol=tolerance
    )

    def cast(*x: jax.Array) -> jax.Array:
        return attend(*(y.astype(dtype) for y in x))

    def gradients(function: Any) -> Any:
        return jax.grad(lambda *x: function(*x).astype("float32").sum(), argnums=(0, 1, 2))(q, k, v)

    for grad, want in zip(
        gradients(functools.partial(attend, compute_dtype=dtype)), gradients(cast), strict=True
    ):
        assert grad.dtype == "float32"
        assert np.asarray(want).any()
        np.testing.assert_array_equal(grad, want)


@pytest.mark.parametrize("implementation", [None, "reference", "xla", *FUSED])
def test_T042_mixed_dtypes(implementation: str | None) -> None:
    dtypes = ("float16", "bfloat16", "float32")
    for q_dtype in dtypes:
        for kv_dtype in dtypes:
            if q_dtype == kv_dtype:
                continue
            q, kv = shaped(1, 8, 4, 16, dtype=q_dtype), shaped(1, 8, 4, 16, dtype=kv_dtype)
            call = functools.partial(jattn.dot_product_attention, implementation=implementation)
            for arrays in ((q, kv, kv), (q, q, kv), (q, kv, q)):
                with pytest.raises(ValueError, match=f"dtype.*{q_dtype}|{q_dtype}.*dtype"):
                    jax.eval_shape(call, *arrays)


def test_T043_arrays_on_different_devices() -> None:
    """JAX itself refuses; nothing of ours may hide that. Two virtual devices need a process of their own."""
    program = """
import jax, jax.numpy as jnp, jattn
q, k = (jax.device_put(jnp.ones((1, 4, 2, 8)), device) for device in jax.devices())
for arrays in ((q, k, k), (q, q, k)):
    try:
        jattn.dot_product_attention(*arrays)
    except ValueError as error:
        assert "incompatible devices" in str(error), error
    else:
        raise SystemExit("no error")
print("refused")
"""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "refused", done.stderr


@pytest.mark.parametrize("implementation", [None, "reference", *FUSED])
@pytest.mark.parametrize(
    "ranks", [(1, 1, 1), (2, 2, 2), (1, 2, 2), (3, 4, 4), (4, 3, 4), (4, 4, 5)], ids=str
)
def test_T044_wrong_ranks(ranks: tuple[int, ...], implementation: str | None) -> None:
    """Rank 5 alone is a second batch axis and legal; ranks 1, 2 and mixed ones are wrong calls."""
    arrays = [jnp.zeros((4,) * rank, "float16") for rank in ranks]
    with pytest.raises(ValueError, match=r"rank|axes|shape"):
        jattn.dot_product_attention(*arrays, implementation=implementation)


def test_T047_bfloat16_below_sm80() -> None:
    arrays = alike(16, 32, 16, 32, dtype="bfloat16")
    refusal("DTYPE", "dtype: {Half, Float}", arrays, "mem_efficient", cuda(7, 5))
    accepted(arrays, "mem_efficient", cuda(8, 0))


@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (1, 17, 2, 64)])
def test_T048_large_bfloat16_values(shape: tuple[int, ...], backend: str) -> None:
    """x * c - max * c in one fused multiply-add overflowed here; the scores are equal, so every weight is 1 / S."""
    x = jnp.full(shape, 133120.0, "bfloat16")
    out, lse = jattn.dot_product_attention(x, x, x, implementation=backend, return_lse=True)
    assert (np.asarray(out, np.float32) == 133120.0).all()
    assert np.isfinite(np.asarray(lse)).all()


def test_T049_zero_lengths_in_a_batch(backend: str) -> None:
    """Lengths are run-time values, so they are computed, not refused: no keys give zeros and lse -inf."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 32, 32)
    lengths[rng.permutation(32)[:10]] = 0
    counts = jnp.asarray(lengths, jnp.int32)
    q, k, v = (normal(i, 32, 32, 2, 16, dtype="float16") for i in range(3))
    attend = functools.partial(
        jattn.dot_product_attention,
        query_seq_lengths=counts,
        key_value_seq_lengths=counts,
        implementation=backend,
        return_lse=True,
    )
    (out, lse), pullback = jax.vjp(attend, q, k, v)
    grads = pullback((jnp.ones_like(out), jnp.ones_like(lse)))
    beyond = np.arange(32)[None] >= lengths[:, None]
    assert (np.asarray(out)[beyond] == 0).all()
    assert np.isneginf(np.asarray(lse)[beyond]).all()
    assert np.isfinite(np.asarray(lse)[~beyond]).all()
    for grad in grads:
        assert (np.asarray(grad)[beyond] == 0).all()
        assert np.isfinite(np.asarray(grad, np.float32)).all()


def test_T051_non_square_causal(backend: str) -> None:
    """Served by every backend, upper left."""
    arrays = (shaped(1, 8, 1, 16, dtype="bfloat16"), *alike(1, 12, 1, 16, dtype="bfloat16")[:2])
    for fused in ("flash", "mem_efficient"):
        accepted(arrays, fused, needs_grad=True, is_causal=True)
    verify(
        Case(
            name="T051",
            batch=1,
            q_len=8,
            kv_len=12,
            num_heads=1,
            num_kv_heads=1,
            head_dim=16,
            head_dim_v=16,
            dtype="bfloat16",
            is_causal=True,
        ),
        backend,
    )
