"""Masks of blocks: which blocks of queries and keys have anything to see, and a function that says what within them.

They become dense masks where attention is called: kernels then find out about tiles by themselves, skip the empty ones
and test pairs in the others only where they must. So a mask costs B*N*T*S bytes of its own extents, made by XLA.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax import lax

from jattn.arrays import as_array, as_integers, check_arity, is_integer, plain_integer, shown
from jattn.jax_interface import traced_anew
from jattn.pytrees import exportable
from jattn.spec import as_int32

_CLASS = "jattn.BlockMask"

_SIGNATURE = "mask_mod(batch, head, query, key) -> bool"
MaskMod = Callable[..., Any]


@exportable("jattn.BlockMask")
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BlockMask:
    """Which pairs take part, in two steps: by blocks, which kernels skip where they are hidden, and by a function.

    A pytree; ``blocks`` may be traced. A pair takes part if its block is True and ``mask_mod`` says so. What ``blocks``
    holds is checked where it is used: transformations of JAX put anything there.

    Attributes:
      blocks: bool (1 or B, 1 or N, ceil(T / block_size[0]), ceil(S / block_size[1])). Where an extent is 1,
        ``mask_mod`` is asked about batch entry or head 0 alone.
      q_len, kv_len: T and S.
      block_size: queries and keys of a block, or one number for both.
      mask_mod: ``mask_mod(batch, head, query, key) -> bool`` of scalars, for pairs within blocks; None: all take part.

    Raises:
      TypeError: ``mask_mod`` is no function, or does not return one bool.
      ValueError: lengths outside [0, 2^31) or a block size below 1; ``blocks`` of another type or shape.
    """

    blocks: jax.Array
    q_len: int = dataclasses.field(metadata={"static": True})
    kv_len: int = dataclasses.field(metadata={"static": True})
    block_size: tuple[int, int] = dataclasses.field(metadata={"static": True})
    mask_mod: MaskMod | None = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        for name in ("q_len", "kv_len"):
            object.__setattr__(self, name, _count(_CLASS, name, getattr(self, name), least=0))
        object.__setattr__(self, "block_size", _sizes(_CLASS, self.block_size))
        if self.mask_mod is not None:
            _check_callable(_CLASS, self.mask_mod)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(1 or B, 1 or N, T, S)."""
        batch, heads = self._checked_blocks().shape[:2]
        return (batch, heads, self.q_len, self.kv_len)

    def materialize(self) -> jax.Array:
        """Returns the mask as a bool array of ``shape``."""
        sizes = _within(self.block_size, self.q_len, self.kv_len)
        rows = jnp.repeat(self._checked_blocks(), sizes[0], axis=2)[:, :, : self.q_len]
        visible = jnp.repeat(rows, sizes[1], axis=3)[..., : self.kv_len]
        if self.mask_mod is None:
            return visible
        _check_result(_CLASS, self.mask_mod)
        counted = [jnp.arange(extent, dtype=jnp.int32) for extent in self.shape]
        with _notes_of_errors():
            return visible & _of_pairs(self.mask_mod)(*counted)

    def sparsity(self) -> jax.Array:
        """Returns the percentage of blocks that are hidden; NaN if there are none."""
        return 100 * (1 - self._checked_blocks().mean(dtype=jnp.float32))

    def kv_blocks(self) -> tuple[jax.Array, jax.Array]:
        """Returns the visible blocks of keys of each block of queries, as block-sparse kernels elsewhere want them.

        Returns:
          How many there are, int32 (1 or B, 1 or N, query blocks), and which, int32 (..., key blocks): their numbers in
          ascending order, then those of the hidden ones.
        """
        blocks = self._checked_blocks()
        counts = blocks.sum(-1, dtype=jnp.int32)
        return counts, jnp.argsort(~blocks, axis=-1, stable=True).astype(jnp.int32)

    def _checked_blocks(self) -> jax.Array:
        blocks = as_array("blocks", self.blocks, _CLASS)
        if blocks.dtype != bool:
            raise ValueError(
                f"{_CLASS}: blocks has dtype {blocks.dtype}, must be bool (True where pairs take part): compare it with"
                " 0"
            )
        wanted = _block_counts(self.q_len, self.kv_len, self.block_size)
        if blocks.ndim != 4 or blocks.shape[2:] != wanted:
            raise ValueError(
                f"{_CLASS}: blocks has shape {blocks.shape}, must be (1 or batch, 1 or heads, {wanted[0]}, {wanted[1]})"
                f" for lengths {self.q_len} and {self.kv_len} in blocks of {self.block_size}:"
                " jattn.create_block_mask makes such"
            )
        return blocks

    @staticmethod
    def from_kv_blocks(
        kv_num_blocks: Any,
        kv_indices: Any,
        q_len: int,
        kv_len: int,
        block_size: int | tuple[int, int] = 128,
        mask_mod: MaskMod | None = None,
    ) -> BlockMask:
        """Makes a mask of the lists of visible blocks of keys.

        Args:
          kv_num_blocks: (1 or B, 1 or N, query blocks) integers: how many blocks of keys each block of queries sees.
          kv_indices: (1 or B, 1 or N, query blocks, key blocks) integers, of which the first ``kv_num_blocks`` count.
          q_len, kv_len: T and S.
          block_size: queries and keys of a block, or one number for both.
          mask_mod: see ``BlockMask``.

        Raises:
          ValueError: no integers, or shapes that do not fit each other or the lengths.
        """
        sizes = _sizes(_CLASS, block_size)
        q_len = _count(_CLASS, "q_len", q_len, least=0)
        kv_len = _count(_CLASS, "kv_len", kv_len, least=0)
        counts = _as_int32("kv_num_blocks", kv_num_blocks)
        indices = _as_int32("kv_indices", kv_indices)
        wanted = _block_counts(q_len, kv_len, sizes)
        if indices.shape[2:] != wanted or indices.shape[:3] != counts.shape:
            raise ValueError(
                f"jattn.BlockMask: kv_num_blocks has shape {counts.shape} and kv_indices {indices.shape}, must be"
                f" (batch, heads, {wanted[0]}) and (batch, heads, {wanted[0]}, {wanted[1]}) for lengths {q_len} and"
                f" {kv_len} in blocks of {sizes}"
            )
        counted = (jnp.arange(wanted[1]) < counts[..., None]) & (indices >= 0)
        places = jnp.where(counted, indices, wanted[1])  # beyond the end: dropped
        flat = places.reshape(math.prod(indices.shape[:3]), wanted[1])
        rows = jnp.arange(flat.shape[0])[:, None]
        blocks = jnp.zeros(flat.shape, bool).at[rows, flat].set(True, mode="drop")
        return BlockMask(blocks.reshape(indices.shape), q_len, kv_len, sizes, mask_mod)

    def __repr__(self) -> str:
        blocks = getattr(self.blocks, "shape", self.blocks)
        return (
            f"BlockMask(blocks={blocks}, q_len={self.q_len}, kv_len={self.kv_len}, block_size={self.block_size},"
            f" mask_mod={self.mask_mod})"
        )


def create_block_mask(
    mask_mod: MaskMod,
    batch: int | None,
    num_heads: int | None,
    q_len: int,
    kv_len: int,
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """Makes a mask of the blocks in which ``mask_mod`` lets some pair take part.

    Evaluates it for every pair, block row by block row, with memory for one row of blocks. For blocks that depend on
    arrays inside ``jit`` call it there.

    Args:
      mask_mod: ``mask_mod(batch, head, query, key) -> bool``, of int32 scalars; it may close over arrays.
      batch, num_heads: B and N, or None where it is the same for all.
      q_len, kv_len: T and S.
      block_size: queries and keys of a block, or one number for both.

    Raises:
      TypeError: ``mask_mod`` is no function, or does not return one bool.
      ValueError: lengths outside [0, 2^31); a batch or a number of heads outside [1, 2^31); a block size below 1.
    """
    name = "jattn.create_block_mask"
    _check_callable(name, mask_mod)
    sizes = _sizes(name, block_size)
    q_len, kv_len = _count(name, "q_len", q_len, least=0), _count(name, "kv_len", kv_len, least=0)
    if batch is not None:
        batch = _count(name, "batch", batch, otherwise=" or None")
    if num_heads is not None:
        num_heads = _count(name, "num_heads", num_heads, otherwise=" or None")
    _check_result(name, mask_mod)
    of_pairs = _of_pairs(mask_mod)
    rows, columns = _block_counts(q_len, kv_len, sizes)
    height, width = _within(sizes, q_len, kv_len)
    # Blocks at the ends repeat the last pair.
    keys = jnp.minimum(jnp.arange(columns * width, dtype=jnp.int32), kv_len - 1)
    batches = jnp.arange(1 if batch is None else batch, dtype=jnp.int32)
    heads = jnp.arange(1 if num_heads is None else num_heads, dtype=jnp.int32)

    def row(number: jax.Array) -> jax.Array:
        queries = jnp.minimum(number * height + jnp.arange(height, dtype=jnp.int32), q_len - 1)
        visible = of_pairs(batches, heads, queries, keys)
        return visible.reshape(*visible.shape[:3], columns, width).any((2, 4))

    blocks = lax.map(row, jnp.arange(rows, dtype=jnp.int32))
    return BlockMask(jnp.moveaxis(blocks, 0, 2), q_len, kv_len, sizes, mask_mod)


def _of_pairs(mask_mod: MaskMod) -> Callable[..., jax.Array]:
    """The function of (batches, heads, queries, keys), one axis each, with all four axes."""
    for axis in (3, 2, 1, 0):
        mask_mod = jax.vmap(mask_mod, tuple(0 if i == axis else None for i in range(4)))
    return mask_mod


def _block_counts(q_len: int, kv_len: int, sizes: tuple[int, int]) -> tuple[int, int]:
    """How many blocks of queries and of keys there are."""
    return -(-q_len // sizes[0]), -(-kv_len // sizes[1])


def _count(function: str, name: str, value: Any, *, least: int = 1, otherwise: str = "") -> int:
    """A number from ``least`` on that int32 holds, or one that is only known later, while exporting."""
    if jax.export.is_symbolic_dim(value) or (is_integer(value) and least <= value < 2**31):
        number: int = plain_integer(value)
        return number
    raise ValueError(
        f"{function}: {name} is {shown(value)}, must be an integer from {least} to 2^31 - 1{otherwise}, known while"
        " tracing"
    )


def _within(sizes: tuple[int, int], q_len: int, kv_len: int) -> tuple[int, int]:
    """The size of a block, no larger than what there is."""

    def within(size: int, length: int) -> int:
        return size if jax.export.is_symbolic_dim(length) else min(size, max(length, 1))

    return within(sizes[0], q_len), within(sizes[1], kv_len)


def _as_int32(name: str, x: Any) -> jax.Array:
    """An array of integers; those beyond the limits of int32 are at the limits."""
    array = as_integers(name, x, _CLASS)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{_CLASS}: {name} has dtype {array.dtype}, must hold integers: cast it")
    return jnp.asarray(as_int32(array))


def _sizes(function: str, block_size: Any) -> tuple[int, int]:
    """A block size as two numbers."""
    sizes = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(sizes) != 2 or not all(is_integer(x) and x >= 1 for x in sizes):
        raise ValueError(
            f"{function}: block_size is {shown(block_size)}, must be one integer from 1 on, or two of them (queries,"
            " keys)"
        )
    return int(sizes[0]), int(sizes[1])


def _check_callable(function: str, mask_mod: Any) -> None:
    if not callable(mask_mod):
        raise TypeError(
            f"{function}: mask_mod is {shown(mask_mod)}, must be a function: {_SIGNATURE}"
        )
    check_arity("mask_mod", mask_mod, 4, _SIGNATURE, function)


def _check_result(function: str, mask_mod: MaskMod) -> None:
    with _notes_of_errors():
        result = jax.eval_shape(traced_anew(mask_mod), *[jax.ShapeDtypeStruct((), jnp.int32)] * 4)
    if not hasattr(result, "dtype") or result.shape != () or result.dtype != bool:
        raise TypeError(
            f"{function}: mask_mod returns {result}, must return one bool: {_SIGNATURE}"
        )


@contextlib.contextmanager
def _notes_of_errors() -> Iterator[None]:
    """Says what to do about a function that outlives the arrays that it closes over, or that asks for values."""
    try:
        yield
    except jax.errors.ConcretizationTypeError as error:
        error.add_note(
            "mask_mod is traced: its indices have no values yet. Write jnp.where(condition, a, b) in place of an if,"
            " and & in place of and."
        )
        raise
    except jax.errors.UnexpectedTracerError as error:
        error.add_note(
            "mask_mod closes over arrays of a transformation that has ended, as of the jit in which the mask was made:"
            " make the mask where it is used"
        )
        raise
