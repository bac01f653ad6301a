"""One attention problem as data: ``Spec`` says everything static about it, ``Operands`` holds its arrays.

Letters: B batch, T query length, S key length, N query heads, K key/value heads, D head dim, Dv head dim of values.
The meaning of every field is what ``reference.py`` computes from it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jattn.masks import UNBOUNDED_BAND, Band
from jattn.score_program import ScoreProgram

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")

_LARGEST_DISTANCE = 2**31 - 1

# Features a backend must say it understands; dispatch refuses a problem that uses another one.
FEATURES = (
    "bias",
    "mask",
    "band",
    "lengths",
    "segments",
    "softcap",
    "grouped_heads",
    "value_head_dim",
    "negative_scale",
    "positions",
    "sinks",
    "alibi_slopes",
    "dropout",
    "dropout_rows",
    "score_mod",
)


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Static facts of dropout. The rate and the keys are operands.

    Attributes:
      keys: (1 or B, 1 or N): for how many batch entries and heads there are keys; with ``rows`` the first extent is
        the number of packed sequences.
      rate: 1 or B: for how many batch entries there are rates.
      rows: the key of a query is that of its segment id, and the coordinates of a pair are positions, not indices.
    """

    keys: tuple[int, int]
    rate: int = 1
    rows: bool = False


@dataclasses.dataclass(frozen=True)
class Spec:
    """Describes one attention problem; holds no array. Hashable; equal problems have equal specs.

    Attributes:
      batch, q_len, kv_len, num_heads, num_kv_heads, head_dim, head_dim_v: extents (B, T, S, N, K, D, Dv). May be
        symbolic while exporting.
      dtype: of q, k, v and the result.
      scale: multiplier of q.k, any sign.
      softcap: scores become ``softcap * tanh(s / softcap)``; 0 for none.
      band: visibility by position.
      bias: shape of the bias, broadcastable to (B, N, T, S), or None; ``bias_dtype`` goes with it.
      mask: shape of the bool mask, likewise.
      q_lengths, kv_lengths, segments, positions: whether these operands are there.
      sinks, alibi_slopes: (1 or B, 1 or N), extents of the operand, or None.
      dropout: its static facts, or None.
      score_mod: what changes the scores that all the others make, before masks, or None.
    """

    batch: int
    q_len: int
    kv_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: str
    scale: float
    softcap: float = 0.0
    band: Band = UNBOUNDED_BAND
    bias: tuple[int, ...] | None = None
    bias_dtype: str = ""
    mask: tuple[int, ...] | None = None
    q_lengths: bool = False
    kv_lengths: bool = False
    segments: bool = False
    positions: bool = False
    sinks: tuple[int, int] | None = None
    alibi_slopes: tuple[int, int] | None = None
    dropout: Dropout | None = None
    score_mod: ScoreProgram | None = None

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 1

    @property
    def lse_dtype(self) -> str:
        """Type of the log-sum-exp: float64 for a float64 problem, float32 otherwise."""
        return "float64" if self.dtype == "float64" else "float32"

    def features(self) -> frozenset[str]:
        """Names of the features of ``FEATURES`` that this problem uses."""
        used = {
            "bias": self.bias is not None,
            "mask": self.mask is not None,
            "band": not self.band.unbounded,
            "lengths": self.q_lengths or self.kv_lengths,
            "segments": self.segments,
            "softcap": self.softcap > 0,
            "grouped_heads": self.num_heads != self.num_kv_heads,
            "value_head_dim": self.head_dim != self.head_dim_v,
            "negative_scale": self.scale <= 0,
            "positions": self.positions,
            "sinks": self.sinks is not None,
            "alibi_slopes": self.alibi_slopes is not None,
            "dropout": self.dropout is not None,
            "dropout_rows": self.dropout is not None and self.dropout.rows,
            "score_mod": self.score_mod is not None,
        }
        return frozenset(name for name, is_used in used.items() if is_used)

    @staticmethod
    def of(
        operands: Operands[Any],
        *,
        scale: float,
        softcap: float,
        band: Band,
        dropout_rows: bool = False,
        score_mod: ScoreProgram | None = None,
    ) -> Spec:
        """Returns the problem of ``operands``, arrays or their types; the arguments are what those do not say."""
        batch, q_len, num_heads, head_dim = operands.q.shape
        _, kv_len, num_kv_heads, head_dim_v = operands.v.shape
        dropout = None
        if operands.dropout_keys is not None and operands.dropout_rate is not None:
            keys = tuple(operands.dropout_keys.shape[:2])
            dropout = Dropout(keys, operands.dropout_rate.shape[0], dropout_rows)
        return Spec(
            batch=batch,
            q_len=q_len,
            kv_len=kv_len,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=str(operands.q.dtype),
            scale=scale,
            softcap=softcap,
            band=band,
            bias=None if operands.bias is None else tuple(operands.bias.shape),
            bias_dtype="" if operands.bias is None else str(operands.bias.dtype),
            mask=None if operands.mask is None else tuple(operands.mask.shape),
            q_lengths=operands.q_lengths is not None,
            kv_lengths=operands.kv_lengths is not None,
            segments=operands.q_segments is not None,
            positions=operands.q_positions is not None,
            sinks=None if operands.sinks is None else tuple(operands.sinks.shape[:2]),
            alibi_slopes=(
                None if operands.alibi_slopes is None else tuple(operands.alibi_slopes.shape[:2])
            ),
            dropout=dropout,
            score_mod=score_mod,
        )

    def for_operands(self, operands: Operands[Any]) -> Spec:
        """Returns this problem with the extents of ``operands`` (a batch was folded, or the call was cut in
        pieces).
        """
        return Spec.of(
            operands,
            scale=self.scale,
            softcap=self.softcap,
            band=self.band,
            dropout_rows=self.dropout is not None and self.dropout.rows,
            score_mod=self.score_mod,
        )

    def without_sinks(self) -> Spec:
        """The problem that a backend's backward pass gets: lse and out know the sinks already."""
        return dataclasses.replace(self, sinks=None)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the four arrays that results and gradients share."""
        return {
            "q": (self.batch, self.q_len, self.num_heads, self.head_dim),
            "k": (self.batch, self.kv_len, self.num_kv_heads, self.head_dim),
            "v": (self.batch, self.kv_len, self.num_kv_heads, self.head_dim_v),
            "out": (self.batch, self.q_len, self.num_heads, self.head_dim_v),
            "lse": (self.batch, self.num_heads, self.q_len),
        }

    def __str__(self) -> str:
        parts = [
            f"q {self.dtype} ({self.batch}, {self.q_len}, {self.num_heads}, {self.head_dim})",
            f"k ({self.batch}, {self.kv_len}, {self.num_kv_heads}, {self.head_dim})",
            f"v ({self.batch}, {self.kv_len}, {self.num_kv_heads}, {self.head_dim_v})",
            f"scale {self.scale:.6g}",
        ]
        if not self.band.unbounded:
            parts.append(f"band {self.band}")
        if self.bias is not None:
            parts.append(f"bias {self.bias_dtype} {self.bias}")
        if self.mask is not None:
            parts.append(f"mask {self.mask}")
        if self.softcap:
            parts.append(f"softcap {self.softcap:g}")
        names = (
            "q_lengths",
            "kv_lengths",
            "segments",
            "positions",
            "sinks",
            "alibi_slopes",
            "dropout",
            "score_mod",
        )
        parts += [name for name in names if getattr(self, name)]
        return "   ".join(parts)


A = TypeVar("A")


class Operands(NamedTuple, Generic[A]):
    """The arrays of a problem in their fixed order; None where the problem has none.

    Shapes: q (B, T, N, D), k (B, S, K, D), v (B, S, K, Dv), bias and mask broadcastable to (B, N, T, S), q_lengths
    and kv_lengths (B,) int32, q_segments and q_positions (B, T), kv_segments and kv_positions (B, S) int32, sinks and
    alibi_slopes (1 or B, 1 or N, 1) float32, dropout_keys (1 or B, 1 or N, 2) uint32, dropout_rate (1 or B, 1, 1)
    float32. What stands in dropout_keys: jattn/dropout.py. batch_ids (B,) and head_ids (N,) int32: the indices that a
    score function gets, which stay those of the whole problem where a call is cut; captures: the arrays that it reads,
    each at least of rank 1.
    """

    q: A
    k: A
    v: A
    bias: A | None = None
    mask: A | None = None
    q_lengths: A | None = None
    kv_lengths: A | None = None
    q_segments: A | None = None
    kv_segments: A | None = None
    q_positions: A | None = None
    kv_positions: A | None = None
    sinks: A | None = None
    alibi_slopes: A | None = None
    dropout_keys: A | None = None
    dropout_rate: A | None = None
    batch_ids: A | None = None
    head_ids: A | None = None
    captures: tuple[A, ...] = ()

    def differentiable(self) -> tuple[A | None, ...]:
        """q, k, v, bias, sinks, alibi_slopes, *captures: the operands that have gradients, if they are floats, in the
        order of ``Wants``.
        """
        return (self.q, self.k, self.v, self.bias, self.sinks, self.alibi_slopes, *self.captures)

    def single(self) -> tuple[A | None, ...]:
        """All but the captures, in order."""
        return self[:-1]

    def flat(self) -> tuple[A, ...]:
        """The arrays that are there, in order."""
        return (*(x for x in self.single() if x is not None), *self.captures)

    @staticmethod
    def unflatten(spec: Spec, arrays: tuple[A, ...]) -> Operands[A]:
        """The inverse of ``flat`` for a problem."""
        rest = iter(arrays)
        present = Operands.presence(spec)
        single = [next(rest) if is_there else None for is_there in present.single()]
        return Operands._make((*single, tuple(next(rest) for _ in present.captures)))

    @staticmethod
    def count(spec: Spec) -> int:
        """How many arrays a problem has."""
        present = Operands.presence(spec)
        return sum(map(bool, present.single())) + len(present.captures)

    @staticmethod
    def presence(spec: Spec) -> Operands[bool]:
        """Which arrays a problem has."""
        return Operands(
            q=True,
            k=True,
            v=True,
            bias=spec.bias is not None,
            mask=spec.mask is not None,
            q_lengths=spec.q_lengths,
            kv_lengths=spec.kv_lengths,
            q_segments=spec.segments,
            kv_segments=spec.segments,
            q_positions=spec.positions,
            kv_positions=spec.positions,
            sinks=spec.sinks is not None,
            alibi_slopes=spec.alibi_slopes is not None,
            dropout_keys=spec.dropout is not None,
            dropout_rate=spec.dropout is not None,
            batch_ids=spec.score_mod is not None,
            head_ids=spec.score_mod is not None,
            captures=() if spec.score_mod is None else (True,) * len(spec.score_mod.captures),
        )


def distances(
    spec: Spec, operands: Operands[jax.Array], rows: jax.Array, columns: jax.Array
) -> jax.Array:
    """Says how far to the right of its query each key is, for bands and slopes.

    Args:
      spec: the problem.
      operands: its arrays; positions must already be cut to the block.
      rows: (t,) int32, the query indices of the block.
      columns: (s,) int32, the key indices of the block.

    Returns:
      int32, broadcastable to (B, 1, t, s).
    """
    if operands.q_positions is not None and operands.kv_positions is not None:
        return operands.kv_positions[:, None, None, :] - operands.q_positions[:, None, :, None]
    q_lengths, kv_lengths = clamped_lengths(spec, operands)
    offset = kv_lengths - q_lengths if spec.band.lower_right else 0
    return columns[None, None, None, :] - rows[None, None, :, None] - offset


def visibility(
    spec: Spec, operands: Operands[jax.Array], rows: jax.Array, columns: jax.Array
) -> jax.Array:
    """Says which keys each query sees, for a block of rows and columns of the scores.

    Args:
      spec: the problem.
      operands: its arrays; dense mask, segment ids and positions must already be cut to the block.
      rows: (t,) int32, the query indices of the block.
      columns: (s,) int32, the key indices of the block.

    Returns:
      bool, broadcastable to (B, N, t, s).
    """
    q_lengths, kv_lengths = clamped_lengths(spec, operands)
    visible = (rows[None, None, :, None] < q_lengths) & (columns[None, None, None, :] < kv_lengths)
    if not spec.band.unbounded:
        distance = distances(spec, operands, rows, columns)
        # A limit beyond any distance there can be is no limit; this keeps the comparison within int32.
        if spec.band.left < _LARGEST_DISTANCE:
            visible &= distance >= min(-spec.band.left, _LARGEST_DISTANCE)
        if spec.band.right < _LARGEST_DISTANCE:
            visible &= distance <= max(spec.band.right, -_LARGEST_DISTANCE)
    if operands.q_segments is not None and operands.kv_segments is not None:
        q_ids = operands.q_segments[:, None, :, None]
        visible &= (q_ids == operands.kv_segments[:, None, None, :]) & (q_ids >= 0)
    if operands.mask is not None:
        visible &= operands.mask
    return visible


def clamped_lengths(spec: Spec, operands: Operands[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns query and key lengths as (B or 1, 1, 1, 1) int32 arrays inside [0, T] and [0, S]."""

    def lengths(values: jax.Array | None, extent: int) -> jax.Array:
        if values is None:
            return jnp.full((1, 1, 1, 1), extent, jnp.int32)
        return jnp.clip(values, 0, extent)[:, None, None, None]

    return lengths(operands.q_lengths, spec.q_len), lengths(operands.kv_lengths, spec.kv_len)


# ---- Indices, as the kernels take them


def as_int32(x: jax.Array) -> jax.Array:
    """Returns integers of any type as int32, those beyond its limits at the limits."""
    return (saturated(x) if is_wide(x.dtype) else x).astype(jnp.int32)


def is_wide(dtype: Any) -> bool:
    """Returns whether an integer type has values that int32 has not."""
    return jnp.iinfo(dtype).bits > 32 or dtype == jnp.uint32


def saturated(x: Any) -> Any:
    """Returns an array of integers, JAX's or numpy's, with those beyond the limits of int32 at the limits."""
    return x.clip(max(jnp.iinfo(x.dtype).min, -(2**31)), 2**31 - 1)
