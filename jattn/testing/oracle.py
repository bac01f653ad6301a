"""Attention solved in numpy, forward and backward: the definition every backend is compared with.

The formulas are those of cc/core/problem.h, written down directly: visibility is an array of booleans, a key that is
not visible has weight exactly 0 and is never touched, and no value stands for minus infinity but minus infinity.
Everything is float64, read from the already rounded operands; a float64 case is solved in `numpy.longdouble`, so that
the oracle stays the more precise side where that type is wider than float64.
"""

import dataclasses
from typing import Any

import numpy as np

from jattn.testing.cases import Case
from jattn.testing.inputs import Array, Operands


@dataclasses.dataclass(frozen=True)
class Solution:
    """The solution of a case and what its error bounds are made of.

    out (B, T, N, Dv); lse and reached (B, T, N); dq, dk, dv, dbias in the shapes of their primals.
    Inside, heads come first: visible, s, p, dp, ds, dx (B, N, T, S), with ds the gradient of the biased scores and dx
    that of the products before softcap; k, v repeated to N heads, (B, N, S, D); q, dout (B, N, T, D).
    Padding in q, k, v and dout has been replaced by zeros.
    """

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    visible: Array
    s: Array
    s_capped: Array
    p: Array
    dp: Array
    ds: Array
    dx: Array
    delta: Array
    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array


def visibility(case: Case, operands: Operands) -> Array:
    """Returns which key each query sees, (B, N, T, S) booleans. Lengths are clamped to the extents."""
    q_lengths = _clamped(operands.q_lengths, case.batch, case.q_len)
    kv_lengths = _clamped(operands.kv_lengths, case.batch, case.kv_len)
    t = np.arange(case.q_len)[None, None, :, None]
    j = np.arange(case.kv_len)[None, None, None, :]
    q_length = q_lengths[:, None, None, None]
    kv_length = kv_lengths[:, None, None, None]
    visible = np.ones((case.batch, case.num_heads, case.q_len, case.kv_len), bool)
    visible &= (t < q_length) & (j < kv_length)
    offset = kv_length - q_length if case.lower_right else np.zeros_like(q_length)
    left, right = case.band
    if left is not None:
        visible &= j >= t + offset - left
    if right is not None:
        visible &= j <= t + offset + right
    if operands.q_segments is not None and operands.kv_segments is not None:
        q_segments = operands.q_segments[:, None, :, None]
        visible &= (q_segments == operands.kv_segments[:, None, None, :]) & (q_segments >= 0)
    if operands.mask is not None:
        visible &= operands.mask
    return visible


def _clamped(lengths: Array | None, batch: int, extent: int) -> Array:
    if lengths is None:
        return np.full(batch, extent, np.int64)
    return np.clip(lengths.astype(np.int64), 0, extent)


def solve(case: Case, operands: Operands) -> Solution:
    """Solves a case forward and backward for the cotangents dout and dlse.

    A NaN at a visible place of q or k reaches every row that sees it; one in v, every row and channel that sees it.
    Gradients of problems with visible NaNs are not defined here.
    """
    real = np.longdouble if case.dtype == "float64" else np.float64
    visible = visibility(case, operands)
    seen_q, seen_k = np.asarray(visible.any(axis=3)), np.asarray(visible.any(axis=2))
    group = case.group_size
    q = _selected(operands.q, seen_q, real, 1)
    k = _selected(operands.k, seen_k, real, group)
    v = _selected(operands.v, seen_k, real, group)
    dout = _selected(operands.dout, seen_q, real, 1)
    dlse = np.where(seen_q, operands.dlse.astype(real).transpose(0, 2, 1), 0)

    scale = real(case.scale_value)
    s = scale * (q @ k.swapaxes(2, 3))
    cap_slope = np.ones_like(s)
    if case.softcap is not None:
        s = case.softcap * np.tanh(s / case.softcap)
        cap_slope = 1 - (s / case.softcap) ** 2
    s_capped = s
    if operands.bias is not None:
        s = s + np.where(visible, operands.bias.astype(real), 0)
    s = np.where(visible, s, -np.inf)

    row_max = np.max(s, axis=3, initial=-np.inf, keepdims=True)
    live = ~(row_max == -np.inf)  # a row of NaNs is live: it sees keys
    weights = np.where(
        visible & live, np.exp(np.where(visible & live, s - np.where(live, row_max, 0), 0)), 0
    )
    row_sum = weights.sum(axis=3, keepdims=True)
    p = np.where(live, weights / np.where(live, row_sum, 1), 0)
    with np.errstate(divide="ignore"):
        lse = np.where(
            live, np.where(live, row_max, 0) + np.log(np.where(live, row_sum, 1)), -np.inf
        )[..., 0]
    out = p @ _without_nan(v)
    if np.isnan(v).any():
        out = np.where((visible.astype(real) @ np.isnan(v).astype(real)) > 0, np.nan, out)

    dp = np.where(visible, dout @ _without_nan(v).swapaxes(2, 3), 0)
    # The gradient of lse with respect to a score is p, so dlse joins the row's mean of dp with the opposite sign.
    delta = (p * dp).sum(axis=3, keepdims=True) - dlse[..., None]
    ds = p * (dp - delta)
    dx = ds * np.where(visible, cap_slope, 0)
    dv = p.swapaxes(2, 3) @ dout
    dbias = None
    if operands.bias is not None:
        dbias = reduce_to(ds, operands.bias.shape)
    return Solution(
        out=out.transpose(0, 2, 1, 3),
        lse=lse.transpose(0, 2, 1),
        dq=(scale * (dx @ k)).transpose(0, 2, 1, 3),
        dk=sum_groups(scale * (dx.swapaxes(2, 3) @ q), group).transpose(0, 2, 1, 3),
        dv=sum_groups(dv, group).transpose(0, 2, 1, 3),
        dbias=dbias,
        visible=visible,
        s=s,
        s_capped=s_capped,
        p=p,
        dp=dp,
        ds=ds,
        dx=dx,
        delta=delta,
        q=q,
        k=k,
        v=v,
        dout=dout,
        dlse=dlse,
    )


def _selected(array: Array, seen: Array, real: Any, repeats: int) -> Array:
    """Puts heads first, repeats them `repeats` times, and replaces the tokens nobody sees by zeros."""
    array = np.repeat(array.astype(real).transpose(0, 2, 1, 3), repeats, axis=1)
    return np.where(seen[..., None], array, 0)


def _without_nan(array: Array) -> Array:
    return np.where(np.isnan(array), 0, array)


def sum_groups(array: Array, group: int) -> Array:
    """Sums (B, N, ...) over the query heads of each group to (B, K, ...)."""
    batch, num_heads, *rest = array.shape
    return np.asarray(array.reshape(batch, num_heads // group, group, *rest).sum(axis=2))


def reduce_to(array: Array, shape: tuple[int, ...]) -> Array:
    """Sums (B, N, T, S) over the axes along which `shape` broadcasts against it."""
    padded = (1,) * (4 - len(shape)) + shape
    axes = tuple(i for i in range(4) if padded[i] == 1)
    return np.asarray(array.sum(axis=axes, keepdims=True)).reshape(shape)
