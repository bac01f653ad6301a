"""Imports point down: a module imports its own layer and lower ones; and the C++ folders include what they may."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jattn"

# Lowest first. A name ending in ".*" is a package: its own modules count as one module here.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_version", "errors", "device", "config", "counters", "jax_interface", "pytrees"),  # words
    (
        "masks",
        "arrays",
        "block_mask",
        "score_rewriting",
        "score_program",
        "score_tile",
        "capture_gradients",
        "device_scalars",
        "device_text",
        "device_operations",
        "device_arrays",
        "device_moving",
        "device_code",
        "device_gradients",
        "cpu_program",
        "spec",
        "mapped_queries",
        "ragged",
        "dropout",
        "reference",
        "blocked",
        "sharding",
        "sharding.partition",
    ),  # the problem
    ("backends.*", "ffi"),  # backends
    ("dispatch", "call_plan"),  # choosing, and what the choice means
    ("autodiff", "call_timing"),  # transformations
    ("arguments", "api", "explanation"),  # the public functions
    ("packed_rows", "ragged_attention"),  # lowered to them
    ("flax.*", "fusion.*"),  # built on them
)
# Beside the layers: may import anything, and nothing above imports them.
BESIDE = ("__init__", "__main__", "testing.*")
# The layers that describe problems and that build on public functions know no backend.
KNOWS_NO_BACKEND = (1, 7)


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def matches(name: str, pattern: str) -> bool:
    package = pattern.removesuffix(".*")
    return name == pattern or (
        pattern != package and (name == package or name.startswith(package + "."))
    )


def layer_of(name: str) -> int | None:
    """The number of a module's layer; None for those beside the layers."""
    if any(matches(name, pattern) for pattern in BESIDE):
        return None
    for number, patterns in enumerate(LAYERS):
        if any(matches(name, pattern) for pattern in patterns):
            return number
    raise LookupError(f"jattn/{name} is in no layer: add it to LAYERS in {Path(__file__).name}")


MODULES = {
    name_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"
} | {name_of(path): path for path in sorted(PACKAGE.glob("*/__init__.py"))}


def imports_of(path: Path) -> Iterator[str]:
    """The modules of this package that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jattn":
            base = (node.module or "").removeprefix("jattn").removeprefix(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".removeprefix(".")
                yield full if full in MODULES or full == "_core" else base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("jattn."):
                    yield alias.name.removeprefix("jattn.")


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name: str) -> None:
    layer = layer_of(name)
    if layer is None:
        return
    for imported in sorted(set(imports_of(MODULES[name])) - {"_core"}):
        below = layer_of(imported)
        assert below is not None, f"jattn/{name} imports {imported}, which stands beside the layers"
        assert below <= layer, f"jattn/{name} (layer {layer}) imports {imported} (layer {below})"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_describing_and_building_on_top_know_no_backend(name: str) -> None:
    if layer_of(name) in KNOWS_NO_BACKEND:
        wrong = [
            imported
            for imported in imports_of(MODULES[name])
            if imported in ("ffi", "_core") or matches(imported, "backends.*")
        ]
        assert not wrong


def test_the_rules_find_a_wrong_import(tmp_path: Path) -> None:
    path = tmp_path / "masks.py"
    path.write_text(
        "def f():\n    from jattn import ffi\n    from jattn.backends import base\n    import jattn.api\n"
    )
    assert sorted(imports_of(path)) == ["api", "backends.base", "ffi"]


def test_importing_jattn_starts_nothing() -> None:
    program = (
        "import sys, jattn, jax\n"
        "assert not jax._src.xla_bridge.backends_are_initialized()\n"
        "assert 'flax' not in sys.modules and 'jattn.testing' not in sys.modules\n"
        "loaded = open('/proc/self/maps').read()\n"
        "assert 'libcuda.so' not in loaded and 'libnvrtc' not in loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.MULTILINE)


def includes_of(folder: str) -> Iterator[tuple[Path, str, str]]:
    suffixes = (".h", ".cc", ".cuh", ".inl")
    files = [path for path in sorted((ROOT / "cc" / folder).rglob("*")) if path.suffix in suffixes]
    assert files, folder
    for path in files:
        for bracket, target in INCLUDE.findall(path.read_text()):
            yield path, bracket, target


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("core", r"core/|kernels/config\.cuh$"),  # the choices of a kernel are written down once
        ("cpu", r"(core|cpu)/|attn/program_math\.cuh$"),  # functions of score programs: once
        ("cuda", r"(core|cuda|kernels)/"),
        ("kernels", r"(base|attn|passes|sm80|sm90)/|config\.cuh$|params\.cuh$"),
    ],
)
def test_native_folders_include_downward(folder: str, allowed: str) -> None:
    found = [(path, target) for path, bracket, target in includes_of(folder) if bracket == '"']
    assert found
    wrong = [(path.name, target) for path, target in found if not re.match(allowed, target)]
    assert not wrong


@pytest.mark.parametrize(
    ("folder", "forbidden"), [("core", r"cuda|nvrtc|xla/"), ("cpu", r"cuda|xla/")]
)
def test_native_folders_know_no_more_than_they_must(folder: str, forbidden: str) -> None:
    wrong = [
        (path.name, target)
        for path, _, target in includes_of(folder)
        if re.match(forbidden, target)
    ]
    assert not wrong


def test_device_headers_include_no_host_headers() -> None:
    # NVRTC compiles them from memory, where only CUDA's own type headers are at hand.
    # <cstdint> stands behind a test for a host compiler, which reads the structs of the border.
    allowed = {"cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "cstdint"}
    wrong = [
        (path.name, target)
        for path, bracket, target in includes_of("kernels")
        if bracket == "<" and target not in allowed
    ]
    assert not wrong
