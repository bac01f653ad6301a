"""What a call costs beside computing: import, trace, compile with and without a kernel cache, first and later runs.

Examples:
  python -m benchmarks.latency
  python -m benchmarks.latency --out benchmarks/results/2026-01-01-h200-latency.json

Every figure comes from processes of its own, the median of several; jattn and jax.nn (its "xla" implementation) take
turns. Problems whose kernels are not built in and the cache on disk are measured where kernels are compiled: on a GPU.
A row of those says how many kernels NVRTC compiled in it, and the next what one took, XLA's part included; a process
whose kernels came from elsewhere than the row says is an error.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WHO = ("jattn", "jax.nn")
STEADY_CALLS = 300
WHAT = (
    "One batch entry, length 256, 8 heads of 64 (the unusual problem: of 80, with a length of the keys), causal,"
    " medians over fresh processes"
)


# Where the kernels of a kind of problem must come from (``jattn._core.cache_info()``). Those of the usual one are built
# in on a Hopper GPU, which is not asked for: elsewhere its rows tell how many were compiled.
ORIGINS = {"usual": "", "unusual": "nvrtc", "on disk": "disk"}
PASSES = ("forward", "forward+backward")


@dataclasses.dataclass(frozen=True)
class Found:
    """What one process measured.

    Attributes:
      seconds: figure -> seconds.
      kernels: figure -> how many kernels NVRTC compiled in it; none for jax.nn and on a CPU.
    """

    seconds: dict[str, float]
    kernels: dict[str, int]


def head_dim(kind: str) -> int:
    """Returns the head dim of a kind of problem, a key of ``ORIGINS``."""
    return 64 if kind == "usual" else 80


def options(kind: str) -> dict[str, Any]:
    """Returns the options of a call of that kind.

    No kernel that reads lengths is built in, for the forward pass or the backward pass. A head dim or a window of its
    own would not do: such a problem runs in the next larger tile, with a band like every causal one.
    """
    import numpy as np  # not before child() has timed the import of jax

    lengths = {"key_value_seq_lengths": np.array([200], np.int32)}
    return {"is_causal": True} | ({} if kind == "usual" else lengths)


def check_origins(kind: str, figure: str, origins: Sequence[str]) -> None:
    """Checks where the kernels of a figure came from.

    Raises:
      RuntimeError: none came from where that kind of problem has its kernels, or some were compiled that should not be.
    """
    wanted = ORIGINS[kind]
    if not wanted:
        return
    if wanted not in origins or (wanted != "nvrtc" and "nvrtc" in origins):
        raise RuntimeError(
            f"{figure} of the {kind} problem measures nothing: its kernels came from {list(origins)}, must come from"
            f" {wanted}"
        )


def child(who: str, kind: str) -> Found:
    """Measures one process; ``kind`` is a key of ``ORIGINS``."""
    begin = time.perf_counter()
    import jax
    import jax.numpy as jnp

    seconds = {"import jax": time.perf_counter() - begin}
    kernels: dict[str, int] = {}
    begin = time.perf_counter()
    if who == "jattn":
        import jattn

        attention: Any = jattn.dot_product_attention
    else:
        attention = jax.nn.dot_product_attention
    seconds["import, after jax"] = time.perf_counter() - begin

    on_gpu = jax.default_backend() == "gpu"
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    shape = (1, 256, 8, head_dim(kind))
    x = jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(dtype)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(x))  # the device is up

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, **options(kind))

    def backward(q: Any, k: Any, v: Any) -> Any:
        return jax.grad(lambda *a: forward(*a).astype(jnp.float32).sum(), argnums=(0, 1, 2))(
            q, k, v
        )

    for name, function in zip(PASSES, (forward, backward), strict=True):
        begin = time.perf_counter()
        lowered = jax.jit(function).lower(x, x, x)
        seconds[f"trace and lower, {name}"] = time.perf_counter() - begin
        there = _origins(who)
        figure = f"compile, {name}"
        begin = time.perf_counter()
        compiled = lowered.compile()
        seconds[figure] = time.perf_counter() - begin
        if who == "jattn" and on_gpu:
            came = [origin for key, origin in _origins(who).items() if key not in there]
            check_origins(kind, figure, came)
            kernels[figure] = came.count("nvrtc")
        begin = time.perf_counter()
        jax.block_until_ready(compiled(x, x, x))
        seconds[f"first call, {name}"] = time.perf_counter() - begin
        begin = time.perf_counter()
        result = None
        for _ in range(STEADY_CALLS):
            result = compiled(x, x, x)
        jax.block_until_ready(result)
        seconds[f"later calls, {name}"] = (time.perf_counter() - begin) / STEADY_CALLS
    return Found(seconds, kernels)


def _origins(who: str) -> dict[str, str]:
    """Key -> origin of the kernels whose machine code this process has."""
    if who != "jattn":
        return {}
    from jattn import _core

    rows = _core.cache_info()["kernels"]
    return {row["key"]: row["origin"] for row in rows if row["origin"]}


def run_child(who: str, kind: str, cache: Path) -> Found:
    """Runs ``child`` in a process of its own, with its own folder of kernels."""
    environment = os.environ | {"JATTN_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "benchmarks.latency", "--child", who, kind]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Found(**json.loads(done.stdout.splitlines()[-1]))


class Samples:
    """Figures of several processes, in the order in which they came."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], list[float]] = {}
        self._kernels: dict[str, dict[str, int]] = collections.defaultdict(dict)

    def note(self, who: str, found: Found, only: str = "", suffix: str = "") -> None:
        """Adds the figures of a process whose names begin with ``only``."""
        for figure, seconds in found.seconds.items():
            if not figure.startswith(only):
                continue
            what = figure + suffix
            self._seconds.setdefault((what, who), []).append(seconds)
            if count := found.kernels.get(figure):
                self._kernels[what][who] = count
                each = f"{what}, each kernel"
                self._seconds.setdefault((each, who), []).append(seconds / count)

    def rows(self) -> list[dict[str, Any]]:
        """Returns rows {"what", "seconds": {who: median}, "kernels": {who: kernels compiled}}."""
        whats = dict.fromkeys(what for what, _ in self._seconds)
        return [
            {
                "what": what,
                "seconds": {
                    who: statistics.median(self._seconds[what, who])
                    for who in WHO
                    if (what, who) in self._seconds
                },
                "kernels": self._kernels.get(what, {}),
            }
            for what in whats
        ]


def measure(rounds: int, *, on_gpu: bool) -> list[dict[str, Any]]:
    """Returns the rows of ``Samples``."""
    samples = Samples()
    for _ in range(rounds):
        for who in WHO:
            with tempfile.TemporaryDirectory() as folder:
                samples.note(who, run_child(who, "usual", Path(folder)))
                if not on_gpu:
                    continue
                cold = run_child(who, "unusual", Path(folder))
                samples.note(who, cold, "compile", ", unusual problem")
                if who == "jattn":
                    warm = run_child(who, "on disk", Path(folder))
                    samples.note(who, warm, "compile", ", unusual problem, kernel on disk")
    return samples.rows()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; writes JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--child", nargs=2, metavar=("WHO", "KIND"), help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.child:
        print(json.dumps(dataclasses.asdict(child(*asked.child))))
        return 0
    # Asked of another process: this one must not hold the device.
    probe = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    platform = subprocess.run(probe, capture_output=True, text=True, check=True).stdout.strip()
    rows = measure(asked.rounds, on_gpu=platform == "gpu")
    for row in rows:
        times = "  ".join(f"{who} {value * 1e3:10.3f} ms" for who, value in row["seconds"].items())
        compiled = "".join(f"  {count} kernels" for count in row["kernels"].values())
        print(f"{row['what']:70s} {times}{compiled}")
    if asked.out is not None:
        from benchmarks import report

        asked.out.parent.mkdir(parents=True, exist_ok=True)
        content = {**report.circumstances(), "what": WHAT, "rows": rows}
        asked.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
