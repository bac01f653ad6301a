"""Chooses the backend of a problem, and says why the others were turned down. Computes nothing else.

The choice is a pure function of (spec, device, options, needs_grad), apart from backends that a user registers. It
is asked while tracing, so that a refusal is raised at the caller's line, and again inside the lowering, where the
platform is certain.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Collection, Iterable
from typing import Any

from jattn import backends
from jattn.backends.base import Backend, missing_features
from jattn.config import Options
from jattn.device import Device, check_platform, expected, others
from jattn.errors import (
    FallbackWarning,
    NoBackendError,
    Reason,
    describe_refusals,
    warn_caller,
)
from jattn.spec import Spec

_lock = threading.Lock()
_registered: dict[str, list[Backend]] = {}
_changes: list[str] = []  # one entry for each change of _registered: which platform's
_warned: dict[tuple[str, Spec], None] = {}  # in the order of the warnings
_MOST_WARNED = 4096  # the oldest is forgotten then, and would be warned of again


@dataclasses.dataclass(frozen=True)
class Decision:
    """The outcome of a choice.

    Attributes:
      backend: the chosen backend; None if every candidate refused.
      refusals: (name, reasons) of every backend that was turned down, in the order asked; backends after the
        chosen one are asked too, and have no reasons if they would run.
    """

    backend: Backend | None
    refusals: tuple[tuple[str, tuple[Reason, ...]], ...]


def register_backend(platform: str, backend: Backend) -> None:
    """Puts a backend of the user's in front of a platform's order; choices made before are made again.

    Functions that were jitted before keep the backend they were compiled with. On other platforms it is refused; one
    of the same name, or the same one, can be registered there too.

    Args:
      platform: "cpu", "cuda", "tpu", ... as JAX names it when lowering.
      backend: an object with the members of ``jattn.Backend``.

    Raises:
      TypeError: ``backend`` lacks a member, is a class, or has no name.
      ValueError: no platform, or "gpu" as one; the platform has a backend of that name already, or the name is one of
        jattn's.
    """
    check_platform("jattn.register_backend", platform)
    if platform == "gpu":
        raise ValueError(
            "jattn.register_backend: platform is 'gpu', must be the name in lowerings: 'cuda' or 'rocm'"
        )
    if not isinstance(backend, Backend):
        raise TypeError(
            f"jattn.register_backend: backend is {backend!r}, must have the members of jattn.Backend"
        )
    if isinstance(backend, type) or not isinstance(backend.name, str) or not backend.name:
        raise TypeError(
            f"jattn.register_backend: backend is {backend!r}, must be an object whose name is a text: make one of a"
            " class first"
        )
    with _lock:
        group = _registered.get(platform, [])
        if backend.name in {b.name for b in group} | set(backends.KNOWN_NAMES):
            raise ValueError(
                f"jattn.register_backend: backend.name is {backend.name!r}, which is taken; choose another name"
            )
        _set_registered(platform, [backend, *group])


def unregister_backend(platform: str, name: str) -> None:
    """Takes back a ``register_backend``.

    Args:
      platform: as it was given to ``register_backend``.
      name: ``name`` of the backend.

    Raises:
      ValueError: no backend of that name was registered for the platform.
    """
    with _lock:
        kept = [b for b in _registered.get(platform, []) if b.name != name]
        if len(kept) == len(_registered.get(platform, [])):
            raise ValueError(
                f"jattn.unregister_backend: no backend {name!r} is registered for {platform!r}"
            )
        _set_registered(platform, kept)


def _set_registered(platform: str, group: list[Backend]) -> None:
    _registered[platform] = group
    _changes.append(platform)  # last: a choice is kept under the number that it read first


def registrations() -> int:
    """Returns a number that changes with the backends that users have registered: part of the keys of caches."""
    return len(_changes)


def _candidates(platform: str) -> tuple[Backend, ...]:
    order = backends.ORDER.get(platform, backends.ORDER[""])
    return (*_registered.get(platform, ()), *order)


def _order(platform: str, enabled: Collection[str]) -> list[str]:
    """The names that "auto" walks through; of backends that run by name alone those that are enabled by name."""
    names = [b.name for b in _candidates(platform)]
    by_name = [b.name for b in backends.BY_NAME_ONLY if b.name in enabled and b.name not in names]
    fused = [name for name in names if name not in backends.SLOW]
    return fused + by_name + [name for name in names if name in backends.SLOW]


def known_names() -> tuple[str, ...]:
    """Every backend name that may be written, registered ones included."""
    registered = [b.name for group in list(_registered.values()) for b in group]
    return (*dict.fromkeys(registered), *backends.KNOWN_NAMES)


def _backends_for(platform: str) -> dict[str, Backend]:
    """By name: those registered for a platform, and those of the package, which refuse other platforms themselves."""
    groups = (_registered.get(platform, ()), *backends.ORDER.values(), backends.BY_NAME_ONLY)
    return {backend.name: backend for group in groups for backend in group}


def choose(spec: Spec, device: Device, options: Options, needs_grad: bool) -> Decision:
    """Returns the first backend that can run the problem, with the reasons of all others. Raises nothing."""
    return _choose(spec, device, options, needs_grad, registrations())


def expected_device(
    spec: Spec, options: Options, arrays: Iterable[Any], *, needs_grad: bool
) -> Device:
    """Guesses, while tracing, where a call will run: see ``jattn.device.expected``.

    Where nobody could run it there, but on another platform of this process, it is taken to be meant for that: arrays
    on CPUs beside a GPU, under ``jit``.
    """
    guess = expected(options.device, arrays)
    if options.device is not None or choose(spec, guess, options, needs_grad).backend is not None:
        return guess
    for other in others(guess):
        if choose(spec, other, options, needs_grad).backend is not None:
            return other
    return guess


@functools.lru_cache(maxsize=4096)
def _choose(
    spec: Spec, device: Device, options: Options, needs_grad: bool, registrations: int
) -> Decision:
    everything = _backends_for(device.platform)
    order = (
        list(options.implementation)
        if options.implementation is not None
        else _order(device.platform, options.enabled or ())
    )
    names = order + [name for name in known_names() if name not in order]
    chosen: Backend | None = None
    refusals: list[tuple[str, tuple[Reason, ...]]] = []
    for name in names:
        reasons = _reasons(name, everything.get(name), spec, device, options, needs_grad)
        if chosen is None and not reasons and name in order:
            chosen = everything[name]
        else:
            refusals.append((name, reasons))
    return Decision(chosen, tuple(refusals))


def _reasons(
    name: str,
    backend: Backend | None,
    spec: Spec,
    device: Device,
    options: Options,
    needs_grad: bool,
) -> tuple[Reason, ...]:
    reasons: tuple[Reason, ...] = ()
    if options.enabled is not None and name not in options.enabled:
        reasons += (
            Reason(
                name,
                "DISABLED",
                "enabled backends",
                ", ".join(options.enabled) or "none",
                f"must hold {name!r}",
                "leave the jattn.sdpa_kernel context, or name this backend in it",
            ),
        )
    if not options.fused and name not in backends.SLOW:
        reasons += (
            Reason(
                name,
                "DISABLED",
                "jattn.set_enabled",
                False,
                "must be True",
                "call jattn.set_enabled(True), or unset JATTN_DISABLE",
            ),
        )
    platforms = [p for p, group in list(_registered.items()) if name in {b.name for b in group}]
    if backend is None and platforms:
        return (
            *reasons,
            Reason(
                name,
                "PLATFORM",
                "device",
                device,
                f"must be of a platform that it is registered for, {' or '.join(platforms)}",
                f"move the arrays there, or call jattn.register_backend({device.platform!r}, ...)",
            ),
        )
    if backend is None:
        return (
            *reasons,
            Reason(
                name,
                "NOT_BUILT",
                "backend",
                name,
                "is not part of this version of jattn",
                "leave the choice to jattn",
            ),
        )
    reasons += missing_features(backend, spec)
    return reasons + backend.unsupported(
        spec, device, needs_grad=needs_grad, determinism=options.determinism
    )


def choose_or_raise(spec: Spec, device: Device, options: Options, *, needs_grad: bool) -> Backend:
    """Returns the chosen backend; raises or warns where the choice calls for it.

    Raises:
      NoBackendError: no backend is enabled, every candidate refused, or a slow backend was chosen although
        ``strict_fallback`` forbids it.
    """
    decision = choose(spec, device, options, needs_grad)
    asked = options.enabled if options.implementation is None else options.implementation
    if asked is not None and len(asked) == 0:
        raise NoBackendError(
            "No viable backend for scaled_dot_product_attention was found: the set of enabled backends is empty;"
            " name at least one in jattn.sdpa_kernel or implementation="
        )
    refusals = {
        name: reasons
        for name, reasons in decision.refusals
        if reasons and (asked is None or name in asked or decision.backend is not None)
    }
    if decision.backend is None:
        for name, reasons in refusals.items():
            for reason in reasons:
                warn_caller(f"jattn: {name}: {reason}", UserWarning)
        header = f"jattn.dot_product_attention: No available kernel for this problem on {device}\n  {spec}"
        every = tuple(reason for reasons in refusals.values() for reason in reasons)
        raise NoBackendError(describe_refusals(header, refusals), every)
    _check_fallback(decision.backend, refusals, spec, device, options)
    return decision.backend


def _check_fallback(
    backend: Backend,
    refusals: dict[str, tuple[Reason, ...]],
    spec: Spec,
    device: Device,
    options: Options,
) -> None:
    """Warns once, or raises, when a slow backend stands in for the fused ones of the platform without being asked
    for.
    """
    fused = [b.name for b in _candidates(device.platform) if b.name not in backends.SLOW]
    named = options.implementation is not None and backend.name == options.implementation[0]
    only_slow = options.enabled is not None and set(options.enabled) <= backends.SLOW
    if backend.name not in backends.SLOW or not fused or named or only_slow or not options.fused:
        return
    asked = options.implementation or ()
    turned_down = {
        name: reasons
        for name, reasons in refusals.items()
        if name in fused or (name in asked and name not in backends.SLOW)
    }
    text = describe_refusals(
        f"jattn.dot_product_attention: the slow backend {backend.name!r} stands in on {device}\n  {spec}",
        turned_down,
    )
    if options.strict_fallback:
        every = tuple(reason for reasons in turned_down.values() for reason in reasons)
        raise NoBackendError(text, every)
    if (backend.name, spec) in _warned:
        return
    warn_caller(
        text, FallbackWarning
    )  # raises where warnings are errors, and then at the next call, too
    with _lock:
        _warned[backend.name, spec] = None
        if len(_warned) > _MOST_WARNED:
            del _warned[next(iter(_warned))]
