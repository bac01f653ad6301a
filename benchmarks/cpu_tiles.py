"""The parts of the CPU kernel as shares of the multiply-add peak, for every instruction set of this machine.

  python -m benchmarks.cpu_tiles                 # all sets; a minute each on a quiet core
  python -m benchmarks.cpu_tiles avx512 avx2

Compiles benchmarks/cpu_tiles.cc with $CXX (c++) and the flags that the build gives the set (cmake/cpu_kernel.cmake),
and runs it on one thread. Passes on AMX are shares of the peak of AMX products, divided by the number of bfloat16
products that make one of the type (float16 4, float32 6).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jattn import _core

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("benchmarks/cpu_tiles.cc", "cc/cpu/plan.cc", "cc/cpu/threads.cc")


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles and runs the benchmark for the named sets."""
    names = list(arguments or sys.argv[1:]) or _core.cpu_instruction_sets()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            program = Path(folder) / name
            compiler = os.environ.get("CXX", "c++")
            command = [compiler, "-std=c++20", "-O3", f"-I{ROOT / 'cc'}", *flags_of(name)]
            command += ["-Wno-unused-function", *(str(ROOT / source) for source in SOURCES)]
            subprocess.run([*command, "-o", str(program)], check=True)
            print(f"--- {name}", flush=True)
            subprocess.run([str(program)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
