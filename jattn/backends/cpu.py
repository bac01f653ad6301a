"""The backend "cpu": the native kernel of cc/cpu through XLA FFI."""

from __future__ import annotations

import jax

from jattn import cpu_program, ffi
from jattn.backends.base import (
    Backend,
    Residuals,
    Wants,
    refused_score_mod,
    symbolic_extents,
    wrong_dtype,
    wrong_platform,
)
from jattn.config import Determinism
from jattn.device import Device
from jattn.errors import Reason
from jattn.reference import Gradients
from jattn.spec import FEATURES, FLOAT_DTYPES, Operands, Spec


class CpuBackend:
    """Tiled exact attention on XLA's thread pool; deterministic whatever the number of threads."""

    name = "cpu"
    understands = frozenset(FEATURES)

    def for_backward(self) -> Backend:
        """This backend runs its backward pass itself."""
        return self

    def unsupported(
        self, spec: Spec, device: Device, *, needs_grad: bool, determinism: Determinism
    ) -> tuple[Reason, ...]:
        """Refuses other platforms, other dtypes, unknown extents, and score functions of other operations."""
        reasons = wrong_platform(self.name, device, "cpu")
        reasons += wrong_dtype(self.name, spec, FLOAT_DTYPES)
        reasons += symbolic_extents(self.name, spec) + refused_score_mod(
            self.name, spec, cpu_program.refusals
        )
        return reasons + ffi.missing_module(self.name)

    def forward(
        self, spec: Spec, operands: Operands[jax.Array], device: Device
    ) -> tuple[jax.Array, jax.Array]:
        """Returns out and lse."""
        return ffi.forward(
            spec, operands, _plan(spec), _scratch_shape(spec, backward=False, wants_dbias=False)
        )

    def backward(
        self,
        spec: Spec,
        operands: Operands[jax.Array],
        residuals: Residuals,
        wants: Wants,
        device: Device,
        determinism: Determinism,
    ) -> Gradients:
        """Returns the wanted gradients, that of the slopes among them."""
        scratch_shape = _scratch_shape(spec, backward=True, wants_dbias=wants.bias)
        slope_parts = 1 if wants.alibi_slopes else 0  # the kernel adds its parts up
        plan = _plan(spec, slope=True)
        return ffi.backward(spec, operands, residuals, wants, plan, scratch_shape, slope_parts)


def _plan(spec: Spec, *, slope: bool = False) -> dict[str, str]:
    """The attribute ``plan`` of a call; ``slope``: it needs derivatives of the score function."""
    plan = {"backend": "cpu", "kernels": ""}
    if spec.score_mod is not None:
        plan["program"] = cpu_program.cpu_program(
            spec.score_mod, by_position=spec.positions, slope=slope
        )
    return plan


def _scratch_shape(spec: Spec, *, backward: bool, wants_dbias: bool) -> tuple[int, ...]:
    """Bytes of scratch; with a symbolic batch (while exporting) one batch entry's worth for each entry."""
    from jattn import _core

    def size(batch: int) -> int:
        return _core.cpu_scratch_bytes(
            backward=backward,
            wants_dbias=wants_dbias,
            batch=batch,
            q_len=spec.q_len,
            kv_len=spec.kv_len,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            head_dim_v=spec.head_dim_v,
            dtype=spec.dtype,
            bias_shape=tuple(x if isinstance(x, int) else batch for x in spec.bias or (0,) * 4),
        )

    known = isinstance(spec.batch, int)
    if known:
        return (size(spec.batch),)
    # Two entries that share a bias need sums of its gradient, which one does not.
    return (spec.batch, max(size(1), -(-size(2) // 2)))
