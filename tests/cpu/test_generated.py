"""What is written by programs: tables of README and docs, pictures, and what their makers read out of records."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import generate_wgmma
import pytest

from benchmarks import backend_table, cpu_tiles, plot, records, tables
from jattn.spec import FEATURES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda p: p.name)
def test_tables_are_what_would_be_written(page: Path) -> None:
    assert tables.rewrite(page) == page.read_text()


def test_a_changed_number_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    text = (ROOT / "README.md").read_text()
    page.write_text(
        text.replace("| 128 | causal | 8192 | forward |", "| 128 | causal | 8192 | backward |")
    )
    assert page.read_text() != text
    monkeypatch.setattr(tables, "PAGES", (page,))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "_link", lambda *_: "")
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 0


def test_a_figure_of_another_record_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot.stale() == []
    record = records.newest("cpu-two-cores")
    changed = tmp_path / record.path.name
    changed.write_text(record.path.read_text().replace('"rows": [', '"rows":  ['))
    for other in records.RESULTS.glob("*.json"):
        if other.name != record.path.name:
            shutil.copy(other, tmp_path)
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    assert plot.stale() == ["speed_cpu"]
    monkeypatch.setattr(tables, "PAGES", ())
    assert tables.main(["--check"]) == 1
    assert "speed_cpu.svg" in capsys.readouterr().err


def test_the_record_of_tiles_becomes_a_row_for_each_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "scores float32 64 - 64 2e-06 5.24e+05 3.5e+11 6",
        "softmax float32 0 - 64 6e-07 0 4e+11 0",
        "forward float32 64 causal 1024 2e-3 2.6e+08 3.5e+11 6",
    )
    rows = [cpu_tiles.parse("amx", line) for line in lines]
    assert rows[1].share is None
    content = {
        "time": "2026-01-01T00:00:00Z",
        "device": "a machine",
        "commit": "abcdef012",
        "what": "What it is",
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    path = tmp_path / "2026-01-01-cpu-tiles.json"
    path.write_text(json.dumps(content))
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "_caption", lambda *_: "caption")
    table = tables.cpu_tiles(ROOT / "docs" / "benchmarks.md")
    row = table.splitlines()[2]
    assert row == "| amx | float32 | 64 | 350 | 262 (75%) | - | 130 (37%) | - | - | - |"


def test_an_unknown_table_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table made-up -->\n<!-- end table -->\n")
    with pytest.raises(LookupError, match="'made-up'"):
        tables.rewrite(page)


def test_every_feature_has_words_and_a_row() -> None:
    assert set(backend_table.ARGUMENTS) == {"causal", "causal_window", *FEATURES}
    first = [row[0] for row in backend_table.rows()]
    assert first[4:] == list(backend_table.ARGUMENTS.values())
    largest = dict(zip(backend_table.rows()[0], backend_table.rows()[3], strict=True))
    assert largest["`flash`"] == "256"
    assert largest["`mem_efficient`"] == "512 (float32 with gradients: 384 on sm_86, sm_89, sm_120)"
    names = [row[0] for row in backend_table.summary()[1:]]
    assert names == ["`flash`", "`mem_efficient`", "`cudnn`", "`cpu`", "`xla`", "`reference`"]
    assert largest["`cudnn`"] == "256 (128 on sm_80, sm_86, sm_89)"
    refused = dict(
        zip(names, (row[-1].split("; ") for row in backend_table.summary()[1:]), strict=True)
    )
    assert set(refused["`cudnn`"]) < set(backend_table.ARGUMENTS.values())


@pytest.mark.parametrize("path", sorted(records.RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_records_say_device_date_and_commit(path: Path) -> None:
    record = records.read(path)
    assert record.date == path.name[:10] or record.date < path.name[:10]
    # Of a state between two commits, both.
    assert re.search(r"\b[0-9a-f]{7,40}\b", record.content["commit"])
    assert record.content["device"] in record.caption()
    text = path.read_text()
    assert json.loads(text) == record.content
    assert "/home/" not in text
    assert "/tmp/" not in text


def test_problems_are_read_from_names() -> None:
    found = records.problem_of("bench-D128-S8192-causal")
    assert found == records.Problem("bfloat16", 128, 8192, True)
    assert records.problem_of("D64 full 1024") == records.Problem("bfloat16", 64, 1024, False)
    assert records.problem_of("bench-cpu-f32-full") == records.Problem("float32", 64, 1024, False)
    assert records.problem_of("float16-512-d128-causal") == records.Problem(
        "float16", 128, 512, True
    )
    assert records.problem_of("window 128 16384") is None


def test_the_wgmma_header_is_what_its_script_writes() -> None:
    path = ROOT / "cc" / "kernels" / "sm90" / "wgmma_shapes.cuh"
    formatter = Path(sys.executable).with_name("clang-format")
    if not formatter.exists():
        pytest.skip("needs clang-format, of the extra dev")
    written = "".join(
        (
            generate_wgmma.HEADER,
            *map(generate_wgmma.shape, generate_wgmma.WIDTHS),
            generate_wgmma.FOOTER,
        )
    )
    done = subprocess.run(
        [formatter, f"--assume-filename={path}"],
        input=written,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == path.read_text()


def test_pictures_are_what_would_be_drawn() -> None:
    path = ROOT / "docs" / "images" / "draw.py"
    spec = importlib.util.spec_from_file_location("draw", path)
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    for name, picture in draw.PICTURES.items():
        assert (path.parent / f"{name}.svg").read_text() == picture().svg(), name
