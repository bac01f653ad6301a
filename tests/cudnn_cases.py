"""Problems of the backend "cudnn" beside those of the case table: what its calls do not know is seen to around them."""

from jattn.testing.cases import Case


def problems(length: int) -> list[Case]:
    """Problems of about `length` queries and keys, at least 10."""
    base = Case(
        "cudnn",
        q_len=length,
        kv_len=length,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        head_dim_v=128,
        dtype="bfloat16",
    )
    longer, part, few = length * 5 // 3, length * 3 // 7, length // 4
    found = [
        base.but("full"),
        base.but("causal", is_causal=True, dtype="float16"),
        base.but("causal-more-queries", is_causal=True, q_len=longer),
        base.but("causal-more-keys", is_causal=True, kv_len=longer),
        base.but("window", is_causal=True, window=(few, None)),
        base.but("own-key", is_causal=True, window=(0, None)),
        base.but("window-more-keys", is_causal=True, window=(few // 2, None), kv_len=longer),
        base.but("window-of-all", is_causal=True, window=(length - 1, None), kv_len=part),
        base.but("lengths", q_lengths=(length, few), kv_lengths=(part, length)),
        base.but("no-keys", q_lengths=(length, few // 3), kv_lengths=(0, length)),
        base.but("no-queries", q_lengths=(0, length), kv_lengths=(length, 0), is_causal=True),
        base.but(
            "lengths-window",
            q_lengths=(length, length - 10),
            kv_lengths=(few, part),
            is_causal=True,
            window=(length // 10, None),
        ),
        base.but("negative-scale", scale=-0.05, is_causal=True),
        base.but("no-scale", scale=0.0),
        base.but("one-head", num_heads=5, num_kv_heads=1),
        base.but("one-query", q_len=1, kv_len=longer + 13),
        base.but("one-key", kv_len=1),
        base.but("out-alone", with_dlse=False),
    ]
    head_dims = (1, 1), (8, 8), (21, 40), (64, 128), (72, 64), (192, 128), (203, 203), (256, 256)
    return found + [
        base.but(f"head-dims-{d}-{dv}", head_dim=d, head_dim_v=dv, is_causal=True)
        for d, dv in head_dims
    ]
