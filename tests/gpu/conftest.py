"""Tier gpu: skips, and says so, where there is no CUDA device; skips the backends this build does not have."""

import functools
import os

import worker_cores

# A process starts as many threads for XLA and for BLAS as it may use cores. On 16 cores, 16 workers of 16 threads each
# took 40 s for a test; kept to a core each, they ran 917 tests in 296 s. BLAS counts when numpy is imported, which
# plugins of pytest do before this file is read: so the process that starts the workers says it, and they inherit it.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    count = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.sched_setaffinity(0, worker_cores.share(worker, count, os.sched_getaffinity(0)))
else:
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")

# Several worker processes share one device, which JAX would otherwise give to the first.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# XLA tries forms of its own products when it compiles them, which takes longer than most tests.
os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}".strip()

import jax
import pytest

import jattn


@functools.cache
def missing() -> str:
    """What the tier lacks here; empty if nothing."""
    if jax.config.jax_platforms == "cpu":
        return "this process was set to the CPU (tests/cpu in the same run?): run the tier with `make test-gpu`"
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"no CUDA device: {error}"
    return ""


@functools.cache
def backend_missing(backend: str) -> str:
    """Why a backend is not there at all: the reasons it gives for the plainest 16-bit problem."""
    plain = jax.ShapeDtypeStruct((1, 128, 2, 64), "bfloat16")
    found = jattn.explain(plain, plain, plain, implementation=backend)
    if found.chosen == backend:
        return ""
    return "; ".join(str(reason) for reason in found.reasons[backend])


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> None:
    """Skips a test whose device is missing, or its backend: that of its argument, else those that its mark names."""
    if reason := missing():
        pytest.skip(reason)
    mark = request.node.get_closest_marker("backends")
    names = mark.args if mark else ()
    if "backend" in request.fixturenames:
        names = (request.getfixturevalue("backend"),)
    for name in names:
        if reason := backend_missing(name):
            pytest.skip(reason)
