"""The parts of a bias that are a step of the first product of the Hopper forward, split on the host.

The unit is compiled by the host compiler. What the matrix unit makes of the parts is their sum, which is exact here.
"""

import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from test_document_tiles import SHIM
from test_slopes import MORE_SHIM
from toolchain import build_host_program

from jattn.backends import flash_tiles

MAIN = """
#include "sm90/bias_step.cuh"
#include "sm90/forward_params.cuh"

using namespace jattn;
using namespace jattn::sm90;

// The tile of 16 columns as the matrix unit finds it by the descriptor, and where the kernel stores the parts of a key.
template <int kTileKv>
void show_places(unsigned address) {
  constexpr Config kConfig{.tile_kv = kTileKv, .bias = true, .row_bias = true, .bias_in_product = true};
  std::cout << kTileKv << ' ' << address << ' ' << bias_step_descriptor<kConfig>(address) << ' '
            << bias_step_bytes(kConfig) << ' ' << kBiasPartsBytes << '\\n';
}

int main(int argc, char**) {
  if (argc > 1) {
    show_places<128>(0x30000);
    show_places<96>(0x1c400);
    show_places<64>(0x800);
    return 0;
  }
  float scale, inverse_scale;
  uint32_t bits;
  std::cin >> bits;
  scale = __uint_as_float(bits);
  inverse_scale = float(1.0 / double(scale));
  std::cout << __float_as_uint(kLeastScale) << ' ' << __float_as_uint(kLargestScale) << '\\n';
  while (std::cin >> bits) {
    const BiasParts parts = split_bias(__uint_as_float(bits), scale, inverse_scale);
    std::cout << parts.first << ' ' << parts.second << '\\n';
  }
}
"""
LARGEST = 2.0**126
SCALES = [128**-0.5, 0.125, 1.0, 0.1, 1 / 3, 2.0**-20, 2.0]
FLOATS = np.finfo(np.float32)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = SHIM + MORE_SHIM + MAIN
    return build_host_program(text, tmp_path_factory.mktemp("parts"), "-w", "-ffp-contract=off")


def split(program: Path, biases: np.ndarray, scale: float) -> np.ndarray:
    """The parts of each bias as float64: (biases, 4)."""
    words = np.concatenate([np.float32([scale]), biases.astype(np.float32)]).view(np.uint32)
    text = "\n".join(str(word) for word in words)
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    limits, *lines = done.stdout.splitlines()
    known = np.float32([flash_tiles.LEAST_PRODUCT_SCALE, flash_tiles.LARGEST_PRODUCT_SCALE])
    assert [int(word) for word in limits.split()] == known.view(np.uint32).tolist()
    pairs = np.array([[int(word) for word in line.split()] for line in lines], np.uint32)
    return pairs.view(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)


def drawn() -> np.ndarray:
    """Biases of every size, and the neighbours of powers of two."""
    rng = np.random.default_rng(0)
    powers = np.float32(2.0) ** rng.integers(-100, 100, 4000).astype(np.float32)
    sizes = rng.standard_normal(4000).astype(np.float32) * powers
    edges = np.float32(2.0) ** np.arange(-40, 100, dtype=np.float32)
    edges = np.concatenate([np.nextafter(edges, np.float32(x)) for x in (-np.inf, np.inf)])
    return np.concatenate([sizes, edges, -edges])


@pytest.mark.parametrize("scale", SCALES)
def test_parts_add_up_to_the_quotient(program: Path, scale: float) -> None:
    biases = drawn()
    wanted = biases.astype(np.float64) / np.float64(np.float32(scale))
    biases, wanted = biases[np.abs(wanted) < LARGEST], wanted[np.abs(wanted) < LARGEST]
    assert biases.size > 3000
    parts = split(program, biases, scale)
    error = np.abs(parts.sum(axis=1) - wanted) / np.abs(wanted)
    assert error.max() <= 2.0**-24 * (1 + 2.0**-20)  # half a unit of float32
    assert np.all(parts[:, 3] == 0)


@pytest.mark.parametrize("scale", SCALES)
def test_a_scale_that_is_a_power_of_two_gives_the_bias_itself(program: Path, scale: float) -> None:
    biases = np.float32([-1e9, 1 / 3, -7.25, 65504.0])
    quotients = split(program, biases, scale).sum(axis=1)
    exact = quotients * np.float64(np.float32(scale)) == biases
    assert np.all(exact) == (np.frexp(np.float32(scale))[0] == 0.5)


@pytest.mark.parametrize("scale", SCALES)
def test_biases_that_are_no_ordinary_numbers(program: Path, scale: float) -> None:
    least_nan = np.uint32([0x7F800001, 0xFF800001]).view(np.float32)
    biases = np.concatenate([np.float32([-np.inf, np.inf, np.nan, 0.0]), least_nan])
    parts = split(program, biases, scale)
    assert parts[:4, 0].tolist()[:2] == [-np.inf, np.inf]
    assert np.all(parts[:4, 1:] == 0)
    assert np.isnan(parts[[2, 4, 5], 0]).all()
    assert parts[3, 0] == 0


@pytest.mark.parametrize("scale", SCALES)
def test_the_least_floats_stay_finite_in_every_unit_of_the_kernel(
    program: Path, scale: float
) -> None:
    least = [FLOATS.min, float(ml_dtypes.finfo(ml_dtypes.bfloat16).min), 0.7 * FLOATS.min]
    biases = np.float32([*least, FLOATS.max])
    quotients = split(program, biases, scale).sum(axis=1)
    assert np.all(np.abs(quotients) <= LARGEST)
    if scale < 0.1:
        assert np.all(quotients[:3] == -LARGEST)
    assert np.all(np.abs(quotients) * scale * np.log2(np.e) < FLOATS.max)
    assert np.all(np.abs(quotients) * scale >= 2.0**100)  # beyond every other score


def test_the_matrix_unit_finds_the_parts(program: Path) -> None:
    """By PTX ISA, "matrix descriptor": K-major, no swizzle, core matrices of 8 rows of 16 bytes."""
    done = subprocess.run([program, "places"], capture_output=True, text=True, check=True)
    shown = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    assert [row[0] for row in shown] == [128, 96, 64]
    for tile_kv, address, descriptor, tile_bytes, parts_bytes in shown:
        assert descriptor >> 46 == 0  # no swizzle, no base offset
        start, leading, stride = ((descriptor >> bit & 0x3FFF) * 16 for bit in (0, 16, 32))
        assert start == address
        key, column = np.mgrid[:tile_kv, :16]
        place = column // 8 * leading + key // 8 * stride + key % 8 * 16 + column % 8 * 2
        assert np.array_equal(place[:, :4], key[:, :4] * parts_bytes + column[:, :4] * 2)
        assert np.array_equal(np.sort(place, axis=None), np.arange(0, tile_bytes, 2))


def test_subnormal_biases(program: Path) -> None:
    biases = np.float32([FLOATS.smallest_subnormal, -FLOATS.tiny / 2, FLOATS.tiny])
    sums = split(program, biases, 1.0).sum(axis=1)
    assert np.abs(sums - biases.astype(np.float64)).max() <= 2.0**-133  # the least bfloat16
