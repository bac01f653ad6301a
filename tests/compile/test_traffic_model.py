"""The model of traffic between L2 and memory (tools/model_backward_traffic.py) counts what can be counted by hand."""

import model_backward_traffic as model
import pytest

CAUSAL = model.Problem(length=2048, batch=2, heads=8, kv_heads=2, head_dim=128, window=0)
PROBLEMS = [
    CAUSAL,
    model.Problem(length=1000, batch=1, heads=6, kv_heads=3, head_dim=64, window=0),
    model.Problem(length=2048, batch=1, heads=4, kv_heads=4, head_dim=128, window=300),
    model.Problem(length=700, batch=1, heads=4, kv_heads=1, head_dim=128, window=-1),
]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_order_has_the_same_steps(problem: model.Problem) -> None:
    queries = problem.queries_of_tile
    for item in model.items_of(problem, section=3):
        keys = range(
            item.key_tile * model.KEYS_OF_TILE,
            min((item.key_tile + 1) * model.KEYS_OF_TILE, problem.length),
        )
        seen = {
            row // queries
            for row in range(problem.length)
            for key in keys
            if problem.window < 0 or 0 <= row - key <= (problem.window or problem.length)
        }
        heads = range(item.kv_head * problem.group, (item.kv_head + 1) * problem.group)
        for order in model.ORDERS:
            steps = list(model.steps_of(problem, item, order))
            assert sorted(steps) == [(head, tile) for head in heads for tile in sorted(seen)]


@pytest.mark.parametrize("order", model.ORDERS)
def test_a_cache_that_holds_everything_reads_queries_once_and_writes_nothing(order: str) -> None:
    read, written, share = model.traffic(CAUSAL, 2, order, 1e12)
    assert read == CAUSAL.batch * CAUSAL.length * CAUSAL.heads * CAUSAL.head_dim * 4
    assert written == 0
    assert 0 < share < 1


def test_a_cache_that_holds_nothing_moves_every_step() -> None:
    read, written, _ = model.traffic(CAUSAL, 2, "groups", 0)
    steps = sum(len(list(model.steps_of(CAUSAL, x, "groups"))) for x in model.items_of(CAUSAL, 2))
    half = CAUSAL.queries_of_tile * CAUSAL.head_dim * 4
    tiles = CAUSAL.batch * CAUSAL.heads * CAUSAL.length // CAUSAL.queries_of_tile
    assert written == steps * half
    assert read == (2 * steps - tiles) * half


def test_groups_that_walk_together_leave_least_to_memory() -> None:
    """Groups of eight heads and two items for each multiprocessor."""
    problem = model.Problem(length=4096, batch=2, heads=32, kv_heads=4, head_dim=128, window=0)
    moved = {order: sum(model.traffic(problem, 8, order, 24e6)[:2]) for order in model.ORDERS}
    assert moved["groups"] < 0.5 * min(moved[order] for order in moved if order != "groups")
