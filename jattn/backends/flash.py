"""The backend "flash": our Hopper kernels (cc/kernels/sm90), 16-bit types.

The forward pass is the Hopper kernel; the backward pass of these problems runs the kernels of
"mem_efficient", which read the same residuals. ``for_backward`` says so, and the call counters count
it under that name.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jattn import ffi
from jattn.backends import flash_tiles
from jattn.backends.base import Backend, Residuals, Wants, symbolic_extents, wrong_dtype
from jattn.backends.mem_efficient import (
    MemEfficientBackend,
    cuda_kernels_missing,
    plan_attributes,
    wide_heads,
)
from jattn.config import Determinism
from jattn.device import Device
from jattn.errors import Reason
from jattn.reference import Gradients
from jattn.spec import FEATURES, Operands, Spec

ARCH = (9, 0)
DTYPES = ("float16", "bfloat16")


class FlashBackend:
    """Warp-specialised kernels with the tensor memory accelerator and warpgroup products."""

    name = "flash"
    understands = frozenset(FEATURES) - {"bias", "mask"}

    def __init__(self, backward_backend: MemEfficientBackend) -> None:
        """``backward_backend`` runs the backward pass."""
        self._backward_backend = backward_backend

    def for_backward(self) -> Backend:
        """The backend that runs the backward pass."""
        return self._backward_backend

    def unsupported(
        self, spec: Spec, device: Device, *, needs_grad: bool, determinism: Determinism
    ) -> tuple[Reason, ...]:
        """Refuses other devices, other dtypes and larger head dims."""
        way_out = "leave the choice to jattn, or use implementation='mem_efficient'"
        reasons = cuda_kernels_missing(self.name, device, ARCH, ARCH, way_out)
        reasons += wrong_dtype(self.name, spec, DTYPES)
        reasons += wide_heads(self.name, spec, flash_tiles.LARGEST_HEAD_DIM)
        return reasons + symbolic_extents(self.name, spec)

    def forward(
        self, spec: Spec, operands: Operands[jax.Array], device: Device
    ) -> tuple[jax.Array, jax.Array]:
        """Returns out and lse.

        The tensor memory accelerator needs rows of a multiple of 16 bytes: other head dims are padded with zeros, which
        changes no score (the scale stays that of the true head dim), and the result is cut back.
        """
        head_dim, head_dim_v = (
            _round_up(d, flash_tiles.HEAD_DIM_MULTIPLE) for d in (spec.head_dim, spec.head_dim_v)
        )
        padded = operands._replace(
            q=_pad_head_dim(operands.q, head_dim),
            k=_pad_head_dim(operands.k, head_dim),
            v=_pad_head_dim(operands.v, head_dim_v),
        )
        padded_spec = dataclasses.replace(spec, head_dim=head_dim, head_dim_v=head_dim_v)
        plan = flash_tiles.plan_forward(padded_spec, spec.batch)
        attributes = plan_attributes(self.name, plan.kernels)
        out, lse = ffi.forward(padded_spec, padded, attributes, (plan.scratch_bytes,))
        return out[..., : spec.head_dim_v], lse

    def backward(
        self,
        spec: Spec,
        operands: Operands[jax.Array],
        residuals: Residuals,
        wants: Wants,
        device: Device,
        determinism: Determinism,
    ) -> Gradients:
        """Returns the wanted gradients, from the backend of ``for_backward``."""
        return self.for_backward().backward(spec, operands, residuals, wants, device, determinism)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _pad_head_dim(x: jax.Array, head_dim: int) -> jax.Array:
    missing = head_dim - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
