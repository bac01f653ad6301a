"""The gradients of what a score function reads: the elements, and derivatives by them; and these as C++, members that
``device_code`` adds to ``struct ScoreProgram``.

A pair adds ds * d score' / d element to the gradient of each element that it read. The derivative of the program along
its captures is JAX's, and linear in their tangents, which it reads where the program reads the captures: with the
tangent of one element 1 and all others nil it is d score' / d element.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

from jattn.arrays import wider
from jattn.device_arrays import Array, Index, index_arithmetic
from jattn.device_code import (
    ARGUMENTS,
    LARGEST_INDEX,
    arguments_of,
    device_code,
    evaluated,
    index_range,
    refused_operations,
)
from jattn.device_scalars import Code, Scalar, TooLongError, limits
from jattn.device_text import assignments
from jattn.score_program import Capture, ScoreProgram

MAX_READS = 8  # for a pair; a kernel keeps an index and a sum for each
_LARGEST_EXTENT = limits("int32")[1]

_Read = tuple[int, Index]


@dataclasses.dataclass(frozen=True)
class Read:
    """An element that a pair reads.

    Attributes:
      capture: the number of its array.
      place: an int32, where its gradient is in the array of all that are wanted.
      derivative: d score' / d element.
    """

    capture: int
    place: Scalar
    derivative: Scalar


@functools.lru_cache(maxsize=1024)
def can_sum(program: ScoreProgram, wanted: tuple[bool, ...], dtype: str = "float32") -> bool:
    """Whether there are ``reads`` of the captures that are wanted, few enough; the program has no ``refusals``.

    ``dtype``: what the score comes in, and gradients come back in.
    """
    types = [c for c, flag in zip(program.captures, wanted, strict=True) if flag]
    if not all(isinstance(n, int) for c in types for n in c.shape):  # symbolic, while exporting
        return False
    if any(wider(c.dtype, dtype) != dtype for c in types):
        return False
    if num_elements(program, wanted) > _LARGEST_EXTENT:
        return False
    if refused_operations(program.kept_jvp_jaxpr):
        return False
    # With indices in a narrow range fewer elements may be read.
    indices = index_range(by_position=True, largest_index=LARGEST_INDEX)
    try:
        return 0 < len(reads(Code(), program, wanted, indices, dtype)) <= MAX_READS
    except (TooLongError, RecursionError):
        return False


def offsets(program: ScoreProgram, wanted: tuple[bool, ...]) -> list[int]:
    """Where the gradient of each capture begins in the array of all that are wanted, and where that ends.

    A capture that is not wanted takes no place.
    """
    sizes = [
        math.prod(c.shape) if flag else 0 for c, flag in zip(program.captures, wanted, strict=True)
    ]
    return [0, *itertools.accumulate(sizes)]


def num_elements(program: ScoreProgram, wanted: tuple[bool, ...]) -> int:
    """How many elements the gradients have that are wanted."""
    return offsets(program, wanted)[-1]


def reads(
    code: Code,
    program: ScoreProgram,
    wanted: tuple[bool, ...],
    indices: tuple[int, int],
    dtype: str = "float32",
) -> list[Read]:
    """What a pair reads of the captures that are wanted, where a derivative is not nil.

    Args:
      code: makes the scalars.
      program, wanted: such as ``can_sum``.
      indices: the range of queries and keys, in which less may be read.
      dtype: what the score comes in, and derivatives are.
    """
    starts = offsets(program, wanted)
    found = []
    for (number, index), derivative in _derivatives(code, program, wanted, indices, dtype).items():
        flat = _flat(code, program.captures[number], index)
        place = index_arithmetic(code, "add", flat, starts[number])
        found.append(Read(number, code.convert(place, "int32"), code.convert(derivative, dtype)))
    return found


@functools.lru_cache(maxsize=256)
def gradient_code(
    program: ScoreProgram,
    wanted: tuple[bool, ...],
    *,
    by_position: bool,
    largest_index: int,
) -> str:
    """Returns ``device_code`` with what kernels need to add up the gradients of the captures that are wanted.

    The gradients lie one after the other in one array, at ``offsets``. Indices are as ``device_code`` gets them.
    """
    code = Code()
    indices = index_range(by_position=by_position, largest_index=largest_index)
    found = reads(code, program, wanted, indices)
    if not found:  # nothing is read within these indices; a table has an element
        found = [Read(0, code.constant("int32", 0), code.constant("float32", 0))]
    count = len(found)
    places = [x.place for x in found]
    lines, names = assignments(code, [*places, *(x.derivative for x in found)])
    reaches = [_reach(x) for x in places]
    more = (
        "",
        f"static constexpr int kReads = {count};  // of a pair",
        "// Where the gradient of a capture ends in the array of all.",
        *_table("int capture_end(int capture)", offsets(program, wanted)[1:]),
        "// Which capture a read is of, and what decides about its place.",
        *_table("int read_capture(int read)", [x.capture for x in found]),
        *_table("program::Reach read_reach(int read)", reaches),
        "",
        "// Places of what a pair reads in the array of all gradients, and the derivatives of the score by it.",
        "JATTN_PROGRAM_FUNCTION void reads(",
        f"    {ARGUMENTS},",
        f"    int (&places)[{count}], float (&derivatives)[{count}]) {{",
        *(f"  {line}" for line in lines),
        *(f"  places[{i}] = {name};" for i, name in enumerate(names[:count])),
        *(f"  derivatives[{i}] = {name};" for i, name in enumerate(names[count:])),
        "}",
    )
    return device_code(program, by_position=by_position, largest_index=largest_index, more=more)


def _table(declaration: str, values: list[int] | list[str]) -> list[str]:
    kind, argument = declaration.split(maxsplit=1)[0], declaration.rstrip(")").split()[-1]
    return [
        f"JATTN_PROGRAM_FUNCTION constexpr {declaration} {{",
        f"  constexpr {kind} table[] = {{{', '.join(map(str, values))}}};",
        f"  return table[{argument}];",
        "}",
    ]


def _derivatives(
    code: Code,
    program: ScoreProgram,
    wanted: tuple[bool, ...],
    indices: tuple[int, int],
    dtype: str,
) -> dict[_Read, Scalar]:
    """d score' / d element of each element that a pair reads of the captures that are wanted, where it is not nil."""
    arguments = arguments_of(code, program, indices, dtype)
    elements: dict[_Read, None] = {}

    def tangent(of_element: Callable[[_Read, str], Scalar]) -> Scalar:
        """The tangent of the score for given ones of elements."""

        def array(number: int, capture: Capture) -> Array:
            if not wanted[number]:
                return Array(capture.shape, capture.dtype, lambda _: code.nil(capture.dtype))
            return Array(
                capture.shape,
                capture.dtype,
                lambda index: of_element((number, index), capture.dtype),
            )

        of_score = Array.scalar(code.nil(program.dtype))
        of_captures = [array(i, c) for i, c in enumerate(program.captures) if c.is_float]
        results = evaluated(code, program.kept_jvp_jaxpr, [*arguments, of_score, *of_captures])
        return results[1].at(())

    def note(read: _Read, dtype: str) -> Scalar:
        elements.setdefault(read)
        return code.constant(dtype, 1)

    tangent(note)
    found: dict[_Read, Scalar] = {}
    for read in elements:

        def only(other: _Read, dtype: str, read: _Read = read) -> Scalar:
            return code.constant(dtype, 1) if other == read else code.nil(dtype)

        derivative = tangent(only)
        if not derivative.is_nil:
            found[read] = derivative
    return found


def _flat(code: Code, capture: Capture, index: Index) -> Scalar:
    """The place of an element in a dense array."""
    place = code.constant("int32", 0)
    for i, size in zip(index, capture.shape, strict=True):
        place = index_arithmetic(code, "mul", place, size)
        place = index_arithmetic(code, "add", place, i)
    return place


def _reach(place: Scalar) -> str:
    """What the place of a read depends on, beside the batch entry and the head."""
    names = place.leaves()
    if "score" in names or {"query", "key"} <= names:
        return "program::Reach::kPair"
    if "query" in names:
        return "program::Reach::kQuery"
    return "program::Reach::kKey" if "key" in names else "program::Reach::kHead"
