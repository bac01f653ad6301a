"""What a benchmark run leaves behind: rows, a table to read and a file to keep.

python -m benchmarks.report FILE... prints the tables of recorded runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks import timing
from jattn.call_timing import matmul_speed
from jattn.device import expected
from jattn.testing.cases import Case

# Products in the backward pass: five against the forward's two, the convention of the FlashAttention papers.
FORWARD_BACKWARD_FACTOR = 3.5


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender on one case and pass; either timed or with a note that says why not."""

    case: str
    pass_name: str  # "forward" or "forward+backward"
    contender: str
    backends: str = ""  # which of ours ran, "forward/backward"
    check: str = ""  # error over allowed error, by tensor
    median_us: float | None = None
    spread: float | None = None
    tflops: float | None = None
    calls_per_round: int | None = None
    rounds_us: tuple[float, ...] = ()
    enqueue_us: float | None = None  # the host's part of a call (timing.enqueue_seconds)
    note: str = ""
    failed: bool = False  # wrong numbers, or an error nobody expected

    def timed(self, result: timing.Timing, flops: float | None = None) -> Row:
        """The row with its times, and with the speed of ``flops`` operations a call."""
        return dataclasses.replace(
            self,
            median_us=result.median_seconds * 1e6,
            spread=result.spread,
            tflops=None if flops is None else flops / result.median_seconds / 1e12,
            calls_per_round=result.calls_per_round,
            rounds_us=tuple(seconds * 1e6 for seconds in result.seconds),
            enqueue_us=None if result.enqueue_seconds is None else result.enqueue_seconds * 1e6,
        )


def flops(case: Case, pairs: float, pass_name: str) -> float:
    """Counts 2 * (D + Dv) per visible pair and head forward, 3.5 times that with the backward."""
    forward = 2.0 * case.num_heads * pairs * (case.head_dim + case.head_dim_v)
    return forward * (FORWARD_BACKWARD_FACTOR if pass_name == "forward+backward" else 1.0)


def format_table(rows: Sequence[Row]) -> str:
    """Sets rows in columns; "vs best rival" is the fastest other implementation's time over this one's."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.median_us is not None and not row.contender.startswith("jattn"):
            key = (row.case, row.pass_name)
            best[key] = min(best.get(key, row.median_us), row.median_us)
    lines: list[tuple[str, ...]] = [
        (
            "case",
            "pass",
            "contender",
            "ran",
            "median us",
            "spread",
            "TFLOP/s",
            "vs best rival",
            "error/allowed",
        )
    ]
    for row in rows:
        if row.median_us is None:
            timed: tuple[str, ...] = ("-", "-", "-", "-")
        else:
            rival = best.get((row.case, row.pass_name))
            timed = (
                f"{row.median_us:,.1f}",
                f"{row.spread or 0.0:.1%}",
                "-" if row.tflops is None else f"{row.tflops:.3g}",
                "-" if rival is None else f"{rival / row.median_us:.2f}",
            )
        remark = row.check if not row.note else f"{row.note} {row.check}".strip()
        lines.append((row.case, row.pass_name, row.contender, row.backends or "-", *timed, remark))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    left_aligned = {0, 1, 2, 3, 8}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left_aligned else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _output(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_name(device: jax.Device) -> str:
    """What the device calls itself; of a CPU its model and the number of cores in use."""
    if device.platform != "cpu":
        return str(device.device_kind)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    return f"{models[0] if models else device.device_kind}, {cores} core{'s' * (cores > 1)}"


def _command(arguments: Sequence[str]) -> str:
    """Returns the command as typed, less where the record is written: that says nothing of the run."""
    main = sys.modules["__main__"].__spec__
    left = ["python", "-m", main.name, *arguments] if main is not None else list(arguments)
    if "--out" in left:
        at = left.index("--out")
        del left[at : at + 2]
    return shlex.join(argument for argument in left if not argument.startswith("--out="))


def circumstances(*, timed: bool = False) -> dict[str, object]:
    """Collects what a number means nothing without: commit, device, clocks, power, versions, command; and, for a run
    that takes times, what a matrix product reaches.

    JATTN_COMMIT says what a copy without its history is of; whether that was changed nobody knows then: null.
    """
    device = jax.devices()[0]
    packages = (
        "jax",
        "jaxlib",
        "jax-cuda13-plugin",
        "jax-cuda12-plugin",
        "nvidia-cudnn-cu13",
        "torch",
        "tokamax",
        "dew-flash-attn-cu13",
        "flash-attn3-jax",
        "numpy",
    )
    named = os.environ.get("JATTN_COMMIT")
    commit = "" if named else _output("git", "rev-parse", "HEAD")
    changes = _output("git", "status", "--porcelain", "--untracked-files=no")
    ceiling = (
        {dtype: matmul_speed(dtype, expected(None)) / 1e12 for dtype in ("bfloat16", "float32")}
        if timed
        else {}
    )
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": named or commit or None,
        "modified": bool(changes) if commit else None,
        "device": _device_name(device),
        "platform": device.platform,
        "cores": os.cpu_count(),
        "gpu": _output(
            "nvidia-smi",
            "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu",
            "--format=csv",
        )
        or None,
        "python": sys.version.split()[0],
        "versions": {package: _version(package) for package in packages if _version(package)},
        "command": _command(sys.argv[1:]),
        **({"matmul_tflops": ceiling} if timed else {}),
    }


def write(path: Path, rows: Sequence[Row], facts: dict[str, object]) -> None:
    """Writes circumstances and rows as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {**facts, "rows": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def read(path: Path) -> tuple[Row, ...]:
    """Reads the rows of a recorded run."""
    rows = json.loads(path.read_text())["rows"]
    return tuple(Row(**(row | {"rounds_us": tuple(row["rounds_us"])})) for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables of the files that are named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", type=Path, nargs="+", help="records of benchmarks.run and its like"
    )
    for path in parser.parse_args(arguments).files:
        print(format_table(read(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
