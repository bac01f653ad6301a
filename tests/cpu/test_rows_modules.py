"""Acceptance rows T001 to T028: attention inside Flax modules. Masks here: True = takes part."""

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn import bernoulli, normal
from flax_models import Decoder, Encoder, EncoderLayer

import jattn
import jattn.flax

GOLDEN = {
    name: np.asarray(rows)
    for name, rows in json.loads(
        (Path(__file__).parents[1] / "golden" / "encoder.json").read_text()
    ).items()
}
# Of the golden numbers' second input batch: positions that are not padding.
GOLDEN_KEEP = np.asarray([[1, 0, 1, 1, 1], [1, 1, 1, 0, 0]], bool)

Params = dict[str, Any]


def attend_with(backend: str | None) -> Any:
    return jattn.flax.make_attention_fn(implementation=backend)


def encoder(backend: str | None = None, **changes: Any) -> Encoder:
    fields: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "hidden": 32} | changes
    return Encoder(attention_fn=fields.pop("attention_fn", attend_with(backend)), **fields)


def layer(backend: str | None = None, **changes: Any) -> EncoderLayer:
    fields: dict[str, Any] = {"num_heads": 4, "hidden": 32} | changes
    return EncoderLayer(attention_fn=fields.pop("attention_fn", attend_with(backend)), **fields)


def initial(module: nn.Module, *inputs: Any) -> Params:
    """Parameters in the shapes of `module.init`, drawn by numpy: compiling JAX's generator for each costs more than the
    tests.
    """
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        if name == "kernel":
            values = rng.standard_normal(leaf.shape) / np.sqrt(np.prod(leaf.shape[:-1]))
        else:
            values = np.full(leaf.shape, {"bias": 0.0, "scale": 1.0}[name])
        return jnp.asarray(values, leaf.dtype)

    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    return jax.tree_util.tree_map_with_path(draw, shapes)


def causal_mask(length: int) -> jax.Array:
    return jnp.tril(jnp.ones((length, length), bool))[None, None]


def key_mask(keep: Any) -> jax.Array:
    """(B, S) booleans as a (B, 1, 1, S) mask."""
    return jnp.asarray(keep, bool)[:, None, None, :]


def close(got: Any, want: Any, *, rtol: float = 1.3e-6, atol: float = 1e-5) -> None:
    """Default closeness of float32 rows; NaN is never equal."""
    np.testing.assert_allclose(
        np.asarray(got), np.asarray(want), rtol=rtol, atol=atol, equal_nan=False
    )


def calls_of(function: Callable[[], Any]) -> dict[str, dict[str, int]]:
    """Which backends were lowered while the function ran."""
    jattn.reset_call_counters()
    function()
    return jattn.call_counters()


# ---- attention weights' masks ----------------------------------------------------------------------------------------


@pytest.mark.backends("xla", "cpu")
def test_T001_rank_2_mask_equals_rank_4(backend: str) -> None:
    x = normal(1, 10, 16, 4, 4)
    zeros_and_ones = bernoulli(2, 0.5, 16, 16).at[3].set(False)
    additive = jnp.where(zeros_and_ones, 0.0, -jnp.inf)
    attend = jax.jit(functools.partial(jattn.dot_product_attention, implementation=backend))
    want = attend(x, x, x, additive)
    for bias in (additive[None], jnp.broadcast_to(additive, (10, 4, 16, 16))):
        close(attend(x, x, x, bias), want)
    for mask in (zeros_and_ones, jnp.broadcast_to(zeros_and_ones, (10, 4, 16, 16))):
        close(attend(x, x, x, None, mask), want)
    assert not np.asarray(want)[:, 3].any()  # every key of query 3 is masked

    tokens = normal(3, 10, 16, 16)
    module = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=attend_with(backend))
    params = initial(module, tokens)
    rank_2 = module.apply(params, tokens, mask=zeros_and_ones)
    close(
        module.apply(params, tokens, mask=jnp.broadcast_to(zeros_and_ones, (10, 4, 16, 16))), rank_2
    )


@pytest.mark.parametrize("dtype", ["uint8", "int32"])
def test_T002_integer_masks_are_refused(dtype: str, backend: str) -> None:
    x = normal(1, 1, 4, 2, 1)
    mask = jnp.ones((1, 1, 1, 4), dtype)
    call = functools.partial(jattn.dot_product_attention, implementation=backend)
    with pytest.raises(ValueError, match=f"mask.*{dtype}.*bool"):
        jax.eval_shape(call, x, x, x, mask=mask)


@pytest.mark.backends("xla", "cpu")
@pytest.mark.parametrize("steps", [10, pytest.param(100, marks=pytest.mark.full)])
def test_T002_train_with_padding(steps: int, backend: str) -> None:
    model = encoder(backend, num_heads=2, hidden=4, activation="gelu")
    x = jnp.concatenate([normal(1, 1, 2, 2), jnp.zeros((1, 2, 2))], axis=1)
    target = normal(2, 1, 2, 2)
    mask = key_mask([[1, 1, 0, 0]])
    params = initial(model, x)
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Params, state: Any) -> tuple[Params, Any, jax.Array]:
        def loss_of(params: Params) -> jax.Array:
            return jnp.mean((model.apply(params, x, mask, False)[:, :2] - target) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(steps):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    train, evaluate = (
        model.apply(params, x, mask, deterministic)[:, :2] for deterministic in (False, True)
    )
    assert float(jnp.abs(train - evaluate).mean()) < 1e-4
    # Normalised over two features, results hardly move: derivatives tell what they depend on.
    slope = jax.jit(jax.grad(lambda x: (model.apply(params, x, mask)[:, :2] * target).sum()))(x)
    assert np.asarray(slope[:, :2]).any()
    assert not np.asarray(slope[:, 2:]).any()


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("kind", ["bool", "float32"])
@pytest.mark.parametrize("padding_dim", [2, None])
@pytest.mark.parametrize("mask_dim", [2, 3, None])
def test_T003_mask_ranks_and_padding(
    mask_dim: int | None, padding_dim: int | None, kind: str, backend: str
) -> None:
    """Against Flax's own function, in which every query sees the first key: without any it takes the mean of all."""
    x = normal(1, 2, 4, 8)
    rng = np.random.default_rng(0)
    shapes = {2: (4, 4), 3: (2 * 4, 4, 4)}
    parts = []
    if mask_dim is not None:
        part = (
            rng.integers(0, 2, shapes[mask_dim]).astype(bool)
            if kind == "bool"
            else rng.random(shapes[mask_dim])
        )
        parts.append(part if mask_dim == 2 else part.reshape(2, 4, 4, 4))
    if padding_dim is not None:
        keep = rng.integers(0, 2, (2, 4)).astype(bool) if kind == "bool" else rng.random((2, 4))
        parts.append(keep[:, None, None, :])
    if kind == "bool":
        for part in parts:
            part[..., 0] = True

    def attend(fn: Any) -> jax.Array:
        keywords: dict[str, Any] = {}
        if parts and kind == "bool":
            keywords["mask"] = functools.reduce(np.logical_and, np.broadcast_arrays(*parts))
        elif parts:
            fn = functools.partial(fn, bias=jnp.asarray(sum(parts), jnp.float32))
        module = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=fn)
        return module.apply(initial(module, x), x, **keywords)  # type: ignore[return-value]

    close(attend(attend_with(backend)), attend(nn.dot_product_attention))


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("num_heads", [1, 4, 8])
def test_T004_all_valid_mask_changes_nothing(num_heads: int, backend: str) -> None:
    x = normal(1, 2, 4, 8)
    model = layer(backend, num_heads=num_heads)
    params = initial(model, x)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradients(params: Params, mask: Any) -> tuple[jax.Array, jax.Array]:
        out = model.apply(params, x, mask)
        return (out**2).sum(), out  # type: ignore[return-value]

    masked, masked_out = gradients(params, jnp.ones((1, 1, 4, 4), bool))
    plain, plain_out = gradients(params, None)
    close(masked_out, plain_out)
    jax.tree.map(functools.partial(close, atol=1e-4), masked, plain)


@pytest.mark.parametrize("num_heads", [3, 4])
def test_T005_attention_submodule_is_captured_once(num_heads: int) -> None:
    x = normal(1, 2, 4, 12)
    model = layer(num_heads=num_heads, hidden=12)
    params = initial(model, x)

    def captured() -> Any:
        _, state = model.apply(params, x, capture_intermediates=True)
        return state["intermediates"]["self_attention"]["__call__"]

    fused = captured()
    try:
        jattn.set_enabled(False)
        plain = captured()
    finally:
        jattn.set_enabled(True)
    assert len(fused) == len(plain) == 1
    close(fused[0], plain[0])


# (shape, trailing pads per sequence); the third sequence of the first input is padding altogether.
T006_INPUTS = (
    ((3, 2), (1, 1, 2)),
    ((2, 100), (2, 10)),
    ((2, 1024), (4, 0)),
    ((1, 1026), (2,)),
    ((4, 1040), (16, 15, 9, 0)),
)


def computed_in(dtype: Any, attend: Any) -> Any:
    """An attention function that works in `dtype` inside a model of another one, as autocast makes it."""

    def attention_fn(
        query: jax.Array, key: jax.Array, value: jax.Array, mask: Any = None
    ) -> jax.Array:
        return attend(
            query.astype(dtype), key.astype(dtype), value.astype(dtype), mask=mask
        ).astype(query.dtype)

    return attention_fn


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("d_model", "inputs"), [(12, T006_INPUTS), (256, T006_INPUTS[:2])], ids=["d12", "d256"]
)
def test_T006_masked_and_length_arms_agree(d_model: int, inputs: Any, autocast: bool) -> None:
    """Dense mask, lengths and XLA agree on valid positions. (1024: where an old kernel changed algorithm.)"""
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if autocast else {}

    def arm(backend: str | None, mask: Any) -> np.ndarray[Any, Any]:
        fn = computed_in(jnp.float16, attend_with(backend)) if autocast else attend_with(backend)
        out = jax.jit(encoder(hidden=d_model, attention_fn=fn).apply)(params, x, mask)
        return np.where(np.asarray(keep)[..., None], np.asarray(out), 0)

    for (batch, length), pads in inputs[:2] if autocast else inputs:
        x = jnp.asarray(np.random.default_rng(length).random((batch, length, d_model)), "float32")
        lengths = jnp.asarray([length - pad for pad in pads], jnp.int32)
        keep = jnp.arange(length)[None] < lengths[:, None]
        params = initial(encoder(hidden=d_model), x)
        structure = jattn.flax.StructuralMask(key_value_seq_lengths=lengths)
        want = arm("xla", key_mask(keep))
        close(arm(None, key_mask(keep)), want, **tolerance)
        close(arm(None, structure), want, **tolerance)


# ---- golden numbers --------------------------------------------------------------------------------------------------


def cosine_parameters(num_layers: int, final_norm: bool, dtype: str) -> Params:
    """The parameters of the golden numbers: every torch-shaped array is cos(0), cos(1), ... computed in float32.

    d_model 4, 2 heads, feed-forward 16; torch keeps weights as (out, in) and packs q, k, v in one (12, 4) array.
    """

    def cosines(*shape: int) -> np.ndarray[Any, Any]:
        return np.cos(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape).astype(dtype)

    in_weight, in_bias = cosines(12, 4), cosines(12)
    attention: Params = {"out": {"kernel": cosines(4, 4).T.reshape(2, 2, 4), "bias": cosines(4)}}
    for i, name in enumerate(("query", "key", "value")):
        rows = slice(4 * i, 4 * i + 4)
        attention[name] = {
            "kernel": in_weight[rows].T.reshape(4, 2, 2),
            "bias": in_bias[rows].reshape(2, 2),
        }
    norm = {"LayerNorm_0": {"scale": cosines(4), "bias": cosines(4)}}
    feed_forward = {
        "Dense_0": {"kernel": cosines(16, 4).T, "bias": cosines(16)},
        "Dense_1": {"kernel": cosines(4, 16).T, "bias": cosines(4)},
    }
    one_layer = {
        "self_attention": attention,
        "attention_norm": norm,
        "feed_forward": feed_forward,
        "feed_forward_norm": norm,
    }
    parameters: Params = {f"layer_{i}": one_layer for i in range(num_layers)}
    if final_norm:
        parameters["final_norm"] = {"scale": np.ones(4, dtype), "bias": np.zeros(4, dtype)}
    return {"params": parameters}


def golden_encoder(backend: str, num_layers: int, dtype: Any, final_norm: bool = False) -> Encoder:
    return encoder(
        backend,
        num_layers=num_layers,
        num_heads=2,
        hidden=16,
        final_norm=final_norm,
        dtype=dtype,
        param_dtype=dtype,
    )


def test_T007_square_input(backend: str) -> None:
    x = jnp.arange(16, dtype=jnp.float32).reshape(2, 2, 4)
    model = golden_encoder(backend, 2, jnp.float32)
    params = cosine_parameters(2, final_norm=False, dtype="float32")
    rows = [[2.420306, 0.017629, -0.607858, -0.085519], [2.419836, 0.017549, -0.608188, -0.085348]]
    want = np.repeat(np.asarray(rows)[:, None], 2, axis=1)
    for deterministic in (True, False):
        got = model.apply(params, x, causal_mask(2), deterministic)
        assert got.shape == x.shape
        close(got, want, rtol=1e-7, atol=1e-5)
    # A gradient is wanted as well: the same numbers from inside a differentiated function.
    value, _ = jax.value_and_grad(lambda x: model.apply(params, x, causal_mask(2)).sum())(x)
    close(value, want.sum(), rtol=1e-6)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    ("letter", "num_layers", "final_norm"),
    [
        ("A", 1, False),
        ("B", 1, False),
        ("C", 2, False),
        ("D", 6, False),
        ("E", 2, True),
        ("F", 6, True),
    ],
)
def test_T008_golden_encoder(
    letter: str, num_layers: int, final_norm: bool, batch_first: bool, backend: str
) -> None:
    with jax.enable_x64(True):
        model = golden_encoder(backend, num_layers, jnp.float64, final_norm)
        params = cosine_parameters(num_layers, final_norm, "float64")
        x = jnp.asarray(GOLDEN["x"])
        masks: list[Any] = [key_mask(GOLDEN_KEEP)]
        if letter == "A":
            masks = [None, jnp.ones((1, 1, 5, 5), bool), key_mask(np.ones((2, 5)))]
        for mask in masks:
            if batch_first:
                got = jax.jit(model.apply)(params, x, mask)
            else:  # there is one layout; the caller transposes around it, and XLA may fuse that into what it feeds us
                apply = jax.jit(
                    lambda x, mask: model.apply(params, x.swapaxes(0, 1), mask).swapaxes(0, 1)
                )
                got = np.swapaxes(
                    apply(jnp.asarray(np.ascontiguousarray(GOLDEN["x"].swapaxes(0, 1))), mask), 0, 1
                )
            close(got, GOLDEN[letter], rtol=1e-7, atol=1e-5)


def test_T008_left_aligned_padding_as_lengths(backend: str) -> None:
    """The second sequence is left-aligned, so lengths say the same as its mask."""
    with jax.enable_x64(True):
        model = golden_encoder(backend, 1, jnp.float64)
        params = cosine_parameters(1, False, "float64")
        structure = jattn.flax.StructuralMask(key_value_seq_lengths=jnp.asarray([3], jnp.int32))
        got = model.apply(params, jnp.asarray(GOLDEN["x"][1:]), structure)
        close(got, GOLDEN["B"][1:], rtol=1e-7, atol=1e-5)


# ---- mask forms of modules -------------------------------------------------------------------------------------------


def both_masks(length: int, lengths: list[int]) -> tuple[jax.Array, jax.Array]:
    padding = key_mask(np.arange(length)[None] < np.asarray(lengths)[:, None])
    return padding, padding & causal_mask(length)


def test_T009_causal_and_padding_together_say_nothing() -> None:
    x = normal(1, 2, 3, 16)
    model = encoder(num_heads=2, final_norm=True)
    params = initial(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, mask = both_masks(3, [3, 2])
        out = model.apply(params, x, mask, False)
    plain = encoder(num_heads=2, final_norm=True, attention_fn=nn.dot_product_attention)
    close(out, plain.apply(params, x, mask))


@pytest.mark.backends("xla", "cpu")
def test_T010_decoder_with_causal_and_memory_padding(backend: str) -> None:
    x, memory = normal(1, 2, 3, 16), normal(2, 2, 5, 16)
    _, mask = both_masks(3, [3, 2])
    memory_mask, _ = both_masks(5, [5, 3])

    def run(fn: Any) -> jax.Array:
        model = Decoder(num_layers=2, num_heads=2, hidden=32, attention_fn=fn)
        return model.apply(initial(model, x, memory), x, memory, mask, memory_mask)  # type: ignore[return-value]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = run(attend_with(backend))
    close(got, run(nn.dot_product_attention))


@pytest.mark.backends("xla", "cpu")
def test_T011_is_causal_equals_the_mask(backend: str) -> None:
    q, k, v = (normal(i, 1, 5, 1, 3) for i in range(3))
    attend = functools.partial(jattn.dot_product_attention, implementation=backend)
    close(attend(q, k, v, is_causal=True), attend(q, k, v, mask=causal_mask(5)))
    close(
        attend(q, k, v, is_causal=True, mask=causal_mask(5)), attend(q, k, v, mask=causal_mask(5))
    )


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("num_heads", [1, 8])
def test_T012_module_with_and_without_bias(num_heads: int, use_bias: bool, backend: str) -> None:
    x = normal(1, 8, 100, 128)
    module = nn.MultiHeadDotProductAttention(
        num_heads=num_heads, use_bias=use_bias, attention_fn=attend_with(backend)
    )
    params = initial(module, x)
    out = module.apply(params, x)
    assert np.isfinite(np.asarray(out)).all()
    close(module.apply(params, x, mask=jnp.ones((8, 1, 1, 100), bool)), out)


@pytest.mark.backends("xla", "cpu")
def test_T013_fully_padded_sequences_and_trailing_columns(backend: str) -> None:
    x = normal(1, 6, 10, 64)
    mask = key_mask(np.arange(6)[:, None] == 0) & jnp.ones((6, 1, 1, 10), bool)
    model = encoder(backend, num_layers=3, hidden=64, activation="gelu")
    params = initial(model, x)

    def loss(params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = model.apply(params, x, mask)
        return (out**2).sum(), out  # type: ignore[return-value]

    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    assert out.shape == x.shape
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves((grads, out)))
    moved = model.apply(params, x.at[1:, 9].add(1.0), mask)
    close(moved[:, :9], out[:, :9])  # tokens of padding see none, themselves neither


@pytest.mark.backends("xla", "cpu")
def test_T014_lengths_equal_sequences_alone(backend: str) -> None:
    """The dense form, with lengths; the ragged one is in test_ragged.py."""
    lengths = [10, 0, 8, 0, 6, 2]
    x = normal(1, 6, 10, 64)
    model = encoder(backend, num_layers=3, hidden=64, activation="gelu")
    params = initial(model, x)
    counts = jnp.asarray(lengths, jnp.int32)
    structure = jattn.flax.StructuralMask(query_seq_lengths=counts, key_value_seq_lengths=counts)
    apply = jax.jit(model.apply)  # op by op, each length compiles some 20 programs
    out = np.asarray(apply(params, x, structure))
    assert np.isfinite(out).all()
    for i, length in enumerate(lengths):
        if length:
            alone = np.asarray(apply(params, np.asarray(x)[i : i + 1, :length]))
            close(out[i, :length], alone[0], atol=5e-5)


# ---- export in place of TorchScript ----------------------------------------------------------------------------------


class Subclassed(EncoderLayer):
    """A user's own layer: what TorchScript had to compile, jit and export have to trace."""


def exported(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Exports for the CPU, serialises, reads back."""
    made = jax.export.export(
        jax.jit(function), platforms=["cpu"], disabled_checks=jattn.export_disabled_checks()
    )(*arguments)
    return jax.export.deserialize(made.serialize()).call


@pytest.mark.parametrize("training", [False, True])
def test_T015_export_of_six_layers(training: bool) -> None:
    x = normal(1, 2, 4, 32)
    model = encoder(num_layers=6, num_heads=8)
    params = initial(model, x)
    call = exported(lambda params, x: model.apply(params, x, None, not training), params, x)
    close(call(params, x), model.apply(params, x, None, not training))


@pytest.mark.parametrize("training", [False, True])
def test_T016_subclassed_layer(training: bool) -> None:
    x = normal(1, 2, 4, 8)
    model = Subclassed(num_heads=4, hidden=32, attention_fn=attend_with(None))
    params = initial(model, x)
    mask = causal_mask(4)

    def function(params: Params, x: jax.Array) -> Any:
        return model.apply(params, x, mask, not training)

    plain = Subclassed(num_heads=4, hidden=32, attention_fn=nn.dot_product_attention)
    want = plain.apply(params, x, mask)
    close(function(params, x), want)
    close(jax.jit(function)(params, x), want)
    close(exported(function, params, x)(params, x), want)


@pytest.mark.parametrize("training", [False, True])
def test_T017_subclassed_layer_in_a_stack(training: bool) -> None:
    x = normal(1, 2, 4, 8)

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for i in range(6):
                x = Subclassed(4, 32, attend_with(None), name=f"layer_{i}")(x, None, not training)
            return x

    model = Stack()
    params = initial(model, x)
    want = model.apply(params, x)
    close(jax.jit(model.apply)(params, x), want)
    close(exported(model.apply, params, x)(params, x), want)


def test_T021_padding_of_either_side_takes_the_dense_path() -> None:
    """A mask runs dense, wherever its padding is: what may become ragged is asked of RaggedArray.from_mask."""
    x = normal(1, 1, 3, 2)
    model = encoder(num_heads=2, hidden=8)
    params = initial(model, x)
    plain = encoder(num_heads=2, hidden=8, attention_fn=nn.dot_product_attention)
    for keep in ([[1, 1, 0]], [[0, 1, 0]]):
        mask = key_mask(keep)
        counted = calls_of(lambda mask=mask: jax.jit(model.apply)(params, x, mask))  # type: ignore[misc]
        assert set(counted) == {"cpu"}
        close(model.apply(params, x, mask), plain.apply(params, x, mask))


# ---- what modules pass down ------------------------------------------------------------------------------------------


@pytest.mark.backends("cpu")
def test_T022_module_without_bias_parameters(backend: str) -> None:
    x = normal(1, 1, 5, 10)

    def run(name: str) -> Any:
        module = nn.MultiHeadDotProductAttention(
            num_heads=1, use_bias=False, attention_fn=attend_with(name)
        )
        return module.apply(initial(module, x), x)

    close(run(backend), run("reference"))


@pytest.mark.backends("cpu")
def test_T023_encoder_without_bias_parameters(backend: str) -> None:
    x = normal(1, 2, 3, 8)
    mask = key_mask([[1, 1, 0], [1, 0, 1]])
    for make in (layer, encoder):
        model = make(backend, use_bias=False)
        plain = make(use_bias=False, attention_fn=nn.dot_product_attention)
        params = initial(model, x)
        close(model.apply(params, x, mask), plain.apply(params, x, mask))


@pytest.mark.backends("cpu")
def test_T024_train_with_is_causal(backend: str) -> None:
    x = normal(1, 1, 4, 2)
    fn = jattn.flax.make_attention_fn(is_causal=True, implementation=backend)
    model = encoder(num_heads=1, hidden=4, activation="gelu", attention_fn=fn)
    params = initial(model, x)
    grads = jax.jit(jax.grad(lambda p: (model.apply(p, x, causal_mask(4)) ** 2).sum()))(params)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(grads))
    # is_causal alone is enough, and says the same as the mask.
    masked = encoder(backend, num_heads=1, hidden=4, activation="gelu")
    close(model.apply(params, x), masked.apply(params, x, causal_mask(4)))


def test_T024_causal_bias_object_makes_no_mask() -> None:
    q = normal(1, 1, 40, 2, 8)

    def attend(q: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(q, q, q, mask=jattn.causal_upper_left(40, 40))

    jaxpr = str(jax.make_jaxpr(attend)(q))
    assert "jattn_forward" in jaxpr
    assert "40,40" not in jaxpr.replace(" ", "")


def test_T025_ones_give_exactly_sixteen(backend: str) -> None:
    projected = jnp.full((1, 2, 1, 4), 4.0)
    out = jattn.dot_product_attention(
        projected, projected, projected, mask=causal_mask(2), is_causal=True, implementation=backend
    )
    assert (np.asarray(out) == 4.0).all()
    assert (np.asarray(out.reshape(1, 2, 4) @ jnp.ones((4, 4))) == 16.0).all()


def test_T025_head_dim_2_is_accepted(backend: str) -> None:
    """Any head dim up to the limit runs, in float32 too."""
    projected = jnp.full((1, 2, 1, 2), 4.0)
    out = jattn.dot_product_attention(
        projected, projected, projected, is_causal=True, implementation=backend
    )
    assert (np.asarray(out) == 4.0).all()


def test_T027_cross_attention_with_other_features() -> None:
    """TorchScript of kdim 256, vdim 256 against embed 128 becomes jit and export of cross-attention."""
    x, memory = normal(1, 2, 6, 128), normal(2, 2, 9, 256)

    def function(name: str | None) -> tuple[Callable[..., Any], Params]:
        module = nn.MultiHeadDotProductAttention(
            num_heads=8, qkv_features=128, attention_fn=attend_with(name)
        )
        return module.apply, initial(module, x, memory)

    apply, params = function(None)
    plain, _ = function("reference")
    want = plain(params, x, memory)
    close(jax.jit(apply)(params, x, memory), want)
    close(exported(apply, params, x, memory)(params, x, memory), want)


def test_T028_global_switch_retraces() -> None:
    x = normal(1, 1, 3, 2)
    model = encoder(num_heads=2, hidden=8)
    params = initial(model, x)
    apply = jax.jit(model.apply)
    assert set(calls_of(lambda: apply(params, x))) == {"cpu"}
    assert calls_of(lambda: apply(params, x)) == {}
    try:
        jattn.set_enabled(False)
        assert set(calls_of(lambda: apply(params, x))) == {"xla"}
        assert "jattn_forward" not in apply.lower(params, x).as_text()
    finally:
        jattn.set_enabled(True)
    assert "jattn_forward" in apply.lower(params, x).as_text()
