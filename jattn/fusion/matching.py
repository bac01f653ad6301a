"""Recognises attention in a program, from its last product backwards: values by probabilities by scores.

Layouts are roles, not positions: the product of values says which axes of the probabilities are batch, which are
queries and which is summed over; every step backwards carries these names along, through transpositions, to the
product of query and key. So ``(B, N, T, D)``, ``(B, T, N, D)``, ``(T, D)`` and groups of heads ``(B, T, K, G, D)``
are one pattern.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from jattn.arguments import scale_of, softcap_of
from jattn.fusion.axes import (
    ONES,
    SAME,
    Miss,
    Named,
    axes_after,
    axes_of_products,
    extents_of,
    long_parts,
    query_and_key,
    result_axes,
    roles,
)
from jattn.fusion.bands import (
    FoundBand,
    band_of,
    band_of_array,
    conditions,
    conjunction,
    options_of,
)
from jattn.fusion.dropout import FoundDropout
from jattn.fusion.graph import Axes, Node, Value, known_array
from jattn.fusion.repeats import before_repeats
from jattn.fusion.scores import further_operands
from jattn.fusion.weights import Weights, is_used_elsewhere
from jattn.spec import FLOAT_DTYPES


@dataclasses.dataclass(frozen=True)
class Match:
    """Attention that was found.

    Attributes:
      node: what is replaced: the product with the values, or its division by the sum of weights.
      q, k, v: with the axes ``batch``, ``row`` or "column", and "depth" or "width".
      batch: names of the leading axes, in the order of q.
      head, group: names of the axes of key/value heads and of query heads that share one; None without. Where there is
        no group the axis of heads may be longer in q than in k and v, by a whole factor.
      row: name of the axis of queries, which a single one may lack; keys are "column".
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
        rows, columns = extents_of(self.q).get(self.row, 1), extents_of(self.k)["column"]
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
    reason: Miss | None = None
    for product, moves, divisor in _last_products(node):
        for place in (0, 1):
            axes = axes_of_products(product, place)
            result = None if axes is None else _moved(result_axes(product, place), moves)
            if axes is None:
                _refuse_sums_over_heads(product, place, fuses_finite_fill)
            if axes is None or result is None:
                continue
            search = Weights(fuses_finite_fill)
            weights = Named(product.inputs[place], axes[0])
            try:
                if divisor is None:
                    scores = search.probabilities(weights)
                else:
                    scores = search.normalised_later(weights, Named(divisor, result), node)
                    search.nodes += [product, *moves]
            except Miss as own:  # the other operand may be probabilities
                reason = reason or own
                continue
            if scores is not None:
                return _finish(search, node, product, place, result, scores)
    if reason is not None:
        raise reason
    return None


def _refuse_sums_over_heads(product: Node, place: int, fuses_finite_fill: bool) -> None:
    """Raises Miss if the operand at ``place`` holds probabilities, and other axes than keys are summed over."""
    contracted, value = product.params["dimension_numbers"][0][place], product.inputs[place]
    for column in contracted if len(contracted) > 1 else ():
        axes = tuple("column" if i == column else f"batch{i}" for i in range(len(value.shape)))
        try:
            found = Weights(fuses_finite_fill).probabilities(Named(value, axes))
        except Miss:
            continue
        if found is not None:
            raise Miss("the product with the values sums over more than keys")


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
        while (move := value.made_by("transpose", *SAME, *ONES)) is not None:
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


def _finish(
    search: Weights, node: Node, last: Node, place: int, result: Axes, probabilities: Named
) -> Match:
    """What was found, checked: a node that ends it, its product with the values, and where the weights are."""
    product_of = search.scores(probabilities)
    product = product_of.value.node
    assert product is not None
    q, k = query_and_key(product, product_of.axes)
    further = tuple(further_operands(found, q, k) for found in search.further)
    axes = axes_of_products(last, place)
    assert axes is not None
    p, v = Named(last.inputs[place], axes[0]), Named(last.inputs[1 - place], axes[1])
    inside = {*search.nodes, product, *(x.value.node for x in search.further if x.value.node)}
    if is_used_elsewhere(inside, {*inside, node}):
        raise Miss("scores or probabilities are used elsewhere too: returned, or by a gradient")
    known = extents_of(k) | extents_of(q)
    for name, n in extents_of(p).items():
        if known.get(name, 1) != n:
            raise Miss("there are more scores than products of query and key")
    if search.first_key is not None and search.sinks is None:
        raise Miss("a column of the probabilities is cut off that is no sink")
    if isinstance(search.sinks, Named) and {"column", roles(q)[3]} & set(long_parts(search.sinks)):
        raise Miss("sinks of single queries")
    if search.sinks and q.value.dtype == np.float64:
        raise Miss("sinks of float64, which are float32 in a kernel")
    if not further:
        q, k = (search.in_type_of(v.value.dtype, x) for x in (q, k))
    dtypes = {str(x.value.dtype) for x in (q, k, v, *itertools.chain(*further))}
    if len(dtypes) != 1 or not dtypes <= set(FLOAT_DTYPES):
        raise Miss(f"query, key and value of {', '.join(sorted(dtypes))}")
    scale = search.scale if search.softcap is None else search.scale * search.softcap
    softcap = None if search.softcap is None else abs(search.softcap)
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
    rows, columns = extents_of(q).get(row, 1), extents_of(k)["column"]
    band, masks = _split_bands(search.masks, row, rows, columns)
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
        biases=tuple(search.biases),
        sinks=search.sinks,
        band=band,
        dropout=search.dropout(row, extents_of(p)),
    )


def _band(
    mask: Named, visible_if_true: bool, row: str, rows: int, columns: int
) -> FoundBand | None:
    """The band that a mask shows, if it is one: of comparisons, or an array that is known."""
    extents = extents_of(mask)
    if (extents.get(row), extents.get("column")) != (rows, columns):
        return None  # one row, or one column, for all
    known = known_array(mask.value)
    if known is not None:
        return band_of_array(known == visible_if_true, mask.axes, row, "column")
    found = conditions(mask.value, mask.axes, visible_if_true)
    return None if found is None else band_of(found, row, "column")


def _split_bands(
    masks: Sequence[tuple[Named, bool]], row: str, rows: int, columns: int
) -> tuple[FoundBand, tuple[tuple[Named, bool], ...]]:
    """Takes the masks that together are a band out of the others."""
    band = FoundBand(None, None)
    others: list[tuple[Named, bool]] = []
    for mask, visible_if_true in masks:
        parts = conjunction(mask, visible_if_true)
        bands = [_band(part, sense, row, rows, columns) for part, sense in parts]
        if parts and all(own is None for own in bands):
            parts, bands = [(mask, visible_if_true)], [None]
        for part, own in zip(parts, bands, strict=True):
            if own is None:
                others.append(part)
            else:
                band = band.intersect(own)
    if options_of(band, rows, columns) is None:
        return FoundBand(None, None), tuple(masks)
    return band, tuple(others)
