"""A tensor whose memory comes and goes: its address and its bits stay."""

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from memwall.errors import OffloadIOError, StoreError
from memwall.store.backend import SystemBackend
from memwall.store.paged import PagedTensor, WriteBehind
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

KIB, MIB = 1 << 10, 1 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[TransferPool]:
    with TransferPool(ScratchFile(tmp_path), block_bytes=64 * KIB) as made:
        yield made


def filled(pool: TransferPool, num_elements: int = 100_000) -> tuple[PagedTensor, torch.Tensor]:
    numbers = torch.randn(num_elements, generator=torch.Generator().manual_seed(num_elements))
    paged = PagedTensor(pool, numbers, "numbers")
    paged.tensor.copy_(numbers)
    return paged, numbers


def resident_anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * KIB
    raise AssertionError("the system does not tell")


@pytest.mark.parametrize("is_moved", [True, False], ids=["pages moved", "bytes copied, as on an older system"])
def test_its_bits_come_back_to_the_same_address(
    is_moved: bool, pool: TransferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_moved:
        monkeypatch.setattr("memwall.store.page_map._DONTUNMAP", 1 << 12)
    paged, numbers = filled(pool)
    address, view = paged.tensor.data_ptr(), paged.tensor[1000:2000]
    for _ in range(3):
        paged.begin_write()
        paged.finish_write()
        assert paged.is_here  # wanted since it was made
        paged.let_go()
        assert not paged.is_resident
        paged.begin_read()
        assert paged.is_resident
        paged.want()
        assert paged.tensor.data_ptr() == address
        assert torch.equal(paged.tensor, numbers)
        assert torch.equal(view, numbers[1000:2000])
        paged.changed()
        numbers = numbers + 1
        paged.tensor.add_(1)


@pytest.mark.slow
def test_its_memory_goes_back_to_the_system(pool: TransferPool) -> None:
    paged, numbers = filled(pool, 8 * MIB)  # the numbers stay until the end: where malloc keeps them is not asked
    before = resident_anonymous_bytes()
    paged.begin_write()
    paged.finish_write()
    paged.let_go()
    assert before - resident_anonymous_bytes() > 31 * MIB
    assert not paged.is_resident
    del numbers


@pytest.mark.slow
@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="this system gives no huge pages"
)
def test_it_is_in_huge_pages_each_time_it_comes_back(pool: TransferPool) -> None:
    """Pages of 4 KiB would be 2,305 faults; moved between addresses that huge pages do not fit, they became that."""
    paged, _ = filled(pool, (9 * MIB + 4 * KIB) // 4)  # of a rounder size the system would align the maps itself
    paged.begin_write()
    for _ in range(3):
        paged.finish_write()
        paged.let_go()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        paged.want()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 512


@pytest.mark.parametrize("like", [torch.zeros(70, 30).t(), torch.zeros(5, 3, dtype=torch.bfloat16), torch.zeros(())])
def test_it_has_the_dtype_shape_and_strides_asked_for(like: torch.Tensor, pool: TransferPool) -> None:
    paged = PagedTensor(pool, like, "it")
    assert (paged.tensor.dtype, paged.tensor.shape, paged.tensor.stride()) == (like.dtype, like.shape, like.stride())
    assert paged.tensor.untyped_storage().nbytes() == like.numel() * like.element_size()


def test_what_was_not_written_is_not_given_up(pool: TransferPool) -> None:
    paged, numbers = filled(pool)
    paged.let_go()
    assert torch.equal(paged.tensor, numbers)
    paged.begin_write()
    paged.finish_write()
    assert not paged.is_here


def test_what_will_be_overwritten_is_not_read(pool: TransferPool) -> None:
    paged, numbers = filled(pool)
    paged.begin_write()
    paged.finish_write()
    paged.let_go()
    paged.overwrite()
    paged.tensor.copy_(-numbers)
    paged.begin_write()
    paged.finish_write()
    paged.let_go()
    assert pool.bytes_read == 0
    paged.want()
    assert torch.equal(paged.tensor, -numbers)


def test_disk_space_is_used_again_and_given_back(pool: TransferPool) -> None:
    paged, _ = filled(pool)
    for _ in range(3):
        paged.begin_write()
        paged.finish_write()
        assert pool.scratch.used_bytes == paged.num_bytes
        paged.changed()
    paged.forget()
    assert pool.scratch.used_bytes == 0


def test_writes_wait_for_one_another_within_their_window(pool: TransferPool) -> None:
    made = [filled(pool, 25_000 + number) for number in range(12)]
    writes = WriteBehind(3 * 100 * KIB)
    for number, (paged, _) in enumerate(made):
        writes.put_away(paged)
        assert sum(other.num_bytes for other, _ in made[: number + 1] if other.is_here) <= 3 * 100 * KIB
    writes.drain()
    assert not any(paged.is_here for paged, _ in made)
    for paged, numbers in made:
        paged.want()
        assert torch.equal(paged.tensor, numbers)
        writes.put_away(paged)
    assert pool.bytes_written == sum(paged.num_bytes for paged, _ in made)  # what is on disk is not written again


def test_what_is_wanted_again_while_it_is_written_stays(pool: TransferPool) -> None:
    paged, numbers = filled(pool)
    writes = WriteBehind(MIB)
    writes.put_away(paged)
    paged.want()
    writes.drain()
    assert paged.is_here
    assert torch.equal(paged.tensor, numbers)
    assert pool.bytes_read == 0


@pytest.mark.parametrize("num_elements", [5000, MIB], ids=["small pages", "huge pages"])
@pytest.mark.parametrize("use", [torch.sum, lambda tensor: tensor[-1:].zero_()], ids=["read", "written"])
def test_use_while_it_is_away_is_an_error(
    use: Callable[[torch.Tensor], object], num_elements: int, pool: TransferPool
) -> None:
    made = [filled(pool, num_elements)[0] for _ in range(6)]
    for paged in made:
        paged.begin_write()
        paged.finish_write()
        paged.let_go()
    use(made[2].tensor)
    for number, paged in enumerate(made):
        if number == 2:
            with pytest.raises(StoreError, match="numbers was read or written while it was on disk"):
                paged.want()
        else:
            paged.want()
            paged.let_go()


class Failing(SystemBackend):
    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        raise OSError(5, "as it happens")


def test_a_failed_write_is_an_error_and_the_numbers_stay(tmp_path: Path) -> None:
    backend = SystemBackend()
    with TransferPool(ScratchFile(tmp_path, backend=backend)) as pool:
        paged, numbers = filled(pool)
        pool.scratch._backend = Failing()
        writes = WriteBehind(MIB)
        writes.put_away(paged)
        with pytest.raises(OffloadIOError, match="writing numbers"):
            writes.drain()
        assert torch.equal(paged.tensor, numbers)


# Shown by way of the system's cache.


def away(pool: TransferPool, num_elements: int = 1 << 20) -> tuple[PagedTensor, torch.Tensor]:
    paged, numbers = filled(pool, num_elements)
    paged.begin_write()
    paged.finish_write()
    paged.let_go()
    return paged, numbers


def test_what_is_shown_reads_as_if_it_were_here_and_takes_no_memory_of_the_process(pool: TransferPool) -> None:
    paged, numbers = away(pool)
    before = resident_anonymous_bytes()
    assert paged.show()
    assert torch.equal(paged.tensor, numbers)
    assert not paged.is_here
    assert not paged.is_resident
    assert paged.is_stored
    assert paged.shown_bytes == paged.num_bytes
    assert resident_anonymous_bytes() - before < MIB
    paged.let_go()
    assert paged.shown_bytes == 0
    paged.want()  # nothing lies in its memory that nobody knows of
    assert torch.equal(paged.tensor, numbers)
    assert not paged.show()  # it is here


def test_what_is_written_to_it_while_it_is_shown_is_kept(pool: TransferPool) -> None:
    paged, numbers = away(pool)
    held = paged.tensor[1000:2000]
    for value in (1.0, 2.0):
        assert paged.show()
        held.fill_(value)
        assert not paged.is_stored
        writes = WriteBehind(MIB)
        writes.put_away(paged)
        writes.drain()
        assert not paged.is_resident
        paged.want()
        numbers[1000:2000] = value
        assert torch.equal(paged.tensor, numbers)
        paged.let_go()


def test_who_wants_what_is_shown_gets_it_with_what_was_written(pool: TransferPool) -> None:
    paged, numbers = away(pool)
    address = paged.tensor.data_ptr()
    assert paged.show()
    paged.tensor[0] = 7.0
    paged.begin_read()
    paged.want()
    numbers[0] = 7.0
    assert paged.is_here
    assert not paged.is_stored
    assert paged.tensor.data_ptr() == address
    assert torch.equal(paged.tensor, numbers)
    paged.stay()
    assert torch.equal(paged.tensor, numbers)


def test_what_was_touched_while_it_was_away_is_not_covered_up_by_being_shown(pool: TransferPool) -> None:
    paged, _ = filled(pool)
    paged.begin_write()
    paged.finish_write()
    paged.let_go()
    paged.tensor[0] = 7.0  # as somebody who shares its memory
    with pytest.raises(StoreError, match="was read or written while it was on disk"):
        paged.show()


@pytest.mark.parametrize("is_moved", [True, False], ids=["pages moved", "bytes copied, as on an older system"])
def test_what_was_shown_comes_and_goes_as_ever(
    is_moved: bool, pool: TransferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_moved:
        monkeypatch.setattr("memwall.store.page_map._DONTUNMAP", 1 << 12)
    paged, numbers = filled(pool)
    writes = WriteBehind(0)
    for _ in range(2):
        writes.put_away(paged)
        writes.drain()
        assert paged.show()
        paged.want()
        assert not paged.is_stored  # whoever was shown it may write there yet
        assert torch.equal(paged.tensor, numbers)


def test_wrong_bytes_are_found_before_they_are_shown(pool: TransferPool) -> None:
    paged, _ = away(pool)
    assert paged.slot is not None
    paged.slot.checksums[0] ^= 1
    with pytest.raises(StoreError, match="checksum"):
        paged.show()


def test_a_system_without_such_maps_shows_nothing(pool: TransferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memwall.store.page_map._PAGEMAP", Path("/nowhere"))
    paged, numbers = away(pool)
    assert not paged.show()
    assert not paged.is_resident
    paged.want()
    assert torch.equal(paged.tensor, numbers)
