from pathlib import Path

import pytest
from journals import commit_steps


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A directory with steps 1 to 3; the record of step 3 is at byte 8192, that of step 2 at byte 4096."""
    commit_steps(tmp_path / "run", 1, 2, 3)
    return tmp_path / "run"
