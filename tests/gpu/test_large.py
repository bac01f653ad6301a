"""Sizes at which 32-bit offsets and grid limits break, and how much memory a long call takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn


@pytest.mark.backends("mem_efficient", "flash")
def test_more_heads_than_a_grid_axis_holds(backend: str) -> None:
    """Batch times heads is 65 600, above the 65 535 blocks of the second and third grid axes."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=(4100, 8, 16, 64)), jnp.bfloat16) for _ in range(3))
    run = jax.jit(lambda q, k, v: jattn.dot_product_attention(q, k, v, implementation=backend))
    got = np.asarray(run(q, k, v), np.float32)
    want = np.asarray(
        jattn.dot_product_attention(q[-3:], k[-3:], v[-3:], implementation="reference"), np.float32
    )
    np.testing.assert_allclose(got[-3:], want, atol=0.02, rtol=0.02)


@pytest.mark.backends("mem_efficient", "flash")
def test_more_elements_than_int32_counts(backend: str) -> None:
    """q, k, v of 2^31 + 2^21 elements each: the last batch entry lies beyond 32-bit element offsets."""
    batch, length, heads, head_dim = 1025, 256, 64, 128
    assert batch * length * heads * head_dim > 2**31
    x, y = (
        jax.random.normal(key, (batch, length, heads, head_dim), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(2))
    )

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation: str, x: jax.Array, y: jax.Array) -> list[jax.Array]:
        """With q = v and k = dout, so that other tests have memory beside this one."""
        attend = functools.partial(
            jattn.dot_product_attention, is_causal=True, implementation=implementation
        )
        out, pullback = jax.vjp(attend, x, y, x)
        return [result[-1:] for result in (out, *pullback(y))]

    got = [np.asarray(result, np.float32) for result in run(backend, x, y)]
    want = run("reference", x[-1:], y[-1:])
    for name, result, exact in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        largest = np.abs(np.asarray(exact, np.float32)).max()
        np.testing.assert_allclose(
            result / largest, np.asarray(exact, np.float32) / largest, atol=0.02, err_msg=name
        )


@pytest.mark.parametrize("mode", ["off", "strict"])
@pytest.mark.backends("flash")
def test_sections_of_more_heads_than_int32_counts(mode: str, backend: str) -> None:
    """A bias that 2^17 batch entries share: sections of 2^15 heads of each entry would be 2^32 heads."""
    batch, length, head_dim = 1 << 17, 8, 8
    keys = jax.random.split(jax.random.key(3), 4)
    q, k, v, dout = (
        jax.random.normal(key, (batch, length, 1, head_dim), jnp.bfloat16) for key in keys
    )
    bias = jnp.ones((1, 1, length, length), jnp.bfloat16)
    kept = slice(-2, None)

    def gradients(implementation: str, *x: jax.Array) -> list[jax.Array]:
        def attend(*x: jax.Array) -> jax.Array:
            return jattn.dot_product_attention(
                *x, bias, is_causal=True, implementation=implementation
            )

        *primals, dout = x
        # Of q alone, of k alone, of all three: other kernels each.
        of_q = jax.vjp(lambda q: attend(q, *primals[1:]), primals[0])[1](dout)
        of_k = jax.vjp(lambda k: attend(primals[0], k, primals[2]), primals[1])[1](dout)
        return [*of_q, *of_k, *jax.vjp(attend, *primals)[1](dout)]

    with jattn.deterministic(mode):
        got = jax.jit(functools.partial(gradients, backend))(q, k, v, dout)
    want = gradients("reference", *(x[kept] for x in (q, k, v, dout)))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(
            np.asarray(x[kept], np.float32), np.asarray(y, np.float32), atol=0.02, rtol=0.02
        )


@pytest.mark.backends("mem_efficient", "flash")
def test_memory_is_linear_in_the_length(backend: str) -> None:
    """Temporaries of forward and backward at S = 131072, 8 heads, D = 128, stay below three times the arrays."""
    x = jax.ShapeDtypeStruct((1, 131072, 8, 128), jnp.bfloat16)

    def step(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> object:
        out, pullback = jax.vjp(
            lambda *a: jattn.dot_product_attention(*a, is_causal=True, implementation=backend),
            q,
            k,
            v,
        )
        return out, pullback(dout)

    analysis = jax.jit(step).lower(x, x, x, x).compile().memory_analysis()
    one = 131072 * 8 * 128 * 2
    assert analysis.temp_size_in_bytes < 3 * 8 * one, (
        f"{analysis.temp_size_in_bytes / one:.1f} arrays of temporaries"
    )
