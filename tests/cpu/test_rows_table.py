"""Every acceptance row is in the table, and the table tells the truth about the tests."""

import ast
import re
from pathlib import Path

import pytest
from rows import ROWS, Covered, NotApplicable

TESTS = Path(__file__).parents[1]
RAGGED = (
    *range(1, 7), *range(10, 17), *range(20, 27), 30, 31, *range(40, 44), *range(50, 53), *range(60, 65),
    *range(100, 114),
)  # fmt: skip
IDS = [
    *(f"T{i:03}" for i in range(1, 90)),
    *(f"J{i:02}" for i in range(1, 15)),
    *(f"R{i:03}" for i in RAGGED),
]


def ids_of_tests(tier: str) -> set[str]:
    """The row ids in the names of the tier's test functions."""
    found: set[str] = set()
    for path in (TESTS / tier).glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found |= set(re.findall(r"(?<=_)([TR]\d{3}|J\d{2})(?=_)", node.name))
    return found


def test_every_row_is_in_the_table() -> None:
    assert list(ROWS) == IDS


@pytest.mark.parametrize("tier", ["cpu", "gpu"])
def test_the_table_names_the_tiers_where_tests_are(tier: str) -> None:
    claimed = {
        row
        for row, entry in ROWS.items()
        if not isinstance(entry, NotApplicable) and tier in entry.tiers
    }
    assert ids_of_tests(tier) == claimed


def test_every_entry_says_where_or_why() -> None:
    for row, entry in ROWS.items():
        if isinstance(entry, Covered):
            assert entry.tiers, row
        else:
            assert len(entry.reason) > 10, row
