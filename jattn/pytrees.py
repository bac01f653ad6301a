"""Classes of pytrees that exported programs take and return."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.export

C = TypeVar("C", bound=type)


def exportable(name: str) -> Callable[[C], C]:
    """Decorates a dataclass that is a pytree, so that `jax.export` can serialise programs with arguments of it.

    What is static in it is written as JSON: numbers, strings, None, and tuples of these.

    Args:
      name: that the class has in serialised programs.
    """

    def decorate(cls: C) -> C:
        fields = dataclasses.fields(cls)

        def to_bytes(static: Any) -> bytes:
            # JAX keeps the values of a dataclass's static fields, and an object that is static as a whole.
            values = static if isinstance(static, Sequence) else dataclasses.astuple(static)
            try:
                return json.dumps(values, default=operator.index).encode()
            except TypeError as error:
                raise ValueError(
                    f"{name}: a program with an argument of this class is to be serialised, but its static part is"
                    f" {values!r}, must be numbers, strings and None: make the object inside of the program, or pass"
                    " arrays made of it"
                ) from error

        def from_bytes(data: bytes) -> tuple[Any, ...]:
            return tuple(tuple(x) if isinstance(x, list) else x for x in json.loads(data))

        def from_children(aux_data: tuple[Any, ...], children: Sequence[Any]) -> Any:
            is_static = [len(children) == 0 or f.metadata.get("static", False) for f in fields]
            of_static, of_children = iter(aux_data), iter(children)
            return cls(
                **{
                    f.name: next(of_static if flag else of_children)
                    for f, flag in zip(fields, is_static, strict=True)
                }
            )

        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=name,
            serialize_auxdata=to_bytes,
            deserialize_auxdata=from_bytes,
            from_children=from_children,
        )
        return cls

    return decorate
