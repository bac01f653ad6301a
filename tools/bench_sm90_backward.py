"""Checks and times variants of the sm90 backward kernels, without the rest of the package.

    tools/build_sm90_backward_variants.sh       # on any machine with nvcc: cubins and facts into build/sm90_backward
    python3 tools/bench_sm90_backward.py        # on the GPU machine: torch, libcuda; checks, then times
    python3 tools/bench_sm90_backward.py --cases d128 --variants d128 --rounds 9 --no-check

Two states of the kernels in one run, each checked, with their ratios last:

    tools/build_sm90_backward_variants.sh build/before OTHER_CHECKOUT/cc/kernels
    python3 tools/bench_sm90_backward.py --variants _first --against build/before

A time is that of the whole backward pass: preparation (with the zeroing of the accumulator), main kernels, cast. The
order of a round is random; times are medians over rounds. Gradients are checked against float64, the error bound being
a small multiple of what a plain implementation with 16-bit probabilities and score gradients gets.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm90_bench import (
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
    milliseconds_per_call,
    problem_values,
    runs_timed,
    struct_printer,
    visibility,
)

STATISTICS_ROWS = 128

FLAGS = "band lengths segments softcap scale_first bulk_reduce take_turns".split()
ORDER = (
    "element head_dim head_dim_v tile_q tile_kv num_warps stages band lengths segments softcap schedule "
    "scale_first key_register_steps bulk_reduce take_turns dq_order"
).split()


# ---- variants -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """One kernel: a family of kernels/sm90 and the inside of its Config{...}."""

    family: str
    config: str

    @property
    def name(self) -> str:
        """Returns a file name."""
        words = re.sub(r"Element::k|\.|,", "", self.config).replace(" = ", "=")
        short = {
            "head_dim_v": "dv",
            "head_dim": "d",
            "tile_q": "q",
            "tile_kv": "kv",
            "element": "",
            "num_warps": "w",
        }
        parts = []
        for word in words.split():
            key, _, value = word.partition("=")
            if value == "true":
                parts.append(key)
            elif value != "false":
                parts.append(short.get(key, key) + value)
        return self.family + "_" + "_".join(parts)


@dataclass(frozen=True)
class Variant:
    """How one backward pass is computed: fused (dq by reductions) or by two kernels (dq by a kernel of its own)."""

    name: str
    element: str = "bf16"
    head_dim: int = 128
    head_dim_v: int = 0  # 0: head_dim
    tile_q: int = 64
    tile_kv: int = 128
    stages: int = 2
    two_kernels: bool = False
    dq_tile_kv: int = 64
    dq_stages: int = 2
    band: int = 0
    lengths: int = 0
    segments: int = 0
    softcap: int = 0
    scale_first: int = 0
    bulk_reduce: int = 0
    schedule: int = 0  # 2: blocks take item after item, by a counter
    take_turns: int = 0
    dq_order: int = 0  # 1: the first block stores dq, others add; 2: in the order of the key tiles
    key_register_steps: int = 0  # of the scores' product, that take k from registers
    dq_warpgroup: int = 0  # 1: a third consumer warpgroup computes dq; head dims above 128
    section_mib: float = 0  # bytes of the tensors of one section; 0: one key/value head
    blocks_of_head: int = 1 << 30  # at work together at most, which makes sections wider
    rotation: int = 0

    def config(self, **changes: Any) -> str:
        """Returns the members of Config as device code."""
        chosen = replace(self, **changes)
        values: dict[str, str] = {
            "element": "Element::k" + chosen.element.upper(),
            "head_dim": str(chosen.head_dim),
            "head_dim_v": str(chosen.head_dim_v or chosen.head_dim),
            "tile_q": str(chosen.tile_q),
            "tile_kv": str(chosen.tile_kv),
            "num_warps": "16" if chosen.dq_warpgroup else "12",
            "stages": str(chosen.stages),
            "schedule": str(chosen.schedule),
            "dq_order": str(chosen.dq_order),
            "key_register_steps": str(chosen.key_register_steps),
        }
        values |= {flag: "true" if getattr(chosen, flag) else "false" for flag in FLAGS}
        return ", ".join(f".{name} = {values[name]}" for name in ORDER)

    def units(self) -> dict[str, Unit]:
        """Returns the kernels by role."""
        element = "Element::k" + self.element.upper()
        found = {
            "prepare": Unit(
                "backward_prepare",
                f".element = {element}, .head_dim_v = {self.head_dim_v or self.head_dim}",
            ),
            "keys": Unit(
                "sm90_backward_dkv" if self.two_kernels else "sm90_backward", self.config()
            ),
        }
        if self.two_kernels:
            config = self.config(
                tile_q=128,
                tile_kv=self.dq_tile_kv,
                stages=self.dq_stages,
                bulk_reduce=0,
                key_register_steps=0,
                dq_warpgroup=0,
            )
            found["dq"] = Unit("sm90_backward_dq", config)
        else:
            found["cast"] = Unit(
                "backward_cast",
                f".element = {element}, .head_dim = {self.head_dim}, .tile_q = {self.tile_q}",
            )
        return found


def variants() -> list[Variant]:
    """Returns the variants of a standard run."""
    found: list[Variant] = []
    for band in (0, 1):
        mask = "band" if band else "full"
        mib = 16.0 if band else 0.0
        d64 = Variant("", head_dim=64, tile_q=128, band=band, section_mib=mib)
        d128 = Variant("", band=band, section_mib=mib)
        d192 = Variant("", head_dim=192, tile_kv=64, band=band, section_mib=mib)
        d256 = Variant("", head_dim=256, tile_kv=64, band=band, section_mib=mib, two_kernels=True)
        found += [
            replace(d64, name=f"d64_{mask}_bulk", bulk_reduce=1),
            replace(d64, name=f"d64_{mask}_red"),
            replace(d128, name=f"d128_{mask}_red"),
            replace(d128, name=f"d128_{mask}_bulk", bulk_reduce=1),
            *(
                replace(
                    base,
                    name=f"d{base.head_dim}_{mask}_{'bulk' if bulk else 'red'}_{tag}",
                    bulk_reduce=bulk,
                    schedule=2,
                    take_turns=turns,
                )
                for base, bulk in ((d64, 0), (d64, 1), (d128, 1))
                for tag, turns in (("items", 0), ("turns", 1))
            ),
            *(
                replace(
                    base,
                    name=f"d{base.head_dim}_{mask}_{tag}",
                    bulk_reduce=1,
                    schedule=2,
                    take_turns=1,
                    dq_order=order,
                    section_mib=16.0 if order == 2 else mib,
                    blocks_of_head=8 if order == 2 and band else 1 << 30,
                    rotation=rotation,
                    key_register_steps=steps,
                )
                for base in (d64, d128)
                for tag, order, rotation, steps in (
                    ("first", 1, 128 // base.tile_q, 0),
                    ("first_together", 1, 0, 0),
                    ("first_keys", 1, 128 // base.tile_q, 3),
                    ("ordered", 2, 0, 0),
                    ("ordered_keys", 2, 0, 3),
                )
                if base.head_dim == 128 or not steps
            ),
            *(
                replace(
                    base,
                    name=f"d{base.head_dim}_{mask}_softcap_{tag}",
                    tile_q=64,
                    softcap=1,
                    bulk_reduce=tag != "red",
                    schedule=2,
                    take_turns=1,
                    dq_order=order,
                    rotation=2 if order else 0,
                    key_register_steps=steps,
                )
                for base in (d64, d128)
                for tag, order, steps in (
                    ("red", 0, 0),
                    ("bulk", 0, 0),
                    ("first", 1, 0),
                    ("first_keys", 1, 2),
                )
                if base.head_dim == (128 if steps else 64) or tag in ("bulk", "first")
            ),
            replace(d192, name=f"d192_{mask}_two", two_kernels=True),
            replace(d192, name=f"d192_{mask}_two80", two_kernels=True, dq_tile_kv=80),
            replace(d192, name=f"d192_{mask}_apart", dq_warpgroup=1),
            replace(d192, name=f"d192_{mask}_apart_bulk", dq_warpgroup=1, bulk_reduce=1),
            replace(d256, name=f"d256_{mask}_two"),
        ]
        if not band:
            found += [
                replace(d64, name="d64_softcap", softcap=1, tile_q=64),
                replace(d128, name="d128_softcap", softcap=1),
                replace(d128, name="d128_softcap_bulk", softcap=1, bulk_reduce=1),
            ]
    # For the checks: other types, shapes and features.
    checked = Variant("", band=1, lengths=1)
    apart = replace(checked, head_dim=192, tile_kv=64, dq_warpgroup=1)
    taking = replace(checked, bulk_reduce=1, schedule=2, take_turns=1)
    wide = replace(checked, head_dim=256, tile_kv=64, two_kernels=True)
    found += [
        replace(checked, name="check_f16", element="f16"),
        replace(checked, name="check_d64v128", head_dim=64, head_dim_v=128, rotation=3),
        replace(checked, name="check_d128v64", head_dim_v=64),
        replace(checked, name="check_segments", segments=1),
        replace(checked, name="check_segments64", segments=1, head_dim=64, tile_q=128),
        replace(checked, name="check_sections", section_mib=0.2),
        replace(apart, name="check_apart"),
        replace(apart, name="check_apart_bulk", segments=1, bulk_reduce=1),
        replace(apart, name="check_apart_f16", element="f16", scale_first=1, bulk_reduce=1),
        replace(apart, name="check_apart_softcap", softcap=1),
        replace(apart, name="check_apart_d192v128", head_dim_v=128, bulk_reduce=1),
        replace(checked, name="check_red64", segments=1, head_dim=64, tile_q=128),
        replace(checked, name="check_bulk64", segments=1, head_dim=64, tile_q=128, bulk_reduce=1),
        replace(checked, name="check_softcap", softcap=1),
        replace(checked, name="check_scale_first", scale_first=1, bulk_reduce=1),
        replace(taking, name="check_items", take_turns=0),
        replace(taking, name="check_turns", section_mib=0.2),
        replace(taking, name="check_turns_f16", element="f16"),
        replace(taking, name="check_turns_d64v128", head_dim=64, head_dim_v=128),
        replace(taking, name="check_turns_bulk64", head_dim=64, tile_q=128),
        replace(taking, name="check_turns64", head_dim=64, tile_q=128, segments=1, bulk_reduce=0),
        replace(taking, name="check_turns_segments", segments=1, section_mib=0.2),
        replace(taking, name="check_first", dq_order=1, section_mib=0.2),
        replace(taking, name="check_first64", dq_order=1, head_dim=64, tile_q=128, segments=1),
        replace(taking, name="check_first_full", dq_order=1, band=0, rotation=3),
        replace(taking, name="check_first_segments", dq_order=1, segments=1, section_mib=0.2),
        replace(taking, name="check_first_keys", dq_order=1, key_register_steps=3),
        replace(taking, name="check_first_softcap", dq_order=1, softcap=1),
        replace(taking, name="check_ordered", dq_order=2, section_mib=0.2),
        replace(taking, name="check_ordered_items", dq_order=2, band=0, take_turns=0),
        replace(taking, name="check_ordered_f16", dq_order=2, element="f16"),
        replace(taking, name="check_ordered_scale", dq_order=2, scale_first=1, lengths=0),
        replace(taking, name="check_ordered64", dq_order=2, head_dim=64, tile_q=128),
        replace(taking, name="check_ordered_keys", dq_order=2, key_register_steps=3),
        replace(taking, name="check_ordered_full", dq_order=2, band=0),
        replace(checked, name="check_two", segments=1, two_kernels=True, dq_tile_kv=96),
        replace(checked, name="check_two64", two_kernels=True, head_dim=64, softcap=1),
        replace(wide, name="check_wide", segments=1),
        replace(wide, name="check_wide_softcap", softcap=1),
        replace(wide, name="check_wide_scale", scale_first=1),
        replace(wide, name="check_d192v128", head_dim=192, head_dim_v=128),
    ]
    return found


UNITS = {
    "backward_prepare": ("backward_prepare.cuh", "PrepareParams", "backward_prepare", "prepare"),
    "backward_cast": ("backward_cast.cuh", "CastParams", "backward_cast", "cast"),
    "sm90_backward": ("backward.cuh", "BackwardParams", "backward", "backward"),
    "sm90_backward_dkv": ("backward.cuh", "BackwardParams", "backward_dkv", "backward"),
    "sm90_backward_dq": ("backward_dq.cuh", "BackwardParams", "backward_dq", "backward"),
}
SHARED_BYTES = {
    "backward_prepare": "0",
    "backward_cast": "sm90::cast_shared_bytes(config)",
    "sm90_backward": "sm90::backward_shared_bytes(config, true)",
    "sm90_backward_dkv": "sm90::backward_shared_bytes(config, false)",
    "sm90_backward_dq": "sm90::backward_dq_shared_bytes(config)",
}

SOURCE = """\
#include "sm90/{header}"

namespace jattn {{
constexpr Config kConfig{{{config}}};
}}

extern "C" __global__ void __launch_bounds__(jattn::sm90::{shape}_threads(jattn::kConfig),
                                             jattn::sm90::{shape}_min_blocks(jattn::kConfig))
jattn_kernel(const __grid_constant__ jattn::sm90::{params} params) {{
  jattn::sm90::{entry}<jattn::kConfig>(params);
}}
"""

FACTS = """\
#include <cstddef>
#include <cstdio>

#include "sm90/backward_params.cuh"
#include "sm90/backward_shape.cuh"

using namespace jattn;

int main() {{
  std::printf("{{\\n");
{structs}
  std::printf("\\"units\\": {{\\n");
{prints}
  std::printf("}}}}\\n");
}}
"""


# Members of the parameter structs that launches fill in; the rest is zero.
STRUCTS = {
    "sm90::BackwardParams": (
        *("q", "k", "v", "dout", "dq", "dk", "dv", "lse_log2", "delta", "row_flags"),
        *("dq_accumulator", "rows_padded", "tiles", "section_heads", "last_section"),
        *("rotation", "descending_tiles"),
        *("wants_dk", "wants_dv", "items", "next_item", "dq_turns", "rows_dq"),
        *PROBLEM_MEMBERS,
    ),
    "sm90::PrepareParams": (
        *("out", "dout", "lse", "dlse", "q_lengths", "lse_log2", "delta", "row_flags"),
        *("dq_accumulator", "rows_padded", "accumulator_width", "q_len"),
        *("num_heads", "head_dim_v", "next_item", "dq_turns", "counters"),
    ),
    "sm90::CastParams": (
        *("dq", "dq_accumulator", "q_lengths", "rows_padded", "tiles", "q_len", "num_heads"),
        *("scale", "dq_turns"),
    ),
}


def write_units(folder: Path, chosen: list[Variant]) -> None:
    """Writes one translation unit per kernel and facts.cc, which prints their sizes as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    units = {unit.name: unit for variant in chosen for unit in variant.units().values()}
    for name, unit in units.items():
        header, params, entry, shape = UNITS[unit.family]
        text = SOURCE.format(
            header=header, params=params, entry=entry, shape=shape, config=unit.config
        )
        path = folder / f"{name}.cu"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for path in folder.glob("*.cu"):
        if path.stem not in units:
            for old in folder.glob(path.stem + ".*"):
                old.unlink()
    structs = struct_printer(STRUCTS)
    prints = ""
    for i, (name, unit) in enumerate(units.items()):
        shape = UNITS[unit.family][3]
        comma = "," if i + 1 < len(units) else ""
        prints += (
            f"  {{ constexpr Config config{{{unit.config}}};\n"
            f'    std::printf("  \\"{name}\\": {{\\"threads\\": %d, \\"shared_bytes\\": %d}}{comma}\\n", '
            f"sm90::{shape}_threads(config), {SHARED_BYTES[unit.family]}); }}\n"
        )
    (folder / "facts.cc").write_text(FACTS.format(structs=structs, prints=prints))


# ---- launching ------------------------------------------------------------------------------------------------------


@dataclass
class Loaded:
    """A variant on the device: its kernels by role."""

    variant: Variant
    kernels: dict[str, Kernel]
    layouts: dict[str, Any]  # of the structs


def walks_groups(variant: Variant, case: Case) -> bool:
    """Returns whether all heads of a group visit a tile of queries before the next.

    As in cc/cuda/backward_sm90.cc, but of problems of any size, so that small ones check it.
    """
    ends_together = case.left is None and case.right is not None
    tiles = -(-case.kv_len // variant.tile_kv)
    is_long = variant.dq_order != 2 or case.group * tiles >= 512
    return case.group > 1 and ends_together and is_long


def sections(torch: Any, variant: Variant, case: Case, tiles: int) -> tuple[int, int]:
    """Returns the key/value heads of a section and the number of the last, as cc/cuda/backward_sm90.cc does.

    Args:
      tiles: of a key/value head
    """
    if not variant.section_mib:
        return 1, NO_LAST_SECTION
    heads = case.batch * case.kv_heads
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    in_groups = walks_groups(variant, case)

    def heads_of_items(items: int) -> int:
        return max(1, (items + tiles // 2) // tiles)

    is_ordered = variant.dq_order == 2 and not in_groups
    if variant.head_dim <= 64 and variant.schedule and not is_ordered and not in_groups:
        section = min(heads, heads_of_items(num_sms))
        return section, max(0, heads - heads_of_items(3 * num_sms)) // section
    head_bytes = (case.q_len * case.group + case.kv_len) * (case.head_dim + case.width_v) * 2
    waits = is_ordered and tiles > variant.blocks_of_head
    at_work = num_sms // variant.blocks_of_head if waits else -(-num_sms // tiles)
    wanted = max(1, int(variant.section_mib * 2**20 / head_bytes), at_work)
    ideal = wanted if is_ordered else heads_of_items(2 * num_sms)
    sizes = range(min(wanted, heads), min(2 * wanted, heads) + 1)
    section = max(sizes, key=lambda x: (((heads - 1) % x + 1) / x, -abs(x - ideal)))
    return section, NO_LAST_SECTION


def rotation(variant: Variant, tiles: int) -> int:
    """Returns how many tiles of queries further on than the one before it a key tile begins, as the host has it."""
    begins_late = variant.band and variant.tile_q == 64 and variant.dq_order == 1
    return 0 if begins_late and tiles <= 8 else variant.rotation


def descending_tiles(torch: Any, variant: Variant, case: Case, section: int) -> int:
    """Returns the key tiles of the first items of the blocks, which go down; 0 unless walks_groups()."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    return -(-num_sms // section) if walks_groups(variant, case) else 0


@dataclass
class Pass:
    """A backward pass ready to be launched, whole or by role."""

    results: dict[str, Any]
    steps: dict[str, Callable[[], None]]

    def __call__(self) -> None:
        for step in self.steps.values():
            step()


def prepare_pass(torch: Any, driver: Driver, loaded: Loaded, data: Data) -> Pass:
    """Allocates results and scratch (filled with NaN) and composes the launches."""
    variant, case = loaded.variant, data.case
    width = variant.head_dim
    q_tiles = -(-case.q_len // variant.tile_q)
    rows_padded = -(-case.q_len // STATISTICS_ROWS) * STATISTICS_ROWS
    flat_heads = case.batch * case.heads
    results = {
        name: torch.full_like(x, math.nan)
        for name, x in (("dq", data.q), ("dk", data.k), ("dv", data.v))
    }
    statistics_shape = (2, flat_heads, rows_padded)
    scratch = torch.full(statistics_shape, math.nan, device="cuda", dtype=torch.float32)
    row_flags = torch.full(
        (flat_heads, rows_padded // STATISTICS_ROWS), 7, device="cuda", dtype=torch.uint8
    )
    accumulator = None
    if not variant.two_kernels:
        accumulator = torch.full(
            (flat_heads * rows_padded * width,), math.nan, device="cuda", dtype=torch.float32
        )

    zeroed, turns = accumulator, None
    if variant.dq_order:
        zeroed = None
        turns = torch.full(
            (flat_heads * rows_padded // 32,), 12345, device="cuda", dtype=torch.int32
        )

    keep: list[Any] = [scratch, row_flags, accumulator, turns]
    group = case.group
    kv_tiles = -(-case.kv_len // variant.tile_kv)

    def backward_params(
        tile_q: int, tile_kv: int, tiles: int, section: tuple[int, int]
    ) -> dict[str, Any]:
        descending = descending_tiles(torch, variant, case, section[0])
        return problem_values(torch, data, tile_q, tile_kv, keep) | {
            "q": driver.tensor_map(data.q, tile_q),
            "k": driver.tensor_map(data.k, tile_kv),
            "v": driver.tensor_map(data.v, tile_kv),
            "dout": driver.tensor_map(data.dout, tile_q),
            "dq": driver.tensor_map(results["dq"], 64),
            "dk": driver.tensor_map(results["dk"], 64),
            "dv": driver.tensor_map(results["dv"], 64),
            "lse_log2": scratch[0].data_ptr(),
            "delta": scratch[1].data_ptr(),
            "row_flags": row_flags.data_ptr(),
            "dq_accumulator": accumulator.data_ptr() if accumulator is not None else None,
            "rows_padded": rows_padded,
            "tiles": tiles,
            "section_heads": section[0],
            "last_section": section[1],
            "rotation": 0 if descending else rotation(variant, tiles),
            "descending_tiles": descending,
            "dq_turns": turns.data_ptr() if turns is not None else None,
            "rows_dq": results["dq"].data_ptr(),
            "wants_dk": True,
            "wants_dv": True,
        }

    items = case.batch * case.kv_heads * kv_tiles
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    next_item = torch.full(
        (4 + case.batch * case.kv_heads,), 12345, device="cuda", dtype=torch.int32
    )
    keep.append(next_item)
    launches: dict[str, tuple[str, dict[str, Any], int]] = {}
    launches["prepare"] = (
        "sm90::PrepareParams",
        {
            "out": data.out.data_ptr(),
            "dout": data.dout.data_ptr(),
            "lse": data.lse.data_ptr(),
            "dlse": data.dlse.data_ptr() if data.dlse is not None else None,
            "q_lengths": data.pointer("q_lengths"),
            "lse_log2": scratch[0].data_ptr(),
            "delta": scratch[1].data_ptr(),
            "row_flags": row_flags.data_ptr(),
            "dq_accumulator": zeroed.data_ptr() if zeroed is not None else None,
            "dq_turns": turns.data_ptr() if turns is not None else None,
            "rows_padded": rows_padded,
            "next_item": next_item.data_ptr(),
            "counters": len(next_item),
            "accumulator_width": width,
            "q_len": case.q_len,
            "num_heads": case.heads,
            "head_dim_v": case.width_v,
        },
        flat_heads * rows_padded // STATISTICS_ROWS,
    )
    launches["keys"] = (
        "sm90::BackwardParams",
        backward_params(
            variant.tile_q,
            variant.tile_kv,
            kv_tiles,
            sections(torch, variant, case, kv_tiles),
        )
        | {"items": items, "next_item": next_item.data_ptr()},
        min(items, num_sms) if variant.schedule else items,
    )
    if variant.two_kernels:
        tiles = -(-case.q_len // 128)
        heads_of_section, last = sections(torch, variant, case, tiles * group)
        launches["dq"] = (
            "sm90::BackwardParams",
            backward_params(
                128,
                variant.dq_tile_kv,
                tiles,
                (heads_of_section * group, last),
            ),
            flat_heads * tiles,
        )
    else:
        launches["cast"] = (
            "sm90::CastParams",
            {
                "dq": driver.tensor_map(results["dq"], variant.tile_q),
                "dq_accumulator": accumulator.data_ptr(),
                "dq_turns": turns.data_ptr() if turns is not None else None,
                "q_lengths": data.pointer("q_lengths"),
                "rows_padded": rows_padded,
                "tiles": q_tiles,
                "q_len": case.q_len,
                "num_heads": case.heads,
                "scale": float(case.true_scale),
            },
            flat_heads * q_tiles,
        )
    stream = current_stream(torch)

    def launcher(role: str) -> Callable[[], None]:
        struct, values, grid = launches[role]
        params = Params(loaded.layouts[struct], values)

        def launch(keep: Any = (keep, data)) -> None:
            driver.launch(loaded.kernels[role], grid, params, stream)

        return launch

    return Pass(results, {role: launcher(role) for role in launches})


# ---- checking -------------------------------------------------------------------------------------------------------


@dataclass
class Reference:
    """Gradients in float64, and the errors of a plain implementation that rounds p, ds and results to 16 bits."""

    exact: dict[str, Any]
    plain_errors: dict[str, Any]
    empty: Any  # (B, N, T): rows that see no key


def reference(torch: Any, data: Data) -> Reference:
    """Computes the gradients, and fills in out and lse as a forward pass would have written them."""
    case = data.case
    dtype = data.q.dtype
    q, k, v, dout = (x.double().transpose(1, 2) for x in (data.q, data.k, data.v, data.dout))
    group = case.group
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = case.true_scale * q @ k.transpose(-1, -2)
    slope = torch.ones((), device="cuda", dtype=torch.float64)
    if case.softcap:
        capped = torch.tanh(s / case.softcap)
        s, slope = case.softcap * capped, 1 - capped**2
    s = torch.where(visibility(torch, data), s, -math.inf)
    lse = torch.logsumexp(s, -1)
    empty = torch.isneginf(lse)
    p = torch.where(
        empty[..., None], 0.0, torch.exp(s - torch.nan_to_num(lse, neginf=0.0)[..., None])
    )
    out = p @ v
    data.out = out.transpose(1, 2).to(dtype).contiguous()
    data.lse = lse.float().contiguous()
    dlse = data.dlse.double() if data.dlse is not None else torch.zeros_like(lse)

    def gradients(round_values: bool) -> dict[str, Any]:
        rounded = (lambda x: x.to(dtype).double()) if round_values else (lambda x: x)
        delta = (dout * rounded(out)).sum(-1) - dlse
        ds = p * slope * (dout @ v.transpose(-1, -2) - delta[..., None])
        ds16, p16 = rounded(ds), rounded(p)
        dq = case.true_scale * ds16 @ k
        dk = case.true_scale * ds16.transpose(-1, -2) @ q
        dv = p16.transpose(-1, -2) @ dout
        shape = (case.batch, case.kv_heads, group, case.kv_len, -1)
        dk, dv = (x.reshape(shape).sum(2) for x in (dk, dv))
        return {
            name: rounded(x).transpose(1, 2) for name, x in (("dq", dq), ("dk", dk), ("dv", dv))
        }

    exact, plain = gradients(False), gradients(True)
    return Reference(exact, {name: (plain[name] - exact[name]).abs() for name in exact}, empty)


def poison(torch: Any, data: Data, empty: Any) -> None:
    """Fills with NaN what must not be read: rows that see no key, keys beyond their length, padding."""
    case = data.case
    rows = empty.transpose(1, 2)
    data.q[rows] = math.nan
    data.dout[rows] = math.nan
    if data.dlse is not None:
        data.dlse[empty] = math.nan
    if case.lengths:
        for b, (_, kv_length) in enumerate(case.lengths):
            data.k[b, max(kv_length, 0) :] = math.nan
            data.v[b, max(kv_length, 0) :] = math.nan
    if case.segments:
        data.k[data.extra["kv_segments"] < 0] = math.nan
        data.v[data.extra["kv_segments"] < 0] = math.nan


def check_cases(variant: Variant) -> list[Case]:
    """Returns small problems that exercise tails, bands, lengths, segments and groups for one variant."""
    dims = (variant.head_dim, variant.head_dim_v or variant.head_dim)
    base = Case("full", 2, 333, 517, 4, 2, *dims, element=variant.element)
    cases = [
        base,
        replace(base, name="one", batch=1, q_len=1, kv_len=1, heads=1, kv_heads=1),
        replace(base, name="aligned", batch=1, q_len=256, kv_len=256, heads=2, kv_heads=2),
        replace(base, name="many", batch=2, q_len=700, kv_len=260, heads=12, kv_heads=4),
        replace(base, name="heads", batch=20, q_len=300, kv_len=700, heads=20, kv_heads=10),
        replace(base, name="narrow", head_dim=dims[0] - 8, head_dim_v=dims[1] - 24, dlse=True),
    ]
    lengths = ((333, 517), (100, 65), (0, 300), (200, 0), (65, 130), (400, -7))
    with_lengths = replace(base, name="lengths", batch=6, lengths=lengths)
    cases.append(with_lengths)
    if variant.band:
        causal = replace(base, name="causal", right=0)
        cases += [
            causal,
            replace(causal, name="causal square", q_len=777, kv_len=777, dlse=True),
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
        cases += [replace(base, name="shuffled", segments="shuffled")]
        cases += [
            replace(
                base, name="long", segments="documents", q_len=3000, kv_len=3000, heads=2, right=0
            )
        ]
    if variant.softcap:
        cases = [replace(case, softcap=2.0) for case in cases]
        cases += [replace(base, name="far softcap", softcap=30.0)]
    if variant.scale_first:
        cases += [
            replace(base, name="negative scale", scale=-0.2),
            replace(base, name="zero scale", scale=0.0),
        ]
    return [case for case in cases if fits(variant, case)]


def compare(torch: Any, got: Any, want: Any, plain_error: Any) -> str:
    """Returns what is wrong with a gradient, or nothing."""
    if not bool(torch.isfinite(got).all()):
        return f"{int((~torch.isfinite(got)).sum())} values are not finite"
    error = (got.double() - want).abs()
    spacing = 2**-8 if got.dtype == torch.bfloat16 else 2**-11
    # Of a row with one visible key ds is 0, but for the float32 rounding of dp and delta, sums of head_dim_v products.
    float32_floor = 2e-5
    floor = spacing * want.abs().max().item() * 0.5 + float32_floor
    most, allowed = error.max().item(), 3 * plain_error.max().item() + floor
    if most > allowed:
        return f"off by {most:.3g}, plain 16-bit by {plain_error.max().item():.3g}"
    norm, plain = error.norm().item(), plain_error.norm().item()
    if norm > 2 * plain + float32_floor * math.sqrt(want.numel()) + 1e-6 * want.norm().item():
        return f"error norm {norm:.3g}, plain 16-bit {plain:.3g}"
    return ""


def check(torch: Any, driver: Driver, loaded: Loaded, repeats: int) -> list[str]:
    """Runs the check cases of a variant, each 1 + repeats times; returns one line per failure."""
    failures = []
    for number, case in enumerate(check_cases(loaded.variant)):
        data = make_data(torch, case, number)
        want = reference(torch, data)
        poison(torch, data, want.empty)
        run = prepare_pass(torch, driver, loaded, data)
        run()
        torch.cuda.synchronize()
        problems = []
        for name, got in run.results.items():
            what = compare(torch, got, want.exact[name], want.plain_errors[name])
            if what:
                problems.append(f"{name} {what}")
        if not bool((run.results["dq"].transpose(1, 2)[want.empty] == 0).all()):
            problems.append("dq of a row without keys is not 0")
        unread = ~visibility(torch, data)[:, 0].any(1)
        for name in ("dk", "dv"):
            if not bool((run.results[name][unread] == 0).all()):
                problems.append(f"{name} of a key that nobody sees is not 0")
        is_ordered = loaded.variant.two_kernels or loaded.variant.dq_order == 2
        stable = ("dq", "dk", "dv") if is_ordered else ("dk", "dv")
        counts = differing(torch, run, run.results, repeats)
        problems += [
            f"{name}: {counts[name]} of {repeats} runs differ" for name in stable if counts[name]
        ]
        # The order of the sums of dq differs from run to run; the last run is as good as the first.
        what = compare(torch, run.results["dq"], want.exact["dq"], want.plain_errors["dq"])
        if what:
            problems.append(f"dq of the last run {what}")
        failures += [f"{loaded.variant.name}, {case.name}: {problem}" for problem in problems]
    return failures


# ---- timing ---------------------------------------------------------------------------------------------------------


# FlashAttention-3 over torch cuDNN, backward alone, by difference of the measured passes of both (H200, 2026-11-21):
# from forward and forward + backward of FA3 and jax cuDNN in one run.
FA3_OVER_CUDNN = {
    (64, True, 2048): 1.35,
    (64, True, 8192): 1.31,
    (64, False, 2048): 1.27,
    (64, False, 8192): 1.20,
    (128, True, 2048): 1.15,
    (128, True, 8192): 1.17,
    (128, False, 2048): 1.17,
    (128, False, 8192): 1.14,
    (256, True, 2048): 1.25,
    (256, True, 8192): 1.19,
    (256, False, 2048): 1.23,
    (256, False, 8192): 1.30,
}


def timing_cases() -> list[Case]:
    """Returns the problems of a standard run: 16384 tokens, heads * head_dim = 2048; most telling first."""
    cases = []
    for length in (8192, 2048, 1024, 4096, 16384):
        for width in (128, 64, 256):
            batch, heads = 16384 // length, 2048 // width
            full = Case(f"d{width} full {length}", batch, length, length, heads, heads, width)
            cases += [full, replace(full, name=f"d{width} causal {length}", right=0)]
    gqa = Case("d128 gqa32/8 causal 8192", 2, 8192, 8192, 32, 8, 128, right=0)
    window = Case("d128 window1024 16384", 1, 16384, 16384, 16, 16, 128, left=1023, right=0)
    cases[6:6] = [
        gqa,
        replace(gqa, name="d128 gqa64/8 full 8192", batch=1, heads=64, right=None),
        replace(gqa, name="d128 gqa64/8 causal 8192", batch=1, heads=64),
        replace(gqa, name="d64 gqa32/8 causal 8192", head_dim=64),
        window,
    ]
    wide = Case("d192 full 4096", 4, 4096, 4096, 11, 11, 192)
    cases += [wide, replace(wide, name="d192 causal 4096", right=0)]
    capped = Case("d128 softcap 4096", 4, 4096, 4096, 16, 16, 128, softcap=30.0)
    cases += [capped, replace(capped, name="d64 softcap 4096", head_dim=64)]
    return cases


def cudnn_backward(torch: Any, data: Data) -> Callable[[], Any] | None:
    """Returns torch's cuDNN backward of a case, or None; fills in out and lse."""
    case = data.case
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in (data.q, data.k, data.v))
    dout = data.dout.transpose(1, 2)
    if case.left is not None or case.softcap:
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.right == 0, enable_gqa=case.heads != case.kv_heads
            )

        def backward() -> Any:
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        backward()
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"  torch cudnn does not run {case.name}: {str(error).splitlines()[0][:100]}")
        return None
    data.out = out.detach().transpose(1, 2).contiguous()
    return backward


def fill_residuals(torch: Any, data: Data) -> None:
    """Gives values to out and lse where only time matters: near those of normal inputs, so that p stays small."""
    case = data.case
    if data.out is None:
        data.out = torch.zeros(
            case.batch, case.q_len, case.heads, case.width_v, device="cuda", dtype=data.q.dtype
        )
    keys = min(case.kv_len, case.left + 1) if case.left is not None else case.kv_len
    data.lse = torch.full((case.batch, case.heads, case.q_len), math.log(keys) + 0.5, device="cuda")


def time_case(
    torch: Any, driver: Driver, kernels: list[Loaded], case: Case, rounds: int, seed: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Returns milliseconds per round of every contender, and a breakdown of ours by role."""
    data = make_data(torch, case, 0)
    contenders: dict[str, Callable[[], Any]] = {}
    rival = cudnn_backward(torch, data)
    fill_residuals(torch, data)
    if rival is not None:
        contenders["torch cudnn"] = rival
    passes = {}
    for loaded in kernels:
        if fits(loaded.variant, case) and runs_timed(loaded.variant, case):
            passes[loaded.variant.name] = prepare_pass(torch, driver, loaded, data)
    contenders |= passes
    calls = max(2, math.ceil(6.0 / (case.backward_flops() / 500e12 * 1e3)))
    milliseconds = in_random_rounds(torch, contenders, calls, rounds, seed)
    parts = {}
    for name, run in passes.items():
        run()
        parts[name] = " ".join(
            f"{role} {milliseconds_per_call(torch, step, calls):.3f}"
            for role, step in run.steps.items()
        )
    return milliseconds, parts


def report(
    case: Case, milliseconds: dict[str, list[float]], parts: dict[str, str]
) -> dict[str, Any]:
    """Prints one case as a table; returns it as a record."""
    flops = case.backward_flops()
    median = {name: statistics.median(times) for name, times in milliseconds.items()}
    speed = {name: flops / time_ms / 1e9 for name, time_ms in median.items()}
    cudnn = speed.get("torch cudnn")
    fa3 = (
        FA3_OVER_CUDNN.get((case.head_dim, case.right == 0, case.q_len))
        if case.heads == case.kv_heads
        else None
    )
    print(f"{case.name}: {clocks()}")
    for name in sorted(speed, key=lambda name: -speed[name]):
        spread = max(milliseconds[name]) / min(milliseconds[name])
        ratio = f"{speed[name] / cudnn:5.2f}x cudnn" if cudnn else ""
        bar = f"{speed[name] / cudnn / fa3:5.2f}x fa3" if cudnn and fa3 else ""
        figures = f"{speed[name]:7.1f} TFLOP/s {median[name]:8.3f} ms  spread {spread:.2f}"
        print(f"  {name:34s}{figures} {ratio} {bar}  {parts.get(name, '')}")
    sys.stdout.flush()
    return {"case": case.name, "tflops": speed, "milliseconds": milliseconds, "parts": parts}


def summarize(records: list[dict[str, Any]]) -> None:
    """Prints the best of ours over torch cuDNN by case, and the geometric mean."""
    print("\nbest of ours over torch cudnn; fa3 by table (backward alone)")
    ratios, bars = [], []
    for record in records:
        speed = record["tflops"]
        names = [name for name in speed if name != "torch cudnn" and not name.endswith(OTHER)]
        if not names or "torch cudnn" not in speed:
            continue
        best = max(names, key=lambda name: speed[name])
        ratio = speed[best] / speed["torch cudnn"]
        ratios.append(ratio)
        found = re.match(r"d(\d+) (full|causal) (\d+)", record["case"])
        table = (
            FA3_OVER_CUDNN.get((int(found[1]), found[2] == "causal", int(found[3])))
            if found
            else None
        )
        if table:
            bars.append(ratio / table)
        tail = f"{ratio / table:5.2f}x fa3" if table else ""
        print(f"  {record['case']:26s}{best:26s}{speed[best]:7.1f}  {ratio:5.2f}x cudnn  {tail}")
    for label, values in (("cudnn", ratios), ("fa3", bars)):
        if values:
            print(geometric_mean_line(label, values))


# ---- main -----------------------------------------------------------------------------------------------------------


def load_all(driver: Driver, folder: Path, facts: dict[str, Any], names: list[str]) -> list[Loaded]:
    """Loads the named variants."""
    found = []
    for variant in variants():
        if variant.name not in names:
            continue
        kernels = {}
        missing = [
            unit.name
            for unit in variant.units().values()
            if unit.name not in facts["units"] or not (folder / f"{unit.name}.cubin").exists()
        ]
        if missing:
            print(f"{variant.name} is not built: {missing[0]}")
            continue
        for role, unit in variant.units().items():
            kernels[role] = driver.load(folder / f"{unit.name}.cubin", facts["units"][unit.name])
        found.append(Loaded(variant, kernels, {name: facts[name] for name in STRUCTS}))
    return found


def main() -> int:
    """Runs checks and timings; returns 1 if a check failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("build/sm90_backward"), help="cubins and facts.json"
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
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=140.0, help="begin no further timed case after this time"
    )
    parser.add_argument(
        "--repeat", type=int, default=1, help="runs of each check after the first (%(default)s)"
    )
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument(
        "--time-wrong", action="store_true", help="time variants that failed their checks too"
    )
    parser.add_argument("--json", type=Path, help="write all times here")
    arguments = parser.parse_args()
    folder = arguments.folder
    started = time.monotonic()
    if arguments.write_units:
        write_units(folder, [v for v in variants() if re.search(arguments.variants, v.name)])
        return 0
    if arguments.check_here:
        import torch

        facts = json.loads((folder / "facts.json").read_text())
        torch.zeros(1, device="cuda")
        driver = Driver()
        loaded = {
            kernel.variant.name: kernel
            for kernel in load_all(driver, folder, facts, arguments.check_here.split(","))
        }
        check_here(list(loaded), lambda name: check(torch, driver, loaded[name], arguments.repeat))
        return 0

    names = [variant.name for variant in variants() if re.search(arguments.variants, variant.name)]
    folders = {"": folder} | ({OTHER: arguments.against} if arguments.against else {})
    right = {
        end: names if arguments.no_check else check_apart(__file__, place, names, arguments.repeat)
        for end, place in folders.items()
    }
    records = []
    if not arguments.no_time:
        import torch

        torch.zeros(1, device="cuda")
        print(device_words(torch))
        driver = Driver()
        kernels = []
        for end, place in folders.items():
            facts = json.loads((place / "facts.json").read_text())
            timed = names if arguments.time_wrong else right[end]
            for loaded in load_all(driver, place, facts, timed):
                variant = replace(loaded.variant, name=loaded.variant.name + end)
                kernels.append(replace(loaded, variant=variant))
        for case in timing_cases():
            if not re.search(arguments.cases, case.name):
                continue
            if time.monotonic() - started > arguments.seconds:
                print(f"no time left for {case.name}")
                continue
            milliseconds, parts = time_case(
                torch, driver, kernels, case, arguments.rounds, arguments.seed
            )
            records.append(report(case, milliseconds, parts))
        summarize(records)
        for line in comparison(records):
            print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": clocks(), "records": records}, indent=1))
    total = len(names) * len(folders)
    failed = total - sum(map(len, right.values()))
    print(f"{failed} of {total} variants failed their checks; {time.monotonic() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
