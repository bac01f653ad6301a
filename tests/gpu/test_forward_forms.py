"""Forms of the Hopper forward kernel that few problems have.

Turns, the series of the softcap, lists of documents, a row of the bias as the addend of exponents, warps beside the
producer that call Philox.
"""

import dataclasses

import numpy as np
import pytest

from jattn.testing import compare, inputs, oracle
from jattn.testing.cases import Case
from jattn.testing.run import run, verify

pytestmark = pytest.mark.backends("flash")

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
D96 = BASE.but("96", head_dim=96, head_dim_v=96)
D192 = BASE.but("192-128", head_dim=192)
WIDE = BASE.but("256", head_dim=256, head_dim_v=256)
UNEVEN = BASE.but("narrower", head_dim=120, head_dim_v=104)

TURNS = [
    NARROW.but("full", kv_len=611),
    NARROW.but("causal", is_causal=True, dtype="float16"),
    NARROW.but("alibi", alibi_form="n", is_causal=True),
    NARROW.but("sinks", sinks_form="n", is_causal=True, lower_right=True, q_len=333),
]
DROPS_BESIDE = [
    BASE.but("dropout", dropout_rate=0.2),
    BASE.but("dropout-causal", dropout_rate=0.2, is_causal=True, dtype="float16"),
    BASE.but("dropout-window", dropout_rate=0.2, window=(90, 30), kv_len=611),
    BASE.but("dropout-sinks", dropout_rate=0.2, sinks_form="n"),
    BASE.but(
        "dropout-lengths",
        dropout_rate=0.2,
        q_lengths=(333, 700),
        kv_lengths=(700, 0),
        dtype="float16",
    ),
    BASE.but("dropout-few-queries", dropout_rate=0.2, q_len=3, kv_len=1500, lower_right=True),
    BASE.but("dropout-many-items", dropout_rate=0.2, batch=9, num_heads=16, num_kv_heads=4),
    BASE.but("dropout-mask", dropout_rate=0.2, mask_form="b1ts"),
    BASE.but("dropout-segments", dropout_rate=0.2, segments="random", is_causal=True),
    BASE.but("dropout-slopes", dropout_rate=0.2, alibi_form="n", window=(90, 30), kv_len=611),
    BASE.but("dropout-softcap", dropout_rate=0.2, softcap=30.0, dtype="float16"),
    NARROW.but("dropout-bias", dropout_rate=0.2, bias_form="1nts", is_causal=True),
    NARROW.but("dropout-window", dropout_rate=0.2, window=(20, 0)),
    D96.but("dropout", dropout_rate=0.2, is_causal=True),
    D192.but("dropout", dropout_rate=0.2),
    D192.but("dropout-192", dropout_rate=0.2, head_dim_v=192, is_causal=True),
    WIDE.but("dropout", dropout_rate=0.2, window=(90, 30)),
    UNEVEN.but("dropout", dropout_rate=0.2, is_causal=True),
]
ALIBI = [
    BASE.but("alibi", alibi_form="n"),
    BASE.but("alibi-causal", alibi_form="n", is_causal=True, dtype="float16"),
    BASE.but("alibi-window", alibi_form="bn", window=(90, 30), kv_len=611),
    BASE.but(
        "alibi-lengths",
        alibi_form="n",
        q_lengths=(333, 700),
        kv_lengths=(700, 77),
        lower_right=True,
        is_causal=True,
    ),
    BASE.but("alibi-sinks", alibi_form="n", sinks_form="n"),
    BASE.but("alibi-few-queries", alibi_form="n", q_len=65, kv_len=4096),
    D96.but("alibi", alibi_form="n", is_causal=True),
    UNEVEN.but("alibi", alibi_form="n", is_causal=True),
]
SERIES = [
    BASE.but("all-small", softcap=50.0),
    BASE.but("all-large", softcap=0.5),
    BASE.but("mixed", softcap=5.0, is_causal=True),
    BASE.but("dropout", softcap=30.0, dropout_rate=0.2),
    BASE.but("mask", softcap=30.0, mask_form="b1ts"),
    BASE.but("few-queries", softcap=5.0, q_len=65, kv_len=4096),
    BASE.but("rising", softcap=30.0, distribution="rising"),
    BASE.but("falling", softcap=30.0, distribution="falling", is_causal=True),
    BASE.but("late", softcap=30.0, distribution="late"),
    BASE.but("grouped", softcap=50.0, q_len=2048, num_heads=8, num_kv_heads=2, is_causal=True),
    NARROW.but("mixed", softcap=5.0, is_causal=True),
    NARROW.but("lengths", softcap=20.0, dtype="float16", kv_lengths=(700, 77)),
    D96.but("window", softcap=5.0, window=(90, 30)),
    D192.but("mixed", softcap=5.0),
    WIDE.but("mixed", softcap=5.0, is_causal=True),
    WIDE.but("large-last", softcap=30.0, distribution="rising"),
]
DOCUMENTS = [
    BASE.but("full", segments="random", num_segments=7),
    BASE.but("causal", segments="random", num_segments=7, is_causal=True),
    BASE.but("lengths-differ", segments="random", num_segments=5, kv_len=401, window=(100, 60)),
    BASE.but("lower-right", segments="random", kv_len=611, is_causal=True, lower_right=True),
    BASE.but("softcap-sinks", segments="random", softcap=30.0, sinks_form="n"),
    # Few enough for tiles of queries of their own in the backward pass, or too many.
    BASE.but("few", segments="random", num_segments=3, is_causal=True, window=(300, None)),
    BASE.but(
        "few-grouped", batch=3, segments="random", num_segments=2, num_heads=8, num_kv_heads=2
    ),
    BASE.but("short", segments="random", num_segments=12, is_causal=True),
    NARROW.but("few", segments="random", num_segments=2, kv_len=611),
    BASE.but("refused-interleaved", segments="interleaved", is_causal=True),
    BASE.but("refused-many", segments="random", num_segments=300, is_causal=True),
    BASE.but("negative-scale", segments="random", num_segments=7, scale=-0.1, softcap=30.0),
    NARROW.but("causal", segments="random", num_segments=5, is_causal=True),
    NARROW.but("refused", segments="interleaved"),
    NARROW.but("softcap", segments="random", num_segments=5, softcap=5.0, is_causal=True),
    D96.but("causal", segments="random", num_segments=5, is_causal=True),
    D192.but("full", segments="random", num_segments=7),
    WIDE.but("causal", segments="random", num_segments=9, is_causal=True),
    WIDE.but("refused", segments="interleaved", is_causal=True, softcap=5.0),
    UNEVEN.but("causal", segments="random", num_segments=9, is_causal=True, dtype="float16"),
]
ROWS = [
    BASE.but("row", bias_form="1n1s"),
    BASE.but("row-float32", bias_form="b11s", bias_dtype="float32"),
    BASE.but("row-float16", bias_form="bn1s", dtype="float16"),
    BASE.but("row-causal", bias_form="b11s", bias_dtype="float32", is_causal=True),
    BASE.but("row-window", bias_form="1n1s", window=(90, 30), kv_len=611, dtype="float16"),
    BASE.but(
        "row-lengths",
        bias_form="b11s",
        q_lengths=(333, 700),
        kv_lengths=(700, 77),
        lower_right=True,
        is_causal=True,
    ),
    BASE.but("row-segments", bias_form="bn1s", segments="random", is_causal=True),
    BASE.but("row-mask", bias_form="1n1s", mask_form="b1ts"),
    BASE.but("row-sinks", bias_form="b11s", sinks_form="n"),
    BASE.but("row-positions", bias_form="b11s", positions="shuffled", window=(60, 20)),
    BASE.but("row-dropout", bias_form="b11s", dropout_rate=0.2),
    BASE.but("row-scale", bias_form="1n1s", scale=1.0),
    BASE.but("row-one-number", bias_form="bn11"),
    BASE.but("row-few-queries", bias_form="1n1s", batch=8, q_len=65, kv_len=700),
    BASE.but("row-grouped", bias_form="b11s", q_len=2048, num_heads=8, num_kv_heads=2),
    NARROW.but("row", bias_form="b11s", bias_dtype="float32"),
    NARROW.but("row-causal", bias_form="1n1s", is_causal=True, dtype="float16"),
    NARROW.but("row-mask", bias_form="b11s", mask_form="b1ts"),
    NARROW.but("row-segments", bias_form="1n1s", segments="random"),
    D96.but("row", bias_form="b11s", is_causal=True),
    D192.but("row", bias_form="1n1s", bias_dtype="float32"),
    WIDE.but("row", bias_form="b11s", is_causal=True),
    WIDE.but("row-dropout-mask", bias_form="1n1s", dropout_rate=0.2, mask_form="b1ts"),
    UNEVEN.but("row", bias_form="b11s", kv_len=401),
]
# The rows left over of whole boxes are those of the first tile: 64, 128, or none.
FIRST_TILE = [
    NARROW.but("cut-causal", q_len=832, kv_len=832, is_causal=True),
    NARROW.but("cut-causal-128", q_len=320, kv_len=517, is_causal=True, dtype="float16"),
    NARROW.but("cut-none", q_len=768, kv_len=768, is_causal=True),
    NARROW.but("cut-only", q_len=64, kv_len=200, is_causal=True, lower_right=True),
    NARROW.but("cut-lower-right", q_len=448, kv_len=700, is_causal=True, lower_right=True),
    NARROW.but("cut-window", q_len=640, kv_len=640, window=(150, 20)),
    NARROW.but("cut-behind", q_len=832, kv_len=300, window=(100, 0)),
    NARROW.but(
        "cut-alibi", q_len=832, kv_len=900, is_causal=True, lower_right=True, alibi_form="n"
    ),
    NARROW.but("cut-bias", q_len=832, kv_len=832, is_causal=True, bias_form="1nts"),
    NARROW.but("cut-row", q_len=832, kv_len=832, is_causal=True, bias_form="b11s"),
    NARROW.but("cut-sinks", q_len=832, kv_len=832, is_causal=True, sinks_form="n"),
    NARROW.but("cut-dropout", q_len=832, kv_len=832, is_causal=True, dropout_rate=0.2),
    NARROW.but("cut-softcap", q_len=832, kv_len=832, is_causal=True, softcap=5.0),
    D96.but("cut-causal", q_len=832, kv_len=832, is_causal=True),
]
IN_SERIES = [
    NARROW.but("dropout", dropout_rate=0.2),
    NARROW.but("dropout-window", dropout_rate=0.5, window=(90, 30), kv_len=611, dtype="float16"),
    NARROW.but("dropout-sinks", dropout_rate=0.9, sinks_form="n", is_causal=True),
    NARROW.but("softcap-segments", softcap=5.0, segments="random", is_causal=True),
]
FORMS = [
    *(("tile_q=192", case) for case in FIRST_TILE),
    *(("in_series=1", case) for case in IN_SERIES),
    *(("take_turns", case) for case in TURNS),
    *(("drops_beside", case) for case in DROPS_BESIDE),
    *(("alibi", case) for case in ALIBI),
    *(("cap_series", case) for case in SERIES),
    *(("documents", case) for case in DOCUMENTS),
    *(("row_bias", case) for case in ROWS),
]


@pytest.mark.parametrize(("form", "case"), FORMS, ids=str)
def test_picked_form(form: str, case: Case) -> None:
    """Runs a case, poisoned, by the kernel of the form, and compares it with the oracle."""
    verify(case, "flash", backward=False, kernel=form if "=" in form else f"{form}=1")


# Forms that look at sums behind the softcap's series: what may be wrong with the scores of a later tile than the first.
BY_SUMS = BASE.but("by-sums", softcap=30.0)
SPOILED_CASES = [
    BY_SUMS,
    BY_SUMS.but("causal", is_causal=True),
    BY_SUMS.but("lengths", q_lengths=(333, 0), kv_lengths=(700, 650), is_causal=True),
    BY_SUMS.but("segments", segments="random", num_segments=2),
    BY_SUMS.but("sinks", sinks_form="n", q_len=64, kv_len=2000),
    BY_SUMS.but("dropout", dropout_rate=0.2),
    BY_SUMS.but("mask", mask_form="b1ts", mask_density=1.0),
    BY_SUMS.but("least", softcap=25.5),
    BY_SUMS.but("most", softcap=55.0, is_causal=True),
    # Rows refer to their maxima there: sums prove nothing, and scores are tested.
    BY_SUMS.but("beyond", softcap=60.0, is_causal=True),
    BY_SUMS.but("far-beyond", softcap=200.0),
]


def with_key(operands: inputs.Operands, key: int, value: np.ndarray) -> inputs.Operands:
    """The operands with another key in the last batch entry, for all heads."""
    k = operands.k.copy()
    k[-1, key] = value
    return dataclasses.replace(operands, k=k)


@pytest.mark.parametrize("spoil", ["large", "beyond the cap", "low", "huge"])
@pytest.mark.parametrize("case", SPOILED_CASES, ids=str)
def test_scores_that_spoil_a_series(case: Case, spoil: str) -> None:
    """Sums tell, whatever the first tile (that of the last keys) has promised."""
    operands = inputs.make(case)
    direction = np.ones(case.head_dim) / np.sqrt(case.head_dim)
    if spoil == "low":
        # Scores of a whole tile near -13: no row has a sum of 1 there.
        k = operands.k.copy()
        k[:, :128] = (-13.0 * direction).astype(k.dtype)
        q = (np.asarray(operands.q, np.float32) * 0.1 + 11.3 * direction).astype(operands.q.dtype)
        k[:, 128:] = (np.asarray(k[:, 128:], np.float32) * 0.1).astype(k.dtype)
        operands = dataclasses.replace(operands, q=q, k=k)
    else:
        number = {"large": 14.0, "beyond the cap": 80.0, "huge": 1e37}[spoil]
        along = np.asarray(operands.q[-1, 5, 0], np.float32)
        value = along / np.sum(along**2) * number * np.sqrt(case.head_dim)
        operands = with_key(operands, 7, value.astype(operands.k.dtype))
    outcome = run(case, operands, "flash", backward=False)
    assert "cap_series=1" in outcome.lowered
    compare.assert_close(case, operands, outcome.results)


def test_a_key_that_is_no_number_spoils_a_series() -> None:
    case = BY_SUMS.but("nan")
    operands = with_key(inputs.make(case), 7, np.full(case.head_dim, np.nan, "float32"))
    outcome = run(case, operands, "flash", backward=False)
    out = np.asarray(outcome.results["out"], np.float32)
    assert np.isnan(out[-1]).all()
    assert np.isfinite(out[0]).all()


# What hides keys, by the type of the bias: a number that stands in half of the keys.
HIDING = {
    "bfloat16": (-np.inf, -3.3895314e38, -1e9, -1e4),
    "float16": (-np.inf, -65504.0),
    "float32": (-np.inf, -3.4028235e38, -2.3819763e38, -1e9, -1e10, -1e4),
}


def with_number(operands: inputs.Operands, where: object, number: float) -> inputs.Operands:
    """The operands with a number in some places of the bias."""
    assert operands.bias is not None
    bias = operands.bias.copy()
    bias[where] = number
    return dataclasses.replace(operands, bias=bias)


@pytest.mark.parametrize("base", [BASE, NARROW], ids=str)
@pytest.mark.parametrize(("dtype", "number"), [(d, n) for d in HIDING for n in HIDING[d]], ids=str)
def test_numbers_that_hide_keys(base: Case, dtype: str, number: float) -> None:
    """Held against the bias of -inf: beside other keys such a number leaves nothing of a key."""
    case = base.but(f"hiding-{dtype}", bias_form="b11s", bias_dtype=dtype, is_causal=True)
    if dtype == "float16":
        case = dataclasses.replace(case, dtype="float16")
    operands = inputs.make(case)
    hidden = np.random.default_rng(0).random((case.batch, 1, 1, case.kv_len)) < 0.5
    hidden[..., 0] = False
    outcome = run(case, with_number(operands, hidden, number), "flash")
    assert "row_bias=1" in outcome.lowered
    truth = with_number(operands, hidden, -np.inf)
    solution = oracle.solve(case, truth)
    compare.assert_close(case, truth, outcome.results, solution=solution)


@pytest.mark.parametrize("base", [BASE, NARROW], ids=str)
@pytest.mark.parametrize("number", [-np.inf, -3.4028235e38, -1e9, -1e10, 1e9, 3e38])
def test_rows_of_one_large_bias(base: Case, number: float) -> None:
    """Such a bias swallows the products: all keys count alike. No gradient overflows beside it."""
    case = base.but("one-bias", bias_form="b11s", bias_dtype="float32")
    operands = with_number(inputs.make(case), 1, number)
    outcome = run(case, operands, "flash")
    assert "row_bias=1" in outcome.lowered
    results = {name: np.asarray(x, np.float32) for name, x in outcome.results.items()}
    v = np.repeat(np.asarray(operands.v[1], np.float64), case.group_size, axis=1)
    wanted = np.zeros(v.shape[1:]) if number == -np.inf else v.mean(axis=0)
    assert np.abs(results["out"][1] - wanted).max() <= 2e-3
    if number == -np.inf:
        assert np.all(results["lse"][1] == -np.inf)
    elif abs(number) < 1e30:
        assert np.abs(results["lse"][1] / number - 1).max() < 2.0**-20
    for name in ("dq", "dk", "dv", "dbias"):
        assert np.isfinite(results[name]).all(), name


def test_a_bias_that_is_no_number_is_seen_by_all_queries() -> None:
    case = BASE.but("nan-bias", bias_form="b11s", bias_dtype="float32")
    operands = with_number(inputs.make(case), (1, 0, 0, 300), np.nan)
    outcome = run(case, operands, "flash", backward=False)
    assert "row_bias=1" in outcome.lowered
    out = np.asarray(outcome.results["out"], np.float32)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[0]).all()


INFINITE = {
    "products": BASE,
    "causal": BASE.but("causal", is_causal=True, head_dim=64, head_dim_v=64),
    "float16": BASE.but("float16", dtype="float16", bias_form="1nts"),
    "bias": BASE.but("bias", bias_form="1nts"),
    "row": BASE.but("row", bias_form="b11s", bias_dtype="float32"),
    "sinks": BASE.but("sinks", bias_form="b11s", bias_dtype="float32", sinks_form="n"),
}


@pytest.mark.parametrize("key", [5, 300])
@pytest.mark.parametrize("name", INFINITE)
def test_a_score_of_infinity_is_no_number(name: str, key: int) -> None:
    """Rows that see such a key give NaN, and no others: before they settle and behind."""
    case = INFINITE[name]
    operands = inputs.make(case)
    if case.bias_form is None:
        q, k = operands.q.copy(), operands.k.copy()
        q[0, 200], k[0, key] = 1e20, 1e20
        operands = dataclasses.replace(operands, q=q, k=k)
        rows = [200] if key <= 200 or not case.is_causal else []
    else:
        where = (0, 0, 0 if case.bias_form == "b11s" else 200, key)
        operands = with_number(operands, where, np.inf)
        rows = list(range(case.q_len)) if case.bias_form == "b11s" else [200]
    results = run(case, operands, "flash", backward=False).results
    expected = np.zeros(np.shape(results["out"])[:3], bool)
    entries = slice(None) if case.bias_form == "1nts" else slice(0, 1)
    heads = slice(0, 1) if case.bias_form == "1nts" else slice(None)
    expected[entries, rows, heads] = True
    out, lse = (np.asarray(results[x], np.float32) for x in ("out", "lse"))
    np.testing.assert_array_equal(np.isnan(out).all(-1), expected)
    np.testing.assert_array_equal(np.isnan(out).any(-1), expected)
    np.testing.assert_array_equal(np.isnan(lse.reshape(expected.shape)), expected)


PADDED_QUERIES = [
    BASE.but("padded", softcap=30.0, q_lengths=(333, 70)),
    BASE.but("padded-causal", softcap=5.0, q_lengths=(333, 7), is_causal=True),
    NARROW.but("padded", softcap=30.0, q_lengths=(333, 70)),
    NARROW.but("padded-causal", softcap=5.0, q_lengths=(600, 7), is_causal=True),
]


@pytest.mark.parametrize("case", PADDED_QUERIES, ids=str)
def test_padding_has_no_say_in_how_a_softcap_is_computed(case: Case) -> None:
    operands = inputs.make(case)
    clean, poisoned = (
        run(case, operands, "flash", backward=False, poisoned=p) for p in (False, True)
    )
    assert "cap_series=1" in clean.lowered
    for name, values in clean.results.items():
        np.testing.assert_array_equal(values, poisoned.results[name], err_msg=name)


def test_small_probabilities_of_float16_beside_a_bias_of_the_keys() -> None:
    """One key with a bias of -5.5, 4095 with -14.2: beside zero their probabilities would be subnormal."""
    case = BASE.but("far-below", dtype="float16", q_len=128, kv_len=4096, bias_form="b11s")
    operands = inputs.make(case)
    bias = np.full((case.batch, 1, 1, case.kv_len), -14.2, operands.bias.dtype)
    bias[..., -1] = -5.5
    v = np.ones_like(operands.v)
    v[:, -1] = 0
    operands = dataclasses.replace(operands, q=np.zeros_like(operands.q), v=v, bias=bias)
    outcome = run(case, operands, "flash", backward=False)
    assert "row_bias=1" in outcome.lowered
    far, near = (np.exp(np.float64(x)) for x in (bias[0, 0, 0, 0], bias[0, 0, 0, -1]))
    want = 4095 * far / (4095 * far + near)
    np.testing.assert_allclose(np.asarray(outcome.results["out"], np.float64), want, rtol=1e-3)
