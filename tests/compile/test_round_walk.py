"""The order in which an item of the Hopper backward visits its tiles of queries, compiled by the host compiler."""

import subprocess
from pathlib import Path

import pytest
import toolchain
from test_document_tiles import BACKWARD_WORK, SHIM

MAIN = """
using namespace jattn;
using namespace jattn::sm90;

template <bool kBand>
void print_tiles(int begin, int count, int64_t shift) {
  constexpr Config kConfig{.tile_q = 64, .tile_kv = 128, .num_warps = 12, .band = kBand, .schedule = 2,
                           .bulk_reduce = true, .dq_order = 1};
  static_assert(may_begin_late(kConfig) == kBand);
  RoundWalk<kConfig> walk{begin, count, 0};
  walk.shift_start(shift);
  for (int tile = walk.next(); tile >= 0; tile = walk.next()) std::cout << tile << ' ';
  std::cout << std::endl;
}

int main() {
  bool band;
  int begin, count;
  int64_t shift;
  while (std::cin >> band >> begin >> count >> shift) {
    band ? print_tiles<true>(begin, count, shift) : print_tiles<false>(begin, count, shift);
  }
}
"""
COUNTS = (0, 1, 2, 3, 8, 17)
SHIFTS = (0, 1, 2, 7, 30, 1 << 33)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toolchain.build_host_program(
        SHIM + BACKWARD_WORK + MAIN, tmp_path_factory.mktemp("round_walk"), "-w"
    )


@pytest.mark.parametrize("has_band", [False, True])
def test_walks_go_round_from_a_shifted_start(program: Path, *, has_band: bool) -> None:
    """With a band the first tile, which may be left out for half of the keys, comes first all the same."""
    cases = [(count, shift) for count in COUNTS for shift in SHIFTS]
    text = "\n".join(f"{int(has_band)} 5 {count} {shift}" for count, shift in cases)
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    walks = [[int(x) for x in line.split()] for line in done.stdout.splitlines()]
    for (count, shift), walk in zip(cases, walks, strict=True):
        tiles = list(range(5, 5 + count))
        first, others = (tiles[:1], tiles[1:]) if has_band else ([], tiles)
        start = shift % len(others) if others else 0
        assert walk == first + others[start:] + others[:start], (count, shift)
