"""How far a correct implementation may be from the oracle, element by element.

A-priori rounding-error bounds of attention: every term is a rounding that an implementation may do, times how much it
moves the result. Letters follow the error analysis: u_in rounds P and dS before the second product, u_out rounds a
result, u_acc accumulates, u_qk rounds the operands of the products (tf32 and tf32x3 only).
"""

import dataclasses
import math

import numpy as np

from jattn.testing.cases import Case
from jattn.testing.inputs import Array, Operands
from jattn.testing.oracle import Solution, per_head, per_head_sum, reduce_to, sum_groups, sum_reads
from jattn.testing.score_functions import SCORE_FUNCTIONS, Read

# exp underflows below this in float32: a weight smaller than that may be lost whole.
UNDERFLOW = 1e-30
# e^(2 delta) beyond e^80 says nothing any more, and would overflow.
_LARGEST_EXPONENT = 80.0
# Errors of rows are independent and have mean 0: that of a sum over rows is bounded by the root of the sum of the
# squares of their bounds, times this, or by the sum of these, whichever is less. Of whole rows less will do: what
# rounds their pairs is independent, too. Textbook attention was measured at 0.1 of both. Of errors that are spread
# evenly within their bounds c, a sum is beyond INDEPENDENT times the root of the sum of c^2 once in 10^10: they vary by
# c^2 / 3, and Hoeffding's inequality gives 2 exp(-4^2 * 3 / 2).
INDEPENDENT = 4.0
WHOLE_ROWS = 2.0
# What errors have in common, as of sums that the matrix unit cuts off, adds up over any number of rows: this part of it
# is allowed besides.
IN_COMMON = 0.01


@dataclasses.dataclass(frozen=True)
class Units:
    """Relative rounding units, and the absolute ones (a_in, a_out) of types with a narrow exponent."""

    u_in: float
    u_out: float
    u_acc: float
    u_qk: float = 0.0
    a_in: float = 0.0
    a_out: float = 0.0

    def acc(self, count: int) -> float:
        """The error of a sum of `count` products, relative to the sum of magnitudes: a random walk of roundings."""
        return self.u_acc * (4.0 + 2.0 * math.sqrt(count))


# How float32 products may be computed -> (u_qk, u_in): "ieee"; "tf32", operands rounded to 11 bits; "tf32x3", operands
# cut in a tf32 number and a rest of which the unit reads 11 bits, and all products but rest * rest summed.
PRECISIONS = {"ieee": (0.0, 2.0**-24), "tf32": (2.0**-11, 2.0**-11), "tf32x3": (2.0**-21, 2.0**-21)}


def units(dtype: str, precision: str = "ieee") -> Units:
    """The units of a data type; `precision` is what a backend declares about its float32 products.

    Raises:
      ValueError: an unknown precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}, must be one of {', '.join(PRECISIONS)}")
    if dtype == "float32":
        u_qk, u_in = PRECISIONS[precision]
        return Units(u_in=u_in, u_out=2.0**-24, u_acc=2.0**-24, u_qk=u_qk)
    return {
        "bfloat16": Units(u_in=2.0**-8, u_out=2.0**-8, u_acc=2.0**-24),
        "float16": Units(
            u_in=2.0**-11, u_out=2.0**-11, u_acc=2.0**-24, a_in=2.0**-25, a_out=2.0**-24
        ),
        "float64": Units(u_in=2.0**-53, u_out=2.0**-53, u_acc=2.0**-53),
    }[dtype]


def unit_of(dtype: str) -> float:
    """The relative rounding unit of a stored type."""
    return {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}[
        dtype
    ]


def bounds(
    case: Case, operands: Operands, solution: Solution, unit: Units, lse_dtype: str
) -> dict[str, Array]:
    """Bounds |error| of out, lse and the gradients that the case has; shapes as in the solution."""
    scale = abs(case.scale_value)
    group = case.group_size
    visible, p, z = solution.visible, solution.p, solution.z
    abs_q, abs_k, abs_v, abs_dout = (
        np.abs(_finite(x)) for x in (solution.q, solution.k, solution.v, solution.dout)
    )
    abs_ds, abs_dx = np.abs(_finite(solution.ds)), np.abs(_finite(solution.dx))
    acc_s, acc_t = unit.acc(case.kv_len), unit.acc(case.q_len * group)
    drop = _dropout_error(case, unit)

    s_error = _score_error(case, operands, solution, unit)
    rho = _weight_error(s_error, unit)

    p = _finite(p)
    seen = visible.astype(p.dtype)
    zp, z_seen = z * p, z * seen
    out = (rho + unit.u_qk + acc_s + drop) * (zp @ abs_v) + unit.a_in * (z_seen @ abs_v)
    out = out.transpose(0, 2, 1, 3) + unit.u_out * np.abs(solution.out) + unit.a_out

    dv = ((rho + unit.u_qk + acc_t + drop) * zp).swapaxes(2, 3) @ abs_dout + unit.a_in * (
        z_seen.swapaxes(2, 3) @ abs_dout
    )
    dv = _grouped(dv, group) + 2 * unit.u_out * np.abs(solution.dv) + unit.a_out

    delta_error, ds_error = _ds_error(case, solution, unit, s_error)
    before_error = _before_error(case, operands, solution, unit, ds_error)
    abs_before = np.abs(_finite(solution.ds_before))
    dx_error = _dx_error(case, solution, unit, s_error, before_error)

    dq = scale * ((dx_error + (unit.u_qk + acc_s) * abs_dx) @ abs_k)
    dq = dq.transpose(0, 2, 1, 3) + 2 * unit.u_out * np.abs(solution.dq) + unit.a_out
    dk = scale * ((dx_error + (unit.u_qk + acc_t) * abs_dx).swapaxes(2, 3) @ abs_q)
    dk = _grouped(dk, group) + 2 * unit.u_out * np.abs(solution.dk) + unit.a_out
    lse = (
        s_error[..., 0].transpose(0, 2, 1)
        + 16 * unit.u_acc
        + _lse_rounding(solution.lse, lse_dtype)
    )
    found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    if solution.dbias is not None:
        u_bias = unit_of(case.bias_dtype or case.dtype)
        of_pairs = before_error + u_bias * abs_before
        found["dbias"] = (
            _sum_of_rows(of_pairs, solution.dbias.shape)
            + 2 * u_bias * np.abs(solution.dbias)
            + (2.0**-24 if (case.bias_dtype or case.dtype) == "float16" else 0.0)
        )
    # Sinks and slopes: their gradients are sums in float32, or float64, of terms that nothing rounds further.
    if solution.dsinks is not None:
        shape, sink_p, abs_delta = (
            solution.dsinks.shape,
            solution.sink_p,
            np.abs(_finite(solution.delta)),
        )
        rho_sink = _weight_error(s_error, unit) - unit.u_in
        found["dsinks"] = _sum_of_rows(
            sink_p * (delta_error + rho_sink * abs_delta), (*shape, 1, 1)
        ).reshape(shape) + per_head_sum((acc_t + 2.0**-23) * sink_p * abs_delta, shape)
    if solution.dalibi_slopes is not None:
        shape, distance = solution.dalibi_slopes.shape, np.abs(solution.distance)
        found["dalibi_slopes"] = _sum_of_weighted_rows(
            case, operands, solution, unit, distance, (*shape, 1, 1)
        ).reshape(shape) + per_head_sum((acc_s + acc_t + 2.0**-23) * abs_before * distance, shape)
    # What score functions read gets sums in float32, too; where the weight is the score, it is off as that is.
    error_before = _error_before(case, operands, solution, unit)
    pairs = case.batch * case.num_heads * case.q_len * case.kv_len
    count = units("float32").acc(pairs)
    for i, read in enumerate(solution.reads):
        if read is not None:
            weight = np.abs(_finite(read.weight))
            terms = np.asarray(weight * ds_error + abs_ds * error_before, np.float64)
            sums = np.asarray((count + 2.0**-22) * weight * abs_ds, np.float64)
            shape = operands.captures[i].shape
            found[f"dcapture{i}"] = _reads_of_rows(read, terms, shape) + sum_reads(
                read, sums, shape
            )
    return {name: bound + UNDERFLOW for name, bound in found.items()}


def _dropout_error(case: Case, unit: Units) -> float:
    """Of rounding 1 / (1 - r) and multiplying by it."""
    return 2 * unit.u_acc if case.dropout_rate else 0.0


def _weight_error(s_error: Array, unit: Units) -> Array:
    """rho of the analysis, (B, N, T, 1): by how much of itself a weight may be off."""
    exponent = np.minimum(2 * s_error, _LARGEST_EXPONENT)
    return np.asarray(np.expm1(exponent) + 8 * unit.u_acc + unit.u_in)


def _ds_error(case: Case, solution: Solution, unit: Units, s_error: Array) -> tuple[Array, Array]:
    """By how much delta (B, N, T, 1) and the gradients of the scores (B, N, T, S) may be off."""
    p, rho, acc_s = _finite(solution.p), _weight_error(s_error, unit), unit.acc(case.kv_len)
    seen, abs_dp = solution.visible.astype(p.dtype), np.abs(_finite(solution.dp))
    abs_v, abs_dout = (np.abs(_finite(x)) for x in (solution.v, solution.dout))
    dp_products = np.where(solution.visible, solution.z * (abs_dout @ abs_v.swapaxes(2, 3)), 0)
    of_products = 2 * unit.u_qk + unit.acc(case.head_dim_v) + _dropout_error(case, unit)
    dp_error = of_products * dp_products + unit.u_in * abs_dp + unit.a_in * seen
    abs_out = np.abs(_finite(solution.out)).transpose(0, 2, 1, 3)
    dout_out = (abs_dout * abs_out).sum(axis=3, keepdims=True)
    delta_error = (
        (p * (dp_error + rho * abs_dp)).sum(axis=3, keepdims=True)
        + unit.a_in * (seen * abs_dp).sum(axis=3, keepdims=True)
        + unit.u_out * dout_out
        # The same rounding of out where it is a subnormal float16: its error is absolute.
        + unit.a_out * abs_dout.sum(axis=3, keepdims=True)
        + acc_s * (p * abs_dp).sum(axis=3, keepdims=True)
        # The rounding of delta = rowsum(dout * out) - dlse, which cancels when the two are alike.
        + unit.u_acc * (dout_out + np.abs(solution.dlse)[..., None])
    )
    abs_ds = np.abs(_finite(solution.ds))
    ds_error = p * (dp_error + delta_error) + (rho + unit.u_in) * abs_ds + unit.a_in * seen
    return delta_error, ds_error


def _roundings(solution: Solution, unit: Units) -> tuple[Array, Array]:
    """Bounds what single roundings make of ds = p (dp - delta): of dp and ds (B, N, T, S), and of delta (B, N, T, 1).

    Of each the root of the sum of their squares, as all of them are independent. Those of delta, which is the product
    of dout and out, are of the elements of out, and of the weights that these are sums of; or of dp, if it is that of p
    and dp.
    """
    p, dp, ds = (np.abs(_finite(x)) for x in (solution.p, solution.dp, solution.ds))
    seen = solution.visible.astype(p.dtype)
    of_dp = p * (unit.u_in * dp + unit.a_in * seen)
    of_p = (unit.u_in * p + unit.a_in * seen) * dp
    of_ds = unit.u_in * ds + unit.a_in * seen
    out, dout = np.abs(_finite(solution.out)).transpose(0, 2, 1, 3), np.abs(_finite(solution.dout))
    of_out = (unit.u_out * out + unit.a_out) * dout
    of_delta = (of_dp**2 + of_p**2).sum(axis=3) + (of_out**2).sum(axis=3)
    return np.hypot(of_dp, of_ds), np.sqrt(of_delta)[..., None]


def _score_error(case: Case, operands: Operands, solution: Solution, unit: Units) -> Array:
    """delta_s of the analysis, (B, N, T, 1): by how much a row's scores may be off."""
    before = _error_before(case, operands, solution, unit)
    if case.score_mod is None:
        return before
    steepest = np.maximum(1, _row_max(np.abs(solution.score_slope)))
    change = np.where(np.isfinite(solution.s), solution.s - solution.s_before, 0)
    magnitude = _row_max(np.abs(_finite(solution.s))) + _row_max(np.abs(change))
    return np.asarray(steepest * before + 4 * unit.u_acc * magnitude)


def _before_error(
    case: Case, operands: Operands, solution: Solution, unit: Units, ds_error: Array
) -> Array:
    """By how much the gradients of the scores before the score function may be off."""
    if case.score_mod is None:
        return ds_error
    slope, abs_ds = np.abs(solution.score_slope), np.abs(_finite(solution.ds))
    curvature = SCORE_FUNCTIONS[case.score_mod].curvature
    slope_error = curvature * _error_before(case, operands, solution, unit) + 8 * unit.u_acc
    rounding = unit.a_in * solution.visible
    return np.asarray(ds_error * (slope + slope_error) + abs_ds * slope_error + rounding)


def _error_before(case: Case, operands: Operands, solution: Solution, unit: Units) -> Array:
    """By how much a row's scores may be off before the score function, (B, N, T, 1)."""
    abs_q, abs_k = np.abs(_finite(solution.q)), np.abs(_finite(solution.k))
    visible, scale = solution.visible, abs(case.scale_value)
    products = np.where(visible, scale * (abs_q @ abs_k.swapaxes(2, 3)), 0)
    s = solution.s_before
    finite_s = np.where(visible & np.isfinite(s), s, 0)
    largest_bias = np.where(visible & np.isfinite(s), np.abs(s - _finite(solution.s_capped)), 0)
    magnitude = _row_max(np.abs(finite_s)) + _row_max(_finite(largest_bias)) + 1
    if case.softcap is not None:
        # softcap * tanh(x) from one exponential, 1 - 2 / (1 + e^2x), carries an absolute error of a unit of softcap.
        magnitude = magnitude + case.softcap
    if operands.sinks is not None:
        magnitude = magnitude + np.abs(_finite(per_head(operands.sinks).astype(np.float64)))
    acc_d = unit.acc(case.head_dim)
    return np.asarray((2 * unit.u_qk + acc_d) * _row_max(products) + 4 * unit.u_acc * magnitude)


def _dx_error(
    case: Case, solution: Solution, unit: Units, s_error: Array, before_error: Array
) -> Array:
    """By how much the gradients of the products may be off, of those of the scores and the slope of the softcap."""
    if case.softcap is None:
        return before_error
    # dx = ds * (1 - tanh^2): the slope is off by 2 tanh times the error of the capped score, plus a few roundings.
    visible, abs_ds = solution.visible, np.abs(_finite(solution.ds_before))
    ratio = np.where(visible, np.abs(_finite(solution.s_capped)) / case.softcap, 0)
    slope_error = 2 * ratio * s_error / case.softcap + 8 * unit.u_acc
    kept_slope = np.where(visible, 1 - ratio**2 + slope_error, 0)
    # What is rounded before the second product is dx: where that is a subnormal float16, its error is absolute.
    return np.asarray(before_error * kept_slope + abs_ds * slope_error + unit.a_in * visible)


def _lse_rounding(lse: Array, lse_dtype: str) -> Array:
    return unit_of(lse_dtype) * np.abs(np.where(np.isneginf(lse), 0, lse))


def _finite(array: Array) -> Array:
    return np.where(np.isfinite(array), array, 0)


def _row_max(array: Array) -> Array:
    return np.asarray(np.max(array, axis=3, initial=0.0, keepdims=True))


def _sum_of_rows(errors: Array, shape: tuple[int, ...]) -> Array:
    """Bounds the error of sums (B, N, T, S) -> `shape` from bounds of what is added up."""
    factor = INDEPENDENT
    if shape[-1] == 1:
        errors, factor = errors.sum(axis=3, keepdims=True), WHOLE_ROWS
    sums, squares = reduce_to(errors, shape), reduce_to(np.square(errors), shape)
    return np.minimum(sums, factor * np.sqrt(squares) + IN_COMMON * sums)


def _sum_of_weighted_rows(
    case: Case,
    operands: Operands,
    solution: Solution,
    unit: Units,
    weight: Array,
    shape: tuple[int, ...],
) -> Array:
    """Bounds the error of sums of whole rows, of ds_before times weights (B, 1, T, S) that are not negative.

    `_sum_of_rows` takes the worst of each row. But a row of 16 bits is off by roundings that are independent of each
    other; the worst is left for what float32 does.
    """
    s_error = _score_error(case, operands, solution, unit)

    def weighted(unit: Units) -> Array:
        _, ds_error = _ds_error(case, solution, unit, s_error)
        return weight * _before_error(case, operands, solution, unit, ds_error)

    worst = weighted(unit)
    of_float32 = weighted(dataclasses.replace(unit, u_in=0.0, u_out=0.0, a_in=0.0, a_out=0.0))
    of_pairs, of_delta = _roundings(solution, unit)
    moved = weight * np.abs(solution.score_slope)
    squares = ((moved * of_pairs) ** 2).sum(axis=3, keepdims=True)
    squares += ((moved * _finite(solution.p)).sum(axis=3, keepdims=True) * of_delta) ** 2
    rows = of_float32.sum(axis=3, keepdims=True)
    apart = (
        WHOLE_ROWS * np.sqrt(reduce_to(rows**2, shape))
        + INDEPENDENT * np.sqrt(reduce_to(squares, shape))
        + IN_COMMON * reduce_to(worst, shape)
    )
    return np.minimum(_sum_of_rows(worst, shape), apart)


def _reads_of_rows(read: Read, errors: Array, shape: tuple[int, ...]) -> Array:
    """`_sum_of_rows` for what pairs (B, N, T, S) give to the elements of a capture that they read."""
    if not read.element:
        return _sum_of_rows(errors, (1, 1, 1, 1)).reshape(shape)
    element = np.broadcast_to(np.ravel_multi_index(read.element, shape), errors.shape)
    order = np.argsort(element, axis=3, kind="stable")
    element, errors = (np.take_along_axis(x, order, axis=3) for x in (element, errors))
    # The pairs of a row that read one element are neighbours now.
    is_first = np.concatenate(
        [np.ones_like(element[..., :1], bool), element[..., 1:] != element[..., :-1]], axis=3
    )
    of_rows = np.add.reduceat(errors.ravel(), np.flatnonzero(is_first))
    sums, squares = (
        np.bincount(element[is_first], x, math.prod(shape)).reshape(shape)
        for x in (of_rows, np.square(of_rows))
    )
    return np.minimum(sums, INDEPENDENT * np.sqrt(squares) + IN_COMMON * sums)


def _grouped(array: Array, group: int) -> Array:
    return sum_groups(array, group).transpose(0, 2, 1, 3)
