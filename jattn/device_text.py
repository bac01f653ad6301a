"""The numbers of device code in C++: one statement for each scalar."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jattn.device_scalars import C_TYPES, FLOATS, Code, Scalar, constant_text

_SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "times_inverse": "*",
    "quotient_by_positive": "/",
    "remainder_by_positive": "%",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "&",
    "or": "|",
    "xor": "^",
}
# Functions of program_math.cuh that are called otherwise than the operation.
_FUNCTIONS = {
    "add_modulo": "add",
    "sub_modulo": "subtract",
    "mul_modulo": "multiply",
    "divide_by": "divide",
}
_ROUND = {"float16": "program::round_float16({})", "bfloat16": "program::round_bfloat16({})"}
_READERS = {"bool": "read_bool", "float16": "read_float16", "bfloat16": "read_bfloat16"}


def statements(code: Code, results: Sequence[Scalar]) -> list[str]:
    """The statements that compute and return the first result, and store the second one in ``slope``."""
    lines, names = assignments(code, results)
    lines += [f"slope = {name};" for name in names[1:]]
    return [*lines, f"return {names[0]};"]


def prefetches(code: Code, reads: Sequence[Scalar]) -> list[str]:
    """The statements that ask for what scalars read of captures, without waiting for it."""
    lines, names = assignments(code, [operand for x in reads for operand in x.operands])
    rest = iter(names)
    for x in reads:
        assert x.operation is not None
        capture, place = _place(x.operation.numbers)
        c_type = "uint16_t" if x.dtype in _ROUND else C_TYPES[x.dtype]
        own = [next(rest) for _ in x.operands]
        lines.append(f"program::prefetch<{c_type}>(captures[{capture}], {place.format(*own)});")
    return lines


def assignments(code: Code, results: Sequence[Scalar]) -> tuple[list[str], list[str]]:
    """The statements that compute the results, and expressions of these."""
    order = code.live(results)
    names: dict[Scalar, str] = {}

    def name(x: Scalar) -> str:
        return names.get(x) or (x.text if x.operation is None else _expression(x))

    lines = list(dict.fromkeys(_table(code, x) for x in order if _is_lookup(x)))
    for x in order:
        text = _expression(x).format(*map(name, x.operands))
        names[x] = f"v{len(names)}"
        lines.append(f"const {C_TYPES[x.dtype]} {names[x]} = {text};")
    return lines, [name(x) for x in results]


def _is_lookup(x: Scalar) -> bool:
    return x.operation is not None and x.operation.name == "lookup"


def _table(code: Code, x: Scalar) -> str:
    """The declaration of the table that a scalar is looked up in."""
    assert x.operation is not None
    number = x.operation.numbers[0]
    table = code.tables[number]
    numbers = ", ".join(y.text for y in table)
    return f"static constexpr {C_TYPES[x.dtype]} kTable{number}[{len(table)}] = {{{numbers}}};"


def _expression(x: Scalar) -> str:
    """A scalar as an expression of its operands, {0} and so on."""
    text = _exact_expression(x)
    return _ROUND[x.dtype].format(text) if x.is_rounded else text


def _exact_expression(x: Scalar) -> str:
    """The same before it is rounded to a type of 16 bits."""
    assert x.operation is not None
    name, numbers = x.operation.name, x.operation.numbers
    c_type = C_TYPES[x.dtype]
    is_float = x.dtype in FLOATS
    if name in _SIGNS:
        text = f"{{0}} {_SIGNS[name]} {{1}}"
        return text if is_float or c_type in ("bool", "int") else f"{c_type}({text})"
    if name == "convert":
        return _conversion(x.operands[0].dtype, x.dtype)
    if name == "select":
        return "program::select({0}, {2}, {1})" if is_float else "{0} ? {2} : {1}"
    if name == "choose":
        last = len(x.operands) - 1
        return "".join(f"{{0}} < {i} ? {{{i}}} : " for i in range(1, last)) + f"{{{last}}}"
    if name == "not":
        return "!{0}" if x.dtype == "bool" else f"{c_type}(~{{0}})"
    if name == "neg":
        return "-{0}" if is_float else "program::negate({0})"
    if name == "log2":
        return f"program::log({{0}}) * {constant_text('float32', math.log2(math.e), None)}"
    if name == "square":
        return "{0} * {0}" if is_float else "program::multiply({0}, {0})"
    if name == "reduce_precision":
        return f"program::reduce_precision<{numbers[0]}, {numbers[1]}>({{0}})"
    if name == "bitcast_convert_type":
        return f"program::bit_cast<{c_type}>({{0}})"
    if name == "read":
        return _read(x.dtype, numbers)
    if name == "lookup":
        return f"kTable{numbers[0]}[{{0}}]"
    operands = ", ".join(f"{{{i}}}" for i in range(len(x.operands)))
    return f"program::{_FUNCTIONS.get(name, name)}({operands})"


def _conversion(from_dtype: str, dtype: str) -> str:
    c_type = C_TYPES[dtype]
    if dtype == "bool":
        return "{0} != 0"
    if from_dtype in _ROUND and dtype == "float32":
        return "{0}"
    if from_dtype in FLOATS and dtype not in FLOATS:
        return f"program::to_integer<{c_type}>({{0}})"
    return f"{c_type}({{0}})"


def _read(dtype: str, numbers: Sequence[int]) -> str:
    """An element of a capture."""
    capture, place = _place(numbers)
    reader = _READERS.get(dtype, f"read<{C_TYPES[dtype]}>")
    return f"program::{reader}(captures[{capture}], {place})"


def _place(numbers: Sequence[int]) -> tuple[int, str]:
    """The number of a capture and a place in it: a sum of multiples of the operands and of a number."""
    capture, is_wide, fixed, *strides = numbers
    terms = []
    for i, stride in enumerate(strides):
        position = f"int64_t({{{i}}})" if is_wide else f"{{{i}}}"
        terms.append(position if stride == 1 else f"{position} * {stride}")
    if fixed or not terms:
        terms.append(str(fixed))
    return capture, " + ".join(terms)
