"""The contract: what padding, empty rows, odd sizes and wrong operands do, in every backend."""

import dataclasses
import functools
from typing import Any

import hidden_garbage
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zero_sizes
from drawn import normal

import jattn
from jattn.testing import cases, compare, inputs, oracle
from jattn.testing.cases import Case
from jattn.testing.run import run, verify

IDS = jnp.zeros((2, 4), jnp.int32)
PADDED = ("mask-segments-lengths", "mask-lengths-lower-right")


@pytest.mark.parametrize("name", PADDED)
def test_padding_changes_no_bit(name: str, backend: str) -> None:
    """NaN and infinity in all padding, against finite numbers there: every result bit for bit."""
    case = dataclasses.replace(cases.named(name), bias_form="bnts")
    operands = inputs.make(case)
    clean, poisoned = (run(case, operands, backend, poisoned=p).results for p in (False, True))
    assert set(clean) == {"out", "lse", "dq", "dk", "dv", "dbias"}
    for tensor, values in clean.items():
        np.testing.assert_array_equal(values, poisoned[tensor], err_msg=tensor)


@pytest.mark.parametrize(
    ("backend", "case"),
    [("cpu", case) for case in hidden_garbage.CASES]
    + [(name, case) for name in ("xla", "reference") for case in hidden_garbage.PLAINEST],
    ids=str,
)
def test_the_largest_numbers_are_harmless_where_they_are_hidden(backend: str, case: Case) -> None:
    hidden_garbage.check_bits(backend, case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_numbers_of_the_next_document_and_behind_a_function(dtype: str, backend: str) -> None:
    hidden_garbage.check_next_document(backend, dtype, 64)
    hidden_garbage.check_hidden_by_a_function(backend, dtype)


@pytest.mark.parametrize("tensor", ["q", "k"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_visible_nan_reaches_every_reader_and_nobody_else(
    tensor: str, dtype: str, backend: str
) -> None:
    """The guard of an empty row is row_max == -inf: a row of NaNs is not an empty row."""
    case = Case(
        name=f"nan-{tensor}", q_len=70, kv_len=70, num_heads=4, num_kv_heads=2, head_dim=16, head_dim_v=16, dtype=dtype,
        is_causal=True, kv_lengths=(70, 40),
    )  # fmt: skip
    operands = inputs.make(case)
    array = getattr(operands, tensor).copy()
    array[0, 33, 1, 2] = np.nan
    array[1, 0, 0, 0] = np.nan
    operands = dataclasses.replace(operands, **{tensor: array})
    solution = oracle.solve(case, operands)
    assert np.isnan(solution.out).any()
    assert np.isfinite(solution.out).any()
    outcome = run(case, operands, backend, backward=False, poisoned=True)
    compare.assert_close(case, operands, outcome.results, solution=solution)


@pytest.mark.parametrize("sinks", [None, jnp.zeros(2)], ids=["plain", "sinks"])
def test_a_visible_nan_reaches_gradients_and_tangents(sinks: Any, backend: str) -> None:
    """XLA's maximum over a row of NaN is -inf where there are many rows."""
    q, k, v, dout = (normal(seed, 1, 80, 2, 16) for seed in range(4))
    q = q.at[0, 1].set(jnp.nan)

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jattn.dot_product_attention(
            q, k, v, sinks=sinks, return_lse=True, implementation=backend
        )

    (out, lse), pull = jax.vjp(run, q, k, v)
    dq, dk, dv = pull((dout, jnp.ones_like(lse)))
    _, (out_tangent, lse_tangent) = jax.jvp(run, (q, k, v), (dout, dout, dout))
    for of_queries in (out, lse, dq, out_tangent, lse_tangent):
        is_nan = np.isnan(of_queries)
        assert is_nan[0, 1].all()
        assert is_nan.sum() == is_nan[0, 1].sum()
    assert np.isnan(dk).all()
    assert np.isnan(dv).all()


def test_a_visible_nan_in_a_value_reaches_its_channel(backend: str) -> None:
    case = Case(
        name="nan-v", q_len=20, kv_len=70, num_heads=4, num_kv_heads=2, head_dim=16, head_dim_v=16
    )
    operands = inputs.make(case)
    v = operands.v.copy()
    v[0, 69, 1, 3] = np.nan
    operands = dataclasses.replace(operands, v=v)
    outcome = run(case, operands, backend, backward=False)
    compare.assert_close(case, operands, outcome.results)


@pytest.mark.parametrize("sizes", zero_sizes.SIZES, ids=str)
def test_sizes_of_zero(sizes: zero_sizes.Sizes, backend: str) -> None:
    zero_sizes.check(backend, "float32", sizes)


def test_more_heads_than_a_grid_axis_holds(backend: str) -> None:
    """Batch times heads above 65 535, the limit of a GPU grid's second and third axis."""
    case = Case(
        name="many-heads", batch=3860, q_len=2, kv_len=3, num_heads=17, num_kv_heads=17, head_dim=4, head_dim_v=4,
        is_causal=True, lower_right=True,
    )  # fmt: skip
    assert case.batch * case.num_heads > 65535
    verify(case, backend)


@pytest.mark.backends("xla", "cpu")
def test_lengths_out_of_range_are_clamped(backend: str) -> None:
    """Negative lengths are 0, too large ones the extent: the same bits as the clamped lengths."""
    q, k, v = normal(1, 4, 9, 2, 8), normal(2, 4, 7, 2, 8), normal(3, 4, 7, 2, 8)
    attend = functools.partial(
        jattn.dot_product_attention,
        q,
        k,
        v,
        is_causal=True,
        causal_alignment="lower_right",
        implementation=backend,
    )
    wild_q, wild_kv = [-1, 2**31 - 1, 9, 4], [2**31 - 1, 3, -(2**31), 8]
    got = attend(
        query_seq_lengths=jnp.asarray(wild_q, jnp.int32),
        key_value_seq_lengths=jnp.asarray(wild_kv, jnp.int32),
    )
    want = attend(
        query_seq_lengths=jnp.clip(jnp.asarray(wild_q), 0, 9),
        key_value_seq_lengths=jnp.clip(jnp.asarray(wild_kv), 0, 7),
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint32"])
def test_index_arrays_of_any_integer_type(dtype: str) -> None:
    q, k, v = normal(1, 2, 5, 2, 8), normal(2, 2, 5, 2, 8), normal(3, 2, 5, 2, 8)
    lengths = np.asarray([3, 5])
    want = jattn.dot_product_attention(
        q, k, v, key_value_seq_lengths=jnp.asarray(lengths, jnp.int32)
    )
    got = jattn.dot_product_attention(q, k, v, key_value_seq_lengths=jnp.asarray(lengths, dtype))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"query": "int32"}, "query has dtype int32"),
        (
            {"query": "complex64", "key": "complex64", "value": "complex64"},
            "query has dtype complex64",
        ),
        ({"query": "bool"}, "query has dtype bool"),
        ({"value": "float16"}, "one dtype"),
        ({"bias": "int32"}, "bias has dtype int32"),
        ({"bias": "bool"}, "bias has dtype bool.*mask="),
        ({"mask": "float32"}, "mask has dtype float32.*bias="),
        ({"mask": "int32"}, "mask has dtype int32"),
        ({"query_seq_lengths": "float32"}, "query_seq_lengths has dtype float32"),
        ({"segment_ids": "float32"}, "segment_ids has dtype float32"),
    ],
    ids=lambda value: (
        "-".join(f"{k}_{v}" for k, v in value.items()) if isinstance(value, dict) else ""
    ),
)
def test_operands_of_a_wrong_type_are_refused(change: dict[str, str], words: str) -> None:
    shapes = {
        "query": (2, 4, 2, 8), "key": (2, 4, 2, 8), "value": (2, 4, 2, 8), "bias": (4, 4), "mask": (4, 4),
        "query_seq_lengths": (2,), "segment_ids": (2, 4),
    }  # fmt: skip
    dtypes = {"query": "float32", "key": "float32", "value": "float32"} | change
    with pytest.raises(ValueError, match=words):
        jattn.dot_product_attention(
            **{name: jnp.zeros(shapes[name], dtype) for name, dtype in dtypes.items()}
        )


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"bias": jnp.zeros((3, 4, 4))}, r"bias .*\(3, 4, 4\)"),
        ({"mask": jnp.zeros((2, 2, 4, 5), bool)}, r"mask .*\(2, 2, 4, 5\)"),
        ({"mask": jnp.zeros((1, 2, 2, 4, 4), bool)}, "mask"),
        ({"query_seq_lengths": jnp.zeros(3, jnp.int32)}, r"query_seq_lengths has shape \(3,\), must be \(2,\)"),
        ({"query_segment_ids": IDS}, "key_value_segment_ids is missing"),
        ({"segment_ids": IDS, "query_segment_ids": IDS}, "segment_ids was given together"),
        ({"local_window_size": -2}, "local_window_size is -2"),
        ({"local_window_size": (1, 2, 3)}, "local_window_size"),
        ({"causal_alignment": "center"}, "'center', must be 'upper_left' or 'lower_right'"),
        ({"scale": float("nan")}, "scale is nan, must be finite"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap is 0.0, must be a positive"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap is -1.0"),
        ({"logits_soft_cap": 3e38}, "logits_soft_cap is 3e.38, must be a positive finite number from 2.-100 to 2.100"),
        ({"logits_soft_cap": 1e-29, "scale": 1e10}, "is 1e-29 and scale is 1.*, must have a finite ratio"),
        ({"return_lse": True, "return_residual": True}, "ask for one of them"),
        ({"is_causal": 1}, "is_causal is 1, must be True or False"),
        ({"mask": jattn.causal_upper_left(4, 5)}, r"made for 4 queries and 5 keys.*causal_upper_left\(4, 4\)"),
        ({"mask": jnp.ones((2, 4), bool)}, r"mask .*\(2, 4\).*key_value_seq_lengths"),
        ({"mask": jnp.ones((2, 4, 5), bool)}, r"mask .*\(2, 4, 5\)"),
        ({"mask": "causal"}, "mask is 'causal', must be an array"),
        ({"bias": jattn.causal_upper_left(4, 4)}, "bias is CausalBias.*pass it as mask="),
        ({"key_value_seq_lengths": [4, None]}, r"key_value_seq_lengths is \[4, None\]"),
        ({"query_seq_lengths": jnp.zeros(3, jnp.int32)}, "flash_mha_varlen"),
        ({"is_causal": None}, "is_causal is None, must be True or False"),
        ({"return_lse": 1}, "return_lse is 1, must be True or False"),
        ({"local_window_size": 3.0}, "local_window_size is 3.0"),
        ({"local_window_size": True}, "local_window_size is True"),
        ({"scale": "1/8"}, "scale is '1/8', must be a number"),
        ({"logits_soft_cap": jnp.ones(3)}, "logits_soft_cap is .*must be a number"),
        ({"implementation": 5}, "implementation is 5, must be the name"),
        ({"logits_soft_cap": 1e-40}, "logits_soft_cap is 1e-40, must be a positive"),
        ({"logits_soft_cap": "5"}, "logits_soft_cap is '5', must be a number"),
        ({"scale": 10**400}, "scale is .*must be a number"),
        ({"scale": np.array([0.5])}, r"scale is array\(\[0.5\]\), must be a number"),
        ({"scale": [0.5]}, r"scale is \[0.5\], must be a number"),
        ({"local_window_size": np.float32(3)}, "local_window_size is .*must be a number"),
        ({"compute_dtype": "bf16"}, "compute_dtype is 'bf16'.*bfloat16"),
        ({"compute_dtype": "int32"}, "compute_dtype is int32, must be one of"),
        (
            {"compute_dtype": "float32", "bias": np.zeros((4, 4), bool)},
            "bias has dtype bool, must be a float type: pass a bool array as mask=",
        ),
        ({"scale": np.complex64(1 + 2j)}, r"scale is .*1\+2j.*, must be a real number"),
        ({"logits_soft_cap": True}, "logits_soft_cap is True, must be a number"),
        ({"scale": jax.random.key(0)}, r"scale is Array(.|\n)*must be a number"),
        ({"compute_dtype": "float64"}, "compute_dtype is float64, which JAX has with jax_enable_x64 alone"),
        ({"dropout_rate": None}, "dropout_rate is None"),
        ({"dropout_rate": 1j, "dropout_seed": 7}, "dropout_rate is .*, must be a real number"),
        ({"dropout_rate": np.str_("0.5"), "dropout_seed": 7}, "dropout_rate is .*, must be a real number"),
        ({"dropout_rate": 0.1, "dropout_seed": "7"}, "dropout_seed is '7'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_wrong_calls_say_what_is_wrong(keywords: dict[str, Any], words: str) -> None:
    """ValueError while tracing, with the argument, its value and the rule."""
    x = jax.ShapeDtypeStruct((2, 4, 2, 8), "float32")
    with pytest.raises(ValueError, match=f"jattn.dot_product_attention: .*{words}"):
        jax.eval_shape(lambda x: jattn.dot_product_attention(x, x, x, **keywords), x)


def test_bias_and_mask_may_be_numbers() -> None:
    """As jax.nn takes them."""
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    plain, plain_lse = jattn.dot_product_attention(x, x, x, return_lse=True)
    out, lse = jattn.dot_product_attention(x, x, x, 0.5, np.True_, return_lse=True)
    np.testing.assert_allclose(out, plain, atol=1e-6)
    np.testing.assert_allclose(lse, plain_lse + 0.5, atol=1e-6)
    assert not np.asarray(jattn.dot_product_attention(x, x, x, mask=False)).any()


def test_arrays_that_are_none() -> None:
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=r"key is None, must be an array"):
        jattn.dot_product_attention(x, None, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"(?s)key is array.*JAX has no arrays of '>f4', cast it"):
        jattn.dot_product_attention(x, np.ones((1, 4, 2, 8), ">f4"), x)
    with pytest.raises(ValueError, match=r"query is ShapeDtypeStruct.*jattn\.explain"):
        jattn.dot_product_attention(jax.ShapeDtypeStruct(x.shape, x.dtype), x, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"logits_soft_cap is JitTracer.*known while tracing"):
        jax.jit(lambda c: jattn.dot_product_attention(x, x, x, logits_soft_cap=c))(3.0)


@pytest.mark.parametrize(
    ("dtype", "bias_dtype"),
    [("float32", "bfloat16"), ("bfloat16", "float16"), ("float32", "float64")],
)
def test_a_bias_of_any_float_type(dtype: str, bias_dtype: str) -> None:
    """As in ``jax.nn``, with the gradient in the dtype of the bias."""
    with jax.enable_x64(True):
        q, k, v = (normal(i, 1, 5, 2, 8, dtype=dtype) for i in range(3))
        bias = jnp.asarray(np.random.default_rng(3).normal(size=(2, 5, 5)), bias_dtype)

        def loss(bias: jax.Array, cast_to: Any) -> jax.Array:
            return (attend(q, k, v, bias.astype(cast_to)).astype("float32") ** 2).sum()

        attend = jattn.dot_product_attention
        got = jax.grad(loss)(bias, bias_dtype)
        assert got.dtype == bias.dtype
        np.testing.assert_array_equal(got, jax.grad(loss)(bias, "float32"))
        if dtype == "float32":
            want = jax.nn.dot_product_attention(q, k, v, bias)
            np.testing.assert_allclose(attend(q, k, v, bias), want, rtol=1e-5, atol=1e-6)


def test_a_traced_scale_is_refused() -> None:
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=r"scale is .*multiply the query"):
        jax.jit(lambda s: jattn.dot_product_attention(x, x, x, scale=s))(0.5)


@pytest.mark.backends("cpu")
def test_the_same_bits_every_time_and_in_every_batch(backend: str) -> None:
    """Deterministic, and independent of the batch: a sequence alone, in a batch, and in another order."""
    case = cases.named("mask-segments-self-causal")
    operands = inputs.make(case)
    first = run(case, operands, backend).results
    for name, again in run(case, operands, backend).results.items():
        np.testing.assert_array_equal(again, first[name], err_msg=name)
    for b in range(case.batch):
        alone = dataclasses.replace(
            operands,
            **{
                field.name: getattr(operands, field.name)[b : b + 1]
                for field in dataclasses.fields(operands)
                if getattr(operands, field.name) is not None
            },
        )
        for name, part in run(dataclasses.replace(case, batch=1), alone, backend).results.items():
            np.testing.assert_array_equal(part[0], first[name][b], err_msg=name)


@pytest.mark.backends("xla", "cpu")
def test_attention_keeps_its_identities(backend: str) -> None:
    """No oracle: key permutation, linearity in V, a constant added to a row's bias, two halves merged by lse, the
    gradient sums, and causal as a window.
    """
    q, k, v, dout = (
        normal(1, 2, 33, 2, 16),
        normal(2, 2, 70, 2, 16),
        normal(3, 2, 70, 2, 16),
        normal(4, 2, 33, 2, 16),
    )
    attend = functools.partial(jattn.dot_product_attention, implementation=backend, return_lse=True)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)
    out, lse = attend(q, k, v)
    order = np.random.default_rng(5).permutation(70)
    close(attend(q, k[:, order], v[:, order])[0], out)
    close(attend(q, k, 2 * v - 1)[0], 2 * out - 1, atol=1e-5)
    close(attend(q, k, v, normal(6, 2, 2, 33, 1) * jnp.ones(70))[0], out)
    halves = [attend(q, k[:, part], v[:, part]) for part in (slice(0, 41), slice(41, None))]
    merged_lse = jnp.logaddexp(halves[0][1], halves[1][1])
    close(merged_lse, lse)
    close(sum(o * jnp.exp(part - merged_lse)[..., None] for o, part in halves), out)
    bias = normal(7, 2, 2, 33, 70)
    _, pullback = jax.vjp(lambda v, bias: attend(q, k, v, bias)[0], v, bias)
    dv, dbias = pullback(dout)
    close(dbias.sum(axis=3), np.zeros((2, 2, 33)), atol=1e-5)
    close(dv.sum(axis=1), dout.sum(axis=1), atol=1e-4)
    square = [
        attend(q, k[:, :33], v[:, :33], **x)
        for x in ({"is_causal": True}, {"local_window_size": (32, 0)})
    ]
    for a, b in zip(*square, strict=True):
        np.testing.assert_array_equal(a, b)


LARGE_IDS = np.array([[3_000_000_000] * 2 + [4_000_000_000] * 2] * 2)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64"])
def test_known_segment_ids_that_int32_cannot_hold_are_refused(dtype: str) -> None:
    x = normal(0, 2, 4, 2, 8)
    with pytest.raises(ValueError, match="segment_ids holds 4000000000, must be at most"):
        jattn.dot_product_attention(x, x, x, segment_ids=LARGE_IDS.astype(dtype))
    small = np.arange(4).reshape(1, 4).repeat(2, 0).astype(dtype)
    if dtype == "uint32":  # known where the call is traced
        small = jnp.asarray(small)
        jax.eval_shape(lambda x: jattn.dot_product_attention(x, x, x, segment_ids=small), x)
    np.testing.assert_array_equal(
        jattn.dot_product_attention(x, x, x, segment_ids=small),
        jattn.dot_product_attention(x, x, x, segment_ids=small.astype("int32")),
    )


def test_traced_segment_ids_that_int32_cannot_hold_stay_apart() -> None:
    """Their order says which are equal; in a program that runs with small ones, too."""
    x = normal(0, 2, 4, 2, 8)
    same = jnp.array([[0, 0, 1, 1]] * 2)

    @jax.jit
    def attend(of_queries: jax.Array, of_keys: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(
            x, x, x, query_segment_ids=of_queries, key_value_segment_ids=of_keys
        )

    want = attend(same, same)
    large = jnp.asarray(LARGE_IDS.astype("uint32"))
    np.testing.assert_array_equal(attend(large, large), want)
    np.testing.assert_array_equal(attend(same.astype("uint32"), same.astype("uint32")), want)
    np.testing.assert_array_equal(
        attend(large, large[:, ::-1]), attend(same, same[:, ::-1]), err_msg="ids of both sides"
    )


@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
@pytest.mark.parametrize("beside", ["lengths", "positions", "slopes", "window"])
@pytest.mark.parametrize("causal_alignment", ["upper_left", "lower_right"])
def test_a_causal_bias_object_is_the_mask_that_it_says(
    alignment: str, beside: str, causal_alignment: str
) -> None:
    """It counts indices, whatever lengths, positions or slopes count."""
    q, k = normal(1, 2, 6, 4, 8), normal(2, 2, 10, 4, 8)
    mask = jattn.CausalBias(alignment, 6, 10)  # type: ignore[arg-type]
    lengths = {
        "query_seq_lengths": jnp.array([4, 6]),
        "key_value_seq_lengths": jnp.array([5, 9]),
    }
    options: dict[str, Any] = {
        "lengths": lengths,
        "positions": {
            "query_positions": jnp.arange(6)[None].repeat(2, 0) + 3,
            "key_value_positions": jnp.arange(10)[None].repeat(2, 0),
            "local_window_size": (5, 2),
        },
        "slopes": {"alibi_slopes": jnp.array([0.1, 0.2, 0.3, 0.4])},
        "window": {"local_window_size": (3, 0), **lengths},
    }[beside]
    attend = functools.partial(
        jattn.dot_product_attention,
        q,
        k,
        k,
        causal_alignment=causal_alignment,
        return_lse=True,
        **options,
    )
    if beside == "positions" and causal_alignment == "lower_right":
        with pytest.raises(
            ValueError, match=r"lower-right alignment|causal bias object is aligned"
        ):
            attend(mask=mask)
        return
    if "local_window_size" in options and alignment != causal_alignment:
        with pytest.raises(ValueError, match="causal bias object is aligned"):
            attend(mask=mask)
        return
    for got, want in zip(attend(mask=mask), attend(mask=mask.materialize()), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("name", ["scale", "logits_soft_cap"])
def test_numbers_that_float32_cannot_hold_are_refused(name: str) -> None:
    x = normal(0, 1, 4, 2, 8)
    with pytest.raises(ValueError, match=rf"{name} is 1e\+300, must be .*finite.*float32"):
        jattn.dot_product_attention(x, x, x, **{name: 1e300})


def test_a_scale_that_float32_takes_for_0_is_0() -> None:
    x = normal(0, 1, 4, 2, 8)
    want = jattn.dot_product_attention(x, x, x, scale=0.0, is_causal=True)
    got = jattn.dot_product_attention(x, x, x, scale=1e-50, is_causal=True)
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got).all()


def test_both_flags_of_results_are_checked() -> None:
    x = normal(0, 1, 4, 2, 8)
    with pytest.raises(ValueError, match="return_residual is 'no', must be True or False"):
        jattn.dot_product_attention(x, x, x, return_residual="no")  # type: ignore[call-overload]


def test_a_bias_under_strict_promotion() -> None:
    x = normal(0, 1, 4, 2, 8, dtype="bfloat16")
    bias = normal(1, 1, 2, 4, 4, dtype="bfloat16")
    want = jattn.dot_product_attention(x, x, x, bias)
    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(jattn.dot_product_attention(x, x, x, bias), want)


RANKS: dict[str, dict[str, Any]] = {
    "bias": {"bias": jnp.ones((40, 40))},
    "bias of keys, mask": {"bias": jnp.ones(40), "mask": jnp.ones((2, 1, 40, 40), bool)},
    "lengths": {
        "query_seq_lengths": jnp.array([3, 40]),
        "key_value_seq_lengths": jnp.array([5, 0]),
    },
    "segments, lower right": {
        "segment_ids": jnp.zeros((2, 40), jnp.int32),
        "is_causal": True,
        "causal_alignment": "lower_right",
    },
    "positions, slopes, sinks": {
        "query_positions": jnp.zeros((2, 40), jnp.int32),
        "key_value_positions": jnp.zeros((2, 40), jnp.int32),
        "is_causal": True,
        "alibi_slopes": jnp.ones(4),
        "sinks": jnp.ones((2, 4)),
    },
    "dropout": {"dropout_rate": 0.3, "dropout_seed": 3},
    "dropout of all heads": {"dropout_rate": 0.3, "dropout_seed": 3, "broadcast_dropout": True},
}


@pytest.mark.parametrize("keywords", RANKS.values(), ids=RANKS)
def test_no_rank_is_promoted(keywords: dict[str, Any], backend: str) -> None:
    """Every pass is made under ``jax_numpy_rank_promotion="raise"``, second derivatives too."""
    q, k = normal(0, 2, 40, 4, 8), normal(1, 2, 40, 2, 8)

    def loss(q: jax.Array) -> jax.Array:
        out, lse = jattn.dot_product_attention(
            q, k, k, implementation=backend, return_lse=True, **keywords
        )
        return out.sum() + lse.sum()

    def passes(q: jax.Array) -> Any:
        by_entry = jax.vmap(jax.grad(loss))(jnp.stack([q, q]))
        return loss(q), jax.jvp(jax.grad(loss), (q,), (q,)), by_entry

    with jax.numpy_rank_promotion("raise"):
        jax.jit(passes).lower(q)


@pytest.mark.parametrize("convert", [np.asarray, list, tuple], ids=["numpy", "list", "tuple"])
def test_integers_that_int32_cannot_hold(convert: Any) -> None:
    """Lengths and positions count as the nearest that it can; ids are refused."""
    x = normal(0, 2, 6, 2, 8)
    attend = jattn.dot_product_attention
    lengths = convert(np.array([2, 2**40]))
    np.testing.assert_array_equal(
        attend(x, x, x, key_value_seq_lengths=lengths),
        attend(x, x, x, key_value_seq_lengths=jnp.array([2, 6])),
    )
    positions = convert(np.array([[-(2**40), 0, 1, 2, 3, 2**32 + 1]] * 2))
    near = jnp.clip(jnp.asarray([[-(2**30), 0, 1, 2, 3, 2**30]] * 2), -(2**29), 2**29)
    np.testing.assert_array_equal(
        attend(x, x, x, is_causal=True, query_positions=positions, key_value_positions=positions),
        attend(x, x, x, is_causal=True, query_positions=near, key_value_positions=near),
    )
    ids = convert(np.full((2, 6), 2**32))
    with pytest.raises(ValueError, match="query_segment_ids holds 4294967296, must be at most"):
        attend(x, x, x, query_segment_ids=ids, key_value_segment_ids=ids)
    for length in (np.int64(2**40), 2**40, 2**80):
        np.testing.assert_array_equal(
            attend(x[0], x[0], x[0], key_value_seq_lengths=length), attend(x[0], x[0], x[0])
        )


@pytest.mark.parametrize(
    ("of_queries", "of_keys"),
    [("uint32", "int32"), ("uint64", "int32"), ("uint64", "int64"), ("int8", "uint64")],
)
def test_traced_segment_ids_of_unlike_types(of_queries: str, of_keys: str) -> None:
    """Their common type may be a float, or one that the largest ids do not fit."""
    with jax.enable_x64("64" in of_queries + of_keys):
        x = jnp.asarray(normal(0, 1, 4, 2, 8))
        attend = jax.jit(
            lambda of_queries, of_keys: jattn.dot_product_attention(
                x, x, x, query_segment_ids=of_queries, key_value_segment_ids=of_keys
            )
        )
        q_ids, k_ids = np.array([[3, 4, 1, -1]], "int64"), np.array([[-1, 3, 4, 1]], "int64")
        q_ids, k_ids = (
            np.where(ids < 0, 5 + side if dtype[0] == "u" else -1, ids).astype(dtype)
            for side, (ids, dtype) in enumerate(((q_ids, of_queries), (k_ids, of_keys)))
        )
        want = x[:, jnp.array([1, 2, 3, 0])].at[:, 3].set(0)
        np.testing.assert_allclose(attend(q_ids, k_ids), want, rtol=1e-6)
        # The largest ids of an unsigned type, which nothing on the other side equals.
        for ids, one in ((q_ids, 1), (k_ids, 2)):
            if ids.dtype.kind == "u":
                ids[0, one] = np.iinfo(ids.dtype).max
        np.testing.assert_allclose(attend(q_ids, k_ids), want.at[:, 1].set(0), rtol=1e-6)
