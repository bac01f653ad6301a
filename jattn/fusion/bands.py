"""Masks that are bands: comparisons of row and column numbers, as ``tril`` and ``iota >= iota`` make them."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.fusion.axes import ONES, Named, axes_before_move, compact_of
from jattn.fusion.graph import (
    Axes,
    Node,
    Value,
    known_array,
    known_numbers,
    made_number,
)


@dataclasses.dataclass(frozen=True)
class Affine:
    """A sum of numbers of rows, times small integers, and a constant: ``slopes`` by axis name."""

    slopes: tuple[tuple[str, int], ...]
    constant: int

    @staticmethod
    def of(slopes: dict[str, int], constant: int) -> Affine:
        return Affine(tuple(sorted((k, v) for k, v in slopes.items() if v)), constant)

    def plus(self, other: Affine, sign: int = 1) -> Affine:
        slopes = dict(self.slopes)
        for name, slope in other.slopes:
            slopes[name] = slopes.get(name, 0) + sign * slope
        return Affine.of(slopes, self.constant + sign * other.constant)

    def of_part(self, parts: dict[str, tuple[int, int]]) -> Affine:
        """The same of a part, by where it begins and how long it is on each axis; one of size 1 may be repeated."""
        return Affine.of(
            {name: slope for name, slope in self.slopes if parts[name][1] != 1},
            self.constant + sum(slope * parts[name][0] for name, slope in self.slopes),
        )


_SLICES = ("slice", "dynamic_slice")


def _parts(node: Node, axes: Axes) -> dict[str, tuple[int, int]] | None:
    """Where along each axis a slice begins, and its length; None if it is not known, or leaves elements out between."""
    whole, sizes = node.inputs[0].shape, node.outputs[0].shape
    if node.name == "slice":
        if set(node.params["strides"] or (1,)) != {1}:
            return None
        begins = list(node.params["start_indices"])
    else:
        starts = [x.number for x in node.inputs[1:] if x.number is not None]
        if len(starts) != len(sizes) or not all(isinstance(n, int) for n in (*whole, *sizes)):
            return None
        limits = [n - m for n, m in zip(whole, sizes, strict=True)]
        begins = [min(max(int(x), 0), last) for x, last in zip(starts, limits, strict=True)]
    return dict(zip(axes, zip(begins, sizes, strict=True), strict=True))


def _affine(value: Value, axes: Axes) -> Affine | None:
    """The sum of numbers of rows that every element of a value is, exactly; None if it may be something else."""
    known = value.number
    if known is not None:
        is_whole = math.isfinite(known) and known == int(known)
        return Affine.of({}, int(known)) if is_whole else None
    exact_below = _exact_below(value)
    found = _affine_of_rows(value, axes) if exact_below else None
    return found if found is not None and abs(found.constant) < exact_below else None


def _affine_of_rows(value: Value, axes: Axes) -> Affine | None:
    node = value.node
    if node is None:
        return _affine_of_array(value, axes)
    if node.name == "iota":
        along = node.params["dimension"]  # of size 1 it may be repeated, and is 0 everywhere
        return Affine.of({axes[along]: 1} if value.shape[along] != 1 else {}, 0)
    if (inner := _rearranged(value, axes)) is not None:
        return _affine(*inner)
    if node.name in _SLICES and (parts := _parts(node, axes)) is not None:
        whole = _affine(node.inputs[0], axes)
        return None if whole is None else whole.of_part(parts)
    if node.name in ("add", "sub"):
        one, other = (_affine(x, _axes_of_input(x, axes)) for x in node.inputs)
        if one is None or other is None:
            return None
        return one.plus(other, 1 if node.name == "add" else -1)
    return None


def _affine_of_array(value: Value, axes: Axes) -> Affine | None:
    """The same of an array that is there while tracing."""
    array = known_numbers(value)
    if array is None or array.size == 0:
        return None
    steps = [
        float(array.take(1, axis).ravel()[0] - array.ravel()[0]) if n > 1 else 0.0
        for axis, n in enumerate(array.shape)
    ]
    first = float(array.ravel()[0])
    if not all(math.isfinite(x) and x == int(x) for x in (first, *steps)):
        return None
    places = np.indices(array.shape, sparse=True)
    if (array != sum((int(a) * x for a, x in zip(steps, places, strict=True)), int(first))).any():
        return None
    return Affine.of({name: int(a) for name, a in zip(axes, steps, strict=True)}, int(first))


def _exact_below(value: Value) -> int:
    """Below which constants a type holds numbers of rows plus a constant exactly; 0: not even numbers of rows.

    Narrow types wrap or round, and a difference of unsigned numbers is never negative.
    """
    dtype = jnp.dtype(value.dtype)
    if dtype.itemsize < 4 or dtype.kind not in "if":
        return 0
    return 1 << (30 if dtype.kind == "i" else 22)


def _axes_of_input(value: Value, axes: Axes) -> Axes:
    return axes if value.shape else ()


def _rearranged(value: Value, axes: Axes) -> tuple[Value, Axes] | None:
    """What a value holds in another arrangement of its axes, or in another type."""
    node = value.node
    if node is None:
        return None
    inner = node.inputs[0] if node.inputs else value
    if node.name in ("transpose", *ONES):
        before = axes_before_move(node, axes)
        return None if before is None else (inner, before)
    if node.name in ("convert_element_type", "copy", "stop_gradient", "pvary", "pcast"):
        return inner, axes
    return None


# Which operand is not less than the other where a comparison is true, and what is taken off their difference then.
_COMPARISONS = {"ge": (0, 0), "gt": (0, 1), "le": (1, 0), "lt": (1, 1)}
_OPPOSITES = {"ge": "lt", "gt": "le", "le": "gt", "lt": "ge"}


def _compared(name: str, operands: Sequence[Value], axes: Axes) -> frozenset[Affine] | None:
    """The sums that must not be negative where a comparison is true."""
    larger, taken_off = _COMPARISONS[name]
    whole = _affine(operands[larger], _axes_of_input(operands[larger], axes))
    smaller = operands[1 - larger]
    parts = _largest_of(smaller, _axes_of_input(smaller, axes))
    if whole is None or None in parts:
        return None
    bound = whole.plus(Affine.of({}, taken_off), -1)
    return frozenset(bound.plus(part, -1) for part in parts if part is not None)


def _largest_of(value: Value, axes: Axes) -> list[Affine | None]:
    """Sums of which a value is the largest: one, or two of a distance."""
    if (absolute := value.made_by("abs")) is not None:
        (operand,) = absolute.inputs
        found = _affine(operand, _axes_of_input(operand, axes))
        return [found, None if found is None else Affine.of({}, 0).plus(found, -1)]
    if (inner := _rearranged(value, axes)) is not None and inner[0].dtype == value.dtype:
        return _largest_of(*inner)
    return [_affine(value, axes)]


def conditions(value: Value, axes: Axes, is_true: bool = True) -> frozenset[Affine] | None:
    """The sums that must not be negative where a bool value is true, or false; None if that is something else."""
    node = value.node
    if node is not None and node.name in _COMPARISONS:
        return _compared(node.name if is_true else _OPPOSITES[node.name], node.inputs, axes)
    if is_true:
        return _conditions(value, axes)
    inner = None if node is None else _rearranged(value, axes)
    if inner is not None and inner[0].dtype == value.dtype:
        return conditions(*inner, is_true)
    found = _conditions(value, axes)
    return None if found is None else negated(found)


def _conditions(value: Value, axes: Axes) -> frozenset[Affine] | None:
    """The same of a value that is no comparison, where it is true."""
    known = value.number
    if known is not None:
        return frozenset() if known else None
    node = value.node
    if node is None:
        array = known_array(value)
        return frozenset() if array is not None and array.all() else None
    if node.name == "and" and value.dtype == bool:
        both = [conditions(x, _axes_of_input(x, axes)) for x in node.inputs]
        return None if None in both else frozenset().union(*(x for x in both if x is not None))
    if node.name == "select_n" and len(node.inputs) == 3:
        choice, *chosen = node.inputs
        zeros = [i for i, x in enumerate(chosen) if x.number == 0]
        if len(zeros) != 1:
            return None
        where = conditions(choice, _axes_of_input(choice, axes), is_true=zeros == [0])
        rest = conditions(chosen[1 - zeros[0]], _axes_of_input(chosen[1 - zeros[0]], axes))
        return None if where is None or rest is None else where | rest
    if node.name in ("ne", "eq") and node.inputs[1].number == 0:
        return conditions(node.inputs[0], axes, is_true=node.name == "ne")
    if node.name in _SLICES and (parts := _parts(node, axes)) is not None:
        whole = conditions(node.inputs[0], axes)
        return None if whole is None else frozenset(x.of_part(parts) for x in whole)
    inner = _rearranged(value, axes)
    # A change of type keeps what is not 0 where one of both is bool: numbers may be rounded to 0.
    if inner is not None and (
        inner[0].dtype == value.dtype or bool in (inner[0].dtype, value.dtype)
    ):
        return conditions(*inner)
    return None


def negated(found: frozenset[Affine]) -> frozenset[Affine] | None:
    """The sums that must not be negative where a bool value is false; None if that takes a choice between several."""
    if len(found) != 1:
        return None
    (one,) = found
    return frozenset({Affine.of({}, -1).plus(one, -1)})


def conjunction(mask: Named, is_true: bool) -> list[tuple[Named, bool]]:
    """Masks that must all be true (True), or all be false, where a mask is true, or false (``is_true``)."""
    mask = compact_of(mask)
    if mask.value.number is not None and bool(mask.value.number) == is_true:
        return []
    node = mask.value.node
    if node is None or mask.value.dtype != bool:
        return [(mask, is_true)]
    parts = [Named(x, _axes_of_input(x, mask.axes)) for x in node.inputs]
    if node.name == "not":
        return conjunction(parts[0], not is_true)
    if node.name == ("and" if is_true else "or"):
        return [x for part in parts for x in conjunction(part, is_true)]
    if (source := _bools_before(node, mask.axes)) is not None:
        bools, of_false, of_true = source
        if of_false != of_true:
            return conjunction(bools, of_true == is_true)
        return [] if of_true == is_true else [(mask, is_true)]
    return [(mask, is_true)]


_OPERATORS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def _bools_before(node: Node, axes: Axes) -> tuple[Named, bool, bool] | None:
    """The bools that a node makes bools of by way of numbers, and what it makes of false and of true."""
    numbers = [x.number for x in node.inputs]
    if node.name == "convert_element_type":
        place = 0
    elif node.name in _OPERATORS and numbers.count(None) == 1:
        place = numbers.index(None)
    else:
        return None
    source = two_numbers(Named(node.inputs[place], axes))
    if source is None:
        return None
    bools, *both = source
    if node.name == "convert_element_type":
        return bools, both[0] != 0, both[1] != 0
    compare, other = _OPERATORS[node.name], numbers[1 - place]
    of_false, of_true = (compare(x, other) if place == 0 else compare(other, x) for x in both)
    return bools, of_false, of_true


def two_numbers(found: Named) -> tuple[Named, float, float] | None:
    """The bools that an array of two numbers is made of, and the numbers where those are false and true."""
    found = compact_of(found)
    value, axes = found.value, found.axes
    if value.dtype == bool:
        return found, 0.0, 1.0
    if (array := known_numbers(value)) is not None:
        return _two_numbers_of_array(array, axes)
    node = value.node
    if node is None:
        return None
    if node.name == "select_n":
        choice, *numbers = node.inputs
        known = [x.number for x in numbers if x.number is not None]
        if choice.dtype != bool or len(known) != 2:
            return None
        return Named(choice, _axes_of_input(choice, axes)), known[0], known[1]
    arrays = [x for x in node.inputs if x.number is None]
    if len(arrays) != 1 or arrays[0].shape != value.shape:
        return None
    source = two_numbers(Named(arrays[0], axes))
    if source is None:
        return None
    bools, *both = source
    made = [
        made_number(node, [x if y is arrays[0] else y.number for y in node.inputs]) for x in both
    ]
    return None if made[0] is None or made[1] is None else (bools, made[0], made[1])


def _two_numbers_of_array(array: Any, axes: Axes) -> tuple[Named, float, float] | None:
    """The same of an array that is there while tracing, and the bools another one."""
    if array.size == 0 or jnp.iscomplexobj(array):
        return None
    first = array.ravel()[0]
    is_other = array != first
    others = array[is_other]
    if others.size == 0 or (others != others[0]).any():  # NaN is not itself
        return None
    return Named(Value(jax.typeof(is_other), held=is_other), axes), float(first), float(others[0])


@dataclasses.dataclass(frozen=True)
class FoundBand:
    """Keys from t - left to t + right are visible to query t; None: without a limit."""

    left: int | None
    right: int | None

    def intersect(self, other: FoundBand) -> FoundBand:
        return FoundBand(_least(self.left, other.left), _least(self.right, other.right))


def _least(one: int | None, other: int | None) -> int | None:
    known = [x for x in (one, other) if x is not None]
    return min(known) if known else None


def options_of(band: FoundBand, rows: int, columns: int) -> dict[str, object] | None:
    """What says a band to ``dot_product_attention`` with so many queries and keys; None if nothing does."""
    options: dict[str, object] = {}
    left, right = band.left, band.right
    if right is not None and right == columns - rows:
        options = {"is_causal": True}
        if rows != columns:
            options["causal_alignment"] = "lower_right"
            left = None if left is None else left + columns - rows
        right = None
    elif right == 0:
        options, right = {"is_causal": True}, None
    if any(limit is not None and limit < 0 for limit in (left, right)):
        return None
    if left is not None or right is not None:
        options["local_window_size"] = (left, right)
    return options


def band_of(found: frozenset[Affine], row: str, column: str) -> FoundBand | None:
    """The band that conditions on these two axes are, or None if they are something else."""
    band = FoundBand(None, None)
    for condition in found:
        slopes = dict(condition.slopes)
        if slopes == {row: 1, column: -1}:
            band = band.intersect(FoundBand(None, condition.constant))
        elif slopes == {row: -1, column: 1}:
            band = band.intersect(FoundBand(condition.constant, None))
        else:
            return None
    return band


def band_of_array(mask: Any, axes: Axes, row: str, column: str) -> FoundBand | None:
    """The band that a bool array is, or None; along other axes it has to repeat itself."""
    if row not in axes or column not in axes:
        return None
    places = axes.index(row), axes.index(column)
    tables = np.moveaxis(mask, places, (-2, -1))
    rows, columns = tables.shape[-2:]
    tables = tables.reshape(-1, rows, columns)
    if tables.size == 0 or not tables[0].any() or (tables != tables[0]).any():
        return None
    distance = np.arange(columns)[None, :] - np.arange(rows)[:, None]
    visible = distance[tables[0]]
    left, right = -int(visible.min()), int(visible.max())
    if ((distance >= -left) & (distance <= right) != tables[0]).any():
        return None
    return FoundBand(left if left < rows - 1 else None, right if right < columns - 1 else None)
