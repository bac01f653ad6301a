"""Checks and times the gradients of the Hopper kernels with everything that acts on scores, dbias included.

    python tools/check_flash_backward_terms.py            # random compositions against float32, then times
    python tools/check_flash_backward_terms.py --problems 20 --no-time
    python tools/check_flash_backward_terms.py --only-time --head-dim 128
    python tools/check_flash_backward_terms.py --only-time --head-dim 192 --strict     # and the deterministic form

Problems are those of check_flash_terms.py, by their numbers; every other one runs by two kernels (strict). The largest
error of a gradient is held against the largest gradient of its array. tests/gpu has the sharper comparison.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import sys
import time
from typing import Any

import check_flash_terms as terms
import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn.config import Determinism

BOUND = 0.03
NAMES = ("dq", "dk", "dv", "dbias")


def gradients(drawn: terms.Drawn, implementation: str, arrays: list[Any]) -> Any:
    """Compiles the gradients of a problem for given cotangents of out and lse, where its arrays are."""
    device = arrays[0].devices().pop()
    keywords = {
        name: jax.device_put(value, device) if isinstance(value, jax.Array) else value
        for name, value in drawn.keywords.items()
    }

    def call(q: Any, k: Any, v: Any, bias: Any, mask: Any, dout: Any, dlse: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
            out, lse = jattn.dot_product_attention(
                q,
                k,
                v,
                bias,
                mask,
                **keywords,
                implementation=implementation,
                return_lse=True,
            )
            return out, jnp.where(jnp.isfinite(lse), lse, 0.0)

        results, pullback = jax.vjp(attend, q, k, v, bias)
        return pullback((dout.astype(results[0].dtype), dlse))

    return jax.jit(call).lower(*arrays).compile()


def prepared(drawn: terms.Drawn, number: int) -> tuple[list[Any], list[Any]]:
    """The arrays of a problem with cotangents, in its types and in float32. Huge biases are left out: see the log."""
    q, _, v, bias, _ = drawn.arrays
    if bias is not None:
        drawn.arrays[3] = jnp.where(bias < -1e4, -jnp.inf, bias).astype(bias.dtype)
    random = np.random.default_rng(number)
    dout = jnp.asarray(random.standard_normal((*q.shape[:3], v.shape[3])), q.dtype)
    dlse = jnp.asarray(random.standard_normal(q.shape[:3]) * 0.3, jnp.float32)
    return [*drawn.arrays, dout, dlse], terms.wide([*drawn.arrays, dout, dlse])


def compiled(drawn: terms.Drawn, number: int) -> tuple[Any, Any, list[Any], list[Any]]:
    """Both programs of a problem, and what they are called with."""
    own, wide = prepared(drawn, number)
    strict: Determinism = "strict" if number % 2 else "off"
    with jattn.deterministic(strict):
        ours = gradients(drawn, "flash", own)
    return ours, gradients(drawn, "reference", wide), own, wide


def wrong(ours: Any, reference: Any, own: list[Any], wide: list[Any]) -> str:
    """Returns what is wrong with the gradients, or nothing."""
    faults = []
    for name, got, want in zip(NAMES, ours(*own), reference(*wide), strict=True):
        if got is None:
            continue
        a, b = (np.asarray(x.astype(jnp.float32), np.float64) for x in (got, want))
        room = BOUND * np.max(np.abs(b), initial=0.0) + 1e-3
        error = np.abs(a - b)
        if not np.all(error <= room):
            at = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape)
            faults.append(
                f"{name} {np.nanmax(error) / room:.2f} of its bound at {tuple(map(int, at))}: "
                f"{a[at]:.5f} for {b[at]:.5f}, {np.mean(~(error <= room)):.4f} of all"
            )
    return "; ".join(faults)


def time_terms(
    head_dim: int,
    forms: tuple[Determinism, ...],
    batch: int = 4,
    heads: int = 16,
    length: int = 4096,
) -> None:
    """Prints the time of forward and backward together for every term, in every form that it has."""
    random = np.random.default_rng(0)
    key = jax.random.key(0)
    q, k, v, dout = (
        jax.random.normal(
            jax.random.fold_in(key, i), (batch, length, heads, head_dim), jnp.bfloat16
        )
        for i in range(4)
    )
    full = jax.random.normal(key, (1, heads, length, length), jnp.bfloat16)
    half = jnp.asarray(random.random((1, 1, length, length)) < 0.5)
    slopes = jnp.asarray(2.0 ** -np.arange(1, heads + 1), jnp.float32)
    dropout = {"dropout_rate": 0.1, "dropout_seed": jnp.asarray([1, 2], jnp.uint32)}
    problems: dict[str, tuple[Any, Any, bool, dict[str, Any]]] = {
        "plain": (None, None, False, {}),
        "bias (1,N,T,S)": (full, None, False, {}),
        "bias (1,N,T,S) and dbias": (full, None, True, {}),
        "bias (1,1,T,S) and dbias": (full[:, :1], None, True, {}),
        "bias (1,N,1,S)": (full[:, :, :1], None, False, {}),
        "bias (1,N,1,S) and dbias": (full[:, :, :1], None, True, {}),
        "bias (1,N,T,S) f32": (full.astype(jnp.float32), None, False, {}),
        "mask (1,1,T,S) random": (None, half, False, {}),
        "mask (1,1,1,S) random": (None, half[:, :, :1], False, {}),
        "dropout 0.1": (None, None, False, dropout),
        "softcap": (None, None, False, {"logits_soft_cap": 30.0}),
        "plain causal": (None, None, False, {"is_causal": True}),
        "bias causal and dbias": (full, None, True, {"is_causal": True}),
        "alibi causal": (None, None, False, {"is_causal": True, "alibi_slopes": slopes}),
        "dropout 0.1 causal": (None, None, False, {"is_causal": True, **dropout}),
        "mask (1,1,T,S) causal": (None, jnp.tril(jnp.ones_like(half)), False, {}),
    }
    programs: list[tuple[str, Determinism, Any, Any, tuple[Any, ...]]] = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, (bias, mask, wants_bias, keywords) in problems.items():

            def forward(
                q: Any, k: Any, v: Any, bias: Any, mask: Any, keywords: Any = keywords
            ) -> Any:
                return jattn.dot_product_attention(
                    q, k, v, bias, mask, **keywords, implementation="flash"
                )

            arrays = (q, k, v, bias, mask)
            first = pool.submit(jax.jit(forward).lower(*arrays).compile)
            for form in forms:

                def both(
                    q: Any,
                    k: Any,
                    v: Any,
                    bias: Any,
                    mask: Any,
                    dout: Any,
                    forward: Any = forward,
                    wants_bias: bool = wants_bias,
                ) -> Any:
                    if wants_bias:
                        _, pullback = jax.vjp(lambda *x: forward(*x, mask), q, k, v, bias)
                    else:
                        _, pullback = jax.vjp(lambda *x: forward(*x, bias, mask), q, k, v)
                    return pullback(dout)

                with jattn.deterministic(form):
                    lowered = jax.jit(both).lower(*arrays, dout)
                programs.append((name, form, first, pool.submit(lowered.compile), arrays))
        concurrent.futures.wait([x for program in programs for x in program[2:4]])
    plain: dict[bool, tuple[float, float]] = {}
    for name, form, first, program, arrays in programs:
        label = f"D={head_dim:<4} {name:<26} {form.removeprefix('off'):<6}"
        try:
            ahead = terms.seconds(first.result(), *arrays, rounds=3)
            taken = terms.seconds(program.result(), *arrays, dout, rounds=3)
        except Exception as error:  # one that does not run must not hide the next
            print(f"{label} {str(error)[:200]}", flush=True)
            continue
        causal = "causal" in name
        if name.startswith("plain") and form == "off":
            plain[causal] = (taken, taken - ahead)
        flops = 14 * head_dim * batch * heads * length * length * (0.5 if causal else 1.0)
        print(
            f"{label} {taken * 1e3:7.3f} ms {flops / taken * 1e-12:6.1f} TFLOP/s "
            f"{plain[causal][0] / taken:5.2f} of plain; backward alone {(taken - ahead) * 1e3:7.3f} ms "
            f"{plain[causal][1] / (taken - ahead):5.2f} of plain",
            flush=True,
        )


def main() -> int:
    """Returns 1 if a gradient is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--only-time", action="store_true")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128, 64])
    parser.add_argument(
        "--strict", action="store_true", help="time the deterministic form beside the other"
    )
    options = parser.parse_args()
    begin = time.monotonic()
    failed = checked = 0
    chosen: list[tuple[int, tuple[str, ...] | None]] = [
        (1000 + 7 * i + j, (term, "band") if term == "positions" else (term,))
        for i, term in enumerate(terms.TERMS)
        for j in range(2)
    ]
    if options.first:
        chosen = []
    chosen += [(options.first + i, None) for i in range(options.problems)]
    if options.only_time:
        chosen = []
    drawn = [(number, terms.draw(number, names)) for number, names in chosen]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = [pool.submit(compiled, problem, number) for number, problem in drawn]
        for (number, problem), program in zip(drawn, programs, strict=True):
            if time.monotonic() - begin > options.seconds:
                program.cancel()
                continue
            try:
                fault = wrong(*program.result())
            except Exception as error:  # one that does not run must not hide the next
                fault = f"{type(error).__name__}: {str(error)[:600]}"
            checked += 1
            failed += bool(fault)
            form = "strict" if number % 2 else "fused "
            print(
                f"{'WRONG' if fault else 'right'} {form} {problem.text}{': ' + fault if fault else ''}",
                flush=True,
            )
    print(f"{checked} checked, {failed} wrong, {time.monotonic() - begin:.0f} s", flush=True)
    if not options.no_time:
        for head_dim in options.head_dim:
            time_terms(head_dim, ("off", "strict") if options.strict else ("off",))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
