"""Axes of zero elements, for which XLA has no address, on the CUDA backends."""

import pytest
import zero_sizes


@pytest.mark.parametrize("sizes", zero_sizes.SIZES, ids=str)
@pytest.mark.parametrize(
    ("backend", "dtype"), [("flash", "bfloat16"), ("mem_efficient", "float32")]
)
def test_sizes_of_zero(backend: str, dtype: str, sizes: zero_sizes.Sizes) -> None:
    zero_sizes.check(backend, dtype, sizes)


@pytest.mark.parametrize("rows", zero_sizes.RAGGED, ids=str)
@pytest.mark.parametrize(
    ("backend", "dtype"), [("flash", "bfloat16"), ("mem_efficient", "float32")]
)
def test_ragged_arrays_without_rows(backend: str, dtype: str, rows: tuple[int, int]) -> None:
    zero_sizes.check_ragged(backend, dtype, rows)
