"""The drop warps of the Hopper forward kernel, run on the host: every probability of a tile meets its own decision.

The unit is compiled by the host compiler; the lanes of the drop warps, and then the threads of the consumers, are one
after the other.
"""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_document_tiles import KERNELS, SHIM
from test_dropout_bits import wanted
from test_slopes import MORE_SHIM
from toolchain import require_host_compiler

MAIN = """
#include "attn/dropout.cuh"
namespace jattn {
template <Config> Dropout dropout_of(const ProblemParams&, int, int) { return {}; }  // as QueryRowDrops
}
#include "sm90/drops.cuh"
#include "sm90/score.cuh"

using namespace jattn;
using namespace jattn::sm90;

// Prints for every pair of a tile whether its probability is kept.
template <int kTileKv>
void show(const Dropout& dropout, int q_begin, int kv_tile, int turn) {
  constexpr Config kConfig{.tile_q = 128, .tile_kv = kTileKv, .dropout = true, .drops_beside = true};
  constexpr int kStage = 1;
  static sm90::ForwardParams params{};
  static ForwardControl<kConfig> control{};
  for (int warp = 0; warp < kDropWarps; ++warp) {
    for (int lane = 0; lane < 32; ++lane) {
      threadIdx.x = 32 * (1 + warp) + lane;
      DropWarp<kConfig>{params, control, warp}.decide(dropout, {kv_tile, q_begin, 0, 0}, kStage, (warp + turn) % 3);
    }
  }
  static char kept[128][kTileKv];
  ItemRecord item{};
  for (int thread = 0; thread < 256; ++thread) {
    threadIdx.x = kWarpgroupThreads + thread;
    const int first_row = thread / 32 * 16, lane = thread % 32;
    const FragmentPlace place{first_row + lane / 4, lane % 4 * 2};
    TileDrops<kConfig> drops;
    drops.make({params, control, item, {kv_tile, 0}, kStage, 0, place, q_begin + first_row});
    unsigned p[kTileKv / 4];
    std::fill(std::begin(p), std::end(p), ~0u);
    drops.apply_packed(p);
    for (int i = 0; i < kTileKv / 2; ++i) {
      const unsigned half = p[i / 2] >> 16 * (i % 2) & 0xffffu;
      kept[place.row + i / 2 % 2 * 8][place.column + i / 4 * 8 + i % 2] = half == 0 ? 0 : half == 0xffffu ? 1 : 2;
    }
  }
  for (int i = 0; i < 128 * kTileKv; ++i) std::cout << int(kept[i / kTileKv][i % kTileKv]) << ' ';
}

int main() {
  Dropout dropout{};
  unsigned threshold;
  int tile_kv, q_begin, kv_tile, turn;
  std::cin >> dropout.key.low >> dropout.key.high >> threshold >> tile_kv >> q_begin >> kv_tile >> turn;
  dropout.threshold_high = threshold << 16;
  if (tile_kv == 128) show<128>(dropout, q_begin, kv_tile, turn);
  if (tile_kv == 96) show<96>(dropout, q_begin, kv_tile, turn);
  if (tile_kv == 64) show<64>(dropout, q_begin, kv_tile, turn);
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = require_host_compiler()
    folder = tmp_path_factory.mktemp("drops")
    (folder / "main.cc").write_text(SHIM + MORE_SHIM + MAIN)
    command = [compiler, "-std=c++20", "-O1", "-w", f"-I{KERNELS}", "-o", str(folder / "main")]
    subprocess.run([*command, str(folder / "main.cc")], check=True)
    return folder / "main"


@pytest.mark.parametrize("tile_kv", [64, 96, 128])
@pytest.mark.parametrize(
    ("q_begin", "kv_tile", "turn"), [(0, 0, 0), (384, 3, 1), (2**20, 70000, 2)]
)
@pytest.mark.parametrize("threshold", [0, 6554, 40000])
def test_every_pair_meets_its_decision(
    program: Path, tile_kv: int, q_begin: int, kv_tile: int, turn: int, threshold: int
) -> None:
    key = (0xA4093822, 0x299F31D0)
    words = " ".join(str(x) for x in (*key, threshold, tile_kv, q_begin, kv_tile, turn))
    done = subprocess.run([str(program)], input=words, capture_output=True, text=True, check=True)
    got = np.array([int(x) for x in done.stdout.split()]).reshape(128, tile_kv)
    dropped = [
        [
            wanted(key, q_begin + row, kv_tile * tile_kv + column, threshold)
            for column in range(0, tile_kv, 16)
        ]
        for row in range(0, 128, 16)
    ]
    np.testing.assert_array_equal(got, 1 - np.block(dropped))
