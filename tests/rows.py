"""The acceptance rows: id -> where it is tested, or why not. test_rows_table.py checks the table against the tests.

T and J rows are about dense calls (J: what JAX and this library add), R rows about ragged batches. Test functions carry
the ids of their rows; several ids may share one. `NotApplicable` rows have nothing to test in JAX. Of long lists every
run has a short part; `--full` adds the rest.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Covered:
    """Where a row is tested; tiers are folders under tests/."""

    tiers: tuple[str, ...]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class NotApplicable:
    """A row with nothing to test, and why."""

    reason: str


CPU, GPU, BOTH = Covered(("cpu",)), Covered(("gpu",)), Covered(("cpu", "gpu"))

ROWS: dict[str, Covered | NotApplicable] = {
    "T001": BOTH,
    "T002": CPU,
    "T003": BOTH,
    "T004": BOTH,
    "T005": CPU,
    "T006": Covered(
        ("cpu",), "masked and length arms in test_rows_modules.py, the ragged arm in test_ragged.py"
    ),
    "T007": BOTH,
    "T008": CPU,
    "T009": CPU,
    "T010": CPU,
    "T011": BOTH,
    "T012": BOTH,
    "T013": BOTH,
    "T014": Covered(
        ("cpu", "gpu"),
        "dense lengths in test_rows_modules.py, ragged arrays in and out in test_ragged.py",
    ),
    "T015": CPU,
    "T016": CPU,
    "T017": CPU,
    "T018": NotApplicable("states nothing that can fail; growing caches are J10"),
    "T019": Covered(("cpu", "gpu"), "mask and is_causal both apply"),
    "T020": NotApplicable("a condition that cannot occur; the one that it means is T042"),
    "T021": Covered(
        ("cpu",), "the check is is_left_aligned and RaggedArray.from_mask; a mask= runs dense"
    ),
    "T022": CPU,
    "T023": CPU,
    "T024": CPU,
    "T025": Covered(("cpu",), "head dim 2 is accepted, not refused"),
    "T026": GPU,
    "T027": CPU,
    "T028": CPU,
    "T029": Covered(("cpu", "gpu"), "no refusal of ours: tiles are chosen by device"),
    "T030": CPU,
    "T031": Covered(("cpu",), "rank 3 gets its batch axis before any backend sees it"),
    "T032": Covered(("cpu",), "a wrong call, ValueError, as in jax.nn"),
    "T033": Covered(("cpu",), "zero lengths work"),
    "T034": Covered(("cpu",), "no strides in JAX; transposed inputs instead"),
    "T035": Covered(("cpu",), "head dim 9 is accepted; one beyond the limit is refused"),
    "T036": CPU,
    "T037": Covered(("cpu",), "dense masks are taken by every fused backend"),
    "T038": Covered(("cpu",), "unaligned head dims are accepted; old devices are refused as such"),
    "T039": CPU,
    "T040": BOTH,
    "T041": BOTH,
    "T042": CPU,
    "T043": CPU,
    "T044": Covered(("cpu",), "rank 5 alone has two batch axes and is legal"),
    "T045": CPU,
    "T046": Covered(("cpu",), "accepted: no head dim is refused for alignment"),
    "T047": CPU,
    "T048": BOTH,
    "T049": Covered(("cpu", "gpu"), "computed; refused only under strict, where lengths are known"),
    "T050": Covered(("cpu",), "training through a broadcast works, it is not refused"),
    "T051": Covered(("cpu",), "non-square causal is served by every backend"),
    "T052": CPU,
    "T053": Covered(("cpu",), "ragged and dropout go to the kernel too"),
    "T054": CPU,
    "T055": Covered(("cpu",), "masks that need a gradient stay on the CPU kernel"),
    "T056": BOTH,
    "T057": BOTH,
    "T058": BOTH,
    "T059": BOTH,
    "T060": BOTH,
    "T061": GPU,
    "T062": BOTH,
    "T063": BOTH,
    "T064": BOTH,
    "T065": BOTH,
    "T066": GPU,
    "T067": GPU,
    "T068": CPU,
    "T069": CPU,
    "T070": BOTH,
    "T071": GPU,
    "T072": Covered(("gpu",), "dropout up to 1024 tokens"),
    "T073": Covered(("gpu",), "dropout up to 1024 tokens"),
    "T074": Covered(
        ("gpu",),
        "a grid in which types, scale and batch take turns; an eighth of it in the short list",
    ),
    "T075": Covered(
        ("gpu",), "captured command buffers; without dropout also test_captured_equals_not_captured"
    ),
    "T076": BOTH,
    "T077": BOTH,
    "T078": BOTH,
    "T079": BOTH,
    "T080": CPU,
    "T081": BOTH,
    "T082": CPU,
    "T083": CPU,
    "T084": CPU,
    "T085": CPU,
    "T086": CPU,
    "T087": CPU,
    "T088": GPU,
    "T089": CPU,
    "J01": CPU,
    "J02": BOTH,
    "J03": Covered(("cpu",), "works on every backend, no error on fused ones"),
    "J04": Covered(("cpu",), "works on every backend, no error on fused ones"),
    "J05": CPU,
    "J06": CPU,
    "J07": Covered(("cpu",), "head dim 257 is no limit of the CPU kernel; flash's is T035"),
    "J08": CPU,
    "J09": CPU,
    "J10": CPU,
    "J11": BOTH,
    "J12": CPU,
    "J13": CPU,
    "J14": BOTH,
    "R001": CPU,
    "R002": CPU,
    "R003": CPU,
    "R004": CPU,
    "R005": Covered(
        ("cpu",), "as arguments of flash_mha_varlen; kernels get segment ids (docs/design/0007)"
    ),
    "R006": CPU,
    "R010": CPU,
    "R011": CPU,
    "R012": CPU,
    "R013": CPU,
    "R014": CPU,
    "R015": CPU,
    "R016": CPU,
    "R020": CPU,
    "R021": CPU,
    "R022": NotApplicable("JAX itself refuses arrays on different devices: T043"),
    "R023": CPU,
    "R024": CPU,
    "R025": CPU,
    "R026": CPU,
    "R030": CPU,
    "R031": Covered(("cpu",), "told apart by the rank of the values"),
    "R040": CPU,
    "R041": CPU,
    "R042": Covered(("cpu",), "with gradients"),
    "R043": CPU,
    "R050": CPU,
    "R051": CPU,
    "R052": CPU,
    "R060": CPU,
    "R061": Covered(("cpu",), "no head dim is refused for alignment"),
    "R062": CPU,
    "R063": Covered(("cpu",), "backends without tiles get the padded form"),
    "R064": Covered(("cpu",), "seed and offset are arguments, so only lse is returned"),
    "R100": BOTH,
    "R101": BOTH,
    "R102": BOTH,
    "R103": BOTH,
    "R104": BOTH,
    "R105": Covered(
        ("cpu", "gpu"), "bitwise at aligned starts, within rounding elsewhere (docs/design/0007)"
    ),
    "R106": BOTH,
    "R107": CPU,
    "R108": CPU,
    "R109": CPU,
    "R110": CPU,
    "R111": CPU,
    "R112": CPU,
    "R113": BOTH,
}
