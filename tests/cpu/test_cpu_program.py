"""Score functions on the CPU kernel, whose interpreter exists once for each instruction set: all operations against
JAX, and functions beside every other feature.
"""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from instruction_sets import on_every_set
from program_cases import (
    CASES,
    FUNCTIONS,
    KEYS,
    SIZES,
    Case,
    assert_close,
    expected,
    scores_of_pairs,
    traced,
)
from score_mods import forms

import jattn
from jattn import cpu_program, ffi
from jattn.masks import Band
from jattn.score_program import Capture, trace
from jattn.spec import Operands, Spec
from jattn.testing import cases, compare
from jattn.testing.run import compile_case

pytestmark = pytest.mark.thinned  # most of their time goes into compiling

Array = Any


def log_sum_exp(score_mod: Any, captures: Any, q: Array, k: Array, mask: Array) -> Array:
    """Of a row that sees one key: the new score of that pair, whose score is the product of the two elements."""
    _, lse = jattn.dot_product_attention(
        q,
        k,
        k,
        mask=mask,
        scale=1.0,
        score_mod=score_mod,
        captures=captures,
        return_lse=True,
        implementation="cpu",
    )
    return lse


def instructions(case: Case) -> set[str]:
    program, _ = traced(case)
    texts = (
        cpu_program.cpu_program(program, by_position=False, slope=slope) for slope in (False, True)
    )
    return set(re.findall(r"[a-z_]\w*\.[\w.]+", " ".join(texts)))


WITH_ALL_INSTRUCTIONS = covering.chosen(CASES, instructions)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.whole] * (case in WITH_ALL_INSTRUCTIONS))
        for case in CASES
    ],
    ids=lambda case: case.name,
)
def test_values_and_slopes(case: Case) -> None:
    """The same programs as on GPUs, a key at a time: log-sum-exp is the new score, and the gradient of q its slope."""
    program, captures = traced(case)
    assert cpu_program.refusals(program) == []
    scores = scores_of_pairs()
    values, slopes = expected(case, program, captures, scores)
    batch, heads, _, keys = SIZES
    k = jnp.ones((batch, keys, heads, 1))

    def run(q: Array, mask: Array) -> Array:
        lse, pull = jax.vjp(lambda q: log_sum_exp(case.score_mod, case.captures, q, k, mask), q)
        return lse, pull(jnp.ones_like(lse))[0][..., 0]

    with jax.enable_x64(case.x64):
        compiled = jax.jit(run)
        for key in range(KEYS):
            of_key = [x.reshape(SIZES)[..., key].swapaxes(1, 2) for x in (scores, values, slopes)]
            finite = np.isfinite(of_key[0])
            q = jnp.asarray(np.where(finite, of_key[0], 0)[..., None])
            mask = jnp.arange(keys) == key
            for name, (got, dq) in on_every_set(lambda q=q, mask=mask: compiled(q, mask)):
                known = finite & (of_key[1] < np.inf)
                assert_close(got[known], of_key[1][known], case.ulps)
                weighted = known & np.isfinite(of_key[1]) & np.isfinite(of_key[2])
                assert_close(dq[weighted], of_key[2][weighted], 4 * case.ulps)
                hidden = finite & (of_key[1] == -np.inf)
                assert not dq[hidden].any(), name


@pytest.mark.whole
@pytest.mark.parametrize("item", FUNCTIONS, ids=lambda item: item.name)
def test_accuracy(item: Any) -> None:
    scores = np.linspace(item.low, item.high, 100_001).astype(np.float32)
    with np.errstate(all="ignore"):
        want = item.exact(scores.astype(np.float64))
        unit = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
    finite = np.isfinite(unit) & (np.abs(want) >= 2.0**-126)
    q, k = jnp.asarray(scores).reshape(1, -1, 1, 1), jnp.ones((1, 1, 1, 1))
    run = jax.jit(
        lambda q: log_sum_exp(lambda s, *_: item.function(s), (), q, k, jnp.ones(1, bool))
    )
    for name, lse in on_every_set(lambda: run(q)):
        error = np.abs(lse.reshape(-1)[finite] - want[finite]) / unit[finite]
        assert error.max() <= item.ulps, name


# ---- Beside other features -------------------------------------------------------------------------------------------

BASE = cases.Case("score-mod", q_len=75, kv_len=90, num_heads=4, num_kv_heads=2)
FORMS: dict[str, dict[str, Any]] = forms(BASE) | {
    "wide": {"head_dim": 128, "head_dim_v": 96},
    "few queries": {"q_len": 3, "kv_len": 1100},
    "one query": {"q_len": 1, "kv_len": 300, "kv_lengths": (300, 1)},
    "short": {"batch": 6, "q_len": 17, "kv_len": 23},
    "packed heads": {"q_len": 5, "kv_len": 200, "num_heads": 8, "num_kv_heads": 1},
}
DTYPES = ("float32", "bfloat16", "float16", "float64")


def beside_features() -> Iterator[cases.Case]:
    """Each form with a function that has slopes, with one that hides, and one that reads floats; types take turns."""
    for i, (form, changes) in enumerate(FORMS.items()):
        for j, name in enumerate(("cap", "prefix", ("table", "gain")[i % 2])):
            # There is no tanh of float64.
            dtype = DTYPES[i % 3] if name == "cap" else DTYPES[(i + 2 * j) % 4]
            yield BASE.but(f"{name}-{form}-{dtype}", score_mod=name, dtype=dtype, **changes)


@pytest.mark.parametrize("case", list(beside_features()), ids=str)
def test_beside_other_features(case: cases.Case) -> None:
    given, solution = compare.solved(case)
    call, text = compile_case(case, given, "cpu")
    assert ("gradients = " in text) == (case.score_mod in ("table", "gain"))
    for name, results in on_every_set(call):
        named = {key: np.asarray(x) for key, x in results.items()}
        try:
            compare.assert_close(case, given, named, solution=solution)
        except AssertionError as error:
            raise AssertionError(f"instruction set {name}: {error}") from error


def test_hidden_pairs_have_no_gradient_whatever_their_slope() -> None:
    """A slope of NaN or infinity, at a pair that the function hides, that a mask hides, or of a row without keys."""
    q, k, v = (jnp.asarray(x) for x in np.random.default_rng(3).normal(size=(3, 1, 70, 2, 8)))
    visible = jnp.arange(70) != 5

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        steep = jnp.sqrt(
            jnp.where((k == 9) | (q == 3), 0.0, 4.0) * s * 0
        )  # its slope is infinity or NaN
        return jnp.where((k == 9) | (q == 3), -jnp.inf, jnp.where(k == 5, steep, 2 * s))

    def plain(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return jnp.where((k == 9) | (q == 3), -jnp.inf, 2 * s)

    def loss(score_mod: Any) -> Callable[..., Array]:
        def of(q: Array, k: Array, v: Array) -> Array:
            out = jattn.dot_product_attention(
                q, k, v, mask=visible, score_mod=score_mod, implementation="cpu"
            )
            return (out * jnp.cos(jnp.arange(8.0))).sum()

        return of

    arrays = [x.astype(jnp.float32) for x in (q, k, v)]
    both = [jax.jit(jax.grad(loss(x), (0, 1, 2))) for x in (score_mod, plain)]
    for name, (got, want) in on_every_set(lambda: [run(*arrays) for run in both]):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b, name)


def test_what_has_no_query_or_key_decides_nothing() -> None:
    """A function that is infinite or NaN where the arrays end: tiles are wider than they are."""
    q, k, v = (
        jnp.asarray(x, jnp.float32) for x in np.random.default_rng(4).normal(size=(3, 2, 37, 2, 8))
    )

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return jnp.where(
            (q == 0) & (k == 0), s, jnp.where((q >= 37) | (k >= 37), jnp.nan, s + 1 / (q + k))
        )

    def loss(q: Array, k: Array, v: Array) -> Array:
        return jnp.sin(
            jattn.dot_product_attention(q, k, v, score_mod=score_mod, implementation="cpu")
        ).sum()

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    for name, results in on_every_set(lambda: run(q, k, v)):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(results)), name


def test_operations_that_it_has_not_are_refused() -> None:
    q = jnp.ones((1, 4, 1, 8))
    found = jattn.explain(q, q, q, score_mod=lambda s, *_: jax.lax.lgamma(s))
    assert found.chosen == "xla"
    reason = found.reasons["cpu"][0]
    assert (reason.code, reason.argument, reason.actual) == ("PRIMITIVE", "score_mod", "lgamma")
    with jax.enable_x64(True):
        wide = jnp.ones((1, 4, 1, 8), jnp.float64)
        found = jattn.explain(wide, wide, wide, score_mod=lambda s, *_: jnp.tanh(s))
    assert [reason.actual for reason in found.reasons["cpu"]] == ["tanh of float64"]


def test_numbers_of_a_row_are_computed_once() -> None:
    """What depends on the query alone, or on the key alone, stands in sections of its own."""
    program, _ = trace(
        lambda s, b, h, q, k, x: s + x[h, q] * jnp.sin(1.0 * k), (np.ones((2, 3), "float32"),), 1
    )
    text = cpu_program.cpu_program(program, by_position=False, slope=False)
    assert re.search(r"Q read\.float32\.int32 ", text)
    assert re.search(r"K sin\.float32 ", text)
    assert [word.split()[1] for word in text.split(";") if word.startswith("P")] == [
        "mul.float32",
        "add.float32",
    ]


def test_numbers_that_are_needed_at_once_are_limited() -> None:
    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        made = [jnp.sin(1.0 * q * k)]
        for _ in range(1100):
            made.append(jnp.sin(made[-1]))
        for x in reversed(made):
            s = s + x
        return s

    program, _ = trace(score_mod, (), 1)
    [(code, actual, rule)] = cpu_program.refusals(program)
    assert (code, rule) == ("CAPTURE_ACCESS", "at most 1024")
    assert re.fullmatch(r"\d+ numbers at a time", str(actual))


BAD_PROGRAMS = {
    "": "a word is missing",
    "score float16 9 8 -1;": "its score is float16",
    "score float32 9 9 -1;": "'9' stands where a number from 0 to 8",
    "score float32 5000 1 -1;": "'5000' stands where a number from 5 to 1024",
    "score float32 9 8 -1;P add.float32 9 0 0;": "'9' stands where a number from 0 to 8",
    "score float32 9 8 -1;P add.float32 8 0;": "a word is missing",
    "score float32 9 8 -1;P add.float32 8 8 0;": "writes to its operand",
    "score float32 9 8 -1;P add.float32 8 0 0 0;": "does not end",
    "score float32 9 8 -1;P lgamma.float32 8 0;": "there is no operation lgamma.float32",
    "score float32 9 8 -1;X add.float32 8 0 0;": "'X' is no kind of statement",
    "score float32 9 8 -1;K lookup.4 8 4 0;": "'0' stands where a number from 0 to -1",
    "score float32 9 8 -1;P read.float32.int32 8 4 16;": "'16' stands where a number from 0 to 15",
    "score float32 9 8 -1;P read.float32.int32 8 4 0;": "capture 0 is missing",
    "score float32 9 8 -1;P reduce_precision.float32 8 0 9 3;": "'9' stands where a number from 1 to 8",
    "score float32 9 8 -1;P reduce_precision.float32 8 0 0 3;": "'0' stands where a number from 1 to 8",
    "score float32 9 8 -1;P reduce_precision.float32 8 0 8 24;": "'24' stands where a number from 0 to 23",
    "score float32 9 8 -1;k 3 8 4;": "lanes of 3 bytes",
    "score float32 9 8 -1;k 4 8 8;": "'k' spreads a register to itself",
    "score float64 9 8 -1;": "not of the type of the problem's",
    "score float32 9 8 -1;gradient P 9 0;": "'9' stands where a number from 0 to 8",
    "score float32 9 8 -1;gradient P 8;": "a word is missing",
    "score float32 9 8 -1;gradient S 8 0;": "'S' is no kind of statement",
    "score float32 9 8 -1;gradient P 8 0 0;": "does not end",
}


def call_with(text: str, captures: tuple[Array, ...] = ()) -> Array:
    """Attention of ones with a program as text: its log-sum-exp."""
    q = jnp.ones((1, 3, 1, 8))
    program, _ = trace(lambda s, b, h, q, k, *x: s, captures, 1)
    given = Operands(
        q,
        q,
        q,
        batch_ids=jnp.zeros(1, jnp.int32),
        head_ids=jnp.zeros(1, jnp.int32),
        captures=captures,
    )
    program = dataclasses.replace(
        program, captures=tuple(Capture(x.shape, str(x.dtype)) for x in captures)
    )
    spec = Spec.of(given, scale=1.0, softcap=0.0, band=Band(), score_mod=program)
    plan = {"backend": "cpu", "kernels": "", "program": text}
    return ffi.forward(spec, given, plan, (1 << 20,))[1]


@pytest.mark.whole
@pytest.mark.parametrize("text", BAD_PROGRAMS)
def test_programs_of_others_are_read_with_care(text: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(BAD_PROGRAMS[text])):
        jax.block_until_ready(call_with(text))


def test_reads_of_such_programs_are_held_within_captures() -> None:
    """Whatever index they compute."""
    table = jnp.asarray([5.0, 6.0, 7.0])
    for index, element in ((-(2**31), 5.0), (2**31 - 1, 7.0), (1, 6.0)):
        text = f"score float32 7 6 -1;U constant.4 5 {index};U read.float32.int32 6 5 0;"
        np.testing.assert_allclose(call_with(text, (table,)), element + np.log(3), rtol=1e-6)


# The numbers of the text take 4 MB, and twice as much while they grow.
SHORT_OF_MEMORY = """
import ctypes, resource
import jax
from test_cpu_program import call_with

text = "score float32 9 8 -1;P add.float32 8 0 0;table 4" + " 0" * 500_000 + ";"
run = jax.jit(lambda: call_with(text)).lower().compile()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
with open("/proc/self/statm") as sizes:
    used = int(sizes.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
blocks = []
while block := libc.malloc(ctypes.c_size_t(1 << 18)):
    blocks.append(block)
for block in blocks[-16:]:
    libc.free(block)
try:
    jax.block_until_ready(run())
except jax.errors.JaxRuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="measures its own memory on Linux"
)
def test_a_program_that_memory_does_not_hold_is_an_error() -> None:
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_MEMORY],
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([*folders, *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "RESOURCE_EXHAUSTED: jattn: no memory on the host" in done.stdout
