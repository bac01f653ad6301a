"""What callers write into records: arguments are checked and become a ``Call``. What is wrong is named here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jattn import config, dispatch, dropout
from jattn.arrays import as_array, as_flag, as_integers, is_integer, shown
from jattn.block_mask import BlockMask
from jattn.config import Options
from jattn.masks import UNBOUNDED, Alignment, Band, CausalBias
from jattn.score_program import ScoreProgram, trace
from jattn.sharding import partition
from jattn.spec import FLOAT_DTYPES, Operands, Spec, as_int32, is_wide

_NAME = "jattn.dot_product_attention"

_AXES = "axes are (batch, length, heads, head dim)"

LARGEST_POSITION = 2**29  # so that the difference of two of them, and its double, fit in 32 bits

Window = int | tuple[int | None, int | None] | None


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call: the problem, its arrays, the caller's wishes, and the leading axes to give back."""

    spec: Spec
    operands: Operands[jax.Array]
    options: Options
    lead: tuple[int, ...]

    @staticmethod
    def parse(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        query_seq_lengths: Any = None,
        key_value_seq_lengths: Any = None,
        local_window_size: Window = None,
        implementation: str | Sequence[str] | None = None,
        causal_alignment: Alignment = "upper_left",
        segment_ids: Any = None,
        query_segment_ids: Any = None,
        key_value_segment_ids: Any = None,
        logits_soft_cap: float | None = None,
        query_positions: Any = None,
        key_value_positions: Any = None,
        alibi_slopes: Any = None,
        sinks: Any = None,
        dropout_rate: Any = 0.0,
        dropout_key: Any = None,
        dropout_seed: Any = None,
        dropout_offset: Any = None,
        broadcast_dropout: bool = False,
        dropout_table: Any = None,
        score_mod: Any = None,
        captures: Any = (),
        block_mask: Any = None,
        compute_dtype: DTypeLike | None = None,
    ) -> Call:
        """Checks the arguments of ``jattn.dot_product_attention``, which says what they mean.

        ``dropout_table``: see ``jattn.api.packed_attention``.

        Raises:
          ValueError: the first one found that is wrong or does not fit the others.
          TypeError: a score_mod or captures of a wrong type.
        """
        q, k, v, bias = _float_arrays(query, key, value, bias, compute_dtype)
        _check_qkv(q, k, v)
        extents = _Extents(q.shape[:-3], q.shape[-2], q.shape[-3], k.shape[-3])
        q, k, v = map(extents.fold, (q, k, v))
        check_alignment(causal_alignment)
        band = _band(
            as_flag("is_causal", is_causal), window_of(local_window_size), causal_alignment
        )
        if isinstance(mask, CausalBias):
            band, dense_mask = _with_causal_bias(
                mask,
                band,
                extents,
                is_causal=is_causal,
                has_lengths=query_seq_lengths is not None or key_value_seq_lengths is not None,
                has_positions=query_positions is not None,
                has_slopes=alibi_slopes is not None,
            )
        else:
            dense_mask = None if mask is None else as_array("mask", mask)
        visible = _check_mask(dense_mask, extents)
        if block_mask is not None:
            visible = _with_blocks(visible, block_mask, extents)
        q_segments, kv_segments = _segments(
            segment_ids, query_segment_ids, key_value_segment_ids, extents
        )
        slopes = _per_head("alibi_slopes", alibi_slopes, extents)
        q_positions, kv_positions = _positions(
            query_positions, key_value_positions, extents, lower_right=band.lower_right
        )
        program, hoisted = _score_program(score_mod, captures, extents, q)
        if band.unbounded and slopes is None and dropout_table is None and program is None:
            q_positions = kv_positions = None  # nothing reads them
        drawn = dropout_operands(
            dropout_rate,
            dropout_key,
            dropout_seed,
            dropout_offset,
            as_flag("broadcast_dropout", broadcast_dropout),
            dropout_table,
            (extents.batch, extents.num_heads),
        )
        operands = Operands(
            q=q,
            k=k,
            v=v,
            bias=_check_bias(bias, q.dtype, extents),
            mask=visible,
            q_lengths=_index_array("query_seq_lengths", query_seq_lengths, extents),
            kv_lengths=_index_array("key_value_seq_lengths", key_value_seq_lengths, extents),
            q_segments=q_segments,
            kv_segments=kv_segments,
            q_positions=q_positions,
            kv_positions=kv_positions,
            sinks=_per_head("sinks", sinks, extents),
            alibi_slopes=slopes,
            dropout_keys=None if drawn is None else drawn[0],
            dropout_rate=None if drawn is None else drawn[1],
            batch_ids=None if program is None else jnp.arange(extents.batch, dtype=jnp.int32),
            head_ids=None if program is None else jnp.arange(extents.num_heads, dtype=jnp.int32),
            captures=hoisted,
        )
        factor = scale_of(scale, q.shape[3], q.dtype)
        spec = Spec.of(
            operands,
            scale=factor,
            softcap=softcap_of(logits_soft_cap, factor, q.dtype),
            band=_canonical(band, operands),
            dropout_rows=dropout_table is not None,
            score_mod=program,
        )
        return Call(spec, operands, _options(implementation), extents.lead)


class _Extents(NamedTuple):
    """The extents that the other arguments must fit; ``lead`` are the batch axes as the caller has them."""

    lead: tuple[int, ...]
    num_heads: int
    q_len: int
    kv_len: int

    @property
    def batch(self) -> int:
        """The batch axes folded into one."""
        return math.prod(self.lead)

    @property
    def scores(self) -> tuple[int, ...]:
        """The shape of the scores."""
        return (*self.lead, self.num_heads, self.q_len, self.kv_len)

    def fold(self, x: jax.Array) -> jax.Array:
        """(*lead, ...) -> (batch, ...)."""
        # Outside of jit even a reshape that changes nothing takes 8 us.
        if len(self.lead) == 1:
            return x
        # On an explicit mesh JAX folds only axes of which the first alone is sharded.
        x = partition.gathered_along(x, range(1, len(self.lead)))
        return x.reshape(self.batch, *x.shape[len(self.lead) :])


def compute_dtype_of(dtype: Any, function: str = _NAME) -> Any:
    """Returns the argument ``compute_dtype`` of ``function`` as a dtype."""
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(
            f"{function}: compute_dtype is {shown(dtype)}, must be one of {', '.join(FLOAT_DTYPES)}: name it in full"
        ) from error
    if str(found) not in FLOAT_DTYPES:
        raise ValueError(
            f"{function}: compute_dtype is {found}, must be one of {', '.join(FLOAT_DTYPES)}"
        )
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise ValueError(
            f"{function}: compute_dtype is float64, which JAX has with jax_enable_x64 alone: switch that on, or pass"
            " 'float32'"
        )
    return found


def result_flags(return_lse: Any, return_residual: Any) -> tuple[bool, bool]:
    """Returns which results a call asks for beside the output, at most one of two."""
    flags = as_flag("return_lse", return_lse), as_flag("return_residual", return_residual)
    if all(flags):
        raise ValueError(
            f"{_NAME}: return_lse and return_residual are both True; ask for one of them"
        )
    return flags


def _number(name: str, value: Any, way_out: str) -> float:
    """Returns a static argument as a float."""
    try:
        if isinstance(value, str | bytes | bool | np.bool_):
            raise TypeError("a text, or a flag")
        if np.iscomplexobj(value):
            raise TypeError("a complex number, of which float() takes a part")
        if np.ndim(value) != 0:
            raise TypeError("an array with axes, of which numpy takes some for numbers")
        return float(value)
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
        kind = "a real number" if np.iscomplexobj(value) else "a number"
        raise ValueError(
            f"{_NAME}: {name} is {shown(value)}, must be {kind} known while tracing: {way_out}"
        ) from error


def cast_floats(name: str, x: jax.Array, dtype: Any, function: str = _NAME) -> jax.Array:
    """Returns an operand in the dtype of the computation; integers and complex numbers are refused."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"{function}: {name} has dtype {x.dtype}, must be a float type for compute_dtype={dtype}: cast it"
        )
    return x.astype(dtype)


def _float_arrays(
    query: Any, key: Any, value: Any, bias: Any, compute_dtype: DTypeLike | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns query, key, value and bias as arrays, cast where ``compute_dtype`` says so."""
    q, k, v = as_array("query", query), as_array("key", key), as_array("value", value)
    bias = None if bias is None else as_array("bias", bias)
    _check_bias_dtype(bias)
    if compute_dtype is not None:
        dtype = compute_dtype_of(compute_dtype)
        q, k, v = (
            cast_floats(name, x, dtype) for name, x in (("query", q), ("key", k), ("value", v))
        )
        bias = None if bias is None else bias.astype(dtype)
    return q, k, v, bias


def _check_qkv(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    shapes = f"query {q.shape}, key {k.shape}, value {v.shape}"
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim < 3:
            raise ValueError(
                f"{_NAME}: {name} has rank {x.ndim} (shape {x.shape}), must be (B, T, N, D) or (T, N, D): add the"
                " missing axes"
            )
        if str(x.dtype) not in FLOAT_DTYPES:
            raise ValueError(
                f"{_NAME}: {name} has dtype {x.dtype}, must be one of {', '.join(FLOAT_DTYPES)}: cast it"
            )
    if not q.ndim == k.ndim == v.ndim or not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        raise ValueError(
            f"{_NAME}: query, key and value must have the same leading batch axes, got {shapes}: broadcast them to the"
            " same batch size, or use jax.vmap"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"{_NAME}: query, key and value must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}: cast them, or"
            " pass compute_dtype"
        )
    if k.shape[-3:-1] != v.shape[-3:-1]:
        raise ValueError(
            f"{_NAME}: key and value must agree in length and heads, got {shapes}: {_AXES}"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"{_NAME}: query has head dim {q.shape[-1]} and key has {k.shape[-1]}; they must be equal (value may"
            f" differ): {_AXES}"
        )
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(
            f"{_NAME}: the head dims must be at least 1, got {shapes}: without features there is nothing to attend to"
        )
    if (kv_heads == 0 and heads != 0) or (kv_heads != 0 and heads % kv_heads != 0):
        raise ValueError(
            f"{_NAME}: the number of query heads, {heads}, must be a multiple of the number of key/value heads,"
            f" {kv_heads}: repeat these, or change the number of groups; {_AXES}"
        )


def _fold_scores(name: str, x: jax.Array, extents: _Extents) -> jax.Array:
    """Brings a bias or mask to rank 4, its leading batch axes folded into one."""
    scores, lead = extents.scores, extents.lead
    rank = len(lead) + 3
    if x.ndim > max(rank, 4):
        raise ValueError(
            f"{_NAME}: {name} has rank {x.ndim} (shape {x.shape}), must have rank 0 to {max(rank, 4)} and broadcast to"
            f" (batch, heads, queries, keys) = {scores}"
        )
    if not lead and x.ndim == 4 and x.shape[0] == 1:
        x = x[0]
    shape = (1,) * (rank - x.ndim) + x.shape
    fits = len(shape) == rank and all(a in (1, b) for a, b in zip(shape, scores, strict=True))
    if not fits:
        raise ValueError(
            f"{_NAME}: {name} has shape {x.shape}, which does not broadcast to (batch, heads, queries, keys) ="
            f" {scores}: each axis must be 1 or the full size{_axes_to_add(x.shape, scores, lead)}"
        )
    x = x.reshape(shape)
    lead_shape = shape[: len(lead)]
    if all(size == 1 for size in lead_shape):
        return x.reshape(1, *shape[len(lead) :])
    return extents.fold(jnp.broadcast_to(x, (*lead, *shape[len(lead) :])))


def _axes_to_add(shape: tuple[int, ...], scores: tuple[int, ...], lead: tuple[int, ...]) -> str:
    """The way out of two frequent mistakes: an array of keys by batch entry, or one without its axis of heads."""
    q_len, kv_len = scores[-2:]
    if lead and shape == (*lead, kv_len):
        return "; one entry per key goes in as x[..., None, None, :], or as key_value_seq_lengths or segment ids"
    if lead and shape == (*lead, q_len, kv_len):
        return "; without an axis of heads it goes in as x[..., None, :, :]"
    return ""


def _check_bias_dtype(bias: jax.Array | None) -> None:
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        hint = "pass a bool array as mask=" if bias.dtype == bool else "cast it to that of query"
        raise ValueError(f"{_NAME}: bias has dtype {bias.dtype}, must be a float type: {hint}")


def _check_bias(bias: jax.Array | None, dtype: Any, extents: _Extents) -> jax.Array | None:
    if bias is None:
        return None
    # Backends read two types; a third one is cast, as adding it to the scores would.
    wide = jnp.dtype(_score_dtype(dtype))
    if bias.dtype not in (dtype, wide):
        bias = bias.astype(wide)
    return _fold_scores("bias", bias, extents)


def _check_mask(mask: jax.Array | None, extents: _Extents) -> jax.Array | None:
    if mask is None:
        return None
    if mask.dtype != bool:
        raise ValueError(
            f"{_NAME}: mask has dtype {mask.dtype}, must be bool (True where the key takes part): pass an additive mask"
            " as bias=, or compare it with 0"
        )
    return _fold_scores("mask", mask, extents)


def _with_blocks(mask: jax.Array | None, block_mask: Any, extents: _Extents) -> jax.Array:
    """A dense mask (1 or B, 1 or N, 1 or T, 1 or S) and the blocks of a block mask as one mask."""
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"{_NAME}: block_mask is {shown(block_mask)}, must be a jattn.BlockMask: jattn.create_block_mask makes one"
        )
    full = (extents.batch, extents.num_heads, extents.q_len, extents.kv_len)
    shape = block_mask.shape
    if shape[2:] != full[2:] or any(a not in (1, b) for a, b in zip(shape[:2], full, strict=False)):
        raise ValueError(
            f"{_NAME}: block_mask is for (batch, heads, queries, keys) = {shape}, the scores are {full}: batch and"
            " heads must be 1 or equal, and the lengths equal"
        )
    blocks = block_mask.materialize()
    return blocks if mask is None else mask & blocks


def _score_program(
    score_mod: Any, captures: Any, extents: _Extents, q: jax.Array
) -> tuple[ScoreProgram | None, tuple[jax.Array, ...]]:
    """The program of a score function, whose batch index counts the leading axes folded, and what it reads."""
    if score_mod is None:
        check_no_captures(captures)
        return None, ()
    return trace(score_mod, captures, extents.batch, _score_dtype(q.dtype), like=q)


def check_no_captures(captures: Any, function: str = _NAME) -> None:
    """Checks that a call without ``score_mod`` has no captures either."""
    if not isinstance(captures, tuple | list) or captures:
        raise ValueError(
            f"{function}: captures is {shown(captures)} without score_mod, which alone reads them: pass both, or"
            " neither"
        )


def _index_array(name: str, values: Any, extents: _Extents, *length: int) -> jax.Array | None:
    """Checks an integer operand of shape (*lead, *length) and folds its leading axes."""
    if values is None:
        return None
    x = as_integers(name, values)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"{_NAME}: {name} has dtype {x.dtype}, must be an integer type: cast it to int32"
        )
    lead = extents.lead
    expected = (*lead, *length)
    if not lead and not length and x.shape == (1,):
        x = x.reshape(())
    if x.shape != expected:
        what = "one number per position" if length else "one length per batch entry"
        if not length and x.ndim == 1 and lead == (x.shape[0] - 1,):
            what += "; cumulative lengths belong to jattn.flash_mha_varlen"
        raise ValueError(f"{_NAME}: {name} has shape {x.shape}, must be {expected}: pass {what}")
    return extents.fold(jnp.asarray(as_int32(x)))


def _segment_ids(extents: _Extents, **given: Any) -> list[Any]:
    """Ids that int32 can hold, equal where those given are; by name, of queries and keys or of both.

    Raises:
      ValueError: known ids beyond 2^31 - 1.
    """
    arrays = []
    for name, ids in given.items():
        x = as_integers(name, ids)
        known = not isinstance(x, jax.core.Tracer)
        if known and jnp.issubdtype(x.dtype, jnp.integer) and is_wide(x.dtype) and x.size:
            largest = int(np.asarray(x).max())  # by numpy: under jit this must not be traced
            if largest > 2**31 - 1:
                raise ValueError(
                    f"{_NAME}: {name} holds {largest}, must be at most 2^31 - 1: number the documents of a batch entry"
                    " from 0"
                )
        arrays.append(x if isinstance(x, jax.Array) else as_int32(x))
    is_traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
    shapes = [(*extents.lead, n) for n in (extents.q_len, extents.kv_len)]
    fits = all(
        jnp.issubdtype(x.dtype, jnp.integer) and x.shape == shape
        for x, shape in zip(arrays, shapes, strict=False)
    )
    if not (is_traced and fits and any(is_wide(x.dtype) for x in arrays)):
        return arrays
    # Ids that nobody can look at yet: where some are too large, all are numbered in their order, on every device of a
    # mesh. As unsigned ones: no signed type holds those of uint64, or of uint32 where 64 bits are off.
    arrays = [partition.gathered(x) for x in arrays]
    bits = max(32, *(jnp.iinfo(x.dtype).bits for x in arrays))
    together = jnp.concatenate([jnp.maximum(x, 0).astype(f"uint{bits}") for x in arrays], axis=-1)
    is_padding = jnp.concatenate([x < 0 for x in arrays], axis=-1)
    flat = together.reshape(-1, together.shape[-1])

    def numbered(x: jax.Array) -> jax.Array:
        return jax.vmap(jnp.searchsorted)(jnp.sort(x, axis=-1), x).astype(jnp.int32)

    is_large = jnp.max(flat, initial=0) > 2**31 - 1
    numbers = jax.lax.cond(is_large, numbered, as_int32, flat).reshape(together.shape)
    numbers = jnp.where(is_padding, -1, numbers)
    return jnp.split(numbers, [arrays[0].shape[-1]], axis=-1)[: len(arrays)]


def _segments(
    both: Any, of_queries: Any, of_keys: Any, extents: _Extents
) -> tuple[jax.Array | None, jax.Array | None]:
    if both is not None:
        if of_queries is not None or of_keys is not None:
            raise ValueError(
                f"{_NAME}: segment_ids was given together with query_segment_ids or key_value_segment_ids; give either"
                " the first or both of the others"
            )
        if extents.q_len != extents.kv_len:
            raise ValueError(
                f"{_NAME}: segment_ids needs as many queries as keys, got {extents.q_len} and {extents.kv_len}: pass"
                " query_segment_ids and key_value_segment_ids"
            )
        (both,) = _segment_ids(extents, segment_ids=both)
        ids = _index_array("segment_ids", both, extents, extents.q_len)
        return ids, ids
    if (of_queries is None) != (of_keys is None):
        missing = "query_segment_ids" if of_queries is None else "key_value_segment_ids"
        raise ValueError(
            f"{_NAME}: {missing} is missing; segment ids are needed for queries and keys: pass both, or segment_ids"
            " where they are the same"
        )
    if of_queries is not None:
        of_queries, of_keys = _segment_ids(
            extents, query_segment_ids=of_queries, key_value_segment_ids=of_keys
        )
    return (
        _index_array("query_segment_ids", of_queries, extents, extents.q_len),
        _index_array("key_value_segment_ids", of_keys, extents, extents.kv_len),
    )


def _positions(
    of_queries: Any,
    of_keys: Any,
    extents: _Extents,
    *,
    lower_right: bool,
) -> tuple[jax.Array | None, jax.Array | None]:
    if (of_queries is None) != (of_keys is None):
        missing = "query_positions" if of_queries is None else "key_value_positions"
        raise ValueError(
            f"{_NAME}: {missing} is missing; positions are needed for queries and keys: pass both, or neither for"
            " their indices"
        )
    if of_queries is None:
        return None, None
    if lower_right:
        raise ValueError(
            f"{_NAME}: query_positions and key_value_positions were given with lower-right alignment, but positions say"
            " where a query sits by themselves: use causal_alignment='upper_left', and add S - T to query_positions"
        )

    def clamped(name: str, values: Any, length: int) -> jax.Array | None:
        x = _index_array(name, values, extents, length)
        return None if x is None else jnp.clip(x, -LARGEST_POSITION, LARGEST_POSITION)

    return (
        clamped("query_positions", of_queries, extents.q_len),
        clamped("key_value_positions", of_keys, extents.kv_len),
    )


def _per_head(name: str, values: Any, extents: _Extents) -> jax.Array | None:
    """Brings a float operand that broadcasts to (*lead, N) to (1 or B, 1 or N, 1) float32."""
    if values is None:
        return None
    x = as_array(name, values)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{_NAME}: {name} has dtype {x.dtype}, must be a float type: cast it")
    lead, num_heads = extents.lead, extents.num_heads
    full = (*lead, num_heads)
    shape = (1,) * (len(full) - x.ndim) + x.shape
    if len(shape) != len(full) or any(a not in (1, b) for a, b in zip(shape, full, strict=True)):
        raise ValueError(
            f"{_NAME}: {name} has shape {x.shape}, must be ({num_heads},), one number per query head, or broadcast to"
            f" (batch, heads) = {full}"
        )
    x = x.reshape(shape).astype(jnp.float32)
    if all(size == 1 for size in shape[:-1]):
        return x.reshape(1, shape[-1], 1)
    # Two steps: on an explicit mesh JAX does not fold and add an axis at once.
    x = extents.fold(jnp.broadcast_to(x, (*lead, shape[-1])))
    return x.reshape(*x.shape, 1)


def dropout_operands(
    rate: Any,
    key: Any,
    seed: Any,
    offset: Any,
    broadcast: bool,
    table: jax.Array | None,
    extents: tuple[int, int],
    function: str = _NAME,
) -> tuple[jax.Array, jax.Array] | None:
    """Returns the Philox keys (1 or B, 1 or N, 2) and the rate (1, 1, 1), or None where nothing can be dropped.

    ``table`` holds keys of packed sequences, (sequences, 1 or N, 2), in place of key, seed and offset. ``function`` is
    whose arguments they are.
    """
    if key is not None and seed is not None:
        raise ValueError(
            f"{function}: dropout_key and dropout_seed were both given; give one of them: the seed of a key is"
            " jattn.seed_from_key(key)"
        )
    if offset is not None and seed is None:
        raise ValueError(
            f"{function}: dropout_offset was given without dropout_seed, to which it belongs: pass"
            " dropout_seed=jattn.seed_from_key(key)"
        )
    if not isinstance(rate, int | float | np.generic):
        rate = as_array("dropout_rate", rate, function)
    dropout.check_rate(f"{function}: dropout_rate", rate)
    if isinstance(rate, int | float | np.generic) and rate == 0:
        return None
    if key is None and seed is None and table is None:
        raise ValueError(
            f"{function}: dropout_rate is {rate} but there is no randomness: pass dropout_key (a JAX key) or"
            " dropout_seed, or the number 0.0, not an array, as dropout_rate"
        )
    # Piecewise constant in the rate: rounding to 1/32768 comes first.
    rates = jax.lax.stop_gradient(jnp.asarray(rate, jnp.float32)).reshape(1, 1, 1)
    if table is not None:
        return table, rates
    words = (
        dropout.words_of(f"{function}: dropout_seed", seed)
        if key is None
        else _seed_of_key(key, function)
    )
    offset_words = dropout.words_of(f"{function}: dropout_offset", 0 if offset is None else offset)
    words, offset_words = partition.gathered(words), partition.gathered(offset_words)
    return dropout.keys(words, offset_words, *((1, 1) if broadcast else extents)), rates


def _seed_of_key(key: Any, function: str) -> jax.Array:
    key = as_array("dropout_key", key, function)
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if (is_typed and key.shape != ()) or (
        not is_typed and (key.ndim != 1 or key.dtype != jnp.uint32)
    ):
        raise ValueError(
            f"{function}: dropout_key has shape {key.shape} and dtype {key.dtype}, must be one key made by"
            " jax.random.key or jax.random.PRNGKey: pass one of them, or use jax.vmap"
        )
    if not is_typed:
        words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape
        if key.shape != words:
            raise ValueError(
                f"{function}: dropout_key has shape {key.shape}, must be {words} as keys of jax_default_prng_impl are:"
                " of another implementation pass jax.random.wrap_key_data(dropout_key, impl=...)"
            )
    return dropout.seed_from_key(key)


def check_alignment(alignment: Any, function: str = _NAME) -> None:
    """Checks the argument ``causal_alignment`` of ``function``."""
    if not isinstance(alignment, str) or alignment not in ("upper_left", "lower_right"):
        raise ValueError(
            f"{function}: causal_alignment is {shown(alignment)}, must be 'upper_left' or 'lower_right'"
        )


def _band(is_causal: bool, sides: tuple[int, int], alignment: Alignment) -> Band:
    band = Band(lower_right=alignment == "lower_right").intersect(*sides)
    return band.intersect(UNBOUNDED, 0) if is_causal else band


def _with_causal_bias(
    mask: CausalBias,
    band: Band,
    extents: _Extents,
    *,
    is_causal: bool,
    has_lengths: bool,
    has_positions: bool,
    has_slopes: bool,
) -> tuple[Band, jax.Array | None]:
    """A causal bias object, which counts indices, as part of the band, or as a dense mask where the band does not."""
    q_len, kv_len = extents.q_len, extents.kv_len
    if is_causal:
        raise ValueError(
            f"{_NAME}: CausalBias should not be used with causal=True: drop is_causal, or the causal bias object"
        )
    if (mask.q_len, mask.kv_len) != (q_len, kv_len):
        raise ValueError(
            f"{_NAME}: the causal bias object was made for {mask.q_len} queries and {mask.kv_len} keys, the call"
            f" has {q_len} and {kv_len}: make it as jattn.causal_{mask.alignment}({q_len}, {kv_len})"
        )
    lower_right = mask.alignment == "lower_right"
    if not band.unbounded and lower_right != band.lower_right:
        raise ValueError(
            f"{_NAME}: the causal bias object is aligned {mask.alignment}, but local_window_size is not; pass"
            f" causal_alignment={mask.alignment!r}"
        )
    # The band is of other keys where it follows lengths or positions, and slopes read its alignment.
    is_other = (
        has_positions
        or (has_lengths and lower_right)
        or (has_slopes and lower_right != band.lower_right)
    )
    if not is_other:
        return dataclasses.replace(band, lower_right=lower_right).intersect(UNBOUNDED, 0), None
    if band == Band() and not has_positions:
        return Band(right=kv_len - q_len if lower_right else 0), None
    return band, mask.materialize()


def _canonical(band: Band, operands: Operands[jax.Array]) -> Band:
    return band.canonical(
        operands.q.shape[1],
        operands.k.shape[1],
        has_lengths=operands.q_lengths is not None or operands.kv_lengths is not None,
        has_slopes=operands.alibi_slopes is not None,
    )


def window_of(
    window: Any, function: str = _NAME, name: str = "local_window_size"
) -> tuple[int, int]:
    """Returns how many keys to the left and to the right a window has, ``UNBOUNDED`` where there is no limit.

    Args:
      window: the argument, as the caller wrote it.
      function, name: whose argument it is, for errors.

    Raises:
      ValueError: it is neither a number nor a pair of them, or is traced.
    """
    if window is None:
        return UNBOUNDED, UNBOUNDED
    given: Any = window
    if isinstance(given, np.ndarray) and given.ndim == 0:
        given = given[()]
    sides: tuple[Any, ...] = ()
    if is_integer(given):
        sides = (given, given)
    elif isinstance(given, tuple | list | np.ndarray):
        sides = tuple(given)
    valid = len(sides) == 2 and all(s is None or (is_integer(s) and s >= -1) for s in sides)
    if not valid:
        raise ValueError(
            f"{function}: {name} is {shown(window)}, must be a number of keys or a pair (left, right) of them,"
            " known while tracing; None or -1 is no limit"
        )
    left, right = (UNBOUNDED if s is None or s == -1 else int(s) for s in sides)
    return left, right


def scale_of(scale: Any, head_dim: int, dtype: Any) -> float:
    """The scale of a call whose query has this head dim and type.

    Raises:
      ValueError: it is not known, or is not finite in the type of the scores.
    """
    if scale is None and not isinstance(head_dim, int):
        raise ValueError(
            f"{_NAME}: scale is None, which is 1 / sqrt(head dim), but the head dim is {head_dim}, not a known number:"
            " pass scale, or export with this extent fixed"
        )
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    value = _number("scale", scale, "multiply the query by a traced scale instead")
    if not math.isfinite(_as_scores_are(value * math.log2(math.e), dtype)):
        raise ValueError(
            f"{_NAME}: scale is {value}, must be finite, in the type of the scores,"
            f" {_score_dtype(dtype)}, and in base 2 too; None is 1 / sqrt(head dim)"
        )
    # A subnormal scale is no scale for hardware that takes it for 0.
    return value if abs(value) >= np.finfo(_score_dtype(dtype)).tiny else 0.0


def softcap_of(softcap: Any, scale: float, dtype: Any) -> float:
    """The softcap of a call with this scale, whose query has this type; 0 is none.

    Raises:
      ValueError: it is not positive, or too small or too large for the type of the scores or for the scale.
    """
    if softcap is None:
        return 0.0
    value = _number("logits_soft_cap", softcap, "make it a static argument")
    # Beyond these limits score / cap would be a subnormal number, or the cap itself.
    exponent = np.finfo(_score_dtype(dtype)).maxexp - 28
    if not 2.0**-exponent <= value <= 2.0**exponent:
        raise ValueError(
            f"{_NAME}: logits_soft_cap is {value}, must be a positive finite number from 2^{-exponent} to 2^{exponent}"
            f" for scores in {_score_dtype(dtype)}; None is no cap"
        )
    if not math.isfinite(_as_scores_are(scale / value, dtype)):
        raise ValueError(
            f"{_NAME}: logits_soft_cap is {value} and scale is {scale}, must have a finite ratio scale /"
            f" logits_soft_cap in {_score_dtype(dtype)}, by which products are multiplied; None is no cap"
        )
    return value


def _score_dtype(dtype: Any) -> str:
    return "float64" if dtype == "float64" else "float32"


def _as_scores_are(value: float, dtype: Any) -> float:
    with np.errstate(over="ignore"):
        return float(np.asarray(value).astype(_score_dtype(dtype)))


def _options(implementation: str | Sequence[str] | None) -> Options:
    """The options in force, and the backends that the call names; one that ``sdpa_kernel`` names must exist by now."""
    options = config.current_options()
    for name in options.enabled or ():
        if name not in dispatch.known_names():
            raise ValueError(
                f"jattn.sdpa_kernel: backends holds {name!r}, which is not a backend; known are"
                f" {', '.join(dispatch.known_names())}"
            )
    return dataclasses.replace(options, implementation=_implementation(implementation))


def _implementation(names: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    wanted = (names,) if isinstance(names, str) else names
    if not isinstance(wanted, tuple | list):
        raise ValueError(
            f"{_NAME}: implementation is {shown(names)}, must be the name of a backend or a tuple of names; None"
            " leaves the choice to jattn"
        )
    for name in wanted:
        if name not in dispatch.known_names():
            raise ValueError(
                f"{_NAME}: implementation {name!r} is not a backend; known are {', '.join(dispatch.known_names())}"
            )
    return tuple(wanted)
