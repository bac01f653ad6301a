"""Warps that cast dq beside products (``backward_caster.cuh``): where their lanes find sums and write them."""

import itertools
import subprocess
from pathlib import Path

import numpy as np
import pytest
import test_flash_terms
import toolchain
from test_document_tiles import BACKWARD_WORK, SHIM
from test_dq_order import FILTERS, WITHOUT_FILTERS, key_of_fused

MAIN = """
#undef __shared__
#define __shared__
#define __align__(bytes)
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
float __fmaf_rz(float, float, float);  // of device code that is not called here, as the next
int atomicCAS(int*, int, int);
bool __all_sync(unsigned, bool);
#include "sm90/backward_caster.cuh"

using namespace jattn;
using namespace jattn::sm90;

// Of each sum of a tile that a caster reads: its place in the accumulator, and the row and column where it goes.
template <int kTileQ, int kHeadDim>
void print_tile() {
  constexpr Config kConfig{.head_dim = kHeadDim, .head_dim_v = kHeadDim, .tile_q = kTileQ, .tile_kv = 128};
  int row = 0, column = 0;
  for (int step = 0; step < kTileQ * kHeadDim / kCastStepFloats; ++step) {
    for (unsigned lane = 0; lane < 32; ++lane) {
      for (int half = 0; half < 2; ++half) {
        for (int group = 0; group < 2; ++group) {
          for (int i = 0; i < 4; ++i) {
            const unsigned place = step * kCastStepFloats + 4 * (cast_sums(lane) + half * kCastHalf + group) + i;
            std::cout << place << ' ' << row + lane / 4 + i / 2 * 8 << ' '
                      << column + half * 16 + lane % 4 * 4 + group * 2 + i % 2 << std::endl;
          }
        }
      }
    }
    const CastMove move = move_after_step<kConfig>(step);
    row += move.rows;
    column += move.columns;
  }
}

int main() {
  int tile_q = 0, head_dim = 0;
  std::cin >> tile_q >> head_dim;
  if (tile_q == 64 && head_dim == 64) print_tile<64, 64>();
  if (tile_q == 64 && head_dim == 128) print_tile<64, 128>();
  if (tile_q == 128 && head_dim == 64) print_tile<128, 64>();
}
"""


def accumulator_places(tile_q: int, head_dim: int) -> np.ndarray:
    """Where the accumulator holds each row and column of a tile, by the order that ``backward_cast.cuh`` describes."""
    columns = head_dim if tile_q == 128 else head_dim // 2
    places = np.full((tile_q, head_dim), -1)
    place = 0
    for warpgroup in range(2):
        for warp in range(4):
            row = 16 * warp + (64 * warpgroup if tile_q == 128 else 0)
            first = 0 if tile_q == 128 else columns * warpgroup
            for block in range(0, columns, 8):
                # A fragment of 16 x 8: a lane has two columns of a row, then of that eight below.
                for lane, i in itertools.product(range(32), range(4)):
                    at_row = row + lane // 4 + 8 * (i // 2)
                    at_column = first + block + 2 * (lane % 4) + i % 2
                    assert places[at_row, at_column] == -1
                    places[at_row, at_column] = place
                    place += 1
    return places


@pytest.mark.parametrize("tile", [(64, 64), (64, 128), (128, 64)], ids=str)
def test_each_sum_goes_where_it_belongs(tile: tuple[int, int], tmp_path: Path) -> None:
    program = toolchain.build_host_program(SHIM + BACKWARD_WORK + MAIN, tmp_path, "-w")
    words = " ".join(str(x) for x in tile)
    done = subprocess.run([program], input=words, capture_output=True, text=True, check=True)
    found = np.full(tile, -1)
    for place, row, column in np.array(done.stdout.split(), int).reshape(-1, 3):
        assert found[row, column] == -1, "written twice"
        found[row, column] = place
    np.testing.assert_array_equal(found, accumulator_places(*tile))


def casters(key: str, folder: Path) -> int:
    """How often a kernel discards sums, which nothing but a caster does."""
    code, _ = toolchain.compile_once(key)
    return toolchain.disassemble(code, folder).count(" CCTL.E.RML2 ")


CASTING = WITHOUT_FILTERS | {name: FILTERS[name] for name in ("positions", "mask")}
NOT_CASTING = {
    "no senders": (WITHOUT_FILTERS["plain"], 0),
    "in order": (WITHOUT_FILTERS["plain"], 2),
    "documents": (FILTERS["segments"], 1),
}


@pytest.mark.parametrize("name", CASTING)
def test_kernels_with_senders_have_a_caster(name: str, tmp_path: Path) -> None:
    toolchain.require_nvrtc()
    head_dims, changes = CASTING[name]
    assert casters(key_of_fused(test_flash_terms.problem(head_dims, **changes), 1), tmp_path) == 1


@pytest.mark.parametrize("name", NOT_CASTING)
def test_other_kernels_have_none(name: str, tmp_path: Path) -> None:
    toolchain.require_nvrtc()
    (head_dims, changes), order = NOT_CASTING[name]
    key = key_of_fused(test_flash_terms.problem(head_dims, **changes), order)
    assert casters(key, tmp_path) == 0
