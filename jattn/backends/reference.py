"""The backend "reference": the whole score matrix in plain jnp. Takes everything, last in every order."""

from __future__ import annotations

import jax

from jattn import reference
from jattn.backends.base import Backend, Residuals, Wants
from jattn.config import Determinism
from jattn.device import Device
from jattn.errors import Reason
from jattn.reference import Gradients
from jattn.spec import FEATURES, Operands, Spec


class ReferenceBackend:
    """Computes by the definition; memory grows with T * S."""

    name = "reference"
    understands = frozenset(FEATURES)

    def for_backward(self) -> Backend:
        """This backend runs its backward pass itself."""
        return self

    def unsupported(
        self, spec: Spec, device: Device, *, needs_grad: bool, determinism: Determinism
    ) -> tuple[Reason, ...]:
        """Refuses nothing."""
        return ()

    def forward(
        self, spec: Spec, operands: Operands[jax.Array], device: Device
    ) -> tuple[jax.Array, jax.Array]:
        """Returns out and lse."""
        return reference.forward(spec, operands)

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
        return reference.backward(
            spec, operands, residuals.out, residuals.lse, residuals.dout, residuals.dlse
        )
