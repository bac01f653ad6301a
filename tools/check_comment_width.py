"""Fails on comment lines of C++ and CUDA that are wider than 120 columns, which clang-format does not break.

Arguments: the files to look at; without any, all that are checked.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120
FOLDERS = ("cc", "tests/compile", "benchmarks", "tools")
SUFFIXES = {".h", ".cc", ".inl", ".cuh", ".cu"}


def is_checked(path: Path) -> bool:
    name = path.relative_to(ROOT).as_posix()
    inside = any(name.startswith(f"{folder}/") for folder in FOLDERS)
    return inside and path.suffix in SUFFIXES


def all_files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*"))


def wide_comments(text: str) -> Iterator[tuple[int, int]]:
    """The number and the width of each line with a comment that is too wide."""
    for number, line in enumerate(text.splitlines(), 1):
        if "//" in line and len(line) > WIDTH:
            yield number, len(line)


def main(names: list[str]) -> int:
    """Prints what is too wide; returns the exit status."""
    files = [Path(name).resolve() for name in names] if names else list(all_files())
    found = [
        f"{path.relative_to(ROOT)}:{number}: {width} columns, must be at most {WIDTH}"
        for path in files
        if is_checked(path)
        for number, width in wide_comments(path.read_text())
    ]
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
