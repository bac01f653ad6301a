"""Dropout as programs have it: a mask of random bits, and what is left divided by the probability of keeping it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jattn.fusion.axes import CASTS, Miss, Named, compact_of, extents_of
from jattn.fusion.graph import Node, Value

# Keep probabilities are written twice, as a threshold and as a divisor, which may be rounded to 8 bits.
_ROUNDED = 2.0**-7


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Attributes: rate; key: a JAX key; broadcast: one mask for all batch entries and heads."""

    rate: float
    key: Value
    broadcast: bool


def dropout_of(kept: Named, factor: float, row: str, extents: dict[str, int]) -> Dropout:
    """What a bool mask on the probabilities is, which are multiplied by a factor.

    Args:
      kept: the mask, true where a weight is kept.
      factor: of those.
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
    if abs(factor * probability - 1) > _ROUNDED:
        raise Miss("kept probabilities are not divided by the probability of keeping them")
    key = bits.inputs[0]
    if key.shape or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise Miss("dropout has several keys")
    present = {name for name, n in extents_of(small).items() if n > 1}
    full = {name for name, n in extents.items() if n > 1}
    if present == full:
        return Dropout(1 - probability, key, broadcast=False)
    if present == full & {row, "column"}:
        return Dropout(1 - probability, key, broadcast=True)
    raise Miss("one dropout mask for some of the axes")


# What makes numbers between 0 and 1 of random bits: operations, and the number that is their other input.
_UNIFORM = {"max": 0.0, "add": 0.0, "mul": 1.0, "sub": 1.0}
_OF_BITS = ("bitcast_convert_type", "or", "shift_right_logical", "reshape", *CASTS)


def _random_bits(value: Value) -> Node | None:
    """The bits that uniform numbers from 0 to 1 are made of."""
    while (node := value.node) is not None:
        if node.name == "random_bits":
            return node
        rest = [x for x in node.inputs if x.number is None]
        numbers = [x.number for x in node.inputs if x.number is not None]
        is_step = node.name in _OF_BITS or [_UNIFORM.get(node.name)] == numbers
        if len(rest) != 1 or not is_step:
            return None
        value = rest[0]
    return None
