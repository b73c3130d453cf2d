"""io_uring moves what the system's calls would, says what they would say, and leaves no ring behind."""

import errno
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memwall.errors import OffloadIOError
from memwall.store import uring as subject
from memwall.store.backend import IOBackend, SystemBackend
from memwall.store.scratch import ScratchFile, Slot
from memwall.store.transfer import TransferPool
from memwall.store.uring import Ring, UringBackend

KIB, MIB = 1 << 10, 1 << 20
pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def uring() -> UringBackend:
    try:
        return UringBackend()
    except OSError as error:
        pytest.skip(f"no io_uring here: {error}")


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = SystemBackend().open_scratch(os.fspath(tmp_path))
    yield opened.fd
    os.close(opened.fd)


def pages(num_bytes: int, fill: int = 0) -> memoryview:
    memory = mmap.mmap(-1, num_bytes)
    memory.write(bytes([fill]) * num_bytes)
    return memoryview(memory)


def num_rings() -> int:
    """Open in this process."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # that of the listing
            continue
    return links.count("anon_inode:[io_uring]")


def outcome(call: Callable[[], int]) -> str:
    """What a call came to: its bytes, or its error."""
    try:
        return f"{call()} bytes"
    except OSError as error:
        return f"{type(error).__name__} {error.errno}"


def put(backend: IOBackend, fd: int, num_bytes: int, offset: int) -> str:
    return outcome(lambda: backend.pwrite(fd, pages(round(num_bytes, -3) * 2 + MIB)[:num_bytes], offset))


def get(backend: IOBackend, fd: int, num_bytes: int, offset: int, skipped: int = 0) -> str:
    return outcome(lambda: backend.pread(fd, pages(num_bytes + 4096)[skipped : skipped + num_bytes], offset))


def test_what_one_engine_wrote_the_other_reads(uring: UringBackend, fd: int) -> None:
    engines, back = (uring, SystemBackend()), pages(3 * MIB)
    for writer, reader, fill in (*zip(engines, engines, (1, 2), strict=True), (*engines, 3), (*engines[::-1], 4)):
        assert writer.pwrite(fd, pages(3 * MIB, fill), MIB) == 3 * MIB
        assert reader.pread(fd, back, MIB) == 3 * MIB
        assert set(back) == {fill}


def test_each_result_is_that_of_the_systems_call(uring: UringBackend, fd: int, tmp_path: Path) -> None:
    """Whole, short at the end of the file, empty, out of line for O_DIRECT, negative, to a file not open for it."""
    plain = os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)
    found: list[list[str]] = []
    for backend in (SystemBackend(), uring):
        os.ftruncate(fd, 0)
        found.append(
            [
                put(backend, fd, 64 * KIB, 0),
                get(backend, fd, 64 * KIB, 0),
                get(backend, fd, 64 * KIB, 60 * KIB),
                get(backend, fd, 4096, MIB),
                put(backend, fd, 0, 0),
                get(backend, fd, 0, 0),
                put(backend, fd, 1000, 0),
                put(backend, fd, 4096, 17),
                get(backend, fd, 4096, 0, skipped=1),
                get(backend, fd, 4096, -4096),
                get(backend, plain, 4096, 0),
                put(backend, 1 << 20, 4096, 0),
            ]
        )
    os.close(plain)
    system, by_uring = found
    assert by_uring == system
    assert system[:6] == ["65536 bytes", "65536 bytes", "4096 bytes", "0 bytes", "0 bytes", "0 bytes"]
    assert "bytes" not in "".join(system[6:])


@pytest.mark.parametrize("engine", ["SystemBackend", "UringBackend"])
def test_at_a_limit_a_write_is_short_and_the_next_one_refused(engine: str, uring: UringBackend, tmp_path: Path) -> None:
    code = f"""
import mmap, resource
from memwall.errors import OffloadIOError
from memwall.store.backend import SystemBackend, write_fully
from memwall.store.uring import UringBackend
backend, data = {engine}(), memoryview(mmap.mmap(-1, 1 << 20))
fd = backend.open_scratch({os.fspath(tmp_path)!r}).fd
resource.setrlimit(resource.RLIMIT_FSIZE, (768 << 10, 768 << 10))
print(backend.pwrite(fd, data, 0))
try:
    backend.pwrite(fd, data, 768 << 10)
except OSError as error:
    print(type(error).__name__, error.errno)
try:
    write_fully(backend, fd, data, 0, path="DIR", label="x")
except OffloadIOError as error:
    print(error.got_bytes, error.errno)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.split("\n")[:3] == ["786432", f"OSError {errno.EFBIG}", f"786432 {errno.EFBIG}"]


def fill(scratch: ScratchFile, slot: Slot) -> None:
    for offset in range(0, slot.num_bytes, 64 * KIB):
        scratch.write(slot, offset, pages(64 * KIB), "x")


def test_a_full_disk_is_the_same_error(uring: UringBackend, tmp_path: Path) -> None:
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    image.touch()
    os.truncate(image, 4 * MIB)
    made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, check=False)
    mounted = subprocess.run(["mount", "-o", "loop", str(image), str(mount)], capture_output=True, check=False)
    if made.returncode or mounted.returncode:
        pytest.skip("cannot make and mount a loop filesystem here (needs root and a loop device)")
    moved: list[int] = []
    try:
        for backend in (SystemBackend(), uring):
            with ScratchFile(mount, backend=backend, step_bytes=4096) as scratch:
                slot = scratch.allocate(64 * KIB)
                slot.num_bytes = 16 * MIB  # beyond what was reserved, as where a filesystem breaks its promise
                with pytest.raises(OffloadIOError, match="the disk is full") as caught:
                    fill(scratch, slot)
            assert caught.value.errno == errno.ENOSPC
            moved.append(caught.value.offset)
        assert moved[0] == moved[1] > MIB
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_memory_that_is_read_only_is_written_too(uring: UringBackend, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    assert uring.pwrite(fd, memoryview(b"words"), 0) == 5
    assert (tmp_path / "file").read_bytes() == b"words"
    os.close(fd)


def test_the_memory_can_be_given_back_afterwards(uring: UringBackend, tmp_path: Path) -> None:
    fd, data = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR), bytearray(5)
    with memoryview(data) as view:
        uring.pwrite(fd, view, 0)
    data.extend(b"more")  # BufferError while somebody still points into it
    os.close(fd)


def test_several_requests_of_one_ring_are_told_apart(uring: UringBackend, fd: int) -> None:
    ring, blocks = Ring(4), [pages(64 * KIB, fill) for fill in range(4)]
    for tag, block in enumerate(blocks):
        ring.queue(fd, block, tag * 64 * KIB, tag, is_write=True)
    with pytest.raises(OSError, match="busy"):
        ring.queue(fd, blocks[0], 0, 4, is_write=True)
    assert sorted(ring.take() for _ in blocks) == [(tag, 64 * KIB) for tag in range(4)]
    back = pages(64 * KIB)
    for fill in range(4):
        uring.pread(fd, back, fill * 64 * KIB)
        assert set(back) == {fill}


def test_signals_that_arrive_meanwhile_change_nothing(uring: UringBackend, fd: int) -> None:
    num_signals, back = 0, pages(2 * MIB)

    def count(number: int, frame: object) -> None:
        nonlocal num_signals
        num_signals += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        num_rounds = 0
        while num_signals < 100:
            fill, num_rounds = num_rounds % 255 + 1, num_rounds + 1
            assert uring.pwrite(fd, pages(2 * MIB, fill), 0) == 2 * MIB
            assert uring.pread(fd, back, 0) == 2 * MIB
            assert back[0] == back[-1] == fill
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_threads_have_a_ring_each_that_ends_with_them(uring: UringBackend, tmp_path: Path) -> None:
    gc.collect()  # rings that errors of other tests hold
    before = num_rings()
    pool = TransferPool(ScratchFile(tmp_path, backend=uring), num_workers=3, block_bytes=64 * KIB)
    data, back = pages(4 * MIB, 7), pages(4 * MIB)
    slot = pool.scratch.allocate(4 * MIB)
    while num_rings() < before + 3:
        pool.write(slot, data).wait()
        pool.read(slot, back).wait()
        assert back == data
    pool.close()
    assert num_rings() == before


def test_a_forked_child_has_rings_of_its_own(uring: UringBackend, fd: int) -> None:
    uring.pwrite(fd, pages(MIB, 1), 0)
    child = os.fork()
    if child == 0:
        back, code = pages(MIB), 1
        try:
            is_equal = uring.pread(fd, back, 0) == MIB and set(back) == {1}
            code = 0 if is_equal and uring.pwrite(fd, pages(MIB, 2), MIB) == MIB and num_rings() == 1 else 2
        finally:
            os._exit(code)
    back = pages(MIB)
    while os.waitpid(child, os.WNOHANG) == (0, 0):  # its parent goes on meanwhile
        assert uring.pread(fd, back, 0) == MIB
        assert set(back) == {1}
    assert uring.pread(fd, back, MIB) == MIB
    assert set(back) == {2}


def test_two_threads_do_not_wait_for_each_other(uring: UringBackend, tmp_path: Path) -> None:
    """The lock of the interpreter is free while a request is under way: one that never ends holds up nobody."""
    pipe, other_end = os.pipe()
    waiting = threading.Thread(target=lambda: uring.pread(pipe, pages(4096), 0), daemon=True)
    waiting.start()
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    assert uring.pwrite(fd, pages(MIB), 0) == MIB
    os.write(other_end, b"x")
    waiting.join(10)
    assert not waiting.is_alive()
    for opened in (fd, pipe, other_end):
        os.close(opened)


def test_a_process_that_may_have_none_is_told(uring: UringBackend) -> None:
    code = """
import os, resource
from memwall.store.uring import UringBackend
lowest = os.dup(0)
os.close(lowest)
UringBackend()  # loads what it needs
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, lowest))
try:
    UringBackend()
except OSError as error:
    print(error.errno)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout == f"{errno.EMFILE}\n"


def test_a_thread_that_can_have_no_ring_now_uses_the_systems_calls(
    uring: UringBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a disk that io_uring was faster on WHEN descriptors are short later THEN the run goes on."""

    def refused(*_: object) -> Ring:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(subject, "Ring", refused)
    with TransferPool(ScratchFile(tmp_path, backend=uring)) as pool:
        slot = pool.scratch.allocate(MIB)
        pool.write(slot, pages(MIB, 7)).wait()
        found = pages(MIB)
        pool.read(slot, found).wait()
    assert bytes(found) == bytes([7]) * MIB


def test_without_the_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "load_library", lambda name, signatures: None)
    subject._library.cache_clear()
    try:
        with pytest.raises(OSError, match="was not built: there was no C compiler"):
            UringBackend()
    finally:
        subject._library.cache_clear()
