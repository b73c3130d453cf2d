"""An allocator that begins with memory held already: every figure as if it had come there by itself."""

from collections.abc import Sequence

import pytest

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.allocator_events import (
    ALLOC,
    COMPLETE,
)
from memwall.predict.cuda_allocator.allocator_events import FREE as FREED
from memwall.predict.cuda_allocator.allocator_settings import MIB, AllocatorSettings
from memwall.predict.cuda_allocator.event_replay import Playback
from memwall.predict.cuda_allocator.held_blocks import Held, Range, UsedBlock
from memwall.predict.cuda_allocator.held_memory import load
from memwall.predict.cuda_allocator.memory_blocks import FREE, PENDING, USED
from memwall.predict.cuda_allocator.simulator import CudaAllocator
from memwall.predict.cuda_allocator.torch_releases import profile_for

PROFILE, _ = profile_for("2.13.0")
BASE = 0x7F0000000000
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def held(
    ranges: Sequence[tuple[int, int]],
    blocks: Sequence[tuple[int, int]],
    *,
    is_expandable: bool = False,
    pending: int = 0,
) -> Held:
    """Ranges and blocks as (offset, size), in MiB; blocks have the numbers -1, -2, ..."""
    return Held(
        ranges=tuple(
            Range(
                address=BASE + start * MIB, num_bytes=size * MIB, stream=0, is_small=False, is_expandable=is_expandable
            )
            for start, size in ranges
        ),
        blocks=tuple(
            UsedBlock(
                address=BASE + start * MIB,
                num_bytes=size * MIB,
                requested_bytes=size * MIB - 100,
                stack=0,
                category="",
                is_pending=-1 - number == pending,
                is_exact=True,
            )
            for number, (start, size) in enumerate(blocks)
        ),
        granule_bytes=20 * MIB,
    )


def device(settings: AllocatorSettings | None = None) -> CudaAllocator:
    return CudaAllocator(settings or AllocatorSettings(), PROFILE)


def test_figures_are_those_of_an_allocator_that_got_there_itself() -> None:
    """GIVEN 12 of 30 MiB and a whole segment of 40, in use, beside a cached one of 50."""
    found, itself = device(), device()
    blocks = [itself.malloc(mib * MIB) for mib in (12, 18, 40, 50)]
    assert None not in blocks
    load(found, held([(0, 12), (100, 18), (200, 40), (300, 50)], [(0, 12), (200, 40)]))
    for block in (blocks[1], blocks[3]):
        assert block is not None
        itself.free(block)
    assert (found.reserved_bytes, found.allocated_bytes) == (itself.reserved_bytes, itself.allocated_bytes)
    sizes = [[block.size for block in one.large.in_order()] for one in (found, itself)]
    assert sizes[0] == sizes[1] == [18 * MIB, 50 * MIB]
    assert (found.reserved_peak_bytes, found.allocated_peak_bytes) == (120 * MIB, 52 * MIB)


def test_free_memory_between_blocks_is_split_and_is_used_first() -> None:
    found = device()
    blocks = load(found, held([(0, 60)], [(0, 10), (30, 10)]))
    block = found.malloc(20 * MIB)
    assert block is not None
    assert (block.address, found.reserved_bytes) == (BASE + 10 * MIB, 60 * MIB)
    for used in (*blocks.values(), block):
        found.free(used)
    found.empty_cache()
    assert found.reserved_bytes == 0


def test_a_block_that_waits_is_not_free_until_its_stream_is_done() -> None:
    playback = Playback(device(), held([(0, 60)], [(0, 30), (30, 30)], pending=-2))
    found = playback.device
    assert (found.allocated_bytes, found.reserved_bytes) == (30 * MIB, 60 * MIB)
    assert playback.run([(ALLOC, 1, 30 * MIB, 0)])
    assert found.reserved_bytes == 90 * MIB
    assert playback.run([(COMPLETE, -2, 0, 0)])
    assert playback.run([(ALLOC, 2, 30 * MIB, 0)])
    assert found.reserved_bytes == 90 * MIB


def test_mapped_stretches_of_expandable_segments_are_one_reservation_that_grows() -> None:
    """GIVEN 40 MiB mapped, a hole of 20 and 40 mapped WHEN 60 are asked for THEN only the hole is mapped."""
    found = device(EXPANDABLE)
    blocks = load(found, held([(0, 40), (60, 40)], [(0, 20)], is_expandable=True))
    assert found.reserved_bytes == 80 * MIB
    block = found.malloc(80 * MIB)
    assert block is not None
    assert (block.address, found.reserved_bytes) == (BASE + 20 * MIB, 100 * MIB)
    found.free(block)
    found.free(blocks[-1])
    found.empty_cache()
    assert found.reserved_bytes == 0


def test_expandable_blocks_are_passed_over_once_the_setting_is_off() -> None:
    found = device()
    load(found, held([(0, 40)], [], is_expandable=True))
    assert found.malloc(30 * MIB) is not None
    assert found.reserved_bytes == 70 * MIB


def test_with_the_setting_on_classic_blocks_split_finely_too() -> None:
    found = device(EXPANDABLE)
    load(found, held([(0, 12)], []))
    assert found.malloc(11 * MIB) is not None
    assert (found.allocated_bytes, found.reserved_bytes) == (11 * MIB, 12 * MIB)


def test_states_follow_from_what_is_held() -> None:
    blocks = load(device(), held([(0, 60)], [(0, 30), (40, 20)], pending=-2))
    assert [blocks[number].state for number in (-1, -2)] == [USED, PENDING]
    following = blocks[-1].next
    assert following is not None
    assert (following.state, following.size, following.next) == (FREE, 10 * MIB, blocks[-2])


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([(0, 30), (20, 30)], "block -2 overlaps another"),
        ([(50, 20)], "block -1 overlaps another, or the end of the memory"),
        ([(70, 10)], "block -1 lies outside of the memory that is held"),
    ],
)
def test_what_contradicts_itself_is_an_error(blocks: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(device(), held([(0, 60)], blocks))


def test_a_playback_begins_with_what_is_held() -> None:
    simulated = device()
    assert Playback(simulated, held([(0, 60), (100, 40)], [(0, 60)])).run([(FREED, -1, 0, 0), (ALLOC, 1, 90 * MIB, 0)])
    assert simulated.reserved_peak_bytes == 190 * MIB
