"""The three primitives that join the public functions to the backends, and their rules.

  forward_p   operands                       -> out, lse
  backward_p  operands, residuals            -> the wanted gradients
  tangent_p   operands, out, lse, tangents   -> tangents of (out, lse); linear in the tangents

Differentiating forward_p binds tangent_p. Reverse mode transposes tangent_p into backward_p, which a fused kernel
runs; forward mode evaluates it with the blocked implementation. The two are each other's transpose, and their own
derivative in what they are linear in; in everything else both differentiate again through the blocked implementation,
so that ``jax.jvp``, ``jax.hessian``, ``grad(grad)`` and solvers that transpose a vjp work for every problem. Which
gradients are wanted falls out of the transposition: JAX asks for the cotangents of the operands that really were
differentiated.

Source of the formulas: docs/conventions.md. Why primitives and not ``custom_vjp``: docs/design/0002-primitives.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jattn import blocked, counters, device, device_gradients, dispatch, mapped_queries, reference
from jattn.backends import Backend, Residuals, Wants
from jattn.backends.order_of_sums import varying_sums
from jattn.config import Options
from jattn.errors import NoBackendError, Reason, describe_refusals, warn_caller
from jattn.jax_interface import (
    Primitive,
    ad,
    allow_devices_in_lowering,
    batching,
    jit_primitive,
    lowering_platforms,
    mlir,
    result_aval,
    vary_like,
)
from jattn.reference import Gradients, Tangents
from jattn.sharding import partition
from jattn.spec import Operands, Spec

OUT_NAME, LSE_NAME = "jattn_out", "jattn_lse"

# Saves attention's results and recomputes everything else: for jax.checkpoint(policy=...).
checkpoint_policy = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)

forward_p = Primitive("jattn_forward")
backward_p = Primitive("jattn_backward")
tangent_p = Primitive("jattn_tangent")
for _primitive in (forward_p, backward_p, tangent_p):
    _primitive.multiple_results = True


def attention(
    spec: Spec, operands: Operands[jax.Array], options: Options
) -> tuple[jax.Array, jax.Array]:
    """Computes attention differentiably: out (B, T, N, Dv) and lse (B, N, T).

    Raises:
      NoBackendError: no enabled backend can run the problem where it is expected to run.
    """
    arrays = operands.flat()
    where = dispatch.expected_device(spec, options, arrays, needs_grad=False)
    dispatch.choose_or_raise(spec, where, options, needs_grad=False)
    out, lse = forward_p.bind(*arrays, spec=spec, options=options, needs_grad=False)
    return out, lse


# ---- What the primitives compute -----------------------------------------------------------------------------------


def _present(values: Sequence[Any], wants: Wants) -> Tangents:
    """Puts the values that are there in the places of the operands that ``wants`` marks."""
    rest = iter(values)
    found = [next(rest) if wanted else None for wanted in wants.all_flags()]
    single = len(Tangents._fields) - 1
    return Tangents._make((*found[:single], tuple(found[single:])))


def _split(arrays: Sequence[Any], spec: Spec) -> tuple[Operands[Any], Sequence[Any]]:
    count = Operands.count(spec)
    return Operands.unflatten(spec, tuple(arrays[:count])), arrays[count:]


def _residuals(rest: Sequence[Any], has_dlse: bool) -> Residuals:
    return Residuals(rest[0], rest[1], rest[2], rest[3] if has_dlse else None)


@partition.on_mesh_of_arrays
def _run_forward(
    where: device.Device, *arrays: jax.Array, spec: Spec, options: Options, needs_grad: bool
) -> Any:
    operands, _ = _split(arrays, spec)
    spec = spec.for_operands(operands)
    backend = dispatch.choose_or_raise(spec, where, options, needs_grad=needs_grad)
    return list(backend.forward(spec, operands, where))


@partition.on_mesh_of_arrays
def _run_backward(
    where: device.Device,
    *arrays: jax.Array,
    spec: Spec,
    options: Options,
    wants: Wants,
    has_dlse: bool,
) -> Any:
    operands, rest = _split(arrays, spec)
    spec = spec.for_operands(operands)
    backend = dispatch.choose_or_raise(spec, where, options, needs_grad=True).for_backward()
    _refuse_unstable_sums(spec, backend, wants, options, where)
    residuals = dataclasses.replace(_residuals(rest, has_dlse), sinks=operands.sinks)
    grads: Gradients | None = None
    if any(wants.of_backend().all_flags()):
        grads = backend.backward(
            spec.without_sinks(),
            operands._replace(sinks=None),
            residuals,
            wants.of_backend(),
            where,
            options.determinism,
        )
    return _wanted_gradients(grads, spec, operands, residuals, wants)


def _wanted_gradients(
    grads: Gradients | None,
    spec: Spec,
    operands: Operands[jax.Array],
    residuals: Residuals,
    wants: Wants,
) -> list[jax.Array]:
    """Joins the gradients that a backend computed with those of sinks and slopes.

    Args:
      grads: what a backend computed; None if it was asked for nothing.
      spec, operands, residuals, wants: of the backward pass.
    """
    found: list[jax.Array | None] = [None] * 4 if grads is None else list(grads[:4])
    found += [None, None]
    slopes = None if grads is None else grads.alibi_slopes
    captures = None if grads is None else grads.captures
    misses_captures = any(wants.captures) and captures is None
    if wants.alibi_slopes and slopes is not None and operands.alibi_slopes is not None:
        found[5] = reference.reduce_to_shape(slopes, operands.alibi_slopes.shape)
    if wants.sinks or (wants.alibi_slopes and slopes is None) or misses_captures:
        r = residuals
        delta = reference.row_delta(r.out, r.dout, r.dlse, jnp.dtype(spec.lse_dtype))
        if wants.sinks and operands.sinks is not None:
            found[4] = reference.sinks_gradient(operands.sinks, r.lse, delta)
        if wants.alibi_slopes and slopes is None:
            found[5] = blocked.slopes_gradient(spec, operands, r.lse, r.dout, delta)
        if misses_captures:
            captures = blocked.capture_gradients(spec, operands, r.lse, r.dout, delta)
    found += [None] * len(operands.captures) if captures is None else captures
    return [
        g.astype(x.dtype)
        for g, x, wanted in zip(found, operands.differentiable(), wants.all_flags(), strict=False)
        if wanted and g is not None and x is not None
    ]


@partition.on_mesh_of_arrays
def _blocked_backward(
    *arrays: jax.Array, spec: Spec, options: Options, wants: Wants, has_dlse: bool
) -> list[jax.Array]:
    operands, rest = _split(arrays, spec)
    spec = spec.for_operands(operands)
    r = _residuals(rest, has_dlse)
    grads = (
        blocked.backward(spec, operands, r.out, r.lse, r.dout, r.dlse)
        if any(wants.flags())
        else None
    )
    return _wanted_gradients(grads, spec, operands, r, wants)


@partition.on_mesh_of_arrays
def _blocked_tangent(
    *arrays: jax.Array, spec: Spec, options: Options, wants: Wants
) -> list[jax.Array]:
    operands, rest = _split(arrays, spec)
    spec = spec.for_operands(operands)
    tangents = _present(rest[2:], wants)
    return list(blocked.tangent(spec, operands, rest[0], rest[1], tangents))


def _run_tangent(where: device.Device, *arrays: jax.Array, **params: Any) -> list[jax.Array]:
    return _blocked_tangent(*arrays, **params)


def _count_call(
    primitive: Primitive, where: device.Device, avals: Sequence[Any], params: dict[str, Any]
) -> None:
    """Counts a call site. Not where it runs: what the compiler partitions is traced for all devices and for one."""
    if primitive is tangent_p:
        counters.count_call("xla", "tangent")
        return
    spec, options = params["spec"], params["options"]
    spec = spec.for_operands(_split(avals, spec)[0])
    needs_grad = params.get("needs_grad", True)
    backend = dispatch.choose_or_raise(spec, where, options, needs_grad=needs_grad)
    if primitive is forward_p:
        counters.count_call(backend.name, "forward")
    elif any(params["wants"].of_backend().all_flags()):
        counters.count_call(backend.for_backward().name, "backward")


# ---- Shapes --------------------------------------------------------------------------------------------------------


@forward_p.def_abstract_eval
def _forward_shapes(*avals: Any, spec: Spec, options: Options, needs_grad: bool) -> list[Any]:
    operands, _ = _split(avals, spec)
    shapes = spec.for_operands(operands).shapes()
    like = operands.q
    return [
        result_aval(like, shapes["out"], spec.dtype),
        result_aval(like, shapes["lse"], spec.lse_dtype),
    ]


@backward_p.def_abstract_eval
def _backward_shapes(
    *avals: Any, spec: Spec, options: Options, wants: Wants, has_dlse: bool
) -> list[Any]:
    operands, _ = _split(avals, spec)
    return [
        result_aval(operands.q, x.shape, x.dtype)
        for x, wanted in zip(operands.differentiable(), wants.all_flags(), strict=False)
        if wanted and x is not None
    ]


@tangent_p.def_abstract_eval
def _tangent_shapes(*avals: Any, spec: Spec, options: Options, wants: Wants) -> list[Any]:
    _, rest = _split(avals, spec)
    return [
        result_aval(avals[0], rest[0].shape, rest[0].dtype),
        result_aval(avals[0], rest[1].shape, rest[1].dtype),
    ]


# ---- Differentiation -----------------------------------------------------------------------------------------------


def _forward_jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    spec: Spec,
    options: Options,
    needs_grad: bool,
) -> tuple[Any, Any]:
    where = dispatch.expected_device(spec, options, primals, needs_grad=True)
    backend = dispatch.choose_or_raise(spec, where, options, needs_grad=True).for_backward()
    out, lse = forward_p.bind(*primals, spec=spec, options=options, needs_grad=True)
    # Named inside the rule, because what a checkpointed block lacks later are the residuals of this rule.
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    operand_tangents, _ = _split(tangents, spec)
    differentiable = operand_tangents.differentiable()
    wants = Wants.of([t is not None and not isinstance(t, ad.Zero) for t in differentiable])
    _refuse_unstable_sums(spec, backend, wants, options, where)
    _warn_of_varying_sums(spec, backend, wants, options, where)
    present = [t for t, wanted in zip(differentiable, wants.all_flags(), strict=True) if wanted]
    moved = tangent_p.bind(*primals, out, lse, *present, spec=spec, options=options, wants=wants)
    return (out, lse), moved


def _forward_transpose(
    cotangents: Sequence[Any], *arrays: Any, spec: Spec, options: Options, needs_grad: bool
) -> list[Any]:
    """What reaches the value from a cotangent of out: attention is linear in it, and lse does not depend on it.

    Raises:
      NotImplementedError: something else is to be transposed.
    """
    operands, _ = _split(arrays, spec)
    positions, _ = _split(range(len(arrays)), spec)
    unknown = [i for i, x in enumerate(arrays) if ad.is_undefined_primal(x)]
    if unknown != [positions.v]:
        raise NotImplementedError(
            "jattn.dot_product_attention is linear in value alone, so that jax.linear_transpose of it is defined for"
            " value and nothing else; jax.vjp gives the gradients of all arguments"
        )
    v = operands.v.aval
    dout, _ = _gathered(cotangents)
    found: list[Any] = [None] * len(arrays)
    if isinstance(dout, ad.Zero):
        found[positions.v] = ad.Zero(v)
        return found
    operands = operands._replace(v=ad.instantiate_zeros(ad.Zero(v)))
    out, lse = forward_p.bind(*operands.flat(), spec=spec, options=options, needs_grad=True)
    (found[positions.v],) = backward_p.bind(
        *operands.flat(),
        out,
        lse,
        dout,
        spec=spec,
        options=options,
        wants=Wants(q=False, k=False, v=True, bias=False),
        has_dlse=False,
    )
    return found


def _tangent_transpose(
    cotangents: Sequence[Any], *arrays: Any, spec: Spec, options: Options, wants: Wants
) -> list[Any]:
    operands, rest = _split(arrays, spec)
    out, lse = rest[0], rest[1]
    dout, dlse = _gathered(cotangents)
    unknown = [ad.is_undefined_primal(x) for x in rest[2:]]
    asked = iter(unknown)
    still_wanted = Wants.of([wanted and next(asked) for wanted in wants.all_flags()])
    of_primals: list[Any] = [None] * (len(arrays) - len(unknown))  # nothing is linear in them
    if isinstance(dout, ad.Zero) and isinstance(dlse, ad.Zero):
        return of_primals + _zeros_of_unknown(rest[2:])
    dout = ad.instantiate_zeros(dout)
    has_dlse = not isinstance(dlse, ad.Zero)
    residuals = (out, lse, dout, dlse) if has_dlse else (out, lse, dout)
    grads = iter(
        backward_p.bind(
            *operands.flat(),
            *residuals,
            spec=spec,
            options=options,
            wants=still_wanted,
            has_dlse=has_dlse,
        )
    )
    return of_primals + [next(grads) if is_unknown else None for is_unknown in unknown]


def _backward_transpose(
    cotangents: Sequence[Any],
    *arrays: Any,
    spec: Spec,
    options: Options,
    wants: Wants,
    has_dlse: bool,
) -> list[Any]:
    """What reaches dout and dlse from cotangents of the gradients: the tangents of out and lse in their direction."""
    operands, rest = _split(arrays, spec)
    of_primals: list[Any] = [None] * (len(arrays) - len(rest[2:]))  # nothing is linear in them
    moves = iter(not isinstance(x, ad.Zero) for x in cotangents)
    directions = Wants.of([wanted and next(moves) for wanted in wants.all_flags()])
    if not any(directions.all_flags()):
        return of_primals + _zeros_of_unknown(rest[2:])
    present = [x for x in _gathered(cotangents) if not isinstance(x, ad.Zero)]
    found = tangent_p.bind(
        *operands.flat(), *rest[:2], *present, spec=spec, options=options, wants=directions
    )
    return of_primals + [
        tangent if ad.is_undefined_primal(x) else None
        for x, tangent in zip(rest[2:], found, strict=False)
    ]


def _gathered(cotangents: Sequence[Any]) -> list[Any]:
    """Cotangents as the primitives take them: outside of jit they come sharded over an explicit mesh."""
    return [x if isinstance(x, ad.Zero) else partition.gathered(x) for x in cotangents]


def _zeros_of_unknown(arrays: Sequence[Any]) -> list[Any]:
    return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in arrays]


# Ways out for who wants the same gradients of captures every time.
_STABLE_CAPTURES = (
    "pass the captures through jax.lax.stop_gradient, or, on flash and mem_efficient, let score_mod read at most"
    f" {device_gradients.MAX_READS} elements of arrays of at most 32 bits for a pair"
)


def _refuse_unstable_sums(
    spec: Spec, backend: Backend, wants: Wants, options: Options, where: device.Device
) -> None:
    """Refuses gradients of captures where they are added up in any order, for who asks for the same bits every time.

    Kernels of ours have an order; XLA has none on a GPU.

    Raises:
      NoBackendError: it is so.
    """
    if options.determinism != "strict":
        return
    if not varying_sums(backend, spec, wants, where).captures_of_xla:
        return
    reason = Reason(
        "xla",
        "DETERMINISTIC",
        "determinism",
        "strict",
        "must be another where XLA computes the gradients of score_mod's captures on a GPU, in any order",
        f"leave jattn.deterministic, {_STABLE_CAPTURES}",
    )
    text = "jattn.dot_product_attention: no backend has deterministic gradients of captures here"
    raise NoBackendError(describe_refusals(text, {"xla": (reason,)}), (reason,))


def _warn_of_varying_sums(
    spec: Spec, backend: Backend, wants: Wants, options: Options, where: device.Device
) -> None:
    """Warns of gradients that are added up in an order that varies, for who asks for warnings."""
    if options.determinism != "warn":
        return
    varying = varying_sums(backend, spec, wants, where)
    titles = {"flash": "Flash Attention", "mem_efficient": "Memory Efficient attention"}
    if varying.dq and backend.name == "cudnn":
        warn_caller(
            "cuDNN Attention defaults to a non-deterministic algorithm and has no other here; leave the choice to"
            ' jattn, or use implementation="mem_efficient", under jattn.deterministic("strict")',
            UserWarning,
        )
    elif varying.dq or varying.captures:
        warn_caller(
            f"{titles[backend.name]} defaults to a non-deterministic algorithm; enter"
            ' jattn.deterministic("strict") for the deterministic one',
            UserWarning,
        )
    if varying.captures_of_xla:
        warn_caller(
            "XLA defaults to a non-deterministic algorithm for the gradients of score_mod's captures on a GPU, and has"
            f" no other; {_STABLE_CAPTURES}",
            UserWarning,
        )


def _real_tokens(
    length: int, lengths: jax.Array | None, segments: jax.Array | None
) -> jax.Array | None:
    """Which tokens (B, length) are no padding; None: none is."""
    found = None if segments is None else segments >= 0
    if lengths is not None:
        inside = jnp.arange(length, dtype=jnp.int32)[None, :] < lengths[:, None]
        found = inside if found is None else found & inside
    return found


def _without_padding(operands: Operands[jax.Array]) -> Operands[jax.Array]:
    """The operands with zeros in place of padding.

    Padding may hold NaN. A kernel does not read it, but a formula in jnp that is differentiated does: it hides padding
    by products with 0, and 0 times NaN is NaN.
    """

    def cleaned(x: jax.Array, *of_tokens: jax.Array | None) -> jax.Array:
        is_real = _real_tokens(x.shape[1], *of_tokens)
        return x if is_real is None else jnp.where(is_real[..., None, None], x, 0)

    of_keys = operands.kv_lengths, operands.kv_segments
    return operands._replace(
        q=cleaned(operands.q, operands.q_lengths, operands.q_segments),
        k=cleaned(operands.k, *of_keys),
        v=cleaned(operands.v, *of_keys),
    )


def _without_padded_rows(
    operands: Operands[jax.Array], rest: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """The residuals of a backward pass, with zeros in the incoming gradients (B, T, N, Dv) and (B, N, T) of padding."""
    is_real = _real_tokens(operands.q.shape[1], operands.q_lengths, operands.q_segments)
    if is_real is None:
        return rest
    out, lse, dout, *dlse = rest
    return [
        out,
        lse,
        jnp.where(is_real[..., None, None], dout, 0),
        *(jnp.where(is_real[:, None], x, 0) for x in dlse),
    ]


def _jvp_through(
    function: Callable[..., list[jax.Array]], primitive: Primitive
) -> Callable[..., Any]:
    """A derivative rule that keeps the primitive's value and differentiates ``function``, its equal in jnp.

    The primitive is linear in what follows operands, out and lse: there it is its own derivative.
    """

    def rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        values = primitive.bind(*primals, **params)
        moving = [
            i
            for i, (x, t) in enumerate(zip(primals, tangents, strict=True))
            if not isinstance(t, ad.Zero) and jnp.issubdtype(jnp.result_type(x), jnp.floating)
        ]
        first_linear = Operands.count(params["spec"]) + 2
        if moving and moving[0] >= first_linear:
            directions = [ad.instantiate_zeros(t) for t in tangents[first_linear:]]
            return values, primitive.bind(*primals[:first_linear], *directions, **params)

        def of_moving(*some: Any) -> list[jax.Array]:
            arrays = list(primals)
            for i, x in zip(moving, some, strict=True):
                arrays[i] = x
            operands, rest = _split(arrays, params["spec"])
            if primitive is backward_p:
                rest = _without_padded_rows(operands, rest)
            operands = _without_padding(operands)
            return function(*operands.flat(), *rest, **params)

        _, moved = jax.jvp(
            of_moving, tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving)
        )
        return values, moved

    return rule


ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_jvps[tangent_p] = _jvp_through(_blocked_tangent, tangent_p)
ad.primitive_jvps[backward_p] = _jvp_through(_blocked_backward, backward_p)
ad.primitive_transposes[forward_p] = _forward_transpose
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_transposes[backward_p] = _backward_transpose


# ---- Batching: the mapped axis becomes part of the batch -----------------------------------------------------------


def _fold(x: Any, dim: int | None, size: int, batch: int) -> Any:
    """(size, B or 1, ...) -> (size * B, ...), the mapped axis first; an array that was not mapped is repeated."""
    x = jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
    if x.shape[1] != batch:
        x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
    return x.reshape(size * batch, *x.shape[2:])


def _batch_rule(primitive: Primitive) -> Callable[..., Any]:
    def rule(
        arrays: Sequence[Any], dims: Sequence[int | None], *, spec: Spec, **params: Any
    ) -> Any:
        size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
        give_back = partition.sharder_of_mapped_axis(arrays, dims)
        arrays = [partition.gathered(x) for x in arrays]
        if isinstance(size, int) and size == 0:
            results = _of_no_element(primitive, arrays, dims, spec=spec, **params)
            return [give_back(x) for x in results], [0] * len(results)
        arrays, dims = _with_whole_ids(spec, arrays, dims)
        operands, _ = _split(arrays, spec)
        operand_dims, _ = _split(dims, spec)
        has_rows = spec.dropout is not None and spec.dropout.rows
        if has_rows and operand_dims.dropout_keys is not None:
            return _one_by_one(primitive, arrays, dims, spec=spec, **params)
        if primitive is forward_p and mapped_queries.fit_into_heads(spec, operand_dims, size):
            results = _forward_in_heads(spec, operands, operand_dims, size, **params)
            return [give_back(x) for x in results], [0] * len(results)
        batch = operands.q.shape[0 if operand_dims.q is None or operand_dims.q > 0 else 1]
        spec, arrays, dims = _with_mapped_captures(spec, arrays, dims, size, params)
        # What is the same for the whole folded batch need not be repeated, unless its gradient is wanted per mapped
        # element.
        shared = _shareable(arrays, dims, spec, primitive, params)
        folded = [
            x if i in shared else _fold(x, d, size, batch)
            for i, (x, d) in enumerate(zip(arrays, dims, strict=True))
        ]
        new_spec = spec.for_operands(_split(folded, spec)[0])
        results = primitive.bind(*folded, spec=new_spec, **params)
        whole = 0 if primitive is not backward_p else sum(params["wants"].captures)
        unfolded = [x.reshape(size, batch, *x.shape[1:]) for x in results[: len(results) - whole]]
        if primitive is backward_p:
            # A folded operand has a full batch axis; per mapped element it may have had a broadcast one.
            flags = params["wants"].all_flags()
            wanted = [
                name for name, flag in zip(Tangents._fields[:-1], flags, strict=False) if flag
            ]
            for i, name in enumerate(wanted):
                shape = _shape_of_operand(spec, name)
                if shape is not None:
                    reduce = functools.partial(reference.reduce_to_shape, shape=shape)
                    unfolded[i] = jax.vmap(reduce)(unfolded[i])
        # Gradients of captures have the mapped axis as the captures have it.
        unfolded += results[len(results) - whole :]
        return [give_back(x) for x in unfolded], [0] * len(unfolded)

    return rule


def _forward_in_heads(
    spec: Spec,
    operands: Operands[jax.Array],
    dims: Operands[int | None],
    size: int,
    **params: Any,
) -> list[jax.Array]:
    """out (size, B, T, N, Dv) and lse (size, B, N, T) of mapped queries that share keys and values."""
    folded = mapped_queries.into_heads(spec, operands, dims, size)
    out, lse = forward_p.bind(*folded.flat(), spec=spec.for_operands(folded), **params)
    return [
        mapped_queries.out_of_heads(spec, out, 2, size),
        mapped_queries.out_of_heads(spec, lse, 1, size),
    ]


def _of_no_element(
    primitive: Primitive, arrays: Sequence[Any], dims: Sequence[int | None], **params: Any
) -> list[jax.Array]:
    """The results where a mapped axis has no element, in front: arrays without one."""
    shapes = [
        x.shape if d is None else (*x.shape[:d], *x.shape[d + 1 :])
        for x, d in zip(arrays, dims, strict=True)
    ]
    types = [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(shapes, arrays, strict=True)]
    of_one = jax.eval_shape(functools.partial(primitive.bind, **params), *types)
    return vary_like([jnp.zeros((0, *x.shape), x.dtype) for x in of_one], tuple(arrays))


def _with_whole_ids(
    spec: Spec, arrays: Sequence[Any], dims: Sequence[int | None]
) -> tuple[list[Any], list[int | None]]:
    """The indices of batch entries and heads without the mapped axis.

    They are mapped where JAX maps all residuals: of a branch that is chosen by mapped element, for one. Elements that
    chose another branch have zeros, all others the same indices.
    """
    arrays, dims = list(arrays), list(dims)
    positions, _ = _split(range(len(arrays)), spec)
    for i in (positions.batch_ids, positions.head_ids):
        if i is not None and dims[i] is not None:
            arrays[i], dims[i] = arrays[i].max(dims[i]), None
    return arrays, dims


def _with_mapped_captures(
    spec: Spec,
    arrays: Sequence[Any],
    dims: Sequence[int | None],
    size: int,
    params: dict[str, Any],
) -> tuple[Spec, list[Any], list[int | None]]:
    """A problem whose captures have the mapped axis first, where they are mapped, as arrays that are not.

    Its batch indices say which mapped element a batch entry belongs to, and its score function takes that element. A
    capture that is wanted a gradient of, or moves, is made to have the axis: each element has a gradient of its own.
    """
    arrays, dims = list(arrays), list(dims)
    positions, rest = _split(range(len(arrays)), spec)
    wants = params.get("wants")
    flags = wants.captures if wants is not None else ()
    is_mapped = [dims[i] is not None for i in positions.captures]
    if any(flags):
        is_mapped = [a or b for a, b in zip(is_mapped, flags, strict=True)]
    if spec.score_mod is None or not any(is_mapped):
        return spec, arrays, dims
    # Tangents of captures come last.
    of_tangents = list(rest[len(rest) - sum(flags) :]) if "has_dlse" not in params and flags else []
    moved = [i for i, mapped in zip(positions.captures, is_mapped, strict=True) if mapped]
    for i in (*moved, *of_tangents):
        x, dim = arrays[i], dims[i]
        arrays[i] = (
            jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        )
        dims[i] = None
    ids = positions.batch_ids
    assert ids is not None
    assert dims[ids] is None  # `_with_whole_ids`
    elements = jnp.arange(size, dtype=jnp.int32)[:, None] * spec.score_mod.batch_extent
    arrays[ids], dims[ids] = elements + arrays[ids][None], 0
    program = spec.score_mod.mapped(size, is_mapped)
    return dataclasses.replace(spec, score_mod=program), arrays, dims


def _shape_of_operand(spec: Spec, name: str) -> tuple[int, ...] | None:
    """The shape of an operand that may broadcast over the batch; None for the others."""
    if name == "bias":
        return spec.bias
    extents = {"sinks": spec.sinks, "alibi_slopes": spec.alibi_slopes}.get(name)
    return None if extents is None else (*extents, 1)


def _one_by_one(
    primitive: Primitive, arrays: Sequence[Any], dims: Sequence[int | None], **params: Any
) -> Any:
    """Runs the mapped elements in sequence: the table of keys of packed sequences has no batch axis to fold into."""
    mapped = [jnp.moveaxis(x, d, 0) for x, d in zip(arrays, dims, strict=True) if d is not None]

    def one(some: list[Any]) -> Any:
        rest = iter(some)
        whole = [x if d is None else next(rest) for x, d in zip(arrays, dims, strict=True)]
        return primitive.bind(*whole, **params)

    results = jax.lax.map(one, mapped)
    return results, [0] * len(results)


def _shareable(
    arrays: Sequence[Any],
    dims: Sequence[int | None],
    spec: Spec,
    primitive: Primitive,
    params: dict[str, Any],
) -> set[int]:
    """Positions of the operands that broadcast over the batch and are not mapped, and of a table of dropout keys."""
    positions, _ = _split(range(len(arrays)), spec)
    may_broadcast = ("bias", "mask", "sinks", "alibi_slopes", "dropout_keys", "dropout_rate")
    shared: set[int] = set()
    for name in may_broadcast:
        position = getattr(positions, name)
        if position is None or dims[position] is not None:
            continue
        is_table = name == "dropout_keys" and spec.dropout is not None and spec.dropout.rows
        wants_it = primitive is not forward_p and getattr(params["wants"], name, False)
        if is_table or (arrays[position].shape[0] == 1 and not wants_it):
            shared.add(position)
    # Where captures are mapped, the score function knows: `_with_mapped_captures`.
    shared.update(positions.captures)
    if positions.head_ids is not None:
        shared.add(positions.head_ids)
    if primitive is tangent_p:
        count = sum(params["wants"].captures)
        shared.update(range(len(arrays) - count, len(arrays)))
    return shared


for _primitive in (forward_p, backward_p, tangent_p):
    batching.primitive_batchers[_primitive] = _batch_rule(_primitive)


# ---- Evaluation and lowering ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _compiled(
    primitive: Primitive, params: tuple[tuple[str, Any], ...], registrations: int
) -> Callable[..., Any]:
    return jit_primitive(primitive, dict(params))


def _evaluate(primitive: Primitive, *arrays: Any, **params: Any) -> Any:
    run = _compiled(primitive, tuple(sorted(params.items())), dispatch.registrations())
    with jax.disable_jit(False):  # there is nothing inside to run one by one
        return run(*arrays)


def _register_lowerings(primitive: Primitive, run: Callable[..., Any]) -> None:
    def program(
        ctx: mlir.LoweringRuleContext, platform: str, params: dict[str, Any]
    ) -> Callable[..., Any]:
        named: device.Device | None = params["options"].device
        where = device.describe(platform)
        if named is not None and named.platform == platform:
            where = named
        _count_call(primitive, where, ctx.avals_in, params)
        function: Callable[..., Any] = functools.partial(run, where)
        if partition.is_automatic(ctx):
            function = partition.partitioned(primitive.name, function, params)
        return functools.partial(function, **params)

    def rule(*platforms: str) -> Callable[..., Any]:
        def lower(ctx: mlir.LoweringRuleContext, *values: Any, **params: Any) -> Any:
            names = platforms or lowering_platforms(ctx)
            programs = {name: program(ctx, name, params) for name in names}
            several = functools.partial(lax.platform_dependent, **programs)
            function = several if len(names) > 1 else programs[names[0]]
            return mlir.lower_fun(function, multiple_results=True)(ctx, *values)

        return lower

    primitive.def_impl(functools.partial(_evaluate, primitive))
    mlir.register_lowering(primitive, rule("cpu"), platform="cpu")
    mlir.register_lowering(primitive, rule("cuda"), platform="cuda")
    mlir.register_lowering(primitive, rule())  # of every other platform
    allow_devices_in_lowering(primitive)


_register_lowerings(forward_p, _run_forward)
_register_lowerings(backward_p, _run_backward)
_register_lowerings(tangent_p, _run_tangent)
