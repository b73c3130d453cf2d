"""Rows by id, more than memory holds: what was written comes back, or an error says why not."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memwall.errors import OffloadIOError, StoreError, UsageError
from memwall.rows.index import RowIndex
from memwall.rows.initial import InitialRows
from memwall.rows.store import RowColumns, RowLayout, RowStore
from memwall.store.backend import SystemBackend

LAYOUT = RowLayout(
    num_weights=6,
    dtype="float32",
    state=(RowColumns(name="mean", width=6), RowColumns(name="sum", width=1, initial=0.5)),
)
INITIAL = InitialRows(kind="normal", scale=0.1, seed=3)
# Rows that were never trained are in no file, so no version may make them differently.
PINNED = [
    [0.10892429202795029, 0.007252502720803022, -0.10826902836561203],
    [-0.050641633570194244, -0.20754089951515198, -0.03771800920367241],
]
pytestmark = pytest.mark.usefixtures("one_thread")


def open_store(folder: Path, backend: SystemBackend | None = None, capacity_bytes: int | None = None) -> RowStore:
    """16 pages of 78 rows each."""
    return RowStore(
        LAYOUT,
        INITIAL,
        directory=folder,
        cache_bytes=16 * 4096,
        page_bytes=4096,
        backend=backend,
        capacity_bytes=capacity_bytes,
    )


def ids_and_records(step: int, count: int = 300, num_ids: int = 20_000) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(num_ids, (count,), generator=generator).unique()
    ids = ids[torch.randperm(ids.numel(), generator=generator)]
    return ids, torch.randn(ids.numel(), LAYOUT.num_elements, generator=generator)


def fill(store: RowStore, num_steps: int = 20) -> dict[int, Tensor]:
    written: dict[int, Tensor] = {}
    for step in range(num_steps):
        ids, records = ids_and_records(step)
        store.write(ids, records)
        written.update(zip(ids.tolist(), records, strict=True))
    return written


@pytest.mark.slow
def test_what_was_written_comes_back_from_twenty_times_the_cache(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        written: dict[int, Tensor] = {}
        for step in range(50):
            ids, records = ids_and_records(step)
            if step % 3 == 0:
                store.prefetch(ids)
            found = store.records(ids)
            for number, row in zip(ids.tolist(), found, strict=True):
                assert number not in written or torch.equal(row, written[number])
            store.write(ids, records)
            written.update(zip(ids.tolist(), records, strict=True))
            if step % 3 == 1:
                store.prefetch(ids_and_records(step + 1)[0])
        everything = {i: row for ids, rows in store.every_record() for i, row in zip(ids.tolist(), rows, strict=True)}
        assert everything.keys() == written.keys()
        assert all(torch.equal(everything[number], row) for number, row in written.items())
        assert store.num_rows == len(written) > 10_000
        assert store.bytes_read > 20 * 16 * 4096
        assert store.memory_bytes < 16 * 4096 + 24 * len(written) + 20_000
        assert store.disk_bytes <= 1.1 * len(written) * LAYOUT.row_bytes + (16 << 20)


def test_rows_that_were_never_written_are_their_initial_values_and_leave_no_trace(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        fill(store, 1)
        before = (store.num_rows, store.memory_bytes, store.disk_bytes)
        ids = torch.arange(30_000, 31_000)
        found = store.records(ids)
        assert torch.equal(found[:, :6], INITIAL.rows(ids, 6, torch.float32))
        assert torch.equal(found[:, 6:], torch.tensor([0.0] * 6 + [0.5]).expand(1000, 7))
        assert torch.equal(store.weights(ids), found[:, :6])
        assert (store.num_rows, store.memory_bytes, store.disk_bytes) == before


def test_nothing_is_on_disk_while_memory_has_room(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.write(torch.arange(78 * 15), torch.zeros(78 * 15, 13))
        assert (store.disk_bytes, store.bytes_written) == (0, 0)
        store.write(torch.arange(1 << 40, (1 << 40) + 100), torch.ones(100, 13))
        assert store.bytes_written == 2 * 4096  # one page made room, and one is on its way for the next row
        assert store.disk_bytes == 16 << 20


def test_frames_that_were_emptied_for_new_rows_are_not_taken_by_what_is_read_ahead(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.write(torch.arange(78 * 40), torch.ones(78 * 40, 13))
        emptied = store._pages._spare.tolist()
        before = store.bytes_read
        store.prefetch(torch.arange(78))
        assert store.bytes_read == before + 4096
        assert store._pages._spare.tolist() == emptied != []


@pytest.mark.parametrize("page", range(10, 14))
def test_rows_that_are_read_ahead_stay_though_they_were_here_before(page: int, tmp_path: Path) -> None:
    """GIVEN a page that is among the next to leave WHEN its rows are read ahead THEN others leave in its place."""
    with open_store(tmp_path) as store:
        ids = torch.arange(78 * 24)
        store.write(ids, torch.ones(ids.numel(), 13))
        pages = ids.split(78)
        store.prefetch(pages[page])
        for number in range(6):
            store.weights(pages[number])
        before = store.bytes_read
        store.weights(pages[page])
        assert store.bytes_read == before == 6 * 4096


def test_initial_rows_of_a_lookup_are_counted_and_kept_no_longer_than_to_the_step(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        few, many = torch.arange(100), torch.arange(100, 5000)
        before = store.memory_bytes
        records = store.records(few)
        assert store.memory_bytes == before + few.nbytes + 4 * 6 * 100
        store.write(few[:1], records[:1])
        assert store._begun is None
        store.weights(many)  # more than a sixteenth of the cache
        assert store._begun is None


def test_initial_rows_that_are_looked_up_and_then_stepped_are_made_once(tmp_path: Path) -> None:
    class Counting(InitialRows, frozen=True):
        def rows(self, ids: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
            made.append(ids.tolist())
            return super().rows(ids, num_columns, dtype)

    made: list[list[int]] = []
    begin = Counting(kind="normal", scale=0.1, seed=3)
    with RowStore(LAYOUT, begin, directory=tmp_path, cache_bytes=16 * 4096, page_bytes=4096) as store:
        ids = torch.tensor([3, 9, 4])
        store.weights(ids).zero_()  # the caller's own
        assert torch.equal(store.records(ids)[:, :6], INITIAL.rows(ids, 6, torch.float32))
        store.weights(ids + 1)
    assert made == [[3, 9, 4], [4, 10, 5]]


@pytest.mark.slow
def test_unchanged_pages_are_not_written_again(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        written = fill(store, 8)
        for _ in range(2):
            for ids in torch.tensor(sorted(written)).split(500):
                store.weights(ids)
            before = store.bytes_written
        for ids in torch.tensor(sorted(written)).split(500):
            store.weights(ids)
        assert store.bytes_written == before


@given(st.lists(st.lists(st.integers(0, 2**62), max_size=40, unique=True), max_size=30))
@settings(max_examples=40)
def test_an_index_gives_positions_in_order_of_arrival(batches: list[list[int]]) -> None:
    index, expected = RowIndex(), dict[int, int]()
    for batch in batches:
        ids = torch.tensor(batch, dtype=torch.int64)
        assert index.find(ids).tolist() == [expected.get(number, -1) for number in batch]
        new = [number for number in batch if number not in expected]
        assert index.add(torch.tensor(new, dtype=torch.int64)).tolist() == list(
            range(len(expected), len(expected) + len(new))
        )
        expected.update((number, len(expected)) for number in new)
    assert index.ids(0, len(expected)).tolist() == list(expected)


def test_an_index_of_many_rows_stays_small_and_right() -> None:
    index = RowIndex()
    ids = torch.randperm(300_000) * 16 + 3  # as the ids of one rank of sixteen are
    for batch in ids.split(7000):
        index.add(batch)
    assert torch.equal(index.find(ids), torch.arange(300_000))
    assert (index.find(ids + 1) == -1).all()
    assert index.num_bytes <= 23 * 300_000


def test_initial_rows_depend_on_seed_and_id_alone() -> None:
    ids = torch.randint(1 << 50, (999,))
    whole = INITIAL.rows(ids, 7, torch.float32)
    for order in (torch.randperm(999), torch.arange(500, 503), torch.tensor([998])):
        assert torch.equal(INITIAL.rows(ids[order], 7, torch.float32), whole[order])
    other = InitialRows(kind="normal", scale=0.1, seed=4).rows(ids, 7, torch.float32)
    assert not (other == whole).all(dim=1).any()
    assert INITIAL.rows(torch.tensor([0, 10**12]), 3, torch.float32).tolist() == PINNED


@pytest.mark.parametrize(("kind", "deviation", "highest"), [("normal", 2.0, 8.65), ("uniform", 2 / 3**0.5, 2.0)])
def test_initial_rows_have_their_distribution(kind: str, deviation: float, highest: float) -> None:
    initial = InitialRows(kind=kind, scale=2.0, seed=1, zero_id=5)  # type: ignore[arg-type]
    rows = initial.rows(torch.arange(20_000), 24, torch.float32)
    assert not rows[5].any()
    assert abs(float(rows.mean())) < 0.01
    assert abs(float(rows.std()) / deviation - 1) < 0.005
    assert float(rows.abs().max()) <= highest
    assert float(torch.corrcoef(rows.T).fill_diagonal_(0).abs().max()) < 0.04
    assert torch.equal(initial.rows(torch.arange(9), 24, torch.bfloat16), rows[:9].bfloat16())


class Faulty(SystemBackend):
    """Fails, or lies, from some transfer on."""

    def __init__(self, *, read: Callable[[memoryview, int], int] | None = None, room_bytes: int = 1 << 60) -> None:
        self.read, self.room_bytes = read, room_bytes

    def reserve(self, fd: int, offset: int, num_bytes: int) -> None:
        if offset + num_bytes > self.room_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().reserve(fd, offset, num_bytes)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        count = super().pread(fd, buffer, offset)
        return count if self.read is None else self.read(buffer, count)


def flip(buffer: memoryview, count: int) -> int:
    buffer[100] ^= 1
    return count


def fail(buffer: memoryview, count: int) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(
    ("read", "words"), [(flip, "came back different"), (fail, "Input/output error"), (lambda *_: 0, "stopped making")]
)
def test_a_row_that_cannot_be_had_is_an_error_and_stays_one(
    tmp_path: Path, read: Callable[[memoryview, int], int], words: str
) -> None:
    with open_store(tmp_path, Faulty(read=read)) as store:
        store.write(torch.arange(3000), torch.zeros(3000, 13))
        with pytest.raises(OffloadIOError, match=words):
            store.records(torch.arange(3000))
        with pytest.raises(StoreError, match=f"can no longer be used: .*{words}"):
            store.records(torch.tensor([5]))


def test_work_that_was_broken_off_is_not_taken_for_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with open_store(tmp_path) as store:
        fill(store, 2)
        with monkeypatch.context() as patched:
            patched.setattr(store._pages, "write", interrupt)
            with pytest.raises(KeyboardInterrupt):
                store.write(torch.tensor([1 << 40]), torch.ones(1, 13))
        with pytest.raises(StoreError, match="can no longer be used: KeyboardInterrupt"):
            store.records(torch.tensor([1 << 40]))


@pytest.mark.slow
def test_short_transfers_are_completed(tmp_path: Path) -> None:
    class Short(SystemBackend):
        def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
            return super().pread(fd, buffer[:512], offset)

        def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
            return super().pwrite(fd, data[:1024], offset)

    with open_store(tmp_path, Short()) as store:
        for number, row in fill(store, 6).items():
            assert torch.equal(store.records(torch.tensor([number]))[0], row)


@pytest.mark.parametrize("is_limit", [True, False])
def test_a_full_disk_is_named(tmp_path: Path, is_limit: bool) -> None:
    backend = Faulty(room_bytes=0)
    store = open_store(tmp_path, None, 1 << 20) if is_limit else open_store(tmp_path, backend)
    with store, pytest.raises(StoreError, match="more of disk are needed in"):
        fill(store)


def test_a_forked_process_cannot_use_it(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.write(torch.arange(10), torch.ones(10, 13))
        child = os.fork()
        if not child:
            try:
                store.weights(torch.tensor([50_000]))
            except StoreError as error:
                os._exit(7 if "forked" in str(error) else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert store.records(torch.arange(10)).sum() == 130


def test_a_closed_store_says_so_and_a_forgotten_one_frees_its_file(tmp_path: Path) -> None:
    def num_files() -> int:
        return sum(str(tmp_path) in os.readlink(f"/proc/self/fd/{fd}") for fd in _open_files())

    store = open_store(tmp_path)
    fill(store, 5)
    assert num_files() == 1
    store.close()
    store.close()
    with pytest.raises(StoreError, match="it has been closed"):
        store.weights(torch.tensor([1]))
    store = open_store(tmp_path)
    fill(store, 5)
    del store
    assert num_files() == 0


def _open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        if os.path.islink(f"/proc/self/fd/{name}"):
            found.append(name)
    return found


def test_a_cache_that_is_too_small_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        RowStore(LAYOUT, INITIAL, directory=tmp_path, cache_bytes=5 * 4096, page_bytes=4096)
    assert str(caught.value) == (
        "a cache of 20.0 KiB holds 5 pages of 4.0 KiB, and 16 are needed; give it at least 64.0 KiB"
    )


def test_a_dtype_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="'int7' is not a floating-point dtype of torch"):
        _ = RowLayout(num_weights=1, dtype="int7").torch_dtype
