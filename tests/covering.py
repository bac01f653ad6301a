"""Few cases of a long list that between them have what all of it has."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def chosen(cases: Sequence[T], features: Callable[[T], Iterable[str]], most: int = 0) -> list[T]:
    """Takes the case with most features that none has so far, and again until no case has any.

    Args:
      most: how many cases to take at most; 0: as many as it needs.
    """
    found = [set(features(case)) for case in cases]
    picked: list[T] = []
    while any(found) and not 0 < most == len(picked):
        best = max(range(len(cases)), key=lambda i: len(found[i]))
        picked.append(cases[best])
        found = [each - found[best] for each in found]
    return picked
