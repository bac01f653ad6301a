"""A score program as C++: the text of a struct that the CUDA kernels inline into their loops.

The text is straight-line code: no branches, no loops, no calls that stay calls, since a kernel has matrix products in
flight around it. Functions come from ``cc/kernels/attn/program_math.cuh``, which also says how accurate they are.

Scalars become locals, one for each value that differs (``device_scalars``). Arrays never exist: an array is a function
from an index to the scalar there (``device_arrays``), so that only those elements of captures are read that the score
depends on. The ranges of integers are known, and say which indices must be clamped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jattn.device_arrays import Array, capture_array, constant_array
from jattn.device_moving import MOVING, SAME, apply
from jattn.device_operations import ELEMENTWISE, FLOAT64
from jattn.device_scalars import C_TYPES, MAX_SCALARS, Code, Scalar, TooLongError, limits
from jattn.device_text import prefetches, statements
from jattn.jax_interface import ClosedJaxpr, Literal
from jattn.score_program import ScoreProgram, flat_equations

__all__ = [
    "ARGUMENTS",
    "LARGEST_INDEX",
    "MAX_CAPTURES",
    "arguments_of",
    "device_code",
    "evaluated",
    "index_range",
    "refusals",
]

MAX_CAPTURES = 16
INDICES = f"int batch, int head, int query, int key, const void* const (&captures)[{MAX_CAPTURES}]"
ARGUMENTS = f"float score, {INDICES}"
LARGEST_INDEX = 2**30  # of queries and keys: positions, and what lies behind the end of lengths
_MAX_TABLE = 1024  # elements of a constant array, which becomes part of the code
_LEAST_PREFETCHED = (
    1 << 23
)  # bytes of a capture: smaller ones stay in a second-level cache by themselves

_Refusal = tuple[str, object, str]
_OVER_ELEMENTS = (
    "reduce",
    "arg",
    "cum",
    "sort",
    "top_k",
    "dot_general",
    "conv_general_dilated",
    "scatter",
)
_KNOWN = frozenset((*SAME, *MOVING, *ELEMENTWISE))
_RULE = f"one of {', '.join(sorted(_KNOWN))}"


def refusals(program: ScoreProgram) -> list[tuple[str, object, str]]:
    """Says what of a program device code cannot express: (code, actual value, rule) each; none if ``device_code`` can.

    SYMBOLIC: an array of extents that are not known numbers, while exporting.
    PRIMITIVE: an operation that is not among those that there are.
    CAPTURE_ACCESS: an array is reduced, contracted or sorted, has no elements, or elements of another type; or too many
      operations on arrays come together.
    CAPTURES: it reads too many arrays.
    """
    found: list[_Refusal] = []
    if len(program.captures) > MAX_CAPTURES:
        found.append(("CAPTURES", len(program.captures), f"at most {MAX_CAPTURES}"))
    for capture in program.captures:
        named = f"{capture.dtype}{list(capture.shape)}"
        if capture.dtype not in C_TYPES:
            found.append(("CAPTURE_ACCESS", named, f"an array of {', '.join(C_TYPES)}"))
        if not all(isinstance(extent, int) for extent in capture.shape):
            found.append(("SYMBOLIC", named, "a function of arrays whose extents are known"))
        elif math.prod(capture.shape) == 0:
            found.append(("CAPTURE_ACCESS", named, "an array with elements"))
    jaxprs = [program.jaxpr] if program.has_unit_slope else [program.jaxpr, program.slope_jaxpr]
    for jaxpr in jaxprs:
        found += refused_operations(jaxpr)
    if not found:
        try:
            device_code(program)
        except (TooLongError, RecursionError):
            found.append(
                ("CAPTURE_ACCESS", f"over {MAX_SCALARS} steps", "fewer operations on arrays")
            )
    return list(dict.fromkeys(found))


def refused_operations(jaxpr: ClosedJaxpr) -> list[tuple[str, object, str]]:
    """What of one function cannot be expressed, as ``refusals``."""
    equations, _ = _live_equations(jaxpr)
    return [refusal for equation in equations for refusal in _refusals_of(*equation)]


@functools.lru_cache(maxsize=256)
def device_code(
    program: ScoreProgram,
    *,
    by_position: bool = True,
    largest_index: int = LARGEST_INDEX,
    more: tuple[str, ...] = (),
) -> str:
    """Returns the text of ``struct ScoreProgram``, which belongs into namespace jattn behind program_math.cuh.

    ``more``: lines of further members.

    Its functions map a score in natural units, the indices of its pair (head >= 0, batch within
    ``program.batch_extent``, query and key at most ``largest_index`` in size, and not negative unless ``by_position``)
    and pointers to the captures, dense and row-major, to the new score, and to the derivative of that by the old one.
    Nothing outside of a capture is read.

    The program must have no ``refusals``.
    """
    indices = index_range(by_position=by_position, largest_index=largest_index)
    value = _body(program, program.jaxpr, indices)
    if program.has_unit_slope:
        slope = [
            "slope = 1.0f;",
            "return ScoreProgram::score(score, batch, head, query, key, captures);",
        ]
    else:
        slope = _body(program, program.slope_jaxpr, indices)
    asked_for = _prefetches(program, indices)
    lines = [
        "struct ScoreProgram {",
        f"  static constexpr bool kUnitSlope = {str(program.has_unit_slope).lower()};",
        f"  static constexpr bool kPrefetches = {str(bool(asked_for)).lower()};",
        "",
        "  // The score of one pair, in natural units.",
        "  JATTN_PROGRAM_FUNCTION float score(",
        f"      {ARGUMENTS}) {{",
        *(f"    {line}" for line in value),
        "  }",
        "",
        "  // The same, and its derivative by the score that comes in.",
        "  JATTN_PROGRAM_FUNCTION float score_and_slope(",
        f"      {ARGUMENTS}, float& slope) {{",
        *(f"    {line}" for line in slope),
        "  }",
        "",
        "  // Asks for what a pair reads of large captures, and pairs of the keys that follow.",
        f"  JATTN_PROGRAM_FUNCTION void prefetch({INDICES}) {{",
        *(f"    {line}" for line in asked_for),
        "  }",
        *(f"  {line}".rstrip() for line in more),
        "};",
    ]
    return "\n".join(lines) + "\n"


def index_range(*, by_position: bool, largest_index: int) -> tuple[int, int]:
    """What indices of queries and keys are within."""
    return (-largest_index if by_position else 0), largest_index


def _body(program: ScoreProgram, jaxpr: ClosedJaxpr, indices: tuple[int, int]) -> list[str]:
    """The statements of a function for a jaxpr with one result, or two, of which the second is the slope."""
    code = Code()
    results = evaluated(code, jaxpr, arguments_of(code, program, indices))
    return statements(code, [code.convert(x.at(()), "float32") for x in results])


def _prefetches(program: ScoreProgram, indices: tuple[int, int]) -> list[str]:
    """The statements that ask for elements of large captures that differ from pair to pair, whatever the scores are."""
    code = Code()
    results = evaluated(code, program.jaxpr, arguments_of(code, program, indices))
    wanted = []
    for x in code.live([results[0].at(())]):
        if x.operation is not None and x.operation.name == "read":
            capture = program.captures[x.operation.numbers[0]]
            size = math.prod(capture.shape) * np.dtype(capture.dtype).itemsize
            names = {name for operand in x.operands for name in operand.leaves()}
            if size >= _LEAST_PREFETCHED and "score" not in names and {"query", "key"} <= names:
                wanted.append(x)
    return prefetches(code, wanted)


def arguments_of(
    code: Code, program: ScoreProgram, indices: tuple[int, int], score_dtype: str = "float32"
) -> list[Array]:
    """What a function of device code gets, as the arguments of ``program.jaxpr``.

    ``indices``: the range of queries and keys. ``score_dtype``: what the score comes in.
    """
    most = limits("int32")[1]
    extent = program.batch_extent
    last = max(extent - 1, 0) if isinstance(extent, int) else most
    ranges = {"batch": (0, last), "head": (0, most)}
    ranges |= {"query": indices, "key": indices}
    return [
        Array.scalar(code.convert(Scalar(score_dtype, "score"), program.dtype)),
        *(Array.scalar(Scalar("int32", name, range=within)) for name, within in ranges.items()),
        *(capture_array(code, i, x) for i, x in enumerate(program.captures)),
    ]


def evaluated(code: Code, jaxpr: ClosedJaxpr, arguments: Sequence[Array]) -> list[Array]:
    """The results of a jaxpr."""
    values: dict[Any, Array] = dict(zip(jaxpr.jaxpr.invars, arguments, strict=True))

    def value_of(x: Any) -> Array:
        return constant_array(code, np.asarray(x.val)) if isinstance(x, Literal) else values[x]

    equations, results = _live_equations(jaxpr)
    for equation, inputs, outputs in equations:
        arrays = [value_of(x) for x in inputs]
        made = apply(code, equation.primitive.name, equation.params, arrays, outputs)
        for output, array in zip(outputs, made, strict=True):
            values[output] = array
            if not array.shape:
                array.at(())  # here, so that statements come in the order of the program
    return [value_of(x) for x in results]


def _live_equations(jaxpr: ClosedJaxpr) -> tuple[list[tuple[Any, list[Any], list[Any]]], list[Any]]:
    """``flat_equations`` without those that the results do not depend on."""
    equations, results = flat_equations(jaxpr)
    needed = {x for x in results if not isinstance(x, Literal)}
    live = []
    for equation, inputs, outputs in reversed(equations):
        if needed.isdisjoint(outputs):
            continue
        needed |= {x for x in inputs if not isinstance(x, Literal)}
        live.append((equation, inputs, outputs))
    return live[::-1], results


def _refusals_of(
    equation: Any, inputs: Sequence[Any], outputs: Sequence[Any]
) -> Iterator[_Refusal]:
    """What of one equation cannot be expressed."""
    name = equation.primitive.name
    types = [x.aval for x in (*inputs, *outputs)]
    if name not in _KNOWN:
        arrays = [x for x in types if x.shape]
        if arrays and name.startswith(_OVER_ELEMENTS):
            named = f"{name} of {arrays[0].dtype}{list(arrays[0].shape)}"
            yield "CAPTURE_ACCESS", named, "reads of single elements of arrays, by their index"
        else:
            yield "PRIMITIVE", name, _RULE
        return
    for x in types:
        if str(x.dtype) not in C_TYPES:
            yield "PRIMITIVE", f"{name} of {x.dtype}", f"an operation on {', '.join(C_TYPES)}"
    has_result = all(math.prod(x.aval.shape) for x in outputs)
    for x in inputs:
        if has_result and math.prod(x.aval.shape) == 0 and name not in ("concatenate", "pad"):
            named = f"{name} of {x.aval.dtype}{list(x.aval.shape)}"
            yield "CAPTURE_ACCESS", named, "an array with elements"
    if (
        name in ELEMENTWISE
        and name not in FLOAT64
        and any(str(x.dtype) == "float64" for x in types)
    ):
        yield "PRIMITIVE", f"{name} of float64", f"of float64 one of {', '.join(sorted(FLOAT64))}"
    if name == "bitcast_convert_type" and (
        types[0].shape != types[1].shape
        or {"float16", "bfloat16", "bool"} & {str(x.dtype) for x in types}
    ):
        yield (
            "PRIMITIVE",
            f"{name} of {types[0].dtype} to {types[1].dtype}",
            "between types of 32 or of 64 bits",
        )
    constants = [np.asarray(x.val) for x in inputs if isinstance(x, Literal)]
    for constant in constants:
        if constant.size > _MAX_TABLE:
            named = f"a constant {constant.dtype}{list(constant.shape)}"
            yield "CAPTURE_ACCESS", named, f"at most {_MAX_TABLE} elements, or one of the captures"
