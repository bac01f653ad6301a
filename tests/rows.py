"""The acceptance rows: id -> where it is tested, or why not. test_rows_table.py checks the table against the tests.

Test functions carry the ids of their rows; several ids may share one. `Later` rows belong to a feature that is not
in the library yet: their tests, where there are some, check that asking for it is refused today. `NotApplicable`
rows have nothing to test in JAX.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Covered:
    """Where a row is tested; tiers are folders under tests/."""

    tiers: tuple[str, ...]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Later:
    """A row of a feature that arrives later; `tiers` have a test of today's refusal, if any."""

    reason: str
    tiers: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class NotApplicable:
    """A row with nothing to test, and why."""

    reason: str


CPU, GPU, BOTH = Covered(("cpu",)), Covered(("gpu",)), Covered(("cpu", "gpu"))
DROPOUT = "arrives with dropout"
RAGGED = "arrives with ragged batches"
CUDNN = "arrives with the cudnn backend"

ROWS: dict[str, Covered | Later | NotApplicable] = {
    "T001": BOTH,
    "T002": CPU,
    "T003": CPU,
    "T004": CPU,
    "T005": CPU,
    "T006": Covered(("cpu",), "lengths stand for the ragged arm"),
    "T007": CPU,
    "T008": CPU,
    "T009": CPU,
    "T010": CPU,
    "T011": CPU,
    "T012": CPU,
    "T013": CPU,
    "T014": Covered(("cpu",), "dense lengths; ragged arrays in and out arrive with ragged batches"),
    "T015": CPU,
    "T016": CPU,
    "T017": CPU,
    "T018": NotApplicable("the seed's test asserts nothing; growing caches are J10"),
    "T019": Covered(
        ("cpu",), "mask and is_causal both apply (D02); its dropout cases arrive with dropout"
    ),
    "T020": NotApplicable("dead code in the seed; the condition it means is T042"),
    "T021": Covered(
        ("cpu",),
        "both paddings run dense; is_left_aligned and ragged_from_mask arrive with ragged batches",
    ),
    "T022": CPU,
    "T023": CPU,
    "T024": CPU,
    "T025": Covered(("cpu",), "head dim 2 is accepted (D04), not refused"),
    "T026": GPU,
    "T027": CPU,
    "T028": CPU,
    "T029": Covered(("cpu", "gpu"), "no refusal of ours: tiles are chosen by device"),
    "T030": CPU,
    "T031": Covered(("cpu",), "rank 3 gets its batch axis before any backend sees it"),
    "T032": Covered(("cpu",), "a wrong call, ValueError, as in jax.nn"),
    "T033": Covered(("cpu",), "zero lengths work (D07)"),
    "T034": Covered(("cpu",), "no strides in JAX; transposed inputs instead (S003)"),
    "T035": Covered(("cpu",), "head dim 9 is accepted (D04); limits are refused"),
    "T036": CPU,
    "T037": CPU,
    "T038": Covered(
        ("cpu",), "unaligned head dims are accepted (D04); old devices are refused as such"
    ),
    "T039": CPU,
    "T040": BOTH,
    "T041": BOTH,
    "T042": CPU,
    "T043": CPU,
    "T044": Covered(("cpu",), "rank 5 alone has two batch axes and is legal"),
    "T045": Later(RAGGED, ("cpu",)),
    "T046": Later(RAGGED, ("cpu",)),
    "T047": CPU,
    "T048": BOTH,
    "T049": Covered(("cpu",), "lengths are run-time values: computed, not refused"),
    "T050": Later(RAGGED, ("cpu",)),
    "T051": Covered(("cpu",), "non-square causal is served by every backend (S055 as decided)"),
    "T052": CPU,
    "T053": Covered(("cpu",), "its dropout and ragged halves arrive with those"),
    "T054": CPU,
    "T055": Covered(("cpu",), "masks that need a gradient stay on the CPU kernel"),
    "T056": BOTH,
    "T057": BOTH,
    "T058": BOTH,
    "T059": BOTH,
    "T060": BOTH,
    "T061": Covered(
        ("gpu",), "8 heads of the 32: a 2 GiB mask needs 64-bit byte offsets just as well"
    ),
    "T062": GPU,
    "T063": GPU,
    "T064": Later(RAGGED + "; its dense half is T066"),
    "T065": Later(RAGGED + "; its dense half is the sweep of tests/gpu/test_forward_backward.py"),
    "T066": GPU,
    "T067": GPU,
    "T068": CPU,
    "T069": CPU,
    "T070": Later("arrives with a backward that is not deterministic by default"),
    "T071": GPU,
    "T072": Covered(("gpu",), "without its dropout cases"),
    "T073": Covered(("gpu",), "without its dropout cases"),
    "T074": Later(DROPOUT + "; without it: the sweep of tests/gpu/test_forward_backward.py"),
    "T075": Later(DROPOUT + "; without it: tests/gpu/test_graphs.py"),
    "T076": Later(RAGGED),
    "T077": Later(RAGGED),
    "T078": Later(RAGGED),
    "T079": Later(RAGGED),
    "T080": CPU,
    "T081": BOTH,
    "T082": CPU,
    "T083": CPU,
    "T084": CPU,
    "T085": CPU,
    "T086": CPU,
    "T087": CPU,
    "T088": Later(CUDNN, ("cpu",)),
    "T089": Later(CUDNN, ("cpu",)),
    "J01": CPU,
    "J02": CPU,
    "J03": Covered(("cpu",), "works on every backend (README), no error on fused ones"),
    "J04": Covered(("cpu",), "works on every backend (README), no error on fused ones"),
    "J05": CPU,
    "J06": Later(DROPOUT, ("cpu",)),
    "J07": Covered(("cpu",), "head dim 257 is no limit of the CPU kernel; flash's is T035"),
    "J08": CPU,
    "J09": CPU,
    "J10": CPU,
    "J11": BOTH,
    "J12": CPU,
    "J13": CPU,
    "J14": BOTH,
}
