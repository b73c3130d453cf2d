"""Python processes that begin with torch and memwall imported: most of what a short script takes are its imports.

One process imports them and is forked for each program, which ends as an interpreter does that was started for it.
What starts cold is tested where that is the subject: tests/test_package.py, tests/cli/test_usage.py.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

__all__ = ["Program", "printed_by", "warm_python"]

_ROOT = Path(__file__).parents[1]

# What a script imports that trains under memwall. torch itself imports its compiler for the first optimizer. How fast
# memory and the disk of temporary files are is known for as long as such a figure stands.
_SERVER = """
import gc, json, os, runpy, socket, sys, types
connection = socket.socket(fileno=int(sys.argv[1]))
import torch, torch._dynamo, memwall.cli.app, memwall.integrations.launcher, memwall.session.fit
for name in sys.argv[2:]:
    __import__(name)
memwall.integrations.launcher.measured_machine(memwall.machine.disk_location.default_directory())
gc.collect()
gc.freeze()  # otherwise the last collection of each program copies all of this process, which takes a second
# So would a look for optimizers, which brings back what is frozen; none is in it.
memwall.checkpoint.discovery.gc = types.SimpleNamespace(**vars(gc) | {"get_freeze_count": lambda: 0})
while True:
    said, streams, _, _ = socket.recv_fds(connection, 1 << 20, 2)
    if not said:
        os._exit(0)
    asked = json.loads(said)
    if "process_id" in asked:
        connection.send(json.dumps(os.waitstatus_to_exitcode(os.waitpid(asked["process_id"], 0)[1])).encode())
        continue
    process_id = os.fork()
    if process_id == 0:
        break
    for stream in streams:
        os.close(stream)
    connection.send(json.dumps(process_id).encode())
connection.close()
nothing = os.open(os.devnull, os.O_RDONLY)
for number, stream in enumerate((nothing, *streams)):
    os.dup2(stream, number)
    os.close(stream)
os.environ.clear()
os.environ.update(asked["environment"])
os.chdir(asked["folder"])
sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
first, *sys.argv = asked["arguments"]
if first == "-m":
    sys.path.insert(0, os.getcwd())
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    source = sys.argv.pop(0) if first == "-c" else open(first).read()
    sys.argv.insert(0, first)
    sys.path.insert(0, "" if first == "-c" else os.path.dirname(os.path.abspath(first)))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first != "-c":
        main.__file__ = first
    exec(compile(source, "<string>" if first == "-c" else first, "exec"), main.__dict__)
"""


class Program:
    """A program that runs in a process of its own."""

    def __init__(self, server: "WarmPython", process_id: int, out: IO[bytes], errors: IO[bytes]) -> None:
        self.process_id, self.out, self.errors = process_id, out, errors
        self._server, self._status = server, None

    @property
    def printed(self) -> str:
        """Returns what it wrote to standard output."""
        return _text(self.out)

    @property
    def said(self) -> str:
        """Returns what it wrote to standard error."""
        return _text(self.errors)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends it, if it has not ended."""
        if self._status is None:
            os.kill(self.process_id, number)

    def wait(self, *, timeout_s: float = 180) -> int:
        """Waits for its end; returns its exit status, which is a signal's negative number where one ended it."""
        if self._status is None:
            try:
                self._status = self._server.status_of(self.process_id, timeout_s)
            except TimeoutError:
                self._status = -signal.SIGKILL
                raise
        return self._status


class WarmPython:
    """Starts programs as `python ARGUMENTS` would, which begin with modules imported; with one thread each.

    Args:
        modules: imported beside torch and memwall.
    """

    def __init__(self, *modules: str) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
            )

    def close(self) -> None:
        """Ends the process that others are forked from; these go on."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def start(
        self, *arguments: object, folder: Path | None = None, out: int | None = None, **environment: str
    ) -> Program:
        """Starts a program.

        Args:
            arguments: `-m MODULE`, `-c SOURCE` or a script, and its arguments.
            folder: where it runs; by default where this process does.
            out: takes its standard output; by default a file.
            environment: variables beside those of this process.
        """
        written, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (open as long as it runs)
        asked = {
            "arguments": list(map(str, arguments)),
            "folder": str(folder or Path.cwd()),
            "environment": os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        }
        streams = [written.fileno() if out is None else out, errors.fileno()]
        socket.send_fds(self._connection, [json.dumps(asked).encode()], streams)
        return Program(self, self._answer(timeout_s=100), written, errors)

    def run(
        self,
        *arguments: object,
        folder: Path | None = None,
        timeout_s: float = 180,
        **environment: str,
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a program to its end; arguments as `start` takes them."""
        program = self.start(*arguments, folder=folder, **environment)
        status = program.wait(timeout_s=timeout_s)
        return subprocess.CompletedProcess(list(map(str, arguments)), status, program.printed, program.said)

    def printed_by(self, source: str) -> list[str]:
        """Returns the lines that a source prints; fails where it does."""
        done = self.run("-c", source)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def status_of(self, process_id: int, timeout_s: float) -> int:
        """Waits for a program's end; one that takes longer is killed, and the test fails."""
        self._connection.send(json.dumps({"process_id": process_id}).encode())
        try:
            return self._answer(timeout_s)
        except TimeoutError:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(process_id, signal.SIGKILL)
            self._answer(timeout_s=10)
            raise

    def _answer(self, timeout_s: float) -> int:
        if not select.select([self._connection], [], [], timeout_s)[0]:
            raise TimeoutError(f"a program has not ended within {timeout_s:.0f} s")
        answer: Any = json.loads(self._connection.recv(1 << 10))
        return int(answer)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


@cache
def warm_python(*modules: str) -> WarmPython:
    """Returns the one that all tests of this process share, or those whose programs begin with more modules."""
    server = WarmPython(*modules)
    atexit.register(server.close)
    return server


def printed_by(source: str, *arguments: object) -> Any:
    """Returns the JSON that a source prints."""
    done = warm_python().run("-c", source, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
