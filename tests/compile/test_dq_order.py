"""Kernels with warps that add dq up (``Config::dq_order``): their code, and in order who waits for whom, none in vain.

What the producer tells of each step (cc/kernels/sm90/backward_work.cuh) is compiled by the host compiler. What
the blocks make of it, with items taken by a counter, is a model.
"""

import dataclasses
import random
import subprocess
from pathlib import Path

import pytest
import resources
import test_flash_backward_terms
import test_flash_terms
import toolchain
from test_document_tiles import BACKWARD_WORK, SHIM

from jattn import _core
from jattn.backends import flash_backward_tiles as tiles
from jattn.masks import Band
from jattn.spec import Spec

MAIN = """
using namespace jattn;
using namespace jattn::sm90;

// For each key tile a line of the tiles of queries that it visits, each with the key tiles that come before it there.
// With descending_tiles those of all heads of a group, as it visits them; tiles are counted through all heads.
template <int kTileQ, bool kBand>
void print_steps(const sm90::BackwardParams& params) {
  constexpr Config kConfig{.tile_q = kTileQ, .tile_kv = 128, .num_warps = 12, .band = kBand, .lengths = true,
                           .schedule = 2, .bulk_reduce = true, .dq_order = 2};
  for (int tile = 0; tile < params.tiles; ++tile) {
    const BackwardItem item = backward_item<kConfig>(params, {0, 0, tile, 0}, tile * kConfig.tile_kv);
    const int end = min(item.first + kConfig.tile_kv, item.kv_length);
    TileRange range{0, 0, 0, 0};
    if (end > item.first) range = queries_of_keys<kConfig>(item, item.first, end);
    const Predecessor<kConfig> predecessor(item);
    RoundWalk<kConfig> walk{range.begin, range.end - range.begin, 0};
    const bool walks_group = params.descending_tiles > 0;
    if (walks_group) walk.descends = tile < params.descending_tiles;
    const HeadCycle heads = head_cycle<kConfig>(item, walks_group ? params.problem.group_size : 1);
    const int tiles_of_head = (params.problem.q_len + kTileQ - 1) / kTileQ;
    int head = heads.start;
    for (int step = walk.next(); step >= 0;) {
      std::cout << head * tiles_of_head + step << ' ' << predecessor.tiles_before(step) << ' ';
      head = heads.next(head);
      if (head == heads.start) step = walk.next();
    }
    std::cout << std::endl;
  }
}

int main() {
  sm90::BackwardParams params{};
  ProblemParams& problem = params.problem;
  int tile_q = 0, q_length = 0, kv_length = 0;
  bool band = false;
  while (std::cin >> tile_q >> problem.q_len >> problem.kv_len >> q_length >> kv_length >> band >> problem.band_left >>
         problem.band_right >> problem.lower_right >> problem.group_size >> params.descending_tiles) {
    problem.batch = problem.num_heads = problem.num_kv_heads = 1;
    problem.q_lengths = &q_length;
    problem.kv_lengths = &kv_length;
    params.tiles = (problem.kv_len + 127) / 128;
    if (tile_q == 64) {
      band ? print_steps<64, true>(params) : print_steps<64, false>(params);
    } else {
      band ? print_steps<128, true>(params) : print_steps<128, false>(params);
    }
  }
}
"""

UNLIMITED = 1 << 30
BANDS = (
    None,
    (UNLIMITED, 0),
    (100, 30),
    (1023, 0),
    (0, 0),
    (0, UNLIMITED),
    (-40, 90),
    (-50, 40),
    (-300, 500),
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One key/value head; band: keys to the left and to the right of a query.

    descending_tiles: not 0: all heads of the group visit a tile of queries before the next.
    """

    tile_q: int
    q_len: int
    kv_len: int
    q_length: int
    kv_length: int
    band: tuple[int, int] | None = None
    lower_right: bool = False
    group: int = 1
    descending_tiles: int = 0

    def words(self) -> str:
        """What the program reads."""
        left, right = self.band or (0, 0)
        numbers = (self.tile_q, self.q_len, self.kv_len, self.q_length, self.kv_length)
        band = (self.band is not None, left, right, self.lower_right)
        walk = (self.group, self.descending_tiles)
        return " ".join(str(int(x)) for x in (*numbers, *band, *walk))

    def visits(self, key_tile: int) -> set[int]:
        """The tiles of queries in which some query sees some key of the tile."""
        keys = range(key_tile * 128, min(key_tile * 128 + 128, self.kv_length))
        if len(keys) == 0:
            return set()
        offset = self.kv_length - self.q_length if self.lower_right else 0
        left, right = self.band or (UNLIMITED, UNLIMITED)
        return {
            t // self.tile_q
            for t in range(self.q_length)
            if max(keys[0], t + offset - left) <= min(keys[-1], t + offset + right)
        }


Steps = list[list[tuple[int, int]]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toolchain.build_host_program(
        SHIM + BACKWARD_WORK + MAIN, tmp_path_factory.mktemp("dq_order"), "-w"
    )


def steps_of(program: Path, problems: list[Problem]) -> list[Steps]:
    """For each problem and key tile the steps: the tile of queries, and what must have been added to it before."""
    text = "\n".join(problem.words() for problem in problems)
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    lines = iter(done.stdout.splitlines())
    found = []
    for problem in problems:
        rows = [[int(x) for x in next(lines).split()] for _ in range(-(-problem.kv_len // 128))]
        found.append([list(zip(row[::2], row[1::2], strict=True)) for row in rows])
    assert not list(lines)
    return found


def drawn_problems() -> list[Problem]:
    draw = random.Random(3)
    problems = []
    for _ in range(300):
        q_len, kv_len = (draw.choice([1, 64, 80, 130, 333, 640, 1100]) for _ in range(2))
        full = draw.random() < 0.5
        problems.append(
            Problem(
                draw.choice([64, 128]),
                q_len,
                kv_len,
                q_len if full else draw.randint(0, q_len),
                kv_len if full else draw.randint(0, kv_len),
                draw.choice(BANDS),
                draw.random() < 0.5,
            )
        )
    return problems


def test_each_key_tile_follows_the_one_that_was_there_before(program: Path) -> None:
    problems = drawn_problems()
    waits = firsts = 0
    for problem, steps in zip(problems, steps_of(program, problems), strict=True):
        last: dict[
            int, int
        ] = {}  # of each tile of queries: key tiles up to the last that was there
        for key_tile, visits in enumerate(steps):
            tiles = [tile for tile, _ in visits]
            assert tiles == sorted(set(tiles), reverse=True)
            assert problem.visits(key_tile) <= set(tiles), (problem, key_tile)
            for tile, after in visits:
                assert after == last.get(tile, 0), (problem, key_tile, tile)
                waits += after > 0
                firsts += after == 0
                last[tile] = key_tile + 1
    assert waits > 300
    assert firsts > 300


def run_blocks(
    heads: list[Steps],
    blocks: int,
    section: int,
    draw: random.Random,
    *,
    given: int = 0,
    asleep: frozenset[int] = frozenset(),
) -> tuple[bool, dict[tuple[int, int], list[int]]]:
    """Lets blocks take items and go on in any order. Returns whether all ended, and who added to what, in order.

    given: items that blocks have for their place in the grid, instead of by the counter. asleep: blocks that never
    begin, as if there were no room for them.
    """
    items = [
        (head, key_tile)
        for first in range(0, len(heads), section)
        for key_tile in range(len(heads[0]))
        for head in range(first, min(first + section, len(heads)))
    ]
    counter = given
    counters: dict[tuple[int, int], int] = {}
    added: dict[tuple[int, int], list[int]] = {}
    at: list[tuple[int, int, list[tuple[int, int]]] | None] = [None] * blocks
    for block in range(min(given, len(items), blocks)):
        head, key_tile = items[block]
        at[block] = (head, key_tile, heads[head][key_tile])
    awake = set(range(blocks)) - asleep
    while True:
        moved = False
        for block in draw.sample(sorted(awake), len(awake)):
            for _ in range(draw.randint(1, 4)):
                held = at[block]
                if held is None or not held[2]:
                    if counter >= len(items):
                        at[block] = None
                        break
                    head, key_tile = items[counter]
                    counter += 1
                    at[block] = (head, key_tile, heads[head][key_tile])
                    moved = True
                    continue
                head, key_tile, left = held
                tile, after = left[0]
                if counters.get((head, tile), 0) != after:
                    break
                counters[head, tile] = key_tile + 1
                added.setdefault((head, tile), []).append(key_tile)
                at[block] = (head, key_tile, left[1:])
                moved = True
        if not moved:
            busy = any(held is not None and held[2] for held in at)
            return counter >= len(items) and not busy, added


CAUSAL = Problem(128, 1100, 1100, 1100, 1100, (UNLIMITED, 0))
FULL = Problem(64, 640, 1100, 640, 1100)
WINDOW = Problem(64, 1100, 1100, 1100, 1100, (200, 0))
GROUPS = [dataclasses.replace(CAUSAL, group=4, descending_tiles=tiles) for tiles in (1, 5, 9)]


def test_all_heads_of_a_group_visit_a_tile_before_the_next(program: Path) -> None:
    """Key tiles below `descending_tiles` from the last tile of queries down, others from their first one up."""
    for problem, steps in zip(GROUPS, steps_of(program, GROUPS), strict=True):
        tiles = -(-problem.q_len // problem.tile_q)
        for key_tile, visits in enumerate(steps):
            runs = [
                [divmod(tile, tiles) for tile, _ in visits[i : i + problem.group]]
                for i in range(0, len(visits), problem.group)
            ]
            assert all([head for head, _ in run] == list(range(problem.group)) for run in runs)
            assert all(len({tile for _, tile in run}) == 1 for run in runs)
            order = [run[0][1] for run in runs]
            descends = key_tile < problem.descending_tiles
            assert order == sorted(problem.visits(key_tile), reverse=descends)


@pytest.mark.parametrize(
    "problem",
    [CAUSAL, FULL, WINDOW, *GROUPS],
    ids=["causal", "full", "window", *(f"groups {x.descending_tiles}" for x in GROUPS)],
)
def test_all_blocks_end_and_add_in_order(program: Path, problem: Problem) -> None:
    heads = steps_of(program, [problem] * 3)
    draw = random.Random(5)
    for blocks in (1, 2, 5, 13, 40):
        for section in (1, 2, 3):
            for asleep in (frozenset[int](), frozenset(range(blocks - 1))):
                ended, added = run_blocks(heads, blocks, section, draw, asleep=asleep)
                assert ended, (blocks, section, asleep)
                assert all(order == sorted(order) for order in added.values())
                assert sum(map(len, added.values())) == sum(len(x) for head in heads for x in head)


def test_an_item_by_the_place_in_the_grid_can_be_waited_for_in_vain(program: Path) -> None:
    """Nothing says that the first block of a grid runs while others do."""
    heads = steps_of(program, [CAUSAL] * 3)
    ended, _ = run_blocks(heads, 5, 1, random.Random(1), given=5, asleep=frozenset({0}))
    assert not ended


def planned(spec: Spec, order: int, *, deterministic: bool) -> list[str]:
    with tiles.dq_order(order):
        plan = tiles.plan_backward(
            spec, wants=(True, True, True, False), deterministic=deterministic
        )
    return [_core.canonical_kernel_key(key) for key in plan.kernels.split(";")]


def key_of_fused(spec: Spec, order: int, *, deterministic: bool = False) -> str:
    keys = planned(spec, order, deterministic=deterministic)
    [key] = [key for key in keys if toolchain.word(key, "family") == "sm90_backward"]
    return key


CAUSAL_BAND = {"band": Band(right=0)}
WITHOUT_FILTERS: dict[str, tuple[tuple[int, int], dict[str, object]]] = {
    "plain": ((128, 128), {}),
    "plain 64": ((64, 64), {}),
    "causal": ((128, 128), CAUSAL_BAND),
    "causal 64": ((64, 64), CAUSAL_BAND),
    "lengths 64": ((64, 64), {"q_lengths": True, "kv_lengths": True} | CAUSAL_BAND),
    "softcap": ((128, 128), {"softcap": 30.0} | CAUSAL_BAND),
    "causal float16": ((96, 96), CAUSAL_BAND | {"dtype": "float16"}),
    "lengths": ((128, 128), {"q_lengths": True, "kv_lengths": True, "scale": -0.1} | CAUSAL_BAND),
    "row of bias": ((128, 128), test_flash_backward_terms.TERMS["row-bias"] | CAUSAL_BAND),
    "slopes": ((128, 128), {"alibi_slopes": (1, 4)} | CAUSAL_BAND),
}
FILTERS: dict[str, tuple[tuple[int, int], dict[str, object]]] = {
    "segments": ((128, 128), {"segments": True} | CAUSAL_BAND),
    "positions": ((128, 128), {"positions": True} | CAUSAL_BAND),
    "mask": ((128, 128), test_flash_backward_terms.TERMS["mask"]),
}
# Beside dropout consumers add dq up, but in an order warps of their own do.
DROPOUT: dict[str, tuple[tuple[int, int], dict[str, object]]] = {
    f"dropout {width}": ((width, width), test_flash_backward_terms.TERMS["dropout"] | CAUSAL_BAND)
    for width in (64, 128)
}


@pytest.mark.parametrize(
    ("name", "order"),
    [(name, order) for name in WITHOUT_FILTERS for order in (1, 2)]
    + [(name, 1) for name in FILTERS]
    + [(name, 2) for name in DROPOUT],
)
def test_registers_suffice_and_each_part_is_one_copy(name: str, order: int, tmp_path: Path) -> None:
    head_dims, changes = (WITHOUT_FILTERS | FILTERS | DROPOUT)[name]
    key = key_of_fused(test_flash_terms.problem(head_dims, **changes), order)
    assert {f"dq_order={order}", "bulk_reduce=1", "schedule=2"} <= set(key.split())
    toolchain.require_nvrtc()
    code, log = toolchain.compile_once(key)
    kernel = resources.read_log(key, log)
    assert kernel.faults == ()
    text = toolchain.disassemble(code, tmp_path)
    assert text.count(" UBLKRED.") == text.count(" UBLKCP.G.S") == 1
    assert " RED." not in text


@pytest.mark.parametrize("name", WITHOUT_FILTERS | DROPOUT)
def test_in_order_a_deterministic_call_needs_no_kernel_for_dq(name: str) -> None:
    head_dims, changes = (WITHOUT_FILTERS | DROPOUT)[name]
    spec = test_flash_terms.problem(head_dims, **changes)
    assert key_of_fused(spec, 2, deterministic=True) == key_of_fused(spec, 2)
    for order in (0, 1):
        keys = planned(spec, order, deterministic=True)
        assert {"sm90_backward_dkv", "sm90_backward_dq"} <= {
            toolchain.word(key, "family") for key in keys
        }


@pytest.mark.parametrize("name", FILTERS)
def test_where_tiles_are_filtered_no_order_follows_from_their_numbers(name: str) -> None:
    head_dims, changes = FILTERS[name]
    spec = test_flash_terms.problem(head_dims, **changes)
    assert "dq_order=0" in key_of_fused(spec, 2).split()
    assert planned(spec, 2, deterministic=True) == planned(spec, 0, deterministic=True)


@pytest.mark.parametrize("name", WITHOUT_FILTERS | FILTERS | DROPOUT)
def test_warps_add_dq_up_by_themselves(name: str) -> None:
    """In any order, or, deterministic, in that of the key tiles; where that cannot be, two kernels.

    Beside dropout at head dim 64 nothing is gained without drop warps.
    """
    head_dims, changes = (WITHOUT_FILTERS | FILTERS | DROPOUT)[name]
    spec = test_flash_terms.problem(head_dims, **changes)
    plans = [
        tiles.plan_backward(spec, wants=(True, True, True, False), deterministic=strict).kernels
        for strict in (False, True)
    ]
    assert ("dq_order=1" in plans[0]) == (name != "dropout 64")
    assert ("sm90_backward_dq" if name in FILTERS else "dq_order=2") in plans[1]


WITHOUT_ITEMS: dict[str, tuple[tuple[int, int], dict[str, object]]] = {
    "mask 64": ((64, 64), test_flash_backward_terms.TERMS["mask"]),
    "mask and segments": ((128, 128), test_flash_backward_terms.TERMS["mask"] | {"segments": True}),
    "dropout and lengths 64": (
        (64, 64),
        test_flash_backward_terms.TERMS["dropout"] | {"kv_lengths": True},
    ),
    "dropout and segments": (
        (128, 128),
        test_flash_backward_terms.TERMS["dropout"] | {"segments": True},
    ),
    "dropout and slopes": (
        (128, 128),
        test_flash_backward_terms.TERMS["dropout"] | {"alibi_slopes": (1, 4)},
    ),
}


@pytest.mark.parametrize("name", WITHOUT_ITEMS)
def test_where_no_block_takes_items_consumers_add_dq_up(name: str) -> None:
    head_dims, changes = WITHOUT_ITEMS[name]
    key = key_of_fused(test_flash_terms.problem(head_dims, **changes), 1)
    assert {"dq_order=0", "schedule=0"} <= set(_core.canonical_kernel_key(key).split())


def test_shared_memory_and_scratch_have_room_for_the_counters(tmp_path: Path) -> None:
    keys, counted = [], []
    for head_dims, changes in WITHOUT_FILTERS.values():
        spec = test_flash_terms.problem(head_dims, **changes)
        keys.append(key_of_fused(spec, 1))
        tile = tiles.keys_tile(spec, fused=True)
        tile = dataclasses.replace(tile, takes_items=True, dq_order=1)
        counted.append(tiles.keys_shared_bytes(tile, spec, fused=True))
        plans = []
        for order in (0, 1):
            with tiles.dq_order(order):
                plans.append(
                    tiles.plan_backward(spec, wants=(True, True, True, False), deterministic=False)
                )
        rows = spec.batch * spec.num_heads * spec.q_len
        assert plans[1].scratch_bytes - plans[0].scratch_bytes >= rows // 64 * 2 * 4
    assert counted == test_flash_backward_terms.shared_bytes(keys, tmp_path)
