"""Textbook attention in numpy float32 with the roundings of a data type: how accurate that type can be expected to be.

The systematic part of the comparison: worst-case bounds would let a kernel lose precision everywhere by a little, the
error of this baseline on the same inputs does not.
"""

from typing import Any

import numpy as np

from jattn.testing import inputs
from jattn.testing.cases import Case
from jattn.testing.inputs import Array, Operands
from jattn.testing.oracle import (
    Solution,
    change_scores,
    per_head,
    per_head_sum,
    reduce_to,
    softmax,
    sum_groups,
    sum_reads,
)


def round_to_tf32(array: Array) -> Array:
    """Rounds float32 to the 10 mantissa bits that a tf32 product reads, ties away from zero."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    finite = np.isfinite(array)
    rounded = ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(finite, rounded, array).astype(np.float32)


def _cut_to_tf32(array: Array) -> Array:
    """Drops the 13 bits that a tf32 product does not read."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def _three_products(a: Array, b: Array) -> Array:
    """a @ b as three tf32 products: each operand is a tf32 number and a rest, and rest @ rest is left out."""
    big_a, big_b = round_to_tf32(a), round_to_tf32(b)
    rest_a, rest_b = _cut_to_tf32(a - big_a), _cut_to_tf32(b - big_b)
    return np.asarray(rest_a @ big_b + big_a @ rest_b + big_a @ big_b)


def solve(
    case: Case, operands: Operands, solution: Solution, precision: str = "ieee"
) -> dict[str, Array]:
    """Computes out, lse and the gradients the textbook way in the precision of the case.

    P, dP, dS and the results are rounded to the type of the case, bias gradients to that of the bias; heads of a group
    are summed in the wide type. The visibility, what dropout keeps and the selection of padding are the oracle's: this
    baseline is about rounding only.
    """
    wide: Any = np.float64 if case.dtype == "float64" else np.float32
    dtype = inputs.numpy_dtype(case.dtype)
    tf32 = precision == "tf32" and case.dtype == "float32"
    product = _three_products if precision == "tf32x3" and case.dtype == "float32" else np.matmul

    def rounded(array: Array) -> Array:
        array = np.asarray(array, wide)
        return round_to_tf32(array) if tf32 else array.astype(dtype).astype(wide)

    def stored(array: Array) -> Array:
        return np.asarray(array, wide).astype(dtype)

    visible = solution.visible
    scale = wide(case.scale_value)
    q, k, v, dout = (rounded(x) for x in (solution.q, solution.k, solution.v, solution.dout))
    dlse = solution.dlse.astype(wide)
    kept = (solution.z > 0).astype(wide)
    factor = wide(np.max(solution.z, initial=0.0))
    with np.errstate(over="ignore", invalid="ignore"):
        s = scale * product(q, k.swapaxes(2, 3))
        slope = np.ones_like(s)
        if case.softcap is not None:
            of_cap = s / wide(case.softcap)
            # docs/conventions.md, "Rounding": what kernels compute of 16-bit inputs and ordinary caps.
            by_exponential = dtype.itemsize == 2 and case.softcap <= 128
            capped = 1 - 2 / (1 + np.exp(2 * of_cap)) if by_exponential else np.tanh(of_cap)
            s, slope = wide(case.softcap) * capped, 1 - capped * capped
        if operands.bias is not None:
            s = s + np.where(visible, operands.bias.astype(wide), 0)
        far = np.abs(solution.distance).astype(wide)
        if operands.alibi_slopes is not None:
            s = s - per_head(operands.alibi_slopes).astype(wide) * far
        changed = change_scores(case, operands, np.where(visible, s, 0).astype(wide))
        s = np.where(visible, changed.score.astype(wide), wide(-np.inf))
        live, p, _, lse = softmax(s, visible, operands.sinks)
        out = stored(factor * product(rounded(p * kept), v))
        # The residual format is part of the problem: backward has lse, rounded to the wide type, and not row_max and
        # row_sum. At |lse| = 25 that alone moves P by 12 units of float32.
        kept_lse = np.where(np.isneginf(lse), 0, lse).astype(wide)
        p = np.where(visible & live, np.exp(np.where(visible & live, s - kept_lse, 0)), 0)
        dp = np.where(visible, rounded(factor * kept * product(dout, v.swapaxes(2, 3))), 0)
        delta = (solution.dout.astype(wide) * out.astype(wide)).sum(axis=3, keepdims=True) - dlse[
            ..., None
        ]
        ds_wide = p * (dp - delta)
        ds_before = ds_wide * changed.slope.astype(wide)
        dx = rounded(ds_before * slope)
        group = case.group_size
        results = {
            "out": out.transpose(0, 2, 1, 3),
            "lse": lse[..., 0].transpose(0, 2, 1).astype(wide),
            "dq": stored(scale * product(dx, k)).transpose(0, 2, 1, 3),
            "dk": stored(sum_groups(scale * product(dx.swapaxes(2, 3), q), group)).transpose(
                0, 2, 1, 3
            ),
            "dv": stored(
                sum_groups(factor * product(rounded(p * kept).swapaxes(2, 3), dout), group)
            ).transpose(0, 2, 1, 3),
        }
        if operands.bias is not None:
            results["dbias"] = reduce_to(rounded(ds_before), operands.bias.shape).astype(
                operands.bias.dtype
            )
        if operands.sinks is not None:
            sink = per_head(operands.sinks).astype(wide)
            sink_p = np.where(live, np.exp(np.where(live, sink - kept_lse, 0)), 0)
            results["dsinks"] = per_head_sum(-sink_p * delta, operands.sinks.shape).astype(
                np.float32
            )
        if operands.alibi_slopes is not None:
            results["dalibi_slopes"] = per_head_sum(
                -ds_before * far, operands.alibi_slopes.shape
            ).astype(np.float32)
        for i, read in enumerate(changed.reads):
            if read is not None:
                terms = ds_wide * read.weight.astype(wide)
                total = sum_reads(read, terms, operands.captures[i].shape)
                results[f"dcapture{i}"] = total.astype(np.float32)
    return results
