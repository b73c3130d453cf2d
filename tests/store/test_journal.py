"""A checkpoint directory on a real file system: what is found again, and what damage to it is called."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from journals import PAGE, commit_steps, found_step, get, put, refusal

from memwall.errors import OffloadIOError, StoreError
from memwall.store.backend import SystemBackend
from memwall.store.commit_format import FORMAT_VERSION, Superblock, digest_of, encode_superblock
from memwall.store.data_file import DataFile
from memwall.store.journal import Journal, recorded_steps
from memwall.store.scratch import Slot


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_the_last_committed_step_is_found(store: Path) -> None:
    assert found_step(store) == 3


def test_an_empty_directory_is_made_and_holds_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path / "a" / "b") as journal:
        assert journal.last is None
    with Journal(tmp_path / "a" / "b") as journal:
        journal.begin(b"0123456789abcdef")
        put(journal, 7)  # not committed
    with Journal(tmp_path / "a" / "b") as journal:
        assert journal.last is None


def test_the_file_grows_to_two_extents_per_changing_bucket_and_no_further(tmp_path: Path) -> None:
    commit_steps(tmp_path, 1, 2, 3)
    size = (tmp_path / "memwall.data").stat().st_size
    commit_steps(tmp_path, *range(4, 30))
    assert (tmp_path / "memwall.data").stat().st_size == size
    assert size == (3 + 3 + 3 + 2) * PAGE  # two extents, the bucket that stays, two tables of contents


def test_no_write_touches_the_committed_extents(tmp_path: Path) -> None:
    data = DataFile(os.fspath(tmp_path / "data"))
    first = data.allocate(2 * PAGE)
    data.publish([first])
    second = data.successor(first, 2 * PAGE)
    assert second.offset != first.offset
    assert data.successor(second, 2 * PAGE) is second  # not committed: written over
    data.publish([second])
    assert data.successor(second, 2 * PAGE).offset == first.offset
    data.close()


@pytest.mark.parametrize(
    "offset", [8192, 8192 + 8, 8192 + 12, 8192 + 16, 8192 + 32, 8192 + 40, 8192 + 48, 8192 + 56, 8192 + 64, 8192 + 100]
)
def test_any_damage_to_the_newest_record_falls_back_to_the_step_before_and_says_so(
    store: Path, offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    flip(store / "memwall.commit", offset)
    assert found_step(store) == 2
    path = store / "memwall.commit"
    assert f"the commit record at byte 8192 of {path} is damaged; continuing from step 2, which is whole" in caplog.text


def extents(directory: Path) -> dict[str, Slot]:
    with Journal(directory) as journal:
        assert journal.last is not None
        changing, kept = (stored.slot for stored in journal.last.buckets)
        return {"bucket 0": changing, "bucket 1": kept, "the table of contents": journal.last.meta}


def test_damage_to_the_newest_data_falls_back_to_the_step_before(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("bucket 0", "the table of contents"):
        offset = extents(store)[name].offset
        flip(store / "memwall.data", offset + 100)
        assert found_step(store) == 2
        assert f"step 3: {name} in {store / 'memwall.data'} is damaged" in caplog.text
        flip(store / "memwall.data", offset + 100)
        assert found_step(store) == 3


def test_damage_that_both_steps_share_is_an_error_that_names_file_bucket_and_byte(store: Path) -> None:
    path, offset = store / "memwall.data", extents(store)["bucket 1"].offset
    flip(path, offset + 2 * PAGE + 17)
    problem = (
        f"bucket 1 in {path} is damaged: the checksum of 4.0 KiB at byte {offset + 2 * PAGE} does not match what was "
        "written"
    )
    assert refusal(store) == (
        f"no step can be recovered from {store}: step 3: {problem}; step 2: {problem}; restore its files from a copy, "
        "or begin anew with another --checkpoint DIR"
    )


@pytest.mark.parametrize("offset", [0, 8, 12, 16, 32, 48, 79])
def test_a_damaged_superblock_is_an_error(store: Path, offset: int) -> None:
    flip(store / "memwall.commit", offset)
    path = store / "memwall.commit"
    assert refusal(store) == (
        f"{path} is damaged: its first block is not what memwall wrote; restore it from a copy, or begin anew with "
        "another --checkpoint DIR"
    )


@pytest.mark.parametrize("num_bytes", [0, 100, 4096, 8192, 12287])
def test_a_commit_file_cut_short_is_an_error(store: Path, num_bytes: int) -> None:
    os.truncate(store / "memwall.commit", num_bytes)
    assert refusal(store) == (
        f"{store / 'memwall.commit'} was cut short: it has {num_bytes} of 12288 bytes; restore it from a copy, or "
        "begin anew with another --checkpoint DIR"
    )


def test_a_data_file_cut_short_ends_in_a_whole_step_or_an_error_never_in_a_mixture(store: Path) -> None:
    path = store / "memwall.data"
    whole = path.read_bytes()
    found, problem = set(), ""
    for num_bytes in range(0, len(whole), PAGE // 2):
        path.write_bytes(whole[:num_bytes])
        try:
            found.add(found_step(store))
        except StoreError as error:
            problem = str(error)
            found.add(0)
    assert found <= {0, 2, 3}
    assert f"in {path}" in problem or f"{path} was cut short" in problem


def test_a_newer_format_is_named(store: Path) -> None:
    block = bytearray(encode_superblock(Superblock(run_id=bytes(16), fingerprint=bytes(16), block_bytes=PAGE)))
    fields = block[:48]
    fields[8] = FORMAT_VERSION + 1
    path = store / "memwall.commit"
    with path.open("r+b") as file:
        file.write(bytes(fields) + digest_of(bytes(fields)))
    assert refusal(store) == (
        f"{path} has checkpoint format {FORMAT_VERSION + 1}, and this memwall reads format {FORMAT_VERSION}: resume "
        "with the memwall that wrote it, or a newer one"
    )


def test_records_of_another_run_are_not_taken_for_this_ones(store: Path, tmp_path: Path) -> None:
    commit_steps(tmp_path / "other", *range(1, 8))
    other = (tmp_path / "other" / "memwall.commit").read_bytes()
    with (store / "memwall.commit").open("r+b") as file:
        file.seek(2 * PAGE)
        file.write(other[2 * PAGE :])
    assert found_step(store) == 2


class Unreadable(SystemBackend):
    """Has lost ranges of bytes of files: reads of them fail with EIO."""

    def __init__(self, *lost: tuple[Path, int]) -> None:
        self.lost = lost

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if any(path == file and offset <= at < offset + len(buffer) for file, at in self.lost):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().pread(fd, buffer, offset)


@pytest.mark.parametrize(("offset", "step"), [(PAGE, 3), (2 * PAGE, 2)])
def test_a_record_that_the_disk_has_lost_takes_the_other_one_not_with_it(
    store: Path, offset: int, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = store / "memwall.commit"
    with Journal(store, backend=Unreadable((path, offset))) as journal:
        assert journal.last is not None
        assert journal.last.step == step
    assert f"reading a commit record in {path} failed at byte {offset}" in caplog.text
    assert f"continuing from step {step}, which is whole" in caplog.text


def test_a_first_page_that_the_disk_has_lost_keeps_no_step_elsewhere_from_being_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(tmp_path, block_bytes=PAGE) as journal:
        journal.begin(b"0123456789abcdef")
        for step in (1, 2):  # step 1 begins at byte 0
            journal.commit(step, [put(journal, step)], b"")
    real = os.preadv

    def fails(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == 0 and os.readlink(f"/proc/self/fd/{fd}").endswith("memwall.data"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails)
    with Journal(tmp_path) as journal:
        assert journal.last is not None
        assert journal.last.step == 2
        assert get(journal, journal.last.buckets[0]) == {2}


def test_a_disk_that_has_lost_every_step_is_no_bad_input(store: Path) -> None:
    commit, data = store / "memwall.commit", store / "memwall.data"
    shared = extents(store)["bucket 1"].offset
    for lost in (
        [(commit, 0)],
        [(commit, PAGE), (commit, 2 * PAGE)],
        [(data, shared)],
        [(commit, PAGE), (data, shared)],
    ):
        with pytest.raises(OffloadIOError) as caught:
            Journal(store, backend=Unreadable(*lost))
        assert (caught.value.exit_status, caught.value.errno) == (6, errno.EIO)
        assert "Input/output error" in str(caught.value)
    assert found_step(store) == 3


def test_records_that_cannot_be_read_are_not_taken_for_none(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recorded_steps(os.fspath(store)) == (3, 2)
    assert recorded_steps(os.fspath(store / "nowhere")) == ()

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("builtins.open", fails)
    with pytest.raises(OffloadIOError, match="cannot be read: Input/output error"):
        recorded_steps(os.fspath(store))


class Failing(SystemBackend):
    """Writes, or syncs, fail once `num_calls` of them have succeeded."""

    def __init__(self, method: str, num_calls: int, number: int) -> None:
        self.method, self.num_calls, self.number = method, num_calls, number

    def _count(self, method: str) -> None:
        if method == self.method:
            self.num_calls -= 1
            if self.num_calls < 0:
                raise OSError(self.number, os.strerror(self.number))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._count("pwrite")
        return super().pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._count("sync")
        super().sync(fd)

    def reserve(self, fd: int, offset: int, num_bytes: int) -> None:
        self._count("reserve")
        super().reserve(fd, offset, num_bytes)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("method", ["pwrite", "sync", "reserve"])
def test_a_failure_at_any_call_is_typed_names_the_file_and_leaves_the_last_step(
    tmp_path: Path, method: str, number: int
) -> None:
    outcomes = set()
    for num_calls in range(24):
        store = tmp_path / str(num_calls)
        commit_steps(store, 1)
        problem = attempt(store, Failing(method, num_calls, number))
        assert problem is None or str(store) in problem
        assert problem is None or os.strerror(number) in problem or "are free" in problem
        step = found_step(store)
        assert step == 3 or problem is not None
        outcomes.add(step)
    assert {1, 3} <= outcomes <= {1, 2, 3}


def attempt(store: Path, backend: SystemBackend) -> str | None:
    """The error that two more steps end with."""
    try:
        commit_steps(store, 2, 3, backend=backend)
    except StoreError as error:
        return str(error)
    return None


def test_after_a_failed_sync_nothing_more_is_committed(tmp_path: Path) -> None:
    backend = Failing("sync", 1, errno.EIO)
    with Journal(tmp_path, backend=backend) as journal:
        journal.begin(b"0123456789abcdef")
        with pytest.raises(OffloadIOError) as caught:
            journal.commit(1, [put(journal, 1)], b"")
        assert caught.value.errno == errno.EIO
        backend.num_calls = 100
        with pytest.raises(StoreError, match=r"syncing the checkpoint's file .*memwall.data failed"):
            journal.commit(2, [put(journal, 2)], b"")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    image.write_bytes(bytes(8 << 20))
    mount.mkdir()

    def call(*command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no file system can be made and mounted here: {' '.join(command)}: {done.stderr.strip()}")

    try:
        call("mkfs.ext4", "-q", "-O", "^has_journal", os.fspath(image))
        call("mount", "-o", "loop", os.fspath(image), os.fspath(mount))
    except FileNotFoundError as error:
        pytest.skip(f"no file system can be made and mounted here: {error}")
    yield mount
    subprocess.run(["umount", os.fspath(mount)], check=True)


def test_a_disk_that_is_really_full_is_named_and_the_last_step_stays(small_disk: Path) -> None:
    store = small_disk / "run"
    commit_steps(store, 1)
    fill_up(small_disk / "filler")
    with pytest.raises(StoreError) as caught:
        commit_steps(store, 2)
    assert str(caught.value).startswith(f"12.0 KiB more of disk are needed in {store / 'memwall.data'}, but ")
    assert "give another directory with --checkpoint DIR" in str(caught.value)
    assert found_step(store) == 1
    (small_disk / "filler").unlink()
    commit_steps(store, 2)
    assert found_step(store) == 2


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 512):
            write_until_full(lambda size=size: file.write(bytes(size)))
        os.fsync(file.fileno())


def write_until_full(write: Callable[[], object]) -> None:
    while True:
        try:
            write()
        except OSError:
            return
