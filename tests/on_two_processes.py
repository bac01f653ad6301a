"""A program for two processes of two virtual CPU devices each, on one mesh, and one backend.

Its arguments: a backend, the port of the first process, the number of this one, a file. Writes there, for every way to
cut the arrays, the largest error of the loss and of the shards of gradients in this process, as a share of the largest
number of its array. Run by a test, for JAX may not have started where processes find each other.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from drawn import normal
from jax.sharding import NamedSharding, PartitionSpec

import jattn

PROCESSES, DEVICES = 2, 2
CUTS = (
    PartitionSpec("x", None, "y", None),  # batch entries over processes
    PartitionSpec("y", None, "x", None),  # heads over processes
    PartitionSpec(("x", "y"), None, None, None),
    PartitionSpec(None, "x", None, None),  # queries and keys over processes
)


def loss(backend: str) -> Callable[..., jax.Array]:
    def of(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array) -> jax.Array:
        out, lse = jattn.dot_product_attention(
            query, key, value, bias=bias, is_causal=True, return_lse=True, implementation=backend
        )
        return (out**2).sum() + lse.sum()

    return of


def error(found: jax.Array, wanted: jax.Array) -> float:
    whole = np.asarray(wanted)
    shards = [(np.asarray(shard.data), whole[shard.index]) for shard in found.addressable_shards]
    return max(float(np.abs(got - want).max()) for got, want in shards) / float(np.abs(whole).max())


def main(backend: str, port: str, number: str, results: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, int(number))
    mesh = jax.make_mesh(
        (PROCESSES, DEVICES), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    shapes = [(4, 40, 4, 16)] * 3 + [(1, 4, 40, 40)]
    arrays = [np.asarray(normal(i, *shape)) for i, shape in enumerate(shapes)]
    arguments = tuple(range(len(arrays)))
    wanted, gradients = jax.value_and_grad(loss("reference"), arguments)(*arrays)
    worst = []
    for cut in CUTS:
        of_bias = PartitionSpec(None, cut[2], None, None)

        def place(array: np.ndarray, spec: PartitionSpec) -> jax.Array:
            sharding = NamedSharding(mesh, spec)
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

        placed = [place(array, of_bias if i == 3 else cut) for i, array in enumerate(arrays)]
        found, shards = jax.jit(jax.value_and_grad(loss(backend), arguments))(*placed)
        errors = [error(*pair) for pair in zip((found, *shards), (wanted, *gradients), strict=True)]
        worst.append(max(errors))
    # Not to stdout, where threads of Gloo write, too.
    Path(results).write_text(json.dumps(worst))


def errors(backend: str) -> list[float]:
    """Of all cuts, from both processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder) / str(number) for number in range(PROCESSES)]
        runs = [
            subprocess.Popen(
                [sys.executable, __file__, backend, port, str(number), str(path)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number, path in enumerate(results)
        ]
        try:
            for run, path in zip(runs, results, strict=True):
                _, err = run.communicate(timeout=300)
                assert run.returncode == 0, err[-4000:]
                found += json.loads(path.read_text())
        finally:
            for run in runs:
                run.kill()
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
