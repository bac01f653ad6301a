"""The model of settled rows (tools/model_settled_rows.py) orders the rules as their definitions do."""

import itertools

import model_settled_rows as model
import numpy as np
import pytest


@pytest.fixture(scope="module")
def heads() -> list[model.Head]:
    return [model.draw(512, 64, outliers=True, seed=seed) for seed in range(3)]


def test_a_rule_that_never_acts_leaves_rows_settled(heads: list[model.Head]) -> None:
    settled, _ = model.forward(heads[0], "settled")
    for rule in ("lazy-1e9", "late-1e9", "flat--1"):
        out, share = model.forward(heads[0], rule)
        np.testing.assert_array_equal(out, settled)
        assert share == 0


def test_maxima_that_always_follow_are_exact(heads: list[model.Head]) -> None:
    exact, _ = model.forward(heads[0], "exact")
    for rule in ("lazy-0", "late-0", "flat-1e9"):
        out, share = model.forward(heads[0], rule)
        np.testing.assert_array_equal(out, exact)
        assert share > 0


def test_errors_fall_with_the_limit(heads: list[model.Head]) -> None:
    errors = [model.apply(heads, rule)[0] for rule in ("settled", "late-256", "late-32", "exact")]
    assert all(more > less for more, less in itertools.pairwise(errors))


def test_without_rounding_every_rule_has_the_same_result(
    heads: list[model.Head], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "bfloat16", lambda x: x.astype(np.float32))
    for rule in (
        "exact",
        "lazy-8",
        "settled",
        "flat-3",
        "late-32",
        "early-32",
        "rounded",
        "threads",
    ):
        assert model.apply(heads, rule)[0] < 1e-5
