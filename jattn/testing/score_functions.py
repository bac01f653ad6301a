"""Score functions of the cases: each in JAX, as a user would write it, and in numpy with its derivatives.

Arguments of both: the score, then batch, head, query and key, then the captures that ``draw`` makes. In numpy all
broadcast against the scores (B, N, T, S).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

Array = np.ndarray[Any, Any]


class Read(NamedTuple):
    """How the new score depends on a capture: the element of each pair, and d score' / d element, (B, N, T, S)."""

    element: tuple[Array, ...]
    weight: Array


class Changed(NamedTuple):
    """New scores, their slopes by the old ones, (B, N, T, S), and what was read of each capture; None for integers."""

    score: Array
    slope: Array
    reads: tuple[Read | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class ScoreFunction:
    """A score function in two languages.

    Attributes:
      score_mod: for JAX.
      numpy: the same, with derivatives.
      draw: (rng, batch, num_heads) -> captures.
      curvature: largest |d slope / d score|.
      hides: whether it hides pairs.
    """

    score_mod: Callable[..., Any]
    numpy: Callable[..., Changed]
    draw: Callable[[np.random.Generator, int, int], tuple[Array, ...]] = lambda *_: ()
    curvature: float = 0.0
    hides: bool = False


_REACH = 12  # of a table of distances; farther ones share its ends


def _cap(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return 4.0 * jnp.tanh(score / 4.0)


def _cap_numpy(score: Array, *_: Array) -> Changed:
    t = np.tanh(score / 4)
    return Changed(4 * t, 1 - t * t)


def _table(score: Any, batch: Any, head: Any, query: Any, key: Any, table: Any) -> Any:
    """A learned bias by distance, for each head."""
    return score + table[head, jnp.clip(key - query, -_REACH, _REACH) + _REACH]


def _table_numpy(
    score: Array, batch: Array, head: Array, query: Array, key: Array, table: Array
) -> Changed:
    index = (
        np.broadcast_to(head, score.shape),
        np.broadcast_to(np.clip(key - query, -_REACH, _REACH) + _REACH, score.shape),
    )
    one = np.ones_like(score)
    return Changed(score + table[index], one, (Read(index, one),))


def _draw_table(rng: np.random.Generator, batch: int, num_heads: int) -> tuple[Array, ...]:
    return (rng.standard_normal((num_heads, 2 * _REACH + 1)).astype(np.float32),)


def _prefix(score: Any, batch: Any, head: Any, query: Any, key: Any, prefix: Any) -> Any:
    """All see the first keys, and what stands before them."""
    return jnp.where((key < prefix[batch]) | (key <= query), score, -jnp.inf)


def _prefix_numpy(
    score: Array, batch: Array, head: Array, query: Array, key: Array, prefix: Array
) -> Changed:
    visible = (key < prefix[batch]) | (key <= query)
    shown = np.broadcast_to(visible, score.shape)
    return Changed(np.where(shown, score, -np.inf), shown.astype(score.dtype), (None,))


def _draw_prefix(rng: np.random.Generator, batch: int, num_heads: int) -> tuple[Array, ...]:
    return (rng.integers(0, 30, batch).astype(np.int32),)


def _gain(score: Any, batch: Any, head: Any, query: Any, key: Any, gain: Any, offset: Any) -> Any:
    """A learned temperature for each head, and an offset for even distances."""
    return gain[head] * score + offset * ((query + key) % 2 == 0)


def _gain_numpy(
    score: Array,
    batch: Array,
    head: Array,
    query: Array,
    key: Array,
    gain: Array,
    offset: Array,
) -> Changed:
    index = (np.broadcast_to(head, score.shape),)
    even = np.broadcast_to((query + key) % 2 == 0, score.shape).astype(score.dtype)
    slope = gain.astype(score.dtype)[index]
    reads = (Read(index, score), Read((), even))
    return Changed(slope * score + offset.astype(score.dtype) * even, slope, reads)


def _draw_gain(rng: np.random.Generator, batch: int, num_heads: int) -> tuple[Array, ...]:
    return (
        rng.uniform(0.5, 1.5, num_heads).astype(np.float32),
        np.asarray(rng.standard_normal(), np.float32),
    )


SCORE_FUNCTIONS = {
    "cap": ScoreFunction(_cap, _cap_numpy, curvature=0.2),  # 2 / 4 * max(t (1 - t^2))
    "table": ScoreFunction(_table, _table_numpy, _draw_table),
    "prefix": ScoreFunction(_prefix, _prefix_numpy, _draw_prefix, hides=True),
    "gain": ScoreFunction(_gain, _gain_numpy, _draw_gain),
}
