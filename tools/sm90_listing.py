"""Reads the machine code of an sm90 forward kernel and says whether its main loop is what the source means.

    python3 tools/sm90_listing.py build/sm90/*.cubin

One line per cubin: products and instructions of the loop body, registers of the producer, exponentials in
the shadow of the output product, and faults: a producer with more registers than it keeps, a wait after every
product, local memory in the loop, a missing product. Needs cuobjdump. ptxas gives no warning when it moves a
wait so that nothing overlaps; this does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """One line of a listing."""

    address: int
    text: str

    @property
    def target(self) -> int | None:
        """Returns where a branch goes."""
        found = re.search(r"BRA(?:\.\w+)* (?:\S+, )?0x([0-9a-f]+)", self.text)
        return int(found[1], 16) if found else None


@dataclass(frozen=True)
class Loop:
    """The main loop of a kernel."""

    body: list[Instruction]

    def count(self, pattern: str) -> int:
        """Returns how many instructions of the body match."""
        return sum(bool(re.search(pattern, line.text)) for line in self.body)

    def in_shadow(self) -> tuple[int, int]:
        """Returns exponentials between the last product and the wait for it, round the loop, and all exponentials."""
        last = max(i for i, line in enumerate(self.body) if "HGMMA" in line.text)
        order = self.body[last + 1 :] + self.body[: last + 1]
        waits = [i for i, line in enumerate(order) if re.search(r"DEPBAR\.LE gsb0, 0x0", line.text)]
        end = waits[0] if waits else len(order)
        exponentials = [i for i, line in enumerate(order) if re.search(r"^MUFU\.EX2", line.text)]
        return sum(i < end for i in exponentials), len(exponentials)

    def cached(self) -> tuple[int, int]:
        """Returns multiply-adds that leave an operand in the operand cache for a later one, and all multiply-adds.

        Without terms of the score they are those of the exponents, and the operand is the shift of a row. It is kept if
        the shifts of both rows are a register of even and one of odd number.
        """
        lines = [line.text for line in self.body if re.search(r"^FFMA", line.text)]
        return sum(".reuse" in text for text in lines), len(lines)


def listing(cubin: Path) -> list[Instruction]:
    """Disassembles a cubin."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        raise SystemExit("cuobjdump is not on PATH")
    text = subprocess.run(
        [tool, "-sass", str(cubin)], check=True, capture_output=True, text=True
    ).stdout
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)
    return [Instruction(int(address, 16), body.strip()) for address, body in found]


def main_loop(code: list[Instruction]) -> Loop:
    """Returns the innermost loop with both products: the shortest span of a backward branch with an HGMMA.tnspB."""
    best: list[Instruction] | None = None
    for line in code:
        if line.target is None or line.target >= line.address:
            continue
        body = [other for other in code if line.target <= other.address <= line.address]
        text = [other.text for other in body]
        both = any("tnspB" in t for t in text) and any(
            "HGMMA" in t and "tnspB" not in t for t in text
        )
        if both and (best is None or len(body) < len(best)):
            best = body
    if best is None:
        raise ValueError("no loop holds both products")
    return Loop(best)


def registers_of(text: str) -> int:
    """Returns how many registers an instruction needs: one more than the highest that it names, or that follows it.

    ``STS.128 [R29+0x10], R8`` takes R8 to R11, and its address from R29 alone; ``[R28.64]`` is R28 and R29.
    """
    addresses = re.findall(r"\[R(\d+)(\.64)?", text)
    values = re.findall(r"\bR(\d+)", re.sub(r"\[[^\]]*\]", "", text))
    wide = 4 if ".128" in text else 2 if re.search(r"\.64|WIDE", text) else 1
    ends = [int(register) + (2 if is_wide else 1) for register, is_wide in addresses]
    return max(ends + [int(register) + wide for register in values], default=0)


def producer_registers(code: list[Instruction]) -> tuple[int, int]:
    """Returns how many registers the producer keeps, and how many the code that it can reach uses."""
    place = {line.address: i for i, line in enumerate(code)}
    start = next(i for i, line in enumerate(code) if "USETMAXREG.DEALLOC" in line.text)
    kept = int(re.search(r"0x([0-9a-f]+)", code[start].text)[1], 16)
    seen: set[int] = set()
    waiting = [start]
    used = 0
    while waiting:
        i = waiting.pop()
        if i in seen or i >= len(code):
            continue
        seen.add(i)
        line = code[i]
        used = max(used, registers_of(line.text))
        if line.target is not None:
            waiting.append(place[line.target])
        ends = re.match(r"(BRA|EXIT|RET)\b", line.text) is not None
        if not ends:
            waiting.append(i + 1)
    return kept, used


def describe(cubin: Path) -> tuple[str, list[str]]:
    """Returns one line of figures and the faults."""
    code = listing(cubin)
    loop = main_loop(code)
    products = loop.count("HGMMA")
    shadow, exponentials = loop.in_shadow()
    waits = loop.count(r"WARPGROUP\.DEPBAR")
    faults = []
    shape = re.search(r"_d(\d+)x\d+_tile\d+x(\d+)_", cubin.name)
    if shape and products != int(shape[1]) // 16 + int(shape[2]) // 16:
        faults.append(f"{products} products, should be {int(shape[1]) // 16 + int(shape[2]) // 16}")
    if waits > 3:
        faults.append(f"{waits} waits: serialised")
    if loop.count(r"\b(LDL|STL)\b"):
        faults.append("local memory in the loop")
    kept, used = producer_registers(code)
    if used > kept:
        faults.append(f"the producer keeps {kept} registers and uses {used}")
    masked = loop.count(r"^(@!?U?P\d )?(FSEL|ISETP)")
    figures = (
        f"{products} products, {len(loop.body)} instructions ({masked} FSEL/ISETP), {waits} waits, "
    )
    figures += f"producer {used} of {kept}, "
    return figures + f"{shadow}/{exponentials} exponentials under the output product", faults


def main() -> int:
    """Prints a line per cubin; returns 1 if any has a fault."""
    failed = False
    for argument in sys.argv[1:]:
        cubin = Path(argument)
        figures, faults = describe(cubin)
        print(f"{cubin.stem:72s} {figures}" + "".join(f"; FAULT {fault}" for fault in faults))
        failed = failed or bool(faults)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
