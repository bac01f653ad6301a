"""Instruction sets of the CPU kernel that this machine can run, the best one first. A test that forces one leaves the
best behind (conftest.py).
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from jattn import _core

INSTRUCTION_SETS = tuple(_core.cpu_instruction_sets())


def force(name: str) -> None:
    """Makes the kernel run on this set, or on the best one: ""."""
    assert _core.cpu_force_instruction_set(name)


def on_every_set(run: Callable[[], Any]) -> Iterator[tuple[str, Any]]:
    """What a compiled program gives on each instruction set, which is chosen when the kernel is called."""
    for name in INSTRUCTION_SETS:
        force(name)
        yield name, jax.device_get(run())
