"""Forms of the Hopper backward that are not picked: a warpgroup for dq, and the gradient of dropout by rows."""

from collections.abc import Iterator

import pytest
from test_flash_features import BASE, UNEQUAL, WIDE

import jattn
from jattn import dispatch
from jattn.backends import flash, flash_backward_tiles
from jattn.config import Determinism
from jattn.testing import compare
from jattn.testing.cases import Case
from jattn.testing.run import run, verify

D192 = BASE.but("192", head_dim=192, head_dim_v=192)
WITH_DQ_WARPGROUP = [
    case
    for base in (BASE, WIDE, D192, UNEQUAL)
    for case in (
        base.but("full", dtype="float16"),
        base.but("causal", q_len=1100, kv_len=700, is_causal=True, lower_right=True),
        base.but("segments-window", segments="random", window=(70, 30)),
        base.but("lengths", q_lengths=(150, 200), kv_lengths=(264, 77), scale=-0.1),
    )
]
WITH_DQ_WARPGROUP += [
    BASE.but("softcap", softcap=20.0, is_causal=True),
    BASE.but("bias-1nts", bias_form="1nts"),
    BASE.but("bias-b11s", bias_form="b11s"),
    WIDE.but("bias-11ts-window", bias_form="11ts", window=(100, 30), lower_right=True),
    BASE.but("mask-sparse-causal", mask_form="b1ts", mask_density=0.01, is_causal=True),
    WIDE.but("mask-alibi", mask_form="bnts", alibi_form="n"),
    WIDE.but(
        "positions-restart", kv_len=200, positions="restart", segments="random", is_causal=True
    ),
    BASE.but("dropout-causal", dropout_rate=0.113377, is_causal=True, dtype="float16"),
    # The weights of dropped pairs reach dq and dk rounded to 16 bits there.
    WIDE.but("dropout", dropout_rate=0.5),
    WIDE.but("dropout-bias-11ts", dropout_rate=0.2, bias_form="11ts", dtype="float16"),
]
DROPOUT_ROWS = [
    base.but(
        f"dropout-rows-{name}",
        kv_len=200,
        dropout_rate=0.2,
        dropout_rows=True,
        segments="random",
        positions="restart",
        **changes,
    )
    for base in (BASE, WIDE, UNEQUAL)
    for name, changes in (("full", {}), ("bias-causal", {"bias_form": "1nts", "is_causal": True}))
]


@pytest.mark.parametrize("case", WITH_DQ_WARPGROUP, ids=str)
def test_warpgroup_for_dq(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_backward_tiles, "_DQ_WARPGROUP_HEAD_DIMS", frozenset({64, 128, 192}))
    operands, solution = compare.solved(case)
    outcome = run(case, operands, "flash")
    assert "num_warps=16" in outcome.lowered
    compare.assert_close(case, operands, outcome.results, solution=solution)


@pytest.fixture
def gradient_of_dropout_by_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Takes back the refusal of this gradient."""
    monkeypatch.setattr(flash, "_unconfirmed_gradient", lambda *_: ())
    dispatch.choose.cache_clear()
    yield
    dispatch.choose.cache_clear()


@pytest.mark.usefixtures("gradient_of_dropout_by_rows")
@pytest.mark.parametrize("strict", ["off", "strict"])
@pytest.mark.parametrize("case", DROPOUT_ROWS, ids=str)
def test_gradient_of_dropout_by_rows(case: Case, strict: Determinism) -> None:
    with jattn.deterministic(strict):
        for _ in range(3):  # a warp that comes late was the fault that led to the refusal
            verify(case, "flash")
