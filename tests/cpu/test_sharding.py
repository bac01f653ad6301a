"""Row J02 and the sharding part of the contract, on four virtual devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import on_four_devices
import pytest

PROGRAM = Path(on_four_devices.__file__)


@pytest.mark.backends(*on_four_devices.BACKENDS)
def test_J02_four_devices(backend: str) -> None:
    """All checks in one process: it is their programs that take the time."""
    flags = "--xla_force_host_platform_device_count=4"
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), backend],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert set(outcome) == set(on_four_devices.CHECKS)
    assert {name: what for name, what in outcome.items() if what != "ok"} == {}
