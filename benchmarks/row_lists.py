"""Makes the record of a run of the acceptance rows, out of what pytest writes.

  make test ARGS="--full --junitxml=FILE.xml"
  python -m benchmarks.row_lists FILE.xml --out benchmarks/results/2026-01-01-cpu-full-lists.json

Several files count together: a long list may be run in pieces. JATTN_COMMIT says which commit ran, if not this one.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks import report

ROW = re.compile(r"(?<=_)([TR]\d{3}|J\d{2})(?=_)")  # as test functions carry them: tests/rows.py

Counts = dict[str, dict[str, int]]


def outcome(case: ElementTree.Element) -> str:
    """What became of one test: "passed", "failed" or "skipped"."""
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def count(files: Iterable[Path]) -> tuple[Counts, Counts, list[str]]:
    """Returns outcomes by row and by file, and the names of what failed."""
    by_row: Counts = collections.defaultdict(lambda: collections.defaultdict(int))
    by_file: Counts = collections.defaultdict(lambda: collections.defaultdict(int))
    failed: list[str] = []
    for path in files:
        for case in ElementTree.parse(path).iter("testcase"):
            name, result = case.attrib["name"], outcome(case)
            by_file[case.attrib["classname"].rpartition(".")[2]][result] += 1
            for row in ROW.findall(name.partition("[")[0]):
                by_row[row][result] += 1
            if result == "failed":
                failed.append(name)
    return by_row, by_file, failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the record; fails if a test failed, or if none ran."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", help="what pytest --junitxml wrote")
    parser.add_argument("--out", type=Path, required=True, help="the record to write")
    parser.add_argument(
        "--command", default="tests/cpu --full", help="what pytest was given (%(default)s)"
    )
    options = parser.parse_args(arguments)
    by_row, by_file, failed = count(options.files)
    facts = report.circumstances() | {"command": f"pytest {options.command}"}
    content = {
        **facts,
        "failed": failed,
        "files": {name: dict(found) for name, found in sorted(by_file.items())},
        "rows": {name: dict(found) for name, found in sorted(by_row.items())},
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    passed = sum(found.get("passed", 0) for found in by_file.values())
    print(f"{passed} passed, {len(failed)} failed, {len(by_row)} rows")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
