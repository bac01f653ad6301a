"""Arguments as arrays; what cannot be one is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.masks import CausalBias

_NAME = "jattn.dot_product_attention"


def as_array(name: str, x: Any, function: str = _NAME) -> jax.Array:
    """Returns an argument as an array; what cannot be one is refused by name."""
    try:
        return jnp.asarray(x)
    except jax.errors.JAXTypeError:
        raise  # a tracer that has left its function: JAX says it best
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(x, CausalBias):
            hint = "pass it as mask="
        elif isinstance(x, jax.ShapeDtypeStruct):
            hint = "jattn.explain and jax.eval_shape take shapes"
        elif isinstance(error, OverflowError):
            hint = "it holds integers that int32 cannot, write them as floats or clamp them"
        elif isinstance(x, np.ma.MaskedArray):
            hint = (
                "JAX has no masked arrays, pass x.filled(0) and the mask as an argument of its own"
            )
        elif isinstance(x, np.ndarray):
            hint = f"JAX has no arrays of {x.dtype.str!r}, cast it"
        else:
            hint = "pass an array, or nested lists of numbers of one shape"
        raise ValueError(f"{function}: {name} is {shown(x)}, must be an array: {hint}") from error


def as_flag(name: str, value: Any, function: str = _NAME) -> bool:
    """Returns an argument that must be True or False while tracing."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(
            f"{function}: {name} is {shown(value)}, must be True or False, known while tracing: make it a static"
            " argument"
        )
    return bool(value)


def check_arity(
    name: str, given: Callable[..., Any], count: int, wanted: str, function: str = _NAME
) -> None:
    """Refuses a function that does not take so many arguments; of one without a signature nothing is known.

    Args:
      name: of the argument that it is.
      given: the function.
      count: how many arguments it gets.
      wanted: the signature, in words.
      function: whose argument it is.

    Raises:
      TypeError: it takes another number.
    """
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        raise TypeError(
            f"{function}: {name} has the signature {signature}, must take {count} arguments: {wanted}"
        ) from error


def is_integer(value: Any) -> bool:
    """Whether an argument is a number without fraction that is known while tracing; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def plain_integer(value: Any) -> Any:
    """An integer of numpy as one of Python, which no sum or product makes wrap round; anything else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def as_integers(name: str, x: Any, function: str = _NAME) -> Any:
    """Returns an argument that should hold integers as an array: JAX's as it is, numpy's of anything else known.

    Without jax_enable_x64 JAX would cut the upper bits off: ``as_int32`` or a check comes before ``jnp.asarray``.
    """
    if isinstance(x, jax.Array):
        return x
    try:
        known = np.asarray(x)
    except (TypeError, ValueError):  # a list that holds tracers, or no array
        return as_array(name, x, function)
    if known.dtype.kind in "fO" and known.size and not hasattr(x, "dtype"):
        # Integers that no type of numpy holds together become floats or objects.
        numbers = np.asarray(x, object)
        if all(isinstance(number, int | np.integer) for number in numbers.flat):
            known = np.asarray(numbers.clip(-(2**63), 2**63 - 1), np.int64)
    return known if jnp.issubdtype(known.dtype, jnp.integer) else as_array(name, x, function)


def wider(dtype: Any, other: Any) -> Any:
    """The type that holds numbers of a type of floats or complex numbers, and of another of at least 32 bits.

    JAX promotes no floats of 8 bits.
    """
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(other) if is_narrow else jnp.promote_types(dtype, other)


def shown(x: Any) -> str:
    """The value of an argument, short enough for a message."""
    try:
        text = repr(x)
    except RuntimeError:  # of JAX
        text = "an array that was deleted or donated"
    return text if len(text) <= 80 else text[:77] + "..."
