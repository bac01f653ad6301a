"""Which item is which tile of which head (cc/kernels/attn/schedule.cuh), with the sections that the host picks."""

import heapq
import itertools
import subprocess
from pathlib import Path

import pytest
from test_document_tiles import SHIM
from toolchain import KERNELS, build_host_program

MAIN = """
#include "attn/schedule.cuh"
#include "cuda/sections.h"

// Arguments: heads, batch, tiles, section, last. Prints the first and the last section, then each item's head and tile.
int main(int, char** arguments) {
  int x[5];
  for (int i = 0; i < 5; ++i) x[i] = std::stoi(arguments[i + 1]);
  const auto [heads, batch, tiles, section, last] = x;
  const auto sections = jattn::cuda::sections_with_last(section, last, int64_t(heads) * batch);
  std::cout << sections.heads << " " << sections.last << "\\n";
  for (int item = 0; item < heads * batch * tiles; ++item) {
    const jattn::WorkItem place = jattn::work_item<jattn::Heaviest::kLast>(item, heads, batch, tiles, 1, sections.heads,
                                                                            sections.last);
    std::cout << place.batch * heads + place.head << " " << place.tile << "\\n";
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sections")
    return build_host_program(SHIM + MAIN, folder, f"-I{KERNELS.parent}")


@pytest.mark.parametrize("section", [1, 3, 4, 40])
@pytest.mark.parametrize("last", [0, 1, 5, 100])
@pytest.mark.parametrize(("heads", "batch", "tiles"), [(1, 1, 7), (4, 3, 5), (16, 2, 1)])
def test_every_tile_has_one_item_and_the_last_section_is_the_larger(
    heads: int, batch: int, tiles: int, section: int, last: int, program: Path
) -> None:
    numbers = [str(x) for x in (heads, batch, tiles, section, last)]
    done = subprocess.run([program, *numbers], check=True, capture_output=True, text=True)
    (size, end), *items = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert sorted(items) == list(itertools.product(range(heads * batch), range(tiles)))
    assert size == min(section, heads * batch)
    # Sections follow each other, and each begins with the last tiles of its heads, which see most keys.
    bounds = [size * i for i in range(end + 1)] + [heads * batch]
    assert min(max(last, 1), heads * batch) <= bounds[-1] - bounds[-2] < max(last, 1) + size
    expected = [
        (head, tile)
        for first, beyond in itertools.pairwise(bounds)
        for tile in reversed(range(tiles))
        for head in range(first, beyond)
    ]
    assert items == expected


FULL = """
#include "cuda/sections.h"

// Reads heads wanted, the ideal number and all heads, prints the heads of a section.
int main() {
  int64_t wanted, ideal, heads;
  while (std::cin >> wanted >> ideal >> heads) {
    std::cout << jattn::cuda::full_sections(wanted, ideal, heads) << "\\n";
  }
}
"""
MULTIPROCESSORS = 132


def share_at_work(tiles: int, sections: list[int]) -> float:
    """The mean load over the greatest, where each multiprocessor takes the next causal item when it has none.

    The n-th key tile of a head sees all tiles of queries from its own on, and begin and end of an item take as long as
    three of its steps, two of which a tile of 128 queries has.
    """
    loads = [0] * MULTIPROCESSORS
    for heads in sections:
        for tile in range(tiles):
            for _ in range(heads):
                heapq.heapreplace(loads, loads[0] + 2 * (tiles - tile) + 3)
    return sum(loads) / MULTIPROCESSORS / max(loads)


def test_sections_are_full_and_leave_few_multiprocessors_without_work(tmp_path: Path) -> None:
    """Against all heads at once, as a list schedule has it: of problems with an item for each multiprocessor."""
    program = build_host_program(SHIM + FULL, tmp_path, f"-I{KERNELS.parent}")
    problems = [
        (tiles, heads)
        for tiles in (1, 8, 12, 16, 24, 32, 40, 48, 64, 80, 128)
        for heads in (1, 4, 8, 12, 16, 20, 24, 32, 48, 64, 256)
        if tiles * heads >= MULTIPROCESSORS
    ]
    text = "".join(
        f"{-(-MULTIPROCESSORS // tiles)} {max(1, round(2 * MULTIPROCESSORS / tiles))} {heads}\n"
        for tiles, heads in problems
    )
    done = subprocess.run([program], input=text, check=True, capture_output=True, text=True)
    shares = []
    for (tiles, heads), size in zip(problems, map(int, done.stdout.split()), strict=True):
        wanted = -(-MULTIPROCESSORS // tiles)
        assert min(wanted, heads) <= size <= 2 * wanted
        fill = {
            section: ((heads - 1) % section + 1) / section
            for section in range(min(wanted, heads), min(2 * wanted, heads) + 1)
        }
        assert fill[size] == max(fill.values())
        sections = [min(size, heads - first) for first in range(0, heads, size)]
        shares.append(share_at_work(tiles, sections) / share_at_work(tiles, [heads]))
    assert min(shares) > 0.95
    assert sum(shares) / len(shares) > 0.99


OVER_BATCH = """
#include "cuda/sections.h"

// Arguments: heads of a section, batch, all heads. Prints the heads of a section over all batch entries.
int main(int, char** arguments) {
  const auto number = [&](int i) { return std::stoll(arguments[i]); };
  std::cout << jattn::cuda::heads_over_batch(number(1), number(2), number(3)) << "\\n";
}
"""


def test_sections_over_the_batch_have_no_more_heads_than_there_are(tmp_path: Path) -> None:
    """Else 2^15 heads of 2^17 batch entries are 2^32, of which an int32 keeps 0."""
    program = build_host_program(SHIM + OVER_BATCH, tmp_path, f"-I{KERNELS.parent}")
    for heads, batch, all_heads, want in [
        (1, 1, 1, 1),
        (3, 4, 16, 12),
        (40, 4, 16, 64),
        (1 << 15, 1 << 17, 1, 1 << 17),
        (1, 1 << 30, 1, 1 << 30),
    ]:
        numbers = [str(x) for x in (heads, batch, all_heads)]
        done = subprocess.run([program, *numbers], check=True, capture_output=True, text=True)
        assert int(done.stdout) == want
