"""Every kernel compiled ahead of time: listed, compiled by both compilers, with the intended instructions in it."""

import subprocess
from pathlib import Path

import pytest
import resources
import sm90_listing
import toolchain

from jattn import _core

HOT_SET = {row["key"]: row for row in _core.hot_set()}
LISTED = [_core.canonical_kernel_key(line) for line in toolchain.hot_set_lines()]
FORWARD = [key for key in LISTED if toolchain.word(key, "family") == "sm90_forward"]
# What multiplies tiles in each folder of kernels, by element. Passes over rows multiply nothing.
TENSOR_INSTRUCTION = {"sm80": "HMMA", "sm90": "HGMMA"}


@pytest.fixture(autouse=True, scope="module")
def built_with_nvcc() -> None:
    if not _core.hot_set_cuda_version():
        pytest.skip("the module was built without nvcc, so it has no hot set")


def test_module_has_what_is_listed() -> None:
    assert len(set(LISTED)) == len(LISTED), "two lines name the same kernel"
    assert sorted(HOT_SET) == sorted(LISTED)


def test_size() -> None:
    """One wheel serves machines with and without a GPU, so the hot set must stay small."""
    assert sum(len(row["cubin"]) for row in HOT_SET.values()) < 14_000_000


@pytest.mark.parametrize("key", LISTED, ids=toolchain.short_name)
def test_resources(key: str) -> None:
    """No register spills, no stack, nothing that serialises the tensor cores."""
    row = HOT_SET[key]
    assert resources.read_log(key, row["log"]).faults == ()


@pytest.mark.parametrize("key", LISTED, ids=toolchain.short_name)
def test_nvrtc_agrees(key: str) -> None:
    """The same unit, compiled at run time, is as good: a user without the hot set loses only compile time."""
    toolchain.require_nvrtc()
    code, log = _core.compile_kernel(key)
    assert resources.read_log(key, log).faults == ()
    assert ".text.jattn_kernel" in toolchain.sections(code)


@pytest.mark.parametrize("key", LISTED, ids=toolchain.short_name)
def test_instructions(key: str, tmp_path: Path) -> None:
    """Tensor kernels use the tensor cores; nobody touches local memory."""
    text = toolchain.disassemble(HOT_SET[key]["cubin"], tmp_path)
    assert "STL" not in text
    assert "LDL" not in text
    family = toolchain.word(key, "family").split("_")[0]
    if family in TENSOR_INSTRUCTION and toolchain.word(key, "element") != "f32":
        assert text.count(f" {TENSOR_INSTRUCTION[family]}.") >= 8
    if family == "sm90":
        assert "UTMALDG" in text, "tiles are not copied by the tensor memory accelerator"


@pytest.fixture(scope="module")
def early_exponentials(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How many exponentials come before the wait for the output product, by the function that the kernels ask."""
    lines = []
    for key in FORWARD:
        config = _core.kernel_unit_text(key).split("constexpr Config kConfig{")[1].split("};")[0]
        lines.append(
            f'{{ constexpr Config c{{{config}}}; std::printf("%d\\n", early_exponentials(c)); }}'
        )
    text = '#include <cstdio>\n#include "sm90/shape.cuh"\nusing namespace jattn;\n'
    text += "using namespace jattn::sm90;\nint main() {\n" + "\n".join(lines) + "\n}"
    program = toolchain.build_host_program(text, tmp_path_factory.mktemp("early"))
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    found = dict(zip(FORWARD, map(int, done.stdout.split()), strict=True))
    assert {0, 20, 24} <= set(found.values())
    return found


@pytest.mark.parametrize("key", FORWARD, ids=toolchain.short_name)
def test_forward_loop(
    key: str,
    early_exponentials: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products stay in flight, and the wait between exponentials is where the source has it."""
    toolchain.require_cuobjdump(monkeypatch)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(HOT_SET[key]["cubin"])
    assert sm90_listing.describe(cubin)[1] == []
    loop = sm90_listing.main_loop(sm90_listing.listing(cubin))
    # Without a bias and a softcap the only multiply-adds are those of the exponents.
    if {toolchain.word(key, name) for name in ("bias", "softcap")} == {"0"}:
        cached, multiply_adds = loop.cached()
        assert cached > multiply_adds / 3
    if early_exponentials[key] >= 0:
        assert loop.in_shadow() == (early_exponentials[key], 64)
