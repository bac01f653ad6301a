"""Arrays in device code: functions from an index to the scalar there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jattn.device_operations import ARITHMETIC, bitwise, compare, extreme, operation
from jattn.device_scalars import Code, Scalar, limits
from jattn.score_program import Capture

Index = tuple[Scalar, ...]


class Array:
    """An array as a function from an index to the scalar there; every index is made to be within the shape."""

    def __init__(
        self, shape: Sequence[int], dtype: str, element: Callable[[Index], Scalar]
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self._element = element
        self._read: dict[Index, Scalar] = {}

    @classmethod
    def scalar(cls, x: Scalar) -> Array:
        return cls((), x.dtype, lambda _: x)

    def at(self, index: Index) -> Scalar:
        for i, size in zip(index, self.shape, strict=True):
            if not 0 <= i.range[0] <= i.range[1] < size:  # it becomes code of a device
                raise IndexError(f"{i} may be outside of an axis of {size} elements")
        if index not in self._read:
            self._read[index] = self._element(index)
        return self._read[index]


def _index_type(*sizes: int) -> str:
    return "int32" if math.prod(sizes) <= limits("int32")[1] else "int64"


def held_within(code: Code, start: Scalar, last: int) -> Scalar:
    """An index held within 0 and last."""
    if start.range[1] > last:
        start = extreme(code, "min", start, code.constant(start.dtype, last))
    if start.range[0] < 0:
        start = extreme(code, "max", start, code.constant(start.dtype, 0))
    return code.convert(start, _index_type(last))


def index_arithmetic(code: Code, name: str, x: Scalar, y: Scalar | int) -> Scalar:
    """x + y, x - y, x * y, x div y or x rem y of indices, in 64 bits where 32 are too few."""
    low, high = y.range if isinstance(y, Scalar) else (int(y), int(y))
    ends = [*x.range, low, high]
    if name in ARITHMETIC:
        ends += [ARITHMETIC[name](a, b) for a, b in itertools.product(x.range, (low, high))]
    least, most = limits("int32")
    dtype = "int32" if least <= min(ends) and max(ends) <= most else "int64"
    other = code.convert(y, dtype) if isinstance(y, Scalar) else code.constant(dtype, y)
    return operation(code, name, {}, dtype, (code.convert(x, dtype), other))


def capture_array(code: Code, number: int, capture: Capture) -> Array:
    """An operand of the kernel: dense, row-major."""
    strides = [math.prod(capture.shape[i + 1 :]) for i in range(len(capture.shape))]
    is_wide = _index_type(*capture.shape) == "int64"

    def element(index: Index) -> Scalar:
        fixed = 0
        own_strides: list[int] = []
        variables: list[Scalar] = []
        for i, stride in zip(index, strides, strict=True):
            if i.constant is not None:
                fixed += int(i.constant) * stride
            else:
                own_strides.append(stride)
                variables.append(i)
        numbers = (number, int(is_wide), fixed, *own_strides)
        return code.make(capture.dtype, "read", *variables, numbers=numbers)

    return Array(capture.shape, capture.dtype, element)


def constant_array(code: Code, value: Any) -> Array:
    """An array that is part of the program, as a table if its index is not known."""
    dtype = str(value.dtype)
    flat = [code.constant(dtype, x) for x in value.reshape(-1)]

    def element(index: Index) -> Scalar:
        offset = code.constant("int32", 0)
        for i, size in zip(index, value.shape, strict=True):
            offset = index_arithmetic(code, "mul", offset, size)
            offset = index_arithmetic(code, "add", offset, i)
        if offset.constant is not None:
            return flat[int(offset.constant)]
        return code.make(dtype, "lookup", offset, numbers=(code.table(flat),))

    return Array(value.shape, dtype, element)


def is_within(code: Code, i: Scalar, last: int) -> Scalar:
    """Whether 0 <= i <= last."""
    result = code.constant("bool", True)
    if i.range[0] < 0:
        result = compare(code, "ge", i, code.constant(i.dtype, 0))
    if i.range[1] > last:
        result = bitwise(code, "and", result, compare(code, "le", i, code.constant(i.dtype, last)))
    return result
