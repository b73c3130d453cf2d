"""Bytes of CPU tensors on their way to disk and back: from where they lie, or through copies, within one window."""

import gc
import mmap
import os
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from faulty_disk import Faulty
from torch import Tensor

from memwall.errors import StoreError
from memwall.store.scratch import ScratchFile
from memwall.store.tier import DiskTier
from memwall.store.transfer import TransferPool

BLOCK = 64 << 10
pytestmark = pytest.mark.timeout(30)


def on_a_page(num_bytes: int, offset: int = 0) -> Tensor:
    """Bytes that begin at a page, or `offset` bytes after one."""
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes + 4096), dtype=torch.uint8)[offset : offset + num_bytes]
    return memory.random_(0, 256)


class Gate:
    """A disk that writes nothing before it is opened."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.backend = Faulty(self._write)

    def _write(self, count: int, fd: int, data: memoryview, offset: int) -> int:
        self.event.wait(10)
        return os.pwrite(fd, data, offset)


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


def test_whole_pages_are_written_from_where_they_lie_and_stay_until_then(gate: Gate, gated: TransferPool) -> None:
    tier = DiskTier(gated, window_bytes=4 * BLOCK)
    source = on_a_page(3 * BLOCK)
    wanted, alive = source.clone(), weakref.ref(source.untyped_storage())
    parked = tier.park(source, "x")
    del source
    gc.collect()
    assert tier.staging_bytes == 0
    assert alive() is not None
    gate.event.set()
    gated.wait_for(lambda: tier.held_bytes == 0)
    back, _ = tier.collect(tier.load(parked, is_urgent=True))
    assert torch.equal(back, wanted)
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(("offset", "num_bytes"), [(64, 2 * BLOCK), (0, 2 * BLOCK - 100), (0, 5 * BLOCK)])
def test_other_bytes_and_those_beyond_the_window_are_copied_and_may_change_at_once(
    offset: int, num_bytes: int, tmp_path: Path
) -> None:
    with TransferPool(ScratchFile(tmp_path), block_bytes=BLOCK) as pool:
        tier = DiskTier(pool, window_bytes=4 * BLOCK)
        source = on_a_page(num_bytes, offset)
        wanted = source.clone()
        parked = tier.park(source, "x")
        source.zero_()
        assert tier.staging_bytes > 0
        assert torch.equal(tier.collect(tier.load(parked, is_urgent=True))[0], wanted)


def test_bytes_that_have_not_left_are_given_back_as_they_lie(gate: Gate, gated: TransferPool) -> None:
    tier = DiskTier(gated, window_bytes=4 * BLOCK)
    source = on_a_page(2 * BLOCK)
    parked = tier.park(source, "x")
    back, seconds = tier.collect(tier.load(parked, is_urgent=True))
    assert (back.data_ptr(), seconds) == (source.data_ptr(), 0.0)
    gate.event.set()
    gated.wait_for(lambda: tier.held_bytes == 0)
    later, _ = tier.collect(tier.load(parked, is_urgent=True))  # a graph that is kept is asked again
    assert later.data_ptr() != source.data_ptr()
    assert torch.equal(later, source)


def test_a_tier_that_holds_no_sources_copies_whole_pages_too(gate: Gate, gated: TransferPool) -> None:
    tier = DiskTier(gated, window_bytes=4 * BLOCK, holds_sources=False)
    source = on_a_page(2 * BLOCK)
    wanted = source.clone()
    parked = tier.park(source, "x")
    source.zero_()
    gate.event.set()
    assert torch.equal(tier.collect(tier.load(parked, is_urgent=True))[0], wanted)


def test_a_source_waits_until_the_window_has_room_for_it(gate: Gate, gated: TransferPool) -> None:
    tier = DiskTier(gated, window_bytes=4 * BLOCK)
    tier.park(on_a_page(3 * BLOCK), "first")
    opener = threading.Timer(0.2, gate.event.set)
    opener.start()
    tier.park(on_a_page(2 * BLOCK), "second")
    assert gate.event.is_set()
    assert tier.stall_seconds > 0.1
    opener.join()


def test_memory_freed_while_it_is_written_is_an_error_not_other_bytes(gate: Gate, gated: TransferPool) -> None:
    tier = DiskTier(gated, window_bytes=4 * BLOCK)
    storage = torch.UntypedStorage(2 * BLOCK + 4096)
    skipped = -storage.data_ptr() % 4096
    source = torch.empty(0, dtype=torch.uint8).set_(storage, skipped, (2 * BLOCK,), (1,))
    parked = tier.park(source, "float32[4, 4] saved in blocks.1")
    storage.resize_(4 * BLOCK)
    for is_open in (False, True):
        if is_open:
            gate.event.set()
            gated.wait_for(lambda: tier.held_bytes == 0)
        with pytest.raises(StoreError, match=r"float32\[4, 4\] saved in blocks.1 was freed while it was written"):
            tier.collect(tier.load(parked, is_urgent=True))


def test_held_and_copied_bytes_together_never_exceed_the_window(tmp_path: Path) -> None:
    draw = random.Random(1)
    window_bytes = 6 * BLOCK
    with TransferPool(ScratchFile(tmp_path), block_bytes=BLOCK) as pool:
        tier = DiskTier(pool, window_bytes=window_bytes)
        kept = []
        for _ in range(120):
            num_bytes = draw.choice((1, 2, 3, 7)) * BLOCK - draw.choice((0, 0, 4096, 10))
            source = on_a_page(num_bytes, draw.choice((0, 0, 64)))
            wanted = source.clone()
            kept.append((tier.park(source, "x"), wanted))
            assert tier.held_bytes + tier.staging_bytes <= window_bytes
        for parked, wanted in kept:
            assert torch.equal(tier.collect(tier.load(parked, is_urgent=True))[0], wanted)
        assert tier.held_bytes == 0


def test_a_slot_is_not_reused_while_something_is_under_way_in_it(tmp_path: Path) -> None:
    gate = threading.Event()

    def wait_for_gate(count: int, fd: int, data: memoryview, offset: int) -> int:
        gate.wait(10)
        return os.pwrite(fd, data, offset)

    with TransferPool(ScratchFile(tmp_path, backend=Faulty(wait_for_gate)), block_bytes=BLOCK) as pool:
        tier = DiskTier(pool, window_bytes=4 * BLOCK)
        parked = tier.park(torch.ones(BLOCK, dtype=torch.uint8), "x")
        tier.release(parked)
        assert pool.scratch.used_bytes == BLOCK
        gate.set()
        pool.wait_for(lambda: pool.scratch.used_bytes == 0)


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
        parked = tier.park(source, "x")
        back, _ = tier.collect(tier.load(parked, is_urgent=True))
        assert back.data_ptr() % 4096 == 0
        assert torch.equal(back, source)
