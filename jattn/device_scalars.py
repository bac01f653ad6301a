"""The numbers of device code: a function is a list of scalars, each an expression of those before."""

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
ROUND = {"float16": "program::round_float16({})", "bfloat16": "program::round_bfloat16({})"}
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True, eq=False)
class Scalar:
    """A number at run time, compared by identity.

    Attributes:
      dtype: its type in JAX.
      text: an expression of it: of ``operands`` {0}, {1}, .., or a name or a constant if there are none.
      range: of an integer, what it is within.
      constant: its value, if that is known.
      table: of elements of a constant array, the declaration of that.
      is_nil: the tangent of what does not move: 0, whatever it is multiplied by.
    """

    dtype: str
    text: str
    operands: tuple[Scalar, ...] = ()
    range: tuple[int, int] = (0, 0)
    constant: bool | int | float | None = None
    table: str = ""
    is_nil: bool = False

    @property
    def is_int(self) -> bool:
        return self.dtype not in (*FLOATS, "bool")

    def is_number(self, value: float) -> bool:
        """Whether it is known to be this number."""
        return self.constant is not None and self.constant == value


class TooLongError(Exception):
    """A function has more than MAX_SCALARS scalars."""


class Code:
    """Makes scalars: the same expression of the same scalars is made once, and what is known is not computed."""

    def __init__(self) -> None:
        self._made: dict[Any, Scalar] = {}
        self._tables: dict[tuple[str, str], str] = {}

    def table(self, dtype: str, numbers: str) -> str:
        """Returns the name of a table, the same for the same numbers."""
        return self._tables.setdefault((dtype, numbers), f"kTable{len(self._tables)}")

    def make(
        self,
        dtype: str,
        text: str,
        *operands: Scalar,
        within: tuple[int, int] | None = None,
        table: str = "",
    ) -> Scalar:
        """Returns what the expression is, an integer ``within`` a range."""
        is_int = dtype not in (*FLOATS, "bool")
        bounds = (within or limits(dtype)) if is_int else (0, 0)
        if is_int and bounds[0] == bounds[1]:
            return self.constant(dtype, bounds[0])
        key = (dtype, text, operands)
        if len(self._made) > MAX_SCALARS:
            raise TooLongError
        return self._made.setdefault(key, Scalar(dtype, text, operands, bounds, table=table))

    def constant(self, dtype: str, value: Any) -> Scalar:
        """Returns a scalar that is known."""
        number = np.asarray(value).astype(jnp.dtype(dtype))
        plain = number.item() if dtype != "bfloat16" else float(number)
        is_int = dtype not in (*FLOATS, "bool")
        bounds = (int(plain), int(plain)) if is_int else (0, 0)
        text = constant_text(dtype, plain, number)
        return self._made.setdefault((dtype, text), Scalar(dtype, text, (), bounds, plain))

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
        if dtype == "bool":
            return self.make("bool", "{0} != 0", x)
        c_type = C_TYPES[dtype]
        if dtype in FLOATS:
            if x.dtype in ("float16", "bfloat16") and dtype in ("float32", "float64"):
                return self.make(dtype, "{0}" if dtype == "float32" else "double({0})", x)
            if dtype == "float32" and x.dtype == "int32" and max(map(abs, x.range)) <= 2**22:
                return self.make(dtype, "program::small_to_float({0})", x)
            return self.make(dtype, ROUND.get(dtype, "{}").format(f"{c_type}({{0}})"), x)
        if x.dtype in FLOATS:
            return self.make(dtype, f"program::to_integer<{c_type}>({{0}})", x)
        low, high = (0, 1) if x.dtype == "bool" else x.range
        least, most = limits(dtype)
        return self.make(
            dtype,
            f"{c_type}({{0}})",
            x,
            within=(low, high) if least <= low and high <= most else None,
        )

    def lines(self, results: Sequence[Scalar]) -> list[str]:
        """The statements that compute and return the first result, and store the second one in ``slope``."""
        lines, names = self.statements(results)
        lines += [f"slope = {name};" for name in names[1:]]
        return [*lines, f"return {names[0]};"]

    def statements(self, results: Sequence[Scalar]) -> tuple[list[str], list[str]]:
        """The statements that compute the results, and expressions of these."""
        live: dict[Scalar, None] = {}
        stack = [(x, False) for x in reversed(results)]
        while stack:
            x, done = stack.pop()
            if done:
                live.setdefault(x)
            elif x not in live and x.operands:
                stack.append((x, True))
                stack.extend((y, False) for y in reversed(x.operands))
        order = [x for x in self._made.values() if x in live]
        names: dict[Scalar, str] = {}

        def name(x: Scalar) -> str:
            return names.get(x, x.text)

        lines = list(dict.fromkeys(x.table for x in order if x.table))
        for x in order:
            text = x.text.format(*map(name, x.operands))
            names[x] = f"v{len(names)}"
            lines.append(f"const {C_TYPES[x.dtype]} {names[x]} = {text};")
        return lines, [name(x) for x in results]


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
