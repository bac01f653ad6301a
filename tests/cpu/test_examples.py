"""The programs of examples/: each runs in short form, its claims hold, and it says which backend ran."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# train_lm.py has tests of its own.
SHORT = {
    "packed_documents.py": ["--steps", "120", "--length", "96"],
    "encoder_padding.py": ["--steps", "400", "--longest", "12"],
    "relative_bias.py": ["--steps", "200"],
    "digits_vit.py": ["--epochs", "12"],
    "long_context.py": ["--length", "512"],
}


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"examples/{name}", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_example_is_tested() -> None:
    found = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert found == set(SHORT) | {"train_lm.py"}


@pytest.mark.parametrize("name", SHORT)
def test_claims_hold_and_the_backend_is_named(name: str) -> None:
    if name == "digits_vit.py":
        pytest.importorskip("sklearn", reason="needs scikit-learn, of the extra demo")
    finished = run(name, *SHORT[name])
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "'cpu'" in finished.stdout or "chosen: cpu" in finished.stdout


def test_claims_can_fail() -> None:
    assert run("relative_bias.py", "--steps", "1").returncode == 1
