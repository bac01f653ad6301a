"""Few queries as another problem of the same kernels: heads of a group as one head, parts of the keys as batch entries.

The programs are those that go around the kernels of ``mem_efficient``; here they go around the CPU kernel.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

import jattn
from jattn.backends import cuda_tiles, few_queries
from jattn.backends.cpu import CpuBackend
from jattn.masks import Band
from jattn.spec import Dropout, Operands, Spec
from jattn.testing import inputs
from jattn.testing.cases import Case
from jattn.testing.run import run, verify

pytestmark = pytest.mark.thinned  # most of their time goes into compiling

FEW = Case(
    name="rewritten",
    batch=3,
    q_len=5,
    kv_len=384,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    head_dim_v=32,
)
ONE = FEW.but("one", q_len=1)
CASES = (
    FEW,
    ONE,
    FEW.but("bf16", dtype="bfloat16"),
    FEW.but("f16", dtype="float16", head_dim_v=48),
    FEW.but("f64", dtype="float64", is_causal=True, lower_right=True),
    FEW.but("mqa", num_kv_heads=1),
    FEW.but("one-entry", batch=1, bias_form="bnts", mask_form="b1ts"),
    FEW.but("causal", is_causal=True, lower_right=True),
    FEW.but("upper-left", is_causal=True),
    FEW.but("window", window=(70, 3), lower_right=True),
    ONE.but("causal", is_causal=True, lower_right=True),
    ONE.but("window", window=(200, None), lower_right=True),
    # No keys, keys in the first part alone, no queries.
    FEW.but(
        "lengths",
        q_lengths=(5, 3, 0),
        kv_lengths=(0, 60, 384),
        is_causal=True,
        lower_right=True,
    ),
    FEW.but(
        "lengths-out-of-range",
        q_lengths=(2**31 - 1, 2**30, -(2**31)),
        kv_lengths=(100 - 2**31, 2**31 - 1, -(2**31)),
    ),
    FEW.but("lengths-window", q_lengths=(5, 2, 4), kv_lengths=(384, 250, 130), window=(60, 0)),
    FEW.but("segments", segments="random"),
    FEW.but("interleaved", segments="interleaved", is_causal=True),
    FEW.but("positions", positions="shuffled", window=(50, 20)),
    FEW.but("softcap", softcap=3.0),
    FEW.but("negative-scale", scale=-0.3),
    FEW.but("sinks", sinks_form="n", is_causal=True, lower_right=True),
    FEW.but("sinks-of-entries", sinks_form="bn", kv_lengths=(384, 0, 100)),
    *(
        FEW.but(f"bias-{form}", bias_form=form)
        for form in ("bnts", "b1ts", "1nts", "b11s", "1n1s", "1nt1", "b1t1", "1111", "bn11")
    ),
    *(
        FEW.but(f"mask-{form}", mask_form=form, mask_density=0.5)
        for form in ("bnts", "11ts", "b11s", "1nt1", "b1t1", "bn1s")
    ),
    ONE.but("bias", bias_form="bnts", bias_dtype="float32", dtype="bfloat16"),
    FEW.but("outlier", distribution="outlier_token"),
    FEW.but("lse-plus-200", distribution="lse_plus_200"),
    FEW.but("late", distribution="late"),
    FEW.but(
        "everything",
        is_causal=True,
        lower_right=True,
        window=(300, None),
        q_lengths=(5, 4, 3),
        kv_lengths=(384, 200, 20),
        bias_form="bnts",
        mask_form="b1ts",
        segments="random",
        softcap=10.0,
        sinks_form="bn",
        dtype="bfloat16",
    ),
)
SLOPES = (
    FEW.but("alibi", alibi_form="n", is_causal=True, lower_right=True),
    FEW.but("alibi-of-entries", alibi_form="bn", kv_lengths=(384, 100, 0)),
    FEW.but("alibi-positions", alibi_form="n", positions="far"),
)


class Rewriting:
    """The CPU kernel behind the programs; counts the problems that it was given instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, packs: bool, parts: int) -> None:
        original = CpuBackend.forward
        self.given: list[Spec] = []

        def forward(
            backend: CpuBackend, spec: Spec, operands: Operands[jax.Array], device: jattn.Device
        ) -> tuple[jax.Array, jax.Array]:
            def kernel(spec: Spec, operands: Operands[jax.Array]) -> tuple[jax.Array, jax.Array]:
                self.given.append(spec)
                assert spec == spec.for_operands(operands)
                return original(backend, spec, operands, device)

            return few_queries.rewritten(spec, operands, kernel, packs=packs, parts=parts)

        monkeypatch.setattr(CpuBackend, "forward", forward)


@pytest.mark.parametrize(
    ("packs", "parts"), [(True, 1), (False, 3), (True, 6)], ids=("packed", "split", "both")
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_results(
    case: Case, packs: bool, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewriting = Rewriting(monkeypatch, packs=packs, parts=parts)
    verify(case, "cpu", backward=False)
    (given,) = set(rewriting.given)
    heads, queries = case.num_heads, case.q_len
    if packs:
        heads, queries = case.num_kv_heads, queries * case.num_heads // case.num_kv_heads
    assert (given.batch, given.q_len, given.num_heads) == (case.batch * parts, queries, heads)
    assert given.kv_len == case.kv_len // parts
    assert given.sinks is None


@pytest.mark.parametrize("case", SLOPES, ids=str)
def test_slopes_split(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    rewriting = Rewriting(monkeypatch, packs=False, parts=3)
    verify(case, "cpu", backward=False)
    assert rewriting.given[0].positions


def test_gradients_take_the_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    rewriting = Rewriting(monkeypatch, packs=True, parts=2)
    verify(
        FEW.but("gradients", sinks_form="n", bias_form="1n1s", is_causal=True, lower_right=True),
        "cpu",
    )
    assert rewriting.given


def test_parts_add_up_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    Rewriting(monkeypatch, packs=True, parts=6)
    operands = inputs.make(FEW)
    first, again = (run(FEW, operands, "cpu", backward=False) for _ in range(2))
    for name, result in first.results.items():
        np.testing.assert_array_equal(result, again.results[name], err_msg=name)


DECODE = Spec(1, 1, 8192, 32, 8, 128, 128, "bfloat16", 0.1, kv_lengths=True)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("changes", "packs", "splits"),
    [
        ({}, True, True),
        ({"q_len": 8, "band": Band(right=0, lower_right=True)}, True, True),
        ({"num_kv_heads": 32}, False, True),
        ({"batch": 64}, True, False),
        ({"batch": 64, "num_kv_heads": 32}, False, False),
        ({"alibi_slopes": (1, 32)}, False, True),
        ({"mask": (1, 32, 1, 8192)}, True, True),
        # A window that one part would hold; keys that are no whole tiles; few keys.
        ({"band": Band(left=500, right=0, lower_right=True)}, True, False),
        ({"band": Band(right=0)}, True, False),  # the first keys alone
        ({"band": Band(left=500, right=0), "positions": True}, True, False),
        ({"band": Band(right=0), "positions": True}, True, True),
        ({"kv_len": 8191}, True, False),
        ({"kv_len": 512}, False, False),
        ({"q_len": 4096}, False, False),
        ({"q_len": 256, "num_heads": 8}, False, False),
        ({"dropout": Dropout((1, 32))}, False, False),
    ],
    ids=str,
)
def test_where_it_is_faster(changes: dict[str, Any], packs: bool, splits: bool) -> None:
    spec = dataclasses.replace(DECODE, **changes)
    tile_of = functools.partial(cuda_tiles.tile_of_queries, spec, (9, 0))
    found, parts = few_queries.choose(spec, tile_of)
    assert found == packs
    assert (parts > 1) == splits


@pytest.mark.whole
@pytest.mark.parametrize(
    ("queries", "dtype", "head_dim", "tile"),
    [
        (1, "bfloat16", 128, (16, 32)),
        (16, "float16", 64, (16, 64)),
        (17, "bfloat16", 128, (32, 32)),
        (64, "bfloat16", 128, (64, 64)),
        (33, "bfloat16", 256, (64, 32)),
        (8, "float32", 64, (16, 32)),
        (65, "bfloat16", 128, (128, 64)),
    ],
)
def test_tiles_have_the_rows_that_few_queries_need(
    queries: int, dtype: str, head_dim: int, tile: tuple[int, int]
) -> None:
    spec = dataclasses.replace(
        DECODE, q_len=queries, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim
    )
    found = cuda_tiles.forward_tile(spec, (9, 0))
    assert (found.tile_q, found.tile_kv) == tile
    assert found.tile_q == 16 * found.num_warps or queries > cuda_tiles.MOST_FEW_ROWS


@pytest.mark.whole
def test_parts_are_whole_tiles() -> None:
    assert few_queries.part_counts(1024) == (1, 2, 4, 8)
    assert few_queries.part_counts(384) == (1, 3)
    assert few_queries.part_counts(1000) == (1,)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("queries", "families"),
    [(1, {"sm80_forward"}), (4, {"sm80_forward", "position_ranges"})],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gpus_but_hopper_run_it(dtype: str, queries: int, families: set[str]) -> None:
    """As far as shapes tell. What the band hides from a single query needs no band."""
    query = jax.ShapeDtypeStruct((1, queries, 32, 64), dtype)
    key = jax.ShapeDtypeStruct((1, 8192, 8, 64), dtype)
    for arch in ((8, 0), (8, 9), (12, 0)):
        found = jattn.explain(
            query,
            key,
            key,
            is_causal=True,
            causal_alignment="lower_right",
            device=jattn.Device("cuda", arch=arch),
        )
        assert found.chosen == "mem_efficient"
        forward = found.passes[0]
        assert {kernel.family for kernel in forward.kernels} == families
        has_band = "band" in forward.kernels[0].choices
        assert has_band == (queries > 1)


@pytest.mark.whole
@pytest.mark.parametrize("feature", ["sinks", "lengths"])
def test_lowers_where_jax_promotes_nothing(feature: str) -> None:
    """Neither types nor ranks: rows that are joined are of 16 bits beside numbers of 32."""
    q = jax.ShapeDtypeStruct((1, 1, 8, 64), "bfloat16")
    k = jax.ShapeDtypeStruct((1, 2048, 2, 64), "bfloat16")
    name, x = {
        "sinks": ("sinks", jax.ShapeDtypeStruct((8,), "float32")),
        "lengths": ("key_value_seq_lengths", jax.ShapeDtypeStruct((1,), "int32")),
    }[feature]

    def run(q: Any, k: Any, x: Any) -> Any:
        return jattn.dot_product_attention(q, k, k, **{name: x}, implementation="mem_efficient")

    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with jattn.target_device(jattn.Device("cuda", arch=(8, 0))), strict[0], strict[1]:
        exported = jax.export.export(
            jax.jit(run), platforms=["cuda"], disabled_checks=jattn.export_disabled_checks()
        )(q, k, x)
    assert "jattn_forward" in exported.mlir_module()
