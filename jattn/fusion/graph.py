"""A program as a graph: the equations of a jaxpr, nested ``jit`` calls among them, and who uses what.

Values know who makes and who uses them, so that a pattern can be followed backwards through helpers that are
functions of their own in the jaxpr (``_where``, ``_bernoulli``, ``tril``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.jax_interface import Literal, inlined_jaxpr

Axes = tuple[str, ...]  # a name for each axis of a value

# Operations on numbers that are evaluated while matching: what makes a scale or a probability of literals.
_FOLDED: dict[str, Callable[..., Any]] = {
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    "max": np.maximum,
    "min": np.minimum,
}
_FOLDED_OF_INTEGERS = ("neg", "add", "sub", "mul", "max", "min")
# Those that leave a number of any shape what it is.
_SAME = ("broadcast_in_dim", "reshape", "squeeze", "copy", "stop_gradient", "pvary", "pcast")
_WITH_NUMBERS = {*_SAME, *_FOLDED, "convert_element_type", "integer_pow"}
# Those that programs write out twice: exp(s) / exp(s).sum().
_MERGED = {*_WITH_NUMBERS, "reduce_max", "reduce_sum", "transpose", "select_n", "is_finite", "abs"}


@dataclasses.dataclass(eq=False)
class Value:
    """An array of the program; compared by identity.

    Attributes:
      aval: its type.
      node: who makes it; None for arguments and constants.
      held: its value, where it is a literal or a constant; it may be one of a trace around this one.
      known: the same, where it is there while tracing.
      number: what every element is, if that is known while tracing; inf and bools (0 or 1) included.
      users: the nodes that read it, and are needed.
      is_result: whether the program returns it.
    """

    aval: Any
    node: Node | None = None
    held: Any = None
    number: float | None = None
    users: list[Node] = dataclasses.field(default_factory=list)
    is_result: bool = False

    def __post_init__(self) -> None:
        if self.held is not None:
            self.number = _held_number(self)

    @property
    def known(self) -> Any:
        return None if isinstance(self.held, jax.core.Tracer) else self.held

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    def made_by(self, *names: str) -> Node | None:
        """The node that makes it, if that is one of these operations."""
        return self.node if self.node is not None and self.node.name in names else None


@dataclasses.dataclass(eq=False)
class Node:
    """One operation; compared by identity."""

    equation: Any
    inputs: list[Value]
    outputs: list[Value]

    @property
    def name(self) -> str:
        return str(self.equation.primitive.name)

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.equation.params)


@dataclasses.dataclass
class Graph:
    """The nodes in the order of the program, its arguments (constants of the jaxpr first), and its results.

    Results of the program that were made twice, and here once, are ``copies``: their places.
    """

    nodes: list[Node]
    arguments: list[Value]
    results: list[Value]
    copies: frozenset[int]

    @staticmethod
    def of(jaxpr: Any, constants: Sequence[Any], outside: Sequence[Value] = ()) -> Graph:
        """Reads an open jaxpr.

        Args:
          jaxpr: the program.
          constants: of its constvars.
          outside: what its first arguments are in the program around it.
        """
        nodes: list[Node] = []
        given = [Value(v.aval, held=c) for v, c in zip(jaxpr.constvars, constants, strict=True)]
        given += [
            Value(v.aval)
            if x is None or x.shape != v.aval.shape
            else Value(v.aval, None, x.held, x.number)
            for v, x in itertools.zip_longest(jaxpr.invars, outside[: len(jaxpr.invars)])
        ]
        results = _read(jaxpr, given, nodes, {})
        for value in results:
            value.is_result = True
        for node in reversed(nodes):  # users first: a node that nobody needs is no user
            if node.equation.effects or any(x.users or x.is_result for x in node.outputs):
                for value in node.inputs:
                    value.users.append(node)
        first = {value: jaxpr.outvars[i] for i, value in reversed(list(enumerate(results)))}
        copies = frozenset(
            i
            for i, value in enumerate(results)
            if value.node is not None and jaxpr.outvars[i] is not first[value]
        )
        return Graph(nodes, given, results, copies)


def _read(
    jaxpr: Any, given: Sequence[Value], nodes: list[Node], made: dict[Any, Node]
) -> list[Value]:
    """Appends the nodes of a jaxpr; what is ``made`` of the same by the same operation is made once."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))

    def value_of(atom: Any) -> Value:
        return Value(atom.aval, held=atom.val) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [value_of(atom) for atom in equation.invars]
        inner = inlined_jaxpr(equation)
        if inner is not None:
            constants = [
                Value(v.aval, held=c)
                for v, c in zip(inner.jaxpr.constvars, inner.consts, strict=True)
            ]
            outputs = _read(inner.jaxpr, [*constants, *inputs], nodes, made)
        else:
            key = _recipe(equation, inputs)
            node = None if key is None else made.get(key)
            if node is None:
                node = Node(equation, inputs, [Value(v.aval) for v in equation.outvars])
                for output in node.outputs:
                    output.node = node
                if node.name in _WITH_NUMBERS:
                    node.outputs[0].number = made_number(node, [x.number for x in inputs])
                nodes.append(node)
                if key is not None:
                    made[key] = node
            outputs = node.outputs
        values.update(zip(equation.outvars, outputs, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def _recipe(equation: Any, inputs: Sequence[Value]) -> Any:
    """What two equations have in common that make the same; None where they are not merged."""
    if equation.primitive.name not in _MERGED or equation.effects:
        return None
    read = [
        (np.asarray(x.known).tobytes(), str(x.aval), x.aval.weak_type)
        if x.number is not None and x.known is not None
        else x
        for x in inputs
    ]
    made = [str(v.aval) for v in equation.outvars]
    params = sorted(equation.params.items(), key=lambda item: item[0])
    key = equation.primitive, equation.ctx, *read, *made, *params
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _is_real(value: Value) -> bool:
    kinds = jax.dtypes.extended, np.complexfloating
    return not any(jnp.issubdtype(value.dtype, kind) for kind in kinds)


def _held_number(value: Value) -> float | None:
    known = value.known
    if known is None or np.size(known) != 1 or not _is_real(value):
        return None
    return float(np.asarray(known).reshape(()))


def made_number(node: Node, inputs: Sequence[float | None]) -> float | None:
    """The number that a node makes of numbers, in the type of its result; None if it is not known."""
    known = [x for x in inputs if x is not None]
    if len(node.outputs) != 1 or not known or len(known) != len(inputs):
        return None
    if node.name not in _WITH_NUMBERS or not _is_real(node.outputs[0]):
        return None
    dtype = jnp.dtype(node.outputs[0].dtype)
    is_whole = dtype.kind in "iu"
    with np.errstate(all="ignore"):
        if node.name in _SAME:
            return known[0]
        if node.name == "convert_element_type":
            made = known[0]
        elif node.name == "integer_pow":
            made = np.power(known[0], node.params["y"])
        elif node.name in _FOLDED_OF_INTEGERS or (node.name in _FOLDED and not is_whole):
            made = _FOLDED[node.name](*known)
        else:
            return None
        if is_whole and not jnp.iinfo(dtype).min <= made <= jnp.iinfo(dtype).max:
            return None
        return cast_number(made, dtype)


def cast_number(number: Any, dtype: Any) -> float:
    """A number as a type has it."""
    with np.errstate(all="ignore"):
        return float(np.asarray(number).astype(dtype))


def axes_before_transpose(node: Node, axes: Axes) -> Axes:
    """The names of the axes of what a node transposes."""
    names = dict(zip(node.params["permutation"], axes, strict=True))
    return tuple(names[i] for i in range(len(axes)))


def through(value: Value, *names: str) -> Iterator[Value]:
    """Yields a value, what it is made of by one of these operations of one array, what that is made of, and so on."""
    yield value
    while (node := value.made_by(*names)) is not None:
        value = node.inputs[0]
        yield value


def known_numbers(value: Value) -> Any | None:
    """What a constant of the program holds, or a part of one, if it is there while tracing."""
    node = value.node
    if node is not None:
        whole = known_numbers(node.inputs[0]) if node.name == "slice" else None
        return None if whole is None else whole[_cut_out(node)]
    if value.known is None or jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    return np.asarray(value.known)


def known_array(value: Value) -> Any | None:
    """The bools that a value is, if they are there while tracing: a constant, a part of one, or whether it is not 0."""
    node = value.node
    if node is None:
        numbers = known_numbers(value)
        return None if numbers is None else numbers != 0
    keeps = node.name == "convert_element_type" and bool in (value.dtype, node.inputs[0].dtype)
    if keeps or (node.name == "ne" and node.inputs[1].number == 0):
        return known_array(node.inputs[0])
    whole = known_array(node.inputs[0]) if node.name == "slice" else None
    return None if whole is None else whole[_cut_out(node)]


def _cut_out(node: Node) -> tuple[slice, ...]:
    """What a node slices out of an array."""
    limits = node.params["start_indices"], node.params["limit_indices"], node.params["strides"]
    begins, ends, steps = (x or (1,) * len(node.inputs[0].shape) for x in limits)
    return tuple(map(slice, begins, ends, steps))
