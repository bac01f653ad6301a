"""Which pairs a lane of the CUDA kernels drops: the header as the host compiler sees it, against Philox in numpy.

The host program plays the lanes of a warp, for both orientations of a fragment.
"""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from toolchain import require_host_compiler

from jattn import _core

PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "attn/dropout.cuh"
using namespace jattn;

// Prints the pairs [query0, +16) x [key0, +64) as rows of queries: once from fragments with queries as rows, once
// from their bits, once pair by pair; and the pairs [query0, +64) x [key0, +16) from fragments with keys as rows. One
// call serves two lanes for either half of the columns. Rows may be the second 16 of 32; columns begin with their 32.
int main(int, char** arguments) {
  const auto word = [&](int i) { return uint32_t(std::strtoul(arguments[i], nullptr, 0)); };
  const PhiloxKey key{word(1), word(2)};
  const int query0 = int(word(3)), key0 = int(word(4));
  const int first_query = query0 & ~31, first_key = key0 & ~31;
  const DropLimits limits = drop_limits(word(5));
  bool of_queries[16][64], by_bits[16][64], by_pairs[16][64], of_keys[64][16];
  for (int lane = 0; lane < 32; ++lane) {
    uint32_t kept[2];
    for (int half = 0; half < 2; ++half) {
      const PhiloxWords of_query =
          philox(key, philox_row_part(key, lane_row_group(lane, query0)),
                 philox_column_part(key, lane_column_group(lane, first_key + 32 * half)));
      const PhiloxWords of_key = philox(key, philox_row_part(key, lane_column_group(lane, first_query + 32 * half)),
                                        philox_column_part(key, lane_row_group(lane, key0)));
      const QueryRowBits query_bits(words_of_query(of_query, has_odd_rows(lane)), has_far_rows(query0), limits);
      const KeyRowBits key_bits(words_of_key(of_key, has_odd_rows(lane)), has_far_rows(key0), limits);
      kept[half] = kept_bits(query_bits);
      for (int i = 0; i < 16; ++i) {
        const int n = i / 4, h = i / 2 % 2, e = i % 2;
        const int row = lane / 4 + 8 * h, column = 32 * half + 8 * n + 2 * (lane % 4) + e;
        of_queries[row][column] = query_bits.dropped(n, h, e);
        of_keys[column][row] = key_bits.dropped(n, h, e);
      }
    }
    for (int i = 0; i < 32; ++i) {
      const int half = i / 16, n = i / 4 % 4, h = i / 2 % 2, e = i % 2;
      const uint32_t value = kept_halves(join_kept_bits(kept[0], kept[1]), half, n, h) >> 16 * e & 0xffff;
      if (value != 0 && value != 0xffff) return 1;
      by_bits[lane / 4 + 8 * h][32 * half + 8 * n + 2 * (lane % 4) + e] = value == 0;
    }
  }
  for (int i = 0; i < 16 * 64; ++i) {
    const int query = query0 + i / 64, column = first_key + i % 64;
    const PhiloxPart row = philox_row_part(key, dropout_group(query));
    by_pairs[i / 64][i % 64] = pair_dropped(key, row, query, column, word(5));
  }
  for (const auto& row : of_queries) for (bool dropped : row) std::printf("%d ", dropped);
  for (const auto& row : by_bits) for (bool dropped : row) std::printf("%d ", dropped);
  for (const auto& row : by_pairs) for (bool dropped : row) std::printf("%d ", dropped);
  for (const auto& row : of_keys) for (bool dropped : row) std::printf("%d ", dropped);
}
"""


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 of counters (..., 4), as published: ten rounds, the key bumped between them."""
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    low, high = np.uint64(key[0]), np.uint64(key[1])
    mask = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        shift = np.uint64(32)
        c = [
            (second >> shift) ^ c[1] ^ low,
            second & mask,
            (first >> shift) ^ c[3] ^ high,
            first & mask,
        ]
        low, high = (low + np.uint64(0x9E3779B9)) & mask, (high + np.uint64(0xBB67AE85)) & mask
    return np.stack(c, axis=-1).astype(np.uint32)


def wanted(
    key: tuple[int, int], query0: int, key0: int, shape: tuple[int, int], threshold: int
) -> np.ndarray:
    """The pairs of some queries and keys by the definition in core/problem.h."""
    t = (query0 + np.arange(shape[0])).astype(np.int64)[:, None] % 2**32
    j = (key0 + np.arange(shape[1])).astype(np.int64)[None, :] % 2**32
    row, column = t // 32 * 4 + t % 8 // 2, j // 32 * 4 + j % 8 // 2
    zero = np.zeros(shape, np.int64)
    words = philox(np.stack([zero, row + zero, zero, column + zero], axis=-1), key).astype(np.int64)
    near = np.where(t % 2 == 1, words[..., 2], words[..., 0])
    far = np.where(t % 2 == 1, words[..., 3], words[..., 1])

    def byte(word: np.ndarray, h: np.ndarray | int) -> np.ndarray:
        return word >> 8 * (2 * h + j % 2) & 255

    def times_generator(y: np.ndarray) -> np.ndarray:
        return (y >> 4 ^ y & 15) << 4 | y >> 4

    total = byte(near, 0) ^ byte(near, 1) ^ byte(far, 0) ^ byte(far, 1)
    own = byte(np.where(j // 8 % 2 == 1, far, near), t // 8 % 2)
    own = own ^ j // 16 % 2 * total ^ t // 16 % 2 * times_generator(total)
    lower = byte(far, 0) ^ byte(far, 1) ^ times_generator(byte(near, 1) ^ byte(far, 1))
    return 256 * (own & 127) + lower < threshold


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, compiled with the headers *inside the module*."""
    compiler = require_host_compiler()
    folder = tmp_path_factory.mktemp("dropout")
    for name, text in _core.kernel_headers().items():
        path = folder / "include" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "bits.cc").write_text(PROGRAM)
    command = [compiler, "-std=c++20", "-O1", f"-I{folder / 'include'}", str(folder / "bits.cc")]
    done = subprocess.run(
        [*command, "-o", str(folder / "bits")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "bits"


def printed(program: Path, *arguments: int) -> np.ndarray:
    """The numbers that a program prints."""
    words = [str(x % 2**32) for x in arguments]
    done = subprocess.run([str(program), *words], capture_output=True, text=True, check=True)
    return np.array([int(x) for x in done.stdout.split()])


def test_published_answers() -> None:
    zeros, ones = np.zeros(4, np.uint64), np.full(4, 0xFFFFFFFF, np.uint64)
    assert [hex(x) for x in philox(zeros, (0, 0))] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]
    assert [hex(x) for x in philox(ones, (0xFFFFFFFF, 0xFFFFFFFF))] == [
        "0x408f276d",
        "0x41c83b0e",
        "0xa20bc7c6",
        "0x6d5451fd",
    ]


@pytest.mark.parametrize("threshold", [0, 1, 3277, 16384, 32640])
@pytest.mark.parametrize(
    ("key", "query0", "key0"),
    [
        ((0, 0), 0, 0),
        ((0xA4093822, 0x299F31D0), 16, 48),
        ((0xFFFFFFFF, 0x80000001), 2**28 - 16, 2**28 - 32),
        ((12345, 678), -32, -(2**29)),
    ],
)
def test_fragments_drop_what_the_definition_drops(
    program: Path, key: tuple[int, int], query0: int, key0: int, threshold: int
) -> None:
    got = printed(program, *key, query0, key0, threshold).astype(bool).reshape(4, 1024)
    wide = wanted(key, query0, key0 & ~31, (16, 64), threshold)
    np.testing.assert_array_equal(got[0].reshape(16, 64), wide)
    np.testing.assert_array_equal(got[1].reshape(16, 64), wide)
    np.testing.assert_array_equal(got[2].reshape(16, 64), wide)
    np.testing.assert_array_equal(
        got[3].reshape(64, 16), wanted(key, query0 & ~31, key0, (64, 16), threshold)
    )
