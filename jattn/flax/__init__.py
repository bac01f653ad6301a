"""Attention functions for Flax modules, Linen and NNX."""

from jattn.flax.attention import (
    AttentionFunction,
    StructuralMask,
    attention_fn,
    make_attention_fn,
)

__all__ = ["AttentionFunction", "StructuralMask", "attention_fn", "make_attention_fn"]
