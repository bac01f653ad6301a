"""Asking without running: who would run a call, with what, and why nobody else.

``explain`` takes a call or a whole function; a function is traced, and every call site in it is explained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np

from jattn import call_timing, config, device, dispatch
from jattn.api import dot_product_attention
from jattn.arguments import Call, result_flags
from jattn.arrays import as_array
from jattn.backends import BY_NAME_ONLY, Backend, Wants
from jattn.call_plan import Pass, PassName, plan_pass
from jattn.call_timing import Timing
from jattn.config import Determinism, Options
from jattn.device import Device, checked
from jattn.errors import Reason, lines_of
from jattn.jax_interface import equations, source_line
from jattn.masks import CausalBias
from jattn.spec import Operands, Spec

Shaped = Any  # an array, or anything with shape and dtype

_NAME = "jattn.explain"

# What a call is asked for that is differentiated with respect to query, key and value.
_WANTS_QKV = Wants(q=True, k=True, v=True, bias=False)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What would run a call, and why nothing else.

    Attributes:
      chosen: name of the backend, or None if every candidate refuses.
      reasons: backend -> its reasons for refusing; empty for one that could run the call but is not chosen.
      spec: the problem.
      device: the machine that the answer is for.
      needs_grad: whether the answer is for a call that is differentiated.
      planner: finds ``passes``.
      timings: one for each pass if times were asked for, else empty.
    """

    chosen: str | None
    reasons: dict[str, tuple[Reason, ...]]
    spec: Spec
    device: Device
    needs_grad: bool
    planner: Callable[[], tuple[Pass, ...]] = dataclasses.field(repr=False, compare=False)
    timings: tuple[Timing, ...] = ()

    @functools.cached_property
    def passes(self) -> tuple[Pass, ...]:
        """What runs, forward first; empty if nobody does; the one pass of a call site in a function.

        Found when first asked for, because it traces the backend.
        """
        return self.planner()

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, ready for JSON."""
        return {
            "chosen": self.chosen,
            "device": str(self.device),
            "needs_grad": self.needs_grad,
            "problem": str(self.spec),
            "reasons": {
                backend: [
                    {**dataclasses.asdict(reason), "actual": str(reason.actual)}
                    for reason in reasons
                ]
                for backend, reasons in self.reasons.items()
            },
            "passes": [dataclasses.asdict(each) for each in self.passes],
            "timings": [dataclasses.asdict(each) for each in self.timings],
        }

    def __str__(self) -> str:
        what = "forward and backward" if self.needs_grad else "forward"
        lines = [f"attention on {self.device}, {what}", *self._chosen(), *self._others()]
        return "\n".join(lines)

    def _chosen(self) -> list[str]:
        lines = [f"  {self.spec}", f"chosen: {self.chosen}"]
        for number, each in enumerate(self.passes):
            timing = self.timings[number] if self.timings else None
            lines.append("  " + _describe_pass(each, timing))
            lines.extend(f"    {kernel}" for kernel in each.kernels)
        return lines

    def _others(self) -> list[str]:
        by_name = {backend.name for backend in BY_NAME_ONLY}
        lines: list[str] = []
        for backend, reasons in self.reasons.items():
            runs = "would run where it is named" if backend in by_name else "would run"
            lines.append(f"{backend}: {'refuses' if reasons else runs}")
            lines.extend(lines_of(reasons))
        return lines


@dataclasses.dataclass(frozen=True)
class CallSite:
    """One place in a function that runs a pass of attention.

    Attributes:
      where: ``file:line (function)`` of the user's program.
      count: how often it runs in one call of the function; the body of a ``while`` loop counts once.
      explanation: who runs it; its ``passes`` has one entry.
    """

    where: str
    count: int
    explanation: Explanation


@dataclasses.dataclass(frozen=True)
class FunctionExplanation:
    """Every call site of attention in a function, in the order in which they run; equal ones are joined.

    Attributes:
      sites: one ``CallSite`` for each pass of each call.
    """

    sites: tuple[CallSite, ...]

    @property
    def flops(self) -> float | None:
        """Floating-point operations of all attention in the function; None if an extent is symbolic."""
        total = 0.0
        for site in self.sites:
            for each in site.explanation.passes:
                if each.flops is None:
                    return None
                total += site.count * each.flops
        return total

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, ready for JSON."""
        return {
            "flops": self.flops,
            "sites": [
                {
                    "where": site.where,
                    "count": site.count,
                    **site.explanation.as_dict(),
                }
                for site in self.sites
            ],
        }

    def __str__(self) -> str:
        if not self.sites:
            return "no call of jattn.dot_product_attention"
        lines: list[str] = []
        first_with: dict[tuple[str, ...], int] = {}
        for number, site in enumerate(self.sites, 1):
            found = site.explanation
            pass_name = found.passes[0].name
            times = f", {site.count} times" if site.count > 1 else ""
            lines.append(f"{number}. {pass_name} on {found.device}{times}, {site.where}")
            others = tuple(found._others())
            same = first_with.setdefault(others, number)
            shown = others if same == number else (f"others: as in {same}",)
            lines.extend("   " + line for line in (*found._chosen(), *shown))
        return "\n".join(lines)


def _describe_pass(each: Pass, timing: Timing | None) -> str:
    parts = [each.name if timing is None else f"{each.name} {timing.median_us:,.1f} us"]
    if each.flops is not None:
        bound = "at most " if each.data_dependent else ""
        parts.append(f"{bound}{_with_unit(each.flops)}FLOP")
    if each.moved_bytes is not None:
        parts.append(f"{_with_unit(each.moved_bytes)}B of operands and results")
    if each.scratch_bytes:
        parts.append(f"{_with_unit(each.scratch_bytes)}B scratch")
    if timing is not None and timing.flops_per_second is not None:
        parts.append(f"{_with_unit(timing.flops_per_second)}FLOP/s")
        parts.append(f"{timing.matmul_fraction:.0%} of a matrix product")
    return ", ".join(parts)


def _with_unit(value: float) -> str:
    for prefix in (" ", " k", " M", " G"):
        if abs(value) < 1000:
            return f"{value:.3g}{prefix}"
        value /= 1000
    return f"{value:.3g} T"


@overload
def explain(
    query: Shaped,
    key: Shaped,
    value: Shaped,
    bias: Shaped | None = ...,
    mask: Shaped | CausalBias | None = ...,
    *,
    needs_grad: bool = ...,
    device: Device | None = ...,
    timed: bool = ...,
    **options: Any,
) -> Explanation: ...


@overload
def explain(
    function: Callable[..., Any],
    /,
    *arguments: Any,
    device: Device | None = ...,
    timed: bool = ...,
    **keywords: Any,
) -> FunctionExplanation: ...


def explain(
    *arguments: Any,
    needs_grad: bool = False,
    device: Device | None = None,
    timed: bool = False,
    **options: Any,
) -> Explanation | FunctionExplanation:
    """Says which backend and which kernels would run a call, or every call in a function, and why not the others.

    ``explain(query, key, value, bias, mask, **options)`` takes what ``dot_product_attention`` takes; arrays, those in
    ``captures`` and in a block mask too, may be given as anything with ``shape`` and ``dtype``.
    ``explain(function, *arguments, **keywords)`` traces a function, jitted or not, and explains each pass of each call
    in it: give it ``jax.grad(loss)`` to see the backward passes.

    Args:
      *arguments: the call, or a function and its arguments.
      needs_grad: whether the call will be differentiated, with respect to query, key and value. Not for a function.
      device: the machine to answer for; None: where the call would run here.
      timed: also runs each pass, alone, on random arrays of its shapes that hide no pair, and a square matrix product
        for comparison. For this machine only.
      **options: the keyword arguments of ``dot_product_attention``, or those of the function.

    Returns:
      An ``Explanation``, or for a function a ``FunctionExplanation``: print it, or take its ``as_dict()``.

    Raises:
      ValueError: the call is wrong, or ``timed`` with another machine's ``device``.
      TypeError: an option is not one of ``dot_product_attention``, or ``needs_grad`` with a function.
      jattn.NoBackendError: a call in the function that nobody can run.
    """
    if device is not None:
        device = checked(_NAME, device)
    if arguments and callable(arguments[0]) and not hasattr(arguments[0], "shape"):
        if needs_grad:
            raise TypeError(
                f"{_NAME}: needs_grad is True with a function, must be left out: explain jax.grad(function) instead"
            )
        return _explain_function(arguments[0], arguments[1:], options, device, timed)
    spec, in_force = _parse(_NAME, arguments, options)
    where = _device_of(in_force, device, arguments)
    return _explain_call(spec, in_force, needs_grad, where, timed)


def select_backend(
    *arguments: Any, needs_grad: bool = False, device: Device | None = None, **options: Any
) -> str:
    """Returns the name of the backend that would run a call.

    Args:
      *arguments: as for ``explain`` of a call, as ``needs_grad``, ``device`` and the options are.

    Raises:
      NoBackendError: none would.
    """
    spec, in_force = _parse("jattn.select_backend", arguments, options)
    named = None if device is None else checked("jattn.select_backend", device)
    where = _device_of(in_force, named, arguments)
    # Asked directly, so that a mere question warns of no fallback; the exception is that of the call itself.
    decision = dispatch.choose(spec, where, in_force, needs_grad)
    backend = decision.backend or dispatch.choose_or_raise(
        spec, where, in_force, needs_grad=needs_grad
    )
    return backend.name


# ---- A call --------------------------------------------------------------------------------------------------------


_STATIC = {
    "scale",
    "is_causal",
    "local_window_size",
    "implementation",
    "causal_alignment",
    "logits_soft_cap",
    "broadcast_dropout",
    "compute_dtype",
}


def _parse(asked: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Spec, Options]:
    """Checks a call whose arrays may be mere shapes."""
    try:
        named = inspect.signature(dot_product_attention).bind(*arguments, **options).arguments
    except TypeError as error:
        raise TypeError(
            f"{asked}: {error}; the arguments are those of jattn.dot_product_attention"
        ) from None
    result_flags(named.pop("return_lse", False), named.pop("return_residual", False))
    holders: dict[str, Any] = {
        name: named.pop(name) for name in ("captures", "block_mask") if name in named
    }
    held, filled = _shapes_within(holders)
    # Numbers of numpy have a shape, too.
    arrays = {
        name: _shape_of(x)
        for name, x in named.items()
        if hasattr(x, "shape") and name not in _STATIC and not isinstance(x, np.generic)
    }
    static = {name: x for name, x in named.items() if name not in arrays}
    for name in ("query", "key", "value"):
        if name in static:
            arrays[name] = _shape_of(as_array(name, static.pop(name), "jattn.explain"))
    found: list[tuple[Spec, Options]] = []

    def parse(traced: dict[str, Any], traced_within: list[Any]) -> None:
        call = Call.parse(**traced, **static, **filled(traced_within))
        found.append(
            (call.spec, call.options)
        )  # its arrays are tracers, which must not outlive this

    jax.eval_shape(parse, arrays, held)
    return found[0]


def _shapes_within(holders: dict[str, Any]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The mere shapes that arguments hold, and what puts arrays in their places; arrays stay what they are."""
    leaves, tree = jax.tree.flatten(holders)
    places = [
        i
        for i, leaf in enumerate(leaves)
        if hasattr(leaf, "shape") and not isinstance(leaf, jax.Array | np.ndarray | np.generic)
    ]

    def filled(arrays: list[Any]) -> Any:
        values = list(leaves)
        for i, x in zip(places, arrays, strict=True):
            values[i] = x
        return jax.tree.unflatten(tree, values)

    return [_shape_of(leaves[i]) for i in places], filled


def _shape_of(x: Any) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)  # a key has one
    if x.dtype == "float64" and dtype != x.dtype and not isinstance(x, np.ndarray):
        raise ValueError(
            f"{_NAME}: an argument has dtype float64, which JAX would make float32: set jax_enable_x64, or cast it"
        )
    return jax.ShapeDtypeStruct(x.shape, dtype)


def _device_of(options: Options, named: Device | None, arguments: tuple[Any, ...]) -> Device:
    return named if named is not None else device.expected(options.device, arguments)


def _explain_call(
    spec: Spec, options: Options, needs_grad: bool, where: Device, timed: bool
) -> Explanation:
    decision = dispatch.choose(spec, where, options, needs_grad)
    names: tuple[PassName, ...] = ("forward", "backward") if needs_grad else ("forward",)
    found = Explanation(
        chosen=decision.backend.name if decision.backend else None,
        reasons=dict(decision.refusals),
        spec=spec,
        device=where,
        needs_grad=needs_grad,
        planner=functools.partial(_plan, names, decision.backend, spec, where, options.determinism),
    )
    return _with_timings(found, options, _WANTS_QKV, has_dlse=False) if timed else found


def _plan(
    names: tuple[PassName, ...],
    backend: Backend | None,
    spec: Spec,
    where: Device,
    determinism: Determinism,
) -> tuple[Pass, ...]:
    if backend is None:
        return ()
    return tuple(plan_pass(name, backend, spec, where, _WANTS_QKV, determinism) for name in names)


def _as_planned(planned: Pass) -> tuple[Pass, ...]:
    return (planned,)


def _with_timings(
    found: Explanation, options: Options, wants: Wants, *, has_dlse: bool
) -> Explanation:
    call_timing.require_here(found.device)
    timings = tuple(
        call_timing.time_pass(each, found.spec, options, wants, has_dlse=has_dlse)
        for each in found.passes
    )
    return dataclasses.replace(found, timings=timings)


# ---- A function ----------------------------------------------------------------------------------------------------


def _explain_function(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    named: Device | None,
    timed: bool,
) -> FunctionExplanation:
    elsewhere = contextlib.nullcontext() if named is None else config.target_device(named)
    with elsewhere:
        jaxpr = _traced(function, arguments, keywords)
    sites: list[CallSite] = []
    seen: dict[tuple[Any, ...], int] = {}
    for equation, count, around in equations(jaxpr):
        if equation.primitive.name not in _PASSES:
            continue
        where = source_line((equation, *around), _own_folders())
        key = (where, equation.primitive.name, tuple(sorted(equation.params.items(), key=str)))
        if key in seen:
            site = sites[seen[key]]
            sites[seen[key]] = dataclasses.replace(site, count=site.count + count)
            continue
        seen[key] = len(sites)
        sites.append(CallSite(where, count, _explain_equation(equation, timed)))
    return FunctionExplanation(tuple(sites))


def _traced(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """The jaxpr of a call. Arrays and shapes are traced; what is neither stays as it is, as in a call from Python."""
    if hasattr(function, "trace"):  # jitted: it knows its static arguments
        traced = function.trace(*arguments, **keywords)
        if hasattr(traced, "jaxpr"):  # not so what others call a trace, as flax.nnx.jit does
            return traced.jaxpr.jaxpr
    leaves, tree = jax.tree.flatten((arguments, keywords))
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def of_arrays(*arrays: Any) -> Any:
        filled = list(leaves)
        for i, x in zip(places, arrays, strict=True):
            filled[i] = x
        positional, named = jax.tree.unflatten(tree, filled)
        return function(*positional, **named)

    return jax.make_jaxpr(of_arrays)(*(leaves[i] for i in places)).jaxpr


def _no_forward_mode(backend: str) -> Reason:
    return Reason(
        backend,
        "FEATURE",
        "pass",
        "tangent",
        "must be forward or backward",
        "use reverse mode (jax.grad, jax.vjp) where speed matters",
    )


_PASSES: dict[str, PassName] = {
    "jattn_forward": "forward",
    "jattn_backward": "backward",
    "jattn_tangent": "tangent",
}


def _own_folders() -> tuple[Path, ...]:
    import importlib.util

    folders = [Path(__file__).parent]
    flax = importlib.util.find_spec("flax")
    folders += [Path(root) for root in (flax.submodule_search_locations or [])] if flax else []
    return tuple(folders)


def _explain_equation(equation: Any, timed: bool) -> Explanation:
    params = equation.params
    options: Options = params["options"]
    name = _PASSES[equation.primitive.name]
    avals = tuple(variable.aval for variable in equation.invars)
    spec: Spec = params["spec"]
    operands = Operands.unflatten(spec, avals[: Operands.count(spec)])
    spec = spec.for_operands(operands)
    wants: Wants = params.get("wants", _WANTS_QKV)
    has_dlse: bool = params.get("has_dlse", False)
    needs_grad = name != "forward" or params["needs_grad"]
    where = _device_of(options, None, ())
    decision = dispatch.choose(spec, where, options, needs_grad)
    assert decision.backend is not None, "a call that nobody runs raises while it is traced"
    planned = plan_pass(
        name, decision.backend, spec, where, wants, options.determinism, has_dlse=has_dlse
    )
    reasons = dict(decision.refusals)
    if name == "tangent":
        names = dict.fromkeys((decision.backend.name, *reasons))
        reasons = {
            n: (_no_forward_mode(n), *reasons.get(n, ())) for n in names if n != planned.backend
        }
    found = Explanation(
        chosen=planned.backend,
        reasons=reasons,
        spec=spec,
        device=where,
        needs_grad=needs_grad,
        planner=functools.partial(_as_planned, planned),
    )
    return _with_timings(found, options, wants, has_dlse=has_dlse) if timed else found
