"""Runs a command and samples from outside what it and its children hold in memory; nothing in them takes part."""

import ctypes
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Observed", "TimeLimitError", "observed"]

_INTERVAL_SECONDS = 0.02
_LIMIT_SECONDS = 240
_SHARED_BY = 5
"""Times as long by the clock as by the processor a command may take: others may use the machine as well."""

_LIBC = ctypes.CDLL(None)
_KCMP, _KCMP_VM = {"x86_64": 312, "aarch64": 272}, 1
"""Numbers of the system call that compares what two processes have, and of their memory for it."""


class TimeLimitError(Exception):
    """Says that a command was ended by the time limit: what it would have come to is not known."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Holds what a command did, as seen from outside."""

    status: int
    peak_bytes: int
    """The most resident memory of the process tree in any sample."""
    seconds: float
    output: str
    errors: str

    @property
    def weights(self) -> str:
        """Returns the digest of the trained weights, which each script prints last; "" where it did not come so far."""
        lines = [line for line in self.output.splitlines() if line.startswith("weights ")]
        return lines[-1].removeprefix("weights ") if lines else ""


def observed(
    script: Path,
    *options: str,
    folder: Path,
    budget: str | None = None,
    limit_seconds: float = _LIMIT_SECONDS,
    arguments: Sequence[str] = (),
) -> Observed:
    """Returns what a script did: under plain Python, or under `memwall run` where there is a budget.

    Args:
        folder: where it runs; its output goes there.
        limit_seconds: those of the processor after which it is ended, or five times as many by the clock.
        arguments: those of the script itself.

    Raises:
        TimeLimitError: it was ended.
    """
    command = [sys.executable, str(script), *arguments]
    if budget is not None:
        command = [sys.executable, "-m", "memwall", "run", "--budget", budget, *options, str(script), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    begin = time.monotonic()
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = psutil.Popen(command, cwd=folder, stdout=out, stderr=err, env=environment)
        peak_bytes = 0
        try:
            while process.poll() is None:
                peak_bytes = max(peak_bytes, _resident_bytes(process))
                used = _processor_seconds(process)
                if used > limit_seconds or time.monotonic() - begin > _SHARED_BY * limit_seconds:
                    ended_after = f"{time.monotonic() - begin:,.0f} s, {used:,.0f} s of them of the processor"
                    raise TimeLimitError(f"{' '.join(command[1:])} was ended by the time limit after {ended_after}")
                time.sleep(_INTERVAL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return Observed(
        status=process.returncode,
        peak_bytes=peak_bytes,
        seconds=time.monotonic() - begin,
        output=(folder / "stdout").read_text(errors="replace"),
        errors=(folder / "stderr").read_text(errors="replace"),
    )


def _processor_seconds(process: psutil.Process) -> float:
    """Returns what a process and those of its children that have ended took of the processor."""
    try:
        return sum(process.cpu_times()[:4])
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0.0


def _resident_bytes(process: psutil.Process) -> int:
    """Returns what the tree holds: a child that was just forked shows its parent's pages as its own, and has few."""
    total = 0
    try:
        total += process.memory_info().rss
        for child in process.children(recursive=True):
            if not _is_in_memory_of_parent(child):
                total += child.memory_full_info().uss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        pass  # it has ended between the two looks
    return total


def _is_in_memory_of_parent(child: psutil.Process) -> bool:
    """Tells whether a child runs in its parent's memory, as it does from `vfork` until it becomes another program."""
    number = _KCMP.get(platform.machine())
    return number is not None and _LIBC.syscall(number, child.ppid(), child.pid, _KCMP_VM, 0, 0) == 0
