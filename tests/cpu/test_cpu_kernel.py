"""The native CPU kernel: every instruction set that this machine can run, and any number of threads."""

import dataclasses
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from instruction_sets import INSTRUCTION_SETS, force, on_every_set

import jattn
from jattn import _core
from jattn.testing import cases, compare, inputs, run
from jattn.testing.cases import Case

FEATURES = ("mask", "bias", "positions", "sinks", "alibi", "dropout", "dropout_rows")


def chosen_cases() -> list[Case]:
    """The tiles and what is done to them: all masks and features, and the other tags thinned out.

    The sweep (test_backends_sweep.py) runs every case on the instruction set that is picked.
    """
    features = [case for tag in FEATURES for case in cases.tagged(tag)[::2]]
    others = [case for case in cases.sweep() if not case.tags & set(FEATURES)]
    return features + [case for case in others[::9] if case not in features]


# The sweep's problems are short: the matrix unit, where it is the best, gets few of them.
SETS_BESIDE_THE_SWEEP = INSTRUCTION_SETS[0 if "amx" in INSTRUCTION_SETS else 1 :]


def test_the_best_set_is_active_and_unknown_ones_are_refused() -> None:
    assert INSTRUCTION_SETS[-1] == "baseline"
    assert _core.cpu_active_instruction_set() == INSTRUCTION_SETS[0]
    assert not _core.cpu_force_instruction_set("sse9")
    assert _core.cpu_active_instruction_set() == INSTRUCTION_SETS[0]


def set_of(dtype: str, q_len: int, kv_len: int) -> str:
    return _core.cpu_instruction_set_of(q_len=q_len, kv_len=kv_len, dtype=dtype)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_a_forced_set_runs_short_problems_too(name: str) -> None:
    force(name)
    lengths = ((1, 1), (16, 16), (100, 4096), (4096, 100), (4096, 4096))
    found = {set_of("bfloat16", *both) for both in lengths}
    assert found == {name}
    wide = {set_of("float64", *both) for both in lengths}
    assert wide == {"avx512" if name in ("amx", "avx512_bf16") else name}


@pytest.mark.skipif("amx" not in INSTRUCTION_SETS, reason="this machine has no matrix unit")
@pytest.mark.parametrize(
    ("dtype", "short", "long"),
    [
        ("float32", [(8, 8), (128, 128), (16, 16384), (4096, 64)], [(129, 129), (256, 4096)]),
        ("float16", [(8, 8), (63, 63)], [(64, 64), (16, 16384), (1024, 63)]),
        ("bfloat16", [(8, 8), (16, 16)], [(17, 17), (16, 4096), (4096, 16)]),
    ],
)
def test_the_matrix_unit_leaves_short_problems_to_vectors(
    dtype: str, short: list[tuple[int, int]], long: list[tuple[int, int]]
) -> None:
    assert [set_of(dtype, *both) for both in short] == ["avx512"] * len(short)
    assert [set_of(dtype, *both) for both in long] == ["amx"] * len(long)


@pytest.mark.skipif("amx" not in INSTRUCTION_SETS, reason="this machine has no matrix unit")
def test_short_problems_have_the_bits_of_vectors_and_explain_says_so() -> None:
    """Of float32 the two sets round differently, so that equal bits tell which one ran."""
    query, key, value = (
        jnp.asarray(np.random.default_rng(i).normal(size=(2, 100, 2, 64)), jnp.float32)
        for i in range(3)
    )
    attend = jax.jit(lambda *x: jattn.dot_product_attention(*x, implementation="cpu"))
    picked = np.asarray(attend(query, key, value))
    results = dict(on_every_set(lambda: attend(query, key, value)))
    np.testing.assert_array_equal(picked, results["avx512"])
    assert np.any(picked != results["amx"])
    force("")
    assert "native isa=avx512" in str(jattn.explain(query, key, value))


@pytest.mark.skipif(len(INSTRUCTION_SETS) == 1, reason="this machine runs one set: the sweep did")
@pytest.mark.parametrize("case", chosen_cases(), ids=str)
def test_every_instruction_set_agrees_with_the_oracle(case: Case) -> None:
    """One program, run once for each set but the best: the set is chosen when the kernel is called."""
    operands, solution = compare.solved(case)
    poisoned = inputs.poison(case, operands)
    with jax.enable_x64(case.dtype == "float64"):
        forward = run.forward_function(case, poisoned, "cpu")
        arrays = [
            None if x is None else jnp.asarray(x)
            for x in (
                *(poisoned.q, poisoned.k, poisoned.v),
                *(poisoned.bias, poisoned.sinks, poisoned.alibi_slopes),
            )
        ]

        @jax.jit
        def program(arrays, dout, dlse):  # type: ignore[no-untyped-def]
            (out, lse), pullback = jax.vjp(forward, *arrays)
            return out, lse, *pullback((dout, dlse.astype(lse.dtype)))

        for name in SETS_BESIDE_THE_SWEEP:
            force(name)
            results = jax.device_get(program(arrays, poisoned.dout, poisoned.dlse))
            names = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks", "dalibi_slopes")
            named = {
                key: np.asarray(x) for key, x in zip(names, results, strict=True) if x is not None
            }
            try:
                compare.assert_close(case, operands, named, solution=solution)
            except AssertionError as error:
                raise AssertionError(f"instruction set {name}: {error}") from error


# What runs over several tiles of keys decide by themselves: the first maximum (rows that see none of the first keys), a
# maximum that does not last, parts of tiles and panels, head dims of every number of steps.
RUN_CASES = (
    Case("window", q_len=300, kv_len=700, window=(70, 0), is_causal=True, lower_right=True),
    Case("causal-96", q_len=333, kv_len=333, is_causal=True, head_dim=96, head_dim_v=160),
    Case("lengths", q_len=130, kv_len=530, q_lengths=(130, 70), kv_lengths=(77, 500)),
    Case("small-head", q_len=70, kv_len=640, head_dim=24, head_dim_v=40),
)


@pytest.mark.parametrize("growth", [0.0, 3.0, 40.0], ids=lambda growth: f"growth-{growth:g}")
@pytest.mark.parametrize("case", RUN_CASES, ids=lambda case: case.name)
def test_runs_of_tiles_agree_with_the_oracle(case: Case, growth: float) -> None:
    """Scores whose magnitude grows along the keys: maxima are raised, or the tiles done one by one."""
    case = dataclasses.replace(case, dtype="bfloat16")
    operands = inputs.make(case)
    factors = 1 + growth * np.linspace(0, 1, case.kv_len, dtype=np.float32)
    k = operands.k.astype(np.float32) * factors[:, None, None]
    operands = dataclasses.replace(operands, k=k.astype(operands.k.dtype))
    compare.assert_close(case, operands, run.run(case, operands, "cpu").results)


@pytest.mark.parametrize("head_dim", [16, 32, 64])
def test_both_passes_round_large_scores_alike(head_dim: int, instruction_set: str) -> None:
    """Scores of 1e5: the probability of a key far above all others is 1 in the backward pass, too."""
    case = Case(
        f"large-{head_dim}",
        batch=1,
        q_len=70,
        kv_len=200,
        head_dim=head_dim,
        dtype="float16",
        with_dlse=False,
    )
    operands = inputs.make(case)
    q, k = ((x.astype(np.float32) * 300).astype(np.float16) for x in (operands.q, operands.k))
    operands = dataclasses.replace(operands, q=q, k=k)
    compare.assert_close(case, operands, run.run(case, operands, "cpu").results)


# Many tiles of keys for each thread of a small machine: a backward task then owns several.
SEVERAL_TILES = Case("several-tiles", batch=1, q_len=200, kv_len=300, num_heads=8, num_kv_heads=8)
SEVERAL_TILES_CASES = tuple(
    dataclasses.replace(SEVERAL_TILES, name=name, **changes)
    for name, changes in (
        ("causal", {"is_causal": True, "lower_right": True, "dtype": "bfloat16"}),
        ("window", {"window": (70, 20), "dtype": "float16"}),
        ("lengths", {"q_lengths": (170,), "kv_lengths": (250,), "dtype": "bfloat16"}),
        ("segments", {"q_len": 300, "segments": "random", "alibi_form": "n"}),
        ("groups", {"num_heads": 16, "is_causal": True, "dropout_rate": 0.2, "softcap": 5.0}),
        ("bias", {"bias_form": "bnts", "is_causal": True, "dtype": "bfloat16"}),
        ("double", {"is_causal": True, "dtype": "float64"}),
    )
)


@pytest.mark.parametrize("case", SEVERAL_TILES_CASES, ids=str)
def test_tasks_of_several_key_tiles_agree_with_the_oracle(case: Case, instruction_set: str) -> None:
    operands, solution = compare.solved(case)
    results = run.run(case, inputs.poison(case, operands), "cpu").results
    compare.assert_close(case, operands, results, solution=solution)


# Sequences shorter than a tile, more of them than threads: a thread takes several in a row, each for itself, and tiles
# are prepared as far as they have rows. Some shorter than others, of no queries or no keys.
SHORT = Case("short", batch=40, q_len=19, kv_len=21, num_heads=4, num_kv_heads=4)
SHORT_CASES = tuple(
    dataclasses.replace(SHORT, name=name, **changes)
    for name, changes in (
        ("plain", {"head_dim": 40, "head_dim_v": 24}),
        ("eight", {"q_len": 8, "kv_len": 8, "is_causal": True}),
        ("one-key", {"kv_len": 1, "q_len": 33}),
        ("groups", {"num_kv_heads": 2, "softcap": 3.0, "alibi_form": "n"}),
        ("own-bias", {"bias_form": "bnts", "is_causal": True}),
        ("shared-bias", {"bias_form": "nts", "dropout_rate": 0.2}),
        (
            "lengths",
            {
                "q_lengths": tuple(i % 20 for i in range(40)),
                "kv_lengths": tuple(i * 7 % 22 for i in range(40)),
            },
        ),
        ("lengths-mask", {"kv_lengths": tuple(i % 22 for i in range(40)), "mask_form": "bnts"}),
    )
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("case", SHORT_CASES, ids=str)
def test_many_short_sequences_agree_with_the_oracle(
    case: Case, instruction_set: str, dtype: str
) -> None:
    case = dataclasses.replace(case, name=f"{case.name}-{dtype}", dtype=dtype)
    operands, solution = compare.solved(case)
    results = run.run(case, inputs.poison(case, operands), "cpu").results
    compare.assert_close(case, operands, results, solution=solution)


# Products of bfloat16 take elements in pairs (AMX, AVX-512-BF16): odd head dims, odd numbers of keys and queries beside
# memory that must not be read, and rows that tasks pack for themselves, twelve at a time.
PAIR_CASES = (
    Case("odd", q_len=71, kv_len=131, head_dim=33, head_dim_v=41, is_causal=True),
    Case("odd-lengths", q_len=69, kv_len=133, q_lengths=(69, 5), kv_lengths=(77, 131)),
    Case("packs-for-itself", batch=1, q_len=45, kv_len=1111, num_heads=2, window=(501, 7)),
    Case("one-key", q_len=130, kv_len=1, head_dim=5, head_dim_v=3, softcap=9.0),
    Case("few-heads", q_len=193, kv_len=67, head_dim=130, head_dim_v=64, mask_form="bnts"),
)


@pytest.mark.parametrize("case", PAIR_CASES, ids=str)
def test_pairs_of_bfloat16_agree_with_the_oracle(case: Case, instruction_set: str) -> None:
    case = dataclasses.replace(case, dtype="bfloat16")
    operands, solution = compare.solved(case)
    results = run.run(case, inputs.poison(case, operands), "cpu").results
    compare.assert_close(case, operands, results, solution=solution)


@pytest.mark.parametrize("special", [np.inf, np.nan])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_a_value_that_is_not_finite_reaches_its_readers_alone(
    name: str, special: float, instruction_set: str
) -> None:
    """Row 70 of 131, whose neighbour shares a pair with it. Causal: the first 70 rows do not see that key."""
    case = Case("special", batch=1, q_len=131, kv_len=131, is_causal=True, dtype="bfloat16")
    operands = inputs.make(case)
    changed = getattr(operands, name).copy()
    changed[:, 70, :, 3] = special
    results = run.run(case, dataclasses.replace(operands, **{name: changed}), "cpu").results
    is_finite = {
        key: np.isfinite(results[key].astype(np.float32)).all(axis=(0, 2, 3))
        for key in ("out", "dq", "dk", "dv")
    }
    before, after = slice(70), slice(71, None)
    assert is_finite["out"][before].all()
    assert is_finite["dq"][before].all()
    if name in ("q", "dout"):
        assert is_finite["out"][after].all()
        assert is_finite["dq"][after].all()
        assert is_finite["dk"][after].all()
        assert is_finite["dv"][after].all()
    read_by = {"q": "out", "k": "out", "v": "out", "dout": "dv"}[name]
    assert not is_finite[read_by].all()


def long_row_results(random: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """out, dq, dk, dv of one head with 4096 keys, by the kernel in float32 and by the definition in float64."""
    length, head_dim = 4096, 64
    scale = head_dim**-0.5
    arrays = [random.standard_normal((1, length, 1, head_dim)).astype(np.float32) for _ in range(4)]
    *operands, dout = map(jnp.asarray, arrays)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(q, k, v, implementation="cpu")

    out, pullback = jax.vjp(jax.jit(attend), *operands)
    results = [np.asarray(x)[0, :, 0] for x in (out, *pullback(dout))]
    q, k, v, dout = (x[0, :, 0].astype(np.float64) for x in arrays)
    p = np.exp(scale * q @ k.T)
    p /= p.sum(axis=1, keepdims=True)
    ds = p * (dout @ v.T - np.sum(dout * (p @ v), axis=1, keepdims=True))
    return results, [p @ v, scale * ds @ k, scale * ds.T @ q, p.T @ dout]


@pytest.mark.parametrize("name", [x for x in INSTRUCTION_SETS if not x.startswith("amx")])
def test_long_rows_are_not_one_chain_of_roundings(name: str) -> None:
    """As one chain through all keys the largest errors were 3.2e-7 to 4.5e-7; by tiles they are 1.1e-7 to 1.8e-7.

    AMX multiplies parts of float32 numbers and has a bound of its own (test_matrix_unit.py).
    """
    force(name)
    results, expected = long_row_results(np.random.default_rng(0))
    for got, want in zip(results, expected, strict=True):
        assert np.max(np.abs(got - want)) < 2.4e-7


# Gradients of captures: a head that many threads share, in chunks or not; groups; many heads with and without parts of
# their own; a bias that is shared.
CAPTURE_CASES = (
    Case("captures", batch=1, q_len=400, kv_len=700, num_heads=1, num_kv_heads=1, score_mod="gain"),
    Case("captures-chunks", batch=1, q_len=2000, kv_len=40, num_heads=2, score_mod="table"),
    Case("captures-groups", q_len=330, kv_len=400, num_heads=6, score_mod="table", dtype="float16"),
    Case("captures-heads", q_len=400, kv_len=300, num_heads=16, num_kv_heads=8, score_mod="gain"),
    Case("captures-short", batch=40, q_len=19, kv_len=21, num_heads=4, score_mod="gain"),
    Case("captures-order", batch=40, q_len=8, kv_len=7, num_heads=4, score_mod="table"),
    Case("captures-bias", q_len=200, kv_len=130, num_heads=4, bias_form="s", score_mod="table"),
)

# Keys in several splits (few tasks), dq summed by several tasks, chunks of dk and dv, tasks of several tiles of keys or
# of one, a shared bias, packed heads, heads of one thread beside shared ones, several short heads a ticket.
THREAD_CASES = (
    Case("few-queries", batch=1, q_len=3, kv_len=3000, num_heads=4, dropout_rate=0.2),
    Case("many-tiles", batch=1, q_len=400, kv_len=400, is_causal=True, dtype="bfloat16"),
    Case("chunks", batch=1, q_len=2000, kv_len=40, num_heads=1, num_kv_heads=1, bias_form="s"),
    Case("plain", q_len=330, kv_len=330, is_causal=True),
    Case("several-key-tiles", q_len=400, kv_len=300, num_heads=8, is_causal=True, dtype="bfloat16"),
    Case(
        "long-heads", batch=1, q_len=1100, kv_len=1100, num_heads=6, num_kv_heads=6, is_causal=True
    ),
    Case("long-groups", batch=2, q_len=600, kv_len=900, num_heads=6, num_kv_heads=3, softcap=9.0),
    Case("shared-bias", q_len=200, kv_len=130, num_heads=4, bias_form="ts", dtype="float16"),
    Case("own-bias", q_len=200, kv_len=130, num_heads=8, bias_form="bnts"),
    Case(
        "slopes",
        q_len=600,
        kv_len=700,
        num_heads=6,
        num_kv_heads=3,
        alibi_form="bn",
        window=(300, 9),
    ),
    Case("lengths", batch=4, q_len=150, kv_len=150, kv_lengths=(150, 3, 0, 70), is_causal=True),
    Case("score-function", q_len=330, kv_len=200, num_heads=6, num_kv_heads=3, score_mod="cap"),
    *CAPTURE_CASES,
    *SHORT_CASES,
)


def digest() -> str:
    """A hash of every result of every case of THREAD_CASES, on this process's threads."""
    hashed = hashlib.sha256()
    for case in THREAD_CASES:
        outcome = run.run(case, inputs.make(case), "cpu")
        for name in sorted(outcome.results):
            hashed.update(np.ascontiguousarray(outcome.results[name]).tobytes())
    return hashed.hexdigest()


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    """XLA's pool takes its size from the environment when it starts, so each number needs a process of its own."""
    digests = {
        threads: subprocess.run(
            [sys.executable, __file__],
            env=os.environ
            | {
                "NPROC": str(threads),
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for threads in (1, 3)
    }
    assert {threads: int(pool) for threads, (pool, _) in digests.items()} == {1: 1, 3: 3}
    assert len({hashed for _, hashed in digests.values()}) == 1


SHORT_OF_MEMORY = """
import resource, sys
import jax, jax.numpy as jnp
import jattn

# Head dim 32768: a thread works on tiles of 150 MB or more.
x = jnp.ones((1, 64, 2, 1 << 15))
gradients = jax.grad(lambda *x: jattn.dot_product_attention(*x, implementation="cpu").sum(), (0, 1, 2))
run = jax.jit(gradients).lower(x, x, x).compile()
with open("/proc/self/statm") as sizes:
    used = int(sizes.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[1]) << 20), resource.RLIM_INFINITY))
try:
    jax.block_until_ready(run(x, x, x))
except jax.errors.JaxRuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="measures its own memory on Linux"
)
def test_a_thread_without_memory_is_an_error_and_no_crash() -> None:
    """Tasks wait for one another: a pass that lacks memory ends before the first of them begins."""
    outputs = []
    for mebibytes in (150, 250, 350):
        done = subprocess.run(
            [sys.executable, "-c", SHORT_OF_MEMORY, str(mebibytes)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert any("no memory for the tiles that a thread works on" in output for output in outputs), (
        outputs
    )


def pool_size() -> int:
    """The threads of XLA's pool, by their name."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum("Eigen" in name for name in names)


if __name__ == "__main__":
    hashed_results = digest()  # the pool starts with the first program
    print(pool_size(), hashed_results)
