"""Ragged batches: rows R001 to R113 and the ragged rows among T045 to T079.

Every sequence of a result is compared with the float64 oracle by itself (`ragged_checks.verify`), with NaN in all
padding; what is left is about the type, the conversions, refusals and transformations.
"""

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zero_sizes
from drawn import bernoulli, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_checks import FEATURES, R100, T079, RaggedCase, drawn_lengths, make, run, verify

import jattn
from jattn import RaggedArray

attend: Callable[..., Any] = jattn.ragged_dot_product_attention


def jitted(**options: Any) -> Callable[..., Any]:
    """The function under test, compiled as one program."""
    return jax.jit(functools.partial(attend, **options))


SM90 = jattn.Device("cuda", arch=(9, 0))


def textbook(q: Any, k: Any, v: Any, *, is_causal: bool = False) -> np.ndarray[Any, Any]:
    """Attention of one sequence in numpy: nothing to compile for every length."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    s = np.einsum("tnd,snd->nts", q, k) / np.sqrt(q.shape[2])
    if is_causal:
        s = np.where(np.tril(np.ones(s.shape[1:], bool)), s, -np.inf)
    p = np.exp(s - s.max(axis=2, keepdims=True))
    return np.asarray(np.einsum("nts,snd->tnd", p / p.sum(axis=2, keepdims=True), v))


def sequences(x: RaggedArray) -> list[np.ndarray[Any, Any]]:
    """As ``to_list``, without a slice to compile for every length."""
    values = np.asarray(x.values)
    starts, stops = (np.asarray(edge) for edge in x.bounds())
    return [values[a:b] for a, b in zip(starts, stops, strict=True)]


def ragged(
    seed: int, lengths: Any, heads: int, head_dim: int, dtype: str = "float32"
) -> RaggedArray:
    rows = normal(seed, sum(lengths), heads, head_dim, dtype=dtype)
    offsets = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
    return RaggedArray(rows, offsets, None, int(max(lengths)), int(min(lengths)))


def short_list(cases: list[RaggedCase], every: int) -> list[Any]:
    """Every n-th case, and the rest under --full."""
    return [
        pytest.param(case, marks=() if i % every == 0 else pytest.mark.full, id=case.name)
        for i, case in enumerate(cases)
    ]


# ---- Numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", short_list(R100, 3))
def test_R100_R101_sequences_equal_the_oracle(case: RaggedCase) -> None:
    verify(case, "cpu")


@pytest.mark.parametrize("case", FEATURES, ids=str)
def test_R013_R014_R016_features_on_the_kernel(case: RaggedCase) -> None:
    """Causality, windows and alignment hold per sequence; lse and all gradients; zeros in padding."""
    verify(case, "cpu")


@pytest.mark.parametrize("case", short_list([FEATURES[1], *R100[1::4]], 99))
@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_R063_plain_backends_pad(case: RaggedCase, backend: str) -> None:
    """They take the padded form by themselves: B * max_length**2 pairs, not total**2."""
    verify(case, backend)


@st.composite
def random_problem(draw: st.DrawFn) -> RaggedCase:
    """Draws a ragged problem: every feature may meet every other; few head dims, because each compiles."""
    count = draw(st.integers(1, 5))
    lengths = st.lists(st.sampled_from((0, 1, 3, 16, 31, 64, 90)), min_size=count, max_size=count)
    kv_lengths = draw(st.one_of(st.none(), lengths.map(tuple)))
    lower_right = draw(st.booleans())
    # The oracle of one sequence takes the coordinates of dropout from positions, which have no lower right.
    drops = kv_lengths is None or not lower_right
    num_kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    return RaggedCase(
        "random",
        draw(lengths.map(tuple)),
        kv_lengths,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        head_dim_v=draw(st.sampled_from((16, 24))),
        dtype=draw(st.sampled_from(("float32", "bfloat16", "float16"))),
        scale=draw(st.sampled_from((None, -0.3, 0.0))),
        softcap=draw(st.sampled_from((None, 3.0))),
        is_causal=draw(st.booleans()),
        lower_right=lower_right,
        window=draw(st.sampled_from((None, (5, 2), (0, None), (None, 9)))),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        dropout_rate=draw(st.sampled_from((0.0, 0.3))) if drops else 0.0,
        alignment=draw(st.sampled_from((1, 8, 64))),
        tail=draw(st.sampled_from((0, 7))),
    )


@pytest.mark.parametrize("form", ["packed", "padded"])
@settings(max_examples=settings.default.max_examples // 10)
@given(case=random_problem())
def test_random_problems(form: str, case: RaggedCase) -> None:
    if any(case.q_lengths) and any(case.lengths[1]):
        verify(case, "cpu", form=form)


def test_R063_the_plain_form_is_not_quadratic_in_total() -> None:
    lengths = (16,) * 64
    x = ragged(1, lengths, 1, 8)

    def biggest(backend: str) -> int:
        jaxpr = jax.make_jaxpr(functools.partial(attend, implementation=backend))(x, x, x)
        return max(
            v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "size")
        )

    assert biggest("reference") <= 64 * 16 * 16 * 8 < (64 * 16) ** 2
    assert biggest("cpu") <= 64 * 16 * 16 * 8


@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize("case", FEATURES[1:4:2], ids=str)
def test_both_forms_on_the_kernel(case: RaggedCase, form: str) -> None:
    verify(case, "cpu", form=form)


EMPTY = (
    ((0, 3), (4, 5), 0),
    ((2, 3), (0, 5), 0),
    ((0, 0, 0), (0, 0, 0), 6),
    ((9,), (17,), 0),
    ((1, 1, 1), (1, 1, 1), 0),
    ((1,), (1,), 0),
    ((5, 0, 0), (0, 0, 7), 1),
)


@pytest.mark.parametrize(("q_lengths", "kv_lengths", "tail"), EMPTY, ids=str)
def test_R050_R051_R052_R102_empty_and_single(
    q_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], tail: int
) -> None:
    verify(RaggedCase(f"R102-{q_lengths}", q_lengths, kv_lengths, is_causal=True, tail=tail), "cpu")


def test_R050_R102_empty_sequences_in_plain_jax() -> None:
    verify(
        RaggedCase("R102-plain", (5, 0, 2, 0), (0, 3, 7, 0), is_causal=True, tail=1), "reference"
    )


@pytest.mark.parametrize("rows", zero_sizes.RAGGED, ids=str)
def test_arrays_without_rows(rows: tuple[int, int], backend: str) -> None:
    zero_sizes.check_ragged(backend, "float32", rows)


@pytest.mark.parametrize("count", [0, 3])
def test_R052_nothing_but_padding(count: int, backend: str) -> None:
    for longest in (None, 0):
        x = RaggedArray(
            jnp.full((4, 2, 8), jnp.nan), jnp.zeros(count + 1, jnp.int32), None, longest
        )
        out, lse = jitted(implementation=backend, return_lse=True)(x, x, x)
        assert (np.asarray(out.values) == 0).all()
        assert np.isneginf(np.asarray(lse.values)).all()


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_R004_R103_R104_padding_changes_no_bit(form: str) -> None:
    """NaN and infinities in holes and beyond the end, against zeros there."""
    case = RaggedCase("R103", (7, 0, 33, 12), (20, 5, 40, 1), is_causal=True, alignment=16, tail=9)
    arrays = make(case)

    def cleaned(x: RaggedArray) -> RaggedArray:
        return x.with_values(jnp.nan_to_num(x.values, nan=0.0))

    clean = run(
        case,
        "cpu",
        form=form,
        arrays=type(arrays)(
            *(cleaned(x) for x in (arrays.q, arrays.k, arrays.v)),
            *(jnp.nan_to_num(x) for x in (arrays.dout, arrays.dlse)),
            arrays.q_rows,
            arrays.kv_rows,
        ),
    )
    for name, x in run(case, "cpu", form=form).items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)


def test_R105_packing_does_not_matter() -> None:
    """The bits of a sequence depend on where it starts within a tile and on nothing else: at aligned starts permuting
    sequences permutes results bitwise. At other starts sums are formed in another order (within the bounds of R100).
    """
    lengths = (70, 3, 129, 64, 0, 200)
    parts = [[normal(10 * i + j, n, 2, 16) for j in range(3)] for i, n in enumerate(lengths)]

    def solve(order: list[int], alignment: int) -> list[np.ndarray[Any, Any]]:
        q, k, v = (
            RaggedArray.from_list([parts[i][j] for i in order], alignment=alignment)
            for j in range(3)
        )
        k = q.with_values(k.values)
        out = jax.jit(functools.partial(attend, is_causal=True, implementation="cpu"))(
            q, k, q.with_values(v.values)
        )
        found = dict(zip(order, sequences(out), strict=True))
        return [np.asarray(found[i]) for i in range(len(lengths))]

    orders = ([0, 1, 2, 3, 4, 5], [5, 2, 4, 0, 3, 1])
    for a, b in zip(*(solve(order, 128) for order in orders), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*(solve(order, 1) for order in orders), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_R012_R106_dropout_is_that_of_the_dense_form(form: str) -> None:
    """Same key, same pairs: the padded dense call, sequence by sequence, gradients included; and any packing."""
    case = RaggedCase("R106", (7, 0, 33, 12), (20, 5, 40, 1), num_heads=4, alignment=8, tail=3)
    arrays = make(case)
    options: dict[str, Any] = {
        "dropout_rate": 0.4,
        "dropout_key": jax.random.key(6),
        "implementation": "cpu",
        "is_causal": True,
    }
    values = tuple(x.values for x in (arrays.q, arrays.k, arrays.v))

    @jax.jit
    def packed(*values: jax.Array) -> Any:
        def call(*x: jax.Array) -> jax.Array:
            operands = (
                a.with_values(b) for a, b in zip((arrays.q, arrays.k, arrays.v), x, strict=True)
            )
            return attend(*operands, form=form, **options).values  # type: ignore[no-any-return]

        out, pullback = jax.vjp(call, *values)
        return out, *pullback(arrays.dout)

    @jax.jit
    def dense(*values: jax.Array) -> Any:
        def call(*x: jax.Array) -> jax.Array:
            q, k, v = (
                a.with_values(b) for a, b in zip((arrays.q, arrays.k, arrays.v), x, strict=True)
            )
            (q, q_lengths), (k, kv_lengths), (v, _) = (x.to_padded() for x in (q, k, v))
            out = jattn.dot_product_attention(
                q, k, v, query_seq_lengths=q_lengths, key_value_seq_lengths=kv_lengths, **options
            )
            ids, position = arrays.q.rows()
            return jnp.where((ids >= 0)[:, None, None], out[ids, position], 0)

        out, pullback = jax.vjp(call, *values)
        return out, *pullback(arrays.dout)

    for got, want in zip(packed(*values), dense(*values), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert (np.asarray(packed(*values)[0])[arrays.q_rows[2]] != 0).any()


def test_R106_dropout_with_lower_right_alignment() -> None:
    """One position per row cannot say both, so this runs in the padded form, and says so if told otherwise."""
    case = RaggedCase("R106-right", (7, 33), (20, 40))
    arrays = make(case)
    options: dict[str, Any] = {
        "dropout_rate": 0.4,
        "dropout_seed": 3,
        "is_causal": True,
        "causal_alignment": "lower_right",
    }
    got = sequences(jitted(implementation="cpu", **options)(arrays.q, arrays.k, arrays.v))
    kept = np.asarray(jattn.dropout_mask(3, 0, (2, 2, 33, 40), 0.4))
    operands = zip(*(sequences(x) for x in (arrays.q, arrays.k, arrays.v)), strict=True)
    for i, (q, k, v) in enumerate(operands):
        s = np.einsum("tnd,snd->nts", q, k) / 4
        visible = np.tril(np.ones(s.shape[1:], bool), k.shape[0] - q.shape[0])
        p = np.exp(np.where(visible, s, -np.inf))
        p = p / p.sum(axis=2, keepdims=True) * kept[i, :, : s.shape[1], : s.shape[2]] / 0.6
        np.testing.assert_allclose(got[i], np.einsum("nts,snd->tnd", p, v), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="form is 'packed'"):
        attend(arrays.q, arrays.k, arrays.v, form="packed", **options)


def test_R113_strict_determinism() -> None:
    case = RaggedCase("R113", drawn_lengths("R113", 9, 0, 90), num_heads=4, is_causal=True)
    with jattn.deterministic("strict"):
        first = run(case, "cpu")
        for _ in range(5):
            for name, x in run(case, "cpu").items():
                np.testing.assert_array_equal(x, first[name])


@pytest.mark.parametrize("case", [*short_list(T079[:16], 5), *short_list(T079[16:], 99)])
def test_T079_gradients_of_ragged_batches(case: RaggedCase) -> None:
    verify(case, "cpu")


def test_T076_sequences_of_length_1() -> None:
    lengths = list(drawn_lengths("T076", 32, 1, 31))
    lengths[::3] = [1] * len(lengths[::3])
    verify(
        RaggedCase("T076", tuple(lengths), num_heads=16, num_kv_heads=16, head_dim=64, head_dim_v=64, dtype="float16"),
        "cpu",
    )  # fmt: skip


def test_T049_R050_sequences_of_length_0() -> None:
    """They are computed; with ``strict`` they are refused where they are known."""
    lengths = list(drawn_lengths("T049", 32, 1, 31))
    lengths[1::3] = [0] * len(lengths[1::3])
    case = RaggedCase("T049", tuple(lengths), dtype="float16")
    verify(case, "cpu")
    q = make(case).q
    for x in (q, RaggedArray(q.values, q.offsets, None, q.max_length, 0)):
        with pytest.raises(jattn.NoBackendError, match="do not support seq_len == 0") as error:
            attend(x, x, x, strict=True)
        assert {reason.code for reason in error.value.reasons} == {"RAGGED_ZERO_LEN"}
    declared = RaggedArray(q.values, q.offsets, None, q.max_length, 0)
    with pytest.raises(jattn.NoBackendError, match="RAGGED_ZERO_LEN"):
        jax.eval_shape(functools.partial(attend, strict=True), declared, declared, declared)
    jax.eval_shape(
        functools.partial(attend, strict=True), q, q, q
    )  # traced: not known, so computed


@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_T064_T065_packed_projections(kind: str) -> None:
    """q, k and v cut out of one array inside jit, in the dense and in the ragged form; float16 against float32."""
    lengths = (8,) * 6 if kind == "dense" else (8, 3, 1, 7, 8, 5)
    x = RaggedArray.from_list(
        [
            jnp.asarray(np.random.default_rng(i).uniform(-3, 3, (n, 3, 4, 64)), jnp.float32)
            for i, n in enumerate(lengths)
        ]
    )

    @functools.partial(jax.jit, static_argnames="dtype")
    def call(x: RaggedArray, dtype: str) -> RaggedArray:
        q, k, v = (
            x.with_values(part[:, 0].astype(dtype)) for part in jnp.split(x.values, 3, axis=1)
        )
        if kind == "ragged":
            return attend(q, k, v, implementation="cpu")  # type: ignore[no-any-return]
        q, k, v = (part.values.reshape(6, 8, 4, 64) for part in (q, k, v))
        out = jattn.dot_product_attention(q, k, v, implementation="cpu")
        return x.with_values(out.reshape(48, 4, 64))

    for got, part in zip(sequences(call(x, "float16")), sequences(x), strict=True):
        want = textbook(*(part[:, i] for i in range(3)))
        np.testing.assert_allclose(got.astype(np.float32), want, rtol=7e-3, atol=7e-3)


# ---- Broadcasting --------------------------------------------------------------------------------------------------


def _t077() -> list[Any]:
    grid = [tuple(bool(i >> bit & 1) for bit in range(6)) for i in range(64)]
    short = [1, 2, 4, 8, 16, 27, 36, 63]
    return [
        pytest.param(
            g, marks=() if i in short else pytest.mark.full, id="".join("01"[x] for x in g)
        )
        for i, g in enumerate(grid)
    ]


@pytest.mark.parametrize("expand", _t077())
def test_T077_R042_R060_R110_broadcasting(expand: tuple[bool, ...]) -> None:
    """A single sequence or head stands for all; compared with explicitly repeated data, gradients included."""
    q_batch, k_batch, v_batch, q_heads, k_heads, v_heads = expand
    batch, heads = 5, 4
    rng = np.random.default_rng(77)
    constant = 3
    q_lengths = (4,) if q_batch else tuple(rng.integers(1, 32, batch))
    shared = k_batch or v_batch
    kv_lengths = (constant,) * batch if shared else tuple(rng.integers(1, 32, batch))
    q = ragged(1, q_lengths, 1 if q_heads else heads, 16)
    k = ragged(11, kv_lengths[:1] if k_batch else kv_lengths, 1 if k_heads else heads, 16)
    v = ragged(21, kv_lengths[:1] if v_batch else kv_lengths, 1 if v_heads else heads, 8)
    operands = (q, k, v)
    count = max(x.num_sequences for x in operands)
    widest = max(x.values.shape[1] for x in operands)

    def repeated(x: RaggedArray) -> RaggedArray:
        """The same with the repetition written out."""
        parts = sequences(x) * (count if x.num_sequences == 1 else 1)
        rows = np.concatenate(parts)
        rows = np.broadcast_to(rows, (len(rows), widest, rows.shape[2]))
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
        return RaggedArray(jnp.asarray(rows), jnp.asarray(offsets, jnp.int32))

    cotangent = normal(3, sum(q_lengths) * (count // len(q_lengths)), widest, 8)

    def both(operands: tuple[RaggedArray, ...]) -> Any:
        @jax.jit
        def run(values: Any) -> Any:
            def call(*values: jax.Array) -> jax.Array:
                given = (x.with_values(y) for x, y in zip(operands, values, strict=True))
                return attend(*given, implementation="cpu").values  # type: ignore[no-any-return]

            out, pullback = jax.vjp(call, *values)
            return out, *pullback(cotangent)

        return jax.device_get(run(tuple(x.values for x in operands)))

    out, *grads = both(operands)
    want, *want_grads = both(tuple(repeated(x) for x in operands))
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    for x, got, expected in zip(operands, grads, want_grads, strict=True):
        sums = expected.sum(axis=1, keepdims=True) if x.values.shape[1] == 1 else expected
        if x.num_sequences == 1:
            sums = sums.reshape(count, *x.values.shape).sum(axis=0)
        np.testing.assert_allclose(got, sums, rtol=1e-4, atol=1e-4)


@pytest.mark.backends("cpu", "reference")
def test_T078_T050_R043_dense_query(backend: str) -> None:
    """A dense query of batch 1 is repeated for each sequence; training through it works."""
    lengths = drawn_lengths("T078", 32, 1, 20)
    q = normal(1, 1, 1, 16, 64)
    k, v = ragged(2, lengths, 16, 64), ragged(50, lengths, 1, 96)
    v = k.with_values(v.values)
    call = jitted(implementation=backend)
    out = call(q, k, v)
    assert out.values.shape == (32, 16, 96)
    assert out.constant_length == 1
    for got, ki, vi in zip(sequences(out), sequences(k), sequences(v), strict=True):
        np.testing.assert_allclose(got, textbook(q[0], ki, vi), rtol=1e-4, atol=1e-5)
    grad = jax.jit(jax.grad(lambda q: call(q, k, v).values.sum()))(q)
    assert grad.shape == q.shape
    assert np.isfinite(np.asarray(grad)).all()
    assert np.asarray(grad).any()


def test_T045_R040_one_of_key_and_value_repeated() -> None:
    lengths = drawn_lengths("T045", 8, 1, 31)
    q, v = ragged(1, lengths, 8, 64), ragged(2, lengths, 8, 64)
    for k in (ragged(3, (1,), 8, 64), normal(3, 1, 1, 8, 64)):
        with pytest.raises(
            jattn.NoBackendError, match="must have a consistent seq_len dim"
        ) as error:
            attend(q, k, v, implementation="cpu")
        assert [reason.code for reason in error.value.reasons] == ["RAGGED_KV_BROADCAST"]


@pytest.mark.filterwarnings("ignore:jattn:UserWarning")
def test_R040_R041_R109_refusals_are_a_function_of_shapes() -> None:
    """No array is needed, the device is named: the choice is the same machinery as for dense calls."""

    def shaped(
        total: int, count: int, heads: int, head_dim: int, dtype: str = "float16"
    ) -> RaggedArray:
        return RaggedArray(
            jax.ShapeDtypeStruct((total, heads, head_dim), dtype),  # type: ignore[arg-type]
            jax.ShapeDtypeStruct((count + 1,), jnp.int32),  # type: ignore[arg-type]
        )

    def codes(*operands: Any, **options: Any) -> list[str]:
        with jattn.target_device(SM90):
            try:
                jax.eval_shape(functools.partial(attend, **options), *operands)
            except jattn.NoBackendError as error:
                return [reason.code for reason in error.reasons]
        return []

    x = shaped(100, 4, 8, 64)
    assert codes(x, x, x) == []
    assert codes(x, x, x, is_causal=True, implementation="mem_efficient") == []
    assert codes(shaped(100, 3, 8, 64), x, x) == ["RAGGED_BATCH"]
    assert codes(x, shaped(100, 4, 3, 64), shaped(100, 4, 3, 64)) == ["RAGGED_BROADCAST"]
    assert codes(x, shaped(100, 4, 2, 64), shaped(100, 4, 4, 64)) == ["RAGGED_BROADCAST"]
    assert codes(x, shaped(5, 1, 8, 64), x) == ["RAGGED_KV_BROADCAST"]
    wide = shaped(100, 4, 8, 257)
    assert "HEAD_DIM" in codes(wide, wide, wide, implementation="flash")
    assert "DTYPE" in codes(*(shaped(9, 4, 8, 64, "float32"),) * 3, implementation="flash")
    assert "FEATURE" in codes(x, x, x, implementation="cudnn")
    with jattn.sdpa_kernel([]), pytest.raises(jattn.NoBackendError, match="No viable backend"):
        attend(*(ragged(1, (2, 3), 2, 8),) * 3)


def test_T046_R061_head_dims_that_need_padding() -> None:
    """No head dim is refused for alignment, in ragged form either: flash takes 57."""
    with jattn.target_device(SM90):
        x = jax.eval_shape(lambda: ragged(1, (2, 4, 5, 6, 7), 8, 57, dtype="bfloat16"))
        assert jax.eval_shape(functools.partial(attend, implementation="flash"), x, x, x)
    verify(
        RaggedCase("T046", (2, 4, 5, 6, 7), num_heads=8, head_dim=57, head_dim_v=57, dtype="bfloat16"), "cpu"
    )  # fmt: skip


def test_compute_dtype_casts_floats_alone() -> None:
    x = RaggedArray.from_list([jnp.ones((3, 2, 8)), jnp.ones((5, 2, 8))])
    for dtype in ("int32", "complex64"):
        other = x.with_values(x.values.astype(dtype))
        with pytest.raises(ValueError, match=f"key has dtype {dtype}, must be a float type"):
            jattn.ragged_dot_product_attention(x, other, x, compute_dtype="bfloat16")


def test_lengths_of_lists_are_known_under_jit() -> None:
    parts = [normal(i, n, 2, 8) for i, n in enumerate((3, 1, 5))]

    @jax.jit
    def function(parts: list[jax.Array]) -> list[jax.Array]:
        x = RaggedArray.from_list(parts, alignment=2)
        assert x.known_lengths() is not None
        return jattn.ragged_dot_product_attention(x, x, x).to_list()

    for got, x in zip(function(parts), parts, strict=True):
        want = jattn.dot_product_attention(x[None], x[None], x[None])[0]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_compute_dtype_casts_first() -> None:
    q = ragged(1, (5, 3), 2, 16)
    k, v = q.with_values(q.values.astype("bfloat16")), q
    out = jitted(compute_dtype="bfloat16")(q, k, v)
    assert out.values.dtype == "bfloat16"
    want = jitted()(*(x.with_values(x.values.astype("bfloat16")) for x in (q, k, v)))
    np.testing.assert_array_equal(out.values, want.values)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_T053_the_choice_on_this_cpu(dtype: str) -> None:
    """The kernel takes ragged batches and dropout, too."""
    x = ragged(1, (5, 3), 8, 64, dtype=dtype)
    for options in ({}, {"dropout_rate": 0.7, "dropout_seed": 1}):
        before = jattn.call_counters().get("cpu", {}).get("forward", 0)
        jax.eval_shape(jax.jit(functools.partial(attend, **options)), x, x, x)  # type: ignore[arg-type]
        jax.jit(functools.partial(attend, **options)).lower(x, x, x)  # type: ignore[arg-type]
        assert jattn.call_counters()["cpu"]["forward"] == before + 1
        dense = jnp.ones((2, 128, 8, 64), dtype)
        assert jattn.select_backend(dense, dense, dense, needs_grad=True, **options) == "cpu"


# ---- Wrong calls ---------------------------------------------------------------------------------------------------


def test_R015_R020_R021_R023_R024_R025_R109_wrong_operands() -> None:
    x = ragged(1, (3, 4), 2, 8)
    dense = x.values[None]
    with pytest.raises(TypeError, match="Expected query, key, and value to be nested"):
        attend(dense, dense, dense)  # R020
    with pytest.raises(ValueError, match="one dtype"):
        attend(x, x.with_values(x.values.astype("float16")), x)  # R021
    with pytest.raises(ValueError, match="at least 3 dimensional"):
        attend(x, x, x.with_values(x.values[:, 0]))  # R023
    with pytest.raises(ValueError, match="ragged on the same dimension"):
        attend(x, x.with_values(x.values[:, None]), x.with_values(x.values[:, None]))  # R024
    whole = x.with_values(x.values[:, None])
    with pytest.raises(ValueError, match=r"query dense .*all three are RaggedArrays"):
        attend(dense, whole, whole)
    with pytest.raises(
        ValueError, match=r"dense operands must have rank 4, .*query dense \(1, 1, 7"
    ):
        attend(dense[None], x, x)
    for keywords in ({"mask": jnp.ones((7, 7), bool)}, {"bias": jnp.ones((7, 7))}):
        with pytest.raises(ValueError, match="Masks are not yet supported!"):
            attend(x, x, x, **keywords)  # R015, R025


@pytest.mark.parametrize(("rows", "edges"), [("n", "4"), ("7", "n")])
def test_symbolic_extents_are_refused(rows: str, edges: str) -> None:
    total, count = jax.export.symbolic_shape(f"{rows}, {edges}")
    shapes = [
        jax.ShapeDtypeStruct((total, 2, 8), jnp.float32),
        jax.ShapeDtypeStruct((count,), jnp.int32),
    ]

    def run(values: jax.Array, offsets: jax.Array) -> jax.Array:
        x = RaggedArray(values, offsets, max_length=5)
        return attend(x, x, x).values

    with pytest.raises(ValueError, match=r"shape\[0\] is n, must be a known number: export with"):
        jax.export.export(jax.jit(run))(*shapes)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        (
            {"seqlens_q": [3, 4]},
            r"seqlens_q is \[3, 4\], must be cumulative lengths from 0.*cumsum",
        ),
        ({"seqlens_q": [0.0, 7.0]}, "seqlens_q has dtype float32, must be an integer"),
        ({"q": jnp.ones((1, 7, 2, 8))}, r"q has shape \(1, 7, 2, 8\), must be \(total"),
        ({"k": None}, "k is None, must be an array"),
        ({"max_seqlen_q": 7.0}, "max_seqlen_q is 7.0, must be an integer"),
        ({"return_lse": 1}, "return_lse is 1, must be True or False"),
        ({"compute_dtype": "bf16"}, "compute_dtype is 'bf16'"),
        (
            {"window_size": jnp.array([1, 1])},
            r"flash_mha_varlen: window_size is .*must be a number of keys or a pair",
        ),
        ({"window_size": (1, 2, 3)}, r"window_size is \(1, 2, 3\), must be"),
        ({"causal_alignment": "bottom_right"}, "causal_alignment is 'bottom_right', must be"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_R005_wrong_calls_of_the_varlen_function(keywords: dict[str, Any], words: str) -> None:
    x = jnp.ones((7, 2, 8))
    with pytest.raises(ValueError, match=words):
        jattn.flash_mha_varlen(
            **({"q": x, "k": x, "v": x, "seqlens_q": [0, 3, 7]} | keywords)  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"scale": 0.1}, "scale is 0.1, must not be given: pass it as softmax_scale"),
        ({"local_window_size": 2}, "local_window_size is 2, .* pass it as window_size"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_R005_arguments_that_have_other_names(keywords: dict[str, Any], words: str) -> None:
    x = jnp.ones((7, 2, 8))
    with pytest.raises(TypeError, match=rf"jattn\.flash_mha_varlen: {words}"):
        jattn.flash_mha_varlen(x, x, x, [0, 3, 7], **keywords)


def test_R005_a_window_of_one_number() -> None:
    x = normal(1, 7, 2, 8)
    one, pair = (
        jattn.flash_mha_varlen(x, x, x, [0, 3, 7], window_size=window) for window in (2, (2, 2))
    )
    np.testing.assert_array_equal(one, pair)


@pytest.mark.parametrize(
    ("offsets", "lengths", "words"),
    [
        (np.array([0.0, 3, 7]), None, "must be int32"),
        (np.array([0, 5, 3], np.int32), None, "must not decrease"),
        (np.array([0, 5, 9], np.int32), None, "must lie in"),
        (np.array([-1, 5, 7], np.int32), None, "must lie in"),
        (np.zeros((1, 3), np.int32), None, "rank 1"),
        ([0, 3, 7], None, r"query.offsets is \[0, 3, 7\], must be an int32 array"),
        (np.array([0, 3, 7], np.int32), np.array([3], np.int32), "one less than offsets"),
        (np.array([0, 3, 7], np.int32), np.array([3, 5], np.int32), "distances of the offsets"),
        (np.array([0, 3, 7], np.int32), np.array([3.0, 4]), "must be int32"),
    ],
    ids=str,
)
def test_R026_wrong_offsets(offsets: Any, lengths: Any, words: str) -> None:
    wrong = RaggedArray(
        normal(1, 7, 2, 8),
        offsets if isinstance(offsets, list) else jnp.asarray(offsets),
        None if lengths is None else jnp.asarray(lengths),
    )
    with pytest.raises(ValueError, match=words):
        attend(wrong, wrong, wrong)


def test_R003_key_and_value_share_their_rows() -> None:
    q, k, v = (ragged(i, lengths, 2, 8) for i, lengths in ((1, (3, 4)), (3, (3, 4)), (5, (4, 3))))
    with pytest.raises(ValueError, match="must share their offsets"):
        attend(q, k, v)
    with pytest.raises(ValueError, match="must share their offsets"):
        attend(q, k, RaggedArray(jnp.concatenate([v.values, v.values]), k.offsets))
    bounded = RaggedArray(k.values, k.offsets, None, 3)
    with pytest.raises(ValueError, match="at most the bound 3"):
        attend(q, bounded, bounded)


@pytest.mark.parametrize(
    "offsets",
    [[0, 90, 7], [-5, 3, 4], [5, 2, 7], [2**31 - 1, 0, -(2**31)], [0, -1, 2**31 - 1]],
    ids=str,
)
def test_wrong_offsets_under_jit_stay_inside(offsets: list[int]) -> None:
    """Traced offsets cannot be checked: they are clamped, a decreasing one counts as the largest before it."""
    x = RaggedArray(normal(1, 7, 2, 8), jnp.asarray(offsets, jnp.int32))
    call = jitted(is_causal=True, implementation="cpu")
    edges = np.maximum.accumulate(np.clip(np.asarray(offsets, np.int64), 0, 7)).astype(np.int32)
    right = RaggedArray(x.values, jnp.asarray(edges))
    np.testing.assert_array_equal(call(x, x, x).values, call(right, right, right).values)


# ---- The type and its conversions ----------------------------------------------------------------------------------


def test_R001_R111_a_pytree_through_transformations() -> None:
    x = RaggedArray.from_list([normal(i, n, 2, 8) for i, n in enumerate((3, 0, 5))])
    leaves, tree = jax.tree.flatten(x)
    assert len(leaves) == 2
    assert isinstance(jax.tree.unflatten(tree, leaves), RaggedArray)

    def layer(x: RaggedArray, weight: jax.Array) -> RaggedArray:
        y = x.with_values(x.values * weight)
        return x.with_values(x.values + attend(y, y, y, is_causal=True).values)

    weights = normal(9, 3, 8)

    def stack(values: jax.Array, weights: jax.Array) -> RaggedArray:
        step = jax.checkpoint(lambda x, w: (layer(x, w), None))
        return jax.lax.scan(step, x.with_values(values), weights)[0]

    out = jax.jit(stack)(x.values, weights)
    assert isinstance(out, RaggedArray)
    assert (out.max_length, out.min_length) == (5, 0)
    want, once = x, jax.jit(layer)
    for weight in weights:
        want = once(want, weight)
    np.testing.assert_allclose(out.values, want.values, rtol=1e-5, atol=1e-6)
    grads = jax.jit(jax.grad(lambda *a: (stack(*a).values ** 2).sum(), argnums=(0, 1)))(
        x.values, weights
    )
    assert all(np.isfinite(np.asarray(g)).all() and np.asarray(g).any() for g in grads)
    # The type itself is an argument: offsets have no gradient.
    _, pullback = jax.vjp(lambda x: layer(x, weights[0]).values, x)
    (grad,) = pullback(jnp.ones_like(x.values))
    assert grad.offsets.dtype == jax.dtypes.float0
    donated = jax.jit(layer, donate_argnums=0)(jax.tree.map(jnp.copy, x), weights[0])
    np.testing.assert_allclose(donated.values, once(x, weights[0]).values, rtol=1e-5, atol=1e-6)


def test_R006_R010_R011_the_result_lies_like_the_query() -> None:
    parts = [normal(i, n, 2, 16) for i, n in enumerate((3, 7))]
    q = RaggedArray.from_list(parts, alignment=4, max_length=9, min_length=1)
    k = ragged(5, (2, 6), 2, 16)
    out, lse = jitted(return_lse=True)(q, k, k.with_values(k.values[..., :5]))
    for x, shape in ((out, (12, 2, 5)), (lse, (12, 2))):
        assert x.values.shape == shape
        assert (x.max_length, x.min_length) == (9, 1)
        np.testing.assert_array_equal(x.offsets, q.offsets)
        np.testing.assert_array_equal(x.lengths, q.lengths)
    assert lse.values.dtype == jnp.float32
    want = textbook(parts[1], *(sequences(k)[1],) * 2)
    np.testing.assert_allclose(sequences(out)[1], want[..., :5], rtol=1e-5, atol=1e-5)
    unknown = RaggedArray(q.values, q.offsets, q.lengths)
    assert attend(unknown, k, k).min_length is None


def test_R002_R112_conversions_round_trip() -> None:
    parts = [normal(i, n, 2, 3) for i, n in enumerate((4, 0, 1, 7))]
    for alignment in (1, 8):
        x = RaggedArray.from_list(parts, alignment=alignment)
        for got, want in zip(x.to_list() if alignment == 1 else sequences(x), parts, strict=True):
            np.testing.assert_array_equal(got, want)
        padded, lengths = jax.jit(RaggedArray.to_padded)(x)
        assert padded.shape == (4, 7, 2, 3)
        np.testing.assert_array_equal(lengths, [4, 0, 1, 7])
        assert not np.asarray(padded[0, 4:]).any()
        for total in (None, 15):
            again = jax.jit(functools.partial(RaggedArray.from_padded, total=total))(
                padded, lengths
            )
            assert again.values.shape[0] == (28 if total is None else total)
            for got, want in zip(sequences(again), parts, strict=True):
                np.testing.assert_array_equal(got, want)
            assert not np.asarray(again.values[12:]).any()
        ids = x.segment_ids()
        back = jax.jit(RaggedArray.from_segment_ids, static_argnums=2)(x.values, ids, 4)
        for got, want in zip(sequences(back), parts, strict=True):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(back.segment_ids(), ids)
    mask = jnp.arange(7) < jnp.asarray([4, 0, 1, 7])[:, None]
    assert bool(jattn.is_left_aligned(mask))
    for got, want in zip(RaggedArray.from_mask(padded, mask).to_list(), parts, strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(
        RaggedArray.from_list(parts, alignment=8).segment_ids(),
        [0, 0, 0, 0, -1, -1, -1, -1, 2, *[-1] * 7, *[3] * 7, -1],
    )


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_no_rank_is_promoted(form: str) -> None:
    """Conversions and calls are made under ``jax_numpy_rank_promotion="raise"``."""
    q, k = ragged(0, [4, 0, 7], 4, 8), ragged(1, [3, 5, 2], 2, 8)

    def loss(values: jax.Array) -> jax.Array:
        features = {"alibi_slopes": jnp.ones(4), "dropout_rate": 0.2, "dropout_seed": 3}
        return attend(q.with_values(values), k, k, form=form, **features).values.sum()

    def conversions(x: RaggedArray) -> Any:
        padded, lengths = x.to_padded()
        is_real = jnp.arange(padded.shape[1])[None, :] < lengths[:, None]
        by_ids = RaggedArray.from_segment_ids(x.values, x.segment_ids(), 3)
        return (
            RaggedArray.from_padded(padded, lengths),
            RaggedArray.from_mask(padded, is_real, check=False),
            by_ids,
        )

    with jax.numpy_rank_promotion("raise"):
        jax.jit(jax.value_and_grad(loss)).lower(q.values)
        jax.eval_shape(conversions, q)


def test_R002_wrong_conversions() -> None:
    with pytest.raises(ValueError, match="arrays is empty"):
        RaggedArray.from_list([])
    with pytest.raises(ValueError, match="must agree"):
        RaggedArray.from_list([jnp.ones((2, 3)), jnp.ones((2, 4))])
    with pytest.raises(ValueError, match="at most the bound 1"):
        RaggedArray.from_list([jnp.ones((2, 3))], max_length=1)
    values = jnp.ones((4, 2, 3))
    for ids, words in (
        ([1, 1, 0, 0], "must not decrease"),
        ([0, -1, 0, 1], "neighbours"),
        ([0], "one for each row"),
    ):
        with pytest.raises(ValueError, match=words):
            RaggedArray.from_segment_ids(values, jnp.asarray(ids), 2)
    for lengths, words in (
        ([1], r"\(1,\), must be integers of shape \(4,\)"),
        ([1.0] * 4, "float32"),
    ):
        with pytest.raises(ValueError, match=words):
            RaggedArray.from_padded(values, jnp.asarray(lengths))


def _layer(x: Any, weights: dict[str, jax.Array], attention: Callable[..., Any]) -> Any:
    """One post-norm encoder layer on rows (..., F); `attention` takes and gives (..., heads, head dim)."""

    def norm(x: jax.Array) -> jax.Array:
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    q, k, v = (y.reshape(*y.shape[:-1], 4, -1) for y in jnp.split(x @ weights["qkv"], 3, axis=-1))
    x = norm(x + attention(q, k, v).reshape(x.shape) @ weights["out"])
    return norm(x + jax.nn.gelu(x @ weights["up"]) @ weights["down"])


@pytest.mark.backends("cpu", "reference")
def test_T006_T014_an_encoder_of_ragged_layers(backend: str) -> None:
    """Three layers over lengths [10, 0, 8, 0, 6, 2]: the offsets stay, and the rows are those of the dense form with
    lengths; whole sequences are padding.
    """
    lengths, width = np.array([10, 0, 8, 0, 6, 2]), 32
    dense = normal(1, 6, 10, width)
    sizes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 64),
        "down": (64, width),
    }
    layers = [
        {name: 0.2 * normal(10 * i + j, *size) for j, (name, size) in enumerate(sizes.items())}
        for i in range(3)
    ]
    counts = jnp.asarray(lengths, jnp.int32)
    mask = jnp.arange(10) < counts[:, None]

    @jax.jit
    def ragged_arm(x: RaggedArray) -> RaggedArray:
        def call(*qkv: jax.Array) -> jax.Array:
            operands = (x.with_values(y) for y in qkv)
            return attend(*operands, implementation=backend).values  # type: ignore[no-any-return]

        values = x.values
        for weights in layers:
            values = _layer(values, weights, call)
        return x.with_values(values)

    @jax.jit
    def dense_arm(x: jax.Array) -> jax.Array:
        call = functools.partial(
            jattn.dot_product_attention,
            query_seq_lengths=counts,
            key_value_seq_lengths=counts,
            implementation="cpu",
        )
        for weights in layers:
            x = _layer(x, weights, call)
        return x

    x = RaggedArray.from_mask(dense, mask)
    out, want = ragged_arm(x), np.asarray(dense_arm(dense))
    np.testing.assert_array_equal(out.offsets, x.offsets)
    assert out.max_length == x.max_length
    for got, row, length in zip(sequences(out), want, lengths, strict=True):
        assert got.shape[0] == length
        np.testing.assert_allclose(got, row[:length], rtol=1e-4, atol=1e-4)


def test_T021_from_a_padding_mask() -> None:
    """A left-aligned mask packs; another one is refused and stays a dense mask."""
    x = normal(1, 1, 3, 2, 4)
    aligned, other = jnp.asarray([[True, True, False]]), jnp.asarray([[False, True, False]])
    packed = RaggedArray.from_mask(x, aligned)
    np.testing.assert_array_equal(packed.to_list()[0], x[0, :2])
    assert not bool(jattn.is_left_aligned(other))
    with pytest.raises(ValueError, match="dtype float32, must be bool"):
        RaggedArray.from_mask(x, jnp.where(aligned, 0.0, -jnp.inf))
    with pytest.raises(ValueError, match="not left-aligned"):
        RaggedArray.from_mask(x, other)
    with pytest.raises(ValueError, match="traced"):
        jax.eval_shape(RaggedArray.from_mask, x, aligned)
    taken = jax.jit(functools.partial(RaggedArray.from_mask, check=False))(x, other)
    np.testing.assert_array_equal(taken.to_list()[0], x[0, :1])


def test_R107_other_offsets_need_no_new_trace() -> None:
    traces = []

    @jax.jit
    def call(x: RaggedArray) -> RaggedArray:
        traces.append(1)
        return attend(x, x, x, is_causal=True)  # type: ignore[no-any-return]

    values = normal(1, 12, 2, 8)
    for offsets in ([0, 4, 12], [0, 12, 12], [3, 5, 9]):
        x = RaggedArray(values, jnp.asarray(offsets, jnp.int32), None, 12)
        for got, part in zip(sequences(call(x)), sequences(x), strict=True):
            if part.shape[0]:
                want = textbook(part, part, part, is_causal=True)
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert len(traces) == 1


def test_R107_a_sequence_longer_than_its_bound_is_cut() -> None:
    x = RaggedArray(normal(1, 12, 2, 8), jnp.asarray([0, 8, 12], jnp.int32), None, 4)
    call = jax.jit(attend, static_argnames="form")
    packed, padded = (call(x, x, x, form=form) for form in ("packed", "padded"))
    np.testing.assert_allclose(packed.values, padded.values, rtol=1e-5, atol=1e-6)
    assert not np.asarray(packed.values[4:8]).any()


@pytest.mark.backends("cpu", "reference")
def test_R030_R031_R108_a_ragged_batch_axis(backend: str) -> None:
    """values (total, T, N, D): every row is one dense problem, and dense rules hold, masks included."""
    parts = [normal(i, n, 6, 2, 8) for i, n in enumerate((2, 0, 3))]
    x = RaggedArray.from_list(parts)
    x = RaggedArray(jnp.concatenate([x.values, jnp.full((2, 6, 2, 8), jnp.nan)]), x.offsets)
    mask = bernoulli(3, 0.6, 6, 6) | jnp.eye(6, dtype=bool)

    def call(values: jax.Array) -> Any:
        y = x.with_values(values)
        return attend(y, y, y, mask=mask, is_causal=True, implementation=backend, return_lse=True)

    (out, lse), pullback = jax.vjp(jax.jit(call), x.values)
    rows = jnp.concatenate(parts)
    want = jax.nn.dot_product_attention(rows, rows, rows, mask=mask, is_causal=True)
    np.testing.assert_allclose(out.values[:5], want, rtol=1e-5, atol=1e-5)
    assert not np.asarray(out.values[5:]).any()
    assert np.isneginf(np.asarray(lse.values[5:])).all()
    ones = jax.tree.map(jnp.ones_like, (out, lse))
    ones = jax.tree.map(
        lambda x, y: (
            y if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0)
        ),
        (out, lse),
        ones,
    )
    (grad,) = pullback(ones)
    assert np.isfinite(np.asarray(grad)).all()
    assert not np.asarray(grad[5:]).any()
    with pytest.raises(ValueError, match="same rows"):
        attend(x, x.with_values(x.values[:5]), x.with_values(x.values[:5]))


HEADS_OVER_A_MESH = """
import functools, re
import jax, jax.numpy as jnp, numpy as np, jattn
from jax.sharding import NamedSharding, PartitionSpec as P
rng = np.random.default_rng(0)
rows = lambda heads: jnp.asarray(rng.standard_normal((40, heads, 16)), jnp.float32)
offsets = jnp.asarray([0, 9, 9, 31, 37], jnp.int32)
q = jattn.RaggedArray(rows(4), offsets, None, 22)
k, v = q.with_values(rows(2)), q.with_values(rows(2))
mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
put = lambda x: x.with_values(jax.device_put(x.values, NamedSharding(mesh, P(None, "model"))))
slopes = jnp.asarray([0.5, 0.25, 0.125, 0.1])
def step(q, k, v):
    call = lambda *x: jattn.ragged_dot_product_attention(
        *(a.with_values(b) for a, b in zip((q, k, v), x)), is_causal=True, implementation="cpu",
        alibi_slopes=slopes, sinks=slopes, dropout_rate=0.3, dropout_seed=7).values
    out, pullback = jax.vjp(call, q.values, k.values, v.values)
    return out, pullback(out)
want = jax.jit(step)(q, k, v)
run = jax.jit(step).lower(*map(put, (q, k, v))).compile()
for a, b in zip(jax.tree.leaves(run(*map(put, (q, k, v)))), jax.tree.leaves(want)):
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert "model" in str(a.sharding.spec), a.sharding
found = set(re.findall(r"all-gather|all-to-all|collective-permute", run.as_text()))
assert not found, found
print("ok")
"""


def test_J02_heads_of_ragged_batches_over_a_mesh() -> None:
    """Two virtual devices: the same bits, dropout included, and nothing is gathered."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", HEADS_OVER_A_MESH],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "ok", done.stderr[-3000:]


# ---- Cumulative lengths, as other libraries pass them --------------------------------------------------------------


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (5, 0)])
def test_R005_R062_R064_cumulative_lengths(cross: bool, window: tuple[int, int]) -> None:
    """The arguments of flash_mha_varlen; its causal diagonal ends at the last key."""
    counts, kv_counts = np.array([4, 1, 9]), np.array([6, 8, 9]) if cross else np.array([4, 1, 9])
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(c)]).astype(np.int32) for c in (counts, kv_counts))
    q, k, v = normal(1, 14, 4, 8), normal(2, cu_k[-1], 2, 8), normal(3, cu_k[-1], 2, 8)
    call = functools.partial(
        jattn.flash_mha_varlen,
        max_seqlen_q=9,
        max_seqlen_k=9 if cross else -1,
        softmax_scale=0.3,
        is_causal=True,
        window_size=window,
        implementation="cpu",
        return_lse=True,
    )
    out, lse = call(q, k, v, cu_q, cu_k) if cross else call(q, k, v, cu_q)
    assert out.shape == (14, 4, 8)
    assert lse.shape == (14, 4)
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        want = jattn.dot_product_attention(
            q[a:b], k[c:d], v[c:d],
            scale=0.3, is_causal=True, causal_alignment="lower_right", implementation="cpu",
            local_window_size=None if window == (-1, -1) else window,
        )  # fmt: skip
        np.testing.assert_allclose(out[a:b], want, rtol=1e-5, atol=1e-5)


def test_known_borders_and_masks_in_traced_calls() -> None:
    """What is known is checked by its values, also where the call around it is traced."""
    x = normal(1, 7, 2, 8)
    borders, bad = jnp.asarray([0, 3, 7], jnp.int32), jnp.asarray([3, 7], jnp.int32)
    traced = jax.jit(lambda x: jattn.flash_mha_varlen(x, x, x, borders))(x)
    np.testing.assert_allclose(
        traced, jattn.flash_mha_varlen(x, x, x, borders), rtol=1e-6, atol=1e-6
    )
    for wrong in (bad, bad.tolist(), np.asarray(bad, "int64")):
        with pytest.raises(ValueError, match="must be cumulative lengths from 0"):
            jax.jit(lambda x, wrong=wrong: jattn.flash_mha_varlen(x, x, x, wrong))(x)
    mask = jnp.asarray([[True, True, False], [True, False, False]])
    holes = ~mask
    padded = normal(2, 2, 3, 8)
    packed = jax.jit(lambda x: jattn.RaggedArray.from_mask(x, mask).values)(padded)
    np.testing.assert_array_equal(packed[:3], [padded[0, 0], padded[0, 1], padded[1, 0]])
    with pytest.raises(ValueError, match="left-aligned"):
        jax.jit(lambda x: jattn.RaggedArray.from_mask(x, holes).values)(padded)


def test_cumulative_lengths_with_used_keys() -> None:
    q, k = normal(1, 5, 2, 8), normal(2, 16, 2, 8)
    used = jnp.asarray([3, 6], jnp.int32)
    out = jattn.flash_mha_varlen(q, k, k, jnp.asarray([0, 2, 5]), jnp.asarray([0, 8, 16]), used)
    for rows, keys in ((slice(0, 2), slice(0, 3)), (slice(2, 5), slice(8, 14))):
        want = textbook(q[rows], k[keys], k[keys])
        np.testing.assert_allclose(out[rows], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int64"])
def test_lengths_of_narrow_types_add_up(dtype: str) -> None:
    made = RaggedArray.from_padded(jnp.ones((2, 300, 1)), np.array([100, 120], dtype))
    assert made.offsets.tolist() == [0, 100, 220]


def test_conversions_check_what_they_know() -> None:
    x = jnp.ones((2, 3, 4))
    with pytest.raises(ValueError, match=r"mask has shape \(2, 5\), must be \(2, 3\)"):
        RaggedArray.from_mask(x, jnp.ones((2, 5), bool))
    with pytest.raises(ValueError, match="max_length is 2, but a sequence has 3 rows"):
        RaggedArray.from_segment_ids(jnp.ones((5, 4)), jnp.array([0, 0, 0, 1, 1]), 2, max_length=2)
    with pytest.raises(ValueError, match="alignment is 0, must be an integer from 1"):
        RaggedArray.from_list([x[0]], alignment=0)
    with pytest.raises(ValueError, match=r"lengths \[3, 2\], which must be at least the bound 3"):
        RaggedArray.from_list([jnp.ones((3, 4)), jnp.ones((2, 4))], min_length=3)
    with pytest.raises(ValueError, match="must have an axis of rows"):
        RaggedArray.from_list([1.0, 2.0])
    for arrays, words in (
        (x, "must be a list of arrays"),
        ("ab", "arrays is a str"),
        (5, "arrays is a int"),
        ([x[0], None], r"arrays\[1\] is None, must be an array"),
    ):
        with pytest.raises(ValueError, match=words):
            RaggedArray.from_list(arrays)
    kept = jnp.ones((2, 3), bool)
    for operands, words in (
        ((None, kept), "from_mask: x is None, must be an array"),
        ((x, None), "from_mask: mask is None, must be an array"),
        (("x", kept), "from_mask: x is 'x', must be an array"),
    ):
        with pytest.raises(ValueError, match=words):
            RaggedArray.from_mask(*operands)
    with pytest.raises(ValueError, match="from_mask: check is 'no', must be True or False"):
        RaggedArray.from_mask(x, kept, check="no")
    with pytest.raises(ValueError, match=r"is_left_aligned: mask has shape \(\), must be \(B, T\)"):
        jattn.is_left_aligned(jnp.ones((), bool))


@pytest.mark.parametrize("form", [None, "packed", "padded"])
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_numbers_of_heads_are_not_those_of_sequences(name: str, form: str | None) -> None:
    x = RaggedArray(normal(0, 8, 4, 4), jnp.array([0, 3, 8]))
    with pytest.raises(ValueError, match=rf"{name} has shape \(2, 4\), must be \(N,\)"):
        attend(x, x, x, form=form, **{name: jnp.ones((2, 4))})
    np.testing.assert_array_equal(
        attend(x, x, x, form=form, **{name: jnp.ones((1, 4))}).values,
        attend(x, x, x, form=form, **{name: jnp.ones(4)}).values,
    )


def test_options_of_batches_of_problems_are_checked() -> None:
    rows = RaggedArray(jnp.ones((5, 6, 4, 8)), jnp.array([0, 2, 5]))
    other = RaggedArray(jnp.ones((5, 6, 4, 8)), jnp.array([0, 4, 5]))
    with pytest.raises(ValueError, match="form is 'foo'"):
        attend(rows, rows, rows, form="foo")
    with pytest.raises(ValueError, match="return_lse is 1, must be True or False"):
        attend(rows, rows, rows, return_lse=1)
    with pytest.raises(ValueError, match="strict is 'no', must be True or False"):
        attend(rows, rows, rows, strict="no")
    with pytest.raises(ValueError, match="rows in different sequences"):
        attend(rows, other, other)


def test_varlen_takes_windows_and_alignments_as_the_dense_call_does() -> None:
    x, borders = jnp.asarray(normal(0, 7, 2, 8)), jnp.array([0, 3, 7])
    of_keys = jnp.array([0, 2, 7])
    varlen = functools.partial(jattn.flash_mha_varlen, x, x, x, borders, of_keys)
    np.testing.assert_array_equal(varlen(window_size=np.array([1, 0])), varlen(window_size=(1, 0)))
    np.testing.assert_array_equal(varlen(window_size=np.array(3)), varlen(window_size=3))
    with pytest.raises(ValueError, match="max_seqlen_q is True, must be an integer"):
        varlen(max_seqlen_q=True)
    left = varlen(is_causal=True, causal_alignment="upper_left")
    assert not np.allclose(left, varlen(is_causal=True))
    q, k = RaggedArray(x, borders), RaggedArray(x, of_keys)
    np.testing.assert_array_equal(left, attend(q, k, k, is_causal=True).values)


@pytest.mark.parametrize("form", [None, "packed", "padded"])
def test_values_in_other_rows_than_keys_of_one_length_are_refused(form: str | None) -> None:
    x = normal(0, 8, 1, 4)
    q, k = RaggedArray(x, jnp.array([0, 4, 8])), RaggedArray(x, jnp.array([0, 4, 8]), None, 4, 4)
    with pytest.raises(ValueError, match="must share their offsets and lengths"):
        attend(q, k, RaggedArray(x, jnp.array([0, 3, 8])), form=form)


def test_one_sequence_beside_none_is_repeated_no_times() -> None:
    some, none = (
        RaggedArray(normal(0, rows, 1, 4), jnp.array(offsets))
        for rows, offsets in ((3, [0, 3]), (0, [0]))
    )
    for operands in ((some, none, none), (none, some, some)):
        found = attend(*operands)
        assert (found.num_sequences, found.values.shape) == (0, (0, 1, 4))


def test_ids_of_unsigned_types_are_checked() -> None:
    with pytest.raises(ValueError, match="ids must not decrease"):
        RaggedArray.from_segment_ids(jnp.ones((4, 1)), jnp.array([1, 1, 0, 0], jnp.uint32), 2)
    with pytest.raises(ValueError, match="ids have dtype float32, must be integers"):
        RaggedArray.from_segment_ids(jnp.ones((2, 1)), jnp.array([0.0, 1.0]), 2)


def test_rows_that_do_not_fit_are_lost() -> None:
    x = normal(0, 2, 4, 1, 4)
    packed = RaggedArray.from_padded(x, jnp.array([4, 3]), total=5)
    assert packed.offsets.tolist() == [0, 4, 5]
    np.testing.assert_array_equal(packed.values, jnp.concatenate([x[0], x[1, :1]]))
    assert attend(packed, packed, packed).values.shape == (5, 1, 4)


def test_strict_counts_for_batches_of_problems_too() -> None:
    rows = RaggedArray(jnp.ones((3, 2, 1, 4)), jnp.array([0, 0, 3]))
    assert attend(rows, rows, rows).values.shape == (3, 2, 1, 4)
    with pytest.raises(jattn.NoBackendError, match="RAGGED_ZERO_LEN"):
        attend(rows, rows, rows, strict=True)


@pytest.mark.parametrize("form", [None, "packed", "padded"])
def test_values_of_one_length_are_read_in_their_own_rows(form: str | None) -> None:
    """Whether they lie where the keys do is known outside of jit alone; the result is the same."""
    x = normal(0, 8, 2, 4)
    of_keys, of_values = (jnp.array(offsets, jnp.int32) for offsets in ([0, 2, 4], [1, 3, 5]))

    def call(k_offsets: jax.Array, v_offsets: jax.Array) -> Any:
        k, v = (RaggedArray(x, offsets, None, 2, 2) for offsets in (k_offsets, v_offsets))
        return attend(RaggedArray(x, of_keys), k, v, form=form).values

    q, v = (jnp.reshape(rows, (2, 2, 2, 4)) for rows in (x[:4], x[1:5]))
    want = jattn.dot_product_attention(q, q, v).reshape(4, 2, 4)
    for found in (call(of_keys, of_values), jax.jit(call)(of_keys, of_values)):
        np.testing.assert_allclose(found[:4], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", [None, "packed", "padded"])
def test_dropout_without_a_sequence(form: str | None, backend: str) -> None:
    rows = RaggedArray(jnp.ones((5, 2, 8)), jnp.array([0], jnp.int32))
    options = {"dropout_rate": 0.3, "dropout_seed": 7, "form": form, "implementation": backend}
    for broadcast in (False, True):
        found = attend(rows, rows, rows, broadcast_dropout=broadcast, **options)
        np.testing.assert_array_equal(found.values, jnp.zeros((5, 2, 8)))


@pytest.mark.parametrize("convert", [np.asarray, list, jnp.asarray], ids=["numpy", "list", "jax"])
def test_conversions_keep_integers_that_int32_cannot_hold(convert: Callable[..., Any]) -> None:
    large = 2**32 - 1 if convert is jnp.asarray else 2**32
    ids = convert(np.array([0, 0, large, large], "uint32" if large < 2**32 else "int64"))
    found = RaggedArray.from_segment_ids(jnp.ones((4, 1)), ids, 2)
    assert found.segment_ids().tolist() == [0, 0, -1, -1]
    lengths = convert(np.array([3, large], ids[0].dtype))
    assert RaggedArray.from_padded(jnp.ones((2, 3, 4)), lengths).offsets.tolist() == [0, 3, 6]


def test_conversions_take_python_integers_of_any_size() -> None:
    for large in (2**32 + 1, 2**63, 2**80):
        packed = RaggedArray.from_padded(jnp.ones((2, 3, 4)), [3, large])  # type: ignore[arg-type]
        assert packed.offsets.tolist() == [0, 3, 6]


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_narrow_ids_of_many_sequences(dtype: str) -> None:
    found = RaggedArray.from_segment_ids(jnp.ones((3, 1)), jnp.array([0, 1, 1], dtype), 300)
    assert found.segment_ids().tolist() == [0, 1, 1]


@pytest.mark.parametrize("convert", [np.asarray, list], ids=["numpy", "list"])
def test_lengths_that_int32_cannot_hold_are_refused(convert: Callable[..., Any]) -> None:
    x = normal(0, 12, 1, 8)
    with pytest.raises(ValueError, match="seqlens_q holds 4294967308, must be at most"):
        jattn.flash_mha_varlen(x, x, x, convert(np.array([0, 5, 2**32 + 12])))
    with pytest.raises(ValueError, match="seqused_k holds 4294967297, must be at most"):
        jattn.flash_mha_varlen(x, x, x, [0, 12], seqused_k=convert(np.array([2**32 + 1])))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_length": -1}, "max_length is -1, must be an integer from 0"),
        ({"max_length": 4.0}, "max_length is 4.0, must be an integer from 0"),
        ({"max_length": "7"}, "max_length is '7', must be an integer from 0"),
        ({"max_length": True}, "max_length is True, must be an integer from 0"),
        ({"min_length": -1}, "min_length is -1, must be an integer from 0"),
        ({"values": [[[1.0]]]}, "values is a list, must be an array"),
        ({"values": jnp.ones(())}, r"values has shape \(\), must have an axis of rows"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bounds_and_values_are_checked(fields: dict[str, Any], words: str) -> None:
    offsets = jnp.array([0, 1], jnp.int32)

    def call(offsets: jax.Array) -> Any:
        x = RaggedArray(**({"values": jnp.ones((1, 1, 4)), "offsets": offsets} | fields))
        return attend(x, x, x).values

    for function in (call, jax.jit(call)):
        with pytest.raises(ValueError, match=f"ragged_dot_product_attention: query.{words}"):
            function(offsets)


def test_sizes_of_conversions_are_checked() -> None:
    x, lengths, ids = jnp.ones((2, 3, 4)), jnp.array([1, 2]), jnp.array([0, 0])
    make = RaggedArray
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: make.from_padded(x[0, 0], lengths), r"x has shape \(4,\), must be \(B, T"),
        (lambda: make.from_mask(x[0, 0], x[0, 0] > 0), r"x has shape \(4,\), must be \(B, T"),
        (lambda: make.from_padded(x, lengths, total=-1), "total is -1, must be an integer from 0"),
        (
            lambda: make.from_padded(x, lengths, total=2.0),
            "total is 2.0, must be an integer from 0",
        ),  # type: ignore[arg-type]
        (
            lambda: make.from_padded(x, lengths).to_padded(-3),
            "length is -3, must be an integer from 0",
        ),
        (lambda: make.from_padded(x, lengths).to_padded(2.0), "length is 2.0"),  # type: ignore[arg-type]
        (lambda: make.from_list([x], alignment=1.5), "alignment is 1.5, must be an integer from 1"),  # type: ignore[arg-type]
        (
            lambda: make.from_list([x], max_length="3"),
            "max_length is '3', must be an integer from 0",
        ),  # type: ignore[arg-type]
        (
            lambda: make.from_segment_ids(x, ids, -1),
            "num_sequences is -1, must be an integer from 0",
        ),
        (lambda: make.from_segment_ids(x, ids, 1, max_length=2.0), "max_length is 2.0"),  # type: ignore[arg-type]
        (lambda: make.from_segment_ids(jnp.ones(()), ids, 1), r"values has shape \(\)"),
    ]
    for call, words in calls:
        with pytest.raises(ValueError, match=rf"jattn\.RaggedArray.*{words}"):
            call()
    with pytest.raises(ValueError, match="ids have dtype float32, must be integers"):
        jax.jit(lambda ids: make.from_segment_ids(x, ids, 1).values)(jnp.zeros(2))


@pytest.mark.parametrize("form", [None, "packed", "padded"])
@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"causal_alignment": "lower-right"}, "causal_alignment is 'lower-right', must be 'upper"),
        ({"is_causal": True, "causal_alignment": None}, "causal_alignment is None, must be"),
        ({"is_causal": 1}, "is_causal is 1, must be True or False"),
        ({"broadcast_dropout": "no"}, "broadcast_dropout is 'no', must be True or False"),
        ({"compute_dtype": "int32"}, "compute_dtype is int32, must be one of"),
        ({"captures": (1.0,)}, r"captures is \(1.0,\) without score_mod"),
        ({"dropout_rate": 0.1}, "dropout_rate is 0.1 but there is no randomness"),
        ({"dropout_rate": 1.0, "dropout_seed": 3}, "dropout_rate is 1.0, must be"),
        ({"dropout_rate": 0.1, "dropout_seed": "7"}, "dropout_seed is '7'"),
        ({"dropout_rate": 0.1, "dropout_key": jnp.zeros(3)}, "dropout_key has shape"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused_in_every_form(
    keywords: dict[str, Any], words: str, form: str | None
) -> None:
    x = ragged(1, (3, 4), 2, 8)
    y = RaggedArray(x.values, jnp.array([0, 2, 7]))
    with pytest.raises(ValueError, match=rf"jattn\.ragged_dot_product_attention: {words}"):
        attend(x, y, y, form=form, **keywords)


@pytest.mark.parametrize("name", ["is_causal", "broadcast_dropout"])
def test_traced_flags_are_refused_by_name(name: str) -> None:
    x = ragged(1, (3, 4), 2, 8)

    def call(flag: jax.Array) -> Any:
        return attend(x, x, x, dropout_rate=0.1, dropout_seed=3, **{name: flag}).values

    with pytest.raises(ValueError, match=f"{name} is .*known while tracing: make it a static"):
        jax.jit(call)(True)


def test_rows_that_are_whole_problems_have_one_form() -> None:
    rows = RaggedArray(jnp.ones((5, 6, 4, 8)), jnp.array([0, 2, 5]))
    for form in ("packed", "padded"):
        with pytest.raises(ValueError, match=rf"form is '{form}' with values of rank 4, must be"):
            attend(rows, rows, rows, form=form)


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_values_may_be_arrays_of_numpy(form: str) -> None:
    x = ragged(1, (3, 4), 2, 8)
    held = RaggedArray(np.asarray(x.values), np.asarray(x.offsets))  # type: ignore[arg-type]
    want = attend(x, x, x, form=form)
    for operands in ((held, held, held), (held, x, x), (x, held, held)):
        found = attend(*operands, form=form)
        np.testing.assert_allclose(found.values, want.values, rtol=1e-6, atol=1e-6)
    for found_part, want_part in zip(held.to_padded(4), x.to_padded(4), strict=True):
        np.testing.assert_array_equal(found_part, want_part)


def test_the_result_of_a_repeated_query_goes_into_the_next_call() -> None:
    q = RaggedArray(jnp.asarray(normal(0, 5, 2, 8)), jnp.array([2, 5]))
    k = ragged(1, (3, 4), 2, 8)
    first = attend(q, k, k)
    assert first.offsets.tolist() == [2, 7, 10]
    assert first.known_lengths().tolist() == [3, 3]
    again = attend(first, k, k)
    for i, (rows, keys) in enumerate(zip(sequences(first), sequences(k), strict=True)):
        want = textbook(q.values[2:], keys, keys)
        np.testing.assert_allclose(rows, want, rtol=1e-5, atol=1e-5)
        want = textbook(rows, keys, keys)
        np.testing.assert_allclose(sequences(again)[i], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"offsets": jnp.array([0.0, 2.7, 4.0])}, "offsets has dtype float32, must be int32"),
        ({"offsets": [0, 2, 4]}, r"offsets is \[0, 2, 4\], must be an int32 array"),
        ({"lengths": jnp.array([1.0, jnp.nan])}, "lengths has dtype float32, must be int32"),
        ({"lengths": jnp.array([1], jnp.int32)}, r"lengths has shape \(1,\), must be \(2,\)"),
        ({"max_length": -3}, "max_length is -3, must be an integer from 0"),
    ],
)
def test_methods_refuse_what_the_call_refuses(fields: dict[str, Any], words: str) -> None:
    rows = jattn.RaggedArray(jnp.ones((4, 2, 8)), jnp.array([0, 2, 4], jnp.int32))
    wrong = dataclasses.replace(rows, **fields)
    for method in (
        wrong.to_list,
        wrong.rows,
        wrong.segment_ids,
        wrong.bounds,
        lambda: wrong.to_padded(2),
    ):
        with pytest.raises(ValueError, match=f"jattn.RaggedArray.{words}"):
            method()


def test_ragged_biases_and_masks_lie_in_the_same_rows() -> None:
    """Of problems in rows: what belongs to other rows is refused, not read as if it were theirs."""
    x = jattn.RaggedArray(normal(1, 3, 4, 2, 8), jnp.array([0, 1, 3], jnp.int32))
    bias = x.with_values(normal(2, 3, 2, 4, 4))
    assert attend(x, x, x, bias=bias).values.shape == (3, 4, 2, 8)
    elsewhere = dataclasses.replace(bias, offsets=jnp.array([0, 2, 3], jnp.int32))
    with pytest.raises(ValueError, match="query and bias have rows in different sequences"):
        attend(x, x, x, bias=elsewhere)
    nothing = jattn.RaggedArray(None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"mask\.values is a NoneType, must be an array"):
        attend(x, x, x, mask=nothing)


@pytest.mark.parametrize("lead", [(), (2,)], ids=["rank 4", "rank 5"])
def test_rows_that_are_whole_problems_equal_dense_calls(lead: tuple[int, ...]) -> None:
    """Values and gradients under a bias and a mask of each row; keys and values of rows that are padding hold NaN."""
    offsets, lengths = jnp.array([0, 2, 3, 5], jnp.int32), jnp.array([1, 0, 2], jnp.int32)
    has_keys = np.array([True, False, False, True, True])
    q, dout = (normal(i, 5, *lead, 4, 4, 8) for i in (1, 2))
    k, v = (normal(i, 5, *lead, 6, 2, 8) for i in (3, 4))
    bias, mask = normal(5, 5, *lead, 4, 4, 6), bernoulli(6, 0.7, 5, *lead, 4, 4, 6)
    queries, keys = RaggedArray(q, offsets), RaggedArray(k, offsets, lengths)

    @jax.jit
    def ours(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        kv = keys.with_values(k), keys.with_values(v)
        of_rows = {"bias": queries.with_values(bias), "mask": queries.with_values(mask)}
        return attend(queries.with_values(q), *kv, **of_rows).values  # type: ignore[no-any-return]

    def padded(x: jax.Array) -> jax.Array:
        return x.at[~has_keys].set(jnp.nan)

    out, pullback = jax.vjp(ours, q, padded(k), padded(v), bias)
    got = out, *pullback(dout)
    for i, is_real in enumerate(has_keys):
        dense = jax.jit(functools.partial(jattn.dot_product_attention, mask=mask[i]))
        row, pullback = jax.vjp(dense, q[i], k[i], v[i], bias[i])
        for found, want in zip(got, (row, *pullback(dout[i])), strict=True):
            assert np.asarray(want).any()
            np.testing.assert_allclose(found[i], want if is_real else 0 * want, atol=1e-5)


def test_a_shorter_padded_form_cuts_sequences() -> None:
    x = RaggedArray.from_list([jnp.array([1.0, 2.0, 3.0]), jnp.array([4.0])])
    padded, lengths = x.to_padded(2)
    assert padded.tolist() == [[1.0, 2.0], [4.0, 0.0]]
    assert lengths.tolist() == [2, 1]


def test_other_lengths_need_no_new_trace_within_a_bound() -> None:
    traces = 0

    @jax.jit
    def run(x: RaggedArray) -> RaggedArray:
        nonlocal traces
        traces += 1
        return attend(x, x, x)

    for alignment in (1, 4):
        for lengths in ((3, 5), (4, 4), (2, 6), (1, 7)):
            parts = [normal(i, n, 2, 16) for i, n in enumerate(lengths)]
            if alignment > 1:  # as many rows for all
                parts = [x[: 1 + i] for i, x in enumerate(parts)]
            x = RaggedArray.from_list(parts, alignment=alignment, max_length=8)
            assert x.min_length is None
            run(x)
    assert traces == 2
    assert RaggedArray.from_list(parts).min_length == min(map(len, parts))
