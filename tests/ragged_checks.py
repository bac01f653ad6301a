"""What the tiers share about ragged batches: problems, and the comparison of every sequence with the float64 oracle."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn import RaggedArray
from jattn.testing import bounds, compare, inputs, oracle
from jattn.testing.cases import Case
from jattn.testing.inputs import Array, Operands
from jattn.testing.run import assert_ran
from jattn.testing.score_functions import SCORE_FUNCTIONS

# Gradients of what all sequences share.
SHARED = {"dsinks", "dalibi_slopes", *compare.CAPTURES}
SEED = np.array([0x12345678, 0x9ABCDEF0], np.uint32)


@dataclasses.dataclass(frozen=True)
class RaggedCase:
    """A ragged problem without its arrays. ``kv_lengths`` None: self-attention. ``alignment`` makes holes, ``tail``
    appends rows that belong to no sequence. ``score_mod``: the name of one of ``jattn.testing.score_functions``.
    """

    name: str
    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...] | None = None
    num_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 16
    head_dim_v: int = 16
    dtype: str = "float32"
    scale: float | None = None
    softcap: float | None = None
    is_causal: bool = False
    lower_right: bool = False
    window: tuple[int | None, int | None] | None = None
    sinks: bool = False
    alibi: bool = False
    dropout_rate: float = 0.0
    score_mod: str | None = None
    alignment: int = 1
    tail: int = 0

    def __str__(self) -> str:
        return self.name

    def but(self, suffix: str, **changes: Any) -> "RaggedCase":
        return dataclasses.replace(self, name=f"{self.name}-{suffix}", **changes)

    @property
    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of queries and of keys."""
        return self.q_lengths, self.q_lengths if self.kv_lengths is None else self.kv_lengths

    def sequence(self, i: int) -> Case:
        """One sequence as a dense problem."""
        q_lengths, kv_lengths = self.lengths
        return Case(
            name=f"{self.name}[{i}]",
            batch=1,
            q_len=q_lengths[i],
            kv_len=kv_lengths[i],
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            scale=self.scale,
            softcap=self.softcap,
            is_causal=self.is_causal,
            lower_right=self.lower_right,
            window=self.window,
            sinks_form="n" if self.sinks else None,
            alibi_form="n" if self.alibi else None,
            dropout_rate=self.dropout_rate,
            dropout_rows=self.dropout_rate > 0,
            score_mod=self.score_mod,
        )

    def options(self) -> dict[str, Any]:
        """Keyword arguments that have no gradient."""
        options = self.sequence(0).options()
        if self.score_mod is not None:
            options["score_mod"] = SCORE_FUNCTIONS[self.score_mod].score_mod
        return options | ({"dropout_seed": SEED} if self.dropout_rate else {})

    def captures(self) -> tuple[Array, ...]:
        """What the score function reads: integers have an element for each sequence, floats serve all of them."""
        if self.score_mod is None:
            return ()
        rng = inputs.generator(f"{self.name}, captures")
        draw = SCORE_FUNCTIONS[self.score_mod].draw
        return draw(rng, len(self.q_lengths), self.num_heads)

    def per_head(self) -> tuple[Array | None, Array | None]:
        """Sinks and slopes, (N,) float32."""
        rng = inputs.generator(f"{self.name}, per head")
        sinks = rng.standard_normal(self.num_heads).astype(np.float32)
        slopes = (0.5 ** rng.uniform(1, 8, self.num_heads)).astype(np.float32)
        return sinks if self.sinks else None, slopes if self.alibi else None


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Operands of a ragged call with NaN in all padding, and the rows of each sequence."""

    q: RaggedArray
    k: RaggedArray
    v: RaggedArray
    dout: jax.Array
    dlse: jax.Array
    q_rows: list[slice]
    kv_rows: list[slice]


def _layout(lengths: tuple[int, ...], alignment: int, tail: int) -> tuple[Array, list[slice], int]:
    room = [-(-length // alignment) * alignment for length in lengths]
    offsets = np.concatenate([[0], np.cumsum(room)]).astype(np.int32)
    rows = [slice(int(a), int(a) + n) for a, n in zip(offsets, lengths, strict=False)]
    return offsets, rows, int(offsets[-1]) + tail


@functools.lru_cache(maxsize=8)
def make(case: RaggedCase) -> Arrays:
    """Draws the arrays of a case; equal names give equal arrays."""
    rng = inputs.generator(case.name)
    dtype = inputs.numpy_dtype(case.dtype)
    q_lengths, kv_lengths = case.lengths

    def draw(rows: list[slice], total: int, *shape: int, dtype: Any = dtype) -> Array:
        values = np.full((total, *shape), np.nan, dtype)
        for part in rows:
            values[part] = rng.standard_normal((part.stop - part.start, *shape)).astype(dtype)
        return values

    def ragged(values: Array, offsets: Any, lengths: Any, counts: tuple[int, ...]) -> RaggedArray:
        return RaggedArray(jnp.asarray(values), offsets, lengths, max(counts), None)

    q_offsets, q_rows, q_total = _layout(q_lengths, case.alignment, case.tail)
    kv_offsets, kv_rows, kv_total = _layout(kv_lengths, case.alignment, case.tail)

    def structure(offsets: Array, counts: tuple[int, ...]) -> tuple[jax.Array, jax.Array | None]:
        lengths = jnp.asarray(counts, jnp.int32) if case.alignment > 1 else None
        return jnp.asarray(offsets), lengths

    of_q = structure(q_offsets, q_lengths)
    of_kv = of_q if case.kv_lengths is None else structure(kv_offsets, kv_lengths)
    n, m, d, dv = case.num_heads, case.num_kv_heads, case.head_dim, case.head_dim_v
    return Arrays(
        q=ragged(draw(q_rows, q_total, n, d), *of_q, q_lengths),
        k=ragged(draw(kv_rows, kv_total, m, d), *of_kv, kv_lengths),
        v=ragged(draw(kv_rows, kv_total, m, dv), *of_kv, kv_lengths),
        dout=jnp.asarray(draw(q_rows, q_total, n, dv)),
        dlse=jnp.asarray(draw(q_rows, q_total, n, dtype=np.dtype(np.float32))),
        q_rows=q_rows,
        kv_rows=kv_rows,
    )


def run(
    case: RaggedCase, backend: str, *, form: Any = None, arrays: Arrays | None = None
) -> dict[str, Array]:
    """Runs a case through a forced backend under jit: out, lse, dq, dk, dv, all (rows, ...), and with sinks, slopes and
    captures that are floats dsinks and dalibi_slopes (N,), dcapture0 and so on.
    """
    arrays = make(case) if arrays is None else arrays
    keywords, captures = case.options(), case.captures()
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in captures]

    # Offsets are arguments of the jitted function; one structure serves all operands of self-attention.
    @jax.jit
    def both(q: RaggedArray, kv: RaggedArray | None, values: Any, cotangents: Any) -> Any:
        def attend(*values: Any) -> Any:
            keys = q if kv is None else kv
            rest = iter(values[5:])
            read = [next(rest) if flag else x for x, flag in zip(captures, is_float, strict=True)]
            out, lse = jattn.ragged_dot_product_attention(
                q.with_values(values[0]),
                keys.with_values(values[1]),
                keys.with_values(values[2]),
                implementation=backend,
                return_lse=True,
                form=form,
                sinks=values[3],
                alibi_slopes=values[4],
                captures=read,
                **keywords,
            )
            return out.values, lse.values

        results, pullback = jax.vjp(attend, *values)
        return results, pullback(cotangents)

    floats = [x for x, flag in zip(captures, is_float, strict=True) if flag]
    values = (*(x.values for x in (arrays.q, arrays.k, arrays.v)), *case.per_head(), *floats)
    kv = None if case.kv_lengths is None else arrays.k
    before = jattn.call_counters()
    lowered = both.lower(arrays.q, kv, values, (arrays.dout, arrays.dlse))
    assert_ran(backend, before, lowered.as_text(), passes=("forward", "backward"))
    (out, lse), grads = jax.device_get(
        lowered.compile()(arrays.q, kv, values, (arrays.dout, arrays.dlse))
    )
    of_floats = [f"dcapture{i}" for i, flag in enumerate(is_float) if flag]
    names = ("dq", "dk", "dv", "dsinks", "dalibi_slopes", *of_floats)
    named = zip(names, grads, strict=True)
    return {"out": out, "lse": lse, **{name: x for name, x in named if x is not None}}


def _randomness(case: RaggedCase, i: int) -> dict[str, Any]:
    """What the oracle needs to drop the pairs of sequence i: its keys as a table of one packed sequence."""
    if not case.dropout_rate:
        return {}
    n = np.arange(case.num_heads, dtype=np.uint64)
    counter = (np.uint64(i), n, np.uint64(0), np.uint64(0))
    seed = SEED.astype(np.uint64)
    words = oracle.philox(counter, (seed[:1], seed[1:]))
    q_len, kv_len = (lengths[i] for lengths in case.lengths)
    return {
        "dropout_table": np.stack(words[:2], axis=-1).astype(np.uint32)[None],
        "q_segments": np.zeros((1, q_len), np.int32),
        "kv_segments": np.zeros((1, kv_len), np.int32),
        "q_positions": np.arange(q_len, dtype=np.int32)[None],
        "kv_positions": np.arange(kv_len, dtype=np.int32)[None],
    }


def _of_sequence(case: RaggedCase, i: int) -> tuple[Array, ...]:
    """The captures of sequence i alone, which is batch entry 0 there."""
    return tuple(x[i : i + 1] if x.dtype == np.int32 else x for x in case.captures())


def _masked(sequence: Case, operands: Operands) -> tuple[Case, Operands]:
    """The same problem with a mask in the place of a band from the lower right: bands follow positions, and the oracle
    drops pairs by these.
    """
    if not (sequence.dropout_rate and sequence.lower_right):
        return sequence, operands
    assert operands.alibi_slopes is None or sequence.q_len == sequence.kv_len
    left, right = (np.inf if limit is None else limit for limit in sequence.band)
    offset = sequence.kv_len - sequence.q_len
    distance = np.arange(sequence.kv_len) - np.arange(sequence.q_len)[:, None] - offset
    mask = (distance >= -left) & (distance <= right)
    sequence = dataclasses.replace(
        sequence, is_causal=False, lower_right=False, window=None, mask_form="ts"
    )
    return sequence, dataclasses.replace(operands, mask=mask)


def verify(case: RaggedCase, backend: str, *, form: Any = None) -> dict[str, Array]:
    """Runs a case and compares every sequence with the oracle; padding must be zeros (lse: -inf).

    Raises:
      AssertionError: a sequence is wrong, another backend ran, or padding leaks.
    """
    arrays, results = make(case), run(case, backend, form=form)
    rows_of = {name: x for name, x in results.items() if name not in SHARED}
    for name, x in rows_of.items():
        rows = arrays.kv_rows if name in ("dk", "dv") else arrays.q_rows
        padding = np.ones(x.shape[0], bool)
        for part in rows:
            padding[part] = False
        want = -np.inf if name == "lse" else 0
        assert (x[padding] == want).all(), f"{name}: padding must hold {want}"
    q, k, v = (np.asarray(x.values) for x in (arrays.q, arrays.k, arrays.v))
    dout, dlse = np.asarray(arrays.dout), np.asarray(arrays.dlse)
    sinks, slopes = case.per_head()
    sums: dict[str, Array] = {}  # values, error bounds and squares of these
    for i, (of_q, of_kv) in enumerate(zip(arrays.q_rows, arrays.kv_rows, strict=True)):
        found = {
            name: x[of_kv if name in ("dk", "dv") else of_q][None] for name, x in rows_of.items()
        }
        if of_q.start == of_q.stop or of_kv.start == of_kv.stop:
            for name, x in found.items():
                assert (x == (-np.inf if name == "lse" else 0)).all(), f"{name} of sequence {i}"
            continue
        sequence = case.sequence(i)
        operands = Operands(
            q=q[of_q][None], k=k[of_kv][None], v=v[of_kv][None], dout=dout[of_q][None], dlse=dlse[of_q][None],
            sinks=sinks, alibi_slopes=slopes, captures=_of_sequence(case, i), **_randomness(case, i),
        )  # fmt: skip
        sequence, operands = _masked(sequence, operands)
        solution = oracle.solve(sequence, operands)
        compare.assert_close(sequence, operands, found, solution=solution)
        limits = bounds.bounds(sequence, operands, solution, bounds.units(case.dtype), "float32")
        for name in SHARED & set(results):
            more = np.stack([getattr(solution, name), limits[name], np.square(limits[name])])
            sums[name] = sums.get(name, 0) + more
    for name in SHARED & set(results):
        # Errors of sequences are independent, as those of rows are.
        want, bound, squares = sums[name]
        apart = bounds.WHOLE_ROWS * np.sqrt(squares) + bounds.IN_COMMON * bound
        bound = np.minimum(bound, apart)
        error = np.abs(results[name] - want)
        assert (error <= bound).all(), f"{name}: error {error}, bound {bound}"
    return results


def drawn_lengths(name: str, count: int, low: int, high: int) -> tuple[int, ...]:
    """Random lengths in [low, high]; one of them is ``high``."""
    rng = inputs.generator(name)
    lengths = rng.integers(low, high + 1, count)
    lengths[rng.integers(count)] = high
    return tuple(int(x) for x in lengths)


def _r100() -> list[RaggedCase]:
    """Row R100: types, head dims, counts and causality take turns; self- and cross-attention (R101)."""
    found = []
    masks: tuple[dict[str, Any], ...] = (
        {},
        {"is_causal": True},
        {"is_causal": True, "lower_right": True},
    )
    for i, (count, head_dim) in enumerate((b, d) for b in (1, 5, 32) for d in (8, 64, 128)):
        for j, dtype in enumerate(("float16", "bfloat16", "float32")):
            kind = masks[(i + j) % 3]
            name = f"R100-B{count}-D{head_dim}-{dtype}-{'-'.join(kind) or 'full'}"
            high = 300 if count < 32 else 90
            q_lengths = drawn_lengths(f"{name}-q", count, 0, high)
            is_self = (i + 2 * j) % 4 == 0
            found.append(
                RaggedCase(
                    name=name + ("-self" if is_self else "-cross"),
                    q_lengths=q_lengths,
                    kv_lengths=None if is_self else drawn_lengths(f"{name}-k", count, 0, high),
                    head_dim=head_dim,
                    head_dim_v=head_dim,
                    dtype=dtype,
                    **kind,
                )
            )
    return found


R100 = _r100()


def _t079() -> list[RaggedCase]:
    """A grid without dropout; causality takes turns."""
    found = []
    for i, (count, q_high, kv_high, head_dim, scaled) in enumerate(
        (b, t, s, d, c) for b in (8, 32) for t in (32, 256) for s in (32, 256) for d in (8, 64) for c in (0, 1)
    ):  # fmt: skip
        name = f"T079-B{count}-T{q_high}-S{kv_high}-D{head_dim}-{i}"
        found.append(
            RaggedCase(
                name,
                drawn_lengths(f"{name}-q", count, 1, q_high),
                drawn_lengths(f"{name}-k", count, 1, kv_high),
                head_dim=head_dim,
                head_dim_v=head_dim,
                dtype="float16",
                scale=1 / head_dim if scaled else None,
                is_causal=(i // 2 + i) % 2 == 0,
            )
        )
    return found


T079 = _t079()

_BASE = RaggedCase("ragged", (7, 0, 40, 1, 18), (3, 20, 65, 1, 0), tail=5)
_SELF = RaggedCase("ragged-self", (7, 0, 40, 1, 18), tail=3)

FEATURES = [
    _BASE.but("window", window=(5, 2)),
    _BASE.but("window-lower-right", window=(9, 0), lower_right=True, alignment=16),
    _BASE.but("softcap-gqa", softcap=3.0, num_heads=6, head_dim_v=24, dtype="bfloat16"),
    _BASE.but("negative-scale", scale=-0.4, is_causal=True),
    _SELF.but("causal-holes", is_causal=True, alignment=8),
    _BASE.but("sinks-alibi", sinks=True, alibi=True, num_heads=4),
    _BASE.but("alibi-lower-right", alibi=True, lower_right=True, is_causal=True, dtype="bfloat16"),
    _SELF.but("alibi-self-lower-right", alibi=True, lower_right=True, alignment=16),
    _BASE.but("dropout", dropout_rate=0.3, is_causal=True, num_heads=4, alignment=8),
    _BASE.but("dropout-lower-right", dropout_rate=0.3, is_causal=True, window=(9, None), lower_right=True, alignment=8),
    _SELF.but("everything", dropout_rate=0.2, is_causal=True, window=(20, None), softcap=4.0, sinks=True, alibi=True,
              num_heads=4, head_dim_v=24, lower_right=True, dtype="float16"),
    _SELF.but("window-lower-right", window=(4, None), is_causal=True, lower_right=True, dtype="float16"),
]  # fmt: skip

_EVERYTHING = FEATURES[10]
# Score functions with each other feature.
PROGRAMS = [
    case.but(f"{suffix}-{name}", score_mod=name, **changes)
    for name in SCORE_FUNCTIONS
    for suffix, case, changes in (
        ("cross", _BASE, {"alignment": 16}),
        ("causal", _BASE, {"is_causal": True, "num_heads": 4}),
        ("lower-right", _BASE, {"is_causal": True, "lower_right": True, "alignment": 8}),
        ("self", _SELF, {"is_causal": True, "alignment": 8}),
        ("window", _BASE, {"window": (5, 2), "softcap": 3.0}),
        ("alibi-sinks", _BASE, {"sinks": True, "alibi": True, "lower_right": True}),
        ("dropout", _BASE, {"dropout_rate": 0.3, "alignment": 8}),
        ("all", _EVERYTHING, {"num_kv_heads": 2}),
    )
]

# Many tiles of packed rows, and several of some sequences; prime counts, so that none ends with a tile.
LONG_PROGRAMS = [
    RaggedCase(
        f"long-{kind}-{name}",
        (211, 0, 401, 3, 97, 353),
        None if kind == "self" else (157, 83, 499, 0, 1, 307),
        num_heads=4,
        head_dim=64,
        head_dim_v=64,
        dtype="bfloat16",
        is_causal=True,
        lower_right=kind == "lower-right",
        score_mod=name,
        tail=7,
    )
    for name in SCORE_FUNCTIONS
    for kind in ("self", "cross", "lower-right")
]
