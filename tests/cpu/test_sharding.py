"""Row J02 and the sharding part of the contract, on four virtual devices."""

import on_four_devices
import on_two_processes
import pytest


@pytest.mark.backends(*on_four_devices.BACKENDS)
def test_J02_four_devices(backend: str) -> None:
    """All checks in one process: it is their programs that take the time."""
    # What is tested is how programs are cut; without LLVM's optimizations they are compiled in two thirds of the time.
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    assert on_four_devices.failures(backend, JAX_PLATFORMS="cpu", XLA_FLAGS=flags) == {}


def test_two_processes_share_a_mesh() -> None:
    """As hosts do that train together; float32, so errors are those of sums in another order."""
    errors = on_two_processes.errors("cpu")
    assert len(errors) == on_two_processes.PROCESSES * len(on_two_processes.CUTS)
    assert max(errors) < 1e-5
