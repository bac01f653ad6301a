"""Every pair that a kernel drops, read off its results, against `jattn.dropout_mask`.

With equal scores and the unit matrix as values a row of the output holds what its weights are multiplied by; with the
unit matrix as the gradient of the output, so does dv.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn

# Few pairs, whose numbers are subnormal as bit patterns of bfloat16; about the threshold of such; nearly all pairs.
RATES = (0.0005, 0.002, 0.0039, 0.1, 0.5, 0.97, 0.9961, 0.99999)
SEED, OFFSET = (0xA4093822, 0x299F31D0), (7, 1)
HEADS = 8


@pytest.mark.parametrize("backend", ["flash", "mem_efficient"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("rate", RATES)
def test_dropped_pairs(rate: float, width: int, dtype: str, backend: str) -> None:
    """Queries, keys and values are as many as the head dim."""
    seed, offset = (jnp.asarray(words, jnp.uint32) for words in (SEED, OFFSET))
    q = jnp.zeros((1, width, HEADS, width), dtype)
    unit = jnp.broadcast_to(jnp.eye(width, dtype=dtype)[None, :, None], q.shape)

    def attention(v: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(
            q,
            q,
            v,
            dropout_rate=rate,
            dropout_seed=seed,
            dropout_offset=offset,
            implementation=backend,
        )

    out, pull = jax.vjp(attention, unit)
    (dv,) = pull(unit)
    kept = np.asarray(jattn.dropout_mask(seed, offset, (1, HEADS, width, width), rate))
    assert kept.any()
    assert not kept.all()
    np.testing.assert_array_equal(np.asarray(out != 0)[0].transpose(1, 0, 2), kept[0])
    np.testing.assert_array_equal(np.asarray(dv != 0)[0].transpose(1, 2, 0), kept[0])
