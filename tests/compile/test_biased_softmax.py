"""The softmax of scores with a bias of the keys, run on the host: biases of every size, tile by tile.

One thread has two whole rows. As in the kernel, rows settle, at zero if they can, where the bias is the addend of the
exponent; and where their sums say that they did so too early they are computed again.
"""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_document_tiles import SHIM
from test_slopes import MORE_SHIM
from toolchain import build_host_program

MAIN = """
#define exp2_fast exp2_of_device
#define as_pair as_pair_of_device
#define read_pair read_pair_of_device
#include "base/numeric.cuh"
#undef exp2_fast
#undef as_pair
#undef read_pair
namespace jattn {
inline float exp2_fast(float x) { return std::exp2(x); }
inline uint64_t as_pair(const float (&values)[2]) {
  uint64_t pair;
  std::memcpy(&pair, values, sizeof(pair));
  return pair;
}
inline void read_pair(float (&values)[2], uint64_t pair) { std::memcpy(values, &pair, sizeof(pair)); }
}
#include "sm90/softmax.cuh"

using namespace jattn;
using namespace jattn::sm90;

constexpr int kColumns = 8;  // of a tile

int main() {
  int tiles, may_settle;
  float scale;
  std::cin >> may_settle >> scale >> tiles;
  const auto read = [] {
    uint32_t bits;
    std::cin >> bits;
    return __uint_as_float(bits);
  };
  OnlineSoftmax<ScoreUnits::kNatural, true, true, 48> softmax;
  softmax.scale_log2 = float(scale * 1.4426950408889634);
  softmax.reset(true, true, may_settle != 0);
  std::vector<float> weights[2];
  for (int tile = 0; tile < tiles; ++tile) {
    float s[2 * kColumns], biases[2 * kColumns];
    const bool merges = softmax.at_zero();
    if (merges) softmax.rescale = false;
    for (int j = 0; j < kColumns; ++j) {
      for (int r = 0; r < 2; ++r) {
        const float product = read(), bias = read();
        const int place = j / 2 * 4 + 2 * r + j % 2;
        s[place] = merges ? product : std::fma(product, scale, bias);
        biases[place] = bias;
      }
    }
    if (merges) {
      softmax.sum_tile([&](float (&sum)[2]) {
        for (int i = 0; i < 2 * kColumns; ++i) softmax.merge(s[i], biases[i] * kLog2E, sum[i / 2 % 2]);
      });
    }
    if (!merges) softmax.update<-1>(s, true, [](auto&, auto&) {});
    for (int r = 0; r < 2; ++r) {
      for (float& weight : weights[r]) weight *= softmax.rescale ? softmax.alpha[r] : 1.0f;
      for (int j = 0; j < kColumns; ++j) weights[r].push_back(s[j / 2 * 4 + 2 * r + j % 2]);
    }
  }
  std::cout.precision(17);
  std::cout << softmax.settled() + softmax.at_zero() << ' ' << softmax.sum_beyond(0x1p100f) << '\\n';
  for (int r = 0; r < 2; ++r) {
    const float lse = softmax.bounded_lse(softmax.natural_max(r) + std::log2(softmax.row_sum[r]) * kLn2);
    std::cout << softmax.row_max[r] << ' ' << softmax.row_sum[r] << ' ' << lse;
    for (float weight : weights[r]) std::cout << ' ' << weight;
    std::cout << '\\n';
  }
}
"""
SCALE = float(np.float32(128**-0.5))
FLOATS = np.finfo(np.float32)
OPEN, SETTLED, AT_ZERO = range(3)
COLUMNS, TILES = 8, 4


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = SHIM + MORE_SHIM + MAIN
    return build_host_program(text, tmp_path_factory.mktemp("softmax"), "-w", "-ffp-contract=off")


@pytest.fixture(scope="module")
def program_of_float16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = SHIM + MORE_SHIM + MAIN.replace("true, 48>", "true, 8>")
    assert text.count("true, 8>") == 1
    return build_host_program(text, tmp_path_factory.mktemp("half"), "-w", "-ffp-contract=off")


@pytest.mark.parametrize(
    ("bias", "state"), [(-5.5, 1), (-1.0, 1), (-0.5, 2), (0.0, 2), (5.5, 2), (6.0, 1)]
)
def test_float16_settles_at_zero_only_where_probabilities_stay_large(
    program_of_float16: Path, bias: float, state: int
) -> None:
    """Float16 rounds small probabilities to multiples of 2^-24: rows far below zero keep their maximum."""
    products, biases = np.zeros((2, COLUMNS * TILES)), np.full(COLUMNS * TILES, bias)
    settled, lost, found = run_once(program_of_float16, products, biases, may_settle=True)
    assert (settled, lost) == (state, False)
    if state != AT_ZERO:
        np.testing.assert_allclose(found[:, 3:], 1.0, rtol=1e-5)


def run_once(
    program: Path, products: np.ndarray, biases: np.ndarray, *, may_settle: bool
) -> tuple[int, bool, np.ndarray]:
    """How the rows settled, whether they are lost, and (2, 3 + keys): maximum, sum, lse and weights."""
    keys = products.shape[1]
    pairs = np.stack([products.T, np.broadcast_to(biases, products.shape).T], axis=2)
    words = pairs.astype(np.float32).view(np.uint32).reshape(-1)
    text = " ".join([str(int(may_settle)), repr(SCALE), str(keys // COLUMNS), *map(str, words)])
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    first, *rows = done.stdout.splitlines()
    settled, lost = first.split()
    return int(settled), lost == "1", np.array([row.split() for row in rows]).astype(np.float64)


def run(
    program: Path, products: np.ndarray, biases: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights over their sum (2, keys), the sum (2,) and the lse (2,) of two rows."""
    _, lost, found = run_once(program, products, biases, may_settle=True)
    if lost:
        settled, lost, found = run_once(program, products, biases, may_settle=False)
        assert settled == OPEN
        assert not lost
    with np.errstate(invalid="ignore"):
        return found[:, 3:] / found[:, 1:2], found[:, 1], found[:, 2]


def drawn() -> np.ndarray:
    """Products of random queries and keys of 128 numbers."""
    random = np.random.default_rng(1).standard_normal((2, COLUMNS * TILES))
    return np.asarray(random * 128**0.5, np.float32)


def exact(products: np.ndarray, biases: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The softmax and the lse."""
    s = products.astype(np.float64) * SCALE + biases.astype(np.float64)
    greatest = s.max(axis=1, keepdims=True)
    weights = np.exp(s - greatest)
    total = weights.sum(axis=1, keepdims=True)
    return weights / total, (greatest + np.log(total))[:, 0]


@pytest.mark.parametrize("size", [0.0, 1.0, 30.0, 1e4, 1e6])
@pytest.mark.parametrize("shift", [0.0, -1.0, 1.0])
def test_finite_biases(program: Path, size: float, shift: float) -> None:
    random = np.random.default_rng(2).standard_normal(COLUMNS * TILES)
    products, biases = drawn(), np.asarray(random + shift * size, np.float32)
    weights, _, lse = run(program, products, biases)
    wanted, wanted_lse = exact(products, biases)
    error = 2.0**-22 * (size + 4)  # of a score
    assert np.abs(weights / wanted - 1).max() <= np.expm1(2 * error) + 1e-6
    assert np.abs(lse - wanted_lse).max() <= 2 * error


@pytest.mark.parametrize("number", [-np.inf, FLOATS.min, 0.7 * FLOATS.min, -1e30, -1e9, -1e4])
@pytest.mark.parametrize("seen", [0, 5, 9, 31])
def test_hidden_keys_leave_nothing(program: Path, number: float, seen: int) -> None:
    """All keys but one or two are hidden, first or last of the row: whole tiles before or behind."""
    biases = np.full(COLUMNS * TILES, number, np.float32)
    biases[[seen, seen // 2]] = [1.0, -2.0]
    products = drawn()
    weights, _, lse = run(program, products, biases)
    places = sorted({seen, seen // 2})
    wanted, wanted_lse = exact(products[:, places], biases[places])
    assert np.abs(weights[:, places] - wanted).max() <= 1e-6
    assert np.all(np.delete(weights, places, axis=1) == 0)
    assert np.abs(lse - wanted_lse).max() <= 2e-6


@pytest.mark.parametrize("number", [FLOATS.min, -1e38, -1e30, -1e10, -1e9, 1e9, FLOATS.max])
def test_a_bias_that_swallows_the_products_counts_all_keys_alike(
    program: Path, number: float
) -> None:
    biases = np.full(COLUMNS * TILES, number, np.float32)
    weights, _, lse = run(program, np.zeros((2, COLUMNS * TILES), np.float32), biases)
    assert np.all(weights == 1 / (COLUMNS * TILES))
    assert np.isfinite(lse).all()
    # Not below the score that a backward pass computes, for which biases are held within 2.3e38, nor far above it.
    held = np.clip(np.float64(np.float32(number)), *np.float32([-2.3e38, 2.3e38]))
    assert np.all(lse >= held)
    assert np.all(lse - held <= 2.0**-22 * abs(held))


def test_without_visible_keys(program: Path) -> None:
    _, total, _ = run(program, drawn(), np.full(COLUMNS * TILES, -np.inf, np.float32))
    assert np.all(total == 0)


def test_no_number_spreads_over_the_row(program: Path) -> None:
    biases = np.zeros(COLUMNS * TILES, np.float32)
    biases[13] = np.nan
    _, total, _ = run(program, drawn(), biases)
    assert np.isnan(total).all()


NO_BIAS = np.zeros(COLUMNS * TILES, np.float32)


@pytest.mark.parametrize(
    ("first", "later", "settles", "loses"),
    [
        (0.0, 0.0, AT_ZERO, False),
        (25.0, 25.0, AT_ZERO, False),
        (-25.0, -25.0, AT_ZERO, False),
        (0.0, 40.0, AT_ZERO, False),
        (0.0, 60.0, AT_ZERO, False),
        (0.0, 80.0, AT_ZERO, True),  # exp(80) exceeds 2^100
        (0.0, 500.0, AT_ZERO, True),
        (0.0, -500.0, AT_ZERO, False),
        (40.0, 40.0, SETTLED, False),  # too far from zero: 2^48 is exp(33)
        (300.0, 340.0, SETTLED, False),
        (-40.0, -40.0, SETTLED, False),
        (-60.0, -60.0, OPEN, False),  # too low to settle: 2^-64 is exp(-44)
        (-60.0, 20.0, AT_ZERO, False),
        (-60.0, 40.0, SETTLED, False),
        (-500.0, 0.0, AT_ZERO, False),
    ],
)
def test_rows_settle_and_are_lost(
    program: Path, first: float, later: float, settles: int, loses: bool
) -> None:
    """Scores of the first tile, and of the third and later ones."""
    scores = drawn() * SCALE + first
    scores[:, 2 * COLUMNS :] += later - first
    products = np.asarray(scores / SCALE, np.float32)
    settled, lost, found = run_once(program, products, NO_BIAS, may_settle=True)
    assert (settled, lost) == (settles, loses)
    wanted, wanted_lse = exact(products, NO_BIAS)
    if not lost:
        assert np.abs(found[:, 3:] / found[:, 1:2] - wanted).max() <= 1e-4
        assert np.abs(found[:, 2] - wanted_lse).max() <= 1e-4
    weights, _, lse = run(program, products, NO_BIAS)
    assert np.abs(weights - wanted).max() <= 1e-4
    assert np.abs(lse - wanted_lse).max() <= 1e-4


def test_rows_do_not_settle_unless_they_may(program: Path) -> None:
    settled, lost, found = run_once(program, drawn(), NO_BIAS, may_settle=False)
    assert settled == OPEN
    assert not lost
    assert found[:, 3:].max() <= 2.0**9
