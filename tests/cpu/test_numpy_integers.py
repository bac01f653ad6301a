"""Integers of numpy as lengths and sizes mean the same as Python's: the smallest types would wrap round in sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn

TYPES = (np.int8, np.uint8, np.uint32, np.int64)


@pytest.mark.parametrize("integer", TYPES)
def test_causal_masks_of_unequal_lengths(integer: type[np.integer]) -> None:
    mask = jattn.causal_lower_right(integer(4), integer(8))
    assert mask == jattn.causal_lower_right(4, 8)
    assert mask.materialize().sum() == 5 + 6 + 7 + 8
    query, key, value = (
        jax.random.normal(jax.random.key(i), (1, length, 2, 8))
        for i, length in enumerate((4, 8, 8))
    )
    lengths = jnp.array([7])
    outs = [
        jattn.dot_product_attention(query, key, value, mask=own, key_value_seq_lengths=lengths)
        for own in (mask, jattn.causal_lower_right(4, 8))
    ]
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("integer", TYPES)
def test_block_masks(integer: type[np.integer]) -> None:
    length, size = integer(100), integer(16)
    mask = jattn.create_block_mask(
        lambda b, h, q, k: q >= k, integer(1), integer(1), length, length, size
    )
    assert mask.shape == (1, 1, 100, 100)
    assert mask.materialize().sum() == 100 * 101 // 2
    again = jattn.BlockMask.from_kv_blocks(*mask.kv_blocks(), length, length, size, mask.mask_mod)
    np.testing.assert_array_equal(again.materialize(), mask.materialize())


@pytest.mark.parametrize("integer", TYPES)
def test_masks_of_dropout(integer: type[np.integer]) -> None:
    shape = (1, 2, 100, 90)
    got = jattn.dropout_mask(3, 0, tuple(map(integer, shape)), 0.5)
    np.testing.assert_array_equal(got, jattn.dropout_mask(3, 0, shape, 0.5))


@pytest.mark.parametrize("integer", TYPES)
def test_ragged_arrays(integer: type[np.integer]) -> None:
    rows = [np.ones((3, 2)), np.full((100, 2), 2.0)]
    ragged = jattn.RaggedArray.from_list(rows, alignment=integer(64), max_length=integer(110))
    assert type(ragged.max_length) is int
    assert ragged.longest == 110
    padded, lengths = ragged.to_padded(integer(120))
    assert padded.shape == (2, 120, 2)
    assert lengths.tolist() == [3, 100]
