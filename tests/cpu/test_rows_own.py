"""Acceptance rows J07 to J14: head dims, ranks, groups, decoding, rows without keys, `jax.nn`, log-sum-exp, memory."""

import functools
import gc
import resource
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import bernoulli, normal

import jattn
from jattn.testing.cases import Case
from jattn.testing.run import verify


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("head_dim", [*range(1, 17), 21, 203, 257])
def test_J07_every_head_dim(head_dim: int, backend: str) -> None:
    """The result and the gradients have the true head dim and its scale, whatever a kernel pads to."""
    verify(
        Case(
            name=f"J07-{head_dim}",
            batch=1,
            q_len=19,
            kv_len=35,
            num_kv_heads=1,
            head_dim=head_dim,
            head_dim_v=head_dim,
            dtype=("float16", "bfloat16", "float32")[head_dim % 3],
            is_causal=head_dim % 2 == 0,
        ),
        backend,
    )


def test_J08_rank_3_equals_batch_1(backend: str) -> None:
    q, k, v = (
        normal(i, length, heads, 8) for i, length, heads in ((1, 9, 4), (2, 13, 2), (3, 13, 2))
    )
    bias = normal(4, 4, 9, 13)
    attend = functools.partial(
        jattn.dot_product_attention, is_causal=True, implementation=backend, return_lse=True
    )

    def both(*x: jax.Array) -> Any:
        (out, lse), pullback = jax.vjp(attend, *x)
        return out, lse, *pullback((jnp.sin(out), jnp.cos(lse)))

    got = jax.jit(both)(q, k, v, bias)
    want = jax.jit(both)(q[None], k[None], v[None], bias[None])
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w[0])


def test_J08_leading_axes_are_folded(backend: str) -> None:
    q, k, v = (normal(i, 2, 3, 5, 2, 4) for i in range(3))
    lengths = jnp.asarray([[5, 2, 0], [1, 5, 3]], jnp.int32)
    attend = functools.partial(jattn.dot_product_attention, implementation=backend)
    got = attend(q, k, v, key_value_seq_lengths=lengths)
    want = attend(
        *(x.reshape(6, 5, 2, 4) for x in (q, k, v)), key_value_seq_lengths=lengths.reshape(6)
    )
    np.testing.assert_array_equal(got, want.reshape(2, 3, 5, 2, 4))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_J09_grouped_heads_equal_repeated_ones(kv_heads: int, backend: str) -> None:
    q, k, v = (normal(i, 2, 20, heads, 8) for i, heads in ((1, 4), (2, kv_heads), (3, kv_heads)))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, repeats: int) -> jax.Array:
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
        return jnp.sin(
            jattn.dot_product_attention(q, k, v, is_causal=True, implementation=backend)
        ).sum()

    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), static_argnums=3)
    got, want = gradients(q, k, v, 1), gradients(q, k, v, 4 // kv_heads)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


@pytest.mark.backends("xla", "cpu")
def test_J10_decoding_equals_the_causal_pass(backend: str) -> None:
    """One query against a growing prefix; by slices, by lengths of a full cache, and by the lower-right alignment."""
    length = 4  # each prefix is a shape of its own to compile
    q, k, v = (normal(i, 2, length, heads, 16) for i, heads in ((1, 4), (2, 2), (3, 2)))
    attend = functools.partial(jattn.dot_product_attention, implementation=backend)
    want = attend(q, k, v, is_causal=True)
    cached = jax.jit(lambda q, count: attend(q, k, v, key_value_seq_lengths=count))
    for t in range(length):
        query = q[:, t : t + 1]
        prefix = (k[:, : t + 1], v[:, : t + 1])
        for got in (
            attend(query, *prefix),
            attend(query, *prefix, is_causal=True, causal_alignment="lower_right"),
            cached(query, jnp.full(2, t + 1, jnp.int32)),
        ):
            np.testing.assert_allclose(got, want[:, t : t + 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["mask", "bias", "lengths", "segments", "lower_right", "window"])
def test_J11_rows_without_keys(how: str, backend: str) -> None:
    """out 0, lse -inf, every gradient 0, whatever hides the keys; the other rows are untouched by it."""
    q, k, v = normal(1, 2, 6, 2, 8), normal(2, 2, 4, 2, 8), normal(3, 2, 4, 2, 8)
    empty = np.zeros((2, 6), bool)
    empty[:, :2] = True
    hidden = jnp.asarray(~empty)[:, None, :, None] & jnp.ones((1, 1, 1, 4), bool)
    ids = jnp.where(jnp.asarray(empty), 7, 0)
    keywords: dict[str, Any] = {
        "mask": {"mask": hidden},
        "bias": {"bias": jnp.where(hidden, 0.0, -jnp.inf)},
        "lengths": {"key_value_seq_lengths": jnp.asarray([0, 4], jnp.int32)},
        "segments": {
            "query_segment_ids": ids,
            "key_value_segment_ids": jnp.zeros((2, 4), jnp.int32),
        },
        "lower_right": {"is_causal": True, "causal_alignment": "lower_right"},
        "window": {"local_window_size": (0, 0), "causal_alignment": "lower_right"},
    }[how]
    if how == "lengths":
        empty[0], empty[1] = True, False

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: Any) -> Any:
        named = {name: x for name, x in keywords.items() if name != "bias"}
        return jattn.dot_product_attention(
            q, k, v, bias, implementation=backend, return_lse=True, **named
        )

    (out, lse), pullback = jax.vjp(attend, q, k, v, keywords.get("bias"))
    dq, dk, dv, dbias = pullback((jnp.ones_like(out), jnp.ones_like(lse)))
    assert (np.asarray(out)[empty] == 0).all()
    assert np.isneginf(np.asarray(lse)[empty]).all()
    assert (np.asarray(dq)[empty] == 0).all()
    assert np.isfinite(np.asarray(lse)[~empty]).all()
    assert all(np.isfinite(np.asarray(x)).all() for x in (out, dq, dk, dv))
    assert np.abs(np.asarray(out)[~empty]).min(axis=-1).all()
    if how == "lengths":
        assert not np.asarray(dk)[0].any()
        assert not np.asarray(dv)[0].any()
    if dbias is not None:
        assert (np.asarray(dbias)[:, :, :2] == 0).all()
        assert np.isfinite(np.asarray(dbias)).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"local_window_size": 2},
        {"local_window_size": (1, 3)},
        {"is_causal": True, "local_window_size": (3, 0)},
        {"bias": True},
        {"mask": True, "is_causal": True},
        {"bias": True, "mask": True, "return_residual": True},
        {"key_value_seq_lengths": jnp.asarray([7, 3], jnp.int32)},
        {
            "query_seq_lengths": jnp.asarray([7, 3], jnp.int32),
            "key_value_seq_lengths": jnp.asarray([7, 3], jnp.int32),
        },
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_J12_agrees_with_jax_nn(options: dict[str, Any], backend: str) -> None:
    """The same call, argument by argument, wherever every row sees a key."""
    q, k, v = normal(1, 2, 7, 4, 8), normal(2, 2, 7, 2, 8), normal(3, 2, 7, 2, 8)
    mask = bernoulli(4, 0.5, 2, 4, 7, 7) | jnp.eye(7, dtype=bool)
    arrays = {"bias": normal(5, 1, 4, 7, 7), "mask": mask}
    keywords = {name: arrays.get(name, value) for name, value in options.items()}
    got = jattn.dot_product_attention(q, k, v, implementation=backend, **keywords)
    want = jax.nn.dot_product_attention(q, k, v, **keywords)
    rows = np.ones((2, 7), bool)
    if "query_seq_lengths" in options:
        rows = np.arange(7)[None] < np.asarray(options["query_seq_lengths"])[:, None]
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.shape == w.shape
        assert g.dtype == w.dtype
        np.testing.assert_allclose(np.asarray(g)[rows], np.asarray(w)[rows], rtol=2e-5, atol=2e-5)


def test_J13_lse_and_its_gradient(backend: str) -> None:
    """(B, T, N), float32, natural logarithm, scale and masks included; its gradient alone is p k and p q."""
    q, k, v = normal(1, 2, 9, 4, 8), normal(2, 2, 11, 2, 8), normal(3, 2, 11, 2, 8)
    attend = functools.partial(
        jattn.dot_product_attention,
        is_causal=True,
        scale=-0.7,
        implementation=backend,
        return_lse=True,
    )
    lse = jax.jit(attend)(q, k, v)[1]
    assert lse.shape == (2, 9, 4)
    assert lse.dtype == jnp.float32
    wide_q, wide_k = np.asarray(q, np.float64), np.repeat(np.asarray(k, np.float64), 2, axis=2)
    s = -0.7 * np.einsum("btnd,bsnd->btns", wide_q, wide_k)
    s = np.where(np.arange(11)[None, None, None] <= np.arange(9)[None, :, None, None], s, -np.inf)
    want = np.log(np.exp(s).sum(axis=3))
    np.testing.assert_allclose(lse, want, rtol=1e-6, atol=1e-6)
    p = np.exp(s - want[..., None])
    dq, dk, dv = jax.jit(jax.grad(lambda *x: attend(*x)[1].sum(), argnums=(0, 1, 2)))(q, k, v)
    np.testing.assert_allclose(
        dq, -0.7 * np.einsum("btns,bsnd->btnd", p, wide_k), rtol=1e-5, atol=1e-5
    )
    want_dk = -0.7 * np.einsum("btns,btnd->bsnd", p, wide_q).reshape(2, 11, 2, 2, 8).sum(axis=3)
    np.testing.assert_allclose(dk, want_dk, rtol=1e-5, atol=1e-5)
    assert not np.asarray(dv).any()


def test_J13_return_residual_has_no_gradient(backend: str) -> None:
    x = normal(1, 1, 5, 2, 8, dtype="bfloat16")
    attend = functools.partial(
        jattn.dot_product_attention, implementation=backend, return_residual=True
    )
    out, residual = attend(x, x, x)
    assert residual.shape == (1, 5, 2)
    assert residual.dtype == out.dtype == jnp.bfloat16
    assert not np.asarray(jax.grad(lambda q: attend(q, x, x)[1].astype("float32").sum())(x)).any()


def resident_bytes() -> int:
    """The memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.backends("xla", "cpu")
def test_J14_repeated_calls_keep_no_memory(backend: str) -> None:
    q = normal(1, 2, 256, 4, 64)

    @jax.jit
    def step(q: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = functools.partial(
            jattn.dot_product_attention, is_causal=True, implementation=backend
        )
        return jax.value_and_grad(lambda q: total(q, q, q).sum())(q)

    def run(times: int) -> None:
        for _ in range(times):
            jax.block_until_ready(step(q))
        gc.collect()

    run(3)
    arrays, resident = len(jax.live_arrays()), resident_bytes()
    run(50)
    assert len(jax.live_arrays()) == arrays
    # One call's buffers together are 5 MiB: leaking any one of them 50 times would show.
    assert resident_bytes() - resident < 25 * 2**20
