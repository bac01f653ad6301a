"""The comparison of score functions with float64 fails for what is wrong, and for nothing else."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from score_mods import SCORE_MODS, check_close, deviations, operands, plain_results

Array = Any
NAMES = ("of batch", "of head", "gain")  # one capture each, of 2, 4 and 1 numbers
PAIR = (0, 1, 5, 7)  # batch entry, head, query, key


@pytest.fixture(scope="module", params=NAMES)
def problem(request: pytest.FixtureRequest) -> Any:
    """A function, its captures, the arrays, plain results in float32 and float64, and their deviations."""
    score_mod, captures = SCORE_MODS[request.param]
    arrays = operands("float32")
    low, exact = plain_results(score_mod, captures, arrays)
    return score_mod, captures, arrays, low, exact, deviations(score_mod, captures, arrays)


def with_gradient(exact: list[Array], of_capture: Array) -> list[Array]:
    """Right results in float32 but for the gradient of the capture."""
    return [np.asarray(x, np.float32) for x in (*exact[:4], of_capture)]


def test_right_results_pass(problem: Any) -> None:
    _, _, _, low, exact, spread = problem
    check_close(with_gradient(exact, exact[4]), low, exact, spread)
    check_close(low, low, exact, spread)


def test_luck_of_the_plain_formula_does_not_count(problem: Any) -> None:
    """Its one error may be 0; by that measure an equally good result would be wrong."""
    _, _, _, low, exact, spread = problem
    lucky = [*low[:4], exact[4]]
    got = with_gradient(exact, exact[4] + 2 * spread[0] + 1e-6 * np.abs(exact[4]))
    check_close(got, lucky, exact, spread)
    with pytest.raises(AssertionError):
        check_close(got, lucky, exact, [None])


def test_a_gradient_that_is_off_by_a_thousandth_fails(problem: Any) -> None:
    _, _, _, low, exact, spread = problem
    for factor in (1 + 1e-3, 1 - 1e-3):
        with pytest.raises(AssertionError):
            check_close(with_gradient(exact, factor * exact[4]), low, exact, spread)


def test_a_gradient_without_one_pair_fails(problem: Any) -> None:
    """One of the 50400 terms."""
    score_mod, captures, arrays, low, exact, spread = problem

    def of_the_pair(s: Array, b: Array, h: Array, q: Array, k: Array, *read: Array) -> Array:
        is_it = jnp.all(jnp.stack([b, h, q, k]) == jnp.array(PAIR))
        moving = [jnp.where(is_it, x, jax.lax.stop_gradient(x)) for x in read]
        return score_mod(s, b, h, q, k, *moving)

    _, of_pair = plain_results(of_the_pair, captures, arrays)
    assert np.abs(of_pair[4]).max() > 0
    with pytest.raises(AssertionError):
        check_close(with_gradient(exact, exact[4] - of_pair[4]), low, exact, spread)


MUTATIONS: dict[str, Callable[[Array], Array]] = {
    "0.95 of it": lambda x: 0.95 * x,
    "without five rows": lambda x: np.where(np.arange(x.shape[1])[:, None, None] < 5, 0, x),
    "without a row": lambda x: np.where(np.arange(x.shape[1])[:, None, None] == 20, 0, x),
    "a row of another": lambda x: np.concatenate([x[:, :8], x[:, 7:8], x[:, 9:]], axis=1),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["cap", "relative table", "documents"])
def test_a_tensor_that_is_wrong_in_part_fails(name: str, dtype: str) -> None:
    score_mod, captures = SCORE_MODS[name]
    arrays = operands(dtype)
    low, exact = plain_results(score_mod, captures, arrays)
    spread = deviations(score_mod, captures, arrays)
    right = [np.asarray(x, y.dtype) for x, y in zip(exact, low, strict=True)]
    check_close(right, low, exact, spread)
    for i, tensor in enumerate(("out", "dq", "dk", "dv")):
        for mutation, change in MUTATIONS.items():
            wrong = [*right[:i], change(exact[i]).astype(right[i].dtype), *right[i + 1 :]]
            try:
                check_close(wrong, low, exact, spread)
            except AssertionError:
                continue
            pytest.fail(f"{tensor}: {mutation}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deviations_are_those_of_the_errors(dtype: str) -> None:
    """Draws of dout have gradients of their own, four numbers each: their errors' root mean square is as predicted."""
    score_mod, captures = SCORE_MODS["of head"]
    *qkv, dout = operands(dtype)
    errors, predicted = [], []
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(dout.shape[1])
        arrays = [*qkv, dout[:, order]]
        low, exact = plain_results(score_mod, captures, arrays)
        errors.append(np.square(np.asarray(low[4], np.float64) - np.asarray(exact[4])).mean())
        predicted.append(np.square(deviations(score_mod, captures, arrays)[0]).mean())
    ratio = np.sqrt(np.mean(errors) / np.mean(predicted))
    assert 0.5 < ratio < 2, ratio
