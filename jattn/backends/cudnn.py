"""The backend "cudnn": the attention of NVIDIA's library, as XLA calls it. Runs where it is named, never by itself.

It is slower than ``flash`` on the device that we measure, and knows less of what acts on scores. It is there for
programs that name it, and for devices without ``flash``: ``implementation=("flash", "cudnn", "mem_efficient")``.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jattn.backends.base import (
    EXTENTS,
    Backend,
    Residuals,
    Wants,
    symbolic_extents,
    wide_heads,
    wrong_dtype,
    wrong_platform,
)
from jattn.backends.kernel_plan import round_up
from jattn.config import Determinism
from jattn.device import Device
from jattn.errors import Reason
from jattn.jax_interface import CudnnMask, cudnn_backward, cudnn_forward
from jattn.reference import Gradients
from jattn.spec import Operands, Spec, clamped_lengths

OLDEST_ARCH = (8, 0)
OLDEST_VERSION = 90800  # 9.8.0: what the CUDA packages of the oldest supported JAX ask for
DTYPES = ("float16", "bfloat16")
LARGEST_HEAD_DIM, LARGEST_BEFORE_HOPPER = 256, 128
_HEAD_DIM_MULTIPLE = 8
_WAY_OUT = "leave the choice to jattn, or use implementation='mem_efficient'"


class CudnnBackend:
    """cuDNN's fused attention, 16-bit types: causal, with a limit to the left, and lengths.

    Rows that see no key, padding that holds anything, scales of any sign and the gradient of the log-sum-exp are as
    everywhere in jattn. cuDNN knows none of them: they are seen to before and behind its calls.
    """

    name = "cudnn"
    understands = frozenset(
        {"band", "lengths", "grouped_heads", "value_head_dim", "negative_scale"}
    )

    def for_backward(self) -> Backend:
        """This backend runs its backward pass itself."""
        return self

    def unsupported(
        self, spec: Spec, device: Device, *, needs_grad: bool, determinism: Determinism
    ) -> tuple[Reason, ...]:
        """Refuses other devices, dtypes, larger head dims, and bands that cuDNN has no word for."""
        reasons = wrong_platform(self.name, device, "cuda")
        reasons += self._old_device(device) + self._old_library(device)
        reasons += wrong_dtype(self.name, spec, DTYPES)
        is_old = device.arch is not None and device.arch < (9, 0)
        largest = LARGEST_BEFORE_HOPPER if is_old else LARGEST_HEAD_DIM
        reasons += wide_heads(self.name, spec, largest, _WAY_OUT)
        symbolic = symbolic_extents(self.name, spec, ("batch", *EXTENTS), "must be a known number")
        reasons += symbolic or self._other_shapes(spec)
        if needs_grad and determinism == "strict":
            rule = "must not be 'strict': its backward pass adds dq up in any order"
            reasons += (self._refusal("DETERMINISTIC", "deterministic", determinism, rule),)
        return reasons

    def _refusal(
        self, code: str, argument: str, actual: object, rule: str, remedy: str = _WAY_OUT
    ) -> Reason:
        return Reason(self.name, code, argument, actual, rule, remedy)

    def _old_device(self, device: Device) -> tuple[Reason, ...]:
        if device.arch is None or device.arch >= OLDEST_ARCH:
            return ()
        rule = "only supports gpu architectures in the range sm_80 and later"
        remedy = "use a newer GPU, or implementation='xla'"
        return (self._refusal("ARCH", "device", device, rule, remedy),)

    def _old_library(self, device: Device) -> tuple[Reason, ...]:
        if device.cudnn is None or device.cudnn >= OLDEST_VERSION:
            return ()
        rule = f"must be at least {OLDEST_VERSION} (0: there is none)"
        remedy = "install jax[cuda13], or leave the choice to jattn"
        return (self._refusal("NOT_BUILT", "version of cuDNN", device.cudnn, rule, remedy),)

    def _other_shapes(self, spec: Spec) -> tuple[Reason, ...]:
        """What cuDNN, as XLA calls it, has: a causal mask in the upper left corner, and with it a limit to the left."""
        band = spec.band
        is_causal = band.right == 0 and band.left >= 0 and not band.lower_right
        if not (band.unbounded or is_causal):
            rule = "must be causal in the upper left corner, with or without a limit to the left"
            return (self._refusal("FEATURE", "band", band, rule),)
        if _window(spec) is not None and spec.q_len > spec.kv_len:
            rule = "must not exceed the number of keys where there is a limit to the left"
            return (self._refusal("FEATURE", "number of queries", spec.q_len, rule),)
        if (spec.q_len, spec.kv_len) == (1, 1):
            rule = "must not be 1 of queries and of keys"
            return (self._refusal("FEATURE", "length", 1, rule),)
        return ()

    def forward(
        self, spec: Spec, operands: Operands[jax.Array], device: Device
    ) -> tuple[jax.Array, jax.Array]:
        """Returns out and lse."""
        shapes = spec.shapes()
        if _is_empty(spec):
            lse = jnp.full(shapes["lse"], -jnp.inf, spec.lse_dtype)
            return jnp.zeros(shapes["out"], spec.dtype), lse
        rows = _Rows.of(spec, operands)
        q, k, v = _inputs(spec, operands, rows)
        out, lse = cudnn_forward(q, k, v, rows.lengths, _mask(spec), _positive_scale(spec))
        out = rows.seeing(out[..., : spec.head_dim_v], 0)
        return out, rows.seeing_statistics(lse, -jnp.inf)

    def backward(
        self,
        spec: Spec,
        operands: Operands[jax.Array],
        residuals: Residuals,
        wants: Wants,
        device: Device,
        determinism: Determinism,
    ) -> Gradients:
        """Returns the gradients of q, k and v."""
        if _is_empty(spec):
            shapes = spec.shapes()
            dq, dk, dv = (jnp.zeros(shapes[name], spec.dtype) for name in ("q", "k", "v"))
            return Gradients(q=dq, k=dk, v=dv, bias=None)
        rows = _Rows.of(spec, operands)
        q, k, v = _inputs(spec, operands, rows)
        # Weights of rows that see no key: exp(score - inf) = 0.
        lse = rows.seeing_statistics(residuals.lse, jnp.inf)

        def gradients(
            v: jax.Array, out: jax.Array, dout: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            mask, scale = _mask(spec), _positive_scale(spec)
            return cudnn_backward(q, k, v, out, lse, dout, rows.lengths, mask, scale)

        out, dout = (_padded(spec, rows.seeing(x, 0)) for x in (residuals.out, residuals.dout))
        dq, dk, dv = gradients(v, out, dout)
        if residuals.dlse is not None:
            dlse = rows.seeing_statistics(residuals.dlse, 0)
            more_dq, more_dk, _ = gradients(*_for_statistics(v, out, dlse))
            dq, dk = dq + more_dq, dk + more_dk
        return Gradients(
            q=_with_sign(spec, rows.queries(dq[..., : spec.head_dim])),
            k=rows.keys(dk[..., : spec.head_dim]),
            v=rows.keys(dv[..., : spec.head_dim_v]),
            bias=None,
        )


# ---- What cuDNN is given --------------------------------------------------------------------------------------------


def _is_empty(spec: Spec) -> bool:
    return 0 in (spec.batch, spec.q_len, spec.kv_len, spec.num_heads)


def _window(spec: Spec) -> int | None:
    """How many keys up to its own a query sees, or None if all of them."""
    return None if spec.band.left >= spec.q_len - 1 else spec.band.left + 1


def _mask(spec: Spec) -> CudnnMask:
    return CudnnMask(causal=spec.band.right == 0, window=_window(spec))


def _positive_scale(spec: Spec) -> float:
    """cuDNN multiplies by the scale what it has hidden before: it must be positive. The sign goes to q."""
    return abs(spec.scale) or 1.0


def _with_sign(spec: Spec, x: jax.Array) -> jax.Array:
    """q, or its gradient, times what ``_positive_scale`` leaves of the scale: 1, -1 or 0."""
    if spec.scale > 0:
        return x
    return -x if spec.scale < 0 else jnp.zeros_like(x)


def _padded(spec: Spec, x: jax.Array) -> jax.Array:
    """Head dims are multiples of 8, and equal: zeros change no score (the scale stays) and no result."""
    width = round_up(max(spec.head_dim, spec.head_dim_v), _HEAD_DIM_MULTIPLE)
    missing = width - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * 3 + [(0, missing)]) if missing else x


def _inputs(
    spec: Spec, operands: Operands[jax.Array], rows: _Rows
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v. Rows beyond a length are zeros: cuDNN multiplies them by weights of 0, and they may hold NaN."""
    q = _with_sign(spec, rows.queries(operands.q))
    k, v = rows.keys(operands.k), rows.keys(operands.v)
    return _padded(spec, q), _padded(spec, k), _padded(spec, v)


def _for_statistics(
    v: jax.Array, out: jax.Array, dlse: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Values, results and gradients of results with which cuDNN's backward pass makes dq and dk of ``dlse`` (B, N, T).

    ds = p (dp - delta), with dp = dout.v and delta = dout.out, has to become p dlse. So the first two columns of v are
    ones, out is 0, and dout has dlse in these columns, in two parts of 16 bits.
    """
    first = dlse.astype(v.dtype)
    second = (dlse - first.astype(dlse.dtype)).astype(v.dtype)
    columns = jnp.stack([first, second], -1).swapaxes(1, 2)
    ones = jnp.broadcast_to((jnp.arange(v.shape[-1]) < 2).astype(v.dtype), v.shape)
    dout = jnp.pad(columns, [(0, 0)] * 3 + [(0, out.shape[-1] - 2)])
    return ones, jnp.zeros_like(out), dout


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Which rows count.

    Attributes:
      lengths: of queries and keys, (B,) int32, at least 1 (what comes of an empty sequence is not looked at); None if
        there are none.
      are_queries: (B, T, 1, 1) bool, inside the length; None if all are.
      are_keys: (B, S, 1, 1) likewise.
      are_seeing: (B, T, 1, 1): queries that see a key.
    """

    lengths: tuple[jax.Array, jax.Array] | None = None
    are_queries: jax.Array | None = None
    are_keys: jax.Array | None = None
    are_seeing: jax.Array | None = None

    @staticmethod
    def of(spec: Spec, operands: Operands[jax.Array]) -> _Rows:
        if not (spec.q_lengths or spec.kv_lengths):
            return (
                _Rows()
            )  # a window that leaves the keys behind has more queries than keys: refused
        q_lengths, kv_lengths = clamped_lengths(spec, operands)
        rows = jnp.arange(spec.q_len, dtype=jnp.int32)[None, :, None, None]
        columns = jnp.arange(spec.kv_len, dtype=jnp.int32)[None, :, None, None]
        window = _window(spec)
        first_seen = 0 if window is None else jnp.maximum(rows - (window - 1), 0)

        def at_least_one(x: jax.Array) -> jax.Array:
            return jnp.broadcast_to(jnp.maximum(x[:, 0, 0, 0], 1), (spec.batch,))

        return _Rows(
            (at_least_one(q_lengths), at_least_one(kv_lengths)),
            rows < q_lengths,
            columns < kv_lengths,
            (rows < q_lengths) & (first_seen < kv_lengths),
        )

    def queries(self, x: jax.Array) -> jax.Array:
        """x (B, T, N, width), with zeros beyond the length."""
        return _selected(self.are_queries, x, 0)

    def keys(self, x: jax.Array) -> jax.Array:
        """x (B, S, K, width), likewise."""
        return _selected(self.are_keys, x, 0)

    def seeing(self, x: jax.Array, otherwise: float) -> jax.Array:
        """x (B, T, N, width), with another value for queries that see no key."""
        return _selected(self.are_seeing, x, otherwise)

    def seeing_statistics(self, x: jax.Array, otherwise: float) -> jax.Array:
        """x (B, N, T), likewise."""
        seeing = self.are_seeing
        return _selected(None if seeing is None else seeing[..., 0].swapaxes(1, 2), x, otherwise)


def _selected(where: jax.Array | None, x: jax.Array, otherwise: float) -> jax.Array:
    return x if where is None else jnp.where(where, x, jnp.asarray(otherwise, x.dtype))
