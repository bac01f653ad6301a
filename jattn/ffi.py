"""The border to the native module: target names, registration, attributes, the one wrapper over ``ffi_call``."""

from __future__ import annotations

import functools
import importlib.util
import math
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from jattn import config, device_gradients
from jattn.backends.base import Residuals, Wants
from jattn.errors import Reason
from jattn.jax_interface import CUDNN_TARGETS, NamedSharding, PartitionSpec, manual_axes
from jattn.reference import Gradients
from jattn.spec import Operands, Spec

# The version is part of the names: exported programs carry them, and two versions may meet in one process.
FORWARD_TARGET = "jattn_forward_v1"
BACKWARD_TARGET = "jattn_backward_v1"

# Bits of the attribute `operands`, by fields of `Spec`; cc/ffi/bind.h has the same list (a test compares them).
OPERAND_BITS = {
    "bias": 1,
    "mask": 2,
    "q_lengths": 4,
    "kv_lengths": 8,
    "segments": 16,
    "positions": 32,
    "sinks": 64,
    "alibi_slopes": 128,
    "dropout": 256,
    "score_mod": 512,
}


@functools.cache
def register_targets() -> str:
    """Registers the handlers with JAX, once. Returns why the native module is missing, or an empty string.

    Registering starts no JAX backend and opens no CUDA library.
    """
    try:
        from jattn import _core
    except ImportError as error:
        return str(error)
    machine = config.environment()
    _core.configure(
        cache_dir=str(machine.kernel_cache_dir),
        cache_enabled=machine.kernel_cache_enabled,
        nvrtc_path=machine.nvrtc_path or _bundled_nvrtc(),
    )
    for target, stages in _core.registrations("cpu").items():
        jax.ffi.register_ffi_target(target, stages, platform="cpu")
    for target, stages in _core.registrations("cuda").items():
        jax.ffi.register_ffi_target(target, stages, platform="CUDA")
    return ""


def missing_module(backend: str) -> tuple[Reason, ...]:
    """The reason why a backend cannot run without the native module, if that is missing."""
    missing = register_targets()
    if not missing:
        return ()
    return (
        Reason(
            backend,
            "NOT_BUILT",
            "native module",
            missing,
            "must be importable",
            "reinstall jattn",
        ),
    )


def _bundled_nvrtc() -> str:
    """Path of the NVRTC library in the packages that ``jax[cuda13]`` or ``jax[cuda12]`` installs, or an empty
    string.
    """
    found = importlib.util.find_spec("nvidia")
    for root in found.submodule_search_locations or [] if found else []:
        for pattern in ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12"):
            if (path := Path(root) / pattern).exists():
                return str(path)
    return ""


def spec_attributes(spec: Spec, *, has_dlse: bool = False) -> dict[str, Any]:
    """The static facts a handler needs, with explicit widths; extents travel in the buffers."""
    bits = [bit for name, bit in OPERAND_BITS.items() if getattr(spec, name) not in (None, False)]
    return {
        "scale": np.float64(spec.scale),
        "softcap": np.float64(spec.softcap),
        "band_left": np.int64(spec.band.left),
        "band_right": np.int64(spec.band.right),
        "lower_right": np.bool_(spec.band.lower_right),
        "dropout_rows": np.bool_(spec.dropout is not None and spec.dropout.rows),
        "operands": np.int64(sum(bits)),
        "has_dlse": np.bool_(has_dlse),
        "num_captures": np.int64(0 if spec.score_mod is None else len(spec.score_mod.captures)),
    }


def forward(
    spec: Spec, operands: Operands[jax.Array], plan: dict[str, Any], scratch_shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Calls the forward target; ``scratch_shape`` in bytes. Returns out (B, T, N, Dv) and lse (B, N, T)."""
    shapes = spec.shapes()
    results = [
        (shapes["out"], spec.dtype),
        (shapes["lse"], spec.lse_dtype),
        (scratch_shape, "uint8"),
    ]
    out, lse, _ = _call(FORWARD_TARGET, operands.flat(), results, spec_attributes(spec), plan)
    return out, lse


def backward(
    spec: Spec,
    operands: Operands[jax.Array],
    residuals: Residuals,
    wants: Wants,
    plan: dict[str, Any],
    scratch_shape: tuple[int, ...],
    slope_parts: int = 0,
    captures: tuple[bool, ...] = (),
) -> Gradients:
    """Calls the backward target; a gradient that is not wanted comes back with zero elements.

    Args:
      spec, operands, residuals, wants: as for ``Backend.backward``.
      plan: the attribute of that name.
      scratch_shape: in bytes.
      slope_parts: in how many parts it computes the gradient of the slopes; 0: not at all.
      captures: for which captures it computes the gradient; (): for none.
    """
    program = spec.score_mod
    starts = [0]
    if program is not None and any(captures):
        starts = device_gradients.offsets(program, captures)
    shapes = spec.shapes()
    slopes_shape = (spec.batch, spec.num_heads, slope_parts)
    of_wanted = zip(
        (
            shapes["q"],
            shapes["k"],
            shapes["v"],
            spec.bias or (0,),
            slopes_shape,
            (starts[-1],),
        ),
        (*wants.flags(), slope_parts > 0, True),
        strict=True,
    )
    results = [shape if wanted else (0,) for shape, wanted in of_wanted]
    dtypes = (*[spec.dtype] * 3, spec.bias_dtype or spec.dtype, *[spec.lse_dtype] * 2)
    arrays = (
        *operands.flat()[:3],
        *(residuals.out, residuals.lse, residuals.dout),
        *operands.flat()[3:],
        *(() if residuals.dlse is None else (residuals.dlse,)),
    )
    dq, dk, dv, dbias, slopes, dcaptures, _ = _call(
        BACKWARD_TARGET,
        arrays,
        [*zip(results, dtypes, strict=True), (scratch_shape, "uint8")],
        spec_attributes(spec, has_dlse=residuals.dlse is not None),
        plan,
    )
    return Gradients(
        q=dq,
        k=dk,
        v=dv,
        bias=dbias if wants.bias else None,
        alibi_slopes=slopes.sum(-1, keepdims=True) if slope_parts > 0 else None,
        captures=_cut(dcaptures, spec, captures, starts) if any(captures) else None,
    )


def _cut(
    gradients: jax.Array, spec: Spec, wanted: tuple[bool, ...], starts: list[int]
) -> tuple[jax.Array | None, ...]:
    """The gradients of captures that lie one after the other; None for those that are not wanted."""
    assert spec.score_mod is not None
    return tuple(
        gradients[start : start + math.prod(c.shape)].reshape(c.shape) if flag else None
        for c, start, flag in zip(spec.score_mod.captures, starts, wanted, strict=False)
    )


def _call(
    target: str,
    arrays: tuple[jax.Array, ...],
    results: list[tuple[tuple[int, ...], str]],
    spec: dict[str, Any],
    plan: dict[str, Any],
) -> list[jax.Array]:
    axes = manual_axes(*arrays)
    if axes:
        sharding = NamedSharding(jax.typeof(arrays[0]).sharding.mesh, PartitionSpec())
        manual = jax.sharding.ManualAxisType(varying=axes)
        types = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, manual_axis_type=manual)
            for shape, dtype in results
        ]
    else:
        types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    return list(jax.ffi.ffi_call(target, types)(*arrays, spec=spec, plan=plan))


def export_disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """Returns what ``jax.export.export(..., disabled_checks=)`` needs to accept custom calls of jattn and cuDNN.

    The program that loads the exported function must import jattn first.
    """
    return [
        jax.export.DisabledSafetyCheck.custom_call(name)
        for name in (FORWARD_TARGET, BACKWARD_TARGET, *CUDNN_TARGETS)
    ]
