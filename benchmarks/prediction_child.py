"""Cases of `prediction.py` in processes of their own: a child prints a JSON object per line, its parent reads them."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

_MOST_SAID = 2000


@contextmanager
def own_standard_output() -> Iterator[TextIO]:
    """Standard output for the lines alone: what libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w") as lines:
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        yield lines


def answers(script: str, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The objects that a script of this folder prints, as it prints them.

    Raises:
        RuntimeError: the script failed; the message ends with what it said.
    """
    command = [sys.executable, str(Path(__file__).parent / script), *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                yield json.loads(line)
        if child.returncode:
            said.seek(0)
            raise RuntimeError(
                f"{script} {' '.join(arguments)} ended with status {child.returncode}:\n{said.read()[-_MOST_SAID:]}"
            )
