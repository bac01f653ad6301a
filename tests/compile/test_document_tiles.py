"""The list of document tiles, run on the host: every row has one owner, and its tiles show it exactly what it may see.

The unit is compiled by the host compiler with one thread in the place of a block; what the kernel's producer does with
an entry of the list (cc/kernels/sm90/work.cuh) is compiled along.
"""

import itertools
import random
import subprocess
from pathlib import Path

import pytest
from toolchain import build_host_program

SHIM = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __shared__ static
using std::max;
using std::min;
struct Index { int x = 0; } threadIdx, blockIdx;
struct Extent { int x = 1; } blockDim, gridDim;
struct float2 { float x, y; };
struct int2 { int x, y; };
inline void __syncthreads() {}
inline int __syncthreads_or(int x) { return x; }
inline void __syncwarp() {}
inline int atomicAdd(int* place, int x) { const int old = *place; *place += x; return old; }
inline int atomicExch(int* place, int x) { const int old = *place; *place = x; return old; }
template <class T> T __shfl_sync(unsigned, T x, int) { return x; }
template <class T> T __shfl_xor_sync(unsigned, T x, int) { return x; }
inline unsigned __ballot_sync(unsigned, bool x) { return x; }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline unsigned __activemask() { return 1; }
inline void __nanosleep(unsigned) {}
inline long long clock64() { return 0; }
inline size_t __cvta_generic_to_shared(const void*) { return 0; }
inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
"""

MAIN = """
#include "sm90/document_tiles.cuh"
#include "sm90/work.cuh"

using namespace jattn;
using namespace jattn::sm90;

template <bool kBand>
int wrong_pairs(const sm90::ForwardParams& params, int tiles, const std::vector<int>& q_ids,
                const std::vector<int>& kv_ids) {
  constexpr Config kConfig{.tile_q = 128, .tile_kv = 64, .band = kBand, .segments = true, .documents = true};
  const ProblemParams& problem = params.problem;
  std::vector<int> owners(q_ids.size());
  std::vector<char> seen(q_ids.size() * kv_ids.size());
  for (int item = 0; item < tiles * problem.num_heads; ++item) {
    const DocumentItem found = document_item<kConfig>(params, item);
    const ItemRecord& record = found.record;
    if (record.head != 1) continue;
    const int64_t first_row = int64_t(record.batch) * problem.q_len;
    const int rows_end = min(record.q_begin + kConfig.tile_q, record.q_length);
    for (int t = record.q_begin; t < rows_end; ++t) ++owners[first_row + t];
    const TileRange range = item_tiles<kConfig>(record);
    for (int tile = range.begin; tile < range.end; ++tile) {
      for (int t = record.q_begin; t < rows_end; ++t) {
        for (int j = tile * kConfig.tile_kv; j < (tile + 1) * kConfig.tile_kv; ++j) {
          bool visible = true;  // as apply_masks() has it
          if (tile >= range.full_end) {
            visible = j < (kBand ? min(record.kv_length, t + record.upper_offset) : record.kv_length);
          }
          if (kBand && tile < range.full_begin) visible = visible && j >= t + record.lower_offset;
          if (!visible) continue;
          const int key = found.kv_begin + j;
          if (key >= problem.kv_len) return -1;
          ++seen[(first_row + t) * problem.kv_len + key];
        }
      }
    }
  }
  int wrong = 0;
  for (size_t row = 0; row < q_ids.size(); ++row) {
    wrong += owners[row] != 1;
    const int64_t t = row % problem.q_len, entry = row / problem.q_len;
    const int64_t offset = problem.lower_right ? problem.kv_len - problem.q_len : 0;
    for (int64_t j = 0; j < problem.kv_len; ++j) {
      bool visible = q_ids[row] >= 0 && q_ids[row] == kv_ids[entry * problem.kv_len + j];
      if (kBand) {
        visible = visible && j >= t + offset - problem.band_left && j <= t + offset + problem.band_right;
      }
      wrong += seen[row * problem.kv_len + j] != visible;
    }
  }
  return wrong;
}

int main() {
  sm90::ForwardParams params{};
  ProblemParams& problem = params.problem;
  bool band = false;
  while (std::cin >> problem.batch >> problem.q_len >> problem.kv_len >> band >> problem.band_left >>
         problem.band_right >> problem.lower_right) {
    problem.num_heads = 2;
    std::vector<int> q_ids(problem.batch * problem.q_len), kv_ids(problem.batch * problem.kv_len);
    for (int& id : q_ids) std::cin >> id;
    for (int& id : kv_ids) std::cin >> id;
    std::vector<DocumentTile> tiles(problem.batch * document_tiles_room(problem.q_len, 128));
    int counters[kDocumentCounters]{};
    params.documents = tiles.data();
    for (blockIdx.x = 0; blockIdx.x < problem.batch; ++blockIdx.x) {
      document_tiles<Config{}>(
          {{q_ids.data(), kv_ids.data()}, {problem.q_len, problem.kv_len}, 128, counters, tiles.data()});
    }
    const int count = counters[kDocumentTiles];
    bool falls = true;  // longest document first, within a batch entry
    for (int i = 1; i < count; ++i) {
      const DocumentTile &before = tiles[i - 1], &tile = tiles[i];
      falls = falls && (before.batch != tile.batch || before.q_end != tile.q_end || before.q_begin > tile.q_begin);
    }
    std::cout << counters[kDocumentsRefused] << ' ' << count << ' ' << falls;
    if (counters[kDocumentsRefused] == 0) {
      const int wrong = band ? wrong_pairs<true>(params, count, q_ids, kv_ids)
                             : wrong_pairs<false>(params, count, q_ids, kv_ids);
      std::cout << ' ' << wrong;
    }
    std::cout << std::endl;
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_host_program(SHIM + MAIN, tmp_path_factory.mktemp("document_tiles"), "-w")


def answers(program: Path, problems: list[str]) -> list[list[int]]:
    """What the program says of each problem: refused, tiles, falling order, wrong rows and pairs."""
    done = subprocess.run(
        [program], input="\n".join(problems), capture_output=True, text=True, check=True
    )
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


def runs(draw: random.Random, ids: list[int], length: int) -> list[int]:
    """Ids in runs that fill the length; some of the ids may be missing."""
    borders = sorted(draw.randint(0, length) for _ in range(len(ids) - 1))
    ends = [*borders, length]
    row = []
    for i, (begin, end) in enumerate(zip([0, *borders], ends, strict=True)):
        row += [ids[i]] * (end - begin)
    return row


def problem(batch: int, q_rows: list[list[int]], kv_rows: list[list[int]], band: str) -> str:
    """A problem in words; band: whether there is one, left, right, lower right."""
    lengths = f"{len(q_rows[0])} {len(kv_rows[0])}"
    rows = " ".join(str(number) for row in [*q_rows, *kv_rows] for number in row)
    return f"{batch} {lengths} {band} {rows}"


BANDS = ("0 0 0 0", "1 1073741824 0 0", "1 1073741824 0 1", "1 100 30 0", "1 0 0 1", "1 -40 90 0")


def tiles_of(row: list[int]) -> int:
    """How many tiles of 128 queries begin with the runs of a row."""
    runs = itertools.groupby(max(name, -1) for name in row)
    return sum(-(-len(list(run)) // 128) for _, run in runs)


def room(q_len: int) -> int:
    """How many tiles the list takes of a batch entry: twice those of the grid."""
    return 2 * -(-q_len // 128)


def test_every_row_sees_what_it_may(program: Path) -> None:
    draw = random.Random(1)
    problems, too_many = [], []
    for _ in range(40):
        batch, q_len = draw.randint(1, 2), draw.choice([1, 127, 300, 513, 700])
        same = draw.random() < 0.5
        kv_len = q_len if same else draw.choice([1, 64, 200, 450])
        q_rows, kv_rows = [], []
        for _ in range(batch):
            ids = draw.sample(range(20), draw.randint(1, 6))  # in no order
            q_ids = [name if draw.random() < 0.8 else -draw.randint(1, 3) for name in ids]
            q_rows.append(runs(draw, q_ids, q_len))
            kv_ids = ids + [-1] * draw.randint(0, 1)
            draw.shuffle(kv_ids)
            kv_rows.append(q_rows[-1] if same else runs(draw, kv_ids, kv_len))
        problems.append(problem(batch, q_rows, kv_rows, draw.choice(BANDS)))
        too_many.append(any(tiles_of(row) > room(q_len) for row in q_rows))
    assert 3 < sum(too_many) < 20
    found = answers(program, problems)
    for text, refuses, answer in zip(problems, too_many, found, strict=True):
        assert answer[0] == refuses, text[:60]
        if not refuses:
            _, tiles, falls, wrong = answer
            assert (falls, wrong) == (1, 0), text[:60]
            assert tiles > 0


def test_keys_in_two_places_are_refused(program: Path) -> None:
    apart = [0] * 50 + [1] * 50 + [0] * 50
    queries = [0] * 80 + [1] * 70
    together = [0] * 100 + [1] * 50
    many = [i // 2 for i in range(2050)]
    found = answers(
        program,
        [
            problem(1, [queries], [apart], BANDS[0]),
            problem(1, [apart], [queries], BANDS[1]),  # two runs of queries may see one of keys
            problem(2, [queries, queries], [together, apart], BANDS[0]),
            problem(1, [many], [many], BANDS[0]),
        ],
    )
    assert [answer[0] for answer in found] == [1, 0, 1, 1]
    assert found[1][3] == 0


@pytest.mark.parametrize(("length", "refused"), [(64, 0), (63, 1), (200, 0), (20, 1)])
def test_short_documents_are_refused(program: Path, length: int, refused: int) -> None:
    row = [i // length for i in range(640)]
    assert (tiles_of(row) > room(640)) == refused
    [answer] = answers(program, [problem(1, [row], [row], BANDS[1])])
    assert answer[0] == refused


def test_tiles_of_a_packed_sequence(program: Path) -> None:
    lengths = (130, 1, 256, 40)
    row = [i for i, length in enumerate(lengths) for _ in range(length)] + [-1] * 85
    [(refused, tiles, _, wrong)] = answers(program, [problem(1, [row], [row], BANDS[1])])
    assert (refused, tiles, wrong) == (0, 2 + 1 + 2 + 1 + 1, 0)
