"""Score functions on the CPU kernel, whose interpreter exists once for each instruction set: all operations against
JAX, and functions beside every other feature.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
from score_mods import SCORE_MODS, check_close, dense, gradients, operands

import jattn
from jattn import _core, cpu_program
from jattn.testing import cases, compare
from jattn.testing.run import compile_case
from jattn.testing.score_functions import SCORE_FUNCTIONS

Array = Any
INSTRUCTION_SETS = tuple(_core.cpu_instruction_sets())


@pytest.fixture(autouse=True)
def best_set_afterwards() -> Iterator[None]:
    yield
    assert _core.cpu_force_instruction_set("")


def on_every_set(run: Callable[[], Any]) -> Iterator[tuple[str, Any]]:
    """What a compiled program gives on each instruction set, which is chosen when the kernel is called."""
    for name in INSTRUCTION_SETS:
        assert _core.cpu_force_instruction_set(name)
        yield name, jax.device_get(run())


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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
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


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in SCORE_MODS),
        *((name, "bfloat16") for name in ("causal", "cap", "bias of head", "gain and bias")),
        *((name, "float16") for name in ("documents", "square", "relative table")),
        *((name, "float64") for name in ("square", "prefix", "bias of all", "gain and bias")),
    ],
)
def test_functions_and_gradients(name: str, dtype: str) -> None:
    score_mod, captures = SCORE_MODS[name]
    with jax.enable_x64(dtype == "float64"):
        q, k, v, dout = operands(dtype)

        def plain(q: Array, k: Array, v: Array, *captures: Array) -> Array:
            return dense(q, k, v, score_mod, captures)[0]

        def ours(q: Array, k: Array, v: Array, *captures: Array) -> Array:
            return jattn.dot_product_attention(
                q, k, v, score_mod=score_mod, captures=captures, implementation="cpu"
            )

        def flat(function: Callable[..., Array], *arrays: Array) -> list[Array]:
            out, grads = gradients(function, arrays, dout)
            return [out, *grads]

        low = flat(jax.jit(plain), q, k, v, *captures)
        run = jax.jit(lambda *arrays: flat(ours, *arrays))
        every = list(on_every_set(lambda: run(q, k, v, *captures)))
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in (q, k, v)]
        floats = [x if x.dtype == np.int32 else np.asarray(x, np.float64) for x in captures]
        exact = flat(jax.jit(plain), *wide, *floats)
    for _, got in every:
        check_close(got, low, exact, len(exact))


# ---- Beside other features -------------------------------------------------------------------------------------------

BASE = cases.Case("score-mod", q_len=130, kv_len=150, num_heads=4, num_kv_heads=2)
EVERYTHING: dict[str, Any] = {
    "is_causal": True,
    "window": (70, None),
    "bias_form": "1nts",
    "softcap": 8.0,
    "alibi_form": "n",
    "sinks_form": "n",
    "kv_lengths": (150, 90),
    "segments": "random",
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "lengths": {"q_lengths": (130, 77), "kv_lengths": (30, 150)},
    "segments": {"segments": "interleaved"},
    "mask": {"mask_form": "1nts"},
    "positions": {"positions": "shuffled", "window": (50, 60)},
    "bias": {"bias_form": "bnts"},
    "bias of keys": {"bias_form": "b11s", "is_causal": True},
    "cap": {"softcap": 5.0},
    "slopes": {"alibi_form": "n"},
    "sinks": {"sinks_form": "bn"},
    "dropout": {"dropout_rate": 0.3},
    "dropout and cap": {"dropout_rate": 0.3, "softcap": 5.0, "is_causal": True},
    "negative scale": {"scale": -0.1},
    "wide": {"head_dim": 128, "head_dim_v": 96},
    "odd": {"head_dim": 72, "head_dim_v": 40, "q_len": 129, "kv_len": 63},
    "few queries": {"q_len": 3, "kv_len": 1100},
    "one query": {"q_len": 1, "kv_len": 300, "kv_lengths": (300, 1)},
    "short": {"batch": 6, "q_len": 17, "kv_len": 23},
    "packed heads": {"q_len": 5, "kv_len": 200, "num_heads": 8, "num_kv_heads": 1},
    "everything": EVERYTHING,
}
DTYPES = ("float32", "bfloat16", "float16", "float64")


def beside_features() -> Iterator[cases.Case]:
    """Each form with a function that has slopes and reads arrays, and with another one; types take turns."""
    others = [name for name in SCORE_FUNCTIONS if name != "gain"]
    for i, (form, changes) in enumerate(FORMS.items()):
        for j, name in enumerate(("gain", others[i % len(others)])):
            dtype = DTYPES[(i + 2 * j) % len(DTYPES)]
            if name == "cap" and dtype == "float64":
                dtype = "float32"  # there is no tanh of float64
            yield BASE.but(f"{name}-{form}-{dtype}", score_mod=name, dtype=dtype, **changes)


@pytest.mark.parametrize("case", list(beside_features()), ids=str)
def test_beside_other_features(case: cases.Case) -> None:
    given, solution = compare.solved(case)
    call, _ = compile_case(case, given, "cpu")
    for name, results in on_every_set(call):
        named = {key: np.asarray(x) for key, x in results.items()}
        try:
            compare.assert_close(case, given, named, solution=solution)
        except AssertionError as error:
            raise AssertionError(f"instruction set {name}: {error}") from error
