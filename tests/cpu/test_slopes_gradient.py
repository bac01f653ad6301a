"""The gradient of ALiBi slopes: by the CPU kernel, by a backend of one's own, else by XLA; how CUDA's is planned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slopes_cases import BASE, EVERYTHING

import jattn
from jattn import ffi
from jattn.backends import Residuals, Wants, cuda_tiles
from jattn.backends.cpu import CpuBackend
from jattn.ffi import BACKWARD_TARGET
from jattn.reference import Gradients
from jattn.spec import Operands, Spec
from jattn.testing.cases import Case
from jattn.testing.run import verify

pytestmark = pytest.mark.thinned  # most of their time goes into compiling

CASES = [
    BASE,
    BASE.but("one-of-all-heads", alibi_form="1", is_causal=True),
    BASE.but("entries", alibi_form="b1", q_lengths=(200, 0), kv_lengths=(3, 264)),
    BASE.but("few-queries", q_len=3, kv_len=1100, window=(900, None)),
    BASE.but("chunks", batch=1, q_len=1300, kv_len=150, num_heads=2, lower_right=True),
    BASE.but("positions", positions="shuffled", segments="random", head_dim=33, head_dim_v=41),
    BASE.but("mask", mask_form="bnts", mask_density=0.02, head_dim=40, head_dim_v=72),
    BASE.but("own-bias", bias_form="bnts", dropout_rate=0.3),
    EVERYTHING,
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case, dtype: str, instruction_set: str) -> None:
    verify(case.but(dtype, dtype=dtype), "cpu")


@pytest.mark.parametrize("others", [(), ("q",), ("q", "k", "v")], ids=str)
def test_XLA_multiplies_nothing_and_one_pass_computes_all(others: tuple[str, ...]) -> None:
    rng = np.random.default_rng(5)
    arrays = {
        name: jnp.asarray(rng.normal(size=(2, 300, 4, 64)), jnp.float32) for name in ("q", "k", "v")
    }
    slopes = jnp.asarray(2.0 ** -np.arange(1, 5), jnp.float32)

    def loss(wanted: dict[str, jax.Array], implementation: str) -> jax.Array:
        given = arrays | wanted
        out = jattn.dot_product_attention(
            *(given[name] for name in ("q", "k", "v")),
            alibi_slopes=given["slopes"],
            is_causal=True,
            implementation=implementation,
        )
        return (out**2).sum()

    wanted = {name: arrays[name] for name in others} | {"slopes": slopes}
    gradients = jax.jit(jax.grad(loss), static_argnums=1)
    jattn.reset_call_counters()
    program = gradients.lower(wanted, "cpu").compile().as_text() or ""
    assert jattn.call_counters() == {"cpu": {"forward": 1, "backward": 1}}
    assert program.count(f'custom_call_target="{BACKWARD_TARGET}"') == 1
    for sign in (" while(", " dot("):
        assert sign not in program
    found = gradients(wanted, "cpu")
    expected = gradients(wanted, "reference")
    for name in wanted:
        scale = float(jnp.abs(expected[name]).max())
        np.testing.assert_allclose(found[name], expected[name], atol=2e-5 * scale)


def test_an_exported_program_with_a_symbolic_batch() -> None:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array, slopes: jax.Array) -> jax.Array:
        out = jattn.dot_product_attention(q, k, v, alibi_slopes=slopes, implementation="cpu")
        return (out**2).sum()

    gradients = jax.jit(jax.grad(loss, (0, 3)))
    (batch,) = jax.export.symbolic_shape("b")
    shapes = [(batch, 70, 4, 16), (batch, 90, 4, 16), (batch, 90, 4, 16), (4,)]
    exported = jax.export.export(gradients, disabled_checks=jattn.export_disabled_checks())(
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    )
    rng = np.random.default_rng(0)
    arrays = [
        jnp.asarray(rng.normal(size=tuple(3 if x is batch else x for x in shape)), jnp.float32)
        for shape in shapes
    ]
    for found, expected in zip(exported.call(*arrays), gradients(*arrays), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize("offers", [True, False])
def test_what_a_backend_returns_is_used_and_summed_to_the_shape_of_the_slopes(
    shape: tuple[int, ...], offers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it returns nothing: then XLA computes it."""
    asked = []
    per_head = jnp.arange(1.0, 7.0).reshape(2, 3, 1)

    def backward(
        self: object,
        spec: Spec,
        operands: Operands[jax.Array],
        residuals: Residuals,
        wants: Wants,
        *rest: object,
    ) -> Gradients:
        asked.append((spec.sinks, wants))
        gradients = Gradients(operands.q, operands.k, operands.v, None)
        return gradients._replace(alibi_slopes=per_head) if offers else gradients

    rng = np.random.default_rng(0)
    length = 5 if offers else 6  # programs of the other are kept
    q, k, v = (jnp.asarray(rng.normal(size=(2, length, 3, 8)), jnp.float32) for _ in range(3))

    def gradient(implementation: str) -> jax.Array:
        def loss(slopes: jax.Array) -> jax.Array:
            out = jattn.dot_product_attention(
                q,
                k,
                v,
                alibi_slopes=slopes,
                sinks=jnp.zeros(3),
                implementation=implementation,
            )
            return jnp.sum(out**2)

        return jax.grad(loss)(jnp.ones(shape))

    if offers:
        full = (1,) * (2 - len(shape)) + shape
        axes = tuple(i for i in range(2) if full[i] == 1)
        expected = per_head[..., 0].sum(axes, keepdims=True).reshape(shape)
    else:
        expected = gradient("reference")
    monkeypatch.setattr(CpuBackend, "backward", backward)
    np.testing.assert_allclose(gradient("cpu"), expected, rtol=1e-4)
    assert asked == [(None, Wants(q=False, k=False, v=False, bias=False, alibi_slopes=True))]


@pytest.mark.parametrize(
    ("has_slopes", "parts", "message"),
    [(True, 2, "dslopes has 2 parts, must have 1"), (False, 1, "dslopes is wanted without")],
)
def test_the_native_module_refuses_what_it_cannot_compute(
    has_slopes: bool, parts: int, message: str
) -> None:
    x = jnp.ones((1, 4, 2, 8))
    spec = Spec(1, 4, 4, 2, 2, 8, 8, "float32", 0.1, alibi_slopes=(1, 2) if has_slopes else None)
    operands = Operands(x, x, x, alibi_slopes=jnp.ones((1, 2, 1)) if has_slopes else None)
    residuals = Residuals(out=x, lse=jnp.ones((1, 2, 4)), dout=x, dlse=None)
    wants = Wants(q=False, k=False, v=False, bias=False, alibi_slopes=True)

    def call() -> jax.Array | None:
        plan = {"backend": "cpu"}
        return ffi.backward(spec, operands, residuals, wants, plan, (1,), parts).alibi_slopes

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
