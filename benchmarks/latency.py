"""What a call costs beside computing: import, trace, compile with and without a kernel cache, first and later runs.

Examples:
  python -m benchmarks.latency
  python -m benchmarks.latency --out benchmarks/results/2026-01-01-h200-latency.json

Every figure comes from processes of its own, the median of several; jattn and jax.nn (its "xla" implementation) take
turns. Shapes that are not built in and the cache on disk are measured where kernels are compiled: on a GPU.
"""

from __future__ import annotations

import argparse
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
WHAT = "One batch entry, length 256, 8 heads of 64, causal, medians over fresh processes"


def child(who: str, kind: str) -> dict[str, float]:
    """Measures one process: figure -> seconds. ``kind`` is "usual" or "unusual", a variant that is not built in."""
    begin = time.perf_counter()
    import jax
    import jax.numpy as jnp

    seconds = {"import jax": time.perf_counter() - begin}
    begin = time.perf_counter()
    if who == "jattn":
        import jattn

        attention: Any = jattn.dot_product_attention
    else:
        attention = jax.nn.dot_product_attention
    seconds["import, after jax"] = time.perf_counter() - begin

    on_gpu = jax.default_backend() == "gpu"
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    head_dim = 64 if kind == "usual" else 72
    options: dict[str, Any] = {"is_causal": True}
    if kind == "unusual":
        options["local_window_size"] = (200, 0)
    x = jax.random.normal(jax.random.key(0), (1, 256, 8, head_dim), jnp.float32).astype(dtype)
    jax.block_until_ready(jax.jit(lambda x: x + 1)(x))  # the device is up

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, **options)

    def backward(q: Any, k: Any, v: Any) -> Any:
        return jax.grad(lambda *a: forward(*a).astype(jnp.float32).sum(), argnums=(0, 1, 2))(
            q, k, v
        )

    for name, function in (("forward", forward), ("forward+backward", backward)):
        begin = time.perf_counter()
        lowered = jax.jit(function).lower(x, x, x)
        seconds[f"trace and lower, {name}"] = time.perf_counter() - begin
        begin = time.perf_counter()
        compiled = lowered.compile()
        seconds[f"compile, {name}"] = time.perf_counter() - begin
        begin = time.perf_counter()
        jax.block_until_ready(compiled(x, x, x))
        seconds[f"first call, {name}"] = time.perf_counter() - begin
        begin = time.perf_counter()
        result = None
        for _ in range(STEADY_CALLS):
            result = compiled(x, x, x)
        jax.block_until_ready(result)
        seconds[f"later calls, {name}"] = (time.perf_counter() - begin) / STEADY_CALLS
    return seconds


def run_child(who: str, kind: str, cache: Path) -> dict[str, float]:
    """Runs ``child`` in a process of its own, with its own folder of kernels."""
    environment = os.environ | {"JATTN_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "benchmarks.latency", "--child", who, kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(rounds: int, *, on_gpu: bool) -> list[dict[str, Any]]:
    """Rows {"what", "seconds": {who: median}}."""
    samples: dict[tuple[str, str], list[float]] = {}

    def note(who: str, found: dict[str, float], only: str = "", suffix: str = "") -> None:
        for what, seconds in found.items():
            if what.startswith(only):
                samples.setdefault((what + suffix, who), []).append(seconds)

    for _ in range(rounds):
        for who in WHO:
            with tempfile.TemporaryDirectory() as folder:
                note(who, run_child(who, "usual", Path(folder)))
                if not on_gpu:
                    continue
                note(who, run_child(who, "unusual", Path(folder)), "compile", ", unusual shape")
                if who == "jattn":
                    warm = run_child(who, "unusual", Path(folder))
                    note(who, warm, "compile", ", unusual shape, kernel on disk")
    whats = dict.fromkeys(what for what, _ in samples)
    return [
        {
            "what": what,
            "seconds": {
                who: statistics.median(samples[what, who]) for who in WHO if (what, who) in samples
            },
        }
        for what in whats
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; writes JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--child", nargs=2, metavar=("WHO", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(child(*options.child)))
        return 0
    # Asked of another process: this one must not hold the device.
    probe = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    platform = subprocess.run(probe, capture_output=True, text=True, check=True).stdout.strip()
    rows = measure(options.rounds, on_gpu=platform == "gpu")
    for row in rows:
        times = "  ".join(f"{who} {value * 1e3:10.3f} ms" for who, value in row["seconds"].items())
        print(f"{row['what']:60s} {times}")
    if options.out is not None:
        from benchmarks import report

        options.out.parent.mkdir(parents=True, exist_ok=True)
        content = {**report.circumstances(), "what": WHAT, "rows": rows}
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
