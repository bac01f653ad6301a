"""What the Hopper forward kernel adds to scores costs registers, not spills, and leaves its products in flight."""

import dataclasses
from pathlib import Path

import pytest
import resources
import sm90_listing
import toolchain

from jattn import _core
from jattn.backends import flash_tiles
from jattn.masks import Band
from jattn.spec import Dropout, Spec

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))

FULL = (1, 4, 1024, 1024)
TERMS: dict[str, dict[str, object]] = {
    "mask": {"mask": (1, 1, 1024, 1024)},
    "staged-bias": {"bias": FULL, "bias_dtype": "bfloat16"},
    "row-bias": {"bias": (1, 4, 1, 1024), "bias_dtype": "float32"},
    "row-negative-scale": {"bias": (1, 4, 1, 1024), "bias_dtype": "float32", "scale": -0.1},
    "direct-bias": {"bias": FULL, "bias_dtype": "float32"},
    "sinks": {"sinks": (1, 4)},
    "alibi": {"alibi_slopes": (1, 4)},
    "positions": {"positions": True, "band": Band(right=0), "alibi_slopes": (1, 4)},
    "dropout": {"dropout": Dropout((2, 4))},
    "dropout-rows": {"dropout": Dropout((2, 4), rows=True), "positions": True, "segments": True},
    "everything": {
        "mask": (1, 1, 1024, 1024),
        "bias": FULL,
        "bias_dtype": "bfloat16",
        "softcap": 30.0,
        "sinks": (1, 4),
        "alibi_slopes": (1, 4),
        "positions": True,
        "band": Band(right=0),
        "dropout": Dropout((2, 4)),
        "kv_lengths": True,
        "segments": True,
    },
}

# What the planner must ask of the kernel for a term.
WORDS = {
    "mask": ("mask=1",),
    "staged-bias": ("bias=1", "staged_bias=1", "bias_element=bf16"),
    "row-bias": ("bias=1", "row_bias=1", "bias_element=f32"),
    "row-negative-scale": ("bias=1", "row_bias=1", "bias_element=f32"),
    "direct-bias": ("bias=1", "bias_element=f32"),
    "sinks": ("sinks=1",),
    "alibi": ("alibi=1",),
    "positions": ("positions=1", "band=1", "alibi=1"),
    "dropout": ("dropout=1",),
    "dropout-rows": ("dropout=1", "dropout_rows=1", "positions=1", "segments=1"),
}


def problem(head_dims: tuple[int, int], **changes: object) -> Spec:
    """A problem of some heads with changes."""
    plain = Spec(2, 1024, 1024, 4, 4, *head_dims, "bfloat16", 0.1)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def forward_key(spec: Spec) -> str:
    """The key of the attention kernel in the plan."""
    return flash_tiles.plan_forward(spec).kernels.split(";")[0]


@pytest.mark.parametrize(
    ("term", "head_dims"),
    [(term, dims) for term in TERMS for dims in ((64, 64), (128, 128), (256, 256))]
    + [("everything", dims) for dims in ((96, 96), (192, 128), (192, 192))],
    ids=str,
)
def test_no_spills(term: str, head_dims: tuple[int, int]) -> None:
    toolchain.require_nvrtc()
    key = forward_key(problem(head_dims, **TERMS[term]))
    _, log = _core.compile_kernel(key)
    assert resources.read_log(key, log).faults == ()


@pytest.mark.parametrize("term", ["mask", "staged-bias", "dropout"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_products_stay_in_flight(
    term: str, head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolchain.require_nvrtc()
    toolchain.require_cuobjdump(monkeypatch)
    code, _ = _core.compile_kernel(forward_key(problem((head_dim, head_dim), **TERMS[term])))
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(code)
    _, faults = sm90_listing.describe(cubin)
    assert faults == []


@pytest.mark.parametrize("term", WORDS)
def test_key_says_what_the_problem_has(term: str) -> None:
    words = forward_key(problem((128, 128), **TERMS[term])).split()
    assert set(WORDS[term]) <= set(words)
    assert ("staged_bias=1" in words) == (term == "staged-bias")
    assert ("row_bias=1" in words) == (term in {"row-bias", "row-negative-scale"})


@pytest.mark.parametrize(
    ("shape", "dtype", "length", "staged"),
    [
        ((1, 4, 1024, 1024), "bfloat16", 1024, True),
        ((2, 1, 1024, 1024), "bfloat16", 1024, True),
        ((1, 4, 1024, 1024), "float32", 1024, False),  # another type than q
        ((1, 4, 1024, 1020), "bfloat16", 1020, False),  # rows off 16-byte boundaries
        ((1, 4, 1024, 1), "bfloat16", 1024, False),  # keys share it
    ],
)
def test_bias_is_staged_where_tiles_can_be_copied(
    shape: tuple[int, ...], dtype: str, length: int, staged: bool
) -> None:
    spec = problem((128, 128), kv_len=length, bias=shape, bias_dtype=dtype)
    assert ("staged_bias=1" in forward_key(spec)) == staged


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("term", TERMS)
def test_fits_into_shared_memory(term: str, head_dims: tuple[int, int]) -> None:
    spec = problem(head_dims, **TERMS[term])
    tile = flash_tiles.forward_tile(spec)
    assert flash_tiles.forward_shared_bytes(tile, spec) <= flash_tiles.MAX_SHARED_BYTES
