"""Figures of README and docs, drawn from the recorded runs: ``python -m benchmarks.plot``.

A figure whose record is missing is left out. Every figure names device, date and commit, and carries the digest of its
record, which the check of the tables compares. The same records give the same bytes, so that a figure changes only when
its record does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from benchmarks import records
from benchmarks.records import ROOT, Point, Record

FOLDER = ROOT / "docs" / "images"
COLOURS = {
    "jattn": "#1664c0",
    "FlashAttention-3": "#d1495b",
    "FlashAttention-3 (flash-attn3-jax)": "#e38b97",
    "jax cuDNN": "#5a9e3d",
    "torch cuDNN": "#9ccc7f",
    "torch FlashAttention-2": "#8a6fb0",
    "torch FlexAttention": "#b5a4cf",
    "torch memory-efficient": "#a08d7a",
    "tokamax": "#e0a030",
    "jax.nn": "#e0a030",
    "torch": "#8a6fb0",
}
STYLE = {
    "svg.fonttype": "none",  # letters, not their outlines: a tenth of the size
    "svg.hashsalt": "jattn",  # ids that do not change from run to run
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.facecolor": "white",
}


def _colour(title: str) -> str:
    return COLOURS.get(title, "#7f8c99")


def _finish(figure: Any, name: str, record: Record, what: str) -> None:
    figure.text(0.01, 0.01, f"{what}\n{record.caption()}", fontsize=6, color="#66727f")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    _save(figure, name, record)


def _save(figure: Any, name: str, record: Record) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None, "Source": record.stamp()})
    plt.close(figure)


def speed_h200(record: Record) -> None:
    """TFLOP/s by length: a panel for each head dim, mask and pass, with a matrix product as the ceiling."""
    points = [p for p in record.points if p.problem is not None and p.tflops is not None]
    points = [p for p in points if p.problem and p.problem.head_dim in (64, 128, 256)]
    panels = sorted({(p.problem.head_dim, p.problem.mask) for p in points if p.problem})
    passes = ("forward", "forward+backward")
    lengths = sorted({p.problem.length for p in points if p.problem})
    ceiling = record.content.get("matmul_tflops", {}).get("bfloat16")
    figure, axes = plt.subplots(
        len(passes), len(panels), figsize=(2.2 * len(panels) + 1, 5.2), sharey=True, squeeze=False
    )
    for row, pass_name in enumerate(passes):
        for column, (head_dim, mask) in enumerate(panels):
            axis = axes[row][column]
            for title in records.contenders(points):
                line = {
                    p.problem.length: p.tflops
                    for p in points
                    if p.problem
                    and (p.problem.head_dim, p.problem.mask) == (head_dim, mask)
                    and (p.contender, p.pass_name) == (title, pass_name)
                }
                if not line:
                    continue
                at = sorted(line)
                axis.plot(
                    [lengths.index(length) for length in at],
                    [line[length] for length in at],
                    marker="o",
                    markersize=3,
                    color=_colour(title),
                    linewidth=2 if title == "jattn" else 1.2,
                    label=title,
                    zorder=3 if title == "jattn" else 2,
                )
            if ceiling is not None:
                axis.axhline(ceiling, color="#66727f", linestyle=":", label="matrix product")
            axis.set_xticks(range(len(lengths)), [f"{n // 1024}k" for n in lengths])
            if row == 0:
                axis.set_title(f"head dim {head_dim}, {mask}", fontsize=9)
            if column == 0:
                axis.set_ylabel(f"{pass_name}\nTFLOP/s")
    axes[0][0].set_ylim(bottom=0)  # shared by all
    drawn: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, title in zip(*axis.get_legend_handles_labels(), strict=True):
            drawn.setdefault(title, handle)
    titles = list(drawn)
    figure.legend(list(drawn.values()), titles, loc="upper center", ncol=len(titles), fontsize=8)
    figure.subplots_adjust(top=0.86)
    figure.text(0.01, 0.005, f"bfloat16. {record.caption()}", fontsize=7, color="#66727f")
    figure.tight_layout(rect=(0, 0.03, 1, 0.94))
    _save(figure, "speed_h200", record)


def speed_cpu(record: Record) -> None:
    """Times as fast as torch (as the slowest, where it is not there): bars for each type, length and pass."""
    titles = records.contenders(record.points)
    groups: dict[str, dict[str, float]] = {}
    for point in record.points:
        at = point.problem
        if at is not None and at.head_dim == 64 and at.is_causal and at.length in (1024, 4096):
            groups.setdefault(_cpu_label(point), {})[point.contender] = point.median_us
    figure, axis = plt.subplots(figsize=(max(5.0, 0.95 * len(groups) + 1), 3.4))
    width = 0.8 / len(titles)
    for number, title in enumerate(titles):
        for place, times in enumerate(groups.values()):
            if title in times:
                value = times.get("torch", max(times.values())) / times[title]
                bar = axis.bar(
                    place + (number - (len(titles) - 1) / 2) * width,
                    value,
                    width,
                    color=_colour(title),
                    label=title if place == 0 else None,
                )
                axis.bar_label(bar, [f"{value:.2g}"], fontsize=7)
    axis.set_xticks(range(len(groups)), list(groups), fontsize=7)
    base = "torch" if "torch" in titles else "the slowest"
    axis.set_ylabel(f"times as fast as {base}")
    axis.legend(fontsize=8)
    _finish(figure, "speed_cpu", record, "causal, batch 1, 8 heads of 64")


def _cpu_label(point: Point) -> str:
    assert point.problem is not None
    kind = {"forward": "forward", "forward+backward": "both"}[point.pass_name]
    return f"{point.problem.dtype}\n{point.problem.length}\n{kind}"


def speed_features(record: Record) -> None:
    """Speed of each feature beside the plain problem, in FLOP/s of visible pairs."""
    _features(record, "speed_features", "bfloat16, batch 4, length 4096, 16 heads of 128")


def speed_features_cpu(record: Record) -> None:
    """The same on a CPU."""
    _features(record, "speed_features_cpu", "float32, batch 2, length 1024, 8 heads of 64")


def _features(record: Record, file: str, what: str) -> None:
    points = [p for p in record.points if p.contender == "jattn" and p.tflops is not None]
    names = list(dict.fromkeys(p.name for p in points))
    in_tera = max(p.tflops or 0.0 for p in points) >= 1
    figure, axis = plt.subplots(figsize=(0.75 * len(names) + 1.5, 3.4))
    for number, (pass_name, colour) in enumerate(
        (("forward", "#1664c0"), ("forward+backward", "#8ab6e6"))
    ):
        values = {p.name: p.tflops or 0.0 for p in points if p.pass_name == pass_name}
        axis.bar(
            [i + (number - 0.5) * 0.4 for i in range(len(names))],
            [values.get(name, 0.0) * (1 if in_tera else 1e3) for name in names],
            0.4,
            color=colour,
            label=pass_name,
        )
    shown = [name.split("feature-")[1] for name in names]
    axis.set_xticks(range(len(names)), shown, rotation=30, fontsize=8)
    axis.set_ylabel(f"{'T' if in_tera else 'G'}FLOP/s of visible pairs")
    axis.legend(fontsize=8)
    _finish(figure, file, record, what)


def memory(record: Record) -> None:
    """Memory of a call by length."""
    rows = [row for row in record.content["rows"] if "temp_bytes" in row]
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.2), sharey=True)
    for axis, pass_name in zip(axes, ("forward", "forward+backward"), strict=True):
        for name in dict.fromkeys(row["contender"] for row in rows):
            title = "jattn" if name == "auto" else records.TITLES.get(name, name)
            line = {
                row["length"]: row["temp_bytes"] / 2**20
                for row in rows
                if (row["contender"], row["pass_name"]) == (name, pass_name) and row["temp_bytes"]
            }
            axis.plot(
                list(line),
                list(line.values()),
                marker="o",
                markersize=3,
                label=title,
                color=_colour(title),
            )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sorted({row["length"] for row in rows}))
        axis.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}k")
        axis.set_title(pass_name, fontsize=9)
        axis.set_xlabel("length")
    axes[0].set_ylabel("MiB beside arguments and results")
    axes[0].legend(fontsize=8)
    _finish(figure, "memory", record, record.content["what"])


def accuracy(record: Record) -> None:
    """Errors of out and dq by contender, for each type and kind of inputs, over those of the textbook formulas."""
    rows = [row for row in record.content["rows"] if "rms" in row]
    kinds = list(dict.fromkeys((row["dtype"], row["inputs"]) for row in rows))
    textbook = {
        (row["dtype"], row["inputs"]): row["rms"] for row in rows if row["contender"] == "textbook"
    }
    names = [n for n in dict.fromkeys(row["contender"] for row in rows) if n != "textbook"]
    figure, axes = plt.subplots(1, len(kinds), figsize=(1.9 * len(kinds) + 1.2, 3.4), sharey=True)
    for axis, (dtype, inputs) in zip(axes, kinds, strict=True):
        for marker, tensor in (("o", "out"), ("^", "dq")):
            for place, name in enumerate(names):
                for row in rows:
                    if (row["dtype"], row["inputs"], row["contender"]) == (dtype, inputs, name):
                        axis.plot(
                            row["rms"][tensor] / textbook[dtype, inputs][tensor],
                            place,
                            marker,
                            color=_colour("jattn") if name.startswith("jattn") else "#e0a030",
                            markersize=5,
                            label=tensor if place == 0 else None,
                        )
        axis.axvline(1, color="#66727f", linestyle=":")
        axis.set_xlim(left=0)
        axis.set_title(f"{dtype}\n{inputs}", fontsize=8)
        axis.tick_params(labelsize=7)
    axes[0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0].invert_yaxis()
    axes[-1].legend(fontsize=7)
    _finish(figure, "accuracy", record, "Root mean square error over that of textbook formulas")


# The records that a figure may be drawn from, in order of preference, and what draws it.
FIGURES: dict[str, tuple[tuple[str, ...], Callable[[Record], None]]] = {
    "speed_h200": (("h200-hopper", "h200-bf16"), speed_h200),
    "speed_features": (("h200-features",), speed_features),
    "speed_features_cpu": (("cpu-features",), speed_features_cpu),
    "memory": (("h200-memory", "cpu-memory"), memory),
    "accuracy": (("h200-accuracy", "cpu-accuracy"), accuracy),
    "speed_cpu": (("cpu-two-cores",), speed_cpu),
}


def stale() -> list[str]:
    """The figures that are not drawn from their present record."""
    found = []
    for name, (endings, _) in FIGURES.items():
        record = records.first(endings)
        path = FOLDER / f"{name}.svg"
        if record is not None and not (path.exists() and record.stamp() in path.read_text()):
            found.append(name)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws the named figures, or all that have a record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"{', '.join(FIGURES)} (all)")
    wanted = parser.parse_args(arguments).figures or list(FIGURES)
    if unknown := set(wanted) - set(FIGURES):
        parser.error(f"no figure is called {', '.join(sorted(unknown))}")
    with mpl.rc_context(STYLE):
        for name in wanted:
            endings, draw = FIGURES[name]
            record = records.first(endings)
            if record is not None:
                draw(record)
                print(f"drew {(FOLDER / name).relative_to(ROOT)}.svg")
            else:
                print(f"left out {name}: no record {' or '.join(endings)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
