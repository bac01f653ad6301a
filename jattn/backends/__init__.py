"""The backends, and the order in which "auto" tries them: the only list of backends there is."""

from __future__ import annotations

from jattn.backends.base import Backend, Residuals, Wants
from jattn.backends.cpu import CpuBackend
from jattn.backends.cudnn import CudnnBackend
from jattn.backends.flash import FlashBackend
from jattn.backends.mem_efficient import MemEfficientBackend
from jattn.backends.reference import ReferenceBackend
from jattn.backends.xla import XlaBackend

__all__ = [
    "BY_NAME_ONLY",
    "KNOWN_NAMES",
    "ORDER",
    "SLOW",
    "Backend",
    "Residuals",
    "Wants",
]

_REFERENCE = ReferenceBackend()
_XLA = XlaBackend()

# Platform -> what "auto" walks through; every other platform has the entry "".
ORDER: dict[str, tuple[Backend, ...]] = {
    "cpu": (CpuBackend(), _XLA, _REFERENCE),
    "cuda": (FlashBackend(), MemEfficientBackend(), _XLA, _REFERENCE),
    "": (_XLA, _REFERENCE),
}

# Run where they are named, and are no choice of "auto".
BY_NAME_ONLY: tuple[Backend, ...] = (CudnnBackend(),)

# Backends that stand in for a platform's fused ones: using one of them where a fused one exists warns once.
SLOW = frozenset({"xla", "reference"})

# Every name a user may write, in the order of ``explain``.
KNOWN_NAMES = ("flash", "mem_efficient", "cudnn", "cpu", "xla", "reference")
