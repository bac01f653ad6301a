"""Times training steps of the language model of examples/train_lm.py with different attention, all else the same.

Two kinds of rows: one document a row, where a causal mask is all; and packed documents, which jattn takes as segment
ids and jax.nn as a dense mask (B, 1, T, T). The losses of the first steps must agree with those of jax.nn by XLA, or
the time does not count.

Examples:
  python -m benchmarks.training --out benchmarks/results/2026-01-01-h200-training.json
  python -m benchmarks.training --seq-len 256 --width 128 --layers 2 --steps 6      # a quick look on a CPU
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

import jattn.flax
from benchmarks import report
from benchmarks.records import ROOT

KINDS = ("rows", "documents")
CONTENDERS = ("jattn", "jax-cudnn", "jax-xla")
JUDGE = "jax-xla"
COMPARED_STEPS = 5


def load_demo() -> ModuleType:
    """The example as a module: it is a program, not part of a package."""
    path = ROOT / "examples" / "train_lm.py"
    spec = importlib.util.spec_from_file_location("train_lm", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_lm"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def jax_attention(implementation: str) -> Callable[..., jax.Array]:
    """jax.nn's attention as Flax calls it; the layers here drop nothing."""

    def attention(query: Any, key: Any, value: Any, mask: Any = None, **_: Any) -> jax.Array:
        return jax.nn.dot_product_attention(
            query, key, value, mask=mask, is_causal=True, implementation=implementation
        )  # type: ignore[call-overload]

    return attention


def attention_of(demo: ModuleType, contender: str, kind: str) -> Any:
    """The example's ``Attention`` of a contender on a kind of rows."""
    if contender == "jattn":
        function: Callable[..., jax.Array] = jattn.flax.make_attention_fn(is_causal=True)
        mask = demo.structural if kind == "documents" else demo.documents_ignored
    else:
        function = jax_attention(contender.removeprefix("jax-"))
        mask = demo.dense if kind == "documents" else lambda _: None
    return demo.Attention(f"{contender}, {kind}", function, mask)


@dataclasses.dataclass(frozen=True)
class Row:
    """Training steps of one contender; either timed or with a note that says why not."""

    head_dim: int
    kind: str
    contender: str
    backends: str = ""
    median_ms: float | None = None
    spread: float | None = None  # of the middle half of the steps, relative to the median
    bytes_per_second: float | None = None
    losses: tuple[float, ...] = ()  # nats, of the first steps
    note: str = ""


def time_steps(demo: ModuleType, config: Any, contender: str, kind: str, data: Any) -> Row:
    """Trains a fresh model and times its steps, without the first two, from the end of one to the end of the next."""
    row = Row(config.head_dim, kind, contender)
    try:
        run = demo.train(attention_of(demo, contender, kind), config, config.steps, data)
    except Exception as error:  # a contender that cannot run must not hide the others
        note = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return dataclasses.replace(row, note=note[:200])
    low, middle, high = np.quantile(run.step_seconds, [0.25, 0.5, 0.75])
    return dataclasses.replace(
        row,
        backends=run.backends,
        median_ms=float(middle) * 1e3,
        spread=float((high - low) / middle),
        bytes_per_second=config.batch * config.seq_len / float(middle),
        losses=tuple(float(loss) for loss in run.losses[:COMPARED_STEPS]),
    )


def judged(row: Row, judge: Row | None, tolerance: float) -> Row:
    """The row as it is if its first losses are the judge's; without its time if they are not or there is no judge."""
    if row.median_ms is None:
        return row
    if judge is None or not judge.losses:
        note = f"not compared: no losses of {JUDGE}"
    else:
        apart = float(np.abs(np.array(row.losses) - np.array(judge.losses)).max())
        if apart <= tolerance:
            return row
        note = f"wrong: losses up to {apart:.1e} nats from those of {judge.contender}"
    return dataclasses.replace(row, median_ms=None, spread=None, bytes_per_second=None, note=note)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; writes JSON if asked to; returns 1 if one of our rows is missing or wrong."""
    on_gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dims", nargs="+", type=int, default=(64, 128))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1024, help="heads x head dim")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)

    facts = report.circumstances()  # before, as the checkout may change meanwhile
    demo = load_demo()
    data = demo.pack(demo.read_documents(4_000_000), options.seq_len)
    rows: list[Row] = []
    for head_dim in options.head_dims:
        if options.width % head_dim:
            parser.error(f"--width is {options.width}, must be a multiple of {head_dim}")
        config = demo.Config(
            steps=options.steps,
            compare_steps=COMPARED_STEPS,
            batch=options.batch,
            seq_len=options.seq_len,
            layers=options.layers,
            heads=options.width // head_dim,
            head_dim=head_dim,
            learning_rate=1e-3,
            dropout=0.0,
            dtype="bfloat16" if on_gpu else "float32",
            seed=0,
            implementation=None,
            mesh="1x1",
        )
        for kind in options.kinds:
            found = [
                time_steps(demo, config, name, kind, data)
                for name in CONTENDERS
                if name in options.contenders
            ]
            judge = next((row for row in found if row.contender == JUDGE), None)
            rows += [judged(row, judge, config.loss_tolerance) for row in found]

    for row in rows:
        time = "-" if row.median_ms is None else f"{row.median_ms:8.2f} ms a step"
        print(
            f"D={row.head_dim:<4d}{row.kind:10s} {row.contender:10s} {time}  {row.note or row.backends}"
        )
    if options.out is not None:
        content = {
            **facts,
            "what": f"{options.layers} layers of width {options.width}, {options.batch} rows of"
            f" {options.seq_len} bytes, {'bfloat16' if on_gpu else 'float32'}, milliseconds a training step",
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return int(any(row.contender == "jattn" and row.median_ms is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
