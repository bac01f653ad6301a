"""The benchmarks' own claims: who is wrong is not timed, flags are those of the build, records say what made them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jattn
from benchmarks import (
    accuracy,
    arrays,
    check,
    cpu,
    cpu_tiles,
    latency,
    memory,
    records,
    report,
    tables,
    timing,
)
from benchmarks import run as benchmark_run
from benchmarks.records import Point
from benchmarks.rivals import Rival, jattn_contender, jax_contender
from jattn import _core, call_timing
from jattn.call_plan import Kernel
from jattn.testing import cases
from jattn.testing.cases import Case

CASE = next(cpu.grid([64], ["float32"]))


def rival(error: float) -> Rival:
    """jax.nn's attention, with something added to its first result."""

    def build(case: Case, operands: arrays.Arrays, backward: bool) -> timing.Contender:
        def attention(q: Any, k: Any, v: Any) -> jax.Array:
            out = jax.nn.dot_product_attention(q, k, v, is_causal=case.is_causal)
            return out.at[0, 0, 0, 0].add(error)

        return jax_contender("torch-flash", operands, attention, backward)

    return Rival("torch-flash", build)


@pytest.mark.parametrize(("error", "is_timed"), [(0.0, True), (1e-3, False), (np.nan, False)])
def test_a_wrong_rival_is_not_timed(
    error: float, is_timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cpu.RIVALS, "torch-flash", rival(error))
    monkeypatch.setattr(cpu, "rivals_of", lambda _: ("torch-flash",))
    operands = arrays.make(CASE)
    expected = check.Expected(CASE, operands)
    rows = {row.contender: row for row in cpu.measure(CASE, "forward", operands, expected, 1)}
    assert rows[cpu.OURS].median_us is not None
    assert (rows["torch-flash"].median_us is not None) == is_timed
    assert ("WRONG" in rows["torch-flash"].note) != is_timed
    assert not any(row.failed for row in rows.values())


def test_a_solution_serves_all_contenders_of_a_problem() -> None:
    operands = arrays.make(CASE)
    ours, _ = cpu.jattn_contender(CASE, operands, True, "cpu")
    results = ours.results(ours.enqueue())
    assert check.Expected(CASE, operands, [(0, 7)]).judge(results).passed
    wrong = results | {"dk": np.asarray(results["dk"]) * 1.01}
    verdict = check.Expected(CASE, operands).judge(wrong)
    assert not verdict.passed
    assert [name for name, ratio in verdict.ratios.items() if ratio > 1] == ["dk"]


def test_errors_of_the_last_rows_show_beside_the_first() -> None:
    """Under a diagonal dk and dv of the first keys are the largest by far."""
    case = CASE.but("long", q_len=1024, kv_len=1024, head_dim=32, head_dim_v=32, dtype="bfloat16")
    case = case.but("causal", is_causal=True, num_heads=2, num_kv_heads=2)
    operands = arrays.make(case)
    expected = check.Expected(case, operands)
    contender, _ = jattn_contender(case, operands, True, "cpu")
    called = contender.enqueue()
    contender.wait(called)
    results = contender.results(called)
    assert expected.judge(results).passed
    for name in ("dk", "dv", "out", "dq"):
        wrong = np.array(results[name])
        wrong[:, -256:] *= 0.7
        ratios = expected.judge(results | {name: wrong}).ratios
        assert [other for other, ratio in ratios.items() if ratio > 1] == [name]


# Few queries at the end of 300 keys: pairs of one head and batch entry.
PAIRS = {
    "decode-plain": 300,
    "decode-positions": 300,
    "decode-4 queries": 297 + 298 + 299 + 300,
    "decode-16 queries": 16 * 300 - 15 * 16 / 2,
    "decode-mask": 300,
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_few_queries_are_counted_where_they_stand(name: str) -> None:
    case = cases.named(name).but("short", batch=2, kv_len=300, num_heads=4, num_kv_heads=2)
    assert arrays.visible_pairs(case, arrays.make(case)) == 2 * PAIRS[name]


def test_pairs_of_few_queries_in_a_window() -> None:
    case = cases.named("decode-window").but("short", batch=2, kv_len=300, window=(99, 0))
    assert arrays.visible_pairs(case, arrays.make(case)) == 2 * 100


@pytest.mark.parametrize("form", ["1n1s", "bn1s", "1nts", "bnts"])
def test_the_gradient_of_a_bias_is_summed_up_like_ours(form: str) -> None:
    """Over what shares the bias; one that is not is wrong."""
    case = CASE.but("bias", batch=3, q_len=60, kv_len=70, is_causal=False, bias_form=form)
    operands = arrays.make(case)
    expected = check.Expected(case, operands, [(1, 2)])
    contender, backends = jattn_contender(case, operands, True, "cpu")
    assert backends == "cpu/cpu"
    called = contender.enqueue()
    contender.wait(called)
    results = contender.results(called)
    assert expected.judge(results).passed
    assert not expected.judge(results | {"dbias": results["dbias"] + 1e-3}).passed


def test_errors_of_normal_numbers_and_of_outliers_come_from_their_own_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accuracy, "BACKENDS", ("flash", "cpu"))
    case = accuracy.problem("bfloat16", 64)
    drawn = arrays.make(case)
    operands = accuracy.with_outliers(drawn, first=accuracy.ENTRIES)
    differs = np.asarray(operands.q != drawn.q).mean(axis=(1, 2, 3))
    assert (differs[: accuracy.ENTRIES] == 0).all()
    assert ((differs[accuracy.ENTRIES :] > 0) & (differs[accuracy.ENTRIES :] < 0.01)).all()

    found = accuracy.measure(case, operands, ["jax-xla"])
    assert found["jattn flash"] == "refused: PLATFORM"
    halves = {"normal": (0, 1), "outliers": (2, 3)}
    for inputs, entries in halves.items():
        at = [(b, k) for b in entries for k in (0, case.num_kv_heads - 1)]
        with jax.enable_x64(True):
            solved = [
                {h: check.solve(case, operands, *h, wide, rounded=rounded) for h in at}
                for wide, rounded in (("float64", False), ("float32", True))
            ]
            assert found["textbook"][inputs] == check.errors(*solved)
        for name in ("jattn cpu", "jax-xla"):
            rms = found[name][inputs]["rms"]
            assert all(1e-4 < rms[tensor] < 1e-2 for tensor in ("out", "dq", "dk", "dv")), name


class Clock:
    """In the place of the module `time`: goes on when somebody sleeps, while threads compute for these seconds."""

    def __init__(self, *computed: float) -> None:
        self.now = 0.0
        self.used = 0.0
        self.left = list(computed)

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.used

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.used += self.left.pop(0) if self.left else 0.0


def test_a_round_begins_when_the_threads_of_the_one_before_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a pause of 20 ms two threads may compute for 40."""
    clock = Clock(0.04, 0.02, 0.003, 0.001, 0.04)
    monkeypatch.setattr(timing, "time", clock)
    timing.come_to_rest(0.02)
    assert clock.left == [0.04]
    assert clock.now == pytest.approx(4 * 0.02)
    timing.come_to_rest(0.0)
    assert clock.left == [0.04]


def test_a_call_that_fills_a_round_runs_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)

    def contender(name: str, seconds: float) -> timing.Contender:
        def enqueue() -> None:
            ran.append(name)
            clock.sleep(seconds)

        return timing.Contender(name, enqueue, lambda _: None, lambda _: {})

    found = timing.compare([contender("slow", 0.02), contender("fast", 1e-4)], 3, 0.01)
    assert found["slow"].calls_per_round == 1
    assert found["fast"].calls_per_round == 100
    assert found["fast"].median_seconds == pytest.approx(1e-4)
    assert ran.count("slow") == 2 + 3  # two to find the number of calls
    assert found["slow"].enqueue_seconds is None
    assert found["fast"].enqueue_seconds == pytest.approx(1e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_orders_of_rounds_are_balanced(count: int) -> None:
    """Everybody is as often in each place and, in as many rounds as that takes, behind each of the others."""
    rounds = count if count % 2 == 0 else 2 * count
    orders = timing.balanced_orders(count, rounds, seed=3)
    assert all(sorted(order) == list(range(count)) for order in orders)
    for place in range(count):
        assert set(collections.Counter(order[place] for order in orders).values()) == {
            rounds // count
        }
    behind = collections.Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(behind) == count * (count - 1)
    assert len(set(behind.values())) <= 1
    assert timing.balanced_orders(0, 2) == [[], []]


def point(contender: str, rounds: tuple[float, ...], enqueue_us: float | None = None) -> Point:
    return Point(
        "case",
        None,
        "forward",
        contender,
        statistics.median(rounds),
        rounds_us=rounds,
        enqueue_us=enqueue_us,
    )


def test_cells_that_cannot_be_told_apart_are_both_bold() -> None:
    fast, near, far = (
        point("a", (10, 11, 12, 13), enqueue_us=11),
        point("b", (9, 12, 13, 14)),
        point("c", (13, 14, 15, 90)),
    )
    titles = ["a", "b", "c", "d"]
    cells = tables._cells({"a": fast, "b": near, "c": far}, titles, 0, tables.MICROSECONDS)
    assert cells == ["**12**†", "**12**", "14", "-"]
    assert tables._cells({"c": far}, ["c"], 0, tables.MICROSECONDS) == ["14"]


def test_ratios_say_how_many_rows_they_are_of() -> None:
    rows = [
        {"jattn": point("jattn", (1.0,)), "b": point("b", (2.0,))},
        {"jattn": point("jattn", (1.0,))},
        {"b": point("b", (2.0,))},
    ]
    assert tables._ratios(rows, ["jattn", "b"]) == "b 2.00 (2.00 to 2.00, 1 of 2 rows)"


def test_rows_with_wrong_results_are_named(tmp_path: Path) -> None:
    base = {"case": "x", "pass_name": "forward"}
    rows = [
        base | {"contender": "torch-cudnn", "note": "WRONG, not timed:"},
        base | {"contender": "torch-flash", "note": "torch-flash does not take: bias"},
        {"case": "y", "pass_name": "forward", "contender": "jattn"}
        | {"note": "dq of a is 1.0e-01 of the largest value off"},
    ]
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"rows": rows}))
    assert records.read(path).left_out() == [
        "torch cuDNN on x forward",
        "all on y forward (dq of a is 1.0e-01 of the largest value off)",
    ]


@pytest.mark.parametrize("name", _core.cpu_instruction_sets())
def test_flags_of_a_set_are_those_of_the_build(name: str) -> None:
    flags = cpu_tiles.flags_of(name)
    assert not any("$" in flag for flag in flags)
    needed = {
        "amx": "-mamx-bf16",
        "avx512_bf16": "-mavx512bf16",
        "avx512": "-mavx512f",
        "avx2": "-mavx2",
        "baseline": "",
    }
    assert needed[name] in [*flags, ""]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names instruction sets of x86-64")
@pytest.mark.parametrize("name", ["amx", "avx512_bf16", "avx512", "avx2"])
def test_the_program_of_the_tiles_compiles(name: str) -> None:
    subprocess.run([*cpu_tiles.compiler_command(name), "-fsyntax-only"], check=True)


def test_the_program_of_the_tiles_runs(tmp_path: Path) -> None:
    """On the best of this machine's sets."""
    name = _core.cpu_instruction_sets()[0]
    rows = list(cpu_tiles.measure(name, tmp_path, most_repeats=1))
    parts = {row.part for row in rows}
    assert {"scores", "softmax", "forward", "backward"} <= parts
    assert all(row.seconds > 0 for row in rows)


def test_a_line_of_the_tiles_reads_back() -> None:
    row = cpu_tiles.parse("amx", "forward bfloat16 128 full 1024 2e-3 4e9 2.5e12 1")
    assert (row.part, row.head_dim, row.mask, row.products) == ("forward", 128, "full", 1)
    assert row.flops_per_second == pytest.approx(2e12)
    assert row.share == pytest.approx(0.8)
    assert "80% of 2500" in str(row)
    assert dataclasses.asdict(row)["keys"] == 1024


def test_the_table_of_few_queries_reads_the_names_of_their_problems() -> None:
    for case in cpu.decoding(["bfloat16"]):
        match = tables.DECODING_NAME.fullmatch(case.name)
        assert match is not None
        shape = (
            case.batch,
            case.q_len,
            case.kv_len,
            case.num_heads,
            case.num_kv_heads,
            case.head_dim,
        )
        assert match.groups() == ("bfloat16", *map(str, shape))


def test_the_table_of_short_sequences_reads_the_names_of_their_problems() -> None:
    for case in cpu.short(["float16"]):
        match = tables.SHORT_NAME.fullmatch(case.name)
        assert match is not None
        assert match.groups() == ("float16", *map(str, (case.batch, case.q_len, case.head_dim)))


def test_short_heads_are_checked_together() -> None:
    case = cpu_short_case()
    heads = cpu.checked_heads(case)
    assert len(heads) == len(set(heads)) == case.num_kv_heads
    operands = arrays.make(case)
    contender, _ = jattn_contender(case, operands, True, "cpu")
    results = contender.enqueue()
    contender.wait(results)
    found = contender.results(results)
    expected = check.Expected(case, operands, heads)
    assert expected.judge(found).passed
    for name in ("out", "dk"):
        batch, head = heads[-1]
        spoilt = np.asarray(found[name]).copy()
        spoilt[batch, 3, head, 5] += 0.01
        assert not expected.judge(found | {name: spoilt}).passed, name
        assert not expected.judge(found | {name: spoilt[..., :-1]}).passed, name


def cpu_short_case() -> Case:
    return next(cpu.short(["float32"]))


def test_records_say_how_they_were_made() -> None:
    facts = report.circumstances()
    assert {"time", "commit", "modified", "device", "versions", "command"} <= set(facts)
    assert "core" in str(facts["device"])


def test_a_run_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(call_timing.MATMUL_SIZE, "cpu", 64)
    call_timing.matmul_speed.cache_clear()
    file = tmp_path / "run.json"
    arguments = (
        "--case group-gqa-2 --backend cpu --rivals jax-xla --pass forward --rounds 2 --seconds 0.01"
    )
    assert benchmark_run.main([*arguments.split(), "--out", str(file)]) == 0
    call_timing.matmul_speed.cache_clear()
    content = json.loads(file.read_text())
    assert set(content["matmul_tflops"]) == {"bfloat16", "float32"}
    assert min(content["matmul_tflops"].values()) > 0
    ours, rival_row = content["rows"]
    assert (ours["contender"], ours["backends"]) == ("jattn:cpu", "cpu")
    assert len(ours["rounds_us"]) == 2
    assert ours["median_us"] > 0
    assert rival_row["note"] == "jax-xla does not take: value head dim"


@pytest.mark.parametrize("who", latency.WHO)
def test_latency_has_a_figure_for_each_step(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "STEADY_CALLS", 2)
    found = latency.child(who, "usual").seconds
    steps = ("trace and lower", "compile", "first call", "later calls")
    passes = ("forward", "forward+backward")
    assert {f"{step}, {name}" for step in steps for name in passes} <= set(found)
    assert {"import jax", "import, after jax"} <= set(found)
    assert all(seconds > 0 for seconds in found.values())


def test_latency_of_an_unusual_problem_is_that_of_compiling_a_kernel() -> None:
    """One for each pass: so its seconds are those of one kernel."""
    listed = (Path(__file__).parents[2] / "cc" / "core" / "hot_set.txt").read_text().splitlines()
    built_in = {_core.canonical_kernel_key(line) for line in listed if line.startswith("family=")}
    hopper = jattn.Device("cuda", arch=(9, 0))

    def key_of(kernel: Kernel) -> str:
        words = {"family": kernel.family} | kernel.choices
        return _core.canonical_kernel_key(" ".join(f"{name}={x}" for name, x in words.items()))

    def compiled(kind: str) -> list[list[str]]:
        x = jax.ShapeDtypeStruct((1, 256, 8, latency.head_dim(kind)), "bfloat16")
        found = jattn.explain(x, x, x, needs_grad=True, device=hopper, **latency.options(kind))
        assert found.chosen == "flash"
        return [
            [kernel.family for kernel in each.kernels if key_of(kernel) not in built_in]
            for each in found.passes
        ]

    assert compiled("usual") == [[], []]
    assert compiled("unusual") == [["sm90_forward"], ["sm90_backward"]]
    assert compiled("on disk") == compiled("unusual")


@pytest.mark.parametrize(
    ("kind", "origins"),
    [
        ("unusual", []),
        ("unusual", ["embedded"]),
        ("unusual", ["disk"]),
        ("on disk", ["embedded"]),
        ("on disk", ["disk", "nvrtc"]),
    ],
)
def test_latency_of_kernels_from_elsewhere_is_an_error(kind: str, origins: list[str]) -> None:
    with pytest.raises(RuntimeError, match="measures nothing"):
        latency.check_origins(kind, "compile, forward", origins)


def test_latency_counts_the_kernels_that_a_figure_compiled() -> None:
    latency.check_origins("unusual", "compile, forward", ["embedded", "nvrtc", "nvrtc"])
    latency.check_origins("on disk", "compile, forward", ["embedded", "disk"])
    samples = latency.Samples()
    for seconds in (5.0, 3.0, 4.0):
        found = latency.Found(
            {"compile, forward": seconds, "import jax": 1.0}, {"compile, forward": 2}
        )
        samples.note("jattn", found, "compile", ", unusual problem")
    samples.note(
        "jax.nn", latency.Found({"compile, forward": 1.0}, {}), "compile", ", unusual problem"
    )
    assert samples.rows() == [
        {
            "what": "compile, forward, unusual problem",
            "seconds": {"jattn": 4.0, "jax.nn": 1.0},
            "kernels": {"jattn": 2},
        },
        {
            "what": "compile, forward, unusual problem, each kernel",
            "seconds": {"jattn": 2.0},
            "kernels": {},
        },
    ]


def test_memory_of_ours_grows_with_the_length_and_that_of_xla_with_its_square() -> None:
    def growth(name: str) -> float:
        small, large = (
            memory.temporary_bytes(memory.attention_of(name), length, True)
            for length in (256, 1024)
        )
        return large / small

    assert growth("auto") == pytest.approx(4, rel=0.1)
    assert growth("jax-xla") > 6  # 16 less what is linear
