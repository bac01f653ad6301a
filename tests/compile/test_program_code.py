"""Score programs compiled for a device: straight-line code in registers."""

import re

import pytest
import toolchain
from program_cases import CASES, traced

from jattn.device_code import device_code

KERNEL = """
extern "C" __global__ void program{number}(const float* scores, const __grid_constant__ Captures captures,
                                           float* results) {{
  using jattn::program{number}::ScoreProgram;
  const int batch = blockIdx.x, head = blockIdx.y, query = blockIdx.z, key = threadIdx.x;
  float slope;
  results[0] = ScoreProgram::score(scores[0], batch, head, query, key, captures.data);
  results[1] = ScoreProgram::score_and_slope(scores[1], batch, head, query, key, captures.data, slope);
  results[2] = slope;
}}
"""
HEAD = """#include "attn/program_math.cuh"
struct Captures {
  const void* data[16];
};
"""


def unit_text() -> str:
    """A kernel for every case."""
    parts = [HEAD]
    for number, case in enumerate(CASES):
        code = device_code(traced(case)[0])
        parts.append(f"namespace jattn::program{number} {{\n{code}}}\n")
        parts.append(KERNEL.format(number=number))
    return "".join(parts)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The compiler's log and the machine code as text."""
    folder = tmp_path_factory.mktemp("programs")
    cubin, log = toolchain.run_nvcc(unit_text(), "sm_90a", folder, f"-I{toolchain.KERNELS}")
    return log, toolchain.disassemble(cubin, folder)


def test_registers_only(compiled: tuple[str, str]) -> None:
    log = compiled[0]
    assert "warning" not in log
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    assert len(frames) >= len(CASES)
    assert set(frames) == {("0", "0", "0")}


def test_straight_line(compiled: tuple[str, str]) -> None:
    functions = re.split(r"(?m)^\s*\.section\s+\.text\.(?=program)", compiled[1])[1:]
    assert len(functions) == len(CASES)
    found = {}
    for function in functions:
        number = re.match(r"program(\d+)", function)
        assert number is not None
        instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)", function)
        assert "EXIT" in instructions
        jumps = [
            x for x in instructions if re.match(r"BRA|BRX|JMP|CALL|RET|BSSY|LDL|STL|WARPSYNC", x)
        ]
        if jumps != ["BRA"]:  # the loop behind the end
            found[CASES[int(number[1])].name] = jumps
    assert found == {}
