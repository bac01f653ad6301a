"""What one pass of one call runs: kernels and where their machine code comes from, scratch, and the work it does.

Nothing here knows a backend: a backend's own code is traced with the shapes of the problem, and the custom calls in
that trace say what would run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jattn import ffi
from jattn.backends import Backend, Residuals, Wants
from jattn.config import Determinism
from jattn.device import Device
from jattn.jax_interface import CUDNN_PRIMITIVES, equations
from jattn.spec import Operands, Spec

PassName = Literal["forward", "backward", "tangent"]
Shape = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a pass.

    Attributes:
      family: name of the kernel, or "native" for that of the CPU backend.
      choices: its compile-time choices that are not defaults: name -> value, tiles among them.
      origin: where its machine code comes from: "built in" (compiled with the package), "cache" (on disk), "NVRTC"
        (compiled when first needed), or "cuDNN".
    """

    family: str
    choices: dict[str, str]
    origin: str

    def __str__(self) -> str:
        words = " ".join(f"{name}={value}" for name, value in self.choices.items())
        return f"{self.family} {words}" + (f" ({self.origin})" if self.origin else "")


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass of a call: forward, backward or tangent.

    Attributes:
      name: which.
      backend: who runs it; a backend may hand its backward pass to another one.
      kernels: what it launches; empty for a backend that is a program of XLA operations.
      flops: floating-point operations of the matrix products, counting visible pairs only; None if an
        extent is symbolic.
      moved_bytes: bytes of operands and results, each once: the least that memory must move; None likewise.
      scratch_bytes: extra memory of the kernels; None likewise, and of cuDNN, which tells XLA alone.
      data_dependent: lengths, segments, positions or a mask may make ``flops`` smaller.
    """

    name: PassName
    backend: str
    kernels: tuple[Kernel, ...]
    flops: float | None
    moved_bytes: int | None
    scratch_bytes: int | None
    data_dependent: bool


def plan_pass(
    name: PassName,
    backend: Backend,
    spec: Spec,
    device: Device,
    wants: Wants,
    determinism: Determinism,
    *,
    has_dlse: bool = False,
) -> Pass:
    """Says what a backend runs for a pass of a problem. Traces it with shapes only.

    Args:
      name: the pass.
      backend: who was chosen for the problem.
      spec: the problem.
      device: where it runs.
      wants: the gradients that a backward pass computes, or the tangents that a tangent pass reads.
      determinism: the caller's wish.
      has_dlse: whether the log-sum-exp has a cotangent.
    """
    runner = backend.for_backward() if name == "backward" else backend
    calls: list[Any] = []
    if name == "forward":

        def forward(*arrays: jax.Array) -> Any:
            return runner.forward(spec, Operands.unflatten(spec, arrays), device)

        trace = jax.make_jaxpr(forward)(*operand_shapes(spec).flat())
        calls = _custom_calls(trace.jaxpr)
    elif name == "backward" and any(wants.of_backend().all_flags()):
        # As jattn.autodiff asks a backend: the row statistics hold the sinks, so that it is given none.
        given = spec.without_sinks()

        def backward(kept: tuple[jax.Array, ...], *arrays: jax.Array) -> Any:
            operands = Operands.unflatten(given, arrays)
            rest = Residuals(kept[0], kept[1], kept[2], kept[3] if has_dlse else None)
            return tuple(
                runner.backward(given, operands, rest, wants.of_backend(), device, determinism)
            )

        kept = residual_shapes(spec, has_dlse)
        trace = jax.make_jaxpr(backward)(kept, *operand_shapes(given).flat())
        calls = _custom_calls(trace.jaxpr)
    return Pass(
        name=name,
        backend=runner.name if name != "tangent" else "xla",
        kernels=tuple(kernel for call in calls for kernel in _kernels(call)),
        flops=count_flops(spec, name),
        moved_bytes=_bytes(_arrays_of(name, spec, wants, has_dlse=has_dlse)),
        scratch_bytes=_scratch_bytes(calls),
        data_dependent=spec.q_lengths
        or spec.kv_lengths
        or spec.segments
        or spec.positions
        or spec.mask is not None,
    )


# ---- Shapes --------------------------------------------------------------------------------------------------------


def operand_shapes(spec: Spec) -> Operands[Any]:
    """The shapes and dtypes of a problem's arrays."""
    shapes = spec.shapes()
    batch, q_len, kv_len = spec.batch, spec.q_len, spec.kv_len

    def index(is_there: bool, *shape: int) -> Any:
        return Shape(shape, np.int32) if is_there else None

    dropout, program = spec.dropout, spec.score_mod
    return Operands(
        q=Shape(shapes["q"], spec.dtype),
        k=Shape(shapes["k"], spec.dtype),
        v=Shape(shapes["v"], spec.dtype),
        bias=None if spec.bias is None else Shape(spec.bias, spec.bias_dtype),
        mask=None if spec.mask is None else Shape(spec.mask, np.bool_),
        q_lengths=index(spec.q_lengths, batch),
        kv_lengths=index(spec.kv_lengths, batch),
        q_segments=index(spec.segments, batch, q_len),
        kv_segments=index(spec.segments, batch, kv_len),
        q_positions=index(spec.positions, batch, q_len),
        kv_positions=index(spec.positions, batch, kv_len),
        sinks=None if spec.sinks is None else Shape((*spec.sinks, 1), np.float32),
        alibi_slopes=(
            None if spec.alibi_slopes is None else Shape((*spec.alibi_slopes, 1), np.float32)
        ),
        dropout_keys=None if dropout is None else Shape((*dropout.keys, 2), np.uint32),
        dropout_rate=None if dropout is None else Shape((dropout.rate, 1, 1), np.float32),
        batch_ids=index(program is not None, batch),
        head_ids=index(program is not None, spec.num_heads),
        captures=()
        if program is None
        else tuple(Shape(c.shape, jax.numpy.dtype(c.dtype)) for c in program.captures),
    )


def residual_shapes(spec: Spec, has_dlse: bool) -> tuple[Any, ...]:
    """out, lse, dout and, where it is used, dlse."""
    shapes = spec.shapes()
    out, lse = Shape(shapes["out"], spec.dtype), Shape(shapes["lse"], spec.lse_dtype)
    return (out, lse, out, lse) if has_dlse else (out, lse, out)


def _arrays_of(name: PassName, spec: Spec, wants: Wants, *, has_dlse: bool) -> tuple[Any, ...]:
    """The shapes of what a pass reads and writes: operands and results of the primitives of ``jattn.autodiff``."""
    operands = operand_shapes(spec)
    kept = residual_shapes(spec, has_dlse)
    out_and_lse = kept[:2]
    if name == "forward":
        return (*operands.flat(), *out_and_lse)
    pairs = zip(operands.differentiable(), wants.all_flags(), strict=False)
    of_wanted = [shape for shape, is_wanted in pairs if is_wanted and shape is not None]
    if name == "backward":
        return (*operands.flat(), *kept, *of_wanted)
    return (*operands.flat(), *out_and_lse, *of_wanted, *out_and_lse)


def _bytes(arrays: Sequence[Any]) -> int | None:
    total = 0
    for array in arrays:
        if not all(isinstance(extent, int) for extent in array.shape):
            return None
        total += int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize
    return total


# ---- Work ----------------------------------------------------------------------------------------------------------


def visible_pairs(spec: Spec) -> int | None:
    """Counts the pairs of one head that the band leaves, over the batch; what arrays hide is not known here."""
    extents = (spec.batch, spec.q_len, spec.kv_len)
    if not all(isinstance(extent, int) for extent in extents):
        return None
    if spec.band.unbounded or spec.positions:
        return spec.batch * spec.q_len * spec.kv_len
    offset = spec.kv_len - spec.q_len if spec.band.lower_right else 0
    far = spec.q_len + spec.kv_len
    rows = np.arange(spec.q_len) + offset
    first = np.maximum(rows - min(spec.band.left, far), 0)
    last = np.minimum(rows + min(spec.band.right, far), spec.kv_len - 1)
    return spec.batch * int(np.maximum(last - first + 1, 0).sum())


def count_flops(spec: Spec, name: PassName) -> float | None:
    """Two operations for each multiply-add: two products forward, five backward and in the tangent."""
    pairs = visible_pairs(spec)
    extents = (spec.num_heads, spec.head_dim, spec.head_dim_v)
    if pairs is None or not all(isinstance(extent, int) for extent in extents):
        return None
    forward = spec.head_dim + spec.head_dim_v
    both = 3 * spec.head_dim + 2 * spec.head_dim_v
    return 2.0 * spec.num_heads * pairs * (forward if name == "forward" else both)


# ---- Kernels -------------------------------------------------------------------------------------------------------


def _custom_calls(jaxpr: Any) -> list[Any]:
    return [
        equation
        for equation, _, _ in equations(jaxpr)
        if equation.primitive.name in CUDNN_PRIMITIVES
        or (
            equation.primitive.name == "ffi_call"
            and equation.params["target_name"] in (ffi.FORWARD_TARGET, ffi.BACKWARD_TARGET)
        )
    ]


def _scratch_bytes(calls: Sequence[Any]) -> int | None:
    # The last result of a call is its scratch. XLA asks cuDNN for the size of its own when it compiles.
    if any(call.primitive.name in CUDNN_PRIMITIVES for call in calls):
        return None
    sizes = [_bytes(call.params["result_avals"][-1:]) for call in calls]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _plan_of(call: Any) -> dict[str, Any]:
    return dict(dict(call.params["attributes"])["plan"])


def _kernels(call: Any) -> Iterator[Kernel]:
    if call.primitive.name in CUDNN_PRIMITIVES:
        mask = call.params["mask_type"].name.lower()
        yield Kernel(call.primitive.name, {"mask": mask}, "cuDNN")
        return
    from jattn import _core

    plan = _plan_of(call)
    keys = str(plan["kernels"])
    if "program" in plan:
        _core.register_program(str(plan["program"]))  # its keys name it by its digest
    if not keys:
        query, key = (variable.aval for variable in call.invars[:2])
        instruction_set = _core.cpu_instruction_set_of(
            q_len=query.shape[1], kv_len=key.shape[1], dtype=str(query.dtype)
        )
        yield Kernel("native", {"isa": instruction_set}, "built in")
        return
    for key in keys.split(";"):
        words = dict(word.split("=", 1) for word in key.split(" "))
        yield Kernel(words.pop("family"), words, kernel_origin(key))


@functools.cache
def _built_in() -> frozenset[str]:
    from jattn import _core

    return frozenset(_core.canonical_kernel_key(row["key"]) for row in _core.hot_set())


def kernel_origin(key: str) -> str:
    """Says where the machine code of a kernel key would come from, without compiling anything."""
    from jattn import _core

    if _core.canonical_kernel_key(key) in _built_in():
        return "built in"
    try:
        name = _core.cache_entry_name(key)
    except RuntimeError:
        return "NVRTC, which is missing here"
    cache = _core.cache_info()
    if cache["enabled"] and not cache["problem"] and _core.cache_read(cache["folder"], name):
        return "cache"
    return "NVRTC"
