"""A program for two processes of two virtual CPU devices each, on one mesh, and one backend.

Its arguments: a backend, the port of the first process, the number of this one, a folder of both. Writes there, for
every way to cut the arrays, the largest error of the loss and of the shards of gradients in this process, as a share of
the largest number of its array. Run by a test, for JAX may not have started where processes find each other.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
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


def meet(folder: Path, step: int, number: int) -> None:
    """Returns when all processes have called it for this step."""
    (folder / f"step {step} of {number}").touch()
    while not all((folder / f"step {step} of {other}").exists() for other in range(PROCESSES)):
        time.sleep(0.01)


def results_of(folder: Path, number: int) -> Path:
    return folder / f"results of {number}"


def main(backend: str, port: str, number: str, shared: str) -> None:
    folder = Path(shared)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, PROCESSES, int(number), coordinator_bind_address=address)
    mesh = jax.make_mesh(
        (PROCESSES, DEVICES), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    shapes = [(4, 40, 4, 16)] * 3 + [(1, 4, 40, 40)]
    arrays = [np.asarray(normal(i, *shape)) for i, shape in enumerate(shapes)]
    arguments = tuple(range(len(arrays)))
    wanted, gradients = jax.value_and_grad(loss("reference"), arguments)(*arrays)
    worst = []
    for step, cut in enumerate(CUTS):
        of_bias = PartitionSpec(None, cut[2], None, None)

        def place(array: np.ndarray, spec: PartitionSpec) -> jax.Array:
            sharding = NamedSharding(mesh, spec)
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

        placed = [place(array, of_bias if i == 3 else cut) for i, array in enumerate(arrays)]
        run = jax.jit(jax.value_and_grad(loss(backend), arguments)).lower(*placed).compile()
        # Where processes communicate for the first time, Gloo waits for 30 seconds, whatever
        # xla_cpu_collective_timeout_seconds says: on a busy machine one may be later by what it has compiled.
        meet(folder, step, int(number))
        found, shards = jax.block_until_ready(run(*placed))
        errors = [error(*pair) for pair in zip((found, *shards), (wanted, *gradients), strict=True)]
        worst.append(max(errors))
    results_of(folder, int(number)).write_text(json.dumps(worst))


def errors(backend: str) -> list[float]:
    """Of all cuts, from both processes."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    found: list[float] = []
    with socket.socket() as held, tempfile.TemporaryDirectory() as name:
        # Held as long as the processes run: JAX's server takes a port that is shared, and nobody else is given it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port, folder = str(held.getsockname()[1]), Path(name)
        logs = [folder / f"log of {number}" for number in range(PROCESSES)]
        runs = []
        for number, log in enumerate(logs):
            command = [sys.executable, __file__, backend, port, str(number), name]
            with log.open("w") as file:
                runs.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        try:
            wait(runs, seconds=600)
            # One that failed says more than one that waited for it.
            for run, log in sorted(zip(runs, logs, strict=True), key=lambda x: x[0].poll() is None):
                assert run.poll() == 0, log.read_text()[-4000:]
        finally:
            for run in runs:
                run.kill()
                run.wait()
        for number in range(PROCESSES):
            found += json.loads(results_of(folder, number).read_text())
    return found


def wait(runs: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until all have ended or one has failed."""
    end = time.monotonic() + seconds
    while any(run.poll() is None for run in runs) and time.monotonic() < end:
        if any(run.poll() for run in runs):
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
