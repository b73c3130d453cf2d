"""Simulated events, dumped as a snapshot, read, rebuilt and replayed: the same addresses and the same statistics."""

import pickle
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from allocator_statistics import WatchedAllocator, recorded_addresses
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memwall.predict.cuda_allocator.allocator_events import (
    ALLOC,
    COMPLETE,
    EMPTY_CACHE,
    FREE,
    FREE_LATER,
    Event,
    EventTrace,
)
from memwall.predict.cuda_allocator.allocator_settings import MIB, AllocatorSettings, format_settings
from memwall.predict.cuda_allocator.event_replay import Playback
from memwall.predict.cuda_allocator.memory_blocks import FREE as IS_FREE
from memwall.predict.cuda_allocator.memory_blocks import PENDING, UNMAPPED, Block
from memwall.predict.cuda_allocator.simulator import CudaAllocator
from memwall.predict.cuda_allocator.torch_releases import VersionProfile, profile_for
from memwall.predict.snapshot.device_history import DeviceHistory, recording_of
from memwall.trace.snapshot.read import load_snapshot

SIZES = (1, 600, 70_000, MIB, MIB + 1, 3 * MIB, 9 * MIB, 10 * MIB, 11 * MIB, 33 * MIB, 70 * MIB)
TIES = ("2.11.0", "2.12.0", "2.13.0")
FIGURES = ("reserved_bytes", "reserved_peak_bytes", "allocated_bytes", "allocated_peak_bytes", "num_device_calls")


class Run:
    """A device under drawn settings and a program of two streams on it; nothing of it is ever short of memory."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.profile: VersionProfile = profile_for(draw.choice(TIES))[0]
        is_expandable = draw.random() < 0.5
        split = None if is_expandable else draw.choice((None, 64, 48))
        self.settings = AllocatorSettings(
            expandable_segments=is_expandable,
            max_split_bytes=None if split is None else split * MIB,
            large_segment_bytes=draw.choice((20, 12, 48)) * MIB,
            roundup_power2_divisions=(draw.choice((0, 4)),) * 16,
        )
        self.places = [number << 36 for number in range(1, 500)]
        order = draw.choice(("ascending", "descending", "random"))
        if order == "random":
            draw.shuffle(self.places)
        elif order == "descending":
            self.places.reverse()
        self.device = self.another()
        self.statistics = self.device.statistics
        self.live: list[Block] = []
        self.shared: set[Block] = set()
        """Those that another stream uses, too."""

    def another(self) -> WatchedAllocator:
        """A device of the same settings, with its segments at the same places."""
        return WatchedAllocator(
            self.settings,
            self.profile,
            total_bytes=4 << 30,
            addresses=recorded_addresses(self.places),
        )

    def step(self) -> None:
        draw = self.draw.random()
        if draw < 0.55:
            block = self.device.malloc(self.draw.choice(SIZES) + self.draw.randrange(5000), self.draw.randrange(2))
            assert block is not None
            self.live.append(block)
            if self.draw.random() < 0.05:
                self.shared.add(block)
        elif draw < 0.95 and self.live:
            block = self.live.pop(self.draw.randrange(len(self.live)))
            self.device.free(block, is_awaited=block in self.shared)
            self.shared.discard(block)
        elif draw < 0.98 and self.device.pending:
            self.device.complete(next(iter(self.device.pending)))
        elif draw >= 0.98:
            self.device.empty_cache()

    def snapshot(self) -> dict[str, Any]:
        return {
            "segments": self._segments(),
            "device_traces": [
                [
                    {"action": action, "addr": address, "size": nbytes, "stream": stream}
                    for action, address, nbytes, stream in self.statistics.trace
                ]
            ],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": format_settings(self.settings),
                "max_split_size": self.settings.max_split_bytes or -1,
            },
        }

    def _segments(self) -> list[dict[str, Any]]:
        """Each classic segment, and each mapped stretch of an expandable one."""
        firsts: dict[int, Block] = {}
        free = [block for pool in (self.device.large, self.device.small) for block in pool.in_order()]
        for block in [*self.live, *free, *self.device.pending]:
            while block.prev is not None and block.prev.state != UNMAPPED:
                block = block.prev
            firsts[block.address] = block
        found = []
        for address in sorted(firsts):
            block: Block | None = firsts[address]
            blocks = []
            while block is not None and block.state != UNMAPPED:
                blocks.append(block)
                block = block.next
            found.append(_segment(blocks, self.device.requested))
        return found


def _segment(blocks: list[Block], requested: dict[Block, int]) -> dict[str, Any]:
    first = blocks[0]
    states = {IS_FREE: "inactive", PENDING: "active_pending_free"}
    return {
        "device": 0,
        "address": first.address,
        "total_size": sum(block.size for block in blocks),
        "stream": first.home.stream,
        "segment_type": "small" if first.home.pool.is_small else "large",
        "is_expandable": first.segment.is_expandable,
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": requested.get(block, 0),
                "state": states.get(block.state, "active_allocated"),
            }
            for block in blocks
        ],
    }


def read_back(raw: dict[str, Any], folder: Path) -> DeviceHistory:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(raw))
    return recording_of(load_snapshot(path), 0)


def releases_of(recording: DeviceHistory) -> dict[int, bool]:
    """Returns the last event of each time that memory was given back, and whether the device had run out.

    It had if a request failed then, or got more than would have fitted, beside what was held, into the most that the
    device ever gave. Otherwise the program emptied the cache.
    """
    taken, given = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
    reserved = [sum(held.num_bytes for held in recording.start.ranges)]
    for event in recording.events:
        sign = (event.action in taken) - (event.action in given)
        reserved.append(reserved[-1] + sign * event.num_bytes)
    releases, held_bytes = {}, 0
    for index, (event, following) in enumerate(pairwise((*recording.events, None))):
        assert event is not None
        if event.action not in given:
            continue
        if index == 0 or recording.events[index - 1].action not in given:
            held_bytes = reserved[index]
        if following is None or following.action not in given:
            releases[index] = following is not None and (
                following.action == "oom"
                or (following.action in taken and held_bytes + following.num_bytes > max(reserved))
            )
    return releases


def events_of_recording(recording: DeviceHistory, settings: AllocatorSettings) -> EventTrace:
    """Returns a recording as the requests of the program, numbered by their events."""
    emptied = {last for last, is_retry in releases_of(recording).items() if not is_retry}
    events: list[Event] = []
    number_of: dict[int, int] = {}
    waiting: dict[int, int] = {}
    for index, block in enumerate(recording.start.blocks):
        (waiting if block.is_pending else number_of)[block.address] = -1 - index
    for number, (event, following) in enumerate(pairwise((*recording.events, None))):
        assert event is not None
        address = event.address
        if event.action == "alloc":
            number_of[address] = number
            events.append((ALLOC, number, max(event.num_bytes, 1), event.stream))
        elif event.action == "free_requested":
            freed = number_of.pop(address)
            is_done = following is not None and (following.action, following.address) == ("free_completed", address)
            if not is_done:
                waiting[address] = freed
            events.append((FREE if is_done else FREE_LATER, freed, 0, 0))
        elif event.action == "free_completed" and address in waiting:
            events.append((COMPLETE, waiting.pop(address), 0, 0))
        elif number in emptied:
            events.append((EMPTY_CACHE, 0, 0, 0))
    start = recording.start
    held = replace(start, granule_bytes=settings.large_segment_bytes) if start.ranges or start.blocks else None
    return EventTrace(events=tuple(events), steps=(0,), held=held)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("snapshots")


def some_run(seed: int) -> Run:
    run = Run(random.Random(seed))
    for _ in range(250):
        run.step()
    return run


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_replayed_addresses_and_statistics_are_the_recorded_ones(seed: int, folder: Path) -> None:
    """For every rule for ties, every way to place segments, and settings of all kinds."""
    run = some_run(seed)
    recording = read_back(run.snapshot(), folder)
    # A snapshot has no mark of an emptied cache: one before the device's highest peak looks like a retry.
    assume(not any(releases_of(recording).values()))
    trace = events_of_recording(recording, run.settings)
    assert trace.held is None
    again = run.another()
    playback = Playback(again)
    for event in trace.events:
        assert playback.run((event,))
        if event[0] == ALLOC:
            assert playback.live[event[1]].address == recording.events[event[1]].address
    assert again.statistics.as_dict() == run.statistics.as_dict()
    assert {name: getattr(again, name) for name in FIGURES} == {name: getattr(run.device, name) for name in FIGURES}


def test_a_recording_begun_late_reserves_what_was_recorded_within_five_percent(folder: Path) -> None:
    """WHEN the first events are lost THEN what was held is known; only in what order it came there is guessed."""
    num_replayed = 0
    for seed in range(40):
        run, num_lost = some_run(seed), 50 + 3 * seed
        raw = run.snapshot()
        del raw["device_traces"][0][:num_lost]
        recording = read_back(raw, folder)
        if any(releases_of(recording).values()):
            continue
        trace = events_of_recording(recording, run.settings)
        again = CudaAllocator(run.settings, run.profile)
        assert Playback(again, trace.held).run(trace.events)
        assert again.allocated_bytes == pytest.approx(run.device.allocated_bytes, rel=0.05), seed
        assert again.reserved_bytes == pytest.approx(run.device.reserved_bytes, rel=0.05), seed
        num_replayed += 1
    assert num_replayed > 30
