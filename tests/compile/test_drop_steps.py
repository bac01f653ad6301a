"""The Hopper forward with drop warps: a model of who waits for whom, and of what a late warp reads.

The model holds every wait, signal, read and write of the producer, of the drop warps and of each
consumer warp that has to do with keys, values and what drop warps make
(cc/kernels/sm90/{producer,drops,consumer}.cuh). Nobody says when places of records and words are free:
there are more of them than of keys. The products of a warpgroup start when all its warps have come
and read for all of them; one that has ended for a warp has ended for all (``late_steps``).
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from late_steps import Step, early_reads, faults

WARPS, DROP_WARPS = 4, 3
STEPS = 4  # of a tile, divided among the drop warps
OF_DROP_WARPS = ("record", "records full", "words", "words full")


@dataclasses.dataclass(frozen=True)
class Item:
    """A number of key tiles, and for each warpgroup those that it skips first and those that it leaves at the end."""

    tiles: int
    skips: tuple[int, ...]
    leaves: tuple[int, ...]


@dataclasses.dataclass
class Program:
    """The steps of one warp of a block.

    Attributes:
      stages: of the ring.
      warpgroups: of consumers.
      in_series: a warpgroup has one product in flight, not two.
      releases: of a stage by a warpgroup: 1, then one warp speaks for all, or 4.
      more_places: of records and words, than there are stages.
      without: a wait of this barrier is left out.
      turns: the warpgroups take turns.
    """

    stages: int
    warpgroups: int = 2
    in_series: bool = False
    releases: int = 1
    more_places: int = 2
    without: str = ""
    turns: bool = False
    steps: list[Step] = dataclasses.field(default_factory=list)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def places(self, what: str) -> int:
        return self.stages + self.more_places if what in OF_DROP_WARPS else self.stages

    def wait(self, barrier: str, tile: int, per_phase: int, *, round_before: bool = False) -> None:
        places = self.places(barrier)
        phases = tile // places + (not round_before)
        if phases and barrier != self.without:
            self.steps.append(Step("wait", (barrier, tile % places), phases * per_phase, per_phase))

    def signal(self, barrier: str, tile: int) -> None:
        self.steps.append(Step("signal", (barrier, tile % self.places(barrier))))

    def write(self, what: str, tile: int, *part: object) -> None:
        self.steps.append(Step("write", (what, tile % self.places(what), *part)))

    def read(self, what: str, tile: int, *part: object) -> None:
        places = self.places(what)
        self.steps.append(Step("read", (what, tile % places, *part), tile // places + 1))

    def wait_q(self, number: int) -> None:
        self.steps.append(Step("wait", ("q full",), number + 1))

    def together(self, name: str, warps: int) -> None:
        """Waits for the other warps of a warpgroup."""
        self.counts[name] += 1
        self.steps.append(Step("signal", (name,)))
        self.steps.append(Step("wait", (name,), warps * self.counts[name], warps))

    def produce(self, items: list[Item]) -> list[Step]:
        def tell(tile: int) -> None:
            self.write("record", tile)
            self.signal("records full", tile)

        def load(kind: str, tile: int) -> None:
            if kind == "k":
                tell(tile)
            self.wait(f"{kind} empty", tile, self.warpgroups * self.releases, round_before=True)
            self.signal(f"{kind} begun", tile)

        def load_q(number: int) -> None:
            if number:
                self.steps.append(
                    Step("wait", ("q empty",), self.warpgroups * number, self.warpgroups)
                )
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
        all_done = self.warpgroups * (len(items) + 1)
        self.steps.append(Step("wait", ("q empty",), all_done, self.warpgroups))
        tell(first)  # the record that ends the drop warps
        return self.steps

    def copy(self, kind: str, tiles: int) -> list[Step]:
        """What lands when it likes, behind the producer's instruction."""
        for tile in range(tiles):
            self.wait(f"{kind} begun", tile, 1)
            self.write(kind, tile)
            self.signal(f"{kind} full", tile)
        return self.steps

    def decide(self, tiles: int, warp: int) -> list[Step]:
        for tile in range(tiles + 1):
            self.wait("records full", tile, 1)
            self.read("record", tile)
            if tile == tiles:
                break
            for step in range((warp - tile) % DROP_WARPS, STEPS, DROP_WARPS):
                self.write("words", tile, step)
            self.signal("words full", tile)
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
                successor = (warpgroup + 1) % self.warpgroups
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
                self.wait("words full", tile, DROP_WARPS)
                product()  # the barrier of the warpgroup
                self.release("k", tile, warp)
                self.release("v", tile, warp)

        def finish_scores(tile: int) -> None:
            self.wait("words full", tile, DROP_WARPS)
            for step in range(STEPS):
                self.read("words", tile, step)
            if self.releases == WARPS:  # because of what lies beside k
                self.read("k", tile)
            self.release("k", tile, warp)

        def visit_in_series(tiles: range) -> None:
            for tile in tiles:
                self.wait("k full", tile, 1)
                self.read("k", tile)
                product()
                finish_scores(tile)
                self.wait("v full", tile, 1)
                self.read("v", tile)
                product()
                self.release("v", tile, warp)

        def visit(tiles: range) -> None:
            for tile in tiles:
                self.wait("k full", tile, 1)
                self.read("k", tile)
                if tile > tiles.start:
                    self.wait("v full", tile - 1, 1)
                    self.read("v", tile - 1)
                turn()
                product()
                finish_scores(tile)
                if tile > tiles.start:
                    self.release("v", tile - 1, warp)
            self.wait("v full", tiles[-1], 1)
            self.read("v", tiles[-1])
            product()
            self.release("v", tiles[-1], warp)

        if self.turns and warpgroup == self.warpgroups - 1:
            self.steps.append(Step("signal", ("turn", 0)))
        end = 0
        for number, item in enumerate(items):
            first, end = end, end + item.tiles
            own = range(first + item.skips[warpgroup], end - item.leaves[warpgroup])
            self.wait_q(number)
            pass_over(range(first, own.start))
            if own:
                (visit_in_series if self.in_series else visit)(own)
            product()  # the barrier of the write
            if warp == 0:
                self.steps.append(Step("signal", ("q empty",)))
            pass_over(range(own.stop, end))
        self.wait_q(len(items))
        self.together("all consumers", WARPS * self.warpgroups)
        if warp == 0:
            self.steps.append(Step("signal", ("q empty",)))
        return self.steps


def all_programs(items: list[Item], stages: int, **choices: object) -> list[list[Step]]:
    """The producer, its copies, the drop warps and the consumer warps of a block."""

    def new() -> Program:
        return Program(stages, **choices)  # type: ignore[arg-type]

    tiles = sum(item.tiles for item in items)
    programs = [new().produce(items), new().copy("k", tiles), new().copy("v", tiles)]
    programs += [new().decide(tiles, warp) for warp in range(DROP_WARPS)]
    for warpgroup in range(new().warpgroups):
        programs += [new().consume(items, warpgroup, warp) for warp in range(WARPS)]
    return programs


def draw_items(draw: random.Random) -> list[Item]:
    """Items of up to four tiles, some of them empty, with any tiles left out at both ends."""
    items = []
    for _ in range(draw.randint(1, 3)):
        tiles = draw.randint(0, 4)
        skips = tuple(draw.randint(0, tiles) for _ in range(3))
        leaves = tuple(draw.randint(0, max(tiles - skip - 1, 0)) for skip in skips)
        items.append(Item(tiles, skips, leaves))
    return items


NONE = (0, 0, 0)
LONG = [Item(4, NONE, NONE), Item(0, NONE, NONE), Item(3, (1, 0, 2), (0, 1, 0))]
FORMS: dict[str, dict[str, object]] = {
    "two warpgroups": {},
    "two warpgroups, numbers beside k": {"releases": WARPS},
    "turns": {"turns": True},
    "three in series": {"warpgroups": 3, "in_series": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stages", [2, 3])
def test_no_warp_hangs_or_reads_another_tile(form: str, stages: int) -> None:
    draw = random.Random(stages)
    for items in (LONG, [], *(draw_items(draw) for _ in range(2))):
        programs = all_programs(items, stages, **FORMS[form])
        assert faults(programs) == set(), items
        assert early_reads(programs) == set(), items


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("barrier", ["k full", "k empty", "records full", "words full"])
def test_a_wait_left_out_is_found(form: str, barrier: str) -> None:
    programs = all_programs(LONG, 2, without=barrier, **FORMS[form])
    assert faults(programs) | early_reads(programs)


@pytest.mark.parametrize("form", FORMS)
def test_fewer_places_are_too_few(form: str) -> None:
    """One warp may free k while another has still to read its words; where all must, one place less is enough."""
    found = faults(all_programs(LONG, 2, more_places=1, **FORMS[form]))
    assert ("words is read late" in found) == ("releases" not in FORMS[form])
    assert "words is read late" in faults(all_programs(LONG, 2, more_places=0, **FORMS[form]))
