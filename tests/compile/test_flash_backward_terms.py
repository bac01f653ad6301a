"""What the Hopper backward kernels add to scores costs registers, not spills; Python counts shared memory alike."""

import contextlib
import dataclasses
import itertools
import re
import subprocess
from pathlib import Path

import pytest
import resources
import test_flash_terms
import toolchain

from jattn import _core
from jattn.backends import flash_backward_tiles as tiles
from jattn.backends.flash_tiles import MAX_SHARED_BYTES
from jattn.masks import Band
from jattn.spec import Spec

HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))
# Sinks are in the lse; what the backward is given has none.
TERMS = {name: terms for name, terms in test_flash_terms.TERMS.items() if name != "sinks"}
TERMS["everything"] = {name: x for name, x in TERMS["everything"].items() if name != "sinks"}
FORMS = {"fused": False, "two-kernels": True}


def attention_keys(spec: Spec, *, deterministic: bool) -> list[str]:
    """The keys of the kernels with products in the plan of all gradients; deterministic: with a kernel for dq."""
    with tiles.dq_order(0) if deterministic else contextlib.nullcontext():
        plan = tiles.plan_backward(
            spec,
            wants=(True, True, True, spec.bias is not None),
            deterministic=deterministic,
        )
    return [key for key in plan.kernels.split(";") if key.startswith("family=sm90_backward")]


# Narrow heads by both forms; wide ones, which have one form, with the terms that take most.
COMPILED = [(term, form, (64, 64)) for term in TERMS for form in FORMS]
COMPILED += [(term, "fused", dims) for term in TERMS for dims in ((128, 128), (192, 192))]
COMPILED += [(term, "fused", (256, 256)) for term in ("staged-bias", "direct-bias", "dropout-rows")]


# Bytes of registers that fused kernels may spill: a few are short with everything at once, or with slopes by positions.
MOST_SPILLED = {
    ("positions", (128, 128)): 40,
    ("everything", (128, 128)): 96,
    ("everything", (192, 192)): 16,
}


@pytest.mark.parametrize(("term", "form", "head_dims"), COMPILED, ids=str)
def test_no_spills(term: str, form: str, head_dims: tuple[int, int]) -> None:
    toolchain.require_nvrtc()
    spec = test_flash_terms.problem(head_dims, **TERMS[term])
    for key in attention_keys(spec, deterministic=FORMS[form]):
        _, log = toolchain.compile_once(key)
        kernel = resources.read_log(key, log)
        most = MOST_SPILLED.get((term, head_dims), 0) if "family=sm90_backward " in key else 0
        if most:
            assert max(kernel.spill_stores, kernel.spill_loads) <= most, key
            kernel = dataclasses.replace(kernel, stack=0, spill_stores=0, spill_loads=0)
        assert kernel.faults == (), key


# Problems of kernels with a warpgroup for dq, and the reductions of a thread: 0 where a warp has bulk reductions.
WITH_DQ_WARPGROUP: dict[str, tuple[tuple[int, int], dict[str, object], int]] = {
    "full": ((192, 192), {}, 0),
    "band-segments": ((192, 192), {"segments": True, "band": Band(right=0)}, 0),
    "lengths": ((192, 128), {"kv_lengths": True}, 0),
    "wider-values": ((128, 192), {"band": Band(right=0)}, 0),
    "mask": ((192, 192), TERMS["mask"], 192 // 8),  # no room for staged reductions
    "staged-bias": ((192, 192), TERMS["staged-bias"], 192 // 8),
    "staged-bias-128": ((192, 128), TERMS["staged-bias"], 0),
}


@pytest.mark.parametrize("name", WITH_DQ_WARPGROUP)
def test_dq_warpgroup(name: str, tmp_path: Path) -> None:
    """Its registers suffice, no product waits for another, and reductions are its own."""
    toolchain.require_nvrtc()
    head_dims, changes, reductions = WITH_DQ_WARPGROUP[name]
    spec = test_flash_terms.problem(head_dims, **changes)
    [key] = [
        key
        for key in attention_keys(spec, deterministic=False)
        if toolchain.word(key, "family") == "sm90_backward"
    ]
    assert "num_warps=16" in key.split()
    assert ("bulk_reduce=1" in key.split()) == (reductions == 0)
    code, log = toolchain.compile_once(key)
    assert resources.read_log(key, log).faults == ()
    text = toolchain.disassemble(code, tmp_path)
    assert text.count("USETMAXREG") == 3
    assert text.count("REDG.E.ADD.F32x4") == reductions
    assert text.count("UBLKRED.G.S.ADD.F32") == (0 if reductions else 2)


# Terms of kernels whose blocks can take item after item, forced where they are not picked so.
OF_ITEMS = [
    (term, dims)
    for term in ("plain", "band", "lengths", "segments", "dropout")
    for dims in HEAD_DIMS
]


@pytest.mark.parametrize(("term", "head_dims"), OF_ITEMS, ids=str)
def test_resident_blocks(term: str, head_dims: tuple[int, int], tmp_path: Path) -> None:
    """They serialise no products, spill little, and need a counter where they are used at all."""
    changes = {
        "plain": {},
        "band": {"band": Band(right=0)},
        "lengths": {"q_lengths": True, "kv_lengths": True},
        "segments": {"segments": True, "band": Band(right=0)},
    } | TERMS
    spec = test_flash_terms.problem(head_dims, **changes[term])
    plans = []
    for there in (False, True):
        with tiles.resident_blocks(there):
            plans.append(
                tiles.plan_backward(spec, wants=(True, True, True, False), deterministic=False)
            )
    apart, resident = plans
    canonical = [_core.canonical_kernel_key(key) for key in resident.kernels.split(";")]
    keys = {toolchain.word(key, "family"): key for key in canonical}
    if max(head_dims) > 128 or head_dims[0] != head_dims[1]:
        assert resident == apart
        return
    assert resident.scratch_bytes > apart.scratch_bytes
    assert "schedule=2" in keys["sm90_backward"].split()
    # Where threads compute numbers between their products, turns lose more than they win; drop warps spare them that.
    beside = term == "dropout" and max(head_dims) > 64
    assert ("drops_beside=1" in keys["sm90_backward"].split()) == beside
    assert ("take_turns=1" in keys["sm90_backward"].split()) == (beside or term != "dropout")
    assert "schedule" not in apart.kernels
    toolchain.require_nvrtc()
    code, log = toolchain.compile_once(keys["sm90_backward"])
    kernel = resources.read_log(keys["sm90_backward"], log)
    assert kernel.faults == ()
    assert "ATOMG" in toolchain.disassemble(code, tmp_path)


CAUSAL = {"band": Band(right=0)}
SEGMENTS = {"segments": True}
# Terms beside dropout that leave drop warps and items their registers, and some that do not.
BESIDE_DROPOUT: dict[str, dict[str, object]] = {
    "segments": SEGMENTS,
    "segments-causal": SEGMENTS | CAUSAL | {"dtype": "float16"},
    "positions": {"positions": True, "kv_lengths": True} | CAUSAL,
    "mask": TERMS["mask"] | {"q_lengths": True, "kv_lengths": True},
    "slopes": TERMS["alibi"] | CAUSAL,
    "row-bias": TERMS["row-bias"],
}
CROWDED: dict[str, dict[str, object]] = {
    "segments-lengths": SEGMENTS | {"kv_lengths": True},
    "mask-slopes": TERMS["mask"] | TERMS["alibi"],
    "staged-bias": TERMS["staged-bias"],
}


def fused_key(head_dims: tuple[int, int], **changes: object) -> str:
    """The canonical key of the fused kernel."""
    spec = test_flash_terms.problem(head_dims, **changes)
    plan = tiles.plan_backward(spec, wants=(True, True, True, False), deterministic=False)
    [key] = [key for key in plan.kernels.split(";") if key.startswith("family=sm90_backward ")]
    return _core.canonical_kernel_key(key)


@pytest.mark.parametrize("name", BESIDE_DROPOUT)
def test_drop_warps_beside_a_term(name: str) -> None:
    toolchain.require_nvrtc()
    key = fused_key((128, 128), **TERMS["dropout"], **BESIDE_DROPOUT[name])
    assert {"drops_beside=1", "take_turns=1", "schedule=2"} <= set(key.split())
    _, log = toolchain.compile_once(key)
    assert resources.read_log(key, log).faults == ()


DROPS_ALONE: dict[str, dict[str, object]] = {
    "alone": {},
    "float16": {"dtype": "float16"},
    "causal": CAUSAL,
    "lengths": {"q_lengths": True, "kv_lengths": True},
    "lengths-causal": {"kv_lengths": True} | CAUSAL,
    "window": {"band": Band(left=100, right=30)},
}


def dq_order_beside_drops(head_dims: tuple[int, int], **changes: object) -> tuple[str, str]:
    """The order of sums of dq where drop warps find what dropout removes, and the kernel's key."""
    key = fused_key(head_dims, **TERMS["dropout"], **changes)
    assert {"drops_beside=1", "take_turns=1", "schedule=2"} <= set(key.split())
    return toolchain.word(key, "dq_order"), key


@pytest.mark.parametrize("name", DROPS_ALONE)
def test_one_warp_adds_dq_up_beside_drop_warps(name: str) -> None:
    toolchain.require_nvrtc()
    order, key = dq_order_beside_drops((128, 128), **DROPS_ALONE[name])
    assert order == "1"
    assert "key_register_steps=2" in key.split()
    _, log = toolchain.compile_once(key)
    assert resources.read_log(key, log).faults == ()


@pytest.mark.parametrize("changes", [{}, *BESIDE_DROPOUT.values(), *DROPS_ALONE.values()], ids=str)
@pytest.mark.parametrize("dropout", [{}, TERMS["dropout"]], ids=["", "dropout"])
def test_narrower_heads_share_the_kernel(
    dropout: dict[str, object], changes: dict[str, object]
) -> None:
    narrow, wide = (fused_key(dims, **dropout, **changes) for dims in ((96, 96), (128, 128)))
    assert narrow == wide


def test_consumers_add_dq_up_beside_many_queries_or_a_term() -> None:
    for changes, most in (({}, 4096), (CAUSAL, 2048)):
        for q_len, order in ((most, "1"), (most + 1, "0")):
            assert dq_order_beside_drops((128, 128), q_len=q_len, **changes)[0] == order
    for changes in BESIDE_DROPOUT.values():
        assert dq_order_beside_drops((128, 128), **changes)[0] == "0"


@pytest.mark.parametrize("name", [*CROWDED, "gradient of a row-bias", "deterministic"])
def test_no_drop_warps_without_registers(name: str) -> None:
    """Nor where the same bits are asked for, or a kernel of its own would read the statistics."""
    row = TERMS["row-bias"] if name == "gradient of a row-bias" else {}
    terms = CROWDED.get(name, row)
    spec = test_flash_terms.problem((128, 128), **TERMS["dropout"], **terms)
    wants = (True, True, True, bool(row))
    plan = tiles.plan_backward(spec, wants=wants, deterministic=name == "deterministic")
    assert "drops_beside" not in plan.kernels


# Steps of the scores' product that take k from registers, beside warps that add dq up: what does not spill.
WITH_KEYS_IN_REGISTERS: dict[str, tuple[dict[str, object], int]] = {
    "plain": ({}, 3),
    "float16": ({"dtype": "float16"}, 3),
    "causal": ({"band": Band(right=0), "scale": -0.1}, 3),
    "lengths": ({"q_lengths": True, "kv_lengths": True, "band": Band(right=0)}, 3),
    "segments": ({"segments": True, "band": Band(right=0)}, 3),
    "softcap": ({"softcap": 30.0, "band": Band(right=0)}, 2),
    "bias": (TERMS["staged-bias"], 0),
    "row-bias": (TERMS["row-bias"], 0),
    "alibi": ({"alibi_slopes": (1, 4), "kv_lengths": True}, 0),
    "positions": ({"positions": True, "band": Band(right=0)}, 0),
    "softcap-segments": ({"softcap": 30.0, "segments": True}, 0),
}


@pytest.mark.parametrize("name", WITH_KEYS_IN_REGISTERS)
def test_keys_in_registers(name: str, tmp_path: Path) -> None:
    changes, steps = WITH_KEYS_IN_REGISTERS[name]
    key = fused_key((128, 128), **changes)
    assert {"dq_order=1", f"key_register_steps={steps}"} <= set(key.split())
    toolchain.require_nvrtc()
    counts = []
    for in_registers in sorted({0, steps}):
        varied = toolchain.vary(key, key_register_steps=in_registers)
        code, log = toolchain.compile_once(varied)
        if in_registers == steps:
            assert resources.read_log(varied, log).faults == ()
        text = toolchain.disassemble(code, tmp_path)
        counts.append(len(re.findall(r"HGMMA\S* R\d+, R\d+", text)))
    # The products of dk and dv take p and ds from there: a step for 16 queries.
    others = 2 * int(toolchain.word(key, "tile_q")) // 16
    assert counts == [others + count for count in sorted({0, steps})]


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256)])
def test_other_head_dims_have_no_dq_warpgroup(head_dims: tuple[int, int]) -> None:
    """It loses at the narrow ones, and there are no registers for it at the widest."""
    for deterministic in FORMS.values():
        keys = attention_keys(test_flash_terms.problem(head_dims), deterministic=deterministic)
        assert all("num_warps=12" in key.split() for key in keys)


def test_strict_has_no_dq_warpgroup() -> None:
    keys = attention_keys(test_flash_terms.problem((192, 192)), deterministic=True)
    families = [toolchain.word(key, "family") for key in keys]
    assert families == ["sm90_backward_dkv", "sm90_backward_dq"]


@pytest.mark.parametrize("term", TERMS)
def test_keys_say_what_the_problem_has(term: str) -> None:
    spec = test_flash_terms.problem((128, 128), **TERMS[term])
    wanted = set(test_flash_terms.WORDS.get(term, ()))
    for deterministic in FORMS.values():
        keys = attention_keys(spec, deterministic=deterministic)
        families = {key.split()[0].removeprefix("family=") for key in keys}
        main = {"sm90_backward_dkv", "sm90_backward_dq"} if deterministic else {"sm90_backward"}
        stores_ds = tiles.can_store_ds(spec)
        assert stores_ds == (term == "staged-bias")
        sums_bias = tiles.can_sum_bias(spec)
        assert sums_bias == (term in {"row-bias", "row-negative-scale"})
        own_kernel = spec.bias is not None and not stores_ds and not sums_bias
        assert families == main | ({"sm90_backward_dbias"} if own_kernel else set())
        assert sum("stores_ds=1" in key.split() for key in keys) == int(stores_ds)
        assert sum("sums_bias=1" in key.split() for key in keys) == int(sums_bias)
        for key in keys:
            assert wanted <= set(key.split())


@pytest.mark.parametrize(
    ("change", "stored"),
    [
        ({}, True),
        ({"bias": (2, 4, 1024, 1024)}, True),
        ({"bias": (1, 1, 1024, 1024)}, False),  # heads share it
        ({"bias_dtype": "float32"}, False),
        ({"softcap": 30.0}, False),
        ({"head_dim": 192}, False),
        ({"head_dim": 64, "head_dim_v": 64}, True),
        ({"kv_len": 1020, "bias": (1, 4, 1024, 1020)}, False),  # rows off 16-byte boundaries
    ],
    ids=str,
)
def test_ds_is_stored_where_it_is_the_gradient_of_the_bias(
    change: dict[str, object], stored: bool
) -> None:
    spec = test_flash_terms.problem((128, 128), **(TERMS["staged-bias"] | change))
    assert tiles.can_store_ds(spec) == stored


SUMMED: dict[str, dict[str, object]] = {
    "plain": {},
    "of-heads": {"bias": (2, 4, 1, 1024), "band": Band(right=0)},
    "of-entries": {"bias": (2, 1, 1, 1024), "num_heads": 8, "q_lengths": True, "kv_lengths": True},
    "mask-slopes": {"mask": (1, 1, 1024, 1024), "alibi_slopes": (1, 4)},
    "dropout": {"dropout": test_flash_terms.TERMS["dropout"]["dropout"], "band": Band(right=0)},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (128, 64)], ids=str)
@pytest.mark.parametrize("name", SUMMED)
def test_sums_of_keys_do_not_spill(name: str, head_dims: tuple[int, int], form: str) -> None:
    toolchain.require_nvrtc()
    spec = test_flash_terms.problem(head_dims, **(TERMS["row-bias"] | SUMMED[name]))
    wants = (True, True, True, True)
    plan = tiles.plan_backward(spec, wants=wants, deterministic=FORMS[form])
    [key] = [key for key in plan.kernels.split(";") if "sums_bias=1" in key.split()]
    _, log = toolchain.compile_once(key)
    assert resources.read_log(key, log).faults == ()


@pytest.mark.parametrize(
    "change",
    [
        {"bias": (1, 4, 1024, 1)},  # of queries
        {"bias": (1, 4, 1, 1)},
        {"num_heads": 8, "bias": (1, 8, 1, 1024)},  # heads of a key/value head differ
        {"softcap": 30.0},
        {"segments": True},
        {"positions": True, "band": Band(right=0)},
        {"head_dim": 192},
    ],
    ids=str,
)
def test_other_biases_have_a_kernel_for_their_gradient(change: dict[str, object]) -> None:
    spec = test_flash_terms.problem((128, 128), **(TERMS["row-bias"] | change))
    plan = tiles.plan_backward(spec, wants=(True,) * 4, deterministic=False)
    assert "sums_bias=1" not in plan.kernels
    assert "family=sm90_backward_dbias" in plan.kernels


def test_sums_of_keys_are_for_who_wants_them() -> None:
    spec = test_flash_terms.problem((128, 128), **TERMS["row-bias"])
    for wants in ((True, True, True, False), (False, False, False, True)):
        plan = tiles.plan_backward(spec, wants=wants, deterministic=False)
        assert "sums_bias=1" not in plan.kernels
        assert ("family=sm90_backward_dbias" in plan.kernels) == wants[3]


def shared_bytes(keys: list[str], folder: Path) -> list[int]:
    """What the kernels' own headers say, compiled for the host."""
    functions = {
        "sm90_backward": "backward_shared_bytes(c, true)",
        "sm90_backward_dkv": "backward_shared_bytes(c, false)",
        "sm90_backward_dq": "backward_dq_shared_bytes(c)",
        "sm90_backward_dbias": "backward_dbias_shared_bytes(c)",
    }
    lines = []
    for key in keys:
        config = _core.kernel_unit_text(key).split("constexpr Config kConfig{")[1].split("};")[0]
        function = functions[toolchain.word(key, "family")]
        lines.append(f'{{ constexpr Config c{{{config}}}; std::printf("%d\\n", {function}); }}')
    program = "\n".join(
        [
            '#include <cstdio>\n#include "sm90/backward_shape.cuh"',
            "using namespace jattn;\nusing namespace jattn::sm90;\nint main() {",
            *lines,
            "}",
        ]
    )
    binary = toolchain.build_host_program(program, folder)
    done = subprocess.run([binary], capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


def test_shared_memory_is_counted_as_the_kernels_count_it(tmp_path: Path) -> None:
    keys, counted = [], []
    for head_dims, term in itertools.product((*HEAD_DIMS, (128, 64)), TERMS):
        spec = test_flash_terms.problem(head_dims, **TERMS[term])
        for deterministic in FORMS.values():
            for key in attention_keys(spec, deterministic=deterministic):
                family = toolchain.word(key, "family")
                if family == "sm90_backward_dq":
                    counted.append(tiles.queries_shared_bytes(tiles.queries_tile(spec), spec))
                elif family == "sm90_backward_dbias":
                    counted.append(tiles.dbias_shared_bytes(tiles.dbias_tile(spec), spec))
                else:
                    stores_ds = tiles.can_store_ds(spec)
                    sums_bias = tiles.can_sum_bias(spec)
                    tile = tiles.keys_tile(
                        spec, fused=not deterministic, stores_ds=stores_ds, sums_bias=sums_bias
                    )
                    takes_items = "schedule=2" in key.split()
                    order = int("dq_order=1" in key.split())
                    beside = "drops_beside=1" in key.split()
                    tile = dataclasses.replace(
                        tile, takes_items=takes_items, dq_order=order, drops_beside=beside
                    )
                    fused = family == "sm90_backward"
                    counted.append(tiles.keys_shared_bytes(tile, spec, fused=fused))
                keys.append(_core.canonical_kernel_key(key))
    assert counted == shared_bytes(keys, tmp_path)
    assert max(counted) <= MAX_SHARED_BYTES
