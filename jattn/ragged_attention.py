"""Attention over ragged batches, by lowering to the dense call: there are no kernels of their own.

Packed form: all sequences as one batch entry, segment ids keep them apart, positions inside the sequence serve
bands, slopes and dropout. Padded form: (B, max_length) with lengths, where the backend has no tiles to skip or where
one position per row cannot say what is wanted. Why: docs/design/0007-ragged-batches.md. Score functions over packed
rows: packed_rows.py.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jattn import api, backends, dispatch, packed_rows
from jattn.arguments import (
    LARGEST_POSITION,
    Call,
    Window,
    cast_floats,
    check_alignment,
    check_no_captures,
    compute_dtype_of,
    dropout_operands,
    window_of,
)
from jattn.arrays import as_array, as_flag, as_integers, is_integer, shown
from jattn.block_mask import BlockMask
from jattn.errors import NoBackendError, Reason, describe_refusals
from jattn.masks import UNBOUNDED, Alignment
from jattn.ragged import RaggedArray, take_rows
from jattn.spec import as_int32

Form = Literal["packed", "padded"]

_NAME = "jattn.ragged_dot_product_attention"
_DROPOUT = ("dropout_rate", "dropout_key", "dropout_seed", "dropout_offset", "broadcast_dropout")


def ragged_dot_product_attention(
    query: RaggedArray | ArrayLike,
    key: RaggedArray | ArrayLike,
    value: RaggedArray | ArrayLike,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    implementation: str | Sequence[str] | None = None,
    causal_alignment: Alignment = "upper_left",
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    dropout_rate: float | ArrayLike = 0.0,
    dropout_key: jax.Array | None = None,
    dropout_seed: ArrayLike | None = None,
    dropout_offset: ArrayLike | None = None,
    broadcast_dropout: bool = False,
    score_mod: Callable[..., Any] | None = None,
    captures: Sequence[ArrayLike] = (),
    block_mask: BlockMask | None = None,
    return_lse: bool = False,
    compute_dtype: DTypeLike | None = None,
    strict: bool = False,
    form: Form | None = None,
) -> RaggedArray | tuple[RaggedArray, RaggedArray]:
    """Computes attention inside each sequence of a ragged batch: sequence i of the queries sees that of the keys.

    B sequences, N query heads, K key/value heads, D head dim, Dv head dim of values. The arguments that
    ``jattn.dot_product_attention`` has too mean the same, for every sequence by itself. ``key`` and ``value`` share
    their sequences; those of ``query`` may differ, and may be empty on either side: a query whose sequence has no key
    gives 0 and lse -inf. What does not hold a sequence for every other (one sequence, one head, or a dense array of
    batch 1) is repeated, with its gradient summed. Offsets and lengths are run-time values: others of the same
    shapes need no new trace. Self-attention is recognised where the operands hold the same array of offsets, as
    ``query.with_values(...)`` makes them inside ``jit``; it needs no positions and is a little faster then.

    With rows of rank 3 or more, values (total, ..., T, N, D), what is ragged is a batch axis: every row is an
    ordinary attention of fixed lengths, and ``bias``, ``mask``, ``block_mask`` and ``score_mod`` are those of the dense
    call. Nothing is repeated then: all three are ragged, with the same sequences.

    Args:
      query: values (total, N, D); or a dense (B or 1, T, N, D).
      key: values (rows, K, D); or dense.
      value: values (rows, K, Dv); or dense. At least one of the three is ragged.
      bias, mask, block_mask: only with rows of rank 3 or more.
      scale, is_causal, local_window_size, implementation, logits_soft_cap, compute_dtype: as in the dense call.
      causal_alignment: "upper_left": query t of a sequence sits at its key t. "lower_right": its last query sits at
        its last key (chunks that extend a cache).
      sinks, alibi_slopes: (N,).
      dropout_rate, dropout_key, dropout_seed, dropout_offset, broadcast_dropout: as in the dense call. The decision
        for a pair depends on (sequence, head, position of the query, position of the key), so it is that of the padded
        dense call, wherever the sequences lie.
      score_mod: ``score_mod(score, batch, head, query, key, *captures) -> score``, as in the dense call: ``batch`` is
        the number of the sequence, ``query`` and ``key`` are positions in it, all from 0, wherever the sequences lie.
        With rows of rank 3 or more ``batch`` is the number of the row (further batch axes folded in).
      captures: arrays of any shape and dtype that ``score_mod`` gets as further arguments. What it reads has gradients.
      return_lse: also returns the log-sum-exp, values (total, N) float32 (float64 for float64); -inf for padding.
      strict: refuses sequences of length 0 where they are known: declared by ``min_length=0``, or not traced.
      form: "packed" or "padded", for rows of rank 2 alone; None: packed, unless a backend without tiles would run it or
        dropout meets "lower_right" alignment or ``score_mod``. Results agree up to rounding, dropout decisions exactly.

    Returns:
      A ``RaggedArray`` in the sequences of ``query`` with values (total, N, Dv), zeros in padding; or the pair.

    Raises:
      TypeError: none of the three is a ``RaggedArray``; ``score_mod`` is no function of these arguments that returns a
        float scalar, or a capture no array.
      ValueError: shapes, dtypes or options do not fit together; offsets or lengths that are not traced make no sense.
      jattn.NoBackendError: the batch cannot be broadcast, an empty sequence under ``strict``, or no backend.
    """
    arguments: dict[str, Any] = {
        name: x if isinstance(x, RaggedArray) else as_array(name, x, _NAME)
        for name, x in (("query", query), ("key", key), ("value", value))
    }
    for name, x in arguments.items():
        if isinstance(x, RaggedArray):
            x.check_static(f"{_NAME}: {name}")
            arguments[name] = x.with_values(as_array(f"{name}.values", x.values, _NAME))
    if compute_dtype is not None:
        dtype = compute_dtype_of(compute_dtype, _NAME)
        arguments = {name: _cast(name, x, dtype) for name, x in arguments.items()}
    check_alignment(causal_alignment, _NAME)
    if score_mod is None:
        check_no_captures(captures, _NAME)
    options: dict[str, Any] = {
        "scale": scale,
        "is_causal": as_flag("is_causal", is_causal, _NAME),
        "local_window_size": local_window_size,
        "implementation": implementation,
        "causal_alignment": causal_alignment,
        "logits_soft_cap": logits_soft_cap,
        "compute_dtype": compute_dtype,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "dropout_rate": dropout_rate,
        "dropout_key": dropout_key,
        "dropout_seed": dropout_seed,
        "dropout_offset": dropout_offset,
        "broadcast_dropout": as_flag("broadcast_dropout", broadcast_dropout, _NAME),
        "score_mod": score_mod,
        "captures": captures,
    }
    _check_operands(arguments)
    return_lse = as_flag("return_lse", return_lse, _NAME)
    strict = as_flag("strict", strict, _NAME)
    if form not in (None, "packed", "padded"):
        raise ValueError(f"{_NAME}: form is {form!r}, must be 'packed', 'padded' or None")
    if (rank := _rank(arguments)) > 3:
        if form is not None:
            raise ValueError(
                f"{_NAME}: form is {form!r} with values of rank {rank}, must be None for those: rows that hold whole"
                " attention problems are computed in one way; leave it out"
            )
        empty = [r for r in refusals(arguments, strict=strict) if r.code == "RAGGED_ZERO_LEN"]
        if empty:
            raise NoBackendError(_describe(tuple(empty)), tuple(empty))
        options["block_mask"] = block_mask
        return _ragged_batch(arguments, bias, mask, options, return_lse)
    for name, given in (("bias", bias), ("mask", mask), ("block_mask", block_mask)):
        if given is not None:
            raise ValueError(
                f"{_NAME}: Masks are not yet supported! Got {name} for ragged sequences: use is_causal,"
                " local_window_size, alibi_slopes or a score_mod, which hides a pair by -inf, or pad with"
                " RaggedArray.to_padded and make the dense call"
            )
    for name in ("sinks", "alibi_slopes"):
        _check_per_head(name, options[name])
    if reasons := refusals(arguments, strict=strict):
        raise NoBackendError(_describe(reasons), reasons)
    q, k, v = _expanded(*arguments.values())
    problem = _Problem(q, k, v, options)
    out, lse = problem.padded() if problem.wants_padding(form) else problem.packed()
    result = q.with_values(out)
    return (result, q.with_values(lse)) if return_lse else result


# Of arguments that other functions call otherwise: the PyTorch package, or the one that the rest goes to.
_OTHER_NAMES = {
    "scale": "softmax_scale",
    "local_window_size": "window_size",
    "causal": "is_causal",
    "dropout_p": "dropout_rate, with dropout_key",
    "softcap": "logits_soft_cap",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse",
    "cu_seqlens_q": "seqlens_q",
    "cu_seqlens_k": "seqlens_k",
}


def flash_mha_varlen(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    seqlens_q: ArrayLike,
    seqlens_k: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    *,
    max_seqlen_q: int = -1,
    max_seqlen_k: int = -1,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size: int | tuple[int, int] = (-1, -1),
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes attention over packed sequences, in the words of the JAX packages' functions of this name.

    The causal diagonal and the window end at the last key of each sequence, as theirs do.

    Args:
      q: (total_q, N, D).
      k, v: (total_k, K, D) and (total_k, K, Dv).
      seqlens_q: (B + 1,) integers, cumulative lengths, from 0.
      seqlens_k: likewise for the keys; None: those of the queries.
      seqused_k: (B,): how many keys of each sequence take part; None: all.
      max_seqlen_q, max_seqlen_k: upper bounds of the lengths; -1: the number of rows.
      softmax_scale: multiplier of q.k; None: 1/sqrt(D).
      is_causal: query t of a sequence of T queries and S keys sees keys up to t + S - T.
      window_size: how many keys to the left and to the right of its own a query sees, one number for both or a pair;
        -1: no limit.
      **options: others of ``jattn.ragged_dot_product_attention``, ``score_mod`` and ``captures`` among them;
        causal_alignment="upper_left" has the diagonal and the window begin at the first key.

    Returns:
      (total_q, N, Dv), or with ``return_lse=True`` the pair with the log-sum-exp (total_q, N).

    Raises:
      TypeError: as ``jattn.ragged_dot_product_attention``; arguments that have another name here, or none.
      ValueError: as ``jattn.ragged_dot_product_attention``; lengths in place of cumulative ones.
      jattn.NoBackendError: as ``jattn.ragged_dot_product_attention``.
    """
    for name, value in options.items():
        if name in _OTHER_NAMES:
            raise TypeError(
                f"jattn.flash_mha_varlen: {name} is {shown(value)}, must not be given: pass it as {_OTHER_NAMES[name]}"
            )
        if name not in inspect.signature(ragged_dot_product_attention).parameters:
            raise TypeError(
                f"jattn.flash_mha_varlen: {name} is {shown(value)}, must not be given: neither this function nor"
                " jattn.ragged_dot_product_attention has such an argument"
            )
    q, k, v = (_packed_rows(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    of_q = _borders("seqlens_q", seqlens_q)
    of_k = of_q if seqlens_k is None else _borders("seqlens_k", seqlens_k)
    used = None if seqused_k is None else _integers("seqused_k", seqused_k)
    longest_q, longest_k = (
        _bound(name, x)
        for name, x in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))
    )
    if seqlens_k is None and max_seqlen_k < 0:
        longest_k = longest_q
    keys = RaggedArray(k, of_k, used, longest_k)
    window = window_of(window_size, "jattn.flash_mha_varlen", "window_size")
    found = ragged_dot_product_attention(
        RaggedArray(q, of_q, None, longest_q),
        keys,
        keys.with_values(v),
        scale=softmax_scale,
        is_causal=is_causal,
        local_window_size=None if window == (UNBOUNDED, UNBOUNDED) else window,
        **{"causal_alignment": "lower_right"} | options,
    )
    if isinstance(found, tuple):
        return found[0].values, found[1].values
    return found.values


def _packed_rows(name: str, x: Any) -> jax.Array:
    rows = as_array(name, x, "jattn.flash_mha_varlen")
    if rows.ndim != 3:
        raise ValueError(
            f"jattn.flash_mha_varlen: {name} has shape {rows.shape}, must be (total, heads, head dim): for a padded"
            " batch call jattn.dot_product_attention with lengths"
        )
    return rows


def _integers(name: str, values: Any) -> Any:
    x = as_integers(name, values, "jattn.flash_mha_varlen")
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"jattn.flash_mha_varlen: {name} has dtype {x.dtype}, must be an integer type: cast it to int32"
        )
    if x.dtype == jnp.int32:
        return x
    if not isinstance(x, jax.core.Tracer):
        # By numpy: what jax.numpy makes of a known array is traced where the call is.
        x = np.asarray(x)
        if x.size and (largest := int(x.max())) > 2**31 - 1:
            raise ValueError(
                f"jattn.flash_mha_varlen: {name} holds {largest}, must be at most 2^31 - 1: it counts rows"
            )
    return as_int32(x)


def _borders(name: str, values: Any) -> Any:
    borders = _integers(name, values)
    if not isinstance(borders, jax.core.Tracer) and np.asarray(borders).ravel()[:1].any():
        found = np.asarray(borders).tolist()
        raise ValueError(
            f"jattn.flash_mha_varlen: {name} is {found}, must be cumulative lengths from 0: of lengths, pass"
            " numpy.concatenate([[0], numpy.cumsum(lengths)])"
        )
    return borders


def _bound(name: str, value: Any) -> int | None:
    if not is_integer(value):
        raise ValueError(
            f"jattn.flash_mha_varlen: {name} is {value!r}, must be an integer known while tracing; -1 is the number of"
            " rows"
        )
    return None if value < 0 else int(value)


# ---- What is asked: checks and refusals ----------------------------------------------------------------------------


def _check_per_head(name: str, x: Any) -> None:
    """Refuses numbers for each sequence, which a packed call could not tell from one another."""
    shape = () if x is None else as_array(name, x, _NAME).shape
    if len(shape) > 1 and any(extent != 1 for extent in shape[:-1]):
        raise ValueError(
            f"{_NAME}: {name} has shape {shape}, must be (N,), one for each head: for one of each sequence pad with"
            " RaggedArray.to_padded and make the dense call"
        )


def _values(x: Any) -> Any:
    return x.values if isinstance(x, RaggedArray) else jnp.asarray(x)


def _cast(name: str, x: Any, dtype: DTypeLike) -> Any:
    values = cast_floats(name, _values(x), dtype, _NAME)
    return x.with_values(values) if isinstance(x, RaggedArray) else values


def _rank(arguments: dict[str, Any]) -> int:
    """The rank of the values of the ragged operands."""
    return max(x.values.ndim for x in arguments.values() if isinstance(x, RaggedArray))


def _kinds(arguments: dict[str, Any]) -> str:
    """The operands in words: ragged or dense, and their shapes."""
    return ", ".join(
        f"{name} {'ragged, values' if isinstance(x, RaggedArray) else 'dense'} {_values(x).shape}"
        for name, x in arguments.items()
    )


def _check_operands(arguments: dict[str, Any]) -> None:
    ragged = {name: x for name, x in arguments.items() if isinstance(x, RaggedArray)}
    if not ragged:
        raise TypeError(
            f"{_NAME}: Expected query, key, and value to be nested tensors: at least one must be a jattn.RaggedArray;"
            " for dense arrays call jattn.dot_product_attention"
        )
    dtypes = {name: str(_values(x).dtype) for name, x in arguments.items()}
    if len(set(dtypes.values())) > 1:
        raise ValueError(
            f"{_NAME}: query, key and value must have one dtype, got {dtypes}: cast them"
        )
    for name, x in arguments.items():
        rank = _values(x).ndim
        least = 3 if isinstance(x, RaggedArray) else 4
        if rank < least:
            raise ValueError(
                f"{_NAME}: {name} has rank {rank} (shape {_values(x).shape}), must be at least {least} dimensional:"
                f" {'(total, heads, head dim)' if least == 3 else '(1 or B, length, heads, head dim)'}"
            )
    ranks = {name: x.values.ndim for name, x in ragged.items()}
    if len(set(ranks.values())) > 1 or (max(ranks.values()) > 3 and len(ranks) < 3):
        raise ValueError(
            f"{_NAME}: query, key and value must be ragged on the same dimension, got"
            f" {_kinds(arguments)}: with rows of rank 3 or more all three are RaggedArrays"
        )
    if any(_values(x).ndim != 4 for name, x in arguments.items() if name not in ragged):
        raise ValueError(
            f"{_NAME}: dense operands must have rank 4, (1 or B, length, heads, head dim), got {_kinds(arguments)}"
        )
    for name, x in ragged.items():
        x.checked(f"{_NAME}: {name}")
    k, v = arguments["key"], arguments["value"]
    if isinstance(k, RaggedArray) and isinstance(v, RaggedArray):
        _check_shared(k, v)


def _describe(reasons: tuple[Reason, ...]) -> str:
    return describe_refusals(f"{_NAME}: No available kernel for these operands", {"every": reasons})


def _check_shared(k: RaggedArray, v: RaggedArray) -> None:
    """Checks that keys and values lie in the same rows, as far as that is known."""
    same_lengths = k.constant_length is not None and k.constant_length == v.constant_length
    if k.num_sequences == v.num_sequences and not same_lengths and _differ(k, v):
        raise ValueError(
            f"{_NAME}: key and value must share their offsets and lengths: make one from the other with with_values"
        )


def _differ(k: RaggedArray, v: RaggedArray) -> bool:
    """Whether two ragged arrays are known to have their sequences in different rows."""
    if k.values.shape[0] != v.values.shape[0] or (k.lengths is None) != (v.lengths is None):
        return True
    return _known_to_differ(k.offsets, v.offsets) or _known_to_differ(k.lengths, v.lengths)


def _may_share(k: RaggedArray, v: RaggedArray) -> bool:
    """Whether values may be read where the keys lie: those of one static length need not lie there."""
    if k.constant_length is None or k.constant_length != v.constant_length:
        return not _differ(k, v)
    borders = (k.offsets, v.offsets, k.lengths, v.lengths)
    is_known = not any(isinstance(x, jax.core.Tracer) for x in borders)
    return _same_rows(k, v) or (is_known and not _differ(k, v))


def _known_to_differ(a: jax.Array | None, b: jax.Array | None) -> bool:
    """Whether two arrays, both there or neither, are not traced and differ."""
    return (
        a is not b
        and not isinstance(a, jax.core.Tracer)
        and not isinstance(b, jax.core.Tracer)
        and not np.array_equal(cast("jax.Array", a), cast("jax.Array", b))
    )


def refusals(arguments: dict[str, Any], *, strict: bool = False) -> tuple[Reason, ...]:
    """Says why no backend can run a ragged call whose operands are right each by itself; a function of shapes and of
    static bounds alone, but for the lengths under ``strict``.
    """
    found: list[Reason] = []

    def refuse(code: str, argument: str, actual: object, rule: str, remedy: str) -> None:
        found.append(Reason("ragged", code, argument, actual, rule, remedy))

    counts = {
        name: x.num_sequences if isinstance(x, RaggedArray) else int(jnp.shape(x)[0])
        for name, x in arguments.items()
    }
    if len(set(counts.values()) - {1}) > 1:
        refuse(
            "RAGGED_BATCH",
            "number of sequences",
            counts,
            "must be equal, or 1",
            "give every operand the same sequences, empty ones included",
        )
    heads = {name: int(_values(x).shape[-2]) for name, x in arguments.items()}
    kv_heads = max(heads["key"], heads["value"])
    fits = {heads["key"], heads["value"]} <= {1, kv_heads} and (
        heads["query"] == 1 or (kv_heads > 0 and heads["query"] % kv_heads == 0)
    )
    if not fits:
        refuse(
            "RAGGED_BROADCAST",
            "number of heads",
            heads,
            "of key and value must be equal or 1, and divide that of query, unless that is 1",
            "repeat the heads",
        )
    k, v = arguments["key"], arguments["value"]
    shared = (
        isinstance(k, RaggedArray) == isinstance(v, RaggedArray)
        and counts["key"] == counts["value"]
    )
    lengths = {"key": _constant_length(k), "value": _constant_length(v)}
    if not shared and (None in lengths.values() or len(set(lengths.values())) > 1):
        refuse(
            "RAGGED_KV_BROADCAST",
            "length of key and value",
            {name: "varies" if x is None else x for name, x in lengths.items()},
            "must be one static number, the same for both, where only one of them is repeated",
            "declare it as max_length and min_length, or repeat the other operand too",
        )
    if strict:
        for name, x in arguments.items():
            if _has_empty(x):
                refuse(
                    "RAGGED_ZERO_LEN",
                    f"length of a sequence of {name}",
                    0,
                    "must be at least 1 under strict",
                    "pass strict=False: empty sequences are computed",
                )
    return tuple(found)


def _constant_length(x: Any) -> int | None:
    return x.constant_length if isinstance(x, RaggedArray) else int(jnp.shape(x)[1])


def _has_empty(x: Any) -> bool:
    if not isinstance(x, RaggedArray):
        return bool(jnp.shape(x)[1] == 0)
    if x.min_length == 0:
        return True
    lengths = x.known_lengths()
    return lengths is not None and bool((lengths == 0).any())


# ---- Broadcasting --------------------------------------------------------------------------------------------------


def _expanded(query: Any, key: Any, value: Any) -> tuple[RaggedArray, RaggedArray, RaggedArray]:
    """Repeats single sequences and heads, so that all three have B sequences, and key and value the same rows."""
    counts = [
        x.num_sequences if isinstance(x, RaggedArray) else jnp.shape(x)[0]
        for x in (query, key, value)
    ]
    count = next((n for n in counts if n != 1), 1)
    q = _repeated(query, count)
    shared = (
        isinstance(key, RaggedArray)
        and isinstance(value, RaggedArray)
        and key.num_sequences == value.num_sequences
        and _may_share(key, value)
    )
    if shared:
        k = _repeated(key, count)
        v = k.with_values(_repeated(value, count).values)
    else:
        k, v = (_from_dense(_to_dense(x), count) for x in (key, value))
        v = k.with_values(v.values)
    kv_heads = max(k.values.shape[1], v.values.shape[1])
    return (
        _with_heads(q, max(q.values.shape[1], kv_heads)),
        _with_heads(k, kv_heads),
        _with_heads(v, kv_heads),
    )


def _same_rows(a: Any, b: Any) -> bool:
    """Whether two ragged arrays are known, while tracing, to have their sequences in the same rows."""
    return (
        isinstance(a, RaggedArray)
        and isinstance(b, RaggedArray)
        and a.offsets is b.offsets
        and a.lengths is b.lengths
        and a.values.shape[0] == b.values.shape[0]
        and a.longest == b.longest
    )


def _to_dense(x: Any) -> jax.Array:
    """(1 or B, length, heads, head dim) of a dense array, or of sequences of one static length."""
    return x.to_padded(x.constant_length)[0] if isinstance(x, RaggedArray) else jnp.asarray(x)


def _from_dense(x: jax.Array, count: int) -> RaggedArray:
    length = x.shape[1]
    values = jnp.broadcast_to(x, (count, *x.shape[1:])).reshape(count * length, *x.shape[2:])
    return RaggedArray(
        values, jnp.arange(count + 1, dtype=jnp.int32) * length, None, length, length
    )


def _repeated(x: Any, count: int) -> RaggedArray:
    """``count`` sequences of one, or of a dense array."""
    if not isinstance(x, RaggedArray):
        return _from_dense(jnp.asarray(x), count)
    if x.num_sequences == count:
        return x
    total = x.values.shape[0]
    starts, stops = x.bounds()
    values = jnp.broadcast_to(x.values, (count, *x.values.shape)).reshape(
        count * total, *x.values.shape[1:]
    )
    # What stands before the single sequence becomes a hole behind the copy before it.
    borders = jnp.arange(count + 1, dtype=jnp.int32) * total + starts[0]
    offsets = jnp.minimum(borders, count * total)
    lengths = jnp.broadcast_to(stops - starts, (count,))
    return RaggedArray(values, offsets, lengths, x.longest, x.min_length)


def _with_heads(x: RaggedArray, heads: int) -> RaggedArray:
    total, found, head_dim = x.values.shape
    if found == heads or found != 1:
        return x
    return x.with_values(jnp.broadcast_to(x.values, (total, heads, head_dim)))


# ---- The two forms -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Three operands with equal numbers of sequences; ``options`` are arguments of the dense call."""

    q: RaggedArray
    k: RaggedArray
    v: RaggedArray
    options: dict[str, Any]

    @functools.cached_property
    def dropout_table(self) -> jax.Array | None:
        """The Philox keys of every sequence and head, (B or 1, N or 1, 2); None without dropout."""
        rate, key, seed, offset, broadcast = (self.options[name] for name in _DROPOUT)
        extents = (self.q.num_sequences, self.q.values.shape[1])
        drawn = dropout_operands(rate, key, seed, offset, broadcast, None, extents, _NAME)
        return None if drawn is None else drawn[0]

    @property
    def self_attention(self) -> bool:
        """Whether queries and keys are known to lie in the same rows."""
        return _same_rows(self.q, self.k)

    @property
    def shifted(self) -> bool:
        """Whether the position of a query depends on both lengths of its sequence."""
        return not self.self_attention and self.options["causal_alignment"] == "lower_right"

    @property
    def too_much_to_pack(self) -> str:
        """What a row's one position cannot say at once; empty if it can say all."""
        drops, changes = self.dropout_table is not None, self.options["score_mod"] is not None
        # Dropout needs a position that counts from 0 in the sequence, the band one that is shifted by both lengths.
        if drops and self.shifted:
            return "dropout together with causal_alignment='lower_right'"
        if drops and changes:
            return "dropout together with score_mod"
        # With a score function the position of a query is its row, which must be below the largest position there is.
        rows = self.q.values.shape[0] + self.k.values.shape[0]
        if changes and not self.self_attention and rows > LARGEST_POSITION:
            return f"score_mod together with {rows} rows, over 2^29"
        return ""

    def wants_padding(self, form: Form | None) -> bool:
        """Whether to run the padded form.

        Raises:
          ValueError: the packed form is asked for and cannot hold the problem.
        """
        if self.too_much_to_pack:
            if form == "packed":
                raise ValueError(
                    f"{_NAME}: form is 'packed', which cannot hold {self.too_much_to_pack}: pass form=None"
                )
            return True
        if form is not None:
            return form == "padded"
        call = self.packed_call
        where = dispatch.expected_device(
            call.spec, call.options, call.operands.flat(), needs_grad=False
        )
        chosen = dispatch.choose(call.spec, where, call.options, needs_grad=False).backend
        if chosen is None:
            # The packed form has a capture of its own, which may be one too many for the kernels that are named.
            return self.options["score_mod"] is not None
        # Without tiles to skip, pairs in different sequences cost as much as others.
        return chosen.name in backends.SLOW

    def packed(self) -> tuple[jax.Array, jax.Array]:
        """Rows as they lie: values (total, N, Dv) and lse (total, N)."""
        out, lse = api.attention_of(self.packed_call)
        return out[0], lse[0]

    @functools.cached_property
    def packed_call(self) -> Call:
        """The dense call in which all sequences are one batch entry."""
        left_out = {"causal_alignment", *_DROPOUT}
        score_mod = self.options["score_mod"]
        options = {name: x for name, x in self.options.items() if name not in left_out}
        q_ids, q_positions = self.q.rows()
        k_ids, k_positions = (q_ids, q_positions) if self.self_attention else self.k.rows()
        options |= {"query_segment_ids": q_ids[None], "key_value_segment_ids": k_ids[None]}
        by_position = bool(
            options["is_causal"]
            or options["local_window_size"] is not None
            or options["alibi_slopes"] is not None
            or score_mod is not None
        )
        shift = None
        if self.shifted:
            (q_starts, q_stops), (k_starts, k_stops) = self.q.bounds(), self.k.bounds()
            shift = (k_stops - k_starts) - (q_stops - q_starts)
            q_positions = q_positions + packed_rows.of_sequences(shift, q_ids)
        if callable(score_mod):
            origins = packed_rows.key_origins(self.q, shift)
            options["score_mod"] = packed_rows.on_rows(score_mod, self.q, self.k, origins)
            q_positions = jnp.arange(q_ids.shape[0], dtype=jnp.int32)
            k_positions = k_positions + packed_rows.of_sequences(origins, k_ids)
        # Rows of one sequence are neighbours, so in self-attention distances of rows are those of positions.
        table = self.dropout_table
        if self.q.num_sequences == 0:
            table = None  # it has no keys, and there is no pair to drop
        if table is not None or (by_position and not self.self_attention):
            options |= {
                "query_positions": q_positions[None],
                "key_value_positions": k_positions[None],
            }
        if table is not None:
            options |= {"dropout_rate": self.options["dropout_rate"], "dropout_table": table}
        return Call.parse(self.q.values[None], self.k.values[None], self.v.values[None], **options)

    def padded(self) -> tuple[jax.Array, jax.Array]:
        """The same by way of (B, max_length): as many pairs as B sequences of the static bounds have."""
        q, q_lengths = self.q.to_padded()
        k, k_lengths = self.k.to_padded()
        v, _ = self.v.to_padded()
        out, lse = cast(
            "tuple[jax.Array, jax.Array]",
            api.dot_product_attention(
                q,
                k,
                v,
                query_seq_lengths=q_lengths,
                key_value_seq_lengths=k_lengths,
                return_lse=True,
                **self.options,
            ),
        )
        ids, positions = self.q.rows()
        index = jnp.maximum(ids, 0) * q.shape[1] + positions

        def packed(x: jax.Array, fill: float) -> jax.Array:
            rows = take_rows(x.reshape(-1, *x.shape[2:]), index, ids >= 0)
            if fill == 0:
                return rows
            return jnp.where((ids >= 0)[:, None], rows, fill)

        return packed(out, 0.0), packed(lse, -jnp.inf)


def _ragged_batch(
    arguments: dict[str, Any], bias: Any, mask: Any, options: dict[str, Any], return_lse: bool
) -> RaggedArray | tuple[RaggedArray, RaggedArray]:
    """Rows that are whole attention problems: one dense call, in which padding rows have length 0."""
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    lead = q.values.shape[:-3]
    if k.values.shape[0] != lead[0]:
        raise ValueError(
            f"{_NAME}: query, key and value must have the same rows, got {lead[0]}, {k.values.shape[0]} and"
            f" {v.values.shape[0]}"
        )
    for name, x in (("key", k), ("value", v), ("bias", bias), ("mask", mask)):
        if not isinstance(x, RaggedArray):
            continue
        x.check_static(f"{_NAME}: {name}")
        if _known_to_differ(q.offsets, x.offsets):
            raise ValueError(
                f"{_NAME}: query and {name} have rows in different sequences, offsets {q.offsets} and {x.offsets}; row"
                " by row they attend to each other: give them the same offsets"
            )
    real = (q.segment_ids() >= 0) & (k.segment_ids() >= 0)
    real = jnp.broadcast_to(real.reshape(-1, *(1,) * (len(lead) - 1)), lead)
    out, lse = cast(
        "tuple[jax.Array, jax.Array]",
        api.dot_product_attention(
            q.values,
            k.values,
            v.values,
            _values(bias) if bias is not None else None,
            _values(mask) if isinstance(mask, RaggedArray) else mask,
            query_seq_lengths=jnp.where(real, q.values.shape[-3], 0),
            key_value_seq_lengths=jnp.where(real, k.values.shape[-3], 0),
            return_lse=True,
            **options,
        ),
    )
    return (q.with_values(out), q.with_values(lse)) if return_lse else q.with_values(out)
