"""A score program as text for the interpreter of the CPU kernel (cc/cpu/program.h says what stands in it).

The scalars of device code become instructions on vectors. They are sorted by what they depend on: what is the same for
a whole tile, for a query or for a key is computed once and spread over the pairs that read it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jattn import device_code, device_gradients
from jattn.device_scalars import FLOATS, Code, Scalar
from jattn.jax_interface import ClosedJaxpr
from jattn.score_program import ScoreProgram

_MAX_REGISTERS = 1024
# The most elements that all gradients of captures together may have. The more there are, the fewer copies of them the
# kernel has (cc/cpu/plan.cc) for tasks to add to side by side; beyond this, tasks wait for each other so much that XLA
# adds up as fast.
_MAX_ELEMENTS = 2**22
_ARGUMENTS = {"score": "P", "batch": "U", "head": "Q", "query": "Q", "key": "K"}
# What lanes hold of types that have none of their own.
_LANES = {"bool": "int32", "float16": "float32", "bfloat16": "float32"}
# Operations that have another name there.
_NAMES = {
    "add_modulo": "add",
    "sub_modulo": "sub",
    "mul_modulo": "mul",
    "times_inverse": "mul",
    "quotient_by_positive": "quotient",
    "remainder_by_positive": "remainder",
}


def refusals(program: ScoreProgram) -> list[tuple[str, object, str]]:
    """Says what of a program the interpreter cannot run: as ``device_code.refusals``, and

    CAPTURE_ACCESS: it needs too many registers.
    """
    found = device_code.refusals(program)
    if not found:
        needed = max(_written(program, by_position=True, slope=slope)[1] for slope in (False, True))
        if needed > _MAX_REGISTERS:
            found.append(
                ("CAPTURE_ACCESS", f"{needed} numbers at a time", f"at most {_MAX_REGISTERS}")
            )
    return found


def cpu_program(program: ScoreProgram, *, by_position: bool, slope: bool) -> str:
    """Returns the text of a program without ``refusals``.

    Args:
      program: the score function.
      by_position: indices of queries and keys may be negative.
      slope: it also computes the derivative by the score, unless that is 1.
    """
    return _written(program, by_position=by_position, slope=slope)[0]


@functools.lru_cache(maxsize=256)
def _written(program: ScoreProgram, *, by_position: bool, slope: bool) -> tuple[str, int]:
    """The text, and how many registers it needs."""
    has_slope = slope and not program.has_unit_slope
    jaxpr = program.slope_jaxpr if has_slope else program.jaxpr
    code, results = _scalars(program, jaxpr, by_position=by_position)
    steps = _Steps(code)
    for x in code.live(results):
        steps.of(x)
    made = [steps.for_pairs(steps.of(x)) for x in results]
    registers = _Registers(steps.made, made)
    numbers = [registers.of[x] for x in made]
    header = (
        f"score {program.dtype} {registers.count} {numbers[0]} {numbers[1] if has_slope else -1}"
    )
    return ";".join([header, *steps.tables(), *registers.lines, ""]), registers.count


@functools.lru_cache(maxsize=1024)
def can_sum(program: ScoreProgram, wanted: tuple[bool, ...]) -> bool:
    """Whether there is a ``gradients_program`` for the captures that are wanted; the program has no ``refusals``."""
    return (
        device_gradients.can_sum(program, wanted, program.dtype)
        and device_gradients.num_elements(program, wanted) <= _MAX_ELEMENTS
        and _gradients(program, wanted, by_position=True)[1] <= _MAX_REGISTERS
    )


def gradients_program(program: ScoreProgram, wanted: tuple[bool, ...], *, by_position: bool) -> str:
    """Returns the text of a program that says what a pair reads, and the derivatives of its score by that.

    Args:
      program, wanted: the score function and which captures, such as ``can_sum``.
      by_position: indices of queries and keys may be negative.
    """
    return _gradients(program, wanted, by_position=by_position)[0]


@functools.lru_cache(maxsize=256)
def _gradients(
    program: ScoreProgram, wanted: tuple[bool, ...], *, by_position: bool
) -> tuple[str, int]:
    """The text, and how many registers it needs."""
    code = Code()
    indices = _index_range(by_position=by_position)
    reads = device_gradients.reads(code, program, wanted, indices, program.dtype)
    steps = _Steps(code, head="U")
    for x in code.live([x for read in reads for x in (read.place, read.derivative)]):
        steps.of(x)
    # A place that many pairs share is not spread: what they add to it is added up first.
    made = [(steps.of(x.place), steps.for_pairs(steps.of(x.derivative))) for x in reads]
    registers = _Registers(steps.made, [x for pair in made for x in pair])
    header = f"score {program.dtype} {registers.count} {list(_ARGUMENTS).index('score')} -1"
    lines = [
        f"gradient {place.section} {registers.of[place]} {registers.of[derivative]}"
        for place, derivative in made
    ]
    return ";".join([header, *steps.tables(), *registers.lines, *lines, ""]), registers.count


def _index_range(*, by_position: bool) -> tuple[int, int]:
    return device_code.index_range(by_position=by_position, largest_index=device_code.LARGEST_INDEX)


def _scalars(
    program: ScoreProgram, jaxpr: ClosedJaxpr, *, by_position: bool
) -> tuple[Code, list[Scalar]]:
    code = Code()
    indices = _index_range(by_position=by_position)
    arguments = device_code.arguments_of(code, program, indices, program.dtype)
    results = device_code.evaluated(code, jaxpr, arguments)
    return code, [code.convert(x.at(()), program.dtype) for x in results]


# ---- From scalars to steps -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """What makes a vector, compared by identity.

    Attributes:
      name: the operation; of an argument its name.
      section: what it depends on, as the text names it.
      lane_bytes: of a number.
      operands: what it reads.
      numbers: what it knows.
      spreads: it spreads an operand of Q or K over pairs.
    """

    name: str
    section: str
    lane_bytes: int
    operands: tuple[_Step, ...] = ()
    numbers: tuple[int, ...] = ()
    spreads: bool = False


def _lane(dtype: str) -> str:
    return _LANES.get(dtype, dtype)


def _lane_bytes(dtype: str) -> int:
    return int(np.dtype(_lane(dtype)).itemsize)


class _Steps:
    """The steps that make scalars; equal ones are made once.

    ``head``: the section of that argument.
    """

    def __init__(self, code: Code, head: str = "Q") -> None:
        self._code = code
        self._of: dict[Scalar, _Step] = {}
        self._known: dict[Any, _Step] = {}
        sections = {**_ARGUMENTS, "head": head}
        self._arguments = {name: _Step(name, section, 4) for name, section in sections.items()}
        self.made: list[_Step] = []

    def of(self, x: Scalar) -> _Step:
        """The step that makes a scalar whose operands have been made."""
        if x not in self._of:
            self._of[x] = self._new(x)
        return self._of[x]

    def for_pairs(self, x: _Step) -> _Step:
        """The same numbers, one for each pair."""
        if x.section not in "QK":
            return x
        return self._add(_Step(x.section.lower(), "P", x.lane_bytes, (x,), (), spreads=True))

    def tables(self) -> list[str]:
        """The constant arrays."""
        lines = []
        for table in self._code.tables:
            numbers = " ".join(str(_bits(x)) for x in table)
            lines.append(f"table {_lane_bytes(table[0].dtype)} {numbers}")
        return lines

    def _new(self, x: Scalar) -> _Step:
        if x.operation is None:
            if x.text in self._arguments:
                return self._arguments[x.text]
            return self._constant(x.dtype, _bits(x))
        operands = [self.of(y) for y in x.operands]
        made = self._exact(x, x.operation.name, operands)
        return self._make(f"round_{x.dtype}.float32", x.dtype, made) if x.is_rounded else made

    def _exact(self, x: Scalar, name: str, operands: Sequence[_Step]) -> _Step:
        """Before it is rounded to a type of 16 bits."""
        assert x.operation is not None
        numbers = x.operation.numbers
        size = _lane_bytes(x.dtype)
        if name == "convert":
            return self._converted(operands[0], x.operands[0].dtype, x.dtype)
        if name == "read":
            return self._read(x, operands)
        if name == "lookup":
            place = self._converted(operands[0], x.operands[0].dtype, "int32")
            return self._make(f"lookup.{size}", x.dtype, place, numbers=numbers)
        if name == "bitcast_convert_type":
            return operands[0]
        if name == "square":
            return self._make(f"mul.{_lane(x.dtype)}", x.dtype, operands[0], operands[0])
        if name == "choose":
            return self._chosen(x, operands)
        if name == "not" and x.dtype == "bool":
            return self._make("xor.4", "bool", operands[0], self._constant("bool", 1))
        if name in ("select", "and", "or", "xor", "not"):
            return self._make(f"{name}.{size}", x.dtype, *operands)
        lane = _lane(x.operands[0].dtype)
        return self._make(f"{_NAMES.get(name, name)}.{lane}", x.dtype, *operands, numbers=numbers)

    def _converted(self, x: _Step, from_dtype: str, dtype: str) -> _Step:
        if from_dtype != "bool" and dtype == "bool":
            return self._make(f"convert.{_lane(from_dtype)}.bool", dtype, x)
        lanes = _lane(from_dtype), _lane(dtype)
        return x if lanes[0] == lanes[1] else self._make(f"convert.{lanes[0]}.{lanes[1]}", dtype, x)

    def _read(self, x: Scalar, operands: Sequence[_Step]) -> _Step:
        assert x.operation is not None
        capture, is_wide, fixed, *strides = x.operation.numbers
        index = "int64" if is_wide else "int32"
        place = self._constant(index, fixed) if fixed or not strides else None
        for step, scalar, stride in zip(operands, x.operands, strides, strict=True):
            term = self._converted(step, scalar.dtype, index)
            if stride != 1:
                term = self._make(f"mul.{index}", index, term, self._constant(index, stride))
            place = term if place is None else self._make(f"add.{index}", index, place, term)
        assert place is not None
        return self._make(f"read.{x.dtype}.{index}", x.dtype, place, numbers=(capture,))

    def _chosen(self, x: Scalar, operands: Sequence[_Step]) -> _Step:
        """One of several, by an integer."""
        which, *cases = operands
        dtype = x.operands[0].dtype
        made = cases[-1]
        for i in reversed(range(len(cases) - 1)):
            is_before = self._make(
                f"lt.{_lane(dtype)}", "bool", which, self._constant(dtype, i + 1)
            )
            made = self._make(f"select.{_lane_bytes(x.dtype)}", x.dtype, is_before, made, cases[i])
        return made

    def _constant(self, dtype: str, bits: int) -> _Step:
        return self._make(f"constant.{_lane_bytes(dtype)}", dtype, numbers=(bits,))

    def _make(
        self, name: str, dtype: str, *operands: _Step, numbers: tuple[int, ...] = ()
    ) -> _Step:
        sections = {x.section for x in operands} - {"U"}
        section = "U" if not sections else sections.pop() if len(sections) == 1 else "P"
        if section == "P":
            operands = tuple(self.for_pairs(x) for x in operands)
        return self._add(_Step(name, section, _lane_bytes(dtype), operands, numbers))

    def _add(self, step: _Step) -> _Step:
        key = (step.name, step.lane_bytes, step.operands, step.numbers)
        if key not in self._known:
            self._known[key] = step
            self.made.append(step)
        return self._known[key]


def _bits(x: Scalar) -> int:
    """A constant as the bits of its lane."""
    value = 0 if x.constant is None else x.constant
    lane = np.dtype(_lane(x.dtype))
    number = np.asarray(value).astype(lane) if x.dtype in FLOATS else np.asarray(int(value), lane)
    return int(number.view(f"int{8 * lane.itemsize}"))


# ---- From steps to instructions --------------------------------------------------------------------------------------


class _Registers:
    """Gives steps their registers. Those of pairs are used again when what they hold has been read for the last time.

    Attributes:
      of: step -> its register.
      lines: the instructions.
      count: how many registers there are.
    """

    def __init__(self, steps: Sequence[_Step], results: Sequence[_Step]) -> None:
        self.of: dict[_Step, int] = {}
        self.count = len(_ARGUMENTS)
        self._free: list[int] = []
        order = {name: i for i, name in enumerate(_ARGUMENTS)}
        live = self._live(steps, results)
        for step in live:
            for x in step.operands:
                if x.name in order:
                    self.of[x] = order[x.name]
        for x in results:
            if x.name in order:
                self.of[x] = order[x.name]
        last_use = {x: i for i, step in enumerate(live) for x in step.operands}
        kept = {*results, *(x for x in live if x.section != "P" or x.spreads)}
        self.lines = []
        for i, step in enumerate(live):
            # What stays for the whole tile gets its register first: a loop over blocks of pairs comes back to it.
            self.of[step] = self._new() if step in kept else self._taken()
            self.lines.append(self._line(step))
            for x in dict.fromkeys(step.operands):
                if last_use[x] == i and x not in kept and x.name not in order:
                    self._free.append(self.of[x])

    @staticmethod
    def _live(steps: Sequence[_Step], results: Sequence[_Step]) -> list[_Step]:
        """Those that results depend on; of pairs last."""
        needed = set(results)
        live = []
        for step in reversed(steps):
            if step in needed:
                needed |= set(step.operands)
                live.append(step)
        live.reverse()
        return sorted(live, key=lambda x: (x.section == "P") + (x.section == "P" and not x.spreads))

    def _new(self) -> int:
        self.count += 1
        return self.count - 1

    def _taken(self) -> int:
        return self._free.pop() if self._free else self._new()

    def _line(self, step: _Step) -> str:
        registers = [self.of[step], *(self.of[x] for x in step.operands)]
        if step.spreads:
            return " ".join(map(str, (step.name, step.lane_bytes, *registers)))
        return " ".join(map(str, (step.section, step.name, *registers, *step.numbers)))
