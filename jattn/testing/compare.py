"""The comparison that all tests use: four checks of a result against the oracle.

1. Every element is within its own a-priori rounding-error bound (`bounds.py`).
2. The root mean square of the error is at most about twice that of textbook attention in the same precision
   (`baseline.py`).
3. Elements that are zero by construction are exactly zero: rows that see no key, keys that no row sees, gradients
   where the cotangent is zero.
4. Values are finite where the true value is, and NaN exactly where a visible NaN reaches.

There is no tolerance to choose. A result is judged as a whole, and a failure names the worst element of each tensor.
"""

import dataclasses
import functools

import numpy as np

from jattn.testing import baseline, inputs, oracle
from jattn.testing.bounds import bounds, unit_of, units
from jattn.testing.cases import Case
from jattn.testing.inputs import Array, Operands
from jattn.testing.oracle import Solution

# Check 2 compares two samples of rounding errors. With fewer visible pairs of query and key than this, or in a tensor
# of fewer elements, the baseline's own error may happen to be near 0 (a single pair: dP - delta rounds to 0 or not),
# so only the other checks judge. Of two samples of 32 equal errors one is twice the other in one of 10000 draws.
# Where a row sees one key and nothing else, P is 1 and dP - delta is the difference of two equal dot products: the
# baseline adds up both alike, a kernel need not. Pairs of such rows do not count for the gradients of scores.
FEWEST_PAIRS = 32
FEWEST_ELEMENTS = 32

CAPTURES = ("dcapture0", "dcapture1")
TENSORS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks", "dalibi_slopes", *CAPTURES)

# Products of dS = P * (dP - delta).
OF_SCORES = ("dq", "dk", "dbias")

# Gradients of few numbers: too few errors for a root mean square, so their bounds alone judge. These are those of sums
# over rows whose errors are independent.
PER_HEAD = ("dsinks", "dalibi_slopes", *CAPTURES)


@dataclasses.dataclass(frozen=True)
class TensorReport:
    """What the checks found in one tensor.

    `bound_ratio` is the largest |error| / bound, at `worst_index`; `rms_ratio` is the RMS error over its limit, or 0
    where there are too few pairs or elements to judge it. Both must be at most 1. `violations` are sentences about
    zeros, finiteness, shape and type.
    """

    name: str
    bound_ratio: float
    rms_ratio: float
    worst_index: tuple[int, ...] = ()
    worst: str = ""
    violations: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.bound_ratio <= 1.0 and self.rms_ratio <= 1.0 and not self.violations

    def __str__(self) -> str:
        lines = [f"{self.name}: error/bound {self.bound_ratio:.3g}, rms/limit {self.rms_ratio:.3g}"]
        if self.worst:
            lines.append(f"  worst element {list(self.worst_index)}: {self.worst}")
        lines += [f"  {violation}" for violation in self.violations]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Report:
    """The reports of all compared tensors of one case."""

    title: str
    tensors: tuple[TensorReport, ...]

    @property
    def passed(self) -> bool:
        return all(tensor.passed for tensor in self.tensors)

    def __str__(self) -> str:
        shown = [tensor for tensor in self.tensors if not tensor.passed] or list(self.tensors)
        return "\n".join([self.title, *(str(tensor) for tensor in shown)])


@functools.lru_cache(maxsize=4)
def solved(case: Case) -> tuple[Operands, Solution]:
    """The arrays of a case and their solution; kept, because every backend is compared with the same one."""
    operands = inputs.make(case)
    return operands, oracle.solve(case, operands)


def check(
    case: Case,
    operands: Operands,
    results: dict[str, Array],
    *,
    precision: str = "ieee",
    solution: Solution | None = None,
) -> Report:
    """Compares results with the oracle.

    `results` maps some of TENSORS to arrays in the public shapes and types: out, dq, dk, dv in the type of the case,
    dbias in that of the bias, dsinks and dalibi_slopes float32, lse (B, T, N) float32, or float64 for a float64 case.
    `operands` are those without poison; `precision` is "tf32" for a backend that declares to round float32 operands of
    products to tf32.

    Raises:
      ValueError: nothing to compare, or a tensor the oracle does not know.
    """
    unknown = set(results) - set(TENSORS)
    if unknown or not results:
        raise ValueError(f"results has {sorted(results) or 'nothing'}, must be some of {TENSORS}")
    if solution is None:
        solution = oracle.solve(case, operands)
    lse_dtype = str(results["lse"].dtype) if "lse" in results else "float32"
    unit = units(case.dtype, precision)
    limits = bounds(case, operands, solution, unit, lse_dtype)
    emulated = baseline.solve(case, operands, solution, precision)
    zeros = structural_zeros(case, operands, solution)
    seen = solution.visible.sum(axis=3)
    pulled = (seen > 1) | (solution.dlse != 0) | (operands.sinks is not None)
    pairs, pulled_pairs = int(seen.sum()), int(seen[pulled].sum())
    reports = []
    for name in TENSORS:
        if name in results:
            want = getattr(solution, name)
            report = _compare(
                name, results[name], want, limits[name], emulated[name], zeros.get(name), case
            )
            enough_pairs = (pulled_pairs if name in OF_SCORES else pairs) >= FEWEST_PAIRS
            enough_elements = want.size >= FEWEST_ELEMENTS
            judged = enough_pairs and enough_elements and name not in PER_HEAD
            reports.append(report if judged else dataclasses.replace(report, rms_ratio=0.0))
    return Report(
        f"case {case.name} (seed crc32 of the name; {case.dtype}, {precision})", tuple(reports)
    )


def assert_close(
    case: Case,
    operands: Operands,
    results: dict[str, Array],
    *,
    precision: str = "ieee",
    solution: Solution | None = None,
) -> Report:
    """Does `check` and raises AssertionError with the report unless everything passed."""
    report = check(case, operands, results, precision=precision, solution=solution)
    if not report.passed:
        raise AssertionError(str(report))
    return report


def structural_zeros(case: Case, operands: Operands, solution: Solution) -> dict[str, Array]:
    """Marks the elements that must be exactly zero, whatever the values."""
    weighted = solution.visible & ~np.isneginf(solution.s)
    kept = weighted & (solution.z > 0)
    dout_rows = (solution.dout != 0).any(axis=3)
    active = weighted & (dout_rows | (solution.dlse != 0))[..., None]
    moving = active & (case.scale_value != 0)
    group = case.group_size

    def rows(marks: Array) -> Array:
        return ~np.asarray(marks.any(axis=3)).transpose(0, 2, 1)[..., None]

    def keys(marks: Array) -> Array:
        seen = oracle.sum_groups(np.asarray(marks.any(axis=2)), group) > 0
        return ~seen.transpose(0, 2, 1)[..., None]

    zeros = {
        "out": rows(kept),
        "dq": rows(moving),
        "dk": keys(moving),
        "dv": keys(kept & dout_rows[..., None]),
    }
    if operands.sinks is not None:
        has_sink = ~np.isneginf(oracle.per_head(operands.sinks))
        pulled = np.asarray(active.any(axis=3, keepdims=True) & has_sink)
        zeros["dsinks"] = oracle.per_head_sum(pulled.astype(np.int64), operands.sinks.shape) == 0
    if operands.alibi_slopes is not None:
        pulled = active & (solution.distance != 0)
        shape = operands.alibi_slopes.shape
        zeros["dalibi_slopes"] = oracle.per_head_sum(pulled.astype(np.int64), shape) == 0
    if operands.bias is not None:
        zeros["dbias"] = oracle.reduce_to(active.astype(np.int64), operands.bias.shape) == 0
    return zeros


def _stored_dtype(case: Case, name: str) -> tuple[str, ...]:
    if name == "lse":
        return ("float64", "float32") if case.dtype == "float64" else ("float32",)
    if name in PER_HEAD:
        return ("float32",)
    return ((case.bias_dtype or case.dtype) if name == "dbias" else case.dtype,)


def _compare(
    name: str,
    got: Array,
    want: Array,
    bound: Array,
    emulated: Array,
    zeros: Array | None,
    case: Case,
) -> TensorReport:
    violations = []
    if str(got.dtype) not in _stored_dtype(case, name):
        violations.append(f"dtype is {got.dtype}, must be {' or '.join(_stored_dtype(case, name))}")
    if got.shape != want.shape:
        return TensorReport(
            name,
            np.inf,
            np.inf,
            violations=(*violations, f"shape is {got.shape}, must be {want.shape}"),
        )
    if got.size == 0:
        return TensorReport(name, 0.0, 0.0, violations=tuple(violations))
    real = want.dtype
    largest = 3.4e38 if str(got.dtype) == "bfloat16" else float(np.finfo(got.dtype).max)
    wide = got.astype(real)

    in_range = np.isfinite(want) & ~(
        np.abs(np.where(np.isfinite(want), want, 0)) + bound >= largest
    )
    violations += _complain("must be finite", in_range & ~np.isfinite(wide), wide, want)
    violations += _complain("must be NaN", np.isnan(want) & ~np.isnan(wide), wide, want)
    violations += _complain("must be -inf", np.isneginf(want) & ~np.isneginf(wide), wide, want)
    if zeros is not None:
        structural = np.broadcast_to(zeros, want.shape) & ~np.isnan(want)
        violations += _complain("must be exactly 0", structural & (wide != 0), wide, want)

    # A NaN in the bound comes from a visible NaN; what such a place must hold is checked above.
    comparable = in_range & np.isfinite(wide) & ~np.isnan(bound)
    bound = np.where(comparable, bound, 1)
    if not comparable.any():
        return TensorReport(name, 0.0, 0.0, violations=tuple(violations))
    error = np.where(
        comparable, np.abs(np.where(comparable, wide, 0) - np.where(comparable, want, 0)), 0
    )
    ratio = error / bound
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(ratio), ratio.shape))
    emulated_error = np.where(
        comparable, np.nan_to_num(emulated.astype(real) - np.where(comparable, want, 0)), 0
    )
    unit = (
        unit_of(str(got.dtype))
        if str(got.dtype) in _stored_dtype(case, name)
        else unit_of(case.dtype)
    )
    accumulate = 2.0**-53 if case.dtype == "float64" and str(got.dtype) == "float64" else 2.0**-24
    limit = (
        2.0 * _rms(emulated_error, comparable)
        + (4.0 * accumulate + unit / 4.0) * _rms(np.where(comparable, want, 0), comparable)
        + 0.005 * _rms(bound, comparable)
    )
    return TensorReport(
        name=name,
        bound_ratio=float(ratio[worst]),
        rms_ratio=float(_rms(error, comparable) / limit),
        worst_index=worst,
        worst=f"got {float(wide[worst]):.9g}, want {float(want[worst]):.9g}, bound {float(bound[worst]):.3g}",
        violations=tuple(violations),
    )


def _complain(rule: str, marks: Array, got: Array, want: Array) -> list[str]:
    """One sentence about the first element that breaks a rule, with how many there are."""
    count = int(marks.sum())
    if count == 0:
        return []
    first = tuple(int(i) for i in np.argwhere(marks)[0])
    return [
        f"{count} elements {rule}, first {list(first)}: got {float(got[first])}, want {float(want[first]):.9g}"
    ]


def _rms(array: Array, where: Array) -> float:
    return float(np.sqrt(np.mean(np.square(array), where=where)))
