"""``fuse_attention`` finds attention with grouped heads whose scores, probabilities or results join the axes of
key/value heads and of groups, as models with fewer key/value heads are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusion_patterns import Array, close, dropped, found, missed, normal

import jattn

LOWEST = -2.3819763e38


pytestmark = pytest.mark.usefixtures("clean_fusion_log")


def grouped(q: Array, k: Array) -> Array:
    """(B, T, N, D) as (B, T, K, G, D)."""
    kv_heads = k.shape[2]
    return q.reshape(*q.shape[:2], kv_heads, q.shape[2] // kv_heads, q.shape[3])


def capped_behind_queries(q: Array, k: Array, v: Array, m: Array, b: Array) -> Array:
    """Heads are joined in scores (B, T, N, S), and parted in probabilities."""
    s = jnp.einsum("btkgd,bskd->btkgs", grouped(q, k) / 3, k)
    joint = 2 * jnp.tanh(s.reshape(*q.shape[:3], -1) / 2)
    p = jax.nn.softmax(jnp.where(m[:, :, None], joint, LOWEST), axis=-1)
    out = jnp.einsum("btkgs,bskd->btkgd", p.reshape(s.shape), v)
    return out.reshape(*q.shape[:3], -1)


def biased_in_front_of_queries(q: Array, k: Array, v: Array, m: Array, b: Array) -> Array:
    """The same in scores (B, N, T, S), to which a bias of every head is added."""
    s = jnp.einsum("btkgd,bskd->bkgts", grouped(q, k) / 3, k)
    joint = s.reshape(q.shape[0], q.shape[2], *s.shape[-2:]) + b
    p = jax.nn.softmax(jnp.where(m[:, None], joint, -jnp.inf)).reshape(s.shape)
    return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(*q.shape[:3], -1)


def divided_at_the_end(q: Array, k: Array, v: Array, m: Array, b: Array) -> Array:
    """Heads are joined in the result and in the sums that divide it."""
    s = jnp.einsum("btkgd,bskd->bkgts", grouped(q, k) / 3, k)
    s = jnp.where(m[:, None, None], s, -1e30)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    sums = jnp.moveaxis(e.sum(-1, keepdims=True), -2, 1).reshape(*q.shape[:3], 1)
    return jnp.einsum("bkgts,bskd->btkgd", e, v).reshape(*q.shape[:3], -1) / sums


def by_logarithm_of_joint_scores(q: Array, k: Array, v: Array, m: Array, b: Array) -> Array:
    """Heads are joined where the logarithm of the sum is taken off, which was made before."""
    s = jnp.einsum("btkgd,bskd->bkgts", grouped(q, k) / 3, k)
    joint = jnp.where(m[:, None], s.reshape(q.shape[0], q.shape[2], *s.shape[-2:]), -jnp.inf)
    log = jax.nn.logsumexp(joint, axis=-1).reshape(s.shape[:-1])
    p = jnp.exp(joint - log.reshape(*joint.shape[:-1], 1)).reshape(s.shape)
    return jnp.einsum("bkgts,bskd->btkgd", p, v)


Attention = Callable[[Array, Array, Array, Array, Array], Array]
# Name -> the pattern in the log, and attention of q (B, T, N, D), k, v (B, S, K, D), a mask (B, T, S) of bools and a
# bias (1, N, T, S).
JOINED: dict[str, tuple[str, Attention]] = {
    "softcap, queries first": ("softcap+mask", capped_behind_queries),
    "bias, heads first": ("mask+bias", biased_in_front_of_queries),
    "divided at the end": ("mask", divided_at_the_end),
    "logarithms": ("mask", by_logarithm_of_joint_scores),
}
# B, T, S, N, K, D: several key/value heads, one, as many as query heads; axes of size 1; all alike.
SHAPES = (
    (2, 7, 9, 6, 2, 8),
    (1, 7, 9, 6, 3, 8),
    (2, 7, 9, 4, 1, 8),
    (2, 7, 9, 4, 4, 8),
    (2, 1, 9, 4, 2, 8),
    (1, 1, 9, 4, 1, 8),
    (2, 7, 9, 1, 1, 8),
    (2, 5, 1, 4, 2, 8),
    (4, 4, 4, 4, 4, 4),
    (4, 4, 4, 16, 4, 4),
)


def operands(shape: tuple[int, ...]) -> tuple[Array, ...]:
    b, t, s, n, kv, d = shape
    shown = np.random.default_rng(3).random((b, t, s)) < 0.6
    shown[..., 0] = True
    q, k, v = normal(b, t, n, d), normal(b, s, kv, d, seed=1), normal(b, s, kv, d + 1, seed=2)
    return q, k, v, jnp.asarray(shown), normal(1, n, t, s, seed=4)


def assert_same(fused: Any, attend: Attention, x: tuple[Array, ...]) -> None:
    """Results, and gradients of all but the mask."""

    def both(function: Any) -> Any:
        def loss(*x: Array) -> tuple[Array, Array]:
            out = function(*x)
            return (out**2).sum(), out

        return jax.jit(jax.grad(loss, (0, 1, 2, 4), has_aux=True))(*x)

    close(both(fused), both(attend), "float32")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", JOINED)
def test_joined_heads(name: str, shape: tuple[int, ...]) -> None:
    pattern, attend = JOINED[name]
    x = operands(shape)
    fused = jattn.fuse_attention(attend)
    assert "dot_general" not in str(jax.make_jaxpr(fused)(*x))
    assert found() == [pattern]
    assert missed() == []
    assert_same(fused, attend, x)


def test_key_value_heads_are_not_repeated() -> None:
    """The kernel reads two key/value heads for six query heads, as the program does."""
    q, k, v, m, b = operands(SHAPES[0])
    jattn.fuse_attention(capped_behind_queries)(q, k, v, m, b)
    [record] = jattn.fusion_log()
    assert record.shapes == ((2, 7, 2, 3, 8), k.shape, v.shape)


def softmax(s: Array, m: Array) -> Array:
    return jax.nn.softmax(jnp.where(m, s, -jnp.inf))


def heads_behind_length(repeat: Callable[[Array, int], Array]) -> Attention:
    """Attention of (B, S, N, D) arrays, whose keys and values are repeated first."""

    def attend(q: Array, k: Array, v: Array, m: Array, b: Array) -> Array:
        k, v = (repeat(x, q.shape[2]) for x in (k, v))
        s = jnp.einsum("btnd,bsnd->bnts", q, k) / 3 + b
        return jnp.einsum("bnts,bsnd->btnd", softmax(s, m[:, None]), v)

    return attend


def heads_in_front_of_length(repeat: Callable[[Array, int], Array]) -> Attention:
    """The same by matrix products of (B, N, S, D) arrays, repeated in front of their transposition."""

    def attend(q: Array, k: Array, v: Array, m: Array, b: Array) -> Array:
        k, v = (repeat(x, q.shape[2]).swapaxes(1, 2) for x in (k, v))
        s = q.swapaxes(1, 2) @ k.swapaxes(2, 3) / 3 + b
        return (softmax(s, m[:, None]) @ v).swapaxes(1, 2)

    return attend


def by_groups(q: Array, k: Array, v: Array, m: Array, b: Array) -> Array:
    """Keys and values have the axis of groups, too."""
    q = grouped(q, k)
    k, v = (
        jnp.broadcast_to(x[:, :, :, None], (*x.shape[:3], *q.shape[3:4], x.shape[3]))
        for x in (k, v)
    )
    s = jnp.einsum("btkgd,bskgd->bkgts", q, k) / 3 + b.reshape(1, *q.shape[2:4], *b.shape[2:])
    out = jnp.einsum("bkgts,bskgd->btkgd", softmax(s, m[:, None, None]), v)
    return out.reshape(*q.shape[:2], -1, v.shape[-1])


def by_repeat(x: Array, num_heads: int) -> Array:
    return jnp.repeat(x, num_heads // x.shape[2], axis=2)


def by_broadcast(x: Array, num_heads: int) -> Array:
    wide = (*x.shape[:3], num_heads // x.shape[2], x.shape[3])
    return jnp.broadcast_to(x[:, :, :, None], wide).reshape(*x.shape[:2], num_heads, -1)


REPEATED: dict[str, Attention] = {
    "repeat, heads behind": heads_behind_length(by_repeat),
    "repeat, heads in front": heads_in_front_of_length(by_repeat),
    "broadcast_to, heads behind": heads_behind_length(by_broadcast),
    "broadcast_to, heads in front": heads_in_front_of_length(by_broadcast),
    "by groups": by_groups,
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", REPEATED)
def test_repeated_heads_are_read_once(name: str, shape: tuple[int, ...]) -> None:
    attend = REPEATED[name]
    x = operands(shape)
    fused = jattn.fuse_attention(attend)
    assert "dot_general" not in str(jax.make_jaxpr(fused)(*x))
    [record] = jattn.fusion_log()
    assert (record.pattern, record.miss) == ("mask+bias", "")
    assert np.prod(record.shapes[1]) == x[1].size
    assert np.prod(record.shapes[2]) == x[2].size
    assert_same(fused, attend, x)


# Repetitions that are not groups of query heads in a row, alike for keys and values.
OTHER_REPEATS: dict[str, Attention] = {
    "heads take turns": heads_behind_length(
        lambda x, n: jnp.tile(x, (1, 1, n // x.shape[2], 1)),
    ),
    "keys in a row, values in turn": heads_behind_length(
        lambda x, n: (
            by_repeat(x, n) if x.shape[3] == 8 else jnp.tile(x, (1, 1, n // x.shape[2], 1))
        ),
    ),
    "other factors": heads_behind_length(
        lambda x, n: by_repeat(x if x.shape[3] == 8 else x[:, :, :1], n),
    ),
    "changed behind": heads_behind_length(
        lambda x, n: by_repeat(x, n) * jnp.arange(1, n + 1)[:, None],
    ),
    "several keys at once": heads_behind_length(
        lambda x, n: jnp.repeat(by_repeat(x[:, : x.shape[1] // 3], n), 3, axis=1)
    ),
    "batch entries share keys": heads_behind_length(
        lambda x, n: jnp.broadcast_to(by_repeat(x[:1], n), (*x.shape[:2], n, x.shape[3]))
    ),
}


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[3]], ids=str)
@pytest.mark.parametrize("name", OTHER_REPEATS)
def test_other_repetitions_keep_their_meaning(name: str, shape: tuple[int, ...]) -> None:
    attend = OTHER_REPEATS[name]
    x = operands(shape)
    fused = jattn.fuse_attention(attend)
    assert_same(fused, attend, x)
    assert found() == ["mask+bias"]


def test_dropout_of_joint_probabilities() -> None:
    q, k, v, _, _ = operands(SHAPES[0])

    def attend(q: Array, k: Array, v: Array, key: Array) -> Array:
        s = jnp.einsum("btkgd,bskd->btkgs", grouped(q, k), k)
        p = jax.nn.softmax(s.reshape(*q.shape[:3], -1))
        return jnp.einsum("btkgs,bskd->btkgd", dropped(p, key).reshape(s.shape), v)

    fused = jax.jit(jattn.fuse_attention(attend))
    mean = sum(fused(q, k, v, jax.random.key(i)) for i in range(200)) / 200
    assert found() == ["dropout"]
    p = jax.nn.softmax(jnp.einsum("btkgd,bskd->btkgs", grouped(q, k), k))
    want = jnp.einsum("btkgs,bskd->btkgd", p, v)
    np.testing.assert_allclose(mean, want, atol=0.35)


# Scores (B, K, G, T, S) with B = K = G = T = S = 4, values (B, S, K, D) -> a result that is no attention.
NEARLY: dict[str, Callable[[Array, Array], Array]] = {
    "groups for heads": lambda s, v: jnp.einsum("bgkts,bskd->btkgd", jax.nn.softmax(s), v),
    "queries for groups": lambda s, v: jnp.einsum(
        "bkgts,bskd->btkgd", jax.nn.softmax(s).swapaxes(1, 3), v
    ),
    "joined in another order": lambda s, v: jnp.einsum(
        "bkgts,bskd->btkgd",
        jax.nn.softmax(s.swapaxes(1, 2).reshape(4, 16, 4, 4)).reshape(s.shape),
        v,
    ),
    "keys and queries joined": lambda s, v: jnp.einsum(
        "bkgts,bskd->btkgd", jax.nn.softmax(s.reshape(4, 4, 4, 16)).reshape(s.shape), v
    ),
    "sums of other heads": lambda s, v: (
        jnp.einsum("bkgts,bskd->bkgtd", jnp.exp(s), v).reshape(4, 16, 4, -1)
        / jnp.exp(s).sum(-1, keepdims=True).swapaxes(1, 2).reshape(4, 16, 4, 1)
    ),
    "sums of other queries": lambda s, v: (
        jnp.einsum("bkgts,bskd->bkgtd", jnp.exp(s), v).reshape(4, 16, 4, -1)
        / jnp.exp(s).sum(-1, keepdims=True).swapaxes(2, 3).reshape(4, 16, 4, 1)
    ),
}


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_attention(name: str) -> None:
    q, k, v = normal(4, 4, 4, 4, 8), normal(4, 4, 4, 8, seed=1), normal(4, 4, 4, 8, seed=2)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return NEARLY[name](jnp.einsum("btkgd,bskd->bkgts", q, k), v)

    np.testing.assert_array_equal(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v))
    assert found() == []


def test_sums_of_exponentials_in_another_shape() -> None:
    """They are the same sums, but it is not seen."""
    q, k, v, _, _ = operands((2, 7, 9, 4, 2, 8))

    def attend(q: Array, k: Array, v: Array) -> Array:
        s = jnp.einsum("btkgd,bskd->bkgts", grouped(q, k), k)
        e = jnp.exp(s.reshape(2, 4, 7, 9))
        out = jnp.einsum("bkgts,bskd->bkgtd", e.reshape(s.shape), v)
        return out / e.reshape(s.shape).sum(-1, keepdims=True)

    np.testing.assert_array_equal(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v))
    assert found() == []


def test_heads_and_batch_in_one_axis() -> None:
    """Products of (B * N, T, S) whose scores are parted for a mask stay as they are."""
    q, k, v, m, _ = operands((2, 7, 9, 4, 4, 8))

    def folded(x: Array) -> Array:
        return x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])

    def attend(q: Array, k: Array, v: Array) -> Array:
        s = folded(q) @ folded(k).swapaxes(1, 2)
        p = jax.nn.softmax(jnp.where(m[:, None], s.reshape(2, 4, 7, 9), -jnp.inf))
        return p.reshape(s.shape) @ folded(v)

    np.testing.assert_array_equal(jattn.fuse_attention(attend)(q, k, v), attend(q, k, v))
    assert found() == []
