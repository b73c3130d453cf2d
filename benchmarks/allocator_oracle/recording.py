"""What torch's own allocator did with a sequence of calls, on file, and the simulator's answers beside it.

Calls: a(lloc) block bytes stream, f(ree) block, r(ecord_stream) block stream, d(one) stream, e(mpty_cache), m(emory
fraction) share. Of a history only (golden.py): H begins one, N leaves a mark in it, S asks for it.
"""

from pathlib import Path

import msgspec
import zstandard
from allocator_statistics import WatchedAllocator, recorded_addresses

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.allocator_settings import parse_settings
from memwall.predict.cuda_allocator.memory_blocks import Block
from memwall.predict.cuda_allocator.torch_releases import VersionProfile

__all__ = ["RecordedRun", "Recording", "first_difference", "load_recording", "recording_path", "save_recording"]

_SPLITS = ("inactive_split", "inactive_split_bytes")
_TESTS = Path(__file__).parents[2] / "tests/predict/cuda_allocator"


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One process: its settings, its device, and what the allocator answered."""

    settings: str
    """PYTORCH_CUDA_ALLOC_CONF."""
    total_bytes: int
    capacity_bytes: int | None
    """What the device gives to the allocator; None: without end."""
    segments: list[int]
    """Where the device placed them, in order."""
    calls: list[str]
    results: list[int | str]
    """By call: the address of an allocation, "oom", or the call's letter."""
    statistics: dict[int, list[int]]
    """By number of the call, in the order of `_statistics` with the peak of segments, which is not compared, at 9."""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one release of torch."""

    torch: str
    runs: list[RecordedRun]


def recording_path(version: str) -> Path:
    """Where the tests keep the recording of a release."""
    return _TESTS / f"torch_{version.replace('.', '_')}.json.zst"


def load_recording(version: str) -> Recording:
    """The recording of a release that the tests keep."""
    return msgspec.json.decode(zstandard.decompress(recording_path(version).read_bytes()), type=Recording)


def save_recording(recording: Recording) -> None:
    """Replaces the recording that the tests keep."""
    packed = zstandard.ZstdCompressor(level=19).compress(msgspec.json.encode(recording))
    recording_path(recording.torch).write_bytes(packed)


def first_difference(run: RecordedRun, profile: VersionProfile) -> str | None:
    """Where the simulator first answers otherwise than torch did; None if nowhere."""
    simulated = _Simulated(run, profile)
    for number, (text, recorded) in enumerate(zip(run.calls, run.results, strict=True)):
        try:
            found = simulated.call(text)
        except UsageError as error:
            return f"call {number}, '{text}': {error}"
        if found != recorded:
            return f"call {number}, '{text}': torch answers {recorded}, the simulator {found}"
        if number in run.statistics:
            wanted = run.statistics[number][:9] + run.statistics[number][10:]
            if simulated.statistics() != wanted:
                return f"call {number}, '{text}': torch counts {wanted}, the simulator {simulated.statistics()}"
    return None


class _Simulated:
    """Feeds recorded calls to the simulator; which uses on other streams are over, torch looks up at each request."""

    def __init__(self, run: RecordedRun, profile: VersionProfile) -> None:
        self._live: dict[int, Block] = {}
        self._shared: set[Block] = set()
        """Blocks that the side stream uses, too."""
        self._uses: dict[Block, bool] = {}
        """Those of them that were freed, in order, and whether that stream is done with them."""
        self._device = WatchedAllocator(
            parse_settings(run.settings, profile),
            profile,
            capacity_bytes=run.capacity_bytes,
            total_bytes=run.total_bytes,
            addresses=recorded_addresses(run.segments),
        )

    def call(self, text: str) -> int | str:
        letter, *words = text.split()
        device = self._device
        if letter == "m":
            device.set_memory_fraction(float(words[0]))
            return letter
        numbers = [int(word) for word in words]
        if letter == "a":
            for used, is_finished in list(self._uses.items()):
                if not is_finished:
                    break
                device.complete(used)
                del self._uses[used]
            block = device.malloc(numbers[1], numbers[2])
            if not device.pending:  # a retry waits for all of them
                self._uses.clear()
            if block is None:
                return "oom"
            self._live[numbers[0]] = block
            return block.address
        if letter == "f":
            block = self._live.pop(numbers[0])
            is_shared = block in self._shared
            if is_shared:
                self._shared.remove(block)
                self._uses[block] = False
            device.free(block, is_awaited=is_shared)
        elif letter == "r":
            self._shared.add(self._live[numbers[0]])
        elif letter == "d":
            self._uses = dict.fromkeys(self._uses, True)
        elif letter == "e":
            device.empty_cache()
            self._uses.clear()
        return letter

    def statistics(self) -> list[int]:
        device = self._device
        found = device.statistics.as_dict()
        names = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes")
        return [
            *(found[f"{name}.all.{part}"] for name in names for part in ("current", "peak")),
            found["segment.all.current"],
            *(found[f"{name}.all.{part}"] for name in _SPLITS for part in ("current", "peak")),
            *(device.num_alloc_retries, device.num_ooms),
            *(device.num_sync_all_streams, device.num_device_alloc, device.num_device_free),
            *(device.num_oversize_allocations, device.num_oversize_segments),
        ]
