"""Attention solved in numpy, forward and backward: the definition every backend is compared with.

The formulas are those of cc/core/problem.h, written down directly: visibility is an array of booleans, a key that is
not visible has weight exactly 0 and is never touched, and no value stands for minus infinity but minus infinity.
Everything is float64, read from the already rounded operands; a float64 case is solved in `numpy.longdouble`, so that
the oracle stays the more precise side where that type is wider than float64.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jattn.testing.cases import Case
from jattn.testing.inputs import Array, Operands
from jattn.testing.score_functions import SCORE_FUNCTIONS, Changed, Read


@dataclasses.dataclass(frozen=True)
class Solution:
    """The solution of a case and what its error bounds are made of.

    out (B, T, N, Dv); lse and reached (B, T, N); dq, dk, dv, dbias in the shapes of their primals.
    Inside, heads come first: visible, s, p, dp, ds, dx (B, N, T, S), with ds the gradient of the scores, ds_before that
    of s_before, the scores before the score function (whose slopes are score_slope), and dx that of the products
    before softcap; z what dropout multiplies a weight by, sink_p (B, N, T, 1) the weight of the
    sink, distance (B, 1, T, S); k, v repeated to N heads, (B, N, S, D); q, dout (B, N, T, D).
    Padding in q, k, v and dout has been replaced by zeros.
    """

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsinks: Array | None
    dalibi_slopes: Array | None
    visible: Array
    s: Array
    s_before: Array
    s_capped: Array
    score_slope: Array
    p: Array
    dp: Array
    ds: Array
    ds_before: Array
    dx: Array
    delta: Array
    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array
    z: Array
    sink_p: Array
    distance: Array
    reads: tuple[Read | None, ...] = ()
    dcapture0: Array | None = None
    dcapture1: Array | None = None


def distances(case: Case, operands: Operands) -> Array:
    """Returns how far to the right of its query each key stands, (B, 1, T, S) int64."""
    if operands.q_positions is not None and operands.kv_positions is not None:
        q_positions, kv_positions = (
            np.clip(x.astype(np.int64), -(2**29), 2**29)
            for x in (operands.q_positions, operands.kv_positions)
        )
        return np.asarray(kv_positions[:, None, None, :] - q_positions[:, None, :, None])
    q_lengths = _clamped(operands.q_lengths, case.batch, case.q_len)
    kv_lengths = _clamped(operands.kv_lengths, case.batch, case.kv_len)
    offset = (kv_lengths - q_lengths) * case.lower_right
    index = np.arange(case.kv_len) - np.arange(case.q_len)[:, None]
    return np.asarray(index - offset[:, None, None, None])


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
    distance = distances(case, operands)
    left, right = case.band
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
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


def philox(counter: tuple[Array, ...], key: tuple[Array, Array]) -> tuple[Array, ...]:
    """Philox4x32-10 with 64-bit products; words and keys are uint64 arrays below 2**32."""
    mask = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & mask, (a >> 32) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return c0, c1, c2, c3


def _as_uint32(positions: Array) -> Array:
    """Clamps positions, and spells negative ones as the 32 bits that they are stored in."""
    return (np.clip(positions.astype(np.int64), -(2**29), 2**29) % 2**32).astype(np.uint64)


def dropout_factors(case: Case, operands: Operands) -> Array:
    """Returns what dropout multiplies each weight by, (B, N, T, S) float64: 0, or the inverse of the kept share.

    Each pair by itself: its counter, its word, its bytes of the words.
    """
    shape = (case.batch, case.num_heads, case.q_len, case.kv_len)
    if not case.dropout_rate:
        return np.ones(shape)
    b: Array
    n: Array
    t: Array
    j: Array
    b, n, t, j = (
        np.arange(extent, dtype=np.uint64).reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, extent in enumerate(shape)
    )
    zero = np.zeros(1, np.uint64)
    if operands.dropout_table is not None:
        assert operands.q_segments is not None
        assert operands.q_positions is not None
        assert operands.kv_positions is not None
        table = operands.dropout_table.astype(np.uint64)
        rows = np.clip(operands.q_segments, 0, len(table) - 1)
        keys = table[rows].transpose(0, 2, 1, 3)[:, :, :, None, :]  # (B, N or 1, T, 1, 2)
        key = (keys[..., 0], keys[..., 1])
        t = _as_uint32(operands.q_positions[:, None, :, None])
        j = _as_uint32(operands.kv_positions[:, None, None, :])
    else:
        assert operands.dropout_seed is not None
        assert operands.dropout_offset is not None
        seed, offset = (
            x.astype(np.uint64) for x in (operands.dropout_seed, operands.dropout_offset)
        )
        if case.broadcast_dropout:
            b, n = zero, zero
        first = philox((b, n, offset[:1], offset[1:]), (seed[:1], seed[1:]))
        key = (first[0], first[1])
    words = philox((zero, t // 32 * 4 + t % 8 // 2, zero, j // 32 * 4 + j % 8 // 2), key)
    parity = (t % 2).astype(np.int64)
    left, right = np.choose(2 * parity, words), np.choose(2 * parity + 1, words)
    # By the eighth of the query, then of the key.
    x = [[_byte(word, h, j) for word in (left, right)] for h in (0, 1)]
    total = x[0][0] ^ x[0][1] ^ x[1][0] ^ x[1][1]
    own = np.choose((2 * (t // 8 % 2) + j // 8 % 2).astype(np.int64), (*x[0], *x[1]))
    own = own ^ j // 16 % 2 * total ^ t // 16 % 2 * _times_generator(total)
    lower = x[0][1] ^ x[1][1] ^ _times_generator(x[1][0] ^ x[1][1])
    bits = own % 128 * 256 + lower
    threshold = min(round(32768 * float(np.float32(case.dropout_rate))), 32640)
    return np.broadcast_to(np.where(bits < threshold, 0.0, 32768 / (32768 - threshold)), shape)


def _byte(word: Array, half: int, column: Array) -> Array:
    """Byte 2 * half + column % 2 of a word, the least significant one being byte 0."""
    return word // 256 ** (2 * half + column % 2) % 256


def _times_generator(byte: Array) -> Array:
    """The byte with halves (high, low) becomes that with halves (high ^ low, high)."""
    high, low = byte // 16, byte % 16
    return (high ^ low) * 16 + high


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
    distance: Array = distances(case, operands)
    if operands.bias is not None:
        s = s + np.where(visible, operands.bias.astype(real), 0)
    if operands.alibi_slopes is not None:
        slopes: Array = per_head(operands.alibi_slopes).astype(real)
        s = s - slopes * np.abs(distance)
    s_before = s = np.where(visible, s, 0)
    changed = change_scores(case, operands, s)
    s = np.where(visible, changed.score, -np.inf)

    _, p, sink_p, lse = softmax(s, visible, operands.sinks)
    z = dropout_factors(case, operands).astype(real)
    out = (z * p) @ _without_nan(v)
    if np.isnan(v).any():
        out = np.where((visible.astype(real) @ np.isnan(v).astype(real)) > 0, np.nan, out)

    dp = np.where(visible, z * (dout @ _without_nan(v).swapaxes(2, 3)), 0)
    # The gradient of lse with respect to a score is p, so dlse joins the row's mean of dp with the opposite sign.
    delta = (p * dp).sum(axis=3, keepdims=True) - dlse[..., None]
    ds = p * (dp - delta)
    ds_before = ds * np.where(visible, changed.slope, 0)
    dx = ds_before * np.where(visible, cap_slope, 0)
    dv = (z * p).swapaxes(2, 3) @ dout
    dbias = dsinks = dalibi_slopes = None
    if operands.bias is not None:
        dbias = reduce_to(ds_before, operands.bias.shape)
    if operands.sinks is not None:
        dsinks = per_head_sum(-sink_p * delta, operands.sinks.shape)
    if operands.alibi_slopes is not None:
        dalibi_slopes = per_head_sum(-ds_before * np.abs(distance), operands.alibi_slopes.shape)
    dcaptures = {
        f"dcapture{i}": sum_reads(read, ds * read.weight, operands.captures[i].shape)
        for i, read in enumerate(changed.reads)
        if read is not None
    }
    return Solution(
        out=out.transpose(0, 2, 1, 3),
        lse=lse[..., 0].transpose(0, 2, 1),
        dq=(scale * (dx @ k)).transpose(0, 2, 1, 3),
        dk=sum_groups(scale * (dx.swapaxes(2, 3) @ q), group).transpose(0, 2, 1, 3),
        dv=sum_groups(dv, group).transpose(0, 2, 1, 3),
        dbias=dbias,
        dsinks=dsinks,
        dalibi_slopes=dalibi_slopes,
        visible=visible,
        s=s,
        s_before=s_before,
        s_capped=s_capped,
        score_slope=np.where(visible, changed.slope, 0),
        p=p,
        dp=dp,
        ds=ds,
        ds_before=ds_before,
        dx=dx,
        delta=delta,
        q=q,
        k=k,
        v=v,
        dout=dout,
        dlse=dlse,
        z=z,
        sink_p=sink_p,
        distance=distance,
        reads=changed.reads,
        **dcaptures,
    )


def change_scores(case: Case, operands: Operands, s: Array) -> Changed:
    """Applies the score function of a case, in the type of `s`; without one its slopes are 1."""
    if case.score_mod is None:
        return Changed(s, np.ones_like(s))
    shape = (case.batch, case.num_heads, case.q_len, case.kv_len)
    b: Array
    n: Array
    t: Array
    j: Array
    b, n, t, j = (
        np.arange(extent).reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, extent in enumerate(shape)
    )
    if operands.q_positions is not None and operands.kv_positions is not None:
        t = np.clip(operands.q_positions.astype(np.int64), -(2**29), 2**29)[:, None, :, None]
        j = np.clip(operands.kv_positions.astype(np.int64), -(2**29), 2**29)[:, None, None, :]
    return SCORE_FUNCTIONS[case.score_mod].numpy(s, b, n, t, j, *operands.captures)


def sum_reads(read: Read, terms: Array, shape: tuple[int, ...]) -> Array:
    """Adds up what pairs (B, N, T, S) give to the elements of a capture that they read."""
    total = np.zeros(shape, terms.dtype)
    np.add.at(total, read.element, terms if read.element else terms.sum())
    return total


class Softmax(NamedTuple):
    """The softmax of rows of scores: live (the row sees a key), sink_p and lse are (B, N, T, 1), p (B, N, T, S)."""

    live: Array
    p: Array
    sink_p: Array
    lse: Array


def softmax(s: Array, visible: Array, sinks: Array | None) -> Softmax:
    """Computes the weights of visible keys and of the sink in the type of `s`, which is -inf where not visible."""
    real: Any = s.dtype.type
    row_max = np.max(s, axis=3, initial=-np.inf, keepdims=True)
    live = ~(row_max == -np.inf)  # a row of NaNs is live: it sees keys
    sink = real(-np.inf) if sinks is None else per_head(sinks).astype(real)
    shift = np.where(live, np.maximum(row_max, sink), real(0))
    seen = visible & live
    weights = np.where(seen, np.exp(np.where(seen, s - shift, 0)), 0)
    sink_weight = np.exp(np.where(live, sink, real(-np.inf)) - shift)
    row_sum = np.where(live, weights.sum(axis=3, keepdims=True) + sink_weight, 1)
    lse = np.where(live, shift + np.log(row_sum), -np.inf)
    return Softmax(live, weights / row_sum, np.where(live, sink_weight / row_sum, 0), lse)


def per_head(values: Array) -> Array:
    """(N,), (B, N) or with axes of size 1 -> (B or 1, N or 1, 1, 1)."""
    return np.asarray(values.reshape((1,) * (2 - values.ndim) + values.shape)[..., None, None])


def per_head_sum(array: Array, shape: tuple[int, ...]) -> Array:
    """Sums (B, N, T, S or 1) to an array over batch and heads of a shape that broadcasts."""
    return reduce_to(array, (*shape, 1, 1)).reshape(shape)


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
