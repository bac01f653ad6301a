"""Blocks of the Hopper backward kernel that take item after item: results as with a block for each item."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_forward_forms import BASE, DOCUMENTS, NARROW

import jattn
from jattn.backends import flash_backward_tiles
from jattn.testing.cases import Case
from jattn.testing.run import verify

pytestmark = pytest.mark.backends("flash")

# Of the key of the backward kernel; forward kernels may take turns, too.
TAKEN = r"family=sm90_backward [^;\"]*schedule=2"
CASES = [
    BASE.but("full"),
    BASE.but("causal", is_causal=True, dtype="float16"),
    BASE.but("window", window=(90, 30), kv_len=611),
    BASE.but(
        "lengths",
        q_lengths=(333, 0),
        kv_lengths=(700, 77),
        lower_right=True,
        is_causal=True,
    ),
    BASE.but("no-keys", q_lengths=(700, 65), kv_lengths=(0, 700)),
    BASE.but("segments", segments="random", num_segments=7, is_causal=True),
    BASE.but("mask", mask_form="b1ts"),
    BASE.but("bias", bias_form="bn1s"),
    BASE.but("bias-of-heads", bias_form="11ts", is_causal=True, q_len=704, kv_len=704),
    BASE.but("softcap", softcap=5.0, is_causal=True),
    BASE.but("softcap-far", softcap=30.0, is_causal=True),
    BASE.but("dropout", dropout_rate=0.2, is_causal=True),
    BASE.but("alibi", alibi_form="n", is_causal=True),
    BASE.but("few", q_len=1, kv_len=4096),
    NARROW.but("full"),
    NARROW.but("causal", is_causal=True),
    NARROW.but("softcap", softcap=5.0),
    NARROW.but("softcap-far", softcap=30.0),
    NARROW.but("bias-of-heads", bias_form="11ts"),
    NARROW.but("alibi", alibi_form="n", is_causal=True),
    NARROW.but("lengths", q_lengths=(333, 700), kv_lengths=(700, 77), is_causal=True),
    NARROW.but("segments", segments="random", num_segments=7),
    BASE.but("uneven", head_dim=120, head_dim_v=104, is_causal=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_resident_blocks(case: Case) -> None:
    with flash_backward_tiles.resident_blocks(True):
        verify(case, "flash", kernel=TAKEN)


LISTED = [
    case
    for case in DOCUMENTS
    if case.softcap is None and max(case.head_dim, case.head_dim_v) <= 128
]


@pytest.mark.parametrize("case", LISTED, ids=str)
def test_lists_of_documents(case: Case) -> None:
    """Tiles of keys that begin with documents, and the grid where a list is refused; padding is poisoned."""
    verify(case, "flash", kernel=r"family=sm90_backward [^;\"]*documents=1")


# Where two warps beside the producer find the pairs that dropout removes, and a third adds dq up.
DROPS_ALONE = [
    BASE.but("beside", dropout_rate=0.2),
    BASE.but("beside-causal", dropout_rate=0.5, is_causal=True, dtype="float16"),
    BASE.but("beside-window", dropout_rate=0.2, window=(90, 30), kv_len=611),
    BASE.but("beside-grouped", dropout_rate=0.2, q_len=1024, num_heads=8, num_kv_heads=2),
    BASE.but(
        "beside-lengths",
        dropout_rate=0.2,
        q_lengths=(333, 0),
        kv_lengths=(700, 77),
        lower_right=True,
        is_causal=True,
    ),
    BASE.but("beside-no-keys", dropout_rate=0.2, q_lengths=(700, 65), kv_lengths=(0, 700)),
    BASE.but("beside-few", dropout_rate=0.2, q_len=3, kv_len=1500),
    BASE.but("beside-many", dropout_rate=0.1, batch=9, num_heads=8, num_kv_heads=4),
    BASE.but("beside-sinks", dropout_rate=0.2, sinks_form="n", is_causal=True),
    BASE.but("beside-uneven", dropout_rate=0.2, head_dim=120, head_dim_v=104, is_causal=True),
    BASE.but("beside-most", dropout_rate=0.999, is_causal=True),  # counts as 255/256
]
# The same beside one more term, where consumers add dq up.
DROPS_BESIDE = [
    BASE.but(
        "beside-segments", dropout_rate=0.2, segments="random", num_segments=5, is_causal=True
    ),
    BASE.but("beside-interleaved", dropout_rate=0.2, segments="interleaved", dtype="float16"),
    BASE.but("beside-positions", dropout_rate=0.2, positions="shuffled", is_causal=True),
    BASE.but("beside-mask", dropout_rate=0.2, mask_form="b1ts", kv_lengths=(700, 77)),
    BASE.but("beside-mask-many", dropout_rate=0.2, mask_form="bnts", batch=9, num_heads=8),
    BASE.but("beside-slopes", dropout_rate=0.2, alibi_form="n", window=(90, 30), kv_len=611),
]


@pytest.mark.parametrize("case", DROPS_BESIDE, ids=str)
def test_drop_warps(case: Case) -> None:
    verify(case, "flash", kernel=r"family=sm90_backward [^;\"]*take_turns=1 drops_beside=1")


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("case", DROPS_ALONE, ids=str)
def test_drop_warps_alone(case: Case, order: int) -> None:
    """With the warp that adds dq up, and as where there are more queries."""
    form = r"dq_order=1 [^;\"]*drops_beside=1" if order else "take_turns=1 drops_beside=1"
    with flash_backward_tiles.dq_order(order):
        verify(case, "flash", kernel=rf"family=sm90_backward [^;\"]*{form}")


# A bias of the keys, whose gradient is made of sums of keys: over queries, heads of a group, heads and batch entries.
APART = BASE.but("apart", num_kv_heads=4)
NARROW_APART = NARROW.but("apart", num_kv_heads=4)
SUMMED = [
    APART.but("sums", bias_form="1n1s"),
    APART.but("sums-entries", bias_form="bn1s", is_causal=True),
    BASE.but("sums-heads", bias_form="b11s", bias_dtype="float32", dtype="float16"),
    BASE.but("sums-one", bias_form="111s", kv_len=611),
    BASE.but("sums-group", bias_form="b11s", num_heads=6, num_kv_heads=2, is_causal=True),
    BASE.but("sums-group-one", bias_form="111s", num_heads=6, num_kv_heads=2),
    APART.but(
        "sums-lengths",
        bias_form="1n1s",
        q_lengths=(333, 0),
        kv_lengths=(700, 77),
        lower_right=True,
        is_causal=True,
    ),
    BASE.but("sums-no-keys", bias_form="b11s", q_lengths=(700, 65), kv_lengths=(0, 700)),
    APART.but("sums-window", bias_form="1n1s", window=(90, 30), kv_len=611),
    APART.but("sums-mask", bias_form="1n1s", mask_form="b1ts"),
    APART.but("sums-alibi", bias_form="1n1s", alibi_form="n", is_causal=True),
    BASE.but("sums-dropout", bias_form="b11s", dropout_rate=0.2),
    APART.but("sums-uneven", bias_form="1n1s", head_dim=120, head_dim_v=72, is_causal=True),
    NARROW_APART.but("sums", bias_form="1n1s"),
    NARROW.but("sums-causal", bias_form="b11s", is_causal=True),
    NARROW_APART.but("sums-dropout", bias_form="1n1s", dropout_rate=0.2, dtype="float16"),
    NARROW_APART.but("sums-mask", bias_form="bn1s", mask_form="b1ts"),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", SUMMED, ids=str)
def test_sums_of_keys(case: Case, deterministic: bool) -> None:
    with jattn.deterministic("strict" if deterministic else "off"):
        verify(case, "flash", kernel="sums_bias=1")


# A bias of heads, with stored gradients of scores: batch entries that share it have places of their own or, where these
# would be too large, take turns (MANY and LARGE do). kv_len: rows of a staged bias begin on 16-byte boundaries.
HEADS = BASE.but("stored", bias_form="1nts", num_kv_heads=4, kv_len=704)
NARROW_HEADS = NARROW.but("stored", bias_form="1nts", num_kv_heads=4, kv_len=704)
MANY = {"batch": 9, "num_heads": 8, "num_kv_heads": 4}  # more items than multiprocessors
LARGE = {
    "batch": 3,
    "num_heads": 16,
    "num_kv_heads": 4,
    "q_len": 1100,
    "kv_len": 1024,
}  # no place for two entries
STORED = [
    HEADS.but("one", batch=1),
    HEADS.but("entries", batch=4),
    HEADS.but("turns", **LARGE),
    HEADS.but("turns-causal", **LARGE, is_causal=True, dtype="float16"),
    HEADS.but("turns-lengths", **LARGE, q_lengths=(333, 0, 1100), kv_lengths=(1024, 77, 500)),
    HEADS.but("parts", batch=5, num_heads=8, num_kv_heads=2),
    HEADS.but("parts-causal", **MANY, is_causal=True),
    HEADS.but("own", bias_form="bnts", is_causal=True),
    HEADS.but("lengths", batch=5, q_lengths=(333, 0, 700, 65, 9), kv_lengths=(700, 77, 0, 704, 64)),
    HEADS.but("mask", batch=3, mask_form="b1ts"),
    HEADS.but("dropout", batch=4, dropout_rate=0.2),
    NARROW_HEADS.but("one", batch=1),
    NARROW_HEADS.but("entries", batch=4),
    NARROW_HEADS.but("turns", **LARGE),
    NARROW_HEADS.but("parts-causal", **MANY, is_causal=True, dtype="float16"),
    NARROW_HEADS.but("mask", **MANY, mask_form="b1ts"),
    NARROW_HEADS.but(
        "lengths", batch=2, q_lengths=(333, 700), kv_lengths=(704, 77), is_causal=True
    ),
    NARROW_HEADS.but("segments", **MANY, q_len=704, segments="random", num_segments=7),
]


@pytest.mark.parametrize("case", STORED, ids=str)
def test_stored_gradients_of_scores(case: Case) -> None:
    verify(case, "flash", kernel="stores_ds=1")


# One place for tiles of a bias, and blocks that take several items: the next item's tiles may not fill it twice.
ONE_PLACE = [
    HEADS.but("one-place", **MANY, bias_form="11ts", mask_form="b1ts"),
    HEADS.but("one-place-causal", **MANY, bias_form="11ts", mask_form="b1ts", is_causal=True),
    NARROW_HEADS.but("one-place", **MANY, bias_form="11ts", q_len=704, segments="random"),
    NARROW_HEADS.but("one-place-stored", **MANY, mask_form="b1ts", dtype="float16"),
]


@pytest.mark.parametrize("case", ONE_PLACE, ids=str)
def test_one_place_for_a_bias(case: Case) -> None:
    verify(case, "flash", kernel=TAKEN)


# Where warps of their own send dq off (Config::dq_order): what bulk reductions stage; in order, unfiltered tiles alone.
IN_ORDER = [case for case in CASES if case.segments is None and case.mask_form is None]


@pytest.mark.parametrize(
    ("case", "order"),
    [(case, 1) for case in (*CASES, *LISTED)] + [(case, 2) for case in IN_ORDER],
    ids=str,
)
def test_warps_that_add_dq_up(case: Case, order: int) -> None:
    with flash_backward_tiles.dq_order(order):
        verify(case, "flash", kernel=rf"family=sm90_backward [^;\"]*dq_order={order}")


def keywords_of(
    term: str, batch: int, length: int, heads: int, rng: np.random.Generator
) -> dict[str, Any]:
    """What acts on scores, as arguments of attention."""
    if term == "bias":
        bias = jnp.asarray(rng.normal(size=(1, heads, length, length)), jnp.bfloat16)
        return {"bias": bias}
    if term == "alibi":
        return {"alibi_slopes": jnp.asarray(2.0 ** -np.arange(1, heads + 1), jnp.float32)}
    if term == "softcap":
        return {"logits_soft_cap": 20.0}
    if term == "segments":
        ids = jnp.asarray(np.sort(rng.integers(0, 5, (batch, length))), jnp.int32)
        return {"query_segment_ids": ids, "key_value_segment_ids": ids}
    return {}


@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "head_dim", "causal", "term"),
    [
        (16, 1024, 16, 16, 128, True, ""),
        (2, 4096, 32, 8, 128, True, ""),
        (8, 1024, 32, 4, 64, True, ""),
        (4, 5000, 24, 3, 128, True, ""),
        (1, 200, 3, 3, 64, False, ""),
        (16, 1024, 16, 16, 128, False, ""),
        (4, 1024, 16, 8, 128, False, "bias"),
        (4, 1024, 16, 16, 64, True, "bias"),
        (8, 1024, 16, 8, 128, True, "alibi"),
        (8, 1024, 16, 16, 64, False, "alibi"),
        (8, 1024, 16, 8, 128, True, "softcap"),
        (8, 1024, 16, 16, 64, False, "softcap"),
        (8, 1024, 16, 8, 128, True, "segments"),
    ],
)
def test_many_items(
    batch: int, length: int, heads: int, kv_heads: int, head_dim: int, causal: bool, term: str
) -> None:
    """Gradients are those of a block for each item but for the order of sums; dk and dv have the same bits always."""
    rng = np.random.default_rng(heads)

    def array(n: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(batch, length, n, head_dim)), jnp.bfloat16)

    q, k, v, dout = array(heads), array(kv_heads), array(kv_heads), array(heads)
    keywords = keywords_of(term, batch, length, heads, rng)

    def gradients(there: bool) -> Callable[[], tuple[jax.Array, ...]]:
        def step(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> object:
            attend = functools.partial(
                jattn.dot_product_attention,
                is_causal=causal,
                implementation="flash",
                **keywords,
            )
            return jax.vjp(attend, q, k, v)[1](dout)

        with flash_backward_tiles.resident_blocks(there):
            lowered = jax.jit(step).lower(q, k, v, dout)
        assert bool(re.search(TAKEN, lowered.as_text())) == there
        compiled = lowered.compile()
        return lambda: compiled(q, k, v, dout)

    @jax.jit
    def far(got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
        """How many elements differ, and how many by more than a step of 8 bits."""
        x, y = got.astype(jnp.float32), want.astype(jnp.float32)
        return jnp.mean(x != y), jnp.sum(jnp.abs(x - y) > 1e-5 + 2**-7 * jnp.abs(y))

    apart, resident = gradients(False)(), gradients(True)
    first = resident()
    for _ in range(20):
        found = resident()
        for got, want in zip(found, apart, strict=True):
            share, count = far(got, want)
            # Rounded to 8 bits after sums of float32 in another order: at most a step apart, and seldom.
            assert share < 0.01
            assert count == 0
        for got, want in zip(found[1:], first[1:], strict=True):
            assert jnp.array_equal(got, want)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "head_dim", "window"),
    [
        (16, 1024, 16, 16, 128, None),
        (16, 1024, 16, 16, 128, (None, 0)),
        (2, 4096, 32, 8, 128, (None, 0)),
        (1, 16384, 8, 8, 128, (None, 0)),
        (2, 4096, 16, 16, 128, (511, 0)),
        (8, 1024, 32, 4, 64, None),
        (8, 1024, 32, 4, 64, (None, 0)),
        (1, 8192, 16, 2, 64, (None, 0)),  # long enough for heads of a group to walk together
        (1, 9000, 24, 3, 128, (None, 0)),
        (1, 40000, 2, 2, 64, None),  # more items of a head than there are multiprocessors
        (3, 1000, 5, 5, 96, (None, 0)),
    ],
)
def test_sums_in_order_have_the_same_bits(
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: tuple[int | None, int | None] | None,
) -> None:
    """Run after run, in one fused kernel, and near the sums in any order."""
    rng = np.random.default_rng(length)

    def array(n: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(batch, length, n, head_dim)), jnp.bfloat16)

    q, k, v, dout = array(heads), array(kv_heads), array(kv_heads), array(heads)

    def gradients(order: int) -> Callable[[], tuple[np.ndarray, ...]]:
        def step(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> object:
            attend = functools.partial(
                jattn.dot_product_attention, local_window_size=window, implementation="flash"
            )
            return jax.vjp(attend, q, k, v)[1](dout)

        with jattn.deterministic("strict" if order == 2 else "off"):
            lowered = jax.jit(step).lower(q, k, v, dout)
        assert re.search(rf"family=sm90_backward [^;\"]*dq_order={order}", lowered.as_text())
        compiled = lowered.compile()
        return lambda: jax.device_get(compiled(q, k, v, dout))

    want, ordered = gradients(1)(), gradients(2)
    first = ordered()
    got, near = np.asarray(first[0], np.float32), np.asarray(want[0], np.float32)
    np.testing.assert_allclose(got, near, rtol=2**-7, atol=1e-5)
    for _ in range(30):
        for again, before in zip(ordered(), first, strict=True):
            np.testing.assert_array_equal(again, before)
