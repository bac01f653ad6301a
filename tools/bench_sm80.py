"""Times variants of mem_efficient's kernels beside torch, each checked first: python3 tools/bench_sm80.py [--quick].

Variants are choices of jattn/backends/cuda_tiles.py:
  float32   chains of 1, 2 or 4 TF32 steps before a rounded addition (tf32_chain)
  bfloat16  p and ds of the backward through shared memory or not (shares_scores)
and, as they are, what each feature costs over the plain problem. The column "error" is the largest error over the error
allowed (benchmarks/check.py). Needs a GPU; torch only for its column.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import arrays, check, rivals, timing
from jattn import _core, ffi
from jattn.backends import cuda_tiles
from jattn.device import expected
from jattn.masks import Band
from jattn.spec import Dropout, Spec
from jattn.testing.cases import Case

IMPLEMENTATION = "mem_efficient"


@dataclasses.dataclass(frozen=True)
class Variant:
    """Names in cuda_tiles and what takes their place."""

    name: str
    choices: tuple[tuple[str, Callable[..., Any]], ...] = ()

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Makes the planner choose this variant; nothing traced before is used again."""
        with contextlib.ExitStack() as stack:
            for name, choice in self.choices:
                stack.enter_context(mock.patch.object(cuda_tiles, name, choice))
            jax.clear_caches()
            yield


def _chain(steps: int) -> Variant:
    return Variant(f"chain {steps}", (("tf32_chain", lambda: steps),))


AS_PLANNED = Variant("as planned")
CHAINS = (_chain(1), _chain(2), _chain(4), AS_PLANNED)
SHARING = tuple(
    Variant(name, (("shares_scores", lambda dtype, widest, fused, shares=shares: shares),))
    for name, shares in (("own scores", False), ("shared scores", True))
)


@dataclasses.dataclass(frozen=True)
class Job:
    """One line of the table: variants of one pass over one problem, beside a rival."""

    case: Case
    backward: bool
    variants: tuple[Variant, ...]
    rival: str | None


def problem(dtype: str, head_dim: int, length: int, causal: bool) -> Case:
    """Batch * length = 16384 and heads * head dim = 2048."""
    name = f"{dtype} D{head_dim} S{length} {'causal' if causal else 'full'}"
    return Case(
        name=name,
        batch=16384 // length,
        q_len=length,
        kv_len=length,
        num_heads=2048 // head_dim,
        num_kv_heads=2048 // head_dim,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=dtype,
        is_causal=causal,
    )


def jobs(quick: bool) -> list[Job]:
    """The table, most wanted lines first."""
    found = []
    for head_dim in (128, 64):
        for causal in (True, False):
            for backward in (False, True):
                case = problem("float32", head_dim, 2048, causal)
                found.append(Job(case, backward, CHAINS, "torch-efficient"))
    for head_dim in (128, 64):
        for causal in (True, False):
            for length in (2048,) if quick else (2048, 8192):
                case = problem("bfloat16", head_dim, length, causal)
                found.append(Job(case, True, SHARING, "torch-flash"))
    plain = problem("bfloat16", 128, 4096, False)
    featured = {
        "plain": plain,
        "dropout": plain.but("dropout", dropout_rate=0.1),
        "sinks": plain.but("sinks", sinks_form="n"),
        "alibi": plain.but("alibi", alibi_form="n"),
        "mask": plain.but("mask", mask_form="11ts"),
        "bias": plain.but("bias", bias_form="1nts"),
    }
    for case in featured.values():
        for backward in (False, True):
            found.append(Job(case, backward, (AS_PLANNED,), None))
    return found


def spec_of(case: Case) -> Spec:
    """What jattn makes of one of the problems above."""
    both = (case.batch, case.num_heads)
    return Spec(
        case.batch,
        case.q_len,
        case.kv_len,
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        case.head_dim_v,
        case.dtype,
        case.scale_value,
        band=Band(right=0) if case.is_causal else Band(),
        bias=case.form_shape(case.bias_form) if case.bias_form else None,
        bias_dtype=case.dtype if case.bias_form else "",
        mask=case.form_shape(case.mask_form) if case.mask_form else None,
        sinks=(1, case.num_heads) if case.sinks_form else None,
        alibi_slopes=(1, case.num_heads) if case.alibi_form else None,
        dropout=Dropout(both) if case.dropout_rate else None,
    )


def kernel_keys(job: Job, arch: tuple[int, int]) -> set[str]:
    """The kernels that a job will need."""
    spec = spec_of(job.case)
    keys: set[str] = set()
    for variant in job.variants:
        with variant.applied():
            plans = [cuda_tiles.plan_forward(spec, arch)]
            if job.backward:
                plans.append(
                    cuda_tiles.plan_backward(
                        dataclasses.replace(spec, sinks=None),
                        arch,
                        wants=(True, True, True, spec.bias is not None),
                        deterministic=False,
                    )
                )
            for plan in plans:
                keys.update(plan.kernels.split(";"))
    return keys


def prepare(key: str) -> None:
    """Puts a kernel into the cache on disk."""
    ffi.register_targets()
    _core.prepare_kernel(key)


def run(job: Job, rounds: int, round_seconds: float) -> dict[str, Any]:
    """Checks and times one job; returns its row."""
    data = arrays.make(job.case)
    contenders, errors, problems = [], {}, {}
    for variant in job.variants:
        with variant.applied():
            contender, _ = rivals.jattn_contender(job.case, data, job.backward, IMPLEMENTATION)
        contender = dataclasses.replace(contender, name=variant.name)
        verdict = check.judge(job.case, data, contender.results(contender.enqueue()))
        errors[variant.name] = verdict.ratios
        if verdict.passed:
            contenders.append(contender)
    if job.rival is not None:
        try:
            contenders.append(rivals.RIVALS[job.rival].build(job.case, data, job.backward))
        except (rivals.UnsupportedError, RuntimeError) as error:
            problems[job.rival] = str(error).splitlines()[0]
    times = timing.compare(contenders, rounds, round_seconds)
    pairs = arrays.visible_pairs(job.case, data) * job.case.num_heads
    widths = job.case.head_dim + job.case.head_dim_v
    flops = 2.0 * pairs * widths * (3.5 if job.backward else 1.0)
    return {
        "case": job.case.name,
        "pass": "forward+backward" if job.backward else "forward",
        "tflops": {name: flops / t.median_seconds / 1e12 for name, t in times.items()},
        "errors": errors,
        "problems": problems,
    }


def line(row: dict[str, Any]) -> str:
    """A row for reading."""
    parts = [
        f"{name} {tflops:.1f}"
        + (f" (error {max(row['errors'][name].values()):.2f})" if name in row["errors"] else "")
        for name, tflops in row["tflops"].items()
    ]
    parts += [
        f"{name} WRONG {ratios}"
        for name, ratios in row["errors"].items()
        if name not in row["tflops"]
    ]
    parts += [f"{name}: {text}" for name, text in row["problems"].items()]
    return f"{row['case']:<34} {row['pass']:<17} " + "   ".join(parts)


def main() -> int:
    """Prints a line per job and writes them all; returns 1 if a variant was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="short lengths only, fewer rounds")
    parser.add_argument("--only", default="", help="jobs whose case name contains this")
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args()
    device = expected(None)
    if device.arch is None:
        parser.error(f"needs a CUDA device, found {device}")
    chosen = [job for job in jobs(options.quick) if options.only in job.case.name]
    keys = set().union(*(kernel_keys(job, device.arch) for job in chosen))
    # Started anew: a fork of a process with JAX's threads may hang.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(prepare, sorted(keys)))
    rows = []
    for job in chosen:
        row = run(job, rounds=3 if options.quick else 5, round_seconds=0.1)
        rows.append(row)
        print(line(row), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    return 1 if any(len(r["tflops"]) < len(r["errors"]) for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
