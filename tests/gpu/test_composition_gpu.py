"""Features compose on the GPU: random problems of tests/composition.py, against the float64 oracle."""

import pytest
from composition import listed, listed_few_queries

import jattn
from jattn.testing.cases import Case
from jattn.testing.run import serves, verify

SM90 = jattn.Device("cuda", arch=(9, 0))
SHORT = 60
SHORT_FEW = 30


@pytest.mark.parametrize("backend", ["mem_efficient", "flash"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if i < SHORT else pytest.mark.full, id=case.name)
        for i, case in enumerate(listed(300))
    ],
)
def test_features_compose(backend: str, case: Case) -> None:
    """300 problems under --full: float32 goes to mem_efficient alone, the rest to both."""
    if case.dtype == "float32" and backend == "flash":
        case = listed(300, ("bfloat16", "float16"))[int(case.name.split("-")[1])]
    assert serves(case, backend, SM90)
    verify(case, backend)


@pytest.mark.parametrize("backend", ["mem_efficient", "flash"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if i < SHORT_FEW else pytest.mark.full, id=case.name)
        for i, case in enumerate(listed_few_queries(300))
    ],
)
def test_few_queries_compose(backend: str, case: Case) -> None:
    """Heads of a group share tiles and keys are split, where the features of the problem let them."""
    verify(case, backend)
