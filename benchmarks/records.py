"""Recorded runs: the JSON files of benchmarks/results, whichever program wrote them, as one kind of row.

A record is chosen by the end of its name ("h200-bf16"), and the newest one is the current one: names begin with a date.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import statistics
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

# How contenders are called in tables and plots; in the order in which they are shown.
TITLES = {
    "jattn:auto": "jattn",
    "jattn:flash": "jattn",
    "jattn:ragged": "jattn, by borders",
    "jattn:padded": "jattn, padded",
    "jattn:cpu": "jattn",
    "jattn": "jattn",
    "fused": "fused",
    "as written": "as written",
    "jattn, its argument": "jattn, by an argument",
    "jattn:mem_efficient": "jattn mem_efficient",
    "fa3-dew": "FlashAttention-3",
    "fa3-jax": "FlashAttention-3 (flash-attn3-jax)",
    "jax-cudnn": "jax cuDNN",
    "jax-cudnn padded": "jax cuDNN, padded",
    "torch-cudnn": "torch cuDNN",
    "torch-flash": "torch FlashAttention-2",
    "torch-efficient": "torch memory-efficient",
    "torch-flex": "torch FlexAttention",
    "tokamax": "tokamax",
    "jax-xla": "jax.nn",
    "jax.nn": "jax.nn",
    "torch-cpu": "torch",
    "torch": "torch",
}


_SHOWN_VERSIONS = {
    "jax": "jax",
    "nvidia-cudnn-cu13": "cuDNN",
    "torch": "torch",
    "tokamax": "tokamax",
    "dew-flash-attn-cu13": "FlashAttention-3 of dew-flash-attn-cu13",
    "flash-attn3-jax": "of flash-attn3-jax",
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """What tables and plots need to know of a measured problem."""

    dtype: str
    head_dim: int
    length: int
    is_causal: bool

    @property
    def mask(self) -> str:
        return "causal" if self.is_causal else "full"


@dataclasses.dataclass(frozen=True)
class Point:
    """One contender on one problem and pass."""

    name: str  # of the case
    problem: Problem | None  # None for a problem that is not a plain grid of lengths
    pass_name: str
    contender: str  # its title
    median_us: float
    tflops: float | None = None
    spread: float | None = None
    backends: str = ""
    rounds_us: tuple[float, ...] = ()
    enqueue_us: float | None = None  # the host's part of a call to another device

    @property
    def middle_us(self) -> tuple[float, float]:
        """Where the middle half of the rounds lies; the median twice in records without rounds."""
        if len(self.rounds_us) < 2:
            return self.median_us, self.median_us
        low, _, high = statistics.quantiles(self.rounds_us, n=4, method="inclusive")
        return low, high

    @property
    def is_bound_by_host(self) -> bool:
        """Whether most of the time of a call may be the host's, who starts it."""
        return self.enqueue_us is not None and self.enqueue_us > 0.8 * self.median_us


@dataclasses.dataclass(frozen=True)
class Record:
    """One recorded run."""

    path: Path
    content: dict[str, Any]
    points: tuple[Point, ...]

    @property
    def date(self) -> str:
        return str(self.content.get("date") or self.content["time"])[:10]

    def caption(self) -> str:
        """Device, date, commit, versions: what a number means nothing without."""
        content = self.content
        versions = content.get("versions", {})
        shown = [
            f"{title} {versions[name]}"
            for name, title in _SHOWN_VERSIONS.items()
            if name in versions
        ]
        commit = str(content.get("commit", "unknown"))[:7]
        changed = " with changes" if content.get("modified") else ""
        return ", ".join([content["device"], self.date, f"commit {commit}{changed}", *shown])

    def left_out(self, titles: Collection[str] = ()) -> list[str]:
        """What was not timed because of its results, as "who on what"; ``titles``: of these contenders, if given."""
        found: dict[str, None] = {}
        for row in self.content.get("rows", []):
            note = row.get("note") or ""
            at = f"{row.get('case')} {row.get('pass_name')}"
            title = TITLES.get(row.get("contender"), row.get("contender"))
            if note.startswith("WRONG"):
                if not titles or title in titles:
                    found[f"{title} on {at}"] = None
            elif "of the largest value off" in note:  # contenders were compared with each other
                found[f"all on {at} ({note})"] = None
        return list(found)

    def stamp(self) -> str:
        """Name and digest of the file: what is drawn from it carries this."""
        return f"{self.path.name} sha256 {hashlib.sha256(self.path.read_bytes()).hexdigest()[:16]}"


def newest(ending: str) -> Record:
    """Reads the newest record whose name, without the date, is ``ending``.

    Raises:
      LookupError: there is none.
    """
    found = sorted(RESULTS.glob(f"????-??-??-{ending}.json"))
    if not found:
        raise LookupError(f"benchmarks/results has no record *-{ending}.json")
    return read(found[-1])


def has(ending: str) -> bool:
    """Whether there is a record of that name."""
    return any(RESULTS.glob(f"????-??-??-{ending}.json"))


def first(endings: Sequence[str]) -> Record | None:
    """Reads the newest record of the first of the names that has one."""
    return next((newest(ending) for ending in endings if has(ending)), None)


def read(path: Path) -> Record:
    """Reads one record."""
    content = json.loads(path.read_text())
    points: list[Point] = []
    for row in content.get("rows", []):
        points += _points(row, on_cpu=content.get("platform") == "cpu")
    return Record(path, content, tuple(points))


def _points(row: dict[str, Any], *, on_cpu: bool) -> Iterable[Point]:
    if "contender" in row and row.get("median_us") is not None:
        title = TITLES.get(row["contender"], row["contender"])
        yield Point(
            name=row["case"],
            problem=problem_of(row["case"]),
            pass_name=row["pass_name"],
            contender="torch" if on_cpu and title.startswith("torch") else title,
            median_us=row["median_us"],
            tflops=row.get("tflops"),
            spread=row.get("spread"),
            backends=row.get("backends", ""),
            rounds_us=tuple(row.get("rounds_us", ())),
            enqueue_us=None if on_cpu else row.get("enqueue_us"),
        )
    elif "median_ms" in row and isinstance(row["median_ms"], dict):
        # Causal, batch 1, 8 heads of 64: the form of the first records of the CPU kernel.
        problem = Problem(row["dtype"], 64, row["length"], True)
        timed: dict[str, float] = row["median_ms"]
        for contender, value in timed.items():
            name = f"cpu {row['dtype']} {row['length']}"
            yield Point(name, problem, row["pass"], TITLES.get(contender, contender), value * 1e3)


_FORMS = (
    re.compile(r"bench-D(?P<head_dim>\d+)-S(?P<length>\d+)-(?P<mask>causal|full)$"),
    re.compile(r"D(?P<head_dim>\d+) (?P<mask>causal|full) (?P<length>\d+)$"),
    re.compile(r"bench-cpu-(?P<dtype>f32|bf16|f16)-(?P<mask>causal|full)$"),
    re.compile(
        r"(?P<dtype>float32|bfloat16|float16)-(?P<length>\d+)-d(?P<head_dim>\d+)-(?P<mask>causal|full)$"
    ),
    re.compile(
        r"bench-cpu-(?P<dtype>f32|bf16|f16)-D(?P<head_dim>\d+)-S(?P<length>\d+)-(?P<mask>causal|full)$"
    ),
)
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def problem_of(name: str) -> Problem | None:
    """Reads the problem out of the name of a case of a grid over head dims, lengths and causality."""
    for form in _FORMS:
        if match := form.match(name):
            words = match.groupdict()
            named = words.get("dtype") or "bf16"
            dtype = _DTYPES.get(named, named)
            # The cases of the CPU kernel leave out what they have in common.
            head_dim, length = int(words.get("head_dim") or 64), int(words.get("length") or 1024)
            return Problem(dtype, head_dim, length, words["mask"] == "causal")
    return None


def contenders(points: Sequence[Point]) -> list[str]:
    """The titles that appear, in the order of TITLES."""
    order = list(dict.fromkeys(TITLES.values()))
    return sorted(
        {point.contender for point in points},
        key=lambda title: order.index(title) if title in order else len(order),
    )
