"""Private pools: CUDA graphs and MemPools, what they keep, and what routing into them stops."""

from typing import Any

import pytest
from predict.cuda_allocator.small_device import malloc

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.allocator_settings import MIB, AllocatorSettings
from memwall.predict.cuda_allocator.memory_blocks import Block
from memwall.predict.cuda_allocator.simulator import CudaAllocator
from memwall.predict.cuda_allocator.torch_releases import profile_for

DEFAULT = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def allocator(
    version: str = "2.13.0",
    settings: AllocatorSettings = DEFAULT,
    *,
    capacity_mib: int = 1000,
) -> CudaAllocator:
    return CudaAllocator(settings, profile_for(version)[0], capacity_bytes=capacity_mib * MIB)


def inside(device: CudaAllocator, key: int, mib: float, **pool: Any) -> Block:
    if key not in device.private_pools:
        device.add_pool(key, **pool)
    device.begin_pool(key)
    block = malloc(device, mib)
    device.end_pool()
    return block


@pytest.mark.parametrize("settings", [AllocatorSettings(), EXPANDABLE])
def test_a_pool_keeps_its_memory_until_nobody_holds_it(settings: AllocatorSettings) -> None:
    device = allocator(settings=settings)
    block, outside = inside(device, 1, 40), malloc(device, 40)
    assert block.home.pool is device.private_pools[1].large
    assert outside.home.pool is device.large
    device.free(block)
    device.free(outside)
    device.empty_cache()
    assert device.reserved_bytes == 40 * MIB
    assert malloc(device, 40).home.pool is device.large
    device.release_pool(1)
    device.empty_cache()
    assert device.reserved_bytes == 40 * MIB


def test_the_innermost_of_nested_pools_gets_the_block() -> None:
    device = allocator()
    device.add_pool(1)
    device.add_pool(2)
    device.begin_pool(1)
    inner = inside(device, 2, 4)
    outer = malloc(device, 4)
    device.end_pool()
    assert inner.home.pool is device.private_pools[2].large
    assert outer.home.pool is device.private_pools[1].large


def test_an_unknown_pool_is_an_error() -> None:
    device = allocator()
    device.add_pool(4)
    with pytest.raises(UsageError, match=r"there is no private pool 3; there are \[4\]"):
        device.begin_pool(3)


@pytest.mark.parametrize(
    ("version", "pool", "is_expandable"),
    [("2.4.0", {}, False), ("2.5.0", {}, True), ("2.13.0", {}, True), ("2.13.0", {"has_allocator": True}, False)],
)
def test_which_pools_expand(version: str, pool: dict[str, bool], is_expandable: bool) -> None:
    block = inside(allocator(version, EXPANDABLE), 1, 40, **pool)
    assert block.segment.is_expandable == is_expandable


@pytest.mark.parametrize(("version", "allocated_mib"), [("2.9.0", 4), ("2.13.0", 20)])
def test_a_pool_can_forbid_splitting(version: str, allocated_mib: int) -> None:
    device = allocator(version)
    inside(device, 1, 4, is_no_split=True)
    assert device.allocated_bytes == allocated_mib * MIB


@pytest.mark.parametrize(("version", "is_freed"), [("2.11.0", False), ("2.13.0", True)])
def test_routing_into_a_pool_once_stopped_cross_stream_frees(version: str, is_freed: bool) -> None:
    # pytorch issue 175015
    device = allocator(version)
    block = malloc(device, 30)
    device.record_stream(block, 2)
    device.free(block)
    device.finish_stream(2)
    inside(device, 1, 4)
    assert (device.active_bytes == 4 * MIB) is is_freed
    malloc(device, 4)
    assert device.active_bytes == 8 * MIB


@pytest.mark.parametrize(("version", "retries"), [("2.11.0", 0), ("2.13.0", 1)])
def test_routing_into_a_pool_once_stopped_retries(version: str, retries: int) -> None:
    device = allocator(version, capacity_mib=100)
    device.free(malloc(device, 80))
    device.add_pool(1)
    device.begin_pool(1)
    assert (device.malloc(60 * MIB) is not None) is bool(retries)
    assert (device.num_alloc_retries, device.num_ooms) == (retries, 1 - retries)


def test_frees_inside_a_capture_wait_for_its_end() -> None:
    device = allocator()
    device.add_pool(1)
    block, captured = malloc(device, 30), malloc(device, 40)
    device.record_stream(block, 2)
    device.begin_pool(1, is_capture=True)
    device.record_stream(captured, 2)
    device.free(block)
    device.free(captured)
    malloc(device, 1)
    assert device.active_bytes == 71 * MIB
    assert device.uses == {}
    device.end_pool()
    # A use that was captured does not happen now, so nothing is waited for.
    malloc(device, 1)
    assert device.active_bytes == 32 * MIB
    assert list(device.uses) == [2]
    device.finish_stream(2)
    malloc(device, 1)
    assert device.active_bytes == 3 * MIB


def test_during_a_capture_the_cache_is_not_emptied() -> None:
    device = allocator()
    device.free(malloc(device, 30))
    device.add_pool(1)
    device.begin_pool(1, is_capture=True)
    device.empty_cache()
    assert (device.reserved_bytes, device.num_sync_all_streams) == (30 * MIB, 0)
    device.end_pool()
    device.empty_cache()
    assert (device.reserved_bytes, device.num_sync_all_streams) == (0, 1)


def overflowing(version: str) -> CudaAllocator:
    """A device with 10 of 100 MiB left, 40 cached and 50 free in a pool that may be used when memory runs out."""
    device = allocator(version, capacity_mib=100)
    device.free(inside(device, 1, 50, is_used_on_oom=True))
    device.free(malloc(device, 40))
    return device


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0"])
def test_newer_releases_turn_to_such_a_pool_before_they_release_memory(version: str) -> None:
    device = overflowing(version)
    assert malloc(device, 50).home.pool is device.private_pools[1].large
    assert (device.num_alloc_retries, device.num_device_free, device.reserved_bytes) == (0, 0, 90 * MIB)


def test_older_releases_release_first() -> None:
    device = overflowing("2.10.0")
    assert malloc(device, 50).home.pool is device.large
    assert (device.num_alloc_retries, device.num_device_free, device.reserved_bytes) == (1, 1, 100 * MIB)


def test_garbage_collection_never_touches_private_pools() -> None:
    settings = AllocatorSettings(garbage_collection_threshold=0.1)
    device = CudaAllocator(settings, profile_for("2.13.0")[0], total_bytes=1000 * MIB, limit_bytes=500 * MIB)
    device.free(inside(device, 1, 100))
    device.free(malloc(device, 100))
    malloc(device, 200)
    assert (device.num_device_free, device.reserved_bytes) == (1, 300 * MIB)


@pytest.mark.parametrize(("version", "num_freed"), [("2.4.0", 1), ("2.5.0", 0)])
def test_the_version_decides_whether_expandable_blocks_are_collected(version: str, num_freed: int) -> None:
    profile = profile_for(version)[0]
    settings = AllocatorSettings(garbage_collection_threshold=0.1, expandable_segments=True)
    # One reservation holds 9/8 of 80 MiB, in granules: the first block fills it, so that it counts as unsplit.
    device = CudaAllocator(settings, profile, total_bytes=80 * MIB, capacity_bytes=400 * MIB, limit_bytes=300 * MIB)
    device.free(malloc(device, 100))
    malloc(device, 100, stream=1)
    assert device.num_device_free == num_freed
