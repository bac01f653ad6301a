"""The C++ text of score programs, compiled for the host, gives what JAX gives."""

import ctypes
import dataclasses
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax import lax
from program_cases import (
    CASES,
    FUNCTIONS,
    INDICES,
    assert_close,
    expected,
    of_function,
    scores_of_pairs,
    traced,
)

from jattn.device_code import MAX_CAPTURES, device_code, refusals
from jattn.score_program import ScoreProgram, trace

KERNELS = Path(__file__).parents[2] / "cc" / "kernels"
F32 = npt.NDArray[np.float32]


# ---- Compiled programs -----------------------------------------------------------------------------------------------

RUN = """
extern "C" void run{number}(int count, const float* scores, const int* indices, const void* const* captures,
                            float* values, float* second_values, float* slopes) {{
  const void* own[{max_captures}];
  for (int i = 0; i < {max_captures}; ++i) own[i] = captures[i];
  for (int i = 0; i < count; ++i) {{
    const int* at = indices + 4 * i;
    using jattn::program{number}::ScoreProgram;
    values[i] = ScoreProgram::score(scores[i], at[0], at[1], at[2], at[3], own);
    second_values[i] = ScoreProgram::score_and_slope(scores[i], at[0], at[1], at[2], at[3], own, slopes[i]);
  }}
}}
"""


class Results(NamedTuple):
    values: F32
    second_values: F32
    slopes: F32


class Programs:
    """Programs compiled into one library, by their numbers."""

    def __init__(self, programs: Sequence[ScoreProgram], folder: Path) -> None:
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
        if not compiler:
            pytest.skip("needs a host compiler: c++, g++, or the one that CXX names")
        parts = ['#include "attn/program_math.cuh"\n']
        for number, program in enumerate(programs):
            parts.append(f"namespace jattn::program{number} {{\n{device_code(program)}}}\n")
            parts.append(RUN.format(number=number, max_captures=MAX_CAPTURES))
        source, library = folder / "programs.cc", folder / "programs.so"
        source.write_text("".join(parts))
        # Products and sums are rounded each, as in the interpreter that the results are compared with.
        flags = "-std=c++20 -O1 -ffp-contract=off -Wall -Wextra -Werror -Wno-unused-parameter -fPIC -shared".split()
        subprocess.run([compiler, *flags, f"-I{KERNELS}", "-o", library, source], check=True)
        self._library = ctypes.CDLL(str(library))

    def run(
        self, number: int, scores: F32, indices: npt.NDArray[np.int32], captures: Sequence[Any]
    ) -> Results:
        """Values and slopes of all scores (count,) at indices (count, 4)."""
        kept = [guarded(np.asarray(x)) for x in captures]
        pointers = (ctypes.c_void_p * MAX_CAPTURES)(*(x.ctypes.data for x in kept))
        results = Results(*(np.empty_like(scores) for _ in range(3)))
        arguments = [x.ctypes.data_as(ctypes.c_void_p) for x in (scores, indices)]
        outputs = [x.ctypes.data_as(ctypes.c_void_p) for x in results]
        getattr(self._library, f"run{number}")(len(scores), *arguments, pointers, *outputs)
        return results


def guarded(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy between numbers that would be seen in a result: NaN, or many bits."""
    margin = 64
    whole = np.empty(x.size + 2 * margin, x.dtype)
    whole.view(np.uint8)[:] = 0xFF if x.dtype != bool else 1
    inner = whole[margin : margin + x.size]
    inner[:] = x.reshape(-1)
    return inner


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """Of all cases and, behind them, all functions."""
    listed = [traced(case)[0] for case in CASES] + [of_function(x) for x in FUNCTIONS]
    return Programs(listed, tmp_path_factory.mktemp("programs"))


# ---- Tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_values_and_slopes(programs: Programs, number: int) -> None:
    case = CASES[number]
    program, captures = traced(case)
    assert refusals(program) == []
    scores = scores_of_pairs()
    got = programs.run(number, scores, INDICES, captures)
    values, slopes = expected(case, program, captures, scores)
    assert_close(got.values, values, case.ulps)
    assert_close(got.second_values, got.values, 0)
    assert_close(got.slopes, slopes, 4 * case.ulps)


@pytest.mark.parametrize("number", range(len(FUNCTIONS)), ids=[x.name for x in FUNCTIONS])
def test_accuracy(programs: Programs, number: int) -> None:
    item = FUNCTIONS[number]
    scores = np.linspace(item.low, item.high, 100_001).astype(np.float32)
    indices = np.zeros((len(scores), 4), np.int32)
    got = programs.run(len(CASES) + number, scores, indices, []).values
    with np.errstate(all="ignore"):
        want = item.exact(scores.astype(np.float64))
        unit = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
    finite = np.isfinite(unit) & (np.abs(want) >= 2.0**-126)
    error = np.abs(got[finite] - want[finite]) / unit[finite]
    print(item.name, error.max(), scores[finite][np.argmax(error)])
    assert error.max() <= item.ulps


ORDINARY = np.float32([0, 1.2e-38, 0.5, 1 - 2**-24, 1, 1 + 2**-23, 2, 88, 89, 104, 127, 128, 150])
FAR = np.float32([5000, 1e5, 2**20, 2**24, 1e9, 1e10, 1e18, 1e19, 1e20, 1e30, 3.4e38, np.inf])


@pytest.mark.parametrize("number", range(len(FUNCTIONS)), ids=[x.name for x in FUNCTIONS])
def test_far_and_special_scores(programs: Programs, number: int) -> None:
    """Infinities and NaN are those of float64; 8 units in the last place, for numbers below 2^-126 too."""
    item = FUNCTIONS[number]
    scores = np.concatenate([ORDINARY, FAR, -ORDINARY, -FAR, np.float32([np.nan])])
    indices = np.zeros((len(scores), 4), np.int32)
    got = programs.run(len(CASES) + number, scores, indices, []).values.astype(np.float64)
    with np.errstate(all="ignore"):
        want = item.exact(scores.astype(np.float64)).astype(np.float32)
        error = np.abs(got - want)
        right = error <= np.maximum(2.0**-126, 8 * np.spacing(np.abs(want)))
    right |= (got == want) | (np.isnan(got) & np.isnan(want))
    if item.function in (jnp.sin, jnp.cos, jnp.tan):
        right |= (np.abs(scores) > 2**20) & (np.abs(got) <= 2)
    assert right.all(), (scores[~right], got[~right], want[~right])


def test_equal_programs_have_equal_code() -> None:
    for case in CASES:
        first, second = traced(case)[0], traced(case)[0]
        assert first == second
        assert device_code.__wrapped__(first) == device_code.__wrapped__(second)


def test_what_is_not_used_is_not_computed() -> None:
    program, _ = trace(lambda s, b, h, q, k, x: (jnp.exp(s) * x[k], s + 1)[1], (np.ones(3),), 1)
    code = device_code(program)
    assert "program::exp" not in code
    assert "captures[" not in code


def test_the_same_is_computed_once() -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any, x: Any) -> Any:
        return jnp.tanh(s + x[k]) * jnp.tanh(s + x[k])

    program, _ = trace(score_mod, (np.ones(3, np.float32),), 1)
    value, both = device_code(program).split("float score_and_slope(")
    for text in (value, both):
        assert text.count("tanh") == 1
        assert text.count("captures[0]") == 1


@pytest.mark.parametrize(
    ("read", "dtype", "expected"),
    [
        (lambda s, h, q, k, x: x[h, q, k], "float32", "prefetch<float>(captures[0], "),
        (lambda s, h, q, k, x: x.reshape(-1)[q - k + 2000], "float32", "prefetch<float>(captures"),
        (lambda s, h, q, k, x: x[h, q, k], "bfloat16", ""),  # 4 MiB
        (lambda s, h, q, k, x: x[h, 0, k], "float32", ""),
        (lambda s, h, q, k, x: x[h, q, (s + k).astype(int)], "float32", ""),
    ],
    ids=["pair", "distance", "small", "key", "score"],
)
def test_what_is_asked_for_ahead(read: Callable[..., Any], dtype: str, expected: str) -> None:
    """Of large captures, what differs from pair to pair and is known before the scores are."""
    array = jnp.zeros((2, 1024, 1024), dtype)
    program, _ = trace(lambda s, b, h, q, k, x: s + read(s, h, q, k, x), (array,), 1)
    code = device_code(program)
    assert ("kPrefetches = true" in code) == bool(expected)
    assert expected in code
    assert code.count("program::prefetch<") == bool(expected)


def test_a_local_a_line() -> None:
    code = device_code(
        trace(lambda s, b, h, q, k, x: 2 * s + x[h], (np.ones(4, np.float32),), 2)[0]
    )
    lines = [line.strip() for line in code.splitlines()]
    assert lines[: lines.index("}") + 1] == [
        "struct ScoreProgram {",
        "static constexpr bool kUnitSlope = false;",
        "static constexpr bool kPrefetches = false;",
        "",
        "// The score of one pair, in natural units.",
        "JATTN_PROGRAM_FUNCTION float score(",
        "float score, int batch, int head, int query, int key, const void* const (&captures)[16]) {",
        "const float v0 = 2.0f * score;",
        "const int v1 = program::min(head, 3);",
        "const float v2 = program::read<float>(captures[0], v1);",
        "const float v3 = v0 + v2;",
        "return v3;",
        "}",
    ]


ROWS = np.ones((4, 6), np.float32)
REFUSED = [
    ("PRIMITIVE", "lgamma", lambda s, b, h, q, k: lax.lgamma(s)),
    ("PRIMITIVE", "while", lambda s, b, h, q, k: s + lax.fori_loop(0, q, lambda i, x: x + i, 0)),
    (
        "PRIMITIVE",
        "while",
        lambda s, b, h, q, k: lax.while_loop(lambda x: x < k, lambda x: x + 1, s),
    ),
    (
        "PRIMITIVE",
        "random_bits",
        lambda s, b, h, q, k: s + jax.random.uniform(jax.random.fold_in(jax.random.key(0), q)),
    ),
    ("PRIMITIVE", "nextafter", lambda s, b, h, q, k: s + lax.nextafter(jnp.float32(q), 9.0)),
    ("CAPTURE_ACCESS", "reduce_sum", lambda s, b, h, q, k, x: s + jnp.sum(x[h])),
    ("CAPTURE_ACCESS", "reduce_max", lambda s, b, h, q, k, x: s - jnp.max(x[q])),
    ("CAPTURE_ACCESS", "dot_general", lambda s, b, h, q, k, x: s + x[q] @ x[k]),
    ("CAPTURE_ACCESS", "sort", lambda s, b, h, q, k, x: s + jnp.sort(x[q])[k]),
    ("CAPTURE_ACCESS", "argmax", lambda s, b, h, q, k, x: s + jnp.argmax(x[q])),
    ("CAPTURE_ACCESS", "cumsum", lambda s, b, h, q, k, x: s + jnp.cumsum(x[q])[k]),
    ("CAPTURE_ACCESS", "scatter", lambda s, b, h, q, k, x: s + x.at[q].set(2.0)[k, h]),
]


@pytest.mark.parametrize(("code", "name", "score_mod"), REFUSED, ids=[x[1] for x in REFUSED])
def test_refused(code: str, name: str, score_mod: Callable[..., Any]) -> None:
    captures = (ROWS,) if code == "CAPTURE_ACCESS" else ()
    found = refusals(trace(score_mod, captures, 2)[0])
    assert (code, name) in {(x[0], str(x[1]).split()[0]) for x in found}
    for _, actual, rule in found:
        assert actual
        assert "tanh" in rule or "elements of arrays" in rule or "types" in rule or "int8" in rule


def test_primitives_of_float64_are_few() -> None:
    with jax.enable_x64(True):
        program, _ = trace(lambda s, b, h, q, k, x: s + jnp.exp(x[k]), (np.ones(4),), 2)
        [(code, actual, rule)] = refusals(program)
    assert (code, actual) == ("PRIMITIVE", "exp of float64")
    assert rule.startswith("of float64 one of abs, add")


def test_the_slope_is_looked_at_too() -> None:
    @jax.custom_jvp
    def plain(x: jax.Array) -> jax.Array:
        return x * x

    plain.defjvp(lambda primals, tangents: (plain(*primals), lax.lgamma(primals[0]) * tangents[0]))
    program, _ = trace(lambda s, b, h, q, k: plain(s), (), 2)
    assert [x[:2] for x in refusals(program)] == [("PRIMITIVE", "lgamma")]
    shifted, _ = trace(lambda s, b, h, q, k: s + lax.stop_gradient(plain(jnp.float32(q))), (), 2)
    assert refusals(shifted) == []


def test_captures_are_counted() -> None:
    captures = (np.ones(3, np.float32),) * (MAX_CAPTURES + 1)
    program, _ = trace(lambda s, b, h, q, k, *x: s + sum(y[k] for y in x), captures, 2)
    assert refusals(program) == [("CAPTURES", 17, "at most 16")]


def test_captures_without_elements() -> None:
    program, _ = trace(lambda s, b, h, q, k, x: s + x[q].sum(), (np.ones((3, 0), np.float32),), 2)
    assert ("CAPTURE_ACCESS", "float32[3, 0]", "an array with elements") in refusals(program)


def test_captures_of_other_types() -> None:
    captures = (jnp.ones(3, jnp.float8_e4m3fn), np.ones(3, np.complex64))
    program, _ = trace(
        lambda s, b, h, q, k, x, y: s + x[q].astype(s.dtype) + y[k].real, captures, 2
    )
    found = [x[:2] for x in refusals(program)]
    assert found[0] == ("CAPTURE_ACCESS", "float8_e4m3fn[3]")
    assert ("PRIMITIVE", "complex") in found  # of the two parts, which are captures of float32


def with_constants(table: F32) -> ScoreProgram:
    """A program that reads an array which is part of it, as calls may have them."""

    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + jax.jit(lambda i: jnp.asarray(table)[i])(q - k)

    examples = [jax.ShapeDtypeStruct((), x) for x in (jnp.float32, *[jnp.int32] * 4)]
    jaxpr = jax.make_jaxpr(score_mod)(*examples)
    plain, _ = trace(lambda s, b, h, q, k: s, (), 2)
    return dataclasses.replace(plain, text=str(jaxpr), jaxpr=jaxpr)


def test_constants_are_a_table(tmp_path: Path) -> None:
    table = np.asarray([0.1, np.inf, -np.inf, np.nan, 1e-40, 3e38, -7], np.float32)
    program = with_constants(table)
    assert refusals(program) == []
    assert "static constexpr float kTable0[7] = {" in device_code(program)
    scores = scores_of_pairs()
    got = Programs([program], tmp_path).run(0, scores, INDICES, []).values
    distance = INDICES[:, 2] - INDICES[:, 3]
    with np.errstate(invalid="ignore"):
        want = scores + table[np.clip(distance + 7 * (distance < 0), 0, 6)]
    assert_close(got, want, 0)


def test_large_constants_are_captures() -> None:
    [(code, actual, rule)] = refusals(with_constants(np.ones(1025, np.float32)))
    assert (code, actual) == ("CAPTURE_ACCESS", "a constant float32[1025]")
    assert rule == "at most 1024 elements, or one of the captures"


def test_what_grows_without_end() -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any, x: Any) -> Any:
        row = x[q]
        for i in range(40):
            row = row[::-1] + jnp.roll(row, i + 1)
        return s + row[k]

    program, _ = trace(score_mod, (np.ones((2, 9), np.float32),), 2)
    [(code, actual, _)] = refusals(program)
    assert (code, actual) == ("CAPTURE_ACCESS", "over 4096 steps")
