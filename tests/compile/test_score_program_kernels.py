"""The kernels with a score program inside: both compilers make them, and no register spills.

What the program's text computes is tested elsewhere (tests/cpu/test_device_code.py); here it is in its place.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import resources
import toolchain

from jattn import RaggedArray, _core, packed_rows
from jattn.backends import Wants, cuda_tiles, flash, flash_backward_tiles, flash_tiles
from jattn.backends.kernel_plan import program_text
from jattn.score_program import ScoreProgram, trace
from jattn.spec import Spec

HEADS, LENGTH = 4, 4096
CAP = 20.0


def added(score: Any, batch: Any, head: Any, query: Any, key: Any, bias: Any) -> Any:
    """Reads an array, and its slope is 1."""
    return score + bias[head, query, key]


def capped(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A slope for every score."""
    return CAP * jnp.tanh(score / CAP)


def learned(score: Any, batch: Any, head: Any, query: Any, key: Any, *captures: Any) -> Any:
    """Reads an element of the head, of the query, of the key and of the distance."""
    gain, of_query, of_key, table = captures
    return score * gain[head] + of_query[query] + of_key[key] + table[head, query - key + LENGTH]


@functools.cache
def program(name: str) -> ScoreProgram:
    """One of them, traced."""
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "added": ((HEADS, LENGTH, LENGTH),),
        "capped": (),
        "learned": ((HEADS,), (LENGTH,), (LENGTH,), (HEADS, 2 * LENGTH)),
    }
    functions: dict[str, Callable[..., Any]] = {
        "added": added,
        "capped": capped,
        "learned": learned,
    }
    return trace(functions[name], tuple(jnp.zeros(shape) for shape in shapes[name]), 1)[0]


def problem(name: str, head_dim: int) -> Spec:
    plain = Spec(1, LENGTH, LENGTH, HEADS, HEADS, head_dim, head_dim, "bfloat16", 0.125)
    return dataclasses.replace(plain, score_mod=program(name))


def keys(spec: Spec, arch: tuple[int, int]) -> dict[str, str]:
    """A kernel of every family that scores pass through; those of biases and slopes for a problem that has them.

    Those that add up gradients of captures are of the program `learned` where the problem's reads none.
    """
    wants = (True, True, True, True)
    biased = dataclasses.replace(
        spec, bias=(1, HEADS, spec.q_len, spec.kv_len), bias_dtype=spec.dtype
    )
    sloped = dataclasses.replace(spec, alibi_slopes=(1, HEADS))
    plans = [cuda_tiles.plan_forward(spec, arch)]
    for deterministic in (False, True):
        for each in (spec, biased):
            plans.append(
                cuda_tiles.plan_backward(each, arch, wants=wants, deterministic=deterministic)
            )
    plans.append(cuda_tiles.plan_slopes_gradient(sloped, arch)[0])
    assert spec.score_mod is not None
    reading = spec.score_mod if spec.score_mod.captures else program("learned")
    of_captures = dataclasses.replace(spec, score_mod=reading)
    for deterministic in (False, True):
        wanted = (True,) * len(reading.captures)
        plans.append(
            cuda_tiles.plan_capture_gradients(
                of_captures, arch, wanted, deterministic=deterministic
            )
        )
    for plan in plans:
        _core.register_program(plan.program)
    found: dict[str, str] = {}
    for plan in plans:
        for key in plan.kernels.split(";"):
            found.setdefault(toolchain.word(key, "family"), key)
    return {family: key for family, key in found.items() if "program=1" in key}


FAMILIES = sorted(keys(problem("capped", 64), (8, 0)))
WITH_PROGRAM = [f for f in _core.kernel_families() if f.startswith("sm80_") or f == "capture_sums"]


def test_every_family_is_planned() -> None:
    assert sorted(WITH_PROGRAM) == FAMILIES


@pytest.mark.parametrize("arch", [(8, 0), (9, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["added", "capped"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nvrtc(family: str, name: str, head_dim: int, arch: tuple[int, int]) -> None:
    toolchain.require_nvrtc()
    key = keys(problem(name, head_dim), arch)[family]
    code, log = _core.compile_kernel(key)
    assert resources.read_log(key, log, len(code)).faults == ()


@pytest.mark.parametrize("arch", [(8, 0), (9, 0)], ids=str)
@pytest.mark.parametrize("name", ["added", "capped"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nvcc(family: str, name: str, arch: tuple[int, int], tmp_path: Path) -> None:
    key = keys(problem(name, 128), arch)[family]
    unit = _core.kernel_unit_text(key)
    code, log = toolchain.run_nvcc(unit, toolchain.word(key, "arch"), tmp_path)
    assert resources.read_log(key, log, len(code)).faults == ()


def hopper_keys(spec: Spec) -> list[str]:
    """Those of `flash`."""
    plans = [flash_tiles.plan_forward(spec)]
    everything = Wants(q=True, k=True, v=True, bias=spec.bias is not None)
    gradients = dataclasses.replace(everything, bias=False)
    wants = (everything if flash.runs_slopes(spec, everything) else gradients).flags()
    for deterministic in (False, True):
        plans.append(
            flash_backward_tiles.plan_backward(spec, wants=wants, deterministic=deterministic)
        )
    for plan in plans:
        _core.register_program(plan.program)
    found = dict.fromkeys(key for plan in plans for key in plan.kernels.split(";"))
    return [key for key in found if "program=1" in key]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["added", "capped"])
def test_hopper(name: str, head_dim: int) -> None:
    toolchain.require_nvrtc()
    keys = hopper_keys(problem(name, head_dim))
    families = {toolchain.word(key, "family") for key in keys}
    assert len(families) == (3 if head_dim == 256 else 2)
    for key in keys:
        code, log = _core.compile_kernel(key)
        found = resources.read_log(key, log, len(code))
        if (name, head_dim, toolchain.word(key, "family")) == ("added", 64, "sm90_forward"):
            # Asking for elements ahead, with three warpgroups: 2.8 times as fast all the same (docs/kernels/log.md).
            assert found.messages == ()
            assert found.spill_stores <= 72
        else:
            assert found.faults == (), key


@pytest.mark.parametrize("positions", [False, True], ids=["self", "cross"])
def test_packed_rows_on_hopper(positions: bool) -> None:
    """What a function over packed sequences reads of its row takes no more registers than there are."""
    toolchain.require_nvrtc()
    rows = RaggedArray(jnp.zeros((LENGTH, 1, 1)), jnp.array([0, 1000, LENGTH], jnp.int32))
    origins = packed_rows.key_origins(rows, None)
    of_rows = packed_rows.on_rows(added, rows, rows, origins)
    packed, _ = trace(of_rows, (jnp.zeros((HEADS, LENGTH, LENGTH)),), 1)
    assert [c.shape for c in packed.captures] == [(HEADS, LENGTH, LENGTH), (4, LENGTH)]
    spec = dataclasses.replace(
        problem("added", 64), score_mod=packed, segments=True, positions=positions
    )
    for key in hopper_keys(spec):
        code, log = _core.compile_kernel(key)
        assert resources.read_log(key, log, len(code)).faults == (), key


@pytest.mark.parametrize(("name", "dtype"), [("capped", "float16"), ("added", "float32")])
def test_with_everything_else(name: str, dtype: str) -> None:
    """Compiles beside all other features; registers may spill."""
    toolchain.require_nvrtc()
    spec = dataclasses.replace(
        problem(name, 96),
        dtype=dtype,
        softcap=30.0,
        bias=(1, HEADS, 1, LENGTH),
        bias_dtype="float32",
        mask=(1, 1, LENGTH, LENGTH),
        q_lengths=True,
        kv_lengths=True,
        segments=True,
        positions=True,
        alibi_slopes=(1, HEADS),
    )
    for key in keys(spec, (8, 0)).values():
        _core.compile_kernel(key)
    if dtype == "float16":
        for key in hopper_keys(spec):
            _core.compile_kernel(key)


def test_a_slope_that_is_one_costs_no_registers() -> None:
    """The two programs differ in their slopes alone, and the one without has larger tiles of scores."""
    one, other = (
        cuda_tiles.keys_tile(problem(n, 64), (8, 0), fused=True) for n in ("added", "capped")
    )
    assert one.tile_q > other.tile_q


def test_the_unit_has_the_program_before_the_kernel() -> None:
    key = keys(problem("capped", 64), (8, 0))["sm80_forward"]
    text = program_text(problem("capped", 64))
    unit = _core.kernel_unit_text(key)
    assert unit.index("JATTN_SCORE_PROGRAM") < unit.index(text) < unit.index("sm80/forward.cuh")
    assert f"digest={hashlib.sha256(text.encode()).hexdigest()}" in _core.canonical_kernel_key(key)


def test_programs_have_entries_of_their_own_in_the_cache() -> None:
    toolchain.require_nvrtc()
    names = []
    for name in ("added", "capped"):
        key = keys(problem(name, 64), (8, 0))["sm80_forward"]
        other = key.replace("digest=", "tile_kv=64 digest=").replace(" tile_kv=64", "", 1)
        assert _core.cache_entry_name(key) == _core.cache_entry_name(other)
        names.append(_core.cache_entry_name(key))
    assert names[0] != names[1]


KEY = "family=sm80_forward arch=sm_80"
UNKNOWN = hashlib.sha256(b"never registered").hexdigest()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("program=1", "program is 1 and there is no digest"),
        (f"digest={UNKNOWN}", "program is 0 and there is a digest"),
        ("program=1 digest=abc", 'digest is "abc", must be a SHA-256'),
        (f"program=1 digest={UNKNOWN.upper()}", "lower case"),
    ],
)
def test_program_and_digest_go_together(words: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _core.canonical_kernel_key(f"{KEY} {words}")


def test_an_unknown_program_is_an_error() -> None:
    key = f"{KEY} program=1 digest={UNKNOWN}"
    for use in (_core.kernel_unit_text, _core.compile_kernel, _core.prepare_kernel):
        with pytest.raises(ValueError, match=f"none is registered under the digest {UNKNOWN}"):
            use(key)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '#include "/etc/hostname"',
        '%:include "/etc/hostname"',
        "int x; // \\\nint y;",
        "// é",
        "x" * (2 << 20),
    ],
    ids=["empty", "directive", "digraph", "continued", "not ascii", "long"],
)
def test_a_program_is_plain_text(text: str) -> None:
    with pytest.raises(ValueError, match="score program"):
        _core.register_program(text)


def test_registering_twice_is_registering_once() -> None:
    text = program_text(problem("capped", 64))
    digests = {_core.register_program(text) for _ in range(3)}
    assert digests == {hashlib.sha256(text.encode()).hexdigest()}
