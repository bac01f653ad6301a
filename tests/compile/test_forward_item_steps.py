"""The Hopper forward kernel, item after item and computed again: who waits for whom, and what somebody late would read.

The model holds every wait, signal, read and write of the producer and of each consumer warp
(cc/kernels/sm90/{producer,consumer,turns}.cuh), with programs of their own for the matrix unit of each warpgroup and
for the stores of each warp, as in ``test_backward_item_steps.py``. What a block works on is a row of records: items
with their tiles of keys, and records without an item, at which the consumers meet and the producer looks at the list of
lost items. When the producer first sees a loss depends on the order of events, so rows with every delay are tried.
"""

import dataclasses
import random

import late_steps
import pytest
from late_steps import Place, Step, early_reads
from test_backward_item_steps import UNLIMITED, WARPS, Program

RECORD_SLOTS = 2
MEETING = -1  # a record without an item


@dataclasses.dataclass(frozen=True)
class Form:
    """A kernel, with one fault or none.

    Attributes:
      q_leaves: q's place is free again "first", when registers hold q, at the "last" product with q, or at the "end",
        when the output that took it is stored.
      awaits_v_early: v of a tile is waited for behind the product with k; before k's place is free again ("first"), if
        the output product is waited for before the exponentials, or behind it ("last").
      looks_ahead: behind items of up to that many tiles the last v is copied after the first k of the next item.
      products_meet: a product ends for no warp before all warps of the warpgroup have started it.
      without: what is left out.
    """

    q_leaves: str = "last"
    warpgroups: int = 2
    stages: int = 2
    turns: bool = False
    in_series: bool = False
    awaits_v_early: str = ""
    looks_ahead: int = 0
    products_meet: bool = True
    without: str = ""


class Forward(Program):
    """The steps of the producer or of one warp. records: tiles of keys of each item, or MEETING."""

    form: Form  # type: ignore[assignment]

    def __init__(
        self, form: Form, records: list[int], losses: set[int], warpgroup: int = 0, warp: int = 0
    ) -> None:
        super().__init__(form, records, warpgroup, warp)  # type: ignore[arg-type]
        self.losses = losses  # records that the second warp of every warpgroup loses
        self.tile_number = {"k": 0, "v": 0}
        self.loads = 0  # of q
        self.clears = self.listed = 0  # writes of the list
        self.pending = False

    @property
    def all_warps(self) -> int:
        return WARPS * self.form.warpgroups

    def place_of(self, record: int) -> Place:
        return ("record", record % RECORD_SLOTS)

    def version(self, record: int) -> int:
        return record // RECORD_SLOTS + 1

    def count_losses(self, number: int) -> None:
        if number in self.losses:
            self.listed += self.form.warpgroups
            self.pending = True

    # The producer.
    def produce(self) -> list[Step]:
        is_late = False
        for number, tiles in enumerate(self.items):
            if tiles > 0:
                self.load("k")
            if is_late:
                self.load("v")
            self.publish(number, tiles)
            is_late = 0 < tiles <= self.form.looks_ahead
            for tile in range(max(tiles, 0)):
                if tile + 1 < tiles:
                    self.load("k")
                if tile + 1 < tiles or not is_late:
                    self.load("v")
            self.count_losses(number)
            if tiles == MEETING:
                self.wait(("q empty",), number + 1, self.form.warpgroups, "meeting")
                self.read("list", version=self.listed + self.clears)
                if self.pending:
                    self.write("list")
                    self.clears += 1
                    self.pending = False
        return self.steps

    def publish(self, number: int, tiles: int) -> None:
        self.wait(("q empty",), number, self.form.warpgroups)
        self.write(*self.place_of(number))
        if tiles > 0:
            self.write("q")
            if self.form.q_leaves == "end":
                for i in range(self.all_warps):
                    self.write("out", i // WARPS, i % WARPS)
        self.signal("q full")

    def load(self, kind: str) -> None:
        number = self.tile_number[kind]
        stage, rounds = number % self.form.stages, number // self.form.stages
        self.wait((f"{kind} empty", stage), rounds, self.form.warpgroups)
        if kind == "k":
            self.write("header", stage)
        self.write(kind, stage)
        self.signal(f"{kind} full", stage)
        self.tile_number[kind] += 1

    # The consumers.
    def work(self) -> list[Step]:
        form = self.form
        if form.turns and self.warpgroup == form.warpgroups - 1:
            self.signal("turn given", 0)
        for number, tiles in enumerate(self.items):
            self.wait(("q full",), number + 1, 1)
            self.read(*self.place_of(number), version=self.version(number))
            if tiles == MEETING:
                self.meet()
            elif tiles == 0:
                self.store(number)
                if form.q_leaves != "end":
                    self.free_q()
            else:
                self.visit_tiles(number, tiles)
            self.count_losses(number)
        if form.turns and self.warpgroup == 0:
            self.begin_turn()
        self.signal("gone")
        return self.steps

    def end_turn(self, name: str = "turn ends") -> None:
        if self.form.turns:
            self.signal("turn given", (self.warpgroup + 1) % self.form.warpgroups, name=name)

    def places_of_output(self) -> list[Place]:
        return [("out", self.warpgroup, warp) for warp in range(WARPS)]

    def free_q(self) -> None:
        if self.warp == 0:
            self.signal("q empty")

    def operand(self, kind: str) -> tuple[Place, int]:
        number = self.tile_number[kind]
        return (kind, number % self.form.stages), number // self.form.stages + 1

    def wait_tile(self, kind: str) -> None:
        number = self.tile_number[kind]
        self.wait((f"{kind} full", number % self.form.stages), number // self.form.stages + 1, 1)
        if kind == "k":
            place, version = self.operand("k")
            self.read("header", place[1], version=version)

    def wait_next_v(self) -> None:
        self.tile_number["v"] += 1
        self.wait_tile("v")
        self.tile_number["v"] -= 1

    def free_tile(self, kind: str) -> None:
        if self.warp == 0:
            self.signal(f"{kind} empty", self.tile_number[kind] % self.form.stages)
        self.tile_number[kind] += 1

    def start(self, *operands: tuple[Place, int]) -> None:
        """Of two products that are started at once the first waits for every warp, not for as many starts."""
        self.started += 1
        self.signal("started", self.warpgroup, self.warp)
        starters = range(WARPS) if self.form.products_meet else [self.warp]
        self.products += [
            Step("wait", ("started", self.warpgroup, warp), self.started, UNLIMITED)
            for warp in starters
        ]
        self.products += [Step("read", place, version) for place, version in operands]
        self.products.append(Step("signal", ("ended", *self.unit)))

    def start_scores(self) -> None:
        q = [] if self.form.q_leaves == "first" else [(("q",), self.loads)]
        self.start(self.operand("k"), *q)

    def start_output(self) -> None:
        self.start(self.operand("v"))

    def visit_tiles(self, number: int, tiles: int) -> None:
        form = self.form
        self.loads += 1
        if form.q_leaves == "end":
            self.written.update(self.places_of_output())  # by q
        self.wait_tile("k")  # whether its keys are seen
        if form.q_leaves == "first":
            self.read("q", version=self.loads)
            self.sync_warpgroup("sync behind q")
            self.free_q()
        if form.in_series:
            for tile in range(tiles):
                self.wait_tile("k")
                self.start_scores()
                self.wait_products(0)
                if tile == tiles - 1 and form.q_leaves == "last":
                    self.free_q()
                self.free_tile("k")
                self.wait_tile("v")
                self.start_output()
                self.wait_products(0)
                self.free_tile("v")
        else:
            self.wait_tile("k")
            self.begin_turn()
            self.start_scores()
            self.end_turn()
            self.wait_products(0)
            self.free_tile("k")
            if form.awaits_v_early:
                self.wait_tile("v")
            for _ in range(tiles - 1):
                self.wait_tile("k")
                if form.turns and not form.awaits_v_early:
                    self.wait_tile("v")
                self.begin_turn()
                self.start_scores()
                if not form.turns and not form.awaits_v_early:
                    self.wait_tile("v")
                self.start_output()
                self.end_turn()
                self.wait_products(1)
                if form.awaits_v_early == "first":
                    self.wait_next_v()
                self.free_tile("k")
                if form.awaits_v_early == "last":
                    self.wait_next_v()
                self.wait_products(0)
                self.free_tile("v")
            if form.q_leaves == "last":
                self.free_q()
            self.wait_tile("v")
            self.start_output()
            self.read(*self.place_of(number), version=self.version(number))
            self.wait_products(0)
            self.free_tile("v")
        if number in self.losses and self.warp == 1:
            self.read(*self.place_of(number), version=self.version(number))
            self.write("list")
        self.store(number)

    def store(self, number: int) -> None:  # type: ignore[override]
        """Rows by way of shared memory, which is q's place if q leaves at the end."""
        if self.warp == 0:
            self.wait_copies(0, "place of the output")
        self.sync_warpgroup("sync before the output is written")
        self.read(*self.place_of(number), version=self.version(number))
        self.write("out", self.warpgroup, self.warp)
        self.written.update(self.places_of_output())
        self.sync_warpgroup("sync before the output is stored")
        if self.warp == 0:
            self.send(self.places_of_output())
            if self.form.q_leaves == "end":
                self.wait_copies(0, "output read")
                self.free_q()

    def meet(self) -> None:
        self.sync(("consumers",), self.all_warps, "sync of consumers")
        self.read("list", version=self.listed + self.clears)
        if self.pending:
            self.clears += 1
            self.pending = False
            if self.warp == 0:
                self.wait_copies(0, "stores made")
        self.sync_warpgroup("sync behind the list")
        self.free_q()


def programs(form: Form, records: list[int], losses: set[int]) -> list[list[Step]]:
    """The producer, the warps, their stores, and the products of the warpgroups."""
    warps = [
        Forward(form, records, losses, i // WARPS, i % WARPS)
        for i in range(WARPS * form.warpgroups)
    ]
    found = [Forward(form, records, losses).produce(), *(warp.work() for warp in warps)]
    found += [warp.copies for warp in warps]
    found += [warp.products for warp in (warps[::WARPS] if form.products_meet else warps)]
    return found


def faults(form: Form, records: list[int], losses: set[int]) -> set[str]:
    found = programs(form, records, losses)
    return late_steps.faults(found) | early_reads(found)


FORMS = {
    "q in registers": Form("first"),
    "q shared": Form("last"),
    "output in the place of q": Form("end"),
    "turns": Form("last", turns=True),
    "head dim 64": Form("last", warpgroups=3, stages=4, turns=True, awaits_v_early="last"),
    "head dim 64 causal": Form("last", warpgroups=3, stages=4, turns=True, awaits_v_early="first"),
    "looks ahead": Form("first", looks_ahead=5),
    "looks ahead behind few tiles": Form("end", looks_ahead=2),
    "in series": Form("last", warpgroups=3, in_series=True),
}
# Records, and which of them are lost: the producer sees a loss at once, one or two items later, or at the end.
ROWS: tuple[tuple[list[int], set[int]], ...] = (
    ([MEETING], set()),
    ([3, MEETING], set()),
    ([1, 0, 2, 0, 0, 1, 4, MEETING], set()),
    ([3, MEETING, 3, MEETING], {0}),
    ([3, MEETING, 3, 2, 1, MEETING], {0}),
    ([3, 2, MEETING, 3, 1, MEETING], {0}),
    ([3, 2, 1, MEETING, 3, 0, 2, MEETING], {0}),
    ([1, 3, 2, 1, MEETING, 3, 2, 1, MEETING], {1, 2, 3}),
    ([2, 1, MEETING, 2, 4, 1, MEETING, 1, MEETING], {0, 5}),
)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("records", "losses"), ROWS, ids=str)
def test_no_warp_hangs_or_reads_what_belongs_to_another_item(
    form: Form, records: list[int], losses: set[int]
) -> None:
    assert faults(form, records, losses) == set()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_drawn_rows(form: Form) -> None:
    draw = random.Random(form.warpgroups)
    for _ in range(4):
        records = [draw.randint(0, 5) for _ in range(draw.randint(1, 6))]
        assert faults(form, [*records, MEETING], set()) == set(), records


@pytest.mark.parametrize(
    ("name", "without", "fault"),
    [
        ("q shared", "q full", "q is read early"),
        ("q shared", "q empty", "q is read late"),
        ("q shared", "k full", "k is read early"),
        ("q shared", "k empty", "k is read late"),
        ("q shared", "v full", "v is read early"),
        ("q shared", "v empty", "v is read late"),
        ("q in registers", "sync behind q", "('q full',) runs ahead"),
        ("output in the place of q", "output read", "out is read late"),
        ("q shared", "place of the output", "out is read late"),
        ("q shared", "sync before the output is written", "out is read late"),
        ("q shared", "sync before the output is stored", "out is read early"),
        ("q shared", "sync of consumers", "list is read early"),
        ("q shared", "sync behind the list", "list is read late"),
        ("q shared", "meeting", "list is read late"),
        ("turns", "turn ends", "stops at ('turn given', 0)"),
    ],
)
def test_what_is_left_out_is_found(name: str, without: str, fault: str) -> None:
    form = dataclasses.replace(FORMS[name], without=without)
    assert fault in faults(form, [3, 2, MEETING, 2, 1, MEETING], {1})
