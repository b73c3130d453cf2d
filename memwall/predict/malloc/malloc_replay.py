"""The C library's malloc under the tensors of a CPU: what a step's resident memory is there.

A freed tensor leaves the process's memory only if its block had a mapping of its own, ended the heap, or was trimmed;
and what stays is reused only as far as blocks fit. No formula says how far, so the step's allocations are replayed
against this machine's own malloc (`malloc_process.py`), in a process of its own and without touching the memory.
Which calls a recorded step makes, `malloc_calls` says.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

from msgspec import Struct

from memwall.errors import UsageError
from memwall.predict.malloc import malloc_process
from memwall.predict.malloc.malloc_calls import StepEvents, repeated

_EVENT_BYTES = 3 * 8


class MallocForecast(Struct, frozen=True, kw_only=True):
    """Says what steps that follow each other do to resident memory; bytes of the replayed blocks only."""

    peak_resident_bytes: int
    """Highest over all steps."""
    fresh_bytes: int
    """Bytes that became resident anew in the last step: what every further one costs in page faults."""


def unavailable_reason() -> str:
    """Says why malloc cannot be replayed here; "" if it can."""
    if sys.platform != "linux":
        return f"that needs Linux with glibc; this is {sys.platform}"
    return _reason_of_library()


@cache
def _reason_of_library() -> str:
    """Says why the C library that this process has, and keeps, cannot be replayed; "" if it can."""
    if platform.libc_ver()[0] != "glibc":
        return "that needs glibc; this Python uses another C library"
    loaded = Path("/proc/self/maps").read_text()
    for name in ("jemalloc", "tcmalloc", "mimalloc"):
        if f"/lib{name}" in loaded:
            return f"that needs glibc's malloc; {name} is loaded in its place (LD_PRELOAD)"
    return ""


def replay(step: StepEvents, *, num_steps: int = 3, timeout_s: float = 60.0) -> MallocForecast:
    """Replays the allocations of a step several times over.

    Raises:
        UsageError: this machine has no glibc, or refuses the address space.
    """
    reason = unavailable_reason()
    if reason:
        raise UsageError(f"cannot replay allocations: {reason}")
    events, environment = repeated(step, num_steps).tobytes(), _replay_environment()
    # A plan asks for the same step several times. Its events are megabytes that the process which is trained would hold
    # from then on.
    key = (hashlib.blake2b(events).digest(), timeout_s, *environment.items())
    if key not in _replays:
        found = _replayed(events, timeout_s, environment)
        while len(_replays) >= _MOST_REPLAYS:
            del _replays[next(iter(_replays))]
        _replays[key] = found
    return _replays[key]


_replays: dict[tuple[object, ...], MallocForecast] = {}
_MOST_REPLAYS = 16


def _replayed(events: bytes, timeout_s: float, environment: dict[str, str]) -> MallocForecast:
    """Replays events in a process of their own."""
    num_events = len(events) // _EVENT_BYTES
    request = json.dumps({"num_events": num_events}).encode()
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-s", "-P", malloc_process.__file__],
            input=request + b"\n" + events,
            capture_output=True,
            timeout=timeout_s,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"replaying {num_events} allocations took more than {timeout_s:.0f} s; record a shorter step"
        ) from None
    if done.returncode != 0:
        found = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
        raise UsageError(
            f"replaying {num_events} allocations failed: {found}; see whether the address space is limited (ulimit -v)"
        )
    steps = json.loads(done.stdout)
    return MallocForecast(
        peak_resident_bytes=max(step["peak_resident_bytes"] for step in steps), fresh_bytes=steps[-1]["fresh_bytes"]
    )


def _replay_environment() -> dict[str, str]:
    """Returns what malloc and the dynamic loader read.

    The hash seed is fixed, or the replay's own heap differs each time.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_LIBRARY_PATH")
    }
    return kept | {"PYTHONHASHSEED": "0"}
