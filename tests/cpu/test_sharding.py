"""Row J02 and the sharding part of the contract, on four virtual devices."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import on_four_devices
import pytest

PROGRAM = Path(on_four_devices.__file__)


@functools.cache
def outcome() -> dict[str, str]:
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.backends(*on_four_devices.BACKENDS)
@pytest.mark.xdist_group("four_devices")
@pytest.mark.parametrize("check", list(on_four_devices.CHECKS))
def test_J02_four_devices(check: str, backend: str) -> None:
    assert outcome()[f"{check}-{backend}"] == "ok"
