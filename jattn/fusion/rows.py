"""Numbers that belong to rows of scores: sums and maxima over keys, what is made of them, and where they stand."""

from __future__ import annotations

import dataclasses
import math

from jattn.fusion.axes import SAME, Named, long_parts, reshaped_axes
from jattn.fusion.graph import Axes, Node, Value, axes_before_transpose
from jattn.spec import FLOAT_DTYPES


@dataclasses.dataclass(frozen=True)
class Reduced:
    """A reduction over "column", one number for each row.

    Attributes:
      node: the reduction.
      nodes: what makes the value that was looked at of its result.
      is_inverse: whether that value is one over it.
    """

    node: Node
    nodes: list[Node]
    is_inverse: bool

    @property
    def operand(self) -> Value:
        return self.node.inputs[0]


@dataclasses.dataclass(frozen=True)
class LogOfSum:
    """log(sum) + shift: the sum, the shift where there is one, and all operations behind the sum."""

    total: Reduced
    shift: Named | None
    nodes: list[Node]


def reduction(found: Named, name: str, whole: Axes) -> Reduced | None:
    """The sum or maximum over "column" that a value is: it must stand where the rows are.

    Args:
      found: a value for each row, or its inverse; one of its axes may be "column" or "width", along which it is
        repeated.
      name: of the reduction.
      whole: axes of what is reduced.
    """
    nodes: list[Node] = []
    is_inverse = False
    while (node := found.value.node) is not None and node.name != name:
        if (inner := _reciprocal(node)) is not None:
            if is_inverse:
                return None
            is_inverse = True
            found = Named(inner, found.axes)
        elif name == "reduce_max" and (finite := _finite_or_zero(node)) is not None:
            comparison, inner = finite
            nodes.append(comparison)
            found = Named(inner, found.axes)
        else:
            step = _step(node, found.axes)
            if step is None:
                return None
            found = step
        nodes.append(node)
    if node is None or not (_is_whole(found) and _is_whole(Named(node.inputs[0], whole))):
        return None
    if tuple(node.params["axes"]) != (whole.index("column"),):
        return None
    rows = [x for x in long_parts(Named(node.inputs[0], whole)) if x != "column"]
    if long_parts(found) != rows:
        return None
    return Reduced(node, nodes, is_inverse)


def log_of_sum(found: Named, whole: Axes) -> LogOfSum | None:
    """What ``logsumexp`` makes: the logarithm of a sum over "column", and a shift that is added to it."""
    found, nodes = moved_back(found)
    node = found.value.node
    if node is None:
        return None
    parts: list[tuple[Value, Value | None]] = [(found.value, None)]
    if node.name == "add":
        nodes.append(node)
        one, other = node.inputs
        parts = [(one, other), (other, one)]
    for part, shift in parts:
        log, between = moved_back(Named(part, found.axes))
        if (logarithm := log.value.made_by("log")) is None:
            continue
        between.append(logarithm)
        summed = Named(logarithm.inputs[0], log.axes)
        if (magnitude := summed.value.made_by("abs")) is not None:
            between.append(magnitude)
            summed = Named(magnitude.inputs[0], log.axes)
        total = reduction(summed, "reduce_sum", whole)
        if total is None or total.is_inverse:
            continue
        shifted = None if shift is None else Named(shift, found.axes)
        return LogOfSum(total, shifted, [*nodes, *between, *total.nodes])
    return None


def is_same_row(one: Named, other: Named) -> bool:
    """Whether two values repeat the same number along each row; not if the gradient of one alone is stopped."""
    (a, _), (b, _) = moved_back(one), moved_back(other)
    is_row = a.value is b.value and _is_whole(a) and _is_whole(b)
    return is_row and long_parts(a) == long_parts(b)


def moved_back(found: Named) -> tuple[Named, list[Node]]:
    """What a value was in another shape or type, and the operations between."""
    nodes: list[Node] = []
    while (node := found.value.node) is not None and node.name not in ("max", "stop_gradient"):
        step = _step(node, found.axes)
        if step is None:
            break
        nodes.append(node)
        found = step
    return found, nodes


def _step(node: Node, names: Axes) -> Named | None:
    """The only array that a node reads, if it is the same number for each row: moved, converted, at least -inf."""
    rest = [x for x in node.inputs if x.number is None]
    if len(rest) != 1 or not _is_whole(Named(node.outputs[0], names)):
        return None
    (inner,) = rest
    if str(inner.dtype) not in FLOAT_DTYPES:
        return None
    if node.name == "broadcast_in_dim":
        return Named(inner, tuple(names[i] for i in node.params["broadcast_dimensions"]))
    if node.name in ("reshape", "squeeze"):
        axes = reshaped_axes(names, node.outputs[0].shape, inner.shape)
        return None if axes is None else Named(inner, axes)
    if node.name == "transpose":
        return Named(inner, axes_before_transpose(node, names))
    is_plain = node.name in (*SAME, "stop_gradient")
    is_maximum = node.name == "max" and -math.inf in [x.number for x in node.inputs]
    return Named(inner, names) if is_plain or is_maximum else None


def _is_whole(found: Named) -> bool:
    """Whether all axes have names: not those of a scalar, which is one number for all rows, or of another array."""
    return len(found.axes) == len(found.value.shape)


def _reciprocal(node: Node) -> Value | None:
    """What a node divides 1 by."""
    if node.name == "div" and node.inputs[0].number == 1:
        return node.inputs[1]
    if node.name == "integer_pow" and node.params["y"] == -1:
        return node.inputs[0]
    return None


def _finite_or_zero(node: Node) -> tuple[Node, Value] | None:
    """The comparison and the array of ``where(isfinite(x), x, 0)``."""
    if node.name != "select_n" or len(node.inputs) != 3 or node.inputs[1].number != 0:
        return None
    comparison, kept = node.inputs[0].made_by("is_finite"), node.inputs[2]
    return None if comparison is None or comparison.inputs[0] is not kept else (comparison, kept)
