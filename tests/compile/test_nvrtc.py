"""NVRTC compiles every kernel family from the headers inside the module, and says what is wrong with a variant."""

import re

import pytest
import resources
import toolchain

from jattn import _core
from jattn.backends import cuda_tiles
from jattn.masks import Band
from jattn.spec import Spec

KEYS = toolchain.one_key_per_family()
# Options that may be switched on together in every kernel of a folder. The planners of sm90 pick other tiles for
# dense masks, biases and dropout: test_flash_terms.py and test_flash_backward_terms.py.
FLAGS = {
    "sm80": dict.fromkeys(
        (
            "band",
            "lengths",
            "segments",
            "mask",
            "bias",
            "softcap",
            "positions",
            "sinks",
            "alibi",
            "dropout",
            "dropout_rows",
        ),
        1,
    ),
    "sm90": {"band": 1, "lengths": 1, "segments": 1, "softcap": 1},
}


@pytest.fixture(autouse=True)
def nvrtc() -> None:
    toolchain.require_nvrtc()


def compile_key(key: str) -> resources.Resources:
    code, log = _core.compile_kernel(key)
    entries = [name for name in toolchain.sections(code) if name.startswith(".text.")]
    assert entries == [".text.jattn_kernel"], "a unit has one entry point"
    return resources.read_log(key, log, len(code))


def test_every_family_has_a_sample() -> None:
    assert sorted(KEYS) == sorted(_core.kernel_families())


@pytest.mark.parametrize("family", KEYS)
def test_other_element(family: str) -> None:
    key = KEYS[family]
    compile_key(
        toolchain.vary(key, element="f16" if toolchain.word(key, "element") == "bf16" else "bf16")
    )


@pytest.mark.parametrize("family", KEYS)
def test_every_option_at_once(family: str) -> None:
    compile_key(toolchain.vary(KEYS[family], **FLAGS.get(family.split("_", maxsplit=1)[0], {})))


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize(
    "family", [f for f, key in KEYS.items() if '"sm90/' not in _core.kernel_unit_text(key)]
)
def test_every_architecture(family: str, arch: str) -> None:
    """Kernels that need nothing newer than sm_80 compile for every device from there on."""
    compile_key(toolchain.vary(KEYS[family], arch=arch))


def test_headers_include_only_each_other() -> None:
    """What NVRTC has from memory is all there is. One header gives the host its integer types."""
    headers = _core.kernel_headers()
    for name, text in headers.items():
        for included in re.findall(r"^\s*#\s*include\s+(\S+)", text, re.MULTILINE):
            host_only = name.endswith("base/types.cuh") and included == "<cstdint>"
            assert host_only or included.strip('"') in headers, f"{name} includes {included}"


def test_error_has_the_log() -> None:
    """A variant that a kernel's static_assert refuses fails with the compiler's words and the key."""
    key = "family=sm80_forward arch=sm_90 tile_kv=8 num_warps=32"
    with pytest.raises(RuntimeError, match=r"(?s)kernel family=sm80_forward.*error") as caught:
        _core.prepare_kernel(key)
    assert "num_warps=32" in str(caught.value)


def test_unknown_architecture() -> None:
    with pytest.raises(
        RuntimeError,
        match=r"arch=sm_999.*: NVRTC .* from sm_\d+ to sm_\d+: install one for this GPU",
    ):
        _core.prepare_kernel("family=sm80_forward arch=sm_999")


@pytest.mark.parametrize("arch", [(8, 0), (8, 6), (9, 0)])
@pytest.mark.parametrize("queries", [1, 32, 64])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("bfloat16", 64), ("float16", 128), ("float32", 128)]
)
def test_tiles_of_few_queries_do_not_spill(
    dtype: str, head_dim: int, queries: int, arch: tuple[int, int]
) -> None:
    few = Spec(2, queries, 8192, 4, 4, head_dim, head_dim, dtype, 0.1, band=Band(right=0))
    assert compile_key(cuda_tiles.plan_forward(few, arch).kernels).faults == ()
