"""Memory is linear in the lengths: by the compiler's own account of temporaries."""

import functools

import jax
import pytest

import jattn

LENGTH = 16_384
LIMIT_BYTES = 64 * 2**20


@pytest.mark.backends("xla", "cpu")
@pytest.mark.parametrize("kind", ["full", "causal", "segments", "dropout"])
def test_temporaries_of_a_long_gradient(kind: str, backend: str) -> None:
    """T = S = 16384, one head, float32: the scores alone would be 1 GiB; forward and backward stay below 64 MiB."""
    x = jax.ShapeDtypeStruct((1, LENGTH, 1, 64), "float32")
    ids = jax.ShapeDtypeStruct((1, LENGTH), "int32")
    attend = functools.partial(
        jattn.dot_product_attention,
        is_causal=kind == "causal",
        implementation=backend,
        **({"dropout_rate": 0.1, "dropout_seed": 1} if kind == "dropout" else {}),
    )

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return attend(q, k, v, segment_ids=ids if kind == "segments" else None).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x, ids).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert 0 < analysis.temp_size_in_bytes < LIMIT_BYTES


def test_temporaries_of_slopes_and_sinks() -> None:
    """Their gradients are formed beside the kernels, in blocks."""
    x = jax.ShapeDtypeStruct((1, LENGTH, 1, 64), "float32")
    per_head = jax.ShapeDtypeStruct((1,), "float32")

    def loss(q: jax.Array, slopes: jax.Array, sinks: jax.Array) -> jax.Array:
        out = jattn.dot_product_attention(
            q, q, q, is_causal=True, alibi_slopes=slopes, sinks=sinks, implementation="cpu"
        )
        return out.sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, per_head, per_head).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert 0 < analysis.temp_size_in_bytes < 2 * LIMIT_BYTES


def test_temporaries_of_gradients_of_captures() -> None:
    """Several sums for each element of a table by distance; no array of pairs."""
    x = jax.ShapeDtypeStruct((1, LENGTH, 1, 64), "float32")
    table = jax.ShapeDtypeStruct((LENGTH,), "float32")

    def loss(table: jax.Array, q: jax.Array) -> jax.Array:
        out = jattn.dot_product_attention(
            q, q, q, is_causal=True, score_mod=lambda s, b, h, q, k: s + table[abs(q - k)]
        )
        return out.sum()

    analysis = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(table, x).compile().memory_analysis()
    assert analysis is not None
    assert 0 < analysis.temp_size_in_bytes < LIMIT_BYTES


def test_temporaries_of_a_ragged_batch() -> None:
    """16384 rows in 300 sequences, with dropout: nothing grows with rows times rows, or with the longest sequence."""
    rows = jax.ShapeDtypeStruct((LENGTH, 1, 64), "float32")
    offsets = jax.ShapeDtypeStruct((301,), "int32")

    def loss(rows: jax.Array, offsets: jax.Array) -> jax.Array:
        x = jattn.RaggedArray(rows, offsets)
        out = jattn.ragged_dot_product_attention(
            x, x, x, is_causal=True, dropout_rate=0.1, dropout_seed=1, implementation="cpu"
        )
        return out.values.sum()

    analysis = jax.jit(jax.grad(loss)).lower(rows, offsets).compile().memory_analysis()
    assert analysis is not None
    assert 0 < analysis.temp_size_in_bytes < LIMIT_BYTES


@pytest.mark.parametrize("transformation", ["jvp", "hvp"])
def test_temporaries_of_forward_mode_and_second_order(transformation: str) -> None:
    """What the blocked rules serve for the fused backends is linear too."""
    x = jax.ShapeDtypeStruct((1, LENGTH, 1, 64), "float32")

    def total(q: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(q, q, q, is_causal=True, implementation="cpu").sum()

    def function(q: jax.Array) -> jax.Array:
        derivative = total if transformation == "jvp" else jax.grad(total)
        return jax.jvp(derivative, (q,), (q,))[1]

    analysis = jax.jit(function).lower(x).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 2 * LIMIT_BYTES
