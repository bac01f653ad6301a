"""The Hopper backward with a warpgroup for dq: a model of who waits for whom, and of what a late warp reads.

The model holds every wait, signal, read and write of the producer and of each warp
(cc/kernels/sm90/backward_{producer,keys,split,gather}.cuh). A product brings the warps of a
warpgroup together at its start, by which its operands count as read, and has ended for all of them
when it has for one; "one thread speaks for the warpgroup" is warp 0. Signals are only counted up,
so whether the kernel ends does not depend on the order of events. A warp that comes late is looked
for at every wait and every read: it is held there while all others run on.
"""

import dataclasses
from collections import Counter

import pytest

WARPS = 4
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


@dataclasses.dataclass(frozen=True)
class Form:
    """A kernel: ``visit_giving`` with its compile-time choices, or the split form of wide heads."""

    split: bool = False
    late_dp: bool = False
    late_dk: bool = False
    dropout: bool = False
    bias_slots: int = 0
    gather_products: int = 1

    @property
    def releases(self) -> int:
        return 2 * WARPS if self.split else 2

    @property
    def givers(self) -> int:
        return WARPS if self.split else 2 * WARPS


class Program:
    """The steps of the producer or of one warp; what a test leaves out is named by its barrier."""

    def __init__(self, form: Form, stages: int, count: int, without: str) -> None:
        self.form, self.stages, self.count, self.without = form, stages, count, without
        self.steps: list[Step] = []
        self.products = 0

    def wait(self, kind: str, place: int, phases: int, per_phase: int) -> None:
        if phases and kind != self.without:
            self.steps.append(Step("wait", (kind, place), phases * per_phase, per_phase))

    def signal(self, kind: str, place: int) -> None:
        self.steps.append(Step("signal", (kind, place)))

    def write(self, *place: object) -> None:
        self.steps.append(Step("write", place))

    def read(self, *place: object, version: int) -> None:
        self.steps.append(Step("read", place, version))

    def product(self, warpgroup: str) -> None:
        """Waits for the other warps, as the start of a product does."""
        self.products += 1
        self.steps.append(Step("signal", (warpgroup,)))
        self.steps.append(Step("wait", (warpgroup,), WARPS * self.products, WARPS))

    # A tile of queries (q, with its records) or of dout (d, with delta), of a step.
    def wait_full(self, kind: str, step: int) -> None:
        self.wait(f"{kind} full", step % self.stages, step // self.stages + 1, 1)

    def read_tile(self, kind: str, step: int) -> None:
        self.read(kind, step % self.stages, version=step // self.stages + 1)

    def free(self, kind: str, step: int) -> None:
        self.signal(f"{kind} empty", step % self.stages)

    # A tile of ds.
    def give(self, step: int, giver: int, tells: bool) -> None:
        buffer = step % 2
        self.wait("ds empty", buffer, step // 2, 1)
        self.write("ds", buffer, giver)
        if tells:
            self.read_tile("q", step)
            self.write("record", buffer)
        self.signal("ds full", buffer)

    def produce(self) -> list[Step]:
        form = self.form
        for step in range(self.count):
            for kind in ("q", "d"):
                stage = step % self.stages
                self.wait(f"{kind} empty", stage, step // self.stages, form.releases)
                self.write(kind, stage)
                self.signal(f"{kind} full", stage)
            if form.bias_slots:
                slot, phases = step % form.bias_slots, step // form.bias_slots
                self.wait("bias empty", slot, phases, 2 * WARPS)
                self.write("bias", slot)
                self.signal("bias full", slot)
        return self.steps

    def decide_drops(self, step: int) -> None:
        if self.form.dropout and step < self.count:
            self.wait_full("q", step)
            self.read_tile("q", step)

    def visit_giving(self, warpgroup: int, warp: int) -> list[Step]:
        form, me = self.form, f"scores {warpgroup}"
        early_dv = form.late_dp or form.late_dk

        def release(step: int) -> None:
            if warp == 0:
                self.free("q", step)
                if early_dv:
                    self.free("d", step)

        self.decide_drops(0)
        for step in range(self.count):
            self.wait_full("q", step)
            self.read_tile("q", step)
            self.product(me)
            if not form.late_dp:
                self.wait_full("d", step)
                self.product(me)
            if form.late_dk and step:
                release(step - 1)
            if form.bias_slots:
                slot, phases = step % form.bias_slots, step // form.bias_slots
                self.wait("bias full", slot, phases + 1, 1)
                self.read("bias", slot, version=phases + 1)
                self.signal("bias empty", slot)
            self.read_tile("q", step)
            if form.late_dp:
                self.wait_full("d", step)
            for _ in range(early_dv + form.late_dp):
                self.product(me)
            self.read_tile("d", step)
            self.read_tile("q", step)  # the factor of dropout
            self.give(step, WARPS * warpgroup + warp, warpgroup == warp == 0)
            for _ in range(2 - early_dv):
                self.product(me)
            self.decide_drops(step + 1)
            if not early_dv and warp == 0:
                self.free("d", step)
            if not form.late_dk:
                release(step)
        return self.steps

    def visit_for_dv(self, warp: int) -> list[Step]:
        for step in range(self.count):
            self.wait_full("q", step)
            self.read_tile("q", step)
            self.product("dv")
            self.read_tile("q", step)
            self.wait("weights empty", step % 2, step // 2, WARPS)
            self.write("weights", step % 2, warp)
            self.signal("weights full", step % 2)
            self.free("q", step)
            self.wait_full("d", step)
            self.product("dv")
            self.free("d", step)
        return self.steps

    def visit_for_dk(self, warp: int) -> list[Step]:
        for step in range(self.count):
            self.wait_full("d", step)
            self.product("dk")
            self.wait_full("q", step)
            self.read_tile("q", step)
            self.wait("weights full", step % 2, step // 2 + 1, WARPS)
            self.read("weights", step % 2, warp, version=step // 2 + 1)
            self.signal("weights empty", step % 2)
            self.read_tile("d", step)
            self.free("d", step)
            self.give(step, warp, warp == 0)
            self.product("dk")
            self.free("q", step)
        return self.steps

    def gather(self, warp: int) -> list[Step]:
        for step in range(self.count):
            buffer, version = step % 2, step // 2 + 1
            self.wait("ds full", buffer, version, self.form.givers)
            self.read("record", buffer, version=version)
            for _ in range(self.form.gather_products):
                for giver in range(self.form.givers):
                    self.read("ds", buffer, giver, version=version)
                self.product("dq")
            if warp == 0:
                self.signal("ds empty", buffer)
        return self.steps


def programs(form: Form, stages: int, count: int, without: str = "") -> list[list[Step]]:
    """The producer and all warps of a block that visits `count` tiles of queries."""

    def new() -> Program:
        return Program(form, stages, count, without)

    found = [new().produce(), *(new().gather(warp) for warp in range(WARPS))]
    for warp in range(WARPS):
        if form.split:
            found += [new().visit_for_dv(warp), new().visit_for_dk(warp)]
        else:
            found += [new().visit_giving(warpgroup, warp) for warpgroup in range(2)]
    return found


def run(
    all_steps: list[list[Step]], hold: tuple[int, int] | None = None
) -> tuple[list[int], Counter[tuple[str, Place]]]:
    """Runs all programs as far as they come; `hold`: this program stops before this step."""
    at = [0] * len(all_steps)
    counted: Counter[tuple[str, Place]] = Counter()
    moved = True
    while moved:
        moved = False
        for i, steps in enumerate(all_steps):
            while at[i] < len(steps) and (i, at[i]) != hold:
                step = steps[at[i]]
                if step.action == "wait" and step.number > counted["signal", step.place]:
                    break
                counted[step.action, step.place] += step.action != "wait"
                at[i] += 1
                moved = True
    return at, counted


def faults(all_steps: list[list[Step]]) -> set[str]:
    """What is wrong: a program that does not end, a barrier that runs ahead of who waits, a read of a later version."""
    at, _ = run(all_steps)
    found = {
        f"stops at {steps[at[i]].place}" for i, steps in enumerate(all_steps) if at[i] < len(steps)
    }
    for i, steps in enumerate(all_steps):
        for j, step in enumerate(steps):
            if step.action not in ("wait", "read"):
                continue
            counted = run(all_steps, (i, j))[1]
            if step.action == "read" and counted["write", step.place] != step.number:
                found.add(f"{step.place[0]} is read late")
            ahead = counted["signal", step.place] - step.number
            if step.action == "wait" and ahead >= step.per_phase:
                found.add(f"{step.place} runs ahead")
    return found


NARROW = Form()
FORMS = {
    "64": NARROW,
    "64-over": dataclasses.replace(NARROW, late_dk=True),
    "64-dropout": dataclasses.replace(NARROW, dropout=True),
    "64-over-dropout-bias": Form(late_dk=True, dropout=True, bias_slots=1),
    "128": Form(late_dp=True, gather_products=2),
    "128-over": Form(late_dp=True, late_dk=True, gather_products=2),
    "128-dropout-bias": Form(late_dp=True, dropout=True, bias_slots=2, gather_products=2),
    "192": Form(split=True),
}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_warp_hangs_or_reads_another_step(form: Form, stages: int) -> None:
    for count in (1, 4):
        assert faults(programs(form, stages, count)) == set()


# In the other forms the wait for q covers that for dout, which is freed with it or before.
@pytest.mark.parametrize(
    ("name", "barrier"),
    [
        *((name, barrier) for name in ("64", "128-over") for barrier in ("ds empty", "q empty")),
        *(("192", barrier) for barrier in ("ds empty", "q empty", "d empty", "weights empty")),
    ],
)
def test_a_wait_left_out_is_found(name: str, barrier: str) -> None:
    assert faults(programs(FORMS[name], 3, 6, without=barrier))


def test_a_record_read_behind_the_last_product_is_found() -> None:
    """The fault that an H200 showed: a late warp read the header of a later step."""
    late = programs(NARROW, 2, 5)
    for steps in late[1 + WARPS :]:
        products = [i for i, step in enumerate(steps) if step.place[0] in ("scores 0", "scores 1")]
        steps.insert(products[7] + 1, Step("read", ("q", 0), 1))  # behind dk of the first step
    assert faults(late) == {"q is read late"}
