"""Forms of the Hopper forward kernel that the planner knows but does not pick: no spills, products in flight."""

import os
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
TURNS = {"take_turns": True}
SERIES = {"cap_series": True}
DOCUMENTS = {"documents": True}
CAUSAL = Band(right=0)
# Head dim, problem, changes of its tile, words of the key.
VARIANTS: dict[str, tuple[int, dict[str, object], dict[str, object]]] = {
    "softcap, series, turns": (128, {"softcap": 30.0}, SERIES | TURNS),
    "softcap, series, turns, last": (128, {"softcap": 30.0}, SERIES | TURNS | {"loop_order": 1}),
    "dropout, turns": (128, {"dropout": Dropout((2, 4))}, TURNS),
    "bias, turns": (128, {"bias": FULL, "bias_dtype": "bfloat16"}, TURNS),
    "bias 64, turns": (64, {"bias": FULL, "bias_dtype": "bfloat16"}, TURNS),
    "alibi, turns": (128, {"alibi_slopes": (1, 4), "band": CAUSAL}, TURNS),
    "documents": (128, {"segments": True, "band": CAUSAL}, DOCUMENTS),
    "documents 64": (64, {"segments": True, "band": CAUSAL}, DOCUMENTS),
}


def spec(head_dim: int, **terms: object) -> Spec:
    """A problem of some heads."""
    return Spec(2, 1024, 1024, 4, 4, head_dim, head_dim, "bfloat16", 0.1, **terms)  # type: ignore[arg-type]


def plan(name: str) -> Plan:
    """The plan of a variant."""
    head_dim, terms, changes = VARIANTS[name]
    with flash_tiles.forward_tile_changes(**changes):
        return flash_tiles.plan_forward(spec(head_dim, **terms))


@pytest.mark.parametrize("name", VARIANTS)
def test_compiles_well(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.require_nvrtc()
    key = plan(name).kernels.split(";")[0]
    assert {f"{member}=1" for member in VARIANTS[name][2]} <= set(key.split())
    code, log = _core.compile_kernel(key)
    assert resources.read_log(key, log).faults == ()
    if tool := toolchain.find_tool("cuobjdump"):
        monkeypatch.setenv("PATH", f"{Path(tool).parent}{os.pathsep}{os.environ['PATH']}")
        (tmp_path / "kernel.cubin").write_bytes(code)
        assert sm90_listing.describe(tmp_path / "kernel.cubin")[1] == []


def test_the_list_of_documents_has_its_pass_and_its_room() -> None:
    listed, plain = plan("documents"), flash_tiles.plan_forward(spec(128, segments=True))
    assert "family=document_tiles arch=sm_90a" in listed.kernels.split(";")
    assert "documents=1" not in plain.kernels
    tiles = 2 * (1024 // 128 + 1024)
    assert listed.scratch_bytes - plain.scratch_bytes == tiles * 32
    asked = _core.cuda_scratch_bytes(
        backward=False,
        kernels=listed.kernels,
        wants=(False,) * 4,
        batch=2,
        q_len=1024,
        kv_len=1024,
        num_heads=4,
        num_kv_heads=4,
        head_dim=128,
        head_dim_v=128,
        dtype="bfloat16",
        bias_shape=(0, 0, 0, 0),
        mask_shape=(0, 0, 0, 0),
        segments=True,
    )
    assert asked <= listed.scratch_bytes


@pytest.mark.parametrize(
    "terms",
    [
        {"segments": True, "kv_lengths": True},
        {"segments": True, "positions": True, "band": CAUSAL},
        {"segments": True, "sinks": (1, 4), "alibi_slopes": (1, 4)},
        {},
    ],
)
def test_changes_stay_away_where_they_cannot_go(terms: dict[str, object]) -> None:
    with flash_tiles.forward_tile_changes(take_turns=True, cap_series=True, documents=True):
        tile = flash_tiles.forward_tile(spec(96, **terms))
    assert not tile.documents
    assert not tile.cap_series
    assert tile.take_turns == (tile.loop_order != 2)
