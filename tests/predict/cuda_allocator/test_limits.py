"""Single cases, each worked out by hand: full devices, limits, streams, ties, garbage collection, unbounded growth."""

import pytest
from allocator_statistics import recorded_addresses
from predict.cuda_allocator.small_device import GIB, Device, allocator, malloc, offset_mib, profile

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.addresses import placed_addresses
from memwall.predict.cuda_allocator.allocator_settings import MIB, AllocatorSettings
from memwall.predict.cuda_allocator.torch_releases import profile_for

# Capacity, limit, streams


def test_c1_the_cache_is_released_when_the_device_is_full() -> None:
    device = allocator(capacity_mib=100)
    device.free(malloc(device, 60))
    malloc(device, 80)
    assert (device.num_alloc_retries, device.reserved_bytes) == (1, 80 * MIB)
    assert (device.num_device_alloc, device.num_device_free, device.num_sync_all_streams) == (2, 1, 1)


def test_c2_a_limit_counts_the_segment_not_the_request() -> None:
    device = allocator(limit_mib=30)
    malloc(device, 12)
    assert device.malloc(3 * MIB) is None
    assert (device.num_alloc_retries, device.num_ooms, device.reserved_bytes) == (1, 1, 12 * MIB)


def test_c3_before_giving_up_other_streams_are_waited_for() -> None:
    device = allocator(capacity_mib=100)
    device.free(malloc(device, 60, stream=1), is_awaited=True)
    malloc(device, 80, stream=1)
    assert (device.num_alloc_retries, device.reserved_bytes) == (1, 80 * MIB)
    assert (device.num_device_alloc, device.num_device_free) == (2, 1)


def test_c4_what_that_wait_frees_is_not_searched_in_the_same_call() -> None:
    device = allocator(capacity_mib=20)
    blocks = [malloc(device, mib, stream=1) for mib in (3, 9, 8)]
    device.free(blocks[1], is_awaited=True)
    assert device.malloc(9 * MIB, 1) is None
    assert offset_mib(malloc(device, 9, stream=1)) == 3
    assert (device.num_alloc_retries, device.num_ooms, device.num_device_free) == (1, 1, 0)


def test_s1_a_block_used_by_another_stream_stays_active_until_that_is_done() -> None:
    device = allocator()
    block = malloc(device, 4, stream=1)
    device.free(block, is_awaited=True)
    assert (device.allocated_bytes, device.active_bytes) == (0, 4 * MIB)
    assert offset_mib(malloc(device, 4, stream=1)) == 4
    device.complete(block)
    assert offset_mib(malloc(device, 4, stream=1)) == 0
    assert (device.allocated_bytes, device.reserved_bytes) == (8 * MIB, 20 * MIB)
    assert (device.num_splits, device.split_bytes) == (1, 12 * MIB)
    assert (device.num_splits_peak, device.split_peak_bytes) == (2, 16 * MIB)


# Ties


@pytest.mark.parametrize(("tie", "winner"), [("address", 1), ("block", 0), ("segment", 0)])
def test_t1_between_segments_the_lower_address_or_the_older_one_wins(tie: str, winner: int) -> None:
    device = allocator(tie=tie, addresses=placed_addresses("descending"))
    blocks = [malloc(device, 30), malloc(device, 30)]
    addresses = [block.address for block in blocks]
    assert addresses[1] < addresses[0]
    device.free(blocks[1])
    device.free(blocks[0])
    assert malloc(device, 30).address == addresses[winner]


@pytest.mark.parametrize(("tie", "expected_mib"), [("address", 4), ("block", 16), ("segment", 4)])
def test_t2_within_a_segment_the_last_piece_is_the_oldest_block(tie: str, expected_mib: int) -> None:
    device = allocator(tie=tie)
    blocks = [malloc(device, 4) for _ in range(5)]
    assert device.num_segments == 1
    device.free(blocks[4])
    device.free(blocks[1])
    assert offset_mib(malloc(device, 4)) == expected_mib


@pytest.mark.parametrize(
    ("version", "tie"), [("2.11.0", "address"), ("2.12.1", "block"), ("2.13.0+cpu", "segment"), ("2.15.0", "segment")]
)
def test_the_tie_rule_is_that_of_the_torch_release(version: str, tie: str) -> None:
    assert profile_for(version)[0].tie == tie


def test_recorded_addresses_are_used_in_turn_and_then_missed() -> None:
    device = allocator(addresses=recorded_addresses([7 << 30]))
    assert malloc(device, 30).address == 7 << 30
    with pytest.raises(UsageError, match="more segments than the recording"):
        device.malloc(30 * MIB)


# Garbage collection


def test_gc1_blocks_at_or_above_the_average_age_go() -> None:
    device = allocator(AllocatorSettings(garbage_collection_threshold=0.5), limit_mib=200)
    blocks = {mib: malloc(device, mib) for mib in (30, 40, 50)}
    device.free(blocks[30])
    for expected_mib in (102, 102, 102):
        device.free(malloc(device, 12, stream=7))
        assert device.reserved_bytes == expected_mib * MIB
    device.free(blocks[40])
    for _ in range(3):
        device.free(malloc(device, 12, stream=7))
    device.free(blocks[50])
    assert device.reserved_bytes == 102 * MIB
    malloc(device, 60)
    assert device.large.num_searches == 10
    assert (device.reserved_bytes, device.reserved_peak_bytes) == (122 * MIB, 122 * MIB)
    assert (device.num_device_alloc, device.num_device_free) == (5, 2)


def test_gc2_without_a_limit_nothing_is_collected_or_counted() -> None:
    device = allocator(AllocatorSettings(garbage_collection_threshold=0.5))
    for mib in (30, 40, 50, 60):
        device.free(malloc(device, mib))
    assert (device.num_device_free, device.large.num_searches) == (0, 0)


# Fractions


def test_a_fraction_of_one_is_no_limit() -> None:
    device = Device(AllocatorSettings(), profile_for("2.13.0")[0], total_bytes=GIB)
    device.set_memory_fraction(1.0)
    assert device.limit_bytes is None


def test_a_fraction_in_the_settings_limits_from_the_start() -> None:
    device = Device(AllocatorSettings(per_process_memory_fraction=0.5), profile_for("2.13.0")[0], total_bytes=GIB)
    assert device.malloc(600 * MIB) is None
    assert device.limit_bytes == GIB // 2


@pytest.mark.parametrize(
    ("fraction", "last_mib", "rejections", "retries"), [(None, 700, 1, 0), (0.5, 400, 0, 1), (None, 400, 0, 0)]
)
def test_a_request_beyond_the_device_can_be_refused_at_once_but_one_beyond_the_limit_is_not(
    fraction: float | None, last_mib: int, rejections: int, retries: int
) -> None:
    settings = AllocatorSettings(per_process_memory_fraction=fraction, throw_on_cudamalloc_oom=True)
    device = Device(settings, profile_for("2.13.0")[0], total_bytes=GIB)
    device.free(malloc(device, 390))
    assert (device.malloc(last_mib * MIB) is None) is bool(rejections)
    assert (device.num_alloc_retries, device.num_ooms) == (retries, 0)


# The growth that was reported for a dangerous pair: pytorch issue 123548, PR 193400 (torch 2.12, 16 GiB card)


@pytest.mark.parametrize("tie", ["address", "block", "segment"])
@pytest.mark.parametrize(
    ("settings", "reserved_mib"),
    [
        (
            AllocatorSettings(max_split_bytes=128 * MIB, expandable_segments=True),
            [220, 2980, 5760, 8520, 11300, 14060],
        ),
        (AllocatorSettings(expandable_segments=True), [220, 260, 300, 340, 380, 420]),
        (AllocatorSettings(max_split_bytes=128 * MIB), [222, 262, 302, 342, 382, 422]),
        (AllocatorSettings(), [222, 262, 302, 342, 382, 422]),
    ],
)
def test_p1_reserved_memory_grows_without_bound_under_the_dangerous_pair(
    settings: AllocatorSettings, reserved_mib: list[int], tie: str
) -> None:
    device = Device(settings, profile(tie=tie), total_bytes=16 * GIB)
    malloc(device, 64)
    reserved, allocated = [], []
    for cycle in range(101):
        _growth_cycle(device)
        if cycle % 20 == 0:
            reserved.append(device.reserved_bytes // MIB)
            allocated.append(device.allocated_bytes // MIB)
    assert reserved == reserved_mib
    assert allocated == [66, 106, 146, 186, 226, 266]


@pytest.mark.parametrize(
    ("capacity_mib", "reserved_mib", "peak_mib", "retries"),
    [
        (16000, 2680, 16000, 1),
        (16080, 2680, 16000, 1),
        (16100, 2700, 16100, 1),
        (16137, 2700, 16100, 1),
        (16200, 16140, 16140, 0),
    ],
)
def test_p1_ends_as_reported_when_the_card_is_full(
    capacity_mib: int, reserved_mib: int, peak_mib: int, retries: int
) -> None:
    settings = AllocatorSettings(max_split_bytes=128 * MIB, expandable_segments=True)
    device = Device(settings, profile(), capacity_bytes=capacity_mib * MIB, total_bytes=16 * GIB)
    malloc(device, 64)
    for _ in range(116):
        _growth_cycle(device)
    assert (device.allocated_bytes // MIB, device.num_ooms) == (296, 0)
    assert (device.reserved_bytes // MIB, device.reserved_peak_bytes // MIB) == (reserved_mib, peak_mib)
    assert device.num_alloc_retries == retries


def _growth_cycle(device: Device) -> None:
    passing = [malloc(device, 91), malloc(device, 45.5)]
    malloc(device, 2)
    for block in passing:
        device.free(block)
