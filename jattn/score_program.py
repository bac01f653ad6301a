"""A user's score function as data: traced once, its captured arrays hoisted to operands, compared by what it computes.

``score_mod(score, batch, head, query, key, *captures)`` maps one score to another. ``trace`` turns it into a
``ScoreProgram``, which is static and travels in the ``Spec``, and the arrays that it reads, which become operands:
arguments and closed-over arrays alike, tracers of enclosing transformations among them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn.arrays import as_array, check_arity, shown
from jattn.jax_interface import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    axes_named_by,
    bind,
    depends,
    equations,
    evaluate_jaxpr,
    nested_call,
    other_effects,
    reads_input,
    result_aval,
    traced_anew,
)
from jattn.score_rewriting import NO_MESH, NUM_INDICES, rewritten

_NAME = "jattn.dot_product_attention"
_SIGNATURE = "score_mod(score, batch, head, query, key, *captures) -> score"


@dataclasses.dataclass(frozen=True)
class Capture:
    """The type of an array that a score function reads."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        """Whether it may have a gradient."""
        return bool(jnp.issubdtype(jnp.dtype(self.dtype), jnp.floating))


@dataclasses.dataclass(frozen=True)
class ScoreProgram:
    """A traced score function; equal programs compute the same, derivatives included.

    Attributes:
      text: the program and its derivative in words: what is compared.
      captures: types of the arrays it reads.
      batch_extent: its batch index is below this; may be symbolic while exporting.
      dtype: of the score: float32, or float64 of a float64 problem.
      jaxpr: of (score, batch, head, query, key, *captures) -> (score',); scalars but for the captures.
      slope_jaxpr: of the same -> (score', d score' / d score).
      jvp_jaxpr: of the same and tangents of score and of the captures that are floats -> (score', its tangent).
    """

    text: str
    captures: tuple[Capture, ...]
    batch_extent: int
    dtype: str
    jaxpr: ClosedJaxpr = dataclasses.field(compare=False, repr=False)
    slope_jaxpr: ClosedJaxpr = dataclasses.field(compare=False, repr=False)
    jvp_jaxpr: ClosedJaxpr = dataclasses.field(compare=False, repr=False)

    def __call__(
        self, score: Any, batch: Any, head: Any, query: Any, key: Any, *captures: Any
    ) -> jax.Array:
        """Evaluates it for one pair."""
        result: jax.Array = self._function(score, batch, head, query, key, *captures)
        return result

    @functools.cached_property
    def kept_jvp_jaxpr(self) -> ClosedJaxpr:
        """``jvp_jaxpr`` ``with_kept_zeros``."""
        first = 1 + NUM_INDICES + len(self.captures)
        return with_kept_zeros(self.jvp_jaxpr, range(first, len(self.jvp_jaxpr.jaxpr.invars)))

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        """The program with its derivative, in operations of JAX."""
        reads_score = reads_input(self.jaxpr.jaxpr, 0)

        def mapped_like_score(value: Any, score: Any) -> Any:
            # JAX (0.11) fails to differentiate a branch whose results `vmap` does not map, but whose tangents it does.
            return value if reads_score else jnp.where(jnp.isnan(score), value, value)

        @jax.custom_jvp
        def function(*arguments: Any) -> Any:
            return mapped_like_score(_computed(self.jaxpr, *arguments)[0], arguments[0])

        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            moving = [tangents[i] for i in _floating(self.captures)]
            if all(_is_zero(t) for t in moving[1:]):  # nothing is read for the captures that stay
                value, slope = _computed(self.slope_jaxpr, *primals)
                score = jnp.zeros_like(slope) if _is_zero(moving[0]) else moving[0]
                return mapped_like_score(value, primals[0]), slope * score
            full = [jnp.zeros(t.shape, t.dtype) if _is_zero(t) else t for t in moving]
            value, tangent = _computed(self.jvp_jaxpr, *primals, *full)
            return mapped_like_score(value, primals[0]), tangent

        function.defjvp(rule, symbolic_zeros=True)
        return function

    def slope(
        self, score: Any, batch: Any, head: Any, query: Any, key: Any, *captures: Any
    ) -> jax.Array:
        """Evaluates d score' / d score for one pair."""
        result: jax.Array = _computed(self.slope_jaxpr, score, batch, head, query, key, *captures)[
            1
        ]
        return result

    def mapped(self, size: int, is_mapped: Sequence[bool]) -> ScoreProgram:
        """Returns the program for a batch that a mapped axis was folded into.

        Batch indices are those of the mapped axis times ``batch_extent`` plus those of before; the captures marked have
        the mapped axis first.
        """

        def score_mod(
            score: Any, batch: Any, head: Any, query: Any, key: Any, *captures: Any
        ) -> Any:
            extent = jnp.int32(self.batch_extent)
            element, batch = jax.lax.div(batch, extent), jax.lax.rem(batch, extent)
            own = [
                jax.lax.dynamic_index_in_dim(x, element, 0, keepdims=False) if mapped else x
                for x, mapped in zip(captures, is_mapped, strict=True)
            ]
            # Not as a call, through which slopes are not seen.
            return _evaluate(self.jaxpr, score, batch, head, query, key, *own, keeps_rules=True)[0]

        types = tuple(
            dataclasses.replace(c, shape=(size, *c.shape)) if mapped else c
            for c, mapped in zip(self.captures, is_mapped, strict=True)
        )
        return _program(score_mod, types, size * self.batch_extent, self.dtype)

    @functools.cached_property
    def has_unit_slope(self) -> bool:
        """Whether d score' / d score is 1 wherever score' is not -inf, as of biases and masks."""
        return _has_unit_slope(self.jaxpr)


def trace(
    score_mod: Callable[..., Any],
    captures: Any,
    batch: int,
    dtype: str = "float32",
    like: Any = None,
) -> tuple[ScoreProgram, tuple[jax.Array, ...]]:
    """Traces a score function.

    Args:
      score_mod: of (score, batch, head, query, key, *captures), scalars but for the captures.
      captures: arrays to hand over to it.
      batch: its batch index is below this.
      dtype: of the score.
      like: an array; score and indices vary over the manual mesh axes over which it does.

    Returns:
      The program, and the arrays it reads.

    Raises:
      TypeError: no function, or not of these arguments; a capture that is no array; a result that is not one float.
      ValueError: it writes to references, prints or calls back.
    """
    if not callable(score_mod):
        raise TypeError(
            f"{_NAME}: score_mod is {shown(score_mod)}, must be a function: {_SIGNATURE}"
        )
    if not isinstance(captures, tuple | list):
        raise TypeError(
            f"{_NAME}: captures is {shown(captures)}, must be a tuple of arrays: captures=(x,) for one"
        )
    for i, x in enumerate(captures):
        is_array = isinstance(x, jax.Array | np.ndarray | np.generic) or hasattr(x, "__jax_array__")
        if not is_array:
            raise TypeError(
                f"{_NAME}: captures[{i}] is {shown(x)}, must be an array; score_mod may close over numbers"
            )
    given = [as_array(f"captures[{i}]", x) for i, x in enumerate(captures)]
    count = 1 + NUM_INDICES + len(given)
    check_arity("score_mod", score_mod, count, f"{_SIGNATURE}, with {len(given)} captures")

    examples: list[Any] = _examples((), dtype)
    examples += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]
    try:
        # A shard evaluates it on no mesh, or on another one; what varies over manual axes has a type on theirs alone.
        mesh = jax.sharding.get_abstract_mesh()
        is_manual = bool(mesh.manual_axes) and not mesh.explicit_axes
        if is_manual and like is not None:
            num_scalars = 1 + NUM_INDICES
            own = [result_aval(jax.typeof(like), (), str(x.dtype)) for x in examples[:num_scalars]]
            examples[:num_scalars] = own
        with jax.sharding.use_abstract_mesh(mesh if is_manual else NO_MESH):
            closed, shape = jax.make_jaxpr(traced_anew(score_mod), return_shape=True)(*examples)
    except jax.errors.ConcretizationTypeError as error:
        error.add_note(
            "score_mod is traced: its score and indices have no values yet. Write jnp.where(condition, a, b) in place"
            " of an if, and jnp.logical_and in place of and."
        )
        raise
    except Exception as error:
        if type(error).__name__ == "ShardingTypeError":
            error.add_note(
                "score_mod closes over an array that is sharded over an explicit mesh: hand it over as captures=(x,),"
                " of which every device gets all that it reads."
            )
        raise
    _check_result(shape)
    if effects := other_effects(closed.jaxpr):
        raise ValueError(
            f"{_NAME}: Mutations detected in score_mod: it has the effects {shown(effects)}, must have none: compute"
            " the new score from its arguments, without writing to references, printing or callbacks"
        )
    _check_axes(closed.jaxpr, allowed=("axis_index",))
    flat, arrays = rewritten(closed, given)
    _check_axes(flat)  # an index on an axis that is left there was not computed outside
    read = tuple(x for array in arrays for x in _numbers_of(array))
    types = tuple(Capture(tuple(x.shape), str(x.dtype)) for x in read)
    has_rules = any(x.primitive.name.startswith("custom_") for x, _, _ in equations(flat))
    rewriting = _Rewritten(
        None if has_rules else _words(ClosedJaxpr(flat, ())),
        tuple(map(_Whole.of, arrays)),
        types,
        batch,
        dtype,
        jax.config.read("jax_enable_x64"),
        flat,
    )
    is_kept = rewriting.words is not None and isinstance(batch, int)
    return (_kept_program if is_kept else _program_of)(rewriting), read


def _evaluate(closed: ClosedJaxpr, *arguments: Any, keeps_rules: bool = False) -> list[Any]:
    return evaluate_jaxpr(
        closed.jaxpr, *arguments, constants=closed.consts, keeps_rules=keeps_rules
    )


def _computed(closed: ClosedJaxpr, *arguments: Any) -> list[Any]:
    """The same by XLA, with what it gets wrong written otherwise."""
    return evaluate_jaxpr(
        closed.jaxpr, *arguments, constants=closed.consts, replaced=_WRITTEN_OTHERWISE
    )


def computed(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """One equation of a program, by XLA, likewise."""
    function = _WRITTEN_OTHERWISE.get(equation.primitive.name)
    return bind(equation, inputs) if function is None else [function(*inputs, **equation.params)]


def _absolute(x: Any, **_: Any) -> Any:
    """XLA takes an index that is the magnitude of an integer to be 0 at least, and does not bound it from below. That
    of the least integer is this integer: memory far outside of the array would be read.
    """
    if not jnp.issubdtype(x.dtype, jnp.signedinteger):
        return lax.abs(x)
    return jnp.where(x < 0, -x, x)


_WRITTEN_OTHERWISE: dict[str, Callable[..., Any]] = {"abs": _absolute}


def _examples(captures: Sequence[Capture], dtype: str) -> list[jax.ShapeDtypeStruct]:
    """Types of the arguments of a score function."""
    index = jax.ShapeDtypeStruct((), jnp.int32)
    arrays = [jax.ShapeDtypeStruct(c.shape, jnp.dtype(c.dtype)) for c in captures]
    return [jax.ShapeDtypeStruct((), jnp.dtype(dtype)), *[index] * NUM_INDICES, *arrays]


@dataclasses.dataclass(frozen=True)
class _Whole:
    """The type of an array that ``_numbers_of`` makes numbers of."""

    shape: tuple[int, ...]
    is_complex: bool
    key_impl: Any = None

    @staticmethod
    def of(x: jax.Array) -> _Whole:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return _Whole(x.shape, jnp.iscomplexobj(x), jax.random.key_impl(x) if is_key else None)

    def of_numbers(self, numbers: Iterator[Any]) -> Any:
        first = next(numbers)
        if self.key_impl is not None:
            return jax.random.wrap_key_data(first, impl=self.key_impl)
        whole = lax.complex(first, next(numbers)) if self.is_complex else first
        return whole.reshape(self.shape)


def _numbers_of(x: jax.Array) -> list[jax.Array]:
    """An array as real numbers that have an axis: keys as their data, complex numbers as their parts.

    Scalars get an axis, for partitioners know none without.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return [jax.random.key_data(x)]
    parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    return [part.reshape(1) if part.ndim == 0 else part for part in parts]


def _check_result(shape: Any) -> None:
    if not isinstance(shape, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{_NAME}: Expected output of score_mod to be a tensor. Got type {type(shape).__name__}: return one float"
            " scalar"
        )
    if shape.shape != () or not jnp.issubdtype(shape.dtype, jnp.floating):
        raise TypeError(
            f"{_NAME}: Expected output of score_mod to be a float scalar. Got {shape.dtype}{list(shape.shape)}: return"
            " one score for one pair of a query and a key; masks are jnp.where(visible, score, -jnp.inf)"
        )


def _check_axes(jaxpr: Jaxpr, allowed: Sequence[str] = ()) -> None:
    """Raises ValueError where a score function works over axes of a mesh by other primitives than those allowed."""
    found = list(equations(jaxpr))
    calls = {call for _, _, around in found for call in around}
    for equation, _, _ in found:
        name = equation.primitive.name
        if equation in calls or name in allowed:
            continue
        if axes := axes_named_by(equation):
            raise ValueError(
                f"{_NAME}: score_mod has {name} over {shown(axes)}, must work on no axis but by jax.lax.axis_index"
                " outside of loops: compute it before the call, and pass it as one of captures"
            )


@dataclasses.dataclass(frozen=True)
class _Rewritten:
    """A score function of ``score_rewriting``, compared by what its program and derivatives follow from.

    Attributes:
      words: of ``flat``; None where these do not say how it is differentiated.
    """

    words: str | None
    wholes: tuple[_Whole, ...]
    captures: tuple[Capture, ...]
    batch_extent: int
    dtype: str
    has_x64: bool
    flat: Jaxpr = dataclasses.field(compare=False, repr=False)


def _program_of(rewriting: _Rewritten) -> ScoreProgram:
    def function(score: Any, batch: Any, head: Any, query: Any, key: Any, *read: Any) -> Any:
        numbers = iter(read)
        own = [whole.of_numbers(numbers) for whole in rewriting.wholes]
        (result,) = evaluate_jaxpr(
            rewriting.flat, score, batch, head, query, key, *own, keeps_rules=True
        )
        return result.astype(rewriting.dtype)

    return _program(function, rewriting.captures, rewriting.batch_extent, rewriting.dtype)


# A call outside of `jit` traces its score function, but differentiates it only the first time.
_kept_program = functools.lru_cache(maxsize=256)(_program_of)


def _program(
    function: Callable[..., Any], captures: tuple[Capture, ...], batch_extent: int, dtype: str
) -> ScoreProgram:
    examples = _examples(captures, dtype)
    floating = _floating(captures)

    def along(tangent: Any, *arguments: Any) -> Any:
        def of_score(score: Any) -> Any:
            return function(score, *arguments[1:])

        return jax.jvp(of_score, arguments[:1], (tangent,))

    def jvp(*arguments: Any) -> Any:
        primals, tangents = arguments[: len(examples)], arguments[len(examples) :]

        def of_floating(*some: Any) -> Any:
            full = list(primals)
            for i, x in zip(floating, some, strict=True):
                full[i] = x
            return function(*full)

        return jax.jvp(of_floating, tuple(primals[i] for i in floating), tangents)

    with jax.sharding.use_abstract_mesh(NO_MESH):
        value = jax.make_jaxpr(function)(*examples)
        kept = with_kept_zeros(jax.make_jaxpr(along)(examples[0], *examples), [0])

        def slope(*arguments: Any) -> Any:
            return _evaluate(kept, jnp.ones((), dtype), *arguments)

        derivatives = (
            jax.make_jaxpr(slope)(*examples),
            jax.make_jaxpr(jvp)(*examples, *(examples[i] for i in floating)),
        )
    if any(x[0].primitive.name == "custom_lin" for x in flat_equations(derivatives[0])[0]):
        raise TypeError(
            f"{_NAME}: score_mod calls a function with a jax.custom_vjp rule, must have a derivative in forward mode:"
            " give that function a jax.custom_jvp rule"
        )
    # Two functions of the same operations may have derivatives of their own.
    text = "\n".join(map(_words, (value, *derivatives)))
    return ScoreProgram(text, captures, batch_extent, dtype, value, *derivatives)


def with_kept_zeros(closed: ClosedJaxpr, moving: Sequence[int]) -> ClosedJaxpr:
    """The same function with its tangents, of which one that a choice made 0 stays 0, whatever it is multiplied by.

    So the derivative of sqrt(where(c, x, 0)) by x is 0 where c is False, as in reverse mode, and not 0 * infinity.

    Args:
      closed: a function that returns tangents, too.
      moving: the places of the arguments that are tangents.
    """
    all_equations, results = flat_equations(closed)
    tangents = {closed.jaxpr.invars[i] for i in moving}
    chosen: set[Any] = set()  # of these, what a choice may have made 0
    guarded: dict[int, Any] = {}  # the number of a product -> the factor that may be 0
    for number, (equation, inputs, outputs) in enumerate(all_equations):
        places = [i for i, x in enumerate(inputs) if not isinstance(x, Literal) and x in tangents]
        if not places:
            continue
        moved = [inputs[i] for i in places]
        # Of loops some results may not move.
        made = [x for x, needs in zip(outputs, depends(equation), strict=True) if needs & {*places}]
        tangents.update(made)
        name = equation.primitive.name
        numbers = len(inputs) - len(moved) - (name == "select_n")  # beside the tangents
        makes_zeros = name in _CHOICES and numbers > 0
        if name == "gather":
            makes_zeros = equation.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
        if makes_zeros or not chosen.isdisjoint(moved):
            chosen.update(made)
        if name in ("mul", "div") and len(moved) == 1 and moved[0] in chosen:
            guarded[number] = moved[0]
    if not guarded:
        return closed

    def function(*arguments: Any) -> Any:
        values: dict[Any, Any] = dict(zip(closed.jaxpr.invars, arguments, strict=True))

        def value_of(x: Any) -> Any:
            return x.val if isinstance(x, Literal) else values[x]

        for number, (equation, inputs, outputs) in enumerate(all_equations):
            made = bind(equation, [value_of(x) for x in inputs])
            if number in guarded:
                factor = value_of(guarded[number])
                made = [jnp.where(factor == 0, jnp.zeros_like(x), x) for x in made]
            values |= dict(zip(outputs, made, strict=True))
        return [value_of(x) for x in results]

    types = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in closed.jaxpr.invars]
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return jax.make_jaxpr(function)(*types)


# Operations whose result is 0 where numbers stand in the place of tangents.
_CHOICES = ("select_n", "pad", "concatenate", "dynamic_update_slice", "scatter")


def _floating(captures: Sequence[Capture]) -> list[int]:
    """The places of the arguments that may have a derivative: the score, and captures that are floats."""
    return [0, *(1 + NUM_INDICES + i for i, c in enumerate(captures) if c.is_float)]


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, jax.custom_derivatives.SymbolicZero)


# ---- Reading jaxprs ------------------------------------------------------------------------------------------------


def flat_equations(
    closed: ClosedJaxpr, *, keeps_rules: bool = False
) -> tuple[list[tuple[Any, list[Any], list[Any]]], list[Any]]:
    """Returns the equations of a jaxpr with nested calls inlined, and its results.

    Each equation comes with its inputs and outputs. A value is a ``Literal``, constants among them, or any object that
    stands for itself: one of ``closed.jaxpr.invars``, or an output of an earlier equation. With ``keeps_rules`` a call
    of a function that brings its derivative along stays one equation.
    """
    equations: list[tuple[Any, list[Any], list[Any]]] = []

    def walk(inner: Any, arguments: Sequence[Any], constants: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = dict(zip(inner.invars, arguments, strict=True))
        values |= dict(zip(inner.constvars, constants, strict=True))

        def value_of(x: Any) -> Any:
            return x if isinstance(x, Literal) else values[x]

        for equation in inner.eqns:
            inputs = [value_of(x) for x in equation.invars]
            has_rule = keeps_rules and equation.primitive.name.startswith("custom_")
            called = None if has_rule else nested_call(equation)
            if called is None:
                outputs = [_Value(x.aval) for x in equation.outvars]
                equations.append((equation, inputs, list(outputs)))
            else:
                outputs = walk(called.jaxpr, inputs, [_constant(x) for x in called.consts])
            values |= dict(zip(equation.outvars, outputs, strict=True))
        return [value_of(x) for x in inner.outvars]

    jaxpr = closed.jaxpr
    return equations, walk(jaxpr, jaxpr.invars, [_constant(x) for x in closed.consts])


@dataclasses.dataclass(eq=False)
class _Value:
    """What an equation makes; compared by identity."""

    aval: Any


def _constant(x: Any) -> Literal:
    return Literal(x, jax.typeof(x))


def _words(closed: ClosedJaxpr) -> str:
    """A jaxpr in words that are the same for the same program, whatever it was called and where it was written."""
    equations, results = flat_equations(closed)
    names: dict[Any, str] = {}

    def name(x: Any) -> str:
        if isinstance(x, Literal):
            return _words_of_array(x.val)
        return names.setdefault(x, f"v{len(names)}:{x.aval.dtype}{list(x.aval.shape)}")

    def lines() -> Iterator[str]:
        yield " ".join(map(name, closed.jaxpr.invars))
        for equation, inputs, outputs in equations:
            params = " ".join(
                f"{key}={_words_of_parameter(value)}"
                for key, value in sorted(equation.params.items())
                if not _is_said_otherwise(equation, key)
            )
            left, right = " ".join(map(name, outputs)), " ".join(map(name, inputs))
            yield f"{left} = {equation.primitive.name}[{params}] {right}"
        yield "-> " + " ".join(map(name, results))

    return "\n".join(lines())


def _is_said_otherwise(equation: Any, key: str) -> bool:
    """Whether a parameter is a function, named by its place in memory, that says nothing that others do not say."""
    if equation.primitive.name == "custom_vmap_call":
        return key == "rule"  # how a batch is computed, not what
    return key == "computation" and "jaxpr" in equation.params


def _words_of_parameter(value: Any) -> str:
    """A parameter of an operation; of programs in it, bodies of loops say, all that they compute with."""
    if isinstance(value, ClosedJaxpr):
        return f"({_words(value)})"
    if isinstance(value, Jaxpr) and not value.constvars:
        return f"({_words(ClosedJaxpr(value, ()))})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_words_of_parameter, value))})"
    return _words_of_array(value) if isinstance(value, np.ndarray | jax.Array) else str(value)


def _words_of_array(value: Any) -> str:
    """The type and the elements of an array, these in short."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{_NAME}: score_mod calls a function whose jax.custom_jvp rule closes over a traced array of type"
            f" {value.aval}, must read it as an argument: pass it as captures=(x,), and to that function"
        )
    known = np.asarray(value)
    elements = known.tobytes()
    short = elements.hex() if len(elements) <= 64 else hashlib.sha256(elements).hexdigest()
    return f"{known.dtype}{list(known.shape)}:{short}"


_SAME_NUMBERS = (
    "copy",
    "reshape",
    "squeeze",
    "broadcast_in_dim",
    "convert_element_type",
    "reshard",
)


def _has_unit_slope(closed: ClosedJaxpr) -> bool:
    """Whether the result is the score plus something that does not depend on it, or -inf, and nothing else.

    Not where the score goes through a function that brings its derivative along: what that computes does not say.
    """
    equations, results = flat_equations(closed, keeps_rules=True)
    score = closed.jaxpr.invars[0]
    shifted = {score}  # the score plus something, or -inf
    dependent = {score}
    hidden: set[Any] = set()  # -inf everywhere

    def is_hidden(x: Any) -> bool:
        if isinstance(x, Literal):
            return bool(np.all(np.asarray(x.val) == -np.inf))
        return x in hidden

    for equation, inputs, outputs in equations:
        reads = [x for x in inputs if not isinstance(x, Literal) and x in dependent]
        if not reads:
            if equation.primitive.name in _SAME_NUMBERS and is_hidden(inputs[0]):
                hidden |= set(outputs)
            continue
        dependent |= set(outputs)
        name = equation.primitive.name
        first = inputs[0]
        if name in _SAME_NUMBERS:
            keeps = name != "convert_element_type" or outputs[0].aval.dtype == score.aval.dtype
            is_shifted = keeps and first in shifted
        elif name in ("add", "add_any"):
            is_shifted = len(reads) == 1 and reads[0] in shifted
        elif name == "sub":
            is_shifted = len(reads) == 1 and reads[0] is first and first in shifted
        elif name == "select_n":
            known = [x for x in inputs[1:] if not is_hidden(x)]
            free = isinstance(first, Literal) or first not in dependent
            is_shifted = free and all(not isinstance(x, Literal) and x in shifted for x in known)
        else:
            is_shifted = False
        if is_shifted:
            shifted |= set(outputs)
    return not isinstance(results[0], Literal) and results[0] in shifted
