"""The list of document tiles, run on the host: every row has one owner, and its tiles show it exactly what it may see.

The unit is compiled by the host compiler with one thread in the place of a block; what the producers of the forward and
the backward kernel do with an entry of the list (cc/kernels/sm90/work.cuh, backward_work.cuh) is compiled along.
"""

import itertools
import random
import subprocess
from pathlib import Path

import pytest
from toolchain import build_host_program

from jattn.backends.flash_tiles import document_tiles_bytes, other_tiles_room

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
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
inline void __syncthreads() {}
inline int __syncthreads_or(int x) { return x; }
inline void __syncwarp() {}
inline int atomicAdd(int* place, int x) { const int old = *place; *place += x; return old; }
inline int atomicExch(int* place, int x) { const int old = *place; *place = x; return old; }
template <class T> T __shfl_sync(unsigned, T x, int) { return x; }
template <class T> T __shfl_xor_sync(unsigned, T x, int) { return x; }
inline unsigned __ballot_sync(unsigned, bool x) { return x; }
inline bool __any_sync(unsigned, bool x) { return x; }
template <class T> T __reduce_min_sync(unsigned, T x) { return x; }
template <class T> T __reduce_max_sync(unsigned, T x) { return x; }
template <class T> T __reduce_add_sync(unsigned, T x) { return x; }
template <class T> T __reduce_or_sync(unsigned, T x) { return x; }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline unsigned __activemask() { return 1; }
inline void __nanosleep(unsigned) {}
template <class T> T __ldg(const T* place) { return *place; }
inline long long clock64() { return 0; }
inline size_t __cvta_generic_to_shared(const void*) { return 0; }
inline float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
"""

BACKWARD_WORK = """
#include "attn/dropout.cuh"
namespace jattn {
PhiloxKey dropout_key(const ProblemParams&, int, int);  // of device code that is not called here
int dropout_threshold(const ProblemParams&, int);
float kept_factor(const ProblemParams&, int);
}  // namespace jattn
#include "sm90/backward_work.cuh"
"""

MAIN = """
#include "sm90/document_tiles.cuh"
#include "sm90/work.cuh"

using namespace jattn;
using namespace jattn::sm90;

template <bool kBand>
int differences(const ProblemParams& problem, const std::vector<int>& q_ids, const std::vector<int>& kv_ids,
                const std::vector<char>& seen) {
  int wrong = 0;
  for (size_t row = 0; row < q_ids.size(); ++row) {
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
    const TileRange range = item_tiles<kConfig>(params, record);
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
  return std::count_if(owners.begin(), owners.end(), [](int n) { return n != 1; }) +
         differences<kBand>(problem, q_ids, kv_ids, seen);
}

constexpr int kQueryTile = 64;  // of the backward kernel

// The rows that tiles of queries say they hold: how many are not held once, or not where a tile may begin.
int wrong_rows(const OtherTiles& others, int batch, int length) {
  int wrong = 0;
  for (int entry = 0; entry < batch; ++entry) {
    std::vector<int> owners(length);
    for (int i = 0; i < others.room; ++i) {
      const TileRows rows = others.tiles[entry * others.room + i];
      for (int row = rows.begin; row < rows.end; ++row) ++owners[row];
      wrong += rows.end - aligned_row(rows.begin) > others.tile;
    }
    wrong += std::count_if(owners.begin(), owners.end(), [](int n) { return n != 1; });
  }
  return wrong;
}

// The same of the backward kernel, whose tiles are of keys.
template <bool kBand>
int wrong_pairs_of_keys(const sm90::BackwardParams& params, const OtherTiles& others, int tiles,
                        const std::vector<int>& q_ids, const std::vector<int>& kv_ids) {
  constexpr Config kConfig{.tile_q = kQueryTile, .tile_kv = 128, .band = kBand, .segments = true, .schedule = 2,
                           .documents = true};
  const ProblemParams& problem = params.problem;
  std::vector<int> owners(kv_ids.size());
  std::vector<char> seen(q_ids.size() * problem.kv_len);
  for (int item = 0; item < tiles * problem.num_kv_heads; ++item) {
    const DocumentKeys document = document_keys<kConfig>(params, item);
    const BackwardItem& own = document.item;
    if (own.head != 1) continue;
    const int end = min(own.first + kConfig.tile_kv, own.kv_length);
    for (int j = own.first; j < end; ++j) ++owners[own.batch * problem.kv_len + j];
    const bool ends_early = end < own.first + kConfig.tile_kv;
    const TileRange range = document_queries<kConfig>(document, end);
    for (int tile = range.begin; tile < range.end; ++tile) {
      const int first = document.q_first + tile * kConfig.tile_q, number = document.q_number + tile;
      if (first % kRowAlignment != 0 || first + kConfig.tile_q > others.room * kConfig.tile_q) return -2;
      if (number >= others.room) return -3;
      const TileRows rows = others.tiles[own.batch * others.room + number];
      if (aligned_row(rows.begin) != first) return -4;
      const bool same = first >= document.q_begin && first + kConfig.tile_q <= document.q_end;
      for (int t = first; t < first + kConfig.tile_q; ++t) {
        if (t >= problem.q_len) {
          if (same) return -1;
          continue;
        }
        for (int j = own.first; j < own.first + kConfig.tile_kv; ++j) {
          bool visible = !ends_early || j < own.kv_length;  // as mask_scores() has it
          if (kBand && (ends_early || tile < range.full_begin)) visible = visible && j < t + own.upper_offset;
          if (kBand && tile >= range.full_end) visible = visible && j >= t + own.lower_offset;
          const int id = j < own.kv_length ? kv_ids[own.batch * problem.kv_len + j] : -2;
          if (!same) visible = visible && id >= 0 && id == q_ids[own.batch * problem.q_len + t];
          if (!visible) continue;
          if (j >= problem.kv_len) return -1;
          if (t < rows.begin || t >= rows.end) return -5;  // dq of the row would be lost
          ++seen[(own.batch * problem.q_len + t) * problem.kv_len + j];
        }
      }
    }
  }
  return std::count_if(owners.begin(), owners.end(), [](int n) { return n != 1; }) +
         differences<kBand>(problem, q_ids, kv_ids, seen);
}

// Lists the tiles of 128 rows of one axis and prints: refused, tiles, and whether they are in order, of each run the
// last first or the first.
int list_tiles(const std::vector<int>* ids[2], const int (&lengths)[2], int batch, bool last_first,
               std::vector<DocumentTile>& tiles, const OtherTiles& others = {}) {
  tiles.resize(batch * document_tiles_room(lengths[0], 128));
  int counters[kDocumentCounters]{};
  for (blockIdx.x = 0; blockIdx.x < batch; ++blockIdx.x) {
    list_documents(
        {{ids[0]->data(), ids[1]->data()}, {lengths[0], lengths[1]}, 128, last_first, counters, tiles.data(), others});
  }
  bool ordered = true;
  for (int i = 1; i < counters[kDocumentTiles]; ++i) {
    const DocumentTile &before = tiles[i - 1], &tile = tiles[i];
    const bool apart = before.batch != tile.batch || before.end != tile.end;
    ordered = ordered && (apart || (before.begin > tile.begin) == last_first);
  }
  std::cout << counters[kDocumentsRefused] << ' ' << counters[kDocumentTiles] << ' ' << ordered;
  return counters[kDocumentsRefused] == 0 ? counters[kDocumentTiles] : -1;
}

int main() {
  sm90::ForwardParams params{};
  ProblemParams& problem = params.problem;
  bool band = false;
  while (std::cin >> problem.batch >> problem.q_len >> problem.kv_len >> band >> problem.band_left >>
         problem.band_right >> problem.lower_right) {
    problem.num_heads = problem.num_kv_heads = 2;
    std::vector<int> q_ids(problem.batch * problem.q_len), kv_ids(problem.batch * problem.kv_len);
    for (int& id : q_ids) std::cin >> id;
    for (int& id : kv_ids) std::cin >> id;
    std::vector<DocumentTile> tiles;
    const std::vector<int>* ids[] = {&q_ids, &kv_ids};
    const int of_queries = list_tiles(ids, {problem.q_len, problem.kv_len}, problem.batch, true, tiles);
    params.documents = tiles.data();
    if (of_queries >= 0) {
      std::cout << ' '
                << (band ? wrong_pairs<true>(params, of_queries, q_ids, kv_ids)
                         : wrong_pairs<false>(params, of_queries, q_ids, kv_ids));
    }
    std::cout << " / ";
    std::swap(ids[0], ids[1]);
    const int room = other_tiles_room(problem.q_len, kQueryTile);
    std::vector<TileRows> row_tiles(problem.batch * room);
    const OtherTiles others{row_tiles.data(), kQueryTile, room};
    const int of_keys = list_tiles(ids, {problem.kv_len, problem.q_len}, problem.batch, false, tiles, others);
    sm90::BackwardParams backward{};
    backward.problem = problem;
    backward.documents = tiles.data();
    if (of_keys >= 0) {
      const int by_runs = std::count_if(row_tiles.begin(), row_tiles.end(), [&](const TileRows& rows) {
        return rows.begin < rows.end && rows.begin % kQueryTile != 0;
      });
      std::cout << ' '
                << (band ? wrong_pairs_of_keys<true>(backward, others, of_keys, q_ids, kv_ids)
                         : wrong_pairs_of_keys<false>(backward, others, of_keys, q_ids, kv_ids))
                << ' ' << wrong_rows(others, problem.batch, problem.q_len) << ' ' << by_runs;
    }
    std::cout << std::endl;
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_host_program(
        SHIM + BACKWARD_WORK + MAIN, tmp_path_factory.mktemp("document_tiles"), "-w"
    )


def answers(program: Path, problems: list[str]) -> list[tuple[list[int], list[int]]]:
    """For each problem, of tiles of queries and of keys: refused, tiles, order, wrong rows and pairs.

    Of keys also: wrong rows of the tiles of queries, and how many of these do not begin on the grid.
    """
    done = subprocess.run(
        [program], input="\n".join(problems), capture_output=True, text=True, check=True
    )
    lines = [line.split("/") for line in done.stdout.splitlines()]
    return [([int(x) for x in a.split()], [int(x) for x in b.split()]) for a, b in lines]


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
    """How many tiles of 128 rows begin with the runs of a row."""
    runs = itertools.groupby(max(name, -1) for name in row)
    return sum(-(-len(list(run)) // 128) for _, run in runs)


def room(length: int) -> int:
    """How many tiles the list takes of a batch entry: twice those of the grid."""
    return 2 * -(-length // 128)


def are_too_many(rows: list[list[int]]) -> bool:
    return any(tiles_of(row) > room(len(row)) for row in rows)


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
        too_many.append((are_too_many(q_rows), are_too_many(kv_rows)))
    assert all(3 < sum(side) < 20 for side in zip(*too_many, strict=True))
    found = answers(program, problems)
    for text, sides, both in zip(problems, too_many, found, strict=True):
        for refuses, answer in zip(sides, both, strict=True):
            assert answer[0] == refuses, text[:60]
            if not refuses:
                _, tiles, ordered, wrong = answer[:4]
                assert (ordered, wrong) == (1, 0), text[:60]
                assert tiles > 0
    of_keys = [both[1] for both in found if both[1][0] == 0]
    assert all(answer[4] == 0 for answer in of_keys)
    assert 5 < sum(answer[5] > 0 for answer in of_keys) < len(of_keys) - 5


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
    assert [[side[0] for side in both] for both in found] == [[1, 0], [0, 1], [1, 0], [1, 1]]
    assert found[1][0][3] == found[0][1][3] == found[2][1][3] == 0


@pytest.mark.parametrize(("length", "refused"), [(64, 0), (63, 1), (200, 0), (20, 1)])
def test_short_documents_are_refused(program: Path, length: int, refused: int) -> None:
    row = [i // length for i in range(640)]
    assert (tiles_of(row) > room(640)) == refused
    [both] = answers(program, [problem(1, [row], [row], BANDS[1])])
    assert [side[0] for side in both] == [refused, refused]


def test_tiles_of_a_packed_sequence(program: Path) -> None:
    lengths = (130, 1, 256, 40)
    row = [i for i, length in enumerate(lengths) for _ in range(length)] + [-1] * 85
    [both] = answers(program, [problem(1, [row], [row], BANDS[1])])
    for refused, tiles, ordered, wrong, *_ in both:
        assert (refused, tiles, ordered, wrong) == (0, 2 + 1 + 2 + 1 + 1, 1, 0)


def row_tiles_of(lengths: list[int], tile: int) -> int:
    """Tiles of queries that begin with documents, or up to three rows before them."""
    begins = [0, *itertools.accumulate(lengths)][:-1]
    return sum(-(-(n + begin % 4) // tile) for begin, n in zip(begins, lengths, strict=True))


@pytest.mark.parametrize("length", [1000, 250, 130, 129, 128, 125, 100])
def test_queries_begin_with_documents_where_there_is_room(program: Path, length: int) -> None:
    lengths = [length] * (3000 // length)
    row = [i for i, n in enumerate(lengths) for _ in range(n)]
    on_grid = -(-len(row) // 64)
    fits = row_tiles_of(lengths, 64) <= on_grid + -(-on_grid // 4)
    assert fits == (length not in (130, 129, 100))
    [(_, (refused, _, _, wrong, wrong_rows, off_grid))] = answers(
        program, [problem(1, [row], [row], BANDS[1])]
    )
    assert (refused, wrong, wrong_rows) == (0, 0, 0)
    assert (off_grid > 0) == (fits and length % 64 != 0)


ROOMS = """
int main() {
  for (int tile : {64, 128, 192})
    for (long length : {1L, 64L, 129L, 1000L, 16384L, 1L << 33})
      std::cout << tile << " " << length << " "
                << jattn::sm90::document_tiles_room(length, tile) * sizeof(jattn::sm90::DocumentTile) << " "
                << jattn::sm90::other_tiles_room(length, tile) << "\\n";
}
"""


def test_python_plans_the_rooms_of_the_lists(tmp_path: Path) -> None:
    source = f'{SHIM}\n#include "sm90/document_tiles.cuh"\n{ROOMS}'
    program = build_host_program(source, tmp_path)
    done = subprocess.run([program], check=True, capture_output=True, text=True)
    lines = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(lines) == 18
    for tile, length, list_bytes, others in lines:
        assert document_tiles_bytes(length, tile) == list_bytes
        assert other_tiles_room(length, tile) == others
