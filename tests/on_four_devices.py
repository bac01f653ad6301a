"""A program for four devices, virtual ones of a CPU or GPUs, and one backend, its argument.

Prints one line of JSON: name of a check -> "ok" or what was wrong.
Run by tests in a process of its own, because the number of devices is fixed when JAX starts.
"""

import functools
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import random_cuts
from drawn import normal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jattn

CHECKS: dict[str, Callable[[str], None]] = {}
BACKENDS = ("cpu", "xla")  # xla in part: it compiles long, and what cuts a call knows no backend
GPU_BACKENDS = ("flash", "mem_efficient")
DEVICES = 4
DTYPES = {"flash": "bfloat16"}  # of the others: float32


def check(function: Callable[[str], None]) -> Callable[[str], None]:
    CHECKS[function.__name__] = function
    return function


def mesh(shape: tuple[int, ...], *names: str) -> Mesh:
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def explicit(shape: tuple[int, ...], *names: str) -> Mesh:
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Explicit,) * len(names))


def dtype_of(backend: str) -> str:
    return DTYPES.get(backend, "float32")


def drawn(
    backend: str,
    batch: int = 4,
    length: int = 40,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 16,
) -> list[jax.Array]:
    """q, k, v, dout."""
    return [
        normal(i, batch, length, n, head_dim, dtype=dtype_of(backend))
        for i, n in enumerate((heads, kv_heads, kv_heads, heads))
    ]


def value_and_grads(backend: str, **keywords: Any) -> Callable[..., Any]:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        attend = functools.partial(jattn.dot_product_attention, implementation=backend, **keywords)
        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(dout)

    return run


def close(got: Any, want: Any, sums: float = 0.0) -> None:
    """sums: of the magnitudes that are added up in another order on a mesh, four roundings of which are allowed.

    Numbers of 16 bits that are summed over devices are rounded on each of them first: four roundings of the greatest.
    """
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype, (g.dtype, w.dtype)
        a, b = (np.asarray(x, np.float32) for x in (g, w))
        if w.dtype == jnp.float32:
            rtol, atol = 2e-5, 2e-5 + sums * 2.0**-21
        else:
            rtol = 2 * float(jnp.finfo(w.dtype).eps)
            atol = rtol * float(np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def collectives(compiled: Any) -> set[str]:
    return set(
        re.findall(r"\b(all-gather|all-to-all|collective-permute|all-reduce)\b", compiled.as_text())
    )


def sharded(
    backend: str, spec: PartitionSpec, the_mesh: Mesh, arrays: list[jax.Array], **keywords: Any
) -> Any:
    """Lowers with all four arrays sharded by `spec`, checks the values, returns the compiled program."""
    run = value_and_grads(backend, **keywords)
    want = jax.jit(run)(*arrays)
    sharding = NamedSharding(the_mesh, spec)
    placed = [jax.device_put(x, sharding) for x in arrays]
    compiled = jax.jit(run).lower(*placed).compile()
    got = compiled(*placed)
    close(got, want)
    for result in got:
        assert result.sharding.is_equivalent_to(sharding, 4), f"result is sharded {result.sharding}"
    return compiled


@check
def batch_sharding_gathers_nothing(backend: str) -> None:
    compiled = sharded(backend, PartitionSpec("x"), mesh((4,), "x"), drawn(backend), is_causal=True)
    assert not collectives(compiled), collectives(compiled)


@check
def head_sharding_gathers_nothing(backend: str) -> None:
    compiled = sharded(
        backend,
        PartitionSpec(None, None, "x"),
        mesh((4,), "x"),
        drawn(backend, heads=8, kv_heads=4),
    )
    assert not collectives(compiled), collectives(compiled)


@check
def batch_and_head_sharding_gathers_nothing(backend: str) -> None:
    arrays = drawn(backend, heads=4, kv_heads=2)
    compiled = sharded(backend, PartitionSpec("x", None, "y"), mesh((2, 2), "x", "y"), arrays)
    assert not collectives(compiled), collectives(compiled)


@check
def more_shards_than_kv_heads(backend: str) -> None:
    """Each of two key/value heads lies on two of four devices: only their gradients are sent."""
    for the_mesh, axes in ((mesh((4,), "x"), "x"), (mesh((2, 2), "x", "y"), ("x", "y"))):
        arrays = drawn(backend, heads=8, kv_heads=2)
        over_heads = NamedSharding(the_mesh, PartitionSpec(None, None, axes))
        whole = NamedSharding(the_mesh, PartitionSpec())
        placed = jax.device_put(tuple(arrays), (over_heads, whole, whole, over_heads))
        run = value_and_grads(backend, is_causal=True)
        results = (over_heads, over_heads, whole, whole)
        compiled = jax.jit(run, out_shardings=results).lower(*placed).compile()
        got = compiled(*placed)
        close(got, jax.jit(run)(*arrays))
        # Gradients of keys and values are summed over two devices, then gathered, for they are asked for whole.
        assert collectives(compiled) <= {"all-reduce", "all-gather"}, collectives(compiled)
        forward = functools.partial(jattn.dot_product_attention, implementation=backend)
        compiled = jax.jit(forward).lower(*placed[:3]).compile()
        out = compiled(*placed[:3])
        assert out.sharding.is_equivalent_to(over_heads, 4), f"out is sharded {out.sharding}"
        assert not collectives(compiled), collectives(compiled)


@check
def kv_heads_of_a_product_cut_over_more_devices(backend: str) -> None:
    """The columns of a projection are cut over four devices: two key/value heads over two, their head dims over two."""
    q, _, _, dout = drawn(backend, heads=8)
    shapes = (*q.shape[:2], 24), (24, 32), (24, 32)
    x, w_k, w_v = (normal(5 + i, *s, dtype=dtype_of(backend)) for i, s in enumerate(shapes))

    def loss(q: Any, x: Any, w_k: Any, w_v: Any) -> Any:
        # XLA's products of float32 on GPUs round to tf32 otherwise, in another way for each cut.
        products = (jnp.matmul(x, w, precision="highest") for w in (w_k, w_v))
        k, v = (product.reshape(*x.shape[:2], 2, 16) for product in products)
        out = jattn.dot_product_attention(q, k, v, implementation=backend)
        return (out * dout).astype(jnp.float32).sum()

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    the_mesh = mesh((4,), "x")
    columns = NamedSharding(the_mesh, PartitionSpec(None, "x"))
    over_heads = NamedSharding(the_mesh, PartitionSpec(None, None, "x"))
    placed = jax.device_put((q, x, w_k, w_v), (over_heads, over_heads, columns, columns))
    # A gradient of a weight adds up 4 * 40 products of magnitude 3.
    close(run(*placed), run(q, x, w_k, w_v), sums=480)


@check
def a_part_of_a_cut_axis(backend: str) -> None:
    """Six of eight batch entries, or three of four heads, that lie on four devices: shards of unequal size."""
    the_mesh = mesh((4,), "x")
    x, dout = (normal(i, 8, 16, 4, 16, dtype=dtype_of(backend)) for i in (1, 2))

    def of_entries(x: Any) -> Any:
        return jattn.dot_product_attention(x[:6], x[1:7], x[1:7], implementation=backend)

    def of_heads(x: Any) -> Any:
        x = x[:, :, :3]
        return jattn.dot_product_attention(x, x, x, implementation=backend)

    for attend, spec in ((of_entries, ("x",)), (of_heads, (None, None, "x"))):

        def loss(x: Any, attend: Callable[..., Any] = attend) -> Any:
            out = attend(x).astype(jnp.float32)
            return (out * dout[: out.shape[0], :, : out.shape[2]]).sum()

        placed = jax.device_put(x, NamedSharding(the_mesh, PartitionSpec(*spec)))
        close(jax.jit(jax.grad(loss))(placed), jax.jit(jax.grad(loss))(x))


@check
def a_cache_that_is_cut_more_finely_than_the_query_stays(backend: str) -> None:
    """A step of decoding: the query is whole on every device, or cut over a part of the mesh."""
    the_mesh = mesh((2, 2), "x", "y")
    q, k, v, _ = drawn(backend, length=64, heads=8, kv_heads=4)
    arrays = [q[:, :1], k, v, q[:, 1:2]]
    run = value_and_grads(backend, key_value_seq_lengths=jnp.asarray([3, 64, 20, 41], jnp.int32))
    want = jax.jit(run)(*arrays)
    cache = NamedSharding(the_mesh, PartitionSpec("x", None, "y"))
    for spec in (PartitionSpec(), PartitionSpec("x"), PartitionSpec(None, None, "y")):
        query = NamedSharding(the_mesh, spec)
        places = (query, cache, cache, query)
        placed = [jax.device_put(x, to) for x, to in zip(arrays, places, strict=True)]
        compiled = jax.jit(run).lower(*placed).compile()
        close(compiled(*placed), want)
        assert not collectives(compiled), (spec, collectives(compiled))


@check
def an_operand_that_is_cut_otherwise_moves_if_it_is_the_smaller_one(backend: str) -> None:
    the_mesh = mesh((4,), "x")
    q, k, v, _ = drawn(backend, length=64, heads=8, kv_heads=4)
    placed = [
        jax.device_put(x, NamedSharding(the_mesh, spec))
        for x, spec in (
            (q[:, :1], PartitionSpec("x")),
            (k, PartitionSpec(None, None, "x")),
            (v, PartitionSpec(None, None, "x")),
        )
    ]
    attend = functools.partial(jattn.dot_product_attention, implementation=backend)
    compiled = jax.jit(attend).lower(*placed).compile()
    assert compiled(*placed).sharding.spec == PartitionSpec(None, None, "x")
    assert collectives(compiled) <= {"all-to-all"}, collectives(compiled)
    moved = re.findall(r"\[([\d,]+)\][^=\n]*? all-to-all\(", compiled.as_text())
    sizes = [math.prod(map(int, extents.split(","))) for extents in moved]
    assert max(sizes, default=0) <= placed[0].size, sizes


@check
def length_sharding_is_right(backend: str) -> None:
    """Cut along the queries it may communicate, but it must be right."""
    arrays = drawn(backend)
    the_mesh = mesh((4,), "x")
    run = value_and_grads(backend, is_causal=True)
    placed = [jax.device_put(x, NamedSharding(the_mesh, PartitionSpec(None, "x"))) for x in arrays]
    close(jax.jit(run)(*placed), jax.jit(run)(*arrays))


@check
def masks_and_lengths_are_cut_with_the_batch(backend: str) -> None:
    arrays = drawn(backend)
    rng = np.random.default_rng(0)
    bias = jnp.asarray(rng.standard_normal((4, 1, 40, 40)), jnp.float32)
    lengths = jnp.asarray([40, 3, 0, 17], jnp.int32)
    segments = jnp.asarray(np.sort(rng.integers(-1, 3, (4, 40)), axis=1), jnp.int32)

    def run(q: Any, k: Any, v: Any, bias: Any, lengths: Any, segments: Any) -> Any:
        def attend(*x: Any) -> Any:
            return jattn.dot_product_attention(
                *x, key_value_seq_lengths=lengths, segment_ids=segments, implementation=backend
            )

        out, pullback = jax.vjp(attend, q, k, v, bias)
        return out, *pullback(jnp.ones_like(out))

    operands = [*arrays[:3], bias, lengths, segments]
    sharding = NamedSharding(mesh((4,), "x"), PartitionSpec("x"))
    placed = [jax.device_put(x, sharding) for x in operands]
    compiled = jax.jit(run).lower(*placed).compile()
    close(compiled(*placed), jax.jit(run)(*operands))
    assert not collectives(compiled), collectives(compiled)


@check
def shard_map_over_the_batch(backend: str) -> None:
    arrays = drawn(backend)
    run = value_and_grads(backend, is_causal=True)
    spec = PartitionSpec("x")
    mapped = jax.shard_map(run, mesh=mesh((4,), "x"), in_specs=spec, out_specs=spec)
    close(jax.jit(mapped)(*arrays), jax.jit(run)(*arrays))


@check
def cotangents_of_replicated_operands_are_summed(backend: str) -> None:
    """Keys, values and bias are whole on every device, queries are cut: their gradients are sums over the devices."""
    q, k, v, dout = drawn(backend)
    k, v = k[:1], v[:1]
    bias = normal(9, 1, 4, 40, 40)
    batch, whole = PartitionSpec("x"), PartitionSpec()

    def local(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return jattn.dot_product_attention(q, k, v, bias, implementation=backend)

    mapped = jax.shard_map(
        local, mesh=mesh((4,), "x"), in_specs=(batch, whole, whole, whole), out_specs=batch
    )

    def plain(q: Any, k: Any, v: Any, bias: Any) -> Any:
        repeated = (jnp.broadcast_to(x, (4, *x.shape[1:])) for x in (k, v))
        return jattn.dot_product_attention(q, *repeated, bias, implementation=backend)

    def gradients(function: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: (function(*x) * dout).sum(), argnums=(0, 1, 2, 3)))(
            q, k, v, bias
        )

    close(gradients(mapped), gradients(plain))


@check
def cotangents_inside_shard_map(backend: str) -> None:
    """The same with the gradient taken inside of shard_map, where the sum is a psum that the rule must insert."""
    q, k, v, dout = drawn(backend)
    k, v = k[:1], v[:1]
    batch, whole = PartitionSpec("x"), PartitionSpec()

    def loss(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out = jattn.dot_product_attention(q, k, v, implementation=backend)
        return (out * dout).sum()

    local = jax.shard_map(
        jax.grad(loss, argnums=(0, 1, 2)),
        mesh=mesh((4,), "x"),
        in_specs=(batch, whole, whole, batch),
        out_specs=(batch, whole, whole),
    )

    def plain(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return loss(q, *(jnp.broadcast_to(x, (4, *x.shape[1:])) for x in (k, v)), dout)

    close(jax.jit(local)(q, k, v, dout), jax.jit(jax.grad(plain, argnums=(0, 1, 2)))(q, k, v, dout))


@check
def keys_travel_around_a_ring(backend: str) -> None:
    """The ring of examples/long_context.py, over a cut sequence: values and gradients."""
    example = long_context()
    arrays = drawn(backend, kv_heads=2)
    length = arrays[0].shape[1]
    order = example.balanced_order(length, DEVICES)
    ring = jax.shard_map(
        example.ring_attention,
        mesh=mesh((DEVICES,), example.AXIS),
        in_specs=example.OVER_DEVICES,
        out_specs=example.OVER_DEVICES,
    )
    positions = jnp.broadcast_to(order, (arrays[0].shape[0], length))
    with jattn.sdpa_kernel(backend):
        got = jax.jit(example.with_gradients(ring))(*(x[:, order] for x in arrays), positions)
    want = jax.jit(value_and_grads(backend, is_causal=True))(*arrays)
    close(got, [x[:, order] for x in want])


def long_context() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "long_context.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@check
def explicit_mesh(backend: str) -> None:
    """Sharding in types: the result says how it is cut."""
    arrays = drawn(backend)
    the_mesh = explicit((4,), "x")
    run = value_and_grads(backend)
    want = jax.jit(run)(*arrays)
    with jax.sharding.set_mesh(the_mesh):
        placed = [jax.device_put(x, PartitionSpec("x")) for x in arrays]
        got = jax.jit(run)(*placed)
        assert jax.typeof(got[0]).sharding.spec[0] == "x", jax.typeof(got[0])
    close(got, want)


@check
def more_shards_than_kv_heads_on_an_explicit_mesh(backend: str) -> None:
    """Every device has both key/value heads and takes that of its two query heads, or one where an axis is as long."""
    arrays = drawn(backend, heads=8, kv_heads=2)
    lengths = jnp.asarray([40, 3, 0, 17], jnp.int32)
    run = value_and_grads(backend, key_value_seq_lengths=lengths)
    want = jax.jit(run)(*arrays)
    summed, gathered = (
        {"all-reduce"},
        {"all-reduce", "all-gather"},
    )  # the gradients of keys and values
    for the_mesh, axes, sent in (
        (explicit((4,), "x"), "x", summed),
        (explicit((1, 4), "x", "y"), ("x", "y"), summed),
        (explicit((2, 2), "x", "y"), ("y", "x"), gathered),
    ):
        with jax.sharding.set_mesh(the_mesh):
            q, dout = jax.device_put((arrays[0], arrays[3]), PartitionSpec(None, None, axes))
            k, v = jax.device_put((arrays[1], arrays[2]), PartitionSpec())
            compiled = jax.jit(run).lower(q, k, v, dout).compile()
            got = compiled(q, k, v, dout)
        assert got[0].sharding.is_equivalent_to(q.sharding, 4), got[0].sharding
        close(got, want)
        assert collectives(compiled) <= sent, collectives(compiled)


@check
def one_operand_on_an_explicit_mesh(backend: str) -> None:
    """Only keys and values, or only the bias, are sharded: values, and types of gradients and tangents."""
    q, k, v, _ = drawn(backend)
    bias = normal(5, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    the_mesh = explicit((4,), "x")

    def run(q: Any, k: Any, v: Any, bias: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return jattn.dot_product_attention(q, k, v, bias, implementation=backend)

        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(2 * out), jax.jvp(attend, (q, k, v), (q, k, v))[1]

    want = jax.jit(run)(q, k, v, bias)
    with jax.sharding.set_mesh(the_mesh):
        q, bias = jax.device_put((q, bias), PartitionSpec())
        cut = jax.device_put((k, v), PartitionSpec("x"))
        got = jax.jit(run)(q, *cut, bias)
        assert jax.typeof(got[0]).sharding.spec[0] == "x", jax.typeof(got[0])
        assert [jax.typeof(x).sharding.spec[0] for x in got[1]] == [None, "x", "x"]
        close(got, want)
        k, v = jax.device_put((k, v), PartitionSpec())
        close(jax.jit(run)(q, k, v, jax.device_put(bias, PartitionSpec("x"))), want)


@check
def explicit_mesh_that_is_not_set(backend: str) -> None:
    """The kind that `jax.make_mesh` makes by default, known from the arrays alone; what is not on it is brought to it.

    Outside of jit a pullback is called: `jax.grad` begins with a number of one device, which JAX itself refuses.
    """
    q, k, v, _ = drawn(backend, heads=8, kv_heads=4)
    bias, sinks = normal(5, 1, 8, 40, 40), normal(6, 8)
    the_mesh = jax.make_mesh((4,), ("x",))

    def attend(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
        return jattn.dot_product_attention(q, k, v, bias, sinks=sinks, implementation=backend)

    def run(*arrays: Any) -> Any:
        out, pullback = jax.vjp(attend, *arrays)
        return out, pullback(2 * out)

    one_device = (q, k, v, bias, sinks)
    over_heads = NamedSharding(the_mesh, PartitionSpec(None, None, "x"))
    arrays = (*jax.device_put((q, k, v), over_heads), bias, sinks)
    for wrapped in (run, jax.jit(run)):
        got = wrapped(*arrays)
        assert jax.typeof(got[0]).sharding.spec[2] == "x", jax.typeof(got[0])
        close(got, wrapped(*one_device))


@check
def whole_on_an_explicit_mesh_that_is_not_set(backend: str) -> None:
    """Half of normal numbers: second derivatives of large scores have large errors."""
    x = normal(1, 1, 8, 2, 16, dtype=dtype_of(backend)) / 2

    def gradient(x: Any) -> Any:
        def attend(x: Any) -> Any:
            return jattn.dot_product_attention(x, x, x, implementation=backend)

        out, pullback = jax.vjp(attend, x)
        return pullback(2 * out)[0]

    def run(x: Any) -> Any:
        return jax.jvp(gradient, (x,), (x,))

    close(run(jax.device_put(x, NamedSharding(explicit((4,), "x"), PartitionSpec()))), run(x))


@check
def wide_segment_ids_on_an_explicit_mesh_that_is_not_set(backend: str) -> None:
    """Ids that int32 does not hold, known at run time: numbered alike on all devices, cut or not."""
    q, k, v, _ = drawn(backend)
    ids = jnp.uint32(2**32 - 1) - jnp.arange(q.shape[1], dtype=jnp.uint32) // 16
    ids = jnp.broadcast_to(ids, q.shape[:2])

    @jax.jit
    def run(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return jattn.dot_product_attention(q, k, v, segment_ids=ids, implementation=backend)

    cut = NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec("x"))
    whole = NamedSharding(cut.mesh, PartitionSpec())
    want = run(q, k, v, ids)
    on_mesh = jax.device_put((q, k, v), cut)
    for placed in (jax.device_put(ids, cut), jax.device_put(ids, whole), ids):
        got = run(*on_mesh, placed)
        assert jax.typeof(got).sharding.spec[0] == "x", jax.typeof(got)
        close(got, want)


@check
def ragged_batches_on_an_explicit_mesh_that_is_not_set(backend: str) -> None:
    """Rows, heads, offsets and lengths may be cut; what cannot stay cut is gathered."""
    values = normal(0, 64, 4, 16, dtype=dtype_of(backend))
    offsets, lengths = jnp.array([0, 10, 10, 40, 60]), jnp.array([8, 0, 30, 20])
    the_mesh = explicit((2, 2), "x", "y")

    def put(x: Any, *entries: Any) -> Any:
        return jax.device_put(x, NamedSharding(the_mesh, PartitionSpec(*entries)))

    def run(form: Any, values: Any, offsets: Any, lengths: Any) -> Any:
        def attend(values: Any) -> Any:
            rows = jattn.RaggedArray(values, offsets, lengths, 32)
            return jattn.ragged_dot_product_attention(
                rows, rows, rows, form=form, implementation=backend
            ).values

        out, pull = jax.vjp(attend, values)
        return out, pull(out)

    for form in ("packed", "padded"):
        want = jax.jit(functools.partial(run, form))(values, offsets, lengths)
        cuts = (("x", "y"), (None, None, "x"), ("x",), (None, "y"), (("x", "y"),))
        for entries in cuts[: 2 if backend == "xla" else None]:
            placed = put(values, *entries), offsets, put(lengths, "y")
            close(jax.jit(functools.partial(run, form))(*placed), want)
    rows = jattn.RaggedArray(values, offsets, lengths, 32)
    padded, counts = rows.to_padded()
    cut = jattn.RaggedArray(put(values, "x", "y"), offsets, put(lengths, "x"), 32)
    np.testing.assert_array_equal(cut.to_padded()[0], padded)
    for entries in (("x",), (None, "y"), ("x", "y"), (None, None, "y")):
        packed = jattn.RaggedArray.from_padded(put(padded, *entries), put(counts, "x"))
        again = jattn.RaggedArray.from_padded(padded, counts)
        np.testing.assert_array_equal(packed.values, again.values)
        np.testing.assert_array_equal(packed.offsets, again.offsets)
    ids = rows.segment_ids()
    made = jattn.RaggedArray.from_segment_ids(put(values, "x"), put(ids, "y"), 4)
    np.testing.assert_array_equal(made.segment_ids(), ids)


@check
def fused_attention_is_sharded_as_the_program_says(backend: str) -> None:
    q, k, v, _ = drawn(backend)
    the_mesh = explicit((2, 2), "x", "y")

    einsum = functools.partial(
        jnp.einsum, precision="highest"
    )  # GPUs multiply float32 as tf32 else

    def attend(where: PartitionSpec, q: Any, k: Any, v: Any) -> Any:
        weights = jax.nn.softmax(einsum("btnd,bsnd->bnts", q, k) / 4)
        return einsum("bnts,bsnd->btnd", weights, v, out_sharding=where)

    with jax.sharding.set_mesh(the_mesh):
        placed = [jax.device_put(x, PartitionSpec("x")) for x in (q, k, v)]
        for where in (
            PartitionSpec("y"),
            PartitionSpec("x", None, "y"),
            PartitionSpec("x", None, None, "y"),
        ):
            run = functools.partial(attend, where)
            fused = jattn.fuse_attention(run, implementation=backend)
            got, want = jax.jit(fused)(*placed), jax.jit(run)(*placed)
            assert jax.typeof(got) == jax.typeof(want)
            close(got, want)


@check
def several_batch_axes_on_an_explicit_mesh(backend: str) -> None:
    """The first of them stays where it is, the others are gathered; sinks and slopes that have them too."""
    x = normal(1, 2, 4, 8, 4, 16, dtype=dtype_of(backend))
    sinks, slopes = normal(2, 2, 4, 4), jnp.abs(normal(3, 1, 4, 4))
    bias = normal(4, 2, 4, 1, 8, 8)
    the_mesh = explicit((2, 2), "x", "y")

    def run(x: Any, bias: Any, sinks: Any, slopes: Any) -> Any:
        def attend(x: Any, bias: Any, sinks: Any, slopes: Any) -> Any:
            return jattn.dot_product_attention(
                x, x, x, bias, sinks=sinks, alibi_slopes=slopes, implementation=backend
            )

        out, pullback = jax.vjp(attend, x, bias, sinks, slopes)
        return out, pullback(2 * out)

    arrays = (x, bias, sinks, slopes)
    for spec in (PartitionSpec(None, "y"), PartitionSpec("x", "y")):
        of_slopes = PartitionSpec(None, *spec[1:])
        shardings = [NamedSharding(the_mesh, p) for p in (spec, spec, spec, of_slopes)]
        placed = jax.device_put(arrays, tuple(shardings))
        for wrapped in (jax.jit(run),) if backend == "xla" else (run, jax.jit(run)):
            got = wrapped(*placed)
            assert jax.typeof(got[0]).sharding.spec[0] == spec[0], jax.typeof(got[0])
            close(got, wrapped(*arrays), float(jnp.abs(slopes).sum()))


@check
def partly_manual_on_an_explicit_mesh(backend: str) -> None:
    """Queries are cut by hand over one axis, the batch lies over the other; the shards share bias, sinks and table."""
    the_mesh = explicit((2, 2), "x", "y")
    q, x = (normal(i, 4, 8, 4, 16, dtype=dtype_of(backend)) for i in range(2))
    arrays = (q, x, normal(2, 1, 4, 1, 8), normal(3, 4), normal(4, 4, 8))
    positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (4, 8))

    def attend(q: Any, x: Any, bias: Any, sinks: Any, table: Any, of_queries: Any) -> Any:
        return jattn.dot_product_attention(
            q,
            x,
            x,
            bias,
            sinks=sinks,
            is_causal=True,
            query_positions=of_queries,
            key_value_positions=positions,
            score_mod=lambda s, b, h, i, j, table: s + table[h, j] * jnp.tanh(s),
            captures=(table,),
            implementation=backend,
        )

    over_y = PartitionSpec(None, "y")
    in_specs = (over_y, *[PartitionSpec()] * 4, over_y)

    def loss(attend: Callable[..., Any], *arrays: Any) -> Any:
        return jnp.sin(attend(*arrays, positions)).astype(jnp.float32).sum()

    grad = functools.partial(jax.grad, argnums=(0, 1, 2, 3, 4))
    want = jax.jit(grad(functools.partial(loss, attend)))(*arrays)
    axes = ("x", "y"), ("x",), (), (), ()
    shardings = tuple(NamedSharding(the_mesh, PartitionSpec(*p)) for p in axes)
    placed = jax.device_put(arrays, shardings)
    with jax.set_mesh(the_mesh):
        for check_vma in (True, False):
            cut = jax.shard_map(
                attend,
                mesh=the_mesh,
                in_specs=in_specs,
                out_specs=over_y,
                axis_names={"y"},
                check_vma=check_vma,
            )
            of_shards = grad(functools.partial(loss, cut))
            assert str(jax.make_jaxpr(of_shards)(*placed)).count("jattn_forward[") == 1
            close(jax.jit(of_shards)(*placed), want, 4.0)


@check
def mapped_axis_of_an_explicit_mesh(backend: str) -> None:
    the_mesh = explicit((4,), "x")
    x = drawn(backend)[0][:, :, :4]

    @jax.jit
    def run(x: Any) -> Any:
        def attend(x: Any) -> Any:
            return jattn.dot_product_attention(x, x, x, implementation=backend)

        out, pullback = jax.vjp(jax.vmap(attend), x)
        return out, pullback(2 * out)[0]

    want = run(x)
    with jax.sharding.set_mesh(the_mesh):
        got = run(jax.device_put(x, PartitionSpec("x")))
        assert all(jax.typeof(y).sharding.spec[0] == "x" for y in got)
    close(got, want)


@check
def mapped_axis_of_an_explicit_mesh_outside_of_jit(backend: str) -> None:
    """Here the cotangents come sharded: those of the output and the log-sum-exp, once and twice."""
    x = normal(1, 4, 2, 8, 4, 16, dtype=dtype_of(backend))

    def loss(x: Any) -> Any:
        def attend(x: Any) -> Any:
            return jattn.dot_product_attention(x, x, x, return_lse=True, implementation=backend)

        return sum((y.astype(jnp.float32) ** 2).sum() for y in jax.vmap(attend)(x))

    gradient = jax.grad(loss)
    want = gradient(x), jax.jvp(gradient, (x,), (x,))[1]
    with jax.sharding.set_mesh(explicit((4,), "x")):
        placed = jax.device_put(x, PartitionSpec("x"))
        got = gradient(placed), jax.jvp(gradient, (placed,), (placed,))[1]
        assert all(jax.typeof(y).sharding.spec[0] == "x" for y in got)
    close(got, want)


@check
def mapped_axis_and_another_of_an_explicit_mesh_that_is_not_set(backend: str) -> None:
    """Then shard_map is partly manual, over a mesh of which the compiler knows no devices."""
    x = normal(1, 2, 2, 8, 4, 16, dtype=dtype_of(backend))

    @jax.jit
    def run(x: Any) -> Any:
        def attend(x: Any) -> Any:
            return jattn.dot_product_attention(x, x, x, implementation=backend)

        out, pullback = jax.vjp(jax.vmap(attend), x)
        return out, pullback(2 * out)[0]

    sharding = NamedSharding(explicit((2, 2), "x", "y"), PartitionSpec("x", None, None, "y"))
    got = run(jax.device_put(x, sharding))
    assert all(jax.typeof(y).sharding.spec[0] == "x" for y in got)
    close(got, run(x))


def new_operands(shared: bool) -> tuple[jax.Array, ...]:
    """Sinks and slopes, the same for all batch entries and heads or one each, and a dropout key."""
    shape = (1,) if shared else (4, 4)
    sinks = normal(1, *shape)
    slopes = jnp.asarray(np.random.default_rng(2).uniform(0.0, 0.2, shape), jnp.float32)
    return sinks, slopes, jax.random.key(3)


def with_new_operands(backend: str, rate: float = 0.3) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, dout: Any, sinks: Any, slopes: Any, key: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, sinks: Any, slopes: Any) -> Any:
            return jattn.dot_product_attention(
                q,
                k,
                v,
                is_causal=True,
                sinks=sinks,
                alibi_slopes=slopes,
                dropout_rate=rate,
                dropout_key=key,
                implementation=backend,
            )

        out, pullback = jax.vjp(attend, q, k, v, sinks, slopes)
        return out, *pullback(dout)

    return run


def magnitudes(
    backend: str, run: Callable[..., Any], shared: Sequence[jax.Array], key: jax.Array
) -> float:
    """The sum of the magnitudes of what heads and batch entries add to the gradient of a shared sink or slope."""
    of_heads = (jnp.broadcast_to(x, (4, 4)) for x in shared)
    return max(float(jnp.abs(x).sum()) for x in jax.jit(run)(*drawn(backend), *of_heads, key)[-2:])


@check
def dropout_sinks_and_slopes_on_a_mesh(backend: str) -> None:
    """Per head and batch entry nothing is communicated; shared ones need the sum of their gradients and no more."""
    the_mesh = mesh((2, 2), "x", "y")
    tokens = NamedSharding(the_mesh, PartitionSpec("x", None, "y"))
    per_head = NamedSharding(the_mesh, PartitionSpec("x", "y"))
    whole = NamedSharding(the_mesh, PartitionSpec())
    run = with_new_operands(backend)
    for shared in (False, True):
        *small, key = new_operands(shared)
        want = jax.jit(run)(*drawn(backend), *small, key)
        placed = [jax.device_put(x, tokens) for x in drawn(backend)]
        placed += [jax.device_put(x, whole if shared else per_head) for x in small]
        compiled = jax.jit(run).lower(*placed, key).compile()
        close(compiled(*placed, key), want, magnitudes(backend, run, small, key) if shared else 0.0)
        allowed = {"all-reduce"} if shared else set()
        assert collectives(compiled) <= allowed, collectives(compiled)


@check
def the_same_pairs_are_dropped_under_any_sharding(backend: str) -> None:
    """Bit for bit: unit vectors as values show the weights."""
    length = 40
    q, k, _, _ = drawn(backend)
    v = jnp.broadcast_to(jnp.eye(length, dtype=q.dtype)[None, :, None, :], (4, length, 4, length))

    def run(q: Any, k: Any, v: Any, key: Any) -> Any:
        return jattn.dot_product_attention(
            q, k, v, dropout_rate=0.3, dropout_key=key, implementation=backend
        )

    key = jax.random.key(3)
    mask = jattn.dropout_mask(jattn.seed_from_key(key), 0, (4, 4, length, length), 0.3)
    want = np.asarray(mask).transpose(0, 2, 1, 3)
    specs = [
        ((4,), PartitionSpec("x")),
        ((4,), PartitionSpec(None, None, "x")),
        ((2, 2), PartitionSpec("x", None, "y")),
        ((2, 2), PartitionSpec("y", None, "x")),
    ]
    for shape, spec in specs:
        the_mesh = mesh(shape, *"xy"[: len(shape)])
        placed = [jax.device_put(x, NamedSharding(the_mesh, spec)) for x in (q, k, v)]
        got = np.asarray(jax.jit(run)(*placed, key)) > 0
        assert (got == want).all(), (shape, spec)


@check
def new_operands_on_an_explicit_mesh(backend: str) -> None:
    the_mesh = explicit((2, 2), "x", "y")
    run = with_new_operands(backend)
    *small, key = new_operands(shared=True)
    want = jax.jit(run)(*drawn(backend), *small, key)
    with jax.sharding.set_mesh(the_mesh):
        placed = [jax.device_put(x, PartitionSpec("x", None, "y")) for x in drawn(backend)]
        got = jax.jit(run)(*placed, *small, key)
    close(got, want, magnitudes(backend, run, small, key))


@check
def a_seed_that_is_cut_over_devices(backend: str) -> None:
    arrays = drawn(backend)
    seed = jnp.asarray([7, 9], jnp.uint32)

    def run(seed: Any) -> Any:
        return jattn.dot_product_attention(
            *arrays[:3], dropout_rate=0.3, dropout_seed=seed, implementation=backend
        )

    with jax.sharding.set_mesh(explicit((2, 2), "x", "y")):
        got = jax.jit(run)(jax.device_put(seed, PartitionSpec("x")))
    close(got, jax.jit(run)(seed))


@check
def dropout_inside_shard_map(backend: str) -> None:
    """A key per device, as for any random number there: each shard drops as a call of its own with that key."""
    arrays = drawn(backend)
    keys = jax.random.split(jax.random.key(8), 4)
    *small, _ = new_operands(shared=True)

    def local(q: Any, k: Any, v: Any, dout: Any, sinks: Any, slopes: Any, key: Any) -> Any:
        return with_new_operands(backend)(q, k, v, dout, sinks, slopes, key[0])[:4]

    batch, whole = PartitionSpec("x"), PartitionSpec()
    mapped = jax.shard_map(
        local,
        mesh=mesh((4,), "x"),
        in_specs=(batch, batch, batch, batch, whole, whole, batch),
        out_specs=batch,
    )
    got = jax.jit(mapped)(*arrays, *small, keys)
    each = [
        with_new_operands(backend)(*(x[i : i + 1] for x in arrays), *small, keys[i])[:4]
        for i in range(4)
    ]
    close(got, jax.tree.map(lambda *x: jnp.concatenate(x), *each))


@check
def what_is_cut_counts_once(backend: str) -> None:
    """It is traced for all devices together and for one of them."""
    spec = NamedSharding(mesh((4,), "x"), PartitionSpec("x"))
    placed = [jax.device_put(x, spec) for x in drawn(backend, length=24)]
    run = jax.jit(value_and_grads(backend))
    jattn.reset_call_counters()
    jax.block_until_ready(run(*placed))
    assert jattn.call_counters() == {backend: {"forward": 1, "backward": 1}}, jattn.call_counters()
    arrays = tuple(placed[:3])
    jattn.reset_call_counters()
    tangent = jax.jit(lambda *x: jax.jvp(jattn.dot_product_attention, x, x)[1])
    jax.block_until_ready(tangent(*arrays))
    assert jattn.call_counters()["xla"] == {"tangent": 1}, jattn.call_counters()


@check
def score_functions_know_entries_and_heads_of_the_whole_problem(backend: str) -> None:
    """By batch and heads, on meshes of both kinds and inside shard_map; gradients of captures are sums over devices."""
    arrays = drawn(backend, heads=4, kv_heads=2)
    table, gain = normal(7, 4, 4, 80), normal(8, 4)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any, gain: Any) -> Any:
        return jnp.where(k <= q + 20, s + gain[h] * table[b, h, q - k + 40], -jnp.inf)

    def loss(q: Any, k: Any, v: Any, table: Any, gain: Any) -> Any:
        out = jattn.dot_product_attention(
            q, k, v, score_mod=score_mod, captures=(table, gain), implementation=backend
        )
        return (out * arrays[3]).astype(jnp.float32).sum()

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))
    want = run(*arrays[:3], table, gain)
    for the_mesh in (mesh((2, 2), "x", "y"), explicit((2, 2), "x", "y")):
        over_both = NamedSharding(the_mesh, PartitionSpec("x", None, "y"))
        whole = NamedSharding(the_mesh, PartitionSpec())
        placed = [jax.device_put(x, over_both) for x in arrays[:3]]
        read = [jax.device_put(x, whole) for x in (table, gain)]
        with jax.set_mesh(the_mesh):
            close(run(*placed, *read), want, sums=4 * 40)

    @functools.partial(
        jax.shard_map,
        mesh=mesh((2, 2), "x", "y"),
        in_specs=(
            *[PartitionSpec("x", None, "y")] * 3,
            PartitionSpec("x", "y"),
            PartitionSpec("y"),
        ),
        out_specs=PartitionSpec("x", None, "y"),
    )
    def by_shards(q: Any, k: Any, v: Any, table: Any, gain: Any) -> Any:
        return jattn.dot_product_attention(
            q, k, v, score_mod=score_mod, captures=(table, gain), implementation=backend
        )

    whole = jattn.dot_product_attention(
        *arrays[:3], score_mod=score_mod, captures=(table, gain), implementation=backend
    )
    close(jax.jit(by_shards)(*arrays[:3], table, gain), whole)


def of_a_shard(name: str, table: Any, row: Any) -> Callable[..., Any]:
    """Closes over a table (1, N, T), which varies over the mesh, and a row (T,), which does not."""
    functions: dict[str, Callable[..., Any]] = {
        "read": lambda s, b, h, q, k: jax.jit(lambda s: s + table[b, h, k] * row[q])(s),
        "computed": lambda s, b, h, q, k: s + jax.nn.softmax(table[0], -1)[h, k] * row[q],
        "branches": lambda s, b, h, q, k: jax.lax.cond(
            q > k, lambda: s + table[b, h, k], lambda: s - row[q]
        ),
        "loop": lambda s, b, h, q, k: jax.lax.fori_loop(
            0, 3, lambda i, x: x + jnp.sin(x) * table[b, h, i], s
        ),
        "rules": lambda s, b, h, q, k: jax.nn.relu(s + table[b, h, k]) + jax.nn.silu(row[q]),
    }
    return functions[name]


@check
def score_functions_close_over_what_varies_over_the_mesh(backend: str) -> None:
    q, k, v = drawn(backend)[:3]
    table, row = normal(7, 4, 4, 40), normal(8, 40)
    local = mesh((4,), "data")
    spec = PartitionSpec("data")
    names = ("read", "computed", "branches", "rules")
    for name in ("read", "branches", "loop") if backend == "xla" else names:

        def run(q: Any, table: Any, row: Any, k: Any, v: Any, name: str = name) -> Any:
            return jattn.dot_product_attention(
                q, k, v, score_mod=of_a_shard(name, table, row), implementation=backend
            )

        def whole(*arrays: Any, run: Any = run) -> Any:
            mapped = jax.shard_map(
                run, mesh=local, in_specs=(spec, spec, PartitionSpec(), spec, spec), out_specs=spec
            )
            return (mapped(*arrays).astype(jnp.float32) ** 2).sum()

        def one_by_one(q: Any, table: Any, row: Any, k: Any, v: Any, run: Any = run) -> Any:
            parts = [
                run(q[i : i + 1], table[i : i + 1], row, k[i : i + 1], v[i : i + 1])
                for i in range(4)
            ]
            return (jnp.concatenate(parts).astype(jnp.float32) ** 2).sum()

        arrays = (q, table, row, k, v)
        got = jax.jit(jax.value_and_grad(whole, (0, 1, 2)))(*arrays)
        close(got, jax.value_and_grad(one_by_one, (0, 1, 2))(*arrays), sums=4 * 40)


@check
def score_functions_read_what_is_cut_over_an_explicit_mesh(backend: str) -> None:
    q, k, v, _ = drawn(backend)
    cut = NamedSharding(explicit((4,), "x"), PartitionSpec("x"))
    table = jax.device_put(jnp.linspace(0.0, 1.0, 64, dtype="float32").reshape(4, 16), cut)

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
        return s + table[h, (q - k) % 16]

    def run(score_mod: Any, captures: Any = ()) -> Any:
        return jattn.dot_product_attention(
            q, k, v, score_mod=score_mod, captures=captures, implementation=backend
        )

    want = run(score_mod, (jnp.asarray(np.asarray(table)),))
    close(run(score_mod, (table,)), want)
    note = ""
    try:
        close(run(lambda *given: score_mod(*given, table)), want)  # as JAX 0.11 can
    except Exception as error:
        note = " ".join(error.__notes__)
    assert not note or "captures=(x,)" in note, note


@check
def random_cuts_of_random_problems(backend: str) -> None:
    # XLA's programs take ten seconds each.
    for seed in range(1, 4) if backend == "xla" else range(16):
        kind = jax.sharding.AxisType.Explicit if seed % 4 == 3 else jax.sharding.AxisType.Auto
        random_cuts.Cut.draw(seed, kind, dtype_of(backend)).check(backend)
        jax.clear_caches()  # programs that are kept make others take longer to compile


def failures(backend: str, **environment: str) -> dict[str, str]:
    """Runs this program in a process of its own, with these variables; returns the checks that failed, and why."""
    done = subprocess.run(
        [sys.executable, __file__, backend],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert set(outcome) == set(CHECKS)
    return {name: what for name, what in outcome.items() if what != "ok"}


@check
def without_shardy(backend: str) -> None:
    """GSPMD, its predecessor, asks how results are sharded before it asks for the cut: of any backend alike."""
    if backend == "xla":
        return
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        for function in (
            batch_and_head_sharding_gathers_nothing,
            more_shards_than_kv_heads,
            masks_and_lengths_are_cut_with_the_batch,
        ):
            jax.clear_caches()
            function(backend)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def main(backend: str) -> None:
    assert len(jax.devices()) >= DEVICES, jax.devices()
    outcome = {}
    for name, function in CHECKS.items():
        try:
            function(backend)
        except Exception as error:  # the test that asked for this line reports it
            where = traceback.extract_tb(error.__traceback__)[-1]
            outcome[name] = f"{type(error).__name__}: {error} ({where.name}:{where.lineno})"[:2000]
        else:
            outcome[name] = "ok"
        jax.clear_caches()
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(sys.argv[1])
