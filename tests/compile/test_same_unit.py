"""One translation unit, two compilers: what nvcc makes at build time is what NVRTC makes at run time."""

from pathlib import Path

import pytest
import resources
import toolchain

from jattn import _core

KEYS = toolchain.one_key_per_family()
LISTED = toolchain.listed_key_per_family()


@pytest.mark.parametrize("family", KEYS)
def test_same_unit(family: str, tmp_path: Path) -> None:
    toolchain.require_nvcc()
    nvrtc_version = toolchain.require_nvrtc()
    key = KEYS[family]
    unit = _core.kernel_unit_text(key)
    ours, our_log = toolchain.run_nvcc(unit, toolchain.word(key, "arch"), tmp_path)
    theirs, their_log = _core.compile_kernel(key)

    a, b = toolchain.sections(ours), toolchain.sections(theirs)
    entry, parameters = ".text.jattn_kernel", ".nv.constant0.jattn_kernel"
    assert entry in a
    assert entry in b
    # Parameters lie in this section behind a fixed head, so equal lengths mean equal parameter blocks.
    assert len(a[parameters]) == len(b[parameters])
    # Two front ends before one ptxas: the order of instructions may differ, even at the same release; the cost may not.
    if toolchain.nvcc_version() == nvrtc_version:
        used = [resources.read_log(key, log) for log in (our_log, their_log)]
        assert abs(used[0].registers - used[1].registers) <= 8
        assert used[0].static_shared == used[1].static_shared
        assert len(a[entry]) == pytest.approx(len(b[entry]), rel=0.05)


@pytest.mark.parametrize("family", LISTED)
def test_hot_set_is_built_from_this_unit(family: str, tmp_path: Path) -> None:
    """The build's own program and command line give the machine code that this unit text gives here."""
    toolchain.require_nvcc()
    version = toolchain.nvcc_version()
    if _core.hot_set_cuda_version() != 1000 * version[0] + 10 * version[1]:
        pytest.skip("the module's hot set was not built by the nvcc of this machine")
    key = LISTED[family]
    [built] = [row["cubin"] for row in _core.hot_set() if row["key"] == key]
    cubin, _ = toolchain.run_nvcc(
        _core.kernel_unit_text(key), toolchain.word(key, "arch"), tmp_path
    )
    entry = ".text.jattn_kernel"
    assert toolchain.sections(built)[entry] == toolchain.sections(cubin)[entry]
