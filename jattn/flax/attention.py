"""The adapter between Flax's ``attention_fn`` convention and `jattn.dot_product_attention`.

Nothing here imports Flax: the convention is a keyword list. Linen passes the subset of its keywords
that it finds in the signature of the function, so a keyword that is not named is lost without a
word; NNX passes all of its keywords, so one that is not named is a TypeError. Hence every keyword of
both is declared, and those that cannot be honoured are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jattn.api import dot_product_attention
from jattn.arguments import Window, check_no_captures, window_of
from jattn.arrays import shown
from jattn.block_mask import BlockMask
from jattn.dropout import check_rate
from jattn.masks import UNBOUNDED, Alignment, CausalBias
from jattn.pytrees import exportable

Array = jax.Array
PromoteDtype = Callable[..., Sequence[Array]]
Einsum = Callable[..., Array]

# These ask for one particular algorithm; the other spellings of a precision ask for at least some accuracy.
_ALGORITHM_TYPES = (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)


@exportable("jattn.flax.StructuralMask")
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StructuralMask:
    """Describes a mask by arrays of the size of the sequence instead of one entry per query and key.

    Goes where a Flax attention module takes ``mask=``; the module hands it on untouched (not with its key/value cache
    switched on: decoding combines masks as arrays). So it also carries the arrays that a module has no argument for:
    slopes, sinks and what a score function reads. The parts apply together, and with the options of
    `make_attention_fn`. A pytree, so it passes through `jax.jit`, `nnx.jit` and rematerialisation, and its arrays may
    be differentiated, mapped and scanned over.

    B stands for the batch axes of the call, as many as the query has.

    Attributes:
      segment_ids: (B, T) integer, self-attention; a query sees the keys with its own id. A negative id marks padding.
      query_segment_ids, key_value_segment_ids: (B, T) and (B, S), the same for cross-attention; both or neither.
      query_seq_lengths, key_value_seq_lengths: (B,) integer, how many leading positions are real.
      query_positions, key_value_positions: (B, T) and (B, S) integer, both or neither: where the tokens stand, for
        causality, windows and slopes, in place of their indices.
      dense: a boolean mask that broadcasts to (B, N, T, S), True = takes part.
      alibi_slopes: (N,), or broadcastable to (B, N), float: as in `make_attention_fn`, but these may be learned. One of
        the two places has them.
      sinks: (N,), or broadcastable to (B, N), float: the score of one more key, without a value, in the softmax of each
        row that sees a key.
      captures: arrays that the `score_mod` of `make_attention_fn` gets as further arguments.
    """

    segment_ids: Array | None = None
    query_segment_ids: Array | None = None
    key_value_segment_ids: Array | None = None
    query_seq_lengths: Array | None = None
    key_value_seq_lengths: Array | None = None
    query_positions: Array | None = None
    key_value_positions: Array | None = None
    dense: Array | None = None
    alibi_slopes: Array | None = None
    sinks: Array | None = None
    captures: tuple[Array, ...] = ()

    @property
    def ndim(self) -> int:
        """Refuses: this is no array. An AttributeError, so that `hasattr` says so too."""
        raise AttributeError(
            "jattn.flax.StructuralMask: mask is no array and has no ndim, but a Flax module with decode=True combines"
            " its own mask with the mask given, as arrays: pass a bool array (B, 1, 1, S) there, or no mask;"
            " a score_mod can close over its captures in an attention_fn that is made in the call, and slopes and sinks"
            " that are learned take jattn.dot_product_attention"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionFunction:
    """Computes attention in the form that Flax calls ``attention_fn``; `make_attention_fn` documents the options.

    Two objects with equal options are equal and hash alike, so a module built twice does not retrace.
    """

    is_causal: bool = False
    causal_alignment: Alignment = "upper_left"
    local_window_size: Window = None
    scale: float | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    score_mod: Callable[..., Any] | None = None
    implementation: str | tuple[str, ...] | None = None

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array,
        bias: Array | None = None,
        mask: Array | StructuralMask | CausalBias | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float | Array = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Any = None,  # what JAX's own matmul functions accept
        module: object | None = None,
        promote_dtype: PromoteDtype | None = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Einsum | None = None,
        qk_attn_weights_einsum: Einsum | None = None,
        attn_weights_value_einsum: Einsum | None = None,
    ) -> Array:
        """Computes attention of (B..., T, N, D) queries over (B..., S, K, D) keys and (B..., S, K, Dv) values.

        Args:
          query, key, value: any number of batch axes, also none. K divides N.
          bias: added to the scaled scores; broadcasts to (B..., N, T, S).
          mask: array of any dtype that broadcasts to (B..., N, T, S), nonzero = takes part; or a `StructuralMask`; or
            `jattn.causal_upper_left` / `jattn.causal_lower_right`.
          broadcast_dropout: one dropout mask (T, S) serves all batch entries and heads, as in Flax.
          dropout_rng: the key of dropout; `jattn.dropout_mask` of `jattn.seed_from_key(dropout_rng)` tells the mask,
            whose bits are not those that Flax would draw from the same key.
          dropout_rate, deterministic: weights are dropped at this rate unless `deterministic` is true. The rate may be
            traced, `deterministic` may not.
          dtype: of the computation and the result; None: the promoted dtype of the three inputs.
          precision: a lower bound; None, "default", "high" and "highest" are all met, because the kernels
            multiply in the full precision of the inputs and accumulate in float32 or better.
          module: not None asks for the attention weights, which are never formed: refused.
          promote_dtype: replaces the promotion that `dtype` describes; gets the three arrays as a tuple, and
            ``dtype=``.
          is_causal: combines (AND) with the mask and with this object's own `is_causal`.
          force_fp32_for_softmax: accepted; row statistics are float32 at least, always.
          einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: replacements for the two
            products, which a fused kernel cannot call: refused.

        Returns:
          (B..., T, N, Dv). A row that sees no key is 0; Flax's own function averages the values there.

        Raises:
          ValueError: wrong shapes, weights or custom products asked for, a `precision` that names an algorithm,
            dropout without a key, a traced flag, or slopes in two places.
          NoBackendError: no backend serves the problem.
        """
        _refuse_products(
            precision=precision,
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        if module is not None:
            raise ValueError(
                "jattn.flax.attention_fn: module is given, so the attention weights were asked for (sow_weights=True),"
                " but a fused kernel never forms them: use sow_weights=False, or Flax's own dot_product_attention for"
                " the layer that is looked into"
            )
        flag: object = deterministic
        if isinstance(flag, str):
            raise ValueError(
                f"jattn.flax.attention_fn: deterministic is {deterministic!r}, must be True or False"
            )
        _refuse_tracer("deterministic", deterministic, "pass dropout_rate traced, 0 for none")
        _refuse_tracer("is_causal", is_causal, "pass the causality as a bool mask")
        if not deterministic:
            check_rate("jattn.flax.attention_fn: dropout_rate", dropout_rate)
        if deterministic:
            dropout_rate = 0.0
        elif dropout_rng is None and (
            isinstance(dropout_rate, jax.core.Tracer) or dropout_rate > 0.0
        ):
            raise ValueError(
                f"jattn.flax.attention_fn: dropout_rate is {dropout_rate} and deterministic is false, but dropout_rng"
                " is None: give the module a dropout key, rngs={'dropout': key} in Linen and nnx.Rngs(dropout=...) in"
                " NNX, or pass deterministic=True"
            )

        if promote_dtype is None:
            query, key, value = _promote(query, key, value, dtype)
        else:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        if not query.ndim == key.ndim == value.ndim or query.ndim < 3:
            raise ValueError(
                "jattn.flax.attention_fn: query, key and value must have one rank, 3 or more: (batch..., length, heads,"
                f" head_dim); got {query.shape}, {key.shape}, {value.shape}"
            )
        _refuse_block_mask(mask)
        is_decoding_step = _is_decoding_step(query, key, mask)
        structure = mask if isinstance(mask, StructuralMask) else StructuralMask()
        if isinstance(mask, StructuralMask):
            mask = structure.dense
        alibi_slopes = self._slopes(structure)
        if self.score_mod is None:
            check_no_captures(structure.captures, "jattn.flax.attention_fn")
        if mask is not None and not isinstance(mask, CausalBias):
            mask = jnp.asarray(mask) != 0
        if bias is not None and not jnp.issubdtype(jnp.asarray(bias).dtype, jnp.floating):
            bias = jnp.asarray(bias, jnp.float32)

        causal_alignment = self.causal_alignment
        if not is_decoding_step:
            is_causal = is_causal or self.is_causal
        else:  # the module's mask has the keys up to the query: self.is_causal is met
            if _is_bounded(self.local_window_size):
                raise ValueError(
                    f"jattn.flax.attention_fn: local_window_size is {self.local_window_size}, but a query alone beside"
                    f" {key.shape[-3]} keys is a step of decoding, whose place in the cache only the module's mask"
                    " knows: have the mask hide the keys outside of the window; outside of such a module, pass the"
                    " mask as StructuralMask(dense=mask)"
                )
            # A causality of this call counts from the first key, and one visible key needs no slopes.
            measures = self.alibi_slopes is not None or self.score_mod is not None
            if measures and not is_causal:
                structure = _decoding_positions(query, key, mask)
                causal_alignment = "upper_left"

        return dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            scale=self.scale,
            is_causal=is_causal,
            local_window_size=self.local_window_size,
            implementation=self.implementation,
            causal_alignment=causal_alignment,
            logits_soft_cap=self.logits_soft_cap,
            alibi_slopes=alibi_slopes,
            sinks=structure.sinks,
            score_mod=self.score_mod,
            captures=structure.captures,
            dropout_rate=dropout_rate,
            dropout_key=dropout_rng,
            broadcast_dropout=broadcast_dropout,
            segment_ids=structure.segment_ids,
            query_segment_ids=structure.query_segment_ids,
            key_value_segment_ids=structure.key_value_segment_ids,
            query_seq_lengths=structure.query_seq_lengths,
            key_value_seq_lengths=structure.key_value_seq_lengths,
            query_positions=structure.query_positions,
            key_value_positions=structure.key_value_positions,
        )

    def _slopes(self, structure: StructuralMask) -> Array | None:
        """Those of this object or those of the call."""
        if self.alibi_slopes is None:
            return structure.alibi_slopes
        if structure.alibi_slopes is not None:
            raise ValueError(
                f"jattn.flax.attention_fn: mask has alibi_slopes, but make_attention_fn got"
                f" {shown(self.alibi_slopes)} too, must be in one place: make the attention_fn without them"
            )
        return jnp.asarray(self.alibi_slopes, jnp.float32)


def make_attention_fn(
    *,
    is_causal: bool = False,
    causal_alignment: Alignment = "upper_left",
    local_window_size: Window = None,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Sequence[float] | None = None,
    score_mod: Callable[..., Any] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> AttentionFunction:
    """Returns an ``attention_fn`` for Flax modules whose mask is a structure rather than an array.

    A causal or windowed layer built this way needs no (T, S) mask, and the tiles outside the band are skipped. What
    differs from call to call (segment ids, lengths) goes into the module's ``mask=`` as a `StructuralMask`, and so do
    arrays that are learned (slopes, sinks, what a score function reads).

    One query beside several keys and a mask array is taken for a step of a module with ``decode=True``. The mask that
    the module makes has the keys up to the query: `is_causal` is then left to it, `alibi_slopes` and the indices of
    `score_mod` take the last key that it shows to the batch entry for the place of the query, and a
    `local_window_size` is refused. So the query of a `score_mod` is elsewhere if a mask hides the last keys, and where
    such a call is no step; a `StructuralMask` is never taken for one.

    Args:
      is_causal: query t sees keys up to t (or up to t + S - T, see `causal_alignment`).
      causal_alignment: "upper_left", or "lower_right": the last query sees the last key.
      local_window_size: w or (left, right): query t sees keys t - left to t + right; None or -1 in the pair: no bound.
      scale: of the scores; None: 1 / sqrt(D).
      logits_soft_cap: c in c * tanh(s / c); None: no cap.
      alibi_slopes: N numbers, known while tracing: slope * distance is taken off the scores of each head; None: none.
        Slopes that are learned go into a `StructuralMask`.
      score_mod: of ``(score, batch, head, query, key, *captures)``, as for `jattn.dot_product_attention`; those of a
        call are in its `StructuralMask`. Functions compare by identity: define it once. One that closes over an
        NNX module or variable reads the object of the moment when it was made, and not what `nnx.jit`, `nnx.grad` or
        `nnx.merge` make of it later: made in ``__init__``, it finds old values there, and parameters that it reads
        have no gradient. Nothing warns of that. Parameters go into `captures`; in Linen a function made in the call
        may close over them.
      implementation: a backend name, or several in order of preference; None: the best one that serves the call.

    Returns:
      A hashable callable with the keyword list of Flax's `dot_product_attention` (both Linen's and NNX's).

    Raises:
      ValueError: slopes that are not N known numbers; other arguments are checked when it is called.

    Example:
      >>> import jattn.flax
      >>> local = jattn.flax.make_attention_fn(is_causal=True, local_window_size=(1023, 0))
      >>> local == jattn.flax.make_attention_fn(is_causal=True, local_window_size=(1023, 0))
      True
    """
    if implementation is not None and not isinstance(implementation, str):
        implementation = tuple(implementation)
    slopes = None if alibi_slopes is None else _known_slopes(alibi_slopes)
    if slopes is not None and slopes.ndim != 1:
        raise ValueError(
            f"jattn.flax.make_attention_fn: alibi_slopes has shape {slopes.shape}, must be (N,): a number for each head"
        )
    return AttentionFunction(
        is_causal=is_causal,
        causal_alignment=causal_alignment,
        local_window_size=_hashable(local_window_size),
        scale=_as_number(scale),
        logits_soft_cap=_as_number(logits_soft_cap),
        alibi_slopes=None if slopes is None else tuple(slopes.tolist()),
        score_mod=score_mod,
        implementation=implementation,
    )


attention_fn = AttentionFunction()


def _refuse_tracer(name: str, flag: object, way_out: str) -> None:
    if isinstance(flag, jax.core.Tracer):
        raise ValueError(
            f"jattn.flax.attention_fn: {name} is {shown(flag)}, must be True or False, known while tracing: make it a"
            f" static argument of jit, or {way_out}"
        )


def _refuse_block_mask(mask: object) -> None:
    if isinstance(mask, BlockMask) or isinstance(getattr(mask, "dense", None), BlockMask):
        raise ValueError(
            "jattn.flax.attention_fn: mask is a BlockMask, which Flax's modules cannot combine with theirs: pass"
            " jattn.flax.StructuralMask(dense=block_mask.materialize())"
        )


def _is_decoding_step(query: Array, key: Array, mask: object) -> bool:
    """Whether a module with ``decode=True`` calls: one query, all places of the cache, and an array of those in use.

    A module combines its own mask with the caller's as arrays, so a `StructuralMask` never comes from such a step.
    """
    is_array = mask is not None and not isinstance(mask, StructuralMask | CausalBias)
    return query.shape[-3] == 1 and key.shape[-3] > 1 and is_array


def _decoding_positions(query: Array, key: Array, mask: Any) -> StructuralMask:
    """Puts a lone query at the last key that the mask, an array, shows to a head, for ALiBi and score functions.

    Softmax does not see what all distances have in common, so any place from the last visible key on would do, but one
    at the end of a long and still empty cache makes scores so large that float32 rounds their differences away.
    """
    batch, kv_len = query.shape[:-3], key.shape[-3]
    rank = len(batch) + 3
    if mask.ndim > rank:
        return StructuralMask()  # the call says what is wrong with it
    is_seen = mask.reshape(*[1] * (rank - mask.ndim), *mask.shape).any((-3, -2))
    is_seen = jnp.broadcast_to(is_seen, (*is_seen.shape[:-1], kv_len))
    last = kv_len - 1 - jnp.argmax(is_seen[..., ::-1], axis=-1)
    return StructuralMask(
        query_positions=jnp.broadcast_to(last[..., None], (*batch, 1)).astype(jnp.int32),
        key_value_positions=jnp.broadcast_to(jnp.arange(kv_len), (*batch, kv_len)),
    )


def _known_slopes(slopes: Any) -> np.ndarray[Any, Any]:
    is_known = not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(slopes))
    found = np.asarray(slopes) if is_known else None
    if found is None or found.dtype.kind not in "iufV":
        raise ValueError(
            f"jattn.flax.make_attention_fn: alibi_slopes is {slopes!r}, must be N real numbers known while tracing:"
            " learned slopes go into the module's mask, as jattn.flax.StructuralMask(alibi_slopes=slopes)"
        )
    return found.astype(np.float32)


def _as_number(x: Any) -> Any:
    """An array of rank 0 as a number, if it is known; else what it is."""
    is_known = isinstance(x, np.ndarray | jax.Array) and not isinstance(x, jax.core.Tracer)
    return x.item() if is_known and x.ndim == 0 else x


def _hashable(window: Any) -> Any:
    """A window as numbers and tuples, whether or not it makes sense."""
    if isinstance(window, np.ndarray):
        window = window.tolist()
    return tuple(window) if isinstance(window, list) else window


def _is_bounded(window: Window) -> bool:
    """Whether a window hides anything: None or -1 on a side does not."""
    return window_of(window, "jattn.flax.attention_fn") != (UNBOUNDED, UNBOUNDED)


def _refuse_products(*, precision: object, **products: Einsum | None) -> None:
    """Raises ValueError for a product that was replaced or whose algorithm was prescribed."""
    for name, product in products.items():
        if product is not None:
            raise ValueError(
                f"jattn.flax.attention_fn: {name} is given, but a fused kernel multiplies by itself and"
                " would ignore it: leave it None, or use Flax's own dot_product_attention"
            )
    requests = precision if isinstance(precision, tuple | list) else (precision,)
    for request in requests:
        # Strings name a precision ("high") or a preset ("TF32_TF32_F32_X3"); only the former are a bound.
        is_preset_name = isinstance(request, str) and hasattr(
            jax.lax.DotAlgorithmPreset, request.upper()
        )
        if (isinstance(request, _ALGORITHM_TYPES) or is_preset_name) and request not in (
            "default",
            jax.lax.DotAlgorithmPreset.DEFAULT,
        ):
            raise ValueError(
                f"jattn.flax.attention_fn: precision is {request}, a particular algorithm, but a fused kernel has its"
                " own: use None, 'default', 'high' or 'highest'"
            )
        if isinstance(request, str) and not is_preset_name:
            try:
                jax.lax.Precision(request)
            except ValueError:
                raise ValueError(
                    f"jattn.flax.attention_fn: precision is {request!r}, which JAX does not know: use None, 'default',"
                    " 'high' or 'highest'"
                ) from None


def _promote(
    query: Array, key: Array, value: Array, dtype: DTypeLike | None
) -> tuple[Array, Array, Array]:
    """Casts the three to `dtype`, or to their promoted dtype, which becomes floating-point if it is not."""
    if dtype is None:
        dtype = jnp.result_type(query, key, value)
        if not jnp.issubdtype(dtype, jnp.floating):
            dtype = jnp.promote_types(jnp.float32, dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"jattn.flax.attention_fn: dtype is {jnp.dtype(dtype).name}, must be a floating-point type"
        )
    return jnp.asarray(query, dtype), jnp.asarray(key, dtype), jnp.asarray(value, dtype)
