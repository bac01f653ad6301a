"""What the tests of ``fuse_attention`` share: attention written in many ways, operands, and how results are compared.

The numbered patterns are those that other compilers look for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn

B, N, T, S, D, DV = 2, 4, 24, 20, 16, 12
KEEP = 0.75
Array = Any


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


def scores_of(q: Array, k: Array) -> Array:
    """In float32, of operands with heads behind the length."""
    return (q.swapaxes(1, 2) @ k.transpose(0, 2, 3, 1)).astype(jnp.float32) / 4.0


def by_logarithm(s: Array) -> Array:
    return jnp.exp(s - jax.nn.logsumexp(s, axis=-1, keepdims=True))


def divided_later(s: Array, v: Array, key: Array | None) -> Array:
    """Values with heads behind the length; the result has them in front of it."""
    e = jnp.exp(s - s.max(-1, keepdims=True))
    out = dropped(e, key).astype(v.dtype) @ v.swapaxes(1, 2)
    return (out / e.sum(-1, keepdims=True)).astype(v.dtype)


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
    "softcap": (
        "heads last",
        "softcap+bias",
        lambda q, k, v, m, c, key: (
            dropped(jax.nn.softmax(2 * jnp.tanh(scores_of(q, k) / 2) + m), key).astype(q.dtype)
            @ v.swapaxes(1, 2)
        ),
    ),
    "logsumexp": (
        "heads last",
        "mask",
        lambda q, k, v, m, c, key: (
            dropped(by_logarithm(jnp.where(c == 0, -jnp.inf, scores_of(q, k))), key).astype(q.dtype)
            @ v.swapaxes(1, 2)
        ),
    ),
    "divided later": (
        "heads last",
        "bias",
        lambda q, k, v, m, c, key: divided_later(scores_of(q, k) + m, v, key),
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


def attend(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.softmax(q @ transposed(k) / 4.0) @ v
