"""What torch's allocator did in one process, kept small, and whether the simulated allocator does the same.

Two of the three levels of claim are checked on such records. L1, re-simulation: under the recorded settings, with the
recorded requests, places of segments and completions of cross-stream uses, every event of the history and every
statistic must be the recorded one. L2, what-if: under other settings the peaks must be those of a run that had them,
given that the requests are the same and the release's rule for ties. L3, the edge of a real device's memory, is an
interval and not claimed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import zstandard
from allocator_statistics import WatchedAllocator, recorded_addresses

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.addresses import placed_addresses
from memwall.predict.cuda_allocator.allocator_settings import parse_settings
from memwall.predict.cuda_allocator.memory_blocks import Block
from memwall.predict.cuda_allocator.torch_releases import profile_for

__all__ = [
    "PEAKS",
    "AllocatorRecord",
    "first_difference",
    "load_record",
    "load_records",
    "peak_differences",
    "record_of",
    "save_record",
]

Event = tuple[str, int, int, int, int]
"""Action, address (`oom`: free bytes of the device), bytes, stream, pool; as in a snapshot, pools numbered from 1."""

PEAKS = ("requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes")
EMPTY_CACHE, MEMORY_FRACTION = "empty_cache", "memory_fraction"
_COUNTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
_GIVEN = ("segment_free", "segment_unmap")


class AllocatorRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One process, from its first allocation on."""

    program: str
    """What ran, as `allocator_programs.py` names it; the same requests under all settings."""
    tag: Literal["gpu-measured", "simulated"]
    """`simulated`: torch's allocator over a stub of the CUDA runtime, without a GPU."""
    device: str
    torch: str
    settings: str
    """PYTORCH_CUDA_ALLOC_CONF."""
    total_bytes: int
    """The device's memory, of which fractions are taken."""
    free_bytes: int
    """What the device had left before the first allocation."""
    marks: list[tuple[int, str]]
    """What the history has no events for, with the number of events before it: a phase, `empty_cache` or
    `memory_fraction SHARE`."""
    events: list[Event]
    statistics: dict[str, int]
    """`torch.cuda.memory_stats()` at the end, as far as they are numbers."""

    @property
    def name(self) -> str:
        """Of the file: the program and, if there are any, its settings."""
        words = "".join(letter if letter.isalnum() else "-" for letter in self.settings).lower()
        return f"{self.program}-{words}" if words else self.program


def record_of(snapshot: Mapping[str, Any], marks: Sequence[str], **facts: Any) -> AllocatorRecord:
    """A record from what `torch.cuda.memory._snapshot()` returned; each mark made one, which left an event.

    Args:
        facts: the other fields.

    Raises:
        ValueError: the history has not as many marks as are named; it is not whole, or somebody else took snapshots.
    """
    events: list[Event] = []
    pools: dict[tuple[int, ...], int] = {(0, 0): 0}
    positions = []
    for entry in snapshot["device_traces"][0]:
        if entry["action"] == "snapshot":
            positions.append(len(events))
            continue
        pool = pools.setdefault(tuple(entry.get("pool_id", (0, 0))), len(pools))
        place = entry["device_free"] if entry["action"] == "oom" else entry["addr"]
        events.append((entry["action"], place, entry["size"], entry["stream"], pool))
    if len(positions) != len(marks):
        raise ValueError(f"the history has {len(positions)} marks, the program made {len(marks)}")
    return AllocatorRecord(marks=list(zip(positions, marks, strict=True)), events=events, **facts)


def save_record(record: AllocatorRecord, folder: Path) -> Path:
    """Writes a record into a folder under its name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record.name}.json.zst"
    path.write_bytes(zstandard.ZstdCompressor(level=19).compress(msgspec.json.encode(record)))
    return path


def load_record(path: Path) -> AllocatorRecord:
    """Reads a record; msgspec and zstandard name what is wrong with one that is damaged."""
    return msgspec.json.decode(zstandard.decompress(path.read_bytes()), type=AllocatorRecord)


def load_records(folder: Path) -> dict[str, AllocatorRecord]:
    """All records below a folder by their path in it, without the ending."""
    paths = sorted(folder.rglob("*.json.zst"))
    return {str(path.relative_to(folder)).removesuffix(".json.zst"): load_record(path) for path in paths}


# -- the levels of claim -----------------------------------------------------------------------------------------------


def first_difference(record: AllocatorRecord) -> str | None:
    """L1: where a re-simulation first does otherwise than the record; None if nowhere.

    A block that is free as soon as it is freed and one that waited until memory was out leave the same events where
    nothing lies between; a record is repeated if it is under one of the two readings.
    """
    difference = _difference(record, waits_to_the_end=False)
    if difference is not None and _difference(record, waits_to_the_end=True) is None:
        return None
    return difference


def _difference(record: AllocatorRecord, *, waits_to_the_end: bool) -> str | None:
    simulated = _Simulated(
        record, record.settings, recorded_addresses(_places(record)), waits_to_the_end=waits_to_the_end
    )
    reason = simulated.run()
    for number, (found, event) in enumerate(zip(simulated.statistics.trace, record.events, strict=False)):
        # The device's free memory at an `oom` is not the allocator's.
        start = 2 if event[0] == "oom" else 0
        if found[0] != event[0] or found[start:] != event[start:4]:
            return f"event {number}: recorded {event[:4]}, simulated {found}"
    if reason:
        return reason
    if len(simulated.statistics.trace) != len(record.events):
        return f"recorded {len(record.events)} events, simulated {len(simulated.statistics.trace)}"
    for name, count in simulated.all_statistics().items():
        if record.statistics.get(name) != count:
            return f"{name}: recorded {record.statistics.get(name, 'nothing')}, simulated {count}"
    return None


def peak_differences(record: AllocatorRecord, other: AllocatorRecord) -> list[str]:
    """L2: peaks of another run of the same program that come out otherwise from this run's requests; [] if none.

    Where addresses decide ties, segments are placed ascending: a guess.

    Raises:
        UsageError: they are not runs of one program by one release, or requests failed, so that the programs differ.
    """
    if (record.program, record.torch) != (other.program, other.torch):
        raise UsageError(f"{other.name} (torch {other.torch}) is no other run of {record.name} (torch {record.torch})")
    if any(event[0] == "oom" for event in (*record.events, *other.events)):
        raise UsageError(f"requests of {record.program} failed; what-ifs need runs whose requests are the same")
    simulated = _Simulated(record, other.settings, placed_addresses("ascending"))
    reason = simulated.run()
    if reason:
        return [reason]
    found = simulated.all_statistics()
    return [
        f"{name}: measured {other.statistics[key]}, simulated {found[key]}"
        for name in PEAKS
        if found[key := f"{name}.all.peak"] != other.statistics[key]
    ]


class _Simulated:
    """Feeds the requests of a record to a simulated allocator."""

    def __init__(
        self, record: AllocatorRecord, settings: str, addresses: Iterator[int], *, waits_to_the_end: bool = False
    ) -> None:
        profile, _ = profile_for(record.torch)
        self._record = record
        self._synchronized = _synchronized(record)
        self._waits_to_the_end = waits_to_the_end
        self._device = WatchedAllocator(
            parse_settings(settings, profile), profile, total_bytes=record.total_bytes, addresses=addresses
        )
        self.statistics = self._device.statistics
        self._live: dict[int, Block] = {}
        self._waiting: dict[int, Block] = {}
        """Freed while another stream used them. By recorded address, both."""

    def run(self) -> str:
        """Carries out all requests, or up to the first that cannot be; then says why not."""
        record = self._record
        marks = iter([*record.marks, (len(record.events) + 1, "")])
        position, text = next(marks)
        try:
            for number in range(len(record.events) + 1):
                while position == number:
                    self._mark(text)
                    position, text = next(marks)
                if number < len(record.events):
                    self._event(number)
        except (UsageError, KeyError) as error:
            return f"event {number}: {error}"
        return ""

    def all_statistics(self) -> dict[str, int]:
        """As `torch.cuda.memory_stats()` names them."""
        device = self._device
        return {
            **self.statistics.as_dict(),
            **{name: getattr(device, name) for name in _COUNTS},
            "oversize_allocations.current": device.num_oversize_allocations,
            "oversize_segments.current": device.num_oversize_segments,
        }

    def _mark(self, text: str) -> None:
        word, _, value = text.partition(" ")
        if word == EMPTY_CACHE:
            self._device.empty_cache()
        elif word == MEMORY_FRACTION:
            self._device.set_memory_fraction(float(value))

    def _event(self, number: int) -> None:
        action, address, nbytes, stream, _ = self._record.events[number]
        device = self._device
        if action in ("alloc", "oom"):
            block = device.malloc(nbytes, stream)
            if (block is None) != (action == "oom"):
                raise UsageError(
                    f"{nbytes} bytes were {'granted' if block is None else 'refused'}, simulated otherwise"
                )
            if block is not None:
                self._live[address] = block
        elif action == "free_requested":
            block = self._live.pop(address)
            following = self._record.events[number + 1 : number + 2]
            is_free = bool(following) and following[0][:2] == ("free_completed", address)
            waits = not is_free or (self._waits_to_the_end and number + 1 in self._synchronized)
            if waits:
                self._waiting[address] = block
            device.free(block, is_awaited=waits)
        elif action == "free_completed" and address in self._waiting:
            block = self._waiting.pop(address)
            if number not in self._synchronized:
                device.complete(block)


def _places(record: AllocatorRecord) -> Iterator[int]:
    """Where segments and reservations begin, in order: a map outside of all reservations is the start of a new one."""
    span_bytes = record.total_bytes * 9 // 8
    mapped: dict[int, int] = {}
    for action, address, nbytes, _, _ in record.events:
        if action == "segment_alloc":
            yield address
        elif action == "segment_map":
            start = _holding(mapped, address, span_bytes)
            if start is None:
                yield address
                start = address
            mapped[start] = mapped.get(start, 0) + nbytes
        elif action == "segment_unmap":
            start = _holding(mapped, address, span_bytes)
            if start is not None:
                mapped[start] -= nbytes
                if not mapped[start]:
                    del mapped[start]


def _holding(starts: Iterable[int], address: int, span_bytes: int) -> int | None:
    return next((start for start in starts if start <= address < start + span_bytes), None)


def _synchronized(record: AllocatorRecord) -> set[int]:
    """Events that end a wait because the allocator waited for all streams, not because it looked at a request's start.

    It does so when the cache is emptied and before a retry. With garbage collection or `max_split_size` segments are
    released without that, too; then a wait that ends before a release is taken to have ended by itself.
    """
    found: set[int] = set()
    events = record.events
    for position, text in record.marks:
        if text == EMPTY_CACHE:
            number = position
            while number < len(events) and events[number][0] in ("free_completed", *_GIVEN):
                found.add(number)
                number += 1
    is_retry = "max_split" not in record.settings and "garbage" not in record.settings
    ends_wait = False
    for number in range(len(events) - 1, -1, -1):
        action = events[number][0]
        if action == "oom" or (action in _GIVEN and is_retry):
            ends_wait = True
        elif action != "free_completed":
            ends_wait = False
        elif ends_wait:
            found.add(number)
    return found
