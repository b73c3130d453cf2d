"""A device for cases worked out by hand, in MiB."""

from collections.abc import Iterator
from typing import Any

import msgspec

from memwall.predict.cuda_allocator.allocator_settings import MIB, AllocatorSettings
from memwall.predict.cuda_allocator.memory_blocks import Block
from memwall.predict.cuda_allocator.simulator import CudaAllocator
from memwall.predict.cuda_allocator.torch_releases import VersionProfile, profile_for

GIB = 1 << 30


def profile(**changes: Any) -> VersionProfile:
    return msgspec.structs.replace(profile_for("2.13.0")[0], **changes)


def allocator(
    settings: AllocatorSettings = AllocatorSettings(),  # noqa: B008
    *,
    capacity_mib: int | None = None,
    limit_mib: int | None = None,
    tie: str = "segment",
    addresses: Iterator[int] | None = None,
) -> CudaAllocator:
    return CudaAllocator(
        settings,
        profile(tie=tie),
        capacity_bytes=None if capacity_mib is None else capacity_mib * MIB,
        limit_bytes=None if limit_mib is None else limit_mib * MIB,
        total_bytes=GIB if capacity_mib is None else None,
        addresses=addresses,
    )


def expandable(**arguments: Any) -> CudaAllocator:
    return allocator(AllocatorSettings(expandable_segments=True), **arguments)


def malloc(device: CudaAllocator, mib: float, stream: int = 0) -> Block:
    block = device.malloc(int(mib * MIB), stream)
    assert block is not None
    return block


def offset_mib(block: Block) -> float:
    return block.offset / MIB
