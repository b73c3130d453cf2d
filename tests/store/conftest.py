"""What several tests of the store run twice."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from memwall.store.engines import EngineName, adopt


@pytest.fixture(params=["system calls", "io_uring"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineName]:
    """The disk of `tmp_path`, served by each engine in turn."""
    try:
        adopt(tmp_path, request.param)
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")
    yield request.param
    adopt(tmp_path, "system calls")
