"""Runs named cases again and again and holds the bits of every run against those of the first.

In an ordinary build they show sums in no fixed order; in one with random sleeps (docs/debugging.md) missing waits, too.
The sums of dq have no fixed order in some kernels: they may differ from the first run by what rounding them once costs.

Example: python3 tools/repeat_cases.py --backend flash --repeat 1000 --case dropout-plain-wide-head bias-bn1s
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

import jattn
from jattn.testing import cases, inputs
from jattn.testing.cases import Case
from jattn.testing.run import compile_case

# dq added up in memory in any order: two terms of different size, each rounded to 16 bits at the end.
_ANY_ORDER = re.compile(r"family=sm90_backward (?![^;\"]*dq_order=2)")
_LARGEST_SHARE = 2.0**-6  # of the greatest element


@jax.jit
def _compare(run: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many elements have other bits, and the greatest difference over the greatest element."""
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[run.dtype.itemsize]
    other = jax.lax.bitcast_convert_type(run, bits) != jax.lax.bitcast_convert_type(first, bits)
    x, y = run.astype(jnp.float32), first.astype(jnp.float32)
    apart = jnp.where(other, jnp.abs(x - y), 0.0)
    greatest = jnp.max(jnp.where(jnp.isfinite(y), jnp.abs(y), 0.0), initial=1e-30)
    return jnp.sum(other), jnp.max(apart, initial=0.0) / greatest


def repeat(case: Case, backend: str, runs: int, seconds: float) -> str:
    """Returns what was found.

    Raises:
      AssertionError: a run differs from the first where it must not.
    """
    call, lowered = compile_case(case, inputs.make(case), backend)
    any_order = {"dq"} if _ANY_ORDER.search(lowered) else set()
    first, begin, done, farthest = call(), time.monotonic(), 0, 0.0
    while done < runs and time.monotonic() - begin < seconds:
        done += 1
        for name, x in call().items():
            count, apart = jax.device_get(_compare(x, first[name]))
            if count and not (name in any_order and apart <= _LARGEST_SHARE):
                raise AssertionError(
                    f"run {done}: {name} has other bits in {count} places, by {apart:.1e} of the greatest"
                )
            farthest = max(farthest, float(apart))
    return f"{done} runs" + (
        f", dq apart by up to {farthest:.1e} of the greatest" if any_order else ""
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Repeats the cases; returns 1 if one differs or if no case ran at all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", default=[], help="names of cases")
    parser.add_argument("--tag", nargs="+", default=[], help="all cases with one of these tags")
    parser.add_argument("--backend", default="flash")
    parser.add_argument("--repeat", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of one case, at most")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in dq, too")
    options = parser.parse_args(arguments)
    chosen = [cases.named(name) for name in options.case]
    chosen += [case for tag in options.tag for case in cases.tagged(tag)]
    counts = {"passed": 0, "failed": 0, "refused": 0}
    for case in chosen:
        try:
            with jattn.deterministic("strict" if options.deterministic else "off"):
                outcome, text = (
                    "passed",
                    repeat(case, options.backend, options.repeat, options.seconds),
                )
        except jattn.NoBackendError as error:
            outcome, text = "refused", "; ".join(f"{r.code} {r.argument}" for r in error.reasons)
        except AssertionError as error:
            outcome, text = "failed", str(error)
        counts[outcome] += 1
        print(f"{outcome:<8} {case.name}: {text}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
