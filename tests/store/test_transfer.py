"""Transfers by worker threads: complete and checked, or a typed error on the caller's thread; never a hang."""

import errno
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faulty_disk import Faulty, Gate

from memwall.errors import OffloadIOError, StoreError
from memwall.store import workers
from memwall.store.backend import round_up
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

BLOCK = 64 << 10
pytestmark = pytest.mark.timeout(30)


def pages(num_bytes: int, seed: int = 0) -> memoryview:
    """Page-aligned pseudo-random memory."""
    memory = mmap.mmap(-1, round_up(num_bytes))
    memory.write(
        torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)).numpy()
    )
    return memoryview(memory)[:num_bytes]


def fail_with(number: int) -> Callable[[int, int, memoryview, int], int]:
    """A call that always fails."""

    def call(count: int, fd: int, data: memoryview, offset: int) -> int:
        raise OSError(number, os.strerror(number))

    return call


def short_then_full(count: int, fd: int, data: memoryview, offset: int) -> int:
    """Half of the first block, then a full disk."""
    if count > 1:
        raise OSError(errno.ENOSPC, "full")
    return os.pwrite(fd, data[: len(data) // 2], offset)


def flip_a_bit(count: int, fd: int, buffer: memoryview, offset: int) -> int:
    """A read that succeeds with one wrong bit."""
    done = os.preadv(fd, [buffer], offset)
    buffer[done // 2] ^= 1
    return done


def half_then_nothing(count: int, fd: int, buffer: memoryview, offset: int) -> int:
    """A file cut short."""
    return os.preadv(fd, [buffer[: len(buffer) // 2]], offset) if count == 1 else 0


def drop_the_write(count: int, fd: int, data: memoryview, offset: int) -> int:
    """Acknowledged, never done."""
    return len(data)


def a_bug(count: int, fd: int, data: memoryview, offset: int) -> int:
    """Not an operating system's error at all."""
    raise ZeroDivisionError("in a worker")


def test_many_transfers_come_back_equal(tmp_path: Path) -> None:
    with TransferPool(ScratchFile(tmp_path), block_bytes=BLOCK) as pool:
        data = [pages(round_up(5000 * (n + 1)), seed=n) for n in range(40)]
        slots = [pool.scratch.allocate(len(item)) for item in data]
        writes = [pool.write(slot, item) for slot, item in zip(slots, data, strict=True)]
        for write in writes:
            write.wait()
        for slot, item in zip(slots, data, strict=True):
            back = pages(len(item), seed=99)
            pool.read(slot, back).wait()
            assert back == item
        assert pool.bytes_written == pool.bytes_read == sum(len(item) for item in data)


def test_a_read_queued_behind_its_write_waits_for_it(tmp_path: Path) -> None:
    gate = Gate()
    with TransferPool(ScratchFile(tmp_path, backend=gate.backend), block_bytes=BLOCK) as pool:
        data, back = pages(3 * BLOCK), pages(3 * BLOCK, seed=1)
        slot = pool.scratch.allocate(3 * BLOCK)
        write = pool.write(slot, data)
        read = pool.read(slot, back, after=write, is_urgent=True)
        assert not read.is_done
        gate.event.set()
        read.wait()
        assert back == data


@pytest.mark.parametrize(
    ("on_write", "number", "words"),
    [
        (fail_with(errno.EIO), errno.EIO, "look at the kernel log"),
        (fail_with(errno.EROFS), errno.EROFS, "becomes read-only when its device fails"),
        (fail_with(errno.ENOSPC), errno.ENOSPC, "the disk is full"),
        (fail_with(errno.EDQUOT), errno.EDQUOT, "quota"),
        (fail_with(errno.EFBIG), errno.EFBIG, "ulimit -f"),
        (short_then_full, errno.ENOSPC, r"32\.0 KiB of 64\.0 KiB were transferred; No space left on device"),
    ],
)
def test_a_failed_write_reaches_the_caller(
    tmp_path: Path, on_write: Callable[[int, int, memoryview, int], int], number: int, words: str
) -> None:
    with TransferPool(ScratchFile(tmp_path, backend=Faulty(on_write)), num_workers=1, block_bytes=BLOCK) as pool:
        write = pool.write(pool.scratch.allocate(BLOCK), pages(BLOCK), label="float32[16384]")
        with pytest.raises(OffloadIOError, match=words) as caught:
            write.wait()
        assert caught.value.errno == number
        assert "writing float32[16384]" in str(caught.value)
        with pytest.raises(OffloadIOError):  # also whoever comes later
            pool.write(pool.scratch.allocate(BLOCK), pages(BLOCK))


@pytest.mark.parametrize(
    ("on_read", "words"),
    [
        (fail_with(errno.EIO), "Input/output error"),
        (half_then_nothing, r"32\.0 KiB of 64\.0 KiB were transferred"),
        (flip_a_bit, "float32.16384. came back different"),
    ],
)
def test_a_failed_read_reaches_the_caller(
    tmp_path: Path, on_read: Callable[[int, int, memoryview, int], int], words: str
) -> None:
    with TransferPool(ScratchFile(tmp_path, backend=Faulty(on_read=on_read)), block_bytes=BLOCK) as pool:
        slot = pool.scratch.allocate(BLOCK)
        pool.write(slot, pages(BLOCK)).wait()
        with pytest.raises(OffloadIOError, match=words):
            pool.read(slot, pages(BLOCK), label="float32[16384]").wait()


def test_a_write_that_was_acknowledged_and_dropped_is_found_at_the_read(tmp_path: Path) -> None:
    with TransferPool(ScratchFile(tmp_path, backend=Faulty(drop_the_write)), block_bytes=BLOCK) as pool:
        slot = pool.scratch.allocate(BLOCK)
        pool.write(slot, pages(BLOCK)).wait()
        with pytest.raises(OffloadIOError, match="came back different"):
            pool.read(slot, pages(BLOCK)).wait()


def test_any_other_exception_in_a_worker_is_typed(tmp_path: Path) -> None:
    with TransferPool(ScratchFile(tmp_path, backend=Faulty(a_bug)), block_bytes=BLOCK) as pool:
        write = pool.write(pool.scratch.allocate(BLOCK), pages(BLOCK))
        with pytest.raises(StoreError, match="died of ZeroDivisionError: in a worker"):
            write.wait()


def test_blocks_of_a_transfer_are_done_by_all_threads_at_once(tmp_path: Path) -> None:
    gate = Gate()
    with TransferPool(ScratchFile(tmp_path, backend=gate.backend), num_workers=4, block_bytes=BLOCK) as pool:
        pool.write(pool.scratch.allocate(6 * BLOCK), pages(6 * BLOCK))
        deadline = time.monotonic() + 10
        while gate.num_waiting < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        gate.event.set()
    assert gate.num_waiting >= 4


def test_who_waits_sleeps_until_the_last_block_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "LOOK_SECONDS", 60.0)
    gate, num_looks = Gate(), 0
    with TransferPool(ScratchFile(tmp_path, backend=gate.backend), block_bytes=BLOCK) as pool:
        write = pool.write(pool.scratch.allocate(20 * BLOCK), pages(20 * BLOCK))

        def is_done() -> bool:
            nonlocal num_looks
            num_looks += threading.current_thread() is threading.main_thread()
            found = write.is_done
            gate.event.set()  # not before the first look, however slow this thread is
            return found

        gate.look = lambda: time.sleep(0.002)  # time enough to wake up in between
        pool.wait_for(is_done)
    assert num_looks == 2


def is_soon(is_so: Callable[[], bool]) -> bool:
    """Whether something becomes so within ten seconds, asked without waking any worker."""
    deadline = time.monotonic() + 10
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.001)
    return is_so()


def test_after_work_a_worker_looks_for_more_and_need_not_be_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_MAX_LOOKS", 1 << 30)
    with TransferPool(ScratchFile(tmp_path), block_bytes=BLOCK) as pool:
        state, num_wakes = pool._state, 0
        notify = state.work_added.notify

        def count(n: int = 1) -> None:
            nonlocal num_wakes
            num_wakes += threading.current_thread() is threading.main_thread()
            notify(n)

        monkeypatch.setattr(state.work_added, "notify", count)
        for _ in range(3):
            assert is_soon(lambda: state.has_looker)
            write = pool.write(pool.scratch.allocate(BLOCK), pages(BLOCK))
            assert is_soon(lambda: write.is_done)  # noqa: B023 -- asked within the round
        assert num_wakes == 0


def test_what_is_urgent_or_waited_for_does_not_wait_for_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_LOOK_SECONDS", 60.0)
    with TransferPool(ScratchFile(tmp_path), num_workers=1, block_bytes=BLOCK) as pool:
        assert is_soon(lambda: pool._state.has_looker)
        slot = pool.scratch.allocate(BLOCK)
        pool.write(slot, pages(BLOCK)).wait()
        assert is_soon(lambda: pool._state.has_looker)
        read = pool.read(slot, pages(BLOCK, seed=1), is_urgent=True)
        assert is_soon(lambda: read.is_done)


def test_a_worker_that_found_nothing_sleeps_until_it_is_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_MAX_LOOKS", 1)
    with TransferPool(ScratchFile(tmp_path), num_workers=1, block_bytes=BLOCK) as pool:
        for _ in range(3):
            assert is_soon(lambda: not pool._state.has_looker)
            time.sleep(0.01)
            write = pool.write(pool.scratch.allocate(BLOCK), pages(BLOCK))
            assert is_soon(lambda: write.is_done)  # noqa: B023 -- asked within the round


def test_a_disk_that_stands_still_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    released = threading.Event()

    def stuck(count: int, fd: int, data: memoryview, offset: int) -> int:
        released.wait(20)
        return len(data)

    pool = TransferPool(ScratchFile(tmp_path, backend=Faulty(stuck)), block_bytes=BLOCK, stall_seconds=0.2)
    write = pool.write(pool.scratch.allocate(BLOCK), pages(BLOCK))
    with pytest.raises(StoreError, match="has finished nothing for"):
        write.wait()
    released.set()
    pool.close()


def test_a_process_that_was_suspended_has_not_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN waits that end by the clock, as after Ctrl-Z, before the threads have run again."""
    released = threading.Event()

    def waiting(count: int, fd: int, data: memoryview, offset: int) -> int:
        released.wait(20)
        return len(data)

    pool = TransferPool(ScratchFile(tmp_path, backend=Faulty(waiting)), block_bytes=BLOCK, stall_seconds=60)
    num_suspended = 0
    wait = pool._state.work_done.wait

    def suspended(seconds: float) -> bool:
        nonlocal num_suspended
        num_suspended += 1
        if num_suspended < 5:
            return False
        released.set()
        return wait(seconds)

    monkeypatch.setattr(pool._state.work_done, "wait", suspended)
    pool.write(pool.scratch.allocate(BLOCK), pages(BLOCK)).wait()
    assert num_suspended >= 5
    pool.close()


def test_closing_drops_what_is_queued_and_ends_the_threads(tmp_path: Path) -> None:
    def slow(count: int, fd: int, data: memoryview, offset: int) -> int:
        time.sleep(0.05)
        return len(data)

    before = threading.active_count()
    pool = TransferPool(ScratchFile(tmp_path, backend=Faulty(slow)), block_bytes=BLOCK)
    write = pool.write(pool.scratch.allocate(200 * BLOCK), pages(200 * BLOCK))
    pool.close()
    pool.close()
    assert write.is_done
    assert threading.active_count() == before
    with pytest.raises(StoreError, match="has been closed"):
        pool.write(pool.scratch.allocate(BLOCK), pages(BLOCK))


def test_the_interpreter_ends_with_transfers_under_way(tmp_path: Path) -> None:
    code = f"""
import mmap
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool
pool = TransferPool(ScratchFile({str(tmp_path)!r}))
data = memoryview(mmap.mmap(-1, 64 << 20))
pool.write(pool.scratch.allocate(64 << 20), data)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=25, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_is_told_instead_of_waiting(tmp_path: Path) -> None:
    code = f"""
import os
from memwall.errors import StoreError
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool
pool = TransferPool(ScratchFile({str(tmp_path)!r}))
if os.fork() == 0:
    try:
        pool.check_usable()
    except StoreError as error:
        print(error, flush=True)
    raise SystemExit
os.wait()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=25, check=True)
    assert "was forked from it and has no transfer threads" in result.stdout
