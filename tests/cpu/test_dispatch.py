"""Who runs what: (problem, device) -> backend, compared with tests/golden/dispatch.txt, which is reviewed as a diff.

Rewrite the file with `JATTN_WRITE_GOLDEN=1 pytest tests/cpu/test_dispatch.py -k golden` and read the difference.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import pytest

import jattn
from jattn.testing import inputs
from jattn.testing.cases import Case

GOLDEN = Path(__file__).parents[1] / "golden" / "dispatch.txt"

DEVICES = {
    "cpu": jattn.Device("cpu"),
    "sm75": jattn.Device("cuda", arch=(7, 5)),
    "sm80": jattn.Device("cuda", arch=(8, 0)),
    "sm86": jattn.Device("cuda", arch=(8, 6)),
    "sm90": jattn.Device("cuda", arch=(9, 0)),
    "sm100": jattn.Device("cuda", arch=(10, 0)),
    "tpu": jattn.Device("tpu"),
}
BASE = Case(name="bf16", q_len=128, kv_len=128, dtype="bfloat16")


def but(name: str, **changes: Any) -> Case:
    return dataclasses.replace(BASE, name=name, **changes)


PROBLEMS = (
    BASE,
    but("f16", dtype="float16"),
    but("f32", dtype="float32"),
    but("f64", dtype="float64"),
    but("causal", is_causal=True),
    but("causal non-square", is_causal=True, q_len=100),
    but("window lower right", window=(16, 4), lower_right=True),
    but("lengths", q_lengths=(3, 128), kv_lengths=(0, 100)),
    but("segments", segments="random"),
    but("softcap", softcap=30.0),
    but("mask", mask_form="b1ts"),
    but("bias", bias_form="1nts"),
    but("bias f32", dtype="float32", bias_form="s"),
    but("grouped heads", num_heads=8, num_kv_heads=2),
    but("negative scale", scale=-1.0),
    but("scale 0", scale=0.0),
    but("decode", q_len=1, kv_len=4096),
    but("T = 0", q_len=0),
    but("S = 0", kv_len=0),
    but("D 1", head_dim=1, head_dim_v=1),
    but("D 21", head_dim=21, head_dim_v=21),
    but("D 256", head_dim=256, head_dim_v=256),
    but("D 257", head_dim=257, head_dim_v=257),
    but("D 512", head_dim=512, head_dim_v=512),
    but("D 513", head_dim=513, head_dim_v=513),
    but("D 128, Dv 64", head_dim=128),
    but("f32 D 512", dtype="float32", head_dim=512, head_dim_v=512),
)


def explained(
    case: Case, device: jattn.Device, *, needs_grad: bool, batch: int | None = None
) -> jattn.Explanation:
    case = case if batch is None else dataclasses.replace(case, batch=batch)
    with jax.enable_x64(case.dtype == "float64"):
        (q, k, v), keywords = inputs.call_arguments(case, inputs.make(case))
        return jattn.explain(q, k, v, device=device, needs_grad=needs_grad, **keywords)


def table() -> str:
    """One line a problem: the backend on each device, as forward/with gradient where the two differ."""
    rows = [["problem", *DEVICES]]
    for case in PROBLEMS:
        row = [case.name]
        for device in DEVICES.values():
            chosen = [
                explained(case, device, needs_grad=needs_grad).chosen
                for needs_grad in (False, True)
            ]
            row.append(str(chosen[0]) if chosen[0] == chosen[1] else f"{chosen[0]}/{chosen[1]}")
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        + "\n"
        for row in rows
    )


def test_golden() -> None:
    made = table()
    if os.environ.get("JATTN_WRITE_GOLDEN"):
        GOLDEN.write_text(made)
    assert made == GOLDEN.read_text()


@pytest.mark.parametrize("device", list(DEVICES))
def test_the_batch_size_does_not_change_the_choice(device: str) -> None:
    """vmap changes the batch between the two times the question is asked."""
    for case in (BASE, but("lengths", kv_lengths=(5,)), but("mask", mask_form="b1ts")):
        chosen = set()
        for batch in (1, 2, 70_000 if case is BASE else 8):
            lengths = None if case.kv_lengths is None else case.kv_lengths * batch
            one = dataclasses.replace(
                case, kv_lengths=lengths, q_len=2, kv_len=2, num_heads=1, num_kv_heads=1, head_dim=8
            )
            chosen.add(explained(one, DEVICES[device], needs_grad=True, batch=batch).chosen)
        assert len(chosen) == 1


@pytest.mark.parametrize("device", ["sm80", "sm86", "sm90"])
@pytest.mark.parametrize("case", [c for c in PROBLEMS if c.dtype != "float64"], ids=str)
def test_what_is_admitted_for_cuda_can_be_lowered(case: Case, device: str) -> None:
    """A choice made while tracing must hold in the lowering: on a machine without a GPU this makes every plan."""
    operands = inputs.make(case)
    (q, k, v), keywords = inputs.call_arguments(case, operands)
    where = DEVICES[device]
    chosen = explained(case, where, needs_grad=True).chosen
    if chosen not in ("flash", "mem_efficient"):
        assert chosen == "xla"
        return

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jattn.dot_product_attention(q, k, v, **keywords).astype("float32").sum()

    with jattn.target_device(where):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jattn_forward" in text
    assert "jattn_backward" in text


def test_explain_is_readable() -> None:
    """A person finds the problem, the choice, and the way out of every refusal."""
    case = but("mask", mask_form="b1ts", dtype="float32")
    text = str(explained(case, DEVICES["sm90"], needs_grad=True))
    for words in (
        "cuda sm_90, forward and backward",
        "q float32 (2, 128, 2, 64)",
        "mask",
        "chosen: mem_efficient",
        "flash: refuses",
    ):
        assert words in text


def test_explain_takes_shapes_and_runs_nothing() -> None:
    x = jax.ShapeDtypeStruct((1, 1 << 20, 64, 128), "bfloat16")  # 16 GiB, if it existed
    ids = jax.ShapeDtypeStruct((1, 1 << 20), "int32")
    assert (
        jattn.explain(x, x, x, segment_ids=ids, device=DEVICES["sm90"], needs_grad=True).chosen
        == "flash"
    )
    with pytest.raises(TypeError, match="sgment_ids"):
        jattn.explain(x, x, x, sgment_ids=ids)
