"""Adapters: one attention problem, forward or forward and backward, as something that can be timed.

Each implementation says with a sentence why it cannot run a case; none of them is needed to import this module.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

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
    for feature in features:
        if present[feature]:
            raise UnsupportedError(f"{name} does not take: {feature}")


# --- JAX --------------------------------------------------------------------------------------------------------------

Attention = Callable[..., jax.Array]


def _jax_contender(
    name: str, case: Case, arrays: Arrays, attention: Attention, backward: bool
) -> Contender:
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


def jattn_contender(
    case: Case, arrays: Arrays, backward: bool, implementation: str | None
) -> tuple[Contender, str]:
    """Our own; also returns which backends ran, "forward" or "forward/backward".

    Raises:
      jattn.NoBackendError: the named implementation refuses the case.
    """
    keywords: dict[str, Any] = case.options()
    optional = {
        "mask": arrays.mask,
        "query_seq_lengths": arrays.q_lengths,
        "key_value_seq_lengths": arrays.kv_lengths,
        "query_segment_ids": arrays.q_segments,
        "key_value_segment_ids": arrays.kv_segments,
    }
    keywords |= {name: jnp.asarray(array) for name, array in optional.items() if array is not None}

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, *bias: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(
            q, k, v, *bias, implementation=implementation, **keywords
        )

    jattn.reset_call_counters()
    contender = _jax_contender(
        f"jattn:{implementation or 'auto'}", case, arrays, attention, backward
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
        _refuse(name, case, ("softcap", "segments", "lower right"))
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

        return _jax_contender(name, case, arrays, attention, backward)

    return build


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
        device = "cuda" if on_gpu else "cpu"

        def convert(x: jax.Array) -> Any:
            host = np.asarray(x)
            if host.dtype == jnp.bfloat16:
                return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16).to(device)
            return torch.from_numpy(host.copy()).to(device)

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
                key: jnp.asarray(value.detach().transpose(1, 2).float().cpu().numpy()).astype(
                    case.dtype
                )
                for key, value in named.items()
                if key != "dbias"
            }

        try:
            wait(enqueue())
        except RuntimeError as error:
            raise UnsupportedError(f"{name}: {str(error).splitlines()[0]}") from error
        return Contender(name=name, enqueue=enqueue, wait=wait, results=results)

    return build


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
        Rival("torch-flash", _torch_sdpa("flash")),
        Rival("torch-efficient", _torch_sdpa("efficient")),
        Rival("torch-cudnn", _torch_sdpa("cudnn")),
    )
}
