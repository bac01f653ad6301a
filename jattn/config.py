"""What a caller wants of jattn, as opposed to what attention means: options, their context, environment variables.

``Options`` is read once, in the public function, and travels from there in the parameters of the primitives: a
backward rule or a lowering may run when the context has long been left.

Environment variables, read when jattn is imported:
  JATTN_DISABLE        anything but empty and "0": only the backends "xla" and "reference" are used
  JATTN_CACHE_DIR      folder of the CUDA kernel cache (default: $XDG_CACHE_HOME/jattn or ~/.cache/jattn)
  JATTN_KERNEL_CACHE   "off" or "0": no kernel cache on disk
  JATTN_NVRTC          path of the NVRTC library to open instead of the one that JAX's CUDA packages bring
  XLA_FLAGS            if it asks XLA for deterministic GPU operations, ``jattn.deterministic("strict")`` is the default
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import jax

from jattn.device import Device, checked

Determinism = Literal["off", "warn", "strict"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the caller wants of us.

    Attributes:
      enabled: backends that may be used, in no particular order; None: all of them.
      implementation: backends named by the call itself, tried in this order; None: the platform's order.
      determinism: "strict" asks for a backward pass whose bits never vary; "warn" warns when they may.
      strict_fallback: makes it an error when a much slower backend would stand in for the fused ones.
      device: the machine to choose for; None: where the arrays are.
      fused: False turns every kernel of ours off.
    """

    enabled: tuple[str, ...] | None = None
    implementation: tuple[str, ...] | None = None
    determinism: Determinism = "off"
    strict_fallback: bool = False
    device: Device | None = None
    fused: bool = True


_DETERMINISM_FLAGS = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")


def _asks_determinism(flags: str) -> bool:
    """Whether ``XLA_FLAGS`` asks for deterministic GPU operations, read as by XLA: flags, or the name of their file."""
    if flags.strip() and not flags.lstrip().startswith("-"):
        try:
            flags = Path(flags.strip()).read_text()
        except (OSError, UnicodeDecodeError):
            return False  # which XLA says itself
    asked = {}  # the last value of a flag counts
    for word in flags.split():
        name, separator, value = word.partition("=")
        asked[name] = not separator or value.lower() in ("true", "1")
    return any(asked.get(name, False) for name in _DETERMINISM_FLAGS)


def _starting_options() -> Options:
    """The options of a process: what the environment says, else the defaults of ``Options``."""
    return Options(
        fused=os.environ.get("JATTN_DISABLE", "") in ("", "0"),
        determinism="strict" if _asks_determinism(os.environ.get("XLA_FLAGS", "")) else "off",
    )


_DEFAULT = _starting_options()

# Part of jit's cache key: entering another value retraces, an equal value hits. Making it starts no backend.
_context = jax.make_user_context(_DEFAULT)


def current_options() -> Options:
    """Returns the options in force here; called by the public functions only."""
    options = _context.value
    assert isinstance(options, Options)
    return options


@contextlib.contextmanager
def use_options(options: Options) -> Iterator[None]:
    """Puts ``options`` in force inside the ``with`` block; nests, and is part of jit's cache key."""
    with _context(options):
        yield


@contextlib.contextmanager
def sdpa_kernel(backends: str | Sequence[str]) -> Iterator[None]:
    """Restricts the backends that may be used inside the ``with`` block.

    Args:
      backends: one name or several of "flash", "mem_efficient", "cudnn", "cpu", "xla", "reference", or of backends
        given to ``jattn.register_backend``. An empty sequence enables none.

    Raises:
      ValueError: not names; by a call inside the block, a name that is no backend's.
    """
    names = (backends,) if isinstance(backends, str) else backends
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"jattn.sdpa_kernel: backends is {backends!r}, must be the name of a backend or a sequence of names"
        )
    with use_options(dataclasses.replace(current_options(), enabled=tuple(names))):
        yield


@contextlib.contextmanager
def deterministic(mode: Determinism = "strict") -> Iterator[None]:
    """Sets how much the bits of a backward pass may vary from run to run inside the ``with`` block.

    On one kind of device with one build, the bits are the same in every mode in forward passes, in backward passes on
    a CPU and in those of "flash" above head dim 192 that run on kernels of its own. Other backward passes of "flash"
    and "mem_efficient", and all of "cudnn", add up dq in an order that varies; on GPUs every backend, "xla" too, adds
    up the gradients of what ``score_mod`` reads in such an order.

    Args:
      mode: "strict" uses the deterministic form of every kernel, and refuses what has none: backward passes of "cudnn",
        and gradients of captures that XLA adds up on a GPU. "warn" warns at trace time where the bits of a gradient
        would vary, "off" says nothing.

    Raises:
      ValueError: another mode.
    """
    if mode not in ("off", "warn", "strict"):
        raise ValueError(
            f"jattn.deterministic: mode is {mode!r}, must be 'off', 'warn' or 'strict'"
        )
    with use_options(dataclasses.replace(current_options(), determinism=mode)):
        yield


@contextlib.contextmanager
def strict_fallback(enabled: bool = True) -> Iterator[None]:
    """Makes it an error, inside the ``with`` block, when "xla" or "reference" would stand in for a fused backend.

    Such a call raises ``jattn.NoBackendError``, with the reasons of the fused ones, while it is traced. Derivatives in
    forward mode (``jax.jvp``, ``jax.jacfwd``) are no such call: no fused backend has them, and "xla" computes them,
    here too.

    Args:
      enabled: False allows it again in an inner block.

    Raises:
      TypeError: not a bool.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"jattn.strict_fallback: enabled is {enabled!r}, must be True or False")
    with use_options(dataclasses.replace(current_options(), strict_fallback=enabled)):
        yield


@contextlib.contextmanager
def target_device(device: Device) -> Iterator[None]:
    """Chooses backends for ``device`` inside the ``with`` block, whatever machine this is (lowering for
    elsewhere).

    Args:
      device: for example ``jattn.Device("cuda", arch=(9, 0))``.

    Raises:
      TypeError: not a ``jattn.Device``.
    """
    device = checked("jattn.target_device", device)
    with use_options(dataclasses.replace(current_options(), device=device)):
        yield


def set_enabled(enabled: bool) -> None:
    """Turns every kernel of jattn on or off for the whole process; functions that were jitted before are traced
    again.

    Threads that are inside ``sdpa_kernel`` or another context of this module keep that context's options.

    Args:
      enabled: False leaves "xla" and "reference" alone, as the environment variable ``JATTN_DISABLE=1`` does.

    Raises:
      TypeError: not a bool.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"jattn.set_enabled: enabled is {enabled!r}, must be True or False")
    of_process = _context.get_global()  # current_options() may be those of a context
    assert isinstance(of_process, Options)
    _context.set_global(dataclasses.replace(of_process, fused=enabled))


@dataclasses.dataclass(frozen=True)
class Environment:
    """Facts of the machine that come from environment variables."""

    kernel_cache_dir: Path
    kernel_cache_enabled: bool
    nvrtc_path: str


def environment() -> Environment:
    """Reads the environment variables named at the top of this module."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Environment(
        kernel_cache_dir=Path(os.environ.get("JATTN_CACHE_DIR") or os.path.join(base, "jattn")),
        kernel_cache_enabled=os.environ.get("JATTN_KERNEL_CACHE", "on").lower() not in ("off", "0"),
        nvrtc_path=os.environ.get("JATTN_NVRTC", ""),
    )
