"""A small post-norm transformer in Flax Linen, so that module tests can swap only the attention function.

Shapes: inputs (B, T, features), memory (B, S, features), masks broadcast to (B, N, T, S) with nonzero = takes part.
Parameters do not depend on `attention_fn`: those of one model apply to the same model with another function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Array = jax.Array

LAYER_NORM_EPSILON = 1e-5
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": nn.relu,
    # The exact form: torch's default, and jax.nn.gelu's approximation differs from it by up to 5e-4.
    "gelu": lambda x: nn.gelu(x, approximate=False),
}


class _Residual(nn.Module):
    """Adds the result of a sublayer to its input and normalises the sum."""

    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, y: Array) -> Array:
        return nn.LayerNorm(
            epsilon=LAYER_NORM_EPSILON, dtype=self.dtype, param_dtype=self.param_dtype
        )(x + y)


class FeedForward(nn.Module):
    """Two dense layers with an activation between them."""

    hidden: int
    activation: str = "relu"
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        dense = {"use_bias": self.use_bias, "dtype": self.dtype, "param_dtype": self.param_dtype}
        hidden = ACTIVATIONS[self.activation](nn.Dense(self.hidden, **dense)(x))
        return nn.Dense(x.shape[-1], **dense)(hidden)


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each with a residual and a LayerNorm after it."""

    num_heads: int
    hidden: int
    attention_fn: Callable[..., Array]
    activation: str = "relu"
    use_bias: bool = True
    dropout_rate: float = 0.0  # of the attention weights
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, mask: Any = None, deterministic: bool = True) -> Array:
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        attended = nn.MultiHeadDotProductAttention(
            num_heads=self.num_heads,
            use_bias=self.use_bias,
            attention_fn=self.attention_fn,
            dropout_rate=self.dropout_rate,
            name="self_attention",
            **dtypes,
        )(x, mask=mask, deterministic=deterministic)
        x = _Residual(name="attention_norm", **dtypes)(x, attended)
        y = FeedForward(self.hidden, self.activation, self.use_bias, name="feed_forward", **dtypes)(
            x
        )
        return _Residual(name="feed_forward_norm", **dtypes)(x, y)


class Encoder(nn.Module):
    """A stack of encoder layers, with a LayerNorm after the last if `final_norm`."""

    num_layers: int
    num_heads: int
    hidden: int
    attention_fn: Callable[..., Array]
    activation: str = "relu"
    final_norm: bool = False
    use_bias: bool = True
    dropout_rate: float = 0.0
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, mask: Any = None, deterministic: bool = True) -> Array:
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        for layer in range(self.num_layers):
            x = EncoderLayer(
                self.num_heads,
                self.hidden,
                self.attention_fn,
                self.activation,
                self.use_bias,
                self.dropout_rate,
                name=f"layer_{layer}",
                **dtypes,
            )(x, mask, deterministic)
        if self.final_norm:
            x = nn.LayerNorm(epsilon=LAYER_NORM_EPSILON, name="final_norm", **dtypes)(x)
        return x


class DecoderLayer(nn.Module):
    """Self-attention, attention over the memory and feed-forward, each with a residual and a LayerNorm after it."""

    num_heads: int
    hidden: int
    attention_fn: Callable[..., Array]
    activation: str = "relu"
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, memory: Array, mask: Any = None, memory_mask: Any = None) -> Array:
        dtypes = {"dtype": self.dtype, "param_dtype": self.param_dtype}

        def attention(name: str) -> nn.MultiHeadDotProductAttention:
            return nn.MultiHeadDotProductAttention(
                num_heads=self.num_heads,
                use_bias=self.use_bias,
                qkv_features=x.shape[-1],
                attention_fn=self.attention_fn,
                deterministic=True,
                name=name,
                **dtypes,
            )

        attended = attention("self_attention")(x, mask=mask)
        x = _Residual(name="attention_norm", **dtypes)(x, attended)
        attended = attention("memory_attention")(x, memory, mask=memory_mask)
        x = _Residual(name="memory_attention_norm", **dtypes)(x, attended)
        y = FeedForward(self.hidden, self.activation, self.use_bias, name="feed_forward", **dtypes)(
            x
        )
        return _Residual(name="feed_forward_norm", **dtypes)(x, y)


class Decoder(nn.Module):
    """A stack of decoder layers over one memory."""

    num_layers: int
    num_heads: int
    hidden: int
    attention_fn: Callable[..., Array]
    activation: str = "relu"
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, memory: Array, mask: Any = None, memory_mask: Any = None) -> Array:
        for layer in range(self.num_layers):
            x = DecoderLayer(
                self.num_heads,
                self.hidden,
                self.attention_fn,
                self.activation,
                self.use_bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                name=f"layer_{layer}",
            )(x, memory, mask, memory_mask)
        return x
