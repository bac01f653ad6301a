"""The unit in which gradients of captures are added up exactly, run on the host: 64 bits hold every sum of it."""

import itertools
import subprocess
from pathlib import Path

import numpy as np
from test_document_tiles import SHIM
from toolchain import build_host_program

MAIN = """
inline double __longlong_as_double(long long x) { double y; std::memcpy(&y, &x, 8); return y; }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
#include "attn/capture_units.cuh"

int main() {
  std::cout.precision(17);
  unsigned largest;
  int pairs_log2, reads;
  while (std::cin >> largest >> pairs_log2 >> reads)
    std::cout << jattn::capture_units(largest, pairs_log2, reads) << '\\n';
}
"""


def test_room_for_all_that_pairs_add(tmp_path: Path) -> None:
    """A pair may read one element as often as it reads at all."""
    program = build_host_program(SHIM + MAIN, tmp_path, "-w")
    sizes = [0.0, 1e-45, 1e-38, 0.75, 1.0, float(np.nextafter(np.float32(2), np.float32(0))), 3e38]
    problems = list(itertools.product(sizes, (0, 7, 40), range(1, 9)))
    lines = [
        f"{np.float32(size).view(np.uint32)} {pairs} {reads}" for size, pairs, reads in problems
    ]
    done = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    for (size, pairs, reads), text in zip(problems, done.stdout.splitlines(), strict=True):
        units = float(text)
        assert np.log2(units).is_integer()
        most = round(float(np.float32(size)) * units) * reads * 2**pairs
        assert most <= 2**62
        if size >= 1e-38:  # and not more room than powers of two take
            assert most > 2**59


def test_sums_that_are_no_numbers(tmp_path: Path) -> None:
    program = build_host_program(SHIM + MAIN, tmp_path, "-w")
    infinity = np.float32(np.inf).view(np.uint32)
    done = subprocess.run(
        [program],
        input=f"{infinity} 9 1\n{infinity + 1} 9 8",
        capture_output=True,
        text=True,
        check=True,
    )
    assert [word.lstrip("-") for word in done.stdout.split()] == ["nan", "nan"]
