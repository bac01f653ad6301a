"""One sequence over several devices: keys and values travel around a ring, partial results join by their log-sum-exp.

Every device has a part of the sequence. It attends to its own keys, passes them on, attends to those that arrive, and
so on until it has met all. Masks follow positions, so the parts need not be in order: under a causal mask each device
takes a piece from the front and one from the back, and all of them have the same work. Values and gradients are
compared with those of one device that has the whole sequence. The backward pass keeps the keys of every hop.

Run: python examples/long_context.py                       (four virtual devices where there is only a CPU)
     python examples/long_context.py --length 65536 --heads 16 --head-dim 128
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jattn

AXIS = "sequence"
OVER_DEVICES = PartitionSpec(None, AXIS)


def balanced_order(length: int, devices: int) -> jax.Array:
    """Positions in the order of devices: the i-th has piece i from the front and piece i from the back."""
    pieces = jnp.arange(length).reshape(2, devices, -1)
    return jnp.stack([pieces[0], pieces[1, ::-1]], axis=1).reshape(-1)


def ring_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, positions: jax.Array
) -> jax.Array:
    """Causal attention inside of shard_map: (B, T / devices, N, D) and positions (B, T / devices) of each device."""
    devices = jax.lax.axis_size(AXIS)
    onwards = [(i, (i + 1) % devices) for i in range(devices)]
    attend = functools.partial(
        jattn.dot_product_attention,
        query,
        is_causal=True,
        query_positions=positions,
        return_lse=True,
    )
    # Keys go on before the attention to those that are here, so that XLA can do both at once.
    arriving = jax.lax.ppermute((key, value, positions), AXIS, onwards)
    out, lse = attend(key, value, key_value_positions=positions)
    out = out.astype(jnp.float32)
    for hops_left in reversed(range(devices - 1)):
        *key_and_value, their_positions = arriving
        if hops_left:
            arriving = jax.lax.ppermute(arriving, AXIS, onwards)
        part, part_lse = attend(*key_and_value, key_value_positions=their_positions)
        joined = jnp.logaddexp(lse, part_lse)
        total = jnp.where(joined == -jnp.inf, 0.0, joined)  # where no key was visible so far
        out = out * jnp.exp(lse - total)[..., None] + part * jnp.exp(part_lse - total)[..., None]
        lse = joined
    return out.astype(query.dtype)


def with_gradients(attend: Callable[..., jax.Array]) -> Callable[..., list[jax.Array]]:
    """(query, key, value, dout, ...) -> out, dquery, dkey, dvalue."""

    def run(*operands: jax.Array) -> list[jax.Array]:
        *arrays, dout = operands[:4]
        out, pullback = jax.vjp(lambda *x: attend(*x, *operands[4:]), *arrays)
        return [out, *pullback(dout)]

    return run


def close(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether the largest difference is a few roundings of the largest number: sums have another order."""
    few_roundings = (2 if want.dtype == jnp.bfloat16 else 64) * float(jnp.finfo(want.dtype).eps)
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64)).max()
    return bool(difference <= few_roundings * np.abs(want.astype(np.float64)).max())


def milliseconds(run: Callable[..., Any], operands: list[jax.Array], calls: int) -> float:
    """The mean of some calls in a row, behind as many that are not timed."""
    jax.block_until_ready([run(*operands) for _ in range(calls)])
    begin = time.perf_counter()
    jax.block_until_ready([run(*operands) for _ in range(calls)][-1])
    return (time.perf_counter() - begin) / calls * 1e3


def main(arguments: list[str] | None = None) -> int:
    """Compares the ring with one device; returns 0 if they agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--devices", type=int, help="default: all GPUs, or four virtual devices")
    parser.add_argument("--calls", type=int, default=2, help="that are timed")
    options = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", max(1, options.devices or 4))
    found = jax.devices()
    count = len(found) if options.devices is None else options.devices
    if not 0 < count <= len(found):
        parser.error(f"--devices is {count}, must be 1 to {len(found)}, the devices there are")
    found = found[:count]
    if options.length % (2 * len(found)):
        parser.error(f"--length is {options.length}, must be a multiple of {2 * len(found)}")

    dtype = jnp.bfloat16 if found[0].platform == "gpu" else jnp.float32
    shape = (1, options.length, options.heads, options.head_dim)
    whole = [jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), 4)]

    mesh = jax.make_mesh((len(found),), (AXIS,), axis_types=(AxisType.Auto,), devices=found)
    order = balanced_order(options.length, len(found))
    sharding = NamedSharding(mesh, OVER_DEVICES)
    cut = [
        jax.device_put(x[:, order], sharding) for x in (*whole, jnp.arange(options.length)[None])
    ]
    ring = jax.shard_map(ring_attention, mesh=mesh, in_specs=OVER_DEVICES, out_specs=OVER_DEVICES)
    alone = functools.partial(jattn.dot_product_attention, is_causal=True)

    jattn.reset_call_counters()
    agree, times = True, {}
    for name, around, at_home in (
        ("forward", lambda q, k, v, _, where: [ring(q, k, v, where)], lambda *x: [alone(*x[:3])]),
        ("forward and backward", with_gradients(ring), with_gradients(alone)),
    ):
        programs = [
            (jax.jit(function).lower(*operands).compile(), operands)
            for function, operands in ((around, cut), (at_home, whole))
        ]
        got, want = (jax.device_get(program(*operands)) for program, operands in programs)
        agree &= all(close(x, y[:, order]) for x, y in zip(got, want, strict=True))
        times[name] = [milliseconds(*program, options.calls) for program in programs]
    print(f"backends compiled in: {jattn.call_counters()}")
    print(f"{len(found)} x {found[0].device_kind}, {options.length} keys, {dtype.__name__}")
    for name, (of_ring, of_one) in times.items():
        print(f"{name}: ring {of_ring:.1f} ms, one device {of_one:.1f} ms, {of_one / of_ring:.2f}x")
    print("ring and one device agree" if agree else "ring and one device DIFFER")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
