"""Bytes of CPU tensors on their way to disk and back: from where they lie, or through copies, within one window."""

import gc
import mmap
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from faulty_disk import Gate
from torch import Tensor

from memwall.errors import StoreError
from memwall.store.disk_tier import ByteRange, DiskTier, StagingArena
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool, memory_at

BLOCK = 64 << 10
pytestmark = pytest.mark.timeout(30)


def on_a_page(num_bytes: int, offset: int = 0) -> Tensor:
    """Bytes that begin at a page, or `offset` bytes after one, in a storage of their own."""
    memory = mmap.mmap(-1, num_bytes + 4096)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=num_bytes).random_(0, 256)


def tier_on(pool: TransferPool, num_blocks: int) -> DiskTier:
    """A tier to which every storage that begins at a page has it for itself."""
    return DiskTier(pool, window_bytes=num_blocks * BLOCK, owns_pages=lambda address: True)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Open at the end, whatever happens."""
    made = Gate()
    yield made
    made.event.set()


@pytest.fixture
def gated(gate: Gate, tmp_path: Path) -> Iterator[TransferPool]:
    """A pool on the gated disk."""
    with TransferPool(ScratchFile(tmp_path, backend=gate.backend), block_bytes=BLOCK) as pool:
        yield pool
        gate.event.set()


@pytest.mark.slow
def test_a_storage_of_whole_pages_is_written_from_where_it_lies_and_stays_until_then(
    gate: Gate, gated: TransferPool
) -> None:
    tier = tier_on(gated, 4)
    source = on_a_page(3 * BLOCK)
    wanted, alive = source.clone(), weakref.ref(source.untyped_storage())
    parked = tier.park(ByteRange.of(source), "x")
    del source
    gc.collect()
    assert (tier.staging_bytes, tier.leaving_bytes) == (0, 3 * BLOCK)
    assert alive() is not None
    gate.event.set()
    back = tier.collect(tier.load(parked, is_urgent=False))
    assert torch.equal(back, wanted)
    assert tier.leaving_bytes == 0
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("offset", "num_bytes"), [(64, 2 * BLOCK), (0, 2 * BLOCK - 100), (0, 5 * BLOCK)], ids=["off", "odd", "large"]
)
def test_what_does_not_lie_so_or_is_beyond_the_window_is_copied_and_may_change_at_once(
    offset: int, num_bytes: int, tmp_path: Path
) -> None:
    with TransferPool(ScratchFile(tmp_path), block_bytes=BLOCK) as pool:
        tier = tier_on(pool, 4)
        source = on_a_page(num_bytes, offset)
        wanted = source.clone()
        parked = tier.park(ByteRange.of(source), "x")
        source.zero_()
        assert tier.staging_bytes > 0
        assert torch.equal(tier.collect(tier.load(parked, is_urgent=True)), wanted)


def test_a_range_of_bytes_is_those_of_its_tensor_in_their_storage() -> None:
    numbers = torch.arange(1000.0)
    part = ByteRange.of(numbers[100:300])
    assert (part.address, part.num_bytes, part.is_whole) == (numbers[100:].data_ptr(), 800, False)
    assert torch.equal(part.tensor(), numbers[100:300].view(torch.uint8))
    assert part.tensor().data_ptr() == part.address
    assert ByteRange.of(numbers).is_whole


@pytest.mark.slow
def test_of_a_larger_storage_a_part_is_copied_because_all_of_it_would_stay(gate: Gate, gated: TransferPool) -> None:
    tier = tier_on(gated, 4)
    source = on_a_page(3 * BLOCK)
    alive = weakref.ref(source.untyped_storage())
    tier.park(ByteRange.of(source[BLOCK : 2 * BLOCK]), "x")
    del source
    gc.collect()
    assert (tier.staging_bytes, tier.leaving_bytes) == (BLOCK, 0)
    assert alive() is None


@pytest.mark.parametrize("owns_pages", [None, lambda address: False])
def test_pages_that_are_not_known_to_be_a_tensors_own_are_copied(
    owns_pages: Callable[[int], bool] | None, gate: Gate, gated: TransferPool
) -> None:
    tier = DiskTier(gated, window_bytes=4 * BLOCK, owns_pages=owns_pages)
    source = on_a_page(2 * BLOCK)
    wanted = source.clone()
    parked = tier.park(ByteRange.of(source), "x")
    source.zero_()
    gate.event.set()
    assert torch.equal(tier.collect(tier.load(parked, is_urgent=True)), wanted)


def test_a_source_waits_until_the_window_has_room_for_it(gate: Gate, gated: TransferPool) -> None:
    tier = tier_on(gated, 4)
    tier.park(ByteRange.of(on_a_page(3 * BLOCK)), "first")
    opener = threading.Timer(0.2, gate.event.set)
    opener.start()
    tier.park(ByteRange.of(on_a_page(2 * BLOCK)), "second")
    assert gate.event.is_set()
    opener.join()


def test_a_source_that_changes_while_it_is_written_is_an_error_for_its_reader_only(
    gate: Gate, gated: TransferPool
) -> None:
    tier = tier_on(gated, 8)
    first, second = on_a_page(2 * BLOCK), on_a_page(2 * BLOCK)
    wanted = second.clone()
    changed, kept = (
        tier.park(ByteRange.of(first), "float32[4, 4] saved in blocks.1"),
        tier.park(ByteRange.of(second), "y"),
    )
    while gate.num_waiting < 2:  # both workers have its checksums
        threading.Event().wait(0.01)
    first.add_(1)
    gate.event.set()
    load = tier.load(changed, is_urgent=False)
    assert torch.equal(tier.collect(tier.load(kept, is_urgent=True)), wanted)
    with pytest.raises(
        StoreError, match=r"^float32\[4, 4\] saved in blocks.1 came back different from .* its memory or freed"
    ):
        tier.collect(load)
    gated.check_usable()


@pytest.mark.slow
def test_bytes_on_their_way_out_never_take_more_than_the_window(gate: Gate, gated: TransferPool) -> None:
    draw, most_bytes = random.Random(1), 0
    tier = tier_on(gated, 6)

    def look() -> None:
        nonlocal most_bytes
        threading.Event().wait(0.0005)  # the disk is slower than what comes
        most_bytes = max(most_bytes, tier.leaving_bytes + tier.staging_bytes)

    gate.look = look
    gate.event.set()
    kept = []
    for _ in range(150):
        num_bytes = draw.choice((1, 2, 3, 7)) * BLOCK - draw.choice((0, 0, 4096, 10))
        source = on_a_page(num_bytes, draw.choice((0, 0, 64)))
        kept.append((tier.park(ByteRange.of(source), "x"), source.clone()))
    for parked, wanted in kept:
        assert torch.equal(tier.collect(tier.load(parked, is_urgent=True)), wanted)
    assert 4 * BLOCK < most_bytes <= 6 * BLOCK
    assert {parked.leaving is None for parked, _ in kept} == {True, False}


def test_staging_memory_makes_way_again_for_sources(gate: Gate, gated: TransferPool) -> None:
    tier = tier_on(gated, 4)
    gate.event.set()
    large = tier.park(ByteRange.of(on_a_page(8 * BLOCK)), "large")
    tier.collect(tier.load(large, is_urgent=True))
    assert tier.staging_bytes > 0
    assert tier.park(ByteRange.of(on_a_page(4 * BLOCK)), "x").leaving is not None
    assert tier.staging_bytes == 0


def test_what_is_wanted_at_once_and_has_not_left_is_copied(gate: Gate, gated: TransferPool) -> None:
    tier = tier_on(gated, 4)
    source = on_a_page(2 * BLOCK)
    parked = tier.park(ByteRange.of(source), "x")
    back = tier.collect(tier.load(parked, is_urgent=True))  # while nothing reaches the disk
    assert torch.equal(back, source)
    back.zero_()  # as a gradient may be
    ahead = tier.load(parked, is_urgent=False)
    gate.event.set()
    assert torch.equal(tier.collect(ahead), source)


def test_an_arena_gives_its_memory_back_when_no_block_is_in_use() -> None:
    arena = StagingArena(2, BLOCK)
    first, second = arena.take(), arena.take()
    memory_at(second, BLOCK)[:] = b"x" * BLOCK
    arena.give(first)
    arena.shrink()
    assert (arena.resident_bytes, bytes(memory_at(second, 1))) == (2 * BLOCK, b"x")
    arena.give(second)
    arena.shrink()
    assert (arena.resident_bytes, bytes(memory_at(second, 1))) == (0, b"\0")  # a page of the system's


def test_an_interrupted_park_leaves_the_window_as_it_was(gate: Gate, gated: TransferPool) -> None:
    tier = tier_on(gated, 4)

    def interrupted(*arguments: object, **settings: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gated, "add_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tier.park(ByteRange.of(on_a_page(3 * BLOCK)), "x")
    gate.event.set()
    gated.wait_for(lambda: tier.leaving_bytes == 0 and gated.scratch.used_bytes == 0)


def test_a_slot_is_not_reused_while_something_is_under_way_in_it(gate: Gate, gated: TransferPool) -> None:
    tier = tier_on(gated, 4)
    parked = tier.park(ByteRange.of(torch.ones(BLOCK, dtype=torch.uint8)), "x")
    tier.release(parked)
    assert gated.scratch.used_bytes == BLOCK
    gate.event.set()
    gated.wait_for(lambda: gated.scratch.used_bytes == 0)


def test_a_window_of_less_than_two_blocks_is_refused(tmp_path: Path) -> None:
    with TransferPool(ScratchFile(tmp_path), block_bytes=BLOCK) as pool:
        with pytest.raises(StoreError) as caught:
            DiskTier(pool, window_bytes=BLOCK)
        assert str(caught.value) == (
            "an offload window of 64.0 KiB is too small: it must hold at least two blocks of 64.0 KiB; raise it to "
            "128.0 KiB or more"
        )


def test_bytes_read_back_land_on_a_page_without_a_copy(tmp_path: Path) -> None:
    with TransferPool(ScratchFile(tmp_path), block_bytes=BLOCK) as pool:
        tier = DiskTier(pool, window_bytes=2 * BLOCK)
        source = torch.arange(3 * BLOCK + 5, dtype=torch.int64).to(torch.uint8)
        parked = tier.park(ByteRange.of(source), "x")
        back = tier.collect(tier.load(parked, is_urgent=True))
        assert back.data_ptr() % 4096 == 0
        assert torch.equal(back, source)
