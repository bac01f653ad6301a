"""The comparer itself: correct implementations sit well below its limits, and known kinds of wrong ones fail."""

import dataclasses

import numpy as np
import pytest

from jattn.testing import baseline, bounds, cases, compare, inputs, oracle
from jattn.testing.cases import Case
from jattn.testing.inputs import Array, Operands

# Correct implementations were measured at 0.83 of a bound and 0.50 of an RMS limit over the whole table.
WELL_BELOW_BOUND = 0.95
WELL_BELOW_RMS = 0.65

TAILED = Case(
    name="mutants", q_len=70, kv_len=90, num_heads=4, num_kv_heads=2, head_dim=32, head_dim_v=32
)


def emulated(case: Case, operands: Operands, precision: str = "ieee") -> dict[str, Array]:
    """The textbook implementation of the case, lse in the public type."""
    return baseline.solve(case, operands, oracle.solve(case, operands), precision)


def broken(report: compare.Report) -> set[str]:
    return {tensor.name for tensor in report.tensors if not tensor.passed}


@pytest.mark.parametrize("case", cases.sweep(), ids=str)
def test_a_correct_implementation_is_well_below_the_limits(case: Case) -> None:
    operands, solution = compare.solved(case)
    report = compare.assert_close(
        case, operands, baseline.solve(case, operands, solution), solution=solution
    )
    for tensor in report.tensors:
        assert tensor.bound_ratio < WELL_BELOW_BOUND, str(report)
        assert tensor.rms_ratio < WELL_BELOW_RMS, str(report)


def test_gradients_beside_a_saturated_softcap_are_subnormal_numbers() -> None:
    """There float16 rounds by an absolute amount, whatever the slope of the softcap is."""
    case = Case(
        name="saturated",
        batch=2,
        q_len=1,
        kv_len=2048,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        head_dim_v=64,
        dtype="float16",
        softcap=2.0,
        scale=0.7,
        distribution="integers",
    )
    operands, solution = compare.solved(case)
    results = baseline.solve(case, operands, solution)
    report = compare.assert_close(case, operands, results, solution=solution)
    assert all(tensor.bound_ratio < WELL_BELOW_BOUND for tensor in report.tensors), str(report)


@pytest.mark.parametrize(("head_dim_v", "judged"), [(31, False), (32, True)])
def test_root_mean_squares_judge_tensors_of_enough_elements(head_dim_v: int, judged: bool) -> None:
    case = Case(
        name="few-elements",
        batch=1,
        q_len=1,
        kv_len=100,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        head_dim_v=head_dim_v,
    )
    operands, solution = compare.solved(case)
    report = compare.check(
        case, operands, baseline.solve(case, operands, solution), solution=solution
    )
    ratios = {tensor.name: tensor.rms_ratio for tensor in report.tensors}
    assert (ratios["out"] > 0) == judged
    assert ratios["dk"] > 0


def test_gradients_of_rows_of_one_key_are_judged_by_their_bounds() -> None:
    """They are differences of equal dot products, which another implementation adds up in another order."""
    case = TAILED.but("one-key", kv_len=1, num_kv_heads=1, with_dlse=False)
    operands, solution = compare.solved(case)
    terms = solution.dout.astype(np.float32) * solution.v.astype(np.float32)
    forward, backward = (np.cumsum(x, axis=3)[..., -1] for x in (terms, terms[..., ::-1]))
    assert (forward != backward).any()
    ds = (forward - backward).transpose(0, 2, 1)[..., None]
    dq = ds * np.float32(case.scale_value) * operands.k
    report = compare.assert_close(case, operands, {"dq": dq}, solution=solution)
    assert report.tensors[0].rms_ratio == 0
    worse = dq * np.float32(2 / report.tensors[0].bound_ratio)
    assert broken(compare.check(case, operands, {"dq": worse}, solution=solution)) == {"dq"}


@pytest.mark.parametrize("change", [{"kv_len": 2}, {"with_dlse": True}, {"sinks_form": "n"}])
def test_gradients_of_rows_of_one_key_and_more_are_judged_as_all_are(
    change: dict[str, object],
) -> None:
    case = TAILED.but("one-key-and-more", **{"kv_len": 1, "with_dlse": False} | change)
    operands, solution = compare.solved(case)
    report = compare.check(case, operands, emulated(case, operands), solution=solution)
    ratios = {tensor.name: tensor.rms_ratio for tensor in report.tensors}
    assert ratios["dq"] > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("distribution", ["normal", "uniform"])
def test_a_loss_of_precision_fails_in_every_tensor(dtype: str, distribution: str) -> None:
    """2.5 times the textbook error fails in a 16-bit type. In float32 the limits also leave room for another order of
    summation, a few units of 2^-24, so the smallest loss that must fail there is 10 times; tf32 would be 8192 times.
    """
    factor = 10.0 if dtype == "float32" else 2.5
    case = TAILED.but("loss", dtype=dtype, bias_form="bnts", distribution=distribution)
    operands, solution = compare.solved(case)
    results = emulated(case, operands)
    for name, result in results.items():
        if name == "lse" and dtype != "float32":
            continue  # lse is float32 whatever the type of the case: nothing was lost in it
        want = getattr(solution, name)
        # The excess goes on before the rounding, as a kernel that accumulates in a narrower type would do it.
        worse = want + factor * (result.astype(np.float64) - want)
        report = compare.check(
            case, operands, {name: worse.astype(result.dtype)}, solution=solution
        )
        assert broken(report) == {name}, str(report)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_scores_rounded_to_the_input_type_fail(dtype: str) -> None:
    """The products q.k kept in a 16-bit type instead of float32."""
    case = TAILED.but("low-scores", dtype=dtype, distribution="normal_x3")
    operands, solution = compare.solved(case)
    low = inputs.numpy_dtype("bfloat16")
    s = (solution.q.astype(np.float32) @ solution.k.astype(np.float32).swapaxes(2, 3)) * np.float32(
        case.scale_value
    )
    s = s.astype(low).astype(np.float32)
    weights = np.exp(s - s.max(axis=3, keepdims=True))
    p = (weights / weights.sum(axis=3, keepdims=True)).astype(operands.q.dtype).astype(np.float32)
    out = (p @ solution.v.astype(np.float32)).transpose(0, 2, 1, 3).astype(operands.q.dtype)
    assert broken(compare.check(case, operands, {"out": out}, solution=solution)) == {"out"}


def test_output_accumulated_in_the_input_type_fails() -> None:
    case = TAILED.but("low-out", dtype="bfloat16", kv_len=512)
    operands, solution = compare.solved(case)
    low = inputs.numpy_dtype("bfloat16")
    out = np.zeros((case.batch, case.num_heads, case.q_len, case.head_dim_v), low)
    for start in range(0, case.kv_len, 16):
        tile = slice(start, start + 16)
        out = (out.astype(np.float64) + solution.p[..., tile] @ solution.v[:, :, tile]).astype(low)
    report = compare.check(case, operands, {"out": out.transpose(0, 2, 1, 3)}, solution=solution)
    assert broken(report) == {"out"}, str(report)


def test_undeclared_tf32_fails_and_declared_tf32_passes() -> None:
    case = TAILED.but("tf32", bias_form="bnts")
    operands, solution = compare.solved(case)
    results = emulated(case, operands, "tf32")
    assert broken(compare.check(case, operands, results, solution=solution)) == set(results)
    compare.assert_close(case, operands, results, precision="tf32", solution=solution)
    with pytest.raises(ValueError, match="'tf64', must be one of ieee, tf32, tf32x3"):
        compare.check(case, operands, results, precision="tf64")


def test_three_tf32_products_are_close_to_ieee() -> None:
    """What a GPU kernel declares for float32 passes as declared, and plain tf32 does not pass for it."""
    case = TAILED.but("tf32x3", bias_form="bnts")
    operands, solution = compare.solved(case)
    thrice = emulated(case, operands, "tf32x3")
    report = compare.assert_close(case, operands, thrice, precision="tf32x3", solution=solution)
    assert max(tensor.bound_ratio for tensor in report.tensors) < WELL_BELOW_BOUND
    once = emulated(case, operands, "tf32")
    assert broken(
        compare.check(case, operands, once, precision="tf32x3", solution=solution)
    ) == set(once)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("what", "mutation"),
    [
        ("the last key is dropped", {"kv_lengths": (89, 89)}),
        ("the band is one too wide on the left", {"window": (13, 5)}),
        ("the band is one too narrow on the right", {"window": (12, 4)}),
        ("the band starts at the other corner", {"lower_right": True}),
        ("the band is ignored", {"window": None}),
        ("the scale is that of a padded head dim", {"scale": 40**-0.5}),
        ("the softcap is ignored", {"softcap": None}),
        ("the last query is taken for padding", {"q_lengths": (69, 69)}),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_wrong_problem_fails(dtype: str, what: str, mutation: dict[str, object]) -> None:
    case = TAILED.but("wrong", dtype=dtype, window=(12, 5), kv_len=90, softcap=4.0)
    if "kv_lengths" in mutation:
        case = dataclasses.replace(case, window=(12, 40))  # some row has to see the last key
    operands, solution = compare.solved(case)
    mutant = dataclasses.replace(case, **mutation)
    lengths = {
        name: np.asarray(mutation[name], np.int32)
        for name in ("q_lengths", "kv_lengths")
        if name in mutation
    }
    results = emulated(mutant, dataclasses.replace(operands, **lengths))
    report = compare.check(case, operands, results, solution=solution)
    assert broken(report) >= {"out", "lse", "dq", "dk", "dv"} - {
        "lse" if what.startswith("the last q") else ""
    }, what


def test_one_dropped_key_among_a_thousand_fails() -> None:
    case = Case(
        name="dropped-key",
        batch=1,
        q_len=5,
        kv_len=1000,
        head_dim=32,
        head_dim_v=32,
        dtype="bfloat16",
    )
    operands, solution = compare.solved(case)
    mutant = dataclasses.replace(case, kv_lengths=(999,))
    results = emulated(
        mutant, dataclasses.replace(operands, kv_lengths=np.asarray([999], np.int32))
    )
    assert {"lse", "dk", "dv"} <= broken(compare.check(case, operands, results, solution=solution))


@pytest.mark.parametrize("distribution", ["normal_x3", "rising"])
def test_a_missing_rescale_fails(distribution: str) -> None:
    """An online softmax that does not shrink what it has when the row maximum grows."""
    case = TAILED.but("rescale", distribution=distribution)
    operands, solution = compare.solved(case)
    half = case.kv_len // 2
    row_max = [
        solution.s[..., part].max(axis=3, keepdims=True)
        for part in (slice(0, half), slice(0, None))
    ]
    weights = np.exp(
        solution.s
        - np.concatenate([np.repeat(row_max[0], half, 3), np.repeat(row_max[1], half, 3)], 3)
    )
    out = (weights / weights.sum(axis=3, keepdims=True)) @ solution.v
    report = compare.check(
        case, operands, {"out": out.transpose(0, 2, 1, 3).astype(np.float32)}, solution=solution
    )
    assert broken(report) == {"out"}


def test_a_finite_minus_infinity_fails() -> None:
    """Masked keys that win because every visible score is below the sentinel."""
    case = TAILED.but("sentinel", distribution="logits_low", kv_lengths=(41, 90))
    operands, solution = compare.solved(case)
    unmasked = oracle.solve(
        dataclasses.replace(case, kv_lengths=None), dataclasses.replace(operands, kv_lengths=None)
    )
    s = np.where(solution.visible, unmasked.s, -1e4)
    weights = np.exp(s - s.max(axis=3, keepdims=True))
    out = (weights / weights.sum(axis=3, keepdims=True)) @ unmasked.v
    report = compare.check(
        case, operands, {"out": out.transpose(0, 2, 1, 3).astype(np.float32)}, solution=solution
    )
    assert broken(report) == {"out"}


def test_an_lse_in_base_2_and_an_ignored_dlse_fail() -> None:
    operands, solution = compare.solved(TAILED)
    results = emulated(TAILED, operands)
    base_2 = (results["lse"] / np.float32(np.log(2))).astype(np.float32)
    assert broken(compare.check(TAILED, operands, {"lse": base_2}, solution=solution)) == {"lse"}
    without = emulated(TAILED, dataclasses.replace(operands, dlse=np.zeros_like(operands.dlse)))
    assert broken(compare.check(TAILED, operands, without, solution=solution)) == {"dq", "dk"}


def test_gradients_of_one_head_of_a_group_fail() -> None:
    operands, solution = compare.solved(TAILED)
    first_only = emulated(TAILED, operands)
    shape = (TAILED.batch, TAILED.num_heads, TAILED.kv_len, TAILED.head_dim_v)
    per_head = (solution.p.swapaxes(2, 3) @ solution.dout).reshape(shape)[:, ::2]
    first_only["dv"] = per_head.transpose(0, 2, 1, 3).astype(np.float32)
    assert broken(compare.check(TAILED, operands, first_only, solution=solution)) == {"dv"}


# Gradients that are sums over rows: with how much of them the result still fails.
SUMS = [
    (cases.named("alibi-heads-long-causal-bf16"), "dalibi_slopes", 0.9),
    (cases.named("alibi-heads-causal-bf16"), "dalibi_slopes", 0.9),
    (cases.named("sinks-heads-batch-causal-bf16"), "dsinks", 0.9),
    (cases.named("dropout-plain-everything-bf16"), "dsinks", 0.9),
    (TAILED.but("slopes-half", dtype="float16", alibi_form="n"), "dalibi_slopes", 0.9),
    (TAILED.but("slopes-of-batch", dtype="bfloat16", alibi_form="bn"), "dalibi_slopes", 0.9),
    (TAILED.but("table", dtype="bfloat16", score_mod="table"), "dcapture0", 0.9),
    (TAILED.but("gain", dtype="bfloat16", score_mod="gain"), "dcapture0", 0.5),
    (TAILED.but("gain", dtype="bfloat16", score_mod="gain"), "dcapture1", 0.5),
    (cases.named("bias-1n11"), "dbias", 0.5),
    (TAILED.but("bias-of-keys", dtype="bfloat16", bias_form="b11s"), "dbias", 0.9),
    (TAILED.but("bias-of-all", dtype="bfloat16", bias_form="1111"), "dbias", 0.5),
]


@pytest.mark.parametrize(("case", "name", "most"), SUMS, ids=str)
def test_parts_of_a_gradient_that_is_a_sum_over_rows_fail(
    case: Case, name: str, most: float
) -> None:
    operands, solution = compare.solved(case)
    want, textbook = getattr(solution, name), emulated(case, operands)[name]
    report = compare.assert_close(case, operands, {name: textbook}, solution=solution)
    assert report.tensors[0].bound_ratio < 0.2, str(report)
    for factor in (-1.0, 0.0, 0.5, 0.9):
        if factor <= most:
            part = (factor * want).astype(textbook.dtype)
            report = compare.check(case, operands, {name: part}, solution=solution)
            assert broken(report) == {name}, f"{factor} of it: {report}"


def test_a_tenth_of_the_gradient_of_slopes_fails() -> None:
    """Of half of the heads by themselves: the terms of the others cancel by chance."""
    case = Case(
        "slopes-of-a-layer",
        batch=1,
        q_len=384,
        kv_len=384,
        num_heads=6,
        num_kv_heads=6,
        dtype="bfloat16",
        is_causal=True,
        alibi_form="n",
    )
    operands, solution = compare.solved(case)
    found = bounds.bounds(case, operands, solution, bounds.units(case.dtype), "float32")
    are_refused = np.abs(0.1 * np.asarray(solution.dalibi_slopes)) > found["dalibi_slopes"]
    assert are_refused.sum() >= 3
    textbook = emulated(case, operands)["dalibi_slopes"]
    last = np.arange(case.num_heads) == np.flatnonzero(are_refused)[-1]
    for factors in (1.0, 0.9, np.where(last, 1.1, 1.0)):
        results = {"dalibi_slopes": (factors * textbook).astype(np.float32)}
        report = compare.check(case, operands, results, solution=solution)
        assert report.passed == np.all(factors == 1.0), str(report)


@pytest.mark.parametrize("tensor", ["out", "dq", "dk", "dv", "dbias"])
def test_the_smallest_value_where_zero_is_due_fails(tensor: str) -> None:
    case = TAILED.but("zeros", q_lengths=(70, 20), kv_lengths=(30, 90), bias_form="bnts")
    operands, solution = compare.solved(case)
    results = emulated(case, operands)
    place = (
        (1, -1, 0, 0)
        if tensor in ("out", "dq")
        else (0, -1, 0, 0)
        if tensor in ("dk", "dv")
        else (0, 0, 0, -1)
    )
    assert results[tensor][place] == 0
    results[tensor] = results[tensor].copy()
    results[tensor][place] = 1e-38
    [report] = [
        r for r in compare.check(case, operands, results, solution=solution).tensors if not r.passed
    ]
    assert report.name == tensor
    assert "must be exactly 0" in str(report)


def test_lse_of_a_row_without_keys_must_be_minus_infinity() -> None:
    case = TAILED.but("empty", kv_lengths=(0, 90))
    operands, solution = compare.solved(case)
    results = emulated(case, operands)
    assert np.isneginf(results["lse"][0]).all()
    for wrong in (np.float32(-3.4e38), np.float32(np.nan), np.float32(np.inf)):
        lse = np.where(np.isneginf(results["lse"]), wrong, results["lse"])
        assert "must be -inf" in str(compare.check(case, operands, {"lse": lse}, solution=solution))


def test_a_nan_must_arrive_and_must_not_spread() -> None:
    case = TAILED.but("nan", is_causal=True)
    operands = inputs.make(case)
    q, v = operands.q.copy(), operands.v.copy()
    q[0, 5, 1] = np.nan
    v[1, 0, 0, 3] = np.nan
    operands = dataclasses.replace(operands, q=q, v=v)
    solution = oracle.solve(case, operands)
    assert np.isnan(solution.out[0, 5, 1]).all()
    assert (
        np.isnan(solution.out).sum() == 32 + 2 * 70
    )  # one row; one channel of every row of the two heads that read it
    out = emulated(case, operands)["out"]
    out[1, :, :2, 3] = np.nan
    out[0, 5, 1] = np.nan
    correct = np.where(np.isnan(solution.out), np.float32(np.nan), solution.out.astype(np.float32))
    assert compare.check(case, operands, {"out": correct}, solution=solution).passed
    swallowed = np.where(np.isnan(correct), np.float32(0), correct)
    assert "must be NaN" in str(
        compare.check(case, operands, {"out": swallowed}, solution=solution)
    )
    spread = correct.copy()
    spread[0, 6, 1, 0] = np.nan
    assert "must be finite" in str(
        compare.check(case, operands, {"out": spread}, solution=solution)
    )


def test_wrong_shapes_types_and_names_are_found() -> None:
    operands, solution = compare.solved(TAILED)
    results = emulated(TAILED, operands)
    transposed = results["lse"].transpose(0, 2, 1)
    assert "shape is (2, 4, 70)" in str(
        compare.check(TAILED, operands, {"lse": transposed}, solution=solution)
    )
    wide = results["out"].astype(np.float64)
    assert "dtype is float64" in str(
        compare.check(TAILED, operands, {"out": wide}, solution=solution)
    )
    with pytest.raises(ValueError, match="must be some of"):
        compare.check(TAILED, operands, {"output": results["out"]})
    with pytest.raises(ValueError, match="nothing"):
        compare.check(TAILED, operands, {})


def test_the_report_names_the_worst_element() -> None:
    operands, solution = compare.solved(TAILED)
    out = emulated(TAILED, operands)["out"].copy()
    out[1, 33, 2, 7] += 1.0
    with pytest.raises(
        AssertionError, match=r"case mutants .*\n.*out: error/bound .*\n.*\[1, 33, 2, 7\]: got"
    ):
        compare.assert_close(TAILED, operands, {"out": out}, solution=solution)


def test_one_broken_small_row_does_not_hide_behind_a_large_one() -> None:
    """The bound is per element: a value of 1e-3 that is off by 1e-3 fails beside values of 1e4."""
    case = TAILED.but("hiding")
    operands = inputs.make(case)
    v = operands.v.copy()
    v[0] *= 1e4
    v[1] *= 1e-3
    operands = dataclasses.replace(operands, v=v)
    out = emulated(case, operands)["out"].copy()
    out[1, 3, 1] *= 1.01
    assert broken(compare.check(case, operands, {"out": out})) == {"out"}


@pytest.mark.parametrize("case", cases.tagged("mask"), ids=str)
def test_poison_does_not_change_the_solution(case: Case) -> None:
    operands, solution = compare.solved(case)
    poisoned = inputs.poison(case, operands)
    q_padding, kv_padding = inputs.padding(case, operands)
    assert (
        np.isfinite(poisoned.q.astype(np.float64)).all(axis=(2, 3)).tolist()
        == (~q_padding).tolist()
    )
    assert (
        np.isfinite(poisoned.v.astype(np.float64)).all(axis=(2, 3)).tolist()
        == (~kv_padding).tolist()
    )
    again = oracle.solve(case, poisoned)
    for name in ("out", "lse", "dq", "dk", "dv", "dbias"):
        np.testing.assert_array_equal(getattr(again, name), getattr(solution, name))


def test_inputs_depend_on_the_name_alone() -> None:
    case = cases.named("mask-everything-bf16")
    first, second = inputs.make(case), inputs.make(case)
    other = inputs.make(dataclasses.replace(case, name="another"))
    np.testing.assert_array_equal(first.q, second.q)
    assert not np.array_equal(first.q, other.q)


def test_the_table_has_unique_names_and_every_distribution() -> None:
    assert len({case.name for case in cases.TABLE}) == len(cases.TABLE)
    assert {case.distribution for case in cases.sweep()} == set(cases.DISTRIBUTIONS)
    assert {case.dout_distribution for case in cases.sweep()} == set(cases.DOUT_DISTRIBUTIONS)
    lengths = cases.tagged("length")
    for length in cases.LENGTHS:
        assert any(case.q_len == length != case.kv_len for case in lengths)
        assert any(case.q_len != length == case.kv_len for case in lengths)
        assert any(case.q_len == length == case.kv_len for case in lengths)
    assert {case.q_len > case.kv_len for case in lengths if case.q_len != case.kv_len} == {
        True,
        False,
    }
    assert {case.head_dim for case in cases.tagged("head_dim")} == set(cases.HEAD_DIMS)
    with pytest.raises(LookupError, match="no case is tagged"):
        cases.tagged("mistyped")
