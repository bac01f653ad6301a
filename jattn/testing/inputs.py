"""Arrays for a case: seeded by its name, rounded to its types, poisoned where nothing may be read.

Everything here is numpy; 16-bit types come from ml_dtypes. A generator draws in float64 and rounds once, so that the
oracle, which reads the rounded arrays, sees exactly what the backend under test sees.
"""

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jattn.testing.cases import Case
from jattn.testing.score_functions import SCORE_FUNCTIONS

Array: TypeAlias = npt.NDArray[Any]

# What an index slot that must not be used holds: an access through it would leave every buffer.
HUGE_INDEX = np.int32(2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays of one case. Shapes: q (B, T, N, D), k (B, S, K, D), v (B, S, K, Dv), dout (B, T, N, Dv),
    dlse (B, T, N); lengths (B,), segments and positions (B, T) and (B, S), all int32; bias, mask, sinks and
    alibi_slopes (float32) as their forms say; dropout_seed and dropout_offset (2,) uint32, dropout_table (sequences,
    N or 1, 2) uint32 in their place for packed sequences; captures what the score function reads.
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array
    bias: Array | None = None
    mask: Array | None = None
    q_lengths: Array | None = None
    kv_lengths: Array | None = None
    q_segments: Array | None = None
    kv_segments: Array | None = None
    q_positions: Array | None = None
    kv_positions: Array | None = None
    sinks: Array | None = None
    alibi_slopes: Array | None = None
    dropout_seed: Array | None = None
    dropout_offset: Array | None = None
    dropout_table: Array | None = None
    captures: tuple[Array, ...] = ()


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type of that name, ml_dtypes included."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def generator(name: str) -> np.random.Generator:
    """A generator that depends on the name alone."""
    return np.random.default_rng(zlib.crc32(name.encode()))


Draw: TypeAlias = Callable[[np.random.Generator, tuple[int, ...]], Array]


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape)


def _outlier_channel(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    x = rng.standard_normal(shape)
    x[..., rng.integers(shape[-1])] *= 60.0
    return x


def _outlier_token(factor: float) -> Draw:
    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        x = rng.standard_normal(shape)
        x[:, rng.integers(shape[1])] *= factor
        return x

    return draw


def _one_hot(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return 12.0 * np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])]


# How q, k and v are drawn where they are independent of each other.
_DRAWS: dict[str, tuple[Draw, Draw, Draw]] = {
    "normal": (_normal, _normal, _normal),
    "uniform": (lambda rng, shape: rng.uniform(-1.0, 1.0, shape),) * 3,
    "normal_x3": (lambda rng, shape: 3.0 * rng.standard_normal(shape),) * 3,
    "outlier_channel": (_outlier_channel,) * 3,
    "outlier_token": (_normal, _outlier_token(20.0), _outlier_token(50.0)),
    "student_t": (lambda rng, shape: np.clip(rng.standard_t(2.5, shape), -40.0, 40.0),) * 3,
    "integers": (lambda rng, shape: rng.integers(-3, 4, shape).astype(np.float64),) * 3,
    "equal": (lambda rng, shape: np.full(shape, 0.5),) * 3,
    "zero_q": (lambda rng, shape: np.zeros(shape), _normal, _normal),
    "zero_k": (_normal, lambda rng, shape: np.zeros(shape), _normal),
    "constant_v": (_normal, _normal, lambda rng, shape: np.full(shape, 1.5)),
    "offset_v": (_normal, _normal, lambda rng, shape: 512.0 + rng.standard_normal(shape)),
    "huge_v": (_normal, _normal, lambda rng, shape: 1e4 * rng.standard_normal(shape)),
    "tiny_v": (_normal, _normal, lambda rng, shape: 2.0**-20 * rng.standard_normal(shape)),
    "one_hot": (_one_hot, _one_hot, _normal),
}

# Logits wanted along the keys, for the distributions that fix them: position in [0, 1] -> logit.
_LOGITS: dict[str, Callable[[Array], Array]] = {
    "rising": lambda x: 60.0 * x - 30.0,
    "falling": lambda x: 30.0 - 60.0 * x,
    "late": lambda x: np.where(x == x.max(initial=0.0), 30.0, 0.0),
    "lse_plus_200": lambda x: np.full_like(x, 200.0),
    "lse_minus_200": lambda x: np.full_like(x, -200.0),
    "logits_low": lambda x: np.full_like(x, -2e5),
}


def _steered(case: Case, rng: np.random.Generator) -> tuple[Array, Array]:
    """Draws q and k along one direction so that scale * q.k follows the wanted logits, plus noise of about 0.1."""
    position = np.linspace(0.0, 1.0, max(case.kv_len, 1))[: case.kv_len]
    logits = _LOGITS[case.distribution](position)
    # Half of the magnitude goes to q and half to k, so that float16 holds both.
    magnitude = np.sqrt(max(np.abs(logits).max(initial=1.0), 1.0))
    reach = np.sqrt(1.0 / abs(case.scale_value)) * np.sign(case.scale_value)
    direction = np.ones(case.head_dim) / np.sqrt(case.head_dim)
    q = np.broadcast_to(
        abs(reach) * magnitude * direction, (case.batch, case.q_len, case.num_heads, case.head_dim)
    )
    k = reach * (logits / magnitude)[None, :, None, None] * direction
    k = np.broadcast_to(k, (case.batch, case.kv_len, case.num_kv_heads, case.head_dim))
    # The uniform distributions of logits (all -2e5 ...) stay exact; the graded ones get noise.
    noise = 0.1 if np.ptp(logits) > 0 or abs(logits).max(initial=0.0) <= 200.0 else 0.0
    return q + noise * rng.standard_normal(q.shape) / magnitude, k + noise * rng.standard_normal(
        k.shape
    ) / magnitude


def _draw_dout(case: Case, rng: np.random.Generator) -> Array:
    shape = (case.batch, case.q_len, case.num_heads, case.head_dim_v)
    kind = case.dout_distribution
    if kind == "normal":
        return rng.standard_normal(shape)
    if kind == "one_hot":
        dout = np.zeros(shape)
        dout[
            (
                rng.integers(shape[0]),
                rng.integers(shape[1]),
                rng.integers(shape[2]),
                rng.integers(shape[3]),
            )
        ] = 1.0
        return dout
    return np.full(shape, {"ones": 1.0, "zeros": 0.0, "four": 4.0}[kind])


def _draw_segments(case: Case, rng: np.random.Generator, length: int) -> Array:
    """Draws (B, length) ids in [0, num_segments); "random" sorts them and marks tails of odd batch entries -1."""
    segments = rng.integers(0, case.num_segments, (case.batch, length))
    if case.segments == "interleaved":
        segments[rng.random(segments.shape) < 0.1] = -1
        return segments.astype(np.int32)
    segments.sort(axis=1)
    for b in range(case.batch):
        padding = 0 if b % 2 else int(rng.integers(0, length // 3 + 1))
        segments[b, length - padding :] = -1 - b
    return segments.astype(np.int32)


def _draw_positions(
    case: Case, rng: np.random.Generator, q_segments: Array | None, kv_segments: Array | None
) -> tuple[Array, Array]:
    """Draws (B, T) and (B, S) positions of the kind that the case names."""

    def counted(segments: Array | None, length: int) -> Array:
        """The index inside the run of equal ids."""
        index = np.broadcast_to(np.arange(length), (case.batch, length))
        if segments is None:
            return index
        starts = np.ones_like(segments, bool)
        starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
        return index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)

    shapes = ((case.batch, case.q_len), (case.batch, case.kv_len))
    if case.positions == "shuffled":
        extent = max(case.q_len, case.kv_len)
        drawn = [rng.integers(0, extent, shape) for shape in shapes]
    elif case.positions == "shifted":
        start = rng.integers(-20, 40, (case.batch, 1))
        drawn = [
            start + case.kv_len - case.q_len + np.arange(case.q_len),
            start + np.arange(case.kv_len),
        ]
    elif case.positions == "restart":
        drawn = [counted(q_segments, case.q_len), counted(kv_segments, case.kv_len)]
    else:
        ends = np.array([-(2**31), -(2**29) - 1, -(2**29), 0, 2**29, 2**29 + 7, 2**31 - 1])
        drawn = [rng.choice(ends, shape) for shape in shapes]
    return drawn[0].astype(np.int32), drawn[1].astype(np.int32)


def _draw_sinks(case: Case, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Draws sinks of the size of scores; where there are several, one is no sink at all and one is huge."""
    sinks = 2.0 * rng.standard_normal(shape)
    if sinks.size > 2:
        sinks.flat[0], sinks.flat[1] = -np.inf, 3e4
    return sinks.astype(np.float32)


def _per_head_operands(case: Case) -> dict[str, Array]:
    """Sinks, slopes and the randomness of dropout; drawn apart, so that the other arrays do not depend on them."""
    rng = generator(f"{case.name}, per head")
    found: dict[str, Array] = {}
    if case.sinks_form is not None:
        found["sinks"] = _draw_sinks(case, rng, case.form_shape(case.sinks_form))
    if case.alibi_form is not None:
        shape = case.form_shape(case.alibi_form)
        # Mostly as published, falling by powers of two; the first one favours distance.
        slopes = 0.5 ** rng.uniform(1.0, 8.0, shape)
        if slopes.size > 2:
            slopes.flat[0] *= -0.25
        found["alibi_slopes"] = slopes.astype(np.float32)
    if case.dropout_rows:
        heads = 1 if case.broadcast_dropout else case.num_heads
        # One row too few: ids beyond the table are clamped.
        rows = max(case.num_segments - 1, 1)
        found["dropout_table"] = rng.integers(0, 2**32, (rows, heads, 2), dtype=np.uint32)
    elif case.dropout_rate:
        found["dropout_seed"] = rng.integers(0, 2**32, 2, dtype=np.uint32)
        found["dropout_offset"] = rng.integers(0, 2**32, 2, dtype=np.uint32)
    return found


def make(case: Case) -> Operands:
    """Draws the arrays of a case; equal names give equal arrays."""
    rng = generator(case.name)
    dtype = numpy_dtype(case.dtype)
    wide = np.dtype(np.float64) if case.dtype == "float64" else np.dtype(np.float32)
    shape_v = (case.batch, case.kv_len, case.num_kv_heads, case.head_dim_v)
    if case.distribution in _LOGITS:
        q, k = _steered(case, rng)
        v = rng.standard_normal(shape_v)
    else:
        draw_q, draw_k, draw_v = _DRAWS[case.distribution]
        q = draw_q(rng, (case.batch, case.q_len, case.num_heads, case.head_dim))
        k = draw_k(rng, (case.batch, case.kv_len, case.num_kv_heads, case.head_dim))
        v = draw_v(rng, shape_v)
    dlse_shape = (case.batch, case.q_len, case.num_heads)
    bias = mask = q_segments = kv_segments = None
    if case.bias_form is not None:
        bias = rng.standard_normal(case.form_shape(case.bias_form)).astype(
            numpy_dtype(case.bias_dtype or case.dtype)
        )
    if case.mask_form is not None:
        mask = np.asarray(rng.random(case.form_shape(case.mask_form)) < case.mask_density)
    if case.segments is not None:
        q_segments = _draw_segments(case, rng, case.q_len)
        kv_segments = (
            q_segments if case.q_len == case.kv_len else _draw_segments(case, rng, case.kv_len)
        )
    q_positions = kv_positions = None
    if case.positions is not None:
        q_positions, kv_positions = _draw_positions(
            case, generator(f"{case.name}, positions"), q_segments, kv_segments
        )
    return Operands(
        q=q.astype(dtype),
        k=k.astype(dtype),
        v=v.astype(dtype),
        dout=_draw_dout(case, rng).astype(dtype),
        dlse=(rng.standard_normal(dlse_shape) if case.with_dlse else np.zeros(dlse_shape)).astype(
            wide
        ),
        bias=bias,
        mask=mask,
        q_lengths=None if case.q_lengths is None else np.asarray(case.q_lengths, np.int32),
        kv_lengths=None if case.kv_lengths is None else np.asarray(case.kv_lengths, np.int32),
        q_segments=q_segments,
        kv_segments=kv_segments,
        q_positions=q_positions,
        kv_positions=kv_positions,
        captures=_captures(case),
        **_per_head_operands(case),
    )


def _captures(case: Case) -> tuple[Array, ...]:
    """What the score function reads; drawn apart, like the operands of heads."""
    if case.score_mod is None:
        return ()
    rng = generator(f"{case.name}, captures")
    return SCORE_FUNCTIONS[case.score_mod].draw(rng, case.batch, case.num_heads)


def padding(case: Case, operands: Operands) -> tuple[Array, Array]:
    """Marks the padding: (B, T) and (B, S), True at positions beyond the lengths or in a negative segment."""
    marks = []
    for extent, lengths, segments in (
        (case.q_len, operands.q_lengths, operands.q_segments),
        (case.kv_len, operands.kv_lengths, operands.kv_segments),
    ):
        marked = np.zeros((case.batch, extent), bool)
        if lengths is not None:
            marked |= np.arange(extent) >= lengths.astype(np.int64)[:, None]
        if segments is not None:
            marked |= segments < 0
        marks.append(marked)
    return marks[0], marks[1]


def poison(case: Case, operands: Operands) -> Operands:
    """Puts NaN and infinities at every place that is padding, and the largest index into segment slots that no
    length reaches. The solution of the case must not change.
    """
    q_padding, kv_padding = padding(case, operands)

    def poisoned(array: Array, marks: Array) -> Array:
        array = array.copy()
        array[marks] = np.nan
        # Every third bad position holds an infinity instead: 0 * inf is as bad as 0 * NaN, but inf - inf hides else.
        array[marks & (np.arange(marks.shape[1]) % 3 == 2)] = np.inf
        return array

    bias = operands.bias
    if bias is not None:
        marks = (q_padding[:, None, :, None] | kv_padding[:, None, None, :]) & np.ones(
            (1, case.num_heads, 1, 1), bool
        )
        bias = bias.copy()
        bias[_all_reduced(marks, bias.shape)] = np.nan
    return dataclasses.replace(
        operands,
        q=poisoned(operands.q, q_padding),
        k=poisoned(operands.k, kv_padding),
        v=poisoned(operands.v, kv_padding),
        dout=poisoned(operands.dout, q_padding),
        dlse=poisoned(operands.dlse, q_padding),
        bias=bias,
        q_segments=_fill_unused(operands.q_segments, operands.q_lengths),
        kv_segments=_fill_unused(operands.kv_segments, operands.kv_lengths),
        q_positions=_scatter_unused(operands.q_positions, q_padding),
        kv_positions=_scatter_unused(operands.kv_positions, kv_padding),
    )


def _fill_unused(segments: Array | None, lengths: Array | None) -> Array | None:
    """Puts the largest index where no length reaches; on both sides, so that only the lengths tell it is unused."""
    if segments is None or lengths is None:
        return segments
    unused = np.arange(segments.shape[1]) >= lengths.astype(np.int64)[:, None]
    return np.where(unused, HUGE_INDEX, segments).astype(np.int32)


def _scatter_unused(positions: Array | None, marks: Array) -> Array | None:
    """Puts both ends of the range where padding is, in turn."""
    if positions is None:
        return None
    ends = np.where(np.arange(positions.shape[1]) % 2 == 0, HUGE_INDEX, -HUGE_INDEX)
    return np.where(marks, ends, positions).astype(np.int32)


def _all_reduced(marks: Array, shape: tuple[int, ...]) -> Array:
    """Reduces (B, N, T, S) marks with "all" to a shape that broadcasts against it."""
    padded = (1,) * (4 - len(shape)) + shape
    axes = tuple(i for i in range(4) if padded[i] == 1)
    return np.asarray(marks.all(axis=axes, keepdims=True)).reshape(shape)


def call_arguments(
    case: Case, operands: Operands
) -> tuple[tuple[Array, Array, Array], dict[str, Any]]:
    """Builds (query, key, value) and the keyword arguments of `jattn.dot_product_attention`; with a table of dropout
    keys those of `jattn.api.packed_attention`.

    One id array serves both sides where query and key share it, as in self-attention.
    """
    keywords = case.options()
    optional = {
        "bias": operands.bias,
        "mask": operands.mask,
        "query_seq_lengths": operands.q_lengths,
        "key_value_seq_lengths": operands.kv_lengths,
        "query_positions": operands.q_positions,
        "key_value_positions": operands.kv_positions,
        "sinks": operands.sinks,
        "alibi_slopes": operands.alibi_slopes,
        "dropout_seed": operands.dropout_seed,
        "dropout_offset": operands.dropout_offset,
        "dropout_table": operands.dropout_table,
    }
    keywords |= {name: array for name, array in optional.items() if array is not None}
    if case.score_mod is not None:
        keywords["score_mod"] = SCORE_FUNCTIONS[case.score_mod].score_mod
        keywords["captures"] = operands.captures
    if operands.q_segments is not None and operands.kv_segments is not None:
        if operands.q_segments is operands.kv_segments:
            keywords["segment_ids"] = operands.q_segments
        else:
            keywords["query_segment_ids"] = operands.q_segments
            keywords["key_value_segment_ids"] = operands.kv_segments
    return (operands.q, operands.k, operands.v), keywords
