"""Attention written by hand and replaced by ``fuse_attention``: on a GPU as close to float64 as what was written."""

from collections.abc import Callable
from typing import Any

import fusion_patterns
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusion_patterns import PATTERNS, found, missed, normal

import jattn

pytestmark = [
    pytest.mark.backends("flash", "mem_efficient"),
    pytest.mark.usefixtures("clean_fusion_log"),
]

Array = Any
B, N, T, S, D = 2, 4, 320, 257, 64
# Least absolute and relative tolerances of a dtype, and the factor of both.
FLOORS = {"float16": (1e-3, 1e-3), "bfloat16": (1e-3, 1.6e-2), "float32": (1e-5, 1.3e-6)}
FACTOR = 2


def operands(layout: str) -> list[np.ndarray[Any, Any]]:
    """q, k, v, a bias (1, N, T, S) and a mask (B, 1, 1, S) of numbers, in float32."""
    arrays = [
        np.asarray(normal(B, N, length, D, seed=seed)) for seed, length in enumerate((T, S, S))
    ]
    if layout == "heads last":
        arrays = [x.swapaxes(1, 2) for x in arrays]
    if layout == "folded":
        arrays = [x.reshape(B * N, *x.shape[2:]) for x in arrays]
    shown = np.random.default_rng(3).integers(0, 3, (B, 1, 1, S))
    shown[..., 0] = 2
    return [*arrays, np.asarray(normal(1, N, T, S, seed=9)), shown]


def results(function: Callable[..., Array], arrays: list[Any], dtype: str) -> list[Any]:
    """The result and the gradients of q, k, v and of the bias, of operands rounded to float16 or bfloat16 and cast."""
    q, k, v, m, c = arrays
    floats = [jnp.asarray(x, dtype) for x in (q, k, v, m)]
    with jax.default_matmul_precision("highest"):
        out, pull = jax.vjp(lambda q, k, v, m: function(q, k, v, m, jnp.asarray(c), None), *floats)
        return [np.asarray(x, np.float64) for x in (out, *pull(jnp.cos(out)))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", PATTERNS)
def test_P112_closeness(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for extent, value in (("B", B), ("N", N), ("T", T), ("S", S)):
        monkeypatch.setattr(fusion_patterns, extent, value)
    layout, pattern, function = PATTERNS[name]
    arrays = operands(layout)
    arrays[:4] = [np.asarray(jnp.asarray(x, dtype), np.float32) for x in arrays[:4]]
    jattn.reset_call_counters()
    fused = results(jax.jit(jattn.fuse_attention(function), static_argnums=5), arrays, dtype)
    assert found() == [pattern]
    assert missed() == []
    backend = "mem_efficient" if dtype == "float32" else "flash"
    ran = {name for name, passes in jattn.call_counters().items() if any(passes.values())}
    assert ran == {backend}

    same = results(function, arrays, dtype)
    with jax.enable_x64(True):
        exact = results(function, arrays, "float64")
    floor, relative_floor = FLOORS[dtype]
    for got, low, high in zip(fused, same, exact, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.abs((high - low) / high)
        relative = np.where(np.isfinite(relative), relative, relative_floor)
        atol = FACTOR * max(np.abs(high - low).max(), floor)
        rtol = FACTOR * max(relative.max(), relative_floor)
        np.testing.assert_allclose(got, high, rtol=min(rtol, 1.0), atol=atol)
