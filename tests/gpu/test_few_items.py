"""The Hopper forward kernel with about as many tiles of queries as blocks.

With no more, a block runs the tile it starts with, and no counter tells it another.
"""

import numpy as np
import pytest

from jattn.backends import key_splits
from jattn.testing import compare
from jattn.testing.cases import Case
from jattn.testing.run import run

SMS = key_splits.MULTIPROCESSORS
BASE = Case(name="items", batch=1, q_len=100, kv_len=300, dtype="bfloat16")
# Name -> a choice that tells the kernel from others, the problem.
KERNELS = {
    "turns": ("take_turns=1", {"head_dim": 64, "head_dim_v": 64, "is_causal": True}),
    "capped": ("cap_series=1", {"head_dim": 64, "head_dim_v": 64, "softcap": 5.0}),
    "d128": ("q_in_registers=1", {"head_dim": 128, "head_dim_v": 128, "is_causal": True}),
    "d256": ("head_dim=256", {"head_dim": 256, "head_dim_v": 256, "kv_len": 150}),
}


@pytest.mark.parametrize("items", [1, 2, 16, SMS - 1, SMS, SMS + 1, 2 * SMS])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.backends("flash")
def test_one_item_a_head(kernel: str, items: int, backend: str) -> None:
    """Twice in a row, with the same bits: what one launch leaves in the scratch is nothing to the next."""
    form, changes = KERNELS[kernel]
    case = BASE.but(f"{kernel}-{items}", num_heads=items, num_kv_heads=items, **changes)
    operands, solution = compare.solved(case)
    outcome = run(case, operands, backend, backward=False)
    assert form in outcome.lowered
    assert "schedule=2" in outcome.lowered
    assert "partial_results" not in outcome.lowered
    compare.assert_close(case, operands, outcome.results, solution=solution)
    again = run(case, operands, backend, backward=False)
    for name, x in outcome.results.items():
        np.testing.assert_array_equal(np.asarray(again.results[name]), np.asarray(x))


@pytest.mark.parametrize("batch", [1, 33, 66, 67])
@pytest.mark.backends("flash")
def test_items_without_visible_keys(batch: int, backend: str) -> None:
    """Two heads: 2, 66, 132 and 134 items, every third batch entry empty."""
    lengths = tuple(0 if entry % 3 == 0 else 300 - entry for entry in range(batch))
    case = BASE.but(f"empty-{batch}", batch=batch, num_heads=2, num_kv_heads=1, kv_lengths=lengths)
    operands, solution = compare.solved(case)
    for _ in range(2):
        outcome = run(case, operands, backend, backward=False)
        compare.assert_close(case, operands, outcome.results, solution=solution)
