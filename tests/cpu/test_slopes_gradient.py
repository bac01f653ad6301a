"""Who computes the gradient of ALiBi slopes: a backend that offers it, else XLA; and what the kernel is planned for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import ffi
from jattn.backends import ORDER, Residuals, SlopesGradient, cuda_tiles
from jattn.backends.cpu import CpuBackend
from jattn.spec import Operands, Spec


def test_backends_that_offer_it() -> None:
    offer = {
        backend.name
        for backends in ORDER.values()
        for backend in backends
        if isinstance(backend, SlopesGradient)
    }
    assert offer == {"flash", "mem_efficient"}


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 1), (1, 1)])
def test_what_a_backend_offers_is_used_and_summed_to_the_shape_of_the_slopes(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def slopes_gradient(
        self: object, spec: Spec, operands: object, residuals: object, device: object
    ) -> jax.Array:
        seen.append(spec)
        return jnp.arange(1.0, 7.0).reshape(2, 3, 1)

    monkeypatch.setattr(CpuBackend, "slopes_gradient", slopes_gradient, raising=False)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 5, 3, 8)), jnp.float32) for _ in range(3))

    def loss(slopes: jax.Array) -> jax.Array:
        out = jattn.dot_product_attention(
            q, k, v, alibi_slopes=slopes, sinks=jnp.zeros(3), implementation="cpu"
        )
        return jnp.sum(out)

    found = jax.grad(loss)(jnp.ones(shape))
    per_head = np.arange(1.0, 7.0).reshape(2, 3)
    full = (1,) * (2 - len(shape)) + shape
    axes = tuple(i for i in range(2) if full[i] == 1)
    np.testing.assert_array_equal(found, per_head.sum(axes, keepdims=True).reshape(shape))
    assert [spec.sinks for spec in seen] == [None]


@pytest.mark.parametrize(
    ("has_slopes", "message"),
    [(True, "the CPU kernel does not compute dslopes"), (False, "dslopes is wanted without")],
)
def test_the_native_module_refuses_what_it_cannot_compute(has_slopes: bool, message: str) -> None:
    x = jnp.ones((1, 4, 2, 8))
    spec = Spec(1, 4, 4, 2, 2, 8, 8, "float32", 0.1, alibi_slopes=(1, 2) if has_slopes else None)
    operands = Operands(x, x, x, alibi_slopes=jnp.ones((1, 2, 1)) if has_slopes else None)
    residuals = Residuals(out=x, lse=jnp.ones((1, 2, 4)), dout=x, dlse=None)

    def call() -> jax.Array:
        return ffi.slopes_gradient(spec, operands, residuals, {"backend": "cpu"}, (1,), 1)

    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(call)())


@pytest.mark.parametrize("head_dim", [40, 64, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_part_for_each_tile_of_queries(head_dim: int, dtype: str) -> None:
    spec = Spec(1, 1000, 1000, 2, 2, head_dim, head_dim, dtype, 0.1, alibi_slopes=(1, 2))
    plan, parts = cuda_tiles.plan_slopes_gradient(spec, (9, 0))
    tile = cuda_tiles.slopes_tile(spec, (9, 0))
    assert parts == -(-1000 // tile.tile_q)
    assert f"tile_q={tile.tile_q} " in plan.kernels
    assert [key.split()[0] for key in plan.kernels.split(";")] == [
        "family=row_delta",
        "family=sm80_backward_dslopes",
    ]
    more = dataclasses.replace(spec, q_len=1000 + tile.tile_q)
    assert cuda_tiles.plan_slopes_gradient(more, (9, 0))[1] == parts + 1
