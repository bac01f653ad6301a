"""What the benches of the sm90 kernels say of two states of a kernel timed in one run."""

import pytest
import sm90_bench
from sm90_bench import OTHER


def test_comparison_pairs_variants_of_one_name() -> None:
    speed = {
        "torch cudnn": 500.0,
        "a": 660.0,
        "a'": 648.0,
        "a" + OTHER: 600.0,
        "a" + OTHER + "'": 590.0,
        "b": 700.0,
    }
    lines = sm90_bench.comparison(
        [{"case": "full 1024", "tflops": speed}, {"case": "full 2048", "tflops": {"b": 700.0}}]
    )
    assert len(lines) == 2
    assert lines[0].split() == ["full", "1024", "a", "660.0", "1.099x", "other", "+-", "0.019"]
    assert "1.099x other" in lines[1]
    assert "1 cases" in lines[1]


def test_comparison_of_variants_timed_once() -> None:
    records = [
        {"case": str(i), "tflops": {"a": speed, "a" + OTHER: 100.0}}
        for i, speed in enumerate((50.0, 200.0))
    ]
    *each, mean = sm90_bench.comparison(records)
    assert [line.split()[3:] for line in each] == [["0.500x", "other"], ["2.000x", "other"]]
    assert "1.000x other" in mean
    assert "worst 0.500x" in mean


@pytest.mark.parametrize("records", [[], [{"case": "full", "tflops": {"a": 1.0, "a'": 1.0}}]])
def test_comparison_without_another_folder_says_nothing(records: list[dict[str, object]]) -> None:
    assert sm90_bench.comparison(records) == []
