"""Few queries of many keys: parts of the keys are computed side by side and added up, heads of a group share tiles."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

import jattn
from jattn.backends import few_queries
from jattn.testing import inputs
from jattn.testing.cases import Case
from jattn.testing.run import run, serves, verify

BASE = Case(
    name="splits",
    batch=2,
    q_len=100,
    kv_len=3000,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    head_dim_v=128,
    dtype="bfloat16",
)
CASES = (
    BASE,
    BASE.but("f16", dtype="float16"),
    BASE.but("D64", head_dim=64, head_dim_v=64),
    BASE.but("D256", head_dim=256, head_dim_v=256),
    BASE.but("D192-Dv128", head_dim=192),
    BASE.but("D72-Dv40", head_dim=72, head_dim_v=40),
    BASE.but("one-query", q_len=1),
    BASE.but("causal", is_causal=True, lower_right=True),
    BASE.but("causal-D64", is_causal=True, lower_right=True, head_dim=64, head_dim_v=64),
    BASE.but("window", window=(700, 5), lower_right=True),
    BASE.but("one-sided", window=(None, 900)),
    # The second entry has no keys, the third's lie in the first part alone.
    BASE.but(
        "lengths",
        batch=4,
        q_lengths=(100, 100, 37, 0),
        kv_lengths=(3000, 0, 5, 3000),
        is_causal=True,
        lower_right=True,
    ),
    BASE.but("segments", segments="random", num_segments=5),
    BASE.but("interleaved", segments="interleaved"),
    BASE.but("positions", is_causal=True, positions="shuffled"),
    BASE.but("positions-one-query", q_len=1, is_causal=True, positions="shifted"),
    BASE.but("positions-window", window=(1500, None), positions="shifted", kv_lengths=(3000, 1000)),
    BASE.but("softcap", softcap=5.0),
    BASE.but("negative-scale", scale=-0.1),
    BASE.but("sinks", sinks_form="n"),
    BASE.but("sinks-lengths", sinks_form="bn", kv_lengths=(3000, 0), distribution="outlier_token"),
    BASE.but("bias", bias_form="1nts"),
    BASE.but("row-bias", bias_form="b11s"),
    BASE.but("mask", mask_form="b1ts", mask_density=0.3),
    BASE.but("alibi", alibi_form="n", is_causal=True, lower_right=True),
    BASE.but("dropout", dropout_rate=0.3),
    BASE.but("everything", mask_form="bnts", bias_form="bnts", sinks_form="n", softcap=20.0),
    BASE.but("lse-plus-200", distribution="lse_plus_200"),
    BASE.but("logits-low", distribution="logits_low"),
    BASE.but("late", distribution="late"),
    BASE.but("rising", distribution="rising"),
)
# The few queries of all heads of a group are the rows of one tile.
ONE_QUERY = BASE.but(
    "one-query-group", q_len=1, kv_len=200, num_heads=14, num_kv_heads=2, kv_lengths=(200, 77)
)
PACKED = (
    ONE_QUERY,
    ONE_QUERY.but("causal", is_causal=True, lower_right=True),
    ONE_QUERY.but("softcap", softcap=3.0),
    ONE_QUERY.but("long", kv_len=4000, kv_lengths=(4000, 0)),
    ONE_QUERY.but("long-sinks", kv_len=4000, kv_lengths=(4000, 1300), sinks_form="bn"),
    ONE_QUERY.but("D64", head_dim=64, head_dim_v=64, dtype="float16"),
    ONE_QUERY.but("D256", head_dim=256, head_dim_v=256, num_heads=64),
    ONE_QUERY.but("sinks", sinks_form="n"),
    ONE_QUERY.but("upper-left", is_causal=True),
    ONE_QUERY.but("window", window=(20, 0), lower_right=True),
    ONE_QUERY.but(
        "long-window", window=(900, 0), lower_right=True, kv_len=4000, kv_lengths=(4000, 1300)
    ),
    ONE_QUERY.but("no-query", q_lengths=(1, 0)),
    ONE_QUERY.but(
        "positions", is_causal=True, positions="shifted", kv_len=2000, kv_lengths=(2000, 700)
    ),
    ONE_QUERY.but("segments", segments="random", kv_lengths=None),
    ONE_QUERY.but("mask", mask_form="b1ts", mask_density=0.4),
    ONE_QUERY.but("row-bias", bias_form="b11s"),
    ONE_QUERY.but(
        "row-bias-f32", bias_form="b11s", bias_dtype="float32", kv_len=2000, kv_lengths=(2000, 90)
    ),
    ONE_QUERY.but("negative-scale", scale=-0.2),
    ONE_QUERY.but("group-of-71", num_heads=142),
    ONE_QUERY.but("outlier", kv_len=3000, kv_lengths=(3000, 3000), distribution="outlier_token"),
    ONE_QUERY.but("late", kv_len=3000, kv_lengths=(3000, 3000), distribution="late"),
)
FEW_QUERIES = BASE.but("few-queries", q_len=7, kv_len=300, num_heads=12, num_kv_heads=2, batch=3)
PACKED_FEW = (
    FEW_QUERIES,
    FEW_QUERIES.but("causal", is_causal=True, lower_right=True),
    FEW_QUERIES.but("causal-long", is_causal=True, lower_right=True, kv_len=5000),
    FEW_QUERIES.but("upper-left", is_causal=True),
    FEW_QUERIES.but("window", window=(50, 3), lower_right=True),
    FEW_QUERIES.but("window-long", window=(1000, 0), lower_right=True, kv_len=5000),
    FEW_QUERIES.but(
        "lengths", q_lengths=(7, 3, 0), kv_lengths=(300, 150, 300), is_causal=True, lower_right=True
    ),
    FEW_QUERIES.but(
        "two-tiles", q_len=40, num_heads=16, num_kv_heads=4, is_causal=True, lower_right=True
    ),
    FEW_QUERIES.but(
        "three-tiles", q_len=33, num_heads=16, window=(100, 0), kv_len=1000, lower_right=True
    ),
    FEW_QUERIES.but("mask", mask_form="b1ts", mask_density=0.3),
    FEW_QUERIES.but("mask-two-tiles", mask_form="11ts", mask_density=0.3, q_len=40, num_heads=16),
    FEW_QUERIES.but("mask-of-keys", mask_form="b11s", mask_density=0.3),
    FEW_QUERIES.but("mask-of-queries", mask_form="b1t1", mask_density=0.5),
    FEW_QUERIES.but("row-bias", bias_form="b11s", is_causal=True, lower_right=True),
    FEW_QUERIES.but("segments", segments="random"),
    FEW_QUERIES.but("segments-two-tiles", segments="interleaved", q_len=40, num_heads=16),
    FEW_QUERIES.but("positions", is_causal=True, positions="shuffled"),
    FEW_QUERIES.but(
        "positions-two-tiles", window=(80, 10), positions="shifted", q_len=40, num_heads=16
    ),
    FEW_QUERIES.but("softcap", softcap=4.0),
    FEW_QUERIES.but("sinks", sinks_form="bn", is_causal=True, lower_right=True),
    FEW_QUERIES.but("f16", dtype="float16", is_causal=True, lower_right=True),
    FEW_QUERIES.but("D64", head_dim=64, head_dim_v=64, is_causal=True, lower_right=True),
    FEW_QUERIES.but("D96", head_dim=96, head_dim_v=96, is_causal=True, lower_right=True),
    FEW_QUERIES.but("D192-Dv128", head_dim=192, is_causal=True, lower_right=True),
    FEW_QUERIES.but("D256", head_dim=256, head_dim_v=256, is_causal=True, lower_right=True),
    FEW_QUERIES.but("D40-Dv72", head_dim=40, head_dim_v=72),
    FEW_QUERIES.but(
        "everything",
        q_len=20,
        num_heads=16,
        kv_len=1500,
        q_lengths=(20, 11, 4),
        kv_lengths=(1500, 1500, 200),
        mask_form="b1ts",
        bias_form="b11s",
        segments="random",
        positions="shifted",
        window=(900, 4),
        softcap=20.0,
        sinks_form="bn",
    ),
)
# What differs from head to head, or bias from query to query.
APART = (
    ONE_QUERY.but("alibi", alibi_form="n"),
    ONE_QUERY.but("bias", bias_form="bnts"),
    ONE_QUERY.but("mask-of-heads", mask_form="bnts"),
    ONE_QUERY.but("dropout", dropout_rate=0.2),
    FEW_QUERIES.but("bias", bias_form="b1ts"),
    FEW_QUERIES.but("many-queries", q_len=150),
)
# Of mem_efficient: the same by programs around its kernels (jattn/backends/few_queries.py), whether heads are packed.
AROUND = (
    (ONE_QUERY.but("around", kv_len=4096, kv_lengths=(4096, 1300)), True),
    (ONE_QUERY.but("around-f32", kv_len=4096, kv_lengths=None, dtype="float32"), True),
    (ONE_QUERY.but("around-heads", kv_len=4096, kv_lengths=None, num_kv_heads=14), False),
    (ONE_QUERY.but("around-alibi", kv_len=4096, kv_lengths=None, alibi_form="n"), False),
    (
        FEW_QUERIES.but(
            "around-everything",
            kv_len=8192,
            is_causal=True,
            lower_right=True,
            window=(7000, None),
            q_lengths=(7, 3, 0),
            kv_lengths=(8192, 5000, 300),
            mask_form="b1ts",
            bias_form="bnts",
            segments="random",
            softcap=20.0,
            sinks_form="bn",
        ),
        True,
    ),
)
SM90 = jattn.Device("cuda", arch=(9, 0))


@pytest.mark.parametrize("case", [case for case in CASES if serves(case, "flash", SM90)], ids=str)
@pytest.mark.parametrize("backend", ["flash"])
def test_parts_add_up(backend: str, case: Case) -> None:
    verify(case, backend, backward=False)
    operands = inputs.make(case)
    outcome = run(case, operands, backend, backward=False)
    assert "forward_combine" in outcome.lowered, "the keys were not split: this tests nothing"
    again = run(case, operands, backend, backward=False)
    for name, result in outcome.results.items():
        np.testing.assert_array_equal(result, again.results[name], err_msg=name)


@pytest.mark.parametrize("backend", ["flash"])
def test_gradients_take_the_residuals(backend: str) -> None:
    verify(dataclasses.replace(BASE, name="splits-gradients"), backend)


@pytest.mark.parametrize(
    "case", [case for case in PACKED + PACKED_FEW if serves(case, "flash", SM90)], ids=str
)
@pytest.mark.parametrize("backend", ["flash"])
def test_heads_of_groups_share_tiles(backend: str, case: Case) -> None:
    verify(case, backend, backward=False)
    operands = inputs.make(case)
    outcome = run(case, operands, backend, backward=False)
    assert "packed_heads=1" in outcome.lowered, "heads had tiles of their own: this tests nothing"


@pytest.mark.parametrize("case", [case for case in APART if serves(case, "flash", SM90)], ids=str)
@pytest.mark.parametrize("backend", ["flash"])
def test_heads_of_groups_stay_apart(backend: str, case: Case) -> None:
    verify(case, backend, backward=False)
    outcome = run(case, inputs.make(case), backend, backward=False)
    assert "packed_heads" not in outcome.lowered


@pytest.mark.parametrize(("case", "packs"), AROUND, ids=str)
@pytest.mark.parametrize("backend", ["mem_efficient"])
def test_programs_around_the_kernels(backend: str, case: Case, packs: bool) -> None:
    with mock.patch.object(few_queries, "rewritten", wraps=few_queries.rewritten) as spy:
        verify(case, backend, backward=False)
    asked = spy.call_args.kwargs
    assert asked["packs"] == packs
    assert asked["parts"] > 1


@pytest.mark.parametrize("backend", ["flash"])
def test_gradients_beside_packed_heads(backend: str) -> None:
    verify(FEW_QUERIES.but("gradients", is_causal=True, lower_right=True, sinks_form="n"), backend)
