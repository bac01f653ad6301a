"""A model of programs that wait for each other: what hangs, and what somebody late would read.

Programs are straight lines and signals are only counted up, so whether all end does not depend on
the order of events: one order shows it. Who comes late is looked for at every wait and every read:
held there while all others run on. Who comes early reads what a writer, held before it writes, has yet to write.

Models are written after the kernels by hand. They show that a protocol is right, not that the code keeps to it: for
that there are builds that sleep at random (docs/kernels/log.md).
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator

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


class Run:
    """Programs that go on as far as they come.

    Attributes:
      at: the next step of each.
      counted: signals and writes by place.
      latest: the latest version that was read of each place.
    """

    def __init__(self, programs: list[list[Step]]) -> None:
        self.programs = programs
        self.at = [0] * len(programs)
        self.counted: Counter[tuple[str, Place]] = Counter()
        self.latest: Counter[Place] = Counter()

    def go_on(self, hold: tuple[int, int] | None = None) -> None:
        """`hold`: this program stops before this step."""
        moved = True
        while moved:
            moved = False
            for i, steps in enumerate(self.programs):
                first = at = self.at[i]
                end = hold[1] if hold and hold[0] == i else len(steps)
                while at < end:
                    step = steps[at]
                    if step.action == "wait":
                        if step.number > self.counted["signal", step.place]:
                            break
                    elif step.action == "read":
                        self.latest[step.place] = max(self.latest[step.place], step.number)
                    else:
                        self.counted[step.action, step.place] += 1
                    at += 1
                self.at[i] = at
                moved = moved or at > first


def run(programs: list[list[Step]]) -> tuple[list[int], Counter[tuple[str, Place]]]:
    """How far all programs come, and the signals and writes until then."""
    whole = Run(programs)
    whole.go_on()
    return whole.at, whole.counted


def held_before(programs: list[list[Step]], *actions: str) -> Iterator[tuple[Step, Run]]:
    """Every step of these actions with what happens while its program is held before it.

    Nothing that was possible becomes impossible when the program is held later, so one run serves all its steps.
    """
    for i, steps in enumerate(programs):
        held = Run(programs)
        for j, step in enumerate(steps):
            if step.action in actions:
                held.go_on((i, j))
                yield step, held


def faults(programs: list[list[Step]]) -> set[str]:
    """What is wrong: a program that does not end, a barrier that runs ahead of who waits, a read of a later version."""
    at, _ = run(programs)
    found = {
        f"stops at {steps[at[i]].place}" for i, steps in enumerate(programs) if at[i] < len(steps)
    }
    for step, held in held_before(programs, "wait", "read"):
        if step.action == "read" and held.counted["write", step.place] != step.number:
            found.add(f"{step.place[0]} is read late")
        ahead = held.counted["signal", step.place] - step.number
        if step.action == "wait" and ahead >= step.per_phase:
            found.add(f"{step.place} runs ahead")
    return found


def early_reads(programs: list[list[Step]]) -> set[str]:
    """Reads of a version that its writer, held before every write in turn, has not written yet."""
    return {
        f"{step.place[0]} is read early"
        for step, held in held_before(programs, "write")
        if held.latest[step.place] > held.counted["write", step.place]
    }
