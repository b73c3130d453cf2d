"""Source text run in a Python process of its own: what is measured of a process, or lives as long as one."""

import json
import os
import subprocess
import sys
from typing import Any

__all__ = ["printed_by"]


def printed_by(source: str, *arguments: object) -> Any:
    """The JSON that it prints, run with one thread."""
    result = subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
