"""The gpu tier's workers and their cores."""

import collections
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import worker_cores

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("num_workers", "num_cores", "fewest", "most"),
    [(1, 4, 4, 4), (4, 4, 1, 1), (4, 16, 4, 4), (12, 16, 1, 2), (5, 16, 3, 4)],
)
def test_cores_are_shared_out(num_workers: int, num_cores: int, fewest: int, most: int) -> None:
    cores = set(range(3, 3 + 2 * num_cores, 2))
    shares = [worker_cores.share(f"gw{i}", num_workers, cores) for i in range(num_workers)]
    assert sorted(core for share in shares for core in share) == sorted(cores)
    assert {len(share) for share in shares} <= {fewest, most}


@pytest.mark.parametrize(("num_workers", "num_cores"), [(16, 2), (3, 2), (7, 1)])
def test_fewer_cores_than_workers(num_workers: int, num_cores: int) -> None:
    cores = set(range(5, 5 + num_cores))
    shares = [worker_cores.share(f"gw{i}", num_workers, cores) for i in range(num_workers)]
    assert {len(share) for share in shares} == {1}
    load = collections.Counter(core for share in shares for core in share)
    assert load.keys() == cores
    assert max(load.values()) - min(load.values()) <= 1


def test_workers_of_the_gpu_tier_keep_to_their_cores(tmp_path: Path) -> None:
    """Two workers, each with its share of the cores and one thread for BLAS."""
    shutil.copy(ROOT / "tests/gpu/conftest.py", tmp_path)
    (tmp_path / "test_nothing.py").write_text("""
import json, os
from pathlib import Path

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    found = sorted(os.sched_getaffinity(0)), os.environ["OPENBLAS_NUM_THREADS"]
    Path(__file__).with_name(worker).write_text(json.dumps(found))

def test_nothing():
    pass
""")
    left_to_the_tier = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = {name: x for name, x in os.environ.items() if name not in left_to_the_tier}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**environment, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for worker in ("gw0", "gw1"):
        cores = worker_cores.share(worker, 2, os.sched_getaffinity(0))
        assert json.loads((tmp_path / worker).read_text()) == [sorted(cores), "1"]
