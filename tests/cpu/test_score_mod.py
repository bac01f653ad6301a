"""Score functions: what they compute, on what they may close over, how they transform, and what is refused.

F numbers are rows of the acceptance list of score functions; tests/score_mods.py has the functions and plain attention.
"""

import functools
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import normal
from instruction_sets import INSTRUCTION_SETS, force
from jax.test_util import check_grads
from score_mods import (
    SCORE_MODS,
    B,
    N,
    S,
    T,
    check_close,
    dense,
    deviations,
    gradients,
    operands,
    plain_results,
)

import jattn
from jattn.device_gradients import MAX_READS
from jattn.score_program import trace

pytestmark = pytest.mark.thinned  # most of their time goes into compiling

Array = Any
BACKENDS = ("cpu", "xla", "reference")


def attend(
    q: Array, k: Array, v: Array, score_mod: Any, captures: Any = (), **keywords: Any
) -> Any:
    return jattn.dot_product_attention(q, k, v, score_mod=score_mod, captures=captures, **keywords)


def qkv(length: int = 24, heads: int = 2, dtype: Any = "float32") -> tuple[Array, Array, Array]:
    q, k, v = (normal(seed, 2, length, heads, 8, dtype=dtype) for seed in range(3))
    return q, k, v


@pytest.mark.parametrize(
    ("name", "dtype", "backend"),
    [
        *((name, "float32", "cpu") for name in SCORE_MODS),
        *((name, "bfloat16", "cpu") for name in ("causal", "cap", "bias of head", "gain and bias")),
        *((name, "float16", "cpu") for name in ("documents", "square", "relative table")),
        *((name, "float32", "xla") for name in list(SCORE_MODS)[::2]),
        *((name, "bfloat16", "xla") for name in ("cap", "documents", "bias of head")),
    ],
)
def test_F100_results_and_gradients(name: str, dtype: str, backend: str) -> None:
    """Of q, k, v and every capture that is a float (F109); on every instruction set of the CPU kernel."""
    score_mod, captures = SCORE_MODS[name]
    q, k, v, dout = operands(dtype)

    def ours(q: Array, k: Array, v: Array, *captures: Array) -> Array:
        return attend(q, k, v, score_mod, captures, implementation=backend)

    def flat(*arrays: Array) -> list[Array]:
        out, grads = gradients(ours, arrays, dout)
        return [out, *grads]

    run = jax.jit(flat)
    arrays = [q, k, v, dout]
    low, exact = plain_results(score_mod, captures, arrays)
    spread = deviations(score_mod, captures, arrays)
    for instruction_set in INSTRUCTION_SETS if backend == "cpu" else [""]:
        force(instruction_set)
        check_close(jax.device_get(run(q, k, v, *captures)), low, exact, spread)


@pytest.mark.parametrize("backend", BACKENDS)
def test_F101_indices_in_their_order_and_from_0(backend: str) -> None:
    """A function of the indices alone: the weights are known."""
    q, k, v, _ = operands("float32")
    v = np.zeros_like(v)
    v[..., 0] = np.arange(S)[None, :, None]  # the expected key

    def last(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return jnp.where(k == (q + 3 * h + 7 * b) % S, 0.0, -jnp.inf)

    out = attend(q, k, v, last, implementation=backend)[..., 0]
    b, t, h = np.ogrid[:B, :T, :N]
    np.testing.assert_array_equal(out, np.broadcast_to((t + 3 * h + 7 * b) % S, out.shape))


def test_F102_composition() -> None:
    q, k, v = qkv()

    def first(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return jnp.tanh(s) + h

    def second(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return jnp.where(q >= k, s * (k + 1) / 8, -jnp.inf)

    out = attend(q, k, v, lambda s, *ids: second(first(s, *ids), *ids))
    want, _ = dense(q, k, v, lambda s, *ids: second(first(s, *ids), *ids))
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_array_equal(
        out[:, 0], jnp.repeat(v[:, :1], 1, 1)[:, 0]
    )  # the first key alone


def test_F103_scale() -> None:
    q, k, v = qkv()
    by_hand = attend(q, k, v, lambda s, *_: s * 8**-0.5, scale=1.0)
    np.testing.assert_allclose(by_hand, jattn.dot_product_attention(q, k, v), atol=2e-6)
    np.testing.assert_allclose(attend(q, k, v, lambda s, *_: s), by_hand, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_F104_log_sum_exp_and_its_gradient(backend: str) -> None:
    score_mod, captures = SCORE_MODS["relative table"]
    q, k, v, _ = operands("float32")

    def ours(q: Array, table: Array) -> Array:
        return attend(q, k, v, score_mod, (table,), return_lse=True, implementation=backend)[1]

    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, *captures)]
        want, pull = jax.vjp(
            lambda q, table: dense(q, jnp.asarray(k), jnp.asarray(v), score_mod, (table,))[1], *wide
        )
        of_q, of_table = pull(jnp.cos(want))
    lse, pull = jax.vjp(ours, jnp.asarray(q), jnp.asarray(captures[0]))
    np.testing.assert_allclose(lse, want, atol=2e-5)
    dq, dtable = pull(jnp.cos(lse))
    np.testing.assert_allclose(dq, of_q, atol=2e-5)
    np.testing.assert_allclose(dtable, of_table, atol=1e-4)


# ---- Block masks ---------------------------------------------------------------------------------------------------

IDS = np.sort(np.random.default_rng(0).integers(0, 5, (B, S)), axis=1).astype(np.int32)
MASK_MODS: dict[str, tuple[Callable[..., Any], int | None, int | None]] = {
    "causal": (lambda b, h, q, k: q >= k, None, None),
    "window": (lambda b, h, q, k: abs(q - k) <= 12, None, None),
    "documents": (lambda b, h, q, k: jnp.asarray(IDS)[b, q] == jnp.asarray(IDS)[b, k], B, None),
    "of heads": (lambda b, h, q, k: k % (h + 2) == 0, None, N),
    "half": (lambda b, h, q, k: (q // 32 * 7 + k // 16 * 5 + b + h) % 2 == 0, B, N),
    "empty rows and columns": (lambda b, h, q, k: (q < 32) & (k >= 64), None, None),
    "nothing": (lambda b, h, q, k: q < 0, None, None),
}


def visible_pairs(mask_mod: Callable[..., Any]) -> Array:
    for axis in (3, 2, 1, 0):
        mask_mod = jax.vmap(mask_mod, tuple(0 if i == axis else None for i in range(4)))
    return mask_mod(*(jnp.arange(n, dtype=jnp.int32) for n in (B, N, T, S)))


@pytest.mark.parametrize("block_size", [32, (16, 48), 128])
@pytest.mark.parametrize("name", MASK_MODS)
def test_F105_F106_block_masks(name: str, block_size: Any) -> None:
    """Blocks hold exactly what is visible, and attention with them is that with the whole mask."""
    mask_mod, batch, heads = MASK_MODS[name]
    block_mask = jattn.create_block_mask(mask_mod, batch, heads, T, S, block_size)
    visible = np.asarray(visible_pairs(mask_mod))
    assert block_mask.shape == (batch or 1, heads or 1, T, S)
    shown = np.broadcast_to(np.asarray(block_mask.materialize()), visible.shape)
    np.testing.assert_array_equal(shown, visible)
    sizes = block_mask.block_size
    for i, j in np.ndindex(block_mask.blocks.shape[2:]):
        block = visible[:, :, i * sizes[0] : (i + 1) * sizes[0], j * sizes[1] : (j + 1) * sizes[1]]
        want = block.any((2, 3))[: batch or 1, : heads or 1]
        np.testing.assert_array_equal(block_mask.blocks[:, :, i, j], want)
    hidden = 1 - np.asarray(block_mask.blocks).mean()
    np.testing.assert_allclose(block_mask.sparsity(), 100 * hidden, atol=1e-4)

    again = jattn.BlockMask.from_kv_blocks(*block_mask.kv_blocks(), T, S, sizes, mask_mod)
    np.testing.assert_array_equal(again.blocks, block_mask.blocks)

    q, k, v, dout = operands("float32")

    def ours(q: Array, k: Array, v: Array) -> Array:
        return jattn.dot_product_attention(q, k, v, block_mask=again)

    out, grads = gradients(ours, (q, k, v), dout)
    want, wanted = gradients(
        lambda q, k, v: dense(q, k, v, lambda s, *_: s, visible=visible)[0], (q, k, v), dout
    )
    for a, b in zip((out, *grads), (want, *wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_F105_blocks_hide_whatever_the_function_says() -> None:
    """The blocks are no hint (F043)."""
    q, k, v = qkv(64)
    blocks = jattn.BlockMask.from_kv_blocks(
        jnp.array([[[1, 1]]]), jnp.array([[[[1, 0], [0, 9]]]]), 64, 64, 32
    )
    assert blocks.blocks[0, 0].tolist() == [[False, True], [True, False]]
    other = np.kron(np.array([[0, 1], [1, 0]], bool), np.ones((32, 32), bool))
    want = jattn.dot_product_attention(q, k, v, mask=jnp.asarray(other))
    out = jattn.dot_product_attention(q, k, v, block_mask=blocks)
    np.testing.assert_array_equal(out, want)
    both = jattn.dot_product_attention(q, k, v, block_mask=blocks, mask=jnp.arange(64) < 40)
    np.testing.assert_allclose(
        both, jattn.dot_product_attention(q, k, v, mask=other & (np.arange(64) < 40)), atol=1e-6
    )


def test_F107_other_blocks_need_no_new_trace() -> None:
    q, k, v = qkv(64)
    traces = []

    @jax.jit
    def run(mask: jattn.BlockMask) -> Array:
        traces.append(1)
        return jattn.dot_product_attention(q, k, v, block_mask=mask)

    def causal(b: Array, h: Array, q: Array, k: Array) -> Array:
        return q >= k

    one = jattn.create_block_mask(causal, 1, 1, 64, 64, 16)
    two = jattn.BlockMask(~one.blocks, 64, 64, (16, 16), causal)
    assert not np.allclose(run(one), run(two))
    assert len(traces) == 1


def test_block_masks_of_further_batch_axes_and_of_documents_inside_jit() -> None:
    q, k, v = (x.reshape(2, 1, *x.shape[1:]) for x in qkv(40))
    ids = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 4, (2, 40)), 1))

    @jax.jit
    def run(ids: Array) -> Array:
        mask = jattn.create_block_mask(
            lambda b, h, q, k: ids[b, q] == ids[b, k], 2, None, 40, 40, 8
        )
        return jattn.dot_product_attention(q, k, v, block_mask=mask)

    np.testing.assert_allclose(
        run(ids),
        jattn.dot_product_attention(q, k, v, segment_ids=ids[:, None]),
        atol=1e-6,
    )


# ---- Captures ------------------------------------------------------------------------------------------------------


def with_table(table: Array, ids: Array) -> Callable[..., Array]:
    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return jnp.where(ids[q] == ids[k], s + table[h, q] * table[h, k], -jnp.inf)

    return score_mod


def captured() -> tuple[Array, Array]:
    return normal(5, 2, 24), jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, 24)))


@pytest.mark.parametrize("how", ["concrete", "jit", "grad", "scan", "vmap", "explicit"])
def test_F108_what_a_function_closes_over(how: str) -> None:
    """Floats and integers: known arrays, arguments of jit and grad, carries of loops, mapped ones, and captures=."""
    q, k, v = qkv()
    table, ids = captured()
    want = dense(q, k, v, with_table(table, ids))[0]

    def run(table: Array, ids: Array) -> Array:
        return attend(q, k, v, with_table(table, ids))

    if how == "concrete":
        out = run(table, ids)
    elif how == "jit":
        out = jax.jit(run)(table, ids)
    elif how == "grad":
        got = jax.jit(jax.grad(lambda t, i: (run(t, i) ** 2).sum()))(table, ids)
        exact = jax.grad(lambda t: (dense(q, k, v, with_table(t, ids))[0] ** 2).sum())(table)
        np.testing.assert_allclose(got, exact, atol=1e-4)
        return
    elif how == "scan":
        (_, _), outs = jax.lax.scan(lambda c, _: (c, run(*c)), (table, ids), None, length=2)
        out = outs[1]
    elif how == "vmap":
        out = jax.vmap(run)(jnp.stack([table, 2 * table]), jnp.stack([ids, ids]))[0]
    else:

        def score_mod(
            s: Array, b: Array, h: Array, q: Array, k: Array, t: Array, i: Array
        ) -> Array:
            return with_table(t, i)(s, b, h, q, k)

        out = attend(q, k, v, score_mod, (table, ids))
    np.testing.assert_allclose(out, want, atol=2e-6)


class Module:
    """Has a score function that reads what the module holds at the moment of the call."""

    table: Array

    def score_mod(self, s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return s + self.table[h, q] * self.table[h, k]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["", "jit"])
def test_F108_one_function_object_reads_what_it_closes_over_at_each_call(transform: Any) -> None:
    q, k, v = qkv()
    table, ids = captured()
    module = Module()
    score_mod = module.score_mod  # the same object each time

    def run(table: Array) -> Array:
        module.table = table
        return attend(q, k, v, score_mod)

    def plain(table: Array) -> Array:
        return dense(q, k, v, with_table(table, jnp.zeros_like(ids)))[0]

    exact = jax.grad(lambda t: (plain(t) ** 2).sum())
    for factor in (1, 2):
        np.testing.assert_allclose(transform(run)(factor * table), plain(factor * table), atol=2e-6)
        got = transform(jax.grad(lambda t: (run(t) ** 2).sum()))(factor * table)
        np.testing.assert_allclose(got, exact(factor * table), atol=1e-3)


def test_derivatives_that_close_over_traced_arrays_are_refused() -> None:
    q, k, v = qkv()

    @jax.jit
    def run(table: Array) -> Array:
        @jax.custom_jvp
        def gain(s: Array) -> Array:
            return s * table[0, 0]

        gain.defjvp(lambda primals, tangents: (gain(*primals), table[0, 0] * tangents[0]))
        return attend(q, k, v, lambda s, b, h, q, k: gain(s))

    with pytest.raises(TypeError, match=r"custom_jvp rule closes over a traced array.*captures="):
        run(captured()[0])


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_F112_vmap_over_operands_and_captures(axes: tuple[int | None, int | None]) -> None:
    """Of q and of the table; gradients of what is shared are summed, of what is mapped kept apart."""
    q, k, v = qkv()
    table, ids = captured()
    mapped_q = jnp.stack([q, 2 * q, q - 1]) if axes[0] == 0 else q
    mapped_table = jnp.stack([table, -table, table + 1]) if axes[1] == 0 else table

    def loss(function: Callable[..., Array]) -> Callable[..., Array]:
        return lambda q, table: (function(q, table) ** 2).sum((1, 2, 3))

    def ours(q: Array, table: Array) -> Array:
        return attend(q, k, v, with_table(table, ids))

    def plain(q: Array, table: Array) -> Array:
        return dense(q, k, v, with_table(table, ids))[0]

    for function in (
        lambda f: jax.vmap(f, axes)(mapped_q, mapped_table),
        lambda f: jax.vmap(jax.grad(lambda *x: loss(f)(*x).sum(), (0, 1)), axes)(
            mapped_q, mapped_table
        ),
        lambda f: jax.grad(lambda *x: jax.vmap(f, axes)(*x).sum() ** 2, (0, 1))(
            mapped_q, mapped_table
        ),
        lambda f: jax.vmap(lambda *x: jax.jvp(f, x, x)[1], axes)(mapped_q, mapped_table),
    ):
        got, want = (jax.tree.leaves(function(f)) for f in (ours, plain))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=3e-4 * max(1.0, float(jnp.abs(b).max())))


def test_F112_vmap_of_vmap_and_checkpoint() -> None:
    q, k, v = qkv(16)
    tables = normal(7, 3, 2, 2, 16)

    def run(function: Callable[..., Array], table: Array) -> Array:
        score_mod = lambda s, b, h, q, k: jnp.tanh(s + table[h, k] * (b + 1))  # noqa: E731
        return function(q, k, v, score_mod)

    def both(function: Callable[..., Array]) -> Array:
        return jax.vmap(jax.vmap(jax.checkpoint(lambda t: run(function, t))))(tables)

    np.testing.assert_allclose(
        both(attend), both(lambda q, k, v, f: dense(q, k, v, f)[0]), atol=2e-6
    )
    got, want = (
        jax.grad(lambda t, f=f: (jax.checkpoint(lambda t: run(f, t))(t) ** 2).sum())(tables[0, 0])
        for f in (attend, lambda q, k, v, f: dense(q, k, v, f)[0])
    )
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reads", ["captures", "indices"])
def test_F112_vmap_over_residuals(reads: str, backend: str) -> None:
    """Of a branch that some elements choose, zeros in those of the others; and of functions that jax.vjp gave."""
    q, k, v = qkv()
    table, _ = captured()
    chosen, queries = jnp.array([False, True, True]), jnp.stack([q, 2 * q, q - 1])

    def with_indices(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return s * (1 + 0.1 * b + 0.3 * h)

    def with_captures(s: Array, b: Array, h: Array, q: Array, k: Array, table: Array) -> Array:
        return s * (1 + table[h, k])

    def attention(plain: bool, q: Array, table: Array) -> Array:
        captures = (table,) if reads == "captures" else ()
        score_mod = with_captures if captures else with_indices
        if plain:
            return dense(q, k, v, score_mod, captures)[0]
        return attend(q, k, v, score_mod, captures, implementation=backend)

    def branches(plain: bool, flag: Array, q: Array, table: Array) -> Array:
        attended = lambda *x: (attention(plain, *x) ** 2).sum()  # noqa: E731
        return jax.lax.cond(flag, attended, lambda q, table: (q**2).sum() + table.sum(), q, table)

    def both(plain: bool) -> list[Array]:
        of_branches = jax.vmap(jax.grad(functools.partial(branches, plain), (1, 2)), (0, None, 0))
        results = [of_branches(chosen, q, jnp.stack([table, -table, 2 * table]))]
        out, pull = jax.vmap(lambda q: jax.vjp(lambda *x: attention(plain, *x), q, table))(queries)
        results += [out, jax.vmap(lambda pull, x: pull(x))(pull, out)]
        return jax.tree.leaves(results)

    for got, want in zip(both(plain=False), both(plain=True), strict=True):
        np.testing.assert_allclose(got, want, atol=3e-4 * max(1.0, float(jnp.abs(want).max())))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_F112_vmap_over_no_element(backend: str, axes: tuple[int | None, int | None]) -> None:
    q, table = (
        jnp.zeros((0, *x.shape), x.dtype) if axis == 0 else x
        for x, axis in zip((qkv()[0], captured()[0]), axes, strict=True)
    )
    _, k, v = qkv()
    ids = captured()[1]

    def run(q: Array, table: Array) -> Array:
        return attend(q, k, v, with_table(table, ids), implementation=backend)

    def grads(q: Array, table: Array) -> tuple[Array, Array]:
        return jax.grad(lambda *x: (run(*x) ** 2).sum(), (0, 1))(q, table)

    def moved(q: Array, table: Array) -> Array:
        return jax.jvp(grads, (q, table), (q, table))[1]

    of_q, of_table = (0, 2, 24, 2, 8), (0, 2, 24)
    assert jax.jit(jax.vmap(run, axes))(q, table).shape == of_q
    for function in (grads, moved):
        found = jax.jit(jax.vmap(function, axes))(q, table)
        assert [x.shape for x in found] == [of_q, of_table]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(0, 4, 4, 2), (2, 0, 4, 2), (2, 4, 0, 2), (2, 4, 4, 0)])
def test_gradients_of_captures_that_no_pair_reads(
    backend: str, sizes: tuple[int, int, int, int]
) -> None:
    batch, q_len, kv_len, heads = sizes
    q, k = jnp.ones((batch, q_len, heads, 8)), jnp.ones((batch, kv_len, heads, 8))

    def loss(table: Array) -> Array:
        return attend(q, k, k, lambda s, b, h, q, k: s * table[h], implementation=backend).sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones(3)), 0)


@pytest.mark.parametrize("symbolic", [("b", "3"), ("2", "n"), ("b", "n")])
def test_exported_with_mapped_captures_and_symbolic_extents(symbolic: tuple[str, str]) -> None:
    """Of the batch, of the mapped axis, or of both."""
    q, k, v = (normal(seed, 3, 2, 8, 2, 4) for seed in range(3))
    table = normal(4, 3, 2, 8)

    def grads(q: Array, k: Array, v: Array, table: Array) -> Array:
        def loss(q: Array, table: Array) -> Array:
            def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
                return s * table[h, k] + b * table[h, q]

            return (attend(q, k, v, score_mod, implementation="xla") ** 2).sum()

        return jax.grad(loss, (0, 1))(q, table)

    run = jax.jit(jax.vmap(grads))
    of_batch, mapped = symbolic
    scope = jax.export.SymbolicScope()
    qkv_shape, table_shape = (
        jax.export.symbolic_shape(text, scope=scope)
        for text in (f"{mapped}, {of_batch}, 8, 2, 4", f"{mapped}, 2, 8")
    )
    types = [
        *[jax.ShapeDtypeStruct(qkv_shape, jnp.float32)] * 3,
        jax.ShapeDtypeStruct(table_shape, jnp.float32),
    ]
    exported = jax.export.export(run)(*types)
    got, want = exported.call(q, k, v, table), run(q, k, v, table)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_exported_with_captures_of_a_symbolic_batch() -> None:
    """Kernels need to know how large arrays are, and say so; the others run them."""
    q, k, v = qkv()
    table = normal(3, 2, 2)
    [batch] = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in (q, k, v, table)]

    def grads(backend: str, *arrays: Array) -> Array:
        def loss(q: Array, k: Array, v: Array, table: Array) -> Array:
            score_mod = lambda s, b, h, q, k: s * table[b, h]  # noqa: E731
            return (attend(q, k, v, score_mod, implementation=backend) ** 2).sum()

        return jax.grad(loss, (0, 1, 2, 3))(*arrays)

    for backend in ("xla", "reference"):
        run = jax.jit(functools.partial(grads, backend))
        got, want = jax.export.export(run)(*shapes).call(q, k, v, table), run(q, k, v, table)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    says = r"SYMBOLIC: score_mod is float32\[b, 2\]"
    with pytest.warns(UserWarning, match=says), pytest.raises(jattn.NoBackendError, match=says):
        jax.export.export(jax.jit(functools.partial(grads, "cpu")))(*shapes)


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        *((dtype, backend) for dtype in ("bfloat16", "float16") for backend in ("cpu", "xla")),
        ("float8_e5m2", "xla"),
    ],
)
def test_gradients_of_narrow_captures_are_summed_in_float32(dtype: str, backend: str) -> None:
    """Ones: the sum of a gradient's terms over many tiles is exact in float32, and far off in 16 bits."""
    q, k, v = qkv(1024)
    scale = jnp.ones((2,), dtype)

    def loss(scale: Array) -> Array:
        def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
            return s + scale[h].astype(s.dtype)

        return attend(q, k, v, score_mod, return_lse=True, implementation=backend)[1].sum()

    np.testing.assert_array_equal(jax.grad(loss)(scale), jnp.full(2, 2 * 1024, dtype))


@pytest.mark.parametrize(
    ("backend", "function", "order"),
    # There is no sinh of float64 in the kernel. Second derivatives are the same program for both.
    [("cpu", lambda x: x + x * x * x / 6, 2), ("xla", jnp.sinh, 1)],
    ids=("cpu", "xla"),
)
def test_F109_against_finite_differences(
    backend: str, function: Callable[[Array], Array], order: int
) -> None:
    q, k, v = (normal(seed, 1, 9, 2, 4) for seed in range(3))
    table = normal(4, 2, 20)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in (q, k, v, table)]

        @jax.jit
        def run(q: Array, k: Array, v: Array, table: Array) -> Array:
            def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
                learned = jnp.asarray(table)[h, q - k + 9]
                return jnp.where(k <= q + 4, function(s / 2) * learned, -jnp.inf)

            return attend(q, k, v, score_mod, implementation=backend)

        check_grads(run, wide, order=order, modes=["fwd", "rev"], atol=1e-4, rtol=1e-4)


def test_a_capture_that_can_be_made_an_array() -> None:
    """As parameters of Flax models can."""
    q, k, v = (normal(i, 1, 6, 2, 8) for i in range(3))
    table = normal(3, 2, 6)

    class Parameter:
        def __init__(self, value: jax.Array) -> None:
            self.value = value

        def __jax_array__(self) -> jax.Array:
            return self.value

    def loss(wrap: Callable[[jax.Array], Any], table: jax.Array) -> jax.Array:
        out = jattn.dot_product_attention(
            q, k, v, score_mod=lambda s, b, h, i, j, t: s + t[h, j], captures=(wrap(table),)
        )
        return jnp.sin(out).sum()

    got, want = (jax.grad(functools.partial(loss, f))(table) for f in (Parameter, jnp.asarray))
    np.testing.assert_array_equal(got, want)


LOOPS: dict[str, Callable[..., Any]] = {
    "fori_loop": lambda f, s, j: jax.lax.fori_loop(0, 2, lambda n, x: f(x, j), s),
    "scan": lambda f, s, j: jax.lax.scan(lambda x, n: (f(x, j), None), s, None, length=2)[0],
    "while_loop": lambda f, s, j: jax.lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1], j)), (0, s)
    )[1],
    "map": lambda f, s, j: jax.lax.map(lambda x: f(s * x, j), jnp.ones(2)).sum() / 2,
    "switch": lambda f, s, j: jax.lax.switch(j % 2, [f, lambda x, j: x], s, j),
}


@pytest.mark.parametrize("nested", [False, True], ids=["jit", "jit in jit"])
@pytest.mark.parametrize("loop", LOOPS)
def test_functions_that_differ_in_an_array_inside_of_a_loop(loop: str, nested: bool) -> None:
    """A jitted helper, called in a loop, closes over the array: the body of the loop holds it."""
    q, k, v = (normal(i, 1, 4, 2, 8) for i in range(3))
    tables = [jnp.zeros(4), jnp.array([0.0, 5.0, 2.0, -3.0])]

    def attend(table: jax.Array) -> jax.Array:
        helper = jax.jit(lambda x, j: x + table[j])
        inner = jax.jit(lambda x, j: helper(x, j) + 0) if nested else helper
        return jattn.dot_product_attention(
            q,
            k,
            v,
            score_mod=lambda s, b, h, i, j: LOOPS[loop](inner, s, j),
            implementation="xla",
        )

    alone = []
    for table in tables:
        jax.clear_caches()
        alone.append(attend(table))
    assert float(jnp.abs(alone[0] - alone[1]).max()) > 0.1
    for found in ([attend(table) for table in tables], jax.jit(lambda: [*map(attend, tables)])()):
        for got, want in zip(found, alone, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_capture_that_is_used_elsewhere_too() -> None:
    q, k, v = qkv()
    table, ids = captured()

    def loss(function: Callable[..., Array], table: Array) -> Array:
        return (function(q * table[0, 0], k, v, with_table(table, ids)) * table[1, 1]).sum()

    got = jax.grad(lambda t: loss(attend, t))(table)
    want = jax.grad(lambda t: loss(lambda *x: dense(*x)[0], t))(table)
    np.testing.assert_allclose(got, want, atol=1e-4)


# ---- Errors --------------------------------------------------------------------------------------------------------

ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "F080 a capture that is no array": (
        {"score_mod": lambda s, b, h, q, k, x: s, "captures": (2.0,)},
        TypeError,
        r"captures\[0\] is 2.0, must be an array",
    ),
    "F080 captures that are no tuple": (
        {"score_mod": lambda s, b, h, q, k, x: s, "captures": np.ones(3)},
        TypeError,
        "must be a tuple of arrays",
    ),
    "captures without a function": ({"captures": (np.ones(3),)}, ValueError, "without score_mod"),
    "no function": ({"score_mod": 3}, TypeError, "score_mod is 3, must be a function"),
    "F082 several results": (
        {"score_mod": lambda s, b, h, q, k: (s, s)},
        TypeError,
        "Expected output of score_mod to be a tensor. Got type tuple",
    ),
    "F082 no result": (
        {"score_mod": lambda s, b, h, q, k: None},
        TypeError,
        "Expected output of score_mod to be a tensor. Got type NoneType",
    ),
    "F082 an array": (
        {"score_mod": lambda s, b, h, q, k: jnp.ones(3)},
        TypeError,
        r"float scalar. Got float32\[3\]",
    ),
    "F082 a bool": ({"score_mod": lambda s, b, h, q, k: q >= k}, TypeError, r"Got bool\[\]"),
    "F082 an integer": ({"score_mod": lambda s, b, h, q, k: k}, TypeError, r"Got int32\[\]"),
    "F083 a print": (
        {"score_mod": lambda s, b, h, q, k: [jax.debug.print("{}", s), s][1]},
        ValueError,
        "Mutations detected in score_mod",
    ),
    "F087 too few arguments": (
        {"score_mod": lambda s, b, h, q: s},
        TypeError,
        "must take 5 arguments: score_mod",
    ),
    "F087 too few captures": (
        {"score_mod": lambda s, b, h, q, k, x: s},
        TypeError,
        "with 0 captures",
    ),
    "F015 an if": (
        {"score_mod": lambda s, b, h, q, k: s if q >= k else -s},
        jax.errors.TracerBoolConversionError,
        "boolean",
    ),
    "no forward derivative": (
        {"score_mod": lambda s, b, h, q, k: _reverse_only(s)},
        TypeError,
        "jax.custom_jvp rule",
    ),
    "no block mask": ({"block_mask": np.ones(3)}, TypeError, "must be a jattn.BlockMask"),
    "F086 lengths": (
        {"block_mask": jattn.BlockMask(np.ones((1, 1, 1, 1), bool), 24, 25, (128, 128))},
        ValueError,
        "the scores are",
    ),
    "F086 heads": (
        {"block_mask": jattn.BlockMask(np.ones((1, 3, 1, 1), bool), 24, 24, (128, 128))},
        ValueError,
        "the scores are",
    ),
}


@jax.custom_vjp
def _reverse_only(x: Array) -> Array:
    return x


_reverse_only.defvjp(lambda x: (x, None), lambda _, g: (g,))


@pytest.mark.whole
@pytest.mark.parametrize("name", ERRORS)
def test_F110_errors(name: str) -> None:
    keywords, error, text = ERRORS[name]
    with pytest.raises(error, match=text) as caught:
        jattn.dot_product_attention(*qkv(), **keywords)
    if name.startswith("F015"):
        assert any("jnp.where" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("how", ["shard_map", "vmap"])
def test_the_index_on_a_named_axis(how: str) -> None:
    """It is computed outside of the function; in branches, too."""
    q, k, v = qkv()

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        place = jax.lax.axis_index("x").astype(jnp.float32)
        return jax.lax.cond(q > k, lambda: s * (2 + jax.lax.axis_index("x")), lambda: s + place)

    def run(*x: Array) -> Array:
        if how == "vmap":
            return jax.vmap(lambda *x: attend(*x, score_mod), axis_name="x")(*x)
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("x")
        return jax.shard_map(
            lambda *x: attend(*x, score_mod), mesh=mesh, in_specs=spec, out_specs=spec
        )(*x)

    def plain(*x: Array) -> Array:
        def of_entry(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
            place = b if how == "vmap" else 0
            return jnp.where(q > k, s * (2 + place), s + place)

        return dense(*x, of_entry)[0]

    np.testing.assert_allclose(run(q, k, v), plain(q, k, v), atol=2e-6)
    got, want = (
        jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2))(q, k, v) for f in (run, plain)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(
    ("score_mod", "name"),
    [
        (lambda s, b, h, q, k: s + jax.lax.psum(s, "x"), "psum"),
        (
            lambda s, b, h, q, k: jax.lax.fori_loop(
                0, 3, lambda i, x: x + jax.lax.axis_index("x"), s
            ),
            "axis_index",
        ),
    ],
    ids=("psum", "loop"),
)
def test_collectives_for_each_pair_are_refused(score_mod: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"score_mod has {name} over .'x'."):
        jax.vmap(lambda *x: attend(*x, score_mod), axis_name="x")(*qkv())


def test_F111_writes() -> None:
    q, k, v = qkv()
    reference = jax.new_ref(jnp.zeros(3))

    def writes(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        reference[0] = s
        return s

    with pytest.raises(ValueError, match="Mutations detected in score_mod"):
        attend(q, k, v, writes)
    table = jnp.ones(24)

    def assigns(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        table[q] = s  # type: ignore[index]
        return s

    with pytest.raises(TypeError, match="immutable"):
        attend(q, k, v, assigns)


# ---- Rows without keys, tails, equal programs ------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_of_batch_entries_of_which_there_are_none(backend: str) -> None:
    x, table = jnp.ones((0, 4, 2, 8)), jnp.ones(3)
    out = attend(x, x, x, lambda s, b, h, q, k: s + table[b], implementation=backend)
    assert out.shape == x.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_of_what_does_not_read_the_score(backend: str) -> None:
    q, k, v = qkv(4)

    def weigh(q: Array, k: Array) -> Array:
        return jnp.where(q >= k, -0.1 * (q - k), -jnp.inf)

    def loss(attention: Any, *arrays: Array) -> Array:
        return (attention(*arrays) ** 2).sum()

    def ours(q: Array, k: Array, v: Array) -> Array:
        return attend(q, k, v, lambda s, b, h, q, k: weigh(q, k), implementation=backend)

    def plain(q: Array, k: Array, v: Array) -> Array:
        weights = jax.nn.softmax(weigh(*jnp.mgrid[:4, :4]))
        return jnp.einsum("ts,bsnd->btnd", weights, v)

    for function in (jax.hessian, lambda f, places: jax.jacrev(jax.grad(f, places), places)):
        got, want = (
            function(functools.partial(loss, f), (0, 1, 2))(q, k, v) for f in (ours, plain)
        )
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_where_a_capture_hides_keys(backend: str) -> None:
    """By the logarithm of 0, whose derivative is infinite."""
    q, k, v = qkv(4)
    table = jnp.array([1.0, 0.0, 0.5, 1.0])

    def loss(attention: Any, *arrays: Array) -> Array:
        return (attention(*arrays) ** 2).sum()

    def ours(q: Array, table: Array) -> Array:
        return attend(q, k, v, lambda s, b, h, i, j: s + jnp.log(table[j]), implementation=backend)

    def plain(q: Array, table: Array) -> Array:
        s = jnp.einsum("btnd,bsnd->bnts", q, k) / math.sqrt(8)
        added = jnp.log(jnp.where(table > 0, table, 1))
        return jnp.einsum(
            "bnts,bsnd->btnd", jax.nn.softmax(jnp.where(table > 0, s + added, -jnp.inf)), v
        )

    for tangent in (jnp.zeros(4), jnp.array([1.0, 0.0, 0.0, 2.0])):
        got, want = (
            jax.jvp(jax.grad(functools.partial(loss, f), (0, 1)), (q, table), (k, tangent))[1]
            for f in (ours, plain)
        )
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_F113_rows_without_keys(backend: str) -> None:
    q, k, v = qkv()

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return jnp.where((q != 5) & (k != 7), jnp.log(s * s), -jnp.inf)

    def run(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        out, lse = attend(q, k, v, score_mod, return_lse=True, implementation=backend)
        return out, lse

    (out, lse), pull = jax.vjp(run, q, k, v)
    assert (out[:, 5] == 0).all()
    assert (lse[:, 5] == -jnp.inf).all()
    dq, dk, dv = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    assert (dq[:, 5] == 0).all()
    assert (dk[:, 7] == 0).all()
    assert (dv[:, 7] == 0).all()
    for x in (dq, dk, dv):
        assert jnp.isfinite(x).all()


@pytest.mark.parametrize("length", [1, 17, 127, 129, 1000])
def test_F114_lengths_off_the_blocks(length: int) -> None:
    """Reads at the edges: an index beyond the table would be another value."""
    q, k, v = (normal(seed, 1, length, 2, 8) for seed in range(3))
    table = normal(4, length)

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return s * table.at[q].get(mode="fill", fill_value=jnp.nan) + table.at[k].get(
            mode="fill", fill_value=jnp.nan
        )

    out, grads = gradients(
        lambda q, k, v, t: attend(q, k, v, _reading(t)), (q, k, v, table), jnp.ones_like(q)
    )
    want, wanted = gradients(
        lambda q, k, v, t: dense(q, k, v, _reading(t))[0], (q, k, v, table), jnp.ones_like(q)
    )
    np.testing.assert_allclose(attend(q, k, v, score_mod), want, atol=5e-6)
    for a, b in zip((out, *grads), (want, *wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(1.0, float(jnp.abs(b).max())))


def _reading(table: Array) -> Callable[..., Array]:
    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        filled = {"mode": "fill", "fill_value": jnp.nan}
        return s * table.at[q].get(**filled) + table.at[k].get(**filled)

    return score_mod


def test_F115_equal_functions_are_one_program() -> None:
    table = normal(0, 4)

    def made(table: Array, factor: float = 2.0) -> Any:
        return trace(lambda s, b, h, q, k: jax.nn.softplus(s) * factor + table[h], (), 2)[0]

    assert made(table) == made(2 * table)
    assert hash(made(table)) == hash(made(2 * table))
    assert made(table) != made(table, 3.0)
    assert made(table) != made(table[:3])


def test_equal_functions_are_differentiated_once() -> None:
    """Calls outside of jit have the program of the call before them, which keeps no array that the function reads."""
    key = jax.random.key(0)

    def made(table: Array, dtype: str = "float32", batch: int = 2) -> Any:
        def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
            return jnp.where(q >= k, s * 3 + table[h].real, -jnp.inf) + jax.random.uniform(key)

        return trace(score_mod, (), batch, dtype)[0]

    table = normal(0, 4)
    program = made(table)
    assert made(2 * table) is program
    kept = weakref.ref(table)
    del table
    gc.collect()
    assert kept() is None
    for other in (
        made(normal(0, 5)),
        made(normal(0, 4).astype(jnp.complex64)),
        made(normal(0, 4), batch=3),
    ):
        assert other != program
    with jax.enable_x64(True):
        assert made(normal(0, 4), "float64") != program


def test_F115_derivatives_tell_programs_apart() -> None:
    """The same operations with another derivative are another program."""

    @jax.custom_jvp
    def straight_through(x: Array) -> Array:
        return jnp.floor(x)

    straight_through.defjvp(lambda x, t: (jnp.floor(x[0]), t[0]))
    plain, _ = trace(lambda s, b, h, q, k: jnp.floor(s), (), 2)
    other, _ = trace(lambda s, b, h, q, k: straight_through(s), (), 2)
    assert plain != other
    q, k, v = qkv()
    grads = jax.grad(lambda q: attend(q, k, v, lambda s, *_: straight_through(s))[..., 0].sum())(q)
    assert jnp.abs(grads).max() > 0
    flat = jax.grad(lambda q: attend(q, k, v, lambda s, *_: jnp.floor(s))[..., 0].sum())(q)
    assert (flat == 0).all()


def test_slopes_that_are_one() -> None:
    """Masks and biases are known to leave gradients of scores as they are."""
    table = normal(0, 4)
    units = {
        "identity": lambda s, b, h, q, k: s,
        "bias": lambda s, b, h, q, k: s + table[h] - (q - k),
        "mask": lambda s, b, h, q, k: jnp.where(q >= k, s + table[h], -jnp.inf),
        "mask by zero": lambda s, b, h, q, k: s + jnp.where(q >= k, 0.0, -jnp.inf),
        "either": lambda s, b, h, q, k: jnp.where(q >= k, s, s + 1),
    }
    others = {
        "double": lambda s, b, h, q, k: s + s,
        "minus": lambda s, b, h, q, k: 1 - s,
        "constant": lambda s, b, h, q, k: jnp.where(q >= k, s, -1e9),
        "of the score": lambda s, b, h, q, k: jnp.where(s > 0, s, -jnp.inf),
        "no score": lambda s, b, h, q, k: table[h] + 0 * q,
        "rounded": lambda s, b, h, q, k: s.astype(jnp.bfloat16),
    }
    for name, function in (units | others).items():
        program, _ = trace(function, (), 2)
        assert program.has_unit_slope == (name in units), name
        mapped = program.mapped(3, [True] * len(program.captures))
        assert mapped.has_unit_slope == (name in units), name


@jax.custom_jvp
def _shifted(x: Array) -> Array:
    return x + 1


_shifted.defjvp(lambda x, t: (x[0] + 1, 3 * t[0]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_slopes_of_functions_with_rules(backend: str) -> None:
    """What such a function does to the score says nothing about its derivative; of a table it does not matter."""
    q, k, v = qkv()
    table = normal(0, 2)

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return jnp.where(q >= k, jax.jit(_shifted)(s) + table[h], -jnp.inf)

    assert not trace(score_mod, (), 2)[0].has_unit_slope
    assert trace(lambda s, b, h, q, k: s + _shifted(table[h]), (), 2)[0].has_unit_slope
    dout = normal(3, *q.shape)
    got = gradients(lambda *x: attend(*x, score_mod, implementation=backend), (q, k, v), dout)
    want = gradients(lambda *x: dense(*x, score_mod)[0], (q, k, v), dout)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("what", ["identity", "causal", "bias", "cap", "slopes"])
def test_F116_the_same_as_our_arguments(what: str) -> None:
    q, k, v = qkv()
    bias, slopes = normal(3, 2, 24, 24), normal(4, 2)
    score_mod, keywords = {
        "identity": (lambda s, b, h, q, k: s, {}),
        "causal": (lambda s, b, h, q, k: jnp.where(q >= k, s, -jnp.inf), {"is_causal": True}),
        "bias": (lambda s, b, h, q, k: s + bias[h, q, k], {"bias": bias}),
        "cap": (lambda s, b, h, q, k: 3 * jnp.tanh(s / 3), {"logits_soft_cap": 3.0}),
        "slopes": (lambda s, b, h, q, k: s - slopes[h] * abs(q - k), {"alibi_slopes": slopes}),
    }[what]
    want = jattn.dot_product_attention(q, k, v, implementation="xla", **keywords)
    np.testing.assert_allclose(attend(q, k, v, score_mod), want, atol=2e-6)


def test_positions_stand_for_indices() -> None:
    q, k, v = qkv()
    at_q, at_k = (
        jnp.arange(24)[None] + jnp.array([[3], [-5]]),
        2 * jnp.arange(24)[None].repeat(2, 0),
    )
    shifted = attend(
        q,
        k,
        v,
        lambda s, b, h, q, k: s + (q - k) / 8,
        query_positions=at_q,
        key_value_positions=at_k,
    )
    bias = (at_q[:, None, :, None] - at_k[:, None, None, :]) / 8
    np.testing.assert_allclose(shifted, jattn.dot_product_attention(q, k, v, bias), atol=2e-6)


def test_F117_gradients_of_captures_that_have_no_order_on_a_gpu() -> None:
    """Asked for the same bits every time, they are refused where XLA adds them up; those of q, k and v are not."""
    q, k, v = qkv(dtype="bfloat16")
    table = jnp.ones(24)

    def loss(q: Array, table: Array, reads: int) -> Array:
        def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
            return s + sum(table[(k + i) % 24] for i in range(reads))

        return attend(q, k, v, score_mod).sum()

    few, many = (functools.partial(loss, reads=n) for n in (MAX_READS, MAX_READS + 1))
    with jattn.target_device(jattn.Device("cuda", arch=(9, 0))), jattn.deterministic("strict"):
        jax.eval_shape(jax.grad(few, 1), q, table)
        jax.eval_shape(jax.grad(many, 0), q, table)
        with pytest.raises(jattn.NoBackendError, match="captures") as caught:
            jax.eval_shape(jax.grad(many, 1), q, table)
        assert [reason.code for reason in caught.value.reasons] == ["DETERMINISTIC"]
        with jattn.sdpa_kernel("xla"), pytest.raises(jattn.NoBackendError, match="captures"):
            jax.eval_shape(jax.grad(few, 1), q, table)
    with jattn.deterministic("strict"):
        jax.grad(many, 1)(q, table)


def test_the_fallback_says_why() -> None:
    """The CPU kernel runs no functions of some operations: it says so, and XLA stands in."""
    q, k, v = qkv()

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return s + jax.lax.lgamma(1.0 + q)

    found = jattn.explain(q, k, v, score_mod=score_mod)
    assert found.chosen == "xla"
    assert [reason.code for reason in found.reasons["cpu"]] == ["PRIMITIVE"]
    assert "score_mod" in str(found)
    with pytest.warns(jattn.FallbackWarning, match="score_mod"):
        attend(q, k, v, score_mod)
    warned = pytest.warns(UserWarning, match="score_mod")
    with warned, pytest.raises(jattn.NoBackendError, match="lgamma"):
        attend(q, k, v, score_mod, implementation="cpu")


def test_the_cpu_kernel_runs_functions() -> None:
    """Chosen by itself, forward and backward, under transformations too; nothing stands in."""
    q, k, v = qkv()
    before = jattn.call_counters()

    def loss(q: Array) -> Array:
        return attend(q, k, v, lambda s, b, h, q, k: jnp.tanh(s) * (h + 1)).sum()

    jax.jit(jax.vmap(jax.grad(loss)))(jnp.stack([q, q]))
    after = jattn.call_counters()
    counted = {name for name in after if after[name] != before.get(name)}
    assert counted == {"cpu"}


def test_cases_are_selected_in_the_kernel() -> None:
    """``jnp.select`` asks for the first of its conditions that holds: kernels have no arrays of them."""

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return jnp.select([i < 3, j > 5, i == j], [s * 2, s * 3, s - 1], s)

    q, k, v = (
        jax.random.normal(key, (1, 9, 2, 8)) for key in jax.random.split(jax.random.key(1), 3)
    )

    def results(backend: str) -> Any:
        attend = functools.partial(
            jattn.dot_product_attention, score_mod=score_mod, implementation=backend
        )
        out, pull = jax.vjp(attend, q, k, v)
        return (out, *pull(jnp.cos(out)))

    for got, want in zip(results("cpu"), results("reference"), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("backend", ["cpu", "xla", "reference"])
def test_the_magnitude_of_the_least_integer_is_no_index(backend: str) -> None:
    """It is the least integer itself: clamped to the begin of the array, as JAX does, and nothing is read before it."""
    indices = jnp.asarray([-(2**31), 2**31 - 1, -1, 0, 8, 9, -9, -10] * 9, jnp.int32)
    keys = jax.random.normal(jax.random.key(0), (1, 72, 1, 8))

    def total(table: Any) -> Any:
        out = jattn.dot_product_attention(
            jnp.ones((1, 10, 2, 8)),
            keys,
            keys,
            score_mod=lambda s, b, h, i, j, table, x: s + table[jnp.abs(x[j])],
            captures=(table, indices),
            implementation=backend,
        )
        return jnp.sin(out).sum()

    table = jnp.arange(9.0) / 4
    got, slope = jax.jit(jax.value_and_grad(total))(table)
    assert jnp.isfinite(got)
    # Of all numbers in question only 0 and the least integer name the first element.
    moved = total(table.at[0].add(1e-2)) - total(table.at[0].add(-1e-2))
    np.testing.assert_allclose(slope[0], moved / 2e-2, rtol=2e-2, atol=2e-4)
