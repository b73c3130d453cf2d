"""Pinned memory is asked of the driver once, for every device; slots of a size are lent again without a search."""

import logging
from types import SimpleNamespace

import pytest
import torch

from memwall.store.extents import FreeExtents
from memwall.store.pinned_arena import NoPinnedRoomError, PinnedArena

KIB = 1 << 10
MIB = 1 << 20


class Driver(SimpleNamespace):
    """Notes what a CUDA runtime was asked."""

    def __init__(self) -> None:
        super().__init__(registered=[], flags=set(), status=0)

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.registered.append(num_bytes)
        self.flags.add(flags)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return int(self.status)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


def test_memory_is_pinned_for_every_device_and_can_be_written(driver: Driver) -> None:
    arena = PinnedArena(None, chunk_bytes=MIB)
    slot = arena.allocate(100 * KIB)
    slot.memory.fill_(7)
    assert driver.flags == {1}  # cudaHostRegisterPortable
    assert driver.registered == [MIB]
    arena.close()


def test_what_a_step_lends_again_is_found_without_a_search(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = PinnedArena(None, chunk_bytes=MIB)
    sizes = [10 * KIB + number for number in range(30)]
    slots = [arena.allocate(size) for size in sizes]
    for slot in slots:
        arena.free(slot)
    monkeypatch.setattr(FreeExtents, "take", None)
    again = [arena.allocate(size) for size in sizes]
    assert {slot.offset for slot in again} == {slot.offset for slot in slots}
    assert [slot.memory.numel() for slot in again] == sizes


def test_free_slots_of_other_sizes_make_room_before_more_is_pinned(driver: Driver) -> None:
    arena = PinnedArena(MIB, chunk_bytes=MIB)
    for slot in [arena.allocate(256 * KIB) for _ in range(4)]:
        arena.free(slot)
    arena.allocate(MIB)
    assert driver.registered == [MIB]
    with pytest.raises(NoPinnedRoomError, match="raise --host"):
        arena.allocate(1)


def test_a_map_that_cannot_be_unpinned_is_told(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    arena = PinnedArena(None, chunk_bytes=MIB)
    arena.free(arena.allocate(KIB))
    driver.status = 713
    with caplog.at_level(logging.WARNING):
        arena.trim()
    assert "did not unpin 1.0 MiB of host memory (error 713)" in caplog.text
    assert arena.pinned_bytes == 0
