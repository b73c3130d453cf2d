"""The seconds of a CUDA device's operations, apart from what the host takes to issue them while it records.

A recorder keeps the host busy for longer than a small kernel takes. Two events around an operation would measure that:
the device reaches the first while the host is still on its way to the second. So the device first gets something else
to do, for long enough that both events and the operation stand in its queue before it comes to them.

Where it came to them sooner all the same, as at the first use of a kernel, whose code torch loads then and for which it
waits for the device, another operation on tensors of the same layout tells. Where there is none, the host's seconds are
taken off, down to what its bytes or its arithmetic take at the rates that the others of the step showed.
"""

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import torch

from memwall.torch_internals.device_time import keep_busy

# A millisecond or more, up to 3 GHz; to issue an operation takes a tenth of one.
_AHEAD_CYCLES = 3_000_000
# Of operations on tensors of one layout so many are measured, tried so often: a recorded step waits for no more.
_ENOUGH = 2
_MOST_TRIES = 4
# Smaller operations say nothing of what the device moves or computes in a second.
_LEAST_BYTES = 1 << 20


class _Timed(NamedTuple):
    """Describes one operation that was timed."""

    number: int
    """Its place in the step."""
    begin: torch.cuda.Event
    end: torch.cuda.Event
    host_seconds: float
    was_alone: bool
    """Whether the host had issued all of it before the device came to it."""


class DeviceTimer:
    """Times the operations of one step.

    Args:
        device: where they run, which need not be the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keys: dict[int, Hashable] = {}
        self._timed: dict[Hashable, list[_Timed]] = {}
        self._host_seconds: list[float] = []

    @contextmanager
    def timing(self, index: int, key: Hashable) -> Iterator[None]:
        """Runs an operation on the current stream, timed where others have not told enough.

        Args:
            index: its number in the step.
            key: the same for operations that take the device equally long.
        """
        self._keys[index] = key
        timed = self._timed.setdefault(key, [])
        is_known = len(timed) >= _MOST_TRIES or sum(one.was_alone for one in timed) >= _ENOUGH
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if not is_known:
            with torch.cuda.device(self._device):
                keep_busy(_AHEAD_CYCLES)
                begin.record()
        begun = time.perf_counter()
        yield
        host_seconds = time.perf_counter() - begun
        if not is_known:
            with torch.cuda.device(self._device):
                end.record()
            timed.append(_Timed(index, begin, end, host_seconds, was_alone=not begin.query()))
        self._host_seconds.append(host_seconds)

    @property
    def launch_seconds(self) -> float:
        """Returns what the host takes to issue an operation: in the median, so that no wait counts."""
        return median(self._host_seconds) if self._host_seconds else 0.0

    def settle(self, work_of: Callable[[int], tuple[int, int]]) -> dict[int, float]:
        """Waits for the device, and returns the seconds of each operation.

        Args:
            work_of: returns the bytes that an operation reads and writes, and its floating-point operations.
        """
        if not self._keys:
            return {}
        with torch.cuda.device(self._device):
            nothing_seconds = min(_seconds_of_nothing() for _ in range(_MOST_TRIES))
        found: dict[Hashable, float] = {}
        rates: tuple[list[float], list[float]] = ([], [])
        for key, timed in self._timed.items():
            alone = [one for one in timed if one.was_alone]
            if alone:
                found[key] = min(_seconds_between(one.begin, one.end, nothing_seconds) for one in alone)
                num_bytes, flops = work_of(alone[0].number)
                if found[key] > 0 and num_bytes >= _LEAST_BYTES:
                    rates[flops > 0].append((flops or num_bytes) / found[key])
        unknown_seconds = 0.0 if found else float("inf")  # nothing is told apart where the device always waited
        for key, timed in self._timed.items():
            if key not in found:
                num_bytes, flops = work_of(timed[0].number)
                known = rates[flops > 0]
                least_seconds = (flops or num_bytes) / median(known) if known else unknown_seconds
                found[key] = min(_without_host(one, nothing_seconds, least_seconds) for one in timed)
        return {index: found[key] for index, key in self._keys.items()}


def _without_host(one: _Timed, nothing_seconds: float, least_seconds: float) -> float:
    """Returns the seconds of an operation that the device waited for: at most those that were measured."""
    seconds = _seconds_between(one.begin, one.end, nothing_seconds)
    return min(seconds, max(least_seconds, seconds - one.host_seconds))


def _seconds_between(begin: torch.cuda.Event, end: torch.cuda.Event, nothing_seconds: float) -> float:
    return max(0.0, float(begin.elapsed_time(end)) / 1e3 - nothing_seconds)


def _seconds_of_nothing() -> float:
    """Waits for the device, and returns what lies between two events with nothing between them."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    keep_busy(_AHEAD_CYCLES)
    begin.record()
    end.record()
    torch.cuda.synchronize()
    return _seconds_between(begin, end, 0.0)
