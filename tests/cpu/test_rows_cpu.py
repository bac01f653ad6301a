"""Acceptance rows T052 to T060 on the CPU: against the reference and the float64 oracle."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import normal
from jax.test_util import check_grads

import jattn
from jattn.testing import cases, inputs, oracle
from jattn.testing.cases import Case
from jattn.testing.run import verify

DTYPES = ("float64", "float32", "bfloat16", "float16")
# Of the CPU kernel against the reference; those against float64 come from types and lengths.
CPU_TOLERANCE = {
    "float64": (5e-6, 1e-5),
    "float32": (5e-6, 1e-5),
    "bfloat16": (5e-2, 5e-2),
    "float16": (1e-2, 1e-2),
}


def packed_attention(packed: jax.Array, num_heads: int, **keywords: Any) -> jax.Array:
    """Attention of q, k, v split from one (B, T, 3 * N * D) projection."""
    batch, length, width = packed.shape
    q, k, v = (x.reshape(batch, length, num_heads, -1) for x in jnp.split(packed, 3, axis=-1))
    assert q.shape[-1] * num_heads * 3 == width
    return jattn.dot_product_attention(q, k, v, **keywords)  # type: ignore[return-value]


@pytest.mark.parametrize("contiguous", [True, False])
def test_T052_gradcheck_through_a_packed_projection(contiguous: bool, backend: str) -> None:
    with jax.enable_x64(True):
        packed = normal(0, 4, 4, 3 * 2 * 16, dtype="float64")

        def function(packed: jax.Array) -> jax.Array:
            packed = packed if contiguous else packed.swapaxes(0, 1)
            return packed_attention(packed, 2, implementation=backend)

        check_grads(jax.jit(function), (packed,), order=1, modes=("rev",))


@pytest.mark.parametrize("dtype", DTYPES)
def test_T053_choice_on_cpu(dtype: str) -> None:
    """The CPU kernel in all four types, with dropout too."""
    with jax.enable_x64(dtype == "float64"):
        x = jax.ShapeDtypeStruct((2, 128, 8, 64), dtype)
        for options in ({}, {"dropout_rate": 0.7, "dropout_seed": 1}):
            for needs_grad in (False, True):
                chosen = jattn.select_backend(
                    x, x, x, device=jattn.Device("cpu"), needs_grad=needs_grad, **options
                )
                assert chosen == "cpu"
        with pytest.raises(TypeError, match="dropout_p"):
            jattn.select_backend(x, x, x, dropout_p=0.7)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "head_dim"), [(267, 8), (267, 16), (1030, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_T054_cpu_kernel_against_the_reference(
    dtype: str, length: int, head_dim: int, is_causal: bool
) -> None:
    """Short list: batch 2, 3 heads, one head dim at length 1030. Training and evaluation are two halves of one test."""
    with jax.enable_x64(dtype == "float64"):
        # 16-bit references run in float32 and are compared in it.
        wide = "float64" if dtype == "float64" else "float32"
        packed = normal(length, 2, length, 3 * 3 * head_dim, dtype=dtype)

        def forward_backward(backend: str, packed: jax.Array) -> tuple[jax.Array, jax.Array]:
            attend = functools.partial(
                packed_attention, num_heads=3, is_causal=is_causal, implementation=backend
            )
            out, pullback = jax.vjp(attend, packed)
            return out, pullback(jnp.ones_like(out))[0]

        out, grad = jax.jit(functools.partial(forward_backward, "cpu"))(packed)
        want_out, want_grad = jax.jit(functools.partial(forward_backward, "reference"))(
            packed.astype(wide)
        )
        rtol, atol = CPU_TOLERANCE[dtype]
        np.testing.assert_allclose(np.asarray(out, wide), want_out, rtol=rtol, atol=atol)
        np.testing.assert_allclose(np.asarray(grad, wide), want_grad, rtol=rtol, atol=atol)
        alone = jax.jit(
            functools.partial(
                packed_attention, num_heads=3, is_causal=is_causal, implementation="cpu"
            )
        )
        np.testing.assert_array_equal(alone(packed), out)


# {T, 1} x {S, 1} and {B, 1} x {N, 1} x {T, 1} x {S, 1}: the twenty mask shapes of T055.
MASK_FORMS = tuple(
    map(
        "".join,
        itertools.chain(itertools.product("t1", "s1"), itertools.product("b1", "n1", "t1", "s1")),
    )
)


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("kind", ["bias", "mask"])
@pytest.mark.parametrize(("i", "form"), list(enumerate(MASK_FORMS)), ids=str)
def test_T055_every_mask_shape(i: int, form: str, kind: str, backend: str) -> None:
    """The types take turns over the shapes; a float mask's gradient is compared too."""
    dtype = ("float32", "bfloat16", "float16")[i % 3]
    case = Case(
        name=f"T055-{kind}-{form}",
        q_len=267,
        kv_len=514,
        num_heads=3,
        num_kv_heads=3,
        head_dim=8,
        head_dim_v=8,
        dtype=dtype,
        bias_form=form if kind == "bias" else None,
        mask_form=form if kind == "mask" else None,
    )
    verify(case, backend)


@pytest.mark.parametrize("form", ["ts", "b1t1"])
def test_T055_float64(form: str, backend: str) -> None:
    case = Case(
        name=f"T055-float64-{form}", q_len=37, kv_len=54, num_heads=3, num_kv_heads=3, head_dim=8, head_dim_v=8,
        dtype="float64", bias_form=form, mask_form=form,
    )  # fmt: skip
    verify(case, backend)


def test_T056_banded_minus_infinity(backend: str) -> None:
    """Each row sees at most 10 keys, so whole tiles are -inf before the first visible key (and after)."""
    t, j = np.arange(600)[:, None], np.arange(600)[None]
    bias = jnp.asarray(np.where((j > t) | (j <= t - 10), -np.inf, 0.0), jnp.float32)
    q, k, v = (normal(i, 1, 600, 2, 8) for i in range(3))
    attend = functools.partial(jattn.dot_product_attention, q, k, v)
    want = attend(bias, implementation="reference")
    assert np.isfinite(np.asarray(want)).all()
    for keywords in (
        {"bias": bias},
        {"is_causal": True, "local_window_size": (9, 0)},
        {"mask": bias == 0},
    ):
        got = attend(implementation=backend, **keywords)
        np.testing.assert_allclose(got, want, rtol=1.3e-6, atol=1e-5)


def test_T057_negative_scale_of_the_seed(backend: str) -> None:
    x = normal(1, 1, 64, 3, 64)
    heads = np.asarray(x, np.float64).transpose(0, 2, 1, 3)
    s = heads @ heads.swapaxes(2, 3) / -0.0001
    weights = np.exp(s - s.max(axis=3, keepdims=True))
    want = (weights / weights.sum(axis=3, keepdims=True)) @ heads
    got = jattn.dot_product_attention(x, x, x, scale=-1 / 0.0001, implementation=backend)
    np.testing.assert_allclose(np.asarray(got).transpose(0, 2, 1, 3), want, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("scale", [-10000.0, -0.5, 0.0])
def test_T057_negative_and_zero_scale(scale: float, backend: str) -> None:
    case = Case(
        name=f"T057-{scale:g}",
        batch=1,
        num_heads=3,
        num_kv_heads=3,
        dtype="bfloat16",
        scale=scale,
        is_causal=True,
    )
    verify(case, backend)


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("case", cases.tagged("T058"), ids=str)
def test_T058_mask_variants(case: Case, backend: str) -> None:
    verify(case, backend)


@pytest.mark.parametrize("case", cases.tagged("T059"), ids=str)
def test_T059_odd_key_lengths_with_a_mask(case: Case, backend: str) -> None:
    verify(case, backend)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_T060_broadcast_mask(dtype: str, backend: str) -> None:
    """A (1, 1, 1, S) bias equals its broadcast to (B, N, T, S), and its gradient is the sum of that one's."""
    q, k, v = (normal(i, 2, length, 2, 16, dtype=dtype) for i, length in ((1, 8), (2, 16), (3, 16)))
    row = normal(4, 1, 1, 1, 16, dtype=dtype)
    whole = jnp.broadcast_to(row, (2, 2, 8, 16))

    @jax.jit
    def out_and_grad(bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        attend = functools.partial(jattn.dot_product_attention, q, k, v, implementation=backend)
        out, pullback = jax.vjp(attend, bias)
        return out, pullback(jnp.cos(jnp.arange(out.size, dtype=dtype)).reshape(out.shape))[0]

    out, grad = out_and_grad(row)
    want_out, want_grad = out_and_grad(whole)
    np.testing.assert_array_equal(out, want_out)
    assert grad.shape == row.shape
    summed = np.asarray(want_grad, np.float64).sum(axis=(0, 1, 2))
    # Each of the 32 summed entries was rounded to the type once.
    unit = 2.0**-24 if dtype == "float32" else 2.0**-11
    limit = 4 * unit * np.abs(np.asarray(want_grad, np.float64)).sum(axis=(0, 1, 2)) + 1e-7
    assert (np.abs(np.asarray(grad, np.float64)[0, 0, 0] - summed) <= limit).all()


def test_T062_keys_shared_by_all_heads(backend: str) -> None:
    q = normal(1, 3, 1, 16, 128)
    k, v = (jnp.broadcast_to(normal(i, 3, 14, 1, 128), (3, 14, 16, 128)) for i in (2, 3))
    bias = normal(4, 3, 1, 1, 14)
    attend = functools.partial(jattn.dot_product_attention, q, k, v, implementation=backend)
    whole = attend(jnp.broadcast_to(bias, (3, 16, 1, 14)))
    np.testing.assert_allclose(attend(bias), whole, rtol=0, atol=1e-6)


def test_T063_head_dim_1(backend: str) -> None:
    q = jnp.asarray([[[[1.0]], [[2.0]]]], "float16")
    v = jnp.full((1, 1, 1, 1), 3.0, "float16")
    assert (np.asarray(jattn.dot_product_attention(q, v, v, implementation=backend)) == 3.0).all()


@pytest.mark.backends("reference", "cpu")
@pytest.mark.parametrize("mask_rank", [None, 2, 3, 4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_T019_against_the_plain_formula(
    rank: int, is_causal: bool, mask_rank: int | None, dtype: str, backend: str
) -> None:
    """The op against an independent numpy formula. Mask and is_causal both apply."""
    case = Case(
        name=f"T019-{rank}-{mask_rank}-{is_causal}-{dtype}",
        batch=5 if rank == 4 else 1,
        q_len=4,
        kv_len=3,
        num_heads=2,
        head_dim=6,
        head_dim_v=6,
        dtype=dtype,
        is_causal=is_causal,
        mask_form={None: None, 2: "ts", 3: "nts", 4: "bnts"}[mask_rank],
    )
    operands = inputs.make(case)
    want = oracle.solve(case, operands)
    with jax.enable_x64(dtype == "float64"):
        lead = 0 if rank == 3 else slice(None)
        q, k, v = (jnp.asarray(x[lead]) for x in (operands.q, operands.k, operands.v))
        mask = (
            None
            if operands.mask is None
            else jnp.asarray(operands.mask if mask_rank != 4 else operands.mask[lead])
        )
        attend = functools.partial(
            jattn.dot_product_attention, mask=mask, is_causal=is_causal, implementation=backend
        )
        got = np.asarray(attend(q, k, v))
        tolerance = (
            {"rtol": 1.3e-6, "atol": 1e-5} if dtype == "float32" else {"rtol": 1e-7, "atol": 1e-7}
        )
        np.testing.assert_allclose(got, want.out.astype(dtype)[lead], **tolerance)
        assert np.isfinite(got).all()
        if mask is None and dtype == "float64":
            check_grads(jax.jit(attend), (q, k, v), order=1, modes=("rev",))


@pytest.mark.backends("reference", "cpu")
@pytest.mark.parametrize(
    ("rank", "mask_rank", "is_causal"),
    [(3, None, False), (3, 2, True), (3, 3, False), (4, None, False), (4, 2, False), (4, 4, True)],
)
@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_T019_with_dropout(
    rate: float, rank: int, mask_rank: int | None, is_causal: bool, backend: str
) -> None:
    """The plain formula with the keep-mask put in; without a mask its gradients numerically too."""
    case = Case(
        name=f"T019-{rank}-{mask_rank}-{is_causal}-{rate}",
        batch=5 if rank == 4 else 1,
        q_len=4,
        kv_len=3,
        num_heads=2,
        head_dim=6,
        head_dim_v=6,
        dtype="float64",
        is_causal=is_causal,
        mask_form={None: None, 2: "ts", 3: "nts", 4: "bnts"}[mask_rank],
        dropout_rate=rate,
    )
    operands = inputs.make(case)
    want = oracle.solve(case, operands)
    kept = np.asarray(
        jattn.dropout_mask(
            operands.dropout_seed, operands.dropout_offset, (case.batch, 2, 4, 3), rate
        )
    )
    np.testing.assert_array_equal(kept, want.z > 0)
    with jax.enable_x64(True):
        lead = 0 if rank == 3 else slice(None)
        q, k, v = (jnp.asarray(x[lead]) for x in (operands.q, operands.k, operands.v))
        mask = None if operands.mask is None else operands.mask
        attend = functools.partial(
            jattn.dot_product_attention,
            mask=None if mask is None else jnp.asarray(mask if mask_rank != 4 else mask[lead]),
            is_causal=is_causal,
            implementation=backend,
            dropout_rate=rate,
            dropout_seed=operands.dropout_seed,
            dropout_offset=operands.dropout_offset,
        )
        got = np.asarray(jax.jit(attend)(q, k, v))
        np.testing.assert_allclose(got, want.out.astype(np.float64)[lead], rtol=1e-7, atol=1e-7)
        if mask is None and (backend == "cpu" or (rank, rate) == (4, 0.2)):
            check_grads(jax.jit(attend), (q, k, v), order=1, modes=("rev",))
