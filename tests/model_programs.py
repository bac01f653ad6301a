"""Attention as families of models write it, for ``fuse_attention``: with sinks, with two products in the scores, with
scores in float32, with biases that are taken off.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from fusion_patterns import Array, close, found, missed, normal

import jattn

B, T, S, N, K, D = 2, 6, 9, 4, 2, 8
Q, KEYS, V = normal(B, T, N, D), normal(B, S, N, D, seed=1), normal(B, S, N, D, seed=2)
FEW_KEYS, FEW_V = normal(B, S, K, D, seed=3), normal(B, S, K, D, seed=4)
SINKS, BIAS = normal(N, seed=5), normal(1, N, T, S, seed=6)
Q_ROPE, K_ROPE = normal(B, T, N, 4, seed=7), normal(B, S, 4, seed=8)
MASK = jnp.asarray(np.random.default_rng(9).random((B, 1, T, S)) < 0.7).at[..., 0].set(True)
DISTANCE = jnp.arange(T, dtype=jnp.float32)[:, None] - jnp.arange(S)
SCALE = D**-0.5

Program = Callable[..., Array]


def scores_of(q: Array, k: Array) -> Array:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * SCALE


def weighted(p: Array, v: Array) -> Array:
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def columns(sinks: Array) -> Array:
    """(N,) or (B, N), a column for each row of scores."""
    return jnp.broadcast_to(jnp.atleast_2d(sinks)[:, :, None, None], (B, N, T, 1))


# ---- Sinks


def sink_in_the_last_column(q: Array, k: Array, v: Array, sinks: Array) -> Array:
    s = jnp.where(MASK, scores_of(q, k), -jnp.inf)
    p = jax.nn.softmax(jnp.concatenate([s, columns(sinks)], axis=-1), axis=-1)
    return weighted(p[..., :-1], v)


def sink_of_groups(q: Array, k: Array, v: Array, sinks: Array) -> Array:
    """The maximum is taken off twice."""
    s = jnp.einsum("bqkgd,bskd->bkgqs", q.reshape(B, T, K, N // K, D), k) * SCALE
    s = s + jnp.where(MASK[:, :, None], 0.0, -jnp.inf)
    column = jnp.broadcast_to(sinks.reshape(1, K, N // K, 1, 1), (*s.shape[:-1], 1))
    both = jnp.concatenate([s, column], axis=-1)
    p = jax.nn.softmax(both - both.max(-1, keepdims=True), axis=-1)[..., :-1]
    return jnp.einsum("bkgqs,bskd->bqkgd", p, v).reshape(B, T, N * D)


def sink_in_the_first_column(q: Array, k: Array, v: Array, sinks: Array) -> Array:
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    s = jnp.einsum("bqhd,bkhd->bqhk", q, k, preferred_element_type=jnp.float32) * SCALE
    both = jnp.concatenate([jnp.broadcast_to(sinks[:, None], (B, T, N, 1)), s], axis=-1)
    p = jax.nn.softmax(both, axis=-1)[..., 1:].astype(v.dtype)
    return jnp.einsum("bqhk,bkhd->bqhd", p, v)


def sink_in_the_sum(q: Array, k: Array, v: Array, sinks: Array) -> Array:
    s, sink = scores_of(q, k), sinks[:, None, None]
    shift = jax.lax.stop_gradient(jnp.maximum(s.max(-1, keepdims=True), sink))
    e = jnp.exp(s - shift)
    return weighted(e / (jnp.exp(sink - shift) + e.sum(-1, keepdims=True)), v)


def sink_in_the_sum_of_what_is_masked(q: Array, k: Array, v: Array, sinks: Array) -> Array:
    s, sink = scores_of(q, k), sinks[:, None, None]
    shift = s.max(-1, keepdims=True)
    e = jnp.where(MASK, jnp.exp(s - shift), 0)
    return weighted(e / (e.sum(-1, keepdims=True) + jnp.exp(sink - shift)), v)


def sink_in_the_divisor_of_the_result(q: Array, k: Array, v: Array, sinks: Array) -> Array:
    e = jnp.exp(scores_of(q, k))
    sums = e.sum(-1) + jnp.exp(sinks)[:, None]
    return weighted(e, v) / sums.swapaxes(1, 2)[..., None]


def one_in_the_sum(q: Array, k: Array, v: Array, _: Array) -> Array:
    e = jnp.exp(scores_of(q, k))
    return weighted(e / (1 + e.sum(-1, keepdims=True)), v)


def one_in_the_sum_of_what_is_shifted(q: Array, k: Array, v: Array, _: Array) -> Array:
    s = scores_of(q, k)
    shift = jnp.maximum(s.max(-1, keepdims=True), 0)
    e = jnp.exp(s - shift)
    return weighted(e / (e.sum(-1, keepdims=True) + jnp.exp(-shift)), v)


def sink_of_entries(q: Array, k: Array, v: Array, sinks: Array) -> Array:
    s = jnp.concatenate([scores_of(q, k), columns(jnp.stack([sinks, -sinks]))], axis=-1)
    return weighted(jax.nn.softmax(s, axis=-1)[..., :-1], v)


# ---- Two products in the scores


def rope_beside(q: Array, k: Array, v: Array, q_rope: Array, k_rope: Array) -> Array:
    """Each head of queries has a second part, and all heads of keys share theirs."""
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.einsum("bqhr,bkr->bhqk", q_rope, k_rope)
    p = jax.nn.softmax((s * 0.3 + jnp.where(MASK, 0, -jnp.inf)).astype(jnp.float32), axis=-1)
    return weighted(p.astype(q.dtype), v)


def rope_in_front(q: Array, k: Array, v: Array, q_rope: Array, k_rope: Array) -> Array:
    s = jnp.einsum("bqhr,bkr->bqhk", q_rope, k_rope) + jnp.einsum("bqhd,bkhd->bqhk", q, k)
    return jnp.einsum("bqhk,bkhd->bqhd", jax.nn.softmax(s * 0.3, axis=-1), v)


def rope_of_groups(q: Array, k: Array, v: Array, q_rope: Array, k_rope: Array) -> Array:
    q, q_rope = (x.reshape(B, T, K, N // K, x.shape[-1]) for x in (q, q_rope))
    k, v = k[:, :, :K], v[:, :, :K]
    s = jnp.einsum("bqkgd,bskd->bkgqs", q, k) + jnp.einsum("bqkgr,bsr->bkgqs", q_rope, k_rope)
    out = jnp.einsum("bkgqs,bskd->bqkgd", jax.nn.softmax(s * 0.3, axis=-1), v)
    return out.reshape(B, T, N, D)


def bias_of_a_product(q: Array, k: Array, v: Array, table: Array) -> Array:
    """One of the products is of the query and of what belongs to pairs: a bias."""
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) + jnp.einsum("bqhd,qkd->bhqk", q, table)
    return weighted(jax.nn.softmax(s * SCALE, axis=-1), v)


# ---- Biases and types


def bias_taken_off(q: Array, k: Array, v: Array, bias: Array) -> Array:
    s = (scores_of(q, k) - bias) * 1.5 - 1e9 * (1 - MASK.astype(jnp.float32))
    return weighted(jax.nn.softmax(s, axis=-1), v)


def scores_taken_off(q: Array, k: Array, v: Array, bias: Array) -> Array:
    return weighted(jax.nn.softmax((bias - scores_of(q, k)) * 0.5, axis=-1), v)


def scores_in_float32(q: Array, k: Array, v: Array, bias: Array) -> Array:
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    q, k = (x.astype(jnp.float32).swapaxes(1, 2) for x in (q, k))
    s = jnp.einsum("bhqd,bhkd->bhqk", q / np.float32(np.sqrt(D)), k) + bias
    return weighted(jax.nn.softmax(s, axis=-1).astype(v.dtype), v)


# ---- Windows of distances, and single queries


def distances(q: Array, k: Array, v: Array) -> Array:
    rows, columns = jnp.arange(T)[:, None], jnp.arange(S)
    return weighted(
        jax.nn.softmax(jnp.where(abs(rows - columns) <= 2, scores_of(q, k), -jnp.inf)), v
    )


def far_is_hidden(q: Array, k: Array, v: Array) -> Array:
    """The distance is there before the program is traced."""
    return weighted(jax.nn.softmax(jnp.where(jnp.abs(DISTANCE) > 3.0, -1e9, scores_of(q, k))), v)


def single_query(q: Array, k: Array, v: Array, bias: Array) -> Array:
    s = jnp.where(MASK[:, :, 0], jnp.einsum("bhd,bkhd->bhk", q[:, 0], k) * SCALE + bias, -jnp.inf)
    return jnp.einsum("bhk,bkhd->bhd", jax.nn.softmax(s), v)


def single_query_alone(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.softmax(k[0, :, 0] @ q[0, 0, 0]) @ v[0, :, 0]


PROGRAMS: dict[Program, tuple[str, tuple[Array, ...]]] = {
    sink_in_the_last_column: ("mask+sinks", (Q, KEYS, V, SINKS)),
    sink_of_groups: ("mask+sinks", (Q, FEW_KEYS, FEW_V, SINKS)),
    sink_in_the_first_column: ("sinks", (Q, KEYS, V, SINKS)),
    sink_in_the_sum: ("sinks", (Q, KEYS, V, SINKS)),
    sink_in_the_sum_of_what_is_masked: ("mask+sinks", (Q, KEYS, V, SINKS)),
    sink_in_the_divisor_of_the_result: ("sinks", (Q, KEYS, V, SINKS)),
    one_in_the_sum: ("sinks", (Q, KEYS, V, SINKS)),
    one_in_the_sum_of_what_is_shifted: ("sinks", (Q, KEYS, V, SINKS)),
    sink_of_entries: ("sinks", (Q, KEYS, V, SINKS)),
    rope_beside: ("mask", (Q, KEYS, V, Q_ROPE, K_ROPE)),
    rope_in_front: ("plain", (Q, KEYS, V, Q_ROPE, K_ROPE)),
    rope_of_groups: ("plain", (Q, KEYS, V, Q_ROPE, K_ROPE)),
    bias_of_a_product: ("bias", (Q, KEYS, V, normal(T, S, D, seed=10))),
    bias_taken_off: ("mask+bias", (Q, KEYS, V, BIAS)),
    scores_taken_off: ("bias", (Q, KEYS, V, BIAS)),
    scores_in_float32: ("bias", (Q, KEYS, V, BIAS)),
    distances: ("window", (Q, KEYS, V)),
    far_is_hidden: ("window", (Q, KEYS, V)),
    single_query: ("mask+bias", (Q, KEYS, V, normal(N, S, seed=11))),
    single_query_alone: ("plain", (Q, KEYS, V)),
}
IN_BFLOAT16 = (sink_in_the_first_column, scores_in_float32)


def check_program(program: Program) -> None:
    """It is found; result and gradients of all operands are those of what was written."""
    pattern, x = PROGRAMS[program]
    dtype = "bfloat16" if program in IN_BFLOAT16 else "float32"
    got, want = jax.jit(jattn.fuse_attention(program))(*x), program(*x)
    assert found() == [pattern]
    assert missed() == []
    assert got.dtype == want.dtype
    close(got, want, dtype)

    def loss(function: Program, *x: Array) -> Array:
        return jnp.sin(3 * function(*x).astype(jnp.float32)).sum()

    every = tuple(range(len(x)))
    ours, theirs = (
        jax.grad(lambda *x, f=f: loss(f, *x), every)(*x)
        for f in (jattn.fuse_attention(program), program)
    )
    for a, b in zip(ours, theirs, strict=True):
        size = max(1.0, float(jnp.abs(b).max()))
        close(a / size, b / size, dtype)
