"""Few queries of many keys: the Hopper forward pass computes parts of the keys side by side and adds them up."""

import dataclasses

import numpy as np
import pytest

import jattn
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
# The single queries of a group are the rows of one tile.
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
    # Not packed: what differs from row to row.
    ONE_QUERY.but("sinks", sinks_form="n"),
    ONE_QUERY.but("alibi", alibi_form="n"),
    ONE_QUERY.but("bias", bias_form="bnts"),
    ONE_QUERY.but("upper-left", is_causal=True),
    ONE_QUERY.but("window", window=(20, 0), lower_right=True),
    ONE_QUERY.but("no-query", q_lengths=(1, 0)),
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


@pytest.mark.parametrize("case", [case for case in PACKED if serves(case, "flash", SM90)], ids=str)
@pytest.mark.parametrize("backend", ["flash"])
def test_single_queries_of_groups(backend: str, case: Case) -> None:
    verify(case, backend, backward=False)
