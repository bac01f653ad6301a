"""Plans of mem_efficient for problems with a score function: the program travels beside the keys that name it."""

import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jattn
from jattn import _core, cpu_program, ffi
from jattn.backends import Residuals, Wants, cuda_tiles, few_queries
from jattn.backends.kernel_plan import program_text
from jattn.backends.mem_efficient import MemEfficientBackend
from jattn.score_program import trace
from jattn.spec import Operands, Spec

ARCH = (8, 0)
SM80 = jattn.Device("cuda", arch=ARCH)


def capped(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return 20.0 * jnp.tanh(score / 20.0)


def sorted_capture(score: Any, batch: Any, head: Any, query: Any, key: Any, bias: Any) -> Any:
    return score + jnp.sort(bias * key)[0]


PLAIN = Spec(2, 512, 512, 8, 2, 64, 64, "bfloat16", 0.125)
SPEC = dataclasses.replace(PLAIN, score_mod=trace(capped, (), 2)[0])
TEXT = program_text(SPEC)
WANTS = (True, True, True, False)


@pytest.mark.parametrize("deterministic", [False, True, None])
def test_the_keys_name_the_program(deterministic: bool | None) -> None:
    """Those of the kernels that scores pass through; the others are as ever."""
    if deterministic is None:
        plan = cuda_tiles.plan_forward(SPEC, ARCH)
        plain = cuda_tiles.plan_forward(PLAIN, ARCH)
    else:
        given: Any = {"wants": WANTS, "deterministic": deterministic}
        plan = cuda_tiles.plan_backward(SPEC, ARCH, **given)
        plain = cuda_tiles.plan_backward(PLAIN, ARCH, **given)
    digest = hashlib.sha256(TEXT.encode()).hexdigest()
    assert plan.attributes("x") == {"backend": "x", "kernels": plan.kernels, "program": TEXT}
    assert "program" not in plain.attributes("x")
    for key in plan.kernels.split(";"):
        of_scores = key.startswith("family=sm80_")
        assert (f"program=1 digest={digest}" in key) == of_scores
        assert ("program" in key) == of_scores
    assert "program" not in plain.kernels
    assert _core.register_program(TEXT) == digest


def test_few_queries_are_left_alone() -> None:
    """Heads and keys keep the numbers that the function is given."""
    few = dataclasses.replace(PLAIN, q_len=1, kv_len=16384)

    def tile_of(queries: int) -> tuple[int, int]:
        return cuda_tiles.tile_of_queries(few, ARCH, queries)

    assert few_queries.choose(few, tile_of) != (False, 1)
    assert few_queries.choose(dataclasses.replace(few, score_mod=SPEC.score_mod), tile_of) == (
        False,
        1,
    )


def test_what_device_code_refuses_is_refused() -> None:
    program = trace(sorted_capture, (jnp.zeros(512),), 2)[0]
    backend = MemEfficientBackend()
    given: Any = {"needs_grad": True, "determinism": "relaxed"}
    assert not backend.unsupported(SPEC, SM80, **given)
    [reason] = backend.unsupported(dataclasses.replace(PLAIN, score_mod=program), SM80, **given)
    assert (reason.code, reason.argument) == ("CAPTURE_ACCESS", "score_mod")


def test_a_lowered_call_holds_the_program() -> None:
    x = jax.ShapeDtypeStruct((2, 128, 4, 64), "bfloat16")
    with jattn.target_device(SM80):
        lowered = jax.jit(
            lambda x: jattn.dot_product_attention(
                x, x, x, score_mod=capped, implementation="mem_efficient"
            )
        ).trace(x)
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert "struct ScoreProgram" in text
    assert "num_captures = 0 : i64" in text


def biased(score: Any, batch: Any, head: Any, query: Any, key: Any, table: Any) -> Any:
    return score + table[head, query - key + 256]


BIASED = dataclasses.replace(PLAIN, score_mod=trace(biased, (jnp.zeros((8, 512)),), 2)[0])


def scratch_bytes_of_captures(kernels: str) -> int:
    """What the gradients of the captures of BIASED need."""
    return _core.cuda_scratch_bytes(
        backward=True,
        kernels=kernels,
        wants=[False] * 5,
        batch=2,
        q_len=512,
        kv_len=512,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        head_dim_v=64,
        dtype="bfloat16",
        bias_shape=[0] * 4,
        segments=False,
        capture_elements=8 * 512,
    )


@pytest.mark.parametrize("deterministic", [False, True])
def test_plans_of_gradients_of_captures(deterministic: bool) -> None:
    plan = cuda_tiles.plan_capture_gradients(BIASED, ARCH, (True,), deterministic=deterministic)
    ours = ["sm80_backward_dcaptures", "capture_sums"]
    if deterministic:
        ours = ["sm80_backward_dcaptures_sizes", "sm80_backward_dcaptures_exact", "capture_sums"]
    families = [key.split()[0].removeprefix("family=") for key in plan.kernels.split(";")]
    assert families == ["row_delta", *ours]
    digest = _core.register_program(plan.program)
    assert plan.kernels.count(f"program=1 digest={digest}") == len(ours)
    assert program_text(BIASED) != plan.program
    needed = scratch_bytes_of_captures(plan.kernels)
    assert needed <= plan.scratch_bytes < needed + 2048


@pytest.mark.parametrize("missing", ["sizes", "exact"])
def test_whole_numbers_need_their_unit(missing: str) -> None:
    """A plan with one of two kernels that belong together is refused, and by no null pointer."""
    plan = cuda_tiles.plan_capture_gradients(BIASED, ARCH, (True,), deterministic=True)
    _core.register_program(plan.program)
    keys = [key for key in plan.kernels.split(";") if f"dcaptures_{missing} " not in key]
    assert len(keys) == 3
    with pytest.raises(ValueError, match="must have both or none"):
        scratch_bytes_of_captures(";".join(keys))


@pytest.mark.parametrize("backend", ["flash", "mem_efficient"])
@pytest.mark.parametrize("determinism", ["off", "strict"])
def test_gradients_of_captures_come_from_kernels(backend: str, determinism: Any) -> None:
    """And from nothing else: the program multiplies no matrices and has no loops."""
    device = jattn.Device("cuda", arch=(9, 0))
    x = jax.ShapeDtypeStruct((2, 512, 8, 64), "bfloat16")
    table = jax.ShapeDtypeStruct((8, 512), "float32")

    def loss(table: jax.Array, x: jax.Array) -> jax.Array:
        out = jattn.dot_product_attention(
            x, x, x, score_mod=biased, captures=(table,), implementation=backend
        )
        return out.astype(jnp.float32).sum()

    with jattn.target_device(device), jattn.deterministic(determinism):
        lowered = jax.jit(jax.grad(loss)).trace(table, x).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    exact = "family=sm80_backward_dcaptures_exact" in text
    assert exact == (determinism == "strict")
    assert exact or "family=sm80_backward_dcaptures " in text
    assert "sm90_backward" not in text
    assert "dot_general" not in text
    assert "stablehlo.while" not in text


def test_the_native_module_refuses_what_it_cannot_compute() -> None:
    x = jnp.ones((2, 512, 8, 64), jnp.bfloat16)
    operands = Operands(
        *(x, x[:, :, :2], x[:, :, :2]),
        batch_ids=jnp.arange(2, dtype=jnp.int32),
        head_ids=jnp.arange(8, dtype=jnp.int32),
        captures=(jnp.zeros((8, 512)),),
    )
    residuals = Residuals(out=x, lse=jnp.ones((2, 8, 512)), dout=x, dlse=None)
    wants = Wants(q=False, k=False, v=False, bias=False)

    def call() -> Any:
        program = cpu_program.cpu_program(BIASED.score_mod, by_position=False, slope=True)
        plan = {"backend": "cpu", "kernels": "", "program": program}
        return ffi.backward(BIASED, operands, residuals, wants, plan, (1,), captures=(True,))

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"plan\.gradients is missing"):
        jax.block_until_ready(jax.jit(call)().captures)
