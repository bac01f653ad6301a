"""What the backend "cudnn" does around the calls of cuDNN, with the calls emulated: needs no GPU.

The emulation stands in the place of JAX's primitives, and does what these calls promise and no more: of masked keys the
weights are 0, which times NaN is NaN, and what nobody promises is NaN.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from composition import HEAD_DIMS, SHAPES, listed_of_cudnn
from cudnn_cases import problems
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import jattn
from jattn.backends.base import Residuals, Wants
from jattn.backends.cudnn import CudnnBackend, _for_statistics
from jattn.backends.xla import XlaBackend
from jattn.config import Determinism
from jattn.reference import Gradients
from jattn.spec import Operands, Spec
from jattn.testing import cases, inputs
from jattn.testing.cases import Case
from jattn.testing.run import serves, verify

pytestmark = pytest.mark.thinned  # most of their time goes into compiling

SM90 = jattn.Device("cuda", arch=(9, 0))
TABLE = [case for case in cases.sweep() if serves(case, "cudnn", SM90)]
SMALLER = listed_of_cudnn(48, SHAPES, HEAD_DIMS)
COMPOSED = [case for case in SMALLER if serves(case, "cudnn", SM90)]
BATCH, Q_LEN, KV_LEN, HEAD_DIM = 0, 1, 1, 3  # axes in the layout BTNH


class EmulatedCall:
    """A primitive of JAX for cuDNN, "fwd" or "bwd", as sums in float32; counts how often it is bound.

    Operands: q (B, T, N, D), k and v (B, S, K, D), no bias, lengths of queries and of keys (B,), four that are empty;
    backward also lse (B, N, T), out and dout (B, T, N, D). Results: out and lse, or dq, dk and dv.

    Source: jax/_src/cudnn/fused_attention_stablehlo.py: the lowerings of these primitives, and dot_product_attention,
    whose windows are (position - length, position].
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.name = name
        self.primitive = getattr(cudnn, f"_dot_product_attention_{name}_p")
        self.count = 0
        monkeypatch.setattr(cudnn, f"_dot_product_attention_{name}_p", self)

    def bind(self, *arrays: jax.Array, **parameters: Any) -> list[jax.Array]:
        self.count += 1
        q, k, v, bias, q_lengths, kv_lengths, *rest = arrays
        layout = cudnn.AttentionLayout(parameters["layout"])
        assert layout == cudnn.AttentionLayout.BTNH
        cudnn.check_layout(q, k, v, None, None, None, None, None, None, None, layout)
        assert q.dtype in (jnp.float16, jnp.bfloat16)
        assert q.shape[HEAD_DIM] == v.shape[HEAD_DIM]
        assert q.shape[HEAD_DIM] % 8 == 0
        assert all(x.size == 0 for x in (bias, *rest[:4]))
        assert not any(parameters["variadic_args"])
        assert parameters["dropout_rate"] == 0

        kind = parameters["mask_type"]
        lengths = None
        if kind in (cudnn.MaskType.PADDING, cudnn.MaskType.PADDING_CAUSAL):
            lengths = (q_lengths, kv_lengths)
            assert all(x.shape == q.shape[:1] and x.dtype == jnp.int32 for x in lengths)
        else:
            assert q_lengths.size == kv_lengths.size == 0
        is_causal = kind in (cudnn.MaskType.CAUSAL, cudnn.MaskType.PADDING_CAUSAL)
        scores = Scores(q, k, lengths, is_causal, parameters["sliding_window_length"])
        if self.name == "fwd":
            assert parameters["is_training"]
            results = scores.forward(v, parameters["scale"])
        else:
            results = scores.backward(v, *rest[4:], scale=parameters["scale"])

        avals = jax.eval_shape(lambda *x: self.primitive.bind(*x, **parameters), *arrays)
        return [x.astype(aval.dtype) for x, aval in zip(results, avals, strict=True)]


class Scores:
    """What both calls compute of q and k; of heads of a group by repeated keys."""

    def __init__(
        self,
        q: jax.Array,
        k: jax.Array,
        lengths: tuple[jax.Array, jax.Array] | None,
        is_causal: bool,
        window: int | None,
    ) -> None:
        self.q, self.group = q.astype(jnp.float32), q.shape[2] // k.shape[2]
        self.k, self.lengths = self.of_heads(k), lengths
        row = jnp.arange(q.shape[Q_LEN])[:, None]
        column = jnp.arange(k.shape[KV_LEN])
        shown = jnp.ones((q.shape[BATCH], 1, row.size, column.size), bool)
        if is_causal:
            shown &= column <= row
        if window:
            assert is_causal
            assert row.size <= column.size
            shown &= column > row - window
        if lengths is not None:
            shown &= column < lengths[1][:, None, None, None]
        # What is hidden is multiplied by the scale, too.
        self.products = jnp.where(shown, jnp.einsum("btnd,bsnd->bnts", self.q, self.k), -jnp.inf)

    def of_heads(self, x: jax.Array) -> jax.Array:
        return jnp.repeat(x.astype(jnp.float32), self.group, axis=2)

    def of_groups(self, x: jax.Array) -> jax.Array:
        """Sums (B, S, N, D) over the heads of each group."""
        batch, kv_len, num_heads, width = x.shape
        return x.reshape(batch, kv_len, num_heads // self.group, self.group, width).sum(3)

    def inside(self, x: jax.Array, which: int, axis: int) -> jax.Array:
        """NaN beyond the lengths, of queries (0) or of keys (1), and everywhere unless all are at least 1."""
        if self.lengths is None:
            return x
        index = jnp.arange(x.shape[axis]).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
        length = self.lengths[which].reshape(-1, *(1,) * (x.ndim - 1))
        are_valid = (self.lengths[0] >= 1).all() & (self.lengths[1] >= 1).all()
        return jnp.where((index < length) & are_valid, x, jnp.nan)

    def forward(self, v: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
        s = self.products * scale
        lse = jax.nn.logsumexp(s, axis=3)
        out = jnp.einsum("bnts,bsnd->btnd", jnp.exp(s - lse[..., None]), self.of_heads(v))
        has_keys = jnp.isfinite(lse)
        out = jnp.where(has_keys.swapaxes(1, 2)[..., None], out, jnp.nan)
        return self.inside(out, 0, Q_LEN), self.inside(jnp.where(has_keys, lse, jnp.nan), 0, 2)

    def backward(
        self, v: jax.Array, lse: jax.Array, out: jax.Array, dout: jax.Array, *, scale: float
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        p = jnp.exp(self.products * scale - lse[..., None])
        out, dout = out.astype(jnp.float32), dout.astype(jnp.float32)
        dp = jnp.einsum("btnd,bsnd->bnts", dout, self.of_heads(v))
        delta = (out * dout).sum(HEAD_DIM).swapaxes(1, 2)
        ds = p * (dp - delta[..., None]) * scale
        dq = jnp.einsum("bnts,bsnd->btnd", ds, self.k)
        dk = self.of_groups(jnp.einsum("bnts,btnd->bsnd", ds, self.q))
        dv = self.of_groups(jnp.einsum("bnts,btnd->bsnd", p, dout))
        return (
            self.inside(dq, 0, Q_LEN),
            self.inside(dk, 1, KV_LEN),
            self.inside(dv, 1, KV_LEN),
        )


Calls = tuple[EmulatedCall, EmulatedCall]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of both passes, and the backend in the place of "xla", which runs everywhere without a kernel."""
    backend = CudnnBackend()

    def refuse(spec: Spec) -> None:
        assert backend.unsupported(spec, SM90, needs_grad=True, determinism="off") == ()
        assert spec.features() <= backend.understands

    def forward(
        _: XlaBackend, spec: Spec, operands: Operands[jax.Array], device: jattn.Device
    ) -> tuple[jax.Array, jax.Array]:
        refuse(spec)
        return backend.forward(spec, operands, device)

    def backward(
        _: XlaBackend,
        spec: Spec,
        operands: Operands[jax.Array],
        residuals: Residuals,
        wants: Wants,
        device: jattn.Device,
        determinism: Determinism,
    ) -> Gradients:
        refuse(spec)
        return backend.backward(spec, operands, residuals, wants, device, determinism)

    monkeypatch.setattr(XlaBackend, "forward", forward)
    monkeypatch.setattr(XlaBackend, "backward", backward)
    return EmulatedCall(monkeypatch, "fwd"), EmulatedCall(monkeypatch, "bwd")


def run_and_count(case: Case, calls: Calls) -> tuple[int, int]:
    """Compares all results with the oracle; returns how often each call was bound."""
    verify(case, "xla")
    return calls[0].count, calls[1].count


@pytest.mark.whole
@pytest.mark.parametrize("case", problems(45), ids=str)
def test_shapes_bands_and_lengths(case: Case, calls: Calls) -> None:
    """Padding is poisoned, some sequences are empty, and the log-sum-exp has a gradient, by a second call."""
    assert run_and_count(case, calls) == (1, 2)


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_agrees_with_the_oracle(case: Case, calls: Calls) -> None:
    assert run_and_count(case, calls) == (1, 2)


@pytest.mark.parametrize("case", COMPOSED, ids=str)
def test_features_compose(case: Case, calls: Calls) -> None:
    assert run_and_count(case, calls) == (1, 2)


def differentiated(case: Case, *, with_lse: bool) -> list[jax.Array]:
    """out and the gradients of q, k and v, with the log-sum-exp as a result or without."""
    operands = inputs.make(case)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        found = jattn.dot_product_attention(
            q, k, v, implementation="xla", return_lse=with_lse, **case.options()
        )
        return found if with_lse else (found,)

    # Compiled as one function of its own: what runs by itself is kept, for tests without the emulation, too.
    @jax.jit
    def both(dout: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        (out, *lse), pullback = jax.vjp(attend, *arrays)
        return [out, *pullback((dout, *(jnp.zeros_like(x) for x in lse)))]

    return both(*(jnp.asarray(x) for x in (operands.dout, operands.q, operands.k, operands.v)))


@pytest.mark.whole
def test_no_second_call_without_a_gradient_of_the_log_sum_exp(calls: Calls) -> None:
    case = problems(45)[1]
    want = differentiated(case, with_lse=True)
    assert (calls[0].count, calls[1].count) == (1, 2)
    found = differentiated(case, with_lse=False)
    assert (calls[0].count, calls[1].count) == (2, 3)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.whole
@pytest.mark.parametrize(("dtype", "unit"), [("bfloat16", 2.0**-16), ("float16", 2.0**-22)])
def test_a_gradient_of_the_log_sum_exp_keeps_the_bits_of_two_numbers(
    dtype: str, unit: float
) -> None:
    """Of one number it would be as far off as the results are rounded, which no comparison of these can tell."""
    rng = np.random.default_rng(0)
    v, out = (jnp.ones((2, length, 3, 8), dtype) for length in (7, 5))
    dlse = rng.uniform(1, 2, (2, 3, 5)).astype(np.float32)
    ones, zeros, dout = _for_statistics(v, out, jnp.asarray(dlse))
    products = np.einsum("btnd,bsnd->bnts", *(np.asarray(x, np.float64) for x in (dout, ones)))
    np.testing.assert_allclose(products, np.repeat(dlse[..., None], 7, 3), rtol=unit)
    assert not zeros.any()


@pytest.mark.whole
@pytest.mark.parametrize(("q_len", "kv_len", "batch"), [(0, 5, 2), (5, 0, 2), (5, 5, 0)])
def test_empty_extents(q_len: int, kv_len: int, batch: int, calls: Calls) -> None:
    """cuDNN is not called."""
    case = problems(45)[0].but("empty", batch=batch, q_len=q_len, kv_len=kv_len)
    assert run_and_count(case, calls) == (0, 0)
