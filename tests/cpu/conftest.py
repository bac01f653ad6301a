"""Tier cpu: runs on the CPU also where there is a GPU."""

import os

import jax
import pytest
from instruction_sets import INSTRUCTION_SETS, force

jax.config.update("jax_platforms", "cpu")


def pytest_configure(config: pytest.Config) -> None:
    """Most of the tier's time is XLA's compiler at small programs: a quarter less with few of LLVM's optimizations.

    All of them run where all cases are asked for, where the environment has flags of its own, and in users' programs
    (examples, demo).
    """
    if not config.getoption("full"):
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    """A test that takes this argument runs on every instruction set."""
    name: str = request.param
    force(name)
    return name


def pytest_runtest_teardown() -> None:
    force("")
