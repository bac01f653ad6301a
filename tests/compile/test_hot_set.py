"""Every kernel compiled ahead of time: listed, compiled by both compilers, with the intended instructions in it."""

from pathlib import Path

import pytest
import resources
import toolchain

from jattn import _core

HOT_SET = {row["key"]: row for row in _core.hot_set()}

# What multiplies tiles in each folder of kernels, by element. Passes over rows multiply nothing.
TENSOR_INSTRUCTION = {"sm80": "HMMA", "sm90": "HGMMA"}


@pytest.fixture(autouse=True)
def built_with_nvcc() -> None:
    if not _core.hot_set_cuda_version():
        pytest.skip("the module was built without nvcc, so it has no hot set")


def test_module_has_what_is_listed() -> None:
    listed = [_core.canonical_kernel_key(line) for line in toolchain.hot_set_lines()]
    assert len(set(listed)) == len(listed), "two lines name the same kernel"
    assert sorted(HOT_SET) == sorted(listed)


def test_size() -> None:
    """One wheel serves machines with and without a GPU, so the hot set must stay small."""
    assert sum(len(row["cubin"]) for row in HOT_SET.values()) < 14_000_000


@pytest.mark.parametrize("key", HOT_SET, ids=toolchain.short_name)
def test_resources(key: str) -> None:
    """No register spills, no stack, nothing that serialises the tensor cores."""
    row = HOT_SET[key]
    assert resources.read_log(key, row["log"]).faults == ()


@pytest.mark.parametrize("key", HOT_SET, ids=toolchain.short_name)
def test_nvrtc_agrees(key: str) -> None:
    """The same unit, compiled at run time, is as good: a user without the hot set loses only compile time."""
    toolchain.require_nvrtc()
    code, log = _core.compile_kernel(key)
    assert resources.read_log(key, log).faults == ()
    assert ".text.jattn_kernel" in toolchain.sections(code)


@pytest.mark.parametrize("key", HOT_SET, ids=toolchain.short_name)
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
