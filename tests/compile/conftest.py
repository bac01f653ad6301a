"""What the whole tier needs: every compilation speaks."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_cache_of_nvrtc() -> Iterator[None]:
    """Where a GPU is, NVRTC (12.9 and later) keeps what it compiled, and a kernel found there has an empty log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_CACHE_DISABLE", "1")
        yield
