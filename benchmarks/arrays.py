"""Device arrays for a benchmark case.

`jattn.testing.inputs` draws in float64 on the host, which for the sizes here would take longer than all measurements;
these are drawn on the device, from the standard normal distribution, seeded by the name of the case.
"""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jattn.testing import inputs, oracle
from jattn.testing.cases import Case


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays of one case: q (B, T, N, D), k (B, S, K, D), v (B, S, K, Dv), dout (B, T, N, Dv), all of its dtype.

    bias and mask as their forms say; lengths (B,), segments and positions (B, T), (B, S) int32 on the host; sinks and
    alibi_slopes as their forms say, float32; dropout_key the JAX key of a case with dropout.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    dout: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None
    q_lengths: npt.NDArray[np.int32] | None
    kv_lengths: npt.NDArray[np.int32] | None
    q_segments: npt.NDArray[np.int32] | None
    kv_segments: npt.NDArray[np.int32] | None
    q_positions: npt.NDArray[np.int32] | None = None
    kv_positions: npt.NDArray[np.int32] | None = None
    sinks: jax.Array | None = None
    alibi_slopes: jax.Array | None = None
    dropout_key: jax.Array | None = None


def make(case: Case) -> Arrays:
    """Draws the arrays of a case; equal names give equal arrays on one kind of device."""
    keys = jax.random.split(jax.random.key(zlib.crc32(case.name.encode())), 6)
    dtype = jnp.dtype(case.dtype)

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32).astype(dtype)

    bias = mask = None
    if case.bias_form is not None:
        bias = normal(keys[4], *case.form_shape(case.bias_form)).astype(
            case.bias_dtype or case.dtype
        )
    if case.mask_form is not None:
        mask = jax.random.bernoulli(keys[5], case.mask_density, case.form_shape(case.mask_form))
    # Lengths and segments do not depend on the heads, so the host draws them for a problem that has hardly any.
    slim = inputs.make(
        dataclasses.replace(
            case,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            head_dim_v=1,
            bias_form=None,
            mask_form=None,
            sinks_form=None,
            alibi_form=None,
            dropout_rate=0.0,
        )
    )
    sinks = alibi_slopes = None
    if case.sinks_form is not None:
        sinks = jax.random.normal(keys[4], case.form_shape(case.sinks_form), jnp.float32)
    if case.alibi_form is not None:
        # The slopes of the paper (arXiv:2108.12409) for 2^k heads.
        slopes = 2.0 ** (-8.0 * jnp.arange(1, case.num_heads + 1) / case.num_heads)
        alibi_slopes = jnp.broadcast_to(slopes, case.form_shape(case.alibi_form))
    return Arrays(
        q=normal(keys[0], case.batch, case.q_len, case.num_heads, case.head_dim),
        k=normal(keys[1], case.batch, case.kv_len, case.num_kv_heads, case.head_dim),
        v=normal(keys[2], case.batch, case.kv_len, case.num_kv_heads, case.head_dim_v),
        dout=normal(keys[3], case.batch, case.q_len, case.num_heads, case.head_dim_v),
        bias=bias,
        mask=mask,
        q_lengths=slim.q_lengths,
        kv_lengths=slim.kv_lengths,
        q_segments=slim.q_segments,
        kv_segments=slim.kv_segments,
        q_positions=slim.q_positions,
        kv_positions=slim.kv_positions,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        dropout_key=keys[5] if case.dropout_rate else None,
    )


def visible_pairs(case: Case, arrays: Arrays) -> float:
    """Counts the (query, key) pairs of FLOP figures: B*T*S, halved if causal, less what bands, documents and lengths
    hide.

    A dense mask hides nothing here: whoever reads it still has to look at every pair. Nor do positions change the
    count where there are as many queries as keys: the indices stand for them.
    """
    if arrays.kv_lengths is not None and case.band == (None, None) and arrays.q_segments is None:
        keys = np.clip(arrays.kv_lengths, 0, case.kv_len).astype(np.int64)
        lengths = arrays.q_lengths
        queries = (
            np.full(case.batch, case.q_len)
            if lengths is None
            else np.clip(lengths, 0, case.q_len).astype(np.int64)
        )
        return float((keys * queries).sum())
    if case.window is None and not case.is_causal and arrays.q_segments is None:
        return float(case.batch * case.q_len * case.kv_len)
    if case.q_len != case.kv_len:
        nothing = np.empty(0)
        indices = inputs.Operands(
            *(nothing,) * 5,
            q_lengths=arrays.q_lengths,
            kv_lengths=arrays.kv_lengths,
            q_segments=arrays.q_segments,
            kv_segments=arrays.kv_segments,
            q_positions=arrays.q_positions,
            kv_positions=arrays.kv_positions,
        )
        of_one_head = case.but(case.name, num_heads=1, num_kv_heads=1)
        return float(oracle.visibility(of_one_head, indices).sum())
    if case.window is None and arrays.q_segments is None:
        return case.batch * case.q_len * case.kv_len / 2.0
    left, right = case.band
    positions = np.arange(case.q_len)
    first = np.zeros_like(positions) if left is None else np.maximum(positions - left, 0)
    last = (
        np.full_like(positions, case.kv_len - 1)
        if right is None
        else np.minimum(positions + right, case.kv_len - 1)
    )
    if arrays.q_segments is None or arrays.kv_segments is None:
        return float(case.batch * np.maximum(last - first + 1, 0).sum())
    pairs = 0
    for q_row, kv_row in zip(arrays.q_segments, arrays.kv_segments, strict=True):
        for segment in np.unique(q_row[q_row >= 0]):
            keys = np.flatnonzero(kv_row == segment)
            queries = np.flatnonzero(q_row == segment)
            inside = np.searchsorted(keys, last[queries], "right") - np.searchsorted(
                keys, first[queries]
            )
            pairs += int(np.maximum(inside, 0).sum())
    return float(pairs)
