"""From the weights in a product with values back to scores: dropout and softmax, in their spellings."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from jattn.fusion.axes import ONES, SAME, Miss, Named, before_casts, compact_of, reshaped_axes
from jattn.fusion.dropout import FoundDropout, dropout_of
from jattn.fusion.graph import Axes, Node, Value, axes_before_transpose
from jattn.fusion.rows import Reduced, is_same_row, log_of_sum, moved_back, reduction
from jattn.fusion.scores import OF_SCORES, Scores, before_stops, between, is_same, leads_to_product


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A mask on probabilities: whether true or false keeps them, and what is made of it, that they are selected or
    multiplied by.
    """

    mask: Named
    if_true: bool
    made: Value

    def is_same(self, mask: Named, if_true: bool) -> bool:
        """As a mask on the scores."""
        own, own_sense = _without_not(self.mask)
        other, other_sense = _without_not(mask)
        is_same_sense = (own_sense == self.if_true) == (other_sense == if_true)
        return is_same_sense and own.axes == other.axes and is_same(own.value, other.value)


@dataclasses.dataclass
class Weights(Scores):
    """Follows the weights of a product with values backwards, and notes what belongs to the pattern.

    Attributes:
      kept, kept_in_sum: masks on the probabilities, and on what is added up.
      factor: of the probabilities.
      rounding: how far it may be off, as a part of itself.
    """

    kept: list[_Kept] = dataclasses.field(default_factory=list)
    kept_in_sum: list[_Kept] = dataclasses.field(default_factory=list)
    factor: float = 1.0
    rounding: float = 0.0

    def probabilities(self, found: Named) -> Named | None:
        """Scores whose softmax, with dropout or not, a value is; None if it is none.

        Raises:
          Miss: it is made of one, by what probabilities do not go through.
        """
        while (node := found.value.node) is not None:
            steps = self.rearranged, self._made_finite, self._dropped, self._with_sink
            inner = next((x for step in steps if (x := step(found)) is not None), None)
            if inner is not None:
                found = inner
            elif node.name == "stop_gradient":
                self.nodes.append(node)
                found = Named(node.inputs[0], found.axes)
            else:
                break
        scores = self._of_softmax(found)
        if scores is None and self._is_made_of_softmax(found):
            assert node is not None
            raise Miss(f"{node.name} between the softmax and the product with the values")
        return scores

    def _of_softmax(self, found: Named) -> Named | None:
        """Scores whose softmax, and nothing else, a value is; None if it is none."""
        node = found.value.made_by("div", "mul", "exp")
        if node is None:
            return None
        return self._of_logarithms(found) if node.name == "exp" else self._softmax(found)

    def _is_made_of_softmax(self, found: Named, depth: int = 6) -> bool:
        """Whether a value is made of probabilities of queries and keys, all in their places, that nobody else reads."""
        node = found.value.node
        has_rows = "column" in found.axes and any(name.startswith("row") for name in found.axes)
        if node is None or depth == 0 or not has_rows:
            return False
        if found.value.is_result or len(found.value.users) != 1:
            return False
        try:
            scores = Weights(self.fuses_finite_fill)._of_softmax(found)
        except Miss:
            return False
        if scores is not None:
            return leads_to_product(scores.value, (*OF_SCORES, "tanh", "concatenate"))
        sources = _sources(node, found.axes)
        is_made = [self._is_made_of_softmax(source, depth - 1) for source in sources]
        return any(is_made) if node.name not in ("add", "sub") else bool(sources) and all(is_made)

    def normalised_later(self, weights: Named, divisor: Named, quotient: Node) -> Named | None:
        """Scores whose exponentials are the weights in a product that is divided by their sum."""
        while weights.value.node is not None:
            inner = self.rearranged(weights) or self._dropped(weights)
            if inner is None:
                break
            weights = inner
        total = _sum_of(quotient, divisor, weights.axes)
        return None if total is None else self._normalised(weights, *total)

    def _with_sink(self, found: Named) -> Named | None:
        """What a value was before the column of a sink, the first or the last, was cut off."""
        node = found.value.made_by("slice")
        if node is None or self.first_key is not None or "column" not in found.axes:
            return None
        column, before, after = found.axes.index("column"), node.inputs[0].shape, found.value.shape
        begins = node.params["start_indices"]
        whole = (*after[:column], after[column] + 1, *after[column + 1 :])
        is_cut = before == whole and set(node.params["strides"] or (1,)) == {1}
        if not is_cut or any(begin for i, begin in enumerate(begins) if i != column):
            return None
        self.first_key = int(begins[column])
        self.nodes.append(node)
        return Named(node.inputs[0], found.axes)

    def _made_finite(self, found: Named) -> Named | None:
        """What a value was before 0 replaced NaN, as queries have it that see no key, or another number infinity."""
        node = found.value.made_by("select_n")
        if node is None or len(node.inputs) != 3:
            return None
        choice, rest, written = node.inputs
        comparison = choice.made_by("ne", "eq")
        if comparison is None or comparison.inputs[0] is not rest:
            return None
        other = comparison.inputs[1]
        is_nan = comparison.name == "ne" and other is rest and written.number == 0
        is_infinite = comparison.name == "eq" and other.number in (math.inf, -math.inf)
        if not is_nan and not (is_infinite and written.number is not None):
            return None
        self.nodes += [comparison, node]
        return Named(rest, found.axes)

    def _dropped(self, found: Named) -> Named | None:
        """What a value was before a factor, or before some of its elements became 0."""
        node = found.value.node
        assert node is not None
        if (zeroed := _zeroed(found)) is not None:
            rest, kept = zeroed
            self.kept.append(kept)
            self.nodes.append(node)
            return Named(rest, found.axes)
        if node.name == "div" and (divisor := node.inputs[1].number):
            self._multiply(1 / divisor, node)
            self.nodes.append(node)
            return Named(node.inputs[0], found.axes)
        if node.name != "mul":
            return None
        for place in (0, 1):
            factor, rest = node.inputs[place], node.inputs[1 - place]
            if (known := factor.number) is not None:
                self._multiply(known, node)
            elif (mask := self._kept_factor(Named(factor, found.axes))) is not None:
                self.kept.append(_Kept(mask, True, factor))
            else:
                continue
            self.nodes.append(node)
            return Named(rest, found.axes)
        return None

    def _kept_factor(self, found: Named) -> Named | None:
        """The bool mask that an array of a number and of zeros is made of; notes the number."""
        factors: list[tuple[float, Node]] = []
        value, axes = found.value, found.axes
        while value.dtype != bool:
            node = value.node
            if node is None:
                return None
            if node.name in SAME:
                value = node.inputs[0]
            elif node.name == "broadcast_in_dim":
                axes = tuple(axes[i] for i in node.params["broadcast_dimensions"])
                value = node.inputs[0]
            elif node.name == "div" and (known := node.inputs[1].number):
                factors.append((1 / known, node))
                value = node.inputs[0]
            elif node.name == "mul" and (known := node.inputs[1].number) is not None:
                factors.append((known, node))
                value = node.inputs[0]
            elif node.name == "select_n" and node.inputs[1].number == 0 and len(node.inputs) == 3:
                known = node.inputs[2].number
                if known is None:
                    return None
                factors.append((known, node))
                value = node.inputs[0]
            else:
                return None
        for known, node in factors:
            self._multiply(known, node)
        return Named(value, axes)

    def _multiply(self, factor: float, node: Node) -> None:
        """Notes a factor of the probabilities, in the type of what the node makes."""
        self.factor *= factor
        dtype = node.outputs[0].dtype
        if factor != 1 and jnp.issubdtype(dtype, jnp.floating):
            self.rounding += float(jnp.finfo(dtype).eps)

    def _softmax(self, found: Named) -> Named | None:
        """Of a quotient of an exponential and of its sum over "column", both with zeros where a mask has them."""
        quotient = found.value.node
        assert quotient is not None
        for place in (0, 1) if quotient.name == "mul" else (0,):
            top, bottom = quotient.inputs[place], quotient.inputs[1 - place]
            total = _sum_of(quotient, Named(bottom, found.axes), found.axes)
            if total is not None and top.shape == found.value.shape:
                self.nodes.append(quotient)
                return self._normalised(Named(top, found.axes), *total)
        return None

    def _normalised(self, top: Named, total: Reduced, sink: Named | None) -> Named | None:
        exponential, kept = self._exponential(top)
        summed, kept_in_sum = self._exponential(Named(total.operand, top.axes))
        if exponential is None and top.value is total.operand:
            self._refuse_second_sum(top)
        if exponential is None or summed is not exponential:
            return None
        if kept is not None:
            self.kept.append(kept)
        if kept_in_sum is not None:
            self.kept_in_sum.append(kept_in_sum)
            same = [x for x in self.kept if x.is_same(kept_in_sum.mask, kept_in_sum.if_true)]
            if same:  # as -inf on the scores would do
                self.masks.append((compact_of(same[0].mask), same[0].if_true))
                self.kept = [x for x in self.kept if x not in same]
        self.nodes += [exponential, total.node, *total.nodes]
        if sink is not None:
            return self._before_shift(Named(exponential.inputs[0], top.axes), sink)
        return self._before_maximum(Named(exponential.inputs[0], top.axes))

    def _refuse_second_sum(self, top: Named) -> None:
        """Raises Miss if what is divided by its sum is probabilities already."""
        try:
            found = Weights(self.fuses_finite_fill).probabilities(top)
        except Miss:
            return
        if found is not None:
            raise Miss("probabilities are divided by their sum once more")

    def _before_shift(self, shifted: Named, sink: Named) -> Named | None:
        """Scores, where the sum has a term of a sink, both before what belongs to a row was taken off them.

        Args:
          shifted: what exponentials are taken of.
          sink: the term of each row: of the same exponentials, or the number that they make of a logit of 0.
        """
        self._check_gradients()
        term, moves = moved_back(sink)
        self.nodes += moves
        if (number := term.value.number) is not None:
            if not 0 < number < math.inf:
                raise Miss(f"{number:g} is added to the sum of weights")
            difference = before_casts(shifted.value).made_by("sub")
            if difference is not None and self.takes_maximum(difference, shifted.axes):
                raise Miss("a number is added to the sum of weights less a maximum")
            self.sinks = math.log(number)
            return shifted
        exponential = term.value.made_by("exp")
        if exponential is None:
            raise Miss("an array is added to the sum of weights that is no exponential")
        self.nodes.append(exponential)
        logit = exponential.inputs[0]
        lowered = logit.made_by("sub", "neg")
        difference = before_casts(shifted.value).made_by("sub")
        if lowered is None or difference is None:
            self.sinks = compact_of(Named(logit, term.axes))
            return shifted
        scores, shift = difference.inputs
        if not is_same_row(Named(lowered.inputs[-1], term.axes), Named(shift, shifted.axes)):
            raise Miss("what is taken off scores and sinks differs")
        self.take(shifted.value, difference)
        self.nodes += [difference, lowered, *_path(shift, before_casts(scores))]
        is_zero = lowered.name == "neg"
        self.sinks = 0.0 if is_zero else compact_of(Named(lowered.inputs[0], term.axes))
        return Named(scores, shifted.axes)

    def _of_logarithms(self, found: Named) -> Named | None:
        """Of the exponential of scores less the logarithm of the sum of their exponentials."""
        outer = found.value.made_by("exp")
        assert outer is not None
        difference = before_casts(outer.inputs[0]).made_by("sub")
        if difference is None or difference.inputs[0].shape != found.value.shape:
            return None
        scores, subtracted = difference.inputs
        log = log_of_sum(Named(subtracted, found.axes), found.axes)
        if log is None:
            return None
        exponential, kept = self._exponential(Named(log.total.operand, found.axes))
        if exponential is None:
            return None
        inner = exponential.inputs[0]
        shifted = None
        if log.shift is not None:
            shifted = before_casts(inner).made_by("sub")
            if shifted is None or not is_same_row(Named(shifted.inputs[1], found.axes), log.shift):
                return None
            self.take(inner, shifted)
            inner = shifted.inputs[0]
        if before_casts(inner) is not before_casts(scores):
            return None
        for value in (inner, scores):
            self.take_casts(value, before_casts(value))
        self.take(outer.inputs[0], difference)
        self.nodes += [outer, difference, exponential, log.total.node, *log.nodes]
        if kept is not None:
            self.kept_in_sum.append(kept)
        if shifted is None:
            return self._before_maximum(Named(scores, found.axes))
        self._check_gradients()
        if not self.takes_maximum(shifted, found.axes):
            raise Miss("logsumexp of other scores")
        self.nodes.append(shifted)
        return Named(scores, found.axes)

    def _before_maximum(self, shifted: Named) -> Named:
        """Scores, before their maximum was taken off where it was."""
        self._check_gradients()
        difference = before_casts(shifted.value).made_by("sub")
        if difference is None or not self.takes_maximum(difference, shifted.axes):
            return shifted
        self.take(shifted.value, difference)
        self.nodes.append(difference)
        return Named(difference.inputs[0], shifted.axes)

    def _check_gradients(self) -> None:
        # On the maximum, which follows, it changes no gradient: a softmax is the same for any shift.
        if any(node.name == "stop_gradient" for node in self.nodes):
            raise Miss("stop_gradient on probabilities, their exponentials or the sum of those")

    def _exponential(self, found: Named) -> tuple[Node | None, _Kept | None]:
        """The exponential that a value is, if it is one, and the mask that wrote zeros into it, if one did."""
        value, kept = found.value, None
        inner = before_stops(value)
        if (zeroed := _zeroed(Named(inner, found.axes))) is not None:
            assert inner.node is not None
            self.take(value, inner.node)
            self.nodes.append(inner.node)
            value, kept = zeroed
        exponential = before_stops(value).made_by("exp")
        if exponential is not None:
            self.take(value, exponential)
        return exponential, kept

    # ---- Dropout

    def dropout(self, row: str, extents: dict[str, int]) -> FoundDropout | None:
        if not all(self._hides_the_same(kept) for kept in self.kept_in_sum):
            raise Miss("a mask that scores do not have leaves exponentials out of their sum")
        dropping = [kept for kept in self.kept if not self._hides_the_same(kept)]
        if not dropping:
            if abs(self.factor - 1) > 1e-6:
                raise Miss("probabilities are multiplied by a number")
            return None
        if len(dropping) > 1:
            raise Miss("there are two masks on the probabilities, beside those on the scores")
        if not dropping[0].if_true:
            raise Miss("the mask on the probabilities is true where they become 0")
        found = dropout_of(dropping[0].mask, self.factor, self.rounding, row, extents)
        drawn = {found.bits, *between(found.bits, dropping[0].made)}
        if is_used_elsewhere(drawn, {*drawn, *self.nodes}):
            raise Miss("the random numbers of dropout are used elsewhere too")
        return found

    def _hides_the_same(self, kept: _Kept) -> bool:
        """Whether a mask on probabilities is one of those on the scores, which leave it nothing to do."""
        return any(kept.is_same(mask, if_true) for mask, if_true in self.masks)


def _sum_of(quotient: Node, divisor: Named, axes: Axes) -> tuple[Reduced, Named | None] | None:
    """The sum over "column" that a node divides by, or multiplies with the inverse of, and what is added to it."""
    total = reduction(divisor, "reduce_sum", axes)
    if total is not None:
        return (total, None) if total.is_inverse == (quotient.name == "mul") else None
    if quotient.name != "div":
        return None
    found, nodes = moved_back(divisor)
    sum_of_both = found.value.made_by("add")
    for place in (0, 1) if sum_of_both is not None else ():
        assert sum_of_both is not None
        total = reduction(Named(sum_of_both.inputs[place], found.axes), "reduce_sum", axes)
        if total is not None and not total.is_inverse:
            whole = dataclasses.replace(total, nodes=[*nodes, sum_of_both, *total.nodes])
            return whole, Named(sum_of_both.inputs[1 - place], found.axes)
    return None


_OF_MAXIMUM = ("reduce_max", "max", "stop_gradient", "is_finite", "select_n", *SAME, *ONES)


# What may come between probabilities and the product with the values in programs that are left as they are.
_ELEMENTWISE = (
    *("add", "sub", "mul", "div", "max", "min", "pow", "integer_pow", "square", "sqrt", "neg"),
    *("abs", "exp", "log", "tanh", "logistic", "clamp", "select_n", "stop_gradient", *SAME),
)


def _sources(node: Node, axes: Axes) -> list[Named]:
    """The arrays that a node changes element by element, cuts, moves or multiplies, with the axes that they keep."""
    first = node.inputs[0] if node.inputs else None
    if node.name == "dot_general":
        return _factors(node, axes)
    if node.name in _ELEMENTWISE:
        shape = node.outputs[0].shape
        return [Named(x, axes) for x in node.inputs if x.shape == shape and x.dtype != bool]
    if first is None:
        return []
    if node.name in ("slice", "dynamic_slice"):
        return [Named(first, axes)]
    if node.name == "transpose":
        return [Named(first, axes_before_transpose(node, axes))]
    if node.name == "broadcast_in_dim":
        return [Named(first, tuple(axes[i] for i in node.params["broadcast_dimensions"]))]
    names = None
    if node.name in ("reshape", "squeeze"):
        names = reshaped_axes(axes, node.outputs[0].shape, first.shape)
    return [] if names is None else [Named(first, names)]


def _factors(product: Node, axes: Axes) -> list[Named]:
    """The operands of a product, with the axes that the result has of them; "" are those that are summed over."""
    contracted, batch = product.params["dimension_numbers"]
    rest = iter(axes[len(batch[0]) :])
    factors: list[Named] = []
    for operand, summed, shared in zip(product.inputs, contracted, batch, strict=True):
        names = dict(zip(shared, axes, strict=False)) | dict.fromkeys(summed, "")
        own = tuple(names[i] if i in names else next(rest) for i in range(len(operand.shape)))
        factors.append(Named(operand, own))
    return factors


def _path(value: Value, source: Value) -> list[Node]:
    """The operations of a maximum over scores, or of one over these and sinks."""
    nodes: list[Node] = []
    rest = [value]
    while rest:
        node = rest.pop().node
        is_of_maximum = node is not None and node.name in _OF_MAXIMUM
        if node is None or not is_of_maximum or node in nodes or node.outputs[0] is source:
            continue
        nodes.append(node)
        rest += [x for x in node.inputs if x.number is None]
    return nodes


def _zeroed(found: Named) -> tuple[Value, _Kept] | None:
    """What a value was before a mask wrote zeros into it, and that mask."""
    node = found.value.made_by("select_n")
    if node is None or len(node.inputs) != 3 or node.inputs[0].dtype != bool:
        return None
    choice, if_false, if_true = node.inputs
    if 0 not in (if_false.number, if_true.number):
        return None
    keeps_if_true = if_false.number == 0
    kept = _Kept(Named(choice, found.axes if choice.shape else ()), keeps_if_true, choice)
    return (if_true if keeps_if_true else if_false), kept


def _without_not(found: Named) -> tuple[Named, bool]:
    """The smallest array that a mask is made of, and whether it says the same, not the contrary."""
    sense, found = True, compact_of(found)
    while (node := found.value.made_by("not")) is not None:
        sense, found = not sense, compact_of(Named(node.inputs[0], found.axes))
    return found, sense


def is_used_elsewhere(nodes: set[Node], known: set[Node]) -> bool:
    """Whether the program returns what nodes make, or others than the known nodes read it."""
    made = [value for node in nodes for value in node.outputs]
    return any(value.is_result or not known.issuperset(value.users) for value in made)
