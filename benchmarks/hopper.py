"""Times the kernels for Hopper beside FlashAttention-3 and cuDNN, everything in one run.

The problems of the comparisons that the field publishes (16 384 tokens, num_heads * head_dim = 2048), and those where
kernels differ most: grouped heads, head dims between the usual ones, windows, packed documents, few queries of many
keys. All contenders of a problem are built and checked first, then timed in interleaved rounds of balanced order.

Examples:
  python -m benchmarks.hopper --out benchmarks/results/2026-01-01-h200-hopper.json
  python -m benchmarks.hopper --quick --problems documents short
"""

from __future__ import annotations

import os

# Torch and JAX share the GPU here, and JAX would otherwise take three quarters of its memory at once.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import dataclasses
import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import jattn
from benchmarks import arrays as case_arrays
from benchmarks import report, timing
from benchmarks.arrays import Arrays
from benchmarks.rivals import (
    RIVALS,
    UnsupportedError,
    jattn_attention,
    jax_contender,
    packed_borders,
)
from benchmarks.torch_check import Oracle
from jattn.testing.cases import Case

TOKENS = 16_384
WIDTH = 2048  # num_heads * head_dim
PASSES = ("forward", "forward+backward")
OURS = "jattn:flash"
RAGGED = "flash_mha_varlen"  # our entry point for sequences given by their borders
# Whom the summary compares with: the fastest of each family.
FAMILIES = {
    "FA3": ("fa3-dew", "fa3-jax"),
    "cuDNN": ("jax-cudnn", "torch-cudnn", "jax-cudnn padded"),
}
PROBLEMS_AT_ONCE = 6  # built together, so that threads share the work of compilers


@dataclasses.dataclass(frozen=True)
class Problem:
    """A case, whether a quick run has it, and the forms in which ours runs it.

    Forms: "flash" as it is; "padded": documents as batch entries with lengths; "ragged": by their borders.
    """

    case: Case
    in_quick: bool = False
    forms: tuple[str, ...] = ("flash",)


def _case(name: str, length: int, head_dim: int, num_heads: int = 0, **changes: object) -> Case:
    num_heads = num_heads or WIDTH // head_dim
    case = Case(
        name=name,
        batch=max(1, TOKENS // length),
        q_len=length,
        kv_len=length,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype="bfloat16",
        with_dlse=False,
    )
    return dataclasses.replace(case, **changes)  # type: ignore[arg-type]


def problems() -> list[Problem]:
    """The problems, most telling first."""
    dense = [
        Problem(
            _case(
                f"D{head_dim} {'causal' if causal else 'full'} {length}",
                length,
                head_dim,
                is_causal=causal,
            ),
            in_quick=length in (2048, 8192),
        )
        for length in (8192, 2048, 1024, 4096, 16_384)
        for head_dim in (128, 64, 256)
        for causal in (False, True)
    ]
    grouped = [
        Problem(
            _case(
                f"GQA {heads}/8 {'causal' if causal else 'full'} 8192",
                8192,
                128,
                heads,
                num_kv_heads=8,
                is_causal=causal,
                batch=64 // heads,
            )
        )
        for heads in (32, 64)
        for causal in (False, True)
    ]
    widths = [
        Problem(_case(f"D{head_dim} causal 4096", 4096, head_dim, heads, is_causal=True))
        for head_dim, heads in ((96, 21), (192, 11), (80, 26), (72, 28))
    ]
    widths += [
        Problem(_case(f"D{head_dim} full 4096", 4096, head_dim, heads))
        for head_dim, heads in ((96, 21), (192, 11))
    ]
    windows = [
        Problem(
            _case(f"window {left} 16384", TOKENS, 128, is_causal=True, window=(left, None)),
            in_quick=True,
        )
        for left in (1024, 128)
    ]
    documents = [
        Problem(
            _case(name, TOKENS, 128, is_causal=True, segments="documents"),
            in_quick=True,
            forms=("flash", "ragged", "padded"),
        )
        for name in ("documents", "documents shuffled")
    ]
    short = [
        Problem(_case("short 1024x65536", 65_536, 128, 8, q_len=1024), in_quick=True),
        Problem(_case("square 8192x8192", 8192, 128, 8, batch=1), in_quick=True),
    ]
    decode = [
        Problem(_case("decode 1x8192 32/8", 8192, 128, 32, num_kv_heads=8, q_len=1, batch=64))
    ]
    return dense[:12] + documents + windows + short + grouped + dense[12:] + widths + decode


# --- documents --------------------------------------------------------------------------------------------------------


def document_lengths(count: int = 22, longest: int = 2450, seed: int = 22) -> list[int]:
    """Draws lengths that fill TOKENS, one of them the longest; always the same."""
    rng = np.random.default_rng(seed)
    while True:
        shares = rng.lognormal(sigma=0.8, size=count - 1)
        lengths = np.maximum(1, (shares / shares.sum() * (TOKENS - longest)).astype(np.int64))
        lengths[lengths.argmin()] += TOKENS - longest - lengths.sum()
        if lengths.max() < longest:
            return [int(length) for length in rng.permutation([*lengths, longest])]


def document_ids(shuffled: bool) -> npt.NDArray[np.int32]:
    """Segment ids (1, T) of the packed documents: rising, or in no order."""
    lengths = document_lengths()
    order = np.arange(len(lengths))
    if shuffled:
        order = np.random.default_rng(7).permutation(order)
    return np.repeat(order, [lengths[i] for i in order])[None].astype(np.int32)


def make_arrays(case: Case) -> Arrays:
    """Draws the arrays of a problem."""
    if case.segments != "documents":
        return case_arrays.make(case)
    drawn = case_arrays.make(dataclasses.replace(case, segments=None))
    ids = document_ids("shuffled" in case.name)
    return dataclasses.replace(drawn, q_segments=ids, kv_segments=ids)


@dataclasses.dataclass(frozen=True)
class Padded:
    """Packed documents as a batch with lengths, and how results get back."""

    case: Case
    arrays: Arrays
    rows: jax.Array  # of the padded batch, flattened, for every packed token

    @classmethod
    def make(cls, case: Case, arrays: Arrays) -> Padded:
        assert arrays.q_segments is not None
        borders = packed_borders(arrays.q_segments)
        lengths = np.diff(borders).astype(np.int32)
        longest = int(lengths.max())
        rows = np.concatenate([d * longest + np.arange(n) for d, n in enumerate(lengths)])
        slots = jnp.asarray(rows)

        def pad(x: jax.Array) -> jax.Array:
            filled = jnp.zeros((len(lengths) * longest, *x.shape[2:]), x.dtype).at[slots].set(x[0])
            return filled.reshape(len(lengths), longest, *x.shape[2:])

        return cls(
            dataclasses.replace(
                case, batch=len(lengths), q_len=longest, kv_len=longest, segments=None
            ),
            dataclasses.replace(
                arrays,
                q=pad(arrays.q),
                k=pad(arrays.k),
                v=pad(arrays.v),
                dout=pad(arrays.dout),
                q_segments=None,
                kv_segments=None,
                q_lengths=lengths,
                kv_lengths=lengths,
            ),
            slots,
        )

    def packed(self, contender: timing.Contender, name: str) -> timing.Contender:
        """The contender with results as of the packed form."""

        def results(raw: object) -> dict[str, object]:
            return {
                key: cast(jax.Array, array).reshape(-1, *cast(jax.Array, array).shape[2:])[
                    self.rows
                ][None]
                for key, array in contender.results(raw).items()
            }

        return dataclasses.replace(contender, name=name, results=results)


def ragged_attention(case: Case, arrays: Arrays) -> Callable[..., jax.Array]:
    """Ours over documents given by their borders."""
    assert arrays.q_segments is not None
    entry_point = getattr(jattn, RAGGED)
    borders = packed_borders(arrays.q_segments)
    offsets, longest = jnp.asarray(borders, jnp.int32), int(np.diff(borders).max())

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = entry_point(
            q[0],
            k[0],
            v[0],
            offsets,
            offsets,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=case.scale_value,
            is_causal=case.is_causal,
        )
        return cast(jax.Array, out[None])

    return attention


# --- one problem ------------------------------------------------------------------------------------------------------


Build = Callable[[bool], timing.Contender]


def builders(
    problem: Problem, arrays: Arrays, implementation: str, rivals: Sequence[str]
) -> dict[str, Build]:
    """What makes each contender of a problem, given whether the backward pass is wanted."""
    case = problem.case
    makers: dict[str, Build] = {}

    def add_ours(name: str, attention: Callable[..., jax.Array]) -> None:
        makers[name] = lambda backward: jax_contender(name, arrays, attention, backward)

    if "flash" in problem.forms:
        add_ours(OURS, jattn_attention(case, arrays, implementation))
    if "ragged" in problem.forms and hasattr(jattn, RAGGED):
        add_ours("jattn:ragged", ragged_attention(case, arrays))
    if "padded" in problem.forms:
        padded = Padded.make(case, arrays)

        def ours(backward: bool) -> timing.Contender:
            attention = jattn_attention(padded.case, padded.arrays, implementation)
            contender = jax_contender("", padded.arrays, attention, backward)
            return padded.packed(contender, "jattn:padded")

        makers["jattn:padded"] = ours
        makers["jax-cudnn padded"] = lambda backward: padded.packed(
            RIVALS["jax-cudnn"].build(padded.case, padded.arrays, backward), "jax-cudnn padded"
        )
    for name in rivals:

        def rival(backward: bool, name: str = name) -> timing.Contender:
            if name == "fa3-jax" and case.head_dim != 128:
                raise UnsupportedError(f"{name}: made for head dim 128")
            return RIVALS[name].build(case, arrays, backward)

        makers[name] = rival
    return makers


@dataclasses.dataclass
class Entry:
    """A contender of one problem and pass on its way through the run."""

    problem: Problem
    pass_name: str
    name: str
    contender: timing.Contender | None = None
    check: str = ""
    note: str = ""
    failed: bool = False

    def fails(self, text: str, *, ours_only: bool = True) -> None:
        """Takes the contender out, with one line that says why."""
        self.contender = None
        self.note = (text.strip() or "no message").splitlines()[0][:300]
        self.failed = self.name.startswith("jattn") or not ours_only


def build(entry: Entry, make: Build) -> None:
    """Compiles a contender."""
    try:
        entry.contender = make(entry.pass_name == "forward+backward")
    except UnsupportedError as error:
        entry.note = str(error)
    except Exception as error:  # one contender's failure must not hide the others
        entry.fails(f"{type(error).__name__}: {error}")


def check(entry: Entry, oracle: Oracle) -> None:
    """Runs a contender once and takes it out if its numbers are wrong."""
    if entry.contender is None:
        return
    try:
        raw = entry.contender.enqueue()
        entry.contender.wait(raw)
        verdict = oracle.judge(entry.contender.results(raw))
    except Exception as error:  # likewise
        entry.fails(f"{type(error).__name__}: {error}")
        return
    entry.check = str(verdict)
    if not verdict.passed:
        entry.fails("WRONG, not timed")


def time_entries(
    entries: Sequence[Entry], arrays: Arrays, rounds: int, seconds: float
) -> list[report.Row]:
    """Times the contenders of one problem and pass against each other."""
    case, pass_name = entries[0].problem.case, entries[0].pass_name
    work = report.flops(case, case_arrays.visible_pairs(case, arrays), pass_name)
    running = [entry.contender for entry in entries if entry.contender is not None]
    timings = timing.compare(running, rounds, seconds)
    rows = []
    for entry in entries:
        row = report.Row(
            case.name,
            pass_name,
            entry.name,
            check=entry.check,
            note=entry.note,
            failed=entry.failed,
        )
        if entry.contender is not None:
            row = row.timed(timings[entry.contender.name], work)
        rows.append(row)
    return rows


def run_problems(
    chosen: Sequence[Problem], options: argparse.Namespace, pool: ThreadPoolExecutor
) -> list[report.Row]:
    """Builds, checks and times some problems."""
    arrays = {problem.case.name: make_arrays(problem.case) for problem in chosen}
    entries: dict[tuple[str, str], list[Entry]] = {}
    waiting = []
    for problem in chosen:
        name = problem.case.name
        makers = builders(problem, arrays[name], options.implementation, options.rivals)
        for pass_name in options.passes:
            entries[name, pass_name] = group = [Entry(problem, pass_name, key) for key in makers]
            for entry in group:
                if entry.name.startswith("torch"):  # compiles nothing; autograd keeps to one thread
                    build(entry, makers[entry.name])
                else:
                    waiting.append(pool.submit(build, entry, makers[entry.name]))
    for future in waiting:
        future.result()
    rows: list[report.Row] = []
    for problem in chosen:
        name = problem.case.name
        oracle = Oracle(problem.case, arrays[name])
        for pass_name in options.passes:
            for entry in entries[name, pass_name]:
                check(entry, oracle)
        del oracle
        for pass_name in options.passes:
            found = time_entries(
                entries.pop((name, pass_name)), arrays[name], options.rounds, options.seconds
            )
            print(describe(found), flush=True)
            rows += found
    return rows


# --- words ------------------------------------------------------------------------------------------------------------


def describe(rows: Sequence[report.Row]) -> str:
    """One line for a problem and pass: everybody's TFLOP/s, and who did not run."""
    speeds = [f"{row.contender} {row.tflops:.4g}" for row in rows if row.tflops is not None]
    speeds += [
        f"(enqueued in {row.enqueue_us:.0f} us)"
        for row in rows
        if row.contender == OURS and row.enqueue_us is not None
    ]
    notes = [
        f"{row.contender}: {row.note} {row.check}".strip()
        for row in rows
        if row.tflops is None and (row.failed or not row.note.startswith(row.contender))
    ]
    return f"{rows[0].case:<22}{rows[0].pass_name:<17}" + "  ".join(speeds + notes)


def ratios(
    rows: Sequence[report.Row], family: str, ours: str = OURS
) -> dict[tuple[str, str], float]:
    """Time of the family's fastest over ours, by (case, pass)."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row.median_us is not None:
            times.setdefault((row.case, row.pass_name), {})[row.contender] = row.median_us
    found = {}
    for key, by_name in times.items():
        rival = [by_name[name] for name in FAMILIES[family] if name in by_name]
        if rival and ours in by_name:
            found[key] = min(rival) / by_name[ours]
    return found


def summarize(rows: Sequence[report.Row]) -> str:
    """Geometric means and the worst cells; above 1 ours is faster."""
    lines = []
    dense = re.compile(r"D(64|128|256) (full|causal) \d+$")
    for family, pass_name in itertools.product(FAMILIES, PASSES):
        found = {
            case: value for (case, name), value in ratios(rows, family).items() if name == pass_name
        }
        if not found:
            continue
        cells = {
            "dense grid": {case: value for case, value in found.items() if dense.match(case)},
            "the rest": {case: value for case, value in found.items() if not dense.match(case)},
        }
        for label, values in cells.items():
            if not values:
                continue
            mean = math.exp(sum(map(math.log, values.values())) / len(values))
            worst = sorted(values, key=lambda case: values[case])[:6]
            lines.append(
                f"{pass_name} against {family}, {label}: geometric mean {mean:.3f} of {len(values)}; worst "
                + ", ".join(f"{case} {values[case]:.2f}" for case in worst)
            )
    for form in ("jattn:ragged", "jattn:padded"):
        for family in FAMILIES:
            for (case, pass_name), value in ratios(rows, family, form).items():
                lines.append(f"{form} {case} {pass_name}: {value:.2f} of {family}")
    wrong = [f"{row.case} {row.pass_name} {row.contender}" for row in rows if row.failed]
    lines.append("failed: " + ("; ".join(wrong) if wrong else "nothing of ours"))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns 1 if ours failed somewhere."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few problems, for a first look")
    parser.add_argument(
        "--problems", nargs="+", default=[], help="only names that match one of these"
    )
    parser.add_argument("--implementation", default="flash", help="which of ours (%(default)s)")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument(
        "--rivals",
        nargs="*",
        choices=sorted(RIVALS),
        default=["jax-cudnn", "fa3-dew", "fa3-jax", "torch-cudnn"],
    )
    parser.add_argument("--rounds", type=int, default=8, help="interleaved rounds (%(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=0.03, help="of one contender in one round (%(default)s)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=math.inf,
        help="begin nothing after so many seconds (default: no limit)",
    )
    parser.add_argument("--threads", type=int, default=12, help="that compile (%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    chosen = [problem for problem in problems() if problem.in_quick or not options.quick]
    if options.problems:
        chosen = [
            problem
            for problem in chosen
            if any(re.search(pattern, problem.case.name) for pattern in options.problems)
        ]
    started = time.monotonic()
    facts = report.circumstances(timed=True)
    rows: list[report.Row] = []
    with ThreadPoolExecutor(options.threads) as pool:
        for begin in range(0, len(chosen), PROBLEMS_AT_ONCE):
            part = chosen[begin : begin + PROBLEMS_AT_ONCE]
            if time.monotonic() - started > options.limit:
                print(
                    "no time left for " + ", ".join(problem.case.name for problem in chosen[begin:])
                )
                break
            rows += run_problems(part, options, pool)
            print(f"{time.monotonic() - started:.0f} s", flush=True)
            if options.out is not None:  # so that an interrupted run keeps what it has
                report.write(options.out, rows, facts)
    print(summarize(rows))
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
