"""The Hopper backward kernels that own keys: a model of who waits for whom, and of what a late warp reads.

The model holds every wait, signal, read and write of the producer and of each warp
(cc/kernels/sm90/backward_{producer,keys,split,gather,storer}.cuh). A product brings the warps of a
warpgroup together at its start, by which its operands count as read, and has ended for all of them
when it has for one; "one thread speaks for the warpgroup" is warp 0. Signals are only counted up,
so whether the kernel ends does not depend on the order of events. A warp that comes late is looked
for at every wait and every read: it is held there while all others run on. Blocks that take item after
item are in ``test_backward_item_steps.py``.
"""

import dataclasses
from collections import Counter

import pytest
from late_steps import Step, early_reads, faults

WARPS = 4


@dataclasses.dataclass(frozen=True)
class Form:
    """A kernel: ``visit`` with its compile-time choices, or the split form of wide heads.

    Attributes:
      fused: with dq; the split form then has a warpgroup for it.
      stores_ds: gradients of scores take the place of the bias, from where a warp of its own stores them.
      empty_rows: tiles of queries hold rows to be cleared, before they are announced.
    """

    split: bool = False
    fused: bool = True
    dropout: bool = False
    bias_slots: int = 0
    stores_ds: bool = False
    empty_rows: bool = False

    @property
    def releases(self) -> int:
        return 2 * WARPS if self.split else 2

    @property
    def bias_readers(self) -> int:
        return 1 if self.stores_ds else WARPS if self.split else 2 * WARPS


class Program:
    """The steps of the producer or of one warp; what a test leaves out is named by its barrier."""

    def __init__(self, form: Form, stages: int, count: int, without: str) -> None:
        self.form, self.stages, self.count, self.without = form, stages, count, without
        self.steps: list[Step] = []
        self.met: Counter[str] = Counter()

    def wait(self, kind: str, place: int, phases: int, per_phase: int) -> None:
        if phases and kind != self.without:
            self.steps.append(Step("wait", (kind, place), phases * per_phase, per_phase))

    def signal(self, kind: str, place: int) -> None:
        self.steps.append(Step("signal", (kind, place)))

    def write(self, *place: object) -> None:
        self.steps.append(Step("write", place))

    def read(self, *place: object, version: int) -> None:
        self.steps.append(Step("read", place, version))

    def meet(self, name: str, warps: int = WARPS) -> None:
        """Waits for the other warps, as the start of a product or a barrier does."""
        self.met[name] += 1
        self.steps.append(Step("signal", (name,)))
        if name != self.without:
            self.steps.append(Step("wait", (name,), warps * self.met[name], warps))

    # A tile of queries (q, with its records) or of dout (d, with delta), of a step.
    def wait_full(self, kind: str, step: int) -> None:
        self.wait(f"{kind} full", step % self.stages, step // self.stages + 1, 1)

    def read_tile(self, kind: str, step: int) -> None:
        self.read(kind, step % self.stages, version=step // self.stages + 1)

    def free(self, kind: str, step: int) -> None:
        self.signal(f"{kind} empty", step % self.stages)

    # A tile of ds for the warpgroup of dq.
    def give(self, step: int, giver: int) -> None:
        buffer = step % 2
        self.wait("ds empty", buffer, step // 2, 1)
        self.write("ds", buffer, giver)
        if giver == 0:
            self.read_tile("q", step)
            self.write("record", buffer)
        self.signal("ds full", buffer)

    # A place of a bias, in parts of the warps: each reads its own, and leaves gradients of scores there.
    def wait_place(self, step: int) -> int:
        slots = self.form.bias_slots
        self.wait("bias empty", step % slots, step // slots, self.form.bias_readers)
        return step % slots

    def load_bias(self, step: int) -> None:
        if self.form.bias_slots:
            slot = self.wait_place(step)
            for warp in range(2 * WARPS):
                self.write("bias", slot, warp)
            if self.form.stores_ds:
                self.write("where ds goes", slot)
            self.signal("bias full", slot)

    def end_ds(self) -> None:
        if self.form.stores_ds:
            slot = self.wait_place(self.count)
            self.write("where ds goes", slot)
            for _ in range(2 * WARPS):
                self.signal("ds written", slot)

    def read_bias(self, step: int, warp: int) -> None:
        slots, writers = self.form.bias_slots, 2 if self.form.stores_ds else 1
        if slots:
            self.wait("bias full", step % slots, step // slots + 1, 1)
            self.read("bias", step % slots, warp, version=step // slots * writers + 1)
            if not self.form.stores_ds:
                self.signal("bias empty", step % slots)

    def store_ds(self) -> list[Step]:
        slots = self.form.bias_slots
        for step in range(self.count + 1):
            slot, use = step % slots, step // slots + 1
            self.wait("ds written", slot, use, 2 * WARPS)
            self.read("where ds goes", slot, version=use)
            if step < self.count:
                for warp in range(2 * WARPS):
                    self.read("bias", slot, warp, version=2 * use)
                self.signal("bias empty", slot)
        return self.steps

    def produce(self) -> list[Step]:
        form = self.form
        for step in range(self.count):
            stage = step % self.stages
            for kind in ("q", "d"):
                self.wait(f"{kind} empty", stage, step // self.stages, form.releases)
                self.write(kind, stage)
                if not form.empty_rows:
                    self.signal(f"{kind} full", stage)
            if form.empty_rows:
                self.signal("q full", stage)
                self.signal("d full", stage)
            self.load_bias(step)
        self.end_ds()
        return self.steps

    def decide_drops(self, step: int) -> None:
        if self.form.dropout and step < self.count:
            self.wait_full("q", step)
            self.read_tile("q", step)

    def visit(self, warpgroup: int, warp: int) -> list[Step]:
        form, me = self.form, f"scores {warpgroup}"
        self.decide_drops(0)
        for step in range(self.count):
            self.wait_full("q", step)
            self.read_tile("q", step)
            self.meet(me)
            self.wait_full("d", step)
            self.meet(me)
            self.read_bias(step, WARPS * warpgroup + warp)
            self.read_tile("q", step)
            self.read_tile("d", step)
            if form.fused:
                self.wait("ds empty", step % 2, step // 2, 2 * WARPS)
                self.write("ds", step % 2, WARPS * warpgroup + warp)
            if form.stores_ds:
                self.write("bias", step % form.bias_slots, WARPS * warpgroup + warp)
            self.meet(me)
            if form.fused:
                self.signal("ds full", step % 2)
            if form.stores_ds:
                self.signal("ds written", step % form.bias_slots)
            if form.fused:
                self.start_late_dq(step, me)
                if warp == 0:
                    self.free("d", step)
                self.read_tile("q", step)
            self.meet(me)
            self.decide_drops(step + 1)
            if form.fused and step > 0:
                self.signal("ds empty", (step - 1) % 2)
            if warp == 0:
                if not form.fused:
                    self.free("d", step)
                self.free("q", step)
        if form.fused:
            self.start_late_dq(self.count, me)
        return self.steps

    def start_late_dq(self, step: int, me: str) -> None:
        """The product for the step before. That of the first step is of what happens to lie there, and not used."""
        if step > 0:
            before = step - 1
            self.wait("ds full", before % 2, before // 2 + 1, 2 * WARPS)
            for giver in range(2 * WARPS):
                self.read("ds", before % 2, giver, version=before // 2 + 1)
        self.meet(me)

    def visit_for_dv(self, warp: int) -> list[Step]:
        for step in range(self.count):
            self.wait_full("q", step)
            self.read_tile("q", step)
            self.meet("dv")
            self.read_bias(step, warp)
            self.read_tile("q", step)
            self.wait("weights empty", step % 2, step // 2, WARPS)
            self.write("weights", step % 2, warp)
            self.signal("weights full", step % 2)
            self.free("q", step)
            self.wait_full("d", step)
            self.meet("dv")
            self.free("d", step)
        return self.steps

    def visit_for_dk(self, warp: int) -> list[Step]:
        for step in range(self.count):
            self.wait_full("d", step)
            self.meet("dk")
            self.wait_full("q", step)
            self.read_tile("q", step)
            self.wait("weights full", step % 2, step // 2 + 1, WARPS)
            self.read("weights", step % 2, warp, version=step // 2 + 1)
            self.signal("weights empty", step % 2)
            self.read_tile("d", step)
            self.free("d", step)
            if self.form.fused:
                self.give(step, warp)
            self.meet("dk")
            self.free("q", step)
        return self.steps

    def gather(self, warp: int) -> list[Step]:
        for step in range(self.count):
            buffer, version = step % 2, step // 2 + 1
            self.wait("ds full", buffer, version, WARPS)
            self.read("record", buffer, version=version)
            for giver in range(WARPS):
                self.read("ds", buffer, giver, version=version)
            self.meet("dq")
            if warp == 0:
                self.signal("ds empty", buffer)
        return self.steps


def programs(form: Form, stages: int, count: int, without: str = "") -> list[list[Step]]:
    """The producer and all warps of a block that visits `count` tiles of queries."""

    def new() -> Program:
        return Program(form, stages, count, without)

    found = [new().produce()]
    found += [new().store_ds()] if form.stores_ds else []
    for warp in range(WARPS):
        if form.split:
            found += [new().visit_for_dv(warp), new().visit_for_dk(warp)]
            found += [new().gather(warp)] if form.fused else []
        else:
            found += [new().visit(warpgroup, warp) for warpgroup in range(2)]
    return found


STORED = Form(dropout=True, bias_slots=1, stores_ds=True, empty_rows=True)
FORMS = {
    "plain": Form(empty_rows=True),
    "dropout-bias": Form(dropout=True, bias_slots=1, empty_rows=True),
    "dropout-bias-stored": STORED,
    "dropout-bias-stored-in-two": dataclasses.replace(STORED, bias_slots=2),
    "dkv": Form(fused=False, dropout=True, bias_slots=2),
    "dkv-stored": dataclasses.replace(STORED, fused=False),
    "split": Form(split=True),
    "split-bias": Form(split=True, bias_slots=1, empty_rows=True),
    "split-dkv": Form(split=True, fused=False, bias_slots=2, empty_rows=True),
}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_warp_hangs_or_reads_another_step(form: Form, stages: int) -> None:
    for count in (1, 4):
        found = programs(form, stages, count)
        assert faults(found) | early_reads(found) == set()


# In the plain form the wait for q covers that for dout, which is freed before it; that for the only place of a bias
# covers both.
@pytest.mark.parametrize(
    ("name", "barrier"),
    [
        *(("plain", barrier) for barrier in ("q empty", "ds full", "ds empty")),
        *((name, "bias empty") for name in ("dropout-bias", "dropout-bias-stored")),
        *((name, "ds written") for name in ("dropout-bias-stored", "dropout-bias-stored-in-two")),
        *(("split", barrier) for barrier in ("ds empty", "q empty", "d empty", "weights empty")),
    ],
)
def test_a_wait_left_out_is_found(name: str, barrier: str) -> None:
    found = programs(FORMS[name], 3, 6, without=barrier)
    assert faults(found) | early_reads(found)


def test_a_record_read_behind_the_last_product_is_found() -> None:
    """Another fault that an H200 showed: a late warp read the header of a later step."""
    late = programs(FORMS["plain"], 2, 5)
    for steps in late[1:]:
        products = [i for i, step in enumerate(steps) if step.place[0] in ("scores 0", "scores 1")]
        steps.insert(products[9] + 1, Step("read", ("q", 0), 1))  # behind dk of the first step
    assert faults(late) == {"q is read late"}
