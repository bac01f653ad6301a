"""The gradients of what a score function reads, in operations of JAX: ds times the derivative of the score by each
element that a pair read, added up.

The derivative of the program along its captures is JAX's, and linear in their tangents. Its equations are walked
backwards, in three parts:

  pairs   what is computed with numbers of a pair: gives d score' / d read for each read of each pair
  moves   what takes elements out of arrays by indices of a pair: their transposes add up, in the type of the score
  tables  what is computed of arrays alone: once for all pairs

What no pair with weight read gets exactly 0, whatever its derivative is. A narrow type of captures rounds derivatives,
and no sum.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jattn.arrays import wider
from jattn.device_operations import ELEMENTWISE
from jattn.jax_interface import MOVES, Literal, bind, clipped, depends, vary_like
from jattn.score_program import ScoreProgram, computed, flat_equations
from jattn.score_tile import AXES, ScoreTile

_Equation = tuple[
    Any, list[Any], list[Any]
]  # with its inputs and outputs, as of ``flat_equations``
_Values = dict[Any, Any]


def times(ds: jax.Array, derivative: jax.Array) -> jax.Array:
    """ds * derivative, but 0 where ds is 0 and the derivative is not finite: a pair without weight moves nothing."""
    return _kept_zero(ds, ds * derivative)


def _kept_zero(before: jax.Array, after: jax.Array) -> jax.Array:
    return jnp.where((before == 0) & ~jnp.isfinite(after), 0, after)


def capture_gradients(
    program: ScoreProgram, tile: ScoreTile, captures: Sequence[jax.Array], ds: jax.Array
) -> tuple[jax.Array | None, ...]:
    """Returns what the pairs of a tile add to the gradients of the captures, None for one that is no float.

    Each has the shape of its capture, and the type of the score where that is wider.

    Args:
      program: the score function.
      tile: its pairs.
      captures: the arrays it reads.
      ds: (B, N, t, s), the gradient of the scores that the function returned.
    """
    parts = _parts(program)
    gradients: _Values = {}
    has_pairs = all(not isinstance(n, int) or n for n in ds.shape)
    by_rows = isinstance(ds.shape[2], int) and any(x.aval.shape for x in parts.reads)
    of_reads = _of_arrays if by_rows else _of_tile
    summed = of_reads(parts, tile, captures, ds) if has_pairs else []
    for read, gradient in zip(parts.reads, summed, strict=has_pairs):
        source, moved = _moved_back(parts, read, tile, captures, gradient)
        _add(gradients, source, moved)
    _through_tables(parts, captures, gradients)
    return tuple(
        None if x is None else gradients.get(x, jnp.zeros(x.aval.shape, _wide(x, parts)))
        for x in parts.tangents
    )


# ---- The parts of a derivative -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Parts:
    """The derivative of a program along its captures, cut.

    Attributes:
      dtype: of the score.
      arguments: what stands for score, indices and captures.
      tangents: what stands for the tangent of each capture; None for one that is no float.
      result: the tangent of the score that the function returns.
      reach: value -> which of score and indices it depends on, by their places.
      moving: values that depend on tangents.
      primal: equations that make something that depends on no tangent.
      pairs, moves, tables: the others; see above.
      reads: tangents of arrays, moved or not, that the result or equations of pairs are made of.
    """

    dtype: str
    arguments: list[Any]
    tangents: list[Any]
    result: Any
    reach: dict[Any, frozenset[int]]
    moving: set[Any]
    primal: list[_Equation] = dataclasses.field(default_factory=list)
    pairs: list[_Equation] = dataclasses.field(default_factory=list)
    moves: list[_Equation] = dataclasses.field(default_factory=list)
    tables: list[_Equation] = dataclasses.field(default_factory=list)
    reads: list[Any] = dataclasses.field(default_factory=list)

    def moving_places(self, values: Sequence[Any]) -> list[int]:
        """Where there is one that depends on tangents."""
        return [i for i, x in enumerate(values) if not isinstance(x, Literal) and x in self.moving]


@functools.lru_cache(maxsize=256)
def _parts(program: ScoreProgram) -> _Parts:
    equations, results = flat_equations(program.jvp_jaxpr)
    invars = program.jvp_jaxpr.jaxpr.invars
    count = 1 + AXES + len(program.captures)
    of_floats = iter(invars[count + 1 :])
    tangents = [next(of_floats) if c.is_float else None for c in program.captures]
    reach = {x: frozenset((i,)) if i < 1 + AXES else frozenset() for i, x in enumerate(invars)}
    reach[invars[count]] = reach[invars[0]]  # the tangent of the score
    parts = _Parts(program.dtype, invars[:count], tangents, results[1], reach, set(invars[count:]))
    sources = {x for x in tangents if x is not None}  # tangents of arrays, moved or not
    reads: dict[Any, None] = {}
    for equation in equations:
        called, inputs, outputs = equation
        places = parts.moving_places(inputs)
        moving = [inputs[i] for i in places]
        reached = [reach[x] for x in inputs if not isinstance(x, Literal)]
        reach |= dict.fromkeys(outputs, frozenset().union(*reached))
        made = [x for x, needs in zip(outputs, depends(called), strict=True) if needs & set(places)]
        parts.moving.update(made)
        if len(made) < len(outputs):
            parts.primal.append(equation)
        if not made:
            continue
        if not reach[made[0]]:
            parts.tables.append(equation)
            sources.update(made)
        elif called.primitive.name in MOVES and places == [0] and moving[0] in sources:
            parts.moves.append(equation)
            sources.update(made)
        else:
            parts.pairs.append(equation)
            reads |= dict.fromkeys(x for x in moving if x in sources)
    if parts.moving_places([parts.result]) and parts.result in sources:
        reads |= {parts.result: None}
    parts.reads.extend(reads)
    return parts


def _wide(x: Any, parts: _Parts) -> Any:
    """The type in which gradients of a value are added up."""
    return wider(x.aval.dtype, parts.dtype)


# ---- Walking backwards ---------------------------------------------------------------------------------------------


def _add(gradients: _Values, x: Any, more: jax.Array) -> None:
    gradients[x] = gradients[x] + more if x in gradients else more


def _zeros(x: Any, dtype: Any, like: Iterable[Any]) -> jax.Array:
    return vary_like(jnp.zeros(x.aval.shape, dtype), tuple(like))


def _of(x: Any, values: _Values) -> Any:
    """A value; of a tangent 0."""
    if isinstance(x, Literal):
        return np.asarray(x.val)
    return values[x] if x in values else np.zeros(x.aval.shape, x.aval.dtype)


def _primal_values(parts: _Parts, arguments: Sequence[Any], *, of_arrays: bool = False) -> _Values:
    """Evaluates what depends on no tangent, for one pair; or of that what depends on arrays alone."""
    values = dict(zip(parts.arguments, arguments, strict=True))
    for equation, inputs, outputs in parts.primal:
        if not of_arrays or not parts.reach[outputs[0]]:
            results = computed(equation, [_of(x, values) for x in inputs])
            values |= {x: y for x, y in zip(outputs, results, strict=True) if x not in parts.moving}
    return values


def _pull(
    parts: _Parts, equation: _Equation, values: _Values, gradients: _Values, *, wide: bool = False
) -> dict[Any, jax.Array]:
    """The gradients of the tangents that go into an equation, from those of what it makes; it is linear in them.

    What comes with a gradient of 0 through an elementwise operation goes on with one of 0. With ``wide`` the operation
    is one on floats of the type of the score, where theirs is narrower.
    """
    called, inputs, outputs = equation
    name = called.primitive.name
    made = [x for x in outputs if x in gradients]
    if not made:
        return {}
    places = parts.moving_places(inputs)

    def is_float(x: Any) -> bool:
        return bool(jnp.issubdtype(x.aval.dtype, jnp.floating))

    def dtype_of(x: Any) -> Any:
        return _wide(x, parts) if wide and is_float(x) else x.aval.dtype

    if wide and name == "convert_element_type" and is_float(inputs[0]) and is_float(made[0]):
        return {inputs[0]: gradients[made[0]]}

    if name == "custom_lin":
        return _pull_custom_vjp(parts, equation, values, gradients)

    full = [_of(x, values).astype(dtype_of(x)) for x in inputs]
    incoming = [gradients[x].astype(dtype_of(x)) for x in made]

    def of_tangents(*tangents: jax.Array) -> list[jax.Array]:
        for i, x in zip(places, tangents, strict=True):
            full[i] = x
        results = dict(zip(outputs, bind(called, full), strict=True))
        return [results[x] for x in made]

    zeros = [_zeros(inputs[i], dtype_of(inputs[i]), (*incoming, *full)) for i in places]
    _, pull = jax.vjp(of_tangents, *zeros)
    found: dict[Any, jax.Array] = {}
    for i, gradient in zip(places, pull(incoming), strict=True):
        keeps = name in ELEMENTWISE and gradient.shape == incoming[0].shape
        _add(found, inputs[i], _kept_zero(incoming[0], gradient) if keeps else gradient)
    return found


def _pull_custom_vjp(
    parts: _Parts, equation: _Equation, values: _Values, gradients: _Values
) -> dict[Any, jax.Array]:
    """The same through the tangent of a function with a ``custom_vjp`` rule, which can only be transposed."""
    called, inputs, outputs = equation
    places = parts.moving_places(inputs)
    given = [_of(x, values) for x in inputs]
    results = [
        gradients[x].astype(x.aval.dtype) if x in gradients else _zeros(x, x.aval.dtype, given)
        for x in outputs
    ]

    def of_tangents(*tangents: jax.Array) -> list[jax.Array]:
        for i, x in zip(places, tangents, strict=True):
            given[i] = x
        return called.primitive.bind(*given, **called.params)

    zeros = [_zeros(inputs[i], inputs[i].aval.dtype, results) for i in places]
    moved = jax.linear_transpose(of_tangents, *zeros)(results)
    return dict(zip((inputs[i] for i in places), moved, strict=True))


def _derivatives(
    parts: _Parts, tile: ScoreTile, captures: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """d score' / d read for each read: (B, N, t, s) and its shape."""

    def of_pair(*pair: Any) -> list[jax.Array]:
        arguments = (*pair, *captures)
        values = _primal_values(parts, arguments)
        gradients = {parts.result: vary_like(jnp.ones((), parts.dtype), arguments)}
        for equation in reversed(parts.pairs):
            for x, gradient in _pull(parts, equation, values, gradients).items():
                _add(gradients, x, gradient)
        return [
            gradients[x] if x in gradients else _zeros(x, x.aval.dtype, arguments)
            for x in parts.reads
        ]

    found: list[jax.Array] = tile.map(of_pair) if parts.reads else []
    return found


def _of_tile(
    parts: _Parts, tile: ScoreTile, captures: Sequence[jax.Array], ds: jax.Array
) -> list[jax.Array]:
    """The gradient of each read: its shape, behind the axes of the scores along which reads differ."""
    found = []
    for read, derivative in zip(parts.reads, _derivatives(parts, tile, captures), strict=True):
        axes = tile.axes_of(parts.reach[read])
        own = jnp.expand_dims(ds, tuple(range(AXES, derivative.ndim)))
        of_pairs = times(own, derivative.astype(_wide(read, parts)))
        found.append(of_pairs.sum([i for i in range(AXES) if i not in axes]))
    return found


def _of_arrays(
    parts: _Parts, tile: ScoreTile, captures: Sequence[jax.Array], ds: jax.Array
) -> list[jax.Array]:
    """As ``_of_tile``, where pairs read whole rows of arrays.

    JAX's transpose makes products of matrices of such reads. It is right where it is finite: a hidden pair has a ds of
    0, and what 0 does to a derivative that is not finite is not finite.
    """
    is_narrow = any(_wide(x, parts) != x.aval.dtype for x in parts.reads)
    if is_narrow or any(called.primitive.name == "custom_lin" for called, _, _ in parts.pairs):
        return _of_rows(parts, tile, captures, ds)
    like = (*tile, *captures, ds)
    found = vary_like(_transposed(parts, tile, captures, ds), like)
    return lax.cond(
        jnp.stack([jnp.isfinite(x).all() for x in found]).all(),
        lambda: found,
        lambda: vary_like(_of_rows(parts, tile, captures, ds), like),
    )


def _transposed(
    parts: _Parts, tile: ScoreTile, captures: Sequence[jax.Array], ds: jax.Array
) -> list[jax.Array]:
    """As ``_of_tile``, of all pairs at once, where no derivative is infinite or NaN."""
    axes = [tile.axes_of(parts.reach[x]) for x in parts.reads]

    def of_pair(*arguments: Any) -> Any:
        pair, reads = arguments[: 1 + AXES], arguments[1 + AXES :]
        values = _primal_values(parts, (*pair, *captures)) | dict(
            zip(parts.reads, reads, strict=True)
        )
        for equation, inputs, outputs in parts.pairs:
            results = computed(equation, [_of(x, values) for x in inputs])
            values |= {x: y for x, y in zip(outputs, results, strict=True) if x in parts.moving}
        return values[parts.result]

    def of_reads(*reads: jax.Array) -> Any:
        return tile.map(of_pair, beside=list(zip(reads, axes, strict=True)))

    zeros = [
        jnp.zeros((*(ds.shape[i] for i in own), *x.aval.shape), x.aval.dtype)
        for x, own in zip(parts.reads, axes, strict=True)
    ]
    _, pull = jax.vjp(of_reads, *vary_like(zeros, (*tile, *captures, ds)))
    return list(pull(ds))


def _of_rows(
    parts: _Parts, tile: ScoreTile, captures: Sequence[jax.Array], ds: jax.Array
) -> list[jax.Array]:
    """As ``_of_tile``, one row of queries after the other: reads of arrays for all pairs at once take much memory."""
    axes = [tile.axes_of(parts.reach[x]) for x in parts.reads]

    def of_row(i: jax.Array) -> list[jax.Array]:
        row = tile._replace(
            scores=lax.dynamic_slice_in_dim(tile.scores, i, 1, 2),
            queries=lax.dynamic_slice_in_dim(tile.queries, i, 1, 1),
        )
        return _of_tile(parts, row, captures, lax.dynamic_slice_in_dim(ds, i, 1, 2))

    def step(sums: list[jax.Array], i: jax.Array) -> tuple[list[jax.Array], list[jax.Array | None]]:
        found = list(zip(of_row(i), axes, strict=True))
        rows = [x.squeeze(own.index(2)) if 2 in own else None for x, own in found]
        rest = [x for x, own in found if 2 not in own]
        return [x + y for x, y in zip(sums, rest, strict=True)], rows

    sizes = ds.shape
    start = [
        jnp.zeros((*(sizes[i] for i in own), *x.aval.shape), _wide(x, parts))
        for x, own in zip(parts.reads, axes, strict=True)
        if 2 not in own
    ]
    start = vary_like(start, (*tile, *captures, ds))
    sums, rows = lax.scan(step, start, jnp.arange(sizes[2], dtype=jnp.int32))
    rest = iter(sums)
    return [
        next(rest) if x is None else jnp.moveaxis(x, 0, own.index(2))
        for x, own in zip(rows, axes, strict=True)
    ]


def _moved_back(
    parts: _Parts,
    read: Any,
    tile: ScoreTile,
    captures: Sequence[jax.Array],
    gradient: jax.Array,
) -> tuple[Any, jax.Array]:
    """The array that a read was moved out of, and its gradient, from that of the read."""
    source, chain = read, []
    for equation in reversed(parts.moves):
        if source in equation[2]:
            chain.append(equation)
            source = equation[1][0]
    if not chain:
        return source, gradient

    def of_array(array: jax.Array) -> Any:
        def of_pair(*pair: Any) -> Any:
            values = _primal_values(parts, (*pair, *captures))
            values[source] = array
            for equation, inputs, outputs in reversed(chain):
                values[outputs[0]] = bind(clipped(equation), [_of(x, values) for x in inputs])[0]
            return values[read]

        return tile.map(of_pair, tile.axes_of(parts.reach[read]))

    _, pull = jax.vjp(of_array, _zeros(source, gradient.dtype, (*tile, *captures)))
    return source, pull(gradient)[0]


def _through_tables(parts: _Parts, captures: Sequence[jax.Array], gradients: _Values) -> None:
    """Goes from the gradients of what was computed of arrays alone to those of the arrays."""
    arguments = (*[None] * (1 + AXES), *captures)
    values = _primal_values(parts, arguments, of_arrays=True)
    for equation in reversed(parts.tables):
        name = equation[0].primitive.name
        wide = name in MOVES or name in ELEMENTWISE
        for x, gradient in _pull(parts, equation, values, gradients, wide=wide).items():
            _add(gradients, x, gradient.astype(_wide(x, parts)))
