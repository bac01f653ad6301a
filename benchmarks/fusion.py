"""Times attention that is written by hand: as XLA compiles it, after `jattn.fuse_attention`, and as a call of ours.

Each function is one that models have: softmax between two products with what stands beside it. What was fused must
agree with what was written before anything is timed; and one attention must have been found in it.

Examples:
  python -m benchmarks.fusion --out benchmarks/results/2026-01-01-h200-fusion.json
  python -m benchmarks.fusion --batch 1 --lengths 256 --head-dims 64      # a quick look
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks import report, timing

PASSES = ("forward", "forward+backward")
TOLERANCE = 2.0**-5  # of the largest value: what was written rounds probabilities, and scores too


def _scores(q: Any, k: Any) -> Any:
    return jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5


def _plain(q: Any, k: Any, v: Any, extra: Any) -> Any:
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(_scores(q, k), axis=-1), v)


def _causal(q: Any, k: Any, v: Any, extra: Any) -> Any:
    """As GPT-2 and its heirs: a triangle of booleans, scores in float32."""
    s = _scores(q, k).astype(jnp.float32)
    length = s.shape[-1]
    visible = jnp.tril(jnp.ones((length, length), bool))
    p = jax.nn.softmax(jnp.where(visible, s, jnp.finfo(s.dtype).min), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", p.astype(v.dtype), v)


def _padded(q: Any, k: Any, v: Any, extra: Any) -> Any:
    """As encoders: a mask of padding (B, S)."""
    s = jnp.where(extra[:, None, None, :], _scores(q, k), -1e9)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s, axis=-1), v)


def _biased(q: Any, k: Any, v: Any, extra: Any) -> Any:
    """As T5 and vision models: a bias (N, T, S)."""
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(_scores(q, k) + extra, axis=-1), v)


def _nothing(batch: int, heads: int, length: int) -> Any:
    return jnp.zeros(())


def _padding(batch: int, heads: int, length: int) -> Any:
    lengths = np.random.default_rng(1).integers(length // 2, length + 1, batch)
    return jnp.asarray(np.arange(length) < lengths[:, None])


def _bias(batch: int, heads: int, length: int) -> Any:
    return jax.random.normal(jax.random.key(2), (heads, length, length), jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Function:
    """Attention of (q, k, v, extra) in words of JAX.

    Attributes:
      written: the function.
      extra: (batch, heads, length) -> what it reads beside.
      keywords: extra -> arguments of ours that mean the same.
    """

    written: Callable[..., Any]
    extra: Callable[[int, int, int], Any]
    keywords: Callable[[Any], dict[str, Any]]


FUNCTIONS = {
    "plain": Function(_plain, _nothing, lambda _: {}),
    "causal": Function(_causal, _nothing, lambda _: {"is_causal": True}),
    "padding": Function(_padded, _padding, lambda mask: {"mask": mask[:, None, None, :]}),
    "bias": Function(_biased, _bias, lambda bias: {"bias": bias[None]}),
}


def _contender(
    name: str, function: Callable[..., Any], arrays: Sequence[Any], dout: Any, backward: bool
) -> timing.Contender:
    def both(q: Any, k: Any, v: Any, extra: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda *x: function(*x, extra), q, k, v)
        return (out, *pull(dout))

    operands = (*arrays, dout) if backward else tuple(arrays)
    compiled = jax.jit(both if backward else function).lower(*operands).compile()

    def results(found: Any) -> dict[str, object]:
        return dict(zip(("out", "dq", "dk", "dv"), found if backward else (found,), strict=False))

    return timing.Contender(name, lambda: compiled(*operands), jax.block_until_ready, results)


def measure(
    name: str, head_dim: int, length: int, pass_name: str, options: argparse.Namespace
) -> list[report.Row]:
    """Builds, compares and times the contenders of one function."""
    function, backward = FUNCTIONS[name], pass_name == PASSES[1]
    batch, heads = options.batch, options.width // head_dim
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (
        jax.random.normal(key, (batch, length, heads, head_dim)).astype(jnp.bfloat16)
        for key in keys
    )
    arrays = (q, k, v, function.extra(batch, heads, length))

    def ours(q: Any, k: Any, v: Any, extra: Any) -> Any:
        return jattn.dot_product_attention(q, k, v, **function.keywords(extra))

    case = f"fusion-{name}-D{head_dim}-S{length}"
    jattn.clear_fusion_log()
    jattn.reset_call_counters()
    written = _contender("as written", function.written, arrays, dout, backward)
    fused = _contender("fused", jattn.fuse_attention(function.written), arrays, dout, backward)
    ran = sorted(x for x, passes in jattn.call_counters().items() if any(passes.values()))
    contenders = [written, fused, _contender("jattn", ours, arrays, dout, backward)]
    note = timing.disagreement(contenders, TOLERANCE) or ("" if ran else "no attention was found")
    if note:
        return [report.Row(case, pass_name, c.name, note=note) for c in contenders]
    times = timing.compare(contenders, options.rounds, options.round_seconds)
    return [
        report.Row(case, pass_name, c.name, backends="" if c is written else "/".join(ran)).timed(
            times[c.name]
        )
        for c in contenders
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; writes JSON if asked to; returns 1 if something is wrong or was not fused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--functions", nargs="+", choices=FUNCTIONS, default=tuple(FUNCTIONS))
    parser.add_argument("--head-dims", nargs="+", type=int, default=(64, 128))
    parser.add_argument("--lengths", nargs="+", type=int, default=(1024, 4096))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024, help="heads x head dim")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-seconds", type=float, default=0.05)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)

    facts = report.circumstances(timed=True)
    rows: list[report.Row] = []
    for head_dim in options.head_dims:
        for length in options.lengths:
            for name in options.functions:
                for pass_name in options.passes:
                    found = measure(name, head_dim, length, pass_name, options)
                    rows += found
                    for row in found:
                        time = "-" if row.median_us is None else f"{row.median_us:9.1f} us"
                        print(
                            f"{row.case:26s}{pass_name:17s}{row.contender:12s}{time}  {row.note or row.backends}",
                            flush=True,
                        )
    if options.out is not None:
        content = {
            **facts,
            "what": f"bfloat16, batch {options.batch}, heads x head dim {options.width}",
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(content, indent=1) + "\n")
    return int(any(row.median_us is None for row in rows))


if __name__ == "__main__":
    sys.exit(main())
