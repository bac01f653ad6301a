"""What the whole tier needs: every compilation speaks, and processes share what they compile."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import toolchain


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all processes of a test run."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def shared_kernels(folder: Path) -> Iterator[None]:
    """Where `toolchain.compile_once` keeps what it compiled, for as long as the test run lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "shared_folder", folder / "kernels")
        yield


@pytest.fixture(scope="session", autouse=True)
def no_cache_of_nvrtc() -> Iterator[None]:
    """Where a GPU is, NVRTC (12.9 and later) keeps what it compiled, and a kernel found there has an empty log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_CACHE_DISABLE", "1")
        yield
