"""Warpgroups that take turns: a model of who waits for whom.

The model holds every wait and signal of the producer and of the consumer warpgroups
(cc/kernels/sm90/{producer,consumer,turns}.cuh). Programs are straight lines and signals are only
counted up, so whether the kernel comes to its end does not depend on the order of events: one order
shows it. What a participant may miss, namely a barrier that runs two phases ahead of it, is looked
for at every step by holding that participant there and letting all others run.
"""

import dataclasses
import random

import late_steps
import pytest
from late_steps import Step


def step_of(what: str, warpgroup: int, stage: int, number: int = 0) -> Step:
    """Waits until this was signalled `number` times, or signals it if `number` is 0. warpgroup: -1 for all."""
    return Step("wait" if number else "signal", (what, warpgroup, stage), number)


@dataclasses.dataclass(frozen=True)
class Item:
    """A number of key tiles, and for each warpgroup those that it skips first and those that it leaves at the end."""

    tiles: int
    skips: tuple[int, ...]
    leaves: tuple[int, ...]


def producer(
    items: list[Item],
    warpgroups: int,
    stages: int,
    looks_ahead: bool = False,
    q_first: bool = False,
) -> list[Step]:
    """k one tile ahead of v; q of an item behind its first k.

    looks_ahead: the last v of an item behind the first k of the next; q_first: and behind its q.
    """
    steps: list[Step] = []

    def load(kind: str, tile: int, places: int = stages) -> None:
        stage, rounds = tile % places, tile // places
        if rounds:
            steps.extend(step_of(f"{kind} empty", w, stage, rounds) for w in range(warpgroups))
        steps.append(step_of(f"{kind} full", -1, stage))

    first = 0
    late: list[int] = []
    for number, item in enumerate([*items, Item(0, (), ())]):
        if item.tiles:
            load("k", first)
        rest = [("q", number, 1), *(("v", tile, stages) for tile in late)]
        for what in rest if q_first else reversed(rest):
            load(*what)
        late = []
        for tile in range(first, first + item.tiles):
            if tile + 1 < first + item.tiles:
                load("k", tile + 1)
            if looks_ahead and tile + 1 == first + item.tiles:
                late = [tile]
            else:
                load("v", tile)
        first += item.tiles
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
        self.steps.append(step_of(f"{kind} full", -1, tile % places, tile // places + 1))

    def release(self, kind: str, tile: int) -> None:
        places = 1 if kind == "q" else self.stages
        self.steps.append(step_of(f"{kind} empty", self.me, tile % places))

    def begin(self) -> None:
        self.turns += 1
        self.steps.append(step_of("turn", self.me, 0, self.turns))

    def turn(self) -> None:
        self.begin()
        self.steps.append(step_of("turn", (self.me + 1) % self.warpgroups, 0))

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
            self.steps.append(step_of("turn", 0, 0))
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


def faults(programs: list[list[Step]]) -> set[str]:
    """What is wrong: a program that does not end, a wait that can miss its phase, or a turn too many."""
    found = late_steps.faults(programs)
    _, counted = late_steps.run(programs)
    for w, steps in enumerate(programs[1:]):
        turn = ("turn", w, 0)
        taken = sum(step.action == "wait" and step.place == turn for step in steps)
        if counted["signal", turn] != taken:
            found.add(f"warpgroup {w} takes {taken} turns of {counted['signal', turn]}")
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
    looks_ahead: bool = False,
    q_first: bool = False,
) -> list[list[Step]]:
    """The producer and the consumers."""
    programs = [producer(items, warpgroups, stages, looks_ahead, q_first)]
    for w in range(warpgroups):
        consumer = Consumer(w, warpgroups, stages, softmax_last, q_is_late, turns_of_skipped_tiles)
        programs.append(consumer.work(items))
    return programs


@pytest.mark.parametrize("warpgroups", [2, 3])
@pytest.mark.parametrize("softmax_last", [False, True])
@pytest.mark.parametrize("q_is_late", [False, True])
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_every_order_ends(
    warpgroups: int, softmax_last: bool, q_is_late: bool, looks_ahead: bool
) -> None:
    draw = random.Random(warpgroups)
    for _ in range(15):
        items = draw_items(draw, warpgroups)
        for stages in (2, 3):
            programs = all_programs(
                items, warpgroups, stages, softmax_last, q_is_late, looks_ahead=looks_ahead
            )
            assert faults(programs) == set(), (items, stages)


def test_the_model_sees_a_missing_turn() -> None:
    items = [Item(3, (1, 0), (0, 0)), Item(2, (0, 0), (0, 0))]
    assert faults(all_programs(items, 2, 2)) == set()
    assert faults(all_programs(items, 2, 2, turns_of_skipped_tiles=False)) != set()


@pytest.mark.parametrize("q_is_late", [False, True])
def test_the_last_v_comes_before_the_next_q(q_is_late: bool) -> None:
    """A warpgroup that skips its only tile frees q behind v, and one that frees q at the end needs v for it."""
    items = [Item(1, (0, 0), (0, 0)), Item(1, (1, 0), (0, 0)), Item(1, (0, 0), (0, 0))]
    assert faults(all_programs(items, 2, 2, q_is_late=q_is_late, looks_ahead=True)) == set()
    stops = faults(all_programs(items, 2, 2, q_is_late=q_is_late, looks_ahead=True, q_first=True))
    assert any(fault.startswith("stops at") for fault in stops)
