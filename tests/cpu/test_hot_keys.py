"""The kernels compiled ahead of time are those that the planners ask for: a key that fell behind is never found."""

from pathlib import Path

from jattn.backends import cuda_tiles, flash_backward_tiles, flash_tiles

HOT_SET = Path(__file__).parents[2] / "cc" / "core" / "hot_set.txt"


def test_hot_set_is_what_the_planners_produce() -> None:
    lines = [line.strip() for line in HOT_SET.read_text().splitlines()]
    listed = [line for line in lines if line and not line.startswith("#")]
    assert len(listed) == len(set(listed))
    planners = (cuda_tiles, flash_tiles, flash_backward_tiles)
    assert set(listed) == {key for planner in planners for key in planner.hot_keys()}
