"""float32 on the matrix unit, as sums of three bfloat16 planes, beside the same kernel on vectors."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from instruction_sets import force
from numpy.typing import NDArray

import jattn
from jattn import _core

pytestmark = pytest.mark.skipif(
    "amx" not in _core.cpu_instruction_sets(), reason="the machine has no matrix unit"
)

Arrays = tuple[NDArray[np.float32], ...]
NAMES = ("out", "dq", "dk", "dv")


def draw(length: int, head_dim: int, seed: int) -> Arrays:
    """q, k, v and dout: normal numbers with a few outliers."""
    rng = np.random.default_rng(seed)
    shape = (1, length, 2, head_dim)
    outliers = rng.random((4, *shape)) < 0.001
    values = rng.standard_normal((4, *shape)) + outliers * 10 * rng.standard_normal((4, *shape))
    return tuple(values.astype(np.float32))


def attend(
    operands: Arrays, is_causal: bool, instruction_set: str
) -> dict[str, NDArray[np.float32]]:
    """The output and the gradients on one instruction set."""
    force(instruction_set)
    q, k, v, dout = (jnp.asarray(x) for x in operands)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="cpu")

    out, pullback = jax.vjp(forward, q, k, v)
    return {name: np.asarray(x) for name, x in zip(NAMES, (out, *pullback(dout)), strict=True)}


def exact(operands: Arrays, is_causal: bool) -> dict[str, NDArray[np.float64]]:
    """The same in float64."""
    q, k, v, dout = (x.astype(np.float64) for x in operands)
    scale = 1 / np.sqrt(q.shape[-1])
    s = np.einsum("btnd,bsnd->bnts", q, k) * scale
    if is_causal:
        s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnd->btnd", p, v)
    dp = np.einsum("btnd,bsnd->bnts", dout, v)
    ds = p * (dp - np.einsum("btnd,btnd->bnt", dout, out)[..., None]) * scale
    return {
        "out": out,
        "dq": np.einsum("bnts,bsnd->btnd", ds, k),
        "dk": np.einsum("bnts,btnd->bsnd", ds, q),
        "dv": np.einsum("bnts,btnd->bsnd", p, dout),
    }


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("head_dim", [40, 128])
def test_errors_are_no_larger_than_those_of_the_vectors(head_dim: int, is_causal: bool) -> None:
    """About half of them, in fact. Without the third plane they would be twenty times as large."""
    operands = draw(330, head_dim, seed=head_dim)
    wanted = exact(operands, is_causal)

    def errors(instruction_set: str) -> dict[str, float]:
        results = attend(operands, is_causal, instruction_set)
        return {
            name: float(np.sqrt(np.mean((results[name] - wanted[name]) ** 2))) for name in NAMES
        }

    on_matrix_unit, on_vectors = errors("amx"), errors("avx512")
    assert on_matrix_unit != on_vectors, "the matrix unit took no part"
    for name in NAMES:
        assert on_matrix_unit[name] <= on_vectors[name], name


def put(index: int, value: float) -> Callable[[Arrays], Arrays]:
    """Sets an element of row 70 of operand `index`."""

    def change(operands: Arrays) -> Arrays:
        operands[index][0, 70, 0, 3] = value
        return operands

    return change


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, LARGEST, -LARGEST, 1e30])
@pytest.mark.parametrize("index", range(4), ids=["q", "k", "v", "dout"])
def test_values_that_planes_cannot_hold(index: int, value: float) -> None:
    """They give infinities, NaNs and numbers where the vectors give them, and touch no other result."""
    operands = put(index, value)(draw(200, 64, seed=1))
    on_matrix_unit = attend(operands, True, "amx")
    on_vectors = attend(operands, True, "avx512")
    for name in NAMES:
        got, wanted = on_matrix_unit[name], on_vectors[name]
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted), err_msg=name)
        np.testing.assert_array_equal(
            np.where(np.isinf(got), got, 0), np.where(np.isinf(wanted), wanted, 0), err_msg=name
        )
        finite = np.isfinite(wanted)
        size = np.abs(wanted, where=finite, out=np.zeros_like(wanted)).max(axis=-1, keepdims=True)
        error = np.abs(np.where(finite, got, 0) - np.where(finite, wanted, 0))
        assert (error <= 1e-5 * np.maximum(size, 1)).all(), name


@pytest.mark.parametrize("size", [1e-30, 1e-34, 1e-37])
def test_parts_below_the_normal_numbers_are_lost(size: float) -> None:
    """An absolute error of a few times 2^-126, as docs/conventions.md says."""
    q, k, v, dout = draw(130, 64, seed=2)
    v *= np.float32(size)
    wanted = exact((q, k, v, dout), False)["out"]
    out = attend((q, k, v, dout), False, "amx")["out"]
    error = np.abs(out - wanted).max()
    assert error <= 2.0**-122 + 2.0**-20 * np.abs(wanted).max()


def test_tiny_operands_and_products_are_zero_or_right() -> None:
    """Scores of operands near the least normal number are 0 for any kernel: the output is the mean."""
    q, k, v, dout = draw(130, 64, seed=3)
    tiny = np.float32(2e-38)
    out = attend((q * tiny, k * tiny, v, dout), False, "amx")["out"]
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(1, keepdims=True), v.shape), atol=1e-6)
