"""Problems with ALiBi slopes, whose gradient both tiers check."""

from jattn.testing.cases import Case

BASE = Case(
    name="slopes",
    batch=2,
    q_len=200,
    kv_len=264,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    head_dim_v=64,
    alibi_form="n",
)
EVERYTHING = BASE.but(
    "everything",
    window=(150, None),
    is_causal=True,
    bias_form="1nts",
    mask_form="b1ts",
    mask_density=0.8,
    segments="interleaved",
    kv_lengths=(264, 100),
    q_lengths=(200, 133),
    softcap=20.0,
    sinks_form="n",
    alibi_form="bn",
    positions="shifted",
    dropout_rate=0.2,
)
