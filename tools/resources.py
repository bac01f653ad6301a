"""Prints what the compiled kernels cost: registers, spills, stack, shared memory, size of the machine code.

    python tools/resources.py                  kernels of the installed module's hot set
    python tools/resources.py LOG...           logs of `nvcc -Xptxas -v`, or of NVRTC

The exit status is 1 if a kernel spills registers, uses a stack frame, or if the compiler could not keep the tensor
cores' instructions in flight (messages C75xx, C76xx).
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
# "Potential Performance Loss: wgmma.mma_async instructions are serialized", and its relatives.
PIPELINING = re.compile(r"^.*\bC7[56]\d\d\b.*$", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """What one kernel uses, from the compiler's log; sizes in bytes, for each thread except shared memory."""

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    code: int
    messages: tuple[str, ...]

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with the kernel, in words; empty if nothing is."""
        faults = list(self.messages)
        if self.spill_stores or self.spill_loads:
            faults.append(f"spills {self.spill_stores} + {self.spill_loads} bytes of registers")
        elif self.stack:
            faults.append(f"uses a stack frame of {self.stack} bytes")
        return tuple(faults)


def read_log(name: str, log: str, code: int = 0) -> Resources:
    """Reads the log of one kernel.

    Raises:
      ValueError: the log does not report exactly one kernel. A log that says nothing must not pass for a good one.
    """
    spills, registers = SPILLS.findall(log), REGISTERS.findall(log)
    if len(spills) != 1 or len(registers) != 1:
        raise ValueError(f"{name}: the log reports {len(registers)} kernels, must be 1:\n{log}")
    shared = SHARED.findall(log)
    stack, stores, loads = (int(number) for number in spills[0])
    return Resources(
        name=name,
        registers=int(registers[0]),
        stack=stack,
        spill_stores=stores,
        spill_loads=loads,
        static_shared=int(shared[0]) if shared else 0,
        code=code,
        messages=tuple(line.strip() for line in PIPELINING.findall(log)),
    )


def hot_set() -> list[Resources]:
    """Reads the logs that travel in the native module."""
    from jattn import _core

    return [read_log(row["key"], row["log"], len(row["cubin"])) for row in _core.hot_set()]


def table(kernels: list[Resources]) -> str:
    """Lays the kernels out as text, one a line; parts of the names that all share are left out."""
    words = [kernel.name.split(" ") for kernel in kernels]
    shared = set.intersection(*(set(parts) for parts in words)) if len(words) > 1 else set()
    lines = ["registers  stack  spills  shared    code  kernel"]
    for kernel, parts in zip(kernels, words, strict=True):
        name = " ".join(part for part in parts if part not in shared)
        spills = kernel.spill_stores + kernel.spill_loads
        numbers = (kernel.registers, kernel.stack, spills, kernel.static_shared, kernel.code)
        lines.append("{:9d}  {:5d}  {:6d}  {:6d}  {:6d}  ".format(*numbers) + name)
        lines += [f"           FAULT: {fault}" for fault in kernel.faults]
    if shared:
        lines.append("all: " + " ".join(part for part in words[0] if part in shared))
    return "\n".join(lines)


def main() -> int:
    """Prints the table; see the top of the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", nargs="*", type=Path, help="logs to read; default: the hot set")
    arguments = parser.parse_args()
    kernels = [read_log(log.name, log.read_text()) for log in arguments.logs] or hot_set()
    if not kernels:
        print("The module was built without nvcc: there is no hot set.", file=sys.stderr)
        return 1
    print(table(kernels))
    return 1 if any(kernel.faults for kernel in kernels) else 0


if __name__ == "__main__":
    sys.exit(main())
