"""The tables in README.md and docs, written from the recorded runs and from what the backends say of themselves.

  python -m benchmarks.tables            rewrites them
  python -m benchmarks.tables --check    fails if one is not what it would write, or a figure is of another record

A table stands between two comments, ``<!-- table NAME -->`` and ``<!-- end table -->``; NAME is one of TABLES.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import backend_table, plot, records
from benchmarks.records import ROOT, Point, Record

PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "features.md")
README_LENGTHS = (2048, 8192)
FEATURE_RIVALS = "gpu-feature-rivals"
FEATURE_RECORDS = (
    ("h200-features", "speed_features", "bfloat16, batch 4, length 4096, 16 heads of 128"),
    ("cpu-features", "speed_features_cpu", "float32, batch 2, length 1024, 8 heads of 64"),
)
_BLOCK = re.compile(r"(<!-- table (?P<name>[\w-]+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def _format(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _link(record: Record, page: Path) -> str:
    path = f"{'../' * (len(page.relative_to(ROOT).parts) - 1)}{record.path.relative_to(ROOT)}"
    return f"[record]({path})"


def _caption(record: Record, page: Path, what: str) -> str:
    return f"{what}. {record.caption()}: {_link(record, page)}."


Row = dict[str, Point]  # by the titles of contenders
TFLOPS = "TFLOP/s"
MILLISECONDS = "ms"
MICROSECONDS = "us"
_NO_CELL = '"-": cannot run it, or has no call for it in the benchmark'


def _value(point: Point, unit: str) -> float:
    if unit == TFLOPS:
        return point.tflops or 0.0
    return point.median_us / (1e3 if unit == MILLISECONDS else 1.0)


def _cells(row: Row, titles: Sequence[str], digits: int, unit: str) -> list[str]:
    """One cell per contender. In bold: the fastest of several, and those whose middle half of rounds meets its own."""
    fastest = min(row.values(), key=lambda point: point.median_us)
    cells = []
    for title in titles:
        if title not in row:
            cells.append("-")
            continue
        point = row[title]
        text = f"{_value(point, unit):.{digits}f}"
        ties = point.middle_us[0] <= fastest.middle_us[1] or point is fastest
        text = f"**{text}**" if ties and len(row) > 1 else text
        cells.append(text + ("†" if point.is_bound_by_host else ""))
    return cells


def _rows_by(points: Iterable[Point], key: Callable[[Point], tuple[str, ...]]) -> dict[Any, Row]:
    """Points in rows, in the order in which they come."""
    rows: dict[Any, Row] = {}
    for point in points:
        rows.setdefault(key(point), {})[point.contender] = point
    return rows


def _remarks(record: Record, points: Sequence[Point], titles: Collection[str] = ()) -> str:
    """How far rounds lie apart, which calls the host may bound, and who was left out."""
    parts = [_spread(points).strip()]
    if any(point.is_bound_by_host for point in points):
        parts.append("†: the host takes four fifths of that time, or more, to start the call.")
    if left_out := record.left_out(titles):
        parts.append(f"Not timed, as results were wrong: {'; '.join(left_out)}.")
    return " ".join(part for part in parts if part)


def _grid(points: Sequence[Point]) -> dict[tuple[int, str, int, str], list[Point]]:
    groups: dict[tuple[int, str, int, str], list[Point]] = {}
    for point in points:
        if point.problem is not None:
            at = point.problem
            key = (at.head_dim, at.mask, at.length, point.pass_name)
            groups.setdefault(key, []).append(point)
    return dict(sorted(groups.items()))


def _ratios(rows: Sequence[Row], titles: Sequence[str]) -> str:
    """How jattn stands to each of the others over problems that both have: geometric mean, least, most.

    Where a call takes as long as the host needs to start it, nothing is said of the kernels.
    """
    ours = [row for row in rows if "jattn" in row]
    parts = []
    for title in titles:
        pairs = [(row["jattn"], row[title]) for row in ours if title in row]
        found = [
            other.median_us / point.median_us
            for point, other in pairs
            if not (point.is_bound_by_host or other.is_bound_by_host)
        ]
        if title != "jattn" and found:
            mean = statistics.geometric_mean(found)
            some = "" if len(found) == len(ours) else f", {len(found)} of {len(ours)} rows"
            parts.append(f"{title} {mean:.2f} ({min(found):.2f} to {max(found):.2f}{some})")
    return "; ".join(parts)


def _spread(points: Sequence[Point]) -> str:
    """How far the rounds behind the shown medians lie apart."""
    spreads = [point.spread for point in points if point.spread is not None]
    if not spreads:
        return ""
    middle, most = statistics.median(spreads), max(spreads)
    return f" Slowest less fastest round over the median: {middle:.1%} (median), {most:.0%} (most)."


def _gpu_record() -> Record:
    record = records.first(("h200-hopper", "h200-bf16"))
    if record is None:
        raise LookupError("benchmarks/results has no record *-h200-hopper.json")
    return record


def _gpu_table(page: Path, lengths: Sequence[int] | None) -> str:
    record = _gpu_record()
    points = [p for p in record.points if p.problem is not None and p.tflops is not None]
    points = [p for p in points if lengths is None or (p.problem and p.problem.length in lengths)]
    titles = [
        title
        for title in records.contenders(points)
        if sum(point.contender == title for point in points) > len(_grid(points)) // 2
    ]
    rows, groups = [], []
    for (head_dim, mask, length, pass_name), group in _grid(points).items():
        row = {p.contender: p for p in group if p.contender in titles}
        cells = _cells(row, titles, 0, TFLOPS)
        rows.append([str(head_dim), mask, str(length), pass_name, *cells])
        groups.append(row)
    return "\n\n".join(
        [
            _format(["head dim", "mask", "length", "pass", *titles], rows),
            "Speed of `jattn` over others, geometric mean (least to most) of the rows: "
            f"{_ratios(groups, titles)}. {_remarks(record, [p for p in points if p.contender in titles], titles)}",
            _caption(record, page, "bfloat16, TFLOP/s"),
        ]
    )


def speed_h200(page: Path) -> str:
    """The grid of head dims, masks and lengths; the README shows two lengths."""
    return _gpu_table(page, README_LENGTHS if page.name == "README.md" else None)


def speed_h200_sustained(page: Path) -> str:
    """The grid in longer rounds, in which the clock comes down to what the power limit allows."""
    record, bursts = records.newest("h200-hopper-sustained"), _gpu_record()
    keys = {(p.name, p.pass_name): p for p in bursts.points if p.contender == "jattn"}
    parts = []
    for pass_name in ("forward", "forward+backward"):
        points = [p for p in record.points if p.problem is not None and p.pass_name == pass_name]
        rows = list(_rows_by(points, lambda point: (point.name,)).values())
        found = [row["FlashAttention-3"].median_us / row["jattn"].median_us for row in rows]
        own = [
            keys[row["jattn"].name, pass_name].median_us / row["jattn"].median_us for row in rows
        ]
        mean = statistics.geometric_mean(found)
        parts.append(
            f"{pass_name} {mean:.2f} of the speed of FlashAttention-3 ({min(found):.2f} to {max(found):.2f}), and"
            f" {statistics.geometric_mean(own):.2f} of its own speed in the table"
        )
    return (
        f"In rounds of 0.3 s `jattn` has, {'; '.join(parts)}. Geometric mean (least to most) of {len(rows)} problems of"
        f" head dims 64, 128 and 256, commit {str(record.content['commit'])[:7]}: {_link(record, page)}."
    )


def speed_h200_others(page: Path) -> str:
    """What the same run has beside the grid: grouped heads, documents, windows, few queries."""
    record = _gpu_record()
    points = [p for p in record.points if p.problem is None and p.tflops is not None]
    if not points:
        return ""
    titles = records.contenders(points)
    groups = _rows_by(points, lambda point: (point.name, point.pass_name))
    rows = [[*at, *_cells(row, titles, 0, TFLOPS)] for at, row in sorted(groups.items())]
    what = f"bfloat16, TFLOP/s, {_NO_CELL}"
    table = _format(["problem", "pass", *titles], rows)
    return "\n\n".join([table, _remarks(record, points), _caption(record, page, what)])


def speed_h200_f32(page: Path) -> str:
    """float32 on the GPU: one shape."""
    record = records.newest("h200-f32")
    points = [point for point in record.points if point.tflops is not None]
    titles = records.contenders(points)
    groups = _rows_by(points, lambda point: (point.pass_name,))
    rows = [[*at, *_cells(row, titles, 1, TFLOPS)] for at, row in groups.items()]
    what = "float32, TFLOP/s, batch 2, length 2048, 16 heads of 128, TF32 off for torch"
    table = _format(["pass", *titles], rows)
    return "\n\n".join([table, _remarks(record, points), _caption(record, page, what)])


def _shown_in_readme(point: Point) -> bool:
    at = point.problem
    return at is not None and at.head_dim == 64 and at.is_causal and at.length in (1024, 4096)


def speed_cpu(page: Path) -> str:
    """The CPU kernel beside other implementations on two cores."""
    record = records.newest("cpu-two-cores")
    points = [p for p in record.points if page.name != "README.md" or _shown_in_readme(p)]
    titles = records.contenders(points)
    groups: dict[tuple[str, int, str, int, str], Row] = {}
    for point in points:
        at = point.problem
        if at is not None:
            key = (at.dtype, at.head_dim, at.mask, at.length, point.pass_name)
            groups.setdefault(key, {})[point.contender] = point
    order = ("float32", "bfloat16", "float16")
    rows, by_type = [], dict[str, list[Row]]()
    for key, row in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), item[0])):
        dtype, head_dim, mask, length, pass_name = key
        by_type.setdefault(dtype, []).append(row)
        rival = min((p.median_us for title, p in row.items() if title != "jattn"), default=0.0)
        times = f"{rival / row['jattn'].median_us:.1f}" if "jattn" in row and rival else "-"
        cells = _cells(row, titles, 1, MILLISECONDS)
        rows.append([dtype, str(head_dim), mask, str(length), pass_name, *cells, times])
    header = ["type", "head dim", "mask", "length", "pass", *titles, "times the best other"]
    ratios = [f"{dtype}: {_ratios(by_type[dtype], titles)}." for dtype in by_type]
    return "\n\n".join(
        [
            _format(header, rows),
            "Times as fast as others, geometric mean (least to most) of the rows. "
            f"{' '.join(ratios)} {_remarks(record, points)}",
            _caption(record, page, 'Batch 1, 8 heads, milliseconds, "-": not timed'),
        ]
    )


# Records of benchmarks.cpu on machines other than that of the tables, and what to call them.
CPU_MACHINES = (
    ("AMD Zen 5, AVX-512-BF16", "2026-11-25-cpu-zen5.json"),
    ("Xeon with AMX", "2026-11-29-cpu-amx-float32.json"),
    ("Xeon with AVX-512, no AMX", "2026-11-28-cpu-avx512-float32.json"),
    ("Xeon at 2.8 GHz with AVX-512, no AMX", "2026-11-30-cpu-avx512-float32.json"),
    ("AMD Zen 4", "2026-11-28-cpu-zen4-float32.json"),
    ("AMD Zen 4, again", "2026-11-28-cpu-zen4-float32-scratch.json"),
)


def cpu_machines(page: Path) -> str:
    """How many times as fast as PyTorch the CPU kernel is on other machines, by type."""
    rows = []
    for machine, name in CPU_MACHINES:
        record = records.read(records.RESULTS / name)
        points = [p for p in record.points if p.problem is not None]
        for dtype in dict.fromkeys(p.problem.dtype for p in points if p.problem):
            own = [p for p in points if p.problem and p.problem.dtype == dtype]
            cells = []
            for pass_name in ("forward", "forward+backward"):
                chosen = [p for p in own if p.pass_name == pass_name]
                by_name = list(_rows_by(chosen, lambda point: (point.name,)).values())
                cells.append(_ratios(by_name, ["torch"]).removeprefix("torch "))
            spreads = [p.spread for p in own if p.spread is not None]
            apart = f"{statistics.median(spreads):.0%}, {max(spreads):.0%}" if spreads else "-"
            rows.append([machine, dtype, *cells, apart, _link(record, page)])
    header = ["machine", "type", "forward", "forward and backward", "spread", "record"]
    return "\n\n".join(
        [
            _format(header, rows),
            "Times as fast as PyTorch, geometric mean (least to most) of the problems; spread: slowest less fastest"
            " round over the median, of half the rows and at most.",
        ]
    )


# As benchmarks.cpu names them.
DECODING_NAME = re.compile(r"(\w+)-b(\d+)-(\d+)x(\d+)-n(\d+)/(\d+)-d(\d+)")
SHORT_NAME = re.compile(r"(\w+)-b(\d+)-(\d+)-d(\d+)")


def cpu_decode(page: Path) -> str:
    """Few queries on many keys on a CPU, beside PyTorch."""

    def shape(parts: Sequence[str], _: str) -> list[str]:
        dtype, batch, queries, keys, heads, kv_heads, head_dim = parts
        return [dtype, batch, queries, keys, f"{heads} on {kv_heads}", head_dim]

    header = ["type", "batch", "queries", "keys", "heads", "head dim"]
    caption = 'Forward, no mask, milliseconds, "-": not timed, since its error was above the limit'
    return _cpu_problems(page, "decode", DECODING_NAME, header, shape, caption)


def cpu_short(page: Path) -> str:
    """Many short sequences on a CPU, beside PyTorch and jax.nn."""
    header = ["type", "batch", "length", "head dim", "pass"]
    caption = 'No mask, 8 heads, milliseconds, "-": not timed'
    return _cpu_problems(
        page, "short", SHORT_NAME, header, lambda parts, pass_name: [*parts, pass_name], caption
    )


def _cpu_problems(
    page: Path,
    option: str,
    pattern: re.Pattern[str],
    header: Sequence[str],
    shape: Callable[[Sequence[str], str], list[str]],
    caption: str,
) -> str:
    """What an option of benchmarks.cpu measured: ``shape`` makes first cells of the parts of a name and the pass."""
    if not records.has(f"cpu-{option}"):
        return ""
    record = records.newest(f"cpu-{option}")
    groups = _rows_by(record.points, lambda point: (point.name, point.pass_name))
    titles = records.contenders(record.points)
    rows, by_type = [], dict[str, list[Row]]()
    for (name, pass_name), row in groups.items():
        match = pattern.fullmatch(name)
        if match is None:
            raise LookupError(
                f"{record.path.name}: {name!r} is no problem of benchmarks.cpu --{option}"
            )
        by_type.setdefault(match.group(1), []).append(row)
        cells = _cells(row, titles, 2, MILLISECONDS)
        rows.append([*shape(match.groups(), pass_name), *cells])
    ratios = [f"{dtype}: {_ratios(by_type[dtype], titles)}." for dtype in by_type]
    return "\n\n".join(
        [
            _format([*header, *titles], rows),
            "Times as fast, geometric mean (least to most) of the rows. "
            f"{' '.join(ratios)} {_remarks(record, record.points)}",
            _caption(record, page, caption),
        ]
    )


def gpu_decode(page: Path) -> str:
    """Few queries on many keys on a GPU: what features cost there, beside other implementations."""
    if not records.has("gpu-decode"):
        return ""
    record = records.newest("gpu-decode")
    points = [point for point in record.points if point.median_us]
    titles = records.contenders(points)
    groups = _rows_by(points, lambda point: (point.name,))
    rows = [
        [name.removeprefix("decode-"), *_cells(row, titles, 0, MICROSECONDS)]
        for (name,), row in groups.items()
    ]
    return "\n\n".join(
        [
            _format(["problem", *titles], rows),
            "Times as fast, geometric mean (least to most) of the rows that both have: "
            f"{_ratios(list(groups.values()), titles)}. {_remarks(record, points)}",
            _caption(
                record,
                page,
                "Forward, bfloat16, batch 64, one query of 32 heads on 8192 keys of 8 heads of 128 where a row says"
                f" nothing else; microseconds, {_NO_CELL}",
            ),
        ]
    )


def cpu_tiles(page: Path) -> str:
    """The CPU kernel's products and passes as shares of the measured peak, by instruction set and type."""
    if not records.has("cpu-tiles"):
        return ""
    record = records.newest("cpu-tiles")
    groups: dict[tuple[str, str, int], dict[str, str]] = {}
    peaks: dict[tuple[str, str], list[float]] = {}
    for row in record.content["rows"]:
        speed, peak = row["flops_per_second"], row["peak_flops_per_second"]
        if speed is None:
            continue
        at = (row["instruction_set"], row["dtype"])
        peaks.setdefault(at, []).append(peak)
        name = row["part"] if row["mask"] is None else f"{row['part']}, {row['mask']}"
        groups.setdefault((*at, row["head_dim"]), {})[name] = (
            f"{speed / 1e9:.0f} ({speed / peak:.0%})"
        )
    rows = [
        [
            instructions,
            dtype,
            str(head_dim),
            f"{statistics.median(peaks[instructions, dtype]) / 1e9:.0f}",
            *(cells.get(part, "-") for part in _TILE_PARTS),
        ]
        for (instructions, dtype, head_dim), cells in groups.items()
    ]
    header = ["instructions", "type", "head dim", "peak", *_TILE_PARTS]
    return "\n\n".join([_format(header, rows), _caption(record, page, record.content["what"])])


_TILE_PARTS = (
    "scores",
    "values",
    "forward, causal",
    "forward, full",
    "backward, causal",
    "backward, full",
)


def cpu_matrix_unit(page: Path) -> str:
    """PyTorch's bfloat16 forward, four times that, and ours as shares of the peak of the matrix unit."""
    if not (records.has("cpu-tiles") and records.has("cpu-two-cores")):
        return ""
    tiles, record = records.newest("cpu-tiles"), records.newest("cpu-two-cores")
    one_core = [
        row["peak_flops_per_second"] / 1e12
        for row in tiles.content["rows"]
        if (row["instruction_set"], row["dtype"]) == ("amx", "bfloat16")
    ]
    if not one_core:
        return ""
    cores = record.content["cores"]
    peak = cores * statistics.median(one_core)
    groups: dict[tuple[int, str, int], dict[str, float]] = {}
    for point in record.points:
        at = point.problem
        if at is not None and at.dtype == "bfloat16" and point.pass_name == "forward":
            values = groups.setdefault((at.head_dim, at.mask, at.length), {})
            values[point.contender] = point.tflops or 0.0
    rows, bounds = [], []
    for (head_dim, mask, length), values in sorted(groups.items()):
        if not (values.get("torch") and values.get("jattn")):
            continue
        ours, torch = values["jattn"], values["torch"]
        speeds = [f"{speed:.2f} ({speed / peak:.0%})" for speed in (ours, torch, 4 * torch)]
        bounds.append(peak / torch)
        rows.append(
            [str(head_dim), mask, str(length), *speeds, f"{ours / torch:.2f}", f"{bounds[-1]:.1f}"]
        )
    header = ["head dim", "mask", "length", "jattn", "torch", "4 x torch"]
    header += ["jattn / torch", "peak / torch"]
    mean = statistics.geometric_mean(bounds)
    sentence = (
        f"A pass that did nothing but products would be {mean:.1f} ({min(bounds):.1f} to"
        f" {max(bounds):.1f}) times as fast as torch."
    )
    what = f"bfloat16 forward, TFLOP/s and share of the peak, {cores} times that of one core: {peak:.2f}"
    return "\n\n".join(
        [
            _format(header, rows),
            sentence,
            _caption(record, page, what),
            _caption(tiles, page, "Peak"),
        ]
    )


def speed_features(page: Path) -> str:
    """Speed of each feature beside the plain problem of the same shape, on the GPU and on the CPU."""
    parts = []
    for ending, figure, what in FEATURE_RECORDS:
        if records.has(ending):
            record = records.newest(ending)
            parts += [
                f"![Speed by feature](images/{figure}.svg)",
                _features(record),
                _remarks(record, [p for p in record.points if p.contender == "jattn"]),
                _caption(record, page, what),
            ]
    words = (
        "One problem with each feature alone. A ratio is the time of the plain problem over that with the"
        " feature: above 1 where it hides pairs, whose tiles are left out."
    )
    return "\n\n".join(["## Features", words, *parts] if parts else [])


def _features(record: Record) -> str:
    points = {
        (p.name.split("feature-")[1], p.pass_name): p
        for p in record.points
        if p.contender == "jattn"
    }
    rows = []
    for name in dict.fromkeys(name for name, _ in points):
        cells = []
        for pass_name in ("forward", "forward+backward"):
            point, plain = points.get((name, pass_name)), points.get(("plain", pass_name))
            if point is None or plain is None:
                cells += ["-", "-"]
            else:
                milliseconds = point.median_us / 1e3
                cells += [f"{milliseconds:.3g}", f"{plain.median_us / point.median_us:.2f}"]
        backends = next(p.backends for (n, _), p in points.items() if n == name)
        rows.append([name, backends.split("/")[0], *cells])
    header = ["feature", "backend", "forward ms", "ratio", "both ms", "ratio"]
    return _format(header, rows)


def speed_feature_rivals(page: Path) -> str:
    """A bias with its gradient and a dense mask beside other implementations, in one run."""
    if not records.has(FEATURE_RIVALS):
        return ""
    record = records.newest(FEATURE_RIVALS)
    points = [p for p in record.points if p.tflops is not None]
    titles = records.contenders(points)
    groups = _rows_by(points, lambda point: (point.name.split("feature-")[1], point.pass_name))
    rows = [[*at, *_cells(row, titles, 0, TFLOPS)] for at, row in groups.items()]
    return "\n\n".join(
        [
            _format(["feature", "pass", *titles], rows),
            "Speed of `jattn` over others, geometric mean (least to most) of the rows: "
            f"{_ratios(list(groups.values()), titles)}. {_remarks(record, points)}",
            _caption(
                record,
                page,
                "A bias (1, 16, 4096, 4096) with its gradient, a mask (4, 1, 4096, 4096); TFLOP/s",
            ),
        ]
    )


def accuracy(page: Path) -> str:
    """Root mean square error against float64, relative to the root mean square of the values wanted."""
    parts = []
    for ending in ("cpu-accuracy", "h200-accuracy"):
        if not records.has(ending):
            continue
        record = records.newest(ending)
        rows = [
            [
                row["inputs"],
                row["dtype"],
                row["contender"],
                *(f"{row['rms'][name]:.1e}" if name in row["rms"] else "-" for name in _TENSORS),
            ]
            for row in record.content["rows"]
            if "rms" in row
        ]
        table = _format(["inputs", "type", "who", *_TENSORS], rows)
        parts += [
            table,
            _caption(
                record,
                page,
                f"Length {record.content['length']}: root mean square error over that of the values"
                " wanted",
            ),
        ]
    return "\n\n".join(parts)


_TENSORS = ("out", "dq", "dk", "dv")


def latency(page: Path) -> str:
    """What one small call costs before and after it is compiled."""
    parts = []
    for ending in ("cpu-latency", "h200-latency"):
        if not records.has(ending):
            continue
        record = records.newest(ending)
        rows = [
            [
                row["what"] + _compiled(row.get("kernels", {})),
                *(_milliseconds(row["seconds"].get(who)) for who in ("jattn", "jax.nn")),
            ]
            for row in record.content["rows"]
        ]
        table = _format(["milliseconds", "jattn", "jax.nn"], rows)
        parts += [table, _caption(record, page, record.content["what"])]
    return "\n\n".join(["## Latency", *parts] if parts else [])


def _compiled(kernels: dict[str, int]) -> str:
    """How many kernels a figure contains the run-time compilation of; empty if none."""
    [count] = kernels.values() or [0]
    return f" ({count} {'kernel' if count == 1 else 'kernels'})" if count else ""


# As benchmarks.score_functions and benchmarks.fusion name them.
SCORE_NAME = re.compile(r"score-(.+)-D(\d+)")
FUSION_NAME = re.compile(r"fusion-(.+)-D(\d+)-S(\d+)")


def score_functions(page: Path) -> str:
    """Score functions and masks as functions, beside FlexAttention and beside our arguments that mean the same."""
    columns = ["function", "head dim"]
    return _of_functions("h200-score-functions", SCORE_NAME, columns, page)


def learned_captures(page: Path) -> str:
    """Gradients of what score functions read, too."""
    columns = ["function", "head dim"]
    return _of_functions("h200-learned-captures", SCORE_NAME, columns, page)


def fusion(page: Path) -> str:
    """Attention that is written by hand, before and after `fuse_attention`."""
    columns = ["function", "head dim", "length"]
    return _of_functions("h200-fusion", FUSION_NAME, columns, page)


def _of_functions(which: str, form: re.Pattern[str], columns: list[str], page: Path) -> str:
    """A row for each case and pass of the newest record of a name, in milliseconds; empty without one.

    ``form``: of the names of cases, with a group for each of the columns.
    """
    if not records.has(which):
        return ""
    record = records.newest(which)
    titles = records.contenders(record.points)
    groups = _rows_by(record.points, lambda point: (point.name, point.pass_name))
    rows = []
    for (name, pass_name), row in groups.items():
        match = form.fullmatch(name)
        if match is None:
            raise LookupError(f"{record.path.name}: {name!r} is no case like {form.pattern}")
        rows.append([*match.groups(), pass_name, *_cells(row, titles, 2, MILLISECONDS)])
    what = f"{record.content['what']}, milliseconds"
    return "\n\n".join(
        [
            _format([*columns, "pass", *titles], rows),
            "Times as fast, geometric mean (least to most) of the rows that both have: "
            f"{_ratios(list(groups.values()), titles)}. {_remarks(record, record.points)}",
            _caption(
                record, page, f"{what}, {_NO_CELL}" if any("-" in row for row in rows) else what
            ),
        ]
    )


def training(page: Path) -> str:
    """Training steps of the example's language model with different attention."""
    if not records.has("h200-training"):
        return ""
    record = records.newest("h200-training")
    rows = record.content["rows"]
    titles = [
        records.TITLES.get(name, name) for name in dict.fromkeys(r["contender"] for r in rows)
    ]
    groups: dict[tuple[int, str], Row] = {}
    for row in rows:
        if row["median_ms"] is not None:
            title = records.TITLES.get(row["contender"], row["contender"])
            groups.setdefault((row["head_dim"], row["kind"]), {})[title] = Point(
                row["kind"], None, "step", title, row["median_ms"] * 1e3
            )
    table = _format(
        ["head dim", "rows", *titles],
        [
            [str(head_dim), _ROWS[kind], *_cells(row, titles, 1, MILLISECONDS)]
            for (head_dim, kind), row in groups.items()
        ],
    )
    what = f"{record.content['what']}, packed documents: segment ids for jattn, a dense mask for the others"
    return "\n\n".join([table, _caption(record, page, what)])


_ROWS = {"rows": "one document, causal", "documents": "packed documents"}


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    milliseconds = seconds * 1e3
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


TABLES: dict[str, Callable[[Path], str]] = {
    "backends": lambda _: _format(backend_table.rows()[0], backend_table.rows()[1:]),
    "backends-summary": lambda _: _format(backend_table.summary()[0], backend_table.summary()[1:]),
    "speed-h200": speed_h200,
    "speed-h200-sustained": speed_h200_sustained,
    "speed-h200-others": speed_h200_others,
    "cpu-machines": cpu_machines,
    "speed-h200-f32": speed_h200_f32,
    "speed-cpu": speed_cpu,
    "cpu-decode": cpu_decode,
    "cpu-short": cpu_short,
    "gpu-decode": gpu_decode,
    "cpu-tiles": cpu_tiles,
    "cpu-matrix-unit": cpu_matrix_unit,
    "speed-features": speed_features,
    "speed-feature-rivals": speed_feature_rivals,
    "accuracy": accuracy,
    "latency": latency,
    "training": training,
    "score-functions": score_functions,
    "learned-captures": learned_captures,
    "fusion": fusion,
}


def rewrite(page: Path) -> str:
    """The text of a page with every table written anew.

    Raises:
      LookupError: a table that does not exist, or whose record is missing.
    """

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise LookupError(
                f"{page.name}: no table is called {name!r}; there are {', '.join(TABLES)}"
            )
        return f"{match[1]}\n{TABLES[name](page)}\n\n{match[3]}"

    return _BLOCK.sub(table, page.read_text())


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites or checks the tables; returns 1 if a check finds one that differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    options = parser.parse_args(arguments)
    wrong = []
    for page in PAGES:
        text = rewrite(page)
        if text == page.read_text():
            continue
        if options.check:
            wrong.append(page)
        else:
            page.write_text(text)
            print(f"rewrote {page.relative_to(ROOT)}")
    for page in wrong:
        print(
            f"{page.relative_to(ROOT)}: a table is not what the code and benchmarks/results say; run"
            " make tables",
            file=sys.stderr,
        )
    stale = plot.stale() if options.check else []
    for name in stale:
        print(
            f"docs/images/{name}.svg: not drawn from the present record; run make tables",
            file=sys.stderr,
        )
    return 1 if wrong or stale else 0


if __name__ == "__main__":
    sys.exit(main())
