"""The backend "cudnn" runs where it is named and nowhere else, and is lowered to cuDNN's calls; needs no GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jattn
from jattn.jax_interface import CUDNN_TARGETS

SM80, SM90 = jattn.Device("cuda", arch=(8, 0)), jattn.Device("cuda", arch=(9, 0))
X = jax.ShapeDtypeStruct((2, 64, 4, 64), "bfloat16")
LENGTHS = jax.ShapeDtypeStruct((2,), "int32")


def codes(q: Any = X, k: Any = X, v: Any = X, **keywords: Any) -> list[str]:
    device = keywords.pop("device", SM90)
    found = jattn.explain(q, k, v, implementation="cudnn", device=device, **keywords)
    reasons = [reason.code for reason in found.reasons.get("cudnn", ())]
    assert (found.chosen == "cudnn") == (reasons == [])
    return reasons


def of_length(length: int, dtype: str = "bfloat16") -> Any:
    return jax.ShapeDtypeStruct((2, length, 4, 64), dtype)


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "local_window_size": (9, None)},
        {"local_window_size": (9, 0)},
        {
            "is_causal": True,
            "causal_alignment": "lower_right",
        },  # the same where there are as many keys
        {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS, "is_causal": True},
        {"scale": -0.5},
        {"needs_grad": True},
        {"device": SM80},
        {"device": jattn.Device("cuda", arch=(9, 0), cudnn=91900)},
    ],
    ids=str,
)
def test_runs(keywords: dict[str, Any]) -> None:
    assert codes(**keywords) == []


@pytest.mark.parametrize(
    ("keywords", "wanted"),
    [
        ({"local_window_size": (9, 3)}, ["FEATURE"]),
        ({"local_window_size": (9, None)}, ["FEATURE"]),
        ({"k": of_length(70), "v": of_length(70), "is_causal": True, "causal_alignment": "lower_right"}, ["FEATURE"]),
        ({"q": of_length(70), "is_causal": True, "local_window_size": (9, None)}, ["FEATURE"]),
        ({"q": of_length(1), "k": of_length(1), "v": of_length(1)}, ["FEATURE"]),
        ({"logits_soft_cap": 9.0}, ["FEATURE"]),
        ({"segment_ids": jax.ShapeDtypeStruct((2, 64), "int32")}, ["FEATURE"]),
        ({"bias": jax.ShapeDtypeStruct((64, 64), "bfloat16")}, ["MASK"]),
        ({"mask": jax.ShapeDtypeStruct((64, 64), "bool")}, ["MASK"]),
        ({name: of_length(64, "float32") for name in ("q", "k", "v")}, ["DTYPE"]),
        ({"device": jattn.Device("cuda", arch=(7, 5))}, ["ARCH"]),
        ({"device": jattn.Device("cpu")}, ["PLATFORM"]),
        ({"device": jattn.Device("cuda", arch=(9, 0), cudnn=0)}, ["NOT_BUILT"]),
    ],
    ids=str,
)  # fmt: skip
def test_refuses(keywords: dict[str, Any], wanted: list[str]) -> None:
    assert codes(**keywords) == wanted


def test_is_chosen_by_name_alone() -> None:
    def chosen(**keywords: Any) -> str | None:
        return jattn.explain(X, X, X, device=SM90, **keywords).chosen

    assert chosen() == "flash"
    assert chosen(implementation=("cudnn", "flash")) == "cudnn"
    assert chosen(implementation=("flash", "cudnn")) == "flash"
    with jattn.sdpa_kernel(["cudnn", "xla"]):
        assert chosen() == "cudnn"
    with jattn.sdpa_kernel(["cudnn", "mem_efficient"]):
        assert chosen() == "mem_efficient"
    with jattn.sdpa_kernel(["xla"]):
        assert chosen() == "xla"
    assert jattn.explain(X, X, X, device=SM90).reasons["cudnn"] == ()


def test_is_lowered_to_calls_of_cudnn() -> None:
    """Once forward, and backward once for out and once for the log-sum-exp; nothing of another backend."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        out, lse = jattn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            local_window_size=(9, None),
            key_value_seq_lengths=lengths,
            implementation="cudnn",
            return_lse=True,
        )
        return out.astype(jnp.float32).sum() + lse.sum()

    jattn.reset_call_counters()
    with jattn.target_device(SM90):
        gradients = jax.jit(jax.grad(loss, (0, 1, 2)))
        text = gradients.trace(X, X, X, LENGTHS).lower(lowering_platforms=("cuda",)).as_text()
    assert jattn.call_counters() == {"cudnn": {"forward": 1, "backward": 1}}
    assert [text.count(f"@{target}(") for target in CUDNN_TARGETS] == [1, 2]
    assert "jattn_" not in text
    assert "PADDING_CAUSAL" in text


def test_is_lowered_inside_shard_map() -> None:
    """The types of the calls vary over the axes of the mesh, as those of the arrays do."""

    def gradients(*arrays: jax.Array) -> Any:
        out, pullback = jax.vjp(
            lambda *x: jattn.dot_product_attention(*x, implementation="cudnn"), *arrays
        )
        return pullback(out)

    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("x",), axis_types=axis_types, devices=jax.devices()[:1])
    specs = (jax.sharding.PartitionSpec("x"),) * 3
    sharded = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs)
    with jattn.target_device(SM90):
        text = jax.jit(sharded).trace(X, X, X).lower(lowering_platforms=("cuda",)).as_text()
    assert [text.count(f"@{target}(") for target in CUDNN_TARGETS] == [1, 1]


def test_is_exported() -> None:
    def gradient(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out, pullback = jax.vjp(
            lambda q: jattn.dot_product_attention(q, k, v, implementation="cudnn"), q
        )
        return pullback(out)[0]

    checks = jattn.export_disabled_checks()
    with jattn.target_device(SM90):
        exported = jax.export.export(jax.jit(gradient), platforms=["cuda"], disabled_checks=checks)
        text = exported(X, X, X).mlir_module()
    for target in CUDNN_TARGETS:
        assert f"@{target}(" in text


def test_explain_names_its_kernels() -> None:
    found = jattn.explain(
        X, X, X, device=SM90, implementation="cudnn", is_causal=True, needs_grad=True
    )
    forward, backward = found.passes
    for each, name in ((forward, "fwd"), (backward, "bwd")):
        assert [str(kernel) for kernel in each.kernels] == [
            f"dot_product_attention_{name} mask=causal (cuDNN)"
        ]
        assert each.scratch_bytes is None
