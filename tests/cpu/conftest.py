"""Tier cpu: runs on the CPU also where there is a GPU."""

import jax
import pytest
from instruction_sets import INSTRUCTION_SETS, force

jax.config.update("jax_platforms", "cpu")


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    """A test that takes this argument runs on every instruction set."""
    name: str = request.param
    force(name)
    return name


def pytest_runtest_teardown() -> None:
    force("")
