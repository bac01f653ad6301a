"""Tiers: tests/cpu needs Python and a C++ compiler, tests/compile also nvcc or NVRTC, tests/gpu a CUDA device.

A test that takes the argument `backend` runs once for every backend of its tier. A session that ran nothing fails.
"""

import collections
import os
import zlib
from collections.abc import Hashable, Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

import jattn
from jattn import _core

CPU_BACKENDS = ("reference", "xla", "cpu")
GPU_BACKENDS = ("mem_efficient", "flash")
MOST_PROGRAMS = 1000  # that a process keeps

# Float32 products on a GPU default to tf32; a test compares with float64 (docs/conventions.md).
jax.config.update("jax_default_matmul_precision", "highest")

hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=60, print_blob=True
)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=400, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="full lists of the acceptance rows")
    parser.addoption(
        "--every", type=int, default=1, metavar="N", help="of every test function each Nth case"
    )
    parser.addoption(
        "--instruction-set",
        default="",
        metavar="NAME",
        help="what the CPU kernel runs on where a test does not say it (the best that there is)",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before every test, since those that choose a set themselves leave the best one behind."""
    name = item.config.getoption("--instruction-set")
    if name and not _core.cpu_force_instruction_set(name):
        sets = ", ".join(_core.cpu_instruction_sets())
        raise pytest.UsageError(f"--instruction-set {name}: this machine can run {sets}")


@pytest.fixture
def clean_fusion_log() -> Iterator[None]:
    """The records of a test are its own."""
    jattn.clear_fusion_log()
    yield
    jattn.clear_fusion_log()


def pytest_runtest_teardown() -> None:
    """Each of XLA's programs takes 1.5 MB and makes the next take longer to compile, of 3000 twice as long."""
    if len(jax.local_devices()[0].client.live_executables()) > MOST_PROGRAMS:
        jax.clear_caches()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only `--full` asks for: long lists, and parts of others; and what `--every` passes over."""
    chosen, every = items, config.getoption("--every")
    is_full = config.getoption("--full")
    if not is_full:
        chosen = [item for item in chosen if not item.get_closest_marker("full")]
        thinned = {item for item in chosen if _is_thinned(item)}
        few = _some_of([item for item in chosen if item in thinned])
        chosen = [item for item in chosen if item not in thinned or item in few]
    # By name: every sixth test of a list would be of one backend where six cases alternate between two.
    chosen = [item for item in chosen if zlib.crc32(item.nodeid.encode()) % every == 0]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def _is_thinned(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("thinned") and not item.get_closest_marker("whole"))


def _some_of(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of each test function the first six cases and two of five others; and the first case with a parameter value that
    none of these has, unless the value is that of one case alone.
    """
    seen: collections.Counter[str] = collections.Counter()
    some = set()
    for item in items:
        number = seen[_function(item)]
        seen[_function(item)] += 1
        if number < 6 or number % 5 in (0, 3):
            some.add(item)
    counts = collections.Counter(value for item in items for value in _values(item))
    met = {value for item in some for value in _values(item)}
    for item in items:
        missed = {value for value in _values(item) if counts[value] > 1} - met
        if missed:
            some.add(item)
            met |= missed
    return some


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _values(item: pytest.Item) -> list[tuple[object, ...]]:
    """The values of its parameters, each with the test function and the name of the parameter."""
    callspec = getattr(item, "callspec", None)
    return [
        (_function(item), name, value if isinstance(value, Hashable) else id(value))
        for name, value in (callspec.params.items() if callspec else ())
    ]


def tier_of(path: Path) -> str:
    """The folder under tests/ that a test lives in."""
    parts = path.parts
    return parts[parts.index("tests") + 1] if "tests" in parts else ""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives the argument `backend` every backend of the tier; `pytest.mark.backends(...)` narrows the list."""
    marks = metafunc.definition.iter_markers("parametrize")
    if "backend" not in metafunc.fixturenames or any("backend" in mark.args[0] for mark in marks):
        return
    backends = GPU_BACKENDS if tier_of(metafunc.definition.path) == "gpu" else CPU_BACKENDS
    if marker := metafunc.definition.get_closest_marker("backends"):
        backends = tuple(name for name in backends if name in marker.args)
    metafunc.parametrize("backend", backends)


class Ran:
    """Counts the tests that were not skipped, on the process that reports."""

    count = 0


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and not report.skipped:
        Ran.count += 1


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    is_worker = hasattr(session.config, "workerinput")
    if (
        is_worker
        or session.config.option.collectonly
        or exitstatus not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    ):
        return
    if Ran.count == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if Ran.count == 0 and not terminalreporter.config.option.collectonly:
        terminalreporter.write_line(
            "No test ran: a tier with nothing to run is a failure.", red=True
        )
