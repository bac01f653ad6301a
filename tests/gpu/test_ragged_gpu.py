"""Ragged batches on the GPU: the problems of tests/cpu/test_ragged.py, every sequence against the float64 oracle."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_checks import FEATURES, R100, T079, RaggedCase, drawn_lengths, run, verify

import jattn
from jattn import RaggedArray

attend: Callable[..., Any] = jattn.ragged_dot_product_attention
BACKENDS = ("mem_efficient", "flash")


def on_backends(cases: list[RaggedCase], every: int) -> list[Any]:
    """Every n-th case, and the rest under --full. float32 runs on mem_efficient alone."""
    return [
        pytest.param(
            backend, case, marks=() if i % every == 0 else pytest.mark.full, id=f"{backend}-{case}"
        )
        for backend in BACKENDS
        for i, case in enumerate(x for x in cases if backend != "flash" or x.dtype != "float32")
    ]


@pytest.mark.parametrize(("backend", "case"), on_backends(R100, 3))
def test_R100_R101_sequences_equal_the_oracle(backend: str, case: RaggedCase) -> None:
    verify(case, backend)


HALF = [case.but("bf16", dtype="bfloat16") for case in FEATURES if case.dtype == "float32"]


@pytest.mark.parametrize(("backend", "case"), on_backends([*FEATURES, *HALF], 1))
def test_R103_R104_features(backend: str, case: RaggedCase) -> None:
    """NaN in holes and beyond the end throughout."""
    verify(case, backend)


@pytest.mark.parametrize(
    ("backend", "case"),
    on_backends([*T079, *(case.but("dropout", dropout_rate=0.1) for case in T079)], 9),
)
def test_T079_R106_gradients_of_ragged_batches(backend: str, case: RaggedCase) -> None:
    verify(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("row", "length"), [("T076", 1), ("T049", 0)])
def test_T049_T076_R102_sequences_of_length_0_and_1(backend: str, row: str, length: int) -> None:
    lengths = list(drawn_lengths(row, 32, 1, 31))
    lengths[::3] = [length] * len(lengths[::3])
    case = RaggedCase(
        row, tuple(lengths), num_heads=16, num_kv_heads=16, head_dim=64, head_dim_v=64, dtype="float16"
    )  # fmt: skip
    verify(case, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_T064_T065_packed_projections(backend: str, kind: str) -> None:
    """q, k and v cut out of one array inside jit; values in [-3, 3), float16 against the float32 reference."""
    batch, length = 16, 8
    rng = np.random.default_rng(65)
    counts = np.full(batch, length) if kind == "dense" else rng.integers(1, length + 1, batch)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    packed = jnp.asarray(rng.uniform(-3, 3, (offsets[-1], 3, 4, 64)), jnp.float32)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def call(packed: jax.Array, backend: str, dtype: str) -> jax.Array:
        parts = [packed[:, i].astype(dtype) for i in range(3)]
        if kind == "dense":
            q, k, v = (x.reshape(batch, length, 4, 64) for x in parts)
            out = jattn.dot_product_attention(q, k, v, implementation=backend)
            return out.reshape(-1, 4, 64)
        x = RaggedArray(parts[0], jnp.asarray(offsets), None, length)
        return attend(  # type: ignore[no-any-return]
            x, x.with_values(parts[1]), x.with_values(parts[2]), implementation=backend
        ).values

    want = call(packed, "reference", "float32")
    got = np.asarray(call(packed, backend, "float16"), np.float32)
    np.testing.assert_allclose(got, want, rtol=7e-3, atol=7e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 27, 36, 63])
def test_T077_broadcasting(backend: str, bits: int) -> None:
    """One sequence or one head stands for all: the same bits as with the repetition written out."""
    q_batch, k_batch, v_batch, q_heads, k_heads, v_heads = (bool(bits >> i & 1) for i in range(6))
    batch, heads, head_dim_v = 32, 8, 32 if backend == "mem_efficient" else 64
    dtype = "float32" if backend == "mem_efficient" else "float16"
    rng = np.random.default_rng(77)
    q_lengths = np.full(1, 4) if q_batch else rng.integers(1, 32, batch)
    kv_lengths = np.full(batch, 3) if k_batch or v_batch else rng.integers(1, 32, batch)

    def ragged(lengths: Any, n: int, size: int) -> RaggedArray:
        values = jnp.asarray(rng.standard_normal((int(sum(lengths)), n, size)), dtype)
        offsets = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
        return RaggedArray(values, offsets, None, int(max(lengths)), int(min(lengths)))

    q = ragged(q_lengths, 1 if q_heads else heads, 64)
    k = ragged(kv_lengths[:1] if k_batch else kv_lengths, 1 if k_heads else heads, 64)
    v = ragged(kv_lengths[:1] if v_batch else kv_lengths, 1 if v_heads else heads, head_dim_v)
    count = max(x.num_sequences for x in (q, k, v))
    widest = max(x.values.shape[1] for x in (q, k, v))

    def repeated(x: RaggedArray) -> RaggedArray:
        times = count if x.num_sequences == 1 else 1
        rows = np.tile(np.asarray(x.values), (times, 1, 1))
        rows = np.broadcast_to(rows, (len(rows), widest, rows.shape[2]))
        lengths = np.tile(np.diff(np.asarray(x.offsets)), times)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return RaggedArray(jnp.asarray(rows), jnp.asarray(offsets, jnp.int32))

    call = jax.jit(functools.partial(attend, implementation=backend))
    got, want = call(q, k, v), call(*(repeated(x) for x in (q, k, v)))
    tolerance = (
        {"rtol": 1e-2, "atol": 1.5e-3} if dtype == "float16" else {"rtol": 1e-5, "atol": 1e-5}
    )
    np.testing.assert_allclose(
        np.asarray(got.values, np.float32), np.asarray(want.values, np.float32), **tolerance
    )


@pytest.mark.backends("mem_efficient")
def test_T078_dense_query() -> None:
    lengths = drawn_lengths("T078", 32, 1, 31)
    rng = np.random.default_rng(78)
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
    total = int(sum(lengths))
    q = jnp.asarray(rng.standard_normal((1, 1, 16, 64)), jnp.float32)
    k = RaggedArray(
        jnp.asarray(rng.standard_normal((total, 16, 64)), jnp.float32), offsets, None, 31
    )
    v = k.with_values(jnp.asarray(rng.standard_normal((total, 1, 96)), jnp.float32))
    call = jax.jit(attend, static_argnames="implementation")
    got = call(q, k, v, implementation="mem_efficient").values
    want = call(q, k, v, implementation="reference").values
    assert got.shape == (32, 16, 96)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_R105_packing_does_not_matter(backend: str) -> None:
    """At starts that are multiples of a tile, permuting sequences permutes results bitwise."""
    rng = np.random.default_rng(105)
    parts = [
        jnp.asarray(rng.standard_normal((n, 2, 64)), jnp.bfloat16) for n in (70, 3, 300, 256, 0)
    ]

    def solve(order: list[int]) -> list[Any]:
        x = RaggedArray.from_list([parts[i] for i in order], alignment=512)
        out = jax.jit(functools.partial(attend, is_causal=True, implementation=backend))(x, x, x)
        found = dict(zip(order, out.to_list(), strict=True))
        return [np.asarray(found[i], np.float32) for i in range(len(parts))]

    for a, b in zip(solve([0, 1, 2, 3, 4]), solve([4, 2, 3, 0, 1]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_R113_strict_determinism(backend: str) -> None:
    lengths = drawn_lengths("R113", 30, 0, 300)
    case = RaggedCase("R113", lengths, num_heads=4, head_dim=64, dtype="bfloat16", is_causal=True)
    with jattn.deterministic("strict"):
        first = run(case, backend)
        for _ in range(3):
            for name, x in run(case, backend).items():
                np.testing.assert_array_equal(x, first[name])
