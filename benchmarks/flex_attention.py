"""PyTorch's FlexAttention as a contender: masks are functions of indices, compiled for exactly the shapes of a case."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.arrays import Arrays
from benchmarks.rivals import UnsupportedError
from benchmarks.timing import Contender
from jattn.testing.cases import Case

NAME = "torch-flex"


def _from_jax(x: Any) -> Any:
    import torch

    return torch.from_dlpack(jax.block_until_ready(jnp.asarray(x)))


def _mask_mod(case: Case, arrays: Arrays) -> Any:
    """The visibility of a case as a function of (batch, head, query, key), or None if all pairs are visible."""
    parts: list[Any] = []
    left, right = case.band
    offset = case.kv_len - case.q_len if case.lower_right else 0
    if right is not None:
        parts.append(lambda b, h, q, k: k - q <= right + offset)
    if left is not None:
        parts.append(lambda b, h, q, k: k - q >= offset - left)
    if arrays.q_segments is not None and arrays.kv_segments is not None:
        q_ids, kv_ids = _from_jax(arrays.q_segments), _from_jax(arrays.kv_segments)
        parts.append(lambda b, h, q, k: (q_ids[b, q] == kv_ids[b, k]) & (q_ids[b, q] >= 0))
    if arrays.kv_lengths is not None:
        lengths = _from_jax(arrays.kv_lengths)
        parts.append(lambda b, h, q, k: k < lengths[b])
    if arrays.mask is not None:
        dense = _from_jax(arrays.mask.astype(jnp.uint8)).bool()
        dense = dense.expand(case.batch, case.num_heads, case.q_len, case.kv_len)
        parts.append(lambda b, h, q, k: dense[b, h, q, k])
    if not parts:
        return None

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        found = parts[0](b, h, q, k)
        for part in parts[1:]:
            found = found & part(b, h, q, k)
        return found

    return visible


def _score_mod(case: Case, arrays: Arrays, bias: Any) -> Any:
    """Soft cap, bias and slopes as a function of (score, batch, head, query, key), or None."""
    import torch

    slopes = None if arrays.alibi_slopes is None else _from_jax(arrays.alibi_slopes)
    if case.softcap is None and bias is None and slopes is None:
        return None

    def modify(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if case.softcap is not None:
            score = case.softcap * torch.tanh(score / case.softcap)
        if bias is not None:
            score = score + bias[b if bias.shape[0] > 1 else 0, h, q, k]
        if slopes is not None:
            score = score - slopes[h] * (q - k).abs()
        return score

    return modify


def build(case: Case, arrays: Arrays, backward: bool) -> Contender:
    """Compiles a case.

    Raises:
      UnsupportedError: no torch, no GPU, or a feature that has no function of indices here.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedError(f"{NAME}: the package torch is not installed")
    if jax.default_backend() != "gpu":
        raise UnsupportedError(f"{NAME} needs a GPU")
    unsupported = {
        "lower right beside lengths": case.lower_right and case.kv_lengths is not None,
        "query lengths": case.q_lengths is not None,
        "positions": case.positions is not None,
        "sinks": case.sinks_form is not None,
        "dropout": case.dropout_rate > 0,
        "value head dim": case.head_dim != case.head_dim_v,
        "bias form": case.bias_form is not None and case.bias_form.rjust(4, "1")[1:] != "nts",
        "slopes of batch entries": case.alibi_form not in (None, "n"),
    }
    for feature, there in unsupported.items():
        if there:
            raise UnsupportedError(f"{NAME} does not take: {feature}")
    import torch
    from torch.nn.attention import flex_attention as flex

    # The numbers would otherwise include compilations for changing shapes, and this is a comparison of kernels.
    torch._dynamo.reset()
    attention = torch.compile(flex.flex_attention, dynamic=False)
    tensors = [_from_jax(x).transpose(1, 2) for x in (arrays.q, arrays.k, arrays.v)]
    dout = _from_jax(arrays.dout).transpose(1, 2)
    bias = None
    if arrays.bias is not None:
        bias = _from_jax(arrays.bias.reshape((1,) * (4 - arrays.bias.ndim) + arrays.bias.shape))
        tensors.append(bias)
    if backward:
        tensors = [x.detach().requires_grad_() for x in tensors]
        bias = tensors[3] if bias is not None else None
    q, k, v = tensors[:3]
    mask_mod = _mask_mod(case, arrays)
    block_mask = None
    if mask_mod is not None:
        per_batch = any(x is not None for x in (arrays.q_segments, arrays.kv_lengths, arrays.mask))
        per_head = arrays.mask is not None and arrays.mask.ndim == 4 and arrays.mask.shape[1] > 1
        block_mask = flex.create_block_mask(
            mask_mod,
            case.batch if per_batch else None,
            case.num_heads if per_head else None,
            case.q_len,
            case.kv_len,
            device="cuda",
        )
    score_mod = _score_mod(case, arrays, bias)

    def enqueue() -> tuple[Any, ...]:
        out = attention(
            q,
            k,
            v,
            score_mod=score_mod,
            block_mask=block_mask,
            scale=case.scale_value,
            enable_gqa=case.num_heads != case.num_kv_heads,
        )
        return (out, *torch.autograd.grad(out, tensors, dout)) if backward else (out,)

    def results(found: Any) -> dict[str, object]:
        named = dict(zip(("out", "dq", "dk", "dv", "dbias"), found, strict=False))
        return {
            key: jnp.from_dlpack(
                (value if key == "dbias" else value.transpose(1, 2)).detach().contiguous()
            )
            for key, value in named.items()
        }

    def wait(_: object) -> None:
        torch.cuda.synchronize()

    try:
        wait(enqueue())
    except RuntimeError as error:
        raise UnsupportedError(f"{NAME}: {str(error).splitlines()[0]}") from error
    return Contender(name=NAME, enqueue=enqueue, wait=wait, results=results)
