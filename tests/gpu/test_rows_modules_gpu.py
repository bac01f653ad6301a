"""Rows about modules on the GPU: the tests of tests/cpu/test_rows_modules.py and test_rows_cpu.py, on this tier's
backend for float32.
"""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "cpu"))

import test_rows_cpu as calls
import test_rows_modules as modules

pytestmark = pytest.mark.backends("mem_efficient")


@pytest.mark.parametrize("kind", ["bool", "float32"])
@pytest.mark.parametrize("padding_dim", [2, None])
@pytest.mark.parametrize("mask_dim", [2, 3, None])
def test_T003_mask_ranks_and_padding(
    mask_dim: int | None, padding_dim: int | None, kind: str, backend: str
) -> None:
    modules.test_T003_mask_ranks_and_padding(mask_dim, padding_dim, kind, backend)


@pytest.mark.parametrize("num_heads", [1, 4, 8])
def test_T004_all_valid_mask_changes_nothing(num_heads: int, backend: str) -> None:
    modules.test_T004_all_valid_mask_changes_nothing(num_heads, backend)


def test_T007_square_input(backend: str) -> None:
    modules.test_T007_square_input(backend)


def test_T011_is_causal_equals_the_mask(backend: str) -> None:
    modules.test_T011_is_causal_equals_the_mask(backend)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("num_heads", [1, 8])
def test_T012_module_with_and_without_bias(num_heads: int, use_bias: bool, backend: str) -> None:
    modules.test_T012_module_with_and_without_bias(num_heads, use_bias, backend)


def test_T013_fully_padded_sequences_and_trailing_columns(backend: str) -> None:
    modules.test_T013_fully_padded_sequences_and_trailing_columns(backend)


def test_T014_lengths_equal_sequences_alone(backend: str) -> None:
    modules.test_T014_lengths_equal_sequences_alone(backend)


@pytest.mark.parametrize("mask_rank", [None, 2, 3, 4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rank", [3, 4])
def test_T019_against_the_plain_formula(
    rank: int, is_causal: bool, mask_rank: int | None, backend: str
) -> None:
    calls.test_T019_against_the_plain_formula(rank, is_causal, mask_rank, "float32", backend)
