"""The C library's malloc under the tensors of a CPU: policies for it, and what a step's resident memory is under each.

A freed tensor leaves the process's memory only if its block had a mapping of its own, ended the heap, or was trimmed;
and what stays is reused only as far as blocks fit. No formula says how far, so the step's allocations are replayed
against this machine's own malloc (`malloc_process.py`), in a process of its own and without touching the memory.
Setting a policy in this process is `memwall.apply.memory.allocator`; which calls a recorded step makes, `malloc_calls`.
"""

import ctypes
import json
import mmap
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from memwall.errors import UsageError
from memwall.predict.malloc import malloc_process
from memwall.predict.malloc.malloc_calls import StepEvents, events_of, join
from memwall.store.page_map import PageMap
from memwall.trace.records import Step

__all__ = [
    "MallocForecast",
    "MallocPolicy",
    "StepPages",
    "candidate_policies",
    "fault_seconds_per_byte",
    "policy_named",
    "replay",
    "replay_step",
    "restored_policy",
    "settings_of",
    "unavailable_reason",
]

# malloc.h of glibc. M_MMAP_THRESHOLD is refused above 32 MiB (HEAP_MAX_SIZE / 2).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


class MallocPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How freed memory is kept or returned. None leaves glibc's own value."""

    name: str
    mmap_threshold_bytes: int | None = None
    """Blocks from this size get a mapping of their own, returned when freed; at most 32 MiB."""
    trim_threshold_bytes: int | None = None
    """Free bytes at the heap's end from which it shrinks."""

    @property
    def is_default(self) -> bool:
        """Whether the process behaves like this anyway, so that nothing has to be applied."""
        return self == MallocPolicy(name=self.name)


class StepPages(Struct, frozen=True, kw_only=True):
    """What one replayed step does to resident memory; bytes of the replayed blocks only."""

    peak_resident_bytes: int
    peak_event: int
    """Index of the call at which the peak is first reached."""
    peak_live_bytes: int
    fresh_bytes: int
    """Bytes that became resident anew: each costs a page fault's share."""
    end_resident_bytes: int
    end_live_bytes: int


class MallocForecast(Struct, frozen=True, kw_only=True):
    """The steps of one replay, in order; the heap carries over from each to the next."""

    steps: tuple[StepPages, ...]

    @property
    def peak_resident_bytes(self) -> int:
        """Highest over all steps."""
        return max(step.peak_resident_bytes for step in self.steps)

    @property
    def fresh_bytes(self) -> int:
        """Of the last step: what every further step costs."""
        return self.steps[-1].fresh_bytes


def candidate_policies() -> tuple[MallocPolicy, ...]:
    """The policies worth having, least intervention first.

    `default` touches nothing. `mmap` returns each block of 1 MiB or more when it is freed: least memory, most faults.
    """
    mapped = MallocPolicy(name="mmap", mmap_threshold_bytes=1 << 20, trim_threshold_bytes=1 << 20)
    return (MallocPolicy(name="default"), mapped)


def restored_policy() -> MallocPolicy:
    """What is in force after a policy was taken back: the values that glibc's own rule ends at.

    Its mapping threshold follows the largest freed mapping up to 32 MiB, the trim threshold is twice that
    (malloc/malloc.c, __libc_free). Once anything was set, glibc no longer adapts them.
    """
    return MallocPolicy(
        name="restored",
        mmap_threshold_bytes=32 << 20,
        trim_threshold_bytes=64 << 20,
    )


def policy_named(name: str) -> MallocPolicy:
    """The candidate of that name.

    Raises:
        UsageError: there is none.
    """
    known = {policy.name: policy for policy in candidate_policies()}
    if name not in known:
        raise UsageError(f"'{name}' is no malloc policy; expected one of {', '.join(known)}")
    return known[name]


def settings_of(policy: MallocPolicy) -> tuple[tuple[int, int], ...]:
    """The (parameter, value) pairs to give to mallopt."""
    pairs = (
        (_MMAP_THRESHOLD, policy.mmap_threshold_bytes),
        (_TRIM_THRESHOLD, policy.trim_threshold_bytes),
    )
    return tuple((parameter, value) for parameter, value in pairs if value is not None)


def unavailable_reason() -> str:
    """Why malloc can be neither set nor replayed here; "" if it can."""
    if sys.platform != "linux":
        return f"malloc policies need Linux with glibc; this is {sys.platform}"
    if platform.libc_ver()[0] != "glibc":
        return "malloc policies need glibc; this Python uses another C library"
    loaded = Path("/proc/self/maps").read_text()
    for name in ("jemalloc", "tcmalloc", "mimalloc"):
        if f"/lib{name}" in loaded:
            return f"malloc policies need glibc's malloc; {name} is loaded in its place (LD_PRELOAD)"
    return ""


def replay_step(step: Step, policy: MallocPolicy, num_steps: int = 3) -> MallocForecast:
    """Replays one step several times over.

    Raises:
        UsageError: see `replay`.
    """
    return replay(policy, [events_of(step)] * num_steps)


def replay(policy: MallocPolicy, steps: Sequence[StepEvents], *, timeout_s: float = 60.0) -> MallocForecast:
    """Replays the allocations of consecutive steps under a policy.

    Args:
        steps: as `malloc_calls.events_of` makes them, e.g. the first step and twice a steady one.

    Raises:
        UsageError: this machine has no glibc, or refuses the address space.
    """
    reason = unavailable_reason()
    if reason:
        raise UsageError(f"cannot replay allocations: {reason}")
    events = join(steps)
    num_events = len(events) // 3
    request = json.dumps({"mallopt": settings_of(policy), "num_events": num_events}).encode()
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-s", "-P", malloc_process.__file__],
            input=request + b"\n" + events.tobytes(),
            capture_output=True,
            timeout=timeout_s,
            env=_replay_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"replaying {num_events} allocations took more than {timeout_s:.0f} s; record a shorter step"
        ) from None
    if done.returncode != 0:
        found = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
        raise UsageError(
            f"replaying {num_events} allocations under the malloc policy '{policy.name}' failed: {found}; "
            "see whether the address space is limited (ulimit -v)"
        )
    return MallocForecast(steps=tuple(StepPages(**figures) for figures in json.loads(done.stdout)))


def fault_seconds_per_byte(*, probe_bytes: int = 16 << 20, in_huge_pages: bool = False) -> float:
    """Measures what touching memory that is not resident costs beyond touching it at all; takes about 30 ms.

    Args:
        probe_bytes: touched at a time.
        in_huge_pages: where memory begins at the boundary of one, and the system is asked for them; else as malloc
            gets it.
    """
    best_seconds = float("inf")
    for _ in range(3):
        if in_huge_pages:
            pages = PageMap(probe_bytes)
            best_seconds = min(best_seconds, _first_touch_seconds(pages.address, probe_bytes))
            pages.drop_pages()
        else:
            with mmap.mmap(-1, probe_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
                buffer = ctypes.c_char.from_buffer(region)
                best_seconds = min(best_seconds, _first_touch_seconds(ctypes.addressof(buffer), probe_bytes))
                del buffer
    return best_seconds / probe_bytes


def _first_touch_seconds(address: int, num_bytes: int) -> float:
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        ctypes.memset(address, 1, num_bytes)
        seconds.append(time.perf_counter() - begin)
    return max(seconds[0] - seconds[1], 0.0)


def _replay_environment() -> dict[str, str]:
    """Only what malloc and the dynamic loader read; a fixed hash seed, or the replay's own heap differs each time."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_LIBRARY_PATH")
    }
    return kept | {"PYTHONHASHSEED": "0"}
