"""Structural masks: bands (causal, windows) as numbers, and the causal bias objects."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Literal

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jattn.pytrees import exportable

Alignment = Literal["upper_left", "lower_right"]

UNBOUNDED = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Band:
    """Keys that a query may see by position: ``t + offset - left <= j <= t + offset + right``.

    Attributes:
      left, right: how far to the left and to the right, in keys; ``UNBOUNDED`` for no limit. May be negative.
      lower_right: False: offset = 0, query 0 sits at key 0. True: offset = kv_length - q_length, the last query
        sits at the last key; the lengths are those of the batch entry where lengths are given.
    """

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    lower_right: bool = False

    @property
    def unbounded(self) -> bool:
        """Whether the band lets every query see every key."""
        return self.left == UNBOUNDED and self.right == UNBOUNDED

    def intersect(self, left: int, right: int) -> Band:
        """Returns the band that lies in this one and in (left, right) of the same alignment."""
        return dataclasses.replace(self, left=min(self.left, left), right=min(self.right, right))

    def canonical(
        self, q_len: int, kv_len: int, *, has_lengths: bool, has_slopes: bool = False
    ) -> Band:
        """Returns the same band in its simplest form, so that equal problems compare equal.

        With lengths per batch entry the alignment matters even where ``q_len == kv_len``; with ALiBi slopes even where
        the band hides nothing, because they read the same distance.
        """
        if (self.unbounded and not has_slopes) or (not has_lengths and q_len == kv_len):
            return dataclasses.replace(self, lower_right=False)
        return self

    def __str__(self) -> str:
        def limit(value: int) -> str:
            return "unbounded" if value == UNBOUNDED else str(value)

        alignment = ", lower right" if self.lower_right else ""
        return f"({limit(self.left)}, {limit(self.right)}{alignment})"


UNBOUNDED_BAND = Band()


@exportable("jattn.CausalBias")
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class CausalBias:
    """A causal mask known by its shape and alignment alone; pass it as ``mask``. Hashable, a pytree without leaves.

    Attributes:
      alignment: "upper_left": query t sees keys j <= t. "lower_right": j <= t + (kv_len - q_len).
      q_len, kv_len: lengths of query and key.

    Raises:
      ValueError: another alignment, or lengths outside [0, 2^31).
    """

    alignment: Alignment
    q_len: int
    kv_len: int

    def __post_init__(self) -> None:
        if self.alignment not in ("upper_left", "lower_right"):
            raise ValueError(
                f"jattn.CausalBias: alignment is {self.alignment!r}, must be 'upper_left' or 'lower_right'"
            )
        for name, length in (("q_len", self.q_len), ("kv_len", self.kv_len)):
            is_known = isinstance(length, int | np.integer) and not isinstance(length, bool)
            if not jax.export.is_symbolic_dim(length) and not (is_known and 0 <= length < 2**31):
                raise ValueError(
                    f"jattn.CausalBias: {name} is {length!r}, must be an integer from 0 to 2^31 - 1, known while"
                    " tracing"
                )
            if is_known:  # one of numpy's may wrap round where it is worked with
                object.__setattr__(self, name, int(length))

    @property
    def ndim(self) -> int:
        """Refuses: this is no array. An AttributeError, so that `hasattr` says so too."""
        raise AttributeError(
            "jattn.CausalBias: mask is no array and has no ndim, but a Flax module with decode=True combines its own"
            " mask, which is causal, with the mask given, as arrays: pass no mask there, or a bool array (B, 1, 1, S)"
            " of what else is to be hidden"
        )

    def materialize(self) -> jax.Array:
        """Returns the mask as a bool array (q_len, kv_len), True where the key takes part."""
        offset = self.kv_len - self.q_len if self.alignment == "lower_right" else 0
        return jnp.arange(self.kv_len)[None, :] <= jnp.arange(self.q_len)[:, None] + offset


def causal_upper_left(q_len: int, kv_len: int) -> CausalBias:
    """Returns the causal mask whose diagonal starts at the first query and the first key, for ``mask``.

    Args:
      q_len, kv_len: T and S; query t sees keys j <= t.
    """
    return CausalBias("upper_left", q_len, kv_len)


def causal_lower_right(q_len: int, kv_len: int) -> CausalBias:
    """Returns the causal mask whose diagonal ends at the last query and the last key, for ``mask``.

    With ``q_len > kv_len`` the first queries see no key: their output is 0, their lse -inf. A ``UserWarning`` says
    so.

    Args:
      q_len, kv_len: T and S; query t sees keys j <= t + S - T.
    """
    bias = CausalBias("lower_right", q_len, kv_len)
    if q_len > kv_len:
        warnings.warn(
            f"jattn.causal_lower_right: q_len {q_len} is larger than kv_len {kv_len}, so the first"
            f" {q_len - kv_len} queries see no key; their output is 0",
            UserWarning,
            stacklevel=2,
        )
    return bias
