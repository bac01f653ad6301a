"""Rows past T060 that are about choosing, and need no GPU for it."""

import warnings

import jax
import pytest

import jattn

SM90 = jattn.Device("cuda", arch=(9, 0))


def alike(*shape: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (jax.ShapeDtypeStruct(shape, dtype),) * 3


def test_T068_fused_choice() -> None:
    half, single = alike(2, 128, 8, 64, dtype="float16"), alike(2, 128, 8, 64, dtype="float32")
    assert jattn.select_backend(*half, device=SM90, needs_grad=True) == "flash"
    assert jattn.select_backend(*single, device=SM90) == "mem_efficient"


@pytest.mark.parametrize("mode", ["warn", "strict"])
def test_T069_determinism_does_not_change_the_choice(mode: str) -> None:
    arrays = alike(1, 64, 8, 64, dtype="float32")
    with jattn.sdpa_kernel(["mem_efficient", "reference"]), jattn.deterministic(mode):  # type: ignore[arg-type]
        for needs_grad in (False, True):
            assert (
                jattn.select_backend(*arrays, device=SM90, needs_grad=needs_grad) == "mem_efficient"
            )


@pytest.mark.parametrize("mode", ["off", "warn", "strict"])
@pytest.mark.parametrize(
    ("backend", "title"),
    [("mem_efficient", "Memory Efficient attention"), ("flash", "Flash Attention")],
)
def test_T070_determinism_is_spoken_of_once_while_tracing(
    backend: str, title: str, mode: str
) -> None:
    def loss(x: jax.Array) -> jax.Array:
        out = jattn.dot_product_attention(x, x, x, implementation=backend)
        return out.astype("float32").sum()

    x = jax.ShapeDtypeStruct((1, 64, 8, 64), "float16")
    with (
        jattn.target_device(SM90),
        jattn.deterministic(mode),  # type: ignore[arg-type]
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        jax.eval_shape(jax.grad(loss), x)
    said = [str(w.message) for w in caught]
    if mode == "warn":
        assert len(said) == 1
        assert said[0].startswith(f"{title} defaults to a non-deterministic algorithm")
    else:
        assert said == []


@pytest.mark.filterwarnings("ignore:jattn:UserWarning")
def test_T070_cudnn_is_never_taken_for_deterministic() -> None:
    x = jax.ShapeDtypeStruct((1, 64, 8, 64), "float16")
    with jattn.deterministic("strict"), pytest.raises(jattn.NoBackendError) as caught:
        jattn.select_backend(x, x, x, implementation="cudnn", device=SM90, needs_grad=True)
    assert [reason.code for reason in caught.value.reasons] == ["DETERMINISTIC"]


@pytest.mark.parametrize(
    ("arch", "head_dim", "head_dim_v", "codes"),
    [
        ((8, 0), 128, 64, []),
        ((8, 0), 128, 144, ["HEAD_DIM"]),
        ((8, 0), 136, 136, ["HEAD_DIM", "HEAD_DIM"]),
        ((9, 0), 128, 144, []),
        ((9, 0), 128, 264, ["HEAD_DIM"]),
        ((9, 0), 12, 12, []),  # zeros make it 16
    ],
)
def test_T035_T089_head_dims_of_cudnn(
    arch: tuple[int, int], head_dim: int, head_dim_v: int, codes: list[str]
) -> None:
    """The largest depends on the device; any below it is served."""
    q, k = alike(1, 128, 2, head_dim, dtype="bfloat16")[:2]
    v = jax.ShapeDtypeStruct((1, 128, 2, head_dim_v), "bfloat16")
    device = jattn.Device("cuda", arch=arch)
    explanation = jattn.explain(q, k, v, implementation="cudnn", device=device, needs_grad=True)
    assert explanation.chosen == (None if codes else "cudnn")
    assert [reason.code for reason in explanation.reasons.get("cudnn", ())] == codes
