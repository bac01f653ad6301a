"""Recognises attention in a program, from its last product backwards: values by probabilities by scores.

Layouts are roles, not positions: the product of values says which axes of the probabilities are batch, which are
queries and which is summed over; every step backwards carries these names along, through transpositions, to the
product of query and key. So ``(B, N, T, D)``, ``(B, T, N, D)``, ``(T, D)`` and groups of heads ``(B, T, K, G, D)``
are one pattern.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn.arguments import scale_of, softcap_of
from jattn.fusion.axes import (
    CASTS,
    ONE,
    ONES,
    Miss,
    Named,
    axes_after,
    axes_before,
    axes_of_products,
    before_casts,
    compact_of,
    extents_of,
    long_parts,
    query_and_key,
    result_axes,
    roles,
)
from jattn.fusion.bands import FoundBand, band_of, band_of_array, conditions, options_of
from jattn.fusion.dropout import FoundDropout, dropout_of
from jattn.fusion.graph import (
    Axes,
    Node,
    Value,
    axes_before_transpose,
    known_array,
    through,
)
from jattn.fusion.repeats import before_repeats
from jattn.fusion.rows import Reduced, is_same_row, log_of_sum, moved_back, reduction
from jattn.spec import FLOAT_DTYPES

_FILL = -1e9  # a mask writes this or less: no score is near
_FILL_OF_FLOAT16 = 0.9 * float(jnp.finfo(jnp.float16).min)


@dataclasses.dataclass(frozen=True)
class Match:
    """Attention that was found.

    Attributes:
      node: what is replaced: the product with the values, or its division by the sum of weights.
      q, k, v: with the axes ``batch``, ``row`` or "column", and "depth" or "width".
      batch: names of the leading axes, in the order of q.
      head, group: names of the axes of key/value heads and of query heads that share one; None without. Where there is
        no group the axis of heads may be longer in q than in k and v, by a whole factor.
      row: name of the axis of queries; keys are "column".
      result: axes of the result.
      further: queries and keys whose products are added to those of q and k.
      scale: multiplier of q.k.
      softcap: scores are softcap * tanh(scores / softcap) before masks and biases; None without.
      masks: bool, and whether true means visible.
      biases: added, times a number.
      sinks: logits that take part in the sum of weights alone, of heads; or one for all.
      band: what masks were that are not among ``masks``.
      dropout: of the probabilities.
    """

    node: Node
    q: Named
    k: Named
    v: Named
    batch: Axes
    head: str | None
    group: str | None
    row: str
    result: Axes
    further: tuple[tuple[Named, Named], ...]
    scale: float
    softcap: float | None
    masks: tuple[tuple[Named, bool], ...]
    biases: tuple[tuple[Named, float], ...]
    sinks: Named | float | None
    band: FoundBand
    dropout: FoundDropout | None

    @property
    def pattern(self) -> str:
        """What acts on the scores, in words."""
        words = [
            "causal" if self.band.right is not None and self.band.left is None else "",
            "window" if self.band.left is not None else "",
            "softcap" if self.softcap is not None else "",
            "mask" if self.masks else "",
            "bias" if self.biases else "",
            "sinks" if self.sinks is not None else "",
            "dropout" if self.dropout is not None else "",
        ]
        return "+".join(word for word in words if word) or "plain"

    def band_options(self) -> dict[str, object]:
        """The keyword arguments of ``dot_product_attention`` that say the band."""
        rows = self.q.value.shape[self.q.axes.index(self.row)]
        columns = self.k.value.shape[self.k.axes.index("column")]
        options = options_of(self.band, rows, columns)
        assert options is not None
        return options

    def inputs(self) -> list[Value]:
        """What the replacement reads."""
        named = [self.q, self.k, self.v, *itertools.chain(*self.further)]
        named += [x for x, _ in (*self.biases, *self.masks)]
        named += [self.sinks] if isinstance(self.sinks, Named) else []
        return [x.value for x in named] + ([] if self.dropout is None else [self.dropout.key])


def find(node: Node, *, fuses_finite_fill: bool = True) -> Match | None:
    """The attention whose last operation a node is, or None.

    That is the product with the values, or what divides it by the sum of the weights.

    Raises:
      Miss: it looks like attention, but is not, or not such as can be replaced.
    """
    for product, moves, divisor in _last_products(node):
        for place in (0, 1):
            axes = axes_of_products(product, place)
            result = None if axes is None else _moved(result_axes(product, place), moves)
            if axes is None or result is None:
                continue
            search = _Search(fuses_finite_fill)
            weights = Named(product.inputs[place], axes[0])
            if divisor is None:
                scores = search.probabilities(weights)
            else:
                scores = search.normalised_later(weights, Named(divisor, result), node)
                search.nodes += [product, *moves]
            if scores is not None:
                return search.finish(node, product, place, result, scores)
    return None


def _last_products(node: Node) -> Iterator[tuple[Node, list[Node], Value | None]]:
    """Products that a node may turn into attention: itself, or one that it divides by, or multiplies with, an array.

    With them come the operations between, from the product on, and that array.
    """
    if node.name == "dot_general":
        yield node, [], None
    for place in {"div": (0,), "mul": (0, 1)}.get(node.name, ()):
        value = node.inputs[place]
        moves: list[Node] = []
        if value.shape != node.outputs[0].shape:
            continue
        while (move := value.made_by("transpose", *CASTS, *ONES)) is not None:
            if str(move.inputs[0].dtype) not in FLOAT_DTYPES:
                break
            moves.insert(0, move)
            value = move.inputs[0]
        product = value.made_by("dot_general")
        if product is not None:
            yield product, moves, node.inputs[1 - place]


def _moved(axes: Axes, moves: Sequence[Node]) -> Axes | None:
    """The axes of what operations make of an array; None if they do more than move them."""
    names: Axes | None = axes
    for move in moves:
        names = None if names is None else axes_after(move, names)
    return names


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
        return is_same_sense and own.axes == other.axes and _is_same(own.value, other.value)


@dataclasses.dataclass
class _Search:
    """Follows a product with values backwards, and notes what belongs to the pattern and what acts on it."""

    fuses_finite_fill: bool
    nodes: list[Node] = dataclasses.field(default_factory=list)
    masks: list[tuple[Named, bool]] = dataclasses.field(default_factory=list)
    biases: list[tuple[Named, float]] = dataclasses.field(default_factory=list)
    sinks: Named | float | None = None
    first_key: int | None = (
        None  # of columns of which one is no key but the sink; 1 where that comes first
    )
    scale: float = 1.0  # of the product, or of what tanh is taken of
    further: list[Named] = dataclasses.field(
        default_factory=list
    )  # products that are added to the scores
    softcap: float | None = None  # with the sign of what tanh is multiplied by
    kept: list[_Kept] = dataclasses.field(default_factory=list)  # of the probabilities
    kept_in_sum: list[_Kept] = dataclasses.field(default_factory=list)
    factor: float = 1.0  # of the probabilities
    rounding: float = 0.0  # how far it may be off, as a part of itself
    ones: int = 0  # names given to axes of size 1

    # ---- Probabilities

    def probabilities(self, found: Named) -> Named | None:
        """Scores whose softmax, with dropout or not, a value is; None if it is none."""
        while (node := found.value.node) is not None:
            inner = self._rearranged(found) or self._dropped(found) or self._with_sink(found)
            if inner is not None:
                found = inner
            elif node.name == "stop_gradient":
                self.nodes.append(node)
                found = Named(node.inputs[0], found.axes)
            elif node.name in ("div", "mul"):
                return self._softmax(found)
            elif node.name == "exp":
                return self._of_logarithms(found)
            else:
                return None
        return None

    def normalised_later(self, weights: Named, divisor: Named, quotient: Node) -> Named | None:
        """Scores whose exponentials are the weights in a product that is divided by their sum."""
        while weights.value.node is not None:
            inner = self._rearranged(weights) or self._dropped(weights)
            if inner is None:
                break
            weights = inner
        total = _sum_of(quotient, divisor, weights.axes)
        return None if total is None else self._normalised(weights, *total)

    def _rearranged(self, found: Named) -> Named | None:
        node = found.value.made_by("transpose", *CASTS, *ONES)
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

    def _name_of_one(self) -> str:
        self.ones += 1
        return f"{ONE}{self.ones}"

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
            if node.name in CASTS:
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
        self._take(shifted.value, difference)
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
            self._take(inner, shifted)
            inner = shifted.inputs[0]
        if before_casts(inner) is not before_casts(scores):
            return None
        for value in (inner, scores):
            self._take_casts(value, before_casts(value))
        self._take(outer.inputs[0], difference)
        self.nodes += [outer, difference, exponential, log.total.node, *log.nodes]
        if kept is not None:
            self.kept_in_sum.append(kept)
        if shifted is None:
            return self._before_maximum(Named(scores, found.axes))
        self._check_gradients()
        if not self._takes_maximum(shifted, found.axes):
            raise Miss("logsumexp of other scores")
        self.nodes.append(shifted)
        return Named(scores, found.axes)

    def _before_maximum(self, shifted: Named) -> Named:
        """Scores, before their maximum was taken off where it was."""
        self._check_gradients()
        difference = before_casts(shifted.value).made_by("sub")
        if difference is None or not self._takes_maximum(difference, shifted.axes):
            return shifted
        self._take(shifted.value, difference)
        self.nodes.append(difference)
        return Named(difference.inputs[0], shifted.axes)

    def _check_gradients(self) -> None:
        # On the maximum, which follows, it changes no gradient: a softmax is the same for any shift.
        if any(node.name == "stop_gradient" for node in self.nodes):
            raise Miss("stop_gradient on probabilities, their exponentials or the sum of those")

    def _exponential(self, found: Named) -> tuple[Node | None, _Kept | None]:
        """The exponential that a value is, if it is one, and the mask that wrote zeros into it, if one did."""
        value, kept = found.value, None
        inner = _before_stops(value)
        if (zeroed := _zeroed(Named(inner, found.axes))) is not None:
            assert inner.node is not None
            self._take(value, inner.node)
            self.nodes.append(inner.node)
            value, kept = zeroed
        exponential = _before_stops(value).made_by("exp")
        if exponential is not None:
            self._take(value, exponential)
        return exponential, kept

    def _takes_maximum(self, shifted: Node, axes: Axes) -> bool:
        """Whether it takes off the maximum over "column", or that and -inf, of what it takes it off."""
        largest = reduction(Named(shifted.inputs[1], axes), "reduce_max", axes)
        if (
            largest is None
            or largest.is_inverse
            or shifted.inputs[0].shape != shifted.outputs[0].shape
        ):
            return False
        own = before_casts(shifted.inputs[0])
        compared = largest.operand
        origin = next(
            (x for x in (before_casts(compared), _before_stops(compared)) if x is own), None
        )
        if origin is None:  # `jax.nn.softmax(where=)` masks the scores twice
            origin = _before_stops(compared)
            if own.made_by("select_n") is None or not _is_same(own, origin):
                return False
            assert origin.node is not None
            self.nodes.append(origin.node)
        if compared is not shifted.inputs[0]:
            self._take_casts(compared, origin)
        self.nodes += [largest.node, *largest.nodes]
        return True

    def _take(self, value: Value, until: Node) -> None:
        self.nodes += _between(until, value)

    def _take_casts(self, value: Value, origin: Value) -> None:
        while value is not origin and value.node is not None:
            self.nodes.append(value.node)
            value = value.node.inputs[0]

    # ---- Scores

    def scores(self, found: Named) -> Named:
        """The product of query and key that scores are made of; notes masks, biases and the scale."""
        scaled = False
        while (node := found.value.node) is not None:
            if node.name == "dot_general":
                return found
            if (inner := self._rearranged(found)) is not None:
                found = inner
                continue
            if node.name == "select_n" and len(node.inputs) == 3 and node.inputs[0].dtype == bool:
                found = self._masked(node, found.axes, scaled)
            elif node.name == "concatenate" and self.first_key is not None:
                found = self._behind_sink(node, found.axes, scaled)
            elif node.name == "sub" and self._takes_maximum_again(node, found.axes):
                found = Named(node.inputs[0], found.axes)
            elif node.name in ("add", "sub"):
                found = self._biased(node, found.axes)
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
        dtype = node.outputs[0].dtype
        # -1e9 as the type has it: in bfloat16 it is -998244352.
        lowest = _FILL_OF_FLOAT16 if dtype == jnp.float16 else float(np.asarray(_FILL, dtype))
        if not fill <= lowest:  # NaN is not
            raise Miss(f"a mask that writes {fill:g}, which scores may reach")
        if fill != -math.inf and not self.fuses_finite_fill:
            raise Miss(f"a mask that writes {fill:g}, not -inf")
        if self.softcap is not None:
            raise Miss("a mask in front of tanh")
        if scaled and not (fill == -math.inf and self.scale > 0):
            raise Miss("a mask in front of the scale")
        self.masks.append(
            (compact_of(Named(choice, axes if choice.shape else ())), visible_if_true)
        )
        return Named(if_true if visible_if_true else if_false, axes)

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
        return self.softcap is None and self.sinks is None and self._takes_maximum(node, axes)

    def _biased(self, node: Node, axes: Axes) -> Named:
        # A bias may be tanh of a product, so scores are looked for without one first.
        places: list[int] = []
        for operations in (_OF_SCORES, (*_OF_SCORES, "tanh")):
            if len(places) != 1:
                places = [i for i in (0, 1) if _leads_to_product(node.inputs[i], operations)]
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
                        _further(other, q, k)
                        self.further.append(other)
                        return main
                except Miss:
                    continue
        raise Miss("a sum of two products, of which none is of query and key")

    def _product(self, value: Value, axes: Axes) -> Named | None:
        """The product that a value is, in another shape or type maybe."""
        found, nodes = Named(value, axes), len(self.nodes)
        while found.value.made_by("dot_general") is None:
            inner = self._rearranged(found)
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
        if self.softcap is not None:
            raise Miss("a bias in front of tanh")
        bias = node.inputs[1 - place]
        if bias.number is not None:
            raise Miss("a number is added to the scores")
        compact = compact_of(Named(bias, axes if bias.shape else ()))
        *_, source = through(compact.value, *CASTS, "broadcast_in_dim", "reshape")
        if not {str(compact.value.dtype), str(source.dtype)} <= set(FLOAT_DTYPES):
            raise Miss(f"a bias of {source.dtype}")
        is_taken_off = node.name == "sub" and place == 0
        self.biases.append((compact, -self.scale if is_taken_off else self.scale))
        if node.name == "sub" and place == 1:
            self.scale = -self.scale
        return Named(node.inputs[place], axes)

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

    # ---- All together

    def finish(
        self, node: Node, last: Node, place: int, result: Axes, probabilities: Named
    ) -> Match:
        """What was found, checked: a node that ends it, its product with the values, and where the weights are."""
        product_of = self.scores(probabilities)
        product = product_of.value.node
        assert product is not None
        q, k = query_and_key(product, product_of.axes)
        further = tuple(_further(found, q, k) for found in self.further)
        axes = axes_of_products(last, place)
        assert axes is not None
        p, v = Named(last.inputs[place], axes[0]), Named(last.inputs[1 - place], axes[1])
        inside = {*self.nodes, product, *(x.value.node for x in self.further if x.value.node)}
        if _is_used_elsewhere(inside, {*inside, node}):
            raise Miss("scores or probabilities are used elsewhere too: returned, or by a gradient")
        known = extents_of(k) | extents_of(q)
        for name, n in extents_of(p).items():
            if known.get(name, 1) != n:
                raise Miss("there are more scores than products of query and key")
        if self.first_key is not None and self.sinks is None:
            raise Miss("a column of the probabilities is cut off that is no sink")
        if isinstance(self.sinks, Named) and {"column", roles(q)[3]} & set(long_parts(self.sinks)):
            raise Miss("sinks of single queries")
        if not further:
            q, k = (self._in_type_of(v.value.dtype, x) for x in (q, k))
        dtypes = {str(x.value.dtype) for x in (q, k, v, *itertools.chain(*further))}
        if len(dtypes) != 1 or not dtypes <= set(FLOAT_DTYPES):
            raise Miss(f"query, key and value of {', '.join(sorted(dtypes))}")
        scale = self.scale if self.softcap is None else self.scale * self.softcap
        softcap = None if self.softcap is None else abs(self.softcap)
        depth, width = q.value.shape[q.axes.index("depth")], v.value.shape[v.axes.index("width")]
        if 0 in (depth, width):
            raise Miss("a head dim of 0")
        try:
            softcap_of(softcap, scale_of(scale, depth, q.value.dtype), q.value.dtype)
        except ValueError as error:
            raise Miss(str(error)) from error
        batch, head, group, row = roles(q)
        shared = tuple(name for name in q.axes if name.startswith("batch"))
        if group is None and not further and (repeated := before_repeats(k, v, shared)) is not None:
            head, k, v = repeated
            batch = tuple(name for name in shared if name != head)
        rows, columns = (x.value.shape[x.axes.index(name)] for x, name in ((q, row), (k, "column")))
        band, masks = _split_bands(self.masks, row, rows, columns)
        return Match(
            node=node,
            q=q,
            k=k,
            v=v,
            batch=batch,
            head=head,
            group=group,
            row=row,
            result=result,
            further=further,
            scale=scale,
            softcap=softcap,
            masks=masks,
            biases=tuple(self.biases),
            sinks=self.sinks,
            band=band,
            dropout=self._dropout(row, extents_of(p)),
        )

    def _in_type_of(self, dtype: Any, found: Named) -> Named:
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

    def _hides_the_same(self, kept: _Kept) -> bool:
        """Whether a mask on probabilities is one of those on the scores, which leave it nothing to do."""
        return any(kept.is_same(mask, if_true) for mask, if_true in self.masks)

    def _dropout(self, row: str, extents: dict[str, int]) -> FoundDropout | None:
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
        drawn = {found.bits, *_between(found.bits, dropping[0].made)}
        if _is_used_elsewhere(drawn, {*drawn, *self.nodes}):
            raise Miss("the random numbers of dropout are used elsewhere too")
        return found


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


_OF_MAXIMUM = ("reduce_max", "max", "stop_gradient", "is_finite", "select_n", *CASTS, *ONES)


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


def _further(found: Named, q: Named, k: Named) -> tuple[Named, Named]:
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


def _between(start: Node, value: Value) -> list[Node]:
    """The operations on one array, and on numbers, that make a value of what a node makes."""
    nodes: list[Node] = []
    while value.node is not None and value.node is not start:
        nodes.append(value.node)
        (value,) = [x for x in value.node.inputs if x.number is None]
    return nodes


def _is_used_elsewhere(nodes: set[Node], known: set[Node]) -> bool:
    """Whether the program returns what nodes make, or others than the known nodes read it."""
    made = [value for node in nodes for value in node.outputs]
    return any(value.is_result or not known.issuperset(value.users) for value in made)


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


def _is_same(one: Value, other: Value, depth: int = 8) -> bool:
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
            _is_same(x, y, depth - 1)
            for x, y in zip(one.node.inputs, other.node.inputs, strict=True)
        )
    )


def _before_stops(value: Value) -> Value:
    """What a value was in another float type, and before its gradient was stopped."""
    while (node := (value := before_casts(value)).made_by("stop_gradient")) is not None:
        value = node.inputs[0]
    return value


_OF_SCORES = ("transpose", "neg", "select_n", "add", "sub", "mul", "div", *CASTS, *ONES)


def _leads_to_product(value: Value, operations: Sequence[str], depth: int = 16) -> bool:
    """Whether a value is a product of two arrays with scores' operations on it."""
    node = value.node
    if node is None or depth == 0 or value.number is not None:
        return False
    if node.name == "dot_general":
        return True
    if node.name in operations:
        return any(_leads_to_product(x, operations, depth - 1) for x in node.inputs)
    return False


def _band(mask: Named, row: str, rows: int, columns: int) -> FoundBand | None:
    """The band that a mask is, if it is one: of comparisons, or an array that is known."""
    extents = extents_of(mask)
    if (extents.get(row), extents.get("column")) != (rows, columns):
        return None  # one row, or one column, for all
    known = known_array(mask.value)
    if known is not None:
        return band_of_array(known, mask.axes, row, "column")
    found = conditions(mask.value, mask.axes)
    return None if found is None else band_of(found, row, "column")


def _split_bands(
    masks: Sequence[tuple[Named, bool]], row: str, rows: int, columns: int
) -> tuple[FoundBand, tuple[tuple[Named, bool], ...]]:
    """Takes the masks that together are a band out of the others."""
    band, others = FoundBand(None, None), []
    for mask, visible_if_true in masks:
        own = _band(mask, row, rows, columns) if visible_if_true else None
        if own is None:
            others.append((mask, visible_if_true))
        else:
            band = band.intersect(own)
    if options_of(band, rows, columns) is None:
        return FoundBand(None, None), tuple(masks)
    return band, tuple(others)
