"""The table of named attention problems: every test tier and every benchmark parametrizes over it.

A `Case` holds only static facts. `jattn.testing.inputs` makes its arrays, always the same ones for the same name,
and `inputs.call_arguments` turns both into the arguments of `jattn.dot_product_attention`.
"""

import dataclasses
import functools
from collections.abc import Iterable

TOKENS_PER_BENCHMARK = 16_384

# "normal" and the others are explained where they are made, in inputs.py.
DISTRIBUTIONS = (
    "normal",
    "uniform",
    "normal_x3",
    "outlier_channel",
    "outlier_token",
    "student_t",
    "integers",
    "equal",
    "zero_q",
    "zero_k",
    "constant_v",
    "offset_v",
    "huge_v",
    "tiny_v",
    "rising",
    "falling",
    "late",
    "lse_plus_200",
    "lse_minus_200",
    "logits_low",
    "one_hot",
)
DOUT_DISTRIBUTIONS = ("normal", "ones", "zeros", "one_hot", "four")


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem, without its arrays.

    Forms: `bias_form` and `mask_form` spell the shape with one letter per axis, from the right as in numpy
    broadcasting: "bnts" is the full (B, N, T, S), "b11s" has size-1 axes, "ts" is rank 2, "s" rank 1.
    Lengths are explicit tuples, one entry per batch element; they may exceed the extent (they are clamped).
    Segments: "random" draws sorted ids with negative (padding) tails, "interleaved" draws unsorted ones.
    Positions: "shuffled" draws them; "shifted" counts on from an offset per batch entry, as while decoding; "restart"
    counts from 0 in each run of equal segment ids; "far" puts them near and beyond the ends of their range.
    `sinks_form` and `alibi_form` spell the shape over batch and heads: "n", "bn", "b1", "1".
    `dropout_rows`: the keys of dropout are those of packed sequences; needs segments and positions.
    `score_mod`: the name of one of `jattn.testing.score_functions`.
    """

    name: str
    batch: int = 2
    q_len: int = 64
    kv_len: int = 64
    num_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "float32"
    scale: float | None = None
    softcap: float | None = None
    is_causal: bool = False
    lower_right: bool = False
    window: tuple[int | None, int | None] | None = None
    bias_form: str | None = None
    bias_dtype: str | None = None
    mask_form: str | None = None
    mask_density: float = 0.5
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    segments: str | None = None
    num_segments: int = 3
    positions: str | None = None
    sinks_form: str | None = None
    alibi_form: str | None = None
    dropout_rate: float = 0.0
    broadcast_dropout: bool = False
    dropout_rows: bool = False
    score_mod: str | None = None
    distribution: str = "normal"
    dout_distribution: str = "normal"
    with_dlse: bool = True
    tags: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def scale_value(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(band_left, band_right) with None for unbounded: the window met by causality."""
        left, right = self.window if self.window is not None else (None, None)
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        return left, right

    @property
    def shape_of_axis(self) -> dict[str, int]:
        return {"b": self.batch, "n": self.num_heads, "t": self.q_len, "s": self.kv_len, "1": 1}

    def form_shape(self, form: str) -> tuple[int, ...]:
        """Spells out a bias or mask form as a shape."""
        return tuple(self.shape_of_axis[letter] for letter in form)

    def options(self) -> dict[str, object]:
        """The keyword arguments of `jattn.dot_product_attention` that are not arrays; defaults are left out."""
        options: dict[str, object] = {}
        if self.scale is not None:
            options["scale"] = self.scale
        if self.softcap is not None:
            options["logits_soft_cap"] = self.softcap
        if self.is_causal:
            options["is_causal"] = True
        if self.window is not None:
            options["local_window_size"] = self.window
        if self.lower_right:
            options["causal_alignment"] = "lower_right"
        if self.dropout_rate:
            options["dropout_rate"] = self.dropout_rate
        if self.broadcast_dropout:
            options["broadcast_dropout"] = True
        return options

    def but(self, suffix: str, **changes: object) -> "Case":
        """A copy under the name "<name>-<suffix>" with some fields changed."""
        return dataclasses.replace(self, name=f"{self.name}-{suffix}", **changes)  # type: ignore[arg-type]


def _short(dtype: str) -> str:
    return {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}[dtype]


def _tagged(tag: str, cases: Iterable[Case]) -> tuple[Case, ...]:
    return tuple(dataclasses.replace(case, tags=case.tags | {tag}) for case in cases)


# Sizes that sit on, beside and far from tile edges, and sizes no vector width divides.
LENGTHS = (1, 2, 15, 63, 64, 65, 127, 129, 1000)
HEAD_DIMS = (1, 8, 21, 64, 80, 96, 128, 192, 256, 512)
DTYPES = ("float32", "bfloat16", "float16")


def _length_cases() -> list[Case]:
    """Every length as T, as S and as both; each pair with its neighbour in the list, T < S and T > S.

    Mask kinds rotate through the list so that each meets short, tile-edge and long lengths.
    """
    kinds: tuple[dict[str, object], ...] = (
        {},
        {"is_causal": True},
        {"is_causal": True, "lower_right": True},
        {"window": (7, 3)},
        {"window": (40, None), "is_causal": True, "lower_right": True},
        {"mask_form": "bnts"},
        {"bias_form": "1nts"},
    )
    cases = []
    for i, length in enumerate(LENGTHS):
        partner = LENGTHS[(i + 4) % len(LENGTHS)]
        for j, (q_len, kv_len) in enumerate(
            ((length, length), (length, partner), (partner, length))
        ):
            kind = kinds[(i + 3 * j) % len(kinds)]
            dtype = DTYPES[(i + j) % len(DTYPES)]
            cases.append(
                Case(
                    name=f"length-T{q_len}-S{kv_len}-{_short(dtype)}-" + ("_".join(kind) or "full"),
                    batch=1 if max(q_len, kv_len) > 500 else 2,
                    q_len=q_len,
                    kv_len=kv_len,
                    head_dim=32,
                    head_dim_v=32,
                    dtype=dtype,
                    **kind,  # type: ignore[arg-type]
                )
            )
    return cases


def _head_dim_cases() -> list[Case]:
    """Every head dim; some with another head dim for the values, some with grouped heads."""
    value_dims = {21: 40, 80: 16, 96: 128, 192: 128, 64: 64}
    cases = []
    for i, head_dim in enumerate(HEAD_DIMS):
        dtype = DTYPES[i % len(DTYPES)]
        cases.append(
            Case(
                name=f"head-dim-D{head_dim}-{_short(dtype)}",
                q_len=70,
                kv_len=83,
                num_heads=4,
                num_kv_heads=(4, 2, 1)[i % 3],
                head_dim=head_dim,
                head_dim_v=value_dims.get(head_dim, head_dim),
                dtype=dtype,
                is_causal=i % 2 == 0,
            )
        )
    return cases


def _mask_cases() -> list[Case]:
    base = Case(
        name="mask",
        batch=3,
        q_len=70,
        kv_len=90,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        head_dim_v=32,
    )
    q_lengths, kv_lengths = (70, 0, 33), (41, 90, 0)
    everything: dict[str, object] = {
        "is_causal": True,
        "lower_right": True,
        "window": (30, None),
        "bias_form": "bnts",
        "mask_form": "b1ts",
        "mask_density": 0.8,
        "q_lengths": (65, 70, 12),
        "kv_lengths": (90, 35, 64),
        "segments": "random",
        "softcap": 20.0,
    }
    return [
        base.but("lengths", q_lengths=q_lengths, kv_lengths=kv_lengths),
        base.but("kv-lengths-causal", kv_lengths=kv_lengths, is_causal=True),
        base.but(
            "lengths-lower-right",
            q_lengths=(70, 20, 33),
            kv_lengths=(41, 90, 10),
            is_causal=True,
            lower_right=True,
        ),
        base.but(
            "lengths-lower-right-square",
            q_len=90,
            q_lengths=(90, 20, 33),
            kv_lengths=(41, 90, 10),
            is_causal=True,
            lower_right=True,
        ),
        base.but(
            "lengths-out-of-range",
            q_lengths=(-5, 71, 2**31 - 1),
            kv_lengths=(2**31 - 1, -(2**31), 91),
        ),
        base.but("lengths-window", q_lengths=(70, 64, 33), kv_lengths=(41, 90, 10), window=(12, 5)),
        base.but("segments", segments="random"),
        base.but("segments-interleaved", segments="interleaved", dtype="bfloat16"),
        base.but("segments-self-causal", kv_len=70, segments="random", is_causal=True),
        base.but(
            "segments-lengths", segments="random", q_lengths=(70, 50, 33), kv_lengths=(41, 90, 64)
        ),
        base.but("window-left", window=(16, None)),
        base.but("window-right", window=(None, 16), dtype="float16"),
        base.but("window-zero", window=(0, 0)),
        base.but("window-lower-right", window=(9, 4), lower_right=True),
        base.but("window-wider-than-all", window=(1000, 1000)),
        base.but("window-causal", window=(9, 4), is_causal=True, dtype="bfloat16"),
        base.but("lower-right-tall", q_len=90, kv_len=40, is_causal=True, lower_right=True),
        base.but("dense-2-percent", mask_form="bnts", mask_density=0.02),
        base.but("dense-98-percent", mask_form="11ts", mask_density=0.98, dtype="bfloat16"),
        base.but("dense-keys", mask_form="b11s"),
        base.but("dense-rows", mask_form="bnt1"),
        base.but("dense-and-causal", mask_form="1n1s", is_causal=True),
        base.but("softcap", softcap=5.0, distribution="normal_x3"),
        base.but("softcap-bf16-causal", softcap=30.0, dtype="bfloat16", is_causal=True),
        base.but("softcap-far-above", softcap=1e6, dtype="bfloat16", is_causal=True),
        base.but("softcap-far-above-f16", softcap=1e6, dtype="float16", scale=-0.3),
        base.but("everything", **everything),
        base.but("everything-bf16", dtype="bfloat16", **everything),
        base.but("everything-f16", dtype="float16", **everything),
        base.but("everything-upper-left", **(everything | {"lower_right": False, "softcap": None})),
    ]


def _bias_cases() -> list[Case]:
    base = Case(
        name="bias",
        batch=2,
        q_len=37,
        kv_len=65,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        head_dim_v=24,
    )
    cases = [
        base.but(form, bias_form=form, dtype=DTYPES[i % 3])
        for i, form in enumerate(
            ("s", "ts", "t1", "nts", "bnts", "1nts", "b1ts", "bn1s", "11ts", "111s", "1n11", "1111")
        )
    ]
    return [
        *cases,
        base.but("float32-for-bf16", bias_form="1nts", bias_dtype="float32", dtype="bfloat16"),
        base.but(
            "float32-for-f16-causal",
            bias_form="b1ts",
            bias_dtype="float32",
            dtype="float16",
            is_causal=True,
        ),
        base.but("masked", bias_form="1nts", mask_form="b1ts"),
        base.but("softcap", bias_form="bnts", softcap=8.0, dtype="bfloat16"),
        base.but("softcap-far-above", bias_form="1nts", softcap=1e6, dtype="bfloat16"),
    ]


def _group_cases() -> list[Case]:
    base = Case(name="group", q_len=50, kv_len=66, num_heads=6, head_dim=40, head_dim_v=24)
    return [
        base.but("mqa", num_kv_heads=1, is_causal=True),
        base.but("gqa-2", num_kv_heads=2, dtype="bfloat16"),
        base.but("gqa-3-bias", num_kv_heads=3, bias_form="bnts"),
        base.but(
            "decode", q_len=1, num_kv_heads=2, dtype="bfloat16", is_causal=True, lower_right=True
        ),
        base.but(
            "decode-lengths",
            batch=4,
            q_len=1,
            kv_len=129,
            num_kv_heads=1,
            kv_lengths=(1, 0, 129, 77),
        ),
        base.but(
            "few-queries",
            q_len=5,
            kv_len=300,
            num_heads=6,
            num_kv_heads=2,
            dtype="bfloat16",
            is_causal=True,
            lower_right=True,
            window=(100, 0),
            q_lengths=(5, 3),
            kv_lengths=(300, 150),
            mask_form="b1ts",
            sinks_form="n",
        ),
    ]


def _scale_cases() -> list[Case]:
    base = Case(name="scale", q_len=66, kv_len=66, head_dim=16, head_dim_v=16)
    return [
        base.but("negative", scale=-0.5),
        base.but("zero", scale=0.0),
        base.but("zero-causal-bf16", scale=0.0, is_causal=True, dtype="bfloat16"),
        base.but("minus-10000", scale=-10000.0),
        base.but(
            "negative-masked", scale=-0.25, mask_form="bnts", kv_lengths=(66, 20), dtype="float16"
        ),
        base.but("one-over-D", scale=1 / 16),
    ]


def _distribution_cases() -> list[Case]:
    """Each input distribution in a 16-bit type and in float32, a tail in S, causal every other time."""
    cases = []
    for i, distribution in enumerate(DISTRIBUTIONS):
        # dS = P * (dout . v) leaves the range of float16, to which a kernel may round it (docs/conventions.md).
        half = "bfloat16" if distribution == "huge_v" else DTYPES[1 + i % 2]
        for dtype in ("float32", half):
            cases.append(
                Case(
                    name=f"values-{distribution}-{_short(dtype)}",
                    batch=1,
                    q_len=67,
                    kv_len=133,
                    head_dim=32,
                    head_dim_v=32,
                    dtype=dtype,
                    distribution=distribution,
                    is_causal=i % 2 == 1,
                )
            )
    for dout in DOUT_DISTRIBUTIONS[1:]:
        cases.append(
            Case(
                name=f"dout-{dout}",
                q_len=67,
                kv_len=70,
                head_dim=32,
                head_dim_v=32,
                dtype="bfloat16",
                dout_distribution=dout,
                with_dlse=False,
                is_causal=True,
            )
        )
    return cases


def _float64_cases() -> list[Case]:
    base = Case(
        name="float64", batch=1, q_len=45, kv_len=70, head_dim=20, head_dim_v=12, dtype="float64"
    )
    return [
        base,
        base.but("causal-bias", is_causal=True, bias_form="1nts"),
        base.but(
            "lengths-lower-right",
            q_lengths=(40,),
            kv_lengths=(66,),
            is_causal=True,
            lower_right=True,
        ),
        base.but("gqa-softcap", num_heads=4, softcap=3.0),
    ]


def _feature_base(name: str) -> Case:
    return Case(
        name=name,
        q_len=70,
        kv_len=90,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        head_dim_v=32,
    )


def _position_cases() -> list[Case]:
    base = _feature_base("positions").but("causal", is_causal=True, positions="shuffled")
    return [
        base,
        base.but("bf16-window", dtype="bfloat16", window=(20, 3), positions="shifted"),
        base.but(
            "lengths", q_lengths=(70, 40), kv_lengths=(50, 90), positions="shifted", dtype="float16"
        ),
        base.but("restart-segments", kv_len=70, segments="random", positions="restart"),
        base.but("far", positions="far", window=(2**30, None), bias_form="1nts"),
        base.but(
            "everything",
            dtype="bfloat16",
            window=(30, None),
            bias_form="b1ts",
            mask_form="1n1s",
            segments="interleaved",
            kv_lengths=(90, 64),
            softcap=10.0,
        ),
        # Several tiles, of which most are hidden.
        base.but("long", batch=1, q_len=300, kv_len=331, window=(25, None), positions="shifted"),
    ]


def _sink_cases() -> list[Case]:
    base = _feature_base("sinks").but("heads", sinks_form="n")
    return [
        base,
        base.but("batch-causal-bf16", sinks_form="bn", is_causal=True, dtype="bfloat16"),
        base.but("one-f16", sinks_form="1", dtype="float16", head_dim_v=48, kv_lengths=(90, 0)),
        base.but("per-batch-window", sinks_form="b1", window=(9, 4), lower_right=True),
        base.but("segments-softcap", sinks_form="n", segments="random", softcap=5.0),
        base.but(
            "bias-mask", sinks_form="bn", bias_form="1nts", mask_form="b1ts", mask_density=0.1
        ),
        base.but("decode", q_len=1, kv_len=129, num_kv_heads=1, dtype="bfloat16"),
        base.but("far-below", distribution="lse_plus_200", head_dim_v=16),
        base.but("far-above", distribution="lse_minus_200"),
        base.but("float64", dtype="float64", is_causal=True),
    ]


def _alibi_cases() -> list[Case]:
    base = _feature_base("alibi").but("heads", alibi_form="n")
    return [
        base,
        base.but("causal-bf16", is_causal=True, dtype="bfloat16"),
        base.but("batch-lower-right", alibi_form="bn", lower_right=True, dtype="float16"),
        base.but(
            "lengths-lower-right",
            is_causal=True,
            lower_right=True,
            q_lengths=(70, 20),
            kv_lengths=(41, 90),
        ),
        base.but("positions", positions="shuffled", alibi_form="bn"),
        base.but(
            "restart-causal-bf16",
            kv_len=70,
            segments="random",
            positions="restart",
            is_causal=True,
            dtype="bfloat16",
        ),
        base.but("softcap-bias-window", softcap=5.0, bias_form="bnts", window=(30, 30)),
        base.but("one-sinks", alibi_form="1", sinks_form="n", head_dim_v=24, is_causal=True),
        base.but(
            "long-causal-bf16", batch=1, q_len=260, kv_len=260, is_causal=True, dtype="bfloat16"
        ),
    ]


def _dropout_cases() -> list[Case]:
    base = _feature_base("dropout").but("plain", dropout_rate=0.2)
    everything = base.but(
        "everything",
        is_causal=True,
        window=(40, None),
        bias_form="1nts",
        mask_form="b11s",
        mask_density=0.9,
        kv_lengths=(90, 64),
        q_lengths=(70, 33),
        segments="interleaved",
        softcap=20.0,
        sinks_form="n",
        alibi_form="bn",
        positions="shifted",
    )
    return [
        base,
        base.but("bf16-causal", dtype="bfloat16", is_causal=True, dropout_rate=0.113377),
        base.but("f16-half", dtype="float16", dropout_rate=0.5, head_dim_v=48),
        base.but(
            "broadcast", broadcast_dropout=True, dropout_rate=0.48, lower_right=True, is_causal=True
        ),
        base.but("tiny-rate", dropout_rate=1e-6),
        base.but("nearly-all", dropout_rate=0.9999, dtype="bfloat16"),
        base.but("bias-bf16", bias_form="b1ts", bias_dtype="float32", dtype="bfloat16"),
        base.but("lengths", q_lengths=(70, 17), kv_lengths=(33, 90), dropout_rate=0.22),
        base.but("segments-window", segments="random", window=(12, 5), dtype="float16"),
        # Positions say who sees whom; the pair is still known by its indices.
        base.but("positions", positions="shuffled", is_causal=True),
        base.but("decode", q_len=1, kv_len=129, num_kv_heads=1, dtype="bfloat16"),
        base.but(
            "wide-head",
            num_heads=2,
            num_kv_heads=2,
            head_dim=128,
            head_dim_v=128,
            dtype="bfloat16",
            is_causal=True,
        ),
        base.but("long-bf16", batch=1, q_len=300, kv_len=331, dtype="bfloat16", is_causal=True),
        base.but("float64", dtype="float64"),
        everything,
        everything.but("bf16", dtype="bfloat16"),
        everything.but("f16", dtype="float16", positions=None, lower_right=True),
    ]


def _dropout_row_cases() -> list[Case]:
    base = _feature_base("rows").but(
        "packed",
        batch=1,
        q_len=120,
        kv_len=120,
        segments="random",
        num_segments=5,
        positions="restart",
        dropout_rate=0.3,
        dropout_rows=True,
    )
    return [
        base,
        base.but("causal-bf16", is_causal=True, dtype="bfloat16"),
        base.but(
            "cross-batch", batch=2, kv_len=97, positions="shuffled", is_causal=True, dtype="float16"
        ),
        base.but("broadcast", broadcast_dropout=True, window=(9, 2)),
        base.but(
            "everything",
            alibi_form="n",
            sinks_form="n",
            softcap=20.0,
            bias_form="1nts",
            is_causal=True,
        ),
    ]


def _row_cases() -> list[Case]:
    """Problems of the acceptance rows that both tiers run; the tag is the row's id."""
    variants = Case(
        name="T058",
        batch=8,
        q_len=64,
        kv_len=32,
        num_heads=8,
        num_kv_heads=8,
        dtype="float16",
        tags=frozenset({"T058"}),
    )
    padded = dataclasses.replace(
        variants, name="T059", batch=2, num_heads=2, num_kv_heads=2, tags=frozenset({"T059"})
    )
    t072 = ((4, 4), (8, 64), (64, 8), (128, 128), (256, 1024), (1024, 256), (2048, 2048))
    t073 = ((4, 4), (64, 65), (152, 37), (312, 408), (1024, 128), (2048, 2048))
    return [
        *(variants.but(f"bias-{form}", bias_form=form) for form in ("s", "ts", "nts", "bnts")),
        *(variants.but(f"mask-{form}", mask_form=form) for form in ("s", "ts", "nts", "bnts")),
        *(
            padded.but(f"S{kv_len}-{_short(dtype)}", kv_len=kv_len, dtype=dtype, bias_form="bnts")
            for kv_len in (1, 15, 17)
            for dtype in ("float32", "float16")
        ),
        *_gradient_rows("T072", t072, bias_forms=(None,)),
        *_gradient_rows("T073", t073, bias_forms=("ts", "bnts", "1nts")),
    ]


def _gradient_rows(
    row: str, lengths: tuple[tuple[int, int], ...], bias_forms: tuple[str | None, ...]
) -> list[Case]:
    """Covers lengths x head dims of a gradient row; types, causality, scale, batch and bias forms take turns."""
    cases = []
    for i, (q_len, kv_len) in enumerate(lengths):
        for j, head_dim in enumerate(((64, 8), (128, 72))[i % 2] if q_len < 2048 else (64,)):
            dtype = DTYPES[(i + j) % 3]
            is_causal = bias_forms == (None,) and (i // 2 + j) % 2 == 1
            cases.append(
                Case(
                    name=f"{row}-T{q_len}-S{kv_len}-D{head_dim}-{_short(dtype)}{'-causal' if is_causal else ''}",
                    batch=8 if max(q_len, kv_len) <= 128 else 1,
                    q_len=q_len,
                    kv_len=kv_len,
                    num_heads=4,
                    num_kv_heads=4,
                    head_dim=head_dim,
                    head_dim_v=head_dim,
                    dtype=dtype,
                    scale=None if head_dim == 64 else 1 / head_dim,
                    is_causal=is_causal,
                    bias_form=bias_forms[(i + j) % len(bias_forms)],
                    distribution="uniform",
                    tags=frozenset({row}),
                )
            )
    return cases


def _peer_cases() -> list[Case]:
    """The shapes of published comparisons: 16 384 tokens, heads * head_dim = 2048, bfloat16."""
    cases = []
    for head_dim, num_heads in ((64, 32), (128, 16), (256, 8)):
        for length in (2048, 8192):
            for is_causal in (True, False):
                cases.append(
                    Case(
                        name=f"bench-D{head_dim}-S{length}-{'causal' if is_causal else 'full'}",
                        batch=TOKENS_PER_BENCHMARK // length,
                        q_len=length,
                        kv_len=length,
                        num_heads=num_heads,
                        num_kv_heads=num_heads,
                        head_dim=head_dim,
                        head_dim_v=head_dim,
                        dtype="bfloat16",
                        is_causal=is_causal,
                        with_dlse=False,
                        tags=frozenset({"peers"}),
                    )
                )
    return cases


def _benchmark_cases() -> list[Case]:
    """Single shapes that programs have: grouped heads, windows, decoding, and what a CPU gets."""
    wide = Case(
        name="bench",
        batch=4,
        q_len=4096,
        kv_len=4096,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        head_dim_v=128,
        dtype="bfloat16",
        with_dlse=False,
    )
    cpu = wide.but(
        "cpu",
        batch=1,
        q_len=1024,
        kv_len=1024,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        head_dim_v=64,
    )
    return [
        wide.but(
            "gqa", batch=2, q_len=8192, kv_len=8192, num_heads=32, num_kv_heads=8, is_causal=True
        ),
        wide.but(
            "window", batch=1, q_len=16_384, kv_len=16_384, is_causal=True, window=(1024, None)
        ),
        wide.but("bias", bias_form="1nts"),
        wide.but("mask", mask_form="b1ts"),
        wide.but("softcap", softcap=30.0),
        wide.but("f32", dtype="float32", batch=2, q_len=2048, kv_len=2048),
        wide.but(
            "segments",
            batch=1,
            q_len=16_384,
            kv_len=16_384,
            is_causal=True,
            segments="random",
            num_segments=22,
        ),
        wide.but("decode", batch=64, q_len=1, kv_len=8192, num_heads=32, num_kv_heads=8),
        wide.but(
            "small",
            batch=1,
            q_len=256,
            kv_len=256,
            num_heads=8,
            num_kv_heads=8,
            head_dim=64,
            head_dim_v=64,
        ),
        *(
            cpu.but(
                f"{_short(dtype)}-{'causal' if is_causal else 'full'}",
                dtype=dtype,
                is_causal=is_causal,
                tags=frozenset({"cpu_bench"}),
            )
            for dtype in ("float32", "bfloat16")
            for is_causal in (True, False)
        ),
    ]


def _decoding_benchmark_cases() -> list[Case]:
    """Few queries of grouped heads on many keys: one with each feature that decoding has, and shapes."""
    one = Case(
        name="decode",
        batch=64,
        q_len=1,
        kv_len=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        head_dim_v=128,
        dtype="bfloat16",
        with_dlse=False,
        tags=frozenset({"decode"}),
    )
    features: dict[str, dict[str, object]] = {
        "plain": {},
        "lengths": {"kv_lengths": tuple(128 * (entry + 1) for entry in range(one.batch))},
        "window": {"is_causal": True, "lower_right": True, "window": (1023, None)},
        "positions": {"is_causal": True, "positions": "shifted"},
        "segments": {"segments": "random", "num_segments": 2},
        "mask": {"mask_form": "b1ts"},
        "bias of keys": {"bias_form": "b11s"},
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks_form": "n"},
    }
    shapes: dict[str, dict[str, object]] = {
        "batch 1, 32768 keys": {"batch": 1, "kv_len": 32_768},
        "4 queries": {"batch": 16, "q_len": 4, "is_causal": True, "lower_right": True},
        "16 queries": {"batch": 16, "q_len": 16, "is_causal": True, "lower_right": True},
        "16 queries, window": {
            "batch": 16,
            "q_len": 16,
            "is_causal": True,
            "lower_right": True,
            "window": (1023, None),
        },
        "64 heads of 64": {"num_heads": 64, "head_dim": 64, "head_dim_v": 64},
        "heads for themselves": {"batch": 16, "num_kv_heads": 32},
    }
    return [one.but(name, **changes) for name, changes in (features | shapes).items()]


def _feature_benchmark_cases() -> list[Case]:
    """One shape with each feature alone: what a feature costs."""
    features: dict[str, dict[str, object]] = {
        "plain": {},
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "window": (256, None)},
        "grouped": {"num_kv_heads": 4},
        "lengths": {"kv_lengths": True},
        "segments": {"segments": "random", "num_segments": 4},
        "positions": {"is_causal": True, "positions": "shifted"},
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks_form": "n"},
        "alibi": {"alibi_form": "n"},
        "mask": {"mask_form": "b1ts"},
        "bias": {"bias_form": "1nts"},
        "bias of keys": {"bias_form": "1n1s"},
        "dropout": {"dropout_rate": 0.1},
    }
    wide = Case(
        name="feature",
        batch=4,
        q_len=4096,
        kv_len=4096,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        head_dim_v=128,
        dtype="bfloat16",
        with_dlse=False,
        tags=frozenset({"features"}),
    )
    narrow = dataclasses.replace(
        wide,
        name="cpu-feature",
        batch=2,
        q_len=1024,
        kv_len=1024,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        head_dim_v=64,
        dtype="float32",
        tags=frozenset({"cpu_features"}),
    )
    cases = []
    for base in (wide, narrow):
        for name, changes in features.items():
            changed = dict(changes)
            if "kv_lengths" in changed:
                changed["kv_lengths"] = tuple(
                    base.kv_len * (b + 1) // base.batch for b in range(base.batch)
                )
            cases.append(base.but(name, **changed))
    return cases


TABLE: tuple[Case, ...] = (
    *_tagged("length", _length_cases()),
    *_tagged("head_dim", _head_dim_cases()),
    *_tagged("mask", _mask_cases()),
    *_tagged("bias", _bias_cases()),
    *_tagged("group", _group_cases()),
    *_tagged("scale", _scale_cases()),
    *_tagged("values", _distribution_cases()),
    *_tagged("float64", _float64_cases()),
    *_tagged("positions", _position_cases()),
    *_tagged("sinks", _sink_cases()),
    *_tagged("alibi", _alibi_cases()),
    *_tagged("dropout", _dropout_cases()),
    *_tagged("dropout_rows", _dropout_row_cases()),
    *_tagged("rows", _row_cases()),
    *_tagged("bench", _peer_cases()),
    *_tagged("bench", _benchmark_cases()),
    *_tagged("bench", _feature_benchmark_cases()),
    *_tagged("bench", _decoding_benchmark_cases()),
)


@functools.cache
def tagged(*tags: str) -> tuple[Case, ...]:
    """The cases that carry all of these tags, in table order.

    Raises:
      LookupError: no case carries them, so that a mistyped tag cannot turn a test into nothing.
    """
    found = tuple(case for case in TABLE if set(tags) <= case.tags)
    if not found:
        raise LookupError(
            f"no case is tagged {tags}; tags: {sorted(set().union(*(c.tags for c in TABLE)))}"
        )
    return found


def sweep() -> tuple[Case, ...]:
    """The general problems, small enough for the oracle: all of the table but single rows and benchmarks."""
    return tuple(case for case in TABLE if not case.tags & {"rows", "bench"})


def named(name: str) -> Case:
    """Looks a case up by its name.

    Raises:
      KeyError: there is none.
    """
    for case in TABLE:
        if case.name == name:
            return case
    raise KeyError(f"no case is named {name!r}; see jattn.testing.cases.TABLE")
