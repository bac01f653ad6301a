"""Problems that use random subsets of all features at once; the tiers share them.

Few shapes, because what is compiled depends on them, and small ones: what is looked for here are features that
disturb each other. One definition serves hypothesis, which shrinks what fails, and plain lists, which name it.

Where several features hide pairs, queries may see next to nothing, and whatever is computed of nothing is right: such
problems are drawn again. That nothing is seen is a case of the table.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jattn.testing import inputs, oracle
from jattn.testing.cases import Case
from jattn.testing.compare import FEWEST_PAIRS
from jattn.testing.score_functions import SCORE_FUNCTIONS

T = TypeVar("T")
Pick = Callable[[Sequence[Any]], Any]
Shape = tuple[int, int, int, int, int]

# B, T, S, N, K: tails on both sides, T < S, T = S, T > S, groups of 1, 2 and all heads.
SHAPES = ((2, 33, 70, 4, 2), (2, 64, 64, 2, 2), (1, 97, 40, 3, 1))
# Where heads of a group share tiles or keys are split: groups that are a power of two and not, one tile and two.
FEW_QUERIES = (
    (2, 1, 2048, 8, 2),
    (3, 1, 1500, 6, 1),
    (2, 5, 1152, 12, 4),
    (1, 7, 4096, 4, 4),
    (3, 20, 300, 14, 2),
)
HEAD_DIMS = ((16, 16), (64, 64), (40, 24))
# Several tiles of queries and of keys, more items of work than a GPU has multiprocessors, every width of tiles.
LARGER = (
    (2, 300, 520, 4, 2),
    (1, 700, 700, 8, 2),
    (3, 257, 129, 6, 6),
    (4, 384, 384, 40, 8),
    (2, 1100, 640, 3, 1),
    (1, 130, 1500, 16, 16),
    (40, 200, 210, 4, 4),
)
WIDER = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
WIDER += ((32, 48), (72, 72), (128, 64), (200, 136))
FORMS = ("bnts", "1nts", "b1ts", "ts", "b11s", "1n1s", "11t1")
DTYPES = ("bfloat16", "float16", "float32")

# Every feature: how likely it is used, in tenths.
FEATURES = {
    "bias": 3,
    "mask": 3,
    "is_causal": 4,
    "window": 3,
    "lower_right": 4,
    "q_lengths": 3,
    "kv_lengths": 3,
    "segments": 4,
    "positions": 4,
    "softcap": 3,
    "sinks": 4,
    "alibi": 4,
    "dropout": 5,
    "dropout_rows": 5,
    "scale": 3,
    "dlse": 6,
    "score_mod": 3,
}
# Slopes and dropout keep heads of a group apart.
FEATURES_OF_FEW = FEATURES | {"alibi": 1, "dropout": 1}
FEATURES_OF_SUMS: Mapping[str, float] = {
    **{name: tenths / 3 for name, tenths in FEATURES.items()},
    "bias": 6,
    "alibi": 6,
    "score_mod": 6,
    "q_lengths": 5,
}
FEWEST_SEEING = 0.25  # of the queries of all heads
MOST_DRAWS = 50
FEATURES_OF_CUDNN = {
    name: FEATURES[name] + 1
    for name in ("is_causal", "window", "q_lengths", "kv_lengths", "scale", "dlse")
}


def problem(
    pick: Pick,
    used: frozenset[str],
    dtype: str,
    name: str = "composition",
    shapes: Sequence[Shape] = SHAPES,
    head_dims: Sequence[tuple[int, int]] = HEAD_DIMS,
) -> Case:
    """Makes a problem of one of the shapes that uses these features; `pick` chooses one of a sequence."""
    batch, q_len, kv_len, num_heads, num_kv_heads = pick(shapes)
    head_dim, head_dim_v = pick(head_dims)

    def optional(feature: str, choices: Sequence[T]) -> T | None:
        return pick(choices) if feature in used else None  # type: ignore[no-any-return]

    def lengths(feature: str, extent: int) -> tuple[int, ...] | None:
        choices = (extent, extent // 2, 1, 0, extent + 9)
        return tuple(pick(choices) for _ in range(batch)) if feature in used else None

    rows = {"dropout", "dropout_rows"} <= used
    segments = optional("segments", ("random", "interleaved")) or ("random" if rows else None)
    positions = optional("positions", ("shuffled", "shifted", "restart"))
    positions = positions or ("restart" if rows else None)
    bias_form = optional("bias", FORMS)
    return Case(
        name=name,
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        scale=optional("scale", (-0.3, 0.0, 0.7)),
        softcap=optional("softcap", (2.0, 30.0)),
        is_causal="is_causal" in used,
        lower_right="lower_right" in used and positions is None,
        window=optional("window", ((9, 4), (0, None), (None, 20), (30, 0))),
        bias_form=bias_form,
        bias_dtype=pick((dtype, "float64" if dtype == "float64" else "float32"))
        if bias_form is not None
        else None,
        mask_form=optional("mask", FORMS),
        mask_density=0.7,
        q_lengths=lengths("q_lengths", q_len),
        kv_lengths=lengths("kv_lengths", kv_len),
        segments=segments,
        positions=positions,
        sinks_form=optional("sinks", ("n", "bn")),
        alibi_form=optional("alibi", ("n", "bn")),
        dropout_rate=optional("dropout", (0.2, 0.5)) or 0.0,
        broadcast_dropout="dropout" in used and pick((False, False, True)),
        dropout_rows=rows,
        score_mod=optional("score_mod", tuple(SCORE_FUNCTIONS)),
        distribution=pick(("normal", "integers", "normal_x3")),
        with_dlse="dlse" in used,
    )


def shows_enough(case: Case) -> bool:
    """Whether enough queries see enough keys for the results to prove something, and the comparison judges them all.

    Told of a problem with other arrays, drawn in the same way, since those of the large ones take long.
    """
    sketch = dataclasses.replace(
        case, head_dim=1, head_dim_v=1, distribution="normal", bias_form=None, dtype="float32"
    )
    operands = inputs.make(sketch)
    visible = oracle.visibility(sketch, operands)
    if case.score_mod is not None and SCORE_FUNCTIONS[case.score_mod].hides:
        changed = oracle.change_scores(sketch, operands, np.zeros(visible.shape, np.float32))
        visible &= ~np.isneginf(changed.score)
    seen = visible.sum(axis=3)
    # Of a key alone the weight is 1 whatever its score, and nothing but the log-sum-exp pulls at it.
    pulled = seen if case.with_dlse or case.sinks_form else np.where(seen > 1, seen, 0)
    return bool((seen > 0).mean() >= FEWEST_SEEING and pulled.sum() >= FEWEST_PAIRS)


def redrawn(draw: Callable[[np.random.Generator], Case], seed: int) -> Case:
    """Draws a problem, and again until it shows enough; the same one every time.

    Raises:
      ValueError: it never does.
    """
    for attempt in range(MOST_DRAWS):
        case = draw(np.random.default_rng((seed, attempt)))
        if shows_enough(case):
            return case
    raise ValueError(f"of {MOST_DRAWS} problems none shows enough, the last one being {case}")


@functools.cache
def listed(count: int, dtypes: tuple[str, ...] = DTYPES) -> list[Case]:
    """The same `count` problems every time, each named by its number and its features."""
    return [_drawn(i, dtypes[i % len(dtypes)], FEATURES) for i in range(count)]


@functools.cache
def listed_few_queries(count: int) -> list[Case]:
    """The same for few queries of many keys, in 16 bits."""
    dtypes = ("bfloat16", "float16")
    return [_drawn(i, dtypes[i % 2], FEATURES_OF_FEW, FEW_QUERIES) for i in range(count)]


@functools.cache
def listed_larger(count: int, dtypes: tuple[str, ...] = DTYPES) -> list[Case]:
    """The same of larger problems; every fourth has few features, since many at once leave few pairs visible."""
    few = {name: tenths / 3 for name, tenths in FEATURES.items()}
    return [
        _drawn(i, dtypes[i % len(dtypes)], FEATURES if i % 4 else few, LARGER, WIDER)
        for i in range(count)
    ]


@functools.cache
def listed_sums(count: int, dtypes: tuple[str, ...] = DTYPES) -> list[Case]:
    """The same with what has a gradient that is summed over queries, beside queries that lengths hide."""
    return [
        _drawn(i, dtypes[i % len(dtypes)], FEATURES_OF_SUMS, LARGER, WIDER) for i in range(count)
    ]


@functools.cache
def listed_of_cudnn(
    count: int,
    shapes: tuple[Shape, ...] = LARGER,
    head_dims: tuple[tuple[int, int], ...] = WIDER,
) -> list[Case]:
    """The same with what cuDNN knows; of windows it takes those with no more queries than keys."""
    dtypes = ("bfloat16", "float16")
    windows = ((9, None), (0, None), (200, None))

    def drawn(i: int) -> Case:
        def known(case: Case) -> Case:
            if case.window is None:
                return case
            return dataclasses.replace(case, is_causal=True, window=windows[i % 3])

        return _drawn(i, dtypes[i % 2], FEATURES_OF_CUDNN, shapes, head_dims, known)

    return [drawn(i) for i in range(count)]


def _drawn(
    i: int,
    dtype: str,
    features: Mapping[str, float],
    shapes: Sequence[Shape] = SHAPES,
    head_dims: Sequence[tuple[int, int]] = HEAD_DIMS,
    known: Callable[[Case], Case] = lambda case: case,
) -> Case:
    """The problem of number `i`, changed by `known` to what is asked for."""

    def draw(rng: np.random.Generator) -> Case:
        used = frozenset(name for name, tenths in features.items() if rng.integers(10) < tenths)
        case = problem(
            lambda choices: choices[rng.integers(len(choices))],
            used,
            dtype,
            f"composition-{i}-{dtype}-{'-'.join(sorted(used))}",
            shapes,
            head_dims,
        )
        return known(case)

    return redrawn(draw, i)
