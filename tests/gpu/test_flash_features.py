"""What acts on scores, in every form of the Hopper backward: fused, by two kernels (strict), wide heads; and dbias."""

import pytest

import jattn
from jattn.backends import flash_backward_tiles
from jattn.testing.cases import Case
from jattn.testing.run import verify

pytestmark = pytest.mark.backends("flash")

BASE = Case(
    name="flash",
    q_len=200,
    kv_len=264,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    head_dim_v=64,
    dtype="bfloat16",
)
WIDE = BASE.but("128", head_dim=128, head_dim_v=128)
WIDER = BASE.but("192", head_dim=192, head_dim_v=192)
WIDEST = BASE.but("256", head_dim=256, head_dim_v=256)
UNEQUAL = BASE.but("192-128", head_dim=192, head_dim_v=128)

# With a warpgroup for dq, by bulk reductions.
PLAIN = [BASE.but("136-160", head_dim=136, head_dim_v=160, kv_lengths=(264, 77), is_causal=True)]
PLAIN += [
    case
    for base in (WIDER, UNEQUAL, BASE.but("128-192", head_dim=128, head_dim_v=192))
    for case in (
        base.but("full", dtype="float16"),
        base.but("causal", q_len=1100, kv_len=700, is_causal=True, lower_right=True),
        base.but("segments-window", segments="random", window=(70, 30)),
        base.but("lengths", q_lengths=(150, 200), kv_lengths=(264, 77), scale=-0.1),
    )
]

# Tiles of a bias are copied where its rows start on 16-byte boundaries (264 keys), else it is read where it lies (261).
BIASES = [
    BASE.but("bias-1nts", bias_form="1nts"),
    BASE.but("bias-b1ts-causal", bias_form="b1ts", is_causal=True, dtype="float16"),
    BASE.but("bias-1nts-unaligned", bias_form="1nts", kv_len=261),
    BASE.but("bias-1nts-float32", bias_form="1nts", bias_dtype="float32"),
    BASE.but("bias-b11s", bias_form="b11s"),
    BASE.but("bias-1nt1", bias_form="1nt1"),
    BASE.but("bias-1n11", bias_form="1n11"),
    WIDE.but("bias-bnts", bias_form="bnts", dtype="float16"),
    WIDE.but("bias-11ts-window", bias_form="11ts", window=(100, 30), lower_right=True),
    WIDE.but("bias-softcap", bias_form="1nts", softcap=5.0, scale=-0.1),
    WIDER.but("bias-1nts-causal", bias_form="1nts", is_causal=True, q_lengths=(150, 70)),
    WIDER.but("bias-1nts-float32", bias_form="1nts", bias_dtype="float32", dtype="float16"),
    WIDEST.but("bias-1nts", bias_form="1nts"),
    WIDEST.but("bias-unaligned-causal", bias_form="bnts", kv_len=261, is_causal=True),
    UNEQUAL.but("bias-lengths", bias_form="b1ts", q_lengths=(150, 200), kv_lengths=(264, 77)),
]
MASKS = [
    BASE.but("mask-bnts", mask_form="bnts"),
    BASE.but("mask-sparse-causal", mask_form="b1ts", mask_density=0.01, is_causal=True),
    BASE.but("mask-1n1s", mask_form="1n1s"),
    BASE.but("mask-b1t1-unaligned", mask_form="b1t1", kv_len=261),
    WIDE.but("mask-11ts-bias", mask_form="11ts", bias_form="1nts", is_causal=True),
    WIDER.but("mask-bnts-causal", mask_form="bnts", is_causal=True),
    WIDEST.but("mask-bnts-segments", mask_form="bnts", mask_density=0.9, segments="random"),
]
TERMS = [
    BASE.but("alibi-causal", alibi_form="n", is_causal=True),
    WIDE.but("alibi-positions", alibi_form="bn", positions="shuffled"),
    BASE.but("positions-window", positions="shifted", window=(60, 20)),
    WIDE.but(
        "positions-restart", kv_len=200, positions="restart", segments="random", is_causal=True
    ),
    WIDER.but("softcap", softcap=5.0, is_causal=True),
    WIDER.but("alibi-positions", alibi_form="n", positions="shuffled", segments="random"),
    WIDEST.but("alibi-bias-lower-right", alibi_form="n", bias_form="1nts", lower_right=True),
]
DROPOUT = [
    BASE.but("dropout", dropout_rate=0.2),
    BASE.but("dropout-causal", dropout_rate=0.113377, is_causal=True, dtype="float16"),
    WIDE.but("dropout-bias", dropout_rate=0.5, bias_form="1nts"),
    WIDE.but("dropout-softcap-mask", dropout_rate=0.2, softcap=8.0, mask_form="b1ts"),
    # Rows that see no key, and stored ds with one place for a bias in shared memory (the mask takes the other).
    WIDE.but(
        "dropout-bias-mask-lengths",
        dropout_rate=0.5,
        bias_form="1nts",
        mask_form="11ts",
        q_lengths=(150, 70),
    ),
    WIDER.but("dropout-causal", dropout_rate=0.5, is_causal=True),
    WIDEST.but("dropout", dropout_rate=0.2),
]
DROPOUT += [
    base.but(
        f"dropout-rows-{name}",
        kv_len=200,
        dropout_rate=0.2,
        dropout_rows=True,
        segments="random",
        positions="restart",
        **changes,
    )
    for base in (BASE, WIDE, WIDER, UNEQUAL)
    for name, changes in (("full", {}), ("bias-causal", {"bias_form": "1nts", "is_causal": True}))
]
EVERYTHING = {
    "window": (150, None),
    "is_causal": True,
    "bias_form": "1nts",
    "mask_form": "b1ts",
    "mask_density": 0.8,
    "segments": "interleaved",
    "kv_lengths": (264, 100),
    "q_lengths": (200, 133),
    "softcap": 20.0,
    "sinks_form": "n",
    "alibi_form": "bn",
    "positions": "shifted",
    "dropout_rate": 0.2,
}
ALL = [case.but("everything", **EVERYTHING) for case in (BASE, WIDE, WIDER, WIDEST, UNEQUAL)]
CASES = PLAIN + BIASES + MASKS + TERMS + DROPOUT + ALL
# Head dims above 192 run by two kernels anyhow.
STRICT = [case for case in CASES if case.head_dim <= 192]


# k partly in registers, beside warps that add dq up; what leaves fewer registers keeps it in shared memory.
FAR = WIDE.but("far", q_len=150, kv_len=8200, is_causal=True, lower_right=True)
KEYS_IN_REGISTERS = [
    (WIDE.but("keys", q_len=311, dtype="float16"), 3),
    (WIDE.but("keys-96", q_len=150, head_dim=96, head_dim_v=104), 3),
    (WIDE.but("keys-causal", q_len=311, is_causal=True, scale=-0.1), 3),
    (WIDE.but("keys-lengths", q_lengths=(150, 200), kv_lengths=(264, 77), scale=-0.1), 3),
    (WIDE.but("keys-segments", segments="random", is_causal=True), 3),
    (FAR.but("causal"), 3),
    (FAR.but("causal-lengths", q_lengths=(150, 85), kv_lengths=(8200, 77), dtype="float16"), 3),
    (FAR.but("rows-without-keys", q_len=700, kv_lengths=(300, 8200)), 3),
    (WIDE.but("softcap", softcap=5.0, q_len=311, is_causal=True), 2),
    (WIDE.but("softcap-far", softcap=30.0, q_lengths=(150, 200)), 2),
    (WIDE.but("alibi", q_len=311, alibi_form="n", q_lengths=(311, 81)), 0),
    (FAR.but("causal-positions", positions="shifted", lower_right=False), 0),
]


@pytest.mark.parametrize(("case", "steps"), KEYS_IN_REGISTERS, ids=str)
def test_keys_in_registers(case: Case, steps: int) -> None:
    has_steps = f" key_register_steps={steps}" if steps else "(?! key_register)"
    verify(case, "flash", kernel=rf"family=sm90_backward [^;\"]*dq_order=1{has_steps}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case) -> None:
    verify(case, "flash")


@pytest.mark.parametrize("case", STRICT, ids=str)
def test_gradients_by_two_kernels(case: Case) -> None:
    with flash_backward_tiles.dq_order(0), jattn.deterministic("strict"):
        verify(case, "flash", kernel=r"family=sm90_backward_dq ")
