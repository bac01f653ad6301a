"""Checks and times what the Hopper forward kernel adds to scores: biases, masks, slopes, positions, sinks, dropout.

    python tools/check_flash_terms.py                     # random compositions against float32, then times
    python tools/check_flash_terms.py --problems 20 --no-time
    python tools/check_flash_terms.py --only-time --head-dim 128
    python tools/check_flash_terms.py --no-time --changes take_turns

Problems are drawn from a fixed seed; a failure prints the number that --first takes. The error of an output is held
against the sum of p |v| of its row, which bounds what rounding p and the result to 16 bits can do.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn.backends import flash_tiles

OUT_BOUND = 2.0**-6.5
LSE_BOUND = 2e-3
ALONE = 3  # problems of each term alone
FORMS = ("bnts", "1nts", "b1ts", "11ts", "bn1s", "1n1s", "b11s", "bnt1", "11t1", "1111")
TERMS = (
    "bias",
    "mask",
    "alibi",
    "sinks",
    "positions",
    "dropout",
    "softcap",
    "band",
    "lengths",
    "segments",
)


@dataclasses.dataclass
class Drawn:
    """One problem: positional arrays, keywords, and a description."""

    arrays: list[Any]
    keywords: dict[str, Any]
    text: str


def _shape(form: str, batch: int, heads: int, q_len: int, kv_len: int) -> tuple[int, ...]:
    return tuple(
        {"b": batch, "n": heads, "t": q_len, "s": kv_len, "1": 1}[letter] for letter in form
    )


def _patched_mask(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A mask with patches that are empty, full and random, so that whole tiles are each of them."""
    patches = random.integers(0, 3, (*shape[:2], -(-shape[2] // 96), -(-shape[3] // 160)))
    patches = np.repeat(np.repeat(patches, 96, axis=2), 160, axis=3)[:, :, : shape[2], : shape[3]]
    return np.where(patches == 2, random.random(shape) < 0.5, patches == 1)


def draw(number: int, terms: tuple[str, ...] | None = None) -> Drawn:
    """Draws one problem."""
    random = np.random.default_rng(number)
    head_dim, head_dim_v = [
        (64, 64),
        (128, 128),
        (96, 96),
        (192, 128),
        (256, 256),
        (40, 72),
        (192, 192),
    ][random.integers(7)]
    batch, group, kv_heads = (
        int(random.integers(1, 4)),
        int(random.integers(1, 3)),
        int(random.integers(1, 3)),
    )
    heads = group * kv_heads
    lengths = (1, 64, 100, 128, 257, 384, 640, 1024) if terms is None else (257, 384, 640, 1024)
    q_len, kv_len = (int(random.choice(lengths)) for _ in range(2))
    dtype = [jnp.bfloat16, jnp.float16][random.integers(2)]
    if terms is None:
        terms = tuple(term for term in TERMS if random.random() < 0.3)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), dtype)  # noqa: E731
    q = normal(batch, q_len, heads, head_dim)
    k = normal(batch, kv_len, kv_heads, head_dim)
    v = normal(batch, kv_len, kv_heads, head_dim_v)
    bias = mask = None
    keywords: dict[str, Any] = {}
    text = f"#{number} {dtype.__name__} q {q.shape} k {k.shape} v {v.shape}"
    if "bias" in terms:
        form = str(random.choice(FORMS))
        shape = _shape(form, batch, heads, q_len, kv_len)
        kind = [dtype, jnp.float32][random.integers(2)]
        values = random.standard_normal(shape) * 2
        if random.random() < 0.3:
            values = np.where(random.random(shape) < 0.3, -np.inf, values)
        if random.random() < 0.2:
            values = np.where(random.random(shape) < 0.5, float(jnp.finfo(kind).min), values)
        bias = jnp.asarray(values).astype(kind)
        text += f" bias {form} {kind.__name__}"
    if "mask" in terms:
        form = str(random.choice(FORMS))
        mask = jnp.asarray(_patched_mask(random, _shape(form, batch, heads, q_len, kv_len)))
        text += f" mask {form}"
    if "alibi" in terms:
        keywords["alibi_slopes"] = jnp.asarray(random.standard_normal((heads,)) * 0.1, jnp.float32)
    if "sinks" in terms:
        sinks = random.standard_normal((heads,)) * 3
        keywords["sinks"] = jnp.asarray(
            np.where(random.random(heads) < 0.2, -np.inf, sinks), jnp.float32
        )
    if "softcap" in terms:
        keywords["logits_soft_cap"] = 5.0 if number % 2 else 30.0  # tanh far from a line, or near
    if "band" in terms:
        keywords["is_causal"] = True
        if random.random() < 0.5:
            keywords["local_window_size"] = (
                int(random.integers(0, 300)),
                int(random.integers(0, 300)),
            )
    if "lengths" in terms:
        keywords["query_seq_lengths"] = jnp.asarray(random.integers(0, q_len + 1, batch), jnp.int32)
        keywords["key_value_seq_lengths"] = jnp.asarray(
            random.integers(0, kv_len + 1, batch), jnp.int32
        )
    if "segments" in terms:
        for name, length in (("query", q_len), ("key_value", kv_len)):
            ids = np.sort(random.integers(-1, 3, (batch, length)))
            keywords[f"{name}_segment_ids"] = jnp.asarray(ids, jnp.int32)
    if "positions" in terms:
        for name, length in (("query", q_len), ("key_value", kv_len)):
            positions = np.cumsum(random.integers(0, 3, (batch, length)), axis=1)
            keywords[f"{name}_positions"] = jnp.asarray(positions, jnp.int32)
    elif "band" in terms and random.random() < 0.5:
        keywords["causal_alignment"] = "lower_right"
    if "dropout" in terms:
        keywords["dropout_rate"] = float(random.choice([0.1, 0.5, 0.9]))
        keywords["dropout_seed"] = jnp.asarray(random.integers(0, 2**32, 2, dtype=np.uint32))
        keywords["broadcast_dropout"] = bool(random.random() < 0.3)
    if random.random() < 0.2:
        keywords["scale"] = float(random.choice([-0.1, 0.0, 0.3]))
    scalars = {name: value for name, value in keywords.items() if not hasattr(value, "shape")}
    arrays = [name for name in keywords if name not in scalars]
    return Drawn([q, k, v, bias, mask], keywords, f"{text} {' '.join(arrays)} {scalars}")


Attention = Callable[..., tuple[jax.Array, jax.Array]]


def compiled(drawn: Drawn, changes: dict[str, Any]) -> tuple[Attention, Attention]:
    """Returns the problem as programs that give out and lse: of flash, and of the reference in float32 on the host.

    changes: of the tiles that flash picks.
    """

    def attention(implementation: str, arrays: list[Any]) -> Attention:
        device = arrays[0].devices().pop()
        keywords = {
            name: jax.device_put(value, device) if isinstance(value, jax.Array) else value
            for name, value in drawn.keywords.items()
        }

        def call(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
            return jattn.dot_product_attention(
                q, k, v, bias, mask, **keywords, implementation=implementation, return_lse=True
            )

        return jax.jit(call).lower(*arrays).compile()  # type: ignore[no-any-return]

    with flash_tiles.forward_tile_changes(**changes):
        flash = attention("flash", drawn.arrays)
    return flash, attention("reference", wide(drawn.arrays))


def wide(arrays: list[Any]) -> list[Any]:
    """The arrays on the host in float32, the mask as it is."""
    host = jax.devices("cpu")[0]
    return [
        x
        if x is None
        else jax.device_put(x if x.dtype == jnp.bool_ else x.astype(jnp.float32), host)
        for x in arrays
    ]


def wrong(drawn: Drawn, flash: Attention, reference: Attention) -> str:
    """Returns what is wrong with the result, or nothing."""
    out, lse = (jnp.asarray(x) for x in flash(*drawn.arrays))
    q, k, v, bias, mask = wide(drawn.arrays)
    want, want_lse = reference(q, k, v, bias, mask)
    room, _ = reference(q, k, jnp.abs(v), bias, mask)
    out, lse, want, want_lse, room = (
        np.asarray(x.astype(jnp.float32), np.float64) for x in (out, lse, want, want_lse, room)
    )
    faults = []
    ratio = np.abs(out - want) / (room * OUT_BOUND + 1e-6)
    if not np.all(ratio <= 1):
        at = np.unravel_index(np.argmax(np.where(np.isnan(ratio), np.inf, ratio)), ratio.shape)
        faults.append(
            f"out {np.nanmax(ratio):.2f} of its bound at {tuple(map(int, at))}: {out[at]} for {want[at]}"
        )
    if np.any(np.isneginf(lse) != np.isneginf(want_lse)):
        at = np.argwhere(np.isneginf(lse) != np.isneginf(want_lse))[0]
        faults.append(f"lse at {at}: {lse[tuple(at)]} for {want_lse[tuple(at)]}")
    seen = np.isfinite(want_lse) & (np.abs(want_lse) < 1e37)
    error = np.abs(lse[seen] - want_lse[seen]) / (LSE_BOUND + 1e-5 * np.abs(want_lse[seen]))
    if error.size and not np.all(error <= 1):
        faults.append(f"lse {np.nanmax(error):.2f} of its bound")
    return "; ".join(faults)


# ---- times ----------------------------------------------------------------------------------------------------------


def seconds(function: Any, *arrays: Any, rounds: int = 5, calls: int = 8) -> float:
    """Returns the best mean time of a call over some rounds."""
    jax.block_until_ready(function(*arrays))
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        results = [function(*arrays) for _ in range(calls)]
        jax.block_until_ready(results)
        best = min(best, (time.perf_counter() - begin) / calls)
    return best


def time_terms(head_dim: int, batch: int = 4, heads: int = 16, length: int = 4096) -> None:
    """Prints the time of every term beside the plain kernel."""
    random = np.random.default_rng(0)
    key = jax.random.key(0)
    q, k, v = (
        jax.random.normal(
            jax.random.fold_in(key, i), (batch, length, heads, head_dim), jnp.bfloat16
        )
        for i in range(3)
    )
    pairs = batch * heads * length * length
    full = jax.random.normal(key, (1, heads, length, length), jnp.bfloat16)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    slopes = jnp.asarray(2.0 ** -np.arange(1, heads + 1), jnp.float32)
    half = jnp.asarray(random.random((1, 1, length, length)) < 0.5)
    seed = jnp.asarray([1, 2], jnp.uint32)
    problems: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "plain": (None, None, {}),
        "bias (1,N,T,S)": (full, None, {}),
        "bias (1,N,T,S) f32": (full.astype(jnp.float32), None, {}),
        "bias (1,N,1,S)": (full[:, :, :1], None, {}),
        "bias (1,N,1,S) f32": (full[:, :, :1].astype(jnp.float32), None, {}),
        "bias (B,1,1,S)": (jnp.swapaxes(full[:, :batch, :1], 0, 1), None, {}),
        "mask (1,1,T,S) random": (None, half, {}),
        "mask (B,1,T,S) random": (
            None,
            jnp.broadcast_to(half, (batch, 1, length, length)) & True,
            {},
        ),
        "mask (1,1,1,S) random": (None, half[:, :, :1], {}),
        "softcap": (None, None, {"logits_soft_cap": 30.0}),
        "sinks": (None, None, {"sinks": jnp.zeros((heads,), jnp.float32)}),
        "alibi": (None, None, {"alibi_slopes": slopes}),
        "dropout 0.1": (None, None, {"dropout_rate": 0.1, "dropout_seed": seed}),
        "plain causal": (None, None, {"is_causal": True}),
        "mask (1,1,T,S) causal": (None, jnp.tril(jnp.ones((1, 1, length, length), bool)), {}),
        "causal by positions": (
            None,
            None,
            {"is_causal": True, "query_positions": positions, "key_value_positions": positions},
        ),
        "bias (1,N,1,S) causal": (full[:, :, :1], None, {"is_causal": True}),
        "alibi causal": (None, None, {"is_causal": True, "alibi_slopes": slopes}),
        "dropout 0.1 causal": (
            None,
            None,
            {"is_causal": True, "dropout_rate": 0.1, "dropout_seed": seed},
        ),
        "sinks causal": (
            None,
            None,
            {"is_causal": True, "sinks": jnp.zeros((heads,), jnp.float32)},
        ),
    }
    programs: list[tuple[str, str, Any, tuple[Any, Any]]] = []
    for name, (bias, mask, keywords) in problems.items():
        for tag, changes in {"": {}, **TILES.get(head_dim, {}).get(name, {})}.items():

            def call(
                q: Any,
                k: Any,
                v: Any,
                bias: Any,
                mask: Any,
                tag: str = tag,
                keywords: Any = keywords,
            ) -> Any:
                del tag
                return jattn.dot_product_attention(
                    q, k, v, bias, mask, **keywords, implementation="flash"
                )

            with flash_tiles.forward_tile_changes(**changes):
                lowered = jax.jit(call).lower(q, k, v, bias, mask)
            programs.append((name, tag, lowered, (bias, mask)))
    plain: dict[bool, float] = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled_programs = [pool.submit(program.compile) for _, _, program, _ in programs]
        concurrent.futures.wait(compiled_programs)
    for (name, tag, _, (bias, mask)), program in zip(programs, compiled_programs, strict=True):
        label = f"D={head_dim:<4} {name:<24} {tag:<24}"
        try:
            taken = seconds(program.result(), q, k, v, bias, mask)
        except Exception as error:  # a tile that does not fit must not hide the next
            print(f"{label} {str(error)[:100]}", flush=True)
            continue
        causal = "causal" in name
        if name.startswith("plain") and not tag:
            plain[causal] = taken
        flops = 4 * head_dim * pairs * (0.5 if causal else 1.0)
        print(
            f"{label} {taken * 1e6:9.1f} us {flops / taken * 1e-12:7.1f} TFLOP/s {plain[causal] / taken:5.2f} of plain",
            flush=True,
        )


_TURNS: dict[str, dict[str, Any]] = {"turns": {"take_turns": True}}
_NO_TURNS: dict[str, dict[str, Any]] = {"no turns": {"take_turns": False}}
_IN_SERIES: dict[str, dict[str, Any]] = {"in series": {"in_series": True, "take_turns": False}}
_WIDE_IN_SERIES: dict[str, dict[str, Any]] = {
    "192 queries, in series": {"in_series": True, "tile_q": 192, "take_turns": False}
}
_SQUARE: dict[str, dict[str, Any]] = {
    "128 queries": {"tile_q": 128, "q_in_registers": True, "take_turns": False}
}
_Q_IN_REGISTERS: dict[str, dict[str, Any]] = {"q in registers": {"q_in_registers": True}}
_Q_SHARED: dict[str, dict[str, Any]] = {"q shared": {"q_in_registers": False}}
# Other tiles than the one that is picked, as changes of it.
TILES: dict[int, dict[str, dict[str, dict[str, Any]]]] = {
    128: {
        "bias (1,N,T,S)": _TURNS,
        "mask (1,1,T,S) random": _Q_IN_REGISTERS | _TURNS,
        "mask (1,1,T,S) causal": _Q_IN_REGISTERS | _TURNS,
        "softcap": _TURNS | _Q_SHARED,
        "alibi": _NO_TURNS | _Q_SHARED,
        "alibi causal": _NO_TURNS | _Q_SHARED,
        "bias (1,N,1,S)": _TURNS | _Q_SHARED | _WIDE_IN_SERIES,
        "bias (1,N,1,S) causal": _TURNS | _WIDE_IN_SERIES,
        "dropout 0.1": _TURNS,
        "dropout 0.1 causal": _TURNS,
    },
    64: {
        "bias (1,N,T,S)": _NO_TURNS | _IN_SERIES,
        "mask (1,1,T,S) random": _NO_TURNS | _SQUARE,
        "softcap": _SQUARE,
        "alibi": _NO_TURNS | _SQUARE,
        "bias (1,N,1,S)": _NO_TURNS,
        "bias (1,N,1,S) causal": _NO_TURNS,
        "dropout 0.1": _TURNS | _WIDE_IN_SERIES,
    },
}


def main() -> int:
    """Returns 1 if a result is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="check no problem after this time"
    )
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--only-time", action="store_true")
    parser.add_argument(
        "--changes",
        nargs="*",
        default=[],
        choices=("take_turns",),
        help="check tiles with these, wherever they can have them",
    )
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128, 64])
    options = parser.parse_args()
    begin = time.monotonic()
    failed = checked = 0
    # Each term alone first, so that a wrong one has a name.
    alone = [(term, "band") if term == "positions" else (term,) for term in TERMS]
    alone += [("segments", "band"), ("softcap", "band")]
    chosen: list[tuple[int, tuple[str, ...] | None]] = [
        (1000 + 7 * i + j, terms) for i, terms in enumerate(alone) for j in range(ALONE)
    ]
    chosen += [(options.first + i, None) for i in range(options.problems)]
    if options.first:
        chosen = chosen[ALONE * len(alone) :]
    drawn = [] if options.only_time else [draw(number, terms) for number, terms in chosen]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        changes = dict.fromkeys(options.changes, True)
        programs = [pool.submit(compiled, problem, changes) for problem in drawn]
        for problem, program in zip(drawn, programs, strict=True):
            if time.monotonic() - begin > options.seconds:
                program.cancel()
                continue
            try:
                fault = wrong(problem, *program.result())
            except Exception as error:  # one that does not run must not hide the next
                fault = f"{type(error).__name__}: {str(error)[:600]}"
            checked += 1
            failed += bool(fault)
            print(
                f"{'WRONG' if fault else 'right'} {problem.text}{': ' + fault if fault else ''}",
                flush=True,
            )
    print(f"{checked} checked, {failed} wrong, {time.monotonic() - begin:.0f} s", flush=True)
    if not options.no_time:
        for head_dim in options.head_dim:
            time_terms(head_dim)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
