"""Score functions inside the CUDA kernels: the same results as everywhere, on the kernels that were asked for.

F numbers are rows of the acceptance list of score functions; tests/score_mods.py has the functions and plain attention.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import normal
from ragged_checks import LONG_PROGRAMS, PROGRAMS, RaggedCase
from ragged_checks import verify as verify_ragged
from score_mods import SCORE_MODS, check, floats_of, forms, gradients, operands

import jattn
from jattn.testing.cases import Case
from jattn.testing.run import assert_ran, verify
from jattn.testing.score_functions import SCORE_FUNCTIONS

pytestmark = pytest.mark.backends("flash", "mem_efficient")

Array = Any
BASE = Case(
    "score-mod",
    q_len=300,
    kv_len=421,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    head_dim_v=64,
    dtype="bfloat16",
)
FORMS: dict[str, dict[str, Any]] = forms(BASE) | {
    "wide": {"head_dim": 128, "head_dim_v": 128},
    "wider": {"head_dim": 192, "head_dim_v": 128, "is_causal": True},
    "widest": {"head_dim": 256, "head_dim_v": 256},
    "few queries": {"q_len": 3, "kv_len": 2048},
    "many items": {"batch": 8, "num_heads": 24, "num_kv_heads": 24, "q_len": 512, "kv_len": 512},
    "everything wide": forms(BASE)["everything"] | {"head_dim": 128, "head_dim_v": 128},
}
CASES = [
    BASE.but(f"{name}-{form}", score_mod=name, **changes)
    for name in SCORE_FUNCTIONS
    for form, changes in FORMS.items()
]
CASES += [BASE.but(f"{name}-f16", score_mod=name, dtype="float16") for name in SCORE_FUNCTIONS]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flash(case: Case) -> None:
    """Forward on sm_90's own kernels; so is the backward, but for a few combinations with slopes other than 1."""
    program = r"sm90_forward [^;]*program=1"
    capped_bias = case.softcap is not None and case.bias_form is not None
    if case.score_mod in ("table", "prefix") or not (case.dropout_rate or capped_bias):
        program += r"(.|\n)*sm90_backward[a-z_]* [^;]*program=1"
    verify(case, "flash", kernel=program)


FLOAT32 = [
    BASE.but(f"{name}-{form}-f32", score_mod=name, dtype="float32", **FORMS[form])
    for name in SCORE_FUNCTIONS
    for form in ("plain", "causal", "wide", "widest", "everything", "dropout", "odd")
]


@pytest.mark.parametrize("case", [*CASES[::3], *FLOAT32], ids=str)
def test_mem_efficient(case: Case) -> None:
    verify(case, "mem_efficient", kernel=r"sm80_forward [^;]*program=1")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bfloat16") for name in SCORE_MODS),
        *((name, "float32") for name in list(SCORE_MODS)[::2]),
    ],
)
def test_F100_results_and_gradients(name: str, dtype: str) -> None:
    """Of q, k, v and every capture that is a float."""
    score_mod, captures = SCORE_MODS[name]
    q, k, v, dout = operands(dtype, head_dim=64)

    def ours(q: Array, k: Array, v: Array, *captures: Array) -> Array:
        return jattn.dot_product_attention(q, k, v, score_mod=score_mod, captures=captures)

    def run(*arrays: Array) -> list[Array]:
        out, grads = gradients(ours, arrays, dout)
        return [out, *grads]

    backend = "mem_efficient" if dtype == "float32" else "flash"
    before = jattn.call_counters()
    lowered = jax.jit(run).lower(q, k, v, *captures)
    text = lowered.as_text()
    assert_ran(backend, before, text, passes=("forward", "backward"))
    assert ("family=sm80_backward_dcaptures " in text) == bool(floats_of(captures))
    got = lowered.compile()(q, k, v, *captures)
    check(got, score_mod, captures, [q, k, v, dout])


def test_F112_vmap_over_captures() -> None:
    """Entries of the folded batch find the table of their own mapped element."""
    q, k, v = (normal(seed, 2, 200, 2, 64, dtype="bfloat16") for seed in range(3))
    tables = normal(4, 3, 2, 2, 400)

    def run(table: Array, **keywords: Any) -> Array:
        def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
            return s + table[b, h, q - k + 200]

        return jattn.dot_product_attention(q, k, v, score_mod=score_mod, **keywords)

    got = jax.jit(jax.vmap(lambda t: run(t, implementation="flash")))(tables)
    want = jnp.stack([run(t, implementation="xla") for t in tables])
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=2e-2)


HALF = [
    case.but("bf16", dtype="bfloat16", head_dim=64, head_dim_v=64)
    if case.dtype == "float32"
    else case
    for case in PROGRAMS
]


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *((case, "flash") for case in (*HALF, *LONG_PROGRAMS)),
        *((case, "mem_efficient") for case in (*PROGRAMS, *LONG_PROGRAMS)),
    ],
    ids=str,
)
def test_ragged_batches(case: RaggedCase, backend: str) -> None:
    """Packed rows, and the padded form beside dropout; NaN in all padding, gradients of captures too."""
    verify_ragged(case, backend)


@pytest.mark.parametrize("backend", ["flash", "mem_efficient"])
@pytest.mark.parametrize("form", ["packed", "padded"])
def test_ragged_indices_count_in_their_sequence(form: str, backend: str) -> None:
    """The capture has an element for each pair and no more, and every head and sequence its own."""
    q_lengths, kv_lengths = (130, 0, 77, 200), (65, 90, 0, 300)

    def rows(lengths: tuple[int, ...], seed: int, heads: int) -> jattn.RaggedArray:
        parts = [normal(seed + i, n, heads, 64, dtype="bfloat16") for i, n in enumerate(lengths)]
        return jattn.RaggedArray.from_list(parts, alignment=8)

    q, k = rows(q_lengths, 0, 4), rows(kv_lengths, 10, 2)
    v = k.with_values(rows(kv_lengths, 20, 2).values)
    table = normal(5, 4, 4, 200, 300)

    def run(of_q: Array, table: Array, form: str, backend: str) -> Array:
        out = jattn.ragged_dot_product_attention(
            q.with_values(of_q), k, v, form=form, implementation=backend, is_causal=True,
            causal_alignment="lower_right",
            score_mod=lambda s, b, h, q, k: s + table[b, h, q, k] + jnp.sin(b + q - k),
        )  # fmt: skip
        assert isinstance(out, jattn.RaggedArray)
        return out.values.astype(jnp.float32)

    def with_gradients(form: str, backend: str) -> list[Array]:
        def loss(*arrays: Array) -> tuple[Array, Array]:
            out = run(*arrays, form, backend)
            return (out**2).sum(), out

        grads, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(q.values, table)
        return [out, *grads]

    got, want = with_gradients(form, backend), with_gradients("padded", "xla")
    for a, b in zip(got, want, strict=True):
        x, y = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(x, y, atol=2e-2 * max(1.0, np.abs(y).max()))


@pytest.mark.parametrize("backend", ["flash", "mem_efficient"])
def test_F101_indices_in_their_order_and_from_0(backend: str) -> None:
    b, t, n, s = 3, 200, 4, 300
    q, k = normal(0, b, t, n, 64, dtype="bfloat16"), normal(1, b, s, n, 64, dtype="bfloat16")
    v = jnp.broadcast_to((jnp.arange(s)[None, :, None, None] - 150.0), (b, s, n, 64))

    def last(score: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return jnp.where(k == (q + 3 * h + 7 * b) % s, 0.0, -jnp.inf)

    out = jattn.dot_product_attention(
        q, k, v.astype("bfloat16"), score_mod=last, implementation=backend
    )
    want = (np.arange(t)[None, :, None] + 3 * np.arange(n) + 7 * np.arange(b)[:, None, None]) % s
    want = np.asarray(jnp.asarray(want - 150.0, "bfloat16"), np.float32)
    np.testing.assert_array_equal(np.asarray(out[..., 0], np.float32), want)


@pytest.mark.parametrize("backend", ["flash", "mem_efficient"])
def test_F113_rows_without_keys(backend: str) -> None:
    q, k, v = (normal(seed, 2, 150, 2, 64, dtype="bfloat16") for seed in range(3))

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return jnp.where((q % 5 != 0) & (k != 7), jnp.log(s * s), -jnp.inf)

    def run(q: Array, k: Array, v: Array) -> Any:
        return jattn.dot_product_attention(
            q, k, v, score_mod=score_mod, return_lse=True, implementation=backend
        )

    (out, lse), pull = jax.vjp(run, q, k, v)
    assert (out[:, ::5] == 0).all()
    assert (lse[:, ::5] == -jnp.inf).all()
    dq, dk, dv = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    assert (dq[:, ::5] == 0).all()
    assert (dk[:, 7] == 0).all()
    assert (dv[:, 7] == 0).all()
    for x in (dq, dk, dv):
        assert jnp.isfinite(x.astype(jnp.float32)).all()


@pytest.mark.parametrize("backend", ["flash", "mem_efficient"])
@pytest.mark.parametrize("kind", ["plain", "slopes", "dropout"])
def test_rows_that_a_function_hides_whole(kind: str, backend: str) -> None:
    """Kernels clear such queries, and meet scores of 0 then, of which the function makes NaN."""
    q, k, v = (normal(seed, 1, 150, 2, 64, dtype="bfloat16") for seed in range(3))
    q, k = (
        jnp.abs(q).at[:, 3].multiply(-1),
        jnp.abs(k),
    )  # scores are positive, those of query 3 negative
    table = jnp.ones(150)

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array, table: Array) -> Array:
        return jnp.where(s < 0, -jnp.inf, s * jnp.log(s) * table[k])

    options: dict[str, Any] = {"slopes": {"alibi_slopes": jnp.zeros(2)}}.get(kind, {})
    if kind == "dropout":
        options = {"dropout_rate": 0.2, "dropout_seed": 1}

    def run(*arrays: Array) -> Array:
        return jattn.dot_product_attention(
            *arrays[:3], score_mod=score_mod, captures=arrays[3:], implementation=backend, **options
        )

    out, pull = jax.vjp(run, q, k, v, table)
    gradients = pull(jnp.ones_like(out))
    assert (out[:, 3] == 0).all()
    assert (gradients[0][:, 3] == 0).all()
    for x in (out, *gradients):
        assert jnp.isfinite(x.astype(jnp.float32)).all()


@pytest.mark.parametrize("backend", ["flash", "mem_efficient"])
@pytest.mark.parametrize("number", [1e38, 2.35e38, 3e38, -1e38, -3e38])
def test_rows_of_one_large_score(number: float, backend: str) -> None:
    """From 2.36e38 on such a score is infinite in base 2. All keys count alike, and no gradient overflows."""
    q, k, v = (normal(seed, 1, 150, 2, 64, dtype="bfloat16") for seed in range(3))

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return jnp.where(q == 5, number, s)

    def run(q: Array, k: Array, v: Array) -> Array:
        return jattn.dot_product_attention(q, k, v, score_mod=score_mod, implementation=backend)

    out, pull = jax.vjp(run, q, k, v)
    gradients = pull(jnp.ones_like(out))
    assert jnp.abs(out[:, 5] - v.astype(jnp.float32).mean(1)).max() <= 2e-3
    assert (gradients[0][:, 5] == 0).all()
    for x in (out, *gradients):
        assert jnp.isfinite(x.astype(jnp.float32)).all()


@pytest.mark.parametrize("backend", ["flash", "mem_efficient"])
@pytest.mark.parametrize("name", ["relative table", "cap", "documents", "gain and bias", "bias"])
def test_F117_the_same_bits_every_time(name: str, backend: str) -> None:
    """Gradients of captures among them, which are those that are added up in any order but for rounding."""
    score_mod, captures = SCORE_MODS[name]
    q, k, v, dout = operands("bfloat16", head_dim=64)

    def run(*arrays: Array) -> Any:
        def ours(q: Array, k: Array, v: Array, *captures: Array) -> Array:
            return jattn.dot_product_attention(
                q, k, v, score_mod=score_mod, captures=captures, implementation=backend
            )

        return gradients(ours, arrays, dout)

    relaxed = jax.tree.leaves(jax.jit(run)(q, k, v, *captures))
    with jattn.deterministic("strict"):
        compiled = jax.jit(run)
        lowered = compiled.lower(q, k, v, *captures).as_text()
        assert ("family=sm80_backward_dcaptures_exact" in lowered) == bool(floats_of(captures))
        first = jax.tree.leaves(compiled(q, k, v, *captures))
        for _ in range(20):
            for a, b in zip(first, jax.tree.leaves(compiled(q, k, v, *captures)), strict=True):
                np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    for a, b in zip(first[4:], relaxed[4:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


READS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "of everything": (lambda s, b, h, q, k, x: s * x[0], (1,)),
    "of a head": (lambda s, b, h, q, k, x: s + x[b, h] * (k % 5), (2, 4)),
    "of a query": (lambda s, b, h, q, k, x: s + x[h, q] * (k % 5), (4, 1300)),
    "of a key": (lambda s, b, h, q, k, x: s + x[b, k], (2, 1100)),
    "of a distance": (lambda s, b, h, q, k, x: s + x[h, q - k + 1100], (4, 2400)),
    "of a bucket": (lambda s, b, h, q, k, x: s + x[h, abs(q - k) // 100], (4, 13)),
    "of a pair": (lambda s, b, h, q, k, x: s + x[q, k], (1300, 1100)),
    "of a score": (lambda s, b, h, q, k, x: x[jnp.clip(4 * s + 8, 0, 15).astype(int)], (16,)),
    "many": (
        lambda s, b, h, q, k, x: s + sum(x[i, (q + i * k) % 50] for i in range(8)) / 8,
        (8, 50),
    ),
}


@pytest.mark.parametrize("determinism", ["off", "strict"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", READS)
def test_F109_every_way_of_reading(name: str, dtype: str, determinism: Any) -> None:
    """More than one tile along each axis, a band, and lengths: XLA's gradients of the same problem."""
    score_mod, shape = READS[name]
    q, dout = (normal(seed, 2, 1300, 4, 64, dtype=dtype) for seed in (0, 3))
    k, v = (normal(seed, 2, 1100, 2, 64, dtype=dtype) for seed in (1, 2))
    x = 1 + 0.1 * normal(4, *shape)

    def run(x: Array, implementation: str) -> Array:
        def ours(x: Array) -> Array:
            return jattn.dot_product_attention(
                q,
                k,
                v,
                score_mod=score_mod,
                captures=(x,),
                is_causal=True,
                key_value_seq_lengths=jnp.asarray([1100, 700]),
                implementation=implementation,
            )

        return jax.vjp(ours, x)[1](dout)[0]

    backend = "mem_efficient" if dtype == "float32" else "flash"
    with jattn.deterministic(determinism):
        compiled = jax.jit(functools.partial(run, implementation=backend))
        assert "family=sm80_backward_dcaptures" in compiled.lower(x).as_text()
        got = np.asarray(compiled(x), np.float64)
    want = np.asarray(jax.jit(functools.partial(run, implementation="xla"))(x), np.float64)
    size = np.abs(want).max()
    assert size > 0
    # What is summed has the rounding of out in it; its terms cancel.
    allowed = size * 2.0 ** (-4 if dtype == "bfloat16" else -9)
    assert np.abs(got - want).max() <= allowed, (np.abs(got - want).max() / size, size)


def test_F109_gradients_that_are_not_finite() -> None:
    """Say so, whichever way they are added up."""
    q, k, v = (normal(seed, 1, 200, 2, 64, dtype="bfloat16") for seed in range(3))
    table = jnp.zeros(200)

    def loss(table: Array) -> Array:
        out = jattn.dot_product_attention(
            q,
            k,
            v,
            score_mod=lambda s, b, h, q, k: s + table[k],
            implementation="flash",
        )
        return jnp.sum(out * jnp.where(jnp.arange(200)[:, None, None] == 7, jnp.inf, 1.0))

    for determinism in ("off", "strict"):
        with jattn.deterministic(determinism):  # type: ignore[arg-type]
            assert not np.isfinite(jax.jit(jax.grad(loss))(table)).all()


def test_F115_other_captures_need_no_other_kernel() -> None:
    q, k, v = (normal(seed, 1, 100, 2, 64, dtype="bfloat16") for seed in range(3))

    def digests(table: Array, factor: float) -> list[str]:
        def run(q: Array) -> Array:
            return jattn.dot_product_attention(
                q,
                k,
                v,
                score_mod=lambda s, b, h, q, k: s * factor + table[h, k],
                implementation="flash",
            )

        return re.findall("digest=([0-9a-f]{64})", jax.jit(run).lower(q).as_text())

    one, other = normal(3, 2, 100), normal(4, 2, 100)
    assert len(digests(one, 1.25)) == 1
    assert digests(one, 1.25) == digests(other, 1.25)
    assert digests(one, 1.25) != digests(one, 1.5)
