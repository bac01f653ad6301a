"""Acceptance rows on a GPU, with their short lists."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.testing import cases
from jattn.testing.cases import Case
from jattn.testing.run import verify


def normal(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, "float32").astype(dtype)


def with_gradients(
    backend: str, arrays: tuple[jax.Array, ...], dout: jax.Array, **keywords: Any
) -> Any:
    @jax.jit
    def run(arrays: tuple[jax.Array, ...], dout: jax.Array) -> Any:
        attend = functools.partial(jattn.dot_product_attention, implementation=backend, **keywords)
        out, pullback = jax.vjp(attend, *arrays)
        return out, *pullback(dout)

    return [np.asarray(x, np.float32) for x in run(arrays, dout)]


@pytest.mark.backends("mem_efficient")
def test_T001_rank_2_mask_equals_rank_4(backend: str) -> None:
    x = normal(1, 10, 16, 4, 4)
    kept = jax.random.bernoulli(jax.random.key(2), 0.5, (16, 16)).at[3].set(False)
    additive = jnp.where(kept, 0.0, -jnp.inf)
    attend = functools.partial(jattn.dot_product_attention, x, x, x, implementation=backend)
    want = np.asarray(attend(additive))
    assert not want[:, 3].any()
    for keywords in (
        {"bias": jnp.broadcast_to(additive, (10, 4, 16, 16))},
        {"mask": kept},
        {"mask": jnp.broadcast_to(kept, (10, 4, 16, 16))},
    ):
        np.testing.assert_allclose(attend(**keywords), want, rtol=1.3e-6, atol=1e-5)


@pytest.mark.backends("mem_efficient")
@pytest.mark.parametrize("head_dim", [4, 2])
def test_T026_ones_give_exactly_sixteen(head_dim: int, backend: str) -> None:
    """T025 on the GPU, at head dim 2 too."""
    projected = jnp.full((1, 2, 1, head_dim), 4.0)
    out = jattn.dot_product_attention(
        projected,
        projected,
        projected,
        mask=jnp.tril(jnp.ones((2, 2), bool)),
        is_causal=True,
        implementation=backend,
    )
    assert (np.asarray(out) == 4.0).all()


@pytest.mark.backends("mem_efficient", "flash")
@pytest.mark.parametrize("head_dim", [193, 204, 256])
def test_T029_large_head_dims_train(head_dim: int, backend: str) -> None:
    verify(
        Case(
            name=f"T029-{head_dim}", q_len=40, kv_len=40, head_dim=head_dim, head_dim_v=head_dim, dtype="float16",
            distribution="uniform",
        ),
        backend,
    )  # fmt: skip


@pytest.mark.backends("mem_efficient", "flash")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_T040_T041_compute_dtype(dtype: str, backend: str) -> None:
    q, k, v = (normal(i, 2, 32, 4, 32) for i in range(3))
    attend = functools.partial(
        jattn.dot_product_attention, implementation=backend, compute_dtype=dtype
    )
    out = attend(q, k, v)
    assert out.dtype == dtype
    want = jattn.dot_product_attention(q, k, v, implementation="reference")
    tolerance = 1e-2 if dtype == "float16" else 2e-2
    np.testing.assert_allclose(np.asarray(out, np.float32), want, rtol=tolerance, atol=tolerance)
    grads = jax.grad(lambda *x: attend(*x).astype("float32").sum(), argnums=(0, 1, 2))(q, k, v)
    assert {str(grad.dtype) for grad in grads} == {"float32"}


@pytest.mark.backends("mem_efficient", "flash")
@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (1, 17, 2, 64)], ids=str)
def test_T048_large_bfloat16_values(shape: tuple[int, ...], backend: str) -> None:
    x = jnp.full(shape, 133120.0, "bfloat16")
    out = jattn.dot_product_attention(x, x, x, implementation=backend)
    assert (np.asarray(out, np.float32) == 133120.0).all()


@pytest.mark.backends("mem_efficient")
def test_T056_banded_minus_infinity(backend: str) -> None:
    t, j = np.arange(600)[:, None], np.arange(600)[None]
    bias = jnp.asarray(np.where((j > t) | (j <= t - 10), -np.inf, 0.0), jnp.float32)
    q, k, v = (normal(i, 1, 600, 2, 8) for i in range(3))
    attend = functools.partial(jattn.dot_product_attention, q, k, v)
    want = attend(bias, implementation="reference")
    for keywords in (
        {"bias": bias},
        {"is_causal": True, "local_window_size": (9, 0)},
        {"mask": bias == 0},
    ):
        np.testing.assert_allclose(
            attend(implementation=backend, **keywords), want, rtol=1.3e-6, atol=1e-5
        )


@pytest.mark.backends("mem_efficient", "flash")
@pytest.mark.parametrize("scale", [-10000.0, -0.5, 0.0])
def test_T057_negative_and_zero_scale(scale: float, backend: str) -> None:
    verify(
        Case(
            name=f"T057-{scale:g}",
            batch=1,
            num_heads=3,
            num_kv_heads=3,
            dtype="bfloat16",
            scale=scale,
            is_causal=True,
        ),
        backend,
    )


@pytest.mark.backends("mem_efficient")
@pytest.mark.parametrize("case", cases.tagged("T058"), ids=str)
def test_T058_mask_variants(case: Case, backend: str) -> None:
    verify(case, backend)


@pytest.mark.backends("mem_efficient")
@pytest.mark.parametrize("case", cases.tagged("T059"), ids=str)
def test_T059_odd_key_lengths_with_a_mask(case: Case, backend: str) -> None:
    verify(case, backend)


@pytest.mark.backends("mem_efficient")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_T060_broadcast_mask(dtype: str, backend: str) -> None:
    q, k, v = (normal(i, 2, length, 2, 16, dtype=dtype) for i, length in ((1, 8), (2, 16), (3, 16)))
    row, dout = normal(4, 1, 1, 1, 16, dtype=dtype), normal(5, 2, 8, 2, 16, dtype=dtype)
    got = with_gradients(backend, (q, k, v, row), dout)
    want = with_gradients(backend, (q, k, v, jnp.broadcast_to(row, (2, 2, 8, 16))), dout)
    np.testing.assert_array_equal(got[0], want[0])
    assert got[4].shape == row.shape
    unit = 2.0**-24 if dtype == "float32" else 2.0**-11
    limit = 4 * unit * np.abs(want[4]).sum(axis=(0, 1, 2)) + 1e-7
    assert (np.abs(got[4][0, 0, 0] - want[4].sum(axis=(0, 1, 2))) <= limit).all()


@pytest.mark.backends("mem_efficient")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_T061_long_mask(dtype: str, backend: str) -> None:
    """32 heads, T = S = 8192, a mask of every pair and its gradient: 4 or 8 GiB each; 256 random rows against numpy."""
    if jax.devices()[0].memory_stats()["bytes_limit"] < 48 << 30:
        pytest.skip("takes up to 40 GiB")
    length, heads, head_dim, rows = 8192, 32, 64, 256
    q, k, v, dout = (normal(i, 1, length, heads, head_dim, dtype=dtype) for i in range(4))
    bias = jax.random.uniform(jax.random.key(9), (1, heads, length, length), dtype)

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, dout: jax.Array) -> Any:
        out, pullback = jax.vjp(
            functools.partial(jattn.dot_product_attention, implementation=backend), q, k, v, bias
        )
        return out, *pullback(dout)

    compiled = run.lower(q, k, v, bias, dout).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * bias.nbytes
    out, dq, dk, dv, dbias = compiled(q, k, v, bias, dout)
    assert all(bool(jnp.isfinite(x).all()) for x in (out, dq, dk, dv, dbias))
    rng = np.random.default_rng(61)
    row, head = rng.integers(0, length, rows), np.sort(rng.integers(0, heads, rows))
    of_rows = [x[0, row, head] for x in (q, dout, out)] + [x[0, head, row] for x in (bias, dbias)]
    chosen = [np.asarray(x, np.float64) for x in of_rows]
    relative, least = {"float32": (1e-4, 1e-5), "float16": (2e-3, 2e-4)}[dtype]
    for h in np.unique(head):
        keys, values = (np.asarray(x[0, :, h], np.float64) for x in (k, v))
        query, upstream, got, shift, got_shift = (x[head == h] for x in chosen)
        s = query @ keys.T / 8 + shift
        p = np.exp(s - s.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(got, p @ values, rtol=relative, atol=least)
        dp = upstream @ values.T
        ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
        # delta, the product of dout and of the rounded output, is off by less than a half of `relative`.
        limit = 5 * relative * np.abs(ds) + relative / 2 * p + least / 200
        assert (np.abs(got_shift - ds) <= limit).all()


@pytest.mark.backends("mem_efficient")
def test_T062_keys_shared_by_all_heads(backend: str) -> None:
    q = normal(1, 3, 1, 16, 128)
    k, v = (jnp.broadcast_to(normal(i, 3, 14, 1, 128), (3, 14, 16, 128)) for i in (2, 3))
    bias = normal(4, 3, 1, 1, 14)
    attend = functools.partial(jattn.dot_product_attention, q, k, v, implementation=backend)
    whole = attend(jnp.broadcast_to(bias, (3, 16, 1, 14)))
    assert float(jnp.abs(attend(bias) - whole).mean()) < 1e-7


@pytest.mark.backends("mem_efficient", "flash")
def test_T063_head_dim_1(backend: str) -> None:
    q = jnp.asarray([[[[1.0]], [[2.0]]]], "float16")
    v = jnp.full((1, 1, 1, 1), 3.0, "float16")
    assert (np.asarray(jattn.dot_product_attention(q, v, v, implementation=backend)) == 3.0).all()


@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [
        ("mem_efficient", "float32", 1e-5),
        ("flash", "float16", 7e-4),
        ("flash", "bfloat16", 7e-3),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_T066_T067_packed_gradients(
    backend: str, dtype: str, tolerance: float, is_causal: bool
) -> None:
    packed, dout = normal(1, 4, 4, 3 * 2 * 16, dtype=dtype), normal(2, 4, 4, 2, 16, dtype=dtype)

    def gradient(name: str, packed: jax.Array, dout: jax.Array) -> np.ndarray[Any, Any]:
        def attend(packed: jax.Array) -> Any:
            q, k, v = (x.reshape(4, 4, 2, 16) for x in jnp.split(packed, 3, axis=-1))
            return jattn.dot_product_attention(q, k, v, is_causal=is_causal, implementation=name)

        return np.asarray(
            jax.jit(lambda p, d: jax.vjp(attend, p)[1](d)[0])(packed, dout), np.float64
        )

    with jax.enable_x64(True):
        want = gradient("reference", packed.astype("float64"), dout.astype("float64"))
    np.testing.assert_allclose(
        gradient(backend, packed, dout), want, rtol=tolerance, atol=tolerance
    )


def with_dropout(found: tuple[Case, ...], rate: float) -> list[Case]:
    """The problems, and those of up to 1024 tokens with dropout."""
    short = [case for case in found if max(case.q_len, case.kv_len) <= 1024]
    return [*found, *(case.but("dropout", dropout_rate=rate) for case in short)]


@pytest.mark.backends("mem_efficient")
@pytest.mark.parametrize("case", with_dropout(cases.tagged("T072"), 0.22), ids=str)
def test_T072_gradients(case: Case, backend: str) -> None:
    verify(case, backend)


@pytest.mark.backends("mem_efficient")
@pytest.mark.parametrize("case", with_dropout(cases.tagged("T073"), 0.22), ids=str)
def test_T073_gradients_with_a_float_mask(case: Case, backend: str) -> None:
    verify(case, backend)


def _t074() -> list[Any]:
    """Lengths x head dims; causality, dropout, types, scale and batch take turns. An eighth is the short list."""
    lengths = ((4, 4), (8, 64), (143, 587), (256, 256), (512, 128), (1024, 1024), (2048, 2048))
    head_dims = (16, 21, 64, 128, 203, 256, 72, 160)
    found = []
    for i, (q_len, kv_len) in enumerate(lengths):
        for j, head_dim in enumerate(head_dims):
            for k, rate in enumerate((0.0, 0.22, 0.48)):
                if rate and max(q_len, kv_len) > 1024:
                    continue
                dtype = ("float16", "bfloat16")[(i + j + k) % 2]
                is_causal = q_len == kv_len and (i + j) % 2 == 1
                case = Case(
                    name=f"T074-T{q_len}-S{kv_len}-D{head_dim}-{dtype}-{rate}-{is_causal}",
                    batch=8 if q_len <= 256 and (j + k) % 2 else 1,
                    q_len=q_len,
                    kv_len=kv_len,
                    num_heads=4,
                    num_kv_heads=4,
                    head_dim=head_dim,
                    head_dim_v=head_dim,
                    dtype=dtype,
                    scale=1 / head_dim if (j + k) % 3 == 0 else None,
                    is_causal=is_causal,
                    dropout_rate=rate,
                    distribution="uniform",
                )
                is_short = (3 * i + j + k) % 8 == 0
                found.append(
                    pytest.param(case, marks=() if is_short else pytest.mark.full, id=case.name)
                )
    return found


@pytest.mark.backends("flash")
@pytest.mark.parametrize("case", _t074())
def test_T074_gradients(case: Case, backend: str) -> None:
    verify(case, backend)


@pytest.mark.backends("mem_efficient", "flash")
@pytest.mark.parametrize("mode", ["warn", "strict"])
def test_T070_determinism(mode: str, backend: str) -> None:
    """Warned about while tracing, once; strict runs the deterministic form and says nothing."""
    x = normal(1, 1, 64, 8, 64, dtype="float16")

    def loss(x: jax.Array) -> jax.Array:
        out = jattn.dot_product_attention(x, x, x, implementation=backend)
        return out.astype("float32").sum()

    with jattn.deterministic(mode), warnings.catch_warnings(record=True) as caught:  # type: ignore[arg-type]
        warnings.simplefilter("always")
        grad = jax.jit(jax.grad(loss))(x)
    assert np.isfinite(np.asarray(grad, np.float32)).all()
    title = {"mem_efficient": "Memory Efficient attention", "flash": "Flash Attention"}[backend]
    said = [w for w in caught if "defaults to a non-deterministic algorithm" in str(w.message)]
    assert len(said) == (1 if mode == "warn" else 0)
    assert all(str(w.message).startswith(title) for w in said)


@pytest.mark.backends("mem_efficient", "flash")
@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
@pytest.mark.parametrize("shape", [(4, 4, 128, 256, 32), (1, 1, 23, 56, 15)], ids=str)
def test_T081_causal_variants(shape: tuple[int, ...], alignment: str, backend: str) -> None:
    batch, heads, q_len, kv_len, head_dim = shape
    lengths = (q_len, kv_len, kv_len)
    arrays = tuple(
        normal(i, batch, n, heads, head_dim, dtype="float16") for i, n in enumerate(lengths)
    )
    dout = normal(9, batch, q_len, heads, head_dim, dtype="float16")
    make = jattn.causal_upper_left if alignment == "upper_left" else jattn.causal_lower_right
    bias = make(q_len, kv_len)
    got = with_gradients(backend, arrays, dout, mask=bias)
    want = with_gradients("reference", arrays, dout, mask=bias.materialize())
    for g, w, tolerance in zip(got, want, (1e-3, 5e-3, 5e-3, 5e-3), strict=True):
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)
    if alignment == "upper_left":
        for a, b in zip(got, with_gradients(backend, arrays, dout, is_causal=True), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.backends("mem_efficient", "flash")
def test_J11_rows_without_keys(backend: str) -> None:
    """Lower right with more queries than keys, and a batch entry without keys: zeros, -inf, zero gradients."""
    q, k, v = (normal(i, 2, n, 2, 64, dtype="bfloat16") for i, n in ((1, 200), (2, 120), (3, 120)))
    attend = functools.partial(
        jattn.dot_product_attention,
        is_causal=True,
        causal_alignment="lower_right",
        key_value_seq_lengths=jnp.asarray([120, 0], jnp.int32),
        implementation=backend,
        return_lse=True,
    )
    (out, lse), pullback = jax.vjp(attend, q, k, v)
    grads = pullback((jnp.ones_like(out), jnp.ones_like(lse)))
    assert np.isneginf(np.asarray(lse)[0, :80]).all()
    assert np.isneginf(np.asarray(lse)[1]).all()
    assert not np.asarray(out)[0, :80].any()
    assert not np.asarray(out)[1].any()
    for grad in grads:
        assert not np.asarray(grad)[1].any()
        assert np.isfinite(np.asarray(grad, np.float32)).all()


@pytest.mark.backends("mem_efficient", "flash")
def test_J14_repeated_calls_keep_no_memory(backend: str) -> None:
    q = normal(1, 2, 512, 4, 64, dtype="bfloat16")

    @jax.jit
    def step(q: jax.Array) -> Any:
        attend = functools.partial(
            jattn.dot_product_attention, is_causal=True, implementation=backend
        )
        return jax.value_and_grad(lambda q: attend(q, q, q).astype("float32").sum())(q)

    def in_use() -> int:
        jax.block_until_ready(step(q))
        return int(jax.devices()[0].memory_stats()["bytes_in_use"])

    in_use()
    before = in_use()
    for _ in range(50):
        after = in_use()
    assert after <= before
