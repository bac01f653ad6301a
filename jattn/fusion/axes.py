"""Names of axes: what they are to attention, carried along from its last product backwards.

"batch0", "batch1", ... are shared by all arrays, "row0" (and "row1", of groups of heads) belong to queries, of which a
single one may have no such axis, "column" to keys, "depth" is summed over in scores, and "width" is that of values.
"one1", ... have size 1 and belong to some of the arrays alone. Axes that a reshape joins have all their names, and
sizes, in one: "batch1=4*row1=2".
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jattn.fusion.graph import Axes, Node, Value, axes_before_transpose, through
from jattn.spec import FLOAT_DTYPES

# Changes of type, and of how an array varies in a shard_map.
CASTS = ("convert_element_type", "copy", "pvary", "pcast")
SAME = (*CASTS, "name", "sharding_constraint")  # and what names an array, or says where it lies
ONES = ("squeeze", "broadcast_in_dim", "reshape")  # where they add or take away axes of size 1
ONE = "one"  # begins the names of axes that only some of the arrays have


class Miss(Exception):  # noqa: N818 (it is an answer, not an error)
    """Why something that has a softmax between two products is not taken for attention."""


@dataclasses.dataclass(frozen=True)
class Named:
    """A value with a name for each of its axes; axes of scores that it lacks have size 1."""

    value: Value
    axes: Axes


def extents_of(named: Named) -> dict[str, int]:
    """Axis name -> size."""
    return dict(zip(named.axes, named.value.shape, strict=True))


def axes_of_products(node: Node, place: int) -> tuple[Axes, Axes] | None:
    """Names of the axes of probabilities and of values, if the operand at ``place`` may be the probabilities."""
    (contracted, batch) = node.params["dimension_numbers"]
    of_p, of_v = (contracted[place], batch[place]), (contracted[1 - place], batch[1 - place])
    p, v = node.inputs[place], node.inputs[1 - place]
    rows = len(p.shape) - len(of_p[1]) - 1
    if len(of_p[0]) != 1 or len(v.shape) - len(of_v[1]) != 2 or rows not in (0, 1, 2):
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


def axes_before(node: Node, axes: Axes, name_of_one: Callable[[], str]) -> Axes | None:
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
    if node.name == "reshape":
        if before == after:
            return axes
        names = _regrouped(axes, after, before)
        if names is None or ("column" in axes and "column" not in names):
            return None
        return tuple(name or name_of_one() for name in names)
    kept = iter(axes)
    gone = {i % len(before) for i in node.params["dimensions"]}
    return tuple(name_of_one() if i in gone else next(kept) for i in range(len(before)))


def axes_after(node: Node, axes: Axes) -> Axes | None:
    """Axes of what a node makes by moving, joining and parting axes; some of size 1 come, called "", and go. None if it
    does something else.
    """
    before, after = node.inputs[0].shape, node.outputs[0].shape
    if node.name in SAME:
        return axes
    if node.name == "transpose":
        return tuple(axes[i] for i in node.params["permutation"])
    if node.name == "broadcast_in_dim":
        names = dict(zip(node.params["broadcast_dimensions"], axes, strict=True))
        is_same = math.prod(before) == math.prod(after)
        return tuple(names.get(i, "") for i in range(len(after))) if is_same else None
    return _regrouped(axes, before, after) if node.name in ONES else None


def reshaped_axes(axes: Axes, shape: Sequence[int], other: Sequence[int]) -> Axes | None:
    """Axes of an array in another shape, where those of size 1 are nobody's; None if they are cut elsewhere."""
    names = tuple("" if n == 1 else name for name, n in zip(axes, shape, strict=True))
    return _regrouped(names, shape, other)


def _regrouped(axes: Axes, shape: Sequence[int], other: Sequence[int]) -> Axes | None:
    """Axes of an array in another shape; those of size 1 that are nobody's are called ""."""
    if not all(isinstance(n, int) and n > 0 for n in (*shape, *other)):
        short = [name for name, n in zip(axes, shape, strict=True) if n == 1]
        is_known = all(not name or name.startswith(ONE) for name in short)
        if not is_known or long_of(shape, shape) != long_of(other, other):
            return None
        kept = iter(long_of(axes, shape))
        return tuple("" if n == 1 else next(kept) for n in other)
    parts = [part for name, n in zip(axes, shape, strict=True) for part in parts_of(name, n)]
    queue = collections.deque(part for part in parts if part[0] and not part[0].startswith(ONE))
    found: list[list[tuple[str, int]]] = []
    for n in other:
        taken: list[tuple[str, int]] = []
        while queue and math.prod(m for _, m in taken) < n:
            taken.append(queue.popleft())
        if n == 1 and queue and queue[0][1] == 1:
            taken.append(queue.popleft())
        if math.prod(m for _, m in taken) != n:
            return None
        others = [part for part in taken if part != ("column", n)]
        if others and len(others) < len(taken):  # of size 1: keys stay alone
            taken = [("column", n)]
            if found and found[-1]:
                found[-1] += others
        found.append(taken)
    if queue and found and found[-1] and found[-1] != [("column", other[-1])]:
        found[-1] += queue
    return tuple(_joint(taken) for taken in found)


def _joint(parts: Sequence[tuple[str, int]]) -> str:
    if len(parts) < 2:
        return parts[0][0] if parts else ""
    return "*".join(f"{name}={n}" for name, n in parts)


def parts_of(name: str, size: int) -> list[tuple[str, int]]:
    """The axes that were joined to one of this name and size, and their sizes; one of size 1 stands for all of them."""
    if "*" not in name:
        return [(name, size)]
    return _joined_parts(name) if size != 1 else []


def _joined_parts(name: str) -> list[tuple[str, int]]:
    parts = (part.split("=") for part in name.split("*"))
    return [(part, int(n)) for part, n in parts]


def long_parts(named: Named) -> list[str]:
    """The names of axes that are longer than 1, each by itself, in order."""
    axes = zip(named.axes, named.value.shape, strict=True)
    return [part for name, n in axes for part, m in parts_of(name, n) if m != 1]


def _only_long(name: str) -> str:
    """The only axis that is longer than 1 of those that were joined, or the first.

    Raises:
      Miss: there are several.
    """
    if "*" not in name:
        return name
    parts = _joined_parts(name)
    long = [part for part, n in parts if n != 1]
    if len(long) > 1:
        raise Miss("scores join axes that query and key do not have")
    return long[0] if long else parts[0][0]


def long_of(names: Sequence[Any], shape: Sequence[int]) -> list[Any]:
    """The names of axes that are longer than 1."""
    return [name for name, n in zip(names, shape, strict=True) if n != 1]


def before_casts(value: Value) -> Value:
    """What a value was in another float type."""
    for inner in through(value, *SAME):
        if str(inner.dtype) not in FLOAT_DTYPES:
            break
        value = inner
    return value


def compact_of(found: Named) -> Named:
    """The smallest array that is broadcast to a value."""
    while (node := found.value.made_by("transpose", *ONES)) is not None:
        axes = axes_before_move(node, found.axes)
        if axes is None:
            break
        found = Named(node.inputs[0], axes)
    return found


def axes_before_move(node: Node, axes: Axes) -> Axes | None:
    """Axes of what a node transposes, repeats, or gives other axes of size 1; None if it makes other axes of them."""
    if node.name == "broadcast_in_dim":
        return tuple(axes[i] for i in node.params["broadcast_dimensions"])
    if node.name == "transpose":
        return axes_before_transpose(node, axes)
    before, after = node.inputs[0].shape, node.outputs[0].shape
    if long_of(before, before) != long_of(after, after):
        return None
    kept = iter(long_of(axes, after))
    return tuple(f"{ONE} at {i}" if n == 1 else next(kept) for i, n in enumerate(before))


def smallest_of(found: Named) -> Named:
    """The smallest array that is broadcast to a value, in whatever float type."""
    while (inner := compact_of(Named(before_casts(found.value), found.axes))) != found:
        found = inner
    return found


def query_and_key(product: Node, axes: Axes, *, all_heads: bool = True) -> tuple[Named, Named]:
    """The operands of a product of queries and keys, whose result has these axes.

    Args:
      product: any.
      axes: of its result.
      all_heads: whether keys must have all axes that queries share with values.

    Raises:
      Miss: they are none.
    """
    (contracted, batch) = product.params["dimension_numbers"]
    if len(contracted[0]) != 1:
        raise Miss("query and key are summed over several axes")
    axes = tuple(_only_long(name) for name in axes)
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
    elif any("column" in own and _are_shared(own) for own in names):
        raise Miss("queries lack an axis that keys and values share")
    else:
        raise Miss("keys have an axis that probabilities do not share with values")
    if all_heads and any(name.startswith("batch") for name in q.axes if name not in k.axes):
        raise Miss("heads of values that keys do not have")
    return q, k


def _are_shared(names: Axes) -> bool:
    """Whether all but keys are axes that probabilities share with values."""
    return all(name == "column" or name.startswith("batch") for name in names)


def roles(q: Named) -> tuple[Axes, str | None, str | None, str]:
    """Which axes are batch, key/value heads, query heads of a group, and queries."""
    shared = [name for name in q.axes if name.startswith("batch")]
    rows = [name for name in q.axes if name.startswith("row")]
    if len(rows) < 2:
        head = shared[-1] if len(shared) > 1 else None
        row = rows[0] if rows else "row0"
        return tuple(shared[: len(shared) - (head is not None)]), head, None, row
    if not shared:
        raise Miss("queries have two axes, and no heads")
    behind = q.axes.index(shared[-1]) + 1
    extents = extents_of(q)
    is_next = behind < len(q.axes) and q.axes[behind] in rows
    group = q.axes[behind] if is_next else min(rows, key=lambda name: extents[name])
    (row,) = (name for name in rows if name != group)
    return tuple(shared[:-1]), shared[-1], group, row


def result_axes(node: Node, place: int) -> Axes:
    """Names of the axes of the product with the values, of which the operand at ``place`` are the probabilities."""
    (contracted, batch) = node.params["dimension_numbers"]
    of_products = axes_of_products(node, place)
    assert of_products is not None
    names = [of_products[0][i] for i in batch[place]]
    free = [
        [axes[i] for i in range(len(axes)) if i not in (*contracted[side], *batch[side])]
        for side, axes in zip((place, 1 - place), of_products, strict=True)
    ]
    return tuple(names + (free[0] + free[1] if place == 0 else free[1] + free[0]))
