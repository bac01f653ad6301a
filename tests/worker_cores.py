"""Which cores a worker of pytest-xdist keeps to."""

from collections.abc import Set


def share(worker: str, num_workers: int, cores: Set[int]) -> set[int]:
    """Returns the cores of a worker, "gw0" to "gw<num_workers - 1>", of those that all of them may use.

    No two workers share a core, but where there are fewer cores than workers: then each has one.
    """
    index, ordered = int(worker.removeprefix("gw")), sorted(cores)
    return set(ordered[index::num_workers]) or {ordered[index % len(ordered)]}
