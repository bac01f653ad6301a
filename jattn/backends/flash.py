"""The backend "flash": our Hopper kernels (cc/kernels/sm90), 16-bit types."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jattn import ffi
from jattn.backends import flash_backward_tiles, flash_tiles, key_splits, mem_efficient
from jattn.backends.base import (
    Backend,
    Residuals,
    Wants,
    symbolic_extents,
    wide_heads,
    without_terms_of_no_keys,
    wrong_dtype,
)
from jattn.backends.kernel_plan import has_program_slopes, round_up
from jattn.config import Determinism
from jattn.device import Device
from jattn.errors import Reason
from jattn.reference import Gradients
from jattn.spec import FEATURES, Operands, Spec

ARCH = (9, 0)
DTYPES = ("float16", "bfloat16")


class FlashBackend:
    """Warp-specialised kernels with the tensor memory accelerator and warpgroup products.

    The tensor memory accelerator needs rows of a multiple of 16 bytes: arrays with other head dims are padded with
    zeros, which changes no score (the scale stays that of the true head dim), and the results are cut back.
    """

    name = "flash"
    understands = frozenset(FEATURES)

    def for_backward(self) -> Backend:
        """This backend runs its backward pass itself."""
        return self

    def unsupported(
        self, spec: Spec, device: Device, *, needs_grad: bool, determinism: Determinism
    ) -> tuple[Reason, ...]:
        """Refuses other devices, other dtypes and larger head dims."""
        way_out = "leave the choice to jattn, or use implementation='mem_efficient'"
        reasons = mem_efficient.cuda_kernels_missing(self.name, device, ARCH, ARCH, way_out)
        reasons += wrong_dtype(self.name, spec, DTYPES)
        elsewhere = wide_heads("mem_efficient", spec, mem_efficient.LARGEST_HEAD_DIM)
        if elsewhere:
            way_out = elsewhere[0].remedy
        reasons += wide_heads(self.name, spec, flash_tiles.LARGEST_HEAD_DIM, way_out)
        reasons += mem_efficient.no_device_code(self.name, spec)
        return reasons + symbolic_extents(self.name, spec)

    def forward(
        self, spec: Spec, operands: Operands[jax.Array], device: Device
    ) -> tuple[jax.Array, jax.Array]:
        """Returns out and lse."""
        spec, operands = without_terms_of_no_keys(spec, operands)
        padded_spec, padded = _pad(key_splits.without_idle_band(spec), operands)
        plan = flash_tiles.plan_forward(padded_spec, for_few_queries=True)
        attributes = plan.attributes(self.name)
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
        """Returns the wanted gradients; those of ALiBi slopes and captures by the kernels that serve all devices."""

        def others() -> Gradients:
            if not runs_slopes(spec, wants):
                return mem_efficient.gradients_on_any_device(
                    self.name, spec, operands, residuals, wants, device, determinism
                )
            return self._backward_on_hopper(spec, operands, residuals, wants, determinism)

        return mem_efficient.with_terms_gradients(
            self.name, spec, operands, residuals, wants, device, determinism, others
        )

    def _backward_on_hopper(
        self,
        spec: Spec,
        operands: Operands[jax.Array],
        residuals: Residuals,
        wants: Wants,
        determinism: Determinism,
    ) -> Gradients:
        padded_spec, padded = _pad(spec, operands)
        padded_residuals = dataclasses.replace(
            residuals,
            out=_pad_head_dim(residuals.out, padded_spec.head_dim_v),
            dout=_pad_head_dim(residuals.dout, padded_spec.head_dim_v),
        )
        plan = flash_backward_tiles.plan_backward(
            padded_spec,
            wants=wants.flags(),
            deterministic=determinism == "strict",
        )
        attributes = plan.attributes(self.name)
        grads = ffi.backward(
            padded_spec, padded, padded_residuals, wants, attributes, (plan.scratch_bytes,)
        )
        return Gradients(
            q=grads.q[..., : spec.head_dim],
            k=grads.k[..., : spec.head_dim],
            v=grads.v[..., : spec.head_dim_v],
            bias=grads.bias,
        )


def runs_slopes(spec: Spec, wants: Wants) -> bool:
    """Whether the backward kernels can multiply by the slopes of the score function, if it has others than 1.

    Dropout marks weights by their signs, which such slopes spoil. Heads above 128 pass weights on in 16 bits, which are
    numbers of at most 1 in float16. The slope of a softcap, of which a bias knows nothing, is a factor of the slopes.
    """
    if not has_program_slopes(spec):
        return True
    splits = max(spec.head_dim, spec.head_dim_v) > flash_backward_tiles.LARGEST_UNSPLIT_HEAD_DIM
    passes_on = splits and spec.dtype == "float16"
    return not (spec.dropout is not None or passes_on or (wants.bias and spec.softcap > 0))


def dq_varies(spec: Spec, wants: Wants, device: Device) -> bool:
    """Whether the backward pass adds dq up in an order that varies, where nobody asks for the same bits: it does unless
    the kernels are those of who asks.
    """
    if not runs_slopes(spec, wants):
        return mem_efficient.dq_varies(spec, wants, device)
    padded = _padded_spec(spec)
    free, strict = (
        flash_backward_tiles.plan_backward(padded, wants=wants.flags(), deterministic=asks)
        for asks in (False, True)
    )
    return free.kernels != strict.kernels


def _padded_spec(spec: Spec) -> Spec:
    """The same problem with head dims that the kernels can copy."""
    head_dim, head_dim_v = (
        round_up(d, flash_tiles.HEAD_DIM_MULTIPLE) for d in (spec.head_dim, spec.head_dim_v)
    )
    return dataclasses.replace(spec, head_dim=head_dim, head_dim_v=head_dim_v)


def _pad(spec: Spec, operands: Operands[jax.Array]) -> tuple[Spec, Operands[jax.Array]]:
    """The problem of ``_padded_spec`` and its operands."""
    padded = _padded_spec(spec)
    return padded, operands._replace(
        q=_pad_head_dim(operands.q, padded.head_dim),
        k=_pad_head_dim(operands.k, padded.head_dim),
        v=_pad_head_dim(operands.v, padded.head_dim_v),
    )


def _pad_head_dim(x: jax.Array, head_dim: int) -> jax.Array:
    missing = head_dim - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
