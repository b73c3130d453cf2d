"""Threads that move bytes do not take the core from the thread that trains when they wake up."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from memwall.rows import page_swaps
from memwall.rows.page_swaps import PageMover, PageSwaps
from memwall.store.buckets import BucketBuffer
from memwall.store.scheduling import schedule_as_batch
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")


def policies(threads: set[int]) -> set[int]:
    """How the system schedules threads, by their native ids."""
    return {os.sched_getscheduler(thread) for thread in threads}


def threads_now() -> set[int]:
    return {int(thread) for thread in os.listdir("/proc/self/task")}


def test_workers_of_a_pool_wait_for_their_turn(tmp_path: Path) -> None:
    with TransferPool(ScratchFile(tmp_path)) as pool:
        slot = pool.scratch.allocate(4096)
        buffer = BucketBuffer(4096)
        pool.write(slot, buffer.view(4096), label="a page", keep=buffer).wait()
        workers = {t.native_id or 0 for t in threading.enumerate() if t.name.startswith("memwall-disk")}
        assert os.SCHED_BATCH in policies(workers)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.parametrize("is_in_c", [True, False])
def test_threads_that_swap_pages_do_too(is_in_c: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_in_c:
        monkeypatch.setattr(page_swaps, "_library", lambda: None)
    elif page_swaps._library() is None:
        pytest.skip("this installation has no library for that, or the processor lacks an instruction")
    before, none, first = threads_now(), torch.tensor([-1]), torch.tensor([0])
    with ScratchFile(tmp_path) as scratch:
        slot, buffer = scratch.allocate(4096), BucketBuffer(4096)
        mover = PageMover(scratch, buffer.view(4096), 4096, lambda _: (slot, 0))
        mover.begin(PageSwaps(first, first, torch.tensor([slot.offset]), none, none, first.clone(), first)).finish()
        assert os.SCHED_BATCH in policies(threads_now() - before)
        mover.close()


def test_a_process_that_is_scheduled_otherwise_stays_so() -> None:
    def after(policy: int) -> int:
        os.sched_setscheduler(0, policy, os.sched_param(0))
        schedule_as_batch()
        return os.sched_getscheduler(0)

    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(after, os.SCHED_IDLE).result() == os.SCHED_IDLE


def refused(*_: object) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_bytes_are_moved_where_a_process_may_not_ask_how_it_is_scheduled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", refused)
    moved_by_a_worker(tmp_path)


def test_bytes_are_moved_where_the_system_has_no_such_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "SCHED_BATCH")
    moved_by_a_worker(tmp_path)


def moved_by_a_worker(directory: Path) -> None:
    with TransferPool(ScratchFile(directory), stall_seconds=2.0) as pool:
        slot = pool.scratch.allocate(4096)
        buffer = BucketBuffer(4096)
        pool.write(slot, buffer.view(4096), label="a page", keep=buffer).wait()
        assert pool.bytes_written == 4096
