"""The polynomial of the softcap in the Hopper forward kernel, in float32 arithmetic, against float64."""

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

HEADER = Path(__file__).parents[2] / "cc" / "kernels" / "sm90" / "cap_series.cuh"
LOG2E = 1.4426950408889634

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def header_numbers(name: str) -> list[float]:
    """The numbers that a constant of the header is made of."""
    found = re.search(rf"{name}(?:\[\])? = {{?([^;}}]*)}}?;", HEADER.read_text())
    assert found is not None
    return [float(number) for number in found[1].split(",")]


SERIES = {
    name: (header_numbers(name), header_numbers(f"{name}Limit")[0])
    for name in ("kCapSeries", "kShortCapSeries")
}


def fused(a: F32 | np.float32, b: F32, c: F32 | np.float32) -> F32:
    """a * b + c rounded once; float64 holds the product exactly."""
    return np.asarray(np.float64(a) * np.float64(b) + np.float64(c), np.float32)


def by_squares(s: F32, factors: list[float]) -> F32:
    """A series of three terms as the kernel has it, a square and a rest."""
    root = factors[2] ** 0.5
    shift = factors[1] / (2 * root)
    inner = fused(s * np.float32(root), s, np.full_like(s, shift))
    return s * fused(inner, inner, np.full_like(s, factors[0] - shift**2))


def by_series(s: F32, scale: float, softcap: float, coefficients: list[float]) -> F32:
    """Capped scores in units of log2 as the kernel computes them, without the shift of the exponent."""
    to_argument = scale / softcap
    factors = [
        float(np.float32(c * softcap * LOG2E * to_argument ** (2 * i + 1)))
        for i, c in enumerate(coefficients)
    ]
    if len(factors) == 3:
        return by_squares(s, factors)
    square = s * s
    slope = np.full_like(s, factors[-1])
    for factor in factors[-2::-1]:
        slope = fused(slope, square, np.float32(factor))
    return s * slope


def by_exponential(s: F32, scale: float, softcap: float) -> F32:
    """The same by an exponential and a reciprocal."""
    cap = np.float32(softcap * LOG2E)
    exponential = np.exp2(s * np.float32(np.float32(scale / softcap) * np.float32(2 * LOG2E)))
    return np.asarray(cap - np.float32(2) * cap / (exponential + np.float32(1)), np.float32)


def exactly(s: F32, scale: float, softcap: float) -> F64:
    """The same in float64."""
    return softcap * LOG2E * np.tanh(s.astype(np.float64) * (scale / softcap))


@pytest.mark.parametrize("softcap", [0.5, 5.0, 30.0, 50.0, 1000.0])
@pytest.mark.parametrize("scale", [0.01, 0.0884, 1.0, 20.0])
@pytest.mark.parametrize("series", SERIES)
def test_scores_are_as_exact_as_by_the_exponential(
    series: str, scale: float, softcap: float
) -> None:
    coefficients, limit_of_argument = SERIES[series]
    limit = limit_of_argument * softcap / scale
    s = np.linspace(-limit, limit, 200_001).astype(np.float32)
    want = exactly(s, scale, softcap)
    error = np.abs(by_series(s, scale, softcap, coefficients) - want).max()
    assert error < 2.0**-21 * softcap * LOG2E
    assert error < 2.5 * np.abs(by_exponential(s, scale, softcap) - want).max()


@pytest.mark.parametrize("bits", [8, 11], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("series", SERIES)
def test_probabilities_round_to_the_same_as_in_float64(bits: int, series: str) -> None:
    random = np.random.default_rng(bits)
    softcap, scale = 50.0, 128**-0.5
    coefficients, limit_of_argument = SERIES[series]
    limit = limit_of_argument * softcap / scale
    s = (random.standard_normal((64, 4096)) * limit / 5).clip(-limit, limit).astype(np.float32)
    capped, want = by_series(s, scale, softcap, coefficients), exactly(s, scale, softcap)
    shift = capped.max(axis=1, keepdims=True)
    p = np.exp2(np.float64(capped) - np.float64(shift))
    exact = np.exp2(want - want.max(axis=1, keepdims=True))
    assert np.abs(p / exact - 1).max() < 2.0**-bits / 16  # a small part of the spacing of rounded p


@pytest.mark.parametrize("softcap", [0.5, 30.0, 1000.0])
def test_backward_tanh_and_slope(softcap: float) -> None:
    """The backward scales the argument first, and has the slope of the cap from the same tanh."""
    coefficients, limit_of_argument = SERIES["kShortCapSeries"]
    scale = 128**-0.5
    limit = limit_of_argument * softcap / scale
    s = np.linspace(-limit, limit, 200_001).astype(np.float32)
    first, second, third = (np.float32(c) for c in coefficients)
    x = s * np.float32(scale / softcap)
    square = x * x
    inner = fused(third, square, np.full_like(x, second))
    t = x * fused(inner, square, np.full_like(x, first))
    want = np.tanh(s.astype(np.float64) * (scale / softcap))
    assert np.abs(t - want).max() < 2.0**-21
    slope = fused(-t, t, np.ones_like(t))
    assert np.abs(slope - (1 - want**2)).max() < 2.0**-20


@pytest.mark.parametrize("softcap", [25.5, 30.0, 50.0, 55.0])
def test_sums_prove_that_the_short_series_holds(softcap: float) -> None:
    """A score beyond the limit exceeds the bound by itself; 32 below the negative limit hardly change a sum of 1."""
    coefficients, limit = SERIES["kShortCapSeries"]
    x = np.linspace(0.0, 60.0, 2_000_001)

    def series(x: F64) -> F64:
        first, second, third = coefficients
        return x * (first + x**2 * (second + x**2 * third))

    assert np.all(np.diff(series(x)) > 0)
    at_limit = softcap * LOG2E * series(np.array([limit]))[0]
    assert at_limit >= header_numbers("kLeastTrustedLog2")[0]
    low = -x[x > limit]
    wrong = np.exp2(softcap * LOG2E * series(low)) - np.exp2(softcap * LOG2E * np.tanh(low))
    assert 32 * np.abs(wrong).max() < 2e-6
