"""Partitioning over batch and heads: by the compiler under ``jit``, and by ``shard_map`` on explicit meshes.

Batch entries and key/value heads are independent, so both may be cut without communication. Lengths and head dims are
kept whole. The gradient of an operand that is shared by several shards (a bias broadcast over the batch, the
single key/value head of multi-query attention) is summed over them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning

from jattn.jax_interface import NamedSharding, PartitionSpec, mlir
from jattn.spec import Operands, Spec

Axes = tuple[str, ...]  # mesh axes over which one array axis is cut

_NO_MESH = jax.sharding.AbstractMesh((), ())


@dataclasses.dataclass(frozen=True)
class Cut:
    """Mesh axes over which the batch and the heads are cut.

    ``kv_heads`` is ``heads``, or the first of them, where each shard then has one key/value head, which it shares with
    those that differ in the other axes: as many as there are key/value heads, fewer than shards. With ``takes_kv_head``
    it is empty: each shard has all key/value heads and takes that of its query heads.
    """

    batch: Axes
    heads: Axes
    kv_heads: Axes
    takes_kv_head: bool = False

    def operands(self, spec: Spec) -> Operands[PartitionSpec]:
        """Partition specs of the operands of a problem."""

        def scores(shape: tuple[int, ...] | None) -> PartitionSpec | None:
            if shape is None:
                return None
            return _partition_spec(
                self.batch if shape[0] != 1 else (), self.heads if shape[1] != 1 else (), (), ()
            )

        per_batch = _partition_spec(self.batch)
        per_token = _partition_spec(self.batch, ())
        kv = _partition_spec(self.batch, (), self.kv_heads, ())
        return Operands(
            q=_partition_spec(self.batch, (), self.heads, ()),
            k=kv,
            v=kv,
            bias=scores(spec.bias),
            mask=scores(spec.mask),
            q_lengths=per_batch if spec.q_lengths else None,
            kv_lengths=per_batch if spec.kv_lengths else None,
            q_segments=per_token if spec.segments else None,
            kv_segments=per_token if spec.segments else None,
            q_positions=per_token if spec.positions else None,
            kv_positions=per_token if spec.positions else None,
            sinks=self._per_head(spec.sinks),
            alibi_slopes=self._per_head(spec.alibi_slopes),
            dropout_keys=self._keys(spec),
            dropout_rate=None
            if spec.dropout is None
            else _partition_spec(self.batch if spec.dropout.rate != 1 else (), (), ()),
            batch_ids=None if spec.score_mod is None else per_batch,
            head_ids=None if spec.score_mod is None else _partition_spec(self.heads),
            captures=()
            if spec.score_mod is None
            else tuple(_partition_spec(*((),) * len(c.shape)) for c in spec.score_mod.captures),
        )

    def _per_head(self, extents: tuple[int, int] | None) -> PartitionSpec | None:
        """Of an operand (B or 1, N or 1, ...)."""
        if extents is None:
            return None
        return _partition_spec(
            self.batch if extents[0] != 1 else (), self.heads if extents[1] != 1 else (), ()
        )

    def _keys(self, spec: Spec) -> PartitionSpec | None:
        """Of the dropout keys; the table of packed sequences stays whole along them."""
        if spec.dropout is None:
            return None
        sequences, heads = spec.dropout.keys
        return self._per_head((1 if spec.dropout.rows else sequences, heads))

    def own_kv_head(self, operands: Operands[jax.Array]) -> Operands[jax.Array]:
        """The operands of a shard, of which it takes the key/value head of its query heads; inside ``shard_map``."""
        if not self.takes_kv_head:
            return operands
        num_kv_heads = operands.k.shape[2]
        head = lax.axis_index(self.heads) * num_kv_heads // lax.axis_size(self.heads)
        k, v = (lax.dynamic_slice_in_dim(x, head, 1, axis=2) for x in (operands.k, operands.v))
        return operands._replace(k=k, v=v)

    @property
    def out(self) -> PartitionSpec:
        """Of (B, T, N, Dv)."""
        return _partition_spec(self.batch, (), self.heads, ())

    @property
    def lse(self) -> PartitionSpec:
        """Of (B, N, T)."""
        return _partition_spec(self.batch, self.heads, ())


def _partition_spec(*axes: Axes) -> PartitionSpec:
    return PartitionSpec(
        *(group if len(group) > 1 else group[0] if group else None for group in axes)
    )


def _axes(entry: Any) -> Axes:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def choose_cut(
    spec: Spec,
    mesh_shape: Any,
    q_spec: PartitionSpec,
    allowed: frozenset[str],
    *,
    may_take_kv_head: bool = False,
) -> Cut:
    """Returns the cut that keeps the sharding of the queries where the problem permits it.

    Args:
      spec: the whole problem.
      mesh_shape: mesh axis -> size.
      q_spec: how the queries (B, T, N, D) are sharded.
      allowed: mesh axes that may be used.
      may_take_kv_head: whether ``Cut.takes_kv_head`` is possible.
    """
    entries = [*q_spec, None, None, None, None]

    def shards(axes: Axes) -> int:
        return math.prod(mesh_shape[axis] for axis in axes)

    def usable(entry: Any, extent: int) -> Axes:
        """The first axes of an entry, as many as divide an extent."""
        axes = tuple(axis for axis in _axes(entry) if axis in allowed)
        while extent % shards(axes) != 0:
            axes = axes[:-1]
        return axes

    batch = usable(entries[0], spec.batch)
    heads = usable(entries[2], spec.num_heads)
    kv_heads = usable(heads, spec.num_kv_heads)
    if shards(kv_heads) != spec.num_kv_heads:
        if may_take_kv_head and heads != kv_heads and shards(heads) % spec.num_kv_heads == 0:
            return Cut(batch, heads, (), takes_kv_head=True)
        heads = kv_heads  # over more axes a shard would have a part of the query heads of several key/value heads
    return Cut(batch, heads, () if spec.num_kv_heads == 1 else kv_heads)


def shared_axes(spec: Spec, cut: Cut) -> tuple[Axes, ...]:
    """Mesh axes over which the gradients of the differentiable operands must be summed, in their order: the shards
    that share the operand.
    """

    def broadcast_over(extents: tuple[int, ...] | None) -> Axes:
        if extents is None:
            return ()
        return (cut.batch if extents[0] == 1 else ()) + (cut.heads if extents[1] == 1 else ())

    kv = tuple(axis for axis in cut.heads if axis not in cut.kv_heads)
    optional = (spec.bias, spec.sinks, spec.alibi_slopes)
    num_captures = 0 if spec.score_mod is None else len(spec.score_mod.captures)
    of_captures = [(*cut.batch, *cut.heads)] * num_captures
    return (), kv, kv, *map(broadcast_over, optional), *of_captures


# ---- jit with sharded arrays: the compiler asks --------------------------------------------------------------------


def is_automatic(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether the call is lowered for several devices among which the compiler may cut it."""
    axis_context: object = ctx.module_context.axis_context
    if isinstance(axis_context, mlir.ShardingContext):
        return bool(axis_context.num_devices > 1)
    if isinstance(axis_context, mlir.SPMDAxisContext):
        mesh: object = axis_context.mesh
        if isinstance(mesh, jax.sharding.AbstractMesh):
            return False  # no mesh is set, and JAX partitions only over devices that it knows
        return bool(axis_context.manual_axes != frozenset(axis_context.mesh.axis_names))
    return False


def partitioned(
    primitive_name: str, run: Callable[..., Any], params: dict[str, Any]
) -> Callable[..., Any]:
    """Returns ``run`` in a form that the compiler may cut over batch and heads."""
    spec: Spec = params["spec"]
    layout = functools.partial(_LAYOUTS[primitive_name], params)

    def with_params(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(run(*arrays, **params))

    def layout_on(mesh: Any, arg_infos: Sequence[Any]) -> tuple[Any, Layout]:
        """The mesh in factors, and the layout that keeps the sharding of the largest of queries, keys and values."""
        # In a partly manual shard_map the compiler has no mesh: everything is kept whole over the automatic axes.
        q_spec = PartitionSpec()
        if not mesh.empty:
            mesh = mesh_of_factors(mesh, spec.num_kv_heads)
            largest_first = sorted(arg_infos[:3], key=lambda x: -math.prod(x.shape))
            q_spec = _joint([spec_on_mesh(mesh, x.sharding, 4) for x in largest_first])
        return mesh, layout(choose_cut(spec, dict(mesh.shape), q_spec, frozenset(mesh.axis_names)))

    def shardings_of_results(
        mesh: Any, arg_infos: Sequence[Any], result_infos: Sequence[Any]
    ) -> Any:
        mesh, (_, results, _) = layout_on(mesh, arg_infos)
        return tuple(NamedSharding(mesh, p) for p in results)

    def partition(mesh: Any, arg_infos: Sequence[Any], result_infos: Sequence[Any]) -> Any:
        mesh, (arguments, results, sums) = layout_on(mesh, arg_infos)

        def shard(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            # A mesh that the caller has set is still set while the compiler asks, but this is of one device.
            with jax.sharding.use_abstract_mesh(_NO_MESH):
                values = with_params(*arrays)
            return tuple(
                lax.psum(x, axes) if axes else x for x, axes in zip(values, sums, strict=True)
            )

        to_sharding = functools.partial(NamedSharding, mesh)
        return mesh, shard, tuple(map(to_sharding, results)), tuple(map(to_sharding, arguments))

    wrapped = custom_partitioning(with_params)
    rule, whole, sizes = _sharding_rule(spec, layout)
    wrapped.def_partition(
        partition=partition,
        infer_sharding_from_operands=shardings_of_results,  # asked by GSPMD; Shardy reads the rule
        decode_shardings=False,  # JAX fails where an axis of the array is cut over a part of a mesh axis
        sharding_rule=rule,
        need_replication_factors=whole,
        **sizes,
    )

    def call(*arrays: jax.Array, **_: Any) -> list[jax.Array]:
        return list(wrapped(*arrays))

    return call


def _joint(specs: Sequence[PartitionSpec]) -> PartitionSpec:
    """One cut over batch and heads for queries, keys and values, in some order: of what each is cut over more finely
    than those before it, all; of what is cut otherwise, nothing.

    A step of decoding has one query for each entry, often whole on every device, and a cache that is cut: were the cut
    that of the queries alone, the cache would be gathered.
    """
    groups: dict[int, Axes] = {0: (), 2: ()}
    for spec in specs:
        for axis, found in groups.items():
            axes = _axes(spec[axis]) if axis < len(spec) else ()
            more = axes[len(found) :]
            elsewhere = {name for other in groups.values() for name in other}
            if axes[: len(found)] == found and elsewhere.isdisjoint(more):
                groups[axis] = axes
    return _partition_spec(groups[0], (), groups[2], ())


def mesh_of_factors(mesh: Any, first: int) -> Any:
    """The mesh with an axis "name.i" for each prime factor of each axis, those that ``first`` shares with it first.

    Over some of them an array axis may be cut that is too short for all: 2 key/value heads over 4 devices.
    """
    names: list[str] = []
    sizes: list[int] = []
    for name, size in mesh.shape.items():
        common = math.gcd(size, first)
        factors = [*_prime_factors(common), *_prime_factors(size // common)]
        names += [f"{name}.{i}" for i in range(len(factors))]
        sizes += factors
    return jax.sharding.Mesh(mesh.devices.reshape(sizes), tuple(names))


def _prime_factors(number: int) -> list[int]:
    found = []
    for factor in range(2, number + 1):
        while number % factor == 0:
            found.append(factor)
            number //= factor
    return found


def spec_on_mesh(mesh: Any, sharding: jax.sharding.Sharding | None, rank: int) -> PartitionSpec:
    """The partition spec of an array of this rank; an axis whose cut no axes of the mesh make is taken for whole."""
    if sharding is None:
        return PartitionSpec()
    extent = mesh.size  # which all cuts divide
    slices = sharding.devices_indices_map((extent,) * rank)

    def axes_of(axis: int) -> Axes:
        begins = np.asarray([slices[d][axis].start or 0 for d in mesh.devices.flat])
        begins = begins.reshape(mesh.devices.shape)
        steps = [int(begins.take(1, axis=i).flat[0]) for i in range(begins.ndim)]
        if not np.array_equal(np.tensordot(steps, np.indices(begins.shape), 1), begins):
            return ()
        cutting = sorted((i for i, step in enumerate(steps) if step != 0), key=lambda i: -steps[i])
        rest = extent
        for i in cutting:
            if rest != steps[i] * begins.shape[i]:
                return ()
            rest = steps[i]
        return tuple(mesh.axis_names[i] for i in cutting)

    return _partition_spec(*(axes_of(axis) for axis in range(rank)))


# How a primitive's operands and results are cut, and the axes over which each result must be summed.
Layout = tuple[list[PartitionSpec], list[PartitionSpec], list[Axes]]


def _forward_layout(params: dict[str, Any], cut: Cut) -> Layout:
    return list(cut.operands(params["spec"]).flat()), [cut.out, cut.lse], [(), ()]


def _backward_layout(params: dict[str, Any], cut: Cut) -> Layout:
    spec, wants = params["spec"], params["wants"]
    operands = cut.operands(spec)
    arguments = [*operands.flat(), cut.out, cut.lse, cut.out]
    if params["has_dlse"]:
        arguments.append(cut.lse)
    primals = operands.differentiable()
    wanted = [i for i, flag in enumerate(wants.all_flags()) if flag]
    sums = shared_axes(spec, cut)
    return arguments, [primals[i] or PartitionSpec() for i in wanted], [sums[i] for i in wanted]


def _tangent_layout(params: dict[str, Any], cut: Cut) -> Layout:
    operands = cut.operands(params["spec"])
    primals = operands.differentiable()
    flags = params["wants"].all_flags()
    moving = [p or PartitionSpec() for p, flag in zip(primals, flags, strict=False) if flag]
    return [*operands.flat(), cut.out, cut.lse, *moving], [cut.out, cut.lse], [(), ()]


_LAYOUTS: dict[str, Callable[[dict[str, Any], Cut], Layout]] = {
    "jattn_forward": _forward_layout,
    "jattn_backward": _backward_layout,
    "jattn_tangent": _tangent_layout,
}


def _sharding_rule(
    spec: Spec, layout: Callable[[Cut], Layout]
) -> tuple[str, tuple[str, ...], dict[str, int]]:
    """Words the cut for the compiler's sharding propagation.

    The layout is asked with a cut over the symbolic axes "b" (batch), "n" (query heads) and "h" (key/value heads);
    every array axis that it does not cut becomes a factor of its own that must stay whole. Query heads are key/value
    heads times the group, "(h g)": over more shards than there are key/value heads, these are cut as far as they go.

    Returns:
      The rule, the factors that must stay whole in order of first appearance, and the sizes that the rule cannot
      infer.
    """
    single = spec.num_kv_heads == 1
    grouped = not single and spec.group_size > 1
    arguments, results, _ = layout(Cut(("b",), ("n",), () if single else ("h",)))
    whole: list[str] = []

    def word(entry: Any) -> str:
        if entry == "n" and grouped:
            return "(h g)"
        if entry == "n" and not single:
            return "h"
        if entry is not None:
            return str(entry)
        whole.append(f"w{len(whole)}")
        return whole[-1]

    def words(specs: Sequence[PartitionSpec]) -> str:
        return ", ".join(
            " ".join(word(entry) for entry in spec_of_array) for spec_of_array in specs
        )

    left = words(arguments)
    return f"{left} -> {words(results)}", tuple(whole), {"g": spec.group_size} if grouped else {}


# ---- Explicit meshes: the types say --------------------------------------------------------------------------------


def explicit_cut(spec: Spec, operands: Operands[jax.Array]) -> tuple[Any, Cut] | None:
    """Returns the mesh and the cut of a call with an operand that is sharded over axes of an explicit mesh, else None.

    The cut is that of the first such operand, so of the queries where these are sharded. Where a score function alone
    reads such an array, every device computes all.
    """
    single = zip(operands._fields, operands.single(), strict=False)
    for name, x in (*single, *(("captures", x) for x in operands.captures)):
        if x is not None and (explicit := _explicit_axes(x)):
            sharding = jax.typeof(x).sharding
            entries = _as_of_queries(name, x.shape, sharding.spec)
            shape = dict(sharding.mesh.shape)
            return sharding.mesh, choose_cut(spec, shape, entries, explicit, may_take_kv_head=True)
    return None


@functools.partial(jax.jit, static_argnums=(0, 1))
def placed(
    mesh: Any, specs: tuple[PartitionSpec, ...], *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """The arrays, at least one of which is on the explicit mesh, sharded over it.

    Compiled also outside of ``jit``: without a mesh that is set, nothing else brings an array of one device to it.
    """
    return tuple(
        jax.sharding.reshard(x, NamedSharding(mesh, p)) for x, p in zip(arrays, specs, strict=True)
    )


def on_mesh_of_arrays(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``run``, with the explicit mesh of its arrays set where none is: its constants must be on it too.

    Compiled, because outside of ``jit`` a mesh of which only the axes are known runs nothing.
    """

    @functools.wraps(run)
    def on_mesh(*arguments: Any, **params: Any) -> Any:
        arrays = [x for x in arguments if isinstance(x, jax.Array)]
        others = arguments[: len(arguments) - len(arrays)]  # they come first
        meshes = [jax.typeof(x).sharding.mesh for x in arrays]
        mesh = next((m for m in meshes if not m.empty), None)
        if mesh is None or not jax.sharding.get_abstract_mesh().empty:
            return run(*arguments, **params)

        def with_mesh(*arrays: jax.Array) -> Any:
            with jax.sharding.use_abstract_mesh(mesh):
                return run(*others, *arrays, **params)

        return jax.jit(with_mesh)(*arrays)

    return on_mesh


def gathered(x: jax.Array) -> jax.Array:
    """An array that is not sharded over an explicit mesh: what `vmap` maps it has no axis for."""
    return _resharded(x) if _explicit_axes(x) else x


def gathered_along(x: jax.Array, axes: range) -> jax.Array:
    """An array that is not sharded over an explicit mesh along these axes."""
    spec = jax.typeof(x).sharding.spec
    if not _explicit_axes(x) or all(spec[axis] is None for axis in axes):
        return x
    return _resharded(x, *(None if axis in axes else entry for axis, entry in enumerate(spec)))


def sharded_as(x: jax.Array, aval: Any) -> jax.Array:
    """An array sharded over an explicit mesh as a type says; as it is, where the type is on none."""
    sharding = aval.sharding
    is_explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
    if not is_explicit or sharding == jax.typeof(x).sharding:
        return x
    return jax.sharding.reshard(x, sharding)


def sharding_of_rows(x: jax.Array, axes: int) -> NamedSharding | None:
    """How what is taken of the first axis, with so many axes in its place, is sharded; None if on no explicit mesh."""
    if not _explicit_axes(x):
        return None
    sharding = jax.typeof(x).sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*(None,) * axes, *sharding.spec[1:]))


def _resharded(x: jax.Array, *entries: Any) -> jax.Array:
    """Reshards over the mesh that the array is on, which need not be set."""
    mesh = jax.typeof(x).sharding.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*entries)))


def sharder_of_mapped_axis(
    arrays: Sequence[jax.Array], dims: Sequence[int | None]
) -> Callable[[jax.Array], jax.Array]:
    """What shards an array's first axis over an explicit mesh as the mapped axis of these arrays is."""
    for x, dim in zip(arrays, dims, strict=True):
        if dim is not None and _explicit_axes(x):
            sharding = jax.typeof(x).sharding
            over = NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[dim]))
            return lambda result: jax.sharding.reshard(result, over)
    return lambda result: result


def _explicit_axes(x: jax.Array) -> frozenset[str]:
    """The axes of the explicit mesh that an array is sharded over; empty if it is on none, or whole."""
    sharding = jax.typeof(x).sharding
    mesh = sharding.mesh
    if not any(entry is not None for entry in sharding.spec):
        return frozenset()
    return frozenset(
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == jax.sharding.AxisType.Explicit
    )


def _as_of_queries(name: str, shape: tuple[int, ...], given: Sequence[Any]) -> PartitionSpec:
    """An operand's partition spec in the axes of the queries, (B, T, N, D); an axis that broadcasts is not cut."""
    entries = [*given, *[None] * (len(shape) - len(given))]
    if name in ("q", "k", "v"):
        return PartitionSpec(*entries)
    if name == "captures":  # whose axes mean what the score function makes of them
        return PartitionSpec(None, None, None, None)
    batch = entries[0] if shape[0] != 1 else None
    has_heads = name in ("bias", "mask", "sinks", "alibi_slopes", "dropout_keys")
    heads = entries[1] if has_heads and shape[1] != 1 else None
    return PartitionSpec(batch, None, heads, None)
