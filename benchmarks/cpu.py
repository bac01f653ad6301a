"""The CPU kernel against PyTorch (where it is installed) and jax.nn, on the cores of this machine.

  python -m benchmarks.cpu                                  # what make bench-cpu runs: five to eight minutes
  python -m benchmarks.cpu --lengths 512 --dtypes float32 --out out/cpu.json
  python -m benchmarks.cpu --decode                         # one to 32 queries on many keys, forward alone
  python -m benchmarks.cpu --short                          # many sequences of 8 to 128 queries and keys
  python -m benchmarks.cpu --instruction-sets avx512        # this one forced, beside what the machine takes by itself

Every problem of the grid has 8 heads. Times are wall clock, rivals interleaved, the median of the rounds. Everyone's
results, ours and the rivals', are compared with float64 first, and who is wrong is not timed. jax.nn, many times
slower, is timed in float32 and bfloat16, causal, with 64 elements a head alone, and on short sequences. Ends with
geometric means and the worst ratio of each type; exit status 1 if our results are wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads that wait without spinning: two libraries share the cores here.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np

from benchmarks import arrays as case_arrays
from benchmarks import check, report, timing
from benchmarks.arrays import Arrays
from benchmarks.rivals import RIVALS, UnsupportedError, jattn_contender
from jattn import _core
from jattn.testing.cases import Case

NUM_HEADS = 8
OURS = "jattn:cpu"
PASSES = ("forward", "forward+backward")


def _case(
    name: str,
    dtype: str,
    *,
    batch: int = 1,
    q_len: int,
    kv_len: int,
    head_dim: int,
    num_heads: int = NUM_HEADS,
    num_kv_heads: int = NUM_HEADS,
    is_causal: bool = False,
) -> Case:
    return Case(
        name=f"{dtype}-{name}",
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
        is_causal=is_causal,
        with_dlse=False,
    )


def grid(lengths: Sequence[int], dtypes: Sequence[str]) -> Iterator[Case]:
    """The problems, shortest first."""
    for length in sorted(lengths):
        for dtype in dtypes:
            for head_dim in (64, 128):
                for is_causal in (True, False):
                    name = f"{length}-d{head_dim}-{'causal' if is_causal else 'full'}"
                    yield _case(
                        name,
                        dtype,
                        q_len=length,
                        kv_len=length,
                        head_dim=head_dim,
                        is_causal=is_causal,
                    )


# Batch, queries, keys, heads, key/value heads, elements a head.
DECODING = (
    (1, 1, 512, 8, 8, 64),
    (1, 1, 4096, 32, 8, 128),
    (1, 1, 4096, 32, 4, 128),
    (8, 1, 1024, 32, 32, 128),
    (1, 4, 4096, 16, 16, 64),
    (1, 8, 4096, 16, 16, 128),
    (1, 1, 16384, 32, 8, 128),
    (1, 16, 16384, 8, 8, 128),
    (1, 32, 4096, 8, 8, 64),
)


def decoding(dtypes: Sequence[str]) -> Iterator[Case]:
    """Few queries on many keys."""
    for dtype in dtypes:
        for batch, q_len, kv_len, num_heads, num_kv_heads, head_dim in DECODING:
            yield _case(
                f"b{batch}-{q_len}x{kv_len}-n{num_heads}/{num_kv_heads}-d{head_dim}",
                dtype,
                batch=batch,
                q_len=q_len,
                kv_len=kv_len,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
            )


# Batch, queries and keys, elements a head.
SHORT = ((512, 8, 64), (256, 16, 64), (128, 32, 64), (64, 49, 32), (64, 64, 64), (32, 128, 64))


def short(dtypes: Sequence[str]) -> Iterator[Case]:
    """Many short sequences: windows of an image, frames of a video, columns of a table."""
    for dtype in dtypes:
        for batch, length, head_dim in SHORT:
            yield _case(
                f"b{batch}-{length}-d{head_dim}",
                dtype,
                batch=batch,
                q_len=length,
                kv_len=length,
                head_dim=head_dim,
            )


def checked_heads(case: Case) -> list[tuple[int, int]]:
    """The last head, for solving takes longer than the pass that is checked; of short ones some more."""
    count = 1 if case.q_len * case.kv_len > SHORT[-1][1] ** 2 else NUM_HEADS
    return [
        (case.batch - 1, case.num_kv_heads - 1 - i) for i in range(min(count, case.num_kv_heads))
    ]


def rivals_of(case: Case) -> tuple[str, ...]:
    """Who is timed beside us."""
    is_short = case.batch > 1 and case.q_len == case.kv_len
    of_grid = case.head_dim == 64 and case.is_causal
    with_jax = (is_short or of_grid) and case.dtype != "float16"
    return ("torch-flash", "jax-xla") if with_jax else ("torch-flash",)


def forced(contender: timing.Contender, instruction_set: str) -> timing.Contender:
    """The same kernel, by one instruction set; "" is the best one.

    Calls of other contenders have to be over: the set is that of the process while a call runs.
    """

    def enqueue() -> object:
        if not _core.cpu_force_instruction_set(instruction_set):
            raise ValueError(f"this machine cannot run {instruction_set}")
        return contender.enqueue()

    name = f"{contender.name}/{instruction_set}" if instruction_set else contender.name
    return dataclasses.replace(contender, name=name, enqueue=enqueue)


def measure(
    case: Case,
    pass_name: str,
    operands: Arrays,
    expected: check.Expected,
    rounds: int,
    instruction_sets: Sequence[str] = (),
) -> list[report.Row]:
    """Checks and times everyone on one problem and pass."""
    backward = pass_name == "forward+backward"
    ours, backends = jattn_contender(case, operands, backward, "cpu")
    built = [forced(ours, name) for name in ("", *instruction_sets)]
    rows: list[report.Row] = []
    for name in rivals_of(case):
        try:
            built.append(RIVALS[name].build(case, operands, backward))
        except UnsupportedError as error:
            rows.append(report.Row(case.name, pass_name, name, note=str(error)))
    contenders: list[timing.Contender] = []
    checks: dict[str, str] = {}
    for contender in built:
        results = contender.enqueue()
        contender.wait(results)
        verdict = expected.judge(contender.results(results))
        checks[contender.name] = str(verdict)
        if verdict.passed:
            contenders.append(contender)
            continue
        wrong = report.Row(case.name, pass_name, contender.name, check=str(verdict))
        is_ours = contender.name.startswith(OURS)
        rows.append(dataclasses.replace(wrong, note="WRONG, not timed:", failed=is_ours))
    work = report.flops(case, case_arrays.visible_pairs(case, operands), pass_name)
    timings = timing.compare(contenders, rounds, round_seconds=0.05, pause_seconds=0.03)
    return rows + [
        report.Row(
            case.name,
            pass_name,
            name,
            backends=backends if name.startswith(OURS) else "",
            check=checks[name],
        ).timed(result, work)
        for name, result in timings.items()
    ]


def summary(rows: Sequence[report.Row]) -> str:
    """The geometric mean and the least of a rival's time over ours, by type, rival and pass."""
    times = {
        (row.case, row.pass_name, row.contender): row.median_us
        for row in rows
        if row.median_us is not None
    }
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for (case, pass_name, rival), microseconds in times.items():
        if rival != OURS and (case, pass_name, OURS) in times:
            key = (case.split("-")[0], rival, pass_name)
            ratios.setdefault(key, []).append(microseconds / times[case, pass_name, OURS])
    lines = [f"{'':10}{'':22}{'':18}{'geomean':>9}{'least':>8}{'most':>8}"]
    for (dtype, rival, pass_name), values in sorted(ratios.items()):
        mean = float(np.exp(np.mean(np.log(values))))
        lines.append(
            f"{dtype:10}{rival:22}{pass_name:18}{mean:8.2f}x{min(values):7.2f}x{max(values):7.2f}x"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the grid and prints both tables; returns 1 if our results are wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 4096])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16"])
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--decode", action="store_true", help="few queries instead of the grid")
    instead.add_argument("--short", action="store_true", help="short sequences instead of the grid")
    parser.add_argument(
        "--instruction-sets", nargs="+", default=[], metavar="NAME", help="time these, too"
    )
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    facts = report.circumstances()
    rows: list[report.Row] = []
    if options.decode:
        problems = decoding(options.dtypes)
    elif options.short:
        problems = short(options.dtypes)
    else:
        problems = grid(options.lengths, options.dtypes)
    for case in problems:
        operands = case_arrays.make(case)
        expected = check.Expected(case, operands, checked_heads(case))
        for pass_name in PASSES[: 1 if options.decode else None]:
            measured = measure(
                case, pass_name, operands, expected, options.rounds, options.instruction_sets
            )
            rows += measured
            times = [
                f"{row.contender} {row.median_us / 1e3:,.2f} ms"
                for row in measured
                if row.median_us is not None
            ]
            print(f"{case.name} {pass_name}: {', '.join(times)}", file=sys.stderr, flush=True)
            if options.out is not None:
                report.write(options.out, rows, facts)
    print(report.format_table(rows))
    print(summary(rows))
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
