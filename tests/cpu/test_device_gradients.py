"""The C++ text of the gradients of captures, compiled for the host, gives what JAX gives."""

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from program_cases import CASES, INDICES, Case, derivatives_by_elements, traced

from jattn.device_code import MAX_CAPTURES
from jattn.device_gradients import MAX_READS, can_sum, gradient_code, num_elements, offsets
from jattn.score_program import ScoreProgram, trace

pytestmark = pytest.mark.thinned  # most of their time goes into compiling

KERNELS = Path(__file__).parents[2] / "cc" / "kernels"
RUN = """
extern "C" void run{number}(int count, const float* scores, const int* indices, const void* const* captures,
                            int* reads, int* places, float* derivatives) {{
  using jattn::program{number}::ScoreProgram;
  constexpr int kReads = ScoreProgram::kReads;
  *reads = kReads;
  const void* own[{max_captures}];
  for (int i = 0; i < {max_captures}; ++i) own[i] = captures[i];
  for (int i = 0; i < count; ++i) {{
    const int* at = indices + 4 * i;
    int found[kReads];
    float by[kReads];
    ScoreProgram::reads(scores[i], at[0], at[1], at[2], at[3], own, found, by);
    for (int r = 0; r < kReads; ++r) places[kReads * i + r] = found[r], derivatives[kReads * i + r] = by[r];
  }}
}}
"""


def wanted(program: ScoreProgram) -> tuple[bool, ...]:
    return tuple(c.is_float for c in program.captures)


def code_of(program: ScoreProgram) -> str:
    return gradient_code(program, wanted(program), by_position=True, largest_index=2**30)


def has_gradients(case: Case) -> bool:
    program = traced(case)[0]
    return any(wanted(program)) and can_sum(program, wanted(program))


WITH_GRADIENTS = [case for case in CASES if has_gradients(case)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        pytest.skip("needs a host compiler: c++, g++, or the one that CXX names")
    parts = ['#include "attn/program_math.cuh"\n']
    for number, case in enumerate(WITH_GRADIENTS):
        text = code_of(traced(case)[0])
        parts.append(f"namespace jattn::program{number} {{\n{text}}}\n")
        parts.append(RUN.format(number=number, max_captures=MAX_CAPTURES))
    folder = tmp_path_factory.mktemp("gradients")
    source, built = folder / "gradients.cc", folder / "gradients.so"
    source.write_text("".join(parts))
    flags = "-std=c++20 -O1 -ffp-contract=off -Wall -Wextra -Werror -Wno-unused-parameter -fPIC -shared".split()
    subprocess.run([compiler, *flags, f"-I{KERNELS}", "-o", built, source], check=True)
    return ctypes.CDLL(str(built))


def sums(
    library: ctypes.CDLL, number: int, scores: npt.NDArray[np.float32], captures: Any, size: int
) -> npt.NDArray[np.float64]:
    """What each pair adds to the array of all gradients: (pairs, elements)."""
    kept = [np.ascontiguousarray(x) for x in captures]
    pointers = (ctypes.c_void_p * MAX_CAPTURES)(*(x.ctypes.data for x in kept))
    count = len(scores)
    places = np.full(MAX_READS * count, -1, np.int32)
    derivatives = np.full(MAX_READS * count, np.nan, np.float32)
    reads = ctypes.c_int()
    arrays = [x.ctypes.data_as(ctypes.c_void_p) for x in (scores, INDICES)]
    results = [x.ctypes.data_as(ctypes.c_void_p) for x in (places, derivatives)]
    run = getattr(library, f"run{number}")
    run(count, *arrays, pointers, ctypes.byref(reads), *results)
    assert 1 <= reads.value <= MAX_READS
    used = reads.value * count
    places, derivatives = places[:used].reshape(count, -1), derivatives[:used].reshape(count, -1)
    assert (places >= 0).all()
    assert (places < size).all()
    found = np.zeros((count, size))
    np.add.at(found, (np.arange(count)[:, None], places), derivatives)
    return found


@pytest.mark.whole
@pytest.mark.parametrize("number", range(len(WITH_GRADIENTS)), ids=[c.name for c in WITH_GRADIENTS])
def test_derivatives_by_elements(library: ctypes.CDLL, number: int) -> None:
    case = WITH_GRADIENTS[number]
    program, captures = traced(case)
    scores = np.random.default_rng(1).normal(scale=3, size=len(INDICES)).astype(np.float32)
    got = sums(library, number, scores, captures, num_elements(program, wanted(program)))
    want, unit = derivatives_by_elements(case, program, captures, scores)
    error = np.abs(got - want)
    assert (error <= 4 * max(case.ulps, 1) * unit).all(), (error / unit).max()
    assert (want != 0).any()


def test_cases_of_every_kind_have_gradients() -> None:
    assert len(WITH_GRADIENTS) >= 25
    without = [case.name for case in CASES if case not in WITH_GRADIENTS and not case.x64]
    floating = [c for c in CASES if c.name in without and any(wanted(traced(c)[0]))]
    # All that a kernel does not add up reads many elements for a pair, or none whose gradient is not 0.
    for case in floating:
        program = traced(case)[0]
        assert not can_sum(program, wanted(program)), case.name


TABLE = np.ones((4, 8), np.float32)
REACHES: list[tuple[str, Callable[..., Any]]] = [
    ("kHead", lambda s, b, h, q, k, x: s + x[h, b] * (q - k)),
    ("kQuery", lambda s, b, h, q, k, x: s + x[h, q % 8]),
    ("kKey", lambda s, b, h, q, k, x: jnp.where(q > k, s + x[b, k], s)),
    ("kPair", lambda s, b, h, q, k, x: s + x[h, abs(q - k)]),
    ("kPair", lambda s, b, h, q, k, x: s + x[h, jnp.clip(s, 0, 7).astype(jnp.int32)]),
]


@pytest.mark.parametrize(("reach", "score_mod"), REACHES)
def test_what_decides_about_a_place(reach: str, score_mod: Callable[..., Any]) -> None:
    text = code_of(trace(score_mod, (TABLE,), 2)[0])
    assert f"program::Reach table[] = {{program::Reach::{reach}}}" in text


def test_only_what_is_wanted_is_added_up() -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any, x: Any, ids: Any, y: Any) -> Any:
        return s * y[h] + x[ids[k], 0]

    program, _ = trace(score_mod, (TABLE, np.zeros(9, np.int32), TABLE[:, 0]), 2)
    assert offsets(program, (True, False, True)) == [0, 32, 32, 36]
    assert num_elements(program, (False, False, True)) == 4
    both, one = (
        gradient_code(program, flags, by_position=False, largest_index=64)
        for flags in ((True, False, True), (False, False, True))
    )
    assert "kReads = 2" in both
    assert "kReads = 1" in one
    assert "derivatives[0] = score;" in one


def test_what_is_read_behind_other_lengths() -> None:
    """Whether a kernel can add it up does not depend on the lengths; where nothing is read it adds 0."""

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any, x: Any) -> Any:
        return jnp.where(q < 200, s, s + x[0, q % 8])

    program, _ = trace(score_mod, (TABLE,), 2)
    assert can_sum(program, (True,))
    short, long = (
        gradient_code(program, (True,), by_position=False, largest_index=n) for n in (64, 1024)
    )
    assert "derivatives[0] = 0.0f;" in short
    assert "places[0] = 0;" in short
    assert "program::select(v0, 0.0f, 1.0f)" in long


def test_what_no_kernel_adds_up() -> None:
    def reading(count: int, s: Any, b: Any, h: Any, q: Any, k: Any, x: Any) -> Any:
        return s + sum(x[0, (k + i) % 8] for i in range(count))

    for count, expected in ((MAX_READS, True), (MAX_READS + 1, False)):
        program, _ = trace(functools.partial(reading, count), (TABLE,), 2)
        assert can_sum(program, (True,)) == expected
    with jax.enable_x64(True):
        program, _ = trace(lambda s, b, h, q, k, x: s + x[h, 0], (TABLE.astype(np.float64),), 2)
        assert not can_sum(program, (True,))
