"""A score function counts as one wherever it does the same, whatever objects JAX makes of its operations."""

import jax
import jax.numpy as jnp
import pytest

from jattn.score_program import trace


def with_a_reduction(score, batch, head, query, key):  # type: ignore[no-untyped-def]
    return jax.lax.reduce(jnp.stack([score, 2 * score]), 0.0, lambda a, b: a + b * 1, (0,))


def with_another_reduction(score, batch, head, query, key):  # type: ignore[no-untyped-def]
    return jax.lax.reduce(jnp.stack([score, 2 * score]), 0.0, lambda a, b: a + b * 2, (0,))


def with_a_rule_of_batches(score, batch, head, query, key):  # type: ignore[no-untyped-def]
    @jax.custom_batching.custom_vmap
    def twice(x):  # type: ignore[no-untyped-def]
        return 2 * x

    @twice.def_vmap
    def rule(extent, is_batched, x):  # type: ignore[no-untyped-def]
        return 2 * x, True

    return twice(score)


@pytest.mark.parametrize("function", [with_a_reduction, with_a_rule_of_batches])
def test_traced_again_is_the_same_program(function) -> None:  # type: ignore[no-untyped-def]
    first, again = (trace(function, (), 0)[0] for _ in range(2))
    assert first == again
    assert hash(first) == hash(again)


def test_other_reductions_are_other_programs() -> None:
    assert trace(with_a_reduction, (), 0)[0] != trace(with_another_reduction, (), 0)[0]
