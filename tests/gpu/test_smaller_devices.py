"""The tiles of devices with less shared memory: sm_80 has 163 KiB, sm_86, sm_89 and sm_120 have 99 KiB."""

import jax
import pytest

import jattn
from jattn.arguments import Call
from jattn.backends import cuda_tiles
from jattn.spec import Spec
from jattn.testing import compare, inputs
from jattn.testing.cases import Case
from jattn.testing.run import run

pytestmark = pytest.mark.backends("mem_efficient")

BASE = Case(
    name="smaller",
    q_len=200,
    kv_len=264,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    head_dim_v=64,
    is_causal=True,
)


def of_width(base: Case, head_dim: int, head_dim_v: int | None = None) -> Case:
    width = head_dim if head_dim_v is None else head_dim_v
    return base.but(f"{head_dim}-{width}", head_dim=head_dim, head_dim_v=width)


BF16 = BASE.but("bf16", dtype="bfloat16")
F16 = BASE.but("f16", dtype="float16", lower_right=True, kv_lengths=(264, 70))
# Cases that have other tiles within so many KiB.
CASES = [
    (163, of_width(BASE, 192)),
    (163, of_width(BASE.but("window", window=(50, 20), is_causal=False), 128)),
    (163, of_width(BASE.but("bias", bias_form="1nts"), 64)),
    (163, of_width(BASE.but("bias-mask", bias_form="bnts", mask_form="b1ts"), 128)),
    (163, of_width(BASE.but("segments", segments="random"), 256)),
    (163, of_width(BF16, 128)),
    (163, of_width(BF16, 256)),
    (163, of_width(F16, 256, 128)),
    (163, of_width(BF16.but("bias", bias_form="1nts"), 64)),
    (163, of_width(BF16.but("dropout-softcap", dropout_rate=0.3, softcap=5.0), 256)),
    (99, of_width(BASE, 96)),
    (99, of_width(BASE, 128)),
    (99, of_width(BASE.but("mask", mask_form="b1ts"), 192, 128)),
    (99, of_width(BASE.but("bias", bias_form="1nts", softcap=5.0), 32)),
    (99, of_width(BASE.but("bias-row", bias_form="b11s"), 256)),
    (99, of_width(BF16, 64)),
    (99, of_width(BF16, 96)),
    (99, of_width(BF16.but("segments", segments="random"), 128)),
    (99, of_width(F16, 192)),
    (99, of_width(F16, 256)),
    (99, of_width(BF16.but("bias", bias_form="1nts"), 32)),
    (99, of_width(BF16.but("bias-alibi", bias_form="bnts", alibi_form="n"), 128)),
    (99, of_width(BF16.but("positions", positions="shuffled", dropout_rate=0.2), 256)),
]


def spec_of(case: Case) -> Spec:
    found: list[Spec] = []

    def parse() -> None:
        (q, k, v), keywords = inputs.call_arguments(case, inputs.make(case))
        found.append(Call.parse(q, k, v, implementation="mem_efficient", **keywords).spec)

    jax.eval_shape(parse)
    return found[0]


def kernels(spec: Spec, deterministic: bool) -> tuple[str, str]:
    """The keys of the forward and of the backward kernels."""
    wants = (True, True, True, bool(spec.bias))
    backward = cuda_tiles.plan_backward(spec, (9, 0), wants=wants, deterministic=deterministic)
    return cuda_tiles.plan_forward(spec, (9, 0)).kernels, backward.kernels


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "deterministic"])
@pytest.mark.parametrize(("kib", "case"), CASES, ids=str)
def test_tiles_for_less_shared_memory(
    kib: int, case: Case, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(case)
    largest = kernels(spec, deterministic)
    monkeypatch.setattr(cuda_tiles, "shared_limit_bytes", lambda arch: kib * 1024)
    forward, backward = kernels(spec, deterministic)
    assert (forward, backward) != largest
    operands, solution = compare.solved(case)
    with jattn.deterministic("strict" if deterministic else "off"):
        outcome = run(case, operands, "mem_efficient")
    assert forward in outcome.lowered
    assert backward in outcome.lowered
    compare.assert_close(case, operands, outcome.results, solution=solution)
