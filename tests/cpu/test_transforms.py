"""Rows J01, J03, J04: every JAX transformation of a call equals the call, for every backend."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import bernoulli, normal
from jax.test_util import check_grads

import jattn
import jattn.flax

Arrays = tuple[jax.Array, ...]
NAMES = ("q", "k", "v", "bias", "mask", "lengths", "segments")


def drawn(length: int = 12, heads: int = 4, kv_heads: int = 2, head_dim: int = 8) -> Arrays:
    """q, k, v, bias, mask, key lengths and segment ids of a problem with every kind of operand."""
    q, k, v = (normal(i, 3, length, n, head_dim) for i, n in enumerate((heads, kv_heads, kv_heads)))
    bias = normal(3, 1, heads, length, length)
    mask = bernoulli(4, 0.8, 3, 1, length, length)
    lengths = jnp.asarray([length, 5, 0], jnp.int32)
    segments = jnp.asarray(
        np.sort(np.random.default_rng(0).integers(-1, 2, (3, length)), axis=1), jnp.int32
    )
    return q, k, v, bias, mask, lengths, segments


def attend(backend: str, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """out and lse; rows without keys have lse 0 here, so that a loss over it stays finite."""
    q, k, v, bias, mask, lengths, segments = arrays
    out, lse = jattn.dot_product_attention(
        q,
        k,
        v,
        bias,
        mask,
        key_value_seq_lengths=lengths,
        segment_ids=segments,
        implementation=backend,
        return_lse=True,
    )
    return out, jnp.where(jnp.isfinite(lse), lse, 0)


def loss(backend: str, *arrays: jax.Array) -> jax.Array:
    out, lse = attend(backend, *arrays)
    return jnp.sin(out).sum() + (lse**2).sum()


def close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.shape(g) == np.shape(w)
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance)


def forward_calls(program: str) -> int:
    """Forward call sites of jattn in the text of a jaxpr."""
    return program.count("jattn_forward[")


def test_J01_jit_equals_the_plain_call(backend: str) -> None:
    arrays = drawn()
    function = functools.partial(attend, backend)
    np.testing.assert_array_equal(function(*arrays)[0], jax.jit(function)(*arrays)[0])
    grad = jax.grad(functools.partial(loss, backend), argnums=(0, 1, 2, 3))
    close(jax.jit(grad)(*arrays), grad(*arrays))


@pytest.mark.backends(
    "cpu"
)  # the rule lies above the backends; the others meet it in the next tests
@pytest.mark.parametrize(
    ("operand", "axis"), [(i, axis) for i in range(7) for axis in (0, 1, -1)], ids=str
)
def test_J01_vmap_over_one_operand(operand: int, axis: int, backend: str) -> None:
    """Any operand, mapped at any axis, the others shared."""
    arrays = drawn(length=6, head_dim=4)
    axis = axis % (arrays[operand].ndim + 1)
    stacked = jnp.stack([arrays[operand], jnp.roll(arrays[operand], 1, axis=0)], axis=axis)
    if operand == 3:
        stacked = jnp.stack([arrays[3], -arrays[3]], axis=axis)
    changed = (*arrays[:operand], stacked, *arrays[operand + 1 :])
    function = functools.partial(attend, backend)
    in_axes = tuple(axis if i == operand else None for i in range(7))
    got = jax.jit(jax.vmap(function, in_axes))(*changed)
    for i in range(2):
        alone = (*arrays[:operand], jnp.take(stacked, i, axis=axis), *arrays[operand + 1 :])
        close([x[i] for x in got], jax.jit(function)(*alone))


@pytest.mark.backends("xla", "cpu")
def test_J01_vmap_over_all_operands_and_twice(backend: str) -> None:
    arrays = drawn(length=6, head_dim=4)
    stacked = tuple(jnp.stack([x, jnp.roll(x, 1, axis=0)]) for x in arrays)
    function = functools.partial(attend, backend)
    got = jax.jit(jax.vmap(function, out_axes=1))(*stacked)
    twice = jax.jit(jax.vmap(jax.vmap(function)))(*(jnp.stack([x, x]) for x in stacked))
    for i in range(2):
        alone = function(*(x[i] for x in stacked))
        close([x[:, i] for x in got], alone)
        for j in range(2):
            close([x[j, i] for x in twice], alone)


@pytest.mark.parametrize(
    "mapped",
    [(0,), (0, 3), (0, 4), (0, 3, 4, 5, 6), (0, 1)],
    ids=["q", "q bias", "q mask", "q bias mask sinks slopes", "q k"],
)
@pytest.mark.backends("cpu", "xla")  # the rule lies above the backends
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_vmap_over_queries_that_share_keys(
    mapped: tuple[int, ...], kv_heads: int, backend: str
) -> None:
    """As beams share a prefix: the keys are not copied, where they are many, and the mapped axis is one of heads."""
    size, shapes = 3, ((2, 2, 4, 8), (2, 16, kv_heads, 8), (2, 16, kv_heads, 8))
    shapes = (*shapes, (1, 4, 1, 16), (2, 4, 2, 16), (4,), (2, 4))
    stacked = [normal(i, size, *shape) for i, shape in enumerate(shapes)]
    stacked[4] = bernoulli(4, 0.7, size, *shapes[4])
    arrays = [x if i in mapped else x[0] for i, x in enumerate(stacked)]
    table, lengths = normal(9, 4, 16), jnp.array([16, 9])

    def function(*x: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, bias, mask, sinks, slopes = x
        out, lse = jattn.dot_product_attention(
            q,
            k,
            v,
            bias,
            mask,
            sinks=sinks,
            alibi_slopes=slopes,
            key_value_seq_lengths=lengths,
            score_mod=lambda s, b, h, i, j: s + table[h, j] * (b + i + 1),
            implementation=backend,
            return_lse=True,
        )
        return out, jnp.where(jnp.isfinite(lse), lse, 0)

    over = jax.vmap(function, tuple(0 if i in mapped else None for i in range(len(arrays))))
    program = str(jax.make_jaxpr(over)(*arrays))
    assert (f"k (2, 16, {kv_heads}, 8)" in program) == (1 not in mapped)
    assert (f"q float32 (2, 2, {size * 4}, 8)" in program) == (1 not in mapped)
    elements = [
        function(*(x[e] if i in mapped else x for i, x in enumerate(arrays))) for e in range(size)
    ]
    close(jax.jit(over)(*arrays), jax.tree.map(lambda *x: jnp.stack(x), *elements))


@pytest.mark.backends("cpu", "xla")
@pytest.mark.parametrize("queries", [2, 16], ids=["few queries", "many queries"])
def test_gradients_of_a_vmap_over_queries_that_share_keys(queries: int, backend: str) -> None:
    q, k, v = normal(0, 3, 2, queries, 4, 8), normal(1, 2, 16, 2, 8), normal(2, 2, 16, 2, 8)

    def loss(over: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        one = functools.partial(jattn.dot_product_attention, implementation=backend)
        return jnp.sin(over(lambda q: one(q, k, v, is_causal=True))(q)).sum()

    def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q: jnp.stack([function(x) for x in q])

    grad = jax.grad(loss, argnums=(1, 2, 3))
    close(jax.jit(functools.partial(grad, jax.vmap))(q, k, v), grad(in_turn, q, k, v))


@pytest.mark.parametrize("bias_mapped", [True, False])
def test_J01_vmap_of_grad(bias_mapped: bool, backend: str) -> None:
    """Gradients per example: also of an operand that all examples share (jax PR#36702)."""
    arrays = drawn(length=6, head_dim=4)
    stacked = tuple(
        x if i == 3 and not bias_mapped else jnp.stack([x, jnp.roll(x, 1, axis=0)])
        for i, x in enumerate(arrays)
    )
    in_axes = tuple(None if i == 3 and not bias_mapped else 0 for i in range(7))
    grad = jax.grad(functools.partial(loss, backend), argnums=(0, 1, 2, 3))
    got = jax.jit(jax.vmap(grad, in_axes))(*stacked)
    for i in range(2):
        alone = tuple(x if a is None else x[i] for x, a in zip(stacked, in_axes, strict=True))
        close([x[i] for x in got], jax.jit(grad)(*alone), 5e-5)


@pytest.mark.backends("xla", "cpu")
def test_J01_grad_of_vmap(backend: str) -> None:
    arrays = drawn(length=6, head_dim=4)
    stacked = tuple(jnp.stack([x, jnp.roll(x, 1, axis=0)]) for x in arrays)

    def total(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        return jax.vmap(functools.partial(loss, backend))(q, k, v, bias, *stacked[4:]).sum()

    got = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(*stacked[:4])
    grad = jax.grad(functools.partial(loss, backend), argnums=(0, 1, 2, 3))
    for i in range(2):
        close([x[i] for x in got], jax.jit(grad)(*(x[i] for x in stacked)), 5e-5)


@pytest.mark.parametrize(
    ("policy", "calls"),
    [(None, 2), ("jattn", 1), ("everything", 1)],
    ids=["recompute-all", "jattn-policy", "save-all"],
)
def test_J01_checkpoint_recomputes_what_its_policy_says(
    policy: str | None, calls: int, backend: str
) -> None:
    """The ready-made policy keeps out and lse, so the forward pass is not run again in the backward."""
    arrays = drawn()
    policies = {
        None: None,
        "jattn": jattn.checkpoint_policy,
        "everything": jax.checkpoint_policies.everything_saveable,
    }
    block = jax.checkpoint(functools.partial(loss, backend), policy=policies[policy])
    grad = jax.grad(lambda q: block(jnp.sin(q), *arrays[1:]))
    assert forward_calls(str(jax.make_jaxpr(grad)(arrays[0]))) == calls
    close(
        jax.jit(grad)(arrays[0]),
        jax.jit(jax.grad(lambda q: loss(backend, jnp.sin(q), *arrays[1:])))(arrays[0]),
    )


def test_J01_an_empty_mapped_axis() -> None:
    """Also of gradients, of operands that broadcast too."""
    x, bias = jnp.zeros((0, 2, 5, 2, 8)), jnp.zeros((1, 2, 5, 5))

    def loss(x: jax.Array, bias: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(x, x, x, bias).sum()

    grads = jax.vmap(jax.grad(loss, argnums=(0, 1)), (0, None))(x, bias)
    assert [g.shape for g in grads] == [x.shape, (0, *bias.shape)]


def test_J01_without_jit() -> None:
    q, k, v, *_ = drawn(length=6, head_dim=4)
    grad = jax.grad(lambda q: jattn.dot_product_attention(q, k, v, is_causal=True).sum())
    want = grad(q)
    with jax.disable_jit():
        np.testing.assert_array_equal(grad(q), want)


def test_J01_debug_nans_names_the_call() -> None:
    x = jnp.full((1, 4, 2, 8), jnp.nan)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="jattn_forward"):
        jattn.dot_product_attention(x, x, x)
    finite, lengths = x.at[:, :2].set(1.0), jnp.asarray([2])
    with jax.debug_nans(True):  # NaN in padding is nobody's
        jattn.dot_product_attention(
            finite, finite, finite, query_seq_lengths=lengths, key_value_seq_lengths=lengths
        )


def test_J01_scan_body(backend: str) -> None:
    arrays = drawn()

    def step(q: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, lse = attend(backend, q * scale, *arrays[1:])
        return out, lse.sum()

    scales = jnp.asarray([1.0, 0.5, 2.0])

    def scanned(q: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(step, q, scales)

    def unrolled(q: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums = []
        for scale in scales:
            q, total = step(q, scale)
            sums.append(total)
        return q, jnp.stack(sums)

    close(jax.jit(scanned)(arrays[0]), jax.jit(unrolled)(arrays[0]))
    gradients = [
        jax.jit(jax.grad(lambda q, f=f: f(q)[0].sum()))(arrays[0]) for f in (scanned, unrolled)
    ]  # type: ignore[misc]
    close(*gradients)


def exported(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.export.export(
        jax.jit(function), platforms=["cpu"], disabled_checks=jattn.export_disabled_checks()
    )(*arguments)


def test_J01_export_round_trip(backend: str) -> None:
    arrays = drawn()
    grad = jax.grad(functools.partial(loss, backend), argnums=(0, 1, 2, 3))
    for function in (functools.partial(attend, backend), grad):
        read_back = jax.export.deserialize(exported(function, *arrays).serialize())
        close(read_back.call(*arrays), jax.jit(function)(*arrays))


def test_J01_export_with_a_symbolic_batch(backend: str) -> None:
    q, k, v = drawn()[:3]
    [batch] = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (q, k, v)]

    def function(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        def total(*x: jax.Array) -> jax.Array:
            return jattn.dot_product_attention(*x, is_causal=True, implementation=backend).sum()

        return jax.value_and_grad(total, argnums=(0, 1, 2))(q, k, v)

    read_back = jax.export.deserialize(exported(function, *shapes).serialize())
    for count in (1, 3):
        some = [x[:count] for x in (q, k, v)]
        close(read_back.call(*some), jax.jit(function)(*some))


def test_J01_export_with_a_symbolic_batch_and_its_bias(backend: str) -> None:
    q, k, v, bias = drawn()[:4]
    bias = jnp.broadcast_to(bias, (q.shape[0], *bias.shape[1:]))
    [batch] = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (q, k, v, bias)]

    def function(*x: jax.Array) -> Any:
        def total(*x: jax.Array) -> jax.Array:
            return jattn.dot_product_attention(*x, implementation=backend).sum()

        return jax.value_and_grad(total, argnums=(0, 1, 2, 3))(*x)

    read_back = jax.export.deserialize(exported(function, *shapes).serialize())
    for count in (1, 3):
        some = [x[:count] for x in (q, k, v, bias)]
        close(read_back.call(*some), jax.jit(function)(*some))


@pytest.mark.backends("cpu")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_export_with_a_symbolic_batch_that_shares_a_bias(dtype: str, backend: str) -> None:
    """Entries add up the gradient of their bias in scratch memory, which one entry alone does without."""
    x, bias = jnp.ones((3, 512, 2, 16), dtype), jnp.zeros((1, 2, 512, 512), dtype)
    [batch] = jax.export.symbolic_shape("batch")

    def total(x: jax.Array, bias: jax.Array) -> jax.Array:
        out = jattn.dot_product_attention(x, x, x, bias, implementation=backend)
        return (out * x).astype(jnp.float32).sum()

    gradients = jax.grad(total, argnums=(0, 1))
    shape = jax.ShapeDtypeStruct((batch, *x.shape[1:]), dtype)
    program = exported(gradients, shape, jax.ShapeDtypeStruct(bias.shape, dtype))
    for count in (1, 2, 3):
        close(program.call(x[:count], bias), jax.jit(gradients)(x[:count], bias))


@pytest.mark.backends("reference", "xla")
def test_export_with_a_symbolic_number_of_heads(backend: str) -> None:
    [kv_heads] = jax.export.symbolic_shape("k")
    heads = {4: 2 * kv_heads, 2: kv_heads}

    def symbolic(x: jax.Array, axis: int) -> jax.ShapeDtypeStruct:
        shape = (*x.shape[:axis], heads[x.shape[axis]], *x.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    def function(*x: jax.Array) -> Any:
        def total(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
            keywords: dict[str, Any] = {"dropout_rate": 0.2, "dropout_seed": 3}
            return jattn.dot_product_attention(
                q, k, v, bias, is_causal=True, implementation=backend, **keywords
            ).sum()

        return jax.value_and_grad(total, argnums=(0, 1, 2, 3))(*x)

    q, k, v, bias = drawn()[:4]
    shapes = [symbolic(x, 2) for x in (q, k, v)] + [symbolic(bias, 1)]
    read_back = jax.export.deserialize(exported(function, *shapes).serialize())
    for count in (1, 2):
        some = (q[:, :, : 2 * count], k[:, :, :count], v[:, :, :count], bias[:, : 2 * count])
        close(read_back.call(*some), jax.jit(function)(*some))


def test_export_of_slopes_and_tangents_with_a_symbolic_length() -> None:
    """What the reference hands to the tiles: there is one of a symbolic length."""
    q, k, v = drawn()[:3]
    [length] = jax.export.symbolic_shape("length")
    shapes = [jax.ShapeDtypeStruct((3, length, *x.shape[2:]), x.dtype) for x in (q, k, v)]

    def function(*x: jax.Array) -> Any:
        def attend(q: jax.Array, slopes: jax.Array) -> jax.Array:
            return jattn.dot_product_attention(
                q, *x[1:], alibi_slopes=slopes, implementation="reference"
            )

        operands = (x[0], jnp.full(4, 0.1))
        grads = jax.grad(lambda *y: attend(*y).sum(), argnums=(0, 1))(*operands)
        return grads, jax.jvp(attend, operands, operands)[1]

    read_back = jax.export.deserialize(exported(function, *shapes).serialize())
    some = [x[:, :7] for x in (q, k, v)]
    close(read_back.call(*some), jax.jit(function)(*some))


def test_export_with_arguments_of_our_classes() -> None:
    """Exported programs are serialised with the structure of their arguments and results."""
    q = normal(0, 2, 6, 2, 4)
    ragged = jattn.RaggedArray.from_list([q[0], q[1, :3]], alignment=2)
    lower = jnp.tril(jnp.ones((1, 1, 3, 3), bool))
    masks = (
        jattn.BlockMask(lower, 6, 6, block_size=(2, 2)),
        jattn.causal_lower_right(6, 6),
        jattn.flax.StructuralMask(segment_ids=jnp.array([[0] * 6, [0, 0, 1, 1, 1, -1]])),
    )

    def function(q: jax.Array, ragged: jattn.RaggedArray, masks: Any) -> Any:
        blocks, causal, structure = masks
        attend = jattn.dot_product_attention
        return (
            jattn.ragged_dot_product_attention(ragged, ragged, ragged),
            attend(q, q, q, block_mask=blocks),
            attend(q, q, q, mask=causal),
            jattn.flax.attention_fn(q, q, q, mask=structure),
        )

    program = exported(function, q, ragged, masks)
    read = jax.export.deserialize(program.serialize())
    assert read.in_tree == program.in_tree
    got, want = read.call(q, ragged, masks), function(q, ragged, masks)
    assert isinstance(got[0], jattn.RaggedArray)
    assert (got[0].max_length, got[0].min_length) == (6, 3)
    close(got, want)


def test_export_with_a_mask_function_as_an_argument() -> None:
    mask = jattn.create_block_mask(lambda b, h, i, j: i >= j, None, None, 6, 6)
    program = exported(lambda mask: mask.materialize(), mask)
    with pytest.raises(
        ValueError, match=r"jattn\.BlockMask: .* make the object inside of the program"
    ):
        program.serialize()


@pytest.mark.parametrize("padded", ["keys", "queries", "segments"])
def test_second_derivatives_do_not_read_padding(padded: str, backend: str) -> None:
    q, k, v = (normal(i, 1, 4, 2, 8) for i in range(3))
    options: dict[str, Any] = {
        "keys": {"key_value_seq_lengths": jnp.array([2])},
        "queries": {"query_seq_lengths": jnp.array([2])},
        "segments": {"segment_ids": jnp.array([[0, 0, -1, -1]])},
    }[padded]

    @jax.jit
    def with_padding(number: jax.Array) -> list[jax.Array]:
        x, y, z = (
            a.at[:, 2:].set(number) if there else a
            for a, there in zip(
                (q, k, v), (padded != "keys", *[padded != "queries"] * 2), strict=True
            )
        )

        def loss(q: jax.Array, k: jax.Array) -> jax.Array:
            q, k = (jnp.where(jnp.isnan(b), b, a) for a, b in ((q, x), (k, y)))
            out = jattn.dot_product_attention(q, k, z, implementation=backend, **options)
            return (out**2).sum()

        def squared(q: jax.Array, k: jax.Array) -> jax.Array:
            return sum((g**2).sum() for g in jax.grad(loss, (0, 1))(q, k))

        over_reverse = jax.grad(squared, (0, 1))(q, k)
        over_forward = jax.grad(lambda q: jax.jvp(lambda q: loss(q, k), (q,), (q,))[1])(q)
        return [*over_reverse, over_forward]

    for got, want in zip(with_padding(jnp.nan), with_padding(0.0), strict=True):
        real = slice(None) if padded == "keys" else slice(2)
        assert np.asarray(want).any()
        np.testing.assert_array_equal(got[:, real], want[:, real])


@pytest.mark.parametrize("padded", ["lengths", "segments"])
def test_second_derivatives_do_not_read_incoming_gradients_of_padding(
    padded: str, backend: str
) -> None:
    q, k, v = (normal(i, 1, 4, 2, 8) for i in range(3))
    options: dict[str, Any] = {
        "lengths": {"query_seq_lengths": jnp.array([3]), "key_value_seq_lengths": jnp.array([3])},
        "segments": {"segment_ids": jnp.array([[0, 0, 0, -1]])},
    }[padded]

    @jax.jit
    def gradient(number: jax.Array) -> jax.Array:
        incoming = (
            jnp.ones((1, 4, 2, 8)).at[:, 3].set(number),
            jnp.ones((1, 4, 2)).at[:, 3].set(number),
        )

        def squared(v: jax.Array) -> jax.Array:
            def attend(q: jax.Array) -> Any:
                return jattn.dot_product_attention(
                    q, k, v, implementation=backend, return_lse=True, **options
                )

            return (jax.vjp(attend, q)[1](incoming)[0][:, :3] ** 2).sum()

        return jax.grad(squared)(v)[:, :3]

    np.testing.assert_array_equal(gradient(jnp.nan), gradient(0.0))


def small(kinds: str) -> tuple[Callable[..., Any], Arrays]:
    """A tiny float64 problem in q, k, v and bias, for numerical derivatives."""
    q = normal(0, 1, 3, 2, 2, dtype="float64")
    k, v = (normal(i, 1, 4, 1, 2, dtype="float64") for i in (1, 2))
    bias = normal(3, 1, 2, 3, 4, dtype="float64")
    options: dict[str, Any] = {
        "plain": {},
        "causal": {"is_causal": True, "causal_alignment": "lower_right"},
    }.get(kinds, {})
    if kinds == "softcap":
        options = {"logits_soft_cap": 2.0, "key_value_seq_lengths": jnp.asarray([3], jnp.int32)}

    def function(backend: str, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> Any:
        return jattn.dot_product_attention(
            q, k, v, bias, implementation=backend, return_lse=True, **options
        )

    return function, (q, k, v, bias)


@pytest.mark.parametrize("kinds", ["plain", "causal", "softcap"])
def test_J04_forward_mode(kinds: str, backend: str) -> None:
    """jax.jvp through every backend equals numerical differences, and never raises."""
    with jax.enable_x64(True):
        function, arrays = small(kinds)
        check_grads(
            jax.jit(functools.partial(function, backend)), arrays, order=1, modes=("fwd", "rev")
        )


@pytest.mark.backends("cpu")  # every backend is differentiated through the same blocked rule
@pytest.mark.parametrize("kinds", ["plain", "softcap"])
def test_J03_second_order(kinds: str, backend: str) -> None:
    with jax.enable_x64(True):
        function, arrays = small(kinds)
        check_grads(
            jax.jit(functools.partial(function, backend)), arrays, order=2, modes=("rev", "fwd")
        )


def test_J03_hessian_and_grad_of_grad(backend: str) -> None:
    with jax.enable_x64(True):
        function, (q, k, v, bias) = small("causal")

        def total(backend: str, q: jax.Array) -> jax.Array:
            out, lse = function(backend, q, k, v, bias)
            return jnp.sin(out).sum() + (lse**2).sum()

        hessian = jax.jit(jax.hessian(functools.partial(total, backend)))(q)
        flat = np.asarray(hessian).reshape(q.size, q.size)
        np.testing.assert_allclose(flat, flat.T, rtol=1e-9, atol=1e-12)
        by_reverse = jax.jit(jax.jacrev(jax.grad(functools.partial(total, backend))))(q)
        np.testing.assert_allclose(hessian, by_reverse, rtol=1e-9, atol=1e-12)
        step = 1e-5 * normal(5, *q.shape, dtype="float64")
        grad = jax.grad(functools.partial(total, backend))
        numeric = (grad(q + step) - grad(q - step)) / 2
        np.testing.assert_allclose(jnp.tensordot(hessian, step, 4), numeric, rtol=1e-6, atol=1e-13)


@functools.cache
def every_gradient(backend: str) -> Arrays:
    return jax.jit(jax.grad(functools.partial(loss, backend), argnums=(0, 1, 2, 3)))(*drawn())  # type: ignore[no-any-return]


@pytest.mark.parametrize("wanted", [("bias",), ("q",), ("k", "bias"), ("v",)], ids="-".join)
def test_J01_gradients_of_some_operands(wanted: tuple[str, ...], backend: str) -> None:
    """A bias-only gradient crashed elsewhere (pytorch PR#188302); every subset equals its part of the whole."""
    arrays, every = drawn(), every_gradient(backend)
    indices = tuple(NAMES.index(name) for name in wanted)
    some = jax.jit(jax.grad(functools.partial(loss, backend), argnums=indices))(*arrays)
    close(some, [every[i] for i in indices], 0.0 if backend == "cpu" else 1e-6)


def test_J01_integer_operands_have_no_gradient(backend: str) -> None:
    """vjp with respect to the masks and lengths gives float0, not an error."""
    arrays = drawn()
    _, pullback = jax.vjp(functools.partial(loss, backend), *arrays)
    cotangents = pullback(jnp.ones(()))
    assert [str(x.dtype) == "[('float0', 'V')]" for x in cotangents] == [False] * 4 + [True] * 3


@pytest.mark.backends("cpu", "xla")
@pytest.mark.parametrize("kind", ["plain", "causal, bias"])
def test_forward_mode_and_second_derivatives_over_several_tiles(kind: str, backend: str) -> None:
    """With 64 heads of all entries a tile has fewer queries and keys than these."""
    q, k, v, dq, dk, dv = (
        normal(i, 4, length, 16, 8) for i, length in enumerate((150, 200, 200) * 2)
    )
    bias, dbias = normal(6, 1, 16, 150, 200), normal(7, 1, 16, 150, 200)
    if kind == "plain":
        bias, dbias = 0 * bias, 0 * dbias
    is_causal = kind != "plain"

    def ours(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return jattn.dot_product_attention(
            q,
            k,
            v,
            bias,
            is_causal=is_causal,
            causal_alignment="lower_right",
            implementation=backend,
        )

    def dense(q: Any, k: Any, v: Any, bias: Any) -> Any:
        s = jnp.einsum("btnd,bsnd->bnts", q, k) / 8**0.5 + bias
        visible = jnp.arange(200) <= jnp.arange(150)[:, None] + 50
        s = jnp.where(visible | (not is_causal), s, -jnp.inf)
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(s), v)

    def hessian_product(attend: Any, primals: Any, tangents: Any) -> Any:
        gradient = jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2, 3))
        return jax.jvp(gradient, primals, tangents)[1]

    primals, tangents = (q, k, v, bias), (dq, dk, dv, dbias)
    for derivative in (lambda *x: jax.jvp(*x)[1], hessian_product):
        got, want = (
            jax.jit(derivative, static_argnums=0)(f, primals, tangents) for f in (ours, dense)
        )
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5 * float(jnp.abs(y).max()))


# Transposes of a vjp, as solvers of implicit equations take them, and of the call itself


def everything(backend: str) -> tuple[Callable[..., Any], dict[str, jax.Array]]:
    """A call with every kind of operand, as a function of those that have gradients; each query sees some key."""
    arrays = {
        "q": normal(0, 2, 5, 4, 3),
        "k": normal(1, 2, 6, 2, 3),
        "v": normal(2, 2, 6, 2, 3),
        "bias": normal(3, 1, 4, 1, 6),
        "sinks": normal(4, 4),
        "slopes": jnp.abs(normal(5, 2, 4)),
        "table": normal(6, 4, 6),
    }

    def function(x: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, lse = jattn.dot_product_attention(
            x["q"],
            x["k"],
            x["v"],
            x["bias"],
            sinks=x["sinks"],
            alibi_slopes=x["slopes"],
            key_value_seq_lengths=jnp.array([6, 4]),
            is_causal=True,
            score_mod=lambda s, b, h, i, j, t: s + t[h, j] * jnp.tanh(s),
            captures=(x["table"],),
            dropout_rate=0.25,
            dropout_seed=1,
            implementation=backend,
            return_lse=True,
        )
        return out, lse

    return function, arrays


@pytest.mark.backends("cpu")  # the rules lie above the backends
@pytest.mark.parametrize("results", ["out", "lse", "out and lse"])
def test_the_transpose_of_a_vjp_is_the_jvp(results: str, backend: str) -> None:
    function, arrays = everything(backend)
    taken = {"out": slice(0, 1), "lse": slice(1, 2), "out and lse": slice(0, 2)}[results]
    some = lambda x: function(x)[taken]  # noqa: E731
    directions = {name: normal(7, *x.shape) for name, x in arrays.items()}
    value, pullback = jax.vjp(some, arrays)
    of_all = jax.linear_transpose(lambda ct: pullback(ct)[0], value)
    tangents = jax.jvp(some, (arrays,), (directions,))[1]
    close(jax.jit(of_all)(directions)[0], tangents)
    twice = jax.linear_transpose(lambda moved: of_all(moved)[0], directions)
    close(twice(value)[0], pullback(value)[0])
    stacked = jax.tree.map(lambda x: jnp.stack([x, -2 * x]), directions)
    close(jax.vmap(of_all)(stacked)[0], jax.tree.map(lambda x: jnp.stack([x, -2 * x]), tangents))
    for name in ("k", "table"):
        alone = {key: directions[key] if key == name else 0 * x for key, x in arrays.items()}
        of_one = jax.linear_transpose(lambda ct, name=name: pullback(ct)[0][name], value)
        close(of_one(directions[name])[0], jax.jvp(some, (arrays,), (alone,))[1])


@pytest.mark.backends("cpu", "xla")
@pytest.mark.parametrize("solver", ["gmres", "bicgstab"])
def test_gradients_through_a_solver_over_a_vjp(solver: str, backend: str) -> None:
    """y = b + J'y / 10 with the Jacobian J of attention: transposed, so is the vjp."""
    x, b = normal(0, 1, 4, 2, 3), normal(1, 1, 4, 2, 3)

    def written_out(x: jax.Array) -> jax.Array:
        scores = jnp.einsum("btnd,bsnd->bnts", x, x) / jnp.sqrt(3.0)
        return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores, axis=-1), x)

    def solved(function: Callable[..., jax.Array], x: jax.Array, b: jax.Array) -> jax.Array:
        pullback = jax.vjp(function, x)[1]
        y = getattr(jax.scipy.sparse.linalg, solver)(lambda y: y - 0.1 * pullback(y)[0], b)[0]
        return jnp.sin(y).sum()

    ours = functools.partial(
        solved, lambda x: jattn.dot_product_attention(x, x, x, implementation=backend)
    )
    theirs = functools.partial(solved, written_out)
    close(jax.jit(jax.grad(ours, (0, 1)))(x, b), jax.jit(jax.grad(theirs, (0, 1)))(x, b), 1e-4)


def test_a_vjp_in_a_direction_is_the_kernel_again(backend: str) -> None:
    """Linear in the incoming gradients, the backward pass is its own derivative there."""
    function, arrays = everything(backend)
    value, pullback = jax.vjp(function, arrays)
    moved = jax.tree.map(jnp.sin, value)
    along = lambda ct, moved: jax.jvp(pullback, (ct,), (moved,))  # noqa: E731
    assert str(jax.make_jaxpr(along)(value, moved)).count("jattn_backward[") == 2
    at_value, tangents = along(value, moved)
    close(at_value, pullback(value))
    close(tangents, pullback(moved))


def test_the_transpose_in_value(backend: str) -> None:
    function, arrays = everything(backend)
    dout = normal(8, 2, 5, 4, 3)
    out_of = lambda v: function({**arrays, "v": v})[0]  # noqa: E731
    (want,) = jax.vjp(out_of, arrays["v"])[1](dout)
    transposed = jax.linear_transpose(out_of, arrays["v"])
    close(transposed(dout)[0], want)
    close(jax.jit(transposed)(dout)[0], want)
    of_query = lambda q: function({**arrays, "q": q})[0]  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"linear in value alone.*jax\.vjp gives"):
        jax.linear_transpose(of_query, arrays["q"])(dout)
