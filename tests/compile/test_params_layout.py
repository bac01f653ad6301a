"""The structs that the host fills and kernels read have one layout under both compilers.

The host compiler prints size and offsets; the device compiler gets them back as static assertions.
"""

import re
import subprocess
from pathlib import Path

import pytest
import toolchain

from jattn import _core

# Templates are seen as members of others.
STRUCT = re.compile(
    r"(?<!>\n)^struct (?:alignas\(\d+\) )?(\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL
)
HEADERS = {"params.cuh": "jattn", "sm90/forward_params.cuh": "jattn::sm90"}


def members(header: str) -> dict[str, list[str]]:
    """Struct -> member names, read from the text of a header of plain structs."""
    structs = {}
    for name, body in STRUCT.findall(header):
        code = re.sub(r"//.*", "", body)
        declarations = [part.strip() for part in code.split(";") if part.strip()]
        names = [
            re.sub(r"\[.*?\]|=.*", "", n).split()[-1].lstrip("*")
            for d in declarations
            for n in d.split(",")
        ]
        structs[name] = names
    return structs


def host_layout(
    header: str, namespace: str, structs: dict[str, list[str]], folder: Path
) -> dict[str, int]:
    """Sizes and offsets as expressions -> numbers, from a program of the host compiler."""
    compiler = toolchain.require_host_compiler()
    expressions = []
    for struct, names in structs.items():
        expressions += [f"sizeof({namespace}::{struct})", f"alignof({namespace}::{struct})"]
        expressions += [f"offsetof({namespace}::{struct}, {name})" for name in names]
    lines = [f'  std::printf("%zu\\n", {expression});' for expression in expressions]
    source = [
        "#include <cstddef>",
        "#include <cstdint>",
        "#include <cstdio>",
        f'#include "{header}"',
        "int main() {",
    ]
    program = folder / "layout.cc"
    program.write_text("\n".join([*source, *lines, "}"]))
    for name, text in _core.kernel_headers().items():
        path = folder / "include" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [compiler, "-std=c++20", "-Wno-invalid-offsetof", f"-I{folder / 'include'}"]
    command += [str(program), "-o", str(folder / "layout")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = subprocess.run(
        [str(folder / "layout")], capture_output=True, text=True, check=True
    ).stdout
    return dict(zip(expressions, map(int, printed.split()), strict=True))


@pytest.mark.parametrize("header", HEADERS)
def test_layout(header: str, tmp_path: Path) -> None:
    toolchain.require_nvcc()
    structs = members(_core.kernel_headers()[header])
    assert any(name.endswith("ForwardParams") for name in structs)
    layout = host_layout(header, HEADERS[header], structs, tmp_path)
    assertions = [
        f"static_assert({expression} == {number});" for expression, number in layout.items()
    ]
    offset = "#define offsetof(type, member) __builtin_offsetof(type, member)"
    kernel = 'extern "C" __global__ void jattn_kernel() {}'
    unit = "\n".join([f'#include "{header}"', "#undef offsetof", offset, *assertions, kernel])
    toolchain.run_nvcc(unit, "sm_90a", tmp_path)


def test_members_are_found() -> None:
    """The reader of the header sees every form of declaration that the headers use."""
    text = """
struct alignas(64) One {
  const void* q;  // [B, T, N, D]; a comment; with semicolons
  int32_t a, b;
  float scale = 1.0f;
  int tile[2];
};
"""
    assert members(text) == {"One": ["q", "a", "b", "scale", "tile"]}
