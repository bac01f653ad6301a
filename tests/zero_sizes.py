"""Calls with axes of zero elements: empty results, or rows that see no key. Shared by the tiers of CPU and GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn

Sizes = tuple[int, int, int, int, int]

# Batch, queries, keys, heads, key/value heads.
SIZES: tuple[Sizes, ...] = (
    (0, 4, 5, 2, 2),
    (2, 0, 5, 2, 1),
    (2, 4, 0, 2, 2),
    # Several blocks of queries, or of heads of a group, that share keys.
    (1, 200, 0, 2, 2),
    (1, 1, 0, 300, 1),
    (2, 0, 0, 2, 2),
    (2, 4, 5, 0, 2),
    (2, 4, 5, 0, 0),
)


def check(backend: str, dtype: str, sizes: Sizes) -> None:
    """Values, shapes, and gradients in the shapes of their primals, a bias among them."""
    batch, q_len, kv_len, heads, kv_heads = sizes
    q, k, v = (
        jnp.ones((batch, q_len, heads, 8), dtype),
        jnp.ones((batch, kv_len, kv_heads, 8), dtype),
        jnp.ones((batch, kv_len, kv_heads, 6), dtype),
    )
    mask = {"mask": jnp.ones((1, 1, q_len, kv_len), bool)}
    segments = {
        "query_segment_ids": jnp.zeros((batch, q_len), jnp.int32),
        "key_value_segment_ids": jnp.zeros((batch, kv_len), jnp.int32),
        "is_causal": True,
        "causal_alignment": "lower_right",
    }
    problems: dict[str, tuple[jax.Array | None, dict[str, Any]]] = {
        "plain": (None, {}),
        "bias": (jnp.ones((1, 1, q_len, kv_len), dtype), {}),
        "mask and bias of keys": (jnp.ones((batch, heads, 1, kv_len)), mask),
        "segments and bias of queries": (jnp.ones((1, 1, q_len, 1)), segments),
    }
    everything = {
        **mask,
        **segments,
        "local_window_size": (3, 2),
        "query_seq_lengths": jnp.full(batch, q_len),
        "key_value_seq_lengths": jnp.full(batch, kv_len),
        "query_positions": jnp.zeros((batch, q_len), jnp.int32),
        "key_value_positions": jnp.zeros((batch, kv_len), jnp.int32),
        "sinks": jnp.ones(heads),
        "alibi_slopes": jnp.ones(heads),
        "dropout_rate": 0.5,
        "dropout_seed": 1,
    }
    del everything["causal_alignment"]  # which positions do not have
    problems["everything"] = (jnp.ones((1, heads, 1, kv_len), dtype), everything)
    for name, (bias, arguments) in problems.items():
        attend = functools.partial(
            jattn.dot_product_attention, implementation=backend, return_lse=True, **arguments
        )
        _check_one(attend, (q, k, v, bias), f"{sizes} {name}")


# Rows of queries and of keys, of which three sequences have none.
RAGGED: tuple[tuple[int, int], ...] = ((0, 0), (0, 7), (5, 0), (5, 7))


def check_ragged(backend: str, dtype: str, rows: tuple[int, int]) -> None:
    """Arrays without rows, or of rows that belong to no sequence; with what needs ids and places of rows."""
    offsets = jnp.zeros(4, jnp.int32)
    q, k, v = (
        jnp.ones((count, 2, width), dtype)
        for count, width in ((rows[0], 8), (rows[1], 8), (rows[1], 6))
    )

    for options in (
        {},
        {"is_causal": True, "sinks": jnp.ones(2)},
        {"dropout_rate": 0.5, "dropout_seed": 1},
    ):

        @jax.jit
        def both(*values: Any, options: Any = options) -> Any:
            def attend(*values: Any) -> Any:
                arrays = [jattn.RaggedArray(x, offsets, None, 4) for x in values]
                return jattn.ragged_dot_product_attention(
                    *arrays, implementation=backend, **options
                ).values

            out, pullback = jax.vjp(attend, *values)
            return out, *pullback(jnp.ones_like(out))

        out, *gradients = both(q, k, v)
        assert out.shape == (rows[0], 2, 6), options
        assert not np.asarray(out).any(), options
        for gradient, x in zip(gradients, (q, k, v), strict=True):
            assert gradient.shape == x.shape, options
            assert not np.asarray(gradient).any(), options


def _check_one(attend: Any, primals: tuple[Any, ...], what: str) -> None:
    @jax.jit
    def both(*x: Any) -> Any:
        results, pullback = jax.vjp(attend, *x)
        return results, pullback(jax.tree.map(jnp.ones_like, results))

    (out, lse), grads = both(*primals)
    q, k, v, _ = primals
    assert out.shape == (*q.shape[:3], v.shape[3]), what
    assert lse.shape == q.shape[:3], what
    if k.shape[1] == 0:
        assert not np.asarray(out).any(), what
        assert np.isneginf(np.asarray(lse)).all(), what
    for grad, primal in zip(grads, primals, strict=True):
        if primal is None:
            continue
        assert grad.shape == primal.shape, what
        if 0 in (*q.shape, *k.shape):
            assert not np.asarray(grad).any(), what
