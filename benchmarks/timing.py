"""Times several contenders against each other: interleaved rounds, many asynchronous calls a round, wall clock."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something that can be timed.

    Attributes:
      name: in tables and files.
      enqueue: starts one call and returns its results without waiting for them.
      wait: blocks until the given results exist.
      results: turns them into named arrays (out, dq, dk, dv, dbias) in the public layout.
    """

    name: str
    enqueue: Callable[[], object]
    wait: Callable[[object], None]
    results: Callable[[object], dict[str, object]]


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of one call, over the rounds."""

    seconds: tuple[float, ...]  # of one call, one entry per round
    calls_per_round: int

    @property
    def median_seconds(self) -> float:
        return float(np.median(self.seconds))

    @property
    def spread(self) -> float:
        """How far apart the fastest and the slowest round are, relative to the median."""
        return (max(self.seconds) - min(self.seconds)) / self.median_seconds


def disagreement(contenders: Sequence[Contender], tolerance: float) -> str:
    """Says which result of which contender differs from the first one's by more; empty if none does.

    ``tolerance``: of the largest difference, over the largest value.
    """
    first = contenders[0].results(contenders[0].enqueue())
    for other in contenders[1:]:
        for name, x in other.results(other.enqueue()).items():
            a, b = (np.asarray(y).astype(np.float32) for y in (first[name], x))
            apart = float(np.abs(a - b).max() / np.abs(a).max())
            if not apart <= tolerance:
                return f"{name} of {other.name} is {apart:.1e} of the largest value off"
    return ""


def run_many(contender: Contender, calls: int) -> float:
    """Returns the wall time of a number of calls that are enqueued one after another and then awaited."""
    begin = time.perf_counter()
    results: object = None
    for _ in range(calls):
        results = contender.enqueue()
    contender.wait(results)
    return time.perf_counter() - begin


def calls_for(contender: Contender, round_seconds: float, max_calls: int = 2000) -> int:
    """Finds how many calls fill a round; warms the contender up on the way."""
    run_many(contender, 1)
    calls = 1
    while True:
        seconds = run_many(contender, calls)
        if seconds >= round_seconds / 4 or calls >= max_calls:
            return max(1, min(max_calls, round(calls * round_seconds / seconds)))
        calls = min(max_calls, 4 * calls)


def come_to_rest(pause_seconds: float, most_pauses: int = 50) -> None:
    """Sleeps in pauses until this process computes for less than a tenth of one."""
    for _ in range(most_pauses if pause_seconds > 0 else 0):
        begin = time.process_time()
        time.sleep(pause_seconds)
        if time.process_time() - begin < pause_seconds / 10:
            return


def compare(
    contenders: Sequence[Contender],
    rounds: int,
    round_seconds: float,
    seed: int = 0,
    pause_seconds: float = 0.0,
) -> dict[str, Timing]:
    """Times contenders in rounds; every round runs all of them once, each round in another random order.

    Clocks and heat drift by several percent within a minute; interleaving puts that drift on everyone alike. On a CPU
    pauses before each contender let the threads of the one before come to rest: PyTorch's spin for some 7 ms behind
    a call (2.13, two threads), on cores that the next contender is timed on, and the memory of a call of jax.nn, 1 GiB
    for 4096 keys, is given back behind it.
    """
    order = list(contenders)
    calls = {contender.name: calls_for(contender, round_seconds) for contender in order}
    seconds: dict[str, list[float]] = {contender.name: [] for contender in order}
    shuffle = random.Random(seed)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for contender in order:
            come_to_rest(pause_seconds)
            if calls[contender.name] > 1:
                # Brings the clock up and the caches to this contender's state. One call that fills a round does it by
                # itself.
                run_many(contender, 1)
            seconds[contender.name].append(
                run_many(contender, calls[contender.name]) / calls[contender.name]
            )
    return {name: Timing(tuple(values), calls[name]) for name, values in seconds.items()}
