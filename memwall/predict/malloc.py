"""The C library's malloc under the tensors of a CPU: policies for it, and what a step's resident memory is under each.

A freed tensor leaves the process's memory only if its block had a mapping of its own, ended the heap, or was trimmed;
and what stays is reused only as far as blocks fit. No formula says how far, so the step's allocations are replayed
against this machine's own malloc (`malloc_replay.py`), in a process of its own and without touching the memory.
Setting a policy in this process is `memwall.apply.malloc`; which calls a recorded step makes, `malloc_events`.
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

import msgspec
from msgspec import Struct

from memwall.errors import UsageError
from memwall.predict import malloc_replay
from memwall.predict.malloc_events import StepEvents, events_of, join
from memwall.predict.treatment import BlockCalls
from memwall.trace.records import Step

__all__ = [
    "MallocForecast",
    "MallocPolicy",
    "StepPages",
    "candidate_policies",
    "environment",
    "fault_seconds_per_byte",
    "is_glibc",
    "missing_environment",
    "nursery_layout",
    "policy_named",
    "replay",
    "replay_step",
    "restored_policy",
    "settings_of",
    "trim_operations",
    "unavailable_reason",
]

# malloc.h of glibc. M_MMAP_THRESHOLD is refused above 32 MiB (HEAP_MAX_SIZE / 2).
_MXFAST, _TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = 1, -1, -3, -4
_NEVER_TRIM_BYTES = (1 << 31) - 1
# GPT, convolutional net and perceptron, glibc 2.36, x86-64: small blocks alive at once took under 0.7 MB, and a larger
# nursery lowered no peak.
_NURSERY_BYTES = 2 << 20
_NURSERY_BLOCK_BYTES = 4000
_NURSERY_FENCE_BYTES = 24


class MallocPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How freed memory is kept or returned. None leaves glibc's own value."""

    name: str
    mmap_threshold_bytes: int | None = None
    """Blocks from this size get a mapping of their own, returned when freed; at most 32 MiB."""
    trim_threshold_bytes: int | None = None
    """Free bytes at the heap's end from which it shrinks."""
    mmap_max: int | None = None
    """How many blocks may have mappings of their own; 0: all live in the heap."""
    fastbin_bytes: int | None = None
    """Freed blocks up to this size are kept apart instead of merged with free neighbours; 0: none are."""
    tcache_count: int | None = None
    """Freed blocks per size kept apart in each thread. Must be in the environment before the process starts."""
    nursery_bytes: int = 0
    """Free small blocks prepared at the start, so that graph nodes do not settle in the gaps between tensors."""
    trims_forward: bool = False
    """Whether the heap's free pages are returned before each block's forward."""
    trims_backward: bool = False
    """Whether they are returned before each block's backward."""

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
    num_trims: int = 0


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


def candidate_policies(*, can_restart: bool = False) -> tuple[MallocPolicy, ...]:
    """The policies worth trying in this process, least intervention first.

    `default` touches nothing. `heap` keeps every freed page for reuse: fewest page faults. `-trim` returns free pages
    before each block's backward, or before its forward too. `mmap` returns each block of 1 MiB or more when it is
    freed: least memory, most faults. `compact` keeps small blocks out of the gaps between tensors, where most
    fragmentation comes from: torch asks for 64-byte alignment, glibc cuts slivers off both ends of each block, caches
    them per thread, and hands them to graph nodes, which pin the gaps open.

    Args:
        can_restart: also list `compact` where this process was not started with `environment(policy)`.
    """
    heap = MallocPolicy(name="heap", mmap_max=0, trim_threshold_bytes=_NEVER_TRIM_BYTES)
    compact = msgspec.structs.replace(
        heap, name="compact", fastbin_bytes=0, tcache_count=0, nursery_bytes=_NURSERY_BYTES
    )
    in_heap = [heap] + ([compact] if can_restart or not missing_environment(compact) else [])
    trimmed = [
        msgspec.structs.replace(p, name=f"{p.name}-{suffix}", trims_forward=both, trims_backward=True)
        for p in in_heap
        for suffix, both in (("trim-backward", False), ("trim-blocks", True))
    ]
    mapped = MallocPolicy(name="mmap", mmap_threshold_bytes=1 << 20, trim_threshold_bytes=1 << 20)
    return (MallocPolicy(name="default"), *in_heap, *trimmed, mapped)


def restored_policy() -> MallocPolicy:
    """What is in force after a policy was taken back: the values that glibc's own rule ends at.

    Its mapping threshold follows the largest freed mapping up to 32 MiB, the trim threshold is twice that
    (malloc/malloc.c, __libc_free). Once anything was set, glibc no longer adapts them.
    """
    return MallocPolicy(
        name="restored",
        mmap_threshold_bytes=32 << 20,
        trim_threshold_bytes=64 << 20,
        mmap_max=65536,
        fastbin_bytes=128,
    )


def policy_named(name: str) -> MallocPolicy:
    """The candidate of that name.

    Raises:
        UsageError: there is none.
    """
    known = {policy.name: policy for policy in candidate_policies(can_restart=True)}
    if name not in known:
        raise UsageError(f"'{name}' is no malloc policy; expected one of {', '.join(known)}")
    return known[name]


def settings_of(policy: MallocPolicy) -> tuple[tuple[int, int], ...]:
    """The (parameter, value) pairs to give to mallopt."""
    pairs = (
        (_MMAP_THRESHOLD, policy.mmap_threshold_bytes),
        (_TRIM_THRESHOLD, policy.trim_threshold_bytes),
        (_MMAP_MAX, policy.mmap_max),
        (_MXFAST, policy.fastbin_bytes),
    )
    return tuple((parameter, value) for parameter, value in pairs if value is not None)


def environment(policy: MallocPolicy) -> dict[str, str]:
    """Variables that must be set before the process starts for the whole policy to hold; empty if none."""
    if policy.tcache_count is None:
        return {}
    tunables = [item for item in os.environ.get("GLIBC_TUNABLES", "").split(":") if item and "tcache_count" not in item]
    return {"GLIBC_TUNABLES": ":".join([*tunables, f"glibc.malloc.tcache_count={policy.tcache_count}"])}


def missing_environment(policy: MallocPolicy) -> dict[str, str]:
    """What `environment(policy)` holds that this process was not started with."""
    started_with = Path("/proc/self/environ")
    present = started_with.read_bytes().split(b"\0") if started_with.exists() else []
    wanted = f"glibc.malloc.tcache_count={policy.tcache_count}".encode()
    is_there = any(e.startswith(b"GLIBC_TUNABLES=") and wanted in e.partition(b"=")[2].split(b":") for e in present)
    return {} if is_there else environment(policy)


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


def is_glibc() -> bool:
    """Whether tensors of this process come from glibc's malloc."""
    return not unavailable_reason()


def trim_operations(step: Step, policy: MallocPolicy, blocks: Sequence[BlockCalls]) -> frozenset[int]:
    """Operations before which the policy trims, given the blocks at whose boundaries it does."""
    modules = {block.module for block in blocks}
    calls = [call for call in step.calls if call.module in modules]
    forward = {call.start for call in calls} if policy.trims_forward else set()
    backward = {call.backward_start for call in calls if call.backward_start >= 0} if policy.trims_backward else set()
    return frozenset(forward | backward)


def replay_step(
    step: Step, policy: MallocPolicy, blocks: Sequence[BlockCalls] = (), num_steps: int = 3
) -> MallocForecast:
    """Replays one step several times over, with trims at the boundaries of blocks where the policy has them.

    Raises:
        UsageError: see `replay`.
    """
    return replay(policy, [events_of(step, trims=trim_operations(step, policy, blocks))] * num_steps)


def replay(policy: MallocPolicy, steps: Sequence[StepEvents], *, timeout_s: float = 60.0) -> MallocForecast:
    """Replays the allocations of consecutive steps under a policy.

    Args:
        steps: as `malloc_events.events_of` makes them, e.g. the first step and twice a steady one.

    Raises:
        UsageError: this machine has no glibc, or refuses the address space.
    """
    reason = unavailable_reason()
    if reason:
        raise UsageError(f"cannot replay allocations: {reason}")
    events = join(steps, nursery_layout(policy))
    num_events = len(events) // 3
    request = json.dumps({"mallopt": settings_of(policy), "num_events": num_events}).encode()
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-s", "-P", malloc_replay.__file__],
            input=request + b"\n" + events.tobytes(),
            capture_output=True,
            timeout=timeout_s,
            env=_replay_environment(policy),
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


def fault_seconds_per_byte(*, probe_bytes: int = 16 << 20) -> float:
    """Measures what touching memory that is not resident costs beyond touching it at all; takes about 30 ms."""
    best_seconds = float("inf")
    for _ in range(3):
        with mmap.mmap(-1, probe_bytes) as region:
            buffer = ctypes.c_char.from_buffer(region)
            seconds = []
            for _ in range(2):
                begin = time.perf_counter()
                ctypes.memset(ctypes.addressof(buffer), 1, probe_bytes)
                seconds.append(time.perf_counter() - begin)
            del buffer
        best_seconds = min(best_seconds, max(seconds[0] - seconds[1], 0.0))
    return best_seconds / probe_bytes


def nursery_layout(policy: MallocPolicy) -> tuple[int, int, int]:
    """How the nursery is made: number of blocks, bytes of each, bytes of the fence behind each, which stays."""
    return policy.nursery_bytes // _NURSERY_BLOCK_BYTES, _NURSERY_BLOCK_BYTES, _NURSERY_FENCE_BYTES


def _replay_environment(policy: MallocPolicy) -> dict[str, str]:
    """Only what malloc and the dynamic loader read; a fixed hash seed, or the replay's own heap differs each time."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_LIBRARY_PATH")
    }
    return kept | {"PYTHONHASHSEED": "0"} | environment(policy)
