"""Times score functions: ours, PyTorch's FlexAttention, and our own arguments that mean the same, where there are any.

Each function is written twice, for JAX and for PyTorch, of the same arrays. Results and dq of all contenders must agree
before anything is timed. On a CPU our kernel is compared with XLA on the function, and with attention that
has none.

Examples:
  python -m benchmarks.score_functions --out benchmarks/results/2026-01-01-h200-score-functions.json
  python -m benchmarks.score_functions --length 512 --batch 1 --functions alibi      # a quick look
  JAX_PLATFORMS=cpu python -m benchmarks.score_functions --dtype float32 --batch 1 --width 512 --head-dims 64
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks import report, timing

# Largest difference between contenders, over the largest value: two roundings of bfloat16.
TOLERANCE = 2.0**-6
# The last with gradients of what the function reads, too.
PASSES = ("forward", "forward+backward", "learned")


@dataclasses.dataclass(frozen=True)
class Function:
    """A score function.

    Attributes:
      captures: (batch, heads, length) -> numpy arrays.
      score_mod: of JAX, (score, batch, head, query, key, *captures), or None.
      mask_mod: of JAX, (batch, head, query, key, *captures), or None; blocks are made of it.
      torch_score_mod, torch_mask_mod: the same of PyTorch.
      per_batch: whether the mask differs by batch entry.
      keywords: (*captures) -> arguments of ours that mean the same; None if there are none.
    """

    captures: Callable[[int, int, int], tuple[Any, ...]]
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    torch_score_mod: Callable[..., Any] | None = None
    torch_mask_mod: Callable[..., Any] | None = None
    per_batch: bool = False
    keywords: Callable[..., dict[str, Any]] | None = None

    @property
    def is_learned(self) -> bool:
        """Whether it reads an array that may have a gradient."""
        return self.captures in (_slopes, _table, _buckets, _bias)


def _slopes(batch: int, heads: int, length: int) -> tuple[Any, ...]:
    return ((0.5 ** (8 * np.arange(1, heads + 1) / heads)).astype(np.float32),)


def _table(batch: int, heads: int, length: int) -> tuple[Any, ...]:
    return (np.random.default_rng(1).normal(size=(heads, 2 * length)).astype(np.float32),)


def _buckets(batch: int, heads: int, length: int) -> tuple[Any, ...]:
    return (np.random.default_rng(1).normal(size=(heads, 32)).astype(np.float32),)


def _documents(batch: int, heads: int, length: int) -> tuple[Any, ...]:
    ids = np.random.default_rng(2).integers(0, 12, (batch, length))
    return (np.sort(ids, axis=1).astype(np.int32),)


def _bias(batch: int, heads: int, length: int) -> tuple[Any, ...]:
    return (np.random.default_rng(3).normal(size=(heads, length, length)).astype(np.float32),)


def _none(batch: int, heads: int, length: int) -> tuple[Any, ...]:
    return ()


def _torch() -> Any:
    import torch

    return torch


def _bucket(library: Any, distance: Any) -> Any:
    """The bucket of a distance, as a float of at most 31.5; in jax.numpy or torch."""
    # No integer is near where a bucket begins, or rounding would decide.
    far = 16.25 + 1.5 * library.log2(1 + distance / 16)
    return library.where(distance < 16, distance, library.where(far < 31.5, far, 31.5))


FUNCTIONS = {
    "causal": Function(
        _none,
        mask_mod=lambda b, h, q, k: q >= k,
        torch_mask_mod=lambda b, h, q, k: q >= k,
        keywords=lambda: {"is_causal": True},
    ),
    "alibi": Function(
        _slopes,
        score_mod=lambda s, b, h, q, k, slopes: s - slopes[h] * jnp.abs(q - k),
        torch_score_mod=lambda s, b, h, q, k, slopes: s - slopes[h] * (q - k).abs(),
        keywords=lambda slopes: {"alibi_slopes": slopes},
    ),
    "relative table": Function(
        _table,
        score_mod=lambda s, b, h, q, k, table: s + table[h, q - k + table.shape[1] // 2],
        torch_score_mod=lambda s, b, h, q, k, table: s + table[h, q - k + table.shape[1] // 2],
    ),
    "buckets": Function(  # of distances, linear up to 15, then logarithmic
        _buckets,
        score_mod=lambda s, b, h, q, k, table: (
            s + table[h, _bucket(jnp, jnp.abs(q - k)).astype(int)]
        ),
        torch_score_mod=lambda s, b, h, q, k, table: (
            s + table[h, _bucket(_torch(), (q - k).abs()).int()]
        ),
    ),
    "bias": Function(
        _bias,
        score_mod=lambda s, b, h, q, k, bias: s + bias[h, q, k],
        torch_score_mod=lambda s, b, h, q, k, bias: s + bias[h, q, k],
        keywords=lambda bias: {"bias": bias},
    ),
    "cap": Function(
        _none,
        score_mod=lambda s, b, h, q, k: 20 * jnp.tanh(s / 20),
        torch_score_mod=lambda s, b, h, q, k: 20 * _torch().tanh(s / 20),
        keywords=lambda: {"logits_soft_cap": 20.0},
    ),
    "log distance": Function(
        _none,
        score_mod=lambda s, b, h, q, k: s - jnp.log1p(jnp.abs(q - k).astype(jnp.float32)),
        torch_score_mod=lambda s, b, h, q, k: s - _torch().log1p((q - k).abs().float()),
    ),
    "causal documents": Function(
        _documents,
        mask_mod=lambda b, h, q, k, ids: (q >= k) & (ids[b, q] == ids[b, k]),
        torch_mask_mod=lambda b, h, q, k, ids: (q >= k) & (ids[b, q] == ids[b, k]),
        per_batch=True,
        keywords=lambda ids: {"is_causal": True, "segment_ids": ids},
    ),
}


_RESULTS = ("out", "dq", "dk", "dv", "dcapture")


def _ours(
    arrays: dict[str, Any],
    captures: list[Any],
    keywords: Callable[..., dict[str, Any]],
    name: str,
    pass_name: str,
) -> timing.Contender:
    """Our attention of q, k, v as a contender. What it reads are arguments: XLA would fold constants for minutes."""

    def forward(q: Any, k: Any, v: Any, *captures: Any) -> Any:
        return jattn.dot_product_attention(q, k, v, **keywords(*captures))

    def both(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        dout, *captures = rest
        moving = [q, k, v, *(captures if pass_name == "learned" else ())]
        out, pull = jax.vjp(lambda *x: forward(*x, *captures[len(x) - 3 :]), *moving)
        return (out, *pull(dout))

    backward = pass_name != "forward"
    operands = [arrays[x] for x in (("q", "k", "v", "dout") if backward else ("q", "k", "v"))]
    operands += captures
    compiled = jax.jit(both if backward else forward).lower(*operands).compile()
    return timing.Contender(
        name,
        lambda: compiled(*operands),
        jax.block_until_ready,
        lambda found: dict(zip(_RESULTS, cast(Any, found if backward else (found,)), strict=False)),
    )


def _with_functions(
    function: Function, captures: list[Any], shape: tuple[int, ...]
) -> tuple[list[Any], Callable[..., dict[str, Any]]]:
    """What ours reads, and from this its arguments score_mod and block_mask; blocks are made ahead, as in PyTorch."""
    batch, length = shape[0], shape[1]
    if (mask_mod := function.mask_mod) is None:
        score_mod = function.score_mod
        return captures, lambda *read: {"score_mod": score_mod, "captures": read}
    block_mask = jattn.create_block_mask(
        lambda b, h, q, k: mask_mod(b, h, q, k, *captures),
        batch if function.per_batch else None,
        None,
        length,
        length,
    )
    return [block_mask], lambda mask: {"block_mask": mask}


# FlexAttention's own choice may need more shared memory than there is.
_SMALL_TILES = {
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "BLOCK_M1": 32,
    "BLOCK_N1": 64,
    "BLOCK_M2": 64,
    "BLOCK_N2": 32,
    "num_stages": 1,
}


def _flex(
    function: Function,
    arrays: dict[str, Any],
    captures: list[Any],
    pass_name: str,
    kernel_options: dict[str, int] | None = None,
) -> timing.Contender:
    """PyTorch's FlexAttention, compiled for the shapes."""
    import torch
    from torch.nn.attention import flex_attention as flex

    torch._dynamo.reset()
    attention = torch.compile(flex.flex_attention, dynamic=False)

    def from_jax(x: Any) -> Any:
        return torch.from_dlpack(jax.block_until_ready(jnp.asarray(x)))

    q, k, v, dout = (from_jax(arrays[x]).transpose(1, 2) for x in ("q", "k", "v", "dout"))
    own = [from_jax(x) for x in captures]
    backward, learned = pass_name != "forward", pass_name == "learned"
    inputs = [x.detach().requires_grad_() for x in (q, k, v)] if backward else [q, k, v]
    if learned:
        own = [x.clone().requires_grad_() for x in own]
    batch, _, length, _ = q.shape
    score_mod = block_mask = None
    if (score := function.torch_score_mod) is not None:

        def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return score(s, b, h, q, k, *own)

    if (mask := function.torch_mask_mod) is not None:
        block_mask = flex.create_block_mask(
            lambda b, h, q, k: mask(b, h, q, k, *own),
            batch if function.per_batch else None,
            None,
            length,
            length,
            device="cuda",
        )

    def enqueue() -> tuple[Any, ...]:
        out = attention(
            *inputs, score_mod=score_mod, block_mask=block_mask, kernel_options=kernel_options
        )
        moving = [*inputs, *(own if learned else ())]
        return (out, *torch.autograd.grad(out, moving, dout)) if backward else (out,)

    def results(found: Any) -> dict[str, object]:
        return {
            name: jnp.from_dlpack(
                (x if name == "dcapture" else x.transpose(1, 2)).detach().contiguous()
            )
            for name, x in zip(_RESULTS, found, strict=False)
        }

    contender = timing.Contender("torch-flex", enqueue, lambda _: torch.cuda.synchronize(), results)
    try:
        contender.wait(enqueue())
    except torch._inductor.exc.InductorError:
        if kernel_options is not None:
            raise
        return _flex(function, arrays, captures, pass_name, _SMALL_TILES)
    return contender


def measure(
    name: str, head_dim: int, pass_name: str, options: argparse.Namespace
) -> list[report.Row]:
    """Builds, compares and times the contenders of one function."""
    function = FUNCTIONS[name]
    heads = options.width // head_dim
    shape = (options.batch, options.length, heads, head_dim)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = {
        x: jax.random.normal(key, shape, jnp.float32).astype(options.dtype)
        for x, key in zip(("q", "k", "v", "dout"), keys, strict=True)
    }
    captures = [jnp.asarray(x) for x in function.captures(options.batch, heads, options.length)]
    case = f"score-{name}-D{head_dim}"
    rows: list[report.Row] = []
    contenders: list[timing.Contender] = []
    backends: dict[str, str] = {}

    def add(contender: str, build: Callable[[], timing.Contender]) -> None:
        before = jattn.call_counters()
        try:
            contenders.append(build())
        except Exception as error:  # a contender that cannot run must not hide the others
            note = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            rows.append(report.Row(case, pass_name, contender, note=note[:200]))
            return
        after = jattn.call_counters()
        backends[contender] = "/".join(
            sorted(x for x in after if after[x] != before.get(x, dict.fromkeys(after[x], 0)))
        )

    read, keywords = _with_functions(function, captures, shape)
    add("jattn", lambda: _ours(arrays, read, keywords, "jattn", pass_name))
    if (own := function.keywords) is not None:
        title = "jattn, its argument"
        add(title, lambda: _ours(arrays, captures, own, title, pass_name))
    has_torch = importlib.util.find_spec("torch") is not None and jax.default_backend() == "gpu"
    if has_torch and not options.no_rivals:
        add("torch-flex", lambda: _flex(function, arrays, captures, pass_name))
    if is_cpu := jax.default_backend() == "cpu":

        def by_xla(*read: Any) -> dict[str, Any]:
            return keywords(*read) | {"implementation": "xla"}

        add("jattn, xla", lambda: _ours(arrays, read, by_xla, "jattn, xla", pass_name))
    if len(contenders) > 1 and (note := timing.disagreement(contenders, TOLERANCE)):
        return rows + [report.Row(case, pass_name, c.name, note=note) for c in contenders]
    if is_cpu:
        plain = "jattn, no function"
        add(plain, lambda: _ours(arrays, [], dict, plain, pass_name))
    times = timing.compare(contenders, options.rounds, options.round_seconds)
    return rows + [
        report.Row(case, pass_name, c.name, backends=backends.get(c.name, "")).timed(times[c.name])
        for c in contenders
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; writes JSON if asked to; returns 1 if one of our rows is missing or wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--functions", nargs="+", choices=FUNCTIONS, default=tuple(FUNCTIONS))
    parser.add_argument("--head-dims", nargs="+", type=int, default=(64, 128))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--width", type=int, default=2048, help="heads x head dim")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-seconds", type=float, default=0.05)
    parser.add_argument("--no-rivals", action="store_true", help="ours alone")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)

    facts = report.circumstances(timed=True)
    rows: list[report.Row] = []
    for head_dim in options.head_dims:
        for name in options.functions:
            for pass_name in options.passes:
                if pass_name == "learned" and not FUNCTIONS[name].is_learned:
                    continue
                found = measure(name, head_dim, pass_name, options)
                rows += found
                for row in found:
                    time = "-" if row.median_us is None else f"{row.median_us:9.1f} us"
                    print(
                        f"D={head_dim:<4d}{name:17s}{pass_name:17s}{row.contender:20s}{time}"
                        f"  {row.note or row.backends}",
                        flush=True,
                    )
                if options.out is not None:  # after each, as PyTorch compiles for long
                    write(options, facts, rows)
    return int(any(row.contender == "jattn" and row.median_us is None for row in rows))


def write(
    options: argparse.Namespace, facts: dict[str, object], rows: Sequence[report.Row]
) -> None:
    """Writes the JSON file."""
    content = {
        **facts,
        "what": f"{options.dtype}, batch {options.batch}, {options.length} queries and keys,"
        f" heads x head dim {options.width}",
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
