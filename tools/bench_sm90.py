"""Checks and times variants of the sm90 forward kernel, without the rest of the package.

    tools/build_sm90_variants.sh                 # on any machine with nvcc: cubins and facts into build/sm90
    python3 tools/bench_sm90.py                  # on the GPU machine: torch, libcuda; checks, then times
    python3 tools/bench_sm90.py --cases d128 --variants d128 --rounds 9 --no-check

Every variant runs under two names in every round and the order of a round is random: the card is power-limited, and
one binary under three names differed by 3 % when the order was fixed. Times are medians over rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

LOG2E = 1.4426950408889634


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
    schedule: int = 0
    loop_order: int = 0
    chain_items: int = 0
    scale_first: int = 0
    q_in_registers: int = 0
    integer_max: int = 0
    compiler: str = "nvcc"
    section_waves: float = 0  # items of one section over multiprocessors; 0: one key/value head

    def config(self) -> dict[str, str]:
        """Returns the members of Config as device code."""
        flags = "band lengths segments softcap chain_items scale_first q_in_registers integer_max".split()
        values = {
            "element": "Element::k" + self.element.upper(),
            "head_dim": str(self.head_dim),
            "head_dim_v": str(self.head_dim_v or self.head_dim),
            "tile_q": str(self.tile_q),
            "tile_kv": str(self.tile_kv),
            "num_warps": str(4 * (1 + self.tile_q // 64)),
            "stages": str(self.stages),
            "schedule": str(self.schedule),
            "loop_order": str(self.loop_order),
        }
        values |= {flag: "true" if getattr(self, flag) else "false" for flag in flags}
        order = (
            "element head_dim head_dim_v tile_q tile_kv num_warps stages band lengths segments softcap "
            "schedule loop_order chain_items scale_first q_in_registers integer_max"
        ).split()
        return {name: values[name] for name in order}

    def cubin(self) -> str:
        """Returns the file name: equal for variants that differ in the order of items only."""
        flags = "band lengths segments softcap chain_items scale_first q_in_registers integer_max".split()
        shape = f"{self.element}_d{self.head_dim}x{self.head_dim_v or self.head_dim}_tile{self.tile_q}x{self.tile_kv}"
        tags = [
            shape,
            f"stages{self.stages}",
            f"schedule{self.schedule}",
            f"order{self.loop_order}",
        ]
        tags += [flag for flag in flags if getattr(self, flag)]
        return "_".join([*tags, *([self.compiler] if self.compiler != "nvcc" else [])])


def variants() -> list[Variant]:
    """Returns the variants of a standard run."""
    found: list[Variant] = []
    for band in (0, 1):
        mask = "band" if band else "full"
        base = Variant("", band=band, section_waves=1.0 if band else 0.0, schedule=2)

        def add(tag: str, base: Variant = base, mask: str = mask, **members: Any) -> None:
            variant = replace(base, **members)
            width = f"d{variant.head_dim}" + (
                f"v{variant.head_dim_v}" if variant.head_dim_v else ""
            )
            found.append(replace(variant, name=f"{width}_{mask}_{tag}"))

        d64: dict[str, Any] = {"head_dim": 64, "tile_q": 192, "stages": 4, "integer_max": 1}
        best: dict[str, Any] = {"q_in_registers": 1, "integer_max": 1}
        series: dict[str, Any] = {"loop_order": 2, "tile_q": 192, "integer_max": 1}
        add("kept", **d64, loop_order=1, chain_items=1)
        add("mid", **d64)
        add("kept", **best)
        add("series", **series)
        add("kept", head_dim=256, tile_kv=64)
        add("kv80", head_dim=256, tile_kv=80)
        add("kept", head_dim=96, **series)
        add("kept", head_dim=192, tile_kv=96)
        add("kept", head_dim=192, head_dim_v=128, integer_max=1)
        if band:
            add("kept_4waves", **best, section_waves=4.0)
            add("kept_4waves", head_dim=256, tile_kv=64, section_waves=4.0)
    # For the checks: other types and features.
    checked = Variant("", band=1, lengths=1, schedule=2)
    found.append(replace(checked, name="check_f16", element="f16"))
    found.append(replace(checked, name="check_d256", head_dim=256, tile_kv=64))
    nvrtc = Variant("check_nvrtc96", head_dim=96, band=1, schedule=2, compiler="nvrtc")
    found.append(nvrtc)
    found.append(replace(nvrtc, name="check_nvrtc96f", band=0, element="f16"))
    found.append(replace(nvrtc, name="check_nvrtc64", head_dim=64, tile_q=192, loop_order=1))
    found.append(replace(checked, name="check_grid", schedule=0))
    found.append(replace(checked, name="check_stride", schedule=1))
    found.append(replace(checked, name="check_full", band=0))
    found.append(replace(checked, name="check_segments", segments=1))
    found.append(
        replace(checked, name="check_segments64", segments=1, head_dim=64, tile_q=192, loop_order=1)
    )
    found.append(replace(checked, name="check_serial", tile_q=192, loop_order=2, integer_max=1))
    found.append(replace(checked, name="check_chain", chain_items=1))
    found.append(
        replace(checked, name="check_chain_stride", chain_items=1, schedule=1, head_dim=96)
    )
    found.append(
        replace(
            checked,
            name="check_chain64",
            chain_items=1,
            head_dim=64,
            tile_q=192,
            loop_order=1,
            segments=1,
        )
    )
    found.append(replace(checked, name="check_qreg", q_in_registers=1, integer_max=1))
    found.append(replace(checked, name="check_softcap", softcap=1))
    found.append(replace(checked, name="check_scale_first", scale_first=1))
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
  std::printf("\\"variants\\": {{\\n");
{prints}
  std::printf("}}}}\\n");
}}
"""


def config_text(variant: Variant) -> str:
    """Returns the inside of a Config{...}."""
    return ", ".join(f".{key} = {value}" for key, value in variant.config().items())


def write_units(folder: Path) -> None:
    """Writes one translation unit per variant and facts.cc, which prints their sizes as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    cubins = {variant.cubin(): variant for variant in variants()}
    for name, variant in cubins.items():
        text = UNIT.format(config=config_text(variant))
        path = folder / f"{name}.cu"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    structs = ""
    for label, mirror in (("params", Params), ("problem", Problem)):
        cpp = "sm90::ForwardParams" if mirror is Params else "ProblemParams"
        names = [name for name, _ in mirror._fields_ if name != "tail"]
        offsets = "".join(f', \\"{name}\\": %zu' for name in names)
        values = "".join(f", offsetof({cpp}, {name})" for name in names)
        structs += f'  std::printf("\\"{label}\\": {{\\"size\\": %zu{offsets}}},\\n", sizeof({cpp}){values});\n'
    prints = [
        f'  print("{name}", Config{{{config_text(variant)}}}, "{"," if i + 1 < len(cubins) else ""}");'
        for i, (name, variant) in enumerate(cubins.items())
    ]
    (folder / "facts.cc").write_text(FACTS.format(structs=structs, prints="\n".join(prints)))


# ---- driver ---------------------------------------------------------------------------------------------------------


class TensorMap(ctypes.Structure):
    """Mirror of jattn::sm90::TensorMap."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


class BroadcastArray(ctypes.Structure):
    """Mirror of jattn::BroadcastArray."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("strides", ctypes.c_int64 * 4),
        ("pairs", ctypes.c_bool),
    ]


POINTERS = "q k v".split()
INDICES = "q_lengths kv_lengths q_segments kv_segments q_ranges kv_ranges".split()
EXTENTS = "batch q_len kv_len num_heads num_kv_heads group_size head_dim head_dim_v band_left band_right".split()


class Problem(ctypes.Structure):
    """Mirror of jattn::ProblemParams."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("bias", BroadcastArray),
        ("mask", BroadcastArray),
        *((name, ctypes.c_void_p) for name in INDICES),
        *((name, ctypes.c_int32) for name in EXTENTS),
        ("lower_right", ctypes.c_bool),
        ("scale_first", ctypes.c_bool),
        *((name, ctypes.c_float) for name in "scale scale_log2 softcap_in softcap_log2".split()),
        ("copy_bytes", ctypes.c_int32),
        ("copy_bytes_v", ctypes.c_int32),
    ]


class Params(ctypes.Structure):
    """Mirror of jattn::sm90::ForwardParams; facts.json says whether the layouts agree."""

    _fields_ = [
        ("q", TensorMap),
        ("k", TensorMap),
        ("v", TensorMap),
        ("out", TensorMap),
        ("problem", Problem),
        ("lse", ctypes.c_void_p),
        ("next_item", ctypes.c_void_p),
        ("tiles", ctypes.c_int32),
        ("items", ctypes.c_int32),
        ("section_heads", ctypes.c_int32),
        ("tail", ctypes.c_byte * 52),  # the C++ struct is aligned to 64 bytes
    ]


def check_layout(facts: dict[str, Any]) -> None:
    """Raises RuntimeError if the mirror differs from what the host compiler saw."""
    for mirror, offsets in ((Params, facts["params"]), (Problem, facts["problem"])):
        for name, _ in mirror._fields_:
            if name != "tail" and getattr(mirror, name).offset != offsets[name]:
                here, there = getattr(mirror, name).offset, offsets[name]
                raise RuntimeError(f"{mirror.__name__}.{name} is at {here}, in C++ at {there}")
        if ctypes.sizeof(mirror) != offsets["size"]:
            raise RuntimeError(
                f"{mirror.__name__} has {ctypes.sizeof(mirror)} bytes, in C++ {offsets['size']}"
            )


class Driver:
    """The few functions of libcuda that a launch needs."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a driver function and raises RuntimeError on failure."""
        status = getattr(self.library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {status} {text.value!r}")

    def load(self, cubin: Path, shared_bytes: int) -> ctypes.c_void_p:
        """Returns the kernel of a cubin, allowed the shared memory it needs."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), cubin.read_bytes())
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"jattn_kernel")
        max_dynamic_shared = 8
        self.call("cuFuncSetAttribute", function, max_dynamic_shared, shared_bytes)
        return function

    def tensor_map(self, tensor: Any, rows: int) -> TensorMap:
        """Describes a (B, S, N, D) tensor by axes (D, S, N, B) and boxes of 64 x rows."""
        batch, length, heads, width = tensor.shape
        item = tensor.element_size()
        strides = [tensor.stride(axis) * item for axis in (1, 2, 0)]
        memory = (ctypes.c_byte * 256)()
        aligned = (ctypes.addressof(memory) + 63) // 64 * 64
        data_type = 9 if "bfloat16" in str(tensor.dtype) else 6
        swizzle_128b, l2_256b = 3, 3
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.c_void_p(aligned),
            data_type,
            4,
            ctypes.c_void_p(tensor.data_ptr()),
            (ctypes.c_uint64 * 4)(width, length, heads, batch),
            (ctypes.c_uint64 * 3)(*strides),
            (ctypes.c_uint32 * 4)(64, rows, 1, 1),
            (ctypes.c_uint32 * 4)(1, 1, 1, 1),
            0,
            swizzle_128b,
            l2_256b,
            0,
        )
        result = TensorMap()
        ctypes.memmove(ctypes.addressof(result), aligned, ctypes.sizeof(TensorMap))
        return result


# ---- problems -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One attention problem. left, right None: unbounded."""

    name: str
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int = 0
    left: int | None = None
    right: int | None = None
    lower_right: bool = False
    lengths: tuple[tuple[int, int], ...] = ()  # (query, key) per batch entry
    segments: str = ""  # "", "documents", "shuffled"
    scale: float | None = None
    softcap: float = 0.0
    element: str = "bf16"

    @property
    def width_v(self) -> int:
        """Returns the head dim of v."""
        return self.head_dim_v or self.head_dim

    @property
    def has_band(self) -> bool:
        """Returns whether a limit of the band is set."""
        return self.left is not None or self.right is not None

    def flops(self) -> float:
        """Returns the work of the forward pass, visible pairs only."""
        if self.left is not None and self.right == 0:
            pairs = sum(min(t + 1, self.left + 1) for t in range(self.q_len))
        elif self.right == 0:
            pairs = self.q_len * self.kv_len / 2
        else:
            pairs = self.q_len * self.kv_len
        return 2.0 * self.batch * self.heads * pairs * (self.head_dim + self.width_v)


@dataclass
class Data:
    """The tensors of a case."""

    case: Case
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    counter: Any
    extra: dict[str, Any] = field(default_factory=dict)


def make_data(torch: Any, case: Case, seed: int, poison: bool) -> Data:
    """Draws inputs; with `poison`, fills with NaN whatever must not be read and all results."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    dtype = torch.bfloat16 if case.element == "bf16" else torch.float16

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    data = Data(
        case,
        draw(case.batch, case.q_len, case.heads, case.head_dim),
        draw(case.batch, case.kv_len, case.kv_heads, case.head_dim),
        draw(case.batch, case.kv_len, case.kv_heads, case.width_v),
        torch.full(
            (case.batch, case.q_len, case.heads, case.width_v), math.nan, device="cuda", dtype=dtype
        ),
        torch.full((case.batch, case.heads, case.q_len), math.nan, device="cuda"),
        torch.full((1,), -(2**30), device="cuda", dtype=torch.int32),
    )
    if case.lengths:
        q_lengths, kv_lengths = zip(*case.lengths, strict=True)
        data.extra["q_lengths"] = torch.tensor(q_lengths, device="cuda", dtype=torch.int32)
        data.extra["kv_lengths"] = torch.tensor(kv_lengths, device="cuda", dtype=torch.int32)
        if poison:
            for b in range(case.batch):
                data.q[b, max(q_lengths[b], 0) :] = math.nan
                data.k[b, max(kv_lengths[b], 0) :] = math.nan
                data.v[b, max(kv_lengths[b], 0) :] = math.nan
    if case.segments:
        host = random.Random(seed)
        for name, length in (("q_segments", case.q_len), ("kv_segments", case.kv_len)):
            rows = []
            for _ in range(case.batch):
                if case.segments == "documents":
                    ids, current = [], 0
                    while len(ids) < length:
                        ids += [current] * host.randint(1, max(2, length // 3))
                        current += 1
                    padded = length - length // 7
                    rows.append([i if j < padded else -1 for j, i in enumerate(ids[:length])])
                else:
                    rows.append([host.choice((-5, 0, 3, 3, 7)) for _ in range(length)])
            data.extra[name] = torch.tensor(rows, device="cuda", dtype=torch.int32)
        if case.q_len == case.kv_len and case.segments == "documents":
            data.extra["q_segments"] = data.extra["kv_segments"].clone()
        if poison:
            data.q[data.extra["q_segments"] < 0] = math.nan
            data.k[data.extra["kv_segments"] < 0] = math.nan
            data.v[data.extra["kv_segments"] < 0] = math.nan
    return data


def visibility(torch: Any, data: Data) -> Any:
    """Returns the (B, 1, T, S) mask of visible pairs, by the definition in core/problem.h."""
    case = data.case
    t = torch.arange(case.q_len, device="cuda")[None, :, None]
    j = torch.arange(case.kv_len, device="cuda")[None, None, :]
    ones = torch.ones(case.batch, 1, 1, device="cuda", dtype=torch.int64)
    q_lengths = (
        data.extra["q_lengths"].clamp(0, case.q_len)[:, None, None]
        if case.lengths
        else ones * case.q_len
    )
    kv_lengths = (
        data.extra["kv_lengths"].clamp(0, case.kv_len)[:, None, None]
        if case.lengths
        else ones * case.kv_len
    )
    visible = (t < q_lengths) & (j < kv_lengths)
    offset = (kv_lengths - q_lengths) if case.lower_right else 0 * ones
    if case.left is not None:
        visible &= t + offset - case.left <= j
    if case.right is not None:
        visible &= j <= t + offset + case.right
    if case.segments:
        q_ids, kv_ids = data.extra["q_segments"][:, :, None], data.extra["kv_segments"][:, None, :]
        visible &= (q_ids == kv_ids) & (q_ids >= 0)
    return visible[:, None]


def reference(torch: Any, data: Data) -> tuple[Any, Any]:
    """Computes (out, lse) in float64 with unreadable inputs taken as 0."""
    case = data.case
    q, k, v = (torch.nan_to_num(x.double()).transpose(1, 2) for x in (data.q, data.k, data.v))
    group = case.heads // case.kv_heads
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = case.scale if case.scale is not None else case.head_dim**-0.5
    s = scale * q @ k.transpose(-1, -2)
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


def segment_ranges(torch: Any, ids: Any, tile: int) -> Any:
    """Returns the SegmentRange records (B, tiles, 2) of a (B, length) array of ids."""
    batch, length = ids.shape
    tiles = -(-length // tile)
    top = 2**31 - 1
    padding = torch.zeros(batch, tiles * tile, device="cuda", dtype=torch.bool)
    low = torch.full((batch, tiles * tile), top, device="cuda", dtype=torch.int32)
    high = torch.full((batch, tiles * tile), -1, device="cuda", dtype=torch.int32)
    padding[:, :length] = ids < 0
    low[:, :length] = torch.where(ids < 0, top, ids)
    high[:, :length] = torch.where(ids < 0, -1, ids)
    shape = (batch, tiles, tile)
    least = low.view(shape).amin(-1)
    least = torch.where(padding.view(shape).any(-1), -1 - least, least)
    return torch.stack([least, high.view(shape).amax(-1)], -1).contiguous()


# ---- launching ------------------------------------------------------------------------------------------------------


@dataclass
class Loaded:
    """A variant on the device."""

    variant: Variant
    function: ctypes.c_void_p
    threads: int
    shared_bytes: int


def section_heads(variant: Variant, case: Case, num_sms: int) -> int:
    """Returns how many query heads share a section."""
    group = case.heads // case.kv_heads
    if not variant.section_waves:
        return group
    tiles = -(-case.q_len // variant.tile_q)
    kv_heads = max(1, round(variant.section_waves * num_sms / tiles / group))
    return min(case.batch * case.heads, kv_heads * group)


def fits(variant: Variant, case: Case) -> bool:
    """Returns whether a variant computes a case."""
    return (
        case.head_dim <= variant.head_dim
        and case.width_v <= (variant.head_dim_v or variant.head_dim)
        and case.element == variant.element
        and bool(variant.band) >= case.has_band
        and bool(variant.lengths) >= bool(case.lengths)
        and bool(variant.segments) == bool(case.segments)
        and bool(variant.softcap) == bool(case.softcap)
        and (variant.scale_first == 1 or case.scale is None or case.scale > 0)
    )


def launcher(torch: Any, driver: Driver, loaded: Loaded, data: Data) -> Callable[[], None]:
    """Returns a function that launches a variant on a case's data."""
    variant, case = loaded.variant, data.case
    extra = data.extra

    def pointer(name: str) -> int | None:
        return extra[name].data_ptr() if name in extra else None

    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    scale = case.scale if case.scale is not None else case.head_dim**-0.5
    tiles = -(-case.q_len // variant.tile_q)
    unbounded = 2**29
    problem = Problem(
        **{name: pointer(name) for name in INDICES},
        batch=case.batch,
        q_len=case.q_len,
        kv_len=case.kv_len,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        group_size=case.heads // case.kv_heads,
        head_dim=case.head_dim,
        head_dim_v=case.width_v,
        band_left=unbounded if case.left is None else case.left,
        band_right=unbounded if case.right is None else case.right,
        lower_right=case.lower_right,
        scale=scale,
        scale_log2=scale * LOG2E,
    )
    if case.softcap:
        problem.softcap_in, problem.softcap_log2 = scale / case.softcap, case.softcap * LOG2E
    keep: list[Any] = []
    if case.segments:
        keep += [
            segment_ranges(torch, extra["q_segments"], variant.tile_q),
            segment_ranges(torch, extra["kv_segments"], variant.tile_kv),
        ]
        problem.q_ranges, problem.kv_ranges = keep[0].data_ptr(), keep[1].data_ptr()
    params = Params(
        driver.tensor_map(data.q, variant.tile_q),
        driver.tensor_map(data.k, variant.tile_kv),
        driver.tensor_map(data.v, variant.tile_kv),
        driver.tensor_map(data.out, 64),
        problem,
        lse=data.lse.data_ptr(),
        next_item=data.counter.data_ptr(),
        tiles=tiles,
        items=case.batch * case.heads * tiles,
        section_heads=section_heads(variant, case, num_sms),
    )
    keep.append(params)
    grid = params.items if variant.schedule == 0 else min(params.items, num_sms)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    counter = ctypes.c_uint64(data.counter.data_ptr())

    def launch(keep: list[Any] = keep) -> None:
        if variant.schedule == 2:
            driver.call("cuMemsetD8Async", counter, ctypes.c_ubyte(0), ctypes.c_size_t(4), stream)
        driver.call(
            "cuLaunchKernel",
            loaded.function,
            grid,
            1,
            1,
            loaded.threads,
            1,
            1,
            loaded.shared_bytes,
            stream,
            arguments,
            None,
        )

    return launch


# ---- checking -------------------------------------------------------------------------------------------------------


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
    if variant.band:
        causal = replace(base, name="causal", right=0)
        cases += [
            causal,
            replace(causal, name="causal square", q_len=777, kv_len=777),
            replace(causal, name="causal small", q_len=300, kv_len=300),
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
        cases = [replace(case, softcap=2.0) for case in cases]
    if variant.scale_first:
        cases += [
            replace(base, name="negative scale", scale=-0.2),
            replace(base, name="zero scale", scale=0.0),
        ]
    return [case for case in cases if fits(variant, case)]


def check(torch: Any, driver: Driver, loaded: Loaded) -> list[str]:
    """Runs the check cases of a variant; returns one line per failure."""
    failures = []
    for number, case in enumerate(check_cases(loaded.variant)):
        data = make_data(torch, case, number, poison=True)
        launch = launcher(torch, driver, loaded, data)
        launch()
        torch.cuda.synchronize()
        first = data.out.clone()
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
        launch()
        torch.cuda.synchronize()
        if not torch.equal(first, data.out):
            problems.append("two runs differ")
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
    cases += [gqa, replace(gqa, name="d128 gqa full 8192", right=None), window]
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
    data = make_data(torch, case, 0, poison=False)
    contenders: dict[str, Callable[[], Any]] = dict(rivals(torch, data))
    for loaded in kernels:
        if fits(loaded.variant, case) and runs_timed(loaded.variant, case):
            launch = launcher(torch, driver, loaded, data)
            contenders[loaded.variant.name] = launch
            contenders[loaded.variant.name + "'"] = launch
    milliseconds: dict[str, list[float]] = {name: [] for name in contenders}
    estimate = case.flops() / 550e12 * 1e3
    launches = max(3, math.ceil(4.0 / estimate))
    order = list(contenders)
    shuffler = random.Random(seed)
    for name in order:
        contenders[name]()
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            contenders[name]()
            start.record()
            for _ in range(launches):
                contenders[name]()
            end.record()
            torch.cuda.synchronize()
            milliseconds[name].append(start.elapsed_time(end) / launches)
    return milliseconds


def runs_timed(variant: Variant, case: Case) -> bool:
    """Returns whether a variant is meant for a timed case: its own head dims and mask."""
    return (
        variant.head_dim == case.head_dim
        and (variant.head_dim_v or variant.head_dim) == case.width_v
        and bool(variant.band) == case.has_band
        and not variant.scale_first
        and not variant.name.startswith("check")
    )


def clocks() -> str:
    """Returns what the card says of its clock, power and heat."""
    command = [
        "nvidia-smi",
        "--query-gpu=clocks.sm,power.draw,temperature.gpu",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "clocks unknown"
    return done.stdout.strip().splitlines()[0]


def report(case: Case, milliseconds: dict[str, list[float]]) -> dict[str, Any]:
    """Prints one case as a table; returns it as a record."""
    flops = case.flops()
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
        names = [name for name in speed if name + "'" in speed]
        if not names or "torch cudnn" not in speed:
            continue
        best = max(names, key=lambda name: speed[name] + speed[name + "'"])
        value = (speed[best] + speed[best + "'"]) / 2
        ratio = value / speed["torch cudnn"]
        ratios.append(ratio)
        width, mask, length = re.match(
            r"d(\d+)(?:v\d+)? (?:gqa )?(\w+) (\d+)", record["case"]
        ).groups()
        table = FA3_OVER_CUDNN.get((int(width), mask == "causal", int(length)))
        bar = value / speed["fa3"] if "fa3" in speed else ratio / table if table else None
        if bar:
            bars.append(bar)
        print(
            f"  {record['case']:24s}{best:28s}{value:7.1f}  {ratio:5.2f}x cudnn  "
            + (f"{bar:5.2f}x fa3" if bar else "")
        )
    for label, values in (("cudnn", ratios), ("fa3", bars)):
        if values:
            mean = math.exp(sum(map(math.log, values)) / len(values))
            print(
                f"  geometric mean {mean:.3f}x {label}, worst {min(values):.3f}x, {len(values)} cases"
            )


# ---- main -----------------------------------------------------------------------------------------------------------


def load_all(driver: Driver, folder: Path, facts: dict[str, Any], names: list[str]) -> list[Loaded]:
    """Loads the named variants."""
    found = []
    for variant in variants():
        if variant.name in names:
            fact = facts["variants"][variant.cubin()]
            path = folder / f"{variant.cubin()}.cubin"
            function = driver.load(path, fact["shared_bytes"])
            found.append(Loaded(variant, function, fact["threads"], fact["shared_bytes"]))
    return found


def check_here(folder: Path, facts: dict[str, Any], names: list[str]) -> None:
    """Checks the named variants in this process, one line each on standard output."""
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    driver = Driver()
    for loaded in load_all(driver, folder, facts, names):
        print(f"begin {loaded.variant.name}", flush=True)
        for line in check(torch, driver, loaded):
            print(f"wrong {line}", flush=True)
        print(f"end {loaded.variant.name}", flush=True)


def check_apart(folder: Path, names: list[str]) -> list[str]:
    """Checks the named variants in child processes; returns those that are right.

    A kernel that faults or hangs takes its process with it; the rest are then checked in a fresh one.
    """
    right: list[str] = []
    waiting = list(names)
    seconds_without_news = 60.0
    while waiting:
        log = folder / "check.log"
        with log.open("w") as stream:
            command = [
                sys.executable,
                __file__,
                "--folder",
                str(folder),
                "--check-here",
                ",".join(waiting),
            ]
            child = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
            size, since = 0, time.monotonic()
            while child.poll() is None and time.monotonic() - since < seconds_without_news:
                time.sleep(0.2)
                if log.stat().st_size != size:
                    size, since = log.stat().st_size, time.monotonic()
            hangs = child.poll() is None
            if hangs:
                child.kill()
                child.wait()
        begun, ended, wrong, other = [], [], [], []
        for line in log.read_text().splitlines():
            word, _, rest = line.partition(" ")
            {"begin": begun, "end": ended, "wrong": wrong}.get(word, other).append(
                rest if word else line
            )
        for name in ended:
            mistakes = [line for line in wrong if line.startswith(name + ",")]
            print(f"{name:34s}{'wrong' if mistakes else 'right'}")
            for line in mistakes:
                print("  " + line)
            right += [] if mistakes else [name]
        waiting = [name for name in waiting if name not in begun]
        if begun != ended or child.returncode != 0:
            what = "hangs" if hangs else f"ends its process ({child.returncode})"
            print(f"{begun[-1] if begun else 'loading'} {what}: " + " | ".join(other[-3:])[-600:])
            if not begun:
                break
    sys.stdout.flush()
    return right


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
        "--check-layout", action="store_true", help="compare Params with facts.json and stop"
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--json", type=Path, help="write all times here")
    arguments = parser.parse_args()
    folder = arguments.folder
    if arguments.write_units:
        write_units(folder)
        return 0
    facts = json.loads((folder / "facts.json").read_text())
    check_layout(facts)
    if arguments.check_layout:
        print("layouts agree")
        return 0
    if arguments.check_here:
        check_here(folder, facts, arguments.check_here.split(","))
        return 0

    wanted = [variant for variant in variants() if re.search(arguments.variants, variant.name)]
    names = [variant.name for variant in wanted if variant.cubin() in facts["variants"]]
    for variant in wanted:
        if variant.name not in names:
            print(f"{variant.name:34s}not built")
    right = names if arguments.no_check else check_apart(folder, names)
    records = []
    if not arguments.no_time:
        import torch

        torch.cuda.init()
        torch.zeros(1, device="cuda")
        version = torch.backends.cudnn.version()
        print(torch.cuda.get_device_name(0), "torch", torch.__version__, "cudnn", version, clocks())
        driver = Driver()
        kernels = load_all(driver, folder, facts, right)
        for case in timing_cases():
            if re.search(arguments.cases, case.name):
                times = time_case(torch, driver, kernels, case, arguments.rounds, arguments.seed)
                records.append(report(case, times))
        summarize(records)
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": clocks(), "records": records}, indent=1))
    print(f"{len(names) - len(right)} of {len(names)} variants failed their checks")
    return int(len(right) < len(names))


if __name__ == "__main__":
    sys.exit(main())
