"""``fuse_attention``: a function whose hand-written attention is computed by ``jattn.dot_product_attention``."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn.api import dot_product_attention
from jattn.arrays import as_flag, shown, wider
from jattn.fusion.axes import Miss, Named, extents_of, parts_of
from jattn.fusion.graph import Axes, Graph, Node, Value
from jattn.fusion.matching import Match, find
from jattn.fusion.tracing import trace
from jattn.jax_interface import ClosedJaxpr, Jaxpr, evaluate, jaxpr_as_fun, source_line
from jattn.sharding import partition

_NAME = "jattn.fuse_attention"

_MOST_RECORDS = 1024  # the oldest are forgotten then
_lock = threading.Lock()
_log: collections.deque[FusionRecord] = collections.deque(maxlen=_MOST_RECORDS)


@dataclasses.dataclass(frozen=True)
class FusionRecord:
    """What ``fuse_attention`` did with one attention of a program that it traced.

    Attributes:
      pattern: what acts on the scores: "plain", or "causal", "window", "softcap", "mask", "bias", "sinks", "dropout",
        joined by "+"; empty if it was not recognised.
      miss: why it was left as it is; empty if it was replaced.
      shapes: of query, key and value as the program has them; empty if they are not known.
      where: the line of the program, or an empty string.
    """

    pattern: str
    miss: str
    shapes: tuple[tuple[int, ...], ...]
    where: str


def fusion_log() -> tuple[FusionRecord, ...]:
    """Returns what ``fuse_attention`` found since the log was cleared, one record for each attention and trace.

    Attention inside the body of a loop counts once.
    """
    with _lock:
        return tuple(_log)


def clear_fusion_log() -> None:
    """Forgets all records."""
    with _lock:
        _log.clear()


@dataclasses.dataclass(frozen=True)
class _Options:
    disable: frozenset[str]
    finite_fill: bool
    exact_dropout: bool
    implementation: Any
    in_shard_map: bool = False


def fuse_attention(
    function: Any = None,
    *,
    disable: str | Collection[str] = (),
    finite_fill: bool = True,
    exact_dropout: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Any:
    """Returns a function that computes the hand-written attention in ``function`` by ``dot_product_attention``.

    A softmax between two products is found in whatever layout and spelling it has: ``einsum`` or ``matmul``, heads
    before or behind the length, grouped heads, a scale on the scores, a softcap by ``tanh``, masks by ``where``,
    biases, sinks, causal masks and windows made of comparisons, dropout by ``jax.random.bernoulli``; also inside of
    ``jit``, ``scan``, ``while_loop``, ``cond``, ``checkpoint`` and ``shard_map`` (in that not in loops, branches and
    checkpoints). The rest of the program is left as it is; of a program without attention, all. Fuse before you
    differentiate, ``jax.grad(fuse_attention(loss))``: in the other order probabilities have a second use, and stay.
    ``fusion_log`` tells what was found, and what was not taken and why.

    Args:
      function: any function that JAX can trace; it is traced at every call, so put ``jit`` around the fused one. It
        changes nothing: what is new it returns, also the state of a module of flax.nnx. Arguments that are no arrays
        (numbers of Python among them) are constants of the trace. Without it, a decorator is returned.
      disable: patterns that stay as they are, as ``FusionRecord.pattern`` has them, or parts of them, as "dropout".
      finite_fill: whether a mask may write a large negative number (-1e9 and less) instead of -inf, or add it. The
        difference: a query that sees no key gets 0, and not the mean of the values. Otherwise attention with such a
        mask is left as it is, and what is added is a bias.
      exact_dropout: whether dropout must drop the weights that the program drops. It then stays as it is; otherwise the
        same key drops others, as often (``jattn.dropout_mask``).
      implementation: as for ``dot_product_attention``.

    Raises:
      TypeError: ``function`` is not callable.
      ValueError: an unknown pattern in ``disable``, or what is no collection of patterns; a flag that is no bool; in a
        call of the fused function: it changes an argument.
    """
    options = _Options(
        _disabled(disable),
        as_flag("finite_fill", finite_fill, _NAME),
        as_flag("exact_dropout", exact_dropout, _NAME),
        implementation,
    )
    if function is None:
        return functools.partial(_fused, options=options)
    return _fused(function, options=options)


def _disabled(disable: Any) -> frozenset[str]:
    """The patterns that stay as they are."""
    known = {"plain", "causal", "window", "softcap", "mask", "bias", "sinks", "dropout"}
    if not isinstance(disable, Iterable):
        raise ValueError(
            f"{_NAME}: disable is {shown(disable)}, must be a pattern or a collection of them, made of"
            f" {', '.join(sorted(known))}"
        )
    words = [disable] if isinstance(disable, str) else list(disable)
    for word in words:
        if not isinstance(word, str) or not set(word.split("+")) <= known:
            raise ValueError(
                f"{_NAME}: disable has {word!r}, must be made of {', '.join(sorted(known))}"
            )
    return frozenset(words)


def _fused(function: Any, *, options: _Options) -> Any:
    if not callable(function):
        raise TypeError(f"{_NAME}: function is {function!r}, must be callable")

    @functools.wraps(function)
    def fused(*args: Any, **kwargs: Any) -> Any:
        traced = trace(_NAME, function, args, kwargs)
        program = traced.program
        plan = _Plan.of(program.jaxpr, program.consts, options)
        with _lock:
            _log.extend(plan.records)
        run = plan.run if plan.changes else jaxpr_as_fun(program)
        constants = program.consts if plan.changes else ()
        results = run(*constants, *traced.arrays)
        return jax.tree.unflatten(traced.result_tree, [_as_array(x) for x in results])

    return fused


def _as_array(result: Any) -> jax.Array:
    """A result; of those that are literals of the trace, an array."""
    return result if isinstance(result, jax.Array) else jnp.asarray(result, result.dtype)


@dataclasses.dataclass
class _Plan:
    """A program, and what of it is computed otherwise.

    Attributes:
      graph: the program.
      matches: by the node whose result is replaced.
      parameters: of nodes with programs of their own, in which something changes.
      sharded: the programs of ``shard_map``, likewise; they can be traced inside of one alone.
      records: of what was found, in programs inside of this one, too.
    """

    graph: Graph
    matches: dict[Node, Match]
    parameters: dict[Node, dict[str, Any]]
    sharded: dict[Node, _Plan]
    records: list[FusionRecord]
    options: _Options

    @staticmethod
    def of(
        jaxpr: Any, constants: Sequence[Any], options: _Options, outside: Sequence[Value] = ()
    ) -> _Plan:
        plan = _Plan(Graph.of(jaxpr, constants, outside), {}, {}, {}, [], options)
        for node in plan.graph.nodes:
            match = _find(node, options, plan.records)
            if match is not None:
                plan.matches[node] = match
            elif node.name == "shard_map":
                inside = dataclasses.replace(options, in_shard_map=True)
                inner = _Plan.of(node.params["jaxpr"], (), inside)
                plan.records += inner.records
                if inner.changes:
                    plan.sharded[node] = inner
            elif (parameters := _changed_parameters(node, options, plan.records)) is not None:
                plan.parameters[node] = parameters
        return plan

    @property
    def changes(self) -> bool:
        return bool(self.matches or self.parameters or self.sharded)

    def run(self, *arguments: Any) -> list[Any]:
        """Computes the results of the program; ``arguments``: constants of the jaxpr first."""
        arrays = dict(zip(self.graph.arguments, arguments, strict=True))

        def read(value: Value) -> Any:
            return arrays.get(value, value.held)

        needed = self._needed()
        for node in self.graph.nodes:
            if node not in needed:
                continue
            if node in self.matches:
                results = [_attend(self.matches[node], read, self.options)]
            elif node in self.sharded:
                results = _in_shard_map(node, self.sharded[node], [read(x) for x in node.inputs])
            else:
                parameters = self.parameters.get(node, node.params)
                results = evaluate(node.equation, parameters, [read(x) for x in node.inputs])
            arrays.update(zip(node.outputs, results, strict=True))
        results = [read(value) for value in self.graph.results]
        return [jnp.copy(x) if i in self.graph.copies else x for i, x in enumerate(results)]

    def _needed(self) -> set[Node]:
        """Nodes that are still needed: scores and probabilities are not."""
        needed: set[Node] = set()
        values = set(self.graph.results)
        for node in reversed(self.graph.nodes):
            if node.equation.effects or any(value in values for value in node.outputs):
                needed.add(node)
                match = self.matches.get(node)
                values.update(node.inputs if match is None else match.inputs())
        return needed


# ---- What is found --------------------------------------------------------------------------------------------------


def _find(node: Node, options: _Options, records: list[FusionRecord]) -> Match | None:
    match: Match | None = None
    miss, pattern = "", ""
    shapes: tuple[tuple[int, ...], ...] = ()
    try:
        match = find(node, fuses_finite_fill=options.finite_fill)
        if match is None:
            return None
        shapes = tuple(x.value.shape for x in (match.q, match.k, match.v))
        pattern = match.pattern
        words = set(pattern.split("+"))
        if any(set(word.split("+")) <= words for word in options.disable):
            raise Miss("disabled")
        if match.dropout is not None and options.exact_dropout:
            raise Miss("its dropout must drop the same weights")
    except Miss as reason:
        match, miss = None, str(reason)
    records.append(FusionRecord(pattern, miss, shapes, source_line((node.equation,), ())))
    return match


# ---- What takes its place -------------------------------------------------------------------------------------------


def _arranged(array: Any, axes: Axes, order: Sequence[str]) -> Any:
    """An array with its axes in another order, with size 1 where it has none, and without others, of size 1."""
    present = [name for name in order if name in axes]
    others = [name for name in axes if name not in order]
    permutation = [axes.index(name) for name in (*others, *present)]
    if permutation != list(range(len(axes))):
        array = jnp.transpose(array, permutation)
    sizes = dict(zip((*others, *present), array.shape, strict=True))
    assert all(sizes[name] == 1 for name in others)
    return _reshaped(array, [sizes.get(name, 1) for name in order])


def _parted(array: Any, axes: Axes) -> tuple[Any, Axes]:
    """An array with its axes that were joined apart again."""
    parts = [part for name, n in zip(axes, array.shape, strict=True) for part in parts_of(name, n)]
    return _reshaped(array, [n for _, n in parts]), tuple(name for name, _ in parts)


def _reshaped(array: Any, shape: Sequence[int]) -> Any:
    return array if tuple(array.shape) == tuple(shape) else array.reshape(shape)


def _attend(match: Match, read: Callable[[Value], Any], options: _Options) -> Any:
    heads = tuple(name for name in (match.head, match.group) if name is not None)
    extents: dict[str, int] = {}
    for named in (match.v, match.k, match.q):
        extents |= extents_of(named)
    extents.setdefault(match.row, 1)

    def size(names: Sequence[str]) -> int:
        return math.prod(extents[name] for name in names)

    def tokens(parts: Sequence[Named], row: str, of_heads: Axes, width: str) -> Any:
        order = (*match.batch, row, *of_heads, width)
        own = extents_of(parts[0])
        arrays = [_arranged(read(x.value), x.axes, order) for x in parts]
        whole = [own.get(name, 1) for name in order[:-1]]
        arrays = [
            x if x is arrays[0] else jnp.broadcast_to(x, (*whole, x.shape[-1])) for x in arrays
        ]
        array = jnp.concatenate(arrays, axis=-1) if len(arrays) > 1 else arrays[0]
        # Heads may be fewer of keys than of queries.
        num_heads = math.prod(own.get(name, 1) for name in of_heads)
        return _reshaped(array, (size(match.batch), own.get(row, 1), num_heads, array.shape[-1]))

    def scores(named: Named) -> Any:
        order = (*match.batch, *heads, match.row, "column")
        array = _arranged(*_parted(read(named.value), named.axes), order)
        leading, rest = array.shape[: len(order) - 2], array.shape[len(order) - 2 :]
        folded = []
        for names, sizes in (
            (match.batch, leading[: len(match.batch)]),
            (heads, leading[len(match.batch) :]),
        ):
            whole = math.prod(sizes) != 1
            folded.append(tuple(extents[n] for n in names) if whole else sizes)
        array = jnp.broadcast_to(array, (*folded[0], *folded[1], *rest))
        return _reshaped(array, (math.prod(folded[0]), math.prod(folded[1]), *rest))

    of_keys = heads[:1] if match.head is not None else ()
    bias = None
    for named, factor in match.biases:
        own = scores(named)
        own = own if factor == 1 else own.astype(wider(own.dtype, jnp.float32)) * factor
        bias = own if bias is None else bias + own
    sinks = None
    if isinstance(match.sinks, Named):
        sinks = scores(match.sinks)[:, :, 0, 0]
    elif match.sinks is not None:
        sinks = jnp.full((1,), match.sinks, jnp.float32)
    mask = None
    for named, visible_if_true in match.masks:
        own = scores(named)
        own = own if visible_if_true else ~own
        mask = own if mask is None else mask & own
    dropout: dict[str, Any] = {}
    if match.dropout is not None:
        dropout = {
            "dropout_rate": match.dropout.rate,
            "dropout_key": read(match.dropout.key),
            "broadcast_dropout": match.dropout.broadcast,
        }
    attention: Callable[..., Any] = dot_product_attention
    out = attention(
        tokens([match.q, *(q for q, _ in match.further)], match.row, heads, "depth"),
        tokens([match.k, *(k for _, k in match.further)], "column", of_keys, "depth"),
        tokens([match.v], "column", of_keys, "width"),
        bias,
        mask,
        scale=match.scale,
        sinks=sinks,
        logits_soft_cap=match.softcap,
        implementation=options.implementation,
        **match.band_options(),
        **dropout,
    )
    order = (*match.batch, match.row, *heads, "width")
    out = _reshaped(out, [extents[name] for name in order])
    result = match.node.outputs[0]
    parts = [
        part
        for name, n in zip(match.result, result.shape, strict=True)
        for part, _ in parts_of(name, n)
    ]
    out = _reshaped(_arranged(out, order, parts), result.shape).astype(result.dtype)
    return partition.sharded_as(out, result.aval)


# ---- Programs inside of programs ------------------------------------------------------------------------------------


# The operations whose programs are programs of the user's; others have some of their own (kernels).
_CALLS: tuple[str, ...] = (
    "scan",
    "while",
    "cond",
    "remat",
    "remat2",
    "checkpoint",
    "jit",
    "pjit",
    "closed_call",
)
_CALLS += ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def _changed_parameters(
    node: Node, options: _Options, records: list[FusionRecord]
) -> dict[str, Any] | None:
    """The parameters of a node with other programs in them, or None if nothing in them changes."""
    if node.name not in _CALLS:
        return None
    if options.in_shard_map:
        records += _left(node, options)
        return None
    outside = _outside(node)
    changed = {k: _changed(v, options, records, outside) for k, v in node.params.items()}
    if all(value is None for value in changed.values()):
        return None
    return {k: v if changed[k] is None else changed[k] for k, v in node.params.items()}


def _outside(node: Node) -> Sequence[Value]:
    """What the first arguments of the programs of a node are outside of it, whenever those run."""
    if node.name == "while":
        return ()
    if node.name == "scan":
        return node.inputs[: node.params["num_consts"]]
    return node.inputs[1:] if node.name == "cond" else node.inputs


def _left(node: Node, options: _Options) -> list[FusionRecord]:
    """Records of what is found in the programs of a node of a ``shard_map``, which stay as they are."""
    miss = f"it is in a {node.name} inside of a shard_map"
    leaves = jax.tree.leaves(node.params, is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr))
    found: list[FusionRecord] = []
    for program in leaves:
        if isinstance(program, ClosedJaxpr):
            found += _Plan.of(program.jaxpr, program.consts, options).records
        elif isinstance(program, Jaxpr) and not program.constvars:
            found += _Plan.of(program, (), options).records
    return [r if r.miss else dataclasses.replace(r, miss=miss) for r in found]


def _changed(
    parameter: Any, options: _Options, records: list[FusionRecord], outside: Sequence[Value]
) -> Any:
    if isinstance(parameter, tuple):
        parts = [_changed(part, options, records, outside) for part in parameter]
        if all(part is None for part in parts):
            return None
        return tuple(p if c is None else c for p, c in zip(parameter, parts, strict=True))
    if isinstance(parameter, ClosedJaxpr):
        return _rewritten(parameter.jaxpr, parameter.consts, options, records, outside)
    if isinstance(parameter, Jaxpr) and not parameter.constvars:
        closed = _rewritten(parameter, (), options, records, outside)
        return None if closed is None else closed.jaxpr
    return None


def _rewritten(
    jaxpr: Any,
    constants: Sequence[Any],
    options: _Options,
    records: list[FusionRecord],
    outside: Sequence[Value],
) -> Any:
    plan = _Plan.of(jaxpr, constants, options, outside)
    if not plan.changes:
        records += plan.records
        return None
    shapes = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        if hasattr(v.aval, "weak_type")
        else jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
        for v in jaxpr.invars
    ]
    closed = jax.make_jaxpr(lambda *arrays: plan.run(*constants, *arrays))(*shapes)
    if closed.consts:
        # A body without constants is what loops, branches and checkpoints take.
        miss = "the body of a loop, a branch or a checkpoint would have constants"
        records += [r if r.miss else dataclasses.replace(r, miss=miss) for r in plan.records]
        return None
    records += plan.records
    return closed


def _in_shard_map(node: Node, plan: _Plan, arrays: Sequence[Any]) -> list[Any]:
    params = node.params
    run: Callable[..., Any] = jax.shard_map(
        lambda *local: tuple(plan.run(*local)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return list(run(*arrays))
