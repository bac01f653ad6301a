"""The gradient of ALiBi slopes comes from a kernel, on both backends, and has the same bits every time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import slopes_cases

import jattn
from jattn.ffi import BACKWARD_TARGET
from jattn.testing.cases import Case
from jattn.testing.run import verify

KERNEL = "family=sm80_backward_dslopes "

BASE, EVERYTHING = (
    dataclasses.replace(case, dtype="bfloat16")
    for case in (slopes_cases.BASE, slopes_cases.EVERYTHING)
)
CASES = [
    BASE,
    BASE.but("one-of-all-heads", alibi_form="1", is_causal=True),
    BASE.but("entries", alibi_form="b1", q_lengths=(200, 0), kv_lengths=(3, 264)),
    # All keys of a tile are visible to its queries, and there are rows of a bias beyond these.
    BASE.but("bias", bias_form="bnts", q_lengths=(200, 33)),
    BASE.but("long", q_len=1300, kv_len=1100, is_causal=True, lower_right=True),
    BASE.but("sinks-softcap", sinks_form="n", softcap=5.0),
    BASE.but("positions", positions="shuffled", segments="random"),
    BASE.but("dropout", dropout_rate=0.3, head_dim=128, head_dim_v=128),
    BASE.but("mask", mask_form="bnts", mask_density=0.02, head_dim=40, head_dim_v=72),
    BASE.but("wide", head_dim=256, head_dim_v=256, is_causal=True, dtype="float16"),
    BASE.but("unequal", head_dim=192, head_dim_v=128, bias_form="bnts"),
    EVERYTHING,
    EVERYTHING.but("128", head_dim=128, head_dim_v=128, dtype="float16"),
]
FLOAT32 = [case.but("float32", dtype="float32") for case in CASES]
WIDEST = BASE.but("widest", head_dim=512, head_dim_v=512, is_causal=True)


@pytest.mark.backends("flash", "mem_efficient")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case, backend: str) -> None:
    verify(case, backend, kernel=KERNEL)


@pytest.mark.backends("mem_efficient")
@pytest.mark.parametrize(
    "case", [*FLOAT32, WIDEST, WIDEST.but("float32", dtype="float32")], ids=str
)
def test_gradients_of_other_types(case: Case, backend: str) -> None:
    verify(case, backend, kernel=KERNEL)


@pytest.mark.backends("flash", "mem_efficient")
def test_XLA_multiplies_nothing_and_bits_stay(backend: str) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 900, 4, 64)), jnp.bfloat16) for _ in range(3))
    slopes = jnp.asarray(2.0 ** -np.arange(1, 5), jnp.float32)

    def loss(slopes: jax.Array) -> jax.Array:
        out = jattn.dot_product_attention(
            q, k, v, alibi_slopes=slopes, is_causal=True, implementation=backend
        )
        return (out.astype(jnp.float32) ** 2).sum()

    compiled = jax.jit(jax.grad(loss)).lower(slopes).compile()
    program = compiled.as_text() or ""
    assert program.count(BACKWARD_TARGET) == 1  # no other gradient is asked for
    for sign in (" while(", " dot(", "gemm"):
        assert sign not in program
    first = np.asarray(compiled(slopes))
    assert np.all(first != 0)
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(compiled(slopes)), first)
