"""What jattn takes from JAX without a promise that it stays. A failure here names what a new JAX release moved."""

import importlib
import inspect

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import mlir

from jattn.jax_interface import equations

PIECES = {
    "jax.interpreters.ad": (
        "Zero",
        "instantiate_zeros",
        "is_undefined_primal",
        "primitive_jvps",
        "primitive_transposes",
    ),
    "jax.interpreters.batching": ("primitive_batchers",),
    "jax.interpreters.partial_eval": ("dce_jaxpr",),
    "jax.interpreters.mlir": (
        "LoweringRuleContext",
        "ModuleContext",
        "SPMDAxisContext",
        "ShardingContext",
        "lower_fun",
        "register_lowering",
    ),
    "jax._src.core": ("NamedAxisEffect",),
    "jax._src.dispatch": ("prim_requires_devices_during_lowering",),
    "jax._src.lib": ("cuda_versions",),
    "jax._src.source_info_util": ("current_name_stack", "user_context"),
    "jax.extend.core": ("ClosedJaxpr", "Jaxpr", "Literal", "Primitive", "jaxpr_as_fun"),
    "jax._src.cudnn.fused_attention_stablehlo": (
        "AttentionLayout",
        "MaskType",
        "_dot_product_attention_bwd_p",
        "_dot_product_attention_fwd_p",
    ),
    "jax.experimental.custom_partitioning": ("custom_partitioning",),
    "jax.lax": ("pcast",),
    "jax.sharding": ("AxisType", "ManualAxisType", "NamedSharding", "PartitionSpec", "reshard"),
    "jax.ad_checkpoint": ("checkpoint_name",),
    "jax": ("make_user_context", "shard_map", "typeof"),
}


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in PIECES.items() for n in names])
def test_jax_still_has(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name), (
        f"JAX {jax.__version__} has no {module}.{name}"
    )


def test_types_tell_manual_axes() -> None:
    assert jax.typeof(jnp.zeros(())).manual_axis_type.varying == frozenset()


def test_calls_of_functions_with_rules_hold_these() -> None:
    jaxpr = jax.make_jaxpr(jax.nn.relu)(1.0).jaxpr
    (call,) = (x for x, _, _ in equations(jaxpr) if x.primitive.name == "custom_jvp_call")
    assert {"call_jaxpr", "jvp_jaxpr_fun", "num_consts"} <= set(call.params)
    traced, constants, is_zero = call.params["jvp_jaxpr_fun"].call_wrapped(False)
    assert len(traced.invars) == 2
    assert (len(constants), is_zero) == (0, [False])


def test_user_context_has_a_global_value() -> None:
    context = jax.make_user_context("default")
    assert context.value == "default"
    with context("other"):
        assert context.value == "other"
    context.set_global("changed")
    assert context.value == "changed"


def test_custom_partitioning_takes_a_sharding_rule() -> None:
    from jax.experimental.custom_partitioning import custom_partitioning

    parameters = inspect.signature(custom_partitioning.def_partition).parameters
    assert {"partition", "sharding_rule", "need_replication_factors"} <= set(parameters)


def test_lowering_contexts_tell_platforms() -> None:
    context = mlir.LoweringRuleContext.__dataclass_fields__
    assert {"module_context", "platforms"} <= set(context)
    assert "platforms" in inspect.signature(mlir.ModuleContext).parameters


def test_default_device_is_readable() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        assert jax.config.values["jax_default_device"] == jax.devices("cpu")[0]
