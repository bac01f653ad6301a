"""Forms of the Hopper forward kernel that are not picked: turns, the series of the softcap, lists of documents."""

import pytest

from jattn.backends import flash_tiles
from jattn.testing import compare
from jattn.testing.cases import Case
from jattn.testing.run import run

BASE = Case(
    name="forms",
    q_len=700,
    kv_len=700,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    head_dim_v=128,
    dtype="bfloat16",
)
NARROW = BASE.but("64", head_dim=64, head_dim_v=64)
WIDE = BASE.but("256", head_dim=256, head_dim_v=256)
UNEVEN = BASE.but("narrower", head_dim=120, head_dim_v=104)

TURNS = [
    BASE.but("plain"),
    NARROW.but("causal", is_causal=True),
    BASE.but("window", window=(90, 30), kv_len=611),
    BASE.but("lower-right", is_causal=True, lower_right=True, q_len=611),
    BASE.but("lengths", q_lengths=(333, 700), kv_lengths=(700, 77), is_causal=True),
    BASE.but("bias", bias_form="1nts", kv_len=704),
    BASE.but("mask", mask_form="b1ts", mask_density=0.01, is_causal=True),
    BASE.but("segments", segments="interleaved"),
    BASE.but("dropout", dropout_rate=0.2, is_causal=True),
    NARROW.but("alibi", alibi_form="n", is_causal=True),
    WIDE.but("softcap", softcap=30.0),
    BASE.but("few-queries", q_len=65, kv_len=4096),
]
SERIES = [
    BASE.but("all-small", softcap=50.0),
    BASE.but("all-large", softcap=0.5),
    BASE.but("mixed", softcap=5.0, is_causal=True),
    NARROW.but("float16", softcap=20.0, dtype="float16", kv_lengths=(700, 77)),
    BASE.but("negative-scale", softcap=30.0, scale=-0.1),
    BASE.but("dropout-mask", softcap=30.0, dropout_rate=0.2, mask_form="b1ts"),
]
DOCUMENTS = [
    BASE.but("full", segments="random", num_segments=7),
    BASE.but("causal", segments="random", num_segments=7, is_causal=True),
    BASE.but("lengths-differ", segments="random", num_segments=5, kv_len=401, window=(100, 60)),
    BASE.but("lower-right", segments="random", kv_len=611, is_causal=True, lower_right=True),
    BASE.but("many", segments="random", num_segments=300, is_causal=True),
    BASE.but("softcap-sinks", segments="random", softcap=30.0, sinks_form="n"),
    BASE.but("refused", segments="interleaved", is_causal=True),
    NARROW.but("64", segments="random", num_segments=9, is_causal=True),
    WIDE.but("256", segments="random", num_segments=9, is_causal=True),
    UNEVEN.but("narrower", segments="random", num_segments=9, is_causal=True, dtype="float16"),
]


def check(case: Case, **changes: object) -> None:
    """Runs a case, poisoned, with changed tiles, and compares it with the oracle."""
    operands, solution = compare.solved(case)
    with flash_tiles.forward_tile_changes(**changes):
        outcome = run(case, operands, "flash", backward=False)
    for name, value in changes.items():
        assert f"{name}={int(bool(value))}" in outcome.lowered
    compare.assert_close(case, operands, outcome.results, solution=solution)


@pytest.mark.parametrize("case", TURNS, ids=str)
def test_turns(case: Case) -> None:
    check(case, take_turns=True)


@pytest.mark.parametrize("case", [case for case in TURNS if case.head_dim != 64], ids=str)
def test_turns_with_the_softmax_last(case: Case) -> None:
    check(case, take_turns=True, loop_order=1)


@pytest.mark.parametrize("case", SERIES, ids=str)
def test_series_of_the_softcap(case: Case) -> None:
    check(case, cap_series=True)


@pytest.mark.parametrize("case", DOCUMENTS, ids=str)
def test_documents(case: Case) -> None:
    check(case, documents=True)
