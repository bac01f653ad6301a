"""Dropout as programs have it: a mask of random bits, and what is left divided by the probability of keeping it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.dropout import MAX_RATE
from jattn.fusion.axes import Miss, Named, compact_of, long_parts
from jattn.fusion.graph import Node, Value

# Keep probabilities are written twice, as a threshold in float32 and as a divisor in the type of what it divides.
_ROUNDED = 2.0**-22
_LEAST_LAST = 1 - 2.0**-7  # of uniform numbers the largest, which may have 8 bits


@dataclasses.dataclass(frozen=True)
class FoundDropout:
    """Attributes: rate; bits: what draws random bits; broadcast: one mask for all batch entries and heads."""

    rate: float
    bits: Node
    broadcast: bool

    @property
    def key(self) -> Value:
        """A JAX key."""
        return self.bits.inputs[0]


def dropout_of(
    kept: Named, factor: float, rounding: float, row: str, extents: dict[str, int]
) -> FoundDropout:
    """What a bool mask on the probabilities is, which are multiplied by a factor.

    Args:
      kept: the mask, true where a weight is kept.
      factor: of those.
      rounding: how far it may be off, as a part of itself.
      row: name of the axis of queries.
      extents: of the axes of the probabilities.

    Raises:
      Miss: it is no dropout that ``dot_product_attention`` has.
    """
    small = compact_of(kept)
    threshold = small.value.made_by("lt")
    probability = None if threshold is None else threshold.inputs[1].number
    bits = None if threshold is None else _random_bits(threshold.inputs[0])
    if probability is None or bits is None:
        raise Miss("the mask on the probabilities is not jax.random.bernoulli of a number")
    if abs(factor * probability - 1) > rounding + _ROUNDED:
        raise Miss("kept probabilities are not divided by the probability of keeping them")
    if 1 - probability > MAX_RATE:
        raise Miss(f"a dropout rate above {MAX_RATE}")
    key = bits.inputs[0]
    if key.shape or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise Miss("dropout has several keys")
    present = set(long_parts(small))
    full = {name for name, n in extents.items() if n != 1}
    if present == full:
        return FoundDropout(1 - probability, bits, broadcast=False)
    if present == full & {row, "column"}:
        return FoundDropout(1 - probability, bits, broadcast=True)
    raise Miss("one dropout mask for some of the axes")


# What makes uniform numbers of random bits, with a number as the other input.
_STEPS: dict[str, Callable[..., Any]] = {
    "or": np.bitwise_or,
    "shift_right_logical": np.right_shift,
    "max": np.maximum,
    "add": np.add,
    "mul": np.multiply,
    "sub": np.subtract,
}
_SAME = ("reshape", "copy", "pvary", "pcast")


def _random_bits(value: Value) -> Node | None:
    """The bits that uniform numbers from 0 to 1 are made of: by steps that make 1/4 of a quarter of all patterns."""
    steps: list[Node] = []
    while (node := value.node) is not None and node.name != "random_bits":
        rest = [x for x in node.inputs if x.number is None]
        if len(rest) != 1:
            return None
        steps.append(node)
        value = rest[0]
    if node is None:
        return None
    most = np.iinfo(value.dtype).max
    made: Any = np.array([0, most // 4 + 1, most // 2 + 1, most], value.dtype)
    for step in reversed(steps):
        with np.errstate(all="ignore"):
            made = _after(step, made)
        if made is None:
            return None
    first, quarter, half, last = made.astype(np.float64)
    is_uniform = (first, quarter, half) == (0, 0.25, 0.5) and _LEAST_LAST <= last < 1
    return node if is_uniform else None


def _after(step: Node, made: Any) -> Any | None:
    """What a step makes of a few numbers; None if it is none of those that are known."""
    dtype = np.dtype(step.outputs[0].dtype)
    if step.name in _SAME:
        return made
    if step.name == "convert_element_type":
        return made.astype(dtype)
    if step.name == "bitcast_convert_type":
        return made.view(dtype) if made.dtype.itemsize == dtype.itemsize else None
    if step.name not in _STEPS:
        return None
    operands = [made if x.number is None else np.asarray(x.number, dtype) for x in step.inputs]
    return _STEPS[step.name](*operands)
