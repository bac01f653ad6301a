"""Everything that jattn takes from JAX and that JAX does not promise to keep: names, and how to use them.

A new JAX release that moves one of these fails in ``tests/cpu/test_jax_interface.py``, which says which.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import NamedSharding, PartitionSpec

T = TypeVar("T")

__all__ = [
    "CUDNN_PRIMITIVES",
    "CUDNN_TARGETS",
    "MOVES",
    "ClosedJaxpr",
    "CudnnMask",
    "Jaxpr",
    "Literal",
    "NamedSharding",
    "PartitionSpec",
    "Primitive",
    "ad",
    "axes_named_by",
    "batching",
    "bind",
    "clipped",
    "cudnn_backward",
    "cudnn_forward",
    "cudnn_version",
    "depends",
    "equations",
    "evaluate",
    "evaluate_jaxpr",
    "inlined_jaxpr",
    "jaxpr_as_fun",
    "jit_primitive",
    "lowering_platforms",
    "manual_axes",
    "mlir",
    "nested_call",
    "other_effects",
    "reads_input",
    "result_aval",
    "source_line",
    "unify",
    "vary_like",
]


def axes_named_by(equation: Any) -> set[Any]:
    """Mesh axes, or axes that ``vmap`` gave a name, over which an equation of a jaxpr works: a collective, or what asks
    for the own index.
    """
    return {x.name for x in equation.effects if _is_of_axis(x)}


def other_effects(jaxpr: Jaxpr) -> set[Any]:
    """What a jaxpr does beside computing its results; that it names axes is no such thing."""
    return {x for x in jaxpr.effects if not _is_of_axis(x)}


def _is_of_axis(effect: Any) -> bool:
    from jax._src.core import NamedAxisEffect

    return isinstance(effect, NamedAxisEffect)


def manual_axes(*arrays: Any) -> frozenset[str]:
    """Mesh axes of an enclosing ``shard_map`` over which any of the arrays varies."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))


def _cast(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = axes - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def unify(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Makes all arrays vary over the same manual mesh axes.

    Done outside the primitives, so that JAX transposes the cast into the sum over those axes that the gradient of a
    replicated operand needs.
    """
    axes = manual_axes(*arrays)
    return tuple(_cast(x, axes) for x in arrays) if axes else arrays


def vary_like(values: T, arrays: tuple[jax.Array, ...]) -> T:
    """Makes every leaf of ``values`` vary over the manual mesh axes of ``arrays`` (the start of a loop over them)."""
    axes = manual_axes(*arrays)
    return jax.tree.map(lambda x: _cast(x, axes), values) if axes else values


def result_aval(like: Any, shape: tuple[int, ...], dtype: str) -> jax.core.ShapedArray:
    """The type of a primitive's result: ``shape`` and ``dtype``, varying over the same manual mesh axes as
    ``like``.
    """
    element = jax.numpy.dtype(dtype)
    varying = like.manual_axis_type.varying
    if not varying:
        return jax.core.ShapedArray(shape, element)
    sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return jax.core.ShapedArray(
        shape,
        element,
        sharding=sharding,
        manual_axis_type=jax.sharding.ManualAxisType(varying=varying),
    )


def jit_primitive(primitive: Primitive, params: dict[str, Any]) -> Callable[..., Any]:
    """Returns a compiled function of arrays that evaluates a primitive outside of any trace.

    The mark keeps ``jax_debug_nans`` from running it again op by op, which would end here again, without end; with it
    JAX raises ``FloatingPointError`` with the primitive's name.
    """

    def run(*arrays: jax.Array) -> Any:
        return primitive.bind(*arrays, **params)

    run.__name__ = run.__qualname__ = primitive.name
    run._apply_primitive = True  # type: ignore[attr-defined]
    return jax.jit(run)


def lowering_platforms(ctx: mlir.LoweringRuleContext) -> tuple[str, ...]:
    """The platforms for which a rule lowers: mostly one; several while exporting for several without rules of their
    own.
    """
    return tuple(ctx.platforms or ctx.module_context.platforms)


def allow_devices_in_lowering(primitive: Primitive) -> None:
    """Lets the lowering of ``primitive`` hold a custom partitioning; no public module has this registry."""
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(primitive)


def cudnn_version() -> int:
    """Returns the version of the cuDNN library that XLA calls, 91900 for 9.19.0, or 0 if there is none."""
    from jax._src.lib import cuda_versions

    try:
        return 0 if cuda_versions is None else int(cuda_versions.cudnn_get_version())
    except RuntimeError:
        return 0


CUDNN_PRIMITIVES = ("dot_product_attention_fwd", "dot_product_attention_bwd")  # names in jaxprs
CUDNN_TARGETS = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")  # names in lowered programs


class CudnnMask(NamedTuple):
    """Which pairs a call of cuDNN shows beside what lengths hide.

    Attributes:
      causal: query t sees keys up to t alone.
      window: how many keys up to its own a query sees, or None; with ``causal`` alone.
    """

    causal: bool
    window: int | None


def cudnn_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: tuple[jax.Array, jax.Array] | None,
    mask: CudnnMask,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Computes attention by the cuDNN call of XLA, bound below JAX's rules of partitioning and derivatives.

    Args:
      q: (B, T, N, D), float16 or bfloat16.
      k, v: (B, S, K, D).
      lengths: of queries and keys, (B,) int32, at least 1; None if all rows are inside.
      mask: which pairs are shown.
      scale: multiplier of q.k, positive.

    Returns:
      out (B, T, N, D), and the log-sum-exp (B, N, T) in float32.
    """
    forward, parameters = _cudnn("fwd", lengths, mask, scale)
    none = jax.numpy.zeros(0, q.dtype)
    arrays = (q, k, v, none, *(lengths or (none, none)), *(none,) * 4)
    out, lse = forward.bind(*arrays, is_training=True, **parameters)
    return out, lse


def cudnn_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    lengths: tuple[jax.Array, jax.Array] | None,
    mask: CudnnMask,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes dq, dk and dv from the results of ``cudnn_forward`` and the gradient of out."""
    backward, parameters = _cudnn("bwd", lengths, mask, scale)
    none = jax.numpy.zeros(0, q.dtype)
    arrays = (q, k, v, none, *(lengths or (none, none)), *(none,) * 4, lse, out, dout)
    dq, dk, dv = backward.bind(*arrays, **parameters)
    return dq, dk, dv


def _cudnn(
    name: str, lengths: tuple[jax.Array, jax.Array] | None, mask: CudnnMask, scale: float
) -> tuple[Primitive, dict[str, Any]]:
    """The primitive "fwd" or "bwd" and its parameters."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    if lengths is None:
        kind = cudnn.MaskType.CAUSAL if mask.causal else cudnn.MaskType.NO_MASK
    else:
        kind = cudnn.MaskType.PADDING_CAUSAL if mask.causal else cudnn.MaskType.PADDING
    parameters = {
        "scale": scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, and no gradient of one
        "mask_type": kind,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": mask.window,
    }
    return getattr(cudnn, f"_dot_product_attention_{name}_p"), parameters


def equations(
    jaxpr: Any, repeats: int = 1, around: tuple[Any, ...] = ()
) -> Iterator[tuple[Any, int, tuple[Any, ...]]]:
    """Yields every equation of a jaxpr and of those inside it, with how often it runs and the equations around it, the
    innermost first.

    Loops of a known length count; of a ``while`` and of the branches of a ``cond`` each body counts once.
    """
    for equation in jaxpr.eqns:
        yield equation, repeats, around
        inner = repeats
        if equation.primitive.name == "scan":
            inner *= equation.params["length"]
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                body = getattr(part, "jaxpr", part)
                if hasattr(body, "eqns"):
                    yield from equations(body, inner, (equation, *around))


def inlined_jaxpr(equation: Any) -> Any | None:
    """The closed jaxpr of a ``jit`` call that says nothing about shardings and donates nothing; None for all else."""
    params = equation.params
    if equation.primitive.name not in ("jit", "pjit"):
        return None
    shardings = (*params["in_shardings"], *params["out_shardings"])
    is_plain = all(type(x).__name__ == "UnspecifiedValue" for x in shardings)
    return params["jaxpr"] if is_plain and not any(params["donated_invars"]) else None


def nested_call(equation: Any) -> ClosedJaxpr | None:
    """The closed jaxpr that an equation calls once, with its own inputs, whatever it says of derivatives, memory and
    compilation; None for all else.
    """
    names = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call")
    if equation.primitive.name not in (*names, "custom_vjp_call", "custom_vjp_call_jaxpr"):
        return None
    params = equation.params
    body = next(params[x] for x in ("jaxpr", "call_jaxpr", "fun_jaxpr") if x in params)
    return body if hasattr(body, "consts") else ClosedJaxpr(body, ())


# Operations of which each element of the result is one of the first operand's.
MOVES = (
    "dynamic_slice",
    "gather",
    "slice",
    "squeeze",
    "reshape",
    "broadcast_in_dim",
    "transpose",
    "rev",
    "copy",
)


def traced_anew(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as another object: JAX keeps traces by object, with the arrays that it closed over then."""

    @functools.wraps(function)
    def another(*arguments: Any) -> Any:
        return function(*arguments)

    return another


def evaluate_jaxpr(
    jaxpr: Jaxpr,
    *inputs: Any,
    constants: Sequence[Any] = (),
    keeps_rules: bool = False,
    has_branches: bool = True,
    replaced: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> list[Any]:
    """Evaluates an open jaxpr where it stands, whatever mesh and manual axes it was traced on; nested calls become part
    of it.

    Args:
      jaxpr: what to evaluate.
      inputs: its arguments.
      constants: belong to its constvars.
      keeps_rules: derivatives that functions bring along are kept.
      has_branches: of branches one is evaluated; else all are, and their results selected from.
      replaced: functions of operands and parameters in the place of operations of one result, by the names of these;
        not in bodies of loops.
    """

    def of_nested(called: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        return evaluate_jaxpr(
            called.jaxpr,
            *arguments,
            constants=called.consts,
            keeps_rules=keeps_rules,
            has_branches=has_branches,
            replaced=replaced,
        )

    values: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
    values |= dict(zip(jaxpr.constvars, constants, strict=True))

    def value_of(x: Any) -> Any:
        return (
            np.asarray(x.val) if isinstance(x, Literal) else values[x]
        )  # an array may be on a mesh

    for equation in jaxpr.eqns:
        primitive = equation.primitive
        arguments: tuple[Any, ...] = tuple(value_of(x) for x in equation.invars)
        called = nested_call(equation)
        if primitive.name in ("pvary", "pcast", "reshard"):
            results = list(arguments)
        elif called is not None and not (keeps_rules and primitive.name.startswith("custom_")):
            results = of_nested(called, arguments)
        elif primitive.name == "cond" and not has_branches:
            which, *operands = arguments
            branches = [of_nested(x, operands) for x in equation.params["branches"]]
            results = [_selected(which, cases) for cases in zip(*branches, strict=True)]
        elif primitive.name in replaced:
            results = [replaced[primitive.name](*unify(arguments), **equation.params)]
        else:
            results = bind(equation, arguments)
        values |= dict(zip(equation.outvars, results, strict=True))
    return [value_of(x) for x in jaxpr.outvars]


def _selected(which: Any, cases: Sequence[Any]) -> Any:
    """One of several values, by an integer."""
    if len(cases) == 1:
        return cases[0]
    cases = unify(tuple(jax.numpy.asarray(x) for x in cases))
    return lax.select_n(which != 0 if len(cases) == 2 else which, *cases)


def bind(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluates one equation where it stands; a function that brings its derivative along keeps it."""
    primitive, unified = equation.primitive, unify(tuple(inputs))
    if primitive.name == "custom_jvp_call" and _is_manual(equation.params["call_jaxpr"]):
        return _with_its_rule(equation.params, unified)
    axes = manual_axes(*unified)
    like = next((x for x in unified if axes), None)
    params = {name: _where_it_stands(x, like) for name, x in equation.params.items()}
    found = primitive.bind(*unified, **primitive.get_bind_params(params))
    return list(found) if primitive.multiple_results else [found]


def _where_it_stands(value: Any, like: Any) -> Any:
    """A parameter of an equation, and if it is a jaxpr, or several, one whose values vary over the manual axes of
    ``like``; over none if that is None.
    """
    if type(value) is tuple:
        return tuple(_where_it_stands(x, like) for x in value)
    if not isinstance(value, ClosedJaxpr):
        return value
    if like is None and not _is_manual(value):
        return value

    def again(*inputs: Any) -> list[Any]:
        results = evaluate_jaxpr(value.jaxpr, *inputs, constants=value.consts, keeps_rules=True)
        return results if like is None else vary_like(results, (like,))

    avals: list[Any] = [x.aval for x in value.jaxpr.invars]
    types: list[Any] = [
        jax.ShapeDtypeStruct(x.shape, x.dtype)
        if like is None
        else result_aval(jax.typeof(like), x.shape, x.dtype)
        for x in avals
    ]
    return jax.make_jaxpr(again)(*types)


def _is_manual(closed: ClosedJaxpr) -> bool:
    """Whether any value varies over manual mesh axes."""
    variables = (*closed.jaxpr.invars, *(x for e in closed.jaxpr.eqns for x in e.outvars))
    avals: list[Any] = [x.aval for x in variables]
    return any(x.manual_axis_type.varying for x in avals)


def _with_its_rule(params: dict[str, Any], inputs: Sequence[Any]) -> list[Any]:
    """Calls a function that brings its derivative along, and that was traced on manual mesh axes, where it stands."""
    called = params["call_jaxpr"]
    avals: list[Any] = [x.aval for x in called.jaxpr.invars]
    meshes = [x.sharding.mesh for x in avals if x.manual_axis_type.varying]

    @jax.custom_jvp
    def function(*arguments: Any) -> list[Any]:
        return evaluate_jaxpr(called.jaxpr, *arguments, constants=called.consts, keeps_rules=True)

    @function.defjvp
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        own = slice(params["num_consts"], None)
        with jax.sharding.use_abstract_mesh(meshes[0]):
            traced = params["jvp_jaxpr_fun"].call_wrapped(*[False] * len(primals[own]))
        jaxpr, constants, is_zero = traced
        results = evaluate_jaxpr(
            jaxpr, *primals[own], *tangents[own], constants=constants, keeps_rules=True
        )
        values, moved = results[: len(is_zero)], iter(results[len(is_zero) :])
        zeros = map(jax.numpy.zeros_like, values)
        return values, [
            zero if flag else next(moved) for zero, flag in zip(zeros, is_zero, strict=True)
        ]

    return list(function(*inputs))


def clipped(equation: Any) -> Any:
    """The same equation, where a gather that was promised indices within bounds holds them there, and its transpose."""
    params = equation.params
    if params.get("mode") != lax.GatherScatterMode.PROMISE_IN_BOUNDS:
        return equation
    return equation.replace(params=params | {"mode": lax.GatherScatterMode.CLIP})


def depends(equation: Any) -> list[set[int]]:
    """The places of the inputs that each output of an equation depends on."""
    inputs = set(range(len(equation.invars)))
    if len(equation.outvars) == 1:
        return [inputs]
    types = [x.aval for x in equation.invars]
    jaxpr = jax.make_jaxpr(lambda *x: bind(equation, x))(*types).jaxpr
    outputs = range(len(equation.outvars))
    used = [dce_jaxpr(jaxpr, [i == output for i in outputs])[1] for output in outputs]
    return [{i for i, flag in enumerate(flags) if flag} for flags in used]


def reads_input(jaxpr: Jaxpr, place: int) -> bool:
    """Whether any output depends on an input."""
    used: Sequence[bool] = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1]
    return used[place]


def evaluate(equation: Any, params: dict[str, Any], inputs: Sequence[Any]) -> list[Any]:
    """Evaluates an equation of a jaxpr, with parameters of its own or changed ones."""
    from jax._src import source_info_util

    bound = equation.primitive.get_bind_params(params)
    source = equation.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=names), equation.ctx.manager:
        results = equation.primitive.bind(*inputs, **bound)
    return list(results) if equation.primitive.multiple_results else [results]


def source_line(equations: tuple[Any, ...], skipped: tuple[Path, ...]) -> str:
    """Where the user's program asked for an equation: "file:line (function)", or an empty string.

    Args:
      equations: one of a jaxpr, and those around it: what JAX traces anew (a body of ``shard_map``) has lost its line.
      skipped: folders of libraries, whose frames are passed over; JAX's own always are.
    """
    folders = (Path(jax.__file__).parent, *skipped)
    for equation in equations:
        traceback = equation.source_info.traceback
        for frame in traceback.frames if traceback is not None else ():
            path = Path(frame.file_name)
            if not any(folder in path.parents for folder in folders):
                return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return ""
