"""Row J02 and the sharding part of the contract, on four virtual devices."""

import on_four_devices
import pytest


@pytest.mark.backends(*on_four_devices.BACKENDS)
def test_J02_four_devices(backend: str) -> None:
    """All checks in one process: it is their programs that take the time."""
    flags = "--xla_force_host_platform_device_count=4"
    assert on_four_devices.failures(backend, JAX_PLATFORMS="cpu", XLA_FLAGS=flags) == {}
