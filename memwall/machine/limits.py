"""The bytes that there are to plan with: a device's own, and on a CPU the memory limit in force.

Every function takes the file system's root, so that trees recorded on other machines can stand for this one's.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

from msgspec import Struct

from memwall.errors import UsageError
from memwall.machine.launched import launched
from memwall.units import parse_size

_ROOT = Path("/")
# The kernel's "no limit" is the largest multiple of the page size in a signed 64-bit number; pages differ in size.
_NO_LIMIT_BYTES = 1 << 62


class CgroupLimit(Struct, frozen=True, kw_only=True):
    """Holds the tightest memory limit among the process's control group and its ancestors."""

    limit_bytes: int
    path: str
    """The file that says so."""
    version: Literal[1, 2]


class _Mount(Struct, frozen=True, kw_only=True):
    """Holds a line of /proc/self/mountinfo, as far as needed."""

    root: PurePosixPath
    point: PurePosixPath
    kind: str
    options: frozenset[str]


def budget_bytes(text: str | int, device: str) -> int:
    """Returns the bytes of a budget: a size, or a percentage of `own_bytes`.

    Args:
        device: `cpu` or `cuda[:N]`; asked only where the budget is a percentage.

    Raises:
        UsageError: the text is no size; it is a percentage, and the device is unknown here.
    """
    return parse_size(text, whole_bytes=own_bytes(device) if str(text).strip().endswith("%") else None)


def own_bytes(device: str) -> int:
    """Returns what this process has of a device: of a CUDA device all that no other process holds there now, of a CPU's
    memory limit its rank's equal part.

    Raises:
        UsageError: the device is unknown here, or has no driver.
    """
    total_bytes = device_total_bytes(device)
    if device == "cpu":
        return total_bytes // num_local_ranks()
    import torch

    from memwall.machine.device_sharers import note_sharers, others_bytes

    note_sharers()
    return total_bytes - (others_bytes(torch.device(device)) or 0)


def own_device() -> str:
    """Returns the device on which a script that is yet to start trains: the CUDA device of its rank, or `cpu`.

    A rank that sees fewer devices than its number was given one of its own, which is the first.
    """
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    rank = launched().local_rank
    return f"cuda:{rank if rank < torch.cuda.device_count() else 0}"


def num_local_ranks() -> int:
    """Returns how many processes a launcher started on this host; 1 without one."""
    return launched().num_local_ranks


def device_total_bytes(device: str = "cpu", *, root: Path = _ROOT) -> int:
    """Returns a device's bytes: for `cpu` the memory limit in force, for `cuda[:N]` what its driver reports.

    Raises:
        UsageError: the device is unknown here, or has no driver.
    """
    if device == "cpu":
        return memory_limit_bytes(root=root)
    if re.fullmatch(r"cuda(:\d+)?", device) is None:
        raise UsageError(f"'{device}' is no device of this machine; expected cpu, cuda or cuda:N")
    import torch

    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise UsageError(
            f"'{device}': this machine has {torch.cuda.device_count()} CUDA devices; expected cpu, or cuda:N below that"
        )
    return int(torch.cuda.get_device_properties(index).total_memory)


def memory_limit_bytes(*, root: Path = _ROOT) -> int:
    """Returns the memory this process can use at most: the least of physical memory and every ancestor cgroup's limit.

    Raises:
        UsageError: the system does not say how much memory it has.
    """
    total_bytes = _total_memory_bytes(root)
    limit = cgroup_limit(root=root)
    return total_bytes if limit is None else min(total_bytes, limit.limit_bytes)


def free_memory_bytes(*, root: Path = _ROOT) -> int:
    """Returns what can be taken before the kernel ends a process: of the machine, and of the tightest cgroup.

    Memory that the kernel gives up by itself, files that nobody uses, counts as free. What lies in /dev/shm counts as
    used, by the machine and by the group.

    Raises:
        UsageError: the system does not say how much memory it has.
    """
    text = _read(root / "proc/meminfo") or ""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    free_bytes = int(found.group(1)) * 1024 if found is not None else _total_memory_bytes(root)
    limit = cgroup_limit(root=root)
    if limit is None:
        return free_bytes
    folder = (root / limit.path.lstrip("/")).parent
    used = _read(folder / ("memory.current" if limit.version == 2 else "memory.usage_in_bytes"))
    if used is None:
        return min(free_bytes, limit.limit_bytes)
    name = "inactive_file" if limit.version == 2 else "total_inactive_file"
    idle = re.search(rf"^{name} (\d+)$", _read(folder / "memory.stat") or "", re.MULTILINE)
    used_bytes = int(used) - (int(idle.group(1)) if idle is not None else 0)
    return max(0, min(free_bytes, limit.limit_bytes - used_bytes))


def pinnable_bytes(*, is_asked_for: bool = False, root: Path = _ROOT) -> int:
    """Returns the host memory that this process may pin: its part of six tenths of what is free.

    The rest is for what comes later and the kernel would kill for: loader workers, the page cache of the data, a
    checkpoint on its way to disk. Processes that a launcher started on one host have equal parts.

    Args:
        is_asked_for: whether the user said how much may be taken: then nine tenths are.

    Raises:
        UsageError: the system does not say how much memory it has.
    """
    tenths = 9 if is_asked_for else 6
    return free_memory_bytes(root=root) * tenths // 10 // num_local_ranks()


def cgroup_limit(*, root: Path = _ROOT) -> CgroupLimit | None:
    """Returns the tightest cgroup memory limit in force; None where there is none.

    The memory controller is in one hierarchy only, v1 or v2; /proc/self/cgroup tells which (a hybrid host has a bare
    `0::/` beside a v1 `memory:` line). Source: kernel documentation, cgroup-v1/memory and cgroup-v2.
    """
    found = _memory_cgroup(root)
    if found is None:
        return None
    version, group = found
    tightest: CgroupLimit | None = None
    for limit_bytes, path in _limits(root, version, group):
        if limit_bytes < _NO_LIMIT_BYTES and (tightest is None or limit_bytes < tightest.limit_bytes):
            tightest = CgroupLimit(limit_bytes=limit_bytes, path=f"/{path.relative_to(root)}", version=version)
    return tightest


def _total_memory_bytes(root: Path) -> int:
    text = _read(root / "proc/meminfo")
    found = re.search(r"^MemTotal:\s+(\d+) kB", text or "", re.MULTILINE)
    if found is not None:
        return int(found.group(1)) * 1024
    if root != _ROOT:
        raise UsageError(f"{root}/proc/meminfo does not say how much memory there is; expected a MemTotal line")
    import psutil

    return int(psutil.virtual_memory().total)


def _memory_cgroup(root: Path) -> tuple[Literal[1, 2], PurePosixPath] | None:
    """Returns the version of the hierarchy with the memory controller, and this process's group in it."""
    unified: PurePosixPath | None = None
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            return 1, PurePosixPath(group)
        if number == "0" and not controllers:
            unified = PurePosixPath(group)
    return None if unified is None else (2, unified)


def _limits(root: Path, version: Literal[1, 2], group: PurePosixPath) -> Iterator[tuple[int, Path]]:
    """Yields every limit that holds for the group, with the file it stands in, innermost first."""
    name = "memory.limit_in_bytes" if version == 1 else "memory.max"
    for mount in _mounts(root):
        if mount.kind != ("cgroup" if version == 1 else "cgroup2"):
            continue
        if version == 1 and "memory" not in mount.options:
            continue
        point = root / mount.point.relative_to("/")
        # In a container the mount shows a part of the tree only; a group outside of it, which a cgroup namespace
        # writes as /.., is then the mount itself.
        is_inside = group.is_relative_to(mount.root) and ".." not in group.parts
        below = group.relative_to(mount.root) if is_inside else PurePosixPath()
        folder = point / below
        if version == 1:
            # Counts ancestors above the mount, too.
            text = _read(folder / "memory.stat") or ""
            found = re.search(r"^hierarchical_memory_limit (\d+)$", text, re.MULTILINE)
            if found is not None:
                yield int(found.group(1)), folder / "memory.stat"
        while True:
            limit = (_read(folder / name) or "max").strip()
            if limit != "max":
                yield int(limit), folder / name
            if folder == point:
                break
            folder = folder.parent


def _mounts(root: Path) -> Iterator[_Mount]:
    """Yields the control group mounts. Source: proc_pid_mountinfo(5); spaces and the like are octal escapes."""
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        before, separator, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if separator and len(fields) >= 5 and len(kinds) >= 3 and kinds[0] in ("cgroup", "cgroup2"):
            yield _Mount(
                root=PurePosixPath(_unescape(fields[3])),
                point=PurePosixPath(_unescape(fields[4])),
                kind=kinds[0],
                options=frozenset(kinds[2].split(",")),
            )


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)


def _read(path: Path) -> str | None:
    """Returns the text of a small file; None where there is none."""
    try:
        return path.read_text()
    except OSError:
        return None
