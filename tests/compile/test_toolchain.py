"""The tier has what it is about."""

import toolchain

from jattn import _core, ffi


def test_there_is_a_compiler_of_kernels() -> None:
    """Without nvcc and NVRTC most of the tier skips, and models and host programs would pass for it."""
    ffi.register_targets()
    status = _core.nvrtc_status()
    assert toolchain.nvcc_version() >= toolchain.MIN_NVCC or status.startswith("NVRTC "), status
