"""A device for cases worked out by hand, in MiB."""

from collections.abc import Iterator
from typing import Any

import msgspec
from allocator_statistics import WatchedAllocator

from memwall.predict.cuda_allocator.allocator_settings import MIB, AllocatorSettings
from memwall.predict.cuda_allocator.memory_blocks import Block
from memwall.predict.cuda_allocator.torch_releases import VersionProfile, profile_for

GIB = 1 << 30
_FIGURES = {
    "num_segments": "segment.all.current",
    "num_splits": "inactive_split.all.current",
    "num_splits_peak": "inactive_split.all.peak",
    "split_bytes": "inactive_split_bytes.all.current",
    "split_peak_bytes": "inactive_split_bytes.all.peak",
    "active_bytes": "active_bytes.all.current",
    "requested_bytes": "requested_bytes.all.current",
    "requested_peak_bytes": "requested_bytes.all.peak",
}


class Device(WatchedAllocator):
    """Shows torch's statistics as attributes."""

    def __getattr__(self, name: str) -> int:
        if name not in _FIGURES:
            raise AttributeError(name)
        return self.statistics.as_dict()[_FIGURES[name]]


def profile(**changes: Any) -> VersionProfile:
    return msgspec.structs.replace(profile_for("2.13.0")[0], **changes)


def allocator(
    settings: AllocatorSettings = AllocatorSettings(),  # noqa: B008
    *,
    capacity_mib: int | None = None,
    limit_mib: int | None = None,
    tie: str = "segment",
    addresses: Iterator[int] | None = None,
) -> Device:
    device = Device(
        settings,
        profile(tie=tie),
        capacity_bytes=None if capacity_mib is None else capacity_mib * MIB,
        total_bytes=GIB if capacity_mib is None else None,
        addresses=addresses,
    )
    if limit_mib is not None:
        device.set_memory_fraction(limit_mib * MIB / GIB)
    return device


def expandable(**arguments: Any) -> Device:
    return allocator(AllocatorSettings(expandable_segments=True), **arguments)


def malloc(device: WatchedAllocator, mib: float, stream: int = 0) -> Block:
    block = device.malloc(int(mib * MIB), stream)
    assert block is not None
    return block


def offset_mib(block: Block) -> float:
    return (block.start - block.segment.start) / MIB
