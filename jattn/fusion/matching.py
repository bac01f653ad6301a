"""Recognises attention in a program, from its last product backwards: values by probabilities by scores.

Layouts are roles, not positions: the product of values says which axes of the probabilities are batch, which are
queries and which is summed over; every step backwards carries these names along, through transpositions, to the
product of query and key. So ``(B, N, T, D)``, ``(B, T, N, D)``, ``(T, D)`` and groups of heads ``(B, T, K, G, D)``
are one pattern.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn.fusion.bands import Axes, Band, band_of, band_of_array, conditions, options_of
from jattn.fusion.graph import Node, Value, known_array, number, through
from jattn.spec import FLOAT_DTYPES

_CASTS = (
    "convert_element_type",
    "copy",
    "pvary",
    "pcast",
)  # of types, and of how they vary in a shard_map
_ONES = ("squeeze", "broadcast_in_dim", "reshape")  # where they add or take away axes of size 1
ONE = "one"  # begins the names of axes that only some of the arrays have
_FILL = -1e9  # a mask writes this or less: no score is near
_FILL_OF_FLOAT16 = 0.9 * float(jnp.finfo(jnp.float16).min)
# Keep probabilities are written twice, as a threshold and as a divisor, which may be rounded to 8 bits.
_ROUNDED = 2.0**-7


class Miss(Exception):  # noqa: N818 (it is an answer, not an error)
    """Why something that has a softmax between two products is not taken for attention."""


@dataclasses.dataclass(frozen=True)
class Named:
    """A value with a name for each of its axes; axes of scores that it lacks have size 1."""

    value: Value
    axes: Axes


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Attributes: rate; key: a JAX key; broadcast: one mask for all batch entries and heads."""

    rate: float
    key: Value
    broadcast: bool


@dataclasses.dataclass(frozen=True)
class Match:
    """Attention that was found.

    Attributes:
      node: the product with the values, whose result is replaced.
      q, k, v: with the axes ``batch``, ``row`` or "column", and "depth" or "width".
      batch: names of the leading axes, in the order of q.
      head, group: names of the axes of key/value heads and of query heads that share one; None without.
      row: name of the axis of queries; keys are "column".
      result: axes of the result.
      scale: multiplier of q.k.
      masks: bool, and whether true means visible; biases: added.
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
    scale: float
    masks: tuple[tuple[Named, bool], ...]
    biases: tuple[Named, ...]
    band: Band
    dropout: Dropout | None

    @property
    def pattern(self) -> str:
        """What acts on the scores, in words."""
        words = [
            "causal" if self.band.right is not None and self.band.left is None else "",
            "window" if self.band.left is not None else "",
            "mask" if self.masks else "",
            "bias" if self.biases else "",
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
        named = [self.q, self.k, self.v, *self.biases, *(mask for mask, _ in self.masks)]
        return [x.value for x in named] + ([] if self.dropout is None else [self.dropout.key])


def find(node: Node, *, fuses_finite_fill: bool = True) -> Match | None:
    """The attention whose last product a node is, or None.

    Raises:
      Miss: it looks like attention, but is not, or not such as can be replaced.
    """
    if node.name != "dot_general":
        return None
    for place in (0, 1):
        axes = _axes_of_products(node, place)
        if axes is None:
            continue
        search = _Search(fuses_finite_fill)
        scores = search.probabilities(Named(node.inputs[place], axes[0]))
        if scores is not None:
            return search.finish(node, place, axes[1], scores)
    return None


def _axes_of_products(node: Node, place: int) -> tuple[Axes, Axes] | None:
    """Names of the axes of probabilities and of values, if the operand at ``place`` may be the probabilities."""
    (contracted, batch) = node.params["dimension_numbers"]
    of_p, of_v = (contracted[place], batch[place]), (contracted[1 - place], batch[1 - place])
    p, v = node.inputs[place], node.inputs[1 - place]
    rows = len(p.shape) - len(of_p[1]) - 1
    if len(of_p[0]) != 1 or len(v.shape) - len(of_v[1]) != 2 or rows not in (1, 2):
        return None
    names = [f"batch{i}" for i in range(len(of_p[1]))]
    return (
        _named(len(p.shape), names, of_p, "column", [f"row{i}" for i in range(rows)]),
        _named(len(v.shape), names, of_v, "column", ["width"]),
    )


def _named(
    rank: int,
    batch_names: Sequence[str],
    numbers: tuple[Sequence[int], Sequence[int]],
    contracted_name: str,
    free_names: Sequence[str],
) -> Axes:
    """Names the axes of an operand of a product; free ones in order."""
    (contracted,), batch = numbers
    names = dict(zip(batch, batch_names, strict=True)) | {contracted: contracted_name}
    free = iter(free_names)
    return tuple(names[i] if i in names else next(free) for i in range(rank))


@dataclasses.dataclass
class _Search:
    """Follows a product with values backwards, and notes what belongs to the pattern and what acts on it."""

    fuses_finite_fill: bool
    nodes: list[Node] = dataclasses.field(default_factory=list)
    masks: list[tuple[Named, bool]] = dataclasses.field(default_factory=list)
    biases: list[Named] = dataclasses.field(default_factory=list)
    scale: float = 1.0
    kept: Value | None = None  # the mask of dropout
    kept_axes: Axes = ()
    masks_of_dropout: int = 0
    factor: float = 1.0  # of the probabilities
    ones: int = 0  # names given to axes of size 1

    # ---- Probabilities

    def probabilities(self, found: Named) -> Named | None:
        """Scores whose softmax, with dropout or not, a value is; None if it is none."""
        while (node := found.value.node) is not None:
            inner = self._rearranged(found) or self._dropped(found)
            if inner is not None:
                found = inner
            elif node.name == "div":
                return self._softmax(found)
            else:
                return None
        return None

    def _rearranged(self, found: Named) -> Named | None:
        node = found.value.made_by("transpose", *_CASTS, *_ONES)
        if node is None or str(node.inputs[0].dtype) not in FLOAT_DTYPES:
            return None
        axes = found.axes
        if node.name == "transpose":
            names = dict(zip(node.params["permutation"], found.axes, strict=True))
            axes = tuple(names[i] for i in range(len(found.axes)))
        elif node.name in _ONES:
            before = self._axes_before(node, found.axes)
            if before is None:
                return None
            axes = before
        self.nodes.append(node)
        return Named(node.inputs[0], axes)

    def _axes_before(self, node: Node, axes: Axes) -> Axes | None:
        """Axes of an array that differs by axes of size 1; they get names of their own. None if it is another array."""
        before, after = node.inputs[0].shape, node.outputs[0].shape
        if node.name == "broadcast_in_dim":
            places = node.params["broadcast_dimensions"]
            lost = [axes[i] for i in range(len(after)) if i not in places]
            is_same = before == tuple(after[i] for i in places) and math.prod(before) == math.prod(
                after
            )
            is_known = all(name.startswith((ONE, "batch")) for name in lost)
            return tuple(axes[i] for i in places) if is_same and is_known else None
        kept = iter(axes)
        if node.name == "reshape":
            # Which axes of size 1 are which is not known: those that are nobody's may come and go.
            if any(n == 1 and not x.startswith(ONE) for x, n in zip(axes, after, strict=True)):
                return axes if before == after else None
            if [n for n in before if n != 1] != [n for n in after if n != 1]:
                return None
            kept = iter([name for name, n in zip(axes, after, strict=True) if n != 1])
            return tuple(self._name_of_one() if n == 1 else next(kept) for n in before)
        gone = {i % len(before) for i in node.params["dimensions"]}
        return tuple(self._name_of_one() if i in gone else next(kept) for i in range(len(before)))

    def _name_of_one(self) -> str:
        self.ones += 1
        return f"{ONE}{self.ones}"

    def _dropped(self, found: Named) -> Named | None:
        """What a value was before a factor, or before some of its elements became 0."""
        node = found.value.node
        assert node is not None
        if node.name == "select_n" and len(node.inputs) == 3 and number(node.inputs[1]) == 0:
            choice = node.inputs[0]
            self._keep(choice, found.axes if choice.shape else ())
            self.nodes.append(node)
            return Named(node.inputs[2], found.axes)
        if node.name == "div" and (divisor := number(node.inputs[1])):
            self.factor /= divisor
            self.nodes.append(node)
            return Named(node.inputs[0], found.axes)
        if node.name != "mul":
            return None
        for place in (0, 1):
            factor, rest = node.inputs[place], node.inputs[1 - place]
            if (known := number(factor)) is not None:
                self.factor *= known
            elif (kept := self._kept_factor(Named(factor, found.axes))) is not None:
                self._keep(*kept)
            else:
                continue
            self.nodes.append(node)
            return Named(rest, found.axes)
        return None

    def _kept_factor(self, found: Named) -> tuple[Value, Axes] | None:
        """The bool mask that an array of a number and of zeros is made of; notes the number."""
        factor, (value, axes) = 1.0, (found.value, found.axes)
        while (node := value.node) is not None:
            if value.dtype == bool:
                self.factor *= factor
                return value, axes
            if node.name in _CASTS:
                value = node.inputs[0]
            elif node.name == "broadcast_in_dim":
                axes = tuple(axes[i] for i in node.params["broadcast_dimensions"])
                value = node.inputs[0]
            elif node.name == "div" and (known := number(node.inputs[1])):
                factor, value = factor / known, node.inputs[0]
            elif node.name == "mul" and (known := number(node.inputs[1])) is not None:
                factor, value = factor * known, node.inputs[0]
            elif node.name == "select_n" and number(node.inputs[1]) == 0 and len(node.inputs) == 3:
                known = number(node.inputs[2])
                if known is None:
                    return None
                factor, value = factor * known, node.inputs[0]
            else:
                return None
        return None

    def _keep(self, kept: Value, axes: Axes) -> None:
        self.masks_of_dropout += 1
        self.kept, self.kept_axes = kept, axes

    def _softmax(self, found: Named) -> Named | None:
        """Of a quotient of an exponential and of its sum over "column"."""
        quotient = found.value.made_by("div")
        assert quotient is not None
        top, bottom = quotient.inputs
        exponential = _before_casts(top).made_by("exp")
        total = _reduction(bottom, found.axes, "reduce_sum")
        if exponential is None or total is None:
            return None
        if _before_casts(total.inputs[0]).node is not exponential or top.shape != found.value.shape:
            return None
        self._take(top, exponential)
        self._take(bottom, total)
        self._take(total.inputs[0], exponential)
        self.nodes += [quotient, exponential, total]
        scores = exponential.inputs[0]
        shifted = _before_casts(scores).made_by("sub")
        if shifted is not None and self._takes_maximum(shifted, found.axes):
            self._take(scores, shifted)
            self.nodes.append(shifted)
            scores = shifted.inputs[0]
        return Named(scores, found.axes)

    def _takes_maximum(self, shifted: Node, axes: Axes) -> bool:
        """Whether it takes off the maximum over "column", or that and -inf, of what it takes it off."""
        largest = _reduction(shifted.inputs[1], axes, "reduce_max")
        if largest is None or shifted.inputs[0].shape != shifted.outputs[0].shape:
            return False
        own = _before_casts(shifted.inputs[0])
        if _before_casts(largest.inputs[0]) is not own:
            return False
        self._take(shifted.inputs[1], largest)
        if largest.inputs[0] is not shifted.inputs[0]:
            self._take_casts(largest.inputs[0], own)
        self.nodes.append(largest)
        return True

    def _take(self, value: Value, until: Node) -> None:
        """Notes the nodes between a value and another node."""
        while value.node is not None and value.node is not until:
            self.nodes.append(value.node)
            (value,) = [x for x in value.node.inputs if number(x) is None]

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
            elif node.name == "add":
                found = self._biased(node, found.axes, scaled)
            elif node.name in ("mul", "div", "neg"):
                found, scaled = self._scaled(node, found.axes), True
            else:
                raise Miss(f"{node.name} between the product of query and key and the softmax")
            self.nodes.append(node)
        raise Miss("the scores are no product of query and key")

    def _masked(self, node: Node, axes: Axes, scaled: bool) -> Named:
        choice, if_false, if_true = node.inputs
        fills = number(if_false), number(if_true)
        visible_if_true = fills[0] is not None
        fill = fills[0] if visible_if_true else fills[1]
        if fill is None:
            raise Miss("a mask that chooses between two arrays")
        lowest = _FILL_OF_FLOAT16 if node.outputs[0].dtype == jnp.float16 else _FILL
        if not fill <= lowest:  # NaN is not
            raise Miss(f"a mask that writes {fill:g}, which scores may reach")
        if fill != -math.inf and not self.fuses_finite_fill:
            raise Miss(f"a mask that writes {fill:g}, not -inf")
        if scaled and not (fill == -math.inf and self.scale > 0):
            raise Miss("a mask in front of the scale")
        self.masks.append((_compact(Named(choice, axes if choice.shape else ())), visible_if_true))
        return Named(if_true if visible_if_true else if_false, axes)

    def _biased(self, node: Node, axes: Axes, scaled: bool) -> Named:
        places = [i for i in (0, 1) if _leads_to_product(node.inputs[i])]
        if len(places) != 1:
            raise Miss("a sum of which both parts are products, or none")
        bias = node.inputs[1 - places[0]]
        if number(bias) is not None:
            raise Miss("a number is added to the scores")
        if scaled:
            raise Miss("a bias in front of the scale")
        compact = _compact(Named(bias, axes))
        *_, source = through(compact.value, *_CASTS, "broadcast_in_dim", "reshape")
        if str(compact.value.dtype) not in FLOAT_DTYPES or str(source.dtype) not in FLOAT_DTYPES:
            raise Miss(f"a bias of {source.dtype}")
        self.biases.append(compact)
        return Named(node.inputs[places[0]], axes)

    def _scaled(self, node: Node, axes: Axes) -> Named:
        if node.name == "neg":
            self.scale = -self.scale
            return Named(node.inputs[0], axes)
        places = (1,) if node.name == "div" else (1, 0)
        for place in places:
            known = number(node.inputs[place])
            if known is not None and math.isfinite(known) and known != 0:
                self.scale *= known if node.name == "mul" else 1 / known
                return Named(node.inputs[1 - place], axes)
        raise Miss("a scale that is an array")

    # ---- All together

    def finish(self, node: Node, place: int, v_axes: Axes, probabilities: Named) -> Match:
        """What was found, checked."""
        product_of = self.scores(probabilities)
        product = product_of.value.node
        assert product is not None
        q, k = _query_and_key(product, product_of.axes)
        v = Named(node.inputs[1 - place], v_axes)
        self._check_users({*self.nodes, product}, node)
        known = extents_of(k) | extents_of(q)
        p_axes = _axes_of_products(node, place)
        assert p_axes is not None
        for name, n in zip(p_axes[0], node.inputs[place].shape, strict=True):
            if known.get(name, 1) != n:
                raise Miss("there are more scores than products of query and key")
        dtypes = {str(x.value.dtype) for x in (q, k, v)}
        if len(dtypes) != 1 or not dtypes <= set(FLOAT_DTYPES):
            raise Miss(f"query, key and value of {', '.join(sorted(dtypes))}")
        batch, head, group, row = _roles(q)
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
            result=_result_axes(node, place, q.axes, v_axes),
            scale=self.scale,
            masks=masks,
            biases=tuple(self.biases),
            band=band,
            dropout=self._dropout(row, extents_of(q) | extents_of(k)),
        )

    def _check_users(self, inside: set[Node], last: Node) -> None:
        """The arrays in between must be there for the pattern alone."""
        for node in inside:
            for value in node.outputs:
                if value.is_result or any(u not in inside and u is not last for u in value.users):
                    raise Miss(
                        "scores or probabilities are used elsewhere too: returned, or by a gradient"
                    )

    def _dropout(self, row: str, extents: dict[str, int]) -> Dropout | None:
        if self.kept is None:
            if abs(self.factor - 1) > 1e-6:
                raise Miss("probabilities are multiplied by a number")
            return None
        if self.masks_of_dropout > 1:
            raise Miss("there are two masks on the probabilities")
        kept = _compact(Named(self.kept, self.kept_axes))
        threshold = kept.value.made_by("lt")
        probability = None if threshold is None else number(threshold.inputs[1])
        bits = None if threshold is None else _random_bits(threshold.inputs[0])
        if threshold is None or probability is None or bits is None:
            raise Miss("the mask on the probabilities is not jax.random.bernoulli of a number")
        if abs(self.factor * probability - 1) > _ROUNDED:
            raise Miss("kept probabilities are not divided by the probability of keeping them")
        if bits.inputs[0].shape or not _is_key(bits.inputs[0]):
            raise Miss("dropout has several keys")
        present = {name for name, n in zip(kept.axes, kept.value.shape, strict=True) if n > 1}
        full = {name for name, n in extents.items() if n > 1 and name not in ("depth", "width")}
        if present == full:
            return Dropout(1 - probability, bits.inputs[0], broadcast=False)
        if present == full & {row, "column"}:
            return Dropout(1 - probability, bits.inputs[0], broadcast=True)
        raise Miss("one dropout mask for some of the axes")


def _is_key(value: Value) -> bool:
    return bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))


# What makes numbers between 0 and 1 of random bits: operations, and the number that is their other input.
_UNIFORM = {"max": 0.0, "add": 0.0, "mul": 1.0, "sub": 1.0}
_OF_BITS = ("bitcast_convert_type", "or", "shift_right_logical", "reshape", *_CASTS)


def _random_bits(value: Value) -> Node | None:
    """The bits that uniform numbers from 0 to 1 are made of."""
    while (node := value.node) is not None:
        if node.name == "random_bits":
            return node
        rest = [x for x in node.inputs if number(x) is None]
        numbers = [number(x) for x in node.inputs if number(x) is not None]
        is_step = node.name in _OF_BITS or [_UNIFORM.get(node.name)] == numbers
        if len(rest) != 1 or not is_step:
            return None
        value = rest[0]
    return None


def _reduction(value: Value, axes: Axes, name: str) -> Node | None:
    """The sum or the maximum over "column" that a value is, one for each row: it must stand where the rows are."""
    names = axes
    while (node := value.node) is not None and node.name != name:
        rest = [x for x in node.inputs if number(x) is None]
        if len(rest) != 1:
            return None
        (inner,) = rest
        if node.name == "broadcast_in_dim":
            names = tuple(names[i] for i in node.params["broadcast_dimensions"])
        elif node.name in ("reshape", "squeeze"):
            if _long(inner.shape, inner.shape) != _long(value.shape, value.shape):
                return None
            long = iter(_long(names, value.shape))
            names = tuple("" if n == 1 else next(long) for n in inner.shape)
        elif node.name == "max":
            if -math.inf not in [number(x) for x in node.inputs]:
                return None
        elif node.name not in (*_CASTS, "stop_gradient"):
            return None
        value = inner
    if node is None or tuple(node.params["axes"]) != (axes.index("column"),):
        return None
    whole = node.inputs[0].shape
    rows = [x for x in _long(axes, whole) if x != "column"]
    return node if _long(names, value.shape) == rows else None


def _long(names: Sequence[Any], shape: Sequence[int]) -> list[Any]:
    """The names of axes that are longer than 1."""
    return [name for name, n in zip(names, shape, strict=True) if n != 1]


def _before_casts(value: Value) -> Value:
    """What a value was in another float type."""
    for inner in through(value, *_CASTS):
        if str(inner.dtype) not in FLOAT_DTYPES:
            break
        value = inner
    return value


def _leads_to_product(value: Value, depth: int = 16) -> bool:
    """Whether a value is a product of two arrays with scores' operations on it."""
    node = value.node
    if node is None or depth == 0 or number(value) is not None:
        return False
    if node.name == "dot_general":
        return True
    if node.name in ("transpose", "neg", "select_n", "add", "mul", "div", *_CASTS, *_ONES):
        return any(_leads_to_product(x, depth - 1) for x in node.inputs)
    return False


def _compact(found: Named) -> Named:
    """The smallest array that is broadcast to a value."""
    while (node := found.value.made_by("broadcast_in_dim", "transpose")) is not None:
        if node.name == "broadcast_in_dim":
            axes = tuple(found.axes[i] for i in node.params["broadcast_dimensions"])
        else:
            names = dict(zip(node.params["permutation"], found.axes, strict=True))
            axes = tuple(names[i] for i in range(len(found.axes)))
        found = Named(node.inputs[0], axes)
    return found


def _query_and_key(product: Node, axes: Axes) -> tuple[Named, Named]:
    (contracted, batch) = product.params["dimension_numbers"]
    if len(contracted[0]) != 1:
        raise Miss("query and key are summed over several axes")
    count = len(batch[0])
    free = [len(product.inputs[i].shape) - count - 1 for i in (0, 1)]
    names = axes[count : count + free[0]], axes[count + free[0] :]
    is_known = all(name.startswith(("batch", ONE)) for name in axes[:count])
    if not is_known or len(set(axes[:count])) != count:
        raise Miss("query and key share an axis that probabilities and values do not")
    operands = [
        Named(
            product.inputs[i],
            _named(
                len(product.inputs[i].shape),
                axes[:count],
                (contracted[i], batch[i]),
                "depth",
                names[i],
            ),
        )
        for i in (0, 1)
    ]
    if names[1] == ("column",):
        q, k = operands
    elif names[0] == ("column",):
        k, q = operands
    else:
        raise Miss("keys have an axis that probabilities do not share with values")
    if any(name.startswith("batch") for name in q.axes if name not in k.axes):
        raise Miss("heads of values that keys do not have")
    return q, k


def _roles(q: Named) -> tuple[Axes, str | None, str | None, str]:
    """Which axes are batch, key/value heads, query heads of a group, and queries."""
    shared = [name for name in q.axes if name.startswith("batch")]
    rows = [name for name in q.axes if name.startswith("row")]
    if len(rows) == 1:
        head = shared[-1] if len(shared) > 1 else None
        return tuple(shared[: len(shared) - (head is not None)]), head, None, rows[0]
    if not shared:
        raise Miss("queries have two axes, and no heads")
    behind = q.axes.index(shared[-1]) + 1
    extents = dict(zip(q.axes, q.value.shape, strict=True))
    is_next = behind < len(q.axes) and q.axes[behind] in rows
    group = q.axes[behind] if is_next else min(rows, key=lambda name: extents[name])
    (row,) = (name for name in rows if name != group)
    return tuple(shared[:-1]), shared[-1], group, row


def _result_axes(node: Node, place: int, q_axes: Axes, v_axes: Axes) -> Axes:
    """Names of the axes of the product with the values."""
    (contracted, batch) = node.params["dimension_numbers"]
    p_axes = _axes_of_products(node, place)
    assert p_axes is not None
    names = [p_axes[0][i] for i in batch[place]]
    free = [
        [axes[i] for i in range(len(axes)) if i not in (*contracted[side], *batch[side])]
        for side, axes in ((place, p_axes[0]), (1 - place, v_axes))
    ]
    return tuple(names + (free[0] + free[1] if place == 0 else free[1] + free[0]))


def extents_of(named: Named) -> dict[str, int]:
    return dict(zip(named.axes, named.value.shape, strict=True))


def _band(mask: Named, row: str) -> Band | None:
    """The band that a mask is, if it is one: of comparisons, or an array that is known."""
    known = known_array(mask.value)
    if known is not None:
        return band_of_array(known, mask.axes, row, "column")
    found = conditions(mask.value, mask.axes)
    return None if found is None else band_of(found, row, "column")


def _split_bands(
    masks: Sequence[tuple[Named, bool]], row: str, rows: int, columns: int
) -> tuple[Band, tuple[tuple[Named, bool], ...]]:
    """Takes the masks that together are a band out of the others."""
    band, others = Band(None, None), []
    for mask, visible_if_true in masks:
        own = _band(mask, row) if visible_if_true else None
        if own is None:
            others.append((mask, visible_if_true))
        else:
            band = band.intersect(own)
    if options_of(band, rows, columns) is None:
        return Band(None, None), tuple(masks)
    return band, tuple(others)
