"""The simulator against the allocators of torch 2.11.0, 2.12.0, 2.13.0 and 2.15.0: every address, and the statistics.

The recordings were made without a GPU: `libc10_cuda.so` of the CUDA wheel, loaded over a stub of the CUDA runtime that
hands out addresses one behind (or before) the other up to a capacity, and whose events end on command.
Calls: a(lloc) block bytes stream, f(ree), r(ecord_stream), d(one) stream, e(mpty_cache), m(emory fraction), P(ool) with
flags 1 used when memory is out and 2 never split, B(egin) and E(nd) of routing into it (1: capturing), R(elease) it.
Left out are cases that end in the order of a hash table: several pools to be used when memory is out, several blocks
whose free waits for the end of a capture.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.addresses import recorded_addresses
from memwall.predict.cuda_allocator.blocks import Block
from memwall.predict.cuda_allocator.settings import parse_settings
from memwall.predict.cuda_allocator.simulator import CudaAllocator
from memwall.predict.cuda_allocator.versions import VersionProfile, profile_for

FOLDER = Path(__file__).parent
VERSIONS = ("2.11.0", "2.12.0", "2.13.0", "2.15.0")


def recorded_runs(version: str) -> list[dict[str, Any]]:
    packed = (FOLDER / f"torch_{version.replace('.', '_')}.json.zst").read_bytes()
    recording = json.loads(zstandard.decompress(packed))
    assert recording["torch"] == version
    return list(recording["runs"])


class Runner:
    """Feeds recorded calls to the simulator."""

    def __init__(self, run: dict[str, Any], profile: VersionProfile) -> None:
        self.live: dict[int, Block] = {}
        self.device = CudaAllocator(
            parse_settings(run["settings"], profile),
            profile,
            capacity_bytes=run["capacity_bytes"],
            total_bytes=run["total_bytes"],
            addresses=recorded_addresses(run["segments"]),
        )

    def call(self, text: str) -> int | str:
        """The address of an allocation, "oom", or the call's letter."""
        letter, *words = text.split()
        device = self.device
        if letter == "m":
            device.set_memory_fraction(float(words[0]))
            return letter
        numbers = [int(word) for word in words]
        if letter == "a":
            block = device.malloc(numbers[1], numbers[2])
            if block is None:
                return "oom"
            self.live[numbers[0]] = block
            return block.address
        if letter == "f":
            device.free(self.live.pop(numbers[0]))
        elif letter == "r":
            device.record_stream(self.live[numbers[0]], numbers[1])
        elif letter == "d":
            device.finish_stream(numbers[0])
        elif letter == "e":
            device.empty_cache()
        elif letter == "P":
            device.add_pool(numbers[0], is_used_on_oom=bool(numbers[1] & 1), is_no_split=bool(numbers[1] & 2))
        elif letter == "B":
            device.begin_pool(numbers[0], is_capture=bool(numbers[1]))
        elif letter == "E":
            device.end_pool()
        elif letter == "R":
            device.release_pool(numbers[0])
        return letter

    def statistics(self) -> list[int]:
        """In the order of the recording, in which the peak of segments, at 9, is not compared."""
        device = self.device
        return [
            *(device.allocated_bytes, device.allocated_peak_bytes, device.active_bytes, device.active_peak_bytes),
            *(device.requested_bytes, device.requested_peak_bytes, device.reserved_bytes, device.reserved_peak_bytes),
            *(device.num_segments, device.num_splits, device.num_splits_peak),
            *(device.split_bytes, device.split_peak_bytes, device.num_alloc_retries, device.num_ooms),
            *(device.num_sync_all_streams, device.num_device_alloc, device.num_device_free),
            *(device.num_oversize_allocations, device.num_oversize_segments),
        ]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_address_and_all_statistics_are_those_of_torch(version: str) -> None:
    for number, run in enumerate(recorded_runs(version)):
        runner = Runner(run, profile_for(version)[0])
        for place, (text, expected) in enumerate(zip(run["calls"], run["results"], strict=True)):
            assert runner.call(text) == expected, (number, place, text)
            if str(place) in run["statistics"]:
                recorded = run["statistics"][str(place)]
                assert runner.statistics() == recorded[:9] + recorded[10:], (number, place, text)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_other_tie_rule_explains_the_addresses(version: str) -> None:
    own = profile_for(version)[0]
    for tie in {"address", "block", "segment"} - {own.tie}:
        assert not all(_is_same(run, msgspec.structs.replace(own, tie=tie)) for run in recorded_runs(version)), tie


def _is_same(run: dict[str, Any], profile: VersionProfile) -> bool:
    runner = Runner(run, profile)
    try:
        return all(runner.call(text) == expected for text, expected in zip(run["calls"], run["results"], strict=True))
    except (KeyError, UsageError):
        # It ran out of memory, or asked for more segments, where torch did not.
        return False
