"""Checks and times variants of the sm90 forward kernel, without the rest of the package.

    tools/build_sm90_variants.sh                 # on any machine with nvcc: cubins and facts into build/sm90
    python3 tools/bench_sm90.py                  # on the GPU machine: torch, libcuda; checks, then times
    python3 tools/bench_sm90.py --cases d128 --variants d128 --rounds 9 --no-check

Two states of the kernels in one run, each checked, with their ratios last:

    tools/build_sm90_variants.sh build/before OTHER_CHECKOUT/cc/kernels
    python3 tools/bench_sm90.py --variants kept$ --against build/before

Every variant runs under two names in every round and the order of a round is random: the card is power-limited, and
one binary under three names differed by 3 % when the order was fixed. Times are medians over rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import re
import statistics
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm90_bench import (
    LOG2E,
    NO_LAST_SECTION,
    OTHER,
    PROBLEM_MEMBERS,
    Case,
    Data,
    Driver,
    Kernel,
    Params,
    check_apart,
    check_here,
    clocks,
    comparison,
    current_stream,
    device_words,
    differing,
    fits,
    geometric_mean_line,
    in_random_rounds,
    make_data,
    problem_values,
    runs_timed,
    struct_printer,
    visibility,
)

OWN_MEMBERS = (
    *("q", "k", "v", "out", "lse", "next_item", "tiles", "items", "first_rows", "section_heads"),
    *("last_section", "cap_series", "short_cap_series", "trusted_sum"),
)

FLAGS = (
    "band lengths segments softcap in_series scale_first q_in_registers integer_max take_turns cap_series"
).split()


# ---- variants -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One Config of kernels/sm90/forward.cuh and how its items are ordered."""

    name: str
    element: str = "bf16"
    head_dim: int = 128
    head_dim_v: int = 0  # 0: head_dim
    tile_q: int = 128
    tile_kv: int = 128
    stages: int = 2
    band: int = 0
    lengths: int = 0
    segments: int = 0
    softcap: int = 0
    in_series: int = 0
    scale_first: int = 0
    q_in_registers: int = 0
    integer_max: int = 0
    take_turns: int = 0
    cap_series: int = 0
    compiler: str = "nvcc"
    section_waves: float = 0  # items of one section over multiprocessors; 0: one key/value head

    def config(self) -> dict[str, str]:
        """Returns the members of Config as device code, in its order."""
        values = {
            "element": "Element::k" + self.element.upper(),
            "head_dim": str(self.head_dim),
            "head_dim_v": str(self.head_dim_v or self.head_dim),
            "tile_q": str(self.tile_q),
            "tile_kv": str(self.tile_kv),
            "num_warps": str(4 * (1 + self.tile_q // 64)),
            "stages": str(self.stages),
            "schedule": "2",
        }
        values |= {flag: "true" if getattr(self, flag) else "false" for flag in FLAGS}
        order = (
            "element head_dim head_dim_v tile_q tile_kv num_warps stages band lengths segments softcap "
            "schedule in_series scale_first q_in_registers integer_max take_turns "
            "cap_series"
        ).split()
        return {name: values[name] for name in order}

    def cubin(self) -> str:
        """Returns the file name: equal for variants that differ in the order of items only."""
        shape = f"{self.element}_d{self.head_dim}x{self.head_dim_v or self.head_dim}_tile{self.tile_q}x{self.tile_kv}"
        tags = [
            shape,
            f"stages{self.stages}",
        ]
        tags += [flag for flag in FLAGS if getattr(self, flag)]
        return "_".join([*tags, *([self.compiler] if self.compiler != "nvcc" else [])])


def variants() -> list[Variant]:
    """Returns the variants of a standard run: "kept" is what the planner picks, "kept_long" from 8192 keys on."""
    found: list[Variant] = []
    for band in (0, 1):
        mask = "band" if band else "full"
        base = Variant("", band=band, section_waves=1.0 if band else 0.0)

        def add(tag: str, base: Variant = base, mask: str = mask, **members: Any) -> None:
            variant = replace(base, **members)
            width = f"d{variant.head_dim}" + (
                f"v{variant.head_dim_v}" if variant.head_dim_v else ""
            )
            found.append(replace(variant, name=f"{width}_{mask}_{tag}"))

        d64: dict[str, Any] = {"head_dim": 64, "tile_q": 192, "stages": 4, "integer_max": 1}
        d64["take_turns"] = 1
        best: dict[str, Any] = {"q_in_registers": 1, "integer_max": 1}
        series: dict[str, Any] = {"in_series": 1, "tile_q": 192, "integer_max": 1}
        add("kept", **d64)
        add("kept_nvrtc", **d64, compiler="nvrtc")
        add("free", **(d64 | {"take_turns": 0}))
        add("kept", **best)
        add("kept_nvrtc", **best, compiler="nvrtc")
        add("series", **series)
        add("kept", head_dim=256, tile_kv=64)
        add("kept", head_dim=96, **series)
        add("kept", head_dim=192, tile_kv=96)
        add("kept", head_dim=192, head_dim_v=128, integer_max=1)
        if band:
            add("kept_2waves", **best, section_waves=2.0)
            add("kept_4waves", **best, section_waves=4.0)
            add("kept_2waves", **d64, section_waves=2.0)
            add("kept_4waves", **d64, section_waves=4.0)
            add("kept_4waves", head_dim=256, tile_kv=64, section_waves=4.0)
    # For the checks: other types and features.
    checked = Variant("", band=1, lengths=1)
    found.append(replace(checked, name="check_f16", element="f16"))
    found.append(replace(checked, name="check_d256", head_dim=256, tile_kv=64))
    nvrtc = Variant("check_nvrtc96", head_dim=96, band=1, compiler="nvrtc")
    found.append(nvrtc)
    found.append(replace(nvrtc, name="check_nvrtc96f", band=0, element="f16"))
    found.append(replace(nvrtc, name="check_nvrtc64", head_dim=64, tile_q=192))
    found.append(replace(checked, name="check_full", band=0))
    found.append(replace(checked, name="check_segments", segments=1))
    found.append(replace(checked, name="check_segments64", segments=1, head_dim=64, tile_q=192))
    found.append(replace(checked, name="check_serial", tile_q=192, in_series=1, integer_max=1))
    found.append(replace(checked, name="check_qreg", q_in_registers=1, integer_max=1))
    found.append(replace(checked, name="check_softcap", softcap=1))
    found.append(replace(checked, name="check_scale_first", scale_first=1))
    turns = replace(checked, take_turns=1)
    found.append(replace(turns, name="check_turns"))
    found.append(replace(turns, name="check_turns_qreg", q_in_registers=1))
    d64 = replace(turns, head_dim=64, tile_q=192, stages=4)
    found.append(replace(d64, name="check_turns64"))
    series = replace(checked, softcap=1, cap_series=1, integer_max=1)
    found.append(replace(series, name="check_series"))
    found.append(replace(series, name="check_series64", head_dim=64, tile_q=192, in_series=1))
    found.append(replace(series, name="check_series256", head_dim=256, tile_kv=64))
    return found


UNIT = """\
#include "sm90/forward.cuh"

namespace jattn {{
constexpr Config kConfig{{{config}}};
}}

extern "C" __global__ void __launch_bounds__(jattn::sm90::forward_threads(jattn::kConfig), 1)
jattn_kernel(const __grid_constant__ jattn::sm90::ForwardParams params) {{
  jattn::sm90::forward<jattn::kConfig>(params);
}}
"""


FACTS = """\
#include <cstddef>
#include <cstdio>

#include "sm90/forward_params.cuh"
#include "sm90/shape.cuh"

using namespace jattn;

void print(const char* name, const Config& config, const char* end) {{
  std::printf("  \\"%s\\": {{\\"threads\\": %d, \\"shared_bytes\\": %d}}%s\\n", name, sm90::forward_threads(config),
              sm90::forward_shared_bytes(config), end);
}}

int main() {{
  std::printf("{{\\n");
{structs}
  std::printf("\\"series\\": [[%.17g, %.17g, %.17g, %.17g, %.17g], ", sm90::kCapSeriesLimit, sm90::kCapSeries[0],
              sm90::kCapSeries[1], sm90::kCapSeries[2], sm90::kCapSeries[3]);
  std::printf("[%.17g, %.17g, %.17g, %.17g]],\\n", sm90::kShortCapSeriesLimit, sm90::kShortCapSeries[0],
              sm90::kShortCapSeries[1], sm90::kShortCapSeries[2]);
  std::printf("\\"variants\\": {{\\n");
{prints}
  std::printf("}}}}\\n");
}}
"""


def config_text(variant: Variant) -> str:
    """Returns the inside of a Config{...}."""
    return ", ".join(f".{key} = {value}" for key, value in variant.config().items())


def write_units(folder: Path, chosen: list[Variant]) -> None:
    """Writes one translation unit per variant and facts.cc, which prints sizes and layouts as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    cubins = {variant.cubin(): variant for variant in chosen}
    for name, variant in cubins.items():
        text = UNIT.format(config=config_text(variant))
        path = folder / f"{name}.cu"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for path in folder.glob("*.cu"):
        if path.stem not in cubins:
            for stale in folder.glob(path.stem + ".*"):
                stale.unlink()
    structs = struct_printer({"sm90::ForwardParams": (*OWN_MEMBERS, *PROBLEM_MEMBERS)})
    prints = [
        f'  print("{name}", Config{{{config_text(variant)}}}, "{"," if i + 1 < len(cubins) else ""}");'
        for i, (name, variant) in enumerate(cubins.items())
    ]
    (folder / "facts.cc").write_text(FACTS.format(structs=structs, prints="\n".join(prints)))


# ---- launching ------------------------------------------------------------------------------------------------------


@dataclass
class Loaded:
    """A variant on the device."""

    variant: Variant
    kernel: Kernel
    layout: dict[str, Any]
    series: list[list[float]]


def section_heads(variant: Variant, case: Case, num_sms: int) -> int:
    """Returns how many query heads share a section."""
    if not variant.section_waves:
        return case.group
    tiles = -(-case.q_len // variant.tile_q)
    kv_heads = max(1, round(variant.section_waves * num_sms / tiles / case.group))
    return min(case.batch * case.heads, kv_heads * case.group)


def first_rows(variant: Variant, case: Case) -> int:
    """Returns the queries of the first tile, as rows_of_first_tile() in cc/kernels/sm90/shape.cuh."""
    left_over = case.q_len % variant.tile_q
    return left_over if left_over and left_over % 64 == 0 else variant.tile_q


def add_results(torch: Any, data: Data) -> None:
    """Gives a case results full of NaN and the counter of items."""
    case = data.case
    shape = (case.batch, case.q_len, case.heads, case.width_v)
    data.out = torch.full(shape, math.nan, device="cuda", dtype=data.q.dtype)
    data.lse = torch.full((case.batch, case.heads, case.q_len), math.nan, device="cuda")
    data.extra["counter"] = torch.full((1,), -(2**30), device="cuda", dtype=torch.int32)


def cap_series(coefficients: list[float], case: Case) -> bytes:
    """Returns sm90::CapSeries or SquaredCapSeries; the coefficients are its limit and those of the series."""
    if not case.softcap:
        return bytes(4 * len(coefficients))
    to_argument = case.true_scale / case.softcap
    factors = [
        c * case.softcap * LOG2E * to_argument ** (2 * i + 1)
        for i, c in enumerate(coefficients[1:])
    ]
    if len(factors) == 3:
        root = math.sqrt(factors[2])
        shift = factors[1] / (2 * root)
        factors = [root, shift, factors[0] - shift**2]
    return struct.pack(f"<{len(coefficients)}f", coefficients[0] / to_argument, *factors)


def trusted_sum(coefficients: list[float], case: Case) -> float:
    """Returns ForwardParams::trusted_sum; the coefficients are the limit of the short series and its own."""
    limit, *factors = coefficients
    capped = (
        (case.softcap or 0.0) * LOG2E * sum(c * limit ** (2 * i + 1) for i, c in enumerate(factors))
    )
    return 2.0**capped if capped >= 10.0 and (case.softcap or 0.0) * LOG2E <= 80.0 else 0.0


def launcher(torch: Any, driver: Driver, loaded: Loaded, data: Data) -> Callable[[], None]:
    """Returns a function that launches a variant on a case's data."""
    variant, case = loaded.variant, data.case
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    tiles = -(-case.q_len // variant.tile_q)
    items = case.batch * case.heads * tiles
    keep: list[Any] = [data]
    params = Params(
        loaded.layout,
        {
            "q": driver.tensor_map(data.q, variant.tile_q),
            "k": driver.tensor_map(data.k, variant.tile_kv),
            "v": driver.tensor_map(data.v, variant.tile_kv),
            "out": driver.tensor_map(data.out, 64),
            "lse": data.lse.data_ptr(),
            "next_item": data.pointer("counter"),
            "tiles": tiles,
            "items": items,
            "first_rows": first_rows(variant, case),
            "section_heads": section_heads(variant, case, num_sms),
            "last_section": NO_LAST_SECTION,
            "cap_series": cap_series(loaded.series[0], case),
            "short_cap_series": cap_series(loaded.series[1], case),
            "trusted_sum": trusted_sum(loaded.series[1], case),
        }
        | problem_values(torch, data, variant.tile_q, variant.tile_kv, keep),
    )
    grid = min(items, num_sms)
    stream = current_stream(torch)
    counter = ctypes.c_uint64(data.extra["counter"].data_ptr())

    def launch(keep: list[Any] = keep) -> None:
        driver.call("cuMemsetD8Async", counter, ctypes.c_ubyte(0), ctypes.c_size_t(4), stream)
        driver.launch(loaded.kernel, grid, params, stream)

    return launch


# ---- checking -------------------------------------------------------------------------------------------------------


def reference(torch: Any, data: Data) -> tuple[Any, Any]:
    """Computes (out, lse) in float64 with unreadable inputs taken as 0."""
    case = data.case
    q, k, v = (torch.nan_to_num(x.double()).transpose(1, 2) for x in (data.q, data.k, data.v))
    k, v = (x.repeat_interleave(case.group, 1) for x in (k, v))
    s = case.true_scale * q @ k.transpose(-1, -2)
    if case.softcap:
        s = case.softcap * torch.tanh(s / case.softcap)
    s = torch.where(visibility(torch, data), s, -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.where(
        torch.isneginf(lse)[..., None],
        0.0,
        torch.exp(s - torch.nan_to_num(lse, neginf=0.0)[..., None]),
    )
    return (p @ v).transpose(1, 2), lse


def poison(data: Data) -> None:
    """Fills with NaN what must not be read."""
    case = data.case
    for b, (q_length, kv_length) in enumerate(case.lengths):
        data.q[b, max(q_length, 0) :] = math.nan
        data.k[b, max(kv_length, 0) :] = math.nan
        data.v[b, max(kv_length, 0) :] = math.nan
    if case.segments:
        data.q[data.extra["q_segments"] < 0] = math.nan
        data.k[data.extra["kv_segments"] < 0] = math.nan
        data.v[data.extra["kv_segments"] < 0] = math.nan


def check_cases(variant: Variant) -> list[Case]:
    """Returns small problems that exercise tails, bands, lengths, segments and groups for one variant."""
    dims = (variant.head_dim, variant.head_dim_v or variant.head_dim)
    element, tile_q, tile_kv = variant.element, variant.tile_q, variant.tile_kv
    base = Case("full", 2, 333, 517, 4, 2, *dims, element=element)
    cases = [
        base,
        replace(base, name="one", batch=1, q_len=1, kv_len=1, heads=1, kv_heads=1),
        replace(base, name="aligned", batch=1, q_len=2 * tile_q, kv_len=2 * tile_kv, heads=2),
        replace(base, name="many", batch=3, q_len=1000, kv_len=260, heads=20, kv_heads=4),
        replace(base, name="narrow", head_dim=dims[0] - 8, head_dim_v=dims[1] - 24),
    ]
    lengths = ((333, 517), (100, 65), (0, 300), (200, 0), (65, 130), (400, -7))
    with_lengths = replace(base, name="lengths", batch=6, lengths=lengths)
    cases.append(with_lengths)
    # Rows settle by the last keys; sums of the first ones are right, beyond what is safe, beyond the type.
    grows = replace(base, batch=2, q_len=700, kv_len=900, heads=40, kv_heads=20)
    for growth in (12.0, 45.0, 150.0):
        cases.append(replace(grows, name=f"growing by {growth:.0f}", growth=growth))
    if element == "bf16":
        cases.append(replace(grows, name="growing, large v", growth=45.0, v_size=1e30))
    if variant.band:
        causal = replace(base, name="causal", right=0)
        cases += [
            causal,
            replace(base, name="narrow window", left=20, right=0, q_len=900, kv_len=900),
            replace(causal, name="causal square", q_len=777, kv_len=777),
            replace(causal, name="causal small", q_len=300, kv_len=300),
            replace(causal, name="causal, whole boxes", q_len=832, kv_len=832),
            replace(causal, name="causal, one box", q_len=64, kv_len=200),
            replace(
                causal, name="lower right, whole boxes", q_len=320, kv_len=517, lower_right=True
            ),
            replace(base, name="window, whole boxes", q_len=640, kv_len=640, left=150, right=20),
            replace(causal, name="lower right", lower_right=True),
            replace(
                causal, name="lower right, more queries", lower_right=True, q_len=517, kv_len=333
            ),
            replace(base, name="window", left=100, right=30),
            replace(base, name="window, one side", left=0, right=None, q_len=600),
            replace(base, name="window of one", left=0, right=0),
            replace(base, name="band to the right", left=-40, right=90),
            replace(base, name="empty band", left=-50, right=40),
            replace(with_lengths, name="lengths lower right", right=3, left=200, lower_right=True),
        ]
    if variant.segments:
        cases = [replace(case, segments="documents") for case in cases]
        cases += [
            replace(base, name="shuffled", segments="shuffled"),
            replace(base, name="long", segments="documents"),
        ]
        cases[-1] = replace(cases[-1], q_len=5000, kv_len=5000, heads=2, right=0)
    if variant.softcap:
        # A series is for small arguments of tanh, and must know those that are not.
        caps = (2.0, 30.0) if variant.cap_series else (2.0,)
        cases = [replace(case, softcap=cap) for case in cases for cap in caps]
    if variant.scale_first:
        cases += [
            replace(base, name="negative scale", scale=-0.2),
            replace(base, name="zero scale", scale=0.0),
        ]
    return [case for case in cases if fits(variant, case)]


def check(torch: Any, driver: Driver, loaded: Loaded, repeats: int) -> list[str]:
    """Runs the check cases of a variant, each 1 + repeats times; returns one line per failure."""
    failures = []
    for number, case in enumerate(check_cases(loaded.variant)):
        data = make_data(torch, case, number)
        poison(data)
        add_results(torch, data)
        launch = launcher(torch, driver, loaded, data)
        launch()
        torch.cuda.synchronize()
        want, want_lse = reference(torch, data)
        p_rounding = 2**-8 if case.element == "bf16" else 2**-11
        error = (data.out.double() - want).abs()
        bound = 3 * p_rounding * want.abs().amax(-1, keepdim=True) + p_rounding * 0.5
        empty = torch.isneginf(want_lse)
        lse_error = torch.where(empty, 0.0, (data.lse.double() - want_lse).abs())
        problems = []
        if not bool((error <= bound).all()):
            problems.append(f"out off by {error.nan_to_num(math.inf).max().item():.3g}")
        if not bool((data.out.transpose(1, 2)[empty] == 0).all()):
            problems.append("a row without keys is not 0")
        if not bool((torch.isneginf(data.lse) == empty).all()):
            problems.append("lse is -inf in other rows than it should be")
        if not bool((lse_error <= 1e-3).all()):
            problems.append(f"lse off by {lse_error.nan_to_num(math.inf).max().item():.3g}")
        counts = differing(torch, launch, {"out": data.out, "lse": data.lse}, repeats)
        problems += [f"{name}: {n} of {repeats} runs differ" for name, n in counts.items() if n]
        failures += [f"{loaded.variant.name}, {case.name}: {problem}" for problem in problems]
    return failures


# ---- timing ---------------------------------------------------------------------------------------------------------


# FlashAttention-3 over jax cuDNN, same run, by (head_dim, causal, length): measured on an H200, 2026-11-21.
FA3_OVER_CUDNN = {
    (64, True, 2048): 1.08,
    (64, True, 8192): 1.14,
    (64, False, 2048): 1.06,
    (64, False, 8192): 1.13,
    (128, True, 2048): 1.27,
    (128, True, 8192): 1.20,
    (128, False, 2048): 1.02,
    (128, False, 8192): 1.11,
    (256, True, 2048): 1.23,
    (256, True, 8192): 1.15,
    (256, False, 2048): 1.05,
    (256, False, 8192): 1.10,
}


def timing_cases() -> list[Case]:
    """Returns the problems of a standard run: 16384 tokens, heads * head_dim = 2048."""
    cases = []
    for width in (64, 128, 256):
        for length in (1024, 2048, 4096, 8192, 16384):
            batch, heads = 16384 // length, 2048 // width
            full = Case(f"d{width} full {length}", batch, length, length, heads, heads, width)
            cases += [full, replace(full, name=f"d{width} causal {length}", right=0)]
    gqa = Case("d128 gqa causal 8192", 2, 8192, 8192, 32, 8, 128, right=0)
    window = Case("d128 window 16384", 1, 16384, 16384, 16, 16, 128, left=1023, right=0)
    d96 = Case("d96 full 8192", 2, 8192, 8192, 21, 21, 96)
    d192 = Case("d192 full 8192", 2, 8192, 8192, 11, 11, 192)
    mla = Case("d192v128 full 8192", 2, 8192, 8192, 16, 16, 192, 128)
    narrow = replace(window, name="d128 window128 16384", left=127)
    cases += [gqa, replace(gqa, name="d128 gqa full 8192", right=None), window, narrow]
    cases.append(replace(narrow, name="d64 window128 16384", heads=32, kv_heads=32, head_dim=64))
    for case in (d96, d192, mla):
        cases += [case, replace(case, name=case.name.replace("full", "causal"), right=0)]
    return cases


def rivals(torch: Any, data: Data) -> dict[str, Callable[[], Any]]:
    """Returns other implementations of a case that this machine has."""
    case = data.case
    found: dict[str, Callable[[], Any]] = {}
    q, k, v = (x.transpose(1, 2) for x in (data.q, data.k, data.v))
    causal = case.right == 0
    if case.left is None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def cudnn() -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=case.heads != case.kv_heads
                )

        found["torch cudnn"] = cudnn
    try:
        from flash_attn_interface import flash_attn_func

        window = (-1 if case.left is None else case.left, -1 if case.right is None else case.right)

        def flash3() -> Any:
            if case.left is None:
                return flash_attn_func(data.q, data.k, data.v, causal=causal)
            return flash_attn_func(data.q, data.k, data.v, window_size=window)

        found["fa3"] = flash3
    except ImportError:
        pass
    working = {}
    for name, function in found.items():
        try:
            function()
            torch.cuda.synchronize()
            working[name] = function
        except RuntimeError as error:
            print(f"  {name} does not run {case.name}: {str(error).splitlines()[0][:100]}")
    return working


def time_case(
    torch: Any, driver: Driver, kernels: list[Loaded], case: Case, rounds: int, seed: int
) -> dict[str, list[float]]:
    """Returns milliseconds per round of every contender; ours under two names each."""
    data = make_data(torch, case, 0)
    add_results(torch, data)
    contenders: dict[str, Callable[[], Any]] = dict(rivals(torch, data))
    for loaded in kernels:
        if fits(loaded.variant, case) and runs_timed(loaded.variant, case):
            launch = launcher(torch, driver, loaded, data)
            contenders[loaded.variant.name] = launch
            contenders[loaded.variant.name + "'"] = launch
    calls = max(3, math.ceil(4.0 / (case.forward_flops() / 550e12 * 1e3)))
    return in_random_rounds(torch, contenders, calls, rounds, seed)


def report(case: Case, milliseconds: dict[str, list[float]]) -> dict[str, Any]:
    """Prints one case as a table; returns it as a record."""
    flops = case.forward_flops()
    median = {name: statistics.median(times) for name, times in milliseconds.items()}
    speed = {name: flops / time / 1e9 for name, time in median.items()}
    cudnn = speed.get("torch cudnn")
    fa3 = (
        FA3_OVER_CUDNN.get((case.head_dim, case.right == 0, case.q_len))
        if case.left is None
        else None
    )
    print(f"{case.name}: {clocks()}")
    for name in sorted(speed, key=lambda name: -speed[name]):
        spread = max(milliseconds[name]) / min(milliseconds[name])
        ratio = f"{speed[name] / cudnn:5.2f}x cudnn" if cudnn else ""
        bar = f"{speed[name] / cudnn / fa3:5.2f}x fa3 (by table)" if cudnn and fa3 else ""
        print(
            f"  {name:34s}{speed[name]:7.1f} TFLOP/s {median[name]:8.3f} ms  spread {spread:.2f} {ratio} {bar}"
        )
    sys.stdout.flush()
    return {"case": case.name, "tflops": speed, "milliseconds": milliseconds}


def summarize(records: list[dict[str, Any]]) -> None:
    """Prints, per variant family, the best of ours over torch cuDNN by case, and the geometric mean."""
    print(
        "\nbest of ours (mean of its two names) over torch cudnn; fa3 measured here if present, else by table"
    )
    ratios, bars = [], []
    for record in records:
        speed = record["tflops"]
        names = [name for name in speed if name + "'" in speed and not name.endswith(OTHER)]
        if not names or "torch cudnn" not in speed:
            continue
        best = max(names, key=lambda name: speed[name] + speed[name + "'"])
        value = (speed[best] + speed[best + "'"]) / 2
        ratio = value / speed["torch cudnn"]
        ratios.append(ratio)
        found = re.match(r"d(\d+)(?:v\d+)? (?:gqa )?(\w+) (\d+)", record["case"])
        key = (int(found[1]), found[2] == "causal", int(found[3])) if found else None
        table = FA3_OVER_CUDNN.get(key) if key else None
        bar = value / speed["fa3"] if "fa3" in speed else ratio / table if table else None
        if bar:
            bars.append(bar)
        print(
            f"  {record['case']:24s}{best:28s}{value:7.1f}  {ratio:5.2f}x cudnn  "
            + (f"{bar:5.2f}x fa3" if bar else "")
        )
    for label, values in (("cudnn", ratios), ("fa3", bars)):
        if values:
            print(geometric_mean_line(label, values))


# ---- main -----------------------------------------------------------------------------------------------------------


def load(driver: Driver, folder: Path, facts: dict[str, Any], variant: Variant) -> Loaded:
    """Loads a variant."""
    name = variant.cubin()
    kernel = driver.load(folder / f"{name}.cubin", facts["variants"][name])
    return Loaded(variant, kernel, facts["sm90::ForwardParams"], facts["series"])


def built(folder: Path, wanted: list[Variant]) -> list[str]:
    """Returns the names of variants that are in a folder, and names the others on standard output."""
    found = []
    for variant in wanted:
        if (folder / f"{variant.cubin()}.cubin").exists():
            found.append(variant.name)
        else:
            print(f"{variant.name:34s}not built in {folder}")
    return found


def main() -> int:
    """Runs checks and timings; returns 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("build/sm90"), help="cubins and facts.json"
    )
    parser.add_argument(
        "--write-units", action="store_true", help="write sources into the folder and stop"
    )
    parser.add_argument(
        "--check-here", default="", help="check these variants in this process and stop"
    )
    parser.add_argument(
        "--variants", default="", help="only variants whose name matches this expression"
    )
    parser.add_argument(
        "--cases", default="", help="only timed cases whose name matches this expression"
    )
    parser.add_argument(
        "--against", type=Path, help="a folder of other cubins: check and time its variants too"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--repeat", type=int, default=1, help="runs of each check after the first (%(default)s)"
    )
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--json", type=Path, help="write all times here")
    arguments = parser.parse_args()
    folder = arguments.folder
    if arguments.write_units:
        write_units(folder, [v for v in variants() if re.search(arguments.variants, v.name)])
        return 0
    by_name = {variant.name: variant for variant in variants()}
    if arguments.check_here:
        import torch

        facts = json.loads((folder / "facts.json").read_text())
        torch.zeros(1, device="cuda")
        driver = Driver()
        check_here(
            arguments.check_here.split(","),
            lambda name: check(
                torch, driver, load(driver, folder, facts, by_name[name]), arguments.repeat
            ),
        )
        return 0

    folders = {"": folder} | ({OTHER: arguments.against} if arguments.against else {})
    tried: dict[str, list[str]] = {}
    right: dict[str, list[str]] = {}
    for end, place in folders.items():
        tried[end] = built(place, [by_name[n] for n in by_name if re.search(arguments.variants, n)])
        right[end] = (
            tried[end]
            if arguments.no_check
            else check_apart(__file__, place, tried[end], arguments.repeat)
        )
    records = []
    if not arguments.no_time:
        import torch

        torch.zeros(1, device="cuda")
        print(device_words(torch))
        driver = Driver()
        kernels = []
        for end, place in folders.items():
            facts = json.loads((place / "facts.json").read_text())
            for name in right[end]:
                loaded = load(driver, place, facts, by_name[name])
                kernels.append(replace(loaded, variant=replace(loaded.variant, name=name + end)))
        for case in timing_cases():
            if re.search(arguments.cases, case.name):
                times = time_case(torch, driver, kernels, case, arguments.rounds, arguments.seed)
                records.append(report(case, times))
        summarize(records)
        for line in comparison(records):
            print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": clocks(), "records": records}, indent=1))
    total = sum(map(len, tried.values()))
    failed = total - sum(map(len, right.values()))
    print(f"{failed} of {total} variants failed their checks")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
