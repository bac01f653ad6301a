"""The same bits twice: the forward always, the backward in strict mode (row T071)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn

SHAPE = (1, 1024, 8, 64)


DTYPES = {"mem_efficient": ("bfloat16", "float32"), "flash": ("bfloat16",)}


@pytest.mark.backends("mem_efficient", "flash")
def test_T071_strict_backward_is_bitwise_stable(backend: str) -> None:
    def step(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> object:
        out, pullback = jax.vjp(
            lambda *a: jattn.dot_product_attention(*a, is_causal=True, implementation=backend),
            q,
            k,
            v,
        )
        return out, pullback(dout)

    for dtype in DTYPES[backend]:
        rng = np.random.default_rng(71)
        arrays = [jnp.asarray(rng.normal(size=SHAPE), dtype) for _ in range(4)]
        with jattn.deterministic("strict"):
            run = jax.jit(step)
            first = jax.device_get(run(*arrays))
            for _ in range(100):
                for a, b in zip(
                    jax.tree.leaves(first),
                    jax.tree.leaves(jax.device_get(run(*arrays))),
                    strict=True,
                ):
                    np.testing.assert_array_equal(a, b)


@pytest.mark.backends("mem_efficient", "flash")
def test_forward_is_bitwise_stable(backend: str) -> None:
    rng = np.random.default_rng(72)
    q, k, v = (jnp.asarray(rng.normal(size=(3, 1000, 8, 128)), jnp.bfloat16) for _ in range(3))
    run = jax.jit(
        lambda q, k, v: jattn.dot_product_attention(
            q, k, v, is_causal=True, implementation=backend, return_lse=True
        )
    )
    first = jax.device_get(run(q, k, v))
    for _ in range(20):
        for a, b in zip(first, jax.device_get(run(q, k, v)), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.backends("mem_efficient", "flash")
def test_a_row_has_the_same_bits_in_any_batch(backend: str) -> None:
    rng = np.random.default_rng(73)
    q, k, v = (jnp.asarray(rng.normal(size=(5, 300, 4, 64)), jnp.bfloat16) for _ in range(3))
    run = jax.jit(
        lambda q, k, v: jattn.dot_product_attention(q, k, v, is_causal=True, implementation=backend)
    )
    whole = jax.device_get(run(q, k, v))
    for i in range(5):
        np.testing.assert_array_equal(
            whole[i : i + 1], jax.device_get(run(q[i : i + 1], k[i : i + 1], v[i : i + 1]))
        )
