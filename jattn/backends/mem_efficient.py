"""The backend "mem_efficient": our CUDA kernels for every device from sm_80 on (cc/kernels/sm80)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax

from jattn import device_code, device_gradients, ffi
from jattn.backends import cuda_tiles, few_queries
from jattn.backends.base import (
    Backend,
    Residuals,
    Wants,
    refused_score_mod,
    symbolic_extents,
    wide_heads,
    without_terms_of_no_keys,
    wrong_dtype,
    wrong_platform,
)
from jattn.config import Determinism
from jattn.device import Device
from jattn.errors import Reason
from jattn.reference import Gradients
from jattn.spec import FEATURES, Operands, Spec

LARGEST_HEAD_DIM = 512
OLDEST_ARCH = (8, 0)
DTYPES = ("float16", "bfloat16", "float32")


class MemEfficientBackend:
    """Tensor-core kernels with every mask, bias and dropout form, float32 accumulation, any head dim up to 512.

    Where a block has 99 KiB of shared memory (sm_86, sm_89, sm_120), gradients in float32 stop at head dim 384.
    """

    name = "mem_efficient"
    understands = frozenset(FEATURES)

    def for_backward(self) -> Backend:
        """This backend runs its backward pass itself."""
        return self

    def unsupported(
        self, spec: Spec, device: Device, *, needs_grad: bool, determinism: Determinism
    ) -> tuple[Reason, ...]:
        """Refuses other platforms, older devices, float64 and larger head dims."""
        reasons = cuda_kernels_missing(
            self.name, device, OLDEST_ARCH, None, "use a newer GPU, or implementation='xla'"
        )
        allowed: tuple[str, ...] = DTYPES
        if device.arch is not None and device.arch < OLDEST_ARCH:
            allowed = ("float16", "float32")
        reasons += wrong_dtype(self.name, spec, allowed)
        reasons += wide_heads(self.name, spec, LARGEST_HEAD_DIM)
        reasons += symbolic_extents(self.name, spec) + no_device_code(self.name, spec)
        return reasons or self._too_much_shared_memory(spec, device, needs_grad)

    def _too_much_shared_memory(
        self, spec: Spec, device: Device, needs_grad: bool
    ) -> tuple[Reason, ...]:
        """The reason why no tile of this problem fits into the shared memory of the device, if so."""
        assert device.arch is not None
        everything = (True, True, True, spec.bias is not None)
        try:
            cuda_tiles.plan_forward(spec, device.arch)
            if needs_grad:
                for deterministic in (False, True):
                    cuda_tiles.plan_backward(
                        spec, device.arch, wants=everything, deterministic=deterministic
                    )
                if spec.alibi_slopes is not None:
                    cuda_tiles.plan_slopes_gradient(spec, device.arch)
        except ValueError as error:
            return (
                Reason(
                    self.name,
                    "HEAD_DIM",
                    "head_dim",
                    max(spec.head_dim, spec.head_dim_v),
                    f"must fit into the device ({error})",
                    "use a 16-bit dtype, a GPU with more shared memory, or implementation='xla'",
                ),
            )
        return ()

    def forward(
        self, spec: Spec, operands: Operands[jax.Array], device: Device
    ) -> tuple[jax.Array, jax.Array]:
        """Returns out and lse."""
        arch = device.arch
        assert arch is not None
        spec, operands = without_terms_of_no_keys(spec, operands)

        def run(spec: Spec, operands: Operands[jax.Array]) -> tuple[jax.Array, jax.Array]:
            plan = cuda_tiles.plan_forward(spec, arch)
            return ffi.forward(spec, operands, plan.attributes(self.name), (plan.scratch_bytes,))

        tile_of = functools.partial(cuda_tiles.tile_of_queries, spec, arch)
        return few_queries.forward(spec, operands, run, tile_of)

    def backward(
        self,
        spec: Spec,
        operands: Operands[jax.Array],
        residuals: Residuals,
        wants: Wants,
        device: Device,
        determinism: Determinism,
    ) -> Gradients:
        """Returns the wanted gradients."""

        def others() -> Gradients:
            return gradients_on_any_device(
                self.name, spec, operands, residuals, wants, device, determinism
            )

        return with_terms_gradients(
            self.name, spec, operands, residuals, wants, device, determinism, others
        )


def gradients_on_any_device(
    backend: str,
    spec: Spec,
    operands: Operands[jax.Array],
    residuals: Residuals,
    wants: Wants,
    device: Device,
    determinism: Determinism,
) -> Gradients:
    """Returns the wanted gradients of q, k, v and bias by the kernels that serve all devices, for ``backend``.

    The other arguments are those of ``Backend.backward``.
    """
    assert device.arch is not None
    plan = cuda_tiles.plan_backward(
        spec, device.arch, wants=wants.flags(), deterministic=determinism == "strict"
    )
    attributes = plan.attributes(backend)
    return ffi.backward(spec, operands, residuals, wants, attributes, (plan.scratch_bytes,))


def with_terms_gradients(
    backend: str,
    spec: Spec,
    operands: Operands[jax.Array],
    residuals: Residuals,
    wants: Wants,
    device: Device,
    determinism: Determinism,
    others: Callable[[], Gradients],
) -> Gradients:
    """Returns the wanted gradients; those of ALiBi slopes and of captures are computed in passes of their own.

    Args:
      backend: for whom.
      spec, operands, residuals, wants, device, determinism: as for ``Backend.backward``.
      others: computes the gradients of q, k, v and bias; called if any of them is wanted.
    """
    assert device.arch is not None
    nothing = Wants(q=False, k=False, v=False, bias=False)
    slopes = captures = None
    if wants.alibi_slopes:
        plan, parts = cuda_tiles.plan_slopes_gradient(spec, device.arch)
        only = dataclasses.replace(nothing, alibi_slopes=True)
        attributes = plan.attributes(backend)
        found = ffi.backward(
            spec, operands, residuals, only, attributes, (plan.scratch_bytes,), parts
        )
        slopes = found.alibi_slopes
    if sums_captures(spec, wants.captures):
        plan = cuda_tiles.plan_capture_gradients(
            spec, device.arch, wants.captures, deterministic=determinism == "strict"
        )
        found = ffi.backward(
            spec,
            operands,
            residuals,
            nothing,
            plan.attributes(backend),
            (plan.scratch_bytes,),
            captures=wants.captures,
        )
        captures = found.captures
    if any(wants.flags()):
        found = others()
    elif slopes is None and captures is None:
        return others()
    return found._replace(alibi_slopes=slopes, captures=captures)


def dq_varies(spec: Spec, wants: Wants, device: Device) -> bool:
    """Whether ``gradients_on_any_device`` adds dq up in an order that varies, where nobody asks for the same bits: it
    does unless the kernels are those of who asks.
    """
    assert device.arch is not None
    free, strict = (
        cuda_tiles.plan_backward(spec, device.arch, wants=wants.flags(), deterministic=asks)
        for asks in (False, True)
    )
    return free.kernels != strict.kernels


def sums_captures(spec: Spec, wanted: tuple[bool, ...]) -> bool:
    """Whether kernels of ours compute the gradients of the captures that are wanted, and any is; else XLA does."""
    return (
        spec.score_mod is not None
        and any(wanted)
        and device_gradients.can_sum(spec.score_mod, wanted)
    )


def no_device_code(backend: str, spec: Spec) -> tuple[Reason, ...]:
    """The reasons why the score function of a problem cannot become a part of CUDA kernels, if it has one."""
    return refused_score_mod(backend, spec, device_code.refusals)


def cuda_kernels_missing(
    backend: str,
    device: Device,
    oldest: tuple[int, int],
    newest: tuple[int, int] | None,
    way_out: str,
) -> tuple[Reason, ...]:
    """The reasons why CUDA kernels for the devices from ``oldest`` to ``newest`` cannot run on ``device``."""
    reasons = wrong_platform(backend, device, "cuda")
    if reasons:
        return reasons
    if device.arch is None or device.arch < oldest or (newest is not None and device.arch > newest):
        last = f"sm{newest[0]}{newest[1]}" if newest is not None else "newest"
        reasons += (
            Reason(
                backend,
                "ARCH",
                "device",
                device,
                f"only supports gpu architectures in the range [sm{oldest[0]}{oldest[1]}, {last}]",
                way_out,
            ),
        )
    return reasons + ffi.missing_module(backend)
