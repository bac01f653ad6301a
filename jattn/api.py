"""The public function: its arguments become a ``Call`` (``arguments.py``), which runs where its arrays lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax
from jax.typing import ArrayLike, DTypeLike

from jattn import autodiff
from jattn.arguments import Call, Window, result_flags
from jattn.block_mask import BlockMask
from jattn.config import Options
from jattn.jax_interface import manual_axes, unify
from jattn.masks import Alignment, CausalBias
from jattn.sharding import partition
from jattn.spec import Operands, Spec

_NAME = "jattn.dot_product_attention"


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | CausalBias | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: Window = ...,
    implementation: str | Sequence[str] | None = ...,
    return_residual: Literal[False] = ...,
    causal_alignment: Alignment = ...,
    segment_ids: ArrayLike | None = ...,
    query_segment_ids: ArrayLike | None = ...,
    key_value_segment_ids: ArrayLike | None = ...,
    logits_soft_cap: float | None = ...,
    query_positions: ArrayLike | None = ...,
    key_value_positions: ArrayLike | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    dropout_rate: ArrayLike = ...,
    dropout_key: jax.Array | None = ...,
    dropout_seed: ArrayLike | None = ...,
    dropout_offset: ArrayLike | None = ...,
    broadcast_dropout: bool = ...,
    score_mod: Callable[..., Any] | None = ...,
    captures: Sequence[ArrayLike] = ...,
    block_mask: BlockMask | None = ...,
    return_lse: Literal[False] = ...,
    compute_dtype: DTypeLike | None = ...,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | CausalBias | None = ...,
    *,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: Window = ...,
    implementation: str | Sequence[str] | None = ...,
    return_residual: bool = ...,
    causal_alignment: Alignment = ...,
    segment_ids: ArrayLike | None = ...,
    query_segment_ids: ArrayLike | None = ...,
    key_value_segment_ids: ArrayLike | None = ...,
    logits_soft_cap: float | None = ...,
    query_positions: ArrayLike | None = ...,
    key_value_positions: ArrayLike | None = ...,
    alibi_slopes: ArrayLike | None = ...,
    sinks: ArrayLike | None = ...,
    dropout_rate: ArrayLike = ...,
    dropout_key: jax.Array | None = ...,
    dropout_seed: ArrayLike | None = ...,
    dropout_offset: ArrayLike | None = ...,
    broadcast_dropout: bool = ...,
    score_mod: Callable[..., Any] | None = ...,
    captures: Sequence[ArrayLike] = ...,
    block_mask: BlockMask | None = ...,
    return_lse: bool = ...,
    compute_dtype: DTypeLike | None = ...,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | CausalBias | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Window = None,
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
    causal_alignment: Alignment = "upper_left",
    segment_ids: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    query_positions: ArrayLike | None = None,
    key_value_positions: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout_rate: ArrayLike = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_seed: ArrayLike | None = None,
    dropout_offset: ArrayLike | None = None,
    broadcast_dropout: bool = False,
    score_mod: Callable[..., Any] | None = None,
    captures: Sequence[ArrayLike] = (),
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    compute_dtype: DTypeLike | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes scaled dot product attention, exactly, with memory linear in the lengths.

    A superset of ``jax.nn.dot_product_attention``: the same arguments mean the same, with a few exceptions, all in
    docs/conventions.md. A query that sees no key gives 0 (``jax.nn`` averages the values); -1 in ``local_window_size``
    is no limit (there a number of keys); some arguments are refused, a traced ``scale`` and an integer ``bias`` among
    them. Every mask argument may be combined with every other, but a causal ``mask`` with ``is_causal`` or a window,
    and positions with lower-right alignment; a key must pass all of them. B batch, T query length, S key length, N
    query heads, K key/value heads, D head dim, Dv head dim of values. Where ``query`` has none or several leading axes,
    all arguments have these in the place of B, but ``block_mask`` and the index ``batch`` of ``score_mod`` count them
    as one.

    Args:
      query: (B, T, N, D), or (T, N, D), or with further leading batch axes; float16, bfloat16, float32 or float64.
      key: (B, S, K, D) with the leading axes of ``query``; K must divide N (grouped and multi-query attention).
      value: (B, S, K, Dv). All three have one dtype.
      bias: added to the scaled scores; broadcastable to (B, N, T, S), of any float dtype. Differentiable. One that is
        neither float32 nor of the dtype of ``query`` is cast to the wider of the two.
      mask: bool, broadcastable to (B, N, T, S), True where the key takes part; or ``jattn.causal_upper_left(T,
        S)`` or ``jattn.causal_lower_right(T, S)``, which cost no memory.
      scale: multiplier of query.key, any sign; 1/sqrt(D) if None.
      is_causal: query t sees no key to the right of its own position.
      query_seq_lengths, key_value_seq_lengths: (B,) integers; rows beyond are padding and are never read. Values
        outside [0, T] or [0, S] are clamped.
      local_window_size: how many keys to the left and to the right of its own position a query sees; one number
        for both. None or -1 in the tuple is no limit.
      implementation: a backend ("flash", "mem_efficient", "cudnn", "cpu", "xla", "reference"), or several, tried
        in order; a backend that is named is used or refused, never replaced. None: the fastest that can run the
        problem.
      return_residual: also returns the log-sum-exp (B, T, N) in the dtype of ``query``, without a gradient, as
        ``jax.nn``.
      causal_alignment: where a query's own position is, for ``is_causal`` and ``local_window_size``. "upper_left":
        query t sits at key t. "lower_right": at key t + S - T, with the lengths of its batch entry where lengths
        are given.
      segment_ids: (B, T) integers for self-attention: a query sees the keys of its own segment. A negative id
        marks padding, which sees nothing and is never seen. Ids that are known while tracing are at most 2**31 - 1.
      query_segment_ids, key_value_segment_ids: (B, T) and (B, S), the same for cross-attention.
      logits_soft_cap: scores become ``cap * tanh(score / cap)``, before bias and masks.
      query_positions, key_value_positions: (B, T) and (B, S) integers, both or neither: where the tokens stand, for
        ``is_causal``, ``local_window_size`` and ``alibi_slopes``, in place of their indices. Clamped to +-2**29; not
        together with lower-right alignment.
      alibi_slopes: (N,), or broadcastable to (B, N), float: ``slope * |key position - query position|`` is taken off
        the capped scores. Differentiable.
      sinks: (N,), or broadcastable to (B, N), float: the score of one more key, without a value, in the softmax of each
        row that sees a key; the log-sum-exp includes it. Differentiable.
      dropout_rate: the probability of dropping a weight, 0 <= rate < 1; a number, or a traced scalar. Rounded to a
        multiple of 1/32768, and at most 255/256. Kept weights are divided by 1 - rate; the log-sum-exp is that of all
        weights. No gradient (the result is piecewise constant in it).
      dropout_key: one JAX key; its seed is ``jattn.seed_from_key(dropout_key)``, its offset 0. The same key drops the
        same pairs again: ``jattn.dropout_mask`` tells which. Under ``jax.vmap`` with one key all mapped elements
        share a mask, as with ``jax.random``.
      dropout_seed, dropout_offset: in place of a key, uint32 (2,), the lower word first, or Python ints; offset 0 if
        None.
      broadcast_dropout: one mask (T, S) serves all batch entries and heads.
      score_mod: ``score_mod(score, batch, head, query, key, *captures) -> score``, a function of scalars that JAX can
        trace: it gets each score as all the arguments above have made it (float32, or float64), and int32 indices
        (positions, where these are given; ``batch`` counts leading axes folded into one), and returns the one to use,
        -inf to hide the pair. It may call functions with a ``jax.custom_jvp`` rule, but none with ``jax.custom_vjp``:
        its derivative is taken forwards. Masks come after it. Arrays it closes over, and ``captures``, may be read at
        these indices; both get gradients. No side effects, and nothing over axes of a mesh but ``jax.lax.axis_index``
        outside of loops. It counts as one function wherever it does the same, so that it may be made anew for each
        call.
      captures: arrays of any shape and dtype that ``score_mod`` gets as further arguments.
      block_mask: of ``jattn.create_block_mask``: blocks of queries and keys that take part, and a function of indices
        that says which pairs do within them. Its batch and heads are 1, or B (leading axes folded) and N. Becomes a
        ``mask`` of these extents, with as many bytes.
      return_lse: also returns the log-sum-exp of the scores (B, T, N), natural logarithm, float32 (float64 for
        float64), -inf for a query that sees no key. Differentiable.
      compute_dtype: query, key, value and bias are cast to this dtype first; the result has it too. "float64" needs
        jax_enable_x64.

    Returns:
      (B, T, N, Dv) in the dtype of ``query``, or the pair that ``return_lse`` or ``return_residual`` asks for.

    Raises:
      ValueError: shapes, dtypes or options do not fit together; raised while tracing.
      TypeError: ``score_mod`` is no function of these arguments that returns a float scalar, or calls one with a
        ``jax.custom_vjp`` rule; a capture is no array; ``block_mask`` is no ``jattn.BlockMask``.
      jattn.NoBackendError: no enabled backend can run the problem; its ``reasons`` say why.

    Source: "Attention is all you need", arXiv:1706.03762; tiling by online softmax as in arXiv:2205.14135; grouped
    heads arXiv:2305.13245; slopes arXiv:2108.12409; sinks arXiv:2309.17453; caps of scores arXiv:2408.00118.
    """
    call = Call.parse(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation=implementation,
        causal_alignment=causal_alignment,
        segment_ids=segment_ids,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        query_positions=query_positions,
        key_value_positions=key_value_positions,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        dropout_seed=dropout_seed,
        dropout_offset=dropout_offset,
        broadcast_dropout=broadcast_dropout,
        score_mod=score_mod,
        captures=captures,
        block_mask=block_mask,
        compute_dtype=compute_dtype,
    )
    return_lse, return_residual = result_flags(return_lse, return_residual)
    out, lse = attention_of(call)
    if not (return_lse or return_residual):
        return out
    if return_residual:
        lse = jax.lax.stop_gradient(lse).astype(out.dtype)
    return out, lse


def packed_attention(
    query: Any, key: Any, value: Any, *, dropout_table: jax.Array | None = None, **keywords: Any
) -> tuple[jax.Array, jax.Array]:
    """Computes ``dot_product_attention`` of packed sequences, with its ``return_lse=True``.

    Args:
      query, key, value: as for ``dot_product_attention``.
      dropout_table: (sequences, 1 or N, 2) uint32, the Philox keys of each packed sequence and head. The key of a query
        is that of its segment id, and the coordinates of a pair are positions: segment ids and positions must be
        given, and ``dropout_rate``.
      **keywords: of ``dot_product_attention``.
    """
    return attention_of(Call.parse(query, key, value, dropout_table=dropout_table, **keywords))


def attention_of(call: Call) -> tuple[jax.Array, jax.Array]:
    """Runs a parsed call: out (*lead, T, N, Dv) and lse (*lead, T, N)."""
    spec, operands, options = call.spec, call.operands, call.options
    explicit = partition.explicit_cut(spec, operands)
    if explicit is None:
        flat = unify(operands.flat())
        out, lse = autodiff.attention(spec, Operands.unflatten(spec, flat), options)
    else:
        out, lse = _on_explicit_mesh(spec, operands, options, *explicit)
    return out.reshape(*call.lead, *out.shape[1:]), lse.swapaxes(1, 2).reshape(
        *call.lead, *out.shape[1:3]
    )


def _on_explicit_mesh(
    spec: Spec, operands: Operands[jax.Array], options: Options, mesh: Any, cut: partition.Cut
) -> tuple[jax.Array, jax.Array]:
    """Runs each shard of the batch and the heads where it lies."""
    specs = cut.operands(spec).flat()
    flat = partition.placed(mesh, specs, *unify(operands.flat()))

    def shard(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        local = cut.own_kv_head(Operands.unflatten(spec, unify(arrays)))
        return autodiff.attention(spec.for_operands(local), local, options)

    if manual_axes(*flat):
        # Inside of another `shard_map` JAX lowers no residual that it has cast to vary over the axes of both, as it
        # has those operands that the shards share: the operands themselves are kept, and cast again.
        shard = jax.checkpoint(shard, policy=autodiff.checkpoint_policy, prevent_cse=False)
    run = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=(cut.out, cut.lse))
    out, lse = run(*flat)
    return out, lse
