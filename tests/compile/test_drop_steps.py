"""The Hopper forward with drop warps: a model of who waits for whom, and of what a late warp reads.

The model holds every wait, signal, read and write of the producer, of the drop warps and of each
consumer warp that has to do with keys, values and bits (cc/kernels/sm90/{producer,drops,consumer}.cuh).
The products of a warpgroup start when all its warps have come; one that has ended for a warp has
ended for all. Signals are only counted up, so whether the kernel ends does not depend on the order
of events: one order shows it. A warp that comes late is looked for at every wait and every read: it
is held there while all others run on.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from late_steps import Step, faults, run
from test_turns import Item, draw_items

WARPS, WARPGROUPS, DROP_WARPS = 4, 2, 3


@dataclasses.dataclass
class Program:
    """The steps of one warp of a block.

    Attributes:
      stages: of the ring.
      softmax_last: the loop order; else the softmax is amid the loop body.
      releases: of a stage by a warpgroup: 1, then one warp speaks for all, or 4.
      without: a wait of this barrier is left out.
      turns: the warpgroups take turns.
    """

    stages: int
    softmax_last: bool = False
    releases: int = WARPS
    without: str = ""
    turns: bool = False
    steps: list[Step] = dataclasses.field(default_factory=list)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def wait(self, barrier: str, tile: int, per_phase: int, *, round_before: bool = False) -> None:
        phases = tile // self.stages + (not round_before)
        if phases and barrier != self.without:
            self.steps.append(
                Step("wait", (barrier, tile % self.stages), phases * per_phase, per_phase)
            )

    def signal(self, barrier: str, tile: int) -> None:
        self.steps.append(Step("signal", (barrier, tile % self.stages)))

    def write(self, what: str, tile: int, *part: object) -> None:
        self.steps.append(Step("write", (what, tile % self.stages, *part)))

    def read(self, what: str, tile: int, *part: object) -> None:
        self.steps.append(Step("read", (what, tile % self.stages, *part), tile // self.stages + 1))

    def wait_q(self, number: int) -> None:
        self.steps.append(Step("wait", ("q full",), number + 1))

    def together(self, name: str, warps: int) -> None:
        """Waits for the other warps of a warpgroup."""
        self.counts[name] += 1
        self.steps.append(Step("signal", (name,)))
        self.steps.append(Step("wait", (name,), warps * self.counts[name], warps))

    def produce(self, items: list[Item]) -> list[Step]:
        def load(kind: str, tile: int) -> None:
            self.wait(f"{kind} empty", tile, WARPGROUPS * self.releases, round_before=True)
            self.write(kind, tile)
            if kind == "k":
                self.write("record", tile)
            self.signal(f"{kind} full", tile)

        def load_q(number: int) -> None:
            if number:
                self.steps.append(Step("wait", ("q empty",), WARPGROUPS * number, WARPGROUPS))
            self.steps.append(Step("signal", ("q full",)))

        first = 0
        for number, item in enumerate(items):
            if item.tiles:
                load("k", first)
            load_q(number)
            for tile in range(first, first + item.tiles):
                if tile + 1 < first + item.tiles:
                    load("k", tile + 1)
                load("v", tile)
            first += item.tiles
        load_q(len(items))
        load("k", first)  # the record that ends the drop warps
        return self.steps

    def decide(self, tiles: int, warp: int) -> list[Step]:
        for tile in range(tiles + 1):
            self.wait("k full", tile, 1)
            self.read("record", tile)
            if tile == tiles:
                break
            for consumer in range((warp - tile) % DROP_WARPS, WARPGROUPS * WARPS, DROP_WARPS):
                self.write("bits", tile, consumer)
            self.signal("bits full", tile)
        return self.steps

    def release(self, kind: str, tile: int, warp: int) -> None:
        if self.releases == WARPS or warp == 0:
            self.signal(f"{kind} empty", tile)

    def consume(self, items: list[Item], warpgroup: int, warp: int) -> list[Step]:
        me = f"warpgroup {warpgroup}"

        def product() -> None:
            self.together(me, WARPS)

        def turn() -> None:
            if self.turns:
                successor = (warpgroup + 1) % WARPGROUPS
                self.counts["turn"] += 1
                taken = WARPS * self.counts["turn"]
                self.steps.append(Step("wait", ("turn", warpgroup), taken, WARPS))
                product()
                self.steps.append(Step("signal", ("turn", successor)))

        def pass_over(tiles: range) -> None:
            for tile in tiles:
                self.wait("k full", tile, 1)
                self.read("k", tile)
                turn()
                self.wait("v full", tile, 1)
                self.wait("bits full", tile, DROP_WARPS)
                product()  # the barrier of the warpgroup
                self.release("k", tile, warp)
                self.release("v", tile, warp)

        def visit(tiles: range) -> None:
            for tile in tiles:
                self.wait("k full", tile, 1)
                self.read("k", tile)
                if self.softmax_last and tile > tiles.start + 1:
                    self.release("v", tile - 2, warp)
                if tile > tiles.start:
                    self.wait("v full", tile - 1, 1)
                turn()
                product()
                if tile > tiles.start:
                    self.read("v", tile - 1)
                self.wait("bits full", tile, DROP_WARPS)
                self.read("bits", tile, WARPS * warpgroup + warp)
                self.release("k", tile, warp)
                if not self.softmax_last and tile > tiles.start:
                    self.release("v", tile - 1, warp)
            if self.softmax_last and len(tiles) > 1:
                self.release("v", tiles[-2], warp)
            self.wait("v full", tiles[-1], 1)
            product()
            self.read("v", tiles[-1])
            self.release("v", tiles[-1], warp)

        if self.turns and warpgroup == WARPGROUPS - 1:
            self.steps.append(Step("signal", ("turn", 0)))
        end = 0
        for number, item in enumerate(items):
            first, end = end, end + item.tiles
            own = range(first + item.skips[warpgroup], end - item.leaves[warpgroup])
            self.wait_q(number)
            pass_over(range(first, own.start))
            if own:
                visit(own)
            product()  # the barrier of the write
            if warp == 0:
                self.steps.append(Step("signal", ("q empty",)))
            pass_over(range(own.stop, end))
        self.wait_q(len(items))
        return self.steps


def all_programs(items: list[Item], stages: int, **choices: object) -> list[list[Step]]:
    """The producer, the drop warps and the consumer warps of a block."""

    def new() -> Program:
        return Program(stages, **choices)  # type: ignore[arg-type]

    tiles = sum(item.tiles for item in items)
    programs = [new().produce(items)]
    programs += [new().decide(tiles, warp) for warp in range(DROP_WARPS)]
    for warpgroup in range(WARPGROUPS):
        programs += [new().consume(items, warpgroup, warp) for warp in range(WARPS)]
    return programs


def unwritten(programs: list[list[Step]]) -> set[str]:
    """What is read before it is written when the one who writes is held at any of its waits."""
    found = set()
    for i, steps in enumerate(programs):
        for j, step in enumerate(steps):
            if step.action != "write":
                continue
            at, counted = run(programs, (i, j))
            for other, program in enumerate(programs):
                reads = [s for s in program[: at[other]] if s.action == "read"]
                if any(s.number > counted["write", s.place] for s in reads):
                    found.add(f"{step.place[0]} is read before it is there")
    return found


LONG = [Item(5, (0, 0), (0, 0)), Item(0, (0, 0), (0, 0)), Item(3, (1, 0), (0, 1))]


@pytest.mark.parametrize("softmax_last", [False, True])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
def test_no_warp_hangs_or_reads_another_tile(softmax_last: bool, turns: bool, stages: int) -> None:
    draw = random.Random(stages)
    for items in (
        LONG,
        [],
        *(draw_items(draw, WARPGROUPS, most_items=3, most_tiles=4) for _ in range(3)),
    ):
        programs = all_programs(items, stages, softmax_last=softmax_last, turns=turns)
        assert faults(programs) == set(), items
        assert unwritten(programs) == set(), items


@pytest.mark.parametrize("barrier", ["k full", "k empty", "bits full"])
def test_a_wait_left_out_is_found(barrier: str) -> None:
    programs = all_programs(LONG, 2, without=barrier)
    assert faults(programs) | unwritten(programs)


def test_one_warp_must_not_free_bits_for_all() -> None:
    """A warp that is late behind the start of the product may not have read its bits when the product ends."""
    assert "bits is read late" in faults(all_programs(LONG, 2, releases=1))
