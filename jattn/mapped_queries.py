"""Queries that `jax.vmap` maps while keys and values are the same for all elements, as beams share a prefix.

The mapped axis becomes part of the heads, element e of key/value head k and its query heads g being head
(k, e, g): keys and values are neither copied nor, where heads of a group share what they read, read again.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jattn.spec import Operands, Spec

_OF_HEADS = ("bias", "mask", "sinks", "alibi_slopes")  # (1 or B, 1 or N, ...)


def fit_into_heads(spec: Spec, dims: Operands[int | None], size: Any) -> bool:
    """Whether the mapped axis can become part of the heads, and moves fewer bytes there than copies of the keys.

    Args:
      spec: of one element.
      dims: where each operand is mapped.
      size: of the mapped axis.
    """
    named = zip(Operands._fields, dims.single(), strict=False)
    only_queries = all(dim is None or name in ("q", *_OF_HEADS) for name, dim in named)
    # A mapped mask that all heads share would have to be repeated for each of them.
    of_single_heads = all(
        dim is None or (extents is not None and extents[1] == spec.num_heads)
        for dim, extents in ((dims.bias, spec.bias), (dims.mask, spec.mask))
    )
    # Dropout counts heads. Kernels want to know how many there are.
    extents = (size, spec.num_heads, spec.num_kv_heads, spec.q_len, spec.kv_len)
    if (
        dims.q is None
        or not (only_queries and of_single_heads)
        or any(dim is not None for dim in dims.captures)
        or spec.dropout is not None
        or not all(isinstance(x, int) for x in extents)
    ):
        return False
    # Queries and results are transposed, read and written; keys and values would be written.
    return spec.num_kv_heads * spec.kv_len >= 2 * spec.num_heads * spec.q_len


def into_heads(
    spec: Spec, operands: Operands[jax.Array], dims: Operands[int | None], size: int
) -> Operands[jax.Array]:
    """The operands of a problem whose heads are those of all elements.

    Args:
      spec: of one element.
      operands: some mapped.
      dims: where.
      size: of the mapped axis.
    """

    def folded(x: jax.Array, dim: int | None, axis: int) -> jax.Array:
        """x, of which ``axis`` of an element is the heads, 1 or N, with those of all elements there."""
        x = jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        before, after = x.shape[1 : axis + 1], x.shape[axis + 2 :]
        x = jnp.broadcast_to(x, (size, *before, spec.num_heads, *after))
        x = x.reshape(size, *before, spec.num_kv_heads, spec.group_size, *after)
        return jnp.moveaxis(x, 0, axis + 1).reshape(*before, size * spec.num_heads, *after)

    moved: dict[str, Any] = {"q": folded(operands.q, dims.q, 2)}
    for name in _OF_HEADS:
        x, dim = getattr(operands, name), getattr(dims, name)
        if x is not None and (dim is not None or x.shape[1] != 1):
            moved[name] = folded(x, dim, 1)
    if operands.head_ids is not None:
        moved["head_ids"] = folded(operands.head_ids, None, 0)
    return operands._replace(**moved)


def out_of_heads(spec: Spec, x: jax.Array, axis: int, size: int) -> jax.Array:
    """(..., size * N, ...) with the heads at ``axis`` -> (size, ..., N, ...)."""
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    x = x.reshape(*before, spec.num_kv_heads, size, spec.group_size, *after)
    return jnp.moveaxis(x, axis + 1, 0).reshape(size, *before, spec.num_heads, *after)
