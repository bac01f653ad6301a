"""tools/resources.py sees what is wrong with a kernel; a log that says nothing is not taken for a good one."""

import pytest
import resources

GOOD = """ptxas info    : 155 bytes gmem
ptxas info    : Compiling entry function 'jattn_kernel' for 'sm_90a'
ptxas info    : Function properties for jattn_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1024 bytes smem
"""
SERIALIZED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "insufficient register resources for the wgmma pipeline in function 'jattn_kernel'"
)


def test_good_kernel() -> None:
    read = resources.read_log("name", GOOD, code=4096)
    assert (read.registers, read.stack, read.static_shared, read.code) == (168, 0, 1024, 4096)
    assert (read.spill_stores, read.spill_loads, read.faults) == (0, 0, ())


def test_spills_and_stack() -> None:
    spills = "32 bytes stack frame, 24 bytes spill stores, 40"
    spilled = GOOD.replace("0 bytes stack frame, 0 bytes spill stores, 0", spills)
    assert resources.read_log("name", spilled).faults == ("spills 24 + 40 bytes of registers",)
    stack = GOOD.replace("0 bytes stack frame", "16 bytes stack frame")
    assert resources.read_log("name", stack).faults == ("uses a stack frame of 16 bytes",)


def test_serialized_tensor_cores() -> None:
    [fault] = resources.read_log("name", SERIALIZED + "\n" + GOOD).faults
    assert fault == SERIALIZED


@pytest.mark.parametrize("log", ["", "ptxas info    : 155 bytes gmem\n", GOOD + GOOD])
def test_log_of_another_shape(log: str) -> None:
    with pytest.raises(ValueError, match="must be 1"):
        resources.read_log("name", log)


def test_table_leaves_out_what_all_share() -> None:
    kernels = [
        resources.read_log(f"arch=sm_90a band={band} stages=2", GOOD, code=100) for band in (0, 1)
    ]
    head, first, second, shared = resources.table(kernels).splitlines()
    assert head.split() == ["registers", "stack", "spills", "shared", "code", "kernel"]
    assert first.split() == ["168", "0", "0", "1024", "100", "band=0"]
    assert second.split() == ["168", "0", "0", "1024", "100", "band=1"]
    assert shared == "all: arch=sm_90a stages=2"
