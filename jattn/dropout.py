"""Which pairs dropout keeps: Philox4x32-10 in plain jnp, and how seeds, keys and bits hang together.

  seed, offset     two uint32 words each, 64 bits little-endian; ``seed_from_key`` makes a seed out of a JAX key
  keys[b, n]       words 0 and 1 of Philox(counter = (b, n, offset 0, offset 1), key = seed)
  words            Philox(counter = (0, row group, 0, column group), key = keys[b, n])
                   row group = t / 32 * 4 + t % 8 / 2    column group = j / 32 * 4 + j % 8 / 2
  r, h, g; e, w, f t % 2, t / 8 % 2, t / 16 % 2 of the query; j % 2, j / 8 % 2, j / 16 % 2 of the key
  x(h, w)          byte 2 * h + e of words[2 * r + w], from the least significant
  M(y)             of a byte with halves (high, low): that with halves (high ^ low, high)
  S                x(0, 0) ^ x(0, 1) ^ x(1, 0) ^ x(1, 1)
  own              x(h, w) ^ (S if f else 0) ^ (M(S) if g else 0)
  lower            x(0, 1) ^ x(1, 1) ^ M(x(1, 0) ^ x(1, 1))
  bits of (t, j)   (own & 127) * 256 + lower, 15 bits
  threshold        min(round(32768 * rate), 32640)
  the pair is dropped if its bits < threshold; a kept weight is multiplied by 32768 / (32768 - threshold)

So the decision is a pure function of (seed, offset, b, n, t, j): no tile size, backend, sharding or packing enters.
Only uint32 arithmetic is used, so it is the same with and without ``jax_enable_x64``.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox, its constants).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jattn.arrays import is_integer, shown
from jattn.jax_interface import vary_like

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LEVELS = 1 << 15  # 15 bits decide about a pair
_MOST_THRESHOLD = _LEVELS - _LEVELS // 256
MAX_RATE = _MOST_THRESHOLD / _LEVELS  # higher ones count as this

Words = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _full_product(constant: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The upper and the lower 32 bits of ``constant * x``, by products of 16-bit halves: none exceeds 32 bits."""
    low, high = jnp.uint32(constant & 0xFFFF), jnp.uint32(constant >> 16)
    x_low, x_high = x & 0xFFFF, x >> 16
    middle = high * x_low + (low * x_low >> 16)
    crossed = low * x_high + (middle & 0xFFFF)
    return high * x_high + (middle >> 16) + (crossed >> 16), jnp.uint32(constant) * x


def philox(counter: Words, key: tuple[jax.Array, jax.Array], *, unroll: bool = False) -> Words:
    """Returns the four words of Philox4x32-10 for uint32 counters and keys that broadcast against each other.

    A loop and not 10 rounds written out: those compile half as long again, and XLA recomputes them for every pair that
    shares a call where it fuses them with what reads the words. ``unroll`` is for words that nobody shares: one kernel
    on a GPU, where every step of a loop is a launch.
    """
    shape = jnp.broadcast_shapes(*(x.shape for x in (*counter, *key)))
    words = tuple(jnp.broadcast_to(word, shape) for word in counter)

    def mix_and_bump(_: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        c0, c1, c2, c3, k0, k1 = state
        high0, low0 = _full_product(_MULTIPLIERS[0], c0)
        high1, low1 = _full_product(_MULTIPLIERS[1], c2)
        mixed = (high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0)
        return *mixed, k0 + jnp.uint32(_KEY_INCREMENTS[0]), k1 + jnp.uint32(_KEY_INCREMENTS[1])

    state = vary_like((*words, *key), (*counter, *key))
    c0, c1, c2, c3, _, _ = jax.lax.fori_loop(0, _ROUNDS, mix_and_bump, state, unroll=unroll)
    return c0, c1, c2, c3


def seed_from_key(key: jax.Array) -> jax.Array:
    """Returns the dropout seed of a JAX key, ``jax.random.bits(key, (2,), uint32)``; the offset that goes with it is 0.

    Args:
      key: one key, typed (``jax.random.key``) or raw (``jax.random.PRNGKey``).

    Returns:
      uint32 (2,), the lower word first.

    Raises:
      ValueError: several keys.
      TypeError: not a key.
    """
    return jax.random.bits(key, (2,), jnp.uint32)


@functools.partial(jax.jit, static_argnums=(2, 3))
def keys(seed: jax.Array, offset: jax.Array, batch: int, num_heads: int) -> jax.Array:
    """Returns the Philox keys (batch, num_heads, 2) uint32 of a seed and an offset, uint32[2] each.

    With ``batch`` or ``num_heads`` 1 the one key serves all of them.
    """
    counter = (
        jax.lax.broadcasted_iota(jnp.uint32, (batch, 1), 0),
        jax.lax.broadcasted_iota(jnp.uint32, (1, num_heads), 1),
        offset[0],
        offset[1],
    )
    first, second, _, _ = philox(counter, (seed[0], seed[1]), unroll=True)
    return jnp.stack([first, second], axis=-1)


def threshold(rate: jax.Array) -> jax.Array:
    """Returns how many of 32768 values of the bits of a pair drop it: uint32, in the shape of ``rate`` (float32)."""
    scaled = jnp.rint(rate.astype(jnp.float32) * _LEVELS)
    return jnp.clip(scaled, 0, _MOST_THRESHOLD).astype(jnp.uint32)


def kept_factor(rate: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns what kept weights are multiplied by, in the shape of ``rate``: the inverse of the kept share."""
    return _LEVELS / (_LEVELS - threshold(rate).astype(dtype))


def _rotate_halves(word: jax.Array) -> jax.Array:
    return word << 16 | word >> 16


def _times_generator(word: jax.Array) -> jax.Array:
    """M of each byte: a product in GF(4), with coordinates of four bits, by an element other than 0 and 1."""
    return word >> 4 & 0x0F0F0F0F | (word ^ word << 4) & jnp.uint32(0xF0F0F0F0)


def _expand(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns S and M(S) in both halves, and the lower bits in the upper half, by key parity, of words 2 r, 2 r + 1."""
    both = left ^ right
    moved = _times_generator(both)
    return (
        both ^ _rotate_halves(both),
        moved ^ _rotate_halves(moved),
        right ^ _rotate_halves(right) ^ moved,
    )


def _bits_of_word(own: jax.Array, lower: jax.Array, h: jax.Array, e: jax.Array) -> jax.Array:
    return (own >> (16 * h + 8 * e) & 127) << 8 | lower >> (16 + 8 * e) & 255


def bits_of_block(
    keys: jax.Array, first_row: ArrayLike, first_column: ArrayLike, num_rows: int, num_columns: int
) -> jax.Array:
    """Returns the bits of the pairs of a block of rows and columns, one Philox call for 64 pairs.

    Args:
      keys: (..., 2) uint32.
      first_row, first_column: multiples of 32, traced or not.
      num_rows, num_columns: of any size.

    Returns:
      uint32 (..., num_rows, num_columns) below 32768.
    """
    row_tiles, column_tiles = -(-num_rows // 32), -(-num_columns // 32)
    row_groups = jnp.asarray(first_row, jnp.uint32) // 8 + jnp.arange(
        4 * row_tiles, dtype=jnp.uint32
    )
    column_groups = jnp.asarray(first_column, jnp.uint32) // 8 + jnp.arange(
        4 * column_tiles, dtype=jnp.uint32
    )
    zero = jnp.uint32(0)
    lead = keys.shape[:-1]
    words = philox(
        (zero, row_groups[:, None], zero, column_groups[None, :]),
        (keys[..., 0, None, None], keys[..., 1, None, None]),
    )
    # Row = 32 a + 16 g + 8 h + 2 i + r, column = 32 c + 16 f + 8 w + 2 q + e; axes ..., a, i, c, q, r, g, h, f, w, e.
    split = jnp.stack(words, axis=-1).reshape(*lead, row_tiles, 4, column_tiles, 4, 2, 2)
    sums, moved_sums, lower = (
        x[..., None, None, None, None, None] for x in _expand(split[..., 0], split[..., 1])
    )

    def bit(axis: int) -> jax.Array:
        """0 and 1 along an axis that is counted from the last, of the rank of all (jax_numpy_rank_promotion)."""
        shape = [1] * lower.ndim
        shape[axis] = 2
        return jnp.arange(2, dtype=jnp.uint32).reshape(shape)

    g, h, f, e = bit(-5), bit(-4), bit(-3), bit(-1)
    own = split[..., None, None, None, :, None] ^ f * sums ^ g * moved_sums
    bits = _bits_of_word(own, lower, h, e)
    order = (0, 5, 6, 1, 4, 2, 7, 8, 3, 9)  # ..., a, g, h, i, r, c, f, w, q, e
    bits = bits.transpose(*range(len(lead)), *(len(lead) + axis for axis in order))
    bits = bits.reshape(*lead, 32 * row_tiles, 32 * column_tiles)
    return bits[..., :num_rows, :num_columns]


def bits_at(keys: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns the bits of pairs at any coordinates, one Philox call each.

    Args:
      keys: (..., 2) uint32; ``keys[..., 0]``, ``rows`` and ``columns`` broadcast against each other.
      rows, columns: integers; negative ones count as their uint32 bit pattern.

    Returns:
      uint32 below 32768, of the broadcast shape.
    """
    t, j = rows.astype(jnp.uint32), columns.astype(jnp.uint32)
    zero = jnp.uint32(0)
    w0, w1, w2, w3 = philox(
        (zero, (t >> 5) * 4 + (t & 7) // 2, zero, (j >> 5) * 4 + (j & 7) // 2),
        (keys[..., 0], keys[..., 1]),
    )
    left = jnp.where((t & 1) != 0, w2, w0)
    right = jnp.where((t & 1) != 0, w3, w1)
    sums, moved_sums, lower = _expand(left, right)
    own = jnp.where((j & 8) != 0, right, left)
    own = own ^ jnp.where((j & 16) != 0, sums, zero) ^ jnp.where((t & 16) != 0, moved_sums, zero)
    return _bits_of_word(own, lower, t >> 3 & 1, j & 1)


def words_of(name: str, value: ArrayLike) -> jax.Array:
    """Returns a seed or offset as uint32[2]; a Python int below 2**64 is split into its lower and upper word.

    Raises:
      ValueError: ``value`` is neither.
    """
    if is_integer(value):
        number = int(value)  # type: ignore[arg-type]
        if not 0 <= number < 1 << 64:
            raise ValueError(f"{name} is {number}, must be at least 0 and below 2**64")
        # Of two numbers and not of an array: bodies of loops take no constants.
        return jnp.stack([jnp.uint32(number & 0xFFFFFFFF), jnp.uint32(number >> 32)])
    try:
        words = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{name} is {value!r}, must be uint32 of shape (2,) or an int: use jattn.seed_from_key"
        ) from error
    # Without jax_enable_x64 JAX has cut what numpy holds in 64 bits.
    given = (x.dtype for x in jax.tree.leaves(value) if isinstance(x, np.ndarray | np.generic))
    dtype = next((dtype for dtype in given if dtype.itemsize > 4), words.dtype)
    if words.shape != (2,) or dtype != jnp.uint32:
        raise ValueError(
            f"{name} has shape {words.shape} and dtype {dtype}, must be uint32 of shape (2,), the lower word"
            " first: use jattn.seed_from_key, or a Python int"
        )
    return words


def check_rate(name: str, rate: ArrayLike) -> None:
    """Checks a rate.

    Raises:
      ValueError: it is no scalar, or is known and no number of [0, 1).
    """
    if np.shape(rate) != ():
        raise ValueError(
            f"{name} has shape {np.shape(rate)}, must be a scalar: use jax.vmap for several rates"
        )
    dtype = getattr(rate, "dtype", None)
    is_number = isinstance(rate, int | float) or (
        dtype is not None
        and not jnp.issubdtype(dtype, jax.dtypes.extended)
        and jnp.dtype(dtype).kind in "biufV"
    )
    if not is_number:
        raise ValueError(f"{name} is {shown(rate)}, must be a real number: pass a float")
    if isinstance(rate, jax.core.Tracer):
        return
    # A known array is compared as a number: under jit JAX would trace the comparison.
    known = rate if isinstance(rate, int | float) else float(rate)  # type: ignore[arg-type]
    if not 0 <= known < 1:
        raise ValueError(
            f"{name} is {shown(rate)}, must be at least 0 and below 1: to drop everything, multiply the result by 0"
        )


def dropout_mask(
    seed: ArrayLike, offset: ArrayLike, shape: tuple[int, int, int, int], p: ArrayLike
) -> jax.Array:
    """Returns which weights dropout keeps, the same for every backend: ``jattn.dot_product_attention`` keeps exactly
    these.

    ``weights = jnp.where(mask, weights / (1 - r), 0)`` with r = p rounded to a multiple of 1/32768, and at most
    255/256, is what the attention function does with the normalised weights.

    Args:
      seed: uint32[2], the lower word first, or a Python int below 2**64. Of a JAX key: ``jattn.seed_from_key(key)``.
      offset: likewise; 0 goes with a seed that came from a key.
      shape: (B, N, T, S). With ``broadcast_dropout`` the one mask of a call is that of (1, 1, T, S).
      p: probability of dropping, 0 <= p < 1, a scalar; may be traced.

    Returns:
      bool (B, N, T, S), True where the weight is kept. An entry depends on its own indices alone, so the mask of a
      smaller shape is a corner of that of a larger one.

    Raises:
      ValueError: a wrong shape or type, or a known p outside [0, 1).

    Source: Philox4x32-10 of "Parallel random numbers: as easy as 1, 2, 3", doi:10.1145/2063384.2063405.
    """
    if not isinstance(p, int | float | np.generic):
        try:
            p = jnp.asarray(p)
        except jax.errors.JAXTypeError:
            raise  # a tracer that has left its function
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"jattn.dropout_mask: p is {p!r}, must be a number: pass one that is at least 0 and below 1"
            ) from error
    check_rate("jattn.dropout_mask: p", p)
    seed_words = words_of("jattn.dropout_mask: seed", seed)
    offset_words = words_of("jattn.dropout_mask: offset", offset)
    is_shape = isinstance(shape, tuple | list) and len(shape) == 4
    if not is_shape or any(not is_integer(x) or not 0 <= x < 2**31 for x in shape):
        raise ValueError(
            f"jattn.dropout_mask: shape is {shape!r}, must be (B, N, T, S), integers from 0 to 2^31 - 1: add axes of"
            " size 1"
        )
    return _mask(seed_words, offset_words, jnp.asarray(p, jnp.float32), tuple(map(int, shape)))


@functools.partial(jax.jit, static_argnums=3)
def _mask(
    seed: jax.Array, offset: jax.Array, rate: jax.Array, shape: tuple[int, int, int, int]
) -> jax.Array:
    batch, num_heads, q_len, kv_len = shape
    of_heads = keys(seed, offset, batch, num_heads)
    return bits_of_block(of_heads, 0, 0, q_len, kv_len) >= threshold(rate)
