"""Functions of one pair on all pairs of a tile of scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jattn.jax_interface import vary_like

AXES = 4  # of scores: batch, head, query, key


class ScoreTile(NamedTuple):
    """What a score function gets for each pair of a tile.

    Attributes:
      scores: (B, N, t, s).
      batches, heads: (B,) and (N,) int32, the indices that the function gets.
      queries, keys: (B or 1, t) and (B or 1, s) int32, likewise.
    """

    scores: jax.Array
    batches: jax.Array
    heads: jax.Array
    queries: jax.Array
    keys: jax.Array

    def axes_of(self, reach: frozenset[int]) -> tuple[int, ...]:
        """The axes of the scores along which a value differs that depends on these fields."""
        if 0 in reach:
            return tuple(range(AXES))
        axes = {i - 1 for i in reach}
        if any(self[i].shape[0] != 1 for i in reach if i - 1 in (2, 3)):
            axes.add(0)
        return tuple(sorted(axes))

    def map(
        self,
        of_pair: Callable[..., Any],
        axes: tuple[int, ...] = tuple(range(AXES)),
        beside: Sequence[tuple[jax.Array, tuple[int, ...]]] = (),
    ) -> Any:
        """Evaluates a function of (score, batch, head, query, key), for all pairs.

        Results have the axes of the scores in front; or those alone along which they differ, if those are given.
        ``beside``: further arguments, and which axes of the scores each of them has in front.
        """
        fields, in_axes = [], []
        for i in range(len(self)):
            field, own = self._along(i, axes)
            fields.append(field)
            in_axes.append(own)
        fields += [x for x, _ in beside]
        in_axes += [list(own) for _, own in beside]
        function = of_pair
        for axis in reversed(axes):
            function = jax.vmap(function, tuple(0 if axis in own else None for own in in_axes))
        return function(*fields)

    def _along(self, number: int, axes: tuple[int, ...]) -> tuple[jax.Array, list[int]]:
        """A field for a function that depends on nothing that differs along other axes, and the axes that it has."""
        if number == 0:
            if len(axes) == AXES:
                return self.scores, list(axes)
            return vary_like(jnp.zeros((), self.scores.dtype), tuple(self)), []
        field = self[number]
        own = [number - 1] if number < 3 else [0, number - 1]
        if number >= 3 and field.shape[0] == 1:
            field, own = field[0], own[1:]
        # Along the other axes any number will do.
        for place in reversed(range(len(own))):
            if own[place] not in axes:
                field = lax.index_in_dim(field, 0, place, keepdims=False)
        return field, [axis for axis in own if axis in axes]
