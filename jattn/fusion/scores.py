"""From the scores of a softmax back to the product of query and key."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn.fusion.axes import (
    CASTS,
    ONE,
    ONES,
    SAME,
    Miss,
    Named,
    axes_before,
    before_casts,
    compact_of,
    extents_of,
    query_and_key,
)
from jattn.fusion.bands import two_numbers
from jattn.fusion.graph import Axes, Node, Value, axes_before_transpose, known_numbers, through
from jattn.fusion.rows import reduction
from jattn.spec import FLOAT_DTYPES

_FILL = -1e9  # a mask writes this or less: no score is near
_FILL_OF_FLOAT16 = 0.9 * float(jnp.finfo(jnp.float16).min)
_LARGEST_SHIFT = 1e3  # scores to which a larger number is added are rounded


def _highest_fill(dtype: Any) -> float:
    """The highest number that a mask may write into scores of a type: -1e9 as the type has it."""
    return _FILL_OF_FLOAT16 if dtype == jnp.float16 else float(np.asarray(_FILL, dtype))


@dataclasses.dataclass
class Scores:
    """Follows scores backwards, and notes what belongs to the pattern and what acts on them.

    Attributes:
      fuses_finite_fill: whether masks may write other numbers than -inf.
      nodes: that belong to the pattern.
      masks, biases, sinks, scale, softcap: as in ``Match``, but the softcap has the sign of what tanh is multiplied by,
        and with one the scale is that of what tanh is taken of.
      first_key: of columns of which one is no key but the sink; 1 where that comes first, None without one.
      further: products that are added to the scores.
      ones: names given to axes of size 1.
    """

    fuses_finite_fill: bool
    nodes: list[Node] = dataclasses.field(default_factory=list)
    masks: list[tuple[Named, bool]] = dataclasses.field(default_factory=list)
    biases: list[tuple[Named, float]] = dataclasses.field(default_factory=list)
    sinks: Named | float | None = None
    first_key: int | None = None
    scale: float = 1.0
    softcap: float | None = None
    further: list[Named] = dataclasses.field(default_factory=list)
    ones: int = 0

    def scores(self, found: Named) -> Named:
        """The product of query and key that scores are made of; notes masks, biases and the scale."""
        scaled = False
        while (node := found.value.node) is not None:
            if node.name == "dot_general":
                return found
            if (inner := self.rearranged(found)) is not None:
                found = inner
                continue
            if node.name == "select_n" and len(node.inputs) == 3 and node.inputs[0].dtype == bool:
                found = self._masked(node, found.axes, scaled)
            elif node.name == "concatenate" and self.first_key is not None:
                found = self._behind_sink(node, found.axes, scaled)
            elif node.name == "sub" and self._takes_maximum_again(node, found.axes):
                found = Named(node.inputs[0], found.axes)
            elif node.name in ("add", "sub"):
                found = self._chosen(node, found.axes, scaled) or self._biased(node, found.axes)
                scaled = scaled or self.scale < 0  # taken off a bias
            elif node.name in ("mul", "div", "neg"):
                found, scaled = self._scaled(node, found.axes), True
            elif node.name == "tanh":
                found, scaled = self._capped(node, found.axes), True
            else:
                raise Miss(f"{node.name} between the product of query and key and the softmax")
            self.nodes.append(node)
        raise Miss("the scores are no product of query and key")

    def _masked(self, node: Node, axes: Axes, scaled: bool) -> Named:
        choice, if_false, if_true = node.inputs
        fills = if_false.number, if_true.number
        visible_if_true = fills[0] is not None
        fill = fills[0] if visible_if_true else fills[1]
        if fill is None:
            raise Miss("a mask that chooses between two arrays")
        self._check_fill(fill, node.outputs[0].dtype, scaled)
        self.masks.append(
            (compact_of(Named(choice, axes if choice.shape else ())), visible_if_true)
        )
        return Named(if_true if visible_if_true else if_false, axes)

    def _check_fill(self, fill: float, dtype: Any, scaled: bool) -> None:
        """Raises Miss if scores for which a mask writes a number need not have probabilities of 0."""
        if not fill <= _highest_fill(dtype):  # NaN is not
            raise Miss(f"a mask that writes {fill:g}, which scores may reach")
        if fill != -math.inf and not self.fuses_finite_fill:
            raise Miss(f"a mask that writes {fill:g}, not -inf")
        if self.softcap is not None:
            raise Miss("a mask in front of tanh")
        if scaled and not self.scale > 0:
            raise Miss("a mask in front of the scale")
        if not fill * self.scale <= _highest_fill(dtype):
            raise Miss(f"a mask in front of the scale that writes {fill * self.scale:g} with it")

    def _behind_sink(self, node: Node, axes: Axes, scaled: bool) -> Named:
        """The scores of the keys, of which the first or last column is that of a sink."""
        if (
            scaled
            or self.softcap is not None
            or self.masks
            or self.biases
            or self.sinks is not None
        ):
            raise Miss("scores and sinks are masked, or scaled, together")
        place = self.first_key
        if place is None or len(node.inputs) != 2 or axes[node.params["dimension"]] != "column":
            raise Miss("concatenate between the product of query and key and the softmax")
        sink, scores = node.inputs[1 - place], node.inputs[place]
        if sink.shape[axes.index("column")] != 1:
            raise Miss("several columns of sinks")
        self.sinks = compact_of(Named(sink, axes))
        return Named(scores, axes)

    def _takes_maximum_again(self, node: Node, axes: Axes) -> bool:
        """Whether a maximum over keys is taken off once more, which changes no weights."""
        return self.softcap is None and self.sinks is None and self.takes_maximum(node, axes)

    def _chosen(self, node: Node, axes: Axes, scaled: bool) -> Named | None:
        """The scores of ``scores * mask + fill * (1 - mask)``; notes the mask. None of any other sum."""
        sign = -1 if node.name == "sub" else 1
        for place in (0,) if node.name == "sub" else (0, 1):
            product = node.inputs[place].made_by("mul")
            written = None if product is None else two_numbers(_operand(node, 1 - place, axes))
            if product is None or written is None:
                continue
            for i in (0, 1):
                kept = two_numbers(_operand(product, i, axes))
                if kept is None or not _is_same_mask(kept[0], written[0]):
                    continue
                of_false, of_true = zip(kept[1:], (sign * x for x in written[1:]), strict=True)
                visible_if_true = of_true == (1, 0)
                factor, fill = of_false if visible_if_true else of_true
                if factor != 0 or (of_true if visible_if_true else of_false) != (1, 0):
                    continue
                self._check_fill(fill, node.outputs[0].dtype, scaled)
                self.masks.append((compact_of(kept[0]), visible_if_true))
                self.nodes.append(product)
                return Named(product.inputs[1 - i], axes)
        return None

    def _biased(self, node: Node, axes: Axes) -> Named:
        # A bias may be tanh of a product, so scores are looked for without one first.
        places: list[int] = []
        for operations in (OF_SCORES, (*OF_SCORES, "tanh")):
            if len(places) != 1:
                places = [i for i in (0, 1) if leads_to_product(node.inputs[i], operations)]
        if places == [0, 1] and node.name == "add":
            return self._added(node, axes)
        if len(places) != 1:
            raise Miss("a sum of which both parts are products, or none")
        return self._with_bias(node, axes, places[0])

    def _added(self, node: Node, axes: Axes) -> Named:
        """One of two products that are added; notes the other, as more of the sum over head dims, or as a bias."""
        found = [self._product(value, axes) for value in node.inputs]
        for is_bias in (False, True):
            for place in (0, 1):
                main, other = found[place], found[1 - place]
                if main is None:
                    continue
                assert main.value.node is not None
                try:
                    q, k = query_and_key(main.value.node, main.axes)
                    if is_bias:
                        return self._with_bias(node, axes, place)
                    if other is not None:
                        further_operands(other, q, k)
                        self.further.append(other)
                        return main
                except Miss:
                    continue
        raise Miss("a sum of two products, of which none is of query and key")

    def _product(self, value: Value, axes: Axes) -> Named | None:
        """The product that a value is, in another shape or type maybe."""
        found, nodes = Named(value, axes), len(self.nodes)
        while found.value.made_by("dot_general") is None:
            inner = self.rearranged(found)
            if inner is None:
                del self.nodes[nodes:]
                return None
            found = inner
        return found

    def _with_bias(self, node: Node, axes: Axes, place: int) -> Named:
        """The summand at ``place``; notes the other as a bias.

        Raises:
          Miss: it is none.
        """
        bias = node.inputs[1 - place]
        if self.softcap is not None and bias.number != 0:
            raise Miss("a bias in front of tanh")
        if bias.number is not None:
            self._check_shift(bias.number * self.scale)
        is_taken_off = node.name == "sub" and place == 0
        factor = -self.scale if is_taken_off else self.scale
        whole = Named(bias, axes if bias.shape else ())
        for part in self._summands(whole, factor) if bias.number is None else ():
            mask = self._mask_that_is_added(part, factor)
            if mask is not None:
                self.masks.append(mask)
                continue
            *_, source = through(part.value, *SAME, "broadcast_in_dim", "reshape")
            if not {str(part.value.dtype), str(source.dtype)} <= set(FLOAT_DTYPES):
                raise Miss(f"a bias of {source.dtype}")
            self.biases.append((part, factor))
        if node.name == "sub" and place == 1:
            self.scale = -self.scale
        return Named(node.inputs[place], axes)

    def _check_shift(self, number: float) -> None:
        """Raises Miss if a number that is added to all scores changes their softmax."""
        if number != 0 and self.sinks is not None:
            raise Miss("a number is added to the scores and not to the sinks")
        if not abs(number) <= _LARGEST_SHIFT:  # NaN is not
            raise Miss("a number is added to the scores that rounds them")

    def _summands(self, bias: Named, factor: float) -> list[Named]:
        """A bias; if it is a sum of a mask and of something else, both."""
        bias = compact_of(bias)
        total = bias.value.made_by("add")
        if total is None:
            return [bias]
        parts = [compact_of(Named(x, bias.axes if x.shape else ())) for x in total.inputs]
        has_mask = any(self._mask_that_is_added(part, factor) is not None for part in parts)
        return parts if has_mask else [bias]

    def _mask_that_is_added(self, found: Named, factor: float) -> tuple[Named, bool] | None:
        """The mask, and whether true means visible, of which 0 and -inf, or a large negative number, are made."""
        made = two_numbers(found)
        if made is None or (made[1] == 0) == (made[2] == 0):
            return None
        mask, of_false, of_true = made
        hidden = (of_false or of_true) * factor
        if not hidden <= _highest_fill(found.value.dtype):  # NaN is not
            return None
        if hidden != -math.inf and not self.fuses_finite_fill:
            return None
        return compact_of(mask), of_true == 0

    def _scaled(self, node: Node, axes: Axes) -> Named:
        if node.name == "neg":
            self.scale = -self.scale
            return Named(node.inputs[0], axes)
        places = (1,) if node.name == "div" else (1, 0)
        for place in places:
            known = node.inputs[place].number
            if known is not None and math.isfinite(known) and known != 0:
                self.scale *= known if node.name == "mul" else 1 / known
                return Named(node.inputs[1 - place], axes)
        raise Miss("a scale that is an array")

    def _capped(self, node: Node, axes: Axes) -> Named:
        if self.softcap is not None:
            raise Miss("two tanh between the product of query and key and the softmax")
        self.softcap, self.scale = self.scale, 1.0
        return Named(node.inputs[0], axes)

    def in_type_of(self, dtype: Any, found: Named) -> Named:
        """A query or key of float32, as it was in 16 bits where the values are: kernels multiply in float32 anyhow.

        A number that it was multiplied by since becomes one of the scale.
        """
        if found.value.dtype != jnp.float32 or jnp.finfo(dtype).bits != 16:
            return found
        value, axes, factor = found.value, found.axes, 1.0
        while value.dtype != dtype:
            node = value.made_by("transpose", "mul", "div", *CASTS)
            if node is None:
                return found
            numbers = [i for i, x in enumerate(node.inputs) if x.number]
            if node.name == "transpose":
                axes = axes_before_transpose(node, axes)
            elif node.name in ("mul", "div"):
                if not numbers or (node.name == "div" and numbers != [1]):
                    return found
                number = node.inputs[numbers[-1]].number
                assert number is not None
                factor *= 1 / number if node.name == "div" else number
            value = node.inputs[1 - numbers[-1]] if numbers else node.inputs[0]
        self.scale *= factor
        return Named(value, axes)

    # ---- Steps

    def rearranged(self, found: Named) -> Named | None:
        node = found.value.made_by("transpose", *SAME, *ONES)
        if node is None or str(node.inputs[0].dtype) not in FLOAT_DTYPES:
            return None
        axes = found.axes
        if node.name == "transpose":
            axes = axes_before_transpose(node, found.axes)
        elif node.name in ONES:
            before = axes_before(node, found.axes, self._name_of_one)
            if before is None:
                return None
            axes = before
        self.nodes.append(node)
        return Named(node.inputs[0], axes)

    def _name_of_one(self) -> str:
        self.ones += 1
        return f"{ONE}{self.ones}"

    def takes_maximum(self, shifted: Node, axes: Axes) -> bool:
        """Whether it takes off the maximum over "column", or that and -inf, of what it takes it off, in any layout."""
        if shifted.inputs[0].shape != shifted.outputs[0].shape:
            return False
        row = Named(shifted.inputs[1], axes)
        return any(
            self._is_maximum_of(found, row)
            for found in self._in_all_layouts(Named(shifted.inputs[0], axes))
        )

    def _in_all_layouts(self, found: Named) -> list[Named]:
        """A value as it is, and as it was before its axes were moved."""
        layouts, nodes = [found], len(self.nodes)
        while (inner := self.rearranged(layouts[-1])) is not None:
            layouts.append(inner)
        del self.nodes[nodes:]
        return layouts

    def _is_maximum_of(self, found: Named, row: Named) -> bool:
        """Whether a number for each row is the maximum over "column" of scores; notes what makes it."""
        largest = reduction(row, "reduce_max", found.axes)
        if largest is None or largest.is_inverse:
            return False
        own, compared = before_casts(found.value), largest.operand
        origin = next(
            (x for x in (before_casts(compared), before_stops(compared)) if x is own), None
        )
        if origin is None:  # `jax.nn.softmax(where=)` masks the scores twice
            origin = before_stops(compared)
            if own.made_by("select_n") is None or not is_same(own, origin):
                return False
            assert origin.node is not None
            self.nodes.append(origin.node)
        if compared is not found.value:
            self.take_casts(compared, origin)
        self.nodes += [largest.node, *largest.nodes]
        return True

    def take(self, value: Value, until: Node) -> None:
        self.nodes += between(until, value)

    def take_casts(self, value: Value, origin: Value) -> None:
        while value is not origin and value.node is not None:
            self.nodes.append(value.node)
            value = value.node.inputs[0]


def _operand(node: Node, place: int, axes: Axes) -> Named:
    value = node.inputs[place]
    return Named(value, axes if value.shape else ())


def _is_same_mask(one: Named, other: Named) -> bool:
    if one.axes != other.axes:
        return False
    known, compared = known_numbers(one.value), known_numbers(other.value)
    if known is not None and compared is not None:
        return np.array_equal(known, compared)
    return is_same(one.value, other.value)


OF_SCORES = ("transpose", "neg", "select_n", "add", "sub", "mul", "div", *SAME, *ONES)


def leads_to_product(value: Value, operations: Sequence[str], depth: int = 16) -> bool:
    """Whether a value is a product of two arrays with scores' operations on it."""
    node = value.node
    if node is None or depth == 0 or value.number is not None:
        return False
    if node.name == "dot_general":
        return True
    if node.name in operations:
        return any(leads_to_product(x, operations, depth - 1) for x in node.inputs)
    return False


def further_operands(found: Named, q: Named, k: Named) -> tuple[Named, Named]:
    """Query and key of a product that is added to that of q and k.

    Raises:
      Miss: they do not fit together.
    """
    product = found.value.node
    assert product is not None
    own_q, own_k = query_and_key(product, found.axes, all_heads=False)
    for own, whole in ((own_q, q), (own_k, k)):
        known = extents_of(whole)
        others = [name for name, n in extents_of(own).items() if n not in (1, known.get(name))]
        if not set(others) <= {"depth"}:
            raise Miss("two products of queries and keys with other axes")
    return own_q, own_k


def between(start: Node, value: Value) -> list[Node]:
    """The operations on one array, and on numbers, that make a value of what a node makes."""
    nodes: list[Node] = []
    while value.node is not None and value.node is not start:
        nodes.append(value.node)
        (value,) = [x for x in value.node.inputs if x.number is None]
    return nodes


def is_same(one: Value, other: Value, depth: int = 8) -> bool:
    """Whether two values are made of the same by the same operations."""
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.number is not None or other.number is not None:
        return one.number == other.number
    if one.node is None or other.node is None or depth == 0:
        return False
    return (
        one.node.name == other.node.name
        and not (one.node.equation.effects or other.node.equation.effects)
        and one.node.params == other.node.params
        and one.node.outputs.index(one) == other.node.outputs.index(other)
        and len(one.node.inputs) == len(other.node.inputs)
        and all(
            is_same(x, y, depth - 1)
            for x, y in zip(one.node.inputs, other.node.inputs, strict=True)
        )
    )


def before_stops(value: Value) -> Value:
    """What a value was in another float type, and before its gradient was stopped."""
    while (node := (value := before_casts(value)).made_by("stop_gradient")) is not None:
        value = node.inputs[0]
    return value
