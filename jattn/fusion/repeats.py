"""Key/value heads that a program repeats for the query heads that share them: read once, as they were before.

``jnp.repeat(key, n, axis)``, or ``broadcast_to`` and ``reshape``, in front of the products: (B, S, K, D) as
(B, S, K * n, D), in any layout. Kernels take K heads, of which each serves n query heads in a row.
"""

from __future__ import annotations

import itertools

from jattn.fusion.axes import ONE, Named, axes_before, extents_of
from jattn.fusion.graph import Axes, Node, axes_before_transpose


def before_repeats(k: Named, v: Named, shared: Axes) -> tuple[str, Named, Named] | None:
    """The axis, one of ``shared``, along which keys and values are repeated alike, and both without that; or None.

    Without it they have fewer elements on the axis; one that is repeated as a whole may have no such axis.
    """
    for name in shared:
        keys, values = _before_repeat(k, name), _before_repeat(v, name)
        if keys is None or values is None:
            continue
        if extents_of(keys).get(name, 1) == extents_of(values).get(name, 1):
            return name, keys, values
    return None


def _before_repeat(found: Named, name: str) -> Named | None:
    """What an array was before its axis ``name`` was made of one with fewer elements, each of which it repeats."""
    value, axes = found.value, found.axes
    numbers = itertools.count()
    while (node := value.made_by("transpose", "squeeze")) is not None:
        if node.name == "transpose":
            names: Axes | None = axes_before_transpose(node, axes)
        else:
            names = axes_before(node, axes, lambda: f"{ONE} of the first {next(numbers)}")
        assert names is not None
        value, axes = node.inputs[0], names
    place = axes.index(name)
    repeated = value.made_by("broadcast_in_dim")
    if repeated is not None:
        return _narrow(repeated, axes, place)
    joined = value.made_by("reshape")
    repeated = None if joined is None else joined.inputs[0].made_by("broadcast_in_dim")
    if repeated is None:
        return None
    # (..., K, n, ...) became (..., K * n, ...), with the repetitions behind what they repeat.
    wide, copies = repeated.outputs[0].shape, place + 1
    rest = (*value.shape[:place], *value.shape[copies:])
    if len(wide) != len(axes) + 1 or (*wide[:place], *wide[copies + 1 :]) != rest:
        return None
    return _narrow(repeated, (*axes[:copies], f"{ONE} of copies", *axes[copies:]), copies)


def _narrow(repeated: Node, axes: Axes, copies: int) -> Named | None:
    """What a node repeats, with names, if it repeats it along the axis ``copies`` and nowhere else."""
    source, wide = repeated.inputs[0], repeated.outputs[0].shape
    places = repeated.params["broadcast_dimensions"]
    narrow = dict(zip(places, source.shape, strict=True))
    others = [i for i in range(len(wide)) if i != copies]
    if narrow.get(copies, 1) != 1 or any(narrow.get(i) != wide[i] for i in others):
        return None
    return Named(source, tuple(axes[i] for i in places))
