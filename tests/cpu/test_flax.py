"""`jattn.flax` inside Flax's attention modules, Linen and NNX, against Flax's own attention."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn import normal
from flax import nnx

import jattn
import jattn.flax
from jattn.flax import StructuralMask, attention_fn, make_attention_fn

Array = jax.Array

BATCH, Q_LEN, KV_LEN, HEADS, FEATURES = 2, 5, 7, 4, 16


def close(actual: Any, expected: Any) -> None:
    """Compares trees of float32 arrays element by element; shapes and dtypes equal, nothing NaN.

    1e-5 of an array's largest element (1 at least) is some 80 roundings: sums of products over 16 features and 14 rows,
    two layers deep, on both sides. A key too many or too few moves results by 1e-2 and more.
    """

    def compare(a: Array, e: Array) -> None:
        assert a.dtype == e.dtype == jnp.float32
        assert a.shape == e.shape
        assert np.isfinite(a).all()
        largest = max(1.0, float(np.abs(e).max(initial=0.0)))
        np.testing.assert_allclose(a, e, rtol=0.0, atol=1e-5 * largest)

    jax.tree.map(compare, actual, expected)


def random_mask(*shape: int) -> Array:
    """A random boolean mask in which every row sees its first key, so that Flax defines the result as we do."""
    mask = np.random.default_rng(3).random(shape) < 0.5
    mask[..., 0] = True
    return jnp.asarray(mask)


# Flax's own function, compiled as a whole: step by step it would compile some twelve programs for every shape.
flax_attention = jax.jit(nn.dot_product_attention, static_argnames=("precision", "dtype"))


def padding(q_len: int, kv_len: int) -> Array:
    real = jnp.arange(kv_len)[None] < jnp.array([kv_len, kv_len - 2])[:, None]
    return nn.make_attention_mask(jnp.ones((BATCH, q_len)), real)


# Name -> mask of a (q_len, kv_len) problem. Flax's own helpers make float32 masks; a mask may be of any dtype.
MASKS: dict[str, Callable[[int, int], Array | None]] = {
    "none": lambda q_len, kv_len: None,
    "padding-float": padding,
    "padding-bool": lambda q_len, kv_len: padding(q_len, kv_len).astype(bool),
    "keys": lambda q_len, kv_len: random_mask(BATCH, 1, 1, kv_len),
    "causal-float": lambda q_len, kv_len: jnp.tril(jnp.ones((1, 1, q_len, kv_len))),
    "causal-and-padding": lambda q_len, kv_len: nn.combine_masks(
        padding(q_len, kv_len), jnp.tril(jnp.ones((1, 1, q_len, kv_len)))
    ),
    "full": lambda q_len, kv_len: random_mask(BATCH, HEADS, q_len, kv_len),
    "full-int": lambda q_len, kv_len: (
        random_mask(BATCH, HEADS, q_len, kv_len).astype(jnp.int32) * 3
    ),
    "heads": lambda q_len, kv_len: random_mask(1, HEADS, q_len, kv_len),
    "rank-3": lambda q_len, kv_len: random_mask(HEADS, q_len, kv_len),
    "rank-2": random_mask,
    "rank-1": lambda q_len, kv_len: random_mask(kv_len),
}
# A module hands its mask on as it is, so a few of them prove the way through, gradients included.
MASKS_IN_MODULES = ("none", "causal-and-padding", "full")


def by_distance(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A score function, which knows where queries stand."""
    return score * (head + 1) / 2 - jnp.log1p(jnp.abs(query - key).astype(jnp.float32))


# What a layer that decodes may have; the results are those of a causal pass over all tokens.
DECODING_OPTIONS: list[Any] = [
    {},
    {"is_causal": True},
    {"is_causal": True, "local_window_size": (-1, None)},
    {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
    {"is_causal": True, "alibi_slopes": (0.5, -0.25, 1.5, 0.0)},
    {"is_causal": True, "alibi_slopes": (0.5, -0.25, 1.5, 0.0), "causal_alignment": "lower_right"},
    pytest.param({"is_causal": True, "score_mod": by_distance}, id="score function"),
]


# --- Linen ------------------------------------------------------------------------------------------------------------


@functools.cache
def linen_variables() -> Any:
    x = jnp.zeros((1, 1, FEATURES))
    return nn.MultiHeadDotProductAttention(HEADS, qkv_features=FEATURES).init(jax.random.key(7), x)


def linen_results(
    function: Callable[..., Array], mask: Any, q: Array, kv: Array, **options: Any
) -> Any:
    """Output and parameter gradients of a Linen module; parameters depend on nothing but the shapes."""
    module = nn.MultiHeadDotProductAttention(
        HEADS, qkv_features=FEATURES, attention_fn=function, **options
    )
    variables = linen_variables()

    @jax.jit
    def run(variables: Any, mask: Any) -> Any:
        def loss(variables: Any) -> tuple[Array, Array]:
            out = module.apply(variables, q, kv, mask=mask)
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        gradients, out = jax.grad(loss, has_aux=True)(variables)
        return out, gradients

    return run(variables, mask)


@pytest.mark.parametrize("name", MASKS_IN_MODULES)
def test_linen_module_agrees_with_flax(name: str) -> None:
    q, kv = normal(1, BATCH, Q_LEN, FEATURES), normal(2, BATCH, KV_LEN, FEATURES)
    mask = MASKS[name](Q_LEN, KV_LEN)
    close(
        linen_results(attention_fn, mask, q, kv),
        linen_results(nn.dot_product_attention, mask, q, kv),
    )


@pytest.mark.parametrize("options", DECODING_OPTIONS, ids=str)
def test_linen_decoding_equals_the_causal_pass(options: dict[str, Any]) -> None:
    x = normal(1, BATCH, Q_LEN, FEATURES)
    function = jattn.flax.make_attention_fn(**options)
    whole = nn.MultiHeadDotProductAttention(HEADS, attention_fn=function)
    step = nn.MultiHeadDotProductAttention(HEADS, attention_fn=function, decode=True)
    variables = step.init(jax.random.key(7), x)
    expected = whole.apply({"params": variables["params"]}, x, mask=nn.make_causal_mask(x[..., 0]))

    cache = variables["cache"]
    steps = []
    for t in range(Q_LEN):
        out, updated = step.apply(
            {"params": variables["params"], "cache": cache}, x[:, t : t + 1], mutable=["cache"]
        )
        cache = updated["cache"]
        steps.append(out)
    close(jnp.concatenate(steps, axis=1), expected)


# --- NNX --------------------------------------------------------------------------------------------------------------


def nnx_results(
    function: Callable[..., Array],
    mask: Any,
    q: Array,
    kv: Array,
    *,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Output and parameter gradients of an NNX module; parameters depend on nothing but the seed."""
    module = nnx.MultiHeadAttention(
        HEADS, FEATURES, attention_fn=function, decode=False, rngs=nnx.Rngs(7), **options
    )

    @nnx.jit
    def run(module: nnx.MultiHeadAttention, mask: Any) -> Any:
        def loss(module: nnx.MultiHeadAttention) -> tuple[Array, Array]:
            out = module(q, kv, mask=mask, is_causal=is_causal)
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        gradients, out = nnx.grad(loss, has_aux=True)(module)
        return out, nnx.to_pure_dict(gradients)

    return run(module, mask)


@pytest.mark.parametrize("name", MASKS_IN_MODULES)
def test_nnx_module_agrees_with_flax(name: str) -> None:
    q, kv = normal(1, BATCH, Q_LEN, FEATURES), normal(2, BATCH, KV_LEN, FEATURES)
    mask = MASKS[name](Q_LEN, KV_LEN)
    # NNX's own function wants rank 4.
    rank_4 = None if mask is None else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    close(
        nnx_results(attention_fn, mask, q, kv),
        nnx_results(nnx.dot_product_attention, rank_4, q, kv),
    )


@pytest.mark.parametrize(("num_kv_heads", "masked"), [(1, False), (2, True), (HEADS, True)])
def test_nnx_is_causal_and_grouped_heads(num_kv_heads: int, masked: bool) -> None:
    q, kv = normal(1, BATCH, Q_LEN, FEATURES), normal(2, BATCH, KV_LEN, FEATURES)
    mask = random_mask(BATCH, HEADS, Q_LEN, KV_LEN) if masked else None
    close(
        nnx_results(attention_fn, mask, q, kv, is_causal=True, num_kv_heads=num_kv_heads),
        nnx_results(
            nnx.dot_product_attention, mask, q, kv, is_causal=True, num_kv_heads=num_kv_heads
        ),
    )


@pytest.mark.parametrize("options", DECODING_OPTIONS, ids=str)
def test_nnx_decoding_equals_the_causal_pass(options: dict[str, Any]) -> None:
    x = normal(1, BATCH, Q_LEN, FEATURES)
    function = jattn.flax.make_attention_fn(**options)
    module = nnx.MultiHeadAttention(HEADS, FEATURES, attention_fn=function, rngs=nnx.Rngs(7))
    expected = module(x, is_causal=True, decode=False)
    module.init_cache(x.shape)
    steps = [module(x[:, t : t + 1], decode=True) for t in range(Q_LEN)]
    close(jnp.concatenate(steps, axis=1), expected)


def test_slopes_of_a_short_start_in_a_long_cache_lose_nothing() -> None:
    """Distances to the end of the cache would differ by a constant only, but one of 8192, rounded to 2**-10."""
    used, cache = 4, 16384
    q = normal(1, 1, 1, HEADS, 8)
    k, v = normal(2, 1, cache, HEADS, 8), normal(3, 1, cache, HEADS, 8)
    function = make_attention_fn(is_causal=True, alibi_slopes=(0.5, -0.5, 0.25, -0.125))
    got = function(q, k, v, mask=jnp.arange(cache) < used)
    structure = StructuralMask(
        query_positions=jnp.array([[used - 1]]), key_value_positions=jnp.arange(used)[None]
    )
    close(got, function(q, k[:, :used], v[:, :used], mask=structure))


def test_every_entry_of_a_decoding_batch_has_its_own_place() -> None:
    """What another batch entry sees does not move the query of a score function."""
    q, k, v = normal(1, 2, 1, HEADS, 8), normal(2, 2, 6, HEADS, 8), normal(3, 2, 6, HEADS, 8)
    function = make_attention_fn(score_mod=lambda s, b, h, i, j: s + jnp.cos(i - 2.0 * j))
    mask = jnp.arange(6) < jnp.array([3, 6])[:, None, None, None]
    both = function(q, k, v, mask=mask)
    for entry in range(2):
        own = [x[entry : entry + 1] for x in (q, k, v)]
        close(both[entry : entry + 1], function(*own, mask=mask[entry : entry + 1]))
        close(both[entry], function(*(x[entry] for x in (q, k, v)), mask=mask[entry]))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"mask": jattn.create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 7)}, "mask is a BlockMask"),
        ({"dropout_rate": "0.5", "deterministic": False}, "dropout_rate is '0.5', must be a real number"),
        ({"dropout_rate": 0.5, "deterministic": "False"}, "deterministic is 'False', must be True or False"),
        ({"precision": ["nonsense"]}, "precision is 'nonsense'"),
    ],
)  # fmt: skip
def test_wrong_calls_of_the_adapter(keywords: dict[str, Any], words: str) -> None:
    x = normal(1, 1, 5, HEADS, 8)
    with pytest.raises(ValueError, match=f"jattn.flax.attention_fn: {words}"):
        jattn.flax.attention_fn(x, x, x, **keywords)


def test_slopes_of_the_adapter_are_known_numbers() -> None:
    for slopes in (np.array([1j, 2j]), "ab"):
        with pytest.raises(ValueError, match=r"alibi_slopes is .*must be N real numbers"):
            make_attention_fn(alibi_slopes=slopes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"learned slopes go into the module's mask"):
        jax.jit(lambda s: make_attention_fn(alibi_slopes=s)(*[jnp.ones((1, 2, 2, 8))] * 3))(
            jnp.ones(2)
        )


@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
def test_decoding_with_a_window_is_refused(alignment: Any) -> None:
    window = make_attention_fn(local_window_size=(3, 0), causal_alignment=alignment)
    module = nnx.MultiHeadAttention(HEADS, FEATURES, attention_fn=window, rngs=nnx.Rngs(7))
    module.init_cache((BATCH, Q_LEN, FEATURES))
    with pytest.raises(ValueError, match=r"local_window_size is \(3, 0\), but a query alone"):
        module(normal(1, BATCH, 1, FEATURES), decode=True)


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"is_causal": True, "local_window_size": (1, 0)},
        {"is_causal": True, "alibi_slopes": (0.5, 0.25, 0.125, 0.0625)},
    ],
    ids=str,
)
def test_a_dense_part_leaves_one_query_its_place(options: dict[str, Any]) -> None:
    q, k, v = qkv()
    function = make_attention_fn(**options)
    positions = StructuralMask(
        query_positions=jnp.array([[3], [1]]),
        key_value_positions=jnp.arange(KV_LEN)[None].repeat(BATCH, 0),
    )
    with_dense = dataclasses.replace(positions, dense=jnp.ones((1, 1, 1, KV_LEN), bool))
    got = function(q[:, :1], k, v, mask=with_dense)
    close(got, function(q[:, :1], k, v, mask=positions))
    assert not np.allclose(got, make_attention_fn()(q[:, :1], k, v), atol=1e-2)


@pytest.mark.parametrize("options", DECODING_OPTIONS[:5], ids=str)
def test_causality_of_the_call_holds_for_one_query(options: dict[str, Any]) -> None:
    """As in Flax, where it counts from the first key, with a cache too; slopes cannot matter then."""
    q, k, v = qkv()
    mask = MASKS["keys"](1, KV_LEN)
    close(
        make_attention_fn(**options)(q[:, :1], k, v, mask=mask, is_causal=True),
        nnx.dot_product_attention(q[:, :1], k, v, mask=mask, is_causal=True),
    )


def test_functions_of_arrays_and_lists_are_hashable_and_equal() -> None:
    make = jattn.flax.make_attention_fn
    slopes = 2.0 ** -jnp.arange(1.0, 5.0)
    assert make(alibi_slopes=slopes) == make(alibi_slopes=slopes.tolist())
    assert hash(make(alibi_slopes=slopes)) == hash(make(alibi_slopes=slopes.tolist()))
    assert hash(make(local_window_size=[2, 0])) == hash(make(local_window_size=(2, 0)))
    assert make(local_window_size=np.array([2, 0])) == make(local_window_size=(2, 0))
    assert make(local_window_size=np.array(2)) == make(local_window_size=2)
    for number in (jnp.float32(0.5), np.array(0.5)):
        assert hash(make(scale=number)) == hash(make(scale=0.5))
        assert make(logits_soft_cap=number) == make(logits_soft_cap=0.5)


def test_a_traced_dropout_rate_needs_a_key() -> None:
    q = normal(1, BATCH, Q_LEN, HEADS, 8)
    with pytest.raises(ValueError, match="dropout_rng is None"):
        jax.jit(lambda rate: attention_fn(q, q, q, dropout_rate=rate))(0.1)


# --- arguments of the function itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
def test_every_form_of_mask_agrees_with_flax(name: str) -> None:
    q, k, v = qkv()
    mask = MASKS[name](Q_LEN, KV_LEN)
    close(attention_fn(q, k, v, mask=mask), flax_attention(q, k, v, mask=mask))


@pytest.mark.parametrize("batch_shape", [(), (3,), (2, 3)], ids=str)
def test_any_number_of_batch_axes(batch_shape: tuple[int, ...]) -> None:
    q = normal(1, *batch_shape, Q_LEN, HEADS, 8)
    kv = normal(2, *batch_shape, KV_LEN, HEADS, 8)
    # One mask for the whole batch, one for each entry, and one that differs along the last batch axis only.
    leading = {
        (1,) * len(batch_shape),
        batch_shape,
        (1,) * (len(batch_shape) - 1) + batch_shape[-1:],
    }
    for axes in sorted(leading):
        mask = random_mask(*axes, 1, Q_LEN, KV_LEN)
        bias = normal(3, *axes, HEADS, 1, KV_LEN)
        close(attention_fn(q, kv, kv, bias, mask), flax_attention(q, kv, kv, bias, mask))


def qkv(dtype: Any = jnp.float32) -> tuple[Array, Array, Array]:
    return (
        normal(1, BATCH, Q_LEN, HEADS, 8, dtype=dtype),
        normal(2, BATCH, KV_LEN, HEADS, 8, dtype=dtype),
        normal(3, BATCH, KV_LEN, HEADS, 8, dtype=dtype),
    )


@pytest.mark.parametrize("function", [nn.dot_product_attention, nnx.dot_product_attention])
def test_every_keyword_of_flax_is_declared(function: Callable[..., Array]) -> None:
    # Linen drops what a signature does not name, so a missing name would be ignored without a word.
    theirs = inspect.signature(function).parameters
    ours = inspect.signature(attention_fn).parameters
    assert set(theirs) <= set(ours)
    positional = ["query", "key", "value", "bias", "mask"]
    assert list(ours)[:5] == list(theirs)[:5] == positional
    for name in theirs.keys() - {"promote_dtype"}:  # None stands for the promotion that NNX names
        assert ours[name].default == theirs[name].default, name


def test_linen_passes_every_keyword_that_it_has() -> None:
    seen: dict[str, Any] = {}

    @dataclasses.dataclass(frozen=True)
    class Spy(jattn.flax.AttentionFunction):
        def __call__(self, query: Array, key: Array, value: Array, **given: Any) -> Array:
            seen.update(given)
            return attention_fn(query, key, value, **given)

    Spy.__call__.__signature__ = inspect.signature(jattn.flax.AttentionFunction.__call__)  # type: ignore[attr-defined]
    q, kv = normal(1, BATCH, Q_LEN, FEATURES), normal(2, BATCH, KV_LEN, FEATURES)
    linen_results(Spy(), None, q, kv)
    assert {
        "mask",
        "dropout_rng",
        "dropout_rate",
        "broadcast_dropout",
        "deterministic",
        "dtype",
        "precision",
    } <= set(seen)
    assert {"force_fp32_for_softmax", "qk_attn_weights_einsum", "attn_weights_value_einsum"} <= set(
        seen
    )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((BATCH, HEADS, Q_LEN, KV_LEN), jnp.float32),
        ((1, HEADS, Q_LEN, KV_LEN), jnp.bfloat16),  # cast: neither the query's dtype nor float32
        ((Q_LEN, KV_LEN), jnp.float32),
        ((HEADS, 1, KV_LEN), jnp.int32),
    ],
    ids=str,
)
def test_bias_agrees_with_flax(shape: tuple[int, ...], dtype: Any) -> None:
    q, k, v = qkv()
    bias = (4 * normal(4, *shape)).astype(dtype)
    mask = random_mask(BATCH, HEADS, Q_LEN, KV_LEN)
    close(attention_fn(q, k, v, bias, mask), flax_attention(q, k, v, bias, mask))


def test_bias_gradient_agrees_with_flax() -> None:
    q, k, v = qkv()
    bias = normal(4, 1, HEADS, Q_LEN, KV_LEN)

    def gradient(function: Callable[..., Array]) -> Array:
        return jax.grad(lambda bias: jnp.sum(function(q, k, v, bias=bias) ** 2))(bias)

    close(gradient(attention_fn), gradient(nn.dot_product_attention))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_module_dtype_is_that_of_the_computation(dtype: Any) -> None:
    q, kv = normal(1, BATCH, Q_LEN, FEATURES), normal(2, BATCH, KV_LEN, FEATURES)
    exact, _ = linen_results(nn.dot_product_attention, None, q, kv)
    flax_out, _ = linen_results(nn.dot_product_attention, None, q, kv, dtype=dtype)
    out, _ = linen_results(attention_fn, None, q, kv, dtype=dtype)
    assert out.dtype == dtype

    def error(a: Array) -> float:
        return float(np.abs(np.asarray(a, np.float32) - exact).max())

    # Flax rounds the scores and weights to the low type too, so its own error is the scale to judge ours by.
    assert 0.0 < error(out) <= 2.0 * error(flax_out)


def test_inputs_of_different_dtypes_are_promoted() -> None:
    q, k, v = qkv()
    low = k.astype(jnp.bfloat16)
    out = attention_fn(q, low, v)
    assert out.dtype == jnp.float32
    close(out, attention_fn(q, low.astype(jnp.float32), v))
    assert attention_fn(q, k, v, dtype=jnp.bfloat16).dtype == jnp.bfloat16

    calls: list[Any] = []

    def promote(arrays: tuple[Array, ...], *, dtype: Any) -> list[Array]:
        calls.append(dtype)
        return [x.astype(jnp.bfloat16) for x in arrays]

    assert attention_fn(q, k, v, dtype=jnp.float32, promote_dtype=promote).dtype == jnp.bfloat16
    assert calls == [jnp.float32]


def test_integers_become_floats() -> None:
    q, k, v = ((2 * x).astype(jnp.int32) for x in qkv())
    close(attention_fn(q, k, v), flax_attention(q, k, v))


@pytest.mark.parametrize(
    "precision", [None, "default", "high", jax.lax.Precision.HIGHEST, ("highest", "highest")]
)
def test_precision_is_a_lower_bound(precision: Any) -> None:
    q, k, v = qkv()
    close(
        attention_fn(q, k, v, precision=precision),
        flax_attention(q, k, v, precision="highest"),
    )


def test_rows_that_see_no_key_are_zero() -> None:
    q, k, v = qkv()
    mask = random_mask(BATCH, 1, Q_LEN, KV_LEN).at[:, :, 2].set(False)
    out = attention_fn(q, k, v, mask=mask)
    assert (out[:, 2] == 0).all()
    seen = np.array([0, 1, 3, 4])
    close(out[:, seen], flax_attention(q, k, v, mask=mask)[:, seen])


# --- structure instead of arrays --------------------------------------------------------------------------------------

SEGMENTS = jnp.array([[0, 0, 0, 1, 1, 2, 2, 2, -1], [5, 5, 5, 5, 5, 5, 5, -1, -1]])
LENGTH = SEGMENTS.shape[1]


def segment_mask() -> Array:
    same = (SEGMENTS[:, :, None] == SEGMENTS[:, None, :]) & (SEGMENTS >= 0)[:, :, None]
    return same[:, None]


@pytest.mark.parametrize("results", [linen_results, nnx_results])
def test_segments_equal_their_dense_mask(results: Callable[..., Any]) -> None:
    x = normal(1, BATCH, LENGTH, FEATURES)
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    close(
        results(make_attention_fn(is_causal=True), StructuralMask(segment_ids=SEGMENTS), x, x),
        results(attention_fn, segment_mask() & causal, x, x),
    )


def test_structural_parts_apply_together() -> None:
    q, k, v = qkv()
    lengths = jnp.array([KV_LEN, 4])
    dense = random_mask(BATCH, 1, Q_LEN, KV_LEN)
    q_ids = jnp.array([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
    kv_ids = jnp.array([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 0]])
    structure = StructuralMask(
        query_segment_ids=q_ids,
        key_value_segment_ids=kv_ids,
        query_seq_lengths=jnp.array([Q_LEN, 3]),
        key_value_seq_lengths=lengths,
        dense=dense,
    )
    inside = (jnp.arange(KV_LEN) < lengths[:, None])[:, None, None]
    rows = (jnp.arange(Q_LEN) < jnp.array([Q_LEN, 3])[:, None])[:, None, :, None]
    mask = dense & inside & rows & (q_ids[:, :, None] == kv_ids[:, None, :])[:, None]
    close(attention_fn(q, k, v, mask=structure), attention_fn(q, k, v, mask=mask))


def test_structure_folds_with_the_batch_axes() -> None:
    x = normal(1, 2, 1, LENGTH, HEADS, 8)
    folded = attention_fn(x, x, x, mask=StructuralMask(segment_ids=SEGMENTS[:, None]))
    close(
        folded[:, 0],
        attention_fn(x[:, 0], x[:, 0], x[:, 0], mask=StructuralMask(segment_ids=SEGMENTS)),
    )


@pytest.mark.parametrize(
    ("options", "visible"),
    [
        ({"is_causal": True}, lambda t, j: j <= t),
        (
            {"is_causal": True, "causal_alignment": "lower_right"},
            lambda t, j: j <= t + KV_LEN - Q_LEN,
        ),
        ({"local_window_size": (2, 1)}, lambda t, j: (j >= t - 2) & (j <= t + 1)),
        ({"local_window_size": 1, "is_causal": True}, lambda t, j: (j >= t - 1) & (j <= t)),
    ],
    ids=["causal", "causal-lower-right", "window", "window-causal"],
)
def test_factory_options_equal_their_dense_mask(
    options: dict[str, Any], visible: Callable[..., Array]
) -> None:
    q, k, v = qkv()
    mask = visible(jnp.arange(Q_LEN)[:, None], jnp.arange(KV_LEN)[None])
    close(make_attention_fn(**options)(q, k, v), attention_fn(q, k, v, mask=mask))


def test_factory_scale_and_cap() -> None:
    q, k, v = qkv()
    out = make_attention_fn(scale=0.7, logits_soft_cap=2.0)(q, k, v)
    scores = 2.0 * jnp.tanh(0.7 * jnp.einsum("btnd,bsnd->bnts", q, k, precision="highest") / 2.0)
    close(out, jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores), v, precision="highest"))


def test_causal_bias_object_is_a_mask() -> None:
    q, k, v = qkv()
    out = attention_fn(q, k, v, mask=jattn.causal_lower_right(Q_LEN, KV_LEN))
    close(out, make_attention_fn(is_causal=True, causal_alignment="lower_right")(q, k, v))


def test_no_array_of_queries_by_keys_is_made() -> None:
    x = normal(1, BATCH, LENGTH, HEADS, 8)
    causal = make_attention_fn(is_causal=True)
    structure = StructuralMask(segment_ids=SEGMENTS)

    def square_arrays(function: Callable[..., Array], *arguments: Any) -> list[Any]:
        jaxpr = jax.make_jaxpr(function)(*arguments)
        results = [variable.aval for equation in jaxpr.eqns for variable in equation.outvars]
        return [aval for aval in results if aval.shape[-2:] == (LENGTH, LENGTH)]

    assert not square_arrays(lambda x, mask: causal(x, x, x, mask=mask), x, structure)
    # The same question finds the array where there is one.
    assert square_arrays(lambda x: nn.dot_product_attention(x, x, x), x)


def test_functions_with_equal_options_do_not_retrace() -> None:
    traces = 0

    def run(function: Callable[..., Array], x: Array) -> Array:
        nonlocal traces
        traces += 1
        return function(x, x, x)

    jitted = jax.jit(run, static_argnums=0)
    x = normal(1, BATCH, Q_LEN, HEADS, 8)
    for implementation in (["reference"], ("reference",)):
        jitted(make_attention_fn(is_causal=True, implementation=implementation), x)
    assert traces == 1


def test_implementation_is_passed_on() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="no-such-backend"):
        make_attention_fn(implementation="no-such-backend")(q, k, v)
    jattn.reset_call_counters()
    jax.jit(make_attention_fn(implementation="reference"))(q, k, v)
    assert jattn.call_counters() == {"reference": {"forward": 1}}


# --- dropout ----------------------------------------------------------------------------------------------------------


class Recorder:
    """Flax's own attention, but with the keep mask of ``jattn.dropout_mask`` and a record of the keys it was given."""

    def __init__(self) -> None:
        self.keys: list[Array] = []

    def __call__(self, query: Array, key: Array, value: Array, **keywords: Any) -> Array:
        rate, rng = keywords["dropout_rate"], keywords["dropout_rng"]
        weights = nn.dot_product_attention_weights(query, key, mask=keywords.get("mask"))
        if rate and not keywords["deterministic"]:
            self.keys.append(rng)
            shape = (1, 1, *weights.shape[2:]) if keywords["broadcast_dropout"] else weights.shape
            keep = jattn.dropout_mask(jattn.seed_from_key(rng), 0, shape, rate)
            kept_share = 1.0 - round(32768 * rate) / 32768
            weights = jnp.where(keep, weights / kept_share, 0.0)
        return jnp.einsum("...hqk,...khd->...qhd", weights, value)


def recording(recorder: Recorder) -> Callable[..., Array]:
    """The recorder with the keyword list that Linen looks for."""

    def function(
        query: Array,
        key: Array,
        value: Array,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        **_: Any,
    ) -> Array:
        return recorder(
            query,
            key,
            value,
            mask=mask,
            broadcast_dropout=broadcast_dropout,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
        )

    return function


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
@pytest.mark.parametrize("broadcast", [True, False], ids=["broadcast", "each"])
def test_dropout_in_linen(broadcast: bool, make_key: Callable[[int], Array]) -> None:
    """Values and gradients are those of the weights under our mask; training draws, evaluation does not."""
    x = normal(1, BATCH, Q_LEN, FEATURES)
    causal = MASKS["causal-float"](Q_LEN, Q_LEN)
    variables = linen_variables()
    recorder = Recorder()

    def results(function: Callable[..., Array], seed: int, deterministic: bool = False) -> Any:
        module = nn.MultiHeadDotProductAttention(
            HEADS,
            qkv_features=FEATURES,
            attention_fn=function,
            dropout_rate=0.3,
            broadcast_dropout=broadcast,
        )

        def loss(variables: Any) -> tuple[Array, Array]:
            out = module.apply(
                variables,
                x,
                mask=causal,
                deterministic=deterministic,
                rngs={"dropout": make_key(seed)},
            )
            return jnp.sum(out**2), out

        return jax.value_and_grad(loss, has_aux=True)(variables)

    got = results(attention_fn, 1)
    close(got, results(recording(recorder), 1))
    assert len(recorder.keys) == 1
    assert not np.allclose(got[0][1], results(attention_fn, 2)[0][1])
    evaluated = results(attention_fn, 1, deterministic=True)
    close(evaluated, results(nn.dot_product_attention, 1, deterministic=True))
    assert not np.allclose(got[0][1], evaluated[0][1])


@pytest.mark.parametrize("broadcast", [True, False], ids=["broadcast", "each"])
def test_dropout_in_nnx(broadcast: bool) -> None:
    x = normal(1, BATCH, Q_LEN, FEATURES)

    def results(function: Callable[..., Array]) -> list[Array]:
        module = nnx.MultiHeadAttention(
            HEADS,
            FEATURES,
            attention_fn=function,
            dropout_rate=0.3,
            broadcast_dropout=broadcast,
            decode=False,
            rngs=nnx.Rngs(0, dropout=5),
        )
        return [module(x, deterministic=False) for _ in range(2)] + [module(x, deterministic=True)]

    got = results(attention_fn)
    close(got, results(recording(Recorder())))
    # The module draws another key for each call.
    assert not np.allclose(got[0], got[1])
    assert not np.allclose(got[0], got[2])


def test_dropout_with_several_batch_axes_and_with_none() -> None:
    """Batch axes are counted as one, in row-major order."""
    q, k, v = (jnp.stack([x, -x]) for x in qkv())
    draw = functools.partial(attention_fn, dropout_rate=0.4, dropout_rng=jax.random.key(3))
    flat = draw(*(x.reshape(-1, *x.shape[2:]) for x in (q, k, v)), broadcast_dropout=False)
    close(draw(q, k, v, broadcast_dropout=False), flat.reshape(*q.shape[:2], *flat.shape[1:]))
    close(draw(q[0, 0], k[0, 0], v[0, 0], broadcast_dropout=False), flat[0])


def test_positions_and_slopes() -> None:
    q, k, v = qkv()
    positions = (
        jnp.arange(Q_LEN)[None] + jnp.array([[2], [0]]),
        jnp.arange(KV_LEN)[None].repeat(2, 0),
    )
    slopes = (0.5, 0.25, 0.125, 0.0625)
    function = make_attention_fn(is_causal=True, alibi_slopes=slopes)
    assert function == make_attention_fn(is_causal=True, alibi_slopes=list(slopes))
    mask = StructuralMask(query_positions=positions[0], key_value_positions=positions[1])
    want = jattn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        query_positions=positions[0],
        key_value_positions=positions[1],
        alibi_slopes=jnp.asarray(slopes),
    )
    close(function(q, k, v, mask=mask), want)


# --- arrays of a call that a module has no argument for ---------------------------------------------------------------


def by_table(score: Any, batch: Any, head: Any, query: Any, key: Any, table: Any) -> Any:
    return score + table[head, jnp.clip(query - key, 0, LENGTH - 1)]


relative = make_attention_fn(is_causal=True, score_mod=by_table)
SLOPES = jnp.array([0.5, 0.25, 0.125, 0.0625])
# Name -> the function and what goes into its mask: the attention_fn, the arrays, the arguments that these stand for.
CARRIED: dict[str, tuple[Callable[..., Array], Any, Callable[..., Any]]] = {
    "captures": (
        relative,
        {"captures": (normal(5, HEADS, LENGTH),)},
        lambda captures: {"score_mod": by_table, "captures": captures},
    ),
    "alibi_slopes": (
        make_attention_fn(is_causal=True),
        {"alibi_slopes": SLOPES},
        lambda alibi_slopes: {"alibi_slopes": alibi_slopes},
    ),
    "sinks": (
        make_attention_fn(is_causal=True),
        {"sinks": normal(6, HEADS)},
        lambda sinks: {"sinks": sinks},
    ),
}


@pytest.mark.parametrize("name", CARRIED)
def test_arrays_in_the_mask_are_those_of_the_call(name: str) -> None:
    """Values and gradients, compiled, scanned and mapped over, beside segments."""
    function, arrays, arguments = CARRIED[name]
    x = normal(1, BATCH, LENGTH, HEADS, 8)

    def by_mask(arrays: Any) -> Array:
        mask = StructuralMask(segment_ids=SEGMENTS, **arrays)
        return jnp.asarray(jax.jit(function)(x, x, x, mask=mask))

    def by_argument(arrays: Any) -> Array:
        return jattn.dot_product_attention(
            x, x, x, is_causal=True, segment_ids=SEGMENTS, **arguments(**arrays)
        )

    def square(attention: Callable[..., Array]) -> Callable[..., Array]:
        return lambda arrays: jnp.sum(attention(arrays) ** 2)

    close(by_mask(arrays), by_argument(arrays))
    gradients = jax.grad(square(by_mask))(arrays)
    close(gradients, jax.grad(square(by_argument))(arrays))
    assert all(np.abs(g).max() > 1e-2 for g in jax.tree.leaves(gradients))

    several = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), arrays)
    wanted = jnp.stack([by_argument(arrays), by_argument(jax.tree.map(lambda a: 2 * a, arrays))])
    close(jax.vmap(by_mask)(several), wanted)

    def mapped(mask: StructuralMask) -> Array:
        return function(x, x, x, mask=mask)

    masks = StructuralMask(segment_ids=jnp.stack([SEGMENTS] * 2), **several)
    close(jax.vmap(mapped)(masks), wanted)
    close(jax.lax.map(mapped, masks), wanted)


class Relative(nnx.Module):
    """A layer that learns a table of distances."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(jax.random.normal(rngs.params(), (HEADS, LENGTH)))
        self.attention = nnx.MultiHeadAttention(
            HEADS, FEATURES, attention_fn=relative, decode=False, rngs=rngs
        )

    def __call__(self, x: Array) -> Array:
        return self.attention(x, mask=StructuralMask(captures=(self.table[...],)))


def test_parameters_of_an_nnx_module_reach_its_score_function() -> None:
    """Those of the module that NNX makes of it: gradients, new values in a compiled program, one trace of it."""
    x = normal(1, BATCH, LENGTH, FEATURES)
    module = Relative(nnx.Rngs(0))
    traces = 0

    @nnx.jit
    def run(module: Relative, x: Array) -> Array:
        nonlocal traces
        traces += 1
        return module(x)

    def loss(module: Relative) -> Array:
        return jnp.sum(module(x) ** 2)

    before = run(module, x)
    gradient = nnx.grad(loss)(module)["table"][...]
    graph, state = nnx.split(module)
    close(jax.grad(lambda state: loss(nnx.merge(graph, state)))(state)["table"][...], gradient)
    assert np.abs(gradient).max() > 1e-2

    step, value = 1e-2 * np.sign(gradient), loss(module)
    module.table[...] += step
    after = run(module, x)
    close(after, module(x))
    assert np.abs(after - before).max() > 1e-3
    assert loss(module) > value
    assert traces == 1


def test_linen_parameters_reach_a_score_function() -> None:
    x = normal(1, BATCH, LENGTH, FEATURES)

    class Layer(nn.Module):
        is_closure: bool

        @nn.compact
        def __call__(self, x: Array) -> Array:
            table = self.param("table", nn.initializers.normal(1.0), (HEADS, LENGTH))
            function, mask = relative, StructuralMask(captures=(table,))
            if self.is_closure:  # made in the call, over an array of it
                closure = functools.partial(by_table, table=table)
                function, mask = make_attention_fn(is_causal=True, score_mod=closure), None
            return nn.MultiHeadDotProductAttention(HEADS, attention_fn=function)(x, mask=mask)

    variables = Layer(True).init(jax.random.key(0), x)
    captured, closed = (
        jax.value_and_grad(lambda v, f=flag: jnp.sum(Layer(f).apply(v, x) ** 2))(variables)
        for flag in (False, True)
    )
    close(captured, closed)
    assert np.abs(captured[1]["params"]["table"]).max() > 1e-2


def test_masks_with_arrays_are_exported() -> None:
    x = normal(1, BATCH, LENGTH, HEADS, 8)
    mask = StructuralMask(sinks=jnp.ones(HEADS), captures=(normal(5, HEADS, LENGTH),))
    program = jax.jit(lambda x, mask: relative(x, x, x, mask=mask))
    exported = jax.export.export(program, disabled_checks=jattn.export_disabled_checks())(x, mask)
    again = jax.export.deserialize(exported.serialize())
    close(again.call(x, mask), program(x, mask))


def test_arrays_of_a_call_have_one_place() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"mask has alibi_slopes, but make_attention_fn got \(0.5"):
        make_attention_fn(alibi_slopes=SLOPES)(q, k, v, mask=StructuralMask(alibi_slopes=SLOPES))
    with pytest.raises(ValueError, match=r"jattn.flax.attention_fn: captures is .* without score_"):
        attention_fn(q, k, v, mask=StructuralMask(captures=(SLOPES,)))
    with pytest.raises(TypeError, match=r"captures is .*must be a tuple of arrays"):
        relative(q, k, v, mask=StructuralMask(captures=SLOPES))  # type: ignore[arg-type]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_dropout_needs_a_key() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"dropout_rate is 0\.1 .*dropout_rng is None"):
        attention_fn(q, k, v, dropout_rate=0.1)
    close(attention_fn(q, k, v, dropout_rate=0.1, deterministic=True), attention_fn(q, k, v))


def test_a_traced_flag_is_refused() -> None:
    q, k, v = qkv()
    rng = jax.random.key(0)

    def drop(flag: Any) -> Array:
        return attention_fn(q, k, v, dropout_rate=0.5, dropout_rng=rng, deterministic=flag)

    with pytest.raises(ValueError, match=r"deterministic is .*known while tracing.* dropout_rate"):
        jax.jit(drop)(True)
    # The way out that it names.
    rate = jax.jit(lambda rate: attention_fn(q, k, v, dropout_rate=rate, dropout_rng=rng))
    for value, flag in ((0.5, False), (0.0, True), (0.0, jnp.asarray(True))):
        close(rate(value), drop(flag))
    for function in (attention_fn, make_attention_fn(is_causal=True)):
        with pytest.raises(ValueError, match=r"is_causal is .*known while tracing.* bool mask"):
            jax.jit(lambda flag, f=function: f(q, k, v, is_causal=flag))(True)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (
            StructuralMask(segment_ids=SEGMENTS[:, :1]),
            "jattn.flax.StructuralMask: mask is no array",
        ),
        (jattn.causal_lower_right(1, Q_LEN), "jattn.CausalBias: mask is no array"),
    ],
    ids=["structure", "causal"],
)
def test_a_module_that_decodes_takes_mask_arrays_only(mask: Any, words: str) -> None:
    x = normal(1, BATCH, 1, FEATURES)
    module = nnx.MultiHeadAttention(
        HEADS, FEATURES, attention_fn=attention_fn, rngs=nnx.Rngs(7), decode=True
    )
    module.init_cache((BATCH, Q_LEN, FEATURES))
    wanted = rf"{words}.* decode=True .*bool array \(B, 1, 1, S\)"
    with pytest.raises(AttributeError, match=wanted):
        module(x, mask=mask)
    linen = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn, decode=True)
    variables = linen.init(jax.random.key(7), normal(1, BATCH, Q_LEN, FEATURES))
    with pytest.raises(AttributeError, match=wanted):
        linen.apply(variables, x, mask=mask, mutable=["cache"])
    module(x, mask=jnp.ones((BATCH, 1, 1, Q_LEN), bool))

    # What asks whether it is an array hears that it is none.
    assert not hasattr(mask, "ndim")
    assert getattr(mask, "ndim", None) is None
    assert np.ndim(mask) == 0
    assert type(dataclasses.replace(mask)) is type(copy.deepcopy(mask)) is type(mask)
    assert jax.eval_shape(lambda mask: mask, mask) is not None


def test_attention_weights_are_refused() -> None:
    x = normal(1, BATCH, Q_LEN, FEATURES)
    module = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)
    variables = module.init(jax.random.key(7), x)
    with pytest.raises(ValueError, match="sow_weights"):
        module.apply(variables, x, sow_weights=True, mutable=["intermediates"])
    nnx_module = nnx.MultiHeadAttention(
        HEADS, FEATURES, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match="sow_weights"):
        nnx_module(x, sow_weights=True)


def test_replaced_products_are_refused() -> None:
    x = normal(1, BATCH, Q_LEN, FEATURES)
    module = nn.MultiHeadDotProductAttention(
        HEADS,
        attention_fn=attention_fn,
        qk_attn_weights_einsum_cls=lambda: jnp.einsum,
        attn_weights_value_einsum_cls=lambda: jnp.einsum,
    )
    with pytest.raises(ValueError, match="qk_attn_weights_einsum is given"):
        module.init(jax.random.key(7), x)
    q, k, v = qkv()
    with pytest.raises(ValueError, match="einsum_dot_general is given"):
        attention_fn(q, k, v, einsum_dot_general=jax.lax.dot_general)


@pytest.mark.parametrize("precision", [jax.lax.DotAlgorithmPreset.BF16_BF16_F32, "BF16_BF16_F32"])
def test_prescribed_algorithms_are_refused(precision: Any) -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"precision is .*BF16_BF16_F32"):
        attention_fn(q, k, v, precision=precision)


def test_a_precision_that_jax_does_not_know_is_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="precision is 'exact', which JAX does not know"):
        attention_fn(q, k, v, precision="exact")


def test_slopes_are_a_number_for_each_head() -> None:
    with pytest.raises(ValueError, match=r"alibi_slopes has shape \(\), must be \(N,\)"):
        make_attention_fn(alibi_slopes=3.0)  # type: ignore[arg-type]


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(
        ValueError, match=r"mask has shape \(3, 1, 5, 7\), which does not broadcast"
    ):
        attention_fn(q, k, v, mask=jnp.ones((3, 1, Q_LEN, KV_LEN), bool))
    with pytest.raises(ValueError, match=r"bias has rank 5 .*must have rank 0 to 4"):
        attention_fn(q, k, v, bias=jnp.ones((1, 1, 1, Q_LEN, KV_LEN)))
    with pytest.raises(ValueError, match="one rank, 3 or more"):
        attention_fn(q, k[0], v[0])
    with pytest.raises(ValueError, match=r"segment_ids has shape \(9,\), must be \(2, 5\)"):
        attention_fn(q, q, q, mask=StructuralMask(segment_ids=SEGMENTS[0]))
    with pytest.raises(ValueError, match="dtype is int8, must be a floating-point type"):
        attention_fn(q, k, v, dtype=jnp.int8)


# ---- Training: layers in a scan, rematerialised, with dropout --------------------------------------------------------

LAYERS, STEPS = 3, 4


class LinenBlock(nn.Module):
    """One residual layer with the carry that ``nn.scan`` wants."""

    function: Callable[..., Array]
    dropout_rate: float

    @nn.compact
    def __call__(self, x: Array, mask: Any) -> tuple[Array, None]:
        attention = nn.MultiHeadDotProductAttention(
            HEADS, attention_fn=self.function, dropout_rate=self.dropout_rate, deterministic=False
        )
        return x + attention(nn.LayerNorm()(x), mask=mask), None


def linen_stack(function: Callable[..., Array], remat: bool, dropout_rate: float) -> nn.Module:
    block = nn.remat(LinenBlock, policy=jattn.checkpoint_policy) if remat else LinenBlock
    return nn.scan(
        block,
        variable_axes={"params": 0},
        split_rngs={"params": True, "dropout": True},
        in_axes=nn.broadcast,
        length=LAYERS,
    )(function, dropout_rate)


@functools.cache
def linen_stack_variables() -> Any:
    stack = linen_stack(nn.dot_product_attention, False, 0.0)
    return jax.jit(stack.init)(jax.random.key(0), normal(1, BATCH, Q_LEN, FEATURES), None)


def trained(loss: Callable[[Any, Array], Array], parameters: Any) -> tuple[list[Array], Any]:
    """The losses of a few steps, and the parameters after them; step i has the dropout key i.

    Not Adam: it would divide the gradients of key biases, which are all rounding, by their size.
    """
    optimizer = optax.sgd(0.1, momentum=0.9)

    @jax.jit
    def step(parameters: Any, state: Any, key: Array) -> tuple[Array, Any, Any]:
        value, gradients = jax.value_and_grad(loss)(parameters, key)
        updates, state = optimizer.update(gradients, state)
        return value, optax.apply_updates(parameters, updates), state

    state, losses = optimizer.init(parameters), []
    for i in range(STEPS):
        value, parameters, state = step(parameters, state, jax.random.key(i))
        losses.append(value)
    assert losses[-1] < losses[0]
    return losses, parameters


def linen_training(
    function: Callable[..., Array], mask: Any, *, remat: bool, dropout_rate: float = 0.0
) -> tuple[list[Array], Any]:
    x, target = normal(1, BATCH, Q_LEN, FEATURES), normal(2, BATCH, Q_LEN, FEATURES)
    model = linen_stack(function, remat, dropout_rate)

    def loss(variables: Any, key: Array) -> Array:
        out, _ = model.apply(variables, x, mask, rngs={"dropout": key})
        return jnp.mean((out - target) ** 2)

    return trained(loss, linen_stack_variables())


def test_linen_trains_in_a_scan_of_rematerialised_layers() -> None:
    ids = jnp.asarray([[0, 0, 0, 1, 1]] * BATCH)
    dense = nn.make_causal_mask(ids) * (ids[:, None, :, None] == ids[:, None, None, :])
    causal = make_attention_fn(is_causal=True)
    structure = StructuralMask(segment_ids=ids)
    close(
        linen_training(causal, structure, remat=True),
        linen_training(nn.dot_product_attention, dense, remat=False),
    )


def test_rematerialised_layers_draw_the_same_dropout() -> None:
    """What the backward pass computes again drops the same weights as the forward pass did: the same curve."""
    once, again = (
        linen_training(attention_fn, None, remat=remat, dropout_rate=0.3) for remat in (False, True)
    )
    close(again, once)


def test_nnx_trains_in_a_scan_of_rematerialised_layers() -> None:
    x, target = normal(1, BATCH, Q_LEN, FEATURES), normal(2, BATCH, Q_LEN, FEATURES)

    def training(function: Callable[..., Array], remat: bool, **mask: Any) -> Any:
        @nnx.vmap
        def layers(rngs: nnx.Rngs) -> nnx.MultiHeadAttention:
            return nnx.MultiHeadAttention(
                HEADS, FEATURES, attention_fn=function, decode=False, rngs=rngs
            )

        graph, parameters = nnx.split(layers(nnx.Rngs(0).split(LAYERS)))

        def layer(x: Array, parameters: Any) -> tuple[Array, None]:
            return x + nnx.merge(graph, parameters)(x, **mask), None

        body = jax.checkpoint(layer, policy=jattn.checkpoint_policy) if remat else layer

        def loss(parameters: Any, _: Array) -> Array:
            return jnp.mean((jax.lax.scan(body, x, parameters)[0] - target) ** 2)

        losses, parameters = trained(loss, parameters)
        return losses, jax.tree.leaves(parameters)

    causal = make_attention_fn(is_causal=True)
    want = training(
        nnx.dot_product_attention, False, mask=nn.make_causal_mask(jnp.ones((BATCH, Q_LEN)))
    )
    close(training(causal, True), want)
