"""Rows that weigh nearly all keys alike: equal terms, added one by one to a large sum, all round the same way."""

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn.testing.bounds import unit_of

UNIT = 2.0**-24  # of float32, in which sums are


def check_equal_weights(
    backend: str, dtype: str, *, q_len: int, kv_len: int, num_heads: int, head_dim: int
) -> None:
    """lse, and out with values of one, of rows whose first and last key score 1/16 to 4 and all others 0.

    Four lanes have a row on GPUs. Simulated with 2000 weights, chains of 4096 equal terms are off by up to 1018
    roundings; sums of 128 or 64 keys, added up, by 32 or 64.
    """
    scores = np.arange(q_len) % 64 / 16 + 1 / 16  # exact in every type
    q, k = np.zeros((1, q_len, num_heads, head_dim)), np.zeros((1, kv_len, num_heads, head_dim))
    q[..., 0] = scores[:, None]
    k[:, [0, -1], :, 0] = 1
    attend = jax.jit(
        lambda q, k, v: jattn.dot_product_attention(
            q, k, v, scale=1.0, return_lse=True, implementation=backend
        )
    )
    out, lse = attend(*(jnp.asarray(x, dtype) for x in (q, k, np.ones_like(k))))
    want = np.log(2 * np.exp(scores) + kv_len - 2)
    off = np.abs(np.asarray(lse, np.float64) - want[:, None]) / UNIT
    limit = 32 + 0.4 * (32 + kv_len / 128) + want.max()
    assert off.max() <= limit, f"lse is off by {off.max():.0f} units of float32, {limit:.0f} may be"
    # All of a row's weights may be rounded the same way to the type of the values. XLA adds up float32 products in one
    # chain.
    if dtype != "float32":
        assert np.abs(np.asarray(out, np.float64) - 1).max() <= 2 * unit_of(dtype)
