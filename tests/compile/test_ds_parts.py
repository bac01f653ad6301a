"""How stored gradients of scores become that of a bias that batch entries share (cc/cuda/ds_parts.h)."""

import dataclasses
import subprocess
from pathlib import Path

import pytest
from toolchain import KERNELS, build_host_program

from jattn.backends import flash_backward_tiles as tiles
from jattn.backends.kernel_plan import SCRATCH_ALIGNMENT
from jattn.spec import Spec

MAIN = """
#include <iostream>
#include <string>

#include "cuda/ds_parts.h"

// Arguments: whether entries share the bias, batch, key/value heads, group size, bytes of a head.
int main(int, char** arguments) {
  int64_t x[5];
  for (int i = 0; i < 5; ++i) x[i] = std::stoll(arguments[i + 1]);
  const jattn::cuda::DsParts ds(x[0], x[1], x[2], x[3], x[4]);
  std::cout << ds.parts << " " << ds.in_place << " " << ds.kv_heads;
}
"""
FEW = 64 << 20


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_host_program(MAIN, tmp_path_factory.mktemp("ds_parts"), f"-I{KERNELS.parent}")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 4, 5, 9, 32, 100])
@pytest.mark.parametrize("heads", [(1, 1), (12, 12), (16, 4)], ids=str)
@pytest.mark.parametrize("length", [8, 64, 512, 1024, 4096])
def test_parts(
    shared: bool, batch: int, heads: tuple[int, int], length: int, program: Path
) -> None:
    num_heads, num_kv_heads = heads
    group, head_bytes = num_heads // num_kv_heads, length * length * 2
    numbers = [str(int(x)) for x in (shared, batch, num_kv_heads, group, head_bytes)]
    done = subprocess.run([program, *numbers], check=True, capture_output=True, text=True)
    parts, in_place, kv_heads = map(int, done.stdout.split())
    bytes_of_parts = parts * kv_heads * group * head_bytes

    # Python plans the same scratch.
    first = 1 if shared else batch
    spec = Spec(batch, length, length, num_heads, num_kv_heads, 64, 64, "bfloat16", 0.1)
    spec = dataclasses.replace(spec, bias=(first, num_heads, length, length), bias_dtype="bfloat16")
    assert tiles.can_store_ds(spec)
    planned = tiles.plan_backward(spec, wants=(True,) * 4, deterministic=False).scratch_bytes
    own = dataclasses.replace(spec, bias=(batch, num_heads, length, length))
    without = tiles.plan_backward(own, wants=(True,) * 4, deterministic=False).scratch_bytes
    assert planned - without == (0 if in_place else bytes_of_parts + SCRATCH_ALIGNMENT)

    if not shared or batch == 1:
        assert (parts, in_place, kv_heads) == (batch, 1, num_kv_heads)
        return
    turns = -(-batch // parts)
    assert turns <= 4
    assert in_place == (parts == 1)
    # Turns are as even as can be, and more than one only where places for all entries would be too many bytes.
    assert turns * parts - batch < turns
    assert turns == 1 or batch * num_heads * head_bytes > FEW
    if not in_place:
        of_one = parts * group * head_bytes
        assert bytes_of_parts <= max(FEW, num_heads * head_bytes, of_one)
