"""The machine a problem is to run on, as data: asked of JAX, or made up for tests and for lowering elsewhere."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax

from jattn import jax_interface

# Names that are misspelt in capitals; other platforms may be called anything.
_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")


@dataclasses.dataclass(frozen=True)
class Device:
    """One kind of device.

    Attributes:
      platform: "cpu", "cuda", "tpu", ... as JAX names it when lowering.
      arch: compute capability of a CUDA device, for example (9, 0); None elsewhere.
      cudnn: version of the cuDNN library there, 91900 for 9.19.0, 0 if it is missing; None if that is not known.

    Raises:
      ValueError: no name, "CPU" for "cpu" and the like, another name for "cuda"; an arch that is not a pair of integers
        from 0 on; a cudnn that is no such integer.
    """

    platform: str
    arch: tuple[int, int] | None = None
    cudnn: int | None = None

    def __post_init__(self) -> None:
        check_platform("jattn.Device", self.platform)
        if self.platform in ("gpu", "nvidia"):
            raise ValueError(
                f"jattn.Device: platform is {self.platform!r}, must be 'cuda' for NVIDIA GPUs"
            )
        is_pair = isinstance(self.arch, tuple) and len(self.arch) == 2
        is_arch = is_pair and all(_is_number(x) for x in self.arch or ())
        if self.arch is not None and not is_arch:
            raise ValueError(
                f"jattn.Device: arch is {self.arch!r}, must be (major, minor) as integers, as (9, 0), or None"
            )
        if self.cudnn is not None and not _is_number(self.cudnn):
            raise ValueError(
                f"jattn.Device: cudnn is {self.cudnn!r}, must be an integer (91900 is 9.19.0), 0 where it is"
                " missing, or None"
            )

    def __str__(self) -> str:
        return f"{self.platform} sm_{self.arch[0]}{self.arch[1]}" if self.arch else self.platform


def check_platform(function: str, name: object) -> None:
    """Refuses what is no name of a platform as JAX has it when lowering; ``function`` was given it."""
    is_name = isinstance(name, str) and name != ""
    if not is_name or (str(name).lower() in _PLATFORMS and name not in _PLATFORMS):
        raise ValueError(
            f"{function}: platform is {name!r}, must be a name as JAX has it: {', '.join(map(repr, _PLATFORMS))}"
        )


def _is_number(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


# What a lowering for CUDA assumes on a machine without a GPU when no device was named (jattn.target_device names
# one).
ASSUMED_CUDA = Device("cuda", arch=(9, 0))


def expected(named: Device | None, arrays: Iterable[Any] = ()) -> Device:
    """Guesses, while tracing, the device that a call will be lowered for.

    The lowering asks again with certainty; this guess only decides whether a refusal is raised at the caller's line.

    Args:
      named: the device, if the caller has said so.
      arrays: what the call reads; one that has been put on a device shows where it runs, traced ones do not.
    """
    if named is not None:
        return named
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed:
            return describe(_lowering_platform(next(iter(x.devices())).platform))
    default = jax.config.values["jax_default_device"]
    if isinstance(default, jax.Device):
        return describe(_lowering_platform(default.platform))
    if isinstance(default, str):
        return describe(_lowering_platform(default))
    return describe(_lowering_platform(jax.default_backend()))


def others(guess: Device) -> list[Device]:
    """Further devices of this process that traced arrays may lie on: of CPUs, and of the default platform."""
    found = (describe("cpu"), describe(_lowering_platform(jax.default_backend())))
    return [device for device in found if device.platform != guess.platform]


@functools.lru_cache(maxsize=16)
def describe(platform: str) -> Device:
    """Describes the first device of ``platform`` in this process, or the assumed one if the process has none."""
    if platform != "cuda":
        return Device(platform)
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return ASSUMED_CUDA
    major, minor = (int(part) for part in str(device.compute_capability).split("."))
    return Device("cuda", arch=(major, minor), cudnn=jax_interface.cudnn_version())


def checked(name: str, device: object) -> Device:
    """Returns ``device`` if it is one of ours; ``name`` is the function that was given it.

    Raises:
      TypeError: it is not.
    """
    if not isinstance(device, Device):
        raise TypeError(
            f"{name}: device is {device!r}, must be a jattn.Device: jattn.Device('cpu'), or jattn.Device('cuda',"
            " arch=(9, 0))"
        )
    return device


@functools.lru_cache(maxsize=16)
def _lowering_platform(name: str) -> str:
    """The name in lowerings of a platform as ``jax.Device.platform`` says it: both kinds of GPU are "gpu" there."""
    if name != "gpu":
        return name
    try:
        jax.devices("rocm")
    except RuntimeError:
        return "cuda"
    return "rocm"
