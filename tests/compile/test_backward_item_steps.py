"""The Hopper backward kernels whose blocks take item after item: who waits for whom, and what somebody late would read.

The model holds every wait, signal, read and write of the producer and of each warp of a block with
``Config::schedule`` 2 (cc/kernels/sm90/backward_{producer,keys}.cuh, turns.cuh), through items of
any numbers of steps. What reads shared memory behind a warp's back has programs of its own: the
matrix unit for each warpgroup, whose product reads once all warps have started it and ends for all
of them at once, and the copy engine for each warp, whose stores and reductions read at any time
until they are waited for. With ``Config::drops_beside`` a warp for each warpgroup finds bits for its steps
(backward_drops.cuh). With ``Config::stores_ds`` gradients of scores take the place of a tile of the
bias, from where one more stores them (backward_storer.cuh). With ``Config::dq_order`` two more warps
send dq off (backward_sender.cuh), or one beside warps that find bits; that other blocks let them is
taken for granted here, and shown in ``test_dq_order.py``.
``test_backward_steps.py`` has the kernels with a block for each item.
"""

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Callable

import late_steps
import pytest
from late_steps import Place, Step, early_reads

WARPS = 4  # of a warpgroup
ALL_WARPS = 2 * WARPS
TURNS = 4  # records for the senders
Parts = Callable[[int], list[Place]]  # what a warp of all writes
UNLIMITED = 1 << 30  # signals of a phase where who waits asks for a number and cannot miss it

# Turns that end elsewhere, as `Form.without`.
LATE_END = "turn held over the last dq"
END_IN_FIRST_STEP = "turn ended in the first step"


@dataclasses.dataclass(frozen=True)
class Form:
    """A kernel, with one fault or none.

    Attributes:
      chunks: of 64 queries in a tile. Where a tile has two, each warpgroup makes dq of one of them.
      slots: places to stage dq for reductions; 0 if threads add it up themselves.
      senders: warps of their own add up what is staged.
      drops: warps of their own find the pairs that dropout removes.
      drop_steps: places for records of steps for them.
      ds_places: of tiles of a bias, which gradients of scores are stored from; 0 if they are not.
      dv, dk: where the results leave, (buffer, chunk) of ds; dk without any by the slot that the last dq leaves free.
      ahead: tiles of queries that come before the keys of their item.
      late: one of so many items, from the first on, has a first step that the second warpgroup leaves out; 0: none.
      products_meet: a product ends for no warp before all warps of the warpgroup have started it.
      without: what is left out.
    """

    chunks: int = 1
    slots: int = 2
    senders: bool = False
    drops: bool = False
    drop_steps: int = 3
    ds_places: int = 0
    dv: tuple[tuple[int, int], ...] = ((0, 0), (1, 0))
    dk: tuple[tuple[int, int], ...] = ()
    stages: int = 2
    ahead: int = 2
    late: int = 0
    turns: bool = True
    empty_rows: bool = False
    products_meet: bool = True
    without: str = ""

    @property
    def sent_by(self) -> tuple[range, ...]:
        """The consumer warpgroups that each sender serves."""
        apart = () if self.drops else (range(1), range(1, 2))
        return (apart or (range(2),)) if self.senders else ()


class Program:
    """The steps of the producer or of one warp, and of the copies of that warp."""

    def __init__(self, form: Form, items: list[int], warpgroup: int = 0, warp: int = 0) -> None:
        self.form, self.items, self.warpgroup, self.warp = form, items, warpgroup, warp
        self.me = WARPS * warpgroup + warp
        self.unit: Place = (warpgroup,) if form.products_meet else (warpgroup, warp)
        self.steps: list[Step] = []
        self.copies: list[Step] = []
        self.products: list[Step] = []
        # To the sender, of this warpgroup: what each of its sums reads.
        self.handed: list[list[tuple[Place, int]]] = []
        self.met: Counter[Place] = Counter()
        # Writes of places by all warps so far, which all write alike: the version that is due.
        self.written: Counter[Place] = Counter()
        self.step = self.visited = self.started = self.sent = self.slot = 0
        self.staged = False

    def wait(self, barrier: Place, phases: int, per_phase: int, name: str = "") -> None:
        if phases > 0 and self.form.without != (name or barrier[0]):
            self.steps.append(Step("wait", barrier, phases * per_phase, per_phase))

    def wait_number(self, barrier: Place, number: int, name: str = "") -> None:
        if self.form.without != (name or barrier[0]):
            self.steps.append(Step("wait", barrier, number, UNLIMITED))

    def signal(self, *barrier: object, name: str = "") -> None:
        if self.form.without != name or not name:
            self.steps.append(Step("signal", barrier))

    def write(self, *place: object) -> None:
        self.steps.append(Step("write", place))

    def read(self, *place: object, version: int) -> None:
        self.steps.append(Step("read", place, version))

    def write_parts(self, parts: Parts) -> None:
        """Writes this warp's part, as every other warp does."""
        for warp in range(ALL_WARPS):
            self.written.update(parts(warp))
        for place in parts(self.me):
            self.write(*place)

    def sync(self, barrier: Place, warps: int, name: str) -> None:
        if self.form.without == name:
            return
        self.met[barrier] += 1
        self.signal(*barrier)
        self.wait(barrier, self.met[barrier], warps)

    def sync_warpgroup(self, name: str) -> None:
        self.sync(("warpgroup", self.warpgroup), WARPS, name)

    # The producer.
    def produce(self) -> list[Step]:
        for number, count in enumerate(self.items):
            ahead = self.form.ahead if number else 0
            for i in range(count):
                if i == ahead:
                    self.start_item(number, count)
                self.load_queries()
            if count <= ahead:
                self.start_item(number, count)
        self.end_ds()
        self.announce_dq()
        self.announce_drops()
        self.start_item(len(self.items), 0)
        return self.steps

    # Places of a bias, in parts of the warps: each reads its own, and leaves gradients of scores there.
    def ds_place(self, step: int) -> tuple[int, int]:
        """The place of a step, and the number of steps that have used it then."""
        return step % self.form.ds_places, step // self.form.ds_places + 1

    def load_bias(self) -> None:
        if self.form.ds_places:
            place, use = self.ds_place(self.step)
            self.wait(("bias empty", place), use - 1, 1)
            for warp in range(ALL_WARPS):
                self.write("bias", place, warp)
            self.write("where ds goes", place)
            self.signal("bias full", place)

    def end_ds(self) -> None:
        if self.form.ds_places:
            place, use = self.ds_place(self.step)
            self.wait(("bias empty", place), use - 1, 1)
            self.write("where ds goes", place)
            for _ in range(ALL_WARPS):
                self.signal("ds written", place)

    def read_bias(self) -> None:
        if self.form.ds_places:
            place, use = self.ds_place(self.step)
            self.wait(("bias full", place), use, 1)
            self.read("bias", place, self.me, version=2 * use - 1)

    def store_ds(self) -> list[Step]:
        """The warp that stores gradients of scores."""
        for step in range(sum(self.items) + 1):
            place, use = self.ds_place(step)
            self.wait(("ds written", place), use, ALL_WARPS)
            self.read("where ds goes", place, version=use)
            if step == sum(self.items):
                break
            for warp in range(ALL_WARPS):
                self.read("bias", place, warp, version=2 * use)
            self.signal("bias empty", place)
        self.signal("gone")
        return self.steps

    def start_item(self, number: int, count: int) -> None:
        self.wait(("values empty",), number, ALL_WARPS)
        if count:
            self.write("v")
        self.wait(("own empty",), number, ALL_WARPS)
        self.write("record")
        if count:
            self.write("k")
        self.signal("own full")

    def announce_dq(self) -> None:
        if self.form.senders:
            senders = len(self.form.sent_by)
            self.wait(("turn empty", self.step % TURNS), self.step // TURNS, senders)
            self.write("turn", self.step % TURNS)
            self.signal("turn full", self.step % TURNS)

    def announce_drops(self) -> None:
        if self.form.drops:
            place = self.step % self.form.drop_steps
            self.write("drop step", place)
            self.signal("drop step full", place)

    def find_drops(self) -> list[Step]:
        """The warp that finds the bits of a warpgroup."""
        for number in range(sum(self.items) + 1):
            places = self.form.drop_steps
            place, version = number % places, number // places + 1
            self.wait(("drop step full", place), version, 1)
            self.read("drop step", place, version=version)
            if number == sum(self.items):
                break
            self.wait(("drops empty", self.warpgroup), number, WARPS)
            self.write("bits", self.warpgroup)
            self.signal("drops full", self.warpgroup)
        return self.steps

    def load_queries(self) -> None:
        self.announce_drops()
        stage, rounds = self.step % self.form.stages, self.step // self.form.stages
        for kind in ("q", "d"):
            self.wait((f"{kind} empty", stage), rounds, 2)
            if kind == "q":
                self.announce_dq()
            self.write(kind, stage)
            if not self.form.empty_rows:
                self.signal(f"{kind} full", stage)
        if self.form.empty_rows:
            self.signal("q full", stage)
            self.signal("d full", stage)
        self.load_bias()
        self.step += 1

    # Turns.
    def begin_turn(self, name: str = "turn begins") -> None:
        """A named barrier whose arrivals of each side are counted apart: neither may come twice in a phase."""
        if self.form.turns and self.form.without != name:
            self.met["turn",] += 1
            self.signal("turn taken", self.warpgroup)
            for side in ("turn taken", "turn given"):
                self.wait((side, self.warpgroup), self.met["turn",], WARPS)

    def end_turn(self, name: str = "turn ends") -> None:
        if self.form.turns:
            self.signal("turn given", 1 - self.warpgroup, name=name)

    # Products.
    def start(self, *operands: tuple[Place, int]) -> None:
        self.started += 1
        self.signal("started", *self.unit)
        starters = WARPS if self.form.products_meet else 1
        due = Step("wait", ("started", *self.unit), starters * self.started, UNLIMITED)
        reads = [Step("read", place, version) for place, version in operands]
        self.products += [due, *reads, Step("signal", ("ended", *self.unit))]

    def wait_products(self, pending: int, name: str = "") -> None:
        self.wait_number(("ended", *self.unit), self.started - pending, name)

    def tile(self, kind: str) -> tuple[Place, int]:
        return (kind, self.step % self.form.stages), self.step // self.form.stages + 1

    def wait_full(self, kind: str) -> None:
        self.wait((f"{kind} full", self.step % self.form.stages), self.tile(kind)[1], 1)

    def read_tile(self, kind: str) -> None:
        place, version = self.tile(kind)
        self.read(*place, version=version)

    def free(self, kind: str) -> None:
        if self.warp == 0:
            self.signal(f"{kind} empty", self.step % self.form.stages)

    # Copies.
    def send(self, places: list[Place]) -> None:
        self.sent += 1
        reads = [Step("read", place, self.written[place]) for place in places]
        due = Step("wait", ("sent", self.me), self.sent, UNLIMITED)
        self.copies += [due, *reads, Step("signal", ("copied", self.me))]
        self.signal("sent", self.me)

    def wait_copies(self, pending: int, name: str) -> None:
        self.wait_number(("copied", self.me), self.sent - pending, name)

    # What a warp writes, in pieces of 1 KiB of the staging memory of its warpgroup: parts of dq of 4 KiB one
    # behind the other, rows of dk across them, 2 KiB of each chunk of 64 columns.
    def staged_dq(self, warp: int) -> list[Place]:
        pieces = range(warp % WARPS * 4, (warp % WARPS + 1) * 4)
        return [("staging", self.slot, warp // WARPS, piece) for piece in pieces]

    def staged_dk(self, warp: int) -> list[Place]:
        first = warp % WARPS * 2
        pieces = (first, first + 1, first + 8, first + 9)
        slot = (self.step if self.form.senders else self.slot + 1) % self.form.slots
        return [("staging", slot, warp // WARPS, piece) for piece in pieces]

    # Parts of a chunk of ds: each warp writes its keys, rows of it.
    def stored_ds(self, buffer: int, warp: int) -> list[Place]:
        return [("ds", buffer, chunk, warp) for chunk in range(self.form.chunks)]

    def rows_in_ds(self, buffer: int, chunk: int, warp: int) -> list[Place]:
        return [("ds", buffer, chunk, warp)]

    def stage_dq(self) -> None:
        if not self.form.slots:
            return
        if self.form.senders:
            self.slot = (self.step - 1) % self.form.slots
            self.wait_slot(self.step - 1, "place of staging")
        else:
            self.slot = (self.slot + 1) % self.form.slots
            self.wait_copies(self.form.slots - 1, "place of staging")
        self.write_parts(self.staged_dq)
        self.staged = True

    def wait_slot(self, number: int, name: str) -> None:
        slot = ("staged empty", number % self.form.slots, self.warpgroup)
        self.wait(slot, number // self.form.slots, 1, name)

    def start_reduction(self, number: int) -> None:
        """Of the step of this number."""
        if self.staged and self.form.senders:
            own = range(WARPS * self.warpgroup, WARPS * (self.warpgroup + 1))
            places = [place for warp in own for place in self.staged_dq(warp)]
            self.handed.append([(place, self.written[place]) for place in places])
            self.signal("staged full", number % self.form.slots, self.warpgroup)
        elif self.staged:
            self.send(self.staged_dq(self.me))
        self.staged = False

    def send_dq(self, handed: dict[int, list[list[tuple[Place, int]]]]) -> list[Step]:
        """A warp that sends what warpgroups stage, these together. Each sum is waited for at once."""
        sums = len(next(iter(handed.values())))
        for number in range(sums + 1):
            self.wait(("turn full", number % TURNS), number // TURNS + 1, 1)
            self.read("turn", number % TURNS, version=number // TURNS + 1)
            self.signal("turn empty", number % TURNS)
            if number == sums:
                break
            slot, rounds = number % self.form.slots, number // self.form.slots
            for warpgroup in handed:
                self.wait(("staged full", slot, warpgroup), rounds + 1, WARPS)
            for staged in handed.values():
                for place, version in staged[number]:
                    self.read(*place, version=version)
            for warpgroup in handed:
                self.signal("staged empty", slot, warpgroup)
        self.signal("gone")
        return self.steps

    # The consumers.
    def work(self) -> list[Step]:
        form = self.form
        if form.turns and self.warpgroup == 1:
            self.signal("turn given", 0, name="first turn")
        for number, count in enumerate([*self.items, None]):
            self.wait(("own full",), number + 1, 1)
            self.wait_copies(0, "results read" if count is not None else "results read at the end")
            self.sync_warpgroup("sync behind results read")
            self.read("record", version=number + 1)
            if count is None:
                break
            if count:
                is_late = form.late > 0 and number % form.late == 0 and count > 1
                self.visit(count, number + 1, begins_late=is_late and self.warpgroup == 1)
            else:
                self.signal("values empty")
                self.release_item(number + 1)
            self.leave()
        if form.turns and self.warpgroup == 0:
            self.begin_turn("last turn")
        self.signal("gone")
        return self.steps

    def read_ds(self, buffer: int, givers: range) -> list[tuple[Place, int]]:
        """What a product reads of ds: all of a buffer, or the chunk of this warpgroup's queries."""
        places = [place for warp in givers for place in self.stored_ds(buffer, warp)]
        if self.form.chunks == 2:
            places = [place for place in places if place[2] == self.warpgroup]
        return [(place, self.written[place]) for place in places]

    def leave_out_step(self) -> None:
        self.wait_full("q")
        self.read_tile("q")  # its header
        self.begin_turn()
        self.write_ds()
        self.signal("ds full", self.step % 2)
        self.read_drops()
        self.sync_warpgroup("sync behind the header")
        self.free("d")
        self.free("q")
        self.step += 1

    def visit(self, count: int, record: int, begins_late: bool) -> None:
        self.visited += 1
        k, v = (("k",), self.visited), (("v",), self.visited)
        if begins_late:
            self.leave_out_step()
        for i in range(begins_late, count):
            self.wait_full("q")
            self.read_tile("q")
            self.start(k, self.tile("q"))
            self.wait_full("d")
            self.start(v, self.tile("d"))
            if i > 0 or self.form.without == END_IN_FIRST_STEP:
                self.end_turn()
            self.read_drops()
            self.wait_products(1)
            self.read("record", version=record)
            self.read_bias()
            self.read_tile("q")
            self.wait_products(0)
            self.read_tile("d")
            self.give_gradients()
            self.begin_turn()
            self.start(self.tile("d"))
            self.signal("ds full", self.step % 2)
            if self.form.ds_places:
                self.signal("ds written", self.ds_place(self.step)[0])
            self.start_late_dq(k, is_used=i > 0)
            self.wait_products(1)
            self.free("d")
            self.read_tile("q")
            self.start(self.tile("q"))
            self.wait_products(1)
            if i > 0:
                self.signal("ds empty", (self.step - 1) % 2)
                self.stage_dq()
            self.wait_products(0)
            self.free("q")
            self.step += 1
        if self.form.without != LATE_END:
            self.end_turn("turn of the last step ends")
        self.signal("values empty")
        self.start_late_dq(k)
        self.start_reduction(self.step - 2)
        self.wait_products(0, "last dq")
        self.signal("ds empty", (self.step - 1) % 2, name="ds empty of the drain")
        self.release_item(record)
        self.stage_dq()
        if self.form.without == LATE_END:
            self.end_turn()

    def release_item(self, record: int) -> None:
        """With a copy of the record, for the results."""
        self.read("record", version=record)
        self.signal("own empty")

    def read_drops(self) -> None:
        if self.form.drops:
            self.wait(("drops full", self.warpgroup), self.step + 1, 1)
            self.read("bits", self.warpgroup, version=self.step + 1)
            self.signal("drops empty", self.warpgroup)

    def write_ds(self) -> None:
        buffer = self.step % 2
        self.wait(("ds empty", buffer), self.step // 2, ALL_WARPS)
        self.write_parts(lambda warp: self.stored_ds(buffer, warp))

    def give_gradients(self) -> None:
        self.write_ds()
        if self.form.ds_places:
            self.write("bias", self.ds_place(self.step)[0], self.me)
        self.start_reduction(self.step - 2)

    def start_late_dq(self, k: tuple[Place, int], is_used: bool = True) -> None:
        """The product for the step before. That of an item's first step is of what happens to lie there."""
        before = self.step - 1
        self.wait(("ds full", before % 2), before // 2 + 1, ALL_WARPS)
        if is_used:
            self.start(k, *self.read_ds(before % 2, range(ALL_WARPS)))
        else:
            self.start()

    def leave(self) -> None:
        """Each warp writes its rows of dv and dk, and one thread has those of the warpgroup stored."""
        if not self.form.dk and self.form.slots == 1:
            self.start_reduction(self.step - 1)
        self.sync(("consumers",), ALL_WARPS, "sync of consumers")
        results: list[Parts] = [
            functools.partial(self.rows_in_ds, *place) for place in (*self.form.dv, *self.form.dk)
        ]
        for rows in results:
            self.write_parts(rows)
        if not self.form.dk:
            if self.form.senders:
                self.wait_slot(self.step, "staging read")
            else:
                self.wait_copies(0, "staging read")
                self.sync_warpgroup("sync behind staging read")
            results.append(self.staged_dk)
            self.write_parts(self.staged_dk)
        own = range(WARPS * self.warpgroup, WARPS * (self.warpgroup + 1))
        stored = [place for rows in results for warp in own for place in rows(warp)]
        self.start_reduction(self.step - 1)
        self.sync_warpgroup("sync before results are stored")
        if self.warp == 0:
            self.send(stored)


def programs(form: Form, items: list[int]) -> list[list[Step]]:
    """The producer, the warps, their copies, the products of the warpgroups, and the end of the block."""
    warps = [Program(form, items, i // WARPS, i % WARPS) for i in range(ALL_WARPS)]
    found = [Program(form, items).produce(), *(warp.work() for warp in warps)]
    for served in form.sent_by:
        found.append(Program(form, items).send_dq({i: warps[WARPS * i].handed for i in served}))
    if form.drops:
        found += [Program(form, items, i).find_drops() for i in range(2)]
    if form.ds_places:
        found.append(Program(form, items).store_ds())
    found += [warp.copies for warp in warps]
    found += [warp.products for warp in (warps[::WARPS] if form.products_meet else warps)]
    # Whoever has the shared memory next writes over it.
    stored = {step.place for warp in warps for step in warp.copies if step.action == "read"}
    stored |= {place for warp in warps for sums in warp.handed for place, _ in sums}
    end = [
        Step("wait", ("gone",), ALL_WARPS + len(form.sent_by) + (form.ds_places > 0)),
        *(Step("write", place) for place in sorted(stored, key=str)),
    ]
    return [*found, end]


def faults(form: Form, items: list[int]) -> set[str]:
    """Those of ``late_steps``, and arrivals of turns that meet no wait."""
    found = programs(form, items)
    _, counted = late_steps.run(found)
    turns = {
        f"turns of {w} left over"
        for w in range(2)
        if counted["signal", ("turn given", w)] != counted["signal", ("turn taken", w)]
    }
    return late_steps.faults(found) | early_reads(found) | turns


HEAD_DIM_64 = Form(chunks=2, dv=((0, 0),), dk=((0, 1),))
FORMS = {
    "128": Form(),
    "128-one-slot": Form(slots=1, empty_rows=True),
    "128-three-stages": Form(stages=3, ahead=3),
    "64": HEAD_DIM_64,
    "64-red": dataclasses.replace(HEAD_DIM_64, slots=0, empty_rows=True),
    "64-narrow": Form(dv=((0, 0),), dk=((1, 0),)),
    "128-without-turns": Form(turns=False),
    "128-senders": Form(senders=True),
    "128-one-slot-senders": Form(slots=1, senders=True),
    "64-senders": dataclasses.replace(HEAD_DIM_64, slots=1, senders=True, empty_rows=True),
    "128-senders-without-turns": Form(turns=False, senders=True),
    "128-drops": Form(drops=True),
    "128-one-slot-drops": Form(slots=1, drops=True, empty_rows=True),
    "128-drops-sender": Form(senders=True, drops=True),
    "128-one-slot-drops-sender": Form(slots=1, senders=True, drops=True, empty_rows=True),
    "64-narrow-drops": Form(dv=((0, 0),), dk=((1, 0),), drops=True),
    "128-late": Form(senders=True, late=1),
    "128-late-without-turns": Form(turns=False, senders=True, late=2),
    "128-late-one-slot": Form(slots=1, senders=True, empty_rows=True, late=2),
    "128-late-drops": Form(senders=True, drops=True, turns=False, late=1),
    "64-narrow-late": Form(dv=((0, 0),), dk=((1, 0),), senders=True, late=2),
    "64-stored": dataclasses.replace(HEAD_DIM_64, slots=0, empty_rows=True, ds_places=2),
    "64-stored-in-one": dataclasses.replace(
        HEAD_DIM_64, slots=0, empty_rows=True, ds_places=1, ahead=1
    ),
}
ITEMS: tuple[list[int], ...] = (
    [],
    [0],
    [1],
    [0, 0, 1, 0],
    [3, 0, 1, 2, 5],
    [1, 1, 1, 1],
    [2, 2, 3],
    [6, 0, 4],
)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_warp_hangs_or_reads_what_belongs_to_another_item(form: Form) -> None:
    draw = random.Random(form.chunks + form.slots)
    drawn = [[draw.randint(0, 4) for _ in range(5)] for _ in range(3)]
    for items in (*ITEMS, *drawn):
        assert faults(form, items) == set(), items


def test_queries_do_not_come_further_ahead_than_there_are_places() -> None:
    """They wait for steps of their own item then, which waits for its keys."""
    for stages in (2, 3, 4):
        form = Form(stages=stages, ahead=stages)
        assert faults(form, [1, stages + 1]) == set()
        further = dataclasses.replace(form, ahead=stages + 1)
        assert "stops at ('own full',)" in faults(further, [1, stages + 1])
    # Nor than there are places of a bias.
    form = FORMS["64-stored-in-one"]
    assert faults(form, [1, 2]) == set()
    assert "stops at ('own full',)" in faults(dataclasses.replace(form, ahead=2), [1, 2])


# The wait of the producer for q covers that for dout, which is freed before it.
@pytest.mark.parametrize(
    ("name", "without", "fault"),
    [
        ("128", "own full", "k is read early"),
        ("128", "own empty", "k is read late"),
        ("128", "values empty", "v is read late"),
        ("64-red", "own empty", "record is read late"),
        ("128", "q full", "q is read early"),
        ("128", "d full", "d is read early"),
        ("128", "q empty", "q is read late"),
        ("128", "ds full", "ds is read early"),
        ("128", "ds empty", "ds is read late"),
        ("128", "ds empty of the drain", "stops at ('ds empty', 0)"),
        ("128", "last dq", "k is read late"),
        ("128", "sync of consumers", "ds is read late"),
        ("64-red", "sync of consumers", "ds is read late"),
        ("128", "sync before results are stored", "staging is read early"),
        ("64", "sync before results are stored", "ds is read early"),
        ("128", "staging read", "staging is read late"),
        ("128", "sync behind staging read", "staging is read late"),
        ("128", "place of staging", "staging is read late"),
        ("128-one-slot", "place of staging", "staging is read late"),
        ("128-one-slot", "sync before results are stored", "staging is read early"),
        ("128-one-slot", "sync behind staging read", "staging is read late"),
        ("128-one-slot", "results read", "staging is read late"),
        ("128", "results read", "staging is read late"),
        ("64-red", "results read", "ds is read late"),
        ("64-red", "results read at the end", "ds is read late"),
        ("128", "results read at the end", "staging is read late"),
        ("128", "first turn", "stops at ('turn given', 0)"),
        ("128", "turn begins", "turns of 0 left over"),
        ("128", "turn ends", "stops at ('turn given', 1)"),
        ("128", "turn of the last step ends", "stops at ('turn given', 1)"),
        ("128", "last turn", "turns of 0 left over"),
        ("128", LATE_END, "stops at ('ds full', 0)"),
        ("128-senders", "place of staging", "staging is read late"),
        ("128-senders", "staging read", "staging is read late"),
        ("128-senders", "staged full", "staging is read early"),
        ("128-one-slot-senders", "place of staging", "staging is read late"),
        ("128-one-slot-senders", "staging read", "staging is read late"),
        ("128-one-slot-senders", "results read", "staging is read late"),
        ("128-one-slot-senders", "turn full", "turn is read early"),
        ("128-one-slot-senders", "turn empty", "turn is read late"),
        ("64-senders", "place of staging", "staging is read late"),
        ("128-late-without-turns", "sync behind the header", "q is read late"),
        ("128-late", "ds empty", "ds is read late"),
        ("128-late", "d full", "d is read early"),
        ("128-drops-sender", "place of staging", "staging is read late"),
        ("128-drops-sender", "staging read", "staging is read late"),
        ("128-drops-sender", "staged full", "staging is read early"),
        ("128-one-slot-drops-sender", "turn full", "turn is read early"),
        ("128-one-slot-drops-sender", "turn empty", "turn is read late"),
        ("128", END_IN_FIRST_STEP, "turns of 1 left over"),
        ("128-drops", "drops full", "bits is read early"),
        ("128-drops", "drops empty", "bits is read late"),
        ("128-drops", "drop step full", "drop step is read early"),
        ("64-stored", "bias full", "bias is read early"),
        ("64-stored", "bias empty", "bias is read late"),
        ("64-stored", "ds written", "bias is read early"),
        ("64-stored-in-one", "bias empty", "where ds goes is read late"),
    ],
)
def test_what_is_left_out_is_found(name: str, without: str, fault: str) -> None:
    form = dataclasses.replace(FORMS[name], without=without)
    assert fault in faults(form, [3, 0, 1, 2, 1, 5])


@pytest.mark.parametrize("stages", [2, 3])
def test_drop_warps_need_a_record_more_than_there_are_stages(stages: int) -> None:
    for places in range(1, stages + 3):
        form = Form(stages=stages, ahead=stages, drops=True, drop_steps=places)
        is_late = "drop step is read late" in faults(form, [3, 0, 1, 2, 1, 5])
        assert is_late == (places <= stages), places


@pytest.mark.parametrize(
    ("name", "without", "fault"),
    [
        *(
            (name, "sync behind results read", "ds is read late")
            for name in ("64", "64-red", "64-narrow")
        ),
    ],
)
def test_nothing_relies_on_products_that_meet(name: str, without: str, fault: str) -> None:
    """The sync behind the wait for results: else only the first scores of the next item hold a warp up until then.

    At head dim 128 nothing needs it: dv has been read when dk is staged, and the next item stages dq in a turn.
    """
    form = dataclasses.replace(FORMS[name], products_meet=False)
    results = {
        "ds is read late",
        "ds is read early",
        "staging is read late",
        "staging is read early",
    }
    assert not faults(form, [3, 0, 1, 2, 5]) & results
    bare = dataclasses.replace(form, without=without)
    assert fault in faults(bare, [3, 0, 1, 2, 5])


def test_a_record_read_behind_its_release_is_found() -> None:
    """Results are written by a copy of the record, which each warp makes before it lets go of it."""
    found = programs(Form(), [2, 1])
    for steps in found[1 : 1 + ALL_WARPS]:
        steps.insert(steps.index(Step("signal", ("own empty",))) + 1, Step("read", ("record",), 1))
    assert late_steps.faults(found) == {"record is read late"}
