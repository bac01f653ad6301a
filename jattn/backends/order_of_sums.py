"""Which sums of a backward pass come in an order that varies from run to run on a GPU, and with it the last bits."""

from __future__ import annotations

from typing import NamedTuple

from jattn.backends import flash, mem_efficient
from jattn.backends.base import Backend, Wants
from jattn.device import Device
from jattn.spec import Spec

# Backends whose kernels add up the gradients of captures where ``mem_efficient.sums_captures`` says so, and with the
# same bits every time if asked for that.
_SUMS_CAPTURES = frozenset({"flash", "mem_efficient"})


class VaryingSums(NamedTuple):
    """What of a backward pass varies unless the mode is "strict".

    Attributes:
      dq: the gradient of q.
      captures: gradients of captures, which a kernel of ours adds up.
      captures_of_xla: gradients of captures, which XLA adds up: it has no other way.
    """

    dq: bool = False
    captures: bool = False
    captures_of_xla: bool = False


def varying_sums(backend: Backend, spec: Spec, wants: Wants, device: Device) -> VaryingSums:
    """Says what varies in the backward pass that ``backend`` runs.

    Args:
      backend: that of the backward pass.
      spec: the problem.
      wants: which gradients are wanted.
      device: where it is to run.
    """
    if device.platform != "cuda":
        return VaryingSums()
    spec = spec.without_sinks()
    of_kernel = backend.name in _SUMS_CAPTURES and mem_efficient.sums_captures(spec, wants.captures)
    return VaryingSums(
        dq=_dq_varies(backend.name, spec, wants, device),
        captures=of_kernel,
        captures_of_xla=any(wants.captures) and not of_kernel,
    )


def _dq_varies(backend: str, spec: Spec, wants: Wants, device: Device) -> bool:
    if not wants.q:
        return False
    match backend:
        case "flash":
            return flash.dq_varies(spec, wants, device)
        case "mem_efficient":
            return mem_efficient.dq_varies(spec, wants, device)
        case _:
            return backend == "cudnn"
