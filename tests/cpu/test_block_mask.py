"""Block masks: what they take, and what they say of what they do not."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
import jattn.flax


def _sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def _mask(**changes: Any) -> jattn.BlockMask:
    """A mask of 24 queries and keys in 2 by 3 blocks, some of its fields changed."""
    fields: dict[str, Any] = {
        "blocks": np.ones((1, 1, 2, 3), bool),
        "q_len": 24,
        "kv_len": 24,
        "block_size": (12, 8),
    }
    return jattn.BlockMask(**(fields | changes))


def _of_lists(counts: Any = np.int32, indices: Any = np.int32, **changes: Any) -> jattn.BlockMask:
    arrays = np.ones((1, 1, 2), counts), np.ones((1, 1, 2, 3), indices)
    fields: dict[str, Any] = {"q_len": 24, "kv_len": 24, "block_size": (12, 8)}
    return jattn.BlockMask.from_kv_blocks(*arrays, **(fields | changes))


BLOCK_MASK_ERRORS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "result": (
        lambda: jattn.create_block_mask(lambda b, h, q, k: q - k, None, None, 4, 4),
        TypeError,
        "create_block_mask: mask_mod returns .*int32.*must return one bool",
    ),
    "no function": (
        lambda: jattn.create_block_mask(3, None, None, 4, 4),
        TypeError,
        "mask_mod is 3, must be a function",
    ),
    "size 0": (
        lambda: jattn.create_block_mask(_sees, None, None, 4, 4, 0),
        ValueError,
        "block_size is 0, must be one integer from 1 on, or two",
    ),
    "three sizes": (
        lambda: jattn.create_block_mask(_sees, None, None, 4, 4, (1, 2, 3)),
        ValueError,
        r"block_size is \(1, 2, 3\), must be one integer",
    ),
    "fewer than no queries": (
        lambda: jattn.create_block_mask(_sees, None, None, -1, 4),
        ValueError,
        "q_len is -1, must be an integer from 0 to 2.31 - 1",
    ),
    "two arguments": (
        lambda: jattn.create_block_mask(lambda q, k: q >= k, None, None, 4, 4),
        TypeError,
        r"create_block_mask: mask_mod has the signature \(q, k\), must take 4 arguments: mask_mod\(batch, head",
    ),
    "traced keys": (
        lambda: jax.jit(lambda n: jattn.create_block_mask(_sees, None, None, 4, n))(3),
        ValueError,
        "kv_len is .*, must be an integer from 0 to 2.31 - 1, known while tracing",
    ),
    "no batch": (
        lambda: jattn.create_block_mask(_sees, 0, None, 4, 4),
        ValueError,
        "batch is 0, must be an integer from 1 to 2.31 - 1 or None",
    ),
    "half a head": (
        lambda: jattn.create_block_mask(_sees, None, 0.5, 4, 4),
        ValueError,
        "num_heads is 0.5, must be an integer",
    ),
    "lists of other shapes": (
        lambda: _of_lists(q_len=40),
        ValueError,
        r"kv_num_blocks has shape \(1, 1, 2\) and kv_indices \(1, 1, 2, 3\), must be .*4",
    ),
    "counts of floats": (
        lambda: _of_lists(counts=np.float32),
        ValueError,
        "kv_num_blocks has dtype float32, must hold integers",
    ),
    "numbers of floats": (
        lambda: _of_lists(indices=np.float32),
        ValueError,
        "kv_indices has dtype float32, must hold integers",
    ),
    "length of a list": (
        lambda: _of_lists(q_len=24.0),
        ValueError,
        "q_len is 24.0, must be an integer",
    ),
    "length": (lambda: _mask(q_len=-24), ValueError, "q_len is -24, must be an integer from 0 to"),
    "size": (
        lambda: _mask(block_size=(12.0, 8)),
        ValueError,
        r"block_size is \(12.0, 8\), must be one integer",
    ),
    "length beyond int32": (
        lambda: jattn.create_block_mask(_sees, None, None, 4, 2**62),
        ValueError,
        "kv_len is 4611686018427387904, must be an integer from 0 to 2.31 - 1",
    ),
    "an array as a function": (
        lambda: _mask(mask_mod=np.ones(2)),
        TypeError,
        "mask_mod is array.*must be a function",
    ),
}


@pytest.mark.parametrize("name", BLOCK_MASK_ERRORS)
def test_errors_of_block_masks(name: str) -> None:
    make, kind, message = BLOCK_MASK_ERRORS[name]
    with pytest.raises(kind, match=message):
        make()


# What only a use can tell, since transformations of JAX put anything in the place of an array.
BLOCK_MASK_USES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "int8": (
        {"blocks": np.ones((1, 1, 2, 3), np.int8)},
        ValueError,
        "blocks has dtype int8, must be bool .*compare it with 0",
    ),
    "too few": (
        {"blocks": np.ones((1, 1, 2, 2), bool)},
        ValueError,
        r"blocks has shape \(1, 1, 2, 2\), must be \(1 or batch, 1 or heads, 2, 3\)",
    ),
    "too many": (
        {"blocks": np.ones((1, 1, 3, 3), bool)},
        ValueError,
        r"blocks has shape \(1, 1, 3, 3\), .* 2, 3\) for lengths 24 and 24",
    ),
    "rank": ({"blocks": np.ones((2, 3), bool)}, ValueError, r"blocks has shape \(2, 3\)"),
    "none": ({"blocks": None}, ValueError, "blocks is None, must be an array"),
    "numbers": (
        {"mask_mod": lambda b, h, q, k: q - k},
        TypeError,
        "BlockMask: mask_mod returns .*int32.*must return one bool",
    ),
}


@pytest.mark.parametrize("name", BLOCK_MASK_USES)
def test_errors_where_block_masks_are_used(name: str) -> None:
    """While tracing, by whatever uses the mask."""
    changes, kind, message = BLOCK_MASK_USES[name]
    q = jnp.ones((1, 24, 2, 8))
    mask = _mask(**changes)
    uses: list[Callable[[], Any]] = [
        mask.materialize,
        lambda: jax.eval_shape(lambda q: jattn.dot_product_attention(q, q, q, block_mask=mask), q),
    ]
    if "blocks" in changes:
        uses += [mask.sparsity, mask.kv_blocks, lambda: mask.shape]
    for use in uses:
        with pytest.raises(kind, match=message):
            use()
    assert "BlockMask(" in repr(mask)
    assert jax.tree.structure(jax.tree.map(lambda _: object(), mask)) == jax.tree.structure(mask)


def test_masks_are_equal_to_themselves_alone() -> None:
    """They hold arrays, of which == makes an array; so they can be keys."""
    block = jattn.create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256)
    structural = jattn.flax.StructuralMask(segment_ids=jnp.zeros((2, 8), jnp.int32))
    for mask in (block, structural):
        assert mask != copy.copy(mask)
        assert {mask: 1}[mask] == 1


def test_what_block_masks_take() -> None:
    """Lists and integers of numpy for sizes, one size for both, nested lists of bools; block -1 is none."""
    want = np.kron(np.array([[True, False], [True, True]]), np.ones((12, 12), bool))
    for size in (12, [12, 12], (np.int64(12), 12)):
        mask = _mask(blocks=[[[[True, False], [True, True]]]], block_size=size)
        assert mask.block_size == (12, 12)
        np.testing.assert_array_equal(mask.materialize()[0, 0], want)
    counts, indices = np.array([[[2, 2]]]), np.array([[[[0, -1], [1, 0]]]])
    lists = jattn.BlockMask.from_kv_blocks(counts, indices, 24, 24, 12)
    np.testing.assert_array_equal(lists.materialize()[0, 0], want)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_masks_of_no_queries_or_keys(q_len: int, kv_len: int) -> None:
    q, k = jnp.ones((2, q_len, 2, 8)), jnp.ones((2, kv_len, 2, 8))
    lists = jnp.zeros((1, 1, -(-q_len // 4), -(-kv_len // 4)), jnp.int32)
    masks = (
        jattn.create_block_mask(_sees, None, None, q_len, kv_len, 4),
        jattn.BlockMask.from_kv_blocks(lists.sum(-1), lists, q_len, kv_len, 4, _sees),
    )
    for mask in masks:
        assert mask.materialize().shape == (1, 1, q_len, kv_len)
        out = jattn.dot_product_attention(q, k, k, block_mask=mask)
        np.testing.assert_array_equal(out, np.zeros((2, q_len, 2, 8)))


def test_blocks_larger_than_the_lengths() -> None:
    """No more pairs are looked at than there are."""
    mask = jattn.create_block_mask(_sees, None, None, 5, 7, 2**40)
    assert mask.blocks.shape == (1, 1, 1, 1)
    want = np.asarray([[bool(_sees(0, 0, i, j)) for j in range(7)] for i in range(5)])
    np.testing.assert_array_equal(mask.materialize()[0, 0], want)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_lists_of_any_integer_type(dtype: str) -> None:
    """Numbers of blocks beyond the last are none, however large; counts end at the last."""
    largest = np.iinfo(dtype).max
    counts, blocks = np.array([[[largest, 1]]], dtype), 130
    lists = np.full((1, 1, 2, blocks), largest, dtype)
    lists[0, 0, :, 0] = 1
    made = jattn.BlockMask.from_kv_blocks(counts, lists, 2, blocks, 1).blocks
    want = np.zeros((1, 1, 2, blocks), bool)
    want[0, 0, :, 1] = True
    if largest < blocks:  # a number of a block
        want[0, 0, 0, largest] = True
    np.testing.assert_array_equal(made, want)


def test_a_mask_that_leaves_the_jit_that_its_function_closes_over() -> None:
    ids = jnp.array([0, 0, 1, 1])
    make = jax.jit(
        lambda ids: jattn.create_block_mask(
            lambda b, h, i, j: ids[i] == ids[j], None, None, 4, 4, 2
        )
    )
    mask = make(ids)
    with pytest.raises(jax.errors.UnexpectedTracerError) as raised:
        mask.materialize()
    assert "make the mask where it is used" in str(raised.value.__notes__)


@pytest.mark.parametrize("length", ["t", "4*t"])
def test_masks_of_symbolic_lengths(length: str) -> None:
    def run(x: jax.Array) -> jax.Array:
        mask = jattn.create_block_mask(
            lambda b, h, q, k: q >= k, None, None, x.shape[1], x.shape[1], block_size=4
        )
        return jattn.dot_product_attention(x, x, x, block_mask=mask, implementation="reference")

    shape = jax.export.symbolic_shape(f"b, {length}, 2, 8")
    exported = jax.export.export(jax.jit(run))(jax.ShapeDtypeStruct(shape, "float32"))
    x = jax.random.normal(jax.random.key(0), (1, 12, 2, 8))
    want = jattn.dot_product_attention(x, x, x, is_causal=True)
    np.testing.assert_allclose(exported.call(x), want, atol=2e-6)
