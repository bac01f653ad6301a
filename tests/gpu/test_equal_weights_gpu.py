"""Sums over many equal weights on a GPU, of every width of tiles."""

import pytest
from equal_weights import check_equal_weights


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.backends("flash", "mem_efficient")
def test_equal_weights(backend: str, dtype: str, head_dim: int) -> None:
    """With as many rows as keep all multiprocessors busy: keys are not split."""
    check_equal_weights(backend, dtype, q_len=256, kv_len=16384, num_heads=128, head_dim=head_dim)


@pytest.mark.backends("flash", "mem_efficient")
def test_few_rows_with_equal_weights(backend: str) -> None:
    """Keys are split, and the parts added up."""
    check_equal_weights(backend, "bfloat16", q_len=16, kv_len=16384, num_heads=2, head_dim=128)
