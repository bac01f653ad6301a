"""Rows of the Hopper forward kernel that settle by their first keys and meet much larger scores later.

Keys are visited from the last to the first. Scores of the first half of the keys exceed the others by a growth, for
some rows of some heads: what a warp, a warpgroup, an item and a block have in common differs. Up to about exp(14)
nothing is tested, up to exp(69) the output, beyond that the item is computed again with maxima throughout.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.testing import compare, inputs, oracle
from jattn.testing.cases import Case
from jattn.testing.inputs import Operands
from jattn.testing.run import run

pytestmark = pytest.mark.backends("flash")

BASE = Case(
    name="settled",
    q_len=600,
    kv_len=900,
    num_heads=32,
    num_kv_heads=16,
    head_dim=128,
    head_dim_v=128,
    dtype="bfloat16",
)
NARROW = BASE.but("64", head_dim=64, head_dim_v=64)
WIDE = BASE.but("256", head_dim=256, head_dim_v=256, num_heads=8, num_kv_heads=8)
CASES = [
    BASE,
    BASE.but("float16", dtype="float16"),
    BASE.but("causal", is_causal=True, kv_len=600),
    BASE.but("causal-float16", is_causal=True, kv_len=600, dtype="float16"),
    BASE.but("window", window=(500, 0), kv_len=600),
    BASE.but("lower-right", is_causal=True, lower_right=True),
    BASE.but("lengths", q_lengths=(600, 333), kv_lengths=(801, 900)),
    BASE.but("sinks", sinks_form="n"),
    BASE.but("dropout", dropout_rate=0.3),
    BASE.but("mask", mask_form="b1ts"),
    BASE.but("bias", bias_form="1nts"),
    BASE.but("row-of-bias", bias_form="b11s"),
    BASE.but("alibi", alibi_form="n"),
    BASE.but("softcap", softcap=100.0),
    BASE.but("split", q_len=100, kv_len=8192, num_heads=4, num_kv_heads=2),
    NARROW,
    NARROW.but("causal", is_causal=True, kv_len=600),
    NARROW.but("row-of-bias", bias_form="b11s"),
    BASE.but("96", head_dim=96, head_dim_v=96),
    BASE.but("192-128", head_dim=192, num_heads=8, num_kv_heads=8),
    BASE.but("192", head_dim=192, head_dim_v=192, num_heads=8, num_kv_heads=8),
    WIDE,
    WIDE.but("causal", is_causal=True, kv_len=600),
]


def growing(case: Case, growth: float, v_size: float = 1.0) -> Operands:
    """Operands whose last column of q and k adds `growth` to every third score row of the odd heads."""
    made = inputs.make(case)
    q, k, v = (np.array(x, np.float32) for x in (made.q, made.k, made.v))
    q[..., -1] = 0
    q[:, ::3, 1::2, -1] = 8
    k[..., -1] = 0
    k[:, : case.kv_len // 2, :, -1] = growth / (8 * case.scale_value)
    dtype = jnp.dtype(case.dtype)
    q, k, v = (np.asarray(jnp.asarray(x, dtype)) for x in (q, k, v * v_size))
    return dataclasses.replace(made, q=q, k=k, v=v)


@pytest.mark.parametrize("growth", [12.0, 45.0, 150.0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_that_grow(case: Case, growth: float) -> None:
    """Twice, with the same bits: which items are computed again depends on nothing but them."""
    operands = growing(case, growth)
    outcome = run(case, operands, "flash", backward=False)
    solution = oracle.solve(case, operands)
    compare.assert_close(case, operands, outcome.results, solution=solution)
    again = run(case, operands, "flash", backward=False)
    for name, x in outcome.results.items():
        np.testing.assert_array_equal(np.asarray(again.results[name]), np.asarray(x))


@pytest.mark.parametrize("case", [BASE, NARROW, WIDE], ids=str)
def test_values_that_leave_no_room(case: Case) -> None:
    """Sums stay in range, their products with v do not."""
    operands = growing(case, 45.0, 1e30)
    outcome = run(case, operands, "flash", backward=False)
    solution = oracle.solve(case, operands)
    compare.assert_close(case, operands, outcome.results, solution=solution)
