"""The largest finite numbers behind masks, bands and segments, on the CUDA backends."""

import hidden_garbage
import pytest

from jattn.testing.cases import Case

PROBLEMS = [
    (backend, case.but(dtype, dtype=dtype))
    for backend, dtype in (
        ("flash", "bfloat16"),
        ("flash", "float16"),
        ("mem_efficient", "bfloat16"),
        ("mem_efficient", "float32"),
    )
    for case in hidden_garbage.CASES
]


# With a softcap, the scores of a warp of flash choose between two polynomials, hidden ones among them.
EXACT = [
    (backend, case) for backend, case in PROBLEMS if backend != "flash" or case.softcap is None
]


@pytest.mark.parametrize(("backend", "case"), EXACT, ids=str)
def test_no_bit_changes(backend: str, case: Case) -> None:
    hidden_garbage.check_bits(backend, case)


@pytest.mark.parametrize(("backend", "case"), PROBLEMS, ids=str)
def test_close_to_the_oracle(backend: str, case: Case) -> None:
    hidden_garbage.check_close(backend, case)


@pytest.mark.backends("flash", "mem_efficient")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_next_document(head_dim: int, backend: str) -> None:
    hidden_garbage.check_next_document(backend, "bfloat16", head_dim)


@pytest.mark.backends("flash", "mem_efficient")
def test_hidden_by_a_function(backend: str) -> None:
    hidden_garbage.check_hidden_by_a_function(backend, "bfloat16")
