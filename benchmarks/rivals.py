"""Adapters: one attention problem, forward or forward and backward, as something that can be timed.

Each implementation says with a sentence why it cannot run a case; none of them is needed to import this module.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import jattn
from benchmarks.arrays import Arrays
from benchmarks.timing import Contender
from jattn.testing.cases import Case

# Above this, the scores of a textbook implementation would not leave room for their gradients.
LARGEST_SCORES_BYTES = 8 << 30


class UnsupportedError(Exception):
    """Raised with a sentence by an implementation that cannot run a case."""


def _refuse(name: str, case: Case, features: Sequence[str]) -> None:
    """Raises for the first of the features that the case has."""
    present = {
        "window": case.window is not None,
        "softcap": case.softcap is not None,
        "segments": case.segments is not None,
        "lengths": case.q_lengths is not None or case.kv_lengths is not None,
        "lower right": case.lower_right,
        "bias": case.bias_form is not None,
        "mask": case.mask_form is not None,
        "groups": case.num_heads != case.num_kv_heads,
        "value head dim": case.head_dim != case.head_dim_v,
    }
    extras = {
        "positions": case.positions is not None,
        "sinks": case.sinks_form is not None,
        "ALiBi": case.alibi_form is not None,
        "dropout": case.dropout_rate > 0,
    }
    for feature, there in extras.items():
        if there:
            raise UnsupportedError(f"{name} does not take: {feature}")
    for feature in features:
        if present[feature]:
            raise UnsupportedError(f"{name} does not take: {feature}")


# --- JAX --------------------------------------------------------------------------------------------------------------

Attention = Callable[..., jax.Array]


def jax_contender(name: str, arrays: Arrays, attention: Attention, backward: bool) -> Contender:
    """Wraps attention(q, k, v, bias) as one jitted call."""
    bias = () if arrays.bias is None else (arrays.bias,)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, *bias: jax.Array) -> dict[str, jax.Array]:
        return {"out": attention(q, k, v, *bias)}

    def both(
        dout: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *bias: jax.Array
    ) -> dict[str, jax.Array]:
        out, pull = jax.vjp(attention, q, k, v, *bias)
        return dict(zip(("dq", "dk", "dv", "dbias"), pull(dout), strict=False)) | {"out": out}

    operands: tuple[jax.Array, ...] = (arrays.q, arrays.k, arrays.v, *bias)
    if backward:
        operands = (arrays.dout, *operands)
    # Compiled ahead, so that an implementation that cannot do this fails here, and a call is only a call.
    compiled = jax.jit(both if backward else forward).lower(*operands).compile()
    return Contender(
        name=name,
        enqueue=lambda: compiled(*operands),
        wait=jax.block_until_ready,
        results=_as_dict,
    )


def _as_dict(results: object) -> dict[str, object]:
    return cast(dict[str, object], results)


def jattn_attention(case: Case, arrays: Arrays, implementation: str | None) -> Attention:
    """Our own as attention(q, k, v, bias)."""
    keywords: dict[str, Any] = case.options()
    optional = {
        "mask": arrays.mask,
        "query_seq_lengths": arrays.q_lengths,
        "key_value_seq_lengths": arrays.kv_lengths,
        "query_segment_ids": arrays.q_segments,
        "key_value_segment_ids": arrays.kv_segments,
        "query_positions": arrays.q_positions,
        "key_value_positions": arrays.kv_positions,
        "sinks": arrays.sinks,
        "alibi_slopes": arrays.alibi_slopes,
        "dropout_key": arrays.dropout_key,
    }
    keywords |= {name: jnp.asarray(array) for name, array in optional.items() if array is not None}

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, *bias: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(
            q, k, v, *bias, implementation=implementation, **keywords
        )

    return attention


def jattn_contender(
    case: Case, arrays: Arrays, backward: bool, implementation: str | None
) -> tuple[Contender, str]:
    """Our own; also returns which backends ran, "forward" or "forward/backward".

    Raises:
      jattn.NoBackendError: the named implementation refuses the case.
    """
    jattn.reset_call_counters()
    contender = jax_contender(
        f"jattn:{implementation or 'auto'}",
        arrays,
        jattn_attention(case, arrays, implementation),
        backward,
    )
    counts = jattn.call_counters()
    ran = [
        "+".join(backend for backend, passes in counts.items() if name in passes)
        for name in (("forward", "backward") if backward else ("forward",))
    ]
    return contender, "/".join(ran)


def _jax_nn(implementation: Literal["xla", "cudnn"]) -> Callable[[Case, Arrays, bool], Contender]:
    def build(case: Case, arrays: Arrays, backward: bool) -> Contender:
        name = f"jax-{implementation}"
        _refuse(name, case, ("softcap", "segments", "lower right", "value head dim"))
        scores_bytes = 4 * case.batch * case.num_heads * case.q_len * case.kv_len
        if implementation == "xla" and scores_bytes > LARGEST_SCORES_BYTES:
            raise UnsupportedError(f"{name}: the scores alone need {scores_bytes / 2**30:.0f} GiB")
        if implementation == "cudnn":
            if jax.default_backend() != "gpu":
                raise UnsupportedError(f"{name} needs a GPU")
            if case.dtype not in ("bfloat16", "float16"):
                raise UnsupportedError(f"{name} does not take: {case.dtype}")
        left, right = case.window or (None, None)
        window = None
        if case.window is not None:
            window = (case.kv_len if left is None else left, case.q_len if right is None else right)

        def attention(q: jax.Array, k: jax.Array, v: jax.Array, *bias: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(
                q,
                k,
                v,
                bias[0] if bias else None,
                mask=arrays.mask,
                scale=case.scale,
                is_causal=case.is_causal,
                local_window_size=window,
                query_seq_lengths=arrays.q_lengths,
                key_value_seq_lengths=arrays.kv_lengths,
                implementation=implementation,
            )

        # By default XLA takes float32 products in TF32 on a GPU.
        precision = "highest" if case.dtype == "float32" else None
        with jax.default_matmul_precision(precision):
            return jax_contender(name, arrays, attention, backward)

    return build


def _flash_attention_3(name: str, package: str) -> Callable[[Case, Arrays, bool], Contender]:
    """FlashAttention-3's kernels behind one of the packages that register them as XLA custom calls.

    Documents go to the entry point for packed sequences, which takes their borders.
    """

    def build(case: Case, arrays: Arrays, backward: bool) -> Contender:
        if importlib.util.find_spec(package) is None:
            raise UnsupportedError(f"{name}: the package {package} is not installed")
        _refuse(name, case, ("softcap", "bias", "mask", "lengths", "value head dim"))
        # Its causal masks and windows are aligned to the last key.
        has_band = case.is_causal or case.window is not None
        if case.q_len != case.kv_len and has_band and not case.lower_right:
            raise UnsupportedError(f"{name}: alignment to the first key")
        library = importlib.import_module(package)
        window = (-1, -1)
        if case.window is not None:
            left, right = case.band
            window = (-1 if left is None else left, -1 if right is None else right)
        options: dict[str, Any] = {
            "softmax_scale": case.scale_value,
            "is_causal": case.is_causal,
            "window_size": window,
        }
        if arrays.q_segments is None:

            def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                return cast(jax.Array, library.flash_mha(q, k, v, **options))

        else:
            borders = packed_borders(arrays.q_segments)
            options["max_seqlen" if package == "dew_flash_attn" else "max_seqlen_q"] = int(
                np.diff(borders).max()
            )
            if package != "dew_flash_attn":
                options["max_seqlen_k"] = options["max_seqlen_q"]
            starts = jnp.asarray(borders, jnp.int32)

            def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
                out = library.flash_mha_varlen(q[0], k[0], v[0], starts, **options)
                return cast(jax.Array, out[None])

        return jax_contender(name, arrays, attention, backward)

    return build


def _tokamax(case: Case, arrays: Arrays, backward: bool) -> Contender:
    name = "tokamax"
    if importlib.util.find_spec(name) is None:
        raise UnsupportedError(f"{name}: the package tokamax is not installed")
    _refuse(name, case, ("segments", "lower right"))
    library = importlib.import_module(name)
    window = None
    if case.window is not None:
        left, right = case.window
        window = (case.kv_len if left is None else left, case.q_len if right is None else right)

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, *bias: jax.Array) -> jax.Array:
        return cast(
            jax.Array,
            library.dot_product_attention(
                q,
                k,
                v,
                bias[0] if bias else None,
                arrays.mask,
                scale=case.scale,
                is_causal=case.is_causal,
                local_window_size=window,
                logits_soft_cap=case.softcap,
                query_seq_lengths=arrays.q_lengths,
                key_value_seq_lengths=arrays.kv_lengths,
            ),
        )

    return jax_contender(name, arrays, attention, backward)


def packed_borders(segments: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Finds where documents begin, and the end, in ids (1, T) that are equal inside a document only.

    Raises:
      UnsupportedError: there is padding, or several batch entries.
    """
    if segments.shape[0] != 1 or (segments < 0).any():
        raise UnsupportedError("packed sequences fill one batch entry without padding")
    inner = np.flatnonzero(np.diff(segments[0])) + 1
    return np.concatenate([[0], inner, [segments.shape[1]]])


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def _torch_sdpa(backend: str) -> Callable[[Case, Arrays, bool], Contender]:
    def build(case: Case, arrays: Arrays, backward: bool) -> Contender:
        name = f"torch-{backend}"
        if importlib.util.find_spec("torch") is None:
            raise UnsupportedError(f"{name}: the package torch is not installed")
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        _refuse(name, case, ("window", "softcap", "segments", "lengths", "lower right"))
        if backend == "flash":
            _refuse(name, case, ("bias", "mask"))
        on_gpu = jax.default_backend() == "gpu"
        if on_gpu and not torch.cuda.is_available():
            raise UnsupportedError(f"{name}: this torch sees no GPU")
        if not on_gpu and backend != "flash":
            raise UnsupportedError(f"{name} needs a GPU")
        torch.backends.cuda.matmul.allow_tf32 = False

        def convert(x: jax.Array) -> Any:
            x = jax.block_until_ready(x)
            if x.dtype == bool:
                return torch.from_dlpack(x.astype(jnp.uint8)).bool()
            return torch.from_dlpack(x)

        # torch wants (B, N, T, D); a transposed view keeps our layout in memory, which its kernels take as it is.
        q, k, v, dout = (
            convert(x).transpose(1, 2) for x in (arrays.q, arrays.k, arrays.v, arrays.dout)
        )
        extra = arrays.bias if arrays.mask is None else arrays.mask
        if arrays.bias is not None and arrays.mask is not None:
            raise UnsupportedError(f"{name} does not take: bias and mask together")
        attn_mask = None if extra is None else convert(extra)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(case.batch, case.num_heads, case.q_len, case.kv_len)
            if attn_mask.dtype != torch.bool:
                attn_mask = attn_mask.to(q.dtype)
        inputs = [q, k, v] if arrays.bias is None else [q, k, v, attn_mask]
        if backward:
            inputs = [x.detach().requires_grad_() for x in inputs]
            q, k, v = inputs[:3]
            attn_mask = inputs[3] if arrays.bias is not None else attn_mask
        kernel = {
            "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
        }[backend]

        def enqueue() -> tuple[Any, ...]:
            with sdpa_kernel(kernel):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=attn_mask,
                    is_causal=case.is_causal,
                    scale=case.scale,
                    enable_gqa=case.num_heads != case.num_kv_heads,
                )
            return (out, *torch.autograd.grad(out, inputs, dout)) if backward else (out,)

        def wait(_: object) -> None:
            if on_gpu:
                torch.cuda.synchronize()

        def results(tensors: Any) -> dict[str, object]:
            named = dict(zip(("out", "dq", "dk", "dv", "dbias"), tensors, strict=False))
            # The bias was expanded before its gradient was asked for, so that gradient is not the reduced one.
            return {
                key: jnp.from_dlpack(value.detach().transpose(1, 2).contiguous())
                for key, value in named.items()
                if key != "dbias"
            }

        try:
            wait(enqueue())
        except RuntimeError as error:
            raise UnsupportedError(f"{name}: {str(error).splitlines()[0]}") from error
        return Contender(name=name, enqueue=enqueue, wait=wait, results=results)

    return build


def _torch_flex(case: Case, arrays: Arrays, backward: bool) -> Contender:
    from benchmarks import flex_attention

    return flex_attention.build(case, arrays, backward)


@dataclasses.dataclass(frozen=True)
class Rival:
    """Another implementation: `build` raises UnsupportedError for a case that it cannot run."""

    name: str
    build: Callable[[Case, Arrays, bool], Contender]


RIVALS: dict[str, Rival] = {
    rival.name: rival
    for rival in (
        Rival("jax-cudnn", _jax_nn("cudnn")),
        Rival("jax-xla", _jax_nn("xla")),
        Rival("fa3-dew", _flash_attention_3("fa3-dew", "dew_flash_attn")),
        Rival("fa3-jax", _flash_attention_3("fa3-jax", "flash_attn3_jax")),
        Rival("torch-flash", _torch_sdpa("flash")),
        Rival("torch-efficient", _torch_sdpa("efficient")),
        Rival("torch-cudnn", _torch_sdpa("cudnn")),
        Rival("torch-flex", _torch_flex),
        Rival("tokamax", _tokamax),
    )
}
