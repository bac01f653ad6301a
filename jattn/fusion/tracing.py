"""The program of a function that is to be fused, which must not change what it is given.

The function is traced with copies of its arguments. Changes of these would be lost, as those of the cache, the dropout
or the statistics of a module of flax.nnx, and the function would go on with old values from call to call.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jattn.jax_interface import ClosedJaxpr, Jaxpr, nested_call


@dataclasses.dataclass(frozen=True)
class Trace:
    """A call of a function.

    Attributes:
      program: of the arrays among its arguments.
      arrays: these.
      result_tree: of the results.
    """

    program: ClosedJaxpr
    arrays: list[Any]
    result_tree: Any


def trace(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Trace:
    """Traces a call. Arguments that are no arrays are constants.

    Raises:
      ValueError: the function changes an argument; ``name`` is who says so.
    """
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    is_array = [isinstance(x, jax.Array | np.ndarray | np.generic) for x in leaves]
    arrays = list(itertools.compress(leaves, is_array))
    call = _Call(function, tree, leaves, is_array)
    program = jax.make_jaxpr(call.results)(*arrays)
    if call.changes_others or call.new:
        _refuse_lost_changes(name, call, arrays)
    return Trace(program, arrays, call.result_tree)


class _Call:
    """A call whose arrays come one by one.

    Attributes:
      result_tree: of the results. It and the rest are known once the call is traced.
      new: what then lies in place of these arrays, by their number.
      changes_others: whether something else of the arguments is another one, too.
    """

    def __init__(
        self, function: Callable[..., Any], tree: Any, leaves: Sequence[Any], is_array: list[bool]
    ):
        self.function, self.tree, self.leaves, self.is_array = function, tree, leaves, is_array
        self.result_tree: Any = None
        self.new: dict[int, Any] = {}
        self.changes_others = False

    def results(self, *arrays: Any) -> list[Any]:
        rest = iter(arrays)
        given = [next(rest) if t else x for x, t in zip(self.leaves, self.is_array, strict=True)]
        arguments = jax.tree.unflatten(self.tree, given)
        # Some types make new leaves whenever they are asked.
        keeps_leaves = all(map(operator.is_, jax.tree.leaves(arguments), given))
        results, self.result_tree = jax.tree.flatten(self.function(*arguments[0], **arguments[1]))
        if keeps_leaves:
            self._compare(given, arguments)
        return results

    def _compare(self, given: Sequence[Any], arguments: Any) -> None:
        left, tree = jax.tree.flatten(arguments)
        if tree != self.tree:
            self.changes_others = True
            return
        number = itertools.accumulate(self.is_array, initial=0)
        parts = jax.tree.leaves(arguments, is_leaf=_is_split_off)
        split_off = [_is_split_off(part) for part in parts for _ in jax.tree.leaves(part)]
        for i, array, apart, old, new in zip(
            number, self.is_array, split_off, given, left, strict=False
        ):
            if old is new or apart:
                continue
            if array and isinstance(new, jax.Array):
                self.new[i] = new
            else:
                self.changes_others = True

    def new_arrays(self, *arrays: Any) -> list[Any]:
        self.results(*arrays)
        return list(self.new.values())

    def path(self, number: int) -> str:
        """Where in (args, kwargs) an array stands."""
        arguments = jax.tree.unflatten(self.tree, self.leaves)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(arguments)]
        return jax.tree_util.keystr(list(itertools.compress(paths, self.is_array))[number])


def _is_split_off(x: Any) -> bool:
    """Whether it is the state of a module of flax.nnx: a module merged of it changes it, and the caller knows."""
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.State)


def _refuse_lost_changes(name: str, call: _Call, arrays: Sequence[Any]) -> None:
    """Raises if other values are in an argument than before: some transformations of flax.nnx write the same again,
    as results of a nested call.
    """
    jaxpr = jax.make_jaxpr(call.new_arrays)(*arrays).jaxpr
    changed = [
        i
        for i, new in zip(call.new, jaxpr.outvars, strict=True)
        if _origin(jaxpr, new) is not jaxpr.invars[i]
    ]
    if not changed and not call.changes_others:
        return
    what = f"{call.path(changed[0])} of its arguments (args, kwargs)" if changed else "an argument"
    raise ValueError(
        f"{name}: function changes {what}, which must stay as it is, since the function is traced with copies: return"
        " what is new as a result (of a flax.nnx module the state: nnx.split before, nnx.merge and nnx.state inside)"
    )


def _origin(jaxpr: Jaxpr, variable: Any) -> Any:
    """The variable whose value has reached this one unchanged, through nested calls."""
    made_by = {id(x): (e, i) for e in jaxpr.eqns for i, x in enumerate(e.outvars)}
    while id(variable) in made_by:
        equation, place = made_by[id(variable)]
        called = nested_call(equation)
        if called is None:
            break
        inner = _origin(called.jaxpr, called.jaxpr.outvars[place])
        entry = next((i for i, x in enumerate(called.jaxpr.invars) if x is inner), None)
        if entry is None:
            break
        variable = equation.invars[entry]
    return variable
