"""What happened while lowering: how many call sites each backend got, by pass."""

from __future__ import annotations

import collections
import threading

_lock = threading.Lock()
_calls: collections.Counter[tuple[str, str]] = collections.Counter()


def count_call(backend: str, pass_name: str) -> None:
    """Notes that one call site was lowered to ``backend``; ``pass_name`` is "forward", "backward" or "tangent"."""
    with _lock:
        _calls[backend, pass_name] += 1


def call_counters() -> dict[str, dict[str, int]]:
    """Returns backend -> pass -> number of call sites lowered in this process since the last reset.

    A call site is counted when it is lowered; running a compiled function again does not count.
    """
    with _lock:
        counts: dict[str, dict[str, int]] = {}
        for (backend, pass_name), number in sorted(_calls.items()):
            counts.setdefault(backend, {})[pass_name] = number
        return counts


def reset_call_counters() -> None:
    """Sets all counters to zero."""
    with _lock:
        _calls.clear()
