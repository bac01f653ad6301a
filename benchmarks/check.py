"""Whether a contender's numbers are right; nothing is timed before.

The oracle is textbook attention in float64 on the device, one key/value head of one batch entry at a time, because a
whole benchmark problem would not fit. The error allowed is a multiple of what the same formulas make when P, dP and dS
are rounded to the type of the case, on the same inputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.arrays import Arrays
from jattn import dropout
from jattn.testing.cases import Case

Tensors = dict[str, jax.Array]

# Multiples of the baseline's largest error; gradients of q and k pass through one more rounded operand.
ERROR_FACTORS = {"out": 2.0, "dv": 2.0, "dq": 3.0, "dk": 3.0, "dbias": 3.0}
ULPS = 2.0  # of the largest value wanted, for results whose baseline happens to be exact
# For the oracle, which runs a few times and is not timed: on a GPU its products are cuBLAS's, at first choice, because
# trying candidates out means compiling each of them.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The largest error of each tensor over the error allowed; at most 1 is right."""

    ratios: dict[str, float]

    @property
    def passed(self) -> bool:
        # A NaN compares false, so it fails.
        return all(ratio <= 1.0 for ratio in self.ratios.values())

    def __str__(self) -> str:
        return ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.ratios.items())


class Expected:
    """What the results of a case should be on some heads, and may differ by; solved once, asked often.

    Heads are (batch entry, key/value head), by default the first and the last.
    """

    def __init__(
        self, case: Case, arrays: Arrays, heads: Sequence[tuple[int, int]] | None = None
    ) -> None:
        self._case = case
        last = (case.batch - 1, case.num_kv_heads - 1)
        low = "float64" if case.dtype == "float64" else "float32"
        with jax.enable_x64(True):
            self._solved = {
                at: (
                    solve(case, arrays, *at, "float64", rounded=False),
                    solve(case, arrays, *at, low, rounded=True),
                )
                for at in heads or {(0, 0), last}
            }

    def judge(self, results: dict[str, object]) -> Verdict:
        """Compares results, full arrays in the public layout.

        Raises:
          ValueError: a result is not among those that were solved.
        """
        solved = next(iter(self._solved.values()))[0]
        if missing := set(results) - set(solved):
            raise ValueError(
                f"{self._case.name}: {', '.join(sorted(missing))} of bias form {self._case.bias_form!r} is not one that"
                " the check can sum up"
            )
        ratios = {}
        with jax.enable_x64(True):
            for name, result in results.items():
                # All heads together: of a short one the baseline's largest error is an accident.
                got = [
                    jnp.asarray(slice_result(self._case, name, result, *at)) for at in self._solved
                ]
                if any(
                    one.shape != want[name].shape
                    for one, (want, _) in zip(got, self._solved.values(), strict=True)
                ):
                    ratios[name] = float("nan")
                    continue
                wants, baselines = (
                    jnp.stack([solution[i][name] for solution in self._solved.values()])
                    for i in range(2)
                )
                ratios[name] = _ratio(name, jnp.stack(got), wants, baselines)
        return Verdict(ratios)


def judge(case: Case, arrays: Arrays, results: dict[str, object]) -> Verdict:
    """Compares results, full arrays in the public layout, with the oracle on the first and the last head."""
    return Expected(case, arrays).judge(results)


Slices = dict[tuple[int, int], Tensors]  # (batch entry, key head) -> its results


def errors(exact: Slices, got: Slices) -> dict[str, dict[str, float]]:
    """Root mean square and largest error of each tensor, over the root mean square of what is exact."""
    found: dict[str, dict[str, float]] = {"rms": {}, "max": {}}
    for name in next(iter(exact.values())):
        pairs = [(exact[at][name], got[at][name].astype(jnp.float64)) for at in exact]
        size = float(jnp.sqrt(jnp.mean(jnp.stack([jnp.mean(want**2) for want, _ in pairs]))))
        squares = jnp.stack([jnp.mean((want - has) ** 2) for want, has in pairs])
        largest = float(np.max([float(jnp.abs(want - has).max()) for want, has in pairs]))
        found["rms"][name] = float(jnp.sqrt(squares.mean())) / size
        found["max"][name] = largest / size
    return found


def _ratio(name: str, got: jax.Array, want: jax.Array, baseline: jax.Array) -> float:
    # Asked apart: on a CPU XLA's maximum of a large array loses NaN (JAX 0.10.2 and 0.11.2).
    if not bool(jnp.isfinite(got).all()):
        return float("nan")
    wide = got.astype(want.dtype)
    epsilon = float(jnp.finfo(got.dtype).eps)

    def largest(x: jax.Array) -> np.ndarray:
        parts = jnp.array_split(x, num_blocks(x.shape[-2]), axis=-2)
        return np.array([float(jnp.abs(part).max()) for part in parts])

    error = largest(wide - want)
    allowed = ERROR_FACTORS[name] * largest(baseline.astype(want.dtype) - want)
    allowed += ULPS * epsilon * largest(want)
    return float(np.max(error / allowed))


def num_blocks(rows: int) -> int:
    """How many blocks of rows are judged by themselves.

    Under a diagonal the first rows have the largest numbers by far, beside which errors of the last would not show. No
    block is so short that its largest error is an accident.
    """
    return max(1, min(16, rows // 128))


def _heads(case: Case, kv_head: int) -> slice:
    return slice(kv_head * case.group_size, (kv_head + 1) * case.group_size)


def slice_result(case: Case, name: str, result: object, batch: int, kv_head: int) -> jax.Array:
    """Cuts (heads of the group, rows, features) of one batch entry out of a full result."""
    array = jnp.asarray(result)
    if name == "dbias":
        shape = (1,) * (4 - array.ndim) + array.shape
        heads = _heads(case, kv_head) if shape[1] > 1 else slice(None)
        return array.reshape(shape)[batch if shape[0] > 1 else 0, heads]
    heads = _heads(case, kv_head) if name in ("out", "dq") else slice(kv_head, kv_head + 1)
    return array[batch, :, heads].swapaxes(0, 1)


def solve(
    case: Case, arrays: Arrays, batch: int, kv_head: int, wide: str, *, rounded: bool
) -> Tensors:
    """Solves one key/value head of one batch entry; sums a bias gradient over the entries and queries that share it.

    Gradients of biases that heads or keys share are left out: they take all heads to sum up.
    """
    solution = _solve(case, arrays, batch, kv_head, wide, rounded)
    if case.bias_form is not None:
        form = case.bias_form.rjust(4, "1")
        if form[1] != "n" or form[3] != "s" or case.num_heads != case.num_kv_heads:
            del solution["dbias"]
            return solution
        parts = []
        entries = range(case.batch) if form[0] == "1" else [batch]
        for entry in entries:
            own = entry == batch
            solved = solution if own else _solve(case, arrays, entry, kv_head, wide, rounded)
            dbias = solved["dbias"]
            parts.append(dbias.sum(axis=1, keepdims=True) if form[2] == "1" else dbias)
        solution["dbias"] = sum(parts[1:], parts[0])
    return solution


def _solve(
    case: Case, arrays: Arrays, batch: int, kv_head: int, wide: str, rounded: bool
) -> Tensors:
    heads = _heads(case, kv_head)

    def widen(x: jax.Array, head: slice) -> jax.Array:
        return x[batch, :, head].swapaxes(0, 1).astype(wide)

    bias, mask = (
        None if x is None else _broadcast_slice(x, batch, heads) for x in (arrays.bias, arrays.mask)
    )
    visible = _visible(case, arrays, batch, (case.group_size, case.q_len, case.kv_len), mask)
    with jax.default_matmul_precision("highest"):
        return _textbook(
            widen(arrays.q, heads),
            widen(arrays.k, slice(kv_head, kv_head + 1))[0],
            widen(arrays.v, slice(kv_head, kv_head + 1))[0],
            widen(arrays.dout, heads),
            None if bias is None else bias.astype(wide),
            _slope_term(case, arrays, batch, heads, wide),
            None if arrays.sinks is None else _per_head(arrays.sinks, case, batch, heads, wide),
            _kept(case, arrays, batch, heads),
            visible,
            scale=case.scale_value,
            softcap=case.softcap,
            round_to=case.dtype if rounded else wide,
        )


@functools.partial(
    jax.jit, static_argnames=("scale", "softcap", "round_to"), compiler_options=UNTUNED
)
def _textbook(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    bias: jax.Array | None,
    slope_term: jax.Array | None,
    sinks: jax.Array | None,
    kept: jax.Array | None,
    visible: jax.Array,
    *,
    scale: float,
    softcap: float | None,
    round_to: str,
) -> Tensors:
    """Attention of q (G, T, D) over k (S, D), v (S, Dv) and its gradients; rounds P, dP, dS and the results.

    slope_term (G, T, S) is added like a bias, sinks (G, 1, 1) join the softmax, kept (G, T, S) is the factor of
    dropout: 0, or the inverse of the kept share.
    """

    def low(x: jax.Array) -> jax.Array:
        return x.astype(round_to).astype(q.dtype)

    s = scale * jnp.einsum("gtd,sd->gts", q, k)
    slope = jnp.ones_like(s)
    if softcap is not None:
        capped = jnp.tanh(s / softcap)
        s, slope = softcap * capped, 1 - capped**2
    if bias is not None:
        s = s + bias
    if slope_term is not None:
        s = s + slope_term
    s = jnp.where(visible, s, -jnp.inf)
    row_max = jnp.max(s, axis=-1, keepdims=True)
    weights = jnp.where(visible, jnp.exp(s - jnp.where(row_max == -jnp.inf, 0, row_max)), 0)
    row_sum = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        row_sum = row_sum + jnp.where(row_sum == 0, 0, jnp.exp(sinks - row_max))
    p = weights / jnp.where(row_sum == 0, 1, row_sum)
    factor = jnp.ones((), q.dtype) if kept is None else kept.astype(q.dtype)
    used = low(p * factor)
    out = low(jnp.einsum("gts,sd->gtd", used, v))
    dp = low(factor * jnp.einsum("gtd,sd->gts", dout, v))
    ds = p * (dp - jnp.sum(dout * out, axis=-1, keepdims=True))
    dx = low(ds * slope)
    solution = {
        "out": out,
        "dq": low(scale * jnp.einsum("gts,sd->gtd", dx, k)),
        "dk": low(scale * jnp.einsum("gts,gtd->sd", dx, q))[None],
        "dv": low(jnp.einsum("gts,gtd->sd", used, dout))[None],
    }
    if bias is not None:
        solution["dbias"] = low(ds)
    return solution


def _broadcast_slice(x: jax.Array, batch: int, heads: slice) -> jax.Array:
    """Cuts what one batch entry and some heads see of an array that broadcasts to (B, N, T, S)."""
    shape = (1,) * (4 - x.ndim) + x.shape
    x = x.reshape(shape)[batch if shape[0] > 1 else 0]
    return x[heads] if shape[1] > 1 else x


def _per_head(x: jax.Array, case: Case, batch: int, heads: slice, wide: str) -> jax.Array:
    """Cuts (G, 1, 1) out of an array that broadcasts to (B, N)."""
    full = jnp.broadcast_to(x, (case.batch, case.num_heads))
    return full[batch, heads, None, None].astype(wide)


def _slope_term(
    case: Case, arrays: Arrays, batch: int, heads: slice, wide: str
) -> jax.Array | None:
    if arrays.alibi_slopes is None:
        return None
    slopes = _per_head(arrays.alibi_slopes, case, batch, heads, wide)
    return -slopes * jnp.abs(_distance(case, arrays, batch)).astype(wide)


def _kept(case: Case, arrays: Arrays, batch: int, heads: slice) -> jax.Array | None:
    if arrays.dropout_key is None:
        return None
    zero = jnp.zeros(2, jnp.uint32)
    seed = jattn.seed_from_key(arrays.dropout_key)
    keys = dropout.keys(seed, zero, case.batch, case.num_heads)[batch, heads]
    bits = dropout.bits_of_block(keys, 0, 0, case.q_len, case.kv_len)
    threshold = min(round(case.dropout_rate * 32768), 32640)
    return (bits >= threshold) * (32768 / (32768 - threshold))


def _distance(case: Case, arrays: Arrays, batch: int) -> jax.Array:
    """How far a key is to the right of a query, in positions or indices: (T, S)."""
    if arrays.q_positions is not None and arrays.kv_positions is not None:
        return jnp.asarray(arrays.kv_positions[batch][None] - arrays.q_positions[batch][:, None])
    return jnp.arange(case.kv_len)[None] - jnp.arange(case.q_len)[:, None]


def _visible(
    case: Case, arrays: Arrays, batch: int, shape: tuple[int, ...], mask: jax.Array | None
) -> jax.Array:
    t, j = jnp.arange(case.q_len)[:, None], jnp.arange(case.kv_len)[None]
    q_length = (
        case.q_len
        if arrays.q_lengths is None
        else int(np.clip(arrays.q_lengths[batch], 0, case.q_len))
    )
    kv_length = (
        case.kv_len
        if arrays.kv_lengths is None
        else int(np.clip(arrays.kv_lengths[batch], 0, case.kv_len))
    )
    visible = (t < q_length) & (j < kv_length)
    offset = kv_length - q_length if case.lower_right else 0
    distance = _distance(case, arrays, batch) - offset
    left, right = case.band
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    if arrays.q_segments is not None and arrays.kv_segments is not None:
        q_segments, kv_segments = arrays.q_segments[batch][:, None], arrays.kv_segments[batch][None]
        visible &= jnp.asarray((q_segments == kv_segments) & (q_segments >= 0))
    visible = jnp.broadcast_to(visible, shape)
    return visible if mask is None else visible & mask
