"""A disk that fails under a training step: a typed error naming the tensor, in forward or backward; never a hang."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memwall.apply.offload.engine import ActivationOffload
from memwall.errors import OffloadIOError, StoreError
from memwall.store.backend import SystemBackend
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

KIB = 1 << 10
pytestmark = pytest.mark.timeout(30)


class Faulty(SystemBackend):
    """Behaves until `num_good` calls of one kind have passed, then does `instead`."""

    def __init__(self, kind: str, num_good: int, instead: Callable[[int, memoryview, int], int]) -> None:
        self.kind, self.num_good, self.instead = kind, num_good, instead

    def _fails(self, kind: str) -> bool:
        self.num_good -= kind == self.kind
        return kind == self.kind and self.num_good < 0

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return self.instead(fd, data, offset) if self._fails("write") else super().pwrite(fd, data, offset)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        return self.instead(fd, buffer, offset) if self._fails("read") else super().pread(fd, buffer, offset)


def raising(number: int) -> Callable[[int, memoryview, int], int]:
    """A call that fails with `number`."""

    def call(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(number, os.strerror(number))

    return call


def nothing(fd: int, data: memoryview, offset: int) -> int:
    """No progress."""
    return 0


def flipped(fd: int, data: memoryview, offset: int) -> int:
    """A read with one wrong bit."""
    done = os.preadv(fd, [data], offset)
    data[0] ^= 4
    return done


def crashed(fd: int, data: memoryview, offset: int) -> int:
    """A bug in the backend."""
    raise RuntimeError("worker bug")


def step(offload: ActivationOffload) -> Tensor:
    """One forward and backward that saves 16 tensors of 64 KiB; the gradient."""
    x = torch.linspace(0, 1, 16384, requires_grad=True)
    with offload.hooks():
        y = x
        for _ in range(16):
            y = y.sin()
    y.sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("kind", "num_good", "instead", "error", "words"),
    [
        ("write", 5, raising(errno.EIO), OffloadIOError, r"writing float32\[16384\] .* Input/output error"),
        ("write", 40, raising(errno.ENOSPC), OffloadIOError, "No space left on device"),
        ("write", 5, nothing, OffloadIOError, "stopped making progress"),
        ("write", 5, crashed, StoreError, "died of RuntimeError: worker bug"),
        ("read", 0, raising(errno.EIO), OffloadIOError, r"reading float32\[16384\] .* Input/output error"),
        ("read", 9, nothing, OffloadIOError, "stopped making progress"),
        ("read", 9, flipped, OffloadIOError, r"float32\[16384\] came back different"),
        ("read", 9, crashed, StoreError, "died of RuntimeError: worker bug"),
    ],
)
def test_a_fault_stops_the_step_with_its_cause(
    tmp_path: Path,
    kind: str,
    num_good: int,
    instead: Callable[[int, memoryview, int], int],
    error: type[StoreError],
    words: str,
) -> None:
    scratch = ScratchFile(tmp_path, backend=Faulty(kind, num_good, instead))
    with (
        TransferPool(scratch, block_bytes=16 * KIB) as pool,
        ActivationOffload(pool, window_bytes=32 * KIB, min_bytes=1, is_excluded=lambda tensor: False) as offload,
        pytest.raises(error, match=words),
    ):
        step(offload)


def test_the_same_step_without_a_fault_is_right(tmp_path: Path) -> None:
    """What the cases above would compute: they fail because of their fault alone."""
    with (
        TransferPool(ScratchFile(tmp_path), block_bytes=16 * KIB) as pool,
        ActivationOffload(pool, window_bytes=32 * KIB, min_bytes=1, is_excluded=lambda tensor: False) as offload,
        ActivationOffload(None, is_excluded=lambda tensor: True) as plain,
    ):
        assert torch.equal(step(offload), step(plain))
        assert offload.bytes_written == 16 * 64 * KIB


def test_a_disk_too_small_stops_the_forward_and_frees_what_it_took(tmp_path: Path) -> None:
    scratch = ScratchFile(tmp_path, capacity_bytes=300 * KIB)
    with (
        TransferPool(scratch, block_bytes=16 * KIB) as pool,
        ActivationOffload(pool, window_bytes=32 * KIB, min_bytes=1, is_excluded=lambda tensor: False) as offload,
    ):
        with pytest.raises(StoreError, match=r"64\.0 KiB|20\.0 KiB more of disk are needed in .* of its limit"):
            step(offload)
        assert offload.num_held == 0
        pool.wait_for(lambda: scratch.used_bytes == 0)
        x = torch.ones(16384, requires_grad=True)
        with offload.hooks():  # a smaller step still fits
            y = x.sin().cos()
        y.sum().backward()
        assert offload.num_held == 0
