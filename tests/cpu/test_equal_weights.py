"""Sums over many equal weights on a CPU."""

import pytest
from equal_weights import check_equal_weights


@pytest.mark.parametrize("q_len", [4, 80], ids=["by rows", "by tiles"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_equal_weights(backend: str, dtype: str, q_len: int) -> None:
    check_equal_weights(backend, dtype, q_len=q_len, kv_len=16384, num_heads=2, head_dim=64)
