"""The gradients of what a score function reads, by the CPU kernel, on each instruction set."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import normal
from instruction_sets import on_every_set
from program_cases import (
    CASES,
    INDICES,
    KEYS,
    SIZES,
    Case,
    derivatives_by_elements,
    expected,
    traced,
)

import jattn
from jattn import _core, cpu_program, device_gradients, ffi
from jattn.backends.base import Residuals, Wants
from jattn.backends.cpu import CpuBackend
from jattn.masks import Band
from jattn.score_program import Capture, ScoreProgram, trace
from jattn.spec import Operands, Spec
from jattn.testing import cases, compare
from jattn.testing.run import compile_case

pytestmark = pytest.mark.thinned  # most of their time goes into compiling

Array = Any
CPU = jattn.Device("cpu")
MOST_BYTES = 128 * 2**20  # of sums


def wanted(program: ScoreProgram) -> tuple[bool, ...]:
    return tuple(c.is_float for c in program.captures)


def can_sum(program: ScoreProgram) -> bool:
    flags = wanted(program)
    return any(flags) and not cpu_program.refusals(program) and cpu_program.can_sum(program, flags)


def assert_kernel_sums(lowered: str) -> None:
    """The kernel computes the gradients, and nothing walks over tiles beside it."""
    assert "gradients = " in lowered
    assert "stablehlo.while" not in lowered


# ---- Derivatives by elements -----------------------------------------------------------------------------------------

SUMMED = [case for case in CASES if can_sum(traced(case)[0])]


def problem(program: ScoreProgram, operands: Operands[Array]) -> Spec:
    return Spec.of(operands, scale=1.0, softcap=0.0, band=Band(), score_mod=program)


def sums_of_derivatives(
    program: ScoreProgram, captures: Array, q: Array, mask: Array, weight: Array
) -> list[Array]:
    """Of each row a sum of derivatives over its only key, times a weight: what gradients of log-sum-exp are then."""
    batch, _, heads, _ = q.shape
    k = jnp.ones((batch, KEYS, heads, 1), q.dtype)
    operands = Operands(
        *(q, k, k),
        mask=mask,
        batch_ids=jnp.arange(batch, dtype=jnp.int32),
        head_ids=jnp.arange(heads, dtype=jnp.int32),
        captures=captures,
    )
    spec = problem(program, operands)
    out, lse = CpuBackend().forward(spec, operands, CPU)
    residuals = Residuals(out=out, lse=lse, dout=jnp.zeros_like(out), dlse=weight)
    wants = Wants(q=False, k=False, v=False, bias=False, captures=wanted(program))
    found = CpuBackend().backward(spec, operands, residuals, wants, CPU, "off").captures
    assert found is not None
    return [x.reshape(-1) for x in found if x is not None]


@pytest.mark.parametrize("case", SUMMED, ids=lambda case: case.name)
def test_derivatives(case: Case) -> None:
    """Of the programs that GPUs have, a key at a time."""
    program, captures = traced(case)
    scores = np.random.default_rng(1).normal(scale=3, size=len(INDICES)).astype(np.float32)
    values, _ = expected(case, program, captures, scores)
    derivatives, unit = derivatives_by_elements(case, program, captures, scores)
    rng = np.random.default_rng(5)
    with jax.enable_x64(case.x64):
        run = jax.jit(lambda *x: jnp.concatenate(sums_of_derivatives(program, captures, *x)))
        for key in range(KEYS):
            visible = np.isfinite(values) & (np.arange(len(values)) % KEYS == key)
            weight = rng.normal(size=SIZES[:3]).astype(np.float32)
            of_pair = (np.repeat(weight.reshape(-1), KEYS) * visible)[:, None]
            with np.errstate(invalid="ignore"):
                want = np.where(of_pair == 0, 0, of_pair * derivatives).sum(0)
                limit = np.where(of_pair == 0, 0, abs(of_pair) * unit).sum(0)
            q = jnp.asarray(scores.reshape(SIZES)[..., key].swapaxes(1, 2)[..., None])
            given = (q, jnp.asarray(visible.reshape(SIZES)), jnp.asarray(weight))
            for name, got in on_every_set(lambda given=given: run(*given)):
                assert (abs(got - want) <= 4 * max(case.ulps, 1) * limit).all(), (name, key)


def test_cases_of_every_kind_are_summed() -> None:
    """All that GPUs sum."""
    by_kernels = [
        case.name
        for case in CASES
        if any(wanted(program := traced(case)[0]))
        and device_gradients.can_sum(program, wanted(program))
    ]
    assert [case.name for case in SUMMED] == by_kernels


def test_what_is_left_to_xla() -> None:
    """Reads of too many elements for a pair, arrays that are too long, types that a sum of the score's would round."""

    def reading(count: int) -> Callable[..., Array]:
        return lambda s, b, h, q, k, x: s + sum(x[(k + i) % 16] for i in range(count))

    program = {n: trace(reading(n), (np.ones(16, np.float32),), 1)[0] for n in (8, 9)}
    assert cpu_program.can_sum(program[8], (True,))
    assert not cpu_program.can_sum(program[9], (True,))

    def of_length(length: int) -> ScoreProgram:
        long = (Capture((length,), "float32"),)
        short = trace(lambda s, b, h, q, k, x: s + x[7], (np.ones(9, np.float32),), 1)[0]
        return dataclasses.replace(short, captures=long)

    assert cpu_program.can_sum(of_length(2**22), (True,))
    assert not cpu_program.can_sum(of_length(2**22 + 1), (True,))

    with jax.enable_x64(True):
        table = (np.ones(9, np.float64),)
        for dtype in ("float32", "float64"):
            of_dtype = trace(lambda s, b, h, q, k, x: s + x[k], table, 1, dtype)[0]
            assert cpu_program.can_sum(of_dtype, (True,)) == (dtype == "float64")


def test_what_pairs_share_is_added_up_before() -> None:
    """A place of a head, of queries or of keys is known for a whole row or column."""
    places = {
        "U": lambda s, b, h, q, k, x: s + x[h, b] * (q - k),
        "Q": lambda s, b, h, q, k, x: s + x[h, q % 8],
        "K": lambda s, b, h, q, k, x: jnp.where(q > k, s + x[b, k], s),
        "P": lambda s, b, h, q, k, x: s + x[h, abs(q - k)],
    }
    for section, score_mod in places.items():
        program, _ = trace(score_mod, (np.ones((4, 8), np.float32),), 2)
        text = cpu_program.gradients_program(program, (True,), by_position=True)
        assert [x.split()[1] for x in text.split(";") if x.startswith("gradient")] == [section]


def test_only_what_is_wanted_is_read() -> None:
    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array, x: Array, y: Array) -> Array:
        return s * x[h] + y[k]

    arrays = (np.ones(4, np.float32), np.ones(9, np.float32))
    program, _ = trace(score_mod, arrays, 1)
    for flags, count in (((True, True), 2), ((True, False), 1), ((False, True), 1)):
        text = cpu_program.gradients_program(program, flags, by_position=False)
        assert text.count("gradient") == count


# ---- Whole problems --------------------------------------------------------------------------------------------------

BASE = cases.Case("captures", q_len=75, kv_len=90, num_heads=4, num_kv_heads=2, is_causal=True)
FORMS: dict[str, dict[str, Any]] = {
    "one head": {"batch": 1, "q_len": 500, "kv_len": 700, "num_heads": 1, "num_kv_heads": 1},
    "chunks": {"batch": 1, "q_len": 900, "kv_len": 40, "num_heads": 2, "is_causal": False},
    "groups": {"q_len": 200, "kv_len": 330, "num_heads": 6, "kv_lengths": (330, 100)},
    "heads": {"batch": 8, "num_heads": 8, "num_kv_heads": 8},
    "heads in order": {"batch": 20, "q_len": 7, "kv_len": 5, "num_heads": 8, "num_kv_heads": 8},
    "one query": {"batch": 3, "q_len": 1, "kv_len": 200, "is_causal": False},
    "one pair": {"batch": 1, "q_len": 1, "kv_len": 1, "num_heads": 1, "num_kv_heads": 1},
    "bias": {"bias_form": "bnts"},
    "bias of keys": {"bias_form": "11s", "q_len": 150},
    "cap, slopes and dropout": {"softcap": 5.0, "alibi_form": "n", "dropout_rate": 0.3},
}


def problems() -> Iterator[cases.Case]:
    """Each form in two types, which take turns."""
    dtypes = ("float32", "float64", "bfloat16", "float16")
    for i, (form, changes) in enumerate(FORMS.items()):
        for j, score_mod in enumerate(("table", "gain")):
            dtype = dtypes[(i + 2 * j) % 4]
            yield BASE.but(
                f"{score_mod}-{form}-{dtype}", score_mod=score_mod, dtype=dtype, **changes
            )


@pytest.mark.parametrize("case", list(problems()), ids=str)
def test_against_the_oracle(case: cases.Case) -> None:
    """With the gradients of all else in the same call."""
    given, solution = compare.solved(case)
    call, text = compile_case(case, given, "cpu")
    assert_kernel_sums(text)
    for name, results in on_every_set(call):
        named = {key: np.asarray(x) for key, x in results.items()}
        try:
            compare.assert_close(case, given, named, solution=solution)
        except AssertionError as error:
            raise AssertionError(f"instruction set {name}: {error}") from error


def gradients(score_mod: Any, captures: tuple[Array, ...], length: int, **keywords: Any) -> Any:
    """Compiles those of a loss by the captures that are floats; of (q, captures)."""

    def loss(floats: list[Array], q: Array, captures: tuple[Array, ...]) -> Array:
        rest = iter(floats)
        own = [next(rest) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in captures]
        out = jattn.dot_product_attention(
            q, q, q, score_mod=score_mod, captures=own, implementation="cpu", **keywords
        )
        return jnp.sin(out).sum()

    def run(q: Array, captures: tuple[Array, ...]) -> list[Array]:
        floats = [x for x in captures if jnp.issubdtype(x.dtype, jnp.floating)]
        return jax.grad(loss)(floats, q, captures)

    lowered = jax.jit(run).lower(jnp.zeros((2, length, 2, 8)), captures)
    assert_kernel_sums(lowered.as_text())
    return lowered.compile()


def test_hidden_pairs_add_nothing_whatever_their_derivative() -> None:
    """A derivative of NaN or infinity: the function hides the pair, a mask does, or its row has no keys."""
    length = 70
    q, table = normal(0, 2, length, 2, 8), normal(1, length)
    mask = (jnp.arange(length) != 5) & (jnp.arange(length) != 3)[:, None]

    def hides(q: Array, k: Array) -> Array:
        return (k == 9) | (q == 3)

    def steep(s: Array, b: Array, h: Array, q: Array, k: Array, table: Array) -> Array:
        odd = jnp.where((k == 9) | (k == 5) | (q == 3), 0.0, 4.0)  # the derivative of its root
        learned = jnp.where(odd == 0, jnp.sqrt(odd * table[k]), table[k])
        return jnp.where(hides(q, k), -jnp.inf, s + learned * jnp.where(k == 5, jnp.inf, 1.0))

    def plain(s: Array, b: Array, h: Array, q: Array, k: Array, table: Array) -> Array:
        return jnp.where(hides(q, k), -jnp.inf, s + table[k])

    both = [gradients(x, (table,), length, mask=mask) for x in (steep, plain)]
    for name, (got, want) in on_every_set(lambda: [run(q, (table,)) for run in both]):
        np.testing.assert_array_equal(got[0], want[0], name)
        assert not got[0][[5, 9]].any(), name


def test_what_a_visible_pair_holds_reaches_what_it_read() -> None:
    """NaN in a query goes to the elements of the keys that it sees."""
    q, table = normal(0, 2, 70, 2, 8).at[0, 11, 0, 0].set(jnp.nan), normal(1, 70)
    run = gradients(lambda s, b, h, q, k, x: s + x[q - k], (table,), 70, is_causal=True)
    for name, (got,) in on_every_set(lambda: run(q, (table,))):
        # Query 11 as a key is NaN, too, to queries from 11 on, and through them to all that these read.
        assert np.isnan(got).all(), name
    of_query = gradients(lambda s, b, h, q, k, x: s + x[q], (table,), 70, is_causal=True)
    for name, (got,) in on_every_set(lambda: of_query(q, (table,))):
        np.testing.assert_array_equal(np.isnan(got), np.arange(70) >= 11, name)


def test_captures_of_integers_and_elements_that_nobody_reads() -> None:
    length = 90
    q, table, ids = normal(0, 2, length, 2, 8), normal(1, 300), jnp.arange(length) % 7 * 40
    run = gradients(lambda s, b, h, q, k, x, ids: s + x[ids[k]], (table, ids), length)
    for name, (got,) in on_every_set(lambda: run(q, (table, ids))):
        is_read = np.isin(np.arange(300), np.asarray(ids))
        assert (got[is_read] != 0).all(), name
        assert not got[~is_read].any(), name


@pytest.mark.parametrize(("length", "elements"), [(0, 3), (5, 0)])
def test_nothing_to_add_up(length: int, elements: int) -> None:
    """No pairs; or none whose element is within the table."""
    table = jnp.ones(max(elements, 1))

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array, x: Array) -> Array:
        return s + jnp.where(q > 1000 - elements, x[0], 0.0)

    run = gradients(score_mod, (table,), length)
    for _, (got,) in on_every_set(lambda: run(jnp.zeros((2, length, 2, 8)), (table,))):
        assert not got.any()


def test_export_with_a_symbolic_batch() -> None:
    """Scratch memory is that of one entry for each: enough for every batch."""
    (batch,) = jax.export.symbolic_shape("batch")
    table = normal(1, 2, 41)

    def run(q: Array, table: Array) -> Array:
        def loss(table: Array) -> Array:
            out = jattn.dot_product_attention(
                q,
                q,
                q,
                score_mod=lambda s, b, h, q, k: s + table[h, jnp.clip(q - k, -20, 20) + 20],
                implementation="cpu",
            )
            return jnp.sin(out).sum()

        return jax.grad(loss)(table)

    shape = jax.ShapeDtypeStruct((batch, 300, 2, 8), jnp.float32)
    exported = jax.export.export(jax.jit(run), disabled_checks=jattn.export_disabled_checks())(
        shape, jax.ShapeDtypeStruct(table.shape, table.dtype)
    )
    assert_kernel_sums(exported.mlir_module())
    for size in (1, 2, 3, 9, 40):
        q = normal(size, size, 300, 2, 8)
        np.testing.assert_array_equal(exported.call(q, table), jax.jit(run)(q, table))


# ---- Scratch memory --------------------------------------------------------------------------------------------------


def scratch_bytes(batch: int, q_len: int, kv_len: int, heads: int, elements: int) -> int:
    return _core.cpu_scratch_bytes(
        backward=True,
        wants_dbias=False,
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=64,
        head_dim_v=64,
        dtype="float32",
        bias_shape=(0,) * 4,
        capture_elements=elements,
    )


SIZED = [
    (lengths, heads, elements)
    for lengths in ((1, 1), (7, 300), (2000, 40), (1024, 1024))
    for heads in (1, 3, 16)
    for elements in (1, 1000, 2**16, 2**21, MOST_BYTES // 8)
]


@pytest.mark.whole
@pytest.mark.parametrize(("lengths", "heads", "elements"), SIZED)
def test_memory_of_sums(lengths: tuple[int, int], heads: int, elements: int) -> None:
    for batch in (1, 2, 3, 17, 64, 65, 200, 1000):
        without = scratch_bytes(batch, *lengths, heads, 0)
        used = scratch_bytes(batch, *lengths, heads, elements) - without
        assert 8 * elements <= used <= MOST_BYTES + 64
        pairs = batch * heads * lengths[0] * lengths[1]
        assert used <= 64 + 8 * (
            elements + pairs
        )  # what is cleared and read is little beside the pairs


@pytest.mark.parametrize(("lengths", "heads", "elements"), SIZED[::2])
def test_memory_of_a_symbolic_batch(lengths: tuple[int, int], heads: int, elements: int) -> None:
    of_entry = max(-(-scratch_bytes(n, *lengths, heads, elements) // n) for n in range(1, 65))
    for batch in (*range(1, 130), 255, 1000, 4097):
        assert scratch_bytes(batch, *lengths, heads, elements) <= batch * of_entry, batch


# ---- Programs of others ----------------------------------------------------------------------------------------------


def call_with(gradients: str | None, captures: tuple[Array, ...], elements: int = 3) -> Array:
    """The gradients that a text says, of attention of ones with dlse = 1: of 6 pairs, 1 / 3 each, whose ds that is."""
    q, k = jnp.ones((1, 2, 1, 8)), jnp.ones((1, 3, 1, 8))
    program, _ = trace(lambda s, b, h, q, k, x: s + x[0], (jnp.ones(elements),), 1)
    operands = Operands(
        *(q, k, k),
        batch_ids=jnp.zeros(1, jnp.int32),
        head_ids=jnp.zeros(1, jnp.int32),
        captures=captures,
    )
    spec = problem(program, operands)
    plan = {"backend": "cpu", "kernels": "", "program": "score float32 5 0 -1;"}
    if gradients is not None:
        plan["gradients"] = gradients
    out, lse = ffi.forward(spec, operands, plan, (1 << 20,))
    residuals = Residuals(out=out, lse=lse, dout=jnp.zeros_like(out), dlse=jnp.ones_like(lse))
    nothing = Wants(q=False, k=False, v=False, bias=False)
    found = ffi.backward(
        spec, operands, residuals, nothing, plan, (1 << 20,), captures=(True,)
    ).captures
    assert found is not None
    assert found[0] is not None
    return jax.block_until_ready(found[0])


def test_places_of_such_programs_are_held_within_the_gradients() -> None:
    """Whatever they compute, in whatever section."""
    ones = f"U constant.4 6 {np.float32(1).view(np.int32)};"
    for place, element in ((-(2**31), 0), (-1, 0), (1, 1), (3, 2), (2**31 - 1, 2)):
        for section in "UQKP":
            text = (
                f"score float32 7 0 -1;{ones}{section} constant.4 5 {place};gradient {section} 5 6;"
            )
            want = np.zeros(3)
            want[element] = 2
            got = call_with(text, (jnp.ones(3),))
            np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=text)


def test_several_reads_of_such_programs() -> None:
    ones = f"U constant.4 6 {np.float32(1).view(np.int32)};"
    text = f"score float32 7 0 -1;{ones}gradient K 4 6;gradient Q 3 6;gradient U 1 6;"
    want = np.array([2 / 3 + 1 + 2, 2 / 3 + 1, 2 / 3])
    np.testing.assert_allclose(call_with(text, (jnp.ones(3),)), want, rtol=1e-6)
    np.testing.assert_array_equal(call_with("score float32 5 0 -1;", (jnp.ones(3),)), np.zeros(3))


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        (None, "attribute plan.gradients is missing or is not text"),
        ("score float64 5 0 -1;", "not of the type of the problem's"),
        ("score float32 6 0 -1;P read.float32.int32 5 4 1;gradient P 4 5;", "capture 1 is missing"),
        ("score float32 5 0 -1;gradient P 5 0;", "'5' stands where a number from 0 to 4"),
    ],
)
def test_such_programs_are_refused(gradients: str | None, message: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)):
        call_with(gradients, (jnp.ones(3),))
