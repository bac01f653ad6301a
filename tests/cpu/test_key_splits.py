"""When the Hopper forward pass splits keys: only where blocks would be idle, and only what queries can see.

And when heads of a group share tiles.
"""

import dataclasses
from typing import Any

import jax
import pytest
from composition import listed_few_queries

from jattn.arguments import Call
from jattn.backends import flash_tiles
from jattn.backends.key_splits import (
    MOST_SPLITS,
    MULTIPROCESSORS,
    choose_splits,
    packs_heads,
    rows_of_query,
    without_idle_band,
)
from jattn.masks import Band
from jattn.spec import Dropout, Spec
from jattn.testing import inputs
from jattn.testing.cases import Case

CAUSAL = Band(right=0)
LOWER_RIGHT = Band(right=0, lower_right=True)


def spec(q_len: int, kv_len: int, heads: int, band: Band | None = None, batch: int = 1) -> Spec:
    return Spec(batch, q_len, kv_len, heads, heads, 128, 128, "bfloat16", 0.1, band=band or Band())


def spec_of(case: Case) -> Spec:
    found: list[Spec] = []

    def parse() -> None:
        (q, k, v), keywords = inputs.call_arguments(case, inputs.make(case))
        found.append(Call.parse(q, k, v, implementation=None, **keywords).spec)

    jax.eval_shape(parse)  # not run, or each conversion of an array would be compiled
    return found[0]


def splits(problem: Spec) -> int:
    return choose_splits(problem, 128, 128)


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        (spec(1024, 65_536, 8), range(2, 5)),
        (spec(1024, 65_536, 8, LOWER_RIGHT), range(2, 5)),
        (spec(1, 8192, 32), range(3, 17)),
        (spec(1, 8192, 1), range(16, MOST_SPLITS + 1)),
        # Enough items, too few keys, or keys that nobody sees.
        (spec(8192, 8192, 8), range(1, 2)),
        (spec(1, 8192, 32, batch=64), range(1, 2)),
        (spec(128, 256, 4), range(1, 2)),
        (spec(1024, 65_536, 8, CAUSAL), range(1, 2)),
        (spec(128, 65_536, 8, Band(left=100, right=0, lower_right=True)), range(1, 2)),
        (spec(0, 100, 8), range(1, 2)),
        (spec(100, 0, 8), range(1, 2)),
    ],
    ids=str,
)
def test_number_of_parts(problem: Spec, wanted: range) -> None:
    assert splits(problem) in wanted


def test_positions_may_see_any_key() -> None:
    """By index a single query under an upper-left causal band sees one key; its position may see all of them."""
    decode = spec(1, 32_768, 32, CAUSAL)
    assert splits(decode) == 1
    anywhere = dataclasses.replace(decode, positions=True)
    assert splits(anywhere) == splits(spec(1, 32_768, 32)) > 3
    # All keys that a window of positions sees are likely in one part.
    window = dataclasses.replace(anywhere, band=Band(left=1000, right=0))
    assert splits(window) == 1
    wide = dataclasses.replace(anywhere, band=Band(left=20_000, right=0))
    assert splits(wide) > 3


def test_parts_fill_the_device() -> None:
    for heads in (1, 3, 7, 20, 60):
        for q_len in (1, 129, 1000):
            problem = spec(q_len, 32_768, heads)
            items = heads * -(-q_len // 128)
            if items < MULTIPROCESSORS:
                parts = splits(problem)
                waves = -(-items * parts // MULTIPROCESSORS)
                idle = 1 - items * parts / (waves * MULTIPROCESSORS)
                alone = 1 - items / MULTIPROCESSORS
                most = parts == MOST_SPLITS
                assert most or idle < 0.3 or idle < alone / 2, (heads, q_len, parts)


def test_a_plan_says_how_often() -> None:
    problem = spec(1024, 65_536, 8)
    main, combine = flash_tiles.plan_forward(problem, for_few_queries=True).kernels.split(";")
    assert "partial_results=1" in main
    assert (
        combine == f"family=forward_combine arch=sm_90a element=bf16 key_splits={splits(problem)}"
    )
    assert "partial_results" not in flash_tiles.plan_forward(problem).kernels


DECODE = Spec(4, 1, 8192, 32, 8, 128, 128, "bfloat16", 0.1, band=LOWER_RIGHT, kv_lengths=True)


def test_an_idle_band_is_dropped() -> None:
    assert without_idle_band(DECODE).band == Band()
    for other in (
        dataclasses.replace(DECODE, band=CAUSAL),
        dataclasses.replace(DECODE, band=Band(left=5, lower_right=True)),
        dataclasses.replace(DECODE, q_lengths=True),
        dataclasses.replace(DECODE, q_len=2),
        dataclasses.replace(DECODE, alibi_slopes=(1, 32)),
    ):
        assert without_idle_band(other) == other


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_len": 64},
        {"q_lengths": True, "segments": True},
        {"band": Band(left=1000, right=0, lower_right=True)},
        {"positions": True},
        {"mask": (4, 1, 1, 8192)},
        {"bias": (4, 1, 1, 8192), "bias_dtype": "float32"},
        {"softcap": 30.0, "sinks": (1, 32), "scale": -0.1},
        {"num_heads": 24},
        {"num_heads": 64 * 8},
    ],
    ids=str,
)
def test_heads_of_a_group_share_tiles(changes: dict[str, Any]) -> None:
    assert packs_heads(dataclasses.replace(DECODE, **changes), 128)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 32},
        {"num_heads": 192 * 8},  # rounded up more than a tile
        {"q_len": 129},
        {"q_len": 65},  # four heads a group: three tiles instead of four
        {"q_len": 0},
        {"alibi_slopes": (1, 32)},
        {"dropout": Dropout((4, 32))},
        {"mask": (1, 32, 1, 8192)},
        {"bias": (4, 32, 1, 8192), "bias_dtype": "float32"},
        {"q_len": 2, "bias": (4, 1, 2, 8192), "bias_dtype": "float32"},
    ],
    ids=str,
)
def test_heads_stay_apart(changes: dict[str, Any]) -> None:
    problem = dataclasses.replace(DECODE, **changes)
    assert not packs_heads(problem, 128)
    if problem.q_len:
        assert "packed_heads" not in flash_tiles.plan_forward(problem, for_few_queries=True).kernels


@pytest.mark.parametrize(
    ("num_heads", "rows"), [(8, 1), (16, 2), (24, 4), (32, 4), (56, 8), (71 * 8, 128)]
)
def test_rows_of_a_query(num_heads: int, rows: int) -> None:
    assert rows_of_query(dataclasses.replace(DECODE, num_heads=num_heads)) == rows


@pytest.mark.parametrize(
    ("changes", "stages", "tile_kv"),
    [
        ({}, 3, 64),
        ({"segments": True}, 3, 64),
        ({"q_len": 16}, 3, 64),  # 64 rows
        ({"q_len": 17}, 2, 128),
        ({"num_kv_heads": 32, "q_len": 64}, 3, 64),
        ({"head_dim": 192, "head_dim_v": 192}, 3, 64),
        ({"positions": True}, 2, 128),
        ({"softcap": 30.0}, 3, 64),
        ({"softcap": 30.0, "segments": True}, 3, 64),
        ({"softcap": 30.0, "scale": -0.1}, 2, 128),  # not by the series
        ({"mask": (4, 1, 1, 8192)}, 3, 96),
        ({"bias": (4, 1, 1, 8192), "bias_dtype": "bfloat16"}, 3, 96),
        ({"num_kv_heads": 32, "mask": (4, 1, 1, 8192)}, 3, 96),  # heads apart
        ({"q_len": 4096, "mask": (4, 1, 1, 8192)}, 2, 128),
        ({"kv_len": 128, "mask": (4, 1, 1, 128)}, 2, 128),
        ({"head_dim": 256, "head_dim_v": 256}, 2, 64),
    ],
    ids=str,
)
def test_more_copies_are_under_way_for_few_queries(
    changes: dict[str, Any], stages: int, tile_kv: int
) -> None:
    problem = dataclasses.replace(DECODE, **changes)
    words = flash_tiles.plan_forward(problem, for_few_queries=True).kernels.split(";")[0].split()
    assert {f"stages={stages}", f"tile_kv={tile_kv}"} <= set(words)


def test_packed_heads_are_items_of_their_group() -> None:
    """Eight tiles of four heads each, so four times as many parts as 32 heads alone have."""
    one = dataclasses.replace(DECODE, batch=1)
    together = choose_splits(one, 128, 128, packed_heads=True)
    assert together >= 2 * choose_splits(one, 128, 128)
    main, combine = flash_tiles.plan_forward(one, for_few_queries=True).kernels.split(";")
    assert "packed_heads=1" in main
    assert f"key_splits={together}" in combine
    assert "packed_heads" not in flash_tiles.plan_forward(one).kernels


def test_random_few_queries_pack() -> None:
    """Enough of the problems that the GPU tier composes of random features are about packed heads."""
    packed = [case.name for case in listed_few_queries(30) if packs_heads(spec_of(case), 128)]
    assert len(packed) >= 10
