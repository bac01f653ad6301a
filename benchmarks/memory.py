"""Memory of a compiled call by length: what XLA sets aside beside arguments and results. Compiles, runs nothing.

Examples:
  python -m benchmarks.memory
  python -m benchmarks.memory --implementations auto jax-cudnn jax-xla --out out/memory.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

import jattn
from benchmarks import report

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
RIVALS = {"jax-xla": "xla", "jax-cudnn": "cudnn"}


def attention_of(name: str) -> Callable[..., Any]:
    """The attention function of one of our backends ("auto": the one that is chosen) or of jax.nn."""
    if name in RIVALS:
        implementation: Any = RIVALS[name]
        return lambda *x: jax.nn.dot_product_attention(
            *x, is_causal=True, implementation=implementation
        )
    backend = None if name == "auto" else name
    return lambda *x: jattn.dot_product_attention(*x, is_causal=True, implementation=backend)


def temporary_bytes(attention: Callable[..., Any], length: int, backward: bool) -> int:
    """Bytes that a compiled call needs beside its arguments and results."""
    on_gpu = jax.default_backend() == "gpu"
    x = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.bfloat16 if on_gpu else jnp.float32)

    def both(*arrays: Any) -> Any:
        return jax.grad(lambda *a: attention(*a).astype(jnp.float32).sum(), argnums=(0, 1, 2))(
            *arrays
        )

    compiled = jax.jit(both if backward else attention).lower(x, x, x).compile()
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise RuntimeError("this platform does not say how much memory a program needs")
    return int(analysis.temp_size_in_bytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; writes JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--implementations", nargs="+", default=["auto", "jax-xla"])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    facts = report.circumstances()  # before, as the checkout may change meanwhile
    rows: list[dict[str, Any]] = []
    work = [(n, length) for n in options.implementations for length in options.lengths]
    for name, length in tqdm(work, unit="program", file=sys.stderr):
        for pass_name in ("forward", "forward+backward"):
            row: dict[str, Any] = {"contender": name, "length": length, "pass_name": pass_name}
            try:
                backward = pass_name == "forward+backward"
                row["temp_bytes"] = temporary_bytes(attention_of(name), length, backward)
            except Exception as error:  # one that does not fit must not hide the others
                row["note"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200]
            rows.append(row)
    for row in rows:
        size = f"{row['temp_bytes'] / 1e6:12.1f} MB" if "temp_bytes" in row else row["note"]
        print(f"{row['contender']:12s} {row['length']:6d} {row['pass_name']:18s} {size}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        content = {
            **facts,
            "what": "Batch 1, 8 heads of 64, causal",
            "rows": rows,
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
