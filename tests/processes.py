"""Source text run in a Python process of its own: what is measured of a process, or lives as long as one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

__all__ = ["Forks", "printed_by"]

_ROOT = str(Path(__file__).parents[1])

_FORKING = """
import json, os, sys, tempfile, traceback
exec(json.loads(sys.stdin.readline()))
for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            status = 1
            try:
                exec(json.loads(line), {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        errors.seek(0)
        print(json.dumps([status, out.read(), errors.read()]), flush=True)
"""


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


class Forks:
    """Runs sources each in a fork of one process that has imported what they share, which is most of their time.

    Args:
        imports: run once, before the first fork; it may start no threads, which a fork would not have.
    """

    def __init__(self, imports: str) -> None:
        path = os.pathsep.join([_ROOT, os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORKING],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        self._say(imports)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._process.kill()
        self._process.communicate()

    def printed_by(self, source: str) -> list[str]:
        """The lines that it prints; fails where the source does."""
        self._say(source)
        assert self._process.stdout is not None
        status, printed, errors = json.loads(self._process.stdout.readline())
        assert status == 0, errors
        return str(printed).splitlines()

    def _say(self, source: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(source) + "\n")
        self._process.stdin.flush()
