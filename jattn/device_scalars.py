"""The numbers of device code: a function is a list of scalars, each made of those before by an operation with a name.

Two languages say the same list: C++ (``device_text``), for the compilers of GPUs, and instructions of an interpreter
(``cpu_program``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

MAX_SCALARS = 4096  # of one function; more may come of few operations on arrays, for each asks for elements of others

C_TYPES = {
    "bool": "bool",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int",
    "int64": "int64_t",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "float16": "float",  # rounded after every operation
    "bfloat16": "float",
    "float32": "float",
    "float64": "double",
}
FLOATS = ("float16", "bfloat16", "float32", "float64")
# What makes a number of a type of 16 bits out of such numbers.
_EXACT = frozenset(
    "neg abs sign max min floor ceil round_to_even round_away rem select choose reduce_precision read lookup".split()
)


@dataclasses.dataclass(frozen=True)
class Operation:
    """What a scalar is made by.

    Attributes:
      name: one of those of ``device_text``, which are those of XLA where there is no other.
      numbers: what it knows beside its operands.
    """

    name: str
    numbers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Scalar:
    """A number at run time, compared by identity.

    Attributes:
      dtype: its type in JAX.
      text: in C++, of an argument or a constant.
      operation: what makes any other, of its operands.
      range: of an integer, what it is within.
      constant: its value, if that is known.
      is_nil: the tangent of what does not move: 0, whatever it is multiplied by.
    """

    dtype: str
    text: str = ""
    operation: Operation | None = None
    operands: tuple[Scalar, ...] = ()
    range: tuple[int, int] = (0, 0)
    constant: bool | int | float | None = None
    is_nil: bool = False

    @property
    def is_int(self) -> bool:
        return self.dtype not in (*FLOATS, "bool")

    @property
    def is_rounded(self) -> bool:
        """Whether what the operation makes is to be rounded to a type of 16 bits."""
        name = "" if self.operation is None else self.operation.name
        return self.dtype in ("float16", "bfloat16") and name not in _EXACT

    def is_number(self, value: float) -> bool:
        """Whether it is known to be this number."""
        return self.constant is not None and self.constant == value

    def leaves(self) -> set[str]:
        """The texts of the arguments and constants that it is made of."""
        found: set[str] = set()
        stack, seen = [self], {self}
        while stack:
            x = stack.pop()
            if not x.operands:
                found.add(x.text)
            stack += [y for y in x.operands if y not in seen]
            seen.update(x.operands)
        return found


class TooLongError(Exception):
    """A function has more than MAX_SCALARS scalars."""


class Code:
    """Makes scalars: the same expression of the same scalars is made once, and what is known is not computed."""

    def __init__(self) -> None:
        self._made: dict[Any, Scalar] = {}
        self._tables: dict[tuple[Scalar, ...], int] = {}

    def table(self, numbers: Sequence[Scalar]) -> int:
        """Returns which of ``tables`` these constants are, the same for the same numbers."""
        return self._tables.setdefault(tuple(numbers), len(self._tables))

    @property
    def tables(self) -> list[tuple[Scalar, ...]]:
        """The arrays of constants that scalars are elements of, by ``lookup``."""
        return list(self._tables)

    def make(
        self,
        dtype: str,
        name: str,
        *operands: Scalar,
        numbers: tuple[int, ...] = (),
        within: tuple[int, int] | None = None,
    ) -> Scalar:
        """Returns what the operation makes of the operands, an integer ``within`` a range."""
        is_int = dtype not in (*FLOATS, "bool")
        bounds = (within or limits(dtype)) if is_int else (0, 0)
        if is_int and bounds[0] == bounds[1]:
            return self.constant(dtype, bounds[0])
        key = (dtype, name, numbers, operands)
        if len(self._made) > MAX_SCALARS:
            raise TooLongError
        made = Scalar(dtype, "", Operation(name, numbers), operands, bounds)
        return self._made.setdefault(key, made)

    def constant(self, dtype: str, value: Any) -> Scalar:
        """Returns a scalar that is known."""
        number = np.asarray(value).astype(jnp.dtype(dtype))
        plain = number.item() if dtype != "bfloat16" else float(number)
        is_int = dtype not in (*FLOATS, "bool")
        bounds = (int(plain), int(plain)) if is_int else (0, 0)
        text = constant_text(dtype, plain, number)
        return self._made.setdefault(
            (dtype, text), Scalar(dtype, text, range=bounds, constant=plain)
        )

    def nil(self, dtype: str) -> Scalar:
        """Returns the tangent of what does not move."""
        return self._made.setdefault(
            ("nil", dtype), Scalar(dtype, constant_text(dtype, 0.0, None), is_nil=True)
        )

    def convert(self, x: Scalar, dtype: str) -> Scalar:
        """As XLA: floats to integers toward zero, saturating, NaN to 0; integers to narrower ones modulo."""
        if x.dtype == dtype:
            return x
        if x.is_nil:
            return self.nil(dtype)
        if x.constant is not None and (x.is_int or x.dtype == "bool"):
            return self.constant(dtype, np.asarray(x.constant, jnp.dtype(x.dtype)))
        if x.constant is not None and dtype in FLOATS:
            return self.constant(dtype, np.asarray(x.constant, jnp.dtype(x.dtype)))
        is_small = x.dtype == "int32" and max(map(abs, x.range)) <= 2**22
        if dtype == "float32" and is_small:
            return self.make(dtype, "small_to_float", x)
        within = None
        if dtype not in (*FLOATS, "bool") and x.dtype not in FLOATS:
            low, high = (0, 1) if x.dtype == "bool" else x.range
            least, most = limits(dtype)
            within = (low, high) if least <= low and high <= most else None
        return self.make(dtype, "convert", x, within=within)

    def live(self, results: Sequence[Scalar]) -> list[Scalar]:
        """What is made of other scalars on the way to the results, in an order in which it can be."""
        live: dict[Scalar, None] = {}
        stack = [(x, False) for x in reversed(results)]
        while stack:
            x, done = stack.pop()
            if done:
                live.setdefault(x)
            elif x not in live and x.operands:
                stack.append((x, True))
                stack.extend((y, False) for y in reversed(x.operands))
        return [x for x in self._made.values() if x in live]


def limits(dtype: str) -> tuple[int, int]:
    info = jnp.iinfo(dtype)
    return int(info.min), int(info.max)


def constant_text(dtype: str, plain: Any, number: Any) -> str:
    """A constant in C++, exactly."""
    if dtype == "bool":
        return str(plain).lower()
    if dtype in FLOATS:
        is_double = dtype == "float64"
        suffix = "" if is_double else "f"
        if math.isnan(plain):
            bits = number if is_double else number.astype(np.float32)
            return f"program::{'double' if is_double else 'float'}_of_bits(0x{bits.tobytes()[::-1].hex()})"
        if math.isinf(plain):
            infinity = "double(program::kInfinity)" if is_double else "program::kInfinity"
            return f"-{infinity}" if plain < 0 else infinity
        short = repr(plain)
        is_short = len(short) <= 8 and "e" not in short
        mantissa, exponent = plain.hex().split("p")
        return (short if is_short else f"{mantissa.rstrip('0')}p{exponent}") + suffix
    if dtype == "int32":
        return "(-2147483647 - 1)" if plain == limits("int32")[0] else str(plain)
    if plain == limits("int64")[0]:
        return "int64_t(-9223372036854775807ll - 1)"
    suffix = {"int64": "ll", "uint64": "ull", "uint32": "u"}.get(dtype, "")
    return f"{C_TYPES[dtype]}({plain}{suffix})"
