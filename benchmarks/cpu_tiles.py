"""The parts of the CPU kernel as shares of the multiply-add peak, for every instruction set of this machine.

  python -m benchmarks.cpu_tiles                 # all sets; about half a minute each
  python -m benchmarks.cpu_tiles avx512 avx2
  python -m benchmarks.cpu_tiles --out benchmarks/results/2026-01-01-cpu-tiles.json

Compiles benchmarks/cpu_tiles.cc with $CXX (c++) and the flags that the build gives the set (cmake/cpu_kernel.cmake),
and runs it on one thread. What runs on AMX is a share of the peak of AMX products, divided by the number of bfloat16
products that make one of the type (float16 4, float32 6).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks import report
from jattn import _core

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("benchmarks/cpu_tiles.cc", "cc/cpu/plan.cc", "cc/cpu/threads.cc")
WHAT = "One thread, two heads, 1024 keys (tiles: 64 x 64), the least of many runs by the thread's CPU clock"


@dataclasses.dataclass(frozen=True)
class Row:
    """One part of the kernel, measured beside the peak."""

    instruction_set: str
    part: str  # "scores", "values", "dk,dv", "dq": products of a tile; "softmax"; "forward", "backward"
    dtype: str
    head_dim: int | None
    mask: str | None
    keys: int
    seconds: float
    flops_per_second: float | None  # in the type of the row
    peak_flops_per_second: float  # in the type of the row
    products: int  # of bfloat16 on the matrix unit that make one of the type; 0: vectors multiply

    @property
    def share(self) -> float | None:
        """Of the peak."""
        speed = self.flops_per_second
        return None if speed is None else speed / self.peak_flops_per_second

    def __str__(self) -> str:
        name = f"{self.instruction_set:9}{self.part:9} {self.dtype:9}"
        shape = f"D={self.head_dim or '-':<4} {self.mask or '':7}"
        text = f"{name} {shape} {self.seconds * 1e6:10.2f} us"
        if self.flops_per_second is None or self.share is None:
            return text
        peak = f"{self.share:4.0%} of {self.peak_flops_per_second / 1e9:.0f}"
        return f"{text} {self.flops_per_second / 1e9:7.0f} GFLOP/s  {peak}"


def flags_of(instruction_set: str) -> list[str]:
    """The compiler flags of a set, as the build has them."""
    text = (ROOT / "cmake" / "cpu_kernel.cmake").read_text()
    variables = {
        name: value.split()
        for name, value in re.findall(r"set\((\w+_flags)\s+([^)]*)\)", text, re.DOTALL)
    }

    def expand(words: list[str]) -> list[str]:
        expanded: list[str] = []
        for word in words:
            name = re.fullmatch(r"\$\{(\w+)\}", word)
            expanded += expand(variables[name[1]]) if name else [word]
        return expanded

    specific = variables.get(f"{instruction_set}_flags", [])
    return expand([*variables["cpu_flags"], *specific])


def parse(instruction_set: str, line: str) -> Row:
    """Reads one line of the program."""
    part, dtype, head_dim, mask, keys, seconds, flops, peak, products = line.split()
    return Row(
        instruction_set,
        part,
        dtype,
        int(head_dim) or None,
        None if mask == "-" else mask,
        int(keys),
        float(seconds),
        float(flops) / float(seconds) if float(flops) else None,
        float(peak),
        int(products),
    )


def compiler_command(instruction_set: str) -> list[str]:
    """Compiles the program for one set, but for the name of the output."""
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++20", "-O3", f"-I{ROOT / 'cc'}", *flags_of(instruction_set)]
    return [*command, "-Wno-unused-function", *(str(ROOT / source) for source in SOURCES)]


def measure(instruction_set: str, folder: Path, most_repeats: int | None = None) -> Iterator[Row]:
    """Compiles and runs the program for one set, each part timed `most_repeats` times at most."""
    program = folder / instruction_set
    subprocess.run([*compiler_command(instruction_set), "-o", str(program)], check=True)
    arguments = [] if most_repeats is None else [str(most_repeats)]
    with subprocess.Popen([str(program), *arguments], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            yield parse(instruction_set, line)
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, instruction_set)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the named sets and prints; writes JSON if asked to."""
    sets = _core.cpu_instruction_sets()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(sets)} (all)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    if unknown := set(options.sets) - set(sets):
        parser.error(f"this machine has {', '.join(sets)}; not {', '.join(sorted(unknown))}")
    facts = report.circumstances()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.sets or sets:
            for row in measure(name, Path(folder)):
                print(row, flush=True)
                rows.append(row)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        content = {**facts, "what": WHAT, "rows": [dataclasses.asdict(row) for row in rows]}
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
