"""Runs named cases through named backends, each compared with the oracle; a small program to run under a checker.

Example: compute-sanitizer --tool memcheck python3 tools/run_cases.py --backend flash --case mask-everything-bf16
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import jattn
from jattn.backends import flash_backward_tiles
from jattn.testing import cases
from jattn.testing.run import verify

# Small, and between them: tails, bands, lengths, segments, a dense mask, a bias, groups, three head dims, three types.
DEFAULT_CASES = (
    "mask-everything-bf16",
    "mask-everything-f16",
    "mask-everything",
    "mask-segments-interleaved",
    "mask-window-causal",
    "bias-float32-for-bf16",
    "group-gqa-2",
    "group-decode",
    "group-few-queries",
    "values-normal-bf16",
    "head-dim-D96-f16",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases; returns 1 if one is wrong or if no case ran at all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case",
        nargs="+",
        default=[],
        help="names of cases; prints the errors of those that pass as well (default: a few small cases)",
    )
    parser.add_argument("--tag", nargs="+", default=[], help="all cases with one of these tags")
    parser.add_argument(
        "--backend",
        nargs="+",
        default=["flash", "mem_efficient"],
        help="names of backends (default: flash mem_efficient)",
    )
    parser.add_argument("--seconds", type=float, help="begin no case after this time")
    parser.add_argument(
        "--dq-order",
        type=int,
        choices=(0, 1, 2),
        help="how flash adds dq up (Config::dq_order), where it can; else as its plans say",
    )
    options = parser.parse_args(arguments)
    chosen = [cases.named(name) for name in options.case]
    chosen += [case for tag in options.tag for case in cases.tagged(tag)]
    chosen = chosen or [cases.named(name) for name in DEFAULT_CASES]
    begin = time.monotonic()
    counts = {"passed": 0, "failed": 0, "refused": 0, "left out for time": 0}
    for case in chosen:
        for backend in options.backend:
            if options.seconds is not None and time.monotonic() - begin > options.seconds:
                counts["left out for time"] += 1
                continue
            try:
                with flash_backward_tiles.dq_order(options.dq_order):
                    report = verify(case, backend)
            except jattn.NoBackendError as error:
                outcome = "refused"
                text = "; ".join(f"{reason.code} {reason.argument}" for reason in error.reasons)
            except Exception as error:  # a wrong case must not hide the ones after it
                outcome, text = "failed", f"{type(error).__name__}: {error}"
            else:
                outcome, text = "passed", f"\n{report}" if options.case else ""
            counts[outcome] += 1
            print(f"{outcome:<8} {backend:<14} {case.name} {text}".rstrip(), flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
