"""Which pairs a lane of the CUDA kernels drops: the header as the host compiler sees it, against Philox in numpy.

The host program plays the lanes of a warp, exchange of words included, for both orientations of a fragment.
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

// Prints the pairs [query0, +16) x [key0, +16) as rows of queries: once from fragments with queries as rows, once from
// fragments with keys as rows, once pair by pair.
int main(int, char** arguments) {
  const auto word = [&](int i) { return uint32_t(std::strtoul(arguments[i], nullptr, 0)); };
  const PhiloxKey key{word(1), word(2)};
  const int query0 = int(word(3)), key0 = int(word(4));
  const uint32_t threshold_high = word(5) << 16;
  bool drops[3][16][16];
  for (int lane = 0; lane < 32; ++lane) {
    const QueryRowBits bits{philox(key, philox_row_part(key, query_row_group(lane, query0)),
                                   philox_column_part(key, key_column_group(lane, key0))), threshold_high};
    for (int i = 0; i < 8; ++i) {
      const int w = i / 4, h = i / 2 % 2, e = i % 2;
      drops[0][lane / 4 + 8 * h][8 * w + 2 * (lane % 4) + e] = bits.dropped(w, h, e);
    }
  }
  KeyRowHalves sent[32], own[32];
  for (int lane = 0; lane < 32; ++lane) {
    const PhiloxWords made = philox(key, philox_row_part(key, query_column_group(lane, query0)),
                                    philox_column_part(key, key_row_group(lane, key0)));
    own[lane] = halves_of_key(made, is_odd_row(lane));
    sent[lane] = halves_of_key(made, !is_odd_row(lane));
  }
  for (int lane = 0; lane < 32; ++lane) {
    const KeyRowBits bits = key_row_bits(own[lane], sent[lane ^ 4], is_odd_row(lane), threshold_high);
    for (int i = 0; i < 8; ++i) {
      const int w = i / 4, h = i / 2 % 2, e = i % 2;
      drops[1][8 * w + 2 * (lane % 4) + e][lane / 4 + 8 * h] = bits.dropped(w, h, e);
    }
  }
  for (int i = 0; i < 256; ++i) {
    const int query = query0 + i / 16, column = key0 + i % 16;
    const PhiloxRowPart row = philox_row_part(key, dropout_row_group(query));
    drops[2][i / 16][i % 16] = pair_dropped(key, row, query, column, threshold_high);
  }
  for (int i = 0; i < 3 * 256; ++i) std::printf("%d ", int(drops[i / 256][i / 16 % 16][i % 16]));
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


def wanted(key: tuple[int, int], query0: int, key0: int, threshold: int) -> np.ndarray:
    """The 16 x 16 pairs by the definition in core/problem.h."""
    t = (query0 + np.arange(16)).astype(np.int64)[:, None] % 2**32
    j = (key0 + np.arange(16)).astype(np.int64)[None, :] % 2**32
    row, column = t // 16 * 8 + t % 8, j // 16 * 4 + j % 8 // 2
    zero = np.zeros((16, 16), np.int64)
    words = philox(np.stack([row + zero, column + zero, zero, zero], axis=-1), key)
    index = 2 * (t // 8 % 2) + j // 8 % 2
    word = np.take_along_axis(words, index[..., None], axis=-1)[..., 0]
    return np.where(j % 2 == 1, word >> 16, word & 0xFFFF) < threshold


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


@pytest.mark.parametrize("threshold", [0, 1, 6554, 32768, 65535])
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
    got = printed(program, *key, query0, key0, threshold).astype(bool).reshape(3, 16, 16)
    for form in got:
        np.testing.assert_array_equal(form, wanted(key, query0, key0, threshold))
