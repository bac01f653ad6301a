"""Score functions over packed sequences: a function of sequences and of positions in them, as one of packed rows.

Packed sequences are one batch entry. Positions there need only be right up to a number for each sequence, since pairs
in different ones do not see each other: queries stand at their rows, keys where their distances from these are right.
From its row a query knows its sequence, and where the keys of that begin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn.ragged import RaggedArray


def key_origins(q: RaggedArray, shift: jax.Array | None) -> jax.Array:
    """Returns where key 0 of each sequence stands, (B,) int32, if queries stand at their rows.

    Args:
      q: the queries.
      shift: (B,) int32: query t of a sequence sits at key t + shift; None: at key t.
    """
    starts, _ = q.bounds()
    return starts if shift is None else starts - shift


def of_sequences(per_sequence: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns for each row the element (B,) of its sequence; that of another one, or 0, for padding."""
    if per_sequence.shape[0] == 0:
        return jnp.zeros_like(ids)
    return per_sequence[jnp.maximum(ids, 0)]


def on_rows(
    score_mod: Callable[..., Any], q: RaggedArray, k: RaggedArray, origins: jax.Array
) -> Callable[..., Any]:
    """Returns the score function of a packed call in which the user's counts as in the padded form.

    It is called with a batch entry of no meaning, the row of the query, and where the key stands (``key_origins``). The
    user's gets the number of the query's sequence, the position of the query in it, and that of the key, held within
    the keys of this sequence: a pair that is hidden reads nothing that no visible one could.

    Args:
      score_mod: of (score, batch, head, query, key, *captures).
      q, k: the queries and the keys.
      origins: ``key_origins``.
    """
    q_ids, q_positions = q.rows()
    k_starts, k_stops = k.bounds()
    table = _table(q_ids, q_positions, origins, k_stops - k_starts)

    # Errors speak of the user's signature.
    @functools.wraps(score_mod)
    def of_rows(score: Any, batch: Any, head: Any, query: Any, key: Any, *captures: Any) -> Any:
        row = jnp.maximum(query, 0)
        sequence, position, origin, last = jax.lax.dynamic_index_in_dim(
            table, row, axis=1, keepdims=False
        )
        # Nothing is negative, which device code has to see: it leaves out what JAX does to negative indices.
        own_key = jnp.maximum(jnp.minimum(key - origin, last), 0)
        sequence, position = jnp.maximum(sequence, 0), jnp.maximum(position, 0)
        return score_mod(score, sequence, head, position, own_key, *captures)

    return of_rows


@jax.jit
def _table(
    q_ids: jax.Array, q_positions: jax.Array, origins: jax.Array, kv_lengths: jax.Array
) -> jax.Array:
    """What the rows of the queries have to know, (4, room) int32: their sequence, their position in it, the place of
    its first key, and the position of its last one.

    Extents of captures are part of a kernel: room for the next power of 2 lets batches of similar sizes share one.
    """
    last = jnp.maximum(kv_lengths - 1, 0)
    columns = (
        jnp.maximum(q_ids, 0),
        q_positions,
        of_sequences(origins, q_ids),
        of_sequences(last, q_ids),
    )
    total = q_ids.shape[0]
    room = 1 << max(total - 1, 0).bit_length()
    return jnp.pad(jnp.stack(columns), ((0, 0), (0, room - total)))
