"""Rows past T060 that are about choosing, and need no GPU for it."""

import warnings
from typing import Any

import jax
import pytest

import jattn
from jattn.device_gradients import MAX_READS

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


def warnings_of_gradients(
    *argnums: int,
    backend: str = "flash",
    head_dim: int = 64,
    reads: int = 0,
    dtype: str = "bfloat16",
) -> list[str]:
    """What is said of gradients of (q, k, v, table), of which a pair reads so many elements."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> jax.Array:
        def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any, table: Any) -> Any:
            return s + sum(table[(k + i) % 64] for i in range(reads))

        options = {"score_mod": score_mod, "captures": (table,)} if reads else {}
        out = jattn.dot_product_attention(q, k, v, implementation=backend, **options)
        return out.astype("float32").sum()

    q = jax.ShapeDtypeStruct((1, 64, 8, head_dim), dtype)
    table = jax.ShapeDtypeStruct((64,), "float32")
    with (
        jattn.target_device(SM90),
        jattn.deterministic("warn"),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        jax.eval_shape(jax.grad(loss, argnums), q, q, q, table)
    return [str(warning.message) for warning in caught]


def test_T070_warnings_come_where_bits_vary() -> None:
    title = "Flash Attention defaults to a non-deterministic algorithm"
    assert warnings_of_gradients(0, 1, 2, head_dim=256) == []
    assert warnings_of_gradients(1, 2) == []  # dq alone is added up in any order
    assert warnings_of_gradients(0, head_dim=128) == []  # by a kernel of its own
    assert [said.startswith(title) for said in warnings_of_gradients(0, 1, head_dim=192)] == [True]
    assert [said.startswith(title) for said in warnings_of_gradients(3, head_dim=256, reads=1)] == [
        True
    ]
    assert warnings_of_gradients(0, 1, head_dim=256, reads=1) == []
    assert warnings_of_gradients(0, 1, 2, backend="xla", reads=1) == []
    for backend, reads in (("xla", 1), ("flash", MAX_READS + 1)):
        [said] = warnings_of_gradients(3, backend=backend, reads=reads)
        assert said.startswith("XLA defaults to a non-deterministic algorithm for the gradients of")
        assert (
            f"stop_gradient, or, on flash and mem_efficient, let score_mod read at most {MAX_READS}"
            in said
        )
    assert len(warnings_of_gradients(0, 1, 3, reads=MAX_READS + 1)) == 2


def test_T070_the_warning_of_cudnn_has_a_way_out() -> None:
    [said] = warnings_of_gradients(0, 1, 2, backend="cudnn")
    assert said.startswith("cuDNN Attention defaults to a non-deterministic algorithm")
    assert "has no other" in said


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
