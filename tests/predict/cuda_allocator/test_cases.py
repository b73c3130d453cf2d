"""Single cases of the allocator, each worked out by hand: sizes, splitting, oversize blocks, expandable segments."""

import pytest
from predict.cuda_allocator.small_device import GIB, Device, allocator, expandable, malloc, offset_mib

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.allocator_settings import MIB, AllocatorSettings
from memwall.predict.cuda_allocator.rounding import allocation_bytes, division_index, rounded_bytes

# Sizes


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [(1, 512), (512, 512), (513, 1024), (1048576, 1048576), (1048577, 1049088)],
)
def test_r1_requests_round_up_to_512_bytes(request_bytes: int, expected: int) -> None:
    assert rounded_bytes(request_bytes, AllocatorSettings()) == expected


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (1, 512),
        (512, 512),
        (513, 1024),
        (1200, 1536),
        (2048, 2048),
        (2049, 2560),
        (5000, 5120),
        (MIB, MIB),
        (MIB + 1, 1310720),
        (3 * MIB + 1, 3670016),
    ],
)
def test_r2_four_divisions_round_to_quarters_of_a_power_of_two(request_bytes: int, expected: int) -> None:
    assert rounded_bytes(request_bytes, AllocatorSettings(roundup_power2_divisions=(4,) * 16)) == expected


@pytest.mark.parametrize(
    ("request_bytes", "index"),
    [(1, 0), (2 * MIB - 1, 0), (2 * MIB, 1), (32 * GIB - 1, 14), (32 * GIB, 15), (1 << 40, 15)],
)
def test_divisions_are_by_interval_of_two_powers(request_bytes: int, index: int) -> None:
    assert division_index(request_bytes) == index


@pytest.mark.parametrize(
    ("block_bytes", "expected_mib"),
    [(512, 2), (MIB, 2), (MIB + 512, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12)],
)
def test_a_segment_is_2_mib_20_mib_or_the_request_rounded_up(block_bytes: int, expected_mib: int) -> None:
    assert allocation_bytes(block_bytes, AllocatorSettings()) == expected_mib * MIB


def test_absurd_requests_are_refused_and_empty_ones_never_arrive() -> None:
    device = allocator()
    assert device.malloc(1 << 60) is None
    with pytest.raises(UsageError, match="0 bytes never reaches"):
        device.malloc(0)
    assert (device.num_ooms, device.num_device_alloc) == (0, 0)


# Classic segments


def test_a1_one_byte_takes_512_of_a_2_mib_segment() -> None:
    device = allocator()
    device.malloc(1)
    assert (device.allocated_bytes, device.requested_bytes, device.reserved_bytes) == (512, 1, 2 * MIB)
    assert (device.num_splits, device.split_bytes, device.num_device_alloc) == (1, 2096640, 1)


def test_a2_two_mebibytes_fill_one_small_segment() -> None:
    device = allocator()
    malloc(device, 1)
    malloc(device, 1)
    assert device.num_segments == 1
    assert device.allocated_bytes == device.reserved_bytes == 2 * MIB
    assert (device.num_splits, device.split_bytes) == (0, 0)
    assert (device.num_splits_peak, device.split_peak_bytes) == (1, MIB)


@pytest.mark.parametrize(
    ("request_bytes", "allocated", "reserved", "split"),
    [
        pytest.param(MIB + 1, 1049088, 20 * MIB, (1, 19922432), id="a3"),
        pytest.param(10 * MIB, 10485760, 10485760, (0, 0), id="a4"),
        pytest.param(10 * MIB - 512, 10485248, 20 * MIB, (1, 10486272), id="a5"),
        pytest.param(11 * MIB, 12 * MIB, 12 * MIB, (0, 0), id="a6"),
        pytest.param(11 * MIB + 1, 12 * MIB, 12 * MIB, (0, 0), id="a7"),
    ],
)
def test_a3_to_a7_a_large_block_is_split_only_if_more_than_1_mib_remains(
    request_bytes: int, allocated: int, reserved: int, split: tuple[int, int]
) -> None:
    device = allocator()
    device.malloc(request_bytes)
    assert (device.allocated_bytes, device.reserved_bytes) == (allocated, reserved)
    assert device.requested_bytes == request_bytes
    assert (device.num_splits, device.split_bytes) == split


def test_a8_a_cached_segment_that_is_too_small_stays() -> None:
    device = allocator()
    device.free(malloc(device, 3))
    assert device.reserved_bytes == 20 * MIB
    malloc(device, 25)
    assert device.reserved_bytes == 46 * MIB
    assert (device.allocated_bytes, device.requested_bytes) == (27262976, 26214400)
    assert device.num_segments == 2
    assert (device.num_splits_peak, device.split_peak_bytes) == (1, 17 * MIB)


def test_a9_streams_do_not_share_cached_blocks() -> None:
    device = allocator()
    device.free(malloc(device, 4, stream=1))
    malloc(device, 4, stream=2)
    assert (device.reserved_bytes, device.num_segments) == (40 * MIB, 2)
    assert (device.num_splits, device.split_bytes) == (1, 16 * MIB)


# Oversize blocks


def test_m1_oversize_blocks_serve_only_requests_of_about_their_size() -> None:
    device = allocator(AllocatorSettings(max_split_bytes=128 * MIB))
    device.free(malloc(device, 200))
    malloc(device, 100)
    assert device.reserved_bytes == 300 * MIB
    block = malloc(device, 185)
    assert (device.allocated_bytes, device.num_oversize_allocations) == (300 * MIB, 1)
    device.free(block)
    assert device.num_oversize_allocations == 0
    malloc(device, 180)
    assert (device.reserved_bytes, device.allocated_bytes) == (480 * MIB, 280 * MIB)
    assert (device.allocated_peak_bytes, device.requested_peak_bytes) == (300 * MIB, 285 * MIB)
    assert (device.num_segments, device.num_device_alloc, device.num_device_free) == (3, 3, 0)
    assert device.num_oversize_segments == 2


def test_a_block_of_exactly_the_limit_is_oversize() -> None:
    device = allocator(AllocatorSettings(max_split_bytes=128 * MIB))
    device.free(malloc(device, 128))
    malloc(device, 100)
    assert device.reserved_bytes == 228 * MIB


def test_m2_an_oversize_block_is_released_before_everything_is() -> None:
    device = allocator(AllocatorSettings(max_split_bytes=128 * MIB), capacity_mib=300)
    device.free(malloc(device, 200))
    malloc(device, 50)
    assert device.reserved_bytes == 250 * MIB
    malloc(device, 150)
    assert (device.reserved_bytes, device.reserved_peak_bytes) == (200 * MIB, 250 * MIB)
    assert (device.num_alloc_retries, device.num_device_alloc, device.num_device_free) == (0, 3, 1)


@pytest.mark.parametrize(
    ("last_mib", "retries", "peak_mib"), [pytest.param(280, 1, 280, id="m3"), pytest.param(250, 0, 270, id="m4")]
)
def test_m3_m4_oversize_blocks_are_released_until_their_sum_suffices(
    last_mib: int, retries: int, peak_mib: int
) -> None:
    device = allocator(AllocatorSettings(max_split_bytes=128 * MIB), capacity_mib=300)
    blocks = [malloc(device, 140), malloc(device, 130)]
    for block in blocks:
        device.free(block)
    malloc(device, last_mib)
    assert (device.num_alloc_retries, device.reserved_bytes) == (retries, last_mib * MIB)
    assert device.reserved_peak_bytes == peak_mib * MIB
    assert (device.num_device_alloc, device.num_device_free) == (3, 2)


# Expandable segments


def test_x1_an_expandable_segment_grows_where_a_classic_one_is_left_behind() -> None:
    device = expandable()
    device.free(malloc(device, 3))
    assert device.reserved_bytes == 20 * MIB
    malloc(device, 25)
    assert (device.reserved_bytes, device.allocated_bytes) == (40 * MIB, 26214400)
    assert (device.num_segments, device.num_splits, device.num_device_alloc) == (0, 0, 2)


def test_x2_emptying_the_cache_unmaps_whole_granules_in_the_middle() -> None:
    device = expandable()
    blocks, reserved = [], []
    for _ in range(3):
        blocks.append(malloc(device, 30))
        reserved.append(device.reserved_bytes // MIB)
    assert reserved == [40, 60, 100]
    device.free(blocks.pop(1))
    device.empty_cache()
    assert device.reserved_bytes == 80 * MIB
    blocks.append(malloc(device, 30))
    assert (device.reserved_bytes, offset_mib(blocks[-1])) == (100 * MIB, 30)
    for block in blocks:
        device.free(block)
    device.empty_cache()
    assert (device.reserved_bytes, device.reserved_peak_bytes) == (0, 100 * MIB)
    assert (device.num_device_alloc, device.num_device_free) == (4, 2)


def test_x3_a_closed_hole_is_preferred_to_the_tail_that_can_grow() -> None:
    device = expandable()
    blocks = [malloc(device, mib) for mib in (40, 12, 8, 10)]
    assert (offset_mib(blocks[3]), device.reserved_bytes) == (60, 80 * MIB)
    device.free(blocks[1])
    assert offset_mib(malloc(device, 9)) == 40


def test_of_two_equal_closed_holes_the_first_is_taken() -> None:
    device = expandable()
    blocks = [malloc(device, mib) for mib in (9, 2, 9, 20)]
    device.free(blocks[2])
    device.free(blocks[0])
    assert offset_mib(malloc(device, 9)) == 0


@pytest.mark.parametrize(
    ("last_mib", "reserved_mib", "device_mallocs"),
    [pytest.param(60, 80, 5, id="x4"), pytest.param(90, 120, 6, id="x5")],
)
def test_x4_x5_a_request_spans_a_hole_free_blocks_and_the_tail(
    last_mib: int, reserved_mib: int, device_mallocs: int
) -> None:
    device = expandable()
    _with_a_hole(device)
    assert offset_mib(malloc(device, last_mib)) == 20
    assert device.reserved_bytes == reserved_mib * MIB
    assert (device.num_device_alloc, device.num_device_free) == (device_mallocs, 1)


def test_x6_what_was_mapped_before_a_refusal_stays_until_the_cache_is_released() -> None:
    device = expandable(capacity_mib=110)
    _with_a_hole(device)
    assert device.malloc(90 * MIB) is None
    assert (device.reserved_bytes, device.reserved_peak_bytes) == (20 * MIB, 80 * MIB)
    assert (device.num_device_alloc, device.num_device_free) == (5, 2)
    assert (device.num_alloc_retries, device.num_ooms) == (1, 1)


def _with_a_hole(device: Device) -> None:
    blocks = [malloc(device, 20) for _ in range(4)]
    device.free(blocks[1])
    device.empty_cache()
    assert device.reserved_bytes == 60 * MIB
    device.free(blocks[2])
    device.free(blocks[3])
    assert device.reserved_bytes == 60 * MIB


def test_x7_less_than_a_granule_cannot_be_given_back() -> None:
    device = expandable(capacity_mib=100)
    malloc(device, 30)
    assert device.malloc(90 * MIB) is None
    assert (device.reserved_bytes, device.num_device_alloc, device.num_device_free) == (40 * MIB, 1, 0)
    assert (device.num_alloc_retries, device.num_ooms) == (1, 1)


def test_x10_a_limit_can_be_overshot_by_less_than_a_granule() -> None:
    device = expandable(limit_mib=35)
    malloc(device, 30)
    assert device.reserved_bytes == 40 * MIB


def test_a_larger_granule_means_fewer_device_calls_and_a_longer_tail() -> None:
    device = allocator(AllocatorSettings(expandable_segments=True, large_segment_bytes=128 * MIB))
    for _ in range(5):
        malloc(device, 30)
    assert (device.num_device_alloc, device.reserved_bytes) == (2, 256 * MIB)
