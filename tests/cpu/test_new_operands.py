"""Positions, sinks, ALiBi slopes and dropout through the public function: forms, errors, every transformation.

What they mean is tested on the case table (test_backends_sweep.py); here they meet JAX.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import normal
from jax.test_util import check_grads

import jattn
from jattn import api, dropout

B, T, S, N, K, D, DV = 2, 13, 21, 4, 2, 8, 6
SEED = np.array([7, 11], np.uint32)
NAMES = ("q", "k", "v", "sinks", "slopes", "q_positions", "kv_positions", "key", "rate")


def drawn() -> tuple[jax.Array, ...]:
    """q, k, v, sinks (N,), slopes (B, N), positions (B, T) and (B, S), a dropout key and a rate."""
    rng = np.random.default_rng(0)
    return (
        normal(0, B, T, N, D),
        normal(1, B, S, K, D),
        normal(2, B, S, K, DV),
        normal(3, N),
        jnp.asarray(rng.uniform(0.01, 0.3, (B, N)), jnp.float32),
        jnp.asarray(rng.integers(0, 30, (B, T)), jnp.int32),
        jnp.asarray(rng.integers(0, 30, (B, S)), jnp.int32),
        jax.random.key(5),
        jnp.float32(0.25),
    )


def attend(backend: str, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """out and lse; rows without keys have lse 0 here, so that a loss over it stays finite."""
    q, k, v, sinks, slopes, q_positions, kv_positions, key, rate = arrays
    out, lse = jattn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        sinks=sinks,
        alibi_slopes=slopes,
        query_positions=q_positions,
        key_value_positions=kv_positions,
        dropout_rate=rate,
        dropout_key=key,
        implementation=backend,
        return_lse=True,
    )
    return out, jnp.where(jnp.isfinite(lse), lse, 0)


def textbook(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same written down with the softmax of JAX over the keys and the sink."""
    q, k, v, sinks, slopes, q_positions, kv_positions, key, rate = arrays
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    s = jnp.einsum("btnd,bsnd->bnts", q, k) / np.sqrt(D)
    distance = kv_positions[:, None, None, :] - q_positions[:, None, :, None]
    s = s - slopes[:, :, None, None] * jnp.abs(distance)
    visible = distance <= 0
    alive = visible.any(-1, keepdims=True)
    column = jnp.broadcast_to(sinks[None, :, None, None], (B, N, T, 1))
    # A row without keys is softmax of something finite here, and then dropped.
    joint = jnp.concatenate([jnp.where(visible, s, jnp.where(alive, -jnp.inf, 0)), column], -1)
    p = jnp.where(visible, jax.nn.softmax(joint)[..., :-1], 0)
    mask = jattn.dropout_mask(jattn.seed_from_key(key), 0, (B, N, T, S), rate)
    kept = jnp.where(mask, p / (1 - rate), 0)
    lse = jnp.where(alive[..., 0], jax.nn.logsumexp(joint, -1), 0)
    return jnp.einsum("bnts,bsnd->btnd", kept, v), lse.swapaxes(1, 2)


def loss(function: Callable[..., Any], *arrays: jax.Array) -> jax.Array:
    out, lse = function(*arrays)
    return jnp.sin(out).sum() + (lse**2).sum()


def close(got: Any, want: Any, tolerance: float = 3e-5) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.shape(g) == np.shape(w)
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)


# ---- Derivatives -----------------------------------------------------------------------------------------------------


def gradients_of(function: Callable[..., Any], argnums: Sequence[int]) -> tuple[jax.Array, ...]:
    return jax.jit(jax.grad(functools.partial(loss, function), argnums))(*drawn())  # type: ignore[no-any-return]


@functools.cache
def textbook_gradients() -> tuple[jax.Array, ...]:
    """Of all differentiable operands."""
    return gradients_of(textbook, range(5))


def test_gradients_of_all_differentiable_operands(backend: str) -> None:
    close(gradients_of(functools.partial(attend, backend), range(5)), textbook_gradients())


@pytest.mark.parametrize("argnums", [(3,), (4,), (3, 4), (0, 4), (1, 3)], ids=str)
def test_gradients_of_some_operands(argnums: tuple[int, ...]) -> None:
    """Also where no backend has anything to do: the gradient of the sinks alone."""
    before = jattn.call_counters().get("cpu", {}).get("backward", 0)
    got = gradients_of(functools.partial(attend, "cpu"), argnums)
    close(got, [textbook_gradients()[i] for i in argnums])
    after = jattn.call_counters().get("cpu", {}).get("backward", 0)
    assert after - before == int(argnums != (3,))


def derivatives_of(function: Callable[..., Any]) -> Any:
    """In one direction: of the results, and of the gradient of the loss."""
    arrays = drawn()
    moving, fixed = arrays[:5], arrays[5:]
    tangents = tuple(normal(10 + i, *x.shape) for i, x in enumerate(moving))

    def of_moving(*x: jax.Array) -> Any:
        return function(*x, *fixed)

    @jax.jit
    def run() -> Any:
        gradient = jax.grad(functools.partial(loss, of_moving), argnums=range(5))
        return jax.jvp(of_moving, moving, tangents)[1], jax.jvp(gradient, moving, tangents)[1]

    return run()


@functools.cache
def textbook_derivatives() -> Any:
    return derivatives_of(textbook)


def test_forward_mode_and_second_derivatives(backend: str) -> None:
    close(derivatives_of(functools.partial(attend, backend)), textbook_derivatives(), 2e-4)


def test_numerical_gradients_in_float64() -> None:
    with jax.enable_x64(True):
        *moving, q_positions, kv_positions, key, rate = drawn()
        wide = [x.astype(jnp.float64) for x in moving[:3]]

        # Sinks and slopes are read as float32, too coarse for the steps of a float64 check.
        @jax.jit
        def run(*x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return attend("cpu", *x, *moving[3:], q_positions, kv_positions, key, rate)

        check_grads(run, wide, order=1, modes=["rev", "fwd"])


def test_the_rate_has_no_gradient() -> None:
    arrays = drawn()
    gradient = jax.grad(functools.partial(loss, functools.partial(attend, "cpu")), argnums=8)
    assert jax.jit(gradient)(*arrays) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradients_come_back_in_the_dtype_and_shape_of_the_operand(dtype: str) -> None:
    q, k, v, *_ = drawn()

    def scalar(sinks: jax.Array, slopes: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(q, k, v, sinks=sinks, alibi_slopes=slopes).sum()

    for shape in ((N,), (1, N), (B, N), (B, 1), (1,)):
        operands = jnp.full(shape, 0.5, dtype), jnp.full(shape, 0.1, dtype)
        for gradient in jax.eval_shape(jax.grad(scalar, (0, 1)), *operands):
            assert gradient.shape == shape
            assert gradient.dtype == dtype


def test_a_sink_of_minus_infinity_is_no_sink(backend: str) -> None:
    q, k, v, *_ = drawn()

    @jax.jit
    def run(**keywords: Any) -> Any:
        def attend(*x: jax.Array) -> jax.Array:
            return jattn.dot_product_attention(*x, implementation=backend, **keywords)

        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(jnp.ones_like(out))

    close(run(sinks=jnp.full(N, -jnp.inf)), run(), 1e-6)


def test_a_sink_of_infinity_takes_all_weight(backend: str) -> None:
    q, k, v, *_ = drawn()

    def run(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> Any:
        return jattn.dot_product_attention(
            q, k, v, sinks=sinks, return_lse=True, implementation=backend
        )

    (out, lse), pull = jax.vjp(run, q, k, v, jnp.full(N, jnp.inf))
    *of_keys, dsinks = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    assert (lse == jnp.inf).all()
    for x in (out, *of_keys):
        assert (x == 0).all()
    assert (dsinks == B * T).all()


# ---- Transformations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mapped", range(9), ids=NAMES)
def test_vmap_over_one_operand(mapped: int) -> None:
    """Value and gradients equal those of the elements one by one; a mapped key gives each element its own mask."""
    arrays = list(drawn())
    if NAMES[mapped] == "key":
        stacked = jax.random.split(jax.random.key(9), 3)
    elif NAMES[mapped].endswith("positions"):
        stacked = jnp.stack([arrays[mapped] + i * i for i in range(3)])
    else:
        stacked = jnp.stack([arrays[mapped] * (1 - 0.2 * i) for i in range(3)])
    gradients = jax.value_and_grad(
        functools.partial(loss, functools.partial(attend, "cpu")), argnums=range(5)
    )
    one = jax.jit(gradients)
    axes = [0 if i == mapped else None for i in range(9)]
    got = jax.jit(jax.vmap(gradients, axes))(
        *(stacked if i == mapped else x for i, x in enumerate(arrays))
    )
    each = []
    for x in stacked:
        arrays[mapped] = x
        each.append(one(*arrays))
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *each))


def packed() -> dict[str, Any]:
    """A packed batch of two sequences, 5 and 8 tokens, and its table of keys."""
    segments = jnp.asarray([[0] * 5 + [1] * 8], jnp.int32)
    positions = jnp.asarray([[*range(5), *range(8)]], jnp.int32)
    return {
        "segment_ids": segments,
        "query_positions": positions,
        "key_value_positions": positions,
        "dropout_table": dropout.keys(jnp.asarray(SEED), jnp.zeros(2, jnp.uint32), 2, N),
    }


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_drop_what_the_padded_batch_drops(backend: str, is_causal: bool) -> None:
    q, k, v = normal(1, 3, 1, 13, N, D)
    run = functools.partial(api.packed_attention, is_causal=is_causal, implementation=backend)
    out, lse = jax.jit(functools.partial(run, dropout_rate=0.4))(q, k, v, **packed())

    def padded(x: jax.Array) -> jax.Array:
        return jnp.stack([jnp.pad(x[0, :5], ((0, 3), (0, 0), (0, 0))), x[0, 5:]])

    want, want_lse = jattn.dot_product_attention(
        *map(padded, (q, k, v)),
        is_causal=is_causal,
        query_seq_lengths=jnp.array([5, 8]),
        key_value_seq_lengths=jnp.array([5, 8]),
        dropout_rate=0.4,
        dropout_seed=SEED,
        return_lse=True,
        implementation=backend,
    )
    close(out[0], jnp.concatenate([want[0, :5], want[1]]))
    close(lse[0], jnp.concatenate([want_lse[0, :5], want_lse[1]]))


@pytest.mark.parametrize("mapped", ["q", "dropout_table"])
def test_vmap_of_packed_sequences(mapped: str) -> None:
    q, k, v = normal(1, 3, 1, 13, N, D)
    keywords = packed()
    table = keywords.pop("dropout_table")
    stacked = {"q": jnp.stack([q, 2 * q]), "dropout_table": jnp.stack([table, table[::-1]])}[mapped]

    def run(x: jax.Array) -> Any:
        def attend(q: jax.Array) -> jax.Array:
            out, _ = api.packed_attention(
                q,
                k,
                v,
                dropout_rate=0.4,
                dropout_table=x if mapped == "dropout_table" else table,
                implementation="cpu",
                **keywords,
            )
            return out

        out, pullback = jax.vjp(attend, x if mapped == "q" else q)
        return out, pullback(jnp.ones_like(out))

    each = map(jax.jit(run), stacked)
    close(jax.jit(jax.vmap(run))(stacked), jax.tree.map(lambda *x: jnp.stack(x), *each))


def test_inside_scan_and_checkpoint_the_masks_are_those_outside() -> None:
    q, k, v, *_ = drawn()
    keys = jax.random.split(jax.random.key(5), 3)
    one_by_one = list(keys)

    def layer(x: jax.Array, key: jax.Array) -> jax.Array:
        return x + jnp.pad(
            jattn.dot_product_attention(
                x, k, v, dropout_rate=0.3, dropout_key=key, implementation="cpu"
            ),
            ((0, 0), (0, 0), (0, 0), (0, D - DV)),
        )

    def scanned(x: jax.Array, remat: bool) -> jax.Array:
        body = jax.checkpoint(layer, policy=jattn.checkpoint_policy) if remat else layer
        return (jax.lax.scan(lambda c, key: (body(c, key), None), x, keys)[0] ** 2).sum()

    def unrolled(x: jax.Array) -> jax.Array:
        return (functools.reduce(layer, one_by_one, x) ** 2).sum()

    want = jax.jit(jax.value_and_grad(unrolled))(q)
    for remat in (False, True):
        close(jax.jit(jax.value_and_grad(functools.partial(scanned, remat=remat)))(q), want)


def test_one_trace_serves_all_rates_and_seeds() -> None:
    q, k, v, *_ = drawn()

    @jax.jit
    def run(rate: jax.Array, seed: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(q, k, v, dropout_rate=rate, dropout_seed=seed)

    plain = jattn.dot_product_attention(q, k, v)
    close(run(jnp.float32(0.0), SEED), plain, 1e-6)
    half = run(jnp.float32(0.5), SEED)
    static = jattn.dot_product_attention(q, k, v, dropout_rate=0.5, dropout_seed=SEED)
    close(half, static, 1e-6)
    assert not np.allclose(half, plain)
    assert run._cache_size() == 1


def test_a_static_rate_of_0_leaves_no_trace() -> None:
    q, k, v, *_ = drawn()
    with_zero = jax.make_jaxpr(functools.partial(jattn.dot_product_attention, dropout_rate=0.0))
    assert str(with_zero(q, k, v)) == str(jax.make_jaxpr(jattn.dot_product_attention)(q, k, v))


def test_positions_that_nothing_reads_leave_no_trace() -> None:
    q, k, v, *_ = drawn()
    positions = {
        "query_positions": jnp.zeros((B, T), jnp.int32),
        "key_value_positions": jnp.ones((B, S), jnp.int32),
    }
    assert not jattn.explain(q, k, v, **positions).spec.positions
    assert jattn.explain(q, k, v, is_causal=True, **positions).spec.positions
    assert jattn.explain(q, k, v, alibi_slopes=jnp.ones(N), **positions).spec.positions


def test_export_with_a_symbolic_batch() -> None:
    q, k, v, *_ = drawn()
    (batch,) = jax.export.symbolic_shape("batch")

    def run(q: jax.Array, k: jax.Array, v: jax.Array, seed: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(
            q, k, v, sinks=jnp.ones(N), dropout_rate=0.3, dropout_seed=seed
        )

    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (q, k, v)]
    exported = jax.export.export(jax.jit(run), disabled_checks=jattn.export_disabled_checks())(
        *shapes, jax.ShapeDtypeStruct((2,), jnp.uint32)
    )
    loaded = jax.export.deserialize(exported.serialize())
    close(loaded.call(q, k, v, SEED), run(q, k, v, jnp.asarray(SEED)), 1e-6)


# ---- Forms of the arguments ------------------------------------------------------------------------------------------


def test_without_batch_axis_and_with_two() -> None:
    """(T, N, D) is a batch of one; further leading axes are one batch, counted in row-major order."""
    q, k, v, sinks, slopes, q_positions, kv_positions, _, _ = drawn()
    keywords = {"is_causal": True, "dropout_rate": 0.3, "dropout_seed": SEED}

    def run(*arrays: jax.Array) -> jax.Array:
        q, k, v, slopes, q_positions, kv_positions = arrays
        return jattn.dot_product_attention(
            q,
            k,
            v,
            sinks=sinks,
            alibi_slopes=slopes,
            query_positions=q_positions,
            key_value_positions=kv_positions,
            **keywords,  # type: ignore[arg-type]
        )

    batched = run(q, k, v, slopes, q_positions, kv_positions)
    alone = run(*(x[0] for x in (q, k, v, slopes, q_positions, kv_positions)))
    close(alone, batched[0], 1e-6)
    nested = run(*(x[None] for x in (q, k, v, slopes, q_positions, kv_positions)))
    close(nested[0], batched, 1e-6)
    # Slopes and sinks that broadcast over some of the leading axes.
    two = run(
        *(jnp.stack([x, x]) for x in (q, k, v)),
        slopes[None],
        *(jnp.stack([x, x]) for x in (q_positions, kv_positions)),
    )
    close(two[0], batched, 1e-6)
    assert not np.allclose(two[1], batched)  # other batch entries, other masks


def test_positions_are_clamped() -> None:
    q, k, v, *_ = drawn()

    def run(far: int) -> jax.Array:
        return jattn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            query_positions=jnp.full((B, T), far, jnp.int32),
            key_value_positions=jnp.full((B, S), -far, jnp.int32),
        )

    close(run(2**31 - 1), jattn.dot_product_attention(q, k, v), 1e-6)
    assert (run(-(2**31) + 1) == 0).all()


def test_shifted_positions_are_lower_right_alignment() -> None:
    q, k, v, *_ = drawn()
    close(
        jattn.dot_product_attention(
            q,
            k,
            v,
            local_window_size=(6, 1),
            query_positions=jnp.broadcast_to(jnp.arange(T) + S - T, (B, T)),
            key_value_positions=jnp.broadcast_to(jnp.arange(S), (B, S)),
        ),
        jattn.dot_product_attention(
            q, k, v, local_window_size=(6, 1), causal_alignment="lower_right"
        ),
        1e-6,
    )


def test_slopes_read_the_aligned_distance_without_any_band() -> None:
    q, k, v, *_ = drawn()
    slopes = jnp.full(N, 0.2)
    distance = jnp.abs(jnp.arange(S) - jnp.arange(T)[:, None] - (S - T))
    close(
        jattn.dot_product_attention(q, k, v, alibi_slopes=slopes, causal_alignment="lower_right"),
        jattn.dot_product_attention(q, k, v, -0.2 * distance.astype(jnp.float32)),
        1e-6,
    )


KEY = jax.random.PRNGKey(0)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"dropout_rate": 1.0, "dropout_seed": SEED}, r"dropout_rate is 1.0, must be .* below 1"),
        ({"dropout_rate": -0.1, "dropout_seed": SEED}, r"dropout_rate is -0.1"),
        ({"dropout_rate": float("nan"), "dropout_seed": SEED}, r"dropout_rate is nan"),
        ({"dropout_rate": np.zeros(2), "dropout_seed": SEED}, r"dropout_rate has shape \(2,\)"),
        ({"dropout_rate": 0.5}, r"no randomness: pass dropout_key"),
        ({"dropout_rate": 0.5, "dropout_seed": SEED, "dropout_key": KEY}, r"give one of them"),
        ({"dropout_rate": 0.5, "dropout_key": KEY, "dropout_offset": 1}, r"without dropout_seed"),
        ({"dropout_rate": 0.5, "dropout_key": KEY[None]}, r"dropout_key has shape \(1, 2\)"),
        ({"dropout_rate": 0.5, "dropout_key": jnp.ones(2)}, r"dtype float32, must be one key"),
        (
            {"dropout_rate": 0.5, "dropout_key": np.zeros(4, np.uint32)},
            r"dropout_key has shape \(4,\), must be \(2,\).*wrap_key_data",
        ),
        ({"dropout_rate": 0.5, "dropout_seed": np.zeros(4, np.uint32)}, r"dropout_seed has shape"),
        ({"dropout_rate": 0.5, "dropout_seed": 2**64}, r"dropout_seed is .* below 2\*\*64"),
        ({"dropout_rate": 0.5, "dropout_seed": 1, "dropout_offset": -1}, r"dropout_offset is -1"),
        ({"sinks": np.zeros(3, np.float32)}, r"sinks has shape \(3,\), must be \(4,\)"),
        ({"sinks": np.zeros((B, T, N), np.float32)}, r"sinks has shape"),
        ({"sinks": np.zeros(N, np.int32)}, r"sinks has dtype int32, must be a float type"),
        ({"alibi_slopes": np.zeros((3, N), np.float32)}, r"alibi_slopes has shape \(3, 4\)"),
        ({"query_positions": np.zeros((B, T), np.int32)}, r"key_value_positions is missing"),
        ({"key_value_positions": np.zeros((B, S), np.int32)}, r"query_positions is missing"),
        (
            {
                "query_positions": np.zeros((B, T)),
                "key_value_positions": np.zeros((B, S), np.int32),
            },
            r"query_positions has dtype float",
        ),
        (
            {
                "query_positions": np.zeros((B, T), np.int32),
                "key_value_positions": np.zeros((B, T), np.int32),
            },
            r"key_value_positions has shape \(2, 13\), must be \(2, 21\)",
        ),
        (
            {
                "query_positions": np.zeros((B, T), np.int32),
                "key_value_positions": np.zeros((B, S), np.int32),
                "causal_alignment": "lower_right",
            },
            r"lower-right alignment",
        ),
    ],
)
def test_wrong_calls_are_refused_while_tracing(keywords: dict[str, Any], message: str) -> None:
    q, k, v, *_ = drawn()
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda *x: jattn.dot_product_attention(*x, **keywords),  # type: ignore[call-overload]
            q,
            k,
            v,
        )


def test_explain_takes_the_new_arguments_as_shapes() -> None:
    q, k, v, sinks, slopes, q_positions, kv_positions, key, rate = (
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x in drawn()
    )
    found = jattn.explain(
        q,
        k,
        v,
        is_causal=True,
        sinks=sinks,
        alibi_slopes=slopes,
        query_positions=q_positions,
        key_value_positions=kv_positions,
        dropout_key=key,
        dropout_rate=rate,
    )
    assert found.spec.features() >= {"positions", "sinks", "alibi_slopes", "dropout"}
    assert found.spec.sinks == (1, N)
    assert found.spec.alibi_slopes == (B, N)
    assert found.spec.dropout is not None
    assert found.spec.dropout.keys == (B, N)
    assert found.chosen == "cpu"
