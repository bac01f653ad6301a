"""Score functions as users write them, and attention with them in plain JAX: four nested maps over the whole matrix.

The tiers share them. Ids F... are rows of the acceptance list for score functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from drawn import normal

from jattn.testing.cases import Case

Array = Any
ScoreMod = Callable[..., Any]

B, N, K, T, S = 2, 4, 2, 70, 90


def _integers(low: int, high: int, shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


def _table(*shape: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# F100: name -> function, captures.
SCORE_MODS: dict[str, tuple[ScoreMod, tuple[Array, ...]]] = {
    "identity": (lambda s, b, h, q, k: s, ()),
    "times 2": (lambda s, b, h, q, k: 2 * s, ()),
    "square": (lambda s, b, h, q, k: s * s, ()),
    "causal": (lambda s, b, h, q, k: jnp.where(q >= k, s, -jnp.inf), ()),
    "relative": (lambda s, b, h, q, k: s + (q - k) / 16, ()),
    "relative causal": (lambda s, b, h, q, k: jnp.where(q >= k, s + (q - k) / 16, -jnp.inf), ()),
    "alibi": (lambda s, b, h, q, k: s + 2.0 ** (-8 * (h + 1) / N) * (k - q), ()),
    "of head": (lambda s, b, h, q, k, x: s + x[h] * (k % 3), (_table(N),)),
    "of batch": (lambda s, b, h, q, k, x: s + x[b] * (k % 3), (_table(B),)),
    "cap": (lambda s, b, h, q, k: 20 * jnp.tanh(s / 20), ()),
    "sin": (lambda s, b, h, q, k: jnp.sin(s), ()),
    "cos": (lambda s, b, h, q, k: 2 * jnp.cos(s), ()),
    "window": (lambda s, b, h, q, k: jnp.where(abs(q - k) <= 9, s, -jnp.inf), ()),
    "prefix": (
        lambda s, b, h, q, k, x: jnp.where((k < x[b]) | (k <= q), s, -jnp.inf),
        (_integers(0, 40, (B,)),),
    ),
    "documents": (
        lambda s, b, h, q, k, x: jnp.where(x[q % 70] == x[k % 70], s, -jnp.inf),
        (np.sort(_integers(0, 4, (70,))),),
    ),
    "documents of batch": (
        lambda s, b, h, q, k, x, y: jnp.where(x[b, q] == y[b][k], s, -jnp.inf),
        (np.sort(_integers(0, 4, (B, T)), 1), np.sort(_integers(0, 4, (B, S), 1), 1)),
    ),
    "bias": (lambda s, b, h, q, k, x: s + x[q, k], (_table(T, S),)),
    "bias of head": (lambda s, b, h, q, k, x: s + x[h, q, k], (_table(N, T, S),)),
    "bias of all": (lambda s, b, h, q, k, x: s + x[b][h][q][k], (_table(B, N, T, S),)),
    "relative table": (lambda s, b, h, q, k, x: s + x[h, q - k + S - 1], (_table(N, T + S),)),
    "gain": (lambda s, b, h, q, k, x: s * x, (np.float32(0.7),)),
    "gain and bias": (
        lambda s, b, h, q, k, x, y: jnp.where(y[b, k] > 0, s * x[h] + x[h] * y[b, k], s),
        (_table(N), _table(B, S)),
    ),
    "softplus": (lambda s, b, h, q, k: jax.nn.softplus(s), ()),
    "relu": (lambda s, b, h, q, k: jax.nn.relu(s) - jax.nn.relu(-s) / 4, ()),
    # Not a number one query, or one key, behind the last.
    "log of what is left": (
        lambda s, b, h, q, k, x: s + x[h] * (jnp.log(T - q) + jnp.log(S - k)),
        (_table(N),),
    ),
    "gain of what is left": (
        lambda s, b, h, q, k, x: s * (1 + x[h] * (jnp.sqrt(T - 1 - q) + jnp.sqrt(S - 1 - k)) / 16),
        (_table(N),),
    ),
    # Zeros that are chosen, where the slope of the root is infinite.
    "root of what is chosen": (
        lambda s, b, h, q, k, x, y: s + s * x[h] + jnp.sqrt(jnp.where(k < 50, y[k], 0.0)),
        (_table(N), np.abs(_table(S))),
    ),
    "root of what is there": (
        lambda s, b, h, q, k, x: s + jnp.sqrt(x.at[k].get(mode="fill", fill_value=0.0)),
        (np.abs(_table(60)),),
    ),
    "root of chosen scores": (
        lambda s, b, h, q, k: s + jnp.sqrt(jnp.where(k < 50, s * s + 1, 0.0)),
        (),
    ),
    "mask and infinite bias": (
        lambda s, b, h, q, k, x: jnp.where(k < 50, s, -jnp.inf) + x[k],
        (np.where(np.arange(S) % 7 == 0, -np.inf, 0.5).astype(np.float32),),
    ),
}


def operands(dtype: str, kv_heads: int = K, head_dim: int = 16) -> list[np.ndarray[Any, Any]]:
    """q, k, v and dout, rounded to the dtype."""
    shapes = (B, T, N, head_dim), (B, S, kv_heads, head_dim), (B, S, kv_heads, head_dim)
    drawn = [normal(seed, *shape) for seed, shape in enumerate((*shapes, (B, T, N, head_dim)))]
    return [np.asarray(jnp.asarray(x, dtype)) for x in drawn]


def dense(
    q: Array,
    k: Array,
    v: Array,
    score_mod: ScoreMod,
    captures: tuple[Array, ...] = (),
    scale: float | None = None,
    visible: Array = True,
    copied: Sequence[bool] | None = None,
) -> tuple[Array, Array]:
    """Attention as it is defined: out (B, T, N, D) and lse (B, T, N).

    Captures that are ``copied`` have axes (B, N, T) in front: each row reads its own.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    s = jnp.einsum("btnd,bsnd->bnts", q, k, precision="highest") * scale
    function = score_mod
    for axis in (3, 2, 1, 0):
        indices = tuple(0 if i == axis else None for i in range(4))
        # Keys are mapped first, inside the axes of rows.
        of_rows = [0 if axis < 3 and own else None for own in copied or [False] * len(captures)]
        function = jax.vmap(function, (0, *indices, *of_rows))
    counted = [jnp.arange(n, dtype=jnp.int32) for n in s.shape]
    s = jnp.where(visible, function(s, *counted, *captures).astype(s.dtype), -jnp.inf)
    empty = (s == -jnp.inf).all(-1, keepdims=True)
    lse = jax.nn.logsumexp(jnp.where(empty, 0, s), axis=-1, keepdims=True)
    p = jnp.where(empty | (s == -jnp.inf), 0, jnp.exp(jnp.where(empty, 0, s) - lse))
    out = jnp.einsum("bnts,bsnd->btnd", p, v, precision="highest")
    lse = jnp.where(empty, -jnp.inf, lse)
    return out, lse[..., 0].swapaxes(1, 2)


def floats_of(arrays: tuple[Array, ...]) -> list[int]:
    """Which arrays may have a gradient."""
    return [i for i, x in enumerate(arrays) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]


def gradients(
    function: Callable[..., Array], arrays: tuple[Array, ...], dout: Array
) -> tuple[Array, list[Array]]:
    """The result of a function, and the gradients of its arguments that are floats."""
    moving = floats_of(arrays)

    def of_moving(*some: Array) -> Array:
        full = list(arrays)
        for i, x in zip(moving, some, strict=True):
            full[i] = x
        return function(*full)

    out, pull = jax.vjp(of_moving, *(jnp.asarray(arrays[i]) for i in moving))
    return out, list(pull(jnp.asarray(dout, out.dtype)))


FEW = 32  # numbers: the mean error of fewer is that of one draw, and may happen to be near 0


def check(
    got: list[Array],
    score_mod: ScoreMod,
    captures: tuple[Array, ...],
    arrays: list[Array],
    visible: Array = True,
) -> None:
    """Compares results with plain attention in float64.

    Args:
      got: out, dq, dk, dv and the gradients of the captures that are floats.
      score_mod, captures: of the problem.
      arrays: q, k, v and dout.
      visible: broadcastable to the scores.
    """
    low, exact = plain_results(score_mod, captures, arrays, visible)
    check_close(got, low, exact, deviations(score_mod, captures, arrays, visible))


def plain_results(
    score_mod: ScoreMod, captures: tuple[Array, ...], arrays: list[Array], visible: Array = True
) -> tuple[list[Array], list[Array]]:
    """What ``got`` of ``check`` is by plain attention: in the type of the operands, and in float64."""
    *qkv, dout = arrays

    def plain(q: Array, k: Array, v: Array, *captures: Array) -> Array:
        return dense(q, k, v, score_mod, captures, visible=visible)[0]

    def results(qkv: list[Array], captures: list[Array]) -> list[Array]:
        out, grads = jax.jit(lambda *x: gradients(plain, x, dout))(*qkv, *captures)
        return [np.asarray(x) for x in (out, *grads)]

    low = results(qkv, list(captures))
    with jax.enable_x64(True):
        return low, results([np.asarray(x, np.float64) for x in qkv], wide(captures))


def wide(arrays: tuple[Array, ...]) -> list[Array]:
    """Floats as float64, where that is enabled; integers as they are."""
    moving = floats_of(arrays)
    return [np.asarray(x, np.float64) if i in moving else x for i, x in enumerate(arrays)]


def row_gradients(
    score_mod: ScoreMod, captures: list[Array], arrays: list[Array], visible: Array = True
) -> list[Array]:
    """What each row gives to the gradients of captures of few numbers, (B, N, T, ...): those of copies of its own."""
    few = [i for i in floats_of(tuple(captures)) if np.size(captures[i]) < FEW]
    q, k, v, dout = map(jnp.asarray, arrays)
    rows = (q.shape[0], q.shape[2], q.shape[1])

    def of_copies(*copies: Array) -> Array:
        full = list(captures)
        for i, x in zip(few, copies, strict=True):
            full[i] = x
        copied = [i in few for i in range(len(full))]
        return dense(q, k, v, score_mod, tuple(full), visible=visible, copied=copied)[0]

    copies = [jnp.broadcast_to(captures[i], (*rows, *np.shape(captures[i]))) for i in few]
    return list(jax.vjp(of_copies, *copies)[1](dout.astype(q.dtype)))


def deviations(
    score_mod: ScoreMod, captures: tuple[Array, ...], arrays: list[Array], visible: Array = True
) -> list[Array | None]:
    """Standard deviations of the errors that the plain formula makes in the type of the operands, for the gradients of
    captures that are floats; None for those of many numbers.

    Such a gradient is a sum over rows. Each row is off by what was rounded in it alone: these errors have mean 0 and
    are independent, so that the variance of their sum is the sum of their squares. There are hundreds of rows, so
    unlike the error of the sum, a single draw, this is no matter of luck.
    """
    sizes = [np.size(captures[i]) for i in floats_of(captures)]
    if all(size >= FEW for size in sizes):
        return [None] * len(sizes)

    def of_rows(arrays: list[Array], captures: list[Array]) -> list[Array]:
        run = jax.jit(lambda *x: row_gradients(score_mod, list(x[4:]), list(x[:4]), visible))
        return run(*arrays, *captures)

    low = of_rows(arrays, list(captures))
    with jax.enable_x64(True):
        exact = of_rows([np.asarray(x, np.float64) for x in arrays], wide(captures))
    found = iter(
        np.sqrt(np.square(np.asarray(a, np.float64) - np.asarray(b)).sum((0, 1, 2)))
        for a, b in zip(low, exact, strict=True)
    )
    return [next(found) if size < FEW else None for size in sizes]


def check_close(
    got: list[Array], low: list[Array], exact: list[Array], deviations: list[Array | None]
) -> None:
    """Errors against float64 are at most multiples of those of the same formula in the type of the operands: means of
    all, and for out, dq, dk and dv means of each row.

    Textbook attention all in 16 bits is a coarse measure: mean errors of right results were at most 0.3 of its, and
    those of rows 1.0 of the measure of rows, in float32 0.6 and 2.4. The limits are at least 4 times as much.

    Args:
      got: out, dq, dk, dv and gradients of captures.
      low: the same of the plain formula, in the type.
      exact: the same in float64.
      deviations: of the errors of ``low``, in their place for captures of few numbers.
    """
    assert len(got) == len(low) == len(exact) == 4 + len(deviations)
    is_short = np.asarray(low[0]).dtype.itemsize == 2
    of_rows = 4.0 if is_short else 10.0
    factors = [1.5] * 4 if is_short else [1.5, 4.0, 8.0, 8.0]
    factors += [4.0] * len(deviations)
    spreads = (*[None] * 4, *deviations)
    for i, (a, b, c) in enumerate(zip(got, low, exact, strict=True)):
        x, y, z = (np.asarray(value, np.float64) for value in (a, b, c))
        assert not np.isnan(x).any(), i
        spread, least = spreads[i], 1e-6 * max(1.0, np.abs(z).mean())
        error = np.abs(y - z).mean() if spread is None else spread.mean()
        allowed = factors[i] * error + least
        assert np.abs(x - z).mean() <= allowed, (i, np.abs(x - z).mean(), allowed)
        if i < 4:
            # A row of few numbers may be lucky: a part of the largest error of rows is allowed to each.
            errors, of_low = (np.abs(values - z).mean(axis=-1) for values in (x, y))
            limits = of_rows * (of_low + of_low.max() / 4 + least)
            worst = np.unravel_index(np.argmax(errors / limits), errors.shape)
            assert errors[worst] <= limits[worst], (i, worst, errors[worst], limits[worst])


def forms(base: Case) -> dict[str, dict[str, Any]]:
    """The other features, by name, as changes of a problem of two batch entries."""
    q_len, kv_len = base.q_len, base.kv_len
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "lengths": {"q_lengths": (q_len, q_len // 2), "kv_lengths": (kv_len // 3, kv_len)},
        "segments": {"segments": "interleaved"},
        "mask": {"mask_form": "1nts"},
        "positions": {"positions": "shuffled", "window": (q_len // 3, q_len // 2)},
        "bias": {"bias_form": "bnts"},
        "bias and lengths": {"bias_form": "bnts", "q_lengths": (q_len, q_len // 2)},
        "bias of keys": {"bias_form": "b11s", "is_causal": True},
        "cap": {"softcap": 5.0},
        "slopes": {"alibi_form": "n"},
        "sinks": {"sinks_form": "bn"},
        "dropout": {"dropout_rate": 0.3},
        "dropout and cap": {"dropout_rate": 0.3, "softcap": 5.0, "is_causal": True},
        "negative scale": {"scale": -0.1},
        "odd": {"head_dim": 72, "head_dim_v": 40, "q_len": 129, "kv_len": 63},
        "everything": {
            "is_causal": True,
            "window": (kv_len // 3, None),
            "bias_form": "1nts",
            "softcap": 8.0,
            "alibi_form": "n",
            "sinks_form": "n",
            "kv_lengths": (kv_len, kv_len // 2),
            "segments": "random",
        },
    }
