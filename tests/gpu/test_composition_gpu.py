"""Features compose on the GPU: random problems of tests/composition.py, against the float64 oracle."""

from collections.abc import Callable
from typing import Any

import pytest
from composition import listed, listed_few_queries, listed_larger, listed_sums

import jattn
from jattn.testing.cases import Case
from jattn.testing.run import serves, verify

SM90 = jattn.Device("cuda", arch=(9, 0))


def shortened(cases: list[Case], short: int) -> list[Any]:
    """The first ones as they are, the others for --full alone."""
    return [
        pytest.param(case, marks=() if i < short else pytest.mark.full, id=case.name)
        for i, case in enumerate(cases)
    ]


def verify_served(case: Case, backend: str, drawn: Callable[..., list[Case]]) -> None:
    """In the place of a float32 problem, which it does not take, flash gets one of 16 bits."""
    if case.dtype == "float32" and backend == "flash":
        case = drawn(300, ("bfloat16", "float16"))[int(case.name.split("-")[1])]
    assert serves(case, backend, SM90)
    verify(case, backend)


@pytest.mark.parametrize("backend", ["mem_efficient", "flash"])
@pytest.mark.parametrize("case", shortened(listed(300), 60))
def test_features_compose(backend: str, case: Case) -> None:
    """300 problems under --full: float32 goes to mem_efficient alone, the rest to both."""
    verify_served(case, backend, listed)


@pytest.mark.parametrize("backend", ["mem_efficient", "flash"])
@pytest.mark.parametrize("case", shortened(listed_few_queries(300), 30))
def test_few_queries_compose(backend: str, case: Case) -> None:
    """Heads of a group share tiles and keys are split, where the features of the problem let them."""
    verify(case, backend)


@pytest.mark.parametrize("backend", ["mem_efficient", "flash"])
@pytest.mark.parametrize("case", shortened(listed_larger(300), 45))
def test_larger_problems_compose(backend: str, case: Case) -> None:
    """As above, with several tiles, items for blocks that take more than one, and every width of tiles."""
    verify_served(case, backend, listed_larger)


@pytest.mark.parametrize("backend", ["mem_efficient", "flash"])
@pytest.mark.parametrize("case", shortened(listed_sums(300), 30))
def test_gradients_summed_over_queries_compose(backend: str, case: Case) -> None:
    """Of a bias, of slopes and of what a score function reads: rows beyond the queries, NaN among them, add nothing."""
    verify_served(case, backend, listed_sums)
