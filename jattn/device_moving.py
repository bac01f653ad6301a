"""Operations on arrays in device code: most move elements, and make the function of an index that their result is."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.lax import GatherScatterMode

from jattn.device_arrays import Array, Index, held_within, index_arithmetic, is_within
from jattn.device_operations import ELEMENTWISE, bitwise, compare, operation, select
from jattn.device_scalars import FLOATS, Code, Scalar, limits

SAME = "copy copy_p name optimization_barrier pcast pvary reshard sharding_constraint stop_gradient".split()
MOVING = (
    "broadcast_in_dim concatenate dynamic_slice dynamic_update_slice gather iota pad reshape rev slice split squeeze"
    " stack tile transpose unstack"
).split()

_Shape = tuple[int, ...]
_Element = Callable[[Index], Scalar]


@dataclasses.dataclass(frozen=True)
class _Equation:
    """An operation on arrays.

    Attributes:
      params: as JAX has them.
      arrays: the operands.
      shape, dtype: of the result.
    """

    code: Code
    params: dict[str, Any]
    arrays: Sequence[Array]
    shape: _Shape
    dtype: str


def apply(
    code: Code, name: str, params: dict[str, Any], arrays: Sequence[Array], outputs: Sequence[Any]
) -> list[Array]:
    """The results of an equation that is not refused."""
    if name in SAME:
        return list(arrays)
    if name == "unstack":
        return [
            Array(x.aval.shape, arrays[0].dtype, _part(code, arrays[0], params["axis"], i))
            for i, x in enumerate(outputs)
        ]
    if name == "split":
        starts = itertools.accumulate((0, *params["sizes"][:-1]))
        return [
            Array(x.aval.shape, arrays[0].dtype, _shifted(code, arrays[0], params["axis"], start))
            for x, start in zip(outputs, starts, strict=True)
        ]
    aval = outputs[0].aval
    if name in ELEMENTWISE:
        element = _elementwise(code, name, params, str(aval.dtype), arrays)
    else:
        element = _MAKERS[name](_Equation(code, params, arrays, tuple(aval.shape), str(aval.dtype)))
    return [Array(aval.shape, str(aval.dtype), element)]


def _elementwise(
    code: Code, name: str, params: dict[str, Any], dtype: str, arrays: Sequence[Array]
) -> _Element:
    zero = code.constant("int32", 0)

    def element(index: Index) -> Scalar:
        # Axes of one element go along with those of more.
        own = [zip(x.shape, index if x.shape else (), strict=True) for x in arrays]
        xs = [
            x.at(tuple(zero if n == 1 else i for n, i in axes))
            for x, axes in zip(arrays, own, strict=True)
        ]
        return operation(code, name, params, dtype, tuple(xs))

    return element


def _shifted(code: Code, x: Array, axis: int, start: int) -> _Element:
    def element(index: Index) -> Scalar:
        moved = list(index)
        moved[axis] = index_arithmetic(code, "add", index[axis], start)
        return x.at(tuple(moved))

    return element


def _part(code: Code, x: Array, axis: int, number: int) -> _Element:
    fixed = code.constant("int32", number)
    return lambda index: x.at((*index[:axis], fixed, *index[axis:]))


def _broadcast(eqn: _Equation) -> _Element:
    x, axes = eqn.arrays[0], eqn.params["broadcast_dimensions"]
    zero = eqn.code.constant("int32", 0)
    return lambda index: x.at(
        tuple(zero if n == 1 else index[axis] for n, axis in zip(x.shape, axes, strict=True))
    )


def _concatenate(eqn: _Equation) -> _Element:
    axis = eqn.params["dimension"]
    starts = list(itertools.accumulate((0, *(x.shape[axis] for x in eqn.arrays[:-1]))))

    def element(index: Index) -> Scalar:
        i = index[axis]
        result: Scalar | None = None
        for x, start in reversed(list(zip(eqn.arrays, starts, strict=True))):
            size = x.shape[axis]
            if size == 0 or i.range[1] < start or i.range[0] >= start + size:
                continue
            own = held_within(eqn.code, index_arithmetic(eqn.code, "sub", i, start), size - 1)
            read = x.at((*index[:axis], own, *index[axis + 1 :]))
            if result is None:
                result = read
            else:
                end = eqn.code.constant(i.dtype, start + size)
                result = select(eqn.code, compare(eqn.code, "lt", i, end), (result, read))
        assert result is not None
        return result

    return element


def _dynamic_slice(eqn: _Equation) -> _Element:
    x, *starts = eqn.arrays

    def element(index: Index) -> Scalar:
        held = [
            held_within(eqn.code, start.at(()), whole - size)
            for start, whole, size in zip(starts, x.shape, eqn.shape, strict=True)
        ]
        return x.at(
            tuple(index_arithmetic(eqn.code, "add", a, b) for a, b in zip(held, index, strict=True))
        )

    return element


def _dynamic_update_slice(eqn: _Equation) -> _Element:
    x, update, *starts = eqn.arrays

    def element(index: Index) -> Scalar:
        inside = eqn.code.constant("bool", True)
        moved = []
        for i, start, whole, size in zip(index, starts, eqn.shape, update.shape, strict=True):
            own = index_arithmetic(
                eqn.code, "sub", i, held_within(eqn.code, start.at(()), whole - size)
            )
            inside = bitwise(eqn.code, "and", inside, is_within(eqn.code, own, size - 1))
            moved.append(held_within(eqn.code, own, size - 1))
        return select(eqn.code, inside, (x.at(index), update.at(tuple(moved))))

    return element


def _gather(eqn: _Equation) -> _Element:
    x, starts = eqn.arrays
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    fills = eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP
    along_batch = [i for i in range(len(eqn.shape)) if i not in numbers.offset_dims]
    hidden = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    offset_axes = [i for i in range(len(x.shape)) if i not in hidden]

    def element(index: Index) -> Scalar:
        batch = [index[i] for i in along_batch]
        position = [eqn.code.constant("int32", 0)] * len(x.shape)
        for axis, i in zip(offset_axes, numbers.offset_dims, strict=True):
            position[axis] = index[i]
        for axis, i in zip(
            numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
        ):
            position[axis] = batch[i]
        inside = eqn.code.constant("bool", True)
        for number, axis in enumerate(numbers.start_index_map):
            start = starts.at((*batch, eqn.code.constant("int32", number)))
            last = x.shape[axis] - sizes[axis]
            inside = bitwise(eqn.code, "and", inside, is_within(eqn.code, start, last))
            position[axis] = index_arithmetic(
                eqn.code, "add", held_within(eqn.code, start, last), position[axis]
            )
        read = x.at(tuple(position))
        if not fills:
            return read
        return select(eqn.code, inside, (eqn.code.constant(eqn.dtype, _fill_value(eqn)), read))

    return element


def _fill_value(eqn: _Equation) -> Any:
    """What a gather has in place of elements outside."""
    if eqn.params["fill_value"] is not None:
        return eqn.params["fill_value"]
    if eqn.dtype in FLOATS:
        return math.nan
    least, most = (0, 1) if eqn.dtype == "bool" else limits(eqn.dtype)
    return most if least == 0 else least


def _iota(eqn: _Equation) -> _Element:
    return lambda index: eqn.code.convert(index[eqn.params["dimension"]], eqn.dtype)


def _pad(eqn: _Equation) -> _Element:
    x, filler = eqn.arrays

    def element(index: Index) -> Scalar:
        if 0 in x.shape:
            return filler.at(())
        inside = eqn.code.constant("bool", True)
        moved = []
        for i, size, (low, _, gap) in zip(
            index, x.shape, eqn.params["padding_config"], strict=True
        ):
            step = gap + 1
            shifted = index_arithmetic(eqn.code, "sub", i, low)
            inside = bitwise(
                eqn.code, "and", inside, is_within(eqn.code, shifted, (size - 1) * step)
            )
            held = held_within(eqn.code, shifted, (size - 1) * step)
            rest = index_arithmetic(eqn.code, "rem", held, step)
            is_element = compare(eqn.code, "eq", rest, eqn.code.constant(rest.dtype, 0))
            inside = bitwise(eqn.code, "and", inside, is_element)
            moved.append(index_arithmetic(eqn.code, "div", held, step))
        return select(eqn.code, inside, (filler.at(()), x.at(tuple(moved))))

    return element


def _reshape(eqn: _Equation) -> _Element:
    x = eqn.arrays[0]
    assert eqn.params.get("dimensions") is None

    def element(index: Index) -> Scalar:
        moved: list[Scalar] = []
        for new, old in _factors(eqn.shape, x.shape):
            position = eqn.code.constant("int32", 0)
            for axis in new:
                position = index_arithmetic(eqn.code, "mul", position, eqn.shape[axis])
                position = index_arithmetic(eqn.code, "add", position, index[axis])
            parts = []
            for axis in reversed(old):
                parts.append(index_arithmetic(eqn.code, "rem", position, x.shape[axis]))
                position = index_arithmetic(eqn.code, "div", position, x.shape[axis])
            moved += reversed(parts)
        return x.at(tuple(moved))

    return element


def _factors(new: _Shape, old: _Shape) -> list[tuple[list[int], list[int]]]:
    """Groups of neighbouring axes of two shapes with as many elements each, as small as they can be."""
    groups = []
    i = j = 0
    while i < len(new) or j < len(old):
        left, right = [i] if i < len(new) else [], [j] if j < len(old) else []
        i, j = i + len(left), j + len(right)
        while (a := math.prod(new[k] for k in left)) != (b := math.prod(old[k] for k in right)):
            if a < b:
                left.append(i)
                i += 1
            else:
                right.append(j)
                j += 1
        groups.append((left, right))
    return groups


def _reverse(eqn: _Equation) -> _Element:
    def mirrored(axis: int, i: Scalar) -> Scalar:
        if axis not in eqn.params["dimensions"]:
            return i
        return index_arithmetic(eqn.code, "sub", eqn.code.constant("int32", eqn.shape[axis] - 1), i)

    return lambda index: eqn.arrays[0].at(tuple(itertools.starmap(mirrored, enumerate(index))))


def _slice(eqn: _Equation) -> _Element:
    starts = eqn.params["start_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)

    def element(index: Index) -> Scalar:
        scaled = [
            index_arithmetic(eqn.code, "mul", i, n) for i, n in zip(index, strides, strict=True)
        ]
        moved = [
            index_arithmetic(eqn.code, "add", i, n) for i, n in zip(scaled, starts, strict=True)
        ]
        return eqn.arrays[0].at(tuple(moved))

    return element


def _squeeze(eqn: _Equation) -> _Element:
    x = eqn.arrays[0]

    def element(index: Index) -> Scalar:
        rest = iter(index)
        zero = eqn.code.constant("int32", 0)
        return x.at(
            tuple(
                zero if i in eqn.params["dimensions"] else next(rest) for i in range(len(x.shape))
            )
        )

    return element


def _stack(eqn: _Equation) -> _Element:
    axis = eqn.params["axis"]

    def element(index: Index) -> Scalar:
        rest = (*index[:axis], *index[axis + 1 :])
        if index[axis].constant is not None:
            return eqn.arrays[int(index[axis].constant or 0)].at(rest)
        return select(eqn.code, index[axis], [x.at(rest) for x in eqn.arrays])

    return element


def _tile(eqn: _Equation) -> _Element:
    x = eqn.arrays[0]
    return lambda index: x.at(
        tuple(index_arithmetic(eqn.code, "rem", i, n) for i, n in zip(index, x.shape, strict=True))
    )


def _transpose(eqn: _Equation) -> _Element:
    order = eqn.params["permutation"]
    return lambda index: eqn.arrays[0].at(tuple(index[order.index(i)] for i in range(len(order))))


_MAKERS: dict[str, Callable[[_Equation], _Element]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _reverse,
    "slice": _slice,
    "squeeze": _squeeze,
    "stack": _stack,
    "tile": _tile,
    "transpose": _transpose,
}
