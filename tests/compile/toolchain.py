"""The compilers of this tier, and what they make of a kernel key."""

import dataclasses
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cpu_build import Lock

from jattn import _core, ffi
from jattn.backends import cuda_tiles, flash_backward_tiles, flash_tiles
from jattn.masks import Band
from jattn.score_program import trace
from jattn.spec import Spec

MIN_NVCC = (12, 8)
KERNELS = Path(__file__).parents[2] / "cc" / "kernels"
HOT_SET_FILE = Path(__file__).parents[2] / "cc" / "core" / "hot_set.txt"
shared_folder = Path()  # conftest.py sets it


def hot_set_lines() -> list[str]:
    """The keys to be compiled ahead of time, as they are listed; there whether or not nvcc is."""
    return [
        line for line in HOT_SET_FILE.read_text().splitlines() if line and not line.startswith("#")
    ]


def listed_key_per_family() -> dict[str, str]:
    """The first listed key of each family that has one."""
    keys: dict[str, str] = {}
    for line in hot_set_lines():
        key = _core.canonical_kernel_key(line)
        keys.setdefault(word(key, "family"), key)
    return keys


def one_key_per_family() -> dict[str, str]:
    """A key of every family: a listed one, else one that Python plans for a problem that needs the family."""
    plain = Spec(1, 256, 256, 2, 2, 64, 64, "bfloat16", 0.125, segments=True)
    biased = dataclasses.replace(plain, bias=(1, 1, 256, 256), bias_dtype="bfloat16")
    per_head = dataclasses.replace(biased, bias=(1, 2, 256, 256))
    moved = dataclasses.replace(plain, positions=True, band=Band(right=0))
    sloped = dataclasses.replace(plain, alibi_slopes=(1, 2))
    hopper = (9, 0)
    few_queries = dataclasses.replace(plain, kv_len=8192, segments=False)
    plans = [
        flash_tiles.plan_forward(plain).kernels,
        flash_tiles.plan_forward(few_queries, for_few_queries=True).kernels,
        cuda_tiles.plan_forward(biased, hopper).kernels,
        cuda_tiles.plan_forward(moved, hopper).kernels,
        cuda_tiles.plan_slopes_gradient(sloped, hopper)[0].kernels,
    ]
    for deterministic in (False, True):
        plan = cuda_tiles.plan_backward(
            biased, hopper, wants=(True,) * 4, deterministic=deterministic
        )
        plans.append(plan.kernels)
        for problem in (biased, per_head):
            flash_plan = flash_backward_tiles.plan_backward(
                problem, wants=(True,) * 4, deterministic=deterministic
            )
            plans.append(flash_plan.kernels)
    program, _ = trace(lambda s, b, h, q, k, x: s + x[h, q - k + 256], (np.zeros((2, 512)),), 1)
    learned = dataclasses.replace(plain, score_mod=program)
    for deterministic in (False, True):
        gradients = cuda_tiles.plan_capture_gradients(
            learned, hopper, (True,), deterministic=deterministic
        )
        _core.register_program(gradients.program)
        plans.append(gradients.kernels)
    keys = listed_key_per_family()
    for planned in ";".join(plans).split(";"):
        key = _core.canonical_kernel_key(planned)
        keys.setdefault(word(key, "family"), key)
    return keys


def short_name(key: str) -> str:
    """The words of a canonical key that are not Config's defaults: a name for a test."""
    default = _core.canonical_kernel_key(
        f"family={word(key, 'family')} arch={word(key, 'arch')}"
    ).split(" ")
    words = [part for part in key.split(" ") if part not in default]
    return " ".join([word(key, "family"), word(key, "arch"), *words])


def vary(key: str, **words: object) -> str:
    """The key with other values for some of its words."""
    names = ["family", "arch", *_core.config_members()]
    if " digest=" in key:
        names.append("digest")
    return " ".join(f"{name}={words.get(name, word(key, name))}" for name in names)


@functools.cache
def find_tool(name: str) -> str:
    """Path of a program of the CUDA toolkit: on PATH, in its usual folder, or in the wheels; or an empty string."""
    folders = [*os.get_exec_path(), "/usr/local/cuda/bin"]
    found = importlib.util.find_spec("nvidia")
    folders += (
        [f"{root}/cu13/bin" for root in found.submodule_search_locations or []] if found else []
    )
    return shutil.which(name, path=os.pathsep.join(folders)) or ""


@functools.cache
def nvcc_version() -> tuple[int, int]:
    """The release of nvcc, or (0, 0)."""
    if not (nvcc := find_tool("nvcc")):
        return 0, 0
    banner = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", banner)
    return (int(release[1]), int(release[2])) if release else (0, 0)


def require_nvcc() -> str:
    """Path of nvcc; skips the test without one."""
    if nvcc_version() < MIN_NVCC:
        pytest.skip(f"needs nvcc {MIN_NVCC[0]}.{MIN_NVCC[1]} or newer, found {nvcc_version()}")
    return find_tool("nvcc")


def require_host_compiler() -> str:
    """The C++ compiler of this machine; skips where there is none (a wheel needs none)."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        pytest.skip("needs a host compiler: c++, g++, or the one that CXX names")
    return compiler


def build_host_program(text: str, folder: Path, *flags: str) -> Path:
    """Compiles a program that includes headers of cc/kernels; skips without a compiler."""
    compiler = require_host_compiler()
    source, program = folder / "main.cc", folder / "main"
    source.write_text(text)
    command = [compiler, "-std=c++20", "-O1", *flags, f"-I{KERNELS}", "-o", program, source]
    subprocess.run(command, check=True)
    return program


def require_cuobjdump(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts cuobjdump on PATH, where tools look for it; skips the test without one."""
    if not (tool := find_tool("cuobjdump")):
        pytest.skip("needs cuobjdump: pip install nvidia-cuda-cuobjdump, or a CUDA toolkit")
    monkeypatch.setenv("PATH", f"{Path(tool).parent}{os.pathsep}{os.environ['PATH']}")


def require_nvrtc() -> tuple[int, int]:
    """The release of NVRTC; skips the test without one."""
    ffi.register_targets()
    status = _core.nvrtc_status()
    release = re.match(r"NVRTC (\d+)\.(\d+)", status)
    if release is None:
        pytest.skip(status)
    return int(release[1]), int(release[2])


def require_disassembler() -> str:
    """Path of nvdisasm; skips the test without one."""
    if not (tool := find_tool("nvdisasm")):
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm, or a CUDA toolkit")
    return tool


def run_nvcc(text: str, arch: str, folder: Path, *flags: str) -> tuple[bytes, str]:
    """Compiles a unit with nvcc against the headers *inside the module*. Returns the machine code and the log."""
    for name, header in _core.kernel_headers().items():
        path = folder / "include" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(header)
    unit, cubin = folder / "unit.cu", folder / "unit.cubin"
    unit.write_text(text)
    command = [require_nvcc(), "-cubin", f"-arch={arch}", "-std=c++20", f"-I{folder / 'include'}"]
    command += ["-Xptxas", "-v", "-Xptxas", "-warn-spills", *flags, "-o", str(cubin), str(unit)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return cubin.read_bytes(), done.stdout


def compile_once(key: str) -> tuple[bytes, str]:
    """What `_core.compile_kernel` returns; of equal keys one process of a test run compiles it for all."""
    name = hashlib.sha256(_core.canonical_kernel_key(key).encode()).hexdigest()
    shared_folder.mkdir(exist_ok=True)
    code_file, log_file = (shared_folder / f"{name}.{kind}" for kind in ("cubin", "log"))
    with Lock(shared_folder / f"{name}.lock"):
        if not log_file.exists():
            code, log = _core.compile_kernel(key)
            code_file.write_bytes(code)
            log_file.write_text(log)
        return code_file.read_bytes(), log_file.read_text()


def word(key: str, name: str) -> str:
    """The value of one word of a canonical key."""
    return dict(part.split("=", 1) for part in key.split(" "))[name]


def sections(cubin: bytes) -> dict[str, bytes]:
    """The sections of a 64-bit little-endian ELF file by name; sections without content map to empty bytes."""
    assert cubin[:6] == b"\x7fELF\x02\x01"
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    rows = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    strings = rows[names][4]

    def name(row: tuple[int, ...]) -> str:
        start = strings + row[0]
        return cubin[start : cubin.index(b"\0", start)].decode()

    no_bits = 8
    return {
        name(row): b"" if row[1] == no_bits else cubin[row[4] : row[4] + row[5]] for row in rows
    }


def disassemble(cubin: bytes, folder: Path) -> str:
    """The machine code as text."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [require_disassembler(), "-c", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
