"""Every backend agrees with the float64 oracle on the whole table of problems, and on random ones.

Every run is poisoned, forced, and checked to have taken the backend it names (`jattn.testing.run`).
"""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jattn.testing import cases
from jattn.testing.cases import Case
from jattn.testing.run import verify


def sweep_of(backend: str) -> list[Case]:
    """The kernel runs the whole table. What XLA compiles costs seconds a case, so for "xla" the head dims and bias
    forms, which are XLA's business, are thinned out, and values come in one type; "reference", which is the
    definition in whole arrays, has no tiles whose edges lengths could meet.
    """
    if backend == "cpu":
        return list(cases.sweep())
    tags = ("mask", "group", "scale", "length", "values") if backend == "xla" else ("mask", "group")
    thinned = (
        *("head_dim", "bias", "float64"),
        *("positions", "sinks", "alibi", "dropout", "dropout_rows"),
    )
    chosen = [
        case
        for tag in tags
        for case in cases.tagged(tag)
        if tag != "values" or case.dtype == "float32"
    ]
    return chosen + [
        case for tag in thinned for case in cases.tagged(tag)[:: 2 if backend == "xla" else 4]
    ]


@pytest.mark.parametrize(
    ("backend", "case"),
    [(b, case) for b in ("cpu", "xla", "reference") for case in sweep_of(b)],
    ids=str,
)
def test_agrees_with_the_oracle(backend: str, case: Case) -> None:
    verify(case, backend)


@pytest.mark.parametrize(
    "distribution", ["outlier_token", "lse_plus_200", "late", "logits_low", "tiny_v"]
)
def test_extreme_values_meet_masks(distribution: str, backend: str) -> None:
    """A partial last tile, a first tile that is masked whole, and |lse| beyond the range of exp."""
    case = Case(
        name=f"corner-{distribution}",
        q_len=66,
        kv_len=193,
        head_dim=32,
        head_dim_v=32,
        dtype="bfloat16",
        distribution=distribution,
        is_causal=True,
        lower_right=True,
        window=(90, None),
        kv_lengths=(193, 130),
        q_lengths=(66, 40),
    )
    verify(case, backend)


# Lengths and head dims on and beside the edges of tiles and vectors; small, because each example compiles.
EDGE_LENGTHS = (1, 2, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65, 79, 96, 97, 128, 129)
EDGE_HEAD_DIMS = (1, 2, 7, 8, 9, 16, 17, 31, 33, 48, 64, 65, 72)
FORMS = ("s", "ts", "t1", "nts", "bnts", "b1ts", "1n1s", "b11s", "11t1", "1111")


@st.composite
def random_case(draw: st.DrawFn) -> Case:
    """Draws a problem: every feature may meet every other."""
    batch = draw(st.integers(1, 3))
    q_len, kv_len = draw(st.sampled_from(EDGE_LENGTHS)), draw(st.sampled_from(EDGE_LENGTHS))
    num_kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (3, 2)]))
    head_dim = draw(st.sampled_from(EDGE_HEAD_DIMS))
    limit = st.one_of(st.none(), st.integers(0, 140))
    lengths = st.one_of(
        st.none(), st.lists(st.integers(-2, 140), min_size=batch, max_size=batch).map(tuple)
    )
    case = Case(
        name="random",
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=draw(st.one_of(st.just(head_dim), st.sampled_from(EDGE_HEAD_DIMS))),
        dtype=draw(st.sampled_from(("float32", "bfloat16", "float16"))),
        scale=draw(st.sampled_from((None, None, -0.3, 0.0, 0.7))),
        softcap=draw(st.sampled_from((None, None, 2.0, 30.0))),
        is_causal=draw(st.booleans()),
        lower_right=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.tuples(limit, limit))),
        bias_form=draw(st.one_of(st.none(), st.sampled_from(FORMS))),
        mask_form=draw(st.one_of(st.none(), st.sampled_from(FORMS))),
        mask_density=draw(st.sampled_from((0.1, 0.5, 0.9))),
        q_lengths=draw(lengths),
        kv_lengths=draw(lengths),
        segments=draw(st.sampled_from((None, None, "random", "interleaved"))),
        distribution=draw(
            st.sampled_from(("normal", "uniform", "integers", "normal_x3", "rising"))
        ),
        with_dlse=draw(st.booleans()),
    )
    if case.bias_form is not None and case.dtype != "float32":
        case = dataclasses.replace(case, bias_dtype=draw(st.sampled_from((case.dtype, "float32"))))
    if case.distribution == "rising" and not case.scale_value:
        case = dataclasses.replace(case, distribution="normal")
    return case


@pytest.mark.parametrize("backend", ["cpu"])
@given(case=random_case())
def test_agrees_with_the_oracle_on_random_problems(backend: str, case: Case) -> None:
    verify(case, backend)


@pytest.mark.parametrize("backend", ["xla", "reference"])
@settings(max_examples=settings.default.max_examples // 8)
@given(case=random_case())
def test_plain_backends_agree_on_random_problems(backend: str, case: Case) -> None:
    """Few examples in the derandomized profile of CI: each compiles for seconds."""
    verify(case, backend)
