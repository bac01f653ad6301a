"""Every GPU backend agrees with the float64 oracle on what its rules admit of the table of problems.

The same comparison, poison and proof of the backend as tests/cpu/test_backends_sweep.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import normal

import jattn
from jattn.testing import cases
from jattn.testing.cases import Case
from jattn.testing.run import serves, verify

# Device time is dear: each value distribution runs in the one type that the table gives it beside float32.
CASES = [case for case in cases.sweep() if "values" not in case.tags or case.dtype != "float32"]
SM90 = jattn.Device("cuda", arch=(9, 0))
ADMITTED = [
    (backend, case)
    for backend in ("mem_efficient", "flash")
    for case in CASES
    if serves(case, backend, SM90)
]


@pytest.mark.parametrize(("backend", "case"), ADMITTED, ids=str)
def test_agrees_with_the_oracle(backend: str, case: Case) -> None:
    verify(case, backend)


@pytest.mark.parametrize("distribution", ["outlier_token", "lse_plus_200", "late", "logits_low"])
@pytest.mark.parametrize("backend", ["mem_efficient", "flash"])
def test_extreme_values_meet_masks(backend: str, distribution: str) -> None:
    """A partial last tile and a first tile that is masked whole, with |lse| beyond the range of exp."""
    case = Case(
        name=f"corner-{distribution}",
        q_len=66,
        kv_len=193,
        dtype="bfloat16",
        distribution=distribution,
        is_causal=True,
        lower_right=True,
        window=(90, None),
        kv_lengths=(193, 130),
        q_lengths=(66, 40),
    )
    verify(case, backend)


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("bias_form", ["bnts", "11ts"])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("mem_efficient", "float32"), ("mem_efficient", "bfloat16"), ("flash", "bfloat16")],
)
def test_gradient_of_a_bias_that_ends_within_a_tile(
    backend: str, dtype: str, bias_form: str, is_causal: bool
) -> None:
    """Rows beyond the query lengths hold NaN in a bias, and zeros in its gradient."""
    case = Case(
        name=f"bias-ends-{bias_form}-{is_causal}",
        q_len=70,
        kv_len=190,
        dtype=dtype,
        bias_form=bias_form,
        is_causal=is_causal,
        q_lengths=(43, 3),
        kv_lengths=(190, 130),
    )
    verify(case, backend)


@pytest.mark.parametrize("backend", ["mem_efficient", "flash"])
def test_float16_weights_of_scores_near_ten_million(backend: str) -> None:
    """A float32 lse is half a unit off there, which makes weights of up to 3: wrong, as said, but finite."""
    rng = np.random.default_rng(0)
    shape = (1, 64, 4, 192)
    magnitude = 780 * (1 + 0.1 * rng.standard_normal(shape))
    # Signs at random, so that each row sees its own key alone.
    q = jnp.asarray(magnitude * rng.choice([-1, 1], shape), "float16")
    v, dout = (normal(seed, *shape, dtype="float16") for seed in (1, 2))

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jattn.dot_product_attention(q, k, v, return_lse=True, implementation=backend)

    (out, lse), pull = jax.vjp(run, q, q, v)
    assert 7e6 < lse.min() < lse.max() < 1e7
    # The weight is rounded before it is multiplied, and out after.
    np.testing.assert_allclose(out, v, rtol=2 * 2.0**-11)
    dq, dk, dv = pull((dout, jnp.zeros_like(lse)))
    for x in (dq, dk, dv):
        assert jnp.isfinite(x).all()
    weights = np.asarray(dv, np.float32) / np.asarray(dout, np.float32)
    assert (weights > 1 / 3.5).all()
    assert (weights < 3.5).all()
