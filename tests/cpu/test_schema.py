"""Both sides of the FFI border name the same things, and a malformed call is an error that says what is wrong."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import _core, ffi
from jattn.masks import UNBOUNDED, Band
from jattn.spec import Spec

CC = Path(__file__).parents[2] / "cc"
WIDTHS = {"double": np.float64, "int64_t": np.int64, "bool": np.bool_}
SPEC = Spec(
    batch=1,
    q_len=4,
    kv_len=5,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    head_dim_v=8,
    dtype="float32",
    scale=0.5,
)


def test_attributes_have_the_same_names_and_widths() -> None:
    read = dict(
        reversed(match)  # type: ignore[arg-type]
        for match in re.findall(
            r'attribute<(\w+)>\(spec, "(\w+)"', (CC / "ffi" / "bind.cc").read_text()
        )
    )
    written = ffi.spec_attributes(SPEC)
    assert {name: type(value) for name, value in written.items()} == {
        name: WIDTHS[kind] for name, kind in read.items()
    }


def test_operand_bits_are_the_same() -> None:
    [body] = re.findall(
        r"enum OperandBit : int64_t \{(.*?)\};", (CC / "ffi" / "bind.h").read_text(), re.DOTALL
    )
    bits = {
        re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(): int(value)
        for name, value in re.findall(r"k(\w+) = (\d+)", body)
    }
    assert bits == ffi.OPERAND_BITS


def test_unbounded_is_the_same() -> None:
    text = (CC / "core" / "problem.h").read_text()
    assert "kUnbounded = std::numeric_limits<int64_t>::max()" in text
    assert np.iinfo(np.int64).max == UNBOUNDED == Band().left == Band().right


def test_targets_are_the_registered_ones() -> None:
    for platform in ("cpu", "cuda"):
        registered = _core.registrations(platform)
        assert set(registered) == {ffi.FORWARD_TARGET, ffi.BACKWARD_TARGET}
        for stages in registered.values():
            assert {"execute", "instantiate"} <= set(stages)


# ---- malformed calls -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Call:
    """A forward call of the CPU target as the package makes it, with parts to spoil."""

    operands: tuple[Any, ...] = (
        jnp.ones((1, 4, 2, 8)),
        jnp.ones((1, 5, 1, 8)),
        jnp.ones((1, 5, 1, 8)),
    )
    results: tuple[tuple[tuple[int, ...], str], ...] = (
        ((1, 4, 2, 8), "float32"),
        ((1, 2, 4), "float32"),
    )
    scratch_bytes: int | None = None
    attributes: tuple[tuple[str, Any], ...] = tuple(ffi.spec_attributes(SPEC).items())

    def run(self) -> Any:
        wanted = _core.cpu_scratch_bytes(
            backward=False, wants_dbias=False, batch=1, q_len=4, kv_len=5, num_heads=2, num_kv_heads=1, head_dim=8,
            head_dim_v=8, dtype="float32", bias_shape=(0, 0, 0, 0),
        )  # fmt: skip
        scratch = ((wanted if self.scratch_bytes is None else self.scratch_bytes,), "uint8")
        shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (*self.results, scratch)]
        call = jax.ffi.ffi_call(ffi.FORWARD_TARGET, shapes)
        plan = {"backend": "cpu", "kernels": ""}
        return jax.block_until_ready(call(*self.operands, spec=dict(self.attributes), plan=plan))

    def with_attribute(self, name: str, value: Any) -> "Call":
        rest = tuple(item for item in self.attributes if item[0] != name)
        return dataclasses.replace(
            self, attributes=rest if value is None else (*rest, (name, value))
        )


Q, K, V = Call().operands
GOOD = Call()


def with_score_function(
    num_captures: int, *, captures: int | None = None, heads: int = 2, announce: bool = True
) -> Call:
    """A call with a score function: what it announces, and how many arrays there are."""
    operands = (*GOOD.operands, jnp.zeros(1, jnp.int32), jnp.zeros(heads, jnp.int32))
    arrays = (jnp.zeros(1),) * (num_captures if captures is None else captures)
    call = dataclasses.replace(GOOD, operands=(*operands, *arrays))
    call = call.with_attribute("operands", np.int64(ffi.OPERAND_BITS["score_mod"]))
    return call.with_attribute("num_captures", np.int64(num_captures) if announce else None)


MALFORMED: dict[str, tuple[Callable[[], Call], str]] = {
    "attribute is missing": (lambda: GOOD.with_attribute("scale", None), "spec.scale is missing"),
    "attribute has another width": (
        lambda: GOOD.with_attribute("band_left", np.int32(3)),
        "spec.band_left",
    ),
    "rank": (lambda: dataclasses.replace(GOOD, operands=(Q[0], K, V)), "rank 4"),
    "dtype of v": (
        lambda: dataclasses.replace(GOOD, operands=(Q, K, V.astype("float16"))),
        "v has XLA element type",
    ),
    "integer q": (
        lambda: dataclasses.replace(GOOD, operands=(Q.astype("int32"), K, V)),
        "q must be",
    ),
    "length of v": (
        lambda: dataclasses.replace(GOOD, operands=(Q, K, V[:, :4])),
        "(k|v) has shape",
    ),
    "head dim of k": (
        lambda: dataclasses.replace(GOOD, operands=(Q, K[..., :4], V)),
        "k has shape",
    ),
    "heads": (
        lambda: dataclasses.replace(
            GOOD, operands=(Q, jnp.ones((1, 5, 3, 8)), jnp.ones((1, 5, 3, 8)))
        ),
        "multiple of the number of key/value heads",
    ),
    "announced operand is missing": (
        lambda: GOOD.with_attribute("operands", np.int64(1)),
        "bias.* is missing",
    ),
    "operand too many": (lambda: dataclasses.replace(GOOD, operands=(Q, K, V, V)), "operands"),
    "score function without a program": (
        lambda: with_score_function(3),
        "plan.program is missing",
    ),
    "captures are not counted": (
        lambda: with_score_function(1, announce=False),
        "spec.num_captures is missing",
    ),
    "captures are missing": (lambda: with_score_function(2, captures=1), "captures.* is missing"),
    "captures are too many": (lambda: with_score_function(17), "reads 17 arrays, at most 16"),
    "head ids": (lambda: with_score_function(0, heads=3), "head_ids has shape"),
    "shape of out": (
        lambda: dataclasses.replace(GOOD, results=(((1, 4, 2, 4), "float32"), GOOD.results[1])),
        "out has shape",
    ),
    "dtype of lse": (
        lambda: dataclasses.replace(GOOD, results=(GOOD.results[0], ((1, 2, 4), "float16"))),
        "lse has XLA element type",
    ),
}


def test_a_well_formed_call_runs() -> None:
    out, lse, _ = GOOD.run()
    np.testing.assert_allclose(out, 1.0, rtol=1e-6)
    np.testing.assert_allclose(lse, 4.0 + np.log(5.0), rtol=1e-6)


@pytest.mark.parametrize("what", list(MALFORMED))
def test_a_malformed_call_is_an_error(what: str) -> None:
    """Never an abort, never a result: the handler checks every buffer and attribute before it reads one."""
    make, words = MALFORMED[what]
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=words):
        make().run()


def test_too_little_scratch_is_an_error() -> None:
    assert GOOD.run()
    if jax.tree.leaves(GOOD.run())[2].size:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"scratch has 0 bytes, .* wants \d+"):
            dataclasses.replace(GOOD, scratch_bytes=0).run()
