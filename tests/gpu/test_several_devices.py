"""Several GPUs: sharded programs, and threads that launch on devices of their own at the same time."""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import on_four_devices
import pytest
from drawn import normal

import jattn

ROUNDS = 30


def devices(least: int) -> list[jax.Device]:
    found = jax.devices("cuda")
    if len(found) < least:
        pytest.skip(f"needs {least} CUDA devices, found {len(found)}")
    return found


@pytest.mark.parametrize("backend", on_four_devices.GPU_BACKENDS)
def test_J02_four_gpus(backend: str) -> None:
    devices(on_four_devices.DEVICES)
    assert on_four_devices.failures(backend) == {}


def problems(backend: str) -> list[tuple[dict[str, Any], list[jax.Array]]]:
    """One with few items, whose keys flash splits; one with many; one whose heads share tiles; one with a mask."""
    dtype = on_four_devices.dtype_of(backend)
    found = []
    for seed, (batch, q_len, kv_len, heads, kv_heads, keywords) in enumerate(
        (
            (1, 64, 2048, 2, 2, {}),
            (4, 300, 300, 8, 2, {"is_causal": True}),
            (2, 1, 1024, 16, 2, {}),
            (2, 200, 200, 4, 4, {"mask": np.tri(200, dtype=bool)[None, None]}),
        )
    ):
        shapes = ((q_len, heads), (kv_len, kv_heads), (kv_len, kv_heads))
        arrays = [
            normal(10 * seed + i, batch, s, n, 64, dtype=dtype) for i, (s, n) in enumerate(shapes)
        ]
        found.append((keywords, arrays))
    return found


def steps(backend: str, device: jax.Device) -> list[Callable[[], Any]]:
    """Programs compiled for a device, forward and backward, one for each problem; they launch and do not wait."""
    made: list[Callable[[], Any]] = []
    for keywords, arrays in problems(backend):
        attend = functools.partial(jattn.dot_product_attention, implementation=backend, **keywords)

        def step(*operands: Any, attend: Callable[..., Any] = attend) -> Any:
            out, pullback = jax.vjp(attend, *operands)
            return out, *pullback(out)

        placed = jax.device_put(arrays, device)
        with jattn.deterministic():
            made.append(functools.partial(jax.jit(step).lower(*placed).compile(), *placed))
    return made


@pytest.mark.parametrize("backend", on_four_devices.GPU_BACKENDS)
def test_threads_on_devices_of_their_own(backend: str) -> None:
    """Two threads a device compile and run every problem again and again: the bits are those of one device alone."""
    found = devices(2)
    want = [jax.device_get(step()) for step in steps(backend, found[0])]

    def work(device: jax.Device) -> None:
        mine = steps(backend, device)
        for results in [[step() for step in mine] for _ in range(ROUNDS)]:
            for got, wanted in zip(results, want, strict=True):
                for x, y in zip(got, wanted, strict=True):
                    assert x.devices() == {device}
                    np.testing.assert_array_equal(np.asarray(x), y)

    with concurrent.futures.ThreadPoolExecutor(2 * len(found)) as pool:
        for done in [pool.submit(work, device) for device in [*found, *found]]:
            done.result()
