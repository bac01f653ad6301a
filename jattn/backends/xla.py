"""The backend "xla": tiles in plain jnp, memory linear in the lengths, on every platform."""

from __future__ import annotations

import jax

from jattn import blocked
from jattn.backends.base import LENGTHS, Backend, Residuals, Wants, symbolic_extents
from jattn.config import Determinism
from jattn.device import Device
from jattn.errors import Reason
from jattn.reference import Gradients
from jattn.spec import FEATURES, Operands, Spec


class XlaBackend:
    """Computes tile by tile with XLA's own operations."""

    name = "xla"
    understands = frozenset(FEATURES)

    def for_backward(self) -> Backend:
        """This backend runs its backward pass itself."""
        return self

    def unsupported(
        self, spec: Spec, device: Device, *, needs_grad: bool, determinism: Determinism
    ) -> tuple[Reason, ...]:
        """Refuses lengths that are not known numbers: they decide the number of tiles."""
        rule = "must be a known number; all but the lengths may be symbolic"
        return symbolic_extents(self.name, spec, LENGTHS, rule)

    def forward(
        self, spec: Spec, operands: Operands[jax.Array], device: Device
    ) -> tuple[jax.Array, jax.Array]:
        """Returns out and lse."""
        return blocked.forward(spec, operands)

    def backward(
        self,
        spec: Spec,
        operands: Operands[jax.Array],
        residuals: Residuals,
        wants: Wants,
        device: Device,
        determinism: Determinism,
    ) -> Gradients:
        """Returns all gradients."""
        operands = operands._replace(sinks=residuals.sinks)
        return blocked.backward(
            spec, operands, residuals.out, residuals.lse, residuals.dout, residuals.dlse
        )
