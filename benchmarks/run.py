"""Measures attention on named problems, beside other implementations of it.

Examples:
  python -m benchmarks.run --list
  python -m benchmarks.run --tag peers --rivals jax-cudnn torch-flash --out out/peers.json
  python -m benchmarks.run --case bench-f32 --backend mem_efficient xla --pass forward

Every contender's numbers are checked before it is timed, and a contender that fails is not timed.
Times are wall clock over many asynchronous jitted calls; the median over interleaved rounds is
reported, with (slowest - fastest) / median as spread. FLOPs count 4*D per visible pair and head
forward (causal: half of T*S), 3.5 times that forward and backward.
"""

from __future__ import annotations

import os

# Torch and JAX share the GPU here, and JAX would otherwise take three quarters of its memory at once.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

import jattn
from benchmarks import arrays as case_arrays
from benchmarks import check, report, timing
from benchmarks.rivals import RIVALS, UnsupportedError, jattn_contender
from jattn.testing import cases
from jattn.testing.cases import Case

PASSES = {
    "forward": ("forward",),
    "backward": ("forward+backward",),
    "both": ("forward", "forward+backward"),
}


def measure(
    case: Case, pass_name: str, options: argparse.Namespace, operands: case_arrays.Arrays
) -> list[report.Row]:
    """Builds, checks and times every contender on one case and pass."""
    backward = pass_name == "forward+backward"
    rows: list[report.Row] = []
    contenders: dict[str, timing.Contender] = {}
    backends: dict[str, str] = {}

    def note(contender: str, text: str, *, failed: bool = False) -> None:
        line = (text.strip() or "no message").splitlines()[0]
        rows.append(report.Row(case.name, pass_name, contender, note=line, failed=failed))

    for implementation in options.backend or [None]:
        name = f"jattn:{implementation or 'auto'}"
        try:
            contenders[name], backends[name] = jattn_contender(
                case, operands, backward, implementation
            )
        except jattn.NoBackendError as error:
            note(
                name,
                "refused: "
                + "; ".join(f"{r.backend} {r.code} {r.argument}" for r in error.reasons),
            )
        except Exception as error:  # one contender's failure must not hide the others
            note(name, f"{type(error).__name__}: {error}", failed=True)
    for name in options.rivals:
        try:
            contenders[name] = RIVALS[name].build(case, operands, backward)
        except UnsupportedError as error:
            note(name, str(error))
        except Exception as error:  # likewise; another implementation's crash is not our failure
            note(name, f"{type(error).__name__}: {error}")

    checks: dict[str, str] = {}
    for name, contender in list(contenders.items()):
        try:
            results = contender.enqueue()
            contender.wait(results)
            verdict = check.judge(case, operands, contender.results(results))
        except Exception as error:  # likewise
            note(name, f"{type(error).__name__}: {error}", failed=name.startswith("jattn"))
            del contenders[name]
            continue
        checks[name] = str(verdict)
        if not verdict.passed:
            rows.append(
                report.Row(
                    case.name,
                    pass_name,
                    name,
                    backends=backends.get(name, ""),
                    check=str(verdict),
                    note="WRONG, not timed:",
                    failed=name.startswith("jattn"),
                )
            )
            del contenders[name]

    work = report.flops(case, case_arrays.visible_pairs(case, operands), pass_name)
    timings = timing.compare(list(contenders.values()), options.rounds, options.seconds)
    timed = [
        report.Row(
            case.name,
            pass_name,
            name,
            backends=backends.get(name, ""),
            check=checks[name],
        ).timed(result, work)
        for name, result in timings.items()
    ]
    return timed + rows


def choose_cases(options: argparse.Namespace) -> list[Case]:
    """The cases that the command line names, in the order of the table; at least one."""
    chosen = [cases.named(name) for name in options.case]
    for tag in options.tag:
        chosen += [case for case in cases.tagged(tag) if case not in chosen]
    return chosen or list(cases.tagged("bench"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmarks; returns 1 if one of our backends gave wrong numbers or failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", default=[], help="names of cases")
    parser.add_argument(
        "--tag", nargs="+", default=[], help="all cases with one of these tags (default: bench)"
    )
    parser.add_argument(
        "--backend", nargs="+", help="our backends to time (default: the one that auto picks)"
    )
    parser.add_argument(
        "--rivals", nargs="+", choices=sorted(RIVALS), default=[], help="others to time beside"
    )
    parser.add_argument("--pass", dest="passes", choices=sorted(PASSES), default="both")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="of one contender in one round (%(default)s)"
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--list", action="store_true", help="list the benchmark cases and stop")
    options = parser.parse_args(arguments)
    if options.list:
        for case in cases.tagged("bench"):
            print(f"{case.name:<28} {' '.join(sorted(case.tags))}")
        return 0

    facts = report.circumstances(timed=True)
    rows: list[report.Row] = []
    work = [(case, name) for case in choose_cases(options) for name in PASSES[options.passes]]
    operands: case_arrays.Arrays | None = None
    drawn: Case | None = None
    with tqdm(work, unit="problem", file=sys.stderr) as bar:
        for case, pass_name in bar:
            if case is not drawn or operands is None:
                operands, drawn = case_arrays.make(case), case
            bar.set_description(f"{case.name} {pass_name}")
            measured = measure(case, pass_name, options, operands)
            rows += measured
            found = ", ".join(
                f"{row.contender} {row.median_us:,.1f} us"
                if row.median_us
                else f"{row.contender} {row.note}"
                for row in measured
            )
            bar.write(f"{case.name} {pass_name}: {found}", file=sys.stderr)
            if (
                options.out is not None
            ):  # after every case, so that an interrupted run keeps what it has
                report.write(options.out, rows, facts)
    print(report.format_table(rows))
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
