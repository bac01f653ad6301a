"""The tier has what it is about, and programs of tools/ compile."""

import subprocess
from pathlib import Path

import toolchain

from jattn import _core, ffi


def test_there_is_a_compiler_of_kernels() -> None:
    """Without nvcc and NVRTC most of the tier skips, and models and host programs would pass for it."""
    ffi.register_targets()
    status = _core.nvrtc_status()
    assert toolchain.nvcc_version() >= toolchain.MIN_NVCC or status.startswith("NVRTC "), status


def test_the_program_of_instruction_costs_is_well_formed(tmp_path: Path) -> None:
    """It shares headers with the kernels, and nothing else compiles it."""
    program = Path(__file__).parents[2] / "tools" / "instruction_costs.cu"
    command = [toolchain.require_nvcc(), "-std=c++20", "-arch=sm_90a", "-fdevice-syntax-only", "-c"]
    command += [f"-I{toolchain.KERNELS}", "-o", str(tmp_path / "none.o"), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
