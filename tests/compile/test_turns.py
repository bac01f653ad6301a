"""Warpgroups that take turns: a model of who waits for whom.

The model holds every wait and signal of the producer and of the consumer warpgroups
(cc/kernels/sm90/{producer,consumer,turns}.cuh). Programs are straight lines and signals are only
counted up, so whether the kernel comes to its end does not depend on the order of events: one order
shows it. What a participant may miss, namely a barrier that runs two phases ahead of it, is looked
for at every step by holding that participant there and letting all others run.
"""

import dataclasses
import random
from collections import Counter

import pytest

Event = tuple[str, int, int]  # what is counted, for which warpgroup (-1: for all), of which stage


@dataclasses.dataclass(frozen=True)
class Step:
    """Waits until `event` has been counted `number` times, or counts it once if `number` is 0."""

    event: Event
    number: int = 0


@dataclasses.dataclass(frozen=True)
class Item:
    """A number of key tiles, and for each warpgroup those that it skips first and those that it leaves at the end."""

    tiles: int
    skips: tuple[int, ...]
    leaves: tuple[int, ...]


def producer(items: list[Item], warpgroups: int, stages: int) -> list[Step]:
    """k one tile ahead of v; q of an item behind its first k."""
    steps: list[Step] = []

    def load(kind: str, tile: int, places: int = stages) -> None:
        stage, rounds = tile % places, tile // places
        if rounds:
            steps.extend(Step((f"{kind} empty", w, stage), rounds) for w in range(warpgroups))
        steps.append(Step((f"{kind} full", -1, stage)))

    first = 0
    for number, item in enumerate(items):
        if item.tiles:
            load("k", first)
        load("q", number, 1)
        for tile in range(first, first + item.tiles):
            if tile + 1 < first + item.tiles:
                load("k", tile + 1)
            load("v", tile)
        first += item.tiles
    load("q", len(items), 1)
    return steps


@dataclasses.dataclass
class Consumer:
    """The steps of one warpgroup; q_is_late: the place of q is free only at the end of the item."""

    me: int
    warpgroups: int
    stages: int
    softmax_last: bool
    q_is_late: bool
    turns_of_skipped_tiles: bool
    steps: list[Step] = dataclasses.field(default_factory=list)
    turns: int = 0

    def wait(self, kind: str, tile: int) -> None:
        places = 1 if kind == "q" else self.stages
        self.steps.append(Step((f"{kind} full", -1, tile % places), tile // places + 1))

    def release(self, kind: str, tile: int) -> None:
        places = 1 if kind == "q" else self.stages
        self.steps.append(Step((f"{kind} empty", self.me, tile % places)))

    def begin(self) -> None:
        self.turns += 1
        self.steps.append(Step(("turn", self.me, 0), self.turns))

    def turn(self) -> None:
        self.begin()
        self.steps.append(Step(("turn", (self.me + 1) % self.warpgroups, 0)))

    def pass_over(self, tiles: range) -> None:
        for tile in tiles:
            self.wait("k", tile)
            if self.turns_of_skipped_tiles:
                self.turn()
            self.wait("v", tile)
            self.release("k", tile)
            self.release("v", tile)

    def visit(self, tiles: range) -> None:
        for tile in tiles:
            self.wait("k", tile)
            if self.softmax_last and tile > tiles.start + 1:
                self.release("v", tile - 2)
            if tile > tiles.start:
                self.wait("v", tile - 1)
            self.turn()
            self.release("k", tile)
            if not self.softmax_last and tile > tiles.start:
                self.release("v", tile - 1)
        if self.softmax_last and len(tiles) > 1:
            self.release("v", tiles[-2])
        self.wait("v", tiles[-1])
        self.release("v", tiles[-1])

    def work(self, items: list[Item]) -> list[Step]:
        if self.me == self.warpgroups - 1:
            self.steps.append(Step(("turn", 0, 0)))
        end = 0
        for number, item in enumerate(items):
            first, end = end, end + item.tiles
            own = range(first + item.skips[self.me], end - item.leaves[self.me])
            self.wait("q", number)
            self.pass_over(range(first, own.start))
            if own and not self.q_is_late:
                self.release("q", number)
            if own:
                self.visit(own)
            if not own or self.q_is_late:
                self.release("q", number)
            self.pass_over(range(own.stop, end))
        self.wait("q", len(items))
        if self.me == 0:
            self.begin()
        return self.steps


def run(
    programs: list[list[Step]], hold: tuple[int, int] | None = None
) -> tuple[list[int], Counter[Event]]:
    """Runs all programs as far as they come; `hold`: this program stops before this step."""
    at = [0] * len(programs)
    counted: Counter[Event] = Counter()
    moved = True
    while moved:
        moved = False
        for i, steps in enumerate(programs):
            while at[i] < len(steps) and (i, at[i]) != hold:
                step = steps[at[i]]
                if step.number > counted[step.event]:
                    break
                if not step.number:
                    counted[step.event] += 1
                at[i] += 1
                moved = True
    return at, counted


def faults(programs: list[list[Step]]) -> list[str]:
    """What is wrong: a program that does not end, a turn too many, or a wait that can miss its phase."""
    at, counted = run(programs)
    found = [
        f"program {i} stops at {steps[at[i]]}"
        for i, steps in enumerate(programs)
        if at[i] < len(steps)
    ]
    for w, steps in enumerate(programs[1:]):
        taken = sum(step.event == ("turn", w, 0) and step.number > 0 for step in steps)
        if counted["turn", w, 0] != taken:
            found.append(f"warpgroup {w} takes {taken} turns of {counted['turn', w, 0]}")
    for i, steps in enumerate(programs):
        for j, step in enumerate(steps):
            if step.number > 0:
                ahead = run(programs, (i, j))[1][step.event] - step.number
                if ahead > 0:
                    found.append(f"program {i} may find {step.event} {ahead} phases ahead")
    return found


def draw_items(
    draw: random.Random, warpgroups: int, most_items: int = 4, most_tiles: int = 5
) -> list[Item]:
    """Items, some of them empty, with any tiles left out at both ends."""
    items = []
    for _ in range(draw.randint(1, most_items)):
        tiles = draw.randint(0, most_tiles)
        skips = tuple(draw.randint(0, tiles) for _ in range(warpgroups))
        leaves = tuple(draw.randint(0, max(tiles - skip - 1, 0)) for skip in skips)
        items.append(Item(tiles, skips, leaves))
    return items


def all_programs(
    items: list[Item],
    warpgroups: int,
    stages: int,
    softmax_last: bool = False,
    q_is_late: bool = False,
    turns_of_skipped_tiles: bool = True,
) -> list[list[Step]]:
    """The producer and the consumers."""
    programs = [producer(items, warpgroups, stages)]
    for w in range(warpgroups):
        consumer = Consumer(w, warpgroups, stages, softmax_last, q_is_late, turns_of_skipped_tiles)
        programs.append(consumer.work(items))
    return programs


@pytest.mark.parametrize("warpgroups", [2, 3])
@pytest.mark.parametrize("softmax_last", [False, True])
@pytest.mark.parametrize("q_is_late", [False, True])
def test_every_order_ends(warpgroups: int, softmax_last: bool, q_is_late: bool) -> None:
    draw = random.Random(warpgroups)
    for _ in range(15):
        items = draw_items(draw, warpgroups)
        for stages in (2, 3):
            programs = all_programs(items, warpgroups, stages, softmax_last, q_is_late)
            assert faults(programs) == [], (items, stages)


def test_the_model_sees_a_missing_turn() -> None:
    items = [Item(3, (1, 0), (0, 0)), Item(2, (0, 0), (0, 0))]
    assert faults(all_programs(items, 2, 2)) == []
    assert faults(all_programs(items, 2, 2, turns_of_skipped_tiles=False)) != []
