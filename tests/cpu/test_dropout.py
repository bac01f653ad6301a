"""Row J06: which pairs dropout drops. Fixed vectors, rates, independence, and that every backend drops just these."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import dropout
from jattn.testing import cases, inputs, oracle

SEED = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
ONES = 0xFFFFFFFF

# Of batch entry 1, head 2, offset 3, rate 0.3; rows 0, 1, 8, 16 and 19 of the mask.
KEY_1_2 = ["0xb71bbc7", "0xb7695a39"]
MASK_ROWS = [
    "111101111110110111111111",
    "001100111011110011100001",
    "110001011001111100100101",
    "101101101011111111110111",
    "101100111011110111101110",
]


def plain_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, third = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = third >> 32 ^ c1 ^ k0, third & ONES, first >> 32 ^ c3 ^ k1, first & ONES
        k0, k1 = k0 + 0x9E3779B9 & ONES, k1 + 0xBB67AE85 & ONES
    return c0, c1, c2, c3


def plain_key(seed: int, offset: int, b: int, n: int) -> tuple[int, int]:
    """The key of a batch entry and head, by docs/conventions.md."""
    counter = (b, n, offset & ONES, offset >> 32)
    return plain_philox(counter, (seed & ONES, seed >> 32))[:2]  # type: ignore[return-value]


def plain_bits(key: tuple[int, int], t: int, j: int) -> int:
    """The 15 bits of a pair, by docs/conventions.md."""
    row_group, column_group = t // 32 * 4 + t % 8 // 2, j // 32 * 4 + j % 8 // 2
    words = plain_philox((0, row_group, 0, column_group), key)
    r, h, g = t % 2, t // 8 % 2, t // 16 % 2
    e, w, f = j % 2, j // 8 % 2, j // 16 % 2

    def x(half: int, word: int) -> int:
        return words[2 * r + word] >> 8 * (2 * half + e) & 255

    def times_generator(byte: int) -> int:
        high, low = divmod(byte, 16)
        return (high ^ low) * 16 + high

    total = x(0, 0) ^ x(0, 1) ^ x(1, 0) ^ x(1, 1)
    own = x(h, w) ^ f * total ^ g * times_generator(total)
    return (own & 127) * 256 + (x(0, 1) ^ x(1, 1) ^ times_generator(x(1, 0) ^ x(1, 1)))


def words(*values: int) -> tuple[jax.Array, ...]:
    return tuple(jnp.uint32(value) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
@pytest.mark.parametrize("x64", [False, True])
def test_J06_known_answers_of_philox(
    counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...], x64: bool
) -> None:
    """The three vectors that the authors of Philox4x32-10 published."""
    with jax.enable_x64(x64):
        got = dropout.philox(words(*counter), words(*key))  # type: ignore[arg-type]
        assert tuple(int(word) for word in got) == want == plain_philox(counter, key)
        assert all(word.dtype == jnp.uint32 for word in got)


@pytest.mark.parametrize(
    "shape", [(1, 1, 64, -40), (-1, 1, 4, 4), (1, 1, 2, 2.0), (1, 1, 2, True), (4, 4), 5]
)
def test_shapes_of_masks_are_checked(shape: Any) -> None:
    with pytest.raises(ValueError, match=r"shape is .*must be \(B, N, T, S\), integers from 0"):
        jattn.dropout_mask(0, 0, shape, 0.1)


def test_J06_fixed_mask() -> None:
    """These bits are a promise: a checkpointed run must drop the same weights with the next release."""
    keys = dropout.keys(jnp.asarray(SEED), jnp.array([3, 0], jnp.uint32), 2, 3)
    assert keys.shape == (2, 3, 2)
    assert [hex(int(x)) for x in keys[1, 2]] == KEY_1_2
    mask = np.asarray(jattn.dropout_mask(SEED, 3, (2, 3, 20, 24), 0.3))
    rows = ["".join("01"[int(x)] for x in row) for row in mask[1, 2, [0, 1, 8, 16, 19]]]
    assert rows == MASK_ROWS


def test_J06_the_fixed_mask_is_that_of_the_definition() -> None:
    key = plain_key(0x9ABCDEF012345678, 3, 1, 2)
    assert [hex(word) for word in key] == KEY_1_2
    least_kept = round(32768 * 0.3)
    for t, row in zip((0, 1, 8, 16, 19), MASK_ROWS, strict=True):
        assert row == "".join("01"[plain_bits(key, t, j) >= least_kept] for j in range(24))


@pytest.mark.parametrize(("first_row", "first_column"), [(0, 0), (96, 32), (1 << 20, 1 << 31)])
def test_J06_bits_are_those_of_the_definition(first_row: int, first_column: int) -> None:
    """Of every pair of a block, and one by one at positions that wrap around."""
    key = plain_key(11, 5 << 32, 0, 1)
    rows, columns = range(first_row, first_row + 35), range(first_column, first_column + 27)
    want = [[plain_bits(key, t, j) for j in columns] for t in rows]
    keys = jnp.asarray(key, jnp.uint32)
    got = dropout.bits_of_block(keys, first_row, np.uint32(first_column), len(rows), len(columns))
    assert got.tolist() == want
    positions = [-1, -9, 0, 7, 1 << 29]
    got = dropout.bits_at(keys, jnp.asarray(positions)[:, None], jnp.asarray(positions))
    assert got.tolist() == [
        [plain_bits(key, t & ONES, j & ONES) for j in positions] for t in positions
    ]


RATES = [1 / 32768, 1 / 300, 0.1, 0.22, 0.48, 0.5, 0.9, 0.99, 255 / 256]


@pytest.mark.parametrize("p", RATES)
def test_J06_keep_rate(p: float) -> None:
    """Within 5 sigma of the rounded rate over the whole mask, and for each head, row and column within 6.

    The latter where enough pairs are dropped and kept for the tails to be those of a normal distribution.
    """
    shape = (4, 4, 256, 256)
    kept = np.asarray(jattn.dropout_mask(SEED, 0, shape, p))
    share = 1 - round(32768 * p) / 32768

    def within(sigmas: float, *axes: int) -> None:
        count = np.prod([shape[axis] for axis in axes])
        limit = sigmas * np.sqrt(share * (1 - share) / count)
        assert np.abs(kept.mean(axis=axes) - share).max() < limit

    within(5.0, 0, 1, 2, 3)
    if 0.05 < p < 0.95:
        within(6.0, 2, 3)
        within(6.0, 0, 1, 3)
        within(6.0, 0, 1, 2)


def by_call(pairs: np.ndarray) -> np.ndarray:
    """(B, N, T, S) as (B, N, T / 8, S / 8, 64): the 64 pairs of a call in order of r, e, g, h, f, w."""
    batch, heads, q_len, kv_len = pairs.shape
    # t = 32 a + 16 g + 8 h + 2 i + r and j = 32 c + 16 f + 8 w + 2 q + e.
    split = pairs.reshape(batch, heads, q_len // 32, 2, 2, 4, 2, kv_len // 32, 2, 2, 4, 2)
    calls = split.transpose(0, 1, 2, 5, 7, 10, 6, 11, 3, 4, 8, 9)
    return calls.reshape(batch, heads, q_len // 8, kv_len // 8, 64)


# The sixteen pairs of a call with one r and e share their lower bits.
SHARES = np.arange(64)[:, None] // 16 == np.arange(64) // 16


def bits_of_calls(heads: int) -> np.ndarray:
    """(calls, pairs of a call), of 1024 calls a head."""
    keys = dropout.keys(jnp.asarray(SEED), jnp.zeros(2, jnp.uint32), 1, heads)
    return by_call(np.asarray(dropout.bits_of_block(keys, 0, 0, 256, 256))).reshape(-1, 64)


def test_J06_bits_of_a_call_are_independent() -> None:
    """All 960 bits of the 64 pairs, two by two: fair, and correlated only where two pairs share lower bits."""
    calls = bits_of_calls(16)[..., None] >> np.arange(15) & 1  # (calls, pairs, bits)
    signs = calls.reshape(len(calls), -1).astype(np.float32) * 2 - 1
    limit = 5.5 / np.sqrt(len(signs))
    assert np.abs(signs.mean(axis=0)).max() < limit
    correlations = (signs.T @ signs / len(signs)).reshape(64, 15, 64, 15)
    bits = np.arange(15)
    same_bit = bits[:, None, None] == bits
    shared = same_bit & (bits < 8) & SHARES[:, None, :, None]
    shared |= same_bit & np.eye(64, dtype=bool)[:, None, :, None]
    assert (correlations[shared] == 1).all()
    assert np.abs(correlations[~shared]).max() < limit


def rank(rows: np.ndarray) -> int:
    """Of rows of bits, each an integer, as vectors over GF(2)."""
    basis: list[int] = []
    for row in rows.tolist():
        rest = row
        for vector in basis:
            rest = min(rest, rest ^ vector)
        if rest:
            basis.append(rest)
    return len(basis)


def forms_of_bits() -> np.ndarray:
    """(16, 15): which of the 32 bits of x(h, w) enter each of the bits of the pairs with one r and e, as integers.

    The bits are linear, so those of 32 calls with one bit set each say it.
    """
    forms = np.zeros((16, 15), np.int64)
    for place in range(32):
        words_of = [jnp.uint32(0), jnp.uint32(0)]  # by w
        words_of[place // 16] = jnp.uint32(1 << (16 * (place // 8 % 2) + place % 8))
        sums, moved_sums, lower = dropout._expand(*words_of)
        for pair in range(16):
            g, h, f, w = (pair >> i & 1 for i in (3, 2, 1, 0))
            own = words_of[w] ^ f * sums ^ g * moved_sums
            bits = int(dropout._bits_of_word(own, lower, jnp.uint32(h), jnp.uint32(0)))
            forms[pair] |= (bits >> np.arange(15) & 1) << place
    return forms


def test_J06_what_two_and_three_pairs_of_a_call_share() -> None:
    """Upper bits of any two pairs are independent of each other and of the lower ones; of three, all but 16 triples."""
    forms = forms_of_bits()
    upper, lower = forms[:, 8:], forms[0, :8]
    assert (forms[:, :8] == lower).all()
    for i, j in itertools.combinations(range(16), 2):
        assert rank(np.concatenate([upper[i], upper[j], lower])) == 22, (i, j)
    dependent = [
        triple
        for triple in itertools.combinations(range(16), 3)
        if rank(np.concatenate([upper[i] for i in triple])) < 21
    ]
    # Those with one h and w: three of the four with f and g.
    assert len(dependent) == 16
    assert all(len({pair & 5 for pair in triple}) == 1 for triple in dependent)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_J06_pairs_of_a_call_are_independent(p: float) -> None:
    """Decisions about all 2016 pairs of pairs, within 5.5 sigma of what the shared lower bits make of them."""
    drop = round(32768 * p)
    rate, lower = drop / 32768, drop % 256 / 256
    signals = ((bits_of_calls(64) < drop) - rate) / np.sqrt(rate * (1 - rate))
    correlations = signals.T @ signals / len(signals)
    # Two pairs share lower bits; these decide if the upper ones of both equal those of the threshold.
    want = SHARES * (lower * (1 - lower) / 2**14 / (rate * (1 - rate)))
    first, second = np.triu_indices(64, 1)
    assert len(first) == 2016
    assert np.abs(correlations - want)[first, second].max() < 5.5 / np.sqrt(len(signals))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_J06_calls_are_independent(p: float) -> None:
    """Each pair of a call with each of the calls next to it: right, below, diagonal, next head and next batch entry."""
    rate = round(32768 * p) / 32768
    calls = by_call(~np.asarray(jattn.dropout_mask(SEED, 0, (4, 4, 256, 256), p)))
    signals = (calls - rate) / np.sqrt(rate * (1 - rate))
    for lags in [
        (0, 0, 0, 1),
        (0, 0, 1, 0),
        (0, 0, 1, 1),
        (0, 0, 0, 4),
        (0, 0, 4, 0),
        (0, 1, 0, 0),
        (1, 0, 0, 0),
    ]:
        extents = signals.shape[:4]
        here = signals[tuple(slice(0, n - lag) for n, lag in zip(extents, lags, strict=True))]
        there = signals[tuple(slice(lag, n) for n, lag in zip(extents, lags, strict=True))]
        count = here.size // 64
        correlations = here.reshape(count, 64).T @ there.reshape(count, 64) / count
        assert np.abs(correlations).max() < 5.5 / np.sqrt(count), lags


def test_J06_neighbours_are_independent() -> None:
    """No correlation along any axis, inside a call and across calls.

    Two pairs of a call that differ in h and w alone give the same product for every f and g at this rate, so of four
    products one counts.
    """
    kept = np.asarray(jattn.dropout_mask(SEED, 0, (4, 4, 256, 256), 0.5)) * 2.0 - 1.0
    lags = [(axis, lag) for axis in (2, 3) for lag in (1, 2, 7, 8, 9, 16, 17, 32)]
    for axis, lag in [*lags, (1, 1), (0, 1)]:
        first = np.take(kept, range(kept.shape[axis] - lag), axis)
        second = np.take(kept, range(lag, kept.shape[axis]), axis)
        assert abs((first * second).mean()) < 5 / np.sqrt(first.size / 4), (axis, lag)
    diagonal = kept[:, :, :-8, :-8] * kept[:, :, 8:, 8:]
    assert abs(diagonal.mean()) < 5 / np.sqrt(diagonal.size / 4)


def test_J06_distinct_in_every_coordinate_seed_and_offset() -> None:
    shape = (2, 3, 32, 48)
    kept = np.asarray(jattn.dropout_mask(SEED, 0, shape, 0.5))
    for axis in range(4):
        slices = [np.take(kept, i, axis).tobytes() for i in range(shape[axis])]
        assert len(set(slices)) == shape[axis], axis
    others = [
        jattn.dropout_mask(SEED, 1, shape, 0.5),
        jattn.dropout_mask(SEED, 1 << 32, shape, 0.5),
        jattn.dropout_mask(SEED + np.uint32(1), 0, shape, 0.5),
    ]
    assert len({np.asarray(mask).tobytes() for mask in [kept, *others]}) == 4


def test_J06_a_mask_is_a_corner_of_a_larger_one() -> None:
    """So neither lengths nor numbers of heads nor padding enter."""
    large = np.asarray(jattn.dropout_mask(SEED, 9, (3, 4, 100, 70), 0.2))
    small = np.asarray(jattn.dropout_mask(SEED, 9, (2, 3, 37, 21), 0.2))
    assert (small == large[:2, :3, :37, :21]).all()


def test_J06_blocks_agree_with_single_pairs() -> None:
    keys = dropout.keys(jnp.asarray(SEED), jnp.zeros(2, jnp.uint32), 2, 3)
    rows, columns = 32 + jnp.arange(37), 64 + jnp.arange(45)
    block = jax.jit(dropout.bits_of_block, static_argnums=(3, 4))(keys, 32, 64, 37, 45)
    single = dropout.bits_at(keys[:, :, None, None], rows[:, None], columns)
    assert (block == single).all()


@pytest.mark.parametrize("name", ["dropout-plain", "dropout-plain-broadcast"])
def test_J06_the_mask_is_that_of_the_independent_formula(name: str) -> None:
    """jattn.testing.oracle computes every pair by itself, with 64-bit products."""
    case = cases.named(name)
    operands = inputs.make(case)
    want = oracle.dropout_factors(case, operands) > 0
    shape = (1, 1, *want.shape[2:]) if case.broadcast_dropout else want.shape
    assert operands.dropout_seed is not None
    assert operands.dropout_offset is not None
    got = jattn.dropout_mask(
        operands.dropout_seed, operands.dropout_offset, shape, case.dropout_rate
    )
    assert (np.broadcast_to(got, want.shape) == want).all()


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_the_seed_of_a_key(make: Callable[[int], jax.Array]) -> None:
    """The documented rule, for both kinds of keys."""
    key = make(5)
    seed = jattn.seed_from_key(key)
    assert seed.dtype == jnp.uint32
    assert (seed == jax.random.bits(key, (2,), jnp.uint32)).all()


def test_integer_seeds_are_split_in_words() -> None:
    value = (0x9ABCDEF0 << 32) | 0x12345678
    want = jattn.dropout_mask(SEED, 0, (1, 2, 8, 8), 0.5)
    assert (jattn.dropout_mask(value, np.zeros(2, np.uint32), (1, 2, 8, 8), 0.5) == want).all()


def test_rates_are_rounded_to_15_bits() -> None:
    rates = jnp.asarray(
        [0.0, 1.5e-5, 1.6e-5, 0.5, 255 / 256, 1 - 1e-6, np.nextafter(np.float32(1), 0)]
    )
    thresholds = dropout.threshold(rates)
    assert thresholds.tolist() == [0, 0, 1, 16384, 32640, 32640, 32640]
    # What is kept makes up for what is dropped.
    factors = np.asarray(dropout.kept_factor(rates, jnp.dtype("float32")))
    assert factors.tolist()[3:] == [2.0, 256.0, 256.0, 256.0]
    np.testing.assert_allclose(factors * (1 - np.asarray(thresholds) / 32768), 1, rtol=1e-6)
    assert bool(jattn.dropout_mask(SEED, 0, (2, 2, 64, 64), 0.0).all())


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_a_mask_needs_a_probability(p: float) -> None:
    with pytest.raises(ValueError, match=r"p is .*below 1"):
        jattn.dropout_mask(SEED, 0, (1, 1, 2, 2), p)


@pytest.mark.parametrize(
    ("p", "words"),
    [
        (np.array([0.1, 0.2]), r"p has shape \(2,\), must be a scalar: use jax\.vmap"),
        ("half", "p is 'half', must be a number"),
        (None, "p is None, must be a number"),
        (jnp.complex64(0.5), "p is .*complex64.*, must be a real number"),
    ],
)
def test_a_mask_needs_one_number(p: object, words: str) -> None:
    with pytest.raises(ValueError, match=rf"jattn\.dropout_mask: {words}"):
        jattn.dropout_mask(SEED, 0, (1, 1, 2, 2), p)  # type: ignore[arg-type]


def test_several_rates_are_mapped() -> None:
    shape, rates = (1, 2, 8, 8), jnp.array([0.1, 0.6])
    with pytest.raises(ValueError, match=r"p has shape \(2,\)"):
        jax.jit(lambda p: jattn.dropout_mask(SEED, 0, shape, p))(rates)
    masks = jax.vmap(lambda p: jattn.dropout_mask(SEED, 0, shape, p))(rates)
    for mask, rate in zip(masks, (0.1, 0.6), strict=True):
        assert (mask == jattn.dropout_mask(SEED, 0, shape, rate)).all()


@pytest.mark.parametrize(
    "seed",
    [
        -1,
        1 << 64,
        np.zeros(3, np.uint32),
        np.zeros(2, np.int32),
        np.array([2**32 + 7, 0], np.uint64),
        [np.uint64(2**32 + 7), np.uint64(0)],
        [2**40, 0],
    ],
    ids=str,
)
def test_a_mask_needs_a_seed(seed: object) -> None:
    with pytest.raises(ValueError, match="seed"):
        jattn.dropout_mask(seed, 0, (1, 1, 2, 2), 0.5)  # type: ignore[arg-type]


def weights(
    backend: str, broadcast: bool = False, rate: float = 0.3
) -> tuple[jax.Array, jax.Array]:
    """The weights (B, N, T, S) that a backend gave the values: the values are unit vectors."""
    batch, length, heads = 2, 70, 3
    q, k = jax.random.normal(jax.random.key(1), (2, batch, length, heads, 16))
    v = jnp.broadcast_to(jnp.eye(length)[None, :, None, :], (batch, length, heads, length))
    out, lse = jattn.dot_product_attention(
        q,
        k,
        v,
        dropout_rate=rate,
        dropout_seed=SEED,
        dropout_offset=4,
        broadcast_dropout=broadcast,
        return_lse=True,
        implementation=backend,
    )
    return out.transpose(0, 2, 1, 3), lse


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_backend_drops_exactly_the_pairs_of_the_mask(backend: str, broadcast: bool) -> None:
    got, lse = weights(backend, broadcast)
    shape = (1, 1, *got.shape[2:]) if broadcast else got.shape
    mask = jattn.dropout_mask(SEED, 4, shape, 0.3)  # type: ignore[arg-type]
    assert ((got > 0) == mask).all()
    # What is kept is exp(s - lse) / (1 - r), and lse is that of all weights.
    plain = weights("reference", broadcast)
    np.testing.assert_allclose(got, plain[0], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(lse, plain[1], rtol=2e-5, atol=1e-6)
    assert abs(float(got.sum(-1).mean()) - 1) < 0.05


@pytest.mark.parametrize("rate", [1 / 400, 0.996, 0.9999])
def test_a_backend_drops_the_same_pairs_at_extreme_rates(backend: str, rate: float) -> None:
    """Rates where the lower bits decide much, and beyond the largest that counts."""
    got, _ = weights(backend, rate=rate)
    mask = np.asarray(jattn.dropout_mask(SEED, 4, got.shape, rate))  # type: ignore[arg-type]
    assert ((got > 0) == mask).all()
    assert (mask == jattn.dropout_mask(SEED, 4, got.shape, min(rate, 255 / 256))).all()  # type: ignore[arg-type]
    np.testing.assert_allclose(got, weights("reference", rate=rate)[0], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("rate", [np.inf, 1e30, -np.inf, np.nan])
def test_a_rate_known_at_run_time_may_be_anything(backend: str, rate: float) -> None:
    got = jax.jit(lambda rate: weights(backend, rate=rate)[0])(rate)
    mask = np.asarray(jattn.dropout_mask(SEED, 4, got.shape, 255 / 256 if rate > 0 else 0.0))  # type: ignore[arg-type]
    assert ((got > 0) == mask).all()


def test_the_same_seed_gives_the_same_bits(backend: str) -> None:
    """Forward and backward; another seed, another offset and another key give others."""
    q, k, v, dout = jax.random.normal(jax.random.key(2), (4, 2, 40, 2, 8))

    @jax.jit
    def run(seed: jax.Array, offset: jax.Array) -> tuple[jax.Array, ...]:
        def attend(*x: jax.Array) -> jax.Array:
            return jattn.dot_product_attention(
                *x,
                dropout_rate=0.4,
                dropout_seed=seed,
                dropout_offset=offset,
                implementation=backend,
            )

        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(dout)

    zero, one = jnp.zeros(2, jnp.uint32), jnp.ones(2, jnp.uint32)
    first, again = run(one, zero), run(one, zero)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    for other in (run(zero, zero), run(one, one)):
        assert all((a != b).any() for a, b in zip(first, other, strict=True))
    assert run._cache_size() == 1


def test_the_mean_over_masks_is_attention_without_dropout() -> None:
    q, k, v = jax.random.normal(jax.random.key(3), (3, 1, 24, 2, 8))

    def attend(seed: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(
            q, k, v, dropout_rate=0.2, dropout_seed=seed, implementation="reference"
        )

    seeds = jax.random.bits(jax.random.key(4), (200, 2), jnp.uint32)
    many = jax.vmap(attend)(seeds)
    mean, error = many.mean(0), many.std(0) / np.sqrt(len(seeds))
    plain = jattn.dot_product_attention(q, k, v, implementation="reference")
    assert (jnp.abs(mean - plain) < 5.5 * error).all()
