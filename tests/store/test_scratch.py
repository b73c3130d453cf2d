"""Disk slots: reserved before they are handed out, reused, refused in time, and gone when the process is."""

import errno
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwall.errors import OffloadIOError, StoreError
from memwall.store.backend import OpenScratch, SystemBackend, round_up
from memwall.store.extents import FreeExtents
from memwall.store.scratch import ScratchFile

KIB = 1 << 10


def pages(num_bytes: int, fill: int = 0) -> memoryview:
    """Page-aligned memory, as O_DIRECT wants it."""
    memory = mmap.mmap(-1, round_up(num_bytes))
    memory.write(bytes([fill]) * num_bytes)
    return memoryview(memory)[:num_bytes]


class Full(SystemBackend):
    """A disk with `room_bytes` left, on which a failed reservation changes nothing."""

    def __init__(self, room_bytes: int, number: int = errno.ENOSPC) -> None:
        self.room_bytes = room_bytes
        self.number = number

    def reserve(self, fd: int, offset: int, num_bytes: int) -> None:
        if offset + num_bytes > self.room_bytes:
            raise OSError(self.number, os.strerror(self.number))
        super().reserve(fd, offset, num_bytes)

    def free_bytes(self, directory: str) -> int:
        return self.room_bytes


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_extents_never_overlap_and_merge_back_into_one(steps: list[tuple[bool, int]]) -> None:
    free = FreeExtents()
    free.give(0, 64)
    held: list[tuple[int, int]] = []
    for is_take, size in steps:
        if is_take and (offset := free.take(size)) is not None:
            assert all(offset + size <= other or other + length <= offset for other, length in held)
            held.append((offset, size))
        elif not is_take and held:
            free.give(*held.pop(size % len(held)))
        assert free.total_bytes == 64 - sum(length for _, length in held)
    for extent in held:
        free.give(*extent)
    assert free.largest_bytes == 64


def test_freeing_twice_is_an_error() -> None:
    free = FreeExtents()
    free.give(4, 4)
    with pytest.raises(ValueError, match="free already"):
        free.give(6, 1)


def test_a_slot_holds_what_was_written(tmp_path: Path) -> None:
    with ScratchFile(tmp_path) as scratch:
        first, second = scratch.allocate(5000), scratch.allocate(1)
        assert (first.num_bytes, second.num_bytes, scratch.used_bytes) == (8192, 4096, 12288)
        scratch.write(first, 0, pages(8192, 7), "a")
        scratch.write(second, 0, pages(4096, 9), "b")
        back = pages(8192)
        scratch.read(first, 0, back, "a")
        assert bytes(back) == b"\x07" * 8192


def test_freed_space_is_used_again_before_the_file_grows(tmp_path: Path) -> None:
    with ScratchFile(tmp_path, step_bytes=64 * KIB) as scratch:
        for _ in range(50):
            slots = [scratch.allocate(12 * KIB) for _ in range(5)]
            for slot in slots[::2] + slots[1::2]:
                scratch.free(slot)
        assert scratch.used_bytes == 0
        assert scratch.reserved_bytes == 64 * KIB


def test_growth_is_reserved_not_sparse(tmp_path: Path) -> None:
    with ScratchFile(tmp_path) as scratch:
        scratch.reserve(1 << 20)
        found = os.fstat(scratch._fd)
        assert scratch.reserved_bytes == 1 << 20
        assert found.st_blocks * 512 >= 1 << 20


def test_a_filesystem_that_cannot_reserve_gets_zeros_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with ScratchFile(tmp_path) as scratch:
        scratch.reserve(3 << 20)
        assert os.fstat(scratch._fd).st_blocks * 512 >= 3 << 20


def test_the_limit_is_kept_and_named(tmp_path: Path) -> None:
    with ScratchFile(tmp_path, capacity_bytes=64 * KIB) as scratch:
        scratch.allocate(60 * KIB)
        with pytest.raises(StoreError) as caught:
            scratch.allocate(8 * KIB)
        assert str(caught.value) == (
            f"4.0 KiB more of disk are needed in {tmp_path}, but of its limit of 64.0 KiB 60.0 KiB are in use and the "
            f"largest free piece has 4.0 KiB; raise the limit with --disk {tmp_path}:SIZE"
        )
        assert scratch.allocate(4 * KIB).offset == 60 * KIB


def test_a_full_disk_is_refused_with_needed_free_and_path_and_harms_nothing(tmp_path: Path) -> None:
    with ScratchFile(tmp_path, backend=Full(128 * KIB)) as scratch:
        kept = scratch.allocate(100 * KIB)
        scratch.write(kept, 0, pages(100 * KIB, 5), "kept")
        with pytest.raises(StoreError) as caught:
            scratch.allocate(40 * KIB)
        assert str(caught.value) == (
            f"40.0 KiB more of disk are needed in {tmp_path}, but 128.0 KiB are free (100.0 KiB are held by this run "
            "already); free space there or give another directory with --disk DIR"
        )
        back = pages(100 * KIB)
        scratch.read(kept, 0, back, "kept")
        assert set(back) == {5}


def test_a_small_rest_of_the_disk_is_still_used(tmp_path: Path) -> None:
    with ScratchFile(tmp_path, backend=Full(128 * KIB), step_bytes=1 << 20) as scratch:
        scratch.allocate(100 * KIB)
        assert scratch.reserved_bytes == 100 * KIB


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EDQUOT, "the disk quota is used up"), (errno.EIO, "Input/output error")]
)
def test_other_refusals_are_named(tmp_path: Path, number: int, words: str) -> None:
    with ScratchFile(tmp_path, backend=Full(0, number)) as scratch, pytest.raises(StoreError, match=words):
        scratch.allocate(1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("asked", ["allocate", "reserve"])
def test_a_full_disk_is_no_bad_input_before_a_run_and_in_it(tmp_path: Path, number: int, asked: str) -> None:
    with ScratchFile(tmp_path, backend=Full(0, number)) as scratch, pytest.raises(OffloadIOError) as caught:
        getattr(scratch, asked)(KIB)
    assert (caught.value.exit_status, caught.value.errno) == (6, number)


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOMEM])  # ENOMEM: ext4, of a block that is gone
def test_a_disk_that_fails_at_a_reservation_is_no_bad_input(tmp_path: Path, number: int) -> None:
    said = r"could not be reserved in .* look at the kernel log"
    with ScratchFile(tmp_path, backend=Full(0, number)) as scratch, pytest.raises(OffloadIOError, match=said) as caught:
        scratch.allocate(KIB)
    assert (caught.value.exit_status, caught.value.errno) == (6, number)


def test_a_file_size_limit_is_reported_at_reservation(tmp_path: Path) -> None:
    code = f"""
import resource
from memwall.errors import StoreError
from memwall.store.scratch import ScratchFile
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
scratch = ScratchFile({str(tmp_path)!r})
scratch.allocate(1 << 20)
try:
    scratch.allocate(4096)
except StoreError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert "cannot grow from 1.0 MiB by 4.0 KiB: a file size limit is in force" in result.stdout


def test_a_filesystem_that_is_really_full(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small filesystem here: {mounted.stderr.decode().strip()}")
    try:
        with ScratchFile(tmp_path, step_bytes=4096) as scratch:
            slot = scratch.allocate(512 * KIB)
            with pytest.raises(StoreError, match=r"768\.0 KiB more of disk are needed in .* but 512\.0 KiB are free"):
                scratch.allocate(768 * KIB)
            scratch.write(slot, 0, pages(512 * KIB, 1), "still fine")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_kill_leaves_no_file(tmp_path: Path) -> None:
    code = f"""
import sys, time
from memwall.store.scratch import ScratchFile
scratch = ScratchFile({str(tmp_path)!r})
scratch.reserve(1 << 20)
print("ready", flush=True)
time.sleep(30)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    assert list(tmp_path.iterdir()) == []


def test_without_o_tmpfile_the_name_is_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: str, flags: int, mode: int = 0o777, **more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no")
        return real(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", refuse)
    with ScratchFile(tmp_path) as scratch:
        slot = scratch.allocate(1)
        scratch.write(slot, 0, pages(4096, 1), "x")
        assert list(tmp_path.iterdir()) == []


def test_a_directory_that_vanished_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no scratch file can be created in .*gone: No such file or directory"):
        ScratchFile(tmp_path / "gone")


class Stuttering(SystemBackend):
    """Moves at most 4 KiB a call."""

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return super().pwrite(fd, data[:4096], offset)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        return super().pread(fd, buffer[:4096], offset)


def test_short_transfers_are_continued(tmp_path: Path) -> None:
    with ScratchFile(tmp_path, backend=Stuttering()) as scratch:
        slot, back = scratch.allocate(20 * KIB), pages(20 * KIB)
        scratch.write(slot, 0, pages(20 * KIB, 3), "x")
        scratch.read(slot, 0, back, "x")
        assert set(back) == {3}


class Buffered(SystemBackend):
    """A filesystem without O_DIRECT."""

    def open_scratch(self, directory: str) -> OpenScratch:
        return OpenScratch(fd=os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600), is_direct=False)


def test_without_o_direct_the_page_cache_serves(tmp_path: Path) -> None:
    with ScratchFile(tmp_path, backend=Buffered()) as scratch:
        slot, back = scratch.allocate(8192), pages(8192)
        scratch.write(slot, 0, pages(8192, 3), "x")
        scratch.read(slot, 0, back, "x")
        assert set(back) == {3}


class Truncated(SystemBackend):
    """A file that ends early."""

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        return 0


def test_the_end_of_the_file_is_an_error_with_its_place(tmp_path: Path) -> None:
    with ScratchFile(tmp_path, backend=Truncated()) as scratch:
        slot = scratch.allocate(4096)
        with pytest.raises(OffloadIOError, match="stopped making progress") as caught:
            scratch.read(slot, 0, pages(4096), "block 3")
    error = caught.value
    assert (error.path, error.offset, error.wanted_bytes, error.got_bytes, error.errno) == (
        str(tmp_path),
        0,
        4096,
        0,
        0,
    )
