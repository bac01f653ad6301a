"""The largest finite numbers where no query sees them, and no key: no bit of a result changes.

Shared by the tiers of CPU and GPU. Their products overflow, and 0 * infinity is NaN.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from drawn import normal
from numpy.typing import NDArray

import jattn
from jattn.testing import compare, inputs
from jattn.testing.cases import Case
from jattn.testing.inputs import Operands
from jattn.testing.run import run

Marks = NDArray[np.bool_]

BASE = Case(
    name="garbage",
    q_len=140,
    kv_len=210,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    head_dim_v=64,
)
MASK = BASE.but("mask", mask_form="b1ts", mask_density=0.8)
CASES = (
    MASK,
    MASK.but("softcap", softcap=5.0),
    MASK.but("bias", bias_form="1nts"),
    MASK.but("softcap-bias", softcap=5.0, bias_form="b11s"),
    MASK.but("dropout", dropout_rate=0.3),
    MASK.but("causal-sinks", is_causal=True, sinks_form="n"),
    BASE.but("causal", is_causal=True),
    BASE.but("window", window=(30, 20), softcap=5.0),
    BASE.but("positions", is_causal=True, positions="shuffled", alibi_form="n"),
    BASE.but("segments", segments="random"),
    BASE.but("segments-dropout", segments="random", dropout_rate=0.3, softcap=5.0),
    MASK.but("128", head_dim=128, head_dim_v=128),
    BASE.but("causal-256", head_dim=256, head_dim_v=256, is_causal=True),
    MASK.but("192-128", head_dim=192, head_dim_v=128),
)
PLAINEST = (MASK, BASE.but("causal", is_causal=True), BASE.but("segments", segments="random"))


def _made(case: Case) -> tuple[Operands, Marks, Marks]:
    """Operands, queries that see no key, and keys that no query sees, with others beside them."""
    operands = inputs.make(case)
    queries = np.zeros((case.batch, case.q_len), bool)
    keys = np.zeros((case.batch, case.kv_len), bool)
    if operands.mask is None and operands.q_segments is None and operands.q_positions is None:
        right = case.band[1]
        assert right is not None
        # Beyond the last query's band, from the upper left corner on.
        keys[:, case.q_len + right :] = True
        return operands, queries, keys
    keys[0, 5:30] = keys[1, 150:] = keys[0, 209] = True
    if operands.q_positions is not None:
        beyond = operands.q_positions.max() + 1
        positions = np.where(keys, beyond, operands.kv_positions).astype(np.int32)
        return dataclasses.replace(operands, kv_positions=positions), queries, keys
    queries[0, 50:53] = queries[1, 120:] = True
    if operands.mask is not None:
        hidden = queries[:, None, :, None] | keys[:, None, None, :]
        return dataclasses.replace(operands, mask=operands.mask & ~hidden), queries, keys
    ids = {  # that no key has, and that no query has
        "q_segments": np.where(queries, 1000, operands.q_segments).astype(np.int32),
        "kv_segments": np.where(keys, 1001, operands.kv_segments).astype(np.int32),
    }
    return dataclasses.replace(operands, **ids), queries, keys


def _garbage(array: NDArray[np.generic], where: Marks, name: str) -> NDArray[np.generic]:
    """`array` with the largest numbers of its type in some rows, their signs at random."""
    largest = float(jnp.finfo(array.dtype).max)
    signs = inputs.generator(name).choice([-largest, largest], array.shape)
    return np.where(where[..., None, None], signs.astype(array.dtype), array)


def with_garbage(case: Case) -> tuple[Operands, Operands]:
    """The operands of a case without and with other numbers where they are hidden."""
    operands, queries, keys = _made(case)
    assert keys.any()
    changed = {name: _garbage(getattr(operands, name), queries, name) for name in ("q", "dout")}
    changed |= {name: _garbage(getattr(operands, name), keys, name) for name in ("k", "v")}
    return operands, dataclasses.replace(operands, **changed)


def check_bits(backend: str, case: Case) -> None:
    """In the deterministic form no bit changes."""
    with jattn.deterministic("strict"):
        clean, found = (run(case, x, backend, poisoned=False).results for x in with_garbage(case))
    assert {"out", "lse", "dq", "dk", "dv"} <= set(clean)
    for name, values in clean.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
        visible = np.asarray(values, np.float64)
        assert np.isfinite(visible[~np.isneginf(visible)]).all(), name


def check_close(backend: str, case: Case) -> None:
    """Where dq may be added up in any order, results are as close to the oracle's as they have to be."""
    clean, garbage = with_garbage(case)
    compare.assert_close(case, clean, run(case, garbage, backend, poisoned=False).results)


def check_next_document(backend: str, dtype: str, head_dim: int) -> None:
    """Large values of the next document, in a tile with the last keys of one, whose queries fill their own tile."""
    end = 192
    ids = (jnp.arange(512) >= end).astype(jnp.int32)[None]
    q, k, v, dout = (normal(seed, 1, 512, 2, head_dim, dtype=dtype) for seed in range(4))
    dout = jnp.where(ids[..., None, None] == 0, 1e9 * dout, 0).astype(dtype)

    def dq(v: jax.Array) -> NDArray[np.float32]:
        def attend(q: jax.Array) -> jax.Array:
            return jattn.dot_product_attention(q, k, v, segment_ids=ids, implementation=backend)

        return np.asarray(jax.vjp(attend, q)[1](dout)[0], np.float32)

    got, want = dq(v.at[:, end : end + 64].set(1e30)), dq(v)
    np.testing.assert_allclose(got, want, rtol=0, atol=0.02 * np.abs(want).max())


def check_hidden_by_a_function(backend: str, dtype: str) -> None:
    """Products of a key that a score function hides are infinity less infinity; beside a softcap."""
    q, k, v = (normal(seed, 1, 150, 2, 64, dtype=dtype) for seed in range(3))
    huge = jnp.where(jnp.arange(64) % 2 == 0, 1, -1) * float(jnp.finfo(dtype).max)

    def run(k: jax.Array) -> list[NDArray[np.float32]]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jattn.dot_product_attention(
                q,
                k,
                v,
                logits_soft_cap=5.0,
                score_mod=lambda s, b, h, q, k: jnp.where(k == 7, -jnp.inf, s),
                implementation=backend,
            )

        out, pull = jax.vjp(attend, 8 * jnp.abs(q), k, v)
        return [np.asarray(x, np.float32) for x in (out, *pull(out))]

    for got, want in zip(run(k.at[:, 7].set(huge.astype(dtype))), run(k), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=0.01 * np.abs(want).max())
