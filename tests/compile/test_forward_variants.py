"""Forms of the Hopper forward kernel that few problems have: where they are picked, no spills, products in flight."""

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest
import resources
import sm90_listing
import toolchain

from jattn import _core
from jattn.backends import flash_tiles
from jattn.backends.kernel_plan import Plan
from jattn.masks import Band
from jattn.spec import Dropout, Spec

FULL = (1, 4, 1024, 1024)
SLOPES = {"alibi_slopes": (1, 4)}
CAP = {"softcap": 30.0}
CAUSAL = Band(right=0)
WINDOW = Band(left=100, right=0)
LONG = {"q_len": 4096, "kv_len": 4096}
DROPOUT = Dropout((2, 4))
ROW = {"bias": (1, 4, 1, 1024), "bias_dtype": "float32"}
FORMS = ("take_turns", "cap_series", "documents", "row_bias", "drops_beside")
# Head dims of q and v, problem, the forms that its kernel has.
VARIANTS: dict[str, tuple[tuple[int, int], dict[str, object], tuple[str, ...]]] = {
    "softcap": ((128, 128), CAP, ("cap_series",)),
    "softcap 64 causal": ((64, 64), CAP | {"band": CAUSAL}, ("take_turns", "cap_series")),
    "softcap 96": ((96, 96), CAP, ("cap_series",)),
    "softcap 192-128": ((192, 128), CAP, ("cap_series",)),
    "softcap 256 causal": ((256, 256), CAP | {"band": CAUSAL}, ("cap_series",)),
    "softcap dropout": ((128, 128), CAP | {"dropout": DROPOUT}, ("cap_series", "drops_beside")),
    "softcap dropout mask": (
        (128, 128),
        CAP | {"dropout": DROPOUT, "mask": FULL},
        ("drops_beside",),
    ),
    "softcap dropout 192": ((192, 192), CAP | {"dropout": DROPOUT}, ("drops_beside",)),
    "softcap mask": ((128, 128), CAP | {"mask": FULL}, ("cap_series",)),
    "alibi causal": ((128, 128), SLOPES | {"band": CAUSAL}, ()),
    "alibi 96": ((96, 96), SLOPES | {"sinks": (1, 4)}, ()),
    "dropout": ((128, 128), {"dropout": DROPOUT}, ("take_turns", "drops_beside")),
    "dropout causal": (
        (128, 128),
        {"dropout": DROPOUT, "band": CAUSAL},
        ("take_turns", "drops_beside"),
    ),
    "dropout 64": ((64, 64), {"dropout": DROPOUT, "kv_lengths": True}, ("drops_beside",)),
    "dropout 96": ((96, 96), {"dropout": DROPOUT, "band": WINDOW}, ("drops_beside",)),
    "dropout 192-128": ((192, 128), {"dropout": DROPOUT}, ("take_turns", "drops_beside")),
    "dropout 192": (
        (192, 192),
        {"dropout": DROPOUT, "sinks": (1, 4)},
        ("take_turns", "drops_beside"),
    ),
    "dropout 256": ((256, 256), {"dropout": DROPOUT, "band": CAUSAL}, ("drops_beside",)),
    "dropout mask": ((128, 128), {"dropout": DROPOUT, "mask": FULL}, ("drops_beside",)),
    "dropout documents": (
        (128, 128),
        {"dropout": DROPOUT, "segments": True, "band": CAUSAL},
        ("drops_beside",),
    ),
    "dropout slopes 96": (
        (96, 96),
        SLOPES | {"dropout": DROPOUT, "positions": True, "band": CAUSAL},
        ("drops_beside",),
    ),
    "dropout bias 64": (
        (64, 64),
        {"dropout": DROPOUT, "bias": FULL, "bias_dtype": "bfloat16"},
        ("drops_beside",),
    ),
    "dropout bias of floats": (
        (128, 128),
        {"dropout": DROPOUT, "bias": FULL, "bias_dtype": "float32"},
        ("drops_beside",),
    ),
    "64": ((64, 64), {}, ("take_turns",)),
    "64 causal": ((64, 64), {"band": CAUSAL}, ("take_turns",)),
    "64 window lengths": ((64, 64), {"kv_lengths": True, "band": WINDOW}, ("take_turns",)),
    "alibi 64": ((64, 64), SLOPES, ("take_turns",)),
    "documents": ((128, 128), {"segments": True}, ("documents",)),
    "documents 64": (
        (64, 64),
        {"segments": True, "band": CAUSAL},
        ("take_turns", "documents"),
    ),
    "documents 96": ((96, 96), {"segments": True, "band": CAUSAL}, ("documents",)),
    "documents 192": ((192, 192), {"segments": True}, ("documents",)),
    "documents 256": ((256, 256), {"segments": True, "band": WINDOW}, ("documents",)),
    "documents softcap": ((128, 128), {"segments": True} | CAP, ("cap_series", "documents")),
    "documents softcap 64": ((64, 64), {"segments": True} | CAP, ("cap_series", "documents")),
    "row of bias": ((128, 128), ROW, ("row_bias",)),
    "row of bias causal": ((128, 128), ROW | {"band": CAUSAL}, ("row_bias",)),
    "row of bias lengths": (
        (128, 128),
        ROW | {"band": WINDOW, "q_lengths": True, "kv_lengths": True, "sinks": (1, 4)},
        ("row_bias",),
    ),
    "row of bias mask": ((128, 128), ROW | {"mask": FULL}, ("row_bias",)),
    "row of bias positions": (
        (128, 128),
        ROW | {"positions": True, "band": CAUSAL},
        ("row_bias",),
    ),
    "row of bias dropout": (
        (128, 128),
        ROW | {"dropout": DROPOUT},
        ("take_turns", "row_bias", "drops_beside"),
    ),
    "row of bias grouped": (
        (128, 128),
        LONG | ROW | {"num_heads": 32, "num_kv_heads": 8, "bias": (2, 1, 1, 4096)},
        ("row_bias",),
    ),
    "row of bias 64": ((64, 64), ROW, ("take_turns", "row_bias")),
    "row of bias 64 segments": ((64, 64), ROW | {"segments": True}, ("row_bias",)),
    "row of bias 64 mask": ((64, 64), ROW | {"mask": FULL}, ("take_turns", "row_bias")),
    "row of bias 64 float16": (
        (64, 64),
        ROW | {"dtype": "float16", "bias_dtype": "float16"},
        ("take_turns", "row_bias"),
    ),
    "row of bias 64 causal": (
        (64, 64),
        ROW | {"band": CAUSAL},
        ("take_turns", "row_bias"),
    ),
    "row of bias 96": ((96, 96), ROW | {"band": CAUSAL}, ("row_bias",)),
    "row of bias 192-128": ((192, 128), ROW, ("row_bias",)),
    "row of bias 192": ((192, 192), ROW | {"band": CAUSAL}, ("row_bias",)),
    "row of bias 256": ((256, 256), ROW, ("row_bias",)),
    "row of bias 256 dropout mask": (
        (256, 256),
        ROW | {"dropout": DROPOUT, "mask": FULL},
        ("row_bias", "drops_beside"),
    ),
    "row of bias, negative scale": ((128, 128), ROW | {"scale": -0.1}, ("row_bias",)),
    "row of bias softcap": ((128, 128), ROW | CAP, ("row_bias",)),
    "row of bias slopes 64": ((64, 64), ROW | SLOPES, ("row_bias",)),
    "one number of bias": ((128, 128), ROW | {"bias": (2, 4, 1, 1)}, ("row_bias",)),
}
# Head dims, problem, exponentials of a tile before the wait for the output product, whether first tiles are halved.
ORDERS: dict[str, tuple[tuple[int, int], dict[str, object], int, bool]] = {
    "128": ((128, 128), {}, 20, False),
    "128 float16": ((128, 128), {"dtype": "float16"}, 20, False),
    "128 causal": ((128, 128), {"band": CAUSAL}, 20, True),
    "128 window lengths": ((128, 128), {"band": WINDOW, "kv_lengths": True}, 20, True),
    "128 documents": ((128, 128), {"segments": True, "band": CAUSAL}, 20, True),
    "192-128": ((192, 128), {}, 24, False),
    "192-128 causal": ((192, 128), {"band": CAUSAL}, 24, False),
    "64 causal": ((64, 64), {"band": CAUSAL}, 0, True),
    "64 documents": ((64, 64), {"segments": True, "band": CAUSAL}, 0, True),
}
# Problems that look like those above and have none of these forms.
WITHOUT: dict[str, tuple[int, dict[str, object]]] = {
    "softcap, negative scale": (128, CAP | {"scale": -0.1}),
    "softcap, alibi": (64, CAP | SLOPES),
    "softcap, bias": (128, CAP | {"bias": FULL, "bias_dtype": "bfloat16"}),
    "dropout, bias without room": (
        128,
        {"dropout": DROPOUT, "bias": FULL, "bias_dtype": "bfloat16"},
    ),
    "alibi, wide": (192, SLOPES),
    "alibi, mask": (128, SLOPES | {"mask": FULL}),
    "causal": (128, LONG | {"band": CAUSAL}),
    "causal 96": (96, LONG | {"band": CAUSAL}),
    "dropout by rows": (
        128,
        {"dropout": Dropout((2, 4), rows=True), "segments": True, "positions": True},
    ),
    "two terms 64": (64, SLOPES | {"mask": FULL}),
    "segments, lengths": (128, {"segments": True, "kv_lengths": True}),
    "segments, positions": (128, {"segments": True, "positions": True, "band": CAUSAL}),
    "segments, mask": (128, {"segments": True, "mask": FULL}),
    "segments, one tile": (128, {"segments": True, "q_len": 128}),
    "bias of queries": (128, ROW | {"bias": (1, 4, 1024, 1)}),
    "bias of pairs": (128, ROW | {"bias": FULL}),
}


# Few queries of groups of four: head dims, problem.
PACKED: dict[str, tuple[tuple[int, int], dict[str, object]]] = {
    "one query": ((128, 128), {"q_len": 1}),
    "window": (
        (128, 128),
        {"band": Band(left=100, right=0, lower_right=True), "q_lengths": True, "kv_lengths": True},
    ),
    "mask": ((128, 128), {"mask": (2, 1, 4, 8192)}),
    "row of bias": ((128, 128), {"bias": (2, 1, 1, 8192), "bias_dtype": "float32"}),
    "segments": ((128, 128), {"segments": True, "band": CAUSAL}),
    "positions": ((128, 128), {"positions": True, "band": WINDOW}),
    "softcap": ((128, 128), CAP),
    "all keys together": ((128, 128), {"batch": 64, "sinks": (1, 16), "band": CAUSAL}),
    "64": ((64, 64), {"batch": 64, "band": CAUSAL}),
    "96 float16": ((96, 96), {"dtype": "float16", "band": CAUSAL}),
    "192-128": ((192, 128), {"band": CAUSAL}),
    "256": ((256, 256), {"band": CAUSAL, "kv_lengths": True}),
    "everything": (
        (128, 128),
        CAP
        | {
            "mask": (2, 1, 4, 8192),
            "bias": (2, 1, 1, 8192),
            "bias_dtype": "float32",
            "segments": True,
            "positions": True,
            "band": WINDOW,
            "sinks": (1, 16),
            "q_lengths": True,
            "kv_lengths": True,
        },
    ),
}


def spec(*head_dims: int, **terms: object) -> Spec:
    """A problem of some heads."""
    plain = Spec(2, 1024, 1024, 4, 4, head_dims[0], head_dims[-1], "bfloat16", 0.1)
    return dataclasses.replace(plain, **terms)  # type: ignore[arg-type]


def forms(plan: Plan) -> tuple[str, ...]:
    """Which of the forms the kernel of a plan has."""
    words = plan.kernels.split(";")[0].split()
    return tuple(form for form in FORMS if f"{form}=1" in words)


def assert_compiles_well(key: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing spills, and products stay in flight as far as a disassembler is there to tell."""
    toolchain.require_nvrtc()
    code, log = _core.compile_kernel(key)
    assert resources.read_log(key, log).faults == ()
    if tool := toolchain.find_tool("cuobjdump"):
        monkeypatch.setenv("PATH", f"{Path(tool).parent}{os.pathsep}{os.environ['PATH']}")
        (folder / "kernel.cubin").write_bytes(code)
        assert sm90_listing.describe(folder / "kernel.cubin")[1] == []


@pytest.mark.parametrize("name", VARIANTS)
def test_picked_and_compiles_well(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_dims, terms, wanted = VARIANTS[name]
    plan = flash_tiles.plan_forward(spec(*head_dims, **terms))
    assert forms(plan) == wanted
    key = plan.kernels.split(";")[0]
    assert_compiles_well(key, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", PACKED)
def test_packed_heads_compile_well(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_dims, terms = PACKED[name]
    few = {"q_len": 4, "kv_len": 8192, "num_heads": 16} | terms
    key = flash_tiles.plan_forward(spec(*head_dims, **few), for_few_queries=True).kernels.split(
        ";"
    )[0]
    assert "packed_heads=1" in key.split()
    assert_compiles_well(key, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ORDERS)
def test_exponentials_lie_where_the_source_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_dims, terms, early, halves = ORDERS[name]
    toolchain.require_cuobjdump(monkeypatch)
    toolchain.require_nvrtc()
    plan = flash_tiles.plan_forward(spec(*head_dims, **terms))
    code, log = _core.compile_kernel(plan.kernels.split(";")[0])
    assert resources.read_log(name, log).faults == ()
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(code)
    listing = sm90_listing.listing(cubin)
    loop = sm90_listing.main_loop(listing)
    assert loop.in_shadow() == (early, 64)
    cached, multiply_adds = loop.cached()
    assert multiply_adds == 64
    assert cached > 32
    # Products of 64 queries with 64 keys; those with v have their right operand transposed.
    halved = [x for x in listing if "HGMMA.64x64x16" in x.text and "tnspB" not in x.text]
    assert len(halved) == (head_dims[0] // 16 if halves else 0)


def test_what_lies_beside_the_tiles_counts_in_shared_memory(tmp_path: Path) -> None:
    problems = []
    for head_dims, terms, wanted in VARIANTS.values():
        if "row_bias" in wanted:
            biased = spec(*head_dims, **terms)
            tile = flash_tiles.forward_tile(biased)
            problems += [(biased, dataclasses.replace(tile, row_bias=x)) for x in (False, True)]
        if "drops_beside" in wanted:
            dropped = spec(*head_dims, **terms)
            tile = flash_tiles.forward_tile(dropped)
            problems += [
                (dropped, dataclasses.replace(tile, drops_beside=x, tile_kv=tile_kv))
                for x in (False, True)
                for tile_kv in (32, 64, 96, 128)
            ]
    lines, counted = [], []
    for problem, tile in problems:
        key = _core.canonical_kernel_key(flash_tiles.forward_key(problem, tile))
        config = _core.kernel_unit_text(key).split("constexpr Config kConfig{")[1]
        lines.append(
            f"{{ constexpr Config c{{{config.split('};')[0]}}};"
            ' std::printf("%d\\n", forward_shared_bytes(c)); }'
        )
        counted.append(flash_tiles.forward_shared_bytes(tile, problem))
    text = '#include <cstdio>\n#include "sm90/shape.cuh"\nusing namespace jattn;\n'
    text += "using namespace jattn::sm90;\nint main() {\n" + "\n".join(lines) + "\n}"
    binary = toolchain.build_host_program(text, tmp_path)
    done = subprocess.run([binary], capture_output=True, text=True, check=True)
    assert [int(line) for line in done.stdout.split()] == counted


@pytest.mark.parametrize("name", WITHOUT)
def test_other_problems_have_none(name: str) -> None:
    head_dim, terms = WITHOUT[name]
    assert forms(flash_tiles.plan_forward(spec(head_dim, **terms))) == ()


@pytest.mark.parametrize(("head_dim", "tile_q"), [(64, 192), (128, 128), (256, 128)])
def test_the_list_of_documents_has_its_pass_and_its_room(head_dim: int, tile_q: int) -> None:
    packed = spec(head_dim, segments=True, band=CAUSAL)
    listed = flash_tiles.plan_forward(packed)
    with flash_tiles.forward_tile_changes(documents=False):
        grid = flash_tiles.plan_forward(packed)
    assert set(listed.kernels.split(";")) - set(grid.kernels.split(";")) == {
        listed.kernels.split(";")[0],
        "family=document_tiles arch=sm_90a",
    }
    tiles = 2 * 2 * -(-1024 // tile_q)
    assert listed.scratch_bytes - grid.scratch_bytes == tiles * 32
    asked = _core.cuda_scratch_bytes(
        backward=False,
        kernels=listed.kernels,
        wants=(False,) * 4,
        batch=2,
        q_len=1024,
        kv_len=1024,
        num_heads=4,
        num_kv_heads=4,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype="bfloat16",
        bias_shape=(0, 0, 0, 0),
        mask_shape=(0, 0, 0, 0),
        segments=True,
    )
    assert asked <= listed.scratch_bytes


def test_parts_of_the_keys_have_no_list_of_documents() -> None:
    few = spec(128, q_len=256, kv_len=65536, segments=True)
    assert forms(flash_tiles.plan_forward(few, for_few_queries=True)) == ()
    assert forms(flash_tiles.plan_forward(few)) == ("documents",)


def test_parts_of_the_keys_add_a_row_of_floats() -> None:
    few = spec(128, q_len=256, kv_len=65536, bias=(1, 4, 1, 65536), bias_dtype="float32")
    plan = flash_tiles.plan_forward(few, for_few_queries=True)
    assert "partial_results=1" in plan.kernels
    assert forms(plan) == ("row_bias",)


def test_turns_stay_away_from_tiles_in_series() -> None:
    with flash_tiles.forward_tile_changes(take_turns=True):
        in_series, wide = (flash_tiles.forward_tile(spec(head_dim)) for head_dim in (96, 128))
    assert in_series.in_series
    assert not in_series.take_turns
    assert wide.take_turns


def test_sums_are_trusted_where_rows_settle_at_zero(tmp_path: Path) -> None:
    """Elsewhere a probability refers to a maximum, or the bound is too near to sums of ordinary scores."""
    program = """
#include <cstdio>
#include "sm90/cap_series.cuh"
int main() {
  const double caps[] = {10.0, 25.0, 25.5, 30.0, 50.0, 55.4, 55.5, 60.0, 100.0, 250.0};
  for (double cap : caps) {
    std::printf("%d\\n", jattn::sm90::trusted_sum_log2(float(cap * 1.4426950408889634)) > 0.0);
  }
}
"""
    binary = toolchain.build_host_program(program, tmp_path)
    done = subprocess.run([binary], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0", "1", "1", "1", "1", "0", "0", "0", "0"]
