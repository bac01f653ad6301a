"""The demo in small, the claims it must be able to fail, and the examples of the README."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TINY = ["--batch", "4", "--seq-len", "96", "--layers", "1", "--heads", "2", "--head-dim", "16"]
TINY += [
    "--data-bytes",
    "300000",
    "--sample-bytes",
    "8",
    "--learning-rate",
    "1e-2",
    "--compare-steps",
    "4",
]


def load_demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_lm", ROOT / "examples" / "train_lm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_lm"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


demo = load_demo()


def run_demo(out: Path, *arguments: str, flags: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "examples/train_lm.py", *TINY, "--out", str(out), *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_LOG_COMPILES": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_demo_trains_and_its_claims_hold(tmp_path: Path) -> None:
    finished = run_demo(tmp_path, "--steps", "300")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "FAILED" not in finished.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["claims"]) == 7
    assert set(result["runs"]["jattn"]["calls"]) == {"cpu"}
    assert result["runs"]["jax.nn, dense mask"]["calls"] == {}
    assert set(result["runs"]["jattn reference"]["calls"]) == {"reference"}
    assert len(result["runs"]["jattn"]["losses"]) == 300
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@dataclasses.dataclass(frozen=True)
class ShortRun:
    """A few steps of the demo: our losses, and how often each of its functions was compiled."""

    losses: np.ndarray
    compilations: collections.Counter[str]


@pytest.fixture(scope="module")
def short_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ShortRun]:
    """Runs on one device and on two by two virtual ones with dropout, and on one without."""
    runs = {}
    for name, devices, arguments in (
        ("one", 1, ["--dropout", "0.3"]),
        ("mesh", 4, ["--dropout", "0.3", "--mesh", "2x2"]),
        ("none", 1, []),
    ):
        short = ["--steps", "8", "--compare-steps", "3", "--sample-bytes", "4"]
        flags = f"--xla_force_host_platform_device_count={devices}"
        out = tmp_path_factory.mktemp(name)
        finished = run_demo(out, *short, *arguments, flags=flags)
        assert "ok      loss curve of 'jattn reference'" in finished.stdout, finished.stderr
        result = json.loads((out / "result.json").read_text())
        compiled = re.findall(r"Finished XLA compilation of jit\((\w+)\)", finished.stderr)
        runs[name] = ShortRun(
            np.array(result["runs"]["jattn"]["losses"]), collections.Counter(compiled)
        )
    return runs


def test_dropout_gives_the_same_curve_on_one_device_and_on_a_mesh(
    short_runs: dict[str, ShortRun],
) -> None:
    """Two by two virtual devices drop the weights that one drops; no dropout is another curve."""
    losses = {name: run.losses for name, run in short_runs.items()}
    assert np.abs(losses["one"] - losses["mesh"]).max() < 1e-5
    assert np.abs(losses["one"] - losses["none"]).max() > 1e-3


@pytest.mark.parametrize(("name", "runs"), [("one", 2), ("mesh", 2), ("none", 3)])
def test_each_function_is_compiled_once_a_run(
    name: str, runs: int, short_runs: dict[str, ShortRun]
) -> None:
    """With dropout two runs train, one with each backend of ours; four kinds of attention judge rows held out."""
    compiled = short_runs[name].compilations
    assert {n: compiled[n] for n in ("step", "loss", "write")} == {
        "step": runs,
        "loss": 4,
        "write": 1,
    }


@pytest.mark.parametrize("holds", [True, False])
def test_exit_status_says_whether_the_claims_hold(
    holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = demo.Run("jattn", np.ones(4), np.ones(2), {}, None)
    monkeypatch.setattr(demo, "train", lambda *_: run)
    monkeypatch.setattr(demo, "held_out_loss", lambda *_: 1.0)
    monkeypatch.setattr(demo, "generate", lambda *_: "def")
    monkeypatch.setattr(demo, "check_claims", lambda *_: [(True, "one"), (holds, "other")])
    assert demo.main([*TINY, "--steps", "4", "--out", str(tmp_path)]) == (0 if holds else 1)
    assert ("FAILED  other" in capsys.readouterr().out) is not holds


def claims_of(**changes: Any) -> list[bool]:
    """What the claims say of made-up runs that are perfect but for the changes."""
    config, _ = demo.parse_arguments(["--steps", "4", "--compare-steps", "2"])
    facts: dict[str, Any] = {
        "curve": [3.0, 2.0],
        "loss": 1.5,
        "other": 1.5,
        "ignoring": 1.6,
        "calls": {"cpu": {"forward": 3, "backward": 3}},
    }
    facts |= changes
    seconds = np.ones(2)
    runs = [
        demo.Run("jattn", np.array([3.0, 2.0, 1.5, 1.5]), seconds, facts["calls"], None),
        demo.Run("other", np.array(facts["curve"]), seconds, {}, None),
    ]
    held_out = {
        "jattn": facts["loss"],
        "other": facts["other"],
        "documents_ignored": facts["ignoring"],
    }
    return [holds for holds, _ in demo.check_claims(config, runs, held_out, entropy=3.0)]


def test_claims_notice_what_they_claim() -> None:
    assert claims_of() == [True] * 5
    assert claims_of(loss=2.5, other=2.5) == [False, True, True, True, True]
    assert claims_of(curve=[3.0, 2.001]) == [True, False, True, True, True]
    assert claims_of(curve=[3.0, float("nan")]) == [True, False, True, True, True]
    assert claims_of(other=1.501) == [True, True, False, True, True]
    assert claims_of(ignoring=1.5) == [True, True, True, False, True]
    for calls in ({}, {"cpu": {"forward": 3}}, {"xla": {"forward": 3, "backward": 3}}):
        assert claims_of(calls=calls) == [True, True, True, True, False]


def test_packing_cuts_documents_and_marks_padding() -> None:
    documents = [bytes([1]) * 20, bytes([2]) * 30, bytes([3]) * 17]
    rows, segments = demo.pack([*documents, bytes([4]) * 40], seq_len=63)
    assert rows.shape == segments.shape == (1, 64)
    assert (rows[0] == np.repeat([1, 2, 0], [20, 30, 14])).all()
    assert (segments[0] == np.repeat([0, 1, demo.PADDING], [20, 30, 14])).all()


def test_dense_mask_is_the_segments_spelled_out() -> None:
    mask = demo.dense(np.array([[0, 0, 1, demo.PADDING]]))
    assert mask.shape == (1, 1, 4, 4)
    assert np.asarray(mask[0, 0]).tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, False, True, False],
        [False, False, False, False],
    ]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--steps", "0"], "--steps"),
        (["--steps", "3", "--compare-steps", "4"], "--compare-steps"),
        (["--dropout", "1.0"], "--dropout"),
        (["--mesh", "100x1"], "--mesh"),
        (["--mesh", "two"], "--mesh"),
    ],
)
def test_demo_refuses_sizes_that_make_no_sense(
    arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        demo.parse_arguments(arguments)
    assert re.search(f"error: {name} is .*, must be", capsys.readouterr().err)


def test_readme_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    checks = (
        "assert out.shape == (2, 128, 8, 64) and lse.shape == (2, 128, 8) and y.shape == x.shape\n"
    )
    checks += "assert all(map(lambda g: bool(jnp.isfinite(g).all()), (*gradients, out, y)))\n"
    finished = subprocess.run(
        [sys.executable, "-W", "error::jattn.FallbackWarning", "-c", "\n".join(blocks) + checks],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "chosen: cpu" in finished.stdout


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "docs/conventions.md", "docs/debugging.md"]
)
def test_pages_name_files_and_targets_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / page).parent / target).exists(), target
    for path in re.findall(r"`((?:tools|docs|tests|benchmarks|examples|cc)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"(?<=`)make ([a-z-]+)", text):
        assert target in targets, target
