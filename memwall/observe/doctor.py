"""Looks at what this machine offers a training run, measured where it can be, and at what to mend about it."""

import os
import re
import shutil
from importlib import metadata
from pathlib import Path

import psutil
from msgspec import Struct

from memwall.errors import StoreError, UsageError
from memwall.machine.disk_location import default_directory
from memwall.machine.disk_probe import probe_disk
from memwall.machine.limits import CgroupLimit, cgroup_limit, memory_limit_bytes
from memwall.machine.tiers import Tier
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.predict.malloc.tensor_heap import heap_unavailable_reason
from memwall.trace.records import Tag, measured_tag
from memwall.units import format_bytes

# Distribution names, with the extra that installs each one that is optional.
_LIBRARIES: tuple[tuple[str, str], ...] = (
    ("torch", ""),
    ("highspy", ""),
    ("transformers", "hf"),
    ("accelerate", "hf"),
    ("deepspeed", "deepspeed"),
    ("triton", "kernels"),
    ("plotly", "report"),
)
_FLOOR_TORCH = (2, 11)
# DataLoader workers hand batches over through /dev/shm; containers give 64 MiB unless told otherwise.
_SMALL_SHM_BYTES = 256 << 20
_OTHER_MALLOCS = ("jemalloc", "tcmalloc", "mimalloc")


class Device(Struct, frozen=True, kw_only=True):
    """Describes a device that can train."""

    name: str
    description: str
    total_bytes: int
    free_bytes: int


class Library(Struct, frozen=True, kw_only=True):
    """Describes a library that memwall uses; `version` None means not installed."""

    name: str
    version: str | None
    extra: str
    """The extra of torch-memwall that installs it; "" for one that is required."""


class Inspection(Struct, frozen=True, kw_only=True):
    """Holds everything that `memwall doctor` looks at."""

    tag: Tag
    """The kind of the first device's figures: it is the one that trains."""
    devices: tuple[Device, ...]
    num_cores: int
    """Logical cores this process may run on."""
    num_threads: int
    """Threads torch computes with."""
    ram_total_bytes: int
    ram_available_bytes: int
    memory_limit_bytes: int
    """The least of physical memory and every cgroup's limit."""
    cgroup: CgroupLimit | None
    swap_total_bytes: int
    swap_used_bytes: int
    malloc: str
    heap_problem: str
    """Why CPU tensors cannot have a heap of their own; "" where they can."""
    shm_total_bytes: int | None
    """Size of /dev/shm; None where there is none."""
    disk: Tier | None
    """None where no folder was named and the default one is unsuitable."""
    disk_problem: str
    """Why the default folder is unsuitable; "" where it is not."""
    libraries: tuple[Library, ...]
    foreign_memwall: str | None
    """Version of the unrelated PyPI distribution `memwall`, if it is installed."""
    allocator_findings: tuple[str, ...] = ()
    """Sentences on what is doubtful or wrong about the variables of torch's CUDA allocator."""


class Finding(Struct, frozen=True, kw_only=True):
    """Names something that will hurt a run."""

    found: str
    advice: str


def inspect_machine(directory: Path | None = None) -> Inspection:
    """Looks at this machine; takes a second or two, writing and deleting a file in `directory`.

    Args:
        directory: whose disk to measure; None for the one that offloading uses when the user names none.

    Raises:
        StoreError: the named directory cannot hold offloaded bytes.
    """
    import torch

    disk, disk_problem = _measured_disk(directory)
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    devices = _devices(memory.available)
    return Inspection(
        tag=measured_tag(devices[0].name),
        devices=devices,
        num_cores=_num_usable_cores(),
        num_threads=torch.get_num_threads(),
        ram_total_bytes=memory.total,
        ram_available_bytes=memory.available,
        memory_limit_bytes=memory_limit_bytes(),
        cgroup=cgroup_limit(),
        swap_total_bytes=swap.total,
        swap_used_bytes=swap.used,
        malloc=_malloc_name(Path("/proc/self/maps")),
        heap_problem=heap_unavailable_reason(),
        shm_total_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        disk=disk,
        disk_problem=disk_problem,
        libraries=tuple(Library(name=name, version=_version_of(name), extra=extra) for name, extra in _LIBRARIES),
        foreign_memwall=_version_of("memwall"),
        allocator_findings=_allocator_findings(str(torch.__version__)),
    )


def warnings_of(machine: Inspection) -> tuple[Finding, ...]:
    """Returns what is wrong or will surprise, each with what to do; empty on a machine in order."""
    found: list[Finding] = []

    def warn(condition: bool, what: str, advice: str) -> None:
        if condition:
            found.append(Finding(found=what, advice=advice))

    warn(
        machine.foreign_memwall is not None,
        f"the unrelated distribution memwall {machine.foreign_memwall} is installed: same import name, same command",
        "pip uninstall memwall torch-memwall && pip install torch-memwall",
    )
    for library in machine.libraries:
        warn(
            library.version is None and not library.extra,
            f"{library.name} is not installed, and memwall needs it",
            f"pip install {library.name}",
        )
    torch_version = next((library.version for library in machine.libraries if library.name == "torch"), None)
    warn(
        torch_version is not None and _release(torch_version) < _FLOOR_TORCH,
        f"torch {torch_version} is older than {'.'.join(map(str, _FLOOR_TORCH))}, the oldest that is tested",
        "pip install --upgrade torch",
    )
    warn(
        machine.num_threads > machine.num_cores,
        f"torch computes with {machine.num_threads} threads on {machine.num_cores} cores",
        f"set OMP_NUM_THREADS={machine.num_cores}",
    )
    warn(
        machine.swap_total_bytes > 0,
        f"swap of {format_bytes(machine.swap_total_bytes)} is on: a run over its memory gets slow instead of failing",
        "swapoff -a while measuring, or cap the run's cgroup without swap",
    )
    warn(
        not machine.malloc.startswith("glibc"),
        f"malloc is {machine.malloc}: the forecast of the peak without a plan models glibc's only",
        "run without LD_PRELOAD of another malloc to compare with it",
    )
    warn(
        bool(machine.heap_problem),
        f"no tensor heap: {machine.heap_problem}",
        "install a C compiler and run pip install --force-reinstall --no-deps torch-memwall; without the heap plans on "
        "a CPU count what malloc keeps of freed tensors",
    )
    shm_bytes = machine.shm_total_bytes
    warn(
        shm_bytes is not None and shm_bytes < _SMALL_SHM_BYTES,
        f"/dev/shm holds only {format_bytes(shm_bytes or 0)}: DataLoader workers can fail on it",
        "start the container with --shm-size=1g, or --ipc=host",
    )
    for sentence in machine.allocator_findings:
        warn(True, sentence, "memwall estimate and memwall plan --device name settings that were simulated")
    warn(bool(machine.disk_problem), machine.disk_problem, "memwall doctor --disk DIR, a folder on a real disk")
    return tuple(found)


def _allocator_findings(torch_version: str) -> tuple[str, ...]:
    """Returns what is found about the environment, for the installed release."""
    from memwall.apply.memory.cuda_setting import lint_variables

    try:
        profile, _ = profile_for(torch_version)
    except UsageError as error:  # a build whose version is no number; the rest of the page can be told
        return (str(error),)
    return lint_variables(os.environ, profile)


def _measured_disk(directory: Path | None) -> tuple[Tier | None, str]:
    """Returns a directory's disk; or, of the one that is used when the user names none, why it is unsuitable."""
    if directory is not None:
        return probe_disk(directory), ""
    try:
        return probe_disk(default_directory()), ""
    except StoreError as error:
        return None, str(error)


def _devices(available_bytes: int) -> tuple[Device, ...]:
    """Returns CUDA devices, then the CPU, which can always train."""
    import torch

    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
            description = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
            devices.append(
                Device(name=f"cuda:{index}", description=description, total_bytes=total_bytes, free_bytes=free_bytes)
            )
    limit_bytes = memory_limit_bytes()
    devices.append(
        Device(
            name="cpu",
            description=_cpu_model(Path("/proc/cpuinfo")),
            total_bytes=limit_bytes,
            free_bytes=min(available_bytes, limit_bytes),
        )
    )
    return tuple(devices)


def _num_usable_cores() -> int:
    """Returns the cores this process may run on, fewer than the machine's under taskset or a cpuset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model(cpuinfo: Path) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return found.group(1).strip() if found else "processor"


def _malloc_name(maps: Path) -> str:
    """Returns the malloc in force: one that was preloaded, else the C library's with its version."""
    loaded = maps.read_text() if maps.exists() else ""
    for name in _OTHER_MALLOCS:
        if re.search(rf"/lib{name}[^/]*\.so", loaded):
            return name
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, OSError, ValueError):
        version = None
    return version or "not glibc's"


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """Returns (major, minor) of a version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
