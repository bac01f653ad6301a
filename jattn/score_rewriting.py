"""Rewriting of traced score functions: what comes of arrays alone is computed once for all pairs, and what is left is
straight-line code that takes elements out of arrays before it computes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn.device_operations import ELEMENTWISE
from jattn.jax_interface import (
    MOVES,
    ClosedJaxpr,
    Jaxpr,
    Literal,
    bind,
    equations,
    evaluate_jaxpr,
)

NO_MESH = jax.sharding.AbstractMesh((), ())
NUM_INDICES = 4  # batch, head, query, key
_MOST_CONDITIONS = 32

_Arrays = list[jax.Array]


def rewritten(closed: ClosedJaxpr, captures: Sequence[jax.Array]) -> tuple[Jaxpr, _Arrays]:
    """Rewrites a score function of (score, batch, head, query, key, *captures).

    Returns:
      A jaxpr of (score, batch, head, query, key, *arrays), and the arrays. Among these are what it closed over, and
      what was computed of arrays alone. It has no nested calls but of functions that bring their derivatives along, and
      no branches: the results of all are selected from.
    """
    flat, arrays = _retraced(closed, captures, _inlined)
    flat, arrays = _hoisted(flat, arrays)
    if any(x.primitive.name == "cond" for x, _, _ in equations(flat)):
        # What depends on arrays alone in a branch is seen behind it.
        flat, arrays = _hoisted(*_retraced(ClosedJaxpr(flat, ()), arrays, _straightened))
    if _moves_late(flat):
        flat, arrays = _hoisted(*_retraced(ClosedJaxpr(flat, ()), arrays, _moved_first))
    return flat, arrays


def _retraced(
    closed: ClosedJaxpr, arrays: Sequence[jax.Array], evaluate: Callable[..., Any]
) -> tuple[Jaxpr, _Arrays]:
    """What a jaxpr becomes where it is evaluated in some way, with its constants as last arguments, and the arrays.

    Constants of nested calls are among them.
    """
    count = len(closed.jaxpr.invars)

    def function(*arguments: Any) -> Any:
        return evaluate(closed.jaxpr, arguments[:count], arguments[count:])

    constants = [jnp.asarray(x) for x in closed.consts]
    avals: list[Any] = [x.aval for x in closed.jaxpr.invars]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    types += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in constants]
    with jax.sharding.use_abstract_mesh(NO_MESH):
        nested = jax.make_jaxpr(function)(*types)
    constants += [jnp.asarray(x) for x in nested.consts]
    jaxpr = nested.jaxpr
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.invars, *jaxpr.constvars])
    return jaxpr, [*arrays, *constants]


def _inlined(jaxpr: Jaxpr, arguments: Sequence[Any], constants: Sequence[Any]) -> list[Any]:
    """Evaluates nested calls as part of what calls them."""
    return evaluate_jaxpr(
        jaxpr, *arguments, constants=constants, keeps_rules=True, replaced={"argmax": _first_true}
    )


def _first_true(x: jax.Array, *, axes: Sequence[int], index_dtype: Any) -> jax.Array:
    """argmax; of a few bools, as ``jnp.select`` has them for its conditions, without an array of them."""
    if x.dtype != bool or x.ndim != 1 or x.shape[0] > _MOST_CONDITIONS:
        return lax.argmax(x, axes[0], index_dtype)
    found = jnp.zeros((), index_dtype)
    for i in reversed(range(x.shape[0])):
        found = jnp.where(
            lax.index_in_dim(x, i, keepdims=False), jnp.asarray(i, index_dtype), found
        )
    return found


def _straightened(jaxpr: Jaxpr, arguments: Sequence[Any], constants: Sequence[Any]) -> list[Any]:
    """Evaluates all branches, and selects."""
    return evaluate_jaxpr(
        jaxpr, *arguments, constants=constants, keeps_rules=True, has_branches=False
    )


# ---- Moves before operations -----------------------------------------------------------------------------------------


def _is_array(x: Any) -> bool:
    return bool(x.aval.shape)


def _moves_late(flat: Jaxpr) -> bool:
    """Whether elements are taken out of an array that is computed for each pair, element by element."""
    computed = _late_arrays(flat)
    return any(_can_pass(x) and x.invars[0] in computed for x in flat.eqns)


def _late_arrays(flat: Jaxpr) -> dict[Any, Any]:
    """Arrays that are computed for each pair, element by element: with the equations that make them."""
    of_pairs = set(flat.invars[: 1 + NUM_INDICES])
    found = {}
    for equation in flat.eqns:
        if any(not isinstance(x, Literal) and x in of_pairs for x in equation.invars):
            of_pairs.update(equation.outvars)
            if equation.primitive.name in ELEMENTWISE and _is_array(equation.outvars[0]):
                found[equation.outvars[0]] = equation
    return found


def _can_pass(equation: Any) -> bool:
    """Whether an equation moves elements, and makes no new ones in place of those that are outside."""
    fills = equation.params.get("mode") == lax.GatherScatterMode.FILL_OR_DROP
    moves = equation.primitive.name in MOVES and not fills
    return moves and not isinstance(equation.invars[0], Literal)


def _moved_first(jaxpr: Jaxpr, arguments: Sequence[Any], constants: Sequence[Any]) -> list[Any]:
    """Evaluates moves of an array that is computed for each pair as moves of what it is computed of."""
    late = _late_arrays(jaxpr)
    makers = {x: equation for equation in jaxpr.eqns for x in equation.outvars}
    values: dict[Any, Any] = dict(zip(jaxpr.invars, (*arguments, *constants), strict=True))

    def value_of(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else values[x]

    def moved(equation: Any, x: Any) -> Any:
        """What the equation makes where its first operand is ``x``."""
        if not isinstance(x, Literal) and x in late:
            own = [moved(equation, y) if _is_array(y) else value_of(y) for y in late[x].invars]
            return bind(late[x], own)[0]
        maker = None if isinstance(x, Literal) else makers.get(x)
        shape = equation.outvars[0].aval.shape
        if (
            maker is not None
            and maker.primitive.name == "broadcast_in_dim"
            and not _is_array(maker.invars[0])
        ):
            return jnp.broadcast_to(value_of(maker.invars[0]), shape)
        return bind(equation, [value_of(x), *map(value_of, equation.invars[1:])])[0]

    for equation in jaxpr.eqns:
        if _can_pass(equation) and equation.invars[0] in late:
            results = [moved(equation, equation.invars[0])]
        else:
            results = bind(equation, [value_of(x) for x in equation.invars])
        values |= dict(zip(equation.outvars, results, strict=True))
    return [value_of(x) for x in jaxpr.outvars]


# ---- Once for all pairs ----------------------------------------------------------------------------------------------


def _hoisted(flat: Jaxpr, arrays: Sequence[jax.Array]) -> tuple[Jaxpr, list[jax.Array]]:
    """Computes once for all pairs what depends on arrays alone and takes more than one element of them for one of its
    own, as sums, products of matrices and softmax do, or makes one array of several.

    Returns:
      The rest of the jaxpr, and the arrays that it reads: those that it still needs, and what was computed.
    """
    num_scalars = 1 + NUM_INDICES
    sources: dict[Any, Any] = {}  # value that depends on arrays alone -> its equation, or the array
    sources |= dict(zip(flat.invars[num_scalars:], arrays, strict=True))
    given_arrays = set(flat.invars[num_scalars:])
    computed: dict[Any, jax.Array] = {}
    rest = []
    for equation in flat.eqns:
        inputs = [x for x in equation.invars if not isinstance(x, Literal)]
        if any(x not in sources for x in inputs):
            rest.append(equation)
            continue
        sources |= dict.fromkeys(equation.outvars, equation)
        if _is_for_pairs(equation, lambda x: x in computed or x in given_arrays):
            rest.append(equation)
        else:
            for x in equation.outvars:
                _value_of(x, sources, computed)
    hoisted = [x for equation in flat.eqns for x in equation.outvars if x in computed]
    # What is left of the equations and of the arrays, from the result backwards.
    needed = {x for x in flat.outvars if not isinstance(x, Literal)}
    live = []
    for equation in reversed(rest):
        if not needed.isdisjoint(equation.outvars) and not any(
            x in computed for x in equation.outvars
        ):
            needed |= {x for x in equation.invars if not isinstance(x, Literal)}
            live.append(equation)
    given = [x for x in flat.invars[num_scalars:] if x in needed]
    hoisted = [x for x in hoisted if x in needed]
    jaxpr = flat.replace(invars=[*flat.invars[:num_scalars], *given, *hoisted], eqns=live[::-1])
    return jaxpr, [*(sources[x] for x in given), *(computed[x] for x in hoisted)]


# Elementwise operations whose derivatives are finite whatever they read: an element that hidden pairs alone read has a
# gradient of 0, of JAX's making too.
_TAME = frozenset("add sub max min select_n eq ne lt le gt ge and or xor".split())


def _is_for_pairs(equation: Any, is_array: Callable[[Any], bool]) -> bool:
    """Whether what an equation makes of arrays alone is left for each pair: where an element of the result is made of
    one element of each array, and not many arrays become one that is no larger.
    """
    name = equation.primitive.name
    if not all(map(_has_real_numbers, (*equation.invars, *equation.outvars))):
        return False
    if name not in ELEMENTWISE:
        return name in MOVES or name == "iota"
    joined = {x for x in equation.invars if not isinstance(x, Literal) and _is_array(x)}
    return len(joined) < 2 or name not in _TAME or not all(map(is_array, joined))


def _has_real_numbers(x: Any) -> bool:
    dtype = x.aval.dtype
    return not any(
        jnp.issubdtype(dtype, kind) for kind in (jax.dtypes.extended, jnp.complexfloating)
    )


def _value_of(x: Any, sources: dict[Any, Any], computed: dict[Any, jax.Array]) -> Any:
    """Computes a value of which ``sources`` says how; ``computed`` remembers."""
    if isinstance(x, Literal):
        return x.val
    if x in computed:
        return computed[x]
    source = sources[x]
    if not hasattr(source, "primitive"):
        return source
    inputs = [_value_of(y, sources, computed) for y in source.invars]
    results = bind(source, inputs)
    computed |= dict(zip(source.outvars, results, strict=True))
    return computed[x]
