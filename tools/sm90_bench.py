"""What the benches of the sm90 kernels share: the driver, kernel parameters, problems, checks in child processes.

`bench_sm90.py` and `bench_sm90_backward.py` run kernels without the package: from cubins that their build scripts make,
with nothing but torch and libcuda. facts.json, printed by a program that the same scripts compile, says where the
members of the parameter structs lie, so that no layout is written down twice.
"""

from __future__ import annotations

import ctypes
import math
import random
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

LOG2E = 1.4426950408889634
UNBOUNDED = 2**29
NO_LAST_SECTION = 2**31 - 1  # kNoLastSection of cc/kernels/params.cuh

INDICES = "q_lengths kv_lengths q_segments kv_segments q_ranges kv_ranges".split()
EXTENTS = "batch q_len kv_len num_heads num_kv_heads group_size head_dim head_dim_v".split()
OTHERS = "band_left band_right lower_right scale scale_log2 softcap_in softcap_log2".split()
PROBLEM_MEMBERS = tuple("problem." + name for name in INDICES + EXTENTS + OTHERS)


# ---- facts ----------------------------------------------------------------------------------------------------------


def struct_printer(structs: Mapping[str, Sequence[str]]) -> str:
    """Returns C++ statements that print size, offsets and member sizes of structs as members of a JSON object."""
    text = ""
    for name, members in structs.items():
        text += f'  std::printf("\\"{name}\\": {{\\"size\\": %zu", sizeof({name}));\n'
        for member in members:
            size = f"sizeof(static_cast<{name}*>(nullptr)->{member})"
            text += f'  std::printf(", \\"{member}\\": [%zu, %zu]", offsetof({name}, {member}), {size});\n'
        text += '  std::printf("},\\n");\n'
    return text


class Params:
    """The bytes of a parameter struct; members that are not named are zero."""

    def __init__(self, layout: dict[str, Any], values: dict[str, Any]) -> None:
        # Tensor maps lie on multiples of 64 bytes.
        self._memory = (ctypes.c_byte * (layout["size"] + 64))()
        self.address = (ctypes.addressof(self._memory) + 63) // 64 * 64
        for name, value in values.items():
            offset, size = layout[name]
            data = to_bytes(value, size)
            ctypes.memmove(self.address + offset, data, size)


def to_bytes(value: Any, size: int) -> bytes:
    """Returns a member's bytes: floats are float32, None is a null pointer."""
    if isinstance(value, bytes):
        if len(value) != size:
            raise ValueError(f"{len(value)} bytes for a member of {size}")
        return value
    if isinstance(value, float):
        if size != 4:
            raise ValueError(f"a float for a member of {size} bytes")
        return struct.pack("<f", value)
    return int(value or 0).to_bytes(size, "little", signed=True)


# ---- driver ---------------------------------------------------------------------------------------------------------


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

    def load(self, cubin: Path, fact: dict[str, int]) -> Kernel:
        """Returns the kernel of a cubin, allowed the shared memory it needs."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), cubin.read_bytes())
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"jattn_kernel")
        max_dynamic_shared = 8
        self.call("cuFuncSetAttribute", function, max_dynamic_shared, fact["shared_bytes"])
        return Kernel(function, fact["threads"], fact["shared_bytes"])

    def launch(self, kernel: Kernel, grid: int, params: Params, stream: ctypes.c_void_p) -> None:
        """Launches a kernel on a one-dimensional grid."""
        arguments = (ctypes.c_void_p * 1)(params.address)
        block = (kernel.threads, 1, 1)
        self.call(
            "cuLaunchKernel",
            kernel.function,
            *(grid, 1, 1),
            *block,
            kernel.shared_bytes,
            stream,
            arguments,
            None,
        )

    def tensor_map(self, tensor: Any, rows: int) -> bytes:
        """Describes a (B, S, N, D) tensor by axes (D, S, N, B) and boxes of 64 x rows."""
        batch, length, heads, width = tensor.shape
        strides = [tensor.stride(axis) * tensor.element_size() for axis in (1, 2, 0)]
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
        return ctypes.string_at(aligned, 128)


@dataclass(frozen=True)
class Kernel:
    """A kernel on the device."""

    function: ctypes.c_void_p
    threads: int
    shared_bytes: int


def current_stream(torch: Any) -> ctypes.c_void_p:
    """Returns torch's stream for the driver."""
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


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
    dlse: bool = False
    element: str = "bf16"
    growth: float = 0.0  # what the scores of the first half of the keys exceed the others by, in some heads and rows
    v_size: float = 1.0

    @property
    def width_v(self) -> int:
        """Returns the head dim of v."""
        return self.head_dim_v or self.head_dim

    @property
    def group(self) -> int:
        """Returns the query heads of one key/value head."""
        return self.heads // self.kv_heads

    @property
    def true_scale(self) -> float:
        """Returns the factor of q.k."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def has_band(self) -> bool:
        """Returns whether a limit of the band is set."""
        return self.left is not None or self.right is not None

    def pairs(self) -> float:
        """Returns the visible pairs of all query heads; causal pairs count half of the square."""
        if self.left is not None and self.right == 0:
            pairs: float = sum(min(t + 1, self.left + 1) for t in range(self.q_len))
        elif self.right == 0:
            pairs = self.q_len * self.kv_len / 2
        else:
            pairs = self.q_len * self.kv_len
        return self.batch * self.heads * pairs

    def forward_flops(self) -> float:
        """Returns the work of the forward pass."""
        return 2.0 * self.pairs() * (self.head_dim + self.width_v)

    def backward_flops(self) -> float:
        """Returns the work of the backward pass."""
        return self.pairs() * (6.0 * self.head_dim + 4.0 * self.width_v)


@dataclass
class Data:
    """The tensors of a case; what a bench adds goes into extra."""

    case: Case
    q: Any
    k: Any
    v: Any
    dout: Any
    out: Any = None
    lse: Any = None
    dlse: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    def pointer(self, name: str) -> int | None:
        """Returns the address of an index array, or None."""
        return self.extra[name].data_ptr() if name in self.extra else None


def make_data(torch: Any, case: Case, seed: int) -> Data:
    """Draws inputs."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    dtype = torch.bfloat16 if case.element == "bf16" else torch.float16

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    data = Data(
        case,
        draw(case.batch, case.q_len, case.heads, case.head_dim),
        draw(case.batch, case.kv_len, case.kv_heads, case.head_dim),
        draw(case.batch, case.kv_len, case.kv_heads, case.width_v),
        draw(case.batch, case.q_len, case.heads, case.width_v),
    )
    if case.growth:
        # Every third query of the odd heads: few rows of a warp, some warps of a block.
        data.q[..., 0] = 0
        data.q[:, ::3, 1::2, 0] = 16
        data.k[..., 0] = 0
        data.k[:, : case.kv_len // 2, :, 0] = case.growth / (16 * case.true_scale)
    data.v *= case.v_size
    if case.dlse:
        shape = (case.batch, case.heads, case.q_len)
        data.dlse = torch.randn(*shape, device="cuda", generator=generator)
    if case.lengths:
        q_lengths, kv_lengths = zip(*case.lengths, strict=True)
        data.extra["q_lengths"] = torch.tensor(q_lengths, device="cuda", dtype=torch.int32)
        data.extra["kv_lengths"] = torch.tensor(kv_lengths, device="cuda", dtype=torch.int32)
    if case.segments:
        host = random.Random(seed)
        for name, length in (("q_segments", case.q_len), ("kv_segments", case.kv_len)):
            rows = [draw_ids(host, case.segments, length) for _ in range(case.batch)]
            data.extra[name] = torch.tensor(rows, device="cuda", dtype=torch.int32)
        if case.q_len == case.kv_len and case.segments == "documents":
            data.extra["q_segments"] = data.extra["kv_segments"].clone()
    return data


def draw_ids(host: random.Random, kind: str, length: int) -> list[int]:
    """Draws segment ids: documents one after the other with padding behind them, or any order."""
    if kind == "shuffled":
        return [host.choice((-5, 0, 3, 3, 7)) for _ in range(length)]
    ids: list[int] = []
    current = 0
    while len(ids) < length:
        ids += [current] * host.randint(1, max(2, length // 3))
        current += 1
    padded = length - length // 7
    return [i if j < padded else -1 for j, i in enumerate(ids[:length])]


def visibility(torch: Any, data: Data) -> Any:
    """Returns the (B, 1, T, S) mask of visible pairs, by the definition in core/problem.h."""
    case = data.case
    t = torch.arange(case.q_len, device="cuda")[None, :, None]
    j = torch.arange(case.kv_len, device="cuda")[None, None, :]
    ones = torch.ones(case.batch, 1, 1, device="cuda", dtype=torch.int64)
    q_lengths, kv_lengths = ones * case.q_len, ones * case.kv_len
    if case.lengths:
        q_lengths = data.extra["q_lengths"].clamp(0, case.q_len)[:, None, None]
        kv_lengths = data.extra["kv_lengths"].clamp(0, case.kv_len)[:, None, None]
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


SEGMENT_RANGE = [("low", "<i4"), ("high", "<i4"), ("members", "<u8")]


def segment_ranges(torch: Any, ids: Any, tile: int) -> Any:
    """Returns the SegmentRange records (B, tiles) of a (B, length) array of ids, as bytes."""
    host = ids.cpu().numpy()
    tiles = -(-host.shape[1] // tile)
    ranges = np.zeros((len(host), tiles), SEGMENT_RANGE)
    for entry, row in enumerate(host):
        for number in range(tiles):
            part = row[number * tile : (number + 1) * tile]
            used = part[part >= 0]
            low = int(used.min(initial=2**31 - 1))
            members = 0
            for id_ in np.unique(used):
                members |= 1 << int(id_) % 64
            ranges[entry, number] = (
                -1 - low if len(used) < len(part) else low,
                used.max(initial=-1),
                members,
            )
    return torch.tensor(np.frombuffer(ranges.tobytes(), np.uint8).copy(), device="cuda")


def problem_values(
    torch: Any, data: Data, tile_q: int, tile_kv: int, keep: list[Any]
) -> dict[str, Any]:
    """Returns the members of the problem for one kernel; appends what must outlive its launches to `keep`."""
    case = data.case
    values: dict[str, Any] = {name: data.pointer(name) for name in INDICES}
    if case.segments:
        for name, tile in (("q", tile_q), ("kv", tile_kv)):
            ranges = segment_ranges(torch, data.extra[f"{name}_segments"], tile)
            keep.append(ranges)
            values[f"{name}_ranges"] = ranges.data_ptr()
    extents = (case.batch, case.q_len, case.kv_len, case.heads, case.kv_heads, case.group)
    values |= dict(zip(EXTENTS, (*extents, case.head_dim, case.width_v), strict=True))
    values |= {
        "band_left": UNBOUNDED if case.left is None else case.left,
        "band_right": UNBOUNDED if case.right is None else case.right,
        "lower_right": case.lower_right,
        "scale": float(case.true_scale),
        "scale_log2": case.true_scale * LOG2E,
    }
    if case.softcap:
        values["softcap_in"] = case.true_scale / case.softcap
        values["softcap_log2"] = case.softcap * LOG2E
    return {f"problem.{name}": value for name, value in values.items()}


def fits(variant: Any, case: Case) -> bool:
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


def runs_timed(variant: Any, case: Case) -> bool:
    """Returns whether a variant is meant for a timed case: its own head dims and mask."""
    return (
        variant.head_dim == case.head_dim
        and (variant.head_dim_v or variant.head_dim) == case.width_v
        and bool(variant.band) == case.has_band
        and not variant.scale_first
        and not variant.name.startswith("check")
    )


# ---- measuring ------------------------------------------------------------------------------------------------------


def milliseconds_per_call(torch: Any, function: Callable[[], Any], calls: int) -> float:
    """Times calls between two events, after one that is not counted."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    function()
    start.record()
    for _ in range(calls):
        function()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / calls


def in_random_rounds(
    torch: Any, contenders: dict[str, Callable[[], Any]], calls: int, rounds: int, seed: int
) -> dict[str, list[float]]:
    """Returns milliseconds per round of every contender; every round has another order."""
    milliseconds: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    shuffler = random.Random(seed)
    for name in order:
        contenders[name]()
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name in order:
            milliseconds[name].append(milliseconds_per_call(torch, contenders[name], calls))
    return milliseconds


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


def device_words(torch: Any) -> str:
    """Returns the device, versions and clocks in one line."""
    version = torch.backends.cudnn.version()
    name = torch.cuda.get_device_name(0)
    return f"{name} torch {torch.__version__} cudnn {version} {clocks()}"


def geometric_mean_line(label: str, values: Sequence[float]) -> str:
    """Returns a line on ratios."""
    mean = math.exp(sum(map(math.log, values)) / len(values))
    return f"  geometric mean {mean:.3f}x {label}, worst {min(values):.3f}x, {len(values)} cases"


OTHER = " (other)"  # ends the names of variants from the folder that --against names


def comparison(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns lines on the speed of variants over those of the same name from the other folder.

    Where each was timed under a second name, too, its own and a quote, the noise is what the two differ by.
    """
    lines: list[str] = []
    ratios: list[float] = []
    for record in records:
        speed = record["tflops"]
        for name in speed:
            if name + OTHER not in speed:
                continue
            ours, theirs = (
                [speed[each] for each in (start, start + "'") if each in speed]
                for start in (name, name + OTHER)
            )
            ratios.append(statistics.mean(ours) / statistics.mean(theirs))
            figures = f"{speed[name]:7.1f}  {ratios[-1]:6.3f}x other"
            if min(len(ours), len(theirs)) > 1:
                noise = max(max(ours) / min(ours), max(theirs) / min(theirs)) - 1.0
                figures += f"  +- {noise:.3f}"
            lines.append(f"  {record['case']:26s}{name:28s}{figures}")
    if ratios:
        lines.append(geometric_mean_line("other", ratios))
    return lines


# ---- checking -------------------------------------------------------------------------------------------------------


def differing(
    torch: Any, run: Callable[[], Any], results: dict[str, Any], repeats: int
) -> dict[str, int]:
    """Runs again and again on results full of NaN; returns how often each result had other bits than now."""
    bits = {
        name: torch.int16 if x.element_size() == 2 else torch.int32 for name, x in results.items()
    }
    first = {name: x.clone() for name, x in results.items()}
    counts = {name: torch.zeros((), device="cuda", dtype=torch.int64) for name in results}
    for _ in range(repeats):
        for x in results.values():
            x.fill_(math.nan)
        run()
        for name, x in results.items():
            counts[name] += (x.view(bits[name]) != first[name].view(bits[name])).any()
    torch.cuda.synchronize()
    return {name: int(count) for name, count in counts.items()}


def check_here(names: Sequence[str], check: Callable[[str], list[str]]) -> None:
    """Checks variants in this process, one line each on standard output: the other end of check_apart()."""
    for name in names:
        print(f"begin {name}", flush=True)
        for line in check(name):
            print(f"wrong {line}", flush=True)
        print(f"end {name}", flush=True)


def check_apart(script: str, folder: Path, names: Sequence[str], repeats: int) -> list[str]:
    """Checks variants in child processes of a bench, each case so many times; returns those that are right.

    A kernel that faults or hangs takes its process with it; the rest are then checked in a fresh one.
    """
    right: list[str] = []
    waiting = list(names)
    seconds_without_news = 20.0 + 0.05 * repeats
    while waiting:
        log = folder / "check.log"
        with log.open("w") as stream:
            command = [sys.executable, script, "--folder", str(folder)]
            command += ["--check-here", ",".join(waiting), "--repeat", str(repeats)]
            child = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
            size, since = -1, time.monotonic()
            patience = 60.0  # the first news come after the start of torch
            while child.poll() is None and time.monotonic() - since < patience:
                time.sleep(0.1)
                if log.stat().st_size != size:
                    patience = seconds_without_news if size > 0 else patience
                    size, since = log.stat().st_size, time.monotonic()
            hangs = child.poll() is None
            if hangs:
                child.kill()
                child.wait()
        begun: list[str] = []
        ended: list[str] = []
        wrong: list[str] = []
        other: list[str] = []
        for line in log.read_text().splitlines():
            word, _, rest = line.partition(" ")
            if word in ("begin", "end", "wrong"):
                {"begin": begun, "end": ended, "wrong": wrong}[word].append(rest)
            else:
                other.append(line)
        for name in ended:
            mistakes = [line for line in wrong if line.startswith(name + ",")]
            print(f"{name:34s}{'wrong' if mistakes else 'right'}")
            for line in mistakes:
                print("  " + line)
            right += [] if mistakes else [name]
        waiting = [name for name in waiting if name not in begun]
        if begun != ended or child.returncode != 0:
            what = "hangs" if hangs else f"ends its process ({child.returncode})"
            print(f"{begun[-1] if begun else 'loading'} {what}: " + " | ".join(other[-4:])[-800:])
            for line in wrong:
                if begun and line.startswith(begun[-1] + ","):
                    print("  " + line)
            if not begun:
                break
    sys.stdout.flush()
    return right
