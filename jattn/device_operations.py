"""Elementwise operations in device code, on one element of each operand."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn.device_scalars import Code, Scalar, limits

# Functions of floats in program_math.cuh.
_FUNCTIONS = (
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erfc exp exp2 expm1 log log1p logistic pow rsqrt sin sinh"
    " sqrt tan tanh"
).split()
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "add_any": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
}
_BITWISE = ("and", "or", "xor")
_SHIFTS = ("shift_left", "shift_right_logical", "shift_right_arithmetic")
_ROUNDED = (*_FUNCTIONS, *ARITHMETIC, "div", "square", "one_minus_square", "log2", "integer_pow")
_EXACT = (
    "neg abs sign max min clamp floor ceil round rem is_finite not population_count clz select_n convert_element_type"
    " reduce_precision bitcast_convert_type"
).split()
ELEMENTWISE = frozenset((*_ROUNDED, *_EXACT, *COMPARISONS, *_BITWISE, *_SHIFTS))

FLOAT64 = frozenset(
    "add add_any sub mul div neg abs sign max min clamp floor ceil round rem is_finite select_n sqrt square"
    " one_minus_square integer_pow convert_element_type".split()
) | set(COMPARISONS)


def operation(
    code: Code, name: str, params: dict[str, Any], dtype: str, xs: tuple[Scalar, ...]
) -> Scalar:
    """An elementwise operation on one element of each of its operands."""
    first = xs[0]
    if name == "select_n":
        return select(code, first, xs[1:])
    if any(x.is_nil for x in xs):
        return _of_nil(code, name, dtype, xs)
    if name == "clamp":
        low, x, high = xs
        return extreme(code, "min", extreme(code, "max", x, low), high)
    if name in ("max", "min"):
        return extreme(code, name, first, xs[1])
    if name in COMPARISONS:
        return compare(code, name, first, xs[1])
    if name in _BITWISE:
        return bitwise(code, name, first, xs[1])
    if name in ARITHMETIC and first.is_int:
        return _int_arithmetic(code, name, first, xs[1])
    if name in ("div", "rem") and first.is_int:
        return _int_division(code, name, first, xs[1])
    if name == "convert_element_type":
        return code.convert(first, dtype)
    if name in ("mul", "div") and xs[1].is_number(1.0):
        return first
    if name == "mul" and first.is_number(1.0):
        return xs[1]
    known = [np.asarray(x.constant, jnp.dtype(x.dtype)) for x in xs if x.constant is not None]
    if name == "neg" and known:
        return code.constant(dtype, -known[0])
    if name in ARITHMETIC and len(known) == 2:
        with np.errstate(all="ignore"):
            return code.constant(dtype, ARITHMETIC[name](*known))
    if name == "one_minus_square":
        one = code.constant(dtype, 1)
        left, right = (operation(code, part, {}, dtype, (one, first)) for part in ("sub", "add"))
        return operation(code, "mul", {}, dtype, (left, right))
    if name == "integer_pow":
        return _integer_pow(code, first, params["y"])
    if name == "pow" and first.is_number(2.0):
        return operation(code, "exp2", {}, dtype, (code.convert(xs[1], dtype),))
    if name == "pow":
        xs = (first, code.convert(xs[1], dtype))
    if name == "div":
        return _quotient(code, dtype, first, xs[1])
    signs = min(max(first.range[0], -1), 1), min(max(first.range[1], -1), 1)
    made, numbers = _made_by(name, params)
    return code.make(dtype, made, *xs, numbers=numbers, within=signs if name == "sign" else None)


def _of_nil(code: Code, name: str, dtype: str, xs: Sequence[Scalar]) -> Scalar:
    """A linear operation on tangents, some of which are nil, or of such a one and a number."""
    moving = [x for x in xs if not x.is_nil]
    if name not in ("add", "add_any", "sub") or not moving:
        return code.nil(dtype)
    if name == "sub" and xs[0].is_nil:
        return operation(code, "neg", {}, dtype, (moving[0],))
    return moving[0]


def _made_by(name: str, params: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """The operation of a primitive, and what that knows."""
    if name == "round":
        is_even = int(params["rounding_method"]) == 1
        return ("round_to_even" if is_even else "round_away"), ()
    if name == "reduce_precision":
        return name, (min(params["exponent_bits"], 8), min(params["mantissa_bits"], 23))
    return {"add_any": "add"}.get(name, name), ()


def _quotient(code: Code, dtype: str, x: Scalar, y: Scalar) -> Scalar:
    """Of floats; by a constant with its inverse, which alone does where that is exact."""
    divisor = y.constant
    if dtype == "float64" or divisor is None or not 2.0**-125 < abs(divisor) < 2.0**125:
        return code.make(dtype, "divide", x, y)
    mantissa, _ = math.frexp(divisor)
    inverse = code.constant("float32", np.float32(1 / divisor))
    if abs(mantissa) == 0.5:
        return code.make(dtype, "times_inverse", x, inverse)
    return code.make(dtype, "divide_by", x, y, inverse)


def select(code: Code, which: Scalar, cases: Sequence[Scalar]) -> Scalar:
    """The case that a bool or an integer picks; integers beyond are held to the first and last one."""
    if which.constant is not None:
        return cases[min(max(int(which.constant), 0), len(cases) - 1)]
    if all(x is cases[0] for x in cases):
        return cases[0]
    nil = next((x for x in cases if x.is_nil), None)
    if nil is not None and all(x.is_nil or x.is_number(0.0) for x in cases):
        return nil
    cases = [code.constant(x.dtype, 0) if x.is_nil else x for x in cases]
    within = (min(x.range[0] for x in cases), max(x.range[1] for x in cases))
    name = "select" if which.dtype == "bool" else "choose"
    return code.make(cases[0].dtype, name, which, *cases, within=within)


def extreme(code: Code, name: str, x: Scalar, y: Scalar) -> Scalar:
    """The greater or the smaller of two; NaN if either is."""
    if not x.is_int:
        if x.dtype == "bool":
            return bitwise(code, "or" if name == "max" else "and", x, y)
        return code.make(x.dtype, name, x, y)
    (low, high), (other_low, other_high) = x.range, y.range
    if name == "max":
        if low >= other_high or other_low >= high:
            return x if low >= other_high else y
        within = max(low, other_low), max(high, other_high)
    else:
        if high <= other_low or other_high <= low:
            return x if high <= other_low else y
        within = min(low, other_low), min(high, other_high)
    return code.make(x.dtype, name, x, y, within=within)


def compare(code: Code, name: str, x: Scalar, y: Scalar) -> Scalar:
    compare = COMPARISONS[name]
    if x.constant is not None and y.constant is not None:
        return code.constant("bool", compare(x.constant, y.constant))
    if x.dtype == "bool" and name == "ne":
        return bitwise(code, "xor", x, y)
    if x.is_int:
        (low, high), (other_low, other_high) = x.range, y.range
        is_apart = high < other_low or other_high < low
        if is_apart:
            return code.constant("bool", compare(low, other_low))
        if (high <= other_low or low >= other_high) and name not in ("eq", "ne"):
            outcomes = {compare(a, b) for a, b in itertools.product(x.range, y.range)}
            if len(outcomes) == 1:
                return code.constant("bool", outcomes.pop())
    return code.make("bool", name, x, y)


def bitwise(code: Code, name: str, x: Scalar, y: Scalar) -> Scalar:
    if x.dtype == "bool":
        for known, other in ((x, y), (y, x)):
            if known.constant is not None:
                if name == "xor":
                    return code.make("bool", "not", other) if known.constant else other
                return other if known.constant == (name == "and") else known
    within = None
    if x.is_int and min(x.range[0], y.range[0]) >= 0:
        highest = (1 << max(x.range[1].bit_length(), y.range[1].bit_length())) - 1
        within = (0, min(x.range[1], y.range[1]) if name == "and" else highest)
    return code.make(x.dtype, name, x, y, within=within)


def _int_arithmetic(code: Code, name: str, x: Scalar, y: Scalar) -> Scalar:
    """Sums, differences and products of integers, modulo 2^bits."""
    name, compute = {"add_any": "add"}.get(name, name), ARITHMETIC[name]
    ends = [compute(a, b) for a, b in itertools.product(x.range, y.range)]
    low, high = min(ends), max(ends)
    least, most = limits(x.dtype)
    if x.constant is not None and y.constant is not None:
        bits = int(jnp.iinfo(x.dtype).bits)
        return code.constant(x.dtype, (low - least) % (1 << bits) + least)
    if name == "add" and x.is_number(0):
        return y
    if y.is_number(0 if name != "mul" else 1):
        return x
    if name == "mul" and x.is_number(1):
        return y
    if least <= low and high <= most:
        return code.make(x.dtype, name, x, y, within=(low, high))
    return code.make(x.dtype, f"{name}_modulo", x, y)


def _int_division(code: Code, name: str, x: Scalar, y: Scalar) -> Scalar:
    """Quotients toward zero and their remainders; XLA's results for 0 and for the least number by -1."""
    if y.constant is None or y.constant <= 0:
        return code.make(x.dtype, "quotient" if name == "div" else "remainder", x, y)
    (low, high), divisor = x.range, int(y.constant)
    if name == "div":
        within = math.trunc(Fraction(low, divisor)), math.trunc(Fraction(high, divisor))
    else:
        within = max(low, 1 - divisor) if low < 0 else 0, min(high, divisor - 1) if high > 0 else 0
    if (divisor == 1 and name == "div") or (-divisor < low and high < divisor and name == "rem"):
        return x
    if x.constant is not None:
        number = int(x.constant)
        quotient = math.trunc(Fraction(number, divisor))
        return code.constant(x.dtype, quotient if name == "div" else number - quotient * divisor)
    made = "quotient_by_positive" if name == "div" else "remainder_by_positive"
    return code.make(x.dtype, made, x, y, within=within)


def _integer_pow(code: Code, x: Scalar, exponent: int) -> Scalar:
    """A power by squares, as XLA; rounded after every product."""

    def multiply(a: Scalar, b: Scalar) -> Scalar:
        return operation(code, "mul", {}, x.dtype, (a, b))

    power, result = x, code.constant(x.dtype, 1)
    rest = abs(exponent)
    while rest:
        if rest & 1:
            result = multiply(result, power)
        rest >>= 1
        if rest:
            power = multiply(power, power)
    if exponent < 0:
        result = operation(code, "div", {}, x.dtype, (code.constant(x.dtype, 1), result))
    return result
