"""Few queries on many keys, on every instruction set.

A handful, as in decoding, is computed by rows; a task that shares keys and values with hardly any other packs them for
itself.
"""

import numpy as np
import pytest

from jattn.testing import inputs
from jattn.testing.cases import Case
from jattn.testing.run import run, verify

BASE = Case(
    name="few",
    q_len=3,
    kv_len=200,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    head_dim_v=64,
)
ONE = BASE.but("one", q_len=1, num_heads=10, kv_len=130)
EVERYTHING = {
    "is_causal": True,
    "mask_form": "bnts",
    "bias_form": "bnts",
    "segments": "interleaved",
    "kv_lengths": (200, 100),
    "q_lengths": (5, 3),
    "softcap": 20.0,
    "sinks_form": "n",
    "alibi_form": "bn",
    "positions": "shifted",
    "dropout_rate": 0.2,
}
CASES = (
    BASE,
    *(BASE.but(f"{count}-rows", q_len=count, num_heads=2) for count in (1, 2, 4, 5, 7, 11, 12, 13)),
    *(ONE.but(f"group-of-{group}", num_heads=2 * group) for group in (1, 2, 3, 8, 12)),
    *(BASE.but(dtype, dtype=dtype) for dtype in ("float16", "bfloat16", "float64")),
    *(
        BASE.but(
            f"D{dims[0]}-Dv{dims[1]}-{dtype}", head_dim=dims[0], head_dim_v=dims[1], dtype=dtype
        )
        for dims in ((8, 8), (21, 40), (80, 128), (128, 72), (1, 256))
        for dtype in ("float32", "bfloat16", "float64")
    ),
    *(BASE.but(f"{kv_len}-keys", kv_len=kv_len) for kv_len in (1, 5, 63, 64, 65)),
    BASE.but("causal", is_causal=True, lower_right=True),
    BASE.but("causal-upper-left", is_causal=True),
    BASE.but("window", window=(70, 5), lower_right=True),
    BASE.but("lengths", q_lengths=(3, 1), kv_lengths=(0, 111), is_causal=True, lower_right=True),
    BASE.but("splits", kv_len=3000, batch=1, q_len=2),
    BASE.but("splits-lengths", kv_len=3000, kv_lengths=(3000, 700), sinks_form="bn"),
    # Narrow: how many splits there are does not depend on the head dims.
    BASE.but(
        "splits-heads",
        kv_len=2100,
        q_len=1,
        num_heads=32,
        num_kv_heads=16,
        batch=5,
        head_dim=16,
        head_dim_v=16,
    ),
    BASE.but("segments", segments="random"),
    BASE.but("interleaved", segments="interleaved", q_len=5),
    *(BASE.but(f"mask-{form}", mask_form=form) for form in ("bnts", "b11s", "ts")),
    *(
        BASE.but(f"bias-{form}-{dtype}", bias_form=form, bias_dtype=dtype)
        for form in ("bnts", "b11s", "1nt1")
        for dtype in ("float32", "bfloat16")
    ),
    BASE.but("bias-float64", dtype="float64", bias_form="bnts", bias_dtype="float32"),
    BASE.but("softcap", softcap=5.0),
    BASE.but("negative-scale", scale=-0.3),
    BASE.but("zero-scale", scale=0.0),
    BASE.but("sinks", sinks_form="n"),
    BASE.but("alibi", alibi_form="bn", is_causal=True, lower_right=True),
    BASE.but("positions", positions="shuffled", window=(50, 20)),
    BASE.but("alibi-positions", positions="far", alibi_form="n"),
    BASE.but("dropout", dropout_rate=0.3),
    BASE.but("dropout-one-head", dropout_rate=0.3, num_heads=2, q_len=7),
    BASE.but(
        "dropout-rows", dropout_rate=0.3, dropout_rows=True, segments="random", positions="restart"
    ),
    BASE.but("late", distribution="late"),
    BASE.but("rising", distribution="rising", kv_len=700),
    BASE.but("lse-plus-200", distribution="lse_plus_200"),
    BASE.but("equal", distribution="equal"),
    BASE.but("everything", q_len=5, **EVERYTHING),
    BASE.but("everything-bf16", q_len=5, head_dim=40, dtype="bfloat16", **EVERYTHING),
)
TWENTY = BASE.but("twenty", q_len=20)
PACKED_BY_TASKS = (
    *(TWENTY.but(dtype, dtype=dtype) for dtype in ("float32", "float16", "bfloat16", "float64")),
    *(TWENTY.but(f"{kv_len}-keys", kv_len=kv_len) for kv_len in (1, 11, 12, 13, 65, 77)),
    *(
        TWENTY.but(f"{form}-{dtype}", segments=form, dtype=dtype)
        for form in ("random", "interleaved")
        for dtype in ("float32", "bfloat16")
    ),
    TWENTY.but("lengths", q_lengths=(20, 7), kv_lengths=(111, 0), is_causal=True, lower_right=True),
    TWENTY.but("uneven", head_dim=21, head_dim_v=40, q_len=33),
    TWENTY.but("splits", kv_len=3000, batch=1),
    TWENTY.but("dropout", dropout_rate=0.3),
    TWENTY.but("everything", **EVERYTHING),
)


@pytest.mark.parametrize("case", [*CASES, *PACKED_BY_TASKS], ids=str)
def test_agrees_with_the_oracle(case: Case, instruction_set: str) -> None:
    verify(case, "cpu")


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("queries", [2, 20])
def test_values_that_are_not_finite_reach_those_who_see_them(
    queries: int, special: float, instruction_set: str
) -> None:
    """Of two heads of a group the mask hides the key from one, and of two batch entries the length from the other."""
    case = BASE.but(
        "not-finite", q_len=queries, num_heads=4, mask_form="bnts", kv_lengths=(200, 150)
    )
    operands = inputs.make(case)
    assert operands.mask is not None
    operands.mask[...] = True
    operands.mask[0, 1, :, 160] = False
    operands.v[:, 160, :, 3] = special
    out = run(case, operands, "cpu", backward=False, poisoned=False).results["out"]
    seen = np.zeros(out.shape, bool)
    seen[0, :, [0, 2, 3], 3] = True
    assert np.array_equal(np.isfinite(out), ~seen)
