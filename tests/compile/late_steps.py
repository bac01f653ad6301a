"""A model of programs that wait for each other: what hangs, and what somebody late would read.

Programs are straight lines and signals are only counted up, so whether all end does not depend on
the order of events: one order shows it. Who comes late is looked for at every wait and every read:
held there while all others run on. Who comes early reads what a writer, held before it writes, has yet to write.
"""

import dataclasses
from collections import Counter

Place = tuple[object, ...]


@dataclasses.dataclass(frozen=True)
class Step:
    """One action: "wait" until `number` signals of a barrier, "signal", "write", or "read" of the version `number`.

    per_phase: signals that end a phase of the barrier that is waited for.
    """

    action: str
    place: Place
    number: int = 0
    per_phase: int = 1


def run(
    programs: list[list[Step]], hold: tuple[int, int] | None = None
) -> tuple[list[int], Counter[tuple[str, Place]]]:
    """Runs all programs as far as they come; `hold`: this program stops before this step."""
    at = [0] * len(programs)
    counted: Counter[tuple[str, Place]] = Counter()
    moved = True
    while moved:
        moved = False
        for i, steps in enumerate(programs):
            while at[i] < len(steps) and (i, at[i]) != hold:
                step = steps[at[i]]
                if step.action == "wait" and step.number > counted["signal", step.place]:
                    break
                counted[step.action, step.place] += step.action != "wait"
                at[i] += 1
                moved = True
    return at, counted


def faults(programs: list[list[Step]]) -> set[str]:
    """What is wrong: a program that does not end, a barrier that runs ahead of who waits, a read of a later version."""
    at, _ = run(programs)
    found = {
        f"stops at {steps[at[i]].place}" for i, steps in enumerate(programs) if at[i] < len(steps)
    }
    for i, steps in enumerate(programs):
        for j, step in enumerate(steps):
            if step.action not in ("wait", "read"):
                continue
            counted = run(programs, (i, j))[1]
            if step.action == "read" and counted["write", step.place] != step.number:
                found.add(f"{step.place[0]} is read late")
            ahead = counted["signal", step.place] - step.number
            if step.action == "wait" and ahead >= step.per_phase:
                found.add(f"{step.place} runs ahead")
    return found


def early_reads(programs: list[list[Step]]) -> set[str]:
    """Reads of a version that its writer, held before every write in turn, has not written yet."""
    found = set()
    for i, steps in enumerate(programs):
        for j, step in enumerate(steps):
            if step.action != "write":
                continue
            at, counted = run(programs, (i, j))
            written = counted["write", step.place]
            for other, end in zip(programs, at, strict=True):
                reads = (x for x in other[:end] if x.action == "read" and x.place == step.place)
                if any(read.number > written for read in reads):
                    found.add(f"{step.place[0]} is read early")
    return found
