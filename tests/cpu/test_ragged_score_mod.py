"""Score functions over ragged batches: what they mean is what they mean over the padded form."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import normal
from ragged_checks import LONG_PROGRAMS, PROGRAMS, RaggedCase, verify
from score_mods import SCORE_MODS, B, S, T, check, gradients, operands

import jattn
from jattn import RaggedArray, packed_rows
from jattn.device_code import MAX_CAPTURES
from jattn.score_program import trace

pytestmark = pytest.mark.thinned  # most of their time goes into compiling

Array = Any
attend: Callable[..., Any] = jattn.ragged_dot_product_attention
FORMS = ("packed", "padded")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jattn.FallbackWarning)
        yield


# ---- Numbers -------------------------------------------------------------------------------------------------------


def some(rows: list[tuple[Any, ...]], every: int) -> list[Any]:
    """Every n-th row, and the rest under --full."""
    return [
        pytest.param(*row, marks=() if i % every == 0 else pytest.mark.full)
        for i, row in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("case", "backend", "form"),
    [
        *some([(case, "xla", "packed") for case in PROGRAMS if not case.dropout_rate], 2),
        *some([(case, "xla", "padded") for case in PROGRAMS], 5),
        *some([(case, "xla", "packed") for case in LONG_PROGRAMS], 4),
        *some([(case, "reference", form) for case in PROGRAMS[2::8] for form in FORMS], 3),
    ],
    ids=str,
)
def test_sequences_equal_the_oracle(case: RaggedCase, backend: str, form: str) -> None:
    """With every other feature, NaN in all padding, gradients of captures summed over the sequences."""
    verify(case, backend, form=form)


Q_LENGTHS, KV_LENGTHS = np.array([T, 0, 41, 17]), np.array([S, 30, 0, 53])
Q_INSIDE, KV_INSIDE = (
    np.arange(length) < lengths[:, None] for length, lengths in ((T, Q_LENGTHS), (S, KV_LENGTHS))
)
VISIBLE = (Q_INSIDE[:, :, None] & KV_INSIDE[:, None])[:, None]


def of_four(x: Array) -> Array:
    """An array of two batch entries, or of what they share, for four."""
    return np.concatenate([x, x[::-1]]) if np.shape(x)[:1] == (B,) else x


def rows_of(x: Array, inside: Array) -> RaggedArray:
    """The sequences of a padded batch (B, T, ...), each from a multiple of 16 on, with NaN in the holes."""
    lengths = inside.sum(1)
    offsets = np.concatenate([[0], np.cumsum(-(-lengths // 16) * 16)])
    rows = np.concatenate(
        [a + np.arange(n) for a, n in zip(offsets, lengths, strict=False)]
    ).astype(np.int32)
    values = jnp.full((offsets[-1] + 5, *x.shape[2:]), jnp.nan, x.dtype)
    return RaggedArray(
        values.at[rows].set(x[np.nonzero(inside)]),
        jnp.asarray(offsets, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        inside.shape[1],
    )


@pytest.mark.parametrize(
    ("name", "backend", "form"),
    [
        *some([(name, "xla", "packed") for name in SCORE_MODS], 3),
        *some([(name, "reference", "packed") for name in ("bias of all", "documents of batch")], 2),
        *some([(name, "xla", "padded") for name in ("gain and bias", "prefix", "relative")], 3),
    ],
)
def test_F100_results_and_gradients(name: str, backend: str, form: str) -> None:
    """Of q, k, v and every capture that is a float, against the padded batch in float64; two sequences are empty."""
    score_mod, captures = SCORE_MODS[name]
    captures = tuple(of_four(x) for x in captures)
    q, k, v, dout = (of_four(x) for x in operands("float32"))
    dout = np.where(Q_INSIDE[..., None, None], dout, 0)

    def ours(q: Array, k: Array, v: Array, *captures: Array) -> Array:
        of_q, of_k, of_v = rows_of(q, Q_INSIDE), rows_of(k, KV_INSIDE), rows_of(v, KV_INSIDE)
        out = attend(
            of_q, of_k, of_k.with_values(of_v.values), score_mod=score_mod, captures=captures,
            implementation=backend, form=form,
        )  # fmt: skip
        return out.to_padded()[0]

    out, grads = gradients(jax.jit(ours), (q, k, v, *captures), dout)
    check([out, *grads], score_mod, captures, [q, k, v, dout], VISIBLE)


LENGTHS = ((6, 0, 11, 1), (7, 4, 0, 9))


def small(alignment: int = 4, seed: int = 0) -> tuple[RaggedArray, RaggedArray, RaggedArray]:
    """Queries, keys and values: of different sequences, an empty one on either side."""
    rng = np.random.default_rng(seed)

    def drawn(lengths: tuple[int, ...], heads: int) -> RaggedArray:
        parts = [jnp.asarray(rng.normal(size=(n, heads, 8)), jnp.float32) for n in lengths]
        return RaggedArray.from_list(parts, alignment=alignment)

    q, k = drawn(LENGTHS[0], 4), drawn(LENGTHS[1], 2)
    return q, k, k.with_values(drawn(LENGTHS[1], 2).values)


def learned(s: Array, b: Array, h: Array, q: Array, k: Array, x: Array, gain: Array) -> Array:
    return jnp.tanh(s) * x[b, h, q, k] + gain[h] * (q - k)


def learnt(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> tuple[Array, Array]:
    """What ``learned`` reads, no element more than there are pairs."""
    return normal(7, len(lengths[0]), 4, max(lengths[0]), max(lengths[1])), normal(8, 4)


def loss_of(**keywords: Any) -> Callable[..., Array]:
    """A function of values and captures."""
    q, k, v = small()

    def loss(of_q: Array, of_k: Array, of_v: Array, *captures: Array) -> Array:
        rows = (x.with_values(y) for x, y in zip((q, k, v), (of_q, of_k, of_v), strict=True))
        out, lse = attend(*rows, score_mod=learned, captures=captures, return_lse=True, **keywords)
        real = lse.values > -jnp.inf
        return (out.values**2).sum() + jnp.where(real, jnp.cos(lse.values), 0).sum()

    return loss


def arguments() -> list[Array]:
    return [*(x.values for x in small()), *learnt()]


@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
def test_both_forms_agree_under_transformations(alignment: str) -> None:
    """Forward mode, gradients of gradients, checkpoints and mapped captures, of operands and captures at once.

    The alignment only moves the queries: of the other one gradients show it.
    """

    def transformed(form: str) -> Any:
        loss = loss_of(form=form, implementation="xla", is_causal=True, causal_alignment=alignment)
        places = tuple(range(5))

        @jax.jit
        def run(*given: Array) -> list[Array]:
            if alignment == "upper_left":
                return [*jax.grad(loss, places)(*given)]
            grads = jax.grad(jax.checkpoint(loss), places)
            moved = jax.jvp(loss, given, tuple(map(jnp.sin, given)))[1]
            twice = jax.grad(lambda *x: sum((g**2).sum() for g in grads(*x)), (0, 3))
            tables = jnp.stack([given[3], -given[3], given[3] / 2])
            mapped = jax.vmap(jax.grad(loss, (0, 3, 4)), (None, None, None, 0, None))
            return [*grads(*given), moved, *twice(*given), *mapped(*given[:3], tables, given[4])]

        return run(*arguments())

    for a, b in zip(transformed("packed"), transformed("padded"), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, float(jnp.abs(b).max())))


def test_vmap_over_the_sequences_themselves() -> None:
    """Mapped values, offsets and captures, each element by itself."""
    q, k, v = small(1)
    captures = learnt()
    others = [jnp.stack([x, 2 * x]) for x in captures]
    offsets = jnp.stack([q.offsets, jnp.array([0, 1, 5, 16, 18], jnp.int32)])

    def run(values: Array, offsets: Array, *captures: Array) -> Array:
        rows = RaggedArray(values, offsets, None, 11)
        return attend(
            rows, k, v, score_mod=learned, captures=captures, form="packed", implementation="xla"
        ).values

    values = jnp.stack([q.values, -q.values])
    got = jax.vmap(run)(values, offsets, *others)
    for i in range(2):
        want = run(values[i], offsets[i], *(x[i] for x in others))
        np.testing.assert_allclose(got[i], want, atol=2e-6)


# ---- Indices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", ["upper_left", "lower_right"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_self", [False, True])
def test_F101_indices_count_in_their_sequence(form: str, alignment: str, is_self: bool) -> None:
    """Each query sees one key, which depends on all four indices; wherever the diagonal of a window lies."""
    q, k, _ = small()
    k = q.with_values(q.values[:, :2]) if is_self else k
    counts = np.array(LENGTHS[0] if is_self else LENGTHS[1])
    places = (jnp.arange(k.values.shape[0]) - k.bounds()[0][k.segment_ids()])[:, None, None]
    v = k.with_values(jnp.broadcast_to(places, k.values.shape).astype(jnp.float32))
    lengths = jnp.asarray(counts)

    def one(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return jnp.where(k == (q + 3 * h + 7 * b) % jnp.maximum(lengths[b], 1), 0.0, -jnp.inf)

    found = attend(
        q, k, v, score_mod=one, form=form, implementation="xla",
        local_window_size=(99, 99), causal_alignment=alignment,
    ).to_list()  # fmt: skip
    for b, out in enumerate(found):
        t, h = np.ogrid[: out.shape[0], :4]
        want = (t + 3 * h + 7 * b) % max(counts[b], 1)
        np.testing.assert_array_equal(out[..., 0], np.broadcast_to(want, out.shape[:2]))


def test_a_repeated_sequence_has_the_number_of_its_copy() -> None:
    """One sequence of queries for all those of keys, and one head of keys for all."""
    q, k, v = small()
    q = RaggedArray.from_list([q.to_list()[2]])
    captures = normal(7, 4, 4, 11, 9), normal(8, 4)
    packed, padded = (
        attend(q, k, v, score_mod=learned, captures=captures, form=form, implementation="xla")
        for form in FORMS
    )
    assert packed.num_sequences == 4
    np.testing.assert_allclose(packed.values, padded.values, atol=2e-6)
    alone = attend(
        q, *(RaggedArray.from_list([x.to_list()[3]]) for x in (k, v)), score_mod=learned,
        captures=(captures[0][3:], captures[1]), implementation="xla",
    )  # fmt: skip
    np.testing.assert_allclose(packed.to_list()[3], alone.values, atol=2e-6)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_hidden_pairs_read_what_visible_ones_could(backend: str) -> None:
    """Beyond the arrays stands NaN, which the gradient of another capture would catch from pairs without weight."""
    q, k, v = small()
    table, gain = normal(7, 4, 11), normal(8, 4, 9)

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array, x: Array, y: Array) -> Array:
        filled = {"mode": "fill", "fill_value": jnp.nan}
        return s * x.at[b, q].get(**filled) * y.at[b, k].get(**filled)

    def loss(form: str, *captures: Array) -> Array:
        out = attend(
            q, k, v, score_mod=score_mod, captures=captures, form=form, implementation=backend
        )
        return (out.values**2).sum()

    packed, padded = (jax.grad(loss, (1, 2))(form, table, gain) for form in FORMS)
    for a, b in zip(packed, padded, strict=True):
        assert jnp.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("offsets", [[-5, 3, 900], [7, 2, 10], [9, 9, 9], [2**31 - 1, -(2**31), 3]])
def test_wrong_offsets_under_jit_stay_inside(offsets: list[int], form: str) -> None:
    """They are clamped, as without a score function; what it reads is what the sequences there have."""
    x = normal(0, 12, 2, 8)
    table = normal(1, 2, 12, 12)

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return s + table.at[b, q, k].get(mode="fill", fill_value=jnp.nan)

    @jax.jit
    def run(offsets: Array) -> Any:
        rows = RaggedArray(x, offsets)
        keys = RaggedArray(x, offsets + 0)
        return attend(rows, keys, keys, score_mod=score_mod, form=form, implementation="xla"), rows

    found, rows = run(jnp.asarray(offsets, jnp.int32))
    starts, stops = (np.asarray(edge) for edge in rows.bounds())
    real = np.zeros(12, bool)
    for b, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        part = x[None, start:stop]
        if stop > start:
            bias = table[b, : stop - start, : stop - start]
            want = jattn.dot_product_attention(part, part, part, bias, implementation="xla")
            np.testing.assert_allclose(found.values[start:stop], want[0], atol=2e-6)
        real[start:stop] = True
    assert not np.asarray(found.values)[~real].any()


def test_R107_other_offsets_need_no_new_trace() -> None:
    q, k, v = small()
    traces = []

    @jax.jit
    def run(offsets: Array) -> Array:
        traces.append(1)
        rows = RaggedArray(q.values, offsets, None, 11)
        return attend(rows, k, v, score_mod=learned, captures=learnt(), implementation="xla").values

    one = run(jnp.array([0, 3, 3, 14, 20], jnp.int32))
    assert not np.allclose(one, run(jnp.array([0, 8, 9, 10, 20], jnp.int32)))
    assert len(traces) == 1


@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.parametrize(("count", "total"), [(0, 4), (0, 0), (3, 0), (3, 4)])
def test_R052_nothing_but_padding(form: str | None, count: int, total: int) -> None:
    """No sequence, no row, or both: a function is still traced."""
    x = RaggedArray(jnp.full((total, 2, 8), jnp.nan), jnp.zeros(count + 1, jnp.int32))
    y = RaggedArray(x.values, x.offsets + 0)
    table = jnp.ones(3)

    def loss(table: Array) -> Any:
        out, lse = attend(
            x, y, y, score_mod=lambda s, b, h, q, k: s * table[h], form=form, return_lse=True
        )
        return out.values.sum(), (out.values, lse.values)

    grad, (out, lse) = jax.grad(loss, has_aux=True)(table)
    assert (np.asarray(out) == 0).all()
    assert np.isneginf(np.asarray(lse)).all()
    assert (grad == 0).all()


# ---- Programs ------------------------------------------------------------------------------------------------------


def program_of(total: int) -> Any:
    rows = RaggedArray(jnp.zeros((total, 1, 8)), jnp.array([0, 5, total], jnp.int32))
    on_rows = packed_rows.on_rows(
        SCORE_MODS["relative"][0], rows, rows, packed_rows.key_origins(rows, None)
    )
    return trace(on_rows, (), 1)[0]


def test_F115_batches_of_similar_sizes_share_a_program() -> None:
    assert program_of(40) == program_of(64)
    assert program_of(64) != program_of(65)


def test_known_slopes_stay_known() -> None:
    """Biases and masks keep their kernels."""
    assert program_of(40).has_unit_slope
    assert len(program_of(40).captures) == 1


def test_what_runs_on_a_hopper_gpu() -> None:
    """The packed form on flash; the padded one with dropout, and where a capture more is one too many."""
    q, k, v = (x.with_values(x.values.astype(jnp.bfloat16)) for x in small())

    learned_and_read = learned, learnt()

    def batch(score_mod: Any, captures: Any, **keywords: Any) -> int:
        jaxpr = jax.make_jaxpr(
            lambda: (
                attend(
                    q,
                    k,
                    v,
                    score_mod=score_mod,
                    captures=captures,
                    implementation="flash",
                    **keywords,
                ).values
            )
        )()
        [equation] = [e for e in jaxpr.eqns if e.primitive.name == "jattn_forward"]
        found: int = equation.params["spec"].batch
        return found

    with jattn.target_device(jattn.Device("cuda", arch=(9, 0))):
        assert batch(*learned_and_read) == 1
        assert batch(*learned_and_read, dropout_rate=0.5, dropout_seed=1) == 4
        assert batch(*learned_and_read, form="padded") == 4
        many = [jnp.full(9, i, jnp.float32) for i in range(MAX_CAPTURES)]
        assert batch(lambda s, b, h, q, k, *x: s + sum(y[k] for y in x), many) == 4
        assert batch(lambda s, b, h, q, k, *x: s + sum(y[k] for y in x), many[1:]) == 1
        warned = pytest.warns(UserWarning, match="CAPTURES")
        with warned, pytest.raises(jattn.NoBackendError, match="CAPTURES"):
            batch(lambda s, b, h, q, k, *x: s + sum(y[k] for y in x), [*many, many[0] + 1])


# ---- Calls ---------------------------------------------------------------------------------------------------------


def test_cumulative_lengths_take_score_functions() -> None:
    q, k, v = small(1)
    captures = learnt()
    want = attend(
        q, k, v, score_mod=learned, captures=captures, causal_alignment="lower_right",
        is_causal=True,
    )  # fmt: skip
    found = jattn.flash_mha_varlen(
        *(x.values for x in (q, k, v)), q.offsets, k.offsets, max_seqlen_q=11, max_seqlen_k=9,
        is_causal=True, score_mod=learned, captures=captures,
    )  # fmt: skip
    np.testing.assert_allclose(found, want.values, atol=2e-6)


def test_a_ragged_batch_axis() -> None:
    """Rows of rank 3: the dense call's functions and block masks, ``batch`` being the number of the row."""
    rows = normal(0, 5, 6, 2, 8)
    x = RaggedArray(
        jnp.concatenate([rows, jnp.full((2, 6, 2, 8), jnp.nan)]), jnp.array([0, 2, 5], jnp.int32)
    )
    table = normal(1, 7, 2)

    def score_mod(s: Array, b: Array, h: Array, q: Array, k: Array) -> Array:
        return s * table[b, h] + b * (q - k)

    block_mask = jattn.create_block_mask(lambda b, h, q, k: (q + k + b) % 3 > 0, 7, None, 6, 6)
    out = attend(x, x, x, score_mod=score_mod, block_mask=block_mask)
    want = jattn.dot_product_attention(
        rows, rows, rows, mask=block_mask.materialize()[:5], score_mod=score_mod
    )
    np.testing.assert_allclose(out.values[:5], want, atol=2e-6)
    assert not np.asarray(out.values[5:]).any()


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no function": ({"score_mod": 3}, TypeError, "score_mod is 3, must be a function"),
    "a capture that is no array": (
        {"score_mod": lambda s, b, h, q, k, x: s, "captures": (2.0,)},
        TypeError,
        r"captures\[0\] is 2.0, must be an array",
    ),
    "captures without a function": ({"captures": (np.ones(3),)}, ValueError, "without score_mod"),
    "too few arguments": (
        {"score_mod": lambda s, b, h, q: s},
        TypeError,
        r"signature \(s, b, h, q\), must take 5 arguments: score_mod",
    ),
    "several results": (
        {"score_mod": lambda s, b, h, q, k: (s, s)},
        TypeError,
        "Expected output of score_mod to be a tensor. Got type tuple",
    ),
    "a print": (
        {"score_mod": lambda s, b, h, q, k: [jax.debug.print("{}", s), s][1]},
        ValueError,
        "Mutations detected in score_mod",
    ),
    "the packed form with dropout": (
        {
            "score_mod": lambda s, b, h, q, k: s,
            "dropout_rate": 0.5,
            "dropout_seed": 1,
            "form": "packed",
        },
        ValueError,
        "form is 'packed', which cannot hold dropout together with score_mod: pass form=None",
    ),
    "a block mask": (
        {"block_mask": jattn.BlockMask(np.ones((1, 1, 1, 1), bool), 11, 9, (128, 128))},
        ValueError,
        "Got block_mask for ragged sequences: use is_causal, .* a score_mod, which hides a pair by -inf",
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("form", [None, "padded"])
@pytest.mark.parametrize("name", ERRORS)
def test_F110_errors(name: str, form: str | None) -> None:
    keywords, error, text = ERRORS[name]
    with pytest.raises(error, match=text):
        attend(*small(), **({"form": form} | keywords))


def test_more_rows_than_positions_hold_are_padded() -> None:
    """Queries stand at their rows, which positions hold up to 2^29; in self-attention none are needed."""
    offsets = jax.ShapeDtypeStruct((3,), jnp.int32)
    shape = jax.ShapeDtypeStruct((2**29, 1, 8), jnp.bfloat16)

    def run(form: str | None, of_keys: Array, values: Array, offsets: Array) -> Array:
        q = RaggedArray(values, offsets, None, 4)
        k = q if of_keys is None else RaggedArray(values, of_keys, None, 4)
        return attend(
            q, k, k, score_mod=lambda s, b, h, q, k: s + q, form=form, implementation="xla"
        ).values

    with pytest.raises(ValueError, match="cannot hold score_mod together with 1073741824 rows"):
        jax.eval_shape(lambda *x: run("packed", *x), offsets, shape, offsets)
    jax.eval_shape(lambda *x: run(None, *x), offsets, shape, offsets)
    jax.eval_shape(lambda *x: run("packed", None, *x), shape, offsets)


HEADS_OVER_A_MESH = """
import re
import jax, jax.numpy as jnp, numpy as np, jattn
from jax.sharding import NamedSharding, PartitionSpec as P
rng = np.random.default_rng(0)
rows = lambda heads: jnp.asarray(rng.standard_normal((40, heads, 16)), jnp.float32)
offsets = jnp.asarray([0, 9, 9, 31, 37], jnp.int32)
q = jattn.RaggedArray(rows(4), offsets, None, 22)
k, v = q.with_values(rows(2)), q.with_values(rows(2))
mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
put = lambda x: x.with_values(jax.device_put(x.values, NamedSharding(mesh, P(None, "model"))))
table = jnp.asarray(rng.standard_normal((4, 4, 22)), jnp.float32)
def step(form):
    def run(q, k, v, table):
        call = lambda a, b, c, table: jattn.ragged_dot_product_attention(
            q.with_values(a), k.with_values(b), v.with_values(c), is_causal=True, implementation="xla", form=form,
            score_mod=lambda s, b, h, q, k: s * (h + 1) / 4 + table[b, h, q - k]).values
        out, pullback = jax.vjp(call, q.values, k.values, v.values, table)
        return out, pullback(out)
    return run
for form in ("packed", "padded"):
    want = jax.jit(step(form))(q, k, v, table)
    run = jax.jit(step(form)).lower(*map(put, (q, k, v)), table).compile()
    for a, b in zip(jax.tree.leaves(run(*map(put, (q, k, v)), table)), jax.tree.leaves(want)):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
    found = set(re.findall(r"all-gather|all-to-all|collective-permute", run.as_text()))
    assert not found, found
print("ok")
"""


def test_F112_heads_of_ragged_batches_over_a_mesh() -> None:
    """Two virtual devices: heads count in the whole problem, and nothing is gathered."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", HEADS_OVER_A_MESH],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "ok", done.stderr[-3000:]
