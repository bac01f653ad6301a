"""``fuse_attention`` on a GPU: attention as families of models write it runs by our kernels."""

import jax
import pytest
from model_programs import IN_BFLOAT16, PROGRAMS, Program, check_program

import jattn

pytestmark = pytest.mark.usefixtures("clean_fusion_log")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_attention_of_models(program: Program) -> None:
    jattn.reset_call_counters()
    with jax.default_matmul_precision("highest"):
        check_program(program)
    ran = {name for name, passes in jattn.call_counters().items() if any(passes.values())}
    assert ran == {"flash" if program in IN_BFLOAT16 else "mem_efficient"}
