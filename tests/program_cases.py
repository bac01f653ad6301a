"""Score functions for the tests of device code: every primitive, and every way of reading a capture."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from scipy import special

from jattn import RaggedArray, packed_rows
from jattn.score_program import ScoreProgram, trace

F32 = npt.NDArray[np.float32]

SIZES = BATCH, HEADS, QUERIES, KEYS = 2, 3, 5, 7


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A score function with the arrays that it reads.

    Attributes:
      ulps: how many float32 units in the last place its results may be off.
      x64: it needs 64-bit types.
    """

    name: str
    score_mod: Callable[..., Any]
    captures: tuple[Any, ...]
    ulps: int
    x64: bool


CASES: list[Case] = []


@functools.cache
def traced(case: Case) -> tuple[ScoreProgram, tuple[jax.Array, ...]]:
    """The program of a case, and the arrays that it reads."""
    with jax.enable_x64(case.x64):
        return trace(case.score_mod, case.captures, BATCH)


def case(
    name: str, score_mod: Callable[..., Any], *captures: Any, ulps: int = 4, x64: bool = False
) -> None:
    CASES.append(Case(name, score_mod, captures, ulps, x64))


RANDOM = np.random.default_rng(7)


def floats(*shape: int, dtype: Any = np.float32) -> Any:
    return np.asarray(RANDOM.normal(size=shape), dtype)


def ints(low: int, high: int, *shape: int, dtype: Any = np.int32) -> Any:
    return RANDOM.integers(low, high, shape).astype(dtype)


# ---- Row F100 of flex.md ---------------------------------------------------------------------------------------------

case("identity", lambda s, b, h, q, k: s, ulps=0)
case("times two", lambda s, b, h, q, k: s * 2, ulps=0)
case("square", lambda s, b, h, q, k: s * s)
case("causal", lambda s, b, h, q, k: jnp.where(q >= k, s, -jnp.inf), ulps=0)
case("relative", lambda s, b, h, q, k: s + (q - k), ulps=0)
case("relative causal", lambda s, b, h, q, k: jnp.where(q >= k, s + (q - k), -jnp.inf), ulps=0)
case("alibi", lambda s, b, h, q, k: s + 2.0 ** (-8.0 * (h + 1) / HEADS) * (k - q))
case("head offset", lambda s, b, h, q, k, x: s + x[h], floats(HEADS), ulps=0)
case("batch offset", lambda s, b, h, q, k, x: s + x[b], floats(BATCH), ulps=0)
case("softcap", lambda s, b, h, q, k: 20 * jnp.tanh(s / 20), ulps=8)
case("sin and cos", lambda s, b, h, q, k: jnp.sin(s) + jnp.cos(3 * s), ulps=8)
case("window", lambda s, b, h, q, k: jnp.where(jnp.abs(q - k) <= 2, s, -jnp.inf), ulps=0)
case(
    "prefix",
    lambda s, b, h, q, k, x: jnp.where((k <= q) | (k < x[b]), s, -jnp.inf),
    np.asarray([2, 4], np.int32),
    ulps=0,
)
case(
    "documents",
    lambda s, b, h, q, k, x: jnp.where(x[q] == x[k], s, -jnp.inf),
    ints(0, 3, KEYS),
    ulps=0,
)
case(
    "documents of a batch",
    lambda s, b, h, q, k, x: jnp.where(x[b, q] == x[b, k], s, -jnp.inf),
    ints(0, 3, BATCH, KEYS),
    ulps=0,
)
case("bias of pairs", lambda s, b, h, q, k, x: s + x[q, k], floats(QUERIES, KEYS), ulps=0)
case("bias of heads", lambda s, b, h, q, k, x: s + x[h, q, k], floats(HEADS, QUERIES, KEYS), ulps=0)
case("full bias", lambda s, b, h, q, k, x: s + x[b, h, q, k], floats(*SIZES), ulps=0)
case("two captures", lambda s, b, h, q, k, x, y: s * x[h] + y[k], floats(HEADS), floats(KEYS))
case(
    "indices alone",
    lambda s, b, h, q, k: (1000 * b + 100 * h + 10 * q + k).astype(jnp.float32),
    ulps=0,
)
case("a constant", lambda s, b, h, q, k: jnp.float32(0.1), ulps=0)

case("causal softcap", lambda s, b, h, q, k: jnp.where(q >= k, 20 * jnp.tanh(s / 20), -jnp.inf))
case(
    "functions behind masks",
    lambda s, b, h, q, k: jnp.where(q >= k, jnp.sin(s) / (2 + jnp.exp(s)), jnp.cbrt(s)),
    ulps=16,
)
case(
    "reads behind masks",
    lambda s, b, h, q, k, x, y: s + jnp.where(q >= k, x[h, q, k] * y[q], x[0, k, q] - y[k]),
    floats(HEADS, KEYS, KEYS),
    floats(KEYS),
)
case(
    "divisions behind masks",
    lambda s, b, h, q, k: s + jnp.where(q >= k, q // (k + 1), lax.rem(k, q + 1)),
    ulps=0,
)

# ---- Ways of reading a capture ---------------------------------------------------------------------------------------

CUBE = floats(HEADS, QUERIES, KEYS)
ROW = floats(KEYS)
case("chained", lambda s, b, h, q, k, x: s + x[h][q][k], CUBE, ulps=0)
case("chained from behind", lambda s, b, h, q, k, x: s + x[..., k][:, q][h], CUBE, ulps=0)
case(
    "table of distances",
    lambda s, b, h, q, k, x: s + x[b, h, q - k + KEYS - 1],
    floats(BATCH, HEADS, QUERIES + KEYS - 1),
    ulps=0,
)
case("negative", lambda s, b, h, q, k, x: s + x[k - KEYS] + x[-1] + x[-1 - h], ROW, ulps=2)
case("outside", lambda s, b, h, q, k, x: s + x[3 * k - 8], ROW, ulps=0)
case("ids of ids", lambda s, b, h, q, k, x, ids: s + x[ids[q]], ROW, ints(0, KEYS, QUERIES), ulps=0)
case(
    "ids outside", lambda s, b, h, q, k, x, ids: s + x[ids[q]], ROW, ints(-99, 99, QUERIES), ulps=0
)
case("take", lambda s, b, h, q, k, x: s + jnp.take(x, 2 * k - 4), ROW, ulps=0)
case("take along an axis", lambda s, b, h, q, k, x: s + jnp.take(x, q, axis=1)[h, k], CUBE, ulps=0)
case("take and clip", lambda s, b, h, q, k, x: s + jnp.take(x, 2 * k - 4, mode="clip"), ROW, ulps=0)
case("take and wrap", lambda s, b, h, q, k, x: s + jnp.take(x, 2 * k - 4, mode="wrap"), ROW, ulps=0)
for mode in ("clip", "fill", "promise_in_bounds"):
    case(
        f"get {mode}",
        lambda s, b, h, q, k, x, mode=mode: s + x.at[h, 2 * q, 2 * k - 3].get(mode=mode),
        CUBE,
        ulps=0,
    )
case(
    "get fill with",
    lambda s, b, h, q, k, x: (
        s + x.at[2 * h, k - q].get(mode="fill", fill_value=-3.5, wrap_negative_indices=False)
    ),
    floats(HEADS, KEYS),
    ulps=0,
)
case(
    "get fill of integers",
    lambda s, b, h, q, k, x: s + x.at[2 * k].get(mode="fill").astype(jnp.float32),
    ints(-9, 9, KEYS),
    ulps=0,
)
case(
    "get fill of bools",
    lambda s, b, h, q, k, x: jnp.where(x.at[2 * k].get(mode="fill"), s, 0.0),
    RANDOM.random(KEYS) < 0.5,
    ulps=0,
)
case(
    "small indices",
    lambda s, b, h, q, k, x, i: s + x[i[k]],
    floats(300),
    ints(-128, 128, KEYS, dtype=np.int8),
    ulps=0,
)
case(
    "byte indices",
    lambda s, b, h, q, k, x, i: s + x[i[k]],
    floats(300),
    ints(0, 256, KEYS, dtype=np.uint8),
    ulps=0,
)
case(
    "unsigned indices",
    lambda s, b, h, q, k, x, i: s + x[i[k]],
    ROW,
    np.asarray([0, 1, 6, 7, 2**31, 2**32 - 1, 3], np.uint32),
    ulps=0,
)
case("gathered rows", lambda s, b, h, q, k, x: s + x[jnp.array([2, 0, 1])][h, q, k], CUBE, ulps=0)
case(
    "gathered at ids",
    lambda s, b, h, q, k, x, ids: s + x[:, ids][h, q, k],
    CUBE,
    ints(0, QUERIES, QUERIES),
    ulps=0,
)
case(
    "gathered pairs",
    lambda s, b, h, q, k, x, i, j: s + x[i, j][k],
    floats(QUERIES, KEYS),
    ints(-9, 9, KEYS),
    ints(-9, 9, KEYS),
    ulps=0,
)
case(
    "gathered windows",
    lambda s, b, h, q, k, x: s + lax.dynamic_slice(x, (q - 1, k), (2, 3))[1, 2],
    floats(QUERIES, KEYS),
    ulps=0,
)
case(
    "vmapped reads",
    lambda s, b, h, q, k, x: s + jax.vmap(lambda row, i: row[i])(x, jnp.arange(QUERIES) + k - 4)[q],
    floats(QUERIES, KEYS),
    ulps=0,
)
case("slices", lambda s, b, h, q, k, x: s + x[1:, ::2, 1:-1][h - 1, q // 2, k - 1], CUBE, ulps=0)
case(
    "reversed",
    lambda s, b, h, q, k, x: s + x[::-1, :, ::-1][h, q, k] + jnp.flip(x, 1)[h, q, k],
    CUBE,
    ulps=0,
)
case(
    "transposed",
    lambda s, b, h, q, k, x: s + x.T[k, q, h] + x.transpose(1, 2, 0)[q, k, h],
    CUBE,
    ulps=0,
)
case(
    "reshaped",
    lambda s, b, h, q, k, x: (
        s + x.reshape(-1)[(h * QUERIES + q) * KEYS + k] + x.reshape(5, 3, 1, 7)[q, h, 0, k]
    ),
    CUBE,
    ulps=0,
)
case(
    "flattened in part",
    lambda s, b, h, q, k, x: (
        s + x.reshape(HEADS, -1)[h, q * KEYS + k] + x[None, ..., None][0, h, q, k, 0]
    ),
    CUBE,
    ulps=0,
)
case(
    "broadcast",
    lambda s, b, h, q, k, x: (
        s + jnp.broadcast_to(x[:, None], (KEYS, 4))[k, 2] + jnp.tile(x, 2)[k + q]
    ),
    ROW,
    ulps=0,
)
case(
    "computed arrays",
    lambda s, b, h, q, k, x, y: s + jnp.exp(2 * x - y[:, None, None])[h, q, k],
    CUBE,
    floats(HEADS),
    ulps=8,
)
case(
    "masked arrays",
    lambda s, b, h, q, k, x: s + jnp.where(x > 0, x, -1.0)[q, k] + jnp.clip(x, -0.5, 0.5)[q, k],
    floats(QUERIES, KEYS),
    ulps=2,
)
case(
    "triangle",
    lambda s, b, h, q, k: jnp.where(jnp.tril(jnp.ones((KEYS, KEYS), bool))[q, k], s, -1e30),
    ulps=0,
)
case(
    "iota",
    lambda s, b, h, q, k: (
        s + jnp.arange(3, 30, 3)[k] + lax.broadcasted_iota(jnp.float32, (9, 9), 1)[q, k]
    ),
    ulps=0,
)
case(
    "concatenated",
    lambda s, b, h, q, k, x, y: s + jnp.concatenate([x, 2 * y, x[:2]])[k + 2 * q],
    ROW,
    floats(QUERIES),
    ulps=0,
)
case(
    "stacked",
    lambda s, b, h, q, k, x: (
        s + jnp.stack([x, -x, jnp.zeros_like(x)])[h, k] + jnp.stack([s, 2 * s])[b]
    ),
    ROW,
    ulps=4,
)
case(
    "padded",
    lambda s, b, h, q, k, x: s + jnp.pad(x, ((1, 2), (2, 0)), constant_values=9.0)[q + 1, k + 1],
    floats(QUERIES, KEYS),
    ulps=0,
)
case(
    "padded inside",
    lambda s, b, h, q, k, x: s + lax.pad(x, jnp.float32(5), ((-1, 3, 2),))[2 * k + q],
    ROW,
    ulps=0,
)
case(
    "split",
    lambda s, b, h, q, k, x: s + jnp.split(x, [2, 5])[1][k - 2] + jnp.split(x, [2, 5])[2][h],
    ROW,
    ulps=0,
)
case(
    "updated",
    lambda s, b, h, q, k, x, y: s + lax.dynamic_update_slice(x, y, (h - 1,))[k],
    ROW,
    floats(3),
    ulps=0,
)
case(
    "nothing beside",
    lambda s, b, h, q, k, x: s + jnp.roll(x, 7)[k] + lax.pad(x[:0], jnp.float32(2), [(3, 4, 0)])[k],
    ROW,
    ulps=2,
)
case("rolled", lambda s, b, h, q, k, x: s + jnp.roll(x, 3)[k], ROW, ulps=0)
case("scalar captures", lambda s, b, h, q, k, x, y: s * x + y, np.float32(0.7), np.int32(3), ulps=2)
case(
    "captures of one element",
    lambda s, b, h, q, k, x: s + x[0] + x[0, 0] if x.ndim > 1 else s * x[0],
    floats(1),
    ulps=2,
)
case(
    "constant array",
    lambda s, b, h, q, k: s + jnp.array([0.1, -jnp.inf, 3.0, 5e-40, 1e38])[q],
    ulps=0,
)
case(
    "many captures",
    lambda s, b, h, q, k, *x: s + sum(y[k] for y in x),
    *(floats(KEYS) for _ in range(16)),
    ulps=16,
)

# ---- Types of captures -----------------------------------------------------------------------------------------------

for dtype in (np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32):
    values = ints(-99, 99, KEYS).astype(dtype)
    case(
        f"capture {np.dtype(dtype)}",
        lambda s, b, h, q, k, x: s + x[k].astype(jnp.float32),
        values,
        ulps=0,
    )
case(
    "capture bool",
    lambda s, b, h, q, k, x: jnp.where(x[q, k], s, -jnp.inf),
    RANDOM.random((QUERIES, KEYS)) < 0.5,
    ulps=0,
)
for half in (jnp.float16, jnp.bfloat16):
    values = floats(QUERIES, KEYS, dtype=half)
    name = jnp.dtype(half).name
    case(f"capture {name}", lambda s, b, h, q, k, x: s + x[q, k], values, ulps=0)
    case(
        f"arithmetic {name}",
        lambda s, b, h, q, k, x: s + (x[q, k] * x[q, 0] - 3 / x[0, k]) ** 2,
        values,
        ulps=0,
    )
    case(
        f"functions {name}",
        lambda s, b, h, q, k, x: jnp.sqrt(jnp.abs(s.astype(x.dtype))) + jnp.tanh(x[q, k]),
        values,
        ulps=2**17 if half == jnp.bfloat16 else 2**14,
    )
    case(
        f"integers {name}",
        lambda s, b, h, q, k, x: (
            (x[q, k] * 50).astype(jnp.int8) + (s + 2049 + 3 * k).astype(x.dtype)
        ),
        values,
        ulps=0,
    )
case(
    "capture float64",
    lambda s, b, h, q, k, x: s + x[q, k],
    floats(QUERIES, KEYS, dtype=np.float64),
    ulps=0,
    x64=True,
)
case(
    "arithmetic float64",
    lambda s, b, h, q, k, x: (
        jnp.sqrt(jnp.abs(x[q, k])) / (x[q, 0] + 3) * s
        + jnp.floor(x[0, k])
        - jnp.maximum(x[q, k], s)
        + (x[q, k] * 1e10 % 7.0)
        + jnp.sign(x[q, k])
        + x[q, k] ** 3
    ),
    floats(QUERIES, KEYS, dtype=np.float64),
    ulps=1,
    x64=True,
)
case(
    "capture int64",
    lambda s, b, h, q, k, x: s + (x[k] // 7 * 3 - 2**40 % x[k]),
    ints(1, 2**62, KEYS, dtype=np.int64),
    ulps=0,
    x64=True,
)
case(
    "capture uint64",
    lambda s, b, h, q, k, x: s + (x[k] * jnp.uint64(0x9E3779B97F4A7C15) >> 40),
    ints(0, 2**63, KEYS, dtype=np.uint64),
    ulps=0,
    x64=True,
)
case(
    "wide indices",
    lambda s, b, h, q, k, x, i: s + x[i[k]],
    ROW,
    ints(-(2**62), 2**62, KEYS, dtype=np.int64),
    ulps=0,
    x64=True,
)
case(
    "float64 to others",
    lambda s, b, h, q, k, x: (
        s
        + (x[k] * 1e5).astype(jnp.int64)
        + (x[k] * 1e5).astype(jnp.int16)
        + x[k].astype(jnp.bfloat16)
    ),
    floats(KEYS, dtype=np.float64),
    ulps=1,
    x64=True,
)

# ---- Primitives ------------------------------------------------------------------------------------------------------

case("add sub mul div neg", lambda s, b, h, q, k: (s + 1.5) / (-s - 3) * s - s / 7, ulps=16)
case(
    "divisions", lambda s, b, h, q, k: s / (k - 3) + s / 49 + 3 / s + jnp.floor(q * 49 / 49), ulps=8
)
case("abs sign", lambda s, b, h, q, k: jnp.abs(s) + 2 * jnp.sign(s) + jnp.sign(q - k), ulps=2)
case("max min", lambda s, b, h, q, k: jnp.maximum(s, 0.3) - jnp.minimum(s, k), ulps=2)
case("clamp", lambda s, b, h, q, k: jnp.clip(s, -1.0, k) + jnp.clip(q - k, -2, 2), ulps=2)
case("exp", lambda s, b, h, q, k: jnp.exp(s) + jnp.exp2(s) + jnp.expm1(s), ulps=8)
case("log", lambda s, b, h, q, k: jnp.log(jnp.abs(s)) + jnp.log1p(s * s), ulps=32)
case(
    "roots",
    lambda s, b, h, q, k: jnp.sqrt(jnp.abs(s)) + lax.rsqrt(1 + s * s) + jnp.cbrt(s),
    ulps=16,
)
case(
    "powers",
    lambda s, b, h, q, k: (
        s**3 + lax.integer_pow(s, -2) + lax.pow(jnp.abs(s), 1.7) + lax.pow(s, k - 3)
    ),
    ulps=32,
)
case(
    "sigmoids",
    lambda s, b, h, q, k: jax.nn.sigmoid(s) + jax.nn.silu(s) + jax.nn.relu(s) + jax.nn.softplus(s),
    ulps=16,
)
case("gelu", lambda s, b, h, q, k: jax.nn.gelu(s, approximate=False) + jax.nn.gelu(s), ulps=32)
case("error functions", lambda s, b, h, q, k: lax.erf(s) + lax.erfc(s), ulps=8)
case(
    "angles",
    lambda s, b, h, q, k: (
        jnp.tan(s / 9)
        + jnp.arctan(s)
        + jnp.arctan2(s, k - 3.5)
        + jnp.arcsin(jnp.sin(s) / 2)
        + jnp.arccos(jnp.cos(s) / 2)
    ),
    ulps=64,
)
case(
    "hyperbolic",
    lambda s, b, h, q, k: (
        jnp.sinh(s / 4)
        + jnp.cosh(s / 4)
        + jnp.arcsinh(s)
        + jnp.arccosh(1.5 + s * s)
        + jnp.arctanh(jnp.tanh(s / 9))
    ),
    ulps=64,
)
case(
    "rounding",
    lambda s, b, h, q, k: (
        jnp.floor(s)
        + 10 * jnp.ceil(s)
        + 100 * jnp.round(2 * s)
        + 1000 * lax.round(s, lax.RoundingMethod.AWAY_FROM_ZERO)
    ),
    ulps=0,
)
case(
    "halves",
    lambda s, b, h, q, k: (
        s + jnp.round((k - 3) / 2) + 10 * lax.round((k - 3) / 2, lax.RoundingMethod.AWAY_FROM_ZERO)
    ),
    ulps=0,
)
case(
    "remainders of floats",
    lambda s, b, h, q, k: lax.rem(s, 0.7) + jnp.mod(s, -1.3) + lax.rem(s, k - 3.0),
    ulps=16,
)
case(
    "comparisons",
    lambda s, b, h, q, k: sum(
        jnp.where(x, 2.0**i, 0.0)
        for i, x in enumerate(
            (
                s < 0,
                s <= k,
                s > q,
                s >= 1,
                s == 0,
                s != 0,
                q < k,
                q <= k,
                q > k,
                q >= k,
                q == k,
                q != k,
            )
        )
    ),
    ulps=0,
)
case(
    "bools",
    lambda s, b, h, q, k: jnp.where(((q > k) & (s > 0)) | ~(k == 3) ^ (h == 1), s, 2 * s),
    ulps=0,
)
case("bits", lambda s, b, h, q, k: s + ((q & k) + (q | 8) * 2 - (q ^ k) + ~k), ulps=0)
case(
    "shifts",
    lambda s, b, h, q, k: (
        s
        + (
            (q << k)
            + (-7 * q >> h)
            + lax.shift_right_logical(-q, 9 * k) % 1001
            + lax.shift_left(q, 9 * k) % 997
            + lax.shift_right_arithmetic(-q, 9 * k)
        )
    ),
    ulps=0,
)
case(
    "shifts of unsigned integers",
    lambda s, b, h, q, k, words, halves, bytes_: (
        s
        + lax.shift_right_arithmetic(words[q], (9 * k).astype(jnp.uint32)) % jnp.uint32(997)
        + lax.shift_right_logical(words[q], (9 * k).astype(jnp.uint32)) % jnp.uint32(991)
        + lax.shift_right_arithmetic(halves[q], (4 * k).astype(jnp.uint16))
        + lax.shift_left(halves[q], (4 * k).astype(jnp.uint16))
        + lax.shift_right_arithmetic(bytes_[k], (3 * q).astype(jnp.uint8))
    ),
    np.array([0x80000000, 0xFFFFFFFF, 0x7FFFFFFF, 1, 0x87654321], np.uint32),
    np.array([0x8000, 0xFFFF, 0x7FFF, 1, 0x8765], np.uint16),
    np.array([0x80, 0xFF, 0x7F, 1, 0x87, 0x40, 0], np.uint8),
    ulps=0,
)
case(
    "select of three",
    lambda s, b, h, q, k: (
        lax.select_n(h, s, 2 * s, -s) + lax.select_n(jnp.clip(k - q, 0, 1), 1.0, 2.0)
    ),
    ulps=2,
)
case(
    "is finite",
    lambda s, b, h, q, k: (
        jnp.where(jnp.isfinite(s), s, 7.0)
        + jnp.where(jnp.isnan(s), 1.0, 0.0)
        + jnp.where(jnp.isinf(s), 2.0, 0.0)
    ),
    ulps=0,
)
case(
    "nan to num", lambda s, b, h, q, k: jnp.nan_to_num(s, nan=1.0, posinf=2.0, neginf=-2.0), ulps=0
)
case(
    "conversions",
    lambda s, b, h, q, k: sum(
        (s * 40).astype(x).astype(jnp.float32) * 2.0**-i
        for i, x in enumerate(
            (jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32, bool)
        )
    ),
    ulps=2,
)
case(
    "saturation",
    lambda s, b, h, q, k: (
        (s * 1e10).astype(jnp.int32).astype(jnp.float32) / 1e9
        + (s * 1e10).astype(jnp.uint32).astype(jnp.float32)
    ),
    ulps=2,
)
case(
    "narrowing",
    lambda s, b, h, q, k: (
        s
        + (
            (q * 1234567 + k).astype(jnp.int8).astype(jnp.float32)
            + (q * 1234567).astype(jnp.uint16).astype(jnp.int16)
        )
    ),
    ulps=0,
)
case(
    "division of integers",
    lambda s, b, h, q, k: (
        s
        + (
            lax.div(7 * q - 9, k - 3)
            + 100 * lax.rem(7 * q - 9, k - 3)
            + 1000 * ((q - 4) // 3)
            + (q - 9) % 4
        )
    ),
    ulps=0,
)
case(
    "least integer",
    lambda s, b, h, q, k: (
        s
        + (lax.div(jnp.int32(-(2**31)) + h, k - 4) + jnp.abs(jnp.int32(-(2**31)) + h)).astype(
            jnp.float32
        )
    ),
    ulps=0,
)
case(
    "hash",
    lambda s, b, h, q, k: jnp.where(
        (((q * 73856093) ^ (k * 19349663) ^ (h * 83492791)) & 0xFFFF) > 30000, s, 0.0
    ),
    ulps=0,
)
case(
    "unsigned hash",
    lambda s, b, h, q, k: (
        s
        + (
            ((q.astype(jnp.uint32) * jnp.uint32(2654435761)) ^ k.astype(jnp.uint32))
            * jnp.uint32(2246822519)
            >> jnp.uint32(16)
        ).astype(jnp.float32)
    ),
    ulps=0,
)
case(
    "small integers",
    lambda s, b, h, q, k: (
        s
        + (
            (q.astype(jnp.int8) * 45 + (k.astype(jnp.uint8) - 9).astype(jnp.int8)).astype(
                jnp.float32
            )
            + (q.astype(jnp.uint16) * jnp.uint16(40000)).astype(jnp.float32)
        )
    ),
    ulps=0,
)
case(
    "counts of bits",
    lambda s, b, h, q, k: (
        s
        + (
            lax.population_count(q - k)
            + lax.clz(k)
            + lax.clz(k.astype(jnp.uint8))
            + lax.population_count((q - k).astype(jnp.int16))
        )
    ),
    ulps=0,
)
case("integer powers", lambda s, b, h, q, k: s + (q - 2) ** 3 + jnp.power(q, h), ulps=0)
case(
    "reduced precision",
    lambda s, b, h, q, k: (
        lax.reduce_precision(s, 8, 7)
        + lax.reduce_precision(s, 5, 10)
        + lax.reduce_precision(s, 4, 3)
    ),
    ulps=2,
)
case(
    "precision of one bit of an exponent",  # such a number is 0 or infinite
    lambda s, b, h, q, k: (
        s
        + 1 / (1 + jnp.abs(lax.reduce_precision(3 * s, 1, 1)))
        + jnp.sign(lax.reduce_precision(s, 1, 23))
        + jnp.where(lax.reduce_precision(s, 1, 0) == 0, s, 1.0)
    ),
    ulps=2,
)
case(
    "bits of floats",
    lambda s, b, h, q, k: jnp.where(
        lax.bitcast_convert_type(s, jnp.int32) & 1 == 0,
        s,
        lax.bitcast_convert_type(lax.bitcast_convert_type(s, jnp.uint32) >> 1, jnp.float32),
    ),
    ulps=0,
)
case(
    "beyond the ends",
    lambda s, b, h, q, k: (
        jnp.expm1(30 * s) + jnp.exp(-40 * jnp.abs(s)) + lax.reduce_precision(s, 11, 52)
    ),
    ulps=64,
)
case(
    "stopped gradient",
    lambda s, b, h, q, k: s * lax.stop_gradient(s) + jax.checkpoint(jnp.tanh)(s),
    ulps=8,
)
case("nested calls", lambda s, b, h, q, k: jax.jit(lambda x: jax.jit(jnp.square)(x) + q)(s), ulps=4)
case("unused", lambda s, b, h, q, k, x: (jnp.exp(s) * x[k], s + 1)[1], ROW, ulps=0)
case(
    "nan and infinity",
    lambda s, b, h, q, k: jnp.where(k == 2, jnp.nan, jnp.where(k == 3, jnp.inf, s)) + 0.0,
    ulps=0,
)

# ---- Packed sequences ------------------------------------------------------------------------------------------------


def packed(score_mod: Callable[..., Any], shift: int) -> Callable[..., Any]:
    """A score function over two packed sequences, whose queries sit ``shift`` keys further than they count."""
    q = RaggedArray(jnp.zeros((QUERIES, 1, 1)), jnp.array([0, 2, QUERIES], jnp.int32))
    k = RaggedArray(jnp.zeros((KEYS, 1, 1)), jnp.array([0, 4, KEYS], jnp.int32))
    origins = packed_rows.key_origins(q, jnp.full(2, shift, jnp.int32))
    return packed_rows.on_rows(score_mod, q, k, origins)


case("packed", packed(lambda s, b, h, q, k: s + 4 * b + q - jnp.log1p(k / 8), 0))
case("packed, of pairs", packed(lambda s, b, h, q, k, x: s * x[b, q, k], 1), floats(2, 3, 4))


# ---- Functions alone -------------------------------------------------------------------------------------------------


class Function(NamedTuple):
    """A function of the score, what it is in float64, and between which scores it is tested."""

    name: str
    function: Callable[[Any], Any]
    exact: Callable[[Any], Any]
    low: float
    high: float
    ulps: float


FUNCTIONS = [
    Function("exp", jnp.exp, np.exp, -87, 88.7, 2),
    Function("exp2", jnp.exp2, np.exp2, -126, 128, 2),
    Function("expm1", jnp.expm1, np.expm1, -20, 88.7, 2),
    Function("expm1 near 0", jnp.expm1, np.expm1, -1, 1, 2),
    Function("log", jnp.log, np.log, 1e-30, 1e3, 2),
    Function("log near 1", jnp.log, np.log, 0.5, 2, 2),
    Function("log1p", jnp.log1p, np.log1p, -0.999, 30, 2),
    Function("log1p near 0", jnp.log1p, np.log1p, -1e-3, 1e-3, 2),
    Function("tanh", jnp.tanh, np.tanh, -10, 10, 4),
    Function("tanh near 0", jnp.tanh, np.tanh, -1, 1, 4),
    Function("logistic", jax.nn.sigmoid, special.expit, -80, 30, 4),
    Function("erf", lax.erf, special.erf, -5, 5, 2),
    Function("erfc", lax.erfc, special.erfc, -5, 8, 6),
    Function("sqrt", jnp.sqrt, np.sqrt, 0, 1e4, 0.51),
    Function("rsqrt", lax.rsqrt, lambda x: 1 / np.sqrt(x), 1e-3, 1e4, 1),
    Function("cbrt", jnp.cbrt, np.cbrt, -1e4, 1e4, 0.51),
    Function("divide", lambda x: 3.7 / x, lambda x: np.float32(3.7) / x, -9, 9, 0.51),
    Function(
        "divide by", lambda x: x / 3.7, lambda x: x / np.float64(np.float32(3.7)), -9, 9, 0.51
    ),
    Function("pow", lambda x: x**17.3, lambda x: x ** np.float64(np.float32(17.3)), 0.01, 160, 6),
    Function(
        "power of", lambda x: 1.7**x, lambda x: np.float64(np.float32(1.7)) ** x, -150, 160, 4
    ),
    Function("sin", jnp.sin, np.sin, -30, 30, 2),
    Function("cos", jnp.cos, np.cos, -30, 30, 2),
    Function("sin far out", jnp.sin, np.sin, -1e6, 1e6, 2),
    Function("tan", jnp.tan, np.tan, -20, 20, 4),
    Function("atan", jnp.arctan, np.arctan, -30, 30, 2),
    Function("asin", jnp.arcsin, np.arcsin, -1, 1, 4),
    Function("acos", jnp.arccos, np.arccos, -1, 0.99, 4),
    Function("sinh", jnp.sinh, np.sinh, -80, 80, 4),
    Function("cosh", jnp.cosh, np.cosh, -80, 80, 4),
    Function("asinh", jnp.arcsinh, np.arcsinh, -50, 50, 4),
    Function("acosh", jnp.arccosh, np.arccosh, 1.01, 50, 4),
    Function("atanh", jnp.arctanh, np.arctanh, -0.99, 0.99, 4),
]


def of_function(item: Function) -> ScoreProgram:
    return trace(lambda s, b, h, q, k: item.function(s), (), 1)[0]


# ---- What programs are to give ---------------------------------------------------------------------------------------

INDICES = (
    np.stack(np.meshgrid(*map(np.arange, SIZES), indexing="ij"), -1).reshape(-1, 4).astype(np.int32)
)


def scores_of_pairs() -> F32:
    scores = np.random.default_rng(1).normal(scale=3, size=len(INDICES)).astype(np.float32)
    scores[[3, 50, 77, 120, 160, 201]] = [0.0, np.inf, -np.inf, np.nan, 1e4, 1.0]
    return scores


def expected(
    case: Case, program: ScoreProgram, captures: Sequence[jax.Array], scores: F32
) -> tuple[Any, Any]:
    """Values and slopes by JAX, one operation after the other, so that 16-bit numbers are rounded between them."""

    def value(score: Any, index: Any) -> Any:
        return program(score, *index, *captures).astype(jnp.float32)

    columns = tuple(INDICES.T)
    with jax.enable_x64(case.x64):
        values = jax.vmap(value)(scores, columns)
        if program.has_unit_slope:
            return np.asarray(values), np.ones_like(scores)
        return np.asarray(values), np.asarray(jax.vmap(jax.grad(value))(scores, columns))


def derivatives_by_elements(
    case: Case, program: ScoreProgram, captures: Sequence[jax.Array], scores: F32
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """d score' / d element by JAX, of all captures that are floats, one after the other: (pairs, elements); and the
    unit in the last place that each is exact to.
    """
    is_float = [c.is_float for c in program.captures]
    floats = [x for x, flag in zip(captures, is_float, strict=True) if flag]

    def value(floats: list[Any], score: Any, index: Any) -> Any:
        rest = iter(floats)
        own = [next(rest) if flag else x for x, flag in zip(captures, is_float, strict=True)]
        return program(score, *index, *own).astype(jnp.float32)

    with jax.enable_x64(case.x64):
        # Forward: reverse mode drops what was read through an index that promised to be within bounds, and was not.
        by_elements = jax.vmap(jax.jacfwd(value), (None, 0, 0))
        gradients = by_elements(floats, scores, tuple(INDICES.T))
    flat = [np.asarray(g, np.float64).reshape(len(scores), -1) for g in gradients]
    found = np.concatenate(flat, 1)
    unit = np.spacing(np.maximum(np.abs(found), 1).astype(np.float32)).astype(np.float64)
    # Operations in 16 bits round derivatives as they round values: to 8 or 11 bits of 24.
    types = {c.dtype for c in program.captures}
    return found, unit * (2**16 if "bfloat16" in types else 2**13 if "float16" in types else 1)


def assert_close(got: F32, want: F32, ulps: int) -> None:
    with np.errstate(all="ignore"):
        error = np.abs(got.astype(np.float64) - want) / np.spacing(
            np.maximum(np.abs(want), np.float32(1))
        )
    wrong = ~((got == want) | (np.isnan(got) & np.isnan(want)) | (error <= ulps))
    assert not wrong.any(), (
        got[wrong][:5],
        want[wrong][:5],
        error[wrong][:5],
        np.flatnonzero(wrong)[:5],
    )
