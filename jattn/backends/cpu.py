"""The backend "cpu": the native kernel of cc/cpu through XLA FFI."""

from __future__ import annotations

import jax

from jattn import cpu_program, device_gradients, ffi
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

_ENTRIES = 64  # with so many no entry is cut into more than its heads and tiles (cc/cpu/plan.cc)


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
        return ffi.forward(spec, operands, _plan(spec), _scratch_shape(spec, backward=False))

    def backward(
        self,
        spec: Spec,
        operands: Operands[jax.Array],
        residuals: Residuals,
        wants: Wants,
        device: Device,
        determinism: Determinism,
    ) -> Gradients:
        """Returns the wanted gradients; those of captures where ``cpu_program.can_sum`` says so."""
        slope_parts = 1 if wants.alibi_slopes else 0  # the kernel adds its parts up
        captures = _summed_captures(spec, wants.captures)
        plan = _plan(spec, slope=True, captures=captures)
        scratch_shape = _scratch_shape(
            spec, backward=True, wants_dbias=wants.bias, captures=captures
        )
        return ffi.backward(
            spec, operands, residuals, wants, plan, scratch_shape, slope_parts, captures
        )


def _summed_captures(spec: Spec, wanted: tuple[bool, ...]) -> tuple[bool, ...]:
    """Of the captures that are wanted, which the kernel computes the gradients of: all, or none; XLA then does."""
    program = spec.score_mod
    if program is None or not any(wanted):
        return ()
    return wanted if cpu_program.can_sum(program, wanted) else ()


def _plan(spec: Spec, *, slope: bool = False, captures: tuple[bool, ...] = ()) -> dict[str, str]:
    """The attribute ``plan`` of a call.

    ``slope``: it needs derivatives of the score function. ``captures``: of which it computes the gradients, if of any.
    """
    plan = {"backend": "cpu", "kernels": ""}
    if spec.score_mod is None:
        return plan
    program, by_position = spec.score_mod, spec.positions
    plan["program"] = cpu_program.cpu_program(program, by_position=by_position, slope=slope)
    if captures:
        plan["gradients"] = cpu_program.gradients_program(
            program, captures, by_position=by_position
        )
    return plan


def _scratch_shape(
    spec: Spec, *, backward: bool, wants_dbias: bool = False, captures: tuple[bool, ...] = ()
) -> tuple[int, ...]:
    """Bytes of scratch; with a symbolic batch (while exporting) one batch entry's worth for each entry."""
    from jattn import _core

    elements = 0
    if spec.score_mod is not None and captures:
        elements = device_gradients.num_elements(spec.score_mod, captures)

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
            capture_elements=elements,
        )

    known = isinstance(spec.batch, int)
    if known:
        return (size(spec.batch),)
    # Not always the most for one entry: two that share a bias need sums of its gradient, and with few entries there
    # are chunks of queries in the place of parts of the gradients of captures.
    return (spec.batch, max(-(-size(n) // n) for n in range(1, _ENTRIES + 1)))
