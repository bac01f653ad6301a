"""Features compose: random subsets of all of them, forward and every gradient, against the float64 oracle.

CI runs a thinned, derandomised selection; `--full` (or HYPOTHESIS_PROFILE=nightly for other examples every time) runs
300 problems on the kernel.
"""

import itertools
from collections.abc import Callable
from typing import Any

import covering
import numpy as np
import pytest
from composition import (
    DTYPES,
    FEATURES,
    FEWEST_SEEING,
    listed,
    listed_few_queries,
    problem,
    redrawn,
    shows_enough,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import jattn
from jattn.testing import cases, inputs, oracle
from jattn.testing.cases import Case
from jattn.testing.run import serves, verify

SM90 = jattn.Device("cuda", arch=(9, 0))


@st.composite
def composed(draw: st.DrawFn) -> Case:
    def chance(tenths: int) -> bool:
        return draw(st.integers(0, 9)) >= 10 - tenths

    used = frozenset(name for name, tenths in FEATURES.items() if chance(tenths))
    case = problem(
        lambda choices: draw(st.sampled_from(choices)), used, draw(st.sampled_from(DTYPES))
    )
    assume(shows_enough(case))
    return case


@settings(max_examples=settings.default.max_examples * 2 // 3)
@given(case=composed())
def test_features_compose_on_the_kernel(case: Case) -> None:
    verify(case, "cpu")


@pytest.mark.full
@pytest.mark.parametrize("backend", ["xla", "reference"])
@settings(max_examples=settings.default.max_examples // 20)
@given(case=composed())
def test_features_compose_in_plain_jax(backend: str, case: Case) -> None:
    verify(case, backend)


def features_of(case: Case) -> list[str]:
    """Its features and its dtype, which its name tells."""
    return case.name.split("-")[2:]


# Few, since each compiles for seconds, and others for each backend.
IN_XLA = covering.chosen(listed(300), features_of, 3)
IN_REFERENCE = covering.chosen([x for x in listed(300) if x not in IN_XLA], features_of, 3)


@pytest.mark.parametrize(
    ("backend", "case"),
    [("xla", case) for case in IN_XLA] + [("reference", case) for case in IN_REFERENCE],
    ids=str,
)
def test_few_compositions_in_plain_jax(backend: str, case: Case) -> None:
    verify(case, backend)


@pytest.mark.parametrize("few", [IN_XLA, IN_REFERENCE], ids=["xla", "reference"])
def test_few_compositions_have_every_feature(few: list[Case]) -> None:
    assert {*FEATURES} - {feature for case in few for feature in features_of(case)} == set()


@pytest.mark.full
@pytest.mark.parametrize("case", listed(300), ids=str)
def test_a_list_of_compositions_on_the_kernel(case: Case) -> None:
    verify(case, "cpu")


@pytest.mark.full
@pytest.mark.parametrize("case", listed(30), ids=str)
@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_a_list_of_compositions_in_plain_jax(backend: str, case: Case) -> None:
    verify(case, backend)


def first(choices: Any) -> Any:
    return choices[0]


def last(choices: Any) -> Any:
    return choices[-1]


@pytest.mark.parametrize("pick", [first, last])
def test_the_list_uses_every_feature(pick: Callable[[Any], Any]) -> None:
    """A misspelt feature would be left out in silence."""
    plain, full = (problem(pick, frozenset(used), "float32") for used in ((), FEATURES))
    for feature in FEATURES:
        alone = problem(
            pick,
            frozenset({feature, "dropout"} if feature == "dropout_rows" else {feature}),
            "float32",
        )
        assert alone != plain, feature
    assert full != plain
    names = " ".join(case.name for case in listed(300))
    assert [feature for feature in FEATURES if feature not in names] == []


@pytest.mark.parametrize("drawn", [listed, listed_few_queries])
def test_queries_of_the_lists_see_keys(drawn: Callable[[int], list[Case]]) -> None:
    """With the arrays of the problems themselves; before they were drawn again, every fifth of them saw too little."""
    shares = []
    for case in drawn(300):
        visible = oracle.visibility(case, inputs.make(case))
        shares.append(np.mean(visible.any(axis=3)))
    too_few = np.mean(np.asarray(shares) < FEWEST_SEEING)
    assert too_few <= 0.02
    assert np.mean(np.asarray(shares) < 1) > 0.3  # and yet many have queries that see nothing


def test_what_shows_too_little_is_drawn_again() -> None:
    enough = Case("enough", q_len=8, kv_len=8)
    hidden = (
        enough.but("no-keys", kv_lengths=(0, 0)),
        enough.but("few-queries", q_lengths=(3, 0)),
        enough.but("own-key", window=(0, 0), with_dlse=False),
    )
    assert shows_enough(enough)
    assert not any(map(shows_enough, hidden))
    assert shows_enough(hidden[2].but("dlse", with_dlse=True))
    attempts = iter((*hidden, enough))
    assert redrawn(lambda _: next(attempts), 0) == enough
    with pytest.raises(ValueError, match="none shows enough, the last one being enough-no-keys"):
        redrawn(lambda _: hidden[0], 0)


@pytest.mark.parametrize("backend", ["flash", "mem_efficient"])
def test_fused_gpu_backends_have_no_exclusion_list(backend: str) -> None:
    """Every pair of features, all of them, and 100 random subsets, in both 16-bit types, forward and backward: taken by
    the rules of the backend on a Hopper GPU. Pure dispatch; tests/gpu runs them.
    """
    subsets = [frozenset(pair) for pair in itertools.combinations(FEATURES, 2)] + [
        frozenset(FEATURES)
    ]
    problems = [
        problem(first, used, dtype) for used in subsets for dtype in ("bfloat16", "float16")
    ]
    problems += listed(100, ("bfloat16", "float16"))
    refused = [case for case in problems if not serves(case, backend, SM90)]
    assert not refused, f"{len(refused)} of {len(problems)} refused, for example {refused[0]}"


def test_fused_gpu_backends_admit_what_they_promise() -> None:
    """mem_efficient: everything but float64. flash: 16-bit types, head dims up to 256. No other exclusion."""
    for case in cases.sweep():
        narrow = max(case.head_dim, case.head_dim_v) <= 256
        half = case.dtype in ("float16", "bfloat16")
        assert serves(case, "mem_efficient", SM90) == (case.dtype != "float64"), case.name
        assert serves(case, "flash", SM90) == (narrow and half), case.name
