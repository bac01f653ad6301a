"""Errors against float64: every backend of this machine and other implementations, on normal numbers and on outliers.

Examples:
  python -m benchmarks.accuracy
  python -m benchmarks.accuracy --rivals jax-cudnn torch-flash --out benchmarks/results/2026-01-01-h200-accuracy.json

Outliers are the distribution of arXiv:2407.08608, section 4.3: normal numbers, of which one in a thousand gets another
normal number of standard deviation 10 on top. "textbook" is the same formulas in float32, with P, dP and dS rounded to
the type: what that type can do.

Normal numbers and outliers are batch entries of one call, so that each contender is compiled once a type.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import dataclasses
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

import jattn
from benchmarks import arrays as case_arrays
from benchmarks import check, report
from benchmarks.arrays import Arrays
from benchmarks.rivals import RIVALS, UnsupportedError, jattn_contender
from jattn.testing.cases import Case

DTYPES = ("float32", "bfloat16", "float16")
INPUTS = ("normal", "outliers")
ENTRIES = 2  # of the batch, each kind of inputs
BACKENDS = ("flash", "mem_efficient", "cpu", "xla", "reference")
OUTLIER_SHARE, OUTLIER_SIZE = 0.001, 10.0


def problem(dtype: str, length: int) -> Case:
    """Causal self-attention of four heads of 128; the batch entries with outliers come after the others."""
    return Case(
        name=f"accuracy-{dtype}",
        batch=ENTRIES * len(INPUTS),
        q_len=length,
        kv_len=length,
        num_heads=4,
        num_kv_heads=4,
        head_dim=128,
        head_dim_v=128,
        dtype=dtype,
        is_causal=True,
        with_dlse=False,
    )


def with_outliers(drawn: Arrays, first: int, seed: int = 0) -> Arrays:
    """Adds large values to a few elements of query, key and value, from one batch entry on."""

    def add(x: jax.Array, key: jax.Array) -> jax.Array:
        places, sizes = jax.random.split(key)
        there = jax.random.bernoulli(places, OUTLIER_SHARE, x.shape)
        there &= (jnp.arange(len(x)) >= first)[:, None, None, None]
        extra = OUTLIER_SIZE * jax.random.normal(sizes, x.shape, jnp.float32)
        return (x.astype(jnp.float32) + jnp.where(there, extra, 0)).astype(x.dtype)

    keys = jax.random.split(jax.random.key(seed), 3)
    return dataclasses.replace(
        drawn, q=add(drawn.q, keys[0]), k=add(drawn.k, keys[1]), v=add(drawn.v, keys[2])
    )


def measure(case: Case, operands: Arrays, rivals: Sequence[str]) -> dict[str, Any]:
    """Errors by contender and inputs, {"rms": {tensor: ...}, "max": {tensor: ...}}, or why a contender cannot run."""
    found: dict[str, Any] = {}
    heads = {
        inputs: [
            (number * ENTRIES + entry, kv_head)
            for entry in range(ENTRIES)
            for kv_head in (0, case.num_kv_heads - 1)
        ]
        for number, inputs in enumerate(INPUTS)
    }

    def solve(wide: str, *, rounded: bool) -> dict[str, check.Slices]:
        return {
            inputs: {at: check.solve(case, operands, *at, wide, rounded=rounded) for at in chosen}
            for inputs, chosen in heads.items()
        }

    with jax.enable_x64(True):
        exact = solve("float64", rounded=False)
        textbook = solve("float32", rounded=True)
        found["textbook"] = {n: check.errors(exact[n], textbook[n]) for n in INPUTS}

    def run(name: str, contender: Any) -> None:
        raw = contender.enqueue()
        contender.wait(raw)
        results = contender.results(raw)
        with jax.enable_x64(True):
            found[name] = {}
            for inputs, chosen in heads.items():
                got = {
                    at: {n: check.slice_result(case, n, x, *at) for n, x in results.items()}
                    for at in chosen
                }
                found[name][inputs] = check.errors(exact[inputs], got)

    for name in BACKENDS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # refusals are warnings too
                contender, _ = jattn_contender(case, operands, True, name)
        except jattn.NoBackendError as error:
            codes = sorted({reason.code for reason in error.reasons})
            found[f"jattn {name}"] = f"refused: {', '.join(codes)}"
            continue
        run(f"jattn {name}", contender)
    for name in rivals:
        try:
            run(name, RIVALS[name].build(case, operands, True))
        except UnsupportedError as error:
            found[name] = str(error)
        except Exception as error:  # another implementation's crash is no reason to lose the rest
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints a table; writes JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, help="default: 4096 on a GPU, 1024 elsewhere")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--rivals", nargs="+", choices=sorted(RIVALS), default=["jax-xla"])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    length = options.length or (4096 if jax.default_backend() == "gpu" else 1024)
    facts = report.circumstances()
    rows: list[dict[str, Any]] = []
    for dtype in tqdm(options.dtypes, unit="type", file=sys.stderr):
        case = problem(dtype, length)
        operands = with_outliers(case_arrays.make(case), first=ENTRIES)
        found = measure(case, operands, options.rivals)
        for inputs in INPUTS:
            for name, errors in found.items():
                row = {"inputs": inputs, "dtype": dtype, "contender": name}
                rows.append(row | ({"note": errors} if isinstance(errors, str) else errors[inputs]))
    for row in rows:
        shown = row.get("note") or "  ".join(f"{k} {v:.2e}" for k, v in row["rms"].items())
        print(f"{row['inputs']:9s} {row['dtype']:9s} {row['contender']:22s} {shown}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        content = {**facts, "length": length, "rows": rows}
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
