"""Predicts errors of the Hopper forward by what rows do about their maximum, and how often warps act. No GPU needed.

    python3 tools/model_settled_rows.py                                   # one head of 4096 causal queries of 128
    python3 tools/model_settled_rows.py --length 1024 --rules late-32 late-256

Tiles are 128 queries x 128 keys, the diagonal first, as a block takes them; a warp has 16 rows, and a thread of it two
columns of every eight. Scores are exact and sums are float32, so that what is left are weights rounded to bfloat16,
and the output. Errors are root mean squares over those of the values; "concerned" are the warps and tiles behind the
diagonal in which a rule acts. Outliers are those of benchmarks/accuracy.py.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

TILE = 128
WARP_ROWS = 16
LOG2_E = 1.4426950408889634

RULES = {
    "exact": "every tile: the maximum of all keys so far",
    "lazy-L": "the maximum moves where a score exceeds it by more than L, in base 2",
    "settled": "the maximum of the first tile stays",
    "flat-S": "rows settle if all of their warp have a sum above S behind the first tile; others are exact",
    "late-S": "settled, but a row moves where the columns of a thread sum up to more than S over a tile",
    "early-S": "the same, but the last 8 keys of a tile are not in the sums",
    "rounded": "settled, the output over the sum of rounded weights",
    "threads": "settled, the output over sums of a thread's columns of a tile, each rounded to bfloat16",
}


def bfloat16(x: npt.NDArray[np.floating]) -> Floats:
    """Rounds to bfloat16."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Head:
    """One head of causal self-attention.

    scores: (length, length) in base 2, -inf where hidden; values, out: (length, head dim), out in float64
    """

    scores: Floats
    values: Floats
    out: npt.NDArray[np.float64]


def draw(length: int, head_dim: int, *, outliers: bool, seed: int = 0) -> Head:
    """Draws query, key and value of normal numbers, of which one in a thousand may be an outlier."""
    random = np.random.default_rng(seed)

    def operand() -> npt.NDArray[np.float64]:
        x = random.normal(size=(length, head_dim))
        if outliers:
            there = random.random((length, head_dim)) < 0.001
            x = x + np.where(there, 10 * random.normal(size=(length, head_dim)), 0)
        return bfloat16(x).astype(np.float64)

    query, key, value = operand(), operand(), operand()
    scores = query @ key.T * (LOG2_E / np.sqrt(head_dim))
    scores[np.triu(np.ones((length, length), bool), 1)] = -np.inf
    weights = np.exp2(scores - scores.max(axis=1, keepdims=True))
    out = weights @ value / weights.sum(axis=1, keepdims=True)
    return Head(scores.astype(np.float32), value.astype(np.float32), out)


def by_warps(rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """(rows of a tile,) -> whether a row of the warp is, for every row."""
    return np.repeat(rows.reshape(-1, WARP_ROWS).any(axis=1), WARP_ROWS)


def forward(head: Head, rule: str) -> tuple[Floats, float]:
    """Computes the output by a rule.

    Returns:
      The output, and the share of warps and tiles behind the diagonal that the rule concerns.
    """
    name, _, number = rule.partition("-")
    limit = float(number or 0)
    length, head_dim = head.values.shape
    out = np.zeros((length, head_dim), np.float32)
    acted = visits = 0
    for first in range(0, length, TILE):
        rows = slice(first, first + TILE)
        row_max = head.scores[rows, rows].max(axis=1)
        sums, rounded_sums = np.zeros(TILE, np.float32), np.zeros(TILE, np.float32)
        total = np.zeros((TILE, head_dim), np.float32)
        follows = np.zeros(TILE, bool)
        for begin in range(first, -1, -TILE):
            keys = slice(begin, begin + TILE)
            tile = head.scores[rows, keys]
            largest = tile.max(axis=1)
            by_thread = np.exp2(tile - row_max[:, None]).reshape(TILE, TILE // 8, 4, 2)
            if name == "exact":
                moves = largest > row_max
            elif name == "lazy":
                moves = largest > row_max + limit
            elif name == "flat":
                if begin == first - TILE:
                    follows = by_warps(sums <= limit)
                moves = follows & (largest > row_max)
            elif name in ("late", "early"):
                counted = by_thread[:, : TILE // 8 - (name == "early")]
                moves = (counted.sum(axis=(1, 3)) > limit).any(axis=1) & (largest > row_max)
            else:
                moves = np.zeros(TILE, bool)
            if begin < first:
                concerned = follows if name == "flat" else moves
                acted += by_warps(concerned).sum() // WARP_ROWS
                visits += TILE // WARP_ROWS
            moved = np.where(moves, largest, row_max)
            factor = np.exp2(row_max - moved)
            row_max = moved
            weights = np.exp2(tile - row_max[:, None])
            threads = weights.reshape(TILE, TILE // 8, 4, 2).sum(axis=(1, 3))
            sums = sums * factor + weights.sum(axis=1)
            kept = bfloat16(threads) if name == "threads" else bfloat16(weights)
            rounded_sums = rounded_sums * factor + kept.sum(axis=1)
            total = total * factor[:, None] + bfloat16(weights) @ head.values[keys]
        over = rounded_sums if name in ("rounded", "threads") else sums
        out[rows] = total / over[:, None]
    return bfloat16(out), acted / max(visits, 1)


def apply(heads: Sequence[Head], rule: str) -> tuple[float, float]:
    """Returns the error of a rule over heads, and the mean share of warps and tiles that it concerns."""
    wrong, right, shares = 0.0, 0.0, []
    for head in heads:
        out, share = forward(head, rule)
        wrong += float(np.square(out - head.out).sum())
        right += float(np.square(head.out).sum())
        shares.append(share)
    return float(np.sqrt(wrong / right)), float(np.mean(shares))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="rules: " + "; ".join(f"{name}: {text}" for name, text in RULES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--length", type=int, default=4096, help=f"a multiple of {TILE}")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=1, help="drawn, of each kind (%(default)s)")
    default = "exact lazy-8 settled flat-3 flat-5 threads rounded late-32 late-8 late-4 early-32"
    parser.add_argument("--rules", nargs="+", default=default.split())
    options = parser.parse_args(arguments)
    if options.length % TILE:
        parser.error(f"--length {options.length}: must be a multiple of {TILE}")
    kinds = [
        [
            draw(options.length, options.head_dim, outliers=outliers, seed=seed)
            for seed in range(options.heads)
        ]
        for outliers in (False, True)
    ]
    print(f"{'':10s}{'normal':>10s}{'concerned':>11s}{'outliers':>10s}{'concerned':>11s}")
    for rule in options.rules:
        results = [apply(heads, rule) for heads in kinds]
        print(f"{rule:10s}" + "".join(f"{error:10.2e}{share:11.1%}" for error, share in results))


if __name__ == "__main__":
    main()
