"""Times several contenders against each other: interleaved rounds, many asynchronous calls a round, wall clock."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence

import numpy as np

# The host's part of longer calls is not measured: none takes as long to start.
LONGEST_STARTED_SECONDS = 2e-3


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
    enqueue_seconds: float | None = (
        None  # the host's part of a call; None where that is no question
    )

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


def enqueue_seconds(contender: Contender, repeats: int = 5, calls: int = 8) -> float:
    """Returns the host's part of a call: the median of repeats of so few calls that no queue is full."""
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            results = contender.enqueue()
        found.append((time.perf_counter() - begin) / calls)
        contender.wait(results)
    return float(np.median(found))


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


def balanced_orders(count: int, rounds: int, seed: int = 0) -> list[list[int]]:
    """Orders of ``count`` contenders, one for each round.

    In ``count`` rounds (twice as many if it is odd) each contender stands as often in each place and behind each of the
    others: the design of E. J. Williams, 1949, with contenders numbered at random.
    """
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    zigzag = [(i + 1) // 2 if i % 2 else -(i // 2) % max(count, 1) for i in range(count)]
    orders = []
    for at in range(rounds):
        order = [numbers[(place + at) % count] for place in zigzag]
        orders.append(order[::-1] if count % 2 and at // max(count, 1) % 2 else order)
    return orders


def compare(
    contenders: Sequence[Contender],
    rounds: int,
    round_seconds: float,
    seed: int = 0,
    pause_seconds: float = 0.0,
) -> dict[str, Timing]:
    """Times contenders in rounds; every round runs all of them once, in orders that are balanced over rounds.

    Clocks and heat drift by several percent within a minute, and the contender before leaves its own behind;
    interleaving puts both on everyone alike. On a CPU
    pauses before each contender let the threads of the one before come to rest: PyTorch's spin for some 7 ms behind
    a call (2.13, two threads), on cores that the next contender is timed on, and the memory of a call of jax.nn, 1 GiB
    for 4096 keys, is given back behind it.
    """
    calls = {contender.name: calls_for(contender, round_seconds) for contender in contenders}
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for order in balanced_orders(len(contenders), rounds, seed):
        for contender in (contenders[number] for number in order):
            come_to_rest(pause_seconds)
            if calls[contender.name] > 1:
                # Brings the clock up and the caches to this contender's state. One call that fills a round does it by
                # itself.
                run_many(contender, 1)
            seconds[contender.name].append(
                run_many(contender, calls[contender.name]) / calls[contender.name]
            )
    found = {}
    for contender in contenders:
        timing = Timing(tuple(seconds[contender.name]), calls[contender.name])
        if timing.median_seconds < LONGEST_STARTED_SECONDS:
            timing = dataclasses.replace(timing, enqueue_seconds=enqueue_seconds(contender))
        found[contender.name] = timing
    return found
