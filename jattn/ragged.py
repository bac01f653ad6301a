"""Ragged batches: sequences of different lengths as rows of one array, one after another.

``RaggedArray`` is the type; ``jattn.ragged_dot_product_attention`` (ragged_attention.py) attends over it. Everything
here but ``to_list`` and the checks of values works under ``jit``, without a transfer to the host.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jattn.arrays import as_array, as_flag, as_integers, is_integer, plain_integer, shown
from jattn.pytrees import exportable
from jattn.sharding import partition
from jattn.spec import as_int32

NO_SEQUENCE = -1  # segment id of a row that belongs to no sequence


@exportable("jattn.RaggedArray")
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RaggedArray:
    """Holds a batch of sequences as consecutive rows.

    A pytree, in which ``values`` alone has a gradient. Offsets and lengths are integers, so ``jax.grad`` with respect
    to a whole RaggedArray needs ``allow_int=True``; with respect to ``values`` it needs nothing.

    Sequence i is the rows ``offsets[i] : offsets[i + 1]``, or the first ``lengths[i]`` of them where ``lengths`` is
    there: the rest is a hole. Rows in holes and beyond the last sequence are padding: what they hold never matters.
    Offsets and lengths that make no sense are refused with ``ValueError`` by the attention call, where they are not
    traced. Traced ones are harmless: offsets are clamped to the rows there are, a decreasing one counts as the
    largest before it, and a sequence longer than ``max_length`` is cut there.

    Attributes:
      values: (total, ...), the rows; (total, N, D) for an operand of attention.
      offsets: (B + 1,) int32.
      lengths: (B,) int32, or None: no holes.
      max_length: upper bound of the lengths, static; None: the number of rows.
      min_length: lower bound of the lengths, static; None: unknown.
    """

    values: jax.Array
    offsets: jax.Array
    lengths: jax.Array | None = None
    max_length: int | None = dataclasses.field(default=None, metadata={"static": True})
    min_length: int | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        # What they hold is checked where they are used: transformations of JAX put anything there.
        object.__setattr__(self, "max_length", plain_integer(self.max_length))
        object.__setattr__(self, "min_length", plain_integer(self.min_length))

    @property
    def num_sequences(self) -> int:
        """B."""
        return _known("offsets.shape[0]", np.shape(self.offsets)[0]) - 1

    @property
    def longest(self) -> int:
        """The static bound of the lengths that ``max_length`` and the number of rows give."""
        total = _known("values.shape[0]", self.values.shape[0])
        return total if self.max_length is None else min(self.max_length, total)

    @property
    def constant_length(self) -> int | None:
        """The length of every sequence where the static bounds agree on one, else None."""
        return self.max_length if self.max_length == self.min_length else None

    def with_values(self, values: jax.Array) -> RaggedArray:
        """Returns other rows in the same sequences.

        Args:
          values: (total, ...), as many rows as these.
        """
        return dataclasses.replace(self, values=values)

    # ---- Where the rows are

    def bounds(self) -> tuple[jax.Array, jax.Array]:
        """Returns the first row of each sequence and the row behind its last: (B,) int32 twice, clamped."""
        return _bounds(*self._edges(), self.values.shape[0], self.longest)

    def rows(self) -> tuple[jax.Array, jax.Array]:
        """Returns the sequence of each row, -1 for padding, and its position in it (0 there): (total,) int32 twice."""
        return _rows(*self._edges(), self.values.shape[0], self.longest)

    def segment_ids(self) -> jax.Array:
        """Returns the sequence of each row, (total,) int32; -1 for padding."""
        return self.rows()[0]

    def _edges(self) -> tuple[jax.Array, jax.Array | None]:
        """Offsets and lengths, whole on every device of an explicit mesh."""
        self.check_static("jattn.RaggedArray")
        lengths = None if self.lengths is None else partition.gathered(self.lengths)
        return partition.gathered(self.offsets), lengths

    # ---- Conversions

    @staticmethod
    def from_list(
        arrays: Sequence[Any],
        *,
        alignment: int = 1,
        max_length: int | None = None,
        min_length: int | None = None,
    ) -> RaggedArray:
        """Packs arrays of shapes (L_i, ...).

        Args:
          arrays: at least one; they agree in all but the first axis, and in the dtype.
          alignment: every sequence starts at a multiple of this many rows; the holes hold zeros.
          max_length, min_length: static bounds. None: those of these lengths, so that a jitted function is traced
            anew for others; of min_length beside a max_length, no bound.

        Raises:
          ValueError: no array, arrays that do not fit together, or lengths outside the bounds.
        """
        if not isinstance(arrays, Sequence) or isinstance(arrays, str | bytes):
            raise ValueError(
                f"jattn.RaggedArray: arrays is a {type(arrays).__name__}, must be a list of arrays: pass list(arrays)"
                " of one that holds a sequence in each place of its first axis"
            )
        if not arrays:
            raise ValueError(
                "jattn.RaggedArray: arrays is empty, must hold at least one: its shape says what a row is"
            )
        parts = [as_array(f"arrays[{i}]", x, "jattn.RaggedArray") for i, x in enumerate(arrays)]
        if any(x.shape[1:] != parts[0].shape[1:] or x.dtype != parts[0].dtype for x in parts):
            shapes = ", ".join(f"{x.dtype} {x.shape}" for x in parts)
            raise ValueError(
                f"jattn.RaggedArray: arrays are {shapes}; they must agree in dtype and in every axis but the first"
            )
        if parts[0].ndim == 0:
            raise ValueError(
                "jattn.RaggedArray: arrays are numbers, must have an axis of rows: pass x[None] for one of a row"
            )
        alignment = _count("jattn.RaggedArray: alignment", alignment, "1 leaves no holes", least=1)
        lengths = [int(x.shape[0]) for x in parts]
        padded = [-(-length // alignment) * alignment for length in lengths]
        pieces: list[jax.Array] = []
        for x, room in zip(parts, padded, strict=True):
            pieces.append(x)
            if room > x.shape[0]:
                pieces.append(jnp.zeros((room - x.shape[0], *x.shape[1:]), x.dtype))
        values = jnp.concatenate(pieces)
        offsets = np.concatenate([[0], np.cumsum(padded)])
        with jax.ensure_compile_time_eval():  # shapes alone say them: they are known under jit, too
            known_offsets, known_lengths = (jnp.asarray(x, jnp.int32) for x in (offsets, lengths))
        made = RaggedArray(
            values,
            known_offsets,
            known_lengths if alignment > 1 else None,  # by what is static, not by the lengths
            max(lengths) if max_length is None else max_length,
            min(lengths) if min_length is None and max_length is None else min_length,
        )
        return made.checked()

    def to_list(self) -> list[jax.Array]:
        """Returns the sequences, (L_i, ...) each.

        Raises:
          ValueError: offsets or lengths are traced, so that the shapes are not known.
        """
        lengths = self.known_lengths()
        if lengths is None:
            raise ValueError(
                "jattn.RaggedArray.to_list: offsets are traced: use to_padded under jit, or leave it first"
            )
        starts = self._known_edges()[:-1]
        return [self.values[a : a + n] for a, n in zip(starts, lengths, strict=True)]

    def known_lengths(self) -> npt.NDArray[np.int64] | None:
        """Returns the lengths as numbers, clamped as in ``bounds``; None where they are traced."""
        self.check_static("jattn.RaggedArray")
        if isinstance(self.offsets, jax.core.Tracer) or isinstance(self.lengths, jax.core.Tracer):
            return None
        lengths = np.diff(self._known_edges())
        if self.lengths is not None:
            lengths = np.clip(np.asarray(self.lengths, np.int64), 0, lengths)
        return np.minimum(lengths, self.longest)

    def _known_edges(self) -> npt.NDArray[np.int64]:
        """The offsets as numbers, clamped."""
        offsets = np.asarray(self.offsets, np.int64)
        return np.maximum.accumulate(np.clip(offsets, 0, self.values.shape[0]))

    @staticmethod
    def from_padded(x: jax.Array, lengths: jax.Array, *, total: int | None = None) -> RaggedArray:
        """Packs the first ``lengths[i]`` rows of every x[i].

        Args:
          x: (B, T, ...).
          lengths: (B,) integers, clamped to [0, T].
          total: how many rows to make, static; None: B * T, which always suffices. Rows that do not fit are lost.

        Raises:
          ValueError: lengths that are not (B,) integers, x without two axes, or a total that is no number of rows.
        """
        name = "jattn.RaggedArray.from_padded"
        x, lengths = as_array("x", x, name), as_integers("lengths", lengths, name)
        _check_padded(name, x)
        batch, longest = x.shape[:2]
        if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise ValueError(
                f"{name}: lengths are {lengths.dtype} {lengths.shape}, must be integers of shape ({batch},): one for"
                " each batch entry"
            )
        if total is not None:
            total = _count(f"{name}: total", total, "None is B * T, which always suffices")
        counts = jnp.clip(partition.gathered(jnp.asarray(as_int32(lengths))), 0, longest)
        offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
        if total is not None:
            offsets = jnp.minimum(offsets, total)
        empty = jnp.zeros((batch * longest if total is None else total, 0))
        which, position = RaggedArray(empty, offsets).rows()
        flat = partition.gathered_along(x, range(2)).reshape(batch * longest, *x.shape[2:])
        values = take_rows(flat, which * longest + position, which >= 0)
        return RaggedArray(values, offsets, None, longest)

    def to_padded(self, length: int | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns the sequences as (B, length, ...), zeros behind them, and their lengths (B,) int32.

        Args:
          length: static; None: ``longest``. Longer sequences are cut.

        Raises:
          ValueError: a length that is no number of rows.
        """
        length = self.longest if length is None else length
        length = _count(
            "jattn.RaggedArray.to_padded: length", length, "None is the bound of them all"
        )
        starts, stops = self.bounds()
        counts = jnp.minimum(stops - starts, length)
        position = jnp.arange(length, dtype=jnp.int32)[None, :]
        inside = position < counts[:, None]
        return take_rows(self.values, starts[:, None] + position, inside), counts

    @staticmethod
    def from_segment_ids(
        values: jax.Array, ids: jax.Array, num_sequences: int, *, max_length: int | None = None
    ) -> RaggedArray:
        """Takes rows whose ids (total,) say to which of ``num_sequences`` sequences they belong.

        The rows of a sequence must be neighbours and the sequences in rising order; ids outside [0, num_sequences)
        mark padding, which may stand between and behind sequences. Checked where the ids are not traced.

        Args:
          values: (total, ...).
          ids: (total,) integers.
          num_sequences: B, static; a sequence that no row belongs to is empty.
          max_length: static bound of the lengths; None: total.

        Raises:
          ValueError: a sequence is in pieces, the ids do not rise, or an argument is of a wrong type or shape.
        """
        name = "jattn.RaggedArray.from_segment_ids"
        values, ids = as_array("values", values, name), as_integers("ids", ids, name)
        if values.ndim == 0:
            raise ValueError(
                f"{name}: values has shape (), must have an axis of rows: pass x[None] for one row"
            )
        total = values.shape[0]
        if ids.shape != (total,):
            raise ValueError(
                f"{name}: ids have shape {ids.shape}, must be ({total},), one for each row"
            )
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"{name}: ids have dtype {ids.dtype}, must be integers: cast them")
        num_sequences = _count(
            f"{name}: num_sequences", num_sequences, "it counts empty sequences too"
        )
        if max_length is not None:
            max_length = _count(f"{name}: max_length", max_length, "None is the number of rows")
        if not isinstance(ids, jax.core.Tracer):
            # What numpy makes of it is known even where the call is traced.
            known: Any = np.asarray(ids)
            ids = as_int32(known)
            _check_ids(name, np.asarray(ids), num_sequences, max_length)
        ids = partition.gathered(as_int32(jnp.asarray(ids)))
        row = jnp.arange(total, dtype=jnp.int32)
        bucket = jnp.where((ids >= 0) & (ids < num_sequences), ids, num_sequences)
        size = num_sequences + 1
        counts = jnp.zeros(size, jnp.int32).at[bucket].add(1)[:-1]
        stops = jnp.zeros(size, jnp.int32).at[bucket].max(row + 1)[:-1]
        # An empty sequence starts where the one before it stops.
        stops = jax.lax.cummax(stops) if num_sequences else stops
        starts = jnp.where(
            counts > 0, stops - counts, jnp.concatenate([jnp.zeros(1, jnp.int32), stops])[:-1]
        )
        offsets = jnp.concatenate(
            [starts, stops[-1:] if num_sequences else jnp.zeros(1, jnp.int32)]
        )
        return RaggedArray(values, offsets, counts, max_length)

    @staticmethod
    def from_mask(x: jax.Array, mask: jax.Array, *, check: bool = True) -> RaggedArray:
        """Packs the rows of x (B, T, ...) that mask (B, T), bool, True for a real row, keeps; it must be left-aligned.

        Args:
          check: False: takes the first ``mask[i].sum()`` rows of every x[i], whichever they are. True needs a mask
            that is not traced.

        Raises:
          ValueError: the mask is not bool or not left-aligned, or it is traced and ``check`` is True.
        """
        function = "jattn.RaggedArray.from_mask"
        x, mask = as_array("x", x, function), as_array("mask", mask, function)
        check = as_flag("check", check, function)
        _check_padded(function, x)
        if mask.shape != x.shape[:2]:
            raise ValueError(
                f"jattn.RaggedArray.from_mask: mask has shape {mask.shape}, must be {x.shape[:2]}: one for each row"
            )
        if mask.dtype != bool:
            raise ValueError(
                f"jattn.RaggedArray.from_mask: mask has dtype {mask.dtype}, must be bool, True for a real row: compare"
                " it with 0"
            )
        if check:
            if isinstance(mask, jax.core.Tracer):
                raise ValueError(
                    "jattn.RaggedArray.from_mask: mask is traced, so its values cannot be checked: pass check=False,"
                    " or pack outside of jit"
                )
            with jax.ensure_compile_time_eval():  # a known mask, even where the call is traced
                aligned = bool(is_left_aligned(mask))
            if not aligned:
                raise ValueError(
                    "jattn.RaggedArray.from_mask: mask is not left-aligned, each row must be True and then False:"
                    " pass it as mask= of jattn.dot_product_attention"
                )
        return RaggedArray.from_padded(x, mask.sum(1))

    # ---- Checks

    def check_static(self, name: str) -> None:
        """Checks what is known while tracing.

        Args:
          name: what errors call it.

        Raises:
          ValueError: values are no array of rows, a bound is no number of them, or offsets or lengths have the wrong
            dtype or shape.
        """
        if not hasattr(self.values, "dtype"):
            kind = type(self.values).__name__
            raise ValueError(f"{name}.values is a {kind}, must be an array: jnp.asarray(...)")
        if self.values.ndim == 0:
            raise ValueError(
                f"{name}.values has shape (), must have an axis of rows: pass x[None] for one row"
            )
        for bound, value, unbounded in (
            ("max_length", self.max_length, "None is the number of rows"),
            ("min_length", self.min_length, "None is no bound"),
        ):
            if value is not None:
                _count(f"{name}.{bound}", value, unbounded)
        for field, x in (("offsets", self.offsets), ("lengths", self.lengths)):
            if x is None:
                continue
            if not hasattr(x, "dtype"):
                raise ValueError(
                    f"{name}.{field} is {x!r}, must be an int32 array: jnp.asarray(...)"
                )
            if x.dtype != jnp.int32:
                raise ValueError(f"{name}.{field} has dtype {x.dtype}, must be int32: cast it")
            if x.ndim != 1 or (field == "offsets" and x.shape[0] == 0):
                raise ValueError(
                    f"{name}.{field} has shape {x.shape}, must have rank 1 and B + 1 elements"
                )
        if self.lengths is not None and self.lengths.shape[0] != self.num_sequences:
            raise ValueError(
                f"{name}.lengths has shape {self.lengths.shape}, must be ({self.num_sequences},): one less than offsets"
            )

    def checked(self, name: str = "jattn.RaggedArray") -> RaggedArray:
        """Returns itself after a check of the values of offsets and lengths too, where they are not traced.

        Args:
          name: what errors call it.

        Raises:
          ValueError: offsets decrease or leave the rows, or lengths leave their room or the static bounds.
        """
        self.check_static(name)
        if isinstance(self.offsets, jax.core.Tracer) or isinstance(self.lengths, jax.core.Tracer):
            return self
        offsets = np.asarray(self.offsets, np.int64)
        total = self.values.shape[0]
        room = np.diff(offsets)
        if (room < 0).any() or offsets[0] < 0 or offsets[-1] > total:
            raise ValueError(
                f"{name}.offsets are {offsets.tolist()}, must not decrease and must lie in [0, {total}], the rows there"
                " are"
            )
        lengths = room if self.lengths is None else np.asarray(self.lengths, np.int64)
        if (lengths < 0).any() or (lengths > room).any():
            raise ValueError(
                f"{name}.lengths are {lengths.tolist()}, must lie between 0 and the distances of the offsets,"
                f" {room.tolist()}"
            )
        for bound, is_beyond, word in (
            (self.max_length, np.greater, "at most"),
            (self.min_length, np.less, "at least"),
        ):
            if bound is not None and is_beyond(lengths, bound).any():
                raise ValueError(
                    f"{name} has lengths {lengths.tolist()}, which must be {word} the bound {bound}"
                )
        return self


def _known(name: str, extent: Any) -> int:
    if jax.export.is_symbolic_dim(extent):
        raise ValueError(
            f"jattn.RaggedArray: {name} is {extent}, must be a known number: export with this extent fixed, and longer"
            " than needed if it varies (rows behind the last sequence and empty sequences do no harm)"
        )
    return int(extent)


# Compiled also where the caller is not, so that an eager call is one program and not twenty.
@functools.partial(jax.jit, static_argnums=(2, 3))
def _bounds(
    offsets: jax.Array, lengths: jax.Array | None, total: int, longest: int
) -> tuple[jax.Array, jax.Array]:
    edges = jax.lax.cummax(jnp.clip(offsets.astype(jnp.int32), 0, total))
    starts, counts = edges[:-1], edges[1:] - edges[:-1]
    if lengths is not None:
        counts = jnp.clip(lengths.astype(jnp.int32), 0, counts)
    return starts, starts + jnp.minimum(counts, longest)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _rows(
    offsets: jax.Array, lengths: jax.Array | None, total: int, longest: int
) -> tuple[jax.Array, jax.Array]:
    if offsets.shape[0] == 1:
        return jnp.full(total, NO_SEQUENCE, jnp.int32), jnp.zeros(total, jnp.int32)
    starts, stops = _bounds(offsets, lengths, total, longest)
    row = jnp.arange(total, dtype=jnp.int32)
    # Of sequences that start at one row all but the last are empty.
    found = jnp.searchsorted(starts, row, side="right", method="scan_unrolled") - 1
    which = jnp.maximum(found.astype(jnp.int32), 0)
    inside = (row >= starts[which]) & (row < stops[which])
    return jnp.where(inside, which, NO_SEQUENCE), jnp.where(inside, row - starts[which], 0)


def take_rows(rows: jax.Array, index: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns ``rows[index]`` where ``valid``, else zeros, through which no gradient flows."""
    if rows.shape[0] == 0:
        return jnp.zeros((*index.shape, *rows.shape[1:]), rows.dtype)
    rows = partition.gathered_along(jnp.asarray(rows), range(1))
    # An index beyond all rows is filled, and dropped by the transpose: nothing is multiplied by zero.
    return rows.at[jnp.where(valid, index, rows.shape[0])].get(
        mode="fill", fill_value=0, out_sharding=partition.sharding_of_rows(rows, index.ndim)
    )


def is_left_aligned(mask: jax.Array) -> jax.Array:
    """Says whether every row of a mask is True up to some column and False from there on; a bool scalar.

    Args:
      mask: (B, T), bool or what converts to it.
    """
    kept = as_array("mask", mask, "jattn.is_left_aligned").astype(bool)
    if kept.ndim != 2:
        raise ValueError(
            f"jattn.is_left_aligned: mask has shape {kept.shape}, must be (B, T): mask[None] for one row"
        )
    return ~jnp.any(~kept[..., :-1] & kept[..., 1:])


def _count(name: str, value: Any, way_out: str, *, least: int = 0) -> int:
    """A static number, of rows or sequences."""
    if not is_integer(value) or not least <= value < 2**31:
        raise ValueError(
            f"{name} is {shown(value)}, must be an integer from {least} to 2^31 - 1, known while tracing: {way_out}"
        )
    return int(value)


def _check_padded(name: str, x: jax.Array) -> None:
    if x.ndim < 2:
        raise ValueError(
            f"{name}: x has shape {x.shape}, must be (B, T, ...): pass x[None] for a batch of one"
        )


def _check_ids(
    name: str, ids: npt.NDArray[np.int32], num_sequences: int, max_length: int | None
) -> None:
    real = np.flatnonzero((ids >= 0) & (ids < num_sequences))
    if (np.diff(ids[real]) < 0).any():
        raise ValueError(f"{name}: ids must not decrease; sort the rows by sequence")
    holes = real.size and np.diff(real)[np.diff(ids[real]) == 0].max(initial=1) > 1
    if holes:
        raise ValueError(
            f"{name}: the rows of a sequence must be neighbours, padding stands between some"
        )
    longest = int(np.bincount(ids[real]).max(initial=0)) if real.size else 0
    if max_length is not None and longest > max_length:
        raise ValueError(
            f"{name}: max_length is {max_length}, but a sequence has {longest} rows: leave it out, or raise it"
        )
