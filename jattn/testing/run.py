"""Puts a case through one backend of `jattn.dot_product_attention`, and proves that this backend ran.

A backend is proved by two independent witnesses: the call counters of jattn, and the lowered program, which holds the
custom calls of a kernel or does not.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn import api, backends, dispatch
from jattn.arguments import Call
from jattn.jax_interface import CUDNN_TARGETS
from jattn.testing import compare, inputs
from jattn.testing.cases import Case
from jattn.testing.inputs import Array, Operands

# Backends made of XLA's own operations; every other one shows in the lowered program as a custom call of some prefix.
PLAIN_BACKENDS = frozenset({"reference", "xla"})
TARGET_PREFIX = "jattn_"
OTHER_PREFIXES = {"cudnn": CUDNN_TARGETS[0]}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run produced: tensors by the names of `compare.TENSORS`, and the lowered program."""

    results: dict[str, Array]
    lowered: str


def backward_backend(backend: str) -> str:
    """The name of the backend that runs the backward pass of problems that `backend` runs forward."""
    for group in (*backends.ORDER.values(), backends.BY_NAME_ONLY):
        for candidate in group:
            if candidate.name == backend:
                return candidate.for_backward().name
    raise LookupError(f"there is no backend {backend!r}")


def serves(case: Case, backend: str, device: jattn.Device) -> bool:
    """Whether the rules of a backend admit a case, forward and backward, on a device; needs no such device."""
    found: list[dispatch.Decision] = []

    def decide() -> None:
        (q, k, v), keywords = inputs.call_arguments(case, inputs.make(case))
        call = Call.parse(q, k, v, implementation=backend, **keywords)
        found.append(dispatch.choose(call.spec, device, call.options, needs_grad=True))

    with jax.enable_x64(case.dtype == "float64"):
        # Not run but traced, or each conversion of an array would be compiled.
        jax.eval_shape(decide)
    (decision,) = found
    return decision.backend is not None and decision.backend.name == backend


def forward_function(case: Case, operands: Operands, backend: str | None) -> Callable[..., Any]:
    """Builds f(q, k, v, bias, sinks, alibi_slopes, *captures) -> (out, lse) for a case; None where the case has none,
    and for captures that are integers.
    """
    _, keywords = inputs.call_arguments(case, operands)
    keywords = {
        name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in keywords.items()
    }
    integers = [None if is_float(x) else jnp.asarray(x) for x in operands.captures]
    for name in ("bias", "sinks", "alibi_slopes", "captures"):
        keywords.pop(name, None)
    packed = "dropout_table" in keywords
    attend: Callable[..., Any] = (
        api.packed_attention
        if packed
        else functools.partial(jattn.dot_product_attention, return_lse=True)
    )

    def forward(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        bias: jax.Array | None = None,
        sinks: jax.Array | None = None,
        alibi_slopes: jax.Array | None = None,
        *floats: jax.Array | None,
    ) -> Any:
        captures = [x if x is not None else y for x, y in zip(floats, integers, strict=True)]
        return attend(
            q,
            k,
            v,
            bias=bias,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            captures=captures,
            implementation=backend,
            **keywords,
        )

    return forward


def is_float(array: Array) -> bool:
    """Whether an array may have a gradient."""
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def compile_case(
    case: Case, operands: Operands, backend: str, *, backward: bool = True, poisoned: bool = True
) -> tuple[Callable[[], dict[str, jax.Array]], str]:
    """Compiles a case for a forced backend, forward and, unless switched off, backward for dout and dlse.

    With `poisoned` every element that must not be read holds NaN or infinity.

    Returns:
      A function that runs it once, and gives tensors by the names of `compare.TENSORS`; the lowered program.

    Raises:
      AssertionError: another backend was lowered.
    """
    operands = inputs.poison(case, operands) if poisoned else operands
    with jax.enable_x64(case.dtype == "float64"):
        forward = forward_function(case, operands, backend)
        arrays = [
            jnp.asarray(x) if x is not None else None
            for x in (
                operands.q,
                operands.k,
                operands.v,
                operands.bias,
                operands.sinks,
                operands.alibi_slopes,
                *(x if is_float(x) else None for x in operands.captures),
            )
        ]
        cotangents = (jnp.asarray(operands.dout), jnp.asarray(operands.dlse))

        def forward_backward(arrays: Any, cotangents: Any) -> Any:
            results, pullback = jax.vjp(forward, *arrays)
            cotangents = (cotangents[0], cotangents[1].astype(results[1].dtype))
            return results, pullback(cotangents)

        before = jattn.call_counters()
        if backward:
            lowered = jax.jit(forward_backward).lower(arrays, cotangents)
        else:
            lowered = jax.jit(lambda arrays, _: (forward(*arrays), (None,) * len(arrays))).lower(
                arrays, cotangents
            )
        text = lowered.as_text()
        assert_ran(
            backend, before, text, passes=("forward", "backward") if backward else ("forward",)
        )
        compiled = lowered.compile()

    def call() -> dict[str, jax.Array]:
        with jax.enable_x64(case.dtype == "float64"):
            results, gradients = compiled(arrays, cotangents)
        named = zip(compare.TENSORS, (*results, *gradients), strict=False)
        return {name: x for name, x in named if x is not None}

    return call, text


def run(
    case: Case, operands: Operands, backend: str, *, backward: bool = True, poisoned: bool = True
) -> Outcome:
    """Does `compile_case` and runs the program once."""
    call, text = compile_case(case, operands, backend, backward=backward, poisoned=poisoned)
    return Outcome({name: np.asarray(x) for name, x in call().items()}, text)


def assert_ran(
    backend: str,
    counters_before: dict[str, dict[str, int]],
    lowered: str,
    *,
    passes: tuple[str, ...] = ("forward",),
) -> None:
    """Asserts that since `counters_before` only this backend was lowered, in these passes, and the program says so.

    Raises:
      AssertionError: otherwise.
    """
    after = jattn.call_counters()
    counted = {
        (name, pass_name): count - counters_before.get(name, {}).get(pass_name, 0)
        for name, by_pass in after.items()
        for pass_name, count in by_pass.items()
    }
    ran = {key for key, count in counted.items() if count > 0}
    wanted = {
        (backward_backend(backend) if pass_name == "backward" else backend, pass_name)
        for pass_name in passes
    }
    if ran != wanted:
        raise AssertionError(f"lowered {sorted(ran)}, must be {sorted(wanted)}")
    wanted_call = None if backend in PLAIN_BACKENDS else OTHER_PREFIXES.get(backend, TARGET_PREFIX)
    for prefix in (TARGET_PREFIX, *OTHER_PREFIXES.values()):
        if (prefix in lowered) != (prefix == wanted_call):
            found = "has a" if prefix in lowered else "has no"
            raise AssertionError(
                f"backend {backend} was asked for, but the lowered program {found} custom call {prefix}..."
            )


def verify(case: Case, backend: str, *, backward: bool = True, kernel: str = "") -> compare.Report:
    """Runs a case, poisoned, through a forced backend and compares it with the oracle.

    Args:
      case: the problem.
      backend: the name of the backend that has to run.
      backward: whether the gradients are computed and compared, too.
      kernel: a regular expression that the lowered program has to match: the choices in the key of a kernel.

    Raises:
      AssertionError: another backend or kernel ran, or the result is wrong; the text names the worst elements.
    """
    operands, solution = compare.solved(case)
    outcome = run(case, operands, backend, backward=backward)
    if not re.search(kernel, outcome.lowered):
        raise AssertionError(f"{case.name}: no kernel of the program matches {kernel!r}")
    return compare.assert_close(case, operands, outcome.results, solution=solution)
