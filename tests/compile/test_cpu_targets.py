"""The CPU kernel computes what plain loops do on aarch64 and on AMX; for aarch64 it multiplies in registers.

No machine that runs these tests need have the instruction set: an emulator runs the program that checks the kernel.
Of AMX only the tile instructions are emulated.
"""

import platform
import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import cpu_build
import pytest
import toolchain
from cpu_build import Build

from jattn import _core

EM_AARCH64 = 183  # of ELF's e_machine

BASELINE = "cc/cpu/baseline.cc"
EMULATED_TILES = Path(__file__).parent / "emulated_tiles.h"

# A step of a block of 6 x 4 vectors has 24 multiply-adds, loads of four vectors and six scalars, and the loop itself.
LARGEST_BLOCK = 24
MOST_INSTRUCTIONS = 1.6  # a multiply-add
TILE_PRODUCT = re.compile(r"multiply(_columns)?ILb")  # symbols of its functions

CONDITIONS = "eq|ne|cs|hs|cc|lo|mi|pl|vs|vc|hi|ls|ge|lt|gt|le"
JUMP = re.compile(rf"(?:b|b\.?(?:{CONDITIONS})|cbn?z|tbn?z)\s.*?([.\w$]+)")


@pytest.fixture(scope="session")
def cross_build(folder: Path) -> Callable[[str], Build]:
    """Compiler -> a build for aarch64; skips without the compiler."""

    def configured(compiler: str) -> Build:
        build = Build(folder / f"cpu-{compiler}")
        build.folder.mkdir(exist_ok=True)
        build.configure(*cpu_build.cross_definitions(compiler, build.folder))
        return build

    return configured


def check(*command: str, instruction_sets: Iterable[str] = ("baseline",)) -> None:
    """Runs the program that checks the kernel, on these instruction sets among others."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    for name in instruction_sets:
        assert re.search(rf"^{name}: \d+ problems", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("compiler", cpu_build.CROSS_COMPILERS)
def test_compiles_for_aarch64(compiler: str, cross_build: Callable[[str], Build]) -> None:
    build = cross_build(compiler)
    build.make("jattn_cpu")
    objects = build.objects()
    assert BASELINE in objects
    for source, file in objects.items():
        header = file.read_bytes()[:20]
        assert header[:4] == b"\x7fELF", source
        assert int.from_bytes(header[18:20], "little") == EM_AARCH64, source


@pytest.mark.parametrize("compiler", cpu_build.CROSS_COMPILERS)
def test_computes_on_aarch64(compiler: str, cross_build: Callable[[str], Build]) -> None:
    emulator = []
    if platform.machine() != "aarch64":
        names = ("qemu-aarch64", "qemu-aarch64-static")
        emulator = [cpu_build.require_program(*names, remedy="apt-get install qemu-user")]
    build = cross_build(compiler)
    build.make("check_cpu_kernel")
    check(*emulator, str(build.folder / "check_cpu_kernel"))


def test_computes_on_this_machine(folder: Path) -> None:
    """On all that it can run; machines of continuous integration need not have AMX, whose kernel then runs emulated."""
    toolchain.require_host_compiler()
    sets = set(_core.cpu_instruction_sets())
    definitions = list(cpu_build.NATIVE_DEFINITIONS)
    if "avx512" in sets and "amx" not in sets:
        definitions.append(f"-DCMAKE_CXX_FLAGS=-DJATTN_EMULATED_TILES -include {EMULATED_TILES}")
        sets.add("amx")
    build = Build(folder / "cpu-native")
    build.configure(*definitions)
    build.make("check_cpu_kernel")
    check(str(build.folder / "check_cpu_kernel"), instruction_sets=sets)


@pytest.mark.parametrize("compiler", cpu_build.CROSS_COMPILERS)
def test_sums_of_a_tile_product_stay_in_registers(
    compiler: str, cross_build: Callable[[str], Build]
) -> None:
    loops = innermost_loops(cross_build(compiler).listing(BASELINE))
    for lanes in ("4s", "2d"):
        products = [
            (body, count)
            for function, body in loops
            if TILE_PRODUCT.search(function)
            and (count := sum(is_multiply_add(line, lanes) for line in body)) > 0
        ]
        most = max(count for _, count in products)
        assert most >= LARGEST_BLOCK
        for body, count in products:
            text = "\n".join(body)
            assert not re.search(r"^st|^ld\w*\s+[qv]\d.*\bsp\b", text, re.MULTILINE), text
            if count == most:
                assert len(body) <= MOST_INSTRUCTIONS * count, f"{len(body)} for {count}\n{text}"


def is_multiply_add(instruction: str, lanes: str) -> bool:
    """Of whole vectors, one of which may be an element."""
    return re.match(rf"fmla\s+v\d+\.{lanes},", instruction) is not None


def innermost_loops(listing: str) -> list[tuple[str, list[str]]]:
    """The loops of a listing that have no other jump in them: symbol of the function, instructions."""
    function = ""
    instructions: list[str] = []
    places: dict[str, int] = {}
    loops = []
    for line in listing.splitlines():
        if label := re.match(r"([.\w$]+):", line):
            places[label[1]] = len(instructions)
            function = function if label[1].startswith(".") else label[1]
        elif re.match(r"\s+[a-z]", line):
            instructions.append(re.sub(r"\s*//.*", "", line).strip())
            if jump := JUMP.fullmatch(instructions[-1]):
                body = instructions[places.get(jump[1], len(instructions)) :]
                if body and not any(JUMP.fullmatch(instruction) for instruction in body[:-1]):
                    loops.append((function, body))
    return loops


MANY_HEADS = """
#include <cstdio>
#include <vector>

#include "cpu/vec.h"
#include "cpu/tasks.h"

namespace jattn::cpu {
void* thread_memory(int64_t) { return nullptr; }
void yield_thread() {}
}  // namespace jattn::cpu

int main() {
  using jattn::cpu::Places;
  constexpr int64_t kHeads = 1000000;
  std::vector<int64_t> numbers(2 * kHeads);
  Places places(numbers.data(), kHeads);
  int64_t sum = 0;
  for (int64_t head = 0; head < kHeads; ++head) {
    const int64_t own = head % 3 == 0 && head + 1 < kHeads ? places.take() : -1;
    sum += places.of_shared_head(head, true);
    if (own >= 0) places.give_back(own);
  }
  std::printf("%d", sum >= kHeads * (kHeads - 1) / 2);  // all have places of their own
}
"""


def test_places_of_many_heads_are_found_at_once(tmp_path: Path) -> None:
    """Searched from the first one, those of a million heads took hours."""
    program = toolchain.build_host_program(MANY_HEADS, tmp_path, f"-I{cpu_build.ROOT}/cc")
    done = subprocess.run([program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "1"
