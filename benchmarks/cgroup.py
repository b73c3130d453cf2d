"""A memory cap that the kernel enforces, and its meter: a control group below this process's own, v1 or v2.

Sources: kernel documentation, admin-guide/cgroup-v1/memory and admin-guide/cgroup-v2. Nothing above this process's own
group is touched, and the group is gone, with whatever still runs in it, when the context ends.
"""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["CapUnavailable", "CappedRun", "MemoryCap", "memory_cap", "own_group", "own_group_peak_bytes"]

_END_SECONDS = 10.0


class CapUnavailable(Exception):
    """No memory control group can be made here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class CappedRun:
    """How a command fared inside a cap."""

    status: int
    """As `subprocess` has it: -9 for a process that was killed."""
    output: str
    errors: str
    seconds: float
    peak_bytes: int
    """Of the group: all its processes, and the page cache that they filled."""
    num_limit_hits: int
    """Reclaims at the limit; kernels of late leave the v1 counter at 0 (seen on 6.18)."""
    num_oom_kills: int

    @property
    def is_oom_killed(self) -> bool:
        """Whether the kernel ended the command for its memory."""
        return self.status == -signal.SIGKILL and self.num_oom_kills > 0


@dataclass(frozen=True)
class MemoryCap:
    """A group with a limit; `run` puts one command after another into it."""

    folder: Path
    version: int

    def run(
        self, command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None
    ) -> CappedRun:
        """Runs a command inside the group from its first instruction on.

        Raises:
            subprocess.TimeoutExpired: it took too long and was ended.
        """
        begin = time.perf_counter()
        # The shell enters the group, then becomes the command: no byte of it is counted elsewhere.
        enter = f'echo $$ > "{self.folder}/cgroup.procs" && exec "$@"'
        done = subprocess.run(
            ["sh", "-c", enter, "sh", *command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=None if environment is None else dict(environment),
            check=False,
        )
        is_v1 = self.version == 1
        events = self._pairs("memory.oom_control" if is_v1 else "memory.events")
        return CappedRun(
            status=done.returncode,
            output=done.stdout,
            errors=done.stderr,
            seconds=time.perf_counter() - begin,
            peak_bytes=self._number("memory.max_usage_in_bytes" if is_v1 else "memory.peak"),
            num_limit_hits=self._num_v1_hits() if is_v1 else events["max"],
            num_oom_kills=events["oom_kill"],
        )

    def processes(self) -> list[int]:
        """What runs in the group."""
        return [int(line) for line in (self.folder / "cgroup.procs").read_text().split()]

    def _num_v1_hits(self) -> int:
        """Both limits count: with swap off they are equal, and the one on memory and swap together is met first."""
        both = self.folder / "memory.memsw.failcnt"
        return self._number("memory.failcnt") + (self._number(both.name) if both.exists() else 0)

    def _number(self, name: str) -> int:
        return int((self.folder / name).read_text())

    def _pairs(self, name: str) -> dict[str, int]:
        lines = [line.split() for line in (self.folder / name).read_text().splitlines()]
        return {key: int(value) for key, value in lines}


@contextmanager
def memory_cap(limit_bytes: int | None, *, may_swap: bool = False) -> Iterator[MemoryCap]:
    """A fresh group with a limit and without swap; None limits nothing, so that the group is a meter only.

    Args:
        may_swap: limit memory alone: what exceeds it goes to whatever swap the machine has.

    Raises:
        CapUnavailable: there is no memory controller, or no right to make a group.
    """
    parent, version = own_group()
    folder = parent / f"memwall-cap-{uuid.uuid4().hex[:12]}"
    try:
        if version == 2:
            _delegate(parent)
        folder.mkdir()
    except OSError as error:
        raise CapUnavailable(f"cannot make a memory control group in {parent}: {error.strerror}") from error
    cap = MemoryCap(folder, version)
    try:
        try:
            if limit_bytes is not None:
                _limit(cap, limit_bytes, may_swap)
        except OSError as error:
            raise CapUnavailable(f"cannot limit the memory of {folder}: {error.strerror}") from error
        yield cap
    finally:
        _end(cap)


def own_group(root: Path = Path("/")) -> tuple[Path, int]:
    """Folder of this process's memory group, and the version of the hierarchy that holds the memory controller.

    A hybrid machine has a bare `0::/` beside a v1 `memory` line; then the controller is in v1.

    Raises:
        CapUnavailable: no hierarchy has the controller, or it is not mounted.
    """
    groups = root / "proc/self/cgroup"
    found: tuple[str, int] | None = None
    for line in groups.read_text().splitlines() if groups.exists() else ():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found = (path, 1)
            break
        if number == "0" and not controllers:
            found = (path, 2)
    if found is None:
        raise CapUnavailable("this system has no memory control groups")
    path, version = found
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        is_it = kind == "cgroup2" if version == 2 else kind == "cgroup" and "memory" in options.split(",")
        if is_it:
            top, point = before.split()[3:5]
            below = PurePosixPath(path)
            below = below.relative_to(top) if below.is_relative_to(top) else PurePosixPath()
            return root / PurePosixPath(point).relative_to("/") / below, version
    raise CapUnavailable(f"the hierarchy of the memory controller (cgroup v{version}) is not mounted")


def own_group_peak_bytes() -> int | None:
    """The most that the group of this process has held so far; None where that cannot be read."""
    try:
        folder, version = own_group()
        return int((folder / ("memory.max_usage_in_bytes" if version == 1 else "memory.peak")).read_text())
    except (CapUnavailable, OSError, ValueError):
        return None


def _delegate(parent: Path) -> None:
    """Lets children of a v2 group have the memory controller.

    Raises:
        CapUnavailable: the group holds processes itself, so the kernel lets no child have a controller.
    """
    if "memory" in (parent / "cgroup.subtree_control").read_text().split():
        return
    try:
        (parent / "cgroup.subtree_control").write_text("+memory")
    except OSError as error:
        raise CapUnavailable(
            f"children of {parent} cannot have the memory controller ({error.strerror}): start this from a group whose "
            "processes are in a child of their own"
        ) from error


def _limit(cap: MemoryCap, limit_bytes: int, may_swap: bool) -> None:
    (cap.folder / ("memory.max" if cap.version == 2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
    if may_swap:
        return
    if cap.version == 2:
        without_swap = cap.folder / "memory.swap.max"
        if without_swap.exists():
            without_swap.write_text("0")
        return
    both = cap.folder / "memory.memsw.limit_in_bytes"
    if both.exists():
        both.write_text(str(limit_bytes))
    else:
        (cap.folder / "memory.swappiness").write_text("0")


def _end(cap: MemoryCap) -> None:
    """Ends what still runs in the group, which only this process filled, and takes the group away."""
    deadline = time.monotonic() + _END_SECONDS
    while True:
        for process in cap.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        try:
            cap.folder.rmdir()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
